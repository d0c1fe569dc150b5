"""The children that an SSM gives to the nodes of a tree, by rule (architecture section 5). Pure."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treecore.child_laws import ChildLaw
from treecore.drafts import draw_children
from treecore.law import Paths, adjusted, processed
from treecore.params import SamplingParams
from treecore.sampling import best_tokens_of_nodes, most_likely
from treecore.sparse import DraftLaws, Ids, Supports

_NOTHING = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class Children:
    """Children of a node, best or first drawn first, int32 [<= width]; `law` is what they were drawn from, if so."""

    tokens: Ids
    law: ChildLaw | None = None


@dataclass(frozen=True, slots=True)
class Drafting:
    """How one SSM drafts for one request. token_ids: int32 [V], the tokens of its trimmed head, or None."""

    params: SamplingParams
    token_ids: Ids | None
    ssm_idx: int

    def children(self, logits: NDArray[np.float32], paths: Paths, width: int) -> list[Children]:
        """Up to `width` children behind each of n nodes. logits: the SSM's, fp32 [n, V].

        `coupled` takes the best of log q + G, with the LLM's own noise; `naive` the most likely; the multi_step rules
        draw.
        """
        rows = adjusted(logits, self.token_ids, self.params, paths)
        return [
            Children(_NOTHING) if is_closed else found
            for found, is_closed in zip(self._of_rows(rows, paths, width), paths.is_closed, strict=True)
        ]

    def _of_rows(self, rows: NDArray[np.float32], paths: Paths, width: int) -> list[Children]:
        params, token_ids = self.params, self.token_ids
        if params.rule == "coupled" or params.is_greedy:
            best = best_tokens_of_nodes(rows, token_ids, params, paths.positions, width)
            return [Children(tokens) for tokens in best]
        laws = [processed(row, token_ids, params) for row in rows]
        if params.rule == "naive":
            return [Children(tokens) for tokens in most_likely(laws, width)]
        drawn = [
            draw_children(law, width, params, position, self.ssm_idx)
            for law, position in zip(laws, paths.positions, strict=True)
        ]
        return [Children(children.tokens, ChildLaw(children.token_ids, children.q)) for children in drawn]


def pack_laws(laws: Mapping[int, ChildLaw]) -> DraftLaws | None:
    """The laws of nodes, ascending, as they travel; None if there is none."""
    if not laws:
        return None
    lengths = [len(law.token_ids) for law in laws.values()]
    token_ids = np.concatenate([law.token_ids for law in laws.values()])
    supports = Supports(np.array(list(laws), np.int32), np.array(lengths, np.int32), token_ids)
    return DraftLaws(supports, np.concatenate([law.q for law in laws.values()]))
