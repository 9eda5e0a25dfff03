"""Multi-source synthesis: passages, facts and pairs as branches; the rows of the evaluation tasks, without their held-out part, and others."""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from ..evaluation import prompts
from ..evaluation.data import Row, Source, held_out, read, row_random
from ..evaluation.tasks import task
from ..evaluation.tasks_sources import contains, deal
from ..training.encoding import Example
from .entry import DataSet, count_of

DROP = Source(
    ("train_drop/drop_dev_subset", "drop/validation"),
    "load_dataset('ucinlp/drop', split='validation').to_json(FILE) with the package datasets writes it",
    "CC BY-SA 4.0",
)
WIKIHOP = Source(("train_wikihop/wikihop_train_subset", "wikihop/train"), "rows with question, answer and contexts", "CC BY-SA 3.0")
IRCOT = Source(
    ("train_ircot_cot_multidoc/ircot_cot_multidoc", "ircot/cot_multidoc"),
    "rows with question, rationale, answer and contexts",
    "Apache-2.0",
)
TWO_WIKI = Source(
    ("2wikimultihopqa/train",),
    "load_dataset('xanhho/2WikiMultihopQA', split='train').to_json(FILE) with the package datasets writes it",
    "Apache-2.0",
)
ENTAILMENT = Source(
    ("train_entailment_bank/task2_train", "entailment_bank/task2_train"), "rows with question, answer and facts", "Apache-2.0"
)
KV_ROWS = 4000


def of_task(name: str) -> Callable[[Path | None, tuple[int, int], int], Iterator[Example]]:
    """Rows of an evaluation task that are not held out, with the task's own words."""

    def build(folder: Path | None, branches: tuple[int, int], seed: int) -> Iterator[Example]:
        loads = {count: task(name).load(folder, count, seed) for count in range(branches[0], branches[1] + 1)}
        for at, first in enumerate(loads[branches[0]]):
            row = loads[count_of(branches, seed, first.id)][at]
            if not held_out(name, row):
                yield Example(f"{name}/{row.id}", row.prefix, row.passages, row.prompt, row.target)

    return build


def of_rows(source: Source, name: str, build_row: Callable[[Row, int, random.Random], Example | None]):
    """The build of a data set whose examples come from one row each; build_row(row, branches wanted, random numbers)."""

    def build(folder: Path | None, branches: tuple[int, int], seed: int) -> Iterator[Example]:
        for row in read(source, folder):
            row = Row(row.fields, f"{name}/{row.id}", row.place, row.path)
            if example := build_row(row, count_of(branches, seed, row.id), row_random(seed, row.id)):
                yield example

    return build


def kv_pairs(folder: Path | None, branches: tuple[int, int], seed: int) -> Iterator[Example]:
    """Keys and values made up: 2 to 20 random UUID pairs, one of them asked for."""
    for number in range(KV_ROWS):
        name = f"kv_pairs/{number}"
        rng = row_random(seed, name)
        pairs = [[str(uuid.UUID(int=rng.getrandbits(128), version=4)) for _ in range(2)] for _ in range(rng.randint(2, 20))]
        key, value = pairs[0]
        prefix, prompt = prompts.key_question(key)
        passages = deal([f"{k}: {v}" for k, v in pairs], count_of(branches, seed, name), rng, "\n")
        yield Example(name, prefix, passages, prompt, value)


def drop(folder: Path | None, branches: tuple[int, int], seed: int) -> Iterator[Example]:
    """The gold paragraph and paragraphs of other rows that do not hold the answer; answers that stand in the paragraph alone."""
    rows = read(DROP, folder)
    pool = list(dict.fromkeys(row.text("passage") for row in rows))
    for row in rows:
        gold, answer, name = row.text("passage"), row.text("answer"), f"drop/{row.id}"
        if not contains(gold, [answer]):
            continue  # counting and arithmetic
        rng, wanted = row_random(seed, name), count_of(branches, seed, name)
        others = rng.sample(pool, min(len(pool), 4 * wanted))
        passages = [gold, *[other for other in others if other != gold and not contains(other, [answer])][: wanted - 1]]
        rng.shuffle(passages)
        yield Example(name, *_asked(row.text("question"), passages), answer)


def _asked(question: str, passages: Iterable[str]) -> tuple[str, tuple[str, ...], str]:
    """Prefix, branches and prompt of a question on passages."""
    prefix, prompt = prompts.passages_question(question)
    return prefix, tuple(passages), prompt


def _documents(row: Row) -> list[str]:
    """Paragraphs of a row's contexts: objects with title and text, or 2WikiMultihopQA's titles and lists of sentences."""
    if "contexts" in row.fields:
        found = [(item.get("title") or "", item.get("text")) for item in row.items("contexts", dict)]
        if not all(isinstance(title, str) and isinstance(text, str) and text.strip() for title, text in found):
            row.refuse("contexts", "objects with the texts title and text")
    else:
        context = row.get("context", dict, "an object with title and sentences (or a field contexts)")
        sentences = context.get("sentences", context.get("content"))
        if not (isinstance(context.get("title"), list) and isinstance(sentences, list) and len(sentences) == len(context["title"])):
            row.refuse("context", "an object with title and sentences, lists of one length")
        found = [(title, " ".join(text)) for title, text in zip(context["title"], sentences)]
    return [f"{title}: {text}" if title else text for title, text in found]


def wikihop(row: Row, branches: int, rng: random.Random) -> Example:
    return Example(row.id, *_asked(row.text("question"), deal(_documents(row), branches, rng)), row.text("answer"))


def ircot(row: Row, branches: int, rng: random.Random) -> Example:
    """Paragraphs as branches; the target reasons in the row's own words."""
    prefix, passages, prompt = _asked(row.text("question"), deal(_documents(row), branches, rng))
    return Example(
        row.id, prefix, passages, prompt.rsplit("\n", 1)[0] + "\nThink step by step, then give the answer.", row.text("rationale")
    )


def entailment(row: Row, branches: int, rng: random.Random) -> Example:
    asked = f"Question: {row.text('question').strip()}"
    prefix = f"Answer the question with the help of the facts.\n{asked}"
    return Example(
        row.id, prefix, deal(row.items("facts", str), branches, rng, "\n"), f"{asked}\nAnswer the question.", row.text("answer").strip()
    )


DATA_SETS = [
    *(DataSet(name, 2, of_task(name), task(name).source) for name in ("nq_open", "hotpotqa", "squad", "strategyqa")),
    DataSet("kv_pairs", 2, kv_pairs, "made up (random UUIDs)"),
    DataSet("drop", 2, drop, str(DROP)),
    DataSet("wikihop", 2, of_rows(WIKIHOP, "wikihop", wikihop), str(WIKIHOP)),
    DataSet("2wikimultihopqa", 2, of_rows(TWO_WIKI, "2wikimultihopqa", wikihop), str(TWO_WIKI)),
    DataSet("ircot", 2, of_rows(IRCOT, "ircot", ircot), str(IRCOT)),
    DataSet("entailment_bank", 2, of_rows(ENTAILMENT, "entailment_bank", entailment), str(ENTAILMENT)),
]
