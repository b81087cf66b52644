"""How deep to draft: as long as the next token is likely enough to pay for its time.

A cycle's tokens for its time are a reward for a delay, and what is gained in the long run is most
when a draft goes on exactly while what it may still bring, beside the time that it adds, is better
than the rate of the whole (the renewal-reward theorem). Times are measured on this machine with
this model; chances are learned from the drafter's own confidence and what became of it.

A draft may end after any token because of what that token is or was drawn from: the rules stay
exact. No token that was drawn is left out, and what is learned here from drafts that came to
nothing meets fresh noise in the next cycle (docs/exactness.md).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median, mode
from threading import Lock

DEEPEST = 7
"""Tokens drafted at most: a pass of eight positions is the widest that costs little."""

RUN = 4
"""Cycles of one depth in a row when it is tried: the first one finds the drafter's weights and code
far from the processor, or the trunk's alone near it, and its time says nothing."""

BEGINNING = 4 * (RUN - 1)
"""Times that count, of depths near the usual one and of depth 0, before they are believed."""

RECENT = 24
"""Cycles that say which depth is the usual one."""

AGAIN = 96
"""After so many cycles another depth is tried, if none has come by itself: what it takes and
brings may have changed. A run for nothing, each cycle half as long again, then costs 2%, and most
cost less and bring something."""

OUTLIER = 2.0
"""Times what was to be expected, a time counts at most: now and then something else runs."""

LEVELS = 10
"""Steps of confidence whose outcomes are counted apart."""

FADING = 0.995
"""What an outcome counts after one more of its level."""

FADING_TIME = 0.995
"""What a time counts after one more that counts, of whatever depth."""

PRIOR_TIMES = 2.0
"""Cycles of a depth that are taken to have taken what the line through all says."""

FADING_RATE = 0.98
"""What the tokens and the time of a cycle count after one more."""

FADING_TRUST = 0.98
"""What a text's draft counts after one more cycle: texts change sooner than models, and one that
is no longer drafted for is given another chance."""

PRIOR = 8.0
"""Drafts of a text that are taken to have fared as usual."""


class Line:
    """Seconds by depth, as a straight line: least squares in which the past fades."""

    def __init__(self) -> None:
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def __bool__(self) -> bool:
        return self._weight > 0

    def add(self, x: float, y: float) -> None:
        """Take in one more point."""
        self._weight += 1
        self._x += x
        self._y += y
        self._xx += x * x
        self._xy += x * y

    def fade(self) -> None:
        """Have all points count a little less."""
        self._weight *= FADING_TIME
        self._x *= FADING_TIME
        self._y *= FADING_TIME
        self._xx *= FADING_TIME
        self._xy *= FADING_TIME

    @property
    def mean(self) -> float:
        """Of y."""
        return self._y / self._weight

    def mean_beside(self, y: float, count: float) -> float:
        """Of y, were there as many more points of this one."""
        return (self._y + count * y) / (self._weight + count)

    def slope(self, at_zero: float) -> float:
        """Never below 0; where all points have one x, that of the line from `at_zero` at x = 0."""
        mean, spread = self._x / self._weight, self._xx - self._x**2 / self._weight
        # Depths that were other than the usual one fade, and leave but rounding.
        if spread > 1e-3 * self._weight:
            slope = (self._xy - mean * self._y) / spread
        else:
            slope = (self.mean - at_zero) / mean if mean else 0.0
        return max(slope, 0.0)

    def at(self, x: float, slope: float) -> float:
        """The line with this slope through the middle of the points, at x."""
        return self.mean + slope * (x - self._x / self._weight)


