"""Filters, streams, penalties, log-probabilities. FAULTS items 60 to 67."""

import random
from collections import Counter

import pytest
import torch

from minips.config import SamplingParams
from minips.errors import MinipsError
from minips.sampling import RowSampler, filter_probabilities, sample, token_logprobs

P = [0.5, 0.25, 0.15, 0.1]


def sampler(row=None, prompt=(), vocab=None, valid=None, **params):
    vocab = vocab or 4
    return RowSampler(SamplingParams(**params), row, prompt, vocab, valid or vocab)


def reference_filter(probabilities, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """Plain Python on a dict of id -> probability."""
    warm = {i: p ** (1 / temperature) for i, p in enumerate(probabilities)}
    total = sum(warm.values())
    left = sorted(((p / total, i) for i, p in warm.items()), reverse=True)
    if top_k:
        left = left[:top_k]
        total = sum(p for p, _ in left)
        left = [(p / total, i) for p, i in left]
    kept, mass = [], 0.0
    for p, i in left:
        if kept and top_p < 1 and mass >= top_p - 1e-7:
            break
        kept.append((p, i))
        mass += p
    kept = [(p, i) for p, i in kept if p >= min_p * kept[0][0] * (1 - 1e-6)]
    total = sum(p for p, _ in kept)
    return {i: p / total for p, i in kept}


def kept_ids(probabilities, **params):
    params = {"temperature": 1.0, **params}
    ids, left = filter_probabilities(torch.tensor(probabilities).log(), SamplingParams(**params))
    return set(left.nonzero().flatten().tolist()) if ids is None else set(ids.tolist())


@pytest.mark.parametrize("temperature", [0, 1e-7])
def test_temperature_zero_is_greedy_for_every_seed(temperature):  # FAULTS 60
    for seed in range(20):
        assert sample(torch.tensor([[1.0, 2.0]]), [sampler(vocab=2, temperature=temperature, seed=seed)]) == [1]


@pytest.mark.parametrize(
    "params, message",
    [
        ({"temperature": -1}, "temperature is -1"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_p": 1.1}, "top_p is 1.1"),
        ({"top_k": -1}, "top_k is -1"),
        ({"min_p": 2}, "min_p is 2"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0"),
        ({"repetition_penalty": -1.0}, "repetition_penalty is -1.0"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"seed": -1}, "seed is -1"),
        ({"stop": [""]}, r"stop is \('',\)"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ],
)
def test_bad_parameters_name_the_field_and_the_value(params, message):  # FAULTS 60, 62, 65
    with pytest.raises(MinipsError, match=message):
        SamplingParams(**params)


def test_a_greedy_row_among_sampled_ones():  # FAULTS 61
    torch.manual_seed(0)
    logits = torch.randn(3, 50)
    settings = [dict(temperature=0.0), dict(temperature=0.7, top_p=0.9), dict(temperature=1.3)]
    mixed = sample(logits, [sampler(vocab=50, seed=i, **s) for i, s in enumerate(settings)])
    alone = [sample(logits[i : i + 1], [sampler(vocab=50, seed=i, **s)])[0] for i, s in enumerate(settings)]
    assert mixed == alone and mixed[0] == int(logits[0].argmax())


@pytest.mark.parametrize("top_p, count", [(0, 1), (0.4, 1), (0.5, 1), (0.7, 2), (0.75, 2), (0.8, 3), (0.95, 4), (1, 4)])
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p, count):  # FAULTS 62
    order = [2, 0, 3, 1]  # a scrambled vocabulary
    scrambled = [P[i] for i in order]
    assert kept_ids(scrambled, top_p=top_p) == {order.index(i) for i in range(count)}


@pytest.mark.parametrize("top_k, count", [(0, 4), (None, 4), (1, 1), (2, 2), (10, 4)])
def test_top_k(top_k, count):  # FAULTS 62
    assert kept_ids(P, top_k=top_k) == set(range(count))


def test_temperature_comes_first():  # FAULTS 63
    assert kept_ids(P, temperature=2.0, top_p=0.7) == {0, 1, 2}
    assert kept_ids(P, temperature=2.0, min_p=0.4) == {0, 1, 2, 3}
    _, warm = filter_probabilities(torch.tensor(P).log(), SamplingParams(temperature=2.0))
    assert warm.tolist() == pytest.approx([0.37009, 0.261693, 0.202707, 0.165509], abs=1e-6)
    assert kept_ids(P, min_p=0.25) == {0, 1, 2} and kept_ids(P, min_p=0.4) == {0, 1}


def test_a_seeded_row_does_not_see_its_neighbours():  # FAULTS 64
    torch.manual_seed(1)
    steps = torch.randn(10, 5, 60)

    def draw(rows, at):
        return [sample(step[: len(rows)][torch.arange(len(rows))], rows)[at] for step in steps]

    def a():
        return sampler(vocab=60, temperature=1.0, seed=42)

    other = [sampler(vocab=60, temperature=1.0, seed=s) for s in (None, 7, 8, 9)]
    alone = draw([a()], 0)
    assert alone == draw([a(), other[0]], 0) == draw([a(), other[1]], 0) == draw([a(), *other], 0)
    first, again = a(), a()
    assert [first.uniform() for _ in range(5)] == [again.uniform() for _ in range(5)]
    swapped = steps.flip(1)
    assert [sample(step, [*other, a_])[4] for step, a_ in zip(swapped, [a()])] == alone[:1]


def test_rows_of_one_object_draw_from_seed_and_row():  # FAULTS 64
    numbers = {row: sampler(row, temperature=1.0, seed=3).uniform() for row in (None, 0, 1, 2, 3)}
    assert len(set(numbers.values())) == 5
    assert numbers[2] == sampler(2, temperature=1.0, seed=3).uniform()
    assert sampler(0, temperature=1.0, seed=4).uniform() not in numbers.values()
    open_seed = sampler(temperature=1.0)
    assert open_seed.uniform() == sampler(temperature=1.0, seed=open_seed.seed).uniform()


def test_every_bit_of_a_seed_counts():  # FAULTS 64
    seeds = (1, 1 + 2**32, 1 + 2**40, 2**62)
    assert len({sampler(temperature=1.0, seed=seed).uniform() for seed in seeds}) == len(seeds)


def test_batches_of_any_order_and_size_draw_the_same():  # FAULTS 64
    steps = torch.randn(6, 5, 60, generator=torch.Generator().manual_seed(2))
    settings = [{}, {"top_p": 0.8}, {"top_k": 5}, {"min_p": 0.1}, {"temperature": 0.0}]

    def run(order):
        rows = {i: sampler(i, vocab=60, seed=9, **{"temperature": 1.0, **settings[i]}) for i in order}
        found = [sample(step[list(order)], list(rows.values())) for step in steps]
        return {i: [tokens[at] for tokens in found] for at, i in enumerate(order)}

    full = run(range(5))
    for order in [(4, 3, 2, 1, 0), (2, 0, 4), (1,), (3, 1)]:
        assert run(order) == {i: full[i] for i in order}


def test_repetition_penalty_lowers_negative_logits_too():  # FAULTS 65
    row = sampler(vocab=3, prompt=[0, 1], repetition_penalty=1.5)
    assert row.penalise(torch.tensor([2.0, -2.0, 0.5])).tolist() == pytest.approx([4 / 3, -3.0, 0.5])
    logits = torch.randn(7)
    assert sampler(vocab=7, prompt=[0, 1]).penalise(logits) is logits
    row = sampler(vocab=2, repetition_penalty=2.0)  # what was sampled counts too
    assert [sample(torch.tensor([[3.0, 2.0]]), [row])[0] for _ in range(2)] == [0, 1]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_logits_name_row_and_step(bad):  # FAULTS 66
    rows = [sampler(vocab=8, temperature=t, seed=1) for t in (0.0, 0.0, 1.0)]
    good, broken = torch.randn(3, 8), torch.randn(3, 8)
    broken[1, 3] = bad
    sample(good, rows)
    with pytest.raises(MinipsError, match="row 1, step 1: the logits are not finite"):
        sample(broken, rows)
    assert [row.step for row in rows] == [1, 1, 1]
    untouched = sampler(vocab=8, temperature=1.0, seed=1)
    untouched.uniform()
    assert rows[2].uniform() == untouched.uniform()
    with pytest.raises(MinipsError):
        sample(torch.full((1, 8), -float("inf")), [sampler(vocab=8)])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_padding_does_not_hide_a_row_without_finite_logits(temperature):  # FAULTS 27, 66
    logits = torch.full((1, 8), -float("inf"))
    logits[0, 6] = 1.0
    with pytest.raises(MinipsError, match="row 0, step 0"):
        sample(logits, [sampler(vocab=8, valid=4, temperature=temperature, seed=1)])


def test_huge_logits_over_a_small_temperature_stay_finite():
    logits = torch.randn(1, 100, generator=torch.Generator().manual_seed(0)) * 1e34
    assert sample(logits, [sampler(vocab=100, temperature=1.1e-5, seed=1)]) == [int(logits.argmax())]


def test_padded_ids_are_never_chosen():  # FAULTS 27
    logits = torch.zeros(2, 100)
    logits[:, 90:] = 50.0
    rows = [sampler(vocab=100, valid=90), sampler(vocab=100, valid=90, temperature=1.0, seed=0)]
    for _ in range(50):
        assert max(sample(logits, rows)) < 90


def test_logprobs_are_raw_and_hold_the_chosen_token():  # FAULTS 67
    logits = torch.tensor([2.0, 1.0, 0.0])
    found = token_logprobs(logits, 2, 1)
    assert list(found) == [0, 2]
    assert list(found.values()) == pytest.approx([-0.407606, -2.407606], abs=1e-6)
    assert list(token_logprobs(logits, 1, 10).values()) == pytest.approx([-0.407606, -1.407606, -2.407606], abs=1e-6)


def test_filters_equal_the_reference_on_random_distributions():
    rng = random.Random(0)
    for trial in range(150):
        size = rng.choice([5, 40, 3000])
        logits = torch.randn(size, generator=torch.Generator().manual_seed(trial)) * rng.choice([0.5, 2, 5])
        settings = {
            "temperature": rng.choice([0.5, 1.0, 2.0]), "top_k": rng.choice([0, 1, 3, 50]),
            "top_p": rng.choice([1.0, 0.9, 0.5, 0.1]), "min_p": rng.choice([0.0, 0.0, 0.05, 0.3]),
        }  # fmt: skip
        ids, left = filter_probabilities(logits, SamplingParams(**settings))
        ids = range(size) if ids is None else ids.tolist()
        expected = reference_filter(torch.softmax(logits.double(), -1).tolist(), **settings)
        found = {i: p for i, p in zip(ids, (left / left.sum()).tolist()) if p > 0}
        assert set(found) == set(expected), settings
        assert all(found[i] == pytest.approx(p, abs=1e-5) for i, p in expected.items())


@pytest.mark.parametrize("settings", [{}, {"top_p": 0.8}, {"top_k": 3, "temperature": 1.5}, {"min_p": 0.3}])
def test_frequencies_follow_the_distribution(settings):
    probabilities = [0.05, 0.4, 0.2, 0.05, 0.3]
    expected = reference_filter(probabilities, **settings)
    row = sampler(vocab=5, seed=5, **{"temperature": 1.0, **settings})
    logits, draws = torch.tensor([probabilities]).log(), 4000
    counts = Counter(sample(logits, [row])[0] for _ in range(draws))
    assert set(counts) <= set(expected)
    chi_square = sum((counts[i] - draws * p) ** 2 / (draws * p) for i, p in expected.items())
    assert chi_square < 25  # 4 degrees of freedom: p below 1e-4
