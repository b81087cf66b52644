"""What a checkpoint is, and whether it can run here, from its headers and config alone.

No weight is read. To learn whether the engine would take the model, it is built the way loading
builds it, on torch's meta device, where tensors have shapes and no storage.
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

import torch
from safetensors import SafetensorError, safe_open

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
    reported,
    weight_files,
)
from mtplx.models.dequantise import PLAIN, is_known, settings_of
from mtplx.models.families import family_of, mtp_layers, promised_layers, text_settings

MtpKind = Literal["native", "attached", "missing", "none"]
"""Layers in the model's own file; a head beside it; promised by the config and not there; none."""

_GGUF_PROMISE = "nextn_predict_layers"

_TORCH_NAMES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}


_PLAIN = frozenset(_TORCH_NAMES[kind] for kind in PLAIN)


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a weight file, by its header.

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


@dataclass(frozen=True)
class MtpLayers:
    """The MTP layers that could draft for a model.

    Attributes:
        kind: where they are; see `MtpKind`.
        layers: how many there are, or for `missing` how many the config promises.
        parameters: stored in them.
        bytes: of their tensors.
        where: file or directory they lie in; None if there are none.
        depth: tokens per cycle that an attached head recommends, else None.
        usable: whether this version drafts with them.
    """

    kind: MtpKind
    layers: int = 0
    parameters: int = 0
    bytes: int = 0
    where: str | None = None
    depth: int | None = None
    usable: bool = False


@dataclass(frozen=True)
class Inspection:
    """What `inspect` found. Unknown numbers are None.

    Attributes:
        name: what the user called it.
        path: where it lies.
        format: of the weight files.
        architecture: class or family name, as the checkpoint states it.
        parameters: stored in all its files but an attached head's; tied weights count once.
        bytes: of all tensors.
        dtypes: parameters by the type they are stored in.
        layers: of the trunk, without MTP layers.
        context: tokens of prompt and answer together that it can be run with here; as the
            checkpoint states it if it does not run.
        chat_template: whether it has one.
        eos_token_ids: tokens that end an answer.
        sampling: the settings that the checkpoint itself asks for.
        mtp: its MTP layers.
        problems: what keeps it from running here, one line each; empty if it runs.
        notes: what else is good to know.
    """

    name: str
    path: str
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
    mtp: MtpLayers
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def runs(self) -> bool:
        """Whether nothing is known that keeps it from running on this machine."""
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "runs": self.runs}


def inspect(
    model: str | os.PathLike[str], head: str | os.PathLike[str] | None = None
) -> Inspection:
    """Look at a model without reading its weights.

    Args:
        model: a built-in name, a directory, a `.gguf` file or a hub id, which is downloaded first.
        head: directory of an attached head to look at beside it.
    Raises:
        MtplxError: there is no such model, or its files are damaged.
    """
    checkpoint = locate(model)
    facts = _gguf_facts(checkpoint) if checkpoint.is_gguf else _directory_facts(checkpoint)
    directory = locate_head(head) if head is not None else checkpoint.head
    mtp = _native_layers(checkpoint, facts)
    problems, notes = [], []
    try:
        trunk = _trunk_without_weights(checkpoint)
    except MtplxError as error:
        trunk = None
        problems.append(str(error))
    if directory is not None:
        mtp, complaint = _attached_head(directory, trunk, facts.layers or 0)
        if complaint:
            problems.append(complaint)
    if mtp.kind == "missing":
        notes.append(
            f"config promises {mtp.layers} MTP layer(s), but the weight files hold none: "
            "it runs without drafting"
        )
    elif mtp.kind == "native" and not mtp.usable:
        notes.append("its MTP layers are of a kind that is not run yet: it runs without drafting")
    elif mtp.kind == "none":
        notes.append("it has no MTP layers; `--head` attaches a trained head")
    if facts.quantisation:
        how = (
            " and are read as plain ones"
            if facts.dequantised
            else "; whether transformers can read them on this machine shows when they are loaded"
        )
        notes.append(f"its weights are stored quantised ({facts.quantisation}){how}")
    context = facts.context
    if trunk is not None:
        context = trunk.context
        if _runs_by_kernels(trunk.model):
            context = min(context, trunk.narrowest)
        if facts.context is not None and context < facts.context:
            notes.append(
                f"it is stated to read {facts.context:,} tokens; beyond {context:,} a sliding "
                "window or another rotary scaling would act, which is not run here yet"
            )
        if shortage := _memory_shortage(trunk.model):
            problems.append(shortage)
    dtypes: Counter[str] = Counter()
    for tensor in facts.tensors.values():
        dtypes[tensor.dtype] += tensor.parameters
    chat_template, defaults = False, GenerationDefaults((), {})
    try:
        chat_template = bool(load_tokenizer(checkpoint).chat_template)
        defaults = generation_defaults(checkpoint)
    except MtplxError as error:
        problems.append(str(error))
    return Inspection(
        name=checkpoint.name,
        path=str(checkpoint.path),
        format="gguf" if checkpoint.is_gguf else "safetensors",
        architecture=facts.architecture,
        parameters=sum(dtypes.values()),
        bytes=sum(tensor.bytes for tensor in facts.tensors.values()),
        dtypes=dict(dtypes.most_common()),
        layers=facts.layers,
        hidden_size=facts.hidden_size,
        vocab_size=facts.vocab_size,
        context=context,
        chat_template=chat_template,
        eos_token_ids=defaults.eos_token_ids,
        sampling=defaults.sampling,
        mtp=mtp,
        problems=tuple(problems),
        notes=tuple(notes),
    )


# --- what the files say ----------------------------------------------------------------------


