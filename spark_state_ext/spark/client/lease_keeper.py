"""The driver's part in the lease: it renews the lease while a query is idle, and releases it when the query has ended.

Between batches no task runs that could renew the lease, and no task knows when a query ends. The process that planned
the query learns both from Spark's public list of active queries. If a Connect client exits while its query runs on,
only tasks renew the lease.
"""

from __future__ import annotations

import atexit
import logging
import math
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from spark_state_ext.errors import StateError
from spark_state_ext.files.folder import Folder
from spark_state_ext.files.layout import SPILL_FOLDER, STARTING_FOLDER
from spark_state_ext.ownership.lease_log import LeaseLog
from spark_state_ext.ownership.lease_record import NumberedRecord
from spark_state_ext.rescale.folders import first_folder, make_rescaled_name
from spark_state_ext.worker.threads import DaemonPool

__all__ = ["KeptLeases", "LeaseKeeper"]

_LOGGER = logging.getLogger("spark_state_ext")
_POLL_S_MIN = 0.05
# How often folders are listed for leases of tasks that do not know their query, and failed roots are tried again.
_SELDOM_S = 10.0
# If more requests than this hang, new ones are made less and less often.
_HUNG_OFTEN = 6
# If no query has been active for this long, the session is polled less often.
_QUIET_S = 60.0
# A session that has only given errors for this long is not polled again.
_LOST_S = 60.0


