"""The training of one SSM, from start or checkpoint to its artefact. Knows the run directory; nothing of gradients."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ssm_worker.boost.agreement import measure_agreement
from ssm_worker.boost.artefact import export_artefact
from ssm_worker.boost.checkpoint import Mark, TrainingLog, recipe_fields, restore_checkpoint, save_checkpoint
from ssm_worker.boost.corpus import TeacherSequence
from ssm_worker.boost.distil import Distiller
from ssm_worker.boost.lessons import Lessons

Clock = Callable[[], float]
OnStep = Callable[[int, float], None]
"""Takes the number of tokens of a step, and the mean loss."""
OnMark = Callable[[Mark], None]


@dataclass(frozen=True, slots=True)
class SsmDirectory:
    """Where what belongs to one SSM lies."""

    root: Path

    @property
    def checkpoint(self) -> Path:
        """The training state."""
        return self.root / "checkpoint.npz"

    @property
    def artefact(self) -> Path:
        """The directory that an SSM worker loads."""
        return self.root / "artefact"

    @property
    def hits(self) -> Path:
        """Where in the corpus it holds the LLM's token."""
        return self.root / "hits.npz"


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """Where a run keeps what."""

    root: Path

    @property
    def corpus(self) -> Path:
        """Directory of the LLM's text, in shards."""
        return self.root / "corpus"

    @property
    def held_out(self) -> Path:
        """The one shard that is only measured on."""
        return self.root / "held-out.npz"

    @property
    def report(self) -> Path:
        """The report, in Markdown."""
        return self.root / "report.md"

    def ssm(self, idx: int) -> SsmDirectory:
        """That of SSM `idx`, from 0; people count from 1."""
        return SsmDirectory(self.root / f"ssm-{idx + 1}")


class TrainingRun:
    """Steps a distiller to its end. Owns the checkpoint, the artefact and the history."""

    def __init__(
        self, distiller: Distiller, lessons: Lessons, directory: SsmDirectory, clock: Clock = time.monotonic
    ) -> None:
        self._distiller = distiller
        self._directory = directory
        self._clock = clock
        self.log = TrainingLog(recipe_fields(distiller), lessons.digest(), ())
        if directory.checkpoint.exists():
            self.log = restore_checkpoint(directory.checkpoint, distiller, self.log)

    @property
    def num_visited(self) -> int:
        """Tokens that were read so far, by killed processes too."""
        return self._distiller.num_visited

    def finish(
        self, held_out: Sequence[TeacherSequence], checkpoint_steps: int, on_step: OnStep, on_mark: OnMark
    ) -> None:
        """Train to the end; a checkpoint and an artefact every `checkpoint_steps` steps and at the end."""
        started = self._clock()
        distiller = self._distiller
        while not distiller.is_done:
            on_step(distiller.step(), distiller.mean_loss or 0.0)
            if distiller.is_done or distiller.num_steps % checkpoint_steps == 0:
                on_mark(self._mark(held_out, self._clock() - started))
                started = self._clock()
        export_artefact(distiller.student, self._directory.artefact, distiller.recipe.logit_scale)

    def _mark(self, held_out: Sequence[TeacherSequence], seconds: float) -> Mark:
        distiller, marks = self._distiller, self.log.marks
        mark = Mark(
            num_steps=distiller.num_steps,
            num_visited=distiller.num_visited,
            wall_s=seconds + (marks[-1].wall_s if marks else 0.0),
            loss=distiller.mean_loss or 0.0,
            agreement=measure_agreement(distiller.student, held_out).top if held_out else (),
        )
        self.log = replace(self.log, marks=(*marks, mark))
        save_checkpoint(self._directory.checkpoint, distiller, self.log)
        export_artefact(distiller.student, self._directory.artefact, distiller.recipe.logit_scale)
        return mark
