"""Slots of layers that sum up the past in a state: gated delta nets, Mamba, short convolutions.

A pass reads the state that its first position finds, and does not change it. What its positions
write is kept beside it, and how much of that a row accepted shows when the next pass begins: at
the position after it. Only then is so much added to the state. Rolling back is therefore leaving
writes out, for each row its own number, and nothing is copied or run again
(docs/architecture.md: rollback is arithmetic).

A state is a matrix [K, V] for each head that keeps values under keys. Position i multiplies it by
a decay, one for all of it or one for each of its rows, and adds the product of a key and a value,

    S_i = exp(g_i) S_(i-1) + k_i v_i',

and the rules differ in what they read and in what the value is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK = 64
"""Positions that are computed together: each looks at all that its chunk wrote before it."""


@dataclass(frozen=True)
class Writes:
    """What the positions of a pass add to a state.

    Attributes:
        keys: [B, H, T, K].
        values: [B, H, T, V].
        decay: the logarithm of what the state is multiplied by from the pass's beginning up to
            each position, [B, H, T, 1], or of what its rows are, [B, H, T, K].
    """

    keys: Tensor
    values: Tensor
    decay: Tensor

    def onto(self, state: Tensor, counts: Tensor) -> Tensor:
        """The state [B, H, K, V] behind the first `counts` positions of each row, [B] int64."""
        decay = torch.cat([torch.zeros_like(self.decay[:, :, :1]), self.decay], 2)
        index = counts[:, None, None, None].expand(-1, decay.shape[1], 1, decay.shape[3])
        whole = decay.gather(2, index)
        # Masked before the exponential: what comes behind has the larger decay.
        left = (whole - self.decay).clamp_max(0).exp()
        positions = torch.arange(left.shape[2], device=left.device)[:, None]
        left = left.masked_fill(positions >= counts[:, None, None, None], 0)
        added = (self.keys * left).mT @ self.values
        return state * whole.mT.exp() + added

    def rows(self, index: Tensor) -> Writes:
        """Those of these rows."""
        return Writes(self.keys[index], self.values[index], self.decay[index])


Rule = Callable[..., tuple[Tensor, Writes]]
"""(state [B, H, K, V], inputs [B, H, T, …] each) -> what the positions read [B, H, T, V], and their
writes."""


def gated_delta_rule(
    state: Tensor, queries: Tensor, keys: Tensor, values: Tensor, decay: Tensor, beta: Tensor
) -> tuple[Tensor, Writes]:
    """S_i = exp(g_i) S_(i-1) + k_i (b_i (v_i - k_i exp(g_i) S_(i-1)))', read by q_i S_i.

    A position's value is what its key does not yet hold, so that all of a chunk's values are the
    solution of one triangular system (Yang et al., arXiv 2412.06464, section 3).

    Args:
        state: before the first position, [B, H, K, V].
        queries: [B, H, T, K].
        keys: the same.
        values: [B, H, T, V].
        decay: logarithms g, [B, H, T].
        beta: how much of the difference is written, [B, H, T].
    """
    total = decay.cumsum(-1)
    between = _between(total)
    rest = beta[..., None] * (values - (keys @ state) * total[..., None].exp())
    if rest.shape[2] > 1:
        system = beta[..., None] * (keys @ keys.mT) * between
        rest = torch.linalg.solve_triangular(system, rest, upper=False, unitriangular=True)
    read = (queries @ state) * total[..., None].exp() + ((queries @ keys.mT) * between) @ rest
    return read, Writes(keys, rest, total[..., None])


def rowwise_delta_rule(
    state: Tensor, queries: Tensor, keys: Tensor, values: Tensor, decay: Tensor, beta: Tensor
) -> tuple[Tensor, Writes]:
    """The gated delta rule with a decay for each row of the state: Kimi Delta Attention (Kimi Team,
    arXiv 2510.26692).

    Args:
        state: before the first position, [B, H, K, V].
        queries: [B, H, T, K].
        keys: the same.
        values: [B, H, T, V].
        decay: logarithms g, [B, H, T, K].
        beta: how much of the difference is written, [B, H, T].
    """
    total = decay.cumsum(2)
    rest = beta[..., None] * (values - (keys * total.exp()) @ state)
    if rest.shape[2] > 1:
        system = beta[..., None] * _decayed_products(keys, keys, total)
        rest = torch.linalg.solve_triangular(system, rest, upper=False, unitriangular=True)
    read = (queries * total.exp()) @ state + _decayed_products(queries, keys, total) @ rest
    return read, Writes(keys, rest, total)


def decayed_sum(
    state: Tensor, queries: Tensor, keys: Tensor, values: Tensor, decay: Tensor
) -> tuple[Tensor, Writes]:
    """S_i = exp(g_i) S_(i-1) + k_i v_i', read by q_i S_i: Mamba 2 (Dao and Gu, arXiv 2405.21060).

    Args:
        state: before the first position, [B, H, K, V].
        queries: [B, H, T, K].
        keys: the same.
        values: [B, H, T, V].
        decay: logarithms g, [B, H, T].
    """
    total = decay.cumsum(-1)
    read = (queries @ state) * total[..., None].exp()
    read = read + ((queries @ keys.mT) * _between(total)) @ values
    return read, Writes(keys, values, total[..., None])


def _between(total: Tensor) -> Tensor:
    """The decay from each position j to each i behind it, [B, H, i, j]; 0 where j is behind i."""
    return (total[..., :, None] - total[..., None, :]).tril().exp().tril()


def _decayed_products(left: Tensor, right: Tensor, total: Tensor) -> Tensor:
    """Of each i with each j up to it, [B, H, i, j], where each row decays by itself in between."""
    ahead = torch.ones(total.shape[2], total.shape[2], dtype=torch.bool, device=total.device).triu(
        1
    )
    between = total[..., :, None, :] - total[..., None, :, :]
    between = between.masked_fill(ahead[..., None], -torch.inf).exp()
    return torch.einsum("bhik,bhjk,bhijk->bhij", left, right, between)


class RecurrentSlots:
    """One layer's side of B sequences: the last inputs of its convolution, and its state.

    For each pass call `begin`, then `convolve` and `run` where the layer has such parts, then
    `end`.
    """

    def __init__(self) -> None:
        # Where the state stands, [B]; the window begins where the convolution's past does.
        self.at: Tensor | None = None
        self.window: Tensor | None = None
        self.state: Tensor | None = None
        self._writes: Writes | None = None
        self._past = 0
        self._width = 0

    def begin(self, start: Tensor, width: int, kept: Tensor | None = None) -> None:
        """Go to the first positions of a pass, [B]: what lies behind them has been rejected.

        Args:
            start: for each row, no further back than its last pass began.
            width: positions of the pass.
            kept: how many of them each row keeps, [B], where that is known before the pass. A row
                that keeps none stays where it is, whatever is read in its place.
        """
        if self.at is not None:
            if kept is not None:
                start = torch.where(kept > 0, start, self.at)
            self._go_on(start - self.at)
        elif start.any():
            raise IndexError("a state that nothing was written to stands at position 0")
        self.at, self._width = start, width

    def convolve(self, inputs: Tensor, size: int) -> Tensor:
        """The inputs [B, C, T] behind the `size - 1` before them, [B, C, size - 1 + T]."""
        past = self.window
        if past is None:
            past = inputs.new_zeros(*inputs.shape[:2], size - 1)
        self.window, self._past = torch.cat([past, inputs], -1), size - 1
        return self.window

    def run(self, rule: Rule, *inputs: Tensor) -> Tensor:
        """What a pass reads by a rule from the state and from its own writes, [B, H, T, V].

        Args:
            rule: of the layer.
            inputs: its arguments behind the state, [B, H, T, …] float32; keys and values are the
                second and third.
        """
        _, keys, values, *_ = inputs
        if self.state is None:
            self.state = values.new_zeros(*keys.shape[:2], keys.shape[3], values.shape[3])
        state, read, writes = self.state, [], []
        passed = torch.zeros_like(keys[:, :, :1, :1])
        for start in range(0, keys.shape[2], CHUNK):
            some, wrote = rule(state, *(x[:, :, start : start + CHUNK] for x in inputs))
            read.append(some)
            writes.append(Writes(wrote.keys, wrote.values, wrote.decay + passed))
            if start + CHUNK < keys.shape[2]:
                state = wrote.onto(state, torch.full_like(keys[:, 0, 0, 0], CHUNK).long())
                passed = writes[-1].decay[:, :, -1:]
        self._writes = Writes(
            torch.cat([part.keys for part in writes], 2),
            torch.cat([part.values for part in writes], 2),
            torch.cat([part.decay for part in writes], 2),
        )
        return torch.cat(read, 2)

    def end(self, kept: Tensor | None) -> None:
        """After the pass: where what each row keeps of it is known, [B], go there at once."""
        if kept is not None:
            assert self.at is not None, "begin first"
            self._go_on(kept)
            self.at = self.at + kept

    def _go_on(self, counts: Tensor) -> None:
        """Have the first `counts` positions of the last pass, [B], and no more.

        That it had so many is checked by the lookups.
        """
        if self.window is not None:
            index = counts[:, None, None] + torch.arange(self._past, device=counts.device)
            self.window = self.window.gather(2, index.expand(-1, self.window.shape[1], -1))
        if self._writes is not None:
            assert self.state is not None
            self.state, self._writes = self._writes.onto(self.state, counts), None
        self._width = 0

    def reaches(self, count: int) -> int:
        """The most positions of the one sequence, up to `count`, that another can begin with."""
        if self.at is None:
            return 0
        at = int(self.at[0])
        return min(count, at + self._width) if count >= at else 0

    def take(self, other: RecurrentSlots, count: int) -> None:
        """Begin with the first `count` positions of another's one sequence, which it reaches."""
        if other.at is None:
            return
        self.at, self._width, self._past = other.at, other._width, other._past
        self.window, self.state, self._writes = other.window, other.state, other._writes
        self._go_on(count - other.at)
        self.at = torch.full_like(other.at, count)

    def keep_rows(self, rows: Tensor) -> None:
        """Have these slots in this order, [N] int64, and no others; one may come several times."""
        self.at = None if self.at is None else self.at[rows]
        self.window = None if self.window is None else self.window[rows]
        self.state = None if self.state is None else self.state[rows]
        self._writes = None if self._writes is None else self._writes.rows(rows)