@dataclass(frozen=True)
class _Facts:
    """What either format states about itself."""

    architecture: str
    model_type: str
    layers: int | None
    hidden_size: int | None
    vocab_size: int | None
    context: int | None
    promised: int
    quantisation: str | None
    dequantised: bool
    tensors: Mapping[str, StoredTensor]


def _directory_facts(checkpoint: Checkpoint) -> _Facts:
    config = json.loads((checkpoint.path / "config.json").read_text(encoding="utf-8"))
    text = text_settings(config)
    quantisation = settings_of(config)
    model_type = str(text.get("model_type"))
    return _Facts(
        architecture=next(iter(config.get("architectures") or ()), model_type),
        model_type=model_type,
        layers=text.get("num_hidden_layers"),
        hidden_size=text.get("hidden_size"),
        vocab_size=text.get("vocab_size"),
        context=text.get("max_position_embeddings"),
        promised=promised_layers(config),
        quantisation=quantisation.get("quant_method", "of an unnamed kind")
        if quantisation
        else None,
        dequantised=is_known(quantisation),
        tensors={
            name: tensor
            for file in weight_files(checkpoint.path)
            for name, tensor in read_header(file).items()
        },
    )


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
        name: StoredTensor(
            tuple(entry["shape"]),
            _TORCH_NAMES.get(entry["dtype"], entry["dtype"].lower()),
            entry["data_offsets"][1] - entry["data_offsets"][0],
        )
        for name, entry in header.items()
    }


def _gguf_facts(checkpoint: Checkpoint) -> _Facts:
    file = checkpoint.gguf_file
    family = file.architecture

    def number(key: str) -> int | None:
        value = file.metadata.get(f"{family}.{key}")
        # Some families state a list, one number for each layer.
        return value if isinstance(value, int) else None

    promised = number(_GGUF_PROMISE) or 0
    blocks = number("block_count")
    known = gguf_families.FAMILIES.get(family)
    embedding = file.tensors.get("token_embd.weight")
    return _Facts(
        architecture=family,
        model_type=known.model_type if known else family,
        # llama.cpp counts MTP layers as blocks.
        layers=None if blocks is None else blocks - promised,
        hidden_size=number("embedding_length"),
        vocab_size=embedding.shape[0] if embedding else number("vocab_size"),
        context=number("context_length"),
        promised=promised,
        quantisation=None,
        dequantised=False,
        tensors={
            name: StoredTensor(tensor.shape, tensor.kind.name, tensor.data.nbytes)
            for name, tensor in file.tensors.items()
        },
    )


# --- MTP layers ------------------------------------------------------------------------------


def _native_layers(checkpoint: Checkpoint, facts: _Facts) -> MtpLayers:
    """The MTP layers in the model's own files."""
    family = family_of(facts.model_type)
    found = mtp_layers(facts.tensors, facts.layers, family)
    if not found:
        return MtpLayers("missing", facts.promised) if facts.promised else MtpLayers("none")
    tensors = [facts.tensors[name] for names in found.values() for name in names]
    return MtpLayers(
        kind="native",
        layers=len(found),
        parameters=sum(tensor.parameters for tensor in tensors),
        bytes=sum(tensor.bytes for tensor in tensors),
        where=str(checkpoint.path),
        usable=family is not None
        and (
            not facts.quantisation
            or facts.dequantised
            or all(tensor.dtype in _PLAIN for tensor in tensors)
        ),
    )


def _attached_head(
    directory: Path, trunk: Any | None, trunk_layers: int
) -> tuple[MtpLayers, str | None]:
    """A head's size and depth, and why it cannot be attached, if it cannot."""
    from mtplx.drafters.attached import AttachedHead
    from mtplx.models.eagle3 import load_head
    from mtplx.models.head_files import read_tensors, weights_file

    tensors = read_tensors(weights_file(directory), meta=True).values()
    depth, complaint = None, None
    try:
        head = load_head(directory, trunk_layers, meta=True)
        depth = head.config.depth
        if trunk is not None:
            AttachedHead(head, trunk)
    except MtplxError as error:
        complaint = str(error)
    found = MtpLayers(
        kind="attached",
        layers=1,
        parameters=sum(tensor.numel() for tensor in tensors),
        bytes=sum(tensor.nbytes for tensor in tensors),
        where=str(directory),
        depth=depth,
        usable=complaint is None and trunk is not None,
    )
    return found, complaint


# --- whether it runs here --------------------------------------------------------------------


def _trunk_without_weights(checkpoint: Checkpoint) -> Any:
    """The trunk as loading would build it, on the meta device.

    Raises:
        MtplxError: what loading would raise before it reads weights.
    """
    from mtplx.models.trunk import Trunk

    outline = load_outline(checkpoint)
    with reported(checkpoint):
        return Trunk(outline)


def _runs_by_kernels(model: Any) -> bool:
    from mtplx import kernels
    from mtplx.llm import pick_device
    from mtplx.models.fused import misfit

    on_cpu = pick_device(None).type == "cpu" and kernels.find() is not None
    return on_cpu and misfit(model) is None


def _memory_shortage(model: Any) -> str | None:
    """That the weights do not fit into this machine's memory, if they do not."""
    from mtplx.llm import pick_device, pick_dtype

    device = pick_device(None)
    dtype = pick_dtype(None, device, lambda: model)
    need = sum(parameter.numel() for parameter in model.parameters()) * dtype.itemsize
    if device.type == "cuda":
        have, place = torch.cuda.get_device_properties(device).total_memory, "GPU"
    else:
        have, place = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), "machine"
    if need <= have:
        return None
    return (
        f"its weights need {need / 1e9:.1f} GB in {str(dtype).removeprefix('torch.')}; "
        f"this {place} has {have / 1e9:.1f} GB of memory"
    )
