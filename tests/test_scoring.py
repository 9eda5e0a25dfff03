"""Extraction and scoring of answers: a table of cases for every kind, the release's recorded rows, and any string at all."""

import json
import random
from pathlib import Path

import pytest

from minips.errors import MinipsError
from minips.evaluation import official, scoring
from minips.evaluation.example import Example

LABELS = ["INSERT_LARGE_DATA", "LOCK_CONTENTION", "VACUUM", "REDUNDANT_INDEX", "FETCH_LARGE_DATA"]
OPTIONS = ["a red planet", "the Moon", "the Sun", "the Moon of Mars"]


def example(*references, **meta):
    return Example("1", "", "", "", references, "", meta=meta)


def first(scores):
    return next(iter(scores.values()))


NUMBER = [  # text, extracted
    ("so \\boxed{42}", "42"), ("\\boxed{1,450}", "1450"), ("\\boxed{\\$1,450.00}", "1450"), ("\\boxed{18 \\text{ dollars}}", "18"),
    ("\\boxed{x=-17}", "-17"), ("\\boxed{\\frac{3}{4}}", "3/4"), ("\\boxed{25\\%}", "25"), ("\\boxed{3} \\boxed{about 7 apples}", "7"),
    ("\\boxed{\\text{D}}", None), ("work 3+4\n#### 1,200", "1200"), ("#### -3", "-3"), ("The answer is 5 + 3 = 8.", "8"),
    ("The answer is 18. She has 3 left.", "18"), ("**Answer: $1,000,000**", "1000000"), ("the total is 7 apples and 12 pears", "12"),
    ("He runs 10-12 miles", "12"), ("it falls to -4 degrees", "-4"), ("-$5", "-5"), ("value 3.50.", "7/2"), ("pay $.75", "3/4"),
    ("1 1/2 cups", "3/2"), ("<think>5</think>\nno number", None), ("\\boxed{}", None), ("", None), ("x", None),
    ("<answer>70,000</answer>", "70000"), ("1.5e3 J", "1500"), ("The final answer is -10.", "-10"), ("answer: 1/0", None),
    ("9" * 400, None), ("in 2,125 days", "2125"), ("\\boxed{2\\,125}", "2125"), ("so $1\\,234\\,567$", "1234567"), ("<answer>18", "18"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), NUMBER)
def test_number(text, expected):
    assert scoring.extract_number(text, example("1")) == expected
    if expected is not None:
        assert scoring.score_number(text, example(expected)) == {"accuracy": 1.0}
    assert scoring.score_number(text, example("123456789")) == {"accuracy": 0.0}


def test_numbers_are_compared_as_numbers():
    assert scoring.score_number("\\boxed{1450}", example("1,450")) == {"accuracy": 1.0}
    assert scoring.score_number("\\boxed{18.00}", example("18")) == {"accuracy": 1.0}
    assert scoring.score_number("\\boxed{073}", example("73")) == {"accuracy": 1.0}
    assert scoring.extract_number("there are 12 ways, a share of 0.5", example("12", integer=True)) == "12"


CHOICE = [  # text, letter; labels A to D
    ("\\boxed{C}", "C"), ("\\boxed{ c }", "C"), ("\\boxed{\\text{C}}", "C"), ("\\boxed{\\textbf{(C)}}", "C"),
    ("\\boxed{C. the Sun}", "C"), ("\\boxed{the Sun}", "C"), ("\\boxed{A} or rather \\boxed{B}", "B"), ("The answer is (C).", "C"),
    ("the answer is C because of heat", "C"), ("The correct option is **B**", "B"), ("Answer: D", "D"), ("answer: (b)", "B"), ("C", "C"),
    ("C.", "C"), ("(C)", "C"), ("c", "C"), ("C) the Sun", "C"), ("It is hot.\n\nC", "C"), ("A planet moves.", None),
    ("The answer is A planet", None), ("A is wrong, B is wrong. The answer is A.", "A"), ("The answer is the Sun.", "C"),
    ("the Moon of Mars", "D"), ("I choose the Moon", "B"), ("either the Sun or a red planet", None),
    ("<think>The answer is A</think> B", "B"), ("<answer>D</answer>", "D"), ("", None), ("I have no idea", None), ("E", None),
    ("Option B is right", "B"), ("I would go with (D) here", "D"), ("\\boxed{E}", None), ("**C**. It shines.", "C"),
    ("$\\boxed{\\mathrm{B}}$", "B"), ("\\boxed{A or C}", None), ("\\boxed{A, B, C, D}", None), ("\\boxed{C and D}", None),
    ("\\boxed{(A), (B)}", None), ("\\boxed{A red planet, or B}", "B"), ("<answer>B", "B"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), CHOICE)
