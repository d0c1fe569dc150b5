"""Which files the chart gets. Knows all dashboards and the alerts; writes nothing."""

from pathlib import Path

from espalier_observability.alerts import to_yaml
from espalier_observability.board import to_json
from espalier_observability.bus_and_workers import BUS_AND_WORKERS
from espalier_observability.capacity import CAPACITY
from espalier_observability.latency import LATENCY
from espalier_observability.speculation import SPECULATION

BOARDS = (LATENCY, SPECULATION, BUS_AND_WORKERS, CAPACITY)

_MADE = "# Made by `make dashboards` from deploy/observability: change it there.\n"


def files() -> dict[Path, str]:
    """Content by path below the chart's directory."""
    boards = {Path("dashboards") / f"{board.name}.json": to_json(board) for board in BOARDS}
    return boards | {Path("alerts") / "espalier.yaml": _MADE + to_yaml()}
