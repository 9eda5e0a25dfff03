"""Waves: more workers than fit at their longest are decoded one group after the other, with the same results."""

import pytest
import torch

from minips import MinipsError, SamplingParams, Synthesizer
from minips.errors import RoomError
from tests.support import PREFIX, U, prompt_ids, tiny_engine

pytestmark = pytest.mark.filterwarnings("ignore:merge. branch . is empty")
OWNS = [prompt_ids(3, seed) for seed in range(8)]
STOPS = tuple(range(0, 97, 4))  # a row ends after four tokens on average


def sampled(**changes):
    return SamplingParams(**{"max_tokens": 40, "temperature": 1.0, "seed": 5, "stop_token_ids": STOPS, "logprobs": 2, **changes})


def forks(engine, owns=OWNS):
    with engine.prefill(PREFIX) as prefix:
        return engine.fork(prefix, owns)


def state(branch):
    return (branch.output_ids, branch.finish_reason, branch.token_ids, branch.next_position, branch.segments[-1].stop_token)


def decoded(engine, params, owns=OWNS):
    """Branches, the events of each row, the order in which rows came first, and how many rows were in a batch at most."""
    branches, seen, order, together = forks(engine, owns), {}, [], set()
    free = engine.stats()["free_pages"]

    def note(row, token, text):
        if row not in seen:
            order.append(row)
        seen.setdefault(row, []).append(token)
        together.add(free - engine.stats()["free_pages"])

    assert engine.decode(branches, params, on_token=note) == branches and engine.check()
    return branches, seen, order, max(together)


@pytest.mark.parametrize("kind", ["one for all", "one for each", "greedy"])
def test_waves_give_the_same_results(kind):
    params = {
        "one for all": sampled(),
        "one for each": [sampled(seed=seed, max_tokens=20 + 3 * seed) for seed in range(8)],
        "greedy": sampled(temperature=0.0),
    }[kind]
    wide, tight = tiny_engine(max_kv_tokens=2000), tiny_engine(max_kv_tokens=4 * (3 + 8 + 22))
    one, seen, order, pages = decoded(wide, params)
    many, seen_in_waves, order_in_waves, pages_in_waves = decoded(tight, params)
    assert [state(b) for b in many] == [state(b) for b in one] and seen_in_waves == seen
    assert order_in_waves == order == list(range(8)) and pages_in_waves <= 22 < pages
    for a, b in zip(one, many):
        assert torch.allclose(a.next_logits, b.next_logits, atol=1e-5)
        assert [entry.keys() for entry in a.logprobs] == [entry.keys() for entry in b.logprobs]
    assert len({tuple(b.output_ids) for b in one}) > 4
    answer = [Synthesizer(e).generate_from_caches(b, U, SamplingParams(max_tokens=5)).token_ids for e, b in ((wide, one), (tight, many))]
    assert answer[0] == answer[1]
    assert tight.check() and tight.stats()["used_pages"] == 0


def test_a_whole_run_goes_in_waves():
    results = []
    for tokens in (2000, 4 * (3 + 8 + 22)):
        engine = tiny_engine(max_kv_tokens=tokens)
        result = Synthesizer(engine).run(PREFIX, OWNS, U, worker_params=sampled(), params=SamplingParams(max_tokens=5))
        results.append((result.token_ids, [worker.token_ids for worker in result.workers]))
        assert engine.check() and engine.stats()["used_pages"] == 0
    assert results[0] == results[1]


def test_rows_on_one_context_stay_one_computation():
    engine = tiny_engine(max_kv_tokens=4 * (3 + 2 + 12))
    branches, _, order, _ = decoded(engine, sampled(temperature=0.0), [OWNS[0], OWNS[1], OWNS[0], OWNS[1]])
    assert branches[0].segments[-1] is branches[2].segments[-1] and order == [0, 2, 1, 3]
    assert engine.counters["decoded_tokens"] == len(branches[0].output_ids) + len(branches[1].output_ids)


@pytest.mark.parametrize(
    "params, pages, message",
    [
        (sampled(), 9, "decoding 8 workers needs 80 pages of 4 tokens, 9 of 20 are free"),  # not even one fits
        (sampled(stop_token_ids=()), 22, "decoding 8 workers needs 80 pages of 4 tokens, 22 of 33 are free"),  # none can end early
        ([sampled(stop_token_ids=()), *[sampled()] * 7], 19, "decoding 8 workers needs 80 pages of 4 tokens, 19 of 30 are free"),
    ],
)
def test_what_cannot_fit_in_waves_is_refused_before_the_first_forward(params, pages, message):
    engine = tiny_engine(max_kv_tokens=4 * (3 + 8 + pages))
    branches = forks(engine)
    before, stats = [state(b) for b in branches], engine.stats()
    with pytest.raises(RoomError, match=message):
        engine.decode(branches, params, on_token=lambda *_: pytest.fail("a token was computed"))
    assert [state(b) for b in branches] == before and engine.stats() == stats and engine.check()


def test_a_wave_that_leaves_no_room_changes_nothing():
    engine = tiny_engine(max_kv_tokens=4 * (3 + 8 + 11))
    branches = forks(engine)
    before, free = [state(b) for b in branches], engine.stats()["free_pages"]
    written = {token for b in decoded(tiny_engine(max_kv_tokens=2000), sampled(stop_token_ids=()))[0] for token in b.output_ids}
    long = sampled(stop_token_ids=(min(set(range(97)) - written),))  # may end early, but does not
    with pytest.raises(RoomError, match=r"decoding 8 workers in waves: after 1 of them the next one needs 10 pages of 4 tokens, 1 of 22"):
        engine.decode(branches, long)
    assert [state(b) for b in branches] == before and engine.stats()["free_pages"] == free and engine.check()
    assert len(engine.decode(branches[:1], long)[0].output_ids) == 40


@pytest.mark.parametrize("failing", range(0, 30, 3))
def test_a_callback_that_raises_in_any_wave_changes_nothing(failing):
    engine = tiny_engine(max_kv_tokens=4 * (3 + 8 + 22))
    branches = forks(engine)
    before, free = [state(b) for b in branches], engine.stats()["free_pages"]
    seen = []

    def fail(*event):
        seen.append(event)
        if len(seen) > failing:
            raise KeyError(failing)

    with pytest.raises(KeyError):
        engine.decode(branches, sampled(), on_token=fail)
    assert [state(b) for b in branches] == before and engine.stats()["free_pages"] == free and engine.check()
    one = decoded(tiny_engine(max_kv_tokens=2000), sampled())[0]
    assert [state(b) for b in engine.decode(branches, sampled())] == [state(b) for b in one]


def test_a_run_that_could_never_fit_is_refused_at_once():
    engine = tiny_engine(max_kv_tokens=4 * 20)
    with pytest.raises(MinipsError, match="a run of 8 workers and a synthesizer needs 21 pages of 4 tokens, 20 of 20 are free"):
        Synthesizer(engine).run(PREFIX, OWNS, U, worker_params=sampled(), params=SamplingParams(max_tokens=30))
    assert engine.counters["prefilled_tokens"] == 0
