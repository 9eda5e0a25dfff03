"""The facts of CONTRACT.md section 6, the kept tokens of section 4, the refusals of sections 3 to 5. FAULTS 76 to 78, 88."""

import itertools
import warnings

import pytest
import torch

from minips import MinipsError, SamplingParams, Synthesizer
from minips.config import MergeOptions
from minips.merge import plan_merge, rerotate, shared_prefix
from tests.reference import Reference
from tests.support import prompt_ids, random_tensors, relative_error, tiny_config, tiny_engine

LOGITS = SamplingParams(max_tokens=1, return_logits=True)
PREFIX, U = prompt_ids(10), prompt_ids(6, 50)
OWNS = [prompt_ids(5, 1), prompt_ids(2, 2), prompt_ids(9, 3)]
OUTS = [prompt_ids(7, 11), prompt_ids(12, 12), prompt_ids(3, 13)]
SCALED = {
    "rope_scaling": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
    }
}  # fmt: skip


def branches_of(engine, owns=OWNS, outs=OUTS, prefix=PREFIX):
    root = engine.prefill(prefix)
    made = engine.encode(engine.fork(root, owns), outs)
    root.close()
    return made


def u_logits(engine, branches, u=U, **options):
    result = Synthesizer(engine, options=options).generate_from_caches(branches, u, LOGITS)
    return result.logits[: len(u)]


@pytest.fixture(params=["plain", "scaled"])
def setting(request):
    config = tiny_config(**(SCALED if request.param == "scaled" else {}))
    tensors = random_tensors(config, seed=4)
    return config, tensors, Reference(tensors, config)


def test_merged_logits_equal_the_reference(setting):  # FAULTS 76: the layouts, against keys rotated once at their new place
    config, tensors, reference = setting
    pairs, n = list(zip(OWNS, OUTS)), len(PREFIX)

    def found(**options):
        engine = tiny_engine(config, tensors=tensors)
        return u_logits(engine, branches_of(engine), **options)

    expected = reference.merged(PREFIX, pairs, U)
    assert relative_error(found(), expected) < 1e-5
    wrong = reference.merged(PREFIX, pairs, U, starts=[n, n + 5, n], offset=n + 12)
    assert relative_error(found(), wrong) > 1e-3  # wrong by 5 in one branch shows
    sequential = reference.merged(PREFIX, pairs, U, starts=[10, 17, 29], offset=32)
    assert relative_error(found(layout="sequential"), sequential) < 1e-5
    alone = reference.merged(PREFIX, pairs, U, keep_prefix=False)
    assert relative_error(found(keep_prefix=False), alone) < 1e-5
    naive = reference.merged(PREFIX, pairs, U, starts=[15, 12, 19], offset=24)
    assert relative_error(found(rerotate=False), naive) < 1e-5
    assert relative_error(found(rerotate=False), expected) > 1e-3


def test_shift_exactness(setting):
    config, tensors, _ = setting
    engine, ids = tiny_engine(config, tensors=tensors), prompt_ids(20, 7)
    plain, shifted = engine.prefill(ids), engine.prefill(ids)
    pool, delta = engine.pool, 37
    late = engine.prefill(ids)
    late.close()
    from minips.decoding import open_writers, prefill
    from minips.kv_cache import Branch

    late = Branch(pool, engine, [], [], delta)  # the same context at an offset
    writer = open_writers([late], [20], "context", "test")[0]
    prefill(engine.model, [writer], [ids], 512)
    writer.commit(ids)
    rerotate(pool, engine.model.rope, [(shifted.segments[0], delta)])
    slots = [pool.slots(b.segments[0].pages, 20) for b in (plain, shifted, late)]
    for tensor in pool.keys:
        flat = tensor.flatten(0, 1)
        assert relative_error(flat[slots[1]], flat[slots[2]]) < 1e-5
        assert relative_error(flat[slots[0]], flat[slots[2]]) > 1e-2
    for tensor in pool.values:  # V is never rotated, and does not depend on the offset
        flat = tensor.flatten(0, 1)
        assert torch.equal(flat[slots[0]], flat[slots[1]]) and relative_error(flat[slots[1]], flat[slots[2]]) < 1e-5


def test_anchor_invariance_without_the_prefix(setting):
    config, tensors, _ = setting
    logits = []
    for anchor in ("fork", "zero", "free"):
        engine = tiny_engine(config, tensors=tensors)
        logits.append(u_logits(engine, branches_of(engine), keep_prefix=False, anchor=anchor))
    assert relative_error(logits[0], logits[1]) < 1e-5 and relative_error(logits[0], logits[2]) < 1e-5


