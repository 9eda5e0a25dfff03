"""The engine: one model, one page pool, and the calls that make, extend and decode branches."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from .answering import answer, answer_batch, score_ids, work
from .branch_files import load_branches, save_branches
from .chat import ChatFormat, detect_format
from .config import DEFAULT_MODEL, EngineConfig, ModelConfig, SamplingParams
from .compiled import CompiledSteps
from .cuda_graph import DecodeGraphs
from .decoding import DecodeRow, Writer, open_writers, prefill
from .errors import MinipsError, RoomError
from .hub import resolve_model
from .kv_cache import Branch, KVPool, Segment, pool_pages
from .kv_storage import bytes_per_token, resolve_kv_dtype
from .merge_kernels import MergeKernels
from .model import Model
from .opening import open_branches, open_roots
from .prompts import Prompt, Prompts
from .quantize import quantize as quantize_model
from .results import Result, Scores, TextStream
from .sampling import params_for
from .tokenizer import Tokenizer
from .turns import Turns, in_turn
from .weights import fingerprint, load_weights, resolve_device, resolve_dtype

KEPT_POSITIONS = 131072  # whose rotation tables are kept for compiled merges from the start, at most (2 MB for 8192, 64 MB for as many)

OnToken = Callable[[int, int | None, str], None]


class Engine:
    """See CONTRACT.md section 2. Build one with `Engine.from_pretrained`."""

    def __init__(
        self,
        model: Model,
        config: ModelConfig,
        *,
        tokenizer: Tokenizer | None = None,
        chat: ChatFormat | None = None,
        settings: EngineConfig = EngineConfig(),
        folder: Path | None = None,
        cuda_graphs: bool | None = None,
        compile: bool = False,
    ):
        self.model, self.config, self.tokenizer, self.chat = model, config, tokenizer, chat
        self.settings, self.folder = settings, folder
        model.debug = settings.debug
        self.prompts = Prompts(config, tokenizer, chat, folder)
        weight = model.model.embed_tokens.weight
        self.device, self.dtype = weight.device, weight.dtype
        kv_dtype = resolve_kv_dtype(settings.kv_dtype, self.dtype, self.device)
        shape = (settings.page_size, config.num_key_value_heads, config.head_dim)
        self.kv_bytes_per_token = 2 * config.num_hidden_layers * bytes_per_token(kv_dtype, *shape[1:])
        pages = pool_pages(settings, config.max_position_embeddings, self.kv_bytes_per_token, self.device)
        try:
            offload = settings.max_device_kv_bytes is not None
            self.pool = KVPool(config.num_hidden_layers, pages, *shape, kv_dtype, self.device, offload=offload)
        except (RuntimeError, MemoryError, OverflowError, TypeError):
            tokens = (pages - 1) * settings.page_size
            size = tokens * self.kv_bytes_per_token / 2**30
            raise MinipsError(f"KV cache: {tokens} tokens ({size:.4g} GiB) cannot be allocated; lower max_kv_tokens") from None
        on_cuda = self.device.type == "cuda"
        if cuda_graphs and not on_cuda:
            raise MinipsError(f"cuda_graphs: decode steps are captured on CUDA only, this engine runs on {self.device}; leave it off")
        if compile and on_cuda and cuda_graphs is False:
            raise MinipsError("compile: on CUDA, compiled layers run inside of graphs; leave cuda_graphs on")
        self.graphs: DecodeGraphs | CompiledSteps | None = None
        if on_cuda and cuda_graphs is not False:
            self.graphs = DecodeGraphs(self.pool, compile=compile)
        elif compile:
            self.graphs = CompiledSteps(self.pool)
        self.merge_kernels: MergeKernels | None = None
        if compile and not on_cuda:
            self.merge_kernels = MergeKernels(config.num_hidden_layers)
            model.rope.kept(0, min(config.max_position_embeddings, KEPT_POSITIONS))  # now, not in the first merge
        self.valid_vocab = min(config.vocab_size, tokenizer.vocab_size) if tokenizer is not None else config.vocab_size
        self.stop_ids = frozenset(tokenizer.eos_token_ids if tokenizer is not None else config.eos_token_ids)
        self.counters = dict.fromkeys(("prefilled_tokens", "decoded_tokens", "reused_tokens", "rerotated_tokens", "copied_tokens"), 0)
        self._fingerprint: str | None = None
        self.turns = Turns()
        self.turns.guard(self.pool)

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path = DEFAULT_MODEL,
        *,
        device: str = "auto",
        dtype: str = "auto",
        kv_dtype: str = "auto",
        page_size: int | None = None,
        max_kv_tokens: int | None = None,
        max_device_kv_bytes: int | None = None,
        quantize: str | None = None,
        cuda_graphs: bool | None = None,
        compile: bool = False,
        debug: bool = False,
        progress: bool = False,
    ) -> Engine:
        """Load a model by name, folder or hub id. dtype auto is the stored one; device auto takes CUDA where there is one.

        quantize: int8 or int4 for weights in fewer bits (see quantize.py). max_device_kv_bytes: so large is the KV cache on the device;
        branches that a call does not need are parked in host memory when it is full. cuda_graphs: decode by captured steps (default: on
        CUDA). compile: decode through compiled layers, which takes a while at the first steps; on a CPU also re-rotate and map by compiled
        kernels. A CPU needs a C++ compiler for it.
        """
        folder = resolve_model(str(model), progress=progress)
        config, quantize = ModelConfig.from_folder(folder), quantize or "none"
        place = resolve_device(device)
        page_size = page_size if page_size is not None else (64 if place.type == "cuda" else 16)
        settings = EngineConfig(
            str(place), dtype, kv_dtype, page_size, max_kv_tokens, debug=debug, quantize=quantize, max_device_kv_bytes=max_device_kv_bytes
        )
        tokenizer = Tokenizer.from_folder(folder, config)
        chat = detect_format(folder, tokenizer) if tokenizer is not None else None
        network = Model.from_tensors(config, load_weights(folder, config, dtype=resolve_dtype(dtype, config), device=place))
        if quantize == "none":
            network.pack()
        else:
            quantize_model(network, quantize)
        graphs = {"cuda_graphs": cuda_graphs, "compile": compile}
        return cls(network, config, tokenizer=tokenizer, chat=chat, settings=settings, folder=folder, **graphs)

    @property
    def fingerprint(self) -> str:
        """Hash of the weights and of the config fields that change the maths; computed when first asked for."""
        if self._fingerprint is None:
            self._fingerprint = fingerprint(self.folder, self.config) if self.folder else f"unsaved-{id(self.model):x}"
        return self._fingerprint

    def check_positions(self, first: int, count: int, what: str) -> None:
        """Refuse `count` tokens from position `first` on where the model's limit is below that."""
        if first + count > self.config.max_position_embeddings:
            raise RoomError(f"{what} needs {first + count} positions, the model's limit is {self.config.max_position_embeddings}")

    def check_branches(self, branches: Sequence[Branch], call: str) -> list[Branch]:
        """The handles as a list; refused where one is no branch of this engine, closed, or there twice."""
        if not isinstance(branches, (Branch, list, tuple)):
            raise MinipsError(f"{call}: branches is {type(branches).__name__}, expected a list of Branch")
        branches = [branches] if isinstance(branches, Branch) else list(branches)
        for index, branch in enumerate(branches):
            if not isinstance(branch, Branch):
                raise MinipsError(f"{call}: item {index} is {type(branch).__name__}, expected a Branch")
            if branch.owner is not self:
                raise MinipsError(f"{call}: branch {index} belongs to another engine")
            if branch.closed:
                raise MinipsError(f"{call}: branch {index} is closed (merged or freed earlier)")
            if branch.busy:
                raise MinipsError(f"{call}: branch {index} is being decoded just now")
        if len({id(branch) for branch in branches}) < len(branches):
            raise MinipsError(f"{call}: the same branch is there twice")
        return branches

    # Making branches

    @in_turn
    def prefill(self, prompt: Prompt, *, system: str | None = None, raw: bool = False) -> Branch:
        """Compute a root (c_sh). A string leaves its user turn open for `fork`."""
        return open_roots(self, [prompt], [system], raw)[0]

    @in_turn
    def prefill_batch(self, prompts: Sequence[Prompt], *, systems: Sequence[str | None] | None = None, raw: bool = False) -> list[Branch]:
        """As `prefill`, the roots of several tasks as one ragged batch. All or nothing."""
        if isinstance(prompts, str) or not isinstance(prompts, (list, tuple)):
            raise MinipsError("prefill_batch: prompts must be a list with one prompt a root")
        systems = [None] * len(prompts) if systems is None else systems
        _same_count("prefill_batch", prompts, systems, "systems", of="prompts")
        return open_roots(self, prompts, systems, raw)

    @in_turn
    def empty_branch(self) -> Branch:
        """A branch without tokens, at position 0."""
        return Branch(self.pool, self, [], [], 0)

    @in_turn
    def append(self, branches: Sequence[Branch], ids: Sequence[list[int]], role: str = "context") -> None:
        """Feed ids to each branch as a new segment, in one ragged batch, with the base weights. All or nothing."""
        jobs = [(branch, row) for branch, row in zip(branches, ids) if row]
        for branch, row in jobs:
            self.check_positions(branch.next_position, len(row), "the prompt")
        writers = open_writers([b for b, _ in jobs], [len(row) for _, row in jobs], role, "the prompt")
        try:
            last = prefill(self.model, writers, [row for _, row in jobs], self.settings.prefill_chunk) if jobs else []
            for (branch, row), writer, logits in zip(jobs, writers, last):
                writer.commit(row)
                branch.next_logits = logits
                self.counters["prefilled_tokens"] += len(row)
        finally:
            for writer in writers:
                writer.abort()

    @in_turn
    def fork(self, prefix: Branch, prompts: Sequence[Prompt]) -> list[Branch]:
        """One branch a prompt on the prefix's pages (no copy), then c_br in one ragged batch. Equal prompts are computed once."""
        self.check_branches([prefix], "fork")
        if isinstance(prompts, str) or not isinstance(prompts, (list, tuple)):
            raise MinipsError("fork: prompts must be a list with one prompt a branch")
        return open_branches(self, [prefix], [prompts])[0]

    @in_turn
    def fork_batch(self, prefixes: Sequence[Branch], prompts: Sequence[Sequence[Prompt]]) -> list[list[Branch]]:
        """As `fork`, of several prefixes with a list of prompts each, as one ragged batch. All or nothing."""
        prefixes = self.check_branches(prefixes, "fork_batch")
        _same_count("fork_batch", prefixes, prompts, "lists of prompts", of="prefixes")
        for index, row in enumerate(prompts):
            if isinstance(row, str) or not isinstance(row, (list, tuple)):
                raise MinipsError(f"fork_batch: prompts {index} is {type(row).__name__}, expected a list with one prompt a branch")
        return open_branches(self, prefixes, prompts)

    @in_turn
    def extend(self, branches: Sequence[Branch], prompts: Sequence[Prompt]) -> list[Branch]:
        """Append the next turn (user text, messages with tool results, or ids) to each branch; only it is prefilled."""
        branches = self.check_branches(branches, "extend")
        _same_count("extend", branches, prompts, "prompts")
        ids = [self.prompts.encode(p, "continuation", raw=b.raw) for b, p in zip(branches, prompts)]
        self.append(branches, ids)
        for branch in branches:
            branch.turn = "assistant"
        return branches

    @in_turn
    def encode(self, branches: Sequence[Branch], outputs: Sequence[str | list[int]]) -> list[Branch]:
        """Give each branch its z (text or ids) instead of decoding it; every token is kept."""
        branches = self.check_branches(branches, "encode")
        _same_count("encode", branches, outputs, "outputs")
        ids = [self.prompts.output(output) for output in outputs]
        self.append(branches, ids, role="output")
        for branch, row, output in zip(branches, ids, outputs):
            branch.output_ids, branch.finish_reason, branch.turn = row, "given", "assistant"
            branch.logprobs = branch.logits = None
            branch.text = output if isinstance(output, str) else self.tokenizer.decode(row) if self.tokenizer is not None else ""
            if not row:
                branch.adopt(Segment([], 0, branch.next_position, "output"), [])
            branch.segments[-1].ended = "given"
        return branches

    # Decoding

    def decode_row(
        self,
        writer: Writer,
        params: SamplingParams,
        limit: int,
        stream: int | None = None,
        label: int = 0,
        valid_vocab: int | None = None,
    ) -> DecodeRow:
        """A row for `decode_rows`; `stream` and `label` as in `RowSampler` and `sample`."""
        valid_vocab = self.valid_vocab if valid_vocab is None else valid_vocab
        stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.stop_ids)
        return DecodeRow(writer, params, stream, limit, stop_ids, valid_vocab, self.tokenizer, label, self.graphs)

    def token_limit(self, next_position: int, params: SamplingParams) -> int:
        """New tokens that may be made: each needs a position of its own below the model's limit."""
        return max(0, min(params.max_tokens, self.config.max_position_embeddings - next_position))

    def least_tokens(self, params: SamplingParams, limit: int) -> int:
        """Fewest tokens that a row of at most `limit` may come to."""
        may_stop = params.stop or params.stop_token_ids or self.stop_ids and not params.ignore_eos
        return 0 if may_stop else limit

    def decode(
        self,
        branches: Sequence[Branch],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_token: OnToken | None = None,
    ) -> list[Branch]:
        """Decode all branches as rows of one batch. The same handles come back, now with z, every kept token cached.

        `on_token(row, token_id, text)` sees each token as it comes; token_id is None where the row ended by a stop.
        Greedy rows on the very same context are computed once. Rows that do not all fit the pages at their longest are decoded in
        waves, one after the other, with the same tokens. Raises RoomError where even that does not fit. After that, as after an
        exception in the callback or Ctrl-C, the branches are as they were.
        """
        branches = self.check_branches(branches, "decode")
        if not (on_token is None or callable(on_token)):
            raise MinipsError(f"decode: on_token is {type(on_token).__name__}, expected a function of row, token id and text")
        shared, each = params is None or isinstance(params, SamplingParams), params_for(params, len(branches))
        steps = work(self, branches, each, shared, watched=on_token is not None)
        with TextStream(steps, self.turns, "decode") as tokens:  # the callback is called between turns: it may use the engine
            for row, token, piece in tokens:
                if on_token is not None:
                    on_token(row, token, piece)
        return branches

    @in_turn
    def ensure_logits(self, branches: Sequence[Branch]) -> None:
        """Recompute the last token of branches that have no logits to decode from (its stored K/V stays as it is)."""
        missing = [branch for branch in branches if branch.next_logits is None]
        for branch in missing:
            if not branch.token_ids:
                raise MinipsError("decode: the branch is empty: it has no tokens")
        writers = open_writers(missing, [1] * len(missing), "context", "decoding", hide=1)
        try:
            if missing:
                last = prefill(self.model, writers, [[b.token_ids[-1]] for b in missing], self.settings.prefill_chunk)
                for branch, logits in zip(missing, last):
                    branch.next_logits = logits
        finally:
            for writer in writers:
                writer.abort()

    # Single sequences

    def generate(self, prompt: Prompt, params: SamplingParams | None = None, *, system: str | None = None, raw: bool = False) -> Result:
        """Answer one prompt, plainly."""
        return self.stream(prompt, params, system=system, raw=raw).finish()

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, *, system: str | None = None, raw: bool = False) -> TextStream:
        """As `generate`, piece by piece."""
        started = time.perf_counter()
        ids = self.prompts.encode(prompt, "full", raw=raw, system=system)
        return TextStream(answer(self, self.empty_branch(), ids, params_for(params, 1)[0], self.model, started), self.turns)

    @in_turn
    def score(self, prompt: Prompt, target: str | list[int], *, system: str | None = None, raw: bool = False) -> Scores:
        """Log-probabilities of `target` (text or ids) as the answer to `prompt`."""
        ids = self.prompts.encode(prompt, "full", raw=raw, system=system)
        return score_ids(self, [self.empty_branch()], [ids], [self.prompts.output(target)], self.model)[0]

    def generate_batch(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        targets: Sequence[str | list[int]] | None = None,
        system: str | None = None,
        raw: bool = False,
    ) -> list[Result]:
        """Answer several prompts as rows of one batch. targets: also score these as the answers (`Result.scores`)."""
        started = time.perf_counter()
        if not isinstance(prompts, (list, tuple)):
            raise MinipsError(f"generate_batch: prompts is {type(prompts).__name__}, expected a list of prompts")
        ids = [self.prompts.encode(prompt, "full", raw=raw, system=system) for prompt in prompts]
        return answer_batch(self, [self.empty_branch() for _ in ids], ids, params, self.model, started, targets=targets)

    @in_turn
    def save_branches(self, branches: Sequence[Branch], folder: str | Path, *, tokens: tuple[int, int] | None = None) -> Path:
        """Write branches and their shared prefix as a new folder; see `branch_files.save_branches`."""
        return save_branches(self.check_branches(branches, "save_branches"), folder, tokens=tokens)

    @in_turn
    def load_branches(
        self, folder: str | Path, *, prefix: Branch | None = None, start: int | None = None, force: bool = False
    ) -> list[Branch]:
        """Branches from such a folder, as live ones; see `branch_files.load_branches`."""
        return load_branches(self, folder, prefix=prefix, start=start, force=force)

    # State

    @in_turn
    def stats(self) -> dict[str, int]:
        """Counters since the start, and the pages of now (all counts; sizes in tokens)."""
        pool = self.pool
        return {
            **self.counters,
            **(self.graphs.stats() if self.graphs is not None else {}),
            "page_size": pool.page_size,
            "total_pages": pool.num_pages - 1,
            "free_pages": pool.num_free,
            "used_pages": pool.num_pages - 1 - pool.num_free,
            "parked_pages": pool.parked_pages,
            "open_branches": sum(not branch.closed for branch in pool.branches),
            "kv_bytes_per_token": self.kv_bytes_per_token,
        }

    @in_turn
    def check(self) -> bool:
        """Recount every page (free + referenced = total, counts equal the open branches'); raises AssertionError if not."""
        return self.pool.check()

    @in_turn
    def close(self) -> None:
        """Close every branch of this engine. Refused while a stream is open or a batch is being decoded."""
        open_branches = list(self.pool.branches)
        if any(branch.busy for branch in open_branches):
            raise MinipsError("engine.close: a stream is open or a batch is being decoded; close or finish it first")
        for branch in open_branches:
            branch.close()


def _same_count(call: str, branches: Sequence, items: Sequence, what: str, of: str = "branches") -> None:
    if isinstance(items, str) or not isinstance(items, (list, tuple)) or len(items) != len(branches):
        found = len(items) if isinstance(items, (list, tuple)) else type(items).__name__
        raise MinipsError(f"{call}: {len(branches)} {of} but {found} {what}, expected one each, as a list")
