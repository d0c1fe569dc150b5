"""Numbers on a few tokens at a few nodes of a tree, as they travel (the multi_step rules)."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int32]
Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Supports:
    """A few tokens at each of m nodes: nodes int32 [m] (0 is the root), lengths int32 [m], token_ids int32 [sum]."""

    nodes: Ids
    lengths: Ids
    token_ids: Ids

    def spans(self) -> dict[int, slice]:
        """Where in `token_ids`, and in arrays of as many entries, each node's tokens are."""
        ends = self.lengths.cumsum().tolist()
        return dict(zip(self.nodes.tolist(), map(slice, [0, *ends], ends), strict=False))


@dataclass(frozen=True, slots=True)
class DraftLaws:
    """The laws q that an SSM drew the children of m nodes from: fp32 [sum], normalised, an entry for each token."""

    supports: Supports
    q: Floats


@dataclass(frozen=True, slots=True)
class Masses:
    """The LLM's p at the supports that were asked for, fp32 [sum]; `logprobs` of the same tokens, or empty."""

    p: Floats
    logprobs: Floats
