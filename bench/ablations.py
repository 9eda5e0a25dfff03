"""Ablations: variants of the method trained on the same rows, steps and encoded branches, then compared on held-out rows.

    python bench/ablations.py weights/recipes/ablations.json --data DIR [--rows 100] [--out runs/ablations] [--only train|judge]

The recipe holds `shared` (fields of TrainConfig), `variants` (what each changes) and `tasks`. All variants that read caches are trained in
lockstep: a batch of branches is encoded once and every variant takes its step on it, which costs a fraction of separate runs and changes
nothing, for the base model that encodes them is frozen. Variants with method text are trained alone. Resumable; the section
"Ablations" of bench/RESULTS.md is written anew at the end.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from quality import grid, read, value, write_between

from minips import Engine, MinipsError
from minips.corpus.mixture import load_mixture
from minips.evaluate import main as evaluate
from minips.reading import read_json
from minips.training.config import TrainConfig
from minips.training.trainer import Example, Trainer

START, END = "<!-- ablations: written by bench/ablations.py -->", "<!-- ablations: end -->"
UNTRAINED = ("text", "parallel", "reuse", "ape")


def train_together(engine: Engine, configs: dict[str, TrainConfig], examples: Sequence[Example], out: Path) -> None:
    """Train several configs that differ in anything but the rows and their order, step by step on the same branches."""
    trainers = {name: Trainer(config, engine, examples, out / name) for name, config in configs.items()}
    for trainer in trainers.values():
        trainer.folder.mkdir(parents=True, exist_ok=True)
    while waiting := [trainer for trainer in trainers.values() if trainer.step < trainer.config.steps]:
        step = min(trainer.step for trainer in waiting)  # those that were saved later wait for the others
        active = [trainer for trainer in waiting if trainer.step == step]
        lead = active[0]
        batches = [lead.encoded(part) for part in range(lead.config.accumulation)]
        try:
            losses = [trainer.take(batches)["loss"] for trainer in active]
        finally:
            for branches, _, _ in batches:
                for branch in branches:
                    branch.close()
        if lead.step % 5 == 0 or lead.step == lead.config.steps:
            said = ", ".join(f"{trainer.folder.name} {loss:.2f}" for trainer, loss in zip(active, losses))
            print(f"step {lead.step} of {lead.config.steps}: {said}", file=sys.stderr, flush=True)
    for trainer in trainers.values():
        trainer.train()  # nothing is left but to write the adapter


def train_all(recipe: dict, data: str, out: Path) -> list[str]:
    configs = {name: TrainConfig.from_dict({**recipe["shared"], **change}, name) for name, change in recipe["variants"].items()}
    left = {name: config for name, config in configs.items() if not (out / name / "adapter").exists()}
    if left:
        first = next(iter(configs.values()))
        engine = Engine.from_pretrained(first.model, progress=True)
        examples = load_mixture(first.data, data, seed=first.seed, say=lambda text: print(text, file=sys.stderr))
        together = {name: config for name, config in left.items() if config.method == "parallel"}
        if together:
            train_together(engine, together, examples, out)
        for name in left.keys() - together.keys():
            print(f"== {name}", file=sys.stderr, flush=True)
            Trainer(left[name], engine, examples, out / name).train()
    return list(configs)


def judge(recipe: dict, names: list[str], data: str, rows: int, out: Path) -> None:
    """Every variant on the same held-out rows and branches as the untrained methods."""
    methods = [*UNTRAINED, *(f"{'text' if name.startswith('text') else 'parallel'}@{out / name / 'adapter'}" for name in names)]
    for task in recipe["tasks"]:
        arguments = ["--task", task, "--method", ",".join(methods), "--rows", str(rows), "--held-out", "--batch", "8", "--data", data]
        if code := evaluate([*arguments, "--answer-tokens", "48" if task == "kv_retrieval" else "24", "--out", str(out / "judged" / task)]):
            raise MinipsError(f"{task}: the evaluation ended with code {code}")


def section(recipe: dict, out: Path, rows: int) -> str:
    shared = recipe["shared"]
    count = sum(entry["rows"] for entry in shared["data"])
    trained = f"trained on the same {count} rows in the same {shared['steps']} steps of {shared['batch']}, from the same seed"
    command = f"python bench/ablations.py weights/recipes/ablations.json --data DIR --rows {rows}"
    parts = [f"## Ablations\n\n`{command}`: every variant {trained}, then asked about the same held-out rows.\n"]
    tables = {task: read(out / "judged" / task, "summary.json")["tables"][0] for task in recipe["tasks"]}
    methods = list(next(iter(tables.values()))["methods"])
    rows_of = []
    for method in methods:
        cells = []
        for table in tables.values():
            found = table["methods"][method]
            cells += [value(found["scores"][table["metrics"][0]], 100), value(found["nll"], digits=2)]
        label = Path(method.split("@", 1)[1]).parent.name if "@" in method else f"{method}, untrained"
        rows_of.append([label, *cells])
    head = ["variant", *(f"{task}: {what}" for task, table in tables.items() for what in (f"{table['metrics'][0]}, %", "NLL"))]
    counts = ", ".join(f"{task} {table['rows']}" for task, table in tables.items())
    parts.append(f"Rows: {counts}. 95% intervals in brackets.\n\n{grid(head, rows_of)}")
    return "\n".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--data", required=True, help="the data folder")
    parser.add_argument("--rows", type=int, default=100, help="held-out rows of each task (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("runs/ablations"))
    parser.add_argument("--only", choices=("train", "judge"))
    args = parser.parse_args()
    try:
        recipe = read_json(args.recipe)
        names = list(recipe["variants"]) if args.only == "judge" else train_all(recipe, args.data, args.out)
        if args.only != "train":
            judge(recipe, names, args.data, args.rows, args.out)
            write_between(START, END, section(recipe, args.out, args.rows))
    except MinipsError as error:
        print(f"bench: error: {error}", file=sys.stderr)
        return 1
    except KeyError as error:
        print(f"bench: error: {args.recipe}: {error.args[0]} is missing", file=sys.stderr)
        return 1
    print(json.dumps({"variants": names, "out": str(args.out)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
