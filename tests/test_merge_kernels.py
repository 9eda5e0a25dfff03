"""Compiled re-rotation and mapping equals the eager way, which equals float64 (test_transform.py). FAULTS items 57, 59, 81."""

import shutil
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch._dynamo.utils import counters

from minips import Engine, EngineConfig, MergeOptions, MinipsError, Synthesizer, compiling, transform_compiled
from minips.adapter import Adapter
from minips.kv_cache import KVPool, Segment
from minips.merge_kernels import MergeKernels
from minips.pieces import Job
from minips.rope import Rope
from minips.transform import Transform
from minips.transform_compiled import Run
from tests.support import LOGITS, U, branches_of, prompt_ids, relative_error, tiny_config, tiny_engine
from tests.test_mapper import NAMES, SHAPES, SPACES, mapper_of
from tests.test_transform import WIDE, check_all, expected, moved, peak_bytes

no_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on CPU")
TRACED = pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=[pytest.mark.slow, no_compiler])])  # shapes too
BACKENDS = pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=[pytest.mark.slow, no_compiler])])


@pytest.fixture(autouse=True)
def compiled_by(monkeypatch, request):
    """Compilation by the test's `backend`, with room for one form of each function only."""
    backend = getattr(request.node, "callspec", None) and request.node.callspec.params.get("backend") or "eager"
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    monkeypatch.setattr(shutil, "which", lambda name: name)
    torch._dynamo.reset()
    counters.clear()
    with torch._dynamo.config.patch(recompile_limit=1, fail_on_recompile_limit_hit=True):
        yield
    torch._dynamo.reset()


@BACKENDS
@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("shape", [{"kind": "none"}, *SHAPES], ids=["none", *NAMES])
def test_runs_are_moved_and_mapped_as_in_float64(shape, space, backend):
    kernels = MergeKernels(5)
    mapper = mapper_of(0.1, tiny_config(**WIDE), key_space=space, **shape)
    rope, transform, jobs, before, after = moved(mapper, torch.float32, kernels=kernels)
    assert (kernels.calls > 0) != shape.get("per_head", False)
    check_all(rope, transform, jobs, before, after)


@BACKENDS
@pytest.mark.parametrize("shortest", [1, 150, 1000])
def test_normalize_by_runs_and_pieces_together(monkeypatch, shortest, backend):
    """The second segment of the first branch (100 tokens) is a piece, the others are runs; then all are one or the other."""
    monkeypatch.setattr(transform_compiled, "SHORTEST", shortest)
    monkeypatch.setattr(transform_compiled, "LONGEST", 64)
    kernels, mapper = MergeKernels(5), mapper_of(kind="normalize")
    found = [moved(mapper, torch.float32, kernels=each)[-1] for each in (None, kernels)]
    assert (kernels.calls > 0) == (shortest < 1000)
    for (k, v), (other_k, other_v) in zip(*found):
        assert relative_error(other_k, k) < 1e-5 and relative_error(other_v, v) < 1e-5


@BACKENDS
@pytest.mark.parametrize("kind, noise, most", [("none", 0, 1.01), ("affine", 0.1, 1.02), ("linear", 0.01, 1.05), ("linear", 0.03, 1.2), ("low_rank", 0.02, 1.2)])
def test_bf16_is_mapped_nearly_as_exactly_as_it_is_rounded(kind, noise, most, backend):
    kernels, mapper = MergeKernels(5), mapper_of(noise, tiny_config(**WIDE), kind=kind)
    rope, transform, jobs, before, after = moved(mapper, torch.bfloat16, kernels=kernels)
    assert kernels.calls > 0
    for job, slots in jobs:
        for layer, ((k, v), (new_k, new_v)) in enumerate(zip(before, after)):
            for new, exact in zip((new_k, new_v), expected(rope, transform, job, slots, k, v, layer)):
                rounding = (exact.bfloat16() - exact).norm()
                assert (new[slots] - exact).norm() <= most * rounding + 1e-12


def test_a_map_far_from_the_identity_stays_in_fp32():
    """In bf16 products would lose digits: of keys or of values."""
    for part in ("key_weight", "value_weight"):
        mapper = mapper_of(0.01, tiny_config(**WIDE), kind="linear")
        getattr(mapper, part)[3] *= 0.2
        kernels = MergeKernels(5)
        moved(mapper, torch.bfloat16, kernels=kernels)
        assert kernels.calls == 0
        moved(mapper, torch.float32, kernels=kernels)
        assert kernels.calls > 0


