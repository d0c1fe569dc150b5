"""A training run on disk, in one .npz: weights, optimiser, counters, history. Knows the Distiller; nothing of models.

Resuming is exact: the same lessons and recipe give the same student, whether the process was killed or not.
"""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ssm_worker.boost.archive import Arrays, read_archive, write_archive
from ssm_worker.boost.distil import Distiller
from treecore.errors import ConfigError

_META = "meta"
_SLOTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True)
class Mark:
    """A line of a run's history. wall_s: training time so far, resumed or not. agreement: top-1, top-2, ..."""

    num_steps: int
    num_visited: int
    wall_s: float
    loss: float
    agreement: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class TrainingLog:
    """What a run has to tell. lessons_digest: what it was trained on."""

    recipe: dict[str, Any]
    lessons_digest: str
    marks: tuple[Mark, ...]


def save_checkpoint(path: Path, distiller: Distiller, log: TrainingLog) -> None:
    """Write all that a resumed run needs, whole or not at all."""
    meta = {
        "recipe": log.recipe,
        "lessons_digest": log.lessons_digest,
        "marks": [dataclasses.asdict(mark) for mark in log.marks],
        "num_steps": distiller.num_steps,
        "num_visited": distiller.num_visited,
        "mean_loss": distiller.mean_loss,
    }
    write_archive(path, {**_state_arrays(distiller), _META: np.array(json.dumps(meta))})


def restore_checkpoint(path: Path, distiller: Distiller, log: TrainingLog) -> TrainingLog:
    """Bring `distiller` to where the checkpoint is. Returns its log.

    Raises ConfigError naming the file if it is corrupt, or belongs to another recipe or text than `log`.
    """
    arrays, meta = _read(path)
    found = _log(path, meta)
    _check_same_run(path, found, log)
    _check_arrays(path, arrays, distiller)
    with torch.no_grad():
        for name, parameter in distiller.student.named_parameters():
            parameter.copy_(torch.from_numpy(arrays[f"student/{name}"]))
            slots = {slot: torch.from_numpy(arrays[f"{slot}/{name}"]) for slot in _SLOTS}
            distiller.optimiser.state[parameter] = {"step": torch.tensor(float(meta["num_steps"])), **slots}
    distiller.num_steps, distiller.num_visited = meta["num_steps"], meta["num_visited"]
    distiller.mean_loss = meta.get("mean_loss")
    return found


def read_log(path: Path) -> TrainingLog:
    """Only the log of a checkpoint. Raises ConfigError naming the file."""
    _, meta = _read(path)
    return _log(path, meta)


def recipe_fields(distiller: Distiller) -> dict[str, Any]:
    """The recipe as it is after a round trip through JSON."""
    fields: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(distiller.recipe)))
    return fields


def _state_arrays(distiller: Distiller) -> Arrays:
    arrays: Arrays = {}
    for name, parameter in distiller.student.named_parameters():
        arrays[f"student/{name}"] = parameter.detach().numpy()
        for slot in _SLOTS:
            arrays[f"{slot}/{name}"] = distiller.optimiser.state[parameter][slot].numpy()
    return arrays


def _read(path: Path) -> tuple[Arrays, dict[str, Any]]:
    arrays = read_archive(path)
    try:
        meta = dict(json.loads(str(arrays[_META])))
        return arrays, {**meta, **{name: int(meta[name]) for name in ("num_steps", "num_visited")}}
    except (KeyError, ValueError, TypeError) as error:
        raise ConfigError(f"{path}: no checkpoint of a training run ({error})") from error


def _log(path: Path, meta: dict[str, Any]) -> TrainingLog:
    try:
        marks = tuple(Mark(**{**mark, "agreement": tuple(mark["agreement"])}) for mark in meta["marks"])
        return TrainingLog(meta["recipe"], meta["lessons_digest"], marks)
    except (KeyError, TypeError) as error:
        raise ConfigError(f"{path}: no checkpoint of a training run ({error})") from error


def _check_same_run(path: Path, found: TrainingLog, wanted: TrainingLog) -> None:
    """Half a run with one recipe and half with another has a result that nobody could repeat."""
    differing = [name for name, value in wanted.recipe.items() if found.recipe.get(name) != value]
    if found.lessons_digest != wanted.lessons_digest:
        differing.append("text")
    if differing:
        raise ConfigError(f"{path}: belongs to a run with another {differing[0]}; delete it to train anew")


def _check_arrays(path: Path, arrays: Arrays, distiller: Distiller) -> None:
    for name, parameter in distiller.student.named_parameters():
        for kind in ("student", *_SLOTS):
            array = arrays.get(f"{kind}/{name}")
            if array is None or array.shape != tuple(parameter.shape) or array.dtype != np.float32:
                raise ConfigError(f"{path}: {kind}/{name} is missing or misshapen")
