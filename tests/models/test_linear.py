"""Matrices in the kernels' hands: every kind of weight by every set, against float64."""

import copy
import pickle

import pytest
import torch

from mtplx import kernels
from mtplx.models.blocks import Blocks, quantize
from mtplx.models.linear import KernelLinear, hand_over, linear_layers

SETS = ("amx", "avx512", "avx2", "generic")
KINDS = ("int4", "int8", "bfloat16", "float32")
SHAPES = [(16, 32), (1, 64), (37, 96), (100, 576), (21, 3072)]

pytestmark = pytest.mark.skipif(kernels.find() is None, reason="the kernels are not built")


def library(name):
    found = kernels.find(name)
    if found is None:
        pytest.skip(f"this CPU has no {name}")
    return found


def matrix(kind, outputs, inputs, seed=0):
    """A weight as `KernelLinear` takes it, and what it stands for in float64."""
    w = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(seed)) * 0.1 + 0.03
    if kind in ("int4", "int8"):
        blocks = quantize(w, 4 if kind == "int4" else 8)
        return blocks, blocks.dequantize().double()
    w = w.to(getattr(torch, kind))
    return w, w.double()


def inputs(rows, size, seed=1):
    x = torch.randn(rows, size, generator=torch.Generator().manual_seed(seed))
    x[0] *= 100
    x[-1, : size // 2] = 0  # a group of nothing
    return x


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_product_is_that_of_float64(name, kind, shape):
    weight, exact = matrix(kind, *shape)
    bias = torch.linspace(-1, 1, shape[0])
    linear = KernelLinear(library(name), weight, bias)
    for rows in (1, 2, 3, 4, 5, 6, 7, 8, 9, 19):
        x = inputs(rows, shape[1], seed=rows)
        expected = x.double() @ exact.T + bias
        # Sixteen bits of an input's group, or float32's own rounding; relative to what is summed.
        size = x.double().abs() @ exact.abs().T + 1
        assert bool(((linear(x) - expected).abs() <= 3e-5 * size).all())


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("kind", ["bfloat16", "float32"])
@pytest.mark.parametrize("size", [1, 31, 50, 1025])
def test_plain_inputs_need_not_come_in_groups(name, kind, size):
    weight, exact = matrix(kind, 21, size)
    x = inputs(9, size)
    linear = KernelLinear(library(name), weight)
    wrong = (linear(x).double() - x.double() @ exact.T).abs()
    assert bool((wrong <= 3e-5 * (x.double().abs() @ exact.abs().T + 1)).all())


def test_plain_weights_are_read_where_they_lie():
    layer = torch.nn.Linear(40, 7, dtype=torch.bfloat16)
    linear = KernelLinear(library(None), layer.weight, layer.bias)
    assert linear.data.data_ptr() == layer.weight.data_ptr()
    x = inputs(2, 40)
    before = linear(x)
    layer.weight.data.mul_(2)
    torch.testing.assert_close(linear(x) - linear.bias, (before - linear.bias) * 2)


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_is_the_same_to_the_bit_in_any_company(name, kind):
    weight, _ = matrix(kind, 50, 160)
    linear = KernelLinear(library(name), weight)
    x = inputs(21, 160)
    alone = torch.cat([linear(row[None]) for row in x])
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            for rows in (2, 3, 7, 8, 9, 21):
                assert torch.equal(linear(x[:rows]), alone[:rows])
            assert torch.equal(linear(x.flip(0)), alone.flip(0))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("kind", ["int4", "int8"])
def test_blocks_give_the_same_by_every_instruction_set(kind):
    weight, exact = matrix(kind, 50, 160)
    x = inputs(8, 160)
    results = [
        KernelLinear(found, weight)(x) for found in map(kernels.find, SETS) if found is not None
    ]
    # Whole numbers up to the scales; what follows is one product and one sum, fused or not.
    size = x.abs() @ exact.abs().float().T
    for result in results[1:]:
        assert bool(((result - results[0]).abs() <= 1e-6 * size).all())


@pytest.mark.parametrize("name", SETS)
def test_numbers_at_their_limits_do_not_overflow(name):
    """The largest inputs by the largest numbers, and those by the most negative."""
    weight = torch.full((16, 64), 127.0)
    weight[1::2] = -127
    linear = KernelLinear(library(name), quantize(weight, 8))
    for x in (torch.full((2, 64), 3.0), torch.full((2, 64), -3.0)):
        expected = x.double() @ weight.double().T
        torch.testing.assert_close(linear(x).double(), expected, rtol=1e-4, atol=0)


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("bits", [4, 8])
def test_sums_of_the_largest_numbers_do_not_overflow(name, bits):
    """All numbers at their greatest, by inputs of which both bytes are, or nearly."""
    numbers = torch.full((16, 64), 2**bits - 1, dtype=torch.uint8)
    scales = torch.ones(16, 2).half()
    blocks = Blocks(bits, numbers, scales, torch.zeros(16, 2).half() if bits == 4 else None)
    linear = KernelLinear(library(name), blocks)
    # 127 * 256 beside numbers that end in -128 and in 127.
    x = torch.tensor([32512, *[126 * 256 + 128] * 31, 32512, *[126 * 256 + 127] * 31]) / 32512
    for rows in (x[None], -x[None], torch.stack([x, -x, x, -x])):
        expected = rows.double() @ blocks.dequantize().double().T
        torch.testing.assert_close(linear(rows).double(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_an_input_that_is_no_number_is_not_hidden(name, wrong):
    for kind in KINDS:
        weight, _ = matrix(kind, 16, 64)
        x = inputs(3, 64)
        x[1, 40] = wrong
        y = KernelLinear(library(name), weight)(x)
        assert not bool(y[1].isfinite().any()) and bool(y[[0, 2]].isfinite().all())


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("kind", ["bfloat16", "float32"])
def test_plain_products_of_the_largest_inputs_are_themselves(name, kind):
    """Infinity, and what is larger than any number in bfloat16."""
    weight = torch.full((20, 64), 0.5).to(getattr(torch, kind))
    x = torch.zeros(5, 64)
    x[:4, 7] = torch.tensor([torch.inf, -torch.inf, 3.4e38, -3.4e38])
    x[4, 7] = torch.nan
    y = KernelLinear(library(name), weight)(x)
    assert y[0].isposinf().all() and y[1].isneginf().all() and y[4].isnan().all()
    torch.testing.assert_close(
        y[2:4].double(), x[2:4].double() @ weight.T.double(), rtol=1e-5, atol=0
    )


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("kind", KINDS)
def test_inputs_next_to_nothing_do_no_harm(name, kind):
    """Too small to be divided by, beside zeros, in a group of their own and in all."""
    weight, exact = matrix(kind, 16, 64)
    x = torch.zeros(3, 64)
    for row, tiny in enumerate((1e-29, 1e-36, 1e-41)):
        x[row, ::2] = tiny
    x[1, 32:] = 1
    y = KernelLinear(library(name), weight)(x)
    torch.testing.assert_close(y.double(), x.double() @ exact.T, rtol=1e-4, atol=1e-34)


@pytest.mark.parametrize("again", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))])
def test_a_copy_stands_by_itself(again):
    weight, _ = matrix("int4", 37, 96)
    x = inputs(4, 96)
    linear = KernelLinear(library("generic"), weight, torch.linspace(-1, 1, 37))
    expected = linear(x)
    copied = again(torch.nn.Sequential(linear))
    linear.data.zero_()
    linear.bias.zero_()
    assert torch.equal(copied(x), expected)
    assert copied[0].library is linear.library


def test_layers_of_a_model_are_replaced_by_name():
    model = torch.nn.ModuleDict(
        {"a": torch.nn.Linear(32, 5), "b": torch.nn.Sequential(torch.nn.Linear(5, 3))}
    )
    assert [name for name, _ in linear_layers(model)] == ["a", "b.0"]
    first = model["a"]
    hand_over(model, "a", library(None), first.weight.detach(), first.bias.detach())
    assert [name for name, _ in linear_layers(model)] == ["b.0"]
    x = torch.randn(2, 3, 32)
    torch.testing.assert_close(model["a"](x), first(x))
    assert model["a"](x[:0]).shape == (0, 3, 5)
    assert (model["a"].in_features, model["a"].out_features) == (32, 5)


def test_an_unknown_instruction_set_is_none():
    assert kernels.find("sse9") is None
