"""The facts of CONTRACT.md section 6, and the calls of the synthesizer. FAULTS items 76, 77."""

import itertools
import warnings

import pytest
import torch

from minips import MinipsError, SamplingParams, Synthesizer
from minips.merge import shared_prefix
from minips.transform import rerotate
from tests.reference import Reference
from tests.support import LOGITS, OUTS, OWNS, PREFIX, U, branches_of, prompt_ids, random_tensors
from tests.support import relative_error, tiny_config, tiny_engine, u_logits

SCALED = {
    "rope_scaling": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
    }
}  # fmt: skip


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
    rerotate(pool, engine.model.rope, shifted.segments[0], delta)
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
        rerotate(engine.pool, engine.model.rope, segment, -segment.start)
        slots = engine.pool.slots(segment.pages, 8)
        keys.append([tensor.flatten(0, 1)[slots] for tensor in engine.pool.keys])
    assert relative_error(keys[0][0], keys[1][0]) < 1e-5
    assert relative_error(keys[0][1], keys[1][1]) > 1e-2


@pytest.mark.parametrize(
    "prompt, params, message",
    [(U, 5, "params is int"), (prompt_ids(3000), None, "the prompt needs"), (3.5, None, "prompt"), ([], None, "empty")],
)
def test_what_is_refused_leaves_the_branches_as_they_are(prompt, params, message):
    engine = tiny_engine()
    branches = branches_of(engine)
    with pytest.raises(MinipsError, match=message):
        Synthesizer(engine).generate_from_caches(branches, prompt, params)
    assert not any(branch.closed for branch in branches) and engine.check()
    assert Synthesizer(engine).generate_from_caches(branches, U, SamplingParams(max_tokens=3)).token_ids
