"""Which tokens a request's grammar allows behind each node of a tree (structured output).

Knows a model's tokenizer and the grammar library; must not know models, sampling, services or the wire. Needs
llguidance (`treecore[grammar]`, docs/decisions/0004); nothing else of the core may import this.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray

from treecore.errors import ConfigError, InvalidRequest
from treecore.lark import to_lark
from treecore.params import Grammar

logger = logging.getLogger(__name__)

MAX_CHECK_S = 0.5
"""CPU seconds that compiling a grammar and its first masks may take; ordinary schemas take a few milliseconds."""

_PROBED_TOKENS = 8
_WORD_BITS = 32

Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """A model's tokens as grammars see them.

    size: of the model's head. text: bool, by token of the tokenizer, those that are text (neither special nor an end).
    text_words: the same, packed, uint32, wide enough for the head too. ends: intp, ascending.
    """

    tokenizer: LLTokenizer
    size: int
    text: Mask
    text_words: NDArray[np.uint32]
    ends: NDArray[np.intp]

    @classmethod
    def of(cls, tokenizer: LLTokenizer, size: int, ends: Sequence[int]) -> "_Vocabulary":
        text = np.array([not tokenizer.is_special_token(token) for token in range(tokenizer.vocab_size)])
        text[list(ends)] = False
        padded = np.zeros(_num_words(max(len(text), size)) * _WORD_BITS, np.bool_)
        padded[: len(text)] = text
        words = np.packbits(padded, bitorder="little").view(np.uint32)
        return cls(tokenizer, size, text, words, np.array(sorted(set(ends)), np.intp))

    def is_text(self, token: int) -> bool:
        """Whether the grammar is to be asked about this token at all."""
        return 0 <= token < len(self.text) and bool(self.text[token])

    def fill(self, matcher: LLMatcher, words: NDArray[np.uint32]) -> None:
        """Writes the text tokens that the matcher allows into its row of words, which must be contiguous."""
        num_bytes = _num_words(len(self.text)) * words.itemsize
        matcher.unsafe_compute_mask_ptr(words.ctypes.data, num_bytes)
        np.bitwise_and(words, self.text_words, out=words)

    def unpacked(self, words: NDArray[np.uint32], may_end: Mask) -> Mask:
        """Rows of words as bool [n, size], and the ends where the grammar may end."""
        bits = np.unpackbits(words.view(np.uint8), axis=1, count=self.size, bitorder="little")
        allowed: Mask = bits.view(np.bool_)
        allowed[:, self.ends] = may_end[:, None]
        return allowed


class GrammarCompiler:
    """Compiles grammars for one model. Reads only what construction made, so threads may share it."""

    def __init__(self, vocabulary: _Vocabulary, cpu_clock: Callable[[], float]) -> None:
        self._vocabulary = vocabulary
        self._cpu_clock = cpu_clock

    @classmethod
    def from_dir(
        cls,
        model_dir: Path,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        *,
        cpu_clock: Callable[[], float] = time.thread_time,
    ) -> "GrammarCompiler":
        """From a Hugging Face directory's tokenizer.json.

        vocab_size: of the model's head; larger than the tokenizer's where ids are padding, which are never allowed.
        eos_token_ids: one or more. Takes about 0.5 s and 45 MB for 50,000 tokens. Raises ConfigError.
        """
        if not eos_token_ids or not all(0 <= token < vocab_size for token in eos_token_ids):
            raise ConfigError(f"grammars need end tokens within the vocabulary, not {list(eos_token_ids)}")
        path = model_dir / "tokenizer.json"
        try:
            tokenizer = LLTokenizer(_tokenizer_text(path), eos_token=list(eos_token_ids))
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot use the tokenizer {path} for grammars: {error}") from error
        return cls(_Vocabulary.of(tokenizer, vocab_size, eos_token_ids), cpu_clock)

    def check(self, grammar: Grammar) -> None:
        """Raises InvalidRequest if the grammar is invalid, unsupported, empty or too costly.

        Bounded in size, and in time but for contrived ones, which a thread pays for (the GIL is released meanwhile).
        """
        started_s = self._cpu_clock()
        state = self.start(grammar)
        try:
            self._probe(state)
        except InvalidRequest as error:
            raise InvalidRequest(f"the grammar is empty or too complex: {error}") from error
        if self._cpu_clock() - started_s > MAX_CHECK_S:
            raise InvalidRequest("the grammar is too complex")

    def start(self, grammar: Grammar) -> "GrammarState":
        """The state of one request. Takes milliseconds for what passed `check`. Raises InvalidRequest."""
        try:
            source = to_lark(grammar)
        except (ArithmeticError, ValueError, RecursionError) as error:  # numbers and depths that nobody expects
            raise InvalidRequest(f"the grammar cannot be read: {error}") from error
        return GrammarState(self._vocabulary, source)

    def _probe(self, state: "GrammarState") -> None:
        """Follows one branch for a few tokens: a grammar without a sentence, or too wide to parse, shows there."""
        output: list[int] = []
        while len(output) < _PROBED_TOKENS:
            allowed = state.masks(output, [()])[0]
            allowed[self._vocabulary.ends] = False
            if not allowed.any():
                return
            output.append(int(allowed.argmax()))


def grammar_starter(
    model_dir: Path, vocab_size: int, eos_token_ids: Sequence[int]
) -> Callable[[Grammar], "GrammarState"] | None:
    """What starts grammars for this model; None, with a line in the log, if its tokenizer cannot be used for them."""
    try:
        return GrammarCompiler.from_dir(model_dir, vocab_size, eos_token_ids).start
    except ConfigError as error:
        logger.info("no structured output: %s", error)
        return None


class GrammarState:
    """One request's grammar at one worker. Owns a matcher, which is a cache: `masks` depends on its arguments alone.

    The matcher never meets an end token, a special one or an id without text: all of these end the grammar here.
    """

    def __init__(self, vocabulary: _Vocabulary, source: str) -> None:
        self._vocabulary = vocabulary
        self._source = source
        self._restart()

    def masks(self, output: Sequence[int], below: Sequence[tuple[int, ...]]) -> Mask:
        """The tokens allowed behind each node: bool [n, V]. A node's tokens are output + below[i].

        At the grammar's end only the end tokens are allowed. Nothing is where the node's own tokens break the grammar,
        or follow its end, or lead to where the grammar cannot be followed: beyond its budget of memory or computation,
        or to a text that no token continues. Behind the output itself (an empty path) the last two raise InvalidRequest
        (`grammar_failed`). The order of nodes and earlier calls make no difference.
        """
        committed = output.tolist() if isinstance(output, np.ndarray) else list(output)
        words = np.zeros((len(below), len(self._vocabulary.text_words)), np.uint32)
        may_end = np.zeros(len(below), np.bool_)
        for node in sorted(range(len(below)), key=below.__getitem__):  # depth first: the least rollback
            may_end[node] = self._mask(committed, below[node], words[node])
        return self._vocabulary.unpacked(words, may_end)

    def _mask(self, output: list[int], path: tuple[int, ...], words: NDArray[np.uint32]) -> bool:
        """Writes one node's mask, text tokens only; returns whether the grammar may end there."""
        for is_last_try in (False, True):  # the budget counts what other branches computed, too
            try:
                return self._reach([*output, *path]) and self._fill(words)
            except InvalidRequest:
                words[:] = 0
                self._restart()
                if is_last_try and not path:
                    raise
        return False

    def _reach(self, tokens: list[int]) -> bool:
        """Brings the matcher behind `tokens`, or as far as the grammar goes (False)."""
        shared = _shared_len(self._held, tokens)
        if shared < len(self._held):
            self._matcher.rollback(len(self._held) - shared)
            del self._held[shared:]
        wanted = tokens[shared:]
        spoken = list(takewhile(self._vocabulary.is_text, wanted))
        count = self._matcher.try_consume_tokens(spoken) if spoken else 0
        _raise_failure(self._matcher)
        self._held += spoken[:count]
        return count == len(wanted)

    def _fill(self, words: NDArray[np.uint32]) -> bool:
        """Writes the mask where the matcher stands, text tokens only; returns whether the grammar may end there."""
        self._vocabulary.fill(self._matcher, words)
        _raise_failure(self._matcher)
        may_end = self._matcher.is_accepting()
        if not may_end and not words.any():
            raise _failure("no token can follow")
        return may_end

    def _restart(self) -> None:
        self._held: list[int] = []  # what the matcher has consumed
        self._matcher = _matcher(self._vocabulary, self._source)  # a copy would share the budget of its original


