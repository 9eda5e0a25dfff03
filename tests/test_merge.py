"""Kept tokens (CONTRACT.md section 4), empty branches, and every refusal of sections 3 to 5. FAULTS item 36."""

import pytest
import torch

from minips import MinipsError, SamplingParams, Synthesizer
from minips.config import MergeOptions
from minips.merge import plan_merge
from tests.reference import Reference
from tests.support import OUTS, OWNS, PREFIX, U, branches_of, prompt_ids, random_tensors
from tests.support import relative_error, tiny_config, tiny_engine, u_logits


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


def test_the_free_anchor_gives_way_where_the_branches_would_not_fit():
    engine = tiny_engine(tiny_config(max_position_embeddings=64))
    root = engine.prefill(prompt_ids(50))
    owns = [prompt_ids(5, 1), prompt_ids(5, 2), []]
    branches = engine.encode(engine.fork(root, owns), [prompt_ids(5, 3), prompt_ids(5, 4), prompt_ids(12, 5)])
    with Synthesizer(engine, options={"keep_prefix": False}).merge(branches) as context:  # 55 has two votes, but 55 + 12 > 64
        assert [segment.start for segment in context.branch.segments] == [50, 50, 50] and context.branch.next_position == 62


def test_a_segment_moves_at_most_eight_times_in_16_bits():
    for dtype, refused in ((torch.bfloat16, True), (torch.float32, False)):
        engine = tiny_engine(dtype=dtype)
        branches = branches_of(engine)
        branches[1].segments[-1].moves = 8
        if refused:
            with pytest.raises(MinipsError, match="rotated 8 times, the limit is 8"):
                Synthesizer(engine).merge(branches)
            branches[1].segments[-1].moves = 7
        with Synthesizer(engine).merge(branches) as context:
            assert context.branch.segments[2].moves == (8 if refused else 9)


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
    from minips.transform import Transform

    engine = tiny_engine()
    branches = branches_of(engine)
    child = engine.fork(branches[0], [[1]])[0]  # one piece is copied before the failure

    def broken(*_):
        raise RuntimeError("device lost")

    monkeypatch.setattr(Transform, "apply", broken)
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


def test_official_spans_cover_a_last_turn_that_kept_nothing():
    engine = tiny_engine()
    branch = engine.fork(engine.prefill([1, 2, 3]), [[4, 5]])[0]
    engine.decode([branch], SamplingParams(max_tokens=3))
    engine.extend([branch], [[6, 7, 8, 9, 10]])
    engine.decode([branch], SamplingParams(max_tokens=1))
    with Synthesizer(engine, options={"profile": "official", "keep_turns": "outputs"}).merge([branch]) as context:
        ends = [segment.start + segment.length for segment in context.branch.segments]
        assert context.branch.next_position == 9 and max(ends) <= 9  # prompt_2 - prompt_1 + output_2 = 13 - 5 + 1


def test_official_spans_count_the_stop_token_of_a_later_turn():
    engine = tiny_engine()
    branch = turns(engine)
    branch.segments[-1].ended = "stop"
    found, end = kept(engine, branch, profile="official", keep_turns="outputs")
    assert found == [(1, 0), (2, 1), (3, 2), (41, 4), (4, 5), (5, 6)] and end == 8


def test_the_kept_prefix_never_moves_even_as_last_context_token():
    logits = []
    for close in (True, False):
        engine = tiny_engine()
        root = engine.prefill([11])
        branches = engine.decode(engine.fork(root, [[5, 6], []]), SamplingParams(max_tokens=3))
        if close:
            root.close()
        logits.append(u_logits(engine, branches, profile="official", keep_prefix=True, layout="sequential"))
    assert torch.equal(*logits)


def test_a_kept_prefix_brings_its_anchor_in_every_profile():
    assert MergeOptions(profile="official", keep_prefix=True).anchor == "fork"
    ours = MergeOptions()
    assert ours.changed({"keep_prefix": False}).anchor == "free" and ours.changed({"profile": "official"}).anchor == "zero"
    assert MergeOptions(profile="official").changed({"keep_turns": "all"}).anchor == "zero"
    with pytest.raises(MinipsError, match="keep_turns 'full'"):
        MergeOptions(keep_turns="full")


def test_a_branch_that_stopped_at_once_stays_empty_with_its_stop_token():
    engine = tiny_engine()
    root = engine.prefill(PREFIX)
    with pytest.raises(MinipsError, match="all 1 branches are empty"):
        Synthesizer(engine, options={"keep_stop_token": True}).merge([stopped_at_once(engine, root)])
