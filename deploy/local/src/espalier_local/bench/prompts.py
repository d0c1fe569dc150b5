"""Prompts to measure with: a few of our own, or a file of JSON lines with a `prompt` field each."""

import itertools
import json
from collections.abc import Sequence
from pathlib import Path

from treecore.errors import ConfigError

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
    columns = [_read(path) for path in files] or [list(OWN)]
    mixed = (prompt for row in itertools.zip_longest(*columns) for prompt in row if prompt is not None)
    prompts = list(itertools.islice(mixed, limit))
    if not prompts:
        raise ConfigError("the files hold no prompt")
    return prompts


def _read(path: Path) -> list[str]:
    try:
        return [str(json.loads(line)["prompt"]) for line in path.read_text("utf-8").splitlines() if line.strip()]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is no file of JSON lines with a `prompt` each: {error}") from error
