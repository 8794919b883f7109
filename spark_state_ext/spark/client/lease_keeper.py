"""The driver's part in the lease: it renews it while a query is idle, and says so when a query has ended.

Between batches no task runs, so none renews the lease; and no task knows when a query ends. The process that planned
the query sees both, through Spark's public list of active queries. A Connect client that goes away leaves its query
behind: then tasks alone renew the lease.
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
from spark_state_ext.ownership.lease_record import Found
from spark_state_ext.rescale.folders import first_folder, rescaled_folder
from spark_state_ext.worker.threads import DaemonPool

__all__ = ["Kept", "LeaseKeeper"]

_LOGGER = logging.getLogger("spark_state_ext")
_POLL_S_MIN = 0.05
# How often folders are listed for leases of tasks that are not told their query, and roots that did not answer asked.
_SELDOM_S = 10.0
# So many requests may hang before further ones are made more and more seldom.
_HUNG_OFTEN = 6
# Where no query has been active for so long, the session is asked seldom.
_QUIET_S = 60.0
# A session that gives no answer for so long is not asked any more.
_LOST_S = 60.0


@dataclass(eq=False)
class Kept:
    """The leases below one operator's folder, as far as one session has to do with them.

    Parameters
    ----------
    folder
        The folder ``<root>/<operator>``.
    application
        As in `RunIdentity`.
    lease_ms
        How long a lease lasts without renewal.
    plans
        Those that were planned here.
    adopted
        Folders of other queries that queries planned here claim: their leases tell whose they are.
    rescaling
        Those of the plans that may rescale their query, which goes on in another folder then.
    """

    folder: Folder
    application: str
    lease_ms: int
    plans: set[str] = field(default_factory=set)
    adopted: set[str] = field(default_factory=set)
    rescaling: set[str] = field(default_factory=set)
    # Folders that queries were rescaled to, each with the query that its lease names; none where it has no lease yet.
    _rescaled: dict[str, str] = field(default_factory=dict)
    # By query: the folder that it has claimed.
    _claimed: dict[str, str] = field(default_factory=dict)
    # By query: the folder and the record that were found last.
    _seen: dict[str, tuple[str, Found] | None] = field(default_factory=dict)
    _active: set[str] = field(default_factory=set)
    _told: set[str] = field(default_factory=set)
    _not_before_s: float = -math.inf
    _list_at_s: float = -math.inf
    _untold: list[str] = field(default_factory=list)
    # Queries that folders which were claimed have been looked through for.
    _looked_for: set[str] = field(default_factory=set)
    # A store that hangs keeps no other one's leases from being renewed.
    _pool: DaemonPool = field(default_factory=lambda: DaemonPool("leases"))
    _under_way: Future[None] | None = None
    _begun_s: float = -math.inf

    def begin(self, active: Sequence[str], now_s: float) -> None:
        """As `poll`, in a thread of its own; nothing while the call before is under way, unless that hangs."""
        if self._under_way is not None and not self._under_way.done():
            # Ever more seldom, as each that hangs keeps a thread.
            if now_s <= self._begun_s + _SELDOM_S * 2 ** max(0, self._pool.threads_max - _HUNG_OFTEN):
                return
            self._say(
                "the leases below %s are not looked after: its store has not answered for %d s. Look at the "
                "store. While a query has no batches for lease_ms, another run may take its state over",
                self.folder.root,
                _SELDOM_S,
            )
            self._pool.threads_max += 1
        self._begun_s = now_s
        try:
            self._under_way = self._pool.submit(self._poll, active, now_s)
        except StateError as error:
            self.put_off(error, now_s)

    def end(self) -> None:
        """Have the thread end."""
        self._pool.close()

    def _poll(self, active: Sequence[str], now_s: float) -> None:
        try:
            self.poll(active, now_s, int(time.time() * 1000))
        except StateError as error:
            self.put_off(error, now_s)
        except Exception:
            # A fault of ours, which nobody else would tell of; the other leases are looked after all the same.
            _LOGGER.exception("the leases below %s are not looked after", self.folder.root)

    def poll(self, active: Iterable[str], now_s: float, now_ms: int) -> None:
        """Renew what belongs to active queries, and release what belongs to queries that were."""
        if now_s < self._not_before_s:
            return
        active, ended = set(active), self._active - set(active)
        failed = self._each(active, lambda query: self._renew(query, now_ms))
        failed |= self._each(ended, lambda query: self._release(query, now_ms))
        # What could not be released is tried again.
        self._active = {query for query in active if self._seen.get(query) is not None} | (ended & failed.keys())
        unknown = active - self._active - failed.keys()
        untold = bool(unknown)
        if now_s >= self._list_at_s:
            self._list_at_s = now_s + _SELDOM_S
            self._untold = self._find_untold() if untold else []
            if active:
                self._find_rescaled()
            self._find_claimed(unknown - self._looked_for)
        # Which of the queries these belong to, nobody can tell; so they are not released.
        query_folders = self._untold if untold else []
        failed |= self._each(query_folders, lambda query_folder: self._renew(query_folder, now_ms))
        if failed and len(failed) == len(active | ended | set(query_folders)):
            raise next(iter(failed.values()))

    def _each(self, query_folders: Iterable[str], work: Callable[[str], None]) -> dict[str, StateError]:
        """Do `work` for each query folder; one that is damaged keeps no other one from it."""
        failed: dict[str, StateError] = {}
        for query_folder in query_folders:
            try:
                work(query_folder)
            except StateError as error:
                failed[query_folder] = error
                self._say(
                    "the lease below %s cannot be looked after by this process: %s. While its query has no batches "
                    "for lease_ms, another run may take its state over",
                    self.folder.where(query_folder),
                    error,
                )
        return failed

    def put_off(self, error: StateError, now_s: float) -> None:
        """The root does not answer here: it is asked seldom, and said once."""
        self._not_before_s = now_s + _SELDOM_S
        self._say(
            "the leases below %s cannot be looked after by this process: %s. While a query has no batches for "
            "lease_ms, another run may take its state over",
            self.folder.root,
            error,
        )

    def _folders_of(self, query: str) -> set[str]:
        """Where a query's state may be: the folder of its name, or the one that it claimed, and what it rescaled to."""
        for name in self.adopted.difference(self._claimed.values()):
            claim = self._claim_on(name)
            if claim is not None:
                self._claimed[claim] = name
        name = self._claimed.get(query, query)
        if name != query and self._claim_on(name) != query:
            # It was released, or removed.
            del self._claimed[query]
            name = query
        rescaled = {
            it for it, owner in self._rescaled.items() if owner == query or first_folder(it) == first_folder(name)
        }
        # Those of a first batch that may be under way are not listed yet.
        return {name, *rescaled, *(rescaled_folder(name, plan) for plan in self.rescaling)}

    def _leases_of(self, query: str) -> dict[str, Found]:
        """The newest records of a query's leases, by folder: of this application's if it has any, else of all."""
        newest = {name: _newest_of(LeaseLog(self.folder.child(name)), query) for name in self._folders_of(query)}
        found = {name: it for name, it in newest.items() if it is not None}
        return {name: it for name, it in found.items() if it.record.owner.application == self.application} or found

    def _run_of(self, query: str) -> tuple[str, Found] | None:
        """The folder that a query's run writes to, and the lease there.

        A run that rescales its query holds the lease of the old folder too in its first batch, and goes on in the one
        that is called after its plan.
        """
        found = self._leases_of(query)
        if not found:
            return None
        name = max(found, key=lambda it: (found[it].record.renewed_ms, it))
        plan = found[name].record.owner.plan
        new = rescaled_folder(name, plan)
        if new in found and found[new].record.owner.plan == plan:
            name = new
        return name, found[name]

    def _claim_on(self, name: str) -> str | None:
        found = LeaseLog(self.folder.child(name)).newest()
        return None if found is None or found.record.claim is None else found.record.claim.id

    def _renew(self, query: str, now_ms: int) -> None:
        run, before = self._run_of(query), self._seen.get(query)
        self._seen[query] = run
        if run is None:
            return
        name, found = run
        log = LeaseLog(self.folder.child(name))
        if found.record.owner.application != self.application:
            self._say("query %s: the state at %s is held by %s", query, log.root, found.record.owner)
        elif before is not None and (before[0], before[1].number) == (name, found.number):
            # No task has renewed it since the last look.
            record = found.record.renew(now_ms, released=False)
            if log.append(found, record):
                self._seen[query] = name, Found(found.number + 1, record)

    def _release(self, query: str, now_ms: int) -> None:
        for name, found in self._leases_of(query).items():
            if found.record.owner.application == self.application and not found.record.released:
                record = found.record.renew(now_ms, released=True)
                LeaseLog(self.folder.child(name)).append(found, record)
        self._seen.pop(query, None)

    def _find_untold(self) -> list[str]:
        """Query folders of this application whose tasks were not told their query."""
        ours: list[str] = []

        def look(name: str) -> None:
            found = LeaseLog(self.folder.child(name)).newest()
            if found is not None:
                owner = found.record.owner
                if owner.application == self.application and owner.plan in self.plans:
                    ours.append(name)

        self._each((name for name in self._query_folders() if name.startswith("t")), look)
        # One for each query: the folder that its run writes to is found from any.
        return list({first_folder(name): name for name in ours}.values())

    def _find_rescaled(self) -> None:
        """Which folders queries were rescaled to."""
        names = [name for name in self._query_folders() if name != first_folder(name)]
        self._rescaled = {name: self._rescaled.get(name, "") for name in names}

        def look(name: str) -> None:
            found = LeaseLog(self.folder.child(name)).newest()
            if found is not None:
                self._rescaled[name] = found.record.owner.query

        self._each([name for name in names if not self._rescaled[name]], look)

    def _find_claimed(self, queries: set[str]) -> None:
        """What these have claimed in an earlier run: a restart need not say again where it began."""
        if not queries:
            return

        def look(name: str) -> None:
            if self._claim_on(name) in queries:
                self.adopted.add(name)

        self._each(self._query_folders(), look)
        self._looked_for |= queries

    def _query_folders(self) -> list[str]:
        return [name for name in self.folder.names() if name not in (SPILL_FOLDER, STARTING_FOLDER)]

    def _say(self, text: str, *told: object) -> None:
        said = text % told
        if said not in self._told:
            self._told.add(said)
            _LOGGER.warning(said)


