"""Qwen3-Next, Qwen3.5 and Qwen3.6, as they are published but tiny."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
from family_proof import (
    HIDDEN,
    PROMPTS,
    SAMPLED,
    VOCAB,
    Proof,
    Shapes,
    decode,
    load,
    random_tensors,
    read_tensors,
    write_checkpoint,
)
from gguf import GGMLQuantizationType
from gguf_layout import InGguf, write_gguf
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from mtplx import kernels
from mtplx.drafters.native import load_native_head
from mtplx.models.checkpoint import Checkpoint, load_model, load_rounded
from mtplx.models.linear import KernelLinear
from mtplx.models.slots import Span
from mtplx.models.trunk import Trunk

LAYERS = 4
HEADS, KV_HEADS, DIM = 4, 2, 8
KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM = 2, 4, 4, 6
INNER, EXPERTS = 24, 4
MTP = "mtp.layers.0."

COMMON: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "full_attention_interval": 4,
    "head_dim": DIM,
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "initializer_range": 0.02,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": KEY_DIM,
    "linear_num_key_heads": KEY_HEADS,
    "linear_num_value_heads": VALUE_HEADS,
    "linear_value_head_dim": VALUE_DIM,
    "max_position_embeddings": 262144,
    "mlp_only_layers": [],
    "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": KV_HEADS,
    "rms_norm_eps": 1e-06,
    "tie_word_embeddings": False,
    "use_cache": True,
    "vocab_size": VOCAB,
}
MOE: dict[str, Any] = {
    "moe_intermediate_size": 16,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 12,
}
NEXT = {
    "architectures": ["Qwen3NextForCausalLM"],
    "bos_token_id": 1,
    "decoder_sparse_step": 1,
    "eos_token_id": 2,
    "intermediate_size": INNER,
    "model_type": "qwen3_next",
    "norm_topk_prob": True,
    "partial_rotary_factor": 0.25,
    "rope_scaling": None,
    "rope_theta": 10000000,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.57.0.dev0",
    "use_sliding_window": False,
    **COMMON,
    **MOE,
}
TEXT = {
    "attn_output_gate": True,
    "dtype": "bfloat16",
    "eos_token_id": 2,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "mamba_ssm_dtype": "float32",
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [1, 0, 0],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000000,
        "rope_type": "default",
    },
    **COMMON,
}
VISION = {
    "depth": 1,
    "deepstack_visual_indexes": [],
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_size": 16,
    "in_channels": 3,
    "initializer_range": 0.02,
    "intermediate_size": 16,
    "model_type": "qwen3_5",
    "num_heads": 2,
    "num_position_embeddings": 16,
    "out_hidden_size": HIDDEN,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}


def of_images(kind: str, text: dict[str, Any]) -> dict[str, Any]:
    """The config of a model of text and images around a text model's."""
    return {
        "architectures": [f"{kind}ForConditionalGeneration"],
        "image_token_id": 20,
        "model_type": "qwen3_5_moe" if "Moe" in kind else "qwen3_5",
        "text_config": text,
        "tie_word_embeddings": text["tie_word_embeddings"],
        "transformers_version": "4.57.0.dev0",
        "video_token_id": 21,
        "vision_config": VISION,
        "vision_end_token_id": 22,
        "vision_start_token_id": 23,
    }


def attention() -> Shapes:
    return {
        # A head's query, and behind it the gate of its output.
        "self_attn.q_proj.weight": (2 * HEADS * DIM, HIDDEN),
        "self_attn.k_proj.weight": (KV_HEADS * DIM, HIDDEN),
        "self_attn.v_proj.weight": (KV_HEADS * DIM, HIDDEN),
        "self_attn.o_proj.weight": (HIDDEN, HEADS * DIM),
        "self_attn.q_norm.weight": (DIM,),
        "self_attn.k_norm.weight": (DIM,),
    }


def delta_net(joined: bool) -> Shapes:
    keys, values = KEY_HEADS * KEY_DIM, VALUE_HEADS * VALUE_DIM
    shapes: Shapes = {
        "A_log": (VALUE_HEADS,),
        "dt_bias": (VALUE_HEADS,),
        "conv1d.weight": (2 * keys + values, 1, 4),
        "norm.weight": (VALUE_DIM,),
        "out_proj.weight": (HIDDEN, values),
    }
    if joined:
        shapes |= {
            "in_proj_qkvz.weight": (2 * keys + 2 * values, HIDDEN),
            "in_proj_ba.weight": (2 * VALUE_HEADS, HIDDEN),
        }
    else:
        shapes |= {
            "in_proj_qkv.weight": (2 * keys + values, HIDDEN),
            "in_proj_z.weight": (values, HIDDEN),
            "in_proj_b.weight": (VALUE_HEADS, HIDDEN),
            "in_proj_a.weight": (VALUE_HEADS, HIDDEN),
        }
    return {f"linear_attn.{name}": shape for name, shape in shapes.items()}


