"""Attention of a ragged batch over the paged KV cache. Causality goes by slot order, never by position.

`GatherAttention`: each row's slots, in order, become one key and value sequence (a view where they are one run), then SDPA or,
on a CPU, what is faster there.
`TableAttention`: one new token a row and all shapes fixed, for steps that are captured once and replayed.
Only filled slots are ever read, so junk in recycled pages cannot matter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from .kv_storage import Store, as_run, mixed_as, read, read_mixed, write

SHARED_FROM = 64  # slots that rows must have in common to be read once for all
APART_FROM = 256  # new tokens of a row from which its past is attended apart, on a CPU
BLOCKS_FROM, BLOCKS_SCORES = 16, 80_000  # new tokens, and scores a head, of rows that are attended in blocks (measured on Zen 4)
SUM_FAR = math.exp(8)  # a score of 8 above the estimate of the largest: up to there bf16 is exact to 0.016, and few blocks of a real model have more
BLOCK, SCORES_AT_ONCE = 768, 1 << 23  # queries at a time, and scores, at most


@dataclass(frozen=True)
class Reweight:
    """Weighs the branches of a merged context against everything else (adaptive parallel encoding, arXiv 2502.05431, without training).

    Tokens `first` to `last` (in order of slots) are the branches: their scores are divided by `temperature`, and the logarithm
    of the sum of their exponentials is multiplied by `scale` before it is set against that of all other tokens.
    """

    first: int
    last: int
    temperature: float
    scale: float

    def __call__(self, scores: Tensor) -> Tensor:
        """fp32 [..., length] scaled and masked scores -> such that their softmax is the reweighted attention."""
        ours = scores[..., self.first : self.last] / self.temperature
        ours = ours + (self.scale - 1) * ours.logsumexp(-1, keepdim=True)
        return torch.cat((scores[..., : self.first], ours, scores[..., self.last :]), -1)


@dataclass(frozen=True)
class AttentionRow:
    """One sequence in a forward pass: `count` new tokens behind `past` cached ones.

    slots: int64 [>= past + count], the flat pool slot (page * page_size + offset) of each token in order.
    first_slot: the first slot if all of them are one contiguous run, else None. reweight: see `Reweight`.
    """

    slots: Tensor
    past: int
    count: int
    first_slot: int | None = None
    reweight: Reweight | None = None


class GatherAttention:
    """Writes the new K and V of a batch into the pool and attends, layer by layer.

    keys, values: the pool's, per layer. shared: so many leading slots all rows have in common. On a CPU those are read once for all
    rows, where each has one new token, and joined with the rest of each row by log-sum-exp: the same but for rounding.
    """

    def __init__(self, keys: list[Store], values: list[Store], rows: list[AttentionRow], shared: int = 0):
        self.keys, self.values, self.rows = keys, values, rows
        self.write_slots = torch.cat([row.slots[row.past : row.past + row.count] for row in rows])
        plain = self.write_slots.device.type == "cpu" and all(row.count == 1 and row.reweight is None for row in rows)
        self.shared = shared if plain and len(rows) > 1 and shared >= SHARED_FROM else 0
        self.on_cpu = self.write_slots.device.type == "cpu"
        if self.shared:
            self.common = as_run(rows[0].slots[:shared])
            self.own = [as_run(row.slots[shared : row.past + 1]) for row in rows]
        else:
            self.masks: list[Tensor | None] | None = None  # made when the dtype of the scores is known

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [T, heads, head_dim]; k, v [T, kv_heads, head_dim], rotated already -> [T, heads, head_dim]."""
        write(self.keys[layer], self.write_slots, k)
        write(self.values[layer], self.write_slots, v)
        dtype, q = q.dtype, mixed_as(self.keys[layer], q)  # mixed ones stay in fp32: rounding them to bf16 costs as much as 8 bits do
        if self.shared:
            return self._attend_shared(layer, q).to(dtype)
        if self.masks is None:
            self.masks = [self._mask(row, q) for row in self.rows]
        outputs, start = [], 0
        for row, mask in zip(self.rows, self.masks):
            length, first = row.past + row.count, row.first_slot
            slots = row.slots[:length] if first is None else slice(first, first + length)
            wide = q.dtype if row.reweight is None else torch.float32
            keys, values = read_mixed(self.keys[layer], slots, wide), read(self.values[layer], slots, wide)
            outputs.append(self._attend(q[start : start + row.count], keys, values, row, mask).to(dtype))
            start += row.count
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _attend_shared(self, layer: int, q: Tensor) -> Tensor:
        """q [rows, heads, head_dim], mixed as the keys are."""
        keys, values = self.keys[layer], self.values[layer]
        grouped = q.unflatten(1, (keys.shape[2], -1))
        rows, kv_heads, group, dim = grouped.shape
        together = grouped.transpose(0, 1).reshape(1, kv_heads, rows * group, dim)
        first, first_sum = (x.view(kv_heads, rows, group, -1).transpose(0, 1) for x in _attend_run(together, keys, values, self.common))
        rest = [_attend_run(grouped[at : at + 1], keys, values, slots) for at, slots in enumerate(self.own)]
        second, second_sum = map(torch.cat, zip(*rest))
        weight = torch.sigmoid(second_sum[..., None] - first_sum)  # fp32 or wider
        return torch.lerp(first.to(weight.dtype), second.to(weight.dtype), weight).flatten(1, 2)

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor, row: AttentionRow, mask: Tensor | None) -> Tensor:
        """keys, values: those of the row, [past + count, kv_heads, head_dim]; q and keys mixed alike."""
        if row.reweight is not None:
            return _reweighted(q, keys, values, row.reweight, mask)
        keys, values = keys.transpose(0, 1)[None], values.transpose(0, 1)[None]
        if row.count == 1:  # the heads of a KV head as its queries: the same sums, several times faster on CPU than with enable_gqa
            return F.scaled_dot_product_attention(q.view(1, keys.shape[1], -1, q.shape[-1]), keys, values).view(q.shape)
        heads = q.transpose(0, 1)[None]
        if self._blocks(row, q.dtype):
            return _in_blocks(q, keys[0], values[0], mask)
        if self._apart(row):
            return _behind_past(heads, keys, values, row.past)[0].transpose(0, 1)
        if self.on_cpu and mask is not None:
            out = F.scaled_dot_product_attention(heads.reshape(1, keys.shape[1], -1, q.shape[-1]), keys, values, mask)
            return out.view(heads.shape)[0].transpose(0, 1)
        out = F.scaled_dot_product_attention(heads, keys, values, attn_mask=mask, is_causal=mask is None, enable_gqa=True)
        return out[0].transpose(0, 1)

    def _mask(self, row: AttentionRow, q: Tensor) -> Tensor | None:
        """What `_attend` needs for a row, whose queries are like q [any, heads, head_dim]."""
        group = q.shape[1] // self.keys[0].shape[2]
        if self._blocks(row, q.dtype):
            size = max(1, min(BLOCK, SCORES_AT_ONCE // (row.past + row.count)) // group)
            return q.new_full((min(size, row.count),) * 2, -torch.inf).triu_(1).repeat_interleave(group, 0)
        mask = None if self._apart(row) else causal_mask(row)
        if mask is None or row.reweight is not None or not self.on_cpu:
            return mask
        added = torch.zeros(mask.shape, dtype=q.dtype).masked_fill_(~mask, -torch.inf)  # as SDPA would make it anew in each layer
        return added.repeat(group, 1)

    def _blocks(self, row: AttentionRow, dtype: torch.dtype) -> bool:
        """Whether matrix products in blocks are faster than SDPA: bf16 tokens that are many, or stand behind many cached ones."""
        scores = row.count * (row.past + row.count // 2)
        some = row.reweight is None and row.count >= BLOCKS_FROM and scores >= BLOCKS_SCORES
        return some and self.on_cpu and dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()

    def _apart(self, row: AttentionRow) -> bool:
        """Whether many new tokens attend to what is cached and to themselves apart: a mask would have all of its blocks computed."""
        return self.on_cpu and row.past > 0 and row.count >= APART_FROM and row.reweight is None


def _in_blocks(q: Tensor, keys: Tensor, values: Tensor, triangle: Tensor) -> Tensor:
    """q [n, heads, head_dim], causally over keys, values [kv_heads, past + n, head_dim]; so many tokens at a time as the triangle has.

    triangle [size * heads a KV head, size]: what is added to the scores of the last tokens among themselves, 0 or -inf.

    Products of bf16 give bf16, which is too coarse for scores of 20. So an estimate of each query's largest score is taken off within the product,
    as one more channel whose keys are 1, and the scores that count come out near 0: their exponentials need no further maximum. What is taken
    off does not matter; of 1 key in 16 it is mostly close enough, and where it is not, the scores are computed again.
    """
    scale, (kv_heads, length, dim), size = q.shape[-1] ** -0.5, keys.shape, triangle.shape[1]
    turned = torch.cat((keys, keys.new_ones(1, 1, 1).expand(kv_heads, length, 1)), -1).transpose(1, 2)
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
        queries = torch.cat((queries, largest.neg_()), -1)
        weights, totals = room[: rows * end].view(rows, end), q.new_empty(kv_heads, rows, 1, dtype=torch.float32)
        found = torch.empty_like(queries[..., :-1])
        for head, total in enumerate(totals):
            product = partial(torch.addmm, weights, queries[head], turned[head, :, :end], beta=0, alpha=scale, out=weights)
            _exponentials(product(), own, total)
            if not float(total.max()) <= SUM_FAR and not float(weights.max()) <= SUM_FAR:
                product()[:, -len(tokens) :] += own
                queries[head, :, -1:] -= weights.amax(-1, keepdim=True) / scale
                _exponentials(product(), own, total)
            torch.mm(weights, values[head, :end], out=found[head])
        out[first : first + len(tokens)] = found.div_(totals).unflatten(1, (len(tokens), -1)).transpose(0, 1).flatten(1, 2)
    return out


def _exponentials(scores: Tensor, own: Tensor, total: Tensor) -> None:
    """Add `own` to the last of the scores [n, length] and take their exponentials, in place; their sums go to total fp32 [n, 1]."""
    scores[:, -own.shape[1] :] += own
    torch.sum(scores.exp_(), -1, keepdim=True, dtype=torch.float32, out=total)


def _behind_past(q: Tensor, keys: Tensor, values: Tensor, past: int) -> Tensor:
    """q [1, heads, n, head_dim] over `past` keys without a mask and causally over the n behind them, joined by log-sum-exp."""
    flash, kv_heads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu, keys.shape[1]
    first, first_sum = flash(q.reshape(1, kv_heads, -1, q.shape[-1]), keys[:, :, :past], values[:, :, :past])
    second, second_sum = flash(q, keys[:, :, past:], values[:, :, past:], 0.0, True)
    weight = torch.sigmoid(second_sum - first_sum.reshape(second_sum.shape))[..., None]  # fp32 or wider
    return torch.lerp(first.reshape(q.shape).to(weight.dtype), second.to(weight.dtype), weight).to(q.dtype)


def _attend_run(q: Tensor, keys: Store, values: Store, slots: Tensor | slice) -> tuple[Tensor, Tensor]:
    """q [1, kv_heads, n, head_dim] over all of the slots -> the same shape, and log-sum-exp of the scores [1, kv_heads, n]."""
    k, v = read_mixed(keys, slots, q.dtype), read(values, slots, q.dtype)
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k.transpose(0, 1)[None], v.transpose(0, 1)[None])


class TableAttention:
    """Decode attention whose shapes do not depend on lengths: a gather of whole tables, then one SDPA with a mask for all rows.

    A gather, not FlexAttention over the pages: it is the same on every device, reads 8-bit pages too, and takes any number of heads
    a KV head; it costs a copy of what a step attends, which the weights of a step outweigh.
    """

    def __init__(self, keys: list[Store], values: list[Store], table: Tensor, lengths: Tensor):
        self.keys, self.values = keys, values
        self.inputs = table_inputs(table, lengths)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [rows, heads, head_dim]; k, v [rows, kv_heads, head_dim], rotated already -> [rows, heads, head_dim]."""
        return attend_table(self.keys[layer], self.values[layer], *self.inputs, q, k, v)


def table_inputs(table: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What the layers of a step share: slots to write int64 [rows], slots to read [rows * width], mask bool [rows, 1, 1, width].

    table: int64 [rows, width], the slots of each row in order; from `lengths` on anything. lengths: int64 [rows], the new token counted.
    """
    seen = torch.arange(table.shape[1], device=table.device) < lengths[:, None]
    slots = torch.where(seen, table, table[:, :1]).flatten()  # a weight of 0 times the junk of an unfilled slot may be NaN
    return table.gather(1, lengths[:, None] - 1)[:, 0], slots, seen[:, None, None]


def attend_table(keys: Store, values: Store, write_slots: Tensor, slots: Tensor, mask: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """`TableAttention` of one layer, with what `table_inputs` made."""
    write(keys, write_slots, k)
    write(values, write_slots, v)
    dtype, q = q.dtype, mixed_as(keys, q)
    old = (x.unflatten(0, (len(q), -1)).transpose(1, 2) for x in (read_mixed(keys, slots, q.dtype), read(values, slots, q.dtype)))
    grouped = q.unflatten(1, (k.shape[1], -1))  # keys and values [rows, kv_heads, width, head_dim]
    return F.scaled_dot_product_attention(grouped, *old, attn_mask=mask).flatten(1, 2).to(dtype)


def _reweighted(q: Tensor, keys: Tensor, values: Tensor, reweight: Reweight, mask: Tensor | None) -> Tensor:
    """Plain fp32 attention with the branches' part reweighted; new tokens always stand behind the branches."""
    weights = reweight(attention_scores(q, keys, mask)).softmax(-1)  # [kv_heads, group, count, length]
    out = torch.einsum("hgcl,lhd->chgd", weights, values.float())
    return out.flatten(1, 2).to(q.dtype)


def attention_scores(q: Tensor, keys: Tensor, mask: Tensor | None) -> Tensor:
    """q [count, heads, head_dim], keys [length, kv_heads, head_dim] -> fp32 scores [kv_heads, heads a kv head, count, length]."""
    grouped = q.float().unflatten(1, (keys.shape[1], -1)) * q.shape[-1] ** -0.5
    scores = torch.einsum("chgd,lhd->hgcl", grouped, keys.float())
    return scores if mask is None else scores.masked_fill(~mask, float("-inf"))


def causal_mask(row: AttentionRow) -> Tensor | None:
    """Bool [count, past + count], lower-right aligned; None where SDPA needs none (one query) or its own flag will do (no past)."""
    if row.count == 1 or row.past == 0:
        return None
    length = row.past + row.count
    order = torch.arange(length, device=row.slots.device)
    return order[None, :] <= order[row.past :, None]
