"""Several prompts as rows of one batch equal the same prompts one by one; branches reweighted in the attention."""

import pytest
import torch

from minips import Engine, EngineConfig, MinipsError, SamplingParams, Synthesizer, answering
from minips.errors import RoomError
from minips.attention import AttentionRow, GatherAttention, Reweight

from .support import OUTS, OWNS, U, branches_of, prompt_ids, relative_error, tiny_engine

PROMPTS = [prompt_ids(9, 60), prompt_ids(3, 61), prompt_ids(17, 62)]
TARGETS = [prompt_ids(4, 70), prompt_ids(1, 71), prompt_ids(6, 72)]
SAMPLED = SamplingParams(max_tokens=9, temperature=0.8, seed=5)


def test_prompts_in_a_batch_equal_prompts_alone():
    engine = tiny_engine(prefill_chunk=7)
    greedy = SamplingParams(max_tokens=9, logprobs=2)
    together = engine.generate_batch(PROMPTS, greedy, targets=TARGETS)
    for prompt, target, result in zip(PROMPTS, TARGETS, together):
        alone = engine.generate(prompt, greedy)
        assert (alone.token_ids, alone.finish_reason) == (result.token_ids, result.finish_reason)
        assert [list(entry) for entry in alone.logprobs] == [list(entry) for entry in result.logprobs]
        scores = engine.score(prompt, target)
        assert scores.logprobs == pytest.approx(result.scores.logprobs, abs=1e-5) and scores.greedy == result.scores.greedy
        assert result.prefilled_tokens == len(prompt) and result.reused_tokens == 0 and result.ttft > 0
    assert engine.stats()["used_pages"] == 0 and engine.check()


def test_scoring_leaves_the_answer_and_its_randomness_as_they_are():
    engine = tiny_engine()
    plain, scored = (engine.generate_batch(PROMPTS, SAMPLED, targets=targets) for targets in (None, TARGETS))
    assert [r.token_ids for r in plain] == [r.token_ids for r in scored]
    assert plain[0].scores is None and scored[0].scores.mean_nll > 0
    each = [SamplingParams(max_tokens=n, return_logits=True) for n in (1, 5, 3)]
    found = engine.generate_batch(PROMPTS, each)
    for prompt, params, result in zip(PROMPTS, each, found):
        alone = engine.generate(prompt, params)
        assert result.logits.shape == alone.logits.shape and relative_error(result.logits, alone.logits) < 1e-5


def test_contexts_in_a_batch_equal_contexts_alone():
    engine = tiny_engine()
    synthesizer = Synthesizer(engine)
    branches = branches_of(engine)
    parts = [branches, branches[:1], branches[1:]]
    contexts = [synthesizer.merge(part, consume=False) for part in parts]
    greedy = SamplingParams(max_tokens=8)
    together = synthesizer.generate_batch(contexts, PROMPTS, greedy, targets=TARGETS)
    for context, prompt, target, result in zip(contexts, PROMPTS, TARGETS, together):
        alone = synthesizer.generate(context=context, prompt=prompt, params=greedy)
        assert alone.token_ids == result.token_ids and result.branch_tokens == context.branch_tokens
        assert (alone.reused_tokens, alone.prefilled_tokens) == (result.reused_tokens, result.prefilled_tokens)
        assert synthesizer.score(context, prompt, target).logprobs == pytest.approx(result.scores.logprobs, abs=1e-5)
    assert not any(context.closed for context in contexts)
    for item in (*contexts, *branches):
        item.close()
    assert engine.stats()["used_pages"] == 0 and engine.check()


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda e: e.generate_batch([PROMPTS[0], []]), "prompt is empty"),
        (lambda e: e.generate_batch(PROMPTS, targets=[[1]]), "3 prompts but 1 targets"),
        (lambda e: e.generate_batch(PROMPTS, targets=[[1], [], [2]]), "the target is empty"),
        (lambda e: e.generate_batch(PROMPTS, [SAMPLED]), "3 branches but 1 params"),
        (lambda e: e.generate_batch([PROMPTS[0]], targets=[[97]]), "97 is outside"),
        (lambda e: e.generate_batch([PROMPTS[0]], targets=5), "1 prompts but int targets"),
        (lambda e: e.generate_batch("abc"), "prompts is str, expected a list"),
        (lambda e: e.generate_batch(None), "prompts is NoneType, expected a list"),
        (lambda e: e.generate_batch([PROMPTS[0], [5]], [SAMPLED, SamplingParams(stop=["x"])]), "stop strings need a tokenizer"),
        (lambda e: Synthesizer(e).generate_batch(5, [U]), "contexts is int, expected a list"),
        (lambda e: Synthesizer(e).generate_batch([5], [U]), "context is int, expected what Synthesizer.merge returned"),
        (lambda e: Synthesizer(e).score("c", U, [1]), "score: context is str, expected what"),
        (lambda e: Synthesizer(e).generate_batch([], [U]), "0 contexts but 1 prompts"),
    ],
)
def test_refused_batches_leave_no_page_behind(call, message):
    engine = tiny_engine()
    with pytest.raises(MinipsError, match=message):
        call(engine)
    assert engine.counters["prefilled_tokens"] == engine.counters["decoded_tokens"] == 0  # refused before any work
    assert engine.stats()["used_pages"] == 0 and engine.stats()["open_branches"] == 0 and engine.check()
    assert engine.generate_batch([]) == []


