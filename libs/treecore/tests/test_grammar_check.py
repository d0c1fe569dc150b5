"""Which grammars are refused, and that refusing is cheap."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treecore.errors import ConfigError, InvalidRequest
from treecore.grammar import MAX_CHECK_S, GrammarCompiler
from treecore.lark import MAX_LARK_BYTES, MAX_SOURCE_BYTES
from treecore.params import Grammar, GrammarKind
from treecore.testing.tokenizers import save_byte_level

_INT = {"type": "integer"}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a tokenizer of 260 tokens."""
    directory = tmp_path_factory.mktemp("model")
    save_byte_level(directory, [])
    return directory


@pytest.fixture(scope="module")
def compiler(model_dir: Path) -> GrammarCompiler:
    """For a head as large as the tokenizer."""
    return GrammarCompiler.from_dir(model_dir, 260, [2])


def _nested(depth: int) -> str:
    return '{"properties":{"a":' * depth + "{}" + "}}" * depth


def _chain(length: int) -> str:
    return "start:r0\n" + "\n".join(f"r{idx}:r{idx + 1}" for idx in range(length)) + f'\nr{length}:"a"'


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {},
        {"type": "object", "properties": {"a": _INT, "b": {"type": ["string", "null"]}}, "required": ["a"]},
        {"type": "array", "items": {"anyOf": [_INT, {"const": {"not": "a keyword here"}}]}, "minItems": 1},
        {"$defs": {"tree": {"properties": {"left": {"$ref": "#/$defs/tree"}}}}, "$ref": "#/$defs/tree"},
        {"title": "T", "description": "d", "default": {"if": 1}, "x-order": 1, **_INT, "minimum": 0},
        {"type": "number", "multipleOf": 0.01},
        {"anyOf": [{"type": "string", "pattern": "^[a-z]+$"}, {"type": "string", "format": "date"}]},
        {"enum": ["a", 1, None, {"uniqueItems": True}]},
    ],
)
def test_schemas_that_are_served(compiler: GrammarCompiler, schema: object) -> None:
    """What people send."""
    compiler.check(Grammar("json_schema", json.dumps(schema)))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "uniqueItems": True},
        {"properties": {"a": {"not": {}}}},
        {"$defs": {"a": {"if": {}, "then": {}}}},
        {"items": [{"contains": {}}]},
        {"additionalProperties": {"dependentRequired": {}}},
        {"anyOf": [{"propertyNames": {}}]},
        {"unevaluatedProperties": False},
        {"$dynamicRef": "#a"},
        {"minlength": 3},
        {"type": "string", "nullable": True},
        {"x-guidance": {"lenient": True}},
    ],
)
def test_no_keyword_is_quietly_ignored(compiler: GrammarCompiler, schema: object) -> None:
    """Unsupported ones, unknown ones and the library's own switches, at any depth, are refused by name."""
    with pytest.raises(InvalidRequest, match="keyword"):
        compiler.check(Grammar("json_schema", json.dumps(schema)))


@pytest.mark.parametrize(
    "source",
    [
        *("", "{", "[]", "3", "null", "false", '{"type": "foo"}', '{"type": "string", "minLength": "3"}'),
        *('{"$ref": "http://example.com/a"}', '{"$ref": "#/$defs/none"}', '{"$ref": "#"}', '{"enum": []}'),
        *('{"oneOf": [{"type": "integer"}, {"type": "number"}]}', '{"type": "string", "pattern": "(?=a)"}'),
        *('{"type": "integer", "minimum": 5, "maximum": 3}', '{"type": "integer", "multipleOf": 99991}'),
        *('{"minimum": NaN}', '{"minimum": 1e999}', '{"minimum": %s}' % ("1" * 5000), '{"const": "\\ud800"}'),
        *('{"type": "string", "format": "zip"}', "[" * 60_000, _nested(200), '{"title": "%s"}' % ("a" * 70_000)),
    ],
)
def test_broken_schemas_are_refused(compiler: GrammarCompiler, source: str) -> None:
    """Malformed, unsatisfiable, too deep, too large or with values of the wrong type."""
    with pytest.raises(InvalidRequest):
        compiler.check(Grammar("json_schema", source))


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        *[("regex", source) for source in ("(", "a\\", "(?=a)b", r"a\b", r"[^\s\S]", "\ud800", "a" * 70_000)],
        *[("regex", source) for source in ("(" * 10_000 + ")" * 10_000, "a" + "*" * 20_000)],
        *[("choice", source) for source in ("", "[]", "{}", "[1]", '["a", null]', '["\\ud800"]', '"a"')],
        *[("choice", json.dumps(["a"] * 1001))],
        *[("lark", source) for source in ("", "start: <|im_start|>", "start: <[5]>", "start: start", "start: x")],
        *[("lark", source) for source in ("start: %json {}", "start: a\na[max_tokens=3]: /x/", "start: @other")],
        *[("lark", source) for source in ("start: " + "(" * 4000, _chain(300) + "x:y", _chain(5000))],
    ],
)
def test_other_broken_grammars_are_refused(compiler: GrammarCompiler, kind: GrammarKind, source: str) -> None:
    """Among them what would overflow the library's stack."""
    with pytest.raises(InvalidRequest):
        compiler.check(Grammar(kind, source))


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        *[("regex", source) for source in ("", "a|b", "^a/b$", r"\d{3}-\d{4}", '/ | "x"', "a\nb", "(a{1000}){1000}")],
        *[("choice", source) for source in ('["yes", "no"]', '["", "a/b\\n\\"é"]')],
        *[("lark", source) for source in ('start: "<s>" | /[<>]+/ // <s>', _chain(340))],
        ("json_object", ""),
    ],
)
def test_other_grammars_that_are_served(compiler: GrammarCompiler, kind: GrammarKind, source: str) -> None:
    """Quotes, slashes and angle brackets are text; the longest chain of rules does not harm."""
    compiler.check(Grammar(kind, source))


