"""The engine's loop on tiny models: the text, the caches, the count."""

import dataclasses
import random

import numpy as np
import pytest
import scheduled
import tiny
import torch

from mtplx.drafters.pace import Pace
from mtplx.engine import decoding
from mtplx.engine.decoding import Batch
from mtplx.engine.request import Request, Stats
from mtplx.errors import MtplxError
from mtplx.models.slots import Span
from mtplx.sampling import SamplerConfig, distribution_from_logits

GREEDY = SamplerConfig(temperature=0)
HOT = SamplerConfig(temperature=1.5)


@pytest.fixture(scope="module")
def trunk():
    return tiny.llama(vocab_size=7, seed=3)


@pytest.fixture(scope="module")
def head(trunk):
    return tiny.attached(trunk)


def request(prompt, sampling=GREEDY, seed=0, max_tokens=20, depth=3, stop_ids=(), verifier="token"):
    return Request(tuple(prompt), sampling, seed, max_tokens, depth, frozenset(stop_ids), verifier)


@dataclasses.dataclass
class Run:
    """What became of one request."""

    tokens: list
    bursts: list

    @property
    def reason(self):
        return self.bursts[-1].finish_reason

    @property
    def stats(self):
        return self.bursts[-1].stats


def collect(batch):
    runs = [Run([], []) for _ in batch.slots]
    for bursts in batch.run():
        for burst in bursts:
            runs[burst.index].tokens += burst.tokens
            runs[burst.index].bursts.append(burst)
    return runs


def run(trunk, head, *requests):
    return collect(Batch(trunk, head, requests))


def generate(trunk, prompt, count, **settings):
    """transformers' own greedy text."""
    out = trunk.model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        do_sample=False,
        max_new_tokens=count,
        min_new_tokens=count,
        pad_token_id=0,
        **settings,
    )
    return out[0, len(prompt) :].tolist()


def prompts(trunk, lengths, seed=0):
    rng = random.Random(seed)
    return [[rng.randrange(trunk.vocab_size) for _ in range(n)] for n in lengths]


# --- Greedy text is transformers' own -------------------------------------------------------------


@pytest.mark.parametrize("depth", [0, 1, 3, 5])
@pytest.mark.parametrize("draft_vocab", [None, 4])
def test_greedy_text_is_that_of_generate(trunk, depth, draft_vocab):
    head = tiny.attached(trunk, draft_vocab)
    texts = prompts(trunk, [1, 2, 5, 9, 30])
    expected = [generate(trunk, p, 24) for p in texts]
    requests = [request(p, max_tokens=24, depth=depth) for p in texts]
    together = run(trunk, head, *requests)
    assert [r.tokens for r in together] == expected
    for one, tokens in zip(requests, expected, strict=True):
        (alone,) = run(trunk, head, one)
        assert alone.tokens == tokens
        assert alone.reason == "length"
    if depth:
        # The drafts were worth something, and were not the text anyway.
        drafted = sum(sum(r.stats.decided_by_position) for r in together)
        accepted = sum(sum(r.stats.accepted_by_position) for r in together)
        assert 0 < accepted < drafted


def test_depths_of_a_batch_may_differ(trunk, head):
    texts = prompts(trunk, [4, 1, 7, 2])
    runs = run(
        trunk, head, *[request(p, depth=d) for p, d in zip(texts, [0, 5, 1, 3], strict=True)]
    )
    assert [r.tokens for r in runs] == [generate(trunk, p, 20) for p in texts]
    for r, depth in zip(runs, [0, 5, 1, 3], strict=True):
        assert len(r.stats.drafted_by_position) == depth


def test_depth_0_needs_no_head(trunk, head):
    one = request([1, 2, 3], HOT, seed=5, depth=0)
    assert run(trunk, None, one)[0].tokens == run(trunk, head, one)[0].tokens


@pytest.mark.parametrize("chunk", [1, 2, 7, 64])
def test_prompts_longer_than_one_pass(trunk, head, monkeypatch, chunk):
    texts = prompts(trunk, [1, 3, 17, 40])
    requests = [request(p, HOT, seed=i) for i, p in enumerate(texts)]
    expected = [r.tokens for r in run(trunk, head, *requests)]
    monkeypatch.setattr(decoding, "PREFILL_TOKENS", chunk * len(texts))
    assert [r.tokens for r in run(trunk, head, *requests)] == expected


