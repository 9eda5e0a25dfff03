"""Runs of the evaluation: resumed runs equal whole ones, rows that cannot be run are kept as wrong, bad plans are refused."""

from dataclasses import replace
from pathlib import Path

import pytest

from minips import MinipsError
from minips.config import RopeConfig, SamplingParams
from minips.evaluation import runner
from minips.evaluation.attention_share import attention_sweep, shares
from minips.evaluation.records import read_rows
from minips.evaluation.rows import open_rows
from minips.evaluation.runner import Plan, evaluate, judge_again
from minips.evaluation.self_check import compare, self_check, wrong_frequencies
from minips.evaluation.sweep import spread, timing_sweep
from minips.evaluation.tasks import TASKS
from minips.synthesis import Synthesizer

from .evaluation_support import asked, given, task_of, text_engine

EXAMPLES = [given("rose"), asked("rain"), given("lily", ("x" * 9, "yy")), asked("snow", ("one", "two")), asked("hail")]
METHODS = ("parallel", "text", "best_of_n")


@pytest.fixture
def invented(monkeypatch):
    monkeypatch.setitem(TASKS, "invented", task_of(EXAMPLES))


def plan(**changes) -> Plan:
    return Plan(**{"tasks": ("invented",), "methods": METHODS, "data": None, "model": "tiny", "workers": (2,), **changes})


def results(rows):
    """What must not depend on batches and restarts."""
    return {
        (row["id"], row["m"]): {spec: (m["text"], m["scores"], m["answer_tokens"]) for spec, m in row["methods"].items()} for row in rows
    }


def test_a_run_keeps_one_record_a_row(invented, tmp_path):
    engine, said = text_engine(), []
    rows = evaluate(plan(), tmp_path, engine, say=said.append)
    assert [row["id"] for row in rows] == ["rose", "rain", "lily", "snow", "hail"] and engine.stats()["used_pages"] == 0
    row = rows[1]
    assert list(row["methods"]) == list(METHODS) and row["references"] == ["blue"] and row["group"] == "r" and row["m"] == 2
    method = row["methods"]["parallel"]
    assert method["nll"] > 0 and method["target_tokens"] == 4 and method["scores"].keys() == {"em", "f1"} and method["prefilled_tokens"] > 0
    assert sum(method["branch_tokens"]) <= method["reused_tokens"] and row["methods"]["best_of_n"]["nll"] is None
    assert [worker["tokens"] for worker in row["workers"]] == row["methods"]["text"]["branch_tokens"]
    assert rows[0]["workers"][0]["text"] == "a red bird" and rows[0]["workers"][0]["finish_reason"] == "given"
    assert "5 of 5" in said[-1]


@pytest.mark.parametrize("stop_after", [1, 3])
def test_a_resumed_run_equals_a_whole_one(invented, tmp_path, monkeypatch, stop_after):
    engine = text_engine()
    whole = results(evaluate(plan(batch=5), tmp_path / "whole", engine))
    real, made = runner._record, []

    def interrupted(*arguments):
        if len(made) == stop_after:
            raise KeyboardInterrupt
        made.append(1)
        return real(*arguments)

    monkeypatch.setattr(runner, "_record", interrupted)
    with pytest.raises(KeyboardInterrupt):
        evaluate(plan(batch=1), tmp_path / "cut", engine)
    assert len(read_rows(tmp_path / "cut")) == stop_after and engine.stats()["used_pages"] == 0
    monkeypatch.setattr(runner, "_record", real)
    assert results(evaluate(plan(batch=2), tmp_path / "cut", engine)) == whole
    assert results(evaluate(plan(batch=2), tmp_path / "cut", engine)) == whole, "a finished run is left alone"
    with pytest.raises(MinipsError, match="methods"):
        evaluate(plan(methods=("parallel",)), tmp_path / "cut", engine)


def test_rows_that_do_not_fit_are_wrong_and_do_not_stop_the_others(invented, tmp_path, monkeypatch):
    long = given("long", ("w" * 700, "short"))
    monkeypatch.setitem(TASKS, "invented", task_of([EXAMPLES[0], long, EXAMPLES[1]]))
    engine = text_engine(positions=600)
    rows = evaluate(plan(), tmp_path, engine)
    assert ["error" in row for row in rows] == [False, True, False] and engine.stats()["used_pages"] == 0
    failed = rows[1]["methods"]["parallel"]
    assert failed["finish_reason"] == "error" and failed["scores"]["em"] == 0 and "positions" in rows[1]["error"]


