"""The commands that train and measure: from the run's text to artefacts and a report. Knows files; no gradients."""

import argparse
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import torch

from ssm_worker.boost.agreement import greedy_ranks, sampled_ranks
from ssm_worker.boost.artefact import fingerprint, open_llm, read_student
from ssm_worker.boost.bars import StageBars
from ssm_worker.boost.boosting import Boosting, BoostPlan
from ssm_worker.boost.corpus import TeacherSequence, read_corpus, read_shard
from ssm_worker.boost.report import Artefact, Guesses, Speed, render_guesses, render_report
from ssm_worker.boost.speed import token_ms
from ssm_worker.boost.student import Student
from ssm_worker.boost.training import RunDirectory
from ssm_worker.boost.writing import held_out_answers
from treecore.model.load import load_decoder

SAMPLED_AT = 0.8
NOISE_SEED = 0
SPEED_CONTEXT_LEN = 128
SPEED_TOKENS = 32


def run_boost(args: argparse.Namespace, plan: Callable[[str], BoostPlan]) -> None:
    """Train all SSMs on the text that is there; write the report and print it."""
    llm, run = args.llm, RunDirectory(args.run)
    spec, _ = open_llm(llm)
    corpus = read_corpus(run.corpus, spec.vocab_size)
    held_out = held_out_answers(args)
    with closing(StageBars()) as bars:
        rounds = Boosting(llm, run, plan(fingerprint(llm)), bars).rounds(corpus.sequences, held_out)
    paths = [run.ssm(idx).artefact for idx in range(len(rounds))]
    students = [read_student(path, llm) for path in paths]
    speed = Speed(spec.name, _token_ms(llm), torch.get_num_threads())
    artefacts = [_artefact(path, student, llm) for path, student in zip(paths, students, strict=True)]
    text = render_report(corpus, rounds, artefacts, speed, _guesses(students, held_out) if held_out else None)
    run.report.write_text(text, encoding="utf-8")
    sys.stdout.write(text)


def run_measure(args: argparse.Namespace) -> None:
    """Print the agreement of given artefacts."""
    held_out = read_shard(args.held_out, open_llm(args.llm)[0].vocab_size).sequences
    students = [read_student(path, args.llm) for path in args.artefacts]
    names = [f"- SSM {idx}: {path}" for idx, path in enumerate(args.artefacts, 1)]
    sys.stdout.write("\n".join([*names, "", render_guesses(_guesses(students, held_out)), ""]))


def _guesses(students: Sequence[Student], held_out: Sequence[TeacherSequence]) -> Guesses:
    return Guesses(
        greedy=[greedy_ranks(student, held_out) for student in students],
        sampled=[sampled_ranks(student, held_out, SAMPLED_AT, NOISE_SEED) for student in students],
        temperature=SAMPLED_AT,
    )


def _artefact(path: Path, student: Student, llm: Path) -> Artefact:
    return Artefact(
        num_layers=student.spec.num_layers,
        num_head_rows=len(student.vocabulary.head_token_ids),
        num_bytes=(path / "model.safetensors").stat().st_size,
        ms=_token_ms(path, llm),
    )


def _token_ms(directory: Path, llm: Path | None = None) -> float:
    decoder = load_decoder(directory, dtype="float32", embedding_from=llm)
    return token_ms(decoder, SPEED_CONTEXT_LEN, SPEED_TOKENS)
