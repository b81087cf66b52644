"""Bit for bit: what a position's results may not depend on. All comparisons are `torch.equal`."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    LlamaConfig,
    MixtralConfig,
    PreTrainedConfig,
    Qwen3Config,
    XGLMConfig,
)

import mtplx
from mtplx.errors import MtplxError
from mtplx.models import deterministic
from mtplx.models.deterministic import TILE, DeterministicTrunk
from mtplx.models.slots import Span
from mtplx.models.trunk import Trunk, TrunkOutput

CPU = torch.device("cpu")
VOCABULARY, LENGTH = 61, 40
CHUNK = 16
"""Smaller than the texts here, so that they take several."""

TAPS = (0, 1, 2)
FIELDS = ("hidden", "aux", "logits")
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 1024,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
TEXTS = torch.randint(VOCABULARY, (7, LENGTH), generator=torch.Generator().manual_seed(0))
FAMILIES = {
    "llama": LlamaConfig(**SIZES),
    # Norms over heads, and biases.
    "qwen3": Qwen3Config(**SIZES, attention_bias=True),
    # Bounded scores and logits, another scale, norms on both sides.
    "gemma2": Gemma2Config(**SIZES, query_pre_attn_scalar=8),
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def make(config: PreTrainedConfig, dtype: torch.dtype = torch.float32):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).to(dtype).eval().requires_grad_(False)


def run(trunk, texts, widths, starts=None, capacity=None) -> TrunkOutput:
    """The logits and states of passes of these widths, of each row from `starts` on."""
    starts = starts or [0] * len(texts)
    cache = trunk.new_cache(capacity or max(starts) + sum(widths))
    if max(starts):
        # What this writes past a row's start is scratch, as a rejected draft is.
        before = Span.after([0] * len(texts), max(starts), CPU)
        trunk.forward(texts[:, : max(starts)], before, cache)
    parts, lengths = [], starts
    for width in widths:
        span = Span.after(lengths, width, CPU)
        parts.append(trunk.forward(texts.gather(1, span.positions), span, cache, TAPS))
        lengths = [n + width for n in lengths]
    return TrunkOutput(*(torch.cat([getattr(p, f) for p in parts], 1) for f in FIELDS))


def cut(length: int, width: int) -> list[int]:
    return [min(width, length - start) for start in range(0, length, width)]


def part(output: TrunkOutput, row: int, start: int, stop: int) -> TrunkOutput:
    return TrunkOutput(*(getattr(output, f)[row : row + 1, start:stop] for f in FIELDS))


def same(one: TrunkOutput, other: TrunkOutput) -> bool:
    return all(torch.equal(getattr(one, f), getattr(other, f)) for f in FIELDS)


def one_by_one(trunk, texts=TEXTS) -> TrunkOutput:
    """Every text read alone, a position at a time."""
    rows = [run(trunk, text[None], [1] * len(text)) for text in texts]
    return TrunkOutput(*(torch.cat([getattr(r, f) for r in rows]) for f in FIELDS))


CASES = [
    ("llama", "float32"),
    ("llama", "bfloat16"),
    ("qwen3", "bfloat16"),
    ("gemma2", "float32"),
]


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def trunk(request):
    family, dtype = request.param
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deterministic, "CHUNK", CHUNK)
        made = DeterministicTrunk(make(FAMILIES[family], DTYPES[dtype]))
        assert (made.tile, made.slow_because) == (TILE, None)
        yield made


@pytest.fixture(scope="module")
def expected(trunk):
    return one_by_one(trunk)


@pytest.mark.slow
@pytest.mark.parametrize("width", [2, 3, 5, 8, 13, LENGTH])
def test_the_width_of_a_pass(trunk, expected, width):
    assert same(run(trunk, TEXTS[:1], cut(LENGTH, width)), part(expected, 0, 0, LENGTH))


@pytest.mark.slow
@pytest.mark.parametrize("size", range(2, 8))
def test_the_neighbours_and_the_row_among_them(trunk, expected, size):
    for shift in range(size):
        order = torch.arange(size).roll(shift)
        starts = [5 * i for i in order.tolist()]
        output = run(trunk, TEXTS[order], [1, 5, 2], starts)
        for row, (text, start) in enumerate(zip(order.tolist(), starts, strict=True)):
            wanted = part(expected, text, start, start + 8)
            assert same(part(output, row, 0, 8), wanted), (shift, row)


@pytest.mark.slow
@settings(max_examples=12)
@given(st.data())
def test_any_composition(trunk, expected, data):
    """Rows of lengths of their own, passes of any width, drafts taken back, a cache of any size."""
    rows = data.draw(st.lists(st.sampled_from(range(7)), min_size=1, max_size=5, unique=True))
    cache = trunk.new_cache(data.draw(st.sampled_from([LENGTH, LENGTH + CHUNK, 200])))
    lengths = [0] * len(rows)
    for _ in range(5):
        width = data.draw(st.integers(1, LENGTH - max(lengths)))
        span = Span.after(lengths, width, CPU)
        output = trunk.forward(TEXTS[rows].gather(1, span.positions), span, cache, TAPS)
        for i, (row, start) in enumerate(zip(rows, lengths, strict=True)):
            assert same(part(output, i, 0, width), part(expected, row, start, start + width))
        kept = [data.draw(st.integers(0, width)) for _ in rows]
        lengths = [min(n + k, LENGTH - 1) for n, k in zip(lengths, kept, strict=True)]


@pytest.mark.slow
def test_a_whole_text(trunk, expected):
    output = trunk.read(TEXTS, TAPS)
    assert torch.equal(output.hidden, expected.hidden)
    assert torch.equal(output.aux, expected.aux)
    assert output.logits is None


def test_dropping_rows(trunk, expected):
    cache = trunk.new_cache(LENGTH)
    trunk.forward(TEXTS[:, :20], Span.after([0] * 7, 20, CPU), cache)
    cache.keep_rows(torch.tensor([5, 2]))
    output = trunk.forward(TEXTS[[5, 2], 20:23], Span.after([20, 20], 3, CPU), cache, TAPS)
    assert same(part(output, 0, 0, 3), part(expected, 5, 20, 23))
    assert same(part(output, 1, 0, 3), part(expected, 2, 20, 23))


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_it_is_still_the_same_model(family):
    usual, ours = Trunk(make(FAMILIES[family])), DeterministicTrunk(make(FAMILIES[family]))
    one, other = run(usual, TEXTS, [20, 20]), run(ours, TEXTS, [20, 20])
    for field in FIELDS:
        torch.testing.assert_close(getattr(other, field), getattr(one, field), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_usual_trunk_is_not_like_this(dtype):
    """Or the tests above would prove nothing."""
    config = LlamaConfig(
        **SIZES
        | {
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "head_dim": 64,
            "initializer_range": 0.02,
        }
    )
    model = make(config, DTYPES[dtype])
    usual = Trunk(model)
    alone = one_by_one(usual, TEXTS[:1])
    assert not same(run(usual, TEXTS[:1], cut(LENGTH, 4)), alone)

    ours = DeterministicTrunk(model)
    assert ours.tile == TILE
    alone = one_by_one(ours, TEXTS[:1])
    assert same(run(ours, TEXTS[:1], cut(LENGTH, 4)), alone)


def attention_inputs(keys: int):
    generator = torch.Generator().manual_seed(keys)
    query = torch.randn(2, 6, 5, 8, generator=generator)
    key, value = (torch.randn(2, 2, keys, 8, generator=generator) for _ in range(2))
    mask = torch.rand(2, 1, 5, keys, generator=generator) < 0.5
    mask[..., 0] = True
    return query, key, value, mask


@pytest.mark.parametrize("keys", [1, 255, 256, 257, 700])
def test_attention_in_chunks_is_attention(keys):
    query, key, value, mask = attention_inputs(keys)
    wanted = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=0.3, enable_gqa=True
    )
    ours = deterministic._attend(query, key, value, mask, 0.3, None)
    torch.testing.assert_close(ours, wanted.transpose(1, 2))


@pytest.mark.parametrize("other", [0.0, 1e4, torch.inf, torch.nan])
def test_what_lies_in_chunks_that_are_not_seen_leaves_no_trace(other):
    size = 2 * deterministic.CHUNK
    query, key, value, mask = attention_inputs(size)
    alone = deterministic._attend(query, key, value, mask, 0.3, None)
    beside = torch.full_like(key, other)
    output = deterministic._attend(
        query,
        torch.cat([beside, key, beside], 2),
        torch.cat([beside, value, beside], 2),
        F.pad(mask, (size, size)),
        0.3,
        None,
    )
    assert torch.equal(output, alone)


def test_the_model_can_be_called_without_the_trunk(trunk, expected):
    logits = trunk.model(TEXTS).logits
    torch.testing.assert_close(logits, expected.logits, rtol=0.1, atol=0.1)


class PlaceDependent(torch.nn.Module):
    """An activation that is a little different at each place of a pass."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.silu(x) * (1 + 1e-6 * torch.arange(x.shape[1]))[:, None]