def _matcher(vocabulary: _Vocabulary, source: str) -> LLMatcher:
    """Raises InvalidRequest, with the library's words, if it refuses the grammar or would ignore a part of it."""
    matcher = LLMatcher(vocabulary.tokenizer, LLMatcher.grammar_from_lark(source), log_level=0, limits=_limits())
    problems = [matcher.get_error()] if matcher.is_error() else matcher.get_grammar_warnings()
    if problems:
        raise InvalidRequest(f"the grammar is not supported: {_brief(problems[0])}")
    return matcher


def _limits() -> LLParserLimits:
    """A lexer state takes 1-2 kB and there are two workers or three a request: some 20 MB each at the very most."""
    return LLParserLimits(
        max_items_in_row=4_000,
        initial_lexer_fuel=500_000,
        step_lexer_fuel=100_000,
        step_max_items=50_000,
        max_lexer_states=10_000,
        max_grammar_size=100_000,
        precompute_large_lexemes=False,
        verbose_errors=False,
    )


def _raise_failure(matcher: LLMatcher) -> None:
    if matcher.is_error():
        raise _failure(_brief(matcher.get_error()))


def _failure(why: str) -> InvalidRequest:
    return InvalidRequest(f"the grammar cannot be followed any further: {why}", code="grammar_failed")


def _brief(message: str) -> str:
    return message.partition("\n")[0][:200]


def _shared_len(ours: list[int], theirs: list[int]) -> int:
    """The length of the longest common prefix."""
    length = min(len(ours), len(theirs))
    if ours[:length] == theirs[:length]:
        return length
    return next(idx for idx in range(length) if ours[idx] != theirs[idx])


def _num_words(num_tokens: int) -> int:
    return -(-num_tokens // _WORD_BITS)


def _tokenizer_text(path: Path) -> str:
    """The library would take other text for the name of a model to look for."""
    text = path.read_text(encoding="utf-8")
    if not text.lstrip().startswith("{"):
        raise ValueError("not a JSON object")
    return text
