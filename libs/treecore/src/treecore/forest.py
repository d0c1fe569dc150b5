"""The candidates of a whole step: the scored drafts of all its requests, merged (SpecInfer, Definition 3.2).

Knows shapes, scores and who proposed what, as flat arrays over the batch; must not know what scores are worth, costs or
models. Only for rules under which any tree is right: where children are draws, see treecore.merge.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise

import numpy as np
from numpy.typing import NDArray

from treecore.errors import WireError
from treecore.sparse import Floats
from treecore.tree import TokenTree, Try

Ints = NDArray[np.int32]
Places = NDArray[np.int64]
Codes = NDArray[np.uint64]

_BASE = 0xD6E8FEB86659FD93  # any odd number
_FEW = 64  # entries that are placed one by one in less time than a dozen passes over arrays take

USUAL_RATES = np.array([0.48, 0.13, 0.065, 0.04, 0.035, 0.02, 0.015, 0.01])
"""Chance that the n-th best child is the LLM's token, as long as nothing is known (architecture section 4, coupled)."""

_RANK_SCORES = np.log(USUAL_RATES).astype(np.float32)  # of a draft without scores


@dataclass(frozen=True, slots=True)
class ScoredDraft:
    """One SSM's tree below one request's root, as DraftedItem carries it.

    tokens, parents: int32 [n], parents before children, 0 is the root and i is entry i - 1; the SSM's best sibling
    stands first. scores: fp32 [n], log of an estimated chance that the LLM takes the node behind its parent, or None.
    """

    ssm_idx: int
    tokens: Ints
    parents: Ints
    scores: Floats | None = None

    @classmethod
    def checked(
        cls, ssm_idx: int, tokens: Ints, parents: Ints, scores: Floats | None, vocab_size: int
    ) -> "ScoredDraft":
        """A draft from the wire; raises WireError for what is no tree, no token of the LLM, or no score."""
        if len(tokens) != len(parents) or (scores is not None and len(scores) != len(tokens)):
            raise WireError("a draft whose tokens, parents and scores differ in number")
        if (parents.view(np.uint32) > np.arange(len(parents), dtype=np.uint32)).any():  # a negative one is huge there
            raise WireError("a parent does not stand before its child")
        if (tokens.view(np.uint32) >= vocab_size).any():
            raise WireError("a token id outside the vocabulary")
        if scores is not None and not ((scores <= 0.0) & (scores > -np.inf)).all():
            raise WireError("a score that is no log of a share")
        return cls(ssm_idx, tokens, parents, scores)

    def __len__(self) -> int:
        return len(self.tokens)

    def below(self, path: Sequence[int]) -> "ScoredDraft | None":
        """The draft below the node that `path` (tokens, from the root) leads to; None if it leads out of the draft."""
        parents = self.parents.tolist()
        node = self._node_at(path, parents)
        if node is None:
            return None
        places = {node: 0}
        for entry, parent in enumerate(parents[node:], node + 1):
            if parent in places:
                places[entry] = len(places)
        kept = [entry - 1 for entry in places if entry != node]
        renumbered = np.array([places[parents[entry]] for entry in kept], np.int32)
        scores = None if self.scores is None else self.scores[kept]
        return ScoredDraft(self.ssm_idx, self.tokens[kept], renumbered, scores)

    def _node_at(self, path: Sequence[int], parents: list[int]) -> int | None:
        tokens = self.tokens.tolist()
        node = 0
        for wanted in path:
            below = zip(range(node, len(tokens)), parents[node:], tokens[node:], strict=True)
            found = next((entry + 1 for entry, parent, token in below if (parent, token) == (node, wanted)), None)
            if found is None:
                return None
            node = found
        return node


@dataclass(frozen=True, slots=True)
class Tries:
    """Who proposed which node: T proposals, ascending by node.

    nodes: int64 [T]. ssms: int64 [T], index into the forest's ssm_ids. ranks: int64 [T], place among that SSM's
    siblings, 0 its best. scores: fp32 [T], as drafted.
    """

    nodes: Places
    ssms: Places
    ranks: Places
    scores: Floats


