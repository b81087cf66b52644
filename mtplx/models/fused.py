"""A decoder whose whole pass is one call of the kernels: Llama's kind of layers, on a CPU.

Every position is computed by itself and in one order, so what comes out does not depend on the
pass it was in, to the last bit: this trunk is deterministic without being asked.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mtplx import kernels
from mtplx.kernels import Kernels
from mtplx.models.slots import Span
from mtplx.models.tiled import TiledLinear, aligned
from mtplx.models.trunk import Trunk, TrunkOutput

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Model types with these layers and no others: RMS norm, rotated heads, a gated MLP."""

_STATIC_ROPE = ("default", "linear", "llama3", "yarn")
"""Rotations that do not depend on how long a text is."""

ROWS = 256
"""Positions in one call; more are cut."""


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
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope not in _STATIC_ROPE:
        return f"rotary positions of type {rope!r}"
    if _head_size(config) % 16:
        return f"heads of {_head_size(config)} numbers, which is no multiple of 16"
    plain = [name for name, part in model.named_modules() if isinstance(part, nn.Linear)]
    return f"layers that are not tiled ({plain[0]} and others)" if plain else None


def _head_size(config: Any) -> int:
    return int(
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )


class FusedLayers:
    """Layers and what follows them, ready for the kernels; keeps what they point to alive."""

    def __init__(
        self,
        library: Kernels,
        config: Any,
        layers: Sequence[dict[str, TiledLinear | Tensor]],
        norm: Tensor,
        output: TiledLinear,
    ) -> None:
        """
        Args:
            library: the kernels.
            config: with the sizes of transformers' Llama.
            layers: of each the matrices and norms of kernels.Layer, by name; those it lacks are
                left out.
            norm: weight of the last norm, [H].
            output: to the vocabulary.
        """
        self.library = library
        self._held: list[Any] = [layers, output]
        table = (kernels.Layer * len(layers))()
        for entry, parts in zip(table, layers, strict=True):
            for name, part in parts.items():
                setattr(
                    entry, name, part.matrix if isinstance(part, TiledLinear) else self._at(part)
                )
        self._held.append(table)
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
        )

    def _at(self, numbers: Tensor) -> int:
        held = numbers.detach().float().contiguous()
        self._held.append(held)
        return held.data_ptr()

    def run(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        places: Tensor,
        cache: FusedSlots,
        *,
        inputs: Tensor | None = None,
        streams: Sequence[int] = (),
        with_normed: bool = True,
        with_logits: bool = True,
    ) -> tuple[dict[int, Tensor], Tensor | None, Tensor | None]:
        """One pass over R positions, of which those of one slot come in order.

        Args:
            x: embeddings, [R, H] float32; overwritten.
            cos, sin: of the rotation, [R, D] float32.
            places: slot and position of each, [R, 2] int32.
            cache: written at the places.
            inputs: for the first layer's attention, instead of its norm of x, [R, K].
            streams: layers after which the residual stream is wanted, 0 for x itself.
            with_normed: whether what the last norm makes of the stream is wanted.
            with_logits: whether logits are.
        Returns:
            The streams [R, H] by layer, the normed states [R, H], the logits [R, V].
        """
        rows, threads = len(x), torch.get_num_threads()
        found = {layer: torch.empty(rows, self.hidden_size) for layer in set(streams)}
        table = (ctypes.c_void_p * (self.count + 1))()
        for layer, stream in found.items():
            table[layer] = stream.data_ptr()
        normed = torch.empty(rows, self.hidden_size) if with_normed else None
        logits = torch.empty(rows, self.vocab_size) if with_logits else None
        room = self.library.room(self.decoder, rows, threads, cache.capacity)
        scratch = aligned(room, torch.uint8)
        self.library.run(
            self.decoder,
            cache.table(),
            kernels.Pass(
                x.data_ptr(),
                None if inputs is None else inputs.data_ptr(),
                cos.data_ptr(),
                sin.data_ptr(),
                places.data_ptr(),
                table,
                None if normed is None else normed.data_ptr(),
                None if logits is None else logits.data_ptr(),
                scratch.data_ptr(),
                rows,
                threads,
            ),
        )
        return found, normed, logits