def test_one_branch_identity(setting):
    config, tensors, reference = setting
    engine = tiny_engine(config, tensors=tensors)
    z = prompt_ids(9, 21)
    for fork in (True, False):
        root = engine.prefill(PREFIX)
        branch = engine.fork(root, [[]])[0] if fork else root
        found = u_logits(engine, engine.encode([branch], [z]))
        assert relative_error(found, reference.plain([*PREFIX, *z, *U])[-len(U) :]) < 1e-5
    assert engine.counters["rerotated_tokens"] == 0


def test_order_invariance(setting):
    config, tensors, _ = setting
    logits = []
    for order in itertools.permutations(range(3)):
        engine = tiny_engine(config, tensors=tensors)
        branches = branches_of(engine)
        logits.append(u_logits(engine, [branches[i] for i in order]))
    assert max(relative_error(other, logits[0]) for other in logits[1:]) < 1e-5


@pytest.mark.parametrize("page_size, tokens", [(1, 300), (16, 600), (256, 4000)])
def test_page_and_pool_size_change_nothing(page_size, tokens):
    def run(engine):
        return Synthesizer(engine).generate_from_caches(branches_of(engine), U, SamplingParams(max_tokens=10)).token_ids

    assert run(tiny_engine(page_size=page_size, max_kv_tokens=tokens)) == run(tiny_engine())


def test_merge_copies_nothing_and_keeps_v_and_the_weights():
    engine = tiny_engine(page_size=1, poison=3.0)
    weights = {name: tensor.clone() for name, tensor in engine.model.state_dict().items()}
    branches = branches_of(engine)
    prefix, zs = branches[0].segments[0].pages, [b.segments[-1].pages for b in branches]
    values = [tensor.clone() for tensor in engine.pool.values]
    keys = [tensor.clone() for tensor in engine.pool.keys]
    context = Synthesizer(engine).merge(branches)
    assert [s.pages for s in context.branch.segments] == [prefix, *zs]
    assert engine.counters["copied_tokens"] == 0 and engine.counters["rerotated_tokens"] == 22
    assert all(torch.equal(old, new) for old, new in zip(values, engine.pool.values))
    assert all(torch.equal(old[prefix], new[prefix]) for old, new in zip(keys, engine.pool.keys))  # the prefix is never rotated
    assert engine.stats()["used_pages"] == 10 + 22  # the pages of c_br went back
    assert all(branch.closed for branch in branches) and engine.check()
    context.close()
    assert engine.stats()["used_pages"] == 0
    assert all(torch.equal(weights[name], tensor) for name, tensor in engine.model.state_dict().items())


def test_a_context_can_be_asked_again():
    engine = tiny_engine()
    synthesizer = Synthesizer(engine)
    with synthesizer.merge(branches_of(engine)) as context:
        first = synthesizer.generate(context=context, prompt=U, params=LOGITS)
        other = synthesizer.generate(context=context, prompt=prompt_ids(3, 60), params=LOGITS)
        again = synthesizer.generate(context=context, prompt=U, params=LOGITS)
        assert torch.equal(first.logits, again.logits) and first.num_branches == 3 and first.branch_tokens == [7, 12, 3]
        assert first.prefilled_tokens == 6 and first.reused_tokens == 10 + 22 and other.prefilled_tokens == 3
        scores = synthesizer.score(context, U, [1, 2, 3])
        expected = torch.log_softmax(first.logits[-2 if len(first.token_ids) else -1], -1)[1]
        assert scores.logprobs[0] == pytest.approx(float(expected), abs=1e-4)
        with pytest.raises(MinipsError, match="another Synthesizer"):
            Synthesizer(engine).generate(context=context, prompt=U)
    with pytest.raises(MinipsError, match="closed"):
        synthesizer.generate(context=context, prompt=U)
    assert engine.stats()["used_pages"] == 0 and engine.check()


