"""The training loop: examples in a fixed order, a loss a batch, AdamW, checkpoints, and the checks that stop a broken run early.

A run killed at any moment and resumed from its last checkpoint ends with the same bytes as one left alone: the order of examples is
a function of (seed, step), and nothing else is random after the start.
"""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch

from ..adapter import Adapter, load_adapter, save_adapter
from ..engine import Engine
from ..errors import MinipsError
from ..hub import resolve_adapter
from ..kv_cache import Branch
from .checkpoints import checkpoints, load_checkpoint, save_checkpoint
from .config import TrainConfig
from .distributed import Group
from .encoding import Example, encode
from .loss import Item, batch_loss
from .network import Network

LOG = "log.jsonl"


class Trainer:
    """Trains on `examples` in `folder`; goes on from the newest checkpoint there, if its config is the same.

    say: hears lines of news. on_step: hears each step's log entry. Under torchrun every process makes one of these; the first one writes.
    """

    def __init__(
        self,
        config: TrainConfig,
        engine: Engine,
        examples: Sequence[Example],
        folder: str | Path,
        *,
        say: Callable[[str], None] = lambda text: None,
        on_step: Callable[[dict], None] = lambda entry: None,
    ):
        if not examples:
            raise MinipsError("training: there are no examples")
        if engine.tokenizer is None:
            raise MinipsError("training: examples are text, and the model has no tokenizer.json")
        self.config, self.engine, self.examples, self.folder, self.say = config, engine, list(examples), Path(folder), say
        self.on_step, self.group = on_step, Group(engine.device)
        with torch.random.fork_rng(devices=[engine.device] if engine.device.type == "cuda" else []):
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
        elif config.start:
            self.network.start_from(load_adapter(resolve_adapter(config.start), engine.model, lambda: engine.fingerprint))

    def train(self, until: int | None = None) -> float:
        """Train to the end (or to step `until`); returns the last step's loss. The adapter is written at the end, into `adapter`.

        Ctrl-C saves a checkpoint. MinipsError where the loss is not finite, or gradients are missing or where none may be.
        """
        config, loss = self.config, float("nan")
        end = config.steps if until is None else min(until, config.steps)
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            while self.step < end:
                loss = self.take()["loss"]
        except KeyboardInterrupt:
            self.save()
            raise
        if self.step == config.steps and self.group.rank == 0 and not (self.folder / "adapter").exists():
            self.write_adapter(self.folder / "adapter")
        self.group.wait()
        return loss

    def take(self, batches: Iterable[tuple[list[Branch], list[Item], list[str]]] | None = None) -> dict:
        """`advance`, with its log entry written and a checkpoint where one is due."""
        started = time.perf_counter()
        entry = self.advance(batches)
        self._log(entry)
        self.on_step({**entry, "seconds": time.perf_counter() - started})
        if self.step % self.config.checkpoint_every == 0 or self.step == self.config.steps:
            self.save()
        return entry

    def save(self) -> None:
        """A checkpoint of now; nothing where there is one already."""
        if self.group.rank == 0 and not (self.folder / f"step-{self.step:08d}").exists():
            save_checkpoint(
                self.folder, self.step, self.network, self.optimizer, {"config": self.config.as_dict(), "moved": sorted(self.moved)}
            )

    def write_adapter(self, folder: Path) -> Path:
        """The trained parts in our form, with the merge options they were trained with."""
        record = {"config": recorded(self.config), "steps": self.step, "examples": len(self.examples)}
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

    def encoded(self, part: int) -> tuple[list[Branch], list[Item], list[str]]:
        """Micro-batch `part` of the next step, this process's share; see `encode`."""
        examples = self.batch_of(self.step * self.config.accumulation + part)[self.group.rank :: self.group.size]
        return encode(self.engine, examples, self.config, self.step)

    def advance(self, batches: Iterable[tuple[list[Branch], list[Item], list[str]]] | None = None) -> dict:
        """One optimizer step; the loss is the mean over the whole step, whatever the batches and processes. -> log entry

        batches: the step's micro-batches, where they have been encoded already (for several trainers that read the same branches; the
        caller closes them).
        """
        config, group, parameters = self.config, self.group, self.network.trainable()
        for part in self.optimizer.param_groups:
            part["lr"] = part["peak"] * config.rate(self.step)
        self.optimizer.zero_grad(set_to_none=True)
        loss_sum, weight, targets, tokens, skipped = 0.0, 0, 0, 0, []
        for branches, items, left_out in batches or map(self.encoded, range(config.accumulation)):
            skipped += left_out
            try:
                if items:
                    tokens += sum(len(i.prompt) + len(i.target) + sum(b.num_tokens for b in i.branches) for i in items)
                    targets += sum(len(item.target) for item in items)
                    options, kept = config.merge_options(), config.layer_checkpoints
                    loss, count = batch_loss(self.network, items, options, weighting=config.weighting, layer_checkpoints=kept)
                    (loss * count).backward()
                    loss_sum, weight = loss_sum + loss.item() * count, weight + count
            finally:
                for branch in branches if batches is None else ():
                    branch.close()
        loss_sum, weight, targets, tokens, left_out = group.total(loss_sum, weight, targets, tokens, len(skipped))
        if not math.isfinite(loss_sum):
            names = [e.id for part in range(config.accumulation) for e in self.batch_of(self.step * config.accumulation + part)]
            raise MinipsError(f"training: the loss of step {self.step + 1} is {loss_sum}, rows {', '.join(names)}; {self._last()}")
        if weight:
            group.sum_gradients(parameters.values())
            for parameter in parameters.values():
                if parameter.grad is not None:
                    parameter.grad /= weight
            self._check_gradients()
            if config.clip:
                torch.nn.utils.clip_grad_norm_(parameters.values(), config.clip)
            self.optimizer.step()
        elif self.step < 2:
            raise MinipsError(f"training: no row of step {self.step + 1} fits: {', '.join(skipped)}; raise most_tokens")
        self.step += 1
        entry = {"step": self.step, "loss": round(loss_sum / max(weight, 1), 6), "target_tokens": int(targets), "tokens": int(tokens)}
        return entry | {"rate": config.rate(self.step - 1)} | ({"skipped": int(left_out)} if left_out else {})

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

    def _log(self, entry: dict) -> None:
        if self.group.rank:
            return
        with open(self.folder / LOG, "a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")


def recorded(config: TrainConfig) -> dict:
    """As it stands in an adapter: without a folder of this machine."""
    return {**config.as_dict(), "start": "/".join(Path(config.start).parts[-2:])}