def test_batches_that_do_not_fit_at_once_are_answered_in_waves():
    wide, tight = tiny_engine(), tiny_engine(max_kv_tokens=120)
    prompts = [prompt_ids(5 + 7 * at, at) for at in range(6)]
    params = [SamplingParams(max_tokens=30, temperature=0.8, seed=at) for at in range(6)]
    targets, most = [[7, 8 + at] for at in range(6)], []
    feeding = tight.pool.allocate
    tight.pool.allocate = lambda *a: (most.append(tight.stats()["used_pages"]), feeding(*a))[1]
    one, many = (engine.generate_batch(prompts, params, targets=targets) for engine in (wide, tight))
    assert [r.token_ids for r in one] == [r.token_ids for r in many] and [r.text for r in one] == [r.text for r in many]
    assert all(abs(a.scores.mean_nll - b.scores.mean_nll) < 1e-5 for a, b in zip(one, many))
    assert sorted(r.ttft for r in many) == [r.ttft for r in many] and max(most) <= 30  # pages of four tokens; all at once need 93
    before = dict(tight.counters)
    with pytest.raises(RoomError, match="the longest of 2 prompts and its answer needs 40 pages of 4 tokens, 30 of 30 are free"):
        tight.generate_batch([prompt_ids(5), prompt_ids(100)], SamplingParams(max_tokens=60))
    assert tight.counters == before  # nothing was computed
    synthesizer = Synthesizer(tight)
    contexts = [synthesizer.merge(branches_of(tight, [OWNS[at]], [OUTS[at]])) for at in range(2)]
    used = tight.stats()["used_pages"]
    answers = synthesizer.generate_batch(contexts, [U, U], SamplingParams(max_tokens=40))
    assert [len(answer.token_ids) for answer in answers] == [40, 40] and tight.stats()["used_pages"] == used and tight.check()


def test_targets_count_when_waves_are_chosen():
    engine = tiny_engine(max_kv_tokens=120)
    prompts, targets = [prompt_ids(8, at) for at in range(6)], [prompt_ids(50, at) for at in range(6)]
    results = engine.generate_batch(prompts, SamplingParams(max_tokens=1), targets=targets)
    alone = [engine.generate_batch([p], SamplingParams(max_tokens=1), targets=[t])[0] for p, t in zip(prompts, targets)]
    assert all(abs(a.scores.mean_nll - b.scores.mean_nll) < 1e-5 for a, b in zip(results, alone)) and len(results) == 6
    before = dict(engine.counters)
    with pytest.raises(RoomError, match="needs 35 pages"):
        engine.generate_batch([prompt_ids(8)], SamplingParams(max_tokens=1), targets=[prompt_ids(130)])
    assert engine.counters == before and engine.check()


