"""Workflows: what is checked, what is filled in, seeds, methods, and turns in batches."""

import json
import random

import pytest

from minips import MinipsError, SamplingParams, Synthesizer
from minips.config import MergeOptions
from minips.examples import __path__ as examples_path
from minips.results import WorkerOutput
from minips.chat import SUMMARY_PROMPT
from minips.running import Span, run_workflow, vote, with_summaries
from minips.screen import Screen
from minips.shipped import DEFAULT_ADAPTER
from minips.workflow import EXAMPLES, TOP_FIELDS, complete, example_names, read_workflow, spread, workers_of
from minips.workflow_checks import (
    BRANCH_FIELDS,
    ENGINE_FIELDS,
    MERGE_VALUES,
    MESSAGE_FIELDS,
    SAMPLING_FIELDS,
    TURN_FIELDS,
)
from tests.support import OWNS, PREFIX, U, prompt_ids, tiny_engine

SCHEMA = json.loads((EXAMPLES / "workflow.schema.json").read_text())
SILENT = Screen(None, None)
IDS = {"prefix": PREFIX, "branches": [{"prompt": own} for own in OWNS], "synthesizer": {"prompt": U}}


def run(engine, data, **more):
    data = complete({**data, **more})
    options = data["synthesizer"]["merge"]
    return run_workflow(engine, Synthesizer(engine, options=options), data, SILENT)


MISTAKES = [
    ({}, "prefix is missing"),
    ({"prefix": 3}, "prefix is 3, expected a string, a list of messages"),
    ({"prefix": " "}, "prefix is empty"),
    ({"prefix": []}, "prefix is a list of 0, expected at least one message"),
    ({"prefix": [{"role": "usr", "content": "x"}]}, "prefix[0].role is 'usr', expected one of system, user, assistant, tool; did you mean 'user'?"),
    ({"prefix": [{"role": "user"}]}, "prefix[0].content is null, expected a string"),
    ({"prefix": [{"role": "user", "content": "x", "name": "y"}]}, "prefix[0]: unknown field 'name'"),
    ({"prefix": "x", "branchs": []}, "unknown field 'branchs'; did you mean 'branches'?"),
    ({"prefix": "x", "branches": []}, "branches is a list of 0, expected a list of at least one branch"),
    ({"prefix": "x", "branches": {}}, "branches is an object"),
    ({"prefix": "x", "branches": ["y"]}, "branches[0] is 'y', expected an object"),
    ({"prefix": "x", "branches": [{}, {}, {"sampling": {"top_p": 1.5}}]}, "branches[2].sampling.top_p is 1.5, expected a number from 0 to 1"),
    ({"prefix": "x", "branches": [{"sampling": {"max_token": 3}}]}, "branches[0].sampling: unknown field 'max_token'; did you mean 'max_tokens'?"),
    ({"prefix": "x", "branches": [{"count": 0}]}, "branches[0].count is 0, expected an integer from 1 to 65536"),
    ({"prefix": "x", "branches": [{"count": True}]}, "branches[0].count is true"),
    ({"prefix": "x", "branches": [{"output": ""}]}, "branches[0].output is empty"),
    ({"prefix": "x", "branches": [{"output": 5}]}, "branches[0].output is 5, expected a string or a list of token ids"),
    ({"prefix": "x", "branches": [{"turns": []}]}, "branches[0].turns is a list of 0"),
    ({"prefix": "x", "branches": [{"turns": [{}], "prompt": "y"}]}, "branches[0]: has both turns and prompt"),
    ({"prefix": "x", "branches": [{"turns": [{}], "output": "y"}]}, "branches[0]: has both turns and output"),
    ({"prefix": "x", "branches": [{"turns": [{}, {"promt": "y"}]}]}, "branches[0].turns[1]: unknown field 'promt'; did you mean 'prompt'?"),
    ({"prefix": "x", "branches": [{"output": "y", "sampling": {"seed": 1}}]}, "branches[0]: has both output and sampling"),
    ({"prefix": "x", "branches": [{"prompt": [{"role": "tool", "content": 4}]}]}, "branches[0].prompt[0].content is 4, expected a string"),
    ({"prefix": "x", "sampling": {"seed": -1}}, "sampling.seed is -1, expected an integer from 0 to 2**63 - 1"),
    ({"prefix": "x", "sampling": {"seed": 2**63}}, "sampling.seed is 9223372036854775808, expected an integer from 0 to 2**63 - 1"),
    ({"prefix": "x", "sampling": {"temperature": None}}, "sampling.temperature is null"),
    ({"prefix": "x", "sampling": {"temperature": 1e300}}, "sampling.temperature is 1e+300, expected a number from 0 to 1000000"),
    ({"prefix": "x", "sampling": {"repetition_penalty": 1e-300}}, "penalty is 1e-300, expected a number from 0.000001 to 1000000"),
    ({"prefix": "x", "sampling": {"stop": [""]}}, "sampling.stop is a list of 1, expected strings that are not empty"),
    ({"prefix": "x", "sampling": {"stop": [3]}}, "sampling.stop is a list of 1, expected strings"),
    ({"prefix": "x", "sampling": {"logprobs": 3}}, "sampling: unknown field 'logprobs'"),
    ({"prefix": "x", "method": "paralel"}, "method is 'paralel', expected one of parallel, text"),
    ({"prefix": "x", "model": ""}, "model is empty"),
    ({"prefix": "x", "system": 3}, "system is 3, expected a string"),
    ({"prefix": "x", "engine": {"page_size": 0}}, "engine.page_size is 0, expected an integer from 1 to 4096"),
    ({"prefix": "x", "engine": {"device": 1}}, "engine.device is 1, expected a string"),
    ({"prefix": "x", "synthesizer": []}, "synthesizer is a list of 0, expected an object"),
    ({"prefix": "x", "synthesizer": {"merge": {"layout": "stacked"}}}, "synthesizer.merge.layout is 'stacked', expected one of parallel, sequential"),
    ({"prefix": "x", "synthesizer": {"merge": {"rerotate": 0}}}, "synthesizer.merge.rerotate is 0, expected one of true, false"),
    ({"prefix": "x", "synthesizer": {"merge": {"branch_scale": -1}}}, "synthesizer.merge.branch_scale is -1, expected a number from 0 to 100"),
]  # fmt: skip

