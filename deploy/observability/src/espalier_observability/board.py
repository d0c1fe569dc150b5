"""What a dashboard consists of, and its JSON. Knows Grafana; must not know metrics, but those that variables list."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count
from typing import Literal

from grafana_foundation_sdk.builders import common, dashboard, heatmap, timeseries
from grafana_foundation_sdk.builders.prometheus import Dataquery
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import (
    DataSourceRef,
    LegendDisplayMode,
    LegendPlacement,
    StackingMode,
    TooltipDisplayMode,
)
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DashboardLinkType,
    VariableOption,
    VariableRefresh,
    VariableSort,
)
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from espalier_observability.promql import RELEASE_LABEL, scoped

_TAG = "espalier"
_SOURCE = DataSourceRef("prometheus", "${datasource}")
_HALF, _HEIGHT = 12, 8  # of 24 columns; in rows of 30 pixels

Panel = timeseries.Panel | heatmap.Panel


@dataclass(frozen=True, slots=True)
class Line:
    """A query, without the scope; legend: a label's name in double braces is its value."""

    expr: str
    legend: str


@dataclass(frozen=True, slots=True)
class Graph:
    """A panel. unit: one of Grafana's. heatmap: one line of a histogram's buckets."""

    title: str
    description: str
    unit: str
    lines: tuple[Line, ...]
    style: Literal["lines", "stacked", "heatmap"] = "lines"


@dataclass(frozen=True, slots=True)
class Section:
    """A row of panels under a title."""

    title: str
    graphs: tuple[Graph, ...]


@dataclass(frozen=True, slots=True)
class Variable:
    """A choice at the dashboard's top: the values of a label, in a selector."""

    name: str
    selector: str
    label: str


@dataclass(frozen=True, slots=True)
class Board:
    """A dashboard. name: of its file and its address."""

    name: str
    title: str
    description: str
    sections: tuple[Section, ...]
    variables: tuple[Variable, ...] = ()


_SCOPE_VARIABLES = (
    Variable("namespace", "espalier_process_start_time_seconds", "namespace"),
    Variable("release", 'espalier_process_start_time_seconds{namespace=~"$namespace"}', RELEASE_LABEL),
)


def to_json(board: Board) -> str:
    """As Grafana imports it."""
    built = _dashboard(board).build()
    return json.dumps(built, cls=JSONEncoder, indent=1, sort_keys=True) + "\n"


def _dashboard(board: Board) -> dashboard.Dashboard:
    made = (
        dashboard.Dashboard(f"Espalier / {board.title}")
        .uid(f"{_TAG}-{board.name}")
        .description(board.description)
        .tags([_TAG])
        .time("now-1h", "now")
        .refresh("30s")
        .timezone("browser")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .with_variable(dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"))
        .link(_to_the_others())
    )
    for variable in (*_SCOPE_VARIABLES, *board.variables):
        made = made.with_variable(_choice(variable))
    numbers = count(1)  # Grafana names panels by them in links
    for section in board.sections:
        made = made.with_row(dashboard.Row(section.title).id(next(numbers)))
        for graph in section.graphs:
            made = made.with_panel(_panel(graph).id(next(numbers)))
    return made


def _to_the_others() -> dashboard.DashboardLink:
    link = dashboard.DashboardLink("Espalier").type(DashboardLinkType.DASHBOARDS).tags([_TAG])
    return link.as_dropdown(True).keep_time(True).include_vars(True)


def _choice(variable: Variable) -> dashboard.QueryVariable:
    return (
        dashboard.QueryVariable(variable.name)
        .label(variable.name.capitalize())
        .datasource(_SOURCE)
        .query(f"label_values({variable.selector}, {variable.label})")
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(VariableOption(True, "All", "$__all"))
    )


def _panel(graph: Graph) -> Panel:
    blank = _heatmap(graph) if graph.style == "heatmap" else _lines(graph)
    panel = blank.title(graph.title).description(graph.description).datasource(_SOURCE).span(_HALF).height(_HEIGHT)
    for query in _queries(graph):
        panel = panel.with_target(query)
    return panel


def _lines(graph: Graph) -> timeseries.Panel:
    legend = common.VizLegendOptions().display_mode(LegendDisplayMode.TABLE).placement(LegendPlacement.BOTTOM)
    panel = (
        timeseries.Panel()
        .unit(graph.unit)
        .min(0)
        .legend(legend.show_legend(True).calcs(["mean", "max", "lastNotNull"]))
        .tooltip(common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI))
    )
    if graph.style == "stacked":
        panel = panel.stacking(common.StackingConfig().mode(StackingMode.NORMAL)).fill_opacity(30)
    return panel


def _heatmap(graph: Graph) -> heatmap.Panel:
    return heatmap.Panel().calculate(False).show_legend().y_axis(heatmap.YAxisConfig().unit(graph.unit))


def _queries(graph: Graph) -> Iterable[Dataquery]:
    for idx, line in enumerate(graph.lines):
        query = Dataquery().ref_id(chr(ord("A") + idx)).expr(scoped(line.expr)).legend_format(line.legend).range()
        yield query.format(PromQueryFormat.HEATMAP) if graph.style == "heatmap" else query
