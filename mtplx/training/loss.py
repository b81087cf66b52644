"""What the head learns: the trunk's whole next-token distribution, and acceptance itself.

Two losses on the same logits. The divergence is the cross-entropy against the trunk's
distribution, smooth everywhere and good from the first step. The other is -log of the acceptance
probability sum_x min(p, q) that exact speculative sampling keeps a token drawn from q (Leviathan
et al. 2023, arXiv:2211.17192, theorem 3.5), which is what is wanted in the end and says little to
a head that knows nothing yet; so it comes in late (compare DistillSpec, Zhou et al. 2023,
arXiv:2310.08461).
"""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

CHUNK = 512
"""Rows whose logits exist at one time."""


@dataclass(frozen=True)
class Objective:
    """How much of each loss, and the temperature that acceptance is wanted at."""

    divergence: float = 1.0
    acceptance: float = 0.0
    temperature: float = 1.0


def _divergence_gradient(logits: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    log_q = logits.float().log_softmax(-1)
    target = p.float()
    return (log_q.exp() - target).to(logits.dtype), -(target * log_q).sum(-1)


def _mixed_gradient(
    logits: Tensor, p: Tensor, warm_p: Tensor, divergence: float, acceptance: float, warmth: float
) -> tuple[Tensor, Tensor, Tensor]:
    z = logits.float()
    log_q = z.log_softmax(-1)
    target = p.float()
    q = (z / warmth).softmax(-1)
    wanted = warm_p.float()
    kept = torch.minimum(wanted, q).sum(-1, keepdim=True).clamp_min(1e-6)
    under = torch.where(q < wanted, q, torch.zeros_like(q))
    rise = (under - q * under.sum(-1, keepdim=True)) / (kept * warmth)
    grad = divergence * (log_q.exp() - target) - acceptance * rise
    loss = -divergence * (target * log_q).sum(-1) - acceptance * kept[:, 0].log()
    return grad.to(logits.dtype), loss, kept[:, 0]


@functools.cache
def _fused(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled where there is a C++ compiler: a handful of passes over memory become one."""
    if shutil.which("g++") or shutil.which("clang++"):
        return torch.compile(function, dynamic=False)
    return function


class _DraftLoss(torch.autograd.Function):
    """Output head and loss in one, a chunk of rows at a time.

    The logits of a batch over the draft vocabulary are the largest tensors of training; made,
    used and dropped in chunks, with their gradient in closed form, they stay in cache.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, p: Tensor, warm_p: Tensor | None, aim: Objective
    ) -> tuple[Tensor, Tensor]:
        count = len(hidden)
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        loss = torch.zeros(())
        kept = torch.zeros(())
        for i in range(0, count, CHUNK):
            rows = min(CHUNK, count - i)
            h, target = _padded(hidden[i : i + rows]), _padded(p[i : i + rows])
            logits = h @ weight.T
            if warm_p is None:
                grad, losses = _fused(_divergence_gradient)(logits, target)
            else:
                warm = _padded(warm_p[i : i + rows])
                grad, losses, keeps = _fused(_mixed_gradient)(
                    logits, target, warm, aim.divergence, aim.acceptance, aim.temperature
                )
                kept += keeps[:rows].sum()
            # Padding has no target: its gradient must not reach the weights.
            grad[rows:] = 0
            loss += losses[:rows].sum()
            grad_hidden[i : i + rows] = (grad @ weight)[:rows]
            grad_weight += (grad.T @ h).float()
        ctx.save_for_backward(grad_hidden, grad_weight.to(weight.dtype))
        ctx.mark_non_differentiable(kept)
        return loss, kept

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden * grads[0], grad_weight * grads[0], None, None, None


def _padded(rows: Tensor) -> Tensor:
    """To a whole chunk, so that one compiled shape serves all."""
    if len(rows) == CHUNK:
        return rows
    return torch.cat([rows, rows.new_zeros(CHUNK - len(rows), rows.shape[1])])


def draft_loss(
    hidden: Tensor, weight: Tensor, p: Tensor, warm_p: Tensor | None, aim: Objective
) -> tuple[Tensor, Tensor]:
    """Loss of the head's distribution against the trunk's, summed over rows.

    Args:
        hidden: normed head outputs, [N, H].
        weight: the output head's matrix, [draft_vocab, H].
        p: the trunk's distribution over the draft vocabulary at the same rows, [N, draft_vocab];
            what the trunk gives to other tokens cannot be drafted and is left out.
        warm_p: the same at `aim.temperature`; None for the divergence alone.
        aim: which losses.
    Returns:
        The loss, and the summed acceptance probability at `aim.temperature` (0 without `warm_p`;
        no gradient).
    """
    loss, kept = _DraftLoss.apply(hidden, weight, p, warm_p, aim)  # type: ignore[no-untyped-call]
    return loss, kept
