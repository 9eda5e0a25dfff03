"""The shipped adapter's card: tables on held-out rows, twenty ordinary answers, and the training curve, all by one command.

    python bench/proof.py --data DIR [--rows 200] [--text-adapter DIR] [--once DIR] [--only judge,sweep,answers,none]

Every method reads the same held-out rows (`minips.evaluate --held-out`): text and parallel with the base weights, text with a LoRA
(--text-adapter), parallel with an adapter trained on the very same rows and steps (--once), and parallel with the shipped one, which
is an average of two such runs. Steps go on where they were stopped.
The parts between marks of the adapter's README.md and of bench/RESULTS.md are written anew at the end.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path

from quality import RESULTS, grid, read, value, write_between

from minips import Engine, MinipsError, SamplingParams, Synthesizer
from minips.chat import default_prompt
from minips.evaluate import main as evaluate
from minips.training.curve import read_log, write_plot

TASKS = ("nq_open", "hotpotqa", "squad", "strategyqa", "kv_retrieval")
START, END = "<!-- proof: written by bench/proof.py -->", "<!-- proof: end -->"
QUESTIONS = (
    "What should a city do first against heat?",
    "How does a vaccine work?",
    "Give me three tips for learning a language.",
    "Why is the sky blue?",
    "Write a short poem about autumn.",
    "What is the difference between a virus and a bacterium?",
    "How do I cook rice?",
    "Explain recursion to a child.",
    "What are good habits for sleeping well?",
    "Why did the Roman Empire fall?",
    "Suggest a name for a bookshop and say why.",
    "How can a small company save energy?",
    "What does inflation mean?",
    "Describe how bread is made.",
    "What should I pack for a hike in the mountains?",
    "Is it better to rent or to buy a home?",
    "How do bees find flowers?",
    "Write a polite email that declines a meeting.",
    "What makes a good teacher?",
    "How does a bicycle stay upright?",
)


def run_tasks(args: argparse.Namespace, methods: list[str]) -> None:
    for task in TASKS:
        longest = "48" if task == "kv_retrieval" else "24"
        arguments = ["--task", task, "--method", ",".join(methods), "--rows", str(args.rows), "--held-out", "--batch", "8"]
        if code := evaluate([*arguments, "--answer-tokens", longest, "--data", args.data, "--out", str(args.out / task)]):
            raise MinipsError(f"{task}: the evaluation ended with code {code}")


def run_sweep(args: argparse.Namespace, methods: list[str]) -> None:
    arguments = [
        "--task",
        "nq_open",
        "--workers",
        "2,4,8",
        "--method",
        ",".join(methods),
        "--rows",
        str(max(args.rows // 2, 1)),
        "--held-out",
    ]
    if code := evaluate([*arguments, "--answer-tokens", "24", "--data", args.data, "--out", str(args.out / "sweep")]):
        raise MinipsError(f"sweep: the evaluation ended with code {code}")


def run_answers(args: argparse.Namespace) -> None:
    """Four workers a question; both synthesizers read the very same branches."""
    engine = Engine.from_pretrained(progress=True)
    both = {"base": Synthesizer(engine), "adapter": Synthesizer(engine, args.adapter)}
    found = []
    for number, question in enumerate(QUESTIONS):
        with engine.prefill(question) as prefix:
            branches = engine.fork(prefix, [""] * 4)
        engine.decode(branches, SamplingParams(max_tokens=96, temperature=0.7, top_p=0.95, seed=number))
        answers = {}
        for name, synthesizer in both.items():
            params = SamplingParams(max_tokens=128, repetition_penalty=1.05)
            answers[name] = synthesizer.generate_from_caches(branches, default_prompt(question), params, consume=False).text
        for branch in branches:
            branch.close()
        found.append({"question": question, **answers})
        print(f"{number + 1} of {len(QUESTIONS)}", file=sys.stderr, flush=True)
    (args.out / "answers.json").write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")


def label(method: str, adapter: str) -> str:
    name, _, whose = method.partition("@")
    if not whose:
        return f"{name}, base weights"
    return f"**{name} with this adapter**" if whose == adapter else f"{name}, trained once"


def tables_section(args: argparse.Namespace) -> str:
    tables = {task: summary["tables"][0] for task in TASKS if (summary := read(args.out / task, "summary.json"))}
    if not tables:
        return ""
    methods = list(next(iter(tables.values()))["methods"])
    rows = []
    for method in methods:
        cells, scores = [], []
        for table in tables.values():
            found = table["methods"][method]
            estimate = found["scores"][table["metrics"][0]]
            scores.append(estimate["mean"])
            cells += [value(estimate, 100), value(found["nll"], digits=2)]
        rows.append([label(method, args.adapter), f"{sum(scores) / len(scores):.1%}", *cells])
    head = ["method", "mean", *(f"{task}: {what}" for task, table in tables.items() for what in (f"{table['metrics'][0]}, %", "NLL"))]
    counts = ", ".join(f"{task} {table['rows']}" for task, table in tables.items())
    note = f"Held-out rows ({counts}), m = 4, greedy, 95% intervals in brackets; trained once: text and parallel on the same rows and steps.\n"
    return f"{note}\n{grid(head, rows)}"


def sweep_section(args: argparse.Namespace) -> str:
    summary = read(args.out / "sweep", "summary.json")
    if summary is None:
        return ""
    rows = [
        [str(table["m"]), str(table["rows"]), label(name, args.adapter), value(found["scores"]["em"], 100), value(found["nll"], digits=2)]
        for table in summary["tables"]
        for name, found in table["methods"].items()
    ]
    return f"By number of branches, nq_open:\n\n{grid(['m', 'rows', 'method', 'em, %', 'NLL'], rows)}"


def answers_section(args: argparse.Namespace) -> str:
    found = read(args.out, "answers.json")
    if found is None:
        return ""
    parts = ["### Twenty ordinary questions\n\nFour workers of up to 96 tokens; both answers are read from the same caches.\n"]
    for entry in found:
        parts.append(f"**{entry['question']}**\n")
        parts += [f"- {name}: {' '.join(entry[name].split())}" for name in ("base", "adapter")]
        parts.append("")
    return "\n".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True, help="the data folder")
    parser.add_argument("--rows", type=int, default=200, help="held-out rows of each task (default: %(default)s)")
    parser.add_argument("--adapter", default="smollm2-135m-ps", help="name or folder (default: %(default)s)")
    parser.add_argument("--text-adapter", help="folder of the LoRA that was trained on the same rows as text")
    parser.add_argument("--once", help="folder of the adapter of one training run, on the rows and steps of --text-adapter")
    parser.add_argument("--log", type=Path, action="append", help="log.jsonl of a stage of the training run, for the curve; repeatable")
    parser.add_argument("--card", type=Path, default=Path("weights/smollm2-135m-ps/README.md"))
    parser.add_argument("--out", type=Path, default=Path("runs/proof"))
    parser.add_argument(
        "--only", default="judge,sweep,answers", help="steps, with commas; none only writes the sections (default: %(default)s)"
    )
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    methods = ["text", "parallel", f"parallel@{args.adapter}"]
    if args.text_adapter:
        methods.insert(1, f"text@{args.text_adapter}")
    if args.once:
        methods.insert(-1, f"parallel@{args.once}")
    steps = {"judge": lambda: run_tasks(args, methods), "sweep": lambda: run_sweep(args, methods), "answers": lambda: run_answers(args)}
    try:
        for name in args.only.split(","):
            if name != "none":
                steps[name]()
        if args.log:
            write_plot([read_log(log) for log in args.log], args.out / "loss.png")
            shutil.copyfile(args.out / "loss.png", args.card.parent / "loss.png")
    except MinipsError as error:
        print(f"bench: error: {error}", file=sys.stderr)
        return 1
    tables = "\n".join(part for part in (tables_section(args), sweep_section(args)) if part)
    write_between(START, END, f"## Trained adapter\n\n`python bench/proof.py --data DIR --rows {args.rows}`\n\n{tables}", RESULTS)
    write_between(START, END, "\n".join(part for part in (tables, answers_section(args)) if part), args.card)
    return 0


if __name__ == "__main__":
    sys.exit(main())
