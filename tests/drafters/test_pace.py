"""How deep to draft, by invented times and chances: no clock is read here."""

import random

import pytest

from mtplx.drafters.pace import (
    AGAIN,
    BEGINNING,
    DEEPEST,
    FADING_TRUST,
    PRIOR,
    RECENT,
    RUN,
    Draftsman,
    Line,
    Pace,
    Trust,
)


class Machine:
    """A model and its drafter, as they would be: what cycles take, what becomes of drafts."""

    def __init__(self, plain, start, slope, chance, doubtful=0.0, rows=1, usual=3, seed=0):
        """
        Args:
            plain: seconds of a cycle without a draft.
            start: more with one, beside what each token takes.
            slope: more for each token.
            chance: that a draft of confidence 0.95 is kept.
            doubtful: share of drafts whose confidence is 0.15, as is their chance.
            rows: of the batch.
        """
        self.plain, self.start, self.slope = plain, start, slope
        self.chance, self.doubtful, self.rows = chance, doubtful, rows
        self.pace, self.random = Pace(usual), random.Random(seed)
        self.trusts = [Trust() for _ in range(rows)]
        self.seconds = 0.0
        self.tokens = 0

    def cycle(self, depths=None, noise=1.0):
        """One cycle; the depth it went to, and the confidence of its tokens, of the first row."""
        allowed = depths or [DEEPEST] * self.rows
        draftsman = Draftsman(self.pace, self.trusts, allowed)
        drawn = []
        while draftsman.goes_on(len(drawn)):
            sure = [self.random.random() >= self.doubtful for _ in range(self.rows)]
            drawn.append([0.95 if yes else 0.15 for yes in sure])
            draftsman.drew(drawn[-1])
        depth, emitted = len(drawn), 0
        for row in range(self.rows):
            chances = [self.chance if own[row] > 0.5 else own[row] for own in drawn]
            kept = [self.random.random() < chance for chance in chances]
            decided = min([*kept, False].index(False) + 1, len(drawn))
            draftsman.learn(row, decided, [float(k) for k in kept])
            emitted += [*kept, False].index(False) + 1
        took = (self.plain + bool(depth) * self.start + depth * self.slope) * noise
        self.pace.took(self.rows, depth, took, emitted)
        self.seconds, self.tokens = self.seconds + took, self.tokens + emitted
        return depth, [own[0] for own in drawn]

    def run(self, cycles, **how):
        return [self.cycle(**how)[0] for _ in range(cycles)]


def usual(depths):
    return sum(depths) / len(depths)


# --- The line ---------------------------------------------------------------------------------


def test_a_line_is_the_one_through_its_points():
    line = Line()
    for x in (1, 3, 2, 2, 5):
        line.add(x, 4.0 + 0.5 * x)
    assert line.slope(0.0) == pytest.approx(0.5)
    assert [line.at(x, 0.5) for x in (0, 7)] == pytest.approx([4.0, 7.5])


def test_a_line_never_falls_and_through_one_depth_comes_from_depth_0():
    falling, one = Line(), Line()
    for x in (1, 2, 3):
        falling.add(x, 4.0 - x)
        one.add(2, 5.0)
    assert falling.slope(0.0) == 0
    assert one.slope(4.0) == pytest.approx(0.5)


def test_a_line_forgets():
    line = Line()
    for slope in (1.0, 0.2):
        for x in [1, 2, 3] * 150:
            line.fade()
            line.add(x, 4.0 + slope * x)
        assert line.slope(0.0) == pytest.approx(slope, abs=0.1)


# --- Where it comes to ------------------------------------------------------------------------


def test_it_begins_at_the_recommended_depth_and_its_neighbours():
    depths = Machine(1.0, 0.1, 0.1, 0.5, usual=3).run(4 * RUN)
    assert depths == [3] * RUN + [4] * RUN + [2] * RUN + [0] * RUN
    assert set(Machine(1.0, 0.1, 0.1, 0.5, usual=1).run(4 * RUN)) == {0, 1, 2}


@pytest.mark.parametrize(("start", "slope"), [(0.0, 0.6), (0.5, 0.1), (0.2, 0.3)])
def test_it_drafts_nothing_where_drafts_are_too_dear(start, slope):
    """By what each token takes, by what any draft takes, and by both."""
    machine = Machine(1.0, start, slope, chance=0.25)
    machine.run(300)
    depths = machine.run(20 * AGAIN)
    assert sum(depth == 0 for depth in depths) > 0.95 * len(depths)


def test_trials_of_what_does_not_pay_cost_little():
    machine = Machine(3.8, 0.7, 0.4, chance=0.3)
    machine.run(300)
    machine.seconds = machine.tokens = 0
    machine.run(100 * AGAIN)
    assert machine.tokens / machine.seconds > 0.98 / 3.8


def test_it_drafts_deepest_where_drafts_are_free():
    machine = Machine(1.0, 0.0, 0.0, chance=0.9)
    assert usual(machine.run(400)[200:]) > DEEPEST - 0.5


