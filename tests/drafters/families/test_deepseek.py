"""DeepSeek-V3 and GLM-4.5 to 4.7, as they are published but tiny."""

from __future__ import annotations

import math

import tiny_native
import torch
from family_proof import Proof, random_tensors, read_tensors
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

HEADS = 4
LAYER = f"model.layers.{tiny_native.TRUNK_LAYERS}."


class Behind(Proof):
    """Families whose MTP layer is numbered on behind the trunk's, with copies of its matrices."""

    join = f"{LAYER}eh_proj.weight"
    copies = (f"{LAYER}embed_tokens.weight",)
    embedding = "model.embed_tokens.weight"
    straight_line: type

    def shapes(self):
        return tiny_native.shapes(self.config, 1)

    def tensors(self):
        tensors = random_tensors(self.shapes(), self.dtype)
        return tensors | tiny_native.copies(tensors, 1)

    def reference(self, directory):
        return self.straight_line(directory, self.config)


class StraightLine:
    """The layer over whole texts, written from DeepSeek-V3's report (arXiv 2412.19437)."""

    def __init__(self, directory, config):
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        self.tensors, self.config = read_tensors(directory), config

    def __call__(self, known, drafted):
        hidden = self.model.model(torch.tensor([known[:-1]])).last_hidden_state[0]
        tokens, rows = list(known[1:]), []
        for token in drafted:
            embeds = self.tensors["model.embed_tokens.weight"][tokens]
            pair = [self.norm("enorm", embeds), self.norm("hnorm", hidden)]
            x = self.linear("eh_proj", torch.cat(pair, -1))
            x = x + self.attend(self.norm("input_layernorm", x))
            x = x + self.feed(self.norm("post_attention_layernorm", x))
            last = self.norm("shared_head.norm", x)[-1:]
            rows.append((last @ self.tensors["lm_head.weight"].T)[0])
            hidden, tokens = torch.cat([hidden, last]), [*tokens, token]
        return torch.stack(rows)

    def norm(self, name, x):
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"])
        return x * scale * self.tensors[f"{LAYER}{name}.weight"]

    def linear(self, name, x):
        bias = self.tensors.get(f"{LAYER}{name}.bias", 0)
        return x @ self.tensors[f"{LAYER}{name}.weight"].T + bias

    def attend(self, x):
        raise NotImplementedError

    def softmax_attention(self, q, k, v, scale):
        """Of queries, keys and values [T, heads, D], and what o_proj makes of it."""
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        scores = scores.masked_fill(~torch.ones(len(q), len(q)).tril().bool(), -torch.inf)
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)
        return self.linear("self_attn.o_proj", mixed.flatten(1))

    def feed(self, x):
        """Experts by sigmoid affinity; a bias decides who is picked, and not how much they say."""
        config, experts = self.config, tiny_native.EXPERTS
        affinity = (x @ self.tensors[f"{LAYER}mlp.gate.weight"].T).sigmoid()
        choice = affinity + self.tensors[f"{LAYER}mlp.gate.e_score_correction_bias"]
        # Whole groups are picked first, by the sum of their two best.
        groups = choice.view(len(x), config["n_group"], -1)
        best = groups.topk(2, -1).values.sum(-1).topk(config["topk_group"], -1).indices
        allowed = torch.zeros(len(x), config["n_group"]).scatter(1, best, 1).bool()
        groups = groups.masked_fill(~allowed[..., None], -torch.inf)
        picked = groups.flatten(1).topk(config["num_experts_per_tok"], -1).indices
        weights = affinity.gather(1, picked)
        weights = weights / weights.sum(-1, keepdim=True) * config["routed_scaling_factor"]
        result = self.mlp("mlp.shared_experts", x)
        for i in range(experts):
            share = (weights * (picked == i)).sum(-1, keepdim=True)
            result = result + share * self.mlp(f"mlp.experts.{i}", x)
        return result

    def mlp(self, name, x):
        gated = F.silu(self.linear(f"{name}.gate_proj", x)) * self.linear(f"{name}.up_proj", x)
        return self.linear(f"{name}.down_proj", gated)


