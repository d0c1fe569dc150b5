"""Multi-step speculative sampling (SpecInfer, Algorithm 2) from sparse masses: rules multi_step and multi_step_iid.

Knows a tree of draws, their laws, and the LLM's p where it is needed; must not know models or requests. Exact: whatever
the SSMs drew, each token's law is the LLM's own. What carries the proof: each try is accepted by the ratio of the
residual to the very law that its child was drawn from, and every draw here has noise of its own.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple, Protocol

import numpy as np

from treecore.accept import Accepted
from treecore.drafts import Law, column_at, exact, law_left
from treecore.errors import WireError
from treecore.law import Distribution, Row, keep
from treecore.messages import Tokens
from treecore.noise import ACCEPT_STREAM, RESIDUAL_STREAM, Seed, uniform
from treecore.params import SamplingParams
from treecore.sampling import best_tokens
from treecore.sparse import Ids, Masses, Supports
from treecore.tree import TokenTree

Known = Callable[[int], tuple[Ids, Law] | None]
"""By node: its support, int32 [K], and p there, float64 [K]; None for a node without one."""

_AS_IS = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, seed=Seed(0))
_TOLERANCE = 1e-3


class Coins(Protocol):
    """Where the walk's randomness comes from. depth: of the node behind which a token is chosen."""

    def accepts(self, depth: int, try_idx: int, chance: float) -> bool:
        """True with probability min(1, chance), independently for each (depth, try)."""

    def pick(self, depth: int, masses: Law) -> int:
        """A column of positive mass, each with its share of the total."""


@dataclass(frozen=True, slots=True)
class KeyedCoins:
    """Coins keyed by (seed, position): a retry falls the same way."""

    seed: Seed
    committed_len: int

    def accepts(self, depth: int, try_idx: int, chance: float) -> bool:
        """See Coins."""
        return uniform(self.seed, self.committed_len + depth, ACCEPT_STREAM, try_idx) < chance

    def pick(self, depth: int, masses: Law) -> int:
        """See Coins."""
        return column_at(masses, uniform(self.seed, self.committed_len + depth, RESIDUAL_STREAM, 0))


class Attempt(NamedTuple):
    """A try at a node: its child, the child's column, and the law that it was drawn from, float64 [K + 1]."""

    child: int
    column: int
    q: Law


def supports_of(tree: TokenTree) -> Supports | None:
    """Where the acceptance needs the LLM's p: behind each node with draws, the union of its laws. None: nowhere."""
    if not tree.laws:
        return None
    found: dict[int, list[Ids]] = {}
    for (node, _), law in tree.laws.items():
        found.setdefault(node, []).append(law.token_ids)
    nodes = sorted(found)
    unions = [_union(found[node]) for node in nodes]
    lengths = np.array([len(union) for union in unions], np.int32)
    return Supports(np.array(nodes, np.int32), lengths, np.concatenate(unions))


def masses_at(law: Distribution, support_ids: Ids) -> Row:
    """The LLM's p, fp32 [K], normalised over all of the law's tokens; 0 for those that truncation removed."""
    logp = law.logp.astype(np.float64)
    p = np.exp(logp - logp.max())
    columns = np.minimum(law.token_ids.searchsorted(support_ids), len(p) - 1)
    masses = np.where(law.token_ids[columns] == support_ids, p[columns] / p.sum(), 0.0)
    return masses.astype(np.float32)


def outside(law: Distribution, support_ids: Ids) -> Distribution:
    """The law on the tokens that are not in the support and are possible; maybe none."""
    columns = np.minimum(support_ids.searchsorted(law.token_ids), len(support_ids) - 1)
    return keep(law, np.flatnonzero((support_ids[columns] != law.token_ids) & (law.logp > -np.inf)))


def outside_draw(law: Distribution, support_ids: Ids, params: SamplingParams, position: int) -> int:
    """One draw from p outside the support; -1 if p has nothing there.

    argmax of log p + G over the tokens outside (Gumbel-max), with the G of x_t. Nothing else at this position looks at
    that noise: draws of children, acceptance and residual have streams of their own, and the support follows from the
    laws and the path. At a node without a support the same noise gives x_t, but one node a position is asked at most.
    """
    rest = outside(law, support_ids)
    if len(rest.token_ids) == 0:
        return -1
    return int(best_tokens(rest.logp, rest.token_ids, replace(_AS_IS, seed=params.seed), position)[0])


