"""Gemma 4 with its assistant: it reads the trunk's keys and values, and its drafts are sampled."""

from __future__ import annotations

import json
from functools import partial

import pytest
import tiny_checkpoint
import torch
from family_proof import GREEDY, PROMPTS, SAMPLED, decode
from transformers import AutoConfig, AutoModelForCausalLM

import mtplx
from mtplx.drafters.assistant import Assistant
from mtplx.engine.decoding import Batch
from mtplx.engine.request import Request
from mtplx.errors import MtplxError
from mtplx.models.trunk import Trunk

VOCAB, HIDDEN, SMALL = 24, 32, 16
TEXT = {
    "attention_bias": False,
    "attention_k_eq_v": False,
    "final_logit_softcapping": 30.0,
    "global_head_dim": 16,
    "head_dim": 8,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size_per_layer_input": 0,
    "max_position_embeddings": 512,
    "model_type": "gemma4_text",
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "sliding_window": 4,
    "tie_word_embeddings": True,
    "vocab_size": VOCAB,
    "vocab_size_per_layer_input": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
KINDS = ["sliding_attention", "sliding_attention", "full_attention"]


def filled(model, seed=0):
    """Random weights that make texts far from uniform."""
    noise = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            scale = 0.5 if "embed_tokens" in name else 1.2 * parameter.shape[-1] ** -0.5
            parameter.data = torch.randn(parameter.shape, generator=noise) * scale
    return model.eval().requires_grad_(False)


def backbone(shared=0):
    """A Gemma 4 whose last layers read the keys of those before them, if any do."""
    # transformers runs shared keys only with embeddings for each layer.
    per_layer = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB}
    config = AutoConfig.for_model(
        **TEXT | (per_layer if shared else {}),
        hidden_size=HIDDEN,
        intermediate_size=24,
        layer_types=KINDS * 2,
        num_hidden_layers=6,
        num_kv_shared_layers=shared,
    )
    return filled(AutoModelForCausalLM.from_config(config))


def assistant(ordered=False, **changes):
    text = TEXT | {
        "hidden_size": SMALL,
        "intermediate_size": 12,
        "layer_types": ["sliding_attention", "full_attention"],
        "num_hidden_layers": 2,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": False,
    }
    settings = {
        "backbone_hidden_size": HIDDEN,
        "centroid_intermediate_top_k": 3,
        "num_centroids": 6,
        "text_config": text,
        "tie_word_embeddings": True,
        "use_ordered_embeddings": ordered,
    }
    config = AutoConfig.for_model("gemma4_assistant", **settings | changes)
    model = filled(AutoModelForCausalLM.from_config(config), 1)
    if ordered:
        order = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(2))
        model.masked_embedding.token_ordering.copy_(order)
    return model


@pytest.fixture(scope="module", params=[(0, False), (3, False), (0, True)], ids=str)
def pair(request):
    shared, ordered = request.param
    trunk = Trunk(backbone(shared))
    return trunk, Assistant("tiny", assistant(ordered), trunk)


def watch(cycles, batch):
    """Record of each draft: the request, the tokens before it, its tokens and its logits."""
    draft, step = batch.drafter.draft, batch.drafter.assistant.step

    def recording(*args, **kwargs):
        seen = []

        def stepping(*inputs):
            logits, hidden = step(*inputs)
            seen.append(logits)
            return logits, hidden

        batch.drafter.assistant.step = stepping
        result = draft(*args, **kwargs)
        del batch.drafter.assistant.step
        for row, slot in enumerate(batch.slots):
            known = [*slot.request.prompt, *slot.output]
            cycles.append((known, result.tokens[row], torch.stack(seen)[:, row]))
        return result

    batch.drafter.draft = recording


def reference(trunk, model, known, drafted):
    """transformers' own assistant, with the keys of the committed text and no others."""
    read = torch.tensor([known[:-1]])
    output = trunk.decoder(read, return_shared_kv_states=True, use_cache=False)
    shared = {kind: tuple(states) for kind, states in output.shared_kv_states.items()}
    hidden, rows = output.last_hidden_state[:, -1:], []
    for token in (known[-1], *drafted[:-1]):
        embeds = trunk.embed(torch.tensor([[token]]))
        step = model(
            inputs_embeds=torch.cat([embeds, hidden], -1),
            position_ids=torch.tensor([[len(known) - 1]]),
            shared_kv_states=shared,
        )
        rows.append(step.logits[0, 0])
        hidden = step.last_hidden_state
    return torch.stack(rows)


@torch.inference_mode()
def test_its_drafts_are_those_of_transformers_assistant(pair):
    trunk, drafter = pair
    cycles = []
    _, stats = decode(trunk, drafter, PROMPTS, 3, SAMPLED, 40, partial(watch, cycles))
    for known, drafted, logits in cycles:
        if len(known) > 1:
            expected = reference(trunk, drafter.model, known, drafted.tolist())
            torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)
    kept = torch.tensor([s.accepted_by_position[:3] for s in stats]).sum(0).tolist()
    assert len(cycles) > kept[0] > kept[2] > 0