@pytest.mark.parametrize("depth", [0, 3])
def test_penalties_count_along_the_text(trunk, head, depth):
    texts = prompts(trunk, [3, 8])
    penalised = SamplerConfig(temperature=0, repetition_penalty=1.4)
    runs = run(trunk, head, *[request(p, penalised, depth=depth) for p in texts])
    assert [r.tokens for r in runs] == [
        generate(trunk, p, 20, repetition_penalty=1.4) for p in texts
    ]

    # Those that transformers lacks, beside a row without, token by token from the law.
    config = SamplerConfig(
        temperature=0, presence_penalty=0.8, frequency_penalty=0.3, logit_bias={2: 1.0}
    )
    runs = run(trunk, head, request(texts[0], config, depth=depth), request(texts[1], depth=depth))
    output = []
    for _ in range(20):
        logits = trunk.model(torch.tensor([texts[0] + output])).logits[0, -1].detach().numpy()
        p = distribution_from_logits(logits, config, prompt_ids=texts[0], output_ids=output)
        output.append(int(p.argmax()))
    assert runs[0].tokens == output
    assert runs[1].tokens == generate(trunk, texts[1], 20)


# --- The caches hold the committed text and nothing else ------------------------------------------


def assert_caches_are_fresh(batch, head):
    for row, slot in enumerate(batch.slots):
        tokens = [*slot.request.prompt, *slot.output]
        read = len(tokens) - 1
        assert (slot.length, slot.pending) == (read, tokens[-1])
        if read == 0:
            continue
        span = Span.after([0], read, batch.device)
        cache = batch.trunk.new_cache(read)
        output = batch.trunk.forward(torch.tensor([tokens[:-1]]), span, cache, batch.taps)
        for layer, fresh in cache.slots.items():
            assert_same_slots(batch.cache.slots[layer], fresh, row, read)
        if batch.drafter:
            fresh = head.new_cache(read)
            following = torch.tensor([tokens[1:]])
            result = head.step(following, head.features(output), span, fresh)
            assert_same_slots(batch.drafter.cache, fresh, row, read)
            torch.testing.assert_close(
                batch.drafter._newest[0][row], result[0, -1], rtol=1e-4, atol=1e-4
            )


def assert_same_slots(slots, fresh, row, length):
    for name in ("keys", "values"):
        torch.testing.assert_close(
            getattr(slots, name)[row, :, :length],
            getattr(fresh, name)[0, :, :length],
            rtol=1e-4,
            atol=1e-4,
        )


@pytest.mark.parametrize("schedule", [[0], [0, 0, 2], [5, 1, 0]])
def test_the_caches_of_adaptive_rows_equal_a_fresh_prefill(trunk, head, schedule):
    texts = prompts(trunk, [1, 6, 3])
    rows = [request(p, HOT, seed=i, max_tokens=6 + 7 * i, depth=7) for i, p in enumerate(texts)]
    rows = [dataclasses.replace(one, adaptive=True) for one in rows]
    batch = Batch(trunk, head, rows, scheduled.Scheduled(schedule))
    for _ in batch.run():
        batch.drafter.catch_up()
        assert_caches_are_fresh(batch, head)


def test_an_adaptive_row_is_drafted_no_further_than_its_budget(trunk, head):
    for left in range(1, 6):
        row = dataclasses.replace(request([1, 2], HOT, max_tokens=left, depth=7), adaptive=True)
        beside = request([3, 2], HOT, max_tokens=30, depth=0)
        (r, plain) = collect(Batch(trunk, head, [row, beside], scheduled.Scheduled([7])))
        assert len(r.tokens) == left
        assert len(r.stats.drafted_by_position) == left - 1
        assert plain.stats.drafted_by_position == []
        assert plain.tokens == run(trunk, head, beside)[0].tokens


def test_adaptive_rows_teach_the_pace_that_is_given(trunk, head):
    row = dataclasses.replace(request([1, 2], HOT, max_tokens=90, depth=7), adaptive=True)
    pace = Pace(2)
    before = pace.chance()
    (r,) = collect(Batch(trunk, head, [row], pace))
    assert pace.chance() != before
    assert len(r.bursts[0].tokens) <= 3
    assert r.stats.drafted_by_position[0] > 0
    # Beside a fixed row it is no more than that one asks for, while it is told not to go on.
    fixed = request([3], HOT, max_tokens=90, depth=1)
    both = collect(Batch(trunk, head, [row, fixed], scheduled.Scheduled([0])))
    assert [len(one.stats.drafted_by_position) for one in both] == [1, 1]


