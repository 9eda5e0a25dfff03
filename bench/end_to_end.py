"""Workers and synthesis together: wall time with fixed numbers of tokens, and what the slowest worker costs.

    python bench/end_to_end.py [--workers 4] [--worker-tokens 256] [--answer-tokens 64] [--spread 0.5] [--json FILE]

parallel: m workers as one batch, then the answer from their caches. text: the same batch, then the answer from their text. sequential: one
worker after the other, then text, as a framework without batching does it. Nobody stops early. --spread 0.5: the workers write from half to
one and a half times as much, evenly spread, so that the straggler shows: how long the slowest takes against the mean worker.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence

from measure import alternate, grid, machine_line, numbers, run_bench, say, warm
from models import Ids, Subject, add_model_arguments, open_subject

from minips import MinipsError, SamplingParams, Synthesizer
from minips.kv_cache import Branch

METHODS = ("parallel", "text", "sequential")


def lengths_of(m: int, tokens: int, spread: float) -> list[int]:
    """Tokens of each worker, evenly from tokens x (1 - spread) to tokens x (1 + spread)."""
    return [max(1, round(tokens * (1 + spread * (2 * j / (m - 1) - 1)))) for j in range(m)] if m > 1 else [tokens]


def run_workers(subject: Subject, prefix: list[int], owns: Sequence[list[int]], lengths: Sequence[int], together: bool) -> tuple:
    """Fork and decode the workers, in one batch or one by one -> (branches, seconds after which each had ended)."""
    engine, branches, ended = subject.engine, [], []
    params = [SamplingParams(max_tokens=length, temperature=0.7, top_p=0.95, ignore_eos=True, seed=j) for j, length in enumerate(lengths)]
    started = time.perf_counter()
    groups = [range(len(owns))] if together else [[j] for j in range(len(owns))]
    try:
        with engine.prefill(prefix) as root:
            for group in groups:
                begun = started if together else time.perf_counter()
                last = [begun] * len(group)

                def mark(row: int, *_: object, last: list[float] = last) -> None:
                    last[row] = time.perf_counter()

                made = engine.fork(root, [owns[j] for j in group])
                branches += made
                engine.decode(made, [params[j] for j in group], on_token=mark)
                ended += [stamp - begun for stamp in last]
    except BaseException:
        close(branches)
        raise
    written = [len(branch.output_ids) for branch in branches]
    if written != list(lengths):
        close(branches)
        raise MinipsError(f"the workers wrote {written} tokens, expected {list(lengths)}")
    return branches, ended


def close(branches: Sequence[Branch]) -> None:
    for branch in branches:
        branch.close()


def whole_run(subject: Subject, method: str, m: int, args: argparse.Namespace, ids: Ids) -> dict[str, float]:
    """One job from the prefix to the last token of the answer."""
    engine, prefix = subject.engine, ids(args.prefix)
    owns, u = [ids(8 + j) for j in range(m)], ids(args.prompt_tokens)
    answer = SamplingParams(max_tokens=args.answer_tokens, ignore_eos=True)
    started = time.perf_counter()
    branches, ended = run_workers(subject, prefix, owns, lengths_of(m, args.worker_tokens, args.spread), method != "sequential")
    try:
        worked = time.perf_counter() - started
        if method == "parallel":
            result = Synthesizer(engine).generate_from_caches(branches, u, answer)
        else:
            outputs = [token for branch in branches for token in branch.output_ids]
            close(branches)
            result = engine.generate(prefix + outputs + u, answer)
        whole = time.perf_counter() - started
    finally:
        close(branches)
    if len(result.token_ids) != args.answer_tokens:
        raise MinipsError(f"the answer has {len(result.token_ids)} tokens, expected {args.answer_tokens}")
    return {
        "whole": whole,
        "workers": worked,
        "synthesis": whole - worked,
        "ttft": result.ttft,
        "slowest": max(ended),
        "mean_worker": statistics.mean(ended),
    }


def run(args: argparse.Namespace) -> dict:
    if not 0 <= args.spread < 1:
        raise MinipsError(f"--spread is {args.spread}, expected from 0 to below 1")
    args.no_rival = True
    longest = (
        args.prefix + max(args.workers) * (round(args.worker_tokens * (1 + args.spread)) + 80) + args.prompt_tokens + args.answer_tokens
    )
    with open_subject(args, longest + 256) as subject:
        ids, cases = Ids(subject.config.vocab_size), []
        small = argparse.Namespace(**{**vars(args), "worker_tokens": 4, "answer_tokens": 2})
        for m in args.workers:
            for method in METHODS:  # a job of this size is its own warm-up, but for the very first calls
                whole_run(subject, method, m, small, ids)
            calls = {method: lambda turn, method=method, m=m: whole_run(subject, method, m, args, ids) for method in METHODS}
            found = alternate(calls, args.repeats, args.budget, cold=False)
            cases.append({"m": m, "lengths": lengths_of(m, args.worker_tokens, args.spread), "methods": found})
            say(f"m = {m}: " + ", ".join(f"{name} {warm(one, 'whole')['median']:.2f} s" for name, one in found.items()))
        return {"model": subject.facts(), "cases": cases}


def report(data: dict) -> str:
    model, args = data["model"], data["arguments"]
    first, second = [], []
    for case in data["cases"]:
        medians = {name: {key: warm(found, key)["median"] for key in found["warm"][0]} for name, found in case["methods"].items()}
        ours = medians["parallel"]
        first.append(
            [
                str(case["m"]),
                f"{medians['sequential']['whole'] / ours['whole']:.2f}",
                f"{medians['text']['whole'] / ours['whole']:.2f}",
                f"{ours['slowest'] / ours['mean_worker']:.2f}",
                f"{1 - ours['mean_worker'] / ours['slowest']:.0%}",
            ]
        )
        for name, one in medians.items():
            whole = warm(case["methods"][name], "whole")
            cells = [f"{one[key]:.2f}" for key in ("whole", "workers", "synthesis", "ttft", "slowest", "mean_worker")]
            second.append([str(case["m"]), name, *cells, f"{whole['min']:.2f} to {whole['max']:.2f}", str(whole["n"])])
    lengths = "; ".join(f"m = {case['m']}: {', '.join(map(str, case['lengths']))}" for case in data["cases"])
    shape = (
        f"Tokens that the workers write: {lengths}; the answer {args['answer_tokens']}, |u| {args['prompt_tokens']}. "
        "Wall time, clock from before the prefix to after the last token.\n"
    )
    return "\n".join(
        [
            f"{model['name']}, {model['dtype']}. {machine_line(data['machine'])}.\n",
            shape,
            grid(["m", "sequential / parallel", "text / parallel", "slowest / mean worker", "waiting for it"], first),
            grid(["m", "method", "whole, s", "workers", "synthesis", "TTFT", "slowest worker", "mean worker", "whole, range", "n"], second),
        ]
    )


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_model_arguments(parser)
    parser.add_argument("--workers", type=numbers, default=[4], metavar="M,...", help="numbers of workers (default: 4)")
    parser.add_argument("--worker-tokens", type=int, default=256, metavar="N", help="of each worker (default: %(default)s)")
    parser.add_argument("--answer-tokens", type=int, default=64, metavar="N", help="default: %(default)s")
    parser.add_argument("--prompt-tokens", type=int, default=32, metavar="N", help="|u| (default: %(default)s)")
    parser.add_argument("--prefix", type=int, default=64, metavar="N", help="tokens of the shared prefix (default: %(default)s)")
    parser.add_argument("--spread", type=float, default=0.0, metavar="F", help="how much the workers' lengths differ (default: not at all)")
    return parser


def main(argv: list[str] | None = None) -> int:
    return run_bench("end_to_end", build_parser(), run, report, argv)


if __name__ == "__main__":
    sys.exit(main())
