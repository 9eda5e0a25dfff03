"""The methods under comparison. Each reads the same rows (`rows.Row`) and gives one `Result` a row; none changes the branches.

A method may name its adapter: `parallel@FOLDER` or `text@FOLDER` (text prefilled with the adapter's LoRA); `@none` is the base.
"""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from ..answering import answer_batch
from ..chat import SUMMARY_PROMPT, text_prompt
from ..config import SamplingParams
from ..engine import Engine
from ..errors import MinipsError, brief
from ..prompts import Prompt
from ..results import Result
from ..synthesis import Synthesizer
from .example import Example, Task
from .rows import Row

SUMMARY_TOKENS = 48
APE = {"branch_temperature": 0.8, "branch_scale": 0.9}  # chosen by NLL on 32 nq_open rows that no table uses
Scorer = Callable[[Example, Sequence[str]], int]  # the index of the best of several answers


@dataclass
class Setup:
    """What methods share: the engine, the task, the answer's sampling and the rules. scorer: chooses for best_of_n (None: votes)."""

    engine: Engine
    task: Task
    params: SamplingParams
    rules: str = "minips"
    adapter: str | None = None
    scorer: Scorer | None = None
    synthesizers: dict[tuple, Synthesizer] = field(default_factory=dict)

    def synthesizer(self, adapter: str | None = None, **options: object) -> Synthesizer:
        """Made once for each adapter and set of options."""
        key = (adapter, *sorted(options.items()))
        if key not in self.synthesizers:
            self.synthesizers[key] = Synthesizer(self.engine, adapter, options=options)
        return self.synthesizers[key]


def from_caches(
    setup: Setup, rows: Sequence[Row], synthesizer: Synthesizer, only: int | None = None, params: Sequence[SamplingParams] | None = None
) -> list[Result]:
    """Merge each row's branches (or only one of them) and answer from the caches. params: one a row, instead of the setup's."""
    contexts = []
    try:
        for row in rows:
            branches = row.branches if only is None else [row.branches[min(only, len(row.branches) - 1)]]
            branches = [branch for branch in branches if branch.output_ids]  # workers that stopped at once have nothing to read
            with warnings.catch_warnings():  # a context of the prefix alone is meant
                warnings.simplefilter("ignore", UserWarning)
                contexts.append(synthesizer.merge(branches, consume=False, prefix=None if branches else row.prefix))
        prompts, targets = [row.example.prompt for row in rows], [row.example.target for row in rows]
        return synthesizer.generate_batch(contexts, prompts, params or setup.params, targets=targets)
    finally:
        for context in contexts:
            context.close()


def from_text(setup: Setup, rows: Sequence[Row], prompts: Sequence[Prompt], adapter: str | None = None) -> list[Result]:
    """Prefill whole prompts, with the base weights or with the adapter's LoRA folded in."""
    engine, started = setup.engine, time.perf_counter()
    synthesizer = setup.synthesizer(adapter)
    ids = []
    for row, prompt in zip(rows, prompts):
        arguments = {"system": row.example.system} if isinstance(prompt, str) else {}
        ids.append(engine.prompts.encode(prompt, "full", **arguments))
    branches, targets = [engine.empty_branch() for _ in rows], [row.example.target for row in rows]
    return answer_batch(engine, branches, ids, setup.params, synthesizer.model, started, synthesizer.valid_vocab, targets)


def parallel(setup: Setup, rows: Sequence[Row], adapter: str | None) -> list[Result]:
    return from_caches(setup, rows, setup.synthesizer(adapter))


def reuse(setup: Setup, rows: Sequence[Row], adapter: str | None) -> list[Result]:
    return from_caches(setup, rows, setup.synthesizer(layout="sequential"))


def naive(setup: Setup, rows: Sequence[Row], adapter: str | None) -> list[Result]:
    return from_caches(setup, rows, setup.synthesizer(rerotate=False))


def ape(setup: Setup, rows: Sequence[Row], adapter: str | None) -> list[Result]:
    return from_caches(setup, rows, setup.synthesizer(**APE))


def text(setup: Setup, rows: Sequence[Row], adapter: str | None) -> list[Result]:
    prompts = [text_prompt(row.example.prefix, row.texts, row.example.prompt) for row in rows]
    return from_text(setup, rows, prompts, adapter)


def text_turn(setup: Setup, rows: Sequence[Row], adapter: str | None) -> list[Result]:
    prompts = []
    for row in rows:
        turns = [("user", row.example.prefix), ("assistant", "\n\n".join(row.texts)), ("user", row.example.prompt)]
        if row.example.system:
            turns.insert(0, ("system", row.example.system))
        prompts.append([{"role": role, "content": content} for role, content in turns])
    return from_text(setup, rows, prompts, adapter)