def test_workers_make_a_sweep(invented, tmp_path):
    rows = evaluate(plan(workers=(1, 3), rows=2, methods=("parallel",)), tmp_path, text_engine())
    assert {row["m"] for row in rows} == {1, 3} and len(rows) == 4
    counts = {(row["id"], row["m"]): len(row["workers"]) for row in rows}
    assert all(count == m for (name, m), count in counts.items() if name in ("rain", "hail"))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"tasks": ()}, "task is empty"),
        ({"tasks": ("gsm9k",)}, "did you mean gsm8k"),
        ({"methods": ("parallel", "parallel")}, "each once"),
        ({"methods": ("magic",)}, "method 'magic' is unknown"),
        ({"workers": (0,)}, "workers is 0"),
        ({"workers": (1000,)}, "at most 256"),
        ({"rows": 0}, "rows is 0"),
        ({"batch": 0}, "batch is 0"),
        ({"scoring": "kind"}, "scoring is 'kind'"),
        ({"temperature": -1}, "temperature is -1"),
        ({"answer_tokens": -2}, "answer tokens is -2"),
        ({"answer_tokens": 0}, "answer tokens is 0"),
        ({"worker_tokens": 0}, "worker tokens is 0"),
    ],
)
def test_bad_plans_are_refused(invented, tmp_path, changes, message):
    with pytest.raises(MinipsError, match=message):
        evaluate(plan(**changes), tmp_path / "run", text_engine())
    assert not (tmp_path / "run").exists()


# The self-check


def test_self_check_passes_the_identity_and_fails_the_broken_rotation():
    engine = text_engine()
    cases = {case.name: case for case in self_check(engine, rows=2, workers=(2,))}
    assert list(cases) == ["one branch, in place", "one branch, re-rotated", "control: wrong frequencies", "2 branches"]
    assert all(cases[name].kl_mean < 1e-6 and cases[name].top1 > 0.99 for name in list(cases)[:2])
    control = cases["control: wrong frequencies"]
    assert control.kl_mean > 1e-4 and control.passed and control.bound == "at least"
    assert engine.stats()["used_pages"] == 0 and engine.check()


def test_self_check_sees_a_rotation_that_forgets_the_scaling(monkeypatch):
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    engine = text_engine(rope_scaling=scaling)
    assert wrong_frequencies(engine.config.rope) == RopeConfig(theta=10000.0)
    assert all(case.passed for case in self_check(engine, rows=1, workers=()))
    from minips.evaluation import self_check as module

    monkeypatch.setattr(module, "wrong_frequencies", lambda rope: rope)  # a control that is right must be noticed
    assert not self_check(engine, rows=1, workers=())[2].passed


def test_comparison_against_sums_by_hand():
    import torch

    plain, merged = torch.tensor([[0.0, 1.0, 2.0]]), torch.tensor([[1.0, 0.5, 0.0]])
    kl, same = compare(merged, plain)
    p, q = plain[0].softmax(0), merged[0].softmax(0)
    assert float(kl) == pytest.approx(float(sum(p[i] * (p[i].log() - q[i].log()) for i in range(3))), rel=1e-5) and not same.item()
    assert float(compare(plain, plain)[0]) == 0


# Attention shares and the timing sweep


def test_attention_without_preferences_is_shared_by_length():
    engine = text_engine()
    for layer in engine.model.model.layers:
        layer.self_attn.q_proj.weight.data.zero_()
    row = open_rows(engine, task_of(EXAMPLES), EXAMPLES[:1], 3, SamplingParams(max_tokens=4), 0)[0]
    with Synthesizer(engine).merge(row.branches, consume=False) as context:
        ids = engine.prompts.encode(row.example.prompt, "continuation")
        found = shares(context, ids)
        before, lengths = context.branch.num_cached, context.branch_tokens
        per_token = sum(1 / (before + at + 1) for at in range(len(ids))) / len(ids)
        expected = [(before - sum(lengths)) * per_token, *(length * per_token for length in lengths)]
        for layer in found:
            assert layer == pytest.approx([*expected, 1 - sum(expected)], abs=1e-4)
        again = shares(context, ids)
    assert again == found
    row.close()
    assert engine.stats()["used_pages"] == 0 and engine.check()


def test_attention_sweep_keeps_means_by_layer(invented):
    engine = text_engine()
    too_long = replace(EXAMPLES[1], prefix="x" * 5000)
    data = attention_sweep(engine, plan(workers=(2, 3)), lambda m: [EXAMPLES[1], too_long, EXAMPLES[4]])
    assert [entry["m"] for entry in data["sweep"]] == [2, 3] and engine.stats()["used_pages"] == 0
    for entry in data["sweep"]:
        for layer in range(2):
            assert entry["prefix"][layer] + entry["self"][layer] + sum(entry["branches"][layer]) == pytest.approx(1, abs=1e-6)
            assert 0 < entry["entropy"][layer] <= entry["max_entropy"] + 1e-9
    two_passages = attention_sweep(engine, plan(workers=(3, 4)), lambda m: [EXAMPLES[2]])["sweep"]
    assert [(entry["m"], len(entry["branches"][0])) for entry in two_passages] == [(2, 2)]


