"""EAGLE-3 heads in their authors' format: files of the real layout, and what comes of them."""

from __future__ import annotations

import json
import math
import pickle

import huggingface_hub
import pytest
import tiny
import tiny_checkpoint
import torch
from safetensors.torch import save_file
from torch.nn import functional as F
from transformers import Qwen3Config, Qwen3ForCausalLM

import mtplx
from mtplx.drafters.attached import AttachedHead
from mtplx.drafters.find import find_head
from mtplx.engine import decoding
from mtplx.engine.decoding import Batch
from mtplx.engine.request import Request
from mtplx.errors import MtplxError
from mtplx.inspection import inspect
from mtplx.models.checkpoint import Checkpoint, locate, locate_head
from mtplx.models.eagle3 import load_head
from mtplx.models.trunk import Trunk
from mtplx.sampling import SamplerConfig

VOCAB, HIDDEN, LAYERS = 12, 16, 8
GREEDY = SamplerConfig(temperature=0.0)
PROMPTS = [(1, 2, 3, 4, 5, 6, 7), (8, 9), (10, 0, 1)]


def qwen3():
    """A Qwen3, whose heads are wider than its hidden size divided by their number."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=24,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=False,
        initializer_range=0.5,
        bos_token_id=None,
        eos_token_id=None,
    )
    return Trunk(Qwen3ForCausalLM(config).eval().requires_grad_(False))


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def trunk(request):
    return qwen3() if request.param == "qwen3" else tiny.llama(vocab_size=VOCAB, layers=LAYERS)


@pytest.fixture(scope="module")
def llama():
    return tiny.llama(vocab_size=VOCAB, layers=LAYERS)


# --- files as they are published ------------------------------------------------------------------


def settings(trunk, draft_vocab_size=6, **changes):
    """A config.json as the authors' own and those of SpecForge are."""
    of = trunk.config
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "attention_bias": False,
        "bos_token_id": 1,
        "draft_vocab_size": draft_vocab_size,
        "eos_token_id": 2,
        "head_dim": of.head_dim,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "initializer_range": 0.02,
        "intermediate_size": 24,
        "max_position_embeddings": 512,
        "model_type": "llama",
        "num_attention_heads": of.num_attention_heads,
        "num_hidden_layers": 1,
        "num_key_value_heads": of.num_key_value_heads,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-5,
        "rope_scaling": None,
        "rope_theta": 5000.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "transformers_version": "4.51.0",
        "use_cache": True,
        "vocab_size": VOCAB,
        **changes,
    }


def random_tensors(config):
    """All of a head's tensors, covering the even tokens first; without an embedding."""
    torch.manual_seed(2)
    width, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    size, trunk_width = config["draft_vocab_size"], config.get("target_hidden_size", HIDDEN)
    shapes = {
        "fc": (width, 3 * trunk_width),
        "midlayer.hidden_norm": (width,),
        "midlayer.input_layernorm": (width,),
        "midlayer.post_attention_layernorm": (width,),
        "midlayer.self_attn.q_proj": (queries, 2 * width),
        "midlayer.self_attn.k_proj": (keys, 2 * width),
        "midlayer.self_attn.v_proj": (keys, 2 * width),
        "midlayer.self_attn.o_proj": (width, queries),
        "midlayer.mlp.gate_proj": (inner, width),
        "midlayer.mlp.up_proj": (inner, width),
        "midlayer.mlp.down_proj": (width, inner),
        "norm": (width,),
        "lm_head": (size, width),
    }
    tensors = {f"{name}.weight": 0.5 * torch.randn(shape) for name, shape in shapes.items()}
    ids = torch.tensor(sorted(sorted(range(VOCAB), key=lambda i: (i % 2, i))[:size]))
    tensors["d2t"] = ids - torch.arange(size)
    tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, True)
    return tensors


def write(directory, config, tensors, pickled=False):
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    if pickled:
        torch.save(tensors, directory / "pytorch_model.bin")
    else:
        save_file(tensors, directory / "model.safetensors")
    return directory


def renamed(change, tensors):
    return {change(name): tensor for name, tensor in tensors.items()}


# --- what a head computes -------------------------------------------------------------------------


