"""Training data: builders, the held-out split, the leak filter, mixtures and their refusals."""

import json
import re

import pytest

from minips import MinipsError
from minips.corpus.entry import count_of, cut
from minips.corpus.leaks import EvaluationQuestions
from minips.corpus.mixture import DATA_SETS, load_mixture, read_examples
from minips.evaluation.data import held_out
from minips.evaluation.tasks import task
from minips.training.encoding import Example


def write(folder, name, rows):
    path = folder / f"{name}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def strategy_rows(count):
    return [
        {
            "id": f"s{i}",
            "question": f"Is number {i} larger than its own square root?",
            "answer": "yes" if i % 2 else "no",
            "facts": [f"{i} is a number.", "Roots exist."],
        }
        for i in range(count)
    ]


@pytest.fixture
def data(tmp_path):
    write(tmp_path, "strategyqa/train", strategy_rows(40))
    talk = [{"role": role, "content": f"{role} says {i}"} for i in range(4) for role in ("user", "assistant")]
    write(tmp_path, "oasst1/train", [{"id": f"d{i}", "messages": talk} for i in range(3)])
    write(
        tmp_path,
        "p3/train",
        [{"task": "t", "template": f"kind{i % 2}", "input": f"question {i}", "target": f"answer {i}"} for i in range(10)],
    )
    calls = [
        {"from": "human", "value": "weather and time?"}, {"from": "function_call", "value": "weather()"},
        {"from": "observation", "value": "rain"}, {"from": "function_call", "value": "time()"}, {"from": "observation", "value": "noon"},
        {"from": "gpt", "value": "Rain at noon."},
    ]  # fmt: skip
    write(tmp_path, "glaive/train", [{"conversations": calls, "tools": "[]"}])
    write(
        tmp_path, "bfcl/parallel",
        [{"id": "b0", "question": [[{"role": "user", "content": "Play A and B"}]], "function": [{"name": "play"}],
          "ground_truth": [{"play": {"artist": ["A"]}}, {"play": {"artist": ["B", "b"]}}]}],
    )  # fmt: skip
    write(
        tmp_path,
        "2wikimultihopqa/train",
        [{"id": "w0", "question": "Who?", "answer": "Ann", "context": {"title": ["T1", "T2"], "sentences": [["One.", "Two."], ["Ann."]]}}],
    )
    return tmp_path


def build(name, folder, branches=(1, 8)):
    return list(DATA_SETS[name].build(folder, branches, 0))


def test_rows_of_an_evaluation_task_leave_the_held_out_ones(data):
    rows = task("strategyqa").load(data, 1, 0)
    out = {f"strategyqa/{row.id}" for row in rows if held_out("strategyqa", row)}
    made = {example.id for example in build("strategyqa", data)}
    assert made and out and not made & out and len(made | out) == 40
    assert 2 <= len(out) <= 20  # one in four
    assert {example.id for example in build("strategyqa", data, (2, 2))} == made  # the split is of the ids alone


def test_number_of_branches_varies_and_is_a_matter_of_seed_and_id(data):
    counts = [count_of((1, 8), 0, f"row{i}") for i in range(200)]
    assert set(counts) == set(range(1, 9)) and counts == [count_of((1, 8), 0, f"row{i}") for i in range(200)]
    assert {len(example.branches) for example in build("kv_pairs", None, (3, 3))[:50]} <= {2, 3}


def test_cut_keeps_order_and_uses_every_item():
    assert cut("abcdefg", 3, "") == ("ab", "cd", "efg") and cut("ab", 5, "") == ("a", "b")
    assert "".join(cut("abcdefghij", 4, "")) == "abcdefghij"


def test_dialogues_make_branches_of_earlier_rounds(data):
    for example in build("oasst", data):
        number = int(example.prompt.rsplit(" ", 1)[1])
        assert number >= 1 and example.target == f"assistant says {number}"
        assert "\n".join(example.branches) == "\n".join(f"User: user says {i}\nAssistant: assistant says {i}" for i in range(number))
    for example in build("oasst_questions", data, (3, 3)):
        assert (
            example.workers == ("", "", "")
            and not example.branches
            and example.prefix == "user says 0"
            and example.prefix in example.prompt
        )


