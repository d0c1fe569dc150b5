"""The chart's dashboards and alerts are what the code makes, and every alert has its runbook."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from espalier_observability.__main__ import main
from espalier_observability.alerts import ALERTS, RUNBOOKS
from espalier_observability.files import files
from espalier_observability.objectives import TTFT_TARGET_S
from espalier_observability.promql import SCOPE, scoped
from treecore.service.buckets import LATENCY_S

REPOSITORY = Path(__file__).parents[2]
MAX_BYTES = 200_000  # kubectl apply keeps a copy in an annotation of 256 KiB


def panels(chart: Path) -> Iterator[dict[str, Any]]:
    """Of all dashboards, rows excepted."""
    for path in (chart / "dashboards").glob("*.json"):
        yield from (panel for panel in json.loads(path.read_text())["panels"] if panel["type"] != "row")


def test_the_chart_has_what_the_code_makes(chart: Path) -> None:
    """Every file, and no other; `make dashboards` mends it."""
    there = {path.relative_to(chart) for kind in ("dashboards/*.json", "alerts/*.yaml") for path in chart.glob(kind)}
    assert there == files().keys()
    for path, text in files().items():
        assert (chart / path).read_text(encoding="utf-8") == text, f"{path} is old: make dashboards"


def test_what_is_no_longer_made_is_removed(tmp_path: Path) -> None:
    """A dashboard that was renamed does not stay under its old name."""
    old = tmp_path / "dashboards" / "old.json"
    old.parent.mkdir()
    old.touch()
    main(tmp_path)
    assert {path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file()} == files().keys()


def test_dashboards_fit_a_config_map(chart: Path) -> None:
    """With room to spare, and no two are the same to Grafana."""
    paths = list((chart / "dashboards").glob("*.json"))
    assert all(path.stat().st_size < MAX_BYTES for path in paths)
    boards = [json.loads(path.read_text()) for path in paths]
    assert len({board["uid"] for board in boards}) == len({board["title"] for board in boards}) == 4
    for board in boards:
        ids = [panel["id"] for panel in board["panels"]]
        assert len(set(ids)) == len(ids)
        assert [variable["name"] for variable in board["templating"]["list"][:3]] == [
            "datasource",
            "namespace",
            "release",
        ]


def test_every_panel_says_what_it_is_about(chart: Path) -> None:
    """It has a description, a unit, and asks the chosen data source about the chosen releases."""
    for panel in panels(chart):
        assert panel["description"].endswith("."), panel["title"]
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert panel["type"] == "heatmap" or panel["fieldConfig"]["defaults"]["unit"]
        for target in panel["targets"]:
            num_asked = len(re.findall(r"\bespalier_", target["expr"]))
            assert num_asked > 0
            assert len(re.findall(rf"\bespalier_\w+\{{{re.escape(SCOPE)}", target["expr"])) == num_asked


@pytest.mark.parametrize(
    ("expr", "wanted"),
    [
        ("sum (espalier_a)", f"sum (espalier_a{{{SCOPE}}})"),
        ('rate(espalier_a_total{x="1"}[5m])', f'rate(espalier_a_total{{{SCOPE}, x="1"}}[5m])'),
        ("espalier_a / espalier_b", f"espalier_a{{{SCOPE}}} / espalier_b{{{SCOPE}}}"),
    ],
)
def test_scope(expr: str, wanted: str) -> None:
    """Every selector is about the chosen releases, whatever else it asks for."""
    assert scoped(expr) == wanted


def test_the_objective_is_a_buckets_bound(chart: Path) -> None:
    """Otherwise nobody could tell which first tokens are late. Of the chart's choices too."""
    schema = json.loads((chart / "values.schema.json").read_text(encoding="utf-8"))
    choices = schema["properties"]["monitoring"]["properties"]["ttftTargetS"]["enum"]
    assert choices == [str(float(bound)) for bound in LATENCY_S if bound >= 0.1]
    assert str(TTFT_TARGET_S) in choices


def test_the_chart_can_replace_the_objective(chart: Path) -> None:
    """It replaces the number wherever it is: so it must mean nothing else anywhere."""
    for path in files():
        text = (chart / path).read_text(encoding="utf-8")
        rest = re.sub(r'le=\\?"2\.0\\?"|(within|beyond) 2\.0 s\b', "", text)
        assert "2.0" not in rest
        assert (rest == text) == (path.stem not in ("latency", "espalier"))


def test_every_alert_has_a_runbook() -> None:
    """A section under its name with what it means, what to look at and what to do; and no section is about none."""
    page = (REPOSITORY / RUNBOOKS).read_text(encoding="utf-8")
    sections = dict(re.findall(r"^### (Espalier\w+)\n(.*?)(?=^#|\Z)", page, re.MULTILINE | re.DOTALL))
    assert list(sections) == [alert.name for alert in ALERTS]
    for name, text in sections.items():
        assert all(f"**{part}**" in text for part in ("Meaning.", "Look at.", "Do.")), name