# What a schema of this size does not say: it depends on other fields
CROSS_MISTAKES = [
    ({"prefix": [{"role": "system", "content": "a"}, {"role": "system", "content": "b"}]}, "prefix[1].role is 'system', expected another role"),
    ({"prefix": "x", "branches": [{"prompt": [{"role": "system", "content": "b"}]}]}, "branches[0].prompt[0].role is 'system'"),
    ({"prefix": [{"role": "system", "content": "a"}], "system": "b", "synthesizer": {"prompt": "u"}}, "system is given, but the prefix"),
    ({"prefix": [1, 2], "system": "b", "synthesizer": {"prompt": "u"}}, "system is given, but the prefix is token ids"),
    ({"prefix": [1, 2]}, "synthesizer.prompt is missing; the default restates"),
    ({"prefix": [1, 2], "method": "text", "synthesizer": {"prompt": "u"}}, "method text needs"),
    ({"prefix": "x", "method": "summary", "synthesizer": {"prompt": [1]}}, "method summary needs"),
    ({"prefix": "x", "method": "text", "synthesizer": {"adapter": "a"}}, "synthesizer.adapter is given, but method text uses none"),
    ({"prefix": "x", "method": "reuse", "synthesizer": {"merge": {"layout": "parallel"}}}, "merge.layout is 'parallel', expected 'sequential', which"),
    ({"prefix": "x", "method": "naive", "synthesizer": {"merge": {"rerotate": True}}}, "merge.rerotate is true, expected false"),
    ({"prefix": "x", "method": "best-of-n", "branches": [{}, {"output": "y"}]}, "branches[1] has a given output, but method best-of-n votes"),
    ({"prefix": "x", "synthesizer": {"merge": {"anchor": "zero"}}}, "synthesizer.merge: anchor 'zero' cannot be combined with keep_prefix=True"),
    ({"prefix": "x", "branches": [{"count": 65536}, {}]}, "branches stand for 65537 workers, expected at most 65536"),
    ({"prefix": "lone \ud800"}, "prefix is not valid text"),
    ({"engine": {"compile": "yes"}}, "engine.compile is 'yes', expected true or false"),
]  # fmt: skip


