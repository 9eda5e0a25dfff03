"""What the tasks read: files of a data folder, hub originals, samples of rows; and how broken ones are refused."""

import gzip
import shutil

import huggingface_hub
import pytest
from huggingface_hub.utils import GatedRepoError

from minips import MinipsError
from minips.evaluation.tasks import select
from tests.test_tasks import DATA, NAMES, lines_of, load, write

# Selection


def test_select_keeps_order_and_grows():
    examples = load("gsm8k")
    assert select(examples, None, 0) == select(examples, 9, 0) == examples
    three, four = select(examples, 3, 7), select(examples, 4, 7)
    assert len(three) == 3 and three == [example for example in examples if example in three] == select(examples, 3, 7)
    assert [example for example in four if example in three] == three
    assert len({tuple(example.id for example in select(examples, 2, seed)) for seed in range(20)}) > 3
    for rows in (0, -1, True, "3"):
        with pytest.raises(MinipsError, match="rows is"):
            select(examples, rows, 0)


# Files


def test_gzip_blank_lines_and_a_byte_order_mark(tmp_path):
    path = tmp_path / "gsm8k/test.jsonl.gz"
    path.parent.mkdir()
    text = (DATA / "gsm8k/test.jsonl").read_text().replace("\n", "\r\n\n")
    path.write_bytes(gzip.compress(b"\xef\xbb\xbf" + text.encode()))
    assert load("gsm8k", folder=tmp_path) == load("gsm8k")
    (tmp_path / "gpqa").mkdir()
    (tmp_path / "gpqa/gpqa_diamond.csv.gz").write_bytes(gzip.compress((DATA / "gpqa/gpqa_diamond.csv").read_bytes()))
    assert load("gpqa", folder=tmp_path) == load("gpqa")


def test_ids_that_come_twice_get_a_suffix(tmp_path):
    rows = [{"id": id_, "problem": "Find $1$.", "answer": "1"} for id_ in (7, "7", 7, "7#2")]
    write(tmp_path, "aime2025/test", [*rows, {"problem": "Find $2$.", "answer": "2"}])
    assert [example.id for example in load("aime2025", folder=tmp_path)] == ["7", "7#2", "7#3", "7#2#2", "4"]


def test_the_original_forms_are_read_too(tmp_path):
    rows = lines_of(DATA / "train_nq_open_oracle/nq_open_oracle.jsonl")
    originals = [{"question": r["question"], "answers": r["answers"], "ctxs": [{"title": r["title"], "text": r["text"]}]} for r in rows]
    write(tmp_path, "nq_open/nq-open-oracle", originals)
    assert {len(example.passages) for example in load("nq_open", folder=tmp_path)} == {4}
    context = {"title": ["A &amp; B", "C"], "sentences": [["One.", " Two."], ["Three."]]}
    write(tmp_path, "hotpotqa/validation", [{"id": "x", "question": "Q?", "answer": "Two", "type": "bridge", "context": context}])
    assert sorted(load("hotpotqa", folder=tmp_path)[0].passages) == ["A & B: One. Two.", "C: Three."]
    answers = {"text": ["cloth", "cloth", "a cloth"], "answer_start": [1, 1, 2]}
    write(tmp_path, "squad/validation", [{"id": "y", "title": "T_u", "context": "Of cloth.", "question": "Q?", "answers": answers}])
    example = load("squad", 1, folder=tmp_path)[0]
    assert example.references == ("cloth", "a cloth") and example.passages == ("T u: Of cloth.",)
    write(tmp_path, "strategyqa/train", [{"qid": "z", "question": "Q?", "answer": False, "facts": ["F."]}])
    assert load("strategyqa", folder=tmp_path)[0].target == "No" and load("strategyqa", folder=tmp_path)[0].id == "z"


