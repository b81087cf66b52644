"""Caches with one slot per sequence, each slot with a length of its own.

Keys and values are written at absolute positions into storage allocated beforehand. What lies at
or past a slot's length is scratch: it is masked out until something is committed over it. Undoing
a rejected draft is therefore setting a number back (docs/architecture.md).
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from mtplx.models.recurrent import RecurrentSlots


@dataclass(frozen=True)
class Span:
    """Where one pass writes and what it may see.

    Attributes:
        positions: absolute position of every input token, [B, T] int64.
        end: one past the highest position in the batch; attention reads [0, end).
        start: the first position if all rows share it, else None. A shared start turns the
            scattered write into a slice copy.
        kept: how many of its first tokens each row keeps, [B] int64, where that is known before
            the pass; None where the next pass tells.
    """

    positions: Tensor
    end: int
    start: int | None
    kept: Tensor | None = None

    @classmethod
    def after(
        cls,
        lengths: list[int],
        width: int,
        device: torch.device,
        kept: Sequence[int] | None = None,
    ) -> Span:
        """The `width` positions that follow each slot's first `lengths[b]`."""
        positions = torch.tensor([[*range(n, n + width)] for n in lengths], device=device)
        end = max(lengths) + width
        start = lengths[0] if min(lengths) == max(lengths) else None
        counts = None if kept is None else torch.tensor(kept, device=device)
        return cls(positions, end, start, counts)

    @classmethod
    def joined(cls, spans: Sequence[Span]) -> Span:
        """Of passes that followed each other, as if they had been one."""
        positions = torch.cat([span.positions for span in spans], 1)
        start = ahead = spans[0].start
        for span in spans:
            if ahead is None or span.start != ahead:
                start = None
                break
            ahead += span.positions.shape[1]
        return cls(positions, max(span.end for span in spans), start)

    def back(self, count: int) -> Span:
        """The same, so many positions further back."""
        start = None if self.start is None else self.start - count
        return Span(self.positions - count, self.end - count, start)

    def behind(self, count: int) -> Span:
        """Without its first `count` positions."""
        start = None if self.start is None else self.start + count
        return Span(self.positions[:, count:], self.end, start)

    @cached_property
    def mask(self) -> Tensor:
        """True where a query may look at a key, [B, 1, T, end] bool."""
        return self._sight()

    def _sight(self) -> Tensor:
        return self._keys <= self._queries

    def within(self, window: int) -> Tensor:
        """The same where a query looks at no more than the last `window` keys."""
        return self.mask & (self._keys > self._queries - window)

    def in_chunk(self, size: int) -> Tensor:
        """The same where texts are cut into chunks, and a query looks at those of its own."""
        return self.mask & (self._keys // size == self._queries // size)

    @property
    def _queries(self) -> Tensor:
        # What would stand before the text is nobody's; that it sees something keeps it a number.
        return self.positions.clamp_min(0)[:, None, :, None]

    @property
    def _keys(self) -> Tensor:
        return torch.arange(self.end, device=self.positions.device)[None, None, None, :]


class KVSlots:
    """Keys and values of one layer, [B, kv_heads, capacity, D], allocated on first use."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def update(self, keys: Tensor, values: Tensor, span: Span) -> tuple[Tensor, Tensor]:
        """Write [B, kv_heads, T, D] at the span's positions; return all of [0, end)."""
        if self.keys is None or self.values is None:
            # Zeros, not empty: a masked NaN would still poison the attention's sum.
            self.keys = _storage(keys, self.capacity)
            self.values = _storage(values, self.capacity)
        _write(self.keys, keys, span)
        _write(self.values, values, span)
        return self.keys[:, :, : span.end], self.values[:, :, : span.end]

    def keep_rows(self, rows: Tensor) -> None:
        """Have these slots in this order, [N] int64, and no others; one may come several times."""
        if self.keys is not None and self.values is not None:
            self.keys, self.values = self.keys[rows], self.values[rows]

    def take(self, other: KVSlots, count: int) -> None:
        """Begin with the first `count` positions of another's slots."""
        if other.keys is None or other.values is None:
            return
        self.keys = _storage(other.keys, self.capacity)
        self.values = _storage(other.values, self.capacity)
        self.keys[:, :, :count] = other.keys[:, :, :count]
        self.values[:, :, :count] = other.values[:, :, :count]


def _storage(new: Tensor, capacity: int) -> Tensor:
    batch, heads, _, dim = new.shape
    return new.new_zeros(batch, heads, capacity, dim)


def _write(storage: Tensor, new: Tensor, span: Span) -> None:
    if span.start is not None:
        storage[:, :, span.start : span.start + new.shape[2]] = new
    else:
        rows = torch.arange(len(new), device=new.device)[:, None]
        storage[rows, :, span.positions] = new.transpose(1, 2)


class _Layer:
    """One layer of a cache, for models that ask for more than the cache's own interface has."""

    def __init__(self, cache: SlotCache, index: int) -> None:
        self._cache, self._index = cache, index

    def update_index(self, keys: Tensor) -> Tensor:
        """As `update_indexer`, for keys [B, 1, T, D] that pick blocks of keys (MiniMax-M3)."""
        return self._cache.update_indexer(keys[:, 0], self._index)[:, None]


class _Layers(dict[int, _Layer]):
    """Any layer by its number. transformers' own code, which goes through all, finds none."""

    def __init__(self, cache: SlotCache) -> None:
        super().__init__()
        # Weakly, so that a cache's memory is free as soon as nobody uses it.
        self._cache: Any = weakref.proxy(cache)

    def __missing__(self, index: int) -> _Layer:
        return _Layer(self._cache, index)


class SlotCache(Cache):  # type: ignore[misc]
    """The trunk's cache, in the interface that transformers' attention modules call.

    Set `span` before each pass; the modules then write and read by it.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(layers=_Layers(self))
        self.capacity = capacity
        self.slots: dict[int, KVSlots] = {}
        self.recurrent: dict[int, RecurrentSlots] = {}
        self.span: Span | None = None

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,
        *args: object,
        **kwargs: object,
    ) -> tuple[Tensor, Tensor]:
        assert self.span is not None, "set span before the pass"
        layer = self.slots.setdefault(layer_idx, KVSlots(self.capacity))
        return layer.update(key_states, value_states, self.span)

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
        """Of sparse attention, the keys [B, T, D] that pick those which a query looks at."""
        keys = indexer_key_states[:, None]
        # A layer of slots like any other, of one head and no values, counted from -1 down.
        return self.update(keys, keys[..., :0], ~layer_idx)[0][:, 0]

    def keep_rows(self, rows: Tensor) -> None:
        """Have these slots in this order, [N] int64, and no others; one may come several times."""
        for layer in self.slots.values():
            layer.keep_rows(rows)
        for states in self.recurrent.values():
            states.keep_rows(rows)

    def reaches(self, count: int) -> int:
        """The most positions of its one slot, up to `count`, that another cache can begin with."""
        return min((layer.reaches(count) for layer in self.recurrent.values()), default=count)

    def take(self, other: SlotCache, count: int) -> None:
        """Begin with the first `count` positions of another's slots, which it reaches."""
        for index, layer in other.slots.items():
            self.slots.setdefault(index, KVSlots(self.capacity)).take(layer, count)
        for index, states in other.recurrent.items():
            self.recurrent.setdefault(index, RecurrentSlots()).take(states, count)

    # transformers asks these before it sees that the mask is already made, and a class that is
    # given no positions would count on from `get_seq_length`. Rows have no one length, so every
    # pass is given positions; that a class heeds them is checked by the trunk.
    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0 if self.span is None else self.span.end

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0 if self.span is None else self.span.end - self.span.positions.shape[1]

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.get_seq_length(), 0