class Reference:
    """A head in float32 from the tensors of its file, one whole text at a time, without a cache.

    Li et al. 2025, arXiv:2503.01840, section 3, and the authors' published layer: the states of
    three layers are joined by `fc`; normed, and beside the normed embedding of the next token, they
    are the input of one attention, whose residual is the state before its norm. The layer's output
    before the last norm stands for the next position's state.
    """

    def __init__(self, config, tensors, trunk, taps):
        self.config, self.w, self.trunk, self.taps = config, tensors, trunk, taps
        self.embedding = tensors.get("embed_tokens.weight", trunk.embed.weight).float()

    def norm(self, x, name):
        weight = self.w[f"{name}.weight"]
        return weight * x / (x.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"]).sqrt()

    def linear(self, x, name):
        return F.linear(x, self.w[f"{name}.weight"], self.w.get(f"{name}.bias"))

    def fused(self, tokens):
        states = self.trunk.model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        taken = [states[i][0] for i in self.taps]
        if "fc_norm.0.weight" in self.w:
            taken = [self.norm(x, f"fc_norm.{i}") for i, x in enumerate(taken)]
        joined = torch.cat(taken, -1)
        if "input_norm.weight" in self.w:
            joined = self.norm(joined, "input_norm")
        return self.linear(joined, "fc")

    def turned(self, x):
        """x [T, heads, D]: rotary embedding of positions 0 to T - 1, halves paired."""
        half = x.shape[-1] // 2
        steps = self.config["rope_theta"] ** -(torch.arange(half) / half)
        angles = (torch.arange(len(x))[:, None] * steps)[:, None]
        a, b = x[..., :half], x[..., half:]
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def attention(self, x):
        count, size = len(x), self.config["head_dim"]
        q, k, v = (
            self.linear(x, f"midlayer.self_attn.{part}_proj").view(count, -1, size)
            for part in "qkv"
        )
        shared = q.shape[1] // k.shape[1]
        q, k = self.turned(q), self.turned(k).repeat_interleave(shared, 1)
        v = v.repeat_interleave(shared, 1)
        scores = torch.einsum("ihd,jhd->hij", q, k) / math.sqrt(size)
        later = torch.ones(count, count).triu(1).bool()
        weights = scores.masked_fill(later, -torch.inf).softmax(-1)
        mixed = torch.einsum("hij,jhd->ihd", weights, v).flatten(1)
        return self.linear(mixed, "midlayer.self_attn.o_proj")

    def layer(self, tokens, states):
        normed = self.norm(states, "midlayer.hidden_norm")
        embeds = self.norm(self.embedding[tokens], "midlayer.input_layernorm")
        residual = normed if self.config.get("norm_before_residual") else states
        x = residual + self.attention(torch.cat([embeds, normed], -1))
        y = self.norm(x, "midlayer.post_attention_layernorm")
        gate, up = (self.linear(y, f"midlayer.mlp.{name}_proj") for name in ("gate", "up"))
        return x + self.linear(F.silu(gate) * up, "midlayer.mlp.down_proj")

    @torch.inference_mode()
    def logits(self, tokens, drafted):
        """By target id, of the draft that follows `tokens` and the tokens drafted so far."""
        states, following = self.fused(tokens[:-1]), list(tokens[1:])
        for token in drafted:
            states = torch.cat([states, self.layer(following, states)[-1:]])
            following.append(token)
        drafts = self.linear(self.norm(self.layer(following, states)[-1], "norm"), "lm_head")
        ids = torch.arange(len(drafts)) + self.w.get("d2t", 0)
        return {int(i): float(x) for i, x in zip(ids, drafts, strict=True)}


DEFAULT_TAPS = (2, LAYERS // 2, LAYERS - 3)

VARIANTS = {
    "the authors' own": {},
    "the whole vocabulary": {"config": {"draft_vocab_size": VOCAB}},
    "layers named by their outputs": {
        "config": {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 4, 6]}},
        "taps": (2, 5, 7),
    },
    "layers named by their inputs": {
        "config": {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 4, 6]}},
        "taps": (2, 4, 6),
    },
    "layers named at the top": {
        "config": {"eagle_aux_hidden_state_layer_ids": [1, 4, 6]},
        "taps": (1, 4, 6),
    },
    "the residual normed": {"config": {"norm_before_residual": True}},
    "streams normed together": {
        "config": {"eagle_config": {"norm_before_fc": True}},
        "extra": {"input_norm.weight": torch.linspace(0.5, 2, 3 * HIDDEN)},
    },
    "streams normed each": {
        "config": {"fc_norm": True},
        "extra": {f"fc_norm.{i}.weight": torch.linspace(0.5, i + 1, HIDDEN) for i in range(3)},
    },
    "an embedding of its own": {"extra": {"embed_tokens.weight": torch.randn(VOCAB, HIDDEN)}},
    "narrower than its trunk": {
        "config": {"hidden_size": 8, "target_hidden_size": HIDDEN},
        "extra": {"embed_tokens.weight": torch.randn(VOCAB, 8)},
    },
    "positions of three sections": {
        "config": {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}}
    },
    "a trunk's setting that the layer ignores": {"config": {"attention_bias": True}},
}


