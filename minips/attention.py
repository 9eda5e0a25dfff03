"""Attention of a ragged batch over the paged KV cache. Causality goes by slot order, never by position.

`GatherAttention`: each row's slots, in order, become one key and value sequence (a view where they are one run), then SDPA or,
on a CPU, what is faster there.
`TableAttention`: one new token a row and all shapes fixed, for steps that are captured once and replayed.
Only filled slots are ever read, so junk in recycled pages cannot matter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn.attention.bias import causal_lower_right

from .block_attention import block_triangle, causal_in_blocks, worth_blocks
from .kv_storage import Store, as_run, mixed_as, read_mixed, write

SHARED_FROM = 64  # slots that rows must have in common to be read once for all
APART_FROM = 256  # new tokens of a row from which its past is attended apart, on a CPU
SPLIT_FROM = 2048  # slots of a decoding row from which it is attended in halves
ROWS_AT_ONCE = 4096  # slots of decoding rows that are copied together: they stay in cache until they are attended


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

    keys, values: the pool's, per layer. shared: so many leading slots all rows have in common. On a CPU, where each row has one new token,
    those are read once for all rows, and joined by log-sum-exp with the rest, of which several rows are attended at once: the same but for
    rounding.
    """

    def __init__(self, keys: list[Store], values: list[Store], rows: list[AttentionRow], shared: int = 0):
        self.keys, self.values, self.rows = keys, values, rows
        self.write_slots = torch.cat([row.slots[row.past : row.past + row.count] for row in rows])
        self.on_cpu = self.write_slots.device.type == "cpu"
        self.masks: list[Tensor | None] | None = None  # made when the dtype of the scores is known
        self.groups: list[_Group] = []
        alone = len(rows) == 1
        if self.on_cpu and all(row.count == 1 and row.reweight is None for row in rows) and (not alone or rows[0].past + 1 >= SPLIT_FROM):
            shared = 0 if alone or shared < SHARED_FROM else shared
            self.groups = list(_groups([row.slots[shared : row.past + 1] for row in rows]))
            self.common = as_run(rows[0].slots[:shared]) if shared else None

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [T, heads, head_dim]; k, v [T, kv_heads, head_dim], rotated already -> [T, heads, head_dim]."""
        write(self.keys[layer], self.write_slots, k)
        write(self.values[layer], self.write_slots, v)
        mixed = mixed_as(self.keys[layer], q)  # mixed ones stay in fp32: rounding them to bf16 costs as much as 8 bits do
        out = self._attend_rows(layer, mixed) if self.groups else self._attend_each(layer, mixed)
        return mixed_as(self.values[layer], out).to(q.dtype)

    def _attend_each(self, layer: int, q: Tensor) -> Tensor:
        """q [T, heads, head_dim], mixed as the keys are -> the same shape, mixed as the values are."""
        if self.masks is None:
            self.masks = [self._mask(row, q) for row in self.rows]
        outputs, start = [], 0
        for row, mask in zip(self.rows, self.masks):
            length, first = row.past + row.count, row.first_slot
            slots = row.slots[:length] if first is None else slice(first, first + length)
            wide = q.dtype if row.reweight is None else torch.float32
            keys, values = read_mixed(self.keys[layer], slots, wide), read_mixed(self.values[layer], slots, wide)
            outputs.append(self._attend(q[start : start + row.count], keys, values, row, mask))
            start += row.count
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _attend_rows(self, layer: int, q: Tensor) -> Tensor:
        """As `_attend_each`, of rows with one new token each."""
        keys, values = self.keys[layer], self.values[layer]
        grouped = q.unflatten(1, (keys.shape[2], -1))
        own = [_attend_group(grouped[at.first : at.last], keys, values, at) for at in self.groups]
        own, own_sum = own[0] if len(own) == 1 else map(torch.cat, zip(*own))
        if self.common is None:
            return own.flatten(1, 2)
        rows, kv_heads, group, dim = grouped.shape
        together = grouped.transpose(0, 1).reshape(1, kv_heads, rows * group, dim)
        found = _attend_run(together, keys, values, self.common)
        common, common_sum = (x.view(kv_heads, rows, group, -1).transpose(0, 1) for x in found)
        weight = torch.sigmoid(own_sum[..., None] - common_sum)  # fp32 or wider
        return torch.lerp(common.to(weight.dtype), own.to(weight.dtype), weight).flatten(1, 2)

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor, row: AttentionRow, mask: Tensor | None) -> Tensor:
        """keys, values: those of the row, [past + count, kv_heads, head_dim]; q and keys mixed alike."""
        if row.reweight is not None:
            return _reweighted(q, keys, values, row.reweight, mask)
        keys, values = keys.transpose(0, 1)[None], values.transpose(0, 1)[None]
        if row.count == 1:  # the heads of a KV head as its queries: the same sums, several times faster on CPU than with enable_gqa
            return F.scaled_dot_product_attention(q.view(1, keys.shape[1], -1, q.shape[-1]), keys, values).view(q.shape)
        heads = q.transpose(0, 1)[None]
        if self._blocks(row, q.dtype):
            return causal_in_blocks(q, keys[0], values[0], mask)
        if self._apart(row):
            return _behind_past(heads, keys, values, row.past)[0].transpose(0, 1)
        if not self.on_cpu:
            return causal_behind(heads, keys, values)[0].transpose(0, 1)
        if mask is not None:
            out = F.scaled_dot_product_attention(heads.reshape(1, keys.shape[1], -1, q.shape[-1]), keys, values, mask)
            return out.view(heads.shape)[0].transpose(0, 1)
        return F.scaled_dot_product_attention(heads, keys, values, is_causal=True, enable_gqa=True)[0].transpose(0, 1)

    def _mask(self, row: AttentionRow, q: Tensor) -> Tensor | None:
        """What `_attend` needs for a row, whose queries are like q [any, heads, head_dim]."""
        group = q.shape[1] // self.keys[0].shape[2]
        if self._blocks(row, q.dtype):
            return block_triangle(row.past, row.count, group, q.dtype)
        if self._apart(row) or not self.on_cpu and row.reweight is None:
            return None
        mask = causal_mask(row)
        if mask is None or row.reweight is not None:
            return mask
        added = torch.zeros(mask.shape, dtype=q.dtype).masked_fill_(~mask, -torch.inf)  # as SDPA would make it anew in each layer
        return added.repeat(group, 1)

    def _blocks(self, row: AttentionRow, dtype: torch.dtype) -> bool:
        return self.on_cpu and row.reweight is None and worth_blocks(row.past, row.count, dtype)

    def _apart(self, row: AttentionRow) -> bool:
        """Whether many new tokens attend to what is cached and to themselves apart: a mask would have all of its blocks computed."""
        return self.on_cpu and row.past > 0 and row.count >= APART_FROM and row.reweight is None


def _behind_past(q: Tensor, keys: Tensor, values: Tensor, past: int) -> Tensor:
    """q [1, heads, n, head_dim] over `past` keys without a mask and causally over the n behind them, joined by log-sum-exp."""
    flash, kv_heads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu, keys.shape[1]
    first, first_sum = flash(q.reshape(1, kv_heads, -1, q.shape[-1]), keys[:, :, :past], values[:, :, :past])
    second, second_sum = flash(q, keys[:, :, past:], values[:, :, past:], 0.0, True)
    weight = torch.sigmoid(second_sum - first_sum.reshape(second_sum.shape))[..., None]  # fp32 or wider
    return torch.lerp(first.reshape(q.shape).to(weight.dtype), second.to(weight.dtype), weight).to(q.dtype)


def causal_behind(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """q [1, heads, n, head_dim], the last n of the keys its own, causally over keys and values [1, kv_heads, past + n, head_dim]. For CUDA.

    There SDPA leaves its fast kernels where it is given a mask or fewer KV heads than heads (PyTorch 2.13, sdp_utils): flash attention
    itself takes fewer KV heads, and is causal from the lower right corner; others get a bias that says so, and a KV head for each head.
    """
    asked = SDPAParams(q, keys, values, None, 0.0, False, True)
    if q.is_cuda and q.shape[-1] % 8 == 0 and can_use_flash_attention(asked):
        return torch.ops.aten._scaled_dot_product_flash_attention(q, keys, values, 0.0, True)[0]
    keys, values = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (keys, values))
    return F.scaled_dot_product_attention(q, keys, values, causal_lower_right(q.shape[2], keys.shape[2]))


class _Group(NamedTuple):
    """Decoding rows `first` to `last` that are attended at once. slots [rows * width], or the run of one row; mask fp32 [rows, 1, 1, width].

    halves: it is one row, in two halves: two threads share three KV heads badly, and SDPA takes long keys more slowly than short ones.
    """

    first: int
    last: int
    slots: Tensor | slice
    mask: Tensor | None
    halves: bool = False


def _groups(rows: Sequence[Tensor]) -> Iterator[_Group]:
    """Rows of about the same number of slots together, as many as stay in cache."""
    first = 0
    while first < len(rows):
        last, width, filled = first + 1, len(rows[first]), len(rows[first])
        while last < len(rows):
            wider, more, count = max(width, len(rows[last])), filled + len(rows[last]), last + 1 - first
            if wider * count > 1.5 * more or count > 2 and wider * count > ROWS_AT_ONCE:
                break
            last, width, filled = last + 1, wider, more
        halves = last == first + 1 and width >= SPLIT_FROM
        if last == first + 1 and not halves:
            yield _Group(first, last, as_run(rows[first]), None)
        else:
            yield _Group(first, last, *_padded(rows[first].chunk(2) if halves else rows[first:last]), halves)
        first = last


def _padded(rows: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
    """The slots of all rows, filled up to the longest, and what hides the filling."""
    lengths = torch.tensor([len(row) for row in rows])
    width = int(lengths.max())
    if bool((lengths == width).all()):
        return torch.cat(list(rows)), None
    slots = torch.cat([torch.cat((row, row[:1].expand(width - len(row)))) for row in rows])
    mask = torch.zeros(len(rows), width).masked_fill_(torch.arange(width) >= lengths[:, None], -torch.inf)
    return slots, mask[:, None, None]


def _attend_group(q: Tensor, keys: Store, values: Store, group: _Group) -> tuple[Tensor, Tensor]:
    """q [rows of the group, kv_heads, n, head_dim] -> as `_attend_run`."""
    if not group.halves:
        return _attend_run(q, keys, values, group.slots, group.mask)
    out, sums = _attend_run(q.expand(2, -1, -1, -1), keys, values, group.slots, group.mask)
    return (out * sums.softmax(0)[..., None]).sum(0, keepdim=True), sums.logsumexp(0, keepdim=True)


def _attend_run(q: Tensor, keys: Store, values: Store, slots: Tensor | slice, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """q [rows, kv_heads, n, head_dim], each over its part of the slots -> the same shape, and log-sum-exp of the scores [rows, kv_heads, n]."""
    k, v = read_mixed(keys, slots, q.dtype), read_mixed(values, slots, q.dtype)
    k, v = (x.unflatten(0, (len(q), -1)).transpose(1, 2) for x in (k, v))
    mask = mask if mask is None else mask.to(q.dtype)  # torch 2.13 takes an fp32 mask beside fp64 queries, and is wrong
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=mask)


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
    mixed = mixed_as(keys, q)
    old = (read_mixed(store, slots, mixed.dtype).unflatten(0, (len(q), -1)).transpose(1, 2) for store in (keys, values))
    grouped = mixed.unflatten(1, (k.shape[1], -1))  # keys and values [rows, kv_heads, width, head_dim]
    return mixed_as(values, F.scaled_dot_product_attention(grouped, *old, attn_mask=mask).flatten(1, 2)).to(q.dtype)


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
