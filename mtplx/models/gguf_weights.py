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

from mtplx.errors import MtplxError
from mtplx.models.blocks import Blocks, from_gguf
from mtplx.models.gguf import (
    FAMILIES,
    LAYER_MODULES,
    MODULES,
    ROPE_FACTORS,
    GgufFile,
    GgufTensor,
    by_itself,
    load_config,
)
from mtplx.models.linear import linear_layers
from mtplx.models.rounding import Take

# As in `gguf`: imported where it is needed.
if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class _Stored:
    """A weight in the file, rows to be brought into transformers' order when it is read.

    `heads`: whose rows lie in pairs; None where they lie as transformers has them.
    """

    tensor: GgufTensor
    heads: int | None
    where: str

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape

    def values(self) -> torch.Tensor:
        """In float32."""
        try:
            values = self.tensor.dequantize()
        except NotImplementedError:
            raise MtplxError(
                f"{self.where} is of type {self.tensor.kind.name}, which is not decoded here: "
                "use the model in another quantisation"
            ) from None
        return values if self.heads is None else _halves(values, self.heads)

    def blocks(self) -> Blocks | None:
        """As they lie in the file; None for other types than the kernels have."""
        blocks = from_gguf(self.tensor.data, self.tensor.kind.name, self.tensor.shape)
        if blocks is None or self.heads is None:
            return blocks
        return blocks.rows(_halves(torch.arange(len(blocks.numbers)), self.heads))


def load_model(file: GgufFile, dtype: torch.dtype) -> PreTrainedModel:
    """The model on the CPU with its weights dequantised, each rounded once from float32 to `dtype`.

    Raises `MtplxError` where the file's tensors are not those of its architecture; what
    transformers raises for an architecture it does not know passes through.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    config = load_config(file)
    if file.architecture not in FAMILIES:
        return _load_through_transformers(file, dtype)
    weights = {name: part.values().to(dtype) for name, part in _weights(file, config).items()}
    model, report = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].from_pretrained(
        None,
        config=config,
        state_dict=weights,
        dtype=dtype,
        ignore_mismatched_sizes=True,
        output_loading_info=True,
    )
    require_fit(file.path, report)
    _refuse_leftovers(file, report["unexpected_keys"])
    return model


def knows(file: GgufFile) -> bool:
    """Whether the architecture is in the tables, as `load_layers` needs it."""
    return file.architecture in FAMILIES


def kinds(file: GgufFile, config: Any) -> dict[str, str]:
    """The types of a file's tensors, by transformers' names, the output head's too where it is the
    embedding.

    Raises `MtplxError` where the file's tensors are not those of its architecture.
    """
    found = {name: part.tensor.kind.name for name, part in _weights(file, config).items()}
    if config.tie_word_embeddings:
        found["lm_head.weight"] = found["model.embed_tokens.weight"]
    return found


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
    shapes = {name: tuple(part.shape) for name, part in model.named_parameters()}
    shapes["lm_head.weight"] = tuple(model.lm_head.weight.shape)
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


def _weights(file: GgufFile, config: Any) -> dict[str, _Stored]:
    """The weights by transformers' names, none of them read."""
    family = FAMILIES[file.architecture]
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    found = {}
    for name, tensor in file.tensors.items():
        if name == ROPE_FACTORS:  # in the config already
            continue
        paired = heads.get(name.split(".")[-2]) if family.interleaved else None
        found[_transformers_name(name, file)] = _Stored(tensor, paired, f"{file.path}: {name}")
    return found


def _transformers_name(name: str, file: GgufFile) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
    match name.split("."):
        case [module, leaf] if module in MODULES:
            return f"{MODULES[module]}.{leaf}"
        case ["blk", index, module, leaf] if module in LAYER_MODULES:
            return f"model.layers.{index}.{LAYER_MODULES[module]}.{leaf}"
    raise MtplxError(
        f"{file.path}: the tensor {name!r} is not part of a dense {file.architecture} model, "
        "the only kind read from GGUF files: use the model's Hugging Face checkpoint"
    )


def _halves(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows `[heads * head_dim, ...]` from pairs side by side to the two halves of each head."""
    pairs = rows.view(heads, -1, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)


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
