"""The law: what a sampler's settings make of logits, and how a drafted token is kept or replaced.

Everything here is a pure function on NumPy arrays in float64. It is the definition that the
batched torch code is tested against, so it is written to be read, and nothing in it is
approximate.

Two distributions over one vocabulary of V tokens run through the file (the words of Leviathan et
al. 2023, "Fast Inference from Transformers via Speculative Decoding", and Chen et al. 2023,
"Accelerating Large Language Model Decoding with Speculative Sampling"):

* the target ``p``: the model's next-token distribution, shaped by the request's sampler;
* the draft's ``q``: the distribution that the proposed token was really drawn from.

`acceptance_probability`, `residual_distribution` and `speculative_output_marginal` also work on
object arrays of ``fractions.Fraction``, and are then exact.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

# How far from 1 the sum of a caller's probabilities may be: float32 softmaxes pass, mistakes fail.
SUM_TOLERANCE = 1e-6


@dataclass(frozen=True)
class SamplerConfig:
    """How one request turns logits into a distribution. Immutable and hashable.

    The defaults change nothing: the distribution is the softmax of the logits. The filters act
    in the order of transformers' ``generate()``; see `distribution_from_logits`.

    Attributes:
        temperature: at least 0. 0 is greedy: all mass on the largest logit.
        top_k: keep the k largest logits (ties with the k-th stay). 0 is off; None, as
            configuration files write it, is taken as 0.
        top_p: in [0, 1]. Keep the smallest set of most likely tokens whose mass reaches it.
            1 is off; 0 keeps one token.
        min_p: in [0, 1]. Drop tokens less likely than ``min_p`` times the most likely. 0 is off.
        repetition_penalty: above 0. Divides positive logits, multiplies negative ones, of every
            token in prompt or output, once a token (Keskar et al. 2019, CTRL). 1 is off.
        presence_penalty: subtracted from the logit of every token in the output (OpenAI's API).
        frequency_penalty: subtracted once for each time the token is in the output.
        logit_bias: token id -> number added to its logit; ``-inf`` forbids the token. Give a
            mapping or pairs; kept as pairs sorted by token id, and `bias` is the mapping.
        seed: in [0, 2**64), or None for a fresh one. Functions here take their randomness from
            an ``rng`` and do not read it.

    Raises:
        ValueError: one line that names the setting, its value and what is allowed.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    seed: int | None = None

    def __post_init__(self) -> None:
        def normalise(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        for name in ("temperature", "repetition_penalty", "presence_penalty", "frequency_penalty"):
            normalise(name, _finite(name, getattr(self, name)))
        if self.temperature < 0:
            raise ValueError(f"temperature must be 0 (greedy) or more, got {self.temperature}")
        if self.repetition_penalty <= 0:
            raise ValueError(
                f"repetition_penalty must be above 0 (1 is off), got {self.repetition_penalty}"
            )
        for name in ("top_p", "min_p"):
            value = _finite(name, getattr(self, name))
            if not 0 <= value <= 1:
                raise ValueError(f"{name} must be between 0 and 1, got {value}")
            normalise(name, value)

        normalise("top_k", _integer("top_k", self.top_k, none=0))
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 (off) or more, got {self.top_k}")
        normalise("seed", _integer("seed", self.seed, none=None))
        if self.seed is not None and not 0 <= self.seed < 2**64:
            raise ValueError(f"seed must be between 0 and 2**64 - 1, got {self.seed}")
        normalise("logit_bias", _bias_pairs(self.logit_bias))

    @property
    def bias(self) -> dict[int, float]:
        """`logit_bias` as a new dictionary, token id -> bias."""
        return dict(self.logit_bias)


def _finite(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or not _fits(value):
        raise ValueError(f"{name} must be a finite number, got {value!r}")
    return float(value)


def _fits(value: Real) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer past float64
        return False


def _integer(name: str, value: object, none: int | None) -> int | None:
    """`value` as an int; None becomes `none`."""
    if value is None:
        return none
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ValueError(f"{name} must be an integer, got {value!r}")
    return int(value)


def _bias_pairs(logit_bias: object) -> tuple[tuple[int, float], ...]:
    pairs = logit_bias.items() if isinstance(logit_bias, Mapping) else logit_bias
    biases: dict[int, float] = {}
    try:
        items = [(token, bias) for token, bias in pairs]  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        raise ValueError(f"logit_bias must map token ids to numbers, got {logit_bias!r}") from None
    for token, bias in items:
        if isinstance(token, bool) or not isinstance(token, Integral) or token < 0:
            raise ValueError(f"logit_bias has {token!r} for a token id: ids are integers from 0 up")
        banned = bias == -math.inf
        if isinstance(bias, bool) or not isinstance(bias, Real) or not (banned or _fits(bias)):
            raise ValueError(
                f"logit_bias of token {token} must be a finite number or -inf, got {bias!r}"
            )
        if int(token) in biases:
            raise ValueError(f"logit_bias names token {token} twice")
        biases[int(token)] = float(bias)
    return tuple(sorted(biases.items()))


# --- From logits to a distribution ----------------------------------------------------------------


def distribution_from_logits(
    logits: ArrayLike,
    config: SamplerConfig,
    *,
    prompt_ids: Sequence[int] | NDArray[np.integer[Any]] | None = None,
    output_ids: Sequence[int] | NDArray[np.integer[Any]] | None = None,
) -> NDArray[np.float64]:
    """The distribution that `config` makes of `logits`.

    In order, as transformers' ``generate()`` (5.24) builds its processors: logit bias, repetition
    penalty, temperature, top-k, top-p, min-p; then one softmax over what is left. Presence and
    frequency penalties, which transformers lacks, stand with the repetition penalty, after it.
    Each probability filter sees the distribution that the earlier ones left, renormalised.

    Ties. Top-k keeps every token that ties with the k-th. Top-p cuts inside a tie: it walks up
    from the least likely token and, among equals, from the lowest id, removing while the mass
    removed stays within ``1 - top_p``; so the higher ids of a tie stay, and one token always
    does. How *many* of a tie stay is transformers' answer too; which ones is its answer only
    where torch's sort is stable, and on rows above 16 tokens (torch 2.13, x86) it is not.
    Temperature 0 skips the filters, and gives a tie to the lowest id, as ``torch.argmax`` does.

    Args:
        logits: ``[V]`` or ``[..., V]``, finite or -inf; -inf tokens get probability 0.
        config: the sampler's settings.
        prompt_ids: the prompt's tokens, for the repetition penalty.
        output_ids: the tokens generated so far, for all three penalties. Both histories hold for
            every row. Ids of V and above are let pass, as in transformers: some models embed more
            tokens than they can emit.

    Returns:
        float64 probabilities in the shape of `logits`, each row summing to 1.

    Raises:
        ValueError: for a NaN, a +inf or a row of nothing but -inf, naming row and token, in the
            logits or after bias and penalties; for a bias or a history outside the vocabulary.
    """
    scores = check_logits(logits)
    if config.logit_bias or prompt_ids is not None or output_ids is not None:
        scores = _biased_and_penalised(scores, config, prompt_ids, output_ids)
        scores = check_logits(scores, "logits after bias and penalties")

    if config.temperature == 0:
        greedy = np.zeros_like(scores)
        np.put_along_axis(greedy, scores.argmax(axis=-1, keepdims=True), 1.0, axis=-1)
        return greedy

    # Temperature enters through the softmax alone: a positive factor leaves the order as it is,
    # and scores that are never scaled never overflow.
    if config.top_k:
        scores = _keep(scores, _top_k(scores, config.top_k))
    if config.top_p < 1:
        scores = _keep(scores, _top_p(scores, config.temperature, config.top_p))
    probabilities = _softmax(scores, config.temperature)
    if config.min_p:
        likely = probabilities >= config.min_p * probabilities.max(axis=-1, keepdims=True)
        probabilities = _softmax(_keep(scores, likely), config.temperature)
    return probabilities


def check_logits(logits: ArrayLike, name: str = "logits") -> NDArray[np.float64]:
    """`logits` (``[..., V]``, V at least 1) as float64, if every row is one a softmax can take.

    Raises:
        ValueError: naming the first row and token that is NaN or +inf, or a row that is all -inf.
    """
    scores = np.asarray(logits, dtype=np.float64)
    if scores.ndim == 0 or scores.shape[-1] == 0:
        raise ValueError(f"{name} must have shape [..., V] with V >= 1, got {list(scores.shape)}")
    bad = np.isnan(scores) | (scores == np.inf)
    if bad.any():
        *row, token = (int(index) for index in np.argwhere(bad)[0])
        value = scores[(*row, token)]
        raise ValueError(f"{name} have {value} at {_place(row)}token {token}: no softmax exists")
    empty = (scores == -np.inf).all(axis=-1)
    if empty.any():
        row = [int(index) for index in np.argwhere(empty)[0]]
        raise ValueError(f"{name} are -inf at {_place(row)}every token: nothing can be drawn")
    return scores


def _place(row: list[int]) -> str:
    return f"row {', '.join(map(str, row))}, " if row else ""


def _biased_and_penalised(
    scores: NDArray[np.float64],
    config: SamplerConfig,
    prompt_ids: Sequence[int] | NDArray[np.integer[Any]] | None,
    output_ids: Sequence[int] | NDArray[np.integer[Any]] | None,
) -> NDArray[np.float64]:
    vocabulary = scores.shape[-1]
    scores = scores.copy()
    prompt = _history(prompt_ids, vocabulary, "prompt_ids")
    output = _history(output_ids, vocabulary, "output_ids")
    # An overflow to +inf is reported by the caller's check; one to -inf is a probability of 0.
    with np.errstate(over="ignore"):
        for token, bias in config.bias.items():
            if token >= vocabulary:
                raise ValueError(
                    f"logit_bias names token {token}, but there are {vocabulary} tokens"
                )
            scores[..., token] += bias
        if config.repetition_penalty != 1:
            seen = np.union1d(prompt, output)
            before, penalty = scores[..., seen], config.repetition_penalty
            scores[..., seen] = np.where(before < 0, before * penalty, before / penalty)
        if config.presence_penalty or config.frequency_penalty:
            emitted, counts = np.unique(output, return_counts=True)
            scores[..., emitted] -= config.presence_penalty + config.frequency_penalty * counts
    return scores


def _history(
    ids: Sequence[int] | NDArray[np.integer[Any]] | None, vocabulary: int, name: str
) -> NDArray[np.int64]:
    tokens = np.asarray(() if ids is None else ids)
    if tokens.size == 0:
        return np.empty(0, dtype=np.int64)
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise ValueError(
            f"{name} must be one row of integers, got {tokens.dtype} of shape {list(tokens.shape)}"
        )
    if tokens.min() < 0:
        raise ValueError(f"{name} holds {tokens.min()}: token ids are integers from 0 up")
    return tokens[tokens < vocabulary].astype(np.int64)


def _keep(scores: NDArray[np.float64], kept: NDArray[np.bool_]) -> NDArray[np.float64]:
    return np.where(kept, scores, -np.inf)


def _softmax(scores: NDArray[np.float64], temperature: float) -> NDArray[np.float64]:
    # Shifting before dividing keeps the largest exponent at exactly 0 whatever the temperature;
    # what overflows below it is -inf, a probability of 0.
    with np.errstate(over="ignore"):
        exponents = (scores - scores.max(axis=-1, keepdims=True)) / temperature
    weights = np.exp(exponents)
    probabilities: NDArray[np.float64] = weights / weights.sum(axis=-1, keepdims=True)
    return probabilities


def _top_k(scores: NDArray[np.float64], k: int) -> NDArray[np.bool_]:
    first = max(scores.shape[-1] - k, 0)
    threshold = np.partition(scores, first, axis=-1)[..., first, None]
    kept: NDArray[np.bool_] = scores >= threshold
    return kept


def _top_p(scores: NDArray[np.float64], temperature: float, top_p: float) -> NDArray[np.bool_]:
    ascending = np.argsort(scores, axis=-1, kind="stable")
    probabilities = np.take_along_axis(_softmax(scores, temperature), ascending, axis=-1)
    kept_in_order = probabilities.cumsum(axis=-1) > 1 - top_p
    kept_in_order[..., -1] = True
    kept = np.empty_like(kept_in_order)
    np.put_along_axis(kept, ascending, kept_in_order, axis=-1)
    return kept


# --- Drawing, accepting, correcting ---------------------------------------------------------------


class SpeculativeDecision(NamedTuple):
    """What became of one drafted token.

    Attributes:
        accepted: whether the drafted token was kept.
        token_id: the token to emit: the drafted one, or the correction that replaces it.
        acceptance_prob: the probability with which it was to be kept.
    """

    accepted: bool
    token_id: int
    acceptance_prob: float


def sample_from_distribution(
    probabilities: ArrayLike, rng: np.random.Generator | None = None
) -> int:
    """Draw one token id from `probabilities` (``[V]``) by inverting the cumulative sum.

    Uses one ``rng.random()`` (None: a fresh generator). A token of probability 0 never comes out.

    Raises:
        ValueError: if `probabilities` is not a distribution.
    """
    p = _distribution(probabilities, "probabilities")
    rng = np.random.default_rng() if rng is None else rng
    cumulative = p.cumsum()
    # Scaling by the last sum, which rounding may leave beside 1, keeps u below it for every
    # random() in [0, 1); and the first sum *above* u is never that of a token of probability 0.
    u = rng.random() * cumulative[-1]
    return int(np.searchsorted(cumulative, u, side="right"))


def acceptance_probability(target_p: ArrayLike, draft_q: ArrayLike, token: int) -> float:
    """With which probability a `token` drawn from `draft_q` is kept: ``min(1, p / q)``.

    Where q is 0 it is 1 if p > 0, else 0 (Leviathan et al. 2023, section 2.3).

    Args:
        target_p: ``[V]``, the target's distribution.
        draft_q: ``[V]``, the distribution the token was drawn from.
        token: its id.

    Raises:
        ValueError: if either is not a distribution, their lengths differ, or the token is in
            neither.
    """
    p, q = _pair(target_p, draft_q)
    if not 0 <= token < p.size:
        raise ValueError(f"token {token} is outside the vocabulary of {p.size} tokens")
    p_token: float = p.item(token)
    if p_token == 0:
        return p_token
    # min(1, p / q) written so that q = 0 needs no case of its own and nothing overflows.
    acceptance: float = p_token / max(p_token, q.item(token))
    return acceptance


def residual_distribution(target_p: ArrayLike, draft_q: ArrayLike) -> NDArray[Any]:
    """What a correction is drawn from: ``max(p - q, 0)``, normalised (``[V]``).

    Where nothing is left, p = q and no draft is ever rejected; the answer is then p.

    Raises:
        ValueError: if either is not a distribution or their lengths differ.
    """
    p, q = _pair(target_p, draft_q)
    excess = np.maximum(p - q, 0)
    total = excess.sum()
    return excess / total if total > 0 else p.copy()


def verify_one_token(
    target_p: ArrayLike, draft_q: ArrayLike, token: int, rng: np.random.Generator | None = None
) -> SpeculativeDecision:
    """Keep a `token` drawn from `draft_q`, or correct it: what is emitted follows `target_p`.

    Uses one ``rng.random()`` for the decision and, on a rejection, one more for the correction
    (None: a fresh generator). A token of target probability 0 is never kept.

    Raises:
        ValueError: as `acceptance_probability`.
    """
    rng = np.random.default_rng() if rng is None else rng
    acceptance = acceptance_probability(target_p, draft_q, token)
    # random() lies in [0, 1): with < an acceptance of 0 never keeps and one of 1 always does.
    if rng.random() < acceptance:
        return SpeculativeDecision(True, int(token), acceptance)
    correction = sample_from_distribution(residual_distribution(target_p, draft_q), rng)
    return SpeculativeDecision(False, correction, acceptance)


def speculative_output_marginal(target_p: ArrayLike, draft_q: ArrayLike) -> NDArray[Any]:
    """The distribution (``[V]``) of the token that `verify_one_token` emits for a draft from q.

    Composed from `acceptance_probability` and `residual_distribution` as they are: each token's
    drafted and kept mass, and the rejected mass spread over the residual. That it equals p is the
    theorem, and a fact to test, not an assumption made here.

    Raises:
        ValueError: if either is not a distribution or their lengths differ.
    """
    _, q = _pair(target_p, draft_q)
    acceptance = np.array(
        [acceptance_probability(target_p, draft_q, token) for token in range(q.size)],
        dtype=q.dtype,
    )
    rejected = (q * (1 - acceptance)).sum()
    marginal: NDArray[Any] = q * acceptance + rejected * residual_distribution(target_p, draft_q)
    return marginal


def _distribution(probabilities: ArrayLike, name: str) -> NDArray[Any]:
    """`probabilities` as an array, in float64 unless it holds objects, if it is a distribution."""
    p: NDArray[Any] = np.asarray(probabilities)
    if p.dtype != object:
        p = p.astype(np.float64)
    if p.ndim != 1 or p.size == 0:
        raise ValueError(f"{name} must have shape [V] with V >= 1, got {list(p.shape)}")
    wrong = ~(p >= 0)  # NaN is not >= 0 either
    if wrong.any():
        token = int(wrong.argmax())
        raise ValueError(f"{name} has {p[token]} at token {token}: a probability is 0 or more")
    total = p.sum()
    if not abs(total - 1) <= SUM_TOLERANCE:
        raise ValueError(f"{name} sums to {total}, not to 1: normalise it first")
    return p


def _pair(target_p: ArrayLike, draft_q: ArrayLike) -> tuple[NDArray[Any], NDArray[Any]]:
    p, q = _distribution(target_p, "target_p"), _distribution(draft_q, "draft_q")
    if p.size != q.size:
        raise ValueError(f"target_p has {p.size} tokens and draft_q {q.size}: one vocabulary only")
    return p, q
