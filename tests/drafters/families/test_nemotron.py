"""Nemotron-H of the third generation, as it is published but tiny."""

from __future__ import annotations

import re
from typing import Any

import pytest
from family_proof import HIDDEN, VOCAB, Proof, Shapes, load, write_checkpoint
from straight_line import StraightLine, attention
from torch.nn import functional as F

from mtplx.errors import MtplxError

HEADS, KV_HEADS, DIM = 4, 2, 8
MAMBA_HEADS, MAMBA_DIM, GROUPS, STATE, KERNEL = 4, 6, 2, 5, 4
INNER, EXPERTS, PICKED, WIDTH, SHARED, LATENT = 24, 4, 2, 16, 20, 24
PATTERN = "ME*-ME"

COMMON: dict[str, Any] = {
    "architectures": ["NemotronHForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "chunk_size": 128,
    "conv_kernel": KERNEL,
    "eos_token_id": 2,
    "expand": 2,
    "head_dim": DIM,
    "hidden_dropout": 0.0,
    "hidden_size": HIDDEN,
    "initializer_range": 0.02,
    "intermediate_size": INNER,
    "layer_norm_epsilon": 1e-05,
    "mamba_head_dim": MAMBA_DIM,
    "mamba_hidden_act": "silu",
    "mamba_num_heads": MAMBA_HEADS,
    "mamba_proj_bias": False,
    "mamba_ssm_cache_dtype": "float32",
    "max_position_embeddings": 262144,
    "mlp_bias": False,
    "mlp_hidden_act": "relu2",
    "model_type": "nemotron_h",
    "moe_intermediate_size": WIDTH,
    "moe_shared_expert_intermediate_size": SHARED,
    "n_group": 1,
    "n_groups": GROUPS,
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": HEADS,
    "num_experts_per_tok": PICKED,
    "num_key_value_heads": KV_HEADS,
    "num_logits_to_keep": 1,
    "num_nextn_predict_layers": 1,
    "rescale_prenorm_residual": True,
    "residual_in_fp32": False,
    "sliding_window": None,
    "ssm_state_size": STATE,
    "tie_word_embeddings": False,
    "time_step_floor": 0.0001,
    "time_step_max": 0.1,
    "time_step_min": 0.001,
    "topk_group": 1,
    "use_bias": False,
    "use_cache": True,
    "use_conv_bias": True,
    "use_mamba_kernels": True,
    "vocab_size": VOCAB,
}
NAMES = {"M": "mamba", "E": "moe", "*": "attention", "-": "mlp"}


class Nemotron(Proof):
    """What differs is how the config names blocks, and whether experts work in a smaller space."""

    latent: int | None = None
    scaling: float
    pattern = "*E"
    join = "mtp.layers.0.eh_proj.weight"
    embedding = "backbone.embeddings.weight"
    silent = (*Proof.silent, "out_proj.weight", "fc2_latent_proj.weight")

    def mixer(self, kind: str) -> Shapes:
        values, keys = MAMBA_HEADS * MAMBA_DIM, GROUPS * STATE
        if kind == "M":
            return {
                "A_log": (MAMBA_HEADS,),
                "D": (MAMBA_HEADS,),
                "dt_bias": (MAMBA_HEADS,),
                "conv1d.weight": (values + 2 * keys, 1, KERNEL),
                "conv1d.bias": (values + 2 * keys,),
                "in_proj.weight": (2 * values + 2 * keys + MAMBA_HEADS, HIDDEN),
                "norm.weight": (values,),
                "out_proj.weight": (HIDDEN, values),
            }
        if kind == "*":
            return {
                "q_proj.weight": (HEADS * DIM, HIDDEN),
                "k_proj.weight": (KV_HEADS * DIM, HIDDEN),
                "v_proj.weight": (KV_HEADS * DIM, HIDDEN),
                "o_proj.weight": (HIDDEN, HEADS * DIM),
            }
        if kind == "-":
            return {"up_proj.weight": (INNER, HIDDEN), "down_proj.weight": (HIDDEN, INNER)}
        space = self.latent or HIDDEN
        shapes: Shapes = {
            "gate.weight": (EXPERTS, HIDDEN),
            "gate.e_score_correction_bias": (EXPERTS,),
            "shared_experts.up_proj.weight": (SHARED, HIDDEN),
            "shared_experts.down_proj.weight": (HIDDEN, SHARED),
        }
        for i in range(EXPERTS):
            shapes[f"experts.{i}.up_proj.weight"] = (WIDTH, space)
            shapes[f"experts.{i}.down_proj.weight"] = (space, WIDTH)
        if self.latent:
            shapes["fc1_latent_proj.weight"] = (self.latent, HIDDEN)
            shapes["fc2_latent_proj.weight"] = (HIDDEN, self.latent)
        return shapes

    def shapes(self) -> Shapes:
        shapes: Shapes = {
            self.embedding: (VOCAB, HIDDEN),
            "backbone.norm_f.weight": (HIDDEN,),
            self.output: (VOCAB, HIDDEN),
            "mtp.layers.0.enorm.weight": (HIDDEN,),
            "mtp.layers.0.hnorm.weight": (HIDDEN,),
            "mtp.layers.0.eh_proj.weight": (HIDDEN, 2 * HIDDEN),
            f"mtp.layers.{len(self.pattern) - 1}.final_layernorm.weight": (HIDDEN,),
        }
        for place, pattern in (("backbone", PATTERN), ("mtp", self.pattern)):
            for i, kind in enumerate(pattern):
                shapes[f"{place}.layers.{i}.norm.weight"] = (HIDDEN,)
                for name, shape in self.mixer(kind).items():
                    shapes[f"{place}.layers.{i}.mixer.{name}"] = shape
        return shapes

    def tensors(self):
        tensors = super().tensors()
        # Published so beside bfloat16.
        return {
            name: tensor.float() if name.endswith("e_score_correction_bias") else tensor
            for name, tensor in tensors.items()
        }

    def reference(self, directory):
        return Layers(directory, self)


class Layers(StraightLine):
    """Blocks of one mixer each behind a norm, and attention without positions."""

    layer = ""
    eps = 1e-5

    def __init__(self, directory, proof):
        super().__init__(directory, proof)
        first, last = "mtp.layers.0.", f"mtp.layers.{len(proof.pattern) - 1}."
        self.names = (first + "enorm", first + "hnorm", first + "eh_proj", last + "final_layernorm")

    def decode(self, x):
        for i, kind in enumerate(self.proof.pattern):
            self.layer = f"mtp.layers.{i}.mixer."
            normed = self.norm(f"mtp.layers.{i}.norm", x)
            x = x + (self.attend(normed) if kind == "*" else self.feed(normed))
        return x

    def attend(self, x):
        q, k, v = (self.linear(f"{name}_proj", x).view(len(x), -1, DIM) for name in "qkv")
        return self.linear("o_proj", attention(q, k, v))

    def feed(self, x):
        shares = self.shares("gate", "gate.e_score_correction_bias", x, PICKED)
        inner = self.linear("fc1_latent_proj", x) if self.proof.latent else x
        mixed = sum(
            shares[:, i, None] * self.squared(f"experts.{i}", inner) for i in range(EXPERTS)
        )
        mixed = mixed * self.proof.scaling
        if self.proof.latent:
            mixed = self.linear("fc2_latent_proj", mixed)
        return mixed + self.squared("shared_experts", x)

    def squared(self, name, x):
        return self.linear(f"{name}.down_proj", F.relu(self.linear(f"{name}.up_proj", x)).square())


class TestNano(Nemotron):
    """The config as it is written now: blocks by their names."""

    @pytest.mark.parametrize(
        "name", ["mtp.layers.0.enorm.weight", "mtp.layers.1.final_layernorm.weight"]
    )
    def test_what_is_missing_is_called_by_its_name(self, tmp_path, name):
        tensors = self.tensors()
        del tensors[name]
        write_checkpoint(tmp_path, self.config, tensors)
        with pytest.raises(MtplxError, match=f"lacks these tensors, .*: {re.escape(name)};"):
            load(tmp_path)

    def test_a_layer_with_a_state_is_refused(self, tmp_path):
        proof = TestNano()
        proof.pattern = "M*E"
        config = self.config | {"mtp_layers_block_type": ["mamba", "attention", "moe"]}
        write_checkpoint(tmp_path, config, proof.tensors())
        with pytest.raises(MtplxError, match="MTP layer keeps a state, which is not run"):
            load(tmp_path)

    scaling = 2.5
    config = COMMON | {
        "dtype": "bfloat16",
        "layers_block_type": [NAMES[kind] for kind in PATTERN],
        "mtp_layers_block_type": ["attention", "moe"],
        "routed_scaling_factor": 2.5,
        "transformers_version": "5.3.0",
    }


class TestSuper(Nemotron):
    """The config as it was written first, and experts in a space of their own."""

    scaling = 5.0
    latent = LATENT
    config = COMMON | {
        "hybrid_override_pattern": PATTERN,
        "moe_latent_size": LATENT,
        "moe_shared_expert_overlap": False,
        "mtp_hybrid_override_pattern": "*E",
        "num_hidden_layers": len(PATTERN),
        "routed_scaling_factor": 5.0,
        "time_step_limit": [0.0, float("inf")],
        "torch_dtype": "bfloat16",
        "transformers_version": "4.57.6",
    }
