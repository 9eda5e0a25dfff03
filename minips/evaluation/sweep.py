"""What synthesis costs as m and the branches grow: TTFT, end to end and memory, parallel against text, alternating on the same branches."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from ..chat import default_prompt, text_prompt
from ..config import SamplingParams
from ..engine import Engine
from ..errors import MinipsError
from ..kv_cache import Branch
from ..synthesis import Synthesizer

QUESTION = "What should a city do first against heat?"
ANSWER_TOKENS = 16
_CLEAR_REFS, _STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")


def timing_sweep(
    engine: Engine,
    adapter: str | None = None,
    *,
    workers: Sequence[int] = (1, 2, 4, 8, 16),
    lengths: Sequence[int] = (128,),
    repeats: int = 5,
    seed: int = 0,
    say: Callable[[str], None] = lambda text: None,
) -> list[dict]:
    """Entries of `sweep.json`: {m, branch_tokens, method, ttft {median, p95, n, raw}, workers, end_to_end, peak_mb, kv_mb}; seconds and MB.

    ttft starts before tokenization and merge and ends with the first token's id on the host. end_to_end: the workers' own time plus
    the median of a whole answer of 16 tokens. peak_mb: peak memory of the process (of the device, on CUDA) while answering. kv_mb: pages in use then.
    A method that does not fit the model's positions or the page pool is left out, and `say` hears why.
    """
    synthesizer, found = Synthesizer(engine, adapter), []
    params = SamplingParams(max_tokens=ANSWER_TOKENS, ignore_eos=True)
    prompt = default_prompt(QUESTION)
    for length in lengths:
        for m in workers:
            started = time.perf_counter()
            try:
                branches = _branches(engine, m, length, seed)
            except MinipsError as error:
                say(f"m = {m}, {length} tokens: left out ({error})")
                continue
            decoding = time.perf_counter() - started
            texts = [branch.text for branch in branches]
            calls = {
                "parallel": lambda: synthesizer.generate_from_caches(branches, prompt, params, consume=False),
                "text": lambda: engine.generate(text_prompt(QUESTION, texts, prompt), params),
            }
            try:
                entries = _measure(engine, calls, repeats, say, f"m = {m}, {length} tokens")
            finally:
                for branch in branches:
                    branch.close()
            for method, entry in entries.items():
                entry["end_to_end"] += decoding
                found.append({"m": m, "branch_tokens": length, "method": method, "workers": decoding, **entry})
            if entries:
                said = ", ".join(f"{method} {entry['ttft']['median'] * 1000:.0f} ms" for method, entry in entries.items())
                say(f"m = {m}, {length} tokens a branch: TTFT {said}")
    return found


def _branches(engine: Engine, m: int, length: int, seed: int) -> list[Branch]:
    """m workers that write exactly `length` tokens each."""
    params = SamplingParams(max_tokens=length, temperature=0.7, top_p=0.95, ignore_eos=True, seed=seed)
    with engine.prefill(QUESTION) as prefix:
        branches = engine.fork(prefix, [""] * m)
        try:
            return engine.decode(branches, [replace(params, seed=seed + at) for at in range(m)])
        except BaseException:
            for branch in branches:
                branch.close()
            raise


def _measure(engine: Engine, calls: dict[str, Callable], repeats: int, say: Callable[[str], None], where: str) -> dict[str, dict]:
    """Warm each call once, then alternate; the order turns round every time."""
    seconds: dict[str, list[tuple[float, float]]] = {}
    memory: dict[str, tuple[float, float]] = {}
    for method, call in calls.items():
        reset_peak(engine.device)
        try:
            result = call()
        except MinipsError as error:
            say(f"{where}, {method}: left out ({error})")
            continue
        pages = engine.pool.pages_for(result.prefilled_tokens + result.reused_tokens + ANSWER_TOKENS)
        memory[method] = peak_mb(engine.device), pages * engine.pool.page_size * engine.kv_bytes_per_token / 2**20
        seconds[method] = []
    for turn in range(repeats):
        for method in list(seconds)[:: 1 if turn % 2 == 0 else -1]:
            started = time.perf_counter()
            result = calls[method]()
            seconds[method].append((result.ttft, time.perf_counter() - started))
    return {
        method: {
            "ttft": spread([ttft for ttft, _ in pairs]),
            "end_to_end": statistics.median(whole for _, whole in pairs),
            "peak_mb": memory[method][0],
            "kv_mb": memory[method][1],
        }
        for method, pairs in seconds.items()
    }


def spread(values: Sequence[float]) -> dict:
    """median, p95 (nearest rank), n and the raw values."""
    ranked = sorted(values)
    p95 = ranked[math.ceil(0.95 * len(ranked)) - 1]
    return {"median": statistics.median(ranked), "p95": p95, "n": len(ranked), "raw": list(values)}


def reset_peak(device: torch.device) -> None:
    """Start measuring the peak anew, where the system lets us (Linux, CUDA)."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    try:
        _CLEAR_REFS.write_text("5")
    except OSError:
        pass


def peak_mb(device: torch.device) -> float:
    """Peak since `reset_peak`: allocated on the device, or resident in the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    try:
        lines = _STATUS.read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024
    except (OSError, StopIteration):
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