def test_an_engine_closed_between_waves_is_no_empty_context(monkeypatch):
    engine = tiny_engine(max_kv_tokens=120)
    synthesizer = Synthesizer(engine)
    contexts = [synthesizer.merge(branches_of(engine, [OWNS[at]], [OUTS[at]])) for at in range(2)]
    plain, calls = answering._admit, []

    def admit(*arguments):
        calls.append(1)
        if len(calls) == 2:
            engine.close()
        return plain(*arguments)

    monkeypatch.setattr(answering, "_admit", admit)
    with pytest.raises(MinipsError, match="closed"):
        synthesizer.generate_batch(contexts, [U, U], SamplingParams(max_tokens=60))
    assert engine.check() and engine.stats()["used_pages"] == 0


def test_waves_make_room_for_their_own_contexts_only():
    base = tiny_engine()
    engine = Engine(base.model, base.config, settings=EngineConfig("cpu", "auto", "auto", 4, max_device_kv_bytes=24 * 4 * base.kv_bytes_per_token))
    synthesizer, contexts = Synthesizer(engine), []
    for at in range(5):
        contexts.append(synthesizer.merge(branches_of(engine, [OWNS[0]], [prompt_ids(12, at)])))
    params = SamplingParams(max_tokens=9)
    alone = [synthesizer.generate(context=context, prompt=U, params=params).token_ids for context in contexts]
    assert [result.token_ids for result in synthesizer.generate_batch(contexts, [U] * 5, params)] == alone and engine.check()


# Reweighted attention


def test_reweighting_equals_two_attentions_joined_by_their_sums():
    torch.manual_seed(0)
    heads, kv_heads, dim, past, count, first, last = 6, 2, 16, 20, 3, 5, 14
    keys, values = torch.randn(past + count, kv_heads, dim), torch.randn(past + count, kv_heads, dim)
    q, temperature, scale = torch.randn(count, heads, dim), 0.7, 0.6
    pool_k, pool_v = ([torch.zeros(12, 2, kv_heads, dim)] for _ in range(2))
    slots = torch.arange(past + count).flip(0) + 1
    for pool, rows in ((pool_k, keys), (pool_v, values)):
        pool[0].flatten(0, 1)[slots] = rows
    row = AttentionRow(slots, past, count, None, Reweight(first, last, temperature, scale))
    found = GatherAttention(pool_k, pool_v, [row])(0, q, keys[past:], values[past:])
    for at in range(count):
        for head in range(heads):
            k, v = keys[: past + at + 1, head // 3].double(), values[: past + at + 1, head // 3].double()
            scores = k @ q[at, head].double() / dim**0.5
            ours = torch.zeros(len(k), dtype=torch.bool)
            ours[first:last] = True
            branch, rest = scores[ours] / temperature, scores[~ours]
            share = torch.sigmoid(scale * branch.logsumexp(0) - rest.logsumexp(0))
            expected = share * branch.softmax(0) @ v[ours] + (1 - share) * rest.softmax(0) @ v[~ours]
            assert torch.allclose(found[at, head].double(), expected, atol=1e-6)


def test_branch_temperature_and_scale_act_on_the_branches_only():
    engine = tiny_engine()
    branches = branches_of(engine)

    def logits(**options):
        synthesizer = Synthesizer(engine, options=options)
        with synthesizer.merge(branches, consume=False) as context:
            return synthesizer.generate(context=context, prompt=U, params=SamplingParams(max_tokens=4, return_logits=True)).logits

    plain = logits()
    assert relative_error(logits(branch_temperature=1.0000001), plain) < 1e-5
    assert relative_error(logits(branch_temperature=0.5)[: len(U)], plain[: len(U)]) > 1e-3
    assert relative_error(logits(branch_scale=0.5)[: len(U)], plain[: len(U)]) > 1e-3
    for name, value in (("branch_temperature", 0), ("branch_scale", -1), ("branch_scale", "much")):
        with pytest.raises(MinipsError, match=name):
            Synthesizer(engine, options={name: value})
