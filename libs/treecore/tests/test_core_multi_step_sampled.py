"""The multi_step rules as the three processes run them, sampled: chi-square against the LLM's own law, and mutants."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import sqrt

import numpy as np
import pytest

from treecore import drafts, multi_step
from treecore.accept import Accepted
from treecore.drafts import column_at, draw_children
from treecore.law import Distribution, processed
from treecore.merge import merge, prune
from treecore.multi_step import Attempt, masses_at, outside_draw, supports_of, walk_multi_step
from treecore.noise import TOKEN_STREAM, Seed, uniform
from treecore.params import Rule, SamplingParams
from treecore.sparse import DraftLaws, Masses, Supports
from treecore.testing.scripted import ScriptedModel
from treecore.tree import TokenTree

V = 6
PROMPT = (3, 1)
NO_LOGPROBS = np.empty(0, np.float32)
Path = tuple[int, ...]


@dataclass
class Pair:
    """An LLM and SSMs without weights, a tree's shape, and the step that the three processes make together."""

    rule: Rule
    widths: tuple[int, ...]
    num_ssms: int = 1
    max_nodes: int = 64
    laws: dict[tuple[int, Path], Distribution] = field(default_factory=dict)
    masses: dict[Path, np.ndarray] = field(default_factory=dict)

    def law(self, model_idx: int, path: Path) -> Distribution:
        """The LLM's (model 0; top_k 5 of 6) or an SSM's (top_k 3)."""
        if (model_idx, path) not in self.laws:
            model = ScriptedModel(V, seed=1 + model_idx, memory=2, spread=1.5)
            params = SamplingParams(1.0, 3 if model_idx else 5, 1.0, Seed(0))
            self.laws[model_idx, path] = processed(model.logits((*PROMPT, *path)), None, params)
        return self.laws[model_idx, path]

    def draft(self, ssm_idx: int, params: SamplingParams, before: Path) -> TokenTree:
        """One SSM's tree behind `before`; of twins only the first is grown."""
        tokens, parents, paths, inner = [0], [-1], [before], []
        for depth, width in enumerate(self.widths):
            level = {path: node for node, path in reversed(list(enumerate(paths))) if len(path) == len(before) + depth}
            for path, node in sorted(level.items(), key=lambda item: item[1]):
                drawn = draw_children(self.law(1 + ssm_idx, path), width, params, len(PROMPT) + len(path), ssm_idx)
                inner.append((node, drawn))
                tokens += drawn.tokens.tolist()
                parents += [node] * len(drawn.tokens)
                paths += [(*path, token) for token in drawn.tokens.tolist()]
        nodes = np.array([node for node, _ in inner], np.int32)
        lengths = np.array([len(drawn.q) for _, drawn in inner], np.int32)
        supports = Supports(nodes, lengths, np.concatenate([drawn.token_ids for _, drawn in inner]))
        laws = DraftLaws(supports, np.concatenate([drawn.q for _, drawn in inner]))
        return TokenTree.checked(np.array(tokens, np.int32), np.array(parents, np.int32), ssm_idx, laws)

    def step(self, params: SamplingParams, before: Path) -> Accepted:
        """Draft, merge, cut, verify, accept."""
        trees = [self.draft(ssm_idx, params, before) for ssm_idx in range(self.num_ssms)]
        tree = prune(merge(trees), self.max_nodes, 8)
        supports = supports_of(tree)
        assert supports is not None
        paths = [(*before, *path) for path in tree.paths()]
        spans = np.split(supports.token_ids, supports.lengths.cumsum()[:-1])
        known = dict(zip(supports.nodes.tolist(), spans, strict=True))
        p = np.concatenate([self.masses_everywhere(paths[node])[ids] for node, ids in known.items()])
        llm_tokens = _LlmTokens(self, paths, known, params)
        return walk_multi_step(
            tree,
            llm_tokens,
            Masses(p, NO_LOGPROBS),
            supports,
            params,
            len(PROMPT) + len(before),  # type: ignore[arg-type]
        )

    def tokens(self, seed: int, count: int) -> Path:
        """The first `count` tokens of a request."""
        params = SamplingParams(1.0, 5, 1.0, Seed(seed), rule=self.rule)
        tokens: Path = ()
        while len(tokens) < count:
            tokens += self.step(params, tokens).tokens
        return tokens[:count]

    def masses_everywhere(self, path: Path) -> np.ndarray:
        """The LLM's p of all tokens, fp32 [V]."""
        if path not in self.masses:
            self.masses[path] = masses_at(self.law(0, path), np.arange(V, dtype=np.int32))
        return self.masses[path]


@dataclass
class _LlmTokens:
    """The verifier's token behind a node, with cheaper noise than its own (test_outside_draws_have_their_law)."""

    pair: Pair
    paths: list[Path]
    known: dict[int, np.ndarray]
    params: SamplingParams

    def __getitem__(self, node: int) -> int:
        p = self.pair.masses_everywhere(self.paths[node]).astype(np.float64)
        p[self.known.get(node, [])] = 0.0
        if not p.any():
            return -1
        position = len(PROMPT) + len(self.paths[node])
        return column_at(p, uniform(self.params.seed, position, TOKEN_STREAM, 0))


