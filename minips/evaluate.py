"""`python -m minips.evaluate`: tasks by methods on shared branches, sweeps over m, the self-check, and the report of a run."""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from .command import command, require_matplotlib
from .config import DEFAULT_MODEL
from .errors import MinipsError

if TYPE_CHECKING:
    from .evaluation.runner import Plan

DEFAULT_METHODS = "parallel,text"
DEFAULT_OUT = "runs/evaluation"


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m minips.evaluate",
        description="Compare ways to merge workers' findings: every method reads the same branches, so all comparisons are paired.",
        epilog="A run is resumed by the same command; rows that are there are not done again.",
    )
    add = parser.add_argument
    add("--task", metavar="NAME[,NAME]", help="tasks; see --list")
    add("--method", default=DEFAULT_METHODS, metavar="NAME[,NAME]", help="methods, NAME or NAME@ADAPTER; see --list (default: %(default)s)")
    add("--model", default=DEFAULT_MODEL, help="name, folder or hub id (default: %(default)s)")
    add("--adapter", metavar="NAME", help="adapter of method parallel (default: base weights)")
    add("--workers", default="4", metavar="M[,M]", help="numbers of workers; several make a sweep (default: %(default)s)")
    add("--data", metavar="DIR", help="the data folder (default: the hub's originals)")
    add("--rows", type=int, metavar="N", help="rows of each task, drawn with --seed (default: all)")
    add("--held-out", action="store_true", help="only the rows that the training recipes leave out")
    add("--out", default=DEFAULT_OUT, metavar="DIR", help="folder of the run (default: %(default)s)")
    add("--scoring", default="minips", help="minips, or official for the paper's released rules (default: %(default)s)")
    add("--list", action="store_true", help="list tasks and methods, and stop")
    add("--quiet", action="store_true", help="no progress on stderr")
    running = parser.add_argument_group("running")
    add = running.add_argument
    add("--seed", type=int, default=0, help="default: %(default)s")
    add("--temperature", type=float, default=0.7, help="of the workers (default: %(default)s); the answer is greedy")
    add("--top-p", type=float, default=0.95, help="of the workers (default: %(default)s)")
    add("--worker-tokens", type=int, metavar="N", help="longest worker output (default: the task's own)")
    add("--answer-tokens", type=int, metavar="N", help="longest answer (default: the task's own)")
    add("--batch", type=int, default=8, metavar="N", help="examples at a time (default: %(default)s)")
    add("--device", default="auto", help="auto, cpu or cuda")
    add("--dtype", default="auto", help="auto (as stored), bfloat16, float16 or float32")
    add("--require-isolation", action="store_true", help="refuse tasks that run code unless every guard of the sandbox holds")
    more = parser.add_argument_group("beside the rows, each kept in --out for the report")
    add = more.add_argument
    add(
        "--self-check",
        action="store_true",
        help="merged caches against the plain sequence: KL and top-1 agreement; exit code 1 if a mark is missed",
    )
    add("--timing", metavar="L[,L]", help="TTFT, end to end and memory for each m of --workers and L tokens a branch")
    add("--attention", action="store_true", help="attention shares by layer for each m of --workers, on the first task")
    add("--judge", action="store_true", help="score the answers of --out anew (after a change of the rules) and write the report")
    add("--report", action="store_true", help="only write the report of --out anew, from what is there")
    add("--plot", action="store_true", help="also write PNGs (needs matplotlib)")
    return parser


def numbers(text: str, flag: str) -> tuple[int, ...]:
    """A comma-separated list of positive integers."""
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise MinipsError(f"{flag} is {text!r}, expected positive integers with commas between them")
    return found


def names(text: str | None) -> tuple[str, ...]:
    return tuple(part.strip() for part in (text or "").split(",") if part.strip())


