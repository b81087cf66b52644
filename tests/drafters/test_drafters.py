"""Drafters beside the head: lookups, lookups beside a head, and another model."""

import dataclasses
import functools
import random

import numpy as np
import pytest
import scheduled
import tiny
import torch
from faults import edited

from mtplx.drafters import draft_model, mixed, ngram
from mtplx.drafters.draft_model import DraftModel, DraftModelSlots
from mtplx.drafters.mixed import HeadOrLookup, MixedSlots
from mtplx.drafters.ngram import Lookup, Ngram, NgramSlots
from mtplx.drafters.pace import Draftsman, Pace, Trust
from mtplx.engine.decoding import Batch
from mtplx.engine.request import Request
from mtplx.models.slots import Span
from mtplx.sampling import SamplerConfig
from mtplx.shaping import Distributions

GREEDY = SamplerConfig(temperature=0)
HOT = SamplerConfig(temperature=1.3)
VERIFIERS = ("token", "block", "coupled")
NAMES = ("ngram", "mtp+ngram", "draft model", "smaller vocabulary")
PROMPTS = [(1, 2, 3, 1, 2), (4,), (5, 0, 2, 2, 1, 6, 5, 0)]

TRUNK = tiny.llama(7, seed=3)


@functools.cache
def drafter(name):
    match name:
        case "ngram":
            return Ngram(TRUNK.device)
        case "mtp+ngram":
            return HeadOrLookup(tiny.attached(TRUNK, 4), TRUNK.device)
        case "draft model":
            return DraftModel(tiny.llama(7, seed=5, layers=1), 7)
        case "smaller vocabulary":
            return DraftModel(tiny.llama(5, seed=5, layers=1), 7)
        case "itself":
            return DraftModel(TRUNK, 7)


def request(prompt, sampling=GREEDY, seed=0, tokens=24, depth=3, verifier="token", **more):
    return Request(tuple(prompt), sampling, seed, tokens, depth, verifier=verifier, **more)


def run(drafting, requests, pace=None, trunk=TRUNK):
    """(texts, stats) of a batch."""
    texts, stats = [[] for _ in requests], [None] * len(requests)
    for bursts in Batch(trunk, drafting, requests, pace).run():
        for burst in bursts:
            texts[burst.index] += burst.tokens
            stats[burst.index] = burst.stats
    return texts, stats


def plain(requests, trunk=TRUNK):
    return run(
        None, [dataclasses.replace(r, depth=0, adaptive=False) for r in requests], None, trunk
    )[0]


def accepted(stats):
    return sum(sum(one.accepted_by_position) for one in stats)


def drafted(stats):
    return sum(sum(one.decided_by_position) for one in stats)


# --- The text is the target's ---------------------------------------------------------------------


@pytest.mark.parametrize("verifier", VERIFIERS)
@pytest.mark.parametrize("name", NAMES)
def test_greedy_text_is_that_of_depth_0(name, verifier):
    for depths in ((1, 1, 1), (2, 2, 2), (4, 4, 4), (4, 1, 2), (0, 3, 1)):
        requests = [
            request(p, tokens=20 + 9 * i, depth=d, verifier=verifier)
            for i, (p, d) in enumerate(zip(PROMPTS, depths, strict=True))
        ]
        expected = plain(requests)
        texts, stats = run(drafter(name), requests)
        assert texts == expected
        assert drafted(stats) > 0
        for one, text, depth in zip(requests, expected, depths, strict=True):
            alone, stats = run(drafter(name), [one])
            assert alone == [text]
            assert len(stats[0].drafted_by_position) <= depth


@pytest.mark.parametrize("name", NAMES)
def test_a_coupled_text_is_that_of_depth_0_whatever_the_settings(name):
    penalised = SamplerConfig(temperature=1.2, repetition_penalty=1.4, no_repeat_ngram=3)
    banned = SamplerConfig(temperature=1.1, banned_tokens=(2,), logit_bias={4: 1.0})
    requests = [
        request(p, s, seed=i, tokens=30 + i, depth=4 - i, verifier="coupled")
        for i, (p, s) in enumerate(zip(PROMPTS, (HOT, penalised, banned), strict=True))
    ]
    texts, stats = run(drafter(name), requests)
    assert texts == plain(requests)
    assert 0 < accepted(stats) < drafted(stats)


