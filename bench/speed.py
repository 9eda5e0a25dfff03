"""Everything that bench/RESULTS.md says about speed and memory, in one command of about 25 minutes on two CPU cores.

    python bench/speed.py [--only ttft,decode,...] [--again] [--out runs/speed] [--quick]

Each step is a bench of this folder in a process of its own; what it measured stays in --out, and a step that is there already with the same
arguments is not run again. At the end the section "Speed" of bench/RESULTS.md is written anew from what the folder holds. Steps that are
not run unless named: the larger random models. --quick runs small forms of all steps and leaves RESULTS.md alone.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shlex
import subprocess
import sys
from pathlib import Path

from measure import grid, say, write_whole
from ttft import POINTS
from verdicts import verdicts

from minips import MinipsError
from minips.errors import in_one_line

HERE = Path(__file__).parent
RESULTS, PLOTS = HERE / "RESULTS.md", HERE / "plots"
START, END = "<!-- speed: written by bench/speed.py -->", "<!-- speed: end -->"
LONG = ["--random", "135m", "--max-positions", "20480"]
KINDS = "low_rank,none,affine,linear,normalize"
STEPS = {  # name: (title, bench, arguments)
    "ttft": ("Time to first token, SmolLM2-135M", "ttft", ["--lengths", "512,1024", "--budget", "45"]),
    "ttft-2048": (
        "Time to first token, the same shape with random weights and a longer position limit",
        "ttft",
        [*LONG, "--lengths", "2048", "--methods", "parallel,text,transformers", "--budget", "95"],
    ),
    "ttft-4096": ("The same at 4 x 4096 tokens", "ttft", [*LONG, "--lengths", "4096", "--methods", "parallel,text", "--budget", "20"]),
    "mappers": (
        "Re-rotation and mapping by mapper kind",
        "ttft",
        ["--lengths", "512,1536", "--methods", "parallel,official", "--mappers", KINDS, "--budget", "10"],
    ),
    "mappers-compiled": (
        "The same through compiled kernels",
        "ttft",
        ["--compile", "--lengths", "512,1536", "--methods", "parallel,official", "--mappers", KINDS, "--budget", "10"],
    ),
    "ttft-compiled": (
        "Time to first token, compiled kernels",
        "ttft",
        ["--compile", "--lengths", "512,1024", "--methods", "parallel,text", "--budget", "40"],
    ),
    "ttft-m": (
        "Time to first token by number of branches",
        "ttft",
        ["--workers", "2,8,16,32", "--lengths", "128", "--methods", "parallel,text,official", "--budget", "8"],
    ),
    "ttft-growth": (
        "How the parallel TTFT grows",
        "ttft",
        ["--lengths", "128,512,1536", "--prompt-tokens", "32,128,512", "--methods", "parallel", "--fit", "--budget", "4"],
    ),
    "decode": ("Decoding and prefill against transformers, bf16", "decode", ["--budget", "15"]),
    "decode-compiled": ("Decoding through compiled layers", "decode", ["--compile", "--prefill", "512", "--budget", "12"]),
    "decode-int4-compiled": (
        "int4 weights, compiled layers",
        "decode",
        ["--quantize", "int4", "--compile", "--workers", "1,4", "--prefill", "512", "--budget", "8"],
    ),
    "decode-int4": ("int4 weights", "decode", ["--quantize", "int4", "--workers", "1,4", "--prefill", "512", "--budget", "10"]),
    "decode-int8": (
        "int8 weights",
        "decode",
        ["--quantize", "int8", "--workers", "1,4", "--prefill", "512", "--budget", "5", "--no-rival"],
    ),
    "int4": ("What int4 weights change", "divergence", ["--quantize", "int4"]),
    "int8": ("What int8 weights change", "divergence", ["--quantize", "int8"]),
    "decode-growth": ("How a decode step grows", "decode", ["--growth", "--budget", "12"]),
    "end-to-end": ("Workers and synthesis together", "end_to_end", ["--repeats", "2", "--budget", "120"]),
    "straggler": ("Workers of different lengths", "end_to_end", ["--spread", "0.5", "--worker-tokens", "64", "--repeats", "1"]),
    "memory": ("Memory", "memory", []),
    "memory-compiled": ("Memory, compiled kernels", "memory", ["--compile"]),
}
EXTRA = {
    "ttft-1b": ("Time to first token, Llama-3.2-1B shapes", "ttft", ["--random", "1b", "--lengths", "256", "--no-rival"]),
    "decode-1b": (
        "Decoding, Llama-3.2-1B shapes",
        "decode",
        ["--random", "1b", "--workers", "1,4", "--context", "128", "--prefill", "128"],
    ),
    "ttft-3b": ("Time to first token, Llama-3.2-3B shapes", "ttft", ["--random", "3b", "--lengths", "128", "--no-rival"]),
    "ttft-8b": ("Time to first token, Llama-3.1-8B shapes", "ttft", ["--random", "8b", "--lengths", "64", "--no-rival"]),
}
SMALL = {  # of --quick, in place of or beside a step's own arguments
    "ttft": ["--lengths", "32,64", "--prompt-tokens", "8,16"],
    "decode": ["--context", "32", "--tokens", "3", "--prefill", "32"],
    "end_to_end": ["--worker-tokens", "6", "--answer-tokens", "2"],
    "memory": ["--workers", "2", "--lengths", "32"],
    "divergence": ["--positions", "8"],
}


def arguments_of(name: str, quick: bool) -> list[str]:
    _, bench, own = (STEPS | EXTRA)[name]
    return [*own, *SMALL[bench], "--quick"] if quick else list(own)


def is_done(path: Path, arguments: list[str]) -> bool:
    """Whether the step's file is there and was made with these arguments."""
    try:
        command = json.loads(path.read_text())["command"]
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return command[: len(arguments)] == arguments and command[len(arguments) : len(arguments) + 1] == ["--json"]


