"""What was measured, as values, and the file that keeps them: JSON lines, the setup first, then a round each.

A round is one batch of prompts, decoded in every configuration. Whatever moment the run is killed at, the file loses no
more than the round in progress.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from espalier_local.bench.speculate.configurations import Configuration
from espalier_local.bench.speculate.totals import StepTotals
from treecore.errors import ConfigError

_VERSION = 1


@dataclass(frozen=True, slots=True)
class Setup:
    """What all rounds of a file have in common. ssms: names of those that ran. left_out: why what was not measured."""

    model: str
    ssms: tuple[str, ...]
    dtype: str
    threads: int
    cpu: str
    max_tokens: int
    seed: int
    configurations: tuple[Configuration, ...]
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Decoded:
    """One answer. ms_per_token: between its first and last token. checksum: of its tokens."""

    num_tokens: int
    num_steps: int
    ms_per_token: float
    checksum: int


@dataclass(frozen=True, slots=True)
class Run:
    """One batch in one configuration. totals: of the steps after every answer had begun."""

    answers: tuple[Decoded, ...]
    totals: StepTotals


@dataclass(frozen=True, slots=True)
class Round:
    """One batch of prompts in every configuration, by name. prompt_ids, categories: of each prompt."""

    temperature: float
    prompt_ids: tuple[str, ...]
    categories: tuple[str, ...]
    runs: Mapping[str, Run]

    @property
    def batch(self) -> int:
        """How many requests ran at the same time."""
        return len(self.prompt_ids)

    @property
    def key(self) -> tuple[float, tuple[str, ...]]:
        """What was asked."""
        return self.temperature, self.prompt_ids


class Journal:
    """Owns a file of rounds. Opening it with rounds of the same setup goes on behind them.

    path None: rounds are kept in memory. Raises ConfigError if the file is of another setup.
    """

    def __init__(self, path: Path | None, setup: Setup) -> None:
        self._path = path
        self.setup = setup
        self.rounds: list[Round] = []
        if path is None:
            return
        if path.exists() and path.stat().st_size:
            self._resume(path)
        else:
            self._append(_setup_line(setup))

    def add(self, done: Round) -> None:
        """Keep a round; on return it is on the disk."""
        self.rounds.append(done)
        self._append(asdict(done))

    def _resume(self, path: Path) -> None:
        lines, whole = _whole_lines(path)
        found, self.rounds = _parsed(path, lines)
        if found != self.setup:
            raise ConfigError(
                f"{path} has rounds of another setup ({_difference(found, self.setup)}); name another file"
            )
        with path.open("r+b") as file:
            file.truncate(whole)

    def _append(self, line: dict[str, Any]) -> None:
        if self._path is None:
            return
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())


def read_journal(path: Path) -> tuple[Setup, list[Round]]:
    """A file that a Journal wrote, a torn last line left out; raises ConfigError."""
    try:
        lines, _ = _whole_lines(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    return _parsed(path, lines)


def _whole_lines(path: Path) -> tuple[list[bytes], int]:
    """All lines that were written to their end, and the bytes that they fill."""
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    return content[:whole].splitlines(), whole


def _parsed(path: Path, lines: Sequence[bytes]) -> tuple[Setup, list[Round]]:
    try:
        setup, *rounds = map(json.loads, lines)
        return _setup(setup), [_round(each) for each in rounds]
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} is no file of `espalier bench speculate --json`: {error!r}") from error


def _setup_line(setup: Setup) -> dict[str, Any]:
    return {"version": _VERSION, **asdict(setup)}


def _setup(line: dict[str, Any]) -> Setup:
    fields = dict(line)
    if fields.pop("version") != _VERSION:
        raise ValueError("another version's")
    lists = {name: tuple(fields[name]) for name in ("ssms", "left_out")}
    return Setup(**{**fields, **lists, "configurations": tuple(map(_configuration, fields["configurations"]))})


def _configuration(fields: dict[str, Any]) -> Configuration:
    tree = fields["tree"]
    return Configuration(
        **{**fields, "ssms": tuple(fields["ssms"]), "tree": tuple(tree) if isinstance(tree, list) else tree}
    )


def _round(line: dict[str, Any]) -> Round:
    runs = {
        name: Run(tuple(Decoded(**answer) for answer in run["answers"]), StepTotals(run["totals"]["counters"]))
        for name, run in line["runs"].items()
    }
    return Round(line["temperature"], tuple(line["prompt_ids"]), tuple(line["categories"]), runs)


def _difference(found: Setup, wanted: Setup) -> str:
    ours, theirs = asdict(wanted), asdict(found)
    return ", ".join(name for name in ours if ours[name] != theirs[name])