def test_without_consume_the_branches_stay_as_they_were():
    engine = tiny_engine(poison=3.0)
    branches = branches_of(engine)
    keys = [tensor.clone() for tensor in engine.pool.keys]
    synthesizer = Synthesizer(engine)
    first = synthesizer.generate_from_caches(branches, U, LOGITS, consume=False)
    for branch in branches:
        for old, new in zip(keys, engine.pool.keys):
            assert all(torch.equal(old[s.pages], new[s.pages]) for s in branch.segments)
    assert torch.equal(first.logits, synthesizer.generate_from_caches(branches, U, LOGITS, consume=False).logits)
    assert torch.equal(first.logits, synthesizer.generate_from_caches(branches, U, LOGITS).logits)
    assert all(branch.closed for branch in branches) and engine.stats()["used_pages"] == 0


def test_pages_that_others_hold_are_copied():
    engine = tiny_engine()
    branches = branches_of(engine)
    child = engine.fork(branches[1], [[1, 2]])[0]
    expected = child.next_logits.clone()
    merged = u_logits(engine, branches)
    assert engine.counters["copied_tokens"] == 12
    fresh = tiny_engine()
    assert torch.equal(merged, u_logits(fresh, branches_of(fresh)))
    child.next_logits = None
    engine.ensure_logits([child])
    assert torch.allclose(child.next_logits, expected, atol=1e-5) and engine.check()


def test_shared_workers_are_moved_once_and_read_m_times():
    config = tiny_config()
    tensors = random_tensors(config, seed=4)
    engine = tiny_engine(config, tensors=tensors)
    root = engine.prefill(PREFIX)
    branches = engine.decode(engine.fork(root, [OWNS[0]] * 3), SamplingParams(max_tokens=6))
    z = branches[0].output_ids
    found = u_logits(engine, branches)
    assert engine.counters["rerotated_tokens"] == 6 and engine.counters["copied_tokens"] == 0
    expected = Reference(tensors, config).merged(PREFIX, [(OWNS[0], z)] * 3, U)
    assert relative_error(found, expected) < 1e-5
    branches = engine.decode(engine.fork(root, [OWNS[0]] * 2), SamplingParams(max_tokens=6))
    found = u_logits(engine, branches, layout="sequential")  # one segment to two places: one is copied
    expected = Reference(tensors, config).merged(PREFIX, [(OWNS[0], z)] * 2, U, starts=[10, 16], offset=22)
    assert relative_error(found, expected) < 1e-5
    root.close()
    assert engine.stats()["used_pages"] == 0


def test_free_anchor_leaves_samples_of_one_prompt_where_they_are():
    engine = tiny_engine()
    root = engine.prefill(PREFIX)
    params = SamplingParams(max_tokens=6, temperature=1.0, seed=1, ignore_eos=True)
    branches = engine.decode(engine.fork(root, [OWNS[0]] * 3 + [OWNS[1]]), params)
    assert len({tuple(b.output_ids) for b in branches}) > 1
    Synthesizer(engine, options={"keep_prefix": False}).merge(branches)
    assert engine.counters["rerotated_tokens"] == 6


def test_the_prefix_is_shared_by_identity_not_by_content():
    engine = tiny_engine()
    a, b = engine.prefill(PREFIX), engine.prefill(PREFIX)
    c, d = engine.fork(a, [[1], [1]])
    assert shared_prefix([c, d]) == a.segments  # equal c_br are one segment, and yet no prefix
    assert shared_prefix([c, engine.fork(b, [[1]])[0]]) == []
    inner = engine.fork(c, [[2], [3]])
    assert len(shared_prefix(inner)) == 2 and shared_prefix([*inner, d]) == a.segments
    assert shared_prefix([engine.encode([a], [[5]])[0]]) == a.segments[:1]


# Kept tokens (section 4)


def kept(engine, branch, **options):
    """(token, position) of every kept slot of one branch, read from the plan."""
    plan = plan_merge([branch], MergeOptions(**options), 256)
    ids, at, out = plan.token_ids, 0, []
    for piece in plan.pieces[0]:
        out += [(ids[at + i], piece.start + i) for i in range(piece.length)]
        at += piece.length
    return out, plan.next_position


