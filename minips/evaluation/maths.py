"""Whether two mathematical answers say the same: numbers, expressions, tuples, intervals, sets, matrices, equations, words.

Answers are tidied (LaTeX and plain writing become one), taken apart by their brackets and commas, and compared part by part;
expressions by their values, at several points where they have variables. What cannot be read is compared as text.
"""

from __future__ import annotations

import random
import re
from fractions import Fraction

from .expressions import WORDS, Number, Parser, Undefined, close, value, variables

MOST_CHARACTERS = 2000
MOST_PARTS = 64
_SYMBOLS = {
    r"\leqslant": "≤", r"\leq": "≤", r"\le": "≤", r"\geqslant": "≥", r"\geq": "≥", r"\ge": "≥", r"\lt": "<", r"\gt": ">",
    r"\neq": "≠", r"\ne": "≠", r"\in": "∈", r"\cup": "∪", r"\pm": "±", r"\mp": "∓", r"\infty": "∞", r"\times": "*", r"\cdot": "*",
    r"\div": "/", r"\lfloor": "⌊", r"\rfloor": "⌋", r"\lceil": "⌈", r"\rceil": "⌉", r"\lvert": "|", r"\rvert": "|", r"\vert": "|",
    r"\{": "⦃", r"\}": "⦄", r"\lbrace": "⦃", r"\rbrace": "⦄", r"\degree": "°", r"\%": "%", r"\quad": " ", r"\qquad": " ",
    "−": "-", "–": "-", "×": "*", "·": "*", "⋅": "*", "÷": "/", "π": r"\pi ", "√": r"\sqrt ", "²": "^2", "³": "^3",
    "½": r"\frac{1}{2}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}", "≠": "≠", "“": "", "”": "",
}  # fmt: skip
_SPACING = re.compile(r"\\(?:left|right|[bB]ig+[lr]?|displaystyle|limits|mathstrut)(?![A-Za-z])|\\[!,;: ]|~")
_NAME = re.compile(
    r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|mathsf|mbox|hbox|operatorname)\s*\{([^{}]*)\}(\s*\^\s*(?:\{\d\}|\d))?"
)
_UNIT = re.compile(r"^(.*[\d}).%])\s*(?<![A-Za-z\\])((?:[A-Za-z]+\.?(?:\^?\{?-?\d\}?)?(?:\s*/\s*|\s+|$))+)$", re.DOTALL)
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")
_OPEN, _CLOSE = "([{⦃", ")]}⦄"


def tidied(text: str) -> str:
    """One way of writing: no dollar signs, no spacing commands, one symbol for each relation, names without \\text."""
    text = text[:MOST_CHARACTERS].replace("\n", " ").replace("\\\\", "⏎")
    text = re.sub(r"(\d)(?:(?:\{,\}|,\s*\\!)\s*(?=\d{3})|(?:\\,|[\u2009\u202f])(?=\d{3}(?!\d)))", r"\1", text)
    text = re.sub(r"\\\$|\$|\\[()]|\\\[|\\\]|\*\*|[€£]", "", text)
    text = _SPACING.sub(" ", text)
    text = re.sub(r"\\[dtc]frac(?![A-Za-z])", r"\\frac", re.sub(r"\\[dt]binom(?![A-Za-z])", r"\\binom", text))
    text = re.sub(r"\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![A-Za-z])|\{\s*\\degree\s*\})", "°", text)
    for name, symbol in _SYMBOLS.items():
        text = re.sub(
            re.escape(name) + ("(?![A-Za-z])" if name[-1].isalpha() and name[0] == "\\" else ""), symbol.replace("\\", r"\\"), text
        )
    text = _NAME.sub(_named, text)
    text = re.sub(r"°|\bdegrees?\b", "", text)
    text = text.strip().strip("`*").rstrip(".,;: ").strip()
    return text


