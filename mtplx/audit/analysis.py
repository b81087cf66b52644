"""Which draws are tested together, and how.

Every group is chosen by what was settled before its draws, so that under the law each of them is
still a draw from its own law: by position, or by what had happened in the cycle. How many of the
latter there are is itself chance, which over hundreds of texts has next to no weight.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mtplx.audit import statistics
from mtplx.audit.engines import BONUS
from mtplx.audit.law import Laws, Prefix, Spot, Text

SPECULATION, PLAIN = "speculation", "plain"
ALL = "all draws"
BINS = 20
SERIAL_BINS = 5
FEWEST = 100
"""Draws of which something can be said: five in each bin."""

Array = NDArray[np.float64]

After = Callable[[Iterable[Prefix]], Laws]
"""Gives the likely tokens after these prefixes of a prompt, and maybe others."""


@dataclass
class Test:
    """One hypothesis test.

    Attributes:
        sample: `speculation` or `plain`.
        group: which draws.
        name: what of them.
        p_value: under the law.
        adjusted: for the number of all tests of the audit (Holm).
    """

    sample: str
    group: str
    name: str
    p_value: float
    adjusted: float = 1.0

    __test__ = False  # pytest would take it for one of its own


@dataclass
class Group:
    """Draws that belong together.

    Attributes:
        sample: `speculation` or `plain`.
        name: a position, or a stage of the cycle.
        draws: how many.
        histogram: of where the draws lie in their laws, likeliest first, in equal bins.
        distance: total variation over those bins; that over tokens is no smaller.
        smallest_seen: distance over the bins that would have been found 9 times out of 10; what
            leaves the bins as they are, as an exchange of equally likely tokens, this cannot see.
    """

    sample: str
    name: str
    draws: int
    histogram: list[int]
    distance: statistics.Distance
    smallest_seen: float = 1.0


def pooled(
    sample: str, texts: Sequence[Text], rng: np.random.Generator
) -> tuple[list[Group], list[Test]]:
    """Draws pooled over prompts and prefixes, by position and by stage.

    Args:
        sample: its name.
        texts: with spots; those of probability 0 are left out, and have a test of their own.
        rng: for the transform's own numbers.
    """
    members: dict[str, list[tuple[Spot, float]]] = {}
    pairs: dict[str, list[tuple[float, float]]] = {}
    for text in texts:
        noise = rng.random(len(text.spots))
        before = None
        for i, spot in enumerate(text.spots):
            if not spot.p:
                before = None
                continue
            rank = float(spot.above + noise[i] * spot.p)
            position = f"position {i + 1}"
            for name in (position, text.stages[i], ALL):
                if name:
                    members.setdefault(name, []).append((spot, rank))
            if before is not None:
                pairs.setdefault(position, []).append((before, rank))
            before = rank
    groups, tests = [], []
    for name in sorted(members, key=_order):
        spots, ranks = zip(*members[name], strict=True)
        if len(spots) < FEWEST:
            continue
        u = np.array(ranks)
        counts = statistics.histogram(u, BINS)
        groups.append(
            Group(
                sample,
                name,
                len(u),
                [int(count) for count in counts],
                statistics.total_variation(counts, np.full(BINS, 1 / BINS)),
            )
        )
        tests += [Test(sample, name, what, p) for what, p in _tests(spots, u, rng)]
        if len(pairs.get(name, ())) >= SERIAL_BINS**2 * statistics.LEAST_EXPECTED:
            first, second = np.array(pairs[name]).T
            p = statistics.serial_chi_square(first, second, SERIAL_BINS)
            tests.append(Test(sample, name, "given the token before", p))
    return groups, tests


def _order(name: str) -> tuple[bool, bool, bool, int]:
    number = re.search(r"\d+", name)
    return (
        name == ALL,
        not name.startswith("position"),
        name == BONUS,
        int(number[0]) if number else 0,
    )


def _tests(
    spots: Sequence[Spot], u: Array, rng: np.random.Generator
) -> Iterator[tuple[str, float]]:
    p, _, before, highest, surprise, variance, skew = np.array(spots).T
    yield "by likelihood", statistics.uniform_chi_square(u, BINS)
    yield "rare tokens", statistics.upper_tail(u)
    # What a wrong temperature changes first.
    yield "surprise", statistics.total(surprise, variance, skew)
    likeliest = sum(spot.likeliest for spot in spots)
    yield "the likeliest token", statistics.bernoulli_sum(likeliest, np.minimum(highest, 1))
    # A fault that shares noise between decisions prefers tokens by their place in the vocabulary.
    by_id = before + rng.random(len(p)) * p
    yield "by id", statistics.uniform_chi_square(by_id, BINS)
    yield "lower or higher ids", statistics.mean(by_id)


def by_prompt(
    sample: str,
    group: str,
    texts: Sequence[Text],
    after: After,
) -> list[Test]:
    """One prompt's tokens at position 1, and its whole texts, as far as counts allow.

    Args:
        sample: its name.
        group: the prompt's.
        texts: of that prompt.
        after: gives the likely tokens after some prefixes; all with a probability of
            LEAST_EXPECTED / len(texts) must be among them.
    """
    whole = max((len(text.tokens) for text in texts), default=0)
    # Draws of probability 0 have a test of their own.
    texts = [text for text in texts if all(spot.p for spot in text.spots)]
    tests = []
    for name, length in (("first token", 1), ("texts", whole)):
        cells = partition(after, len(texts), length)
        counts = dict.fromkeys(cells, 0)
        for text in texts:
            counts[_cell(cells, text.tokens[:length])] += 1
        expected = np.array(list(cells.values())) * len(texts)
        found = np.array(list(counts.values()), dtype=np.float64)
        tests.append(Test(sample, group, name, statistics.chi_square(found, expected)))
    return tests


def _cell(cells: Mapping[Prefix, float], tokens: Prefix) -> Prefix:
    while tokens not in cells:
        tokens = tokens[:-1]
    return tokens


def partition(after: After, count: int, length: int) -> dict[Prefix, float]:
    """Cells that all texts of this length fall into, and their probabilities.

    A text that can be expected often enough has a cell of its own; the others share one with those
    that leave the likely texts behind the same prefix. A text is in the cell of its longest prefix.
    Nothing here looks at what was drawn.
    """
    cells: dict[Prefix, float] = {}
    likely: dict[Prefix, float] = {(): 1.0}
    for _ in range(length):
        laws = after(likely)
        longer: dict[Prefix, float] = {}
        for prefix, mass in likely.items():
            rest = mass
            for token, p in laws.get(prefix, {}).items():
                if mass * p * count >= statistics.LEAST_EXPECTED:
                    longer[(*prefix, token)] = mass * p
                    rest -= mass * p
            cells[prefix] = max(rest, 0.0)
        likely = longer
    return cells | likely


ALLOWED = 1e-3
"""Share of draws that may have probability 0: at the edge of a filter rounding decides."""


def impossible(
    samples: Mapping[str, Sequence[Text]], edge: float
) -> tuple[dict[str, int], list[Test]]:
    """Draws of tokens that have probability 0, by sample.

    Each sample's share is held against what rounding may do, and that under speculation against
    that without.

    Args:
        samples: texts by the sample's name.
        edge: share of draws that rounding was seen to put beyond a filter's edge.
    """
    draws = {kind: sum(len(text.spots) for text in texts) for kind, texts in samples.items()}
    counts = {
        kind: sum(not spot.p for text in texts for spot in text.spots)
        for kind, texts in samples.items()
    }
    allowed = max(ALLOWED, 3 * edge)
    name = "impossible tokens"
    tests = [
        Test(kind, ALL, name, statistics.at_least(counts[kind], draws[kind], allowed))
        for kind in samples
    ]
    if SPECULATION in samples and PLAIN in samples:
        share = draws[SPECULATION] / (draws[SPECULATION] + draws[PLAIN])
        together = counts[SPECULATION] + counts[PLAIN]
        p = statistics.at_least(counts[SPECULATION], together, share)
        tests.append(Test(SPECULATION, ALL, "more of these than plain", p))
    return counts, tests
