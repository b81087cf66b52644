"""Drafting without a model: what followed when the text last stood as it does now.

Prompt lookup, as it is called, costs next to nothing and pays where a text repeats itself or its
prompt: summaries, edits, code, tables. A draft is certain of its tokens, so its `q` is one-hot: a
token is kept as often as the target itself would have drawn it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from mtplx.drafters.automaton import SuffixAutomaton
from mtplx.drafters.drafter import Drafter, DraftSlots
from mtplx.drafters.pace import Draftsman
from mtplx.history import Histories
from mtplx.shaping import Distributions, Shaper
from mtplx.verification import Draft, Draws

USUAL = (0.2, 0.5, 0.7, 0.85, 0.9, 0.95)
"""How often a match goes on as before, before a text's own record says: of 1 token, of 2 to 3, of 4
to 7, and so on to 32 and more. So it was with the default model on Spec-Bench's questions."""

PRIOR = 4.0
"""Tokens that are taken to have come as is usual, or not."""


class Share:
    """How often something was so, of the times that it could have been."""

    def __init__(self, usual: float) -> None:
        """
        Args:
            usual: the share to begin with.
        """
        self._so, self._of = PRIOR * usual, PRIOR

    def count(self, so: bool) -> None:
        """Take in one more time."""
        self._so += so
        self._of += 1

    @property
    def value(self) -> float:
        return self._so / self._of


class Lookup:
    """One text's drafts, and how often they would have come true.

    Every token of the output tells: it is what was going to be drafted for its place, or not, and
    that on average as often as such a draft is kept, whoever drafted it. So the record costs no
    draft, and as a function of the committed text alone it may decide who drafts next.
    """

    def __init__(self, prompt: Sequence[int]) -> None:
        self.text = SuffixAutomaton(prompt)
        self._kept = [Share(usual) for usual in USUAL]

    def emit(self, tokens: Sequence[int]) -> None:
        """Let the output go on."""
        for token in tokens:
            if self.text.match:
                self._record(self.text.match).count(self.text.ahead(1) == [token])
            self.text.append(token)

    def chances(self, count: int) -> list[float]:
        """That each of a draft's tokens is kept, if those before it are; none without a match."""
        match = self.text.match
        return [self._record(match + ahead).value for ahead in range(count)] if match else []

    def _record(self, match: int) -> Share:
        """Of matches as long as this."""
        return self._kept[min(match.bit_length(), len(USUAL)) - 1]


class Ngram(Drafter):
    """Drafts for any model, since it needs none."""

    def __init__(self, device: torch.device) -> None:
        """
        Args:
            device: where drafts are wanted.
        """
        self.device = device

    def slots(self, prompts: Sequence[Sequence[int]], capacity: int, cache: Any) -> NgramSlots:
        return NgramSlots(prompts, self.device)


class NgramSlots(DraftSlots):
    """The lookups of B sequences."""

    def __init__(self, prompts: Sequence[Sequence[int]], device: torch.device) -> None:
        self.lookups = [Lookup(prompt) for prompt in prompts]
        self.device = device

    def emit(self, tokens: Sequence[Sequence[int]]) -> None:
        for lookup, new in zip(self.lookups, tokens, strict=True):
            lookup.emit(new)

    def foreseen(self, depths: Sequence[int]) -> Mapping[int, Sequence[float]]:
        pairs = enumerate(zip(self.lookups, depths, strict=True))
        return {row: lookup.chances(depth) for row, (lookup, depth) in pairs}

    def draft(
        self,
        depth: int,
        lengths: Sequence[int],
        noise: Draws,
        shaper: Shaper,
        histories: Histories,
        draftsman: Draftsman | None = None,
    ) -> Draft:
        rows = self.ahead(depth)
        if not any(rows):
            return Draft.empty(len(rows), self.device)
        count = 0
        while count < depth and (not count or draftsman is None or draftsman.goes_on(count)):
            count += 1
            if draftsman:
                draftsman.drew([0.0] * len(rows))  # what was foreseen stands
        tokens = self.padded(rows, count)
        return Draft(tokens, Distributions.certain(tokens), [min(len(r), count) for r in rows])

    def ahead(self, depth: int) -> list[list[int]]:
        """What each row would draft: `depth` tokens or none."""
        return [lookup.text.ahead(depth) for lookup in self.lookups]

    def padded(self, rows: Sequence[Sequence[int]], count: int) -> Tensor:
        """The first tokens of each row, [B, count] int64."""
        tokens = [[*row[:count], *[0] * (count - len(row))] for row in rows]
        return torch.tensor(tokens, device=self.device)

    def take(self, other: DraftSlots | None, count: int) -> int:
        """All of it: the whole prompt has been looked at."""
        return count

    def keep_rows(self, rows: Tensor) -> None:
        kept: list[Lookup] = []
        for row in rows.tolist():
            lookup = self.lookups[row]
            kept.append(deepcopy(lookup) if any(lookup is each for each in kept) else lookup)
        self.lookups = kept
