"""A hub with one repository, which is a directory here, and what was asked of it."""

from __future__ import annotations

import json
from pathlib import Path
from unittest.mock import Mock

import huggingface_hub
import pytest
from huggingface_hub.errors import (
    LocalEntryNotFoundError,
    NotASafetensorsRepoError,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
)
from huggingface_hub.utils import SafetensorsFileMetadata, SafetensorsRepoMetadata, TensorInfo

REPOSITORY = "tiny/model"


class Hub:
    """Stands in for the functions of huggingface_hub that fetch something.

    Attributes:
        asked: files that were asked for, and `headers`.
    """

    def __init__(self, repository: Path, cache: Path) -> None:
        self.repository, self.cache = repository, cache
        self.asked: list[str] = []

    def hf_hub_download(self, repository: str, file: str) -> str:
        self.asked.append(file)
        _require(repository)
        if not (self.repository / file).exists():
            raise RemoteEntryNotFoundError(f"no {file}", response=Mock(headers={}))
        self.cache.mkdir(exist_ok=True)
        (self.cache / file).write_bytes((self.repository / file).read_bytes())
        return str(self.cache / file)

    def get_safetensors_metadata(self, repository: str) -> SafetensorsRepoMetadata:
        self.asked.append("headers")
        _require(repository)
        files = {path.name: _header(path) for path in self.repository.glob("*.safetensors")}
        if not files:
            raise NotASafetensorsRepoError("'tiny/model' is not a safetensors repo.")
        weight_map = {name: file for file, data in files.items() for name in data.tensors}
        return SafetensorsRepoMetadata(None, len(files) > 1, weight_map, files)

    def snapshot_download(
        self, repository: str, local_files_only: bool = False, **patterns: object
    ) -> str:
        assert local_files_only, "nothing is to be downloaded whole"
        if not self.cache.exists():
            raise LocalEntryNotFoundError("Cannot find an appropriate cached snapshot folder")
        return str(self.cache)


def _require(repository: str) -> None:
    if repository != REPOSITORY:
        raise RepositoryNotFoundError("404", response=Mock(headers={}))


def _header(path: Path) -> SafetensorsFileMetadata:
    with path.open("rb") as stream:
        header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
    metadata = header.pop("__metadata__", {})
    tensors = {
        name: TensorInfo(entry["dtype"], entry["shape"], tuple(entry["data_offsets"]))
        for name, entry in header.items()
    }
    return SafetensorsFileMetadata(metadata, tensors)


def connect(monkeypatch: pytest.MonkeyPatch, repository: Path, cache: Path) -> Hub:
    """Have huggingface_hub find this repository, and keep what it fetches in `cache`."""
    hub = Hub(repository, cache)
    for name in ("hf_hub_download", "get_safetensors_metadata", "snapshot_download"):
        monkeypatch.setattr(huggingface_hub, name, getattr(hub, name))
    return hub
