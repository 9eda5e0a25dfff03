"""Training speed: ragged batches on the engine against the plain way, transformers and peft with one branch and one example at a time.

    python bench/training.py --data DIR [--rows 16] [--repeats 3]

Both sides train the same LoRA and mapper on the same rows of nq_open and strategyqa with bf16 weights, in one process, alternating.
Their losses on a few rows are compared, in fp32, before anything is timed. The plain way is what the published training does: each branch is a
sequence of its own (prefix, turn, output), encoded with the adapter off, its keys are re-rotated, mapped and joined into a cache, and
prompt and target are read behind it with the adapter on.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F

from minips import Engine, MinipsError
from minips.corpus.mixture import load_mixture
from minips.mapper import CacheMapper
from minips.merge import plan_merge
from minips.training.config import TrainConfig
from minips.training.encoding import Example, encode
from minips.training.loss import batch_loss
from minips.training.trainer import Trainer

SETS = {"nq_open": [2, 4], "strategyqa": [2, 4]}


def rotate(keys: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """keys [heads, tokens, dim] turned by angles [tokens, dim / 2], halves layout."""
    cos, sin = torch.cat((angles.cos(),) * 2, -1), torch.cat((angles.sin(),) * 2, -1)
    one, two = keys.chunk(2, -1)
    return keys * cos + torch.cat((-two, one), -1) * sin


class Plain:
    """transformers and peft, one branch and one example at a time."""

    def __init__(self, engine: Engine, config: TrainConfig):
        from peft import LoraConfig, get_peft_model
        from transformers import AutoModelForCausalLM

        base = AutoModelForCausalLM.from_pretrained(engine.folder, dtype=engine.dtype)
        lora = LoraConfig(r=config.rank, lora_alpha=config.alpha, target_modules=list(config.targets), task_type="CAUSAL_LM")
        self.engine, self.config, self.model = engine, config, get_peft_model(base, lora)
        shape = engine.config
        self.mapper = CacheMapper(config.mapper_config(), shape.num_hidden_layers, shape.num_key_value_heads, shape.head_dim)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(
            [{"params": trained, "lr": config.lora_lr}, {"params": self.mapper.parameters(), "lr": config.mapper_lr}], weight_decay=0.0
        )
        self.model.train()

    def loss(self, item) -> torch.Tensor:
        from transformers import DynamicCache

        limit = self.engine.config.max_position_embeddings
        plan = plan_merge(item.branches, self.config.merge_options(), limit, lossy=False)
        kept_prefix = sum(segment.length for segment in plan.prefix)
        frequencies, layers = self.engine.model.rope.inv_freq, self.engine.config.num_hidden_layers
        whole: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in range(layers)]
        for at, branch in enumerate(item.branches):
            with torch.no_grad(), self.model.disable_adapter():
                cache = self.model(torch.tensor([branch.token_ids]), use_cache=True, logits_to_keep=1).past_key_values
            count, pieces = len(branch.output_ids), plan.pieces[at]
            angles = torch.full((count, 1), float(pieces[0].delta)) * frequencies
            for layer, held in enumerate(cache.layers):
                keys, values = held.keys[0].float(), held.values[0].float()
                if at == 0 and kept_prefix:
                    whole[layer].append((keys[:, :kept_prefix], values[:, :kept_prefix]))
                moved = rotate(keys[:, -count:], angles).transpose(0, 1)
                whose = torch.zeros(count, dtype=torch.int64)
                pair = (
                    self.mapper.map("key", layer, moved, None, whose).transpose(0, 1),
                    self.mapper.map("value", layer, values[:, -count:].transpose(0, 1), None, whose).transpose(0, 1),
                )
                whole[layer].append(pair)
        joined = DynamicCache()
        for layer, pairs in enumerate(whole):
            keys, values = (torch.cat(parts, 1)[None].to(self.engine.dtype) for parts in zip(*pairs))
            joined.update(keys, values, layer)
        fed = torch.tensor([[*item.prompt, *item.target[:-1]]])
        positions = torch.arange(plan.next_position, plan.next_position + fed.shape[1])[None]
        logits = self.model(fed, past_key_values=joined, position_ids=positions, use_cache=True, logits_to_keep=len(item.target)).logits
        return F.cross_entropy(logits[0].float()[:, : self.engine.valid_vocab], torch.tensor(item.target))

    def step(self, item) -> float:
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.loss(item)
        loss.backward()
        torch.nn.utils.clip_grad_norm_([p for group in self.optimizer.param_groups for p in group["params"]], self.config.clip)
        self.optimizer.step()
        return loss.item()


def breakdown(trainer: Trainer) -> dict[str, float]:
    """Seconds of one step of the engine's side: encoding, forward, backward, optimizer."""
    marks = [time.perf_counter()]
    opened, items, _ = trainer.encoded(0)
    marks.append(time.perf_counter())
    loss, _ = batch_loss(trainer.network, items, trainer.config.merge_options())
    marks.append(time.perf_counter())
    loss.backward()
    marks.append(time.perf_counter())
    trainer.optimizer.step()
    trainer.optimizer.zero_grad(set_to_none=True)
    marks.append(time.perf_counter())
    for branch in opened:
        branch.close()
    names = ("encode branches", "forward", "backward", "optimizer")
    return {name: end - start for name, start, end in zip(names, marks, marks[1:])}


