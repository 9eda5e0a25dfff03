"""Finds the answer in what a model wrote. Every function returns None where there is none, and never raises for any string."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction

from .expressions import Undefined
from .maths import MOST_CHARACTERS, canonical, read, tidied, values, without_unit

MOST_TEXT = 40_000  # characters that are looked at
_THINK = re.compile(r"</(?:think|thinking|thought)>", re.IGNORECASE)
_TAGGED = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.IGNORECASE | re.DOTALL)
_BOX = re.compile(r"\\(?:boxed|fbox|box)\s*")
_BETWEEN_BOXES = re.compile(r"[\s$,;.]*(?:and|or|\\text\{\s*(?:and|or)\s*\})?[\s$,;]*", re.IGNORECASE)
_PHRASE = re.compile(
    r"(?:(?:final|correct|right|best)\s+)?(?:answer|option|choice)(?:\s+(?:to\s+[\w\s]{1,40}|for\s+[\w\s]{1,40}))?\**\s*"
    r"(?:\bis\b\s*(?:therefore|thus|just|simply|that|option|choice)?|\bwould be\b|[:=])\s*(?::|-(?=\s))?\s*\**\s*",
    re.IGNORECASE,
)
_NUMBER = re.compile(
    r"(?P<sign>(?<![\w.)\]])-\s?)?(?:[$€£]\s?(?P<minus>-)?)?\s?"
    r"(?:(?P<whole>\d{1,3}(?:,\d{3})+|\d+)"
    r"(?:\s+(?P<mixed>\d+/\d+)|/(?P<under>\d+)(?![\d/])|(?P<part>\.\d+)?(?P<power>[eE][+-]?\d{1,3}\b)?)|(?P<bare>\.\d+))"
)


def after_thinking(text: str) -> str:
    """What stands behind the last closing think tag; of a very long text the end."""
    return _THINK.split(text)[-1].strip()[-MOST_TEXT:]


def tagged(text: str) -> str | None:
    """The content of the last <answer> that is not empty; of one that nothing closes if there is no other (an answer cut short)."""
    found = [match.strip() for match in _TAGGED.findall(text)]
    cut = re.split("<answer>", text, flags=re.IGNORECASE)[1:][-1:]
    found = [part.strip() for part in cut if "</answer>" not in part.lower()] + found
    return next((match for match in reversed(found) if match), None)


def boxed(text: str) -> str | None:
    """The content of the last box, braces inside balanced; boxes side by side ("\\boxed{1} and \\boxed{2}") are one answer."""
    boxes: list[tuple[int, int, str]] = []
    for mark in list(_BOX.finditer(text))[-64:]:
        start = mark.end()
        if text[start : start + 1] != "{":
            token = re.match(r"[^\s{}$\\.,]+", text[start:])
            if token:
                boxes.append((mark.start(), start + token.end(), token[0]))
            continue
        depth = 0
        for at in range(start, min(len(text), start + MOST_CHARACTERS)):
            depth += (text[at] == "{" and text[at - 1] != "\\") - (text[at] == "}" and text[at - 1] != "\\")
            if depth == 0:
                boxes.append((mark.start(), at + 1, text[start + 1 : at].strip()))
                break
    boxes = [box for box in boxes if box[2]]
    if not boxes:
        return None
    joined = [boxes[-1]]
    while len(boxes) > len(joined):
        before = boxes[-len(joined) - 1]
        gap = text[before[1] : joined[0][0]]
        if not gap.strip() or "." in gap.strip() or not _BETWEEN_BOXES.fullmatch(gap):
            break
        joined.insert(0, before)
    return ", ".join(box[2] for box in joined)


def phrased(text: str) -> str | None:
    """The rest of the line behind the last "the answer is" or "Answer:"."""
    found = [match.end() for match in _PHRASE.finditer(text)]
    for end in reversed(found):
        line = text[end:].lstrip().partition("\n")[0].strip().strip("*").strip()
        if line:
            return line
    return None


def last_line(text: str) -> str | None:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), None)


def first_line(text: str) -> str | None:
    """The first line that says something by itself (not one that ends in a colon, unless it is the only one)."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next((line for line in lines if not line.endswith(":")), lines[0] if lines else None)


# ---- numbers


def _fraction(found: re.Match) -> Fraction | None:
    whole = (found["whole"] or "0").replace(",", "")
    if len(whole) > 300:
        return None
    try:
        number = Fraction(f"{whole}{found['part'] or found['bare'] or ''}{found['power'] or ''}")
        if found["under"]:
            number /= int(found["under"])
        if found["mixed"]:
            number += Fraction(found["mixed"])
    except (ValueError, ZeroDivisionError):
        return None
    return -number if found["sign"] or found["minus"] else number


