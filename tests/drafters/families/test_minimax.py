"""MiniMax-M3, as it is published but tiny: the text of a model of images, over blocks of keys."""

from __future__ import annotations

from typing import Any

import torch
from family_proof import HIDDEN, VOCAB, Proof, Shapes, random_tensors
from straight_line import StraightLine, attention, causal, frequencies, turned

LAYERS = 3
HEADS, KV_HEADS, DIM, TURNED = 4, 2, 8, 4
INNER, WIDTH, SHARED, EXPERTS, PICKED = 24, 16, 20, 4, 2
BLOCK, BLOCKS = 3, 2
THETA, ALPHA, LIMIT, SCALING = 5000000.0, 1.702, 1.5, 2.0
SPARSE = [0, 1, 1]
IMAGE, PATCH = 16, 4
MTP = "language_model.model.mtp.layers.0."

TEXT: dict[str, Any] = {
    "architectures": ["MiniMaxM3SparseForCausalLM"],
    "attention_output_gate": False,
    "dense_intermediate_size": INNER,
    "head_dim": DIM,
    "hidden_act": "swigluoai",
    "hidden_size": HIDDEN,
    "intermediate_size": WIDTH,
    "max_position_embeddings": 1048576,
    "moe_layer_freq": SPARSE,
    "n_shared_experts": 1,
    "num_attention_heads": HEADS,
    "num_experts_per_tok": PICKED,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": KV_HEADS,
    "num_local_experts": EXPERTS,
    "num_mtp_modules": 7,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factor": TURNED / DIM,
    "qk_norm_type": "per_head",
    "rms_norm_eps": 1e-06,
    "rope_theta": 5000000,
    "rotary_dim": TURNED,
    "routed_scaling_factor": SCALING,
    "scoring_func": "sigmoid",
    "shared_intermediate_size": SHARED,
    "sparse_attention_config": {
        "sparse_attention_freq": SPARSE,
        "sparse_block_size": BLOCK,
        "sparse_disable_index_value": SPARSE,
        "sparse_index_dim": DIM,
        "sparse_init_block": 0,
        "sparse_local_block": 1,
        "sparse_num_index_heads": KV_HEADS,
        "sparse_score_type": "max",
        "sparse_topk_blocks": BLOCKS,
        "use_sparse_attention": True,
    },
    "swiglu_alpha": ALPHA,
    "swiglu_limit": LIMIT,
    "tie_word_embeddings": False,
    "use_gemma_norm": True,
    "use_qk_norm": True,
    "use_routing_bias": True,
    "vocab_size": VOCAB,
}

TOWER = "vision_tower.vision_model."
LAYER = f"{TOWER}encoder.layers.0."
VISION: Shapes = {
    f"{TOWER}embeddings.patch_embedding.weight": (IMAGE, 3, 2, PATCH, PATCH),
    f"{TOWER}pre_layrnorm.bias": (IMAGE,),
    f"{TOWER}pre_layrnorm.weight": (IMAGE,),
    **dict.fromkeys(
        [f"{LAYER}self_attn.{n}.weight" for n in ("q_proj", "k_proj", "v_proj", "out_proj")],
        (IMAGE, IMAGE),
    ),
    **dict.fromkeys(
        [f"{LAYER}self_attn.{n}.bias" for n in ("q_proj", "k_proj", "v_proj", "out_proj")],
        (IMAGE,),
    ),
    **dict.fromkeys(
        [f"{LAYER}layer_norm{i}.{part}" for i in (1, 2) for part in ("weight", "bias")], (IMAGE,)
    ),
    f"{LAYER}mlp.fc1.bias": (2 * IMAGE,),
    f"{LAYER}mlp.fc1.weight": (2 * IMAGE, IMAGE),
    f"{LAYER}mlp.fc2.bias": (IMAGE,),
    f"{LAYER}mlp.fc2.weight": (IMAGE, 2 * IMAGE),
    "multi_modal_projector.linear_1.bias": (HIDDEN,),
    "multi_modal_projector.linear_1.weight": (HIDDEN, IMAGE),
    "multi_modal_projector.linear_2.bias": (HIDDEN,),
    "multi_modal_projector.linear_2.weight": (HIDDEN, HIDDEN),
    "patch_merge_mlp.linear_1.bias": (HIDDEN,),
    "patch_merge_mlp.linear_1.weight": (HIDDEN, 4 * HIDDEN),
    "patch_merge_mlp.linear_2.bias": (HIDDEN,),
    "patch_merge_mlp.linear_2.weight": (HIDDEN, HIDDEN),
}
"""The images' side, which text never meets."""


def mlp(name: str, width: int) -> Shapes:
    return {
        f"{name}.gate_proj.weight": (width, HIDDEN),
        f"{name}.up_proj.weight": (width, HIDDEN),
        f"{name}.down_proj.weight": (HIDDEN, width),
    }


def block(sparse: bool) -> Shapes:
    shapes: Shapes = {
        "input_layernorm.weight": (HIDDEN,),
        "post_attention_layernorm.weight": (HIDDEN,),
        "self_attn.q_proj.weight": (HEADS * DIM, HIDDEN),
        "self_attn.k_proj.weight": (KV_HEADS * DIM, HIDDEN),
        "self_attn.v_proj.weight": (KV_HEADS * DIM, HIDDEN),
        "self_attn.o_proj.weight": (HIDDEN, HEADS * DIM),
        "self_attn.q_norm.weight": (DIM,),
        "self_attn.k_norm.weight": (DIM,),
    }
    if not sparse:
        return shapes | mlp("mlp", INNER)
    shapes |= {
        "self_attn.index_q_proj.weight": (KV_HEADS * DIM, HIDDEN),
        "self_attn.index_k_proj.weight": (DIM, HIDDEN),
        "self_attn.index_q_norm.weight": (DIM,),
        "self_attn.index_k_norm.weight": (DIM,),
        "block_sparse_moe.gate.weight": (EXPERTS, HIDDEN),
        "block_sparse_moe.e_score_correction_bias": (EXPERTS,),
        **mlp("block_sparse_moe.shared_experts", SHARED),
    }
    for i in range(EXPERTS):
        shapes |= {
            f"block_sparse_moe.experts.{i}.w1.weight": (WIDTH, HIDDEN),
            f"block_sparse_moe.experts.{i}.w2.weight": (HIDDEN, WIDTH),
            f"block_sparse_moe.experts.{i}.w3.weight": (WIDTH, HIDDEN),
        }
    return shapes


