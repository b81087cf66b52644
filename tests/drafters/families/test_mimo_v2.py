"""MiMo-V2-Flash, as it is published but tiny and unquantised: three layers, one for each draft."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import scheduled
import torch
from family_proof import (
    HIDDEN,
    PROMPTS,
    SAMPLED,
    VOCAB,
    Proof,
    Reference,
    Shapes,
    attend,
    decode,
    turn,
    watch_drafts,
)

from mtplx.engine import decoding
from mtplx.engine.decoding import Batch
from mtplx.engine.request import Request

LAYERS, MTP_LAYERS = 6, 3
HEADS, KV_HEADS, DIM, VALUE_DIM, INNER = 4, 1, 12, 8, 64
EXPERTS, EXPERT_INNER = 4, 16
WINDOW = 4  # positions before a query's own
THETA, LOCAL_THETA = 5000000, 10000
MTP = "model.mtp.layers."

CONFIG: dict[str, Any] = {
    "add_full_attention_sink_bias": False,
    "add_swa_attention_sink_bias": True,
    "architectures": ["MiMoV2FlashForCausalLM"],
    "attention_bias": False,
    "attention_chunk_size": WINDOW,
    "attention_dropout": 0.0,
    "attention_value_scale": 0.707,
    "auto_map": {
        "AutoConfig": "configuration_mimo_v2_flash.MiMoV2FlashConfig",
        "AutoModel": "modeling_mimo_v2_flash.MiMoV2FlashModel",
        "AutoModelForCausalLM": "modeling_mimo_v2_flash.MiMoV2FlashForCausalLM",
    },
    "eos_token_id": 1,
    "head_dim": DIM,
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "hybrid_block_size": None,
    "hybrid_layer_pattern": [0, 1, 1, 1, 1, 0],
    "initializer_range": 0.02,
    "intermediate_size": INNER,
    "layernorm_epsilon": 1e-05,
    "max_position_embeddings": 262144,
    "model_type": "mimo_v2_flash",
    "moe_intermediate_size": EXPERT_INNER,
    "moe_layer_freq": [0, 1, 1, 1, 1, 1],
    "n_group": 1,
    "n_routed_experts": EXPERTS,
    "n_shared_experts": None,
    "norm_topk_prob": True,
    "num_attention_heads": HEADS,
    "num_experts_per_tok": 2,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": KV_HEADS,
    "num_nextn_predict_layers": MTP_LAYERS,
    "partial_rotary_factor": 0.334,
    "rope_theta": THETA,
    "routed_scaling_factor": None,
    "scoring_func": "sigmoid",
    "sliding_window": WINDOW,
    "sliding_window_size": WINDOW,
    "swa_head_dim": DIM,
    "swa_num_attention_heads": HEADS,
    "swa_num_key_value_heads": 2 * KV_HEADS,
    "swa_rope_theta": LOCAL_THETA,
    "swa_v_head_dim": VALUE_DIM,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "v_head_dim": VALUE_DIM,
    "vocab_size": VOCAB,
}


def attention(local: bool) -> Shapes:
    kv_heads = 2 * KV_HEADS if local else KV_HEADS
    shapes: Shapes = {
        "self_attn.q_proj.weight": (HEADS * DIM, HIDDEN),
        "self_attn.k_proj.weight": (kv_heads * DIM, HIDDEN),
        "self_attn.v_proj.weight": (kv_heads * VALUE_DIM, HIDDEN),
        "self_attn.o_proj.weight": (HIDDEN, HEADS * VALUE_DIM),
    }
    if local:
        shapes["self_attn.attention_sink_bias"] = (HEADS,)
    return shapes


def mlp(name: str, width: int) -> Shapes:
    return {
        f"{name}.gate_proj.weight": (width, HIDDEN),
        f"{name}.up_proj.weight": (width, HIDDEN),
        f"{name}.down_proj.weight": (HIDDEN, width),
    }


def experts() -> Shapes:
    shapes: Shapes = {"mlp.gate.weight": (EXPERTS, HIDDEN)}
    shapes["mlp.gate.e_score_correction_bias"] = (EXPERTS,)
    for i in range(EXPERTS):
        shapes |= mlp(f"mlp.experts.{i}", EXPERT_INNER)
    return shapes


class TestMiMoV2Flash(Proof):
    config = CONFIG
    layers = MTP_LAYERS
    chained = False
    depth = 5
    join = f"{MTP}{{}}.eh_proj.weight"

    def shapes(self):
        shapes: Shapes = {
            "model.embed_tokens.weight": (VOCAB, HIDDEN),
            "model.norm.weight": (HIDDEN,),
            "lm_head.weight": (VOCAB, HIDDEN),
        }
        for i in range(LAYERS):
            layer: Shapes = {
                "input_layernorm.weight": (HIDDEN,),
                "post_attention_layernorm.weight": (HIDDEN,),
                **attention(local=bool(CONFIG["hybrid_layer_pattern"][i])),
                **(experts() if CONFIG["moe_layer_freq"][i] else mlp("mlp", INNER)),
            }
            shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
        for i in range(MTP_LAYERS):
            names = ("enorm", "hnorm", "input_layernorm", "pre_mlp_layernorm", "final_layernorm")
            layer = {f"{name}.weight": (HIDDEN,) for name in names}
            layer |= {"eh_proj.weight": (HIDDEN, 2 * HIDDEN)}
            layer |= attention(local=True) | mlp("mlp", INNER)
            shapes |= {f"{MTP}{i}.{name}": shape for name, shape in layer.items()}
        return shapes

    def reference(self, directory):
        return StraightLine(directory, self)

    def compare(self, directory, cycles):
        reference = self.reference(directory)
        compared = 0
        with torch.inference_mode():
            for _, known, drafted, logits in cycles:
                if len(known) > 1:
                    expected = reference(known, drafted.tolist())
                    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)
                    compared += 1
        assert compared > 3

    @pytest.mark.parametrize("chunk", [1, 2, 5])
    def test_prompts_may_be_read_in_parts(self, directory, loaded, chunk, monkeypatch):
        """Where a short one is over long before the others."""
        monkeypatch.setattr(decoding, "PREFILL_TOKENS", 4 * chunk)
        trunk, head, _ = loaded
        prompts = [(2, 7), *PROMPTS]
        cycles: list = []
        decode(trunk, head, prompts, 5, SAMPLED, 12, partial(watch_drafts, cycles))
        self.compare(directory, cycles)

    @pytest.mark.parametrize("prompt", [(7,), (7, 2), (7, 2, 5)])
    def test_a_text_may_be_shorter_than_there_are_layers(self, directory, loaded, prompt):
        trunk, head, _ = loaded
        cycles: list = []
        decode(trunk, head, [prompt], 5, SAMPLED, 24, partial(watch_drafts, cycles))
        self.compare(directory, cycles)

    def test_refills_may_be_put_off(self, loaded):
        trunk, head, _ = loaded
        scheduled.assert_postponed_refills_show_nowhere(trunk, head, [(1, 2, 3), (4,)])

    @pytest.mark.parametrize("common", [12, 20])
    def test_a_next_text_goes_on_from_what_the_last_one_left(self, directory, loaded, common):
        trunk, head, _ = loaded
        first = Request(PROMPTS[0], SAMPLED, 0, 24, 5)
        batch = Batch(trunk, head, [first])
        text = [*PROMPTS[0], *(t for bursts in batch.run() for b in bursts for t in b.tokens)]
        cycles: list = []
        second = Request((*text[:common], 1, 2, 3), SAMPLED, 1, 24, 5)
        batch = Batch(trunk, head, [second], prefix=batch.prefix())
        watch_drafts(cycles, batch)
        (slot,) = batch.slots
        list(batch.run())
        assert slot.stats.cached_tokens == common - MTP_LAYERS
        self.compare(directory, cycles)


class StraightLine(Reference):
    """The layers over whole texts: each of the trunk's states, joined with tokens further on."""

    eps = 1e-5

    def __call__(self, known, drafted):
        hidden = self.model.model(torch.tensor([known[:-1]])).last_hidden_state[0]
        tokens, rows = [*known, *drafted], []
        count = len(hidden)
        for i in range(len(drafted)):
            k = min(i, MTP_LAYERS - 1)
            following = tokens[1 + k : 1 + k + len(hidden)]
            x = self.layer(f"{MTP}{k}.", following, hidden)
            rows.append(self.linear("lm_head", x[-1]))
            # Behind the last layer, its own states stand for those that the trunk has not made.
            if i >= MTP_LAYERS - 1:
                hidden = torch.cat([hidden, x[-1:]])
        assert len(hidden) == count + max(0, len(drafted) - MTP_LAYERS + 1)
        return torch.stack(rows)

    def layer(self, name, tokens, hidden):
        embeds = self.tensors["model.embed_tokens.weight"][tokens]
        pair = [self.norm(f"{name}enorm", embeds), self.norm(f"{name}hnorm", hidden)]
        x = self.linear(f"{name}eh_proj", torch.cat(pair, -1))
        x = x + self.attention(f"{name}self_attn", self.norm(f"{name}input_layernorm", x))
        x = x + self.mlp(f"{name}mlp", self.norm(f"{name}pre_mlp_layernorm", x))
        return self.norm(f"{name}final_layernorm", x)

    def attention(self, name, x):
        q, k, v = (
            self.linear(f"{name}.{part}_proj", x).view(len(x), -1, size)
            for part, size in (("q", DIM), ("k", DIM), ("v", VALUE_DIM))
        )
        q, k = (turn(y, LOCAL_THETA, int(0.334 * DIM)) for y in (q, k))
        sinks = self.tensors[f"{name}.attention_sink_bias"]
        return self.linear(f"{name}.o_proj", attend(q, k, 0.707 * v, WINDOW + 1, sinks))
