"""EAGLE-3 heads as their authors' code and SpecForge write them, in terms of `speculators`.

The two formats hold the same head under other names. What is read here becomes the config and the
tensor names of `speculators`; `eagle3.py` knows no other.

    midlayer.*                      layers.0.*; some writers use that name too
    config.json, top level          transformer_layer_config: always a Llama layer, whatever
                                    `model_type` says, and `head_dim` where that is stated
    eagle_config                    flags and layer ids, which others put at the top level
    attention_bias, mlp_bias        by the tensors: trainers copy these settings from the trunk
                                    and make layers without biases all the same

Layer ids differ. The authors' code taps the streams that layers 2, L // 2 and L - 3 are given,
which are those after as many layers, the meaning of ids in `speculators`. SpecForge counts the
layer whose output is tapped, one less for the same streams, and writes such ids into
`eagle_config`; its first is always 1. Ids there that begin with another number were written by
those who count as `speculators` does. (SGLang tells the two apart by the same sign, in #25454.)

Sources: SafeAILab/EAGLE, eagle/model/cnets.py and modeling_llama_kv.py; sgl-project/SpecForge,
specforge/modeling/draft/llama3_eagle.py; vllm-project/vllm, llama_eagle3.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from mtplx.errors import MtplxError

_LAYER = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
)
_FLAGS = ("norm_before_residual", "norm_before_fc", "norm_output", "fc_norm")
_IDS = "eagle_aux_hidden_state_layer_ids"


def is_original(config: Mapping[str, Any]) -> bool:
    """Whether a head's config.json is in this format, rather than in that of `speculators`."""
    return "speculators_model_type" not in config


def is_head(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of a head in either format, and of no model."""
    return not is_original(config) or bool({"draft_vocab_size", "eagle_config"} & config.keys())


def renamed(tensors: Mapping[str, Tensor], where: Path) -> dict[str, Tensor]:
    """The same tensors by the names of `speculators`.

    Args:
        tensors: of the file, by its names.
        where: that file, for errors.
    Raises:
        MtplxError: two of them would have one name.
    """
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        known = name.removeprefix("model.")
        if known.startswith("midlayer."):
            known = "layers.0." + known.removeprefix("midlayer.")
        if known in found:
            raise MtplxError(f"{where}: {known} is there twice, under two names")
        found[known] = tensor
    return found


def translated(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor], where: Path
) -> dict[str, Any]:
    """The `speculators` config that says the same; what it leaves out has that format's defaults.

    Args:
        config: the parsed config.json.
        tensors: of the head, `renamed`; only their names and shapes are looked at.
        where: the config's file, for errors.
    Raises:
        MtplxError: not an EAGLE-3 head, or one that needs what is not here.
    """
    nested = config.get("eagle_config") or {}
    if not isinstance(nested, dict):
        raise MtplxError(f"{where}: eagle_config is {nested!r}, not of type object")
    _refuse_others(config, nested, tensors, where)
    layer = {name: config[name] for name in _LAYER if config.get(name) is not None}
    # Of text alone all sections of a position are the same number: a plain rotary embedding.
    scaling = layer.get("rope_scaling")
    if isinstance(scaling, dict) and "mrope" in (scaling.get("type"), scaling.get("rope_type")):
        del layer["rope_scaling"]
    for name, part in (("attention_bias", "self_attn.q_proj"), ("mlp_bias", "mlp.up_proj")):
        layer[name] = f"layers.0.{part}.bias" in tensors
    ids = config.get(_IDS) or _counted_as_speculators(nested.get(_IDS))
    flags = {name: nested.get(name, config.get(name)) for name in _FLAGS}
    return flags | {
        "speculators_model_type": "eagle3",
        "draft_vocab_size": config.get("draft_vocab_size"),
        "target_hidden_size": config.get("target_hidden_size"),
        _IDS: ids,
        "transformer_layer_config": layer,
    }


def _counted_as_speculators(ids: Any) -> Any:
    if isinstance(ids, list) and ids[:1] == [1] and all(type(i) is int for i in ids):
        return [i + 1 for i in ids]
    return ids


def _refuse_others(
    config: Mapping[str, Any],
    nested: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    where: Path,
) -> None:
    fc = tensors.get("fc.weight")
    if fc is None:
        raise MtplxError(f"{where.parent}: no EAGLE-3 head there: its weights have no fc.weight")
    # The first two EAGLEs join a token's embedding with one state, and their layer is a plain one.
    plain = "layers.0.hidden_norm.weight" not in tensors
    if plain and fc.ndim == 2 and fc.shape[1] == 2 * fc.shape[0]:
        raise MtplxError(
            f"{where.parent}: an EAGLE-1 or EAGLE-2 head (its fc joins a token with one state of "
            "the trunk); only EAGLE-3 heads can be attached"
        )
    if nested.get("use_aux_hidden_state", config.get("use_aux_hidden_state")) is False:
        raise MtplxError(
            f"{where}: use_aux_hidden_state is false: heads that are fed the trunk's last state "
            "are not supported, only those that are fed three"
        )
    rope = config.get("rope_parameters")
    part = config.get("partial_rotary_factor")
    if part is None and isinstance(rope, dict):
        part = rope.get("partial_rotary_factor")
    # Trainers have turned all of a head in spite of it, so it does not tell what this one needs.
    if part not in (None, 1):
        raise MtplxError(
            f"{where}: partial_rotary_factor is {part!r}; only heads that turn all of their "
            "queries and keys are supported"
        )
