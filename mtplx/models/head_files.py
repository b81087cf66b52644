"""The weights of an attached head: one file of named tensors, safetensors or torch's own."""

from __future__ import annotations

import zipfile
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mtplx.errors import MtplxError

SAFETENSORS, PICKLED = "model.safetensors", "pytorch_model.bin"


def weights_file(directory: Path) -> Path:
    """The head's weights in this directory; the safetensors file where there are both or none."""
    pickled = directory / PICKLED
    safe = directory / SAFETENSORS
    return pickled if pickled.exists() and not safe.exists() else safe


def read_tensors(path: Path, meta: bool = False) -> dict[str, Tensor]:
    """All tensors of a file by name.

    Args:
        path: what `weights_file` found.
        meta: shapes and types only, on torch's meta device; no numbers are read.
    Raises:
        MtplxError: missing, damaged, or holds anything but tensors.
    """
    if path.suffix == ".bin":
        return _unpickled(path, meta)
    try:
        with safe_open(path, framework="pt") as file:
            names, device = file.keys(), "meta" if meta else "cpu"
            # Tensors are views of the mapped file, so what goes to meta is never read.
            return {name: file.get_tensor(name).to(device) for name in names}
    except (OSError, SafetensorError) as error:
        raise MtplxError(f"{path}: missing or damaged head weights ({error})") from None


def _unpickled(path: Path, meta: bool) -> dict[str, Tensor]:
    """A file of torch.save, by the reader that knows tensors and runs nothing."""
    try:
        content = torch.load(
            path,
            map_location="meta" if meta else "cpu",
            weights_only=True,
            mmap=zipfile.is_zipfile(path),  # what older versions of torch wrote cannot be mapped
        )
    # A damaged pickle fails in any way, and torch's advice is to read it unsafely.
    except Exception:
        content = None
    if not isinstance(content, dict) or not all(
        isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in content.items()
    ):
        raise MtplxError(
            f"{path}: damaged, or not a plain file of tensors, and nothing else is read from a "
            "pickle, for it could run code: download it again, or convert it to safetensors"
        )
    return content
