"""The cycle: every outcome enumerated on small vocabularies, and wrong rules caught by it."""

import itertools
import math
from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
from enumeration import Outcomes
from scipy import stats

from mtplx import sampling, speculative
from mtplx.sampling import SamplerConfig, SpeculativeDecision, distribution_from_logits
from mtplx.speculative import (
    speculative_decode,
    verify_draft_block,
    verify_draft_coupled,
    verify_draft_token,
)

# --- The enumerator -------------------------------------------------------------------------------


@pytest.fixture
def outcomes():
    return Outcomes()


def autoregressive_law(target, prefix, length):
    """Joint law of the tokens from `prefix` up to `length`, where target(prefix) is [V]."""
    if len(prefix) == length:
        return {prefix: 1.0}
    law = {}
    for token, p in enumerate(target(prefix)):
        for text, mass in autoregressive_law(target, (*prefix, token), length).items():
            law[text] = p * mass
    return law


def speculative_law(outcomes, cycle, target, length):
    """The same, where a cycle emits the first tokens and plain decoding the rest."""
    law = defaultdict(float)
    for emitted, probability in outcomes(cycle):
        assert 1 <= len(emitted) <= length
        for text, mass in autoregressive_law(target, tuple(emitted), length).items():
            law[text] += probability * mass
    return law


def deviation(law, expected):
    return max(abs(law.get(text, 0) - expected.get(text, 0)) for text in {*law, *expected})


def compare(outcomes, target_logits, draft_logits, config, depth, verifier="token", **history):
    """How far the law of `speculative_decode`, continued, is from the target's."""
    rows = np.broadcast_to(target_logits, (depth + 1, np.shape(target_logits)[-1]))
    output_ids = history.get("output_ids", [])

    def target(prefix):
        return distribution_from_logits(
            rows[len(prefix)],
            config,
            prompt_ids=history.get("prompt_ids"),
            output_ids=[*output_ids, *prefix],
        )

    def cycle(rng):
        return speculative_decode(
            target_logits, draft_logits, config, depth, rng, verifier=verifier, **history
        )

    law = speculative_law(outcomes, cycle, target, depth + 1)
    assert sum(law.values()) == pytest.approx(1, abs=1e-12)
    return deviation(law, autoregressive_law(target, (), depth + 1))


CONFIGS = {
    "plain": SamplerConfig(),
    "greedy": SamplerConfig(temperature=0),
    "warm": SamplerConfig(temperature=1.8),
    "top-k": SamplerConfig(temperature=0.7, top_k=2),
    "top-p": SamplerConfig(top_p=0.7),
    "min-p": SamplerConfig(min_p=0.4),
    "bias": SamplerConfig(logit_bias={0: -math.inf, 2: 1.0}),
    "penalties": SamplerConfig(
        repetition_penalty=1.7, presence_penalty=0.5, frequency_penalty=0.8, top_p=0.9
    ),
}


def random_rows(rng, depth, vocabulary):
    return rng.normal(size=(depth + 1, vocabulary)) * 1.5, rng.normal(
        size=(depth, vocabulary)
    ) * 1.5


# --- The law --------------------------------------------------------------------------------------

TOKEN_AND_BLOCK = pytest.mark.parametrize("verifier", ["token", "block"])


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(("depth", "vocabulary"), [(0, 4), (1, 4), (2, 3), (3, 3)])
@TOKEN_AND_BLOCK
def test_the_joint_law_is_the_targets(outcomes, name, depth, vocabulary, verifier):
    rng = np.random.default_rng([depth, vocabulary])
    for _ in range(2):
        target, draft = random_rows(rng, depth, vocabulary)
        assert compare(outcomes, target, draft, CONFIGS[name], depth, verifier) < 1e-12


@pytest.mark.parametrize("name", ["plain", "greedy", "warm", "top-p", "penalties"])
@pytest.mark.parametrize("depth", [0, 1, 3])
def test_the_joint_law_is_the_targets_coupled(outcomes, name, depth):
    """Over two tokens, where the race is enumerable."""
    target, draft = random_rows(np.random.default_rng(depth), depth, 2)
    assert compare(outcomes, target, draft, CONFIGS[name], depth, "coupled") < 1e-12


@TOKEN_AND_BLOCK
def test_penalties_follow_the_history_into_the_draft(outcomes, verifier):
    rng = np.random.default_rng(7)
    target, draft = random_rows(rng, 2, 3)
    config = CONFIGS["penalties"]
    history = {"prompt_ids": [0, 0], "output_ids": [1, 1, 2]}
    assert compare(outcomes, target, draft, config, 2, verifier, **history) < 1e-12