@settings(max_examples=80)
@given(kind=st.sampled_from(["json_schema", "regex", "choice", "lark"]), source=st.text(max_size=60))
def test_any_text_is_served_or_refused(compiler: GrammarCompiler, kind: GrammarKind, source: str) -> None:
    """No other exception, no crash."""
    try:
        compiler.check(Grammar(kind, source))
    except InvalidRequest as error:
        assert error.reason == "invalid_value"  # noqa: PT017 - either is right


_JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "properties", "items", "anyOf", "allOf", "enum", "const", "multipleOf", "minimum"])
            | st.text(max_size=4),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@settings(max_examples=80)
@given(schema=_JSON_VALUES)
def test_any_json_is_served_or_refused(compiler: GrammarCompiler, schema: object) -> None:
    """Schemas of the wrong shape."""
    try:
        compiler.check(Grammar("json_schema", json.dumps(schema)))
    except InvalidRequest as error:
        assert error.reason == "invalid_value"  # noqa: PT017 - either is right


def test_sources_are_bounded() -> None:
    """Small enough for a message, and for the stack."""
    assert MAX_LARK_BYTES < MAX_SOURCE_BYTES < 128 * 1024


def test_what_takes_too_long_is_refused(model_dir: Path) -> None:
    """By the thread's own CPU time, so that a busy machine refuses nothing."""
    slow = iter([0.0, MAX_CHECK_S + 0.1])
    compiler = GrammarCompiler.from_dir(model_dir, 260, [2], cpu_clock=lambda: next(slow))
    with pytest.raises(InvalidRequest, match="too complex"):
        compiler.check(Grammar("json_object", ""))


@pytest.mark.parametrize("ends", [[], [-1], [260], [5000]])
def test_ends_must_be_tokens(model_dir: Path, ends: Sequence[int]) -> None:
    """A grammar that cannot end would never stop."""
    with pytest.raises(ConfigError):
        GrammarCompiler.from_dir(model_dir, 300, ends)


@pytest.mark.parametrize("text", [None, "", "gpt2", "[]", "{}", '{"model": {}}', b"\xff"])
def test_a_broken_tokenizer_is_a_config_error(tmp_path: Path, text: str | bytes | None) -> None:
    """Missing, no JSON, another's name (which must not be looked up), or of an unknown kind."""
    if text is not None:
        (tmp_path / "tokenizer.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        GrammarCompiler.from_dir(tmp_path, 260, [2])


def test_a_head_smaller_than_the_tokenizer(model_dir: Path) -> None:
    """Tokens that the model does not have are not allowed."""
    masks = GrammarCompiler.from_dir(model_dir, 200, [2]).start(Grammar("regex", "(?s).")).masks([], [()])
    assert masks.shape == (1, 200)
    assert masks[0, 4 + ord("a")]


def test_an_end_that_reads_as_text_is_an_end(model_dir: Path) -> None:
    """Some models end with a token that has a spelling: it ends, and is never taken for that text."""
    end = 4 + ord(";")
    state = GrammarCompiler.from_dir(model_dir, 260, [2, end]).start(Grammar("choice", '["a;b", "a"]'))
    letter = 4 + ord("a")
    masks = state.masks([], [(), (letter,), (letter, end)])
    assert [row.nonzero()[0].tolist() for row in masks] == [[letter], [2, end], []]
