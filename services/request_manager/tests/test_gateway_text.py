"""Tokens to text: detokenisers against the tokenizer's own decode, templates, and what from_dir refuses."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders
from tokenizers.models import BPE

from request_manager.gateway.detokenise import Detokeniser, WindowVocabulary, vocabulary_of
from request_manager.gateway.testing import END, SPACED, tiny_codec, tiny_tokenizer
from request_manager.gateway.text import TextCodec, compile_template
from treecore.errors import ConfigError, InvalidRequest

BYTE_LEVEL = tiny_tokenizer()
BYTES = vocabulary_of(BYTE_LEVEL)
UNKNOWN_ID = BYTE_LEVEL.get_vocab_size() + 5


def sentencepiece_like() -> Tokenizer:
    """Spaces as ▁, unknown characters as byte tokens, one leading space stripped: Llama 2's decoder."""
    words = ["<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "é", "▁he", "llo", "</s>"]
    tokenizer = Tokenizer(BPE({word: id_ for id_, word in enumerate(words)}, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    return tokenizer


PIECES = sentencepiece_like()
WINDOW = vocabulary_of(PIECES)
EMOJI = [PIECES.token_to_id(f"<0x{byte:02X}>") for byte in "😀".encode()]


def text_of(detokeniser: Detokeniser, tokens: list[int]) -> str:
    """All that the detokeniser says."""
    return "".join([*map(detokeniser.push, tokens), detokeniser.finish()])


@given(st.lists(st.integers(0, UNKNOWN_ID)))
def test_byte_level_equals_decode(tokens: list[int]) -> None:
    """Any ids, valid UTF-8 or not, special or unknown: the same text as decoding all at once."""
    assert text_of(BYTES.detokeniser(), tokens) == BYTE_LEVEL.decode(tokens, skip_special_tokens=True)


@given(st.text(alphabet=st.characters(exclude_characters="<", exclude_categories=["Cs"])))
def test_byte_level_round_trip(text: str) -> None:
    """Text comes back from its tokens, and no piece on the way has a replacement character of its own."""
    tokens = BYTE_LEVEL.encode(text).ids
    detokeniser = BYTES.detokeniser()
    said = [detokeniser.push(token) for token in tokens]
    assert all(piece in text for piece in said)
    assert "".join(said) + detokeniser.finish() == text


def test_a_split_character_is_held_back() -> None:
    """The first bytes of an emoji are not text until its last byte is there; nothing is told twice."""
    detokeniser = BYTES.detokeniser()
    tokens = BYTE_LEVEL.encode("😀!").ids
    assert [detokeniser.push(token) for token in tokens] == ["", "", "😀", "!"]


def test_added_token_with_a_space() -> None:
    """An added token outside the byte alphabet stands for itself, as in tokenizers."""
    (token,) = BYTE_LEVEL.encode(SPACED).ids
    assert BYTES.detokeniser().push(token) == SPACED


@given(st.lists(st.integers(0, PIECES.get_vocab_size() + 2)))
def test_window_equals_decode(tokens: list[int]) -> None:
    """A tokenizer with byte fallback: runs of bytes, leading spaces, special tokens."""
    assert isinstance(WINDOW, WindowVocabulary)
    assert text_of(WINDOW.detokeniser(), tokens) == PIECES.decode(tokens, skip_special_tokens=True)


@given(st.lists(st.sampled_from([257, 258, 259, 260, 261, 0xE2, 0x83, 0xAD, 0x42]), max_size=12))
def test_window_with_spaces_and_bytes(tokens: list[int]) -> None:
    """The same where tokens meet the decoder's rules most often."""
    assert text_of(WINDOW.detokeniser(), tokens) == PIECES.decode(tokens, skip_special_tokens=True)


@pytest.mark.parametrize(("vocabulary", "tokenizer"), [(BYTES, BYTE_LEVEL), (WINDOW, PIECES)], ids=["bytes", "window"])
def test_spelling(vocabulary: Any, tokenizer: Tokenizer) -> None:
    """Each text token's bytes, put together, are the text, parts of characters included; special ones have a name."""
    text = "a hello é😀"
    tokens = tokenizer.encode(text).ids if vocabulary is BYTES else [258, 260, 261, 257, 259, *EMOJI]
    assert b"".join(map(vocabulary.spell, tokens)).decode() == text
    special = max(id_ for id_, token in tokenizer.get_added_tokens_decoder().items() if token.special)
    assert vocabulary.spell(special).decode() == tokenizer.id_to_token(special)
    assert vocabulary.spell(tokenizer.get_vocab_size() + 5) == b""


@given(st.lists(st.integers(0, UNKNOWN_ID)))
def test_decode_is_the_tokenizers(tokens: list[int]) -> None:
    """What an echo of token ids shows."""
    assert tiny_codec().decode(tokens) == BYTE_LEVEL.decode(tokens)


def test_chat_template() -> None:
    """Turns in order, then the opening of the answer; special tokens become their ids."""
    codec = tiny_codec()
    turns = [{"role": "system", "content": "hi"}, {"role": "user", "content": "é"}]
    rendered = codec.render_chat(turns)
    assert rendered == "<|start|>system\nhi<|end|>\n<|start|>user\né<|end|>\n<|start|>assistant\n"
    assert codec.encode_chat(turns).count(BYTE_LEVEL.token_to_id(END)) == 2


def test_a_template_may_refuse() -> None:
    """What the template raises is the client's error."""
    turns = [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]
    with pytest.raises(InvalidRequest, match="system must come first") as caught:
        tiny_codec().render_chat(turns)
    assert caught.value.param == "messages"


def test_a_template_is_sandboxed() -> None:
    """A template that came with weights reaches no Python internals."""
    codec = TextCodec(tiny_tokenizer(), compile_template("{{ messages.__class__.__mro__ }}", {}))
    with pytest.raises(InvalidRequest, match="unsafe"):
        codec.render_chat([{"role": "user", "content": "a"}])


def test_no_template() -> None:
    """A base model has no chat."""
    with pytest.raises(InvalidRequest, match="no chat template"):
        TextCodec(tiny_tokenizer()).encode_chat([{"role": "user", "content": "a"}])


def test_from_dir(tmp_path: Path) -> None:
    """Tokenizer, template and the special tokens that it names; a truncation of the tokenizer's own is lifted."""
    tokenizer = tiny_tokenizer()
    tokenizer.enable_truncation(2)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = {
        "bos_token": {"content": "<b>"},
        "eos_token": None,
        "chat_template": [{"name": "default", "template": "{{ bos_token }}{{ messages[0].content | tojson }}"}],
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    codec = TextCodec.from_dir(tmp_path)
    assert codec.render_chat([{"role": "user", "content": "é<"}]) == '<b>"é<"'
    assert len(codec.encode("abcdef")) == 6


def test_from_dir_prefers_the_template_file(tmp_path: Path) -> None:
    """chat_template.jinja wins over tokenizer_config.json."""
    tiny_tokenizer().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "old"}')
    (tmp_path / "chat_template.jinja").write_text("new")
    assert TextCodec.from_dir(tmp_path).render_chat([]) == "new"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", "{"),
        ("tokenizer_config.json", "{"),
        ("tokenizer_config.json", "[]"),
        ("tokenizer_config.json", "[" * 100_000),
        ("chat_template.jinja", "{% if %}"),
        ("chat_template.jinja", "\xff"),
    ],
    ids=range(6),
)
def test_from_dir_names_what_is_broken(tmp_path: Path, name: str, content: str) -> None:
    """One line for whoever started the server."""
    tiny_tokenizer().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / name).write_text(content, encoding="latin-1")
    with pytest.raises(ConfigError, match=name.split(".", maxsplit=1)[0].replace("chat_", "")):
        TextCodec.from_dir(tmp_path)


@pytest.mark.parametrize("template", [5, [5], [{}], [{"name": "default"}], [{"name": "default", "template": 5}]])
def test_what_is_no_template_is_none(tmp_path: Path, template: object) -> None:
    """The model can still be served, without chat."""
    tiny_tokenizer().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    with pytest.raises(InvalidRequest, match="no chat template"):
        TextCodec.from_dir(tmp_path).render_chat([])


@pytest.mark.parametrize("source", ["{{ 1 / 0 }}", "{{ messages.pop(9) }}", "{{ 'x' + 1 }}", "{{ messages[9].a.b }}"])
def test_a_template_may_fail_in_any_way(source: str) -> None:
    """It is a program; no request is a server error for it."""
    codec = TextCodec(tiny_tokenizer(), compile_template(source, {}))
    with pytest.raises(InvalidRequest, match="chat template refuses"):
        codec.render_chat([{"role": "user", "content": "a"}])


def test_from_dir_without_a_tokenizer(tmp_path: Path) -> None:
    """The missing file is named."""
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        TextCodec.from_dir(tmp_path)
