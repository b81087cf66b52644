"""The weights of GGUF files, as transformers' models.

They leave the file in float32 and are rounded once, to the dtype asked for; the result is a plain
model that can be trained and saved. Or its linear layers go to the kernels, one after another, so
that no more than one of them is in memory unpacked.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mtplx.errors import MtplxError
from mtplx.models.blocks import Bits, Blocks, from_gguf, kept_bits
from mtplx.models.gguf import GgufFile, GgufTensor, by_itself
from mtplx.models.gguf_families import (
    FAMILIES,
    ROPE_FACTORS,
    Change,
    load_config,
    promised_layers,
    trunk_layers,
)
from mtplx.models.linear import linear_layers
from mtplx.models.rounding import Take

# As in `gguf_families`: imported where it is needed.
if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class _Stored:
    """A published weight as the file has it: one tensor or several, rows behind rows.

    `change` says how its values are brought back to the published ones, with the trunk's `config`.
    """

    tensors: Mapping[str, GgufTensor]
    change: Change | None
    config: Any
    path: Path

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the published weight."""
        pieces = [torch.empty(part.shape, device="meta") for part in self.tensors.values()]
        return tuple(self._published(pieces).shape)

    def values(self) -> Tensor:
        """In float32."""
        return self._published([self._read(name) for name in self.tensors])

    def _published(self, pieces: list[Tensor]) -> Tensor:
        try:
            values = torch.cat(pieces, -2) if len(pieces) > 1 else pieces[0]
            return values if self.change is None else self.change.undo(values, self.config)
        except RuntimeError:
            listed = ", ".join(f"{name} {list(part.shape)}" for name, part in self.tensors.items())
            raise MtplxError(
                f"{self.path}: {listed}: not the shape that its metadata says: "
                "download the model again"
            ) from None

    def _read(self, name: str) -> Tensor:
        tensor = self.tensors[name]
        try:
            return tensor.dequantize()
        except NotImplementedError:
            raise MtplxError(
                f"{self.path}: {name} is of type {tensor.kind.name}, which is not decoded here: "
                "use the model in another quantisation"
            ) from None

    def blocks(self) -> Blocks | None:
        """As they lie in the file; None for other types than the kernels have."""
        if len(self.tensors) > 1 or (self.change and not self.change.rows):
            return None
        (tensor,) = self.tensors.values()
        blocks = from_gguf(tensor.data, tensor.kind.name, tensor.shape)
        if blocks is None or self.change is None:
            return blocks
        return blocks.rows(self.change.undo(torch.arange(len(blocks.numbers)), self.config))

    @property
    def bits(self) -> Bits | None:
        """Of a number in these blocks, likewise."""
        if len(self.tensors) > 1 or (self.change and not self.change.rows):
            return None
        (tensor,) = self.tensors.values()
        return kept_bits(tensor.kind.name)


def load_model(file: GgufFile, dtype: torch.dtype) -> PreTrainedModel:
    """The model on the CPU with its weights dequantised, each rounded once from float32 to `dtype`.

    Raises `MtplxError` where the file's tensors are not those of its architecture; what
    transformers raises for an architecture it does not know passes through.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    config = load_config(file)
    if file.architecture not in FAMILIES:
        return _load_through_transformers(file, dtype)
    model, report = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].from_pretrained(
        None,
        config=config,
        state_dict=_rounded(_weights(file, config), config, dtype),
        dtype=dtype,
        ignore_mismatched_sizes=True,
        output_loading_info=True,
    )
    require_fit(file.path, report)
    _refuse_leftovers(file, report["unexpected_keys"])
    return model


def mtp_weights(
    file: GgufFile, config: Any, dtype: torch.dtype, meta: bool = False
) -> dict[str, Tensor]:
    """The weights of the MTP layers by their published names, dequantised and rounded to `dtype`.

    Args:
        file: of a family that is read here.
        config: the trunk's.
        dtype: of all but what the family computes in float32.
        meta: whether to leave them unread, on the meta device.
    Raises `MtplxError` for a tensor that the family does not have.
    """
    weights = _weights(file, config, mtp=True)
    if meta:
        return {
            name: torch.empty(part.shape, dtype=dtype, device="meta")
            for name, part in weights.items()
        }
    return _rounded(weights, config, dtype)


def _rounded(weights: Mapping[str, _Stored], config: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    exact = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]._keep_in_fp32_modules_strict or ()
    return {
        name: part.values().to(torch.float32 if any(x in name for x in exact) else dtype)
        for name, part in weights.items()
    }


def knows(file: GgufFile) -> bool:
    """Whether the architecture is in the tables, as `load_layers` needs it."""
    return file.architecture in FAMILIES


def stored_bits(file: GgufFile, config: Any) -> dict[str, Bits | None]:
    """Bits of the blocks that the kernels can take of a file's tensors, None for others; by
    transformers' names, the output head's too where it is the embedding.

    Raises `MtplxError` where the file's tensors are not those of its architecture.
    """
    found = {name: part.bits for name, part in _weights(file, config).items()}
    if config.tie_word_embeddings:
        found["lm_head.weight"] = found["model.embed_tokens.weight"]
    return found


def output_copies(file: GgufFile) -> int:
    """How many MTP layers come with an output head beside the trunk's."""
    return sum(name.endswith(".nextn.shared_head_head.weight") for name in file.tensors)


