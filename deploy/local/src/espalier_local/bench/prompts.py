"""Prompts to measure with: a few of our own, or a file of JSON lines with a `prompt` field each.

Lines may have an `id` and a `category`, too.
"""

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from treecore.errors import ConfigError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Case:
    """A prompt with its id and category: the file's own, or made of the file's name."""

    id: str
    category: str
    prompt: str


OWN = (
    "Explain in a few sentences why the sky is blue.",
    "Write a short letter that thanks a neighbour for watering the plants.",
    "List five things to check before a long bicycle trip.",
    "Write a Python function that returns the sum of the squares of a list of numbers.",
    "What are the steps to bake a simple loaf of bread?",
    "Describe a quiet morning at a harbour.",
)


def read_prompts(files: Sequence[Path], limit: int) -> list[str]:
    """At most `limit` prompts, taken from the files in turn so that each is represented; without files, our own.

    Raises ConfigError for a file that is none, and for files without a prompt.
    """
    columns = [[case.prompt for case in _read(path)] for path in files] or [list(OWN)]
    return _in_turn(columns, limit)


def read_cases(files: Sequence[Path], limit: int) -> list[Case]:
    """At most `limit` prompts, taken from the categories in turn; without files, our own.

    Raises ConfigError for a file that is none, for files without a prompt, and for two prompts of one id.
    """
    own = [Case(f"own-{idx}", "own", prompt) for idx, prompt in enumerate(OWN)]
    cases = [case for path in files for case in _read(path)] if files else own
    if len({case.id for case in cases}) < len(cases):
        raise ConfigError("two prompts of the files have the same `id`")
    by_category: dict[str, list[Case]] = {}
    for case in cases:
        by_category.setdefault(case.category, []).append(case)
    return _in_turn(list(by_category.values()), limit)


def _in_turn(columns: Sequence[Sequence[T]], limit: int) -> list[T]:
    mixed = (item for row in itertools.zip_longest(*columns) for item in row if item is not None)
    items = list(itertools.islice(mixed, limit))
    if not items:
        raise ConfigError("the files hold no prompt")
    return items


def _read(path: Path) -> list[Case]:
    try:
        lines = [json.loads(line) for line in path.read_text("utf-8").splitlines() if line.strip()]
        return [
            Case(str(line.get("id", f"{path.stem}-{idx}")), str(line.get("category", path.stem)), str(line["prompt"]))
            for idx, line in enumerate(lines)
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} is no file of JSON lines with a `prompt` each: {error}") from error
