"""Checkpoints with native MTP layers, as DeepSeek-V3 and GLM-4 MoE publish them, but tiny.

Config keys, tensor names, sharding and index are those of the published files; only the sizes are
not. Weights are random, the norms' too: a head fed a state from the wrong side of a norm then
drafts other logits.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from family_proof import write_checkpoint
from torch import Tensor

VOCAB = 24
HIDDEN = 32
EXPERTS = 4
TRUNK_LAYERS = 2

DEEPSEEK_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "initializer_range": 0.02,
    "intermediate_size": 24,
    "kv_lora_rank": 12,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 16,
    "moe_layer_freq": 1,
    "n_group": 2,
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": TRUNK_LAYERS,
    "num_key_value_heads": 4,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "torch_dtype": "float32",
    "use_cache": True,
    "v_head_dim": 6,
    "vocab_size": VOCAB,
}

GLM4_MOE: dict[str, Any] = {
    "architectures": ["Glm4MoeForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": [1, 2],
    "first_k_dense_replace": 1,
    "head_dim": 8,
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "initializer_range": 0.02,
    "intermediate_size": 24,
    "max_position_embeddings": 131072,
    "model_type": "glm4_moe",
    "moe_intermediate_size": 16,
    "n_group": 1,
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": TRUNK_LAYERS,
    "num_key_value_heads": 2,
    "num_nextn_predict_layers": 1,
    "pad_token_id": 0,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "routed_scaling_factor": 2.5,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "torch_dtype": "float32",
    "use_cache": True,
    "use_qk_norm": True,
    "vocab_size": VOCAB,
}

FAMILIES = {"deepseek_v3": DEEPSEEK_V3, "glm4_moe": GLM4_MOE}

Shapes = dict[str, tuple[int, ...]]


def write(
    directory: Path,
    family: str,
    mtp_layers: int = 1,
    promised: int | None = None,
    change: Callable[[dict[str, Tensor]], None] | None = None,
    config: dict[str, Any] | None = None,
    sharded: bool = True,
) -> Path:
    """A checkpoint in `directory`; `change` edits its tensors, `config` its config.json."""
    settings = FAMILIES[family] | {
        "num_nextn_predict_layers": mtp_layers if promised is None else promised
    }
    settings |= config or {}
    tensors = _tensors(settings, mtp_layers)
    if change:
        change(tensors)
    return write_checkpoint(directory, settings, tensors, sharded)


def _tensors(config: dict[str, Any], mtp_layers: int) -> dict[str, Tensor]:
    noise = torch.Generator().manual_seed(1)
    every = shapes(config, mtp_layers).items()
    tensors = {name: _random(name, shape, noise) for name, shape in every}
    return tensors | copies(tensors, mtp_layers)


def shapes(config: dict[str, Any], mtp_layers: int) -> Shapes:
    """Of all tensors but the layers' copies of the trunk's."""
    trunk: int = config["num_hidden_layers"]
    shapes: Shapes = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (VOCAB, HIDDEN),
    }
    for i in range(trunk + mtp_layers):
        layer = _layer(config, dense=i < config["first_k_dense_replace"])
        if i >= trunk:
            layer |= {
                "enorm.weight": (HIDDEN,),
                "hnorm.weight": (HIDDEN,),
                "eh_proj.weight": (HIDDEN, 2 * HIDDEN),
                "shared_head.norm.weight": (HIDDEN,),
            }
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    return shapes


def copies(tensors: dict[str, Tensor], mtp_layers: int) -> dict[str, Tensor]:
    """The trunk's embedding and output head once more in each layer."""
    originals = {"embed_tokens": "model.embed_tokens", "shared_head.head": "lm_head"}
    return {
        f"model.layers.{TRUNK_LAYERS + i}.{copy}.weight": tensors[f"{original}.weight"].clone()
        for i in range(mtp_layers)
        for copy, original in originals.items()
    }


def _layer(config: dict[str, Any], dense: bool) -> Shapes:
    shapes: Shapes = {
        "input_layernorm.weight": (HIDDEN,),
        "post_attention_layernorm.weight": (HIDDEN,),
    }
    attention = _latent(config) if "kv_lora_rank" in config else _grouped(config)
    shapes |= {f"self_attn.{name}": shape for name, shape in attention.items()}
    if dense:
        return shapes | _mlp("mlp", config["intermediate_size"])
    shapes |= {"mlp.gate.weight": (EXPERTS, HIDDEN), "mlp.gate.e_score_correction_bias": (EXPERTS,)}
    for name in (*(f"experts.{i}" for i in range(EXPERTS)), "shared_experts"):
        shapes |= _mlp(f"mlp.{name}", config["moe_intermediate_size"])
    return shapes


def _mlp(name: str, width: int) -> Shapes:
    return {
        f"{name}.gate_proj.weight": (width, HIDDEN),
        f"{name}.up_proj.weight": (width, HIDDEN),
        f"{name}.down_proj.weight": (HIDDEN, width),
    }


def _latent(config: dict[str, Any]) -> Shapes:
    heads, q, kv = (config[k] for k in ("num_attention_heads", "q_lora_rank", "kv_lora_rank"))
    nope, rope, v = (config[k] for k in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    return {
        "q_a_proj.weight": (q, HIDDEN),
        "q_a_layernorm.weight": (q,),
        "q_b_proj.weight": (heads * (nope + rope), q),
        "kv_a_proj_with_mqa.weight": (kv + rope, HIDDEN),
        "kv_a_layernorm.weight": (kv,),
        "kv_b_proj.weight": (heads * (nope + v), kv),
        "o_proj.weight": (HIDDEN, heads * v),
    }


def _grouped(config: dict[str, Any]) -> Shapes:
    dim = config["head_dim"]
    widths = {"q": config["num_attention_heads"] * dim}
    widths |= dict.fromkeys("kv", config["num_key_value_heads"] * dim)
    shapes: Shapes = {f"{name}_proj.weight": (width, HIDDEN) for name, width in widths.items()}
    shapes |= {f"{name}_proj.bias": (width,) for name, width in widths.items()}
    shapes["o_proj.weight"] = (HIDDEN, widths["q"])
    if config["use_qk_norm"]:
        shapes |= {"q_norm.weight": (dim,), "k_norm.weight": (dim,)}
    return shapes


def _random(name: str, shape: tuple[int, ...], noise: torch.Generator) -> Tensor:
    if "norm" in name:
        return torch.rand(shape, generator=noise) + 0.5
    scale = 0.1 if len(shape) == 1 else 1.5 * shape[-1] ** -0.5
    return torch.randn(shape, generator=noise) * scale
