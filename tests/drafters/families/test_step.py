"""Step-3.7-Flash, as it is published but tiny: the text of a model of images, and three layers."""

from __future__ import annotations

from typing import Any

import torch
from family_proof import HIDDEN, VOCAB, Proof, Shapes, random_tensors
from straight_line import StraightLine, attention, causal, frequencies, turned

LAYERS, COUNT = 4, 3
HEADS, MORE_HEADS, KV_HEADS, DIM = 4, 6, 2, 8
INNER, WIDTH, SHARED, EXPERTS, PICKED = 24, 16, 20, 4, 2
WINDOW, THETA, LIMIT = 4, 10000.0, 1.5
FULL, SLIDING = "full_attention", "sliding_attention"
KINDS = [FULL, SLIDING, SLIDING, SLIDING]
SPARSE = (2, 3)

TEXT: dict[str, Any] = {
    "attention_other_setting": {
        "attention_type": SLIDING,
        "head_dim": DIM,
        "num_attention_groups": KV_HEADS,
        "num_attention_heads": MORE_HEADS,
    },
    "dtype": "bfloat16",
    "eos_token_id": [1, 2],
    "head_dim": DIM,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "layer_types": [*KINDS, *[SLIDING] * COUNT],
    "max_position_embeddings": 262144,
    "model_type": "step3p5",
    "moe_intermediate_size": WIDTH,
    "moe_layers_enum": ",".join(map(str, SPARSE)),
    "moe_num_experts": EXPERTS,
    "moe_router_scaling_factor": 3.0,
    "moe_top_k": PICKED,
    "num_attention_groups": KV_HEADS,
    "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "num_nextn_predict_layers": COUNT,
    "pad_token_id": 3,
    "partial_rotary_factors": [0.5, *[1.0] * (LAYERS + COUNT - 1)],
    "rms_norm_eps": 1e-05,
    "rope_theta": [5000000.0, *[THETA] * (LAYERS + COUNT - 1)],
    "share_expert_dim": SHARED,
    "sliding_window": WINDOW,
    "swiglu_limits": [0.0, LIMIT, 0.0, LIMIT, *[0.0] * COUNT],
    "swiglu_limits_shared": [0.0, LIMIT, 0.0, LIMIT, *[0.0] * COUNT],
    "vocab_size": VOCAB,
}

VISION: Shapes = {
    "conv1.weight": (16, 3, 4, 4),
    "ln_pre.bias": (16,),
    "ln_pre.weight": (16,),
    "positional_embedding": (16, 16),
    "vit_downsampler1.bias": (32,),
    "vit_downsampler1.weight": (32, 16, 3, 3),
    "vit_downsampler2.bias": (64,),
    "vit_downsampler2.weight": (64, 32, 3, 3),
    "transformer.resblocks.0.attn.in_proj_bias": (48,),
    "transformer.resblocks.0.attn.in_proj_weight": (48, 16),
    "transformer.resblocks.0.attn.out_proj.bias": (16,),
    "transformer.resblocks.0.attn.out_proj.weight": (16, 16),
    "transformer.resblocks.0.ln_1.bias": (16,),
    "transformer.resblocks.0.ln_1.weight": (16,),
    "transformer.resblocks.0.ln_2.bias": (16,),
    "transformer.resblocks.0.ln_2.weight": (16,),
    "transformer.resblocks.0.ls_1.gamma": (16,),
    "transformer.resblocks.0.ls_2.gamma": (16,),
    "transformer.resblocks.0.mlp.c_fc.bias": (93,),
    "transformer.resblocks.0.mlp.c_fc.weight": (93, 16),
    "transformer.resblocks.0.mlp.c_proj.bias": (16,),
    "transformer.resblocks.0.mlp.c_proj.weight": (16, 93),
}
"""The images' side, which text never meets."""


def mlp(name: str, width: int) -> Shapes:
    return {
        f"{name}.gate_proj.weight": (width, HIDDEN),
        f"{name}.up_proj.weight": (width, HIDDEN),
        f"{name}.down_proj.weight": (HIDDEN, width),
    }


