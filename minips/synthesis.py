"""The synthesizer: merge worker branches by their page tables, prefill only its own prompt, answer."""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

from .adapter import Adapter, base_name, load_adapter
from .answering import answer, answer_batch, answer_limit, score_ids
from .attention import Reweight
from .change import increments_for
from .chat import default_prompt
from .config import MergeOptions, SamplingParams
from .engine import Engine, OnToken
from .errors import MinipsError, brief, counted
from .hub import resolve_adapter
from .kv_cache import Branch
from .lora import fold
from .merge import Plan, apply_plan, plan_merge
from .prompts import Prompt
from .results import Result, Scores, TextStream, WorkerOutput
from .sampling import params_for
from .transform import compile_ahead
from .turns import in_turn


class Context:
    """Merged branches, ready to be asked (more than once). A context manager; `close` returns its pages.

    num_branches and branch_tokens count what was merged; timings are the merge's seconds.
    """

    def __init__(self, branch: Branch, owner: Synthesizer, branch_tokens: list[int], timings: dict[str, float]):
        self.branch, self.owner = branch, owner
        self.branch_tokens, self.timings = branch_tokens, timings

    @property
    def num_branches(self) -> int:
        return len(self.branch_tokens)

    @property
    def token_ids(self) -> list[int]:
        return self.branch.token_ids

    @property
    def closed(self) -> bool:
        return self.branch.closed

    def close(self) -> None:
        self.branch.close()

    def __enter__(self) -> Context:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Synthesizer:
    """Answers from worker branches (arXiv 2606.14672), with an adapter (mapper and folded LoRA) or with the base weights.

    adapter: a folder of ours or of the authors' form, a PEFT folder, a name, a hub id, or an Adapter. options: MergeOptions,
    or a dict of the fields that differ from the adapter's own. parts: both, mapper_only, lora_only or none of the adapter.
    force: accept an adapter of other base weights. Several synthesizers can stand on one engine.
    """

    def __init__(
        self,
        engine: Engine,
        adapter: str | Path | Adapter | None = None,
        *,
        options: MergeOptions | dict | None = None,
        parts: str = "both",
        force: bool = False,
    ):
        self.engine, self.turns = engine, engine.turns
        if adapter is not None and not isinstance(adapter, Adapter):
            place = resolve_adapter(str(adapter))
            adapter = load_adapter(place, engine.model, lambda: engine.fingerprint, parts=parts, force=force)
        own = adapter.options if adapter is not None else MergeOptions()
        if options is not None and not isinstance(options, (MergeOptions, dict)):
            raise MinipsError(f"Synthesizer: options is {type(options).__name__}, expected MergeOptions or a dict of its fields")
        self.options = options if isinstance(options, MergeOptions) else own.changed(options or {})
        self.adapter, self.mapper = adapter, adapter.mapper if adapter is not None else None
        if self.mapper is not None and any(part.device != engine.device for part in self.mapper.parameters()):
            self.mapper = copy.deepcopy(self.mapper).to(engine.device)  # the adapter may serve another engine too
        if self.mapper is not None and self.mapper.config.key_space == "rotated" and self.options.anchor == "free":
            raise MinipsError(
                "MergeOptions: anchor 'free' cannot be combined with a mapper of rotated keys, which depends on where they stand; "
                "use the anchor it was trained with"
            )
        lora = adapter.lora if adapter is not None else None
        declared = base_name(lora.config) if lora is not None else ""
        if declared and engine.folder is not None and declared != engine.folder.resolve().name.lower():
            warnings.warn(f"the adapter was made for {brief(declared)}, the model is {engine.folder.name!r}", stacklevel=2)
        self.rope = engine.model.rope
        if self.mapper is not None:
            increments_for(engine.pool, self.mapper)  # now, not in the first merge
        if engine.merge_kernels is not None:
            compile_ahead(engine.pool, self.rope, self.mapper, engine.merge_kernels)
        self.model = fold(engine.model, lora) if lora is not None else engine.model
        self.valid_vocab = min(engine.valid_vocab, lora.base_rows or engine.valid_vocab) if lora is not None else engine.valid_vocab

    @in_turn
    def merge(self, branches: Sequence[Branch], *, consume: bool = True, prefix: Branch | None = None) -> Context:
        """Make one context of the branches: re-rotated in place, joined by page tables, nothing prefilled.

        consume: the branches are closed and their pages changed in place; without, the context works on copies of what it
        changes. prefix: c_sh for an empty list of branches. A merge that fails half-way closes the branches it consumed.
        """
        branches, plan = self._plan(branches, prefix)
        return self._merged(plan, branches, (branches[0] if branches else prefix).raw, consume)

    def _merged(self, plan: Plan, branches: list[Branch], raw: bool, consume: bool) -> Context:
        engine, pool = self.engine, self.engine.pool
        for index in plan.skipped:
            warnings.warn(f"merge: branch {index} is empty (it stopped at once) and is skipped", stacklevel=4)
        if not branches:
            warnings.warn("merge: no branches were given; the context is the prefix alone", stacklevel=4)
        copies = engine.counters["copied_tokens"]
        timings = {"rerotate": 0.0, "map": 0.0}
        consumed = branches if consume else []
        try:
            segments = apply_plan(plan, pool, self.rope, consumed, timings, engine.counters, self.mapper, engine.merge_kernels)
        except MinipsError:  # refused before anything was changed
            raise
        except BaseException as error:
            for branch in consumed:
                branch.close()
            note = f"; the {len(consumed)} branches it consumed are closed" if consumed else ""
            if isinstance(error, Exception):
                raise MinipsError(f"merge failed half-way ({type(error).__name__}: {error}){note}") from error
            raise
        branch = Branch(pool, engine, segments, [*plan.prefix_ids, *plan.token_ids], plan.next_position)
        for segment in segments:
            pool.release(segment.pages)  # the branch holds them now
        branch.raw = raw
        if self.options.branch_temperature != 1 or self.options.branch_scale != 1:
            first = len(plan.prefix_ids)
            branch.reweight = Reweight(first, first + len(plan.token_ids), self.options.branch_temperature, self.options.branch_scale)
        for spent in consumed:
            spent.close()
        engine.counters["reused_tokens"] += branch.num_cached - (engine.counters["copied_tokens"] - copies)
        return Context(branch, self, plan.branch_tokens, timings)

    def _plan(self, branches: Sequence[Branch], prefix: Branch | None = None) -> tuple[list[Branch], Plan]:
        """The branches, checked, and what a merge of them would do; nothing is changed."""
        engine = self.engine
        branches = engine.check_branches(branches, "merge")
        if prefix is not None:
            engine.check_branches([prefix], "merge")
        if not branches and (prefix is None or not self.options.keep_prefix):
            raise MinipsError("merge: no branches were given, and no prefix is kept")
        lossy = engine.pool.keys[0].dtype.itemsize < 4
        return branches, plan_merge(branches, self.options, engine.config.max_position_embeddings, prefix, lossy=lossy)

    def _prompt_ids(self, context: Context, prompt: Prompt, call: str = "generate") -> list[int]:
        if not isinstance(context, Context):
            raise MinipsError(f"{call}: context is {type(context).__name__}, expected what Synthesizer.merge returned")
        if context.owner is not self:
            raise MinipsError("this context was merged by another Synthesizer; its K/V belong to that one's mapper and weights")
        if context.closed:
            raise MinipsError("this context is closed")
        return self.engine.prompts.encode(prompt, "continuation", raw=context.branch.raw)

    def _answer(self, context: Context, prompt: Prompt, params: SamplingParams | None, started: float) -> Iterator[str]:
        ids = self._prompt_ids(context, prompt)
        child = context.branch.child()
        params = params_for(params, 1, "generate")[0]
        result = yield from answer(self.engine, child, ids, params, self.model, started, context.timings, self.valid_vocab)
        result.num_branches, result.branch_tokens = context.num_branches, list(context.branch_tokens)
        return result

    def _answer_and_close(self, branches: Sequence[Branch], prompt: Prompt, params: SamplingParams | None, consume: bool) -> Iterator[str]:
        started = time.perf_counter()
        params = params_for(params, 1, "generate")[0]  # what can be refused is refused before the branches are consumed
        branches, plan = self._plan(branches)
        ids = self.engine.prompts.encode(prompt, "continuation", raw=branches[0].raw)
        answer_limit(self.engine, plan.next_position, ids, params)
        with self._merged(plan, branches, branches[0].raw, consume) as context:
            return (yield from self._answer(context, ids, params, started))

    def generate_from_caches(
        self, kv_list: Sequence[Branch], prompt: Prompt, params: SamplingParams | None = None, *, consume: bool = True
    ) -> Result:
        """Merge the branches and answer `prompt` from their K/V; TTFT counts from here, merge and tokenization included."""
        return self.stream_from_caches(kv_list, prompt, params, consume=consume).finish()

    def stream_from_caches(
        self, kv_list: Sequence[Branch], prompt: Prompt, params: SamplingParams | None = None, *, consume: bool = True
    ) -> TextStream:
        """As `generate_from_caches`, piece by piece; the merge starts with the first piece asked for."""
        return TextStream(self._answer_and_close(kv_list, prompt, params, consume), self.turns)

    def generate(
        self,
        *,
        context: Context | None = None,
        prompt: Prompt | None = None,
        text: Prompt | None = None,
        params: SamplingParams | None = None,
        adapted: bool = False,
    ) -> Result:
        """Ask a merged context (again): `context` and `prompt`. Or the text interface: `text`, base weights unless `adapted`."""
        started = time.perf_counter()
        if (context is None) == (text is None) or (context is None) != (prompt is None):
            raise MinipsError("generate: give either context= and prompt=, or text=")
        if context is not None:
            return TextStream(self._answer(context, prompt, params, started), self.turns).finish()
        engine = self.engine
        ids = engine.prompts.encode(text, "full")
        model, valid_vocab = (self.model, self.valid_vocab) if adapted else (engine.model, engine.valid_vocab)
        params = params_for(params, 1, "generate")[0]
        rows = answer(engine, engine.empty_branch(), ids, params, model, started, None, valid_vocab)
        return TextStream(rows, self.turns).finish()

    @in_turn
    def score(self, context: Context, prompt: Prompt, target: str | list[int]) -> Scores:
        """Log-probabilities of `target` as the answer to `prompt` over a merged context, which stays open."""
        ids = self._prompt_ids(context, prompt, "score")
        target = self.engine.prompts.output(target)
        return score_ids(self.engine, [context.branch.child()], [ids], [target], self.model, self.valid_vocab)[0]

    def generate_batch(
        self,
        contexts: Sequence[Context],
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        targets: Sequence[str | list[int]] | None = None,
    ) -> list[Result]:
        """Ask each of several merged contexts its prompt, as rows of one batch. targets: score these as the answers too."""
        started = time.perf_counter()
        for what, rows in (("contexts", contexts), ("prompts", prompts)):
            if not isinstance(rows, (list, tuple)):
                raise MinipsError(f"generate_batch: {what} is {type(rows).__name__}, expected a list")
        if len(contexts) != len(prompts):
            raise MinipsError(f"generate_batch: {len(contexts)} contexts but {len(prompts)} prompts, expected one each")
        with self.turns("generate_batch"):
            ids = [self._prompt_ids(context, prompt, "generate_batch") for context, prompt in zip(contexts, prompts)]
            children = [context.branch.child() for context in contexts]
        found = answer_batch(self.engine, children, ids, params, self.model, started, self.valid_vocab, targets)
        for result, context in zip(found, contexts):
            result.num_branches, result.branch_tokens = context.num_branches, list(context.branch_tokens)
            result.timings.update(context.timings)
        return found

    def run(
        self,
        task: Prompt,
        prompts: Sequence[Prompt],
        prompt: Prompt | None = None,
        *,
        worker_params: SamplingParams | Sequence[SamplingParams] | None = None,
        params: SamplingParams | None = None,
        on_token: OnToken | None = None,
    ) -> Result:
        """The whole job: prefill the task, fork one worker a prompt, decode them together, synthesize.

        prompt None restates the task. on_token sees the workers' tokens. The result's `workers` holds what they wrote.
        """
        if prompt is None:
            if not isinstance(task, str):
                raise MinipsError("run: the default synthesizer prompt restates a task given as text; give prompt=")
            prompt = default_prompt(task)
        engine, params = self.engine, params_for(params, 1, "run")[0]
        self.check_room(task, prompts, prompt, worker_params, params)
        branches: list[Branch] = []
        with engine.prefill(task) as prefix:
            try:
                branches = engine.fork(prefix, prompts)
                engine.decode(branches, worker_params, on_token=on_token)
                workers = [WorkerOutput.of(branch) for branch in branches]
                result = self.generate_from_caches(branches, prompt, params)
                result.workers = workers
                return result
            finally:
                for branch in branches:
                    branch.close()

    def check_room(
        self,
        task: Prompt,
        prompts: Sequence[Prompt],
        prompt: Prompt,
        worker_params: SamplingParams | Sequence[SamplingParams] | None,
        params: SamplingParams,
        *,
        system: str | None = None,
    ) -> None:
        """Refuse before the first forward what cannot fit the page pool or the positions, workers and synthesizer at their longest."""
        if isinstance(prompts, str) or not isinstance(prompts, (list, tuple)):
            raise MinipsError("run: prompts must be a list with one prompt a worker")
        rows = params_for(worker_params, len(prompts), "run")
        self.check_turns(task, [[turn] for turn in zip(prompts, rows)], prompt, params, system=system)

    def check_turns(
        self,
        task: Prompt,
        workers: Sequence[Sequence[tuple[Prompt, SamplingParams | str | list[int]]]],
        prompt: Prompt,
        params: SamplingParams,
        *,
        system: str | None = None,
    ) -> list[int]:
        """As `check_room`, for workers of several turns -> the positions that each worker's kept tokens span at their longest.

        A turn is a prompt and how it goes on: SamplingParams where it is decoded, text or ids where its output is given.
        """
        engine, options, pages = self.engine, self.options, self.engine.pool.pages_for
        state = {"open_turn": isinstance(task, str), "empty_prefix": task == ""}
        known: dict[tuple[str, str], int] = {}  # equal prompts are encoded once

        def size(text: Prompt, kind: str, **arguments: object) -> int:
            key = (kind, repr(text))
            if key not in known:
                ids = engine.prompts.output(text) if kind == "output" else engine.prompts.encode(text, kind, **arguments)
                known[key] = len(ids)
            return known[key]

        prefix = size(task, "prefix", system=system)
        needed, spare, spans, ends = pages(prefix), 0, [], [prefix]  # spare: what the worker that needs most may need above its least
        for turns in workers:
            end, outputs = prefix, []  # outputs: (start, tokens)
            for index, (own, how) in enumerate(turns):
                own = size(own, "continuation") if index else size(own, "branch", **state)
                given = None if isinstance(how, SamplingParams) else size(how, "output")
                engine.check_positions(end + own, 1 if given is None else given, "a worker")
                count = engine.token_limit(end + own, how) if given is None else given
                least = pages(count if given is not None else engine.least_tokens(how, count))
                needed, spare = needed + pages(own) + least, max(spare, pages(count) - least)
                outputs.append((end + own, count))
                end += own + count
            kept = {"final": outputs[-1][1], "outputs": end - outputs[0][0], "all": end - prefix, "full": end}
            spans.append(kept.get(options.keep_turns, sum(count for _, count in outputs)))
            ends.append(end)
        u = size(prompt, "continuation")
        anchor = prefix if options.anchor == "fork" else 0
        start = anchor + (sum(spans) if options.layout == "sequential" else max(spans, default=0))
        start = start if options.rerotate else max(ends)
        engine.check_positions(start, u + 1, "the prefix, the longest worker output and the synthesizer's prompt")
        needed += max(spare, pages(u) + pages(engine.token_limit(start + u, params)))
        engine.pool.require(needed, f"a run of {counted(len(workers), 'worker')} and a synthesizer")
        return spans
