"""What a checkpoint is, what of it runs here and how, from its headers and config alone.

No weight is read. To learn whether the engine would take the model, it is built the way loading
builds it, on torch's meta device, where tensors have shapes and no storage; so are its MTP layers.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any, Literal

from mtplx.drafters.attached import AttachedHead
from mtplx.drafters.find import made_for_another
from mtplx.drafters.native import (
    NativeHead,
    NativeLayers,
    Status,
    make_native_head,
    native_layers,
)
from mtplx.drafters.pace import DEEPEST
from mtplx.errors import MtplxError
from mtplx.models import gguf_families
from mtplx.models.checkpoint import (
    Checkpoint,
    GenerationDefaults,
    generation_defaults,
    load_outline,
    load_tokenizer,
    locate,
    locate_head,
    made_plain,
    reported,
)
from mtplx.models.dequantise import is_known, settings_of
from mtplx.models.eagle3 import load_head
from mtplx.models.families import mtp_layers, text_settings
from mtplx.models.head_files import read_tensors, weights_file
from mtplx.models.headers import StoredTensor, tensor_headers
from mtplx.models.trunk import Trunk
from mtplx.ways import Machine, Way, this_machine, ways, why_not_kernels

MtpKind = Literal["native", "attached", "missing", "none"]
"""Layers in the model's own file; a head beside it; promised by the config and not there; none."""

SEEN = 5
"""Names of tensors that are told."""

USEFUL = 3
"""Tokens that are worth drafting with one layer. Where its makers and the makers of engines
recommend a number, it is 1 (vLLM's page on MTP), 2 (DeepSeek-V4, Qwen3.6) or 3 (SGLang's on GLM-4.6
and Qwen3.6): fed its own output, a layer that was trained for one token gets worse from token to
token. Of several layers each was trained for one token more."""


@dataclass(frozen=True)
class Mtp:
    """What could draft for a model: its own MTP layers, or a head attached to it.

    Attributes:
        kind: where it is; see `MtpKind`.
        status: what becomes of it when the model is loaded; see `mtplx.drafters.native.Status`.
        found: how many layers there are.
        promised: how many the config names.
        family: the model types whose layers are of this layout; empty where it is not known here.
        parameters: in them, as they are read.
        bytes: of their tensors.
        tensors: how many those are.
        seen: the first names of them.
        where: file or directory they lie in, or the hub id; None if there are none.
        depth: tokens per cycle that it recommends where none are learned; None where nothing
            drafts.
        depths: the least and the most that are worth trying first; None likewise. `auto` finds out.
        usable: whether it drafts.
    """

    kind: MtpKind
    status: Status = "none"
    found: int = 0
    promised: int = 0
    family: tuple[str, ...] = ()
    parameters: int = 0
    bytes: int = 0
    tensors: int = 0
    seen: tuple[str, ...] = ()
    where: str | None = None
    depth: int | None = None
    depths: tuple[int, int] | None = None
    usable: bool = False


