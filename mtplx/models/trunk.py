"""The trunk: a causal language model from transformers, run over slots."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from mtplx.errors import MtplxError
from mtplx.models.mixers import over_slots
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


class _Seen(threading.local):
    """What hooks saw of a thread's last pass."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.hidden: Any = None
        self.streams: dict[int, Tensor] = {}


class Trunk:
    """A transformers causal LM with taps on its residual stream.

    Layer id i taps the stream after i decoder layers (0: the embedding's output), before the
    last norm. Models whose layers keep anything but keys and values, or the states of mixers that
    are known here, are refused, and so are those that do not give each row of a ragged batch its
    own logits; a rotary embedding that changes with the length becomes a limit on the context,
    within which it changes nothing.

    Attributes:
        deterministic: whether a position comes out the same, to the last bit, in any pass.
        windowed: whether layers that look no further back than a window can be run beyond it;
            where they cannot, it is a limit on the context as well.
        narrowest: the shortest such window; the context where there is none.
        long: positions from which on a pass is computed in another way than shorter ones, which
            are alike; None where there is no such number.
    """

    deterministic = False
    windowed = True
    long: int | None = None

    def __init__(self, model: Any) -> None:
        self.model: Any = model
        self.config: Any = self.model.config.get_text_config()
        self.decoder: Any = self.model.get_decoder()
        self.embed: Any = self.model.get_input_embeddings()
        self.layers: int = self.config.num_hidden_layers
        self.hidden_size: int = self.config.hidden_size
        self.vocab_size: int = self.config.vocab_size
        self.recurrent = over_slots(self.decoder) > 0
        self.context = _context(self.model, self.config, self.recurrent)
        self._windows = _windows(self.config)
        self.narrowest = min((size for _, size in self._windows.values()), default=self.context)
        if not self.windowed:
            self.context = min(self.context, self.narrowest)
        elif self.narrowest >= self.context:
            self._windows = {}
        self.dtype: torch.dtype = self.model.dtype
        self.device: torch.device = self.model.device
        # What hooks record belongs to the thread whose pass it is.
        self._seen = _Seen()
        self._hooked: set[int] = set()
        self.decoder.register_forward_hook(self._record_hidden)
        _require_ragged_rows(self)

    def tap(self, layer_ids: Sequence[int]) -> None:
        """Record the residual stream at these layers in every pass from now on.

        Raises:
            MtplxError: the decoder does not keep its layers where they can be tapped.
        """
        for layer_id in sorted(set(layer_ids) - self._hooked):
            self._hook(layer_id)

    def _record_hidden(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._seen.hidden = output.last_hidden_state

    def _hook(self, layer_id: int) -> None:
        def record(module: nn.Module, inputs: Any, output: Any) -> None:
            self._seen.streams[layer_id] = output[0] if isinstance(output, tuple) else output

        layers = getattr(self.decoder, "layers", None)
        if layers is None:
            raise MtplxError(
                f"no head can be attached to a model of type {self.config.model_type!r}: its "
                "decoder has no `layers` to tap; run it without one"
            )
        module = self.embed if layer_id == 0 else layers[layer_id - 1]
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
            attention_mask=self._masks(span),
            # Past the context lies only the padding of other rows' longer drafts.
            position_ids=span.positions.clamp_max(self.context - 1),
            cache=cache,
            use_cache=True,
        )

    @torch.inference_mode()
    def read(self, tokens: Tensor, taps: Sequence[int] = ()) -> TrunkOutput:
        """One causal pass over whole texts [B, T], padded on the right; no cache, no logits."""
        return self._run(taps, False, input_ids=tokens, use_cache=False)

    def mask(self, kind: str, span: Span, config: Any = None) -> Tensor:
        """What a kind of attention may look at.

        Args:
            kind: one of transformers' `layer_types`.
            span: of the pass.
            config: of the layers, where they are not the trunk's own.
        """
        see, size = self._windows.get(kind, (None, 0))
        return self._mask(span.mask if see is None else see(span, size), config or self.config)

    def _mask(self, mask: Tensor, config: Any) -> Tensor:
        if config._attn_implementation != "eager":
            return mask
        # Models without a fused attention add their mask to the scores.
        hidden = torch.finfo(self.dtype).min
        return torch.zeros_like(mask, dtype=self.dtype).masked_fill(~mask, hidden)

    def _masks(self, span: Span) -> Any:
        """What each kind of layer may look at: one mask, or one by the kind's name."""
        kinds = set(getattr(self.config, "layer_types", None) or ()) | set(self._windows)
        # transformers takes one mask for all kinds of layers as well.
        if not self._windows:
            return self.mask("full_attention", span)
        if len(kinds) == 1:
            return self.mask(kinds.pop(), span)
        # A recurrent layer's mask would be about padding, of which there is none.
        return {kind: None if kind in _RECURRENT else self.mask(kind, span) for kind in kinds}

    def _run(self, taps: Sequence[int], with_logits: bool, **inputs: Any) -> TrunkOutput:
        self.tap(taps)
        output = (self.model if with_logits else self.decoder)(**inputs)
        seen = self._seen
        aux = torch.cat([seen.streams[i] for i in taps], dim=-1) if taps else None
        hidden = seen.hidden
        # Not kept longer than needed: a long prompt's streams are large.
        seen.clear()
        return TrunkOutput(hidden, aux, output.logits if with_logits else None)


