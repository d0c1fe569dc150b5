"""The corpus of an SSM without weights: what is read of a file, and what is wrong with it."""

from pathlib import Path

import pytest

from ssm_worker.automaton import NOWHERE, SuffixAutomaton
from ssm_worker.corpus import read_corpus
from treecore.errors import ConfigError
from treecore.testing.tiny import VOCAB_SIZE, save_random_llama


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose token b + 1 is byte b."""
    return save_random_llama(tmp_path_factory.mktemp("llm"), num_layers=1, seed=0)


def after(automaton: SuffixAutomaton, text: str) -> str:
    """The bytes that followed `text` in the corpus, sorted; nothing where it is not in it."""
    cursor = NOWHERE
    for byte in text.encode():
        cursor = automaton.follow(cursor, byte + 1)
    if cursor.length < len(text):
        return ""
    _, followers = next(automaton.contexts(cursor, len(text)), (0, []))
    return "".join(sorted(chr(token - 1) for token, _ in followers))


def test_each_line_is_a_text_of_its_own(tmp_path: Path, model_dir: Path) -> None:
    """Empty lines are none; no context goes from one text to the next."""
    path = tmp_path / "texts.jsonl"
    path.write_text('{"text": "abc"}\n\n{"text": "abd", "other": 1}\n')
    automaton = read_corpus(path, model_dir, VOCAB_SIZE, 100)
    assert (after(automaton, "ab"), after(automaton, "bc"), after(automaton, "ca")) == ("cd", "", "")


def test_the_corpus_is_cut_where_it_is_told(tmp_path: Path, model_dir: Path) -> None:
    """A separator and three tokens each: of the second text one token is left."""
    path = tmp_path / "texts.jsonl"
    path.write_text('{"text": "abc"}\n{"text": "xyz"}\n{"text": "uvw"}\n')
    automaton = read_corpus(path, model_dir, VOCAB_SIZE, 6)
    assert (after(automaton, "ab"), after(automaton, "x"), after(automaton, "u")) == ("c", "", "")


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ('{"text": "a"}\n{"prompt": "b"}\n', "line 2: expected an object"),
        ("[1]\n", "line 1: expected"),
        ('{"text": 5}\n', "line 1: the text is no string"),
        ("nothing\n", "line 1: expected"),
        (b"\xff\n", "cannot be read"),
        (None, "cannot be read"),
    ],
)
def test_what_is_no_corpus_is_refused(tmp_path: Path, model_dir: Path, content: str | bytes | None, match: str) -> None:
    """Naming file and line."""
    path = tmp_path / "texts.jsonl"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match=match):
        read_corpus(path, model_dir, VOCAB_SIZE, 100)


def test_a_corpus_needs_the_llms_tokenizer(tmp_path: Path) -> None:
    """One line that names it."""
    path = tmp_path / "texts.jsonl"
    path.write_text('{"text": "a"}\n')
    with pytest.raises(ConfigError, match=r"tokenizer\.json: cannot be read"):
        read_corpus(path, tmp_path, VOCAB_SIZE, 100)
