"""A trunk that computes every position in the same way, whatever else is in its pass.

The last bits of a floating-point sum depend on the order of its terms, and libraries choose the
order by shape: by the number of rows, the number of keys, the remainder of a vector. A position
therefore comes out differently alone, behind a draft and beside neighbours. Here no shape depends
on any of that. A pass over [B, T] positions is cut into tiles, each run as a text of TILE tokens,
whosever they are; the last tile is filled up with copies of its last token. Attention walks over
the keys in chunks of a fixed size, and a chunk that a query may not see leaves its sums as they
are. What remains is a token's place in its tile: that places are alike is tried out when the trunk
is made. Where they are not, a tile is one token, which is slow and needs no trying out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from mtplx.errors import MtplxError
from mtplx.models.slots import KVSlots, SlotCache, Span
from mtplx.models.trunk import Trunk, TrunkOutput, agree

TILE = 8
"""Tokens in a tile: a cycle of depth 7. In bfloat16, one matrix row takes a CPU about as long."""

CHUNK = 256
"""Keys in a chunk."""


class DeterministicTrunk(Trunk):
    """A trunk whose results do not depend, to the last bit, on how passes are put together.

    Not on how many rows or positions a pass has, which of them a position is, what stands beside
    it, how long the other rows are, or how a prompt was cut into passes. This holds within one
    process, on one device, and while the number of threads stays what it was when the trunk was
    made.

    Attributes:
        tile: tokens computed together, TILE or 1.
        slow_because: why it is 1, or None.
    """

    deterministic = True
    windowed = False

    def __init__(self, model: Any) -> None:
        self.tile = TILE
        self.slow_because: str | None = None
        if model._is_stateful:
            raise MtplxError(
                f"model type {model.config.get_text_config().model_type!r} cannot be run "
                "deterministically: its recurrent layers round by how passes are put together; run "
                "it without"
            )
        super().__init__(model)
        if self.device.type == "meta":
            return
        own = self.config._attn_implementation
        usual = Trunk.read(self, _trial_text(self)).hidden
        self.slow_because = self._reason_for_one(usual)
        if self.slow_because:
            self.tile = 1
            self.model.set_attn_implementation(own)
            if not agree(self.read(_trial_text(self)).hidden, usual, self.dtype):
                raise MtplxError(
                    f"model type {self.config.model_type!r} cannot be run deterministically: its "
                    "tokens come out differently one at a time; run it without"
                )

    def _reason_for_one(self, usual: Tensor) -> str | None:
        """Why no more than one token can be computed together, or None, with attention set.

        Args:
            usual: the hidden states of the trial text in the usual pass.
        """
        kind = f"a model of type {self.config.model_type!r}"
        self.model.set_attn_implementation(_ATTENTION)
        if self.config._attn_implementation != _ATTENTION:
            return f"{kind} computes attention in a way of its own"
        text = _trial_text(self)
        span = Span.after([0] * len(text), text.shape[1], self.device)
        try:
            with _Operations() as seen:
                tiled = self.forward(text, span, self.new_cache(span.end)).hidden
        except NotImplementedError as error:
            return f"{kind} has attention with {error}"
        if not agree(tiled, usual, self.dtype):
            return f"{kind} computes attention in a way of its own"
        others = sorted(seen.names - _ROW_BY_ROW)
        if others:
            return f"{kind} computes with {others[0]}, which may mix tokens"
        if not _places_are_alike(self):
            return "this machine's kernels compute the rows of a matrix in different ways"
        return None

    def new_cache(self, capacity: int) -> SlotCache:
        return SlotCache(_whole_chunks(capacity))

    @torch.inference_mode()
    def forward(
        self,
        tokens: Tensor,
        span: Span,
        cache: SlotCache,
        taps: Sequence[int] = (),
        with_logits: bool = True,
    ) -> TrunkOutput:
        batch, width = tokens.shape
        rows = torch.arange(batch, device=tokens.device).repeat_interleave(width)
        positions = span.positions.flatten()
        sight = F.pad(span.mask[:, 0], (0, _whole_chunks(span.end) - span.end)).flatten(0, 1)
        parts = []
        for start in range(0, batch * width, self.tile):
            picked = torch.arange(start, start + self.tile, device=tokens.device)
            picked = picked.clamp_max(batch * width - 1)
            view = _TileView(cache, span, batch, rows[picked], positions[picked])
            parts.append(
                self._run(
                    taps,
                    with_logits,
                    input_ids=tokens.flatten()[picked][None],
                    attention_mask=self._mask(view.mask(sight[picked]), self.config),
                    position_ids=positions[picked][None].clamp_max(self.context - 1),
                    cache=view,
                    use_cache=True,
                )
            )

        def join(tiles: list[Tensor]) -> Tensor:
            return torch.cat(tiles, 1)[0, : batch * width].view(batch, width, -1)

        return TrunkOutput(
            join([part.hidden for part in parts]),
            join([part.aux for part in parts if part.aux is not None]) if taps else None,
            join([part.logits for part in parts if part.logits is not None])
            if with_logits
            else None,
        )

    @torch.inference_mode()
    def read(self, tokens: Tensor, taps: Sequence[int] = ()) -> TrunkOutput:
        batch, width = tokens.shape
        span = Span.after([0] * batch, width, tokens.device)
        return self.forward(tokens, span, self.new_cache(width), taps, with_logits=False)


class _TileView(SlotCache):
    """A cache as one tile sees it: its tokens are the queries of a single text [1, tile].

    The keys of that text are those of all slots with a token in the tile, each from its first
    position to the end of the chunk that its last query is in; a mask keeps the slots apart.
    """

    def __init__(
        self, cache: SlotCache, span: Span, batch: int, rows: Tensor, positions: Tensor
    ) -> None:
        super().__init__(cache.capacity)
        self.slots, self.span = cache.slots, span
        self._batch, self._rows, self._positions = batch, rows, positions
        ends: dict[int, int] = {}
        for row, position in zip(rows.tolist(), positions.tolist(), strict=True):
            ends[row] = max(ends.get(row, 0), _whole_chunks(position + 1))
        self._ends = ends

    def mask(self, sight: Tensor) -> Tensor:
        """[1, 1, tile, keys], given which keys of its own slot each query sees, [tile, any]."""
        parts = [sight[:, :end] & (self._rows == row)[:, None] for row, end in self._ends.items()]
        return torch.cat(parts, 1)[None, None]

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,
        *args: object,
        **kwargs: object,
    ) -> tuple[Tensor, Tensor]:
        layer = self.slots.setdefault(layer_idx, KVSlots(self.capacity))
        if layer.keys is None or layer.values is None:
            layer.keys = self._storage(key_states)
            layer.values = self._storage(value_states)
        return self._exchange(layer.keys, key_states), self._exchange(layer.values, value_states)

    def _storage(self, new: Tensor) -> Tensor:
        return new.new_zeros(self._batch, new.shape[1], self.capacity, new.shape[3])

    def _exchange(self, storage: Tensor, new: Tensor) -> Tensor:
        storage[self._rows, :, self._positions] = new[0].transpose(0, 1)
        # Copied even where it is one slice: strides, too, must not tell how large the cache is.
        return torch.cat([storage[row, :, :end] for row, end in self._ends.items()], 1)[None]


def _whole_chunks(length: int) -> int:
    return -(-length // CHUNK) * CHUNK


# --- attention -------------------------------------------------------------------------------

_ATTENTION = "mtplx_deterministic"


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention in the interface of transformers; [B, T, heads, D] and no weights."""
    for name in ("s_aux", "position_bias", "indices"):
        if others.get(name) is not None:
            raise NotImplementedError(name)
    if attention_mask is None:
        queries, keys = query.shape[2], key.shape[2]
        ones = torch.ones(1, 1, queries, keys, dtype=torch.bool, device=query.device)
        attention_mask = ones.tril(keys - queries)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    return _attend(query, key, value, attention_mask, scaling, softcap), None


