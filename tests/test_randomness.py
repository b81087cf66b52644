"""Noise: the published generator, and a pure function of where it is used."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from mtplx.randomness import Purpose, fresh_seed, philox4x32, uniforms

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
    return np.array([int(word, 16) for word in text.split()], dtype=np.uint64)


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_gives_the_published_answers(counter, key, expected):
    np.testing.assert_array_equal(philox4x32(words(counter), words(key)), words(expected))


def test_philox_treats_every_row_alone():
    counters, keys, expected = (
        np.stack([words(row[i]) for row in KNOWN_ANSWERS]) for i in range(3)
    )
    np.testing.assert_array_equal(philox4x32(counters, keys), expected)
    # One key for many counters, and one counter for many keys.
    many = philox4x32(counters[:, None], keys[None, :])
    assert many.shape == (3, 3, 4)
    np.testing.assert_array_equal(many[[0, 1, 2], [0, 1, 2]], expected)


def test_a_uniform_is_53_bits_of_the_generator():
    seed, position = 0x299F31D0_A4093822, 0x85A308D3_243F6A88
    first, second, *_ = philox4x32(
        np.array([0x243F6A88, 0x85A308D3, int(Purpose.EMIT), 0], dtype=np.uint64),
        np.array([0xA4093822, 0x299F31D0], dtype=np.uint64),
    )
    bits = (int(first) >> 5 << 26) | int(second) >> 6
    assert float(uniforms(seed, position, Purpose.EMIT)) == bits / 2**53


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
