"""Null distributions, corrections and effect sizes, against scipy and by simulation."""

import numpy as np
import pytest
from scipy import stats

from mtplx.audit import statistics
from mtplx.audit.law import moments

RNG = np.random.default_rng


@pytest.mark.parametrize("cells", [3, 20, 25, 300])
@pytest.mark.parametrize("quantile", [0.9, 1e-3, 1e-9])
def test_of_many_draws_the_tail_is_that_of_chi_square(cells, quantile):
    value = stats.chi2.isf(quantile, cells - 1)
    equal = np.full(cells, 1 / cells)
    assert statistics.pearson_tail(value, 1e12, equal) == pytest.approx(quantile, rel=1e-6)


@pytest.mark.parametrize("p", [(0.1, 0.2, 0.7), (0.05, 0.05, 0.9), (0.3, 0.3, 0.4)])
def test_of_few_draws_it_has_the_moments_of_all_that_may_be_drawn(p, monkeypatch):
    trials, p = 100, np.array(p)
    monkeypatch.setattr(statistics, "_skewed_tails", lambda z, skew: [(z, skew)])
    (low, skew), (high, _) = (statistics.pearson_tail(x, trials, p) for x in (0.0, 1.0))
    counts = np.array([(a, b, 100 - a - b) for a in range(101) for b in range(101 - a)])
    weights = stats.multinomial.pmf(counts, trials, p)
    values = ((counts - trials * p) ** 2 / (trials * p)).sum(1)
    mean = weights @ values
    variance, third = (weights @ (values - mean) ** power for power in (2, 3))
    assert -low / (high - low) == pytest.approx(mean)
    assert (high - low) ** -2 == pytest.approx(variance)
    assert skew == pytest.approx(third / variance**1.5, rel=0.01)


@pytest.mark.parametrize(
    ("trials", "expected"),
    [(100, [5] * 20), (256, [5] * 10 + [206]), (256, [5] * 30 + [106]), (256, [5, 251])],
)
def test_rare_cells_do_not_cry_wolf(trials, expected):
    """Where chi-square's own tail, at 1 in 10,000, is exceeded up to 6 times too often."""
    expected = np.array(expected, float)
    counts = RNG(7).multinomial(trials, expected / trials, size=100_000)
    statistic = ((counts - expected) ** 2 / expected).sum(1)
    # The p-value falls with the statistic, so few of them need looking at.
    extreme = counts[np.argsort(-statistic)[:100]].astype(float)
    p = np.array([statistics.chi_square(c, expected) for c in extreme])
    assert np.sum(p < 1e-4) <= 2.5 * 10
    assert p.max() > 2e-4


@pytest.mark.parametrize("count", [1, 40, 3000])
@pytest.mark.parametrize("quantile", [0.3, 1e-3, 1e-8])
def test_the_sum_of_exponentials_is_a_gamma(count, quantile):
    for tail in (stats.gamma.isf(quantile / 2, count), stats.gamma.ppf(quantile / 2, count)):
        u = np.full(count, -np.expm1(-tail / count))
        if tail < 30:  # a larger sum of one number would need a u of 1
            assert statistics.upper_tail(u) == pytest.approx(quantile, rel=1e-3)


def test_a_sum_of_trials_is_exact():
    assert statistics.bernoulli_sum(7, np.full(20, 0.6)) == pytest.approx(
        2 * stats.binom.cdf(7, 20, 0.6)
    )
    # 0 + 1 with probability 0.1, and 2 trials that are certain.
    assert statistics.bernoulli_sum(3, np.array([1.0, 0.1, 1.0])) == pytest.approx(0.2)
    assert statistics.bernoulli_sum(1, np.array([1.0, 0.1, 1.0])) == 0
    p = RNG(0).random(5000)
    z = 4.5
    count = round(p.sum() + z * np.sqrt((p * (1 - p)).sum()))
    assert statistics.bernoulli_sum(count, p) == pytest.approx(2 * stats.norm.sf(z), rel=0.2)


