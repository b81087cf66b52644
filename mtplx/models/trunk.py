"""The trunk: a causal language model from transformers, run over slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mtplx.errors import MtplxError
from mtplx.models.slots import SlotCache, Span


@dataclass(frozen=True)
class TrunkOutput:
    """Of one pass over [B, T] tokens.

    Attributes:
        hidden: the decoder's output after its last norm, [B, T, H].
        aux: residual streams at the tapped layers side by side, [B, T, taps * H]; None without.
        logits: next-token logits [B, T, V]; None if not asked for.
    """

    hidden: Tensor
    aux: Tensor | None
    logits: Tensor | None


class Trunk:
    """A transformers causal LM with taps on its residual stream.

    Layer id i taps the stream after i decoder layers (0: the embedding's output), before the
    last norm. Models whose layers keep anything but keys and values are refused; a sliding
    window, or a rotary embedding that changes with the length, becomes a limit on the context,
    within which it changes nothing.
    """

    def __init__(self, model: Any) -> None:
        self.model: Any = model
        self.config: Any = self.model.config.get_text_config()
        self.decoder: Any = self.model.get_decoder()
        self.embed: Any = self.model.get_input_embeddings()
        self.layers: int = self.config.num_hidden_layers
        self.hidden_size: int = self.config.hidden_size
        self.vocab_size: int = self.config.vocab_size
        self.context = _context(self.model, self.config)
        self.dtype: torch.dtype = self.model.dtype
        self.device: torch.device = self.model.device
        self._seen: dict[int, Tensor] = {}
        self._hooked: set[int] = set()

    def _hook(self, layer_id: int) -> None:
        """Record the residual stream after this many layers in every pass from now on."""

        def record(module: nn.Module, inputs: Any, output: Any) -> None:
            self._seen[layer_id] = output[0] if isinstance(output, tuple) else output

        module = self.embed if layer_id == 0 else self.decoder.layers[layer_id - 1]
        module.register_forward_hook(record)
        self._hooked.add(layer_id)

    def new_cache(self, capacity: int) -> SlotCache:
        """An empty cache whose slots hold `capacity` tokens each."""
        return SlotCache(capacity)

    @torch.inference_mode()
    def forward(
        self,
        tokens: Tensor,
        span: Span,
        cache: SlotCache,
        taps: Sequence[int] = (),
        with_logits: bool = True,
    ) -> TrunkOutput:
        """Run tokens [B, T] at the span's positions, writing them into the cache.

        Args:
            tokens: [B, T] int64.
            span: where they stand.
            cache: of the batch.
            taps: layers whose residual streams are wanted.
            with_logits: whether next-token logits are.
        """
        cache.span = span
        return self._run(
            taps,
            with_logits,
            input_ids=tokens,
            attention_mask=self._mask(span),
            # Past the context lies only the padding of other rows' longer drafts.
            position_ids=span.positions.clamp_max(self.context - 1),
            cache=cache,
            use_cache=True,
        )

    @torch.inference_mode()
    def read(self, tokens: Tensor, taps: Sequence[int] = ()) -> TrunkOutput:
        """One causal pass over whole texts [B, T], padded on the right; no cache, no logits."""
        return self._run(taps, False, input_ids=tokens, use_cache=False)

    def _mask(self, span: Span) -> Tensor:
        if self.config._attn_implementation != "eager":
            return span.mask
        # Models without a fused attention add their mask to the scores.
        hidden = torch.finfo(self.dtype).min
        return torch.zeros_like(span.mask, dtype=self.dtype).masked_fill(~span.mask, hidden)

    def _run(self, taps: Sequence[int], with_logits: bool, **inputs: Any) -> TrunkOutput:
        for layer_id in set(taps) - self._hooked:
            self._hook(layer_id)
        captured: list[Tensor] = []
        hook = self.decoder.register_forward_hook(
            lambda module, inputs, output: captured.append(output.last_hidden_state)
        )
        try:
            output = (self.model if with_logits else self.decoder)(**inputs)
        finally:
            hook.remove()
        aux = torch.cat([self._seen[i] for i in taps], dim=-1) if taps else None
        self._seen.clear()
        return TrunkOutput(captured[0], aux, output.logits if with_logits else None)


def _context(model: Any, config: Any) -> int:
    """Positions the trunk can hold here; refuses what slots cannot roll back yet."""
    kinds = set(getattr(config, "layer_types", None) or ())
    unknown = kinds - {"full_attention", "sliding_attention", "chunked_attention"}
    if unknown or model._is_stateful:
        raise MtplxError(
            f"model type {config.model_type!r} has layers of kind "
            f"{', '.join(sorted(unknown)) or 'recurrent'}; only attention layers can be run so far"
        )
    context = int(getattr(config, "max_position_embeddings", None) or 2048)
    # Some configs carry a window that they do not use, and say so.
    if getattr(config, "use_sliding_window", True) or "sliding_attention" in kinds:
        context = min(context, int(getattr(config, "sliding_window", None) or context))
    if "chunked_attention" in kinds:
        context = min(context, int(getattr(config, "attention_chunk_size", None) or context))
    # These frequencies change for all of a text, and all of a batch, once one position passes
    # the length of pretraining; what the cache holds would not.
    rope = getattr(config, "rope_parameters", None) or {}
    for parameters in (rope, *rope.values()):
        if isinstance(parameters, dict) and parameters.get("rope_type") == "longrope":
            context = min(context, int(parameters["original_max_position_embeddings"]))
    return context
