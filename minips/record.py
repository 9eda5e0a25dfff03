"""The one object that `--json` prints: the answer, what every worker wrote, the figures, and the workflow that repeats it."""

from __future__ import annotations

from dataclasses import asdict

import torch

from . import __version__
from .engine import Engine
from .running import Outcome, Span
from .synthesis import Synthesizer
from .weights import number_of_parameters
from .workflow import TEXT_METHODS
from .workflow_checks import SAMPLING_FIELDS

# What the fields mean. A new version may add fields; these keep their names and meaning.
RECORD_FIELDS = {
    "answer": "the text",
    "finish_reason": "stop or length",
    "token_ids": "of the answer",
    "method": "parallel, text, summary, reuse, naive or best-of-n",
    "workers": "per worker: label, text, token_ids, tokens (count), finish_reason (stop, length, given), prompt_tokens (its "
    "context before the output), seed, params (null where the output was given); earlier_turns: the same of its turns before the last",
    "branch_tokens": "per merged branch, the tokens that the answer reads from its cache",
    "prefilled_tokens": "computed for the answer before its first token",
    "reused_tokens": "read from the cache instead: the kept prefix and the branches",
    "counters": "tokens of the whole run: prefilled, decoded, reused, rerotated, copied",
    "ttft": "seconds from the synthesizer's call to its first token (0 for best-of-n)",
    "timings": "seconds: prefix, workers, rerotate, map, prefill, first_token, decode, total (without loading)",
    "seeds": "workers: per worker one seed a turn, null where it was given; answer",
    "model": "name, fingerprint, parameters, dtype, device, page_size, minips, torch",
    "adapter": "null, or name, mapper, lora_modules",
    "merge": "all merge options in force, or null where no caches are merged",
    "workflow": "the complete workflow: --workflow takes it, or this whole object, and gives the same tokens again",
}


def record(engine: Engine, synthesizer: Synthesizer, data: dict, outcome: Outcome) -> dict[str, object]:
    """The object of a completed workflow `data` that has been run."""
    result, method = outcome.result, data["method"]
    seconds = dict(outcome.seconds)
    total = seconds.pop("total")
    merged = method not in (*TEXT_METHODS, "best-of-n")
    dtype = str(engine.dtype).removeprefix("torch.")
    place = {"dtype": dtype, "device": str(engine.device), "page_size": engine.settings.page_size}
    adapter, lora = data["synthesizer"]["adapter"], synthesizer.adapter.lora if synthesizer.adapter is not None else None
    kind = synthesizer.mapper.config.kind if synthesizer.mapper is not None else "none"
    return {
        "answer": result.text,
        "finish_reason": result.finish_reason,
        "token_ids": result.token_ids,
        "method": method,
        "workers": [_worker(worker.label, spans) for worker, spans in zip(outcome.workers, outcome.spans)],
        "branch_tokens": result.branch_tokens,
        "prefilled_tokens": result.prefilled_tokens,
        "reused_tokens": result.reused_tokens,
        "counters": outcome.counters,
        "ttft": result.ttft,
        "timings": {**seconds, **result.timings, "total": total},
        "seeds": {
            "workers": [[span.params.seed if span.params is not None else None for span in spans] for spans in outcome.spans],
            "answer": result.seed,
        },
        "model": {
            "name": data["model"],
            "fingerprint": engine.fingerprint,
            "parameters": number_of_parameters(engine.config),
            **place,
            "minips": __version__,
            "torch": torch.__version__,
        },
        "adapter": {"name": adapter, "mapper": kind, "lora_modules": len(lora.pairs) if lora else 0} if adapter else None,
        "merge": asdict(synthesizer.options) if merged else None,
        "workflow": {**data, "engine": {**data["engine"], **place}},
    }


def _worker(label: str, spans: list[Span]) -> dict[str, object]:
    *earlier, last = [_span(span) for span in spans]
    return {"label": label, **last, "earlier_turns": earlier}


def _span(span: Span) -> dict[str, object]:
    output, params = span.output, span.params
    return {
        "text": output.text,
        "token_ids": output.token_ids,
        "tokens": len(output.token_ids),
        "finish_reason": output.finish_reason,
        "prompt_tokens": output.prompt_tokens,
        "seed": params.seed if params is not None else None,
        "params": {name: getattr(params, name) for name in SAMPLING_FIELDS if name != "seed"} if params is not None else None,
    }