def test_timing_sweep_measures_both_sides_and_leaves_out_what_does_not_fit():
    engine, said = text_engine(positions=512), []
    entries = timing_sweep(engine, workers=(1, 2, 8), lengths=(40,), repeats=3, say=said.append)
    found = {(entry["m"], entry["method"]) for entry in entries}
    assert found == {(1, "parallel"), (1, "text"), (2, "parallel"), (2, "text"), (8, "parallel")}, "8 x 40 tokens of text are too many"
    assert any("m = 8, 40 tokens, text: left out" in line for line in said)
    for entry in entries:
        assert entry["ttft"]["n"] == 3 and entry["end_to_end"] > entry["ttft"]["median"] > 0 and entry["peak_mb"] > 0 and entry["kv_mb"] > 0
    assert engine.stats()["used_pages"] == 0
    assert spread([3.0, 1.0, 2.0])["median"] == 2.0 and spread([3.0, 1.0, 2.0])["p95"] == 3.0


def test_faults_that_are_no_rows_fault_end_the_run(invented, tmp_path, monkeypatch):
    engine = text_engine()
    with pytest.raises(MinipsError, match="/no/such/folder"):
        evaluate(plan(adapter="/no/such/folder"), tmp_path / "adapter", engine)
    assert not (tmp_path / "adapter").exists()

    def lost(*arguments):
        raise MinipsError("the database went away")

    monkeypatch.setattr(runner, "run_method", lost)
    with pytest.raises(MinipsError, match="went away"):
        evaluate(plan(), tmp_path / "lost", engine)
    assert read_rows(tmp_path / "lost") == [] and engine.stats()["used_pages"] == 0


def test_tools_that_are_not_to_be_had_are_refused_before_the_model_is_loaded(tmp_path, monkeypatch):
    monkeypatch.delenv("MINIPS_DSN", raising=False)
    data = Path(__file__).parent / "data"
    with pytest.raises(MinipsError, match="database_synthetic"):
        evaluate(plan(tasks=("database_diagnosis",), data=str(data)), tmp_path / "run", lambda: pytest.fail("loaded"))
    with pytest.raises(MinipsError, match="no such folder"):
        evaluate(plan(tasks=("gsm8k",), data=str(tmp_path / "none")), tmp_path / "run", lambda: pytest.fail("loaded"))
    assert not (tmp_path / "run").exists()


def test_workers_that_stop_at_once_leave_the_prefix_to_read(invented, tmp_path, monkeypatch):
    def silent(engine, branches, each):
        for branch in branches:
            engine.encode([branch], [[]])
        return branches

    engine = text_engine()
    monkeypatch.setattr(type(engine), "decode", silent)
    methods = ("parallel", "single", "text", "text_turn", "ape")
    rows = evaluate(plan(methods=methods, rows=5), tmp_path, engine)
    row = next(row for row in rows if row["id"] == "rain")
    assert "error" not in row and row["methods"]["parallel"]["branch_tokens"] == [0, 0] and row["methods"]["parallel"]["answer_tokens"] > 0
    assert engine.stats()["used_pages"] == 0


def test_answers_can_be_judged_anew(invented, tmp_path, monkeypatch):
    before = evaluate(plan(), tmp_path, text_engine())
    monkeypatch.setitem(TASKS, "invented", task_of(EXAMPLES, score=lambda text, example, rules: {"em": 0.25}))
    assert judge_again(plan(), tmp_path) == 5
    after = read_rows(tmp_path)
    assert {method["scores"]["em"] for row in after for method in row["methods"].values()} == {0.25}
    assert results(before).keys() == results(after).keys()
    assert [row["methods"]["text"]["text"] for row in before] == [row["methods"]["text"]["text"] for row in after]
    assert len(evaluate(plan(), tmp_path, text_engine())) == 5, "a judged run can be gone on with"
    with pytest.raises(MinipsError, match="nothing to judge"):
        judge_again(plan(), tmp_path / "none")
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("other", [[replace(EXAMPLES[0], question="What else?"), *EXAMPLES[1:]], EXAMPLES[1:]])
def test_a_run_of_other_data_is_not_gone_on_with(invented, tmp_path, monkeypatch, other):
    evaluate(plan(rows=5), tmp_path, text_engine())
    before = (tmp_path / "preds.jsonl").read_bytes()
    monkeypatch.setitem(TASKS, "invented", task_of(other))
    with pytest.raises(MinipsError, match="row rose: this run was made of other data"):
        judge_again(plan(), tmp_path)
    if len(other) == 5:
        with pytest.raises(MinipsError, match="row rose: this run was made of other data"):
            evaluate(plan(), tmp_path, text_engine())
    assert (tmp_path / "preds.jsonl").read_bytes() == before
