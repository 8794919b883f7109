"""Queries that claim one query folder: as `sim_lease`, with the old query, those that claim it from one another, and releases.

What must hold of the records, beside what holds of leases: a claim that was made stands in every later record, until a
query that goes by the owner's pointers claims the folder from it, or a user releases it; a release gives the folder back
to the query that it was claimed from; nobody has the lease who does not know the claim; nobody else cleans up for longer
than a third of a lease; and what was built upon is not released.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from sim_lease import LEASE_STEPS, THIRD_S, Driver, LateFiles, LeaseWorld, Process, WrongLeaseError, run_lease_world
from sim_parts import Numbers, Step

from spark_state_ext.errors import MissingCheckpointError, OwnershipError, StorageError
from spark_state_ext.files.folder import Folder
from spark_state_ext.files.layout import LEASE_FOLDER
from spark_state_ext.ownership import release
from spark_state_ext.ownership.claim_notes import note_handed_over
from spark_state_ext.ownership.lease import Clock
from spark_state_ext.ownership.lease_record import Claim, NumberedRecord, RunIdentity

__all__ = ["CLAIM_STEPS", "ClaimWorld", "simulate_claims"]

CLAIM_STEPS = (
    *LEASE_STEPS,
    "claim",
    "claim",
    "claim",  # a query that claims the folder starts, by the pointers of whoever has it now
    "again",  # a query that has claimed it, or wanted to, starts again
    "commit",
    "commit",  # a batch of it is committed
    "clean",  # whoever has been there before cleans up, late
    "release",
    "release",  # a user frees the claim
    "chain",  # a query claims the folder from one that has claimed it and built, and its claim is released
)


@dataclass
class NewQuery:
    """A query that claims the folder.

    Parameters
    ----------
    claim
        Its claim.
    begun, committed
        It has handed pointers to Spark, and a batch with them is committed.
    """

    claim: Claim
    begun: bool = False
    committed: bool = False


class LateFolder:
    """The query folder of a release, of which a record may arrive late."""

    def __init__(self, world: ClaimWorld, late: bool) -> None:
        self._real = world.query_folder
        self._lease = LateFiles(self._real.child(LEASE_FOLDER), world.late)
        self._lease.next_is_late = late

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def child(self, name: str) -> LateFiles | Folder:
        return self._lease if name == LEASE_FOLDER else self._real.child(name)


class ClaimWorld(LeaseWorld):
    """Drivers of several queries around one folder, which the first of them began."""

    kinds: ClassVar[tuple[str, ...]] = CLAIM_STEPS
    drivers_max: ClassVar[int] = 8

    def __init__(self) -> None:
        # By plan of a driver; None: it is the first query's.
        self.queries: dict[str, NewQuery | None] = {}
        self._starts: NewQuery | None = None
        self.made: list[NewQuery] = []
        # Claims that were built upon, and since when the one that counts does.
        self.built: set[str] = set()
        self.changed_s = 0.0
        # Whose the folder is, by all claims and releases so far.
        self.rightful: str | None = None
        self.counted: Counter[str] = Counter()
        super().__init__()

    @property
    def claimed(self) -> str | None:
        """Whose the folder is, by the newest record."""
        return None if self._found is None else _id(self._found)

    # -- steps -------------------------------------------------------------------------------------

    def _claim(self, numbers: Numbers) -> None:
        if self.owner is not None and numbers.yes():
            # As one should: the query that has the folder is stopped first, maybe in the application of the next one.
            self.owner.alive = False
        at, begins = len(self.made), numbers.below(4)
        claim = Claim(f"query-{at}", f"the query {at}", at, instead_of=self._committed_by(numbers))
        self.made.append(NewQuery(claim))
        self._start(self.made[-1], numbers)
        # It begins at once, most times.
        if self.queries[self.drivers[-1].identity.plan] is self.made[-1] and begins:
            self.tick(self.drivers[-1], self.drivers[-1].processes[0])

    def _committed_by(self, numbers: Numbers) -> str | None:
        """Whose committed pointers a new query begins with: those of the query that has the folder, if it has some."""
        query = next((it for it in self.made if it.claim.id == self.claimed), None)
        if query is not None and query.begun and (query.committed or numbers.below(4)):
            query.committed = True
        if query is None or query.committed:
            return self.claimed
        return query.claim.instead_of

    def _chain(self, numbers: Numbers) -> None:
        for _ in range(2):
            self._claim(numbers)
        if self.owner is not None:
            self.owner.alive = False
        self._release(numbers)

    def _again(self, numbers: Numbers) -> None:
        if self.made:
            self._start(self.made[-1 - numbers.below(min(3, len(self.made)))], numbers)

    def _start(self, query: NewQuery | None, numbers: Numbers) -> None:
        self._starts = query
        try:
            self._driver(numbers)
        finally:
            self._starts = None

    def _commit(self, numbers: Numbers) -> None:
        for query in [query for query in self.made if query.begun and not query.committed]:
            query.committed = numbers.yes()

    def _clean(self, numbers: Numbers) -> None:
        self.pass_time(THIRD_S)
        for driver in self.drivers:
            for process in driver.processes:
                self.clean_up(driver, process)

    def _release(self, numbers: Numbers) -> None:
        clock = Clock(lambda: self.now_s, lambda: 1e9 + self.now_s, self.pass_time)
        force, late = numbers.yes(), numbers.below(4) == 3
        folder: Any = LateFolder(self, late)
        try:
            release.release_query_folder(folder, force=force, clock=clock)
        except (OwnershipError, MissingCheckpointError):
            self.counted["releases refused"] += 1
        except StorageError:
            self.counted["releases that arrive late"] += 1
        else:
            self.counted["releases"] += 1

    def _begin(self, driver: Driver) -> None:
        super()._begin(driver)
        query = self.queries.setdefault(driver.identity.plan, self._starts)
        if query is not None:
            lease = driver.processes[-1].lease
            # Committed pointers name the claim, and not the one that it replaced.
            claim = replace(query.claim, instead_of=None) if query.committed else query.claim
            lease._claim, lease._claims = claim, not query.committed

    def _hold(self, driver: Driver, process: Process) -> None:
        query = self.queries[driver.identity.plan]
        if query is None:
            super()._hold(driver, process)
            return
        committed = query.committed
        process.lease.note_task(driver.identity, claims=not committed)
        super()._hold(driver, process)
        if committed:
            self.built.add(query.claim.id)
        else:
            note_handed_over(self.query_folder, query.claim.id)
            query.begun = True

    # -- checks ------------------------------------------------------------------------------------

    def _may_delete(self, driver: Driver) -> None:
        super()._may_delete(driver)
        if self._known_by(driver) != self.claimed and self.now_s > self.changed_s + THIRD_S:
            raise WrongLeaseError(
                f"{driver.identity.plan} cleans up {self.now_s - self.changed_s:.1f} s after {self.claimed} had claimed it"
            )

    def _known_by(self, driver: Driver) -> str | None:
        query = self.queries[driver.identity.plan]
        return None if query is None else query.claim.id

    def _look(self) -> None:
        before, found = self._found, self._log.newest()
        if found is not None and found != before:
            self._judge(before, found)
        super()._look()

    def _judge(self, before: NumberedRecord | None, found: NumberedRecord) -> None:
        was, now, owner = None if before is None else _id(before), _id(found), self._driver_of(found.record.owner)
        if now != was:
            self.changed_s = self.now_s
        if owner is None:
            self._judge_release(was, found)
            return
        if now != was:
            self.counted["claims"] += 1
            self.rightful = now
        query = self.queries[owner.identity.plan]
        if now != self._known_by(owner):
            raise WrongLeaseError(f"{owner.identity.plan} has the lease of a folder that {now} has claimed")
        if now != was and was is not None and (query is None or query.claim.instead_of != was):
            raise WrongLeaseError(f"{owner.identity.plan} has the lease of a folder that {was} had claimed")
        if now != was and was is not None:
            self.counted["claims in a chain"] += 1
            # It was claimed from by its committed pointers.
            self.built.add(was)

    def _judge_release(self, was: str | None, found: NumberedRecord) -> None:
        now = found.record.claim
        if was in self.built:
            raise WrongLeaseError(f"the claim {was} is released, after it was built upon")
        query = next(it for it in self.made if it.claim.id == was)
        self.rightful = query.claim.instead_of
        self.counted["releases in a chain"] += self.rightful is not None
        if (None if now is None else now.id) != self.rightful:
            raise WrongLeaseError(f"{now} has the folder after a release, and it was claimed from {self.rightful}")

    def calm(self) -> None:
        """As for leases; the new run is of the query whose the folder is. What that has built upon is not released."""
        while self.late:
            self.late.pop()()
            self._look()
        if self.rightful in self.built:
            self._release(Numbers(b"\0\0"))
            self._look()
        self._starts = next((query for query in self.made if query.claim.id == self.rightful), None)
        super().calm()


def _id(found: NumberedRecord) -> str | None:
    return None if found.record.claim is None else found.record.claim.id


def _nobody(*_: Any, **__: Any) -> RunIdentity:
    """Who releases a claim is no driver."""
    return RunIdentity("a release", "a release", pid=0)


def simulate_claims(steps: Iterable[Step], patches: Iterable[tuple[Any, str, Any]] = ()) -> ClaimWorld:
    """Run a history to its end; raises `WrongLeaseError` when anything is.

    Parameters
    ----------
    steps, patches
        As for `simulate_lease`.
    """
    world = ClaimWorld()
    run_lease_world(world, steps, [(RunIdentity, "here", lambda _: staticmethod(_nobody)), *patches])
    return world
