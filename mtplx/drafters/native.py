"""A checkpoint's own MTP layers, through transformers' `MtpModel`, as a drafter's head.

In the published layout (DeepSeek-V3, GLM-4 MoE) an MTP layer is one more decoder layer behind the
trunk's last, `model.layers.N` with N from `num_hidden_layers` on, and beside the decoder layer's
own tensors it holds `enorm`, `hnorm`, `eh_proj`, `shared_head` and a copy of the embedding.

Depths beyond the number of layers come from feeding the head its own output. The published
checkpoints of both families have one layer; of a checkpoint with more, the first drafts alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn import functional as F
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_layers import MtpModel
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils.generic import ContextManagers

from mtplx.drafters.mtp import Head
from mtplx.errors import MtplxError
from mtplx.models.checkpoint import Checkpoint, reported, weight_files
from mtplx.models.linear import KernelLinear
from mtplx.models.mtp_layers import mtp_layers, promised_layers
from mtplx.models.slots import SlotCache, Span
from mtplx.models.trunk import Trunk, TrunkOutput

FAMILIES = ("deepseek_v3", "glm4_moe")
"""Model types whose MTP layers are run."""

_EMBEDDING, _OUTPUT = "embed_tokens.weight", "shared_head.head.weight"


class NativeHead(Head):
    """One MTP layer over the trunk's embedding, rotary positions and output head.

    At position i it computes, in the notation of DeepSeek-V3's report (arXiv 2412.19437, 2.2.1),

        h'_i = eh_proj [enorm(Emb(t_{i+1})); hnorm(h_i)]

    runs the decoder layer over h'_1..i with the rotary position of t_{i+1}, and applies the
    layer's own last norm. What comes out predicts t_{i+2} through the output head, and is h_{i+1}
    of the next draft.

    The report leaves open whether h_i is taken before or after a last norm. Here it is after it
    throughout: the trunk's last norm for the first draft, the MTP layer's own (`shared_head.norm`)
    for those behind it, as in transformers and in Megatron-LM, which trains such layers. A second
    RMSNorm undoes the first one's scale but not its weights, so the two differ. vLLM 0.32 feeds
    GLM-4 MoE's later drafts the state before the norm; where both were measured, the normed one
    had more drafts accepted (ROCm/ATOM pull requests 1742 on GLM-5.2, 1764 on DeepSeek-R1).
    """

    taps: tuple[int, ...] = ()
    draft_ids: Tensor | None = None

    def __init__(self, model: Any) -> None:
        self.embed: Callable[[Tensor], Tensor] = model.embed_tokens
        self.project: Callable[[Tensor], Tensor] = model.shared_head
        self._layer = model.layers[0]
        self._rotary = model.rotary_emb

    def features(self, output: TrunkOutput) -> Tensor:
        return output.hidden

    def new_cache(self, capacity: int) -> SlotCache:
        return SlotCache(capacity)

    @torch.inference_mode()
    def step(self, tokens: Tensor, hidden: Tensor, span: Span, cache: SlotCache) -> Tensor:
        cache.span = span
        embeds = self.embed(tokens)
        # The slot is that of the hidden state, the rotary position that of the token.
        positions = span.positions + 1
        result: Tensor = self._layer(
            embeds,
            hidden,
            position_embeddings=self._rotary(embeds, position_ids=positions),
            attention_mask=span.mask,
            position_ids=positions,
            cache=cache,
        )
        return result

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        return self.project(hidden)


def load_native_head(
    checkpoint: Checkpoint, trunk: Trunk
) -> tuple[NativeHead | None, tuple[str, ...]]:
    """The head that a checkpoint carries, and what the user should know about it.

    No head is an answer too, with a note where the config promises one or the files hold one that
    is not run here. Nothing is ever drafted from weights that the files do not hold.

    Raises:
        MtplxError: the tensors of the MTP layer are not those that its family has.
    """
    if checkpoint.is_gguf:
        if not mtp_layers(checkpoint.gguf_file.tensors, trunk.layers):
            return None, ()
        return None, ("nothing is drafted: the MTP layers of a GGUF file are not run yet",)
    config = json.loads((checkpoint.path / "config.json").read_text(encoding="utf-8"))
    kind = config["model_type"]
    files = _tensor_files(checkpoint.path)
    layers = mtp_layers(files, trunk.layers)
    if not layers:
        # What is written counts: transformers' config classes say 1 where nothing is.
        promised = promised_layers(config)
        if not promised:
            return None, ()
        return None, (
            f"nothing is drafted: config.json promises {promised} MTP layer(s), "
            "but the weight files hold none",
        )
    if kind not in FAMILIES:
        return None, (f"nothing is drafted: the MTP layers of a {kind} model are not run yet",)
    if "quantization_config" in config:
        return None, (
            "nothing is drafted: the MTP layers of a quantised checkpoint are not run yet; "
            "its unquantised form has them",
        )
    notes: tuple[str, ...] = ()
    if len(layers) > 1:
        notes = (
            f"the checkpoint has {len(layers)} MTP layers: the first one drafts, fed its own "
            "output beyond one token",
        )
    return _load(checkpoint, trunk, {name: files[name] for name in layers[min(layers)]}), notes


def _tensor_files(directory: Path) -> dict[str, Path]:
    """The file that holds each of a directory's tensors."""
    files: dict[str, Path] = {}
    for file in weight_files(directory):
        with safe_open(file, framework="pt") as tensors:
            files.update(dict.fromkeys(tensors.keys(), file))
    return files


