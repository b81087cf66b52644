"""Exactness as a theorem: every draft, every decision, in rational arithmetic, difference 0.

A world is a target and a drafter over a few tokens whose distributions depend on the whole text, in
fractions. `Outcomes` runs the project's own cycle once for every way in which its random numbers
can fall. So the law of what is emitted comes out as fractions, and is held to the target's with
`==`. Rules that are nearly right go through the same test, and each is found.
"""

import functools
import itertools
from collections import defaultdict
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import pytest
from enumeration import Outcomes
from scipy import stats

from mtplx import sampling, speculative
from mtplx.sampling import (
    SamplerConfig,
    block_acceptance,
    block_residual_distribution,
    exponential_race,
    residual_distribution,
    sample_from_distribution,
)
from mtplx.speculative import (
    speculative_decode,
    verify_draft_block,
    verify_draft_coupled,
    verify_draft_token,
)

# --- Worlds ---------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class World:
    """Rows for every text shorter than two whole cycles."""

    vocabulary: int
    depth: int
    target: dict  # text -> p of the next token
    drafter: dict  # text -> q of the next token
    stops: frozenset = frozenset()  # texts behind which no more is drafted in this cycle

    def target_law(self, text, length):
        """The joint law of the tokens up to `length` behind `text`: {text: probability}."""
        if len(text) >= length:
            return {text: Fraction(1)}
        return {
            longer: p * mass
            for token, p in enumerate(self.target[text])
            if p
            for longer, mass in self.target_law((*text, token), length).items()
        }


def normalised(weights):
    return [Fraction(int(weight), int(sum(weights))) for weight in weights]


def some_zeros(rng, vocabulary):
    weights = rng.integers(1, 10, vocabulary) * (rng.random(vocabulary) < 0.5)
    weights[rng.integers(vocabulary)] += 1
    return weights


def random_pair(rng, vocabulary):
    return rng.integers(1, 10, (2, vocabulary))


def pair_with_zeros(rng, vocabulary):
    return some_zeros(rng, vocabulary), some_zeros(rng, vocabulary)


def disjoint_pair(rng, vocabulary):
    part = np.zeros(vocabulary, dtype=int)
    part[rng.permutation(vocabulary)[: rng.integers(1, vocabulary)]] = 1
    return rng.integers(1, 10, vocabulary) * part, rng.integers(1, 10, vocabulary) * (1 - part)


def pair_of_one_hots(rng, vocabulary):
    """One of them, or both."""
    rows = rng.integers(1, 10, (2, vocabulary))
    for row in ((0,), (1,), (0, 1))[rng.integers(3)]:
        rows[row] = np.arange(vocabulary) == rng.integers(vocabulary)
    return rows


def equal_pair(rng, vocabulary):
    weights = some_zeros(rng, vocabulary)
    return weights, weights


def nearly_equal_pair(rng, vocabulary):
    weights = rng.integers(1, 10, vocabulary) * 10**6
    return weights, weights + rng.integers(-3, 4, vocabulary)


PAIRS = {
    "random": random_pair,
    "zeros": pair_with_zeros,
    "disjoint": disjoint_pair,
    "one-hot": pair_of_one_hots,
    "equal": equal_pair,
    "nearly equal": nearly_equal_pair,
}


@functools.cache
def world(kind, vocabulary, depth, adaptive=False, seed=0, cycles=1):
    """Rows of one kind; or mixed, where every text has a kind of its own."""
    rng = np.random.default_rng([vocabulary, depth, adaptive, seed, *kind.encode()])
    target, drafter, stops = {}, {}, set()
    for length in range(cycles * (depth + 1)):
        for text in itertools.product(range(vocabulary), repeat=length):
            pair = PAIRS[rng.choice(list(PAIRS)) if kind == "mixed" else kind]
            target[text], drafter[text] = map(normalised, pair(rng, vocabulary))
            if adaptive and text and rng.random() < 0.4:
                stops.add(text)
    return World(vocabulary, depth, target, drafter, frozenset(stops))


# --- Cycles ---------------------------------------------------------------------------------------


