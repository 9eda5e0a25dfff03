"""`python -m minips.generate TASK`: m workers explore a task together, a synthesizer answers from their KV caches."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from .config import DEFAULT_MODEL, SamplingParams
from .errors import MinipsError
from .results import Result, TextStream, WorkerOutput

if TYPE_CHECKING:  # torch is loaded in `run`, behind the checks of the arguments
    from .engine import Engine
    from .kv_cache import Branch

METHODS = ("parallel", "text")
PROGRESS_SECONDS = 5.0
ANSWER_PENALTY = 1.05  # small models loop in long greedy answers; a light touch is enough


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m minips.generate",
        description="Several workers of one model explore a task in parallel; a synthesizer answers from their KV caches.",
    )
    add = parser.add_argument
    add("task", metavar="TASK", help="the question or task")
    add("--model", default=DEFAULT_MODEL, help="name, folder or hub id (default: %(default)s)")
    add("--adapter", metavar="NAME", help="mapper and LoRA of the synthesizer: name, folder or hub id (default: base weights)")
    add("--workers", type=int, metavar="M", help="number of workers (default: 4, or one for each --worker-prompt)")
    add("--worker-prompt", action="append", default=[], metavar="TEXT", help="what one worker is told besides the task; repeatable")
    add("--prompt", metavar="TEXT", help="what the synthesizer is asked (default: restates the task)")
    add("--system", metavar="TEXT", help="system text (default: the model's own)")
    add("--method", choices=METHODS, default="parallel", help="parallel reads KV caches, text prefills the workers' text again")
    add("--max-tokens", type=int, default=256, metavar="N", help="longest answer (default: %(default)s)")
    add("--worker-tokens", type=int, default=256, metavar="N", help="longest worker output (default: %(default)s)")
    sampling = parser.add_argument_group("sampling of the workers (the synthesizer is greedy unless --answer-temperature is set)")
    add = sampling.add_argument
    add("--temperature", type=float, default=0.7, help="default: %(default)s; 0 is greedy")
    add("--top-p", type=float, default=0.95, help="default: %(default)s")
    add("--top-k", type=int, default=0, help="default: off")
    add("--min-p", type=float, default=0.0, help="default: off")
    add("--repetition-penalty", type=float, help=f"of workers and answer (default: off for workers, {ANSWER_PENALTY} for the answer)")
    add("--answer-temperature", type=float, default=0.0, help="default: greedy")
    add("--seed", type=int, default=0, help="default: %(default)s")
    add("--stop", action="append", default=[], metavar="TEXT", help="a string that ends the answer; repeatable")
    running = parser.add_argument_group("running")
    add = running.add_argument
    add("--device", default="auto", help="auto, cpu or cuda")
    add("--dtype", default="auto", help="auto (as stored), bfloat16, float16 or float32")
    add("--page-size", type=int, help="tokens a KV page")
    add("--max-kv-tokens", type=int, help="size of the KV cache in tokens (default: from free memory)")
    add("--json", action="store_true", help="print one JSON object instead of the answer")
    add("--quiet", action="store_true", help="no progress and no figures on stderr")
    return parser


def worker_prompts(args: argparse.Namespace) -> list[str]:
    """One prompt a worker; --workers must agree with the number of --worker-prompt where both are given."""
    given = args.worker_prompt
    if args.workers is not None and args.workers < 1:
        raise MinipsError(f"--workers is {args.workers}, expected at least 1")
    if given and args.workers not in (None, len(given)):
        raise MinipsError(f"--workers is {args.workers}, but --worker-prompt was given {len(given)} times")
    return given or [""] * (args.workers or 4)


def run(args: argparse.Namespace) -> int:
    """Carry out parsed arguments; the answer goes to stdout, everything else to stderr."""

    def say(text: str) -> None:
        if not args.quiet:
            print(text, file=sys.stderr, flush=True)

    if not args.task.strip():
        raise MinipsError("TASK is empty")
    check_text(args)
    prompts = worker_prompts(args)
    penalty = args.repetition_penalty
    worker_params = SamplingParams(
        max_tokens=args.worker_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        min_p=args.min_p,
        repetition_penalty=1.0 if penalty is None else penalty,
        seed=args.seed,
    )
    params = SamplingParams(
        max_tokens=args.max_tokens,
        temperature=args.answer_temperature,
        repetition_penalty=ANSWER_PENALTY if penalty is None else penalty,
        seed=args.seed,
        stop=args.stop,
    )

    from .chat import default_prompt, text_prompt
    from .engine import Engine
    from .synthesis import Synthesizer

    prompt = args.prompt if args.prompt is not None else default_prompt(args.task)
    started = time.perf_counter()
    engine = Engine.from_pretrained(
        args.model,
        device=args.device,
        dtype=args.dtype,
        page_size=args.page_size,
        max_kv_tokens=args.max_kv_tokens,
        progress=not args.quiet,
    )
    count = sum(parameter.numel() for parameter in engine.model.parameters())
    dtype = str(engine.dtype).removeprefix("torch.")
    say(f"{args.model}: {count / 1e6:.0f}M parameters, {dtype} on {engine.device}, loaded in {time.perf_counter() - started:.1f} s")
    synthesizer = Synthesizer(engine, args.adapter)
    if args.adapter:
        kind = synthesizer.mapper.config.kind if synthesizer.mapper is not None else "none"
        say(f"adapter {args.adapter}: mapper {kind}, {len(synthesizer.adapter.lora.pairs) if synthesizer.adapter.lora else 0} LoRA modules")
    synthesizer.check_room(args.task, prompts, prompt, worker_params, params, system=args.system)
    with engine.prefill(args.task, system=args.system) as prefix:
        branches = decode_workers(engine, prefix, prompts, worker_params, say)
        workers = [WorkerOutput.of(branch) for branch in branches]
        try:
            if args.method == "text":
                asked = text_prompt(args.task, [worker.text for worker in workers], prompt)
                stream = engine.stream(asked, params, system=args.system)
            else:
                stream = synthesizer.stream_from_caches(branches, prompt, params)
            result = show_answer(stream, args.json)
        finally:
            for branch in branches:
                branch.close()
    result.workers = workers
    if args.json:
        ascii_only = not (sys.stdout.encoding or "").lower().startswith("utf")
        print(json.dumps(describe(args, result, prompt, worker_params, params), ensure_ascii=ascii_only, indent=2))
    say(figures(args.method, result))
    return 0


def check_text(args: argparse.Namespace) -> None:
    """Refuse arguments that are no valid text (bytes that the terminal's encoding does not know)."""
    for name, value in vars(args).items():
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str) and any(0xD800 <= ord(character) < 0xE000 for character in text):
                raise MinipsError(f"{'TASK' if name == 'task' else '--' + name.replace('_', '-')} is not valid text: {ascii(text)[:60]}")


