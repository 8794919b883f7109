"""What each backend has of a bucket, as pointers tell it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from arrow_schemas.lineage import CheckpointRef
from arrow_schemas.pointer import Pointer, Standing
from spark_state_ext.backends import BackupManager, RestoreManager

__all__ = ["Place", "is_complete", "taken_over", "version_of"]


@dataclass(frozen=True)
class Place:
    """A backend as configured for a bucket.

    Parameters
    ----------
    name
        What pointers call it.
    backup, restore
        Its managers.
    root
        It is what pointers before format 4 mean, which do not name it.
    """

    name: str
    backup: BackupManager
    restore: RestoreManager
    root: bool = False


def is_complete(standing: Standing | None) -> bool:
    """Whether a backend holds a state as far as its standing says."""
    return standing is not None and standing.since is None


def taken_over(pointer: Pointer, places: Sequence[Place]) -> Pointer:
    """An input pointer as the configured backends have to see it: those it does not know have nothing of it."""
    names = [place.name for place in places]
    if pointer.ref is None:
        # There is nothing to hold yet, and everyone does.
        return replace(pointer, standings={name: Standing(None) for name in names}, markers={})
    standings = pointer.standings or {place.name: Standing(pointer.ref) for place in places if place.root}
    standings = {name: standings[name] for name in names if name in standings}
    return replace(pointer, standings=standings, markers={n: m for n, m in pointer.markers.items() if n in standings})


def version_of(ref: CheckpointRef | None) -> int:
    return 0 if ref is None else ref.version
