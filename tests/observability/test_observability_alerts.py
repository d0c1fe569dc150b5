"""Prometheus' own tool reads the alerts, and finds that each fires when it should, and not a moment before."""

import subprocess
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

CASES = Path(__file__).with_name("alert_cases.yaml")

Promtool = Callable[..., subprocess.CompletedProcess[str]]
Rule = dict[str, Any]


@pytest.fixture(scope="module")
def promtool(prometheus_dir: Path) -> Promtool:
    """Runs it; its output whatever its exit status."""

    def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
        command = (prometheus_dir / "promtool", *arguments)
        return subprocess.run(command, capture_output=True, text=True, check=False)

    return run


def completed(case: dict[str, Any], rule: Rule) -> dict[str, Any]:
    """The case with what all alerts of its rule carry."""
    common = {key: rule["annotations"][key] for key in ("description", "runbook_url")}
    expected = [
        {"exp_labels": rule["labels"] | each["exp_labels"], "exp_annotations": common | each["exp_annotations"]}
        for each in case.get("exp_alerts", ())
    ]
    return case | {"exp_alerts": expected}


def test_prometheus_takes_the_rules(promtool: Promtool, rules: Path) -> None:
    """Expressions, durations and templates."""
    done = promtool("check", "rules", rules)
    assert done.returncode == 0, done.stdout + done.stderr


def test_alerts_fire_when_they_should(promtool: Promtool, alerts: dict[str, Rule], rules: Path, tmp_path: Path) -> None:
    """All cases of alert_cases.yaml."""
    cases = yaml.safe_load(CASES.read_text(encoding="utf-8")) | {"rule_files": [str(rules)]}
    for test in cases["tests"]:
        test["alert_rule_test"] = [completed(case, alerts[case["alertname"]]) for case in test["alert_rule_test"]]
    path = tmp_path / "cases.yaml"
    path.write_text(yaml.safe_dump(cases), encoding="utf-8")
    done = promtool("test", "rules", path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_cases_for_both(alerts: dict[str, Rule]) -> None:
    """In one test it does not fire, and then does."""
    seen = defaultdict(set)
    for idx, test in enumerate(yaml.safe_load(CASES.read_text(encoding="utf-8"))["tests"]):
        for case in test["alert_rule_test"]:
            seen[case["alertname"]].add((idx, bool(case.get("exp_alerts"))))
    for name in alerts:
        assert any({(idx, False), (idx, True)} <= seen[name] for idx, _ in seen[name]), name
