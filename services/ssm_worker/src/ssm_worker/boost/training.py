"""A training run from start or checkpoint to the exported artefact. Knows the run directory; nothing of gradients."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ssm_worker.boost.agreement import measure_agreement
from ssm_worker.boost.checkpoint import Mark, TrainingLog, recipe_fields, restore_checkpoint, save_checkpoint
from ssm_worker.boost.corpus import Corpus, TeacherSequence
from ssm_worker.boost.distil import Distiller, Recipe
from ssm_worker.boost.prune import choose_head_tokens, export_artefact, prune
from treecore.model.families import read_spec

Clock = Callable[[], float]
OnStep = Callable[[int, float], None]
"""Takes the number of tokens of a step, and the mean loss."""
OnMark = Callable[[Mark], None]


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """Where a run keeps what."""

    root: Path

    @property
    def corpus(self) -> Path:
        """Directory of the teacher text's shards."""
        return self.root / "corpus"

    @property
    def held_out(self) -> Path:
        """The one shard that is only measured on."""
        return self.root / "held-out.npz"

    @property
    def checkpoint(self) -> Path:
        """The training state."""
        return self.root / "checkpoint.npz"

    @property
    def artefact(self) -> Path:
        """The directory that an SSM worker loads."""
        return self.root / "artefact"

    @property
    def report(self) -> Path:
        """The report, in Markdown."""
        return self.root / "report.md"


def new_distiller(teacher: Path, corpus: Corpus, recipe: Recipe) -> Distiller:
    """The start of a run: the teacher's layers, before the first step."""
    spec = read_spec(teacher)
    ends = {*spec.eos_token_ids, *([] if spec.bos_token_id is None else [spec.bos_token_id])}
    head_token_ids = choose_head_tokens(corpus.sequences, spec.vocab_size, recipe.num_head_rows, ends)
    return Distiller(prune(teacher, recipe.layers, head_token_ids), corpus.sequences, recipe)


class TrainingRun:
    """Steps a distiller to its end. Owns the checkpoint, the artefact and the history."""

    def __init__(
        self, distiller: Distiller, corpus: Corpus, run: RunDirectory, teacher: Path, clock: Clock = time.monotonic
    ) -> None:
        self._distiller = distiller
        self._run = run
        self._teacher = teacher
        self._clock = clock
        self._log = TrainingLog(recipe_fields(distiller), corpus.digest(), ())
        if run.checkpoint.exists():
            self._log = restore_checkpoint(run.checkpoint, distiller, self._log)

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
        export_artefact(distiller.student, self._teacher, self._run.artefact)

    def _mark(self, held_out: Sequence[TeacherSequence], seconds: float) -> Mark:
        distiller, marks = self._distiller, self._log.marks
        mark = Mark(
            num_steps=distiller.num_steps,
            num_visited=distiller.num_visited,
            wall_s=seconds + (marks[-1].wall_s if marks else 0.0),
            loss=distiller.mean_loss or 0.0,
            agreement=measure_agreement(distiller.student, held_out).top if held_out else (),
        )
        self._log = replace(self._log, marks=(*marks, mark))
        save_checkpoint(self._run.checkpoint, distiller, self._log)
        export_artefact(distiller.student, self._teacher, self._run.artefact)
        return mark
