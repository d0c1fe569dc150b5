"""The same prompts under several ways of decoding, interleaved in one run, and what each took.

Knows the gateway's client; must not know who started the gateway.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

import httpx

from espalier_local.bench.table import table
from espalier_local.client import DYNAMIC, Answer, Ask, Tree, complete


@dataclass(frozen=True, slots=True)
class Way:
    """One way of decoding. tree None and no speculation: incremental."""

    name: str
    speculation: bool
    tree: Tree | None = None
    draft_ahead: bool | None = None

    def of(self, ask: Ask) -> Ask:
        """The same question, decoded in this way."""
        return replace(ask, speculation=self.speculation, tree=self.tree, draft_ahead=self.draft_ahead)


INCREMENTAL = Way("incremental", speculation=False)
IN_STEP = Way("dynamic", speculation=True, tree=DYNAMIC, draft_ahead=False)
AHEAD = Way("dynamic, ahead", speculation=True, tree=DYNAMIC, draft_ahead=True)


def ways(trees: Sequence[tuple[int, ...]]) -> tuple[Way, ...]:
    """Incremental decoding, sequences as deep as the `trees`, these, and dynamic ones; each once."""
    sequences = [(1,) * len(tree) for tree in trees]
    static = [Way(f"{_kind(tree)} {angle(tree)}", speculation=True, tree=tree) for tree in (*sequences, *trees)]
    return INCREMENTAL, *dict.fromkeys(static), IN_STEP, AHEAD


def _kind(tree: tuple[int, ...]) -> str:
    return "sequence" if max(tree) == 1 else "tree"


@dataclass(frozen=True, slots=True)
class Contest:
    """Answers by way and prompt, in the order of the ways and prompts asked."""

    ways: tuple[Way, ...]
    answers: tuple[tuple[Answer, ...], ...]

    @property
    def is_identical(self) -> bool:
        """Whether every way gave every prompt the same tokens, text and finish reason."""
        said = [[(answer.token_ids, answer.text, answer.finish_reason) for answer in column] for column in self.answers]
        return all(column == said[0] for column in said)

    def report(self) -> str:
        """The table: per way tokens per step, ms per token and the median of the paired ratios to the first way."""
        rows = [self._row(way, column) for way, column in zip(self.ways, self.answers, strict=True)]
        header = ("decoding", "tokens/step", "ms/token", f"speed-up over {self.ways[0].name}")
        return table(header, rows)

    def _row(self, way: Way, column: Sequence[Answer]) -> tuple[str, ...]:
        ratios = [base.ms_per_token / answer.ms_per_token for base, answer in zip(self.answers[0], column, strict=True)]
        tokens_per_step = sum(answer.num_tokens for answer in column) / sum(answer.steps for answer in column)
        speed = median(answer.ms_per_token for answer in column)
        return way.name, f"{tokens_per_step:.2f}", f"{speed:.1f}", f"{median(ratios):.2f}x"


async def run_contest(
    client: httpx.AsyncClient,
    model: str,
    contestants: Sequence[Way],
    asks: Sequence[Ask],
    on_answer: Callable[[], None] = lambda: None,
) -> Contest:
    """Ask every prompt in every way, prompt by prompt, so that a slow moment of the machine hits all ways alike."""
    columns: list[list[Answer]] = [[] for _ in contestants]
    for ask in asks:
        for way, column in zip(contestants, columns, strict=True):
            column.append(await complete(client, model, way.of(ask)))
            on_answer()
    return Contest(tuple(contestants), tuple(tuple(column) for column in columns))


def angle(widths: tuple[int, ...]) -> str:
    """<k1,..,km>, as the paper writes it."""
    return f"<{','.join(map(str, widths))}>"