class FreshNoise:
    """Every number is new, in every cycle."""

    def __init__(self, outcomes, start):
        self.outcomes = self.deciding = outcomes

    def drafting(self, position):
        return self.outcomes

    def race(self, position):
        return self.outcomes.race(object())


def cycle(world, text, noise, verify):
    """(drafted, emitted) of one cycle behind `text`."""
    coupled = verify is verify_draft_coupled
    races = [noise.race(len(text) + i) for i in range(world.depth + 1)] if coupled else []
    draft = ()
    while len(draft) < world.depth and text + draft not in world.stops:
        q, position = world.drafter[text + draft], len(text + draft)
        token = (
            exponential_race(q, races[len(draft)])
            if coupled
            else sample_from_distribution(q, noise.drafting(position))
        )
        draft += (token,)
    p = [world.target[text + draft[:i]] for i in range(len(draft) + 1)]
    q = [world.drafter[text + draft[:i]] for i in range(len(draft))]
    if coupled:
        return draft, tuple(verify(p, draft, races[: len(p)]))
    return draft, tuple(verify(p, q, draft, noise.deciding))


def one_cycle(world, verify):
    """The law of (drafted, emitted)."""
    return Outcomes().law(lambda rng: cycle(world, (), FreshNoise(rng, 0), verify))


def emitted(law):
    """Of a law of (drafted, emitted), the law of what is emitted."""
    marginal = defaultdict(Fraction)
    for (_, tokens), probability in law.items():
        marginal[tokens] += probability
    return marginal


def two_cycles(world, verify, noise=FreshNoise):
    """The law of what two cycles emit, of which the second drafts and verifies anew."""

    def run(rng):
        _, first = cycle(world, (), noise(rng, 0), verify)
        _, then = cycle(world, first, noise(rng, len(first)), verify)
        return first + then

    return Outcomes().law(run)


def distance(world, law, cycles=1):
    """Total variation from the target to `law`, over the text of so many whole cycles.

    Where a text is shorter, plain sampling writes what is missing.
    """
    length = cycles * (world.depth + 1)
    off = defaultdict(Fraction)
    for tokens, probability in law.items():
        for text, mass in world.target_law(tokens, length).items():
            off[text] += probability * mass
    for text, mass in world.target_law((), length).items():
        off[text] -= mass
    return sum(map(abs, off.values())) / 2


SIZES = [(2, 1), (2, 2), (2, 3), (3, 1), (3, 2), (3, 3), (4, 1), (4, 2)]
NAMES = [
    (kind, *size, adaptive, seed)
    for kind in [*PAIRS, "mixed"]
    for size in SIZES
    for adaptive in (False, True)
    for seed in range(3 if kind == "mixed" else 1)
    if size[1] > 1 or not adaptive
]
NAMES += [(kind, 4, 3, adaptive) for kind in ("random", "mixed") for adaptive in (False, True)]
WORLDS = pytest.mark.parametrize("name", NAMES, ids=lambda name: " ".join(map(str, name)))
TOKEN_AND_BLOCK = pytest.mark.parametrize("verify", [verify_draft_token, verify_draft_block])


@functools.cache
def enumerated(name, verify):
    return one_cycle(world(*name), verify)


# --- One cycle ------------------------------------------------------------------------------------


@WORLDS
@TOKEN_AND_BLOCK
def test_what_is_emitted_follows_the_target_exactly(name, verify):
    law = emitted(enumerated(name, verify))
    assert all(isinstance(probability, Fraction) for probability in law.values())
    assert sum(law.values()) == 1
    assert distance(world(*name), law) == 0


def kept(law):
    """Of a law of (drafted, emitted): how many drafted tokens are kept, in expectation."""
    return sum(probability * (len(tokens) - 1) for (_, tokens), probability in law.items())


@WORLDS
def test_block_keeps_at_least_as_much_as_token(name):
    assert kept(enumerated(name, verify_draft_block)) >= kept(enumerated(name, verify_draft_token))


