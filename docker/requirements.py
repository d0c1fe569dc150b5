"""Prints what packages of this repository need from elsewhere, as lines for pip.

    python requirements.py 'request-manager[scaler]' llm-verifier

Knows the pyproject.toml files below the current directory; must not know versions, which constraints.txt has.
"""

import re
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

Project = Mapping[str, Any]

_REQUIREMENT = re.compile(r"(?P<name>[A-Za-z0-9._-]+)(?:\[(?P<extras>[^]]*)\])?")


def third_party(projects: Mapping[str, Project], requirements: Iterable[str]) -> Iterator[str]:
    """The requirements behind `requirements` that are none of `projects`. Raises KeyError for an unknown extra."""
    for requirement in requirements:
        match = _REQUIREMENT.match(requirement)
        assert match is not None, requirement
        project = projects.get(match["name"])
        if project is None:
            yield requirement
            continue
        yield from third_party(projects, project["dependencies"])
        for extra in filter(None, (match["extras"] or "").split(",")):
            yield from third_party(projects, project["optional-dependencies"][extra.strip()])


def projects_below(root: Path) -> dict[str, Project]:
    """Our own packages, by name."""
    files = [tomllib.loads(path.read_text(encoding="utf-8")) for path in root.glob("*/*/pyproject.toml")]
    return {file["project"]["name"]: file["project"] for file in files}


def main(wanted: list[str]) -> int:
    """Print; returns the exit status."""
    projects = projects_below(Path())
    if unknown := [name for name in wanted if name.partition("[")[0] not in projects]:
        print(f"requirements: no package of ours: {', '.join(unknown)}", file=sys.stderr)
        return 1
    print("\n".join(sorted(set(third_party(projects, wanted)))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
