"""What settings that look back see: the text so far, at every position of a draft.

A drafted token changes what may follow it. So draft and target both ask here how things stand
behind so many drafted tokens, and get the same answer; nothing is kept of a rejected draft.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F


@dataclass
class History:
    """What settings look back at in B sequences over a vocabulary of V. None is what none does.

    Attributes:
        emitted: tokens in the output, [B] int64.
        prompt: whether the token is in the prompt, [B, V] bool.
        output: how often the token has been emitted, [B, V] float32.
        text: prompts and outputs, [B, N] int64. All outputs begin at the column `begin`, and the
            prompts end before it; the rest is -1.
        begin: that column.
        allowed: the tokens that a grammar lets come next, [B, V] bool.
    """

    emitted: Tensor
    prompt: Tensor | None = None
    output: Tensor | None = None
    text: Tensor | None = None
    begin: int = 0
    allowed: Tensor | None = None

    @classmethod
    def of(
        cls,
        prompts: Sequence[Sequence[int]],
        vocab_size: int,
        device: torch.device,
        counts: bool = True,
        text: bool = False,
    ) -> History:
        """Histories that have only a prompt so far.

        Args:
            prompts: token ids.
            vocab_size: V.
            device: where all is kept.
            counts: keep `prompt` and `output`.
            text: keep `text`.
        """
        history = cls(torch.zeros(len(prompts), dtype=torch.int64, device=device))
        if counts:
            history.prompt = torch.zeros(len(prompts), vocab_size, dtype=torch.bool, device=device)
            history.prompt[indices(prompts, device)] = True
            history.output = torch.zeros(history.prompt.shape, device=device)
        if text:
            history.begin = max(len(prompt) for prompt in prompts)
            padded = [[*[-1] * (history.begin - len(prompt)), *prompt] for prompt in prompts]
            history.text = torch.tensor(padded, device=device)
        return history

    @property
    def end(self) -> Tensor:
        """The column of `text` behind each row's last token, [B] int64."""
        return self.emitted + self.begin

    def emit(self, tokens: Sequence[Sequence[int]]) -> None:
        """Count emitted tokens, a list for each sequence."""
        rows, ids = indices(tokens, self.emitted.device)
        if self.output is not None:
            one = self.output.new_ones(())
            self.output.index_put_((rows, ids), one, accumulate=True)
        if self.text is not None:
            ahead = torch.tensor([i for row in tokens for i in range(len(row))])
            self.text = F.pad(self.text, (0, max(len(row) for row in tokens)), value=-1)
            self.text[rows, self.end[rows] + ahead.to(rows)] = ids
        self.emitted = self.emitted + torch.tensor([len(row) for row in tokens]).to(self.emitted)

    def after(self, draft: Tensor) -> History:
        """Histories at every position of a draft [B, K]: 0 to K drafted tokens counted.

        Returns:
            A history of B * (K + 1) rows, the positions of one sequence together.
        """
        depth = draft.shape[1]
        ahead = torch.arange(depth + 1, device=draft.device)

        def each(rows: Tensor | None) -> Tensor | None:
            return None if rows is None else rows.repeat_interleave(depth + 1, 0)

        output = self.output
        if output is not None:
            steps = [self, *(self.after_tokens(draft[:, : i + 1]) for i in range(depth))]
            counts = [step.output for step in steps if step.output is not None]
            output = torch.stack(counts, 1).flatten(0, 1)
        return History(
            (self.emitted[:, None] + ahead).flatten(),
            each(self.prompt),
            output,
            # What lies behind a row's end does not count: all may hold the whole draft.
            each(self._with_text(draft)),
            self.begin,
        )

    def after_tokens(self, tokens: Tensor) -> History:
        """Histories with these tokens [B, N] counted too."""
        output = self.output
        if output is not None:
            output = output.scatter_add(1, tokens, torch.ones_like(tokens, dtype=output.dtype))
        emitted = self.emitted + tokens.shape[1]
        return History(emitted, self.prompt, output, self._with_text(tokens), self.begin)

    def _with_text(self, tokens: Tensor) -> Tensor | None:
        if self.text is None:
            return None
        columns = self.end[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
        return F.pad(self.text, (0, tokens.shape[1]), value=-1).scatter(1, columns, tokens)

    def keep_rows(self, rows: Tensor) -> None:
        """Drop all sequences but these."""
        for name in ("emitted", "prompt", "output", "text"):
            value = getattr(self, name)
            setattr(self, name, None if value is None else value[rows])


def indices(tokens: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Row and column of every token in a list for each row."""
    rows = [row for row, ids in enumerate(tokens) for _ in ids]
    columns = [token for ids in tokens for token in ids]
    return (
        torch.tensor(rows, dtype=torch.int64, device=device),
        torch.tensor(columns, dtype=torch.int64, device=device),
    )


# --- Grammars -------------------------------------------------------------------------------------


class Constraint(Protocol):
    """What one text may go on with: a state that follows it, token by token.

    Attributes:
        complete: whether the text may end here.
        fault: why it cannot tell what may come, and so lets nothing come; None while it can.
    """

    @property
    def complete(self) -> bool: ...

    @property
    def fault(self) -> str | None: ...

    def allowed(self) -> NDArray[np.bool_]:
        """The tokens that may come next, [V]; which of them end the text is not its business."""
        ...

    def advance(self, token: int) -> bool:
        """Follow the text by a token; False, and no change, if it may not come here."""
        ...

    def rollback(self, count: int) -> None:
        """Take back the last so many tokens, and whatever fault came up behind them."""
        ...


class Follower:
    """A constraint that runs ahead with a draft, and comes back to what is emitted of it.

    The tokens that end a text may come where it is complete, and nowhere else. Forced tokens before
    the constraint begins are none of its business. A draft that has left what is allowed is
    rejected there, and not followed further. Where the constraint fails, nothing may come.
    """

    def __init__(self, constraint: Constraint, stop_ids: Collection[int], opening: int = 0) -> None:
        """
        Args:
            constraint: at its beginning.
            stop_ids: tokens that end the text.
            opening: tokens of the output before the constraint begins.
        """
        self.constraint = constraint
        self.stop_ids = frozenset(stop_ids)
        self.opening = opening
        self._drafted: list[int] = []
        self._astray = False  # what is drafted from here on is rejected, or behind the text's end
        self._over = False

    def allowed(self) -> NDArray[np.bool_] | None:
        """The tokens that may come next, [V]; None for all."""
        if self._astray or len(self._drafted) < self.opening:
            return None
        permitted = self.constraint.allowed()
        stops = [token for token in self.stop_ids if 0 <= token < len(permitted)]
        permitted[stops] = self.constraint.complete
        return permitted

    @property
    def at_end(self) -> bool:
        """Whether the text is whole, nothing can follow it, and no token is there to end it."""
        ended = self.opening == 0 and not self.stop_ids and self.constraint.complete
        return ended and not self.constraint.allowed().any()

    def follow(self, token: int) -> None:
        """Go on with a drafted token."""
        opening = len(self._drafted) < self.opening
        if self._astray or token in self.stop_ids:
            self._astray = True
        elif opening or self.constraint.advance(token):
            self._drafted.append(token)
        elif self.constraint.fault is None:
            self._astray = True

    def emit(self, tokens: Sequence[int]) -> None:
        """Come back from the draft, and follow what has been emitted."""
        same = [drafted == token for drafted, token in zip(self._drafted, tokens, strict=False)]
        kept = (*same, False).index(False)
        self.constraint.rollback(
            max(len(self._drafted) - self.opening, 0) - max(kept - self.opening, 0)
        )
        self._drafted = self._drafted[:kept]
        self._astray = self._over
        for token in tokens[kept:]:
            self.follow(token)
        self._over = self._astray
        self.opening = max(self.opening - len(tokens), 0)
        self._drafted = []


class Histories:
    """The histories of a batch, and the constraints on its texts, along one draft after another."""

    def __init__(
        self, history: History | None, followers: Mapping[int, Follower], vocab_size: int
    ) -> None:
        """
        Args:
            history: of the prompts; needed where there is a follower, else None where no setting
                looks back.
            followers: by row.
            vocab_size: V.
        """
        self.history = history
        self.followers = dict(followers)
        self.vocab_size = vocab_size
        # What is allowed behind 0, 1, … tokens of this cycle's draft, as far as it has come.
        self._masks: list[Tensor] = []

    def behind(self, drafted: Sequence[Tensor]) -> History | None:
        """Histories with these drafted tokens, [B] each, counted; of B rows."""
        if self.history is None:
            return None
        history = self.history
        if drafted:
            history = history.after_tokens(torch.stack(list(drafted), 1))
        return replace(history, allowed=self._mask(drafted)) if self.followers else history

    def along(self, draft: Tensor) -> History | None:
        """Histories at every position of a draft [B, K]; of B * (K + 1) rows."""
        if self.history is None:
            return None
        history = self.history.after(draft)
        if not self.followers:
            return history
        drafted = draft.unbind(1)
        masks = [self._mask(drafted[:count]) for count in range(len(drafted) + 1)]
        return replace(history, allowed=torch.stack(masks, 1).flatten(0, 1))

    def emit(self, tokens: Sequence[Sequence[int]]) -> None:
        """Count emitted tokens, a list for each sequence, and forget the draft."""
        if self.history is not None:
            self.history.emit(tokens)
        for row, follower in self.followers.items():
            follower.emit(tokens[row])
        self._masks = []

    def at_end(self, row: int) -> bool:
        """Whether a constraint says that what was emitted of this row is all there can be."""
        return row in self.followers and self.followers[row].at_end

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Drop all sequences but these."""
        if self.history is not None:
            self.history.keep_rows(torch.tensor(rows, device=self.history.emitted.device))
        kept = {new: self.followers.get(row) for new, row in enumerate(rows)}
        self.followers = {row: follower for row, follower in kept.items() if follower}

    def _mask(self, drafted: Sequence[Tensor]) -> Tensor:
        """What is allowed behind these tokens of the draft, [B, V]."""
        for count in range(len(self._masks), len(drafted) + 1):
            if count:
                # Here the host waits for the device, as only a grammar makes it do.
                tokens = drafted[count - 1].tolist()
                for row, follower in self.followers.items():
                    follower.follow(tokens[row])
            self._masks.append(self._allowed())
        return self._masks[len(drafted)]

    def _allowed(self) -> Tensor:
        assert self.history is not None
        emitted = self.history.emitted
        mask = torch.ones(len(emitted), self.vocab_size, dtype=torch.bool)
        for row, follower in self.followers.items():
            permitted = follower.allowed()
            if permitted is not None:
                mask[row] = torch.from_numpy(permitted)
        return mask.to(emitted.device)
