"""Trees that grow best first, the slow way: whole texts, the whole vocabulary, no numbering. Ships for tests.

Knows Growth's promise; must not know saplings, caches or workers.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from treecore.expand import Growth
from treecore.messages import DraftedItem
from treecore.noise import gumbel
from treecore.params import SamplingParams

Text = tuple[int, ...]


class BestFirstOracle:
    """One request's tree as an SSM with these `logits` (of a text, fp32 [V]) should grow it, step after step."""

    def __init__(self, logits: Callable[[Text], NDArray[np.float32]], params: SamplingParams, context_len: int) -> None:
        self._logits = logits
        self._params = params
        self._context_len = context_len
        self._root: Text = ()
        self._families: dict[Text, dict[int, float]] = {}  # children with scores, behind each text that was given some

    @property
    def num_inner(self) -> int:
        """Nodes that were given children."""
        return len(self._families)

    def answer(self, committed: Sequence[int], growth: Growth) -> dict[Text, float]:
        """Path below the root -> score of all that is told."""
        self._move_to(tuple(committed))
        for _ in range(growth.num_forwards):
            told = {self._root, *self._told(growth)}
            leaves = [text for text in self._by_total() if text in told and text not in self._families]
            for text in [text for text in leaves if len(text) <= self._context_len][: growth.width]:
                self._families[text] = self._children(text, growth.num_children)
        return {text[len(self._root) :]: self._families[text[:-1]][text[-1]] for text in self._told(growth)}

    def _move_to(self, root: Text) -> None:
        is_below = root[: len(self._root)] == self._root and root in self._families
        self._root = root
        self._families = {
            text: found for text, found in self._families.items() if is_below and text[: len(root)] == root
        }

    def _told(self, growth: Growth) -> list[Text]:
        return self._by_total()[1 : growth.max_nodes + 1]

    def _by_total(self) -> list[Text]:
        """All nodes, the most likely first; the root is it."""
        totals = {self._root: 0.0}
        for text, family in sorted(self._families.items(), key=lambda entry: len(entry[0])):
            totals |= {(*text, token): totals[text] + score for token, score in family.items()}
        return sorted(totals, key=lambda text: (-totals[text], len(text)))

    def _children(self, text: Text, num_children: int) -> dict[int, float]:
        keys = self._logits(text).astype(np.float64)
        if not self._params.is_greedy:
            keys /= self._params.temperature
        if self._params.rule == "coupled" and not self._params.is_greedy:
            keys += gumbel(self._params.seed, len(text), np.arange(len(keys), dtype=np.int32))
        shares = keys - keys.max() - np.log(np.exp(keys - keys.max()).sum())
        best = np.argsort(-keys, kind="stable")[:num_children].tolist()
        return {token: float(shares[token]) for token in best}


def told_paths(drafted: DraftedItem) -> dict[Text, float]:
    """Path below the root -> score. Asserts what is promised of any answer: parents first, siblings best first."""
    assert drafted.scores is not None, "a tree that grew best first has scores"
    assert np.isfinite(drafted.scores).all(), "scores are numbers"
    assert (drafted.scores <= 0.0).all(), "logs of shares"
    paths: list[Text] = [()]
    last: dict[int, float] = {}
    for node, (token, parent, score) in enumerate(
        zip(drafted.tokens.tolist(), drafted.parents.tolist(), drafted.scores.tolist(), strict=True), 1
    ):
        assert 0 <= parent < node, "a parent stands before its child"
        assert score <= last.get(parent, 0.0), "siblings stand best first"
        last[parent] = score
        paths.append((*paths[parent], token))
    told = dict(zip(paths[1:], drafted.scores.tolist(), strict=True))
    assert len(told) == len(drafted.tokens), "siblings differ"
    return told
