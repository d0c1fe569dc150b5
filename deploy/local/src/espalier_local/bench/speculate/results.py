"""A journal's rounds, asked by temperature, batch and category."""

from collections.abc import Sequence
from dataclasses import dataclass

from espalier_local.bench.speculate.configurations import INCREMENTAL
from espalier_local.bench.speculate.records import Round, Setup
from espalier_local.bench.speculate.statistics import Column, Sheet, sheet

BASE = INCREMENTAL.name


@dataclass(frozen=True, slots=True)
class Results:
    """A journal, read. Sheets are computed anew at each question: they are asked for once."""

    setup: Setup
    rounds: Sequence[Round]

    @property
    def temperatures(self) -> list[float]:
        """In rising order."""
        return sorted({each.temperature for each in self.rounds})

    @property
    def batches(self) -> list[int]:
        """Sizes, in rising order."""
        return sorted({each.batch for each in self.rounds})

    @property
    def categories(self) -> list[str]:
        """In the order in which they were measured."""
        return list(dict.fromkeys(category for each in self.rounds for category in each.categories))

    @property
    def static_names(self) -> list[str]:
        """Configurations in which one SSM drafts trees of one shape."""
        return [each.name for each in self.setup.configurations if each.is_static]

    def at(self, temperature: float, batch: int = 1, category: str | None = None) -> Sheet | None:
        """The sheet of these rounds, None if there are none. category: of its prompts alone (batch 1)."""
        rounds = self._rounds(temperature, batch)
        return sheet([each for each in rounds if category is None or each.categories == (category,)])

    def at_batch(self, temperature: float, batch: int) -> Sheet | None:
        """The same over those prompts only that were decoded in batches, too: to be compared with other sizes."""
        batched = {name for each in self.rounds if each.batch > 1 for name in each.prompt_ids}
        return sheet([each for each in self._rounds(temperature, batch) if batched.issuperset(each.prompt_ids)])

    def best_static(self, found: Sheet) -> tuple[str, Column] | None:
        """The static configuration with the least median of ms per token."""
        static = [(name, found.columns[name]) for name in self.static_names if name in found.columns]
        return min(static, key=lambda pair: pair[1].median_ms.value, default=None)

    def _rounds(self, temperature: float, batch: int) -> list[Round]:
        return [each for each in self.rounds if (each.temperature, each.batch) == (temperature, batch)]
