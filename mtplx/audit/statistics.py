"""Tests of draws against known laws, and what they could have seen.

The draws of an audit come from as many laws as there are prefixes. A probability integral
transform makes them comparable: with the tokens of a law in any fixed order, F the mass before
token x and v a fresh uniform number, u = F(x) + v p(x) is uniform on [0, 1), and independent of
all that went before, if and only if x is a draw from that law (Rosenblatt 1952, "Remarks on a
multivariate transformation"; the v because the law is discrete). The null distributions below
are therefore exact, or those of counts and sums with known moments, whatever the laws are.

The special functions are torch's, so that this needs no library more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

Array = NDArray[np.float64]

LEAST_EXPECTED = 5.0
"""Cells expected less often are pooled, or the chi-square law would not hold."""


# --- Null distributions ---------------------------------------------------------------------------


def _special(function: Any, *arguments: float) -> float:
    return float(function(*(torch.tensor(x, dtype=torch.float64) for x in arguments)))


def _gamma_tails(shape: float, value: float) -> tuple[float, float]:
    """P(X >= value) and P(X <= value) of a gamma variate of scale 1."""
    return (
        _special(torch.special.gammaincc, shape, value),
        _special(torch.special.gammainc, shape, value),
    )


def _skewed_tails(z: float, skew: float) -> tuple[float, float]:
    """The same of mean 0, variance 1 and this skew, at least 0: Pearson's type III."""
    shape = 4 / max(skew, 1e-3) ** 2  # as good as normal where there is no skew
    place = shape + z * math.sqrt(shape)
    if place <= 0:
        return math.erfc(z / math.sqrt(2)) / 2, math.erfc(-z / math.sqrt(2)) / 2
    return _gamma_tails(shape, place)


def pearson_tail(statistic: float, trials: float, probabilities: Array) -> float:
    """P(X >= statistic) of Pearson's chi-square statistic of so many trials in these cells.

    By the gamma variate of its own mean, variance and skew under the multinomial law (Haldane
    1937, "The exact value of the moments of the distribution of chi-squared", Biometrika 29), to
    the first order in 1 / trials. They tend to those of the chi-square variate; but where a few
    cells are rare that one has tails far too light: of 256 trials in 10 cells of 5 and a large
    one, p-values below 1e-5 would come 10 times too often, and come 2 times so by this.
    """
    cells, rarity = len(probabilities), float((1 / probabilities).sum())
    freedom = cells - 1
    variance = 2 * freedom + (rarity - cells**2 - 2 * cells + 2) / trials
    third = 8 * freedom + (22 * rarity - 18 * cells**2 - 36 * cells + 32) / trials
    spread = math.sqrt(variance)
    return _skewed_tails((statistic - freedom) / spread, third / variance**1.5)[0]


def chi_square(counts: Array, expected: Array) -> float:
    """p-value of counts against expectations of the same sum; rare cells are taken together.

    A count where nothing is expected is impossible, and has p-value 0. One cell alone tells
    nothing, and has 1. Two are a binomial count, and their p-value is exact.
    """
    if counts[expected == 0].any():
        return 0.0
    order = expected.argsort(kind="stable")
    counts, expected = counts[order], expected[order]
    # From the rarest on, pool until the pool itself is expected often enough.
    rare = int((expected < LEAST_EXPECTED).sum())
    if rare:
        rare = max(rare, int(np.searchsorted(expected.cumsum(), LEAST_EXPECTED)) + 1)
        counts = np.append(counts[rare:], counts[:rare].sum())
        expected = np.append(expected[rare:], expected[:rare].sum())
    if len(expected) < 2:
        return 1.0
    probabilities = expected / expected.sum()
    if len(expected) == 2:
        trials = int(counts.sum())
        tails = (at_least(int(counts[i]), trials, float(probabilities[i])) for i in (0, 1))
        return min(1.0, 2 * min(tails))
    statistic = float(((counts - expected) ** 2 / expected).sum())
    return pearson_tail(statistic, float(counts.sum()), probabilities)


def uniform_chi_square(u: Array, bins: int) -> float:
    """p-value of numbers that should be uniform on [0, 1), counted in equal bins."""
    return chi_square(histogram(u, bins), np.full(bins, len(u) / bins))


def histogram(u: Array, bins: int) -> Array:
    """Counts in equal bins of [0, 1)."""
    places = (u * bins).astype(np.int64).clip(0, bins - 1)
    return np.bincount(places, minlength=bins).astype(np.float64)


def serial_chi_square(first: Array, second: Array, bins: int) -> float:
    """p-value of pairs that should be uniform on the square: does one tell of the next?

    No number may be in two pairs; the counts would not be independent.
    """
    row, column = (np.minimum((u * bins).astype(np.int64), bins - 1) for u in (first, second))
    counts = np.bincount(row * bins + column, minlength=bins * bins).astype(np.float64)
    return chi_square(counts, np.full(bins * bins, len(first) / bins**2))


def mean(u: Array) -> float:
    """p-value, two-sided, of the mean of numbers that should be uniform on [0, 1).

    Sees a small shift that a count in bins cannot. The sum of a hundred is as good as normal.
    """
    z = float((u - 0.5).sum()) / math.sqrt(len(u) / 12)
    return math.erfc(abs(z) / math.sqrt(2))


MOST_SKEW = 2.0
"""Of a sum, beyond which it is 0 or a rare value, which is no matter of a smooth law."""


