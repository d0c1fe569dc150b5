"""The tables of a run, as rows of text. Knows figures; must not know where they are shown."""

from dataclasses import dataclass

from espalier_local.bench.speculate.results import BASE, Results
from espalier_local.bench.speculate.statistics import Column, Interval, Sheet


@dataclass(frozen=True, slots=True)
class Table:
    """title: what its rows are of."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def pooled(results: Results, temperature: float) -> Table | None:
    """At batch 1, over all prompts: a row a configuration."""
    found = results.at(temperature)
    if found is None:
        return None
    title = (
        f"{law(temperature)}, batch 1, {found.num_prompts} prompts"
        f" ({found.same_output} of them with the same tokens in every configuration)"
    )
    header = (
        "decoding",
        "tokens/step",
        "nodes",
        "draft ms",
        "verify ms",
        "other ms",
        "hidden",
        "ms/token",
        f"over {BASE}",
    )
    return Table(title, header, tuple(_row(name, column, found) for name, column in found.columns.items()))


def _row(name: str, column: Column, found: Sheet) -> tuple[str, ...]:
    totals = column.totals
    other_ms = column.step_ms - totals.draft_ms - totals.verify_ms
    return (
        name,
        shown(column.tokens_per_step),
        *(f"{part:.1f}" for part in (totals.nodes_per_step, totals.draft_ms, totals.verify_ms, other_ms)),
        _percent(totals.hidden_share),
        shown(column.median_ms, 1),
        shown(column.faster_than(found.columns[BASE])),
    )


def by_ssm(results: Results, temperature: float) -> Table | None:
    """At batch 1: a row a configuration in which several SSMs draft, a column an SSM."""
    found = results.at(temperature)
    columns = {} if found is None else found.columns
    several = [each.name for each in results.setup.configurations if len(each.ssms) > 1 and each.name in columns]
    rows = [(name, *(_share(columns[name], ssm) for ssm in results.setup.ssms)) for name in several]
    title = f"{law(temperature)}: verified nodes a step that each SSM proposed, and how many of these were accepted"
    return Table(title, ("decoding", *results.setup.ssms), tuple(rows)) if rows else None


def _share(column: Column, ssm: str) -> str:
    accepted = column.totals.accepted_share_of(ssm)
    return "none" if accepted is None else f"{column.totals.nodes_per_step_of(ssm):.1f} ({accepted:.0%})"


def by_category(results: Results, temperature: float) -> list[Table]:
    """Tokens per step, and speed over incremental: a row a configuration, a column a category. Batch 1."""
    sheets = {name: results.at(temperature, category=name) for name in results.categories}
    found = {name: each for name, each in sheets.items() if each is not None}
    header = ("decoding", *(f"{name} ({each.num_prompts})" for name, each in found.items()))
    names = next(iter(found.values())).columns if found else ()
    per_step = [(name, *(shown(each.columns[name].tokens_per_step) for each in found.values())) for name in names]
    speed = [
        (name, *(shown(each.columns[name].faster_than(each.columns[BASE])) for each in found.values()))
        for name in names
    ]
    return [
        Table(f"{law(temperature)}: tokens per step by category (prompts)", header, tuple(per_step)),
        Table(f"{law(temperature)}: speed over {BASE} by category (prompts)", header, tuple(speed)),
    ]


def by_batch(results: Results, temperature: float) -> Table | None:
    """Medians of ms per token: a row a configuration that ran at every batch size, a column a size."""
    found = {batch: each for batch in results.batches if (each := results.at_batch(temperature, batch))}
    if len(found) < 2:
        return None
    names = [
        name for name in next(iter(found.values())).columns if all(name in each.columns for each in found.values())
    ]
    rows = [(name, *(_against(each, name) for each in found.values())) for name in names]
    header = ("decoding", *(f"batch {batch}" for batch in found))
    title = f"{law(temperature)}: ms per token (speed over {BASE}) by batch size"
    return Table(title, header, tuple(rows))


def _against(found: Sheet, name: str) -> str:
    column = found.columns[name]
    return f"{column.median_ms.value:.1f} ({column.faster_than(found.columns[BASE]).value:.2f}x)"


def shown(interval: Interval, digits: int = 2) -> str:
    """A value and its interval."""
    return f"{interval.value:.{digits}f} [{interval.low:.{digits}f}, {interval.high:.{digits}f}]"


def law(temperature: float) -> str:
    """How the temperature is called."""
    return "greedy" if temperature == 0 else f"T {temperature:g}"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"
