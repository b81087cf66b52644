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

    A head may have several layers, one for each draft in a row. Layer k joins the state that layer
    k - 1 has made of position i with token i + 1 + k and predicts token i + 2 + k; behind the last
    layer, its own output stands for the state of the position after.

    Attributes:
        layers: how many.
        chained: whether a layer is fed what the one before it computes; else all are fed the
            trunk's states.
        taps: trunk layers whose residual streams `features` needs.
        draft_ids: target token id of each draft id, ascending [W] int64; None for the whole
            vocabulary.
    """

    layers: int
    chained: bool
    taps: tuple[int, ...]
    draft_ids: Tensor | None

    def features(self, output: TrunkOutput) -> Tensor:
        """From a trunk pass, the hidden states that the first draft is fed, [B, T, H]."""
        ...

    def new_cache(self, capacity: int) -> Any:
        """An empty cache of `capacity` positions a slot, with `keep_rows` and `take`."""
        ...

    def step(
        self, tokens: Tensor, hidden: Tensor, span: Span, cache: Any, layer: int = 0
    ) -> Tensor:
        """One pass of a layer: tokens [B, T] joined with hidden [B, T, H] at the span; returns
        [B, T, H]."""
        ...

    def logits(self, hidden: Tensor, layer: int = 0) -> Tensor:
        """Draft logits of what a layer's `step` returned, [B, H] -> [B, W]."""
        ...

    def slots(self, prompts: Sequence[Sequence[int]], capacity: int, cache: Any) -> HeadSlots:
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
        # Of each layer, what it made of its newest committed position.
        self._newest: list[Tensor] = []
        # Where all layers are fed the trunk's states: the last few, [B, layers - 1, H].
        self._recent: Tensor | None = None
        self._postponed: list[tuple[TrunkOutput, Tensor, Span]] = []

    def refill(
        self, output: TrunkOutput, following: Tensor, span: Span, last: Sequence[int]
    ) -> None:
        self.catch_up()
        self._read(output, following, span, last)

    def _read(
        self, output: TrunkOutput, following: Tensor, span: Span, last: Sequence[int]
    ) -> None:
        states = self.head.features(output)
        recent = None if self.head.chained else self._with_recent(states, last)
        newest: list[Tensor] = []
        for layer in range(self.head.layers):
            # Layer k is k positions further back than the first, at those that its tokens follow.
            # Where a text begins there are none, and what was taken over is read already.
            begun = layer if span.start is None else span.start
            skip = max(0, layer - begun) if self._newest else layer
            tokens, place = following[:, skip:], span.back(layer).behind(skip)
            if not tokens.shape[1]:
                break
            if recent is not None:
                end = recent.shape[1] - layer
                states = recent[:, end - tokens.shape[1] : end]
            elif layer:
                states = states[:, :-1]
                if not skip:
                    states = torch.cat([self._newest_of(layer - 1, states), states], 1)
            states = self.head.step(tokens, states, place, self.cache, layer)
            newest.append(self._pick(states, [at - skip for at in last], layer))
        self._newest = newest

    def _with_recent(self, states: Tensor, last: Sequence[int]) -> Tensor:
        """The trunk's states [B, T, H] behind those of the positions before; keeps the newest."""
        count = self.head.layers - 1
        if self._recent is None:
            self._recent = states.new_zeros(len(states), count, states.shape[2])
        every = torch.cat([self._recent, states], 1)
        rows = torch.arange(len(last), device=states.device)[:, None]
        # The last `count` up to that one: all of those before, where none is new.
        first = torch.tensor(last, device=states.device).clamp_min(-1) + 1
        columns = first[:, None] + torch.arange(count, device=states.device)
        self._recent = every[rows, columns]
        return every

    def _newest_of(self, layer: int, like: Tensor) -> Tensor:
        """What a layer made of each row's newest committed position, [B, 1, H]."""
        if layer < len(self._newest):
            return self._newest[layer][:, None]
        # The text is still too short for it.
        return like.new_zeros(len(like), 1, like.shape[2])

    def _pick(self, states: Tensor, last: Sequence[int], layer: int) -> Tensor:
        """Each row's state at its index, [B, H]; where that is negative, the one it had."""
        if len(last) == 1 and last[0] >= 0:
            return states[:, last[0]]
        index = torch.as_tensor(last, device=states.device)
        picked = states[torch.arange(len(last), device=states.device), index.clamp_min(0)]
        if layer < len(self._newest):
            picked = torch.where((index >= 0)[:, None], picked, self._newest[layer])
        return picked

    def postpone(self, output: TrunkOutput, following: Tensor, span: Span) -> None:
        # One step over many positions takes little longer than over one.
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
        self.catch_up()
        assert self._newest, "refill before drafting"
        ids, layers = self.head.draft_ids, self.head.layers
        tokens: list[Tensor] = []
        rows: list[Distributions] = []
        hidden = self._newest[0]
        states = hidden[:, None][:, :0]
        for i in range(depth):
            layer = min(i, layers - 1)
            if i:
                if draftsman and not draftsman.goes_on(i):
                    break
                if i < layers:
                    states = self._step_onto(i, torch.stack(tokens, 1), states, lengths)
                    hidden = states[:, -1]
                else:
                    span = Span.after([n + i - layers for n in lengths], 1, hidden.device)
                    result = self.head.step(
                        tokens[-1][:, None], hidden[:, None], span, self.cache, layer
                    )
                    hidden = result[:, 0]
            q = shaper(self.head.logits(hidden, layer), histories.behind(tokens), ids)
            rows.append(q)
            tokens.append(noise.drafted(q, i))
            if draftsman:
                draftsman.drew(q.at(tokens[-1][:, None])[:, 0].tolist())
        return Draft(torch.stack(tokens, 1), Distributions.stack(rows, shaper.vocab_size))

    def _step_onto(
        self, layer: int, tokens: Tensor, states: Tensor, lengths: Sequence[int]
    ) -> Tensor:
        """A layer over the newest positions, which drafted tokens [B, layer] follow.

        Args:
            layer: 1 or more.
            tokens: drafted so far.
            states: what the layer before made of all of these positions but the first.
            lengths: as in `draft`.
        Returns:
            [B, T, H], T `layer` or less where the text is shorter than that.
        """
        if self._recent is not None:
            states = self._recent[:, -layer:]
        else:
            states = torch.cat([self._newest_of(layer - 1, states), states], 1)
        span = Span.after([n - layer for n in lengths], layer, states.device)
        skip = max(0, -(span.start or 0))
        return self.head.step(
            tokens[:, skip:], states[:, -(layer - skip) :], span.behind(skip), self.cache, layer
        )

    def take(self, other: DraftSlots | None, count: int) -> int:
        """Begin with the first pairs of another's; what follows is to be refilled before drafting.

        A head's layers join each token with those after it, and it drafts from the last pairs that
        it has read itself.
        """
        pairs = count - self.head.layers
        if pairs < 1 or not isinstance(other, HeadSlots):
            return 0
        self.cache.take(other.cache, pairs)
        return pairs

    def keep_rows(self, rows: Tensor) -> None:
        """Have these slots in this order, [N] int64, and no others; one may come several times."""
        self.catch_up()
        self.cache.keep_rows(rows)
        self._newest = [states[rows] for states in self._newest]
        self._recent = None if self._recent is None else self._recent[rows]
