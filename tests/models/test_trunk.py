"""The trunk over slots: transformers' own numbers, or a clear refusal."""

from functools import partial

import pytest
import tiny
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from mtplx import kernels
from mtplx.drafters.attached import AttachedHead
from mtplx.errors import MtplxError
from mtplx.models.deterministic import DeterministicTrunk
from mtplx.models.fused import FusedTrunk
from mtplx.models.slots import Span
from mtplx.models.trunk import Trunk


def model(model_type, **settings):
    """A random model of a few thousand parameters."""
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 13,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    config = AutoConfig.for_model(model_type, **sizes | settings)
    return AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)


def read_in_passes(trunk, tokens, lengths, width, taps=()):
    """Rows of different lengths, `width` more tokens each in a second pass."""
    cache = trunk.new_cache(tokens.shape[1] + width)
    longest = max(lengths)
    start = Span.after([0] * len(lengths), longest, trunk.device)
    trunk.forward(tokens[:, :longest], start, cache, with_logits=False)
    span = Span.after(lengths, width, trunk.device)
    return trunk.forward(tokens.gather(1, span.positions), span, cache, taps)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3", "mistral", "gemma3_text"])
def test_rows_of_any_length_get_the_models_own_logits(model_type, attention):
    trunk = Trunk(model(model_type, attn_implementation=attention))
    assert trunk.config._attn_implementation == attention
    lengths, width = [7, 1, 4], 3
    tokens = torch.randint(13, (3, 10), generator=torch.Generator().manual_seed(1))
    output = read_in_passes(trunk, tokens, lengths, width, taps=(0, 1, 2))
    with torch.inference_mode():
        for b, length in enumerate(lengths):
            whole = trunk.model(tokens[b : b + 1, : length + width], output_hidden_states=True)
            torch.testing.assert_close(
                output.logits[b], whole.logits[0, length:], rtol=1e-4, atol=1e-5
            )
            # transformers puts the last norm over its last state; the taps come before that.
            torch.testing.assert_close(
                output.aux[b, :, : 2 * 16],
                torch.cat(whole.hidden_states[:2], -1)[0, length:],
                rtol=1e-4,
                atol=1e-5,
            )
            torch.testing.assert_close(
                output.hidden[b], whole.hidden_states[-1][0, length:], rtol=1e-4, atol=1e-5
            )
            torch.testing.assert_close(
                trunk.decoder.norm(output.aux[b, :, 2 * 16 :]),
                output.hidden[b],
                rtol=1e-4,
                atol=1e-5,
            )


def test_read_is_a_pass_over_whole_texts():
    trunk = tiny.llama(13)
    tokens = torch.randint(13, (2, 6), generator=torch.Generator().manual_seed(1))
    read = trunk.read(tokens, (1, 0))
    whole = trunk.model(tokens, output_hidden_states=True)
    assert read.logits is None
    torch.testing.assert_close(read.hidden, whole.hidden_states[-1])
    torch.testing.assert_close(read.aux, torch.cat([whole.hidden_states[i] for i in (1, 0)], -1))
    assert trunk.read(tokens).aux is None