def chi_square(pair: Pair, num_tokens: int, num_samples: int) -> float:
    """How far continuations of `num_tokens` are from the LLM's own law, in standard normal units (Wilson-Hilferty).

    Cells that expect fewer than 5 are pooled. Above LIMIT is an alarm; by chance that happens at a rate below 1e-5.
    """
    counts = Counter(pair.tokens(seed, num_tokens) for seed in range(num_samples))
    return deviation(counts, path_law(pair, num_tokens))


def deviation(counts: Counter[Path], law: dict[Path, float]) -> float:
    """See chi_square."""
    num_samples = counts.total()
    expected = {path: num_samples * p for path, p in law.items()}
    assert set(counts) <= set(expected)
    cells = [(counts.get(path, 0), mean) for path, mean in expected.items() if mean >= 5.0]
    rest = sum(mean for mean in expected.values() if mean < 5.0)
    if rest > 0.0:
        cells.append((num_samples - sum(count for count, _ in cells), rest))
    freedom = len(cells) - 1
    statistic = sum((count - mean) ** 2 / mean for count, mean in cells)
    return float(((statistic / freedom) ** (1 / 3) - 1 + 2 / (9 * freedom)) / sqrt(2 / (9 * freedom)))


LIMIT = 4.5


def path_law(pair: Pair, num_tokens: int, path: Path = ()) -> dict[Path, float]:
    """The LLM's law over continuations."""
    if len(path) == num_tokens:
        return {path: 1.0}
    law = pair.law(0, path)
    p = masses_at(law, law.token_ids).tolist()
    return {
        longer: mass * rest
        for token, mass in zip(law.token_ids.tolist(), p, strict=True)
        for longer, rest in path_law(pair, num_tokens, (*path, token)).items()
    }


@pytest.mark.parametrize(
    "pair",
    [
        pytest.param(Pair("multi_step", (2,), num_ssms=2), id="without-replacement-two-ssms"),
        pytest.param(Pair("multi_step_iid", (3,), max_nodes=3), id="iid-pruned"),
    ],
)
def test_next_tokens_have_the_llms_law(pair: Pair) -> None:
    """20,000 next tokens, chi-square; false alarms below 1e-5."""
    assert chi_square(pair, 1, 20_000) < LIMIT


@pytest.mark.parametrize(
    "pair",
    [
        pytest.param(Pair("multi_step", (2, 1)), id="without-replacement"),
        pytest.param(Pair("multi_step_iid", (2, 2), max_nodes=5), id="iid-pruned"),
    ],
)
def test_continuations_have_the_llms_law(pair: Pair) -> None:
    """Three tokens, over several steps; nodes of a level share their noise. False alarms below 1e-5."""
    assert chi_square(pair, 3, 2_500) < LIMIT


def most_likely(q: drafts.Law, count: int, is_iid: bool, pick: drafts.Pick) -> list[int]:
    """Mutant: top-k children."""
    best: list[int] = np.argsort(-q, kind="stable")[:count].tolist()
    return best


def distinct(attempts: Callable[..., Iterator[Attempt]]) -> Callable[..., Iterator[Attempt]]:
    """Mutant: a token is tried once."""

    def mutant(*args: object) -> Iterator[Attempt]:
        seen: set[int] = set()
        for attempt in attempts(*args):
            if attempt.child not in seen:
                yield attempt
            seen.add(attempt.child)

    return mutant


MUTANTS = {
    "q-ratios-on-top-k": (drafts, "draw", most_likely, Pair("multi_step", (2,))),
    "duplicates-collapsed": (multi_step, "attempts_at", distinct(multi_step.attempts_at), Pair("multi_step_iid", (3,))),
    "merged-equals-tried-once": (
        multi_step,
        "attempts_at",
        distinct(multi_step.attempts_at),
        Pair("multi_step", (2,), num_ssms=2),
    ),
    "plain-q-without-replacement": (multi_step, "law_left", lambda q, _: q, Pair("multi_step", (3,))),
    "residual-not-renormalised": (multi_step, "shrunk", lambda r, q: np.maximum(r - q, 0.0), Pair("multi_step", (2,))),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_sampling_catches_mutants(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same test, with fewer samples, is far beyond its limit."""
    module, function, mutant, pair = MUTANTS[name]
    monkeypatch.setattr(module, function, mutant)
    assert chi_square(pair, 1, 4_000) > LIMIT


def test_redraws_on_retries_are_caught() -> None:
    """Mutant: a step that accepted nothing is done again with other draws."""

    class Retrying(Pair):
        def tokens(self, seed: int, count: int) -> Path:
            params = [SamplingParams(1.0, 5, 1.0, Seed(2 * seed + idx), rule=self.rule) for idx in range(2)]
            first = self.step(params[0], ())
            return (first if first.nodes else self.step(params[1], ())).tokens[:count]

    assert chi_square(Retrying("multi_step", (1,)), 1, 1_500) > LIMIT


def test_outside_draws_have_their_law() -> None:
    """4,000 draws outside {1, 4} are p renormalised there; false alarms below 1e-5."""
    pair, support = Pair("multi_step", ()), np.array([1, 4], np.int32)
    law = pair.law(0, ())
    rest = {token: float(pair.masses_everywhere(())[token]) for token in law.token_ids.tolist() if token not in (1, 4)}
    counts = Counter((outside_draw(law, support, SamplingParams(1.0, 5, 1.0, Seed(seed)), 6),) for seed in range(4_000))
    assert deviation(counts, {(token,): mass / sum(rest.values()) for token, mass in rest.items()}) < LIMIT
