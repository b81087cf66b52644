"""An EAGLE-3 head beside a trunk, as a drafter's head."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from mtplx.errors import MtplxError
from mtplx.models.eagle3 import Eagle3Head
from mtplx.models.slots import KVSlots, Span
from mtplx.models.trunk import Trunk, TrunkOutput


class AttachedHead:
    """Binds a head to the trunk whose states it is fed and whose embedding it shares."""

    def __init__(self, head: Eagle3Head, trunk: Trunk) -> None:
        layer = head.config.layer
        if layer.hidden_size != trunk.hidden_size or layer.vocab_size != trunk.vocab_size:
            raise MtplxError(
                f"the head was made for a trunk of hidden size {layer.hidden_size} and "
                f"{layer.vocab_size} tokens; this one has {trunk.hidden_size} and "
                f"{trunk.vocab_size}"
            )
        self.head = head.cast(trunk.dtype).to(trunk.device)
        self.taps: tuple[int, ...] = head.config.aux_layer_ids
        trunk.tap(self.taps)
        self.draft_ids: Tensor | None = head.draft_ids
        self._embed = trunk.embed

    def features(self, output: TrunkOutput) -> Tensor:
        assert output.aux is not None, "the trunk must tap the head's layers"
        return self.head.fuse(output.aux)

    def new_cache(self, capacity: int) -> KVSlots:
        return KVSlots(capacity)

    @torch.inference_mode()
    def step(self, tokens: Tensor, hidden: Tensor, span: Span, cache: KVSlots) -> Tensor:
        attend = partial(_attend, span, cache)
        result: Tensor = self.head(self._embed(tokens), hidden, span.positions, attend)
        return result

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        return self.head.logits(hidden)


def _attend(span: Span, cache: KVSlots, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    keys, values = cache.update(k, v, span)
    return F.scaled_dot_product_attention(q, keys, values, attn_mask=span.mask, enable_gqa=True)
