"""A real Prometheus, and the files that the chart carries. Fetches Prometheus once."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def chart() -> Path:
    """Its directory."""
    return REPOSITORY / "deploy" / "helm" / "espalier"


@pytest.fixture(scope="session")
def rules(chart: Path) -> Path:
    """The alerts' file."""
    return chart / "alerts" / "espalier.yaml"


@pytest.fixture(scope="session")
def alerts(rules: Path) -> dict[str, dict[str, Any]]:
    """Each alert's rule."""
    (group,) = yaml.safe_load(rules.read_text(encoding="utf-8"))["groups"]
    return {rule["alert"]: rule for rule in group["rules"]}


@pytest.fixture(scope="session")
def prometheus_dir() -> Path:
    """Where prometheus and promtool are; one line if they cannot be had."""
    command = (sys.executable, REPOSITORY / "scripts" / "fetch_prometheus.py")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.fail(done.stderr.strip(), pytrace=False)
    return Path(done.stdout.strip())