def drafts_with(monkeypatch, trunk, attached, prompts):
    """Of each draft: the text before it, its tokens, and its logits by position."""
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
    requests = [Request(p, hot, seed, 8, 3) for seed, p in enumerate(prompts)]
    texts = {i: list(p) for i, p in enumerate(prompts)}
    for bursts in Batch(trunk, attached, requests).run():
        for row, burst in enumerate(bursts):
            yield texts[burst.index], drafts[-1][row], [got[row].tolist() for got in seen]
            texts[burst.index] += burst.tokens
        seen.clear()


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_drafts_follow_the_description(trunk, tmp_path, monkeypatch, variant):
    """At every cycle of a ragged batch, at draft positions 1 to 3."""
    config = settings(trunk, **variant.get("config", {}))
    tensors = random_tensors(config) | variant.get("extra", {})
    if config["draft_vocab_size"] == VOCAB:
        del tensors["d2t"], tensors["t2d"]
    write(tmp_path, config, tensors)
    head = AttachedHead(load_head(tmp_path, LAYERS), trunk)
    assert head.taps == variant.get("taps", DEFAULT_TAPS)
    assert (head.head.embed_tokens is not None) is ("embed_tokens.weight" in tensors)
    reference = Reference(config, tensors, trunk, head.taps)
    count = 0
    for text, drafted, logits in drafts_with(monkeypatch, trunk, head, PROMPTS):
        for i, got in enumerate(logits):
            expected = reference.logits(text, drafted[:i])
            mine = dict(zip(head.draft_ids.tolist(), got, strict=True))
            assert mine == pytest.approx(expected, rel=1e-3, abs=1e-3)
            count += 1
    assert count >= 9


def test_greedy_text_is_the_trunks_own(trunk, tmp_path):
    config = settings(trunk)
    head = AttachedHead(load_head(write(tmp_path, config, random_tensors(config)), LAYERS), trunk)

    def texts(depth, prompts):
        requests = [Request(p, GREEDY, 0, 20, depth) for p in prompts]
        found = [[] for _ in prompts]
        for bursts in Batch(trunk, head, requests).run():
            for burst in bursts:
                found[burst.index] += burst.tokens
        return found

    own = texts(0, PROMPTS)
    for depth in (1, 2, 4):
        assert texts(depth, PROMPTS) == own
        assert [texts(depth, [p])[0] for p in PROMPTS] == own


def counting(trunk, tensors):
    """A trunk that counts in twos, and a head that does if it is fed what it should be.

    Embeddings are unit vectors that the trunk's layers leave alone. The head's `fc` moves the
    middle state on by one token and its layer by another, with squares for an MLP; it covers the
    even tokens alone.
    """
    onward = torch.zeros(HIDDEN, HIDDEN)
    onward[:VOCAB, :VOCAB] = torch.eye(VOCAB).roll(2, 0)
    unit = torch.eye(VOCAB, HIDDEN)
    with torch.no_grad():
        for name, weight in trunk.model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.zero_()
            elif name.endswith("norm.weight"):
                weight.fill_(1.0)
        trunk.embed.weight.copy_(unit)
        trunk.model.lm_head.weight.copy_(unit.roll(2, 0))
    for name, tensor in tensors.items():
        if name.endswith("norm.weight"):
            tensor.fill_(1.0)
    nothing = torch.zeros(HIDDEN, HIDDEN)
    tensors["fc.weight"] = torch.cat([nothing, onward, nothing], -1)
    tensors["midlayer.self_attn.o_proj.weight"].zero_()
    tensors["midlayer.mlp.gate_proj.weight"] = torch.eye(24, HIDDEN)
    tensors["midlayer.mlp.up_proj.weight"] = torch.eye(24, HIDDEN)
    size = math.sqrt(HIDDEN)  # of a unit vector, once normed
    whole = size * size / (1 + math.exp(-size))
    tensors["midlayer.mlp.down_proj.weight"] = (onward - torch.eye(HIDDEN)) @ torch.eye(HIDDEN, 24)
    tensors["midlayer.mlp.down_proj.weight"] /= whole
    tensors["lm_head.weight"] = unit[::2].contiguous()


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_a_head_that_knows_the_text_has_every_draft_kept(tmp_path, kind):
    trunk = qwen3() if kind == "qwen3" else tiny.llama(vocab_size=VOCAB, layers=LAYERS)
    config = settings(trunk)
    tensors = random_tensors(config)
    counting(trunk, tensors)
    head = AttachedHead(load_head(write(tmp_path, config, tensors), LAYERS), trunk)
    for depth in (1, 2, 4):
        batch = Batch(trunk, head, [Request(p, GREEDY, 0, 20, depth) for p in [(2, 4), (8,)]])
        stats = [slot.stats for slot in batch.slots]
        texts = [[], []]
        for bursts in batch.run():
            for burst in bursts:
                texts[burst.index] += burst.tokens
        for text, start, s in zip(texts, (6, 10), stats, strict=True):
            assert text == [n % VOCAB for n in range(start, start + 40, 2)]
            assert len(s.drafted_by_position) == depth
            assert s.accepted_by_position == s.drafted_by_position


