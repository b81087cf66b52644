"""In C, for CPUs: the decoder's pass (decoder.h), a sampler's search, and its noise.

Built with the package where there is a C compiler; without, everything runs in torch.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_char_p, c_float, c_int32, c_int64, c_size_t, c_void_p
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

FOUR_BITS, EIGHT_BITS, BFLOAT16, FLOAT32 = range(4)
TILE_OUTPUTS, TILE_INPUTS = 16, 32


class Matrix(Structure):
    _fields_ = [
        ("kind", c_int32),
        ("outputs", c_int32),
        ("inputs", c_int32),
        ("weights", c_void_p),
        ("bias", c_void_p),
    ]


MATRICES = ("q", "k", "v", "o", "gate", "up", "down")
NORMS = ("input_norm", "post_norm", "q_norm", "k_norm")


class Layer(Structure):
    _fields_ = [*((name, Matrix) for name in MATRICES), *((name, c_void_p) for name in NORMS)]


class Decoder(Structure):
    _fields_ = [
        ("layers", c_int32),
        ("hidden", c_int32),
        ("heads", c_int32),
        ("kv_heads", c_int32),
        ("head_size", c_int32),
        ("intermediate", c_int32),
        ("epsilon", c_float),
        ("attention_scale", c_float),
        ("layer", POINTER(Layer)),
        ("norm", c_void_p),
        ("output", Matrix),
        ("embedding_type", c_int32),
        ("residual_normed", c_int32),
        ("embedding", c_void_p),
        ("token_norm", c_void_p),
        ("state_norm", c_void_p),
    ]


class Cache(Structure):
    _fields_ = [
        ("narrow", c_int32),
        ("slots", c_int32),
        ("capacity", c_int32),
        ("keys", c_void_p),
        ("values", c_void_p),
    ]


class Pass(Structure):
    _fields_ = [
        ("tokens", c_void_p),
        ("states", c_void_p),
        ("x", c_void_p),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("positions", c_void_p),
        ("streams", POINTER(c_void_p)),
        ("normed", c_void_p),
        ("logits", c_void_p),
        ("scratch", c_void_p),
        ("rows", c_int32),
        ("first", c_int32),
        ("width", c_int32),
        ("threads", c_int32),
        ("turns", c_int32),
        ("stream_width", c_int32),
    ]


class _Set(Structure):
    _fields_ = [
        ("name", c_char_p),
        ("run", ctypes.CFUNCTYPE(None, POINTER(Decoder), POINTER(Cache), POINTER(Pass))),
        (
            "multiply",
            ctypes.CFUNCTYPE(
                None,
                *(POINTER(Matrix), c_void_p, c_void_p, c_float),
                *(c_void_p, c_void_p, c_int32, c_int32),
            ),
        ),
    ]


class Kernels:
    """The library, for one instruction set. Its functions run without Python's lock.

    Attributes:
        name: of the instruction set.
        run: a pass of a decoder.
        multiply: rows by a matrix: (matrix, x, norm, epsilon, y, scratch, rows, threads).
        room: bytes of scratch memory for a pass: (decoder, rows, threads, capacity).
        room_to_multiply: likewise: (rows, inputs).
        largest: a search in each row: (x, wanted, values, columns, rows, width, room, threads).
        shape: that, and a sampler's filters: (x, wanted, temperature, surplus, min_p, top, p,
            columns, rows, width, room, threads).
        philox: random words: (given, words, n).
        uniforms: random numbers: (given, u, n).
        draw: a token of each row: (p, tokens, u, token, rows, width, stride).
        verify: what becomes of drafts: (p, p_tokens, q, q_tokens, drafted, depths, accept, emit,
            block, kept, token, probability, weights, batch, depth, p_width, q_width,
            accept_stride, emit_stride).
    """

    def __init__(self, library: ctypes.CDLL, chosen: _Set) -> None:
        self.name: str = chosen.name.decode()
        self.run = chosen.run
        self.multiply = chosen.multiply
        self.room = library.mtplx_room
        self.room.restype = c_size_t
        self.room.argtypes = [POINTER(Decoder), c_int32, c_int32, c_int32]
        self.room_to_multiply = library.mtplx_room_to_multiply
        self.room_to_multiply.restype = c_size_t
        self.room_to_multiply.argtypes = [c_int32, c_int32]
        self.largest = library.mtplx_largest
        self.largest.restype = c_int32
        self.largest.argtypes = [*[c_void_p] * 4, *[c_int32] * 4]
        self.shape = library.mtplx_shape
        self.shape.restype = c_int32
        self.shape.argtypes = [*[c_void_p] * 8, *[c_int32] * 4]
        self.draw = library.mtplx_draw
        self.draw.restype = None
        self.draw.argtypes = [*[c_void_p] * 4, *[c_int32] * 3]
        self.verify = library.mtplx_verify
        self.verify.restype = None
        self.verify.argtypes = [*[c_void_p] * 13, *[c_int32] * 6]
        self.philox = library.mtplx_philox
        self.philox.restype = None
        self.philox.argtypes = [c_void_p, c_void_p, c_int64]
        self.uniforms = library.mtplx_uniforms
        self.uniforms.restype = None
        self.uniforms.argtypes = [c_void_p, c_void_p, c_int64]

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of a model is run by the same functions.
        return find, (self.name,)


@cache
def find(name: str | None = None) -> Kernels | None:
    """The kernels for an instruction set: `amx`, `avx512`, `avx2`, `generic`; the best for None.

    None where they were not built, or where this CPU lacks the set.
    """
    # It shares torch's pool of threads, whose library has to be there first: two pools would
    # wait for each other, spinning.
    import torch  # noqa: F401

    names = [Path(__file__).with_name(f"_decoder{suffix}") for suffix in EXTENSION_SUFFIXES]
    built = next((path for path in names if path.exists()), None)
    if built is None:
        return None
    library = ctypes.CDLL(str(built))
    library.mtplx_set.restype = POINTER(_Set)
    library.mtplx_set.argtypes = [c_char_p]
    chosen = library.mtplx_set(None if name is None else name.encode())
    return Kernels(library, chosen.contents) if chosen else None
