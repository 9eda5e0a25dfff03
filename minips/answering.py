"""One sequence from prompt ids to text (`answer`), and the log-probabilities of a given target (`score_ids`)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from .config import SamplingParams
from .decoding import Writer, decode_rows, feed, open_writers
from .errors import MinipsError
from .kv_cache import Branch
from .model import Model
from .results import Result, Scores

if TYPE_CHECKING:
    from .engine import Engine


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
    """Feed ids to `branch` with `model`'s weights, decode, close it; yields text, returns a Result.

    started: when the call began (perf_counter). timings: seconds spent before. valid_vocab: ids from here on are not chosen.
    """
    timings = {"rerotate": 0.0, "map": 0.0, **(timings or {})}
    writers: list[Writer] = []
    try:
        branch.busy = True
        if not ids:
            raise MinipsError("prompt is empty: it has no tokens")
        engine.check_positions(branch.next_position, len(ids), "the prompt")
        limit = engine.token_limit(branch.next_position + len(ids), params)
        engine.pool.require(engine.pool.pages_for(len(ids)) + engine.pool.pages_for(limit), "the prompt and its answer")
        mark = time.perf_counter()
        writers += open_writers([branch], [len(ids)], "context", "the prompt")
        logits_from = [0] if params.return_logits else None
        prompt_logits = [logits for _, _, logits in feed(model, writers, [ids], engine.settings.prefill_chunk, logits_from)]
        branch.next_logits = prompt_logits[-1][-1]
        writers.pop().commit(ids)
        engine.counters["prefilled_tokens"] += len(ids)
        timings["prefill"] = time.perf_counter() - mark
        mark = time.perf_counter()
        writers += open_writers([branch], [limit], "output", "the answer")
        row = engine.decode_row(writers[0], params, limit, valid_vocab=valid_vocab)
        first: float | None = None
        for _, _, piece in decode_rows(model, [row], drain=False):
            if first is None:
                first = time.perf_counter()
            if piece:
                yield piece
        end = time.perf_counter()
        first = end if first is None else first
        timings["first_token"], timings["decode"] = first - mark, end - first
        engine.counters["decoded_tokens"] += len(row.ids)
        logits = None
        if params.return_logits:
            logits = torch.cat([*prompt_logits, *([torch.stack(row.logits[1:])] if len(row.logits or ()) > 1 else [])])
        return Result(
            text=row.text,
            token_ids=row.ids,
            finish_reason=row.finish_reason,
            ttft=first - started,
            timings=timings,
            logprobs=row.logprobs,
            logits=logits,
            prefilled_tokens=len(ids),
            reused_tokens=branch.num_cached - len(ids),
            seed=row.sampler.seed,
        )
    finally:
        for writer in writers:
            writer.abort()
        branch.busy = False
        branch.close()


def score_ids(
    engine: Engine, branch: Branch, ids: list[int], target: list[int], model: Model, valid_vocab: int | None = None
) -> Scores:
    """Score target ids behind `branch` + ids, among the ids that can be chosen; closes the branch."""
    valid_vocab = engine.valid_vocab if valid_vocab is None else valid_vocab
    writers: list[Writer] = []
    try:
        if not ids or not target:
            raise MinipsError(f"score: the {'target' if ids else 'prompt'} is empty: it has no tokens")
        if max(target) >= valid_vocab:
            raise MinipsError(f"score: target id {max(target)} is outside the usable vocabulary of {valid_vocab}")
        tokens = [*ids, *target[:-1]]
        engine.check_positions(branch.next_position, len(tokens), "prompt and target")
        writers += open_writers([branch], [len(tokens)], "context", "prompt and target")
        scores = Scores(list(target), [], [])
        wanted = torch.tensor(target, device=engine.device)
        for _, index, logits in feed(model, writers, [tokens], engine.settings.prefill_chunk, [len(ids) - 1]):
            first = index - len(ids) + 1
            expected = wanted[first : first + len(logits)]
            logprobs = torch.log_softmax(logits[:, :valid_vocab], -1).gather(1, expected[:, None])[:, 0]
            scores.logprobs += logprobs.tolist()
            scores.greedy += (logits[:, :valid_vocab].argmax(-1) == expected).tolist()
        return scores
    finally:
        for writer in writers:
            writer.abort()
        branch.close()