def walk_multi_step(
    tree: TokenTree,
    verified_tokens: Tokens,
    masses: Masses | None,
    supports: Supports | None,
    params: SamplingParams,
    committed_len: int,
) -> Accepted:
    """The accepted path of a tree whose children are draws, then a token of the residual or of p.

    verified_tokens: int32 [N], from p outside the node's support (-1: nothing there), from p where it has none.
    masses: at `supports`, which is `supports_of(tree)`. committed_len: committed tokens, the root included.
    Raises WireError if the masses are none of these supports.
    """
    is_iid = params.rule == "multi_step_iid"
    known = known_masses(supports, masses)
    return follow(tree, verified_tokens, known, is_iid, KeyedCoins(params.seed, committed_len))


def known_masses(supports: Supports | None, masses: Masses | None) -> Known:
    """What is known behind a node. Raises WireError if the arrays do not fit."""
    if supports is None or masses is None:
        if supports is not None or masses is not None:
            raise WireError("masses without supports, or supports without masses")
        return lambda _: None
    if len(masses.p) != len(supports.token_ids) or not masses.p.min() >= 0.0:  # nor NaN
        raise WireError("masses that are negative, or not one for each token of the supports")
    p = masses.p.astype(np.float64)
    spans = supports.spans()
    if np.add.reduceat(p, [span.start for span in spans.values()]).max() > 1.0 + _TOLERANCE:
        raise WireError("masses above 1")
    return lambda node: (supports.token_ids[spans[node]], p[spans[node]]) if node in spans else None


def follow(tree: TokenTree, verified_tokens: Tokens, known: Known, is_iid: bool, coins: Coins) -> Accepted:
    """`walk_multi_step` on exact laws and any coins: the function that the tests enumerate."""
    nodes: list[int] = []
    node = 0
    while True:
        token = int(verified_tokens[node])
        found = known(node)
        if nodes and token < 0 and (found is None or not found[1].any()):  # no token may follow: no bonus
            return Accepted(tuple(nodes), tuple(tree.tokens[nodes].tolist()))
        if found is None:
            break
        token_ids, p = found
        residual = with_outside(p, may_be_outside=token >= 0)
        child, residual = settle(residual, attempts_at(tree, node, token_ids, is_iid), coins, len(nodes))
        if child is None:
            column = coins.pick(len(nodes), residual)
            token = token if column == len(token_ids) else int(token_ids[column])
            break
        nodes.append(child)
        node = child
    if token < 0:
        raise WireError("no token behind the root")
    return Accepted(tuple(nodes), (*tree.tokens[nodes].tolist(), token))


def settle(residual: Law, attempts: Iterator[Attempt], coins: Coins, depth: int) -> tuple[int | None, Law]:
    """The accepted child, or None and what is left of p (Algorithm 2, VerifyStochastic). residual: float64 [K + 1]."""
    for try_idx, (child, column, q) in enumerate(attempts):
        if coins.accepts(depth, try_idx, float(residual[column] / q[column])):
            return child, residual
        residual = shrunk(residual, q)
    return None, residual


def shrunk(residual: Law, q: Law) -> Law:
    """norm(max(0, r - q)), the law after a rejection.

    Where r = q nothing is left and no rejection was possible but for rounding: then r stays, whose tokens all have p.
    """
    left = np.maximum(residual - q, 0.0)
    total = np.add.reduce(left)
    return left / total if total > 0.0 else residual


def with_outside(p: Law, *, may_be_outside: bool) -> Law:
    """The law p on the support and one mass for all that is outside, normalised, float64 [K + 1]."""
    total = float(np.add.reduce(p))
    rest = max(0.0, 1.0 - total) if may_be_outside else 0.0
    if total + rest <= 0.0:
        raise WireError("a node without any mass")
    masses = np.empty(len(p) + 1)
    masses[:-1], masses[-1] = p, rest
    masses /= total + rest
    return masses


def attempts_at(tree: TokenTree, node: int, token_ids: Ids, is_iid: bool) -> Iterator[Attempt]:
    """The tries behind `node` in order, each with its law given the earlier siblings of the same SSM."""
    for ssm_idx, pairs in groupby(tree.tries_at(node), key=lambda pair: pair[0].ssm_idx):
        law = tree.laws.get((node, ssm_idx))
        if law is None:
            continue
        children = [child for _, child in pairs]
        q = exact(law.q)
        columns = token_ids.searchsorted(law.token_ids)
        own = law.token_ids.searchsorted(tree.tokens[children]).tolist()
        for order, child in enumerate(children):
            left = law_left(q, () if is_iid else own[:order])
            if left is None or left[own[order]] <= 0.0:  # never drawn so: the SSM did not keep to the rule
                break
            spread = np.zeros(len(token_ids) + 1)
            spread[columns] = left
            yield Attempt(child, int(columns[own[order]]), spread)


def _union(supports: Sequence[Ids]) -> Ids:
    return supports[0] if len(supports) == 1 else np.unique(np.concatenate(supports))