@pytest.mark.parametrize("depth", [1, 2, 4, (4, 0, 2)])
def test_greedy_text_is_that_of_generate(pair, depth):
    trunk, drafter = pair
    settings = {"do_sample": False, "max_new_tokens": 24, "pad_token_id": 0}
    texts = [trunk.model.generate(torch.tensor([p]), **settings)[0].tolist() for p in PROMPTS]
    expected = [text[len(p) :] for p, text in zip(PROMPTS, texts, strict=True)]
    assert decode(trunk, drafter, PROMPTS, depth)[0] == expected
    if isinstance(depth, int):
        assert decode(trunk, drafter, PROMPTS[:1], depth)[0] == expected[:1]


@pytest.mark.parametrize("source", ["token", "hidden"])
def test_an_assistant_that_knows_the_text_has_every_draft_kept(source):
    """It goes by the last token, or by the state that moves on one number with each draft."""
    trunk_model, model = backbone(), assistant()
    for part in (trunk_model, model):
        for name, parameter in part.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.data.zero_()
            elif "norm" in name:
                parameter.data.fill_(1.0)
    eye = torch.eye(VOCAB, HIDDEN)
    onward = torch.zeros(HIDDEN, HIDDEN)
    onward[:VOCAB, :VOCAB] = torch.eye(VOCAB).roll(1, 0)
    trunk_model.get_input_embeddings().weight.data = eye
    # The trunk counts, by a head of its own.
    trunk_model.lm_head.weight = torch.nn.Parameter(eye.roll(1, 0), requires_grad=False)
    wide = assistant(text_config=model.config.text_config.to_dict() | {"hidden_size": HIDDEN})
    for name, parameter in wide.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            parameter.data.zero_()
        elif "norm" in name:
            parameter.data.fill_(1.0)
    nothing = torch.zeros(HIDDEN, HIDDEN)
    halves = [torch.eye(HIDDEN), nothing] if source == "token" else [nothing, onward]
    wide.pre_projection.weight.data = torch.cat(halves, -1)
    wide.post_projection.weight.data = torch.eye(HIDDEN)
    wide.lm_head.weight = torch.nn.Parameter(eye.roll(1, 0), requires_grad=False)
    trunk = Trunk(trunk_model)
    drafter = Assistant("tiny", wide, trunk)
    prompts = [(3, 4, 5, 6, 7, 8), (9,), (1, 2, 3)]
    for depth in (1, 2, 3, 5):
        texts, stats = decode(trunk, drafter, prompts, depth)
        for prompt, text, s in zip(prompts, texts, stats, strict=True):
            start = prompt[-1] + 1
            assert text == [n % VOCAB for n in range(start, start + 24)]
            assert s.accepted_by_position == s.drafted_by_position


def test_a_text_goes_on_from_what_the_last_one_left(pair):
    trunk, drafter = pair
    first = Batch(trunk, drafter, [Request((3, 1, 4, 1, 5), GREEDY, 0, 12, 2)])
    text = [token for bursts in first.run() for burst in bursts for token in burst.tokens]
    again = [Request((3, 1, 4, 1, 5, *text[:8], 9), GREEDY, 0, 12, 2)]
    resumed = Batch(trunk, drafter, again, prefix=first.prefix())
    assert resumed.slots[0].stats.cached_tokens == 12
    texts = [
        [token for bursts in batch.run() for burst in bursts for token in burst.tokens]
        for batch in (resumed, Batch(trunk, drafter, again))
    ]
    assert texts[0] == texts[1]


def test_it_is_loaded_by_name(tmp_path):
    """With a tokenizer, and as its files are published."""
    model, other = tmp_path / "model", tmp_path / "assistant"
    vocabulary = {"vocab_size": tiny_checkpoint.VOCAB_SIZE}
    config = backbone().config
    config.vocab_size = tiny_checkpoint.VOCAB_SIZE
    filled(AutoModelForCausalLM.from_config(config)).save_pretrained(model)
    tiny_checkpoint.tokenizer().save_pretrained(model)
    text = assistant().config.text_config.to_dict() | vocabulary
    assistant(text_config=text).save_pretrained(other)
    assert json.loads((other / "config.json").read_text())["model_type"] == "gemma4_assistant"
    llm = mtplx.load(model, draft_model=other, dtype="float32")
    assert llm.drafts_with == f"assistant {other}"
    plain = llm.generate("to be", max_tokens=20, sampling=GREEDY, depth=0)
    assert llm.generate("to be", max_tokens=20, sampling=GREEDY, depth=3).token_ids == (
        plain.token_ids
    )


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"backbone_hidden_size": 48}, "states of 48 numbers, and this model's have 32"),
        (
            {
                "text_config": TEXT
                | {
                    "vocab_size": 30,
                    "num_hidden_layers": 2,
                    "layer_types": ["sliding_attention", "full_attention"],
                    "hidden_size": SMALL,
                }
            },
            "it has 30 tokens, and this model 24",
        ),
    ],
)
def test_another_models_assistant_is_refused(changes, why):
    trunk = Trunk(backbone())
    with pytest.raises(MtplxError, match=f"tiny is no assistant for this model: .*{why}"):
        Assistant("tiny", assistant(**changes), trunk)