# --- the files ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        lambda name: name,
        lambda name: name.replace("midlayer.", "layers.0."),
        lambda name: f"model.{name}",
    ],
    ids=["midlayer", "layers.0", "model."],
)
@pytest.mark.parametrize("pickled", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_tensor_finds_its_place(llama, tmp_path, name, pickled, dtype):
    config = settings(llama)
    plain = {
        name: tensor.to(dtype) if tensor.is_floating_point() else tensor
        for name, tensor in random_tensors(config).items()
    }
    plain["embed_tokens.weight"] = torch.randn(VOCAB, HIDDEN).to(dtype)
    write(tmp_path, config, renamed(name, plain), pickled)
    head = load_head(tmp_path, LAYERS)
    held = head.state_dict()
    assert len(held) == len(plain)
    for key, tensor in plain.items():
        assert torch.equal(held[key.replace("midlayer.", "layers.0.")].to(dtype), tensor.to(dtype))
    assert head.draft_ids.tolist() == [0, 2, 4, 6, 8, 10]
    assert not any(parameter.requires_grad for parameter in head.parameters())


def test_what_old_versions_of_torch_wrote_is_read(llama, tmp_path):
    config = settings(llama)
    tensors = random_tensors(config)
    write(tmp_path, config, tensors, pickled=True)
    torch.save(tensors, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    assert torch.equal(load_head(tmp_path, LAYERS).fc.weight, tensors["fc.weight"])


def test_a_copy_of_the_trunks_embedding_is_not_held_twice(llama, tmp_path):
    config = settings(llama)
    copy = {"embed_tokens.weight": llama.embed.weight.clone()}
    write(tmp_path, config, random_tensors(config) | copy)
    assert AttachedHead(load_head(tmp_path, LAYERS), llama).head.embed_tokens is None


def test_t2d_is_not_needed(llama, tmp_path):
    config = settings(llama)
    tensors = random_tensors(config)
    covered = tensors.pop("t2d")
    assert torch.equal(load_head(write(tmp_path, config, tensors), LAYERS).t2d, covered)


def test_over_the_whole_vocabulary_a_map_may_be_unset(llama, tmp_path):
    config = settings(llama, VOCAB)
    tensors = random_tensors(config)
    tensors["d2t"].zero_()
    tensors["t2d"].zero_()
    head = load_head(write(tmp_path, config, tensors), LAYERS)
    assert head.draft_ids.tolist() == list(range(VOCAB)) and head.t2d.all()


def test_rotary_settings_are_the_heads_own(llama, tmp_path):
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    }
    config = settings(llama, rope_scaling=scaling)
    head = load_head(write(tmp_path, config, random_tensors(config)), LAYERS)
    assert head.config.layer.rope_parameters == scaling | {"rope_theta": 5000.0}


class Code:
    """Something whose unpickling runs a function."""

    def __reduce__(self):
        return (pytest.fail, ("code in a head was run",))


JUNK = {
    "GGUF": b"GGUF" + bytes(60),
    "empty": b"",
    "a Git LFS pointer": b"version https://git-lfs.github.com/spec/v1\n",
    "code": pickle.dumps({"fc.weight": Code()}, protocol=2),
}


@pytest.mark.parametrize("content", JUNK.values(), ids=JUNK)
def test_a_pickle_of_anything_but_tensors_is_not_read(llama, tmp_path, content):
    config = settings(llama)
    write(tmp_path, config, random_tensors(config), pickled=True)
    (tmp_path / "pytorch_model.bin").write_bytes(content)
    refused(tmp_path, r"pytorch_model\.bin: damaged, or not a plain file of tensors")


def test_a_training_state_is_no_head(llama, tmp_path):
    config = settings(llama)
    write(tmp_path, config, {"model": random_tensors(config), "step": 3}, pickled=True)
    refused(tmp_path, "not a plain file of tensors")


def refused(directory, says):
    """Loading says so in one line that names the place."""
    with pytest.raises(MtplxError, match=says) as caught:
        load_head(directory, LAYERS)
    assert str(directory) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t.pop("midlayer.mlp.up_proj.weight"), r"missing \['layers.0.mlp.up_proj.weight"),
        (lambda t: t.pop("lm_head.weight"), r"missing \['lm_head.weight'\], left over \[\]"),
        (lambda t: t.pop("d2t"), r"missing \['d2t'\]"),
        (lambda t: t.pop("fc.weight"), "no EAGLE-3 head there: its weights have no fc.weight"),
        (
            lambda t: t.update({"midlayer.self_attn.q_norm.weight": torch.ones(4)}),
            r"missing \[\], left over \['layers.0.self_attn.q_norm.weight'\]",
        ),
        (
            lambda t: t.update({"midlayer.self_attn.q_proj.bias": torch.ones(16)}),
            r"missing \['layers.0.self_attn.k_proj.bias'",
        ),
        (
            lambda t: t.update({"layers.0.hidden_norm.weight": torch.ones(HIDDEN)}),
            "layers.0.hidden_norm.weight is there twice",
        ),
        (lambda t: t["d2t"].__setitem__(5, 100), "d2t points outside the vocabulary of 12 tokens"),
        (lambda t: t["d2t"].__setitem__(1, 3), "d2t names a token twice"),
        (lambda t: t["d2t"].copy_(torch.arange(6)[[0, 0, 1, 1, 2, 2]]), "t2d does not mark the 6"),
        (lambda t: t.update({"embed_tokens.weight": torch.ones(VOCAB, 8)}), r"\[12, 8\], not"),
        (lambda t: t.update({"fc.weight": torch.ones(HIDDEN, 40)}), "does not fit .*fc.weight"),
    ],
)
def test_wrong_tensors_are_named(llama, tmp_path, change, says):
    config = settings(llama)
    tensors = random_tensors(config)
    change(tensors)
    write(tmp_path, config, tensors)
    refused(tmp_path, says)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"hidden_size": 32}, "does not fit its config.json: .*fc.weight"),
        ({"draft_vocab_size": 7}, "does not fit its config.json: .*lm_head.weight"),
        ({"num_hidden_layers": 2}, "more than one decoder layer"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"num_key_value_heads": 3}, "make no decoder layer: .*num_key_value_heads 3"),
        ({"eagle_config": [1]}, r"eagle_config is \[1\], not of type object"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state is false"),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 8]}},
            "do not name three of the trunk's 8 layers",
        ),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, "3"]}}, "do not name three"),
        ({"partial_rotary_factor": 0.25}, "partial_rotary_factor is 0.25"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
        ({"norm_before_fc": True}, r"missing \['input_norm.weight'\]"),
    ],
)
def test_a_head_that_cannot_be_run_says_why(llama, tmp_path, changes, says):
    config = settings(llama)
    write(tmp_path, config | changes, random_tensors(config))
    refused(tmp_path, says)


