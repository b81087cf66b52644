"""What a text leaves in the caches, and a next one begins with."""

from dataclasses import replace

import pytest
import tiny_checkpoint
import tiny_native

import mtplx
from mtplx import SamplerConfig, kernels

PROMPT = list(range(3, 60))
SAMPLING = SamplerConfig(temperature=1.2, top_k=50, seed=11)

KINDS = [
    pytest.param({"dtype": "float32", "deterministic": True}, id="deterministic"),
    pytest.param(
        {"quantize": "int8"},
        id="kernels",
        marks=pytest.mark.skipif(kernels.find() is None, reason="the kernels are not built"),
    ),
]


@pytest.fixture(scope="module", params=KINDS)
def load(request, tmp_path_factory):
    root = tmp_path_factory.mktemp("prefix")
    # Heads of 16 numbers, which the kernels' attention can take.
    model = tiny_checkpoint.write(root / "model", width=64, inner=64)
    head = tiny_checkpoint.write_head(root / "head", width=64)
    return lambda **more: mtplx.load(model, head=head, device="cpu", **request.param, **more)


@pytest.fixture(scope="module")
def fresh(load):
    """Answers of a model that has read nothing before."""

    def answer(prompt, **settings):
        llm = load()
        return llm.generate(prompt, **settings)

    return answer


@pytest.mark.slow
@pytest.mark.parametrize("depth", [0, 2, "auto"])
@pytest.mark.parametrize("before", [0, 2, "auto"])
def test_a_conversation_goes_on_as_if_it_were_read_anew(load, fresh, before, depth):
    llm = load()
    first = llm.generate(PROMPT, max_tokens=20, depth=before, sampling=SAMPLING)
    assert first.stats.cached_tokens == 0
    prompt = [*PROMPT, *first.token_ids, 7, 8, 9]
    settings = {"max_tokens": 30, "depth": depth, "sampling": replace(SAMPLING, seed=5)}
    second = llm.generate(prompt, **settings, logprobs=2)
    again = fresh(prompt, **settings, logprobs=2)
    assert (second.token_ids, second.logprobs) == (again.token_ids, again.logprobs)
    # The last token of the first text was never read; a head needs one pair more.
    expected = len(PROMPT) + 19 - bool(depth)
    assert second.stats.cached_tokens == (0 if depth and not before else expected)
    assert again.stats.cached_tokens == 0


def test_it_goes_as_far_as_the_tokens_are_the_same(load, fresh):
    llm = load()
    llm.generate(PROMPT, max_tokens=9, depth=1, sampling=SAMPLING)
    # Shorter, the very same, one that parts in the middle, one that parts at once, one token.
    for prompt, common in (
        (PROMPT[:30], 28),
        (PROMPT, 29),
        (PROMPT, 55),
        ([*PROMPT[:20], 1, 2, 3], 19),
        ([2, *PROMPT], 0),
        ([2], 0),
    ):
        settings = {"max_tokens": 12, "depth": 1, "sampling": SAMPLING}
        got = llm.generate(prompt, **settings)
        assert got.token_ids == fresh(prompt, **settings).token_ids
        assert got.stats.cached_tokens == common


@pytest.mark.slow
def test_a_longer_context_than_before_is_room_enough(load, fresh):
    llm = load()
    llm.generate(PROMPT, max_tokens=2, depth=1, sampling=SAMPLING)
    settings = {"max_tokens": 200, "depth": 3, "sampling": SAMPLING}
    got = llm.generate([*PROMPT, 5], **settings)
    assert got.token_ids == fresh([*PROMPT, 5], **settings).token_ids
    assert got.stats.cached_tokens == len(PROMPT) - 1