def total(values: Array, variances: Array, skews: Array) -> float:
    """p-value, two-sided, of a sum of independent numbers of mean 0 and known moments.

    By the gamma variate that has the sum's variance and skew: normal where there is no skew, and
    still not too eager where some rare values carry the variance. Where fewer than one can be
    expected the sum tells nothing, and has p-value 1; exact counts see to such values.

    Args:
        values: [N].
        variances: of each, [N].
        skews: third central moments of each, [N].
    """
    variance, third = float(variances.sum()), float(skews.sum())
    cube = variance**1.5
    if abs(third) >= MOST_SKEW * cube:  # both are 0 where all laws are certain
        return 1.0
    z = float(values.sum()) / math.sqrt(variance)
    if third < 0:
        z, third = -z, -third
    return min(1.0, 2 * min(_skewed_tails(z, third / cube)))


def upper_tail(u: Array) -> float:
    """p-value, two-sided, of sum(-log(1 - u)), which is a Gamma(n) variate: is 1 too near?

    In the order of probability that is where rare tokens lie, and one drawn far too often moves
    this sum more than any count.
    """
    total = float(-np.log1p(-np.minimum(u, 1 - 2.0**-53)).sum())
    return min(1.0, 2 * min(_gamma_tails(len(u), total)))


def at_least(count: int, trials: int, probability: float) -> float:
    """P(X >= count) of a binomial variate."""
    successes = torch.arange(count, trials + 1).double()
    total = torch.tensor(float(trials), dtype=torch.float64)
    ways = (
        torch.lgamma(total + 1) - torch.lgamma(successes + 1) - torch.lgamma(total - successes + 1)
    )
    odds = torch.xlogy(successes, torch.tensor(probability, dtype=torch.float64))
    odds += torch.xlogy(total - successes, torch.tensor(1 - probability, dtype=torch.float64))
    return min(1.0, float((ways + odds).exp().sum()))


def bernoulli_sum(count: int, probabilities: Array) -> float:
    """p-value, two-sided, of so many successes in trials of these probabilities; exact."""
    mass = _sum_law([np.array([1 - p, p]) for p in probabilities])
    return min(1.0, 2 * float(min(mass[: count + 1].sum(), mass[count:].sum())))


def _sum_law(laws: list[Array]) -> Array:
    """Law of a sum of independent counts; all terms are positive, so its tails keep precision."""
    if not laws:
        return np.ones(1)
    while len(laws) > 1:
        odd = laws[-1:] if len(laws) % 2 else []
        pairs = zip(laws[0::2], laws[1::2], strict=False)
        laws = [np.convolve(a, b) for a, b in pairs] + odd
    return laws[0]


# --- Many tests at once ---------------------------------------------------------------------------


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values adjusted for their number (Holm 1979): significant where still below the level."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    adjusted, floor = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(order):
        floor = max(floor, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = floor
    return adjusted


# --- How large is it, and what would have been seen -----------------------------------------------


class Distance(NamedTuple):
    """A total-variation distance between what was drawn and the law, over some cells.

    Attributes:
        estimate: half the summed absolute differences of frequencies; biased upwards.
        noise: its expectation for draws from the law itself.
        low: and
        high: the ends of an interval that covers the true distance.
    """

    estimate: float
    noise: float
    low: float
    high: float


def total_variation(counts: Array, probabilities: Array, level: float = 0.95) -> Distance:
    """The distance between n counted draws and a law over k cells.

    The interval holds for any n. One draw moves the estimate by at most 1 / n, so it stays within
    sqrt(log(2 / (1 - level)) / 2n) of its expectation (McDiarmid 1989), which itself is at least
    the true distance and at most sqrt((k - 1) / n) / 2 above it. Draws must be independent, those
    of different texts are; of one text's draws that are wrong, one may depend on another.
    """
    n = counts.sum()
    estimate = float(np.abs(counts / n - probabilities).sum() / 2)
    spread = np.sqrt(probabilities * (1 - probabilities) / n)
    noise = float(np.sqrt(2 / np.pi) * spread.sum() / 2)
    bias = math.sqrt((len(counts) - 1) / n) / 2
    reach = math.sqrt(math.log(2 / (1 - level)) / (2 * n))
    return Distance(estimate, noise, max(0.0, estimate - bias - reach), min(1.0, estimate + reach))


def smallest_seen(n: int, cells: int, level: float, power: float = 0.9) -> float:
    """The total-variation distance over equal cells that a chi-square test of n draws must see.

    A distance d, however it is spread over the cells, gives the statistic a noncentrality of at
    least 4 n d^2 (Cauchy-Schwarz); the answer is the d at which the test at this level is
    significant with this probability.
    """
    freedom = cells - 1
    equal = np.full(cells, 1 / cells)
    critical = _root(lambda x: pearson_tail(x, n, equal) - level, 2.0 * freedom + 500)
    noncentrality = _root(
        lambda x: power - _noncentral_tail(critical, freedom, x), 2.0 * critical + 500
    )
    return min(1.0, math.sqrt(noncentrality / (4 * n)))


def _noncentral_tail(critical: float, freedom: int, noncentrality: float) -> float:
    """A noncentral chi-square is a Poisson mixture of central ones."""
    terms = torch.arange(int(noncentrality + 12 * math.sqrt(noncentrality + 1)) + 20).double()
    half = torch.tensor(noncentrality / 2, dtype=torch.float64)
    weights = (torch.xlogy(terms, half) - half - torch.lgamma(terms + 1)).exp()
    tails = torch.special.gammaincc(freedom / 2 + terms, torch.full_like(terms, critical / 2))
    return float((weights * tails).sum())


def _root(falling: Callable[[float], float], high: float) -> float:
    """Where a falling function of [0, high] crosses 0."""
    low = 0.0
    for _ in range(80):
        middle = (low + high) / 2
        if falling(middle) > 0:
            low = middle
        else:
            high = middle
    return (low + high) / 2
