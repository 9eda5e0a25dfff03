"""What only a GPU can show, in under eight minutes: captured decode steps against eager ones, speeds against the card's bandwidth.

    python bench/gpu_check.py [--random 8b] [--only equality,decode,...] [--compile] [--out runs/gpu_check]
    python bench/gpu_check.py --dry-run                 # the whole plan on a CPU, with tiny sizes

Random weights made on the device; no download. Writes gpu_check.md and gpu_check.json into --out, after each part. A part that fails says
why, and the others go on; what the time (--seconds) leaves no room for is named. Exit code 0 if all checks held, 1 if not.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch
from gpu_edges import edges
from gpu_parts import PARTS as MAIN_PARTS
from gpu_parts import SMALL, Bench, Plan, release
from measure import grid, machine, say, write_whole
from models import SHAPES, Ids

from minips import MinipsError
from minips.errors import in_one_line

PARTS = (*MAIN_PARTS, edges)
NAMES = [part.__name__ for part in PARTS]


def facts(device: torch.device) -> dict:
    if device.type != "cuda":
        return {"name": "a CPU in place of a GPU (dry run)"}
    card = torch.cuda.get_device_properties(device)
    return {"name": card.name, "capability": f"{card.major}.{card.minor}", "memory_gb": card.total_memory / 1e9, "cuda": torch.version.cuda}


def run(args: argparse.Namespace) -> dict:
    device = torch.device("cpu" if args.dry_run else "cuda", None if args.dry_run else torch.cuda.current_device())
    plan = SMALL if args.dry_run else Plan(SHAPES[args.random], SHAPES["135m"])
    bench = Bench(device, plan, args.compile, Ids(plan.exact_shape["vocab_size"]))
    model = "tiny" if args.dry_run else f"random {args.random}"
    data = {
        "card": facts(device),
        "model": model,
        "machine": machine(args.dry_run),
        "arguments": vars(args) | {"out": str(args.out)},
        "parts": {},
    }
    started = time.perf_counter()
    for step in PARTS:
        name, mark = step.__name__, time.perf_counter()
        if name not in args.only and name != "bandwidth":
            continue
        if mark - started > args.seconds:
            found = {"left_out": f"after {mark - started:.0f} of {args.seconds} seconds"}
        else:
            say(f"== {name}")
            try:
                found = step(bench)
            except Exception as error:  # noqa: BLE001 - the other parts are to be measured all the same: a GPU may be lent for minutes
                found = {"failed": f"{type(error).__name__}: {in_one_line(error)}"}
                release(bench)
            found["wall"] = time.perf_counter() - mark
        for line in ("failed", "left_out"):
            if line in found:
                say(f"  {line}: {found[line]}")
        data["parts"][name] = found
        write_whole(args.out / "gpu_check.json", json.dumps(data, indent=1, default=str) + "\n")
        write_whole(args.out / "gpu_check.md", report(data))
    return data


# The page


def report(data: dict) -> str:
    """Everything as one page of Markdown."""
    card, found = data["card"], data["parts"]
    versions = ", ".join(f"{name} {number}" for name, number in data["machine"]["versions"].items())
    facts = ", ".join(
        f"{name} {value:.0f}" if isinstance(value, float) else f"{name} {value}" for name, value in card.items() if name != "name"
    )
    lines = [
        f"# GPU check: {card['name']}",
        f"{data['machine']['date']}; {facts or 'no card'}; {versions}; model {data['model']}.",
        verdict(data),
    ]
    for name, part in found.items():
        lines.append(f"## {name.capitalize()} ({part.get('wall', 0):.0f} s)")
        lines += [f"**{word}**: {part[word]}" for word in ("failed", "left_out") if word in part]
        lines += [WRITERS[name](part)] if not {"failed", "left_out"} & part.keys() else []
    return "\n\n".join(lines) + "\n"


def checks_of(data: dict) -> dict[str, bool]:
    """Every check, and every part that failed as one that did not hold."""
    found = {f"{name}: {what}": held for name, part in data["parts"].items() for what, held in part.get("checks", {}).items()}
    return found | {name: False for name, part in data["parts"].items() if "failed" in part}


def verdict(data: dict) -> str:
    checks = checks_of(data)
    broken = [what for what, held in checks.items() if not held]
    return f"{len(checks) - len(broken)} of {len(checks)} checks held" + (f"; **not: {', '.join(broken)}**" if broken else "") + "."


def check_line(part: dict) -> str:
    return "; ".join(f"{what}: {'yes' if held else '**NO**'}" for what, held in part["checks"].items()) + "."


def write_equality(part: dict) -> str:
    shares = ", ".join(f"{rows}: {share:.0%}" for rows, share in part["bf16_share"].items())
    ranked = ", ".join(f"{rows}: {share:.0%}" for rows, share in part["top_p_share"].items())
    return (
        f"Tokens of graphs and of eager steps in fp32: {check_line(part)}\n\n"
        f"The share before the first difference, by rows: {shares} in bf16; {ranked} in fp32 of the rows with top_p."
    )


def write_captures(part: dict) -> str:
    return f"{check_line(part)} {part['captures']} captures and their steps took {part['seconds']:.1f} s; memory grew by {part['grown_bytes']} bytes."


def write_steps(part: dict) -> str:
    rows = []
    for case in part["cases"]:
        steps = {name: values["median"] for name, values in case["steps"].items()}
        faster = f"{steps['eager'] / steps['graphs']:.2f}" if "eager" in steps else "-"
        rate = case["m"] / steps["graphs"]
        figures = [faster, f"{case['share']:.0%}", f"{steps['graphs'] * 1000:.3f}", f"{rate:.0f}", f"{case['gb_s']:.0f}"]
        rows.append([case.get("form", "bf16"), str(case["m"]), str(case["context"]), *figures])
    return grid(["form", "m", "context", "eager / graphs", "of the copy bandwidth", "ms a step", "tokens/s", "GB/s"], rows).rstrip()


def write_ttft(part: dict) -> str:
    rows = []
    for case in part["cases"]:
        seconds = {name: values["median"] for name, values in case["ttft"].items()}
        ratio = seconds["text"] / seconds["parallel"] if "text" in seconds else None
        share = [f"{ratio:.1f}", f"{case['limit']:.1f}", f"{ratio / case['limit']:.0%}"] if ratio else ["-", f"{case['limit']:.1f}", "-"]
        times = [f"{seconds[name] * 1000:.1f}" if name in seconds else "-" for name in ("parallel", "text")]
        rows.append([str(case["m"]), str(case["length"]), str(case["u"]), *share, *times])
    return grid(["m", "tokens a branch", "u", "text / parallel", "limit", "of it", "parallel, ms", "text, ms"], rows).rstrip()


def write_offload(part: dict) -> str:
    times = ", ".join(f"{name} {seconds * 1000:.0f} ms" for name, seconds in part["seconds"].items())
    return f"{check_line(part)} Decoding from all branches: {times}; {part['parked_bytes'] / 1e6:.1f} MB parked."


def write_forms(part: dict) -> str:
    lines = []
    for name, found in part["forms"].items():
        said = found.get("refused") or f"graphs as eager {found['graph_eager']:.0%}, tokens as bf16 {found['as_bf16']:.0%}"
        lines.append(f"- {name}: {said}")
    return "\n".join(lines) + "\n\n" + write_steps(part)


def write_edges(part: dict) -> str:
    chosen = ", ".join(f"{what}: {kernel}" for what, kernel in part["kernels"].items())
    return check_line(part) + (f" SDPA takes: {chosen}." if chosen else "")


WRITERS = {
    "bandwidth": lambda part: f"The card copies at {part['copy_gb_s']:.1f} GB/s (read and written).",
    "equality": write_equality,
    "captures": write_captures,
    "decode": write_steps,
    "ttft": write_ttft,
    "offload": write_offload,
    "forms": write_forms,
    "edges": write_edges,
}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dry-run", action="store_true", help="walk the whole plan on the CPU with tiny sizes")
    parser.add_argument("--random", choices=SHAPES, default="8b", help="size of the model whose speed is measured (default: %(default)s)")
    parser.add_argument("--only", default=",".join(NAMES), help="parts, with commas (default: all): %(default)s")
    parser.add_argument("--compile", action="store_true", help="compiled kernels inside the graphs")
    parser.add_argument("--seconds", type=float, default=450, help="no part starts later than this (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="folder for gpu_check.md and gpu_check.json (default: runs/gpu_check)")
    args = parser.parse_args(argv)
    args.out = args.out or Path("runs/gpu_check-dry" if args.dry_run else "runs/gpu_check")
    args.only = args.only.split(",")
    if unknown := [name for name in args.only if name not in NAMES]:
        parser.error(f"--only has {', '.join(unknown)}; the parts are {', '.join(NAMES)}")
    try:
        if not args.dry_run and not torch.cuda.is_available():
            raise MinipsError("there is no CUDA device; --dry-run walks the plan on a CPU")
        data = run(args)
        print(report(data), flush=True)
        say(f"{args.out / 'gpu_check.md'}: written; {verdict(data)}")
        return 0 if all(checks_of(data).values()) else 1
    except MinipsError as error:
        say(f"bench/gpu_check.py: error: {in_one_line(error)}")
        return 1
    except KeyboardInterrupt:
        say(f"\nbench/gpu_check.py: interrupted; the parts that are done stand in {args.out}")
        return 130


if __name__ == "__main__":
    sys.exit(main())
