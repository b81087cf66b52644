"""EAGLE-3 heads: the file, and what they compute, against a plain reading of the description."""

import dataclasses
import json
import math

import numpy as np
import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file

from mtplx.drafters.attached import AttachedHead
from mtplx.engine import decoding
from mtplx.engine.decoding import Batch
from mtplx.engine.request import Request
from mtplx.errors import MtplxError
from mtplx.models.eagle3 import Eagle3Config, load_head, save_head
from mtplx.sampling import SamplerConfig


@pytest.fixture(scope="module")
def trunk():
    return tiny.llama(vocab_size=11, layers=4)


# --- What a head computes -------------------------------------------------------------------------


class Reference:
    """A head in float64, one text at a time, without a cache: EAGLE-3 as its paper describes it.

    Li et al. 2025, arXiv:2503.01840, section 3: the states of a low, a middle and a high layer
    are joined and brought to the model's width by one linear layer; that, beside the embedding of
    the next token, goes through one decoder layer; its output stands for the fused state when
    the head drafts further.
    """

    def __init__(self, head, trunk):
        self.w = {name: t.double().numpy() for name, t in head.state_dict().items()}
        self.embedding = trunk.embed.weight.double().numpy()
        self.config, self.trunk = head.config, trunk

    def norm(self, x, name):
        rms = np.sqrt((x**2).mean(-1, keepdims=True) + self.config.layer.rms_norm_eps)
        return x / rms * self.w[f"{name}.weight"]

    def linear(self, x, name):
        return x @ self.w[f"{name}.weight"].T

    def fused(self, tokens):
        """The trunk's states over a whole text, joined, [T, H]."""
        with torch.inference_mode():
            states = self.trunk.model(torch.tensor([tokens]), output_hidden_states=True)
        last = len(states.hidden_states) - 1
        assert last not in self.config.aux_layer_ids, "transformers norms its last state"
        joined = torch.cat([states.hidden_states[i] for i in self.config.aux_layer_ids], -1)
        joined = joined[0].double().numpy()
        if self.config.fc_norm:
            parts = np.split(joined, 3, -1)
            joined = np.concatenate([self.norm(p, f"fc_norm.{i}") for i, p in enumerate(parts)], -1)
        if self.config.norm_before_fc:
            joined = self.norm(joined, "input_norm")
        return self.linear(joined, "fc")

    def rotated(self, x):
        """x [heads, T, D] at positions 0 to T - 1: rotary embedding of Su et al. 2021."""
        count, half = x.shape[1], x.shape[2] // 2
        theta = self.config.layer.rope_parameters["rope_theta"]
        angles = np.outer(np.arange(count), theta ** -(np.arange(half) / half))
        cos, sin = np.cos(angles), np.sin(angles)
        a, b = x[..., :half], x[..., half:]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    def attention(self, x):
        layer, name = self.config.layer, "layers.0.self_attn"
        heads, kv_heads = layer.num_attention_heads, layer.num_key_value_heads
        q, k, v = (
            self.linear(x, f"{name}.{part}_proj").reshape(len(x), n, -1).swapaxes(0, 1)
            for part, n in (("q", heads), ("k", kv_heads), ("v", kv_heads))
        )
        q, k = self.rotated(q), self.rotated(k)
        outputs = []
        for h in range(heads):
            shared = h // (heads // kv_heads)
            scores = q[h] @ k[shared].T / math.sqrt(q.shape[-1])
            scores[np.triu_indices(len(x), 1)] = -np.inf
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            outputs.append(weights / weights.sum(-1, keepdims=True) @ v[shared])
        return self.linear(np.concatenate(outputs, -1), f"{name}.o_proj")

    def layer(self, tokens, states):
        """Embeddings of tokens beside states, both of positions 0 on, through the layer."""
        normed = self.norm(states, "layers.0.hidden_norm")
        embeds = self.norm(self.embedding[tokens], "layers.0.input_layernorm")
        residual = normed if self.config.norm_before_residual else states
        x = residual + self.attention(np.concatenate([embeds, normed], -1))
        y = self.norm(x, "layers.0.post_attention_layernorm")
        gate, up = (self.linear(y, f"layers.0.mlp.{name}_proj") for name in ("gate", "up"))
        out = x + self.linear(gate / (1 + np.exp(-gate)) * up, "layers.0.mlp.down_proj")
        return self.norm(out, "norm") if self.config.norm_output else out

    def logits(self, tokens, drafted):
        """Of the draft that follows `tokens` and the tokens drafted so far."""
        states = self.fused(tokens[:-1])
        following = list(tokens[1:])
        for token in [*drafted, None]:
            out = self.layer(following, states)
            if token is not None:
                following.append(token)
                states = np.concatenate([states, out[-1:]])
        final = out[-1] if self.config.norm_output else self.norm(out[-1], "norm")
        return self.linear(final, "lm_head")


