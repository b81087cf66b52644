"""What is asked of the engine, and what it did."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from mtplx.sampling import SamplerConfig

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Request:
    """One sequence to continue.

    Attributes:
        prompt: token ids, at least one.
        sampling: the sampler's settings.
        seed: of this request's noise.
        max_tokens: most tokens to emit.
        depth: drafted tokens per cycle; 0 is plain decoding.
        stop_ids: tokens that end the text; the one that does is emitted.
    """

    prompt: tuple[int, ...]
    sampling: SamplerConfig
    seed: int
    max_tokens: int
    depth: int
    stop_ids: frozenset[int] = frozenset()


@dataclass
class Stats:
    """Telemetry of one request.

    Attributes:
        tokens: emitted.
        cycles: passes of the trunk that emitted them.
        drafted_by_position: drafts verified or voided at each position of a cycle.
        accepted_by_position: of those, how many were kept and emitted.
        acceptance_sum: summed acceptance probability over the drafts that were decided.
        decided: how many drafts were decided, those behind a rejection being void.
        prefill_seconds: wall clock, of the whole batch.
        decode_seconds: wall clock from the end of prefill to this request's last token.
    """

    tokens: int = 0
    cycles: int = 0
    drafted_by_position: list[int] = field(default_factory=list)
    accepted_by_position: list[int] = field(default_factory=list)
    acceptance_sum: float = 0.0
    decided: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0

    @property
    def tokens_per_cycle(self) -> float:
        """Mean accepted tokens, the correction or bonus counted."""
        return self.tokens / self.cycles if self.cycles else 0.0

    @property
    def acceptance_by_position(self) -> list[float]:
        """Share of drafts kept at each position, given that those before it were."""
        reached = [self.cycles_reaching(i) for i in range(len(self.accepted_by_position))]
        return [
            kept / at if at else 0.0
            for kept, at in zip(self.accepted_by_position, reached, strict=True)
        ]

    def cycles_reaching(self, position: int) -> int:
        """Drafts at this position whose predecessors were all kept."""
        drafted = self.drafted_by_position[position]
        return drafted if position == 0 else min(drafted, self.accepted_by_position[position - 1])

    @property
    def mean_acceptance_probability(self) -> float:
        """Mean of min(1, p / q) over the drafts that were decided."""
        return self.acceptance_sum / self.decided if self.decided else 0.0

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
            "accepted_by_position": self.accepted_by_position,
            "acceptance_by_position": self.acceptance_by_position,
            "mean_acceptance_probability": self.mean_acceptance_probability,
            "prefill_seconds": self.prefill_seconds,
            "decode_seconds": self.decode_seconds,
            "decode_tokens_per_second": self.decode_tokens_per_second,
        }
