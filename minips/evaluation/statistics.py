"""Means with 95% intervals, and paired differences between methods that answered the same rows.

Values that are all 0 or 1 (right or wrong) get intervals that stay honest at few rows and where all rows agree: Wilson's for
a rate, Bonett and Price's for the difference of two paired rates. All other values get a percentile bootstrap. Where that would
claim too much (fewer than 10 values, or all of them equal), there is no interval, and low and high are None.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

RESAMPLES = 10_000
LEAST = 10  # values for a bootstrap: of three differences all are of one sign in a quarter of all cases, by chance
Z = 1.959963984540054  # of 95%, two-sided
_BLOCK = 4_000_000  # resampled values held at a time


@dataclass(frozen=True)
class Estimate:
    """A mean of n values with its 95% interval, low to high. kind: wilson, bonett-price, bootstrap, or none (no interval)."""

    mean: float
    low: float | None
    high: float | None
    n: int
    kind: str


@dataclass(frozen=True)
class Difference(Estimate):
    """A mean of n paired differences, value minus baseline. higher, lower: rows where the value is above, below the baseline's."""

    higher: int
    lower: int


def estimate(values: Sequence[float], *, seed: int = 0) -> Estimate | None:
    """The mean of values (floats, one a row) with its interval; None of no values."""
    data = _checked(values)
    if not len(data):
        return None
    if _binary(data):
        return Estimate(float(data.mean()), *wilson(int(data.sum()), len(data)), len(data), "wilson")
    return Estimate(float(data.mean()), *_spread(data, seed))


def difference(values: Sequence[float], baseline: Sequence[float], *, seed: int = 0) -> Difference | None:
    """The mean of values[i] - baseline[i], where i counts the rows that both have answered; None of no rows."""
    if len(values) != len(baseline):
        raise ValueError(f"{len(values)} values and {len(baseline)} of the baseline are not paired")
    ours, theirs = _checked(values), _checked(baseline)
    if not len(ours):
        return None
    gaps = ours - theirs
    higher, lower = int((gaps > 0).sum()), int((gaps < 0).sum())
    if _binary(ours) and _binary(theirs):
        low, high = bonett_price(higher, lower, len(gaps))
        return Difference(float(gaps.mean()), low, high, len(gaps), "bonett-price", higher, lower)
    return Difference(float(gaps.mean()), *_spread(gaps, seed), higher, lower)


def wilson(right: int, n: int) -> tuple[float, float]:
    """Wilson's score interval of a rate, `right` of n."""
    rate, scale = right / n, 1 + Z * Z / n
    middle = (rate + Z * Z / (2 * n)) / scale
    half = Z * math.sqrt(rate * (1 - rate) / n + Z * Z / (4 * n * n)) / scale
    return 0.0 if right == 0 else max(0.0, middle - half), 1.0 if right == n else min(1.0, middle + half)


def bonett_price(higher: int, lower: int, n: int) -> tuple[float, float]:
    """Interval of the difference of two paired rates of n rows: `higher` right by the first alone, `lower` by the second alone.

    Wald's with one row added to either count (Bonett and Price 2012): it has a width also where the two never differ.
    """
    up, down = (higher + 1) / (n + 2), (lower + 1) / (n + 2)
    half = Z * math.sqrt((up + down - (up - down) ** 2) / (n + 2))
    return max(-1.0, up - down - half), min(1.0, up - down + half)


def bootstrap(values: Sequence[float], *, seed: int = 0, resamples: int = RESAMPLES) -> tuple[float, float]:
    """The percentile bootstrap's 95% interval of the mean: seeded, so the same values always give the same interval."""
    data = _checked(values)
    block = max(1, _BLOCK // len(data))
    means = [_counts(len(data), min(block, resamples - start), (seed, start)) @ data for start in range(0, resamples, block)]
    low, high = np.percentile(np.concatenate(means) / len(data), [2.5, 97.5])
    return float(low), float(high)


@lru_cache(maxsize=2)  # the methods of a task have the same number of rows
def _counts(n: int, resamples: int, seed: tuple[int, int]) -> np.ndarray:
    """How often each of n rows is drawn, in each resample; [resamples, n]."""
    drawn = np.random.default_rng(seed).integers(0, n, size=(resamples, n))
    drawn += np.arange(resamples)[:, None] * n
    return np.bincount(drawn.ravel(), minlength=resamples * n).reshape(resamples, n).astype(np.float64)


def _spread(data: np.ndarray, seed: int) -> tuple[float | None, float | None, int, str]:
    """low, high, n and kind of values that are not all 0 or 1."""
    if len(data) < LEAST or np.ptp(data) <= 1e-12 * max(1.0, float(np.abs(data).max())):  # all equal but for rounding
        return None, None, len(data), "none"
    return *bootstrap(data, seed=seed), len(data), "bootstrap"


def _checked(values: Sequence[float]) -> np.ndarray:
    data = np.asarray(values, dtype=np.float64)
    if not np.isfinite(data).all():
        raise ValueError("a value is not a finite number")
    return data


def _binary(data: np.ndarray) -> bool:
    return bool(np.isin(data, (0.0, 1.0)).all())