FLAGS = [
    {},
    {"norm_before_residual": False},
    {"norm_before_fc": True},
    {"fc_norm": True},
    {"norm_output": True},
    {"norm_before_residual": False, "norm_before_fc": True, "norm_output": True},
]


@pytest.mark.parametrize("flags", FLAGS, ids=lambda flags: ", ".join(flags) or "default")
def test_drafts_follow_the_description(trunk, monkeypatch, flags):
    """At every cycle of a ragged batch, at draft positions 1 to 3."""
    head = tiny.eagle3(trunk, draft_vocab_size=6, taps=(1, 2, 3), **flags)
    attached, reference = AttachedHead(head, trunk), Reference(head, trunk)
    seen, drafts = [], []
    plain_logits, plain_verify = attached.logits, decoding.verify

    def logits(hidden, layer=0):
        seen.append(plain_logits(hidden))
        return seen[-1]

    def verify(p, draft, *args):
        drafts.append(draft.tokens.tolist())
        return plain_verify(p, draft, *args)

    monkeypatch.setattr(attached, "logits", logits)
    monkeypatch.setattr(decoding, "verify", verify)
    hot = SamplerConfig(temperature=2.0)
    prompts = [(1, 2, 3, 4, 5, 6, 7), (8, 9), (10, 0, 1)]
    requests = [Request(p, hot, seed, 14, 3) for seed, p in enumerate(prompts)]
    texts = {i: list(p) for i, p in enumerate(prompts)}
    kept = set()
    for bursts in Batch(trunk, attached, requests).run():
        for row, burst in enumerate(bursts):
            kept.add(burst.drafted)
            drafted = drafts[-1][row]
            for i, got in enumerate(seen):
                expected = reference.logits(texts[burst.index], drafted[:i])
                np.testing.assert_allclose(got[row].numpy(), expected, rtol=1e-3, atol=1e-4)
            texts[burst.index] += burst.tokens
        seen.clear()
    assert kept == {0, 1, 2, 3}


def test_a_reduced_vocabulary_maps_both_ways(trunk):
    head = tiny.eagle3(trunk, draft_vocab_size=6)
    ids = head.draft_ids.tolist()
    assert ids == sorted(ids) == [0, 2, 4, 6, 8, 10] == [i + d for i, d in enumerate(head.d2t)]
    assert head.t2d.nonzero().flatten().tolist() == ids
    attached = AttachedHead(head, trunk)
    assert attached.draft_ids.tolist() == ids
    config = SamplerConfig(temperature=2.0)
    for (burst,) in Batch(trunk, attached, [Request((1, 2), config, 0, 40, 3)]).run():
        assert set(burst.tokens[: burst.drafted]) <= set(ids)


# --- The file -------------------------------------------------------------------------------------


def settings_of(config):
    return {**dataclasses.asdict(config), "layer": config.layer.to_diff_dict()}


