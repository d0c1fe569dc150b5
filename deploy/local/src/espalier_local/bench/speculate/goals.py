"""What the trees should bring, against what they brought."""

from collections.abc import Iterator

from espalier_local.bench.speculate.configurations import AHEAD, BOOSTED, DYNAMIC, SEQUENCE
from espalier_local.bench.speculate.results import BASE, Results
from espalier_local.bench.speculate.statistics import Interval, Sheet
from espalier_local.bench.speculate.tables import Table, law, shown

_TREE_OVER_SEQUENCE = 1.25
_ALONE, _BATCHED = 1.8, 1.0  # of drafting ahead over incremental decoding

Goal = tuple[str, str, str]


def goals(results: Results) -> Table:
    """What was wanted, and what came of it; a goal whose configurations were not measured is left out."""
    rows = [row for temperature in results.temperatures for row in _goals(results, temperature)]
    return Table("Goals", ("goal", "measured", "reached"), tuple(rows))


def _goals(results: Results, temperature: float) -> Iterator[Goal]:
    for batch in results.batches:
        found = results.at(temperature, batch)
        if found is None:
            continue
        if batch == 1:
            yield from _goals_per_step(results, found, law(temperature))
        wanted_ahead = _ALONE if batch == 1 else _BATCHED
        yield from _goals_of_speed(results, found, f"{law(temperature)}, batch {batch}", wanted_ahead)


def _goals_per_step(results: Results, found: Sheet, where: str) -> Iterator[Goal]:
    columns = found.columns
    static = [name for name in results.static_names if name in columns]
    sequences = [name for name in static if name.startswith(SEQUENCE)]
    trees = [name for name in static if name not in sequences]
    if trees and sequences:
        best = max(trees, key=lambda name: columns[name].tokens_per_step.value)
        ratio = columns[best].more_per_step_than(columns[sequences[0]])
        yield _goal(f"{where}: {best} over {sequences[0]}, tokens/step", ratio, _TREE_OVER_SEQUENCE)
    peer = _same_budget(results)
    if peer in columns:
        ratio = columns[BOOSTED].more_per_step_than(columns[peer])
        yield _goal(f"{where}: {BOOSTED} over {peer}, tokens/step", ratio, 1.0)


def _same_budget(results: Results) -> str:
    """The tree of one SSM with as many nodes as the sequences of the boosted SSMs together; "": there is none."""
    everyone = results.setup.configurations
    budgets = {
        (len(each.ssms), *each.tree[1:]) for each in everyone if each.name == BOOSTED and isinstance(each.tree, tuple)
    }
    return next((each.name for each in everyone if each.is_static and each.tree in budgets), "")


def _goals_of_speed(results: Results, found: Sheet, where: str, wanted_ahead: float) -> Iterator[Goal]:
    columns, best = found.columns, results.best_static(found)
    if best is not None and DYNAMIC in columns:
        ratio = columns[DYNAMIC].faster_than(best[1])
        yield _goal(f"{where}: {DYNAMIC} over the best static ({best[0]}), speed", ratio, 1.0)
    if AHEAD in columns:
        yield _goal(f"{where}: {AHEAD} over {BASE}, speed", columns[AHEAD].faster_than(columns[BASE]), wanted_ahead)


def _goal(name: str, ratio: Interval, wanted: float) -> Goal:
    return f"{name} >= {wanted:g}x", f"{shown(ratio)}x", "yes" if ratio.value >= wanted else "no"
