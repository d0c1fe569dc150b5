"""The suffix automaton against a search through the text, token by token."""

from collections import Counter
from collections.abc import Sequence
from time import process_time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssm_worker.automaton import MAX_CONTEXT, SEPARATOR, Cursor, SuffixAutomaton

random_texts = st.integers(1, 4).flatmap(lambda size: st.lists(st.integers(0, size), max_size=90))
repeats = st.builds(lambda part, times: part * times, st.lists(st.integers(0, 2), max_size=9), st.integers(1, 12))
texts = random_texts | st.builds(lambda text, more: text + more, repeats, random_texts)


def automaton_of(text: Sequence[int]) -> SuffixAutomaton:
    """Of a whole text."""
    automaton = SuffixAutomaton()
    for token in text:
        automaton.append(token)
    return automaton


def ends(text: Sequence[int], context: Sequence[int]) -> list[int]:
    """Where a context ends in the text."""
    size = len(context)
    return [end for end in range(size, len(text) + 1) if list(text[end - size : end]) == list(context)]


def followers(text: Sequence[int], context: Sequence[int]) -> Counter[int]:
    """What followed a context, and how often."""
    return Counter(text[end] for end in ends(text, context) if end < len(text) and text[end] != SEPARATOR)


def longest(text: Sequence[int], context: Sequence[int], num_needed: int) -> list[int]:
    """The longest suffix of `context` that occurs so often in the text."""
    for size in range(min(len(context), MAX_CONTEXT), 0, -1):
        if len(ends(text, context[-size:])) >= num_needed:
            return list(context[-size:])
    return []


def check_contexts(automaton: SuffixAutomaton, cursor: Cursor, text: Sequence[int], context: Sequence[int]) -> None:
    """Each context told has its followers' counts; each that is not told has those of the next longer one told."""
    told = dict(automaton.contexts(cursor, 1))
    expected: Counter[int] = Counter()
    for size in range(len(context), 0, -1):
        if size in told:
            expected = Counter(dict(told[size]))
        assert followers(text, context[-size:]) == expected


@given(text=texts)
def test_here_is_the_longest_suffix_that_occurred_before(text: list[int]) -> None:
    """At every prefix of the text, with all counts, as the automaton grows."""
    automaton = SuffixAutomaton()
    for size in range(len(text) + 1):
        found = automaton.here()
        context = longest(text[:size], text[:size], 2)
        assert found.length == len(context)
        check_contexts(automaton, found, text[:size], context)
        if size < len(text):
            automaton.append(text[size])


@given(text=texts, path=st.lists(st.integers(0, 5), max_size=45))
def test_follow_is_the_longest_suffix_that_occurs(text: list[int], path: list[int]) -> None:
    """Down any path of tokens, known and unknown."""
    automaton = automaton_of(text)
    cursor, context = automaton.here(), longest(text, text, 2)
    for token in path:
        cursor = automaton.follow(cursor, token)
        context = longest(text, [*context, token], 1)
        assert cursor.length == len(context)
        check_contexts(automaton, cursor, text, context)


@given(parts=st.lists(texts, min_size=2, max_size=3))
def test_no_context_reaches_over_a_separator(parts: list[list[int]]) -> None:
    """What followed, over all the texts, is the sum of what followed in each."""
    automaton = automaton_of([token for part in parts for token in [*part, SEPARATOR]])
    for start in range(len(parts[0])):
        cursor = Cursor(0, 0)
        for token in parts[0][start : start + 3]:
            cursor = automaton.follow(cursor, token)
            context = parts[0][start : start + 3][: cursor.length]
            told = dict(automaton.contexts(cursor, cursor.length)).get(cursor.length, [])
            assert Counter(dict(told)) == sum((followers(part, context) for part in parts), Counter())


def test_equal_counts_stand_the_last_to_appear_first() -> None:
    """2 follows 1 later than 3 does: it is the better guess."""
    ((_, found),) = automaton_of([1, 3, 1, 2, 1]).contexts(automaton_of([1, 3, 1, 2, 1]).here(), 1)
    assert found == [(2, 1), (3, 1)]


@pytest.mark.parametrize("text", [[1] * 30_000, [1, 2] * 15_000, list(range(30_000))], ids=["one", "two", "all"])
def test_the_worst_texts_take_linear_time(text: list[int]) -> None:
    """Without the bound on contexts, 30,000 equal tokens would take minutes."""
    started = process_time()
    automaton = automaton_of(text)
    assert process_time() - started < 5
    assert automaton.here().length in (0, MAX_CONTEXT)
