"""The law: what a sampler's settings make of logits, and how a drafted token is kept or replaced.

Everything here is a pure function on NumPy arrays in float64. It is the definition that the
batched torch code is tested against, so it is written to be read, and nothing in it is
approximate.

Two distributions over one vocabulary of V tokens run through the file (the words of Leviathan et
al. 2023, "Fast Inference from Transformers via Speculative Decoding", and Chen et al. 2023,
"Accelerating Large Language Model Decoding with Speculative Sampling"):

* the target ``p``: the model's next-token distribution, shaped by the request's sampler;
* the draft's ``q``: the distribution that the proposed token was really drawn from.

Three verifiers, all exact, decide what is kept of a draft; the cycles that they make are in
`mtplx.speculative`:

* ``token`` looks at one position at a time (Leviathan, Chen);
* ``block`` looks at the whole draft, and never keeps less of it on average (Sun et al. 2025,
  "Block Verification Accelerates Speculative Decoding");
* ``coupled`` lets draft and target run the same race, so that what is emitted depends on the
  target and the noise alone (Daliri et al. 2024, "Coupling without Communication and
  Drafter-Invariant Speculative Decoding").

Everything below "Drawing, accepting, correcting" also works on object arrays of
``fractions.Fraction``, and is then exact.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

# How far from 1 the sum of a caller's probabilities may be: float32 softmaxes pass, mistakes fail.
SUM_TOLERANCE = 1e-6

Verifier = Literal["token", "block", "coupled"]
"""The exact rules by which a draft is kept or replaced."""


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
        typical_p: above 0, up to 1. Keep the tokens whose information is nearest to the
            distribution's entropy, until their mass reaches it (Meister et al. 2023, "Locally
            Typical Sampling"). 1 is off.
        repetition_penalty: above 0. Divides positive logits, multiplies negative ones, of every
            token in prompt or output, once a token (Keskar et al. 2019, CTRL). 1 is off.
        presence_penalty: subtracted from the logit of every token in the output (OpenAI's API).
        frequency_penalty: subtracted once for each time the token is in the output.
        logit_bias: token id -> number added to its logit; ``-inf`` forbids the token. Give a
            mapping or pairs; kept as pairs sorted by token id, and `bias` is the mapping.
        no_repeat_ngram: no sequence of so many tokens comes twice in prompt and output together
            (Paulus et al. 2017, "A Deep Reinforced Model for Abstractive Summarization"). 0 is
            off; 1 forbids every token seen so far.
        min_tokens: the tokens that end the text do not come before so many others have.
        suppress_stop: they never come.
        banned_tokens: ids that never come; kept sorted.
        forced_tokens: ids that the output begins with, whatever the logits and the other settings
            say. Those start to act after them, and count them.
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
    typical_p: float = 1.0
    no_repeat_ngram: int = 0
    min_tokens: int = 0
    suppress_stop: bool = False
    banned_tokens: Sequence[int] = ()
    forced_tokens: Sequence[int] = ()
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
        normalise("typical_p", _finite("typical_p", self.typical_p))
        if not 0 < self.typical_p <= 1:
            raise ValueError(f"typical_p must be above 0 and at most 1, got {self.typical_p}")

        for name in ("top_k", "no_repeat_ngram", "min_tokens"):
            count = _integer(name, getattr(self, name), none=0)
            if count is None or count < 0:
                raise ValueError(f"{name} must be 0 (off) or more, got {count}")
            normalise(name, count)
        if not isinstance(self.suppress_stop, bool):
            raise ValueError(f"suppress_stop must be true or false, got {self.suppress_stop!r}")
        banned = _token_ids("banned_tokens", self.banned_tokens)
        normalise("banned_tokens", tuple(sorted(set(banned))))
        if isinstance(self.forced_tokens, Set):
            raise ValueError(f"forced_tokens must be in order, got {self.forced_tokens!r}")
        normalise("forced_tokens", _token_ids("forced_tokens", self.forced_tokens))
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


def _token_ids(name: str, ids: object) -> tuple[int, ...]:
    if not isinstance(ids, Iterable) or isinstance(ids, str | bytes | Mapping):
        raise ValueError(f"{name} must be a list of token ids, got {ids!r}")
    try:
        tokens = tuple(ids)
    except TypeError:  # an array of no dimensions calls itself iterable
        raise ValueError(f"{name} must be a list of token ids, got {ids!r}") from None
    for token in tokens:
        if isinstance(token, bool) or not isinstance(token, Integral) or token < 0:
            raise ValueError(f"{name} has {token!r} for a token id: ids are integers from 0 up")
    return tuple(int(token) for token in tokens)


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
    stop_ids: Collection[int] = (),
    allowed: NDArray[np.bool_] | None = None,
) -> NDArray[np.float64]:
    """The distribution that `config` makes of `logits`.

    In order, as transformers' ``generate()`` (5.24) builds its processors: logit bias, repetition
    penalty, what is forbidden, temperature, top-k, top-p, min-p, typical-p; then one softmax over
    what is left. Presence and frequency penalties, which transformers lacks, stand with the
    repetition penalty, after it. Each probability filter sees the distribution that the earlier
    ones left, renormalised. A forced token has probability 1.

    Ties. Top-k keeps every token that ties with the k-th, typical-p every one that is as near to
    the entropy as the last that it needs. Top-p cuts inside a tie: it walks up from the least
    likely token and, among equals, from the lowest id, removing while the mass removed stays
    within ``1 - top_p``; so the higher ids of a tie stay, and one token always does. How *many* of
    a tie stay is transformers' answer too; which ones is its answer only where torch's sort is
    stable, and on rows above 16 tokens (torch 2.13, x86) it is not. Temperature 0 skips the
    filters, and gives a tie to the lowest id, as ``torch.argmax`` does.

    Args:
        logits: ``[V]`` or ``[..., V]``, finite or -inf; -inf tokens get probability 0.
        config: the sampler's settings.
        prompt_ids: the prompt's tokens, for repetition penalty and n-grams.
        output_ids: the tokens generated so far, for all that looks back or counts. Both histories
            hold for every row. Ids of V and above are let pass, as in transformers: some models
            embed more tokens than they can emit.
        stop_ids: the tokens that end the text, for `min_tokens` and `suppress_stop`; ids outside
            the vocabulary are let pass, since some configuration files say -1 for none.
        allowed: ``[V]`` or ``[..., V]``, the tokens that a grammar lets come next; None for all.

    Returns:
        float64 probabilities in the shape of `logits`, each row summing to 1.

    Raises:
        ValueError: for a NaN, a +inf or a row of nothing but -inf, naming row and token, in the
            logits or after bias and penalties; where the settings forbid all that is left, naming
            them; for a bias, a setting's token or a history outside the vocabulary.
    """
    scores = check_logits(logits)
    check_token_settings(config, scores.shape[-1])
    output = _tokens(output_ids, "output_ids")
    if len(output) < len(config.forced_tokens):
        forced = np.zeros_like(scores)
        forced[..., config.forced_tokens[len(output)]] = 1.0
        return forced
    prompt = _tokens(prompt_ids, "prompt_ids")
    if config.logit_bias or prompt.size or output.size:
        scores = _biased_and_penalised(scores, config, prompt, output)
        scores = check_logits(scores, "logits after bias and penalties")
    for name, permitted in _permitted(scores.shape[-1], config, prompt, output, stop_ids, allowed):
        scores = _keep(scores, permitted)
        check_logits(scores, f"logits after {name}")

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
        scores = _keep(scores, likely)
        probabilities = _softmax(scores, config.temperature)
    if config.typical_p < 1:
        typical = _typical(probabilities, config.typical_p)
        probabilities = _softmax(_keep(scores, typical), config.temperature)
    return probabilities


def check_token_settings(config: SamplerConfig, vocabulary: int) -> None:
    """Raise a ValueError if a setting names a token outside the vocabulary."""
    for name in ("logit_bias", "banned_tokens", "forced_tokens"):
        ids = config.bias if name == "logit_bias" else getattr(config, name)
        for token in ids:
            if token >= vocabulary:
                raise ValueError(f"{name} names token {token}, but there are {vocabulary} tokens")


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
    prompt: NDArray[np.int64],
    output: NDArray[np.int64],
) -> NDArray[np.float64]:
    scores = scores.copy()
    prompt, output = (ids[ids < scores.shape[-1]] for ids in (prompt, output))
    # An overflow to +inf is reported by the caller's check; one to -inf is a probability of 0.
    with np.errstate(over="ignore"):
        for token, bias in config.bias.items():
            scores[..., token] += bias
        if config.repetition_penalty != 1:
            seen = np.union1d(prompt, output)
            before, penalty = scores[..., seen], config.repetition_penalty
            scores[..., seen] = np.where(before < 0, before * penalty, before / penalty)
        if config.presence_penalty or config.frequency_penalty:
            emitted, counts = np.unique(output, return_counts=True)
            scores[..., emitted] -= config.presence_penalty + config.frequency_penalty * counts
    return scores


def _tokens(ids: Sequence[int] | NDArray[np.integer[Any]] | None, name: str) -> NDArray[np.int64]:
    tokens = np.asarray(() if ids is None else ids)
    if tokens.size == 0:
        return np.empty(0, dtype=np.int64)
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise ValueError(
            f"{name} must be one row of integers, got {tokens.dtype} of shape {list(tokens.shape)}"
        )
    if tokens.min() < 0:
        raise ValueError(f"{name} holds {tokens.min()}: token ids are integers from 0 up")
    return tokens.astype(np.int64)


def _permitted(
    vocabulary: int,
    config: SamplerConfig,
    prompt: NDArray[np.int64],
    output: NDArray[np.int64],
    stop_ids: Collection[int],
    allowed: NDArray[np.bool_] | None,
) -> Iterator[tuple[str, NDArray[np.bool_]]]:
    """What each setting that forbids tokens here lets come, with its name."""

    def all_but(ids: Iterable[int]) -> NDArray[np.bool_]:
        permitted = np.ones(vocabulary, dtype=np.bool_)
        permitted[[token for token in ids if 0 <= token < vocabulary]] = False
        return permitted

    if config.no_repeat_ngram:
        text = np.concatenate([prompt, output]).tolist()
        yield "no_repeat_ngram", all_but(_repeating(text, config.no_repeat_ngram))
    if config.banned_tokens:
        yield "banned_tokens", all_but(config.banned_tokens)
    if len(output) < config.min_tokens:
        yield "min_tokens", all_but(stop_ids)
    if config.suppress_stop:
        yield "suppress_stop", all_but(stop_ids)
    if allowed is not None:
        yield "the grammar", allowed


def _repeating(text: list[int], size: int) -> set[int]:
    """Tokens that would make the last `size` tokens of a text ones that it has already."""
    start = len(text) - size + 1
    if start <= 0:
        return set()
    last = text[start:]
    return {text[i + size - 1] for i in range(start) if text[i : i + size - 1] == last}


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


def _typical(probabilities: NDArray[np.float64], typical_p: float) -> NDArray[np.bool_]:
    with np.errstate(divide="ignore", invalid="ignore"):
        information = -np.log(probabilities)
        entropy = np.nansum(probabilities * information, axis=-1, keepdims=True)
    distance = np.abs(information - entropy)
    nearest = distance.argsort(axis=-1, kind="stable")
    mass = np.take_along_axis(probabilities, nearest, axis=-1).cumsum(axis=-1)
    last = (mass < typical_p).sum(axis=-1, keepdims=True).clip(max=distance.shape[-1] - 1)
    farthest = np.take_along_axis(distance, np.take_along_axis(nearest, last, axis=-1), axis=-1)
    kept: NDArray[np.bool_] = distance <= farthest
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
    _check_token(token, p.size)
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
    return block_residual_distribution(target_p, draft_q, 1)


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


# --- A whole draft at once ------------------------------------------------------------------------


def block_acceptance(
    target_p: Sequence[ArrayLike], draft_q: Sequence[ArrayLike], draft: Sequence[int]
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Block verification of a draft x_1 .. x_K (Sun et al. 2025).

    The weight w_i is the probability with which at least i tokens are kept of a draft that begins
    x_1 .. x_i. It is 1 for i = 0, and then ``min(1, w_{i-1} p_i(x_i) / q_i(x_i))``; where
    q_i(x_i) is 0 it is 1 if ``w_{i-1} p_i(x_i) > 0``, else 0. Unlike the product of the token
    rule's acceptances it recovers: a token that the target likes better makes up for an earlier
    one that it liked less.

    Each i has a uniform u_i of its own. What is kept is tau, the *largest* i with ``u_i < h_i``, or
    0 if there is none. With ``S_i = sum_x max(w_i p_{i+1}(x) - q_{i+1}(x), 0)``, h_i is
    ``S_i / (S_i + 1 - w_i)`` for i < K, and h_K is w_K. After tau < K tokens the correction is
    drawn from `block_residual_distribution` of the next position with the weight w_tau; after K
    the bonus is drawn from p_{K+1}.

    Args:
        target_p: K+1 distributions ``[V]``: the target's after 0 to K drafted tokens. The last is
            the bonus's, and decides nothing here.
        draft_q: K distributions ``[V]``: those the drafted tokens were drawn from. K may depend on
            the drafted tokens: drafting may stop behind any of them because of what it is.
        draft: the K drafted token ids.

    Returns:
        The weights w_0 to w_K (``[K + 1]``) and the probabilities h_1 to h_K (``[K]``).

    Raises:
        ValueError: if the three lengths do not fit together, for a row that is not a distribution
            or of another vocabulary, or for a token in none.
    """
    check_draft_lengths(target_p, draft_q, draft)
    pairs = [_pair(p, q) for p, q in zip(target_p, draft_q, strict=False)]
    weights: list[Any] = [1]
    for (p, q), token in zip(pairs, draft, strict=True):
        _check_token(token, p.size)
        # min(1, w p / q), written as in `acceptance_probability`.
        reached = weights[-1] * p.item(token)
        weights.append(reached / max(reached, q.item(token)) if reached > 0 else reached)

    probabilities: list[Any] = []
    for weight, (p, q) in zip(weights[1:], pairs[1:], strict=False):
        left = np.maximum(weight * p - q, 0).sum()
        # At w = 1 the quotient is S / S: 1, and so we call it where S is 0 too. It cannot matter
        # there: S = 0 means that the next p and q are equal, so the next w is 1 again, and h with
        # it. Something later is kept for certain, if need be the last token, whose h is its w.
        probabilities.append(left / (left + (1 - weight)) if weight < 1 else weight)
    probabilities += weights[1:][-1:]

    dtype = np.result_type(*(row.dtype for pair in pairs for row in pair), np.float64)
    return np.array(weights, dtype=dtype), np.array(probabilities, dtype=dtype)


