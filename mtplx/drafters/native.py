"""A checkpoint's own MTP layers as a drafter's head.

Depths beyond the number of layers come from feeding the last one its own output.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn import functional as F
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils.generic import ContextManagers

from mtplx.errors import MtplxError
from mtplx.models.checkpoint import Checkpoint, reported, weight_files
from mtplx.models.families import Family, family_of, mtp_layers, promised_layers
from mtplx.models.linear import KernelLinear
from mtplx.models.mtp import MtpLayers
from mtplx.models.slots import SlotCache, Span
from mtplx.models.trunk import Trunk, TrunkOutput

GGUF_PROMISE = "nextn_predict_layers"
"""What a GGUF file's header calls its number of MTP layers, behind the architecture's name."""

_COPIES = ("embedding", "output")
"""Parts that are copies of the trunk's, or were trained further."""


class NativeHead:
    """MTP layers over the trunk's embedding, rotary positions and output head.

    At position i a layer computes, in the notation of DeepSeek-V3's report (arXiv 2412.19437, 2.2),

        h'_i = M [RMSNorm(h_i); RMSNorm(Emb(t_{i+1}))]

    runs its decoder layer over h'_1..i with the rotary position of t_{i+1}, and applies its own
    last norm. What comes out predicts t_{i+2} through the output head, and is what the next layer
    is fed at the same position, joined with t_{i+2}; behind the last layer it stands for h_{i+1},
    and the last layer goes on with it.

    The report leaves open whether h_i is taken before or after a last norm. Where a family does not
    say otherwise it is after it throughout: the trunk's last norm for the first draft, the MTP
    layer's own for those behind it, as in transformers and in Megatron-LM, which trains such
    layers. A second RMSNorm undoes the first one's scale but not its weights, so the two differ.
    """

    draft_ids: Tensor | None = None

    def __init__(
        self,
        model: MtpLayers,
        family: Family,
        trunk: Trunk,
        copies: Mapping[tuple[str, int], Tensor] | None = None,
    ) -> None:
        """
        Args:
            model: the layers.
            family: whose they are.
            trunk: whose embedding and output head they share.
            copies: by part (`embedding`, `output`) and layer, weights that differ from the trunk's.
        """
        copies = copies or {}
        self.model, self.family = model, family
        self.layers = model.count
        self.taps: tuple[int, ...] = (trunk.layers,) if family.before_norm else ()
        trunk.tap(self.taps)
        self.chained = family.chained
        embed: Callable[[Tensor], Tensor] = trunk.embed
        project: Callable[[Tensor], Tensor] = trunk.model.get_output_embeddings()
        self.embeds = [
            partial(F.embedding, weight=copies["embedding", k])
            if ("embedding", k) in copies
            else embed
            for k in range(self.layers)
        ]
        self.projects = [
            partial(F.linear, weight=copies["output", k]) if ("output", k) in copies else project
            for k in range(self.layers)
        ]
        self._trunk = trunk

    def features(self, output: TrunkOutput) -> Tensor:
        if not self.family.before_norm:
            return output.hidden
        assert output.aux is not None, "the trunk must tap its last layer"
        return output.aux

    def new_cache(self, capacity: int) -> SlotCache:
        return SlotCache(capacity)

    @torch.inference_mode()
    def step(
        self, tokens: Tensor, hidden: Tensor, span: Span, cache: SlotCache, layer: int = 0
    ) -> Tensor:
        cache.span = span
        result: Tensor = self.model(
            layer,
            self.embeds[layer](tokens),
            hidden,
            # The slot is that of the hidden state, the rotary position that of the token.
            span.positions + 1,
            self._trunk.mask(self.model.kind(layer), span, self.model.config),
            cache,
        )
        norm = self.model.joint(layer).norm
        return result if norm is None or self.family.feeds_raw else norm(result)

    @torch.inference_mode()
    def logits(self, hidden: Tensor, layer: int = 0) -> Tensor:
        norm = self.model.joint(layer).norm
        if norm is not None and self.family.feeds_raw:
            hidden = norm(hidden)
        return self.projects[layer](hidden)


