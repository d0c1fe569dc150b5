"""Stop strings in a text that arrives in pieces. Knows characters only.

Each stop string is followed by a Knuth-Morris-Pratt automaton, so a character costs O(1) amortised for each string and
the text held back is exactly the longest suffix that could still begin a stop string.
"""

from collections.abc import Sequence


class StopScanner:
    """Passes text on up to the first stop string; `hit` says that one has completed."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.hit = False
        self._automata = [_Automaton(stop) for stop in stops]
        self._held = ""

    def feed(self, text: str, *, may_stop: bool = True) -> str:
        """The text that is certain now. Of stop strings that complete on one character the longest cuts.

        may_stop False: what completes in this piece is text like any other.
        """
        if not self._automata:
            return text
        known = self._held + text
        for end, char in enumerate(text, len(self._held) + 1):
            complete = [len(automaton.stop) for automaton in self._automata if automaton.step(char)]
            if complete and may_stop:
                self.hit, self._held = True, ""
                return known[: end - max(complete)]
        return self._hold(known, max(automaton.matched for automaton in self._automata))

    def flush(self) -> str:
        """What was held back, when no more text comes."""
        held, self._held = self._held, ""
        return held

    def _hold(self, text: str, count: int) -> str:
        self._held = text[len(text) - count :]
        return text[: len(text) - count]


class _Automaton:
    """matched: length of the longest prefix of `stop`, `stop` itself excepted, that is a suffix of the text so far."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0
        self._fallback = _fallbacks(stop)

    def step(self, char: str) -> bool:
        """Whether this character completes the stop string."""
        while self.matched and self.stop[self.matched] != char:
            self.matched = self._fallback[self.matched - 1]
        self.matched += self.stop[self.matched] == char
        if self.matched < len(self.stop):
            return False
        self.matched = self._fallback[-1]
        return True


def _fallbacks(stop: str) -> list[int]:
    """For each prefix the length of its longest proper prefix that is also its suffix."""
    fallback = [0] * len(stop)
    length = 0
    for idx in range(1, len(stop)):
        while length and stop[idx] != stop[length]:
            length = fallback[length - 1]
        length += stop[idx] == stop[length]
        fallback[idx] = length
    return fallback
