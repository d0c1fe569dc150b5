"""An SSM's children as random draws from a law that the acceptance knows (rules multi_step and multi_step_iid).

Knows laws and draws; must not know trees, models or messages. SpecInfer, section 4.3: stochastic decoding needs
children that are samples of the SSM's own law.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treecore.law import Distribution, Row, top_indices
from treecore.noise import DRAFT_STREAM, uniform
from treecore.params import SamplingParams
from treecore.sparse import Ids

DRAFT_SUPPORT = 32

Law = NDArray[np.float64]
Pick = Callable[[int, Law], int]
"""(which draw, masses [K]) -> a column of positive mass, each with its share of the total."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """Children in drawing order, int32 [<= count], and their law: int32 [K] ascending, fp32 [K] normalised, all > 0."""

    tokens: Ids
    token_ids: Ids
    q: Row


def draw_children(law: Distribution, count: int, params: SamplingParams, position: int, ssm_idx: int) -> Drawn:
    """`count` draws from the law's DRAFT_SUPPORT most likely tokens.

    Independent draws (multi_step_iid: duplicates stay) or without replacement (multi_step: fewer if the support runs
    out). position: of the tokens to be drawn. The noise is keyed by (seed, position, SSM, draw): nodes of one level
    share it, which is sound because one path at most is ever accepted, and no choice of what to keep sees it.
    """
    token_ids, q = _likely(law)
    columns = draw(
        exact(q),
        count,
        params.rule == "multi_step_iid",
        lambda idx, masses: column_at(masses, uniform(params.seed, position, DRAFT_STREAM, idx, ssm_idx)),
    )
    return Drawn(token_ids[columns], token_ids, q)


def draw(q: Law, count: int, is_iid: bool, pick: Pick) -> list[int]:
    """Columns of up to `count` draws from q [K], in order; `pick` makes the choice."""
    columns: list[int] = []
    for idx in range(count):
        left = law_left(q, () if is_iid else columns)
        if left is None:
            break
        columns.append(pick(idx, left))
    return columns


def law_left(q: Law, drawn: Sequence[int]) -> Law | None:
    """The law of the next draw without replacement: q without the columns `drawn`, renormalised; None if none is left.

    This one function says what a child was drawn from, to the SSM that draws and to the acceptance.
    """
    if not drawn:
        return q
    left = q.copy()
    left[list(drawn)] = 0.0
    total = np.add.reduce(left)
    return left / total if total > 0.0 else None


def exact(q: Row) -> Law:
    """The law that travels as fp32, as both ends compute with it: float64, normalised."""
    law = q.astype(np.float64)
    law /= np.add.reduce(law)
    return law


def column_at(masses: Law, u: float) -> int:
    """Inverse CDF: the column of positive mass that u in (0, 1) falls on. masses [K] need not be normalised."""
    reached = masses.cumsum()
    total = float(reached[-1])
    return int(reached.searchsorted(min(u * total, math.nextafter(total, 0.0)), side="right"))


def _likely(law: Distribution) -> tuple[Ids, Row]:
    best = np.sort(top_indices(law.logp, DRAFT_SUPPORT))
    logp = law.logp[best].astype(np.float64)
    p = np.exp(logp - logp.max())
    q = (p / p.sum()).astype(np.float32)
    return law.token_ids[best][q > 0.0], q[q > 0.0]