Status = Literal["works", "loads unverified", "heads missing", "unknown layout", "none"]
"""What becomes of a checkpoint's MTP layers. They are made into a head where they are of a known
family: `works`; or `loads unverified`, where the config promises another number of them than the
files hold, which no family's proof covers. `heads missing`: the config promises some, and the files
hold none. `unknown layout`: they are called, shaped or stored in no way that is known here."""


@dataclass(frozen=True)
class NativeLayers:
    """What a checkpoint's config and the names of its tensors say of its MTP layers.

    Attributes:
        status: see Status.
        tensors: the names of each layer's, by its number, from 0 on.
        promised: how many layers the config names.
        family: theirs, where its layers are run.
        notes: what the user should know.
    """

    status: Status
    tensors: Mapping[int, Sequence[str]]
    promised: int
    family: Family | None = None
    notes: tuple[str, ...] = ()


def native_layers(
    checkpoint: Checkpoint, names: Iterable[str], trunk_layers: int | None
) -> NativeLayers:
    """The MTP layers among tensors with these names, and what becomes of them.

    Args:
        checkpoint: whose they are; its config is read.
        names: of all its tensors.
        trunk_layers: see `families.mtp_layers`.
    """
    kind, promised, unread = _declared(checkpoint)
    family = family_of(kind)
    tensors = mtp_layers(names, trunk_layers, family)
    held = len(tensors)
    if not held and not promised:
        return NativeLayers("none", {}, 0)
    where = "its header" if checkpoint.is_gguf else "config.json"
    if not held:
        note = f"{where} promises {promised} MTP layer(s), but the weight files hold none"
        return NativeLayers("heads missing", {}, promised, family, (f"nothing is drafted: {note}",))
    if unread is None and family is None:
        unread = f"the MTP layers of a {kind} model are not run yet"
    if unread:
        note = f"nothing is drafted: {unread}"
        return NativeLayers("unknown layout", tensors, promised, family, (note,))
    # What is written counts: transformers' config classes say 1 where nothing is.
    if promised == held:
        return NativeLayers("works", tensors, promised, family)
    named = f"promises {promised} MTP layer(s)" if promised else "names no MTP layers"
    note = f"{where} {named}, and the weight files hold {held}: what they hold drafts"
    status: Status = "loads unverified" if promised else "works"
    return NativeLayers(status, tensors, promised, family, (note,))


def _declared(checkpoint: Checkpoint) -> tuple[str, int, str | None]:
    """The trunk's type, how many layers are promised, and why they cannot be read, if so."""
    if checkpoint.is_gguf:
        file = checkpoint.gguf_file
        promised = file.metadata.get(f"{file.architecture}.{GGUF_PROMISE}")
        kind, promised = file.architecture, promised if isinstance(promised, int) else 0
        return kind, promised, "the MTP layers of a GGUF file are not run yet"
    config = json.loads((checkpoint.path / "config.json").read_text(encoding="utf-8"))
    # A model of text and images keeps its language model's type in a config of its own.
    kind = (config.get("text_config") or {}).get("model_type") or config.get("model_type")
    unread = None
    if "quantization_config" in config:
        unread = (
            "the MTP layers of a quantised checkpoint are not run yet; its unquantised form has "
            "them"
        )
    return str(kind), promised_layers(config), unread