@pytest.mark.parametrize("verifier", ["token", "block", "coupled"])
def test_a_drafter_that_is_the_target_is_never_rejected(verifier):
    """Also where penalties look at the draft: both see the same history at every position."""
    rows = np.random.default_rng(8).normal(size=(4, 5))
    for seed in range(30):
        rng = np.random.default_rng(seed)
        config = CONFIGS["penalties"]
        emitted = speculative_decode(
            rows, rows[:3], config, 3, rng, verifier=verifier, output_ids=[0, 4]
        )
        assert len(emitted) == 4


@TOKEN_AND_BLOCK
def test_disjoint_equal_and_partly_forbidden_rows(outcomes, verifier):
    no = -math.inf
    target = np.array([[0.0, 1.0, no], [no, 0.0, no], [0.3, no, 1.0]])
    for draft in (
        np.array([[no, no, 0.0], [0.0, no, 0.0]]),  # shares no token with the target
        np.array([[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]),
        target[:2],
    ):
        assert compare(outcomes, target, draft, SamplerConfig(), 2, verifier) < 1e-12


def test_one_row_stands_for_every_position(outcomes):
    target, draft = np.array([0.0, 1.0, -1.0]), np.array([1.0, 0.0, 0.5])
    assert compare(outcomes, target, draft, CONFIGS["top-p"], 3) < 1e-12
    rows = (np.tile(target, (4, 1)), np.tile(draft, (3, 1)))
    for seed in range(20):
        config = SamplerConfig(seed=seed)
        assert speculative_decode(target, draft, config, 3) == speculative_decode(*rows, config, 3)


def model_law(outcomes, target, drafter, depth):
    """Law of a cycle whose rows depend on the text so far: p = target(prefix), q = drafter(prefix).

    Drafted tokens are enumerated here; the verdict on each draft is `verify_draft_token`'s own.
    """
    law = defaultdict(float)
    for draft, drafted in autoregressive_law(drafter, (), depth).items():
        if drafted == 0:
            continue
        p = [target(draft[:i]) for i in range(depth + 1)]
        q = [drafter(draft[:i]) for i in range(depth)]
        verdict = speculative_law(
            outcomes,
            lambda rng, p=p, q=q, draft=draft: verify_draft_token(p, q, draft, rng),
            target,
            depth + 1,
        )
        for text, mass in verdict.items():
            law[text] += drafted * mass
    return law


@pytest.mark.parametrize(("depth", "vocabulary"), [(1, 4), (2, 3), (3, 3)])
def test_rows_that_depend_on_the_text(outcomes, depth, vocabulary):
    rng = np.random.default_rng(depth)
    prefixes = [
        prefix
        for length in range(depth + 1)
        for prefix in itertools.product(range(vocabulary), repeat=length)
    ]
    tables = []
    for sharpness in (1.0, 0.4):
        rows = rng.dirichlet([sharpness] * vocabulary, size=len(prefixes))
        rows[::3, 0] = 0  # some tokens forbidden
        tables.append(dict(zip(prefixes, rows / rows.sum(-1, keepdims=True), strict=True)))
    target, drafter = (table.__getitem__ for table in tables)
    law = model_law(outcomes, target, drafter, depth)
    assert deviation(law, autoregressive_law(target, (), depth + 1)) < 1e-12


# --- Wrong rules must show ------------------------------------------------------------------------

ROWS = (
    np.array([[1.0, 0.6, -2.0, -2.0], [0.2, 1.0, 0.5, -1.0], [0.0, 0.3, 0.6, 0.9]]),
    np.array([[1.5, 0.2, 0.0, 0.0], [1.0, 0.8, 0.5, 0.5]]),
)
FILTERED = SamplerConfig(temperature=0.6, top_k=2)


def test_the_right_rule_passes_where_the_wrong_ones_fail(outcomes):
    for config in (SamplerConfig(), FILTERED):
        assert compare(outcomes, *ROWS, config, 2) < 1e-12


def test_a_correction_drawn_from_the_target_fails(outcomes, monkeypatch):
    monkeypatch.setattr(sampling, "residual_distribution", lambda p, q: p)
    assert compare(outcomes, *ROWS, SamplerConfig(), 2) > 0.01


def test_q_from_raw_logits_fails(outcomes, monkeypatch):
    """Drafts come from filtered logits, but verification is told the unfiltered distribution."""
    raw_q = [distribution_from_logits(row, SamplerConfig()) for row in ROWS[1]]

    def told_raw_q(target_p, draft_q, draft, rng):
        return verify_draft_token(target_p, raw_q, draft, rng)

    monkeypatch.setattr(speculative, "verify_draft_token", told_raw_q)
    assert compare(outcomes, *ROWS, FILTERED, 2) > 0.01


def test_going_on_after_a_rejection_fails(outcomes, monkeypatch):
    verify = sampling.verify_one_token

    def never_stops(*arguments):
        decision = verify(*arguments)
        return SpeculativeDecision(True, decision.token_id, decision.acceptance_prob)

    monkeypatch.setattr(speculative, "verify_one_token", never_stops)
    # Rows that do not look at the text would forgive it: it shows where they do.
    config = CONFIGS["penalties"]
    assert compare(outcomes, *ROWS, config, 2) > 0.01


# --- One cycle ------------------------------------------------------------------------------------


def sure(*tokens, vocabulary=4):
    """Logits that leave no choice: row i is all `tokens[i]`."""
    rows = np.full((len(tokens), vocabulary), -np.inf)
    rows[range(len(tokens)), tokens] = 0.0
    return rows


def test_a_cycle_emits_the_accepted_prefix_and_one_more():
    config = SamplerConfig(seed=0)
    assert speculative_decode(sure(1, 2, 3), sure(1, 2), config, 2) == [1, 2, 3]
    assert speculative_decode(sure(1, 2, 3), sure(1, 0), config, 2) == [1, 2]
    assert speculative_decode(sure(1, 2, 3), sure(0, 2), config, 2) == [1]
    emitted = speculative_decode(sure(1, 2), sure(1), config, np.int64(1))
    assert emitted == [1, 2] and all(type(token) is int for token in emitted)


def test_block_keeps_up_to_the_last_that_passes_and_always_asks_for_k_numbers():
    """A draft whose chances are 1/4 and 3/4: what fails in the middle is kept from behind."""
    half, bonus = [0.5, 0.5, 0.0], [0.0, 0.0, 1.0]
    p, q = [half, [0.375, 0.5, 0.125], bonus], [[0.8, 0.1, 0.1], [0.25, 0.25, 0.5]]
    weights, chances = sampling.block_acceptance(p, q, [0, 0])
    first, second = chances
    assert second == weights[2] == 0.9375 and 0 < first < weights[1] == 0.625

    def run(*numbers):
        script = iter(numbers)
        rng = SimpleNamespace(random=lambda: next(script))
        emitted = verify_draft_block(p, q, np.array([0, 0]), rng)
        assert next(script, None) is None
        assert all(type(token) is int for token in emitted)
        return emitted

    below, above = math.nextafter(first, 0), first
    assert run(below, math.nextafter(second, 0), 0.0) == [0, 0, 2]
    assert run(above, math.nextafter(second, 0), 0.0) == [0, 0, 2]
    # The correction behind one token has the weight 5/8: only token 1 has more than q left.
    assert run(below, second, 0.0) == run(below, second, 0.999) == [0, 1]
    # Behind none it has the weight 1.
    assert run(above, second, 0.0) == run(above, second, 0.999) == [1]


def test_coupled_emits_the_targets_winners_while_the_draft_equals_them():
    p = [[0.5, 0.5], [0.9, 0.1], [0.2, 0.8]]
    races = [[1.0, 2.0], [9.0, 0.5], [1.0, 8.0]]  # won by 0, 1 and 0
    for draft, emitted in (
        ([0, 1], [0, 1, 0]),
        ([0, 0], [0, 1]),
        ([1, 1], [0]),
        ([], [0]),
    ):
        rows = len(draft) + 1
        assert verify_draft_coupled(p[:rows], draft, races[:rows]) == emitted


@pytest.mark.parametrize("nothing", [[], np.empty((0, 4)), np.zeros(4)], ids=["[]", "0xV", "V"])
def test_depth_0_is_plain_sampling(nothing):
    logits = np.random.default_rng(0).normal(size=(1, 4))
    config = SamplerConfig(temperature=0.7, top_p=0.9)
    for seed in range(50):
        plain = sampling.sample_from_distribution(
            distribution_from_logits(logits[0], config), np.random.default_rng(seed)
        )
        rng = np.random.default_rng(seed)
        assert speculative_decode(logits, nothing, config, 0, rng) == [plain]
    assert speculative_decode(logits[0], nothing, SamplerConfig(temperature=0), 0) == [
        int(logits.argmax())
    ]


def test_randomness_comes_from_the_generator_or_the_seed():
    target = draft = np.zeros(1000)
    config = SamplerConfig(seed=5)
    seeded = speculative_decode(target, draft, config, 3)
    assert seeded == speculative_decode(target, draft, config, 3)
    assert seeded == speculative_decode(target, draft, SamplerConfig(), 3, np.random.default_rng(5))
    assert seeded != speculative_decode(target, draft, SamplerConfig(), 3)
    coupled = speculative_decode(target, draft, config, 3, verifier="coupled")
    noise = np.random.default_rng(5).standard_exponential((4, 1000))
    assert coupled == noise.argmin(1).tolist()


def test_a_generator_draws_the_law():
    """200,000 draws would be the engine's test; here the real generator meets the plain code."""
    target, draft = random_rows(np.random.default_rng(12), 1, 3)
    config = SamplerConfig(temperature=0.8, min_p=0.05)
    p = [distribution_from_logits(row, config) for row in target]
    rng = np.random.default_rng(13)
    counts = np.zeros((3, 3))
    for _ in range(4000):
        emitted = speculative_decode(target, draft, config, 1, rng)
        if len(emitted) == 1:
            emitted.append(sampling.sample_from_distribution(p[1], rng))
        counts[tuple(emitted)] += 1
    expected = 4000 * np.outer(*p)
    assert (counts[expected == 0] == 0).all()
    assert stats.chisquare(counts[expected > 0], expected[expected > 0]).pvalue > 1e-3


# --- Errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [-1, 1.0, True, None, "1"])
def test_a_bad_depth_is_refused(depth):
    with pytest.raises(ValueError, match="depth must be an integer of 0 or more"):
        speculative_decode(np.zeros(3), np.zeros(3), SamplerConfig(), depth)


@pytest.mark.parametrize(
    ("target", "draft", "depth", "message"),
    [
        (np.zeros((2, 3)), np.zeros((2, 3)), 2, r"target_logits must have shape \[3, V\] or \[V\]"),
        (np.zeros((4, 3)), np.zeros((2, 3)), 2, r"at this depth, got \[4, 3\]"),
        (np.zeros((3, 3)), np.zeros((3, 3)), 2, r"draft_logits must have shape \[2, V\] or \[V\]"),
        (np.zeros((1, 3)), np.zeros((1, 3)), 0, r"draft_logits must have shape \[0, V\] or \[V\]"),
        (np.zeros((1, 2, 3)), np.zeros(3), 1, r"got \[1, 2, 3\]"),
        (np.zeros(3), np.zeros(4), 1, "target_logits have 3 tokens and draft_logits 4"),
        (np.zeros(3), [], 1, r"draft_logits must have shape \[..., V\]"),
        ([[0.0, 1.0], [0.0, math.nan]], np.zeros(2), 1, "target_logits have nan at row 1, token 1"),
        (np.zeros(2), [[math.inf, 0.0]], 1, "draft_logits have inf at row 0, token 0"),
        (np.zeros(2), [-math.inf, -math.inf], 1, "draft_logits are -inf at every token"),
    ],
)
def test_bad_rows_are_named(target, draft, depth, message):
    with pytest.raises(ValueError, match=message):
        speculative_decode(target, draft, SamplerConfig(), depth)


@pytest.mark.parametrize("verifier", ["Token", "", None, "greedy"])
def test_an_unknown_verifier_is_refused(verifier):
    with pytest.raises(ValueError, match="verifier must be one of token, block, coupled: got"):
        speculative_decode(np.zeros(3), np.zeros(3), SamplerConfig(), 1, verifier=verifier)


def test_verifying_wants_one_more_row_of_the_targets():
    row, rng = [0.5, 0.5], np.random.default_rng(0)
    for p, q, draft in (([row], [row], [0]), ([row, row], [], [0]), ([row, row], [row], [])):
        for verify in (verify_draft_token, verify_draft_block):
            with pytest.raises(ValueError, match=f"a draft of {len(draft)} tokens needs"):
                verify(p, q, draft, rng)
    for p, draft, races in (([row], [0], [row] * 2), ([row] * 2, [0], [row]), ([], [], [])):
        with pytest.raises(ValueError, match=f"a draft of {len(draft)} tokens needs one more"):
            verify_draft_coupled(p, draft, races)


def test_a_cycle_ends_no_text_before_its_least_length():
    logits = np.array([5.0, 0.0, 0.0])
    config = SamplerConfig(min_tokens=4)
    for seed in range(30):
        emitted = speculative_decode(
            logits, logits, config, 3, np.random.default_rng(seed), output_ids=[1], stop_ids=[0]
        )
        assert 0 not in emitted[:3]
        assert len(emitted) == 4
