"""transformers' loader, made to hand over each linear layer as soon as its weight is read.

The loader maps a checkpoint's names to a model's, joins and splits tensors where the two differ,
and reads each no sooner than it is needed. What it offers to those who want a weight to become
something else is a quantiser; this one gives it away.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import ConversionOps, convert_and_load_state_dict_in_model
from transformers.modeling_utils import LoadStateDictConfig
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.quantizers.quantizers_utils import get_module_from_name
from transformers.utils.loading_report import LoadStateDictInfo
from transformers.utils.quantization_config import QuantizationConfigMixin

from mtplx.models.linear import KernelLinear
from mtplx.models.rounding import Take

_METHOD = "mtplx"


def from_pretrained(
    load: Callable[..., Any], dtype: Any, take: Take
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """A causal language model on the CPU and what `output_loading_info` says.

    Args:
        load: transformers' `from_pretrained`, with weights that are plain and their config.
        dtype: of all weights; `auto` for what the first of them has.
        take: given each linear layer but the output head, which may share its weight with the
            embedding and has it only when all is read.
    """
    given = _Given(take)
    model, report = load(
        dtype=dtype,
        quantization_config=given,
        local_files_only=True,
        trust_remote_code=False,
        use_safetensors=True,
        ignore_mismatched_sizes=True,
        output_loading_info=True,
    )
    model.hf_quantizer.remove_quantization_config(model)
    _show(model)
    report["mismatched_keys"] = {*report["mismatched_keys"], *given.mismatched}
    return model, report


def fill(
    model: PreTrainedModel,
    tensors: Mapping[str, Any],
    like: PreTrainedModel,
    dtype: torch.dtype,
    take: Take | None = None,
) -> LoadStateDictInfo:
    """Put weights into a model on the meta device; says which are missing, left over or misshapen.

    Args:
        model: to be filled, where `like` is.
        tensors: slices of plain tensors, by the model's names up to how they are put together.
        like: a model of the same kind, which says that, and which weights stay wider.
        dtype: of the others.
        take: given each linear layer; None to leave them in the model.
    """
    # Those of a loaded model, as it keeps them; if it is quantised, they are about its own format.
    conversions = getattr(like, "_weight_conversions", None)
    if conversions is None or getattr(like, "hf_quantizer", None):
        conversions = get_model_conversion_mapping(like)
    given = None if take is None else _Given(take)
    report, _ = convert_and_load_state_dict_in_model(
        model=model,
        state_dict=dict(tensors),
        load_config=LoadStateDictConfig(
            weight_mapping=conversions,
            device_map={"": like.device},
            dtype=dtype,
            dtype_plan=like._get_dtype_plan(dtype),
            hf_quantizer=None if given is None else _Quantizer(given, pre_quantized=False),
        ),
    )
    if given is not None:
        _show(model)
        report.mismatched_keys |= set(given.mismatched)
    return report


@register_quantization_config(_METHOD)
class _Given(QuantizationConfigMixin):  # type: ignore[misc]
    """What the quantiser is to know."""

    quant_method = _METHOD

    def __init__(self, take: Take) -> None:
        self.take = take
        self.mismatched: list[tuple[str, Any, Any]] = []

    def __deepcopy__(self, memo: Any) -> _Given:
        # A config is copied with all that it holds, and what is taken has to come here.
        return self

    def to_dict(self) -> dict[str, Any]:
        return {"quant_method": _METHOD}


@register_quantizer(_METHOD)
class _Quantizer(HfQuantizer):  # type: ignore[misc]
    def param_needs_quantization(
        self, model: PreTrainedModel, param_name: str, **kwargs: Any
    ) -> bool:
        module, leaf = get_module_from_name(model, param_name)
        linear = isinstance(module, nn.Linear) and leaf == "weight"
        return linear and module is not model.get_output_embeddings()

    def get_quantize_ops(self) -> ConversionOps:
        return _HandOver(self.quantization_config)

    def is_serializable(self) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return False


class _HandOver(ConversionOps):  # type: ignore[misc]
    def __init__(self, given: _Given) -> None:
        self._given = given

    def convert(
        self,
        input_dict: dict[str, Any],
        model: Any = None,
        full_layer_name: str = "",
        missing_keys: Any = None,
        **kwargs: Any,
    ) -> dict[str, Tensor]:
        (weight,) = input_dict.values()
        weight = weight[0] if isinstance(weight, list) else weight
        name = full_layer_name.removesuffix(".weight")
        layer = model.get_submodule(name)
        # Biases are read before weights, in the order of the alphabet. One that is not there by now
        # is missing or does not fit, which the loader will say of a layer that is still its own.
        if layer.bias is not None and layer.bias.is_meta:
            return {full_layer_name: weight}
        missing_keys.discard(full_layer_name)
        if layer.weight.shape == weight.shape:
            self._given.take(model, name, weight, layer.bias)
            _hide(model.get_submodule(name))
        else:
            self._given.mismatched.append((full_layer_name, weight.shape, layer.weight.shape))
        return {}


def _hide(taken: Any) -> None:
    """Keep what stands in a layer's place from being given first values by the model's code.

    A layer above may set the weight of one below where something else of its own is missing; what
    carries this mark is left as it is.
    """
    taken.weight = torch.empty(0)
    for part in (taken.weight, taken.bias):
        if part is not None:
            part._is_hf_initialized = True


def _show(model: PreTrainedModel) -> None:
    """Undo what `_hide` did."""
    for module in model.modules():
        if isinstance(module, KernelLinear):
            vars(module).pop("weight", None)