@dataclass(frozen=True)
class Inspection:
    """What `inspect` found. Unknown numbers are None. `to_dict` has the same keys, for JSON.

    Attributes:
        name: what the user called it.
        path: where it lies; of a model whose weights are on the hub, where its config does.
        remote: whether its weights are on the hub, and only their headers were read.
        format: of the weight files.
        architecture: class or family name, as the checkpoint states it.
        parameters: stored in all its files but an attached head's; tied weights count once.
        bytes: of all tensors.
        dtypes: parameters by the type they are stored in.
        layers: of the trunk, without MTP layers.
        hidden_size: width of the trunk.
        vocab_size: tokens in its vocabulary.
        context: tokens of prompt and answer together that it can be run with here; as the
            checkpoint states it if it does not run.
        chat_template: whether it has one.
        eos_token_ids: tokens that end an answer.
        sampling: the settings that the checkpoint itself asks for.
        mtp: what could draft for it.
        device: where it would run: `cpu`, `cuda` or `mps`.
        instructions: the kernels' set of instructions on this CPU, if they are there: `amx`,
            `avx512`, `avx2` or `generic`.
        memory: of this machine or GPU, in bytes.
        ways: what it would run as, by each choice of `quantize`, the first without one, and the
            memory that takes: keys as in `mtplx.ways.Way`; empty if it does not run.
        why_not_kernels: why whole passes are not the kernels', None if they are or it does not run.
        drafter: what `auto` drafts with, `native` or `attached`; None for nothing.
        problems: what keeps it from running here, one line each; empty if it runs.
        notes: what else is good to know.
    """

    name: str
    path: str
    remote: bool
    format: Literal["safetensors", "gguf"]
    architecture: str
    parameters: int
    bytes: int
    dtypes: dict[str, int]
    layers: int | None
    hidden_size: int | None
    vocab_size: int | None
    context: int | None
    chat_template: bool
    eos_token_ids: tuple[int, ...]
    sampling: dict[str, float]
    mtp: Mtp
    device: str
    instructions: str | None
    memory: int
    ways: tuple[Way, ...] = ()
    why_not_kernels: str | None = None
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def runs(self) -> bool:
        """Whether nothing is known that keeps it from running on this machine."""
        return not self.problems

    @property
    def drafter(self) -> Literal["native", "attached"] | None:
        """What `auto` drafts with."""
        if not self.mtp.usable:
            return None
        return "attached" if self.mtp.kind == "attached" else "native"

    def to_dict(self) -> dict[str, Any]:
        """For JSON: the attributes by their names, and `runs`."""
        return {**asdict(self), "drafter": self.drafter, "runs": self.runs}


def inspect(
    model: str | os.PathLike[str], head: str | os.PathLike[str] | None = None
) -> Inspection:
    """Look at a model without reading its weights.

    Args:
        model: a built-in name, a directory, a `.gguf` file or a hub id. Of a hub id that was not
            downloaded before, the config and the headers of the weight files are fetched.
        head: an attached head to look at beside it: its directory, or a hub id, which is
            downloaded.
    Raises:
        MtplxError: there is no such model, its files are damaged, or the hub cannot be reached.
    """
    return look_at(locate(model, weights=False), head)


