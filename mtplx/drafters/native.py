"""A checkpoint's own MTP layers as a drafter's head.

Depths beyond the number of layers come from feeding the last one its own output.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

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
from mtplx.models.mixers import over_slots
from mtplx.models.mtp import MtpLayers
from mtplx.models.slots import SlotCache, Span
from mtplx.models.trunk import Trunk, TrunkOutput

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
        project = _projection(trunk)
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
        if not mtp_layers(checkpoint.gguf_file.tensors, trunk.layers):
            return None, ()
        return None, ("nothing is drafted: the MTP layers of a GGUF file are not run yet",)
    config = json.loads((checkpoint.path / "config.json").read_text(encoding="utf-8"))
    kind = trunk.config.model_type
    family = family_of(kind)
    files = _tensor_files(checkpoint.path)
    layers = mtp_layers(files, trunk.layers, family)
    # What is written counts: transformers' config classes say 1 where nothing is.
    promised = promised_layers(config)
    if not layers:
        if not promised:
            return None, ()
        return None, (
            f"nothing is drafted: config.json promises {promised} MTP layer(s), "
            "but the weight files hold none",
        )
    if family is None:
        return None, (f"nothing is drafted: the MTP layers of a {kind} model are not run yet",)
    if "quantization_config" in config:
        return None, (
            "nothing is drafted: the MTP layers of a quantised checkpoint are not run yet; "
            "its unquantised form has them",
        )
    own = {name: files[name] for names in layers.values() for name in names}
    head = _load(checkpoint, trunk, family, own)
    if promised == head.layers:
        return head, ()
    named = f"promises {promised} MTP layer(s)" if promised else "names no MTP layers"
    return head, (
        f"config.json {named}, and the weight files hold {head.layers}: what they hold drafts",
    )


def _tensor_files(directory: Path) -> dict[str, Path]:
    """The file that holds each of a directory's tensors."""
    files: dict[str, Path] = {}
    for file in weight_files(directory):
        with safe_open(file, framework="pt") as tensors:
            files.update(dict.fromkeys(tensors.keys(), file))
    return files


def _load(
    checkpoint: Checkpoint, trunk: Trunk, family: Family, files: Mapping[str, Path]
) -> NativeHead:
    """The head made of these tensors, all of them and no others.

    transformers passes over tensors that it has no place for, and draws at random what is missing;
    here either is an error.
    """
    places = {name: family.translate(name, trunk.layers) for name in files}
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
    with reported(checkpoint), ExitStack() as stack:
        opened = {
            file: stack.enter_context(safe_open(file, framework="pt"))
            for file in sorted(set(files.values()))
        }
        tensors: dict[str, Any] = {}
        copies: dict[tuple[str, int], Tensor] = {}
        for name, (layer, ours) in names.items():
            part = ours.split(".")[2]
            if part == "unused":
                continue
            stored = opened[files[name]].get_slice(name)
            if part in _COPIES:
                copies[part, layer] = stored[:].to(trunk.device, trunk.dtype)
            else:
                tensors[ours] = stored
        with ContextManagers(MtpLayers.get_init_context(trunk.dtype, False, False, None)):
            model = MtpLayers(family, trunk.model, joints, blocks, bias)
        if over_slots(model):
            raise MtplxError(
                f"{checkpoint.path}: its MTP layer keeps a state, which is not run; take a "
                f"{trunk.config.model_type} checkpoint whose MTP layer is of attention"
            )
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
        listed = [
            theirs.get(name) or family.published(name, trunk.layers, blocks) for name in missed
        ]
        _require(checkpoint, trunk, problem, listed)
    # The published copies equal the trunk's; a layer that was trained further has its own.
    shared = {"embedding": trunk.embed, "output": trunk.model.get_output_embeddings()}
    own = {key: tensor for key, tensor in copies.items() if not _is_made_of(shared[key[0]], tensor)}
    return NativeHead(model.eval().requires_grad_(False), family, trunk, own)


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


def _require(checkpoint: Checkpoint, trunk: Trunk, problem: str, names: list[str]) -> None:
    """That there are no such tensors."""
    if names:
        raise MtplxError(
            f"{checkpoint.path}: its MTP layer {problem}: {', '.join(sorted(names))}; take a "
            f"{trunk.config.model_type} checkpoint as it was published"
        )


def _is_made_of(layer: Any, weight: Tensor) -> bool:
    """Whether this is a layer's weight, as the layer keeps it."""
    if isinstance(layer, KernelLinear):
        return torch.equal(layer.data, weight.bfloat16())
    return torch.equal(layer.weight, weight)
