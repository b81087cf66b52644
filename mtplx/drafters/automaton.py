"""Where a text has stood before: its longest suffix that occurs earlier, token by token."""

from __future__ import annotations

from collections.abc import Iterable


class SuffixAutomaton:
    """The smallest automaton that reads all runs of tokens of a text (Blumer et al. 1985, "The
    smallest automaton recognizing the subwords of a text").

    A state stands for runs that end at the same places of the text, and its link leads to the
    longest suffix of those that ends at more. So the link of the state that the whole text leads to
    is the text's longest suffix that occurs earlier, and nothing has to be searched for. A text of
    n tokens has at most 2n states and 3n transitions, of which none is ever taken away, and links
    that were followed for one token are not on the way of later ones: reading takes time in
    proportion to the text, whatever it is. (Drafts from it: Hu et al. 2024, arXiv:2411.10666.)

    Attributes:
        text: the tokens so far.
        match: length of the longest suffix that occurs earlier; 0 where even the last token is new.
        follows: index of the token behind one such occurrence: where there are several, behind the
            one that was the longest of all last, else behind the first.
    """

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self.text: list[int] = []
        self.match = self.follows = 0
        # By state, the first being that of the empty run: length of its longest run, where its runs
        # have ended (one place of several), its link, and where tokens lead from it.
        self._length, self._end, self._link = [0], [0], [-1]
        self._next: list[dict[int, int]] = [{}]
        self._last = 0
        for token in tokens:
            self.append(token)

    def append(self, token: int) -> None:
        """Let the text go on with a token."""
        self.text.append(token)
        state, suffix = self._state(len(self.text), {}), self._last
        while suffix >= 0 and token not in self._next[suffix]:
            self._next[suffix][token] = state
            suffix = self._link[suffix]
        link = 0 if suffix < 0 else self._ending(suffix, token)
        self._link[state], self._last = link, state
        self.match, self.follows = self._length[link], self._end[link]
        self._end[link] = len(self.text)

    def _ending(self, suffix: int, token: int) -> int:
        """The state of the longest run of `suffix` with the token behind it, and of no longer."""
        target = self._next[suffix][token]
        length = self._length[suffix] + 1
        if self._length[target] == length:
            return target
        # From now on the shorter of its runs end at one place more than the longer.
        shorter = self._state(length, dict(self._next[target]))
        self._link[shorter], self._end[shorter] = self._link[target], self._end[target]
        self._link[target] = shorter
        while suffix >= 0 and self._next[suffix].get(token) == target:
            self._next[suffix][token] = shorter
            suffix = self._link[suffix]
        return shorter

    def _state(self, length: int, following: dict[int, int]) -> int:
        self._length.append(length)
        self._end.append(len(self.text))
        self._link.append(0)
        self._next.append(following)
        return len(self._length) - 1

    def ahead(self, count: int) -> list[int]:
        """What followed that earlier occurrence, `count` tokens; none where nothing matched.

        An occurrence may reach up to the text's end: what follows then is what is copied here.
        """
        copied: list[int] = []
        for at in range(self.follows, self.follows + count if self.match else self.follows):
            beyond = at - len(self.text)
            copied.append(self.text[at] if beyond < 0 else copied[beyond])
        return copied
