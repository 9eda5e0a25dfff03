"""In ragged batches: what workers write (`work`), from prompt ids to text (`answers`), log-probabilities of given targets (`score_targets`)."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .config import SamplingParams
from .decoding import DecodeRow, Writer, check_stops, decode_rows, feed, open_writers
from .errors import MinipsError, RoomError, counted
from .kv_cache import Branch
from .model import Model
from .results import Result, Scores, TextStream
from .sampling import params_for

if TYPE_CHECKING:
    from .engine import Engine


def work(
    engine: Engine, branches: Sequence[Branch], params: Sequence[SamplingParams], shared: bool, watched: bool
) -> Iterator[tuple[int, int | None, str]]:
    """Decode all branches, as one batch if their worst case fits the free pages, else in waves; all of them keep it, or none.

    A wave takes as many rows, in order, as fit at their longest; the next one has the pages that they did not use. Rows know nothing
    of their wave: the same tokens come out. shared: one SamplingParams stands for all rows. Greedy rows on the very same context
    are computed once. Yields (row, token or None, text) for each token if `watched`, else once a step.
    """
    engine.check_branches(branches, "decode")  # again, now that it is this call's turn
    leaders: dict[object, list[int]] = {}
    for index, (branch, row_params) in enumerate(zip(branches, params)):
        context = tuple(map(id, branch.segments)) if row_params.greedy else index
        leaders.setdefault((context, row_params), []).append(index)
    groups = list(leaders.values())
    firsts, each = [branches[group[0]] for group in groups], [params[group[0]] for group in groups]
    limits = [engine.token_limit(branch.next_position, row_params) for branch, row_params in zip(firsts, each)]
    contexts = [segment for branch in branches for segment in branch.segments]
    engine.pool.make_room(sum(map(engine.pool.pages_for, limits)), "decoding workers", contexts)
    _check_waves(engine, each, limits)
    writers: list[Writer] = []
    rows: list[DecodeRow] = []
    try:
        for branch in branches:
            branch.busy = True
        engine.ensure_logits(firsts)
        while len(rows) < len(groups):
            done, last = len(rows), -1
            wave = range(done, done + _wave(engine, [engine.pool.pages_for(limit) for limit in limits[done:]]))
            what = f"decoding {counted(len(groups), 'worker')}" + (f" in waves: after {done} of them the next one" if done else "")
            writers += open_writers([firsts[at] for at in wave], [limits[at] for at in wave], "output", what)
            streams = [groups[at][0] if shared else None for at in wave]
            rows += [engine.decode_row(writers[at], each[at], limits[at], s, groups[at][0]) for at, s in zip(wave, streams)]
            for at, token, piece in decode_rows(engine.model, rows[done:], drain=True):
                if watched or at <= last:
                    yield from ((index, token, piece) for index in groups[done + at][: None if watched else 1])
                last = at
            for row, writer in zip(rows[done:], writers[done:]):
                writer.trim(len(row.ids), row.stop_token)
        logits = [torch.stack(row.logits) if row.logits else None for row in rows]
        for row, writer, group, own in zip(rows, writers, groups, logits):
            _finish(engine, row, writer, [branches[index] for index in group], own)
    finally:
        for branch in branches:
            branch.busy = False
        for writer in writers:
            writer.abort()


def _check_waves(engine: Engine, params: Sequence[SamplingParams], limits: Sequence[int]) -> None:
    """Refuse before the first forward what no run of waves can fit, with the pages of all rows at their longest."""
    pages, used = engine.pool.pages_for, 0
    longest = sum(map(pages, limits))
    for row_params, limit in zip(params, limits):
        if used + pages(limit) > engine.pool.num_free:
            engine.pool.require(longest, f"decoding {counted(len(limits), 'worker')}")
        used += pages(engine.least_tokens(row_params, limit))


def _wave(engine: Engine, needed: Sequence[int]) -> int:
    """How many rows that need so many pages at their longest fit the free ones; the first in any case, which is then refused if need be."""
    count, free = 0, engine.pool.num_free
    while count < len(needed) and needed[count] <= free:
        free -= needed[count]
        count += 1
    return max(count, 1)


def _finish(engine: Engine, row: DecodeRow, writer: Writer, branches: list[Branch], logits: Tensor | None) -> None:
    """Give what a row wrote to its branches; logits: fp32 [tokens, vocab] if they were asked for."""
    segment = writer.commit(row.ids, row.stop_token)
    segment.ended = row.ended
    engine.counters["decoded_tokens"] += len(row.ids)
    for position, branch in enumerate(branches):
        if position:
            engine.pool.retain(segment.pages)
            branch.adopt(segment, row.ids)
        branch.output_ids, branch.text, branch.finish_reason = list(row.ids), row.text, row.finish_reason
        branch.next_logits, branch.turn = row.last_logits, "assistant"
        branch.logprobs = None if row.logprobs is None else [dict(entry) for entry in row.logprobs]
        branch.logits = logits


def answer(
    engine: Engine,
    branch: Branch,
    ids: list[int],
    params: SamplingParams,
    model: Model,
    started: float,
    timings: dict[str, float] | None = None,
    valid_vocab: int | None = None,
) -> Iterator[str]:
    """`answers` of one row: yields the text of each token, returns its Result."""
    rows = answers(engine, [branch], [ids], [params], model, started, timings, valid_vocab)
    try:
        while True:
            yield next(rows)[1]
    except StopIteration as stop:
        return stop.value[0]
    finally:
        rows.close()


def answer_batch(
    engine: Engine,
    branches: Sequence[Branch],
    ids: Sequence[list[int]],
    params: SamplingParams | Sequence[SamplingParams] | None,
    model: Model,
    started: float,
    valid_vocab: int | None = None,
    targets: Sequence[str | list[int]] | None = None,
) -> list[Result]:
    """`answers` to its end, in waves where the worst case of all rows does not fit at once; targets: text or ids.

    A wave takes as many rows, in order, as fit, and gives all of its pages back. What no wave can fit is refused before the first
    forward. The branches are closed, also where the call is refused.
    """
    try:
        params = params_for(params, len(ids), "generate_batch")
        if targets is not None and not (isinstance(targets, (list, tuple)) and len(targets) == len(ids)):
            found = len(targets) if isinstance(targets, (list, tuple)) else type(targets).__name__
            raise MinipsError(f"generate_batch: {len(ids)} prompts but {found} targets, expected one each")
        targets = None if targets is None else [engine.prompts.output(target) for target in targets]
        needed = []
        for branch, row, own, target in zip(branches, ids, params, targets or [None] * len(ids)):
            needed.append(_needed(engine, row, answer_limit(engine, branch.next_position, row, own), target))
            if target is not None:
                _check_target(engine, branch.next_position + len(row), target, valid_vocab or engine.valid_vocab)
        results: list[Result] = []
        while (done := len(results)) < len(ids):
            with engine.turns("generate_batch"):
                wave = slice(done, done + _admit(engine, branches[done:], needed[done:]))
            own = None if targets is None else targets[wave]
            rows = answers(engine, branches[wave], ids[wave], params[wave], model, started, None, valid_vocab, own)
            results += TextStream(rows, engine.turns, "generate_batch").finish()
        return results
    finally:
        for branch in branches:
            branch.close()


def _admit(engine: Engine, branches: Sequence[Branch], needed: Sequence[int]) -> int:
    """How many of the rows that are left are answered together: as many as fit. Refused where the largest of them never will."""
    engine.check_branches(branches, "generate_batch")
    pool, what = engine.pool, f"the longest of {counted(len(needed), 'prompt')} and its answer"
    if max(needed) > (pool.num_pages - 1 if pool.offload else pool.num_free):
        pool.require(max(needed), what)
    count = len(needed) if pool.offload else _wave(engine, needed)
    while True:
        try:
            pool.require(sum(needed[:count]), what, [segment for branch in branches[:count] for segment in branch.segments])
            return count
        except RoomError:  # their contexts come back from the host memory too
            if count == 1:
                raise
            count = (count + 1) // 2


def answers(
    engine: Engine,
    branches: Sequence[Branch],
    ids: Sequence[list[int]],
    params: Sequence[SamplingParams],
    model: Model,
    started: float,
    timings: dict[str, float] | None = None,
    valid_vocab: int | None = None,
    targets: Sequence[list[int]] | None = None,
) -> Iterator[tuple[int, str]]:
    """Feed each row's ids to its branch with `model`'s weights, decode all rows as one batch, close the branches.

    Yields (row, text, which may be empty) for each token, returns one Result a row. started: when the call began (perf_counter).
    timings: seconds spent before. valid_vocab: ids from here on are not chosen. targets: score these as the answers too, on the
    same prefill.
    """
    before = {"rerotate": 0.0, "map": 0.0, **(timings or {})}
    writers: list[Writer] = []
    try:
        for branch in branches:
            branch.busy = True
        limits = _check_room(engine, branches, ids, params, targets)
        mark = time.perf_counter()
        at_prompt = prompt_logits(engine, branches, ids, [row.return_logits for row in params], model)
        engine.pool.settle()
        prefilled = time.perf_counter()
        before["prefill"] = prefilled - mark
        engine.counters["prefilled_tokens"] += sum(map(len, ids))
        scores = score_targets(engine, branches, targets, model, valid_vocab) if targets is not None else [None] * len(ids)
        mark = time.perf_counter()
        started += mark - prefilled  # scoring is no part of answering
        writers += open_writers(branches, limits, "output", "the answer")
        rows = [engine.decode_row(w, p, limit, valid_vocab=valid_vocab) for w, p, limit in zip(writers, params, limits)]
        first: dict[int, float] = {}
        last: dict[int, float] = {}
        for at, _, piece in decode_rows(model, rows, drain=False) if rows else ():
            last[at] = time.perf_counter()
            first.setdefault(at, last[at])
            yield at, piece
        end = time.perf_counter()
        results = []
        for at, row in enumerate(rows):
            shown, ended = first.get(at, end), end if len(rows) == 1 else last.get(at, end)
            engine.counters["decoded_tokens"] += len(row.ids)
            logits = None
            if params[at].return_logits:
                logits = torch.cat([*at_prompt[at], *([torch.stack(row.logits[1:])] if len(row.logits or ()) > 1 else [])])
            results.append(
                Result(
                    text=row.text,
                    token_ids=row.ids,
                    finish_reason=row.finish_reason,
                    ttft=shown - started,
                    timings={**before, "first_token": shown - mark, "decode": ended - shown},
                    logprobs=row.logprobs,
                    logits=logits,
                    prefilled_tokens=len(ids[at]),
                    reused_tokens=branches[at].num_cached - len(ids[at]),
                    seed=row.sampler.seed,
                    scores=scores[at],
                )
            )
        return results
    finally:
        for writer in writers:
            writer.abort()
        for branch in branches:
            branch.busy = False
            branch.close()


def answer_limit(engine: Engine, position: int, row: list[int], params: SamplingParams) -> int:
    """How many tokens the answer to a prompt that starts at `position` may have; refuses what has no tokens or no positions."""
    if not row:
        raise MinipsError("prompt is empty: it has no tokens")
    check_stops(params, engine.tokenizer)
    engine.check_positions(position, len(row), "the prompt")
    return engine.token_limit(position + len(row), params)


def _needed(engine: Engine, row: list[int], limit: int, target: list[int] | None) -> int:
    """Pages of a prompt and, behind it, first a target to score and then the answer at its longest."""
    return engine.pool.pages_for(len(row)) + engine.pool.pages_for(max(limit, len(target or ()) - 1))


def _check_room(
    engine: Engine,
    branches: Sequence[Branch],
    ids: Sequence[list[int]],
    params: Sequence[SamplingParams],
    targets: Sequence[list[int]] | None,
) -> list[int]:
    """Refuse what cannot fit before any page is taken -> how many tokens each answer may have."""
    limits = [answer_limit(engine, branch.next_position, row, each) for branch, row, each in zip(branches, ids, params)]
    what = "the prompt and its answer" if len(ids) == 1 else f"{len(ids)} prompts and their answers"
    needed = sum(map(_needed, [engine] * len(ids), ids, limits, targets or [None] * len(ids)))
    engine.pool.require(needed, what, [segment for branch in branches for segment in branch.segments])
    return limits


def prompt_logits(
    engine: Engine, branches: Sequence[Branch], ids: Sequence[list[int]], every: Sequence[bool], model: Model
) -> list[list[Tensor]]:
    """Feed each row's ids to its branch -> per row the logits of its last position, or of every position, in pieces."""
    pieces: list[list[Tensor]] = [[] for _ in ids]
    writers = open_writers(branches, [len(row) for row in ids], "context", "the prompt")
    try:
        starts = [0 if wanted else len(row) - 1 for wanted, row in zip(every, ids)]
        for at, _, logits in feed(model, writers, ids, engine.settings.prefill_chunk, starts):
            pieces[at].append(logits)
        for at, (branch, writer) in enumerate(zip(branches, writers)):
            writer.commit(ids[at])
            branch.next_logits = pieces[at][-1][-1]
    finally:
        for writer in writers:
            writer.abort()
    return pieces