@dataclass(eq=False)
class KeptLeases:
    """The leases below one operator's folder that one session looks after.

    Parameters
    ----------
    folder
        The folder ``<root>/<operator>``.
    application
        As in `RunIdentity`.
    lease_ms
        How long a lease lasts without renewal.
    plans
        Plans of queries that were planned in this process.
    adopted
        Folders of other queries, claimed by queries planned here: their leases say which query owns them.
    rescaling
        Plans that may rescale their query, which then continues in another folder.
    """

    folder: Folder
    application: str
    lease_ms: int
    plans: set[str] = field(default_factory=set)
    adopted: set[str] = field(default_factory=set)
    rescaling: set[str] = field(default_factory=set)
    # By folder that a query was rescaled to: the query that its lease names, or "" before it has a lease.
    _rescaled: dict[str, str] = field(default_factory=dict)
    # By query: the folder that it has claimed.
    _claimed: dict[str, str] = field(default_factory=dict)
    # By query: the folder and the record that the last poll found.
    _last_seen: dict[str, tuple[str, NumberedRecord] | None] = field(default_factory=dict)
    _active: set[str] = field(default_factory=set)
    _logged: set[str] = field(default_factory=set)
    _not_before_s: float = -math.inf
    _list_at_s: float = -math.inf
    _unassigned: list[str] = field(default_factory=list)
    # Queries for which all folders were already searched for claims.
    _searched: set[str] = field(default_factory=set)
    # A store that hangs must not keep the leases in other stores from being renewed.
    _pool: DaemonPool = field(default_factory=lambda: DaemonPool("leases"))
    _running: Future[None] | None = None
    _started_s: float = -math.inf

    def start_poll(self, active: Sequence[str], now_s: float) -> None:
        """Run `poll` in a background thread; skip it while the last call is running, unless that call hangs."""
        if self._running is not None and not self._running.done():
            # Less and less often, as each hanging call occupies a thread.
            if now_s <= self._started_s + _SELDOM_S * 2 ** max(0, self._pool.threads_max - _HUNG_OFTEN):
                return
            self._warn_once(
                "the leases below %s are not renewed: their store has not answered for %d s. Check the store. If a "
                "query has no batches for lease_ms, another run may take over its state",
                self.folder.root,
                _SELDOM_S,
            )
            self._pool.threads_max += 1
        self._started_s = now_s
        try:
            self._running = self._pool.submit(self._poll, active, now_s)
        except StateError as error:
            self.postpone(error, now_s)

    def close(self) -> None:
        """Make the thread end."""
        self._pool.close()

    def _poll(self, active: Sequence[str], now_s: float) -> None:
        try:
            self.poll(active, now_s, int(time.time() * 1000))
        except StateError as error:
            self.postpone(error, now_s)
        except Exception:
            # A bug in this package: log it, and go on with the other leases.
            _LOGGER.exception("could not renew the leases below %s", self.folder.root)

    def poll(self, active: Iterable[str], now_s: float, now_ms: int) -> None:
        """Renew the leases of active queries, and release the leases of queries that have ended."""
        if now_s < self._not_before_s:
            return
        active, ended = set(active), self._active - set(active)
        failed = self._for_each(active, lambda query: self._renew(query, now_ms))
        failed |= self._for_each(ended, lambda query: self._release(query, now_ms))
        # A failed release is tried again by the next poll.
        self._active = {query for query in active if self._last_seen.get(query) is not None} | (ended & failed.keys())
        unknown = active - self._active - failed.keys()
        has_unknown = bool(unknown)
        if now_s >= self._list_at_s:
            self._list_at_s = now_s + _SELDOM_S
            self._unassigned = self._find_unassigned() if has_unknown else []
            if active:
                self._find_rescaled()
            self._find_claimed(unknown - self._searched)
        # It is unknown to which of the queries these folders belong, so their leases are not released.
        query_folders = self._unassigned if has_unknown else []
        failed |= self._for_each(query_folders, lambda query_folder: self._renew(query_folder, now_ms))
        if failed and len(failed) == len(active | ended | set(query_folders)):
            raise next(iter(failed.values()))

    def _for_each(self, query_folders: Iterable[str], work: Callable[[str], None]) -> dict[str, StateError]:
        """Call `work` for each query folder, and return the errors; an error in one does not stop the others."""
        failed: dict[str, StateError] = {}
        for query_folder in query_folders:
            try:
                work(query_folder)
            except StateError as error:
                failed[query_folder] = error
                self._warn_once(
                    "this process could not renew or release the lease below %s: %s. If its query has no batches for "
                    "lease_ms, another run may take over its state",
                    self.folder.where(query_folder),
                    error,
                )
        return failed

    def postpone(self, error: StateError, now_s: float) -> None:
        """Log once that the root does not answer, and poll it again only after `_SELDOM_S`."""
        self._not_before_s = now_s + _SELDOM_S
        self._warn_once(
            "this process could not renew or release the leases below %s: %s. If a query has no batches for lease_ms, "
            "another run may take over its state",
            self.folder.root,
            error,
        )

    def _find_folders(self, query: str) -> set[str]:
        """Return the folders where a query's state may be: named like it, claimed by it, or made by a rescaling."""
        for name in self.adopted.difference(self._claimed.values()):
            claim = self._read_claim(name)
            if claim is not None:
                self._claimed[claim] = name
        name = self._claimed.get(query, query)
        if name != query and self._read_claim(name) != query:
            # The claim was released, or the folder removed.
            del self._claimed[query]
            name = query
        rescaled = {
            folder_name
            for folder_name, owner in self._rescaled.items()
            if owner == query or first_folder(folder_name) == first_folder(name)
        }
        # The folder of a first batch that may be running is not listed yet.
        return {name, *rescaled, *(make_rescaled_name(name, plan) for plan in self.rescaling)}

    def _find_leases(self, query: str) -> dict[str, NumberedRecord]:
        """Return the newest records of a query's leases by folder; only this application's records if there are any."""
        newest = {name: _read_newest(LeaseLog(self.folder.child(name)), query) for name in self._find_folders(query)}
        leases = {name: lease for name, lease in newest.items() if lease is not None}
        return {
            name: lease for name, lease in leases.items() if lease.record.owner.application == self.application
        } or leases

    def _find_run(self, query: str) -> tuple[str, NumberedRecord] | None:
        """Return the folder that a query's run writes to, and the lease there; None without a lease.

        In its first batch a run that rescales its query also holds the lease of the old folder. It continues in the
        folder that is named for its plan.
        """
        leases = self._find_leases(query)
        if not leases:
            return None
        name = max(leases, key=lambda folder_name: (leases[folder_name].record.renewed_ms, folder_name))
        plan = leases[name].record.owner.plan
        new = make_rescaled_name(name, plan)
        if new in leases and leases[new].record.owner.plan == plan:
            name = new
        return name, leases[name]

    def _read_claim(self, name: str) -> str | None:
        lease = LeaseLog(self.folder.child(name)).newest()
        return None if lease is None or lease.record.claim is None else lease.record.claim.id

    def _renew(self, query: str, now_ms: int) -> None:
        run, previous = self._find_run(query), self._last_seen.get(query)
        self._last_seen[query] = run
        if run is None:
            return
        name, lease = run
        log = LeaseLog(self.folder.child(name))
        if lease.record.owner.application != self.application:
            if not lease.record.released:
                self._warn_once(
                    "query %s: the lease of its state at %s was last renewed by %s. If that run has ended, this one "
                    "takes the lease over in its first batch; if it goes on, this one fails",
                    query,
                    log.root,
                    lease.record.owner,
                )
        elif previous is not None and (previous[0], previous[1].number) == (name, lease.number):
            # No task has renewed it since the last poll.
            record = lease.record.renew(now_ms, released=False)
            if log.append(lease, record):
                self._last_seen[query] = name, NumberedRecord(lease.number + 1, record)

    def _release(self, query: str, now_ms: int) -> None:
        for name, lease in self._find_leases(query).items():
            if lease.record.owner.application == self.application and not lease.record.released:
                record = lease.record.renew(now_ms, released=True)
                LeaseLog(self.folder.child(name)).append(lease, record)
        self._last_seen.pop(query, None)

    def _find_unassigned(self) -> list[str]:
        """Return this application's query folders whose tasks do not know their query."""
        folders: list[str] = []

        def check(name: str) -> None:
            lease = LeaseLog(self.folder.child(name)).newest()
            if lease is not None:
                owner = lease.record.owner
                if owner.application == self.application and owner.plan in self.plans:
                    folders.append(name)

        self._for_each((name for name in self._list_query_folders() if name.startswith("t")), check)
        # One folder for each query is enough: the folder that its run writes to is found from any of them.
        return list({first_folder(name): name for name in folders}.values())

    def _find_rescaled(self) -> None:
        """Find the folders that queries were rescaled to."""
        names = [name for name in self._list_query_folders() if name != first_folder(name)]
        self._rescaled = {name: self._rescaled.get(name, "") for name in names}

        def check(name: str) -> None:
            lease = LeaseLog(self.folder.child(name)).newest()
            if lease is not None:
                self._rescaled[name] = lease.record.owner.query

        self._for_each([name for name in names if not self._rescaled[name]], check)

    def _find_claimed(self, queries: set[str]) -> None:
        """Find the folders that these queries claimed in an earlier run: a restart may not name them again."""
        if not queries:
            return

        def check(name: str) -> None:
            if self._read_claim(name) in queries:
                self.adopted.add(name)

        self._for_each(self._list_query_folders(), check)
        self._searched |= queries

    def _list_query_folders(self) -> list[str]:
        return [name for name in self.folder.names() if name not in (SPILL_FOLDER, STARTING_FOLDER)]

    def _warn_once(self, text: str, *arguments: object) -> None:
        message = text % arguments
        if message not in self._logged:
            self._logged.add(message)
            _LOGGER.warning(message)