class TestMiniMaxM3(Proof):
    config: dict[str, Any] = {  # noqa: RUF012
        "architectures": ["MiniMaxM3SparseForConditionalGeneration"],
        "image_token_index": 20,
        "model_type": "minimax_m3_vl",
        "projector_hidden_size": HIDDEN,
        "text_config": TEXT,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.52.4",
        "video_token_index": 21,
        "vision_config": {
            "hidden_size": IMAGE,
            "image_size": 16,
            "intermediate_size": 2 * IMAGE,
            "model_type": "clip_vision_model",
            "num_attention_heads": 2,
            "num_hidden_layers": 1,
            "patch_size": PATCH,
        },
    }
    no_norm = 0.0
    silent = (*Proof.silent, "w2.weight")
    embedding = "language_model.model.embed_tokens.weight"
    output = "language_model.lm_head.weight"
    join = f"{MTP}eh_proj.weight"

    def shapes(self) -> Shapes:
        shapes: Shapes = {
            self.embedding: (VOCAB, HIDDEN),
            "language_model.model.norm.weight": (HIDDEN,),
            self.output: (VOCAB, HIDDEN),
            **VISION,
        }
        for i, sparse in enumerate(SPARSE):
            layer = f"language_model.model.layers.{i}."
            shapes |= {layer + name: shape for name, shape in block(bool(sparse)).items()}
        shapes |= dict.fromkeys(
            [f"{MTP}{name}.weight" for name in ("enorm", "hnorm", "final_layernorm")], (HIDDEN,)
        )
        shapes[self.join] = (HIDDEN, 2 * HIDDEN)
        layer = f"{MTP}transformer_layer."
        return shapes | {layer + name: shape for name, shape in block(True).items()}

    def tensors(self):
        return random_tensors(self.shapes(), self.dtype, centre=0.0)

    def reference(self, directory):
        return Layer(directory, self)


class Layer(StraightLine):
    """Attention within the best blocks of keys, and experts beside a shared one."""

    layer = f"{MTP}transformer_layer."
    names = (f"{MTP}enorm", f"{MTP}hnorm", f"{MTP}eh_proj", f"{MTP}final_layernorm")

    def norm(self, name, x, eps=None):
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return x * scale * (1 + self.tensors[f"{name}.weight"])

    def attend(self, x):
        q, k, v = self.heads("q", x), self.heads("k", x), self.linear("self_attn.v_proj", x)
        groups = zip(
            q.chunk(KV_HEADS, 1),
            k.chunk(KV_HEADS, 1),
            v.view(len(x), KV_HEADS, DIM).chunk(KV_HEADS, 1),
            self.picked(x),
            strict=True,
        )
        mixed = [attention(*group) for group in groups]
        return self.linear("self_attn.o_proj", torch.cat(mixed, -1))

    def heads(self, name, x):
        """Normed, and half of each turned by its position, [T, heads, D]."""
        heads = self.linear(f"self_attn.{name}_proj", x).view(len(x), -1, DIM)
        heads = self.norm(f"{self.layer}self_attn.{name}_norm", heads)
        part = turned(heads[..., :TURNED], frequencies(TURNED, THETA))
        return torch.cat([part, heads[..., TURNED:]], -1)

    def picked(self, x):
        """Which keys each query sees, by groups of heads [G, T, T]: those of its own block and of
        the others' best, a block being as good as its best key."""
        scores = torch.einsum(
            "qgd,kd->gqk", self.heads("index_q", x), self.heads("index_k", x)[:, 0]
        )
        seen = torch.zeros_like(scores).bool()
        for group in range(KV_HEADS):
            for query in range(len(x)):
                best = [b.max().item() for b in scores[group, query, : query + 1].split(BLOCK)]
                own = len(best) - 1
                others = sorted(range(own), key=best.__getitem__)[1 - BLOCKS :]
                for block in (*others, own):
                    seen[group, query, block * BLOCK : (block + 1) * BLOCK] = True
        return seen & causal(len(x))

    def feed(self, x):
        moe = "block_sparse_moe"
        shares = self.shares(f"{moe}.gate", f"{moe}.e_score_correction_bias", x, PICKED)
        shared = self.gated(x, *(f"{moe}.shared_experts.{n}_proj" for n in ("gate", "up", "down")))
        return self.experts(f"{moe}.experts", x, shares) * SCALING + shared

    def experts(self, name, x, shares):
        parts = [
            shares[:, i, None] * self.gated(x, *(f"{name}.{i}.{w}" for w in ("w1", "w3", "w2")))
            for i in range(EXPERTS)
        ]
        return torch.stack(parts).sum(0)

    def gated(self, x, gate, up, down):
        gate = self.linear(gate, x).clamp(max=LIMIT)
        up = self.linear(up, x).clamp(-LIMIT, LIMIT)
        return self.linear(down, gate * (ALPHA * gate).sigmoid() * (up + 1))
