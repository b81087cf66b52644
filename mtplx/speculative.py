"""The cycle: draft, verify in order, stop at the first rejection, add one more token.

On plain arrays and one sequence. This is the executable definition of speculative decoding that
the engine's batched loop is tested against.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mtplx.sampling import (
    SamplerConfig,
    check_logits,
    distribution_from_logits,
    sample_from_distribution,
    verify_one_token,
)


def speculative_decode(
    target_logits: ArrayLike,
    draft_logits: ArrayLike,
    config: SamplerConfig,
    depth: int,
    rng: np.random.Generator | None = None,
    *,
    prompt_ids: Sequence[int] = (),
    output_ids: Sequence[int] = (),
) -> list[int]:
    """One cycle: draft `depth` tokens, keep what the target allows, and emit one more.

    Target and draft rows are shaped by the same `config`, and each sees the history it would see
    in plain decoding: `output_ids` and the tokens drafted before its position. Depth 0 draws one
    token from the target's first row, and is plain sampling.

    Args:
        target_logits: ``[depth + 1, V]``; row i is the target after i drafted tokens. A single row
            ``[V]`` stands for the same at every position.
        draft_logits: ``[depth, V]``, or ``[V]`` likewise; ``[]`` will do at depth 0.
        config: the sampler's settings.
        depth: how many tokens to draft, 0 or more.
        rng: where randomness comes from; None starts a generator from ``config.seed``. Cycles of
            one text must share one, or their draws repeat and are no longer independent.
        prompt_ids: the prompt's tokens, and
        output_ids: those emitted in earlier cycles; only penalties look at them.

    Returns:
        1 to ``depth + 1`` token ids: the accepted drafts, then the correction (after a rejection)
        or the bonus (after none).

    Raises:
        ValueError: for a bad depth, shape or logit, in one line that says where.
    """
    if isinstance(depth, bool) or not isinstance(depth, int | np.integer) or depth < 0:
        raise ValueError(f"depth must be an integer of 0 or more, got {depth!r}")
    targets = _rows(target_logits, depth + 1, "target_logits")
    nothing = depth == 0 and np.size(draft_logits) == 0
    drafters = targets[:0] if nothing else _rows(draft_logits, depth, "draft_logits")
    if drafters.shape[-1] != targets.shape[-1]:
        raise ValueError(
            f"target_logits have {targets.shape[-1]} tokens and draft_logits "
            f"{drafters.shape[-1]}: one vocabulary only"
        )
    rng = np.random.default_rng(config.seed) if rng is None else rng

    def shaped(row: NDArray[np.float64], drafted: list[int]) -> NDArray[np.float64]:
        history = [*output_ids, *drafted]
        return distribution_from_logits(row, config, prompt_ids=prompt_ids, output_ids=history)

    draft: list[int] = []
    draft_q = []
    for row in drafters:
        draft_q.append(shaped(row, draft))
        draft.append(sample_from_distribution(draft_q[-1], rng))
    target_p = [shaped(row, draft[:position]) for position, row in enumerate(targets)]
    return verify_draft(target_p, draft_q, draft, rng)


def verify_draft(
    target_p: Sequence[ArrayLike],
    draft_q: Sequence[ArrayLike],
    draft: Sequence[int],
    rng: np.random.Generator,
) -> list[int]:
    """Verify a draft of K tokens in order, given the distributions at its positions.

    Args:
        target_p: K+1 distributions ``[V]``: the target's after 0 to K drafted tokens.
        draft_q: K distributions ``[V]``: those the drafted tokens were drawn from.
        draft: the K drafted token ids.
        rng: where randomness comes from.

    Returns:
        1 to K+1 token ids, as `speculative_decode`.

    Raises:
        ValueError: if the three lengths do not fit together, or as `verify_one_token`.
    """
    if not len(target_p) - 1 == len(draft_q) == len(draft):
        raise ValueError(
            f"a draft of {len(draft)} tokens needs as many draft distributions and one more of the "
            f"target's, got {len(draft_q)} and {len(target_p)}"
        )
    emitted: list[int] = []
    for p, q, token in zip(target_p, draft_q, draft, strict=False):
        decision = verify_one_token(p, q, token, rng)
        emitted.append(decision.token_id)
        if not decision.accepted:
            # What follows was drafted behind a token that is not emitted: it is void.
            return emitted
    return [*emitted, sample_from_distribution(target_p[-1], rng)]


def _rows(logits: ArrayLike, count: int, name: str) -> NDArray[np.float64]:
    """`logits` as `count` checked rows ``[count, V]``; a single row ``[V]`` is repeated."""
    scores = check_logits(logits, name)
    if scores.ndim == 1:
        return np.broadcast_to(scores, (count, scores.size))
    if scores.ndim != 2 or len(scores) != count:
        raise ValueError(
            f"{name} must have shape [{count}, V] or [V] at this depth, got {list(scores.shape)}"
        )
    return scores
