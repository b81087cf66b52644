"""Families of models in GGUF files: their config, what their tensors are called, and in what shape.

llama.cpp's converter gives published tensors other names, and some other values: norms that add one
to their weight come with the one added, decay rates as they are used instead of their logarithms,
value heads in another order. All of it is undone here, so that what leaves this module is called
and shaped as it was published. Facts: conversion/{base,llama,qwen,glm}.py and gguf-py in the
llama.cpp repository; src/models there, for what each number means.

Architectures without an entry here go through transformers' own GGUF loader.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mtplx.errors import MtplxError
from mtplx.models.families import Family, family_of
from mtplx.models.gguf import GgufFile, by_itself

# transformers takes seconds to import, so the functions that need it import it: a damaged file is
# reported before that.
if TYPE_CHECKING:
    from transformers import PreTrainedConfig

ROPE_FACTORS = "rope_freqs.weight"


@dataclass(frozen=True)
class Change:
    """How values of the file become the published ones again.

    Attributes:
        undo: (values, the trunk's config) -> values.
        rows: it puts rows into another order and does nothing else, so that blocks can stay.
    """

    undo: Callable[[Tensor, Any], Tensor]
    rows: bool = True


@dataclass(frozen=True)
class GgufFamily:
    """How one of llama.cpp's architectures maps to a transformers model.

    Attributes:
        model_type: transformers' name of it.
        layer: names in a block, with or without what comes behind the dot, and those in a decoder
            layer. Several that become one lie behind one another there, in alphabetical order.
        changes: by the name in a decoder layer.
        settings: what its config has beside the settings that all have.
        rope: likewise in the rotary settings.
        partial: whether it may rotate a part of each head only.
        added_one: norms are stored with the one that the model adds to their weights.
    """

    model_type: str
    layer: Mapping[str, str]
    settings: Callable[[Header], Mapping[str, Any]]
    changes: Mapping[str, Change] = field(default_factory=dict)
    rope: Callable[[Header], Mapping[str, Any]] = lambda header: {}
    partial: bool = False
    added_one: bool = False

    def place(self, name: str, layers: int) -> str | None:
        """A tensor's published name; None for one that the family does not have.

        Args:
            name: `blk.3.attn_q.weight`, say.
            layers: of the trunk; blocks behind them are its MTP layers.
        """
        match name.split("."):
            case ["blk", index, *parts] if index.isdecimal() and int(index) < layers:
                within = _renamed(parts, self.layer)
                return within and f"model.layers.{index}.{within}"
            case ["blk", index, "nextn", part, leaf] if index.isdecimal() and self.mtp:
                ours = _NEXTN.get(part)
                if ours not in self.mtp.parts.values():
                    return None
                return self.mtp.published(f"joints.{int(index) - layers}.{ours}.{leaf}", layers)
            case ["blk", index, *parts] if index.isdecimal() and self.mtp:
                within = _renamed(parts, self.layer)
                ours = f"blocks.{int(index) - layers}.{within}"
                return within and self.mtp.published(ours, layers)
            case parts:
                return _renamed(parts, _AROUND)

    @property
    def mtp(self) -> Family | None:
        """How its MTP layers are wired, if they are run."""
        return family_of(self.model_type)

    def change(self, published: str) -> Change | None:
        """What happened to the values of this tensor; None if nothing."""
        if self.added_one and "norm" in published and not published.endswith(_GATED_NORM):
            return Change(lambda values, config: values - 1, rows=False)
        return next(
            (change for name, change in self.changes.items() if published.endswith(f".{name}")),
            None,
        )


def _renamed(parts: list[str], table: Mapping[str, str]) -> str | None:
    whole = ".".join(parts)
    if whole in table:
        return table[whole]
    *module, leaf = parts
    renamed = table.get(".".join(module))
    return renamed and f"{renamed}.{leaf}"


# --- names -----------------------------------------------------------------------------------

_AROUND = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_NEXTN = {  # what they are in models/families.py
    "eh_proj": "join",
    "enorm": "embedding_norm",
    "hnorm": "hidden_norm",
    "shared_head_norm": "norm",
    "embed_tokens": "embedding",
    "shared_head_head": "output",
}
_ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}
_MLP = {
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_DENSE = {**_ATTENTION, "ffn_norm": "post_attention_layernorm", **_MLP}
_LATER = {**_ATTENTION, "post_attention_norm": "post_attention_layernorm"}
_DELTA_NET = {
    "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
_GATED_NORM = "linear_attn.norm.weight"
_APART = {
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
}
_JOINED = {
    "attn_gate.weight": "linear_attn.in_proj_qkvz.weight",
    "attn_qkv.weight": "linear_attn.in_proj_qkvz.weight",
    "ssm_ba": "linear_attn.in_proj_ba",
}


def _experts(shared: str) -> dict[str, str]:
    """Those of a layer, as transformers has them: one tensor for all of them."""
    return {
        "ffn_gate_inp": "mlp.gate",
        "ffn_gate_exps.weight": "mlp.experts.gate_up_proj",
        "ffn_up_exps.weight": "mlp.experts.gate_up_proj",
        "ffn_gate_up_exps.weight": "mlp.experts.gate_up_proj",
        "ffn_down_exps.weight": "mlp.experts.down_proj",
        "ffn_gate_shexp": f"{shared}.gate_proj",
        "ffn_up_shexp": f"{shared}.up_proj",
        "ffn_down_shexp": f"{shared}.down_proj",
    }


_QWEN_EXPERTS = {
    **_experts("mlp.shared_expert"),
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}


# --- values ----------------------------------------------------------------------------------


def _halves(rows: Tensor, heads: int) -> Tensor:
    """Rows `[heads * head_dim, ...]` from pairs side by side to the two halves of each head.

    llama.cpp's original rope turns two neighbours, transformers' row i with row i + head_dim / 2.
    """
    pairs = rows.view(heads, -1, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)


def _by_key(rows: Tensor, config: Any) -> Tensor:
    """Value heads of one key head side by side, as published.

    llama.cpp has the first of each key head, then the second of each: what is computed for the key
    heads can then be repeated as a whole.
    """
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    heads = rows.view(values // keys, keys, -1, *rows.shape[1:])
    return heads.transpose(0, 1).reshape(rows.shape)


def _behind_keys(rows: Tensor, config: Any) -> Tensor:
    """The same, of rows that begin with those of all queries and keys."""
    before = 2 * config.linear_num_key_heads * config.linear_key_head_dim
    return torch.cat([rows[:before], _by_key(rows[before:], config)])


def _rates(values: Tensor, config: Any) -> Tensor:
    return torch.log(-_by_key(values, config))


def _filters(values: Tensor, config: Any) -> Tensor:
    return _behind_keys(values, config).unsqueeze(1)


def _inputs(values: Tensor, config: Any) -> Tensor:
    return _by_key(values.T, config).T.contiguous()


def _by_head(rows: Tensor, config: Any) -> Tensor:
    """Rows of output gates, queries, keys and values, each of all heads, in turn for each key head.

    The gates lie first, because `attn_gate` comes before `attn_qkv`.
    """
    heads = config.linear_num_key_heads
    keys = heads * config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    z, q, k, v = (
        part.view(heads, -1, *rows.shape[1:])
        for part in torch.split(rows, [values, keys, keys, values])
    )
    return torch.cat([q, k, v, z], 1).reshape(rows.shape)


_PAIRED = {
    **dict.fromkeys(
        ("self_attn.q_proj.weight", "self_attn.q_proj.bias"),
        Change(lambda rows, config: _halves(rows, config.num_attention_heads)),
    ),
    **dict.fromkeys(
        ("self_attn.k_proj.weight", "self_attn.k_proj.bias"),
        Change(lambda rows, config: _halves(rows, config.num_key_value_heads)),
    ),
}
_TILED = {
    "linear_attn.A_log": Change(_rates, rows=False),
    "linear_attn.dt_bias": Change(_by_key),
    "linear_attn.conv1d.weight": Change(_filters, rows=False),
    "linear_attn.in_proj_qkv.weight": Change(_behind_keys),
    "linear_attn.in_proj_z.weight": Change(_by_key),
    "linear_attn.in_proj_a.weight": Change(_by_key),
    "linear_attn.in_proj_b.weight": Change(_by_key),
    "linear_attn.out_proj.weight": Change(_inputs, rows=False),
}
_SPLIT = {
    "linear_attn.A_log": Change(lambda values, config: torch.log(-values), rows=False),
    "linear_attn.conv1d.weight": Change(lambda values, config: values.unsqueeze(1), rows=False),
    "linear_attn.in_proj_qkvz.weight": Change(_by_head),
}


# --- settings --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Header:
    """A file's metadata, by the names of its own architecture."""

    file: GgufFile

    def value(self, key: str) -> Any:
        """One that must be there, the same for all layers."""
        number = self.file[f"{self.file.architecture}.{key}"]
        if isinstance(number, list):
            raise MtplxError(
                f"{self.file.path}: {key} differs from layer to layer, which no "
                f"{self.file.architecture} model in transformers has: use its Hugging Face "
                "checkpoint"
            )
        return number

    def optional(self, key: str, default: Any) -> Any:
        return (
            self.value(key) if f"{self.file.architecture}.{key}" in self.file.metadata else default
        )

    def list(self, key: str) -> Any:
        """One number for each of something."""
        return self.file[f"{self.file.architecture}.{key}"]

    def has(self, tensor: str) -> bool:
        return tensor in self.file.tensors


def _width(header: Header) -> dict[str, Any]:
    return {"intermediate_size": header.value("feed_forward_length")}


def _delta_net(header: Header) -> dict[str, Any]:
    interval, values = header.optional("full_attention_interval", 4), "ssm.time_step_rank"
    return {
        "layer_types": [
            "linear_attention" if (layer + 1) % interval else "full_attention"
            for layer in range(trunk_layers(header.file))
        ],
        "linear_conv_kernel_dim": header.value("ssm.conv_kernel"),
        "linear_key_head_dim": header.value("ssm.state_size"),
        "linear_num_key_heads": header.value("ssm.group_count"),
        "linear_num_value_heads": header.value(values),
        "linear_value_head_dim": header.value("ssm.inner_size") // header.value(values),
    }


def _qwen_experts(header: Header) -> dict[str, Any]:
    return {
        **_delta_net(header),
        "moe_intermediate_size": header.value("expert_feed_forward_length"),
        "num_experts": header.value("expert_count"),
        "num_experts_per_tok": header.value("expert_used_count"),
        "shared_expert_intermediate_size": header.value("expert_shared_feed_forward_length"),
    }


def _sections(header: Header) -> dict[str, Any]:
    """How the rotary dimensions are shared by time, height and width; all the same for text."""
    return {"mrope_interleaved": True, "mrope_section": header.list("rope.dimension_sections")[:3]}


_SIGMOID = 2


def _glm(header: Header) -> dict[str, Any]:
    if (gate := header.optional("expert_gating_func", _SIGMOID)) != _SIGMOID:
        raise MtplxError(
            f"{header.file.path}: its experts are chosen by function {gate}, and glm4_moe models "
            f"have the sigmoid ({_SIGMOID}): use the model's Hugging Face checkpoint"
        )
    return {
        **_width(header),
        "attention_bias": header.has("blk.0.attn_q.bias"),
        "first_k_dense_replace": header.optional("leading_dense_block_count", 0),
        "moe_intermediate_size": header.value("expert_feed_forward_length"),
        "n_group": header.optional("expert_group_count", 1),
        "n_routed_experts": header.value("expert_count"),
        "n_shared_experts": header.value("expert_shared_count"),
        "norm_topk_prob": header.optional("expert_weights_norm", False),
        "num_experts_per_tok": header.value("expert_used_count"),
        "routed_scaling_factor": header.optional("expert_weights_scale", 1.0),
        "topk_group": header.optional("expert_group_used_count", 1),
        "use_qk_norm": header.has("blk.0.attn_q_norm.weight"),
    }


FAMILIES = {
    "llama": GgufFamily(
        "llama",
        _DENSE,
        # Only llama's config knows the switch; qwen2 always has biases.
        lambda header: {**_width(header), "attention_bias": header.has("blk.0.attn_q.bias")},
        changes=_PAIRED,
    ),
    "qwen2": GgufFamily("qwen2", _DENSE, _width),
    "qwen3": GgufFamily("qwen3", _DENSE, _width),
    "qwen35": GgufFamily(
        "qwen3_5_text",
        {**_LATER, **_DELTA_NET, **_APART, **_MLP},
        lambda header: {**_width(header), **_delta_net(header)},
        changes=_TILED,
        rope=_sections,
        partial=True,
        added_one=True,
    ),
    "qwen35moe": GgufFamily(
        "qwen3_5_moe_text",
        {**_LATER, **_DELTA_NET, **_APART, **_QWEN_EXPERTS},
        _qwen_experts,
        changes=_TILED,
        rope=_sections,
        partial=True,
        added_one=True,
    ),
    # The converter leaves its MTP layer out.
    "qwen3next": GgufFamily(
        "qwen3_next",
        {**_LATER, **_DELTA_NET, **_JOINED, **_QWEN_EXPERTS},
        lambda header: {**_qwen_experts(header), "norm_topk_prob": True},
        changes=_SPLIT,
        partial=True,
        added_one=True,
    ),
    "glm4moe": GgufFamily(
        "glm4_moe",
        {
            **_LATER,
            **_MLP,
            **_experts("mlp.shared_experts"),
            "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
        },
        _glm,
        partial=True,
    ),
}


# --- the config ------------------------------------------------------------------------------


def promised_layers(file: GgufFile) -> int:
    """How many MTP layers the header names."""
    return int(file.metadata.get(f"{file.architecture}.nextn_predict_layers", 0))


def trunk_layers(file: GgufFile) -> int:
    """How many layers the trunk has; llama.cpp counts the MTP layers as blocks behind them."""
    return int(Header(file).value("block_count")) - promised_layers(file)


def load_config(file: GgufFile) -> PreTrainedConfig:
    """The transformers config that the file's metadata describes."""
    from transformers import CONFIG_MAPPING, AutoConfig

    family = FAMILIES.get(file.architecture)
    if family is None:
        with by_itself(file) as place:
            return AutoConfig.from_pretrained(**place)

    header = Header(file)
    value, optional = header.value, header.optional
    heads = value("attention.head_count")
    head_dim = optional("attention.key_length", value("embedding_length") // heads)
    rotary = {**_rope_parameters(file, head_dim), **family.rope(header)}
    rotated = optional("rope.dimension_count", head_dim)
    if rotated != head_dim and not family.partial:
        raise MtplxError(
            f"{file.path}: rotates {rotated} of {head_dim} dimensions of a head, which no "
            f"{family.model_type} model in transformers does: use its Hugging Face checkpoint"
        )
    if family.partial:
        rotary["partial_rotary_factor"] = rotated / head_dim
    if (embedding := file.tensors.get("token_embd.weight")) is None:
        raise MtplxError(f"{file.path}: the GGUF file lacks the tensor 'token_embd.weight'")
    return CONFIG_MAPPING[family.model_type](
        vocab_size=embedding.shape[0],
        hidden_size=value("embedding_length"),
        num_hidden_layers=trunk_layers(file),
        num_attention_heads=heads,
        num_key_value_heads=optional("attention.head_count_kv", heads),
        head_dim=head_dim,
        max_position_embeddings=value("context_length"),
        rms_norm_eps=value("attention.layer_norm_rms_epsilon"),
        rope_parameters=rotary,
        tie_word_embeddings="output.weight" not in file.tensors,
        bos_token_id=file.metadata.get("tokenizer.ggml.bos_token_id"),
        eos_token_id=file.metadata.get("tokenizer.ggml.eos_token_id"),
        pad_token_id=file.metadata.get("tokenizer.ggml.padding_token_id"),
        **family.settings(header),
    )


def _rope_parameters(file: GgufFile, head_dim: int) -> dict[str, Any]:
    """The rotary settings, as transformers spells them."""
    prefix = f"{file.architecture}.rope"
    theta = file.metadata.get(f"{prefix}.freq_base", 10000.0)
    kind = file.metadata.get(f"{prefix}.scaling.type", "none")
    if ROPE_FACTORS in file.tensors:
        return _llama3_rope(file, head_dim, theta)
    if kind == "none":
        return {"rope_type": "default", "rope_theta": theta}
    if kind == "linear":
        return {
            "rope_type": "linear",
            "rope_theta": theta,
            "factor": file[f"{prefix}.scaling.factor"],
        }
    raise MtplxError(
        f"{file.path}: rope scaling of type {kind!r} is not read from GGUF files: "
        "use the model's Hugging Face checkpoint"
    )


def _llama3_rope(file: GgufFile, head_dim: int, theta: float) -> dict[str, Any]:
    """Llama 3.1's rotary scaling, found again from the factors that the file holds instead of it.

    llama.cpp stores what each frequency is divided by, `[head_dim / 2]`. The settings behind them
    are the published ones for every Llama 3 (frequencies 1 and 4, 8,192 positions) but for the
    factor, which is the largest entry; they are taken only if they give the file's own numbers.
    """
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    stored = file.tensors[ROPE_FACTORS].dequantize()
    parameters = {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": float(stored.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    # The context length only keeps the config's own check quiet: the formula does not use it.
    config = LlamaConfig(
        head_dim=head_dim, rope_parameters=parameters, max_position_embeddings=8192 * 128
    )
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    if stored.shape != scaled.shape or not torch.allclose(
        (plain / scaled).float(), stored, rtol=1e-4
    ):
        raise MtplxError(
            f"{file.path}: its rope_freqs.weight are not Llama 3's rotary scaling: "
            "use the model's Hugging Face checkpoint"
        )
    return parameters
