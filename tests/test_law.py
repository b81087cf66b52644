"""The engine draws texts from exactly the distribution that plain sampling has.

On a tiny model whose texts can all be enumerated: the joint distribution of the first K + 2
tokens, over many seeds, against the trunk's own probabilities. And the same test with rules that
are nearly right, which it must tell from the right one.
"""

import dataclasses
import gc
import itertools

import numpy as np
import pytest
import tiny
import torch
from scipy import stats

from mtplx.drafters import mtp
from mtplx.engine import decoding
from mtplx.engine.decoding import Batch
from mtplx.engine.request import Request
from mtplx.randomness import Purpose
from mtplx.sampling import SamplerConfig, distribution_from_logits
from mtplx.verification import Verdict, draw, verify

VOCAB = 5
PROMPT = (1, 3, 0)
ROWS = 10_000  # of a batch
THRESHOLD = 0.001

SETTINGS = {
    "filtered": SamplerConfig(temperature=0.8, top_k=4, top_p=0.9),
    "hot": SamplerConfig(temperature=1.8),
    "penalised": SamplerConfig(
        temperature=1.3,
        repetition_penalty=1.5,
        presence_penalty=0.4,
        frequency_penalty=0.6,
        logit_bias={2: 0.5},
    ),
}
# A head that proposes less than all tokens, beside two that propose any.
DRAFT_VOCAB = {"filtered": None, "hot": 3, "penalised": None}


@pytest.fixture(scope="module", autouse=True)
def no_garbage_collection():
    """Half of the time would go into looking through many small requests."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(scope="module")
def trunk():
    return tiny.llama(VOCAB, seed=5, layers=1, heads=1)


@pytest.fixture(scope="module")
def exact(trunk):
    """The joint distribution of the first N tokens, [V] * N, by enumeration."""

    def joint(config, length):
        p = np.ones(())
        for n in range(length):
            prefixes = np.array(list(itertools.product(range(VOCAB), repeat=n)), dtype=int)
            prefixes = prefixes.reshape(VOCAB**n, n)
            texts = np.concatenate([np.tile(PROMPT, (VOCAB**n, 1)), prefixes], axis=1)
            with torch.inference_mode():
                logits = trunk.model(torch.tensor(texts)).logits[:, -1].numpy()
            rows = [
                distribution_from_logits(row, config, prompt_ids=PROMPT, output_ids=prefix)
                for row, prefix in zip(logits, prefixes, strict=True)
            ]
            p = p[..., None] * np.reshape(rows, [VOCAB] * (n + 1))
        return p

    return joint


def observed(trunk, head, config, depth, runs):
    """How often each text of depth + 2 tokens came out, [V] * (depth + 2)."""
    length = depth + 2
    counts = np.zeros([VOCAB] * length, dtype=int)
    for start in range(0, runs, ROWS):
        requests = [
            Request(PROMPT, config, seed, length, depth)
            for seed in range(start, min(start + ROWS, runs))
        ]
        texts = [[] for _ in requests]
        for bursts in Batch(trunk, head, requests).run():
            for burst in bursts:
                texts[burst.index] += burst.tokens
        np.add.at(counts, tuple(np.array(texts).T), 1)
    return counts


def p_value(counts, joint):
    """Of a chi-square test; cells expected fewer than five times are taken together."""
    order = joint.ravel().argsort()
    expected = joint.ravel()[order] * counts.sum()
    seen = counts.ravel()[order]
    if seen[expected == 0].any():
        return 0.0
    # From the rarest on, pool until the pool itself is expected often enough.
    rare = max(int((expected < 5).sum()), int(np.searchsorted(expected.cumsum(), 5)) + 1)
    if expected[0] < 5:
        expected = np.append(expected[rare:], expected[:rare].sum())
        seen = np.append(seen[rare:], seen[:rare].sum())
    return stats.chisquare(seen, expected * (seen.sum() / expected.sum())).pvalue


def measure(trunk, exact, name, depth, runs):
    config = SETTINGS[name]
    head = tiny.attached(trunk, DRAFT_VOCAB[name])
    return p_value(observed(trunk, head, config, depth, runs), exact(config, depth + 2))


@pytest.mark.slow
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("name", SETTINGS)
def test_the_joint_distribution_is_the_targets(trunk, exact, name, depth):
    assert measure(trunk, exact, name, depth, 200_000) > THRESHOLD


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("name", SETTINGS)
def test_the_joint_distribution_is_the_targets_over_fewer_runs(trunk, exact, name, depth):
    assert measure(trunk, exact, name, depth, 10_000) > THRESHOLD


# --- Rules that are nearly right ------------------------------------------------------------------


def q_from_raw_logits(patch):
    """Draws from the filtered distribution, and reports the softmax of the logits for it."""
    original = mtp.HeadSlots.draft

    def drafted(slots, *args):
        raw = []
        logits = slots.head.logits

        def recorded(hidden):
            raw.append(logits(hidden))
            return raw[-1]

        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(slots.head, "logits", recorded)
            draft = original(slots, *args)
        return dataclasses.replace(draft, q=torch.stack(raw, 1).float().softmax(-1))

    patch.setattr(mtp.HeadSlots, "draft", drafted)


def correction_from_p(patch):
    """Draws the token after a rejection from the target, not from the residual."""

    def wrong(p, draft, depths, accept, emit):
        verdict = verify(p, draft, depths, accept, emit)
        every = torch.arange(len(p))
        token = draw(p[every, verdict.accepted], emit[every, verdict.accepted])
        return Verdict(verdict.accepted, token, verdict.probability)

    patch.setattr(decoding, "verify", wrong)


def void_drafts_kept(patch):
    """Goes on with the draft behind a rejected token, whose place the correction takes."""

    def wrong(p, draft, depths, accept, emit):
        verdict = verify(p, draft, depths, accept, emit)
        token, accepted = verdict.token.clone(), verdict.accepted.clone()
        on = verdict.accepted < depths - 1
        for b in on.nonzero().flatten().tolist():
            first, depth = int(accepted[b]), int(depths[b])
            behind = accept[b, first + 1 : depth] < verdict.probability[b, first + 1 : depth]
            kept = int(behind.long().cumprod(0).sum())
            if kept:
                # Written into the draft, the correction counts as one of its kept tokens.
                draft.tokens[b, first] = token[b]
                accepted[b] = last = first + 1 + kept
                token[b] = draw(p[b, last][None], emit[b, last][None])[0]
        return Verdict(accepted, token, verdict.probability)

    patch.setattr(decoding, "verify", wrong)


def bonus_from_q(patch):
    """Draws the token after a whole draft from the head's last distribution."""

    def wrong(p, draft, depths, accept, emit):
        verdict = verify(p, draft, depths, accept, emit)
        if not draft.tokens.shape[1]:
            return verdict
        every = torch.arange(len(p))
        column = draw(draft.q[every, (depths - 1).clamp_min(0)], emit[every, depths])
        bonus = column if draft.ids is None else draft.ids[column]
        whole = (verdict.accepted == depths) & (depths > 0)
        token = torch.where(whole, bonus, verdict.token)
        return Verdict(verdict.accepted, token, verdict.probability)

    patch.setattr(decoding, "verify", wrong)


