"""Published checkpoints as the GGUF files that llama.cpp's converter makes of them.

Written from conversion/{base,qwen,glm}.py of the llama.cpp repository, in loops over heads and
experts; the names are those of the `gguf` package. What `mtplx.models.gguf_families` undoes is done
here, and the two share nothing.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from family_proof import load, read_tensors
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

ARCHITECTURES = {
    "qwen3_5_text": gguf.MODEL_ARCH.QWEN35,
    "qwen3_5_moe_text": gguf.MODEL_ARCH.QWEN35MOE,
    "qwen3_next": gguf.MODEL_ARCH.QWEN3NEXT,
    "glm4_moe": gguf.MODEL_ARCH.GLM4_MOE,
}
# The installed package knows these for GLM alone, and llama.cpp for Qwen3.5 as well.
NEXTN = {
    "enorm": "nextn.enorm",
    "hnorm": "nextn.hnorm",
    "eh_proj": "nextn.eh_proj",
    "shared_head.norm": "nextn.shared_head_norm",
    "shared_head.head": "nextn.shared_head_head",
    "embed_tokens": "nextn.embed_tokens",
}
MTP = {
    "mtp.fc": "eh_proj",
    "mtp.pre_fc_norm_embedding": "enorm",
    "mtp.pre_fc_norm_hidden": "hnorm",
    "mtp.norm": "shared_head.norm",
}
SPLITTERS = {"glm4_moe": "glm4", "qwen3_next": "qwen2"}


class InGguf:
    """A family's proof, of the GGUF files made of its checkpoints."""

    def load(self, directory: Path, dtype: torch.dtype = torch.float32) -> Any:
        return load(write_gguf(directory), dtype)