def mlp(name: str, width: int) -> Shapes:
    return {
        f"{name}.gate_proj.weight": (width, HIDDEN),
        f"{name}.up_proj.weight": (width, HIDDEN),
        f"{name}.down_proj.weight": (HIDDEN, width),
    }


def experts(together: bool) -> Shapes:
    width = MOE["moe_intermediate_size"]
    shapes: Shapes = {
        "mlp.gate.weight": (EXPERTS, HIDDEN),
        "mlp.shared_expert_gate.weight": (1, HIDDEN),
        **mlp("mlp.shared_expert", MOE["shared_expert_intermediate_size"]),
    }
    if together:
        return shapes | {
            "mlp.experts.gate_up_proj": (EXPERTS, 2 * width, HIDDEN),
            "mlp.experts.down_proj": (EXPERTS, HIDDEN, width),
        }
    for i in range(EXPERTS):
        shapes |= mlp(f"mlp.experts.{i}", width)
    return shapes


class Qwen(Proof):
    """All of them: what differs is how the trunk's tensors are called, and the MLP."""

    prefix = "model."
    joined = False
    moe: bool | None = None  # whether experts lie together; None for none
    moe_mtp: bool | None = None
    tied = False
    join = "mtp.fc.weight"
    no_norm = 0.0
    silent = (*Proof.silent, "out_proj.weight")

    def mlp(self, together: bool | None) -> Shapes:
        return mlp("mlp", INNER) if together is None else experts(together)

    def shapes(self) -> Shapes:
        norms: Shapes = {
            "input_layernorm.weight": (HIDDEN,),
            "post_attention_layernorm.weight": (HIDDEN,),
        }
        shapes: Shapes = {
            self.embedding: (VOCAB, HIDDEN),
            f"{self.prefix}norm.weight": (HIDDEN,),
            "mtp.fc.weight": (HIDDEN, 2 * HIDDEN),
            "mtp.pre_fc_norm_embedding.weight": (HIDDEN,),
            "mtp.pre_fc_norm_hidden.weight": (HIDDEN,),
            "mtp.norm.weight": (HIDDEN,),
        }
        if not self.tied:
            shapes[self.output] = (VOCAB, HIDDEN)
        if "vision_config" in self.config:
            shapes["model.visual.patch_embed.proj.weight"] = (16, 3, 2, 4, 4)
            shapes["model.visual.merger.linear_fc1.weight"] = (64, 64)
        for i in range(LAYERS):
            mixer = attention() if i % 4 == 3 else delta_net(self.joined)
            layer = norms | mixer | self.mlp(self.moe)
            shapes |= {f"{self.prefix}layers.{i}.{name}": shape for name, shape in layer.items()}
        layer = norms | attention() | self.mlp(self.moe_mtp)
        return shapes | {MTP + name: shape for name, shape in layer.items()}

    def tensors(self):
        tensors = random_tensors(self.shapes(), self.dtype, centre=0.0)
        for name, tensor in tensors.items():
            # The one norm that multiplies by its weight as it is.
            if name.endswith("linear_attn.norm.weight"):
                tensor += 1
        return tensors

    def reference(self, directory):
        return StraightLine(directory, self)