_FULL = frozenset({"full_attention", "indexed_attention"})
"""Kinds of layers that may look at any position before; the second picks some of them itself."""

_RECURRENT = frozenset({"linear_attention"})
_BLIND = frozenset({"moe", "mlp"})
"""Kinds of layers that look at no other position."""

_LIMITED = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
"""Kinds of layers that look no further back than so many positions, and what configs call that."""


def _windows(config: Any) -> dict[str, tuple[Callable[[Span, int], Tensor], int]]:
    """How far each kind of attention sees that does not see everything."""
    kinds = set(getattr(config, "layer_types", None) or ())
    # Where no kinds are named, there is one; some configs carry a window that they do not use, and
    # say so.
    if not kinds and getattr(config, "use_sliding_window", True):
        kinds = {"sliding_attention"}
    sizes = {kind: getattr(config, _LIMITED[kind], None) for kind in kinds & set(_LIMITED)}
    see = {"sliding_attention": Span.within, "chunked_attention": Span.in_chunk}
    return {kind: (see[kind], int(size)) for kind, size in sizes.items() if size}


def _context(model: Any, config: Any, recurrent: bool) -> int:
    """Positions the trunk can hold here; refuses what slots cannot roll back yet."""
    kinds = set(getattr(config, "layer_types", None) or ())
    unknown = kinds - {*_FULL, *_LIMITED, *_BLIND}
    if recurrent:
        unknown -= _RECURRENT
    if unknown or (model._is_stateful and not recurrent):
        raise MtplxError(
            f"model type {config.model_type!r} has layers of kind "
            f"{', '.join(sorted(unknown)) or 'recurrent'} that cannot be run yet; those of "
            "Qwen3-Next, Qwen3.5, Nemotron-H and Ling 3 can"
        )
    context = int(getattr(config, "max_position_embeddings", None) or 2048)
    # These frequencies change for all of a text, and all of a batch, once one position passes
    # the length of pretraining; what the cache holds would not.
    rope = getattr(config, "rope_parameters", None) or {}
    for parameters in (rope, *rope.values()):
        if isinstance(parameters, dict) and parameters.get("rope_type") == "longrope":
            context = min(context, int(parameters["original_max_position_embeddings"]))
    return context


_NOISE = {torch.float64: 1e-3, torch.float32: 1e-3}
"""Relative error that rounding alone may make; 0.1 in narrower types."""


def _require_ragged_rows(trunk: Trunk) -> None:
    """Refuses models that do not give each row of a ragged batch the logits it would get alone.

    The engine gives every pass positions, a mask and a cache of its own making. Some of
    transformers' classes have no place for one of them, and some overlook it; so, where there are
    weights, a short text is run both ways.
    """
    reason = _misfit(trunk)
    if reason is None and trunk.device.type != "meta":
        try:
            if not _keeps_rows_apart(trunk):
                reason = "rows of different lengths in one batch change each other's logits"
        except Exception as error:  # whatever the model's code raises for what it did not expect
            text = " ".join(str(error).split()) or type(error).__name__
            reason = f"a short pass over rows of different lengths failed ({text})"
    if reason:
        raise MtplxError(
            f"model type {trunk.config.model_type!r} cannot be run: {reason}; "
            "take a model of another type"
        )


def _misfit(trunk: Trunk) -> str | None:
    """Why the model's class cannot be run as slots need it, as far as that shows without a pass."""
    if trunk.decoder is trunk.model:
        return "transformers does not tell its decoder from its output head"
    parameters = signature(trunk.decoder.forward).parameters
    for name, what in (("position_ids", "positions"), ("cache", "a cache")):
        if name not in parameters:
            return f"its code in transformers cannot be given {what}"
    if any(getattr(module, "is_causal", True) is False for module in trunk.decoder.modules()):
        return "its attention looks ahead"
    # Right while a batch fits into the window of its local layers: too long for a trial pass.
    if trunk.config.model_type == "gpt_neo":
        return "its attention has a mask of its own, which knows one length for all rows"
    return None


@torch.inference_mode()
def _keeps_rows_apart(trunk: Trunk) -> bool:
    lengths, width = [1, 2], 2
    tokens = torch.arange(8, device=trunk.device).view(2, 4) % trunk.vocab_size
    alone = trunk.read(tokens).hidden
    span = Span.after(lengths, width, trunk.device)
    cache = trunk.new_cache(span.end)
    start = Span.after([0, 0], max(lengths), trunk.device)
    trunk.forward(tokens[:, : max(lengths)], start, cache, with_logits=False)
    together = trunk.forward(tokens.gather(1, span.positions), span, cache).hidden
    expected = torch.stack([alone[b, n : n + width] for b, n in enumerate(lengths)])
    return agree(together, expected, trunk.dtype)


def agree(hidden: Tensor, expected: Tensor, computed: torch.dtype) -> bool:
    """Whether two computations of the same states [B, T, H] differ by rounding alone.

    Args:
        hidden: the one.
        expected: the other.
        computed: the narrowest type that either was computed in.
    """
    noise = _NOISE.get(computed, 0.1)
    hidden, expected = hidden.float(), expected.float()
    wrong, right = (hidden - expected).norm(dim=-1), expected.norm(dim=-1)
    close = wrong <= noise * right
    # A type too narrow for the weights is no fault of the model's code.
    close |= ~right.isfinite()
    # Of each row the better position: rounding can send a token to another expert, which is no
    # fault, while a wrong mask or position shows in all of a row.
    return bool(close.any(1).all())
