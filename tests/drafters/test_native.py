"""Native MTP heads: against transformers' `MtpModel`, and what files may look like.

That each family's layers are wired as they were published is proved in `families`.
"""

from __future__ import annotations

import json
import socket
from functools import partial

import pytest
import tiny_checkpoint
import tiny_native
import torch
from family_proof import GREEDY, PROMPTS, SAMPLED, decode, load, watch_drafts
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from mtplx import kernels
from mtplx.drafters.find import find_head
from mtplx.drafters.native import load_native_head
from mtplx.errors import MtplxError
from mtplx.inspection import inspect
from mtplx.models.checkpoint import Checkpoint, load_model
from mtplx.models.linear import hand_over, linear_layers
from mtplx.models.trunk import Trunk

FAMILIES = sorted(tiny_native.FAMILIES)
LAYER = f"model.layers.{tiny_native.TRUNK_LAYERS}."


@pytest.fixture(scope="module", params=FAMILIES)
def directory(request, tmp_path_factory):
    return tiny_native.write(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def loaded(directory):
    return load(directory)


# --- the drafts ------------------------------------------------------------------------------


class TheirMtp:
    """transformers' own way through a head: `MtpModel.forward` over what each cycle committed."""

    def __init__(self, directory):
        self.trunk = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        # It knows the layer numbers of the published sizes only.
        count = self.trunk.config.num_mtp_layers
        self.trunk._keys_to_ignore_on_load_unexpected = [
            rf"model\.layers\.{tiny_native.TRUNK_LAYERS + k}\..*" for k in range(count)
        ]
        self.model = MtpModel.from_pretrained(self.trunk).eval()
        self.cache = MtpCache(config=self.trunk.config.get_mtp_config())
        self.read = 0

    @torch.inference_mode()
    def logits(self, known):
        tokens = torch.tensor([known])
        hidden = self.trunk(tokens[:, :-1], output_hidden_states=True).hidden_states[-1]
        positions = torch.arange(len(known))[None]
        _, logits, _ = self.model(
            input_ids=tokens[:, self.read + 1 :],
            last_hidden_states=hidden[:, self.read :],
            attention_mask=None,
            position_ids=positions[:, self.read + 1 :],
            mtp_cache=self.cache,
        )
        self.read = len(known) - 1
        return logits[0]


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_at_depth_one_the_drafted_logits_are_those_of_mtp_model(directory, loaded, sampling):
    trunk, head, _ = loaded
    cycles: list = []
    _, stats = decode(trunk, head, PROMPTS, 1, sampling, 32, partial(watch_drafts, cycles))
    theirs = [TheirMtp(directory) for _ in PROMPTS]
    for index, known, _, logits in cycles:
        # A first token that is the whole prompt has no hidden state to draft from yet.
        if len(known) > 1:
            torch.testing.assert_close(logits, theirs[index].logits(known), rtol=1e-4, atol=1e-4)
    drafted = sum(s.drafted_by_position[0] for s in stats)
    accepted = sum(s.accepted_by_position[0] for s in stats)
    assert accepted < drafted
    if sampling is SAMPLED:
        assert accepted


# --- the files -------------------------------------------------------------------------------


def test_a_layer_may_have_an_embedding_and_output_head_of_its_own(tmp_path, directory, loaded):
    family = loaded[0].config.model_type
    own = {name: torch.randn(tiny_native.VOCAB, tiny_native.HIDDEN) for name in ("in", "out")}

    def change(tensors):
        tensors[f"{LAYER}embed_tokens.weight"] = own["in"]
        tensors[f"{LAYER}shared_head.head.weight"] = own["out"]

    tiny_native.write(tmp_path, family, change=change)
    _, head, notes = load(tmp_path)
    hidden, tokens = torch.randn(3, tiny_native.HIDDEN), torch.tensor([[5, 0]])
    torch.testing.assert_close(head.logits(hidden), hidden @ own["out"].T)
    torch.testing.assert_close(head.embeds[0](tokens), own["in"][tokens])
    assert notes == ()
    shared, embed = loaded[1], loaded[0].embed
    assert shared.embeds == [embed] and shared.projects == [loaded[0].model.lm_head]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_in_one_file_loads_too_and_without_a_network(tmp_path, family, monkeypatch):
    def connect(*args):
        raise AssertionError("the network was touched")

    monkeypatch.setattr(socket.socket, "connect", connect)
    copies = ("embed_tokens.weight", "shared_head.head.weight")
    tiny_native.write(
        tmp_path,
        family,
        sharded=False,
        change=lambda tensors: [tensors.pop(LAYER + name) for name in copies],
    )
    trunk, head, notes = load(tmp_path)
    assert notes == ()
    texts, _ = decode(trunk, head, PROMPTS, 2)
    assert texts == decode(trunk, None, PROMPTS, 0)[0]


@pytest.mark.slow
@pytest.mark.skipif(kernels.find() is None, reason="the kernels are not built")
@pytest.mark.parametrize("own", [False, True])
def test_a_trunk_in_tiles_has_the_same_head(tmp_path, loaded, own):
    def change(tensors):
        if own:
            tensors[f"{LAYER}shared_head.head.weight"].mul_(-2)

    checkpoint = Checkpoint(
        "tiny", tiny_native.write(tmp_path, loaded[0].config.model_type, change=change)
    )
    model = load_model(checkpoint, torch.float32)
    for name, layer in linear_layers(model):
        # As loading keeps the output head, in bfloat16.
        narrow = layer is model.get_output_embeddings()
        weight = layer.weight.bfloat16() if narrow else layer.weight
        hand_over(model, name, kernels.find(), weight, layer.bias)
    trunk = Trunk(model)
    head, _ = load_native_head(checkpoint, trunk)
    hidden = torch.randn(3, tiny_native.HIDDEN)
    expected = loaded[1].logits(hidden) * (-2 if own else 1)
    torch.testing.assert_close(head.logits(hidden), expected, rtol=0.02, atol=0.02)
    assert (head.projects[0] is model.lm_head) == (not own)
    # What is drafted is verified, so that the text is the trunk's own.
    assert decode(trunk, head, PROMPTS, 2)[0] == decode(trunk, None, PROMPTS, 0)[0]


@pytest.mark.slow
def test_the_drafts_do_not_depend_on_the_trunks_kind_of_attention(directory, loaded):
    checkpoint = Checkpoint("tiny", directory)
    model = load_model(checkpoint, torch.float32)
    model.set_attn_implementation("eager")
    trunk = Trunk(model)
    drafts: list[list] = [[], []]
    head, _ = load_native_head(checkpoint, trunk)
    decode(trunk, head, PROMPTS, 2, watch=partial(watch_drafts, drafts[0]))
    decode(loaded[0], loaded[1], PROMPTS, 2, watch=partial(watch_drafts, drafts[1]))
    for (_, known, _, mine), (_, same, _, others) in zip(*drafts, strict=True):
        assert known == same
        torch.testing.assert_close(mine, others, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_promised_layers_that_are_not_there_are_a_note(tmp_path, family):
    tiny_native.write(tmp_path, family, mtp_layers=0, promised=1)
    trunk, head, notes = load(tmp_path)
    assert head is None
    assert len(notes) == 1 and "promises 1 MTP layer" in notes[0]
    found = find_head(Checkpoint("tiny", tmp_path), trunk, None)
    assert (found.head, found.depth, found.notes) == (None, 0, notes)


def test_nothing_promised_and_nothing_there_is_no_news(tmp_path):
    tiny_native.write(tmp_path, "glm4_moe", mtp_layers=0)
    assert load(tmp_path)[1:] == (None, ())


def test_layers_in_a_module_of_their_own_are_a_note(tmp_path):
    """Qwen3-Next's layout, on a trunk that can be run; the same as what `inspect` says."""
    tiny_checkpoint.write(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    mtp = {"mtp.fc.weight": torch.zeros(3, 5), "mtp.layers.0.mlp.weight": torch.zeros(3)}
    save_file(weights | mtp, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert load(tmp_path)[1:] == (
        None,
        ("nothing is drafted: the MTP layers of a llama model are not run yet",),
    )
    found = inspect(tmp_path)
    assert (found.mtp.kind, found.mtp.found, found.mtp.usable) == ("native", 1, False)


@pytest.mark.parametrize("key", ["num_nextn_predict_layers", "mtp_num_hidden_layers"])
def test_a_promise_by_either_name_is_a_note(tmp_path, key):
    tiny_checkpoint.write(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {key: 2}))
    (note,) = load(tmp_path)[2]
    assert "promises 2 MTP layer(s)" in note
    mtp = inspect(tmp_path).mtp
    assert (mtp.kind, mtp.promised) == ("missing", 2)


SEVERAL = 3


@pytest.fixture(scope="module")
def several(tmp_path_factory):
    """A checkpoint with three layers, as DeepSeek's report has them."""
    directory = tmp_path_factory.mktemp("several")
    return tiny_native.write(directory, "deepseek_v3", mtp_layers=SEVERAL)


class Chain(TheirMtp):
    """transformers' own way through several layers, one draft each, over a whole text."""

    def drafts(self, known, drafted):
        """Logits of each draft; the tokens behind the text are given."""
        texts = torch.tensor([known])
        hidden = self.trunk(texts[:, :-1], output_hidden_states=True).hidden_states[-1]
        rows, tokens = [], torch.tensor([[*known[1:], *drafted]])
        for layer in range(len(drafted)):
            count = hidden.shape[1]
            ids = tokens[:, layer : layer + count]
            positions = torch.arange(1, count + 1)[None] + layer
            embeds = self.model.embed_tokens(ids)
            hidden = self.model.layers[layer](
                embeds,
                hidden,
                position_embeddings=self.model.rotary_emb(embeds, position_ids=positions),
                attention_mask=None,
                position_ids=positions,
                cache=None,
            )
            rows.append(self.model.shared_head(hidden[0, -1]))
        return torch.stack(rows)


@pytest.mark.slow
def test_each_of_several_layers_drafts_one_token(several):
    """The first three drafts are those of three layers, behind every kind of cycle."""
    trunk, head, notes = load(several)
    assert (head.layers, notes) == (SEVERAL, ())
    theirs = Chain(several)
    cycles: list = []
    _, stats = decode(trunk, head, PROMPTS, 3, SAMPLED, 32, partial(watch_drafts, cycles))
    with torch.inference_mode():
        for _, known, drafted, logits in cycles:
            # A layer needs as many tokens before its first position.
            if len(known) > 1:
                expected = theirs.drafts(known, drafted.tolist())
                torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    kept = torch.tensor([s.accepted_by_position[:3] for s in stats]).sum(0).tolist()
    assert len(cycles) > kept[0] > kept[2] > 0


@pytest.mark.slow
@pytest.mark.parametrize("depth", [1, 2, 5])
def test_with_several_layers_the_greedy_text_is_the_trunks(several, depth):
    trunk, head, _ = load(several)
    expected, _ = decode(trunk, None, PROMPTS, 0)
    assert decode(trunk, head, PROMPTS, depth)[0] == expected
    assert decode(trunk, head, PROMPTS[1:2], depth)[0] == expected[1:2]


@pytest.mark.parametrize(
    ("promised", "named"), [(0, "names no MTP layers"), (3, "promises 3 MTP layer(s)")]
)
def test_the_files_say_how_many_layers_there_are(tmp_path, promised, named):
    tiny_native.write(tmp_path, "deepseek_v3", mtp_layers=2, promised=promised)
    _, head, notes = load(tmp_path)
    assert head.layers == 2
    assert notes == (f"config.json {named}, and the weight files hold 2: what they hold drafts",)


def drop(name, tensors):
    del tensors[name]


def add(name, tensors):
    tensors[name] = torch.zeros(3)


WRONG = {
    "left over": (partial(add, f"{LAYER}mlp.bias"), f"no place for .*: {LAYER}mlp.bias"),
    "missing": (partial(drop, f"{LAYER}enorm.weight"), f"lacks .*: {LAYER}enorm.weight"),
    "misshapen": (partial(add, f"{LAYER}hnorm.weight"), f"shapes: {LAYER}hnorm.weight"),
    "an expert's half": (
        partial(drop, f"{LAYER}mlp.experts.3.up_proj.weight"),
        f"lacks .*: {LAYER}mlp.experts",
    ),
    "one expert more": (
        partial(add, f"{LAYER}mlp.experts.4.up_proj.weight"),
        f"lacks .*: {LAYER}mlp.experts",
    ),
}


@pytest.mark.parametrize("change, message", WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("family", FAMILIES)
def test_tensors_that_do_not_make_a_layer_are_one_clear_line(tmp_path, family, change, message):
    tiny_native.write(tmp_path, family, change=change)
    with pytest.raises(MtplxError, match=message) as error:
        load(tmp_path)
    assert "\n" not in str(error.value) and str(tmp_path) in str(error.value)