def _named(found: re.Match) -> str:
    """The content of a \\text: a comma for "and", nothing for a unit behind a number, else the words themselves."""
    word, before = found[1].strip(), found.string[: found.start()].rstrip()
    if word.lower() in ("and", "or", ", and", "and ", ","):
        return ","
    if before and (before[-1].isdigit() or before[-1] in ")}") and (len(word) > 1 or found[2]) and re.search(r"\d", before):
        return ""
    return f" {word} " if len(word) > 1 else word


def without_unit(text: str) -> str:
    """A number without the words behind it: 18 dollars, 12 km/h, 15 cm^2, 5 m; single letters only behind a bare number."""
    found = _UNIT.match(text)
    words = re.findall("[A-Za-z]+", found[2]) if found else []
    if not words or WORDS.intersection(words) or any(word.isupper() for word in words[:1]):
        return text
    if len(words[0]) == 1 and not re.fullmatch(r"[-\d.,]+\s+[msghlt](?:\b.*)?", text):
        return text
    return found[1].strip()


def split(text: str, separators: str) -> list[str]:
    """Parts of a text between separators that stand outside all brackets. A "(" may be closed by "]", as in intervals."""
    parts, depth, start = [], 0, 0
    for at, character in enumerate(text):
        if character in _OPEN:
            depth += 1
        elif character in _CLOSE:
            depth -= 1
        elif character in separators and depth == 0:
            parts.append(text[start:at].strip())
            start = at + 1
    return [*parts, text[start:].strip()]


def _whole(text: str) -> bool:
    """Does the first bracket close at the very end?"""
    depth = 0
    for at, character in enumerate(text):
        depth += (character in _OPEN) - (character in _CLOSE)
        if depth == 0:
            return at == len(text) - 1
    return False


def read(text: str) -> tuple:
    """A tidied answer as a tree: (kind, ...) with kind set, tuple, union, matrix, equation, base, or expression."""
    text = text.strip()
    if matrix := re.fullmatch(r"\\begin\{(\w*matrix|array)\}(?:\{[clr|]*\})?(.*?)\\end\{\1\}", text, re.DOTALL):
        rows = [row for row in matrix[2].split("⏎") if row.strip()]
        return ("matrix", tuple(tuple(read(cell) for cell in row.split("&")) for row in rows))
    if "∈" in text:
        text = text.split("∈")[-1].strip()
    if len(parts := split(text, "∪")) > 1:
        return ("union", tuple(map(read, parts)))
    if _THOUSANDS.fullmatch(text.lstrip("+-").partition(".")[0].rstrip("%")) or _THOUSANDS.fullmatch(text):
        return ("expression", text.replace(",", ""))
    parts = split(re.sub(r"(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])", ",", text), ",;")
    if len(parts) > 1:
        return ("set", tuple(item for part in parts[:MOST_PARTS] if part for item in _signs(part)))
    if text[:1] in ("⦃", "{") and _whole(text) and (text[0] == "⦃" or len(split(text[1:-1], ",")) > 1):
        return ("set", tuple(item for part in split(text[1:-1], ",;")[:MOST_PARTS] if part for item in _signs(part)))
    if text[:1] in ("(", "[") and text[-1:] in (")", "]") and _whole(text) and len(inner := split(text[1:-1], ",;")) > 1:
        return ("tuple", text[0] + text[-1], tuple(map(read, inner[:MOST_PARTS])))
    if "±" in text or "∓" in text:
        return ("set", tuple(_signs(text)))
    if base := re.fullmatch(r"(\d+)\s*_\s*\{?\s*(\d+)\s*\}?", text):
        return ("base", base[1], base[2])
    if interval := _interval(text):
        return interval
    sides = split(text, "=")
    if len(sides) > 1 and all(sides):
        return ("equation", sides[0], sides[-1])
    return ("expression", text)


def _signs(text: str) -> list[tuple]:
    """One part of a list, or two where it holds ±."""
    if "±" not in text and "∓" not in text:
        return [read(text)]
    return [read(text.replace("±", a).replace("∓", b)) for a, b in (("+", "-"), ("-", "+"))]


