"""Gemma 4's assistant: a small model that reads the trunk's own keys and values.

It has no keys of its own and reads no text. Each of its layers attends to what the last layer of
its kind in the trunk holds of the committed text, always from the one position of the token that
waits for the trunk; what it drafted so far reaches it only as the last token's embedding and as its
own last state, joined as an MTP layer joins them. (Format: model type `gemma4_assistant` of
transformers, whose drafting loop takes the likeliest token and reports the logits as what it was
drawn from; here it is drawn from them.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mtplx.drafters.drafter import Drafter, DraftSlots
from mtplx.drafters.pace import Draftsman
from mtplx.errors import MtplxError
from mtplx.history import Histories
from mtplx.models.slots import SlotCache, Span
from mtplx.models.trunk import Trunk, TrunkOutput
from mtplx.shaping import Distributions, Shaper
from mtplx.verification import Draft, Draws

TYPES = ("gemma4_assistant", "gemma4_unified_assistant")
"""Model types of assistants."""


class Assistant(Drafter):
    """An assistant beside the trunk that it was made for."""

    def __init__(self, name: str, model: Any, trunk: Trunk) -> None:
        """
        Args:
            name: of the assistant.
            model: of transformers.
            trunk: of the same family, run in torch.
        Raises:
            MtplxError: it was made for another trunk.
        """
        config, text = model.config, model.config.get_text_config()
        kinds = list(getattr(trunk.config, "layer_types", None) or ())
        kept = kinds[: trunk.layers - (getattr(trunk.config, "num_kv_shared_layers", 0) or 0)]
        unlike = None
        if config.backbone_hidden_size != trunk.hidden_size:
            unlike = (
                f"it is fed states of {config.backbone_hidden_size} numbers, and this model's have "
                f"{trunk.hidden_size}"
            )
        elif text.vocab_size != trunk.vocab_size:
            unlike = f"it has {text.vocab_size} tokens, and this model {trunk.vocab_size}"
        elif missing := set(text.layer_types) - set(kept):
            unlike = f"it attends to layers of kind {', '.join(missing)}, and this model has none"
        if unlike:
            raise MtplxError(
                f"{name} is no assistant for this model: {unlike}; take the one that was published "
                "with it"
            )
        self.model, self.trunk = model, trunk
        # Of each kind, the trunk's last layer that has keys and values of its own.
        self.sources = {kind: len(kept) - 1 - kept[::-1].index(kind) for kind in set(kept)}

    def slots(self, prompts: Sequence[Sequence[int]], capacity: int, cache: Any) -> AssistantSlots:
        return AssistantSlots(self, cache)

    def step(
        self, tokens: Tensor, hidden: Tensor, span: Span, cache: SlotCache
    ) -> tuple[Tensor, Tensor]:
        """One draft's logits [B, V], and the state [B, H] that the next one is fed.

        Args:
            tokens: the last of each row, [B].
            hidden: the trunk's state before the first, then what this gave, [B, H].
            span: the position of the token that waits for the trunk, [B, 1].
            cache: the trunk's.
        """
        pair = torch.cat([self.trunk.embed(tokens[:, None]), hidden[:, None]], -1)
        text, masks, shared = self.model.config.get_text_config(), {}, {}
        # Of the waiting token itself there is nothing in the cache yet.
        before = Span(span.positions - 1, span.end - 1, None)
        for kind in set(text.layer_types):
            layer = cache.slots[self.sources[kind]]
            assert layer.keys is not None and layer.values is not None
            shared[kind] = layer.keys[:, :, : before.end], layer.values[:, :, : before.end]
            seen = before.mask
            if kind == "sliding_attention":
                # As transformers has it, inclusively: the newest key and as many before it.
                seen = before.within(text.sliding_window + 1)
            masks[kind] = seen
        output = self.model.model(
            inputs_embeds=self.model.pre_projection(pair),
            attention_mask=masks,
            position_ids=span.positions,
            shared_kv_states=shared,
            use_cache=False,
        ).last_hidden_state
        return self._logits(output)[:, 0], self.model.post_projection(output)[:, 0]

    def _logits(self, states: Tensor) -> Tensor:
        head = self.model.lm_head
        if not self.model.config.use_ordered_embeddings:
            result: Tensor = head(states)
            return result
        # Row by row: what it gives to tokens that it leaves out depends on all it is given.
        rows = [self.model.masked_embedding(row[None], head.weight) for row in states]
        return torch.cat(rows)


class AssistantSlots(DraftSlots):
    """An assistant's side of B sequences: the trunk's newest state of each, and the token after."""

    def __init__(self, assistant: Assistant, cache: Any) -> None:
        self.assistant, self.cache = assistant, cache
        self._hidden: Tensor | None = None
        self._pending: Tensor | None = None

    def refill(
        self, output: TrunkOutput, following: Tensor, span: Span, last: Sequence[int]
    ) -> None:
        index = torch.as_tensor(last, device=following.device)
        rows, at = torch.arange(len(index), device=index.device), index.clamp_min(0)
        hidden, pending = output.hidden[rows, at], following[rows, at]
        if self._hidden is not None and self._pending is not None:
            hidden = torch.where((index >= 0)[:, None], hidden, self._hidden)
            pending = torch.where(index >= 0, pending, self._pending)
        self._hidden, self._pending = hidden, pending

    def postpone(self, output: TrunkOutput, following: Tensor, span: Span) -> None:
        self.refill(output, following, span, [0] * len(following))

    def draft(
        self,
        depth: int,
        lengths: Sequence[int],
        noise: Draws,
        shaper: Shaper,
        histories: Histories,
        draftsman: Draftsman | None = None,
    ) -> Draft:
        hidden, token = self._hidden, self._pending
        assert hidden is not None and token is not None, "refill before drafting"
        span = Span.after(list(lengths), 1, hidden.device)
        tokens: list[Tensor] = []
        rows: list[Distributions] = []
        for i in range(depth):
            if i and draftsman and not draftsman.goes_on(i):
                break
            logits, hidden = self.assistant.step(token, hidden, span, self.cache)
            q = shaper(logits, histories.behind(tokens))
            rows.append(q)
            token = noise.drafted(q, i)
            tokens.append(token)
            if draftsman:
                draftsman.drew(q.at(token[:, None])[:, 0].tolist())
        return Draft(torch.stack(tokens, 1), Distributions.stack(rows, shaper.vocab_size))

    def take(self, other: DraftSlots | None, count: int) -> int:
        """All but the last: the trunk's state of that is needed to begin with."""
        return max(count - 1, 0)

    def keep_rows(self, rows: Tensor) -> None:
        if self._hidden is not None and self._pending is not None:
            self._hidden, self._pending = self._hidden[rows], self._pending[rows]
