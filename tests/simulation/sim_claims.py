"""Queries that claim one query folder: as `sim_lease`, with the old query, those that claim it from one another, and releases.

What must hold of the records, beside what holds of leases: a claim that was made stands in every later record, until a
query that goes by the owner's pointers claims the folder from it, or a user releases it; nobody has the lease who does
not know the claim; nobody else cleans up for longer than a third of a lease; and what was built upon is not released.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from sim_lease import LEASE_STEPS, THIRD_S, Driver, LeaseWorld, Process, WrongLeaseError, simulated
from sim_parts import Numbers, Step

from spark_state_ext.errors import MissingCheckpointError, OwnershipError
from spark_state_ext.ownership import release
from spark_state_ext.ownership.lease import Clock
from spark_state_ext.ownership.lease_record import Claim, Found, RunIdentity

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


class ClaimWorld(LeaseWorld):
    """Drivers of several queries around one folder, which the first of them began."""

    kinds: ClassVar[tuple[str, ...]] = CLAIM_STEPS

    def __init__(self) -> None:
        # By plan of a driver; None: it is the first query's.
        self.queries: dict[str, NewQuery | None] = {}
        self._starts: NewQuery | None = None
        self.made: list[NewQuery] = []
        # Claims that were built upon, and since when the one that counts does.
        self.built: set[str] = set()
        self.changed_s = 0.0
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
        at = len(self.made)
        self.made.append(NewQuery(Claim(f"query-{at}", f"the query {at}", at, instead_of=self.claimed)))
        self._start(self.made[-1], numbers)
        # It begins at once, most times.
        if self.queries[self.drivers[-1].identity.plan] is self.made[-1] and numbers.below(4):
            self.tick(self.drivers[-1], self.drivers[-1].processes[0])

    def _again(self, numbers: Numbers) -> None:
        if self.made:
            self._start(self.made[-1 - numbers.below(min(2, len(self.made)))], numbers)

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
        force = numbers.yes()
        try:
            release.release_query_folder(self.query_folder, force=force, clock=clock)
        except (OwnershipError, MissingCheckpointError):
            self.counted["releases refused"] += 1
        else:
            self.counted["releases"] += 1

    def _begin(self, driver: Driver) -> None:
        super()._begin(driver)
        query = self.queries.setdefault(driver.identity.plan, self._starts)
        if query is not None:
            lease = driver.processes[-1].lease
            lease._claim, lease._claims = query.claim, not query.committed

    def _hold(self, driver: Driver, process: Process) -> None:
        query = self.queries[driver.identity.plan]
        if query is None:
            super()._hold(driver, process)
            return
        committed = query.committed
        process.lease.told(driver.identity, claims=not committed)
        super()._hold(driver, process)
        if committed:
            self.built.add(query.claim.id)
        else:
            release.note_handed_over(self.query_folder, query.claim.id)
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

    def _judge(self, before: Found | None, found: Found) -> None:
        was, now, owner = None if before is None else _id(before), _id(found), self._driver_of(found.record.owner)
        if now != was:
            self.changed_s = self.now_s
            self.counted["claims"] += now is not None
        if owner is None:
            if was in self.built:
                raise WrongLeaseError(f"the claim {was} is released, after it was built upon")
            return
        query = self.queries[owner.identity.plan]
        if now != self._known_by(owner):
            raise WrongLeaseError(f"{owner.identity.plan} has the lease of a folder that {now} has claimed")
        if now != was and was is not None and (query is None or query.claim.instead_of != was):
            raise WrongLeaseError(f"{owner.identity.plan} has the lease of a folder that {was} had claimed")

    def calm(self) -> None:
        """As for leases; the new run is of the query that has claimed the folder."""
        while self.late:
            self.late.pop()()
            self._look()
        self._starts = next((query for query in self.made if query.claim.id == self.claimed), None)
        super().calm()


def _id(found: Found) -> str | None:
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
    simulated(world, steps, [(RunIdentity, "here", lambda _: staticmethod(_nobody)), *patches])
    return world
