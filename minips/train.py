"""`python -m minips.train CONFIG.json`: train a cache mapper and a synthesizer LoRA, in one or several stages.

A recipe file holds the fields of `TrainConfig`, or those that all stages share and `stages`, a list of what each changes; a stage
starts from the adapter of the one before it. `average`: the weight of the last stage's LoRA when it is averaged with the first one's.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from .adapters import merge_adapters
from .command import command, require_matplotlib
from .corpus.mixture import load_mixture
from .engine import Engine
from .errors import MinipsError, brief
from .reading import read_json
from .training.config import TrainConfig
from .training.curve import read_log, write_plot
from .training.distributed import device_of_process
from .training.trainer import LOG, Trainer, recorded

DEFAULT_OUT = "runs/train"


@dataclass(frozen=True)
class Recipe:
    """The stages of a run in order, and how the first and the last adapter are averaged in the end (None: not at all)."""

    stages: tuple[TrainConfig, ...]
    average: float | None = None

    @classmethod
    def from_file(cls, path: str | Path) -> Recipe:
        """MinipsError naming the file and the field that is wrong."""
        shared = read_json(Path(path))
        stages, average = shared.pop("stages", [{}]), shared.pop("average", None)
        if not (isinstance(stages, list) and stages and all(isinstance(stage, dict) for stage in stages)):
            raise MinipsError(f"{path}: stages is {brief(stages)}, expected a list of objects, at least one")
        if average is not None and (
            len(stages) < 2 or isinstance(average, bool) or not (isinstance(average, (int, float)) and 0 <= average <= 1)
        ):
            raise MinipsError(f"{path}: average is {brief(average)}, expected a number from 0 to 1, and two stages or more")
        configs = []
        for number, stage in enumerate(stages, 1):
            config = TrainConfig.from_dict({**shared, **stage}, f"{path}, stage {number}" if len(stages) > 1 else str(path))
            configs.append(config)
        if len({config.model for config in configs}) > 1:
            raise MinipsError(f"{path}: the stages have different models, expected one")
        return cls(tuple(configs), average)


def train(
    recipe: Recipe | TrainConfig,
    folder: str | Path,
    *,
    data: str | Path | None = None,
    base: str | Path = ".",
    engine: Engine | None = None,
    say: Callable[[str], None] = lambda text: None,
    on_step: Callable[[dict], None] = lambda entry: None,
) -> Path:
    """Run a recipe in `folder`, or go on with it; returns the folder of the adapter.

    data: the data folder (None: hub originals). base: where relative `file` entries are looked up. on_step: hears each step's log
    entry, with `stage`, `stages`, `steps` and `seconds`.
    """
    recipe = recipe if isinstance(recipe, Recipe) else Recipe((recipe,))
    folder, adapters = Path(folder), []
    engine = engine or Engine.from_pretrained(recipe.stages[0].model)
    for number, config in enumerate(recipe.stages, 1):
        place = folder / f"stage-{number}" if len(recipe.stages) > 1 else folder
        if adapters:
            config = replace(config, start=str(adapters[-1]))
        if (place / "adapter").exists():
            _check_done(place / "adapter", config)
        else:
            examples = load_mixture(config.data, data, seed=config.seed, base=Path(base), say=say)
            total = {"stage": number, "stages": len(recipe.stages), "steps": config.steps}
            trainer = Trainer(config, engine, examples, place, say=say, on_step=lambda entry, total=total: on_step({**entry, **total}))
            trainer.train()
        adapters.append(place / "adapter")
    if recipe.average is None:
        return adapters[-1]
    if not (folder / "adapter").exists():
        merge_adapters(adapters[-1], adapters[0], folder / "adapter", weight=recipe.average, mapper="a")
    return folder / "adapter"


def _check_done(adapter: Path, config: TrainConfig) -> None:
    """MinipsError where an adapter that is there already is not what this config makes."""
    record = (read_json(adapter / "minips.json").get("training") or {}) if (adapter / "minips.json").exists() else {}
    if record.get("config") != recorded(config):
        raise MinipsError(f"{adapter}: is there already, and was not made by this config; use another folder")


class Progress:
    """A bar with loss, tokens a second and the time left on a terminal, a line every few steps elsewhere; loss: mean of the last ones."""

    def __init__(self, quiet: bool, every: int = 10):
        self.quiet, self.every, self.bar, self.stage = quiet, every, None, 0
        self.recent: list[dict] = []

    def step(self, entry: dict) -> None:
        self.recent = [*self.recent[-19:], entry]
        loss = sum(e["loss"] for e in self.recent) / len(self.recent)
        seconds = sum(e["seconds"] for e in self.recent)
        rate = sum(e["tokens"] for e in self.recent) / seconds
        if self.quiet:
            return
        if sys.stderr.isatty():
            if self.stage != entry["stage"]:
                from tqdm import tqdm  # huggingface-hub brings it

                self.close()
                label = f"stage {entry['stage']} of {entry['stages']}" if entry["stages"] > 1 else "training"
                self.bar, self.stage = tqdm(total=entry["steps"], initial=entry["step"] - 1, desc=label, unit="step"), entry["stage"]
            self.bar.update(1)
            self.bar.set_postfix_str(f"loss {loss:.3f}, {rate:,.0f} tokens/s")
        elif entry["step"] % self.every == 0 or entry["step"] == entry["steps"]:
            left = (entry["steps"] - entry["step"]) * seconds / len(self.recent)
            print(
                f"step {entry['step']} of {entry['steps']}: loss {loss:.3f}, {rate:,.0f} tokens/s, {left / 60:.1f} min left",
                file=sys.stderr,
            )

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()
        self.recent = []


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m minips.train",
        description="Train a cache mapper and a LoRA that read worker branches. The base model stays as it is.",
        epilog="A run is resumed by the same command and ends with the same bytes. torchrun -m minips.train shares every batch among processes.",
    )
    add = parser.add_argument
    add("config", metavar="CONFIG.json", help="a run's settings; see weights/recipes and TrainConfig")
    add("--data", metavar="DIR", help="the data folder (default: the hub's originals)")
    add("--out", metavar="DIR", help=f"folder of the run (default: {DEFAULT_OUT}/ and the config's name)")
    add("--plot", metavar="FILE.png", help="draw the loss when done (needs matplotlib)")
    add("--device", default="auto", help="auto, cpu or cuda")
    add("--dtype", default="auto", help="of the base weights: auto (as stored), bfloat16, float16 or float32")
    add("--threads", type=int, metavar="N", help="CPU threads (default: torch's choice)")
    add("--quiet", action="store_true", help="no progress on stderr")
    return parser


def run(args: argparse.Namespace) -> int:
    if args.threads is not None:
        if not 1 <= args.threads <= 1024:
            raise MinipsError(f"--threads is {args.threads}, expected 1 to 1024")
        torch.set_num_threads(args.threads)
    if args.plot:
        require_matplotlib()
    recipe, folder = Recipe.from_file(args.config), Path(args.out or f"{DEFAULT_OUT}/{Path(args.config).stem}")
    progress = Progress(args.quiet)

    def say(text: str) -> None:
        if not args.quiet:
            print(text, file=sys.stderr, flush=True)

    for config in recipe.stages:
        if not config.data:
            raise MinipsError(f"{args.config}: data is missing, expected a list of data sets")
    engine = Engine.from_pretrained(recipe.stages[0].model, device=device_of_process(args.device), dtype=args.dtype, progress=not args.quiet)
    try:
        adapter = train(recipe, folder, data=args.data, base=Path(args.config).parent, engine=engine, say=say, on_step=progress.step)
    finally:
        progress.close()
    if args.plot:
        write_plot([read_log(path) for path in sorted(folder.glob(f"**/{LOG}"))], Path(args.plot))
    print(adapter)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0 done, 1 refused, 2 bad usage, 130 Ctrl-C (a checkpoint is written)."""
    return command(argv, lambda: run(build_parser().parse_args(argv)), again="the same command goes on from the last checkpoint")


if __name__ == "__main__":
    sys.exit(main())
