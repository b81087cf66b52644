"""What the engine's loop asks of whatever drafts: a head, a lookup, another model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from mtplx.drafters.pace import Draftsman
from mtplx.history import Histories
from mtplx.models.slots import Span
from mtplx.models.trunk import TrunkOutput
from mtplx.shaping import Shaper
from mtplx.verification import Draft, Draws


class DraftSlots(Protocol):
    """A drafter's side of the B sequences of a batch.

    It hears of committed tokens twice: `refill` and `postpone` have the trunk's hidden states
    beside them, for heads; `emit` is exactly what the texts go on with. What a drafter has no use
    for it leaves as it is here.

    Attributes:
        taps: trunk layers whose residual streams `refill` and `postpone` need.
    """

    taps: tuple[int, ...] = ()

    def refill(
        self, output: TrunkOutput, following: Tensor, span: Span, last: Sequence[int]
    ) -> None:
        """Take in a trunk pass whose tokens are now known to be committed.

        Args:
            output: of the trunk's pass at `span`.
            following: the token after each of the pass's tokens, [B, T]; past a row's last
                committed pair it may hold anything.
            span: of that pass.
            last: for each row the index in the pass of its last committed pair; negative if none
                of the pass is committed.
        """
        return

    def postpone(self, output: TrunkOutput, following: Tensor, span: Span) -> None:
        """Take in a pass of one committed token a row, but not before it is needed.

        Args:
            output: of the trunk's pass at `span`.
            following: the token after the one that was read, [B, 1].
            span: of that pass.
        """
        return

    def emit(self, tokens: Sequence[Sequence[int]]) -> None:
        """Take in what a cycle added to each text: nothing rejected, nothing behind a text's end.

        Args:
            tokens: a list for each row, empty for one that has ended.
        """
        return

    def catch_up(self) -> None:
        """Make up for what was put off, so that the next draft does not have to."""
        return

    def foreseen(self, depths: Sequence[int]) -> Mapping[int, Sequence[float]]:
        """How sure it is of a draft's tokens before any is drafted, by row, as far as it knows.

        Args:
            depths: that each row may draft to.
        Returns:
            For a row no more than its depth, and fewer where there is nothing further to draft; no
            entry for rows of which nothing is known yet.
        """
        return {}

    def draft(
        self,
        depth: int,
        lengths: Sequence[int],
        noise: Draws,
        shaper: Shaper,
        histories: Histories,
        draftsman: Draftsman | None = None,
    ) -> Draft:
        """Draft up to `depth` tokens for every row, and say what each was drawn from.

        Args:
            depth: 1 or more.
            lengths: committed pairs of each row; the first drafted token takes the position
                after the next one.
            noise: of this cycle.
            shaper: the requests' samplers.
            histories: of their texts, with the token that waits for the trunk.
            draftsman: may end the draft behind any of its tokens; None goes on.
        """
        ...

    def take(self, other: DraftSlots | None, count: int) -> int:
        """Begin with an earlier text, of one row as this is.

        Args:
            other: that text's slots, which have caught up; None where nothing was drafted for it.
            count: tokens from the first on that both texts have.
        Returns:
            How many of them need not be read again by the trunk, for this drafter's part.
        """
        ...

    def keep_rows(self, rows: Tensor) -> None:
        """Have these slots in this order, [N] int64, and no others; one may come several times."""
        ...


class Drafter(Protocol):
    """What drafts for a model, from one batch to the next."""

    def slots(self, prompts: Sequence[Sequence[int]], capacity: int, cache: Any) -> DraftSlots:
        """Its side of a new batch.

        Args:
            prompts: token ids, one for each row.
            capacity: positions a row may come to have, drafts included.
            cache: the trunk's, for one that reads it.
        """
        ...
