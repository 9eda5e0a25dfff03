"""Moving and mapping stored K and V in pieces: every token once, in little memory. DESIGN.md section 2, FAULTS item 81."""

import math

import pytest
import torch

from minips import pieces
from minips.config import RopeConfig
from minips.kv_cache import KVPool, Segment
from minips.mapper import CacheMapper, MapperConfig
from minips.pieces import Job
from minips.rope import Rope, apply_rope
from minips.transform import Transform
from tests.support import relative_error, tiny_config
from tests.test_mapper import NAMES, SHAPES, SPACES, mapper_of, phi

# Memory


def peak_bytes(work) -> int:
    """Most bytes that torch's CPU allocator held at once while `work` ran, above what it held before."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        work()
    changes = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    assert len(changes) >= 100
    now = peak = 0
    for event in sorted(changes, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


def test_the_memory_probe_sees_what_is_held():
    kept = []
    size = peak_bytes(lambda: [kept.append(torch.empty(1000)) for _ in range(100)])
    assert 400_000 <= size < 420_000

    def one_after_the_other():
        for _ in range(100):
            torch.empty(1000)

    assert 4000 <= peak_bytes(one_after_the_other) < 10_000


@pytest.mark.parametrize(
    "shape", [{"kind": "none"}, {"kind": "affine"}, {"kind": "linear", "per_head": True}, {"kind": "low_rank"}, {"kind": "normalize"}],
    ids=lambda shape: shape["kind"],
)  # fmt: skip
def test_a_merge_needs_under_5_percent_of_the_branches_pages(shape, record_property):
    layers, heads, dim, tokens, page = 30, 3, 64, 512, 16
    pool = KVPool(layers, 4 * tokens // page + 1, page, heads, dim, torch.bfloat16)
    for tensor in (*pool.keys, *pool.values):
        tensor.normal_(generator=torch.Generator().manual_seed(0))
    jobs = [Job(Segment(pool.allocate(tokens // page), tokens, 40), -(20 + b), b) for b in range(4)]
    config = tiny_config(num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=heads, hidden_size=192, head_dim=dim)
    mapper = mapper_of(0.1, config, **{"key_space": "unrotated", **shape})
    transform = Transform(pool, Rope(config.rope, dim), mapper, [tokens] * 4, [tokens] * 4)
    pages = 4 * tokens * layers * 2 * heads * dim * 2
    peak = peak_bytes(lambda: transform.apply(jobs, {}))
    record_property("percent", 100 * peak / pages)
    print(f"{shape['kind']}: {100 * peak / pages:.2f}% of {pages / 1e6:.0f} MB")
    assert peak < 0.05 * pages


# Pieces


WIDE = {"num_hidden_layers": 5, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 128, "head_dim": 32}


def moved(mapper, dtype, layers=5, heads=2, dim=32, kernels=None):
    """K and V of three branches, one of them in two segments, before and after a transform; and where their tokens are."""
    lengths, page = [300, 150, 170], 16
    pool = KVPool(layers, 50, page, heads, dim, dtype)
    generator = torch.Generator().manual_seed(0)
    for tensor in (*pool.keys, *pool.values):
        tensor.normal_(generator=generator)
    before = [(k.flatten(0, 1).double(), v.flatten(0, 1).double()) for k, v in zip(pool.keys, pool.values)]
    rope = Rope(tiny_config().rope, dim)
    places = [(0, 200, 40, -7), (0, 100, 240, 5), (1, 150, 340, 250), (2, 170, 490, 0)]  # branch, tokens, new start, delta
    jobs = [Job(Segment(pool.allocate(pool.pages_for(count)), count, start), delta, branch) for branch, count, start, delta in places]
    transform = Transform(pool, rope, mapper, lengths, lengths, range(3), kernels)
    transform.apply([job for job in jobs if transform.changes(job.delta)], {})
    after = [(k.flatten(0, 1).double(), v.flatten(0, 1).double()) for k, v in zip(pool.keys, pool.values)]
    return rope, transform, [(job, pool.slots(job.segment.pages, job.segment.length)) for job in jobs], before, after


def turned(rope, keys, amounts):
    """keys float64 [n, heads, dim] rotated by so many positions, written out."""
    half = keys.shape[-1] // 2
    angles = amounts.double()[:, None, None] * rope.inv_freq.double()
    a, b = keys[..., :half], keys[..., half:]
    return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)


def expected(rope, transform, job, slots, k, v, layer):
    """K and V of a job in float64, moved and mapped."""
    change, positions = transform.change, torch.arange(job.segment.start, job.segment.start + len(slots))
    k, v = k[slots], v[slots]
    k = turned(rope, k, job.delta - positions if change.bare else torch.full_like(positions, job.delta))
    if change.maps_keys:
        k = phi(change.mapper, "key", layer, k, change.coefficients, job.branch)
        v = phi(change.mapper, "value", layer, v, change.coefficients, job.branch)
    return turned(rope, k, positions) if change.bare else k, v


def check_all(rope, transform, jobs, before, after):
    """fp32 caches: every token of the jobs is as expected, and no other has changed a bit."""
    for job, slots in jobs:
        for layer, ((k, v), (new_k, new_v)) in enumerate(zip(before, after)):
            want_k, want_v = expected(rope, transform, job, slots, k, v, layer)
            assert relative_error(new_k[slots], want_k) < 1e-5 and relative_error(new_v[slots], want_v) < 1e-5
    touched = torch.cat([slots for _, slots in jobs])
    for old, new in zip(before, after):
        for one, two in zip(old, new):
            rest = torch.ones(len(one), dtype=torch.bool).index_fill_(0, touched, False)
            assert torch.equal(one[rest], two[rest])


@pytest.mark.parametrize("most", [32, 1024])
@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("shape", [{"kind": "none"}, *SHAPES], ids=["none", *NAMES])
def test_all_pieces_and_layers_are_moved_and_mapped(monkeypatch, shape, space, most):
    monkeypatch.setattr(pieces, "LARGEST", most)
    check_all(*moved(mapper_of(0.1, tiny_config(**WIDE), key_space=space, **shape), torch.float32))


def rounded(mapper):
    """Errors of mapped bf16 values against float64, as multiples of what rounding alone does, of each branch and layer."""
    _, transform, jobs, before, after = moved(mapper, torch.bfloat16)
    for job, slots in jobs:
        for layer in range(5):
            exact = phi(mapper, "value", layer, before[layer][1][slots], None, job.branch)
            yield transform.change.by_increments, float((after[layer][1][slots] - exact).norm() / (exact.bfloat16() - exact).norm())


@pytest.mark.parametrize("kind", ["linear", "low_rank"])
@pytest.mark.parametrize("noise, increments, most", [(0.01, True, 1.05), (0.03, True, 1.2), (0.5, False, 1.01)])
def test_bf16_values_are_mapped_nearly_as_exactly_as_they_are_rounded(kind, noise, increments, most):
    """By increments, where they are small: what they are rounded by counts for little then."""
    mapper = mapper_of(noise, tiny_config(**WIDE), kind=kind)
    assert all(by == increments and error < most for by, error in rounded(mapper))


@torch.inference_mode()
def test_a_caller_in_inference_mode_can_merge():  # tensors made there have no version
    assert all(by and error < 1.05 for by, error in rounded(mapper_of(0.01, tiny_config(**WIDE), kind="linear")))


@pytest.mark.parametrize("scale", [0.7, 0.3, 0.01, -0.9])
def test_a_map_that_shrinks_bf16_values_loses_no_digits(scale):
    mapper = mapper_of(0.0, tiny_config(**WIDE), kind="linear")
    mapper.value_weight[:] = scale * torch.eye(32)
    assert all(by == (scale > 0.5) and error < 1.5 for by, error in rounded(mapper))
    mapper.value_weight[:] = 1.01 * torch.eye(32)  # the same mapper, as training goes on
    assert all(by and error < 1.1 for by, error in rounded(mapper))


# Key spaces


def apply_key_map(space, weight, keys, start):
    """Keys [n, 16] of one head, cached at positions from `start` on, through the engine's own transform; unrotated again after."""
    rope = Rope(RopeConfig(), 16)
    tables = rope.tables(torch.arange(start, start + len(keys)))
    pool = KVPool(1, 2, len(keys), 1, 16, torch.float32)
    pool.keys[0][1] = apply_rope(keys[:, None], *tables)
    pool.values[0].zero_()
    mapper = CacheMapper(MapperConfig("linear", space), 1, 1, 16).requires_grad_(False)
    mapper.key_weight[0, 0] = weight
    Transform(pool, rope, mapper, [len(keys)], [len(keys)]).apply([Job(Segment([1], len(keys), start), 0, 0)], {})
    return apply_rope(pool.keys[0][1], tables[0], -tables[1])[:, 0]


