"""The scoring rules of the paper's released code, with their known weaknesses: to compare with its figures, not to be used else.

No thousands separators, no nested braces, the first number in a box, no lists: see `--scoring official`.
"""

from __future__ import annotations

import json
import re
import string
from collections.abc import Sequence

_NUMBER = r"-?\d+(?:\.\d+)?"


def after_think(text: str) -> str:
    return text.rpartition("</think>")[2].strip()


def boxed_or_last_number(text: str) -> str | None:
    """The last box (up to its first closing brace): the first number in it, else its text; no box: the last number."""
    boxes = re.findall(r"\\boxed\{([^}]*)\}", text)
    if boxes:
        number = re.search(_NUMBER, boxes[-1])
        return number[0] if number else boxes[-1].strip()
    numbers = re.findall(_NUMBER, text)
    return numbers[-1] if numbers else None


def gsm8k_gold(solution: str) -> str | None:
    """The number behind ####; 1,450 gives 1."""
    found = re.search(rf"####\s*({_NUMBER})", solution)
    return found[1] if found else None


def normalized(answer: str | None) -> str | None:
    return None if answer is None else answer.strip().lower()


def python_block(text: str) -> str | None:
    """The last closed block marked python."""
    blocks = re.findall(r"```python\s*\n(.*?)```", text, re.DOTALL | re.IGNORECASE)
    return blocks[-1].strip() if blocks else None


def gaia_answer(text: str) -> str:
    """The content of the first <answer>, else the whole text."""
    text = after_think(text)
    found = re.search(r"<answer>(.*?)</answer>", text, re.DOTALL | re.IGNORECASE)
    return (found[1] if found else text).strip()


def gaia_match(answer: str, gold: str) -> bool:
    """Equal without case and outer punctuation, or equal as numbers without commas."""
    one, two = (text.lower().strip(string.whitespace + ".,;:!?\"'`()[]{}") for text in (answer, gold))
    if not one or not two:
        return False
    if one == two:
        return True
    try:
        return abs(float(one.replace(",", "")) - float(two.replace(",", ""))) < 1e-9
    except ValueError:
        return False


def labels_named(text: str, labels: Sequence[str], most: int) -> list[str]:
    """Labels of the last <answer> that is not empty (JSON, also fenced, or in the order of mention), else of the whole text."""
    answers = [found.strip() for found in re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL | re.IGNORECASE)]
    chosen = next((found for found in reversed(answers) if found), None)
    content = text if chosen is None else chosen
    strings = _strings(content)
    if strings is None:
        places = sorted((content.upper().find(label), label) for label in labels if label in content.upper())
        return [label for _, label in places][:most]
    found: list[str] = []
    for entry in strings:
        upper = entry.strip().upper()
        match = upper if upper in labels else next((label for label in labels if label in upper), None)
        if match and match not in found:
            found.append(match)
    return found[:most]


def _strings(content: str) -> list[str] | None:
    """All strings of the JSON in a text; None where there is no JSON list or object."""
    fenced = re.search(r"```(?:json)?\s*(.*?)```", content, re.DOTALL)
    embedded = re.search(r"\[.*?\]|\{.*?\}", content, re.DOTALL)
    for candidate in (content, fenced[1] if fenced else "", embedded[0] if embedded else ""):
        try:
            parsed = json.loads(candidate)
        except (ValueError, RecursionError):
            continue
        if isinstance(parsed, (list, dict)):
            return _flat(parsed)
    return None


def _flat(parsed: object) -> list[str]:
    if isinstance(parsed, str):
        return [parsed]
    inner = parsed.values() if isinstance(parsed, dict) else parsed if isinstance(parsed, list) else ()
    return [text for part in inner for text in _flat(part)]


def labels_score(text: str, gold: Sequence[str], labels: Sequence[str], most: int = 2) -> dict:
    """Predicted labels and how many of the gold ones are among them; correct: all of them."""
    predicted = labels_named(text, labels, most)
    hits = sum(label in predicted for label in gold)
    return {
        "predicted_root_causes": predicted,
        "gold_root_causes": list(gold),
        "hit_count": hits,
        "task_score": hits / len(gold) if gold else 0.0,
        "correct": bool(gold) and hits == len(gold),
    }
