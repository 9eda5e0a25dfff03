"""`python -m minips.generate TASK`: m workers explore a task together, a synthesizer answers from their KV caches."""

from __future__ import annotations

import argparse
import json
import os
import re
import secrets
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from .chat import default_prompt
from .command import command
from .config import DEFAULT_MODEL, SamplingParams
from .errors import MinipsError, brief, counted, in_one_line
from .screen import open_screen
from .workflow import ANSWER_SAMPLING, METHODS, WORKER_SAMPLING, complete, example_names, read_workflow, workers_of
from .workflow_checks import (
    MAX_WORKERS,
    MERGE_VALUES,
    check_engine_field,
    check_merge_field,
    check_object,
    check_sampling_field,
    check_text,
)

if TYPE_CHECKING:
    from .chat_loop import ChatSettings

MAX_STDIN = 16 << 20
WORKERS = 4
# Where the value of a flag goes in a workflow. What goes into `sampling` holds for every branch and turn.
PLACES = {
    "model": ["model"],
    "adapter": ["synthesizer.adapter"],
    "prompt": ["synthesizer.prompt"],
    "system": ["system"],
    "method": ["method"],
    "load_branches": ["load_branches"],
    "max_tokens": ["synthesizer.sampling.max_tokens"],
    "worker_tokens": ["sampling.max_tokens"],
    "temperature": ["sampling.temperature"],
    "top_p": ["sampling.top_p"],
    "top_k": ["sampling.top_k"],
    "min_p": ["sampling.min_p"],
    "repetition_penalty": ["sampling.repetition_penalty", "synthesizer.sampling.repetition_penalty"],
    "answer_temperature": ["synthesizer.sampling.temperature"],
    "seed": ["sampling.seed", "synthesizer.sampling.seed"],
    "stop": ["synthesizer.sampling.stop"],
    "device": ["engine.device"],
    "dtype": ["engine.dtype"],
    "kv_dtype": ["engine.kv_dtype"],
    "quantize": ["engine.quantize"],
    "compile": ["engine.compile"],
    "page_size": ["engine.page_size"],
    "max_kv_tokens": ["engine.max_kv_tokens"],
}


NOT_EMPTY = ("model", "adapter", "workflow", "save_branches", "load_branches")