def test_choice(text, expected):
    for options in (OPTIONS, dict(zip("ABCD", OPTIONS))):
        row = example(expected or "A", labels=list("ABCD"), options=options)
        assert scoring.extract_choice(text, row) == expected
        assert scoring.score_choice(text, row) == {"accuracy": float(expected is not None)}


def test_choice_by_digits_and_without_option_texts():
    row = example("3", labels=["1", "2", "3", "4"])
    for text in ("3", "\\boxed{3}", "The answer is 3.", "(3)", "3. water"):
        assert scoring.score_choice(text, row) == {"accuracy": 1.0}, text
    assert scoring.score_choice("There are 3 of them in 1 box", row) == {"accuracy": 0.0}


STUB = 'from typing import List\n\n\ndef helper(x):\n    return x + 1\n\n\ndef f(xs: List[int]) -> int:\n    """Sum."""\n'
CODE = [  # text, a part of what is run (None: nothing is)
    ("```python\ndef f(xs):\n    return sum(xs)\n```", "return sum(xs)"), ("```py\ndef f(xs): return 1\n```", "return 1"),
    ("```\ndef f(xs): return 2\n```", "return 2"), ("```Python\ndef f(xs): return 3", "return 3"),
    ("def f(xs):\n    return 4", "return 4"), ("Here:\n\nimport math\ndef f(xs):\n    return 5", "import math"),
    ("```python\ndef f(xs): return 6\n```\nUse:\n```python\nf([1])\n```", "return 6"),
    ("```bash\nls\n```\n```python\ndef f(xs): return 7\n```", "return 7"),
    ("<think>```python\ndef f(): 0\n```</think>\n```python\ndef f(xs): return 8\n```", "return 8"),
    ("```python\n    return sum(xs)\n```", "def f(xs: List[int])"), ("    return sum(xs)", "def f(xs: List[int])"),
    ("\n\n    def g(): pass\n    return 0", "def g()"), (" Here:\n```python\ndef f(xs): return 1\n```", "return 1"),
    ("```python\nreturn sum(xs)\n```", "    return sum(xs)"), ("```python\ndef f(xs): return helper(9)\n```", "def helper(x)"),
    ("```json\n{}\n```", None), ("no code", None), ("", None), ("```python\n```", None),
]  # fmt: skip


@pytest.mark.parametrize(("text", "part"), CODE)
def test_code_extraction(text, part):
    source = scoring.extract_code(text, example("", stub=STUB, entry_point="f"))
    assert source is None if part is None else part in source
    if part:
        compile(source, "answer", "exec")


def test_code_is_run():
    tests = "def check(candidate):\n    assert candidate([1, 2]) == 3\n"
    row = example("", stub=STUB, entry_point="f", tests=tests, imports="", timeout=5)
    for text, right in (("    return sum(xs)", 1), ("```python\ndef f(xs): return 3\n```", 1), ("    return 4", 0), ("nothing", 0)):
        assert scoring.score_code(text, row) == {"accuracy": float(right)}, text
    unnamed = example("", tests="for inp in [[[3, 4]]]:\n    assert sum(*inp) == math.prod([7])", entry_point=None, imports=["import math"])
    assert scoring.score_code("```python\ndef sum(xs): return xs[0] + xs[1]\n```", unnamed) == {"accuracy": 1.0}
    assert scoring.score_code("```python\ndef total(xs): return 7\n```", unnamed) == {"accuracy": 0.0}
    assert scoring.run_answer("```python\ndef total(xs): return 7\n```", unnamed).reason == "the code defines no sum"


