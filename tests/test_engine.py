"""Branches: prefill, fork, decode, extend, encode, score. FAULTS items 36, 40, 42, 43, 45 to 48, 64, 68, 82."""

import random
import warnings

import pytest
import torch

from minips import MinipsError, SamplingParams
from tests.reference import Reference
from tests.support import prompt_ids, random_tensors, tiny_config, tiny_engine

GREEDY = SamplingParams(max_tokens=8)
SAMPLED = SamplingParams(max_tokens=8, temperature=1.0, seed=11)


def solo(ids, params, **engine):
    with tiny_engine(**engine).prefill(ids) as branch:
        return branch.owner.decode([branch], [params])[0].output_ids


def test_greedy_equals_the_reference():
    config = tiny_config()
    tensors, ids = random_tensors(config), prompt_ids(7)
    assert solo(ids, GREEDY) == Reference(tensors, config).greedy(ids, 8)


@pytest.mark.parametrize("count", [1, 2, 4, 8])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_rows_of_a_ragged_batch_equal_their_solo_runs(count, params):  # FAULTS 43, 64
    engine = tiny_engine(prefill_chunk=16)
    prefix = engine.prefill(prompt_ids(5))
    prompts = [prompt_ids(3 + 5 * (i % 4) + i, i) for i in range(count)]
    each = [params if params.greedy else SamplingParams(max_tokens=4 + i, temperature=1.0, seed=i) for i in range(count)]
    branches = engine.decode(engine.fork(prefix, prompts), each)
    for branch, own, row in zip(branches, prompts, each):
        assert branch.output_ids == solo(prompt_ids(5) + own, row)
    shuffled = engine.decode(engine.fork(prefix, prompts[::-1]), each[::-1])
    assert [b.output_ids for b in shuffled[::-1]] == [b.output_ids for b in branches]
    engine.close()
    assert engine.check() and engine.stats()["used_pages"] == 0


@pytest.mark.parametrize("page_size, tokens", [(1, 400), (16, 400), (64, 2000), (256, 4000), (16, 1500)])
def test_page_and_pool_size_change_nothing(page_size, tokens):
    engine = tiny_engine(page_size=page_size, max_kv_tokens=tokens)
    prefix = engine.prefill(prompt_ids(33))
    branches = engine.decode(engine.fork(prefix, [prompt_ids(4, 1), prompt_ids(9, 2)]), GREEDY)
    assert [b.output_ids for b in branches] == [solo(prompt_ids(33) + prompt_ids(n, s), GREEDY) for n, s in ((4, 1), (9, 2))]


def test_shared_params_draw_from_seed_and_row():  # FAULTS 64
    engine = tiny_engine()
    prefix = engine.prefill(prompt_ids(6))
    first = [b.output_ids for b in engine.decode(engine.fork(prefix, [[]] * 3), SAMPLED)]
    again = [b.output_ids for b in engine.decode(engine.fork(prefix, [[]] * 5), SAMPLED)]
    assert first == again[:3] and len({tuple(z) for z in again}) > 1


@pytest.mark.parametrize("poison", [0.0, 1e4, float("nan")])
def test_a_poisoned_pool_changes_nothing(poison):  # FAULTS 38
    def run(engine):
        prefix = engine.prefill(prompt_ids(13))
        first = engine.decode(engine.fork(prefix, [prompt_ids(3, 1), prompt_ids(6, 2)]), GREEDY)
        for branch in first:
            branch.close()
        second = engine.decode(engine.fork(prefix, [prompt_ids(6, 3)]), GREEDY)  # on recycled pages
        return [b.output_ids for b in (*first, *second)], second[0].next_logits

    tokens, logits = run(tiny_engine(poison=poison))
    expected, plain = run(tiny_engine())
    assert tokens == expected and torch.equal(logits, plain)


@pytest.mark.parametrize("chunk", [1, 3, 7, 16])
def test_chunked_prefill_equals_one_shot(chunk):  # FAULTS 54
    ids = [prompt_ids(20, 1), prompt_ids(31, 2)]
    logits = []
    for size in (chunk, 512):
        engine = tiny_engine(prefill_chunk=size)
        branches = engine.fork(engine.prefill(prompt_ids(9)), ids)
        logits.append(torch.stack([b.next_logits for b in branches]))
    assert torch.allclose(logits[0], logits[1], atol=1e-4)


