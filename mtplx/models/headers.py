"""The tensors of a checkpoint by the headers of its files: names, shapes and types, no weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mtplx.errors import MtplxError
from mtplx.models.checkpoint import Checkpoint, from_hub, weight_files

_TORCH_NAMES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}
_STORED_NAMES = {ours: theirs for theirs, ours in _TORCH_NAMES.items()}


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a weight file, by its header, with the methods of safetensors' slices.

    A slice of it is a tensor on the meta device.

    Attributes:
        shape: rows first, as torch has it.
        dtype: torch's name of the type, or a GGUF block format (`Q4_1`).
        bytes: in the file.
    """

    shape: tuple[int, ...]
    dtype: str
    bytes: int

    @property
    def parameters(self) -> int:
        return prod(self.shape)

    def get_shape(self) -> list[int]:
        return list(self.shape)

    def get_dtype(self) -> str:
        """As the file has it."""
        return _STORED_NAMES.get(self.dtype, self.dtype.upper())

    def __getitem__(self, index: Any) -> Tensor:
        dtype = getattr(torch, self.dtype, torch.float32)
        return torch.empty(self.shape, dtype=dtype, device="meta")[index]


def tensor_headers(checkpoint: Checkpoint) -> dict[str, StoredTensor]:
    """All tensors of a checkpoint by name.

    Those of weights that are still on the hub are told by requests for the files' first bytes
    (huggingface_hub's `get_safetensors_metadata`).

    Raises:
        MtplxError: a file is missing or damaged, or the hub has none or cannot be reached.
    """
    if checkpoint.is_gguf:
        return {
            name: StoredTensor(tensor.shape, tensor.kind.name, tensor.data.nbytes)
            for name, tensor in checkpoint.gguf_file.tensors.items()
        }
    if checkpoint.remote:
        return _on_the_hub(checkpoint.name)
    found: dict[str, StoredTensor] = {}
    for file in weight_files(checkpoint.path):
        found |= read_header(file)
    return found


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one `.safetensors` file, by name.

    Format: eight bytes with the header's length, then the header as JSON: name -> dtype, shape
    and the begin and end of the data ("Format" in the safetensors README).

    Raises:
        MtplxError: missing or damaged.
    """
    try:
        with safe_open(path, framework="np"):  # checks that offsets and file size agree
            pass
        with path.open("rb") as stream:
            header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
    except (OSError, SafetensorError, ValueError) as error:
        raise MtplxError(f"{path}: missing or damaged weights ({error})") from None
    header.pop("__metadata__", None)
    return {
        name: _stored(entry["shape"], entry["dtype"], entry["data_offsets"])
        for name, entry in header.items()
    }


def _on_the_hub(repository: str) -> dict[str, StoredTensor]:
    from huggingface_hub import get_safetensors_metadata

    with from_hub(repository):
        files: Mapping[str, Any] = get_safetensors_metadata(repository).files_metadata
    return {
        name: _stored(entry.shape, entry.dtype, entry.data_offsets)
        for file in files.values()
        for name, entry in file.tensors.items()
    }


def _stored(shape: Any, dtype: str, offsets: Any) -> StoredTensor:
    begin, end = offsets
    return StoredTensor(tuple(shape), _TORCH_NAMES.get(dtype, dtype.lower()), end - begin)
