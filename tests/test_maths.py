"""Equality of mathematical answers: a table of cases, hostile input, and the laws that equality should obey."""

import random
import time
from fractions import Fraction

import pytest

from minips.evaluation.example import Example
from minips.evaluation.expressions import (
    MOST_TOKENS,
    Parser,
    Undefined,
    value,
    variables,
)
from minips.evaluation.maths import canonical, same_answer
from minips.evaluation.scoring import extract_maths, score_maths

SAME = [  # answer, reference
    ("42", "42"), ("42.", "42"), ("$42$", "42"), (r"\(42\)", "42"), ("042", "42"), ("42.0", "42"), ("-7", "−7"),
    (r"\dfrac{3}{4}", r"\frac{3}{4}"), (r"\frac34", r"\frac{3}{4}"), ("3/4", r"\tfrac{3}{4}"), ("0.75", r"\frac34"), ("6/8", "3/4"),
    (r"\frac{270}7\text{ degrees}", r"\frac{270}{7}"), ("-3/4", r"-\frac{3}{4}"), ("-3/4", r"\frac{-3}{4}"), (r"1\frac{4}{5}", "9/5"),
    ("1 4/5", r"1\frac{4}{5}"), (r"137 \frac{1}{2}", "137.5"), (r"-1\frac12", "-1.5"), ("1,234", "1234"), (r"10,\!080", "10080"),
    ("11,\\! 111,\\! 111,\\! 100", "11111111100"), ("1{,}234.5", "1234.5"), (r"70\,000", "70000"), (r"\$32,348", "32348"), (r"\$18.90", "18.9"),
    ("18 dollars", "18"), (r"5.4 \text{ cents}", "5.4"), (r"864 \mbox{ inches}^2", "864"), ("15 cm^2", r"15\mbox{ cm}^2"),
    ("12 km/h", "12"), ("5 m", "5"), ("62.5%", r"62.5\%"), ("62.5", "62.5%"), ("0.625", r"62.5\%"), (r"90^\circ", "90"),
    ("90°", r"90^{\circ}"), ("90 degrees", "90"), ("x = 5", "5"), ("5", "x=5"), ("x=5", "x = 5"), ("f(x) = 2x", r"f(x)=2 x"),
    ("2x+3", "y = 2x + 3"), ("M=2^{N-2}+1", "2^{N-2}+1"), (r"m_{\max}=n^2-n-1", r"m_{\max }=n^{2}-n-1"),
    ("4 + 5x - 7y + 11z = 0", "5x - 7y + 11z + 4 = 0"), ("10x=14y", "5x - 7y = 0"), (r"\sqrt{8}", r"2\sqrt{2}"),
    (r"11\sqrt2", r"11\sqrt{2}"), (r"\frac{\sqrt{3}}{3}", r"\frac{1}{\sqrt3}"), ("2√2", r"\sqrt 8"), (r"\sqrt[3]{8}", "2"),
    ("sqrt(3)/2", r"\frac{\sqrt{3}}{2}"), ("2pi", r"2\pi"), (r"\frac{\pi}{6}", "π/6"), ("18+2π", r"18 + 2\pi"), ("3e5", r"3 \times 10^5"),
    (r"6.72 \cdot 10^{-5}", ".0000672"), (r"2^{10}", "1024"), ("5!", "120"), (r"\binom{10}{3}", "120"), ("(x+1)^2", "x^2+2x+1"),
    ("(b+2)(a+5)", "(a+5)(b+2)"), (r"\frac{n(n+1)}{2}", r"\frac12 n^2 + \frac{n}{2}"), ("2k", "k*2"),
    (r"\frac{d!}{2k(d-k)!}", r"\frac{d !}{2 k(d-k) !}"), (r"\lfloor n/2 \rfloor", r"\left\lfloor\frac{n}{2}\right\rfloor"),
    (r"\cot x", r"\frac{\cos x}{\sin x}"), (r"\log_2 8", "3"), (r"6+9i", "9i+6"), ("-2", r"2 \cdot -1"),
    ("(3, π/2)", r"\left( 3, \frac{\pi}{2} \right)"), ("(3,4]", r"\left(3,4\right]"), (r"(2,\infty)", "x > 2"), ("[2,5)", r"2 \le x < 5"),
    ("k >= 2".replace(">=", "≥"), r"k \geqslant 2"), (r"x \in [-2,7]", "[-2, 7]"),
    (r"(-\infty,2)\cup(3,\infty)", r"(3,\infty) \cup (-\infty, 2)"), ("5, 3, 7", "3, 5, 7"), (r"\{1, 2\}", "2,1"), ("-2 and 1", "-2,1"),
    (r"1 \text{ or } -2", "1,-2"), (r"1 \pm \sqrt{19}", r"1-\sqrt{19}, 1+\sqrt{19}"),
    (r"\{-2, 1+\sqrt5, 1-\sqrt5\}", r"\{1\pm\sqrt{5},-2\}"), (r"(2,7,13),(1,8,19)", "(1,8,19), (2,7,13)"),
    (r"\begin{pmatrix} -1/3 \\ 2/3 \end{pmatrix}", r"\begin{pmatrix} -\frac13 \\ \frac23 \end{pmatrix}"),
    (r"\begin{bmatrix}-1 & 0\\0 & -1\end{bmatrix}", r"\begin{pmatrix} -1 & 0 \\ 0 & -1 \end{pmatrix}"), ("52_8", "52_{8}"),
    ("52", "52_8"), ("Evelyn", r"\text{Evelyn}"), ("evelyn", r"\text{Evelyn}"), ("C", r"\text{(C)}"), (r"\text{(C)}", "(C)"),
]  # fmt: skip

