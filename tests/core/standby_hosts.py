"""Hosts with a standby service on a clock that a test moves, and the job that they follow."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from reading_support import Job

from arrow_schemas.standby import BucketKey
from spark_state_ext.files.folder import Folder
from spark_state_ext.standby.roots import RootFollower
from spark_state_ext.standby.service import RootService, StandbyService
from spark_state_ext.standby.status import StandbyStatus, read_status
from spark_state_ext.standby.values import FollowedRoot
from spark_state_ext.testing.model import KEYS, Row
from tests.helpers.clock import VirtualClock
from tests.helpers.waiting import WAIT_S

BUCKETS = 4


@contextmanager
def job_of(base: Path) -> Iterator[Job]:
    """Make a job whose tasks run on host a."""
    (base / "scratch").mkdir()
    job = Job(base / "root", base / "scratch", buckets=BUCKETS, host="a")
    try:
        yield job
    finally:
        job.close()


class Host:
    """A host with a service on a clock that a test moves."""

    def __init__(self, base: Path, name: str, clock: VirtualClock, options: dict[str, Any] | None = None) -> None:
        (base / name).mkdir(exist_ok=True)
        self.name = name
        self.root = FollowedRoot(str(base / "root"), options or {}, str(base / name))
        follower = RootFollower(self.root, clock=clock)
        self.part = RootService(self.root, name, None, follower, clock)
        self.service = StandbyService([self.part], 86_400.0, clock)
        self.stop = threading.Event()

    def turn(self) -> None:
        """Run the service's due work and wait until it is done."""
        self.service.turn(self.stop)
        assert self.part.follower.drain(WAIT_S)
        self.part.follower.tick()

    def held(self) -> set[int]:
        return {key.bucket for key in self.part.follower.list_held()}

    def close(self) -> None:
        self.part.close()


class Hosts:
    """Hosts of one root on one clock."""

    def __init__(self, base: Path, *names: str, options: dict[str, Any] | None = None) -> None:
        self.base, self.options, self.clock = base, options, VirtualClock()
        self.running: dict[str, Host] = {}
        for name in names:
            self.start(name)

    def start(self, name: str) -> Host:
        self.running[name] = Host(self.base, name, self.clock, self.options)
        return self.running[name]

    def end(self, name: str) -> None:
        self.running.pop(name).close()

    def pass_heartbeats(self, count: int) -> None:
        for _ in range(count):
            for _ in range(5):
                self.clock.sleep(2.0)
                for host in self.running.values():
                    host.turn()

    def survey(self, keys: list[BucketKey]) -> StandbyStatus:
        def sleep(seconds: float) -> None:
            self.clock.sleep(seconds)
            for host in self.running.values():
                host.turn()

        return read_status(Folder(str(self.base / "root")), keys, self.clock, sleep)


def keys_of(job: Job) -> list[BucketKey]:
    return [BucketKey(job.operator, job.folder.name, bucket) for bucket in range(BUCKETS)]


def changes(number: int) -> dict[Any, Row | None]:
    return {key: Row(number) for key in KEYS}