class StraightLine:
    """The head over whole texts, written from the description of Qwen3-Next's layers."""

    def __init__(self, directory, proof):
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        self.tensors, self.proof = read_tensors(directory), proof

    def __call__(self, known, drafted):
        tensors = self.tensors
        hidden = self.model.model(torch.tensor([known[:-1]])).last_hidden_state[0]
        tokens, rows = list(known[1:]), []
        output = tensors.get(self.proof.output, tensors[self.proof.embedding])
        for token in drafted:
            embeds = tensors[self.proof.embedding][tokens]
            pair = [
                self.norm("mtp.pre_fc_norm_embedding", embeds),
                self.norm("mtp.pre_fc_norm_hidden", hidden),
            ]
            x = torch.cat(pair, -1) @ tensors["mtp.fc.weight"].T
            x = x + self.attend(self.norm(f"{MTP}input_layernorm", x))
            x = x + self.feed(self.norm(f"{MTP}post_attention_layernorm", x))
            last = self.norm("mtp.norm", x)[-1:]
            rows.append((last @ output.T)[0])
            hidden, tokens = torch.cat([hidden, last]), [*tokens, token]
        return torch.stack(rows)

    def norm(self, name, x):
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return x * scale * (1 + self.tensors[f"{name}.weight"])

    def linear(self, name, x):
        return x @ self.tensors[f"{MTP}{name}.weight"].T

    def attend(self, x):
        count = len(x)
        q, gate = self.linear("self_attn.q_proj", x).view(count, HEADS, 2 * DIM).chunk(2, -1)
        k = self.linear("self_attn.k_proj", x).view(count, KV_HEADS, DIM)
        v = self.linear("self_attn.v_proj", x).view(count, KV_HEADS, DIM)
        q, k = (
            self.turn(self.norm(f"{MTP}self_attn.{name}_norm", y))
            for name, y in (("q", q), ("k", k))
        )
        k, v = (y.repeat_interleave(HEADS // KV_HEADS, 1) for y in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * DIM**-0.5
        scores = scores.masked_fill(~torch.ones(count, count).tril().bool(), -torch.inf)
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)
        return self.linear("self_attn.o_proj", (mixed * gate.sigmoid()).flatten(1))

    def turn(self, x):
        """A quarter of each head is turned by its position; the rest is left alone."""
        size = DIM // 4
        angles = torch.arange(len(x))[:, None] * 10000000.0 ** (-torch.arange(0, size, 2) / size)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        a, b = x[..., : size // 2], x[..., size // 2 : size]
        return torch.cat([a * cos - b * sin, b * cos + a * sin, x[..., size:]], -1)

    def feed(self, x):
        if self.proof.moe_mtp is None:
            return self.mlp("mlp", x)
        weights = self.linear("mlp.gate", x).softmax(-1)
        best, picked = weights.topk(MOE["num_experts_per_tok"], -1)
        best = best / best.sum(-1, keepdim=True)
        result = self.linear("mlp.shared_expert_gate", x).sigmoid() * self.mlp(
            "mlp.shared_expert", x
        )
        for i in range(EXPERTS):
            share = (best * (picked == i)).sum(-1, keepdim=True)
            result = result + share * self.expert(i, x)
        return result

    def expert(self, i, x):
        if not self.proof.moe_mtp:
            return self.mlp(f"mlp.experts.{i}", x)
        gate, up = (x @ self.tensors[f"{MTP}mlp.experts.gate_up_proj"][i].T).chunk(2, -1)
        return (F.silu(gate) * up) @ self.tensors[f"{MTP}mlp.experts.down_proj"][i].T

    def mlp(self, name, x):
        gated = F.silu(self.linear(f"{name}.gate_proj", x)) * self.linear(f"{name}.up_proj", x)
        return self.linear(f"{name}.down_proj", gated)


class TestQwen3Next(Qwen):
    """Its config.json does not name its MTP layer."""

    config = NEXT
    named = False
    joined = True
    moe = moe_mtp = False


class TestQwen35(Qwen):
    """The dense model of text and images."""

    config = of_images("Qwen3_5", TEXT | {"intermediate_size": INNER, "model_type": "qwen3_5_text"})
    prefix = "model.language_model."
    embedding = "model.language_model.embed_tokens.weight"


class TestQwen35Tied(TestQwen35):
    """The small ones, whose output head is the embedding."""

    config = of_images(
        "Qwen3_5",
        TEXT
        | {"intermediate_size": INNER, "model_type": "qwen3_5_text", "tie_word_embeddings": True},
    )
    tied = True

    @pytest.mark.skip(reason="what counts here needs an output head of its own")
    def test_a_head_that_knows_the_text_has_every_draft_kept(self):
        pass


class TestQwen35Moe(Qwen):
    """Experts that lie together, as in the bfloat16 files."""

    config = of_images("Qwen3_5Moe", TEXT | MOE | {"model_type": "qwen3_5_moe_text"})
    prefix = "model.language_model."
    embedding = "model.language_model.embed_tokens.weight"
    moe = moe_mtp = True


class TestQwen36Text(Qwen):
    """Text alone, the layer unnamed by the config, its experts apart as in the quantised files."""

    config = {
        key: value
        for key, value in (TEXT | MOE | {"model_type": "qwen3_5_moe_text"}).items()
        if not key.startswith("mtp_")
    } | {"architectures": ["Qwen3_5MoeForCausalLM"]}
    named = False
    moe, moe_mtp = True, False


class TestQwen35Gguf(InGguf, TestQwen35):
    pass


class TestQwen35TiedGguf(InGguf, TestQwen35Tied):
    pass


class TestQwen35MoeGguf(InGguf, TestQwen35Moe):
    pass


def test_qwen3_next_has_its_trunk_alone_in_a_gguf_file(tmp_path):
    """llama.cpp's converter leaves the MTP layer out, and names none."""
    proof = TestQwen3Next()
    write_checkpoint(tmp_path, proof.config, proof.tensors())
    trunk, head, notes = load(write_gguf(tmp_path))
    assert (head, notes) == (None, ())
    tokens = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
    with torch.inference_mode():
        reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
        # A norm's weight is rounded once more where the one is added to it.
        torch.testing.assert_close(trunk.model(tokens).logits, reference(tokens).logits)


@pytest.mark.skipif(kernels.find() is None, reason="the kernels are not built")
@pytest.mark.parametrize("case", [TestQwen35, TestQwen35Moe])
def test_blocks_of_a_gguf_file_stay_as_they_are(tmp_path, case):
    """Heads that lie in another order are rows in another order."""
    proof = case()
    write_checkpoint(tmp_path, proof.config, proof.tensors())
    path = write_gguf(tmp_path, kind=GGMLQuantizationType.Q8_0)
    checkpoint = Checkpoint("tiny", path)
    plain = load_model(checkpoint, torch.float32)
    model = load_rounded(checkpoint, kernels.find(), "file").float()
    mixer, theirs = (m.model.layers[0].linear_attn for m in (model, plain))
    x = torch.randn(5, HIDDEN)
    for name in ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b"):
        layer = getattr(mixer, name)
        assert isinstance(layer, KernelLinear) and layer.data.dtype == torch.uint8
        difference = layer(x) - getattr(theirs, name)(x)
        assert difference.norm() < 0.02 * x.norm()  # the kernels round the input to 8 bits
    trunk = Trunk(model)
    head, notes = load_native_head(checkpoint, trunk)
    assert head is not None and notes == ()
    texts, stats = decode(trunk, head, PROMPTS, 2, SAMPLED)
    assert [len(text) for text in texts] == [24] * 3
    assert sum(stats[0].accepted_by_position) > 0


@pytest.mark.parametrize("case", [TestQwen3Next, TestQwen35, TestQwen35Moe])
def test_llama_cpp_computes_the_same_from_the_same_file(tmp_path, monkeypatch, case):
    """Where it is installed (`pip install 'mtplx[bench]'`); its MTP layers too."""
    llama_cpp = pytest.importorskip("llama_cpp")
    # There, heads of keys and of values have one width.
    monkeypatch.setitem(globals(), "VALUE_DIM", KEY_DIM)
    text = case.config.get("text_config", case.config)
    monkeypatch.setitem(text, "linear_value_head_dim", KEY_DIM)
    proof = case()
    write_checkpoint(tmp_path, proof.config, proof.tensors())
    path = write_gguf(tmp_path)
    trunk, head, _ = load(path)
    known = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]])
    model = LlamaCpp(llama_cpp, path)
    with torch.inference_mode():
        expected = trunk.model(known).logits[0]
        # Keys and values are half as wide there.
        torch.testing.assert_close(model.logits(known[0]), expected, rtol=0, atol=0.01)
        if head is None:
            return
        hidden = trunk.read(known[:, :-1]).hidden
        span = Span.after([0], hidden.shape[1], hidden.device)
        drafts = head.logits(head.step(known[:, 1:], hidden, span, head.new_cache(16)))
    found = model.logits(known[0, 1:], hidden[0])
    torch.testing.assert_close(found, drafts[0], rtol=0, atol=0.01)