BROKEN_ROWS = [
    ("gsm8k", "gsm8k/test", {"answer": "nineteen"}, "'answer' is 'nineteen', expected a solution that ends in ####"),
    ("gsm8k", "gsm8k/test", {"question": " "}, "'question' is ' ', expected text"),
    ("gsm8k", "gsm8k/test", {"question": None}, "'question' is None"),
    ("gsm8k", "gsm8k/test", {"question": "half \ud83d"}, r"'half \ud83d', expected text"),
    ("math500", "math500/test", {"answer": 1.5}, "'answer' is 1.5, expected text"),
    ("olympiadbench", "olympiadbench/oe_to_maths_en_comp", {"final_answer": []}, "expected a list of text, at least one"),
    ("olympiadbench", "olympiadbench/oe_to_maths_en_comp", {"is_multiple_answer": "no"}, "expected true or false"),
    ("olympiadbench", "olympiadbench/oe_to_maths_en_comp", {"error": "small"}, "'error' is 'small', expected a number"),
    ("aime2024", "aime2024/test", {"answer": "1000"}, "whole number from 0 to 999"),
    ("arc_challenge", "arc_challenge/test", {"answerKey": "F"}, "'answerKey' is 'F', expected one of A, B, C"),
    ("arc_challenge", "arc_challenge/test", {"choices": ["a", "b"]}, "expected an object with text and label"),
    ("arc_challenge", "arc_challenge/test", {"choices": {"text": ["a"], "label": ["A", "B"]}}, "of one length"),
    ("mmlu_pro_science", "mmlu_pro/test", {"options": ["a", ""]}, "'options' is"),
    ("mmlu_pro_science", "mmlu_pro/test", {"options": ["a"] * 27}, "2 to 26 options"),
    ("mmlu_pro_science", "mmlu_pro/test", {"category": ["biology"]}, "'category' is"),
    ("medqa", "medqa/test", {"options": {"A": "x", "b": "y"}}, "letters and texts"),
    ("humanevalplus", "humanevalplus/HumanEvalPlus-OriginFmt", {"test": ""}, "'test' is ''"),
    ("mbppplus", "mbppplus/MbppPlus-OriginFmt", {"test_list": "assert 1"}, "'test_list' is"),
    ("gaia", "gaia/metadata", {"Final answer": "?"}, "the validation split has them"),
    ("gaia", "gaia/metadata", {"file_name": "gone.png"}, "'gone.png', expected a file beside metadata.jsonl"),
    ("gaia", "gaia/metadata", {"file_name": "../gsm8k/test.jsonl"}, "expected a file beside"),
    ("database_diagnosis", "marble_db/database_main", {"agents": [{}]}, "agents with a profile each"),
    ("database_diagnosis", "marble_db/database_main", {"agents": []}, "'agents' is []"),
    ("database_diagnosis", "marble_db/database_main", {"task": {"labels": ["A"], "root_causes": ["B"]}}, "root_causes among them"),
    ("database_diagnosis", "marble_db/database_main", {"environment": {}}, "init_sql and anomalies"),
    ("nq_open", "train_nq_open_oracle/nq_open_oracle", {"answers": "Aldora"}, "'answers' is 'Aldora'"),
    ("nq_open", "train_nq_open_oracle/nq_open_oracle", {"ctxs": [{}]}, "title and text"),
    ("hotpotqa", "train_hotpotqa/hotpotqa_dev_distractor_subset", {"contexts": [{"title": "T"}]}, "title and text"),
    ("squad", "train_squad_xquad_en/xquad_en", {"answers": {"text": "x"}}, "'answers' is"),
    ("strategyqa", "train_strategyqa_facts/strategyqa", {"answer": ["yes"]}, "expected yes or no"),
    ("kv_retrieval", "train_kv_retrieval/kv_retrieval_75", {"value": "v"}, "among ordered_kv_records"),
    ("kv_retrieval", "train_kv_retrieval/kv_retrieval_75", {"ordered_kv_records": [["k"]]}, "pairs of text"),
]


@pytest.mark.parametrize(("name", "stem", "change", "message"), BROKEN_ROWS)
def test_a_malformed_row_is_refused_with_file_and_line(name, stem, change, message, tmp_path):
    rows = lines_of(DATA / f"{stem}.jsonl")
    path = write(tmp_path, stem, [rows[0], {**rows[1], **change}, *rows[2:]])
    if name == "gaia":
        (path.parent / "made-3.csv").write_text("x")
    with pytest.raises(MinipsError) as caught:
        load(name, 2, folder=tmp_path)
    text = str(caught.value)
    assert text.startswith(f"{path}, line 2: field ") and message in text and "\n" not in text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "holds no rows"),
        (b"\n \n", "holds no rows"),
        (b'{"a": 1}\n{"a": \n', "line 2: not readable as JSON"),
        (b"[1, 2]\n", "line 1: is [1, 2], expected a JSON object"),
        (b'{"question": "\xff"}\n', "after line 0: is no UTF-8 text"),
        (b'{"a":' * 100_000, "line 1: not readable as JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "line 1: not readable as JSON"),
        (b'{"answer": "#### 1"}\n', "line 1: field 'question' is missing, expected text"),
    ],
)
def test_a_broken_file_is_refused(content, message, tmp_path):
    path = tmp_path / "gsm8k/test.jsonl"
    path.parent.mkdir()
    path.write_bytes(content)
    with pytest.raises(MinipsError) as caught:
        load("gsm8k", folder=tmp_path)
    assert str(path) in str(caught.value) and message in str(caught.value) and len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("content", [b"plain text", gzip.compress(b'{"a": 1}\n' * 50)[:30], b"\x1f\x8b\x08\0\0\0\0\0\0\xffnoise"])
