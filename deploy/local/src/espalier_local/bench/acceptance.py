"""`espalier bench acceptance`: how often each verification rule accepts a child, on the same texts and seeds.

Both models read the LLM's own sampled text side by side; behind every position each rule drafts and verifies a star of
children with the functions that the services use. A synthetic pair, closer to each other, is shown beside the real one.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import get_args

import numpy as np

from espalier_local.bench.moments import Moment, open_reader, synthetic_moments
from espalier_local.bench.prompts import read_prompts
from espalier_local.bench.table import table
from espalier_local.options import add_system_options, positive, system_config
from espalier_local.output import say
from treecore.accept import Accepted, walk
from treecore.child_laws import ChildLaw
from treecore.law import Paths
from treecore.multi_step import supports_of, walk_multi_step
from treecore.noise import Seed
from treecore.params import Rule, SamplingParams
from treecore.sprout import Children, Drafting
from treecore.tree import TokenTree, Try
from treecore.verify import answer_nodes

_RULES: tuple[Rule, ...] = get_args(Rule)
_WIDTHS = (1, 2, 3, 5)


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
    rows = []
    for temperature in args.temperatures:
        moments = reader.moments(temperature, args.max_tokens)
        rows += measure(f"{config.model.name}, T {temperature}", moments, temperature, args.repeats)
    num_moments = args.num_prompts * args.max_tokens
    rows += measure("synthetic, T 1.0", synthetic_moments(num_moments), 1.0, args.repeats)
    head = ("pair", "total variation", "rule", *(f"accepted, width {width}" for width in _WIDTHS), "standard error")
    say(table(head, rows))
    say(f"tokens per step of a tree <k>: 1 + the chance. {num_moments} positions x {args.repeats} seeds a row.")
    return 0


def measure(name: str, moments: Iterator[Moment], temperature: float, repeats: int) -> list[tuple[str, ...]]:
    """One row a rule, over the same moments and seeds."""
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
    return rows


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