@pytest.mark.parametrize(
    ("model_type", "settings", "context"),
    [
        ("llama", {}, 64),
        ("mistral", {"sliding_window": 20}, 64),
        ("mistral", {"sliding_window": None}, 64),
        ("mistral", {"sliding_window": 100}, 64),
        ("qwen2", {"sliding_window": 20, "use_sliding_window": False}, 64),
        ("qwen2", {"sliding_window": 20, "use_sliding_window": True, "max_window_layers": 1}, 64),
        (
            "gemma3_text",
            {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"]},
            64,
        ),
        (
            "phi3",
            {
                "original_max_position_embeddings": 32,
                "rope_parameters": {
                    "rope_type": "longrope",
                    "rope_theta": 10000.0,
                    "short_factor": [1.0, 1.0],
                    "long_factor": [2.0, 3.0],
                    "original_max_position_embeddings": 32,
                },
            },
            32,
        ),
    ],
)
def test_what_changes_with_the_length_limits_the_context(model_type, settings, context):
    assert Trunk(model(model_type, **settings)).context == context


WINDOWED = {
    "mistral": {"sliding_window": 4},
    "qwen2": {"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 1},
    "gemma3_text": {
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "qwen3": {
        "sliding_window": 4,
        "use_sliding_window": True,
        "layer_types": ["sliding_attention", "sliding_attention"],
    },
}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("model_type", sorted(WINDOWED))
def test_beyond_its_window_a_sliding_model_is_itself(model_type, attention):
    settings = {"initializer_range": 0.3, "attn_implementation": attention}
    trunk = Trunk(model(model_type, **WINDOWED[model_type], **settings))
    tokens = torch.randint(13, (3, 14), generator=torch.Generator().manual_seed(1))
    lengths = [11, 2, 6]
    output = read_in_passes(trunk, tokens, lengths, 3)
    for b, length in enumerate(lengths):
        text = tokens[b : b + 1, : length + 3]
        whole = trunk.model(text).logits
        torch.testing.assert_close(output.logits[b], whole[0, length:], rtol=1e-3, atol=1e-4)
    # That it is a window is seen: a token before it changes nothing behind two layers of it.
    if model_type in ("mistral", "qwen3"):
        far = tokens.clone()
        far[:, :4] = 0
        again = read_in_passes(trunk, far, lengths, 3)
        torch.testing.assert_close(again.logits[0, 1:], output.logits[0, 1:])
        assert not torch.allclose(again.logits[2], output.logits[2], atol=1e-3)


@pytest.mark.parametrize("kind", [DeterministicTrunk, partial(FusedTrunk, library=kernels.find())])
def test_where_windows_cannot_be_run_they_limit_the_context(kind):
    if kind is not DeterministicTrunk and kernels.find() is None:
        pytest.skip("the kernels are not built")
    settings = {"head_dim": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    trunk = kind(model("mistral", sliding_window=20, **settings))
    assert trunk.context == 20


INDEXED = {
    "num_key_value_heads": 4,
    "num_hidden_layers": 3,
    "q_lora_rank": 12,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "first_k_dense_replace": 2,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "n_group": 1,
    "topk_group": 1,
    # No token's embedding is zero, and many heads: no two keys are looked for equally.
    "pad_token_id": None,
    "index_n_heads": 16,
    "index_head_dim": 8,
    "index_topk": 4,
}
SPARSE = {"deepseek_v32": {}, "glm_moe_dsa": {"index_topk_freq": 2}, "hy_v4": {"hc_mult": 2}}


def sparse(model_type):
    return model(model_type, initializer_range=0.3, **INDEXED | SPARSE[model_type])


@pytest.mark.parametrize("kind", [Trunk, DeterministicTrunk])
@pytest.mark.parametrize("model_type", sorted(SPARSE))
def test_where_keys_are_picked_a_rejected_token_is_not_picked_from(model_type, kind):
    """Far beyond the few keys that a query looks at, each row back by a number of its own."""
    trunk = kind(sparse(model_type))
    texts = torch.randint(13, (3, 24), generator=torch.Generator().manual_seed(1))
    lengths = [11, 2, 6]
    cache = trunk.new_cache(24)
    trunk.forward(texts[:, :11], Span.after([0] * 3, 11, trunk.device), cache, with_logits=False)
    for accepted in ([3, 0, 1], [0, 5, 2], [4, 4, 4]):
        span = Span.after(lengths, 5, trunk.device)
        tokens = texts.gather(1, span.positions)
        for row, count in enumerate(accepted):
            tokens[row, count:] = 12 - tokens[row, count:]
        trunk.forward(tokens, span, cache, with_logits=False)
        lengths = [length + count for length, count in zip(lengths, accepted, strict=True)]
    # As a batch that goes on with other rows, and one that another's text was taken over into.
    rows, lengths = [2, 0, 1], [lengths[row] for row in (2, 0, 1)]
    cache.keep_rows(torch.tensor(rows))
    span = Span.after(lengths, 3, trunk.device)
    logits = trunk.forward(texts[rows].gather(1, span.positions), span, cache).logits
    alone = trunk.new_cache(24)
    cache.keep_rows(torch.tensor([1]))
    alone.take(cache, lengths[1] + 1)
    again = trunk.forward(
        texts[:1, lengths[1] + 1 : lengths[1] + 3],
        Span.after([lengths[1] + 1], 2, trunk.device),
        alone,
    ).logits
    with torch.inference_mode():
        for b, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            whole = sparse(model_type)(texts[row : row + 1, : length + 3]).logits[0, length:]
            torch.testing.assert_close(logits[b], whole, rtol=1e-3, atol=1e-3)
    if trunk.deterministic:
        assert torch.equal(again[0], logits[1, 1:])
    else:
        torch.testing.assert_close(again[0], logits[1, 1:], rtol=1e-3, atol=1e-3)
    # That keys are picked is seen: with all of them the logits are others.
    dense = model(model_type, initializer_range=0.3, **INDEXED | {"index_topk": 64})
    other = dense(texts[:1, : lengths[1] + 3]).logits[0, lengths[1] :]
    assert not torch.allclose(logits[1], other, atol=1e-2)


@pytest.mark.parametrize("model_type", ["deepseek_v32", "glm_moe_dsa"])
def test_a_text_too_short_to_show_it_leaves_picked_keys_picked(model_type):
    """The deterministic trunk's own attention would look at all of them."""
    settings = INDEXED | {"index_topk": 64, "max_position_embeddings": 256}
    trunk = DeterministicTrunk(model(model_type, initializer_range=0.3, **settings))
    assert "indices" in str(trunk.slow_because)


def test_positions_past_the_context_do_not_reach_the_model():
    """A dynamic rotary embedding would change for the whole batch."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    trunk = Trunk(model("llama", max_position_embeddings=8, rope_parameters=rope))
    tokens = torch.randint(13, (2, 12), generator=torch.Generator().manual_seed(1))
    output = read_in_passes(trunk, tokens, [2, 7], 4)
    whole = trunk.model(tokens[:1, :6]).logits
    torch.testing.assert_close(output.logits[0], whole[0, 2:], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("model_type", "settings", "kind"),
    [
        ("mamba", {"state_size": 4}, "linear_attention"),
        ("rwkv", {"attention_hidden_size": 16}, "recurrent"),
    ],
)
def test_layers_that_keep_other_states_are_refused(model_type, settings, kind):
    with pytest.raises(
        MtplxError, match=f"model type '{model_type}' has layers of kind {kind} that cannot be run"
    ):
        Trunk(model(model_type, **settings))


@pytest.mark.parametrize(
    ("model_type", "settings", "reason"),
    [
        ("bloom", {}, "its code in transformers cannot be given positions"),
        ("bart", {}, "cannot be given positions"),
        ("openai-gpt", {}, "its code in transformers cannot be given a cache"),
        (
            "llama4_text",
            {"layer_types": ["full_attention"] * 2},
            "does not tell its decoder from its output head",
        ),
        ("gpt_neo", {"attention_types": [[["global", "local"], 1]]}, "a mask of its own"),
        ("bert", {}, "its attention looks ahead"),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_families_that_cannot_be_run_are_refused_with_and_without_weights(
    model_type, settings, reason, device
):
    with torch.device(device):
        refused = model(model_type, **settings)
    with pytest.raises(MtplxError, match=f"model type '{model_type}' cannot be run: .*{reason}"):
        Trunk(refused)


@pytest.mark.parametrize("broken", ["mask", "positions", "crash"])
def test_a_model_that_overlooks_what_it_is_given_is_found_out(broken):
    llama = model("llama", initializer_range=0.5)
    assert Trunk(llama)

    def overlook(module, args, kwargs):
        if broken == "mask":
            return args, kwargs | {"attention_mask": None}
        if broken == "positions" and kwargs.get("position_ids") is not None:
            return args, kwargs | {"position_ids": torch.full_like(kwargs["position_ids"], 1)}
        if broken == "crash":
            raise KeyError("two\nlines")
        return args, kwargs

    llama.model.register_forward_pre_hook(overlook, with_kwargs=True)
    says = "failed .*two.*lines" if broken == "crash" else "change each other's logits"
    with pytest.raises(MtplxError, match=f"model type 'llama' cannot be run: .*{says}") as caught:
        Trunk(llama)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_is_no_reason_to_refuse(dtype):
    assert Trunk(model("mixtral", initializer_range=0.5).to(dtype)).dtype == dtype


def test_a_decoder_without_a_list_of_layers_runs_but_has_nothing_to_tap():
    trunk = Trunk(model("gpt2"))
    tokens = torch.randint(13, (2, 9), generator=torch.Generator().manual_seed(1))
    output = read_in_passes(trunk, tokens, [2, 5], 3)
    for b, length in enumerate([2, 5]):
        whole = trunk.model(tokens[b : b + 1, : length + 3]).logits
        torch.testing.assert_close(output.logits[b], whole[0, length:], rtol=1e-4, atol=1e-5)
    with pytest.raises(MtplxError, match="no head can be attached to a model of type 'gpt2'"):
        AttachedHead(tiny.eagle3(tiny.llama(13)), trunk)