@pytest.mark.parametrize(("count", "trials", "p"), [(0, 9, 0.1), (3, 9, 0.1), (40, 9000, 1e-3)])
def test_at_least_is_a_binomial_tail(count, trials, p):
    expected = stats.binom.sf(count - 1, trials, p)
    assert statistics.at_least(count, trials, p) == pytest.approx(expected, rel=1e-6)


def test_at_least_of_no_trials_is_certain():
    assert statistics.at_least(0, 0, 0.5) == 1


def test_chi_square_pools_rare_cells_and_refuses_impossible_ones():
    p = np.array([0.0, 1e-6, 1e-4, 0.3, 0.6999 - 1e-6])
    assert statistics.chi_square(np.array([0.0, 0, 1, 3000, 6999]), p * 10_000) > 0.5
    assert statistics.chi_square(np.array([1.0, 0, 1, 3000, 6998]), p * 10_000) == 0
    assert statistics.chi_square(np.array([0.0, 0, 1, 3300, 6699]), p * 10_000) < 1e-6
    assert statistics.chi_square(np.array([7.0]), np.array([7.0])) == 1
    counts, expected = np.array([12.0, 30, 18]), np.array([20.0, 20, 20])
    assert statistics.chi_square(counts, expected) == pytest.approx(
        stats.chisquare(counts, expected).pvalue, rel=0.05
    )
    exact = 2 * stats.binom.sf(13, 100, 0.06)
    assert statistics.chi_square(np.array([14.0, 86]), np.array([6.0, 94])) == pytest.approx(exact)
    assert statistics.chi_square(np.array([86.0, 14]), np.array([94.0, 6])) == pytest.approx(exact)


@pytest.mark.parametrize("sign", [1, -1])
def test_the_tails_of_a_skewed_sum(sign):
    """Exponential variates, whose sums are known."""
    n = 30
    for quantile in (1e-2, 1e-4, 1e-6):
        for value in (stats.gamma.isf(quantile / 2, n), stats.gamma.ppf(quantile / 2, n)):
            values = sign * np.full(n, value / n - 1)
            p = statistics.total(values, np.ones(n), sign * np.full(n, 2.0))
            assert p == pytest.approx(quantile, rel=1e-6)
            assert statistics.total(sign * values, np.ones(n), np.zeros(n)) != pytest.approx(
                quantile, rel=0.05
            )


def test_the_tails_of_a_sum_without_skew_or_variance():
    n, z = 50, stats.norm.isf(1e-5 / 2)
    p = statistics.total(np.full(n, z / np.sqrt(n)), np.ones(n), np.zeros(n))
    assert p == pytest.approx(1e-5, rel=0.02)
    assert statistics.total(np.zeros(5), np.zeros(5), np.zeros(5)) == 1


def test_a_sum_carried_by_rare_values_is_no_cause_for_alarm():
    """Laws that are certain but for one token in a thousand."""
    p = np.array([0.999, 0.001])
    entropy, variance, skew = moments(p)
    rare, likely = -np.log(p[::-1]) - entropy
    found = []
    for count in range(6):
        values = np.full(300, likely)
        values[:count] = rare
        found.append(statistics.total(values, np.full(300, variance), np.full(300, skew)))
    true = stats.binom.sf(np.arange(6) - 1, 300, 0.001)
    assert found[0] > 0.1 and found[1] > 0.1
    assert np.all(found[2:] > true[2:] / 4) and found[5] < 0.01


@pytest.mark.parametrize("rare", [1e-4, 1e-9, 1e-30, 1e-200])
def test_a_sum_of_laws_that_are_all_but_certain_tells_nothing(rare):
    """As at a small temperature: no rare token is drawn, nor could one be expected."""
    entropy, variance, skew = moments(np.array([1 - rare, rare]))
    values = np.full(1000, -np.log1p(-rare) - entropy)
    assert statistics.total(values, np.full(1000, variance), np.full(1000, skew)) > 0.5


def draws_from_laws(rng, count, vocabulary=30):
    """Transforms of draws from `count` laws, from nearly certain to nearly uniform ones."""
    laws = rng.dirichlet(np.full(vocabulary, 0.2), size=count)
    laws = -np.sort(-laws, axis=1)
    cumulative = laws.cumsum(1)
    tokens = (rng.random((count, 1)) > cumulative).sum(1).clip(0, vocabulary - 1)
    p = laws[np.arange(count), tokens]
    above = cumulative[np.arange(count), tokens] - p
    return above + rng.random(count) * p, tokens == 0, laws[:, 0]


