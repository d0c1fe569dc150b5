"""How likely the LLM is to choose each candidate: what SSMs' scores are worth, learned from every step.

Knows forests and what was committed; must not know models, costs or rules. Mutable: one owner.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treecore.choice import Probabilities
from treecore.forest import Forest, Places

_SHRUNK = 0.85  # of what a score claims, before anything was seen
_EDGES = np.log(np.array([0.01, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97], np.float32))
_LEAST_SCORE = -14.0  # nothing is likelier to be chosen for being told apart from less
_ODDS = 1e-7, 1e7  # likewise, and on the sure side
_NUM_BINS, _NUM_DEPTHS, _NUM_RANKS, _NUM_SSMS = len(_EDGES) + 1, 7, 6, 3  # the last of each holds all beyond
_MEMORY = 300  # observations of a cell after which an older one counts 1/e
_DOUBT = 12.0  # observations of a cell that count as much as the guess that no correction is due

Odds = NDArray[np.float64]
Seen = NDArray[np.bool_]


class Calibration:
    """Estimates P(the LLM takes a node | it took the parent), and learns from each step's whole forest.

    The odds that a score claims are corrected by (SSM, bin of the score), then by (SSM, depth, rank). A node that
    several SSMs propose is missed only if all of them err (noisy or); as SSMs of one LLM err together, that is
    corrected by (how many propose it, how many looked, bin of the chance). Children of one parent share at most 1. Each
    correction is an odds ratio, seen against predicted, on top of those before it.

    Chosen on simulated coupled drafts, log loss per request after 500 requests, SSMs near and far from the LLM: claims
    1.395 and 1.852; by score alone 1.317 and 1.677, by rank alone 1.301 and 1.729, both 1.296 and 1.676; online
    logistic regression 1.296 and 1.681. Two near SSMs: noisy or 1.345, mean log-odds 1.346, the best's 1.378, the sum's
    1.453. With a far SSM beside a near one, agreement without and with the bin: 1.301 and 1.223.
    """

    def __init__(self) -> None:
        self._ssms: dict[int, int] = {}  # ssm_idx -> its row in the tables
        self._by_score = _Corrections()
        self._by_place = _Corrections()
        self._by_agreement = _Corrections()

    def path_probabilities(self, forest: Forest) -> Probabilities:
        """Chance that the LLM's path goes through each node, fp64 [M]: 1 for roots, never more than the parent's."""
        if len(forest) == forest.num_requests:
            return np.ones(len(forest))
        odds, candidates = self._judge(forest).final, slice(forest.num_requests, None)
        path_p = np.ones(len(forest))
        path_p[candidates] = odds / (1.0 + odds)
        parents = forest.parents[candidates]
        path_p[candidates] /= np.maximum(np.bincount(parents, path_p[candidates], len(forest)), 1.0)[parents]
        for level in forest.levels:
            path_p[level] *= path_p[forest.parents[level]]
        return path_p

    def observe(self, forest: Forest, committed: Sequence[Sequence[int]]) -> None:
        """Learn from a step in which the forest's requests committed these tokens (accepted ones and bonus; or none).

        Each candidate behind a node of the LLM's path was the LLM's token or not, whether it was verified or not.
        """
        if len(forest) == forest.num_requests:
            return
        is_seen, is_hit = _outcomes(forest, committed)
        judged, tries = self._judge(forest), forest.tries.nodes
        of_tries, of_nodes = is_seen[tries], is_seen[forest.num_requests :]
        tried, met = is_hit[tries][of_tries], is_hit[forest.num_requests :][of_nodes]
        self._by_score.learn(judged.bins[of_tries], tried, judged.claimed[of_tries])
        self._by_place.learn(judged.places[of_tries], tried, judged.scored[of_tries])
        self._by_agreement.learn(judged.agreements[of_nodes], met, judged.joined[of_nodes])

    def _judge(self, forest: Forest) -> "_Judgement":
        tries = forest.tries
        ssms = np.array([self._ssms.setdefault(ssm_id, len(self._ssms)) for ssm_id in forest.ssm_ids], np.int64)
        ssms = ssms[tries.ssms]
        bins = ssms * _NUM_BINS + np.searchsorted(_EDGES, tries.scores)
        depths = np.minimum(forest.depths[tries.nodes], _NUM_DEPTHS) - 1
        places = (ssms * _NUM_DEPTHS + depths) * _NUM_RANKS + np.minimum(tries.ranks, _NUM_RANKS - 1)
        claimed = _SHRUNK * np.exp(np.maximum(tries.scores, _LEAST_SCORE), dtype=np.float64)
        claimed /= 1.0 - claimed
        scored = claimed * self._by_score.factors(len(self._ssms) * _NUM_BINS)[bins]
        placed = scored * self._by_place.factors(len(self._ssms) * _NUM_DEPTHS * _NUM_RANKS)[places]
        joined = np.clip(np.multiply.reduceat(1.0 + placed, forest.starts) - 1.0, *_ODDS)
        shares = np.searchsorted(_EDGES, np.log(joined / (1.0 + joined)))
        agreements = _agreements(forest) * _NUM_BINS + shares
        of_agreement = self._by_agreement.factors(_NUM_SSMS**2 * _NUM_BINS)[agreements]
        of_agreement[agreements < _NUM_BINS] = 1.0  # who looked alone agrees with nobody
        return _Judgement(bins, places, claimed, scored, agreements, joined, joined * of_agreement)


@dataclass(frozen=True, slots=True)
class _Judgement:
    """Odds and the cells that correct them: bins, places, claimed, scored of T tries; the others of M - R nodes."""

    bins: Places
    places: Places
    claimed: Odds
    scored: Odds
    agreements: Places
    joined: Odds
    final: Odds


class _Corrections:
    """Odds ratios by cell: what was seen against what was predicted, the latest observations counting most."""

    def __init__(self) -> None:
        self._sums = np.zeros((4, 0))  # by cell: hits, misses, and both as predicted
        self._factors: Odds = np.zeros(0)  # that follow from them: asked for in a step, learned behind it

    def factors(self, num_cells: int) -> Odds:
        """What to multiply odds with, fp64 [num_cells at least]."""
        missing = num_cells - self._sums.shape[1]
        if missing > 0:
            self._sums = np.pad(self._sums, ((0, 0), (0, missing)))
            self._factors = self._found()
        return self._factors

    def learn(self, cells: Places, is_hit: Seen, odds: Odds) -> None:
        """Cells [n] predicted these odds, and this came of it."""
        num_cells = self._sums.shape[1]
        p = odds / (1.0 + odds)
        self._sums *= np.exp(np.bincount(cells, minlength=num_cells) / -_MEMORY)
        for row, weights in enumerate((is_hit, ~is_hit, p, 1.0 - p)):
            self._sums[row] += np.bincount(cells, weights, num_cells)
        self._factors = self._found()

    def _found(self) -> Odds:
        hits, misses, likely, unlikely = self._sums + _DOUBT * self._rates()
        factors: Odds = hits * unlikely / (misses * likely)
        return factors

    def _rates(self) -> Odds:
        """What one observation is expected to add: the mean prediction of its cell, fp64 [4, num_cells]."""
        _, _, likely, unlikely = self._sums
        num_seen = likely + unlikely
        rates = np.divide(likely, num_seen, out=np.full_like(likely, 0.5), where=num_seen > 0)
        return np.stack([rates, 1.0 - rates, rates, 1.0 - rates])


def _agreements(forest: Forest) -> Places:
    """By candidate the number of (SSMs that propose it, SSMs that propose children of its parent)."""
    if len(forest.ssm_ids) <= 1:
        return np.zeros(len(forest.starts), np.int64)
    num_proposing = np.diff(forest.starts, append=len(forest.tries.nodes))
    has_looked = np.zeros((len(forest.ssm_ids), len(forest)), np.bool_)
    has_looked[forest.tries.ssms, forest.parents[forest.tries.nodes]] = True
    num_looking = has_looked.sum(axis=0)[forest.parents[forest.num_requests :]]
    cells: Places = (np.minimum(num_proposing, _NUM_SSMS) - 1) * _NUM_SSMS + np.minimum(num_looking, _NUM_SSMS) - 1
    return cells


def _outcomes(forest: Forest, committed: Sequence[Sequence[int]]) -> tuple[Seen, Seen]:
    """By node whether it stands behind a node of the path whose next token is known, and whether it is that token."""
    tokens = np.full((len(committed), max(map(len, committed), default=0)), -1, np.int64)
    for row, own in zip(tokens, committed, strict=True):
        row[: len(own)] = own
    is_seen, is_hit = np.zeros(len(forest), np.bool_), np.ones(len(forest), np.bool_)
    for level, wanted in zip(forest.levels, tokens.T, strict=False):
        next_token = wanted[forest.requests[level]]
        is_seen[level] = is_hit[forest.parents[level]] & (next_token >= 0)
        is_hit[level] = is_seen[level] & (forest.tokens[level] == next_token)
    return is_seen, is_hit
