"""`espalier bench trees`: what the manager's own work on trees costs: merge, prune, supports and the walk, by rule.

CPU time of 32 requests with a tree of 64 nodes each, from one SSM or two, and of shaping trees by likelihood; no models
and no bus.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import get_args

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from espalier_local.bench import choice
from espalier_local.bench.table import table
from espalier_local.options import positive
from espalier_local.output import say
from treecore.accept import walk
from treecore.child_laws import ChildLaw
from treecore.law import Paths
from treecore.merge import merge, prune
from treecore.messages import Tokens
from treecore.multi_step import supports_of, walk_multi_step
from treecore.noise import Seed
from treecore.params import Rule, SamplingParams
from treecore.sparse import Masses, Supports
from treecore.sprout import Drafting, pack_laws
from treecore.tree import TokenTree

_NUM_REQUESTS = 32
_MAX_NODES = 64
_COMMITTED = (1, 2, 3)
_VOCAB = 512
_SHAPES: dict[str, list[tuple[int, ...]]] = {
    "one SSM <3,5,1,1,1>": [(3, 5, 1, 1, 1)],
    "two SSMs <2,3,2,1>": [(2, 3, 2, 1)] * 2,
}


def add_parser(benches: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Register the benchmark."""
    parser = benches.add_parser("trees", help="CPU time of merging and accepting trees", description=__doc__)
    parser.add_argument("--rounds", type=positive, default=15)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    rows = []
    for name, shape in _SHAPES.items():
        rules = tqdm(get_args(Rule), unit="rule", desc=name, leave=False, disable=None)
        rows += [(name, rule, *measure(shape, rule, args.rounds)) for rule in rules]
    head = (f"{_NUM_REQUESTS} requests", "rule", "nodes", "merge ms", "supports ms", "walk ms", "all ms")
    say(table(head, rows))
    say(table(*_choice(args.rounds)))
    return 0


def _choice(rounds: int) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """The table of choice.py: median CPU times."""
    rows = []
    for num_ssms in (1, 2):
        times = {name: median(_cpu_ms(work) for _ in range(rounds)) for name, work in choice.works(num_ssms).items()}
        rows.append((f"{num_ssms} SSMs", *(f"{value:.2f}" for value in times.values())))
    head = (f"{choice.NUM_REQUESTS} requests, {choice.NUM_CANDIDATES} candidates", *(f"{name} ms" for name in times))
    return head, rows


def measure(shape: Sequence[tuple[int, ...]], rule: Rule, rounds: int) -> tuple[str, ...]:
    """Median CPU times, and the mean number of nodes."""
    params = [SamplingParams(1.0, 0, 1.0, Seed(idx), rule=rule) for idx in range(_NUM_REQUESTS)]
    drafts = [[grown(widths, one, idx) for idx, widths in enumerate(shape)] for one in params]
    trees = [prune(merge(parts), _MAX_NODES, _MAX_NODES) for parts in drafts]
    supports = [supports_of(tree) for tree in trees]
    answers = [_answer(tree, found) for tree, found in zip(trees, supports, strict=True)]

    def accept_all() -> None:
        for tree, found, (tokens, masses), one in zip(trees, supports, answers, params, strict=True):
            if found is None:
                walk(tree, tokens)
            else:
                walk_multi_step(tree, tokens, masses, found, one, len(_COMMITTED))

    works: list[Callable[[], object]] = [
        lambda: [prune(merge([_fresh(part) for part in parts]), _MAX_NODES, _MAX_NODES) for parts in drafts],
        lambda: [supports_of(tree) for tree in trees],
        accept_all,
    ]
    times = [median(_cpu_ms(work) for _ in range(rounds)) for work in works]
    num_nodes = float(np.mean([len(tree) for tree in trees]))
    return (f"{num_nodes:.0f}", *(f"{value:.2f}" for value in times), f"{sum(times):.2f}")


def grown(widths: Sequence[int], params: SamplingParams, ssm_idx: int) -> TokenTree:
    """An SSM's tree behind _COMMITTED; its logits are random, the same behind the same path."""
    drafting = Drafting(params, None, ssm_idx)
    tokens, parents, laws = [_COMMITTED[-1]], [-1], dict[int, ChildLaw]()
    level: list[tuple[int, tuple[int, ...]]] = [(0, ())]
    for width in widths:
        below = []
        for node, path in level:
            (children,) = drafting.children(_logits(path, ssm_idx)[None], Paths(_COMMITTED, (path,)), width)
            for token in children.tokens.tolist():
                below.append((len(tokens), (*path, token)))
                tokens.append(token)
                parents.append(node)
            if children.law is not None:
                laws[node] = children.law
        level = below
    return TokenTree.checked(np.array(tokens, np.int32), np.array(parents, np.int32), ssm_idx, pack_laws(laws))


def _answer(tree: TokenTree, supports: Supports | None) -> tuple[Tokens, Masses | None]:
    """What an LLM might say: the first child's token behind every node, and masses that leave a tenth outside."""
    first = [children[0] if children else 0 for children in tree.children]
    tokens = tree.tokens[first]
    if supports is None:
        return tokens, None
    p = np.concatenate([np.full(length, 0.9 / length, np.float32) for length in supports.lengths])
    return tokens, Masses(p, np.empty(0, np.float32))


def _fresh(tree: TokenTree) -> TokenTree:
    """The same tree without what it has cached of itself."""
    return TokenTree(tree.tokens, tree.parents, tree.tries, tree.laws)


def _logits(path: tuple[int, ...], ssm_idx: int) -> NDArray[np.float32]:
    rng = np.random.default_rng([ssm_idx, *path])
    return (3 * rng.standard_normal(_VOCAB)).astype(np.float32)


def _cpu_ms(work: Callable[[], object]) -> float:
    started = time.process_time()
    work()
    return (time.process_time() - started) * 1e3
