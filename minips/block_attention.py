"""Causal attention of many bf16 queries on a CPU, by matrix products of blocks of scores: faster than SDPA where there are enough of them."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

FROM_TOKENS, FROM_SCORES = 16, 80_000  # new tokens, and scores a head, from which blocks are faster (measured on Zen 4)
QUERIES_AT_ONCE, SCORES_AT_ONCE = 768, 1 << 23  # at most
# e^8: a score of 8 above the estimate of the largest; up to there bf16 is exact to 0.016, and few blocks of a real model have more
SUM_FAR, SUM_NEAR = math.exp(8), math.exp(-4)  # below: the estimate was too high, by what it is rounded


def worth_blocks(past: int, count: int, dtype: torch.dtype) -> bool:
    """Whether `count` new tokens behind `past` cached ones are attended faster in blocks."""
    enough = count >= FROM_TOKENS and count * (past + count // 2) >= FROM_SCORES
    return enough and dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def block_triangle(past: int, count: int, group: int, dtype: torch.dtype) -> Tensor:
    """What `causal_in_blocks` adds to the scores of a block's tokens among themselves: 0 or -inf, [tokens * group, tokens].

    group: heads a KV head. As many tokens as a block is to have.
    """
    size = min(count, max(1, min(QUERIES_AT_ONCE, SCORES_AT_ONCE // (past + count)) // group))
    return torch.full((size, size), -torch.inf, dtype=dtype).triu_(1).repeat_interleave(group, 0)


def causal_in_blocks(q: Tensor, keys: Tensor, values: Tensor, triangle: Tensor) -> Tensor:
    """q [n, heads, head_dim], causally over keys, values [kv_heads, past + n, head_dim]; so many tokens at a time as the triangle has.

    triangle [size * heads a KV head, size]: what is added to the scores of the last tokens among themselves, 0 or -inf.

    Products of bf16 give bf16, which is too coarse for scores of 20. So an estimate of each query's largest score is taken off within the product,
    as two more channels (its high and its low digits) whose keys are 1, and the scores that count come out near 0: their exponentials need no
    further maximum. What is taken off does not matter; of 1 key in 16 it is mostly close enough, and where it is not, the scores are
    computed again: twice, where they are so large that what is read off the first time is coarse too.
    """
    scale, (kv_heads, length, dim), size = math.log2(math.e) * q.shape[-1] ** -0.5, keys.shape, triangle.shape[1]
    wider = keys.new_empty(kv_heads, length, dim + 2)  # filled in half the time of cat
    wider[..., :dim], wider[..., dim:] = keys, 1
    out, room = torch.empty_like(q), q.new_empty(len(triangle) * length)
    for first in range(0, len(q), size):
        tokens = q[first : first + size]
        queries = tokens.unflatten(1, (kv_heads, -1)).transpose(0, 1).flatten(1, 2)  # [kv_heads, tokens * heads a KV head, head_dim]
        end, rows = length - len(q) + first + len(tokens), queries.shape[1]
        own = triangle[:rows, : len(tokens)]
        past, hidden = end - len(tokens), own.T[::16]
        some = torch.cat((keys[:, : min(4, past)], keys[:, 4:past:16], keys[:, past:end:16]), 1)  # the first ones: attention sinks
        estimates = torch.bmm(some, queries.transpose(1, 2))
        estimates[:, -len(hidden) :] += hidden  # of keys that it must not see, one could lie far above a query's scores
        largest = estimates.amax(1)[..., None]
        queries = torch.cat((queries, largest.neg_(), torch.zeros_like(largest)), -1)
        weights, totals = room[: rows * end].view(rows, end), q.new_empty(kv_heads, rows, 1, dtype=torch.float32)
        found = torch.empty_like(queries[..., :dim])
        for head, total in enumerate(totals):
            product = partial(torch.addmm, weights, queries[head], wider[head, :end].T, beta=0, alpha=scale, out=weights)
            for last in (False, False, True):
                _powers(product(), own, total)
                least, most = (float(bound) for bound in torch.aminmax(total))
                if last or least >= SUM_NEAR and (most <= SUM_FAR or float(weights.max()) <= SUM_FAR):
                    break
                product()[:, -len(tokens) :] += own
                shift = queries[head, :, dim:].sum(-1, dtype=torch.float32) - weights.amax(-1) / scale
                queries[head, :, dim] = shift
                queries[head, :, dim + 1] = shift - queries[head, :, dim]
            torch.mm(weights, values[head, :end], out=found[head])
        out[first : first + len(tokens)] = found.div_(totals).unflatten(1, (len(tokens), -1)).transpose(0, 1).flatten(1, 2)
    return out


def _powers(scores: Tensor, own: Tensor, total: Tensor) -> None:
    """Add `own` to the last of the scores [n, length] and take their powers of 2 (faster than those of e), in place.

    Their sums go to total fp32 [n, 1].
    """
    scores[:, -own.shape[1] :] += own
    torch.sum(scores.exp2_(), -1, keepdim=True, dtype=torch.float32, out=total)