@pytest.mark.parametrize("flags", FLAGS, ids=lambda flags: ", ".join(flags) or "default")
def test_a_saved_head_loads_as_it_was(trunk, tmp_path, flags):
    head = tiny.eagle3(trunk, draft_vocab_size=5, **flags)
    head.config = dataclasses.replace(
        head.config, verifier_name="org/name", verifier_architectures=("LlamaForCausalLM",), depth=4
    )
    save_head(head, tmp_path / "new" / "head", torch.float32)
    again = load_head(tmp_path / "new" / "head", trunk.layers)
    assert settings_of(again.config) == settings_of(head.config)
    assert again.state_dict().keys() == head.state_dict().keys()
    for name, tensor in head.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    assert not again.training
    assert not any(p.requires_grad for p in again.parameters())
    # By default in bfloat16, the type that config.json states; whole numbers stay as they are.
    save_head(head, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert {t.dtype for name, t in tensors.items() if name not in ("d2t", "t2d")} == {
        torch.bfloat16
    }
    assert (tensors["d2t"].dtype, tensors["t2d"].dtype) == (torch.int64, torch.bool)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_config_names_the_type_that_is_written(trunk, tmp_path, dtype):
    save_head(tiny.eagle3(trunk), tmp_path, getattr(torch, dtype))
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == dtype
    weights = load_file(tmp_path / "model.safetensors")
    assert weights["fc.weight"].dtype == getattr(torch, dtype)


def test_the_file_is_in_the_speculators_format(trunk, tmp_path):
    head = tiny.eagle3(trunk, draft_vocab_size=5)
    head.config = dataclasses.replace(head.config, verifier_name="org/name")
    save_head(head, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["speculators_model_type"] == "eagle3"
    assert config["architectures"] == ["Eagle3DraftModel"]
    assert config["draft_vocab_size"] == 5
    assert config["eagle_aux_hidden_state_layer_ids"] == [0, 2, 4]
    assert config["norm_before_residual"] is True
    assert config["transformer_layer_config"]["model_type"] == "llama"
    assert config["transformer_layer_config"]["vocab_size"] == 11
    meta = config["speculators_config"]
    assert meta["algorithm"] == "eagle3"
    assert meta["verifier"]["name_or_path"] == "org/name"
    assert meta["default_proposal_method"] == meta["proposal_methods"][0]["proposal_type"]
    assert meta["proposal_methods"][0]["speculative_tokens"] == 3
    layer = "layers.0"
    shapes = {name: list(t.shape) for name, t in load_file(tmp_path / "model.safetensors").items()}
    assert shapes == {
        "d2t": [5],
        "t2d": [11],
        "fc.weight": [16, 48],
        "lm_head.weight": [5, 16],
        "norm.weight": [16],
        f"{layer}.hidden_norm.weight": [16],
        f"{layer}.input_layernorm.weight": [16],
        f"{layer}.post_attention_layernorm.weight": [16],
        f"{layer}.self_attn.q_proj.weight": [16, 32],
        f"{layer}.self_attn.k_proj.weight": [8, 32],
        f"{layer}.self_attn.v_proj.weight": [8, 32],
        f"{layer}.self_attn.o_proj.weight": [16, 16],
        f"{layer}.mlp.gate_proj.weight": [24, 16],
        f"{layer}.mlp.up_proj.weight": [24, 16],
        f"{layer}.mlp.down_proj.weight": [16, 24],
    }


@pytest.fixture
def saved(trunk, tmp_path):
    save_head(tiny.eagle3(trunk, draft_vocab_size=5), tmp_path, torch.float32)
    return tmp_path


def edit(directory, **changes):
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_tensors(directory, change):
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def test_what_a_public_head_may_leave_out_or_add(tmp_path):
    trunk = tiny.llama(vocab_size=11, layers=8)
    head = tiny.eagle3(trunk)
    save_head(head, tmp_path, torch.float32)

    def change(tensors):
        # Over the whole vocabulary no map is needed; a copy of the trunk's embedding is allowed.
        del tensors["d2t"], tensors["t2d"]
        tensors["embed_tokens.weight"] = trunk.embed.weight.clone()

    edit_tensors(tmp_path, change)
    config = json.loads((tmp_path / "config.json").read_text())
    for name in ("speculators_config", "draft_vocab_size", "eagle_aux_hidden_state_layer_ids"):
        del config[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    again = load_head(tmp_path, 8)
    assert again.draft_ids.tolist() == list(range(11))
    assert again.t2d.all()
    assert again.config.aux_layer_ids == (2, 4, 5)
    assert (again.config.depth, again.config.verifier_name) == (3, None)
    assert again.embed_tokens is not None
    assert AttachedHead(again, trunk).head.embed_tokens is None


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"speculators_model_type": "eagle"}, "speculators_model_type is 'eagle'; only 'eagle3'"),
        ({"speculators_model_type": None}, "speculators_model_type is None"),
        (
            {"transformer_layer_config": {"model_type": "mixtral"}},
            "type 'mixtral' are not supported",
        ),
        ({"transformer_layer_config": {"model_type": "qwen3"}}, "type 'qwen3' are not supported"),
        ({"transformer_layer_config": "llama"}, "is 'llama', not of type object"),
        (
            {"transformer_layer_config": {"hidden_size": "wide"}},
            "make no decoder layer: .*hidden_size",
        ),
        ({"transformer_layer_config": {"hidden_size": 0}}, "make no decoder layer: "),
        ({"transformer_layer_config": {"num_attention_heads": 0}}, "make no decoder layer: "),
        (
            {"transformer_layer_config": {"num_attention_heads": 4, "num_key_value_heads": 3}},
            "make no decoder layer: .*num_key_value_heads 3",
        ),
        (
            {"transformer_layer_config": {"rope_parameters": {"rope_type": "spiral"}}},
            "make no decoder layer: ",
        ),
        ({"eagle_aux_hidden_state_layer_ids": 3}, "layer_ids is 3, not of type array"),
        ({"eagle_aux_hidden_state_layer_ids": [0, "1", 2]}, "do not name three"),
        ({"eagle_aux_hidden_state_layer_ids": [0, True, 2]}, "do not name three"),
        ({"draft_vocab_size": "8k"}, "draft_vocab_size is '8k', not of type integer"),
        ({"draft_vocab_size": -1}, r"draft_vocab_size \(-1\), .* must be 1 or more"),
        ({"speculators_config": []}, "speculators_config is .., not of type object"),
        (
            {"speculators_config": {"proposal_methods": [{"speculative_tokens": "3"}]}},
            "speculative_tokens is '3', not of type integer",
        ),
        ({"speculators_config": {"verifier": "org/name"}}, "verifier is 'org/name', not of type"),
        ({"transformer_layer_config": {"num_hidden_layers": 2}}, "more than one decoder layer"),
        (
            {"fc_norm": True},
            r"missing \['fc_norm.0.weight', 'fc_norm.1.weight', 'fc_norm.2.weight'\]",
        ),
        ({"target_hidden_size": 24}, "does not fit its config.json: .*fc.weight"),
        ({"target_hidden_size": -1}, r"target_hidden_size \(-1\) must be 1 or more"),
        ({"transformer_layer_config": {"hidden_act": "gelu"}}, "hidden_act is 'gelu'; only 'silu'"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2]}, "do not name three of the trunk's 4 layers"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 5]}, "do not name three"),
        ({"draft_vocab_size": 6}, "does not fit its config.json: .*lm_head.weight"),
    ],
)
def test_a_head_that_cannot_be_run_says_why(saved, changes, says):
    edit(saved, **changes)
    with pytest.raises(MtplxError, match=says) as caught:
        load_head(saved, 4)
    assert str(saved) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "\udcff"])