def test_block_keeps_more_where_a_draft_recovers():
    both = [verify_draft_block, verify_draft_token]
    for seed in range(10):
        block, token = (kept(one_cycle(world("random", 2, 3, seed=seed), rule)) for rule in both)
        assert block > 1.02 * token
    # A draft of one token has nothing to recover with.
    block, token = (kept(one_cycle(world("random", 4, 1), rule)) for rule in both)
    assert block == token


@WORLDS
@TOKEN_AND_BLOCK
def test_every_drafted_prefix_is_kept_as_often_as_the_papers_say(name, verify):
    """Given its first i tokens, a draft is kept to i or beyond with a probability in closed form.

    It is the product of the ratios' minima with 1 for the token rule; and for block the same with
    the minimum taken of the product so far.
    """
    it, law = world(*name), enumerated(name, verify)
    drafted, held = defaultdict(Fraction), defaultdict(Fraction)
    for (draft, tokens), probability in law.items():
        for i in range(1, len(draft) + 1):
            drafted[draft[:i]] += probability
            held[draft[:i]] += probability * (len(tokens) > i)
    for draft in drafted:
        expected = Fraction(1)
        for i, token in enumerate(draft):
            ratio = it.target[draft[:i]][token] / it.drafter[draft[:i]][token]
            if verify is verify_draft_block:
                expected = min(1, expected * ratio)
            else:
                expected *= min(1, ratio)
        assert held[draft] == drafted[draft] * expected


# --- Two cycles -----------------------------------------------------------------------------------

TWO_CYCLES = [
    ("mixed", 2, 1, False),
    ("random", 2, 2, False),
    ("mixed", 2, 2, True),
    ("zeros", 3, 1, False),
    ("mixed", 3, 2, True),
]


@pytest.mark.parametrize("name", TWO_CYCLES, ids=str)
@TOKEN_AND_BLOCK
def test_two_cycles_in_a_row_are_exact(name, verify):
    it = world(*name, cycles=2)
    assert distance(it, two_cycles(it, verify), cycles=2) == 0


class NoiseByPosition:
    """Noise that is met again where a position is drafted again.

    All but the number that draws a correction or a bonus: no position needs it twice.
    """

    def __init__(self, outcomes, start):
        self.outcomes, self.next = outcomes, start
        self.deciding, self.ending = self, outcomes

    def random(self):
        self.next += 1
        return self.outcomes.uniform(("accept", self.next - 1))

    def drafting(self, position):
        return _Number(self.outcomes.uniform(("draft", position)))

    def race(self, position):
        return self.outcomes.race(("race", position))


class _Number(NamedTuple):
    value: object

    def random(self):
        return self.value


class DraftedByPosition(NoiseByPosition):
    """Only what is drafted meets its noise again."""

    def random(self):
        return self.outcomes.random()


class NoiseByPositionAndCycle(NoiseByPosition):
    def __init__(self, outcomes, start):
        super().__init__(_Prefixed(outcomes, start), start)


class _Prefixed:
    """Outcomes whose keys hold the cycle's first position too."""

    def __init__(self, outcomes, start):
        self.outcomes, self.start = outcomes, start
        self.random = outcomes.random

    def uniform(self, key):
        return self.outcomes.uniform((self.start, *key))


@pytest.fixture
def ending_apart(monkeypatch):
    """Lets the verifiers, which draw from one generator, draw corrections and bonuses apart."""

    def draw(probabilities, rng):
        return sample_from_distribution(probabilities, rng.ending)

    monkeypatch.setattr(sampling, "sample_from_distribution", draw)
    monkeypatch.setattr(speculative, "sample_from_distribution", draw)


def test_blocks_noise_needs_the_cycle_in_its_key(ending_apart):
    """P(0, 0) is 1/4, and comes out otherwise where noise depends on the position alone.

    Block rejects the first token also because of the second one and its number. If those are the
    same in the next cycle, what it drafts and keeps there depends on having been rejected.
    """
    half, skew = [Fraction(1, 2)] * 2, [Fraction(1, 4), Fraction(3, 4)]
    texts = world("random", 2, 2, cycles=2).target
    it = World(2, 2, dict.fromkeys(texts, half), dict.fromkeys(texts, skew))

    def of_two_zeros(noise):
        law = two_cycles(it, verify_draft_block, noise)
        return sum(probability for text, probability in law.items() if text[:2] == (0, 0))

    assert of_two_zeros(DraftedByPosition) == Fraction(5, 24)
    assert of_two_zeros(NoiseByPosition) == Fraction(11, 48)
    assert of_two_zeros(NoiseByPositionAndCycle) == Fraction(1, 4)


