"""The slots that all rows have in common are read once a step: the same results as row by row."""

import pytest
import torch

from minips import SamplingParams, Synthesizer, attention
from minips.attention import AttentionRow, GatherAttention
from minips.config import EngineConfig
from minips.decoding import _in_common, open_writers
from minips.engine import Engine
from minips.kv_storage import as_run, new_store, write
from minips.kv_storage import parts as parts_of
from tests.support import OUTS, OWNS, PREFIX, U, branches_of, prompt_ids, tiny_engine
from tests.test_attention import dense


@pytest.fixture
def calls(monkeypatch):
    """Rows of each pass through one layer in which the common slots were read once."""
    seen, attend = [], GatherAttention._attend_rows

    def counted(self, layer, q):
        if self.common is not None:
            seen.append(len(q))
        return attend(self, layer, q)

    monkeypatch.setattr(GatherAttention, "_attend_rows", counted)
    monkeypatch.setattr(attention, "SHARED_FROM", 1)
    return seen


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.int8, 5e-2)])
@pytest.mark.parametrize("scattered", [True, False])
@pytest.mark.parametrize("heads, kv_heads", [(6, 2), (4, 4), (4, 1)])
def test_rows_with_a_common_part_equal_dense_attention(calls, dtype, tolerance, scattered, heads, kv_heads):
    torch.manual_seed(0)
    shared, own, dim, page = 70, [1, 5, 90], 16, 4
    pages = (shared + sum(own)) // page + 3
    wide = torch.float32 if dtype == torch.int8 else dtype
    keys, values = (new_store((pages, page, kv_heads, dim), dtype, mixed=True) for _ in range(2))
    slots = torch.randperm((pages - 1) * page) + page if scattered else torch.arange(page, pages * page)
    k, v = (torch.randn(len(slots), kv_heads, dim).to(wide) for _ in range(2))
    rows, at, new = [], shared, []
    for count in own:
        mine = torch.cat((torch.arange(shared), torch.arange(at, at + count)))
        rows.append((mine, AttentionRow(slots[mine], shared + count - 1, 1)))
        new.append(at + count - 1)
        at += count
    old = [index for index in range(at) if index not in new]
    write(keys, slots[old], k[old])
    write(values, slots[old], v[old])
    q = torch.randn(len(own), heads, dim).to(wide)
    out = GatherAttention([keys], [values], [row for _, row in rows], shared)(0, q, k[new], v[new])
    expected = torch.cat([dense(q[i : i + 1], k[mine], v[mine]) for i, (mine, _) in enumerate(rows)])
    assert calls == [3] and out.dtype == wide
    assert (out.double() - expected).abs().max() < tolerance * expected.abs().max()


class Rows:
    """Decoding rows of these lengths at scattered slots of an otherwise junk-filled store, the last token of each still to be written."""

    def __init__(self, lengths, dtype, heads=6, kv_heads=2, dim=16, page=4):
        torch.manual_seed(0)
        self.wide = torch.float32 if dtype == torch.int8 else dtype
        stores = [new_store((sum(lengths) // page + 8, page, kv_heads, dim), dtype, mixed=True) for _ in range(2)]
        for store in stores:
            for part in parts_of(store):
                part.fill_(101)
        slots = torch.randperm(sum(lengths)) + page
        self.k, self.v = (torch.randn(len(slots), kv_heads, dim).to(self.wide) for _ in range(2))
        self.whose = torch.arange(len(slots)).split(lengths)
        self.new = [int(mine[-1]) for mine in self.whose]
        old = [index for index in range(len(slots)) if index not in self.new]
        for store, x in zip(stores, (self.k, self.v)):
            write(store, slots[old], x[old])
        self.q = torch.randn(len(lengths), heads, dim).to(self.wide)
        keys, values = stores
        self.attend = GatherAttention([keys], [values], [AttentionRow(slots[mine], len(mine) - 1, 1) for mine in self.whose])

    def check(self, tolerance):
        found = self.attend(0, self.q, self.k[self.new], self.v[self.new])
        expected = torch.cat([dense(self.q[i : i + 1], self.k[mine], self.v[mine]) for i, mine in enumerate(self.whose)])
        assert found.dtype == self.wide and (found.double() - expected).abs().max() < tolerance * expected.abs().max()


@pytest.mark.parametrize("at_once, sizes", [(4096, [3, 2, 2]), (130, [3, 2, 2]), (64, [2, 1, 2, 2])])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.bfloat16, 2e-2), (torch.int8, 5e-2)])
def test_decoding_rows_of_about_one_length_are_attended_at_once(monkeypatch, at_once, sizes, dtype, tolerance):
    monkeypatch.setattr(attention, "ROWS_AT_ONCE", at_once)
    rows = Rows([40, 33, 40, 200, 190, 7, 7], dtype)
    assert [group.last - group.first for group in rows.attend.groups] == sizes
    rows.check(tolerance)