class LlamaCpp:
    """llama.cpp by its C interface, which alone reaches MTP layers."""

    def __init__(self, library, path):
        self.library = library
        library.llama_backend_init()
        settings = library.llama_model_default_params()
        settings.load_mtp = True
        self.model = library.llama_model_load_from_file(str(path).encode(), settings)

    def logits(self, tokens, hidden=None):
        """Of each position; with the states before them, those of the MTP layer."""
        library, count = self.library, len(tokens)
        settings = library.llama_context_default_params()
        settings.n_ctx, settings.n_threads, settings.flash_attn_type = 64, 1, 0
        if hidden is not None:
            settings.ctx_type = library.LLAMA_CONTEXT_TYPE_MTP
        context = library.llama_init_from_model(self.model, settings)
        batch = library.llama_batch_init(count, 0, 1)
        batch.n_tokens = count
        if hidden is not None:
            states = hidden.contiguous().numpy()
            batch.embd = states.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        for i, token in enumerate(tokens.tolist()):
            batch.token[i], batch.pos[i], batch.logits[i] = token, i, 1
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
        assert library.llama_decode(context, batch) == 0
        rows = [
            torch.tensor(library.llama_get_logits_ith(context, i)[:VOCAB]) for i in range(count)
        ]
        library.llama_free(context)
        return torch.stack(rows)
