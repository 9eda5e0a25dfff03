"""How far a fast path (--quantize, --compile, another --dtype) is from the plain one: KL and top-1 on teacher-forced decode steps.

    python bench/divergence.py --quantize int4 [--positions 1000] [--reference-dtype bfloat16] [--text FILE] [--json FILE]

Both engines read the same text (README.md, if no other is given) as a few rows, one token a row and step, so that the weights which
decoding uses are the ones that are judged; KL(reference || fast) in nats over the whole vocabulary. Beside it, how long greedy answers agree.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

import torch
from measure import grid, machine_line, run_bench
from models import Subject, add_model_arguments, open_subject

from minips import Engine, MinipsError, SamplingParams
from minips.quantize import FEW_ROWS

README = Path(__file__).parent.parent / "README.md"
PLAIN_ROWS, WARM_CONTEXT, GREEDY_TOKENS = 4, 16, 64
KL_MARK, TOP1_MARK = 0.02, 0.95


@torch.no_grad()
def step_logits(engine: Engine, rows: list[list[int]]) -> list[torch.Tensor]:
    """Log-probabilities fp32 [rows, vocab] after each token behind the first `WARM_CONTEXT`, fed one a step."""
    branches = [engine.prefill(row[:WARM_CONTEXT]) for row in rows]
    try:
        found = []
        for at in range(WARM_CONTEXT, len(rows[0])):
            engine.extend(branches, [[row[at]] for row in rows])
            found.append(torch.stack([branch.next_logits for branch in branches]).log_softmax(-1).cpu())
        return found
    finally:
        for branch in branches:
            branch.close()


def greedy(engine: Engine, rows: list[list[int]]) -> list[list[int]]:
    params = SamplingParams(max_tokens=GREEDY_TOKENS, ignore_eos=True)
    return [result.token_ids for result in engine.generate_batch([row[: len(row) // 2] for row in rows], params)]


def rows_of(subject: Subject, args: argparse.Namespace) -> list[list[int]]:
    """The text as rows of one length, `positions` steps in all; so few rows that a quantised model decodes them with its codes."""
    tokenizer = subject.engine.tokenizer
    if tokenizer is None:
        raise MinipsError(f"{subject.name} has no tokenizer, and this bench reads text; take a real model")
    try:
        ids = tokenizer.encode(args.text.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise MinipsError(f"{args.text}: cannot be read as UTF-8 text ({error})") from None
    rows = row_count(args)
    length = WARM_CONTEXT + -(-args.positions // rows)
    if len(ids) < rows * length:
        raise MinipsError(f"{args.text}: has {len(ids)} tokens, {rows * length} are needed for --positions {args.positions}")
    return [ids[row * length : (row + 1) * length] for row in range(rows)]


def row_count(args: argparse.Namespace) -> int:
    return FEW_ROWS.get(args.quantize, PLAIN_ROWS)


def run(args: argparse.Namespace) -> dict:
    args.no_rival = True
    pages = (args.positions + row_count(args) * (WARM_CONTEXT + GREEDY_TOKENS + 64)) * 16  # each step of extend begins a page
    with open_subject(args, pages) as subject:
        rows = rows_of(subject, args)
        fast, fast_greedy = step_logits(subject.engine, rows), greedy(subject.engine, rows)
        facts = subject.facts()
    plain = argparse.Namespace(**{**vars(args), "quantize": None, "compile": False, "dtype": args.reference_dtype})
    with open_subject(plain, pages) as subject:
        reference, reference_greedy = step_logits(subject.engine, rows), greedy(subject.engine, rows)
    kl = [float(value) for one, other in zip(reference, fast) for value in (one.exp() * (one - other)).sum(-1)]
    top1 = [bool(same) for one, other in zip(reference, fast) for same in one.argmax(-1) == other.argmax(-1)]
    agreed = [
        next((at for at, (a, b) in enumerate(zip(one, other)) if a != b), len(one)) for one, other in zip(reference_greedy, fast_greedy)
    ]
    return {
        "model": facts,
        "positions": len(kl),
        "kl_mean": statistics.mean(kl),
        "kl_max": max(kl),
        "top1": statistics.mean(top1),
        "greedy_tokens": GREEDY_TOKENS,
        "greedy_agreed": agreed,
    }


def report(data: dict) -> str:
    args, model = data["arguments"], data["model"]
    how = ", ".join(filter(None, (model["dtype"], args["quantize"], args["compile"] and "compiled")))
    row = [how, str(data["positions"]), f"{data['kl_mean']:.2g}", f"{data['kl_max']:.2g}", f"{data['top1']:.1%}"]
    row += [f"{', '.join(map(str, data['greedy_agreed']))} of {data['greedy_tokens']}"]
    held = data["kl_mean"] <= KL_MARK and data["top1"] >= TOP1_MARK
    row.append("yes" if held else "NO")
    head = ["path", "positions", "mean KL", "largest", "top-1", "equal greedy tokens", f"KL <= {KL_MARK}, top-1 >= {TOP1_MARK:.0%}"]
    first = f"{model['name']} against {args['reference_dtype']}, decode steps over {Path(args['text']).name}."
    return "\n".join([f"{first} {machine_line(data['machine'])}.\n", grid(head, [row])])


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_model_arguments(parser)
    parser.add_argument("--positions", type=int, default=1000, metavar="N", help="teacher-forced positions (default: %(default)s)")
    parser.add_argument("--reference-dtype", default="bfloat16", help="of the plain path (default: %(default)s)")
    parser.add_argument("--text", type=Path, default=README, metavar="FILE", help="what is read (default: this repository's README.md)")
    return parser


def main(argv: list[str] | None = None) -> int:
    return run_bench("divergence", build_parser(), run, report, argv)


if __name__ == "__main__":
    sys.exit(main())