@pytest.mark.parametrize("depth", [0, 1, 2, 4])
def test_after_every_cycle_the_caches_equal_a_fresh_prefill(trunk, head, monkeypatch, depth):
    monkeypatch.setattr(decoding, "PREFILL_TOKENS", 30)
    texts = prompts(trunk, [1, 2, 6, 15, 3, 4])
    requests = [
        request(p, HOT, seed=10 + i, max_tokens=8 + 4 * i, depth=min(depth, i + 1))
        for i, p in enumerate(texts)
    ]
    batch = Batch(trunk, head, requests)
    patterns = set()
    for bursts in batch.run():
        assert_caches_are_fresh(batch, head)
        patterns.add(tuple(sorted({burst.drafted for burst in bursts})))
    if depth > 1:
        # Rows of one cycle kept different numbers of drafts.
        assert any(len(pattern) >= 3 for pattern in patterns)


# --- A text depends on its own request only -------------------------------------------------------


def mixed_requests(trunk):
    settings = [
        HOT,
        SamplerConfig(temperature=0.8, top_k=4, top_p=0.9),
        GREEDY,
        SamplerConfig(min_p=0.05, logit_bias={3: -np.inf}),
        SamplerConfig(temperature=1.2, repetition_penalty=1.3, frequency_penalty=0.2),
        SamplerConfig(top_p=0.7),
    ]
    texts = prompts(trunk, [5, 1, 12, 3, 8, 2], seed=1)
    return [
        request(
            p,
            s,
            seed=1000 + i,
            max_tokens=6 + 5 * i,
            depth=[3, 0, 5, 1, 2, 4][i],
            stop_ids=[6],
            verifier=["block", "coupled", "token"][i % 3],
        )
        for i, (p, s) in enumerate(zip(texts, settings, strict=True))
    ]


def test_neighbours_and_their_order_do_not_matter(trunk, head):
    requests = mixed_requests(trunk)
    alone = [run(trunk, head, one)[0] for one in requests]
    rng = random.Random(0)
    for _ in range(4):
        order = rng.sample(range(len(requests)), rng.randint(2, len(requests)))
        runs = run(trunk, head, *[requests[i] for i in order])
        for r, i in zip(runs, order, strict=True):
            assert r.tokens == alone[i].tokens
            assert r.reason == alone[i].reason
            assert [b.tokens for b in r.bursts] == [b.tokens for b in alone[i].bursts]
            # Float32 rounding of a batched product may show in the last digits.
            assert r.stats.mean_acceptance_probability == pytest.approx(
                alone[i].stats.mean_acceptance_probability, rel=1e-4
            )


def test_equal_requests_with_other_seeds_differ_and_with_the_same_do_not(trunk, head):
    first, second, other = run(
        trunk, head, *[request([1, 2], HOT, seed, depth=2) for seed in (4, 4, 5)]
    )
    assert first.tokens == second.tokens
    assert first.tokens != other.tokens


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [HOT, SamplerConfig(temperature=0.8, top_k=4, top_p=0.9)])
def test_a_coupled_text_is_the_seeds_alone(trunk, head, sampling):
    """Whatever drafts it, however deep, beside whom; with every rule but this it would not be."""
    other = tiny.attached(trunk, 4, seed=9)

    def text(head, depth, verifier, *neighbours):
        one = request([1, 2, 3], sampling, 7, 60, depth, verifier=verifier)
        return run(trunk, head, one, *neighbours)[0].tokens

    expected = text(None, 0, "coupled")
    assert len(expected) == 60
    for depth in (1, 2, 3, 5):
        assert text(head, depth, "coupled") == expected
        assert text(other, depth, "coupled") == expected
    assert text(head, 3, "coupled", *mixed_requests(trunk)) == expected
    for verifier in ("token", "block"):
        assert text(head, 3, verifier) != text(head, 0, verifier)
    assert text(head, 0, "token") != expected


