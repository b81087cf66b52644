"""Which head drafts for a checkpoint: one that is named, its own, or one attached to it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mtplx.drafters.attached import attach
from mtplx.drafters.mtp import Head
from mtplx.drafters.native import load_native_head
from mtplx.models.checkpoint import Checkpoint
from mtplx.models.eagle3 import Eagle3Head, load_head
from mtplx.models.trunk import Trunk


@dataclass(frozen=True)
class FoundHead:
    """A head, the depth it recommends, and what the user should know about it."""

    head: Head | None
    depth: int
    notes: tuple[str, ...] = ()


def find_head(checkpoint: Checkpoint, trunk: Trunk, named: Path | None) -> FoundHead:
    """The head to draft with; none is an answer too.

    Raises:
        MtplxError: a head was named or promised and cannot be loaded.
    """
    directory = named or checkpoint.head
    if directory is not None:
        head = load_head(directory, trunk.layers)
        notes = () if named is None else made_for_another(head, checkpoint)
        return FoundHead(attach(head, trunk), head.config.depth, notes)
    native, remarks = load_native_head(checkpoint, trunk)
    return FoundHead(native, 0 if native is None else 1, remarks)


def made_for_another(head: Eagle3Head, checkpoint: Checkpoint) -> tuple[str, ...]:
    """A note where a head may be another model's."""
    made_for = head.config.verifier_name
    # A local model is recorded by its directory's own name.
    names = (checkpoint.name, checkpoint.origin, checkpoint.path.resolve().name)
    if not made_for or made_for in names:
        return ()
    return (
        f"the head was made for {made_for}; if {checkpoint.name} is another model, the output is "
        "as exact, but fewer drafts may be accepted",
    )
