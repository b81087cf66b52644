"""A decoder whose whole pass is one call of the kernels: Llama's kind of layers, on a CPU.

The kernels compute every position by itself and in one order, so that what comes out does not
depend on the pass it was in, to the last bit. They are made for the few positions of a cycle, whose
time is that of reading the weights. A long pass is a matter of arithmetic, at which torch's matrix
products are faster where the CPU has units for them; then the trunk may be told to have its long
passes run in torch, by the model's own code over the same cache and weights.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mtplx import kernels
from mtplx.kernels import Kernels
from mtplx.models.linear import PLAIN, KernelLinear
from mtplx.models.slots import SlotCache, Span
from mtplx.models.trunk import Trunk, TrunkOutput

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Model types with these layers and no others: RMS norm, rotated heads, a gated MLP."""

_STATIC_ROPE = ("default", "linear", "llama3", "yarn")
"""Rotations that do not depend on how long a text is."""

ROWS = 256
"""Positions in one call; more are cut."""

LONG = 7
LONG_WEIGHTS = {"amx": 650e6, "avx512": 120e6, "avx2": 120e6, "generic": 120e6}
"""By instruction set, what tells a long pass: it has `LONG + LONG_WEIGHTS / W` positions and more,
where W is the weights of a layer. There the kernels and torch were measured to take the same time,
by `amx` and `avx512`; a CPU that has bfloat16 for torch has no need of the other two.
Below LONG both only wait for memory, however large the layers; above, torch's arithmetic is faster,
and what it loses between its operations counts for less the larger they are."""

SMALL = 2**20
"""Bytes of scratch memory that a cache keeps: a prompt's pass takes far more than a cycle's."""

_EMBEDDED = [torch.float32, torch.bfloat16, torch.float16]
"""Types of an embedding, in the order of kernels/decoder.h."""

LANES, WIDEST = 16, 256
"""Numbers in the kernels' vectors, of which a head's size is a multiple; and the largest size."""


def misfit(model: Any) -> str | None:
    """Why a model cannot be run by the kernels' pass, or None if it can.

    Args:
        model: of transformers, its linear layers in the kernels' hands or of a type they read.
    """
    config = model.config
    if config.model_type not in FAMILIES:
        return f"layers of type {config.model_type!r}"
    if config.hidden_act != "silu":
        return f"an MLP with {config.hidden_act}"
    heads = heads_misfit(config, model.get_decoder().rotary_emb)
    if heads:
        return heads
    for name, layer in _matrices(model):
        # Others may do more than multiply.
        if not isinstance(layer, KernelLinear) and type(layer) is not nn.Linear:
            return f"a {type(layer).__name__} in the place of a linear layer ({name})"
        if isinstance(layer, nn.Linear) and layer.weight.dtype not in PLAIN:
            return f"weights of a type they do not read ({name})"
    return None


