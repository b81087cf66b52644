"""The trunk: a causal language model from transformers, run over slots."""

from __future__ import annotations

from collections.abc import Iterable
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
    window becomes a limit on the context, within which the window changes nothing.
    """

    def __init__(self, model: nn.Module, taps: Iterable[int] = ()) -> None:
        self.model: Any = model
        self.config: Any = self.model.config.get_text_config()
        self.decoder: Any = self.model.get_decoder()
        self.embed: Any = self.model.get_input_embeddings()
        self.layers: int = self.config.num_hidden_layers
        self.hidden_size: int = self.config.hidden_size
        self.vocab_size: int = self.config.vocab_size
        self.context = _context(self.config)
        self.dtype: torch.dtype = self.model.dtype
        self.device: torch.device = self.model.device
        self._taps: tuple[int, ...] = ()
        self._seen: dict[int, Tensor] = {}
        self._hooks: list[Any] = []
        self.tap(taps)

    def tap(self, layer_ids: Iterable[int]) -> None:
        """Record the residual stream after these many layers in every pass from now on."""
        for hook in self._hooks:
            hook.remove()
        self._taps = tuple(layer_ids)
        self._hooks = []
        for i in sorted(set(self._taps)):
            module = self.embed if i == 0 else self.decoder.layers[i - 1]
            self._hooks.append(module.register_forward_hook(self._recorder(i)))

    def _recorder(self, layer_id: int) -> Any:
        def record(module: nn.Module, inputs: Any, output: Any) -> None:
            self._seen[layer_id] = output[0] if isinstance(output, tuple) else output

        return record

    def new_cache(self, capacity: int) -> SlotCache:
        """An empty cache whose slots hold `capacity` tokens each."""
        return SlotCache(capacity)

    @torch.inference_mode()
    def forward(
        self, tokens: Tensor, span: Span, cache: SlotCache, with_logits: bool = True
    ) -> TrunkOutput:
        """Run [B, T] tokens at the span's positions, writing them into the cache."""
        cache.span = span
        return self._run(
            with_logits,
            input_ids=tokens,
            attention_mask=span.mask,
            position_ids=span.positions,
            cache=cache,
            use_cache=True,
        )

    @torch.inference_mode()
    def read(self, tokens: Tensor) -> TrunkOutput:
        """One causal pass over whole texts [B, T], padded on the right; no cache, no logits."""
        return self._run(False, input_ids=tokens, use_cache=False)

    def _run(self, with_logits: bool, **inputs: Any) -> TrunkOutput:
        captured: list[Tensor] = []
        hook = self.decoder.register_forward_hook(
            lambda module, inputs, output: captured.append(output.last_hidden_state)
        )
        try:
            output = (self.model if with_logits else self.decoder)(**inputs)
        finally:
            hook.remove()
        aux = torch.cat([self._seen[i] for i in self._taps], dim=-1) if self._taps else None
        self._seen.clear()
        return TrunkOutput(captured[0], aux, output.logits if with_logits else None)


def _context(config: Any) -> int:
    """Positions the trunk can hold here; refuses what slots cannot roll back yet."""
    kinds = set(getattr(config, "layer_types", None) or ())
    unknown = kinds - {"full_attention", "sliding_attention", "chunked_attention"}
    if unknown:
        raise MtplxError(
            f"model type {config.model_type!r} has layers of kind {', '.join(sorted(unknown))}; "
            "only attention layers can be run so far"
        )
    context = int(getattr(config, "max_position_embeddings", None) or 2048)
    # Some configs carry a window that they do not use, and say so.
    if getattr(config, "use_sliding_window", True) or "sliding_attention" in kinds:
        context = min(context, int(getattr(config, "sliding_window", None) or context))
    if "chunked_attention" in kinds:
        context = min(context, int(getattr(config, "attention_chunk_size", None) or context))
    return context
