"""Whatever drafts, the texts have the target's joint distribution: `test_law`, for other drafters.

The prompt repeats itself, so that lookups draft from the first cycle on.
"""

import functools

import pytest
import test_law
import tiny
from faults import edited

from mtplx.drafters.draft_model import DraftModel, DraftModelSlots
from mtplx.drafters.mixed import HeadOrLookup, MixedSlots
from mtplx.drafters.ngram import Ngram, NgramSlots

pytestmark = pytest.mark.no_cover

PROMPT = (1, 3, 0, 2, 1, 3)
# By setting, the vocabulary of the draft model: it may be smaller than the target's.
DRAFT_VOCAB = {"filtered": 5, "hot": 4, "penalised": 3}


@functools.cache
def drafter(name, setting):
    trunk = test_law.model(test_law.VOCAB)
    match name:
        case "ngram":
            return Ngram(trunk.device)
        case "mtp+ngram":
            return HeadOrLookup(
                test_law.drafter(trunk, test_law.DRAFT_VOCAB[setting]), trunk.device
            )
        case "draft model":
            small = tiny.llama(DRAFT_VOCAB[setting], seed=2, layers=1, heads=1)
            return DraftModel(small, trunk.vocab_size)


def measure(name, setting, depth, verifier, runs, length):
    counts = test_law.observed(
        setting,
        depth,
        verifier,
        runs,
        length,
        test_law.VOCAB,
        prompt=PROMPT,
        drafting=drafter(name, setting),
    )
    return test_law.p_value(counts, test_law.exact(setting, length, test_law.VOCAB, prompt=PROMPT))


NAMES = ("ngram", "mtp+ngram", "draft model")


@pytest.mark.parametrize(
    "setting",
    [
        name if name == "hot" else pytest.param(name, marks=pytest.mark.slow)
        for name in test_law.SETTINGS
    ],
)
@pytest.mark.parametrize("verifier", test_law.VERIFIERS)
@pytest.mark.parametrize("name", NAMES)
def test_the_joint_distribution_is_the_targets(name, verifier, setting):
    assert measure(name, setting, 2, verifier, 5_000, 4) > test_law.THRESHOLD


@pytest.mark.slow
@pytest.mark.parametrize(("depth", "length"), [(1, 3), (2, 4), (3, 5)])
@pytest.mark.parametrize("verifier", test_law.VERIFIERS)
@pytest.mark.parametrize("name", NAMES)
def test_the_joint_distribution_is_the_targets_over_more_runs(name, verifier, depth, length):
    assert measure(name, "hot", depth, verifier, 40_000, length) > test_law.THRESHOLD


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "owner", "method", "old", "new"),
    [
        ("mtp+ngram", MixedSlots, "draft", "Draft(draft.tokens, q)", "draft"),
        ("mtp+ngram", MixedSlots, "draft", ".where(rows, ", ".where(~rows, "),
        ("ngram", NgramSlots, "draft", "certain(tokens)", "certain(tokens + 1)"),
        (
            "draft model",
            DraftModelSlots,
            "draft",
            "rows.append(q)",
            "rows.append(rows[0] if i else q)",
        ),
    ],
)
def test_a_wrong_q_is_found(monkeypatch, name, owner, method, old, new):
    edited(owner, method, old, new)(monkeypatch)
    assert measure(name, "hot", 2, "token", 10_000, 4) < test_law.THRESHOLD / 1000
