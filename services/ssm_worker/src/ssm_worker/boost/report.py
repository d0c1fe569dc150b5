"""What a run cost and what came of it, as Markdown. Knows numbers; must not know how they are measured."""

from collections.abc import Sequence
from dataclasses import dataclass

from ssm_worker.boost.agreement import NUM_GUESSES, Agreement, Ranks, agreement, merged
from ssm_worker.boost.boosting import Round
from ssm_worker.boost.checkpoint import Mark
from ssm_worker.boost.corpus import Corpus

MAX_MARKS = 20  # lines of a history; evenly spaced, the last one always


@dataclass(frozen=True, slots=True)
class Artefact:
    """A trained SSM. num_bytes of its weights file, ms: a token's milliseconds."""

    num_layers: int
    num_head_rows: int
    num_bytes: int
    ms: float


@dataclass(frozen=True, slots=True)
class Speed:
    """How the artefacts were timed: beside `llm`, a token of which takes `llm_ms`, with so many threads."""

    llm: str
    llm_ms: float
    num_threads: int


@dataclass(frozen=True, slots=True)
class Guesses:
    """Each SSM's ranks on held-out text: of greedy text, and of tokens drawn at `temperature`."""

    greedy: Sequence[Ranks]
    sampled: Sequence[Ranks]
    temperature: float


def render_report(
    corpus: Corpus, rounds: Sequence[Round], artefacts: Sequence[Artefact], speed: Speed, guesses: Guesses | None
) -> str:
    """The whole report. Without `guesses` (no held-out set) the agreement is left out."""
    parts = [
        f"# SSMs for {speed.llm}",
        _table(("what", "value"), _corpus_rows(corpus)),
        "## Rounds",
        _rounds(rounds),
        "## Artefacts",
        _artefacts(artefacts, speed),
        *([render_guesses(guesses)] if guesses else []),
        *(f"## History of SSM {idx}\n\n{_history(each.log.marks)}" for idx, each in enumerate(rounds, 1)),
    ]
    return "\n\n".join(parts) + "\n"


def render_guesses(guesses: Guesses) -> str:
    """How often the first guesses hold the LLM's token: alone, merged, and for comparison with as many guesses."""
    tables = {"Agreement, greedy": guesses.greedy, f"Agreement, T = {guesses.temperature:g}": guesses.sampled}
    return "\n\n".join(f"## {title}\n\n{_agreement(ranks)}" for title, ranks in tables.items())


def _agreement(ranks: Sequence[Ranks]) -> str:
    """Merged SSMs bring up to i * k guesses: beside them stands the first SSM with that many."""
    rows = [(f"SSM {idx}", agreement(each)) for idx, each in enumerate(ranks, 1)]
    for count in range(2, len(ranks) + 1):
        rows.append((f"SSMs 1 to {count}, merged", agreement(merged(ranks[:count]))))
        rows.append((f"SSM 1, {count} times the guesses", agreement(ranks[0], count)))
    head = ("guesses of", *(f"top-{k}" for k in range(1, NUM_GUESSES + 1)))
    return f"{len(ranks[0]):,} positions.\n\n" + _table(head, [(name, *_shares(found)) for name, found in rows])


def _shares(found: Agreement) -> list[str]:
    return [f"{share:.1%}" for share in found.top]


def _corpus_rows(corpus: Corpus) -> list[tuple[str, str]]:
    greedy = sum(sequence.temperature == 0 for sequence in corpus.sequences)
    return [
        ("the LLM's tokens", f"{corpus.num_tokens:,}"),
        ("completions", f"{len(corpus.sequences):,} ({greedy / len(corpus.sequences):.0%} greedy)"),
        ("wall time of writing them, summed over processes", _duration(corpus.wall_s)),
    ]


def _rounds(rounds: Sequence[Round]) -> str:
    head = ("SSM", "start", "open prompts", "reproduced", "open positions", "held", "tokens read", "wall time", "loss")
    rows = [(str(idx), *_round(each)) for idx, each in enumerate(rounds, 1)]
    return _table(head, rows)


def _round(each: Round) -> tuple[str, ...]:
    last = each.log.marks[-1]
    return (
        str(each.log.recipe["start"]),
        f"{each.num_prompts:,}",
        f"{each.num_covered:,} ({each.num_covered / max(each.num_prompts, 1):.1%})",
        f"{each.num_positions:,}",
        f"{each.num_hit:,} ({each.num_hit / max(each.num_positions, 1):.1%})",
        f"{last.num_visited:,}",
        _duration(last.wall_s),
        f"{last.loss:.3f}",
    )


def _artefacts(artefacts: Sequence[Artefact], speed: Speed) -> str:
    threads = "1 thread" if speed.num_threads == 1 else f"{speed.num_threads} threads"
    head = (
        "SSM",
        "layers",
        "head rows",
        "MB",
        f"ms a token ({threads})",
        f"faster than the LLM ({speed.llm_ms:.1f} ms)",
    )
    rows = [
        (
            str(idx),
            str(each.num_layers),
            f"{each.num_head_rows:,}",
            f"{each.num_bytes / 1e6:.1f}",
            f"{each.ms:.1f}",
            f"{speed.llm_ms / each.ms:.1f}x",
        )
        for idx, each in enumerate(artefacts, 1)
    ]
    return _table(head, rows)


def _history(marks: Sequence[Mark]) -> str:
    stride = -(-len(marks) // MAX_MARKS)
    shown = marks[::-1][::stride][::-1]
    rows = [
        (
            f"{mark.num_steps:,}",
            f"{mark.num_visited:,}",
            _duration(mark.wall_s),
            f"{mark.loss:.3f}",
            "/".join(f"{100 * share:.1f}" for share in mark.agreement) or "-",
        )
        for mark in shown
    ]
    return _table(("steps", "tokens read", "wall time", "loss", "held-out top-1/2/3/4/5 (%)"), rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"