def test_few_shot_examples_are_other_rows_of_the_same_kind(data):
    for example in build("p3", data, (1, 3)):
        own = int(re.search(r"question (\d+)", example.prompt)[1])
        others = [int(re.search(r"question (\d+)", text)[1]) for text in example.branches]
        assert others and own not in others and all(other % 2 == own % 2 for other in others) and example.target == f"answer {own}"
        assert len(set(others)) == len(others) <= 3


def test_tool_results_and_planned_calls(data):
    (example,) = build("glaive", data, (4, 4))
    assert example.branches == ("Call: weather()\nResult: rain", "Call: time()\nResult: noon") and example.target == "Rain at noon."
    (example,) = build("bfcl", data)
    assert json.loads(example.target) == [{"play": {"artist": "A"}}, {"play": {"artist": "B"}}]


def test_the_original_form_of_two_wiki(data):
    (example,) = build("2wikimultihopqa", data, (2, 2))
    assert sorted(example.branches) == ["T1: One. Two.", "T2: Ann."] and example.target == "Ann"


def test_kv_pairs_hold_the_answer_once():
    for example in build("kv_pairs", None)[:100]:
        key = re.search(r"[0-9a-f-]{36}", example.prompt)[0]
        assert sum(text.count(f"{key}: {example.target}") for text in example.branches) == 1


def test_questions_of_evaluation_sets_are_found_in_any_text():
    questions = EvaluationQuestions(["Who wrote the long poem about the sea?", "Is it?", "What is the capital of France?"])
    clean = Example("a", "p", ("one branch",), "u", "t")
    assert not questions.leak(clean)
    for name, value in (
        ("prompt", "Now: who WROTE the long poem, about the sea"),
        ("branches", ("x", "- What is the capital of France?\n")),
    ):
        assert questions.leak(Example(**{**vars(clean), name: value})), name
    assert not questions.leak(Example("a", "Is it?", ("who wrote the long poem about the land?",), "capital of France", "t"))


def test_a_mixture_leaves_leaks_out_and_counts_them(data):
    held = next(row for row in task("strategyqa").load(data, 1, 0) if held_out("strategyqa", row))
    rows = [{"task": "t", "template": "k", "input": text, "target": "yes"} for text in ("fine words", "other words", held.question)]
    write(data, "p3/train", rows)
    said = []
    examples = load_mixture([{"name": "p3", "branches": [1, 1]}, {"name": "strategyqa", "rows": 5}], data, say=said.append)
    assert sum(e.id.startswith("strategyqa/") for e in examples) == 5
    assert not any(held.question in text for e in examples for text in (e.prompt, *e.branches))
    assert "1 left out" in said[0] or "2 left out" in said[0]
    again = load_mixture([{"name": "strategyqa", "rows": 8}], data)
    assert {e.id for e in examples if e.id.startswith("strategyqa/")} < {e.id for e in again}  # a larger number holds the smaller


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({}, "entry 0: is {}, expected an object with name or file"),
        ({"name": "nq-open"}, "entry 0: name is 'nq-open', expected one of nq_open"),
        ({"name": "p3", "rows": 0}, "rows is 0"),
        ({"name": "p3", "branches": [0, 9]}, "branches is [0, 9], expected [least, most] within 1 and 8"),
        ({"name": "p3", "file": "x"}, "name or file"),
        ({"file": "missing.jsonl"}, "missing.jsonl: no such file"),
        ({"name": "strategyqa", "rows": 999}, "strategyqa: has "),
        ({"name": "wildchat"}, "has no wildchat/train.jsonl"),
    ],
)
def test_what_is_wrong_with_an_entry_is_said(data, entry, said):
    with pytest.raises(MinipsError, match=re.escape(said)):
        load_mixture([entry], data, base=data)
    with pytest.raises(MinipsError, match="data: is empty"):
        load_mixture([], data)


def test_files_of_examples(tmp_path):
    path = tmp_path / "rows.jsonl"
    good = {"id": "1", "prefix": "p", "branches": ["text", [3, 4]], "prompt": "u", "target": [5, 6]}
    path.write_text(json.dumps(good) + "\n" + json.dumps({"id": "2", "target": None}) + "\n")
    assert list(read_examples(path)) == [Example("1", "p", ("text", (3, 4)), "u", (5, 6))]
    for change in ({"target": 3}, {"branches": "text"}, {"branches": [[-1]]}, {"id": 5}, {"prompt": None}):
        path.write_text(json.dumps({**good, **change}))
        with pytest.raises(MinipsError, match="rows.jsonl, line 1: expected"):
            list(read_examples(path))