def difference(config: TrainConfig, examples: Sequence[Example]) -> float:
    """Largest difference between the two sides' losses on a few rows, in fp32; MinipsError where they do not do the same."""
    engine = Engine.from_pretrained(config.model, dtype="float32", device="cpu")
    plain = Plain(engine, config)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        trainer = Trainer(config, engine, examples, Path(folder) / "run")
        opened, items, _ = encode(engine, examples[:3], config)
        pairs = [(batch_loss(trainer.network, [item], config.merge_options())[0].item(), plain.loss(item).item()) for item in items]
        for branch in opened:
            branch.close()
    apart = max(abs(ours - theirs) for ours, theirs in pairs)
    if apart > 1e-3:
        raise MinipsError(f"the two sides' losses differ by {apart:.2g} ({pairs}); nothing was timed")
    return apart


def compare(engine: Engine, name: str, data: str, rows: int, repeats: int) -> dict[str, float]:
    """Prints what was found -> each side's median seconds an example."""
    batch = min(8, rows)
    config = TrainConfig(
        data=({"name": name, "rows": rows, "branches": SETS[name]},),
        steps=10**6,
        batch=batch,
        mapper={"kind": "low_rank"},
        checkpoint_every=10**6,
    )
    examples = load_mixture(config.data, data)
    apart = difference(config, examples)
    plain = Plain(engine, config)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(config, engine, examples, Path(folder) / "run")
        tokens = 0
        trainer.advance()
        times: dict[str, list[float]] = {"ours": [], "plain": []}
        for repeat in range(repeats):
            chosen = trainer.batch_of(trainer.step)
            opened, items, _ = encode(engine, chosen, config)  # for the plain side: its token ids, not timed
            if repeat == 0:
                plain.step(items[0])
            start = time.perf_counter()
            for item in items:
                plain.step(item)
            times["plain"].append((time.perf_counter() - start) / len(items))
            for branch in opened:
                branch.close()
            start = time.perf_counter()
            tokens = trainer.advance()["tokens"]
            times["ours"].append((time.perf_counter() - start) / len(chosen))
        parts = breakdown(trainer)
    ratios = [b / a for a, b in zip(times["ours"], times["plain"])]
    whole = sum(parts.values())
    shares = ", ".join(f"{part} {seconds / whole:.0%}" for part, seconds in parts.items())
    middle = {side: statistics.median(found) for side, found in times.items()}
    print(
        f"{name}: {1 / middle['ours']:.2f} examples/s against {1 / middle['plain']:.2f}, {statistics.median(ratios):.2f} times "
        f"(from {min(ratios):.2f} to {max(ratios):.2f} in {repeats} batches of {batch}); {tokens / batch:.0f} tokens an example; losses "
        f"within {apart:.1g} of each other in fp32; a step: {shares}",
        flush=True,
    )
    return middle


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True, help="the data folder")
    parser.add_argument("--rows", type=int, default=64, help="of each set (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="batches of 8 (default: %(default)s)")
    args = parser.parse_args()
    try:
        import peft  # noqa: F401
        import transformers  # noqa: F401
    except ImportError as error:
        print(f"bench: error: {error.name} is not installed; pip install transformers peft", file=sys.stderr)
        return 1
    try:
        engine = Engine.from_pretrained(progress=True, device="cpu")  # where the plain side is
        print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {engine.dtype}")
        found = [compare(engine, name, args.data, args.rows, args.repeats) for name in SETS]
        ours, plain = (sum(each[side] for each in found) for side in ("ours", "plain"))
        print(f"as many examples of each: {plain / ours:.2f} times")
    except MinipsError as error:
        print(f"bench: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
