"""The speed benches: what they count, how they take time (FAULTS 89 to 91), and each of them once on a tiny model beside transformers."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from minips import MinipsError
from minips.config import ModelConfig
from minips.weights import expected_shapes

from .support import prompt_ids, tiny_engine

BENCH = Path(__file__).parent.parent / "bench"
sys.path.insert(0, str(BENCH))

import decode
import divergence
import end_to_end
import measure
import memory
import models
import speed
import ttft
from plots import bars_of, write_ttft_plot
from verdicts import verdicts

TINY = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 97, "hidden_size": 48, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512, "rope_theta": 10000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    models.write_random_model(folder, TINY, ModelConfig.from_dict(TINY))
    return folder


@pytest.fixture
def bench(tiny_folder, tmp_path, capsys):
    """Run a bench on the tiny model -> (what it wrote as JSON, what it printed)."""

    def run(module, *arguments):
        path = tmp_path / f"{module.__name__}.json"
        code = module.main(["--model", str(tiny_folder), "--dtype", "float32", "--quick", *arguments, "--json", str(path)])
        captured = capsys.readouterr()
        assert code == 0, captured.err
        return json.loads(path.read_text()), captured.out

    return run


# Counting


def shapes(size, **changes):
    return ModelConfig.from_dict({**models.SHAPES[size], **changes})


def test_random_shapes_have_the_sizes_of_their_models():
    found = {size: sum(torch.Size(shape).numel() for shape in expected_shapes(shapes(size)).values()) for size in models.SHAPES}
    assert found == {"135m": 134_515_008, "1b": 1_235_814_400, "3b": 3_212_749_824, "8b": 8_030_261_248}


@pytest.mark.parametrize(
    ("size", "limits"),
    [("135m", {512: 13.6, 1024: 23.7, 2048: 41.5, 4096: 74.9}), ("8b", {512: 16.4, 1024: 30.8, 2048: 57.4, 4096: 104.5})],
)
def test_the_limit_is_the_ratio_of_the_two_prefills_with_attention(size, limits):
    config = shapes(size)
    for length, limit in limits.items():
        text, parallel = measure.prefill_flops(config, 4 * length + 128), measure.prefill_flops(config, 128, 4 * length)
        assert text / parallel == pytest.approx(limit, rel=0.005)


def test_bytes_of_a_token_count_the_kv_heads():
    assert [measure.kv_bytes_per_token(shapes(size)) for size in models.SHAPES] == [23040, 32768, 114688, 131072]
    assert measure.weight_bytes(shapes("135m")) == pytest.approx(2 * 134_515_008, rel=1e-3)  # norms are left out
    layers, head = 106_168_320, 49152 * 576
    assert [measure.weight_bytes(shapes("135m"), "int4", rows) for rows in (1, 4, 8)] == [
        layers * 5 / 8 + head,
        layers * 5 / 8 + 2 * head,  # the head's codes are int8, which fewer rows use
        2 * (layers + head),
    ]
    assert measure.weight_bytes(shapes("8b"), "int4", 8) < 0.36 * measure.weight_bytes(shapes("8b"))  # no bf16 form beside


# Taking time


def test_rivals_alternate_and_the_first_call_of_each_is_kept_apart():
    order = []

    def call(name):
        def once(turn):
            order.append(f"{name}{turn}")
            return {"seconds": float(turn)}

        return once

    found = measure.alternate({"a": call("a"), "b": call("b")}, repeats=3, budget=60)
    assert order == ["a0", "b0", "a1", "b1", "b2", "a2", "a3", "b3"]
    assert found["a"] == {"cold": {"seconds": 0.0}, "warm": [{"seconds": 1.0}, {"seconds": 2.0}, {"seconds": 3.0}]}
    assert len(measure.alternate({"a": call("a")}, repeats=9, budget=0)["a"]["warm"]) == 1  # at least one


def test_spread_and_fit():
    found = measure.spread([5.0, 1.0, 2.0, 4.0, 3.0])
    assert (found["median"], found["p95"], found["min"], found["max"], found["n"]) == (3, 5, 1, 5, 5) and found["raw"][0] == 5
    x, y = [1, 2, 3, 4, 5], [7, 1, 8, 2, 8]
    solved = measure.fit({"1": [1] * 5, "x": x, "y": y}, [0.5 + 2e-6 * a + 3 * b for a, b in zip(x, y)])
    assert solved["coefficients"] == pytest.approx({"1": 0.5, "x": 2e-6, "y": 3}, abs=1e-7) and solved["r2"] == pytest.approx(1)
    with pytest.raises(MinipsError, match="3 coefficients needs as many cases, found 2"):
        measure.fit({"1": [1, 1], "x": [1, 2], "y": [2, 1]}, [1, 2])


class FakeEngine:
    """Prefill takes 2 s, each step of decoding 0.1 s of a made-up clock; the last token is fed once more, as the real one does."""

    def __init__(self, missing=0):
        self.now, self.missing = 0.0, missing

    def prefill(self, ids):
        self.now += 2.0
        return SimpleNamespace(close=lambda: None, output_ids=[])

    def decode(self, branches, params, on_token):
        for step in range(params.max_tokens):
            self.now += 0.1 if step else 0.0
            for row, branch in enumerate(branches):
                if step < params.max_tokens - self.missing:
                    branch.output_ids.append(7)
                    on_token(row, 7, "x y z")
        self.now += 0.1


def test_prefill_and_decode_speeds_are_apart_and_count_ids(monkeypatch):  # FAULTS 91
    engine = FakeEngine()
    monkeypatch.setattr(decode, "time", SimpleNamespace(perf_counter=lambda: engine.now))
    figures, _ = decode.decode_once(engine, [prompt_ids(512)], 128)
    assert 512 / figures["prefill"] == pytest.approx(256) and figures["tokens"] == 128
    case = {"m": 1, "tokens": 128, "methods": {"minips": {"warm": [figures]}}}
    assert decode.rate(case, "minips") == pytest.approx(127 / 12.7)
    figures, _ = decode.decode_once(engine, [prompt_ids(512), prompt_ids(512, 1)], 128)
    assert decode.rate({**case, "m": 2, "methods": {"minips": {"warm": [figures]}}}, "minips") == pytest.approx(2 * 127 / 12.7)
    engine = FakeEngine(missing=1)
    with pytest.raises(MinipsError, match="127 ids in 127 calls, expected 128"):
        decode.decode_once(engine, [prompt_ids(512)], 128)


# The benches


def test_ttft_of_all_methods_with_cold_and_warm_apart(bench):  # FAULTS 89, 90
    data, said = bench(ttft, "--lengths", "8,24", "--workers", "2", "--prompt-tokens", "4,8", "--fit", "--mappers", "low_rank,normalize")
    assert [(case["m"], case["length"], case["u"]) for case in data["cases"]] == [(2, 8, 4), (2, 8, 8), (2, 24, 4), (2, 24, 8)]
    assert set(data["model"]["load_s"]) == {"minips", "transformers"}
    for case in data["cases"]:
        assert list(case["methods"]) == ["parallel", "text", "official", "transformers", "parallel, normalize"]
        for method, found in case["methods"].items():
            for figures in (found["cold"], *found["warm"]):
                assert 0 < figures["ttft"] < 60
                if method != "transformers":
                    parts = sum(figures[name] for name in (*ttft.PARTS, "other"))
                    assert parts == pytest.approx(figures["ttft"]) and figures["other"] >= 0
            if method.startswith("parallel") or method == "official":
                assert found["cold"]["map"] > 0
    config = ModelConfig.from_dict(TINY)
    expected = measure.prefill_flops(config, 16 + 48 + 8) / measure.prefill_flops(config, 8, 16 + 48)
    assert data["cases"][-1]["limit"] == pytest.approx(expected)
    assert "stops when the first new token's id is on the host" in said and "TTFT(parallel) =" in said and "first call" in said


def test_ttft_leaves_out_what_does_not_fit_and_says_so(bench):
    data, said = bench(ttft, "--lengths", "64", "--workers", "8", "--prompt-tokens", "4", "--no-rival")
    assert list(data["cases"][0]["methods"]) == ["parallel", "official"]
    assert data["cases"][0]["left_out"]["text"] == "533 positions, the model's limit is 512" and "no text: 533 positions" in said


def test_no_prompt_is_used_twice(tiny_folder, monkeypatch):
    seen = []
    own = models.Rival.first_token
    monkeypatch.setattr(models.Rival, "first_token", lambda self, ids: seen.append(tuple(ids)) or own(self, ids))
    arguments = ["--model", str(tiny_folder), "--lengths", "8", "--methods", "transformers", "--prompt-tokens", "4,4"]
    assert ttft.main([*arguments, "--dtype", "float32", "--quick"]) == 0
    assert len(seen) == len(set(seen)) == 4 and {len(ids) for ids in seen} == {16 + 4 * 8 + 4}


def test_decode_beside_transformers_agrees_in_fp32(bench):
    data, said = bench(decode, "--workers", "1,3", "--context", "20", "--tokens", "6", "--prefill", "16,40")
    assert [case["first_divergence"] for case in data["cases"]] == [[6, 6], [6] * 6]  # every row of both turns, to the end
    assert all(found["warm"][0]["tokens"] == 6 * case["m"] for case in data["cases"] for found in case["methods"].values())
    assert [case["length"] for case in data["prefill"]] == [16, 40] and "6 of 6, shortest 6" in said
    shared, _ = bench(decode, "--workers", "2", "--context", "20", "--shared", "12", "--tokens", "6", "--prefill", "16")
    assert shared["cases"][0]["first_divergence"] == [6] * 4


def test_decode_growth(bench, monkeypatch):
    monkeypatch.setattr(decode, "CONTEXTS", (16, 64, 128))
    data, said = bench(decode, "--growth", "--context", "32", "--tokens", "4", "--prefill", "16")
    growth = data["growth"]
    assert [len(growth[what]) for what in ("pool", "page", "context")] == [3, 3, 3] and "attended MB" in said
    assert set(growth["fit"]["coefficients"]) == {"1", "attended bytes"}


def test_end_to_end_with_stragglers(bench):
    data, said = bench(end_to_end, "--worker-tokens", "8", "--answer-tokens", "3", "--spread", "0.5", "--prompt-tokens", "4")
    case = data["cases"][0]
    assert case["lengths"] == [4, 7, 9, 12] and "4, 7, 9, 12" in said
    for found in case["methods"].values():
        figures = found["warm"][0]
        assert figures["whole"] == pytest.approx(figures["workers"] + figures["synthesis"])
        assert figures["slowest"] >= figures["mean_worker"] > 0 and figures["ttft"] < figures["synthesis"]


def test_peak_bytes_sees_what_is_held_at_once():
    before = torch.zeros(1 << 20, dtype=torch.uint8)

    def call():
        first = before + 1  # 1 MiB
        second = torch.cat((first, first))  # and 2 MiB
        del first
        return second[:1].clone()

    assert 3 << 20 <= memory.peak_bytes(call, torch.device("cpu")) < (3 << 20) + 4096


def test_memory_by_formula_and_as_allocated(bench):
    data, said = bench(memory, "--workers", "2", "--lengths", "32", "--mappers", "none,linear")
    token = data["token"]
    assert token["formula"] == token["allocated"] == 2 * 2 * 2 * 16 * 4 and token["without_heads"] == 256
    assert [case["pages"] for case in data["cases"]] == [64 * 512] * 2 and all(case["copied_tokens"] == 0 for case in data["cases"])
    assert 0 < data["cases"][0]["peak"] < data["cases"][1]["peak"] and "512 bytes" in said
    coded, _ = bench(memory, "--workers", "2", "--lengths", "32", "--mappers", "none", "--kv-dtype", "int8")
    assert coded["token"]["formula"] == coded["token"]["allocated"] == 2 * 2 * 2 * (16 + 4)


def test_divergence_is_nothing_between_equals_and_something_between_others():
    rows = [prompt_ids(24, seed) for seed in range(2)]
    one, same, other = (divergence.step_logits(tiny_engine(seed=seed), rows) for seed in (0, 0, 1))
    assert len(one) == 8 and one[0].shape == (2, 97)
    assert all(torch.equal(a, b) for a, b in zip(one, same)) and not torch.allclose(one[0], other[0])


# Refusals


def refused(capsys, module, *arguments):
    assert module.main(list(arguments)) == 1
    lines = [line for line in capsys.readouterr().err.splitlines() if "error:" in line]
    assert len(lines) == 1
    return lines[0]


def test_random_weights_that_memory_cannot_hold_are_refused(capsys, monkeypatch):
    monkeypatch.setattr(models, "free_memory", lambda: 20e9)
    assert "--random 8b needs 34.3 GB of memory, 20.0 GB are free; --no-rival halves it" in refused(capsys, ttft, "--random", "8b")


def test_a_missing_rival_is_named(tiny_folder, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    said = refused(capsys, decode, "--model", str(tiny_folder))
    assert said.endswith("transformers is not installed, and is the rival here; pip install transformers, or --no-rival")


@pytest.mark.parametrize(
    ("module", "arguments", "message"),
    [
        (ttft, ["--methods", "paralel"], "--methods is 'paralel', expected some of parallel,text,official,transformers"),
        (ttft, ["--mappers", "cubic"], "--mappers has cubic, expected some of none"),
        (ttft, ["--plot", "x.jpg"], "--plot is x.jpg, expected a name that ends in .png"),
        (decode, ["--tokens", "1"], "--tokens is 1"),
        (end_to_end, ["--spread", "1"], "--spread is 1.0, expected from 0 to below 1"),
        (memory, ["--max-positions", "64"], "--max-positions is for --random"),
        (divergence, ["--model", "no-such-model-here"], "'no-such-model-here' was not found"),
    ],
)
def test_wrong_arguments_are_one_line(capsys, module, arguments, message):
    assert message in refused(capsys, module, "--quick", *arguments)


# Everything together


def test_speed_writes_its_section_between_the_marks(bench, tmp_path, monkeypatch):
    for name, module, arguments in (
        ("ttft", ttft, ["--lengths", "16", "--prompt-tokens", "128"]),
        ("end-to-end", end_to_end, ["--worker-tokens", "4", "--answer-tokens", "2"]),
        ("memory", memory, ["--workers", "2", "--lengths", "16"]),
    ):
        data, _ = bench(module, *arguments)
        (tmp_path / f"{name}.json").write_text(json.dumps(data))
    results = tmp_path / "RESULTS.md"
    results.write_text("# Results\n\nbefore\n")
    monkeypatch.setattr(speed, "RESULTS", results)
    monkeypatch.setattr(speed, "PLOTS", tmp_path / "plots")
    assert speed.main(["--only", "none", "--out", str(tmp_path)]) == 0
    first = results.read_text()
    assert first.startswith("# Results\n\nbefore\n") and first.count(speed.START) == first.count(speed.END) == 1
    assert first.count("Clock:") == 1 and "### Memory" in first and "end to end, sequential + text / parallel, m = 4" in first
    results.write_text(first + "after\n")
    assert speed.main(["--only", "none", "--out", str(tmp_path)]) == 0
    assert results.read_text() == first + "after\n"


def test_steps_that_are_there_with_the_same_arguments_are_not_run_again(tmp_path):
    path = tmp_path / "memory.json"
    assert not speed.is_done(path, [])
    path.write_text(json.dumps({"command": ["--workers", "2", "--json", "x"]}))
    assert speed.is_done(path, ["--workers", "2"]) and not speed.is_done(path, ["--workers", "4"]) and not speed.is_done(path, [])
    for name in (*speed.STEPS, *speed.EXTRA):
        bench_name = (speed.STEPS | speed.EXTRA)[name][1]
        parser = sys.modules[bench_name].build_parser()
        (
            parser.add_argument("--repeats", type=int),
            parser.add_argument("--budget", type=float),
            parser.add_argument("--quick", action="store_true"),
        )
        assert parser.parse_args(speed.arguments_of(name, quick=True)).quick and parser.parse_args(speed.arguments_of(name, quick=False))


def test_verdicts_set_measured_values_against_the_marks(tmp_path):
    def found(**seconds):
        return {"cold": None, "warm": [{**dict.fromkeys(("rerotate", "map"), 0.0), **seconds}]}

    methods = {"text": found(ttft=12.0), "parallel": found(ttft=1.0, map=0.2), "transformers": found(ttft=11.0)}
    case = {"m": 4, "length": 512, "u": 128, "limit": 13.6, "methods": methods}
    rows = {row[0].split(",")[0]: row[1:] for row in verdicts({"ttft": {"cases": [case]}})}
    assert rows["TTFT text / parallel"] == ["12.0", "at least 10.9", "yes"]
    assert rows["TTFT transformers / text"] == ["0.92", "at least 1.00", "NO"]
    assert rows["TTFT of the same text in transformers / parallel"] == ["11.0", "at least 10.9", "yes"]
    assert rows["re-rotate + map in TTFT"] == ["20.0%", "at most 10.0%", "NO"]
    assert bars_of({"cases": [case]}) == {512: {"ours": 12.0, "FLOP limit": 13.6, "published (GPU)": 2.5}}
    pytest.importorskip("matplotlib")
    write_ttft_plot(tmp_path / "bars.png", {"cases": [case], "model": {"name": "a model"}})
    assert (tmp_path / "bars.png").read_bytes().startswith(b"\x89PNG")