class Parser(argparse.ArgumentParser):
    """Bad usage is one line and exit code 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"minips: error: {in_one_line(message)[:400]}; --help lists the arguments\n")


def seed(text: str) -> int:
    """A seed; `random` draws one."""
    return secrets.randbits(31) if text == "random" else int(text)


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m minips.generate",
        description="Several workers of one model explore a task in parallel; a synthesizer answers from their KV caches.",
        epilog="Exit code: 0 done, 1 refused or failed (one line on stderr), 2 bad usage, 130 interrupted.",
    )
    worker, answer = WORKER_SAMPLING, ANSWER_SAMPLING
    add = parser.add_argument
    add("task", metavar="TASK", nargs="?", help="the question or task; - reads it from standard input")
    add("--model", help=f"name, folder or hub id (default: {DEFAULT_MODEL})")
    add("--adapter", metavar="NAME", help="mapper and LoRA of the synthesizer: name, folder, hub id or none (default: the shipped one)")
    add("--workers", type=int, metavar="M", help=f"number of workers (default: {WORKERS}, or one for each --worker-prompt)")
    add("--worker-prompt", action="append", default=[], metavar="TEXT", help="what one worker is told besides the task; repeatable")
    add("--prompt", metavar="TEXT", help="what the synthesizer is asked (default: restates the task)")
    add("--system", metavar="TEXT", help="system text (default: the model's own)")
    add("--method", choices=METHODS, help="how the answer comes from the workers (default: parallel, from their KV caches)")
    add("--merge", action="append", default=[], metavar="NAME=VALUE", help="a merge option, e.g. layout=sequential; repeatable")
    add("--workflow", metavar="FILE", help=f"run a workflow: a JSON file, what --json printed, or {', '.join(example_names())}")
    add("--save-branches", metavar="DIR", help="write the workers' KV caches into a new folder before the synthesizer reads them")
    add("--load-branches", metavar="DIR", help="answer TASK or --prompt from such a folder instead of running workers")
    add("--print-workflow", action="store_true", help="print the workflow that the other arguments amount to, and stop")
    add("--interactive", action="store_true", help="a conversation: each question goes to the workers, the answer is remembered")
    add("--max-tokens", type=int, metavar="N", help=f"longest answer (default: {answer['max_tokens']})")
    add("--worker-tokens", type=int, metavar="N", help=f"longest worker output (default: {worker['max_tokens']})")
    add = parser.add_argument_group("sampling of the workers (the synthesizer is greedy unless --answer-temperature is set)").add_argument
    add("--temperature", type=float, metavar="T", help=f"0 is greedy (default: {worker['temperature']})")
    add("--top-p", type=float, metavar="P", help=f"default: {worker['top_p']}")
    add("--top-k", type=int, metavar="K", help="default: off")
    add("--min-p", type=float, metavar="P", help="default: off")
    penalty = answer["repetition_penalty"]
    add("--repetition-penalty", type=float, metavar="R", help=f"of workers and answer (default: off, and {penalty} for the answer)")
    add("--answer-temperature", type=float, metavar="T", help="default: greedy")
    add("--seed", type=seed, metavar="N", help=f"a number, or random (default: {worker['seed']})")
    add("--stop", action="append", metavar="TEXT", help="a string that ends the answer; repeatable")
    add = parser.add_argument_group("running").add_argument
    add("--device", help="auto, cpu or cuda")
    add("--dtype", help="auto (as stored), bfloat16, float16 or float32")
    add("--kv-dtype", help="of the KV cache: auto (as the weights), one of those, int8 or fp8")
    add("--quantize", choices=("none", "int8", "int4"), help="weights in fewer bits: faster steps (default: none)")
    add("--compile", action="store_const", const=True, help="compile the decoder layer and the merge first (seconds), for faster steps")
    add("--page-size", type=int, metavar="N", help="tokens a KV page")
    add("--max-kv-tokens", type=int, metavar="N", help="size of the KV cache in tokens (default: from free memory)")
    add("--json", action="store_true", help="print one JSON object instead of the answer")
    add("--quiet", action="store_true", help="no progress and no figures on stderr")
    return parser


# From flags to a workflow


def workflow_of(args: argparse.Namespace) -> dict:
    """The completed workflow that the arguments amount to."""
    check_arguments(args)
    if args.load_branches is not None:
        data, where = {}, "arguments"
        if args.prompt is None:
            data["synthesizer"] = {"prompt": default_prompt(read_task(args.task))}
    elif args.workflow is not None:
        data, where = read_workflow(args.workflow)
        synthesizer = data.get("synthesizer")
        if args.method not in (None, "parallel") and isinstance(synthesizer, dict):
            synthesizer.pop("adapter", None)  # to compare methods: the others use none
    else:
        prompts = args.worker_prompt
        branches = [{"prompt": text} for text in prompts] if prompts else [{"count": args.workers or WORKERS}]
        task = "-" if args.interactive else read_task(args.task)  # a conversation has its questions later
        data, where = {"prefix": task, "branches": branches}, "arguments"
    for name, places in PLACES.items():
        if (value := getattr(args, name)) is not None:
            value = None if (name, value) == ("adapter", "none") else value
            for place in places[-1:] if "load_branches" in data else places:  # of the answer alone where no worker runs
                put(data, place.split("."), value)
    for name, value in merge_options(args.merge).items():
        put(data, ["synthesizer", "merge", name], value)
    return complete(data, where)


def put(data: dict, path: list[str], value: object) -> None:
    """Set one field; of the workers' sampling also in place of what branches and turns say. What is no object is left to the check."""
    *parents, name = path
    target: object = data
    for parent in parents:
        target = target.setdefault(parent, {}) if isinstance(target, dict) else None
    if isinstance(target, dict):
        target[name] = value
    branches = data.get("branches")
    for branch in branches if parents == ["sampling"] and isinstance(branches, list) else ():
        turns = branch.get("turns") if isinstance(branch, dict) else None
        for part in (branch, *(turns if isinstance(turns, list) else ())):
            if isinstance(part, dict) and isinstance(part.get("sampling"), dict):
                part["sampling"].pop(name, None)


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def check_arguments(args: argparse.Namespace) -> None:
    """Refuse what is wrong with the flags themselves, by the flag's name."""
    for name, value in vars(args).items():
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str):
                check_text(text, "TASK" if name == "task" else flag(name), empty=name not in NOT_EMPTY)
    for name, places in PLACES.items():
        value, (group, _, field) = getattr(args, name), places[0].rpartition(".")
        if value is not None and group in ("sampling", "synthesizer.sampling", "engine"):
            (check_engine_field if group == "engine" else check_sampling_field)(field, value, flag(name))
    if args.workers is not None and not 1 <= args.workers <= MAX_WORKERS:
        raise MinipsError(f"--workers is {args.workers}, expected from 1 to {MAX_WORKERS}")
    if args.worker_prompt and args.workers not in (None, len(args.worker_prompt)):
        given = counted(len(args.worker_prompt), "time")
        raise MinipsError(f"--workers is {args.workers}, but --worker-prompt was given {given}")
    workers_say = ("workers", "worker_prompt", "worker_tokens", "temperature", "top_p", "top_k", "min_p", "system")
    together = {
        "--workflow": (args.workflow is not None, ("task", "workers", "worker_prompt"), "the workflow says it"),
        "--interactive": (
            args.interactive,
            ("task", "prompt", "workflow", "json", "print_workflow", "save_branches"),
            "a conversation has none",
        ),
        "--load-branches": (args.load_branches is not None, ("workflow", "interactive", "save_branches", *workers_say), "no workers run"),
        "--print-workflow": (args.print_workflow, ("save_branches",), "nothing is run"),
        "--json": (args.json, ("print_workflow",), "one of the two is printed"),
    }
    for name, (given, others, reason) in together.items():
        for other in others if given else ():
            if getattr(args, other) not in (None, []) and getattr(args, other) is not False:  # 0 is a value
                raise MinipsError(f"{name} and {'TASK' if other == 'task' else flag(other)} cannot be combined: {reason}")
    if args.interactive and args.method not in (None, "parallel"):
        raise MinipsError(f"--interactive answers by method parallel only, found --method {args.method}")
    if args.load_branches is not None and (args.task is None) == (args.prompt is None):
        found = "neither" if args.task is None else "both"
        raise MinipsError(f"--load-branches needs a TASK, which is restated, or --prompt, which is put as it is; {found} was given")
    if args.save_branches is not None:
        check_new_folder(args.save_branches, "--save-branches")
    if args.adapter not in (None, "none") and args.method not in (None, "parallel"):
        raise MinipsError(f"--adapter is given, but --method {args.method} uses none")