def one_number_for_two_purposes(patch):
    """Draws the correction with the number that has just rejected the draft."""
    noise = decoding.noise

    def wrong(seeds, lengths, count, purpose, device):
        return noise(seeds, lengths, count, Purpose.ACCEPT, device)

    patch.setattr(decoding, "noise", wrong)


def draft_without_history(patch):
    """Shapes the target as if no drafted token counted for the penalties."""

    def wrong(history, draft):
        steps = draft.shape[1] + 1
        return type(history)(
            history.prompt.repeat_interleave(steps, 0), history.output.repeat_interleave(steps, 0)
        )

    patch.setattr(decoding.History, "after", wrong)


@pytest.mark.parametrize(
    ("rule", "name", "depth"),
    [
        (q_from_raw_logits, "filtered", 1),
        (q_from_raw_logits, "penalised", 2),
        (correction_from_p, "filtered", 1),
        (correction_from_p, "hot", 2),
        (correction_from_p, "penalised", 1),
        (void_drafts_kept, "hot", 2),
        (void_drafts_kept, "filtered", 2),
        (bonus_from_q, "filtered", 1),
        (bonus_from_q, "hot", 2),
        (one_number_for_two_purposes, "hot", 1),
        (draft_without_history, "penalised", 2),
    ],
)
def test_a_rule_that_is_nearly_right_is_found_out(trunk, exact, monkeypatch, rule, name, depth):
    rule(monkeypatch)
    # Fewer runs than the right rule passes with.
    assert measure(trunk, exact, name, depth, 20_000) < THRESHOLD / 1000


def test_the_measure_pools_rare_cells_and_refuses_impossible_ones():
    joint = np.array([0.0, 1e-6, 1e-4, 0.3, 0.6999 - 1e-6])
    assert p_value(np.array([0, 0, 1, 3000, 6999]), joint) > 0.5
    assert p_value(np.array([1, 0, 1, 3000, 6998]), joint) == 0
    assert p_value(np.array([0, 0, 1, 3300, 6699]), joint) < 1e-6