@pytest.mark.parametrize("verifier", VERIFIERS)
@pytest.mark.parametrize("name", NAMES)
def test_neighbours_do_not_matter(name, verifier):
    requests = [
        request(p, HOT, seed=i, tokens=25 + 8 * i, depth=4 - i, verifier=verifier)
        for i, p in enumerate(PROMPTS)
    ]
    together, stats = run(drafter(name), requests)
    for i, one in enumerate(requests):
        alone, own = run(drafter(name), [one])
        assert alone == [together[i]]
        assert own[0].drafted_by_position == stats[i].drafted_by_position
        assert own[0].accepted_by_position == stats[i].accepted_by_position


@pytest.mark.parametrize("name", NAMES)
def test_rows_that_share_a_prompt_go_their_own_ways(name):
    prompts = [PROMPTS[0], PROMPTS[2], PROMPTS[0], PROMPTS[0]]
    requests = [request(p, HOT, seed=i, verifier="block") for i, p in enumerate(prompts)]
    together, stats = run(drafter(name), requests)
    assert together[0] != together[2] != together[3]
    for i, one in enumerate(requests):
        alone, own = run(drafter(name), [one])
        assert alone == [together[i]]
        assert own[0].accepted_by_position == stats[i].accepted_by_position


@pytest.mark.parametrize("schedule", [[0, 0, 0, 2], [5, 1, 0], [7]])
@pytest.mark.parametrize("name", NAMES)
def test_depths_that_are_learned_change_no_coupled_text(name, schedule):
    requests = [
        request(p, HOT, seed=i, tokens=30 + 8 * i, depth=7, verifier="coupled", adaptive=True)
        for i, p in enumerate(PROMPTS)
    ]
    texts, stats = run(drafter(name), requests, scheduled.Scheduled(schedule))
    assert texts == plain(requests)
    assert accepted(stats) > 0


# --- Committed tokens, and no others --------------------------------------------------------------


def assert_it_knows_the_texts_alone(batch):
    """Every row's lookup, head or model is as if it had read the row's text afresh."""
    slots = batch.drafter
    for row, slot in enumerate(batch.slots):
        text = [*slot.request.prompt, *slot.output]
        if isinstance(slots, MixedSlots | NgramSlots):
            lookups = slots.ngram.lookups if isinstance(slots, MixedSlots) else slots.lookups
            fresh = Lookup(slot.request.prompt)
            fresh.emit(slot.output)
            assert vars(lookups[row].text) == vars(fresh.text)
            assert lookups[row].text.text == text
            assert lookups[row].chances(9) == fresh.chances(9)
        if isinstance(slots, DraftModelSlots):
            assert slots.texts[row] == text
            count = slots.read[row]
            # The last token may have been drafted, in vain, and be read already.
            assert len(text) - 2 <= count <= len(text)
            cache = slots.trunk.new_cache(count)
            read = torch.tensor([text[:count]]).clamp_max(slots.trunk.vocab_size - 1)
            slots.trunk.forward(read, Span.after([0], count, batch.device), cache)
            for layer, fresh in cache.slots.items():
                for name in ("keys", "values"):
                    mine = getattr(slots.cache.slots[layer], name)[row, :, :count]
                    expected = getattr(fresh, name)[0, :, :count]
                    torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("verifier", VERIFIERS)
@pytest.mark.parametrize("name", [*NAMES, "itself"])
def test_a_drafter_knows_what_was_committed_and_nothing_else(name, verifier):
    requests = [
        request(p, HOT, seed=i, tokens=9 + 8 * i, depth=3, verifier=verifier, stop_ids={6})
        for i, p in enumerate([*PROMPTS[:1], PROMPTS[2], *PROMPTS])
    ]
    requests = [dataclasses.replace(one, stop_ids=frozenset()) for one in requests[:-1]] + [
        requests[-1]
    ]
    batch = Batch(TRUNK, drafter(name), requests)
    widths = set()
    for _ in batch.run():
        widths.add(len(batch.slots))
        assert_it_knows_the_texts_alone(batch)
    # Rows were dropped on the way.
    assert len(widths) > 2


EMITTED = (Batch, "cycle", "self.drafter.emit(emitted)")
LENGTHS = (Batch, "cycle", "draft.lengths or [depth] * len(slots)")
READ = (DraftModelSlots, "emit", "(*same, False).index(False)")