@pytest.mark.parametrize("length", [20, 21])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.bfloat16, 2e-2), (torch.int8, 5e-2)])
@pytest.mark.parametrize("alone", [True, False])
def test_a_long_decoding_row_is_attended_in_halves(monkeypatch, length, dtype, tolerance, alone):
    monkeypatch.setattr(attention, "SPLIT_FROM", 20)
    rows = Rows([length] if alone else [3, length, 4], dtype)
    assert [group.halves for group in rows.attend.groups] == ([True] if alone else [False, True, False])
    rows.check(tolerance)


def test_a_run_of_slots_is_read_as_a_view():
    assert as_run(torch.tensor([4, 5, 6])) == slice(4, 7) and as_run(torch.tensor([9])) == slice(9, 10)
    for slots in ([4, 6, 5, 7], [4, 5, 7], [6, 5]):
        assert torch.equal(as_run(torch.tensor(slots)), torch.tensor(slots))


def run(engine, params):
    with engine.prefill(PREFIX) as prefix:
        branches = engine.fork(prefix, OWNS)
    engine.decode(branches, params)
    engine.extend(branches, [prompt_ids(4, 60 + at) for at in range(3)])
    engine.decode(branches, params)
    found = [(list(branch.output_ids), branch.next_logits) for branch in branches]
    found += [(engine.decode([branch], params)[0].output_ids, branch.next_logits) for branch in branches[:1]]
    assert engine.check()
    return found


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_workers_decode_the_same(calls, monkeypatch, kv_dtype):
    def engine():
        base = tiny_engine()
        return Engine(base.model, base.config, settings=EngineConfig("cpu", "auto", kv_dtype, 4, 1200))

    params = SamplingParams(max_tokens=9, temperature=0.8, seed=4, ignore_eos=True)
    together = run(engine(), params)
    assert calls and set(calls) == {3}
    monkeypatch.setattr(attention, "SHARED_FROM", 1 << 60)
    count = len(calls)
    apart = run(engine(), params)
    assert len(calls) == count and [ids for ids, _ in together] == [ids for ids, _ in apart]
    assert all(torch.allclose(one, two, atol=1e-4) for (_, one), (_, two) in zip(together, apart))


def test_prompts_to_one_merged_context_share_it(calls, monkeypatch):
    def answers(engine):
        synthesizer = Synthesizer(engine)
        with synthesizer.merge(branches_of(engine)) as context:
            prompts = [U, prompt_ids(3, 80)]
            return [result.token_ids for result in synthesizer.generate_batch([context] * 2, prompts, SamplingParams(max_tokens=7))]

    together = answers(tiny_engine())
    assert set(calls) == {2}
    monkeypatch.setattr(attention, "SHARED_FROM", 1 << 60)
    assert answers(tiny_engine()) == together


def test_what_counts_as_common(calls):
    engine = tiny_engine()
    one, two = engine.prefill(PREFIX), engine.prefill(PREFIX)  # equal tokens on pages of their own
    writers = open_writers([one, two], [4, 4], "output", "a test")
    assert _in_common(writers) == 0 and _in_common(writers[:1]) == 0
    for writer in writers:
        writer.abort()
    forked = [*engine.fork(one, [OWNS[0], OUTS[0]]), one.child()]
    writers = open_writers(forked, [4] * 3, "output", "a test")
    assert _in_common(writers) == _in_common(writers[:2]) == len(PREFIX)
    for writer in writers:
        writer.abort()
    hidden = open_writers([one.child(), one.child()], [1, 1], "context", "a test", hide=1)
    assert _in_common(hidden) == len(PREFIX) - 1
    for writer in hidden:
        writer.abort()
    engine.decode([one, two], SamplingParams(max_tokens=3, ignore_eos=True))
    assert not calls and engine.check()
