"""An EAGLE-3 head beside a trunk, as a drafter's head: in torch, or by the kernels."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mtplx import kernels
from mtplx.drafters.mtp import Head
from mtplx.errors import MtplxError
from mtplx.kernels import Kernels
from mtplx.models.blocks import Bits
from mtplx.models.eagle3 import Eagle3Head
from mtplx.models.fused import (
    FusedLayers,
    FusedSlots,
    FusedTrunk,
    Rotations,
    heads_misfit,
    projections,
)
from mtplx.models.linear import KernelLinear
from mtplx.models.rounding import rounded
from mtplx.models.slots import KVSlots, Span
from mtplx.models.trunk import Trunk, TrunkOutput


class AttachedHead(Head):
    """Binds a head to the trunk whose states it is fed.

    They share the trunk's embedding, unless the head has another one of its own.
    """

    layers = 1
    chained = True

    def __init__(self, head: Eagle3Head, trunk: Trunk, dtype: torch.dtype | None = None) -> None:
        """
        Args:
            head: to be bound; its weights are cast.
            trunk: to bind it to.
            dtype: to compute in; None for the trunk's.
        Raises:
            MtplxError: the head was made for a trunk of another shape.
        """
        config = head.config
        if (config.trunk_hidden_size, config.layer.vocab_size) != (
            trunk.hidden_size,
            trunk.vocab_size,
        ):
            raise MtplxError(
                f"the head was made for a trunk of hidden size {config.trunk_hidden_size} and "
                f"{config.layer.vocab_size} tokens; this one has {trunk.hidden_size} and "
                f"{trunk.vocab_size}"
            )
        if head.embed_tokens is not None and _is_copy(head.embed_tokens, trunk.embed):
            head.embed_tokens = None
        if head.embed_tokens is None and config.layer.hidden_size != trunk.hidden_size:
            raise MtplxError(
                f"the head is {config.layer.hidden_size} wide and its trunk {trunk.hidden_size}: "
                "it needs an embedding of its own, and its file has no embed_tokens.weight"
            )
        self._dtype = dtype or trunk.dtype
        self.head = head.cast(self._dtype).to(trunk.device)
        self.taps: tuple[int, ...] = head.config.aux_layer_ids
        trunk.tap(self.taps)
        self.draft_ids: Tensor | None = head.draft_ids
        self._embed = self.head.embed_tokens or trunk.embed

    def features(self, output: TrunkOutput) -> Tensor:
        assert output.aux is not None, "the trunk must tap the head's layers"
        # The kernels' streams are float32 whatever the head is in.
        return self.head.fuse(output.aux.to(self._dtype))

    def new_cache(self, capacity: int) -> KVSlots:
        return KVSlots(capacity)

    @torch.inference_mode()
    def step(
        self, tokens: Tensor, hidden: Tensor, span: Span, cache: KVSlots, layer: int = 0
    ) -> Tensor:
        attend = partial(_attend, span, cache)
        embeds = self._embed(tokens).to(self._dtype)
        result: Tensor = self.head(embeds, hidden, span.positions, attend)
        return result

    @torch.inference_mode()
    def logits(self, hidden: Tensor, layer: int = 0) -> Tensor:
        return self.head.logits(hidden)


def _is_copy(own: nn.Embedding, embed: nn.Module) -> bool:
    """Whether a head's embedding is its trunk's once more, as files of heads often have it."""
    # Other classes may scale what they look up, and the head was trained on what it has.
    if type(embed) is not nn.Embedding or embed.weight.device.type == "meta":
        return False
    mine, trunks = own.weight, embed.weight
    return mine.shape == trunks.shape and torch.equal(mine.to(trunks), trunks)


def _attend(span: Span, cache: KVSlots, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    keys, values = cache.update(k, v, span)
    return F.scaled_dot_product_attention(q, keys, values, attn_mask=span.mask, enable_gqa=True)


BITS: Bits = 4
"""Of a weight in the kernels' hands. What that rounds can cost acceptance, and not exactness; with
the default model, four bits keep as many drafts as eight."""


class FusedHead(AttachedHead):
    """The same with its matrices in blocks of a few bits, each step a call of the kernels."""

    def __init__(self, head: Eagle3Head, trunk: Trunk, library: Kernels) -> None:
        super().__init__(head, trunk, torch.float32)
        layer = head.layer

        def few_bits(linear: nn.Linear) -> KernelLinear:
            return KernelLinear(library, rounded(linear.weight, BITS), linear.bias)

        parts: dict[str, KernelLinear | Tensor] = {
            name: few_bits(linear)
            for name, linear in projections(layer.self_attn, layer.mlp).items()
        }
        parts["post_norm"] = layer.post_attention_layernorm.weight
        self._output = few_bits(head.lm_head)
        self._fuse = few_bits(head.fc)
        self._rotations = Rotations(head.rotary)
        self._layers = FusedLayers(
            library,
            head.config.layer,
            [parts],
            head.norm.weight,
            self._output,
            self._embed.weight,
            (layer.input_layernorm.weight, layer.hidden_norm.weight),
            head.config.norm_before_residual,
        )

    def features(self, output: TrunkOutput) -> Tensor:
        aux = output.aux
        assert aux is not None, "the trunk must tap the head's layers"
        return self._fuse.forward(self.head.normed(aux))

    def new_cache(self, capacity: int) -> Any:
        return FusedSlots(self._layers, capacity, torch.bfloat16)

    @torch.inference_mode()
    def step(
        self, tokens: Tensor, hidden: Tensor, span: Span, cache: Any, layer: int = 0
    ) -> Tensor:
        passed = self._layers.run(
            tokens,
            self._rotations(span.end),
            span,
            cache,
            states=hidden,
            with_normed=self.head.config.norm_output,
            with_logits=False,
        )
        return passed.stream if passed.normed is None else passed.normed

    @torch.inference_mode()
    def logits(self, hidden: Tensor, layer: int = 0) -> Tensor:
        norm = None if self.head.config.norm_output else self.head.norm
        return self._output.forward(hidden, norm)


def attach(head: Eagle3Head, trunk: Trunk) -> AttachedHead:
    """The head beside this trunk, by the kernels where they can take it.

    Beside a float32 trunk in torch it stays in torch too: that pair is what others are held to.

    Raises:
        MtplxError: it was made for a trunk of another shape.
    """
    library = kernels.find() if trunk.device.type == "cpu" else None
    reference = trunk.dtype == torch.float32 and not isinstance(trunk, FusedTrunk)
    if library and not reference and kernels_take(head, trunk):
        return FusedHead(head, trunk, library)
    return AttachedHead(head, trunk)


def kernels_take(head: Eagle3Head, trunk: Trunk) -> bool:
    """Whether a head is of a kind that the kernels can run beside this trunk."""
    # Other classes may scale what they look up.
    plain = head.embed_tokens is not None or type(trunk.embed) is nn.Embedding
    return plain and heads_misfit(head.config.layer, head.rotary) is None
