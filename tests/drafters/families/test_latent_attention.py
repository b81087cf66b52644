"""GLM-4.7-Flash, DeepSeek-V3.2, GLM-5, Hy4 and Ling 3, as they are published but tiny: layers of
multi-head latent attention. LongCat-Flash too, but for what transformers cannot read of it."""

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
STREAMS, LIMIT, KDA_DIM = 3, 1.5, 6

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


class Latent(Proof):
    """What differs is what is around the layer, and which keys its attention looks at.

    Attributes:
        layer: what comes before the names of the MTP layer.
        attn: what attention is called.
        router_bias: what is added where experts are picked.
        names: of norms and the matrix around it, as in `StraightLine`.
        extra: of the layer's own copies.
        indexed: whether an indexer picks the keys.
        shared: layers of the trunk that take over which keys were picked in the one before.
        neighbours: whether the pairs that turn lie side by side, in attention and in the indexer.
        last: whether an indexer's head turns at its end.
        groups: of experts, and how many of those are looked at.
        same: whether the layer's copies are the trunk's.
    """

    layer = LAYER
    attn = "self_attn"
    router_bias = "mlp.gate.e_score_correction_bias"
    names = (f"{LAYER}enorm", f"{LAYER}hnorm", f"{LAYER}eh_proj", f"{LAYER}shared_head.norm")
    extra = (f"{LAYER}embed_tokens.weight", f"{LAYER}shared_head.head.weight")
    indexed = False
    shared: tuple[int, ...] = ()
    neighbours = (True, True)
    last = False
    groups = (1, 1)
    same = False
    eps: float
    theta: float
    scaling: float
    kind: type[Layer]

    @property
    def join(self) -> str:
        return f"{self.names[2]}.weight"

    @property
    def copies(self) -> tuple[str, ...]:
        return self.extra[:1]

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
        return shapes

    def feed(self, layer: int) -> Shapes:
        if not layer:
            return mlp("mlp", INNER)
        shapes: Shapes = {
            "mlp.gate.weight": (EXPERTS, HIDDEN),
            self.router_bias: (EXPERTS,),
            **mlp("mlp.shared_experts", WIDTH),
        }
        for i in range(EXPERTS):
            shapes |= mlp(f"mlp.experts.{i}", WIDTH)
        return shapes

    def block(self, layer: int) -> Shapes:
        return {
            "input_layernorm.weight": (HIDDEN,),
            "post_attention_layernorm.weight": (HIDDEN,),
            **{f"{self.attn}.{name}": shape for name, shape in self.attention(layer).items()},
            **self.feed(layer),
        }

    def trunk(self) -> Shapes:
        shapes: Shapes = {}
        for i in range(LAYERS):
            shapes |= {f"model.layers.{i}.{name}": shape for name, shape in self.block(i).items()}
        return shapes

    def shapes(self) -> Shapes:
        shapes: Shapes = {
            self.embedding: (VOCAB, HIDDEN),
            "model.norm.weight": (HIDDEN,),
            self.output: (VOCAB, HIDDEN),
            **self.trunk(),
            **dict.fromkeys(self.extra, (VOCAB, HIDDEN)),
        }
        for name in self.names:
            shapes[f"{name}.weight"] = (HIDDEN,)
        shapes[self.join] = (HIDDEN, 2 * HIDDEN)
        return shapes | {self.layer + name: shape for name, shape in self.block(LAYERS).items()}

    def tensors(self):
        tensors = super().tensors()
        for name in tensors:
            # Published so beside bfloat16.
            if name.endswith(self.router_bias):
                tensors[name] = tensors[name].float()
        if self.same:
            for name, theirs in zip(self.extra, (self.embedding, self.output), strict=True):
                tensors[name] = tensors[theirs].clone()
        return tensors

    def reference(self, directory):
        return self.kind(directory, self)


