"""What drafts for a checkpoint: a head that is named, its own, or one attached to it; a lookup in
the text, alone or beside the head; another model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mtplx.drafters.assistant import Assistant
from mtplx.drafters.attached import attach
from mtplx.drafters.draft_model import DraftModel
from mtplx.drafters.drafter import Drafter
from mtplx.drafters.mixed import HeadOrLookup
from mtplx.drafters.mtp import Head
from mtplx.drafters.native import load_native_head
from mtplx.drafters.ngram import Ngram
from mtplx.errors import MtplxError
from mtplx.models.checkpoint import Checkpoint
from mtplx.models.eagle3 import Eagle3Head, load_head
from mtplx.models.trunk import Trunk

DrafterName = Literal["auto", "mtp", "ngram", "mtp+ngram"]
"""What is to draft: the model's head, lookups in the text, or whichever does better; `auto` is the
head where there is one."""

USUAL_DEPTH = 3
"""Of drafters that recommend none."""


@dataclass(frozen=True)
class FoundDrafter:
    """What drafts, if anything does.

    Attributes:
        name: for people; None where nothing drafts.
        drafter: that the engine is given.
        head: the head in it, if there is one.
        depth: that it recommends.
        notes: what the user should know about it.
    """

    name: str | None
    drafter: Drafter | None
    head: Head | None
    depth: int
    notes: tuple[str, ...] = ()


def find_drafter(
    checkpoint: Checkpoint, trunk: Trunk, named: Path | None, wanted: DrafterName
) -> FoundDrafter:
    """What drafts for a checkpoint without another model.

    Raises:
        MtplxError: a head was named, promised or asked for and cannot be had.
    """
    if wanted == "ngram":
        return FoundDrafter(wanted, Ngram(trunk.device), None, USUAL_DEPTH)
    found = find_head(checkpoint, trunk, named)
    head = found.head
    if head is None:
        if wanted == "auto":
            return FoundDrafter(None, None, None, 0, found.notes)
        why = f" ({'; '.join(found.notes)})" if found.notes else ""
        raise MtplxError(
            f"{checkpoint.name} has no MTP head for the drafter {wanted!r}{why}: name one (head), "
            "or take 'ngram'"
        )
    if wanted == "mtp+ngram":
        drafter = HeadOrLookup(head, trunk.device)
        return FoundDrafter(wanted, drafter, head, found.depth, found.notes)
    return FoundDrafter("mtp", head, head, found.depth, found.notes)


def draft_with(
    name: str, model: Trunk, tokenizer: Any, trunk: Trunk, own_tokenizer: Any
) -> FoundDrafter:
    """Another model as drafter.

    Args:
        name: of that model.
        model: itself.
        tokenizer: its own.
        trunk: what it drafts for.
        own_tokenizer: of what it drafts for.
    Raises:
        MtplxError: the two do not have the same token ids.
    """
    if model.recurrent:
        raise MtplxError(
            f"{name} cannot draft for another model: it has recurrent layers, which only run as a "
            "model of their own so far; take one with attention alone"
        )
    unlike = None
    if model.vocab_size > trunk.vocab_size:
        unlike = f"it has {model.vocab_size} tokens, more than the model's {trunk.vocab_size}"
    else:
        ids = own_tokenizer.get_vocab()
        others = ((token, i) for token, i in tokenizer.get_vocab().items() if i < model.vocab_size)
        strange = next((token for token, i in others if ids.get(token) != i), None)
        if strange is not None:
            unlike = f"{strange!r} is not the same token in both"
    if unlike:
        raise MtplxError(
            f"{name} cannot draft for this model: {unlike}; take one with the same vocabulary"
        )
    drafter = DraftModel(model, trunk.vocab_size)
    return FoundDrafter(f"draft model {name}", drafter, None, USUAL_DEPTH)


def assisted_by(name: str, model: Any, trunk: Trunk) -> FoundDrafter:
    """Gemma 4's assistant as drafter.

    Args:
        name: of the assistant.
        model: itself.
        trunk: what it drafts for.
    Raises:
        MtplxError: it was made for another model.
    """
    return FoundDrafter(f"assistant {name}", Assistant(name, model, trunk), None, USUAL_DEPTH)


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
    # A layer was trained for each token.
    return FoundHead(native, 0 if native is None else native.layers, remarks)


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