def look_at(checkpoint: Checkpoint, head: str | os.PathLike[str] | None = None) -> Inspection:
    """The same of a model that was found already."""
    stored = tensor_headers(checkpoint)
    facts = _gguf_facts(checkpoint) if checkpoint.is_gguf else _directory_facts(checkpoint)
    directory = locate_head(head) if head is not None else checkpoint.head
    machine = this_machine()
    problems: list[str] = []
    notes: list[str] = []
    plain: Mapping[str, Any] = stored
    trunk: Trunk | None = None
    try:
        if not checkpoint.is_gguf:
            plain = made_plain(checkpoint, stored)
        trunk = _trunk_without_weights(checkpoint)
    except MtplxError as error:
        problems.append(str(error))
    drafts: NativeHead | AttachedHead | None = None
    try:
        if directory is not None:
            drafts, remarks = _attached(directory, trunk, facts.layers or 0, checkpoint)
            notes += remarks if head is not None else ()
        elif trunk is not None:
            drafts, _ = make_native_head(checkpoint, plain, trunk)
    except MtplxError as error:
        problems.append(str(error))
    if directory is not None:
        mtp = _attached_head(directory, drafts)
    else:
        count = facts.layers if trunk is None else trunk.layers
        layers = native_layers(checkpoint, plain, count)
        own = {name: stored[name] for names in mtp_layers(stored, count).values() for name in names}
        mtp = _native_head(layers, drafts, trunk, checkpoint, plain, own)
        notes += layers.notes
    if mtp.kind == "none":
        notes.append(
            "it has no MTP layers; `--drafter ngram` and `--draft-model` draft without, and "
            "`--head` attaches a trained head"
        )
    if facts.quantisation:
        how = (
            " and are read as plain ones"
            if facts.dequantised
            else "; whether transformers can read them on this machine shows when they are loaded"
        )
        notes.append(f"its weights are stored quantised ({facts.quantisation}){how}")
    context, found, reason = facts.context, [], None
    if trunk is not None:
        found = ways(checkpoint, trunk, drafts, machine, stored)
        reason = why_not_kernels(checkpoint, trunk, machine)
        context = found[0].context
        if facts.context is not None and context < facts.context:
            notes.append(
                f"it is stated to read {facts.context:,} tokens; beyond {context:,} a sliding "
                "window or another rotary scaling would act, which is not run here yet"
            )
        if shortage := _shortage(found, machine):
            problems.append(shortage)
    dtypes: Counter[str] = Counter()
    for tensor in stored.values():
        dtypes[tensor.dtype] += tensor.parameters
    chat_template, defaults = False, GenerationDefaults((), {})
    try:
        chat_template = _has_chat_template(checkpoint)
        defaults = generation_defaults(checkpoint)
    except MtplxError as error:
        problems.append(str(error))
    return Inspection(
        name=checkpoint.name,
        path=str(checkpoint.path),
        remote=checkpoint.remote,
        format="gguf" if checkpoint.is_gguf else "safetensors",
        architecture=facts.architecture,
        parameters=sum(dtypes.values()),
        bytes=sum(tensor.bytes for tensor in stored.values()),
        dtypes=dict(dtypes.most_common()),
        layers=facts.layers,
        hidden_size=facts.hidden_size,
        vocab_size=_vocabulary(facts, stored),
        context=context,
        chat_template=chat_template,
        eos_token_ids=defaults.eos_token_ids,
        sampling=defaults.sampling,
        mtp=mtp,
        device=machine.device.type,
        instructions=machine.instructions,
        memory=machine.memory,
        ways=tuple(found),
        why_not_kernels=reason,
        problems=tuple(problems),
        notes=tuple(notes),
    )


# --- what the files say ----------------------------------------------------------------------


@dataclass(frozen=True)
class _Facts:
    """What either format states about itself."""

    architecture: str
    layers: int | None
    hidden_size: int | None
    vocab_size: int | None
    context: int | None
    quantisation: str | None = None
    dequantised: bool = False


def _directory_facts(checkpoint: Checkpoint) -> _Facts:
    config = json.loads((checkpoint.path / "config.json").read_text(encoding="utf-8"))
    text = text_settings(config)
    quantisation = settings_of(config)
    return _Facts(
        architecture=next(iter(config.get("architectures") or ()), str(text.get("model_type"))),
        layers=text.get("num_hidden_layers"),
        hidden_size=text.get("hidden_size"),
        vocab_size=text.get("vocab_size"),
        context=text.get("max_position_embeddings"),
        quantisation=quantisation.get("quant_method", "of an unnamed kind")
        if quantisation
        else None,
        dequantised=is_known(quantisation),
    )


def _gguf_facts(checkpoint: Checkpoint) -> _Facts:
    file = checkpoint.gguf_file
    family = file.architecture

    def number(key: str) -> int | None:
        value = file.metadata.get(f"{family}.{key}")
        # Some families state a list, one number for each layer.
        return value if isinstance(value, int) else None

    blocks = number("block_count")
    return _Facts(
        architecture=family,
        # llama.cpp counts MTP layers as blocks.
        layers=None if blocks is None else blocks - gguf_families.promised_layers(file),
        hidden_size=number("embedding_length"),
        vocab_size=number("vocab_size"),
        context=number("context_length"),
    )


def _vocabulary(facts: _Facts, stored: Mapping[str, StoredTensor]) -> int | None:
    embedding = stored.get("token_embd.weight")  # of a GGUF file, whose header need not tell
    return embedding.shape[0] if embedding else facts.vocab_size


