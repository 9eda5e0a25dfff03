"""What every speed bench shares: alternating rivals, spreads, FLOP and byte counts, the machine, and the frame of a command."""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy
import torch

from minips import MinipsError
from minips.config import ModelConfig
from minips.errors import in_one_line
from minips.quantize import BESIDE, FEW_ROWS
from minips.weights import expected_shapes

Figures = dict[str, float]  # of one call: seconds by name

PACKAGES = ("minips", "torch", "transformers")
CODE_BITS = {"int8": 8, "int4": 5}  # of a quantised weight; of int4 with the scale and zero of each block


# Measuring


def alternate(calls: dict[str, Callable[[int], Figures]], repeats: int, budget: float, cold: bool = True) -> dict[str, dict]:
    """Call all rivals in turns, the order turned round each time -> {rival: {cold: figures, warm: [figures, ...]}}.

    The first turn is each rival's first call at this shape: its warm-up, kept apart as `cold` (none where they are warm already). At most
    `repeats` warm turns follow, at least one, and none that would not end within `budget` seconds. The calls get the number of the turn.
    """
    found = {name: {"cold": call(0) if cold else None, "warm": []} for name, call in calls.items()}
    started = time.perf_counter()
    for turn in range(1, repeats + 1):
        begun = time.perf_counter()
        for name in list(calls)[:: 1 if turn % 2 else -1]:
            found[name]["warm"].append(calls[name](turn))
        now = time.perf_counter()
        if now - started + (now - begun) > budget:
            break
    return found


def spread(values: Sequence[float]) -> dict:
    """median, min, max, p95 (nearest rank), n and the raw values."""
    ranked = sorted(values)
    p95 = ranked[math.ceil(0.95 * len(ranked)) - 1]
    return {"median": statistics.median(ranked), "min": ranked[0], "max": ranked[-1], "p95": p95, "n": len(ranked), "raw": list(values)}


def warm(found: dict, name: str) -> dict:
    """The spread of one figure over the warm calls."""
    return spread([figures[name] for figures in found["warm"]])


def fit(columns: dict[str, Sequence[float]], seconds: Sequence[float]) -> dict:
    """Least squares seconds ~ sum of coefficient * column, each case weighted by its own size, so that small ones count too.

    -> {coefficients: {column: value}, r2, worst: the largest relative error, n}. r2 is that of the unweighted values.
    """
    matrix, target = numpy.array(list(columns.values()), dtype=float).T, numpy.array(seconds, dtype=float)
    if len(target) < matrix.shape[1]:
        raise MinipsError(f"a fit of {matrix.shape[1]} coefficients needs as many cases, found {len(target)}")
    scale = numpy.abs(matrix).max(0)
    scale[scale == 0] = 1.0
    solved, *_ = numpy.linalg.lstsq(matrix / scale / target[:, None], numpy.ones(len(target)), rcond=None)
    error = (matrix / scale) @ solved - target
    total = float(((target - target.mean()) ** 2).sum())
    return {
        "coefficients": dict(zip(columns, (solved / scale).tolist())),
        "r2": 1 - float((error**2).sum()) / total if total else 1.0,
        "worst": float(numpy.abs(error / target).max()),
        "n": len(target),
    }


# Counting


def layer_parameters(config: ModelConfig) -> int:
    """Weights of all layers' projections: each costs 2 FLOP a token."""
    return sum(math.prod(shape) for name, shape in expected_shapes(config).items() if ".layers." in name and len(shape) == 2)


def prefill_flops(config: ModelConfig, tokens: int, past: int = 0) -> float:
    """FLOP of a prefill of `tokens` behind `past` cached ones, causal attention counted, the head for the last position only."""
    pairs = tokens * past + tokens * (tokens + 1) / 2
    attention = 4 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * pairs
    return 2 * layer_parameters(config) * tokens + attention + 2 * config.vocab_size * config.hidden_size


def kv_bytes_per_token(config: ModelConfig, itemsize: int = 2, scale_bytes: int = 0) -> int:
    """2 (K and V) x layers x KV heads x (head_dim x bytes + the bytes of its scale, where K/V are stored as codes)."""
    return 2 * config.num_hidden_layers * config.num_key_value_heads * (config.head_dim * itemsize + scale_bytes)


def weight_bytes(config: ModelConfig, quantize: str | None = None, rows: int = 1, itemsize: int = 2) -> float:
    """Bytes of weights that a pass over `rows` tokens must read: the layers' projections and the head once.

    Quantised, a pass with few rows reads codes (of the head always int8), one with more the bf16 form beside them, where it is kept.
    """
    layers, head = layer_parameters(config), config.vocab_size * config.hidden_size
    if quantize is None:
        return (layers + head) * itemsize
    beside = 2 * sum(math.prod(shape) for shape in expected_shapes(config).values() if len(shape) == 2) <= BESIDE
    kinds = ((quantize, layers), ("int8", head))
    return sum(count * (2 if beside and rows > FEW_ROWS[kind] else CODE_BITS[kind] / 8) for kind, count in kinds)


