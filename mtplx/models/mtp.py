"""MTP layers of a checkpoint: decoder layers of the trunk's kind, each behind a joint."""

from __future__ import annotations

import copy
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel

from mtplx.models.families import Family


class Joint(nn.Module):
    """Joins a token's embedding with the hidden state of the position before it."""

    def __init__(self, family: Family, norm: nn.Module, width: int, bias: bool) -> None:
        super().__init__()
        self.hidden_first = family.hidden_first
        self.embedding_norm = copy.deepcopy(norm)
        self.hidden_norm = copy.deepcopy(norm)
        self.join = nn.Linear(2 * width, width, bias=bias)
        self.norm = copy.deepcopy(norm) if family.has_norm else None

    def forward(self, embeds: Tensor, hidden: Tensor) -> Tensor:
        pair = [self.embedding_norm(embeds), self.hidden_norm(hidden)]
        if self.hidden_first:
            pair.reverse()
        joined: Tensor = self.join(torch.cat(pair, -1))
        return joined


class PlainBlock(nn.Module):
    """A decoder layer as most are, made of parts of a trunk whose own is put together otherwise."""

    def __init__(self, attention: nn.Module, mlp: nn.Module, norm: nn.Module) -> None:
        super().__init__()
        self.input_layernorm = copy.deepcopy(norm)
        self.self_attn = attention
        self.post_attention_layernorm = copy.deepcopy(norm)
        self.mlp = mlp

    def forward(self, x: Tensor, **inputs: Any) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), **inputs)[0]
        result: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return result


class MtpLayers(PreTrainedModel):  # type: ignore[misc]
    """The MTP layers of one checkpoint, without the embedding and the output head.

    Attributes:
        count: how many drafts in a row have a layer of their own.
    """

    # What transformers asks of a class before it takes over a config's choices.
    _supports_sdpa = True

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return True

    def __init__(
        self, family: Family, trunk: PreTrainedModel, joints: int, blocks: int, bias: bool = False
    ) -> None:
        """
        Args:
            family: of the checkpoint.
            trunk: of the same.
            joints: how many layers have norms and a matrix of their own; where it is one, it
                serves all.
            blocks: decoder layers.
            bias: whether the matrix has one.
        """
        config = copy.deepcopy(trunk.config.get_text_config())
        settings = {"num_hidden_layers": blocks, **family.settings(config, blocks)}
        for key, value in settings.items():
            setattr(config, key, value)
        # A span's mask is for fused attention, whichever the trunk runs, where there is one.
        config._attn_implementation = "sdpa" if trunk._supports_sdpa else "eager"
        super().__init__(config)
        decoder = trunk.get_decoder()
        norm = getattr(decoder, "norm", None) or decoder.norm_f
        last = decoder.layers[-1]
        with torch.device("meta"):
            # The trunk's may be kept in another type.
            blank = copy.deepcopy(norm).to("meta", torch.get_default_dtype())
            self.joints = nn.ModuleList(
                Joint(family, blank, config.hidden_size, bias) for _ in range(joints)
            )
            if family.plain is None:
                made = [type(last)(config, layer) for layer in range(blocks)]
            else:
                attention, mlp = map(type, family.plain(last))
                made = [
                    PlainBlock(attention(config, layer), mlp(config), blank)
                    for layer in range(blocks)
                ]
            self.blocks = nn.ModuleList(made)
        self.count = 1 if family.in_one else blocks
        # Not a part of it: its weights, if it has any, are the trunk's.
        self._rotary = [getattr(decoder, "rotary_emb", None)]
        self.post_init()

    def joint(self, layer: int) -> Joint:
        """The joint of a layer."""
        joint = self.joints[min(layer, len(self.joints) - 1)]
        assert isinstance(joint, Joint)
        return joint

    def kind(self, layer: int) -> str:
        """What its decoder layer's attention looks at."""
        config = self.config
        kinds = getattr(config, "mtp_layer_types", None) or getattr(config, "layer_types", None)
        return str(kinds[layer]) if kinds else "full_attention"

    def forward(
        self,
        layer: int,
        embeds: Tensor,
        hidden: Tensor,
        positions: Tensor,
        mask: Tensor,
        cache: Any,
    ) -> Tensor:
        """What a layer's decoder layers make of tokens and states, before the last norm.

        Args:
            layer: which.
            embeds: of the tokens, [B, T, H].
            hidden: of the positions before them, [B, T, H].
            positions: of the tokens, [B, T].
            mask: what each may look at, [B, 1, T, keys].
            cache: of all layers.
        """
        x: Any = self.joint(layer)(embeds, hidden)
        (rotary,) = self._rotary
        inputs: dict[str, Any] = {}
        if rotary is not None:
            kinds = {}
            if "layer_type" in signature(rotary.forward).parameters:
                kinds = {"layer_type": self.kind(layer)}
            inputs["position_embeddings"] = rotary(x, position_ids=positions, **kinds)
        for block in self.blocks if self.count == 1 else [self.blocks[layer]]:
            x = block(x, attention_mask=mask, position_ids=positions, cache=cache, **inputs)
            x = x[0] if isinstance(x, tuple) else x
        result: Tensor = x
        return result