def test_fork_copies_nothing_and_costs_its_own_tokens_only():  # FAULTS 82
    engine = tiny_engine(tiny_config(max_position_embeddings=2048), page_size=16, max_kv_tokens=4000, poison=3.0)
    prefix = engine.prefill(prompt_ids(741))
    before = engine.stats()
    keys = [k.clone() for k in engine.pool.keys]
    branches = engine.fork(prefix, [prompt_ids(16, i) for i in range(4)])
    after = engine.stats()
    assert after["prefilled_tokens"] - before["prefilled_tokens"] == 64
    assert before["free_pages"] - after["free_pages"] == 4
    assert after["copied_tokens"] == 0
    for branch in branches:
        assert branch.segments[0] is prefix.segments[0] and branch.segments[0].pages == prefix.segments[0].pages
    pages = prefix.segments[0].pages
    assert all(torch.equal(old[pages], new[pages]) for old, new in zip(keys, engine.pool.keys))


def test_pages_of_four_workers_on_a_half_full_tail():  # FAULTS 42: 3 + 4 pages where a fork starts on a fresh page
    engine = tiny_engine(page_size=16)
    prefix = engine.prefill(prompt_ids(40))
    branches = engine.fork(prefix, [[]] * 4)
    engine.decode(branches, SamplingParams(max_tokens=1, temperature=1.0, seed=0, ignore_eos=True))
    assert engine.stats()["used_pages"] == 3 + 4
    assert all(engine.pool.ref_count[page] == 5 for page in prefix.segments[0].pages)


def test_identical_greedy_workers_are_computed_once():
    engine = tiny_engine()
    prefix = engine.prefill(prompt_ids(6))
    events = []
    branches = engine.fork(prefix, [prompt_ids(3, 1)] * 3 + [prompt_ids(4, 2)])
    engine.decode(branches, GREEDY, on_token=lambda row, token, text: events.append(row))
    assert engine.counters["decoded_tokens"] == 16 and engine.counters["prefilled_tokens"] == 6 + 3 + 4
    assert branches[0].output_ids == branches[1].output_ids == solo(prompt_ids(6) + prompt_ids(3, 1), GREEDY)
    assert branches[0].segments[-1] is branches[2].segments[-1]
    assert sorted(events) == [0] * 8 + [1] * 8 + [2] * 8 + [3] * 8
    assert engine.check()
    branches[0].close()
    engine.decode([branches[1]], GREEDY)  # a shared z is never appended to
    assert branches[2].num_cached == 6 + 3 + 8 and engine.check()


def test_cache_length_is_token_count_and_turns_continue():  # FAULTS 48
    engine = tiny_engine()
    branch = engine.decode([engine.prefill(prompt_ids(10))], SamplingParams(max_tokens=5))[0]
    assert branch.num_cached == branch.num_tokens == 15
    engine.extend([branch], [prompt_ids(4, 1)])
    assert branch.num_cached == 19 and branch.token_ids[15:] == prompt_ids(4, 1)
    first = branch.token_ids[10:15]
    engine.decode([branch], GREEDY)
    assert branch.output_ids == solo(prompt_ids(10) + first + prompt_ids(4, 1), GREEDY)


def test_decoding_in_two_calls_equals_one():
    engine = tiny_engine()
    branch = engine.prefill(prompt_ids(10))
    for _ in range(2):
        engine.decode([branch], SamplingParams(max_tokens=4))
    assert branch.token_ids[10:] == solo(prompt_ids(10), GREEDY)


def first_of(ids, params=GREEDY):
    return solo(ids, params)


