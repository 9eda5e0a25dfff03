"""`python -m minips.distill CONFIG.json`: targets for training, written by the text-concatenation synthesizer on the engine itself.

Every row's branches are put into one long prompt as text, the base model answers, and its answer becomes the target of the same row:
the synthesizer that reads caches learns to answer as the one that reads text. Rows with live workers are decoded first. Branches and
targets that the model has written are kept as token ids.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain
from pathlib import Path

from .command import command
from .config import DEFAULT_MODEL, SamplingParams
from .corpus.mixture import load_mixture, read_examples
from .engine import Engine
from .errors import MinipsError, RoomError, brief, refuse_unknown
from .reading import is_integer, read_json
from .training.encoding import Example, as_text, ids_of, text_of


@dataclass(frozen=True)
class DistillConfig:
    """data: as `corpus.mixture.load_mixture` takes it. max_tokens: of a target; one that does not end by then is left out.

    worker_tokens, worker_temperature: of live workers. temperature: of the targets. method: text or text_turn. batch: rows at a time.
    """

    data: tuple[dict, ...]
    model: str = DEFAULT_MODEL
    method: str = "text"
    max_tokens: int = 160
    temperature: float = 0.0
    worker_tokens: int = 96
    worker_temperature: float = 0.8
    batch: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("max_tokens", "worker_tokens", "batch"):
            if not (is_integer(getattr(self, name)) and getattr(self, name) >= 1):
                raise MinipsError(f"distillation: {name} is {brief(getattr(self, name))}, expected a whole number of at least 1")
        if self.method not in ("text", "text_turn"):
            raise MinipsError(f"distillation: method is {brief(self.method)}, expected text or text_turn")
        if not isinstance(self.data, (list, tuple)) or not self.data:
            raise MinipsError(f"distillation: data is {brief(self.data)}, expected a list of data sets")
        if not isinstance(self.model, str) or not is_integer(self.seed):
            raise MinipsError("distillation: model is expected to be a name, and seed a whole number")
        for temperature in (self.temperature, self.worker_temperature):
            SamplingParams(temperature=temperature)

    @classmethod
    def from_file(cls, path: str | Path) -> DistillConfig:
        data = read_json(Path(path))
        refuse_unknown(data, [entry.name for entry in fields(cls)], path)
        return cls(**{"data": (), **data})


def distill(
    config: DistillConfig,
    out: str | Path,
    *,
    data: str | Path | None = None,
    base: str | Path = ".",
    engine: Engine | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> int:
    """Write the rows to the JSONL file `out`, or go on with it; returns how many it then holds.

    A row whose answer did not end, is empty or does not fit is noted with target null, so that it is not tried again; readers skip it.
    """
    out = Path(out)
    if "\0" in str(out):
        raise MinipsError(f"{brief(str(out))}: is no file name")
    examples = load_mixture(config.data, data, seed=config.seed, base=Path(base), say=say)
    done = _finished(out)
    left = [example for example in examples if example.id not in done]
    engine = engine or Engine.from_pretrained(config.model)
    say(f"{len(examples)} rows, {len(examples) - len(left)} done before")
    started = time.perf_counter()
    out.parent.mkdir(parents=True, exist_ok=True)
    with open(out, "a", encoding="utf-8") as file:
        for first in range(0, len(left), config.batch):
            for row in _batch(config, engine, left[first : first + config.batch]):
                file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())
            count, seconds = min(first + config.batch, len(left)), time.perf_counter() - started
            say(f"{count} of {len(left)}, {seconds:.0f} s, {seconds / count * (len(left) - count):.0f} s left")
    return sum(1 for _ in read_examples(out))


def _finished(out: Path) -> set[str]:
    """Ids of the rows that a file holds; a last line cut short by a kill is removed."""
    if not out.exists():
        return set()
    whole, _, cut = out.read_bytes().rpartition(b"\n")
    try:
        if not (start := b'{"id": ').startswith(cut[: len(start)]):
            raise ValueError
        lines = whole.decode("utf-8").split("\n") if whole else []
        done = {json.loads(line)["id"] for line in lines if line.strip()}
    except (ValueError, KeyError, TypeError):
        raise MinipsError(f"{out}: is no file of distilled rows; give another --out") from None
    os.truncate(out, len(whole) + 1 if whole else 0)
    return done


def _batch(config: DistillConfig, engine: Engine, examples: Sequence[Example]) -> list[dict]:
    """Rows of one batch; where it does not fit, its examples alone."""
    try:
        examples = _with_branches(config, engine, examples)
        prompts = [as_text(example, [text_of(engine, b) for b in example.branches], config.method) for example in examples]
        params = [
            SamplingParams(max_tokens=config.max_tokens, temperature=config.temperature, seed=_seed(config, example.id, "target"))
            for example in examples
        ]
        results = engine.generate_batch(prompts, params)
    except RoomError:
        if len(examples) == 1:
            return [{"id": examples[0].id, "target": None}]
        return [row for example in examples for row in _batch(config, engine, [example])]
    return [_row(example, result.token_ids, result.finish_reason, result.text) for example, result in zip(examples, results)]


def _with_branches(config: DistillConfig, engine: Engine, examples: Sequence[Example]) -> list[Example]:
    """The examples with the outputs of their live workers, all decoded as one batch, in place of the workers."""
    live = [example for example in examples if example.workers]
    roots, branches = engine.prefill_batch([example.prefix for example in live]), []
    try:
        branches = engine.fork_batch(roots, [example.workers for example in live])
        flat = [branch for row in branches for branch in row]
        seeds = [_seed(config, example.id, at) for example, row in zip(live, branches) for at in range(len(row))]
        params = SamplingParams(max_tokens=config.worker_tokens, temperature=config.worker_temperature)
        engine.decode(flat, [replace(params, seed=seed) for seed in seeds])
        written = iter([tuple(tuple(branch.output_ids) for branch in row if branch.output_ids) for row in branches])
    finally:
        for branch in chain(roots, *branches):
            branch.close()
    return [replace(example, branches=next(written), workers=()) if example.workers else example for example in examples]


def _row(example: Example, ids: list[int], finish_reason: str, text: str) -> dict:
    if finish_reason != "stop" or not ids:
        return {"id": example.id, "target": None}
    branches = [ids_of(branch) for branch in example.branches]
    return {"id": example.id, "prefix": example.prefix, "branches": branches, "prompt": example.prompt, "target": list(ids), "text": text}


def _seed(config: DistillConfig, *parts: object) -> int:
    return random.Random(f"{config.seed} {parts}").getrandbits(63)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m minips.distill", description=__doc__.split("\n\n")[1], epilog="A run is resumed by the same command."
    )
    parser.add_argument("config", metavar="CONFIG.json", help="data sets and lengths; see DistillConfig")
    parser.add_argument("--data", metavar="DIR", help="the data folder (default: the hub's originals)")
    parser.add_argument(
        "--out", metavar="FILE.jsonl", required=True, help='the rows; an entry {"file": FILE} of a training config reads them'
    )
    parser.add_argument("--quiet", action="store_true", help="no progress on stderr")
    return parser


def run(args: argparse.Namespace) -> int:
    def say(text: str) -> None:
        if not args.quiet:
            print(text, file=sys.stderr, flush=True)

    count = distill(DistillConfig.from_file(args.config), args.out, data=args.data, base=Path(args.config).parent, say=say)
    print(f"{args.out}: {count} rows")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0 done, 1 refused, 2 bad usage, 130 Ctrl-C. argv None: the process ends with this call."""
    return command(argv, lambda: run(build_parser().parse_args(argv)), again="the same command goes on from here")


if __name__ == "__main__":
    sys.exit(main())
