"""A decoder whose whole pass is one call of the kernels: Llama's kind of layers, on a CPU.

Every position is computed by itself and in one order, so what comes out does not depend on the
pass it was in, to the last bit: this trunk is deterministic without being asked.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mtplx import kernels
from mtplx.kernels import Kernels
from mtplx.models.slots import Span
from mtplx.models.tiled import TiledLinear
from mtplx.models.trunk import Trunk, TrunkOutput

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Model types with these layers and no others: RMS norm, rotated heads, a gated MLP."""

_STATIC_ROPE = ("default", "linear", "llama3", "yarn")
"""Rotations that do not depend on how long a text is."""

ROWS = 256
"""Positions in one call; more are cut."""

SMALL = 2**20
"""Bytes of scratch memory that a cache keeps: a prompt's pass takes far more than a cycle's."""

_EMBEDDED = [torch.float32, torch.bfloat16, torch.float16]
"""Types of an embedding, in the order of kernels/decoder.h."""

LANES, WIDEST = 16, 256
"""Numbers in the kernels' vectors, of which a head's size is a multiple; and the largest size."""


def misfit(model: Any) -> str | None:
    """Why a model cannot be run by the kernels' pass, or None if it can.

    Args:
        model: of transformers, with its linear layers tiled.
    """
    config = model.config
    if config.model_type not in FAMILIES:
        return f"layers of type {config.model_type!r}"
    if config.hidden_act != "silu":
        return f"an MLP with {config.hidden_act}"
    heads = heads_misfit(config, model.get_decoder().rotary_emb)
    plain = [name for name, part in model.named_modules() if isinstance(part, nn.Linear)]
    return heads or (f"layers that are not tiled ({plain[0]} and others)" if plain else None)


def heads_misfit(config: Any, rotary: Any) -> str | None:
    """Why the kernels' attention cannot take heads of this kind, or None if it can.

    Args:
        config: with the sizes of transformers' Llama.
        rotary: embedding of positions.
    """
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope not in _STATIC_ROPE:
        return f"rotary positions of type {rope!r}"
    size, turned = _head_size(config), 2 * len(rotary.inv_freq)
    if size % LANES:
        return f"heads of {size} numbers, which is no multiple of {LANES}"
    if size > WIDEST:
        return f"heads of {size} numbers, more than {WIDEST}"
    return f"heads of {size} numbers of which {turned} are turned" if turned != size else None


def _head_size(config: Any) -> int:
    return int(
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )


class Rotations:
    """Cosines and sines by which a static rotary embedding turns each position, looked up."""

    def __init__(self, rotary: Any) -> None:
        """
        Args:
            rotary: of transformers; asked for every position once.
        """
        self._rotary = rotary
        self._table = torch.empty(2, 0, 0)

    def __call__(self, end: int) -> Tensor:
        """Cosines and sines of every position below `end` and maybe more, [2, P, D] float32."""
        # One table throughout, whatever another thread puts in its place.
        table = self._table
        if end > table.shape[1]:
            # Twice as many as before, so that a growing text has few made anew.
            every = torch.arange(max(end, 2 * table.shape[1], 256))[None]
            table = self._table = torch.cat(self._rotary(torch.empty(0), every)).float()
        return table