@pytest.mark.parametrize("data, message", [*MISTAKES, *CROSS_MISTAKES])
def test_a_mistake_is_named_with_its_path(data, message):
    with pytest.raises(MinipsError) as error:
        complete(data, "FILE.json")
    assert str(error.value).startswith(("FILE.json: ", "FILE.json:")) and message in str(error.value) and "\n" not in str(error.value)


def test_the_schema_knows_the_same_fields():
    definitions = SCHEMA["$defs"]
    for part, known in (
        (SCHEMA, TOP_FIELDS),
        (SCHEMA["properties"]["engine"], ENGINE_FIELDS),
        (SCHEMA["properties"]["synthesizer"], ("prompt", "sampling", "adapter", "merge")),
        (definitions["message"], MESSAGE_FIELDS),
        (definitions["sampling"], SAMPLING_FIELDS),
        (definitions["merge"], MERGE_VALUES),
        (definitions["turn"], TURN_FIELDS),
        (definitions["branch"], BRANCH_FIELDS),
    ):
        assert set(part["properties"]) == set(known) and part["additionalProperties"] is False
    assert set(SAMPLING_FIELDS) == set(SamplingParams.__dataclass_fields__) - {"logprobs", "return_logits"}
    assert set(MERGE_VALUES) == set(MergeOptions.__dataclass_fields__)
    for name, allowed in MERGE_VALUES.items():
        if allowed and allowed != (True, False):
            assert tuple(definitions["merge"]["properties"][name]["enum"]) == allowed


def test_the_schema_and_the_code_agree():
    validator = pytest.importorskip("jsonschema").Draft202012Validator(SCHEMA)
    for name in example_names():
        data, where = read_workflow(name)
        assert not list(validator.iter_errors(data)), name
        assert not list(validator.iter_errors(complete(data, where)))
    for data, message in MISTAKES:
        blank = message.endswith(" is empty") and data.get("prefix") == " "  # a schema cannot say blank in plain words
        assert blank or not validator.is_valid(data), data


def test_the_examples_are_there_and_complete():
    assert example_names() == ["documents", "samples", "subtasks", "trajectories"] and str(EXAMPLES) in examples_path
    for name in example_names():
        data = complete(*read_workflow(name))
        assert data["name"] == name and data["description"] and complete(data) == data
    depths = {len(worker.turns) for worker in workers_of(complete(*read_workflow("trajectories")))}
    assert depths == {1, 2, 3}


def seeds_of(seed, branches):
    data = complete({"prefix": "x", "sampling": {"seed": seed}, "branches": branches})
    return [[turn.params.seed for turn in worker.turns] for worker in workers_of(data)]


def test_no_two_draws_share_a_seed_and_chance_is_written_down():
    branches = [{"count": 2}, {"sampling": {"seed": 50}, "count": 2}, {"turns": [{}, {}, {"sampling": {"seed": 7}}]}]
    seeds = seeds_of(10, branches)
    assert seeds[0] == [10] and seeds[2] == [50] and seeds[4][2] == 7 and seeds == seeds_of(10, branches)
    assert len({seed for row in seeds for seed in row}) == 7
    assert seeds[1] == [spread(10, 1, 0)] and seeds[3] == [spread(50, 1, 0)] and seeds[4][1] == spread(10, 4, 1)
    neighbours = [seed for base in range(20) for row in seeds_of(base, [{"count": 50}]) for seed in row]
    assert len(set(neighbours)) == 1000 and max(neighbours) < 2**53
    drawn = [complete({"prefix": "x", "sampling": {"seed": None}})["sampling"]["seed"] for _ in range(4)]
    assert all(isinstance(seed, int) for seed in drawn) and len(set(drawn)) > 1
    inner = complete({"prefix": "x", "branches": [{"sampling": {"seed": None}}]})
    assert isinstance(inner["branches"][0]["sampling"]["seed"], int)