def summary(setup: Setup, rows: Sequence[Row], adapter: str | None) -> list[Result]:
    engine = setup.engine
    children = [branch.child() for row in rows for branch in row.branches]
    try:
        engine.extend(children, [SUMMARY_PROMPT] * len(children))
        engine.decode(children, SamplingParams(max_tokens=SUMMARY_TOKENS))
        texts = iter([child.text for child in children])
    finally:
        for child in children:
            child.close()
    prompts = [text_prompt(row.example.prefix, [next(texts) for _ in row.branches], row.example.prompt) for row in rows]
    asked = len(engine.prompts.encode(SUMMARY_PROMPT, "continuation"))
    results = from_text(setup, rows, prompts)
    for row, result in zip(rows, results):
        result.prefilled_tokens += asked * len(row.branches)
    return results


def single(setup: Setup, rows: Sequence[Row], adapter: str | None) -> list[Result]:
    """Decoded workers: the first one's own words are the answer. Given passages: the answer from the first passage alone."""
    scored = replace(setup.params, max_tokens=1)  # of the caches only the target's likelihood is wanted
    found = from_caches(setup, rows, setup.synthesizer(), 0, [setup.params if row.example.passages else scored for row in rows])
    return [result if row.example.passages else _own_words(row, 0, result) for row, result in zip(rows, found)]


def best_of_n(setup: Setup, rows: Sequence[Row], adapter: str | None) -> list[Result]:
    """The majority's answer among the workers' own (given passages: among the answers from each passage alone); ties: the first."""
    most = max(len(row.branches) for row in rows)
    given = [row for row in rows if row.example.passages]
    rounds = [from_caches(setup, given, setup.synthesizer(), only=at) for at in range(most)] if given else []
    results = []
    for row in rows:
        if row.example.passages:
            answers = [results_of[given.index(row)] for results_of in rounds[: len(row.branches)]]
        else:
            answers = [_own_words(row, at) for at in range(len(row.branches))]
        chosen = setup.scorer(row.example, [a.text for a in answers]) if setup.scorer else _vote(setup, row.example, answers)
        cost = {name: sum(getattr(answer, name) for answer in answers) for name in ("prefilled_tokens", "reused_tokens")}
        results.append(replace(answers[chosen], scores=None, **cost))
    return results


def _own_words(row: Row, at: int, scored: Result | None = None) -> Result:
    """A worker's output as the answer: nothing was prefilled for it."""
    branch = row.branches[at]
    ids, reason = list(branch.output_ids), branch.finish_reason or "stop"
    scores = scored.scores if scored is not None else None
    return Result(branch.text, ids, reason, 0.0, {}, num_branches=1, branch_tokens=[len(ids)], scores=scores)


def _vote(setup: Setup, example: Example, answers: Sequence[Result]) -> int:
    found = [setup.task.extract(answer.text, example, setup.rules) for answer in answers]
    counts = Counter(answer for answer in found if answer)
    return found.index(max(counts, key=lambda answer: (counts[answer], -found.index(answer)))) if counts else 0


METHODS: dict[str, tuple[Callable[[Setup, Sequence[Row], str | None], list[Result]], str]] = {
    "parallel": (parallel, "branches read from their caches, all at one start, with the adapter if there is one"),
    "text": (text, "the branches' text prefilled again under numbered headings, base weights"),
    "text_turn": (text_turn, "the same text as one assistant turn, the form that branches have, base weights"),
    "single": (single, "one worker alone"),
    "summary": (summary, f"each worker summarises in at most {SUMMARY_TOKENS} tokens, the summaries are prefilled as text"),
    "reuse": (reuse, "caches laid end to end, base weights"),
    "ape": (ape, f"parallel with attention temperature {APE['branch_temperature']} and scale {APE['branch_scale']}, base weights"),
    "naive": (naive, "parallel without re-rotation, base weights"),
    "best_of_n": (best_of_n, "a majority vote over the workers' own answers"),
}
WITH_ADAPTER = ("parallel", "text", "text_turn")


def check_method(spec: str) -> None:
    """Refuse an unknown method, or an adapter behind one that has none."""
    name, at, adapter = spec.partition("@")
    if name not in METHODS:
        raise MinipsError(f"method {brief(name)} is unknown; known: {', '.join(METHODS)}")
    if at and (name not in WITH_ADAPTER or not adapter):
        raise MinipsError(f"method {brief(spec)}: only {', '.join(WITH_ADAPTER)} take an adapter, as NAME@ADAPTER or NAME@none")


def adapter_of(spec: str, setup: Setup) -> str | None:
    name, at, adapter = spec.partition("@")
    return (None if adapter == "none" else adapter) if at else setup.adapter if name == "parallel" else None


def run_method(spec: str, setup: Setup, rows: Sequence[Row]) -> list[Result]:
    """Answer all rows by one method, e.g. `parallel`, `text@weights/NAME`, `parallel@none`."""
    return METHODS[spec.partition("@")[0]][0](setup, rows, adapter_of(spec, setup))