def test_a_part_that_is_the_identity_keeps_its_bits():
    mapper = mapper_of(0.01, tiny_config(**WIDE), kind="linear")
    mapper.value_weight[:], mapper.value_bias[:] = torch.eye(32), 0
    _, _, _, before, after = moved(mapper, torch.bfloat16, kernels=MergeKernels(5))
    assert all(torch.equal(v, new_v) and not torch.equal(k, new_k) for (k, v), (new_k, new_v) in zip(before, after))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_8_bit_caches_and_scattered_slots_are_left_to_the_eager_way(dtype):
    config, kernels = tiny_config(), MergeKernels(2)
    for pages, kind in ((range(1, 6), dtype), ([1, 3, 2, 5, 4], torch.float32)):
        found = []
        for each in (None, kernels):
            pool = KVPool(2, 6, 16, 2, 16, kind)
            for store in (*pool.keys, *pool.values):
                for part in [store] if isinstance(store, torch.Tensor) else [store.codes, store.scales]:
                    part.copy_(torch.arange(part.numel()).view(part.shape) % 50)
            Transform(pool, Rope(config.rope, 16), kernels=each).apply([Job(Segment(list(pages), 80, 9), -3, 0)], {})
            found.append([part.clone() for store in pool.keys for part in ([store] if isinstance(store, torch.Tensor) else [store.codes, store.scales])])
        assert kernels.calls == 0 and all(torch.equal(a, b) for a, b in zip(*found))


def compiled_and_eager(**settings):
    base = tiny_engine(tiny_config(max_position_embeddings=1024))
    settings = EngineConfig("cpu", "auto", "auto", 4, 4000, **settings)
    return (Engine(base.model, base.config, settings=settings, compile=compile) for compile in (True, False))


@BACKENDS
@pytest.mark.parametrize("kind", ["none", "affine", "linear", "normalize"])
def test_an_engine_answers_alike_and_compiles_once_for_all_lengths(kind, backend, capsys):  # FAULTS 57, 59
    engine, eager = compiled_and_eager()
    mapper = mapper_of(0.1, engine.config, kind=kind)
    for lengths in ([64, 64, 64], [2, 16, 3], [33, 80, 200], [300, 31, 40]):  # heads, head_dim and each other among them
        outs, found = [prompt_ids(n, seed=n) for n in lengths], []
        for each in (engine, eager):
            branches = branches_of(each, outs=outs)
            synthesizer = Synthesizer(each, Adapter("test", mapper, None, MergeOptions()))
            found.append(synthesizer.generate_from_caches(branches, U, LOGITS).logits)
            assert each.check() and each.stats()["used_pages"] == 0
        assert relative_error(*found) < 2e-5
    assert engine.merge_kernels.calls > 0 and eager.merge_kernels is None
    forms = {"normalize": 2}.get(kind, 1)
    assert counters["stats"]["unique_graphs"] == forms + 1 and not counters["graph_break"]  # and the decoder layer
    assert capsys.readouterr().err.count("compiling re-rotation and mapping") == forms


@pytest.mark.parametrize("kind, space", [("normalize", None), *((kind, space) for kind in ("none", "affine", "linear") for space in SPACES)])
def test_a_synthesizer_compiles_before_its_first_merge(kind, space, capsys):
    engine, _ = compiled_and_eager()
    mapper = mapper_of(0.1, engine.config, kind=kind, key_space=space)
    synthesizer = Synthesizer(engine, Adapter("test", mapper, None, MergeOptions()))
    forms, said = len(engine.merge_kernels._forms), capsys.readouterr().err
    assert forms == said.count("compiling re-rotation and mapping") > 0 and engine.stats()["used_pages"] == 0
    synthesizer.merge(branches_of(engine, outs=[prompt_ids(n) for n in (40, 70, 33)])).close()
    assert len(engine.merge_kernels._forms) == forms and "re-rotation" not in capsys.readouterr().err


def test_a_merge_that_cannot_be_compiled_is_one_line_before_any_branch_is_touched(monkeypatch):
    engine, _ = compiled_and_eager()
    branches = branches_of(engine, outs=[prompt_ids(n) for n in (40, 70, 33)])

    def broken(*_, **__):
        raise torch._dynamo.exc.TorchDynamoException("no such\ninstruction")

    monkeypatch.setattr(compiling.torch, "compile", lambda *_, **__: broken)
    with pytest.raises(MinipsError, match="^compile: no such instruction$"):
        Synthesizer(engine)
    assert not any(branch.closed for branch in branches) and engine.check()