def _read_newest(log: LeaseLog, query: str) -> NumberedRecord | None:
    """Return a log's newest record; None if the folder was claimed by another query, which renews the lease then."""
    lease = log.newest()
    if lease is not None and lease.record.claim is not None and lease.record.claim.id != query:
        return None
    return lease


@dataclass(eq=False)
class _Session:
    """A Spark session and the leases kept for its queries."""

    session: weakref.ref[Any]
    folder_leases: dict[str, KeptLeases] = field(default_factory=dict)
    polled_at_s: float = 0.0
    active_at_s: float = 0.0
    # When the session began to answer with errors only.
    failing_since_s: float | None = None

    def close(self) -> None:
        """Make the session's threads end."""
        for leases in self.folder_leases.values():
            leases.close()


class LeaseKeeper:
    """Keeps the leases of the queries that this process started, in a background thread; a `Worker` owns it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sessions: list[_Session] = []
        self._thread: threading.Thread | None = None
        self._stopped = threading.Event()
        self._exit_registered = False

    def keep(
        self,
        session: Any,
        folders: Sequence[Folder],
        application: str,
        plan: str,
        lease_ms: int,
        adopted: str | None = None,
        rescales: bool = False,
    ) -> None:
        """Keep the leases of the queries that are started from a plan."""
        with self._lock:
            if not self._exit_registered:
                self._exit_registered = True
                atexit.register(self._stop_at_exit)
            entry = next((entry for entry in self._sessions if entry.session() is session), None)
            if entry is None:
                entry = _Session(weakref.ref(session))
                self._sessions.append(entry)
            entry.active_at_s = time.monotonic()
            for folder in folders:
                leases = entry.folder_leases.setdefault(folder.identity, KeptLeases(folder, application, lease_ms))
                leases.lease_ms = lease_ms
                leases.plans.add(plan)
                leases.adopted.update([adopted] if adopted else [])
                leases.rescaling.update([plan] if rescales else [])
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._loop, name="spark_state_ext leases", daemon=True)
                self._thread.start()

    def stop(self) -> None:
        """Stop polling the sessions, because they are about to end."""
        self._stopped.set()

    def _stop_at_exit(self) -> None:
        """Stop, and wait for the thread: if Python ends it while it wakes up, the process may abort."""
        self.stop()
        if self._thread is not None:
            self._thread.join(DaemonPool.exit_left_s())

    def _loop(self) -> None:
        while True:
            with self._lock:
                for entry in [entry for entry in self._sessions if entry.session() is None]:
                    self._sessions.remove(entry)
                    entry.close()
                sessions = list(self._sessions)
                lease_ms = min(
                    (leases.lease_ms for entry in sessions for leases in entry.folder_leases.values()), default=None
                )
                if lease_ms is None:
                    self._thread = None
                    return
            for entry in sessions:
                self._poll(entry)
            if self._stopped.wait(max(lease_ms / 3000, _POLL_S_MIN)):
                return

    def _poll(self, entry: _Session) -> None:
        now_s = time.monotonic()
        if now_s < entry.polled_at_s + _SELDOM_S and now_s > entry.active_at_s + _QUIET_S:
            return
        entry.polled_at_s = now_s
        session = entry.session()
        try:
            active = [] if session is None else [query.id for query in session.streams.active]
        except Exception as error:
            self._handle_failure(entry, session, error, now_s)
            return
        entry.failing_since_s = None
        if active:
            entry.active_at_s = now_s
        for leases in list(entry.folder_leases.values()):
            leases.start_poll(active, now_s)

    def _handle_failure(self, entry: _Session, session: Any, error: Exception, now_s: float) -> None:
        """Drop a session that was stopped or fails for too long; its queries may still run, so release no lease."""
        if entry.failing_since_s is None:
            entry.failing_since_s = now_s
        # Only sessions of Connect report whether they were stopped.
        stopped = getattr(session, "is_stopped", False) is True
        if not stopped and now_s < entry.failing_since_s + _LOST_S:
            return
        if stopped:
            _LOGGER.info("the session was stopped; its queries are no longer known: %s", error)
        else:
            _LOGGER.warning(
                "this process no longer renews the leases of the session's queries: the session has only given errors "
                "for %d s, the last one: %s. If a query has no batches for lease_ms, another run may take over its "
                "state. To have its lease renewed, start the query again from a session that answers",
                _LOST_S,
                error,
            )
        with self._lock:
            self._sessions.remove(entry)
        entry.close()
