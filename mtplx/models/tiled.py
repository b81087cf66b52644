"""Matrices as the kernels read them, and linear layers made of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mtplx import kernels
from mtplx.kernels import TILE_INPUTS, TILE_OUTPUTS, Kernels, Matrix
from mtplx.models.blocks import GROUP, Blocks


class Tiles:
    """A matrix in the layout of kernels/decoder.h.

    Attributes:
        kind: of kernels/decoder.h.
        outputs, inputs: N and K.
        data: contiguous uint8.
    """

    def __init__(self, kind: int, outputs: int, inputs: int, data: Tensor) -> None:
        self.kind, self.outputs, self.inputs = kind, outputs, inputs
        self.data = data

    @classmethod
    def of(cls, weight: Tensor | Blocks) -> Tiles:
        """From blocks, or from weights [N, K] in bfloat16 or else as float32."""
        if isinstance(weight, Blocks):
            return cls._of_blocks(weight)
        outputs, inputs = weight.shape
        narrow = weight.dtype == torch.bfloat16
        values = _padded(weight if narrow else weight.float())
        tiled = values.view(-1, TILE_OUTPUTS, values.shape[1] // TILE_INPUTS, TILE_INPUTS)
        data = tiled.permute(0, 2, 3, 1).contiguous().view(torch.uint8)
        return cls(kernels.BFLOAT16 if narrow else kernels.FLOAT32, outputs, inputs, data)

    @classmethod
    def _of_blocks(cls, blocks: Blocks) -> Tiles:
        outputs, inputs = blocks.shape
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
        kind = kernels.FOUR_BITS if blocks.bits == 4 else kernels.EIGHT_BITS
        return cls(kind, outputs, inputs, torch.cat(parts, -1))

    def matrix(self, bias: Tensor | None = None) -> Matrix:
        """For the kernels; the tiles and the float32 bias must outlive it."""
        at = None if bias is None else bias.data_ptr()
        return Matrix(self.kind, self.outputs, self.inputs, self.data.data_ptr(), at)


def _padded(values: Tensor, inputs: int = TILE_INPUTS) -> Tensor:
    """Zeros behind [N, K], up to whole tiles."""
    missing = (-values.shape[1] % inputs, -values.shape[0] % TILE_OUTPUTS)
    return F.pad(values, (0, missing[0], 0, missing[1])) if any(missing) else values


class TiledLinear(nn.Module):
    """A linear layer in the kernels' hands: any input, float32 out of it."""

    def __init__(self, library: Kernels, tiles: Tiles, bias: Tensor | None = None) -> None:
        super().__init__()
        self.library, self.tiles = library, tiles
        self.bias = None if bias is None else bias.float().contiguous()

    @property
    def matrix(self) -> Matrix:
        """For the kernels; this layer must outlive it."""
        return self.tiles.matrix(self.bias)

    @property
    def in_features(self) -> int:
        return self.tiles.inputs

    @property
    def out_features(self) -> int:
        return self.tiles.outputs

    def forward(self, x: Tensor, norm: nn.RMSNorm | None = None) -> Tensor:
        """[..., K] -> [..., N]; each row by itself, whatever stands beside it.

        Args:
            x: of any float type.
            norm: that comes before, with a float32 weight [K] and an epsilon.
        """
        x, inputs = x.float().contiguous(), self.tiles.inputs
        assert x.shape[-1] == inputs
        y = torch.empty(*x.shape[:-1], self.tiles.outputs)
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


def tile(
    model: Any, name: str, library: Kernels, weight: Tensor | Blocks, bias: Tensor | None
) -> None:
    """Put tiles of a weight [N, K] in the place of the linear layer of this name."""
    model.set_submodule(name, TiledLinear(library, Tiles.of(weight), bias))
