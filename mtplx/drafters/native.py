"""A checkpoint's own MTP layers as a drafter's head.

Depths beyond the number of layers come from feeding the last one its own output.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.utils.generic import ContextManagers

from mtplx.drafters.mtp import Head
from mtplx.errors import MtplxError
from mtplx.models import gguf_families, gguf_weights
from mtplx.models.blocks import Blocks
from mtplx.models.checkpoint import Checkpoint, plain_tensors, reported, weight_files
from mtplx.models.dequantise import PLAIN, settings_of
from mtplx.models.families import Family, family_of, mtp_layers, promised_layers, text_settings
from mtplx.models.handing_over import fill
from mtplx.models.linear import KernelLinear, hand_over
from mtplx.models.mixers import over_slots
from mtplx.models.mtp import MtpLayers
from mtplx.models.rounding import kept_in, rounded
from mtplx.models.slots import SlotCache, Span
from mtplx.models.trunk import Trunk, TrunkOutput

TOLD = 8
"""Tensors that an error names."""

_COPIES = ("embedding", "output")
"""Parts that are copies of the trunk's, or were trained further."""


class NativeHead(Head):
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
        copies: Mapping[tuple[str, int], Callable[[Tensor], Tensor]] | None = None,
    ) -> None:
        """
        Args:
            model: the layers.
            family: whose they are.
            trunk: whose embedding and output head they share.
            copies: by part (`embedding`, `output`) and layer, those that differ from the trunk's.
        """
        copies = copies or {}
        self.model, self.family = model, family
        self.layers = model.count
        self.taps: tuple[int, ...] = (trunk.layers,) if family.before_norm else ()
        trunk.tap(self.taps)
        self.chained = family.chained
        embed: Callable[[Tensor], Tensor] = trunk.embed
        project = _projection(trunk)
        self.embeds = [copies.get(("embedding", k), embed) for k in range(self.layers)]
        self.projects = [copies.get(("output", k), project) for k in range(self.layers)]
        self._trunk = trunk

    def features(self, output: TrunkOutput) -> Tensor:
        states = output.aux if self.family.before_norm else output.hidden
        assert states is not None, "the trunk must tap its last layer"
        # The kernels' are float32.
        return states.to(self.model.dtype)

    def new_cache(self, capacity: int) -> SlotCache:
        return SlotCache(capacity)

    @torch.inference_mode()
    def step(
        self, tokens: Tensor, hidden: Tensor, span: Span, cache: SlotCache, layer: int = 0
    ) -> Tensor:
        cache.span = span
        result: Tensor = self.model(
            layer,
            self.embeds[layer](tokens).to(hidden.dtype),
            hidden,
            span.positions,
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
    """What a checkpoint's config and its tensors' names and types say of its MTP layers.

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
    checkpoint: Checkpoint, stored: Mapping[str, Any], trunk_layers: int | None
) -> NativeLayers:
    """The MTP layers among a checkpoint's tensors, and what becomes of them.

    Args:
        checkpoint: whose they are; its config is read.
        stored: all its tensors by name, made plain as far as they can be; none is read.
        trunk_layers: see `families.mtp_layers`.
    """
    if checkpoint.is_gguf:
        file = checkpoint.gguf_file
        known = gguf_families.FAMILIES.get(file.architecture)
        family = None if known is None else known.mtp
        tensors = mtp_layers(stored, trunk_layers)
        where, promised = "its header", gguf_families.promised_layers(file)
        kind, unread = f"{file.architecture} GGUF file", None
    else:
        config = json.loads((checkpoint.path / "config.json").read_text(encoding="utf-8"))
        # As published, which need not be the trunk's: some go by another type's class.
        model_type = str(text_settings(config).get("model_type"))
        family = family_of(model_type)
        tensors = mtp_layers(stored, trunk_layers, family)
        # What is written counts: transformers' config classes say 1 where nothing is.
        where, promised = "config.json", promised_layers(config)
        kind, unread = f"{model_type} model", _unread(config, stored, tensors)
    if not tensors and not promised:
        return NativeLayers("none", {}, 0)
    if not tensors:
        note = f"{where} promises {promised} MTP layer(s), but the weight files hold none"
        note += _beside(checkpoint)
        return NativeLayers("heads missing", {}, promised, family, (f"nothing is drafted: {note}",))
    if family is None:
        unread = f"the MTP layers of a {kind} are not run yet"
    if unread:
        note = f"nothing is drafted: {unread}"
        return NativeLayers("unknown layout", tensors, promised, family, (note,))
    held = len(tensors)
    if promised == held:
        return NativeLayers("works", tensors, promised, family)
    named = f"promises {promised} MTP layer(s)" if promised else "names no MTP layers"
    note = f"{where} {named}, and the weight files hold {held}: what they hold drafts"
    status: Status = "loads unverified" if promised else "works"
    return NativeLayers(status, tensors, promised, family, (note,))


def _beside(checkpoint: Checkpoint) -> str:
    """What to add where a weight file may have been overlooked."""
    if checkpoint.is_gguf or checkpoint.remote:
        return ""
    listed = {file.name for file in weight_files(checkpoint.path)}
    others = sorted({file.name for file in checkpoint.path.glob("*.safetensors")} - listed)
    return f" ({', '.join(others)} beside them is not in their index)" if others else ""


def _unread(
    config: Mapping[str, Any], stored: Mapping[str, Any], layers: Mapping[int, Sequence[str]]
) -> str | None:
    """Why the tensors of these layers cannot be read, if they cannot."""
    own = (stored[name] for names in layers.values() for name in names)
    if all(tensor.get_dtype() in PLAIN for tensor in own):
        return None
    method = settings_of(config).get("quant_method", "an unnamed")
    return (
        f"the MTP layers are quantised in {method} format, which is not read here; the model's "
        "unquantised checkpoint has them"
    )


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
    with plain_tensors(checkpoint) as tensors:
        return make_native_head(checkpoint, tensors, trunk)


def make_native_head(
    checkpoint: Checkpoint, stored: Mapping[str, Any], trunk: Trunk
) -> tuple[NativeHead | None, tuple[str, ...]]:
    """The same of tensors at hand.

    Beside a trunk on the meta device, and of tensors there, the head is one too: that shows whether
    it could be loaded without reading anything.

    Args:
        checkpoint: whose they are.
        stored: all its tensors by name, made plain as far as they can be: what `[:]` reads.
        trunk: of the checkpoint.
    """
    found = native_layers(checkpoint, stored, trunk.layers)
    if found.status not in ("works", "loads unverified"):
        return None, found.notes
    assert found.family is not None
    with reported(checkpoint):
        if checkpoint.is_gguf:
            # Several of a file's may make up one.
            own: Mapping[str, Any] = gguf_weights.mtp_weights(
                checkpoint.gguf_file, trunk.config, trunk.dtype, trunk.device.type == "meta"
            )
        else:
            own = {name: stored[name] for names in found.tensors.values() for name in names}
        return _load(checkpoint, trunk, found.family, own), found.notes


def _load(
    checkpoint: Checkpoint, trunk: Trunk, family: Family, stored: Mapping[str, Any]
) -> NativeHead:
    """The head made of these tensors, read or to be read by `[:]`; all of them and no others.

    Beside a trunk in few bits its linear layers are in as many.

    transformers passes over tensors that it has no place for, and draws at random what is missing;
    here either is an error.
    """
    places = {name: family.translate(name, trunk.layers) for name in stored}
    homeless = [name for name, at in places.items() if not at]
    _require(checkpoint, "has no place for these of its tensors", homeless)
    names = {name: place for name, place in places.items() if place}
    blocks, joints = (_count(checkpoint, names, kind) for kind in ("blocks", "joints"))
    twice = Counter(ours for _, ours in names.values())
    _require(
        checkpoint,
        "has these of its tensors more than once",
        [name for name, (_, ours) in names.items() if twice[ours] > 1],
    )
    bias = any(ours.endswith(".join.bias") for _, ours in names.values())
    few = kept_in(trunk.model)
    # The kernels' results are float32, and what is between them has to be as well.
    dtype = torch.float32 if few else trunk.dtype

    def take(model: Any, name: str, weight: Tensor | Blocks, bias: Tensor | None) -> None:
        assert few and isinstance(weight, Tensor)
        library, bits = few
        hand_over(model, name, library, rounded(weight, bits), bias)

    tensors: dict[str, Any] = {}
    copies: dict[tuple[str, int], Callable[[Tensor], Tensor]] = {}
    # The published copies equal the trunk's; a layer that was trained further has its own.
    shared = {"embedding": trunk.embed, "output": trunk.model.get_output_embeddings()}
    for name, (layer, ours) in names.items():
        part = ours.split(".")[2]
        if part == "unused":
            continue
        if part not in _COPIES:
            tensors[ours] = stored[name]
            continue
        weight = stored[name][:].to(trunk.device, dtype)
        if _is_made_of(shared[part], weight):
            continue
        if part == "embedding":
            copies[part, layer] = partial(F.embedding, weight=weight)
        elif few:  # as the trunk's own
            copies[part, layer] = KernelLinear(few[0], weight.bfloat16())
        else:
            copies[part, layer] = partial(F.linear, weight=weight)
    with ContextManagers(MtpLayers.get_init_context(dtype, False, False, None)):
        model = MtpLayers(family, trunk.model, joints, blocks, bias)
    if over_slots(model):
        raise MtplxError(
            f"{checkpoint.path}: its MTP layer keeps a state, which is not run; take a checkpoint "
            "whose MTP layer is of attention"
        )
    report = fill(model, tensors, trunk.model, dtype, take if few else None)
    theirs = {ours: name for name, (_, ours) in names.items()}
    wrong = {name for name, *_ in report.mismatched_keys} | set(report.conversion_errors)
    for problem, missed in (
        ("has no place for these of its tensors", report.unexpected_keys),
        ("lacks these tensors, or has them in other shapes", report.missing_keys | wrong),
    ):
        listed = [
            theirs.get(name) or family.published(name, trunk.layers, blocks) for name in missed
        ]
        _require(checkpoint, problem, listed)
    return NativeHead(model.eval().requires_grad_(False), family, trunk, copies)


def _projection(trunk: Trunk) -> Callable[[Tensor], Tensor]:
    """The trunk's output head, for states of its type."""
    output: Any = trunk.model.get_output_embeddings()
    weight = getattr(output, "weight", None)
    # Some models keep it wider than the rest.
    if isinstance(weight, Tensor) and weight.dtype != trunk.dtype:
        return lambda hidden: output(hidden.to(weight.dtype))
    project: Callable[[Tensor], Tensor] = output
    return project


def _count(checkpoint: Checkpoint, names: Mapping[str, tuple[int, str]], kind: str) -> int:
    """How many there are of a kind of modules, by the numbers in their names."""
    numbers = {
        int(ours.split(".")[1]): name
        for name, (_, ours) in names.items()
        if ours.startswith(f"{kind}.")
    }
    astray = [name for number, name in numbers.items() if number >= len(numbers)]
    _require(checkpoint, "has tensors whose numbers leave out some before them", astray)
    return max(1, len(numbers))


def _require(checkpoint: Checkpoint, problem: str, names: list[str]) -> None:
    """That there are no such tensors."""
    if names:
        listed = ", ".join(sorted(names)[:TOLD])
        more = f" and {len(names) - TOLD} more" if len(names) > TOLD else ""
        raise MtplxError(
            f"{checkpoint.path}: its MTP layer {problem}: {listed}{more}; take the checkpoint as "
            "it was published"
        )


def _is_made_of(layer: Any, weight: Tensor) -> bool:
    """Whether this is a layer's weight, as the layer keeps it; without values, it counts as one."""
    if weight.is_meta:
        return True
    own = layer.data if isinstance(layer, KernelLinear) else getattr(layer, "weight", None)
    return own is not None and torch.equal(own, weight.to(own.dtype))
