"""What a run cost and what came of it, as Markdown. Knows numbers; must not know how they are measured."""

from collections.abc import Sequence
from dataclasses import dataclass

from ssm_worker.boost.agreement import Agreement
from ssm_worker.boost.checkpoint import Mark, TrainingLog
from ssm_worker.boost.corpus import Corpus

MAX_MARKS = 20  # lines of the history; evenly spaced, the last one always


@dataclass(frozen=True, slots=True)
class Artefact:
    """The trained SSM beside its teacher. Sizes in bytes, times in milliseconds a token."""

    teacher: str
    num_layers: int
    num_teacher_layers: int
    num_head_rows: int
    vocab_size: int
    num_bytes: int
    ssm_ms: float
    teacher_ms: float


def render_report(
    artefact: Artefact, corpus: Corpus, log: TrainingLog | None, agreement: Agreement | None, num_threads: int
) -> str:
    """The whole report. Without `log` (no checkpoint) or `agreement` (no held-out set) their lines are left out."""
    rows = [
        *_corpus_rows(corpus),
        *(_training_rows(log, corpus) if log else []),
        *(_agreement_rows(agreement) if agreement else []),
        *_artefact_rows(artefact, num_threads),
    ]
    parts = [f"# SSM for {artefact.teacher}", _table(("what", "value"), rows)]
    if log:
        parts.append("## History\n\n" + _history(log.marks))
    return "\n\n".join(parts) + "\n"


def _corpus_rows(corpus: Corpus) -> list[tuple[str, str]]:
    greedy = sum(sequence.temperature == 0 for sequence in corpus.sequences)
    return [
        ("teacher tokens", f"{corpus.num_tokens:,}"),
        ("dialogues", f"{len(corpus.sequences):,} ({greedy / len(corpus.sequences):.0%} greedy answers)"),
        ("wall time of generation, summed over processes", _duration(corpus.wall_s)),
    ]


def _training_rows(log: TrainingLog, corpus: Corpus) -> list[tuple[str, str]]:
    last = log.marks[-1]
    passes = last.num_visited / corpus.num_positions
    return [
        ("optimiser steps", f"{last.num_steps:,}"),
        ("tokens read in training", f"{last.num_visited:,} ({passes:.1f} passes)"),
        ("wall time of training", _duration(last.wall_s)),
        ("loss at the end (nats, moving average)", f"{last.loss:.3f}"),
    ]


def _agreement_rows(agreement: Agreement) -> list[tuple[str, str]]:
    rows = [(f"held-out agreement top-{k}", f"{share:.1%}") for k, share in enumerate(agreement.top, 1)]
    return [("held-out positions", f"{agreement.num_positions:,}"), *rows]


def _artefact_rows(artefact: Artefact, num_threads: int) -> list[tuple[str, str]]:
    threads = "1 thread" if num_threads == 1 else f"{num_threads} threads"
    return [
        ("layers", f"{artefact.num_layers} of {artefact.num_teacher_layers}"),
        ("head rows", f"{artefact.num_head_rows:,} of {artefact.vocab_size:,}"),
        ("artefact size", f"{artefact.num_bytes / 1e6:.1f} MB"),
        (f"teacher, ms a token ({threads})", f"{artefact.teacher_ms:.1f}"),
        (f"SSM, ms a token ({threads})", f"{artefact.ssm_ms:.1f}"),
        ("speed ratio", f"{artefact.teacher_ms / artefact.ssm_ms:.1f}x"),
    ]


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
