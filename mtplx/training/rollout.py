"""The head run as it will be used: several draft steps in a row, fed its own hidden states.

EAGLE-3 calls this training-time test. All rows of a batch take step s together; row r attends to
the true pairs up to itself and, after the first step, to its own earlier steps only.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from mtplx.models.eagle3 import Eagle3Head
from mtplx.training.batches import Batch


class _RowAttention:
    """Attention of draft steps whose keys are shared up to the row and private after it."""

    def __init__(self, keys: Tensor, values: Tensor, visible: Tensor) -> None:
        self.context = keys, values
        self.visible = visible
        self.private: list[tuple[Tensor, Tensor]] = []

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        if not self.private:
            context = [x.repeat_interleave(groups, 1) for x in self.context]
            self.shared = torch.cat([context[0], k], 2), torch.cat([context[1], v], 2)
            self.private.append((k, v))
            return F.scaled_dot_product_attention(q, *self.shared, attn_mask=self.visible)
        self.private.append((k, v))
        scale = q.shape[-1] ** -0.5
        scores = (q @ self.shared[0].transpose(2, 3)).masked_fill(~self.visible, -torch.inf)
        own = [(q * key).sum(-1, keepdim=True) for key, _ in self.private[1:]]
        weights = (torch.cat([scores, *own], -1).float() * scale).softmax(-1).to(v.dtype)
        out: Tensor = weights[..., : scores.shape[-1]] @ self.shared[1]
        for i, (_, value) in enumerate(self.private[1:]):
            out = out + weights[..., scores.shape[-1] + i, None] * value
        return out


def rollout(
    head: Eagle3Head,
    embedding: Tensor,
    batch: Batch,
    steps: int,
    scale: Tensor,
    noise: float = 0.0,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Run `steps` draft steps over all rows of a batch, each on the true tokens.

    Args:
        head: the head in training.
        embedding: the trunk's token embeddings, [V, H], in the head's own type, whatever the
            trunk's.
        batch: conversations.
        steps: draft steps.
        scale: typical size of each channel of the tapped streams, [3H]; the head sees streams
            divided by it.
        noise: added to those, in parts of that size; so that a head cannot know a text again by
            its states (compare EAGLE, Li et al. 2024, arXiv:2401.15077).
    Yields:
        For each step: normed outputs of the rows that count [N, H], and which rows these are,
        [B, R] bool.
    """
    layer, attention = head.layer, head.layer.self_attn
    context_at, rows_at = batch.positions()
    streams = torch.cat([batch.context, batch.rows], 1).to(embedding.dtype)
    streams = streams * (1 / scale).to(embedding.dtype)
    if noise:
        streams = streams + noise * torch.randn_like(streams)
    fused = head.fuse(streams)
    width = batch.context.shape[1]
    # One layer: the context's keys and values do not depend on its own outputs, so the rest of
    # the layer need not run over it.
    x, _ = layer.inputs(F.embedding(batch.context_tokens, embedding), fused[:, :width])
    keys = head.rotate(attention.split(attention.k_proj(x)), context_at)
    attend = _RowAttention(keys, attention.split(attention.v_proj(x)), batch.visible())
    hidden = fused[:, width:]
    count = batch.rows.shape[1]
    for step in range(steps):
        embeds = F.embedding(batch.tokens[:, step : step + count], embedding)
        hidden = head(embeds, hidden, rows_at + step, attend)
        counted = batch.counted(step)
        out = hidden[counted]
        normed = out if head.config.norm_output else head.norm(out)
        yield normed, counted
