"""The shared corpus of an SSM without weights: texts of a JSON Lines file, in the LLM's tokens.

Knows the file and the tokenizer; must not know requests.
"""

import json
import logging
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer

from ssm_worker.automaton import SEPARATOR, SuffixAutomaton
from treecore.errors import ConfigError
from treecore.service.telemetry import log_event

logger = logging.getLogger(__name__)


def read_corpus(path: Path, model_dir: Path, vocab_size: int, max_tokens: int) -> SuffixAutomaton:
    """The texts ({"text": "..."} a line) in one automaton, until it has `max_tokens`; what comes then is left out.

    model_dir: has the LLM's tokenizer.json. Takes about 4 us and 300 bytes a token. Raises ConfigError naming the line.
    """
    tokenizer = _tokenizer(model_dir / "tokenizer.json")
    automaton, num_tokens = SuffixAutomaton(), 0
    for text in _texts(path):
        tokens = [token for token in tokenizer.encode(text, add_special_tokens=False).ids if token < vocab_size]
        for token in [SEPARATOR, *tokens][: max_tokens - num_tokens]:
            automaton.append(token)
        num_tokens += 1 + len(tokens)
        if num_tokens > max_tokens:
            log_event(logger, logging.WARNING, "corpus cut", max_tokens=max_tokens)
            break
    automaton.append(SEPARATOR)
    return automaton


def _tokenizer(path: Path) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(f"{path}: cannot be read as a tokenizer ({error})") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _texts(path: Path) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield _text(line, f"--corpus {path}, line {number}")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--corpus {path}: cannot be read ({error})") from error


def _text(line: str, where: str) -> str:
    try:
        text = json.loads(line)["text"]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ConfigError(f'{where}: expected an object like {{"text": "..."}}') from error
    if not isinstance(text, str):
        raise ConfigError(f"{where}: the text is no string")
    return text