def check_new_folder(name: str, where: str) -> None:
    """Refuse before the run what could not be written after it."""
    try:
        if os.path.lexists(name):
            raise MinipsError(f"{where} {brief(name)}: exists already, expected a new folder")
        os.stat(name)  # for names that cannot be: too long, or with a NUL in them
    except (FileNotFoundError, NotADirectoryError):
        pass
    except MinipsError:
        raise
    except (OSError, ValueError) as error:
        raise MinipsError(f"{where} {brief(name)}: cannot be made ({getattr(error, 'strerror', None) or error})") from None
    parent = next(folder for folder in Path(name).absolute().parents if os.path.lexists(folder))
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise MinipsError(f"{where} {brief(name)}: cannot be made, {brief(str(parent))} is no folder that can be written to")


def merge_options(given: Sequence[str]) -> dict[str, object]:
    """The options of --merge NAME=VALUE, checked."""
    options: dict[str, object] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals:
            raise MinipsError(f"--merge is {text!r}, expected NAME=VALUE")
        try:
            options[name] = json.loads(value)
        except (ValueError, RecursionError):
            options[name] = value
        check_object({name: None}, "--merge", MERGE_VALUES)
        check_merge_field(name, options[name], f"--merge {name}")
    return options


def read_task(task: str) -> str:
    """TASK itself, or standard input where it is `-`."""
    what = "TASK"
    if task == "-":
        what = "TASK (read from standard input)"
        try:
            content = sys.stdin.buffer.read(MAX_STDIN + 1)
        except (AttributeError, OSError, ValueError):
            raise MinipsError("TASK is -, but standard input is closed or cannot be read") from None
        if len(content) > MAX_STDIN:
            raise MinipsError(f"{what} is larger than {MAX_STDIN >> 20} MiB")
        try:
            task = content.decode("utf-8-sig").strip()
        except UnicodeDecodeError as error:
            raise MinipsError(f"{what} is no UTF-8 text (byte {error.start})") from None
    if not task.strip():
        raise MinipsError(f"{what} is empty")
    return task


