"""Memory: bytes of K/V a token, by formula and as allocated, and the peak of re-rotate + map + merge over the branches' own pages.

    python bench/memory.py [--workers 2,4,8] [--lengths 128,512,2048] [--mappers none,affine,linear,low_rank,normalize] [--json FILE]

The peak is what the allocator held at most during `Synthesizer.merge`, which consumes the branches: of every allocation on the CPU as
torch's profiler records it, on CUDA as its allocator counts. The branches' own pages are there before and are not in it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from measure import grid, kv_bytes_per_token, machine_line, numbers, run_bench, say
from models import (
    Ids,
    Subject,
    add_model_arguments,
    branch_context,
    open_subject,
    save_workers,
    synthesizer_of,
)

from minips import MinipsError
from minips.kv_storage import parts
from minips.mapper import KINDS

FORMULA = "2 (K and V) x layers x KV heads x (head_dim x bytes + scale)"


def peak_bytes(call: Callable[[], object], device: torch.device) -> int:
    """The most that `call` held at once over what was there before, in bytes."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        return torch.cuda.max_memory_allocated(device) - before
    with silent_stderr(), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    with tempfile.TemporaryDirectory(prefix="minips-bench-") as place:
        trace = Path(place) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    held = highest = 0
    for event in sorted((event for event in events if event.get("name") == "[memory]"), key=lambda event: event["args"]["Ev Idx"]):
        held += event["args"]["Bytes"]  # what was allocated before is not in the record, and neither is its release
        highest = max(highest, held)
    return highest


@contextmanager
def silent_stderr() -> Iterator[None]:
    """Without what the profiler's C++ code writes about itself."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def measure_case(subject: Subject, kind: str, m: int, length: int, saved: Path) -> dict:
    """One merge; pages: what the branches' outputs stand on, in bytes."""
    engine = subject.engine
    synthesizer = synthesizer_of(subject, kind, "minips")
    branches = engine.load_branches(saved)
    pages = sum(len(branch.segments[-1].pages) for branch in branches) * engine.pool.page_size * engine.kv_bytes_per_token
    copied, contexts = engine.counters["copied_tokens"], []
    try:
        peak = peak_bytes(lambda: contexts.append(synthesizer.merge(branches)), engine.device)
    finally:
        for held in (*contexts, *branches):
            held.close()
    return {
        "m": m,
        "length": length,
        "mapper": kind,
        "pages": pages,
        "needed": m * length * engine.kv_bytes_per_token,
        "peak": peak,
        "copied_tokens": engine.counters["copied_tokens"] - copied,
    }


def bytes_per_token(subject: Subject) -> dict:
    """By formula, by the pool's tensors, and by the formula that forgets the number of KV heads."""
    pool, config = subject.engine.pool, subject.config
    codes, *scales = parts(pool.keys[0])
    sizes = {"itemsize": codes.element_size(), "scale_bytes": sum(scale.element_size() for scale in scales)}
    held = sum(tensor.nbytes for store in (*pool.keys, *pool.values) for tensor in parts(store))
    return {
        "formula": kv_bytes_per_token(config, **sizes),
        "allocated": held / (pool.num_pages * pool.page_size),
        "without_heads": kv_bytes_per_token(config, **sizes) // config.num_key_value_heads,
        "layers": config.num_hidden_layers,
        "kv_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "page_size": pool.page_size,
        **sizes,
    }


def run(args: argparse.Namespace) -> dict:
    unknown = [name for name in args.mappers if name not in KINDS]
    if unknown:
        raise MinipsError(f"--mappers has {', '.join(unknown)}, expected some of {', '.join(KINDS)}")
    args.no_rival = True
    room = max(args.workers) * (max(args.lengths) + branch_context(max(args.workers)) + 64) + 256
    with open_subject(args, room) as subject, tempfile.TemporaryDirectory(prefix="minips-bench-") as place:
        ids, cases = Ids(subject.config.vocab_size), []
        for m in args.workers:
            for length in args.lengths:
                saved = Path(place) / f"{m}-{length}"
                save_workers(subject, ids, m, length, saved)
                cases += [measure_case(subject, kind, m, length, saved) for kind in args.mappers]
                worst = max(case["peak"] / case["pages"] for case in cases[-len(args.mappers) :])
                say(f"m = {m}, {length} tokens a branch: at most {worst:.1%} over the branches' pages")
        return {"model": subject.facts(), "token": bytes_per_token(subject), "cases": cases}


def report(data: dict) -> str:
    token = data["token"]
    rows = [
        [
            str(case["m"]),
            str(case["length"]),
            case["mapper"],
            f"{case['peak'] / case['pages']:.1%}",
            f"{case['peak'] / 2**20:.2f}",
            f"{case['pages'] / 2**20:.1f}",
            f"{case['needed'] / case['pages']:.1%}",
            str(case["copied_tokens"]),
        ]
        for case in data["cases"]
    ]
    scale = f" + {token['scale_bytes']}" if token["scale_bytes"] else ""
    factors = f"{token['layers']} x {token['kv_heads']} x ({token['head_dim']} x {token['itemsize']}{scale})"
    sizes = (
        f"K/V of a token: {token['formula']} bytes = {FORMULA} = 2 x {factors}; the pool holds {token['allocated']:.0f} a slot, "
        f"{token['page_size']} slots a page. Without the number of KV heads it would be {token['without_heads']}.\n"
    )
    return "\n".join(
        [
            f"{data['model']['name']}, {data['model']['dtype']}. {machine_line(data['machine'])}.\n",
            sizes,
            "Peak of re-rotate + map + merge over the branches' own pages; filled: tokens in those pages.\n",
            grid(["m", "tokens", "mapper", "peak / pages", "peak, MB", "pages, MB", "filled", "copied tokens"], rows),
        ]
    )


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_model_arguments(parser)
    parser.add_argument("--workers", type=numbers, default=[2, 8], metavar="M,...", help="numbers of branches (default: 2,8)")
    parser.add_argument("--lengths", type=numbers, default=[128, 1024], metavar="N,...", help="tokens a branch (default: 128,1024)")
    parser.add_argument("--mappers", type=lambda text: text.split(","), default=list(KINDS), help=f"default: {','.join(KINDS)}")
    return parser


def main(argv: list[str] | None = None) -> int:
    return run_bench("memory", build_parser(), run, report, argv)


if __name__ == "__main__":
    sys.exit(main())
