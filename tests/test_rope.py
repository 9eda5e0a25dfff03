"""RoPE: values of the Llama 3.1 model card, precision, layout, relativity. FAULTS items 29 to 35."""

import math

import pytest
import torch

from minips.config import ModelConfig, RopeConfig
from minips.rope import Rope, apply_rope, inverse_frequencies
from tests.support import random_tensors, tiny_config
from minips.model import Model

LLAMA31 = RopeConfig(500000.0, "llama3", 8.0, 1.0, 4.0, 8192)


def test_llama3_frequencies_of_the_8b_model():  # FAULTS 29
    scaled, plain = inverse_frequencies(LLAMA31, 128), inverse_frequencies(RopeConfig(500000.0), 128)
    assert scaled.dtype == torch.float32 and scaled.shape == (64,)
    assert torch.equal(scaled[:29], plain[:29])
    assert torch.allclose(scaled[35:], plain[35:] / 8, rtol=1e-6, atol=0)
    expected = {
        28: 3.211445995e-3,
        29: 2.166570764e-3,
        30: 1.371893568e-3,
        31: 8.567514129e-4,
        32: 5.248461610e-4,
        33: 3.126937504e-4,
        34: 1.785078128e-4,
        35: 9.556212354e-5,
        63: 3.068925989e-7,
    }
    for index, value in expected.items():
        assert scaled[index].item() == pytest.approx(value, rel=1e-6)


@pytest.mark.parametrize("position, limit", [(1000, 1e-6), (8191, 1e-6), (131071, 1e-5)])
def test_tables_are_exact_to_fp32(position, limit):  # FAULTS 30
    rope = Rope(LLAMA31, 128)
    cos, sin = rope.tables(torch.tensor([position]))
    assert cos.dtype == sin.dtype == torch.float32
    exact = [float(f) * position for f in rope.inv_freq]
    assert max(abs(c - math.cos(a)) for c, a in zip(cos[0, 0].tolist(), exact)) < limit
    assert max(abs(s - math.sin(a)) for s, a in zip(sin[0, 0, 64:].tolist(), exact)) < limit
    assert torch.equal(cos[..., :64], cos[..., 64:]) and torch.equal(sin[..., :64], -sin[..., 64:])


def test_fp16_angle_fault_does_not_occur():  # FAULTS 30: dim 32, theta 1e4, position 1857, pair 1
    cos, _ = Rope(RopeConfig(), 32).tables(torch.tensor([1857]))
    assert cos[0, 0, 1].item() == pytest.approx(math.cos(1044.2678), abs=1e-3)


def test_casting_the_model_leaves_the_frequencies_alone():  # FAULTS 31
    config = tiny_config()
    model = Model.from_tensors(config, {k: v.bfloat16() for k, v in random_tensors(config).items()})
    model.to(torch.bfloat16)
    cos, _ = model.rope.tables(torch.tensor([1000]))
    for pair, value in enumerate(cos[0, 0, :8].tolist()):
        assert abs(value - math.cos(1000 * 10000.0 ** (-2 * pair / 16))) <= 1e-4


def test_half_split_layout():  # FAULTS 32 and 33: a position other than 0, an asymmetric vector
    rope = Rope(RopeConfig(), 4)
    out = apply_rope(torch.tensor([[[1.0, 2.0, 3.0, 4.0]]]), *rope.tables(torch.tensor([1])))
    assert torch.allclose(out[0, 0], torch.tensor([-1.984111, 1.959901, 2.462378, 4.0198]), atol=1e-5)


def test_scores_depend_on_distance_only():  # FAULTS 33
    torch.manual_seed(0)
    rope, q, k = Rope(LLAMA31, 128), torch.randn(1, 1, 128), torch.randn(1, 1, 128)

    def score(p, r):
        rotated = [apply_rope(x, *rope.tables(torch.tensor([at]))) for x, at in ((q, p), (k, r))]
        return float((rotated[0] * rotated[1]).sum())

    assert score(7, 3) == pytest.approx(score(1007, 1003), abs=1e-4)
    assert abs(score(7, 3) - score(7, 4)) > 1e-2


@pytest.mark.parametrize("dtype, limit", [(torch.float32, 1e-6), (torch.bfloat16, 3e-3)])
def test_a_moved_key_equals_a_fresh_one_to_rounding(dtype, limit):  # FAULTS 35
    torch.manual_seed(1)
    rope, key = Rope(LLAMA31, 128), torch.randn(64, 8, 128)

    def at(position, x):
        return apply_rope(x, *rope.tables(torch.tensor([position])))

    exact = at(1007, key.double()).float() if dtype == torch.float32 else at(1007, key)
    moved = at(1000, at(7, key).to(dtype))
    assert moved.dtype == dtype
    assert float((moved.float() - exact).norm() / exact.norm()) < limit


def test_negative_positions_undo_positive_ones():
    torch.manual_seed(2)
    rope, key = Rope(LLAMA31, 64), torch.randn(3, 2, 64)
    there = apply_rope(key, *rope.tables(torch.tensor([5, 300, 8000])))
    assert torch.allclose(apply_rope(there, *rope.tables(torch.tensor([-5, -300, -8000]))), key, atol=1e-5)


def test_scaling_spellings_agree():  # FAULTS 9, the numbers
    base = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 8, "hidden_size": 64,
        "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "max_position_embeddings": 64,
    }  # fmt: skip
    block = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    spellings = [{"type": "llama3"}, {"rope_type": "llama3"}, {"type": "llama3", "rope_type": "llama3"}]
    old = [ModelConfig.from_dict({**base, "rope_theta": 5e5, "rope_scaling": {**block, **kind}}) for kind in spellings]
    new = ModelConfig.from_dict({**base, "rope_parameters": {**block, "rope_type": "llama3", "rope_theta": 5e5}})
    frequencies = [inverse_frequencies(config.rope, 64) for config in (*old, new)]
    assert all(torch.equal(frequencies[0], other) for other in frequencies)
    assert ModelConfig.from_dict({**base, "rope_scaling": None}).rope.type == "default"


@pytest.mark.parametrize("calls", [[(0, 3), (5, 2000), (1020, 8)], [(4000, 2), (0, 5000)], [(131071, 1), (7, 1), (0, 2)]])
def test_kept_tables_are_rows_of_the_plain_ones(calls):
    """However they grow; one row is made alone, so that a far move does not make all tables up to it."""
    rope = Rope(RopeConfig(), 16)
    for first, count in calls:
        cos, sin = rope.tables(torch.arange(first, first + count))
        found = rope.kept(first, count)
        assert torch.equal(found[0], cos[..., 8:]) and torch.equal(found[1], sin[..., 8:])
    assert len(rope._kept[0]) < 9000
