"""Tasks whose branches are given passages: nq_open, hotpotqa, squad, strategyqa, kv_retrieval.

What lies in which branch is drawn for each row by (seed, row id), so that a row is the same whatever rows are selected.
"""

from __future__ import annotations

import html
import random
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..errors import MinipsError
from . import prompts
from .data import Row, Source, read, row_random
from .example import Example, Task
from .scoring import extract_exact, extract_span, extract_yes_no, score_exact, score_span, score_yes_no

Passage = tuple[str, str]  # title, text
KV_PAIRS = 20  # pairs a row of kv_retrieval; all 75 of the data set's rows are over 4,000 tokens

NQ_OPEN = Source(
    ("train_nq_open_oracle/nq_open_oracle", "nq_open/nq-open-oracle"),
    "copy qa_data/nq-open-oracle.jsonl.gz of github.com/nelson-liu/lost-in-the-middle to nq_open/ in the data folder",
    "CC BY-SA 3.0 (Natural Questions)",
)
HOTPOTQA = Source(
    ("train_hotpotqa/hotpotqa_dev_distractor_subset", "hotpotqa/validation"),
    "load_dataset('hotpotqa/hotpot_qa', 'distractor', split='validation').to_json(FILE) with the package datasets writes it",
    "CC BY-SA 4.0",
)
SQUAD = Source(
    ("train_squad_xquad_en/xquad_en", "squad/validation"),
    "load_dataset('rajpurkar/squad', split='validation').to_json(FILE) with the package datasets writes it",
    "CC BY-SA 4.0",
)
STRATEGYQA = Source(
    ("train_strategyqa_facts/strategyqa", "strategyqa/train"),
    "write data/strategyqa/train.json of github.com/eladsegal/strategyqa there, one row a line",
    "MIT",
    ids=("id", "qid"),
)
KV_RETRIEVAL = Source(
    ("train_kv_retrieval/kv_retrieval_75", "kv_retrieval/kv-retrieval-75_keys"),
    "copy kv_retrieval_data/kv-retrieval-75_keys.jsonl.gz of github.com/nelson-liu/lost-in-the-middle to kv_retrieval/ in the data folder",
    "MIT",
)


def deal(items: Sequence[str], workers: int, rng: random.Random, joint: str = "\n\n") -> tuple[str, ...]:
    """The items in random order, dealt over `workers` branches, or as many as there are items."""
    order = list(items)
    rng.shuffle(order)
    hands = min(workers, len(order))
    return tuple(joint.join(order[hand::hands]) for hand in range(hands))


def contains(passage: str, answers: Sequence[str]) -> bool:
    """Whether a passage holds one of the answers as whole words, whatever the case."""
    return any(re.search(rf"(?<!\w){re.escape(answer.casefold())}(?!\w)", passage.casefold()) for answer in answers)


def distractors(pool: Sequence[Passage], count: int, gold: Passage, answers: Sequence[str], rng: random.Random, row: Row) -> list[Passage]:
    """`count` different passages of other titles than the gold one's, none of which holds an answer"""
    chosen: dict[Passage, None] = {}
    order = _random_order(pool, rng)
    while len(chosen) < count:
        other = next(order, None)
        if other is None:
            raise MinipsError(f"{row.place}: {count + 1} branches need {count} other passages without the answer, found {len(chosen)}")
        if other[0] != gold[0] and other[1] != gold[1] and not contains(f"{other[0]}: {other[1]}", answers):
            chosen[other] = None
    return list(chosen)


def _random_order(pool: Sequence[Passage], rng: random.Random) -> Iterator[Passage]:
    """The pool in random order, drawn only as far as it is read."""
    swapped: dict[int, int] = {}
    for last in range(len(pool) - 1, -1, -1):
        pick = rng.randint(0, last)
        yield pool[swapped.get(pick, pick)]
        swapped[pick] = swapped.get(last, last)


def _passage(title: str, text: str) -> str:
    return f"{title}: {text}"


def _span_example(row: Row, question: str, answers: Sequence[str], passages: Sequence[str], group: str = "", **meta: str) -> Example:
    prefix, prompt = prompts.passages_question(question)
    return Example(row.id, question, prefix, prompt, tuple(answers), answers[0], passages=tuple(passages), group=group, meta=meta)


def load_nq_open(folder: Path | None, workers: int, seed: int) -> list[Example]:
    """The gold paragraph and workers - 1 paragraphs of other rows that do not hold the answer."""
    rows = read(NQ_OPEN, folder)
    pool = [_nq_passage(row) for row in rows]
    examples = []
    for row, gold in zip(rows, pool, strict=True):
        rng, answers = row_random(seed, row.id), row.items("answers", str)
        passages = [gold, *distractors(pool, workers - 1, gold, answers, rng, row)]
        rng.shuffle(passages)
        question = row.text("question").strip().rstrip("?") + "?"
        examples.append(_span_example(row, question, answers, [_passage(*passage) for passage in passages]))
    return examples


def _nq_passage(row: Row) -> Passage:
    if "ctxs" not in row.fields:
        return row.text("title"), row.text("text")
    passage = row.items("ctxs", dict)[0]  # the original's form: a list that holds the gold paragraph alone
    if not all(isinstance(passage.get(name), str) for name in ("title", "text")):
        row.refuse("ctxs", "objects with the texts title and text")
    return passage["title"], passage["text"]


