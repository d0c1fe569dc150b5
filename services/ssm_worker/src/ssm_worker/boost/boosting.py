"""Adaptive boosting (SpecInfer, section 3): one SSM after another, each on what those before it cannot do yet.

Knows rounds and their files; must not know flags or bars. Everything can be killed at any time: a round that is on disk
is read, the first one that is not goes on from its checkpoint.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np

from ssm_worker.boost.archive import read_archive, write_archive
from ssm_worker.boost.artefact import fingerprint, read_student
from ssm_worker.boost.checkpoint import Mark, TrainingLog
from ssm_worker.boost.corpus import TeacherSequence
from ssm_worker.boost.coverage import CoverRule, Hits, covered_prompts, find_hits, lessons_after
from ssm_worker.boost.distil import Distiller, Recipe
from ssm_worker.boost.lessons import Lessons
from ssm_worker.boost.start import GivenCheckpoint, Start, head_tokens, new_student, start_name
from ssm_worker.boost.training import Clock, RunDirectory, SsmDirectory, TrainingRun
from treecore.errors import ConfigError


class Progress(Protocol):
    """Hears how far a run is."""

    def stage(self, name: str, total: int, done: int) -> None:
        """A stage of `total` tokens begins, `done` of them by killed processes."""

    def advance(self, num_tokens: int) -> None:
        """So many more are done."""

    def mark(self, mark: Mark) -> None:
        """A checkpoint was written."""


@dataclass(frozen=True, slots=True)
class BoostPlan:
    """What a run does. starts: of each SSM, the last one's for all others; None: the SSM before it.

    recipe: for every SSM, but for its start and its token_visits, which are `passes` times what it is trained on.
    """

    num_ssms: int
    starts: tuple[Start | None, ...]
    recipe: Recipe
    passes: float
    rule: CoverRule
    checkpoint_steps: int


@dataclass(frozen=True, slots=True)
class Round:
    """What became of one SSM. num_prompts: those that it was trained on; num_covered: of them those it reproduces.

    num_positions and num_hit: the same for positions, which of those that still count in full.
    """

    log: TrainingLog
    num_prompts: int
    num_covered: int
    num_positions: int
    num_hit: int


class Boosting:
    """Trains `plan.num_ssms` SSMs for the LLM in directory `llm`. Owns the directories of the SSMs in `run`."""

    def __init__(
        self, llm: Path, run: RunDirectory, plan: BoostPlan, progress: Progress, clock: Clock = time.monotonic
    ) -> None:
        self._llm = llm
        self._run = run
        self._plan = plan
        self._progress = progress
        self._clock = clock

    def rounds(self, corpus: Sequence[TeacherSequence], held_out: Sequence[TeacherSequence]) -> list[Round]:
        """All rounds; fewer than planned if nothing is left to learn. Raises ConfigError naming a file that is bad."""
        hits: list[Hits] = []
        rounds: list[Round] = []
        for idx in range(self._plan.num_ssms):
            lessons = lessons_after(corpus, hits, self._plan.rule)
            if not lessons.sequences:
                break
            log = self._train(idx, lessons, corpus, held_out)
            hits.append(self._hits(idx, lessons, corpus))
            rounds.append(_round(log, corpus, hits, self._plan.rule))
        return rounds

    def _train(
        self, idx: int, lessons: Lessons, corpus: Sequence[TeacherSequence], held_out: Sequence[TeacherSequence]
    ) -> TrainingLog:
        """The head is trimmed by the whole corpus, so that merged SSMs propose from the same tokens."""
        plan, start = self._plan, self._start(idx)
        visits = max(1, round(plan.passes * lessons.num_positions))
        recipe = replace(plan.recipe, start=start_name(start), token_visits=visits, seed=plan.recipe.seed + idx)
        head_token_ids = head_tokens(self._llm, corpus, recipe.num_head_rows)
        student = new_student(self._llm, start, head_token_ids, recipe.seed)
        training = TrainingRun(Distiller(student, lessons, recipe), lessons, self._run.ssm(idx), self._clock)
        self._progress.stage(f"train SSM {idx + 1}", visits, training.num_visited)
        training.finish(
            held_out,
            plan.checkpoint_steps,
            lambda num_tokens, _: self._progress.advance(num_tokens),
            self._progress.mark,
        )
        return training.log

    def _start(self, idx: int) -> Start:
        start = self._plan.starts[min(idx, len(self._plan.starts) - 1)]
        if start is not None:
            return start
        if idx == 0:
            raise ConfigError("--start previous: the first SSM has none before it")
        return GivenCheckpoint(self._run.ssm(idx - 1).artefact)

    def _hits(self, idx: int, lessons: Lessons, corpus: Sequence[TeacherSequence]) -> Hits:
        """On the whole corpus, whatever the SSM was trained on."""
        ssm, rank = self._run.ssm(idx), self._plan.rule.rank
        key = f"{fingerprint(ssm.artefact)} {rank} {lessons.digest()}"
        num_rows = sum(len(sequence.top_ids) for sequence in corpus)
        if ssm.hits.exists():
            return _read_hits(ssm, key, num_rows)
        self._progress.stage(f"cover with SSM {idx + 1}", sum(len(sequence.tokens) for sequence in corpus), 0)
        hits = find_hits(read_student(ssm.artefact, self._llm), corpus, rank, self._progress.advance)
        write_archive(ssm.hits, {"hits": hits, "key": np.array(key)})
        return hits


def _read_hits(ssm: SsmDirectory, key: str, num_rows: int) -> Hits:
    arrays = read_archive(ssm.hits)
    if str(arrays.get("key")) != key or "hits" not in arrays or arrays["hits"].shape != (num_rows,):
        raise ConfigError(f"{ssm.hits}: belongs to another SSM or text; delete it to find out anew")
    return arrays["hits"].astype(np.bool_, copy=False)


def _round(log: TrainingLog, corpus: Sequence[TeacherSequence], hits: Sequence[Hits], rule: CoverRule) -> Round:
    """`hits` end with those of this round."""
    masks = [covered_prompts(corpus, each, rule) for each in hits]
    left = ~np.any(masks[:-1], axis=0) if len(masks) > 1 else np.ones(len(corpus), np.bool_)
    open_rows = ~np.any(hits[:-1], axis=0) if len(hits) > 1 else np.ones(len(hits[0]), np.bool_)
    return Round(
        log=log,
        num_prompts=int(left.sum()),
        num_covered=int((left & masks[-1]).sum()),
        num_positions=int(open_rows.sum()),
        num_hit=int((open_rows & hits[-1]).sum()),
    )