def score_ids(
    engine: Engine,
    branches: Sequence[Branch],
    ids: Sequence[list[int]],
    targets: Sequence[list[int]],
    model: Model,
    valid_vocab: int | None = None,
) -> list[Scores]:
    """Score target ids behind each branch + ids, among the ids that can be chosen; closes the branches."""
    try:
        for branch, row, target in zip(branches, ids, targets):
            if not row or not target:
                raise MinipsError(f"score: the {'target' if row else 'prompt'} is empty: it has no tokens")
            engine.check_positions(branch.next_position, len(row) + len(target) - 1, "prompt and target")
        prompt_logits(engine, branches, ids, [False] * len(ids), model)
        return score_targets(engine, branches, targets, model, valid_vocab)
    finally:
        for branch in branches:
            branch.close()


def _check_target(engine: Engine, position: int, target: list[int], valid_vocab: int) -> None:
    """Refuse a target that cannot be scored from `position` on."""
    if not target:
        raise MinipsError("score: the target is empty: it has no tokens")
    if max(target) >= valid_vocab:
        raise MinipsError(f"score: target id {max(target)} is outside the usable vocabulary of {valid_vocab}")
    engine.check_positions(position, len(target) - 1, "prompt and target")


@torch.no_grad()
def score_targets(
    engine: Engine, branches: Sequence[Branch], targets: Sequence[list[int]], model: Model, valid_vocab: int | None = None
) -> list[Scores]:
    """Log-probabilities of target ids right behind branches whose last logits are known; the branches stay as they are."""
    valid_vocab = engine.valid_vocab if valid_vocab is None else valid_vocab
    for branch, target in zip(branches, targets):
        _check_target(engine, branch.next_position, target, valid_vocab)
    found = [Scores(list(target), [], []) for target in targets]

    def note(at: int, first: int, logits: Tensor) -> None:
        """Row `at`: logits [n, vocab] predict the target from token `first` on."""
        wanted = torch.tensor(targets[at][first : first + len(logits)], device=logits.device)
        logits = logits[:, :valid_vocab]
        found[at].logprobs += torch.log_softmax(logits, -1).gather(1, wanted[:, None])[:, 0].tolist()
        found[at].greedy += (logits.argmax(-1) == wanted).tolist()

    for at, branch in enumerate(branches):
        note(at, 0, branch.next_logits[None])
    longer = [at for at, target in enumerate(targets) if len(target) > 1]
    writers = open_writers([branches[at] for at in longer], [len(targets[at]) - 1 for at in longer], "context", "prompt and target")
    try:
        fed = [targets[at][:-1] for at in longer]
        for row, first, logits in feed(model, writers, fed, engine.settings.prefill_chunk, [0] * len(longer)) if longer else ():
            note(longer[row], first + 1, logits)
    finally:
        for writer in writers:
            writer.abort()
    return found
