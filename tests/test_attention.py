"""The gather backend against dense attention, ragged rows, holes, chunking. FAULTS items 38, 44, 54."""

import math

import pytest
import torch

from minips import attention, block_attention
from minips.attention import AttentionRow, GatherAttention, causal_mask


def dense(q, k, v):
    """Causal attention of the last len(q) tokens over all of k and v, one query at a time, float64."""
    q, k, v = q.double(), k.double(), v.double()
    past, group = len(k) - len(q), q.shape[1] // k.shape[1]
    out = torch.zeros_like(q)
    for t in range(len(q)):
        for head in range(q.shape[1]):
            scores = k[: past + t + 1, head // group] @ q[t, head] / math.sqrt(q.shape[-1])
            out[t, head] = torch.softmax(scores, 0) @ v[: past + t + 1, head // group]
    return out


def setup(lengths, counts, heads=6, kv_heads=2, dim=8, page=4, scattered=True, poison=float("nan"), seed=0, dtype=torch.float32, spread=1.0):
    """A pool full of `poison`, with the past of each row written into scattered or contiguous slots."""
    generator = torch.Generator().manual_seed(seed)
    slots = sum(lengths) + 40
    pages = -(-slots // page)
    keys = torch.full((pages, page, kv_heads, dim), poison, dtype=dtype)
    values = torch.full((pages, page, kv_heads, dim), poison, dtype=dtype)
    order = torch.randperm(pages * page - page, generator=generator) + page if scattered else torch.arange(page, pages * page)
    rows, truth, start = [], [], 0
    for length, count in zip(lengths, counts):
        k, v = (torch.randn(length, kv_heads, dim, generator=generator).to(dtype) for _ in range(2))
        q = (torch.randn(count, heads, dim, generator=generator) * spread).to(dtype)
        mine = order[start : start + length]
        start += length
        past = length - count
        keys.flatten(0, 1)[mine[:past]], values.flatten(0, 1)[mine[:past]] = k[:past], v[:past]
        rows.append(AttentionRow(mine, past, count, None if scattered else int(mine[0])))
        truth.append((q, k, v))
    new = [torch.cat([(q, k[-len(q) :], v[-len(q) :])[i] for q, k, v in truth]) for i in range(3)]
    return GatherAttention([keys], [values], rows), new, truth


@pytest.mark.parametrize("heads, kv_heads", [(2, 2), (6, 2), (8, 2), (4, 1)])
@pytest.mark.parametrize("scattered", [True, False])
def test_ragged_rows_equal_dense_attention(heads, kv_heads, scattered):  # FAULTS 44; the pool's junk is NaN: FAULTS 38
    attend, (q, k, v), truth = setup([5, 12, 1, 33], [2, 12, 1, 1], heads, kv_heads, scattered=scattered)
    out = attend(0, q, k, v)
    expected = torch.cat([dense(*row) for row in truth])
    assert out.shape == q.shape
    assert torch.allclose(out.double(), expected, atol=1e-5)


@pytest.mark.parametrize("heads, kv_heads, dim", [(2, 2, 8), (6, 2, 20), (4, 1, 16)])
def test_rows_elsewhere_than_on_a_cpu_equal_dense_attention(heads, kv_heads, dim):
    """The way that CUDA takes; there by flash attention, where that is possible (the next test)."""
    attend, (q, k, v), truth = setup([5, 12, 1, 33], [2, 12, 1, 3], heads, kv_heads, dim)
    attend.on_cpu, attend.groups = False, []
    assert torch.allclose(attend(0, q, k, v).double(), torch.cat([dense(*row) for row in truth]), atol=1e-5)
    assert attend.masks == [None] * 4


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype, off", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)])
@pytest.mark.parametrize("past, count, heads, kv_heads, dim", [(0, 40, 8, 2, 64), (300, 40, 8, 2, 64), (70, 2, 6, 3, 20), (1, 129, 4, 1, 128)])
def test_on_cuda_causal_behind_equals_dense_attention(dtype, off, past, count, heads, kv_heads, dim):
    q, k, v = (torch.randn(n, h, dim).to(dtype) for n, h in ((count, heads), (past + count, kv_heads), (past + count, kv_heads)))
    out = attention.causal_behind(*(x.cuda().transpose(0, 1)[None] for x in (q, k, v)))
    assert (out[0].transpose(0, 1).cpu().double() - dense(q, k, v)).abs().max() < off


@pytest.mark.parametrize("heads, kv_heads, dim", [(6, 2, 64), (4, 4, 32), (4, 1, 80)])
@pytest.mark.parametrize("scattered", [True, False])
def test_bf16_rows_behind_many_tokens_are_attended_in_blocks(monkeypatch, heads, kv_heads, dim, scattered):
    """Scores of up to 20: as close to exact ones as SDPA is, but for twice the rounding of what it rounds anyway."""
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("no bf16 products on this CPU")
    calls, in_blocks = [], attention.causal_in_blocks
    monkeypatch.setattr(attention, "causal_in_blocks", lambda q, *rest: calls.append(len(q)) or in_blocks(q, *rest))
    for name, value in {"FROM_TOKENS": 5, "FROM_SCORES": 308, "QUERIES_AT_ONCE": 21}.items():
        monkeypatch.setattr(block_attention, name, value)
    lengths, counts = [65, 64, 90, 140, 130, 3, 45, 24], [5, 5, 4, 40, 41, 3, 45, 24]
    settings = {"scattered": scattered, "dtype": torch.bfloat16, "spread": 4.0}
    attend, new, truth = setup(lengths, counts, heads, kv_heads, dim, **settings)
    out, expected = attend(0, *new), torch.cat([dense(*row) for row in truth])
    assert calls == [5, 40, 41, 45] and out.dtype == torch.bfloat16
    monkeypatch.setattr(block_attention, "FROM_SCORES", 10_000)
    whole = setup(lengths, counts, heads, kv_heads, dim, **settings)[0](0, *new)
    assert calls == [5, 40, 41, 45]
    ours, theirs = ((x.double() - expected).norm() / expected.norm() for x in (out, whole))
    assert ours < max(3 * theirs, 0.006)


@pytest.mark.parametrize("size", [12, 45, 87, 300, 3000, 40_000, 300_000])
@pytest.mark.parametrize("where", ["past", "own"])
@pytest.mark.parametrize("at_once", [40, 7])
def test_few_keys_far_above_the_others_lose_no_digits_in_blocks(size, where, at_once):
    """Scores of `size` that the estimate of the largest one does not see: bf16 products alone would be off by up to 0.25 there.

    own: half of the queries must not see those keys, and their scores are small.
    """
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("no bf16 products on this CPU")
    generator = torch.Generator().manual_seed(0)
    q, keys, values = (torch.randn(shape, generator=generator) for shape in ((40, 6, 32), (2, 240, 32), (2, 240, 32)))
    direction = torch.randn(32, generator=generator)
    direction /= direction.norm()
    q += direction * (size * 32**0.5) ** 0.5
    strong = {"past": [7, 33, 34, 101, 102, 103], "own": [220, 221, 222]}[where]  # none of them is in the estimate
    keys[:, strong] = keys[:, : len(strong)] / 4 + direction * (size * 32**0.5) ** 0.5
    q, keys, values = q.bfloat16(), keys.bfloat16(), values.bfloat16()
    hidden = torch.full((40, 40), -torch.inf, dtype=torch.bfloat16).triu_(1)
    out = attention.causal_in_blocks(q, keys, values, hidden[:at_once, :at_once].repeat_interleave(3, 0))
    grouped = q.double().transpose(0, 1).reshape(2, -1, 32)
    scores = grouped @ keys.double().transpose(1, 2) * 32**-0.5
    scores[:, :, -40:] += hidden.double().repeat(3, 1)
    expected = (scores.softmax(-1) @ values.double()).view(6, 40, 32).transpose(0, 1)
    assert (out.double() - expected).norm() / expected.norm() < 0.015


def test_causal_mask_is_lower_right():  # FAULTS 54
    row = AttentionRow(torch.arange(5), 3, 2)
    assert causal_mask(row).int().tolist() == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    assert causal_mask(AttentionRow(torch.arange(5), 4, 1)) is None


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33])
def test_attended_length_is_tokens_not_pages(length):  # FAULTS 38
    junk, (q, k, v), truth = setup([length], [1], page=16, poison=1e4)
    assert torch.allclose(junk(0, q, k, v).double(), dense(*truth[0]), atol=1e-5)


def test_writes_go_to_the_rows_slots_only():
    attend, (q, k, v), _ = setup([6, 9], [2, 3], poison=7.0)
    before = attend.keys[0].clone()
    attend(0, q, k, v)
    changed = (attend.keys[0] != before).flatten(0, 1).flatten(1).any(1).nonzero().flatten().tolist()
    expected = torch.cat([row.slots[row.past : row.past + row.count] for row in attend.rows]).tolist()
    assert changed == sorted(expected)
