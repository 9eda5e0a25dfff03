"""Tokens per second of m workers decoding together, and of prefill, against transformers on the same folder, dtype and threads.

    python bench/decode.py [--workers 1,4,8] [--context 512] [--tokens 33] [--prefill 128,512,2048] [--quantize int4] [--growth] [--json FILE]

Every worker has a prompt of its own (`--shared N`: its first N tokens are one prefix, computed once). Decoding counts from the first
new token to the last, so `tokens` - 1 steps of each row, and prefill is apart; token counts are those of the ids that came out.
transformers: `generate` of the same prompts as one batch. --growth: the step over pool size, page size and context instead.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from measure import (
    alternate,
    fit,
    grid,
    machine_line,
    ms,
    numbers,
    run_bench,
    say,
    warm,
    weight_bytes,
)
from models import Ids, Subject, add_model_arguments, free_memory, open_subject

from minips import Engine, MinipsError, SamplingParams
from minips.kv_cache import Branch

POOL_SIZES, PAGE_SIZES, CONTEXTS = (1, 8, 32), (4, 16, 64), (128, 512, 2048)  # --growth; pools as multiples of what is needed
GROWTH_ROWS = 4


def decode_once(engine: Engine, rows: Sequence[list[int]], tokens: int, shared: int = 0) -> tuple[dict[str, float], list[list[int]]]:
    """Prefill the rows, decode `tokens` of each -> (seconds of prefill and decode, tokens that came out), ids."""
    started = time.perf_counter()
    if shared:
        with engine.prefill(rows[0][:shared]) as root:
            branches = engine.fork(root, [row[shared:] for row in rows])
    else:
        branches = [engine.prefill(row) for row in rows]
    prefilled = time.perf_counter() - started
    figures, ids = decode_branches(engine, branches, tokens)
    return {"prefill": prefilled, **figures}, ids


def decode_branches(engine: Engine, branches: Sequence[Branch], tokens: int) -> tuple[dict[str, float], list[list[int]]]:
    """Decode prefilled branches, first token to last, and close them."""
    stamps: list[float] = []
    try:
        engine.decode(branches, SamplingParams(max_tokens=tokens, ignore_eos=True), on_token=lambda *_: stamps.append(time.perf_counter()))
        ids = [list(branch.output_ids) for branch in branches]
    finally:
        for branch in branches:
            branch.close()
    count = sum(map(len, ids))
    if count != len(branches) * tokens or len(stamps) != count:
        raise MinipsError(f"decode: {count} ids in {len(stamps)} calls, expected {len(branches) * tokens}")
    return {"decode": stamps[-1] - stamps[0], "tokens": count}, ids


def rival_once(subject: Subject, rows: Sequence[list[int]], tokens: int) -> tuple[dict[str, float], list[list[int]]]:
    """The same by transformers' `generate`; prefill ends with the first step's logits."""
    started = time.perf_counter()
    stamps, ids = subject.rival.generate(rows, tokens)
    count = sum(map(len, ids))
    if count != len(rows) * tokens or len(stamps) != tokens:
        raise MinipsError(f"transformers: {count} ids in {len(stamps)} steps, expected {len(rows) * tokens} in {tokens}")
    return {"prefill": stamps[0] - started, "decode": stamps[-1] - stamps[0], "tokens": count}, ids


def first_divergence(ours: Sequence[list[int]], theirs: Sequence[list[int]]) -> list[int]:
    """Per row, how many leading tokens are equal."""
    return [next((at for at, (a, b) in enumerate(zip(row, other)) if a != b), len(row)) for row, other in zip(ours, theirs)]


def decode_case(subject: Subject, args: argparse.Namespace, m: int, ids: Ids) -> dict:
    """One m: both rivals get the same prompts in a turn, and new ones in the next."""
    prompts: dict[int, list[list[int]]] = {}
    outputs: dict[str, dict[int, list[list[int]]]] = {"minips": {}, "transformers": {}}

    def rows(turn: int) -> list[list[int]]:
        if turn not in prompts:
            prefix = ids(args.shared)
            prompts[turn] = [prefix + ids(args.context - args.shared) for _ in range(m)]
        return prompts[turn]

    def ours(turn: int) -> dict[str, float]:
        figures, outputs["minips"][turn] = decode_once(subject.engine, rows(turn), args.tokens, args.shared)
        return figures

    def theirs(turn: int) -> dict[str, float]:
        figures, outputs["transformers"][turn] = rival_once(subject, rows(turn), args.tokens)
        return figures

    calls = {"minips": ours, **({"transformers": theirs} if subject.rival is not None else {})}
    found = alternate(calls, args.repeats, args.budget)
    seen = args.context + args.tokens / 2
    read = weight_bytes(subject.config, args.quantize, m, subject.engine.dtype.itemsize) + m * seen * subject.engine.kv_bytes_per_token
    case = {"m": m, "context": args.context, "shared": args.shared, "tokens": args.tokens, "step_bytes": read, "methods": found}
    if subject.rival is not None:
        pairs = [(outputs["minips"][turn], outputs["transformers"][turn]) for turn in outputs["transformers"]]
        case["first_divergence"] = [count for pair in pairs for count in first_divergence(*pair)]
    say(f"m = {m}: " + ", ".join(f"{name} {rate(case, name):.1f} tokens/s" for name in found))
    return case


def rate(case: dict, name: str) -> float:
    """Tokens a second of all rows together, first to last token."""
    return case["m"] * (case["tokens"] - 1) / warm(case["methods"][name], "decode")["median"]


def prefill_case(subject: Subject, args: argparse.Namespace, length: int, ids: Ids) -> dict:
    def ours(_: int) -> dict[str, float]:
        prompt = ids(length)
        started = time.perf_counter()
        with subject.engine.prefill(prompt) as root:
            int(root.next_logits.argmax())
            return {"prefill": time.perf_counter() - started}

    def theirs(_: int) -> dict[str, float]:
        return {"prefill": subject.rival.first_token(ids(length))}

    calls = {"minips": ours, **({"transformers": theirs} if subject.rival is not None else {})}
    return {"length": length, "methods": alternate(calls, args.repeats, args.budget)}


# Growth


def step_call(engine: Engine, context: int, tokens: int, ids: Ids) -> Callable[[int], dict[str, float]]:
    """A call that decodes rows whose contexts are prefilled here, once; every time behind another last token."""
    roots = [engine.prefill(ids(context - 1)) for _ in range(GROWTH_ROWS)]

    def step(_: int) -> dict[str, float]:
        branches = [branch for root in roots for branch in engine.fork(root, [ids(1)])]
        figures, _ = decode_branches(engine, branches, tokens)
        return {"step": figures["decode"] / (tokens - 1)}

    return step


def growth(subject: Subject, args: argparse.Namespace, ids: Ids) -> dict:
    """Step time over pool size and page size (the same attended bytes), and over the context (with a fit)."""
    base, tokens, context = subject.engine, args.tokens, args.context
    needed = GROWTH_ROWS * (max(context, *CONTEXTS) + tokens + 2 * max(PAGE_SIZES))
    per_token, free = base.kv_bytes_per_token, free_memory()

    def engine_with(page_size: int, pool: int) -> Engine:
        settings = replace(base.settings, page_size=page_size, max_kv_tokens=pool)
        return Engine(base.model, base.config, settings=settings, folder=base.folder)

    pools = [needed * times for times in POOL_SIZES if times == 1 or needed * times * per_token < free / 2]
    page_size = base.settings.page_size
    found = {}
    for what, engines in (
        ("pool", {f"{size} tokens": (engine_with(page_size, size), context) for size in pools}),
        ("page", {f"{size} tokens": (engine_with(size, needed), context) for size in PAGE_SIZES}),
        ("context", {str(length): (base, length) for length in CONTEXTS}),
    ):
        calls = {name: step_call(engine, length, tokens, ids) for name, (engine, length) in engines.items()}
        found[what] = alternate(calls, args.repeats, args.budget)
        say(f"{what}: " + ", ".join(f"{name} {ms(warm(one, 'step')['median'])} ms a step" for name, one in found[what].items()))
    attended = [GROWTH_ROWS * (length + tokens / 2) * per_token for length in CONTEXTS]
    medians = [warm(found["context"][str(length)], "step")["median"] for length in CONTEXTS]
    found["fit"] = fit({"1": [1] * len(CONTEXTS), "attended bytes": attended}, medians)
    return {"growth": found, "rows": GROWTH_ROWS}


# The command


def run(args: argparse.Namespace) -> dict:
    if args.tokens < 2 or not 0 <= args.shared < args.context:
        raise MinipsError(f"--tokens is {args.tokens} and --shared {args.shared}, expected at least 2, and from 0 to below --context")
    rows, lengths, longest = max(args.workers), [args.context], max(args.context + args.tokens, max(args.prefill) + 1)
    if args.growth:
        rows, lengths, longest, args.no_rival = GROWTH_ROWS, CONTEXTS, max(args.context, *CONTEXTS) + args.tokens, True
    with open_subject(args, max(rows * sum(length + args.tokens + 80 for length in lengths), longest + 80)) as subject:
        ids = Ids(subject.config.vocab_size)
        if longest > subject.config.max_position_embeddings:
            raise MinipsError(f"contexts of {longest} tokens are more than the model's {subject.config.max_position_embeddings} positions")
        data = {"model": subject.facts()}
        if args.growth:
            return {**data, **growth(subject, args, ids)}
        data["prefill"] = [prefill_case(subject, args, length, ids) for length in args.prefill]
        data["cases"] = [decode_case(subject, args, m, ids) for m in args.workers]
        return data


def report(data: dict) -> str:
    model, args = data["model"], data["arguments"]
    how = ", ".join(filter(None, (model["dtype"], args["quantize"] and f"ours {args['quantize']}", args["compile"] and "ours compiled")))
    lines = [f"{model['name']}, {how}. {machine_line(data['machine'])}.\n"]
    if "growth" in data:
        return "\n".join(lines + growth_report(data))
    singles = [rate(case, name) for case in data["cases"] if case["m"] == 1 for name in case["methods"]]
    rows = []
    for case in data["cases"]:
        both = "transformers" in case["methods"]
        ours, theirs = rate(case, "minips"), rate(case, "transformers") if both else None
        seconds = warm(case["methods"]["minips"], "decode")
        steps = case["tokens"] - 1
        found = case.get("first_divergence")
        rows.append(
            [
                str(case["m"]),
                f"{ours / theirs:.2f}" if both else "–",
                f"{ours / max(singles):.2f}" if singles else "–",
                f"{ours:.1f}",
                f"{ours / case['m']:.1f}",
                f"{theirs:.1f}" if both else "–",
                ms(seconds["median"] / steps),
                ms(seconds["p95"] / steps),
                str(seconds["n"]),
                f"{case['step_bytes'] * steps / seconds['median'] / 1e9:.1f}",
                f"{sum(count == case['tokens'] for count in found)} of {len(found)}, shortest {min(found)}" if found else "–",
            ]
        )
    head = ["m", "ours / transformers", "ours / fastest m = 1", "ours, tokens/s", "a worker", "transformers", "ours, ms a step", "p95", "n"]
    shape = f"{args['context']} tokens of context a worker ({args['shared']} shared), {args['tokens']} new ones"
    lines += [
        f"Decoding, {shape}; GB/s: weights and attended K/V once a step; equal: greedy rows that agree with transformers' to the end.\n",
        grid([*head, "GB/s", "equal rows"], rows),
    ]
    rows = []
    for case in data["prefill"]:
        seconds = {name: warm(found, "prefill") for name, found in case["methods"].items()}
        rates = {name: case["length"] / one["median"] for name, one in seconds.items()}
        theirs = rates.get("transformers")
        rows.append(
            [
                str(case["length"]),
                f"{rates['minips'] / theirs:.2f}" if theirs else "–",
                f"{rates['minips']:.0f}",
                f"{theirs:.0f}" if theirs else "–",
                ms(seconds["minips"]["median"]),
                ms(seconds["minips"]["p95"]),
                str(seconds["minips"]["n"]),
                ms(case["methods"]["minips"]["cold"]["prefill"]),
            ]
        )
    head = ["tokens", "ours / transformers", "ours, tokens/s", "transformers", "ours, ms", "p95", "n", "first call"]
    return "\n".join([*lines, "Prefill, logits of the last position:\n", grid(head, rows)])


def growth_report(data: dict) -> list[str]:
    found, lines = data["growth"], []
    for what, title in (("pool", "pool"), ("page", "page"), ("context", "tokens of context")):
        first = warm(next(iter(found[what].values())), "step")["median"]
        rows = []
        for name, one in found[what].items():
            step = warm(one, "step")
            rows.append([name, ms(step["median"]), ms(step["p95"]), str(step["n"]), f"{step['median'] / first:.2f}"])
        lines.append(grid([title, "ms a step", "p95", "n", "of the first"], rows))
    slope = found["fit"]["coefficients"]["attended bytes"]
    speed = f"{1 / slope / 1e9:.1f} GB/s" if slope > 0 else "no growth"
    said = f"{found['fit']['coefficients']['1'] * 1000:.4g} ms + {slope * 1e9:.4g} ms x attended MB, which is {speed}"
    return [
        f"Decode steps of {data['rows']} rows with distinct contexts, {data['arguments']['context']} tokens where nothing else is said:\n",
        *lines,
        f"step = {said} (R2 {found['fit']['r2']:.3f}).\n",
    ]


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_model_arguments(parser)
    parser.add_argument("--workers", type=numbers, default=[1, 4, 8], metavar="M,...", help="rows decoded together (default: 1,4,8)")
    parser.add_argument("--context", type=int, default=512, metavar="N", help="prompt tokens of each worker (default: %(default)s)")
    parser.add_argument("--shared", type=int, default=0, metavar="N", help="of them one shared prefix (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=33, metavar="N", help="new tokens of each worker (default: %(default)s)")
    parser.add_argument(
        "--prefill", type=numbers, default=[128, 512, 2048], metavar="N,...", help="prefill lengths (default: 128,512,2048)"
    )
    parser.add_argument("--growth", action="store_true", help="how the step grows with pool, pages and context, instead of the rival")
    return parser


def main(argv: list[str] | None = None) -> int:
    return run_bench("decode", build_parser(), run, report, argv)


if __name__ == "__main__":
    sys.exit(main())