def test_what_a_stream_was_left_with_counts_as_well(load, fresh):
    llm = load()
    said = []
    for piece in llm.stream(PROMPT, max_tokens=50, depth=2, sampling=SAMPLING):
        said += piece.token_ids
        if len(said) > 5:
            break
    prompt = [*PROMPT, *said, 6]
    settings = {"max_tokens": 20, "depth": 2, "sampling": SAMPLING}
    got = llm.generate(prompt, **settings)
    assert got.token_ids == fresh(prompt, **settings).token_ids
    assert got.stats.cached_tokens > len(PROMPT)


def test_batches_neither_use_nor_leave_anything(load):
    llm = load()
    llm.generate(PROMPT, max_tokens=4, sampling=SAMPLING)
    both = llm.generate([PROMPT, PROMPT], max_tokens=4, sampling=SAMPLING)
    assert [r.stats.cached_tokens for r in both] == [0, 0]
    after = llm.generate(PROMPT, max_tokens=4, sampling=SAMPLING)
    assert after.stats.cached_tokens > 0
    llm.forget()
    assert llm.generate(PROMPT, max_tokens=4, sampling=SAMPLING).stats.cached_tokens == 0


@pytest.mark.slow
@pytest.mark.parametrize("depth", [0, 2])
def test_a_prompt_that_several_have_is_read_once(load, fresh, depth, monkeypatch):
    llm, read = load(), []
    forward = llm.trunk.forward

    def counted(tokens, *arguments, with_logits=True, **more):
        if not with_logits:
            read.append(len(tokens))
        return forward(tokens, *arguments, with_logits=with_logits, **more)

    monkeypatch.setattr(llm.trunk, "forward", counted)
    prompts = [PROMPT, PROMPT[:9], PROMPT, PROMPT, [5]]
    settings = {"max_tokens": 12, "depth": depth}
    together = llm.generate(prompts, **settings, sampling=SAMPLING)
    assert read == [3]
    for row, (prompt, result) in enumerate(zip(prompts, together, strict=True)):
        sampling = replace(SAMPLING, seed=SAMPLING.seed + row)
        assert result.token_ids == fresh(prompt, **settings, sampling=sampling).token_ids


def test_where_rounding_could_show_a_seed_reads_all(tmp_path):
    model = tiny_checkpoint.write(tmp_path / "model")
    llm = mtplx.load(model, dtype="bfloat16", device="cpu")
    for sampling, cached in (
        (SAMPLING, 0),
        (SamplerConfig(temperature=0), 0),
        (replace(SAMPLING, seed=None), len(PROMPT) - 1),
    ):
        llm.generate(PROMPT, max_tokens=4, sampling=sampling)
        again = llm.generate([*PROMPT, 4], max_tokens=4, sampling=sampling)
        assert again.stats.cached_tokens == cached + bool(cached)


def test_a_seed_reads_all_where_the_rule_looks_at_the_draft(load):
    """The head's own digits depend on how it read, and with them what is kept by these rules."""
    llm = load()
    texts = []
    for _ in range(2):
        got = llm.generate(PROMPT, max_tokens=20, depth=2, sampling=SAMPLING, verifier="block")
        assert got.stats.cached_tokens == 0
        texts.append(got.token_ids)
    assert texts[0] == texts[1]


def test_a_native_heads_cache_is_taken_over(tmp_path):
    tiny_native.write(tmp_path, "glm4_moe", sharded=False)
    tiny_checkpoint.tokenizer().save_pretrained(tmp_path)
    llms = [
        mtplx.load(tmp_path, dtype="float32", device="cpu", deterministic=True) for _ in range(2)
    ]
    prompt = [1, 2, 3, 4, 5, 6, 7]
    first = llms[0].generate(prompt, max_tokens=5, depth=2, sampling=SAMPLING)
    longer = [*prompt, *first.token_ids, 3]
    results = [llm.generate(longer, max_tokens=8, depth=2, sampling=SAMPLING) for llm in llms]
    assert results[0].token_ids == results[1].token_ids
    assert [r.stats.cached_tokens > 0 for r in results] == [True, False]
    accepted = [r.stats.accepted_by_position for r in results]
    assert accepted[0] == accepted[1]
