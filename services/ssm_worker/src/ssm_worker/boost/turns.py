"""The teacher's chat template, as the token ids around a user's turn. Knows text; must not know models or sampling."""

import importlib.resources
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from ssm_worker.boost.corpus import TeacherSequence
from treecore.errors import ConfigError

TokenIds = tuple[int, ...]

_MARK = "@espalier-user-turn@"


@dataclass(frozen=True, slots=True)
class Turns:
    """Token ids of a dialogue of one question.

    opening: all up to the user's words, system prompt included; bare_opening: without one, where the template has a
    system prompt. close: from the end of the user's words up to the assistant's. end: ends the assistant's turn.
    special: ids that no text contains.
    """

    opening: TokenIds
    bare_opening: TokenIds
    close: TokenIds
    end: int
    special: frozenset[int]


class TeacherText:
    """The teacher's tokenizer and what it makes of a dialogue."""

    def __init__(self, directory: Path, eos_token_ids: Sequence[int]) -> None:
        self._directory = directory
        self._tokenizer = _read_tokenizer(directory)
        self.turns = self._read_turns(eos_token_ids)

    def encode(self, text: str) -> TokenIds:
        """The ids of `text` as they stand in the middle of a turn."""
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    def answer(self, sequence: TeacherSequence) -> str:
        """The words of the answer: what follows the user's turn if the LLM wrote that too, else all behind `start`."""
        written = sequence.tokens[sequence.start :].tolist()
        size = len(self.turns.close)
        ends = (at + size for at in range(len(written) - size) if tuple(written[at : at + size]) == self.turns.close)
        words = [token for token in written[next(ends, 0) :] if token not in self.turns.special]
        return str(self._tokenizer.decode(words)).strip()

    def _read_turns(self, eos_token_ids: Sequence[int]) -> Turns:
        if not eos_token_ids:
            raise ConfigError(f"{self._directory}: names no eos_token_id, so that its answers have no end")
        opening, close = self._render()
        added = self._tokenizer.added_tokens_decoder.items()
        return Turns(
            opening=self.encode(opening),
            bare_opening=self.encode(self._without_system_prompt(opening, eos_token_ids)),
            close=self.encode(close),
            end=eos_token_ids[0],
            special=frozenset(eos_token_ids) | {token_id for token_id, token in added if token.special},
        )

    def _render(self) -> tuple[str, str]:
        dialogue = [{"role": "user", "content": _MARK}]
        try:
            text = self._tokenizer.apply_chat_template(dialogue, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # jinja's errors, or ValueError where there is no template
            reason = str(error).partition("\n")[0]
            raise ConfigError(f"{self._directory}: its chat template cannot be used ({reason})") from error
        opening, mark, close = str(text).partition(_MARK)
        if not mark or not opening or not close:
            raise ConfigError(f"{self._directory}: its chat template does not frame the user's words")
        return opening, close

    def _without_system_prompt(self, opening: str, eos_token_ids: Sequence[int]) -> str:
        """What follows the last ended turn, behind the BOS token if the opening starts with it."""
        ends = [re.escape(str(self._tokenizer.convert_ids_to_tokens(token_id))) for token_id in eos_token_ids]
        bare = re.split("|".join(ends), opening)[-1].lstrip()
        bos = self._tokenizer.bos_token or ""
        if not bare:
            return opening
        return bare if bare.startswith(bos) or not opening.startswith(bos) else bos + bare


def read_openers() -> list[str]:
    """First words for prompts of many kinds, from openers.txt; a line's backslash-n is a line break."""
    text = (importlib.resources.files("ssm_worker.boost") / "openers.txt").read_text(encoding="utf-8")
    return [line.replace("\\n", "\n") for line in text.splitlines() if line.strip()]


def read_prompts(path: Path) -> list[str]:
    """The field `prompt` of each line of a .jsonl file. Raises ConfigError naming the line that has none."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error})") from error
    return [_prompt(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]


def read_passages(path: Path) -> list[str]:
    """What empty lines separate in a text file. Raises ConfigError naming a file that cannot be read."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error})") from error
    return [passage.strip() for passage in re.split(r"\n\s*\n", text) if passage.strip()]


def _prompt(line: str, place: str) -> str:
    try:
        prompt = json.loads(line)["prompt"]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{place}: expected a JSON object with a prompt") from error
    if not isinstance(prompt, str) or not prompt:
        raise ConfigError(f"{place}: prompt is not a text")
    return prompt


def _read_tokenizer(directory: Path) -> PreTrainedTokenizerFast:
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"{path}: no such file; the teacher has to be a checkpoint directory with its tokenizer")
    try:
        tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(directory, local_files_only=True)
    except Exception as error:  # tokenizers raises bare Exception
        raise ConfigError(f"{path}: cannot be read ({str(error).partition(chr(10))[0]})") from error
    return tokenizer
