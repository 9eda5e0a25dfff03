"""How an answer is extracted and scored, one pair of functions for each kind of task; the first metric is the task's own.

rules: "minips", or "official" for those of the paper's released code, where it has any (`official.py`). No answer is None and
scores 0; no text makes a function raise. Extracted answers are in a canonical form, so that equal ones are equal strings.
"""

from __future__ import annotations

import ast
import re
import string
from collections import Counter

from ..errors import MinipsError
from . import answers, official
from .code_tests import mended
from .example import RULES, Example
from .maths import same_answer
from .sandbox import RunResult, run_code

Scores = dict[str, float]
CODE_SECONDS = 10.0  # of processor time, where the example says nothing


def _official(rules: str) -> bool:
    if rules not in RULES:
        raise MinipsError(f"rules is {rules!r}, expected one of {', '.join(RULES)}")
    return rules == "official"


def _accuracy(right: bool) -> Scores:
    return {"accuracy": float(right)}


# ---- numbers: gsm8k, aime


def extract_number(text: str, example: Example, rules: str = "minips") -> str | None:
    """The number as an exact fraction or whole number; official: as written. meta["integer"]: only whole numbers are looked for."""
    if _official(rules):
        return official.boxed_or_last_number(official.after_think(text))
    found = answers.number(text, whole=bool(example.meta.get("integer")))
    return None if found is None else str(found)


def score_number(text: str, example: Example, rules: str = "minips") -> Scores:
    """official: string equality with the gold number, read from meta["solution"] (the row's own text) where given."""
    found = extract_number(text, example, rules)
    if found is None:
        return _accuracy(False)
    if _official(rules):
        solution = example.meta.get("solution") or f"#### {example.references[0]}"
        gold = official.gsm8k_gold(solution) or example.references[0]
        if re.fullmatch(r"-?\d+", found) and re.fullmatch(r"-?\d+", gold) and example.meta.get("integer"):
            return _accuracy(found.lstrip("0") == gold.lstrip("0"))
        return _accuracy(official.normalized(found) == official.normalized(gold))
    golds = {str(gold) for reference in example.references if (gold := answers.exact(reference)) is not None}
    return _accuracy(found in golds)


# ---- mathematics: math500, olympiadbench


def extract_maths(text: str, example: Example, rules: str = "minips") -> str | None:
    if _official(rules):
        return official.boxed_or_last_number(official.after_think(text))
    return answers.maths_canonical(text)


def score_maths(text: str, example: Example, rules: str = "minips") -> Scores:
    """Equality with one of the references; with all of them together if meta["is_multiple_answer"]. meta["tolerance"]: absolute."""
    if _official(rules):
        found = official.normalized(extract_maths(text, example, rules))
        return _accuracy(found is not None and found in {official.normalized(reference) for reference in example.references})
    found = answers.maths(text)
    if not found:
        return _accuracy(False)
    several = bool(example.meta.get("is_multiple_answer"))
    references = (", ".join(example.references),) if several else example.references
    tolerance = example.meta.get("tolerance")
    return _accuracy(any(same_answer(found, reference, tolerance=tolerance, several=several) for reference in references))


# ---- multiple choice


def extract_choice(text: str, example: Example, rules: str = "minips") -> str | None:
    """The label; meta["labels"] are those allowed, meta["options"] their texts (a list in their order, or by label)."""
    if _official(rules):
        found = official.boxed_or_last_number(official.after_think(text))
        return None if found is None else found.upper()
    labels, options = list(example.meta["labels"]), example.meta.get("options") or ()
    return answers.choice(text, labels, [options[label] for label in labels] if isinstance(options, dict) else options)


def score_choice(text: str, example: Example, rules: str = "minips") -> Scores:
    found = extract_choice(text, example, rules)
    return _accuracy(found is not None and found.casefold() in {reference.casefold() for reference in example.references})


# ---- code: humanevalplus, mbppplus


def extract_code(text: str, example: Example, rules: str = "minips") -> str | None:
    """The source that is run. Ours puts meta["imports"] in front, and the body alone below the given head (meta["stub"])."""
    if _official(rules):
        return official.python_block(official.after_think(text))
    stub, entry = example.meta.get("stub") or "", example.meta.get("entry_point")
    continues = stub and "```" not in text and re.match(r"(?:[ \t]*\n)*[ \t]+\S", text)  # goes on below the head
    source = text if continues else answers.code(text)
    if source is None or not source.strip():
        return None
    imports = example.meta.get("imports") or ""
    head = imports if isinstance(imports, str) else "\n".join(imports)
    if stub and entry and not re.search(rf"^\s*(?:async\s+)?(?:def|class)\s+{re.escape(entry)}\b", source, re.MULTILINE):
        body = source if re.match(r"(?:[ \t]*\n)*[ \t]", source) else "\n".join("    " + line for line in source.splitlines())
        return f"{head}\n{stub}\n{body}".lstrip("\n")
    return f"{head}\n{_preamble(stub)}\n{source}".lstrip("\n")


def _preamble(stub: str) -> str:
    """The imports and helpers that stand before the function to write."""
    try:
        body = ast.parse(stub).body
    except (SyntaxError, ValueError):
        return ""
    return "\n".join(ast.unparse(node) for node in body[:-1])


def score_code(text: str, example: Example, rules: str = "minips") -> Scores:
    return _accuracy(run_answer(text, example, rules).passed)