@pytest.mark.parametrize(
    ("fault", "wrong", "found_by", "name"),
    [
        (EMITTED, "self.drafter.emit(tokens)", "commits", "ngram"),
        (EMITTED, "self.drafter.emit(tokens)", "commits", "draft model"),
        (READ, "len(ahead)", "commits", "draft model"),
        (LENGTHS, "[depth] * len(slots)", "neighbours", "ngram"),
    ],
)
def test_a_fault_is_found(monkeypatch, fault, wrong, found_by, name):
    edited(*fault, wrong)(monkeypatch)
    test = {
        "commits": test_a_drafter_knows_what_was_committed_and_nothing_else,
        "neighbours": test_neighbours_do_not_matter,
    }[found_by]
    with pytest.raises(AssertionError):
        test(name, "token")


def test_a_model_reads_what_it_has_missed_and_no_more(monkeypatch):
    """One pass begins a draft, of two tokens where the last draft was kept whole."""
    model = drafter("itself")
    reads, right = [], model.trunk.forward

    def forward(tokens, span, cache, *more, **settings):
        if isinstance(cache, Marked):
            reads.append(tokens.shape[1])
        return right(tokens, span, cache, *more, **settings)

    class Marked(type(TRUNK.new_cache(1))):
        pass

    monkeypatch.setattr(model.trunk, "forward", forward)
    batch = Batch(TRUNK, model, [request(PROMPTS[2], depth=3, tokens=12)])
    batch.drafter.cache = Marked(batch.drafter.cache.capacity)
    for _ in batch.run():
        pass
    # The prompt but its last token; then drafts of three that are all kept.
    assert reads == [len(PROMPTS[2]) - 1, 1, 1, 1, 2, 1, 1, 2, 1, 1]


# --- Lookups --------------------------------------------------------------------------------------


def test_repeated_text_keeps_nearly_all_drafts():
    # What this model writes greedily runs into a loop, and once there is never rejected.
    trunk = tiny.llama(7, seed=1)
    requests = [request(p, tokens=200, depth=4) for p in PROMPTS]
    texts, stats = run(drafter("ngram"), requests, trunk=trunk)
    assert texts == plain(requests, trunk)
    for one in stats:
        assert sum(one.accepted_by_position) > 0.9 * sum(one.decided_by_position) > 0
        assert one.tokens_per_cycle > 4


def test_without_a_match_nothing_is_drafted():
    slots = Ngram(TRUNK.device).slots([(1, 2, 3), (1, 2, 1)], 20, None)
    draft = slots.draft(2, [2, 2], None, None, None)
    assert draft.lengths == [0, 2]
    assert draft.tokens[1].tolist() == [2, 1]
    assert draft.q.dense(4)[1].tolist() == [[0, 0, 1, 0], [0, 1, 0, 0]]
    slots.keep_rows(torch.tensor([0]))
    assert slots.draft(2, [2], None, None, None).tokens.shape == (1, 0)


def test_a_lookup_keeps_count_of_what_it_would_have_drafted():
    lookup = Lookup([1, 2, 3, 1])
    one, two = (ngram.PRIOR * usual for usual in ngram.USUAL[:2])
    lookup.emit([2])  # as foretold behind one token
    lookup.emit([5])  # not as foretold behind two
    lookup.emit([1])  # nothing was foretold
    assert lookup.chances(1) == [(one + 1) / (ngram.PRIOR + 1)]
    assert lookup.chances(2)[1] == two / (ngram.PRIOR + 1)
    lookup.emit([9])
    assert lookup.chances(3) == []


def test_what_is_foreseen_decides_how_far_a_draft_goes():
    class Sober(Pace):
        """Drafts on while there is an even chance."""

        def to_try(self, rows, deepest):
            return None

        def chance(self, confidence=None):
            return 0.1 if confidence is None else confidence

        def pays(self, rows, drafted, hopes):
            return bool(hopes) and hopes[0] >= 0.5

    def goes_on(foreseen, drafted):
        draftsman = Draftsman(Sober(), [Trust()], [3], foreseen)
        for _ in range(drafted):
            draftsman.drew([0.0])
        return draftsman.goes_on(drafted)

    assert not goes_on({}, 0)
    assert goes_on({0: [0.9, 0.8, 0.6]}, 0)
    assert goes_on({0: [0.9, 0.8, 0.6]}, 1)
    assert not goes_on({0: [0.9, 0.8, 0.6]}, 2)
    assert not goes_on({0: []}, 0)


