"""A text is its request's alone: what may change around a request without changing its text.

The noise of a `coupled` request belongs to seed and position, so nothing changes its text: not how
deep it is drafted or with which head, not a depth that changes on the way, not a pause. A request
of another rule keeps its text beside any neighbours, in any order, and over a pause.
"""

import dataclasses
import itertools

import numpy as np
import pytest
import scheduled
import tiny
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mtplx.drafters.pace import Pace
from mtplx.engine.decoding import Batch
from mtplx.engine.request import Request
from mtplx.sampling import SamplerConfig

VOCAB = 7
TRUNK = tiny.llama(VOCAB, seed=3)
HEADS = [tiny.attached(TRUNK), tiny.attached(TRUNK, draft_vocab_size=4, seed=9)]
VERIFIERS = ["token", "block", "coupled"]


class NoTokenTwiceInARow:
    """A grammar whose state is the text so far."""

    complete = True
    fault = None

    def __init__(self):
        self.text = []

    def allowed(self):
        return ~np.isin(np.arange(VOCAB), self.text[-1:])

    def advance(self, token):
        if not self.allowed()[token]:
            return False
        self.text.append(token)
        return True

    def rollback(self, count):
        del self.text[len(self.text) - count :]


# --- Requests -------------------------------------------------------------------------------------

tokens = st.integers(0, VOCAB - 1)
SETTINGS = {
    "temperature": st.sampled_from([0.0, 0.6, 1.0, 1.7]),
    "top_k": st.integers(1, VOCAB),
    "top_p": st.sampled_from([0.5, 0.8, 0.95]),
    "min_p": st.sampled_from([0.02, 0.2]),
    "typical_p": st.sampled_from([0.6, 0.9]),
    "repetition_penalty": st.sampled_from([0.8, 1.3]),
    "no_repeat_ngram": st.integers(3, 4),
    "logit_bias": st.dictionaries(tokens, st.sampled_from([-2.0, 1.5]), max_size=2),
}
# These tell the output from the prompt, which they would find longer after a pause.
OF_THE_OUTPUT = {
    "presence_penalty": st.sampled_from([-0.5, 0.7]),
    "frequency_penalty": st.sampled_from([-0.3, 0.4]),
    "min_tokens": st.integers(1, 5),
    "forced_tokens": st.lists(tokens, min_size=1, max_size=3),
}


@st.composite
def requests(draw, verifiers=tuple(VERIFIERS), to_be_paused=False):
    options = SETTINGS if to_be_paused else SETTINGS | OF_THE_OUTPUT
    chosen = draw(st.lists(st.sampled_from(list(options)), unique=True, max_size=3))
    return Request(
        prompt=tuple(draw(st.lists(tokens, min_size=1, max_size=9))),
        sampling=SamplerConfig(**{name: draw(options[name]) for name in chosen}),
        seed=draw(st.integers(0, 2**64 - 1)),
        max_tokens=draw(st.integers(1, 16)),
        depth=draw(st.integers(0, 4)),
        stop_ids=draw(st.frozensets(tokens, max_size=1)),
        verifier=draw(st.sampled_from(verifiers)),
        grammar=None if to_be_paused else draw(st.sampled_from([None, NoTokenTwiceInARow])),
    )


coupled_requests = requests(verifiers=["coupled"])
head_numbers = st.integers(0, len(HEADS) - 1)
depths = st.integers(0, 4)
schedules = st.lists(st.integers(0, 7), min_size=1, max_size=5)


def hot(verifier, **others):
    return Request((1, 2, 3), SamplerConfig(temperature=1.7), 7, 40, 3, verifier=verifier, **others)


# Of every rule, with filters of their own and depths of their own, and done one after another.
CROWD = [
    Request(
        (4, 0, 5, 5, 1)[: 1 + i % 5],
        SamplerConfig(**sampling),
        seed=2**40 + i,
        max_tokens=4 + 5 * i,
        depth=(5, 0, 1, 4, 2, 3)[i],
        verifier=VERIFIERS[i % 3],
    )
    for i, sampling in enumerate(
        [
            {"temperature": 0.8, "top_k": 4, "top_p": 0.9},
            {"temperature": 0},
            {"min_p": 0.05, "logit_bias": {3: -np.inf}},
            {"repetition_penalty": 1.3, "frequency_penalty": 0.2},
            {"top_p": 0.7},
            {"temperature": 1.4, "top_k": 2},
        ]
    )
]


def texts(batch):
    """What each request of the batch emits, in the order of the requests."""
    emitted = [[] for _ in batch.slots]
    for bursts in batch.run():
        for burst in bursts:
            emitted[burst.index] += burst.tokens
    return emitted


def text(head, one):
    return texts(Batch(TRUNK, head, [one]))[0]


# --- Every rule -----------------------------------------------------------------------------------


@pytest.mark.slow
@settings(max_examples=25)
@given(requests(), st.lists(requests(), min_size=1, max_size=5), depths)
@example(hot("token"), CROWD, 2)
@example(hot("block"), CROWD, 5)
@example(hot("coupled"), CROWD, 0)
def test_neighbours_do_not_matter(one, others, place):
    together = texts(Batch(TRUNK, HEADS[0], [*others[:place], one, *others[place:]]))
    assert together[min(place, len(others))] == text(HEADS[0], one)