def test_early_rows_leave_the_batch():  # FAULTS 68
    ids = [prompt_ids(5, seed) for seed in range(3)]
    full = [first_of(row, SamplingParams(max_tokens=6)) for row in ids]
    each = [
        SamplingParams(max_tokens=6, stop_token_ids=(full[0][1],)) if full[0][1] != full[0][0] else SamplingParams(max_tokens=1),
        SamplingParams(max_tokens=4),
        SamplingParams(max_tokens=6),
    ]
    engine = tiny_engine()
    sizes = []
    from minips import decoding

    plain = decoding._forward
    branches = [engine.prefill(row) for row in ids]
    decoding._forward = lambda model, writers, rows: sizes.append(len(rows)) or plain(model, writers, rows)
    try:
        engine.decode(branches, each)
    finally:
        decoding._forward = plain
    assert [len(b.output_ids) for b in branches] == [1, 4, 6]
    assert [b.finish_reason for b in branches][1:] == ["length", "length"]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] == 3 and sizes[-1] == 1 and len(sizes) == 6
    for branch in branches:
        z = branch.segments[-1]
        assert len(z.pages) == engine.pool.pages_for(z.length + (z.stop_token is not None))


def test_stop_token_is_not_output_but_cached_behind_it():
    ids = prompt_ids(5)
    full = first_of(ids)
    at = next(i for i in range(1, 8) if full[i] not in full[:i])
    engine = tiny_engine()
    branch = engine.decode([engine.prefill(ids)], SamplingParams(max_tokens=8, stop_token_ids=(full[at],)))[0]
    assert branch.output_ids == full[:at] and branch.finish_reason == "stop"
    assert branch.num_cached == branch.num_tokens == 5 + at and branch.segments[-1].stop_token == full[at]
    engine.decode([branch], SamplingParams(max_tokens=8 - at))  # goes on where it stopped
    assert branch.output_ids == full[at:]


def test_every_end_id_stops_and_ignore_eos_ignores_them_all():  # FAULTS 20, 21
    ids = prompt_ids(5)
    full = first_of(ids, SamplingParams(max_tokens=12))
    engine = tiny_engine()
    engine.stop_ids = frozenset(full[2:5])
    branch = engine.decode([engine.prefill(ids)], SamplingParams(max_tokens=12))[0]
    assert branch.output_ids == full[: min(full.index(t) for t in full[2:5])] and branch.finish_reason == "stop"
    branch = engine.decode([engine.prefill(ids)], SamplingParams(max_tokens=12, ignore_eos=True))[0]
    assert branch.output_ids == full and branch.finish_reason == "length"


def test_positions_end_at_the_models_limit():  # FAULTS 36: a new token needs a position of its own below the limit
    engine = tiny_engine(tiny_config(max_position_embeddings=64))
    with pytest.raises(MinipsError, match="65 positions, the model's limit is 64"):
        engine.prefill(prompt_ids(65))
    result = engine.generate(prompt_ids(64), SamplingParams(max_tokens=10))
    assert result.token_ids == [] and result.finish_reason == "length"
    result = engine.generate(prompt_ids(60), SamplingParams(max_tokens=10))
    assert len(result.token_ids) == 4 and result.finish_reason == "length"
    branch = engine.decode([engine.prefill(prompt_ids(60))], SamplingParams(max_tokens=10))[0]
    assert branch.num_cached == 64 and branch.finish_reason == "length"
    engine.decode([branch], GREEDY)
    assert branch.output_ids == [] and branch.finish_reason == "length" and branch.num_cached == 64
    with pytest.raises(MinipsError, match="65 positions"):
        engine.extend([branch], [[1]])


def test_requests_beyond_the_pool_are_refused_whole():  # FAULTS 40, 47
    engine = tiny_engine(page_size=16, max_kv_tokens=128)
    with pytest.raises(MinipsError, match=r"needs 13 pages of 16 tokens, 8 of 8 are free"):
        engine.prefill(prompt_ids(200))
    with pytest.raises(MinipsError, match=r"needs 9 pages"):
        engine.generate(prompt_ids(30), SamplingParams(max_tokens=100))
    prefix = engine.prefill(prompt_ids(60))
    with pytest.raises(MinipsError, match=r"needs 12 pages of 16 tokens, 4 of 8"):
        engine.fork(prefix, [prompt_ids(40, i) for i in range(4)])
    branches = engine.fork(prefix, [[]] * 4)
    with pytest.raises(MinipsError, match=r"decoding 4 workers needs 8 pages"):
        engine.decode(branches, SamplingParams(max_tokens=20, temperature=1.0))
    assert engine.stats()["used_pages"] == 4 and engine.check()