def test_kept_tokens_by_ending():
    full = [2, 3, 5, 7]
    official = {"profile": "official"}

    def worker(ended, z, stop_token=None):
        engine = tiny_engine()
        branch = engine.encode(engine.fork(engine.prefill(PREFIX), [OWNS[0]]), [z])[0]
        branch.segments[-1].ended, branch.segments[-1].stop_token = ended, stop_token
        return engine, branch

    context = OWNS[0][-1]
    minips = {"minips": (list(zip(full, range(10, 14))), 14)}
    cases = [  # ended, minips, official
        ("stop", minips["minips"], ([(context, -1), *zip(full, range(4))], 5)),
        ("length", minips["minips"], ([(context, -1), *zip(full[:3], range(3))], 4)),
        ("stop_string", minips["minips"], ([(context, -1), *zip(full[:3], range(3))], 4)),
        ("given", minips["minips"], (list(zip(full, range(4))), 4)),
    ]
    for ended, ours, theirs in cases:
        assert kept(*worker(ended, full)) == ours
        assert kept(*worker(ended, full), **official) == theirs
    assert kept(*worker("stop", full, 9), keep_stop_token=True) == ([*zip([*full, 9], range(10, 15))], 15)
    assert kept(*worker("stop", full, 9), keep_stop_token=True, **official) == cases[0][2]
    assert kept(*worker("stop", []), **official) == ([(context, -1)], 1)
    assert kept(*worker("length", [2]), **official) == ([(context, -1)], 1)


def test_the_kept_stop_token_is_the_cached_one():
    config = tiny_config()
    tensors = random_tensors(config)
    reference = Reference(tensors, config)
    full = reference.greedy([*PREFIX, *OWNS[0]], 8)
    at = next(i for i in range(1, 8) if full[i] not in full[:i])
    engine = tiny_engine(config, tensors=tensors)
    branch = engine.decode(engine.fork(engine.prefill(PREFIX), [OWNS[0]]), SamplingParams(max_tokens=8, stop_token_ids=(full[at],)))[0]
    found = u_logits(engine, [branch], keep_stop_token=True)
    assert relative_error(found, reference.merged(PREFIX, [(OWNS[0], full[: at + 1])], U)) < 1e-5


def test_official_profile_equals_the_reference():
    config = tiny_config()
    tensors = random_tensors(config)
    reference = Reference(tensors, config)
    engine = tiny_engine(config, tensors=tensors)
    branches = engine.decode(engine.fork(engine.prefill(PREFIX), OWNS), SamplingParams(max_tokens=6))
    zs = [b.output_ids for b in branches]
    found = u_logits(engine, branches, profile="official")
    pairs = [(own[:-1], [own[-1], *z[:-1]]) for own, z in zip(OWNS, zs)]
    expected = reference.merged(PREFIX, pairs, U, keep_prefix=False, starts=[-1] * 3, offset=6)
    assert relative_error(found, expected) < 1e-5


def turns(engine):
    branch = engine.fork(engine.prefill(PREFIX), [OWNS[0]])[0]
    engine.encode([branch], [[1, 2, 3]])
    engine.extend([branch], [[40, 41]])
    return engine.encode([branch], [[4, 5]])[0]


@pytest.mark.parametrize(
    "mode, expected",
    [
        ("final", [(4, 10), (5, 11)]),
        ("outputs", [(1, 10), (2, 11), (3, 12), (4, 15), (5, 16)]),
        ("compact", [(1, 10), (2, 11), (3, 12), (4, 13), (5, 14)]),
        ("all", list(zip([*OWNS[0], 1, 2, 3, 40, 41, 4, 5], range(10, 22)))),
    ],
)
def test_turns_that_are_kept(mode, expected):
    engine = tiny_engine()
    assert kept(engine, turns(engine), keep_turns=mode) == (expected, expected[-1][1] + 1)


def test_a_longer_trajectory_equals_the_reference():
    config = tiny_config()
    tensors = random_tensors(config)
    engine = tiny_engine(config, tensors=tensors)
    found = u_logits(engine, [turns(engine)], keep_turns="all")
    plain = Reference(tensors, config).plain([*PREFIX, *OWNS[0], 1, 2, 3, 40, 41, 4, 5, *U])
    assert relative_error(found, plain[-len(U) :]) < 1e-5


def test_adjacent_decodes_are_one_span():
    engine = tiny_engine()
    branch = engine.fork(engine.prefill(PREFIX), [OWNS[0]])[0]
    for _ in range(2):
        engine.decode([branch], SamplingParams(max_tokens=3))
    found, end = kept(engine, branch)
    assert [token for token, _ in found] == branch.token_ids[-6:] and end == 16


# Empty branches, refusals (sections 3 to 5)


def stopped_at_once(engine, root):
    branch = engine.fork(root, [[1]])[0]
    return engine.decode([branch], SamplingParams(stop_token_ids=(int(branch.next_logits.argmax()),)))[0]