def numbers_in(text: str) -> list[Fraction]:
    """All numbers of a text in its order: with thousands separators, decimals, fractions, mixed numbers."""
    text = text.replace("−", "-").replace("\\$", "$")
    text = re.sub(r"(\d)(?:(?:\{,\}|,\\!)(?=\d{3})|(?:\\,|[\u2009\u202f])(?=\d{3}(?!\d)))", r"\1,", text)
    text = re.sub(r"\\[dt]?frac\{(\d+)\}\{(\d+)\}", r" \1/\2", text)
    return [number for match in _NUMBER.finditer(text) if (number := _fraction(match)) is not None]


def exact(text: str) -> Fraction | None:
    """The number that a short answer is, read as mathematics (x = 5, 1,250 dollars, \\frac{3}{4}); else None."""
    if len(text) > MOST_CHARACTERS:
        return None
    tree = read(without_unit(tidied(text)).rstrip("% "))
    try:
        found = values(tree[2] if tree[0] == "equation" else tree[1]) if tree[0] in ("equation", "expression") else []
    except Undefined:
        return None
    return found[0] if len(found) == 1 and isinstance(found[0], Fraction) else None


def number(text: str, whole: bool = False) -> Fraction | None:
    """The number that a text answers with: in a box or answer tag, behind ####, behind "the answer is", else the last one.

    whole: only whole numbers are taken where the text is searched.
    """
    text = after_thinking(text)
    marked = boxed(text) or tagged(text)
    if marked:
        found = exact(marked)
        if found is not None:
            return found
        inside = numbers_in(marked)
        return inside[-1] if inside else None
    if "####" in text and (behind := numbers_in(text.rpartition("####")[2])):
        return behind[0]
    if line := phrased(text):
        line = re.split(r"(?<=[^.\d])\.\s|\.\s+(?=[A-Z])", line)[0]
        found = exact(line.rstrip("."))
        if found is not None:
            return found
        inside = numbers_in(line.rpartition("=")[2]) or numbers_in(line)
        if inside:
            return inside[0]
    every = [n for n in numbers_in(text) if not whole or n.denominator == 1]
    return every[-1] if every else None


def maths(text: str) -> str | None:
    """The answer as written: in a box or answer tag, behind "the answer is", the last formula, else the last number."""
    text = after_thinking(text)
    if marked := boxed(text) or tagged(text):
        return marked
    formula = re.compile(r"\$\$(.{1,999}?)\$\$|(?<!\\)\$((?:[^$\\]|\\.)+)\$|\\\((.{1,999}?)\\\)|\\\[(.{1,999}?)\\\]", re.DOTALL)
    if line := phrased(text):
        if (inside := formula.match(line)) and (content := next(filter(None, inside.groups()), "").strip()):
            return content
        return re.split(r"(?<=[^.\d])\.\s|\.\s+(?=[A-Z])", line)[0].rstrip(".").strip() or None
    found = [next(filter(None, match.groups()), "").strip() for match in formula.finditer(text)]
    if found and found[-1]:
        return found[-1]
    if len(text) <= 80 and (line := last_line(text)) and "\\boxed" not in line:
        return line
    every = numbers_in(text)
    return str(every[-1]) if every else None


# ---- letters


def choice(text: str, labels: Sequence[str], options: Sequence[str] = ()) -> str | None:
    """The label that a text chooses: boxed, behind "the answer is", alone on a line, in brackets, or by its option's own text.

    A capital A before a word is an article, not a choice; a small letter counts in a box, in brackets, or alone.
    """
    text = after_thinking(text)
    if marked := boxed(text) or tagged(text):
        named = set(re.findall(rf"(?<![\w'])({_any(labels)})(?=\s*(?:[,;/&)]|or\b|and\b|$))", marked))
        sole = _in_sentence(marked, labels) if len(named) < 2 else None  # "A or C" is no choice
        return _label_of(marked, labels, options) or sole or _by_text(marked, labels, options)
    line = phrased(text) or ""
    if found := _label_of(line, labels, options) or _leading(line, labels) or _by_text(line, labels, options):
        return found
    for line in (text.strip(), first_line(text) or "", last_line(text) or ""):
        if found := _label_of(line, labels, options):
            return found
    return _in_sentence(text, labels) or _by_text(text, labels, options)


def _any(labels: Sequence[str]) -> str:
    return "|".join(re.escape(label) for label in sorted(labels, key=len, reverse=True)) or "(?!)"


def _upper(found: str, labels: Sequence[str]) -> str:
    return next(label for label in labels if label.casefold() == found.casefold())


def _label_of(text: str, labels: Sequence[str], options: Sequence[str]) -> str | None:
    """The label if the text is nothing else: "C", "(C)", "\\text{C}.", "C. its option", "Option C", or the option's own text."""
    plain = re.sub(r"\\(?:text|mathrm|mathbf|textbf|mbox)\s*\{([^{}]*)\}", r"\1", text)
    plain = re.sub(r"[*$`\"']|\\[()\[\],]", "", plain).strip()
    short = re.fullmatch(rf"(?:option|choice)?\s*[(\[{{]?\s*({_any(labels)})\s*[)\]}}]?\s*[.:,]?", plain, re.IGNORECASE)
    if short:
        return _upper(short[1], labels)
    for label, option in zip(labels, options):
        if _words(option) and _words(plain) == _words(option):
            return label
    led = re.match(rf"[(\[]?({_any(labels)})[)\].:]+\s+\S", plain)
    return led[1] if led else None


