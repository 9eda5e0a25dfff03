"""A KV cache of bounded bytes: branches that no call needs are parked in host memory and come back, with the same tokens."""

import random
import threading
import time

import pytest
import torch

from minips import MinipsError, SamplingParams, Synthesizer
from minips.branch_files import load_branches, save_branches
from minips.config import EngineConfig
from minips.engine import Engine
from minips.errors import RoomError
from minips.kv_cache import KVPool
from tests.support import prompt_ids, tiny_engine

PAGE = 4
OWN, SHARED, WRITTEN = 24, 12, 8  # tokens: 6 pages of context a worker, 3 of prefix, 2 of output
U = prompt_ids(6, 50)
SAMPLED = SamplingParams(max_tokens=WRITTEN, temperature=0.9, seed=3, return_logits=True)
ANSWER = SamplingParams(max_tokens=5, return_logits=True)


def bounded(pages, kv_dtype="auto"):
    """An engine with so many pages, the null page counted."""
    base = tiny_engine()
    size = Engine(base.model, base.config, settings=EngineConfig(kv_dtype=kv_dtype, max_kv_tokens=16)).kv_bytes_per_token * PAGE
    settings = EngineConfig("cpu", "auto", kv_dtype, PAGE, max_device_kv_bytes=pages * size + 5)
    engine = Engine(base.model, base.config, settings=settings)
    assert engine.pool.num_pages == pages
    return engine


def roomy(kv_dtype="auto"):
    base = tiny_engine()
    return Engine(base.model, base.config, settings=EngineConfig("cpu", "auto", kv_dtype, PAGE, 2000))


def workers_of(engine, count=5):
    """Workers decoded one after the other on one prefix -> the prefix, the workers."""
    prefix = engine.prefill(prompt_ids(SHARED))
    workers = []
    for index in range(count):
        workers += engine.decode(engine.fork(prefix, [prompt_ids(OWN, index + 1)]), SAMPLED)
        assert engine.check()
    return prefix, workers


def synthesized(engine, workers, **options):
    result = Synthesizer(engine, options=options.pop("options", None)).generate_from_caches(workers, U, ANSWER, **options)
    return result.token_ids, result.logits


@pytest.mark.parametrize("kv_dtype", ["auto", "int8", "fp8"])
@pytest.mark.parametrize("consume", [True, False])
def test_branches_that_do_not_fit_give_the_same_tokens(kv_dtype, consume):
    tight, wide = bounded(24, kv_dtype), roomy(kv_dtype)
    found = []
    for engine in (tight, wide):
        prefix, workers = workers_of(engine)
        assert (engine.stats()["parked_pages"] > 0) == (engine is tight)
        answers = [synthesized(engine, workers, consume=False)] if not consume else []
        answers.append(synthesized(engine, workers, consume=consume))
        found.append(([w.output_ids for w in workers], [w.text for w in workers], answers))
        assert engine.check()
        engine.close()
        stats = engine.stats()
        assert stats["used_pages"] == stats["parked_pages"] == 0 and prefix.closed
    assert found[0][:2] == found[1][:2]
    for one, two in zip(found[0][2], found[1][2]):
        assert one[0] == two[0] and torch.allclose(one[1], two[1], atol=1e-4)


def test_what_comes_back_is_what_went_bit_for_bit():
    engine = bounded(24)
    prefix, (first, *others) = workers_of(engine, 2)
    pool = engine.pool

    def content(branch):
        slots = torch.cat([pool.slots(segment.pages, segment.length) for segment in branch.segments])
        return [tensor.flatten(0, 1)[slots] for tensor in (*pool.keys, *pool.values)]

    before, pages = content(first), pool.parked_pages
    assert pages == 0
    big = engine.prefill(prompt_ids(40, 9))
    assert pool.parked_pages > 0 and engine.check()
    assert all(segment.host is not None and not segment.pages for segment in first.segments[1:2]), "the longest unused goes first"
    for tensor in (*pool.keys, *pool.values):
        tensor[[page for page in range(1, pool.num_pages) if pool.ref_count[page] == 0]] = float("nan")
    big.close()
    pool.require(0, "a look", first.segments)
    assert all(torch.equal(old, new) for old, new in zip(before, content(first))) and engine.check()
    assert first.segments[0] is prefix.segments[0] is others[0].segments[0], "the prefix is still shared by identity"
    assert all(pool.ref_count[page] == 3 for page in prefix.segments[0].pages)


def test_a_call_goes_on_with_what_was_parked(tmp_path):
    tight, wide = bounded(24), roomy()
    found = []
    for engine in (tight, wide):
        prefix, workers = workers_of(engine, 4)
        engine.extend([workers[0]], [prompt_ids(3, 70)])
        engine.decode([workers[0]], SAMPLED)
        children = engine.fork(prefix, [prompt_ids(4, 80)])
        engine.encode(children, [prompt_ids(7, 81)])
        save_branches([workers[1]], tmp_path / f"{engine is tight}")
        loaded = load_branches(engine, tmp_path / f"{engine is tight}", force=True)
        engine.decode(loaded, SAMPLED)
        assert engine.check()
        context = Synthesizer(engine, options={"keep_turns": "outputs"}).merge([workers[0], workers[2], children[0]])
        more = engine.prefill(prompt_ids(50, 90))  # parks the merged context
        more.close()
        answer = context.owner.generate(context=context, prompt=U, params=ANSWER)
        found.append([workers[0].output_ids, loaded[0].output_ids, answer.token_ids, loaded[0].logits, answer.logits])
        assert engine.check()
    assert found[0][:3] == found[1][:3]
    assert all(torch.allclose(one, two, atol=1e-4) for one, two in zip(found[0][3:], found[1][3:]))


