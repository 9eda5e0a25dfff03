"""The training loss of a ragged batch: u and target behind mapped branches, cross-entropy over the target's tokens alone.

Branches are encoded by the engine without gradient. What the merge would do in place (move, map) is done here on copies, layer
by layer and differentiably, so gradients reach the mapper through the mapped K/V.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..config import MergeOptions
from ..engine import Engine
from ..errors import MinipsError, RoomError
from ..kv_cache import Branch, KVPool
from ..kv_storage import read
from ..mapper import CacheMapper, Coefficients, joined
from ..merge import Plan, plan_merge
from ..pieces import KeyMove
from ..rope import Rope, apply_rope
from .network import Network

LOGIT_CHUNK = 64  # target positions whose logits are held at a time; they are computed anew in the backward pass


@dataclass(frozen=True)
class Item:
    """One example: open branches (none: u alone is read), prompt ids u and target ids (with the end token that is to be learnt)."""

    branches: Sequence[Branch]
    prompt: list[int]
    target: list[int]


class MergedCaches:
    """K and V that the items' prompts attend to, per layer, differentiable in the mapper: of each item the kept prefix, then its branches.

    All items are read, moved and mapped at once. plans: one an item; None: it has no branches, and attends to nothing.
    """

    def __init__(self, plans: Sequence[Plan | None], pool: KVPool, rope: Rope, mapper: CacheMapper | None):
        self.pool, self.mapper = pool, mapper
        none = torch.empty(0, dtype=torch.int64, device=pool.device)
        prefixes = [[pool.slots(s.pages, s.length) for s in plan.prefix] if plan is not None else [] for plan in plans]
        self.prefix = torch.cat([none, *chain.from_iterable(prefixes)])
        self.prefix_lengths = [sum(map(len, parts)) for parts in prefixes]
        tokens, before, coefficients = [], 0, []
        for plan in filter(None, plans):
            tokens.append(_tokens(plan, pool, before))
            before += len(plan.pieces)
            coefficients.append(mapper.coefficients(plan.spans) if mapper is not None else None)
        kept = iter(tokens)
        self.kept_lengths = [len(next(kept)[0]) if plan is not None else 0 for plan in plans]
        self.lengths = list(map(sum, zip(self.prefix_lengths, self.kept_lengths)))
        self.slots, positions, deltas, self.whose = map(torch.cat, zip(*tokens)) if tokens else (none,) * 4
        self.coefficients = joined(coefficients)
        self.normalized = [plan.branch_tokens for plan in plans if plan is not None] if _normalizes(mapper) else []
        self.move = KeyMove(rope.tables, positions, deltas, self._keys if mapper is not None else None, mapper is not None and mapper.bare)

    def _keys(self, layer: int, keys: Tensor) -> Tensor:
        return self.mapper.map("key", layer, keys, self.coefficients, self.whose)

    def _statistics(self, keys: Tensor, values: Tensor) -> Coefficients:
        """Of one layer, as `Transform` has them of all: each item's branches are brought to the mean over them. keys: without rotation."""
        found = []
        for branches in zip(*(x.split(list(map(sum, self.normalized))) for x in (keys, values))):
            counts = self.normalized[len(found)]
            both = [[torch.stack((part.mean(0), part.var(0, correction=0))) for part in x.split(counts)] for x in branches]
            keys_and_values = (torch.stack(parts, 1)[:, :, None] for parts in both)  # [2, branches, 1, kv_heads, head_dim]
            found.append(self.mapper.from_statistics(*keys_and_values, counts))
        return joined(found)

    def read(self, layer: int, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
        """K and V [length, kv_heads, head_dim] of every item."""
        keys, values = self.pool.keys[layer], self.pool.values[layer]
        moved, mapped = (read(store, self.slots, torch.float32) for store in (keys, values))
        if self.normalized:
            self.coefficients, layer = self._statistics(apply_rope(moved, *self.move.turn), mapped), 0
        moved = self.move(layer, moved)
        if self.mapper is not None:
            mapped = self.mapper.map("value", layer, mapped, self.coefficients, self.whose)
        parts = []
        for store, ours in ((keys, moved), (values, mapped)):
            before, ours = read(store, self.prefix, dtype).split(self.prefix_lengths), ours.to(dtype).split(self.kept_lengths)
            parts.append([torch.cat(pair) for pair in zip(before, ours)])
        return list(zip(*parts))


def batch_loss(
    network: Network, items: Sequence[Item], options: MergeOptions, *, weighting: str = "token", layer_checkpoints: bool = False
) -> tuple[Tensor, int]:
    """Mean cross-entropy in nats over the target tokens of the batch, and the weight that it has. MinipsError where an item does not fit.

    weighting: token, the mean over all tokens (weight: their number); or example, the mean over the items of each one's mean (weight:
    their number), so that long targets do not drown short ones.
    """
    engine, model = network.engine, network.model
    limit = engine.config.max_position_embeddings
    ids, positions, counts, labelled, labels, shares = [], [], [], [], [], []
    engine.pool.require(0, "a training batch", [s for item in items for branch in item.branches for s in branch.segments])
    plans = [plan_merge(item.branches, options, limit, lossy=False) if item.branches else None for item in items]
    for item, plan in zip(items, plans):
        if not item.prompt or not item.target:
            raise MinipsError("training: an item has no prompt or no target tokens")
        first = plan.next_position if plan is not None else 0
        fed = [*item.prompt, *item.target[:-1]]
        engine.check_positions(first, len(fed), "prompt and target")
        labelled += range(len(ids) + len(item.prompt) - 1, len(ids) + len(fed))
        labels += item.target
        shares += [1.0 if weighting == "token" else 1 / len(item.target)] * len(item.target)
        ids += fed
        positions += range(first, first + len(fed))
        counts.append(len(fed))
    device = engine.device
    attend = _Attend(MergedCaches(plans, engine.pool, model.rope, network.mapper), counts, engine.dtype)
    hidden = _forward(model, torch.tensor(ids, device=device), torch.tensor(positions, device=device), attend, layer_checkpoints)
    hidden, wanted = hidden[torch.tensor(labelled, device=device)], torch.tensor(labels, device=device)
    total, weights = hidden.new_zeros((), dtype=torch.float32), torch.tensor(shares, device=device)
    for first in range(0, len(wanted), LOGIT_CHUNK):
        part = slice(first, first + LOGIT_CHUNK)
        total = total + checkpoint(
            _summed, model.lm_head, hidden[part], wanted[part], weights[part], engine.valid_vocab, use_reentrant=False
        )
    weight = len(wanted) if weighting == "token" else len(items)
    return total / weight, weight


def check_room(engine: Engine, item: Item, options: MergeOptions, most: int) -> None:
    """RoomError where an item has more than `most` tokens in all, or does not fit the model's positions."""
    limit, fed = engine.config.max_position_embeddings, len(item.prompt) + len(item.target)
    plan = plan_merge(item.branches, options, limit, lossy=False) if item.branches else None
    engine.check_positions(plan.next_position if plan is not None else 0, fed, "prompt and target")
    tokens = fed + sum(branch.num_tokens for branch in item.branches)
    if tokens > most:
        raise RoomError(f"training: a row has {tokens} tokens, most_tokens is {most}")


def _normalizes(mapper: CacheMapper | None) -> bool:
    return mapper is not None and mapper.config.kind == "normalize"


def _forward(model, ids: Tensor, positions: Tensor, attend: _Attend, layer_checkpoints: bool) -> Tensor:
    """The model's forward pass; with layer_checkpoints activations of a layer are computed anew in the backward pass."""
    if not layer_checkpoints:
        return model(ids, positions, attend)
    cos, sin = model.rope.tables(positions)
    x = model.model.embed_tokens(ids)
    for index, layer in enumerate(model.model.layers):
        x = checkpoint(layer, x, cos, sin, index, attend, use_reentrant=False)
    return model.model.norm(x)


def _summed(head: torch.nn.Module, hidden: Tensor, wanted: Tensor, weights: Tensor, valid_vocab: int) -> Tensor:
    """Among the ids that the engine can choose, as it scores them."""
    return (F.cross_entropy(head(hidden).float()[:, :valid_vocab], wanted, reduction="none") * weights).sum()


def _tokens(plan: Plan, pool: KVPool, before: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Slot, new position, delta and branch (counted on from `before`) of every kept token, int64 [n]."""
    slots, positions, deltas, whose = [], [], [], []
    for branch, pieces in enumerate(plan.pieces, before):
        for piece in pieces:
            slots.append(pool.slots(piece.segment.pages, piece.first + piece.length)[piece.first :])
            positions.append(torch.arange(piece.start, piece.start + piece.length))
            deltas.append(torch.full((piece.length,), piece.delta))
            whose.append(torch.full((piece.length,), branch))
    return tuple(torch.cat(parts).to(pool.device) for parts in (slots, positions, deltas, whose))


class _Attend:
    """Attention of packed rows of `counts` new tokens, each over its own merged cache (nothing, where that is empty) and causally over itself."""

    def __init__(self, caches: MergedCaches, counts: Sequence[int], dtype: torch.dtype):
        self.caches, self.counts, self.masks = caches, counts, []
        for past, count in zip(caches.lengths, counts):
            seen = torch.ones(count, past + count, dtype=torch.bool, device=caches.slots.device).tril(past)
            self.masks.append(torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -torch.inf) if past else None)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        olds = self.caches.read(layer, q.dtype) if any(self.caches.lengths) else [None] * len(self.counts)
        outputs = []
        for row, keys, values, old, mask in zip(*(x.split(self.counts) for x in (q, k, v)), olds, self.masks):
            if mask is None:
                row, keys, values = (x.transpose(0, 1)[None] for x in (row, keys, values))
                out = F.scaled_dot_product_attention(row, keys, values, is_causal=True, enable_gqa=True)[0]
            else:  # the heads of a KV head as its queries: the same sums, and nothing is repeated
                keys, values = (torch.cat(pair).transpose(0, 1)[None] for pair in zip(old, (keys, values)))
                grouped = row.transpose(0, 1).reshape(1, keys.shape[1], -1, row.shape[-1])
                group = row.shape[1] // keys.shape[1]
                out = F.scaled_dot_product_attention(grouped, keys, values, mask.repeat(group, 1)).view(row.shape[1], *row.shape[::2])
            outputs.append(out.transpose(0, 1))
        return torch.cat(outputs)
