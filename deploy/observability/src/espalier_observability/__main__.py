"""Writes dashboards and alerts to where the chart takes them from: `make dashboards`."""

import sys
from pathlib import Path

from espalier_observability.files import files


def main(chart: Path) -> None:
    """Write all files, and remove dashboards that are no longer made."""
    made = files()
    for path, text in made.items():
        (chart / path).parent.mkdir(parents=True, exist_ok=True)
        (chart / path).write_text(text, encoding="utf-8")
    for path in (chart / "dashboards").glob("*.json"):
        if path.relative_to(chart) not in made:
            path.unlink()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