def place_dependent():
    model = make(FAMILIES["llama"])
    for layer in model.model.layers:
        layer.mlp.act_fn = PlaceDependent()
    return model


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (place_dependent, "rows of a matrix"),
        (lambda: make(MixtralConfig(**SIZES, num_local_experts=4)), "mix tokens"),
        (
            lambda: make(
                XGLMConfig(
                    vocab_size=VOCABULARY, d_model=48, ffn_dim=80, num_layers=2, attention_heads=6
                )
            ),
            "attention in a way of its own",
        ),
    ],
    ids=["places", "experts", "attention"],
)
def test_what_cannot_be_tiled_runs_one_token_at_a_time(model, reason):
    trunk = DeterministicTrunk(model())
    assert trunk.tile == 1
    assert reason in trunk.slow_because
    expected = one_by_one(trunk, TEXTS[:3, :12])
    output = run(trunk, TEXTS[:3], [4, 1, 3], [0, 4, 2])
    for row, start in enumerate([0, 4, 2]):
        assert same(part(output, row, 0, 8), part(expected, row, start, start + 8))


class LengthDependent(torch.nn.Module):
    """An activation that is another function for a single token."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.silu(x) if x.shape[1] > 1 else x.sort().values


def test_refuses_what_differs_one_token_at_a_time():
    model = make(FAMILIES["llama"])
    model.model.layers[0].mlp.act_fn = LengthDependent()
    model.model.layers[1].mlp.act_fn = PlaceDependent()
    with pytest.raises(MtplxError, match="'llama' cannot be run deterministically"):
        DeterministicTrunk(model)


@pytest.mark.model
@pytest.mark.slow
def test_the_default_model():
    model = mtplx.load("smollm2-135m", dtype="bfloat16").trunk.model
    trunk = DeterministicTrunk(model)
    assert (trunk.tile, trunk.slow_because) == (TILE, None)
    texts = torch.randint(trunk.vocab_size, (3, 20), generator=torch.Generator().manual_seed(0))
    expected = one_by_one(trunk, texts[:1, :12])
    assert same(run(trunk, texts[:1], [12]), expected)
    # Beside rows that are ahead, and padded to the deepest draft.
    output = run(trunk, texts[[1, 0, 2]], [8, 4, 1], [5, 0, 7])
    assert same(part(output, 1, 0, 12), expected)