GAIA = [  # text, reference, right
    ("<answer>Paris</answer>", "paris", 1), ("FINAL ANSWER: Paris.", "Paris", 1), ("x\nFINAL ANSWER: 17", "17", 1),
    ("<answer>$1,000</answer>", "1000", 1), ("<answer>10%</answer>", "10", 1), ("<answer>10.5</answer>", "10.5", 1),
    ("<answer>ten</answer>", "10", 0), ("<answer>St. John</answer>", "St John", 1), ("<answer>sea gull</answer>", "Seagull", 1),
    ("<answer>a, b, c</answer>", "a,b,c", 1), ("<answer>a; b, c</answer>", "a, b, c", 1), ("<answer>a, c, b</answer>", "a, b, c", 0),
    ("<answer>a, b</answer>", "a, b, c", 0), ("<answer>1, two</answer>", "1.0, Two", 1), ("<answer>a. b, c</answer>", "ab, c", 0),
    ("<answer>1</answer> then <answer>2</answer>", "2", 1), ("<think><answer>1</answer></think>3", "3", 1),
    ("I think it is\nParis", "Paris", 1), ("", "x", 0), ("<answer></answer>", "x", 0), ("\\boxed{7}", "7", 1),
    ("It is <answer>Paris", "Paris", 1), ("<answer>17</answer> or <answer>18", "17", 1),
    ("The answer is Rome.", "Rome", 1),
]  # fmt: skip


@pytest.mark.parametrize(("text", "reference", "right"), GAIA)
def test_gaia(text, reference, right):
    assert scoring.score_gaia(text, example(reference)) == {"accuracy": float(right)}


DIAGNOSIS = [  # text, labels named, at most two
    ('<answer>["VACUUM", "LOCK_CONTENTION"]</answer>', "LOCK_CONTENTION, VACUUM"), ('<answer>["vacuum"]</answer>', "VACUUM"),
    ("<answer>[]</answer> VACUUM", None), ("It is lock contention, then maybe VACUUM", "LOCK_CONTENTION, VACUUM"),
    ("<answer>Lock-Contention</answer>", "LOCK_CONTENTION"), ("nothing", None), ("", None),
    ('<answer>```json\n["REDUNDANT_INDEX"]\n```</answer>', "REDUNDANT_INDEX"),
    ('<answer>{"root_cause": "FETCH_LARGE_DATA (slow)"}</answer>', "FETCH_LARGE_DATA"),
    ("<think>VACUUM</think> REDUNDANT_INDEX", "REDUNDANT_INDEX"), ('<answer>["A"]</answer> <answer>["VACUUM"]</answer>', "VACUUM"),
    ("autovacuums", None), ('<answer>["INSERT_LARGE_DATA", "VACUUM", "REDUNDANT_INDEX"]</answer>', "INSERT_LARGE_DATA, VACUUM"),
    ('<answer>["VACUUM", "VACUUM"]</answer>', "VACUUM"), ("<answer>VACUUM; FETCH_LARGE_DATA.</answer>", "FETCH_LARGE_DATA, VACUUM"),
    ("Root causes: **INSERT_LARGE_DATA**", "INSERT_LARGE_DATA"), ("<answer>[", None),
    ('VACUUM? No: <answer>["REDUNDANT_INDEX"', "REDUNDANT_INDEX"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), DIAGNOSIS)
def test_labels(text, expected):
    row = example(labels=LABELS, root_causes=["VACUUM"], number_of_labels_pred=2)
    assert scoring.extract_labels(text, row) == expected
    right = float("VACUUM" in (expected or ""))
    assert scoring.score_labels(text, row) == {"accuracy": right, "task_score": right}


def test_labels_partly_right():
    row = example(labels=LABELS, root_causes=["VACUUM", "LOCK_CONTENTION"], number_of_labels_pred=3)
    assert scoring.score_labels('<answer>["VACUUM", "FETCH_LARGE_DATA"]</answer>', row) == {"accuracy": 0.0, "task_score": 0.5}
    assert scoring.score_labels('<answer>["X", "VACUUM", "FETCH_LARGE_DATA", "LOCK_CONTENTION"]</answer>', row) == {
        "accuracy": 1.0,
        "task_score": 1.0,
    }