def load_native_head(
    checkpoint: Checkpoint, trunk: Trunk
) -> tuple[NativeHead | None, tuple[str, ...]]:
    """The head that a checkpoint carries, and what the user should know about it.

    No head is an answer too, with a note where the config promises one or the files hold one that
    is not run here. Nothing is ever drafted from weights that the files do not hold.

    Raises:
        MtplxError: the tensors of the MTP layers are not those that the family has.
    """
    if checkpoint.is_gguf:
        return make_native_head(checkpoint, checkpoint.gguf_file.tensors, trunk)
    with ExitStack() as stack:
        stored: dict[str, Any] = {}
        for file in weight_files(checkpoint.path):
            opened = stack.enter_context(safe_open(file, framework="pt"))
            stored |= {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
        return make_native_head(checkpoint, stored, trunk)


def make_native_head(
    checkpoint: Checkpoint, stored: Mapping[str, Any], trunk: Trunk
) -> tuple[NativeHead | None, tuple[str, ...]]:
    """The same of tensors at hand.

    Beside a trunk on the meta device, and of tensors there, the head is one too: that shows whether
    it could be loaded without reading anything.

    Args:
        checkpoint: whose they are.
        stored: all its tensors by name, or what gives them when it is sliced.
        trunk: of the checkpoint.
    """
    found = native_layers(checkpoint, stored, trunk.layers)
    if found.status not in ("works", "loads unverified"):
        return None, found.notes
    assert found.family is not None
    own = {name: stored[name] for names in found.tensors.values() for name in names}
    return _load(checkpoint, trunk, found.family, own), found.notes


def _load(
    checkpoint: Checkpoint, trunk: Trunk, family: Family, stored: Mapping[str, Any]
) -> NativeHead:
    """The head made of these tensors, all of them and no others.

    transformers passes over tensors that it has no place for, and draws at random what is missing;
    here either is an error.
    """
    places = {name: family.translate(name, trunk.layers) for name in stored}
    _require(
        checkpoint,
        trunk,
        "has no place for these of its tensors",
        [name for name, at in places.items() if not at],
    )
    names = {name: place for name, place in places.items() if place}
    blocks = 1 + max(
        (_number(ours) for _, ours in names.values() if ours.startswith("blocks.")), default=0
    )
    joints = 1 + max(
        (_number(ours) for _, ours in names.values() if ours.startswith("joints.")), default=0
    )
    bias = any(ours.endswith(".join.bias") for _, ours in names.values())
    with reported(checkpoint):
        tensors: dict[str, Any] = {}
        copies: dict[tuple[str, int], Tensor] = {}
        for name, (layer, ours) in names.items():
            part = ours.split(".")[2]
            if part in _COPIES:
                copies[part, layer] = stored[name][:].to(trunk.device, trunk.dtype)
            else:
                tensors[ours] = stored[name]
        with ContextManagers(MtpLayers.get_init_context(trunk.dtype, False, False, None)):
            model = MtpLayers(family, trunk.model, joints, blocks, bias)
        # Those of the trunk, as a loaded one keeps them; they say how experts are put together.
        conversions = getattr(trunk.model, "_weight_conversions", None)
        if conversions is None:
            conversions = get_model_conversion_mapping(trunk.model)
        report, _ = convert_and_load_state_dict_in_model(
            model=model,
            state_dict=tensors,
            load_config=LoadStateDictConfig(
                weight_mapping=conversions,
                device_map={"": trunk.device},
                dtype=trunk.dtype,
                dtype_plan=trunk.model._get_dtype_plan(trunk.dtype),
            ),
        )
    theirs = {ours: name for name, (_, ours) in names.items()}
    wrong = {name for name, *_ in report.mismatched_keys} | set(report.conversion_errors)
    for problem, missed in (
        ("has no place for these of its tensors", report.unexpected_keys),
        ("lacks these tensors, or has them in other shapes", report.missing_keys | wrong),
    ):
        listed = [theirs.get(name) or family.published(name, trunk.layers) for name in missed]
        _require(checkpoint, trunk, problem, listed)
    # The published copies equal the trunk's; a layer that was trained further has its own.
    shared = {"embedding": trunk.embed, "output": trunk.model.get_output_embeddings()}
    own = {key: tensor for key, tensor in copies.items() if not _is_made_of(shared[key[0]], tensor)}
    return NativeHead(model.eval().requires_grad_(False), family, trunk, own)


def _number(name: str) -> int:
    return int(name.split(".")[1])


def _require(checkpoint: Checkpoint, trunk: Trunk, problem: str, names: list[str]) -> None:
    """That there are no such tensors."""
    if names:
        raise MtplxError(
            f"{checkpoint.path}: its MTP layer {problem}: {', '.join(sorted(names))}; take a "
            f"{trunk.config.model_type} checkpoint as it was published"
        )


def _is_made_of(layer: Any, weight: Tensor) -> bool:
    """Whether this is a layer's weight, as the layer keeps it; as published, it is."""
    if weight.is_meta:
        return True
    if isinstance(layer, KernelLinear):
        return torch.equal(layer.data, weight.bfloat16())
    return torch.equal(layer.weight, weight)
