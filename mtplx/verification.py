"""Verifying drafts in torch, many sequences at once, by three exact rules.

The batched counterpart of the rules in `mtplx.speculative`, equal to them decision for decision
when both are fed the same random numbers. Rows may have rules of their own:

* `token`: each drafted token is kept with probability min(1, p / q), in order (Leviathan et al.
  2023; Chen et al. 2023).
* `block`: the whole draft is looked at before a prefix is kept (Sun et al. 2025,
  arXiv:2403.10444), which keeps at least as many.
* `coupled`: draft and target choose by the same noise, and a drafted token is kept while it is
  what the target chooses (Daliri et al. 2024, arXiv:2408.07978). The text then depends on the
  seed alone, and not on what was drafted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from mtplx import kernels
from mtplx.kernels import Kernels
from mtplx.randomness import Purpose, exponentials, uniforms
from mtplx.sampling import Verifier
from mtplx.shaping import Distributions, wide


@dataclass(frozen=True)
class Draft:
    """K drafted tokens for each of B sequences, and what they were drawn from.

    Attributes:
        tokens: target token ids, [B, K] int64.
        q: the distributions drawn from, after every filter, [B, K, C].
        lengths: how many of each row's tokens are a draft, the rest being padding; None for all.
    """

    tokens: Tensor
    q: Distributions
    lengths: Sequence[int] | None = None

    @classmethod
    def empty(cls, batch: int, device: torch.device) -> Draft:
        """No tokens for any of B sequences."""
        tokens = torch.zeros(batch, 0, dtype=torch.int64, device=device)
        return cls(tokens, Distributions(torch.zeros(batch, 0, 1, device=device), None))


class Draws(Protocol):
    """What chooses a draft's tokens."""

    def drafted(self, q: Distributions, position: int) -> Tensor:
        """A token of each row [B, C], for this position of the draft, from 0."""
        ...


@dataclass(frozen=True)
class Verdict:
    """What became of B drafts.

    Attributes:
        accepted: drafted tokens kept, from the first on, [B] int64.
        token: the correction, or the bonus where all were kept, [B] int64.
        probability: with which each drafted token was to be kept, given that those before it
            were, [B, K] float32; those behind a rejection are void.
    """

    accepted: Tensor
    token: Tensor
    probability: Tensor


