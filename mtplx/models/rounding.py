"""Models whose linear layers go to the kernels, rounded while they are read.

One layer after another, so that a model need not fit into memory as it was before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from mtplx.errors import MtplxError
from mtplx.kernels import Kernels
from mtplx.models import blocks
from mtplx.models.blocks import Bits, Blocks
from mtplx.models.linear import hand_over, linear_layers

Take = Callable[[Any, str, Tensor | Blocks, Tensor | None], None]
"""What is given each linear layer: the model, the layer's name, its weight [N, K] and its bias."""

Report = Callable[[int, int], None]
"""Told how many layers are done, and of how many."""


class Rounder:
    """Puts linear layers into the kernels' hands, rounded; the output head only to bfloat16.

    Attributes:
        failed: the first layer that could not be, and why; no other is taken after it.
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

    def take(self, model: Any, name: str, weight: Tensor | Blocks, bias: Tensor | None) -> None:
        """Put a layer into the kernels' hands; see Take."""
        if self.failed:
            return
        if isinstance(weight, Tensor):
            is_head = model.get_submodule(name) is model.get_output_embeddings()
            bits = None if is_head else self._bits
            try:
                weight = weight.bfloat16() if bits is None else blocks.quantize(weight, bits)
            except ValueError as error:
                self.failed = name, error
                return
        hand_over(model, name, self._library, weight, bias)
        self._done += 1
        if self._report:
            self._report(self._done, self._done + len(linear_layers(model)))

    def take_all(self, model: Any) -> None:
        """Those that a model still has."""
        for name, layer in linear_layers(model):
            self.take(model, name, layer.weight, layer.bias)


def require_fit(path: Path, report: Mapping[str, Any]) -> None:
    """Raises `MtplxError` unless every weight of a model was found, in the shape its config says.

    `report` is what `from_pretrained` returns with `output_loading_info`. transformers would only
    warn and go on with random numbers.
    """
    if missing := report["missing_keys"]:
        raise MtplxError(
            f"{path}: {len(missing)} weights are missing, first {min(missing)}: "
            "download the model again"
        )
    if mismatched := report["mismatched_keys"]:
        name, stored, expected = min(mismatched)
        raise MtplxError(
            f"{path}: {len(mismatched)} weights do not fit the config, first {name} with shape "
            f"{list(stored)} instead of {list(expected)}: download the model again"
        )