DIFFERENT = [
    ("42", "43"), ("-7", "7"), ("0.33", r"\frac13"), ("3.14", r"\pi"), ("11111111100", "11111111101"), ("1.41", r"\sqrt2"),
    ("(1,2)", "(2,1)"), ("(1,2)", "[1,2]"), ("(1,2)", "1,2"), ("1,2", "1,2,3"), ("1,1", "1,2"), ("1", "1,2"), ("2x", "2y"), ("2x", "2"),
    ("x^2", "x^3"), ("y=2x", "y=2x+1"), ("f(x)=x", "f(x)=-x"), ("52_8", "52_7"), ("53", "52_8"), ("Evelyn", r"\text{Navin}"),
    ("C", r"\text{(B)}"), ("62.5%", "0.62"), ("3%", "3.5%"), ("6-5i", "1"), ("3n", "3"), (r"2\frac{3}{2}", r"\frac72"),
    ("1 + \\sqrt{19}", r"1 \pm \sqrt{19}"), (r"(-\infty,2)", r"(-\infty,2]"), ("1,234", "1,235"), ("2500", "25"),
    (r"\frac{n}{2}", r"\lfloor n/2 \rfloor"), ("", "0"), ("0", ""), ("a", "b"),
    (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix} 2 \\ 1 \end{pmatrix}"), ("p - q", "q - p"), ("no idea", "5"),
    ("x", "x=5"),
]  # fmt: skip


@pytest.mark.parametrize(("answer", "reference"), SAME)
def test_same(answer, reference):
    assert same_answer(answer, reference)
    assert same_answer(reference, reference)


@pytest.mark.parametrize(("answer", "reference"), DIFFERENT)
def test_different(answer, reference):
    assert not same_answer(answer, reference)


def test_tolerance_is_absolute_and_commas_of_lists_are_no_thousands():
    assert same_answer("4.15", "4.2", tolerance=0.1) and not same_answer("4.35", "4.2", tolerance=0.1)
    assert same_answer("100,200", "200, 100", several=True) and not same_answer("100200", "100,200", several=True)
    assert same_answer("100200", "100,200")


HOSTILE = [
    "9^{9^{9^9}}", "9^9^9^9^9^9", "10^{10^{10}}!", "5" + "!" * 300, "1e999999999", "(10^{500})^{500}", "(" * 900, "{" * 900,
    "-" * 900 + "1", r"\frac" * 300, r"\sqrt" * 300 + "2", "^" * 500, "1," * 900, "±" * 300, "1±" * 300, "x" * 1900, "9" * 1900,
    "7" * 300 + "^" + "7" * 300, r"\binom{10000}{500}" * 20, "((x+1)^{99})^{99}" * 9, r"\text{" * 200, "a b " * 400, "1 " * 900,
    "|" * 400, "<" * 400, "=" * 400, "x=" * 400, r"\begin{pmatrix}" * 40, "∪" * 900, "[" * 500 + "]" * 500, "(1,(2," * 150, "%" * 900,
    "_" * 900, "²" * 900, "１２", "٣", "\x00", "\ud800",
]  # fmt: skip


