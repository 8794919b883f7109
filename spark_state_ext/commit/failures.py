"""Which run a failure counts for, and since when its attempts wait.

Notes in local stores outlive their run. What failed in a run that is over was told, or nobody was left to be told: it
must not fail the next run. Within one run it counts in every attempt at a task: Spark tries a task again a few times,
each time in another process, and a permanent failure must not look mended in between.

The same plan may be started again, and what identifies a run may then be the same. Spark numbers the stages of an
application: all attempts at a task have one number, and what comes later has a larger one. So whoever tells of a
failure leaves the number of its stage in a file beside the local stores (`Ended`). Whatever began before, in any bucket
of this machine, counts for no later stage.
"""

from __future__ import annotations

import json
import logging
import os
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["NO_RUN", "Clocks", "Ended", "Refused", "Run", "counts"]

_LOGGER = logging.getLogger("spark_state_ext")
_FILE = "ended"


@dataclass(frozen=True)
class Run:
    """A run, as far as it has come.

    Parameters
    ----------
    id
        What identifies it. Empty: nothing does.
    stage
        Number of the task's stage: the same for all attempts at it, and larger for whatever comes later.
    """

    id: str = ""
    stage: int = 0


def counts(noted: Run, run: Run, ended: int | None) -> bool:
    """Whether what was noted still matters."""
    return noted.id == run.id and not (ended is not None and noted.stage <= ended < run.stage)


class Ended:
    """The stage in which a run ended, for all buckets that have a local store in one folder."""

    def __init__(self, store: Path) -> None:
        self._path = store.parent / _FILE

    def of(self, run: Run) -> int | None:
        """The last stage that told of a failure; None where none of this run did."""
        try:
            found, stage = json.loads(self._path.read_text())
        except (OSError, ValueError, TypeError):
            return None
        return stage if found == run.id and isinstance(stage, int) else None

    def tell(self, run: Run) -> None:
        """A task tells of a failure."""
        before = self.of(run)
        if not run.id or (before is not None and before >= run.stage):
            return
        made = self._path.with_name(f"{_FILE}-{uuid.uuid4().hex}")
        try:
            with os.fdopen(os.open(made, os.O_CREAT | os.O_WRONLY, 0o600), "w") as file:
                json.dump([run.id, run.stage], file)
            made.replace(self._path)
        except OSError as error:
            # The same plan, started again, is told once more.
            _LOGGER.warning("that a run ended with a failure is not noted in %s: %s", self._path, error)


@dataclass(frozen=True)
class Clocks:
    """Since when what a task waits for has been under way, for further attempts at it.

    Parameters
    ----------
    run
        With the stage, which these attempts have in common.
    since_s
        Seconds of the machine's monotonic clock, by the name of a record.
    """

    run: Run
    since_s: Mapping[str, float]

    def encode(self) -> bytes:
        """As the value of a record."""
        return json.dumps([self.run.id, self.run.stage, dict(self.since_s)]).encode()

    @staticmethod
    def kept(value: bytes | None, run: Run) -> Mapping[str, float]:
        """What attempts at the same task left, if any did."""
        try:
            found, stage, since_s = json.loads(value or b"")
        except (ValueError, TypeError):
            return {}
        return dict(since_s) if run.id and Run(found, stage) == run else {}


@dataclass(frozen=True)
class Refused:
    """Full snapshots that a backend has refused since it took the last one.

    Parameters
    ----------
    run
        Whose calls sent them.
    since_s, last_s
        When the first of them was taken on, and when the last one failed: seconds of the machine's monotonic clock.
    attempts
        How many they are.
    error
        What the last one failed with.
    again_s
        When another one was taken on that may be under way; None: none is.
    """

    run: Run
    since_s: float
    last_s: float
    attempts: int = 1
    error: str = ""
    again_s: float | None = None

    def for_long(self, timeout_s: float) -> bool:
        """Whether that is an error by now. One refusal never is: the backend may be mended since."""
        return self.attempts > 1 and self.last_s - self.since_s >= timeout_s

    def may_try_again(self, now_s: float, delay_s: float, timeout_s: float) -> bool:
        """Whether it is time for another attempt."""
        idle = self.again_s is None or now_s - self.again_s >= timeout_s
        return idle and now_s - self.last_s >= delay_s

    def encode(self) -> bytes:
        """As the value of a record."""
        numbers = {"since_s": self.since_s, "last_s": self.last_s, "attempts": self.attempts, "again_s": self.again_s}
        return json.dumps({"run": [self.run.id, self.run.stage], "error": self.error, **numbers}).encode()

    @staticmethod
    def decode(value: bytes | None) -> Refused | None:
        """Inverse of `encode`; None for what it did not give."""
        try:
            found = json.loads(value or b"")
            return Refused(**{**found, "run": Run(*found["run"])})
        except (KeyError, TypeError, ValueError):
            return None


NO_RUN = Run()
