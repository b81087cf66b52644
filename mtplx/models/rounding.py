"""Models whose linear layers go to the kernels, rounded while they are read.

One layer after another, so that a model need not fit into memory as it was before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from mtplx.kernels import Kernels
from mtplx.models import blocks
from mtplx.models.blocks import Bits, Blocks
from mtplx.models.linear import KernelLinear, hand_over, linear_layers

Take = Callable[[Any, str, Tensor | Blocks, Tensor | None], None]
"""What is given each linear layer: the model, the layer's name, its weight [N, K] and its bias."""

Report = Callable[[int, int], None]
"""Told how many layers are done, and of how many."""


class Rounder:
    """Puts linear layers into the kernels' hands, rounded; the output head only to bfloat16.

    Attributes:
        failed: the first layer that could not be, and why.
        raised: what the report raised, if it did.
    """

    def __init__(self, library: Kernels, bits: Bits | None, report: Report | None = None) -> None:
        """
        Args:
            library: the kernels.
            bits: of a weight; None for blocks as they are, and bfloat16 for what has none.
            report: called after each layer.
        """
        self._library, self._bits, self._report = library, bits, report
        self._done = 0
        self.failed: tuple[str, ValueError] | None = None
        self.raised: Exception | None = None

    def take(self, model: Any, name: str, weight: Tensor | Blocks, bias: Tensor | None) -> None:
        """Put a layer into the kernels' hands; see Take.

        Raises:
            ValueError: it cannot be rounded. What reads the model may turn this, and what the
                report raises, into something else, so `failed` and `raised` tell it too, and later
                layers are left alone.
        """
        if self.failed or self.raised:
            return
        if isinstance(weight, Tensor):
            is_head = model.get_submodule(name) is model.get_output_embeddings()
            bits = None if is_head else self._bits
            try:
                weight = weight.bfloat16() if bits is None else blocks.quantize(weight, bits)
            except ValueError as error:
                self.failed = name, error
                raise
        hand_over(model, name, self._library, weight, bias)
        self._done += 1
        if self._report:
            try:
                self._report(self._done, self._done + len(linear_layers(model)))
            except Exception as error:
                self.raised = error
                raise

    def take_all(self, model: Any) -> None:
        """Those that a model still has."""
        for name, layer in linear_layers(model):
            self.take(model, name, layer.weight, layer.bias)


def rounded(weight: Tensor, bits: Bits) -> Tensor | Blocks:
    """A weight [N, K] in blocks, or as it is where it cannot be cut into them."""
    try:
        return blocks.quantize(weight, bits)
    except ValueError:
        return weight


def kept_in(model: Any) -> tuple[Kernels, Bits] | None:
    """The kernels that have a model's linear layers, and in how many bits; None for whole weights.

    The most frequent number of bits, where a file has several.
    """
    few = Counter(
        (part.library, part.bits)
        for part in model.modules()
        if isinstance(part, KernelLinear) and part.bits
    )
    return few.most_common(1)[0][0] if few else None


def left_out(model: Any) -> float:
    """The share of a model's weights, embeddings apart, that are in no layer the kernels have."""
    reached = other = 0
    for module in model.modules():
        if isinstance(module, KernelLinear):
            reached += module.in_features * module.out_features
        elif not isinstance(module, nn.Embedding):
            other += sum(part.numel() for part in module.parameters(recurse=False))
    return other / (reached + other)
