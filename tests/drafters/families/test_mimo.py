"""MiMo-7B, as it is published but tiny: a Qwen2 by another name, with code that is never run."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest
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
    write_checkpoint,
)
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

import mtplx
from mtplx import kernels
from mtplx.drafters.native import load_native_head
from mtplx.inspection import inspect
from mtplx.models.checkpoint import Checkpoint, load_model, load_rounded, load_tokenizer, locate
from mtplx.models.fused import FusedTrunk

LAYERS, HEADS, KV_HEADS, DIM, INNER = 3, 4, 2, 16, 64
THETA = 640000
MTP = "model.mtp_layers.0."

CONFIG: dict[str, Any] = {
    "architectures": ["MiMoForCausalLM"],
    "auto_map": {
        "AutoConfig": "configuration_mimo.MiMoConfig",
        "AutoModel": "modeling_mimo.MiMoModel",
        "AutoModelForCausalLM": "modeling_mimo.MiMoForCausalLM",
    },
    "attention_bias": True,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "head_dim": DIM,
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "initializer_range": 0.02,
    "intermediate_size": INNER,
    "max_position_embeddings": 32768,
    "max_window_layers": 36,
    "model_type": "mimo",
    "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": KV_HEADS,
    "num_nextn_predict_layers": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": THETA,
    "sliding_window": 32768,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.40.1",
    "use_cache": True,
    "use_mrope": False,
    "use_sliding_window": False,
    "vocab_size": VOCAB,
}
CODE = "raise AssertionError('code in a checkpoint was run')\n"


def layer() -> Shapes:
    shapes: Shapes = {
        "input_layernorm.weight": (HIDDEN,),
        "post_attention_layernorm.weight": (HIDDEN,),
        "self_attn.o_proj.weight": (HIDDEN, HEADS * DIM),
        "mlp.gate_proj.weight": (INNER, HIDDEN),
        "mlp.up_proj.weight": (INNER, HIDDEN),
        "mlp.down_proj.weight": (HIDDEN, INNER),
    }
    for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
        shapes[f"self_attn.{name}_proj.weight"] = (heads * DIM, HIDDEN)
        shapes[f"self_attn.{name}_proj.bias"] = (heads * DIM,)
    return shapes


class TestMiMo(Proof):
    config = CONFIG
    join = f"{MTP}input_proj.weight"
    hidden_first = True

    def shapes(self):
        shapes: Shapes = {
            "model.embed_tokens.weight": (VOCAB, HIDDEN),
            "model.norm.weight": (HIDDEN,),
            "lm_head.weight": (VOCAB, HIDDEN),
            f"{MTP}token_layernorm.weight": (HIDDEN,),
            f"{MTP}hidden_layernorm.weight": (HIDDEN,),
            f"{MTP}final_layernorm.weight": (HIDDEN,),
            f"{MTP}input_proj.weight": (HIDDEN, 2 * HIDDEN),
        }
        for prefix in (MTP, *(f"model.layers.{i}." for i in range(LAYERS))):
            shapes |= {prefix + name: shape for name, shape in layer().items()}
        return shapes

    def transformers(self, directory, **settings):
        return Qwen2ForCausalLM.from_pretrained(
            directory, config=Qwen2Config.from_dict(CONFIG), **settings
        )

    def reference(self, directory):
        return StraightLine(directory, self)

    @pytest.fixture
    def with_code(self, tmp_path):
        """The directory as it is published, with its code and a tokenizer of Qwen2's class."""
        write_checkpoint(tmp_path, self.config, self.tensors())
        for name in ("configuration_mimo.py", "modeling_mimo.py"):
            (tmp_path / name).write_text(CODE)
        words = ["a", "b", "c", "d", "Ġ", "1", "2", "ab", "cd", "Ġab"]
        vocabulary = {word: i for i, word in enumerate(words)}
        merges = [("a", "b"), ("c", "d"), ("Ġ", "ab")]
        Qwen2Tokenizer(vocab=vocabulary, merges=merges).save_pretrained(tmp_path)
        file = tmp_path / "tokenizer_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": "{{ 1 }}"}))
        return tmp_path

    def test_it_is_inspected_and_its_code_is_not_run(self, with_code):
        found = inspect(with_code)
        assert found.problems == () and found.runs
        assert found.architecture == "MiMoForCausalLM" and found.context == 32768
        assert (found.mtp.kind, found.mtp.found, found.mtp.usable) == ("native", 1, True)
        assert found.chat_template and found.eos_token_ids == (1,)
        llm = mtplx.load(with_code, device="cpu")
        assert type(llm.trunk.model) is Qwen2ForCausalLM and llm.notes == ()
        result = llm.generate([3, 1, 4], max_tokens=12, depth=2)
        assert sum(result.stats.drafted_by_position)

    def test_its_tokenizer_is_that_of_qwen2(self, with_code):
        mine = load_tokenizer(locate(with_code))
        config = with_code / "config.json"
        config.write_text(json.dumps({"model_type": "qwen2"}))
        theirs = load_tokenizer(locate(with_code))
        assert type(mine) is type(theirs) is Qwen2Tokenizer
        text = "abcd ab12 \n\nab"
        assert mine.encode(text) == theirs.encode(text) and 9 in mine.encode(text)

    @pytest.mark.skipif(kernels.find() is None, reason="the kernels are not built")
    @pytest.mark.parametrize("kind", ["bfloat16", "long passes in torch", "int8"])
    def test_by_the_kernels_it_drafts_the_same(self, directory, kind):
        checkpoint, library = Checkpoint("tiny", directory), kernels.find()
        if kind == "int8":
            trunk = FusedTrunk(load_rounded(checkpoint, library, kind), library)
        else:
            trunk = FusedTrunk(load_model(checkpoint, torch.bfloat16), library)
            trunk.long = 6 if kind == "long passes in torch" else None
        head, notes = load_native_head(checkpoint, trunk)
        assert head is not None and notes == ()
        if trunk.long is None:
            assert decode(trunk, head, PROMPTS, 3)[0] == decode(trunk, None, PROMPTS, 0)[0]
        cycles: list = []
        reference = self.reference(directory)
        decode(trunk, head, PROMPTS, 3, SAMPLED, 24, partial(watch_drafts, cycles))
        wrong = []
        with torch.inference_mode():
            for _, known, drafted, logits in cycles:
                if len(known) > 1:
                    expected = reference(known, drafted.tolist())
                    wrong.append((logits.float() - expected).norm() / expected.norm())
        # Rounding makes 0.015, or 0.05 in int8; a state from the wrong side of the norm 0.4.
        assert torch.stack(wrong).mean() < 0.1


