"""The SSM without weights: law and trees against a search through the text, books against a worker's promises."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssm_worker.automaton import MAX_CONTEXT, SEPARATOR, SuffixAutomaton
from ssm_worker.suffix import SuffixDrafter
from ssm_worker.texts import HeldTexts
from treecore.errors import ConfigError
from treecore.expand import NO_DRAFT, Expansion, Growth
from treecore.messages import DraftItem, DraftReply, DraftRequest, RequestId, WorkerId, join_tree
from treecore.noise import Seed, gumbel
from treecore.params import SamplingParams
from treecore.testing.draft_steps import GREEDY, draft_step, drafted
from treecore.testing.draft_steps import draft_item as item
from treecore.testing.statistics import chi_square, chi_square_limit

VOCAB_SIZE = 40
CONTEXT_LEN = 200
SAMPLED = SamplingParams(0.8, 0, 1.0, Seed(2**63 + 11))
DRAWING = replace(SAMPLED, temperature=1.0, rule="multi_step")
MIN_MATCH = 2

Path = tuple[int, ...]


def drafter(
    num_blocks: int = 64, block_len: int = 8, context_len: int = CONTEXT_LEN, corpus: SuffixAutomaton | None = None
) -> SuffixDrafter:
    """One that holds nothing."""
    return SuffixDrafter(
        WorkerId("s"), HeldTexts(num_blocks, block_len), VOCAB_SIZE, context_len, MIN_MATCH, corpus=corpus
    )


def step(ssm: SuffixDrafter, *items: DraftItem, session: str = "me", released: tuple[str, ...] = ()) -> DraftReply:
    """One step."""
    return draft_step(ssm.step, *items, session=session, released=released)


def slow_law(text: Sequence[int], context: Sequence[int]) -> dict[int, float]:
    """Shares by definition: one context for each set of places, the longest first, 3 doubts each."""
    shares: dict[int, float] = {}
    left, places_before = 1.0, None
    for size in range(min(len(context), MAX_CONTEXT), MIN_MATCH - 1, -1):
        suffix = list(context[-size:])
        places = [end for end in range(size, len(text) + 1) if list(text[end - size : end]) == suffix]
        followers = Counter(text[end] for end in places if end < len(text))
        if places == places_before or not followers:
            continue
        places_before = places
        evidence = followers.total() * size
        for token, count in followers.items():
            shares[token] = shares.get(token, 0.0) + left * count * size / (evidence + 3)
        left *= 3 / (evidence + 3)
        if left < 0.01:
            break
    return shares


def slow_paths(text: list[int], depth: int) -> dict[Path, float]:
    """Every path that the law leads to, with the log of its probability."""
    found, level = {}, {(): 0.0}
    for _ in range(depth):
        level = {
            (*path, token): total + math.log(share)
            for path, total in level.items()
            for token, share in slow_law(text, [*text, *path]).items()
        }
        found |= level
    return found


random_texts = st.integers(1, 4).flatmap(lambda size: st.lists(st.integers(0, size), min_size=1, max_size=60))
repeats = st.builds(lambda part, times: part * times, st.lists(st.integers(0, 2), max_size=9), st.integers(1, 8))
texts = st.builds(lambda text, more: text + more, repeats, random_texts)


@settings(max_examples=60)
@given(text=texts, max_nodes=st.integers(1, 12))
def test_growth_tells_the_most_likely_paths(text: list[int], max_nodes: int) -> None:
    """The best of all paths of up to three tokens, ancestors first, with the shares of the definition."""
    wanted = slow_paths(text, 3)
    growth = Growth(1, 1, VOCAB_SIZE, max_nodes)
    reply = step(drafter(context_len=len(text) + 3), item(text, growth=growth))
    tree, scores = drafted(reply, text[-1]), reply.items[0].scores
    assert scores is not None
    assert scores.dtype == np.float32
    totals = [0.0]
    for parent, score in zip(tree.parents[1:].tolist(), scores.tolist(), strict=True):
        totals.append(totals[parent] + score)
    assert totals == pytest.approx([0.0, *(wanted[path] for path in list(tree.paths())[1:])], abs=1e-5)
    assert totals[1:] == pytest.approx(sorted(wanted.values(), reverse=True)[:max_nodes], abs=1e-5)


@given(text=texts)
def test_levels_are_the_whole_law_where_they_are_wide_enough(text: list[int]) -> None:
    """<40,40> has every path of two tokens; best first among siblings."""
    tree = drafted(step(drafter(), item(text, (VOCAB_SIZE, VOCAB_SIZE))), text[-1])
    wanted = slow_paths(text, 2)
    paths = list(tree.paths())[1:]
    assert sorted(paths) == sorted(wanted)
    children = [wanted[path] for path in paths if len(path) == 1]
    assert children == pytest.approx(sorted(children, reverse=True))


@given(text=texts, seed=st.integers(0, 2**64 - 1))
def test_a_sampled_request_gets_the_tokens_that_its_noise_favours(text: list[int], seed: int) -> None:
    """The best of log share + G, with the LLM's own noise at that position."""
    law = slow_law(text, text)
    params = replace(SAMPLED, seed=Seed(seed))
    tree = drafted(step(drafter(), item(text, (2,), params=params)), text[-1])
    noisy = {token: math.log(law[token]) + float(gumbel(Seed(seed), len(text), np.array([token]))[0]) for token in law}
    assert tree.tokens[1:].tolist() == sorted(noisy, key=lambda token: -noisy[token])[:2]


