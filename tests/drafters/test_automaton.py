"""The longest suffix that a text has had before, against a search through all of it."""

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtplx.drafters.automaton import SuffixAutomaton


def longest_suffix(text):
    """Length of the longest suffix that occurs earlier, and where such occurrences end."""
    for length in range(len(text) - 1, 0, -1):
        suffix = text[-length:]
        ends = [end for end in range(length, len(text)) if text[end - length : end] == suffix]
        if ends:
            return length, ends
    return 0, []


def continued(text, at, count):
    """A text copied on from one of its places, token by token, as far as it takes."""
    text = list(text)
    for i in range(count):
        text.append(text[at + i])
    return text[len(text) - count :]


@given(st.lists(st.integers(0, 2), max_size=60), st.integers(0, 12))
def test_the_match_is_what_a_search_finds(text, count):
    automaton = SuffixAutomaton()
    for end, token in enumerate(text, 1):
        automaton.append(token)
        length, ends = longest_suffix(text[:end])
        assert automaton.match == length
        if length:
            assert automaton.follows in ends
            assert automaton.ahead(count) == continued(text[:end], automaton.follows, count)
        else:
            assert automaton.ahead(count) == []


@given(st.lists(st.integers(0, 5), max_size=60))
def test_a_text_read_at_once_is_as_good_as_one_read_by_tokens(text):
    whole, grown = SuffixAutomaton(text), SuffixAutomaton()
    for token in text:
        grown.append(token)
    assert vars(whole) == vars(grown)


def test_the_longest_match_wins_and_of_several_the_one_that_won_last():
    # Behind 1 2 came 3, then 4; behind 0 1 2 came 3.
    assert SuffixAutomaton([0, 1, 2, 3, 5, 1, 2, 4, 1, 2]).ahead(1) == [4]
    assert SuffixAutomaton([0, 1, 2, 3, 5, 1, 2, 4, 0, 1, 2]).ahead(2) == [3, 5]


def test_a_loop_is_copied_on():
    assert SuffixAutomaton([7, 1, 2, 1, 2]).ahead(5) == [1, 2, 1, 2, 1]
    assert SuffixAutomaton([4, 4]).ahead(3) == [4, 4, 4]


class Counting(list):
    """A list that counts how often something is looked up in it."""

    looked_up = 0

    def __getitem__(self, index):
        self.looked_up += 1
        return super().__getitem__(index)


def fibonacci(count):
    a, b = [0], [0, 1]
    while len(b) < count:
        a, b = b, b + a
    return b[:count]


TEXTS = {
    "one token": [0] * 3000,
    "all new": [*range(3000)],
    "random of two": random.Random(0).choices([0, 1], k=3000),
    "random of many": random.Random(1).choices(range(300), k=3000),
    "fibonacci": fibonacci(3000),
    # The most states, and the most transitions, that a text can need.
    "most states": [0, *[1] * 2999],
    "most transitions": [0, *[1] * 2998, 2],
    "the same page again": [*range(1000)] * 3,
    "counting": list(itertools.chain.from_iterable(range(n) for n in range(1, 78)))[:3000],
}


@pytest.mark.parametrize("name", TEXTS)
def test_what_a_token_costs_does_not_grow_with_the_text(name):
    text = TEXTS[name]
    automaton = SuffixAutomaton()
    automaton._next, automaton._link = Counting(automaton._next), Counting(automaton._link)
    for count, token in enumerate(text, 1):
        automaton.append(token)
        assert automaton._next.looked_up + automaton._link.looked_up <= 16 * count
    assert len(automaton._length) <= 2 * len(text)
    assert sum(len(following) for following in automaton._next) <= 3 * len(text)
