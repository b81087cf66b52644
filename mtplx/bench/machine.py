"""The machine that figures are of, and how fast it copies."""

from __future__ import annotations

import os
import platform
import time
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from mtplx import __version__, kernels

COPIED = 256 * 2**20
"""Bytes of the measured copy, where an eighth of memory is not less: more than most caches hold."""

REPEATS = 25


@dataclass(frozen=True)
class Machine:
    """What a reader needs to place the figures.

    Attributes:
        cpu: its name.
        cores: physical ones, where the system tells them from logical ones.
        logical_cores: those that the system counts.
        threads: computed with.
        memory: bytes.
        copy_bandwidth: bytes read and bytes written per second by a copy, together.
        instruction_set: of the kernels; None where they were not built.
        versions: of Python, the system and packages.
    """

    cpu: str
    cores: int
    logical_cores: int
    threads: int
    memory: int
    copy_bandwidth: float
    instruction_set: str | None
    versions: dict[str, str]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def describe(versions: dict[str, str]) -> Machine:
    """This machine, its copy bandwidth measured now.

    Args:
        versions: of the peers, by engine or package.
    """
    library = kernels.find()
    own = {
        "python": platform.python_version(),
        "system": platform.platform(),
        "mtplx": __version__,
        "torch": torch.__version__,
        "transformers": metadata.version("transformers"),
    }
    return Machine(
        cpu=_cpu(),
        cores=_cores(),
        logical_cores=os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        memory=_memory(),
        copy_bandwidth=copy_bandwidth(),
        instruction_set=None if library is None else library.name,
        versions=own | versions,
    )


def copy_bandwidth(size: int | None = None, repeats: int = REPEATS) -> float:
    """Bytes per second that a copy by all of torch's threads reads and writes, together.

    The best of several, because what else the machine does can only slow one down.

    Args:
        size: of what is copied, in bytes; None for `COPIED` or an eighth of memory.
        repeats: copies timed.
    """
    size = size or min(COPIED, _memory() // 8)
    # Ones, not zeros: a page of zeros may not be there at all.
    source = torch.ones(size, dtype=torch.uint8)
    target = torch.ones(size, dtype=torch.uint8)
    best = float("inf")
    for _ in range(repeats):
        started = time.perf_counter()
        target.copy_(source)
        best = min(best, time.perf_counter() - started)
    return 2 * size / best


def _memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _cpu() -> str:
    names = _cpuinfo("model name")
    return names[0] if names else platform.processor() or platform.machine()


def _cores() -> int:
    sockets, cores = _cpuinfo("physical id"), _cpuinfo("core id")
    # Two hardware threads of a core have the same two numbers.
    return len(set(zip(sockets, cores, strict=False))) or os.cpu_count() or 1


def _cpuinfo(key: str) -> list[str]:
    """Its values, one a logical core; none where there is no such file or key."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    fields = (line.partition(":") for line in lines)
    return [value.strip() for name, _, value in fields if name.strip() == key]


def threads_words(count: int) -> str:
    return "1 thread" if count == 1 else f"{count} threads"
