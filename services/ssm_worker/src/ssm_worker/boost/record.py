"""What the text of a seed was begun with, beside its shards: JSON. Knows files; must not know what settings mean."""

import json
from collections.abc import Mapping
from pathlib import Path

from treecore.errors import ConfigError


def keep_record(directory: Path, seed: int, settings: Mapping[str, object]) -> None:
    """Write down the settings of a seed's text, or check that it goes on with those that it was begun with.

    Raises ConfigError naming the file and what differs: half a text of one kind and half of another would be neither.
    """
    path = directory / f"seed{seed}.json"
    wanted = json.loads(json.dumps(settings))
    if not path.exists():
        if any(directory.glob(f"seed{seed}-*.npz")):
            raise ConfigError(f"{path}: missing, but there are shards of this seed; choose another --seed")
        directory.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(path.name + ".partial")
        partial.write_text(json.dumps(wanted, indent=1) + "\n", encoding="utf-8")
        partial.replace(path)
        return
    found = _read(path)
    if differing := [name for name in {**found, **wanted} if found.get(name) != wanted.get(name)]:
        raise ConfigError(f"{path}: this text was begun with another {differing[0]}; choose another --seed")


def _read(path: Path) -> dict[str, object]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{path}: corrupt ({error}); choose another --seed") from error
