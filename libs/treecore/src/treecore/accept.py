"""The rules of acceptance (architecture section 5): which path of a verified tree becomes committed tokens.

Pure: a tree and the LLM's answer in, tokens out. The rules `greedy` and `coupled` are the same walk, because the
LLM's token of each node is already the token that incremental decoding would have produced there (section 4).
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treecore.tree import TokenTree


@dataclass(frozen=True, slots=True)
class Accepted:
    """What one step yields: the accepted nodes below the root, and their tokens, with a bonus if one may follow."""

    nodes: tuple[int, ...]
    tokens: tuple[int, ...]


def walk(tree: TokenTree, llm_tokens: NDArray[np.int32]) -> Accepted:
    """Follow the LLM down the tree while a child equals its token; the first that does not is the bonus token.

    llm_tokens: int32 [N], the LLM's token after each node; negative behind one that no token may follow, which ends the
    walk without a bonus. Yields at least one token, as the root has one (SpecInfer, Algorithm 2, greedy).
    """
    node = 0
    nodes: list[int] = []
    tokens: list[int] = []
    while True:
        token = int(llm_tokens[node])
        if token < 0:
            return Accepted(tuple(nodes), tuple(tokens))
        tokens.append(token)
        child = tree.child_with(node, token)
        if child is None:
            return Accepted(tuple(nodes), tuple(tokens))
        nodes.append(child)
        node = child