# Running


def run(args: argparse.Namespace) -> int:
    """Carry out parsed arguments; the answer goes to stdout, everything else to stderr."""
    data = workflow_of(args)
    if args.save_branches is not None and "load_branches" in data:
        raise MinipsError("--save-branches: the workflow loads branches, so no workers run whose caches could be saved")
    if args.print_workflow:
        print_json(data)
        return 0
    with open_screen(quiet=args.quiet, answer=not args.json) as screen:
        warnings.showwarning = lambda message, *_, **__: screen.say(f"minips: warning: {message}")
        with ends_at_once_on_ctrl_c():
            from .running import load, run_workflow

        engine, synthesizer = load(data, screen, progress=not args.quiet)
        if args.interactive:
            from .chat_loop import chat

            return chat(engine, synthesizer, chat_settings(data, args), screen)
        outcome = run_workflow(engine, synthesizer, data, screen, args.save_branches)
    if args.json:
        from .record import record

        print_json(record(engine, synthesizer, data, outcome))
    return 0


@contextmanager
def ends_at_once_on_ctrl_c() -> Iterator[None]:
    """For the import of torch, which takes seconds and now and then swallows the exception that Ctrl-C raises."""

    def end(*_: object) -> None:
        os.write(2, b"\nminips: interrupted\n")
        os._exit(130)

    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler or threading.current_thread() is not threading.main_thread():
        yield  # somebody else's handler stays
        return
    signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def chat_settings(data: dict, args: argparse.Namespace) -> ChatSettings:
    """The settings of a conversation, from the workflow that each of its questions amounts to."""
    from .chat_loop import ChatSettings

    workers = workers_of(data)
    params, answer = SamplingParams(**data["sampling"]), SamplingParams(**data["synthesizer"]["sampling"])
    return ChatSettings(len(workers), tuple(args.worker_prompt), params, answer, data["system"])


def print_json(data: dict) -> None:
    """One object on stdout, indented, lists of numbers on one line; in ASCII where stdout cannot write the rest."""
    ascii_only = not (sys.stdout.encoding or "").lower().startswith("utf")
    text = json.dumps(data, ensure_ascii=ascii_only, indent=2)
    print(re.sub(r"\[\n\s+[-\d.,\s]+\]", lambda found: " ".join(found[0].split()).replace("[ ", "[").replace(" ]", "]"), text), flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0 done, 1 refused or failed (one line), 2 bad usage, 130 Ctrl-C. argv None: the process ends with this call."""
    return command(argv, lambda: parse_and_run(argv))


def parse_and_run(argv: Sequence[str] | None) -> int:
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.task is None and args.workflow is None and args.load_branches is None and not args.interactive:
        parser.error("TASK is missing")
    if sys.stdout is None:
        parser.exit(1, "minips: error: standard output is closed, so the answer has nowhere to go\n")
    return run(args)


if __name__ == "__main__":
    sys.exit(main())