def test_a_map_fitted_on_early_positions_holds_later_only_without_rotation():  # FAULTS 81
    generator = torch.Generator().manual_seed(3)
    keys, queries = torch.randn(101, 16, generator=generator), torch.randn(40, 16, generator=generator)
    values = torch.randn(101, 16, generator=generator)
    truth = torch.eye(16) + 0.4 * torch.randn(16, 16, generator=generator)
    wanted = keys @ truth
    rope = Rope(RopeConfig(), 16)
    tables = rope.tables(torch.arange(101))
    fitted = {
        "unrotated": torch.linalg.lstsq(keys, wanted).solution,
        "rotated": torch.linalg.lstsq(apply_rope(keys[:, None], *tables)[:, 0], apply_rope(wanted[:, None], *tables)[:, 0]).solution,
    }

    def attend(keys):
        return torch.softmax(queries @ keys.T / math.sqrt(16), -1) @ values

    def quality(found):
        return float(torch.nn.functional.cosine_similarity(attend(found), attend(wanted), dim=-1).mean())

    error, cosine = {}, {"no map": quality(keys), "random map": quality(keys @ torch.randn(16, 16, generator=generator))}
    for space in SPACES:
        for start in (0, 1000):
            found = apply_key_map(space, fitted[space], keys, start)
            error[space, start], cosine[space, start] = relative_error(found, wanted), quality(found)
            assert torch.equal(apply_key_map(space, torch.eye(16), keys, start), apply_key_map("unrotated", torch.eye(16), keys, start))
    print(error, cosine)
    assert error["unrotated", 0] < 1e-4 and error["unrotated", 1000] < 1e-4
    assert error["rotated", 1000] > 0.05 and error["rotated", 1000] > error["rotated", 0]
    assert cosine["unrotated", 1000] > 0.9999 > cosine["rotated", 1000]
    assert cosine["unrotated", 1000] > max(cosine["no map"], cosine["random map"])
