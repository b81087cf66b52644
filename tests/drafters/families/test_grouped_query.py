"""K-EXAONE, EXAONE 4.5, Mellum 2 and Hy3, as they are published but tiny: layers of grouped-query
attention over normed heads, and experts."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from family_proof import HIDDEN, PROMPTS, SAMPLED, VOCAB, Proof, Shapes, decode, watch_drafts
from straight_line import StraightLine, attention, causal, frequencies, turned
from transformers import AutoModelForCausalLM
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

LAYERS = 4
HEADS, KV_HEADS, DIM = 4, 2, 8
INNER, WIDTH, EXPERTS, PICKED = 24, 16, 4, 2
WINDOW = 4
KINDS = ["sliding_attention"] * 3 + ["full_attention"]

COMMON: dict[str, Any] = {
    "bos_token_id": 1,
    "eos_token_id": 2,
    "head_dim": DIM,
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "initializer_range": 0.02,
    "intermediate_size": INNER,
    "max_position_embeddings": 131072,
    "moe_intermediate_size": WIDTH,
    "num_attention_heads": HEADS,
    "num_experts": EXPERTS,
    "num_experts_per_tok": PICKED,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": KV_HEADS,
    "num_nextn_predict_layers": 1,
    "output_router_logits": False,
    "tie_word_embeddings": False,
    "use_cache": True,
    "vocab_size": VOCAB,
}


def mlp(name: str, width: int) -> Shapes:
    return {
        f"{name}.gate_proj.weight": (width, HIDDEN),
        f"{name}.up_proj.weight": (width, HIDDEN),
        f"{name}.down_proj.weight": (HIDDEN, width),
    }


class Grouped(Proof):
    """What differs is what is around the layer, which MLPs are experts, and how those are picked.

    Attributes:
        prefix: what comes before the names of the trunk.
        layer: what comes before the names of the MTP layer.
        norms: of a decoder layer.
        names: of norms and the matrix around it, as in `StraightLine`.
        router: of the experts.
        bias: of what is added where experts are picked; None for softmax without one.
        shared: of the expert that all tokens go to, if there is one.
        first: how many layers of the trunk have no experts.
        dense: whether the MTP layer has none.
        window: of its attention, if there is one.
    """

    prefix = "model."
    layer = "mtp.layers.0."
    norms = ("input_layernorm", "post_attention_layernorm")
    names = ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm")
    router = "mlp.gate"
    bias: str | None = None
    shared: str | None = None
    first = 0
    dense = False
    window: int | None = None
    eps: float
    theta: float
    scaling = 1.0

    def feed(self) -> Shapes:
        shapes: Shapes = {f"{self.router}.weight": (EXPERTS, HIDDEN)}
        if self.bias:
            shapes[self.bias] = (EXPERTS,)
        if self.shared:
            shapes |= mlp(self.shared, WIDTH)
        for i in range(EXPERTS):
            shapes |= mlp(f"mlp.experts.{i}", WIDTH)
        return shapes

    def block(self, dense: bool) -> Shapes:
        return {
            **{f"{name}.weight": (HIDDEN,) for name in self.norms},
            "self_attn.q_proj.weight": (HEADS * DIM, HIDDEN),
            "self_attn.k_proj.weight": (KV_HEADS * DIM, HIDDEN),
            "self_attn.v_proj.weight": (KV_HEADS * DIM, HIDDEN),
            "self_attn.o_proj.weight": (HIDDEN, HEADS * DIM),
            "self_attn.q_norm.weight": (DIM,),
            "self_attn.k_norm.weight": (DIM,),
            **(mlp("mlp", INNER) if dense else self.feed()),
        }

    def shapes(self) -> Shapes:
        shapes: Shapes = {
            self.embedding: (VOCAB, HIDDEN),
            f"{self.prefix}norm.weight": (HIDDEN,),
            self.output: (VOCAB, HIDDEN),
        }
        for name in self.names:
            shapes[f"{name}.weight"] = (HIDDEN,)
        shapes[self.join] = (HIDDEN, 2 * HIDDEN)
        for i in range(LAYERS):
            layer = self.block(i < self.first)
            shapes |= {f"{self.prefix}layers.{i}.{name}": shape for name, shape in layer.items()}
        layer = self.block(self.dense)
        return shapes | {self.layer + name: shape for name, shape in layer.items()}

    @property
    def join(self) -> str:
        return f"{self.names[2]}.weight"

    def tensors(self):
        tensors = super().tensors()
        # Published so beside bfloat16.
        return {
            name: tensor.float() if self.bias and name.endswith(self.bias) else tensor
            for name, tensor in tensors.items()
        }

    def reference(self, directory):
        return Layer(directory, self)


class Layer(StraightLine):
    """One layer, in the order of Llama's, with a norm over each head of queries and keys."""

    def __init__(self, directory, proof):
        super().__init__(directory, proof)
        self.layer, self.names, self.eps = proof.layer, proof.names, proof.eps

    def attend(self, x):
        q, k, v = (self.linear(f"self_attn.{n}_proj", x).view(len(x), -1, DIM) for n in "qkv")
        q, k = (
            turned(
                self.norm(f"{self.layer}self_attn.{n}_norm", y), frequencies(DIM, self.proof.theta)
            )
            for n, y in (("q", q), ("k", k))
        )
        mixed = attention(q, k, v, causal(len(x), self.proof.window))
        return self.linear("self_attn.o_proj", mixed)

    def feed(self, x):
        proof = self.proof
        if proof.dense:
            return self.mlp("mlp", x)
        if proof.bias:
            shares = self.shares(proof.router, proof.bias, x, PICKED)
        else:
            best, picked = self.linear(proof.router, x).softmax(-1).topk(PICKED, -1)
            best = best / best.sum(-1, keepdim=True)
            shares = torch.zeros(len(x), EXPERTS).scatter(1, picked, best)
        mixed = self.experts("mlp.experts", x, shares) * proof.scaling
        return mixed + self.mlp(proof.shared, x) if proof.shared else mixed