def test_empty_branches_are_skipped_or_refused():
    engine = tiny_engine()
    root = engine.prefill(PREFIX)
    empty = stopped_at_once(engine, root)
    assert empty.output_ids == [] and empty.finish_reason == "stop"
    full = engine.encode(engine.fork(root, [OWNS[0]]), [OUTS[0]])[0]
    with pytest.warns(UserWarning, match="branch 0 is empty"):
        context = Synthesizer(engine).merge([empty, full])
    assert context.num_branches == 1 and empty.closed
    context.close()
    with pytest.raises(MinipsError, match="all 2 branches are empty"):
        Synthesizer(engine).merge([stopped_at_once(engine, root), stopped_at_once(engine, root)])
    with pytest.raises(MinipsError, match="branch 0 has no output"):
        Synthesizer(engine).merge(engine.fork(root, [[1]]))
    with pytest.raises(MinipsError, match="no branches were given"):
        Synthesizer(engine).merge([])
    with pytest.raises(MinipsError, match="no branches were given"):
        Synthesizer(engine, options={"keep_prefix": False}).merge([], prefix=root)
    with pytest.warns(UserWarning, match="the prefix alone"):
        context = Synthesizer(engine).merge([], prefix=root)
    assert context.num_branches == 0 and context.branch.num_cached == 10


def test_a_missing_prefix_is_refused_with_the_way_out():
    engine = tiny_engine()
    branches = engine.encode([engine.prefill(PREFIX), engine.prefill(U)], [[1], [2]])
    with pytest.raises(MinipsError, match=r"fork them from one engine.prefill\(...\) or use MergeOptions\(keep_prefix=False\)"):
        Synthesizer(engine).merge(branches)
    assert not any(branch.closed for branch in branches)
    Synthesizer(engine, options={"keep_prefix": False}).merge(branches).close()


def test_illegal_options_are_refused():
    for options, message in [
        ({"anchor": "zero"}, "cannot be combined with keep_prefix"),
        ({"anchor": "free"}, "cannot be combined with keep_prefix"),
        ({"layout": "stacked"}, "layout is 'stacked', expected one of parallel, sequential"),
        ({"profile": "paper"}, "profile is 'paper'"),
        ({"keep_turns": "some"}, "keep_turns is 'some'"),
        ({"keep": 1}, "unknown option 'keep'"),
    ]:
        with pytest.raises(MinipsError, match=message):
            Synthesizer(tiny_engine(), options=options)
    assert MergeOptions(profile="official") == MergeOptions("official", False, "zero")
    assert MergeOptions(keep_prefix=False).anchor == "free"


def test_layouts_beyond_the_limit_are_refused():  # FAULTS 36
    engine = tiny_engine(tiny_config(max_position_embeddings=64))
    root = engine.prefill(prompt_ids(20))
    branches = engine.encode(engine.fork(root, [[1], [2]]), [prompt_ids(25, 1), prompt_ids(25, 2)])
    with pytest.raises(MinipsError, match="end at position 70, the model's limit is 64"):
        Synthesizer(engine, options={"layout": "sequential"}).merge(branches)
    context = Synthesizer(engine).merge(branches)
    with pytest.raises(MinipsError, match="needs 65 positions, the model's limit is 64"):
        context.owner.generate(context=context, prompt=prompt_ids(20))
    assert engine.check()


def test_a_segment_moves_at_most_eight_times_in_16_bits():
    for dtype, refused in ((torch.bfloat16, True), (torch.float32, False)):
        engine = tiny_engine(dtype=dtype)
        branches = branches_of(engine)
        branches[1].segments[-1].moves = 8
        if refused:
            with pytest.raises(MinipsError, match="rotated 8 times, the limit is 8"):
                Synthesizer(engine).merge(branches)
            branches[1].segments[-1].moves = 7
        assert Synthesizer(engine).merge(branches).branch.segments[2].moves == (8 if refused else 9)


def test_other_handles_are_refused():
    engine, other = tiny_engine(), tiny_engine()
    branches, foreign = branches_of(engine), branches_of(other)
    for items, message in [
        ([branches[0], branches[0]], "the same branch is there twice"),
        ([branches[0], foreign[0]], "branch 1 belongs to another engine"),
        (["text"], "item 0 is str"),
    ]:
        with pytest.raises(MinipsError, match=message):
            Synthesizer(engine).merge(items)
    Synthesizer(engine).merge(branches)
    with pytest.raises(MinipsError, match="branch 0 is closed"):
        Synthesizer(engine).merge(branches)
    with pytest.raises(MinipsError, match="either context= and prompt=, or text="):
        Synthesizer(engine).generate(prompt=U)


