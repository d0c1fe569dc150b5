"""The children that an SSM gives to the nodes of a tree, by rule (architecture section 5). Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treecore.child_laws import ChildLaw
from treecore.drafts import draw_children
from treecore.law import Paths, adjusted, processed
from treecore.params import SamplingParams
from treecore.sampling import best_tokens_of_nodes, most_likely, most_likely_shares, noisy_among
from treecore.sparse import DraftLaws, Floats, Ids, Supports

_CONTENDERS = 256  # tokens whose noise is looked at; one best child in 80 of the shipped SSM stands beyond them (T 0.8)


@dataclass(frozen=True, slots=True)
class Children:
    """Children of a node, best or first drawn first, int32 [<= width]; `law` is what they were drawn from, if so.

    scores: see DraftedItem, fp32 [<= width], where they were asked for.
    """

    tokens: Ids
    law: ChildLaw | None = None
    scores: Floats | None = None


NO_CHILDREN = Children(np.empty(0, np.int32))


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
        return _none_if_closed(self._of_rows(rows, paths, width), paths)

    def scored_children(self, logits: NDArray[np.float32], paths: Paths, width: int) -> list[Children]:
        """The same children, with scores; not for rules that draw."""
        params = self.params
        assert not params.draws_drafts, "what is kept of draws must not depend on them"
        rows = adjusted(logits, self.token_ids, params, paths)
        laws = [processed(row, self.token_ids, params) for row in rows]
        if params.rule == "coupled" and not params.is_greedy:
            laws = noisy_among(laws, params.seed, paths.positions, max(_CONTENDERS, width))
        shares = [most_likely_shares(law, width) for law in laws]
        return _none_if_closed([Children(tokens, None, scores) for tokens, scores in shares], paths)

    def _of_rows(self, rows: NDArray[np.float32], paths: Paths, width: int) -> list[Children]:
        params, token_ids = self.params, self.token_ids
        if params.is_greedy:
            best = best_tokens_of_nodes(rows, token_ids, params, paths.positions, width)
            return [Children(tokens) for tokens in best]
        laws = [processed(row, token_ids, params) for row in rows]
        if params.rule == "coupled":
            laws = noisy_among(laws, params.seed, paths.positions, max(_CONTENDERS, width))
            return [Children(most_likely(law, width)) for law in laws]
        if params.rule == "naive":
            return [Children(most_likely(law, width)) for law in laws]
        drawn = [
            draw_children(law, width, params, position, self.ssm_idx)
            for law, position in zip(laws, paths.positions, strict=True)
        ]
        return [Children(children.tokens, ChildLaw(children.token_ids, children.q)) for children in drawn]


def _none_if_closed(families: Sequence[Children], paths: Paths) -> list[Children]:
    """No children behind nodes that nothing may follow."""
    return [NO_CHILDREN if is_closed else found for found, is_closed in zip(families, paths.is_closed, strict=True)]


def pack_laws(laws: Mapping[int, ChildLaw]) -> DraftLaws | None:
    """The laws of nodes, ascending, as they travel; None if there is none."""
    if not laws:
        return None
    lengths = [len(law.token_ids) for law in laws.values()]
    token_ids = np.concatenate([law.token_ids for law in laws.values()])
    supports = Supports(np.array(list(laws), np.int32), np.array(lengths, np.int32), token_ids)
    return DraftLaws(supports, np.concatenate([law.q for law in laws.values()]))