SPAN = [  # text, references, em, f1
    ("Paris", ["Paris"], 1, 1), ("The Paris.", ["paris"], 1, 1), ("in Paris", ["Paris"], 0, 2 / 3), ("London", ["Paris"], 0, 0),
    ("", ["Paris"], 0, 0), ("Paris, France", ["Paris", "Paris France"], 1, 1),
    ("The answer is Wilhelm Röntgen.", ["Wilhelm Röntgen"], 1, 1), ("Paris\n\nIt is in France.", ["Paris"], 1, 1),
    ("<answer>an apple</answer>", ["apple"], 1, 1), ("<think>Rome</think>Paris", ["Paris"], 1, 1), ("Answer: Paris", ["Paris"], 1, 1),
    ("...", ["Paris"], 0, 0), ("Sure, here it is:\nParis", ["Paris"], 1, 1), ("the", ["the Who"], 0, 0),
    ("May 18 2018", ["May 18, 2018"], 1, 1), ("a b b", ["b b c"], 0, 0.8), ("x", [], 0, 0),
]  # fmt: skip


@pytest.mark.parametrize(("text", "references", "em", "f1"), SPAN)
def test_span(text, references, em, f1):
    found = scoring.score_span(text, example(*references))
    assert list(found) == ["em", "f1", "contains"] and found["em"] == em and found["f1"] == pytest.approx(f1)
    assert found["contains"] >= em


CONTAINS = [  # text, references, whether the words stand in it as a run
    ("It was Paris, in France.", ["Paris"], 1), ("It is in the parish.", ["Paris"], 0), ("born in May 18, 2018, he", ["May 18 2018"], 1),
    ("Scott Glenn and Ann Scott", ["Ann Glenn", "Glenn Scott"], 0), ("<think>Paris</think> London", ["Paris"], 0),
    ("The who?", ["the Who"], 1), ("anything", ["the"], 0), ("", ["Paris"], 0), ("Rome or Paris", ["Oslo", "paris"], 1), ("x", [], 0),
]  # fmt: skip


@pytest.mark.parametrize(("text", "references", "expected"), CONTAINS)
def test_contains(text, references, expected):
    assert scoring.score_span(text, example(*references))["contains"] == expected


YES_NO = [
    ("yes", "yes"), ("Yes, because 3 < 4.", "yes"), ("No.", "no"), ("no", "no"), ("The answer is yes.", "yes"), ("**No**", "no"),
    ("True", "yes"), ("false", "no"), ("There is no evidence against it, so yes.", "yes"), ("Answer: No", "no"),
    ("\\boxed{\\text{no}}", "no"), ("<answer>yes</answer>", "yes"), ("\\boxed{no}", "no"), ("<think>yes</think> no", "no"), ("", None),
    ("perhaps", None), ("There is no doubt about it", None), ("I know nothing", None), ("It could. So: no.", "no"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), YES_NO)
def test_yes_no(text, expected):
    assert scoring.extract_yes_no(text, example("yes")) == expected
    for reference in ("yes", "no"):
        assert scoring.score_yes_no(text, example(reference)) == {"accuracy": float(expected == reference)}


KEY = "d1ff29be-4e2a-4208-a182-0cea716be3d4"
EXACT = [
    (KEY, 1), (f"The value is {KEY}.", 1), (KEY.upper(), 1), (f'"{KEY}"', 1), (f"<think>{KEY}</think> no", 0), (KEY[:-1], 0),
    (KEY + "0", 0), ("0" + KEY, 0), (KEY[:-1] + "5", 0), ("", 0), ("none", 0), (f"<answer>{KEY}</answer>", 1), (f"a54e2eed: {KEY}", 1),
    (KEY.replace("-", ""), 0), (f"{KEY}-1", 0), (f"({KEY})", 1),
]  # fmt: skip


@pytest.mark.parametrize(("text", "right"), EXACT)
def test_exact(text, right):
    assert scoring.score_exact(text, example(KEY)) == {"accuracy": float(right)}
    if right:
        assert scoring.extract_exact(text, example(KEY)) == KEY