class Noise:
    """The random numbers of one cycle of B rows: for its draft, its decisions, its last token.

    A rule that looks at later drafts before it decides (`block`) must not meet the same numbers
    when it drafts those positions again, so its noise belongs to the cycle too; docs/exactness.md
    has an example of what goes wrong otherwise. So it is with any rule where a void draft may have
    a say in how deep the next one goes.

    Attributes:
        draft: uniforms that draw the draft, [B, K + 1]; None at depth 0.
        accept: uniforms that decide on it, likewise.
        emit: uniforms that draw the token that ends the cycle, [B, K + 1].
        token: the rows of this rule, [B] bool; None if there is none.
        block, coupled: likewise.
    """

    def __init__(
        self,
        seeds: Sequence[int],
        lengths: Sequence[int],
        verifiers: Sequence[Verifier],
        depth: int,
        device: torch.device,
        adaptive: Sequence[bool] = (),
    ) -> None:
        """
        Args:
            seeds: of B requests.
            lengths: committed tokens of each; the pending token has this position, the first one
                decided the next.
            verifiers: rule of each.
            depth: tokens drafted, at most.
            device: where the numbers are wanted.
            adaptive: rows whose depth may depend on what became of earlier drafts, void ones too;
                none if not given.
        """
        self.device, self.depth = device, depth
        ahead = np.arange(1, depth + 2, dtype=np.uint64)
        positions = np.array(lengths, dtype=np.uint64)[:, None] + ahead
        by_cycle = np.array([v == "block" for v in verifiers])
        if len(adaptive):
            by_cycle |= np.array(adaptive)
        offsets = np.where(by_cycle[:, None], ahead, np.uint64(0))
        seed = np.array(seeds, dtype=np.uint64)[:, None]
        purposes = (Purpose.DRAFT, Purpose.ACCEPT, Purpose.EMIT) if depth else (Purpose.EMIT,)
        u = uniforms(seed, positions, np.array(purposes)[:, None, None], offsets)
        if wide(device) == torch.float32:
            # Cut to the 24 bits that fit, since rounding could make a 1 of them.
            u = np.floor(u * 2.0**24) * 2.0**-24
        # A draft's tokens and the token that ends a cycle, decided at the same positions.
        *drafting, self.emit = torch.from_numpy(u).to(wide(device)).to(device).unbind()
        self.draft: Tensor | None = drafting[0] if depth else None
        self.accept: Tensor | None = drafting[1] if depth else None
        self.token, self.block, self.coupled = (
            _mask(np.array([v == rule for v in verifiers]), device)
            for rule in ("token", "block", "coupled")
        )
        if self.coupled is not None:
            halves = np.concatenate([seed & np.uint64(2**32 - 1), seed >> np.uint64(32)], -1)
            self._seeds = torch.from_numpy(halves.astype(np.int64)).to(device)
            self._positions = torch.from_numpy(positions.astype(np.int64)).to(device)

    def drafted(self, q: Distributions, position: int) -> Tensor:
        """A token of each row [B, C], for this position of the draft, from 0."""
        assert self.draft is not None
        return self.chosen(q, self.draft, position)

    def chosen(self, p: Distributions, u: Tensor, position: int) -> Tensor:
        """A token of each row [B, C] at this position of the cycle, where no draft has a say.

        Args:
            p: the distributions.
            u: the cycle's uniforms for it, [B, K + 1]; races have numbers of their own.
            position: from 0.
        """
        token = None
        if self.token is not None or self.block is not None:
            token = draw(p, u[:, position])
        if self.coupled is not None:
            winner = self.winners(p.view(len(p.p), 1), position)[:, 0]
            token = _chosen(self.coupled, winner, token)
        assert token is not None
        return token

    def winners(self, p: Distributions, first: int = 0) -> Tensor:
        """The token that finishes first in each row's race, [B, T, C] -> [B, T].

        A token of probability p runs at that speed: its time is exponential with rate p, so it
        wins with probability p; and it wins under p and q alike when both favour it.

        Args:
            p: at T positions from the cycle's `first` on.
        """
        batch, count, width = p.p.shape
        ids = torch.arange(width, device=self.device) if p.ids is None else p.ids
        positions = self._positions[:, first : first + count]
        seeds = self._seeds[:, None].expand(batch, count, 2)
        times = exponentials(seeds, positions, ids, wide(self.device)) / p.p
        return p.tokens(times.argmin(-1))


def _mask(rows: np.ndarray[tuple[int], np.dtype[np.bool_]], device: torch.device) -> Tensor | None:
    """None where no row is meant, so that a rule nobody asked for costs nothing."""
    return torch.from_numpy(rows).to(device) if rows.any() else None


def _chosen(rows: Tensor, theirs: Tensor, others: Tensor | None) -> Tensor:
    """What a rule makes of its rows, [B] bool, beside the others' [B, ...]; None if it has all."""
    if others is None:
        return theirs
    return torch.where(rows if theirs.ndim == 1 else rows[:, None], theirs, others)


def draw(p: Distributions, u: Tensor) -> Tensor:
    """A token of each row by inverting the cumulative sum; never one of probability 0.

    Args:
        p: [R, C].
        u: in [0, 1), [R].
    Returns:
        [R] int64.
    """
    library = _kernels(p)
    if library is None or p.ids is None or len(p.p) == 0:
        return p.tokens(_column(p.p, u))
    rows, width = p.p.shape
    parts = p.p.contiguous(), p.ids.contiguous(), u.to(torch.float64)
    token = p.ids.new_empty(rows)
    pointers = [part.data_ptr() for part in (*parts, token)]
    library.draw(*pointers, rows, width, parts[2].stride(0))
    return token