class FusedLayers:
    """Layers and what follows them, ready for the kernels; keeps what they point to alive."""

    def __init__(
        self,
        library: Kernels,
        config: Any,
        layers: Sequence[dict[str, TiledLinear | Tensor]],
        norm: Tensor,
        output: TiledLinear,
        embedding: Tensor,
        joining: tuple[Tensor, Tensor] | None = None,
        residual_normed: bool = False,
    ) -> None:
        """
        Args:
            library: the kernels.
            config: with the sizes of transformers' Llama.
            layers: of each the matrices and norms of kernels.Layer, by name; those it lacks are
                left out.
            norm: weight of the last norm, [H].
            output: to the vocabulary.
            embedding: [V, H], of any float type.
            joining: where tokens are joined with states, the weights of the norms of both, [H].
            residual_normed: whether the residual stream then begins with the norm of a state.
        """
        self.library = library
        if embedding.dtype not in _EMBEDDED:
            embedding = embedding.float()
        embedding = embedding.detach().contiguous()
        self._held: list[Any] = [layers, output, embedding]
        table = (kernels.Layer * len(layers))()
        for entry, parts in zip(table, layers, strict=True):
            for name, part in parts.items():
                setattr(
                    entry, name, part.matrix if isinstance(part, TiledLinear) else self._at(part)
                )
        self._held.append(table)
        self.joins = joining is not None
        self.hidden_size = int(config.hidden_size)
        self.kv_heads = int(config.num_key_value_heads)
        self.head_size = _head_size(config)
        self.vocab_size = output.out_features
        self.count = len(layers)
        self.decoder = kernels.Decoder(
            len(layers),
            self.hidden_size,
            int(config.num_attention_heads),
            self.kv_heads,
            self.head_size,
            int(config.intermediate_size),
            float(config.rms_norm_eps),
            self.head_size**-0.5,
            table,
            self._at(norm),
            output.matrix,
            _EMBEDDED.index(embedding.dtype),
            residual_normed,
            embedding.data_ptr(),
            *(self._at(weight) for weight in joining or ()),
        )

    def _at(self, numbers: Tensor) -> int:
        held = numbers.detach().float().contiguous()
        self._held.append(held)
        return held.data_ptr()

    def run(
        self,
        tokens: Tensor,
        rotations: Tensor,
        span: Span,
        cache: FusedSlots,
        *,
        states: Tensor | None = None,
        streams: Sequence[int] = (),
        with_normed: bool = True,
        with_logits: bool = True,
    ) -> Passed:
        """One pass over T positions of each of B slots.

        Args:
            tokens: [B, T] int64, none outside the vocabulary.
            rotations: cosines and sines by position, [2, P, D] float32, each contiguous; positions
                from P on are turned as the last one before.
            span: where the positions lie.
            cache: written there.
            states: that the tokens are joined with, [B, T, H] float32.
            streams: layers after which the residual stream is wanted, 0 for the embeddings.
            with_normed: whether what the last norm makes of the stream is wanted.
            with_logits: whether logits are.
        Raises:
            IndexError: the cache ends before the span.
        """
        shape, size = tokens.shape, self.hidden_size
        cache.reserve(span)
        # The kernels do not ask how large anything is.
        assert span.positions.shape == shape and rotations.shape[::2] == (2, self.head_size)
        assert tokens.dtype == span.positions.dtype == torch.int64
        assert rotations.dtype == torch.float32 and rotations.stride(1) == self.head_size
        assert (states is not None) is self.joins
        assert states is None or (states.shape == (*shape, size) and states.dtype == torch.float32)
        tokens, positions = tokens.contiguous(), span.positions.contiguous()
        states = None if states is None else states.contiguous()

        stream = torch.empty(*shape, size)
        aux = torch.empty(*shape, len(streams) * size) if streams else None
        normed = torch.empty(*shape, size) if with_normed else None
        logits = torch.empty(*shape, self.vocab_size) if with_logits else None
        count, threads = shape.numel(), torch.get_num_threads()
        scratch = cache.scratch(self, min(count, ROWS), threads)
        cos, sin = rotations.data_ptr(), rotations[1].data_ptr()
        for row in range(0, count, ROWS):
            table = None
            if aux is not None:
                table = (ctypes.c_void_p * (self.count + 1))()
                beginning = aux.data_ptr() + 4 * row * aux.shape[-1]
                for place, layer in enumerate(streams):
                    table[layer] = beginning + 4 * place * size
            self.library.run(
                self.decoder,
                cache.table(),
                kernels.Pass(
                    tokens.data_ptr() + 8 * row,
                    _from(states, row),
                    _from(stream, row),
                    cos,
                    sin,
                    positions.data_ptr() + 8 * row,
                    table,
                    _from(normed, row),
                    _from(logits, row),
                    scratch.data_ptr(),
                    min(ROWS, count - row),
                    row,
                    shape[1],
                    threads,
                    rotations.shape[1],
                    len(streams) * size,
                ),
            )
        for place, layer in enumerate(streams):
            # One that is wanted twice has been written to its last place.
            last = len(streams) - 1 - streams[::-1].index(layer)
            if aux is not None and place != last:
                parts = aux.view(*shape, len(streams), size)
                parts[..., place, :] = parts[..., last, :]
        return Passed(stream, aux, normed, logits)


class Passed(NamedTuple):
    """What a pass over [B, T] positions has made.

    Attributes:
        stream: the residual stream after the last layer, [B, T, H].
        aux: after the layers asked for, beside each other, [B, T, N * H]; None of none.
        normed: what the last norm makes of it, [B, T, H]; None where it was not asked for.
        logits: [B, T, V], likewise.
    """

    stream: Tensor
    aux: Tensor | None
    normed: Tensor | None
    logits: Tensor | None


def _from(numbers: Tensor | None, row: int) -> int | None:
    """Where this row of contiguous float32 [B, T, any] begins, B * T rows in all."""
    if numbers is None:
        return None
    # In numbers, for slicing takes longer than a small pass.
    return numbers.data_ptr() + 4 * row * numbers.shape[-1]


