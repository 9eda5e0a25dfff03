"""The training loss of a ragged batch: u and target behind mapped branches, cross-entropy over the target's tokens alone.

Branches are encoded by the engine without gradient. What the merge would do in place (move, map) is done here on copies, layer
by layer and differentiably, so gradients reach the mapper through the mapped K/V.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..config import MergeOptions
from ..engine import Engine
from ..errors import MinipsError, RoomError
from ..kv_cache import Branch, KVPool
from ..kv_storage import read
from ..mapper import CacheMapper
from ..merge import Plan, plan_merge
from ..rope import Rope
from ..transform import KeyMove
from .network import Network

LOGIT_CHUNK = 64  # target positions whose logits are held at a time; they are computed anew in the backward pass


@dataclass(frozen=True)
class Item:
    """One example: open branches (none: u alone is read), prompt ids u and target ids (with the end token that is to be learnt)."""

    branches: Sequence[Branch]
    prompt: list[int]
    target: list[int]


class MergedCache:
    """K and V that an item's prompt attends to, per layer, differentiable in the mapper: the kept prefix, then the branches."""

    def __init__(self, item: Item, options: MergeOptions, limit: int, rope: Rope, mapper: CacheMapper | None):
        plan = plan_merge(item.branches, options, limit, lossy=False)
        pool = item.branches[0].pool
        self.pool, self.mapper, self.next_position = pool, mapper, plan.next_position
        self.prefix = torch.cat([pool.slots(s.pages, s.length) for s in plan.prefix]) if plan.prefix else None
        self.slots, positions, deltas, self.whose = _tokens(plan, pool)
        self.coefficients = mapper.coefficients(plan.spans) if mapper is not None else None
        self.move = KeyMove(rope, positions, deltas, self.whose, mapper, self.coefficients)
        self.length = len(self.slots) + (len(self.prefix) if self.prefix is not None else 0)

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        """fp32 [length, kv_heads, head_dim] each."""
        keys, values = self.pool.keys[layer], self.pool.values[layer]
        moved = self.move(layer, read(keys, self.slots, torch.float32))
        mapped = read(values, self.slots, torch.float32)
        if self.mapper is not None:
            mapped = self.mapper.map("value", layer, mapped, self.coefficients, self.whose)
        if self.prefix is None:
            return moved, mapped
        return torch.cat((read(keys, self.prefix, torch.float32), moved)), torch.cat((read(values, self.prefix, torch.float32), mapped))


def batch_loss(
    network: Network, items: Sequence[Item], options: MergeOptions, *, weighting: str = "token", layer_checkpoints: bool = False
) -> tuple[Tensor, int]:
    """Mean cross-entropy in nats over the target tokens of the batch, and the weight that it has. MinipsError where an item does not fit.

    weighting: token, the mean over all tokens (weight: their number); or example, the mean over the items of each one's mean (weight:
    their number), so that long targets do not drown short ones.
    """
    engine, model = network.engine, network.model
    limit = engine.config.max_position_embeddings
    rows, ids, positions, labelled, labels, shares = [], [], [], [], [], []
    engine.pool.require(0, "a training batch", [s for item in items for branch in item.branches for s in branch.segments])
    for item in items:
        if not item.prompt or not item.target:
            raise MinipsError("training: an item has no prompt or no target tokens")
        cache = MergedCache(item, options, limit, model.rope, network.mapper) if item.branches else None
        first = cache.next_position if cache is not None else 0
        fed = [*item.prompt, *item.target[:-1]]
        engine.check_positions(first, len(fed), "prompt and target")
        labelled += range(len(ids) + len(item.prompt) - 1, len(ids) + len(fed))
        labels += item.target
        shares += [1.0 if weighting == "token" else 1 / len(item.target)] * len(item.target)
        ids += fed
        positions += range(first, first + len(fed))
        rows.append((cache, len(fed)))
    device = engine.device
    attend = _Attend(rows, device)
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


def _tokens(plan: Plan, pool: KVPool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Slot, new position, delta and branch of every kept token, int64 [n]."""
    slots, positions, deltas, whose = [], [], [], []
    for branch, pieces in enumerate(plan.pieces):
        for piece in pieces:
            slots.append(pool.slots(piece.segment.pages, piece.first + piece.length)[piece.first :])
            positions.append(torch.arange(piece.start, piece.start + piece.length))
            deltas.append(torch.full((piece.length,), piece.delta))
            whose.append(torch.full((piece.length,), branch))
    return tuple(torch.cat(parts).to(pool.device) for parts in (slots, positions, deltas, whose))


class _Attend:
    """Attention of packed rows, each over its own merged cache (None: nothing) and causally over itself."""

    def __init__(self, rows: Sequence[tuple[MergedCache | None, int]], device: torch.device):
        self.rows = rows
        self.masks: list[Tensor | None] = [
            torch.ones(count, cache.length + count, dtype=torch.bool, device=device).tril(cache.length) if cache is not None else None
            for cache, count in rows
        ]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        outputs, start = [], 0
        for (cache, count), mask in zip(self.rows, self.masks):
            keys, values = k[start : start + count], v[start : start + count]
            if cache is not None:
                keys, values = (torch.cat((old.to(q.dtype), new)) for old, new in zip(cache.read(layer), (keys, values)))
            out = F.scaled_dot_product_attention(
                q[start : start + count].transpose(0, 1)[None],
                keys.transpose(0, 1)[None],
                values.transpose(0, 1)[None],
                attn_mask=mask,
                is_causal=mask is None,
                enable_gqa=True,
            )
            outputs.append(out[0].transpose(0, 1))
            start += count
        return torch.cat(outputs)
