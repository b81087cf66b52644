"""Recurrent trunks: what was rejected leaves no trace in any state."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from mtplx.errors import MtplxError
from mtplx.models import recurrent as recurrent_slots
from mtplx.models.deterministic import DeterministicTrunk
from mtplx.models.recurrent import RecurrentSlots, decayed_sum, gated_delta_rule, rowwise_delta_rule
from mtplx.models.slots import Span
from mtplx.models.trunk import Trunk

CPU = torch.device("cpu")
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 6,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 8,
}
FAMILIES = {
    "bailing_hybrid": {
        "num_key_value_heads": 4,
        "kv_lora_rank": 8,
        "q_lora_rank": None,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
        "layer_group_size": 3,
        "first_k_dense_replace": 1,
        "num_experts": 4,
        "num_experts_per_token": 2,
        "num_shared_experts": 1,
        "num_expert_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 8,
        "model_max_length": 512,
        "pad_token_id": None,
    },
    "qwen3_next": DELTA | EXPERTS,
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": DELTA | EXPERTS,
    # Not recurrent: a window, which rejected keys must not fill either.
    "gemma3_text": {
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"],
        "num_hidden_layers": 4,
        "mamba_num_heads": 4,
        "mamba_head_dim": 6,
        "n_groups": 2,
        "ssm_state_size": 5,
        "conv_kernel": 4,
    },
}


def recurrent(model_type, **changes):
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 13,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "initializer_range": 0.3,
    }
    config = AutoConfig.for_model(model_type, **sizes | FAMILIES[model_type] | changes)
    return AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def trunk(request):
    return Trunk(recurrent(request.param))


def states(cache):
    """What every recurrent layer holds at its row's position: the state, the last inputs."""
    return [(slots.state, slots.window) for _, slots in sorted(cache.recurrent.items())]


def settle(trunk, cache, lengths):
    """Have the cache come back to these lengths, as the next pass would."""
    for slots in cache.recurrent.values():
        slots.begin(torch.tensor(lengths), 0)


def prefilled(trunk, text, capacity):
    cache = trunk.new_cache(capacity)
    trunk.forward(text, Span.after([0], text.shape[1], CPU, [text.shape[1]]), cache)
    return cache


@pytest.fixture
def short_chunks(monkeypatch):
    """So that short texts have several."""
    monkeypatch.setattr(recurrent_slots, "CHUNK", 8)


# Several rounds of float32 through random layers, some of which pick experts.
CLOSE = {"rtol": 1e-2, "atol": 2e-3}


