"""How well the synthesizer reads given passages, untrained: mean NLL of nq_open answers, parallel against text.

    python bench/nq_open.py --data DIR [--rows 200] [--model NAME] [--json FILE]

Each row has a question, its gold passage and three passages of other rows, in random order, as four branches. DIR holds
`train_nq_open_oracle/nq_open_oracle.jsonl.gz` (fields question, answers, title, text). The question stands in the
synthesizer's prompt u, in the shared prefix, or in both. All methods of one placement read the same encoded branches.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import statistics
import sys
import time
from pathlib import Path

from minips import Engine, MinipsError, Synthesizer
from minips.chat import text_prompt

FILE = "train_nq_open_oracle/nq_open_oracle.jsonl.gz"
INSTRUCTION = "Answer the question with the help of the passages."
ASK = "Answer the question in a few words."
METHODS = {
    "text": None,
    "text, one assistant turn": None,
    "parallel, prefix kept": {},
    "not re-rotated, prefix kept": {"rerotate": False},
    "sequential, prefix kept": {"layout": "sequential"},
    "parallel, no prefix": {"keep_prefix": False},
}
PLACEMENTS = ("u only", "prefix only", "prefix and u")


def read_rows(folder: Path, count: int, seed: int) -> list[dict]:
    """`count` random rows, each with its question, first answer and four shuffled passages."""
    path = folder / FILE
    try:
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            data = [json.loads(line) for line in lines]
    except OSError as error:
        raise MinipsError(f"{path}: {error.strerror or error}; --data must be a folder that holds {FILE}") from None
    rng = random.Random(seed)
    rows = []
    for row in rng.sample(data, min(count, len(data))):
        others = [o for o in rng.sample(data, 12) if o["title"] != row["title"] and row["answers"][0] not in o["text"]][:3]
        passages = [f"{o['title']}: {o['text']}" for o in (row, *others)]
        rng.shuffle(passages)
        rows.append({"question": row["question"] + "?", "answer": row["answers"][0], "passages": passages})
    return rows


def prompts(question: str, placement: str) -> tuple[str, str]:
    """T for the prefix and U for the synthesizer."""
    asked = f"{INSTRUCTION}\nQuestion: {question}"
    task = INSTRUCTION if placement == "u only" else asked
    prompt = ASK if placement == "prefix only" else f"Question: {question}\n{ASK}"
    return task, prompt


def score_text(engine: Engine, row: dict, task: str, prompt: str) -> dict[str, float]:
    """The passages as text: in one user turn under headings (method text), and as one assistant turn, the form that branches have."""
    turns = [("user", task), ("assistant", "\n\n".join(row["passages"])), ("user", prompt)]
    messages = [{"role": role, "content": content} for role, content in turns]
    forms = {"text": text_prompt(task, row["passages"], prompt), "text, one assistant turn": messages}
    return {name: engine.score(form, row["answer"]).mean_nll for name, form in forms.items()}


def score_row(engine: Engine, row: dict, placement: str) -> dict[str, float]:
    """Mean NLL a token of the answer, by method."""
    task, prompt = prompts(row["question"], placement)
    found = score_text(engine, row, task, prompt)
    with engine.prefill(task) as prefix:
        branches = engine.encode(engine.fork(prefix, [""] * 4), row["passages"])
        for method, options in METHODS.items():
            if options is not None:
                synthesizer = Synthesizer(engine, options=options)
                with synthesizer.merge(branches, consume=False) as context:
                    found[method] = synthesizer.score(context, prompt, row["answer"]).mean_nll
        for branch in branches:
            branch.close()
    return found


def interval(values: list[float]) -> float:
    """Half width of the 95% interval of the mean (normal approximation)."""
    return 1.96 * statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("nan")


def table(scores: dict[str, list[dict[str, float]]]) -> str:
    """Markdown: mean NLL with its interval, and the paired difference to text."""
    lines = ["| the question stands in | " + " | ".join(METHODS) + " |", "|---" * (len(METHODS) + 1) + "|"]
    for placement, rows in scores.items():
        cells = []
        for method in METHODS:
            values = [row[method] for row in rows]
            cell = f"{statistics.mean(values):.2f} ± {interval(values):.2f}"
            if method != "text":
                differences = [row[method] - row["text"] for row in rows]
                cell += f" ({statistics.mean(differences):+.2f} ± {interval(differences):.2f})"
            cells.append(cell)
        lines.append(f"| {placement} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder that holds train_nq_open_oracle/")
    parser.add_argument("--rows", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--json", type=Path, help="write every row's values here")
    args = parser.parse_args()
    try:
        rows = read_rows(args.data, args.rows, args.seed)
        engine = Engine.from_pretrained(args.model, dtype=args.dtype, progress=True)
        scores: dict[str, list[dict[str, float]]] = {placement: [] for placement in PLACEMENTS}
        started = time.perf_counter()
        for number, row in enumerate(rows, 1):
            for placement in PLACEMENTS:
                scores[placement].append(score_row(engine, row, placement))
            if number % 20 == 0:
                print(f"{number} of {len(rows)} rows, {time.perf_counter() - started:.0f} s", file=sys.stderr)
    except MinipsError as error:
        print(f"minips: error: {error}", file=sys.stderr)
        return 1
    print(f"{args.model}, {str(engine.dtype).removeprefix('torch.')}, {len(rows)} rows, mean NLL of the answer in nats a token,")
    print("± 95% interval; in brackets the paired difference to text\n")
    print(table(scores))
    if args.json:
        args.json.write_text(json.dumps(scores))
    return 0


if __name__ == "__main__":
    sys.exit(main())