def _interval(text: str) -> tuple | None:
    """x ≥ 2 and 1 < x ≤ 5 as intervals."""
    marks = [c for c in text if c in "<>≤≥"]
    parts = split(text, "<>≤≥")
    if len(parts) != len(marks) + 1 or not 1 <= len(marks) <= 2:
        return None
    if marks[0] in ">≥" and all(m in ">≥" for m in marks):
        parts, marks = parts[::-1], [{">": "<", "≥": "≤"}[m] for m in marks[::-1]]
    if not all(m in "<≤" for m in marks):
        return None
    if len(parts) == 2:
        if re.fullmatch("[A-Za-z]", parts[1]):  # 2 ≤ x
            parts, marks = [*parts, "∞"], [*marks, "<"]
        elif re.fullmatch("[A-Za-z]", parts[0]):
            parts, marks = ["-∞", *parts], ["<", *marks]
    if len(parts) != 3 or not re.fullmatch("[A-Za-z]", parts[1]):
        return None
    return ("tuple", "(["[marks[0] == "≤"] + ")]"[marks[1] == "≤"], (read(parts[0]), read(parts[2])))


# ---- equality


_LABEL = re.compile(r"\\?[A-Za-z]+(?:_\{?[^{}=]*\}?)?\s*(?:\([A-Za-z, ]*\))?|\\angle.*|[A-Za-z ]+")


def equal(answer: tuple, reference: tuple, tolerance: float | None = None) -> bool:
    """Do two trees of `read` say the same? An equation for a variable equals the bare value; sets have no order."""
    kind, other = answer[0], reference[0]
    if kind == other == "equation":
        if _squeezed(answer[1]) == _squeezed(reference[1]):
            return equal(read(answer[2]), read(reference[2]), tolerance)
        return _same_equation(answer, reference)
    for one, two in ((answer, reference), (reference, answer)):
        if one[0] == "equation" and _LABEL.fullmatch(one[1]):
            bare = read(one[2])
            return equal(bare, two, tolerance) if one is answer else equal(two, bare, tolerance)
        if one[0] == "set" and one[1] and two[0] != "set":  # one answer in several forms
            return all(equal(part, two, tolerance) for part in one[1])
        if one[0] == "matrix" and two[0] == "tuple" and all(len(row) == 1 for row in one[1]):
            return _all_equal([row[0] for row in one[1]], two[2], tolerance)
        if one[0] == "base" and two[0] == "expression":
            return one[1] == _squeezed(two[1])
    if kind != other:
        return False
    if kind in ("set", "union"):
        left = list(reference[1])
        if len(answer[1]) != len(left):
            return False
        for part in answer[1]:
            at = next((at for at, wanted in enumerate(left) if equal(part, wanted, tolerance)), None)
            if at is None:
                return False
            del left[at]
        return True
    if kind == "tuple":
        return answer[1] == reference[1] and _all_equal(answer[2], reference[2], tolerance)
    if kind == "matrix":
        rows = zip(answer[1], reference[1])
        return len(answer[1]) == len(reference[1]) and all(_all_equal(one, two, tolerance) for one, two in rows)
    if kind == "base":
        return answer == reference
    return _same_expression(answer[1], reference[1], tolerance)


def _all_equal(answers, references, tolerance: float | None) -> bool:
    return len(answers) == len(references) and all(equal(a, b, tolerance) for a, b in zip(answers, references))


def _squeezed(text: str) -> str:
    """A text without spaces and needless braces; words without regard to case and to brackets around one letter."""
    text = re.sub(r"\s+", "", text)
    text = re.sub(r"([_^])\{(\w)\}", r"\1\2", text)
    if re.fullmatch(r"[^\W\d_][^\W\d_.'-]+", text):
        return text.casefold()
    return text[1:-1] if re.fullmatch(r"\([A-Za-z]\)", text) else text


