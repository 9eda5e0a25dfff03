"""Pages, reference counts, segments and handles. FAULTS items 39, 45, 47 and the pool's invariant."""

import gc
import random

import pytest
import torch

from minips.errors import MinipsError
from minips.kv_cache import Branch, KVPool, Segment
from tests.support import tiny_engine


def pool(pages=12, page_size=4, layers=2):
    return KVPool(layers, pages, page_size, 2, 8, torch.float32)


@pytest.mark.parametrize("length, pages, last", [(1, 1, 1), (15, 1, 15), (16, 1, 16), (17, 2, 1), (31, 2, 15), (32, 2, 16), (33, 3, 1)])
def test_page_counts_at_the_borders(length, pages, last):  # FAULTS 39
    cache = pool(page_size=16)
    assert cache.pages_for(length) == pages
    slots = cache.slots(list(range(1, pages + 1)), length)
    assert len(slots) == length and int(slots[-1]) % 16 == last - 1


def test_page_zero_is_never_given_out():
    cache = pool(pages=6)
    assert sorted(cache.allocate(5)) == [1, 2, 3, 4, 5] and cache.num_free == 0
    assert not any(tensor[0].any() for tensor in (*cache.keys, *cache.values))


def test_refusal_names_both_numbers_and_takes_nothing():  # FAULTS 47
    cache = pool(pages=9, page_size=16)
    with pytest.raises(MinipsError, match=r"needs 13 pages of 16 tokens, 8 of 8 are free"):
        cache.allocate(13)
    assert cache.num_free == 8 and cache.check()


def test_runs_are_contiguous_where_they_can_be():
    cache = pool(pages=11)
    a, b, c = cache.allocate(3), cache.allocate(2), cache.allocate(5)
    assert a == [1, 2, 3] and b == [4, 5] and c == [6, 7, 8, 9, 10]
    cache.release(a)
    cache.release(c)
    assert cache.allocate(4) == [6, 7, 8, 9]  # not the hole of three
    assert cache.allocate(3) == [1, 2, 3]
    cache.release(b)
    assert sorted(cache.allocate(3)) == [4, 5, 10]  # only in pieces


def test_counts_never_go_negative():
    cache = pool()
    pages = cache.allocate(2)
    cache.release(pages)
    with pytest.raises(AssertionError):
        cache.release(pages)
    with pytest.raises(AssertionError):
        cache.retain(pages)


def branch_on(cache, tokens):
    segment = Segment(cache.allocate(cache.pages_for(tokens)), tokens, 0)
    branch = Branch(cache, None, [segment], list(range(tokens)), tokens)
    cache.release(segment.pages)
    return branch


def test_a_child_shares_pages_and_they_outlive_the_parent():
    cache = pool()
    parent = branch_on(cache, 7)
    child = parent.child()
    assert cache.ref_count[1] == 2 and cache.check()
    parent.close()
    parent.close()
    assert cache.ref_count[1] == 1 and child.num_cached == 7 and cache.check()
    with child:
        pass
    assert cache.num_free == 11 and cache.check()


def test_a_forgotten_handle_gives_its_pages_back():
    cache = pool()
    branch_on(cache, 7)
    assert cache.num_free == 11 and cache.check()


def test_check_sees_a_lost_page_and_a_wrong_count():
    cache = pool()
    cache.allocate(1)  # held by nobody
    with pytest.raises(AssertionError):
        cache.check()
    cache = pool()
    branch = branch_on(cache, 4)
    cache.ref_count[branch.segments[0].pages[0]] += 1
    with pytest.raises(AssertionError):
        cache.check()
    cache.ref_count[branch.segments[0].pages[0]] -= 1


def test_copy_takes_a_range_of_any_segment():
    cache = pool()
    branch = branch_on(cache, 10)
    for tensor in (*cache.keys, *cache.values):
        tensor.normal_()
    source = branch.segments[0]
    copied = cache.copy(source, 3, 6)
    assert copied.start == 3 and copied.length == 6 and not set(copied.pages) & set(source.pages)
    for tensor in (*cache.keys, *cache.values):
        flat = tensor.flatten(0, 1)
        assert torch.equal(flat[cache.slots(copied.pages, 6)], flat[cache.slots(source.pages, 10)[3:9]])
    cache.release(copied.pages)


def test_random_allocation_keeps_the_books():
    rng, cache, held = random.Random(0), pool(pages=40), []
    for _ in range(2000):
        if held and rng.random() < 0.5:
            cache.release(held.pop(rng.randrange(len(held))))
        else:
            wanted = rng.randint(1, 6)
            if wanted <= cache.num_free:
                held.append(cache.allocate(wanted))
        taken = [page for pages in held for page in pages]
        assert len(set(taken)) == len(taken) and 0 not in taken
        assert cache.num_free == 39 - len(taken)
        assert all(a + b < c for (a, b), (c, _) in zip(cache._free, cache._free[1:]))  # sorted, merged


def test_thousands_of_branches_collected_within_a_change_give_their_pages_back(monkeypatch):
    engine = tiny_engine(max_kv_tokens=20000)
    for _ in range(3000):
        branch = engine.empty_branch()
        branch.adopt(Segment(engine.pool.allocate(1), 1, 0), [1])
        branch.itself = branch  # kept alive until the collector comes
    last, plain = engine.prefill([1, 2]), KVPool._insert

    def insert(pool, first, count):
        monkeypatch.setattr(KVPool, "_insert", plain)
        gc.collect()
        plain(pool, first, count)

    gc.disable()
    try:
        del branch
        monkeypatch.setattr(KVPool, "_insert", insert)
        last.close()
    finally:
        gc.enable()
    assert engine.check() and engine.stats()["used_pages"] == 0


def test_a_branch_of_thousands_of_segments_closes():
    engine = tiny_engine(max_kv_tokens=20000)
    branch = engine.prefill([1])
    for _ in range(3000):
        branch.adopt(Segment(engine.pool.allocate(1), 1, 1), [1])
    assert engine.check() and engine.stats()["used_pages"] == 3001
    branch.close()
    assert engine.check() and engine.stats()["used_pages"] == 0
