"""Counter-based noise: every uniform is a pure function of where it is used.

A number drawn here depends on the request's seed, the absolute position of the token it helps to
choose, and what it is used for, and on nothing else. Batch neighbours, restarts and discarded
drafts cannot shift it.

The generator is Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"),
vectorised over NumPy arrays.
"""

from __future__ import annotations

import secrets
from enum import IntEnum

import numpy as np
from numpy.typing import ArrayLike, NDArray

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW = np.uint64(0xFFFFFFFF)
_WORD = np.uint64(32)
_ROUNDS = 10


class Purpose(IntEnum):
    """What a uniform decides about the token at its position."""

    DRAFT = 0  # which token is proposed
    ACCEPT = 1  # whether the proposal is kept
    EMIT = 2  # the correction after a rejection, or the bonus


def philox4x32(counter: NDArray[np.uint64], key: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Ten rounds of Philox on 32-bit words held in uint64.

    Args:
        counter: [..., 4], each word below 2**32.
        key: [..., 2], each word below 2**32.
    Returns:
        [..., 4] words below 2**32.
    """
    c0, c1, c2, c3 = (counter[..., i] for i in range(4))
    k0, k1 = key[..., 0], key[..., 1]
    for _ in range(_ROUNDS):
        left, right = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (right >> _WORD) ^ c1 ^ k0,
            right & _LOW,
            (left >> _WORD) ^ c3 ^ k1,
            left & _LOW,
        )
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return np.stack([c0, c1, c2, c3], axis=-1)


def uniforms(seeds: ArrayLike, positions: ArrayLike, purpose: Purpose) -> NDArray[np.float64]:
    """Numbers in [0, 1) with 53 random bits.

    Args:
        seeds: of the requests, integers in [0, 2**64).
        positions: absolute positions of the tokens in their sequences, integers in [0, 2**64);
            broadcast against `seeds`.
        purpose: what the numbers decide.
    Returns:
        float64, of the broadcast shape.
    """
    seed, position = np.broadcast_arrays(
        np.asarray(seeds, dtype=np.uint64), np.asarray(positions, dtype=np.uint64)
    )
    use = np.full(seed.shape, int(purpose), dtype=np.uint64)
    counter = np.stack([position & _LOW, position >> _WORD, use, np.zeros_like(use)], axis=-1)
    key = np.stack([seed & _LOW, seed >> _WORD], axis=-1)
    words = philox4x32(counter, key)
    # 27 and 26 bits of two words: every multiple of 2**-53 in [0, 1), all equally likely.
    high, low = words[..., 0] >> np.uint64(5), words[..., 1] >> np.uint64(6)
    bits = (high << np.uint64(26)) | low
    result: NDArray[np.float64] = bits.astype(np.float64) * 2.0**-53
    return result


def fresh_seed() -> int:
    """A seed from the operating system, for requests that bring none.

    Below 2**53, so that it survives readers of JSON that know only doubles.
    """
    return secrets.randbits(53)
