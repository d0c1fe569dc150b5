"""Masks: against a slow oracle, as a function of their arguments alone, and what broke other servers."""

import json
import random
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treecore.errors import InvalidRequest
from treecore.grammar import GrammarCompiler, GrammarState
from treecore.params import Grammar
from treecore.testing.tokenizers import SmallTokenizer, save_byte_fallback, save_byte_level

_WORDS = ("ab", "ba", "aab", "abc", '{"', '":', '"}', ', "', " a", "true", "<s>", "é", "😀a", "\n  ")
_HALVES = (b"\xc3\xa9a", b"a\xc3", b"\x9f\x98", b"\xf0\x9f")
_PADDING = 37
_SCHEMA = {
    "type": "object",
    "properties": {
        "ab": {"type": "string", "maxLength": 4},
        "n": {"enum": [1, 22, None, True]},
        "list": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["ab", "n", "list"],
    "additionalProperties": False,
}
_JSON = Grammar("json_schema", json.dumps(_SCHEMA))
_EXPONENTIAL = Grammar("regex", "(a|b)*a(a|b){16}")  # a state for each of the last 17 letters' patterns
_GRAMMARS = (
    _JSON,
    Grammar("json_object", ""),
    Grammar("regex", r"(ab?|é+c){2,5}(😀a)*"),
    Grammar("lark", 'start: "a" start "b" | WORD\nWORD: /[b<]{1,3}/'),
)


class Model:
    """A tokenizer, its compiler, and a head with a few ids of padding."""

    def __init__(self, directory: Path, save: Callable[[Path], SmallTokenizer]) -> None:
        self.tokenizer = save(directory)
        self.vocab_size = len(self.tokenizer.pieces) + _PADDING
        self.compiler = GrammarCompiler.from_dir(directory, self.vocab_size, self.tokenizer.ends)

    def state(self, grammar: Grammar) -> GrammarState:
        return self.compiler.start(grammar)

    def choice(self, *choices: str) -> GrammarState:
        return self.state(Grammar("choice", json.dumps(choices)))

    def allowed(self, state: GrammarState, text: str) -> set[int]:
        return set(np.flatnonzero(state.masks(self.tokenizer.encode(text), [()])[0]).tolist())

    def pieces(self, ids: set[int]) -> set[bytes]:
        return {piece for token in ids if (piece := self.tokenizer.pieces[token]) is not None}


@pytest.fixture(scope="module", params=["byte_level", "byte_fallback"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Either kind of tokenizer."""
    if request.param == "byte_level":
        words = [*(word.encode() for word in _WORDS if word != "<s>"), *_HALVES]
        return Model(tmp_path_factory.mktemp("model"), lambda path: save_byte_level(path, words))
    words_ = [word for word in (*_WORDS, " ", "a", "b") if word not in ("<s>", "\n  ")]
    return Model(tmp_path_factory.mktemp("model"), lambda path: save_byte_fallback(path, words_))


def _oracle(model: Model, choices: Sequence[str], path: Sequence[int]) -> np.ndarray:
    """What a list of choices allows behind a path, by comparing bytes."""
    texts = [choice.encode() for choice in choices]
    said = model.tokenizer.spell(path)
    allowed = np.zeros(model.vocab_size, np.bool_)
    if said is None:
        return allowed
    for token, piece in enumerate(model.tokenizer.pieces):
        allowed[token] = piece is not None and any(text.startswith(said + piece) for text in texts)
    allowed[list(model.tokenizer.ends)] = said in texts
    return allowed


def _walk(model: Model, state: GrammarState, rng: random.Random, length: int, noise: float = 0.0) -> list[int]:
    """A path that mostly keeps to the grammar; with noise, any id (also ends, special ones, padding, none at all)."""
    path: list[int] = []
    for _ in range(length):
        allowed = np.flatnonzero(state.masks(path, [()])[0]).tolist()
        if rng.random() < noise or not allowed:
            path.append(rng.randrange(-2, model.vocab_size + 2))
        else:
            path.append(rng.choice(allowed))
    return path


@settings(max_examples=40)
@given(
    choices=st.lists(st.text("abé😀<s>\n", max_size=6), min_size=1, max_size=6),
    seed=st.integers(0, 2**32),
)
def test_choices_equal_the_oracle(model: Model, choices: list[str], seed: int) -> None:
    """Every node of random trees, duplicates and broken paths included, over a growing output."""
    rng = random.Random(seed)
    state, guide = model.choice(*choices), model.choice(*choices)
    output = _walk(model, guide, rng, rng.randrange(4))
    for _ in range(3):
        whole = [_walk(model, guide, rng, rng.randrange(6), noise=0.1) for _ in range(6)]
        below = [tuple(path) for path in whole]
        masks = state.masks(output, below)
        for row, path in zip(masks, below, strict=True):
            assert (row == _oracle(model, choices, [*output, *path])).all()
        output = [*output, *below[0][:2]]


@settings(max_examples=16)
@given(grammar=st.sampled_from(_GRAMMARS), seed=st.integers(0, 2**32))
def test_masks_depend_on_their_arguments_alone(model: Model, grammar: Grammar, seed: int) -> None:
    """A used state and a fresh one for each path agree, whatever came before and in whatever order."""
    rng = random.Random(seed)
    used, guide = model.state(grammar), model.state(grammar)
    paths = [_walk(model, guide, rng, rng.randrange(12), noise=0.05) for _ in range(4)]
    for _ in range(4):
        whole = rng.choice(paths)
        cut = rng.randrange(len(whole) + 1)
        others = [tuple(path[cut:]) for path in paths if path[:cut] == whole[:cut]]
        below = rng.sample(others, len(others)) + [tuple(whole[cut:middle]) for middle in range(cut, len(whole) + 1)]
        masks = used.masks(whole[:cut], below)
        for row, path in zip(masks, below, strict=True):
            assert (row == model.state(grammar).masks([*whole[:cut], *path], [()])[0]).all()


@settings(max_examples=25)
@given(grammar=st.sampled_from(_GRAMMARS), seed=st.integers(0, 2**32))
def test_a_token_is_allowed_exactly_if_its_path_goes_on(model: Model, grammar: Grammar, seed: int) -> None:
    """The mask of a child is empty exactly where its parent's mask excludes it, or it is an end."""
    state = model.state(grammar)
    path = _walk(model, state, random.Random(seed), seed % 7)
    tokens = range(0, model.vocab_size, 3)
    masks = state.masks(path, [(), *((token,) for token in tokens)])
    for token, row in zip(tokens, masks[1:], strict=True):
        assert row.any() == (masks[0, token] and token not in model.tokenizer.ends)


@pytest.mark.parametrize("seed", range(6))
def test_what_the_masks_allow_is_json_of_the_schema(model: Model, seed: int) -> None:
    """Any allowed token, again and again: it comes to an end, and the text fits the schema."""
    rng, state = random.Random(seed), model.state(_JSON)
    output: list[int] = []
    while not (allowed := state.masks(output, [()])[0])[list(model.tokenizer.ends)].all():
        output.append(rng.choice(np.flatnonzero(allowed).tolist()))
        assert len(output) < 400
    text = model.tokenizer.spell(output)
    assert text is not None
    answer = json.loads(text)
    assert answer.keys() == _SCHEMA["properties"].keys()  # type: ignore[attr-defined]
    assert isinstance(answer["ab"], str)
    assert len(answer["ab"]) <= 4
    assert answer["n"] in [1, 22, None, True]
    assert all(item in (True, False) for item in answer["list"])


def test_ends_are_allowed_exactly_where_the_text_may_end(model: Model) -> None:
    """All ends where it may end; nothing else where it must; padding and special tokens never."""
    state = model.choice("a", "ab")
    ends = set(model.tokenizer.ends)
    assert not model.allowed(state, "") & ends
    assert model.allowed(state, "a") >= ends
    assert model.pieces(model.allowed(state, "a")) == {b"b"}
    assert model.allowed(state, "ab") == ends


def test_special_tokens_are_no_text(model: Model) -> None:
    """A grammar that spells one gets it letter by letter."""
    for grammar in (Grammar("regex", "<s>"), Grammar("choice", '["<s>"]'), Grammar("lark", 'start: "<s>"')):
        assert model.pieces(model.allowed(model.state(grammar), "")) == {b"<"}
        assert not model.state(grammar).masks([1], [()]).any()


def test_characters_may_span_tokens(model: Model) -> None:
    """Half a character is no end, and only its own bytes follow."""
    state = model.choice("é", "e")
    assert {b"\xc3"} <= model.pieces(model.allowed(state, ""))
    half = [model.tokenizer.pieces.index(b"\xc3")]
    (row,) = state.masks(half, [()])
    assert model.pieces(set(np.flatnonzero(row).tolist())) == {b"\xa9"}


def test_white_space_never_runs_on(model: Model) -> None:
    """One space, or a line's end with at most 20 blanks; none around the whole object."""
    state = model.state(Grammar("json_object", ""))
    assert not model.pieces(model.allowed(state, "")) & {b" ", b"\n"}
    assert not model.pieces(model.allowed(state, "{ ")) & {b" ", b"\n"}
    assert b" " in model.pieces(model.allowed(state, "{\n" + 19 * " "))
    assert b" " not in model.pieces(model.allowed(state, "{\n" + 20 * " "))
    assert model.allowed(state, "{}") == set(model.tokenizer.ends)


def test_nothing_follows_an_end(model: Model) -> None:
    """Behind an accepted end, in the output or in the tree, all rows are empty; a later call is as if it never was."""
    state = model.state(_JSON)
    text = model.tokenizer.encode('{"ab":"","n":1,"list":[]}')
    for end in model.tokenizer.ends:
        masks = state.masks(text, [(), (end,), (end, end), (end, text[0])])
        assert set(np.flatnonzero(masks[0]).tolist()) == set(model.tokenizer.ends)
        assert not masks[1:].any()
        assert not state.masks([*text, end], [(), (end,), (text[0],)]).any()
        assert not state.masks([*text, end, text[0]], [()]).any()
    assert (state.masks(text[:-1], [()]) == model.state(_JSON).masks(text[:-1], [()])).all()


def test_a_run_may_cross_from_trees_to_single_tokens_and_back(model: Model) -> None:
    """The grammar is in force at every step, whether the one before had a tree or not, accepted or rejected."""
    state, ids = model.state(_JSON), model.tokenizer.encode('{"ab":"aa","n":22,"list":[true,false]}')
    for start in range(len(ids)):
        below = [()] if start % 5 == 0 else [tuple(ids[start:end]) for end in range(start, min(start + 9, len(ids)))]
        masks = state.masks(ids[:start], [*below, (ids[0], ids[1]), tuple(reversed(ids))])
        for depth, row in enumerate(masks[: len(below)]):
            position = start + depth
            assert row[ids[position]], position


def test_any_depth_of_rollback(model: Model) -> None:
    """From the end of a long text to any of its prefixes, and to another text."""
    ids = model.tokenizer.encode("{" + ",".join(f'"a{n}":[{n}]' for n in range(60)) + "}")
    state = model.state(Grammar("json_object", ""))
    expected = [model.state(Grammar("json_object", "")).masks(ids[:end], [()]) for end in (0, 1, 100, len(ids))]
    for end, masks in zip((0, 1, 100, len(ids)), expected, strict=True):
        assert state.masks(ids, [()])[0, list(model.tokenizer.ends)].all()
        assert (state.masks(ids[:end], [()]) == masks).all()
        assert not state.masks([*ids[:end], ids[-1], ids[0]], [()]).any()


def test_output_may_be_an_array_and_the_tree_empty(model: Model) -> None:
    """As workers hold them."""
    state = model.choice("aab")
    ids = model.tokenizer.encode("a")
    assert (state.masks(np.array(ids, np.int32), [()]) == state.masks(ids, [()])).all()  # type: ignore[arg-type]
    assert state.masks(ids, []).shape == (0, model.vocab_size)


def test_a_failure_is_one_requests_own(model: Model) -> None:
    """A grammar without a sentence, or beyond the budget, is a typed error each time; other states go on."""
    other = model.choice("ab")
    with pytest.raises(InvalidRequest, match="any further") as failure:
        model.state(Grammar("json_schema", '{"$ref": "#"}')).masks([], [()])
    assert failure.value.reason == "grammar_failed"
    assert model.pieces(model.allowed(other, "a")) >= {b"b"}


def _words_over_ab(model: Model, first: str, length: int) -> list[tuple[int, ...]]:
    """All of this length that start so."""
    return [tuple(model.tokenizer.encode(first + "".join(rest))) for rest in product("ab", repeat=length - len(first))]


def test_the_budget_is_not_spent_by_other_branches(model: Model) -> None:
    """Bushes of 32,000 states, each beyond the budget together: every node has the mask that it has alone."""
    state = model.state(_EXPONENTIAL)
    before = state.masks([], [()])
    for first in ("aa", "ab", ""):
        assert state.masks([], _words_over_ab(model, first, 11)).any(axis=1).all()
    assert (state.masks([], [()]) == before).all()
