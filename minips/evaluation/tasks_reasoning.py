"""Tasks whose workers reason on their own: mathematics, multiple choice, and Python functions."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from . import prompts
from .data import Row, Source, loader, read, row_random
from .example import Example, Task
from .scoring import extract_choice, extract_code, extract_maths, extract_number, score_choice, score_code, score_maths, score_number

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
SCIENCE = ("biology", "chemistry", "physics")  # of MMLU-Pro
SHOWN_TESTS = 3  # of MBPP+
SLOW_SECONDS = {"599": 120.0}  # of MBPP+: rows whose own solution takes longer than the usual limit


def _parquet(hub: str, *arguments: str) -> str:
    """How to write the rows of a hub data set that is there as parquet only."""
    shown = ", ".join(f"'{argument}'" for argument in (hub, *arguments[:-1]))
    return f"load_dataset({shown}, split='{arguments[-1]}').to_json(FILE) with the package datasets writes it"


GSM8K = Source(("gsm8k/test",), "copy grade_school_math/data/test.jsonl of github.com/openai/grade-school-math there", "MIT", ids=())
MATH500 = Source(
    ("math500/test",),
    "copy test.jsonl of the hub data set HuggingFaceH4/MATH-500 there",
    "MIT",
    ids=("unique_id",),
    hub="HuggingFaceH4/MATH-500",
    hub_files=("test.jsonl",),
)
OLYMPIADBENCH = Source(
    ("olympiadbench/oe_to_maths_en_comp",), _parquet("Hothan/OlympiadBench", "OE_TO_maths_en_COMP", "train"), "Apache-2.0"
)
AIME2024 = Source(("aime2024/test",), _parquet("HuggingFaceH4/aime_2024", "train"), "problems of the MAA, no open licence stated")
AIME2025 = Source(
    ("aime2025/test",),
    "join aime2025-I.jsonl and aime2025-II.jsonl of the hub data set opencompass/AIME2025 there",
    "problems of the MAA, no open licence stated",
    hub="opencompass/AIME2025",
    hub_files=("aime2025-I.jsonl", "aime2025-II.jsonl"),
)
ARC = Source(("arc_challenge/test",), _parquet("allenai/ai2_arc", "ARC-Challenge", "test"), "CC BY-SA 4.0")
MMLU_PRO = Source(("mmlu_pro/science_test", "mmlu_pro/test"), _parquet("TIGER-Lab/MMLU-Pro", "test"), "MIT", ids=("question_id",))
MEDQA = Source(
    ("medqa/test",),
    "copy phrases_no_exclude_test.jsonl of the hub data set GBaker/MedQA-USMLE-4-options there",
    "MIT",
    hub="GBaker/MedQA-USMLE-4-options",
    hub_files=("phrases_no_exclude_test.jsonl",),
)
GPQA = Source(
    ("gpqa/gpqa_diamond",),
    "accept the terms of the hub data set Idavidrein/gpqa and copy its gpqa_diamond.csv there as it is",
    "CC BY 4.0; its authors ask that questions are not shown in plain text online",
    suffix=".csv",
    ids=("Record ID",),
    hub="Idavidrein/gpqa",
    hub_files=("gpqa_diamond.csv",),
    gated=True,
)
HUMANEVALPLUS = Source(
    ("humanevalplus/HumanEvalPlus-OriginFmt",),
    "copy HumanEvalPlus-OriginFmt.jsonl.gz of the releases of github.com/evalplus/humanevalplus_release there",
    "Apache-2.0",
    ids=("task_id",),
)
MBPPPLUS = Source(
    ("mbppplus/MbppPlus-OriginFmt",),
    "copy MbppPlus-OriginFmt.jsonl.gz of the releases of github.com/evalplus/mbppplus_release there",
    "Apache-2.0",
    ids=("task_id",),
)


# Mathematics


def _boxed(answer: str) -> str:
    return f"\\boxed{{{answer}}}"


def gsm8k(row: Row, seed: int) -> Example:
    """The reference is what follows ####, without thousands separators. Group: how many steps the written solution has."""
    solution = row.text("answer")
    _, mark, answer = solution.rpartition("####")
    answer = answer.strip().replace(",", "")
    if not mark or not re.fullmatch(r"-?\d+(\.\d+)?", answer):
        row.refuse("answer", "a solution that ends in #### and a number")
    steps = len(re.findall(r"<<.*?>>", solution))
    question = row.text("question")
    prefix, prompt = prompts.maths(question, "the final number")
    return Example(row.id, question, prefix, prompt, (answer,), _boxed(answer), group=f"{steps} steps", meta={"solution": solution})