def run_answer(text: str, example: Example, rules: str = "minips") -> RunResult:
    """Run the answer against meta["tests"] in the sandbox, also under the official rules (whose tests keep their mistakes)."""
    source = extract_code(text, example, rules)
    if source is None:
        return RunResult(False, "no code found", 0.0)
    tests, imports = example.meta["tests"], example.meta.get("imports") or ""
    head = imports if isinstance(imports, str) else "\n".join(imports)
    tests = f"{head}\n{tests if _official(rules) else mended(tests)}".lstrip("\n")
    entry = example.meta.get("entry_point") or called_in(tests)
    return run_code(source, tests=tests, entry_point=entry, timeout=example.meta.get("timeout") or CODE_SECONDS)


def called_in(tests: str) -> str | None:
    """The function under test where the row does not name it: the one that MBPP+ tests call with *inp."""
    found = re.findall(r"(\w+)\(\*inp\)", tests)
    return next((name for name in found if name not in ("candidate", "ref_func")), None)


# ---- gaia


def extract_gaia(text: str, example: Example, rules: str = "minips") -> str | None:
    return (official.gaia_answer(text) or None) if _official(rules) else answers.gaia(text)


def score_gaia(text: str, example: Example, rules: str = "minips") -> Scores:
    found = extract_gaia(text, example, rules)
    match = official.gaia_match if _official(rules) else gaia_match
    return _accuracy(found is not None and any(match(found, reference) for reference in example.references))


def gaia_match(answer: str, gold: str) -> bool:
    """The rule of the GAIA leaderboard: a number as a number without $ % and commas; a list (, or ;) element by element, numbers
    as numbers and strings without spaces and case; else strings also without punctuation."""
    if _as_float(gold) is not None:
        return _as_number(answer) == float(gold)
    if "," in gold or ";" in gold:
        one, two = (re.split("[,;]", text) for text in (answer, gold))
        return len(one) == len(two) and all(
            _as_number(a) == float(b) if _as_float(b) is not None else _plain(a, "") == _plain(b, "") for a, b in zip(one, two)
        )
    return _plain(answer, string.punctuation) == _plain(gold, string.punctuation)


def _as_float(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _as_number(text: str) -> float | None:
    return _as_float(re.sub("[$%,]", "", text))


def _plain(text: str, punctuation: str) -> str:
    return re.sub(r"\s", "", text).lower().translate(str.maketrans("", "", punctuation))


# ---- database diagnosis


def _labels(text: str, example: Example, rules: str) -> list[str]:
    labels, most = list(example.meta["labels"]), int(example.meta.get("number_of_labels_pred") or 2)
    if _official(rules):
        return official.labels_named(text, labels, most)
    text = answers.after_thinking(text)
    content = answers.tagged(text) or (text if "<answer>" not in text.lower() else "")
    spelled = {re.sub(r"[\W_]+", " ", label).strip().casefold(): label for label in labels}
    said = f" {re.sub(r'[^a-z0-9]+', ' ', content.casefold())} "
    places = sorted((place, label) for words, label in spelled.items() if (place := said.find(f" {words} ")) >= 0)
    return [label for _, label in places][:most]


def extract_labels(text: str, example: Example, rules: str = "minips") -> str | None:
    """The first meta["number_of_labels_pred"] labels named in the answer, sorted and joined by commas."""
    return ", ".join(sorted(_labels(text, example, rules))) or None


def score_labels(text: str, example: Example, rules: str = "minips") -> Scores:
    """accuracy: all of meta["root_causes"] are named; task_score: the share of them that is."""
    causes = set(example.meta["root_causes"])
    hits = len(causes.intersection(_labels(text, example, rules)))
    return {"accuracy": float(bool(causes) and hits == len(causes)), "task_score": hits / len(causes) if causes else 0.0}


# ---- short answers: nq_open, hotpotqa, squad, strategyqa, kv_retrieval (the release has no rules for these)


def _words(text: str) -> list[str]:
    """Words without case, punctuation and articles, as SQuAD compares them."""
    text = "".join(character for character in text.lower() if character not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", text).split()


def extract_span(text: str, example: Example, rules: str = "minips") -> str | None:
    _official(rules)
    found = answers.short(text)
    return (" ".join(_words(found)) or None) if found else None


def score_span(text: str, example: Example, rules: str = "minips") -> Scores:
    """em: equal words; f1: of the words in common; contains: the whole text has them as a run; each the best over the references."""
    said = (extract_span(text, example, rules) or "").split()
    whole = f" {' '.join([*_words(answers.after_thinking(text)), '|', *said])} "
    em = f1 = contains = 0.0
    for reference in example.references if said else ():
        wanted = _words(reference)
        common = sum((Counter(said) & Counter(wanted)).values())
        em = max(em, float(said == wanted))
        f1 = max(f1, 2 * common / (len(said) + len(wanted)))
        contains = max(contains, float(bool(wanted) and f" {' '.join(wanted)} " in whole))
    return {"em": em, "f1": f1, "contains": contains}


def extract_yes_no(text: str, example: Example, rules: str = "minips") -> str | None:
    _official(rules)
    return answers.yes_or_no(text)


def score_yes_no(text: str, example: Example, rules: str = "minips") -> Scores:
    found = extract_yes_no(text, example, rules)
    return _accuracy(found is not None and found in {answers.yes_or_no(reference) for reference in example.references})


def extract_exact(text: str, example: Example, rules: str = "minips") -> str | None:
    """The first long key-like word (a UUID), else the short answer."""
    _official(rules)
    text = answers.after_thinking(text)
    key = re.search(r"(?<![\w-])[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}(?![\w-])", text)
    return key[0].lower() if key else answers.short(text) or text or None


def score_exact(text: str, example: Example, rules: str = "minips") -> Scores:
    """Does the value occur, not as a part of a longer word?"""
    _official(rules)
    said = answers.after_thinking(text).casefold()
    found = (re.search(rf"(?<![\w-]){re.escape(reference.casefold())}(?![\w-])", said) for reference in example.references if reference)
    return _accuracy(any(found))