@pytest.mark.parametrize("chance", [0.3, 0.6, 0.9])
@pytest.mark.parametrize(("start", "slope"), [(0.0, 0.08), (0.15, 0.08), (0.1, 0.2)])
@pytest.mark.parametrize("jitter", [0.0, 0.15])
def test_it_is_nearly_as_fast_as_the_best_fixed_depth(chance, start, slope, jitter):
    def rate(depth):
        tokens = sum(chance**i for i in range(depth + 1))
        return tokens / (1.0 + bool(depth) * start + depth * slope)

    machine = Machine(1.0, start, slope, chance)
    noise = random.Random(1)
    for _ in range(4000):
        machine.cycle(noise=1 + jitter * noise.random())
    expected = max(map(rate, range(DEEPEST + 1))) / (1 + jitter / 2)
    assert machine.tokens / machine.seconds > 0.95 * expected


def test_no_depth_comes_out_of_the_blue():
    """However wrong the first times are: each is at most one deeper than any lately."""
    machine, noise = Machine(1.0, 0.0, 0.0, chance=0.9), random.Random(0)
    depths = [machine.cycle(noise=noise.choice([0.5, 1, 3]))[0] for _ in range(300)]
    for i in range(1, len(depths)):
        assert depths[i] <= max(3, *depths[max(0, i - RECENT) : i]) + 1


def test_a_few_cycles_beside_something_else_change_nothing():
    machine = Machine(1.0, 0.1, 0.1, chance=0.7)
    machine.run(400)
    before = usual(machine.run(200))
    for _ in range(4):
        machine.cycle(noise=30.0)
    assert usual(machine.run(60)) == pytest.approx(before, abs=1.0)


def test_a_slow_first_cycle_counts_little():
    """It loads what the others find ready."""
    slow = Machine(1.0, 0.1, 0.1, chance=0.9)
    slow.cycle(noise=50.0)
    assert usual(slow.run(100)[BEGINNING:]) > 3


def test_it_forgets_what_drafts_took_and_what_became_of_them():
    machine = Machine(1.0, 0.1, 0.7, chance=0.6)
    assert usual(machine.run(600)[-200:]) < 0.1
    machine.slope = 0.02
    assert usual(machine.run(3000)[-200:]) > 3
    machine.chance = 0.0
    assert usual(machine.run(1000)[-200:]) < 0.1


def test_a_draft_ends_behind_a_token_that_is_doubted():
    machine = Machine(1.0, 0.1, 0.12, chance=0.95, doubtful=0.3)
    machine.run(500)
    behind_doubt = behind_trust = doubts = trusts = 0
    for _ in range(400):
        depth, confidences = machine.cycle()
        for i, sure in enumerate(confidences[: DEEPEST - 1]):
            if sure < 0.5:
                doubts, behind_doubt = doubts + 1, behind_doubt + (depth > i + 1)
            elif i == 0:
                trusts, behind_trust = trusts + 1, behind_trust + (depth > i + 1)
    assert doubts > 50 and behind_doubt < 0.1 * doubts
    assert trusts > 50 and behind_trust > 0.9 * trusts


def test_rows_are_weighed_together():
    """A draft that one row alone would end goes on for the other."""
    machine = Machine(1.0, 0.05, 0.1, chance=0.9, rows=4)
    machine.run(300)
    assert usual(machine.run(100)) > 3
    # What a batch has learned is where a smaller one begins.
    assert machine.pace.to_try(3, DEEPEST) > 3


# --- Within a cycle ---------------------------------------------------------------------------


class Said(Pace):
    """Says what it is told to, and writes down what it is asked."""

    def __init__(self, trial=None, pays=True):
        super().__init__()
        self.trial, self.answer, self.asked = trial, pays, []

    def to_try(self, rows, deepest):
        self.asked.append((rows, deepest))
        return self.trial

    def pays(self, rows, drafted, hopes):
        self.asked.append((rows, drafted, hopes))
        return self.answer


def drafted(draftsman, rows):
    depth = 0
    while draftsman.goes_on(depth):
        draftsman.drew([0.5] * rows)
        depth += 1
    return depth


def test_fixed_rows_are_given_their_depth():
    assert drafted(Draftsman(Said(pays=False), [None, Trust()], [3, 7]), 2) == 3
    assert drafted(Draftsman(Said(pays=True), [None, Trust()], [3, 7]), 2) == 7
    assert drafted(Draftsman(Said(trial=1), [None, Trust()], [3, 7]), 2) == 3
    assert drafted(Draftsman(Said(trial=5), [None, Trust()], [3, 7]), 2) == 5


def test_no_row_is_drafted_beyond_what_it_may():
    assert drafted(Draftsman(Said(), [Trust(), Trust()], [2, 0]), 2) == 2
    assert drafted(Draftsman(Said(), [Trust()], [0]), 1) == 0
    assert drafted(Draftsman(Said(), [Trust(), None], [0, 0]), 2) == 0


