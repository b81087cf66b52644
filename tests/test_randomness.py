"""Noise: the published generator, and a pure function of where it is used."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from mtplx import kernels
from mtplx.randomness import Purpose, exponentials, fresh_seed, philox4x32, uniforms

# Known answers of Random123 1.14 (kat_vectors, philox4x32 with 10 rounds).
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000",
     "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff",
     "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0",
     "d16cfe09 94fdcceb 5001e420 24126ea1"),
]  # fmt: skip

words64 = st.integers(0, 2**64 - 1)
purposes = st.sampled_from(list(Purpose))


def words(text):
    return [int(word, 16) for word in text.split()]


def as_arrays(row):
    return [np.array(word, np.uint64) for word in words(row)]


def as_tensors(row):
    return [torch.tensor([word]) for word in words(row)]


@pytest.fixture(params=["in C", "in Python"])
def either(request, monkeypatch):
    """By the kernels, where they are built, and without them."""
    if request.param == "in Python":
        monkeypatch.setattr(kernels, "find", lambda: None)


@pytest.mark.parametrize("kind", [as_arrays, as_tensors])
@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
@pytest.mark.usefixtures("either")
def test_philox_gives_the_published_answers(counter, key, expected, kind):
    got = philox4x32(kind(counter), kind(key))
    assert [int(word) for word in got] == words(expected)


@pytest.mark.usefixtures("either")
def test_philox_treats_every_row_alone():
    counters, keys, expected = (
        np.array([words(row[i]) for row in KNOWN_ANSWERS], np.uint64).T for i in range(3)
    )
    np.testing.assert_array_equal(philox4x32(counters, keys), expected)
    # One key for many counters, and one counter for many keys.
    many = np.array(philox4x32(counters[:, :, None], keys[:, None, :]))
    assert many.shape == (4, 3, 3)
    np.testing.assert_array_equal(many[:, [0, 1, 2], [0, 1, 2]], expected)


@pytest.mark.usefixtures("either")
def test_purposes_are_told_apart_in_one_call():
    seeds, positions, purposes = np.arange(3)[:, None], np.arange(4), [*Purpose]
    together = uniforms(seeds, positions, np.array(purposes)[:, None, None])
    alone = [uniforms(seeds, positions, purpose) for purpose in purposes]
    np.testing.assert_array_equal(together, alone)


def test_a_uniform_is_53_bits_of_the_generator():
    seed, position = 0x299F31D0_A4093822, 0x85A308D3_243F6A88
    for offset in (0, 3):
        first, second, *_ = philox4x32(
            np.array([0x243F6A88, 0x85A308D3, int(Purpose.EMIT), offset], dtype=np.uint64),
            np.array([0xA4093822, 0x299F31D0], dtype=np.uint64),
        )
        bits = (int(first) >> 5 << 26) | int(second) >> 6
        assert float(uniforms(seed, position, Purpose.EMIT, offset)) == bits / 2**53


def test_an_exponential_is_the_generators_bits():
    seed, position = torch.tensor([0xA4093822, 0x299F31D0]), torch.tensor(0x15A308D3_243F6A88)
    got = exponentials(seed, position, torch.tensor([6, 7]), torch.float64)
    words = philox4x32(
        np.array([0x243F6A88, 0x15A308D3, int(Purpose.RACE), 3], dtype=np.uint64),
        np.array([0xA4093822, 0x299F31D0], dtype=np.uint64),
    )
    for i, (high, low) in enumerate((words[:2], words[2:])):
        u = (((int(high) >> 5 << 26) | int(low) >> 6) + 0.5) / 2**53
        assert float(got[i]) == pytest.approx(-math.log1p(-u), rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_exponentials_are_exponential_and_depend_on_their_own_arguments_only(dtype):
    seeds = torch.stack([torch.arange(40), torch.zeros(40, dtype=torch.int64)], -1)
    positions, tokens = torch.arange(40) * 7, torch.arange(500)
    got = exponentials(seeds, positions, tokens, dtype)
    assert got.dtype == dtype
    assert (got > 0).all()
    assert stats.kstest(got.flatten(), "expon").pvalue > 0.001
    # Neighbours in token, position and seed share nothing.
    assert abs(np.corrcoef(got[:, :-1].flatten(), got[:, 1:].flatten())[0, 1]) < 0.03
    some = torch.tensor([[499, 3], [0, 17]])
    alone = exponentials(seeds[[9, 2]], positions[[9, 2]], some, dtype)
    assert alone.tolist() == got[[[9], [2]], some].tolist()


@given(
    st.lists(words64, min_size=1, max_size=5), st.lists(words64, min_size=1, max_size=5), purposes
)
def test_a_number_depends_on_its_own_arguments_only(seeds, positions, purpose):
    grid = uniforms(np.array(seeds, np.uint64)[:, None], np.array(positions, np.uint64), purpose)
    assert grid.shape == (len(seeds), len(positions))
    assert grid.dtype == np.float64
    assert ((grid >= 0) & (grid < 1)).all()
    for i, seed in enumerate(seeds):
        for j, position in enumerate(positions):
            assert uniforms(seed, position, purpose) == grid[i, j]
    backwards = uniforms(
        np.array(seeds[::-1], np.uint64)[:, None], np.array(positions[::-1], np.uint64), purpose
    )
    np.testing.assert_array_equal(backwards[::-1, ::-1], grid)


def test_seeds_positions_and_purposes_all_tell():
    # Neighbours in both 32-bit words of seed and position.
    at = np.array([word << shift for shift in (0, 32) for word in range(1, 40)] + [0], np.uint64)
    drawn = np.stack([uniforms(at[:, None], at, purpose) for purpose in Purpose])
    assert len(np.unique(drawn)) == drawn.size


@pytest.mark.parametrize("purpose", Purpose)
def test_numbers_are_uniform_and_uncorrelated(purpose):
    drawn = uniforms(np.arange(200)[:, None], np.arange(500), purpose)
    assert stats.kstest(drawn.ravel(), "uniform").pvalue > 0.001
    other = uniforms(np.arange(200)[:, None], np.arange(500), Purpose((purpose + 1) % 3))
    for a, b in ((drawn[1:], drawn[:-1]), (drawn[:, 1:], drawn[:, :-1]), (drawn, other)):
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 4 / a.size**0.5


def test_fresh_seeds_differ_and_fit():
    seeds = {fresh_seed() for _ in range(20)}
    assert len(seeds) == 20
    assert all(0 <= seed < 2**64 for seed in seeds)
