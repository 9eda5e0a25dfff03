"""Where the synthesizer looks: the share of attention that u's tokens give to the prefix, to each branch and to u itself, per layer."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..attention import AttentionRow, GatherAttention, attention_scores, causal_mask
from ..decoding import open_writers
from ..engine import Engine
from ..errors import RoomError
from ..kv_storage import Store
from ..synthesis import Context
from .example import Example
from .methods import Setup
from .rows import open_rows
from .runner import Plan
from .tasks import TASKS


class WatchedAttention(GatherAttention):
    """Attends as ever and adds up, for one row, what each part gets: `shares` [layers, parts], means over heads and queries."""

    def __init__(self, keys: list[Store], values: list[Store], row: AttentionRow, bounds: Sequence[int]):
        super().__init__(keys, values, [row])
        self.bounds = list(bounds)  # part i is [bounds[i], bounds[i + 1]), in the order of slots
        self.shares: list[list[float]] = []

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor, row: AttentionRow, mask: Tensor | None) -> Tensor:
        scores = attention_scores(q, keys, causal_mask(row))
        weights = (row.reweight(scores) if row.reweight is not None else scores).softmax(-1).mean((0, 1, 2))
        self.shares.append([float(weights[a:b].sum()) for a, b in zip(self.bounds, self.bounds[1:])])
        return super()._attend(q, keys, values, row, mask)


@torch.no_grad()
def shares(context: Context, ids: list[int]) -> list[list[float]]:
    """Feed prompt ids to a merged context (which stays as it is) -> per layer [prefix, branch 1, ..., branch m, u]."""
    engine, branch = context.owner.engine, context.branch
    bounds = [0, branch.num_cached - sum(context.branch_tokens)]
    for tokens in (*context.branch_tokens, len(ids)):
        bounds.append(bounds[-1] + tokens)
    writers = open_writers([branch], [len(ids)], "context", "the prompt")
    try:
        positions = torch.tensor(list(writers[0].positions(len(ids))), device=engine.device)
        attend = WatchedAttention(engine.pool.keys, engine.pool.values, writers[0].row(len(ids)), bounds)
        context.owner.model(torch.tensor(ids, device=engine.device), positions, attend)
        return attend.shares
    finally:
        for writer in writers:
            writer.abort()


def attention_sweep(
    engine: Engine, plan: Plan, load: Callable[[int], list[Example]], say: Callable[[str], None] = lambda text: None
) -> dict:
    """The shares for each m of the plan, means over rows of its first task, as `attention.json`, by layer.

    load(m) gives the examples; an entry's m is the number of branches that its rows have. entropy: of the branches' shares (made to
    sum to 1), in nats; it is log m where all get the same.
    """
    task = TASKS[plan.tasks[0]]
    setup, sweep = Setup(engine, task, plan.answer_params(task), plan.scoring, plan.adapter), []
    synthesizer = setup.synthesizer(plan.adapter)
    for m in plan.workers:
        found = []
        for example in load(m):
            row = None
            try:
                row = open_rows(engine, task, [example], m, plan.worker_params(task), plan.seed)[0]
                if all(branch.output_ids for branch in row.branches):
                    with synthesizer.merge(row.branches, consume=False) as context:
                        found.append(shares(context, engine.prompts.encode(row.example.prompt, "continuation")))
            except RoomError:  # as in the run of the rows, where its error is kept
                continue
            finally:
                if row is not None:
                    row.close()
        sizes = {len(layers[0]) for layers in found}
        most = [layers for layers in found if len(layers[0]) == max(sizes, default=0)]
        if most and len(most[0][0]) - 2 not in {entry["m"] for entry in sweep}:  # rows may have fewer passages than m
            sweep.append(_entry(torch.tensor(most, dtype=torch.float64)))
        say(f"attention, m = {m}: {len(most)} rows")
    return {"model": plan.model, "adapter": plan.adapter, "task": task.name, "sweep": sweep}


def _entry(found: Tensor) -> dict:
    """found [rows, layers, parts] -> one entry of the sweep."""
    branches = found[..., 1:-1]
    normal = branches / branches.sum(-1, keepdim=True).clamp_min(1e-12)
    entropy = -(normal * normal.clamp_min(1e-12).log()).sum(-1).mean(0)
    means = found.mean(0)
    return {
        "m": branches.shape[-1],
        "rows": len(found),
        "prefix": means[:, 0].tolist(),
        "self": means[:, -1].tolist(),
        "branches": means[:, 1:-1].tolist(),
        "entropy": entropy.tolist(),
        "max_entropy": math.log(branches.shape[-1]),
    }