def decode_workers(
    engine: Engine, prefix: Branch, prompts: Sequence[str], params: SamplingParams, say: Callable[[str], None]
) -> list[Branch]:
    """Fork and decode the workers in one batch; a sign of life every few seconds, then one line for each worker."""
    branches = engine.fork(prefix, prompts)
    say(f"{len(branches)} workers, {prefix.num_tokens} tokens of shared prefix, up to {params.max_tokens} tokens each")
    started = last = time.perf_counter()
    made = 0

    def progress(row: int, token: int | None, text: str) -> None:
        nonlocal made, last
        made += token is not None
        now = time.perf_counter()
        if now - last > PROGRESS_SECONDS:
            say(f"  {made} tokens after {now - started:.0f} s, {made / (now - started):.0f} tokens/s")
            last = now

    engine.decode(branches, params, on_token=progress)
    seconds = time.perf_counter() - started
    for index, branch in enumerate(branches):
        tail = " ".join(branch.text.split())
        tail = tail if len(tail) <= 70 else tail[:67] + "..."
        say(f"  worker {index + 1}: {len(branch.output_ids)} tokens ({branch.finish_reason})  {tail}")
    total = sum(len(branch.output_ids) for branch in branches)
    say(f"  together {total} tokens in {seconds:.1f} s, {total / seconds:.0f} tokens/s")
    return branches


def show_answer(stream: TextStream, silent: bool) -> Result:
    """Print the pieces as they come."""
    for piece in stream:
        if not silent:
            print(piece, end="", flush=True)
    if not silent:
        print(flush=True)
    return stream.result


def figures(method: str, result: Result) -> str:
    """The one line of figures."""
    tokens, decode = len(result.token_ids), result.timings["decode"]
    rate = f", {(tokens - 1) / decode:.0f} tokens/s" if tokens > 1 and decode > 0 else ""
    reused = f"{result.reused_tokens} read from the cache, not prefilled again"
    return f"{method}: {tokens} tokens{rate}, TTFT {result.ttft * 1000:.0f} ms, {result.prefilled_tokens} tokens prefilled, {reused}"


def describe(
    args: argparse.Namespace, result: Result, prompt: str, worker_params: SamplingParams, params: SamplingParams
) -> dict[str, object]:
    """The object that --json prints: the answer, the workers, the figures, and all that is needed to run it again."""
    return {
        "answer": result.text,
        "finish_reason": result.finish_reason,
        "token_ids": result.token_ids,
        "workers": [asdict(worker) for worker in result.workers],
        "ttft": result.ttft,
        "timings": result.timings,
        "prefilled_tokens": result.prefilled_tokens,
        "reused_tokens": result.reused_tokens,
        "model": args.model,
        "adapter": args.adapter,
        "method": args.method,
        "task": args.task,
        "system": args.system,
        "worker_prompts": worker_prompts(args),
        "prompt": prompt,
        "worker_params": asdict(worker_params),
        "params": asdict(params),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0 done, 1 refused or failed (one line), 2 bad usage, 130 Ctrl-C."""
    args = build_parser().parse_args(argv)
    if sys.stderr is None:  # closed by the caller: print would fall back to stdout
        sys.stderr = open(os.devnull, "w")
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a terminal that cannot show a character must not end the run
            stream.reconfigure(errors="backslashreplace")
    warnings.showwarning = lambda message, *_, **__: print(f"minips: warning: {message}", file=sys.stderr)
    try:
        return run(args)
    except MinipsError as error:
        print(f"minips: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nminips: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of stdout went away: nobody is left to tell
        silence_stdout()
        return 1
    except OSError as error:
        silence_stdout()
        print(f"minips: error: the output cannot be written ({error.strerror or error})", file=sys.stderr)
        return 1


def silence_stdout() -> None:
    """Point stdout at nothing, so that the interpreter's last flush does not fail too."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
