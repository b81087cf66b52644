"""A checkpoint's own MTP layers as a drafter's head.

Depths beyond the number of layers come from feeding the last one its own output.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.utils.generic import ContextManagers

from mtplx.drafters.mtp import Head
from mtplx.errors import MtplxError
from mtplx.models import gguf_families, gguf_weights
from mtplx.models.blocks import Blocks
from mtplx.models.checkpoint import Checkpoint, reported, stored_tensors
from mtplx.models.dequantise import PLAIN, settings_of
from mtplx.models.families import Family, family_of, mtp_layers, promised_layers, text_settings
from mtplx.models.handing_over import fill
from mtplx.models.linear import KernelLinear, hand_over
from mtplx.models.mixers import over_slots
from mtplx.models.mtp import MtpLayers
from mtplx.models.rounding import kept_in, rounded
from mtplx.models.slots import SlotCache, Span
from mtplx.models.trunk import Trunk, TrunkOutput

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
        return _of_gguf(checkpoint, trunk)
    config = json.loads((checkpoint.path / "config.json").read_text(encoding="utf-8"))
    # As published, which need not be the trunk's: some go by another type's class.
    kind = str(text_settings(config).get("model_type"))
    family = family_of(kind)
    with stored_tensors(checkpoint) as tensors:
        layers = mtp_layers(tensors, trunk.layers, family)
        # What is written counts: transformers' config classes say 1 where nothing is.
        promised = promised_layers(config)
        if not layers:
            return None, _broken_promise("config.json", promised)
        if family is None:
            return None, (f"nothing is drafted: the MTP layers of a {kind} model are not run yet",)
        own = {name: tensors[name] for names in layers.values() for name in names}
        if any(tensor.get_dtype() not in PLAIN for tensor in own.values()):
            method = settings_of(config).get("quant_method", "an unnamed")
            return None, (
                f"nothing is drafted: the MTP layers are quantised in {method} format, which is "
                "not read here; the model's unquantised checkpoint has them",
            )
        with reported(checkpoint):
            head = _load(checkpoint, trunk, family, own)
    return head, _difference("config.json", promised, head.layers)


def _of_gguf(checkpoint: Checkpoint, trunk: Trunk) -> tuple[NativeHead | None, tuple[str, ...]]:
    file = checkpoint.gguf_file
    promised = gguf_families.promised_layers(file)
    if not mtp_layers(file.tensors, trunk.layers):
        return None, _broken_promise("its header", promised)
    known = gguf_families.FAMILIES.get(file.architecture)
    if known is None or known.mtp is None:
        return None, (
            f"nothing is drafted: the MTP layers of a {file.architecture} GGUF file are not run "
            "yet",
        )
    with reported(checkpoint):
        tensors = gguf_weights.mtp_weights(file, trunk.config, trunk.dtype)
        head = _load(checkpoint, trunk, known.mtp, tensors)
    return head, _difference("its header", promised, head.layers)


def _broken_promise(where: str, promised: int) -> tuple[str, ...]:
    """What to say where there are no MTP layers."""
    if not promised:
        return ()
    return (
        f"nothing is drafted: {where} promises {promised} MTP layer(s), but the weight files "
        "hold none",
    )


def _difference(where: str, promised: int, held: int) -> tuple[str, ...]:
    """What to say where there are as many, or not."""
    if promised == held:
        return ()
    named = f"promises {promised} MTP layer(s)" if promised else "names no MTP layers"
    return (f"{where} {named}, and the weight files hold {held}: what they hold drafts",)


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
    blocks = 1 + max(
        (_number(ours) for _, ours in names.values() if ours.startswith("blocks.")), default=0
    )
    joints = 1 + max(
        (_number(ours) for _, ours in names.values() if ours.startswith("joints.")), default=0
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


def _number(name: str) -> int:
    return int(name.split(".")[1])


def _require(checkpoint: Checkpoint, problem: str, names: list[str]) -> None:
    """That there are no such tensors."""
    if names:
        raise MtplxError(
            f"{checkpoint.path}: its MTP layer {problem}: {', '.join(sorted(names))}; take the "
            "checkpoint as it was published"
        )


def _is_made_of(layer: Any, weight: Tensor) -> bool:
    """Whether this is a layer's weight, as the layer keeps it."""
    own = layer.data if isinstance(layer, KernelLinear) else getattr(layer, "weight", None)
    return own is not None and torch.equal(own, weight.to(own.dtype))