# ---- the release's rules


GOLDEN = json.loads((Path(__file__).parent / "golden" / "scoring.json").read_text())
RELEASE = {
    "extract_boxed_or_last_number": official.boxed_or_last_number,
    "gsm8k_gold": official.gsm8k_gold,
    "normalize_answer": official.normalized,
    "after_think": official.after_think,
    "python_block": official.python_block,
    "gaia_answer_text": official.gaia_answer,
    "gaia_match": official.gaia_match,
    "marble_db_score": lambda text, gold, most: official.labels_score(text, gold, LABELS, most),
}


@pytest.mark.parametrize("row", GOLDEN, ids=lambda row: f"{row['fn']}-{row['args'][0]}")
def test_recorded_rows_of_the_release(row):
    assert RELEASE[row["fn"]](*row["args"]) == row["result"]


def test_official_rules_keep_the_faults_of_the_release():
    thousands = example("1450", solution="... #### 1,450")
    assert (
        first(scoring.score_number("\\boxed{1450}", thousands, "official")) == 0
        and first(scoring.score_number("\\boxed{1450}", thousands)) == 1
    )
    assert (
        first(scoring.score_number("\\boxed{1,999}", thousands, "official")) == 1
        and first(scoring.score_number("\\boxed{1,999}", thousands)) == 0
    )
    letter = example("D", labels=list("ABCD"), options=OPTIONS)
    assert (
        first(scoring.score_choice("\\boxed{\\text{D}}", letter, "official")) == 0
        and first(scoring.score_choice("\\boxed{d}", letter, "official")) == 1
    )
    assert first(scoring.score_maths("\\boxed{\\frac{3}{4}}", example("\\frac{3}{4}"), "official")) == 0
    assert first(scoring.score_gaia("<answer>10%</answer>", example("10"), "official")) == 0
    assert first(scoring.score_number("\\boxed{073}", example("73", integer=True), "official")) == 1
    with pytest.raises(MinipsError, match="rules is 'ours', expected one of minips, official"):
        scoring.score_number("1", example("1"), "ours")


PAIRS = [name.removeprefix("score_") for name in vars(scoring) if name.startswith("score_")]


def test_every_kind_has_a_pair():
    assert sorted(PAIRS) == ["choice", "code", "exact", "gaia", "labels", "maths", "number", "span", "yes_no"]


def test_no_string_raises_and_no_answer_scores_nothing():
    rng = random.Random(2)
    row = example("C", labels=list("ABCD"), options=OPTIONS, root_causes=["VACUUM"], tests="", entry_point="f")
    pieces = [
        "\\boxed{", "}", "{", "<answer>", "</answer>", "</think>", "The answer is", "Answer:", "####", "```python\n", "```", "\n", " ",
        "1,000", "-", "$", "(C)", "A", "yes", "no.", ".", "\\text{", "[", "]", '"', "VACUUM", "\\frac{1}{", "½", "\x00", "\ud800", "😀",
        "def f():", "1/0", "nan", "inf",
    ]  # fmt: skip
    for _ in range(600):
        text = "".join(rng.choices(pieces, k=rng.randint(0, 14)))
        for kind in PAIRS:
            for rules in ("minips", "official"):
                found = getattr(scoring, f"extract_{kind}")(text, row, rules)
                assert found is None or isinstance(found, str)
                if kind != "code":
                    scores = getattr(scoring, f"score_{kind}")(text, row, rules)
                    assert all(0.0 <= score <= 1.0 for score in scores.values())
                    assert found is not None or not any(scores.values()), (kind, text)


@pytest.mark.parametrize("kind", [kind for kind in PAIRS if kind != "code"])
def test_long_hostile_text_ends(kind):
    row = example("C", labels=list("ABCD"), options=OPTIONS, root_causes=["VACUUM"])
    for piece in ("\\boxed{", "<answer>", "(", "the answer is ", "A ", "1,", "```python\n", "$", "no ", "- ", "\n", "answer to a b c "):
        getattr(scoring, f"score_{kind}")(piece * (20_000 // len(piece)), row)