# An operation of its own, so that `_Operations` need not know what it is made of.
@torch.library.custom_op("mtplx::attend_in_chunks", mutates_args=())
def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    scaling: float,
    softcap: float | None,
) -> Tensor:
    """Softmax attention, summed chunk by chunk from the first key on.

    Each chunk's shapes are the same, and a query passes over chunks in which it sees nothing: how
    many keys there are, and what the others hold, leaves no trace.

    Args:
        query: [B, heads, T, D].
        key: [B, kv_heads, keys, D].
        value: [B, kv_heads, keys, Dv].
        mask: which keys a query sees, [B, 1, T, keys] bool.
        scaling: of the scores.
        softcap: bound of the scores, or None.
    Returns:
        [B, T, heads, Dv] in the query's type; sums are in float32 or wider.
    """
    batch, heads, queries, _ = query.shape
    kv_heads, wide = key.shape[1], torch.promote_types(query.dtype, torch.float32)
    # The queries of the heads that share keys are rows of one matrix.
    rows = query.to(wide).reshape(batch * kv_heads, -1, query.shape[-1]) * scaling
    # Lowest, not -inf, whose difference from itself is no number.
    best = rows.new_full((*rows.shape[:2], 1), torch.finfo(wide).min)
    total = torch.zeros_like(best)
    output = rows.new_zeros(*rows.shape[:2], value.shape[-1])
    for start in range(0, key.shape[2], CHUNK):
        keys, values = (_chunk(x, start, wide) for x in (key, value))
        seen = mask[..., start : start + CHUNK]
        seen = F.pad(seen, (0, CHUNK - seen.shape[-1]))[:, None]
        seen = seen.expand(batch, kv_heads, heads // kv_heads, queries, CHUNK)
        seen = seen.reshape(batch * kv_heads, -1, CHUNK)
        scores = torch.bmm(rows, keys.mT)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~seen, -torch.inf)
        higher = torch.maximum(best, scores.amax(-1, keepdim=True))
        weights, decay = torch.exp(scores - higher), torch.exp(best - higher)
        # Not by adding zeros: in another's chunk, zero times infinity may lie in wait.
        visits = seen.any(-1, keepdim=True)
        total = torch.where(visits, total * decay + weights.sum(-1, keepdim=True), total)
        output = torch.where(visits, output * decay + torch.bmm(weights, values), output)
        best = higher
    output = (output / total).view(batch, heads, queries, -1)
    return output.transpose(1, 2).to(query.dtype, memory_format=torch.contiguous_format, copy=True)


