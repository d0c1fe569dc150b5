"""The plots of a run as small SVG files, the same bytes for the same figures. Needs matplotlib (`espalier[plots]`)."""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from espalier_local.bench.speculate.configurations import AHEAD, BOOSTED, DYNAMIC, SEQUENCE
from espalier_local.bench.speculate.results import BASE, Results
from espalier_local.bench.speculate.statistics import Column
from espalier_local.bench.speculate.tables import law
from treecore.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_STYLE: dict[Any, Any] = {
    "svg.hashsalt": "espalier",
    "svg.fonttype": "none",
    "font.size": 9,
    "axes.grid": True,
    "grid.alpha": 0.3,
}
_NO_METADATA = {"Date": None, "Creator": None, "Format": None, "Type": None}  # dates and versions change, figures not
_PANEL_INCHES = (4.5, 3.4)


@dataclass(frozen=True, slots=True)
class Line:
    """One curve. is_step: a staircase, as a distribution of few values is."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    is_step: bool = False


@dataclass(frozen=True, slots=True)
class Panel:
    """One pair of axes."""

    title: str
    x_label: str
    y_label: str
    lines: tuple[Line, ...]


def plots(results: Results) -> dict[str, str]:
    """File name to SVG, a panel a temperature each; a plot without curves is left out. Raises ConfigError."""
    shown = {"tokens_per_step.svg": _distributions, "width.svg": _widths, "batch.svg": _batches}
    panels = {
        name: [panel for temperature in results.temperatures if (panel := draw(results, temperature)).lines]
        for name, draw in shown.items()
    }
    return {name: _svg(each) for name, each in panels.items() if each}


def _distributions(results: Results, temperature: float) -> Panel:
    """As in SpecInfer's Figure 9."""
    found = results.at(temperature)
    wanted = (*results.static_names, BOOSTED, DYNAMIC, AHEAD)
    columns = {} if found is None else {name: found.columns[name] for name in wanted if name in found.columns}
    lines = tuple(_distribution(name, column) for name, column in columns.items())
    return Panel(f"{law(temperature)}, batch 1", "mean tokens per step of a prompt", "share of prompts", lines)


def _distribution(name: str, column: Column) -> Line:
    values = np.sort(column.tokens / column.steps)
    steps = np.arange(len(values) + 1) / len(values)  # from 0 at the least value
    return Line(name, [values[0], *values], steps.tolist(), is_step=True)


def _widths(results: Results, temperature: float) -> Panel:
    """As in SpecInfer's Figure 10: trees as deep as the sequence, by their widest level."""
    trees = {
        each.name: each.tree for each in results.setup.configurations if each.is_static and isinstance(each.tree, tuple)
    }
    depth = next((len(tree) for name, tree in trees.items() if name.startswith(SEQUENCE)), 0)
    names = sorted((name for name, tree in trees.items() if len(tree) == depth), key=lambda name: max(trees[name]))
    lines = []
    for batch in results.batches:
        found = results.at_batch(temperature, batch) or results.at(temperature, batch)
        if found is not None:
            medians = [found.columns[name].median_ms.value for name in names]
            lines.append(Line(f"batch {batch}", [max(trees[name]) for name in names], medians))
    return Panel(law(temperature), "width of the tree", "ms per token (median)", tuple(lines) if names else ())


def _batches(results: Results, temperature: float) -> Panel:
    """Static: at each size the best shape for that size."""
    points: dict[str, dict[int, float]] = {}
    for batch in results.batches:
        found = results.at_batch(temperature, batch)
        if found is None:
            continue
        best = results.best_static(found)
        shown = {name: found.columns[name] for name in (BASE, DYNAMIC, AHEAD) if name in found.columns}
        for name, column in (shown if best is None else {**shown, "best static": best[1]}).items():
            points.setdefault(name, {})[batch] = column.median_ms.value
    lines = tuple(Line(name, list(line), list(line.values())) for name, line in points.items())
    return Panel(law(temperature), "batch", "ms per token (median)", lines)


def _svg(panels: Sequence[Panel]) -> str:
    try:
        from matplotlib import rc_context  # noqa: PLC0415 - an extra, and half a second
        from matplotlib.figure import Figure  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError("matplotlib is not installed: pip install 'espalier[plots]'") from error
    width, height = _PANEL_INCHES
    with rc_context(_STYLE):
        figure = Figure(figsize=(width * len(panels), height), layout="constrained")
        for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
            _draw(axes, panel)
        return _saved(figure)


def _draw(axes: "Axes", panel: Panel) -> None:
    for line in panel.lines:
        if line.is_step:
            axes.step(line.x, line.y, where="post", label=line.label, linewidth=1.2)
        else:
            axes.plot(line.x, line.y, marker="o", markersize=3, label=line.label, linewidth=1.2)
            axes.set_xticks(line.x)
    axes.set(title=panel.title, xlabel=panel.x_label, ylabel=panel.y_label)
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=7)


def _saved(figure: "Figure") -> str:
    target = io.StringIO()
    figure.savefig(target, format="svg", metadata=_NO_METADATA)
    return target.getvalue()