def test_hostile_input_ends_at_once():
    for text in HOSTILE:
        started = time.process_time()
        same_answer(text, "1"), same_answer("1", text), same_answer(text, text), canonical(text)
        assert time.process_time() - started < 2, text[:40]
    with pytest.raises(Undefined):
        value(Parser("9^{9^{9^9}}").parse())
    with pytest.raises(Undefined):
        Parser("1+" * MOST_TOKENS + "1").parse()


def test_no_string_raises():
    rng = random.Random(1)
    pieces = [
        *r"0123456789+-*/^_=<>()[]{}|!,.;:%$&~ abexyi", "\n", "\\", r"\frac", r"\sqrt", r"\boxed{", r"\text{", r"\pm", r"\pi", r"\left(",
        r"\cup", r"\infty", r"\begin{pmatrix}", r"\end{pmatrix}", "\\\\", r"\circ", "π", "∞", "½", "😀", r"\{", r"\}",
    ]  # fmt: skip
    example = Example("1", "", "", "", ("1",), "")
    for _ in range(1500):
        text = "".join(rng.choices(pieces, k=rng.randint(0, 30)))
        other = "".join(rng.choices(pieces, k=rng.randint(1, 12)))
        same_answer(text, other), canonical(text)
        assert score_maths(text, example)["accuracy"] in (0.0, 1.0)
        extract_maths(text, example)


def test_values_are_exact_where_they_can_be():
    cases = {
        "1/3+1/6": Fraction(1, 2), r"\sqrt{\frac{9}{4}}": Fraction(3, 2), "2^{-3}": Fraction(1, 8), "-3^2": -9, "2*-3": -6,
        r"\frac12 * 4": 2, "10^{40}+1": 10**40 + 1, "8^{2/3}": 4, "|2-5|": 3, "⌈7/2⌉": 4, "3!!": 720,
    }  # fmt: skip
    for text, expected in cases.items():
        got = value(Parser(text).parse())
        assert isinstance(got, Fraction) and got == expected, text
    assert variables(Parser(r"a_{1} x^2 + \theta e^{i\pi}").parse()) == {"a_1", "x", r"\theta"}


EXTRACTED = [  # text, the canonical answer
    (r"so \boxed{42}", "42"), (r"\boxed{1} then \boxed{2}", "2"), (r"\boxed{\frac{3}{4}}", "3/4"), (r"\boxed{\text{Evelyn}}", "evelyn"),
    (r"</think> no <think> x </think> \boxed{7}", "7"), (r"<think>\boxed{1}</think> it is \boxed{2}", "2"),
    ("The answer is $x = 5$.", "5"), ("Final answer: 12 apples", "12"), ("The answer is 3.5. I checked it.", "7/2"),
    (r"Thus \[ y = 9 \]", "9"), ("we get $a=1$ and $b=4$", "4"), (r"\boxed{1,250}", "1250"), (r"\boxed{\boxed{6}}", "6"),
    (r"\boxed{2} and \boxed{3}", "2,3"), (r"\boxed 8", "8"), ("no answer", "noanswer"), ("", None), (r"\boxed{}", None),
    ("I looked at it for a very long time and then found, after more work, that there are 17 of them", "17"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), EXTRACTED)
def test_extraction(text, expected):
    assert extract_maths(text, Example("1", "", "", "", (), "")) == expected


def test_several_references():
    both = Example("1", "", "", "", ("2", "3"), "", meta={"is_multiple_answer": True})
    one = Example("1", "", "", "", ("2", "3"), "")
    for text, all_of, any_of in ((r"\boxed{3,2}", 1, 0), (r"\boxed{2}", 0, 1), (r"\boxed{2} and \boxed{3}", 1, 0), (r"\boxed{4}", 0, 0)):
        assert score_maths(text, both) == {"accuracy": float(all_of)}, text
        assert score_maths(text, one) == {"accuracy": float(any_of)}, text