def _load(checkpoint: Checkpoint, trunk: Trunk, files: dict[str, Path]) -> NativeHead:
    """The head made of these tensors, all of them and no others.

    `MtpModel.from_pretrained` looks for the layer numbers of the published sizes only, and passes
    over tensors that it has no place for.
    """
    with reported(checkpoint), ExitStack() as stack:
        opened = {
            file: stack.enter_context(safe_open(file, framework="pt"))
            for file in sorted(set(files.values()))
        }
        tensors = {name: opened[file].get_slice(name) for name, file in files.items()}
        copies = {
            copy: tensors.pop(name)[:].to(trunk.device, trunk.dtype)
            for copy in (_EMBEDDING, _OUTPUT)
            for name in files
            if name.endswith(copy)
        }
        with ContextManagers(MtpModel.get_init_context(trunk.dtype, False, False, None)):
            model = MtpModel(trunk.model, 1)
        # A span's mask is for fused attention, whichever the trunk runs.
        model.set_attn_implementation("sdpa")
        report, _ = convert_and_load_state_dict_in_model(
            model=model,
            state_dict=tensors,
            load_config=LoadStateDictConfig(
                weight_mapping=model.get_weight_conversions(trunk.model),
                device_map={"": trunk.device},
                dtype=trunk.dtype,
            ),
        )
    wrong = {name for name, *_ in report.mismatched_keys} | set(report.conversion_errors)
    for problem, names in (
        ("has no place for these of its tensors", report.unexpected_keys),
        ("lacks these tensors, or has them in other shapes", report.missing_keys | wrong),
    ):
        # What belongs to no layer is the trunk's.
        if names := sorted(name for name in names if name.startswith("layers.")):
            listed = ", ".join(names).replace("layers.0.", f"model.layers.{trunk.layers}.")
            raise MtplxError(
                f"{checkpoint.path}: its MTP layer {problem}: {listed.replace('mtp_block.', '')}; "
                f"take a {trunk.config.model_type} checkpoint as it was published"
            )
    model.tie_with_main_model(trunk.model)
    head = NativeHead(model.eval().requires_grad_(False))
    # The published copies equal the trunk's; a layer that was trained further has its own.
    embedding, output = copies.get(_EMBEDDING), copies.get(_OUTPUT)
    if embedding is not None and not torch.equal(embedding, model.embed_tokens.weight):
        head.embed = partial(F.embedding, weight=embedding)
    if output is not None and not _is_made_of(model.shared_head, output):
        head.project = partial(F.linear, weight=output)
    return head


def _is_made_of(layer: Any, weight: Tensor) -> bool:
    """Whether this is a linear layer's weight, as the layer keeps it."""
    if isinstance(layer, KernelLinear):
        return torch.equal(layer.data, weight.bfloat16())
    return torch.equal(layer.weight, weight)
