"""The default model and its head, as a user has them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import mtplx
from mtplx import kernels
from mtplx.engine.decoding import Batch
from mtplx.engine.request import Request
from mtplx.models.fused import FusedTrunk
from mtplx.models.slots import Span
from mtplx.models.trunk import Trunk
from mtplx.sampling import SamplerConfig

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.no_cover]

PROMPTS = [
    "Why is the sky blue?",
    "Write a short poem about the sea.",
    "What is 17 times 23?",
    "Explain what a hash table is.",
    "Translate to French: The cat sleeps on the chair.",
    "Give me three tips for better sleep.",
    "Who wrote Pride and Prejudice?",
    "Write a Python function that reverses a string.",
    "What causes earthquakes?",
    "Describe a day in the life of a baker.",
    "How do vaccines work?",
    "List the planets of the solar system.",
    "What is the difference between a virus and a bacterium?",
    "Tell me a joke about computers.",
    "Summarize the plot of Romeo and Juliet.",
    "How do I boil an egg?",
    "What is photosynthesis?",
    "Write an email asking for a day off.",
    "Why do leaves change colour in autumn?",
    "What is the capital of Australia?",
]
GREEDY = SamplerConfig(temperature=0)

needs_kernels = pytest.mark.skipif(kernels.find() is None, reason="the kernels are not built")


@pytest.fixture(scope="module")
def plain(default_model):
    """What transformers itself says, all prompts at once: in float32 the padding does not show."""
    rows = [default_model.encode(prompt) for prompt in PROMPTS]
    longest = max(map(len, rows))
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    output = default_model.trunk.model.generate(
        ids, attention_mask=mask, max_new_tokens=64, do_sample=False, pad_token_id=0
    )
    end = default_model.defaults.eos_token_ids[0]
    answers = [row[longest:].tolist() for row in output]
    # Behind a text's end there is padding.
    return [row[: row.index(end) + 1] if end in row else row for row in answers]


@pytest.mark.parametrize("depth", [1, 3, 5])
def test_greedy_text_is_the_trunks_own(default_model, plain, depth):
    results = default_model.generate(PROMPTS, max_tokens=64, depth=depth, sampling=GREEDY)
    for prompt, result, wanted in zip(PROMPTS, results, plain, strict=True):
        assert result.token_ids == wanted, prompt
    # The head drafts as a trained one does, or this test would prove little.
    tokens = sum(r.stats.tokens for r in results)
    assert tokens > 1.3 * sum(r.stats.cycles for r in results)


@needs_kernels
def test_bfloat16_by_the_kernels_is_one_text_at_every_depth():
    """Prompts are torch's to read, in the same pass whatever follows; cycles are the kernels'."""
    llm = mtplx.load("smollm2-135m", device="cpu")
    assert isinstance(llm.trunk, FusedTrunk) and not llm.trunk.deterministic
    prompts = PROMPTS[:8]
    plain = llm.generate(prompts, max_tokens=64, depth=0, sampling=GREEDY)
    for depth in (1, 3):
        drafted = llm.generate(prompts, max_tokens=64, depth=depth, sampling=GREEDY)
        assert [r.token_ids for r in drafted] == [r.token_ids for r in plain]
        assert sum(r.stats.tokens for r in drafted) > 1.2 * sum(r.stats.cycles for r in drafted)


def test_bfloat16_in_torch_differs_only_where_rounding_decides(default_model, monkeypatch):
    """The pass of one token and the pass of four round differently; only near-ties may flip."""
    monkeypatch.setattr(kernels, "find", lambda name=None: None)
    llm = mtplx.load("smollm2-135m", dtype="bfloat16", device="cpu")
    assert type(llm.trunk) is Trunk
    prompts = PROMPTS[:8]
    plain = llm.generate(prompts, max_tokens=64, depth=0, sampling=GREEDY)
    drafted = llm.generate(prompts, max_tokens=64, depth=3, sampling=GREEDY)
    for prompt, a, b in zip(prompts, plain, drafted, strict=True):
        pairs = list(zip(a.token_ids, b.token_ids, strict=False))
        at = next((i for i, (x, y) in enumerate(pairs) if x != y), None)
        if at is None:
            assert a.token_ids == b.token_ids
            continue
        text = llm.encode(prompt) + a.token_ids[:at]
        with torch.inference_mode():
            rounded, exact = (
                m.trunk.model(torch.tensor([text])).logits[0, -1].double()
                for m in (llm, default_model)
            )
        # Each of the two is off by what bfloat16 gets wrong here about the likeliest tokens.
        likely = exact.topk(20).indices
        error = (rounded - exact)[likely].abs().max()
        x, y = exact[a.token_ids[at]], exact[b.token_ids[at]]
        assert abs(x - y) <= 2 * error, (prompt, at, float(x), float(y), float(error))


@pytest.mark.parametrize(
    ("settings", "count", "length"),
    [
        pytest.param({"dtype": "bfloat16"}, 3, 16, id="torch"),
        pytest.param({"dtype": "bfloat16"}, 4, 100, id="kernels", marks=needs_kernels),
        pytest.param({"quantize": "file"}, 10, 100, id="blocks", marks=needs_kernels),
    ],
)
def test_a_deterministic_text_is_the_seeds_alone(settings, count, length, request, monkeypatch):
    """To the last token: at every depth, alone and in a batch of four."""
    in_torch = request.node.callspec.id == "torch"
    if in_torch:
        monkeypatch.setattr(kernels, "find", lambda name=None: None)
    llm = mtplx.load("smollm2-135m", device="cpu", deterministic=True, **settings)
    assert isinstance(llm.trunk, FusedTrunk) != in_torch
    assert not llm.notes
    sampling = SamplerConfig(temperature=0.8, top_p=0.95)
    depths = (0, 1, 2, 4)

    def texts(*rows):
        """Of the prompts [(which, depth), ...] as one batch."""
        requests = [
            Request(
                tuple(llm.encode(PROMPTS[which])),
                sampling,
                seed=1000 + which,
                max_tokens=length,
                depth=depth,
                verifier="coupled",
            )
            for which, depth in rows
        ]
        tokens = [[] for _ in requests]
        for bursts in Batch(llm.trunk, llm.head, requests).run():
            for burst in bursts:
                tokens[burst.index] += burst.tokens
        return tokens

    alone = [texts((which, depths[which % 4]))[0] for which in range(count)]
    assert all(len(text) == length for text in alone)
    # At two other depths, beside others at other depths.
    rows = [(which, depths[(which + turn) % 4]) for turn in (1, 2) for which in range(count)]
    for start in range(0, len(rows), 4):
        batch = rows[start : start + 4]
        for (which, depth), text in zip(batch, texts(*batch), strict=True):
            assert text == alone[which], (which, depth)


@needs_kernels
def test_the_kernels_run_the_files_own_blocks(default_model):
    """As near to float32 as bfloat16 keys and values are, and one text at every depth."""
    llm = mtplx.load("smollm2-135m", quantize="file", device="cpu")
    assert isinstance(llm.trunk, FusedTrunk) and not llm.notes
    ids = torch.tensor([llm.encode(PROMPTS[3])])
    span = Span.after([0], ids.shape[1], ids.device)
    mine, exact = (
        trunk.forward(ids, span, trunk.new_cache(span.end)).logits[0].log_softmax(-1)
        for trunk in (llm.trunk, default_model.trunk)
    )
    divergence = (exact.exp() * (exact - mine)).sum(-1)
    assert divergence.mean() < 1e-4 and divergence.max() < 2e-3
    prompts = PROMPTS[:4]
    sampling = SamplerConfig(temperature=0.8, top_p=0.95, seed=5)
    plain = llm.generate(prompts, max_tokens=64, depth=0, sampling=sampling)
    for depth in (1, 2, 4):
        drafted = llm.generate(prompts, max_tokens=64, depth=depth, sampling=sampling)
        assert [r.token_ids for r in drafted] == [r.token_ids for r in plain]
        cycles = sum(r.stats.cycles for r in drafted)
        assert sum(r.stats.tokens for r in drafted) > 1.2 * cycles
    for row, prompt in enumerate(prompts[:2]):
        alone = llm.generate(prompt, max_tokens=64, sampling=replace(sampling, seed=5 + row))
        assert alone.token_ids == plain[row].token_ids


def test_the_card_says_what_the_files_hold(default_model):
    head = default_model.head.head
    assert head.config.verifier_name == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert default_model.depth == head.config.depth == 2
    assert len(head.draft_ids) == 8192