def _leading(text: str, labels: Sequence[str]) -> str | None:
    """A label at the start of what stands behind "the answer is"."""
    plain = re.sub(r"[*$`\"']|\\[()\[\]]|\\(?:text|mathrm|mathbf)\s*\{", "", text).lstrip()
    if found := re.match(rf"[(\[]({_any(labels)})[)\]]", plain, re.IGNORECASE):
        return _upper(found[1], labels)
    found = re.match(rf"(?:option\s+)?({_any(labels)})(?![\w'])(\s+\w+)?", plain)
    if not found:
        return None
    article = found[1] in ("A", "I") and found[2] and found[2].strip() not in ("because", "since", "as", "for", "and", "which", "but", "so")
    return None if article else found[1]


def _in_sentence(text: str, labels: Sequence[str]) -> str | None:
    """The last label that stands in brackets or behind "option", or as a single capital at the end of a sentence."""
    pattern = rf"\(({_any(labels)})\)|\b(?i:option|choice|letter)\s+\**\(?({_any(labels)})\b|\*\*({_any(labels)})\b[.:)]?"
    pattern += rf"|(?<![\w'.])({_any([label for label in labels if not label.isdigit()])})(?=\s*[.!]?\s*(?:$|\n))"
    found = [next(filter(None, match.groups())) for match in re.finditer(pattern, text)]
    return found[-1] if found else None


def _words(text: str) -> str:
    return " ".join(re.findall(r"[^\W_]+(?:[.,/'-][^\W_]+)*|[-+]?\d+", text.casefold()))


def _by_text(text: str, labels: Sequence[str], options: Sequence[str]) -> str | None:
    """The option whose text occurs, if it is the only one, or if the others occur only inside it."""
    said = f" {_words(text)} "
    found = [(label, _words(option)) for label, option in zip(labels, options) if _words(option) and f" {_words(option)} " in said]
    longest = max(found, key=lambda pair: len(pair[1]), default=None)
    if longest is None or any(words not in longest[1] for _, words in found):
        return None
    return longest[0] if sum(words == longest[1] for _, words in found) == 1 else None


# ---- code


def code(text: str) -> str | None:
    """Python source: the last block marked as Python (or the last unmarked one) that is closed, an open one, or bare code."""
    text = after_thinking(text)
    blocks = re.findall(r"^[ \t]*```[ \t]*([\w+.-]*)[^\n]*\n(.*?)(?:^[ \t]*```|\Z)", text, re.DOTALL | re.MULTILINE)
    for wanted in (("python", "py", "python3"), ("",)):
        found = [body for language, body in blocks if language.lower() in wanted and body.strip()]
        defining = [body for body in found if re.search(r"^\s*(?:async\s+)?(?:def|class)\s", body, re.MULTILINE)]
        if found:
            return (defining or found)[-1]
    bare = re.search(r"^(?:def|class|import|from|@)\b.*", text, re.DOTALL | re.MULTILINE)
    return bare[0].rstrip() if bare and not blocks else None


# ---- short answers


def short(text: str) -> str | None:
    """A short free answer: tagged, boxed, behind "the answer is", else the first line."""
    text = after_thinking(text)
    found = tagged(text) or boxed(text) or phrased(text) or first_line(text)
    return found.strip(" *\"'`") or None if found else None


def yes_or_no(text: str) -> str | None:
    """yes or no: what the marked answer or the text begins with, else the last of the two words."""
    text = after_thinking(text)
    for part in (tagged(text) or boxed(text), phrased(text), text):
        words = re.findall(r"[a-z]+", re.sub(r"\\[A-Za-z]+", " ", part or "").casefold())
        if words and words[0] in _YES_NO:
            return _YES_NO[words[0]]
    if found := re.findall(r"(?<![a-z])(yes|no|true|false)(?=\s*(?:[.,!;:*)]|$))", text.casefold(), re.MULTILINE):
        return _YES_NO[found[-1]]
    return "yes" if re.search(r"\byes\b", text.casefold()) else None


_YES_NO = {"yes": "yes", "true": "yes", "no": "no", "false": "no"}


def gaia(text: str) -> str | None:
    """The final answer of an assistant: tagged, behind FINAL ANSWER, boxed, behind "the answer is", else the last line."""
    text = after_thinking(text)
    final = re.findall(r"FINAL ANSWER\**\s*:?\s*\**\s*(.+)", text, re.IGNORECASE)
    found = tagged(text) or (final[-1].strip() if final else None) or boxed(text) or phrased(text) or last_line(text)
    return found.strip(" *`") or None if found else None


def maths_canonical(text: str) -> str | None:
    found = maths(text)
    return (canonical(found) or None) if found else None
