"""The cache mapper against the float64 reference, and what each kind promises. CONTRACT.md sections 5 and 6, FAULTS items 80, 81."""


import pytest
import torch

from minips import MinipsError, Synthesizer
from minips.adapter import Adapter, new_mapper
from minips.config import MergeOptions
from minips.kv_cache import KVPool, Segment
from minips.mapper import MapperConfig
from minips.rope import Rope, apply_rope
from minips.transform import Job, Transform
from tests.reference import Reference
from tests.support import LOGITS, OUTS, OWNS, PREFIX, U, branches_of, random_tensors
from tests.support import relative_error, tiny_config, tiny_engine, u_logits

SHAPES = [
    {"kind": "affine"},
    {"kind": "linear"},
    {"kind": "linear", "per_head": True},
    {"kind": "low_rank", "rank": 3},
    {"kind": "low_rank", "rank": 3, "per_head": True},
]
NAMES = ["affine", "linear", "linear_per_head", "low_rank", "low_rank_per_head"]
SPACES = ["unrotated", "rotated"]


def mapper_of(noise=0.0, config=None, **shape):
    """A mapper for the tiny model; noise moves it away from the identity."""
    torch.manual_seed(5)
    mapper = new_mapper(MapperConfig(**shape), config or tiny_config())
    with torch.no_grad():
        for parameter in mapper.parameters():
            parameter += noise * torch.randn(parameter.shape)
    return mapper.requires_grad_(False)


def synthesizer_of(engine, mapper, **options):
    return Synthesizer(engine, Adapter("test", mapper, None, MergeOptions.from_dict(options)))


def mapped_logits(engine, branches, mapper, **options):
    return synthesizer_of(engine, mapper, **options).generate_from_caches(branches, U, LOGITS).logits[: len(U)]


def stored(engine):
    return [tensor.clone() for tensor in (*engine.pool.keys, *engine.pool.values)]


def phi(mapper, part, layer, x, coefficients, branch):
    """The map of one branch in float64, written out per head; x [n, heads, head_dim]."""
    if coefficients is not None:
        scale, shift = (getattr(coefficients, f"{part}_{name}")[branch, layer].double() for name in ("scale", "shift"))
        return x * scale + shift
    out = torch.empty_like(x)
    for head in range(x.shape[1]):
        row = head if mapper.config.per_head else 0
        if mapper.config.kind == "low_rank":
            a, b = (getattr(mapper, f"{part}_{name}")[layer, row].double() for name in "ab")
            out[:, head] = x[:, head] + x[:, head] @ a @ b.T
        else:
            out[:, head] = x[:, head] @ getattr(mapper, f"{part}_weight")[layer, row].double() + getattr(mapper, f"{part}_bias")[layer, row]
    return out


