"""The default model and its head, as a user has them."""

from __future__ import annotations

import pytest
import torch

import mtplx
from mtplx.sampling import SamplerConfig

pytestmark = [pytest.mark.model, pytest.mark.slow]

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


@pytest.fixture(scope="module")
def plain(default_model):
    """What transformers itself says, one prompt at a time."""
    answers = []
    for prompt in PROMPTS:
        ids = default_model.encode(prompt)
        output = default_model.trunk.model.generate(
            torch.tensor([ids]), max_new_tokens=64, do_sample=False, pad_token_id=2
        )
        answers.append(output[0, len(ids) :].tolist())
    return answers


@pytest.mark.parametrize("depth", [0, 1, 3, 5])
def test_greedy_text_is_the_trunks_own(default_model, plain, depth):
    results = default_model.generate(PROMPTS, max_tokens=64, depth=depth, sampling=GREEDY)
    for prompt, result, wanted in zip(PROMPTS, results, plain, strict=True):
        assert result.token_ids == wanted, prompt
    if depth:
        # The head drafts as a trained one does, or this test would prove little.
        tokens = sum(r.stats.tokens for r in results)
        assert tokens > 1.3 * sum(r.stats.cycles for r in results)


def test_bfloat16_differs_only_where_rounding_decides():
    """The pass of one token and the pass of four round differently; only near-ties may flip."""
    llm = mtplx.load("smollm2-135m", dtype="bfloat16")
    plain = llm.generate(PROMPTS, max_tokens=64, depth=0, sampling=GREEDY)
    drafted = llm.generate(PROMPTS, max_tokens=64, depth=3, sampling=GREEDY)
    flips = 0
    for prompt, a, b in zip(PROMPTS, plain, drafted, strict=True):
        pairs = list(zip(a.token_ids, b.token_ids, strict=False))
        at = next((i for i, (x, y) in enumerate(pairs) if x != y), None)
        if at is None:
            assert a.token_ids == b.token_ids
            continue
        flips += 1
        text = llm.encode(prompt) + a.token_ids[:at]
        with torch.inference_mode():
            logits = llm.trunk.model(torch.tensor([text])).logits[0, -1].float()
        x, y = logits[a.token_ids[at]], logits[b.token_ids[at]]
        # Two tokens, each off by a few units in the last of bfloat16's eight bits.
        assert abs(x - y) <= 4 * 2**-8 * max(abs(x), abs(y)), (prompt, at, float(x), float(y))
        assert min(x, y) >= logits.max() - 4 * 2**-8 * abs(logits.max())
    assert flips < len(PROMPTS)


def test_the_card_says_what_the_files_hold(default_model):
    head = default_model.head.head
    assert head.config.verifier_name == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert default_model.depth == head.config.depth == 3
    assert len(head.draft_ids) == 8192