class TestExaone(Grouped):
    """K-EXAONE, whose MTP layer is of the kind of the trunk's first."""

    bias = "mlp.e_score_correction_bias"
    shared = "mlp.shared_experts"
    first = 1
    dense = True
    window = WINDOW
    eps, theta = 1e-5, 1000000.0
    config = COMMON | {
        "architectures": ["ExaoneMoEForCausalLM"],
        "attention_dropout": 0.0,
        "dtype": "bfloat16",
        "first_last_k_dense_replace": 1,
        "is_moe_layer": [False, True, True, True],
        "layer_types": KINDS,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "model_type": "exaone_moe",
        "n_group": 1,
        "norm_topk_prob": True,
        "num_shared_experts": 1,
        "pad_token_id": 0,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "sliding_window": WINDOW,
        "sliding_window_pattern": "LLLG",
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "transformers_version": "5.0.0.dev0",
    }


class TestExaoneFull(TestExaone):
    """One that names the kind: positions count, though layers of the trunk without a window have
    none."""

    window = None
    config = TestExaone.config | {"mtp_layer_types": ["full_attention"]}


class TestExaoneFirstFull(TestExaone):
    """One whose trunk begins otherwise: the MTP layer is of its kind, with positions, and dense."""

    first = 0
    window = None
    config = TestExaone.config | {
        "is_moe_layer": [True] * LAYERS,
        "layer_types": ["full_attention", *KINDS[1:]],
        "mlp_layer_types": ["sparse"] * LAYERS,
    }


class NormedBehind(Layer):
    """Norms behind attention and MLP."""

    def decode(self, x):
        x = x + self.norm(f"{self.layer}post_attention_layernorm", self.attend(x))
        return x + self.norm(f"{self.layer}post_feedforward_layernorm", self.feed(x))


VISION: Shapes = {
    "blocks.0.attn.proj.bias": (16,),
    "blocks.0.attn.proj.weight": (16, 16),
    "blocks.0.attn.qkv.bias": (32,),
    "blocks.0.attn.qkv.weight": (32, 16),
    "blocks.0.mlp.down_proj.bias": (16,),
    "blocks.0.mlp.down_proj.weight": (16, 16),
    "blocks.0.mlp.gate_proj.bias": (16,),
    "blocks.0.mlp.gate_proj.weight": (16, 16),
    "blocks.0.mlp.up_proj.bias": (16,),
    "blocks.0.mlp.up_proj.weight": (16, 16),
    "blocks.0.norm1.weight": (16,),
    "blocks.0.norm2.weight": (16,),
    "merger.ln_q.weight": (16,),
    "merger.mlp.0.bias": (64,),
    "merger.mlp.0.weight": (64, 64),
    "merger.mlp.2.bias": (HIDDEN,),
    "merger.mlp.2.weight": (HIDDEN, 64),
    "patch_embed.proj.weight": (16, 3, 2, 4, 4),
}
"""The images' side of EXAONE 4.5, which text never meets."""


