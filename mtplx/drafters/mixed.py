"""Drafting with a head, and by looking up where the text repeats itself.

Row by row, and anew in each cycle, whichever of the two has the better record in this text: how
often the next token was what a match of this length foretold, and how often the first token of the
head's drafts was kept. Both are learned from what the text has become, and from nothing that was
drafted behind a rejection, so that the choice shifts no noise (docs/exactness.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mtplx.drafters.drafter import Drafter, DraftSlots
from mtplx.drafters.mtp import Head, HeadSlots
from mtplx.drafters.ngram import Ngram, NgramSlots, Share
from mtplx.drafters.pace import Draftsman
from mtplx.history import Histories
from mtplx.models.slots import Span
from mtplx.models.trunk import TrunkOutput
from mtplx.shaping import Distributions, Shaper
from mtplx.verification import Draft, Draws

USUAL = 0.5
"""How often the first token of a head's draft is kept, before anything is known."""


class HeadOrLookup(Drafter):
    """A head beside the lookup."""

    def __init__(self, head: Head, device: torch.device) -> None:
        """
        Args:
            head: of the trunk.
            device: where drafts are wanted.
        """
        self.head, self.lookup = head, Ngram(device)

    def slots(self, prompts: Sequence[Sequence[int]], capacity: int, cache: Any) -> MixedSlots:
        head = self.head.slots(prompts, capacity, cache)
        return MixedSlots(head, self.lookup.slots(prompts, capacity, cache))


class MixedSlots(DraftSlots):
    """The head's side and the lookups of B sequences."""

    def __init__(self, head: HeadSlots, ngram: NgramSlots) -> None:
        self.head, self.ngram = head, ngram
        self.taps = head.taps
        self._kept = [Share(USUAL) for _ in ngram.lookups]
        # Rows of this cycle's draft that are the head's.
        self._by_head: list[int] = []

    def refill(
        self, output: TrunkOutput, following: Tensor, span: Span, last: Sequence[int]
    ) -> None:
        for row in self._by_head:
            self._kept[row].count(last[row] > 0)
        self._by_head = []
        self.head.refill(output, following, span, last)

    def postpone(self, output: TrunkOutput, following: Tensor, span: Span) -> None:
        self.head.postpone(output, following, span)

    def emit(self, tokens: Sequence[Sequence[int]]) -> None:
        self.ngram.emit(tokens)

    def catch_up(self) -> None:
        self.head.catch_up()

    def foreseen(self, depths: Sequence[int]) -> Mapping[int, Sequence[float]]:
        all_of_them, looked_up = self.ngram.foreseen(depths), self._looked_up()
        return {row: chances for row, chances in all_of_them.items() if looked_up[row]}

    def draft(
        self,
        depth: int,
        lengths: Sequence[int],
        noise: Draws,
        shaper: Shaper,
        histories: Histories,
        draftsman: Draftsman | None = None,
    ) -> Draft:
        looked_up = self._looked_up()
        arguments = (shaper, histories, draftsman)
        if all(looked_up):
            return self.ngram.draft(depth, lengths, noise, *arguments)
        # A text with nothing committed has no draft, whatever the head makes of its row.
        self._by_head = [b for b, n in enumerate(lengths) if n and not looked_up[b]]
        if not any(looked_up):
            return self.head.draft(depth, lengths, noise, *arguments)
        rows = torch.tensor(looked_up, device=self.ngram.device)
        found = self.ngram.padded(self.ngram.ahead(depth), depth)
        # The head reads what is drafted, whoever drafts it, and settings that look back see it.
        draft = self.head.draft(depth, lengths, _Found(found, rows, noise), *arguments)
        q = Distributions.certain(draft.tokens).where(rows, draft.q, shaper.vocab_size)
        return Draft(draft.tokens, q)

    def _looked_up(self) -> list[bool]:
        """Of each row, whether its next tokens are looked up."""
        first = [lookup.chances(1) for lookup in self.ngram.lookups]
        return [
            bool(chance) and chance[0] >= kept.value
            for chance, kept in zip(first, self._kept, strict=True)
        ]

    def take(self, other: DraftSlots | None, count: int) -> int:
        return self.head.take(other.head if isinstance(other, MixedSlots) else None, count)

    def keep_rows(self, rows: Tensor) -> None:
        self.head.keep_rows(rows)
        self.ngram.keep_rows(rows)
        self._kept = [copy(self._kept[row]) for row in rows.tolist()]


@dataclass(frozen=True)
class _Found:
    """Chooses what was looked up in some rows, and leaves the others to the noise.

    Attributes:
        tokens: that were looked up, [B, K].
        rows: for which they were, [B] bool.
        noise: of the cycle.
    """

    tokens: Tensor
    rows: Tensor
    noise: Draws

    def drafted(self, q: Distributions, position: int) -> Tensor:
        return torch.where(self.rows, self.tokens[:, position], self.noise.drafted(q, position))