def run(args: argparse.Namespace) -> int:
    """Carry out parsed arguments."""

    def say(text: str) -> None:
        if not args.quiet:
            print(text, file=sys.stderr, flush=True)

    if args.list:
        return show_list()
    folder = Path(args.out)
    if args.plot:
        require_matplotlib()
    if args.report:
        return write_out(folder, args.plot)
    workers = numbers(args.workers, "--workers")
    lengths = numbers(args.timing, "--timing") if args.timing else ()
    tasks = names(args.task)
    if not (tasks or args.self_check or lengths):
        raise MinipsError("nothing to do: give --task NAME, --self-check, --timing or --report (--list shows the tasks)")
    if args.attention and not tasks:
        raise MinipsError("--attention needs a --task whose rows it can read")
    plan = plan_of(args, tasks, workers)
    if tasks:
        plan.check()
        report_isolation(tasks, args.require_isolation, say)
    if args.judge:
        from .evaluation.runner import judge_again

        say(f"judged {judge_again(plan, folder)} rows")
        return write_out(folder, args.plot)
    from .engine import Engine

    dtype = "float32" if args.self_check and args.dtype == "auto" and not tasks and not lengths else args.dtype

    @cache
    def engine() -> Engine:
        made = Engine.from_pretrained(args.model, device=args.device, dtype=dtype, progress=not args.quiet)
        say(f"{args.model}: {str(made.dtype).removeprefix('torch.')} on {made.device}")
        return made

    code = 0
    if tasks:
        from .evaluation.runner import evaluate

        evaluate(plan, folder, engine, say=say)
    if args.self_check:
        code = check(engine(), args, workers, folder, say)
    if lengths:
        from .evaluation.sweep import timing_sweep

        entries = timing_sweep(engine(), args.adapter, workers=workers, lengths=lengths, seed=args.seed, say=say)
        write_json(folder / "sweep.json", entries)
    if args.attention:
        from .evaluation.attention_share import attention_sweep
        from .evaluation.runner import load_examples

        write_json(folder / "attention.json", attention_sweep(engine(), plan, lambda m: load_examples(plan, tasks[0], m), say))
    return write_out(folder, args.plot) or code


def plan_of(args: argparse.Namespace, tasks: tuple[str, ...], workers: tuple[int, ...]) -> Plan:
    from .evaluation.runner import Plan

    return Plan(
        tasks=tasks,
        methods=names(args.method),
        data=args.data,
        model=args.model,
        adapter=args.adapter,
        workers=workers,
        rows=args.rows,
        held_out=args.held_out,
        seed=args.seed,
        temperature=args.temperature,
        top_p=args.top_p,
        worker_tokens=args.worker_tokens,
        answer_tokens=args.answer_tokens,
        scoring=args.scoring,
        batch=args.batch,
    )


def report_isolation(tasks: Sequence[str], required: bool, say) -> None:
    """Say which guards of the sandbox hold, where a task runs code; refuse where one is missing and all are required."""
    from .evaluation.tasks import task

    if not any(task(name).runs_code for name in tasks):
        return
    from .evaluation.sandbox import missing_isolation

    missing = missing_isolation()
    if missing and required:
        raise MinipsError(f"--require-isolation: this system lacks {', '.join(missing)} for running model-written code")
    say(f"sandbox for model-written code: {'without ' + ', '.join(missing) if missing else 'every guard holds'}")


def check(engine, args: argparse.Namespace, workers: tuple[int, ...], folder: Path, say) -> int:
    """The self-check: one line a case on stdout, kept as self_check.json; 1 where a mark is missed."""
    from .evaluation.self_check import self_check

    several = tuple(m for m in workers if m > 1) if args.workers != "4" else (2, 4, 8)
    cases = self_check(engine, args.adapter, rows=args.rows or 4, workers=several, seed=args.seed)
    for case in cases:
        verdict = "ok" if case.passed else "FAILED"
        print(
            f"{case.name:<28} mean KL {case.kl_mean:.3g} (expected {case.bound} {case.mark:g}), largest {case.kl_max:.3g}, "
            f"top-1 {case.top1:.1%} of {case.positions} positions: {verdict}"
        )
    entries = [{**asdict(case), "passed": case.passed} for case in cases]
    write_json(folder / "self_check.json", {"model": args.model, "adapter": args.adapter, "cases": entries})
    return 0 if all(case.passed for case in cases) else 1


def write_json(path: Path, data: object) -> None:
    from .files import write_beside

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MinipsError(f"{path.parent}: cannot be made ({error.strerror})") from None
    write_beside(path, json.dumps(data, indent=1) + "\n")


def write_out(folder: Path, plot: bool) -> int:
    """Plots first, for the report shows those that are there."""
    from .evaluation.report import write_report

    if plot:
        from .evaluation.plots import write_plots

        for path in write_plots(folder):
            print(path)
    for path in write_report(folder):
        print(path)
    return 0


def show_list() -> int:
    from .evaluation.methods import METHODS
    from .evaluation.tasks import TASKS

    print("tasks (metric; default number of workers):")
    for item in TASKS.values():
        print(f"  {item.name:<24} {item.metric:<9} {item.workers:>2}")
        print(textwrap.fill(item.source, 100, initial_indent=" " * 6, subsequent_indent=" " * 6))
    print("methods:")
    for name, (_, about) in METHODS.items():
        print(f"  {name:<24} {about}")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0 done, 1 refused or a mark missed, 2 bad usage, 130 Ctrl-C."""
    return command(argv, lambda: run(build_parser().parse_args(argv)), again="the same command goes on from here")


if __name__ == "__main__":
    sys.exit(main())