def test_labels_and_what_is_left_as_it_was():
    raw = {"prefix": "x", "branches": [{"label": "a", "count": 2}, {}]}
    before = json.dumps(raw)
    assert [worker.label for worker in workers_of(complete(raw))] == ["a 1", "a 2", "worker 3"] and json.dumps(raw) == before


def test_a_workflow_equals_the_calls_it_stands_for():
    engine = tiny_engine()
    sampling = {"max_tokens": 6, "temperature": 0.0}
    outcome = run(engine, {**IDS, "sampling": sampling, "synthesizer": {"prompt": U, "sampling": {**sampling, "repetition_penalty": 1.0}}})
    greedy = SamplingParams(max_tokens=6)
    plain = Synthesizer(engine).run(PREFIX, OWNS, U, worker_params=greedy, params=greedy)
    assert outcome.result.token_ids == plain.token_ids
    assert [row[-1].output.token_ids for row in outcome.spans] == [worker.token_ids for worker in plain.workers]
    assert engine.check() and engine.stats()["used_pages"] == 0


def test_turns_of_different_depth_are_batched_and_kept():
    engine = tiny_engine()
    tool, call = prompt_ids(4, 70), prompt_ids(3, 71)
    turns = [{"prompt": OWNS[0], "output": call}, {"prompt": tool}]
    data = {
        **IDS,
        "branches": [{"turns": turns}, {"prompt": OWNS[1]}, {"turns": [*turns, {"prompt": tool, "sampling": {"max_tokens": 2}}]}],
        "sampling": {"max_tokens": 5, "temperature": 0.0, "ignore_eos": True},
        "synthesizer": {"prompt": U, "sampling": {"max_tokens": 4}, "merge": {"keep_turns": "outputs"}},
    }
    outcome = run(engine, data)
    assert [[len(span.output.token_ids) for span in row] for row in outcome.spans] == [[3, 5], [5], [3, 5, 2]]
    assert outcome.result.branch_tokens == [8, 5, 10] and [span.params is None for span in outcome.spans[2]] == [True, False, False]
    root = engine.prefill(PREFIX)  # the same by hand
    (branch,) = engine.encode(engine.fork(root, [OWNS[0]]), [call])
    engine.decode(engine.extend([branch], [tool]), SamplingParams(max_tokens=5))
    assert branch.output_ids == outcome.spans[0][1].output.token_ids == outcome.spans[2][1].output.token_ids


def test_room_is_refused_before_the_first_forward():
    engine = tiny_engine(max_kv_tokens=200)
    for data, message in (
        (
            {**IDS, "branches": [{"count": 60, "prompt": OWNS[0], "sampling": {"max_tokens": 4}}]},
            "a run of 60 workers and a synthesizer needs",
        ),
        ({**IDS, "branches": [{"turns": [{"prompt": OWNS[0], "output": prompt_ids(200)}, {"prompt": prompt_ids(60)}]}]}, "a worker needs"),
    ):
        with pytest.raises(MinipsError, match=message):
            run(engine, data)
        assert engine.stats()["prefilled_tokens"] == 0


