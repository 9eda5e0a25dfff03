"""The tasks on invented rows in the layout of a data folder (`tests/data`), and what is refused."""

import json
import re
import shutil
from pathlib import Path

import pytest

from minips import MinipsError
from minips.evaluation.example import Task
from minips.evaluation.tasks import TASKS, register, task
from minips.evaluation.tasks_sources import contains, load_kv_retrieval

DATA = Path(__file__).parent / "data"
REASONING = ["gsm8k", "math500", "olympiadbench", "aime2024", "aime2025", "arc_challenge", "mmlu_pro_science", "medqa", "gpqa"]
CODE = ["humanevalplus", "mbppplus"]
AGENTS = ["gaia", "database_diagnosis"]
SOURCES = ["nq_open", "hotpotqa", "squad", "strategyqa", "kv_retrieval"]
NAMES = [*REASONING, *CODE, *AGENTS, *SOURCES]


def load(name, workers=4, seed=0, folder=DATA):
    return TASKS[name].load(folder, workers, seed)


def by_id(name, row_id, **settings):
    return next(example for example in load(name, **settings) if example.id == row_id)


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def write(folder, stem, rows):
    path = folder / f"{stem}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


# What every task must hold


@pytest.mark.parametrize("name", NAMES)
def test_rows_are_complete_and_their_targets_score_full(name):
    examples = load(name)
    rules = TASKS[name]
    assert len(examples) >= 5 and len({example.id for example in examples}) == len(examples)
    for example in examples:
        assert isinstance(example.id, str) and example.references and example.target
        scores = rules.score(example.target, example, "minips")
        assert next(iter(scores)) == rules.metric and scores[rules.metric] == 1, (example.id, scores)
        assert rules.extract(example.target, example, "minips") is not None
        assert rules.score("I do not know.", example, "minips")[rules.metric] == 0
        if rules.agents:
            assert not example.passages


@pytest.mark.parametrize("name", NAMES)
def test_the_question_stands_in_prefix_and_prompt_and_no_word_tells_the_method(name):
    for example in load(name):
        asked = example.question.removeprefix("value of the key ").removeprefix("value of ").strip()
        assert asked in example.prefix and asked in example.prompt
        words = f"{example.prefix} {example.prompt}".lower()
        assert not re.search(r"\b(cache|caches|latent|memory|kv)\b", words)  # text and caches get the same words


def test_all_names_are_there():
    assert set(NAMES) <= set(TASKS)
    assert all(TASKS[name].source and TASKS[name].name == name for name in NAMES)
    assert {name for name in NAMES if TASKS[name].agents} == set(AGENTS)


def test_an_unknown_name_gets_the_nearest():
    with pytest.raises(MinipsError, match="gsm8k"):
        task("gsm-8k")
    with pytest.raises(MinipsError, match="did you mean aime2024 or aime2025"):
        task("AIME")
    with pytest.raises(MinipsError, match="expected one of gsm8k, math500"):
        task("crosswords!")


def test_a_name_can_be_registered_once(monkeypatch):
    monkeypatch.setattr("minips.evaluation.tasks.TASKS", dict(TASKS))
    made = Task("made_up", "em", lambda *_: [], lambda *_: {}, lambda *_: None)
    assert register(made) is made is task("made_up") and register(made) is made
    with pytest.raises(MinipsError, match="made_up"):
        register(Task("made_up", "f1", made.load, made.score, made.extract))


# Single rows


def test_gsm8k_numbers_and_steps():
    examples = load("gsm8k")
    assert [example.id for example in examples] == ["0", "1", "2", "3", "4"]
    assert [example.references for example in examples] == [("19",), ("1350",), ("84",), ("-3",), ("30",)]
    assert examples[0].group == "2 steps" and examples[1].target == r"\boxed{1350}"


def test_olympiadbench_dollars_units_and_tolerances():
    several, unit, tolerance = (by_id("olympiadbench", row) for row in ("12", "13", "14"))
    assert several.references == ("2,3",) and several.meta["is_multiple_answer"] and "all final answers" in several.prompt
    assert unit.meta["unit"] == "km" and "without its unit (km)" in unit.prefix
    assert tolerance.meta["tolerance"] == 0.1
    assert by_id("olympiadbench", "15").prefix.startswith("Problem: A party has started.\nEach guest")


def test_choices_are_lettered():
    digits = by_id("arc_challenge", "Made_3")
    assert digits.references == ("D",) and "D. a thermometer" in digits.prefix
    assert by_id("arc_challenge", "Made_2").meta == {"labels": ["A", "B", "C"], "options": ["light", "sound", "water"]}
    assert by_id("medqa", "2").target == r"\boxed{A}"
    science = load("mmlu_pro_science")
    assert [example.id for example in science] == ["1", "3", "4", "5", "6"] and science[1].meta["labels"] == list("ABCDEFGHIJ")


def test_gpqa_options_are_shuffled_by_row_and_seed():
    right = {"recMade1": "g, downwards", "recMade5": "7"}
    letters = set()
    for seed in range(8):
        for row_id, text in right.items():
            example = by_id("gpqa", row_id, seed=seed)
            letter = example.references[0]
            assert example.meta["options"]["ABCD".index(letter)] == text and f"{letter}. {text}\n" in example.prefix + "\n"
            letters.add(letter)
    assert letters == set("ABCD")
    assert by_id("gpqa", "recMade1").prefix.count("\n") == 7  # the question's own line break is kept