def test_batches_may_take_turns_on_one_trunk(trunk, head):
    """Each with taps of its own."""
    plain, drafted = request([1, 2, 3], HOT, seed=1, depth=0), request([4, 5], HOT, seed=2, depth=3)
    expected = run(trunk, head, plain)[0].tokens, run(trunk, head, drafted)[0].tokens
    streams = [Batch(trunk, head, [one]).run() for one in (plain, drafted)]
    got = [[], []]
    for _ in range(20):
        for tokens, stream in zip(got, streams, strict=True):
            for burst in next(stream, []):
                tokens += burst.tokens
    assert tuple(got) == expected


# --- Where a text ends ----------------------------------------------------------------------------


@pytest.mark.slow
def test_a_stop_ends_the_text_wherever_in_a_cycle_it_stands(trunk, head):
    inside = 0
    for seed in range(30):
        free = request([2, 1], HOT, seed, max_tokens=40, depth=3)
        stopped = dataclasses.replace(free, stop_ids=frozenset([0, 5]))
        (whole,), (cut,) = run(trunk, head, free), run(trunk, head, stopped)
        end = next((i for i, t in enumerate(whole.tokens) if t in (0, 5)), None)
        if end is None:
            assert (cut.tokens, cut.reason) == (whole.tokens, "length")
            continue
        assert cut.tokens == whole.tokens[: end + 1]
        assert cut.reason == "stop"
        assert [b.finish_reason for b in cut.bursts[:-1]] == [None] * (len(cut.bursts) - 1)
        assert cut.stats.tokens == len(cut.tokens)
        last, uncut = cut.bursts[-1], whole.bursts[len(cut.bursts) - 1]
        assert last.drafted == min(uncut.drafted, len(last.tokens))
        inside += len(last.tokens) < len(uncut.tokens)
    assert inside > 5


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 7])
def test_a_draft_is_no_longer_than_what_is_left(trunk, head, max_tokens):
    one = request([1, 2, 3], HOT, seed=1, max_tokens=max_tokens, depth=10)
    (r,) = run(trunk, head, one)
    assert len(r.tokens) == r.stats.tokens == max_tokens
    assert r.reason == "length"
    assert len(r.stats.drafted_by_position) == max_tokens - 1
    left = max_tokens
    for burst in r.bursts:
        assert burst.drafted <= left - 1
        left -= len(burst.tokens)


@pytest.mark.parametrize("depth", [0, 4])
@pytest.mark.parametrize("prompt", [1, 10, 15])
def test_the_end_of_the_context_is_a_length(depth, prompt):
    small = tiny.llama(context=16)
    (text,) = prompts(small, [prompt])
    one = request(text, max_tokens=100, depth=depth)
    (r,) = run(small, tiny.attached(small), one)
    assert r.reason == "length"
    assert r.tokens == generate(small, text, 16 - prompt)


def test_a_neighbour_at_its_end_of_context_is_not_disturbed():
    """Its row is padded past the context by the drafts of the others."""
    small = tiny.llama(context=16)
    head = tiny.attached(small)
    long, short = prompts(small, [14, 2])
    runs = run(small, head, request(long, max_tokens=9, depth=5), request(short, depth=5))
    assert runs[0].tokens == generate(small, long, 2)
    assert runs[1].tokens == generate(small, short, 14)


def test_a_prompt_of_one_token_is_drafted_from_its_second_cycle_on(trunk, head):
    (r,) = run(trunk, head, request([3], HOT, seed=1, depth=2, max_tokens=30))
    assert len(r.bursts[0].tokens) == 1
    # The first cycle has no hidden state to draft from, the last no room to draft for.
    assert [len(r.bursts[i].tokens) for i in (0, -1)] == [1, 1]
    assert r.stats.drafted_by_position[0] == r.stats.cycles - 2
    assert sum(r.stats.accepted_by_position) > 0


# --- The count ------------------------------------------------------------------------------------