def load_hotpotqa(folder: Path | None, workers: int, seed: int) -> list[Example]:
    """All paragraphs of the row (two gold ones and distractors), dealt over the branches."""
    examples = []
    for row in read(HOTPOTQA, folder):
        passages = deal(_hotpot_paragraphs(row), workers, row_random(seed, row.id))
        examples.append(_span_example(row, row.text("question"), [row.text("answer")], passages, row.label("type")))
    return examples


def _hotpot_paragraphs(row: Row) -> list[str]:
    if "contexts" in row.fields:
        paragraphs = [(item.get("title"), item.get("text")) for item in row.items("contexts", dict)]
    else:  # the original's form: titles and lists of sentences, side by side
        context = row.get("context", dict, "an object with title and sentences (or a field contexts)")
        titles, sentences = context.get("title"), context.get("sentences")
        if not (isinstance(titles, list) and isinstance(sentences, list) and len(titles) == len(sentences) and titles):
            row.refuse("context", "an object with title and sentences, lists of one length")
        paragraphs = [(t, " ".join(map(str.strip, map(str, s)))) for t, s in zip(titles, sentences, strict=True)]
    if not all(isinstance(title, str) and isinstance(text, str) for title, text in paragraphs):
        row.refuse("contexts" if "contexts" in row.fields else "context", "paragraphs with the texts title and text")
    return [_passage(html.unescape(title), text) for title, text in paragraphs]


def load_squad(folder: Path | None, workers: int, seed: int) -> list[Example]:
    """The gold paragraph and other paragraphs of its article; beyond those, paragraphs of other articles without the answer."""
    rows = read(SQUAD, folder)
    articles: dict[str, dict[str, None]] = defaultdict(dict)
    for row in rows:
        articles[row.text("title")][row.text("context")] = None
    pool = [(title, text) for title, texts in articles.items() for text in texts]
    examples = []
    for row in rows:
        rng, answers = row_random(seed, row.id), _squad_answers(row)
        title, gold = row.text("title"), row.text("context")
        others = [text for text in articles[title] if text != gold]
        rng.shuffle(others)
        passages = [(title, text) for text in (gold, *others[: workers - 1])]
        passages += distractors(pool, workers - len(passages), (title, gold), answers, rng, row)
        rng.shuffle(passages)
        dressed = [_passage(title.replace("_", " "), text) for title, text in passages]
        examples.append(_span_example(row, row.text("question"), answers, dressed, family=title))
    return examples


def _squad_answers(row: Row) -> list[str]:
    answers = row.fields.get("answers")
    if isinstance(answers, dict):  # the original's form
        answers = list(dict.fromkeys(answers["text"])) if isinstance(answers.get("text"), list) else None
    if not (isinstance(answers, list) and answers and all(isinstance(answer, str) and answer.strip() for answer in answers)):
        row.refuse("answers", "a list of text, at least one")
    return answers


def load_strategyqa(folder: Path | None, workers: int, seed: int) -> list[Example]:
    """The facts dealt over the branches: fewer branches than `workers` where there are fewer facts."""
    examples = []
    for row in read(STRATEGYQA, folder):
        answer = row.fields.get("answer")
        if isinstance(answer, bool):  # the original's form
            answer = "yes" if answer else "no"
        if answer not in ("yes", "no"):
            row.refuse("answer", "yes or no")
        question, facts = row.text("question"), row.items("facts", str)
        prefix, prompt = prompts.facts_question(question)
        passages = deal(facts, workers, row_random(seed, row.id), "\n")
        group = f"{len(facts)} facts"
        examples.append(Example(row.id, question, prefix, prompt, (answer,), answer.capitalize(), passages=passages, group=group))
    return examples


def load_kv_retrieval(folder: Path | None, workers: int, seed: int, pairs: int = KV_PAIRS) -> list[Example]:
    """`pairs` pairs of a row, the asked-for one always among them, dealt over the branches."""
    examples = []
    for row in read(KV_RETRIEVAL, folder):
        records = row.items("ordered_kv_records", list)
        key, value = row.text("key"), row.text("value")
        if not all(len(record) == 2 and all(isinstance(item, str) for item in record) for record in records):
            row.refuse("ordered_kv_records", "pairs of text")
        if [key, value] not in records:
            row.refuse("key", "a key whose value stands among ordered_kv_records")
        rng = row_random(seed, row.id)
        others = [record for record in records if record[0] != key]
        chosen = [[key, value], *rng.sample(others, min(pairs - 1, len(others)))]
        prefix, prompt = prompts.key_question(key)
        passages = deal([f"{name}: {text}" for name, text in chosen], workers, rng, "\n")
        meta = {"family": ""}  # held out as a whole: training makes up keys and values of its own
        examples.append(Example(row.id, f"value of {key}", prefix, prompt, (value,), value, passages=passages, meta=meta))
    return examples


_SPAN = {"metric": "em", "score": score_span, "extract": extract_span, "answer_tokens": 32}

TASKS = [
    Task("nq_open", load=load_nq_open, source=str(NQ_OPEN), **_SPAN),
    Task("hotpotqa", load=load_hotpotqa, source=str(HOTPOTQA), **_SPAN),
    Task("squad", load=load_squad, source=str(SQUAD), **_SPAN),
    Task("strategyqa", "accuracy", load_strategyqa, score_yes_no, extract_yes_no, answer_tokens=16, source=str(STRATEGYQA)),
    Task("kv_retrieval", "accuracy", load_kv_retrieval, score_exact, extract_exact, answer_tokens=96, source=str(KV_RETRIEVAL)),
]
