"""What may follow a context, judged by what followed it before: a law from counts.

Knows contexts and counts; must not know requests, trees or sampling.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from ssm_worker.automaton import MAX_CONTEXT, NOWHERE, Cursor, SuffixAutomaton

_DOUBT = 3.0  # measured on prompts: what followed a context of l tokens once follows it again about l / (l + 3) times
_NEGLIGIBLE = 0.01  # so little mass for shorter contexts is not worth looking them up

Cursors = tuple[Cursor, ...]
"""A context in each automaton."""


@dataclass(frozen=True, slots=True)
class Law:
    """Shares of the tokens that may follow, and what is left for all others; together 1. Equal: the newest first."""

    shares: dict[int, float]
    left: float


@dataclass(frozen=True, slots=True)
class Repeats:
    """A request's own text, and a corpus if there is one; contexts shorter than `min_match` >= 1 tell nothing."""

    own: SuffixAutomaton
    corpus: SuffixAutomaton | None
    min_match: int

    def here(self, text: list[int]) -> Cursors:
        """The contexts behind the request's text."""
        if self.corpus is None:
            return (self.own.here(),)
        cursor = NOWHERE
        for token in text[-MAX_CONTEXT:]:
            cursor = self.corpus.follow(cursor, token)
        return self.own.here(), cursor

    def follow(self, at: Cursors, token: int) -> Cursors:
        """The contexts with `token` behind them."""
        return tuple(automaton.follow(cursor, token) for automaton, cursor in zip(self._automata, at, strict=True))

    def law(self, at: Cursors) -> Law:
        """Longest context first: of n followers at length l, each gets l / (n l + 3) of the mass that is left.

        The rest, 3 / (n l + 3), is left for the next shorter context. So one precedent of a context of 6 tokens is
        believed to 6/9, one of 2 tokens to 2/5, and three of those to 6/9. The text's own contexts go before the
        corpus's of the same length.
        """
        shares: dict[int, float] = {}
        left = 1.0
        for length, followers in self._contexts(at):
            unit = left * length / (sum(count for _, count in followers) * length + _DOUBT)
            for token, count in followers:
                shares[token] = shares.get(token, 0.0) + unit * count
            left = unit * _DOUBT / length
            if left < _NEGLIGIBLE:
                break
        return Law(shares, left)

    @property
    def _automata(self) -> tuple[SuffixAutomaton, ...]:
        return (self.own,) if self.corpus is None else (self.own, self.corpus)

    def _contexts(self, at: Cursors) -> Iterable[tuple[int, list[tuple[int, int]]]]:
        if self.corpus is None:
            return self.own.contexts(at[0], self.min_match)
        found = (
            context
            for automaton, cursor in zip(self._automata, at, strict=True)
            for context in automaton.contexts(cursor, self.min_match)
        )
        return sorted(found, key=lambda context: -context[0])
