"""From examples to items of the loss: branches are opened by the engine's own calls, in one ragged batch."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

from ..chat import require_format, text_prompt
from ..config import SamplingParams
from ..engine import Engine
from ..errors import RoomError
from ..kv_cache import Branch
from ..prompts import Prompt
from .config import TrainConfig
from .loss import Item, check_room

TEMPERATURE = 0.8  # of live workers
Words = str | tuple[int, ...]  # text, or token ids of the run's model


@dataclass(frozen=True)
class Example:
    """One row: text of the shared prefix (user turn left open), given branches, the synthesizer's prompt, and the target answer.

    What a model has written is kept as its token ids: text that is tokenized again can give others. workers: instead of given branches, what each live worker is told besides the prefix; they decode when the row's turn comes.
    """

    id: str
    prefix: str
    branches: tuple[Words, ...]
    prompt: str
    target: Words
    workers: tuple[str, ...] = ()


def encode(engine: Engine, examples: Sequence[Example], config: TrainConfig, step: int = 0) -> tuple[list[Branch], list[Item], list[str]]:
    """-> all opened branches (the caller closes them), one item an example that fits, ids of those that do not.

    step: with the config's seed it seeds the live workers.
    """
    opened: list[Branch] = []
    items, skipped, readable = [], [], []
    for example in examples:
        if config.method == "parallel" or example.workers:
            try:
                _check_length(engine, example)
            except RoomError:
                skipped.append(example.id)
                continue
        readable.append(example)
    examples = readable
    try:
        needed = [example for example in examples if config.method == "parallel" or example.workers]
        roots = engine.prefill_batch([example.prefix for example in needed])
        try:
            forked = engine.fork_batch(roots, [example.workers or [""] * len(example.branches) for example in needed])
        finally:
            for root in roots:
                root.close()
        opened += chain.from_iterable(forked)
        forked = iter(forked)
        rows = [next(forked) if config.method == "parallel" or example.workers else [] for example in examples]
        given = [(row, example.branches) for row, example in zip(rows, examples) if not example.workers]
        live = list(chain.from_iterable(row for row, example in zip(rows, examples) if example.workers))
        if config.method == "parallel":
            engine.encode(list(chain.from_iterable(row for row, _ in given)), [ids_of(text) for _, texts in given for text in texts])
        if live:
            names = [f"{example.id} {at}" for row, example in zip(rows, examples) if example.workers for at in range(len(row))]
            seeds = [random.Random(f"{config.seed} {step} {name}").getrandbits(63) for name in names]
            params = SamplingParams(max_tokens=config.worker_tokens, temperature=TEMPERATURE)
            engine.decode(live, [replace(params, seed=seed) for seed in seeds])
        end = require_format(engine.chat).turn_end  # learnt too, or answers would not stop
        for example, branches in zip(examples, rows):
            target = [*engine.prompts.output(ids_of(example.target)), end]
            if config.method == "parallel":
                read = [branch for branch in branches if branch.output_ids]
                item = Item(read, engine.prompts.encode(example.prompt, "continuation"), target)
            else:
                texts = [branch.text for branch in branches] if example.workers else [text_of(engine, text) for text in example.branches]
                item = Item((), engine.prompts.encode(as_text(example, texts, config.method), "full"), target)
            try:
                check_room(engine, item, config.merge_options(), config.most_tokens)
                items.append(item)
            except RoomError:
                skipped.append(example.id)
    except BaseException:
        for branch in opened:
            branch.close()
        raise
    return opened, items, skipped


def _check_length(engine: Engine, example: Example) -> None:
    """RoomError where one of the branches does not fit the model's positions."""
    prefix = len(engine.prompts.encode(example.prefix, "prefix"))
    for text in example.workers or example.branches:
        engine.check_positions(prefix, len(engine.prompts.output(ids_of(text))), "a branch")


def ids_of(words: Words) -> str | list[int]:
    """As the engine takes it."""
    return words if isinstance(words, str) else list(words)


def text_of(engine: Engine, words: Words) -> str:
    return words if isinstance(words, str) else engine.tokenizer.decode(list(words))


def as_text(example: Example, texts: Sequence[str], method: str) -> Prompt:
    """The row with these branches as one prompt, as the evaluation's methods of the same names write it."""
    if method == "text":
        return text_prompt(example.prefix, texts, example.prompt)
    turns = (("user", example.prefix), ("assistant", "\n\n".join(texts)), ("user", example.prompt))
    return [{"role": role, "content": content} for role, content in turns]
