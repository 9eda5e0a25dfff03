"""Time to first token: reading the workers' text again against reading their caches, beside the limit that the FLOP count sets.

    python bench/ttft.py [--random 135m --max-positions 20480] [--workers 4] [--lengths 512,1024,2048,4096] [--prompt-tokens 128]
                         [--methods parallel,text,official,transformers] [--mappers low_rank,affine] [--fit] [--json FILE] [--plot FILE.png]

parallel: `generate_from_caches` consumes the branches: re-rotate, map, merge, prefill u, first token. official: the same with the kept
tokens and positions of the authors' release and an affine mapper. text: prefix, all branch tokens and u as one prompt. transformers: its
prefill of a prompt of that length. All run in turns in one process, every prompt is new, and each method has had one call at the shape.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

from measure import (
    alternate,
    fit,
    grid,
    machine_line,
    ms,
    numbers,
    prefill_flops,
    run_bench,
    say,
    warm,
    weight_bytes,
)
from models import (
    PREFIX,
    Ids,
    Subject,
    add_model_arguments,
    branch_context,
    open_subject,
    save_workers,
    synthesizer_of,
)

from minips import Engine, MinipsError, SamplingParams, Synthesizer
from minips.mapper import KINDS

METHODS = ("parallel", "text", "official", "transformers")
PARTS = ("rerotate", "map", "prefill", "first_token")
ONE = SamplingParams(max_tokens=1, ignore_eos=True)
POINTS = (
    "Clock: parallel starts before the merge of live branches and text before the prompt's first forward pass, both with token ids in hand "
    "(exact lengths, so no tokenisation); it stops when the first new token's id is on the host. The authors' code counts the same parts "
    "(prepare + first token), but not the page tables' work, which is `other` here."
)


def counts(engine: Engine, m: int, length: int, u: int, quantize: str | None = None) -> dict:
    """FLOP of both routes, their ratio (the limit of the speed-up), and the bytes that the parallel one must read."""
    config, past = engine.config, PREFIX + m * length
    text, parallel = prefill_flops(config, past + u), prefill_flops(config, u, past)
    return {
        "limit": text / parallel,
        "text_flop": text,
        "parallel_flop": parallel,
        "parallel_bytes": weight_bytes(config, quantize, u, engine.dtype.itemsize) + engine.kv_bytes_per_token * (past + u),
    }


def measure_case(
    subject: Subject, synthesizers: dict[tuple[str, str], Synthesizer], args: argparse.Namespace, shape: tuple, saved: Path, ids: Ids
) -> dict:
    """One shape (m, tokens a branch, |u|): every method that fits, in turns. synthesizers: by mapper kind and profile."""
    m, length, u = shape
    engine, config = subject.engine, subject.config
    case = {"m": m, "length": length, "u": u, "prefix": PREFIX, **counts(engine, m, length, u, args.quantize), "left_out": {}}
    size = PREFIX + m * length + u
    first, *others = args.mappers

    def merged(kind: str, profile: str) -> dict[str, float]:
        branches = engine.load_branches(saved)
        try:
            return parts_of(synthesizers[kind, profile].generate_from_caches(branches, ids(u), ONE))
        finally:
            for branch in branches:
                branch.close()

    every = {
        "parallel": lambda turn: merged(first, "minips"),
        "official": lambda turn: merged("affine", "official"),
        "text": lambda turn: parts_of(engine.generate(ids(size), ONE)),
        "transformers": lambda turn: {"ttft": subject.rival.first_token(ids(size))},
    }
    calls = {}
    for method in args.methods:
        long = method in ("text", "transformers")
        if long and case["text_flop"] > args.max_tflop * 1e12:
            case["left_out"][method] = f"{case['text_flop'] / 1e12:.0f} TFLOP are more than --max-tflop {args.max_tflop:g}"
        elif long and size >= config.max_position_embeddings:
            case["left_out"][method] = f"{size + 1} positions, the model's limit is {config.max_position_embeddings}"
        elif method != "transformers" or subject.rival is not None:
            calls[method] = every[method]
    if "parallel" in calls:
        calls |= {f"parallel, {kind}": lambda turn, kind=kind: merged(kind, "minips") for kind in others}
    case["methods"] = alternate(calls, args.repeats, args.budget)
    said = ", ".join(f"{name} {ms(warm(found, 'ttft')['median'])} ms" for name, found in case["methods"].items())
    say(f"m = {m}, {length} tokens a branch, |u| = {u}: {said}" + "".join(f"; no {k}: {v}" for k, v in case["left_out"].items()))
    return case


def parts_of(result) -> dict[str, float]:
    """TTFT and its parts in seconds; other: planning, page tables, what stands between."""
    parts = {name: result.timings[name] for name in PARTS}
    return {"ttft": result.ttft, **parts, "other": result.ttft - sum(parts.values())}


def pool_tokens(args: argparse.Namespace) -> int:
    """Room for the largest case: its branches beside one saved set, or its text prompt."""
    largest = max(args.workers) * (max(args.lengths) + branch_context(max(args.workers)) + 64)
    return largest + max(args.prompt_tokens) + PREFIX + 256


def run(args: argparse.Namespace) -> dict:
    unknown = [name for name in args.methods if name not in METHODS]
    if unknown or not args.methods:
        raise MinipsError(f"--methods is {','.join(args.methods)!r}, expected some of {','.join(METHODS)}")
    strange = [kind for kind in args.mappers if kind not in KINDS]
    if strange:
        raise MinipsError(f"--mappers has {', '.join(strange)}, expected some of {', '.join(KINDS)}")
    if args.plot is not None and args.plot.suffix != ".png":
        raise MinipsError(f"--plot is {args.plot}, expected a name that ends in .png")
    if "transformers" not in args.methods:
        args.no_rival = True
    with open_subject(args, pool_tokens(args)) as subject, tempfile.TemporaryDirectory(prefix="minips-bench-") as place:
        ids, cases = Ids(subject.config.vocab_size), []
        kinds = [*((kind, "minips") for kind in args.mappers), ("affine", "official")]
        synthesizers = {(kind, profile): synthesizer_of(subject, kind, profile) for kind, profile in kinds}
        for m in args.workers:
            for length in args.lengths:
                saved = Path(place) / f"{m}-{length}"
                try:
                    save_workers(subject, ids, m, length, saved)
                    cases += [measure_case(subject, synthesizers, args, (m, length, u), saved, ids) for u in args.prompt_tokens]
                except MinipsError as error:  # does not fit the positions or the pages
                    say(f"m = {m}, {length} tokens a branch: left out ({error})")
        if not cases:
            raise MinipsError("no shape fits this model; choose shorter --lengths, or --random with --max-positions")
        data = {"model": subject.facts(), "cases": cases}
    if args.fit:
        data["fits"] = fits(cases)
    if args.plot is not None:
        from plots import write_ttft_plot

        write_ttft_plot(args.plot, data)
    return data


def fits(cases: list[dict]) -> dict:
    """How TTFT(parallel) and the pass over K (re-rotate + map) grow with the shape."""
    cases = [case for case in cases if "parallel" in case["methods"]]
    attended = [case["prefix"] + case["m"] * case["length"] + (case["u"] + 1) / 2 for case in cases]
    branch_tokens = [case["m"] * case["length"] for case in cases]
    found = [case["methods"]["parallel"] for case in cases]
    columns = {
        "1": [1] * len(cases),
        "|u|": [case["u"] for case in cases],
        "|u| x attended": [case["u"] * seen for case, seen in zip(cases, attended)],
        "branch tokens": branch_tokens,
    }
    passes = [warm(one, "rerotate")["median"] + warm(one, "map")["median"] for one in found]
    return {
        "ttft": fit(columns, [warm(one, "ttft")["median"] for one in found]),
        "pass": fit({"1": [1] * len(cases), "branch tokens": branch_tokens}, passes),
    }


# The report


def median(case: dict, method: str, name: str = "ttft") -> float | None:
    return warm(case["methods"][method], name)["median"] if method in case["methods"] else None


def ratio(above: float | None, below: float | None) -> float | None:
    return None if above is None or below is None else above / below


def shown(value: float | None, form: str = "{:.1f}") -> str:
    return "–" if value is None else form.format(value)


def pass_share(case: dict) -> float | None:
    """Median share of re-rotation and map in TTFT(parallel)."""
    turns = case["methods"]["parallel"]["warm"] if "parallel" in case["methods"] else []
    return statistics.median((turn["rerotate"] + turn["map"]) / turn["ttft"] for turn in turns) if turns else None


def ratio_row(case: dict) -> list[str]:
    text, parallel = median(case, "text"), median(case, "parallel")
    gain = ratio(text, parallel)
    return [
        *(str(case[name]) for name in ("m", "length", "u")),
        shown(gain),
        shown(case["limit"]),
        shown(ratio(gain, case["limit"]), "{:.0%}"),
        shown(ratio(text, median(case, "official"))),
        shown(pass_share(case), "{:.1%}"),
        shown(ratio(median(case, "transformers"), text), "{:.2f}"),
        *(shown(ratio(case[f"{name}_flop"] / 1e9, median(case, name)), "{:.0f}") for name in ("text", "parallel")),
        shown(ratio(case["parallel_bytes"] / 1e9, parallel)),
    ]


def time_rows(case: dict) -> list[list[str]]:
    rows = []
    for method, found in case["methods"].items():
        whole = warm(found, "ttft")
        shares = [warm(found, name)["median"] / whole["median"] if name in found["cold"] else None for name in (*PARTS, "other")]
        cells = [str(case[name]) for name in ("m", "length", "u")] + [method]
        cells += [*(ms(whole[name]) for name in ("median", "p95")), str(whole["n"]), ms(found["cold"]["ttft"])]
        rows.append(cells + [shown(share, "{:.1%}") for share in shares])
    return rows


def report(data: dict) -> str:
    """The tables as Markdown, ratios first."""
    model, cases = data["model"], data["cases"]
    head = ["m", "tokens", "u", "text / parallel", "limit", "of it", "text / official", "pass", "transformers / text"]
    head += ["text GFLOP/s", "parallel GFLOP/s", "parallel GB/s"]
    loads = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in model["load_s"].items())
    first = ", ".join(f"{name} {ms(found['cold']['ttft'])} ms" for name, found in cases[0]["methods"].items())
    how = model["dtype"] + ", ours compiled" * data["arguments"].get("compile", False)
    lines = [
        f"{model['name']}, {how}, mapper of parallel: {data['arguments']['mappers'][0]}. {machine_line(data['machine'])}.",
        f"Loaded: {loads}. The very first calls of the process: {first}.\n",
    ]
    if any("text" in case["methods"] for case in cases):
        lines += [
            "TTFT ratios of medians; limit: the ratio of the two prefills' FLOP, attention counted; pass: re-rotate + map in TTFT(parallel).\n",
            grid(head, [ratio_row(case) for case in cases]),
        ]
    times = grid(
        ["m", "tokens", "u", "method", "median, ms", "p95", "n", "first call", *PARTS, "other"],
        [row for case in cases for row in time_rows(case)],
    )
    lines.append(times)
    for case in cases:
        lines += [f"m = {case['m']}, {case['length']} tokens, no {name}: {why}" for name, why in case["left_out"].items()]
    for name, found in data.get("fits", {}).items():
        what = {"ttft": "TTFT(parallel)", "pass": "re-rotate + map"}[name]
        start, *slopes = found["coefficients"].items()
        terms = "".join(f" + {value * 1e6:.4g} us x {column}" for column, value in slopes)
        errors = f"R2 {found['r2']:.3f}, largest error {found['worst']:.0%}, {found['n']} shapes"
        lines.append(f"{what} = {start[1] * 1000:.4g} ms{terms} ({errors})\n")
    return "\n".join(lines)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_model_arguments(parser)
    parser.add_argument("--workers", type=numbers, default=[4], metavar="M,...", help="numbers of branches (default: 4)")
    parser.add_argument("--lengths", type=numbers, default=[512, 1024], metavar="N,...", help="tokens a branch (default: 512,1024)")
    parser.add_argument("--prompt-tokens", type=numbers, default=[128], metavar="N,...", help="|u| (default: 128)")
    parser.add_argument("--methods", type=lambda text: text.split(","), default=list(METHODS), help=f"default: {','.join(METHODS)}")
    mappers = "of parallel, with made-up coefficients; each further kind is a method of its own (default: low_rank)"
    parser.add_argument("--mappers", type=lambda text: text.split(","), default=["low_rank"], metavar="KIND,...", help=mappers)
    parser.add_argument("--max-tflop", type=float, default=20, metavar="N", help="longer text prompts are left out (default: %(default)s)")
    parser.add_argument("--fit", action="store_true", help="fit the growth of the parallel TTFT over all shapes")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="bars: published, ours and the limit (needs matplotlib)")
    return parser


def main(argv: list[str] | None = None) -> int:
    return run_bench("ttft", build_parser(), run, lambda data: f"{POINTS}\n\n{report(data)}", argv)


if __name__ == "__main__":
    sys.exit(main())