class FusedSlots:
    """Keys and values of all layers, [L, B, kv_heads, capacity * D] each, allocated on first use.

    A head's numbers lie in the order that kernels/decoder.h says.
    """

    def __init__(self, layers: FusedLayers, capacity: int, dtype: torch.dtype) -> None:
        """
        Args:
            layers: whose they are.
            capacity: positions of a slot, at least.
            dtype: bfloat16 or float32.
        """
        # Keys lie in blocks of so many.
        self.capacity = -(-capacity // LANES) * LANES
        self.layers, self.dtype = layers, dtype
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def reserve(self, span: Span) -> None:
        """See that there is room for a pass.

        Raises:
            IndexError: there is none.
        """
        slots = len(span.positions)
        if self.keys is None or self.values is None:
            self.keys, self.values = self._storage(slots)
        if span.end > self.capacity or slots > self.keys.shape[1]:
            raise IndexError(
                f"{slots} slots up to position {span.end - 1} in a cache of {self.keys.shape[1]} "
                f"with {self.capacity} positions each"
            )

    def scratch(self, layers: FusedLayers, rows: int, threads: int) -> Tensor:
        """Memory that a pass may write to as it likes; kept for the next one if it is small."""
        room = layers.library.room(layers.decoder, rows, threads, self.capacity)
        if room <= len(self._scratch):
            return self._scratch
        scratch = torch.empty(room, dtype=torch.uint8)
        if room <= SMALL:
            self._scratch = scratch
        return scratch

    def table(self) -> kernels.Cache:
        """For the kernels."""
        assert self.keys is not None and self.values is not None, "reserve first"
        return kernels.Cache(
            int(self.dtype == torch.bfloat16),
            self.keys.shape[1],
            self.capacity,
            self.keys.data_ptr(),
            self.values.data_ptr(),
        )

    def _storage(self, slots: int) -> tuple[Tensor, Tensor]:
        layers = self.layers
        room = self.capacity * layers.head_size
        shape = (layers.count, slots, layers.kv_heads, room)
        return torch.zeros(shape, dtype=self.dtype), torch.zeros(shape, dtype=self.dtype)

    def take(self, other: FusedSlots, count: int) -> None:
        """Begin with the first `count` positions of another's slots."""
        if other.keys is None or other.values is None:
            return
        self.keys, self.values = self._storage(other.keys.shape[1])
        numbers = -(-count // LANES) * LANES * self.layers.head_size
        self.keys[..., :numbers] = other.keys[..., :numbers]
        self.values[..., :numbers] = other.values[..., :numbers]

    def keep_rows(self, rows: Tensor) -> None:
        """Have these slots in this order, [N] int64, and no others; one may come several times."""
        if self.keys is not None and self.values is not None:
            # The one way to pick rows whose result is certain to be contiguous.
            self.keys, self.values = (
                part.index_select(1, rows) for part in (self.keys, self.values)
            )


class FusedTrunk(Trunk):
    """A trunk whose passes are the kernels'. Its model's own code is not run."""

    deterministic = True

    def __init__(self, model: Any, library: Kernels) -> None:
        assert misfit(model) is None
        decoder = model.get_decoder()
        self.fused = FusedLayers(
            library,
            model.config,
            [_parts(layer) for layer in decoder.layers],
            decoder.norm.weight,
            model.get_output_embeddings(),
            model.get_input_embeddings().weight,
        )
        self._rotations = Rotations(decoder.rotary_emb)
        super().__init__(model)

    def tap(self, layer_ids: Sequence[int]) -> None:
        """Every stream can be had, without hooks."""

    def new_cache(self, capacity: int) -> Any:
        return FusedSlots(self.fused, capacity, torch.bfloat16)

    @torch.inference_mode()
    def forward(
        self,
        tokens: Tensor,
        span: Span,
        cache: Any,
        taps: Sequence[int] = (),
        with_logits: bool = True,
    ) -> TrunkOutput:
        # Past the context lies only the padding of other rows' longer drafts.
        rotations = self._rotations(min(span.end, self.context))[:, : self.context]
        passed = self.fused.run(
            tokens, rotations, span, cache, streams=taps, with_logits=with_logits
        )
        assert passed.normed is not None
        return TrunkOutput(passed.normed, passed.aux, passed.logits)

    @torch.inference_mode()
    def read(self, tokens: Tensor, taps: Sequence[int] = ()) -> TrunkOutput:
        batch, width = tokens.shape
        if tokens.numel() and not 0 <= int(tokens.min()) <= int(tokens.max()) < self.vocab_size:
            raise IndexError(f"a token id outside the vocabulary of {self.vocab_size}")
        span = Span.after([0] * batch, width, tokens.device)
        return self.forward(tokens, span, self.new_cache(width), taps, with_logits=False)


def projections(attention: Any, mlp: Any) -> dict[str, Any]:
    """The linear layers of a decoder layer, by the names of kernels.Layer."""
    return {
        "q": attention.q_proj,
        "k": attention.k_proj,
        "v": attention.v_proj,
        "o": attention.o_proj,
        "gate": mlp.gate_proj,
        "up": mlp.up_proj,
        "down": mlp.down_proj,
    }


def _parts(layer: Any) -> dict[str, TiledLinear | Tensor]:
    attention = layer.self_attn
    parts: dict[str, TiledLinear | Tensor] = {
        **projections(attention, layer.mlp),
        "input_norm": layer.input_layernorm.weight,
        "post_norm": layer.post_attention_layernorm.weight,
    }
    for name in ("q_norm", "k_norm"):
        if hasattr(attention, name):
            parts[name] = getattr(attention, name).weight
    return parts