@pytest.mark.parametrize("kind", ["random", "mixed"])
def test_noise_by_position_is_enough_for_the_other_verifiers(ending_apart, kind):
    it = world(kind, 2, 2, cycles=2)
    for verify, noise in (
        (verify_draft_token, NoiseByPosition),
        (verify_draft_coupled, NoiseByPosition),
        (verify_draft_block, NoiseByPositionAndCycle),
    ):
        assert distance(it, two_cycles(it, verify, noise), cycles=2) == 0


@TOKEN_AND_BLOCK
def test_depth_learned_from_void_drafts_needs_the_cycle_in_the_noises_key(ending_apart, verify):
    """The second cycle drafts or not by the first one's last draft, which was perhaps void.

    With noise by position alone the choice would say something about what is then drafted there.
    """
    half, skew = [Fraction(1, 2)] * 2, [Fraction(1, 4), Fraction(3, 4)]
    texts = world("random", 2, 2, cycles=2).target
    it = World(2, 2, dict.fromkeys(texts, half), dict.fromkeys(texts, skew))

    def law(noise):
        def run(rng):
            draft, first = cycle(it, (), noise(rng, 0), verify)
            then = it if draft[-1] else replace(it, depth=0)
            return first + cycle(then, first, noise(rng, len(first)), verify)[1]

        return Outcomes().law(run)

    assert distance(it, law(NoiseByPosition), cycles=2) > Fraction(1, 100)
    assert distance(it, law(NoiseByPositionAndCycle), cycles=2) == 0


# --- Coupled --------------------------------------------------------------------------------------


def fractions_01(rng):
    return normalised(some_zeros(rng, 2) * rng.integers(1, 50, 2))


def agreement(p, q):
    """The closed form of how often two races with the same exponentials have the same winner."""
    both = [x for x in range(len(p)) if p[x] and q[x]]
    return sum(1 / sum(max(p[y] / p[x], q[y] / q[x]) for y in range(len(p))) for x in both)


def test_a_race_of_two_is_won_with_probability_p_exactly():
    rng = np.random.default_rng(0)
    for _ in range(50):
        p = fractions_01(rng)
        law = Outcomes().law(lambda rng, p=p: [exponential_race(p, rng.race("it"))])
        assert law == {(x,): mass for x, mass in enumerate(p) if mass}


def test_two_races_with_the_same_noise_agree_as_the_closed_form_says():
    rng = np.random.default_rng(1)
    for _ in range(50):
        p, q = fractions_01(rng), fractions_01(rng)

        def run(rng, p=p, q=q):
            return [exponential_race(row, rng.race("it")) for row in (p, q)]

        agree = sum(mass for (a, b), mass in Outcomes().law(run).items() if a == b)
        assert agree == agreement(p, q)
        # The token rule's acceptance bounds it, and is not far (Daliri et al. 2024).
        overlap = sum(map(min, p, q))
        assert overlap / (2 - overlap) <= agree <= overlap


@pytest.mark.parametrize("kind", [*PAIRS, "mixed"])
@pytest.mark.parametrize(("depth", "adaptive"), [(1, False), (2, False), (2, True), (3, True)])
def test_coupled_cycles_follow_the_target_exactly(kind, depth, adaptive):
    it = world(kind, 2, depth, adaptive, cycles=2)
    assert distance(it, emitted(one_cycle(it, verify_draft_coupled))) == 0
    if depth < 3:
        assert distance(it, two_cycles(it, verify_draft_coupled), cycles=2) == 0