def reference_logits(mapper):
    """Prefix kept, three branches at the fork point, every branch mapped, the prefix not."""
    config = tiny_config()
    reference, n = Reference(random_tensors(config), config), len(PREFIX)
    coefficients = mapper.coefficients([len(z) for z in OUTS])
    past = [([k], [v]) for k, v in reference.forward(PREFIX, range(n))[1]]
    positions = list(range(n))
    for branch, (own, z) in enumerate(zip(OWNS, OUTS)):
        ids, places = [*PREFIX, *own, *z], list(range(n, n + len(z)))
        for layer, (k, v) in enumerate(reference.forward(ids, range(len(ids)))[1]):
            k, v = k[-len(z) :], v[-len(z) :]
            if mapper.config.key_space == "rotated":
                k = reference.rotate(k, places)
            k = phi(mapper, "key", layer, k, coefficients, branch)
            if mapper.config.key_space == "rotated":
                k = reference.rotate(k, [-place for place in places])
            past[layer][0].append(k)
            past[layer][1].append(phi(mapper, "value", layer, v, coefficients, branch))
        positions += places
    start = n + max(map(len, OUTS))
    joined = [(torch.cat(k), torch.cat(v)) for k, v in past]
    return reference.forward(U, range(start, start + len(U)), joined, positions)[0]


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("shape", SHAPES, ids=NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_fresh_mapper_is_the_identity_bit_for_bit(shape, space, dtype):  # FAULTS 81
    found = []
    for mapper in (None, mapper_of(key_space=space, **shape)):
        engine = tiny_engine(dtype=dtype, poison=0.0)
        logits = mapped_logits(engine, branches_of(engine), mapper)
        found.append([logits, *stored(engine)])
    assert all(torch.equal(one, other) for one, other in zip(*found))


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("shape", SHAPES, ids=NAMES)
def test_each_kind_equals_the_reference_in_both_key_spaces(shape, space):
    mapper = mapper_of(0.3 if shape["kind"] != "affine" else 1.0, key_space=space, **shape)
    engine = tiny_engine()
    found = mapped_logits(engine, branches_of(engine), mapper)
    assert relative_error(found, reference_logits(mapper)) < 2e-5
    assert relative_error(u_logits(engine, branches_of(engine)), found) > 1e-3  # the map does something
    other = mapper_of(0.3 if shape["kind"] != "affine" else 1.0, key_space=SPACES[space == "unrotated"], **shape)
    assert relative_error(mapped_logits(engine, branches_of(engine), other), found) > 1e-4  # and the key space counts


def by_anchor(mapper, anchors):
    out = []
    for anchor in anchors:
        engine = tiny_engine()
        out.append(mapped_logits(engine, branches_of(engine), mapper, keep_prefix=False, anchor=anchor))
    return out


@pytest.mark.parametrize("shape", [*SHAPES, {"kind": "normalize"}], ids=[*NAMES, "normalize"])
def test_unrotated_maps_do_not_depend_on_the_anchor(shape):
    fork, zero, free = by_anchor(mapper_of(0.5, key_space="unrotated", **shape), ("fork", "zero", "free"))
    assert relative_error(fork, zero) < 2e-5 and relative_error(fork, free) < 2e-5


def test_a_shift_of_rotated_keys_depends_on_the_anchor_so_free_is_refused():
    mapper = mapper_of(2.0, kind="affine")
    assert mapper.config.key_space == "rotated" and mapper.coefficients([7]).key_shift.abs().max() > 0.01
    assert relative_error(*by_anchor(mapper, ("fork", "zero"))) > 1e-4
    with pytest.raises(MinipsError, match="'free' cannot be combined with a mapper of rotated keys"):
        by_anchor(mapper, ("free",))


@pytest.mark.parametrize("shape", [*SHAPES, {"kind": "normalize"}], ids=[*NAMES, "normalize"])
def test_the_order_of_branches_changes_nothing(shape):
    mapper, found = mapper_of(0.5, **shape), []
    for order in ([0, 1, 2], [2, 0, 1]):
        engine = tiny_engine()
        found.append(mapped_logits(engine, branches_of(engine, [OWNS[i] for i in order], [OUTS[i] for i in order]), mapper))
    assert relative_error(*found) < 2e-5


def tokens_of(engine, context):
    """Unrotated keys and values [layers, n, kv_heads, head_dim] of each segment behind the prefix, as they are stored."""
    out = []
    for segment in context.branch.segments[1:]:
        slots = engine.pool.slots(segment.pages, segment.length)
        cos, sin = engine.model.rope.tables(torch.arange(segment.start, segment.start + segment.length))
        keys = torch.stack([apply_rope(t.flatten(0, 1)[slots].float(), cos, -sin) for t in engine.pool.keys])
        out.append((keys, torch.stack([t.flatten(0, 1)[slots].float() for t in engine.pool.values])))
    return out


def test_normalize_brings_every_branch_to_the_mean_over_branches():
    engine = tiny_engine()
    with Synthesizer(engine).merge(branches_of(engine)) as context:
        before = tokens_of(engine, context)
    with synthesizer_of(engine, mapper_of(kind="normalize")).merge(branches_of(engine)) as context:
        after = tokens_of(engine, context)
    for part in (0, 1):
        mean = torch.stack([pair[part].mean(1) for pair in before]).mean(0)
        variance = torch.stack([pair[part].var(1, unbiased=False) for pair in before]).mean(0)
        for pair in after:
            assert relative_error(pair[part].mean(1), mean) < 1e-5
            assert relative_error(pair[part].var(1, unbiased=False), variance) < 1e-5


def test_normalize_leaves_one_token_branches_alone():
    outs = [OUTS[0], [42], OUTS[2]]
    engine = tiny_engine()
    with Synthesizer(engine).merge(branches_of(engine, outs=outs)) as context:
        before = tokens_of(engine, context)
    with synthesizer_of(engine, mapper_of(kind="normalize")).merge(branches_of(engine, outs=outs)) as context:
        after = tokens_of(engine, context)
    for part in (0, 1):
        assert relative_error(after[1][part], before[1][part]) < 1e-6
        mean = torch.stack([before[i][part].mean(1) for i in (0, 2)]).mean(0)  # and they have no say in the target
        assert relative_error(after[0][part].mean(1), mean) < 1e-5
    for outs in ([OUTS[0]], [[1], [2], [3]]):  # one branch, or none to take statistics of
        engine = tiny_engine(poison=0.0)
        plain = u_logits(engine, branches_of(engine, OWNS[: len(outs)], outs))
        found = mapped_logits(engine, branches_of(engine, OWNS[: len(outs)], outs), mapper_of(kind="normalize"))
        assert relative_error(found, plain) < 1e-5


def test_normalize_leaves_a_channel_without_variance_unscaled():
    statistics = torch.randn(2, 3, 2, 2, 16, generator=torch.Generator().manual_seed(1))
    statistics[1] = statistics[1].abs() + 0.1
    statistics[1, 1, 0, 0, 4] = 0.0
    found = mapper_of(kind="normalize").from_statistics(statistics, statistics, [5, 6, 7])
    assert found.key_scale[1, 0, 0, 4] == 1 and torch.isfinite(found.key_scale).all() and torch.isfinite(found.key_shift).all()
    assert (found.key_scale != 1).sum() == found.key_scale.numel() - 1


def test_identical_workers_that_share_pages_are_mapped_once():
    for shape in ({"kind": "low_rank"}, {"kind": "affine"}, {"kind": "normalize"}):
        mapper, found = mapper_of(0.4, **shape), []
        for shared in (True, False):
            engine = tiny_engine()
            branches = branches_of(engine, [OWNS[0], OWNS[0], OWNS[1]], [OUTS[0], OUTS[0], OUTS[1]])
            if shared:
                branches[1].close()
                branches[1] = branches[0].child()
            found.append(mapped_logits(engine, branches, mapper))
            assert engine.check() and engine.stats()["used_pages"] == 0 and engine.counters["copied_tokens"] == 0
        assert relative_error(*found) < 2e-5


def test_a_merge_tells_which_branches_are_twins():
    found = []
    for shared in (True, False):
        engine = tiny_engine()
        branches = branches_of(engine, [OWNS[0], OWNS[1], OWNS[1]], [OUTS[0], OUTS[1][:7], OUTS[1][:7]])
        if shared:
            branches[2].close()
            branches[2] = branches[1].child()
        found.append(mapped_logits(engine, branches, mapper_of(kind="normalize")))
    assert relative_error(*found) < 2e-5


def test_statistics_of_a_shared_branch_are_its_own():  # not those of another branch of the same length
    torch.manual_seed(0)
    config = tiny_config()
    lengths, results = [7, 7, 7], []
    content = torch.randn(2, 2, 14, 2, 16)
    for shared in (True, False):
        pool = KVPool(2, 4, 7, 2, 16, torch.float32)
        for layer in range(2):
            for tensor, x in ((pool.keys[layer], content[0, layer]), (pool.values[layer], content[1, layer])):
                tensor[1], tensor[2], tensor[3] = x[:7], x[7:], x[7:]
        segments = [Segment([page], 7, 10) for page in (1, 2, 3)]
        twins = [0, 1, 1 if shared else 2]
        transform = Transform(pool, Rope(config.rope, 16), mapper_of(kind="normalize"), lengths, lengths, twins)
        transform.apply([Job(segment, 0, branch) for branch, segment in enumerate(segments[: 2 if shared else 3])], {})
        results.append(torch.stack([*pool.keys, *pool.values])[:, 1:3])
    assert relative_error(*results) < 1e-6


@pytest.mark.parametrize("shape", [{"kind": "affine"}, {"kind": "low_rank"}, {"kind": "normalize"}], ids=lambda shape: shape["kind"])
def test_consume_false_leaves_the_branches_as_they_are(shape):
    engine, mapper = tiny_engine(poison=0.0), mapper_of(0.5, **shape)
    branches = branches_of(engine)
    pages = [page for branch in branches for segment in branch.segments for page in segment.pages]
    before, starts = [t[pages] for t in stored(engine)], [[s.start for s in b.segments] for b in branches]
    synthesizer = synthesizer_of(engine, mapper)
    first = synthesizer.generate_from_caches(branches, U, LOGITS, consume=False).logits
    assert all(torch.equal(one, other[pages]) for one, other in zip(before, stored(engine)))
    assert starts == [[s.start for s in b.segments] for b in branches] and not any(b.closed for b in branches)
    assert torch.equal(first, synthesizer.generate_from_caches(branches, U, LOGITS).logits)
    assert engine.check() and engine.stats()["used_pages"] == 0


def test_values_are_mapped_and_the_prefix_never():
    mapper = mapper_of(kind="linear")
    with torch.no_grad():
        mapper.value_weight *= 2
        mapper.value_bias += 0.5
    engine = tiny_engine(poison=0.0)
    branches = branches_of(engine)
    prefix = branches[0].segments[0].pages
    before = stored(engine)
    slots = torch.cat([engine.pool.slots(b.segments[-1].pages, b.segments[-1].length) for b in branches])
    with synthesizer_of(engine, mapper).merge(branches):
        after = stored(engine)
    assert all(torch.equal(one[prefix], other[prefix]) for one, other in zip(before, after))
    for one, other in list(zip(before, after))[2:]:
        assert relative_error(other.flatten(0, 1)[slots], one.flatten(0, 1)[slots] * 2 + 0.5) < 1e-6


def test_settings_that_cannot_be_are_refused():
    for settings, message in [
        ({"kind": "magic"}, "kind is 'magic', expected one of none, affine"),
        ({"key_space": "both"}, "key_space is 'both'"),
        ({"rank": 0}, "rank is 0"),
        ({"rank": True}, "rank is True"),
        ({"hidden_dim": "32"}, "hidden_dim is '32'"),
        ({"metadata_features": []}, "metadata_features is \\[\\]"),
        ({"kind": "normalize", "key_space": "rotated"}, "normalize works on unrotated keys"),
    ]:
        with pytest.raises(MinipsError, match=message):
            MapperConfig(**settings)