# --- Beside a head --------------------------------------------------------------------------------


def mixed_drafts(requests):
    """(rows looked up, draft) of every draft of a batch."""
    seen, right = [], MixedSlots.draft

    def draft(slots, *arguments):
        looked_up = slots._looked_up()
        seen.append((looked_up, right(slots, *arguments)))
        return seen[-1][1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MixedSlots, "draft", draft)
        run(drafter("mtp+ngram"), requests)
    return seen


def test_rows_of_one_cycle_may_have_different_drafters():
    requests = [request(p, HOT, seed=i, tokens=40, depth=3) for i, p in enumerate(PROMPTS)]
    kinds = set()
    for looked_up, draft in [*mixed_drafts(requests), *mixed_drafts(requests[2:])]:
        kinds.add((any(looked_up), all(looked_up)))
        for row, found in enumerate(looked_up):
            certain = draft.q[row].at(draft.tokens[row][:, None])[:, 0] == 1
            # A random head at this temperature is certain of nothing.
            assert certain.all() if found else not certain.any()
    assert kinds == {(False, False), (True, False), (True, True)}


def test_the_better_record_drafts():
    slots = drafter("mtp+ngram").slots([(1, 2, 3, 1), (1, 2, 3, 4)], 20, None)
    assert slots._looked_up() == [False, False]
    for _ in range(5):
        slots.emit([[2, 3, 1], []])
    assert slots._looked_up() == [True, False]
    for _ in range(400):
        slots._kept[0].count(True)
    assert slots._looked_up() == [False, False]


def test_the_heads_record_is_that_of_its_first_drafts():
    requests = [request(p, HOT, seed=i, tokens=60, depth=2) for i, p in enumerate(PROMPTS[::2])]
    batch = Batch(TRUNK, drafter("mtp+ngram"), requests)
    kept = [[0, 0] for _ in requests]
    right = batch.drafter.draft

    def draft(*arguments):
        by_head.append([not found for found in batch.drafter._looked_up()])
        return right(*arguments)

    batch.drafter.draft = draft
    by_head = []
    for bursts in batch.run():
        if len(bursts) < 2:
            break
        rows = by_head.pop() if by_head else [False, False]
        for burst, mine, counts in zip(bursts, rows, kept, strict=True):
            if mine and burst.finish_reason is None:
                counts[0] += burst.drafted > 0
                counts[1] += 1
        if not any(burst.finish_reason for burst in bursts):
            expected = [(ngram.PRIOR / 2 + so) / (ngram.PRIOR + of) for so, of in kept]
            assert [share.value for share in batch.drafter._kept] == expected
    assert min(of for _, of in kept) > 3


def test_a_row_that_has_no_draft_yet_says_nothing_of_the_head():
    requests = [request((4,), HOT), request((1, 2, 3), HOT, seed=3)]
    batch = Batch(TRUNK, drafter("mtp+ngram"), requests)
    batch.prefill()
    batch.cycle()
    first, second = (share.value for share in batch.drafter._kept)
    assert first == mixed.USUAL != second


def test_a_heads_q_is_replaced_where_something_was_looked_up():
    rows = torch.tensor([True, False])
    tokens = torch.tensor([[3, 1], [0, 0]])
    own = torch.tensor([[[0.5, 0.5]] * 2] * 2)
    wide = torch.tensor([[[0.1, 0.2, 0.3, 0.4]] * 2] * 2)
    for head in (
        Distributions(own, torch.tensor([0, 2])),
        Distributions(own, torch.tensor([0, 2]).expand(2, 2, 2)),
        Distributions(wide, None),
    ):
        q = Distributions.certain(tokens).where(rows, head, 4)
        dense = q.dense(4)
        assert dense[0].tolist() == [[0, 0, 0, 1], [0, 1, 0, 0]]
        assert dense[1].equal(head.dense(4)[1])


# --- Another model --------------------------------------------------------------------------------


@pytest.mark.parametrize("verifier", VERIFIERS)
def test_a_model_that_is_the_target_has_all_drafts_kept(verifier):
    requests = [
        request(p, tokens=30 + i, depth=i + 2, verifier=verifier) for i, p in enumerate(PROMPTS)
    ]
    texts, stats = run(drafter("itself"), requests)
    assert texts == plain(requests)
    assert accepted(stats) == drafted(stats) > 60


