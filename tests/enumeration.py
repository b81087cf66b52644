"""Every way in which an experiment's random numbers can fall, each with its exact probability."""

from __future__ import annotations

from collections import defaultdict
from fractions import Fraction

import numpy as np


class Outcomes:
    """Stands in for a `numpy.random.Generator`, and knows nothing of the rule under test.

    Its numbers are symbols. What the code can do with them is compare them, and a comparison that
    the number's interval does not settle splits the interval in two; the experiment is run again
    for each half. So a run stands for a box of uniforms on which the code does the same thing, and
    its probability is the box's volume, a Fraction.
    """

    def __call__(self, experiment):
        """Yield (result, probability) of ``experiment(self)`` for every way through it."""
        pending = [[]]
        while pending:
            self._script, self._taken = pending.pop(), []
            self._intervals, self._probability = {}, Fraction(1)
            result = experiment(self)
            start = len(self._script)
            assert self._taken[:start] == self._script, "the same start must lead the same way"
            yield result, self._probability
            for step in range(start, len(self._taken)):
                pending.append([*self._taken[:step], not self._taken[step]])

    def law(self, experiment):
        """{result: probability} of an experiment that returns a list of tokens."""
        law = defaultdict(Fraction)
        for result, probability in self(experiment):
            law[tuple(result)] += probability
        return dict(law)

    def uniform(self, key):
        """The number of this `key`: whoever asks for it again gets the same."""
        self._intervals.setdefault(key, (Fraction(0), Fraction(1)))
        return Uniform(self, key)

    def random(self):
        """A number of its own."""
        return self.uniform(("own", len(self._intervals)))

    def race(self, key):
        """Noise for a race of two tokens, the same for the same `key`.

        Two exponentials divided by their sum are u and 1 - u, where u is uniform; and a race does
        not look at the sum.
        """
        u = self.uniform(key)
        noise = np.empty(2, dtype=object)
        noise[:] = u, 1 - u
        return noise

    def standard_exponential(self, shape):
        rows, vocabulary = shape
        assert vocabulary == 2, "more than two exponentials are not piecewise constant in uniforms"
        return np.array([self.race(("own", len(self._intervals))) for _ in range(rows)])

    def below(self, key, cut):
        """Whether the number is below `cut`."""
        low, high = self._intervals[key]
        if not low < cut < high:
            return cut >= high
        step = len(self._taken)
        answer = self._script[step] if step < len(self._script) else True
        self._taken.append(answer)
        chosen = (low, cut) if answer else (cut, high)
        self._intervals[key] = chosen
        self._probability *= (chosen[1] - chosen[0]) / (high - low)
        return answer


class Uniform:
    """``offset + slope u``, for a uniform u of which no more than an interval is known."""

    __array_ufunc__ = None  # NumPy's scalars leave the arithmetic to this class.

    def __init__(self, outcomes, key, slope=1, offset=0):
        self.outcomes, self.key, self.slope, self.offset = outcomes, key, slope, offset

    def _linear(self, factor, summand=0):
        return Uniform(self.outcomes, self.key, self.slope * factor, self.offset * factor + summand)

    def __mul__(self, factor):
        return self._linear(Fraction(factor))

    def __truediv__(self, divisor):
        return self._linear(1 / Fraction(divisor))

    def __rsub__(self, number):
        return self._linear(-1, Fraction(number))

    def __lt__(self, other):
        slope, offset = self.slope, self.offset
        if isinstance(other, Uniform):
            assert other.key == self.key, "two numbers are only ever compared to thresholds"
            slope, offset, other = slope - other.slope, offset - other.offset, 0
        if slope == 0:
            return offset < other
        cut = (Fraction(other) - offset) / slope
        below = self.outcomes.below(self.key, cut)
        return below if slope > 0 else not below

    def __ge__(self, other):
        return not self < other

    # Equality has probability 0.
    __gt__, __le__ = __ge__, __lt__
