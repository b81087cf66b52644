"""Training batches: what is to be learnt as rows, everything before it as context only.

What is to be learnt is called the answer here; it holds the question too where the trunk wrote it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mtplx.training.states import TrunkStates

SKIPPED = 0.3
"""Share of conversations whose positions skip ahead somewhere in the context."""

LONGEST_SKIP = 1500
"""Positions skipped at most. So a head that reads short texts meets the distances of long ones
(positional skip-wise training: Zhu et al. 2023, arXiv:2309.10400)."""

ATTENTION_BUDGET = 4_000_000
"""Most query-key pairs of one batch: what keeps long contexts from filling memory."""


@dataclass(frozen=True)
class Batch:
    """B conversations; the answer starts at the same column in all of them.

    The head's pair i joins the trunk's state at token i with token i + 1 and predicts token
    i + 2. A conversation's pairs up to its prompt's end are context, C of them, padded on the
    left; the R that predict its answer are rows, padded on the right.

    Attributes:
        context: tapped streams of the context pairs, [B, C, 3H].
        context_tokens: the tokens joined to them, [B, C].
        rows: tapped streams of the rows, [B, R, 3H].
        tokens: tokens after each row's state and beyond, [B, R + steps - 1].
        targets: the trunk's last normed states at those same tokens, [B, R + steps - 1, H].
        begins: position of each conversation's first row, [B]; also its number of context pairs.
        counts: rows of each conversation that predict a token of the text, [B].
        skips: positions skipped in each conversation, [B].
        skip_from: context pair from which on they are, [B].
    """

    context: Tensor
    context_tokens: Tensor
    rows: Tensor
    tokens: Tensor
    targets: Tensor
    begins: Tensor
    counts: Tensor
    skips: Tensor
    skip_from: Tensor

    def positions(self) -> tuple[Tensor, Tensor]:
        """Of the context pairs [B, C] and of the rows [B, R]."""
        width = self.context.shape[1]
        c = (torch.arange(width) - width + self.begins[:, None]).clamp_min(0)
        r = torch.arange(self.rows.shape[1]) + self.begins[:, None]
        skips = self.skips[:, None]
        return c + skips * (c >= self.skip_from[:, None]), r + skips

    def visible(self) -> Tensor:
        """Which of context and rows each row may attend to, [B, 1, R, C + R] bool."""
        width, count = self.context.shape[1], self.rows.shape[1]
        keys = torch.arange(width + count)
        past = keys[None, :] >= width - self.begins[:, None]
        causal = keys[None, :] <= width + torch.arange(count)[:, None]
        return (past[:, None, :] & causal[None])[:, None]

    def counted(self, step: int) -> Tensor:
        """Rows whose target at this draft step (from 0) lies in the text, [B, R] bool."""
        return torch.arange(self.rows.shape[1]) < (self.counts - step)[:, None]


def plan(
    lengths: NDArray[np.int32], prompts: NDArray[np.int32], rows: int, rng: np.random.Generator
) -> list[NDArray[np.int64]]:
    """Cut conversations into batches of about `rows` rows, alike in length, in random order."""
    order = rng.permutation(len(lengths))
    answers = lengths - prompts
    batches = []
    for i in range(0, len(order), 1024):
        pool = order[i : i + 1024]
        # Contexts differ by a factor of ten, answers by two: sort coarsely by the first.
        pool = pool[np.lexsort((answers[pool], np.log2(prompts[pool]).round()))]
        start = 0
        while start < len(pool):
            stop, widest, deepest = start, 0, 0
            while stop < len(pool):
                widest = max(widest, int(lengths[pool[stop]]))
                deepest = max(deepest, int(answers[pool[stop]]))
                size = stop - start + 1
                if size > 1 and (
                    size * deepest > rows or size * deepest * widest > ATTENTION_BUDGET
                ):
                    break
                stop += 1
            batches.append(pool[start:stop])
            start = stop
    return [batches[i] for i in rng.permutation(len(batches))]


def make(
    states: TrunkStates,
    which: NDArray[np.int64],
    steps: int,
    rng: np.random.Generator | None = None,
) -> Batch:
    """Gather a batch of these conversations for `steps` draft steps.

    Positions are the text's own without `rng`; with it some skip ahead.
    """
    text = states.text
    lengths, starts = text.lengths[which], text.starts[which]
    begins = np.maximum(text.prompt_lengths[which] - 2, 0)
    counts = np.maximum(lengths - 2 - begins, 0)
    hidden = states.trunk.hidden_size
    # At least one column of each, if only of padding.
    size, width, count = len(which), max(int(begins.max()), 1), max(int(counts.max()), 1)
    context = torch.zeros(size, width, 3 * hidden, dtype=torch.bfloat16)
    rows = torch.zeros(size, count, 3 * hidden, dtype=torch.bfloat16)
    targets = torch.zeros(size, count + steps - 1, hidden, dtype=torch.bfloat16)
    context_tokens = torch.zeros(size, width, dtype=torch.int64)
    tokens = torch.zeros(size, count + steps - 1, dtype=torch.int64)
    for b in range(size):
        begin, rows_here, start = int(begins[b]), int(counts[b]), int(starts[b])
        here = states.of(start, start + int(lengths[b]))
        ids = torch.from_numpy(text.tokens[start : start + int(lengths[b])].astype(np.int64))
        context[b, width - begin :] = here[:begin, : 3 * hidden]
        context_tokens[b, width - begin :] = ids[1 : begin + 1]
        rows[b, :rows_here] = here[begin : begin + rows_here, : 3 * hidden]
        after = ids[begin + 1 :][: count + steps - 1]
        tokens[b, : len(after)] = after
        targets[b, : len(after)] = here[begin + 1 :, 3 * hidden :][: len(after)]
    skips = skip_from = np.zeros(size, dtype=np.int64)
    if rng is not None:
        skips = rng.integers(0, LONGEST_SKIP, size) * (rng.random(size) < SKIPPED)
        skip_from = rng.integers(0, begins + 1)
    return Batch(
        context,
        context_tokens,
        rows,
        tokens,
        targets,
        torch.from_numpy(begins.astype(np.int64)),
        torch.from_numpy(counts.astype(np.int64)),
        torch.from_numpy(skips),
        torch.from_numpy(skip_from.astype(np.int64)),
    )


def epoch(
    states: TrunkStates, which: NDArray[np.int64], rows: int, steps: int, seed: int
) -> Iterator[Batch]:
    """One pass over these conversations as they are."""
    text = states.text
    rng = np.random.default_rng(seed)
    for group in plan(text.lengths[which], text.prompt_lengths[which], rows, rng):
        yield make(states, which[group], steps)
