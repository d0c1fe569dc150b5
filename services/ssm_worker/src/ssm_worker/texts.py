"""The requests that a worker without weights holds: their tokens, in a suffix automaton each, and their parameters.

Knows items and books; must not know what is drafted. Losing all of it costs time only.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from ssm_worker.automaton import SuffixAutomaton
from treecore.errors import ConfigError, OutOfBlocks, StateMissing, WireError
from treecore.messages import BlockUsage, DraftItem, RequestId
from treecore.params import SamplingParams
from treecore.sessions import Sessions


@dataclass(slots=True)
class Text:
    """What is held of one request."""

    params: SamplingParams
    tokens: list[int] = field(default_factory=list)
    automaton: SuffixAutomaton = field(default_factory=SuffixAutomaton)

    def put(self, start: int, tokens: list[int]) -> None:
        """Committed tokens from `start` on; what the text has of them already is not touched."""
        held = self.tokens[start:]
        if held != tokens[: len(held)]:  # never, unless the manager has changed its mind: an automaton cannot shrink
            tokens, held = [*self.tokens[:start], *tokens], []
            self.tokens, self.automaton = [], SuffixAutomaton()
        for token in tokens[len(held) :]:
            self.automaton.append(token)
        self.tokens += tokens[len(held) :]


class HeldTexts:
    """Owns the texts of all managers' requests, in blocks of `block_len` tokens. Raises ConfigError for no block.

    Where blocks run out, requests that are not in the current message are forgotten, the longest unheard of first.
    """

    def __init__(self, num_blocks: int, block_len: int, clock: Callable[[], float] = time.monotonic) -> None:
        if num_blocks < 1:
            raise ConfigError(f"--kv-tokens is below --block-len {block_len}: no request could be held")
        self._num_blocks = num_blocks
        self._block_len = block_len
        self._texts: dict[RequestId, Text] = {}  # the longest unheard of first
        self._num_used = 0
        self._taken: set[RequestId] = set()
        self._sessions = Sessions(clock)

    def begin_step(self, session: str, released: Iterable[RequestId]) -> None:
        """Forget what is released, and what nobody will ask for again (see Sessions)."""
        self._taken.clear()
        for request_id in (*self._sessions.begin_step(session), *released):
            self._forget(request_id)

    def take(self, item: DraftItem) -> Text:
        """The request's text, with the item's tokens taken in.

        Raises StateMissing, WireError (the request twice in one message) and OutOfBlocks, which forgets the request;
        the others change nothing.
        """
        text = self._texts.get(item.request_id)
        held_len = len(text.tokens) if text else 0
        if item.start > held_len or (text is None and item.params is None):
            raise StateMissing(held_len)
        if item.request_id in self._taken:
            raise WireError("a request twice in one message: only one of them can be followed")
        self._make_room(item.request_id, self._blocks(item.start + len(item.tokens)))
        text = self._texts.pop(item.request_id, None) or Text(_params(item))
        text.params = item.params or text.params
        text.put(item.start, item.tokens.tolist())
        self._texts[item.request_id] = text
        self._taken.add(item.request_id)
        self._sessions.take(item.request_id)
        return text

    def usage(self) -> BlockUsage:
        """The integrity equation of these books. May be called from another thread."""
        used = self._num_used
        return BlockUsage(self._num_blocks - used, used, 0, self._num_blocks, self._block_len)

    def _make_room(self, request_id: RequestId, num_blocks: int) -> None:
        """Have the request use `num_blocks` instead of what it used."""
        text = self._texts.get(request_id)
        num_more = num_blocks - (self._blocks(len(text.tokens)) if text else 0)
        others = (other for other in list(self._texts) if other != request_id and other not in self._taken)
        while self._num_used + num_more > self._num_blocks:
            oldest = next(others, None)
            if oldest is None:
                self._forget(request_id)
                raise OutOfBlocks("no room for the request's text")
            self._forget(oldest)
        self._num_used += num_more

    def _forget(self, request_id: RequestId) -> None:
        text = self._texts.pop(request_id, None)
        self._sessions.forget(request_id)
        if text is not None:
            self._num_used -= self._blocks(len(text.tokens))

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_len)


def _params(item: DraftItem) -> SamplingParams:
    assert item.params is not None, "a request that is not held brings its parameters"
    return item.params
