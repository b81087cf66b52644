"""The cycle: draft, verify, keep what the verifier allows, add one more token.

On plain arrays and one sequence. This is the executable definition of speculative decoding that
the engine's batched loop is tested against.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mtplx.sampling import (
    SamplerConfig,
    Verifier,
    block_acceptance,
    block_residual_distribution,
    check_draft_lengths,
    check_logits,
    distribution_from_logits,
    exponential_race,
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
    verifier: Verifier = "token",
    prompt_ids: Sequence[int] = (),
    output_ids: Sequence[int] = (),
    stop_ids: Collection[int] = (),
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
        verifier: the rule that decides what is kept of the draft. All three emit the target's
            distribution. "token" and "block" draw the draft, then decide on it, with numbers of
            ``rng.random()``. "coupled" takes ``rng.standard_exponential([depth + 1, V])`` and lets
            draft and target run on the same row at each position: what is emitted does not depend
            on the draft, which decides only how much of it comes out in one cycle.
        prompt_ids: the prompt's tokens, and
        output_ids: those emitted in earlier cycles; penalties and length rules look at them.
        stop_ids: the tokens that end a text, for `min_tokens` and `suppress_stop`.

    Returns:
        1 to ``depth + 1`` token ids: the accepted drafts, then the correction (after a rejection)
        or the bonus (after none).

    Raises:
        ValueError: for a bad depth, verifier, shape or logit, in one line that says where.
    """
    if verifier not in get_args(Verifier):
        known = ", ".join(get_args(Verifier))
        raise ValueError(f"verifier must be one of {known}: got {verifier!r}")
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
        return distribution_from_logits(
            row, config, prompt_ids=prompt_ids, output_ids=history, stop_ids=stop_ids
        )

    coupled = verifier == "coupled"
    exponentials = rng.standard_exponential(targets.shape) if coupled else None

    draft: list[int] = []
    draft_q = []
    for position, row in enumerate(drafters):
        q = shaped(row, draft)
        draft_q.append(q)
        draft.append(
            sample_from_distribution(q, rng)
            if exponentials is None
            else exponential_race(q, exponentials[position])
        )
    target_p = [shaped(row, draft[:position]) for position, row in enumerate(targets)]

    if exponentials is not None:
        return verify_draft_coupled(target_p, draft, exponentials)
    verify = verify_draft_block if verifier == "block" else verify_draft_token
    return verify(target_p, draft_q, draft, rng)


def verify_draft_token(
    target_p: Sequence[ArrayLike],
    draft_q: Sequence[ArrayLike],
    draft: Sequence[int],
    rng: np.random.Generator,
) -> list[int]:
    """Verify a draft of K tokens in order, given the distributions at its positions.

    Each token is kept or corrected by `verify_one_token`, and the first correction ends it.

    Args:
        target_p: K+1 distributions ``[V]``: the target's after 0 to K drafted tokens.
        draft_q: K distributions ``[V]``: those the drafted tokens were drawn from.
        draft: the K drafted token ids.
        rng: where randomness comes from: one ``random()`` for each token until one is rejected,
            then one for the correction or the bonus.

    Returns:
        1 to K+1 token ids, as `speculative_decode`.

    Raises:
        ValueError: if the three lengths do not fit together, or as `verify_one_token`.
    """
    check_draft_lengths(target_p, draft_q, draft)
    emitted: list[int] = []
    for p, q, token in zip(target_p, draft_q, draft, strict=False):
        decision = verify_one_token(p, q, token, rng)
        emitted.append(decision.token_id)
        if not decision.accepted:
            # What follows was drafted behind a token that is not emitted: it is void.
            return emitted
    return [*emitted, sample_from_distribution(target_p[-1], rng)]


def verify_draft_block(
    target_p: Sequence[ArrayLike],
    draft_q: Sequence[ArrayLike],
    draft: Sequence[int],
    rng: np.random.Generator,
) -> list[int]:
    """Verify a draft of K tokens as a whole, by the probabilities of `block_acceptance`.

    Whether the first tokens are kept depends on those behind them. So a text whose next cycle met
    this one's numbers again, at the positions that it drafts anew, would not follow the target:
    every cycle needs its own.

    Args:
        target_p: K+1 distributions ``[V]``: the target's after 0 to K drafted tokens.
        draft_q: K distributions ``[V]``: those the drafted tokens were drawn from.
        draft: the K drafted token ids.
        rng: where randomness comes from: always K ``random()``, one for each token in order, then
            one for the correction or the bonus.

    Returns:
        1 to K+1 token ids, as `speculative_decode`.

    Raises:
        ValueError: as `block_acceptance`.
    """
    weights, probabilities = block_acceptance(target_p, draft_q, draft)
    passed = [rng.random() < probability for probability in probabilities]
    # The last that passes decides, whatever the ones before it did.
    kept = max((count for count, passes in enumerate(passed, start=1) if passes), default=0)
    if kept == len(draft):
        last = sample_from_distribution(target_p[-1], rng)
    else:
        last = sample_from_distribution(
            block_residual_distribution(target_p[kept], draft_q[kept], weights[kept]), rng
        )
    return [*map(int, draft[:kept]), last]


def verify_draft_coupled(
    target_p: Sequence[ArrayLike],
    draft: Sequence[int],
    exponentials: Sequence[ArrayLike] | NDArray[Any],
) -> list[int]:
    """Verify a draft of K tokens by the target's own: it is kept as far as they are the same.

    Every token emitted is the winner of the target's `exponential_race` at its position. Where the
    noise is a function of the position alone, so is the text: it is the same at every depth and
    with any drafter. The draft agrees often if its tokens won races with the same noise.

    Args:
        target_p: K+1 distributions ``[V]``: the target's after 0 to K drafted tokens.
        draft: the K drafted token ids.
        exponentials: K+1 rows ``[V]``, the noise of these positions.

    Returns:
        1 to K+1 token ids, as `speculative_decode`.

    Raises:
        ValueError: if the three lengths do not fit together, or as `exponential_race`.
    """
    if not len(target_p) == len(exponentials) == len(draft) + 1:
        raise ValueError(
            f"a draft of {len(draft)} tokens needs one more of the target's distributions and as "
            f"many rows of exponentials, got {len(target_p)} and {len(exponentials)}"
        )
    emitted: list[int] = []
    # The bonus, behind the draft, has nothing to equal.
    for p, noise, drafted in zip(target_p, exponentials, [*draft, None], strict=True):
        emitted.append(exponential_race(p, noise))
        if emitted[-1] != drafted:
            break
    return emitted


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