@settings(
    max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_after_every_cycle_the_states_are_those_of_a_fresh_prefill(trunk, short_chunks, data):
    """Over random patterns of accepting and rejecting, each row by itself."""
    noise = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    texts = [torch.randint(13, (1, data.draw(st.integers(1, 24))), generator=noise) for _ in "abc"]
    longest = max(text.shape[1] for text in texts)
    cache = trunk.new_cache(longest + 40)
    window = torch.cat([torch.nn.functional.pad(t, (0, longest - t.shape[1])) for t in texts])
    # In two passes, as a long prompt is.
    for start, end in ((0, longest // 2), (longest // 2, longest)):
        if end > start:
            kept = [min(max(text.shape[1] - start, 0), end - start) for text in texts]
            span = Span.after([start] * 3, end - start, CPU, kept)
            trunk.forward(window[:, start:end], span, cache, with_logits=False)
    for _ in range(4):
        width = data.draw(st.integers(1, 5))
        new = torch.randint(13, (3, width), generator=noise)
        lengths = [text.shape[1] for text in texts]
        output = trunk.forward(new, Span.after(lengths, width, CPU), cache)
        for b, text in enumerate(texts):
            whole = trunk.model(torch.cat([text, new[b : b + 1]], 1)).logits[0, -width:]
            torch.testing.assert_close(output.logits[b], whole, **CLOSE)
            accepted = data.draw(st.integers(0, width))
            texts[b] = torch.cat([text, new[b : b + 1, :accepted]], 1)
        settle(trunk, cache, [text.shape[1] for text in texts])
        for b, text in enumerate(texts):
            fresh = prefilled(trunk, text, longest + 40)
            for (state, past), (expected, inputs) in zip(states(cache), states(fresh), strict=True):
                torch.testing.assert_close(state[b], expected[0], **CLOSE)
                torch.testing.assert_close(past[b], inputs[0], **CLOSE)


def test_a_chunk_reads_what_position_by_position_is_read():
    """Against the definitions, one position at a time."""
    noise = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(2, 3, 20, size, generator=noise) for size in (4, 4, 6))
    k = k / k.norm(dim=-1, keepdim=True)
    g = -torch.rand(2, 3, 20, generator=noise)
    beta = torch.rand(2, 3, 20, generator=noise)
    begun = torch.randn(2, 3, 4, 6, generator=noise)
    rowwise = -torch.rand(2, 3, 20, 4, generator=noise)
    for rule, decay, more in (
        (gated_delta_rule, g, (beta,)),
        (rowwise_delta_rule, rowwise, (beta,)),
        (decayed_sum, g, ()),
    ):
        read, writes = rule(begun, q, k, v, decay, *more)
        state, states = begun, [begun]
        for i in range(20):
            state = state * decay.view(2, 3, 20, -1)[:, :, i, :, None].exp()
            value = v[:, :, i]
            if more:
                held = (k[:, :, i, None] @ state)[:, :, 0]
                value = beta[:, :, i, None] * (value - held)
            state = state + k[:, :, i, :, None] * value[:, :, None]
            states.append(state)
            torch.testing.assert_close(
                read[:, :, i], (q[:, :, i, None] @ state)[:, :, 0], rtol=1e-4, atol=1e-5
            )
        for counts in ([0, 20], [7, 1]):
            expected = torch.stack([states[n][b] for b, n in enumerate(counts)])
            torch.testing.assert_close(
                writes.onto(begun, torch.tensor(counts)), expected, rtol=1e-4, atol=1e-5
            )


def test_a_state_goes_back_within_the_last_pass_and_no_further(trunk):
    if not trunk.recurrent:
        assert prefilled(trunk, torch.arange(6)[None], 20).reaches(3) == 3
        return
    text = torch.arange(10)[None] % 13
    cache = prefilled(trunk, text[:, :6], 20)
    assert [cache.reaches(n) for n in (5, 6, 9)] == [0, 6, 6]
    trunk.forward(text[:, 6:], Span.after([6], 4, CPU), cache)
    assert [cache.reaches(n) for n in (5, 6, 8, 10, 12)] == [0, 6, 8, 10, 10]
    other = trunk.new_cache(20)
    other.take(cache, 8)
    again = trunk.forward(text[:, 8:], Span.after([8], 2, CPU), other)
    whole = trunk.model(text).logits[:, 8:]
    torch.testing.assert_close(again.logits, whole, **CLOSE)
    # The other has not changed it.
    settle(trunk, cache, [7])
    for (state, past), (expected, inputs) in zip(
        states(cache), states(prefilled(trunk, text[:, :7], 20)), strict=True
    ):
        torch.testing.assert_close(state, expected, **CLOSE)
        torch.testing.assert_close(past, inputs, **CLOSE)
    with pytest.raises(RuntimeError, match="out of bounds"):
        settle(trunk, cache, [9])
    assert trunk.new_cache(4).reaches(3) == 3  # nothing kept that could not go back


def test_rows_are_kept_in_the_order_asked_for(trunk):
    text = torch.randint(13, (3, 7), generator=torch.Generator().manual_seed(1))
    cache = trunk.new_cache(20)
    trunk.forward(text[:, :5], Span.after([0] * 3, 5, CPU, [5, 2, 4]), cache)
    trunk.forward(text[:, :3], Span.after([5, 2, 4], 3, CPU), cache)
    cache.keep_rows(torch.tensor([2, 0, 0]))
    output = trunk.forward(text[[2, 0, 0], 3:5], Span.after([5, 7, 8], 2, CPU), cache)
    for b, (row, first, second) in enumerate(((2, 4, 1), (0, 5, 2), (0, 5, 3))):
        whole = torch.cat([text[row, :first], text[row, :second], text[row, 3:5]])[None]
        torch.testing.assert_close(output.logits[b], trunk.model(whole).logits[0, -2:], **CLOSE)


def test_a_fresh_state_stands_at_the_beginning():
    with pytest.raises(IndexError, match="stands at position 0"):
        RecurrentSlots().begin(torch.tensor([0, 3]), 1)


@pytest.mark.parametrize("model_type", sorted(FAMILIES.keys() - {"gemma3_text"}))
def test_no_recurrent_trunk_is_deterministic(model_type):
    with pytest.raises(MtplxError, match=f"'{model_type}' cannot be run deterministically"):
        DeterministicTrunk(recurrent(model_type))