def test_a_damaged_config_is_one_line(saved, text):
    (saved / "config.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(MtplxError, match=r"config\.json: cannot be read as JSON") as caught:
        load_head(saved, 4)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t.pop("fc.weight"), r"tensors missing \['fc.weight'\], left over \[\]"),
        (lambda t: t.pop("d2t"), "missing .'d2t'."),
        (lambda t: t.update(extra=torch.ones(1)), r"missing \[\], left over \['extra'\]"),
        (lambda t: t["d2t"].__setitem__(4, 100), "d2t points outside the vocabulary of 11 tokens"),
        (lambda t: t["d2t"].__setitem__(0, -1), "d2t points outside"),
        (lambda t: t["d2t"].__setitem__(1, -1), "d2t names a token twice"),
        (lambda t: t["t2d"].logical_not_(), "t2d does not mark the 5 tokens that d2t names"),
        (
            lambda t: t.update({"embed_tokens.weight": torch.ones(11, 8)}),
            r"does not fit its config.json: embed_tokens.weight is torch.float32 \[11, 8\], not",
        ),
    ],
)
def test_damaged_tensors_are_named(saved, change, says):
    edit_tensors(saved, change)
    with pytest.raises(MtplxError, match=says) as caught:
        load_head(saved, 4)
    assert str(saved / "model.safetensors") in str(caught.value)


def test_missing_files_are_named(saved):
    with pytest.raises(MtplxError, match=r"nowhere: no config\.json; expected a head directory"):
        load_head(saved / "nowhere", 4)
    path = saved / "model.safetensors"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(MtplxError, match="missing or damaged head weights"):
        load_head(saved, 4)
    path.unlink()
    with pytest.raises(MtplxError, match=r"model\.safetensors: missing or damaged head weights"):
        load_head(saved, 4)


@pytest.mark.parametrize("vocab_size", [11, 12])
def test_a_trunk_of_another_shape_is_refused(trunk, vocab_size):
    other = tiny.llama(vocab_size=vocab_size, layers=4, width=32 if vocab_size == 11 else 16)
    with pytest.raises(MtplxError, match="the head was made for a trunk of hidden size 16 and 11"):
        AttachedHead(tiny.eagle3(trunk), other)


def test_rotary_frequencies_stay_in_float32(trunk):
    """In bfloat16 a position of some thousands would be off by several."""
    head = tiny.eagle3(trunk).cast(torch.bfloat16)
    assert head.fc.weight.dtype == torch.bfloat16
    assert head.rotary.inv_freq.dtype == torch.float32


def test_a_config_reads_what_it_writes(trunk):
    config = tiny.eagle3(trunk, 5).config
    again = Eagle3Config.from_dict(json.loads(json.dumps(config.to_dict())), "here", trunk.layers)
    assert settings_of(again) == settings_of(config)
