"""Matrices of few bits a weight: groups of 32 numbers with a scale, and what files hold of them.

A weight is `scale * (number - zero) + minimum`, with scales and minima in half precision. GGUF's
Q4_0, Q4_1 and Q8_0 are of this kind, so they are taken as they are, without rounding a second
time. Formats: "block_q4_0", "block_q4_1" and "block_q8_0" of the ggml repository.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

GROUP = 32
"""Weights that share a scale."""

Bits = Literal[4, 8]


@dataclass(frozen=True)
class Blocks:
    """A matrix of N outputs by K inputs, K a multiple of 32.

    Attributes:
        bits: of a number, 4 or 8.
        numbers: [N, K] uint8, below 2**bits.
        scales: [N, K / 32] float16.
        minima: of the groups, likewise; with 8 bits there are none, and numbers count from 128.
    """

    bits: Bits
    numbers: Tensor
    scales: Tensor
    minima: Tensor | None

    @property
    def shape(self) -> tuple[int, int]:
        outputs, inputs = self.numbers.shape
        return outputs, inputs

    def rows(self, order: Tensor) -> Blocks:
        """These outputs, in this order, [M] int64."""
        minima = None if self.minima is None else self.minima[order]
        return Blocks(self.bits, self.numbers[order], self.scales[order], minima)

    def dequantize(self) -> Tensor:
        """The weights they stand for, [N, K] float32."""
        outputs, inputs = self.shape
        numbers = self.numbers.view(outputs, -1, GROUP).float()
        scales = self.scales.float()[..., None]
        if self.minima is None:
            return ((numbers - 128) * scales).view(outputs, inputs)
        return (numbers * scales + self.minima.float()[..., None]).view(outputs, inputs)


def quantize(weight: Tensor, bits: Bits) -> Blocks:
    """The nearest numbers for a matrix [N, K], of any float type.

    With 4 bits a group's least and greatest weight are numbers 0 and 15; with 8 the one of largest
    size is 127 from the zero.

    Raises:
        ValueError: K is no multiple of 32, or the weights are not all finite, or beyond what half
            precision can scale to.
    """
    outputs, inputs = weight.shape
    if inputs % GROUP:
        raise ValueError(f"{inputs} inputs cannot be cut into groups of {GROUP}")
    if outputs > _ROWS_AT_ONCE:
        return _joined([quantize(rows, bits) for rows in torch.split(weight, _ROWS_AT_ONCE)])
    groups = weight.float().view(outputs, -1, GROUP)
    low, high = groups.amin(-1), groups.amax(-1)
    if bits == 8:
        scales = (torch.maximum(high, -low) / 127).half()
        minima = None
        offset, zero, most = torch.zeros(()), 128, 255
    else:
        minima = low.half()
        scales = ((high - minima.float()) / 15).half()
        offset, zero, most = minima.float()[..., None], 0, 15
    for part in (scales, minima):
        if part is not None and not bool(part.isfinite().all()):
            raise ValueError("its weights are not finite, or too large for half precision")
    # By the rounded scales and minima, which are those that count.
    unit = torch.where(scales > 0, 1 / scales.float(), 0.0)[..., None]
    numbers = ((groups - offset) * unit + zero).round().clamp(0, most).to(torch.uint8)
    return Blocks(bits, numbers.view(outputs, inputs), scales, minima)


_ROWS_AT_ONCE = 256
"""What lies between a weight and its number then stays in a CPU's caches."""


def _joined(parts: list[Blocks]) -> Blocks:
    """Rows below rows."""
    minima = [part.minima for part in parts if part.minima is not None]
    return Blocks(
        parts[0].bits,
        torch.cat([part.numbers for part in parts]),
        torch.cat([part.scales for part in parts]),
        torch.cat(minima) if minima else None,
    )


def from_gguf(data: NDArray[np.uint8], kind: str, shape: tuple[int, ...]) -> Blocks | None:
    """A GGUF tensor's blocks, or None if it is of another type or no matrix.

    Args:
        data: as it lies in the file, [N, bytes of a row].
        kind: its type's name there.
        shape: [N, K].
    """
    if kind not in _BYTES or len(shape) != 2:
        return None
    outputs, inputs = shape
    raw = torch.from_numpy(np.array(data).reshape(outputs, inputs // GROUP, _BYTES[kind]))

    def halves(start: int) -> Tensor:
        return raw[..., start : start + 2].contiguous().view(torch.float16)[..., 0]

    scales = halves(0)
    if kind == "Q8_0":
        # Two's complement with the sign turned counts from 128.
        return Blocks(8, (raw[..., 2:] ^ 128).reshape(outputs, inputs), scales, None)
    packed = raw[..., _BYTES[kind] - GROUP // 2 :]
    numbers = torch.cat([packed & 15, packed >> 4], -1).reshape(outputs, inputs)
    if kind == "Q4_1":
        return Blocks(4, numbers, scales, halves(2))
    # Numbers that count from 8. Eight times a half is one as well, unless it leaves their range.
    minima = scales.float().mul(-8).half()
    return Blocks(4, numbers, scales, minima) if bool(minima.isfinite().all()) else None


_BYTES = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}


def kept_bits(kind: str) -> Bits | None:
    """Bits of a number in the blocks that `from_gguf` makes of a type; None for what it does not
    take."""
    if kind not in _BYTES:
        return None
    return 8 if kind == "Q8_0" else 4