def _matrices(model: Any) -> Iterator[tuple[str, Any]]:
    """What multiplies in a model of these families, by name."""
    for index, layer in enumerate(model.get_decoder().layers):
        for name, part in projections(layer.self_attn, layer.mlp).items():
            yield f"{name} of layer {index}", part
    yield "the output head", model.get_output_embeddings()


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
        layers: Sequence[Mapping[str, KernelLinear | nn.Linear | Tensor]],
        norm: Tensor,
        output: KernelLinear | nn.Linear,
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
                held = self._at(part) if isinstance(part, Tensor) else self._matrix(part)
                setattr(entry, name, held)
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
            self._matrix(output),
            _EMBEDDED.index(embedding.dtype),
            residual_normed,
            embedding.data_ptr(),
            *(self._at(weight) for weight in joining or ()),
        )

    def _matrix(self, linear: KernelLinear | nn.Linear) -> kernels.Matrix:
        if isinstance(linear, nn.Linear):
            linear = KernelLinear(self.library, linear.weight, linear.bias)
            self._held.append(linear)
        return linear.matrix

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

    def update(self, keys: Tensor, values: Tensor, span: Span, layer: int) -> tuple[Tensor, Tensor]:
        """Write [B, kv_heads, T, D] at the span's positions; return all of [0, end)."""
        assert self.keys is not None and self.values is not None, "reserve first"
        size, rows = self.layers.head_size, len(keys)
        blocks = self.keys[layer].view(*self.keys.shape[1:3], -1, size, LANES)
        flat = self.values[layer].view(*self.values.shape[1:3], -1, size)
        at = span.positions
        slot = torch.arange(rows, device=at.device)[:, None]
        blocks[slot, :, at // LANES, :, at % LANES] = keys.transpose(1, 2).to(self.dtype)
        flat[slot, :, at] = values.transpose(1, 2).to(self.dtype)
        filled = blocks[:rows, :, : -(-span.end // LANES)].transpose(-1, -2).flatten(2, 3)
        return (
            filled[:, :, : span.end].to(keys.dtype),
            flat[:rows, :, : span.end].to(values.dtype),
        )

    def _storage(self, slots: int) -> tuple[Tensor, Tensor]:
        layers = self.layers
        room = self.capacity * layers.head_size
        shape = (layers.count, slots, layers.kv_heads, room)
        return torch.zeros(shape, dtype=self.dtype), torch.zeros(shape, dtype=self.dtype)

    def reaches(self, count: int) -> int:
        """The most positions of its one slot, up to `count`, that another cache can begin with."""
        return count

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
    """A trunk whose passes are the kernels', but for long ones where it is told so."""

    windowed = False

    def __init__(self, model: Any, library: Kernels, long_in_torch: bool = False) -> None:
        """
        Args:
            model: of transformers, that is no misfit.
            library: the kernels.
            long_in_torch: whether long passes are the model's own code's, in torch. Its linear
                layers are torch's then, and no result is promised to the bit.
        """
        assert misfit(model) is None
        self.deterministic = not long_in_torch
        if long_in_torch:
            layer = model.get_decoder().layers[0]
            weights = sum(part.numel() for part in layer.parameters())
            self.long = LONG + int(LONG_WEIGHTS[library.name] / weights)
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
        # The kernels give every stream without hooks.
        if self.long is not None:
            super().tap(layer_ids)

    def _is_long(self, tokens: Tensor) -> bool:
        return self.long is not None and tokens.numel() >= self.long

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
        if self._is_long(tokens):
            cache.reserve(span)
            return _wide(super().forward(tokens, span, _InTorch(cache), taps, with_logits))
        # Past the context lies only the padding of other rows' longer drafts.
        rotations = self._rotations(min(span.end, self.context))[:, : self.context]
        passed = self.fused.run(
            tokens, rotations, span, cache, streams=taps, with_logits=with_logits
        )
        assert passed.normed is not None
        return TrunkOutput(passed.normed, passed.aux, passed.logits)

    @torch.inference_mode()
    def read(self, tokens: Tensor, taps: Sequence[int] = ()) -> TrunkOutput:
        if self._is_long(tokens):
            return _wide(super().read(tokens, taps))
        batch, width = tokens.shape
        if tokens.numel() and not 0 <= int(tokens.min()) <= int(tokens.max()) < self.vocab_size:
            raise IndexError(f"a token id outside the vocabulary of {self.vocab_size}")
        span = Span.after([0] * batch, width, tokens.device)
        return self.forward(tokens, span, self.new_cache(width), taps, with_logits=False)


class _InTorch(SlotCache):
    """The kernels' cache as transformers' attention modules call theirs."""

    def __init__(self, slots: FusedSlots) -> None:
        super().__init__(slots.capacity)
        self._slots = slots

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,
        *args: object,
        **kwargs: object,
    ) -> tuple[Tensor, Tensor]:
        assert self.span is not None, "set span before the pass"
        return self._slots.update(key_states, value_states, self.span, layer_idx)


def _wide(output: TrunkOutput) -> TrunkOutput:
    """In float32, as the kernels' results are."""
    hidden, aux, logits = output.hidden, output.aux, output.logits
    return TrunkOutput(
        hidden.float(),
        None if aux is None else aux.float(),
        None if logits is None else logits.float(),
    )


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


def _parts(layer: Any) -> dict[str, KernelLinear | nn.Linear | Tensor]:
    attention = layer.self_attn
    parts: dict[str, KernelLinear | nn.Linear | Tensor] = {
        **projections(attention, layer.mlp),
        "input_norm": layer.input_layernorm.weight,
        "post_norm": layer.post_attention_layernorm.weight,
    }
    for name in ("q_norm", "k_norm"):
        if hasattr(attention, name):
            parts[name] = getattr(attention, name).weight
    return parts
