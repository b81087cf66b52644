"""Drafting with an MTP head: the loop around it that any head shares.

The head's cache is filled from the trunk's true hidden states for committed tokens. What the head
writes while it guesses lies past the committed length and is overwritten by the next refill
(docs/architecture.md: committed history only).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from mtplx.drafters.drafter import Drafter, DraftSlots
from mtplx.drafters.pace import Draftsman
from mtplx.history import Histories
from mtplx.models.slots import Span
from mtplx.models.trunk import TrunkOutput
from mtplx.shaping import Distributions, Shaper
from mtplx.verification import Draft, Draws


class Head(Drafter, Protocol):
    """What a family of MTP heads provides.

    A head at position i joins a hidden state of token i with token i + 1 and predicts token
    i + 2.

    Attributes:
        taps: trunk layers whose residual streams `features` needs.
        draft_ids: target token id of each draft id, ascending [W] int64; None for the whole
            vocabulary.
    """

    taps: tuple[int, ...]
    draft_ids: Tensor | None

    def features(self, output: TrunkOutput) -> Tensor:
        """From a trunk pass, the hidden states that the first draft is fed, [B, T, H]."""
        ...

    def new_cache(self, capacity: int) -> Any:
        """An empty cache of `capacity` positions a slot, with `keep_rows` and `take`."""
        ...

    def step(self, tokens: Tensor, hidden: Tensor, span: Span, cache: Any) -> Tensor:
        """One pass: tokens [B, T] joined with hidden [B, T, H] at the span; returns [B, T, H]."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Draft logits of what `step` returned, [B, H] -> [B, W]."""
        ...

    def slots(self, prompts: Sequence[Sequence[int]], capacity: int) -> HeadSlots:
        """Its side of a new batch; the prompts come with the trunk's states for them."""
        return HeadSlots(self, capacity)


POSTPONED = 64
"""Passes whose refills are put off at most: their hidden states are kept until then."""


class HeadSlots(DraftSlots):
    """A head's side of B sequences: its cache, and where the next draft starts from."""

    def __init__(self, head: Head, capacity: int) -> None:
        self.head = head
        self.taps = head.taps
        self.cache = head.new_cache(capacity)
        self._hidden: Tensor | None = None
        self._postponed: list[tuple[TrunkOutput, Tensor, Span]] = []

    def refill(
        self, output: TrunkOutput, following: Tensor, span: Span, last: Sequence[int]
    ) -> None:
        """Take in a trunk pass whose tokens are now known to be committed.

        Args:
            output: of the trunk's pass at `span`.
            following: the token after each of the pass's tokens, [B, T]; past a row's last
                committed pair it may hold anything.
            span: of that pass.
            last: for each row the index in the pass of its last committed pair, or -1 if none of
                the pass is committed.
        """
        self.catch_up()
        self._read(output, following, span, last)

    def _read(
        self, output: TrunkOutput, following: Tensor, span: Span, last: Sequence[int]
    ) -> None:
        result = self.head.step(following, self.head.features(output), span, self.cache)
        if len(last) == 1 and last[0] >= 0:
            self._hidden = result[:, last[0]]
            return
        index = torch.as_tensor(last, device=result.device)
        newest = result[torch.arange(len(last), device=result.device), index.clamp_min(0)]
        if self._hidden is None:
            self._hidden = newest
        else:
            self._hidden = torch.where((index >= 0)[:, None], newest, self._hidden)

    def postpone(self, output: TrunkOutput, following: Tensor, span: Span) -> None:
        """Take in a pass of one committed token a row, but not before it is needed.

        While nothing is drafted nobody asks for the head's state, and one step over many positions
        takes little longer than over one.

        Args:
            output: of the trunk's pass at `span`.
            following: the token after the one that was read, [B, 1].
            span: of that pass.
        """
        if len(self._postponed) == POSTPONED:
            self.catch_up()
        kept = TrunkOutput(output.hidden, output.aux, None)
        self._postponed.append((kept, following, span))

    def catch_up(self) -> None:
        """Make up for what was postponed, in one step."""
        if not self._postponed:
            return
        outputs, following, spans = zip(*self._postponed, strict=True)
        aux = [output.aux for output in outputs if output.aux is not None]
        output = TrunkOutput(
            torch.cat([output.hidden for output in outputs], 1),
            torch.cat(aux, 1) if aux else None,
            None,
        )
        last = [len(outputs) - 1] * len(following[0])
        self._read(output, torch.cat(following, 1), Span.joined(spans), last)
        # Last: what is interrupted is made up for once more.
        self._postponed = []

    def draft(
        self,
        depth: int,
        lengths: Sequence[int],
        noise: Draws,
        shaper: Shaper,
        histories: Histories,
        draftsman: Draftsman | None = None,
    ) -> Draft:
        """Draft `depth` tokens for every row, each from the distribution its sampler makes.

        Args:
            depth: 1 or more.
            lengths: committed pairs of each row; the first drafted token takes the position
                after the next one.
            noise: of this cycle.
            shaper: the requests' samplers.
            histories: of their texts, with the token that waits for the trunk.
            draftsman: may end the draft behind any of its tokens; None goes on.
        """
        self.catch_up()
        assert self._hidden is not None, "refill before drafting"
        hidden, ids = self._hidden, self.head.draft_ids
        tokens: list[Tensor] = []
        rows: list[Distributions] = []
        for i in range(depth):
            if i:
                if draftsman and not draftsman.goes_on(i):
                    break
                span = Span.after([n + i - 1 for n in lengths], 1, hidden.device)
                result = self.head.step(tokens[-1][:, None], hidden[:, None], span, self.cache)
                hidden = result[:, 0]
            q = shaper(self.head.logits(hidden), histories.behind(tokens), ids)
            rows.append(q)
            tokens.append(noise.drafted(q, i))
            if draftsman:
                draftsman.drew(q.at(tokens[-1][:, None])[:, 0].tolist())
        return Draft(torch.stack(tokens, 1), Distributions.stack(rows, shaper.vocab_size))

    def take(self, other: DraftSlots | None, count: int) -> int:
        """Begin with the first pairs of another's; what follows is to be refilled before drafting.

        A head joins each token with the one after it, and drafts from the last pair that it has
        read itself.
        """
        pairs = count - 1
        if pairs < 1 or not isinstance(other, HeadSlots):
            return 0
        self.cache.take(other.cache, pairs)
        return pairs

    def keep_rows(self, rows: Tensor) -> None:
        """Have these slots in this order, [N] int64, and no others; one may come several times."""
        self.catch_up()
        self.cache.keep_rows(rows)
        if self._hidden is not None:
            self._hidden = self._hidden[rows]