STATISTICS = {
    "bins": lambda u, first, top: statistics.uniform_chi_square(u, 20),
    "tail": lambda u, first, top: statistics.upper_tail(u),
    "mean": lambda u, first, top: statistics.mean(u),
    "serial": lambda u, first, top: statistics.serial_chi_square(u[::2], u[1::2], 5),
    "likeliest": lambda u, first, top: statistics.bernoulli_sum(int(first.sum()), top),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", STATISTICS)
def test_under_the_law_p_values_are_uniform(name):
    rng = RNG(1)
    p = [STATISTICS[name](*draws_from_laws(rng, 500)) for _ in range(400)]
    if name == "likeliest":  # counts: never smaller than they may be
        for level in (0.02, 0.1, 0.3):
            assert np.mean(np.array(p) <= level) < level + 3 * np.sqrt(level / len(p))
    else:
        assert stats.kstest(p, "uniform").pvalue > 0.01


@pytest.mark.parametrize("name", ["bins", "tail", "mean", "likeliest"])
def test_a_wrong_law_is_found_by_each(name):
    rng = RNG(2)
    u, first, top = draws_from_laws(rng, 2000)
    hotter = rng.random(2000) < 0.15
    u = np.where(hotter, 1 - 0.05 * rng.random(2000), u)
    assert STATISTICS[name](u, first & ~hotter, top) < 1e-6


def test_what_depends_on_the_draw_before_is_found_by_the_serial_test():
    u = RNG(3).random(2000)
    chained = np.where(np.arange(2000) % 2, (u + np.roll(u, 1) * 0.3) % 1, u)
    assert statistics.uniform_chi_square(chained, 20) > 0.01
    repeated = np.where(RNG(4).random(1999) < 0.15, u[:-1], u[1:])
    assert statistics.serial_chi_square(u[:-1], repeated, 5) < 1e-9


def test_holm_by_hand():
    assert statistics.holm([0.04, 0.001, 0.02, 0.9]) == pytest.approx([0.08, 0.004, 0.06, 0.9])
    assert statistics.holm([0.5, 0.4]) == pytest.approx([0.8, 0.8])
    assert statistics.holm([]) == []


@pytest.mark.parametrize("distance", [0.0, 0.03, 0.2])
@pytest.mark.parametrize("n", [200, 5000])
def test_the_interval_covers_the_distance(distance, n):
    rng, uniform = RNG(5), np.full(20, 0.05)
    true = uniform + np.where(np.arange(20) % 2, 1, -1) * distance / 10
    found = [
        statistics.total_variation(rng.multinomial(n, true).astype(float), uniform)
        for _ in range(300)
    ]
    assert np.mean([d.low <= distance <= d.high for d in found]) >= 0.95
    if distance == 0:
        assert np.mean([d.estimate for d in found]) == pytest.approx(found[0].noise, rel=0.05)


@pytest.mark.parametrize("pattern", [np.arange(20) % 2, np.arange(20) < 2])
def test_a_distance_that_must_be_seen_is_seen_nine_times_in_ten(pattern):
    rng, n, level = RNG(6), 2000, 1e-4
    distance = statistics.smallest_seen(n, 20, level)
    up = pattern / pattern.sum()
    down = (1 - pattern) / (1 - pattern).sum()
    true = np.full(20, 0.05) + distance * (up - down)
    seen = [
        statistics.chi_square(rng.multinomial(n, true).astype(float), np.full(20, n / 20)) < level
        for _ in range(400)
    ]
    assert np.mean(seen) > 0.86
    if pattern.sum() == 10:  # the spread that is hardest to see
        assert np.mean(seen) < 0.94


def test_more_draws_see_smaller_distances():
    distances = [statistics.smallest_seen(n, 20, 1e-5) for n in (100, 1000, 10_000)]
    assert distances == sorted(distances, reverse=True)
    assert distances[0] / distances[2] == pytest.approx(10, rel=0.01)
