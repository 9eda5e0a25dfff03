"""Decode steps through compiled decoder layers: Inductor makes kernels of one layer, and all layers of its kind share them.

A layer is compiled, not the whole step, because that takes seconds instead of minutes and serves every set of weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from .attention import attend_table, table_inputs
from .compiling import new_form, require_compiler
from .kv_cache import KVPool
from .kv_storage import Store
from .model import DecoderLayer, Model

LARGEST = 8192  # slots of a whole table on a CPU: a compiled step copies what it attends, and from there on that costs more than it saves
WIDTH = 256  # slots of a row are rounded up to a multiple of this
Compiled = Callable[..., Tensor]


class CompiledLayers:
    """The compiled forms of an engine's decoder layers.

    dynamic: one form serves all numbers of rows from two on and all widths, as a CPU's kernels do well; else each has its own.
    """

    def __init__(self, dynamic: bool):
        self.dynamic = dynamic
        self._forms: dict[tuple, Compiled] = {}
        self._kinds: WeakKeyDictionary[nn.Module, tuple] = WeakKeyDictionary()

    @torch.no_grad()
    def step(
        self, model: Model, keys: list[Store], values: list[Store], tokens: Tensor, positions: Tensor, lengths: Tensor, table: Tensor
    ) -> Tensor:
        """One token a row through the model and into the cache -> fp32 logits [rows, vocab]. Arguments as in `attention.table_inputs`."""
        inputs = table_inputs(table, lengths)
        cos, sin = model.rope.tables(positions)
        x = model.model.embed_tokens(tokens)
        for layer, k, v in zip(model.model.layers, keys, values):
            x = self._form(layer, table.shape)(layer, x, cos, sin, k, v, *inputs)
        return model.logits(model.model.norm(x))

    def _form(self, layer: DecoderLayer, shape: Sequence[int]) -> Compiled:
        if layer not in self._kinds:
            self._kinds[layer] = _kind(layer)
        key = (self._kinds[layer], shape[0] > 1 if self.dynamic else tuple(shape))
        if key not in self._forms:
            rows = "one row" if shape[0] == 1 else "several rows"
            self._forms[key] = new_form(_layer, f"a decoder layer for {rows}", self.dynamic)
        return self._forms[key]


class CompiledSteps:
    """Decode steps of an engine on a CPU. MinipsError where there is no C++ compiler."""

    ahead = False  # tokens are chosen by the host

    def __init__(self, pool: KVPool):
        require_compiler()
        self.pool, self._layers, self._tables = pool, CompiledLayers(dynamic=True), Tables(pool.device)
        self.compiled_steps = self.eager_steps = 0

    def compile_ahead(self, model: Model) -> None:
        """Compile now what steps of one row and of several need of this model; the null page is written to."""
        for rows in (2, 1):
            zeros = torch.zeros(rows, dtype=torch.int64)
            table = torch.zeros(rows, WIDTH, dtype=torch.int64)
            self._layers.step(model, self.pool.keys, self.pool.values, zeros, zeros.clone(), torch.ones_like(zeros), table)

    def stats(self) -> dict[str, int]:
        return {"compiled_steps": self.compiled_steps, "eager_steps": self.eager_steps}

    def step(
        self, model: Model, tokens: Tensor, positions: Sequence[int], lengths: Sequence[int], slots: Sequence[Tensor], plain: bool = True
    ) -> Tensor | None:
        """As `cuda_graph.DecodeGraphs.step`."""
        width = -(-max(lengths) // WIDTH) * WIDTH
        if not plain or model.debug or len(lengths) * width > LARGEST:
            self.eager_steps += 1
            return None
        self.compiled_steps += 1
        table = self._tables.of(slots, len(lengths), width)
        return self._layers.step(model, self.pool.keys, self.pool.values, tokens, torch.tensor(positions), torch.tensor(lengths), table)


class Tables:
    """The slots of a batch's rows as one tensor, made anew where the rows or its shape are not those of the step before."""

    def __init__(self, device: torch.device):
        self._device, self._slots, self._table = device, [], torch.empty(0, 0)

    def of(self, slots: Sequence[Tensor], rows: int, width: int) -> Tensor:
        """slots: of each row; -> int64 [rows, width], 0 (the null page) in rows and places that have none."""
        known = self._slots
        if self._table.shape != (rows, width) or len(known) != len(slots) or any(a is not b for a, b in zip(known, slots)):
            self._table = torch.zeros(rows, width, dtype=torch.int64, device=self._device)
            for row, own in zip(self._table, slots):
                row[: len(own)] = own[:width]
            self._slots = list(slots)
        return self._table


def _kind(layer: DecoderLayer) -> tuple:
    """What kernels depend on besides shapes: the form of every matrix, and which of them have a bias."""
    attention, mlp = layer.self_attn, layer.mlp
    matrices = [attention.fused, attention.o_proj, mlp.fused, mlp.down_proj]
    matrices = [getattr(matrix, "matrix", matrix) for matrix in matrices]
    return tuple((type(m).__name__, m.bias is not None, type(getattr(m, "beside", None)).__name__) for m in matrices)


def _layer(
    layer: DecoderLayer, x: Tensor, cos: Tensor, sin: Tensor, keys: Store, values: Store, write_slots: Tensor, slots: Tensor, mask: Tensor
) -> Tensor:
    return layer(x, cos, sin, 0, lambda _, q, k, v: attend_table(keys, values, write_slots, slots, mask, q, k, v))