class StraightLine(Reference):
    """The head over whole texts, written from its authors' description of the layer."""

    eps = 1e-5

    def __init__(self, directory, proof):
        super().__init__(directory, proof)
        self.states = []
        last = self.model.model.layers[-1]
        last.register_forward_hook(lambda module, inputs, output: self.states.append(output))

    def __call__(self, known, drafted):
        self.model.model(torch.tensor([known[:-1]]))
        hidden = self.states.pop()[0]
        tokens, rows = list(known[1:]), []
        for token in drafted:
            embeds = self.tensors["model.embed_tokens.weight"][tokens]
            pair = [
                self.norm(f"{MTP}hidden_layernorm", hidden),
                self.norm(f"{MTP}token_layernorm", embeds),
            ]
            x = self.linear(f"{MTP}input_proj", torch.cat(pair, -1))
            x = x + self.attention(self.norm(f"{MTP}input_layernorm", x))
            x = x + self.mlp(f"{MTP}mlp", self.norm(f"{MTP}post_attention_layernorm", x))
            last = self.norm(f"{MTP}final_layernorm", x)[-1:]
            rows.append(self.linear("lm_head", last)[0])
            hidden, tokens = torch.cat([hidden, last]), [*tokens, token]
        return torch.stack(rows)

    def attention(self, x):
        q, k, v = (
            self.linear(f"{MTP}self_attn.{name}_proj", x).view(len(x), -1, DIM) for name in "qkv"
        )
        mixed = attend(turn(q, THETA, DIM), turn(k, THETA, DIM), v)
        return self.linear(f"{MTP}self_attn.o_proj", mixed)