class Latent(StraightLine):
    """Multi-head latent attention, with YaRN's positions (arXiv 2309.00071, 3.2)."""

    def attend(self, x):
        count, config = len(x), self.config
        nope, rope, size = (
            config[k] for k in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        )
        q = self.linear("self_attn.q_a_proj", x)
        q = self.linear("self_attn.q_b_proj", self.norm("self_attn.q_a_layernorm", q))
        q, q_turned = q.view(count, HEADS, nope + rope).split([nope, rope], -1)
        pair = self.linear("self_attn.kv_a_proj_with_mqa", x)
        latent, k_turned = pair.split([config["kv_lora_rank"], rope], -1)
        kv = self.linear("self_attn.kv_b_proj", self.norm("self_attn.kv_a_layernorm", latent))
        k, v = kv.view(count, HEADS, nope + size).split([nope, size], -1)
        k_turned = self.turn(k_turned[:, None]).expand(-1, HEADS, -1)
        q, k = torch.cat([q, self.turn(q_turned)], -1), torch.cat([k, k_turned], -1)
        yarn = config["rope_scaling"]
        mscale = 0.1 * yarn["mscale_all_dim"] * math.log(yarn["factor"]) + 1
        return self.softmax_attention(q, k, v, (nope + rope) ** -0.5 * mscale**2)

    def turn(self, x):
        """Numbers beside each other are turned together."""
        yarn, base, size = self.config["rope_scaling"], self.config["rope_theta"], x.shape[-1]
        length = yarn["original_max_position_embeddings"]

        def dimension(turns):
            return size * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(base))

        low = max(math.floor(dimension(yarn["beta_fast"])), 0)
        high = min(math.ceil(dimension(yarn["beta_slow"])), size - 1)
        ramp = ((torch.arange(size // 2) - low) / (high - low)).clamp(0, 1)
        pace = base ** (-torch.arange(0, size, 2) / size)
        pace = pace * (1 - ramp) + pace / yarn["factor"] * ramp
        angles = (torch.arange(len(x))[:, None] * pace)[:, None]
        a, b = x[..., ::2], x[..., 1::2]
        turned = [a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()]
        return torch.stack(turned, -1).flatten(-2)


class Grouped(StraightLine):
    """Grouped-query attention with norms and biases, half of each head turned."""

    def attend(self, x):
        count, size = len(x), self.config["head_dim"]
        q, k, v = (self.linear(f"self_attn.{name}_proj", x).view(count, -1, size) for name in "qkv")
        q, k = (self.turn(self.norm(f"self_attn.{n}_norm", y)) for n, y in (("q", q), ("k", k)))
        k, v = (y.repeat_interleave(HEADS // y.shape[1], 1) for y in (k, v))
        return self.softmax_attention(q, k, v, size**-0.5)

    def turn(self, x):
        """A number is turned together with the one half the way on."""
        size = int(x.shape[-1] * self.config["partial_rotary_factor"])
        pace = float(self.config["rope_theta"]) ** (-torch.arange(0, size, 2) / size)
        angles = (torch.arange(len(x))[:, None] * pace)[:, None]
        a, b, rest = x.split([size // 2, size // 2, x.shape[-1] - size], -1)
        turned = [a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin(), rest]
        return torch.cat(turned, -1)


class TestDeepseekV3(Behind):
    """Its report's multi-token prediction."""

    config = tiny_native.DEEPSEEK_V3 | {"torch_dtype": "bfloat16"}
    straight_line = Latent


class TestGlm4Moe(Behind):
    """GLM-4.5, 4.6 and 4.7."""

    config = tiny_native.GLM4_MOE | {"torch_dtype": "bfloat16"}
    straight_line = Grouped