def test_noise_is_drawn_for_the_most_frequent_followers_alone() -> None:
    """The 21 that followed once do not get a chance against the sixteen that followed twice."""
    frequent, rare = range(2, 18), range(18, 39)
    text = [token for follower in [*frequent, *frequent, *rare] for token in (0, 1, follower)] + [0, 1]
    tree = drafted(step(drafter(), item(text, (VOCAB_SIZE,), params=SAMPLED)), 1)
    assert sorted(tree.tokens[1:].tolist()) == list(frequent)


def test_draws_follow_the_law_that_is_told() -> None:
    """multi_step: the first child of 3000 seeds (chi-square, false alarm once in 10^6); the second is another token."""
    text = [1, 2, 3, 1, 2, 3, 1, 2, 4, 1, 2, 5, 9, 9, 1, 2]
    law = slow_law(text, text)
    seen: Counter[int] = Counter()
    for seed in range(3000):
        params = replace(DRAWING, seed=Seed(seed))
        tree = drafted(step(drafter(), item(text, (2,), params=params)), text[-1])
        first, second = tree.tokens[1:].tolist()
        assert first != second
        seen[first] += 1
    told = tree.laws[0, 0]
    assert told.token_ids.tolist() == sorted(law)
    np.testing.assert_allclose(told.q, [law[token] / sum(law.values()) for token in sorted(law)], rtol=1e-5)
    masses = told.q.astype(np.float64)
    counts = [seen[token] for token in sorted(law)]
    assert chi_square(counts, (masses / masses.sum()).tolist()) < chi_square_limit(len(law), 1e-6)


def test_nothing_repeats_nothing_is_drafted() -> None:
    """An empty tree, by every rule; a repeat of a single token is none."""
    for params in (GREEDY, SAMPLED, DRAWING):
        reply = step(drafter(), item([1, 2, 3, 4, 1], (2, 2), params=params))
        assert len(drafted(reply, 1)) == 1
        assert reply.items[0].laws is None


def test_a_long_repeat_is_drafted_far_ahead() -> None:
    """A growth's forwards cost nothing here and do not bound the depth; the context does."""
    text = [*range(30), 39, *range(4)]
    chain = drafted(step(drafter(), item(text, growth=Growth(1, 1, 2, 20))), 3)
    assert list(chain.paths())[-1] == tuple(range(4, 24))
    short = drafted(step(drafter(context_len=len(text) + 5), item(text, growth=Growth(1, 1, 2, 20))), 3)
    assert len(short) == 6