def math500(row: Row, seed: int) -> Example:
    problem, answer = row.text("problem"), row.text("answer").strip()
    prefix, prompt = prompts.maths(problem)
    meta = {"level": row.label("level")}
    return Example(row.id, problem, prefix, prompt, (answer,), _boxed(answer), group=row.label("subject"), meta=meta)


def olympiadbench(row: Row, seed: int) -> Example:
    """The reference is `final_answer` without its dollar signs; `error` is the tolerance, `unit` is not asked for."""
    answers = tuple(_undollared(answer) for answer in row.items("final_answer", str))
    several = row.get("is_multiple_answer", bool, "true or false")
    unit, tolerance = row.label("unit"), row.label("error")
    question = "\n".join(part for part in (row.label("context"), row.text("question")) if part)
    form = "all final answers, separated by commas," if several else "the final answer"
    prefix, prompt = prompts.maths(question, f"{form} without its unit ({_undollared(unit)})" if unit else form)
    meta = {"is_multiple_answer": several, "unit": unit or None, "tolerance": _number(row, tolerance) if tolerance else None}
    return Example(row.id, question, prefix, prompt, answers, _boxed(", ".join(answers)), group=row.label("subfield"), meta=meta)


def _undollared(text: str) -> str:
    return re.sub(r"(?<!\\)\$", "", text).strip()


def _number(row: Row, text: str) -> float:
    try:
        return float(text.split(",")[0])
    except ValueError:
        row.refuse("error", "a number, the tolerance")


def aime(row: Row, seed: int) -> Example:
    """Answers are whole numbers from 0 to 999, compared as numbers."""
    problem, answer = row.text("problem", "question"), row.text("answer").strip()
    if not re.fullmatch(r"\d{1,3}", answer):
        row.refuse("answer", "a whole number from 0 to 999")
    prefix, prompt = prompts.maths(problem, "the final whole number")
    return Example(row.id, problem, prefix, prompt, (answer,), _boxed(answer), meta={"integer": True})


# Multiple choice


def _choice_example(row: Row, question: str, options: dict[str, str], letter: str, field: str, group: str = "") -> Example:
    """`field`: where the row holds the right letter, for a refusal."""
    if letter not in options:
        row.refuse(field, f"one of {', '.join(options)}")
    prefix, prompt = prompts.choice(question, options)
    meta = {"labels": list(options), "options": list(options.values())}
    return Example(row.id, question, prefix, prompt, (letter,), _boxed(letter), group=group, meta=meta)


def _lettered(row: Row, field: str, texts: Sequence[str]) -> dict[str, str]:
    if not 2 <= len(texts) <= len(LETTERS):
        row.refuse(field, f"2 to {len(LETTERS)} options")
    return dict(zip(LETTERS, texts))


def arc_challenge(row: Row, seed: int) -> Example:
    """Labels are the letters A to E, or the digits of the few rows of the original that have them."""
    choices = row.get("choices", dict, "an object with text and label")
    labels, texts = choices.get("label"), choices.get("text")
    lists = isinstance(labels, list) and isinstance(texts, list) and len(labels) == len(texts) >= 2
    if not lists or not all(isinstance(item, str) and item.strip() for item in (*labels, *texts)):
        row.refuse("choices", "text and label, lists of text of one length")
    letters = dict(zip(labels, LETTERS))
    options = _lettered(row, "choices", texts)
    key = row.text("answerKey")
    return _choice_example(row, row.text("question"), options, letters.get(key, key), "answerKey")


def mmlu_pro(row: Row, seed: int) -> Example:
    """The letter counts where letter and index disagree (one row), as in the data set's own scoring."""
    options = _lettered(row, "options", row.items("options", str))
    return _choice_example(row, row.text("question"), options, row.text("answer"), "answer", row.label("category"))