def read_bandwidth(megabytes: int = 512) -> float:
    """Bytes a second that summing a large tensor reads, the best of seven."""
    data = torch.ones(megabytes * 2**18)
    best = math.inf
    for _ in range(7):
        started = time.perf_counter()
        data.sum()
        best = min(best, time.perf_counter() - started)
    return data.nbytes / best


def peak_flops(dtype: torch.dtype = torch.bfloat16, size: int = 1536) -> float:
    """FLOP a second of a square matrix product in `dtype`, the best of seven."""
    left, right = torch.ones(size, size, dtype=dtype), torch.ones(size, size, dtype=dtype)
    best = math.inf
    for _ in range(7):
        started = time.perf_counter()
        left @ right
        best = min(best, time.perf_counter() - started)
    return 2 * size**3 / best


def machine(quick: bool = False) -> dict:
    """Date, processor, threads, versions, and what this machine reads and multiplies at its best, all of now."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "processor": _processor(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "versions": found,
        "read_gb_s": read_bandwidth(32 if quick else 512) / 1e9,
        "matmul_gflop_s": peak_flops(size=256 if quick else 1536) / 1e9,
    }


def machine_line(data: dict) -> str:
    """One line of `machine`'s."""
    versions = ", ".join(f"{name} {number}" for name, number in data["versions"].items())
    return (
        f"{data['date']}; {data['processor']}, {data['cpus']} CPUs, {data['threads']} threads, load {data['load']:.1f}; {versions}; "
        f"reads {data['read_gb_s']:.1f} GB/s, multiplies bf16 at {data['matmul_gflop_s']:.0f} GFLOP/s"
    )


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


# The frame of a command


def grid(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose columns line up."""
    widths = [max(3, *(len(row[at]) for row in (head, *rows))) for at in range(len(head))]
    lines = [head, ["-" * (width - 1) + ":" for width in widths], *rows]
    return "\n".join("| " + " | ".join(cell.rjust(width) for cell, width in zip(line, widths)) + " |" for line in lines) + "\n"


def ms(seconds: float) -> str:
    return f"{seconds * 1000:.4g}" if seconds < 1 else f"{seconds * 1000:.0f}"


def numbers(text: str) -> list[int]:
    """A list of positive whole numbers with commas between them, for argparse."""
    found = [int(part) for part in text.split(",")]
    if min(found) < 1:
        raise ValueError(text)
    return found


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def write_whole(path: Path, text: str) -> None:
    """Write beside and rename."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_text(text, encoding="utf-8")
        os.replace(beside, path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise MinipsError(f"{path}: cannot be written ({error.strerror or error})") from None


def run_bench(
    name: str,
    parser: argparse.ArgumentParser,
    run: Callable[[argparse.Namespace], dict],
    report: Callable[[dict], str],
    argv: Sequence[str] | None = None,
) -> int:
    """Parse, run, print the report on stdout and write --json. Exit code 0 done, 1 refused (one line), 2 bad usage, 130 Ctrl-C."""
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="warm calls of each rival, at most (default: %(default)s)")
    parser.add_argument("--budget", type=float, default=30, metavar="S", help="seconds of warm calls a case (default: %(default)s)")
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads of all rivals (default: torch's own choice)")
    parser.add_argument("--quick", action="store_true", help="one warm call, little probing: to see that it runs, not to measure")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured, raw values too")
    args = parser.parse_args(argv)
    if args.repeats < 1 or args.threads is not None and args.threads < 1:
        parser.error("--repeats and --threads must be at least 1")
    if args.quick:
        args.repeats = 1
    try:
        if args.threads is not None:
            torch.set_num_threads(args.threads)
        plain = {key: value for key, value in vars(args).items() if key not in ("json", "plot", "quick")}
        command = list(sys.argv[1:] if argv is None else argv)
        data = {"bench": name, "command": command, "arguments": plain, **run(args), "machine": machine(args.quick)}
        print(report(data), flush=True)
        if args.json is not None:
            write_whole(args.json, json.dumps(data, indent=1, default=str) + "\n")
        return 0
    except MinipsError as error:
        say(f"bench/{name}.py: error: {in_one_line(error)}")
        return 1
    except KeyboardInterrupt:
        say(f"\nbench/{name}.py: interrupted")
        return 130