def test_a_corpus_is_drafted_from_until_the_text_knows_better() -> None:
    """No match in the text: the corpus's. A match as long in both: the text's first."""
    corpus = SuffixAutomaton()
    for token in [SEPARATOR, 5, 6, 7, 8, SEPARATOR, 5, 6, 9, SEPARATOR]:
        corpus.append(token)
    ssm = drafter(corpus=corpus)
    assert list(drafted(step(ssm, item([1, 5, 6, 7], (2,))), 7).paths())[1:] == [(8,)]
    both = drafted(step(ssm, item([5, 6, 3, 1, 5, 6], (9,))), 6)
    assert both.tokens[1:].tolist() == [3, 9, 7]


# -- books ------------------------------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(text=texts, cuts=st.lists(st.integers(1, 60), max_size=6), back=st.integers(0, 3))
def test_growing_texts_draft_as_fresh_ones(text: list[int], cuts: list[int], back: int) -> None:
    """Step after step, with tokens sent again, and once other ones: the tree of a drafter that sees all at once."""
    ssm, held = drafter(), 0
    for cut in sorted({min(cut, len(text)) for cut in cuts} | {len(text)}):
        start = max(0, min(held, cut - 1) - back)
        tree = drafted(step(ssm, item(text[:cut], (2, 2), start)), text[cut - 1])
        held = cut
    other = [*text[: max(1, len(text) // 2)], 7]
    for committed in (other, text):
        sent = item(committed, (2, 2))
        tree = drafted(step(ssm, sent), committed[-1])
        fresh = drafted(step(drafter(), sent), committed[-1])
        assert list(tree.paths()) == list(fresh.paths())


REFUSED: list[tuple[str, DraftItem]] = [
    ("malformed_message", item([1, VOCAB_SIZE], (1,))),
    ("malformed_message", item([-1, 1], (1,))),
    ("malformed_message", item([], (1,))),
    ("malformed_message", replace(item([1, 2], (1,)), start=-1)),
    ("malformed_message", item([1, 2], (2, 0))),
    ("malformed_message", item([1, 2], (64, 64, 64))),
    ("malformed_message", item([1] * (CONTEXT_LEN + 1))),
    ("malformed_message", item([1] * (CONTEXT_LEN - 1), (1, 1, 1))),
    ("malformed_message", item([1, 2], growth=Growth(1, 1, 1, 1), params=DRAWING)),
    ("malformed_message", item([1, 2], (1,), growth=Growth(1, 1, 1, 1))),
    ("state_missing", item([1, 2, 3], (1,), 2, params=GREEDY)),
    ("state_missing", item([1, 2, 3], (1,), params=None)),
    ("out_of_blocks", item([1] * 180)),
]


@pytest.mark.parametrize(("reason", "bad"), REFUSED)
def test_a_refused_item_harms_no_other(reason: str, bad: DraftItem) -> None:
    """Between two sound ones; a release gives everything back."""
    ssm = drafter(num_blocks=20)
    sound = [item([5, 6, 7, 5, 6], (1, 1), request_id=RequestId(name)) for name in "ab"]
    reply = step(ssm, sound[0], bad, sound[1])
    assert [(refused.request_id, refused.reason) for refused in reply.refused] == [("r", reason)]
    for name in "ab":
        assert list(drafted(reply, 6, name).paths())[1:] == [(7,), (7, 5)]
    assert step(ssm, released=("a", "b", "r")).blocks.used == 0


def test_a_request_twice_in_a_message_is_refused_once() -> None:
    """Only one of them can be followed."""
    reply = drafter().step(DraftRequest("me", 0, (), (item([1, 2]), item([1, 2, 3]))))
    assert [refused.reason for refused in reply.refused] == ["malformed_message"]


def test_the_longest_unheard_of_is_forgotten_for_others() -> None:
    """Four requests of five blocks in 16: the first gives way, and says so when it comes again."""
    ssm = drafter(num_blocks=16)
    for name in "abcd":
        assert step(ssm, item([1] * 40, request_id=RequestId(name))).refused == ()
    more = step(ssm, *[item([1] * 41, (1,), 40, request_id=RequestId(name)) for name in "bad"])
    assert [(refused.request_id, refused.held_len, refused.reason) for refused in more.refused] == [
        ("a", 0, "state_missing")
    ]
    assert more.blocks.used == 12  # c went for the sixth blocks of b and d


def test_requests_of_one_message_do_not_push_each_other_out() -> None:
    """What does not fit is refused: it would be read again in every step."""
    ssm = drafter(num_blocks=10)
    items = [item([1] * 40, request_id=RequestId(name)) for name in "abc"]
    for _ in range(2):
        assert [(refused.request_id, refused.reason) for refused in step(ssm, *items).refused] == [
            ("c", "out_of_blocks")
        ]


def test_release_and_session_change_free_everything() -> None:
    """What is released is free at once; a new session starts from nothing."""
    ssm = drafter()
    step(ssm, *[item([1, 2, 3], (2,), request_id=RequestId(name)) for name in "abc"])
    assert step(ssm, released=("a", "a", "nobody")).blocks.used == 2
    reply = step(ssm, item([1, 2, 3, 4], (1,), 3, request_id=RequestId("b")), session="next")
    assert [refused.reason for refused in reply.refused] == ["state_missing"]
    assert reply.blocks.used == 0


def test_books_without_a_block_are_refused() -> None:
    """A worker that could hold nothing does not start."""
    with pytest.raises(ConfigError, match="--kv-tokens"):
        drafter(num_blocks=0)


WILD = replace(DRAWING, repetition_penalty=1.3, bias_ids=(1, 2), biases=(-100.0, 2.0), min_tokens=9, end_token_ids=(1,))
wild_items = st.builds(
    DraftItem,
    st.sampled_from(["a", "b", "c"]).map(RequestId),
    st.integers(0, 3),
    st.integers(-1, 12),
    st.lists(st.integers(-1, 3) | st.just(VOCAB_SIZE), max_size=20).map(lambda ids: np.array(ids, np.int32)),
    st.sampled_from([None, GREEDY, SAMPLED, DRAWING, WILD, replace(WILD, top_p=0.0, rule="multi_step_iid")]),
    st.lists(st.integers(-1, 3), max_size=4).map(lambda widths: Expansion(tuple(widths))) | st.just(NO_DRAFT),
    st.none() | st.builds(Growth, st.integers(0, 2), st.integers(1, 2), st.integers(1, 3), st.integers(1, 20)),
)
wild_requests = st.builds(
    DraftRequest,
    st.sampled_from(["me", "other"]),
    st.integers(0, 1),
    st.lists(st.sampled_from(["a", "b"]).map(RequestId), max_size=2).map(tuple),
    st.lists(wild_items, max_size=4).map(tuple),
)


@settings(max_examples=150)
@given(requests=st.lists(wild_requests, min_size=1, max_size=6))
def test_wild_requests_never_break_the_drafter(requests: list[DraftRequest]) -> None:
    """Whatever comes: a tree or a refusal for each item, the books in balance, and sound work goes on."""
    ssm = drafter(num_blocks=6, block_len=4)
    for request in requests:
        reply = ssm.step(request)
        assert len(reply.items) + len(reply.refused) == len(request.items)
        assert reply.blocks.free >= 0
        assert reply.blocks.room + reply.blocks.used == reply.blocks.total
        for entry in reply.items:
            join_tree(0, entry.tokens, entry.parents, 0, entry.laws)
    assert step(ssm, item([1, 2, 3, 1, 2], (2,)), session="sound").refused == ()
    assert step(ssm, released=("r",), session="sound").blocks.used == 0
