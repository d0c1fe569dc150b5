"""What shaping a step's trees by likelihood costs the manager: merge, estimate, choose, learn; part of `bench trees`.

CPU time of 64 requests with 64 scored candidates each, from one SSM or two; no models, no bus.
"""

import heapq
import math
from collections.abc import Callable

import numpy as np

from treecore.calibration import Calibration
from treecore.choice import Bounds, StepPrice, choose
from treecore.costs import ForwardCosts
from treecore.forest import ScoredDraft, merge_drafts
from treecore.messages import ForwardCost

NUM_REQUESTS = 64
NUM_CANDIDATES = 64
_VOCAB = 512
_NUM_CHILDREN = 4
_BOUNDS = Bounds(1 + NUM_CANDIDATES, 16, 512)
_COSTS = [ForwardCost(1, 10.0), ForwardCost(64, 14.0), ForwardCost(1024, 140.0)]


def works(num_ssms: int) -> dict[str, Callable[[], object]]:
    """The parts of a step to be timed, by name; `all` is merge, estimate and choice together."""
    rng = np.random.default_rng(num_ssms)
    size = NUM_CANDIDATES // num_ssms
    drafts = [[grown(rng, ssm_idx, size) for ssm_idx in range(num_ssms)] for _ in range(NUM_REQUESTS)]
    roots = list(range(NUM_REQUESTS))
    price, calibration = StepPrice(ForwardCosts(_COSTS), 5.0), Calibration()
    forest = merge_drafts(roots, drafts)
    path_p = calibration.path_probabilities(forest)
    kept = choose(forest, path_p, _BOUNDS, price).kept
    committed = [forest.tokens[[root + NUM_REQUESTS]].tolist() for root in roots]

    def shape_all() -> None:
        fresh = merge_drafts(roots, drafts)
        choose(fresh, calibration.path_probabilities(fresh), _BOUNDS, price)

    return {
        "merge": lambda: merge_drafts(roots, drafts),
        "estimate": lambda: calibration.path_probabilities(forest),
        "choose": lambda: choose(forest, path_p, _BOUNDS, price),
        "all": shape_all,
        "trees": lambda: forest.trees(kept),
        "learn": lambda: calibration.observe(forest, committed),
        "re-root": lambda: [draft.below(draft.tokens[:1].tolist()) for own in drafts for draft in own],
    }


def grown(rng: np.random.Generator, ssm_idx: int, size: int) -> ScoredDraft:
    """A draft that grew best first: its `size` most likely nodes, with random shares."""
    tokens, parents, scores = list[int](), list[int](), list[float]()
    front: list[tuple[float, int, int, float]] = []  # (-log of the path's share, parent, token, score)
    reached = 0.0
    while len(tokens) < size:
        shares = np.log(np.maximum(rng.dirichlet(np.full(_NUM_CHILDREN + 1, 0.5))[1:], 1e-9))
        for token, score in zip(rng.choice(_VOCAB, _NUM_CHILDREN, replace=False), shares, strict=True):
            heapq.heappush(front, (reached - float(score), len(tokens), int(token), float(score)))
        reached, parent, token, score = heapq.heappop(front)
        tokens.append(token)
        parents.append(parent)
        scores.append(min(score, -math.ulp(1.0)))
    return ScoredDraft(ssm_idx, np.array(tokens, np.int32), np.array(parents, np.int32), np.array(scores, np.float32))
