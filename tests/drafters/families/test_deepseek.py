"""GLM-4.7-Flash, DeepSeek-V3.2 and GLM-5, in DeepSeek-V3's layout, as published but tiny."""

from __future__ import annotations

import math
from typing import Any

import torch
from family_proof import HIDDEN, VOCAB, Proof, Shapes
from straight_line import StraightLine, attention, causal, frequencies, turned
from torch.nn import functional as F

LAYERS = 3
LAYER = f"model.layers.{LAYERS}."
HEADS, NOPE, ROPE, VALUE, QUERIES, KEYS = 4, 8, 4, 6, 12, 10
INNER, WIDTH, EXPERTS, PICKED = 24, 16, 8, 2
INDEX_HEADS, INDEX_DIM, INDEX_PICKED = 16, 8, 4

COMMON: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "initializer_range": 0.02,
    "intermediate_size": INNER,
    "kv_lora_rank": KEYS,
    "max_position_embeddings": 202752,
    "moe_intermediate_size": WIDTH,
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": HEADS,
    "num_experts_per_tok": PICKED,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": HEADS,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": QUERIES,
    "qk_nope_head_dim": NOPE,
    "qk_rope_head_dim": ROPE,
    "tie_word_embeddings": False,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "v_head_dim": VALUE,
    "vocab_size": VOCAB,
}
INDEXED: dict[str, Any] = {
    "ep_size": 1,
    "index_head_dim": INDEX_DIM,
    "index_n_heads": INDEX_HEADS,
    "index_topk": INDEX_PICKED,
    "moe_layer_freq": 1,
    "scoring_func": "sigmoid",
}
ROPE_SCALING = {
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 40,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
    "type": "yarn",
}


def mlp(name: str, width: int) -> Shapes:
    return {
        f"{name}.gate_proj.weight": (width, HIDDEN),
        f"{name}.up_proj.weight": (width, HIDDEN),
        f"{name}.down_proj.weight": (HIDDEN, width),
    }


class DeepSeek(Proof):
    """What differs is attention: all of it, or of keys that an indexer picks."""

    indexed = False
    shared: tuple[int, ...] = ()
    """Layers of the trunk that take over which keys were picked in the one before."""

    eps: float
    theta: float
    scaling: float
    groups, kept = 1, 1
    halves = False  # whether the indexer's pairs lie half a head apart
    same = False  # whether the layer's embedding and output head are the trunk's
    behind = LAYER
    join = f"{LAYER}eh_proj.weight"
    copies = (f"{LAYER}embed_tokens.weight",)

    def attention(self, layer: int) -> Shapes:
        shapes: Shapes = {
            "q_a_proj.weight": (QUERIES, HIDDEN),
            "q_a_layernorm.weight": (QUERIES,),
            "q_b_proj.weight": (HEADS * (NOPE + ROPE), QUERIES),
            "kv_a_proj_with_mqa.weight": (KEYS + ROPE, HIDDEN),
            "kv_a_layernorm.weight": (KEYS,),
            "kv_b_proj.weight": (HEADS * (NOPE + VALUE), KEYS),
            "o_proj.weight": (HIDDEN, HEADS * VALUE),
        }
        if self.indexed and layer not in self.shared:
            shapes |= {
                "indexer.wq_b.weight": (INDEX_HEADS * INDEX_DIM, QUERIES),
                "indexer.wk.weight": (INDEX_DIM, HIDDEN),
                "indexer.k_norm.weight": (INDEX_DIM,),
                "indexer.k_norm.bias": (INDEX_DIM,),
                "indexer.weights_proj.weight": (INDEX_HEADS, HIDDEN),
            }
        return {f"self_attn.{name}": shape for name, shape in shapes.items()}

    def feed(self, layer: int) -> Shapes:
        if not layer:
            return mlp("mlp", INNER)
        shapes: Shapes = {
            "mlp.gate.weight": (EXPERTS, HIDDEN),
            "mlp.gate.e_score_correction_bias": (EXPERTS,),
            **mlp("mlp.shared_experts", WIDTH),
        }
        for i in range(EXPERTS):
            shapes |= mlp(f"mlp.experts.{i}", WIDTH)
        return shapes

    def shapes(self) -> Shapes:
        shapes: Shapes = {
            self.embedding: (VOCAB, HIDDEN),
            "model.norm.weight": (HIDDEN,),
            self.output: (VOCAB, HIDDEN),
            f"{LAYER}enorm.weight": (HIDDEN,),
            f"{LAYER}hnorm.weight": (HIDDEN,),
            f"{LAYER}eh_proj.weight": (HIDDEN, 2 * HIDDEN),
            f"{LAYER}embed_tokens.weight": (VOCAB, HIDDEN),
            f"{LAYER}shared_head.norm.weight": (HIDDEN,),
            f"{LAYER}shared_head.head.weight": (VOCAB, HIDDEN),
        }
        for i in range(LAYERS + 1):
            layer: Shapes = {
                "input_layernorm.weight": (HIDDEN,),
                "post_attention_layernorm.weight": (HIDDEN,),
                **self.attention(i),
                **self.feed(i),
            }
            shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
        return shapes

    def tensors(self):
        tensors = super().tensors()
        for name in tensors:
            # Published so beside bfloat16.
            if name.endswith("e_score_correction_bias"):
                tensors[name] = tensors[name].float()
        if self.same:
            tensors[f"{LAYER}embed_tokens.weight"] = tensors[self.embedding].clone()
            tensors[f"{LAYER}shared_head.head.weight"] = tensors[self.output].clone()
        return tensors

    def reference(self, directory):
        return Layer(directory, self)


