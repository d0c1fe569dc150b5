"""Random token trees for tests. Knows trees only."""

import numpy as np

from treecore.messages import Tokens
from treecore.tree import TokenTree


def random_tree(rng: np.random.Generator, num_nodes: int, vocab_size: int, root: int = 0) -> TokenTree:
    """A random tree of `num_nodes`, the root included; siblings may carry the same token."""
    tokens = np.concatenate([[root], rng.integers(0, vocab_size, num_nodes - 1)]).astype(np.int32)
    return TokenTree.checked(tokens, random_parents(rng, num_nodes), 0)


def random_parents(rng: np.random.Generator, num_nodes: int) -> Tokens:
    """A random parent array, int32 [num_nodes]; between bushes and chains, since both break different things."""
    reach = int(rng.integers(1, num_nodes + 1))
    below = [int(rng.integers(max(0, node - reach), node)) for node in range(1, num_nodes)]
    return np.array([-1, *below], np.int32)
