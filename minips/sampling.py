"""Choosing tokens. Order: repetition penalty, temperature, top_k, top_p, min_p; then one uniform number picks from what is left.

Every row owns its random stream, so neighbours, batch size and row order never matter.
"""

from __future__ import annotations

import math
import random
import secrets
from collections.abc import Sequence

import torch
from torch import Tensor

from .config import SamplingParams
from .errors import MinipsError

_MASK = (1 << 64) - 1
_NUCLEUS_CANDIDATES = 1024  # top_p looks here first; exact, because it falls back to a full sort


def _mix(value: int) -> int:
    """splitmix64's finalizer: neighbouring seeds give unrelated streams."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


class RowSampler:
    """The sampling state of one sequence.

    row None: the stream of the seed as given; row i: the stream (seed, i). `seed` is the one in force, also where params
    left it open. Ids from `valid_vocab` on (padding of the embedding) are never chosen.
    """

    def __init__(self, params: SamplingParams, row: int | None, prompt_ids: Sequence[int], vocab_size: int, valid_vocab: int):
        self.params, self.valid_vocab = params, min(valid_vocab, vocab_size)
        self.seed = secrets.randbits(31) if params.seed is None else params.seed
        stream = self.seed if row is None else _mix(_mix(self.seed) ^ (row + 1))
        self._random = random.Random(stream)  # torch's CPU generator would use the low 32 bits of the seed only
        self._seen = set(prompt_ids) if params.repetition_penalty != 1.0 else None
        self.step = 0

    def uniform(self) -> float:
        """The next number of the stream, fp64 in [0, 1)."""
        return self._random.random()

    def penalise(self, logits: Tensor) -> Tensor:
        """Divide positive and multiply negative logits [V] of tokens seen so far (prompt included)."""
        if not self._seen:
            return logits
        ids = torch.tensor(sorted(self._seen), device=logits.device)
        values, penalty = logits[ids], self.params.repetition_penalty
        return logits.index_put((ids,), torch.where(values > 0, values / penalty, values * penalty))

    def record(self, token: int) -> None:
        self.step += 1
        if self._seen is not None:
            self._seen.add(token)


def sample(logits: Tensor, rows: Sequence[RowSampler], labels: Sequence[int] | None = None) -> list[int]:
    """One token id a row from logits [R, V] (any float dtype and device). Greedy takes the lowest id among equals.

    NaN, +inf or a row without any finite logit is refused, naming the row (its label, where given) and its step,
    before any row is changed.
    """
    if not rows:
        return []
    valid = rows[0].valid_vocab
    if any(row.valid_vocab != valid for row in rows):
        raise AssertionError("rows of one batch have one vocabulary")
    logits = logits.float()
    peaks, best = logits[:, :valid].max(dim=-1)  # NaN where a row holds one; the lowest id among equals
    peaks, best = torch.stack((peaks.double(), best.double())).tolist()  # one wait for the device
    for index, (row, peak) in enumerate(zip(rows, peaks)):
        if not math.isfinite(peak):
            label = index if labels is None else labels[index]
            raise MinipsError(f"row {label}, step {row.step}: the logits are not finite (NaN or infinite), so the weights are broken")
    tokens = [int(token) for token in best]
    for i, row in enumerate(rows):
        if not row.params.greedy or row.params.repetition_penalty != 1.0:
            adjusted = row.penalise(logits[i])[: row.valid_vocab]
            tokens[i] = int(adjusted.argmax()) if row.params.greedy else _draw(adjusted, row.params, row.uniform())
    for row, token in zip(rows, tokens):
        row.record(token)
    return tokens


def _draw(logits: Tensor, params: SamplingParams, uniform: float) -> int:
    """Pick from fp32 logits [V] by inverse CDF over what the filters leave."""
    ids, probabilities = filter_probabilities(logits, params)
    cumulative = probabilities.double().cumsum(0)
    at = int(torch.searchsorted(cumulative, uniform * float(cumulative[-1]), right=True))
    at = min(at, len(cumulative) - 1)
    while at > 0 and probabilities[at] == 0:
        at -= 1
    return int(ids[at]) if ids is not None else at


def filter_probabilities(logits: Tensor, params: SamplingParams) -> tuple[Tensor | None, Tensor]:
    """fp32 logits [V] -> (ids [n] by falling probability, probabilities [n] > 0); ids None: all V in order, 0 = filtered out.

    Not normalised.
    """
    probabilities = torch.softmax((logits - logits.max()) / params.temperature, dim=-1)  # cannot overflow
    vocab = len(probabilities)
    if params.top_k in (0, vocab) and params.top_p >= 1.0 and params.min_p == 0.0:
        return None, probabilities
    if params.top_k in (0, vocab) and params.top_p >= 1.0:  # min_p alone: its threshold needs no order
        floor = params.min_p * probabilities.max() * (1 - 1e-6)
        return None, torch.where(probabilities >= floor, probabilities, 0.0)
    ids = None
    if 0 < params.top_k < vocab:
        probabilities, ids = probabilities.topk(params.top_k)
    elif params.top_p < 1.0 and vocab > _NUCLEUS_CANDIDATES:
        head, head_ids = probabilities.topk(_NUCLEUS_CANDIDATES)
        if float(head.double().sum()) >= params.top_p:
            probabilities, ids = head, head_ids
    if ids is None:
        probabilities, ids = probabilities.sort(descending=True, stable=True)
    if params.top_p < 1.0:
        wide = probabilities.double()
        total = wide.sum() if 0 < params.top_k < vocab else 1.0  # after top_k the rest is renormalised
        before = wide.cumsum(0) - wide
        keep = before < params.top_p * total - 1e-7  # a border that is met but for rounding counts as met
        keep[0] = True
        probabilities, ids = probabilities[keep], ids[keep]
    if params.min_p > 0.0:
        keep = probabilities >= params.min_p * probabilities[0] * (1 - 1e-6)
        probabilities, ids = probabilities[keep], ids[keep]
    return ids, probabilities


def token_logprobs(logits: Tensor, token_id: int, k: int) -> dict[int, float]:
    """Raw log-probabilities from unmodified logits [V]: the k likeliest and the chosen token, likeliest first."""
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    top = logprobs.topk(min(k, len(logprobs)))
    found = dict(zip(top.indices.tolist(), top.values.tolist()))
    found.setdefault(token_id, float(logprobs[token_id]))
    return found


def params_for(params: SamplingParams | Sequence[SamplingParams] | None, count: int, call: str = "decode") -> list[SamplingParams]:
    """One SamplingParams a row from one for all, a list, or None for the defaults."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if not isinstance(params, (list, tuple)) or not all(isinstance(row, SamplingParams) for row in params):
        raise MinipsError(f"{call}: params is {type(params).__name__}, expected a SamplingParams or a list with one for each row")
    if len(params) != count:
        raise MinipsError(f"{call}: {count} branches but {len(params)} params, expected one each")
    return list(params)
