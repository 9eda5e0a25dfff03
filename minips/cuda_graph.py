"""Decode steps captured once and replayed: one CUDA graph per weight set, number of rows and width of the slot table.

Rows and width are rounded up to buckets, so that few graphs serve every batch and length. What a step reads stands in static
tensors that are all written anew before each replay: two streams that take turns share a graph. Padding rows read and write the
null page alone. Nothing here waits for the device: tokens are chosen on it, and the host reads them a step late.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor

from .attention import TableAttention
from .compiled import CompiledLayers, Tables
from .config import SamplingParams
from .errors import in_one_line
from .kv_cache import KVPool
from .kv_storage import Store
from .model import Model
from .sampling import RowSampler

ROWS = (1, 2, 4, 8, 16, 32)
NARROWEST = 256  # slots of a row; wider tables are powers of two and three quarters of them
LARGEST = 1 << 19  # slots of a whole table: what a step of them gathers, 2 GiB a layer of Llama-3.1-8B, is there once for all graphs
_CAPTURING = threading.Lock()  # CUDA has one capture at a time in a process
_SHORT = 1 - 1e-6  # of a min_p threshold, as in `sampling`


@dataclass(frozen=True)
class Inputs:
    """The static tensors of one graph. tokens, positions, lengths (the new token counted): int64 [rows]; table: int64 [rows, width]."""

    tokens: Tensor
    positions: Tensor
    lengths: Tensor
    table: Tensor

    @classmethod
    def padding(cls, rows: int, width: int, device: torch.device) -> Inputs:
        """Rows of one token each, on the null page."""
        tokens, positions = (torch.zeros(rows, dtype=torch.int64, device=device) for _ in range(2))
        return cls(tokens, positions, torch.ones_like(tokens), torch.zeros(rows, width, dtype=torch.int64, device=device))

    def fill(self, tokens: Tensor, positions: Tensor, lengths: Tensor, table: Tensor) -> None:
        """Overwrite all of them; rows from len(tokens) on become padding. AssertionError where the shapes do not fit."""
        count = len(tokens)
        assert positions.shape == lengths.shape == (count,) and count <= len(self.tokens), "a step and its graph differ in their rows"
        assert table.shape == self.table.shape, "a step and its graph differ in their tables"
        for static, value, rest in ((self.tokens, tokens, 0), (self.positions, positions, 0), (self.lengths, lengths, 1)):
            static[:count].copy_(value, non_blocking=True)
            static[count:].fill_(rest)
        self.table.copy_(table)


Replay = Callable[[], None]
Capture = Callable[[Callable[[], Tensor], Inputs], tuple[Replay, Tensor]]


class CudaCapture:
    """Captures a step as a CUDA graph. All captures share one private memory pool: they are replayed one after the other."""

    def __init__(self, device: torch.device):
        self.device, self.stream, self.memory = device, torch.cuda.Stream(device), torch.cuda.graph_pool_handle()

    def __call__(self, step: Callable[[], Tensor], inputs: Inputs) -> tuple[Replay, Tensor]:
        """-> what replays the step on whatever `inputs` hold by then, and the tensor that its result is written to each time."""
        with _CAPTURING, torch.cuda.device(self.device), torch.cuda.stream(torch.cuda.current_stream(self.device)):  # the last: a failed capture
            self.stream.wait_stream(torch.cuda.current_stream())  # leaves its own stream behind as the current one
            with torch.cuda.stream(self.stream):
                for _ in range(2):  # libraries set themselves up in their first calls, which cannot be captured
                    step()
            torch.cuda.current_stream().wait_stream(self.stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self.memory, stream=self.stream, capture_error_mode="thread_local"):
                result = step()
        return graph.replay, result


class DecodeGraphs:
    """The captured steps of one engine; those of a weight set are freed with its model.

    captures, replays, eager_steps: counted, so that it can be told which way a call went. compile: with compiled layers inside.
    A step that cannot be captured is warned of once; from then on all steps are eager.
    """

    ahead = True  # tokens are chosen on the device

    def __init__(self, pool: KVPool, capture: Capture | None = None, *, compile: bool = False):
        self.pool = pool
        self._capture = capture or CudaCapture(pool.device)
        self._step = CompiledLayers(dynamic=False).step if compile else _step
        self._graphs: WeakKeyDictionary[Model, dict[tuple[int, int], tuple[Inputs, Replay, Tensor]]] = WeakKeyDictionary()
        self._tables = Tables(pool.device)
        self._failed = False
        self.captures = self.replays = self.eager_steps = 0

    def stats(self) -> dict[str, int]:
        return {"graph_captures": self.captures, "graph_replays": self.replays, "graph_eager_steps": self.eager_steps}

    def bucket(self, lengths: Sequence[int]) -> tuple[int, int] | None:
        """Rows and width of the graph for rows of these lengths; None where none is that large."""
        rows = next((rows for rows in ROWS if rows >= len(lengths)), None)
        width = max(NARROWEST, 1 << (max(lengths) - 1).bit_length())
        if max(lengths) <= width * 3 // 4 >= NARROWEST:
            width = width * 3 // 4
        return None if rows is None or rows * width > LARGEST else (rows, width)

    def ready(self, model: Model, lengths: Sequence[int], plain: bool = True) -> bool:
        """Whether a step of rows of these lengths (as in `step`) would start at once: without being captured first."""
        bucket = self._bucket_of(model, lengths) if plain else None
        return bucket is None or bucket in self._graphs.get(model, ())

    def _bucket_of(self, model: Model, lengths: Sequence[int]) -> tuple[int, int] | None:
        return None if model.debug or self._failed else self.bucket(lengths)

    @torch.no_grad()
    def step(
        self, model: Model, tokens: Tensor, positions: Sequence[int], lengths: Sequence[int], slots: Sequence[Tensor], plain: bool = True
    ) -> Tensor | None:
        """Feed one token a row and write its K/V -> fp32 logits [n, vocab], the caller's own; None where no graph covers the step.

        tokens: int64 [n], on the device. lengths: of each row, the new token counted. slots: of each row, of at least that many
        tokens; the same tensors from step to step as long as the rows are the same. plain: no row reweighs its attention.
        """
        bucket = self._bucket_of(model, lengths) if plain else None
        graphs = self._graphs.setdefault(model, {})
        if bucket is not None and bucket not in graphs and (made := self._captured(model, *bucket)) is not None:
            graphs[bucket] = made
        if bucket not in graphs:
            self.eager_steps += 1
            return None
        inputs, replay, logits = graphs[bucket]
        table = self._tables.of(slots, *bucket)
        inputs.fill(tokens, *to_device([list(positions), list(lengths)], self.pool.device), table)
        replay()
        self.replays += 1
        return logits[: len(tokens)].clone()  # the next replay overwrites them

    def _captured(self, model: Model, rows: int, width: int) -> tuple[Inputs, Replay, Tensor] | None:
        try:
            with torch.inference_mode(False), torch.no_grad():  # tensors of that mode could not be written outside of it
                inputs = Inputs.padding(rows, width, self.pool.device)
                step = partial(_run, self._step, ref(model), self.pool.keys, self.pool.values, inputs)
                replay, logits = self._capture(step, inputs)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self._failed = True
            warnings.warn(f"decoding goes on without CUDA graphs, for a step cannot be captured ({in_one_line(error)[:300]})", stacklevel=2)
            return None
        self.captures += 1
        return inputs, replay, logits

    @torch.no_grad()
    def choose(self, logits: Tensor, rows: Sequence[RowSampler]) -> Chosen:
        """One token a row from fp32 logits [n, vocab], as `sampling.sample` would choose it (without repetition penalties)."""
        logits = logits[:, : rows[0].valid_vocab]
        peaks, tokens = logits.max(-1)
        drawn = [at for at, row in enumerate(rows) if not row.params.greedy]
        if drawn:
            numbers = [[*_numbers(rows[at].params, logits.shape[1]), rows[at].uniform()] for at in drawn]
            at = to_device(drawn, logits.device)
            ordered = any(number[1] < logits.shape[1] or number[2] < 1 for number in numbers)
            picked = draw(logits[at], to_device(numbers, logits.device, torch.float64), ordered)
            tokens = tokens.index_copy(0, at, picked)
        return Chosen(tokens, peaks)

    def select(self, tokens: Tensor, places: Sequence[int]) -> Tensor:
        """tokens[places], without waiting."""
        if list(places) == list(range(len(tokens))):
            return tokens
        return tokens.index_select(0, to_device(list(places), tokens.device))


class Chosen:
    """Tokens int64 [n] that the device is choosing, and the largest logit of each row, on their way to the host."""

    def __init__(self, tokens: Tensor, peaks: Tensor):
        self.tokens = tokens
        both = torch.stack((tokens.double(), peaks.double()))
        self._done = None
        if both.is_cuda:
            with torch.cuda.device(both.device):  # an event is of the current device, which need not be the engine's
                self._host = torch.empty(both.shape, dtype=both.dtype, device="cpu", pin_memory=True).copy_(both, non_blocking=True)
                self._done = torch.cuda.Event()
                self._done.record()
        else:
            self._host = both

    def wait(self) -> tuple[list[int], list[float]]:
        """Tokens and peaks, when the device has got so far; steps that were started later go on meanwhile."""
        if self._done is not None:
            self._done.synchronize()
        tokens, peaks = self._host.tolist()
        return [int(token) for token in tokens], peaks


def _step(
    model: Model, keys: list[Store], values: list[Store], tokens: Tensor, positions: Tensor, lengths: Tensor, table: Tensor
) -> Tensor:
    """One token a row through the model and into the cache -> fp32 logits [rows, vocab]."""
    return model.logits(model(tokens, positions, TableAttention(keys, values, table, lengths)))


def _run(step: Callable[..., Tensor], model: ref[Model], keys: list[Store], values: list[Store], inputs: Inputs) -> Tensor:
    """A step that does not keep its model alive."""
    return step(model(), keys, values, inputs.tokens, inputs.positions, inputs.lengths, inputs.table)


def to_device(numbers: list, device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """Without waiting for the device: by way of pinned memory, which is not used again before it has been read."""
    host = torch.tensor(numbers, dtype=dtype, device="cpu")
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


def _numbers(params: SamplingParams, vocab: int) -> tuple[float, int, float, float]:
    """temperature, top_k, top_p and min_p; top_k is vocab where it is off."""
    return params.temperature, params.top_k if 0 < params.top_k < vocab else vocab, params.top_p, params.min_p * _SHORT


def draw(logits: Tensor, numbers: Tensor, ordered: bool) -> Tensor:
    """`sampling._draw` of many rows at once: logits fp32 [n, V], numbers fp64 [n, 5] -> ids int64 [n].

    A row of numbers: temperature, top_k, top_p, min_p, and the uniform number that picks. ordered: some row has a top_k or a top_p; such
    rows go through their tokens by falling probability, the others by id.
    """
    vocab = logits.shape[1]
    temperature, top_k, top_p, min_p, uniform = numbers.T[:, :, None]
    weights = torch.softmax((logits - logits.amax(-1, keepdim=True)) / temperature.float(), -1)
    rank = torch.arange(vocab, device=logits.device).expand_as(weights)
    ids = rank
    floor = min_p.float() * weights.amax(-1, keepdim=True)
    if ordered:
        own = (top_k < vocab) | (top_p < 1)
        falling, order = weights.sort(dim=-1, descending=True, stable=True)
        weights, ids = torch.where(own, falling, weights), torch.where(own, order, rank)
        weights = torch.where(rank < top_k, weights, 0)
        wide = weights.double()
        total = torch.where(top_k < vocab, wide.sum(-1, keepdim=True), 1.0)  # after top_k the rest is renormalised
        inside = (wide.cumsum(-1) - wide < top_p * total - 1e-7) | (top_p >= 1) | (rank == 0)
        weights = torch.where(inside, weights, 0)
    wide = torch.where(weights >= floor, weights, 0).double()
    summed = wide.cumsum(-1)
    at = torch.searchsorted(summed, uniform * summed[:, -1:], right=True)
    last = torch.where(wide > 0, rank, 0).amax(-1, keepdim=True)
    return ids.gather(1, torch.minimum(at, last))[:, 0]
