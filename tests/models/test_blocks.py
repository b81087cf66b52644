"""Matrices of few bits a weight, against the gguf package's and against what rounding allows."""

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from mtplx.models.blocks import Blocks, from_gguf, quantize


def weights(outputs, inputs, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).normal(0, 0.05, (outputs, inputs))).float()


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1, Kind.Q8_0], ids=lambda kind: kind.name)
def test_blocks_of_a_file_stand_for_its_own_weights_to_the_bit(kind):
    data = gguf.quantize(weights(7, 96).numpy(), kind)
    blocks = from_gguf(data, kind.name, (7, 96))
    assert blocks is not None and blocks.shape == (7, 96)
    assert blocks.bits == (8 if kind is Kind.Q8_0 else 4)
    assert int(blocks.numbers.max()) < 2**blocks.bits
    np.testing.assert_array_equal(blocks.dequantize().numpy(), gguf.dequantize(data, kind))


def test_extreme_bytes_are_read_as_the_package_reads_them():
    """All numbers from end to end, and scales of both signs, subnormal and large."""
    scales = np.array([1, -1, 2**-24, 60000, 0.1], np.float16)
    raw = np.zeros((5, 34), np.uint8)
    raw[:, :2] = scales[:, None].view(np.uint8)
    raw[:, 2:] = np.linspace(0, 255, 32).astype(np.uint8)
    np.testing.assert_array_equal(
        from_gguf(raw, "Q8_0", (5, 32)).dequantize().numpy(), gguf.dequantize(raw, Kind.Q8_0)
    )
    small = np.concatenate([raw[:, :2], raw[:, -16:]], 1)
    # Eight times the largest scale is beyond half precision, so that one has no such blocks.
    assert from_gguf(small, "Q4_0", (5, 32)) is None
    rest = small[scales < 60000]
    np.testing.assert_array_equal(
        from_gguf(rest, "Q4_0", (4, 32)).dequantize().numpy(), gguf.dequantize(rest, Kind.Q4_0)
    )


def test_what_are_no_such_blocks_is_left_alone():
    assert from_gguf(np.zeros((2, 210), np.uint8), "Q6_K", (2, 256)) is None
    assert from_gguf(np.zeros(34, np.uint8), "Q8_0", (32,)) is None


@pytest.mark.parametrize("bits", [4, 8])
def test_rounding_is_to_the_nearest_number(bits):
    w = weights(9, 128) + 0.02
    blocks = quantize(w, bits)
    step = blocks.scales.float().repeat_interleave(32, 1)
    wrong = (blocks.dequantize() - w).abs()
    # Half a step, and what half precision loses of scale and minimum at the ends of a group.
    ends = w.abs().view(9, 4, 32).amax(-1).repeat_interleave(32, 1) * 2.0**-10
    assert bool((wrong <= step / 2 + ends).all())
    assert wrong.max() > step.max() / 4
    smallest = (w.view(9, 4, 32).amax(-1) - w.view(9, 4, 32).amin(-1)) / (2**bits - 1)
    assert bool((blocks.scales.float() < 3 * smallest).all())


@pytest.mark.parametrize("bits", [4, 8])
def test_weights_that_are_numbers_times_a_scale_come_back(bits):
    rng = np.random.default_rng(1)
    numbers = rng.integers(0, 16, (3, 64)) if bits == 4 else rng.integers(-127, 128, (3, 64))
    numbers[:, ::32], numbers[:, 1::32] = (0, 15) if bits == 4 else (127, -3)
    w = torch.from_numpy(numbers).float() * 0.25
    torch.testing.assert_close(quantize(w, bits).dequantize(), w, rtol=0, atol=0)


@pytest.mark.parametrize("bits", [4, 8])
def test_groups_of_one_value(bits):
    for value in (0.0, 0.5, -0.25):
        w = torch.full((2, 32), value)
        torch.testing.assert_close(quantize(w, bits).dequantize(), w, rtol=2e-3, atol=0)


@pytest.mark.parametrize("bits", [4, 8])
def test_what_cannot_be_rounded_is_refused(bits):
    with pytest.raises(ValueError, match="48 inputs cannot be cut into groups of 32"):
        quantize(torch.zeros(2, 48), bits)
    for wrong in (torch.nan, torch.inf, 1e9):
        w = torch.zeros(2, 32)
        w[1, 3] = wrong
        with pytest.raises(ValueError, match="not finite, or too large"):
            quantize(w, bits)


def test_rows_can_be_put_in_another_order():
    blocks = quantize(weights(6, 32), 4)
    order = torch.tensor([5, 0, 3])
    torch.testing.assert_close(blocks.rows(order).dequantize(), blocks.dequantize()[order])
    assert isinstance(blocks.rows(order), Blocks)


@pytest.mark.parametrize("bits", [4, 8])
def test_many_rows_are_quantised_as_few_are(bits):
    weight = weights(700, 64)
    whole = quantize(weight, bits)
    rows = [quantize(row[None], bits) for row in weight]
    for part in ("numbers", "scales", "minima"):
        if getattr(whole, part) is not None:
            assert torch.equal(getattr(whole, part), torch.cat([getattr(r, part) for r in rows]))
    assert (whole.minima is None) == (bits == 8) and whole.shape == (700, 64)
