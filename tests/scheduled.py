"""Drafts of given depths, one after another, in the engine's own loop."""

import dataclasses
import itertools

import pytest
import torch

from mtplx.drafters.mtp import HeadSlots
from mtplx.drafters.pace import Pace
from mtplx.engine.decoding import Batch
from mtplx.engine.request import Request
from mtplx.sampling import SamplerConfig


class Scheduled(Pace):
    """Has adaptive requests drafted to these depths in turn."""

    def __init__(self, depths):
        super().__init__()
        self.depths = itertools.cycle(depths)

    def to_try(self, rows, deepest):
        return min(next(self.depths), deepest)


def at_once(slots, output, following, span):
    """In place of `HeadSlots.postpone`."""
    slots.refill(output, following, span, [0] * len(following))


def drafts(trunk, head, prompts, depths, patch, tokens=30):
    """(lengths, draft) of every draft for texts that end one after another."""
    requests = [
        Request(prompt, SamplerConfig(temperature=1.4), i, tokens + 9 * i, 7, verifier="coupled")
        for i, prompt in enumerate(prompts)
    ]
    made, right = [], HeadSlots.draft

    def recorded(slots, depth, lengths, *more):
        made.append((lengths, right(slots, depth, lengths, *more)))
        return made[-1][1]

    patch.setattr(HeadSlots, "draft", recorded)
    requests = [dataclasses.replace(one, adaptive=True) for one in requests]
    for _ in Batch(trunk, head, requests, Scheduled(depths)).run():
        pass
    return made


def assert_postponed_refills_show_nowhere(trunk, head, prompts):
    for depths in ([0, 0, 2], [0, 3, 0, 0, 0, 0, 0, 1]):
        with pytest.MonkeyPatch.context() as patch:
            late = drafts(trunk, head, prompts, depths, patch)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(HeadSlots, "postpone", at_once)
            early = drafts(trunk, head, prompts, depths, patch)
        assert len(late) == len(early) > 3
        for (lengths, mine), (expected, theirs) in zip(late, early, strict=True):
            assert lengths == expected
            assert mine.tokens.tolist() == theirs.tokens.tolist()
            size = trunk.vocab_size
            torch.testing.assert_close(
                mine.q.dense(size), theirs.q.dense(size), rtol=1e-4, atol=1e-5
            )