def write_gguf(
    directory: Path,
    name: str = "model.gguf",
    kind: Kind = Kind.F32,
    *,
    skip: str = "\n",
    fused: bool = False,
    extra: dict[str, Tensor] | None = None,
    metadata: dict[str, Any] | None = None,
) -> Path:
    """A GGUF file of the checkpoint in a directory, beside it.

    Args:
        directory: of the checkpoint.
        name: of the file.
        kind: of matrices whose rows can be cut into its blocks; others are in float16.
        skip: what tensors begin with that are left out.
        fused: whether gates and ups of experts lie in one tensor.
        extra: tensors beside them.
        metadata: likewise.
    """
    config = json.loads((directory / "config.json").read_text())
    config |= config.get("text_config", {})
    arch = ARCHITECTURES[config["model_type"]]
    converted = convert(config, arch, read_tensors(directory))
    if fused:
        for gate in [name for name in converted if "gate_exps" in name]:
            up = converted.pop(gate.replace("gate", "up"))
            both = torch.cat([converted.pop(gate), up], 1)
            converted[gate.replace("gate", "gate_up")] = both
    path = directory / name
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    write_settings(writer, config)
    write_vocabulary(writer, config)
    for key, value in (metadata or {}).items():
        writer.add_uint32(f"{writer.arch}.{key}", value)
    for name, tensor in (converted | (extra or {})).items():
        if not name.startswith(skip):
            values = tensor.float().numpy()
            stored = kind_of(name, values, kind)
            writer.add_tensor(name, gguf.quantize(values, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def kind_of(name: str, values: np.ndarray, kind: Kind) -> Kind:
    """Vectors, norms, routers and filters stay as they are; what has no blocks becomes float16."""
    exact = ("_norm.weight", "ffn_gate_inp.weight", "ffn_gate_inp_shexp.weight", "conv1d.weight")
    if values.ndim == 1 or name.endswith(exact) or not name.endswith(".weight"):
        return Kind.F32
    cut = values.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0] == 0
    return kind if cut else Kind.F16


def write_settings(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    promised = config.get("mtp_num_hidden_layers", config.get("num_nextn_predict_layers", 0))
    rope = config.get("rope_parameters", config)
    writer.add_block_count(config["num_hidden_layers"] + promised)
    if promised:
        writer.add_nextn_predict_layers(promised)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    if "intermediate_size" in config:
        writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    if "mrope_section" in rope:
        sections = [*rope["mrope_section"], 0, 0, 0, 0]
        writer.add_rope_dimension_sections(sections[:4])
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(int(config["head_dim"] * rope["partial_rotary_factor"]))
    if "linear_num_key_heads" in config:
        writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
        writer.add_ssm_state_size(config["linear_key_head_dim"])
        writer.add_ssm_group_count(config["linear_num_key_heads"])
        writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
        width = config["linear_value_head_dim"] * config["linear_num_value_heads"]
        writer.add_ssm_inner_size(width)
        writer.add_full_attention_interval(config["full_attention_interval"])
    if "num_experts_per_tok" in config:
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
        writer.add_expert_count(config.get("num_experts") or config["n_routed_experts"])
    if "shared_expert_intermediate_size" in config:
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    if "n_group" in config:
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])
        writer.add_expert_shared_count(config["n_shared_experts"])
        writer.add_leading_dense_block_count(config["first_k_dense_replace"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
        writer.add_expert_weights_norm(config["norm_topk_prob"])


def write_vocabulary(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """Letters, two of them together, and what ends a text."""
    count = config["vocab_size"]
    tokens = [*(chr(ord("a") + i) for i in range(count - 2)), "ab", "<|end|>"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(SPLITTERS.get(config["model_type"], "qwen35"))
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL] * (count - 1) + [gguf.TokenType.CONTROL])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(count - 1)


def convert(config: dict[str, Any], arch: gguf.MODEL_ARCH, tensors: dict[str, Tensor]) -> Any:
    """The tensors under the names and in the shapes of the file."""
    layers = config["num_hidden_layers"]
    names = gguf.get_tensor_name_map(arch, layers + 8)
    converted: dict[str, Tensor] = {}
    experts: dict[str, dict[int, Tensor]] = {}

    def put(name: str, tensor: Tensor) -> None:
        *before, module, leaf = name.split(".")
        within = ".".join([*before[3:], module]) if before[:2] == ["model", "layers"] else ""
        if within in NEXTN:
            converted[f"blk.{before[2]}.{NEXTN[within]}.{leaf}"] = tensor
            return
        new = names.get_name(name, (".weight", ".bias"))
        assert new, name
        converted[new] = tensor

    for name, tensor in tensors.items():
        if "visual" in name or (name.startswith("mtp.") and arch == gguf.MODEL_ARCH.QWEN3NEXT):
            continue
        name = name.replace("language_model.", "")
        name = name.replace("e_score_correction_bias", "e_score_correction.bias")
        if name.startswith("mtp.layers."):
            index = int(name.split(".")[2])
            name = name.replace(f"mtp.layers.{index}", f"model.layers.{index + layers}")
        elif name.startswith("mtp."):
            stem, suffix = name.rsplit(".", 1)
            name = f"model.layers.{layers}.{MTP[stem]}.{suffix}"
        if arch != gguf.MODEL_ARCH.GLM4_MOE:
            tensor = zero_centred(name, tensor)
        if ".linear_attn." in name:
            name, tensor = recurrent(config, arch, name, tensor)
        if "in_proj_qkvz" in name:
            block = f"blk.{name.split('.')[2]}"
            rows = by_kind(config, tensor)
            converted[f"{block}.attn_qkv.weight"] = torch.cat(rows[:3])
            converted[f"{block}.attn_gate.weight"] = rows[3]
        elif ".experts.gate_up_proj" in name:
            base = name.removesuffix(".gate_up_proj")
            half = tensor.shape[1] // 2
            put(f"{base}.gate_proj.weight", tensor[:, :half])
            put(f"{base}.up_proj.weight", tensor[:, half:])
        elif name.endswith(".experts.down_proj"):
            put(f"{name}.weight", tensor)
        elif ".experts." in name:
            base, rest = name.split(".experts.")
            index, rest = rest.split(".", 1)
            experts.setdefault(f"{base}.experts.{rest}", {})[int(index)] = tensor
        else:
            put(name, tensor)
    for name, parts in experts.items():
        put(name, torch.stack([parts[i] for i in range(len(parts))]))
    return converted


def zero_centred(name: str, tensor: Tensor) -> Tensor:
    if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        return tensor + 1
    return tensor


def recurrent(
    config: dict[str, Any], arch: gguf.MODEL_ARCH, name: str, tensor: Tensor
) -> tuple[str, Tensor]:
    """A delta net's tensor: filters without an empty dimension, rates, heads in another order."""
    leaf = name.split(".linear_attn.")[1]
    if leaf == "conv1d.weight":
        tensor = tensor.squeeze(1)
    if arch != gguf.MODEL_ARCH.QWEN3NEXT:
        size = config["linear_value_head_dim"]
        before = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"]
        match leaf.split(".")[0]:
            case "in_proj_qkv" | "conv1d":
                tensor = torch.cat([tensor[:before], tiled(config, tensor[before:], size)])
            case "in_proj_z":
                tensor = tiled(config, tensor, size)
            case "in_proj_a" | "in_proj_b" | "A_log" | "dt_bias":
                tensor = tiled(config, tensor, 1)
            case "out_proj":
                tensor = tiled(config, tensor.T, size).T.contiguous()
    if leaf == "A_log":
        tensor = -tensor.exp()
    return name.replace("dt_bias", "dt_proj.bias"), tensor


def tiled(config: dict[str, Any], rows: Tensor, size: int) -> Tensor:
    """Value heads from those of a key head side by side to the first of each, the second, …"""
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    each = values // keys
    heads = [key * each + nth for nth in range(each) for key in range(keys)]
    return torch.cat([rows[head * size : (head + 1) * size] for head in heads])


def by_kind(config: dict[str, Any], rows: Tensor) -> list[Tensor]:
    """Queries, keys, values and gates of all heads, from all four of each key head in turn."""
    keys, key = config["linear_num_key_heads"], config["linear_key_head_dim"]
    value = config["linear_num_value_heads"] // keys * config["linear_value_head_dim"]
    parts: list[list[Tensor]] = [[], [], [], []]
    for head in rows.split(2 * key + 2 * value):
        for kind, part in enumerate(head.split([key, key, value, value])):
            parts[kind].append(part)
    return [torch.cat(part) for part in parts]