def test_a_model_drafts_no_token_that_it_does_not_have():
    requests = [request(p, HOT, seed=i, tokens=60) for i, p in enumerate([*PROMPTS, (6, 5, 6)])]
    seen, right = [], DraftModelSlots.draft
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DraftModelSlots, "draft", lambda *a: seen.append(right(*a)) or seen[-1])
        texts, _ = run(drafter("smaller vocabulary"), requests)
    assert {5, 6} & {token for text in texts for token in text}
    assert max(int(draft.tokens.max()) for draft in seen) == 4


def test_a_model_drafts_as_far_as_its_context():
    model = DraftModel(tiny.llama(7, seed=5, layers=1, context=16), 7)
    lengths = []
    right = DraftModelSlots.draft

    def draft(slots, *arguments):
        made = right(slots, *arguments)
        counts = made.lengths or [0] * len(slots.texts)
        lengths.append([(len(t), n) for t, n in zip(slots.texts, counts, strict=True)])
        return made

    requests = [
        request(p, HOT, seed=i, tokens=40, depth=4, verifier="coupled")
        for i, p in enumerate([PROMPTS[0], PROMPTS[2] * 4])
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DraftModelSlots, "draft", draft)
        texts, _ = run(model, requests)
    assert texts == plain(requests)
    counted = [pair for cycle in lengths for pair in cycle]
    assert {n for length, n in counted if length <= 13} == {4}
    # It reads all of a draft but its last token.
    assert all(length + n - 1 <= 16 for length, n in counted if n)
    assert {n for length, n in counted if length > 16} == {0}


def test_a_long_prompt_is_read_in_pieces(monkeypatch):
    rng = random.Random(0)
    prompts = [[rng.randrange(7) for _ in range(n)] for n in (40, 3, 17)]
    requests = [request(p, HOT, seed=i, verifier="block") for i, p in enumerate(prompts)]
    whole = run(drafter("draft model"), requests)
    monkeypatch.setattr(draft_model, "READ_AT_ONCE", 12)
    pieces = run(drafter("draft model"), requests)
    assert pieces[0] == whole[0]
    assert accepted(pieces[1]) == accepted(whole[1])


# --- The last text --------------------------------------------------------------------------------


@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.parametrize("name", NAMES)
def test_what_the_last_text_left_is_begun_with(name, before):
    first = Batch(TRUNK, drafter(name), [request(PROMPTS[2], HOT, seed=1, depth=before)])
    text = [token for bursts in first.run() for burst in bursts for token in burst.tokens]
    prefix = first.prefix()
    # It goes on where the text did, and where it parted; once it is shorter than what was read.
    for prompt in ([*PROMPTS[2], *text, 3], [*PROMPTS[2], *text[:9], 6, 6], PROMPTS[2]):
        one = request(prompt, HOT, seed=2, verifier="block")
        expected = Batch(TRUNK, drafter(name), [one])
        again = Batch(TRUNK, drafter(name), [one], None, prefix)
        got = [[b.tokens for bs in batch.run() for b in bs] for batch in (expected, again)]
        assert got[0] == got[1]
        cached = again.prefix() and again._single.stats.cached_tokens
        if name == "mtp+ngram":
            assert bool(cached) == bool(before)
        else:
            assert cached >= len(PROMPTS[2]) - 1


def test_a_model_takes_over_what_another_text_read(monkeypatch):
    first = Batch(TRUNK, drafter("draft model"), [request(PROMPTS[2], HOT, seed=1)])
    text = [token for bursts in first.run() for burst in bursts for token in burst.tokens]
    prompt = [*PROMPTS[2], *text, 3, 4]
    again = Batch(TRUNK, drafter("draft model"), [request(prompt)], None, first.prefix())
    assert len(prompt) - 6 <= again.drafter.read[0] < len(prompt)
    again.prefill()
    assert_it_knows_the_texts_alone(again)


def test_a_bias_may_leave_nothing_of_what_is_looked_up():
    banned = SamplerConfig(temperature=1.0, logit_bias={1: -np.inf, 2: -np.inf, 3: -np.inf})
    requests = [request((1, 2, 3, 1, 2, 3, 1), banned, seed=1)]
    texts, stats = run(drafter("ngram"), requests)
    assert not {1, 2, 3} & set(texts[0])
    assert stats[0].accepted_by_position[0] < stats[0].decided_by_position[0]
