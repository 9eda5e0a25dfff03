"""`prefill_batch` and `fork_batch`: the roots and branches of several tasks as ragged batches, equal to one call after the other."""

import pytest
import torch

from minips.errors import MinipsError, RoomError
from tests.support import OWNS, PREFIX, relative_error, tiny_engine

PREFIXES = [PREFIX, PREFIX[:3], [9, 8, 7, 6, 5]]
PROMPTS = [OWNS[:2], [OWNS[1], OWNS[1], OWNS[2]], [[]]]


def test_batches_equal_one_call_after_the_other():
    engine, other = tiny_engine(), tiny_engine()
    roots = engine.prefill_batch(PREFIXES)
    rows, kept = engine.fork_batch(roots, PROMPTS), []
    for root, row, prefix, prompts in zip(roots, rows, PREFIXES, PROMPTS):
        alone = other.prefill(prefix)
        kept += [alone, *other.fork(alone, prompts)]
        for branch, wanted in zip([root, *row], kept[-1 - len(row) :]):
            assert branch.token_ids == wanted.token_ids and branch.next_position == wanted.next_position
            assert (branch.turn, branch.raw, branch.fork_depth) == (wanted.turn, wanted.raw, wanted.fork_depth)
            assert relative_error(branch.next_logits, wanted.next_logits) < 1e-5
    assert engine.stats()["used_pages"] == other.stats()["used_pages"] and engine.check()
    assert engine.counters == other.counters
    assert rows[1][0].segments[-1].pages == rows[1][1].segments[-1].pages  # equal prompts are computed once


def test_the_same_prompt_on_two_prefixes_is_no_twin():
    engine = tiny_engine()
    one, two = engine.fork_batch(engine.prefill_batch(PREFIXES[:2]), [[OWNS[0]], [OWNS[0]]])
    assert not torch.equal(one[0].next_logits, two[0].next_logits) and one[0].segments[-1].pages != two[0].segments[-1].pages


def test_nothing_is_opened_where_one_is_refused():
    engine = tiny_engine(max_kv_tokens=64)
    roots = engine.prefill_batch(PREFIXES)
    before = engine.stats()["used_pages"]
    for call, error, message in (
        (lambda: engine.prefill_batch([PREFIX, []]), MinipsError, "prompt is empty"),
        (lambda: engine.prefill_batch(PREFIX), MinipsError, "prompt is int, expected"),
        (lambda: engine.prefill_batch("a text"), MinipsError, "prefill_batch: prompts must be a list"),
        (lambda: engine.prefill_batch([PREFIX], systems=[None, None]), MinipsError, "1 prompts but 2 systems"),
        (lambda: engine.prefill_batch([PREFIX, [1] * 60]), RoomError, "pages|positions"),
        (lambda: engine.fork_batch(roots, PROMPTS[:2]), MinipsError, "3 prefixes but 2 lists of prompts"),
        (lambda: engine.fork_batch(roots[:2], [OWNS[:1], "x"]), MinipsError, "prompts 1 is str, expected a list"),
        (lambda: engine.fork_batch([roots[0], roots[0]], PROMPTS[:2]), MinipsError, "same branch"),
        (lambda: engine.fork_batch(roots[:2], [OWNS[:1], [[1] * 60]]), RoomError, "pages|positions"),
    ):
        with pytest.raises(error, match=message):
            call()
        assert engine.stats()["used_pages"] == before and engine.check()
    assert engine.prefill_batch([]) == [] and engine.fork_batch([], []) == []