class Layer(StraightLine):
    """Multi-head latent attention and experts: DeepSeek-V3's report, sections 2.1 and 2.2."""

    layer = LAYER
    names = (f"{LAYER}enorm", f"{LAYER}hnorm", f"{LAYER}eh_proj", f"{LAYER}shared_head.norm")

    def __init__(self, directory, proof):
        super().__init__(directory, proof)
        self.embedding = self.tensors[f"{LAYER}embed_tokens.weight"]
        self.output = self.tensors[f"{LAYER}shared_head.head.weight"]
        self.eps = proof.eps
        self.frequencies = frequencies(ROPE, proof.theta)
        self.scale = (NOPE + ROPE) ** -0.5
        if "rope_scaling" in proof.config:
            self.stretch(proof.theta, **proof.config["rope_scaling"])

    def stretch(self, theta, factor, original_max_position_embeddings, **others):
        """YaRN (arXiv 2309.00071): what turns seldom within the first length turns slower."""

        def pair(turns):
            length = original_max_position_embeddings / (turns * 2 * math.pi)
            return ROPE * math.log(length) / (2 * math.log(theta))

        low, high = math.floor(pair(others["beta_fast"])), math.ceil(pair(others["beta_slow"]))
        low, high = max(low, 0), min(high, ROPE - 1)
        slower = ((torch.arange(ROPE // 2) - low) / (high - low)).clamp(0, 1)
        self.frequencies = self.frequencies * ((1 - slower) + slower / factor)
        # Its two temperatures are one here, so that the turned parts stay as long as they are.
        self.scale *= (0.1 * others["mscale_all_dim"] * math.log(factor) + 1) ** 2

    def attend(self, x):
        count = len(x)
        latent = self.norm(f"{LAYER}self_attn.q_a_layernorm", self.mine("q_a_proj", x), 1e-6)
        q = self.mine("q_b_proj", latent).view(count, HEADS, NOPE + ROPE)
        compressed = self.mine("kv_a_proj_with_mqa", x)
        keys, turning = compressed.split([KEYS, ROPE], -1)
        keys = self.norm(f"{LAYER}self_attn.kv_a_layernorm", keys, 1e-6)
        k, v = self.mine("kv_b_proj", keys).view(count, HEADS, -1).split([NOPE, VALUE], -1)
        turning = turned(turning[:, None], self.frequencies, neighbours=True)
        q = torch.cat([q[..., :NOPE], turned(q[..., NOPE:], self.frequencies, True)], -1)
        k = torch.cat([k, turning.expand(-1, HEADS, -1)], -1)
        seen = self.picked(x, latent) if self.proof.indexed else None
        return self.mine("o_proj", attention(q, k, v, seen, self.scale))

    def picked(self, x, latent):
        """Which keys each query looks at: the best by the scores of DeepSeek-V3.2's report, (1)."""
        count = len(x)
        name = f"{LAYER}self_attn.indexer.k_norm"
        q = self.mine("indexer.wq_b", latent).view(count, INDEX_HEADS, INDEX_DIM)
        k = self.mine("indexer.wk", x)
        weight, bias = (self.tensors[f"{name}.{part}"] for part in ("weight", "bias"))
        k = F.layer_norm(k, (INDEX_DIM,), weight, bias, 1e-6)[:, None]
        q, k = (
            torch.cat(
                [turned(y[..., :ROPE], self.frequencies, not self.proof.halves), y[..., ROPE:]], -1
            )
            for y in (q, k)
        )
        scores = F.relu(torch.einsum("qhd,khd->qhk", q, k.expand(-1, INDEX_HEADS, -1)))
        scores = torch.einsum("qhk,qh->qk", scores, self.mine("indexer.weights_proj", x))
        scores = scores.masked_fill(~causal(count), -torch.inf)
        best = scores.topk(min(INDEX_PICKED, count), -1).indices
        return torch.zeros_like(scores).scatter(1, best, 1.0).bool() & causal(count)

    def mine(self, name, x):
        return self.linear(f"self_attn.{name}", x)

    def feed(self, x):
        bias = "mlp.gate.e_score_correction_bias"
        shares = self.shares("mlp.gate", bias, x, PICKED, self.proof.groups, self.proof.kept)
        routed = self.experts("mlp.experts", x, shares) * self.proof.scaling
        return routed + self.mlp("mlp.shared_experts", x)


class TestGlmLite(DeepSeek):
    """GLM-4.7-Flash, its copies trained further."""

    eps, theta, scaling = 1e-5, 1000000.0, 1.8
    config = COMMON | {
        "architectures": ["Glm4MoeLiteForCausalLM"],
        "model_type": "glm4_moe_lite",
        "n_group": 1,
        "pad_token_id": 2,
        "partial_rotary_factor": 1.0,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000,
        "routed_scaling_factor": 1.8,
        "topk_group": 1,
        "transformers_version": "5.0.0rc0",
    }


class TestDeepSeekV32(DeepSeek):
    """DeepSeek-V3.2 in bfloat16, with the copies as they are published."""

    eps, theta, scaling = 1e-6, 10000.0, 2.5
    groups, kept = 4, 2
    indexed = halves = same = True
    config = COMMON | {
        "architectures": ["DeepseekV32ForCausalLM"],
        "model_type": "deepseek_v32",
        "n_group": 4,
        "rms_norm_eps": 1e-06,
        "rope_scaling": ROPE_SCALING,
        "rope_theta": 10000,
        "routed_scaling_factor": 2.5,
        "topk_group": 2,
        "transformers_version": "4.44.2",
        **INDEXED,
    }


class TestGlm5(DeepSeek):
    """GLM-5, where each layer picks its own keys."""

    eps, theta, scaling = 1e-5, 1000000.0, 2.5
    indexed = True
    config = COMMON | {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "dtype": "bfloat16",
        "indexer_rope_interleave": True,
        "model_type": "glm_moe_dsa",
        "n_group": 1,
        "pad_token_id": 2,
        "rms_norm_eps": 1e-05,
        "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
        "routed_scaling_factor": 2.5,
        "topk_group": 1,
        "transformers_version": "5.0.2.dev0",
        **INDEXED,
    }


class TestGlm52(TestGlm5):
    """GLM-5.2, where layers of the trunk take over which keys were picked before."""

    shared = (2,)
    config = TestGlm5.config | {"index_topk_freq": 2, "index_skip_topk_offset": 2}
