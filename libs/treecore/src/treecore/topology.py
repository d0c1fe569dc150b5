"""Which node sees which: positions and ancestor bitmasks of a flattened token tree.

Knows parent arrays only; must not know tokens, models or requests.
"""

import numpy as np
from numpy.typing import NDArray

WORD_BITS = 64


def depths(parents: NDArray[np.int32]) -> NDArray[np.int32]:
    """Depth of each node, int32 [N]; the root has depth 0. Parents stand before children."""
    depth = np.zeros(len(parents), np.int32)
    for node in range(1, len(parents)):
        depth[node] = depth[parents[node]] + 1
    return depth


def positions(parents: NDArray[np.int32], committed_len: int) -> NDArray[np.int32]:
    """Absolute position of each node, int32 [N]: `committed_len - 1 + depth`.

    8 committed tokens and depths 0,1,1,2 give 7,8,8,9.
    """
    return depths(parents) + np.int32(committed_len - 1)


def ancestor_words(parents: NDArray[np.int32]) -> NDArray[np.int64]:
    """Packed ancestors-or-self masks, int64 [N, ceil(N / 64)]: bit j of node u is set if u sees node j."""
    num_nodes = len(parents)
    words = np.zeros((num_nodes, -(-num_nodes // WORD_BITS)), np.uint64)
    for node, parent in enumerate(parents):
        if parent >= 0:
            words[node] = words[parent]
        words[node, node // WORD_BITS] |= np.uint64(1) << np.uint64(node % WORD_BITS)
    return words.view(np.int64)


def ancestor_mask(parents: NDArray[np.int32]) -> NDArray[np.bool_]:
    """Dense form of `ancestor_words`, bool [N, N], for the reference attention and tests."""
    num_nodes = len(parents)
    mask = np.zeros((num_nodes, num_nodes), np.bool_)
    for node, parent in enumerate(parents):
        if parent >= 0:
            mask[node] = mask[parent]
        mask[node, node] = True
    return mask
