"""Where a restore gets files from: the pointer itself first, then each backend in the order asked for.

A file has the same name everywhere, and wherever it comes from it is checked the same, so a lineage may be put
together from several backends. What a backend lacks or gives damaged is asked of the next one; where it had confirmed
that it has it, that is an error to be told.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from arrow_schemas.lineage import DELTA, SNAPSHOT, CheckpointRef, file_name
from arrow_schemas.pointer import Pointer, Standing
from spark_state_ext.backends import Checkpoint
from spark_state_ext.commit import Place, is_complete
from spark_state_ext.errors import CorruptError, MissingCheckpointError, StateError, StorageError
from spark_state_ext.folder import Readable
from spark_state_ext.sealed import SealedFile, SealedFiles

__all__ = ["Sources", "restore_order"]

_LOGGER = logging.getLogger("spark_state_ext")
T = TypeVar("T")


@dataclass(frozen=True)
class _Source:
    name: str
    files: Readable
    standing: Standing | None

    def promised(self, ref: CheckpointRef, kind: str) -> bool:
        """Whether the backend has confirmed this file, and clean-up cannot have removed it since."""
        it = self.standing
        return kind == DELTA and it is not None and is_complete(it) and ref == it.through


def restore_order(places: Sequence[Place], pointer: Pointer, restore_from: str | None) -> list[Place]:
    """Backends in the order in which a restore asks them: the preferred one, then those that hold everything.

    Parameters
    ----------
    places
        As configured.
    pointer
        Whose checkpoint is restored.
    restore_from
        Name of the preferred backend.
    """

    def rank(place: Place) -> tuple[bool, bool]:
        return not is_complete(pointer.standings.get(place.name)), place.name != restore_from

    return sorted(places, key=rank)


class Sources:
    """The files of a bucket, wherever they are.

    Parameters
    ----------
    places
        Backends, in the order in which they are asked.
    pointer
        Whose inline deltas come first.
    preferred
        The backend that the job wants its state from; None when it does not say.
    """

    def __init__(self, places: Sequence[Place], pointer: Pointer, preferred: str | None = None) -> None:
        self._inline = SealedFiles((SealedFile.of(it.name, it.data) for it in pointer.inline), "in Spark's state")
        self._places = list(places)
        self._sources: list[_Source] | None = None
        self._pointer = pointer
        self._told: set[str] = set()
        self._unreached: list[StorageError] = []
        if preferred is not None and not is_complete(pointer.standings.get(preferred)) and pointer.standings:
            self._tell(preferred, f"it does not have the whole state at checkpoint {pointer.ref}")

    def read(self, ref: CheckpointRef, kind: str, work: Callable[[Readable], T]) -> T:
        """Run `work`, which reads and checks one file, on the first place that gives it whole.

        Raises
        ------
        CorruptError, MissingCheckpointError, StorageError
            When none does: what tells most of it. That one cannot be reached counts before what others lack.
        """
        name = file_name(ref, kind)
        if name in self._inline:
            return work(self._inline)
        failures: list[StateError] = []
        does_without = False
        for source in self._opened():
            try:
                return work(source.files)
            except (CorruptError, MissingCheckpointError, StorageError) as error:
                failures.append(error)
                if source.promised(ref, kind) and len(self._places) > 1:
                    self._tell(source.name, str(error))
                if kind == SNAPSHOT and is_complete(source.standing) and not isinstance(error, StorageError):
                    # It holds everything without this one; no need to wait for a backend that cannot be reached.
                    does_without = True
        if does_without:
            self._unreached += [failure for failure in failures if isinstance(failure, StorageError)]
            failures = [failure for failure in failures if not isinstance(failure, StorageError)]
        for kinds in (StorageError, CorruptError, MissingCheckpointError):
            for failure in failures:
                if isinstance(failure, kinds):
                    raise failure
        raise MissingCheckpointError(f"no backend is configured that might have {name}")

    def hold(self, file: SealedFile) -> None:
        """A file that no backend may have yet."""
        self._inline.hold(file)

    def where(self, ref: CheckpointRef, kind: str) -> str:
        """How to call a file in messages."""
        name = file_name(ref, kind)
        if name in self._inline or not self._places:
            return self._inline.where(name)
        return self._opened()[0].files.where(name)

    @property
    def unreached(self) -> StorageError | None:
        """Why a backend could not be asked for a file that another one seemed to do without; None when all could."""
        return self._unreached[0] if self._unreached else None

    @property
    def elsewhere(self) -> list[str]:
        """Names of backends that have confirmed the state and are not among those asked."""
        return [name for name in self._pointer.standings if name not in {place.name for place in self._places}]

    def close(self) -> None:
        """Have reads end."""
        for place in self._places:
            place.restore.close()

    def _opened(self) -> list[_Source]:
        if self._sources is None:
            self._sources = []
            for place in self._places:
                if self._pointer.ref is not None:
                    place.restore.init(Checkpoint(self._pointer.ref, self._pointer.markers))
                standing = self._pointer.standings.get(place.name)
                self._sources.append(_Source(place.name, place.restore.restore(), standing))
        return self._sources

    def _tell(self, name: str, why: str) -> None:
        if name not in self._told:
            self._told.add(name)
            _LOGGER.error("the state cannot be restored from the backend %s: %s. The next one is asked.", name, why)