class Layer(StraightLine):
    """Multi-head latent attention and experts: DeepSeek-V3's report, sections 2.1 and 2.2."""

    def __init__(self, directory, proof):
        super().__init__(directory, proof)
        self.layer, self.names, self.eps = proof.layer, proof.names, proof.eps
        self.frequencies = frequencies(ROPE, proof.theta)
        self.scale = (NOPE + ROPE) ** -0.5
        if "rope_scaling" in proof.config:
            self.stretch(proof.theta, **proof.config["rope_scaling"])
        self.copied()

    def copied(self):
        self.embedding, self.output = (self.tensors[name] for name in self.proof.extra)

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
        latent, q, k, v = self.heads(x)
        seen = self.picked(x, latent) if self.proof.indexed else None
        return self.mine("o_proj", attention(q, k, v, seen, self.scale))

    def heads(self, x):
        latent = self.norm(f"{self.layer}self_attn.q_a_layernorm", self.mine("q_a_proj", x), 1e-6)
        q = self.mine("q_b_proj", latent).view(len(x), HEADS, NOPE + ROPE)
        return latent, self.with_turned(q), *self.keys_and_values(x)

    def with_turned(self, q):
        part = turned(q[..., NOPE:], self.frequencies, self.proof.neighbours[0])
        return torch.cat([q[..., :NOPE], part], -1)

    def keys_and_values(self, x):
        keys, turning = self.mine("kv_a_proj_with_mqa", x).split([KEYS, ROPE], -1)
        keys = self.norm(f"{self.layer}{self.proof.attn}.kv_a_layernorm", keys, 1e-6)
        k, v = self.mine("kv_b_proj", keys).view(len(x), HEADS, -1).split([NOPE, VALUE], -1)
        turning = turned(turning[:, None], self.frequencies, self.proof.neighbours[0])
        return torch.cat([k, turning.expand(-1, HEADS, -1)], -1), v

    def picked(self, x, latent):
        """Which keys each query looks at: the best by the scores of DeepSeek-V3.2's report, (1)."""
        count = len(x)
        name = f"{self.layer}self_attn.indexer.k_norm"
        q = self.mine("indexer.wq_b", latent).view(count, INDEX_HEADS, INDEX_DIM)
        k = self.mine("indexer.wk", x)
        weight, bias = (self.tensors[f"{name}.{part}"] for part in ("weight", "bias"))
        k = F.layer_norm(k, (INDEX_DIM,), weight, bias, 1e-6)[:, None]
        q, k = self.turned_in_part(q), self.turned_in_part(k)
        scores = F.relu(torch.einsum("qhd,khd->qhk", q, k.expand(-1, INDEX_HEADS, -1)))
        scores = torch.einsum("qhk,qh->qk", scores, self.mine("indexer.weights_proj", x))
        scores = scores.masked_fill(~causal(count), -torch.inf)
        best = scores.topk(min(INDEX_PICKED, count), -1).indices
        return torch.zeros_like(scores).scatter(1, best, 1.0).bool() & causal(count)

    def turned_in_part(self, x):
        beside = self.proof.neighbours[1]
        if self.proof.last:
            rest, part = x.split([INDEX_DIM - ROPE, ROPE], -1)
            return torch.cat([rest, turned(part, self.frequencies, beside)], -1)
        part, rest = x.split([ROPE, INDEX_DIM - ROPE], -1)
        return torch.cat([turned(part, self.frequencies, beside), rest], -1)

    def mine(self, name, x):
        return self.linear(f"{self.proof.attn}.{name}", x)

    def feed(self, x):
        shares = self.shares("mlp.gate", self.proof.router_bias, x, PICKED, *self.proof.groups)
        routed = self.experts("mlp.experts", x, shares) * self.proof.scaling
        return routed + self.mlp("mlp.shared_experts", x)


Latent.kind = Layer


class TestGlmLite(Latent):
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


class TestDeepSeekV32(Latent):
    """DeepSeek-V3.2 in bfloat16, with the copies as they are published."""

    eps, theta, scaling = 1e-6, 10000.0, 2.5
    groups = (4, 2)
    neighbours = (True, False)
    indexed = same = True
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


class TestGlm5(Latent):
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


class GatedLayer(Layer):
    """Attention with a gate, and with a logit for each head that no key stands for."""

    def copied(self):
        pass

    def attend(self, x):
        latent, q, k, v = self.heads(x)
        scores = torch.einsum("qhd,khd->hqk", q, k) * self.scale
        scores = scores.masked_fill(~self.picked(x, latent), -torch.inf)
        sinks = self.tensors[f"{self.layer}self_attn.learnable_sink_param"]
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, len(x), 1)], -1)
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., :-1], v).flatten(1)
        return self.mine("o_proj", mixed * self.mine("linear_gate", x).sigmoid())

    def experts(self, name, x, shares):
        """All of them in one tensor, and their halves bounded."""
        mixed = torch.zeros_like(x)
        up, down = (self.tensors[f"{self.layer}{name}.{n}_proj"] for n in ("gate_up", "down"))
        for i in range(EXPERTS):
            gate, value = (x @ up[i].T).chunk(2, -1)
            inner = F.silu(gate.clamp(max=LIMIT)) * value.clamp(-LIMIT, LIMIT)
            mixed = mixed + shares[:, i, None] * (inner @ down[i].T)
        return mixed