def test_the_first_two_eagles_are_told_apart(llama, tmp_path):
    """Their layer is a plain one, and no output head is theirs."""
    layer = "layers.0."
    tensors = {
        "fc.weight": torch.ones(HIDDEN, 2 * HIDDEN),
        "fc.bias": torch.ones(HIDDEN),
        "embed_tokens.weight": torch.ones(VOCAB, HIDDEN),
        f"{layer}self_attn.q_proj.weight": torch.ones(16, HIDDEN),
        f"{layer}self_attn.k_proj.weight": torch.ones(8, HIDDEN),
        f"{layer}self_attn.v_proj.weight": torch.ones(8, HIDDEN),
        f"{layer}self_attn.o_proj.weight": torch.ones(HIDDEN, 16),
        f"{layer}post_attention_layernorm.weight": torch.ones(HIDDEN),
    }
    config = settings(llama, architectures=["LlamaForCausalLM"])
    del config["draft_vocab_size"]
    write(tmp_path, config, tensors, pickled=True)
    refused(tmp_path, "an EAGLE-1 or EAGLE-2 head .* only EAGLE-3 heads can be attached")


def test_a_head_for_another_trunk_is_refused(llama, tmp_path):
    config = settings(llama, target_hidden_size=24)
    head = load_head(write(tmp_path, config, random_tensors(config)), LAYERS)
    with pytest.raises(MtplxError, match="made for a trunk of hidden size 24 and 12 tokens"):
        AttachedHead(head, llama)


