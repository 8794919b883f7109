"""Who may write an operator's state: a lease that a run renews while it lives.

A copied Spark checkpoint keeps its query id, so two runs can claim one folder. Immutable files keep their states apart,
but clean-up and the user's intent do not allow it: the second live run is refused, and a run that another has replaced
stops. A lease is a small file with the run's id and the time of its last renewal.

A PUT may arrive long after it was sent, and then overwrites the record of the run that took the lease meanwhile. That
run remembers whom it replaced, and writes its own again. The other one does not get the lease by it: it looks while a
PUT hangs and after one that took long, and does not forget that it saw a successor.

A restart must not wait for the lease of a run that is known to be over: Spark itself never has one query active twice
in an application, and on one machine a process that is gone renews nothing.
"""

from __future__ import annotations

import json
import logging
import math
import os
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import wait
from dataclasses import asdict, dataclass
from typing import ClassVar

from arrow_schemas.checksum import checksum_of
from spark_state_ext.errors import (
    CorruptFileError,
    LiveRunError,
    MissingCheckpointError,
    StateError,
    StorageError,
    UsageError,
    VersionSkewError,
)
from spark_state_ext.folder import Folder
from spark_state_ext.pool import DaemonPool
from spark_state_ext.process import is_running, namespace, start_of
from spark_state_ext.store.environment import boot_id

__all__ = ["Lease", "LeaseRecord", "RunIdentity", "verdict"]

_LOGGER = logging.getLogger("spark_state_ext")
_FILE = "lease.json"
_LEASE_FORMAT = 3
_POLL_S = 0.2
_REPLACED_MAX = 100
TAKE, WAIT = "take", "wait"
_STOP_ONE = ", which started later. Stop one of the two, and give a copied checkpoint a root of its own."
_NOT_DONE = "; what it had left to do in the background is not done."


@dataclass(frozen=True)
class RunIdentity:
    """A streaming run: Spark's run id, its application, and a process on one machine that lives as long as it."""

    run_id: str
    application_id: str
    host: str
    boot: str
    pid: int
    pid_start: str
    pid_namespace: str = ""

    @staticmethod
    def here(run_id: str, application_id: str) -> RunIdentity:
        """The identity of the run this worker process works for."""
        # Workers are forked by a daemon that lives as long as the executor; its own life is what counts.
        pid = os.getppid()
        host, boot = socket.gethostname(), boot_id()
        return RunIdentity(run_id, application_id, host, boot, pid, start_of(pid), namespace())

    def is_over(self) -> bool:
        """Whether the process is known to be gone; False when that cannot be told from here.

        Machines may share a name, and containers a machine's name and boot: a process is looked for only where its
        number means the same. After a restart of the machine its lease runs out.
        """
        here = (socket.gethostname(), boot_id(), namespace())
        if not self.pid_start or not self.pid_namespace or (self.host, self.boot, self.pid_namespace) != here:
            return False
        return not is_running(self.pid, self.pid_start)


@dataclass(frozen=True)
class LeaseRecord:
    """Contents of a lease file.

    Parameters
    ----------
    owner
        The run that holds the lease.
    renewed_ms
        When it last said so: wall-clock time, milliseconds since 1970.
    replaced
        Runs that held it before, the last ones; they do not get it back.
    """

    owner: RunIdentity
    renewed_ms: int
    replaced: tuple[str, ...] = ()

    def encode(self) -> bytes:
        """The file's bytes."""
        fields = {
            "format": _LEASE_FORMAT,
            "owner": asdict(self.owner),
            "renewed_ms": self.renewed_ms,
            "replaced": list(self.replaced),
        }
        return json.dumps({**fields, "checksum": checksum_of(fields)}).encode()

    @staticmethod
    def decode(data: bytes, where: str) -> LeaseRecord:
        """Read a lease file."""
        try:
            fields = json.loads(data)
            if fields["format"] > _LEASE_FORMAT:
                raise VersionSkewError(
                    f"{where} has format {fields['format']}; this release reads up to {_LEASE_FORMAT}. "
                    "Use a newer release."
                )
            # Format 1 had none.
            if fields.pop("checksum", None) != (checksum_of(fields) if fields["format"] > 1 else None):
                raise CorruptFileError(f"{where} fails its checksum. Remove it when no run is live.")
            replaced = tuple(str(run) for run in fields.get("replaced", ()))
            return LeaseRecord(RunIdentity(**fields["owner"]), int(fields["renewed_ms"]), replaced)
        except CorruptFileError:
            raise
        except (AttributeError, KeyError, OverflowError, RecursionError, TypeError, ValueError) as error:
            raise CorruptFileError(f"{where} is no lease: {error!r}. Remove it when no run is live.") from error