def _newest_of(log: LeaseLog, query: str) -> Found | None:
    """The newest record, where it is a query's; one that was claimed from the query is another one's to renew."""
    found = log.newest()
    if found is not None and found.record.claim is not None and found.record.claim.id != query:
        return None
    return found


@dataclass(eq=False)
class _Session:
    """A session and what is kept for its queries."""

    session: weakref.ref[Any]
    kept: dict[str, Kept] = field(default_factory=dict)
    asked_at_s: float = 0.0
    active_at_s: float = 0.0
    # Since when it has given errors in place of answers.
    failing_since_s: float | None = None

    def end(self) -> None:
        """Have its threads end."""
        for kept in self.kept.values():
            kept.end()


class LeaseKeeper:
    """Looks after the leases of the queries that this process started, in a thread of its own; a `Worker` owns it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sessions: list[_Session] = []
        self._thread: threading.Thread | None = None
        self._stopped = threading.Event()
        self._stops_at_exit = False

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
        """Look after the leases of queries that are started from a plan."""
        with self._lock:
            if not self._stops_at_exit:
                self._stops_at_exit = True
                atexit.register(self._end_at_exit)
            it = next((it for it in self._sessions if it.session() is session), None)
            if it is None:
                it = _Session(weakref.ref(session))
                self._sessions.append(it)
            it.active_at_s = time.monotonic()
            for folder in folders:
                kept = it.kept.setdefault(folder.identity, Kept(folder, application, lease_ms))
                kept.lease_ms = lease_ms
                kept.plans.add(plan)
                kept.adopted.update([adopted] if adopted else [])
                kept.rescaling.update([plan] if rescales else [])
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._loop, name="spark_state_ext leases", daemon=True)
                self._thread.start()

    def stop(self) -> None:
        """Ask no session any more, as they end."""
        self._stopped.set()

    def _end_at_exit(self) -> None:
        """Stop, and wait for the thread: one that Python ends as it wakes may abort the process."""
        self.stop()
        if self._thread is not None:
            self._thread.join(DaemonPool.exit_left_s())

    def _loop(self) -> None:
        while True:
            with self._lock:
                for it in [it for it in self._sessions if it.session() is None]:
                    self._sessions.remove(it)
                    it.end()
                sessions = list(self._sessions)
                lease_ms = min((kept.lease_ms for it in sessions for kept in it.kept.values()), default=None)
                if lease_ms is None:
                    self._thread = None
                    return
            for it in sessions:
                self._poll(it)
            if self._stopped.wait(max(lease_ms / 3000, _POLL_S_MIN)):
                return

    def _poll(self, it: _Session) -> None:
        now_s = time.monotonic()
        if now_s < it.asked_at_s + _SELDOM_S and now_s > it.active_at_s + _QUIET_S:
            return
        it.asked_at_s = now_s
        session = it.session()
        try:
            active = [] if session is None else [query.id for query in session.streams.active]
        except Exception as error:
            self._failed(it, session, error, now_s)
            return
        it.failing_since_s = None
        if active:
            it.active_at_s = now_s
        for kept in list(it.kept.values()):
            kept.begin(active, now_s)

    def _failed(self, it: _Session, session: Any, error: Exception, now_s: float) -> None:
        """Nobody knows what became of the queries, so nothing is released; one failed request says little."""
        if it.failing_since_s is None:
            it.failing_since_s = now_s
        # Only sessions of Connect tell whether they were stopped.
        stopped = getattr(session, "is_stopped", False) is True
        if not stopped and now_s < it.failing_since_s + _LOST_S:
            return
        if stopped:
            _LOGGER.info("the session was stopped; its queries are no longer known: %s", error)
        else:
            _LOGGER.warning(
                "this process no longer renews the leases of the session's queries: the session has given errors for "
                "%d s, the last of them: %s. While a query has no batches for lease_ms, another run may take its state "
                "over. To have its lease renewed, start the query again from a session that answers",
                _LOST_S,
                error,
            )
        with self._lock:
            self._sessions.remove(it)
        it.end()
