"""What an SSM drew a node's children from, and whether what came over the wire can be that.

Knows arrays; must not know trees, merging or acceptance.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from treecore.errors import WireError
from treecore.sparse import DraftLaws, Ids, Supports

Keys = NDArray[np.int64]

_TOLERANCE = 1e-3


class ChildLaw(NamedTuple):
    """A law q: int32 [K] ascending, and as it travels, fp32 [K]; both ends compute with `drafts.exact(q)`."""

    token_ids: Ids
    q: NDArray[np.float32]


def child_laws(laws: DraftLaws, tokens: Ids, parents: Ids) -> dict[int, ChildLaw]:
    """The law of each node that has one; tokens, parents: of a well-formed tree.

    Raises WireError: nodes not ascending or out of range, lengths that do not add up, ids negative or not ascending, q
    that is no law, a child that its parent's law does not have.
    """
    keys = support_keys(laws.supports, len(tokens))
    ends = laws.supports.lengths.cumsum()
    _check_masses(laws.q, len(keys), ends)
    _check_children(keys, laws.q, tokens[1:], parents[1:])
    ids, q = laws.supports.token_ids, laws.q
    return {node: ChildLaw(ids[span], q[span]) for node, span in laws.supports.spans().items()}


def support_keys(supports: Supports, num_nodes: int) -> Keys:
    """(node, token) of every entry as one ascending number, int64 [sum].

    Raises WireError if supports from the wire are none of a tree of `num_nodes`.
    """
    nodes, lengths, token_ids = supports.nodes, supports.lengths, supports.token_ids
    if len(nodes) == 0 or len(nodes) != len(lengths) or lengths.min() < 1 or int(lengths.sum()) != len(token_ids):
        raise WireError("the lengths of supports do not add up")
    if nodes[0] < 0 or nodes[-1] >= num_nodes or (nodes[1:] <= nodes[:-1]).any():
        raise WireError("the nodes of supports do not ascend within the tree")
    keys = _keys(nodes.repeat(lengths), token_ids)
    if len(keys) and (keys[0] < 0 or (keys[1:] <= keys[:-1]).any()):  # a negative token makes a negative key
        raise WireError("the tokens of a support do not ascend")
    return keys


def _check_masses(q: NDArray[np.float32], num_entries: int, ends: Keys) -> None:
    if len(q) != num_entries or not (q.min(initial=0.0) >= 0.0 and q.max(initial=0.0) <= 1.0 + _TOLERANCE):  # nor NaN
        raise WireError("a draft law of wrong masses, or not of one for each token")
    if num_entries and (np.abs(np.add.reduceat(q, [0, *ends[:-1]]) - 1.0) > _TOLERANCE).any():
        raise WireError("a draft law does not sum to 1")


def _check_children(keys: Keys, q: NDArray[np.float32], tokens: Ids, parents: Ids) -> None:
    wanted = _keys(parents, tokens)
    where = keys.searchsorted(wanted)
    if (where == len(keys)).any() or (keys[where] != wanted).any() or (q[where] <= 0.0).any():
        raise WireError("a child that its law does not have")


def _keys(nodes: Ids, tokens: Ids) -> Keys:
    return (nodes.astype(np.int64) << 32) | tokens