def test_what_cannot_fit_is_refused_with_numbers_and_nothing_lost():
    engine = bounded(16)
    prefix, workers = workers_of(engine, 6)
    with pytest.raises(RoomError, match=r"merging needs \d+ pages of 4 tokens for what is parked .*, \d+ of 15 can be made free"):
        Synthesizer(engine, options={"keep_turns": "all"}).merge(workers)
    with pytest.raises(RoomError, match=r"needs 16 pages of 4 tokens, 15 of 15 are free; .*raise max_device_kv_bytes"):
        engine.prefill(prompt_ids(61))
    assert engine.check() and not any(worker.closed for worker in workers)
    with Synthesizer(engine).merge(workers[:3]) as context:
        assert context.num_branches == 3
    prefix.close()
    engine.close()
    assert engine.stats()["used_pages"] == 0 and engine.check()


def test_busy_branches_stay_and_parked_ones_can_be_closed():
    engine, params, seen = bounded(16), SamplingParams(max_tokens=12), []
    root, writing = engine.prefill(prompt_ids(20)), engine.prefill(prompt_ids(10, 4))

    def use_the_engine(row, token, text):
        with engine.prefill(prompt_ids(24, 5)) as other:  # parks the root, never the pages of what is being decoded
            seen.append(root.segments[0].host is not None and other.num_cached == 24 and engine.check())
            with pytest.raises(RoomError, match="needs 14 pages"):
                engine.prefill(prompt_ids(56, 6))

    engine.decode([writing], params, on_token=use_the_engine)
    assert seen == [True] * 12
    wide = roomy()
    assert writing.output_ids == wide.decode([wide.prefill(prompt_ids(10, 4))], params)[0].output_ids
    root.close()
    writing.close()
    assert engine.stats()["parked_pages"] == engine.stats()["used_pages"] == 0 and engine.check()


@pytest.mark.parametrize("step", ["_park", "_bring_back"])
def test_a_branch_closed_by_another_thread_while_its_pages_move(monkeypatch, step):
    engine = bounded(16)
    root = engine.prefill(prompt_ids(20))
    (worker,) = engine.fork(root, [[1, 2]])
    shared, closers, errors = root.segments[0], [], []
    if step == "_bring_back":
        engine.prefill(prompt_ids(58, 3)).close()
    plain = getattr(KVPool, step)

    def move(pool, segment, held):
        if segment is shared and not closers:
            closers.append(threading.Thread(target=root.close))
            closers[0].start()
            time.sleep(0.05)
        plain(pool, segment, held)

    monkeypatch.setattr(KVPool, step, move)
    monkeypatch.setattr(threading, "excepthook", errors.append)
    with engine.prefill(prompt_ids(58, 3)) if step == "_park" else engine.decode([worker], ANSWER)[0]:
        closers[0].join(20)
    worker.close()
    assert not errors and engine.check() and engine.stats()["used_pages"] == 0


@pytest.mark.parametrize("failing", range(4))
def test_out_of_memory_while_pages_move_loses_none(monkeypatch, failing):
    engine = bounded(16)
    root = engine.prefill(prompt_ids(20))
    plain = KVPool._parts

    def parts(pool):
        for index, part in enumerate(plain(pool)):
            if index == failing:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
            yield part

    for parked in (False, True):
        if parked:
            engine.prefill(prompt_ids(58, 3)).close()
        with monkeypatch.context() as patch:
            patch.setattr(KVPool, "_parts", parts)
            with pytest.raises(MinipsError, match="out of memory"):
                engine.decode([root], ANSWER) if parked else engine.prefill(prompt_ids(58, 3))
        assert engine.check() and (root.segments[0].host is not None) == parked
    wide = roomy()
    assert engine.decode([root], ANSWER)[0].output_ids == wide.decode([wide.prefill(prompt_ids(20))], ANSWER)[0].output_ids
    root.close()
    assert engine.check() and engine.stats()["used_pages"] == 0


def test_random_use_keeps_the_books():
    rng, engine, wide, pairs = random.Random(5), bounded(20), roomy(), []
    for step in range(60):
        if pairs and rng.random() < 0.3:
            for branch in pairs.pop(rng.randrange(len(pairs))):
                branch.close()
        elif pairs and rng.random() < 0.5:
            pair = rng.choice(pairs)
            if pair[0].num_cached < 40:
                outputs = [e.decode([b], SamplingParams(max_tokens=4))[0].output_ids for e, b in zip((engine, wide), pair)]
                assert outputs[0] == outputs[1]
        elif pairs and rng.random() < 0.5:
            parent, own = rng.choice(pairs), prompt_ids(rng.randint(1, 5), step)
            if parent[0].num_cached < 30:
                pairs.append([e.fork(b, [own])[0] for e, b in zip((engine, wide), parent)])
        else:
            ids = prompt_ids(rng.randint(1, 20), step)
            pairs.append([engine.prefill(ids), wide.prefill(ids)])
        assert engine.check() and engine.stats()["used_pages"] <= 19
    assert pairs


def test_settings_that_make_no_sense_are_refused():
    base = tiny_engine()
    for value in (0, -1, 1.5, True):
        with pytest.raises(MinipsError, match="max_device_kv_bytes is .*, expected a positive integer"):
            EngineConfig(max_device_kv_bytes=value)
    with pytest.raises(MinipsError, match="max_device_kv_bytes is 9999, expected no value beside max_kv_tokens"):
        EngineConfig(max_kv_tokens=100, max_device_kv_bytes=9999)
    with pytest.raises(MinipsError, match="max_device_kv_bytes is 9, expected at least 16384"):
        Engine(base.model, base.config, settings=EngineConfig(max_device_kv_bytes=9))