class FusedSlots:
    """Keys and values of all layers, [L, B, kv_heads, capacity, D] each, allocated on first use."""

    def __init__(self, layers: FusedLayers, capacity: int, narrow: bool) -> None:
        self.layers, self.capacity, self.narrow = layers, capacity, narrow
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def allocate(self, slots: int) -> None:
        """Make room, once it is known for how many."""
        if self.keys is None:
            dtype = torch.bfloat16 if self.narrow else torch.float32
            layers = self.layers
            shape = (layers.count, slots, layers.kv_heads, self.capacity, layers.head_size)
            self.keys, self.values = (
                torch.zeros(shape, dtype=dtype),
                torch.zeros(shape, dtype=dtype),
            )

    def table(self) -> kernels.Cache:
        """For the kernels."""
        assert self.keys is not None and self.values is not None, "allocate first"
        return kernels.Cache(
            int(self.narrow),
            self.keys.shape[1],
            self.capacity,
            0,
            self.keys.data_ptr(),
            self.values.data_ptr(),
        )

    def keep_rows(self, rows: Tensor) -> None:
        """Drop all slots but these, [N] int64."""
        if self.keys is not None and self.values is not None:
            self.keys, self.values = self.keys[:, rows], self.values[:, rows]


def places_of(span: Span) -> Tensor:
    """Slot and position of every token of a pass, row by row, [B * T, 2] int32."""
    slots = torch.arange(len(span.positions))[:, None].expand_as(span.positions)
    return torch.stack([slots, span.positions], -1).view(-1, 2).to(torch.int32)


class FusedTrunk(Trunk):
    """A trunk whose passes are the kernels'. Its model's own code is not run."""

    def __init__(self, model: Any, library: Kernels) -> None:
        assert misfit(model) is None
        decoder = model.get_decoder()
        self.fused = FusedLayers(
            library,
            model.config,
            [_parts(layer) for layer in decoder.layers],
            decoder.norm.weight,
            model.get_output_embeddings(),
        )
        super().__init__(model)

    def tap(self, layer_ids: Sequence[int]) -> None:
        """Every stream can be had, without hooks."""

    def new_cache(self, capacity: int) -> FusedSlots:  # type: ignore[override]
        return FusedSlots(self.fused, capacity, narrow=True)

    @torch.inference_mode()
    def forward(
        self,
        tokens: Tensor,
        span: Span,
        cache: FusedSlots,
        taps: Sequence[int] = (),
        with_logits: bool = True,
    ) -> TrunkOutput:
        batch, width = tokens.shape
        cache.allocate(batch)
        x = self.embed(tokens).float().flatten(0, 1)
        # Past the context lies only the padding of other rows' longer drafts.
        positions = span.positions.clamp_max(self.context - 1)
        cos, sin = self.decoder.rotary_emb(x, positions)
        cos, sin = (part.float().flatten(0, 1).contiguous() for part in (cos, sin))
        places = places_of(span)
        parts = [
            self.fused.run(
                x[i : i + ROWS].clone(),
                cos[i : i + ROWS],
                sin[i : i + ROWS],
                places[i : i + ROWS],
                cache,
                streams=taps,
                with_logits=with_logits,
            )
            for i in range(0, batch * width, ROWS)
        ]

        def join(pieces: list[Tensor]) -> Tensor:
            whole = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
            return whole.view(batch, width, -1)

        return TrunkOutput(
            join([normed for _, normed, _ in parts if normed is not None]),
            torch.cat([join([streams[i] for streams, _, _ in parts]) for i in taps], -1)
            if taps
            else None,
            join([logits for _, _, logits in parts if logits is not None]) if with_logits else None,
        )

    @torch.inference_mode()
    def read(self, tokens: Tensor, taps: Sequence[int] = ()) -> TrunkOutput:
        batch, width = tokens.shape
        span = Span.after([0] * batch, width, tokens.device)
        return self.forward(tokens, span, self.new_cache(width), taps, with_logits=False)


def _parts(layer: Any) -> dict[str, TiledLinear | Tensor]:
    attention, mlp = layer.self_attn, layer.mlp
    parts: dict[str, TiledLinear | Tensor] = {
        "q": attention.q_proj,
        "k": attention.k_proj,
        "v": attention.v_proj,
        "o": attention.o_proj,
        "gate": mlp.gate_proj,
        "up": mlp.up_proj,
        "down": mlp.down_proj,
        "input_norm": layer.input_layernorm.weight,
        "post_norm": layer.post_attention_layernorm.weight,
    }
    for name in ("q_norm", "k_norm"):
        if hasattr(attention, name):
            parts[name] = getattr(attention, name).weight
    return parts