def test_room_for_several_turns_is_enough_but_not_more():
    """A run that fits its pool exactly goes through; one page fewer is refused. At full length, whatever is kept."""
    rng = random.Random(4)
    for keep in ("final", "outputs", "compact", "all", "full"):
        turns = [{"prompt": prompt_ids(rng.randint(1, 9), i), "sampling": {"max_tokens": rng.randint(1, 9)}} for i in range(4)]
        merge = {"keep_turns": keep, **({"keep_prefix": False} if keep == "full" else {})}
        sampling = {"temperature": 0.0, "ignore_eos": True}
        synthesizer = {"prompt": U, "merge": merge, "sampling": {"max_tokens": 5, "ignore_eos": True}}
        data = {"prefix": PREFIX, "sampling": sampling, "branches": [{"turns": turns}, {"turns": turns[:2]}], "synthesizer": synthesizer}
        pages = sum(-(-count // 4) for count in (10, 6, 5))
        for part in (turns, turns[:2]):
            pages += sum(-(-len(turn["prompt"]) // 4) - (-turn["sampling"]["max_tokens"] // 4) for turn in part)
        outcome = run(tiny_engine(max_kv_tokens=4 * pages), data)
        assert outcome.result.finish_reason == "length"
        with pytest.raises(MinipsError, match=f"needs {pages} pages"):
            run(tiny_engine(max_kv_tokens=4 * (pages - 1)), data)


def test_reuse_and_naive_are_merges_of_their_own():
    engine = tiny_engine()
    sampling = {"max_tokens": 6, "temperature": 0.0}
    for method, options in (("reuse", {"layout": "sequential"}), ("naive", {"rerotate": False})):
        data = {**IDS, "sampling": sampling, "synthesizer": {"prompt": U, "sampling": {"max_tokens": 6}}, "method": method}
        data = complete(data)
        outcome = run_workflow(engine, Synthesizer(engine, options=options), data, SILENT)
        assert outcome.result.num_branches == 3 and len(outcome.result.token_ids) == 6


def test_summary_is_one_more_turn():
    data = complete({"prefix": "x", "method": "summary", "branches": [{"count": 2, "prompt": "p"}, {"output": "d"}, {"turns": [{}, {}]}]})
    workers = workers_of(with_summaries(data))
    assert [len(worker.turns) for worker in workers] == [2, 2, 2, 3]
    assert {worker.turns[-1].prompt for worker in workers} == {SUMMARY_PROMPT} and workers[2].turns[0].output == "d"
    assert len({turn.params.seed for worker in workers for turn in worker.turns}) == 9


def spans(*answers):
    params = SamplingParams()
    return [[Span(WorkerOutput(text, [1], "stop", 3), params, score)] for text, score in answers]


@pytest.mark.parametrize(
    "answers, best",
    [
        ([("a", -0.1), ("B  x", -3.0), ("b x\n", -2.0)], "b x\n"),
        ([("a", -2.0), ("b", -1.0), ("c", -3.0)], "b"),
        ([("a", -1.0), ("b", -1.0)], "a"),
        ([("", None), ("", None), ("b", -9.0)], "b"),
    ],
)
def test_best_of_n_votes(answers, best):
    workers = workers_of(complete({"prefix": "x", "branches": [{"count": len(answers)}]}))
    assert vote(spans(*answers), workers, SILENT)[0].text == best


def test_best_of_n_runs_and_refuses_silence():
    engine = tiny_engine()
    data = {**IDS, "method": "best-of-n", "sampling": {"max_tokens": 5, "temperature": 0.0}}
    with pytest.raises(MinipsError, match="no worker wrote anything"):  # this model has no tokenizer, so all text is empty
        run(engine, data)
    assert engine.stats()["used_pages"] == 0 and engine.check()


def test_the_shipped_adapter_is_used_with_its_model_alone(tmp_path, monkeypatch):
    def adapter_of(**changes):
        return complete({"prefix": "x", **changes})["synthesizer"]["adapter"]

    monkeypatch.setattr("minips.shipped.weights_folders", lambda: [tmp_path])
    assert adapter_of() is None  # not there
    (tmp_path / DEFAULT_ADAPTER).mkdir()
    (tmp_path / DEFAULT_ADAPTER / "minips.json").write_text("{}")
    assert adapter_of() == DEFAULT_ADAPTER
    assert adapter_of(synthesizer={"adapter": None}) is None
    assert adapter_of(synthesizer={"adapter": "other"}) == "other"
    assert adapter_of(model="another") is None and adapter_of(method="text") is None and adapter_of(method="reuse") is None
    again = complete({"prefix": "x"})
    assert complete(json.loads(json.dumps(again))) == again