def test_a_head_of_another_width_needs_an_embedding(llama, tmp_path):
    config = settings(llama, hidden_size=8, target_hidden_size=HIDDEN)
    head = load_head(write(tmp_path, config, random_tensors(config)), LAYERS)
    with pytest.raises(MtplxError, match=r"the head is 8 wide and its trunk 16: .*embed_tokens"):
        AttachedHead(head, llama)


# --- through the front door -----------------------------------------------------------------------


@pytest.fixture
def model(tmp_path):
    return tiny_checkpoint.write(tmp_path / "model")


@pytest.fixture(params=[False, True], ids=["safetensors", "bin"])
def head_directory(request, tmp_path, monkeypatch):
    """A head for that model, whose vocabulary and depth are other ones."""
    monkeypatch.setattr(f"{__name__}.VOCAB", tiny_checkpoint.VOCAB_SIZE)
    trunk = tiny.llama(VOCAB)
    config = settings(trunk, 100, eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 0, 1]})
    config["vocab_size"] = VOCAB
    return write(tmp_path / "head", config, random_tensors(config), pickled=request.param)


def test_a_model_is_loaded_with_it(model, head_directory):
    llm = mtplx.load(model, head=head_directory)
    plain, drafted = (
        llm.generate("count", sampling=GREEDY, max_tokens=12, depth=depth) for depth in (0, 2)
    )
    assert drafted.token_ids == plain.token_ids
    assert sum(drafted.stats.drafted_by_position) > 0


def test_inspection_says_what_it_is(model, head_directory):
    found = inspect(model, head_directory)
    assert (found.mtp.kind, found.mtp.depth, found.mtp.usable) == ("attached", 3, True)
    tensors = load_head(head_directory, 2).state_dict().values()
    assert found.mtp.parameters == sum(tensor.numel() for tensor in tensors)
    with pytest.raises(MtplxError, match=f"a head, not a model: .* --head {head_directory}"):
        locate(head_directory)


def test_inspection_says_what_is_wrong_with_it(model, head_directory):
    config = json.loads((head_directory / "config.json").read_text())
    (head_directory / "config.json").write_text(json.dumps(config | {"norm_before_fc": True}))
    found = inspect(model, head_directory)
    assert not found.mtp.usable and "missing ['input_norm.weight']" in found.problems[0]


def test_training_does_not_go_on_with_an_embedding_it_would_drop(llama, tmp_path):
    from mtplx.training.recipe import _started

    config = settings(llama)
    tensors = random_tensors(config)
    copied, own = tmp_path / "copied", tmp_path / "own"
    write(copied, config, tensors | {"embed_tokens.weight": llama.embed.weight.clone()})
    write(own, config, tensors | {"embed_tokens.weight": torch.ones(VOCAB, HIDDEN)})
    assert _started(copied, llama).embed_tokens is None
    with pytest.raises(MtplxError, match=f"{own}: the head has an embedding of its own"):
        _started(own, llama)


def test_the_hub_is_asked_for_a_pickled_head_too(tmp_path, monkeypatch):
    asked = {}

    def download(repository, **options):
        asked[repository] = options["allow_patterns"]
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert locate_head("org/head") == tmp_path
    assert "pytorch_model.bin" in asked["org/head"] and "*.safetensors" in asked["org/head"]


def test_it_is_found_by_name(llama, tmp_path):
    config = settings(llama)
    write(tmp_path, config, random_tensors(config))
    found = find_head(Checkpoint("org/trunk", tmp_path), llama, tmp_path)
    assert isinstance(found.head, AttachedHead) and (found.depth, found.notes) == (3, ())