class TestExaone45(Grouped):
    """The text of a model of images, all of it dense."""

    prefix = "model.language_model."
    embedding = "model.language_model.embed_tokens.weight"
    norms = ("post_attention_layernorm", "post_feedforward_layernorm")
    first = LAYERS
    dense = True
    window = WINDOW
    eps, theta = 1e-5, 1000000.0
    config: dict[str, Any] = {  # noqa: RUF012
        "architectures": ["Exaone4_5_ForConditionalGeneration"],
        "dtype": "bfloat16",
        "image_token_id": 20,
        "model_type": "exaone4_5",
        "num_nextn_predict_layers": 1,
        "text_config": {
            "eos_token_id": 2,
            "head_dim": DIM,
            "hidden_act": "silu",
            "hidden_size": HIDDEN,
            "intermediate_size": INNER,
            "layer_types": KINDS,
            "max_position_embeddings": 262144,
            "model_type": "exaone4_5_text",
            "num_attention_heads": HEADS,
            "num_hidden_layers": LAYERS,
            "num_key_value_heads": KV_HEADS,
            "rms_norm_eps": 1e-05,
            "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
            "sliding_window": WINDOW,
            "sliding_window_pattern": "LLLG",
            "vocab_size": VOCAB,
        },
        "tie_word_embeddings": False,
        "video_token_id": 21,
        "vision_config": {
            "depth": 1,
            "fullatt_block_indexes": [0],
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_heads": 2,
            "num_key_value_heads": 1,
            "out_hidden_size": HIDDEN,
            "patch_size": 4,
            "window_size": 8,
        },
        "vocab_size": VOCAB,
    }

    def shapes(self):
        images = {f"model.visual.{name}": shape for name, shape in VISION.items()}
        return super().shapes() | images

    def reference(self, directory):
        return NormedBehind(directory, self)


class TestMellum(Grouped):
    """Positions turn otherwise where there is a window."""

    window = WINDOW
    eps, theta = 1e-6, 500000.0
    config = COMMON | {
        "architectures": ["MellumForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "dtype": "bfloat16",
        "layer_types": KINDS,
        "mlp_layer_types": ["sparse"] * LAYERS,
        "model_type": "mellum",
        "norm_topk_prob": True,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "full_attention": {
                "attention_factor": 1.2772588722239782,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "factor": 16.0,
                "original_max_position_embeddings": 8192,
                "rope_theta": 500000.0,
                "rope_type": "yarn",
            },
            "sliding_attention": {"rope_theta": 500000.0, "rope_type": "default"},
        },
        "router_aux_loss_coef": 0.001,
        "sliding_window": WINDOW,
    }

    def test_at_depth_one_drafts_are_those_of_mtp_model(self, directory, loaded):
        """transformers runs this family too."""
        trunk, head, _ = loaded
        cycles: list = []
        _, stats = decode(trunk, head, PROMPTS, 1, SAMPLED, 32, partial(watch_drafts, cycles))
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        theirs = MtpModel.from_pretrained(model).eval()
        for _, known, _, logits in cycles:
            if len(known) > 1:
                tokens, positions = torch.tensor([known]), torch.arange(len(known))[None]
                with torch.inference_mode():
                    hidden = model(tokens[:, :-1], output_hidden_states=True).hidden_states[-1]
                    _, expected, _ = theirs(
                        input_ids=tokens[:, 1:],
                        last_hidden_states=hidden,
                        attention_mask=None,
                        position_ids=positions[:, 1:],
                        mtp_cache=MtpCache(config=model.config.get_mtp_config()),
                    )
                torch.testing.assert_close(logits, expected[0], rtol=1e-3, atol=1e-3)
        drafted, kept = (
            sum(getattr(s, name)[0] for s in stats)
            for name in ("drafted_by_position", "accepted_by_position")
        )
        assert drafted > kept > 0


class TestMellumUnnamed(Grouped):
    """One that does not name its MTP layer, which is not as the trunk's first."""

    named = False
    first = 1
    window = WINDOW
    eps, theta = 1e-6, 500000.0
    config = {
        key: value for key, value in TestMellum.config.items() if key != "num_nextn_predict_layers"
    } | {
        "layer_types": ["full_attention", *KINDS[1:]],
        "mlp_layer_types": ["dense", *["sparse"] * (LAYERS - 1)],
    }


class TestHy3(Grouped):
    """A layer behind the trunk, beside which lies an output head that it was not trained with."""

    layer = f"model.layers.{LAYERS}."
    names = (f"{layer}enorm", f"{layer}hnorm", f"{layer}eh_proj", f"{layer}final_layernorm")
    router = "mlp.router.gate"
    bias = "mlp.expert_bias"
    shared = "mlp.shared_mlp"
    first = 1
    eps, theta, scaling = 1e-5, 11158840.0, 2.826
    config = COMMON | {
        "architectures": ["HYV3ForCausalLM"],
        "dtype": "bfloat16",
        "enable_attention_fp32_softmax": False,
        "enable_lm_head_fp32": True,
        "enable_moe_fp32_combine": False,
        "eod_token_id": 3,
        "expert_hidden_dim": WIDTH,
        "first_k_dense_replace": 1,
        "model_type": "hy_v3",
        "moe_router_enable_expert_bias": True,
        "moe_router_use_sigmoid": True,
        "num_shared_experts": 1,
        "pad_token_id": 0,
        "qk_norm": True,
        "rms_norm_eps": 1e-05,
        "rope_parameters": {"rope_theta": 11158840.0, "rope_type": "default"},
        "route_norm": True,
        "router_scaling_factor": 2.826,
        "sep_token_id": 4,
        "transformers_version": "5.7.0.dev0",
        "use_grouped_mm": False,
    }

    def shapes(self):
        return super().shapes() | {f"{self.layer}shared_head.weight": (VOCAB, HIDDEN)}
