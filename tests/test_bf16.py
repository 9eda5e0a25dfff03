"""16-bit caches: the golden cases to bf16 rounding, and one fp32 rotation against rotating in bf16. FAULTS items 34, 35."""

import pytest
import torch

from minips import MinipsError, SamplingParams, Synthesizer
from minips.config import EngineConfig, RopeConfig
from minips.engine import Engine
from minips.rope import Rope, apply_rope
from tests.support import GOLDEN, golden_engine, relative_error, tiny_engine
from tests.test_golden import CASES, cached, load


def rotation_errors(delta=-300, tokens=512):
    """Relative errors against exact keys: rounded only, moved by us, moved with tables and products in bf16."""
    torch.manual_seed(0)
    rope = Rope(RopeConfig(1e6), 128)
    keys, old = torch.randn(tokens, 8, 128, dtype=torch.float64), torch.arange(tokens) + 300

    def exact(positions):
        angles = positions.double()[:, None, None] * rope.inv_freq.double()
        a, b = keys.chunk(2, -1)
        return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)

    wanted, stored = exact(old + delta), exact(old).bfloat16()
    ours = apply_rope(stored, *rope.tables(torch.full((tokens,), delta)))
    cos, sin = (table.bfloat16() for table in rope.tables(torch.full((tokens,), delta)))
    theirs = stored * cos + stored.roll(stored.shape[-1] // 2, -1) * sin
    return [float((x.double() - wanted).norm() / wanted.norm()) for x in (wanted.bfloat16(), ours, theirs)]


def test_one_rotation_in_fp32_is_closer_than_one_in_bf16():  # FAULTS 35; the release has 2.9e-3 against 1.7e-3
    rounded, ours, theirs = rotation_errors()
    print(f"rounding alone {rounded:.2e}, moved by us {ours:.2e}, moved in bf16 {theirs:.2e}")
    assert 1.5e-3 < rounded < 1.8e-3 and ours < 2.5e-3 < 2.7e-3 < theirs


@pytest.mark.parametrize("name", CASES)
def test_golden_cases_agree_to_bf16_rounding(name):
    case, tensors, model = load(name)
    engine = golden_engine(model, dtype=torch.bfloat16)
    assert engine.pool.keys[0].dtype == torch.bfloat16
    branches = []
    for expected in case["branches"]:  # the recorded tokens, because bf16 may choose others at a near-tie
        stopped = expected["ended_with_eos"]
        tokens = expected["output_ids"][:-1] if stopped else expected["output_ids"]
        branch = engine.encode([engine.prefill(expected["prompt_ids"])], [tokens])[0]
        branch.segments[-1].ended = "stop" if stopped else "length"
        branches.append(branch)
    synthesizer = Synthesizer(engine, GOLDEN / case["components"])
    with synthesizer.merge(branches) as context:
        at = 0
        for j, count in enumerate(context.branch_tokens):
            keys, values = cached(engine, context, at, count)
            assert relative_error(keys, tensors[f"branch{j}.mapped.k"]) < 0.04
            assert relative_error(values, tensors[f"branch{j}.mapped.v"]) < 0.04
            at += count
        u = case["judger_prompt_ids"]
        result = synthesizer.generate(context=context, prompt=u, params=SamplingParams(max_tokens=1, return_logits=True))
    expected = tensors["judger.prompt_logits"]
    assert relative_error(result.logits[: len(u), : expected.shape[1]], expected) < 0.06


def test_kv_dtypes_that_are_not_there_are_refused_at_the_start():  # FAULTS 34
    engine = tiny_engine()
    with pytest.raises(MinipsError, match="dtype is 'int4'"):
        Engine(engine.model, engine.config, settings=EngineConfig(kv_dtype="int4"))


def test_an_fp32_cache_beside_bf16_weights():
    engine = tiny_engine(dtype=torch.bfloat16)
    settings = EngineConfig("cpu", "auto", "float32", 4, 400)
    wide = Engine(engine.model, engine.config, settings=settings)
    assert wide.pool.keys[0].dtype == torch.float32 and wide.kv_bytes_per_token == 2 * engine.kv_bytes_per_token
    logits = [e.prefill(list(range(20))).next_logits for e in (engine, wide)]
    assert relative_error(*logits) < 0.03