class Times:
    """What cycles of one number of rows took and gave.

    What a depth takes is what its own cycles took, as far as there are any lately; behind it stands
    the line through all that drafted. The first drafted token may cost next to nothing and the
    fourth much, which no line says.
    """

    def __init__(self, rows: int, usual: int) -> None:
        """
        Args:
            rows: of the batch.
            usual: a depth to begin near.
        """
        self.rows = rows
        self.cycles = 0
        self._begin_near = usual
        # Depths of the last cycles, and of the last whose times counted.
        self.recent: deque[int] = deque([usual], maxlen=RECENT)
        self._counted: deque[int] = deque(maxlen=RECENT)
        # Depth, time and tokens of the cycles before anything is believed.
        self._first: deque[tuple[int, float, int]] | None = deque(maxlen=4 * BEGINNING)
        # A cycle without a draft also saves what any draft takes, so it has no part in the line.
        self._drafting = Line()
        self._own: dict[int, Line] = {}
        self._gained = self._spent = 0.0
        self._least = float("inf")
        # The depth on trial, for how many cycles more, when the next trial is due, and how many
        # there have been.
        self._trial = self._left = self._due = self._trials = 0

    @property
    def begun(self) -> bool:
        """Whether enough is known to decide by."""
        return self._first is None

    def usual(self) -> int:
        """The depth of most of the last cycles."""
        return mode(self.recent)

    def to_try(self) -> int | None:
        """A depth to draft to for the sake of knowing, or None where enough is known."""
        if not self.begun:
            usual = self._begin_near
            near = (usual, usual + 1, max(usual - 1, 0), 0)
            return near[self.cycles // RUN % len(near)]
        if not self._left and self.cycles >= self._due:
            usual = self.usual()
            deeper, shallower = usual + 1 if usual < DEEPEST else usual - 1, usual - 1
            self._trial = (deeper, shallower, deeper, 0)[self._trials % 4] if usual else 1
            self._trials += 1
            self._due = self.cycles + AGAIN
            self._left = 0 if self._trial in self._counted else RUN
        if not self._left:
            return None
        self._left -= 1
        return self._trial

    def took(self, depth: int, seconds: float, tokens: int) -> None:
        """Take in a cycle."""
        # The very first of all cycles, too, are slower than any later one.
        settled = self.cycles > 0 and bool(depth) == bool(self.recent[-1])
        self.cycles += 1
        self.recent.append(depth)
        if self._first is not None:
            if settled:
                self._first.append((depth, seconds, tokens))
                self._begin(self._first)
            return
        # A line may promise less than any cycle took, or less than nothing.
        seconds = min(seconds, OUTLIER * max(self.expected(depth), self._least))
        self._gain(seconds, tokens)
        if settled:
            self._count(depth, seconds)

    def _begin(self, first: deque[tuple[int, float, int]]) -> None:
        """Believe the first times, if they are enough."""
        enough = self.cycles >= 4 * RUN and len(first) >= BEGINNING
        if not enough or not any(depth for depth, *_ in first):
            return
        limit = OUTLIER * median(seconds for _, seconds, _ in first)
        self._first, self._due = None, self.cycles + AGAIN
        for depth, seconds, tokens in first:
            self._count(depth, min(seconds, limit))
            self._gain(min(seconds, limit), tokens)

    def _count(self, depth: int, seconds: float) -> None:
        self._least = min(self._least, seconds)
        self._counted.append(depth)
        own = self._own.setdefault(depth, Line())
        for line in (self._drafting, *self._own.values()):
            line.fade()
        for line in (own, self._drafting) if depth else (own,):
            line.add(depth, seconds)

    def _gain(self, seconds: float, tokens: int) -> None:
        self._gained = self._gained * FADING_RATE + tokens
        self._spent = self._spent * FADING_RATE + seconds

    @property
    def _plain(self) -> float:
        """Seconds of a cycle without a draft, 0 where there was none."""
        return self._own[0].mean if 0 in self._own else 0.0

    def expected(self, depth: int) -> float:
        """Seconds of a cycle of this depth; no end of them where nothing is known."""
        if depth == 0 and self._plain:
            return self._plain
        if not self._drafting:
            return float("inf")
        likely = self._drafting.at(depth, self.slope)
        own = self._own.get(depth)
        return own.mean_beside(likely, PRIOR_TIMES) if own else likely

    @property
    def slope(self) -> float:
        """Seconds of one token more, 0 where no cycle drafted."""
        return self._drafting.slope(self._plain) if self._drafting else 0.0

    @property
    def rate(self) -> float:
        """Tokens per second that the last cycles gave, and no fewer than without drafts."""
        plain = self.rows / self._plain if self._plain else 0.0
        return max(self._gained / self._spent, plain)


class Pace:
    """What cycles took and drafts came to, of one model on one machine.

    It may be asked and told by several threads.
    """

    def __init__(self, usual: int = 3) -> None:
        """
        Args:
            usual: the depth to begin near, before anything is known.
        """
        self._usual = usual
        self._times: dict[int, Times] = {}
        self._lock = Lock()
        # Before anything is known a drafter is taken at its word, once.
        self._levels = [((level + 0.5) / LEVELS, 1.0) for level in range(LEVELS)]
        self._all = (0.5, 1.0)

    def _of(self, rows: int) -> Times:
        if rows not in self._times:
            # A batch that shrinks goes on as it was.
            nearest = min(self._times.values(), key=lambda t: abs(t.rows - rows), default=None)
            self._times[rows] = Times(rows, nearest.usual() if nearest else self._usual)
        return self._times[rows]

    def to_try(self, rows: int, deepest: int) -> int | None:
        """A depth to draft to for the sake of knowing, or None where enough is known.

        Args:
            rows: of the batch.
            deepest: that is allowed now.
        """
        with self._lock:
            depth = self._of(rows).to_try()
        return None if depth is None else min(depth, deepest)

    def took(self, rows: int, depth: int, seconds: float, tokens: int) -> None:
        """Learn from a cycle that emitted so many tokens, of all rows."""
        with self._lock:
            self._of(rows).took(depth, seconds, tokens)

    def pays(self, rows: int, drafted: int, hopes: Sequence[float]) -> bool:
        """Whether to draft on.

        Args:
            rows: of the batch.
            drafted: tokens of each row so far.
            hopes: how many kept tokens may be hoped for from the next position, from the one
                after it, and so on, of all rows together.
        """
        with self._lock:
            times = self._of(rows)
            # What is known is no guide to what lies far off.
            further = max(times.recent) + 1 - drafted
            rate, now, gained = times.rate, times.expected(drafted), 0.0
            for ahead, hope in enumerate(hopes[: max(further, 0)], 1):
                gained += hope
                if gained > rate * max(times.expected(drafted + ahead) - now, 0.0):
                    return True
        return False

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


def _level(confidence: float) -> int:
    return min(int(confidence * LEVELS), LEVELS - 1)


class Trust:
    """How one text's drafts fare beside what is usual for their confidence."""

    def __init__(self) -> None:
        self.kept = self.expected = 0.0

    def chance(self, pace: Pace, confidence: float | None = None) -> float:
        """That a draft of this text is kept."""
        trust = (PRIOR + self.kept) / (PRIOR + self.expected)
        return min(1.0, pace.chance(confidence) * trust)

    def fade(self) -> None:
        """A cycle begins."""
        self.kept *= FADING_TRUST
        self.expected *= FADING_TRUST

    def learn(self, pace: Pace, confidence: float, probability: float) -> None:
        """Count what became of a draft."""
        self.kept += probability
        self.expected += pace.chance(confidence)
        pace.learn(confidence, probability)


class Draftsman:
    """Decides in one cycle, before each token, whether to draft it."""

    def __init__(
        self,
        pace: Pace,
        trusts: Sequence[Trust | None],
        depths: Sequence[int],
        foreseen: Mapping[int, Sequence[float]] | None = None,
    ) -> None:
        """
        Args:
            pace: of the model.
            trusts: of each row's text; None where its depth is fixed.
            depths: that each row may draft to, and has to where it is fixed.
            foreseen: how sure the drafter is of the tokens ahead, of the rows where it knows.
        """
        self.pace, self.rows = pace, len(depths)
        self.foreseen = foreseen or {}
        self.trusts = {row: trust for row, trust in enumerate(trusts) if trust is not None}
        self.fixed = max((d for row, d in enumerate(depths) if row not in self.trusts), default=0)
        self.free = {row: depths[row] for row in self.trusts if depths[row]}
        deepest = max(self.free.values(), default=0)
        # What fixed rows leave no choice about needs no trial.
        self.trial = pace.to_try(self.rows, deepest) if deepest > self.fixed else None
        for trust in self.trusts.values():
            trust.fade()
        self.confidences: list[list[float]] = []
        self._reached = dict.fromkeys(self.free, 1.0)

    def goes_on(self, drafted: int) -> bool:
        """Whether one more token is drafted behind so many."""
        if drafted < self.fixed:
            return True
        deepest = max(self.free.values(), default=0)
        if drafted >= deepest:
            return False
        if self.trial is not None:
            return drafted < self.trial
        hopes = [0.0] * (deepest - drafted)
        for row, depth in self.free.items():
            hope = self._reached[row]
            for ahead, chance in enumerate(self._chances(row, drafted, depth)):
                hope *= chance
                hopes[ahead] += hope
        return self.pace.pays(self.rows, drafted, hopes)

    def _chances(self, row: int, first: int, depth: int) -> list[float]:
        """That each draft from the first of these on is kept, if those before it are."""
        trust, foreseen = self.trusts[row], self.foreseen.get(row)
        if foreseen is None:
            return [trust.chance(self.pace)] * (depth - first)
        return [trust.chance(self.pace, confidence) for confidence in foreseen[first:depth]]

    def drew(self, confidences: list[float]) -> None:
        """Take in how likely each row's token was to its drafter; what was foreseen stands."""
        position = len(self.confidences)
        for row, foreseen in self.foreseen.items():
            confidences[row] = foreseen[position] if position < len(foreseen) else 0.0
        self.confidences.append(confidences)
        for row in self.free:
            self._reached[row] *= self.trusts[row].chance(self.pace, confidences[row])

    def learn(self, row: int, decided: int, probability: Sequence[float]) -> None:
        """Take in with which probability a row's first `decided` drafts were kept."""
        if trust := self.trusts.get(row):
            for confidences, likely in zip(self.confidences[:decided], probability, strict=False):
                trust.learn(self.pace, confidences[row], likely)
