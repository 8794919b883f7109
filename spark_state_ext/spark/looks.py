"""A look at what a backend had confirmed: whether it is there still, when a run first comes to a bucket.

Where the local store is warm, no batch reads a checkpoint file. So a root that was removed meanwhile would go unnoticed
until clean-up has its turn, and nothing but the local store would hold the state. A look asks for the size of one file,
beside the batch.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import ClassVar

from arrow_schemas.lineage import DELTA, SNAPSHOT, CheckpointRef, file_name
from arrow_schemas.pointer import Pointer
from spark_state_ext.commit import Place, is_complete, taken_over
from spark_state_ext.errors import MissingCheckpointError, OwnershipError, StateError
from spark_state_ext.folder import Readable
from spark_state_ext.pool import DaemonPool

__all__ = ["Looks"]

_LOGGER = logging.getLogger("spark_state_ext")
_SEEN_MAX = 4_096
# A look that comes this late, as its process slept, may miss what was deleted rightly.
_LATE_S = 600.0


class Looks:
    """What a process has looked at."""

    # Its own thread: a store that hangs keeps neither snapshots nor clean-up from going on.
    _beside: ClassVar[DaemonPool] = DaemonPool("looks")
    # By bucket and backend: the run that looked, or is about to.
    _seen: ClassVar[OrderedDict[tuple[str, str], str]] = OrderedDict()

    @classmethod
    def once(cls, key: str, run_id: str, committed: Pointer, places: list[Place], lost: Callable[[str], None]) -> None:
        """Look whether backends have what the pointer says, unless this run did; returns at once.

        Parameters
        ----------
        key
            Of the bucket.
        run_id
            The run.
        committed
            The input pointer of a call.
        places
            The configured backends.
        lost
            Called with the name of a backend that has not, in another thread.
        """
        known = taken_over(committed, places)
        for place in places:
            standing = known.standings.get(place.name)
            if standing is None or not is_complete(standing) or standing.through is None:
                continue
            if cls._seen.get((key, place.name)) == run_id:
                continue
            cls._seen[key, place.name] = run_id
            if len(cls._seen) > _SEEN_MAX:
                cls._seen.popitem(last=False)
            look = partial(cls._look, key, place.name, standing.through, lost, time.monotonic())
            try:
                cls._beside.submit(look, place.restore.restore())
            except StateError as error:
                cls._again(key, place.name, error)

    @classmethod
    def _look(
        cls, key: str, name: str, ref: CheckpointRef, lost: Callable[[str], None], asked_s: float, files: Readable
    ) -> None:
        try:
            if _is_there(files, ref) or time.monotonic() - asked_s > _LATE_S:
                return
            _LOGGER.error("%s cannot give back %s, which it had: somebody has deleted it", name, ref)
            lost(name)
        except OwnershipError as error:
            # The run's next call tells, too.
            _LOGGER.warning("%s", error)
        except StateError as error:
            cls._again(key, name, error)
        except Exception:
            # A fault of ours, which nobody else would tell of.
            _LOGGER.exception("looking for %s in %s failed", ref, name)

    @classmethod
    def _again(cls, key: str, name: str, error: StateError) -> None:
        """The next call has another look."""
        _LOGGER.warning("whether %s has what it confirmed cannot be told: %s", name, error)
        cls._seen.pop((key, name), None)


def _is_there(files: Readable, ref: CheckpointRef) -> bool:
    for kind in (DELTA, SNAPSHOT):
        try:
            files.size(file_name(ref, kind))
        except MissingCheckpointError:
            continue
        return True
    return False
