"""The kernels' pass against transformers' own, and against itself in other company."""

import copy
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import scheduled
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from mtplx import SamplerConfig, kernels
from mtplx.drafters.attached import AttachedHead, FusedHead, attach
from mtplx.engine.decoding import Batch
from mtplx.engine.request import Request
from mtplx.models.eagle3 import Eagle3Config, Eagle3Head
from mtplx.models.fused import FusedTrunk, Rotations, misfit
from mtplx.models.linear import hand_over, linear_layers
from mtplx.models.slots import Span
from mtplx.models.trunk import Trunk

pytestmark = pytest.mark.skipif(kernels.find() is None, reason="the kernels are not built")

SETS = ("amx", "avx512", "avx2", "generic")
VOCAB = 101
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 40,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "initializer_range": 0.3,
}
CONFIGS = {
    "llama": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "llama3 rope": LlamaConfig(
        **SIZES,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    ),
    "tied": LlamaConfig(**SIZES | {"tie_word_embeddings": True}),
    "mistral": MistralConfig(**SIZES, sliding_window=None),
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES),
}


def plain(config):
    torch.manual_seed(5)
    model = (
        AutoModelForCausalLM.from_config(
            copy.deepcopy(CONFIGS[config] if isinstance(config, str) else config)
        )
        .float()
        .eval()
        .requires_grad_(False)
    )
    for parameter in model.parameters():
        if parameter.ndim == 1:  # norms and biases that differ from what they begin as
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def fused(config, cache_dtype=torch.float32, instructions=None):
    model = plain(config)
    library = kernels.find(instructions)
    for layer_name, layer in linear_layers(model):
        hand_over(model, layer_name, library, layer.weight, layer.bias)
    trunk = FusedTrunk(model, library)
    if cache_dtype is torch.float32:
        new_cache = trunk.new_cache

        def wide(capacity):
            cache = new_cache(capacity)
            cache.dtype = torch.float32
            return cache

        trunk.new_cache = wide
    return trunk


TOKENS = torch.randint(0, VOCAB, (3, 30), generator=torch.Generator().manual_seed(7))


@pytest.mark.parametrize("name", CONFIGS)
def test_a_pass_is_transformers_own(name):
    model, trunk = plain(name), fused(name)
    with torch.inference_mode():
        expected = model(TOKENS, output_hidden_states=True)
    span = Span.after([0] * 3, 30, TOKENS.device)
    output = trunk.forward(TOKENS, span, trunk.new_cache(30), taps=(0, 1, 3))
    close = {"rtol": 1e-3, "atol": 1e-3}
    torch.testing.assert_close(output.logits, expected.logits, **close)
    torch.testing.assert_close(output.hidden, expected.hidden_states[-1], **close)
    streams = expected.hidden_states
    # transformers gives the last stream behind the norm only, so that one is normed here.
    normed = trunk.decoder.norm(output.aux[..., 80:])
    torch.testing.assert_close(output.aux[..., :80], torch.cat(streams[:2], -1), **close)
    torch.testing.assert_close(normed, streams[-1], **close)


def test_a_stream_may_be_wanted_twice():
    trunk = fused("llama")
    span = Span.after([0] * 3, 30, TOKENS.device)
    aux = trunk.forward(TOKENS, span, trunk.new_cache(30), taps=(1, 0, 1)).aux
    once = trunk.forward(TOKENS, span, trunk.new_cache(30), taps=(0, 1)).aux
    assert aux.tolist() == torch.cat([once[..., 40:], once], -1).tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("instructions", SETS)
def test_an_embedding_is_looked_up_as_it_is_kept(dtype, instructions):
    if kernels.find(instructions) is None:
        pytest.skip(f"this CPU has no {instructions}")
    model = plain("llama")
    model.model.embed_tokens.weight.data = model.model.embed_tokens.weight.to(dtype)
    expected = model.model.embed_tokens.weight[TOKENS].float()
    for name, layer in linear_layers(model):
        hand_over(model, name, kernels.find(instructions), layer.weight, layer.bias)
    trunk = FusedTrunk(model, kernels.find(instructions))
    span = Span.after([0] * 3, 30, TOKENS.device)
    aux = trunk.forward(TOKENS, span, trunk.new_cache(30), taps=(0,)).aux
    assert aux.tolist() == expected.tolist()


def test_a_narrow_cache_is_bfloat16s_own_rounding():
    model, trunk = plain("llama"), fused("llama", torch.bfloat16)
    cache = trunk.new_cache(30)
    output = trunk.forward(TOKENS, Span.after([0] * 3, 30, TOKENS.device), cache)
    with torch.inference_mode():
        expected = model(TOKENS).logits
    assert cache.keys.dtype == torch.bfloat16
    wrong = (output.logits - expected).norm() / expected.norm()
    assert 1e-5 < wrong < 0.05


