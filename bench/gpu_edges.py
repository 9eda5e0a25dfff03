"""A part of bench/gpu_check.py: cases that only a CUDA device shows, each small."""

from __future__ import annotations

from dataclasses import replace

import torch
from gpu_parts import EXACT, Bench, decoded, eager
from models import mapper_of

from minips import Synthesizer
from minips.adapter import Adapter
from minips.attention import attention_scores, causal_behind
from minips.config import MergeOptions
from minips.quantize import Int4

KERNELS = ("math", "flash", "memory-efficient", "cuDNN")  # as torch numbers them


def edges(bench: Bench) -> dict:
    """What is right on the first GPU, with round sizes, in a plain call, need not be so elsewhere."""
    checks = {
        "attention behind cached tokens": attention_holds(bench),
        "int4 of 576 inputs": int4_holds(bench),
        "the first tokens before a capture": first_tokens_come_first(bench),
        "first called in inference mode": inference_mode_holds(bench),
        "an adapter from the CPU": adapter_from_cpu_holds(bench),
    }
    if bench.on_cuda and torch.cuda.device_count() > 1:
        checks["a second GPU"] = second_gpu_holds(bench)
    return {"checks": checks, "kernels": kernels(bench) if bench.on_cuda else {}}


def attention_holds(bench: Bench) -> bool:
    """fp32, bf16, fp16; with and without cached tokens; one head a KV head and several; an odd head_dim."""
    for dtype, off in ((torch.float32, 1e-4), (torch.bfloat16, 3e-2), (torch.float16, 4e-3)):
        for past, count, heads, kv_heads, dim in ((0, 40, 8, 2, 64), (300, 40, 8, 2, 64), (70, 2, 6, 3, 20), (500, 129, 4, 4, 128)):
            shapes = ((count, heads, dim), (past + count, kv_heads, dim), (past + count, kv_heads, dim))
            q, k, v = (torch.randn(shape, device=bench.device).to(dtype) for shape in shapes)
            found = causal_behind(*(x.transpose(0, 1)[None] for x in (q, k, v)))[0].transpose(0, 1)
            seen = torch.ones(count, past + count, dtype=torch.bool, device=bench.device).tril(past)
            exact = torch.einsum("hgcl,lhd->chgd", attention_scores(q, k, seen).softmax(-1), v.float()).flatten(1, 2)
            if not (found.float() - exact).abs().max() < off:
                return False
    return True


def int4_holds(bench: Bench) -> bool:
    weight = torch.randn(64, 576, device=bench.device).mul_(0.05).bfloat16()
    x, matrix = torch.randn(3, 576, device=bench.device).bfloat16(), Int4(weight)
    exact = x.float() @ matrix.dense().float().T
    return bool((matrix.product(x).float() - exact).norm() < 0.01 * exact.norm() and (matrix.dense() - weight).norm() < 0.2 * weight.norm())


def first_tokens_come_first(bench: Bench) -> bool:
    engine, seen = bench.engine(bench.plan.exact_shape, torch.bfloat16, 2000), []
    branches = [engine.prefill(bench.ids(9 + at)) for at in range(3)]
    engine.decode(branches, replace(EXACT, max_tokens=6), on_token=lambda *_: seen.append(engine.graphs.captures))
    return seen[:3] == [0, 0, 0] and seen[-1] > 0


def inference_mode_holds(bench: Bench) -> bool:
    engine, rows = bench.engine(bench.plan.exact_shape, torch.float32, 2000), [bench.ids(5), bench.ids(8)]
    with torch.inference_mode():
        inside = decoded(engine, rows, EXACT)
    return inside == decoded(engine, rows, EXACT)


def adapter_from_cpu_holds(bench: Bench) -> bool:
    engine = bench.engine(bench.plan.exact_shape, torch.bfloat16, 2000)
    synthesizer = Synthesizer(engine, Adapter("edges", mapper_of(engine.config, "low_rank"), None, MergeOptions()))
    with engine.prefill(bench.ids(9)) as prefix:
        branches = engine.decode(engine.fork(prefix, [bench.ids(3), bench.ids(4)]), EXACT)
    return len(synthesizer.generate_from_caches(branches, [5, 4, 3], EXACT).token_ids) == EXACT.max_tokens


def second_gpu_holds(bench: Bench) -> bool:
    """Another device than the current one: tokens must not be read before that one has them."""
    other = replace(bench, device=torch.device("cuda", 1), held=[])
    engine = other.engine(bench.plan.exact_shape, torch.float32, 4000)
    rows = [bench.ids(5 + at) for at in range(4)]
    ours = decoded(engine, rows, EXACT)
    with eager(engine):
        return ours == decoded(engine, rows, EXACT)


def kernels(bench: Bench) -> dict[str, str]:
    """What SDPA chooses for a prompt, for one decoding row, and for the masked rows of a graph."""
    q, kv = (torch.randn(1, heads, 512, 128, dtype=torch.bfloat16, device=bench.device) for heads in (32, 8))
    row, rows = q[:, :8, :4], q[:, :8, :4].expand(4, -1, -1, -1)
    mask = torch.ones(4, 1, 1, 512, dtype=torch.bool, device=bench.device)
    table = kv.expand(4, -1, -1, -1)
    chosen = {
        "a prompt": torch._fused_sdp_choice(q, kv, kv, None, 0.0, True, enable_gqa=True),
        "a decoding row": torch._fused_sdp_choice(row, kv, kv),
        "rows of a graph": torch._fused_sdp_choice(rows, table, table, mask),
    }
    return {what: KERNELS[number] if 0 <= number < len(KERNELS) else str(number) for what, number in chosen.items()}