def block_residual_distribution(
    target_p: ArrayLike, draft_q: ArrayLike, weight: float
) -> NDArray[Any]:
    """What block verification draws a correction from: ``max(w p - q, 0)``, normalised (``[V]``).

    With a `weight` of 1 it is the token rule's residual. Where nothing is left no correction is
    ever drawn (see `block_acceptance`); the answer is then p.

    Args:
        target_p: ``[V]``, the target's distribution at the position of the correction.
        draft_q: ``[V]``, the one that the draft's token at this position was drawn from.
        weight: w of the last token kept, in [0, 1]; 1 where none is.

    Raises:
        ValueError: if either is not a distribution, their lengths differ, or for another weight.
    """
    p, q = _pair(target_p, draft_q)
    if not 0 <= weight <= 1:
        raise ValueError(f"weight must be between 0 and 1, got {weight}")
    excess = np.maximum(weight * p - q, 0)
    total = excess.sum()
    return excess / total if total > 0 else p.copy()


def check_draft_lengths(
    target_p: Sequence[ArrayLike], draft_q: Sequence[ArrayLike], draft: Sequence[int]
) -> None:
    """Raise a ValueError unless there are K+1 targets and K draft distributions to K tokens."""
    if not len(target_p) - 1 == len(draft_q) == len(draft):
        raise ValueError(
            f"a draft of {len(draft)} tokens needs as many draft distributions and one more of the "
            f"target's, got {len(draft_q)} and {len(target_p)}"
        )