def run_step(name: str, out: Path, quick: bool, again: bool) -> bool:
    """Run one step unless it is there; False where it failed (its own line says why)."""
    bench, arguments, path = (STEPS | EXTRA)[name][1], arguments_of(name, quick), out / f"{name}.json"
    if not again and is_done(path, arguments):
        say(f"== {name}: is there already")
        return True
    say(f"== {name}: bench/{bench}.py {shlex.join(arguments)}")
    command = [sys.executable, str(HERE / f"{bench}.py"), *arguments, "--json", str(path)]
    code = subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode
    if code == 130:
        raise KeyboardInterrupt
    return code == 0


def read(path: Path) -> dict | None:
    try:
        return json.loads(path.read_text()) if path.exists() else None
    except (OSError, ValueError) as error:
        raise MinipsError(f"{path}: not readable as JSON ({error}); remove it and run the step again") from None


def section(out: Path, quick: bool) -> str:
    """The text between the marks: what was asked for and what came out, then every step's tables."""
    found = {name: data for name in (*STEPS, *EXTRA) if (data := read(out / f"{name}.json")) is not None}
    if not found:
        raise MinipsError(f"{out}: holds no step, so there is nothing to write")
    parts = [
        f"{START}\n## Speed and memory\n",
        f"`python bench/speed.py`; medians of calls in turns, in one process for each table. {POINTS}\n",
    ]
    if rows := verdicts(found):
        parts.append(grid(["what", "measured", "mark", "held"], rows))
    if not quick and (bars := ttft_bars(found)) is not None:
        from plots import write_ttft_plot

        write_ttft_plot(PLOTS / "ttft.png", bars)
        parts.append("![Time to first token: published, ours, limit](plots/ttft.png)\n")
    for name, data in found.items():
        title, bench, _ = (STEPS | EXTRA)[name]
        command = shlex.join([f"bench/{bench}.py", *data["command"][: data["command"].index("--json")]])
        parts.append(f"### {title}\n\n`python {command}`\n")
        parts.append(importlib.import_module(bench).report(data))
    return "\n".join(parts).rstrip() + f"\n{END}"


def ttft_bars(found: dict) -> dict | None:
    """The cases of the TTFT steps as one, for the plot; None without matplotlib or without a case."""
    cases = [case for name in ("ttft", "ttft-2048", "ttft-4096") if name in found for case in found[name]["cases"]]
    if importlib.util.find_spec("matplotlib") is None or not cases:
        return None
    return {"model": {"name": "SmolLM2-135M shapes, two CPU cores"}, "cases": cases}


def replace_section(text: str, new: str) -> str:
    """`text` with the part between the marks replaced, or with it at the end."""
    before, _, rest = text.partition(START)
    after = rest.partition(END)[2] if rest else ""
    return before.rstrip() + "\n\n" + new + (after or "\n")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help=f"steps, with commas; none only writes the section. Steps: {', '.join((*STEPS, *EXTRA))}")
    parser.add_argument("--again", action="store_true", help="measure also what is there already")
    parser.add_argument("--out", type=Path, help="where measurements are kept (default: runs/speed, with --quick runs/speed-quick)")
    parser.add_argument("--quick", action="store_true", help="small forms, to see that everything runs; the section goes to --out")
    args = parser.parse_args(argv)
    names = list(STEPS) if args.only is None else [name for name in args.only.split(",") if name != "none"]
    if unknown := [name for name in names if name not in STEPS | EXTRA]:
        parser.error(f"--only has {', '.join(unknown)}; the steps are {', '.join((*STEPS, *EXTRA))}")
    out = args.out or Path("runs/speed-quick" if args.quick else "runs/speed")
    try:
        failed = [name for name in names if not run_step(name, out, args.quick, args.again)]
        target = out / "RESULTS.md" if args.quick else RESULTS
        write_whole(target, replace_section(target.read_text() if target.exists() else "", section(out, args.quick)))
        say(f"{target}: written" + (f"; failed: {', '.join(failed)}" if failed else ""))
        return 1 if failed else 0
    except MinipsError as error:
        say(f"bench/speed.py: error: {in_one_line(error)}")
        return 1
    except KeyboardInterrupt:
        say("\nbench/speed.py: interrupted; the steps that are done stay")
        return 130


if __name__ == "__main__":
    sys.exit(main())