def load_layers(file: GgufFile, take: Take, as_stored: bool) -> PreTrainedModel:
    """The model on the CPU in float32, but for its linear layers, which are taken.

    Args:
        file: of a family that is read here.
        take: is given each linear layer, whose place it fills.
        as_stored: give it the file's own blocks where they are of a kind the kernels have.
    Raises `MtplxError` where the file's tensors are not those of its architecture.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    config = load_config(file)
    with torch.device("meta"):
        model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config)
    weights = _weights(file, config)
    if config.tie_word_embeddings:
        # The output head is made of the embedding, which is looked up elsewhere.
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    shapes = {name: tuple(part.shape) for name, part in model.state_dict().items()}
    missing = sorted(shapes.keys() - weights.keys())
    mismatched = [
        (name, weights[name].shape, shape)
        for name, shape in shapes.items()
        if name in weights and weights[name].shape != shape
    ]
    require_fit(file.path, {"missing_keys": missing, "mismatched_keys": mismatched})
    _refuse_leftovers(file, weights.keys() - shapes.keys())
    for name, _ in linear_layers(model):
        weight, bias = weights.pop(f"{name}.weight"), weights.pop(f"{name}.bias", None)
        blocks = weight.blocks() if as_stored else None
        take(
            model,
            name,
            weight.values() if blocks is None else blocks,
            None if bias is None else bias.values(),
        )
    model.load_state_dict({name: part.values() for name, part in weights.items()}, assign=True)
    # Its frequencies are no weights, and were not computed on the meta device.
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model


def require_fit(path: Path, report: Mapping[str, Any]) -> None:
    """Raises `MtplxError` unless every weight of a model was found, in the shape its config says.

    `report` is what `from_pretrained` returns with `output_loading_info`. transformers would only
    warn and go on with random numbers.
    """
    if missing := report["missing_keys"]:
        raise MtplxError(
            f"{path}: {len(missing)} weights are missing, first {min(missing)}: "
            "download the model again"
        )
    if mismatched := report["mismatched_keys"]:
        name, stored, expected = min(mismatched)
        raise MtplxError(
            f"{path}: {len(mismatched)} weights do not fit the config, first {name} with shape "
            f"{list(stored)} instead of {list(expected)}: download the model again"
        )


def _refuse_leftovers(file: GgufFile, names: Collection[str]) -> None:
    if names:
        raise MtplxError(
            f"{file.path}: a {file.architecture} model has no place for {len(names)} of its "
            f"weights, first {min(names)}: use the model's Hugging Face checkpoint"
        )


def _weights(file: GgufFile, config: Any, mtp: bool = False) -> dict[str, _Stored]:
    """The weights of the trunk, or of its MTP layers, by published names, none of them read."""
    family, layers = FAMILIES[file.architecture], trunk_layers(file)
    if promised_layers(file) and not any(name.startswith("blk.0.") for name in file.tensors):
        raise MtplxError(
            f"{file.path}: holds MTP layers without the model they draft for: give a file that "
            "holds both"
        )
    found: dict[str, dict[str, str]] = {}
    for name in file.tensors:
        if name == ROPE_FACTORS:  # in the config already
            continue
        if mtp != (family.mtp is not None and _is_behind(name, layers)):
            continue
        published = family.place(name, layers)
        if published is None:
            raise MtplxError(
                f"{file.path}: the tensor {name!r} is not part of a {file.architecture} model as "
                "it is read from GGUF files: use the model's Hugging Face checkpoint"
            )
        # By the name in its block: what several MTP layers share is written into each of theirs.
        found.setdefault(published, {})[name.split(".", 2)[-1]] = name
    return {
        published: _Stored(
            {name: file.tensors[name] for _, name in sorted(names.items())},
            family.change(published),
            config,
            file.path,
        )
        for published, names in found.items()
    }


def _is_behind(name: str, layers: int) -> bool:
    """Whether a tensor lies in a block behind those of the trunk."""
    match name.split("."):
        case ["blk", index, *_] if index.isdecimal():
            return int(index) >= layers
    return False


def _load_through_transformers(file: GgufFile, dtype: torch.dtype) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM
    from transformers.utils.quantization_config import GgufConfig

    with by_itself(file) as place:
        model = AutoModelForCausalLM.from_pretrained(
            **place, quantization_config=GgufConfig(dequantize=True), dtype=dtype
        )
    # The weights are plain now, but the model still calls itself quantised and would refuse to be
    # saved or trained.
    model.hf_quantizer = None
    model.is_quantized = False
    vars(model.config).pop("quantization_config", None)
    return model
