"""The training loop: examples in a fixed order, a loss a batch, AdamW, checkpoints, and the checks that stop a broken run early.

A run killed at any moment and resumed from its last checkpoint ends with the same bytes as one left alone: the order of examples is
a function of (seed, step), and nothing else is random after the start.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ..adapter import Adapter, save_adapter
from ..chat import require_format
from ..engine import Engine
from ..errors import MinipsError
from ..kv_cache import Branch
from .checkpoints import checkpoints, load_checkpoint, save_checkpoint
from .config import TrainConfig
from .loss import Item, batch_loss
from .network import Network

LOG = "log.jsonl"


@dataclass(frozen=True)
class Example:
    """One row: text of the shared prefix (user turn left open), given branches, the synthesizer's prompt, and the target answer."""

    id: str
    prefix: str
    branches: tuple[str, ...]
    prompt: str
    target: str


class Trainer:
    """Trains on `examples` in `folder`; goes on from the newest checkpoint there, if its config is the same.

    say: hears one line of progress a step.
    """

    def __init__(
        self,
        config: TrainConfig,
        engine: Engine,
        examples: Sequence[Example],
        folder: str | Path,
        *,
        say: Callable[[str], None] = lambda text: None,
    ):
        if not examples:
            raise MinipsError("training: there are no examples")
        if engine.tokenizer is None:
            raise MinipsError("training: examples are text, and the model has no tokenizer.json")
        self.config, self.engine, self.examples, self.folder, self.say = config, engine, list(examples), Path(folder), say
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            self.network = Network(engine, config.mapper_config(), rank=config.rank, alpha=config.alpha, targets=config.targets)
        parameters = self.network.trainable()
        groups = [
            {"params": [p for name, p in parameters.items() if name.startswith(part)], "lr": rate, "peak": rate}
            for part, rate in (("mapper.", config.mapper_lr), ("lora.", config.lora_lr))
        ]
        self.optimizer = torch.optim.AdamW([group for group in groups if group["params"]], weight_decay=config.weight_decay)
        self.step = 0
        self._orders: dict[int, list[int]] = {}
        self.moved: set[str] = set()  # tensors that have had a gradient
        if found := checkpoints(self.folder):
            state = load_checkpoint(found[-1], self.network, self.optimizer)
            if state.get("config") != config.as_dict():
                raise MinipsError(f"{found[-1]}: this run was started with another config; use the same or another folder")
            self.step, self.moved = state["step"], set(state["moved"])
            say(f"going on from step {self.step}")

    def train(self, until: int | None = None) -> float:
        """Train to the end (or to step `until`); returns the last step's loss. The adapter is written at the end, into `adapter`.

        Ctrl-C saves a checkpoint. MinipsError where the loss is not finite, or gradients are missing or where none may be.
        """
        config, loss = self.config, float("nan")
        end = config.steps if until is None else min(until, config.steps)
        self.folder.mkdir(parents=True, exist_ok=True)
        started, first = time.perf_counter(), self.step
        try:
            while self.step < end:
                loss, tokens = self._step()
                seconds = (time.perf_counter() - started) / (self.step - first)
                self._log({"step": self.step, "loss": round(loss, 6), "target_tokens": tokens, "rate": config.rate(self.step - 1)})
                self.say(
                    f"step {self.step} of {config.steps}: loss {loss:.3f}, {seconds:.2f} s a step, {seconds * (end - self.step):.0f} s left"
                )
                if self.step % config.checkpoint_every == 0 or self.step == config.steps:
                    self.save()
        except KeyboardInterrupt:
            self.save()
            raise
        if self.step == config.steps and not (self.folder / "adapter").exists():
            self.write_adapter(self.folder / "adapter")
        return loss

    def save(self) -> None:
        """A checkpoint of now; nothing where there is one already."""
        if not (self.folder / f"step-{self.step:08d}").exists():
            save_checkpoint(
                self.folder, self.step, self.network, self.optimizer, {"config": self.config.as_dict(), "moved": sorted(self.moved)}
            )

    def write_adapter(self, folder: Path) -> Path:
        """The trained parts in our form, with the merge options they were trained with."""
        record = {"config": self.config.as_dict(), "steps": self.step, "examples": len(self.examples)}
        adapter = Adapter(folder.name, self.network.mapper, self.network.adapter(), self.config.merge_options(), {"training": record})
        fingerprint = self.engine.fingerprint
        return save_adapter(adapter, folder, self.engine.config, base_fingerprint=fingerprint, base_model=self.config.model)

    def batch_of(self, number: int) -> list[Example]:
        """The examples of batch `number` (from 0): every epoch is one shuffle of all, drawn from (seed, epoch)."""
        size, count = self.config.batch, len(self.examples)
        places = [divmod(index, count) for index in range(number * size, (number + 1) * size)]
        orders = {epoch: self._order(epoch) for epoch in {epoch for epoch, _ in places}}
        return [self.examples[orders[epoch][at]] for epoch, at in places]

    def _order(self, epoch: int) -> list[int]:
        """The shuffle of one epoch; kept, for all batches of the epoch ask for it."""
        if epoch not in self._orders:
            order = list(range(len(self.examples)))
            random.Random(f"{self.config.seed} {epoch}").shuffle(order)
            self._orders = {known: kept for known, kept in self._orders.items() if known >= epoch - 1} | {epoch: order}
        return self._orders[epoch]

    def _step(self) -> tuple[float, int]:
        """One optimizer step -> mean loss, target tokens."""
        config, losses, tokens = self.config, [], 0
        for group in self.optimizer.param_groups:
            group["lr"] = group["peak"] * config.rate(self.step)
        self.optimizer.zero_grad(set_to_none=True)
        for part in range(config.accumulation):
            examples = self.batch_of(self.step * config.accumulation + part)
            branches, items = encode(self.engine, examples)
            try:
                loss, count = batch_loss(self.network, items, config.merge_options(), layer_checkpoints=config.layer_checkpoints)
            finally:
                for branch in branches:
                    branch.close()
            if not bool(torch.isfinite(loss)):
                raise MinipsError(
                    f"training: the loss of step {self.step + 1} is {loss.item()}, rows {self._names(examples)}; {self._last()}"
                )
            (loss / config.accumulation).backward()
            losses.append(loss.item())
            tokens += count
        self._check_gradients()
        if config.clip:
            torch.nn.utils.clip_grad_norm_(self.network.trainable().values(), config.clip)
        self.optimizer.step()
        self.step += 1
        return sum(losses) / len(losses), tokens

    def _check_gradients(self) -> None:
        """By the second step every trained tensor has had a gradient (identity starts make some zero in the first), and no base tensor has one."""
        for name, tensor in self.network.trainable().items():
            if tensor.grad is not None and not bool(torch.isfinite(tensor.grad).all()):
                raise MinipsError(f"training: the gradient of {name} is not finite in step {self.step + 1}; {self._last()}")
            if tensor.grad is not None and bool(tensor.grad.any()):
                self.moved.add(name)
        if wrong := [name for name, tensor in self.network.frozen() if tensor.grad is not None]:
            raise MinipsError(f"training: base tensors got a gradient: {', '.join(wrong[:3])}")
        if self.step == 1 and (idle := sorted(set(self.network.trainable()) - self.moved)):
            raise MinipsError(f"training: no gradient reached {len(idle)} tensors in two steps: {', '.join(idle[:3])}")

    def _last(self) -> str:
        found = checkpoints(self.folder)
        return f"the last good checkpoint is {found[-1]}" if found else "there is no checkpoint yet"

    @staticmethod
    def _names(examples: Sequence[Example]) -> str:
        return ", ".join(example.id for example in examples)

    def _log(self, entry: dict) -> None:
        with open(self.folder / LOG, "a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")


def encode(engine: Engine, examples: Sequence[Example]) -> tuple[list[Branch], list[Item]]:
    """Open the branches of all examples in one ragged batch, by the engine's own calls -> all branches (to be closed), items."""
    opened: list[Branch] = []
    items = []
    try:
        outputs: list[str] = []
        rows: list[list[Branch]] = []
        for example in examples:
            with engine.prefill(example.prefix) as prefix:
                rows.append(engine.fork(prefix, [""] * len(example.branches)))
            opened += rows[-1]
            outputs += example.branches
        engine.encode(opened, outputs)
        end = require_format(engine.chat).turn_end  # learnt too, or answers would not stop
        for example, branches in zip(examples, rows):
            prompt = engine.prompts.encode(example.prompt, "continuation")
            items.append(Item(branches, prompt, [*engine.prompts.output(example.target), end]))
    except BaseException:
        for branch in opened:
            branch.close()
        raise
    return opened, items
