"""Verifying drafts in torch, many sequences at once.

The batched counterpart of `mtplx.speculative.verify_draft`, equal to it decision for decision
when both are fed the same uniforms.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mtplx.randomness import Purpose, uniforms
from mtplx.shaping import wide


@dataclass(frozen=True)
class Draft:
    """K drafted tokens for each of B sequences, and what they were drawn from.

    Attributes:
        tokens: target token ids, [B, K] int64.
        columns: the same tokens as columns of `q`, [B, K] int64.
        q: the distributions drawn from, after every filter, [B, K, W] float32.
        ids: target token ids of the W columns, [W]; None where W is the whole vocabulary.
    """

    tokens: Tensor
    columns: Tensor
    q: Tensor
    ids: Tensor | None


@dataclass(frozen=True)
class Verdict:
    """What became of B drafts.

    Attributes:
        accepted: drafted tokens kept, from the first on, [B] int64.
        token: the correction, or the bonus where all were kept, [B] int64.
        probability: with which each drafted token was to be kept, [B, K] float32; those behind a
            rejection are void.
    """

    accepted: Tensor
    token: Tensor
    probability: Tensor


def noise(
    seeds: Sequence[int], lengths: Sequence[int], count: int, purpose: Purpose, device: torch.device
) -> Tensor:
    """Uniforms for the `count` positions that follow each sequence's pending token.

    Args:
        seeds: of B requests.
        lengths: committed tokens of each; the pending token has this position, the first one
            decided the next.
        count: positions.
        purpose: what the uniforms decide.
        device: where they are wanted.
    Returns:
        [B, count] in the device's widest type.
    """
    positions = np.array(lengths, dtype=np.uint64)[:, None] + np.arange(
        1, count + 1, dtype=np.uint64
    )
    u = uniforms(np.array(seeds, dtype=np.uint64)[:, None], positions, purpose)
    if wide(device) == torch.float32:
        # Cut to the 24 bits that fit, since rounding could make a 1 of them.
        u = np.floor(u * 2.0**24) * 2.0**-24
    return torch.from_numpy(u).to(wide(device)).to(device)


def draw(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """One column of each row by inverting the cumulative sum; never one of probability 0.

    Args:
        probabilities: [R, W].
        uniforms: in [0, 1), [R].
    Returns:
        [R] int64.
    """
    cumulative = probabilities.cumsum(-1, dtype=wide(probabilities.device))
    # Scaled by the last sum, u stays below it; the first sum above u is never that of a token
    # of probability 0.
    u = uniforms.to(cumulative.dtype)[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, u, right=True)[:, 0]


def verify(p: Tensor, draft: Draft, depths: Tensor, accept: Tensor, emit: Tensor) -> Verdict:
    """Verify position by position (Leviathan et al. 2023; Chen et al. 2023).

    Args:
        p: the target after 0 to K drafted tokens, [B, K + 1, V] float32.
        draft: K tokens a row, of which the first `depths[b]` count.
        depths: [B] int64, each at most K.
        accept: uniforms that decide about the drafted tokens, [B, K].
        emit: uniforms for the token emitted at each position, [B, K + 1].
    """
    batch, depth = draft.tokens.shape
    every = torch.arange(batch, device=p.device)
    p_token = p[:, :depth].gather(2, draft.tokens[..., None])[..., 0]
    q_token = draft.q.gather(2, draft.columns[..., None])[..., 0]
    # min(1, p / q) written so that q = 0 needs no case of its own; p = 0 gives 0.
    probability = torch.where(p_token > 0, p_token / torch.maximum(p_token, q_token), 0.0)
    real = torch.arange(depth, device=p.device) < depths[:, None]
    # Compared in the uniforms' own type: rounded to float32 one of them could become 1.
    kept = (accept < probability.to(accept.dtype)) & real
    accepted = kept.to(torch.int64).cumprod(1).sum(1)
    last = p[every, accepted]
    if depth:
        at = accepted.clamp_max(depth - 1)
        q = draft.q[every, at]
        excess = last - q if draft.ids is None else last.index_add(1, draft.ids, -q)
        excess = excess.clamp_min(0)
        # Nothing left means p = q up to rounding, where the target itself is the answer.
        rejected = (accepted < depths) & (excess.sum(-1) > 0)
        last = torch.where(rejected[:, None], excess, last)
    token = draw(last, emit[every, accepted])
    return Verdict(accepted, token, probability)
