"""What is asked of the engine, and what it did."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from mtplx.history import Constraint
from mtplx.sampling import SamplerConfig, Verifier

FinishReason = Literal["stop", "length"]


def keeps_its_depth(sampling: SamplerConfig, verifier: Verifier, deterministic: bool) -> bool:
    """Whether the same text is wanted again, by a seed or at temperature 0, and depth could show.

    Depth shows where rounding tells passes of different width apart, and by other rules than
    `coupled`.

    Args:
        sampling: of the request.
        verifier: of the request.
        deterministic: whether the trunk is.
    """
    greedy = sampling.temperature == 0
    wanted_again = greedy or sampling.seed is not None
    hidden = deterministic and (greedy or verifier == "coupled")
    return wanted_again and not hidden


@dataclass(frozen=True)
class Request:
    """One sequence to continue.

    Attributes:
        prompt: token ids, at least one.
        sampling: the sampler's settings.
        seed: of this request's noise.
        max_tokens: most tokens to emit.
        depth: drafted tokens per cycle; 0 is plain decoding.
        adaptive: draft fewer where more would not pay, so that `depth` is only the most. What pays
            depends on times, so only a `coupled` text can then be had again by its seed.
        stop_ids: tokens that end the text; the one that does is emitted.
        verifier: the rule that keeps or replaces what was drafted.
        grammar: begins a constraint on the text, behind its forced tokens; None for none.
        logprobs: report log-probabilities, of each emitted token and of so many of the likeliest;
            None for none at all.
    """

    prompt: tuple[int, ...]
    sampling: SamplerConfig
    seed: int
    max_tokens: int
    depth: int
    stop_ids: frozenset[int] = frozenset()
    verifier: Verifier = "token"
    grammar: Callable[[], Constraint] | None = None
    logprobs: int | None = None
    adaptive: bool = False

    def forbidding(self) -> list[str]:
        """What of its settings can forbid a token, by name."""
        names = ("logit_bias", "no_repeat_ngram", "banned_tokens", "min_tokens", "suppress_stop")
        used = [name for name in names if getattr(self.sampling, name)]
        return [*used, "the grammar"] if self.grammar else used


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities where a token was emitted: the model's own, of its logits as they are.

    They come before all settings, as OpenAI's API and vLLM report them, and do not depend on what
    was drafted, but for rounding.

    Attributes:
        token_id: the emitted token.
        logprob: its natural logarithm of probability.
        top: the likeliest tokens with theirs, the likeliest first.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass
class Stats:
    """Telemetry of one request.

    Attributes:
        tokens: emitted.
        cycles: passes of the trunk that emitted them.
        drafted_by_position: tokens drafted at each position of a cycle; where the text ends
            inside a draft, what lies behind its end is not counted here or below.
        decided_by_position: of those, how many had all drafts before them kept; the others were
            void.
        accepted_by_position: of those, how many were kept and emitted.
        acceptance_sum: summed acceptance probability over the drafts that were decided.
        cached_tokens: of the prompt, that a text before this one had read.
        prefill_seconds: wall clock, of the whole batch.
        decode_seconds: wall clock of the cycles up to this request's last token.
    """

    tokens: int = 0
    cycles: int = 0
    drafted_by_position: list[int] = field(default_factory=list)
    decided_by_position: list[int] = field(default_factory=list)
    accepted_by_position: list[int] = field(default_factory=list)
    acceptance_sum: float = 0.0
    cached_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0

    def record(
        self,
        depth: int,
        kept: int,
        emitted: int,
        probability: Sequence[float],
        seconds: float,
    ) -> None:
        """Count a cycle.

        Args:
            depth: tokens drafted.
            kept: drafted tokens emitted.
            emitted: tokens emitted, no more than `kept` where the text ends inside the draft.
            probability: with which each drafted token was to be kept.
            seconds: the cycle took.
        """
        self.decode_seconds += seconds
        self.cycles += 1
        self.tokens += emitted
        drafted = emitted if emitted == kept else depth
        decided = min(emitted, depth)
        self.acceptance_sum += sum(probability[:decided])
        for counts, reached in (
            (self.drafted_by_position, drafted),
            (self.decided_by_position, decided),
            (self.accepted_by_position, kept),
        ):
            counts += [0] * (drafted - len(counts))
            for position in range(reached):
                counts[position] += 1

    def snapshot(self) -> Stats:
        """A copy that later cycles do not change."""
        # By hand: of a large batch's cycle, dataclasses.replace would be a sixth.
        copy = Stats.__new__(Stats)
        copy.__dict__.update(self.__dict__)
        copy.drafted_by_position = list(self.drafted_by_position)
        copy.decided_by_position = list(self.decided_by_position)
        copy.accepted_by_position = list(self.accepted_by_position)
        return copy

    @property
    def tokens_per_cycle(self) -> float:
        """Mean accepted tokens, the correction or bonus counted."""
        return self.tokens / self.cycles if self.cycles else 0.0

    @property
    def acceptance_by_position(self) -> list[float]:
        """Share of drafts kept at each position, given that those before it were."""
        return [
            kept / decided if decided else 0.0
            for kept, decided in zip(
                self.accepted_by_position, self.decided_by_position, strict=True
            )
        ]

    @property
    def mean_acceptance_probability(self) -> float:
        """Mean probability with which the decided drafts were to be kept by the request's rule.

        min(1, p / q) by `token`; 0 or 1 by `coupled`, whose race leaves nothing to chance.
        """
        decided = sum(self.decided_by_position)
        return self.acceptance_sum / decided if decided else 0.0

    @property
    def decode_tokens_per_second(self) -> float:
        return self.tokens / self.decode_seconds if self.decode_seconds else 0.0

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "tokens": self.tokens,
            "cycles": self.cycles,
            "tokens_per_cycle": self.tokens_per_cycle,
            "drafted_by_position": self.drafted_by_position,
            "decided_by_position": self.decided_by_position,
            "accepted_by_position": self.accepted_by_position,
            "acceptance_by_position": self.acceptance_by_position,
            "mean_acceptance_probability": self.mean_acceptance_probability,
            "cached_tokens": self.cached_tokens,
            "prefill_seconds": self.prefill_seconds,
            "decode_seconds": self.decode_seconds,
            "decode_tokens_per_second": self.decode_tokens_per_second,
        }