@dataclass(frozen=True, slots=True)
class Forest:
    """R roots and, level by level, all candidates below them: M nodes, parents before children.

    tokens, parents (-1 for roots), requests (0..R-1), depths: int64 [M]. level_ends: where each level ends, the roots'
    first. starts: int64 [M - R], a candidate's first proposal in `tries`. ssm_ids: the SSMs that took part.
    """

    num_requests: int
    tokens: Places
    parents: Places
    requests: Places
    depths: Places
    level_ends: tuple[int, ...]
    tries: Tries
    starts: Places
    ssm_ids: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def levels(self) -> list[slice]:
        """The nodes of depth 1, 2, ..."""
        return [slice(*ends) for ends in pairwise(self.level_ends)]

    def trees(self, kept: NDArray[np.bool_]) -> tuple[TokenTree, ...]:
        """Each request's tree of the nodes kept, bool [M]: all roots, and with a node its parent."""
        if len(self) == self.num_requests:
            return tuple(map(TokenTree.of_root, self.tokens.tolist()))
        nodes = np.flatnonzero(kept)
        nodes = nodes[np.argsort(self.requests[nodes], kind="stable")]
        sizes = np.bincount(self.requests[nodes], minlength=self.num_requests)
        ends = np.cumsum(sizes)
        places = np.full(len(self) + 1, -1)  # the last is the parent of roots
        places[nodes] = np.arange(len(nodes)) - np.repeat(ends - sizes, sizes)
        parents = places[self.parents[nodes]].astype(np.int32)
        assert (parents < 0).sum() == self.num_requests, "a node is kept without its parent"
        tokens, tries = self.tokens[nodes].astype(np.int32), self._tries_of(nodes, kept)
        spans = [slice(start, end) for start, end in pairwise((0, *ends.tolist()))]
        return tuple(TokenTree(tokens[span], parents[span], tuple(tries[span])) for span in spans)

    def _tries_of(self, nodes: Places, kept: NDArray[np.bool_]) -> list[tuple[Try, ...]]:
        picked = np.flatnonzero(kept[self.tries.nodes])
        ssm_ids = [self.ssm_ids[ssm] for ssm in self.tries.ssms[picked].tolist()]
        every = list(map(Try, ssm_ids, self.tries.ranks[picked].tolist()))
        of = self.tries.nodes[picked]
        starts, ends = np.searchsorted(of, nodes).tolist(), np.searchsorted(of, nodes, side="right").tolist()
        return [tuple(every[start:end]) for start, end in zip(starts, ends, strict=True)]


def merge_drafts(roots: Sequence[int], drafts: Sequence[Sequence[ScoredDraft]]) -> Forest:
    """The forest of R requests: their root tokens, and for each the drafts that SSMs made of it (none is fine).

    Equal root-to-node sequences of one request become one node that keeps every proposal; nothing is lost or added.
    """
    if not any(map(len, chain.from_iterable(drafts))):
        return _of_roots(roots)
    R, entries = len(roots), _entries(drafts)
    nodes, order, ends = (_placed_singly if len(entries.tokens) <= _FEW else _placed)(entries, R)
    tries = Tries(nodes[order], entries.ssms[order], entries.ranks()[order], entries.filled_scores()[order])
    starts = np.searchsorted(tries.nodes, np.arange(R, ends[-1]))
    first = order[starts]
    above = entries.parents[first]
    return Forest(
        R,
        np.concatenate([np.array(roots, np.int64), entries.tokens[first]]),
        np.concatenate([np.full(R, -1), np.where(above < 0, entries.requests[first], nodes[above])]),
        np.concatenate([np.arange(R), entries.requests[first]]),
        np.repeat(np.arange(len(ends)), np.diff(ends, prepend=0)),
        tuple(ends),
        tries,
        starts,
        entries.ssm_ids,
    )


def _of_roots(roots: Sequence[int]) -> Forest:
    """No candidates: most steps of a batch that does without drafts."""
    R, none = len(roots), np.empty(0, np.int64)
    tries = Tries(none, none, none, np.empty(0, np.float32))
    return Forest(
        R, np.array(roots, np.int64), np.full(R, -1), np.arange(R), np.zeros(R, np.int64), (R,), tries, none, ()
    )


def num_equal_before(keys: Places) -> Places:
    """How many earlier entries have the same key, int64 [n]."""
    order = np.argsort(keys, kind="stable")
    starts = np.flatnonzero(np.concatenate([[True], np.diff(keys[order]) != 0])[: len(keys)])
    counts = np.empty(len(keys), np.int64)
    counts[order] = np.arange(len(keys)) - np.repeat(starts, np.diff(starts, append=len(keys)))
    return counts


