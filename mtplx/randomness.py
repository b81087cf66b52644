"""Counter-based noise: every number is a pure function of where it is used.

A number drawn here depends on the request's seed, the absolute position of the token it helps to
choose, and what it is used for; a race's on the token that runs as well, and one that belongs to a
cycle on where that began. It depends on nothing else: batch neighbours, restarts and discarded
drafts cannot shift it.

The generator is Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"),
over NumPy arrays for the few numbers of a position, over torch tensors for those of a vocabulary.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from mtplx import kernels
from mtplx.kernels import Kernels

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF
_ROUNDS = 10


class Purpose(IntEnum):
    """What a number decides about the token at its position."""

    DRAFT = 0  # which token is proposed
    ACCEPT = 1  # whether the proposal is kept
    EMIT = 2  # the correction after a rejection, or the bonus
    RACE = 3  # when each token of the vocabulary finishes


def philox4x32(counter: Sequence[Any], key: Sequence[Any]) -> tuple[Any, Any, Any, Any]:
    """Ten rounds of Philox on four counter and two key words, each an array or tensor below 2**32.

    Held in uint64 by NumPy or int64 by torch: a product may pass the sign bit, and the shift then
    brings it down, which the mask after it undoes.
    """
    library = kernels.find()
    if library and (not isinstance(counter[0], Tensor) or counter[0].device.type == "cpu"):
        return _philox_in_c(library, [*counter, *key])
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        left, right = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((right >> 32) & _LOW) ^ c1 ^ k0,
            right & _LOW,
            ((left >> 32) & _LOW) ^ c3 ^ k1,
            left & _LOW,
        )
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return c0, c1, c2, c3


def _philox_in_c(library: Kernels, words: Sequence[Any]) -> tuple[Any, Any, Any, Any]:
    """Of six words; a hundred small operations take longer than all numbers of a cycle."""
    tensors = isinstance(words[0], Tensor)
    arrays = [word.numpy().view(np.uint64) for word in words] if tensors else words
    given = np.empty((len(arrays), *np.broadcast(*arrays).shape), np.uint64)
    for i, array in enumerate(arrays):
        given[i, ...] = array
    drawn = np.empty((4, *given.shape[1:]), np.uint64)
    library.philox(given.ctypes.data, drawn.ctypes.data, given[0].size)
    c0, c1, c2, c3 = torch.from_numpy(drawn.view(np.int64)) if tensors else drawn
    return c0, c1, c2, c3


def uniforms(
    seeds: ArrayLike, positions: ArrayLike, purposes: ArrayLike, offsets: ArrayLike = 0
) -> NDArray[np.float64]:
    """Numbers in [0, 1) with 53 random bits.

    Args:
        seeds: of the requests, integers in [0, 2**64).
        positions: absolute positions of the tokens in their sequences, integers in [0, 2**64).
        purposes: what the numbers decide.
        offsets: 0 for noise that belongs to a position alone. Where it belongs to the cycle as
            well, 1 for the first position that the cycle decides, then 2, and so on below 2**32;
            position and offset together tell the cycle.
    Returns:
        float64, of the shape that all are broadcast to.
    """
    arguments = [np.asarray(x, dtype=np.uint64) for x in (seeds, positions, purposes, offsets)]
    if library := kernels.find():
        given = np.empty((4, *np.broadcast(*arguments).shape), np.uint64)
        for i, argument in enumerate(arguments):
            given[i, ...] = argument
        u = np.empty(given.shape[1:])
        library.uniforms(given.ctypes.data, u.ctypes.data, u.size)
        return u
    seed, position, purpose, offset = arguments
    words = philox4x32(
        (position & _LOW, position >> np.uint64(32), purpose, offset),
        (seed & _LOW, seed >> np.uint64(32)),
    )
    # 27 and 26 bits of two words: every multiple of 2**-53 in [0, 1), all equally likely.
    bits = ((words[0] >> np.uint64(5)) << np.uint64(26)) | (words[1] >> np.uint64(6))
    result: NDArray[np.float64] = bits.astype(np.float64) * 2.0**-53
    return result


def exponentials(seeds: Tensor, positions: Tensor, tokens: Tensor, dtype: torch.dtype) -> Tensor:
    """Exponential variates of mean 1, one for each token at each position.

    Args:
        seeds: low and high 32 bits of the requests' seeds, [..., 2] int64.
        positions: absolute, [...] int64.
        tokens: ids from 0 to 2**33, [N] or [..., N] int64.
        dtype: float64, or float32 where there is nothing wider.
    Returns:
        [..., N] of that type, above 0 and finite.
    """
    position = positions[..., None]
    # One counter serves two tokens, two words each.
    pair = tokens >> 1
    words = philox4x32(
        (position & _LOW, position >> 32, torch.full_like(pair, int(Purpose.RACE)), pair),
        (seeds[..., :1], seeds[..., 1:]),
    )
    odd = (tokens & 1).bool()
    high = torch.where(odd, words[2], words[0])
    low = torch.where(odd, words[3], words[1])
    # -log(1 - u) keeps its precision where it matters, at the small times that win. The half
    # keeps them above 0; it needs a bit of its own, or the largest u would be rounded to 1, and a
    # time without end loses even for the only token that can win.
    if dtype == torch.float32:
        u = ((high >> 9).to(dtype) + 0.5) * 2.0**-23
    else:
        u = (((high >> 5) << 25 | low >> 7).to(dtype) + 0.5) * 2.0**-52
    return -torch.log1p(-u)


def fresh_seed() -> int:
    """A seed from the operating system, for requests that bring none.

    Below 2**53, so that it survives readers of JSON that know only doubles.
    """
    return secrets.randbits(53)