def _kernels(*rows: Distributions) -> Kernels | None:
    """For rows whose filters leave few tokens, on a CPU: small operations would take longer."""
    own = all(
        row.p.device.type == "cpu"
        and row.p.dtype == torch.float32
        and row.ids is not None
        and row.ids.ndim == row.p.ndim
        and row.ids.dtype == torch.int64
        for row in rows
    )
    return kernels.find() if own else None


def _column(weights: Tensor, u: Tensor) -> Tensor:
    cumulative = weights.cumsum(-1, dtype=wide(weights.device))
    if weights.device.type != "cpu":
        # Summed in parallel, a sum may differ in its last digit from the one before, with nothing
        # added; so columns of weight 0 are given that of the column before.
        cumulative = _flat(weights, cumulative)
    # Scaled by the last sum, u stays below it; the first sum above u is never that of a column
    # of weight 0.
    u = u.to(cumulative.dtype)[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, u, right=True)[:, 0]


def _flat(weights: Tensor, cumulative: Tensor) -> Tensor:
    """Cumulative sums [R, C] that never fall, and rise only where there is weight."""
    return torch.where(weights > 0, cumulative, 0.0).cummax(-1).values


def verify(p: Distributions, draft: Draft, depths: Tensor, noise: Noise) -> Verdict:
    """Keep a prefix of each draft and choose the token after it, by each row's rule.

    Args:
        p: the target after 0 to K drafted tokens, [B, K + 1, C].
        draft: K tokens a row, of which the first `depths[b]` count.
        depths: [B] int64, each at most K.
        noise: of this cycle.
    """
    batch, depth = draft.tokens.shape
    if depth == 0:
        return Verdict(depths, noise.chosen(p[:, 0], noise.emit, 0), noise.emit[:, :0].float())
    library = _kernels(p, draft.q) if noise.coupled is None else None
    if library:
        return _verify_in_c(library, p, draft, depths, noise)
    every = torch.arange(batch, device=depths.device)
    real = torch.arange(depth, device=depths.device) < depths[:, None]
    kept = token = probability = None
    if noise.token is not None or noise.block is not None:
        kept, weight, probability = _kept(p, draft, depths, real, noise)
        last = p[every, kept]
        left = last.minus(draft.q[every, kept.clamp_max(depth - 1)], weight)
        # Nothing left means p = q up to rounding, where the target itself is the answer.
        rejected = (kept < depths) & (left.sum(-1) > 0)
        weights = torch.where(rejected[:, None], left, last.p.to(left.dtype))
        token = last.tokens(_column(weights, noise.emit[every, kept]))
    if noise.coupled is not None:
        winners = noise.winners(p)
        same = (winners[:, :depth] == draft.tokens) & real
        reached = same.to(torch.int64).cumprod(1).sum(1)
        kept = _chosen(noise.coupled, reached, kept)
        token = _chosen(noise.coupled, winners[every, reached], token)
        probability = _chosen(noise.coupled, same.to(noise.emit.dtype), probability)
    assert kept is not None and token is not None and probability is not None
    return Verdict(kept, token, probability.float())


def _verify_in_c(
    library: Kernels, p: Distributions, draft: Draft, depths: Tensor, noise: Noise
) -> Verdict:
    """By the rules that reject, for rows on tokens of their own, [B, K + 1, C] and [B, K, C]."""
    batch, depth = draft.tokens.shape
    accept, emit, block = noise.accept, noise.emit, noise.block
    assert p.ids is not None and draft.q.ids is not None and accept is not None
    if block is None:
        block = torch.zeros(batch, dtype=torch.bool)
    given = (p.p, p.ids, draft.q.p, draft.q.ids, draft.tokens, depths)
    # Held here, for a copy must outlive the call.
    held = [part.contiguous() for part in given]
    kept, token = depths.new_empty(batch), depths.new_empty(batch)
    probability = p.p.new_empty(batch, depth)
    weights = accept.new_empty(3 * (depth + 1))
    parts = (*held, accept, emit, block, kept, token, probability, weights)
    assert accept.stride(1) == emit.stride(1) == 1 and accept.dtype == torch.float64
    library.verify(
        *[part.data_ptr() for part in parts],
        *(batch, depth, p.p.shape[-1], draft.q.p.shape[-1], accept.stride(0), emit.stride(0)),
    )
    return Verdict(kept, token, probability)


