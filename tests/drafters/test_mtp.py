"""The loop around a head: refills that are put off until they are needed."""

import pytest
import scheduled
import tiny
import torch

from mtplx.drafters import mtp
from mtplx.drafters.mtp import HeadSlots
from mtplx.models.slots import Span

PROMPTS = [(1, 2, 3), (4,), (5, 0, 2, 2, 1, 6), (3, 3)]


@pytest.fixture(scope="module")
def trunk():
    return tiny.llama(7, seed=3)


@pytest.fixture(scope="module")
def head(trunk):
    return tiny.attached(trunk)


@pytest.mark.parametrize("most", [1, 3, 64])
@pytest.mark.parametrize("prompts", [PROMPTS, PROMPTS[:1], PROMPTS[1:2]], ids=len)
def test_postponed_refills_show_in_no_draft(trunk, head, monkeypatch, most, prompts):
    monkeypatch.setattr(mtp, "POSTPONED", most)
    scheduled.assert_postponed_refills_show_nowhere(trunk, head, prompts)


def test_postponed_refills_are_made_up_for_in_one_step(trunk, head, monkeypatch):
    widths, right = [], type(head).step

    def step(self, tokens, *others):
        widths.append(tokens.shape[1])
        return right(self, tokens, *others)

    monkeypatch.setattr(type(head), "step", step)
    # Two tokens of the prompt; four cycles without a draft; a draft of two and what it leaves.
    made = scheduled.drafts(trunk, head, [(1, 2, 3)], [0, 0, 0, 0, 2, 0, 0, 0, 0], monkeypatch, 12)
    assert len(made) == 1
    assert widths == [2, 4, 1, 3]


def test_nothing_is_kept_back_for_long(trunk, head):
    slots = HeadSlots(head, 400)
    cache = trunk.new_cache(400)
    for at in range(200):
        span = Span.after([at], 1, trunk.device)
        output = trunk.forward(torch.tensor([[1]]), span, cache, head.taps)
        slots.postpone(output, torch.tensor([[2]]), span)
        assert len(slots._postponed) <= mtp.POSTPONED
        assert slots._postponed[-1][0].logits is None


def test_joined_spans_are_one():
    device = torch.device("cpu")
    apart = [Span.after([n, n], 1, device) for n in (4, 5, 6)]
    one = Span.joined(apart)
    whole = Span.after([4, 4], 3, device)
    assert (one.positions.tolist(), one.start, one.end) == (
        whole.positions.tolist(),
        whole.start,
        whole.end,
    )
    assert one.mask.equal(whole.mask)
    # Rows of different lengths, and one that stands still because its text has ended.
    for lengths in ([[3, 4], [4, 5]], [[3, 3], [4, 3]], [[3, 3], [3, 3]]):
        joined = Span.joined([Span.after(n, 1, device) for n in lengths])
        assert joined.start is None
        assert joined.positions.T.tolist() == lengths
        assert joined.end == max(map(max, lengths)) + 1
