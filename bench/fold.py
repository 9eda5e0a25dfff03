"""What folding a LoRA into bf16 weights costs: the folded model against the same adapter kept apart in fp32.

    python bench/fold.py --data DIR [--adapter FOLDER] [--positions 1000]

Teacher-forced positions of real passages; prints top-1 agreement and mean KL. Without --adapter a seeded random LoRA of the usual
size is taken (rank 16 on q, k, v, o; its update is a given share of each weight's norm). DIR as for bench/nq_open.py.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from nq_open import read_rows

from minips import Engine, MinipsError, SamplingParams
from minips.lora import LoraAdapter, LoRALinear, fold, read_lora
from minips.model import Model


def random_lora(model: Model, share: float, rank: int = 16) -> LoraAdapter:
    """A, B random; |scale B A| is `share` of |W|."""
    generator, pairs = torch.Generator().manual_seed(0), {}
    for name, module in model.named_modules():
        if name.endswith(("q_proj", "k_proj", "v_proj", "o_proj")):
            out_size, in_size = module.weight.shape
            a, b = torch.randn(rank, in_size, generator=generator), torch.randn(out_size, rank, generator=generator)
            pairs[name] = (a, b * share * float(module.weight.float().norm() / (b @ a).norm()), 1.0)
    return LoraAdapter("random", pairs)


def attached(model: Model, adapter: LoraAdapter) -> Model:
    """The base weights with the adapter beside them, unfolded, in fp32."""
    apart = Model.from_tensors(model.config, dict(model.state_dict()))
    for name, (a, b, scale) in adapter.pairs.items():
        parent, child = name.rsplit(".", 1)
        layer = LoRALinear(apart.get_submodule(name), a.shape[0], scale * a.shape[0])
        layer.lora_A.data.copy_(a)
        layer.lora_B.data.copy_(b)
        setattr(apart.get_submodule(parent), child, layer)
    return apart


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--adapter", type=Path)
    parser.add_argument("--positions", type=int, default=1000)
    parser.add_argument("--share", type=float, default=0.05, help="size of the random update, as a share of each weight's norm")
    args = parser.parse_args()
    try:
        engine = Engine.from_pretrained(args.model, dtype="bfloat16", progress=True)
        base = engine.model
        adapter = read_lora(args.adapter, base) if args.adapter else random_lora(base, args.share)
        models = {"base": base, "unfolded": attached(base, adapter), "folded": fold(base, adapter)}
        rows, seen, agree, kl, moved = read_rows(args.data, 200, 0), 0, 0, 0.0, 0
        for row in rows:
            ids = engine.tokenizer.encode(row["passages"][0])[:256]
            logits = {}
            for name, model in models.items():
                engine.model = model  # a bench may: all three stand on one pool
                result = engine.generate(ids, SamplingParams(max_tokens=1, return_logits=True))
                logits[name] = result.logits[: len(ids)].log_softmax(-1)
            engine.model = base
            agree += int((logits["folded"].argmax(-1) == logits["unfolded"].argmax(-1)).sum())
            moved += int((logits["base"].argmax(-1) != logits["unfolded"].argmax(-1)).sum())
            kl += float((logits["unfolded"].exp() * (logits["unfolded"] - logits["folded"])).sum())
            seen += len(ids)
            if seen >= args.positions:
                break
    except MinipsError as error:
        print(f"minips: error: {error}", file=sys.stderr)
        return 1
    print(f"{args.model}, {seen} positions: folded bf16 against unfolded: top-1 agreement {agree / seen:.2%}, mean KL {kl / seen:.2e} nats")
    print(f"(the adapter itself changes the top-1 token at {moved / seen:.1%} of the positions)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