def test_gaia_knows_its_attachments():
    example = by_id("gaia", "made-3")
    assert "Attached file: made-3.csv" in example.prefix and example.group == "level 1"
    assert (Path(example.meta["folder"]) / example.meta["file_name"]).is_file()
    assert by_id("gaia", "made-1").meta["file_name"] == "" and "Attached" not in by_id("gaia", "made-1").prefix


def test_database_diagnosis_brief_is_cut_and_every_agent_is_a_worker():
    example = by_id("database_diagnosis", "2")
    assert len(example.worker_prompts) == 5 and example.worker_prompts[1].startswith("agent2 ")
    assert example.question == "This database is used by a garage.\nRecently it has been slow."
    assert "OTHER" not in example.prefix and "planner" not in example.prefix + example.prompt
    assert example.meta["root_causes"] == ["INSERT_LARGE_DATA", "LOCK_CONTENTION"] and "at most 3" in example.prompt
    assert example.meta["init_sql"].startswith("CREATE TABLE") and example.meta["anomalies"][1]["anomaly"] == "LOCK_CONTENTION"


def test_code_rows_show_the_stub_or_three_tests():
    double = by_id("humanevalplus", "HumanEval/900")
    assert "```python\ndef double(x: int) -> int:" in double.prefix and double.meta["entry_point"] == "double"
    assert double.target.endswith("return 2 * x\n```")
    add = by_id("mbppplus", "900")
    assert add.prefix.count("assert") == 3 and "add(5, 5)" in add.meta["tests"]


# Given passages


@pytest.mark.parametrize("workers", [1, 2, 4, 7])
def test_nq_open_has_the_gold_paragraph_and_no_answer_elsewhere(workers):
    gold = {row["id"]: f"{row['title']}: {row['text']}" for row in lines_of(DATA / "train_nq_open_oracle/nq_open_oracle.jsonl")}
    for example in load("nq_open", workers):
        assert len(set(example.passages)) == len(example.passages) == workers
        assert gold[example.id] in example.passages and example.question.count("?") == 1
        assert sum(contains(passage, example.references) for passage in example.passages) == 1


def test_nq_open_refuses_more_branches_than_there_are_passages():
    with pytest.raises(MinipsError, match=r"line 1: 8 branches need 7 other passages without the answer, found 6"):
        load("nq_open", 8)


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 16])
def test_hotpotqa_deals_every_paragraph_once(workers):
    for example, row in zip(load("hotpotqa", workers), lines_of(DATA / "train_hotpotqa/hotpotqa_dev_distractor_subset.jsonl"), strict=True):
        dealt = [part for passage in example.passages for part in passage.split("\n\n")]
        assert sorted(dealt) == sorted(f"{c['title']}: {c['text']}" for c in row["contexts"])
        sizes = [passage.count("\n\n") for passage in example.passages]
        assert len(example.passages) == min(workers, len(row["contexts"])) and max(sizes) - min(sizes) <= 1


def test_squad_takes_the_article_first():
    for example in load("squad", 5):
        row = next(r for r in lines_of(DATA / "train_squad_xquad_en/xquad_en.jsonl") if r["id"] == example.id)
        title = row["title"].replace("_", " ")
        own = [passage for passage in example.passages if passage.startswith(f"{title}: ")]
        assert len(example.passages) == 5 and len(own) == 3 and f"{title}: {row['context']}" in own
        assert not any(contains(passage, example.references) for passage in set(example.passages) - set(own))
    assert all(passage.startswith("Paper kites: ") for passage in by_id("squad", "made0", workers=3).passages)


def test_strategyqa_has_at_most_as_many_branches_as_facts():
    assert [len(example.passages) for example in load("strategyqa", 3)] == [2, 3, 2, 3, 2]
    assert min(by_id("strategyqa", "made3", workers=1).passages[0].split("\n")) == "A snowman is made of snow."


def test_kv_retrieval_keeps_the_asked_pair():
    for pairs in (3, 20):
        for example in load_kv_retrieval(DATA, 4, 0, pairs):
            lines = [line for passage in example.passages for line in passage.split("\n")]
            key = example.question.removeprefix("value of ")
            assert len(set(lines)) == len(lines) == pairs and lines.count(f"{key}: {example.target}") == 1
            assert len(example.passages) == min(4, pairs)


@pytest.mark.parametrize("name", SOURCES)
def test_a_row_is_the_same_each_time_and_differs_by_seed(name):
    assert load(name) == load(name)
    assert any(a.passages != b.passages for a, b in zip(load(name, seed=0), load(name, seed=1), strict=True))


@pytest.mark.parametrize("name", ["hotpotqa", "strategyqa", "kv_retrieval"])
def test_a_row_does_not_depend_on_the_other_rows(name, tmp_path):
    shutil.copytree(DATA, tmp_path / "data")
    path = next(path for path in (tmp_path / "data").rglob("*.jsonl") if f"train_{name}" in str(path.parent))
    rows = lines_of(path)
    write(tmp_path, "data/" + str(path.relative_to(tmp_path / "data")).removesuffix(".jsonl"), rows[:1])
    assert load(name, folder=tmp_path / "data") == load(name)[:1]


def test_the_draw_is_the_same_in_every_process():
    example = by_id("strategyqa", "made3", workers=2)  # a literal: hash() or an unseeded draw would change it
    assert example.passages == ("A snowman is made of snow.\nSand is warm.", "Deserts are hot by day.\nSnow melts above zero degrees.")


def test_answers_are_found_as_whole_words():
    assert contains("In 1931 he won.", ["1931"]) and contains("The GREEN sea", ["green sea"])
    assert not contains("In 19310 he won.", ["1931"]) and not contains("Songs", ["S", "*"])