def test_200_requests_and_broken_ones_leave_no_page():  # FAULTS 45, 46
    engine, rng = tiny_engine(page_size=4, max_kv_tokens=400), random.Random(1)
    prefix = engine.prefill(prompt_ids(10))
    baseline = engine.stats()["used_pages"]
    expected = solo(prompt_ids(10) + prompt_ids(3, 1), GREEDY)

    class Boom(Exception):
        pass

    for number in range(200):
        kind = number % 4
        branches = engine.fork(prefix, [prompt_ids(rng.randint(0, 9), rng.randint(0, 5)) for _ in range(rng.randint(1, 4))])
        stop = (rng.randrange(97),)
        params = SamplingParams(max_tokens=rng.randint(1, 9), temperature=rng.choice([0, 1.0]), seed=number, stop_token_ids=stop)
        if kind == 0:
            engine.decode(branches, params)
        elif kind == 1:
            step = rng.randint(1, 6)

            def fail(row, token, text, seen=[]):
                seen.append(token)
                if len(seen) > step:
                    raise Boom

            before = [(b.num_tokens, b.num_cached) for b in branches]
            try:
                engine.decode(branches, params, on_token=fail)
            except Boom:
                assert [(b.num_tokens, b.num_cached) for b in branches] == before
        elif kind == 2:
            stream = engine.stream(prompt_ids(6, number), params)
            for _, _piece in zip(range(rng.randint(0, 2)), stream):
                pass
            stream.close()
        else:
            engine.extend(branches, [prompt_ids(2, i) for i in range(len(branches))])
            engine.decode(branches, params)
        assert engine.check()
        for branch in branches:
            branch.close()
        del branches
        assert engine.stats()["used_pages"] == baseline and engine.check()
    assert engine.decode(engine.fork(prefix, [prompt_ids(3, 1)]), GREEDY)[0].output_ids == expected
    prefix.close()
    engine.close()
    assert engine.stats()["used_pages"] == 0 and engine.stats()["open_branches"] == 0


def test_encode_gives_what_decode_would_have_cached():
    engine = tiny_engine()
    prefix = engine.prefill(prompt_ids(6))
    live = engine.decode(engine.fork(prefix, [prompt_ids(3, 1)]), GREEDY)[0]
    given = engine.encode(engine.fork(prefix, [prompt_ids(3, 1)]), [live.output_ids])[0]
    assert given.output_ids == live.output_ids and given.finish_reason == "given" and given.token_ids == live.token_ids
    for tensor in (*engine.pool.keys, *engine.pool.values):
        flat = tensor.flatten(0, 1)
        a, b = (flat[engine.pool.slots(x.segments[-1].pages, 8)] for x in (live, given))
        assert torch.allclose(a, b, atol=3e-5)
    assert torch.allclose(given.next_logits, live.next_logits, atol=1e-4)


def test_logits_are_recomputed_where_none_are_kept():  # FAULTS 85
    engine = tiny_engine()
    branch = engine.prefill(prompt_ids(10))
    logits, branch.next_logits = branch.next_logits, None
    used = engine.stats()["used_pages"]
    engine.ensure_logits([branch])
    assert torch.allclose(branch.next_logits, logits, atol=1e-5) and engine.stats()["used_pages"] == used
    assert engine.decode([branch], GREEDY)[0].output_ids == solo(prompt_ids(10), GREEDY)


