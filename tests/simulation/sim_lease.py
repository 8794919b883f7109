"""Runs that claim one query folder: drivers on copied checkpoints, their processes, and a store that answers late.

The real lease over a real folder in memory, on virtual clocks. Every process has its own monotonic clock, which begins
anywhere, and its own idea of the time of day. A history is a list of small numbers, as those of `sim_world` are.

What must hold of the records, by the world's own clock: nobody takes the lease over from a run that is alive and has
renewed it within its length; a run that was replaced never gets it back; whoever may clean up is not replaced for
longer than a third of it; and where nothing goes wrong any more, a new run gets it soon.
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
# Another run must have it after so long, when nothing goes wrong any more.
SOON_S = 3 * LEASE_S

LEASE_STEPS = (
    "tick",  # tasks of some driver begin, or go on
    "tick",
    "check",  # a clean-up asks whether it may delete
    "wait",  # time passes, while those that are busy go on
    "wait",
    "driver",  # another one starts, on a copy of the checkpoint
    "idle",  # a driver has nothing to do for a while, or has again
    "worker",  # an executor's process ends, and another begins
    "end",  # a driver's process ends
    "late",  # the next PUT of a process does not come back, and arrives later or never
    "arrive",  # a late PUT arrives
    "hang",  # what a process does beside its tasks stops, or goes on
)


class WrongLeaseError(AssertionError):
    """Two runs held one lease, or nobody gets it."""


class LateFiles:
    """A folder whose next creation may arrive late."""

    def __init__(self, real: Folder, late: list[Callable[[], object]]) -> None:
        self._real = real
        self._late = late
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


class Beside:
    """What a process does beside its tasks, in the place of threads."""

    def __init__(self) -> None:
        self.hangs = False
        # As for threads, of which there is one more for each request that hangs.
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
    beside: Beside
    ticked_s: float = -1e9
    inside: bool = False


@dataclass
class Driver:
    """A run."""

    identity: RunIdentity
    alive: bool = True
    busy: bool = True
    workers_ended: int = 0
    processes: list[Process] = field(default_factory=list)


class LeaseWorld:
    """Drivers and their processes around one folder."""

    # What the first number of a step is.
    kinds: ClassVar[tuple[str, ...]] = LEASE_STEPS
    drivers_max: ClassVar[int] = 6

    def __init__(self) -> None:
        self._name = uuid.uuid4().hex
        self.query_folder = Folder(f"memory://{self._name}/home")
        self.now_s = 0.0
        self.late: list[Callable[[], object]] = []
        self.drivers: list[Driver] = []
        self._log = LeaseLog(self.query_folder)
        self._found: NumberedRecord | None = None
        # Who holds it by the records, since when another did not, and when it was renewed last.
        self.owner: Driver | None = None
        self.renewed_s = 0.0
        self.replaced_at_s: dict[str, float] = {}
        self.take_overs = 0
        # The most drivers that were alive at one time and had asked for it, and those with an application of others.
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
        self._look()

    def _tick(self, numbers: Numbers) -> None:
        self.tick(*self._one(numbers))

    def tick(self, driver: Driver, process: Process) -> bool:
        """A task asks for the lease; whether it may go on. A driver that is refused ends."""
        if process.inside or not driver.alive:
            return False
        process.inside, process.ticked_s = True, self.now_s
        asking = [it for it in self.drivers if it.alive and any(p.ticked_s >= 0 for p in it.processes)]
        self.live_max = max(self.live_max, len(asking))
        try:
            self._hold(driver, process)
        except OwnershipError:
            driver.alive = False
            return False
        except StorageError:
            return False  # Spark tries the task again
        finally:
            process.inside = False
            self._look()
        return True

    def _hold(self, driver: Driver, process: Process) -> None:
        process.lease.hold()

    def _check(self, numbers: Numbers) -> None:
        self.clean_up(*self._one(numbers))

    def clean_up(self, driver: Driver, process: Process) -> None:
        """What a task of a process has left to do asks whether it may."""
        if process.inside or process.lease.state is lease_module.LeaseState.NEW:
            return
        try:
            process.lease.check()
        except (OwnershipError, StorageError):
            return
        self._may_delete(driver)

    def _may_delete(self, driver: Driver) -> None:
        """A driver's clean-up was told that it may go on."""
        if self.owner is not None and self.owner.identity.is_same_run(driver.identity):
            return  # a later start of the same query: what the one before left to do knows less, and deletes less
        since_s = self.replaced_at_s.get(driver.identity.plan)
        if since_s is not None and self.now_s > since_s + THIRD_S:
            raise WrongLeaseError(f"{driver.identity.plan} cleans up {self.now_s - since_s} s after it was replaced")

    def _wait(self, numbers: Numbers) -> None:
        self.pass_time((0.1, THIRD_S, LEASE_S / 2, 1.5 * LEASE_S)[numbers.below(4)])

    def pass_time(self, seconds: float) -> None:
        """Time passes; whoever is busy asks for the lease again and again."""
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s = min(end_s, self.now_s + THIRD_S / 4)
            for driver in [driver for driver in self.drivers if driver.alive and driver.busy]:
                for process in driver.processes:
                    if self.now_s - process.ticked_s >= THIRD_S / 2:
                        self.tick(driver, process)

    def _driver(self, numbers: Numbers) -> None:
        """Of an application of its own, or a later start in that of one that is over.

        Its user labels the jobs as those of all others do, and its tasks may not be told their query.
        """
        if len(self.drivers) < self.drivers_max:
            at = len(self.drivers)
            live = {driver.identity.application for driver in self.drivers if driver.alive}
            over = [it.identity.application for it in self.drivers if it.identity.application not in live]
            collides = bool(over) and numbers.yes()
            application = over[-1] if collides else f"application {at}"
            self.collisions += collides
            query = "" if numbers.below(4) == 3 else "query"
            self.drivers.append(Driver(RunIdentity(application, f"plan {at}", query, pid=at + 1)))
            for _ in range(1 + numbers.below(2)):
                self._begin(self.drivers[-1])

    def _begin(self, driver: Driver) -> None:
        offset_s, wall_s = self._random.uniform(0, 1e6), self._random.uniform(-3_600, 3_600)
        clock = Clock(lambda: self.now_s + offset_s, lambda: 1e9 + self.now_s + wall_s, self.pass_time)
        lease = Lease(self.query_folder, driver.identity, LEASE_MS, clock)
        files, beside = LateFiles(self.query_folder.child("lease"), self.late), Beside()
        lease._log._files = files  # type: ignore[assignment]  # as it is used there
        lease._pool = beside  # type: ignore[assignment]
        driver.processes.append(Process(lease, files, beside))

    def _idle(self, numbers: Numbers) -> None:
        driver, _ = self._one(numbers)
        driver.busy = not driver.busy

    def _worker(self, numbers: Numbers) -> None:
        driver, process = self._one(numbers)
        if not process.inside:
            driver.processes.remove(process)
            driver.workers_ended += 1
            self._begin(driver)

    def _end(self, numbers: Numbers) -> None:
        self._one(numbers)[0].alive = False

    def _late(self, numbers: Numbers) -> None:
        driver, process = self._one(numbers)
        if self.owner is not None and numbers.yes():
            # Of whoever holds it, whose last word it may be for long.
            driver = self.owner
            process = driver.processes[numbers.below(len(driver.processes))]
        process.files.next_is_late = True
        self.pass_time(THIRD_S)
        driver.busy = numbers.yes()

    def _arrive(self, numbers: Numbers) -> None:
        if self.late:
            self.late.pop(numbers.below(len(self.late)))()

    def _hang(self, numbers: Numbers) -> None:
        _, process = self._one(numbers)
        process.beside.hangs = not process.beside.hangs
        process.beside.run()

    def _one(self, numbers: Numbers) -> tuple[Driver, Process]:
        # The last ones are those that may still be at something.
        driver = self.drivers[-1 - numbers.below(min(3, len(self.drivers)))]
        return driver, driver.processes[numbers.below(len(driver.processes))]

    # -- checks ------------------------------------------------------------------------------------

    def is_over(self, identity: RunIdentity) -> bool:
        """What can be seen from any machine here: that a driver's process is gone."""
        driver = self._driver_of(identity)
        return driver is None or not driver.alive

    def _driver_of(self, identity: RunIdentity) -> Driver | None:
        """None: it was no driver's process."""
        return self.drivers[identity.pid - 1] if identity.pid else None

    def _look(self) -> None:
        """What the records say now."""
        found = self._log.newest()
        if found is None or found == self._found:
            return
        if self._found is not None and found.number < self._found.number:
            raise WrongLeaseError(f"record {found.number} counts, after {self._found.number}")
        owner = self._driver_of(found.record.owner)
        before, renewed_s = self.owner, self.renewed_s
        self._found, self.renewed_s = found, self.now_s
        if owner is before:
            return
        self.owner = owner
        if before is not None:
            self.take_overs += 1
            if before.alive and self.now_s < renewed_s + LEASE_S:
                raise WrongLeaseError(
                    f"{found.record.owner.plan} has the lease of {before.identity.plan}, which renewed it "
                    f"{self.now_s - renewed_s:.1f} s ago and lives"
                )
            # A later start in the same application comes after the end of the one before.
            if owner is None or before.identity.application != owner.identity.application:
                self.replaced_at_s.setdefault(before.identity.plan, self.now_s)
        if owner is not None and owner.identity.plan in self.replaced_at_s and owner.alive:
            raise WrongLeaseError(f"{owner.identity.plan} has the lease again, after it was replaced")

    def calm(self) -> None:
        """Nothing goes wrong any more, and whoever there was is idle; then a new run gets the lease."""
        for driver in self.drivers:
            driver.busy = False
        while self.late:
            self.late.pop()()
        at = len(self.drivers)
        self.drivers.append(Driver(RunIdentity(f"application {at}", f"plan {at}", "query", pid=at + 1)))
        self._begin(self.drivers[-1])
        began_s = self.now_s
        if not self.tick(self.drivers[-1], self.drivers[-1].processes[0]) or self.now_s > began_s + SOON_S:
            raise WrongLeaseError(f"a new run does not get the lease within {self.now_s - began_s:.1f} s")


def _in_place(world: LeaseWorld, patches: Iterable[tuple[Any, str, Any]]) -> AbstractContextManager[None]:
    values = [
        (RunIdentity, "is_over", lambda self: world.is_over(self)),
        # What is done beside is done, or hangs.
        (lease_module, "wait", lambda *_: None),
        *((owner, name, made(world)) for owner, name, made in patches),
    ]
    return replace_attributes(values)


def simulate_lease(steps: Iterable[Step], patches: Iterable[tuple[Any, str, Any]] = ()) -> LeaseWorld:
    """Run a history to its end; raises `WrongLeaseError` when anything is.

    Parameters
    ----------
    steps
        The history.
    patches
        What is put in the place of something, for a broken variant: object, name, and what makes it of the world.
    """
    world = LeaseWorld()
    run_lease_world(world, steps, patches)
    return world


def run_lease_world(world: LeaseWorld, steps: Iterable[Step], patches: Iterable[tuple[Any, str, Any]]) -> None:
    """Run a history in a world to its end; it is closed then.

    Parameters
    ----------
    world
        The world.
    steps, patches
        As for `simulate_lease`.
    """
    try:
        with _in_place(world, patches):
            for step in steps:
                world.step(step)
            world.calm()
    finally:
        world.close()