def test_coupled_text_is_a_function_of_target_and_noise():
    """However it is drafted, and if it is: for every way in which the noise can fall."""
    it = world("random", 2, 2)
    drafters = [it.drafter, world("zeros", 2, 2).drafter, it.target]

    def run(rng):
        texts = []
        for drafter, depth in [(it.drafter, 0), *itertools.product(drafters, (1, 2))]:
            text = ()
            while len(text) < 3:
                drafted_by = replace(it, drafter=drafter, depth=min(depth, 2 - len(text)))
                noise = NoiseByPosition(rng, len(text))
                text += cycle(drafted_by, text, noise, verify_draft_coupled)[1]
            texts.append(text)
        return texts

    law = Outcomes().law(run)
    assert len({texts[0] for texts in law}) == 8
    assert all(len(set(texts)) == 1 for texts in law)


def race_pairs():
    rng = np.random.default_rng(2)
    p = rng.dirichlet(np.full(6, 0.7))
    yield p, rng.dirichlet(np.full(6, 0.7))
    yield p, 0.8 * p + 0.2 / 6
    with_zeros = np.array([[0.5, 0.0, 0.2, 0.3, 0.0], [0.0, 0.4, 0.3, 0.25, 0.05]])
    yield tuple(with_zeros)
    peaked = np.full(50, 1e-3)
    peaked[7] += 0.95
    yield peaked, np.full(50, 0.02)


@pytest.mark.parametrize("pair", range(4))
def test_races_among_many_follow_the_closed_forms(pair):
    p, q = list(race_pairs())[pair]
    rng = np.random.default_rng(3)
    runs = 20_000
    noise = rng.standard_exponential((runs, p.size))
    winners = np.array([[exponential_race(row, e) for row in (p, q)] for e in noise])
    for row, won in zip((p, q), winners.T, strict=True):
        counts = np.bincount(won, minlength=p.size)
        assert (counts[row == 0] == 0).all()
        assert stats.chisquare(counts[row > 0], runs * row[row > 0]).pvalue > 1e-3
    agree = int((winners[:, 0] == winners[:, 1]).sum())
    assert stats.binomtest(agree, runs, agreement(p, q)).pvalue > 1e-3


class Tape:
    """Exponentials by absolute position, as a counter-based generator would give them."""

    def __init__(self, rows):
        self.rows, self.position = rows, 0

    def standard_exponential(self, shape):
        rows = self.rows[self.position : self.position + shape[0]]
        assert rows.shape == shape
        return rows