def _kept(
    p: Distributions, draft: Draft, depths: Tensor, real: Tensor, noise: Noise
) -> tuple[Tensor, Tensor, Tensor]:
    """By the rules that reject: tokens kept [B], the target's weight in the residual [B], and the
    probabilities [B, K]; those of other rows are void."""
    assert noise.accept is not None
    accept = noise.accept[:, : draft.tokens.shape[1]]
    p_token, q_token = (x.to(accept.dtype) for x in _of_drafted(p, draft))
    result: tuple[Tensor, ...] | None = None
    if noise.token is not None:
        result = _token_rule(p_token, q_token, real, accept)
    if noise.block is not None:
        theirs = _block_rule(p, draft, p_token, q_token, depths, real, accept)
        others = result or (None, None, None)
        result = tuple(_chosen(noise.block, *pair) for pair in zip(theirs, others, strict=True))
    assert result is not None
    kept, weight, probability = result
    return kept, weight, probability


def _token_rule(
    p_token: Tensor, q_token: Tensor, real: Tensor, accept: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens kept [B], the target's weight in the residual [B], probabilities [B, K]."""
    # min(1, p / q); where that is 0 / 0, nothing is kept.
    probability = (p_token / torch.maximum(p_token, q_token)).nan_to_num(0.0)
    # All in the uniforms' own type: rounded to float32 one of them could become 1.
    kept = (accept < probability) & real
    return kept.to(torch.int64).cumprod(1).sum(1), torch.ones_like(accept[:, 0]), probability


def _block_rule(
    p: Distributions,
    draft: Draft,
    p_token: Tensor,
    q_token: Tensor,
    depths: Tensor,
    real: Tensor,
    accept: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `_token_rule`: the longest prefix whose own trial succeeds."""
    depth = draft.tokens.shape[1]
    # w after 0 to K tokens: how much more of the target than of the drafter is behind a prefix.
    weights = [torch.ones_like(accept[:, 0])]
    for i in range(depth):
        grown = weights[-1] * p_token[:, i]
        weights.append((grown / torch.maximum(grown, q_token[:, i])).nan_to_num(0.0))
    weight = torch.stack(weights, 1)
    length = torch.arange(1, depth + 1, device=depths.device)
    trial = weight[:, 1:]
    if depth > 1:
        # What is left to be drawn after each prefix that another drafted token follows.
        left = p[:, 1:depth].minus(draft.q[:, 1:], weight[:, 1:depth]).sum(-1)
        before = weight[:, 1:depth]
        # At full weight this is left / left; where that is 0 / 0, p = q comes next, and something
        # later is kept for certain.
        inner = (left / (left + (1 - before))).nan_to_num(1.0)
        trial = torch.cat([inner, weight[:, depth:]], 1)
        # The last prefix of a shorter draft has nothing after it, whatever the padding says.
        at_end = length == depths[:, None]
        trial = torch.where(at_end, weight[:, 1:], trial)
    trial = trial * real
    succeeded = accept < trial
    kept = (succeeded * length).amax(1)
    # That a prefix of at least i tokens is kept: not all trials from i on fail.
    fails = (1 - trial).flip(1).cumprod(1).flip(1)
    at_least = F.pad(1 - fails, (1, 0), value=1.0)
    probability = (at_least[:, 1:] / at_least[:, :-1]).nan_to_num(0.0)
    return kept, weight.gather(1, kept[:, None])[:, 0], probability


def _of_drafted(p: Distributions, draft: Draft) -> tuple[Tensor, Tensor]:
    """What target and drafter gave each drafted token, [B, K] float32 each."""
    depth = draft.tokens.shape[1]
    tokens = draft.tokens[..., None]
    return p[:, :depth].at(tokens)[..., 0], draft.q.at(tokens)[..., 0]
