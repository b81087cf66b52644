"""Drafting with another, smaller causal model of the same vocabulary.

As in the papers that speculative sampling comes from (Leviathan et al. 2023; Chen et al. 2023). It
has a cache of its own. What it read of a draft that was kept stays there, what was rejected is
undone by setting a length back; the token that ended a cycle, and the last one of a draft that was
kept whole, it has not read yet, and does so in the pass that begins the next draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mtplx.drafters.drafter import Drafter, DraftSlots
from mtplx.drafters.pace import Draftsman
from mtplx.history import Histories
from mtplx.models.slots import Span
from mtplx.models.trunk import Trunk
from mtplx.shaping import Distributions, Shaper
from mtplx.verification import Draft, Draws

READ_AT_ONCE = 2048
"""Tokens of a batch read in one pass."""


class DraftModel(Drafter):
    """A model that drafts for another one."""

    def __init__(self, trunk: Trunk, vocab_size: int) -> None:
        """
        Args:
            trunk: of the drafting model.
            vocab_size: of the model it drafts for. Its own may be smaller, if its ids are the same:
                the rest is never drafted.
        """
        assert trunk.vocab_size <= vocab_size
        self.trunk = trunk
        smaller = trunk.vocab_size < vocab_size
        self.draft_ids = torch.arange(trunk.vocab_size, device=trunk.device) if smaller else None

    def slots(self, prompts: Sequence[Sequence[int]], capacity: int, cache: Any) -> DraftModelSlots:
        return DraftModelSlots(self, prompts, capacity)


class DraftModelSlots(DraftSlots):
    """A draft model's side of B sequences: their texts, and how far it has read each."""

    def __init__(self, model: DraftModel, prompts: Sequence[Sequence[int]], capacity: int) -> None:
        self.trunk, self.draft_ids = model.trunk, model.draft_ids
        self.cache = self.trunk.new_cache(capacity)
        self.texts = [list(prompt) for prompt in prompts]
        # Tokens of each text that the cache holds; what it read of a draft comes behind them.
        self.read = [0] * len(self.texts)
        self._ahead: Tensor | None = None

    def emit(self, tokens: Sequence[Sequence[int]]) -> None:
        drafted = [[]] * len(tokens) if self._ahead is None else self._ahead.tolist()
        for row, (new, ahead) in enumerate(zip(tokens, drafted, strict=True)):
            same = [guess == token for guess, token in zip(ahead, new, strict=False)]
            kept = (*same, False).index(False)
            self.read[row] = min(self.read[row] + kept, self.trunk.context)
            self.texts[row] += new
        self._ahead = None

    def catch_up(self) -> None:
        # Two tokens are read along with a draft's first pass as fast as one.
        if max(self._unread()) > 2:
            self._read_all_but_the_last()

    def _unread(self) -> list[int]:
        """Tokens of each row that are to be read before it drafts."""
        return [end - read for end, read in zip(self._ends(), self.read, strict=True)]

    def _ends(self) -> list[int]:
        """Of each text, as far as it fits into this model's context."""
        return [min(len(text), self.trunk.context) for text in self.texts]

    def _read_all_but_the_last(self) -> None:
        ends = [max(end - 1, read) for end, read in zip(self._ends(), self.read, strict=True)]
        most = max(1, READ_AT_ONCE // len(ends))
        while self.read != ends:
            self._pass([min(r + most, end) for r, end in zip(self.read, ends, strict=True)], False)

    def _pass(self, ends: list[int], with_logits: bool) -> Tensor | None:
        """Read each text up to its end, at least; the logits behind it [B, V] if asked for.

        Rows that have less to read than others read some tokens once more, which leaves the cache
        as it is; only a text that is shorter than that is padded.
        """
        pairs = zip(ends, self.read, strict=True)
        width = max(1, *(end - read for end, read in pairs))
        starts = [max(end - width, 0) for end in ends]
        rows = [text[s:end] for text, s, end in zip(self.texts, starts, ends, strict=True)]
        tokens = [[*row, *[0] * (width - len(row))] for row in rows]
        logits = self._forward(torch.tensor(tokens), starts, with_logits)
        self.read = list(ends)
        if logits is None:
            return None
        last = [max(len(row) - 1, 0) for row in rows]
        device = logits.device
        return logits[torch.arange(len(rows), device=device), torch.tensor(last, device=device)]

    def _forward(
        self, tokens: Tensor, starts: list[int], with_logits: bool = True
    ) -> Tensor | None:
        # A token that it does not have is as good as its last one: drafts may only be worse for it.
        tokens = tokens.to(self.trunk.device).clamp_max(self.trunk.vocab_size - 1)
        span = Span.after(starts, tokens.shape[1], self.trunk.device)
        return self.trunk.forward(tokens, span, self.cache, with_logits=with_logits).logits

    def draft(
        self,
        depth: int,
        lengths: Sequence[int],
        noise: Draws,
        shaper: Shaper,
        histories: Histories,
        draftsman: Draftsman | None = None,
    ) -> Draft:
        # Where its context ends, so do its drafts: it reads all of one but the last token.
        room = [max(self.trunk.context + 1 - len(text), 0) for text in self.texts]
        depth = min(depth, max(room))
        if not depth:
            return Draft.empty(len(room), self.trunk.device)
        self.catch_up()
        logits = self._pass(self._ends(), True)
        tokens: list[Tensor] = []
        rows: list[Distributions] = []
        for i in range(depth):
            if i:
                if draftsman and not draftsman.goes_on(i):
                    break
                ahead = self._forward(tokens[-1][:, None], [read + i - 1 for read in self.read])
                logits = None if ahead is None else ahead[:, 0]
            assert logits is not None
            q = shaper(logits, histories.behind(tokens), self.draft_ids)
            rows.append(q)
            tokens.append(noise.drafted(q, i))
            if draftsman:
                draftsman.drew(q.at(tokens[-1][:, None])[:, 0].tolist())
        drafted = torch.stack(tokens, 1)
        self._ahead = drafted[:, :-1]
        return Draft(
            drafted,
            Distributions.stack(rows, shaper.vocab_size),
            [min(len(tokens), left) for left in room],
        )

    def take(self, other: DraftSlots | None, count: int) -> int:
        """All of them: what the other has not read of them is read here."""
        if isinstance(other, DraftModelSlots):
            self.read = [min(other.read[0], count)]
            self.cache.take(other.cache, self.read[0])
        return count

    def keep_rows(self, rows: Tensor) -> None:
        self.cache.keep_rows(rows)
        kept = rows.tolist()
        self.texts = [list(self.texts[row]) for row in kept]
        self.read = [self.read[row] for row in kept]