@pytest.mark.parametrize(
    "config",
    [
        SamplerConfig(),
        SamplerConfig(temperature=0),
        SamplerConfig(temperature=0.7, top_k=5, top_p=0.9),
        SamplerConfig(repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.7),
    ],
    ids=["plain", "greedy", "filtered", "penalised"],
)
def test_speculative_decode_coupled_writes_the_text_of_depth_0(config):
    length, vocabulary = 40, 12
    rng = np.random.default_rng(4)
    target = rng.normal(size=(length + 5, vocabulary)) * 2
    drafters = {
        "other": rng.normal(size=target.shape) * 2,
        "near": target + 0.3 * rng.normal(size=target.shape),
        "same": target,
    }
    tape = Tape(rng.standard_exponential((length + 5, vocabulary)))

    def write(draft, depth):
        text, cycles = [], 0
        while len(text) < length:
            tape.position = at = len(text)
            rows = target[at : at + depth + 1], draft[at : at + depth]
            text += speculative_decode(
                *rows, config, depth, tape, verifier="coupled", prompt_ids=[3, 3], output_ids=text
            )
            cycles += 1
        return text[:length], cycles

    plain, cycles = write(target, 0)
    assert cycles == length
    needed = defaultdict(list)
    for depth in range(1, 5):
        for name, draft in drafters.items():
            text, cycles = write(draft, depth)
            assert text == plain
            needed[name].append(cycles)
        assert needed["same"][-1] == -(-length // (depth + 1))
    assert (np.array(needed["near"]) < needed["other"]).all()
    assert (np.array(needed["other"]) < length).any()


def test_speculative_decode_is_exact_with_every_verifier():
    """The whole function in float64, softmax and all, where two tokens make coupled enumerable."""
    rng = np.random.default_rng(5)
    target, draft = rng.normal(size=(3, 2)), rng.normal(size=(2, 2))
    config = SamplerConfig(temperature=0.8, frequency_penalty=0.6)

    def law(depth, verifier):
        def run(rng):
            text = []
            while len(text) < 3:
                left = min(depth, 2 - len(text))
                rows = target[len(text) :][: left + 1], draft[len(text) :][:left]
                text += speculative_decode(
                    *rows, config, left, rng, verifier=verifier, output_ids=text
                )
            return text

        return Outcomes().law(run)

    plain = law(0, "token")
    assert len(plain) == 8
    for verifier in ("token", "block", "coupled"):
        got = law(2, verifier)
        assert max(abs(got[text] - plain[text]) for text in plain) < 1e-15


# --- Rules that are nearly right ------------------------------------------------------------------


def weight_not_clamped(patch):
    """Lets w grow past 1, as a bare product of ratios."""

    def wrong(target_p, draft_q, draft):
        weights = [Fraction(1)]
        for p, q, token in zip(target_p, draft_q, draft, strict=False):
            weights.append(weights[-1] * p[token] / q[token])
        chances = []
        for w, p, q in zip(weights[1:], target_p[1:], draft_q[1:], strict=False):
            left = sum(max(w * a - b, 0) for a, b in zip(p, q, strict=True))
            chances.append(left / (left + 1 - w) if left + 1 > w else Fraction(1))
        return [min(w, 1) for w in weights], [*chances, *weights[1:][-1:]]

    patch.setattr(speculative, "block_acceptance", wrong)


def chance(rule):
    """Replaces h_i for i < K by ``rule(w_i, p_{i+1}, q_{i+1})``."""

    def plant(patch):
        def wrong(target_p, draft_q, draft):
            weights, chances = block_acceptance(target_p, draft_q, draft)
            rows = zip(weights[1:], target_p[1:], draft_q[1:], strict=False)
            return weights, [*(rule(*row) for row in rows), *chances[-1:]]

        patch.setattr(speculative, "block_acceptance", wrong)

    plant.__name__ = rule.__name__
    return plant


def left_over(w, p, q):
    return sum(max(w * a - b, 0) for a, b in zip(p, q, strict=True))


@chance
def chance_without_the_rest_of_the_weight(w, p, q):
    return Fraction(1 if left_over(w, p, q) else 0)


@chance
def chance_is_what_is_left(w, p, q):
    return left_over(w, p, q)


@chance
def chance_is_the_weight(w, p, q):
    return w


@chance
def chance_with_weight_1(w, p, q):
    return left_over(1, p, q) / (left_over(1, p, q) + 1 - w) if w < 1 else Fraction(1)


@chance
def only_all_or_nothing(w, p, q):
    return Fraction(0)


def residual_of_weight_1(patch):
    def wrong(p, q, weight):
        return residual_distribution(p, q)

    patch.setattr(speculative, "block_residual_distribution", wrong)


def correction_from_the_target(patch):
    patch.setattr(speculative, "block_residual_distribution", lambda p, q, weight: p)
    patch.setattr(sampling, "residual_distribution", lambda p, q: p)


def block_with(choose, ahead=0):
    """Block verification with another choice of how much is kept, or of the correction's rows."""

    def wrong(target_p, draft_q, draft, rng):
        weights, chances = block_acceptance(target_p, draft_q, draft)
        count = choose(chances, rng)
        p = target_p[count]
        if count < len(draft):
            at = max(count + ahead, 0)
            p = block_residual_distribution(target_p[at], draft_q[at], weights[count])
        return [*draft[:count], sample_from_distribution(p, rng)]

    return wrong


def last_that_passes(chances, rng):
    passed = [rng.random() < chance for chance in chances]
    return max((i for i, passes in enumerate(passed, 1) if passes), default=0)


def up_to_the_first_failure(chances, rng):
    passed = [rng.random() < chance for chance in chances]
    return sum(itertools.accumulate(passed, min))


def first_that_passes(chances, rng):
    passed = [rng.random() < chance for chance in chances]
    return next((i for i, passes in enumerate(passed, 1) if passes), 0)


def one_number_for_all(chances, rng):
    u = rng.random()
    return max((i for i, chance in enumerate(chances, 1) if u < chance), default=0)


def bonus_from_the_drafter(verify):
    def wrong(target_p, draft_q, draft, rng):
        return verify([*target_p[:-1], (draft_q or target_p)[-1]], draft_q, draft, rng)

    return wrong


def last_token_dropped_for_what_it_is(verify):
    """Drops a drawn token where the drafter was unsure of it. To stop behind it would be right."""

    def wrong(target_p, draft_q, draft, rng):
        if draft and draft_q[-1][draft[-1]] < Fraction(1, 2):
            target_p, draft_q, draft = target_p[:-1], draft_q[:-1], draft[:-1]
        return verify(target_p, draft_q, draft, rng)

    return wrong


def match_then_residual(target_p, draft_q, draft, rng):
    """Keeps a token when a draw from the target equals it, and else corrects by the residual."""
    for i, token in enumerate(draft):
        if sample_from_distribution(target_p[i], rng) != token:
            residual = residual_distribution(target_p[i], draft_q[i])
            return [*draft[:i], sample_from_distribution(residual, rng)]
    return [*draft, sample_from_distribution(target_p[-1], rng)]


def one_number_for_both(target_p, draft_q, draft, rng):
    """Draws the correction with the number that has just rejected the token."""

    class Repeated:
        def random(self):
            self.number = getattr(self, "number", None) or rng.random()
            return self.number

    for i, token in enumerate(draft):
        decision = sampling.verify_one_token(target_p[i], draft_q[i], token, Repeated())
        if not decision.accepted:
            return [*draft[:i], decision.token_id]
    return [*draft, sample_from_distribution(target_p[-1], rng)]


STAGE = ("random", 3, 3)


def test_the_right_rules_pass_where_the_wrong_ones_fail():
    """The variants differ from block's rule by what their names say: this one does not."""
    for verify in (verify_draft_token, verify_draft_block, block_with(last_that_passes)):
        assert distance(world(*STAGE), emitted(one_cycle(world(*STAGE), verify))) == 0


@pytest.mark.parametrize(
    "verify",
    [
        pytest.param(block_with(up_to_the_first_failure), id="block up to the first failure"),
        pytest.param(block_with(first_that_passes), id="block first that passes"),
        pytest.param(block_with(one_number_for_all), id="block one number for all"),
        pytest.param(block_with(last_that_passes, ahead=-1), id="block correction one row early"),
        pytest.param(bonus_from_the_drafter(verify_draft_token), id="token bonus from q"),
        pytest.param(bonus_from_the_drafter(verify_draft_block), id="block bonus from q"),
        pytest.param(last_token_dropped_for_what_it_is(verify_draft_token), id="token dropped"),
        pytest.param(last_token_dropped_for_what_it_is(verify_draft_block), id="block dropped"),
        match_then_residual,
        one_number_for_both,
    ],
)
def test_a_rule_that_is_nearly_right_is_found_out(verify):
    assert distance(world(*STAGE), emitted(one_cycle(world(*STAGE), verify))) > Fraction(1, 100)


@pytest.mark.parametrize(
    ("plant", "verify"),
    [
        (weight_not_clamped, verify_draft_block),
        (chance_without_the_rest_of_the_weight, verify_draft_block),
        (chance_is_what_is_left, verify_draft_block),
        (chance_is_the_weight, verify_draft_block),
        (chance_with_weight_1, verify_draft_block),
        (only_all_or_nothing, verify_draft_block),
        (residual_of_weight_1, verify_draft_block),
        (correction_from_the_target, verify_draft_block),
        (correction_from_the_target, verify_draft_token),
    ],
)
def test_a_part_that_is_nearly_right_is_found_out(monkeypatch, plant, verify):
    plant(monkeypatch)
    assert distance(world(*STAGE), emitted(one_cycle(world(*STAGE), verify))) > Fraction(1, 400)