def test_score_equals_the_reference_and_generate():
    config = tiny_config()
    tensors, ids, target = random_tensors(config), prompt_ids(7), prompt_ids(9, 4)
    logits = Reference(tensors, config).plain([*ids, *target])[6:-1]
    expected = torch.log_softmax(logits, -1).gather(1, torch.tensor(target)[:, None])[:, 0]
    for chunk in (3, 512):
        scores = tiny_engine(prefill_chunk=chunk).score(ids, target)
        assert torch.allclose(torch.tensor(scores.logprobs, dtype=torch.float64), expected, atol=1e-4)
        assert scores.greedy == (logits.argmax(-1) == torch.tensor(target)).tolist()
        assert scores.mean_nll == pytest.approx(-float(expected.mean()), abs=1e-4)


def test_result_logits_and_logprobs_line_up():  # FAULTS 67
    config = tiny_config()
    tensors, ids = random_tensors(config), prompt_ids(7)
    engine = tiny_engine()
    for params in (GREEDY, SamplingParams(max_tokens=8, temperature=0.7, seed=3)):
        result = engine.generate(ids, SamplingParams(**{**params.__dict__, "return_logits": True, "logprobs": 2}))
        assert result.logits.shape == (15, 97) and result.logits.dtype == torch.float32
        exact = Reference(tensors, config).plain([*ids, *result.token_ids])
        assert torch.allclose(result.logits.double(), exact, atol=1e-4)
        raw = torch.log_softmax(exact[6:-1], -1)
        for step, (token, entry) in enumerate(zip(result.token_ids, result.logprobs)):
            assert token in entry and 2 <= len(entry) <= 3
            assert all(value == pytest.approx(float(raw[step, t]), abs=1e-4) and value <= 0 for t, value in entry.items())
    assert engine.stats()["used_pages"] == 0


def test_refusals_name_the_field():
    engine, other = tiny_engine(), tiny_engine()
    root = engine.prefill([1, 2, 3])
    cases = [
        (lambda: engine.prefill([1, 97]), "token id 97 is outside the model's vocabulary of 97"),
        (lambda: engine.prefill([]), "empty"),
        (lambda: engine.prefill(7), "prompt is int"),
        (lambda: engine.prefill("text"), "no tokenizer.json"),
        (lambda: engine.fork(root, "text"), "list with one prompt a branch"),
        (lambda: engine.decode([root, root], GREEDY), "the same branch is there twice"),
        (lambda: engine.decode([root], [GREEDY, GREEDY]), "1 branches but 2 params"),
        (lambda: engine.encode([root], "text"), "1 branches but str outputs"),
        (lambda: other.decode([root], GREEDY), "belongs to another engine"),
        (lambda: engine.decode([3], GREEDY), "item 0 is int, expected a Branch"),
        (lambda: engine.generate([1], SamplingParams(stop="x")), "stop strings need a tokenizer"),
        (lambda: engine.score([1], []), "target is empty"),
    ]
    for call, message in cases:
        with pytest.raises(MinipsError, match=message):
            call()
    root.close()
    with pytest.raises(MinipsError, match="branch 0 is closed"):
        engine.decode([root], GREEDY)
    assert engine.check() and engine.stats()["used_pages"] == 0


def test_nan_weights_are_reported_with_their_row():  # FAULTS 66
    config = tiny_config()
    tensors = random_tensors(config)
    tensors["model.embed_tokens.weight"][5] = float("nan")
    engine = tiny_engine(config, tensors=tensors)
    branches = [engine.prefill([1, 2]), engine.prefill([1, 5]), engine.prefill([3, 4])]
    with pytest.raises(MinipsError, match=r"row 1"):
        engine.decode(branches, GREEDY)
    assert engine.check()
    assert engine.decode([branches[0], branches[2]], GREEDY)[0].output_ids == solo([1, 2], GREEDY)


def test_stream_pieces_and_result():
    engine = tiny_engine()
    stream = engine.stream(prompt_ids(5), GREEDY)
    with pytest.raises(MinipsError, match="before the stream was read"):
        stream.result
    result = stream.finish()
    assert result.token_ids == solo(prompt_ids(5), GREEDY)
    assert 0 < result.ttft and set(result.timings) == {"rerotate", "map", "prefill", "first_token", "decode"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        unstarted = engine.stream(prompt_ids(5), GREEDY)
        unstarted.close()
    del unstarted
    assert engine.stats()["used_pages"] == 0
