"""Which run of the query a failure counts for, and since when attempts at a task have waited.

Records in local stores outlive their run. A failure of a run that has ended must not fail the next run. Within one run
a failure counts for every attempt at a task: Spark retries a task a few times, each time in another process, and a
permanent failure must not look fixed in between.

The same plan may be started again, and the new run may then have the same id. Spark numbers the stages of an
application: all attempts at a task have the same number, and later stages have larger numbers. So a task that reports a
failure writes the number of its stage to a file next to the local stores (`FailedStage`). Failures from that stage or
earlier, in any bucket of this machine, do not count for later stages.
"""

from __future__ import annotations

import json
import logging
import os
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["NO_RUN", "StartTimes", "FailedStage", "Refusals", "Run", "still_counts"]

_LOGGER = logging.getLogger("spark_state_ext")
_FILE = "ended"


@dataclass(frozen=True)
class Run:
    """A run of the query at one of its stages.

    Parameters
    ----------
    id
        Id of the run; empty if unknown.
    stage
        Number of the task's stage: the same for all attempts at the task, larger for later stages.
    """

    id: str = ""
    stage: int = 0


def still_counts(noted: Run, run: Run, ended: int | None) -> bool:
    """True if a failure that was noted by one run at a stage still counts for another."""
    return noted.id == run.id and not (ended is not None and noted.stage <= ended < run.stage)


class FailedStage:
    """The stage in which a run failed, shared by all buckets whose local stores are in one folder."""

    def __init__(self, store: Path) -> None:
        self._path = store.parent / _FILE

    def read(self, run: Run) -> int | None:
        """Return the last stage of a run that reported a failure, or None."""
        try:
            run_id, stage = json.loads(self._path.read_text())
        except (OSError, ValueError, TypeError):
            return None
        return stage if run_id == run.id and isinstance(stage, int) else None

    def note(self, run: Run) -> None:
        """Note that a task reports a failure."""
        noted_stage = self.read(run)
        if not run.id or (noted_stage is not None and noted_stage >= run.stage):
            return
        new_file = self._path.with_name(f"{_FILE}-{uuid.uuid4().hex}")
        try:
            with os.fdopen(os.open(new_file, os.O_CREAT | os.O_WRONLY, 0o600), "w") as file:
                json.dump([run.id, run.stage], file)
            new_file.replace(self._path)
        except OSError as error:
            # If the same plan is started again, it reports the failure once more.
            _LOGGER.warning("the end of a failed run could not be noted in %s: %s", self._path, error)


@dataclass(frozen=True)
class StartTimes:
    """The start times of uploads that a task waits for, kept for further attempts at the task.

    Parameters
    ----------
    run
        The run and the stage, which these attempts share.
    since_s
        Start time of each upload by the name of its record, in seconds of the machine's monotonic clock.
    """

    run: Run
    since_s: Mapping[str, float]

    def encode(self) -> bytes:
        """Return the value of a record."""
        return json.dumps([self.run.id, self.run.stage, dict(self.since_s)]).encode()

    @staticmethod
    def decode(value: bytes | None, run: Run) -> Mapping[str, float]:
        """Return the start times that earlier attempts at the same task left; empty if there are none."""
        try:
            run_id, stage, since_s = json.loads(value or b"")
        except (ValueError, TypeError):
            return {}
        return dict(since_s) if run.id and Run(run_id, stage) == run else {}


@dataclass(frozen=True)
class Refusals:
    """The full snapshots that a backend has refused since it last accepted one.

    Parameters
    ----------
    run
        The run that sent them.
    since_s, last_s
        When the first one was submitted and when the last one failed, in seconds of the machine's monotonic clock.
    attempts
        Number of refused snapshots.
    error
        Error of the last one.
    again_s
        When a snapshot was submitted that may still be in progress; None: there is no such snapshot.
    """

    run: Run
    since_s: float
    last_s: float
    attempts: int = 1
    error: str = ""
    again_s: float | None = None

    def have_lasted(self, timeout_s: float) -> bool:
        """True if refusals have lasted long enough to be an error; a single one never is, it may be fixed since."""
        return self.attempts > 1 and self.last_s - self.since_s >= timeout_s

    def may_try_again(self, now_s: float, delay_s: float, timeout_s: float) -> bool:
        """True if it is time for another attempt."""
        idle = self.again_s is None or now_s - self.again_s >= timeout_s
        return idle and now_s - self.last_s >= delay_s

    def encode(self) -> bytes:
        """Return the value of a record."""
        numbers = {"since_s": self.since_s, "last_s": self.last_s, "attempts": self.attempts, "again_s": self.again_s}
        return json.dumps({"run": [self.run.id, self.run.stage], "error": self.error, **numbers}).encode()

    @staticmethod
    def decode(value: bytes | None) -> Refusals | None:
        """Return the refusals from the value of a record; None if it cannot be decoded."""
        try:
            fields = json.loads(value or b"")
            return Refusals(**{**fields, "run": Run(*fields["run"])})
        except (KeyError, TypeError, ValueError):
            return None


NO_RUN = Run()
