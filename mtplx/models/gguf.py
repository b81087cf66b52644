"""GGUF files: the container, and how the model in it wants to be run.

The container is read here: `gguf.GGUFReader` wraps each of a vocabulary's 100,000 strings in an
array of its own and needs seconds for it, while a walk over the header takes a tenth of one. The
block formats are the `gguf` package's. Format: "GGUF" in the ggml repository, docs/gguf.md.
"""

from __future__ import annotations

import mmap
import shutil
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import gcd, prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFValueType

from mtplx.errors import MtplxError

# --- the container ---------------------------------------------------------------------------

_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_ROWS_AT_ONCE = 64

_SCALARS = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT64: "d",
}


@dataclass(frozen=True)
class GgufTensor:
    """One tensor as it lies in the file.

    `shape` is in torch's order (rows first), `data` the raw bytes `[..., bytes per row]`, mapped
    and not yet read.
    """

    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    data: np.ndarray[Any, np.dtype[np.uint8]]

    def dequantize(self) -> torch.Tensor:
        """The values in float32, `[*shape]`, in memory of their own.

        Raises `NotImplementedError` for a block format the `gguf` package cannot decode.
        """
        # The package decodes 16 rows at a call. Blocks lie one after another whatever a row is
        # called, so longer rows mean fewer calls: a third of the time.
        rows = prod(self.shape[:-1])
        data = self.data.reshape(rows // gcd(rows, _ROWS_AT_ONCE), -1)
        values = gguf.dequantize(data, self.kind)
        return torch.from_numpy(np.require(values, requirements="W")).view(self.shape)


@dataclass(frozen=True)
class GgufFile:
    """The parsed header of a GGUF file; the weights stay on disk until they are asked for."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]

    @property
    def architecture(self) -> str:
        """What llama.cpp calls the model family: `llama`, `qwen3`, …"""
        return str(self["general.architecture"])

    def __getitem__(self, key: str) -> Any:
        """A metadata value that the file must have; `MtplxError` where it has not."""
        if key not in self.metadata:
            raise MtplxError(f"{self.path}: the GGUF file lacks the metadata key {key!r}")
        return self.metadata[key]


class _Cursor:
    """Little-endian values, one after another; `EOFError` where the file ends too early."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.position = 0

    def take(self, size: int) -> bytes:
        start, self.position = self.position, self.position + size
        if self.position > len(self.data):
            raise EOFError
        return self.data[start : self.position]

    def scalar(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def string(self) -> str:
        return self.take(self.scalar("Q")).decode()

    def value(self, kind: int) -> Any:
        if kind == GGUFValueType.STRING:
            return self.string()
        if kind == GGUFValueType.ARRAY:
            element, count = self.scalar("I"), self.scalar("Q")
            if element in _SCALARS:
                dtype = np.dtype("<" + _SCALARS[GGUFValueType(element)])
                return np.frombuffer(self.take(count * dtype.itemsize), dtype).tolist()
            return [self.value(element) for _ in range(count)]
        number = self.scalar(_SCALARS[GGUFValueType(kind)])
        # A float32 holds 1e-5 as 9.999999747378752e-06; the shortest decimal that rounds to it is
        # the number its author wrote.
        return float(str(np.float32(number))) if kind == GGUFValueType.FLOAT32 else number


def read_gguf(path: Path) -> GgufFile:
    """Reads a GGUF file's header: all metadata, and where each tensor lies.

    Raises `MtplxError` for a file that is missing, not GGUF, of a version or byte order not known
    here, damaged, truncated, or only one part of a split model.
    """
    try:
        with path.open("rb") as stream:
            if stream.read(4) != b"GGUF":
                raise MtplxError(
                    f"{path}: not a GGUF file (it does not begin with the bytes 'GGUF')"
                )
            data = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise MtplxError(f"{path}: cannot be read ({error.strerror})") from error

    cursor = _Cursor(data)
    cursor.take(4)
    try:
        version = cursor.scalar("I")
        if version not in _VERSIONS:
            raise MtplxError(
                f"{path}: GGUF version {version} is not known here (only little-endian files of "
                f"version {' and '.join(map(str, _VERSIONS))}): convert the model again"
            )
        tensor_count, metadata_count = cursor.scalar("Q"), cursor.scalar("Q")
        metadata = {
            cursor.string(): cursor.value(cursor.scalar("I")) for _ in range(metadata_count)
        }
        tensors = dict(_tensors(cursor, tensor_count, metadata))
        if (parts := metadata.get("split.count", 1)) > 1:
            raise MtplxError(
                f"{path}: one of {parts} parts of a model: merge them with "
                "`llama-gguf-split --merge` and give the merged file"
            )
    except EOFError:
        raise MtplxError(
            f"{path}: the file ends too early ({len(data):,} bytes): it is truncated, "
            "download it again"
        ) from None
    except (ValueError, LookupError, ArithmeticError, TypeError, RecursionError) as error:
        raise MtplxError(f"{path}: damaged GGUF header ({error}): download it again") from error
    return GgufFile(path, metadata, tensors)


def _tensors(
    cursor: _Cursor, count: int, metadata: Mapping[str, Any]
) -> Iterator[tuple[str, GgufTensor]]:
    entries = []
    for _ in range(count):
        name = cursor.string()
        # ggml counts dimensions from the innermost outwards, torch the other way round.
        shape = tuple(cursor.scalar("Q") for _ in range(cursor.scalar("I")))[::-1]
        kind = GGMLQuantizationType(cursor.scalar("I"))
        entries.append((name, shape, kind, cursor.scalar("Q")))

    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    start = -(-cursor.position // alignment) * alignment
    for name, shape, kind, offset in entries:
        byte_shape = gguf.quant_shape_to_byte_shape(shape, kind)
        if start + offset + prod(byte_shape) > len(cursor.data):
            raise EOFError
        raw = np.frombuffer(cursor.data, np.uint8, prod(byte_shape), start + offset)
        yield name, GgufTensor(shape, kind, raw.reshape(byte_shape))


# --- for transformers ------------------------------------------------------------------------


@contextmanager
def by_itself(file: GgufFile) -> Iterator[dict[str, Any]]:
    """The file as an argument for transformers' loaders, in a directory where nothing else is.

    They would read its neighbours too, though a GGUF file is a model of its own, and ask whether
    to run the code that one of them may name.
    """
    with TemporaryDirectory() as directory:
        place = Path(directory, file.path.name)
        try:
            place.symlink_to(file.path.resolve())
        except OSError:  # Windows lets only some users
            shutil.copyfile(file.path, place)
        yield {
            "pretrained_model_name_or_path": directory,
            "gguf_file": place.name,
            "local_files_only": True,
            "trust_remote_code": False,
        }


# --- how to run it ---------------------------------------------------------------------------

_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}


def eos_token_ids(file: GgufFile) -> tuple[int, ...]:
    """The ids that end an answer: end of text, then end of turn where the file names one."""
    names = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    return tuple(dict.fromkeys(file.metadata[name] for name in names if name in file.metadata))


def sampling(file: GgufFile) -> dict[str, float]:
    """The sampler settings that the file recommends, by transformers' names."""
    return {
        ours: file.metadata[f"general.sampling.{theirs}"]
        for theirs, ours in _SAMPLING.items()
        if f"general.sampling.{theirs}" in file.metadata
    }