# Forms are told apart by a key of ours, so each of these would silently be wrong, not refused


@TRACED
@pytest.mark.parametrize("order", [["affine", "normalize", "linear"], ["normalize", "linear", "affine"]], ids="-".join)
def test_mappers_of_several_kinds_share_an_engine(order, backend):
    """affine has one scale a layer, normalize one a channel: the same kernel otherwise."""
    kernels = MergeKernels(5)
    for kind in order:
        mapper = mapper_of(0.1, tiny_config(**WIDE), kind=kind, key_space="unrotated")
        found = [moved(mapper, torch.float32, kernels=each)[-1] for each in (None, kernels)]
        for (k, v), (other_k, other_v) in zip(*found):
            assert relative_error(other_k, k) < 1e-5 and relative_error(other_v, v) < 1e-5
    assert len(kernels._forms) == 4  # normalize has two


@TRACED
def test_models_of_several_shapes_share_a_process(backend):
    """Dynamo remembers sizes by the line of the code, and would take those that differ between models for one size that varies."""
    mapper = mapper_of(0.1, tiny_config(**WIDE), kind="linear")
    check_all(*moved(mapper, torch.float32, kernels=MergeKernels(5)))
    for heads, dim in ((4, 64), (64, 8), (1, 32)):
        config = tiny_config(num_hidden_layers=5, num_attention_heads=heads, num_key_value_heads=heads, hidden_size=heads * dim, head_dim=dim)
        kernels = MergeKernels(5)
        for _ in range(2):
            check_all(*moved(mapper_of(0.1, config, kind="linear"), torch.float32, heads=heads, dim=dim, kernels=kernels))


@pytest.mark.parametrize("backend", ["aot_eager"])
def test_a_first_call_that_was_interrupted_leaves_nothing_behind(monkeypatch, backend):
    kernels, mapper = MergeKernels(5), mapper_of(0.1, tiny_config(**WIDE), kind="linear")

    @contextmanager
    def interrupted():
        raise KeyboardInterrupt
        yield

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(compiling, "_lasting_cache", interrupted)
        moved(mapper, torch.float32, kernels=kernels)
    for longest in (64, 50, 4096):
        monkeypatch.setattr(transform_compiled, "LONGEST", longest)
        check_all(*moved(mapper, torch.float32, kernels=kernels))


@pytest.mark.parametrize("count", [32, 33, 63, 64, 65, 97, 993, 2000])
@pytest.mark.parametrize("most", [1, 32, 40, 500, 4096])
def test_a_run_is_cut_evenly(count, most):
    """No part has one token, of which kernels would be others."""
    parts = list(Run(3, slice(7, 7 + count), 40, -5).cut(most))
    sizes = [part.count for part in parts]
    assert sum(sizes) == count and max(sizes) <= max(most, 32) and min(sizes) >= 16 and max(sizes) - min(sizes) <= 1
    assert [(part.slots.start, part.first) for part in parts] == [(7 + sum(sizes[:i]), 40 + sum(sizes[:i])) for i in range(len(parts))]
    assert all((part.branch, part.delta) == (3, -5) for part in parts)


# Memory


@pytest.mark.slow
@no_compiler
@pytest.mark.parametrize("backend", ["inductor"])
@pytest.mark.parametrize("m, tokens", [(4, 512), (2, 128), (8, 1024)])
@pytest.mark.parametrize("kind", ["none", "affine", "linear", "low_rank", "normalize"])
def test_compiled_merges_need_under_5_percent_of_the_branches_pages(kind, m, tokens, backend):
    layers, heads, dim, page = 30, 3, 64, 16
    config = tiny_config(num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=heads, hidden_size=192, head_dim=dim)
    mapper, kernels, rope = mapper_of(0.01, config, kind=kind), MergeKernels(layers), Rope(config.rope, dim)
    peaks = []
    for _ in range(2):  # the first compiles
        pool = KVPool(layers, m * tokens // page + 1, page, heads, dim, torch.bfloat16)
        for tensor in (*pool.keys, *pool.values):
            tensor.normal_()
        jobs = [Job(Segment(pool.allocate(tokens // page), tokens, 40), -(20 + b), b) for b in range(m)]
        transform = Transform(pool, rope, mapper, [tokens] * m, [tokens] * m, range(m), kernels)
        peaks.append(peak_bytes(lambda: transform.apply(jobs, {})))
    assert kernels.calls > 0 and peaks[1] < 0.05 * m * tokens * layers * 2 * heads * dim * 2
