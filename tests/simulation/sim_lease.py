"""Runs that compete for one query folder: drivers on copied checkpoints, their processes, and a store that answers late.

The lease is the product's, on a folder in memory and on virtual clocks. Every process has its own monotonic clock with a
random start, and its own time of day. A history is a list of small numbers, as in `sim_world`.

Invariants of the records, by the world's own clock: A run does not take over the lease of a run that is alive and has
renewed it in time. A replaced run never gets the lease back. A run that may clean up was replaced at most a third of a
lease ago. After failures end, a new run soon gets the lease.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import fsspec
from sim_parts import Numbers, Step
from sim_search import replace_attributes

from spark_state_ext.errors import OwnershipError, StorageError
from spark_state_ext.files.folder import Folder
from spark_state_ext.ownership import lease as lease_module
from spark_state_ext.ownership.lease import Clock, Lease
from spark_state_ext.ownership.lease_log import LeaseLog
from spark_state_ext.ownership.lease_record import NumberedRecord, RunIdentity

__all__ = ["LEASE_STEPS", "Driver", "LeaseWorld", "Process", "WrongLeaseError", "simulate_lease", "run_lease_world"]

LEASE_MS = 9_000
LEASE_S = LEASE_MS / 1000
THIRD_S = LEASE_S / 3
# After failures end, a new run must have the lease within this time.
SOON_S = 3 * LEASE_S

LEASE_STEPS = (
    "tick",  # tasks of a driver begin or continue
    "tick",
    "check",  # a clean-up asks whether it may delete
    "wait",  # time passes, and busy drivers continue
    "wait",
    "driver",  # another driver starts on a copy of the checkpoint
    "idle",  # a driver becomes idle, or busy again
    "worker",  # an executor's process ends, and another one begins
    "end",  # a driver's process ends
    "late",  # the next PUT of a process fails, and arrives later or never
    "arrive",  # a late PUT arrives
    "hang",  # a process's background stops, or continues
)


class WrongLeaseError(AssertionError):
    """Two runs had one lease, or a new run does not get it."""


class LateFiles:
    """A folder whose next write may arrive late."""

    def __init__(self, real: Folder, late_writes: list[Callable[[], object]]) -> None:
        self._real = real
        self._late = late_writes
        self.next_is_late = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def create(self, name: str, data: bytes) -> bool:
        if self.next_is_late:
            self.next_is_late = False
            self._late.append(lambda: self._real.create(name, data))
            raise StorageError("no answer, on purpose")
        return self._real.create(name, data)

    def put(self, name: str, data: bytes) -> None:
        if self.next_is_late:
            self.next_is_late = False
            self._late.append(lambda: self._real.put(name, data))
            raise StorageError("no answer, on purpose")
        self._real.put(name, data)


class Background:
    """The background of a process, in place of threads."""

    def __init__(self) -> None:
        self.hangs = False
        # Like threads: there is one more for each request that hangs.
        self.threads_max = 2
        self.waiting: list[Callable[[], None]] = []

    def submit(self, work: Callable[[], None]) -> Future[None]:
        self.waiting.append(work)
        self.run()
        return Future()

    def run(self) -> None:
        while self.waiting and not self.hangs:
            self.waiting.pop(0)()


@dataclass
class Process:
    """A worker process of a driver's executors."""

    lease: Lease
    files: LateFiles
    background: Background
    ticked_s: float = -1e9
    inside: bool = False


@dataclass
class Driver:
    """A driver, which is one run."""

    identity: RunIdentity
    alive: bool = True
    busy: bool = True
    workers_ended: int = 0
    processes: list[Process] = field(default_factory=list)


