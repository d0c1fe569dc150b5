"""Values that make no sense stop the installation with a message that names the value.

Each file in refused/ is one mistake; its first line is what helm 4 says. Helm 3 words what the schema refuses in its
own way, and names the value too.
"""

import re
from pathlib import Path
from typing import Any

import pytest

REFUSED = sorted((Path(__file__).parent / "refused").glob("*.yaml"))


def wanted(path: Path) -> str:
    """The message."""
    return path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")


def value(message: str) -> str:
    """The last part of the refused value's name."""
    if unknown := re.search(r"additional properties '(\w+)'", message):
        return unknown[1]
    path = re.search(r"at '([^']+)'", message)
    return path[1].rpartition("/")[2] if path else message.partition(":")[0]


@pytest.mark.parametrize("path", REFUSED, ids=lambda path: path.stem)
def test_a_mistake_is_named(path: Path, helm: Any, helm3: Any, chart: Path) -> None:
    """By both helms; `helm lint` finds what the schema refuses only."""
    message = wanted(path)
    for binary, words in ((helm, message), (helm3, value(message))):
        done = binary.run("template", "demo", chart, "--values", path)
        assert done.returncode == 1
        assert words in done.stderr


def test_there_are_enough_of_them() -> None:
    """Each of the mistakes that were thought of."""
    assert len(REFUSED) >= 35