@pytest.mark.slow
@settings(max_examples=25)
@given(
    st.lists(requests(), min_size=2, max_size=5).flatmap(
        lambda batch: st.permutations([*enumerate(batch)])
    )
)
@example([*enumerate(CROWD)][::-1])
def test_the_order_of_a_batch_does_not_matter(shuffled):
    in_order = [one for _, one in sorted(shuffled, key=lambda pair: pair[0])]
    expected = texts(Batch(TRUNK, HEADS[0], in_order))
    got = texts(Batch(TRUNK, HEADS[0], [one for _, one in shuffled]))
    assert got == [expected[i] for i, _ in shuffled]


def resumed(one, cycles, heads):
    """The text of a request that is broken off again and again, and taken up where it was.

    Args:
        cycles: until each pause, in turn.
        heads: before the first pause and after each, in turn; None drafts nothing.
    """
    written, finished = [], False
    takes = zip(itertools.cycle(cycles), itertools.cycle(heads), strict=False)
    while not finished:
        count, head = next(takes)
        left = dataclasses.replace(
            one,
            prompt=(*one.prompt, *written),
            max_tokens=one.max_tokens - len(written),
            depth=one.depth if head else 0,
        )
        for (burst,) in itertools.islice(Batch(TRUNK, head, [left]).run(), count):
            written += burst.tokens
            finished = burst.finish_reason
    return written


pauses = st.lists(st.integers(1, 5), min_size=1, max_size=3)


@pytest.mark.slow
@settings(max_examples=25)
@given(requests(to_be_paused=True), pauses)
@example(hot("token"), [2])
@example(hot("block"), [2])
@example(hot("coupled"), [2])
def test_a_pause_between_two_cycles_does_not_matter(one, cycles):
    assert resumed(one, cycles, HEADS[:1]) == text(HEADS[0], one)


@pytest.mark.slow
@pytest.mark.parametrize("bit", [0, 31, 32, 63])
@pytest.mark.parametrize("depth", [0, 3])
@pytest.mark.parametrize("verifier", VERIFIERS)
def test_every_bit_of_the_seed_does_matter(verifier, depth, bit):
    one = dataclasses.replace(hot(verifier), depth=depth)
    other = dataclasses.replace(one, seed=one.seed ^ 1 << bit)
    first, second = texts(Batch(TRUNK, HEADS[0], [one, other]))
    assert first != second


@pytest.mark.slow
@settings(max_examples=25)
@given(requests(), st.lists(requests(), min_size=1, max_size=3), schedules)
@example(hot("token"), CROWD[:2], [0, 5, 2])
@example(hot("block"), CROWD[:3], [0, 0, 7, 1])
def test_neighbours_that_choose_their_depths_do_not_matter(one, others, schedule):
    others = [dataclasses.replace(other, depth=7, adaptive=True) for other in others]
    batch = Batch(TRUNK, HEADS[0], [*others, one], scheduled.Scheduled(schedule))
    assert texts(batch)[-1] == text(HEADS[0], one)


# --- Coupled requests -----------------------------------------------------------------------------


def plain(one):
    """The text without any drafting."""
    return text(None, dataclasses.replace(one, depth=0))


@settings(max_examples=40)
@given(coupled_requests, head_numbers)
@example(hot("coupled"), 0)
@example(hot("coupled"), 1)
@example(hot("coupled", grammar=NoTokenTwiceInARow), 0)
def test_neither_depth_nor_head_matters_to_a_coupled_request(one, head):
    assert text(HEADS[head], one) == plain(one)


@settings(max_examples=25)
@given(coupled_requests, head_numbers, st.lists(depths, min_size=2, max_size=6))
@example(hot("coupled"), 0, [3, 0, 1])
def test_the_depth_of_a_coupled_request_may_change_on_the_way(one, head, schedule):
    batch = Batch(TRUNK, HEADS[head], [dataclasses.replace(one, depth=max(schedule))])
    (slot,), written = batch.slots, []
    for depth, bursts in zip(itertools.cycle(schedule), batch.run(), strict=False):
        written += bursts[0].tokens
        slot.request = dataclasses.replace(one, depth=depth)
    assert written == plain(one)


@pytest.mark.slow
@settings(max_examples=25)
@given(coupled_requests, head_numbers, st.lists(coupled_requests, max_size=2), schedules)
@example(hot("coupled"), 0, [], [0, 3])
@example(hot("coupled"), 1, [hot("coupled")], [0, 0, 7, 1])
def test_a_coupled_request_may_choose_its_depth(one, head, fixed, schedule):
    """By a plan, and by the times that its cycles really take, whatever those are."""
    free = dataclasses.replace(one, depth=7, adaptive=True)
    for pace in (scheduled.Scheduled(schedule), Pace(2)):
        assert texts(Batch(TRUNK, HEADS[head], [free, *fixed], pace))[0] == plain(one)


@pytest.mark.slow
@settings(max_examples=25)
@given(
    requests(verifiers=["coupled"], to_be_paused=True),
    pauses,
    st.lists(st.sampled_from([*range(len(HEADS)), None]), min_size=1, max_size=3),
)
@example(hot("coupled"), [1, 4], [0, None, 1])
def test_a_coupled_request_may_be_taken_up_with_another_head_or_none(one, cycles, heads):
    assert resumed(one, cycles, [None if i is None else HEADS[i] for i in heads]) == plain(one)
