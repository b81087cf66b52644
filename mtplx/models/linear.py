"""Matrices as the kernels read them, and linear layers made of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mtplx import kernels
from mtplx.kernels import TILE_INPUTS, TILE_OUTPUTS, Kernels, Matrix
from mtplx.models.blocks import GROUP, Bits, Blocks

PLAIN = {torch.bfloat16: kernels.BFLOAT16, torch.float32: kernels.FLOAT32}
"""Types of weights that the kernels read where they lie, and their kinds of kernels/decoder.h."""


def tiles(blocks: Blocks) -> Tensor:
    """Blocks in the layout of kernels/decoder.h, contiguous uint8."""
    numbers = _padded(blocks.numbers)
    count = numbers.shape[1] // GROUP
    # Four inputs of each of 16 outputs side by side.
    fours = numbers.view(-1, TILE_OUTPUTS, count, GROUP // 4, 4).transpose(1, 2)
    fours = fours.transpose(2, 3).reshape(-1, count, 2, 256)
    parts = [fours.flatten(2)]
    if blocks.bits == 4:
        parts = [fours[:, :, 0] | (fours[:, :, 1] << 4)]
    for halves in (blocks.scales, blocks.minima):
        if halves is not None:
            own = _padded(halves, 1).view(-1, TILE_OUTPUTS, count).transpose(1, 2)
            parts.append(own.contiguous().view(torch.uint8))
    return torch.cat(parts, -1)


def tiles_size(outputs: int, inputs: int, bits: Bits) -> int:
    """Bytes of the tiles of a matrix of N outputs by K inputs."""
    count = -(-inputs // GROUP)
    halves = 2 if bits == 4 else 1
    return -(-outputs // TILE_OUTPUTS) * TILE_OUTPUTS * count * (GROUP * bits // 8 + 2 * halves)


def _padded(values: Tensor, inputs: int = TILE_INPUTS) -> Tensor:
    """Zeros behind [N, K], up to whole tiles."""
    missing = (-values.shape[1] % inputs, -values.shape[0] % TILE_OUTPUTS)
    return F.pad(values, (0, missing[0], 0, missing[1])) if any(missing) else values


class KernelLinear(nn.Module):
    """A linear layer in the kernels' hands: any input, float32 out of it.

    Attributes:
        data: the tiles of blocks, or the weight [N, K].
        bits: of a number in blocks, else None.
    """

    bits: Bits | None = None

    def __init__(
        self, library: Kernels, weight: Blocks | Tensor, bias: Tensor | None = None
    ) -> None:
        """
        Args:
            library: the kernels.
            weight: [N, K] in blocks, in bfloat16, or in what becomes float32.
            bias: [N].
        """
        super().__init__()
        assert isinstance(weight, Blocks) or not weight.is_meta
        assert bias is None or not bias.is_meta
        self.library = library
        self.out_features, self.in_features = weight.shape
        if isinstance(weight, Blocks):
            self.bits = weight.bits
            self._kind = kernels.FOUR_BITS if weight.bits == 4 else kernels.EIGHT_BITS
            self.data = tiles(weight)
        else:
            weight = weight.detach() if weight.dtype in PLAIN else weight.detach().float()
            self._kind, self.data = PLAIN[weight.dtype], weight.contiguous()
        self.bias = None if bias is None else bias.detach().float().contiguous()

    @property
    def matrix(self) -> Matrix:
        """For the kernels; this layer must outlive it."""
        bias = None if self.bias is None else self.bias.data_ptr()
        return Matrix(self._kind, self.out_features, self.in_features, self.data.data_ptr(), bias)

    def forward(self, x: Tensor, norm: nn.RMSNorm | None = None) -> Tensor:
        """[..., K] -> [..., N]; each row by itself, whatever stands beside it.

        Args:
            x: of any float type.
            norm: that comes before, with a float32 weight [K] and an epsilon.
        """
        x, inputs = x.float().contiguous(), self.in_features
        assert x.shape[-1] == inputs
        y = torch.empty(*x.shape[:-1], self.out_features)
        if rows := x.numel() // inputs:
            scratch = torch.empty(self.library.room_to_multiply(rows, inputs), dtype=torch.uint8)
            self.library.multiply(
                self.matrix,
                x.data_ptr(),
                None if norm is None else norm.weight.data_ptr(),
                0.0 if norm is None else float(norm.eps or 0),
                y.data_ptr(),
                scratch.data_ptr(),
                rows,
                torch.get_num_threads(),
            )
        return y


def linear_layers(model: Any) -> list[tuple[str, nn.Linear]]:
    """The linear layers of a model with their names."""
    return [(name, part) for name, part in model.named_modules() if isinstance(part, nn.Linear)]


def hand_over(
    model: Any, name: str, library: Kernels, weight: Tensor | Blocks, bias: Tensor | None
) -> None:
    """Put one in the kernels' hands, of a weight [N, K], in the place of the layer of this name."""
    model.set_submodule(name, KernelLinear(library, weight, bias))