def _chunk(x: Tensor, start: int, dtype: torch.dtype) -> Tensor:
    """[B, kv_heads, keys, D] -> [B * kv_heads, CHUNK, D] from `start` on, zeros past the end."""
    x = x[:, :, start : start + CHUNK]
    chunk = x.new_zeros(*x.shape[:2], CHUNK, x.shape[3], dtype=dtype)
    chunk[:, :, : x.shape[2]] = x
    return chunk.flatten(0, 1)


AttentionInterface.register(_ATTENTION, _attention)
# Without one here, masks would not be made at all.
AttentionMaskInterface.register(_ATTENTION, sdpa_mask)


# --- trying it out ---------------------------------------------------------------------------


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Names the operations that run under it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(str(func.overloadpacket).removeprefix("aten."))
        return func(*args, **(kwargs or {}))


_COMPUTING = (
    "linear addmm layer_norm rms_norm mean mtplx.attend_in_chunks "
    "add sub mul div neg abs pow square rsqrt sqrt reciprocal exp cos sin tanh sigmoid silu gelu "
    "relu softplus dropout clamp clamp_max clamp_min remainder eq gt le __and__ where"
)
_MOVING = (
    "embedding index index_put_ select slice split chunk cat stack pad repeat_interleave "
    "view reshape flatten transpose t permute squeeze unsqueeze expand contiguous "
    "to type_as clone alias detach detach_ lift_fresh resolve_conj resolve_neg "
    "arange empty new_zeros zeros_like ones_like"
)
_ROW_BY_ROW = frozenset(f"{_COMPUTING} {_MOVING}".split())
"""Operations whose course no value decides, so that one trial tells for all numbers.

A model with any other, such as one that sends tokens to experts, is run a token at a time.
"""


def _trial_text(trunk: Trunk) -> Tensor:
    """Two short texts that make up one tile, [2, 4]."""
    return torch.arange(TILE, device=trunk.device).view(2, -1) % trunk.vocab_size


@torch.inference_mode()
def _places_are_alike(trunk: Trunk) -> bool:
    """Whether tokens have the same logits, to the last bit, at every place of a tile.

    An order of summation is a matter of shape and place, not of what is summed, so one set of
    numbers tells. The tokens are of different slots, behind made-up keys and values: enough of
    them that attention, too, has something to sum.
    """
    places = torch.arange(TILE, device=trunk.device)
    tokens, cache = places[:, None] % trunk.vocab_size, trunk.new_cache(CHUNK)
    span = Span.after([CHUNK - 1] * TILE, 1, trunk.device)
    trunk.forward(tokens, span, cache)  # for the shapes
    generator = torch.Generator(trunk.device).manual_seed(0)
    for layer in cache.slots.values():
        assert layer.keys is not None and layer.values is not None
        layer.keys.normal_(generator=generator)
        layer.values.normal_(generator=generator)
    first = trunk.forward(tokens, span, cache)
    for shift in range(1, TILE):
        cache.keep_rows(places.roll(1))
        moved = trunk.forward(tokens.roll(shift, 0), span, cache)
        for one, other in ((first.hidden, moved.hidden), (first.logits, moved.logits)):
            assert one is not None and other is not None
            # As bytes, because what is no number is not even equal to itself.
            if not torch.equal(one.roll(shift, 0).view(torch.uint8), other.view(torch.uint8)):
                return False
    return True
