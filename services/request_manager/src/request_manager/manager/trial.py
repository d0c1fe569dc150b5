"""One request's tree in one step: what the verifier is asked, and what its answer yields. Pure.

Knows wire items and the rules of acceptance; must not know workers, batches or what becomes of the tokens.
"""

from dataclasses import dataclass

import numpy as np

from request_manager.contract import TokenLogprob
from request_manager.manager.request import Request
from request_manager.manager.scheduler import PlannedItem
from treecore.accept import Accepted, walk
from treecore.errors import WireError
from treecore.messages import VerifiedItem, VerifyItem, split_tree
from treecore.multi_step import supports_of, walk_multi_step
from treecore.tree import TokenTree


@dataclass(frozen=True, slots=True)
class StepTokens:
    """Tokens that a step adds to the output, and their log-probs if they were asked for."""

    path: Accepted
    logprobs: tuple[TokenLogprob, ...]


class Trial:
    """A tree behind a request's committed tokens, from the question to the judgement."""

    def __init__(self, request: Request, item: PlannedItem, tree: TokenTree) -> None:
        self.request = request
        self.item = item
        self.tree = tree
        self._supports = supports_of(tree)

    @property
    def num_drafted(self) -> int:
        """Nodes below the root."""
        return len(self.tree) - 1

    @property
    def num_asked(self) -> int:
        """Tokens of the prompt that are sent."""
        return max(0, min(self.item.end, len(self.request.generation.prompt)) - self.item.start)

    def num_found(self, answer: VerifiedItem) -> int:
        """How many of those the verifier had already."""
        return min(max(answer.num_found, 0), self.num_asked)

    def question(self) -> VerifyItem:
        """What the verifier is asked."""
        request, item = self.request, self.item
        tokens, parents = split_tree(self.tree)
        return VerifyItem(
            item.request_id,
            request.step,
            item.start,
            request.tokens_between(item.start, item.end),
            request.generation.params if item.start == 0 else None,
            tokens,
            parents,
            item.is_complete,
            self._supports,
        )

    def judge(self, answer: VerifiedItem, vocab_size: int) -> StepTokens | None:
        """The tokens that the answer yields, at least one; None for a chunk of the prompt, which yields none.

        Raises WireError if the answer is not one to the question.
        """
        if self._lost_its_tree(answer):
            return Trial(self.request, self.item, TokenTree.of_root(int(self.tree.tokens[0]))).judge(answer, vocab_size)
        self._check(answer, vocab_size)
        if not self.item.is_complete:
            return None
        if self._supports is None:
            path = walk(self.tree, answer.tokens)
        else:
            request = self.request
            params, committed_len = request.generation.params, request.committed_len
            path = walk_multi_step(self.tree, answer.tokens, answer.masses, self._supports, params, committed_len)
        return StepTokens(path, self._told(path, answer))

    def _lost_its_tree(self, answer: VerifiedItem) -> bool:
        """Whether the verifier had no room for the tree and looked at the root alone."""
        return self.item.is_complete and self._supports is None and len(answer.tokens) == 1 < len(self.tree)

    def _check(self, answer: VerifiedItem, vocab_size: int) -> None:
        """A token of the vocabulary for each node, masses and log-probs where they were asked for."""
        least = np.zeros(len(self.tree) if self.item.is_complete else 0, np.int32)
        if self.request.generation.params.grammar is not None:
            least[1:] = -1  # a node behind which its grammar allows nothing
        if self._supports is not None:
            least[self._supports.nodes] = -1
        if len(answer.tokens) != len(least) or np.any((answer.tokens < least) | (answer.tokens >= vocab_size)):
            raise WireError("not a token of the vocabulary for each node")
        if self.item.is_complete and not (self._has_masses(answer) and self._has_logprobs(answer, vocab_size)):
            raise WireError("masses or log-probs of the wrong number")

    def _has_masses(self, answer: VerifiedItem) -> bool:
        if self._supports is None:
            return answer.masses is None
        num_told = len(self._supports.token_ids)
        return answer.masses is not None and len(answer.masses.logprobs) in (0, num_told)

    def _has_logprobs(self, answer: VerifiedItem, vocab_size: int) -> bool:
        told = answer.logprobs
        if self.request.generation.params.num_logprobs is None:
            return told is None
        return (
            told is not None
            and len(told.chosen) == len(self.tree)
            and len(told.top) == len(told.top_ids)
            and len(told.top) == len(told.chosen) * min(self.request.generation.params.num_logprobs, vocab_size)
            and not np.any((told.top_ids < 0) | (told.top_ids >= vocab_size))
            and (answer.masses is None or len(answer.masses.logprobs) == len(answer.masses.p))
        )

    def _told(self, path: Accepted, answer: VerifiedItem) -> tuple[TokenLogprob, ...]:
        """An entry for each token: the one chosen behind the root, behind the first accepted node, and so on.

        There is one token fewer than nodes where none may follow the last one.
        """
        if answer.logprobs is None:
            return ()
        told, width = answer.logprobs, len(answer.logprobs.top) // len(answer.logprobs.chosen)
        entries = []
        for node, token in zip((0, *path.nodes), path.tokens, strict=False):
            span = slice(node * width, (node + 1) * width)
            top = zip(told.top_ids[span].tolist(), told.top[span].tolist(), strict=True)
            entries.append(TokenLogprob(self._logprob(answer, node, token), tuple(top)))
        return tuple(entries)

    def _logprob(self, answer: VerifiedItem, node: int, token: int) -> float:
        """Of a token in the node's support, or of the one that the verifier itself chose behind the node."""
        assert answer.logprobs is not None
        if self._supports is not None and answer.masses is not None and token != answer.tokens[node]:
            span = self._supports.spans()[node]
            column = int(self._supports.token_ids[span].searchsorted(token))
            return float(answer.masses.logprobs[span.start + column])
        return float(answer.logprobs.chosen[node])