class TestHy4(Latent):
    """Streams side by side in the trunk, one in the layer behind it."""

    layer = "model.mtp_layers.0."
    names = (f"{layer}enorm", f"{layer}hnorm", f"{layer}eh_proj", f"{layer}final_layernorm")
    extra = ()
    kind = GatedLayer
    eps, theta, scaling = 1e-5, 10000.0, 2.827
    indexed = last = True
    neighbours = (False, False)
    shared = (2,)
    config = COMMON | {
        "architectures": ["HYV4ForCausalLM"],
        "dtype": "bfloat16",
        "hc_eps": 1e-06,
        "hc_magnitude": 2.0,
        "hc_mult": STREAMS,
        "head_dim": NOPE + ROPE,
        "indexer_types": ["full", "full", "shared"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "model_type": "hy_v4",
        "n_group": 1,
        "pad_token_id": 2,
        "qk_head_dim": NOPE + ROPE,
        "rms_norm_eps": 1e-05,
        "rope_parameters": {"rope_theta": 10000, "rope_type": "default"},
        "routed_scaling_factor": 2.827,
        "swiglu_limit": LIMIT,
        "topk_group": 1,
        **INDEXED,
    }

    def attention(self, layer):
        return super().attention(layer) | {
            "linear_gate.weight": (HEADS * VALUE, HIDDEN),
            "learnable_sink_param": (HEADS,),
        }

    def feed(self, layer):
        shapes = super().feed(layer)
        if layer:
            shapes = {name: shape for name, shape in shapes.items() if ".experts." not in name}
            shapes["mlp.experts.gate_up_proj"] = (EXPERTS, 2 * WIDTH, HIDDEN)
            shapes["mlp.experts.down_proj"] = (EXPERTS, HIDDEN, WIDTH)
        return shapes

    def trunk(self):
        shapes = super().trunk() | {
            "model.hc_head.hc_head_fn": (STREAMS, STREAMS * HIDDEN),
            "model.hc_head.hc_head_base": (STREAMS,),
            "model.hc_head.hc_head_scale": (1,),
        }
        for i in range(LAYERS):
            for part in ("attn", "mlp"):
                place = f"model.layers.{i}.hc_{part}_layer.hc_pre"
                shapes[f"{place}.hc_fn"] = (2 * STREAMS, STREAMS * HIDDEN)
                shapes[f"{place}.hc_base"] = (2 * STREAMS,)
                shapes[f"{place}.hc_scale"] = (2,)
        return shapes


class HalfLayer(Layer):
    """Latents as long as the hidden state, and an MLP."""

    def copied(self):
        self.embedding = self.tensors["model.mtp.embed_tokens.weight"]

    def norm(self, name, x, eps=None):
        normed = super().norm(name, x, eps)
        return normed * (HIDDEN / x.shape[-1]) ** 0.5 if "_a_layernorm" in name else normed

    def feed(self, x):
        return self.mlp("transformer_layer.mlp", x)


class TestLongcat(Latent):
    """Two halves and experts beside them in each of the trunk's layers, one half in the MTP layer.
    Its config.json does not name it."""

    layer = "model.mtp.layers.0."
    names = (f"{layer}enorm.m", f"{layer}hnorm.m", f"{layer}eh_proj", "model.mtp.norm")
    extra = ("model.mtp.embed_tokens.weight",)
    kind = HalfLayer
    named = False
    eps, theta = 1e-5, 10000000.0
    config: dict[str, Any] = {  # noqa: RUF012
        "architectures": ["LongcatFlashForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attention_method": "MLA",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "expert_ffn_hidden_size": WIDTH,
        "ffn_hidden_size": INNER,
        "head_dim": ROPE,
        "hidden_size": HIDDEN,
        "initializer_range": 0.006,
        "kv_lora_rank": KEYS,
        "max_position_embeddings": 131072,
        "mla_scale_kv_lora": True,
        "mla_scale_q_lora": True,
        "model_type": "longcat_flash",
        "moe_topk": PICKED,
        "n_routed_experts": EXPERTS,
        "num_attention_heads": HEADS,
        "num_layers": LAYERS,
        "q_lora_rank": QUERIES,
        "qk_nope_head_dim": NOPE,
        "qk_rope_head_dim": ROPE,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000000.0,
        "routed_scaling_factor": 6.0,
        "router_bias": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "v_head_dim": VALUE,
        "vocab_size": VOCAB,
        # Published with some, which pass on what they are given. transformers 5.24 asks for weights
        # of theirs that no file has, so that those checkpoints are refused.
        "zero_expert_num": 0,
        "zero_expert_type": "identity",
    }

    def block(self, layer):
        return {
            "input_layernorm.weight": (HIDDEN,),
            "post_attention_layernorm.weight": (HIDDEN,),
            **{f"{self.attn}.{name}": shape for name, shape in self.attention(layer).items()},
            **mlp("transformer_layer.mlp", INNER),
        }

    def trunk(self):
        shapes: Shapes = {}
        for i in range(LAYERS):
            layer: Shapes = {
                "mlp.router.classifier.weight": (EXPERTS, HIDDEN),
                "mlp.router.e_score_correction_bias": (EXPERTS,),
            }
            for j in range(EXPERTS):
                layer |= mlp(f"mlp.experts.{j}", WIDTH)
            for half in range(2):
                layer |= mlp(f"mlps.{half}", INNER)
                layer[f"input_layernorm.{half}.weight"] = (HIDDEN,)
                layer[f"post_attention_layernorm.{half}.weight"] = (HIDDEN,)
                for name, shape in self.attention(i).items():
                    layer[f"self_attn.{half}.{name}"] = shape
            shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
        return shapes


class HeadGatedLayer(Layer):
    """Queries without a latent, and a gate for each head."""

    def copied(self):
        pass

    def heads(self, x):
        count = len(x)
        q = self.mine("q_proj", x).view(count, HEADS, NOPE + ROPE)
        return x, self.with_turned(q), *self.keys_and_values(x)

    def attend(self, x):
        _, q, k, v = self.heads(x)
        mixed = attention(q, k, v, scale=self.scale).view(len(x), HEADS, VALUE)
        mixed = mixed * self.mine("g_proj", x).sigmoid()[..., None]
        return self.mine("dense", mixed.flatten(1))


class TestLing(Latent):
    """Ling 3, most of whose trunk's layers sum up the past in a state."""

    attn = "attention"
    names = (f"{LAYER}enorm", f"{LAYER}hnorm", f"{LAYER}eh_proj", f"{LAYER}final_layernorm")
    extra = ()
    router_bias = "mlp.gate.expert_bias"
    embedding = "model.word_embeddings.weight"
    silent = (*Latent.silent, "dense.weight")
    kind = HeadGatedLayer
    eps, theta, scaling = 1e-6, 6000000.0, 2.5
    groups = (4, 2)
    config: dict[str, Any] = {  # noqa: RUF012
        "architectures": ["BailingHybridForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "dtype": "bfloat16",
        "eos_token_id": 1,
        "first_k_dense_replace": 1,
        "head_dim": KDA_DIM,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "initializer_range": 0.02,
        "intermediate_size": INNER,
        "kda_lower_bound": -5.0,
        "kda_safe_gate": True,
        "kv_lora_rank": KEYS,
        "layer_group_size": LAYERS,
        "model_max_length": 262144,
        "model_type": "bailing_hybrid",
        "moe_intermediate_size": WIDTH,
        "moe_renormalize": True,
        "num_attention_heads": HEADS,
        "num_expert_group": 4,
        "num_experts": EXPERTS,
        "num_experts_per_token": PICKED,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": HEADS,
        "num_nextn_predict_layers": 1,
        "num_shared_experts": 1,
        "pad_token_id": 2,
        "q_lora_rank": None,
        "qk_nope_head_dim": NOPE,
        "qk_rope_head_dim": ROPE,
        "rms_norm_eps": 1e-06,
        "rope_theta": 6000000.0,
        "routed_scaling_factor": 2.5,
        "short_conv_kernel_size": 4,
        "tie_word_embeddings": False,
        "topk_group": 2,
        "use_cache": True,
        "v_head_dim": VALUE,
        "vocab_size": VOCAB,
    }

    def attention(self, layer):
        width = HEADS * KDA_DIM
        if layer < LAYERS - 1:
            shapes: Shapes = dict.fromkeys(
                [f"{n}_proj.weight" for n in "qkvfg"], (width, HIDDEN)
            ) | dict.fromkeys([f"{n}_conv1d.weight" for n in "qkv"], (width, 1, 4))
            return shapes | {
                "A_log": (HEADS,),
                "dt_bias": (width,),
                "b_proj.weight": (HEADS, HIDDEN),
                "o_norm.weight": (KDA_DIM,),
                "o_proj.weight": (HIDDEN, width),
            }
        return {
            "q_proj.weight": (HEADS * (NOPE + ROPE), HIDDEN),
            "kv_a_proj_with_mqa.weight": (KEYS + ROPE, HIDDEN),
            "kv_a_layernorm.weight": (KEYS,),
            "kv_b_proj.weight": (HEADS * (NOPE + VALUE), KEYS),
            "g_proj.weight": (HEADS, HIDDEN),
            "dense.weight": (HIDDEN, HEADS * VALUE),
        }
