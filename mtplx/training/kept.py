"""What a run keeps on disk: written whole or not at all, and gone on with only by the same run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from mtplx.errors import MtplxError


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path beside `path` to write to; moved over it at the end, so a stop costs nothing."""
    fresh = path.with_name(path.name + ".new")
    yield fresh
    fresh.replace(path)


def require_same(kept: Mapping[str, object], now: Mapping[str, object], directory: Path) -> None:
    """Refuse to go on with a run as if it were another.

    Args:
        kept: what the run was begun with, by name; what it does not say is not checked.
        now: what it is to be gone on with.
        directory: of the run.
    Raises:
        MtplxError: they differ; says in what.
    """
    for name, value in now.items():
        old = kept.get(name, value)
        if old != value:
            # A hash tells a reader nothing.
            was = f" ({old})" if isinstance(old, int) or name == "--taps" else ""
            raise MtplxError(
                f"{directory} was begun with another {name}{was}: go on with the same, or choose "
                "another directory"
            )