class TestStep37(Proof):
    config: dict[str, Any] = {  # noqa: RUF012
        "architectures": ["Step3p7ForConditionalGeneration"],
        "image_token_id": 20,
        "model_type": "step3p7",
        "text_config": TEXT,
        "vision_config": {
            "heads": 2,
            "image_size": 16,
            "layers": 1,
            "patch_size": 4,
            "width": 16,
        },
    }
    layers = 3
    no_norm = 0.0
    join = f"model.layers.{LAYERS}.eh_proj.weight"

    def block(self, kind: str, sparse: bool) -> Shapes:
        heads = MORE_HEADS if kind == SLIDING else HEADS
        shapes: Shapes = {
            "input_layernorm.weight": (HIDDEN,),
            "post_attention_layernorm.weight": (HIDDEN,),
            "self_attn.q_proj.weight": (heads * DIM, HIDDEN),
            "self_attn.k_proj.weight": (KV_HEADS * DIM, HIDDEN),
            "self_attn.v_proj.weight": (KV_HEADS * DIM, HIDDEN),
            "self_attn.o_proj.weight": (HIDDEN, heads * DIM),
            "self_attn.g_proj.weight": (heads, HIDDEN),
            "self_attn.q_norm.weight": (DIM,),
            "self_attn.k_norm.weight": (DIM,),
        }
        if not sparse:
            return shapes | mlp("mlp", INNER)
        return shapes | {
            "moe.gate.weight": (EXPERTS, HIDDEN),
            "moe.router_bias": (EXPERTS,),
            "moe.gate_proj.weight": (EXPERTS, WIDTH, HIDDEN),
            "moe.up_proj.weight": (EXPERTS, WIDTH, HIDDEN),
            "moe.down_proj.weight": (EXPERTS, HIDDEN, WIDTH),
            **mlp("share_expert", SHARED),
        }

    def shapes(self) -> Shapes:
        shapes: Shapes = {
            self.embedding: (VOCAB, HIDDEN),
            "model.norm.weight": (HIDDEN,),
            self.output: (VOCAB, HIDDEN),
            "vit_large_projector.weight": (HIDDEN, 64),
            **{f"vision_model.{name}": shape for name, shape in VISION.items()},
        }
        for i, kind in enumerate(TEXT["layer_types"]):
            layer = self.block(kind, i in SPARSE)
            if i >= LAYERS:
                layer |= {
                    "enorm.weight": (HIDDEN,),
                    "hnorm.weight": (HIDDEN,),
                    "eh_proj.weight": (HIDDEN, 2 * HIDDEN),
                    "transformer.shared_head.norm.weight": (HIDDEN,),
                    "transformer.shared_head.output.weight": (VOCAB, HIDDEN),
                }
            shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
        return shapes

    def tensors(self):
        return random_tensors(self.shapes(), self.dtype, centre=0.0)

    def counting(self, source):
        tensors = super().counting(source)
        for name in tensors:
            if name.endswith("eh_proj.weight"):
                tensors[name].copy_(tensors[self.join])
            elif name.endswith("shared_head.output.weight"):
                tensors[name].copy_(tensors[self.output])
        return tensors

    def reference(self, directory):
        return Layers(directory, self)


class Layers(StraightLine):
    """Three layers, each over what the one before makes of the same positions."""

    eps = 1e-5

    def __call__(self, known, drafted):
        stream, rows = self.states(known[:-1]), []
        text = [*known, *drafted]
        for k in range(min(COUNT, len(drafted))):
            self.layer = f"model.layers.{LAYERS + k}."
            # Behind position i comes the token after what the layer before has predicted of it.
            embeds = self.embedding[text[1 + k : len(known) + k]]
            pair = [
                self.norm(f"{self.layer}enorm", embeds),
                self.norm(f"{self.layer}hnorm", stream),
            ]
            stream = self.decode(
                torch.cat(pair, -1) @ self.tensors[f"{self.layer}eh_proj.weight"].T
            )
            head = f"{self.layer}transformer.shared_head"
            last = self.norm(f"{head}.norm", stream)[-1]
            rows.append(last @ self.tensors[f"{head}.output.weight"].T)
        return torch.stack(rows)

    def states(self, text):
        """Those of the trunk before its last norm."""
        seen = []
        layer = self.model.model.language_model.layers[-1]
        hook = layer.register_forward_hook(lambda module, inputs, output: seen.append(output))
        self.model.model(torch.tensor([list(text)]))
        hook.remove()
        return seen[0][0]

    def norm(self, name, x, eps=None):
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return x * scale * (1 + self.tensors[f"{name}.weight"])

    def attend(self, x):
        q, k, v = (self.linear(f"self_attn.{n}_proj", x).view(len(x), -1, DIM) for n in "qkv")
        q, k = (
            turned(self.norm(f"{self.layer}self_attn.{n}_norm", y), frequencies(DIM, THETA))
            for n, y in (("q", q), ("k", k))
        )
        mixed = attention(q, k, v, causal(len(x), WINDOW)).view(len(x), -1, DIM)
        gate = self.linear("self_attn.g_proj", x).sigmoid()[..., None]
        return self.linear("self_attn.o_proj", (mixed * gate).flatten(1))

    def feed(self, x):
        return self.mlp("mlp", x)
