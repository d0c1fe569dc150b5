"""A suffix automaton over tokens, built online: which contexts occurred, and how often each token followed them.

Knows tokens and counts; must not know requests, scores or models. Source: Blumer et al., "The smallest automaton
recognizing the subwords of a text" (1985). At most 2 states and 3 transitions a token, amortised O(1) a token beside
the counts, which take at most one addition for each length of a context.
"""

from collections.abc import Iterator
from typing import NamedTuple

MAX_CONTEXT = 32
"""Longer contexts count as their last so many tokens."""

SEPARATOR = -1
"""A token between texts: it follows nothing and is followed by nothing."""


class Cursor(NamedTuple):
    """The state of a context of `length` tokens; (0, 0) is the empty one, of which nothing is told."""

    state: int
    length: int


NOWHERE = Cursor(0, 0)

Followers = list[tuple[int, int]]
"""(token, how often it followed), the last to appear first."""


class SuffixAutomaton:
    """Of one text, or of several with a SEPARATOR between them. It only grows."""

    def __init__(self) -> None:
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]  # the state of the longest suffix that is in another state
        self._length = [0]  # of a state's longest string
        self._count = [0]  # occurrences of those strings of a state that have at most MAX_CONTEXT + 1 tokens
        self._last = 0
        self._end = NOWHERE  # the text's last tokens, one more than a context has: its last token is a follower

    def append(self, token: int) -> None:
        """The text goes on with `token`."""
        self._extend(token)
        state, length = self._end  # where that was split just now, both halves lead on to the same state
        self._end = self._bounded(self._next[state][token], length + 1, MAX_CONTEXT + 1)
        state = self._end.state
        while state > 0:
            self._count[state] += 1
            state = self._link[state]

    def here(self) -> Cursor:
        """The longest suffix of the text that occurred before (elsewhere, overlaps allowed), as a context."""
        state, length = self._end
        if state and self._count[state] == 1:
            state = self._link[state]
            length = self._length[state]
        return self._bounded(state, length, MAX_CONTEXT)

    def follow(self, cursor: Cursor, token: int) -> Cursor:
        """The longest suffix of the context and `token` behind it that occurred, as a context."""
        state, length = cursor
        while state and token not in self._next[state]:
            state = self._link[state]
            length = self._length[state]
        target = self._next[state].get(token)
        return NOWHERE if target is None else self._bounded(target, length + 1, MAX_CONTEXT)

    def contexts(self, cursor: Cursor, min_length: int) -> Iterator[tuple[int, Followers]]:
        """The context and its ever shorter suffixes down to `min_length` >= 1 that differ in what followed them.

        (length, followers) each. A suffix is longer than the next by as many tokens as have always stood before it.
        """
        state, length = cursor
        while length >= min_length:
            followers = self._followers(state)
            if followers:
                yield length, followers
            state = self._link[state]
            length = self._length[state]

    def _followers(self, state: int) -> Followers:
        return [(token, self._count[to]) for token, to in reversed(self._next[state].items()) if token != SEPARATOR]

    def _extend(self, token: int) -> None:
        """Blumer's step: `token` behind every suffix of the text."""
        new = self._state(self._length[self._last] + 1, {}, 0, 0)
        state, self._last = self._last, new
        while state >= 0 and token not in self._next[state]:
            self._next[state][token] = new
            state = self._link[state]
        if state >= 0:
            self._link[new] = self._split(state, token)

    def _split(self, state: int, token: int) -> int:
        """The state of exactly the longest string of `state` with `token` behind it; a new one if need be."""
        whole = self._next[state][token]
        length = self._length[state] + 1
        if self._length[whole] == length:
            return whole
        half = self._state(length, dict(self._next[whole]), self._count[whole], self._link[whole])
        self._link[whole] = half
        while state >= 0 and self._next[state].get(token) == whole:
            self._next[state][token] = half
            state = self._link[state]
        return half

    def _state(self, length: int, following: dict[int, int], count: int, link: int) -> int:
        self._length.append(length)
        self._next.append(following)
        self._count.append(count)
        self._link.append(link)
        return len(self._link) - 1

    def _bounded(self, state: int, length: int, most: int) -> Cursor:
        """The cursor of a string of `state`, or of its last `most` tokens; it has at most one token more than that."""
        if length <= most:
            return Cursor(state, length)
        shorter = self._link[state]
        return Cursor(shorter if self._length[shorter] >= most else state, most)
