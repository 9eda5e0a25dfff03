"""What a training run is: a JSON file, checked, with every default filled in."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from ..config import DEFAULT_MODEL, MergeOptions
from ..errors import MinipsError, brief, refuse_unknown
from ..lora import TARGETS
from ..mapper import MapperConfig
from ..reading import is_integer, read_json

SCHEDULES = ("cosine", "constant")
WEIGHTINGS = ("example", "token")
METHODS = ("parallel", "text", "text_turn")


MOST_RANK = 4096


@dataclass(frozen=True)
class TrainConfig:
    """One run. Learning rates are AdamW's peak values; steps are optimizer steps of batch * accumulation examples each.

    method: how a row's branches are read: `parallel` from their caches; `text` and `text_turn` are the rivals, a LoRA on the branches' text
    under numbered headings or as one assistant turn. data: entries of `corpus.mixture.load_mixture`. weighting: of target tokens in the loss (`loss.batch_loss`).
    mapper: fields of `MapperConfig`. start: an adapter to start from ("": identity).
    rank 0 trains no LoRA. options: fields of `MergeOptions`, stored in the adapter. clip: largest
    norm of the whole gradient (0: off). warmup: steps of linear rise. checkpoint_every: steps. layer_checkpoints saves memory, costs time.
    worker_tokens: the longest output of a live worker. most_tokens: a row with more tokens, branches and target together, is skipped.
    """

    model: str = DEFAULT_MODEL
    method: str = "parallel"
    data: tuple[dict, ...] = ()
    mapper: dict = field(default_factory=lambda: {"kind": "low_rank"})
    rank: int = 16
    alpha: float = 32.0
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")
    options: dict = field(default_factory=dict)
    start: str = ""
    steps: int = 1000
    batch: int = 4
    accumulation: int = 1
    mapper_lr: float = 1e-4
    lora_lr: float = 5e-5
    weight_decay: float = 0.0
    schedule: str = "cosine"
    weighting: str = "example"
    warmup: int = 20
    clip: float = 1.0
    seed: int = 0
    checkpoint_every: int = 100
    layer_checkpoints: bool = False
    worker_tokens: int = 64
    most_tokens: int = 8192

    def __post_init__(self) -> None:
        for name in ("targets", "data"):
            self._require(name, lambda value: isinstance(value, (list, tuple)), "a list")
            object.__setattr__(self, name, tuple(getattr(self, name)))
        self._require("method", lambda value: value in METHODS, f"one of {', '.join(METHODS)}")
        whole = {
            "worker_tokens": 1,
            "most_tokens": 1,
            "steps": 1,
            "batch": 1,
            "accumulation": 1,
            "rank": 0,
            "warmup": 0,
            "seed": 0,
            "checkpoint_every": 1,
        }
        for name, least in whole.items():
            self._require(name, lambda value, least=least: is_integer(value) and value >= least, f"an integer of at least {least}")
        self._require("rank", lambda value: value <= MOST_RANK, f"at most {MOST_RANK}")
        for name in ("mapper_lr", "lora_lr", "weight_decay", "clip", "alpha"):
            self._require(
                name,
                lambda value: isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1e6,
                "a number of at least 0",
            )
        self._require("weighting", lambda value: value in WEIGHTINGS, f"one of {', '.join(WEIGHTINGS)}")
        self._require("schedule", lambda value: value in SCHEDULES, f"one of {', '.join(SCHEDULES)}")
        self._require("targets", lambda value: bool(value) and all(name in TARGETS for name in value), f"some of {', '.join(TARGETS)}")
        self._require("layer_checkpoints", lambda value: isinstance(value, bool), "true or false")
        self._require("start", lambda value: isinstance(value, str), "an adapter's name or folder")
        self._require("model", lambda value: isinstance(value, str) and bool(value), "a name, folder or hub id")
        mapper, options = self.mapper_config(), self.merge_options()
        if options.anchor == "free" and mapper.key_space == "rotated":
            raise MinipsError("training: anchor 'free' cannot be combined with a mapper of rotated keys")
        if self.method != "parallel" and mapper.kind != "none":
            raise MinipsError(f'training: method {self.method} reads no caches; expected mapper {{"kind": "none"}}')
        if not self.rank and mapper.kind in ("none", "normalize"):
            raise MinipsError("training: rank is 0 and the mapper has nothing to train; expected at least one of the two")

    def _require(self, name: str, fine, expected: str) -> None:
        if not fine(getattr(self, name)):
            raise MinipsError(f"training: {name} is {brief(getattr(self, name))}, expected {expected}")

    def mapper_config(self) -> MapperConfig:
        known = {entry.name for entry in fields(MapperConfig)}
        if not isinstance(self.mapper, dict) or not set(self.mapper) <= known:
            raise MinipsError(f"training: mapper is {brief(self.mapper)}, expected an object with some of {', '.join(sorted(known))}")
        return MapperConfig(**self.mapper)

    def merge_options(self) -> MergeOptions:
        if not isinstance(self.options, dict):
            raise MinipsError(f"training: options is {brief(self.options)}, expected an object of merge options")
        return MergeOptions.from_dict(self.options)

    def rate(self, step: int) -> float:
        """Factor on the learning rates at a step (from 0): a linear rise, then constant or half a cosine down to 0 at the end."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        if self.schedule == "constant":
            return 1.0
        return 0.5 * (1 + math.cos(math.pi * (step - self.warmup) / max(self.steps - self.warmup, 1)))

    def as_dict(self) -> dict:
        return {**asdict(self), "targets": list(self.targets), "data": list(self.data)}

    @classmethod
    def from_dict(cls, data: dict, where: str = "training") -> TrainConfig:
        """Fields by name; unknown ones are refused."""
        refuse_unknown(data, [entry.name for entry in fields(cls)], where)
        return cls(**data)

    @classmethod
    def from_file(cls, path: str | Path) -> TrainConfig:
        return cls.from_dict(read_json(Path(path)), str(path))