# --- The race -------------------------------------------------------------------------------------


def exponential_race(probabilities: ArrayLike, exponentials: ArrayLike) -> int:
    """The token that arrives first when x takes the time ``E_x / p_x``; it is drawn from p.

    The Gumbel-max trick, as a race: each time is exponential with rate p_x, and the first of such
    times is x's with probability p_x. Two distributions that run with the same `exponentials` agree
    with probability ``sum_x 1 / sum_y max(p_y / p_x, q_y / q_x)``, x over the tokens of both
    (Daliri et al. 2024), which is high where they are close.

    A token of probability 0 never arrives. A tie, of probability 0, goes to the lowest id.

    Args:
        probabilities: ``[V]``.
        exponentials: ``[V]``, independent and exponentially distributed with one and the same mean.

    Raises:
        ValueError: if `probabilities` is not a distribution, or `exponentials` are not as many
            numbers of 0 or more.
    """
    p = _distribution(probabilities, "probabilities")
    noise: NDArray[Any] = np.asarray(exponentials)
    if noise.shape != p.shape:
        raise ValueError(
            f"exponentials must have shape [{p.size}] as the probabilities, got {list(noise.shape)}"
        )
    wrong = ~(noise >= 0)
    if wrong.any():
        token = int(wrong.argmax())
        raise ValueError(f"exponentials has {noise[token]} at token {token}: a time is 0 or more")
    runners = np.flatnonzero(p)
    # A tiny p may overflow to a time of infinity, which loses to the most likely token's.
    with np.errstate(over="ignore"):
        times = noise[runners] / p[runners]
    return int(runners[times.argmin()])


# --- What is a distribution -----------------------------------------------------------------------


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


def _check_token(token: int, vocabulary: int) -> None:
    if not 0 <= token < vocabulary:
        raise ValueError(f"token {token} is outside the vocabulary of {vocabulary} tokens")