class LeaseWorld:
    """Drivers and their processes around one folder."""

    # The kind of a step by its first number.
    kinds: ClassVar[tuple[str, ...]] = LEASE_STEPS
    drivers_max: ClassVar[int] = 6

    def __init__(self) -> None:
        self._name = uuid.uuid4().hex
        self.query_folder = Folder(f"memory://{self._name}/home")
        self.now_s = 0.0
        self.late_writes: list[Callable[[], object]] = []
        self.drivers: list[Driver] = []
        self._log = LeaseLog(self.query_folder)
        self._newest: NumberedRecord | None = None
        # The owner by the records, the time of its last renewal, and when runs were replaced.
        self.owner: Driver | None = None
        self.renewed_s = 0.0
        self.replaced_at_s: dict[str, float] = {}
        self.take_overs = 0
        # The largest number of live drivers that had asked for the lease; and how many drivers share an application.
        self.live_max = self.collisions = 0
        self._random = random.Random(49374)
        self._driver(Numbers(b"\0"))

    def close(self) -> None:
        """Remove everything."""
        memory = fsspec.filesystem("memory")
        if memory.exists(f"/{self._name}"):
            memory.rm(f"/{self._name}", recursive=True)

    # -- steps -------------------------------------------------------------------------------------

    def step(self, step: Step) -> None:
        """Take one step."""
        numbers = Numbers(step)
        getattr(self, f"_{self.kinds[numbers.below(len(self.kinds))]}")(numbers)
        self._check_newest_record()

    def _tick(self, numbers: Numbers) -> None:
        self.tick(*self._draw_process(numbers))

    def tick(self, driver: Driver, process: Process) -> bool:
        """Let a task ask for the lease; returns whether it may continue. A driver that is refused ends."""
        if process.inside or not driver.alive:
            return False
        process.inside, process.ticked_s = True, self.now_s
        asking_drivers = [
            driver
            for driver in self.drivers
            if driver.alive and any(process.ticked_s >= 0 for process in driver.processes)
        ]
        self.live_max = max(self.live_max, len(asking_drivers))
        try:
            self._hold(driver, process)
        except OwnershipError:
            driver.alive = False
            return False
        except StorageError:
            return False  # Spark retries the task
        finally:
            process.inside = False
            self._check_newest_record()
        return True

    def _hold(self, driver: Driver, process: Process) -> None:
        process.lease.hold()

    def _check(self, numbers: Numbers) -> None:
        self.clean_up(*self._draw_process(numbers))

    def clean_up(self, driver: Driver, process: Process) -> None:
        """Let background work of a process ask whether it may delete files."""
        if process.inside or process.lease.state is lease_module.LeaseState.NEW:
            return
        try:
            process.lease.check()
        except (OwnershipError, StorageError):
            return
        self._check_may_delete(driver)

    def _check_may_delete(self, driver: Driver) -> None:
        """Check a driver's clean-up that was allowed to delete files."""
        if self.owner is not None and self.owner.identity.is_same_run(driver.identity):
            return  # a later start of the same query: leftover work of the earlier one deletes less
        since_s = self.replaced_at_s.get(driver.identity.plan)
        if since_s is not None and self.now_s > since_s + THIRD_S:
            raise WrongLeaseError(f"{driver.identity.plan} cleans up {self.now_s - since_s} s after it was replaced")

    def _wait(self, numbers: Numbers) -> None:
        self.pass_time((0.1, THIRD_S, LEASE_S / 2, 1.5 * LEASE_S)[numbers.below(4)])

    def pass_time(self, seconds: float) -> None:
        """Let time pass; busy drivers ask for the lease again and again."""
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s = min(end_s, self.now_s + THIRD_S / 4)
            for driver in [driver for driver in self.drivers if driver.alive and driver.busy]:
                for process in driver.processes:
                    if self.now_s - process.ticked_s >= THIRD_S / 2:
                        self.tick(driver, process)

    def _driver(self, numbers: Numbers) -> None:
        """Start a driver in its own application, or in the application of a driver that has ended.

        All drivers have the same job label, and a driver's tasks may not know their query.
        """
        if len(self.drivers) < self.drivers_max:
            at = len(self.drivers)
            live_applications = {driver.identity.application for driver in self.drivers if driver.alive}
            ended_applications = [
                other.identity.application
                for other in self.drivers
                if other.identity.application not in live_applications
            ]
            shares_application = bool(ended_applications) and numbers.yes()
            application = ended_applications[-1] if shares_application else f"application {at}"
            self.collisions += shares_application
            query = "" if numbers.below(4) == 3 else "query"
            self.drivers.append(Driver(RunIdentity(application, f"plan {at}", query, pid=at + 1)))
            for _ in range(1 + numbers.below(2)):
                self._begin(self.drivers[-1])

    def _begin(self, driver: Driver) -> None:
        offset_s, wall_s = self._random.uniform(0, 1e6), self._random.uniform(-3_600, 3_600)
        clock = Clock(lambda: self.now_s + offset_s, lambda: 1e9 + self.now_s + wall_s, self.pass_time)
        lease = Lease(self.query_folder, driver.identity, LEASE_MS, clock)
        files, background = LateFiles(self.query_folder.child("lease"), self.late_writes), Background()
        lease._log._files = files  # type: ignore[assignment]  # it has the methods that are used
        lease._pool = background  # type: ignore[assignment]
        driver.processes.append(Process(lease, files, background))

    def _idle(self, numbers: Numbers) -> None:
        driver, _ = self._draw_process(numbers)
        driver.busy = not driver.busy

    def _worker(self, numbers: Numbers) -> None:
        driver, process = self._draw_process(numbers)
        if not process.inside:
            driver.processes.remove(process)
            driver.workers_ended += 1
            self._begin(driver)

    def _end(self, numbers: Numbers) -> None:
        self._draw_process(numbers)[0].alive = False

    def _late(self, numbers: Numbers) -> None:
        driver, process = self._draw_process(numbers)
        if self.owner is not None and numbers.yes():
            # Take the owner, whose last record this may be for a long time.
            driver = self.owner
            process = driver.processes[numbers.below(len(driver.processes))]
        process.files.next_is_late = True
        self.pass_time(THIRD_S)
        driver.busy = numbers.yes()

    def _arrive(self, numbers: Numbers) -> None:
        if self.late_writes:
            self.late_writes.pop(numbers.below(len(self.late_writes)))()

    def _hang(self, numbers: Numbers) -> None:
        _, process = self._draw_process(numbers)
        process.background.hangs = not process.background.hangs
        process.background.run()

    def _draw_process(self, numbers: Numbers) -> tuple[Driver, Process]:
        # The newest drivers may still be at work.
        driver = self.drivers[-1 - numbers.below(min(3, len(self.drivers)))]
        return driver, driver.processes[numbers.below(len(driver.processes))]

    # -- checks ------------------------------------------------------------------------------------

    def is_over(self, identity: RunIdentity) -> bool:
        """Whether a driver's process has ended, which is visible from any machine here."""
        driver = self._driver_of(identity)
        return driver is None or not driver.alive

    def _driver_of(self, identity: RunIdentity) -> Driver | None:
        """Return an identity's driver; None if it was not a driver's process."""
        return self.drivers[identity.pid - 1] if identity.pid else None

    def _check_newest_record(self) -> None:
        """Check the newest record."""
        newest = self._log.newest()
        if newest is None or newest == self._newest:
            return
        if self._newest is not None and newest.number < self._newest.number:
            raise WrongLeaseError(f"record {newest.number} counts, after {self._newest.number}")
        owner = self._driver_of(newest.record.owner)
        before, renewed_s = self.owner, self.renewed_s
        self._newest, self.renewed_s = newest, self.now_s
        if owner is before:
            return
        self.owner = owner
        if before is not None:
            self.take_overs += 1
            if before.alive and self.now_s < renewed_s + LEASE_S:
                raise WrongLeaseError(
                    f"{newest.record.owner.plan} has the lease of {before.identity.plan}, which renewed it "
                    f"{self.now_s - renewed_s:.1f} s ago and lives"
                )
            # A later start in the same application comes after the previous one has ended.
            if owner is None or before.identity.application != owner.identity.application:
                self.replaced_at_s.setdefault(before.identity.plan, self.now_s)
        if owner is not None and owner.identity.plan in self.replaced_at_s and owner.alive:
            raise WrongLeaseError(f"{owner.identity.plan} has the lease again, after it was replaced")

    def calm(self) -> None:
        """Run without failures while all drivers are idle; then a new run must get the lease."""
        for driver in self.drivers:
            driver.busy = False
        while self.late_writes:
            self.late_writes.pop()()
        at = len(self.drivers)
        self.drivers.append(Driver(RunIdentity(f"application {at}", f"plan {at}", "query", pid=at + 1)))
        self._begin(self.drivers[-1])
        began_s = self.now_s
        if not self.tick(self.drivers[-1], self.drivers[-1].processes[0]) or self.now_s > began_s + SOON_S:
            raise WrongLeaseError(f"a new run does not get the lease within {self.now_s - began_s:.1f} s")


def _patch_world(world: LeaseWorld, patches: Iterable[tuple[Any, str, Any]]) -> AbstractContextManager[None]:
    values = [
        (RunIdentity, "is_over", lambda self: world.is_over(self)),
        # Background work is done at once, or hangs.
        (lease_module, "wait", lambda *_: None),
        *((owner, name, make(world)) for owner, name, make in patches),
    ]
    return replace_attributes(values)


def simulate_lease(steps: Iterable[Step], patches: Iterable[tuple[Any, str, Any]] = ()) -> LeaseWorld:
    """Run a history to its end; raises `WrongLeaseError` if an invariant is violated.

    Parameters
    ----------
    steps
        The history.
    patches
        Replacements for a broken variant: object, name, and a function that makes the value from the world.
    """
    world = LeaseWorld()
    run_lease_world(world, steps, patches)
    return world


def run_lease_world(world: LeaseWorld, steps: Iterable[Step], patches: Iterable[tuple[Any, str, Any]]) -> None:
    """Run a history in a world to its end, and close the world.

    Parameters
    ----------
    world
        The world.
    steps, patches
        As for `simulate_lease`.
    """
    try:
        with _patch_world(world, patches):
            for step in steps:
                world.step(step)
            world.calm()
    finally:
        world.close()