def _same_expression(answer: str, reference: str, tolerance: float | None) -> bool:
    if _squeezed(answer) == _squeezed(reference):
        return True
    shares = answer.endswith("%"), reference.endswith("%")
    answer, reference = (without_unit(text.rstrip("% ")) for text in (answer, reference))
    try:
        one, two = values(answer), values(reference)
    except Undefined:
        return _squeezed(answer) == _squeezed(reference)
    if _agree(one, two, tolerance):
        return True
    if shares[0] != shares[1] and len(one) == len(two) == 1:
        scaled = [v / 100 if share else v for (v,), share in zip((one, two), shares) if v is not None]
        return len(scaled) == 2 and close(*scaled, tolerance)
    return False


def _agree(one: list[Number | None], two: list[Number | None], tolerance: float | None) -> bool:
    """Equal at every point where both have a value, at two points at least (a number needs one)."""
    pairs = [(a, b) for a, b in zip(one, two) if a is not None and b is not None]
    if len(one) != len(two):  # a number and an expression with variables
        one, two = (one, two) if len(one) > len(two) else (two, one)
        pairs = [(a, two[0]) for a in one if a is not None and two[0] is not None]
    if len(pairs) < min(2, len(one)):
        return False
    return all(close(a, b, tolerance) for a, b in pairs)


def values(text: str) -> list[Number | None]:
    """Values of an expression: one if it has no variables, else at six fixed points (None where it has none). Raises Undefined."""
    tree = Parser(text).parse()
    names = variables(tree)
    if not names:
        return [value(tree)]
    found: list[Number | None] = []
    for point in range(6):
        try:
            found.append(value(tree, {name: _drawn(name, point) for name in names}))
        except Undefined:
            found.append(None)
    return found


def _drawn(name: str, point: int) -> Number:
    """The value of a variable at a point, the same in every expression: three whole numbers, then three others."""
    drawn = random.Random(f"{name} {point}")
    return Fraction(drawn.randint(3, 40)) if point < 3 else complex(drawn.uniform(0.3, 4.0))


def _same_equation(one: tuple, two: tuple) -> bool:
    """Equations that differ by a constant factor only."""
    try:
        a, b = (values(f"({sides[1]})-({sides[2]})") for sides in (one, two))
    except Undefined:
        return False
    try:
        ratios = [complex(x) / complex(y) for x, y in zip(a, b) if x is not None and y is not None]
    except (ArithmeticError, OverflowError):
        return False
    return len(a) == len(b) > 1 and len(ratios) > 1 and abs(ratios[0]) > 0 and all(close(r, ratios[0]) for r in ratios)


def same_answer(answer: str, reference: str, *, tolerance: float | None = None, several: bool = False) -> bool:
    """Does an answer as written by a model equal a reference? Never raises, and ends in bounded time, for any two strings.

    tolerance: absolute, for numbers. several: the reference is a list, so that its commas are never thousands separators.
    """
    if len(answer) > MOST_CHARACTERS or len(reference) > MOST_CHARACTERS:
        return answer.strip() == reference.strip()
    answer, reference = tidied(answer), tidied(reference)
    if not answer or not reference:
        return False
    try:
        wanted = read(reference.replace(",", ", ") if several else reference)
        forms = {answer, without_unit(answer), answer.replace(",", ", ")}
        return any(equal(read(form), wanted, tolerance) for form in forms)
    except RecursionError:
        return _squeezed(answer) == _squeezed(reference)


def canonical(text: str) -> str:
    """One form for answers that are plainly the same, for majority votes: an exact number, else the tidied text without spaces."""
    tidy = tidied(text)
    tree = read(without_unit(tidy)) if len(tidy) < MOST_CHARACTERS else ("text",)
    if tree[0] == "equation" and _LABEL.fullmatch(tree[1]):
        tree = read(tree[2])
    if tree[0] == "expression":
        try:
            number = values(tree[1])
        except Undefined:
            number = [None]
        if len(number) == 1 and isinstance(number[0], Fraction):
            return str(number[0])
    return _squeezed(tidy)
