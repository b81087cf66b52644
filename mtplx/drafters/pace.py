"""How deep to draft: as long as the next token is likely enough to pay for its time.

A cycle's tokens for its time are a reward for a delay, and what is gained in the long run is most
when a draft goes on exactly while the next token's chance, beside the time that it adds, is better
than the rate of the whole (the renewal-reward theorem). Times are measured on this machine with
this model; chances are learned from the drafter's own confidence and what became of it.

A draft may end after any token because of what that token is or was drawn from: the rules stay
exact. No token that was drawn is left out (docs/exactness.md).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from statistics import median

DEEPEST = 7
"""Tokens drafted at most: a pass of eight positions is the widest that costs little."""

TRIED = 3
"""Cycles of each of the first depths before their times are believed."""

AGAIN = 32
"""Every so many cycles a neighbouring depth is tried: what it takes and brings may have changed."""

REMEMBERED = 5
"""Times kept of each depth; their median counts, since now and then something else runs."""

LEVELS = 10
"""Steps of confidence whose outcomes are counted apart."""

FADING = 0.995
"""What an outcome counts after one more of its level."""


class Pace:
    """What cycles took and drafts came to, of one model on one machine."""

    def __init__(self) -> None:
        # By rows of the batch and depth.
        self._times: dict[tuple[int, int], deque[float]] = defaultdict(
            lambda: deque(maxlen=REMEMBERED)
        )
        self._tried: dict[tuple[int, int], int] = defaultdict(int)
        self._cycles: dict[int, int] = defaultdict(int)
        self._rates: dict[int, tuple[float, float]] = {}
        # Before anything is known a drafter is taken at its word, once.
        self._levels = [((level + 0.5) / LEVELS, 1.0) for level in range(LEVELS)]
        self._all = (0.5, 1.0)

    def to_try(self, rows: int, deepest: int) -> int | None:
        """A depth to draft to for the sake of knowing, or None where enough is known.

        Args:
            rows: of the batch.
            deepest: that is allowed now.
        """
        for depth in range(min(2, deepest), -1, -1):
            if self._tried[rows, depth] < TRIED:
                return depth
        turn, due = divmod(self._cycles[rows], AGAIN)
        if due:
            return None
        usual = max(range(DEEPEST + 1), key=lambda depth: self._tried[rows, depth])
        return min(max(usual + (1 if turn % 2 else -1), 0), deepest)

    def took(self, rows: int, depth: int, seconds: float, tokens: int) -> None:
        """Learn from a cycle that emitted so many tokens, of all rows."""
        self._cycles[rows] += 1
        # Which depth is usual is a matter of the last hundreds of cycles.
        self._tried[rows, depth] += 1
        if self._tried[rows, depth] > 256:
            for other in range(DEEPEST + 1):
                self._tried[rows, other] = -(-self._tried[rows, other] // 2)
        self._times[rows, depth].append(seconds)
        gained, spent = self._rates.get(rows, (0.0, 0.0))
        self._rates[rows] = gained * FADING + tokens, spent * FADING + self.time(rows, depth)

    def time(self, rows: int, depth: int) -> float:
        """Seconds that a cycle of this depth takes, from the ones below it where none was seen."""
        times = self._times.get((rows, depth))
        if times:
            return median(times)
        if depth == 0:
            return 0.0
        one, two = self.time(rows, depth - 1), self.time(rows, max(depth - 2, 0))
        return one + max(one - two, 0.0)

    def learn(self, confidence: float, probability: float) -> None:
        """Count what became of a draft: how sure its drafter was, how likely it was to be kept."""
        level = _level(confidence)
        kept, count = self._levels[level]
        self._levels[level] = kept * FADING + probability, count * FADING + 1
        kept, count = self._all
        self._all = kept * FADING + probability, count * FADING + 1

    def chance(self, confidence: float | None = None) -> float:
        """That a draft is kept, of this confidence or, before it is drawn, of any."""
        kept, count = self._all if confidence is None else self._levels[_level(confidence)]
        return kept / count

    def pays(self, rows: int, depth: int, hoped: float) -> bool:
        """Whether to draft one token more than `depth` when so many more may be hoped for."""
        gained, spent = self._rates.get(rows, (0.0, 0.0))
        plain = self.time(rows, 0)
        rate = max(gained / spent if spent else 0.0, rows / plain if plain else 0.0)
        return hoped > rate * (self.time(rows, depth + 1) - self.time(rows, depth))


def _level(confidence: float) -> int:
    return min(int(confidence * LEVELS), LEVELS - 1)


class Trust:
    """How one text's drafts fare beside what is usual for their confidence."""

    def __init__(self) -> None:
        # As if a few tokens had fared as usual.
        self.kept = self.expected = 4.0

    def chance(self, pace: Pace, confidence: float | None = None) -> float:
        """That a draft of this text is kept."""
        return min(1.0, pace.chance(confidence) * self.kept / self.expected)

    def learn(self, pace: Pace, confidence: float, probability: float) -> None:
        """Count what became of a draft."""
        self.kept = self.kept * FADING + probability
        self.expected = self.expected * FADING + pace.chance(confidence)
        pace.learn(confidence, probability)


class Draftsman:
    """Decides in one cycle, before each token, whether to draft it."""

    def __init__(self, pace: Pace, trusts: Sequence[Trust | None], depths: Sequence[int]) -> None:
        """
        Args:
            pace: of the model.
            trusts: of each row's text; None where its depth is fixed.
            depths: that each row may draft to, and has to where it is fixed.
        """
        self.pace, self.trusts, self.rows = pace, trusts, len(depths)
        pairs = list(zip(trusts, depths, strict=True))
        self.fixed = max((d for trust, d in pairs if trust is None), default=0)
        self.free = {row: d for row, (trust, d) in enumerate(pairs) if trust is not None and d}
        deepest = max(self.free.values(), default=0)
        # What fixed rows leave no choice about needs no trial.
        self.trial = pace.to_try(self.rows, deepest) if deepest > self.fixed else None
        self.confidences: list[list[float]] = []
        self._reached = dict.fromkeys(self.free, 1.0)

    def goes_on(self, drafted: int) -> bool:
        """Whether one more token is drafted behind so many."""
        if drafted < self.fixed:
            return True
        free = [row for row, depth in self.free.items() if depth > drafted]
        if not free:
            return False
        if self.trial is not None:
            return drafted < self.trial
        hoped = sum(
            self._reached[row] * trust.chance(self.pace)
            for row in free
            if (trust := self.trusts[row]) is not None
        )
        return self.pace.pays(self.rows, drafted, hoped)

    def drew(self, confidences: list[float]) -> None:
        """Take in how sure the drafter was of each row's token."""
        self.confidences.append(confidences)
        for row in self.free:
            trust = self.trusts[row]
            assert trust is not None
            self._reached[row] *= trust.chance(self.pace, confidences[row])

    def learn(self, row: int, decided: int, probability: Sequence[float]) -> None:
        """Take in what became of a row's first `decided` drafts."""
        trust = self.trusts[row]
        if trust is None:
            return
        for confidences, likely in zip(self.confidences[:decided], probability, strict=False):
            trust.learn(self.pace, confidences[row], likely)