def load_mmlu_pro_science(folder: Path | None, workers: int, seed: int) -> list[Example]:
    """The rows of biology, chemistry and physics."""
    return [mmlu_pro(row, seed) for row in read(MMLU_PRO, folder) if row.text("category") in SCIENCE]


def medqa(row: Row, seed: int) -> Example:
    options = row.get("options", dict, "an object of letters and texts")
    if len(options) < 2 or not all(re.fullmatch("[A-Z]", k) and isinstance(v, str) and v.strip() for k, v in options.items()):
        row.refuse("options", "an object of letters and texts")
    return _choice_example(row, row.text("question"), options, row.text("answer_idx"), "answer_idx", row.label("meta_info"))


def gpqa(row: Row, seed: int) -> Example:
    """The right answer and three wrong ones, in an order drawn by (seed, row id)."""
    right = row.text("Correct Answer").strip()
    texts = [right, *(row.text(f"Incorrect Answer {number}").strip() for number in (1, 2, 3))]
    row_random(seed, row.id).shuffle(texts)
    letter = LETTERS[texts.index(right)]
    options = _lettered(row, "Correct Answer", texts)
    return _choice_example(row, row.text("Question").strip(), options, letter, "Correct Answer", row.label("High-level domain"))


# Python functions


def humanevalplus(row: Row, seed: int) -> Example:
    """The head of a function is given; `test` defines check(candidate)."""
    stub, name = row.text("prompt"), row.text("entry_point")
    prefix, prompt = prompts.function_stub(stub)
    solution = prompts.python_block(stub + row.text("canonical_solution"))
    meta = {"tests": row.text("test"), "entry_point": name, "stub": stub}
    return Example(row.id, stub, prefix, prompt, (solution,), solution, meta=meta)


def mbppplus(row: Row, seed: int) -> Example:
    """A function is described and three of its tests are shown; `test` runs on its own."""
    description = row.text("prompt")
    imports = row.get("test_imports", list, "a list of import lines")
    prefix, prompt = prompts.function_described(description, row.items("test_list", str)[:SHOWN_TESTS])
    solution = prompts.python_block(row.text("code"))
    meta = {"tests": row.text("test"), "imports": "\n".join(map(str, imports)), "timeout": SLOW_SECONDS.get(row.id)}
    return Example(row.id, description, prefix, prompt, (solution,), solution, meta=meta)


def _task(
    name: str, metric: str, source: Source, build: Callable[[Row, int], Example], score: Callable, extract: Callable, **changes
) -> Task:
    return Task(name, metric, loader(source, build), score, extract, source=str(source), **changes)


_MATHS = {"metric": "accuracy", "score": score_maths, "extract": extract_maths}
_NUMBER = {"metric": "accuracy", "score": score_number, "extract": extract_number}
_CHOICE = {"metric": "accuracy", "score": score_choice, "extract": extract_choice, "answer_tokens": 256}
_CODE = {"runs_code": True, "metric": "accuracy", "score": score_code, "extract": extract_code}

TASKS = [
    _task("gsm8k", source=GSM8K, build=gsm8k, **_NUMBER),
    _task("math500", source=MATH500, build=math500, **_MATHS),
    _task("olympiadbench", source=OLYMPIADBENCH, build=olympiadbench, **_MATHS),
    _task("aime2024", source=AIME2024, build=aime, **_NUMBER),
    _task("aime2025", source=AIME2025, build=aime, **_NUMBER),
    _task("arc_challenge", source=ARC, build=arc_challenge, **_CHOICE),
    Task("mmlu_pro_science", load=load_mmlu_pro_science, source=str(MMLU_PRO), **_CHOICE),
    _task("medqa", source=MEDQA, build=medqa, **_CHOICE),
    _task("gpqa", source=GPQA, build=gpqa, **_CHOICE),
    _task("humanevalplus", source=HUMANEVALPLUS, build=humanevalplus, **_CODE),
    _task("mbppplus", source=MBPPPLUS, build=mbppplus, **_CODE),
]