def test_a_merge_that_fails_half_way_closes_what_it_consumed(monkeypatch):
    from minips import merge

    engine = tiny_engine()
    branches = branches_of(engine)
    child = engine.fork(branches[0], [[1]])[0]  # one piece is copied before the failure

    def broken(*_):
        raise RuntimeError("device lost")

    monkeypatch.setattr(merge, "rerotate", broken)
    with pytest.raises(MinipsError, match="failed half-way .*device lost.*3 branches it consumed are closed"):
        Synthesizer(engine).merge(branches)
    assert all(branch.closed for branch in branches) and engine.check()
    child.close()
    assert engine.stats()["used_pages"] == 0


def test_copies_that_do_not_fit_are_refused_before_anything_changes():
    engine = tiny_engine(page_size=4, max_kv_tokens=60, poison=3.0)
    branches = branches_of(engine)
    keys = [tensor.clone() for tensor in engine.pool.keys]
    with pytest.raises(MinipsError, match="copying shared branch pages needs"):
        Synthesizer(engine).merge(branches, consume=False)
    assert not any(b.closed for b in branches) and all(torch.equal(a, b) for a, b in zip(keys, engine.pool.keys)) and engine.check()


def test_run_is_the_whole_job():
    engine = tiny_engine()
    synthesizer = Synthesizer(engine)
    seen = []
    result = synthesizer.run(
        PREFIX, OWNS, U, worker_params=SamplingParams(max_tokens=6), params=SamplingParams(max_tokens=5),
        on_token=lambda row, token, text: seen.append(row),
    )  # fmt: skip
    by_hand = engine.decode(engine.fork(engine.prefill(PREFIX), OWNS), SamplingParams(max_tokens=6))
    assert [w.token_ids for w in result.workers] == [b.output_ids for b in by_hand] and len(seen) == 18
    assert [w.prompt_tokens for w in result.workers] == [15, 12, 19]
    assert synthesizer.generate_from_caches(by_hand, U, SamplingParams(max_tokens=5)).token_ids == result.token_ids
    assert engine.stats()["used_pages"] == 0
    small = tiny_engine(page_size=4, max_kv_tokens=100)
    with pytest.raises(MinipsError, match="a run of 3 workers and a synthesizer needs"):
        Synthesizer(small).run(PREFIX, OWNS, U, worker_params=SamplingParams(max_tokens=20))
    assert small.counters["prefilled_tokens"] == 0


def test_streams_from_caches_give_pages_back():
    engine = tiny_engine()
    synthesizer = Synthesizer(engine)
    whole = synthesizer.generate_from_caches(branches_of(engine), U, SamplingParams(max_tokens=6))
    stream = synthesizer.stream_from_caches(branches_of(engine), U, SamplingParams(max_tokens=6))
    assert stream.finish().token_ids == whole.token_ids and stream.result.num_branches == 3
    stream = synthesizer.stream_from_caches(branches_of(engine), U, SamplingParams(max_tokens=6))
    next(iter(stream), None)
    stream.close()
    assert engine.stats()["used_pages"] == 0 and engine.check()


def test_text_interface_uses_the_base_model():
    engine = tiny_engine()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = Synthesizer(engine).generate(text=PREFIX, params=SamplingParams(max_tokens=4))
    assert result.token_ids == engine.generate(PREFIX, SamplingParams(max_tokens=4)).token_ids


def test_deeper_keys_depend_on_the_prefix_and_first_layer_keys_do_not():  # FAULTS 77
    engine = tiny_engine()
    ids, keys = prompt_ids(8, 30), []
    for prefix in (prompt_ids(6, 31), prompt_ids(11, 32)):
        branch = engine.fork(engine.prefill(prefix), [ids])[0]
        segment = branch.segments[-1]
        rerotate(engine.pool, engine.model.rope, [(segment, -segment.start)])
        slots = engine.pool.slots(segment.pages, 8)
        keys.append([tensor.flatten(0, 1)[slots] for tensor in engine.pool.keys])
    assert relative_error(keys[0][0], keys[1][0]) < 1e-5
    assert relative_error(keys[0][1], keys[1][1]) > 1e-2