@dataclass(frozen=True, slots=True)
class _Entries:
    """All entries of all drafts: E of them. parents: the entry above, -1 below a root. scores: NaN where unknown."""

    tokens: Places
    parents: Places
    requests: Places
    drafts: Places
    ssms: Places
    scores: Floats
    ssm_ids: tuple[int, ...]

    def depths_and_codes(self, salt: int) -> tuple[Places, Codes]:
        """By entry its depth and a 64-bit code of its request and path, in log(depth) jumps, each twice as far."""
        E = len(self.tokens)
        jump = np.append(np.where(self.parents < 0, E, self.parents), E)  # E: above the roots' children
        depth, code = np.append(np.ones(E, np.int64), 0), np.append(_mixed(self.tokens, salt), np.uint64(0))
        power = _BASE  # code of a path: the sum of its tokens' codes, the n-th from its end times _BASE ** n
        while (jump[:E] < E).any():
            depth += depth[jump]
            code += np.uint64(power) * code[jump]
            jump, power = jump[jump], power * power % 2**64
        return depth[:E], code[:E] ^ _mixed(~self.requests, salt)

    def ranks(self) -> Places:
        """How many earlier siblings each entry has in its draft."""
        E = len(self.tokens)
        families = np.where(self.parents < 0, E + self.drafts, self.parents)
        return num_equal_before(families)

    def filled_scores(self) -> Floats:
        """Scores, from the ranks where the draft has none."""
        if not np.isnan(self.scores).any():
            return self.scores
        return np.where(
            np.isnan(self.scores), _RANK_SCORES[np.minimum(self.ranks(), len(_RANK_SCORES) - 1)], self.scores
        )


def _entries(drafts: Sequence[Sequence[ScoredDraft]]) -> _Entries:
    every = list(chain.from_iterable(drafts))
    requests = np.repeat(np.arange(len(drafts)), [len(own) for own in drafts])
    lengths = np.array([len(draft) for draft in every], np.int64)
    owners = np.repeat(np.arange(len(every)), lengths)
    ssm_ids = tuple(dict.fromkeys(draft.ssm_idx for draft in every))
    ssms = np.array([ssm_ids.index(draft.ssm_idx) for draft in every], np.int64)
    parents = np.concatenate([np.empty(0, np.int64), *[draft.parents for draft in every]])
    offsets = np.array([0, *accumulate(lengths.tolist())])
    return _Entries(
        np.concatenate([np.empty(0, np.int64), *[draft.tokens for draft in every]]),
        np.where(parents == 0, -1, parents - 1 + offsets[owners]),
        requests[owners],
        owners,
        ssms[owners],
        np.concatenate([np.empty(0, np.float32), *[_scores(draft) for draft in every]]),
        ssm_ids,
    )


def _scores(draft: ScoredDraft) -> Floats:
    return np.full(len(draft), np.nan, np.float32) if draft.scores is None else draft.scores


def _placed(entries: _Entries, num_roots: int, salt: int = 1) -> tuple[Places, Places, list[int]]:
    """By entry its node; the entries in the order of their nodes; where each level of nodes ends.

    Equal paths have equal codes. Different ones with the same code are found out, and all are coded anew.
    """
    depths, codes = entries.depths_and_codes(salt)
    num_bits = np.uint64(len(codes).bit_length())
    packed = np.sort(codes << num_bits | np.arange(len(codes), dtype=np.uint64))  # several times as fast as argsort
    order = (packed & ((np.uint64(1) << num_bits) - np.uint64(1))).astype(np.int64)
    by_depth = np.argsort(depths[order], kind="stable")
    order, codes = order[by_depth], packed[by_depth] >> num_bits
    is_first = np.ones(len(order), np.bool_)
    is_first[1:] = (np.diff(codes) != 0) | (np.diff(depths[order]) != 0)
    places = np.cumsum(is_first) - 1
    nodes = np.empty(len(order), np.int64)
    nodes[order] = num_roots + places
    first = order[is_first]
    above = np.where(entries.parents < 0, entries.requests, nodes[entries.parents])
    if (above[order] != above[first][places]).any() or (entries.tokens[order] != entries.tokens[first][places]).any():
        return _placed(entries, num_roots, salt + 1)
    return nodes, order, (num_roots + np.cumsum(np.bincount(depths[first]))).tolist()


def _placed_singly(entries: _Entries, num_roots: int) -> tuple[Places, Places, list[int]]:
    """What `_placed` says, but for the order of nodes in a level."""
    known: dict[tuple[int, int], int] = {}  # (node above, or -1 - request; token) -> node, as they come
    found: list[int] = []
    depths: list[int] = []
    for parent, token, request in zip(
        entries.parents.tolist(), entries.tokens.tolist(), entries.requests.tolist(), strict=True
    ):
        above = found[parent] if parent >= 0 else -1 - request
        node = known.setdefault((above, token), len(depths))
        if node == len(depths):
            depths.append(depths[above] + 1 if parent >= 0 else 1)
        found.append(node)
    by_depth = np.argsort(depths, kind="stable")
    places = np.empty(len(depths), np.int64)
    places[by_depth] = np.arange(len(depths))
    nodes = num_roots + places[found]
    return nodes, np.argsort(nodes, kind="stable"), (num_roots + np.cumsum(np.bincount(depths))).tolist()


def _mixed(values: Places, salt: int) -> Codes:
    """Codes that look random (splitmix64)."""
    code = (values.astype(np.uint64) + np.uint64(salt)) * np.uint64(0x9E3779B97F4A7C15)
    code = (code ^ (code >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    return code ^ (code >> np.uint64(27))