def test_telemetry_is_the_sum_of_the_cycles(trunk, head, monkeypatch):
    cycles = []
    original = decoding.verify

    def recorded(p, draft, depths, noise):
        verdict = original(p, draft, depths, noise)
        cycles.append((depths.tolist(), verdict.accepted.tolist(), verdict.probability.tolist()))
        return verdict

    monkeypatch.setattr(decoding, "verify", recorded)
    requests = mixed_requests(trunk)
    requests += [request([2, 1], HOT, seed, depth=3, stop_ids=[0, 5]) for seed in range(12)]
    inside = 0
    expected = [Stats() for _ in requests]
    drafts = [[] for _ in requests]  # of every cycle: (position, decided, kept, probability)
    for cycle, bursts in enumerate(Batch(trunk, head, requests).run()):
        for row, burst in enumerate(bursts):
            depths, accepted, probability = (column[row] for column in cycles[cycle])
            stats = expected[burst.index]
            stats.cycles += 1
            stats.tokens += len(burst.tokens)
            ended_inside = len(burst.tokens) <= accepted
            inside += ended_inside
            for i in range(len(burst.tokens) if ended_inside else depths):
                drafts[burst.index].append((i, i <= accepted, i < accepted, probability[i]))
            got = burst.stats
            assert (got.cycles, got.tokens) == (stats.cycles, stats.tokens)
            for position in range(max((i for i, *_ in drafts[burst.index]), default=-1) + 1):
                here = [d for d in drafts[burst.index] if d[0] == position]
                assert got.drafted_by_position[position] == len(here)
                assert got.decided_by_position[position] == sum(d[1] for d in here)
                assert got.accepted_by_position[position] == sum(d[2] for d in here)
                share = sum(d[2] for d in here) / max(sum(d[1] for d in here), 1)
                assert got.acceptance_by_position[position] == pytest.approx(share)
            decided = [d[3] for d in drafts[burst.index] if d[1]]
            assert got.mean_acceptance_probability == pytest.approx(np.mean(decided or [0]))
            assert got.tokens_per_cycle == stats.tokens / stats.cycles
            assert burst.drafted == min(accepted, len(burst.tokens))
    assert inside > 3
    # Every token is a kept draft, or the one that a cycle adds; only a stop cuts that off.
    for r in run(trunk, head, *requests):
        added = r.stats.tokens - sum(r.stats.accepted_by_position)
        assert added == r.stats.cycles - (len(r.bursts[-1].tokens) == r.bursts[-1].drafted)


def test_times_are_measured(trunk, head):
    runs = run(trunk, head, request([1, 2], max_tokens=2), request([3, 4], max_tokens=40))
    first, second = (r.stats for r in runs)
    assert first.prefill_seconds == second.prefill_seconds > 0
    assert 0 < first.decode_seconds < second.decode_seconds
    assert second.decode_tokens_per_second == 40 / second.decode_seconds


def test_stats_of_nothing_are_zero():
    stats = Stats().to_dict()
    assert stats["tokens_per_cycle"] == stats["mean_acceptance_probability"] == 0
    assert stats["decode_tokens_per_second"] == 0
    assert stats["acceptance_by_position"] == []


# --- Errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "says"),
    [
        (request([]), "the prompt has no tokens; give at least one"),
        (request([1, 7]), "the prompt holds token id 7; the model has 7"),
        (request([1, -1]), "the prompt holds token id -1; the model has 7"),
        (
            request([1] * 512),
            "the prompt has 512 tokens; the model's context of 512 leaves no room",
        ),
    ],
)
def test_a_bad_prompt_is_refused(trunk, head, one, says):
    with pytest.raises(MtplxError, match=says):
        Batch(trunk, head, [request([1]), one])


def test_depth_without_a_head_is_refused(trunk):
    with pytest.raises(MtplxError, match="this model has no head to draft with; use depth 0"):
        Batch(trunk, None, [request([1], depth=0), request([1], depth=2)])


def test_a_bias_outside_the_vocabulary_is_refused(trunk, head):
    with pytest.raises(MtplxError, match="logit_bias names token 7, but there are 7 tokens"):
        Batch(trunk, head, [request([1], SamplerConfig(logit_bias={7: 1.0}))])


def test_a_bias_may_leave_nothing_of_the_draft_vocabulary(trunk):
    head = tiny.attached(trunk, 4)
    outside = sorted(set(range(7)) - set(head.draft_ids.tolist()))
    bias = dict.fromkeys(head.draft_ids.tolist(), -np.inf)
    (r,) = run(trunk, head, request([1, 2], SamplerConfig(logit_bias=bias), seed=1))
    assert set(r.tokens) <= set(outside)
    assert sum(r.stats.accepted_by_position) == 0
