"""`espalier bench acceptance`: how often each verification rule accepts a child, on the same texts and seeds.

Both models read the LLM's own sampled text side by side; behind every position each rule drafts and verifies a star of
children with the functions that the services use. A synthetic pair, closer to each other, is shown beside the real one.
From the default rule's rates follow the best static trees of some sizes (Sequoia), for --tree.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from espalier_local.bench.contest import angle
from espalier_local.bench.moments import Moment, open_reader, synthetic_moments
from espalier_local.bench.prompts import read_prompts
from espalier_local.bench.table import table
from espalier_local.options import add_system_options, positive, system_config
from espalier_local.output import say
from treecore.accept import Accepted, walk
from treecore.child_laws import ChildLaw
from treecore.law import Paths
from treecore.messages import join_tree
from treecore.multi_step import supports_of, walk_multi_step
from treecore.noise import Seed
from treecore.optimal_tree import best_expansion, expected_tokens, optimal_tree
from treecore.params import Rule, SamplingParams
from treecore.sprout import Children, Drafting
from treecore.tree import TokenTree, Try
from treecore.verify import answer_nodes

_RULES: tuple[Rule, ...] = get_args(Rule)
_WIDTHS = (1, 2, 3, 5)
_TREE_SIZES = (2, 3, 4, 6, 8, 16, 32)
_MAX_DEPTH = 8


@dataclass(slots=True)
class Tally:
    """Over many moments: how many there were, and at which try a child was accepted."""

    num_trials: int = 0
    accepted_at: list[int] = field(default_factory=lambda: [0] * max(_WIDTHS))

    def add(self, try_idx: int | None) -> None:
        """Count one star of children."""
        self.num_trials += 1
        if try_idx is not None:
            self.accepted_at[try_idx] += 1

    def by_rank(self) -> list[float]:
        """The chance of each child that none before it is accepted, and it is."""
        return [count / self.num_trials for count in self.accepted_at]

    def chance(self, width: int) -> float:
        """That one of the first `width` children is accepted."""
        return sum(self.accepted_at[:width]) / self.num_trials


def add_parser(benches: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Register the benchmark."""
    parser = benches.add_parser("acceptance", help="how often each rule accepts a child", description=__doc__)
    parser.add_argument("--prompts", type=Path, nargs="+", help="files of JSON lines with a `prompt` each")
    parser.add_argument("--num-prompts", type=positive, default=12)
    parser.add_argument("--max-tokens", type=positive, default=48, help="positions a prompt (default 48)")
    parser.add_argument("--repeats", type=positive, default=4, help="seeds a position (default 4)")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.6, 0.8, 1.0])
    add_system_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    config = system_config(args)
    reader = open_reader(config, read_prompts(args.prompts or (), args.num_prompts))
    rows, trees = [], []
    for temperature in args.temperatures:
        moments, name = reader.moments(temperature, args.max_tokens), f"{config.model.name}, T {temperature}"
        found, tallies = measure(name, moments, temperature, args.repeats)
        rows += found
        trees += best_trees(name, tallies["coupled"].by_rank())
    num_moments = args.num_prompts * args.max_tokens
    rows += measure("synthetic, T 1.0", synthetic_moments(num_moments), 1.0, args.repeats)[0]
    head = ("pair", "total variation", "rule", *(f"accepted, width {width}" for width in _WIDTHS), "standard error")
    say(table(head, rows))
    say(f"tokens per step of a tree <k>: 1 + the chance. {num_moments} positions x {args.repeats} seeds a row.\n")
    say(table(("coupled", "nodes", "best <k1,..>", "its tokens a step", "of the best tree", "its depth"), trees))
    return 0


def best_trees(name: str, by_rank: Sequence[float]) -> list[tuple[str, ...]]:
    """One row a size, the root included, if every level accepts as the first does."""
    rates = [by_rank] * _MAX_DEPTH
    rows: list[tuple[str, ...]] = []
    for size in _TREE_SIZES:
        widths, parents = best_expansion(rates, size), optimal_tree(rates, size)
        tokens = expected_tokens(expansion_parents(widths), rates)
        tree = join_tree(0, np.zeros(len(parents), np.int32), parents)
        best = expected_tokens(parents, rates)
        rows.append((name, str(size), angle(widths), f"{tokens:.2f}", f"{best:.2f}", str(tree.depths.max())))
    return rows


def expansion_parents(widths: Sequence[int]) -> NDArray[np.int32]:
    """The full tree <k1..km> below its root, level by level, as DraftedItem's parents."""
    parents: list[int] = []
    level = range(1)
    for width in widths:
        first = len(parents) + 1
        parents += [node for node in level for _ in range(width)]
        level = range(first, len(parents) + 1)
    return np.array(parents, np.int32)


def measure(
    name: str, moments: Iterator[Moment], temperature: float, repeats: int
) -> tuple[list[tuple[str, ...]], dict[Rule, Tally]]:
    """One row a rule, over the same moments and seeds, and the tallies behind them."""
    tallies = {rule: Tally() for rule in _RULES}
    distances = []
    for idx, moment in enumerate(moments):
        params = SamplingParams(temperature, 0, 1.0, Seed(0))
        distances.append(moment.total_variation(params))
        for repeat in range(repeats):
            seeded = replace(params, seed=Seed(1 + idx * repeats + repeat))
            for rule, tally in tallies.items():
                tally.add(accepted_try(moment, replace(seeded, rule=rule)))
    rows = []
    for rule, tally in tallies.items():
        error = 0.5 / np.sqrt(tally.num_trials / repeats)  # positions are independent, repeats of one are not
        chances = [f"{tally.chance(width):.3f}" for width in _WIDTHS]
        rows.append((name, f"{np.mean(distances):.3f}", rule, *chances, f"<= {error:.3f}"))
    return rows, tallies


def accepted_try(moment: Moment, params: SamplingParams) -> int | None:
    """Which of max(_WIDTHS) children behind the moment is accepted; the first k of them are those of width k."""
    paths = Paths(moment.committed, ((),))
    drafting = Drafting(params, moment.token_ids, ssm_idx=0)
    (children,) = drafting.children(moment.ssm[None], paths, max(_WIDTHS))
    path = _verify(moment, _star(moment.committed[-1], children), params, paths)
    return path.nodes[0] - 1 if path.nodes else None


def _verify(moment: Moment, tree: TokenTree, params: SamplingParams, paths: Paths) -> Accepted:
    """The root's answer decides; behind a child any token will do."""
    supports = supports_of(tree)
    answer = answer_nodes(moment.llm[None], params, paths, supports)
    tokens = np.concatenate([answer.tokens, np.zeros(len(tree) - 1, np.int32)])
    if supports is None:
        return walk(tree, tokens)
    return walk_multi_step(tree, tokens, answer.masses, supports, params, len(moment.committed))


def _star(root: int, children: Children) -> TokenTree:
    """A root and its children, one node a draw."""
    count = len(children.tokens)
    tokens = np.concatenate([np.array([root], np.int32), children.tokens])
    parents = np.array([-1, *[0] * count], np.int32)
    tries = ((), *[(Try(0, order),) for order in range(count)])
    laws: dict[tuple[int, int], ChildLaw] = {} if children.law is None else {(0, 0): children.law}
    return TokenTree(tokens, parents, tries, laws)