def test_a_broken_gzip_file_is_refused(content, tmp_path):
    (tmp_path / "gsm8k").mkdir()
    (tmp_path / "gsm8k/test.jsonl.gz").write_bytes(content)
    with pytest.raises(MinipsError, match=r"test\.jsonl\.gz, .*not readable"):
        load("gsm8k", folder=tmp_path)


def test_a_broken_csv_is_refused(tmp_path):
    (tmp_path / "gpqa").mkdir()
    for text, message in (("Question\n", "no rows"), ("Question,Record ID\na\n", "line 2: expected 2 cells"), ('Q\n"a', "not readable")):
        (tmp_path / "gpqa/gpqa_diamond.csv").write_text(text)
        with pytest.raises(MinipsError, match=message):
            load("gpqa", folder=tmp_path)


def test_a_missing_folder_or_file_says_how_to_get_it(tmp_path):
    with pytest.raises(MinipsError, match="no such folder, expected the data folder"):
        load("gsm8k", folder=tmp_path / "none")
    with pytest.raises(MinipsError, match=r"has no arc_challenge/test\.jsonl, plain or as \.gz; .*'allenai/ai2_arc', 'ARC-Challenge'"):
        load("arc_challenge", folder=tmp_path)
    for name in NAMES:
        with pytest.raises(MinipsError, match="to get it: "):
            load(name, folder=tmp_path)


# The hub


def fake_hub(monkeypatch, folder, asked):
    def download(name, *, repo_type, allow_patterns):
        asked.append((name, repo_type, tuple(allow_patterns)))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)


def test_hub_originals_are_fetched_and_read(monkeypatch, tmp_path):
    asked = []
    fake_hub(monkeypatch, tmp_path, asked)
    shutil.copy(DATA / "math500/test.jsonl", tmp_path / "test.jsonl")
    assert load("math500", folder=None) == load("math500")
    for part in ("I", "II"):
        write(tmp_path, f"aime2025-{part}", [{"question": f"Part {part}?", "answer": "7"}])
    assert [(example.id, example.question) for example in load("aime2025", folder=None)] == [("0", "Part I?"), ("1", "Part II?")]
    shutil.copytree(DATA / "gaia", tmp_path / "2023/validation")
    assert [example.references for example in load("gaia", folder=None)] == [example.references for example in load("gaia")]
    assert asked[0] == ("HuggingFaceH4/MATH-500", "dataset", ("test.jsonl",)) and "2023/validation/*" in asked[2][2]


def test_what_the_hub_cannot_give_is_refused_in_one_line(monkeypatch, tmp_path):
    with pytest.raises(MinipsError, match=r"gsm8k/test: the hub has it in no form .*--data; to get it: copy grade_school_math"):
        load("gsm8k", folder=None)
    fake_hub(monkeypatch, tmp_path, [])
    with pytest.raises(MinipsError, match=r"holds no test\.jsonl; put math500/test\.jsonl into a folder"):
        load("math500", folder=None)

    def refuse(error):
        def download(*_, **__):
            raise error

        monkeypatch.setattr(huggingface_hub, "snapshot_download", download)

    refuse(OSError("no route\nto host"))
    with pytest.raises(MinipsError, match=r"cannot be fetched from the hub \(no route to host\); or put medqa/test\.jsonl"):
        load("medqa", folder=None)
    refuse(GatedRepoError.__new__(GatedRepoError))
    for name in ("gaia", "gpqa"):
        with pytest.raises(MinipsError, match="gated; accept its terms on its hub page, then set HF_TOKEN"):
            load(name, folder=None)