def test_what_fixed_rows_leave_no_choice_about_is_not_tried():
    pace = Said(trial=0)
    assert drafted(Draftsman(pace, [None, Trust()], [4, 2]), 2) == 4
    assert pace.asked == []


def test_hopes_are_the_rows_own():
    pace, (sure, doubted) = Said(), (Trust(), Trust())
    doubted.expected = PRIOR / FADING_TRUST
    draftsman = Draftsman(pace, [sure, doubted], [2, 1])
    assert draftsman.goes_on(0)
    assert pace.asked[-1] == (2, 0, pytest.approx([0.5 + 0.25, 0.25]))
    draftsman.drew([0.95, 0.95])
    assert draftsman.goes_on(1)
    assert pace.asked[-1] == (2, 1, pytest.approx([0.95 * 0.5]))


def test_only_what_was_decided_is_learned():
    pace, trust = Pace(), Trust()
    draftsman = Draftsman(pace, [trust, None], [3, 3])
    for confidence in (0.95, 0.55, 0.15):
        draftsman.drew([confidence, 0.35])
    before = [pace.chance(c) for c in (0.95, 0.55, 0.35, 0.15)]
    draftsman.learn(0, 2, [1.0, 0.0, 1.0])
    draftsman.learn(1, 3, [1.0, 1.0, 1.0])
    after = [pace.chance(c) for c in (0.95, 0.55, 0.35, 0.15)]
    assert after[0] > before[0] and after[1] < before[1]
    assert after[2:] == before[2:]


def test_times_that_bend_do_not_run_away():
    """A line through the first cycles may promise less than nothing for the depth below them."""
    pace = Pace(3)
    first = {0: 4e-3, 2: 3.2e-3, 3: 6e-3, 4: 12e-3}
    for _ in range(2000):
        depth = pace.to_try(1, DEEPEST)
        if depth is None:
            depth = 0
            while depth < DEEPEST and pace.pays(1, depth, [0.7 ** (depth + 1)]):
                depth += 1
        seconds = (
            first[depth] if not pace._of(1).begun else 4e-3 + (1e-3 + 3e-4 * depth) * (depth > 0)
        )
        pace.took(1, depth, seconds, 1 + depth // 2)
    times = pace._of(1)
    assert 0 <= times.slope < 2e-3
    assert 3e-3 < times.expected(1) < 9e-3
    assert 0 < times.rate < 1000


# --- Which times count ------------------------------------------------------------------------


def steady(pace, cycles, depth=0, seconds=1.0, rows=1):
    for _ in range(cycles):
        pace.took(rows, depth, seconds, rows)


def test_the_first_cycle_with_or_without_a_draft_does_not_count():
    pace = Pace(1)
    for _ in range(40):
        for depth, seconds in ((0, 1.0), (1, 1.2)):
            pace.took(1, depth, 9.0, 1)
            steady(pace, RUN - 1, depth, seconds)
    times = pace._of(1)
    assert times.expected(0) == pytest.approx(1.0)
    assert times.expected(1) == pytest.approx(1.2)


def test_what_each_depth_takes_is_its_own():
    """Nearly nothing for the first token and much for the second: no line says so."""
    pace = Pace(1)
    for _ in range(60):
        for depth, seconds in ((0, 1.0), (1, 1.05), (2, 1.8)):
            steady(pace, RUN, depth, seconds)
    times = pace._of(1)
    for depth, seconds in ((0, 1.0), (1, 1.05), (2, 1.8)):
        assert times.expected(depth) == pytest.approx(seconds, rel=0.05)
    assert pace.pays(1, 0, [0.2]) and not pace.pays(1, 1, [0.2])


@pytest.mark.parametrize("rows", [1, 2])
def test_cycles_that_never_settle_are_no_beginning(rows):
    """Every other one drafts, as two short texts side by side may: nothing is known, or broken."""
    pace = Pace(3)
    for i in range(200):
        pace.took(rows, 1 - i % 2, 0.02, rows)
    assert pace.to_try(rows, DEEPEST) is not None
    steady(pace, BEGINNING, 1, 0.02, rows)
    steady(pace, BEGINNING + 1, 0, 0.01, rows)
    assert pace._of(rows).begun
    assert pace.pays(rows, 0, [5.0 * rows]) and not pace.pays(rows, 0, [0.01])


def test_many_texts_of_one_token_are_no_beginning():
    """Those draft nothing, and so say nothing about drafts."""
    machine = Machine(1.0, 0.05, 0.05, chance=0.95)
    machine.run(200, depths=[0])
    assert usual(machine.run(4 * RUN + 40)[4 * RUN :]) > 3


def test_depth_0_is_tried_again_though_texts_end_with_it():
    """The last cycle of a text has nothing to draft; it follows one that did, and says nothing."""
    machine = Machine(10.0, 0.0, 0.5, chance=0.6)
    for _ in range(200):
        machine.run(11)
        machine.run(1, depths=[0])
    machine.plain, machine.start = 1.0, 9.0
    for _ in range(300):
        machine.run(11)
        machine.run(1, depths=[0])
    assert usual(machine.run(60)) < 1