def verdict(found: LeaseRecord | None, me: RunIdentity, now_ms: int, lease_ms: int, over: bool) -> str:
    """What a run that does not hold the lease may do: `TAKE` it, or `WAIT` whether the owner renews it.

    Parameters
    ----------
    found
        The record on file.
    me
        The run that asks.
    now_ms, lease_ms
        The time, and how long a lease lasts without renewal.
    over
        Whether the owner's process is known to be gone.
    """
    if found is None or found.owner.run_id == me.run_id or over:
        return TAKE
    if me.application_id and found.owner.application_id == me.application_id:
        return TAKE
    return TAKE if now_ms - found.renewed_ms > lease_ms else WAIT


class Lease:
    """This process's hold on one operator folder for one run.

    Parameters
    ----------
    files
        The operator's folder.
    me
        The run.
    lease_ms
        How long a lease lasts without renewal.
    once
        The run's id is never used again, so that a run which was replaced is known by it.
    """

    _held: ClassVar[dict[tuple[str, str], Lease]] = {}
    _lock = threading.Lock()

    def __init__(self, files: Folder, me: RunIdentity, lease_ms: int, *, once: bool = True) -> None:
        if lease_ms < 100:
            raise UsageError(f"lease_ms must be at least 100, not {lease_ms}")
        self._files = files
        self._me = me
        self._lease_ms = lease_ms
        self._once = once
        self._check_at_s = 0.0
        # After a store did not answer.
        self._not_before_s = 0.0
        self._checked_at_s = -math.inf
        self._seen = False
        self._holding = threading.Lock()
        self._renewing = False
        self._looking = False
        # Each its own threads: a store that hangs does not keep the others' leases from being renewed.
        self._beside = DaemonPool("leases")
        self._beside.threads_max = 2  # to look while a renewal hangs
        self._successor: RunIdentity | None = None
        self._replaced: tuple[str, ...] = ()

    @classmethod
    def of(cls, files: Folder, run_id: str, application_id: str, lease_ms: int, *, once: bool = True) -> Lease:
        """The process's lease object of a run."""
        with cls._lock:
            key = (files.identity, run_id)
            if key not in cls._held:
                # A worker outlives queries; only the current run of a folder is of interest.
                for stale in [k for k in cls._held if k[0] == files.identity]:
                    del cls._held[stale]
                cls._held[key] = cls(files, RunIdentity.here(run_id, application_id), lease_ms, once=once)
            return cls._held[key]

    def hold(self) -> None:
        """Take or renew the lease when that is due; cheap otherwise.

        A lease that this process holds is renewed beside what it does, so that nobody waits for a slow store. Only
        where that did not come to pass for long, as batches are far between or a renewal hangs, does a call see first
        that it is held; it waits for a third of the lease at most.

        Raises
        ------
        LiveRunError
            When another live run holds it, or has taken it over from this one.
        """
        self._stop_if_replaced(_STOP_ONE)
        now_s = time.monotonic()
        if now_s < max(self._check_at_s, self._not_before_s):
            return
        if not self._seen:
            with self._holding:
                if time.monotonic() >= self._check_at_s:
                    self._renew()
            return
        if not self._looking and now_s >= max(self._check_at_s, self._checked_at_s) + self._lease_ms / 3000:
            self._looking = True
            self._do_beside(self._look_beside, self._lease_ms / 3000)
            self._stop_if_replaced(_STOP_ONE)
        if not self._renewing:
            self._renewing = True
            self._do_beside(self._renew_beside, 0.0)

    def _do_beside(self, work: Callable[[], None], timeout_s: float) -> None:
        try:
            wait([self._beside.submit(work)], timeout_s)
        except StorageError as error:  # no thread
            self._looking = self._renewing = False
            self._not_answered(error)

    def _look_beside(self) -> None:
        try:
            self._look(_STOP_ONE)
        except LiveRunError:
            pass  # kept as the successor
        except StateError as error:
            # That a store does not answer is no reason to stop a run that holds it. (Clean-up looks itself.)
            self._not_answered(error)
        finally:
            self._looking = False

    def _look(self, and_so: str) -> None:
        found = self._read()
        if found is not None and self._is_another(found) and not self._is_late(found):
            raise self._lost_to(found.owner, and_so)
        self._checked_at_s = time.monotonic()

    def _is_another(self, found: LeaseRecord) -> bool:
        return found.owner.run_id != self._me.run_id

    def _is_late(self, found: LeaseRecord) -> bool:
        """Whether it was sent before this run replaced its writer, who did not know of that."""
        return found.owner.run_id in self._replaced and self._me.run_id not in found.replaced

    def _stop_if_replaced(self, and_so: str) -> None:
        successor = self._successor
        if successor is not None:
            if not self._once:
                # It may come back, and then looks anew.
                self._successor = None
            raise self._lost_error(successor, and_so)

    def _is_replaced_here(self) -> bool:
        """Whether this process works for another run on the same folder by now."""
        return any(it is not self and it._files.identity == self._files.identity for it in list(self._held.values()))

    def _renew_beside(self) -> None:
        try:
            with self._holding:
                # Not after its run: the next one may have taken it.
                if self._successor is None and time.monotonic() >= self._check_at_s and not self._is_replaced_here():
                    self._renew()
        except LiveRunError:
            pass  # kept as the successor
        except StateError as error:
            self._not_answered(error)
        finally:
            self._renewing = False

    def _not_answered(self, error: StateError) -> None:
        self._not_before_s = time.monotonic() + self._lease_ms / 6000
        _LOGGER.warning("the lease of %s could not be renewed yet: %s", self._files.root, error)

    def check(self) -> None:
        """See that nobody has taken the lease over; for work after the run's last task, which must not renew it.

        Raises
        ------
        LiveRunError
            When another run has taken it.
        """
        self._stop_if_replaced(_NOT_DONE)
        if time.monotonic() >= max(self._check_at_s, self._checked_at_s + self._lease_ms / 3000):
            self._look(_NOT_DONE)

    def _renew(self) -> None:
        begun_s = time.monotonic()
        found = self._read()
        replaced = self._replaced if found is None else (*self._replaced, *found.replaced)
        if found is not None and self._is_another(found):
            if not self._is_late(found):
                # A run whose workers are new, and a late task of a run that is over, know it from the record only.
                if self._seen or (self._once and self._me.run_id in replaced):
                    raise self._lost_to(found.owner, _STOP_ONE)
                self._wait_for_end(found)
                begun_s = time.monotonic()
            replaced = (*replaced, found.owner.run_id)
        replaced = tuple(dict.fromkeys(replaced))[-_REPLACED_MAX:]
        self._files.put(_FILE, LeaseRecord(self._me, int(time.time() * 1000), replaced).encode())
        self._replaced = replaced
        if time.monotonic() > begun_s + self._lease_ms / 1000:
            # It had run out, and whoever took it over meanwhile may have written it again.
            self._look(_STOP_ONE)
        self._seen = True
        self._check_at_s = begun_s + self._lease_ms / 3000

    def _lost_to(self, owner: RunIdentity, and_so: str) -> LiveRunError:
        self._successor = owner
        return self._lost_error(owner, and_so)

    def _lost_error(self, owner: RunIdentity, and_so: str) -> LiveRunError:
        return LiveRunError(
            f"run {self._me.run_id} has lost the state at {self._files.root} to run {owner.run_id} on "
            f"{owner.host}{and_so}"
        )

    def _wait_for_end(self, found: LeaseRecord) -> None:
        deadline_s = time.monotonic() + self._lease_ms / 1000
        while True:
            now_ms = int(time.time() * 1000)
            if verdict(found, self._me, now_ms, self._lease_ms, found.owner.is_over()) == TAKE:
                return
            latest = self._read()
            if latest is not None and latest.owner.run_id == self._me.run_id:
                return
            if latest is not None and latest != found:
                raise LiveRunError(
                    f"the state at {self._files.root} is being written by run {latest.owner.run_id} on "
                    f"{latest.owner.host}; "
                    f"run {self._me.run_id} must not write it too. Stop the other run, or give this one a root "
                    "of its own."
                )
            if time.monotonic() > deadline_s:
                return
            time.sleep(_POLL_S)

    def _read(self) -> LeaseRecord | None:
        try:
            return LeaseRecord.decode(self._files.get(_FILE), self._files.where(_FILE))
        except MissingCheckpointError:
            return None