def _has_chat_template(checkpoint: Checkpoint) -> bool:
    if not checkpoint.remote:
        return bool(load_tokenizer(checkpoint).chat_template)
    # The tokenizer itself was not fetched.
    if any(checkpoint.path.glob("chat_template.*")):
        return True
    file = checkpoint.path / "tokenizer_config.json"
    return file.exists() and bool(json.loads(file.read_text("utf-8")).get("chat_template"))


# --- what drafts -----------------------------------------------------------------------------


def _native_head(
    layers: NativeLayers,
    head: NativeHead | AttachedHead | None,
    trunk: Trunk | None,
    checkpoint: Checkpoint,
    plain: Mapping[str, Any],
    own: Mapping[str, StoredTensor],
) -> Mtp:
    """The MTP layers in the model's own files, of which loading would make this head.

    Args:
        layers: what is known of them.
        head: made of them.
        trunk: of the same model.
        checkpoint: whose they are.
        plain: the checkpoint's tensors, made plain as far as they can be.
        own: theirs as they are stored.
    """
    status = layers.status
    if trunk is not None and head is None and status in ("works", "loads unverified"):
        status = "unknown layout"  # loading refuses them, and the problem says why
    held = len(layers.tensors)
    names = (name for names in layers.tensors.values() for name in names)
    return Mtp(
        kind="native" if held else "missing" if layers.promised else "none",
        status=status,
        found=held,
        promised=layers.promised,
        family=layers.family.types if layers.family else (),
        parameters=sum(prod(plain[name].get_shape()) for name in names),
        bytes=sum(tensor.bytes for tensor in own.values()),
        tensors=len(own),
        seen=tuple(own)[:SEEN],
        where=(checkpoint.name if checkpoint.remote else str(checkpoint.path)) if held else None,
        depth=1 if head else None,
        depths=(1, min(max(held, USEFUL), DEEPEST)) if head else None,
        usable=head is not None,
    )


def _attached(
    directory: Path, trunk: Trunk | None, trunk_layers: int, checkpoint: Checkpoint
) -> tuple[AttachedHead | None, tuple[str, ...]]:
    """An attached head without weights, and what the user should know of it.

    Raises:
        MtplxError: it cannot be attached.
    """
    head = load_head(directory, trunk_layers, meta=True)
    if trunk is None:
        return None, ()
    return AttachedHead(head, trunk), made_for_another(head, checkpoint)


def _attached_head(directory: Path, head: NativeHead | AttachedHead | None) -> Mtp:
    """The same in numbers."""
    tensors = read_tensors(weights_file(directory), meta=True)
    config = head.head.config if isinstance(head, AttachedHead) else None
    return Mtp(
        kind="attached",
        status="works" if config else "unknown layout",
        found=1,
        promised=1,
        family=("eagle3",),
        parameters=sum(tensor.numel() for tensor in tensors.values()),
        bytes=sum(tensor.nbytes for tensor in tensors.values()),
        tensors=len(tensors),
        seen=tuple(list(tensors)[:SEEN]),
        where=str(directory),
        depth=config.depth if config else None,
        depths=(1, max(config.depth, USEFUL)) if config else None,
        usable=config is not None,
    )


# --- whether it runs here --------------------------------------------------------------------


def _trunk_without_weights(checkpoint: Checkpoint) -> Trunk:
    """The trunk as loading would build it, on the meta device.

    Raises:
        MtplxError: what loading would raise before it reads weights.
    """
    outline = load_outline(checkpoint)
    with reported(checkpoint):
        return Trunk(outline)


def _shortage(found: list[Way], machine: Machine) -> str | None:
    """That the model does not fit into memory as it is loaded by default, if it does not."""
    usual, *others = found
    if usual.fits:
        return None
    place = "GPU" if machine.device.type == "cuda" else "machine"
    best = next((way for way in others if way.fits and not way.problem), None)
    instead = f"; --quantize {best.quantize} needs {best.needs / 1e9:.1f} GB" if best else ""
    return (
        f"it needs {usual.needs / 1e9:.1f} GB in {usual.dtype}; this {place} has "
        f"{machine.memory / 1e9:.1f} GB of memory{instead}"
    )