@pytest.mark.parametrize("name", ["llama", "qwen3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_position_is_the_same_to_the_bit_in_any_pass(name, dtype):
    trunk = fused(name, dtype)
    whole = trunk.forward(TOKENS, Span.after([0] * 3, 30, TOKENS.device), trunk.new_cache(30))
    threads = torch.get_num_threads()
    try:
        for row, cuts in ((0, [1] * 30), (1, [7, 2, 5, 16]), (2, [29, 1])):
            torch.set_num_threads(1 + row)
            cache, at = trunk.new_cache(41), 0
            for width in cuts:
                part = TOKENS[row : row + 1, at : at + width]
                # A rejected draft was written here before.
                junk = torch.zeros(1, 9, dtype=torch.int64)
                trunk.forward(junk, Span.after([at], 9, junk.device), cache)
                output = trunk.forward(part, Span.after([at], width, part.device), cache, (2,))
                assert torch.equal(output.logits[0], whole.logits[row, at : at + width])
                at += width
    finally:
        torch.set_num_threads(threads)


HEADS = [
    {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 16},
    {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64},
    {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 80},
    {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 128},
]


@pytest.mark.slow
@pytest.mark.parametrize("instructions", SETS)
@pytest.mark.parametrize("heads", HEADS, ids=lambda heads: "-".join(map(str, heads.values())))
def test_queries_may_share_keys_in_any_way(heads, instructions):
    """However many read the same keys at a time, each gets what it would get alone."""
    if kernels.find(instructions) is None:
        pytest.skip(f"this CPU has no {instructions}")
    config = LlamaConfig(**SIZES | heads | {"hidden_size": 72})
    with torch.inference_mode():
        expected = plain(config)(TOKENS).logits
    span = Span.after([0] * 3, 30, TOKENS.device)
    for dtype, noise in ((torch.float32, 1e-4), (torch.bfloat16, 0.05)):
        trunk = fused(config, dtype, instructions)
        whole = trunk.forward(TOKENS, span, trunk.new_cache(30)).logits
        assert (whole - expected).norm() <= noise * expected.norm()
        for width in (1, 2, 3, 5, 6):
            cache = trunk.new_cache(30)
            for at in range(0, 30, width):
                part = Span.after([at] * 3, width, TOKENS.device)
                logits = trunk.forward(TOKENS[:, at : at + width], part, cache).logits
                assert torch.equal(logits, whole[:, at : at + width])


def test_what_lies_past_a_slots_end_does_not_matter():
    """Not even what is no number: a draft may have left it there."""
    trunk = fused("llama", torch.bfloat16)
    span = Span.after([0] * 3, 21, TOKENS.device)
    clean = trunk.forward(TOKENS[:, :21], span, trunk.new_cache(64)).logits
    cache = trunk.new_cache(64)
    cache.reserve(span)
    cache.keys.fill_(torch.nan)
    cache.values.fill_(torch.nan)
    assert torch.equal(trunk.forward(TOKENS[:, :21], span, cache).logits, clean)


def test_rows_of_different_lengths_do_not_see_each_other():
    trunk = fused("qwen2")
    lengths, width = [4, 11, 0], 5
    cache = trunk.new_cache(20)
    start = Span.after([0] * 3, 11, TOKENS.device)
    trunk.forward(TOKENS[:, :11], start, cache, with_logits=False)
    span = Span.after(lengths, width, TOKENS.device)
    ragged = trunk.forward(TOKENS.gather(1, span.positions), span, cache).logits
    cache.keep_rows(torch.tensor([2, 1]))
    span = Span.after([5, 16], 2, TOKENS.device)
    later = trunk.forward(TOKENS[[2, 1]].gather(1, span.positions), span, cache).logits
    whole = trunk.forward(TOKENS, Span.after([0] * 3, 30, TOKENS.device), trunk.new_cache(30))
    for row, length in enumerate(lengths):
        assert torch.equal(ragged[row], whole.logits[row, length : length + width])
    assert torch.equal(later, torch.stack([whole.logits[2, 5:7], whole.logits[1, 16:18]]))


def test_a_long_pass_is_cut(monkeypatch):
    trunk = fused("llama")
    span = Span.after([0] * 3, 30, TOKENS.device)
    whole = trunk.forward(TOKENS, span, trunk.new_cache(30), (1,))
    monkeypatch.setattr("mtplx.models.fused.ROWS", 7)
    cut = trunk.forward(TOKENS, span, trunk.new_cache(30), (1,))
    assert torch.equal(cut.logits, whole.logits) and torch.equal(cut.aux, whole.aux)
    read = trunk.read(TOKENS, (1,))
    assert torch.equal(read.hidden, whole.hidden) and torch.equal(read.aux, whole.aux)
    assert read.logits is None


def test_nothing_is_written_past_the_end_of_a_cache():
    trunk = fused("llama")
    cache = trunk.new_cache(4)  # whole blocks of 16
    with pytest.raises(IndexError, match="3 slots up to position 16 in a cache of 3 with 16 pos"):
        trunk.forward(TOKENS[:, :17], Span.after([0] * 3, 17, TOKENS.device), cache)
    trunk.forward(TOKENS[:, :16], Span.after([0] * 3, 16, TOKENS.device), cache)
    cache.keep_rows(torch.tensor([2, 0]))
    with pytest.raises(IndexError, match="3 slots up to position 1 in a cache of 2"):
        trunk.forward(TOKENS[:, :1], Span.after([1] * 3, 1, TOKENS.device), cache)


def test_threads_do_not_disturb_each_other():
    trunk = fused("llama")

    def run(row):
        span = Span.after([0], 30, TOKENS.device)
        return [
            trunk.forward(TOKENS[row : row + 1], span, trunk.new_cache(30), (1,)) for _ in range(9)
        ]

    with ThreadPoolExecutor(3) as pool:
        for row, outputs in enumerate(pool.map(run, range(3))):
            (alone, *_) = run(row)
            for output in outputs:
                assert torch.equal(output.logits, alone.logits)
                assert torch.equal(output.aux, alone.aux)


def eagle3(norms=False, own=False, **changes):
    """A random head for these sizes; its inputs are cut into blocks but for the MLP's.

    With an embedding of its `own` it is wider than the trunk.
    """
    layer = {k: v for k, v in SIZES.items() if k not in ("num_hidden_layers", "initializer_range")}
    layer |= {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    torch.manual_seed(3)
    if own:
        changes |= {"hidden_size": 64, "intermediate_size": 96}
    config = Eagle3Config(LlamaConfig(**layer | changes), 60, (0, 1, 3), norms, norms, norms)
    config = replace(config, fc_norm=own, target_hidden_size=32)
    head = Eagle3Head(config)
    if own:
        head.embed_tokens = torch.nn.Embedding(config.layer.vocab_size, 64, dtype=torch.bfloat16)
    head.set_vocabulary(torch.arange(0, 60) + 20)
    return head.eval().requires_grad_(False)


def beside_a_head(cache_dtype=torch.bfloat16):
    sizes = SIZES | {"hidden_size": 32, "intermediate_size": 64}
    CONFIGS["for a head"] = LlamaConfig(**sizes)
    trunk = fused("for a head", cache_dtype)
    return trunk, Trunk(plain("for a head"))


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({}, FusedHead),
        ({"norms": True}, FusedHead),
        ({"own": True}, FusedHead),
        ({"attention_bias": True, "mlp_bias": True}, FusedHead),
        ({"num_attention_heads": 2, "head_dim": 32}, FusedHead),
        ({"intermediate_size": 50}, FusedHead),  # no whole groups
        ({"head_dim": 24}, AttachedHead),  # no whole vectors
    ],
    ids=str,
)
@pytest.mark.parametrize(("bits", "error"), [(8, 0.03), (4, 0.2)])
def test_a_head_drafts_as_it_does_in_torch(monkeypatch, changes, kind, bits, error):
    monkeypatch.setattr("mtplx.drafters.attached.BITS", bits)
    monkeypatch.setattr("mtplx.models.fused.ROWS", 7)
    trunk, slow = beside_a_head()
    quick, exact = attach(eagle3(**changes), trunk), attach(eagle3(**changes), slow)
    assert type(quick) is kind and type(exact) is AttachedHead
    span = Span.after([0] * 3, 12, TOKENS.device)
    text, following = TOKENS[:, :12], TOKENS[:, 1:13]
    results = []
    for head, of in ((quick, trunk), (exact, slow)):
        output = of.forward(text, span, of.new_cache(12), head.taps, with_logits=False)
        cache = head.new_cache(14)
        hidden = head.step(following, head.features(output), span, cache)
        more = Span.after([12] * 3, 1, TOKENS.device)
        second = head.step(TOKENS[:, 13:14], hidden[:, -1:], more, cache)
        results.append((hidden, head.logits(hidden[:, -1]), head.logits(second[:, 0])))
    for mine, theirs in zip(*results, strict=True):
        # As far as few bits a weight go, and a cache of eight bits a number.
        assert (mine - theirs).norm() < error * theirs.norm()


@pytest.mark.parametrize("verifier", ["token", "block", "coupled"])
def test_a_texts_tokens_do_not_depend_on_the_depth_or_the_neighbours(verifier):
    trunk, _ = beside_a_head()
    head = attach(eagle3(), trunk)
    sampling = SamplerConfig(temperature=0.0 if verifier != "coupled" else 0.9)

    def texts(depth, prompts):
        requests = [Request(p, sampling, 11, 24, depth, verifier=verifier) for p in prompts]
        output = [[] for _ in prompts]
        for bursts in Batch(trunk, head, requests).run():
            for burst in bursts:
                output[burst.index] += burst.tokens
        return output

    prompts = [(3, 1, 4), (1, 5, 9, 2, 6, 5), (3,)]
    expected = [texts(0, [prompt])[0] for prompt in prompts]
    for depth in (1, 2, 4):
        assert texts(depth, prompts) == expected


def test_postponed_refills_show_in_no_draft():
    trunk, _ = beside_a_head()
    head = attach(eagle3(), trunk)
    assert type(head) is FusedHead
    scheduled.assert_postponed_refills_show_nowhere(trunk, head, [(3, 1, 4), (1, 5, 9, 2), (3,)])


def test_what_the_kernels_cannot_run_is_named():
    def reason(name="llama", **changes):
        model = plain(name)
        for key, value in changes.items():
            setattr(model.config, key, value)
        for layer_name, layer in linear_layers(model):
            hand_over(model, layer_name, kernels.find(), layer.weight, layer.bias)
        return misfit(model)

    assert reason() is None
    assert reason(model_type="gemma2") == "layers of type 'gemma2'"
    assert reason(hidden_act="gelu") == "an MLP with gelu"
    assert reason(head_dim=24) == "heads of 24 numbers, which is no multiple of 16"
    model = plain("llama")
    partial = {
        "rope_type": "linear",
        "rope_theta": 1e4,
        "factor": 2.0,
        "partial_rotary_factor": 0.5,
    }
    config = LlamaConfig(**SIZES, rope_parameters=partial)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    assert misfit(model) == "heads of 16 numbers of which 8 are turned"
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    assert reason(rope_parameters=dynamic) == "rotary positions of type 'dynamic'"
    assert reason(head_dim=272) == "heads of 272 numbers, more than 256"
    # Plain weights are read where they lie.
    assert misfit(plain("llama")) is misfit(plain("llama").bfloat16()) is None
    unread = misfit(plain("llama").half())
    assert unread == "weights of a type they do not read (q of layer 0)"
    # What stands in a linear layer's place, or is one of another kind, may do more than multiply.
    model = plain("llama")
    model.model.layers[1].mlp.up_proj = torch.nn.Sequential(model.model.layers[1].mlp.up_proj)
    assert misfit(model) == "a Sequential in the place of a linear layer (up of layer 1)"

    class Scaled(torch.nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    model = plain("llama")
    model.lm_head = Scaled(40, VOCAB)
    assert misfit(model) == "a Scaled in the place of a linear layer (the output head)"


@pytest.mark.parametrize("wrong", [torch.inf, torch.nan])
@pytest.mark.parametrize("instructions", SETS)
def test_a_score_that_is_no_number_is_not_hidden(wrong, instructions):
    if kernels.find(instructions) is None:
        pytest.skip(f"this CPU has no {instructions}")
    for dtype in (torch.bfloat16, torch.float32):
        model = plain("llama").to(dtype)
        model.model.layers[0].self_attn.k_proj.bias.data[5] = wrong
        trunk = FusedTrunk(model, kernels.find(instructions))
        span = Span.after([0] * 3, 9, TOKENS.device)
        logits = trunk.forward(TOKENS[:, :9], span, trunk.new_cache(9)).logits
        assert not bool(logits.isfinite().any())


def in_torch(model, first=0):
    """The same with passes of so many positions and more in torch, and a cache of its own type."""
    trunk = FusedTrunk(model, kernels.find(), long_in_torch=True)
    trunk.long = first
    new_cache = trunk.new_cache

    def own(capacity):
        cache = new_cache(capacity)
        cache.dtype = model.dtype
        return cache

    trunk.new_cache = own
    return trunk


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_long_pass_is_the_models_own(name, dtype):
    """To the last bit, whatever lengths the rows have."""
    model = plain(name).to(dtype)
    trunk, own = in_torch(model), Trunk(model)
    assert not trunk.deterministic
    caches = trunk.new_cache(50), own.new_cache(50)
    for lengths, width in (([0] * 3, 9), ([9] * 3, 3), ([12, 4, 9], 18), ([30, 17, 27], 2)):
        span = Span.after(lengths, width, TOKENS.device)
        tokens = TOKENS[:, :width]
        output, expected = (
            one.forward(tokens, span, cache, taps=(0, 1, 3))
            for one, cache in zip((trunk, own), caches, strict=True)
        )
        for part in ("hidden", "aux", "logits"):
            ours, theirs = getattr(output, part), getattr(expected, part)
            assert ours.dtype is torch.float32 and torch.equal(ours, theirs.float())
    assert torch.equal(trunk.read(TOKENS, taps=(1,)).aux, own.read(TOKENS, taps=(1,)).aux.float())


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_short_and_long_passes_share_a_cache(name):
    """In float32, where the two agree but for the last bits, in any order."""
    model = plain(name)
    trunk = in_torch(model, first=3 * 4)
    cache = trunk.new_cache(50)
    with torch.inference_mode():
        expected = model(TOKENS).logits
    done = 0
    for width in (5, 1, 2, 6, 3, 4, 9):  # by turns, some with a block's end inside
        span = Span.after([done] * 3, width, TOKENS.device)
        logits = trunk.forward(TOKENS[:, done : done + width], span, cache).logits
        torch.testing.assert_close(logits, expected[:, done : done + width], rtol=1e-3, atol=1e-3)
        done += width
    assert done == 30


@pytest.mark.parametrize("long", [2, 4, 8, 9])
def test_a_trunk_is_tried_out_however_little_is_long(monkeypatch, long):
    """The trial's two passes may be the kernels' and torch's, in bfloat16."""
    deep = LlamaConfig(**SIZES | {"num_hidden_layers": 12})
    monkeypatch.setattr("mtplx.models.fused.LONG", long)
    monkeypatch.setattr(
        "mtplx.models.fused.LONG_WEIGHTS", dict.fromkeys(["amx", "avx512", "avx2", "generic"], 0)
    )
    trunk = FusedTrunk(plain(deep).bfloat16(), kernels.find(), long_in_torch=True)
    assert trunk.long == long


def test_a_layers_size_says_what_is_long():
    def first(name="generic", **sizes):
        config = LlamaConfig(**SIZES | sizes)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        return FusedTrunk(model, kernels.find(name), long_in_torch=True).long

    assert first(hidden_size=576, intermediate_size=1536) == 50
    assert first(hidden_size=1024, intermediate_size=8192, num_hidden_layers=1) == 11
    if kernels.find("amx"):  # whose products are several times as fast
        assert first("amx", hidden_size=1024, intermediate_size=8192, num_hidden_layers=1) == 32
    trunk = fused("llama")
    assert trunk.deterministic and trunk.long is None


def test_a_head_in_torch_takes_the_streams_of_a_bfloat16_trunk():
    """Of short passes and of long ones, where the kernels cannot step it."""
    model = plain("llama").bfloat16()
    trunk = in_torch(model, first=20)
    torch.manual_seed(1)
    config = Eagle3Config(
        LlamaConfig(**SIZES | {"head_dim": 8, "num_hidden_layers": 1}),
        draft_vocab_size=VOCAB,
        aux_layer_ids=(1, 2, 3),
    )
    head = Eagle3Head(config).eval().requires_grad_(False)
    head.set_vocabulary(torch.arange(VOCAB))
    bound = attach(head, trunk)
    assert type(bound) is AttachedHead
    for width in (2, 9):
        span = Span.after([0] * 3, width, TOKENS.device)
        output = trunk.forward(TOKENS[:, :width], span, trunk.new_cache(9), taps=bound.taps)
        features = bound.features(output)
        state = bound.step(TOKENS[:, :width], features, span, bound.new_cache(9))
        assert features.dtype is state.dtype is torch.bfloat16


@pytest.mark.parametrize("name", ["llama", "llama3 rope"])
def test_rotations_are_the_models_own_to_the_last_bit(name):
    rotary = AutoModelForCausalLM.from_config(CONFIGS[name]).model.rotary_emb
    rotations = Rotations(rotary)
    # Within the table, and beyond what it has held so far.
    for lengths, width in (([3, 0], 2), ([250, 255], 5), ([2000, 7], 3)):
        span = Span.after(lengths, width, torch.device("cpu"))
        cos, sin = rotary(torch.empty(0), span.positions)
        got = rotations(span.end)[:, span.positions]
        assert got[0].tolist() == cos.tolist()
        assert got[1].tolist() == sin.tolist()
