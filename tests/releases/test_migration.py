"""The five steps from the format before the first release to the present one, forth and back, with both releases.

`part-1/` holds the wheel of the project as it stood before the pointer had its second format. Its driver and one of this
release take turns on one job: what one wrote, the other reads.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from arrow_schemas.lineage import SNAPSHOT, parse_file_name
from spark_state_ext.files.checkpoint import read_header
from spark_state_ext.files.folder import Folder
from spark_state_ext.ownership.lease_log import LeaseLog
from tests.helpers.jvm import LOCAL_FILES
from tests.helpers.soak import SOAK, examples
from tests.helpers.waiting import eventually

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
WHEEL = next((HERE / "part-1").glob("*.whl"))
OLD: dict[str, Any] = {}
# The steps after the old release: what is written, and what is read.
FIRST = {"pointer_write": "v1", "pointer_read": "v1"}
SECOND = {"pointer_write": "both", "pointer_read": "v1"}
THIRD = {"pointer_write": "both", "pointer_read": "v2"}
LAST = {"pointer_write": "v2", "pointer_read": "v2"}
BATCHES_A_STEP = examples(2, 3)


class Driver:
    """A driver of one release, in a process of its own.

    Parameters
    ----------
    package
        Folder that holds the release.
    folder
        The job's.
    """

    def __init__(self, package: Path, folder: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "migration_job.py"), str(folder), json.dumps(LOCAL_FILES)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # Workers look for modules in the working folder first.
            cwd=folder,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(package), str(HERE)])},
        )
        self.package = self._line()["package"]

    def run(self, options: dict[str, Any], *, arrow: bool = True) -> dict[str, Any]:
        """The rows of the batches that are there, or the error."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"options": options, "arrow": arrow}) + "\n")
        self._process.stdin.flush()
        return self._line()

    def end(self) -> None:
        """End the driver."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _line(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the driver has ended: {self._process.wait()}"
        answer: dict[str, Any] = json.loads(line)
        return answer


class Job:
    """The job, and both drivers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with zipfile.ZipFile(WHEEL) as wheel:
            wheel.extractall(folder / "part-1")
        (folder / "in").mkdir()
        self.old, self.new = Driver(folder / "part-1", folder), Driver(ROOT, folder)
        self._batches = self._steps = 0
        self._rows: list[list[Any]] = []

    def step(self, options: dict[str, Any], *, in_soak_only: bool = False) -> None:
        """Some more batches with a release and its options, whatever was refused before among them."""
        if in_soak_only and not SOAK:
            return
        for _ in range(BATCHES_A_STEP):
            self._add_batch()
        driver = self.new if options else self.old
        found = driver.run({**options, "local_dir": self._local_dir()})
        assert found.keys() == {"rows"}, f"step {self._steps}, {options or 'the old release'}: {found}"
        assert {row[-1] for row in found["rows"]} == {True, False} or self._steps < 2, "keys have timed out too"
        self._rows += found["rows"]
        if options:
            # Going back, a user waits until the driver has noted that the query ended: the old release refuses a folder
            # whose lease it sees renewed. Nothing renews a lease of the old release after its query has ended.
            eventually(self._is_released)

    def _is_released(self) -> bool:
        (query_folder,) = Folder(str(self.folder / "state" / "state")).names()
        found = LeaseLog(Folder(str(self.folder / "state" / "state" / query_folder))).newest()
        return found is not None and found.record.released

    def refused(self, options: dict[str, Any]) -> str:
        """The error of a release that cannot go on from here."""
        self._add_batch()
        driver = self.new if options else self.old
        found = driver.run({**options, "local_dir": self._local_dir()})
        assert "error" in found, f"{options or 'the old release'} went on, with {found}"
        return str(found["error"])

    def check_rows(self) -> None:
        """Every batch gave the rows that Spark's own operator gives, run over all of them in one go."""
        expected = self.new.run({}, arrow=False)["rows"]
        assert len({row[0] for row in expected}) == self._batches
        assert self._rows == expected

    def snapshot_formats(self) -> dict[str, int]:
        """How many snapshots there are, by their format."""
        (query_folder,) = Folder(str(self.folder / "state" / "state")).names()
        found: dict[str, int] = {}
        for bucket in range(4):
            files = Folder(str(self.folder / "state" / "state" / query_folder / str(bucket)))
            for name in files.names():
                parsed = parse_file_name(name)
                if parsed is not None and parsed[1] == SNAPSHOT:
                    made = str(read_header(files, *parsed).format)
                    found[made] = found.get(made, 0) + 1
        return found

    def end(self) -> None:
        """End both drivers."""
        self.old.end()
        self.new.end()

    def _local_dir(self) -> str:
        # Every other step finds the local stores of the one before, the others none.
        self._steps += 1
        return str(self.folder / "local" / str(self._steps // 2))

    def _add_batch(self) -> None:
        chosen, at = random.Random(self._batches), self._batches
        lines = [
            json.dumps(
                {"key": f"k{chosen.randrange(40)}", "value": chosen.random(), "time": f"2024-01-01T00:{at:02}:00"}
            )
            for _ in range(60)
        ]
        made = self.folder / "in" / f".{at:04}.json"
        made.write_text("\n".join(lines))
        made.rename(self.folder / "in" / f"{at:04}.json")
        self._batches += 1


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    made = Job(tmp_path)
    try:
        yield made
    finally:
        made.end()


def test_five_steps_forth_and_back(job: Job) -> None:
    assert Path(job.old.package).is_relative_to(job.folder)
    assert Path(job.new.package) == ROOT / "spark_state_ext"
    job.step(OLD)
    # The new release, as the old one was; and back.
    job.step(FIRST)
    job.step(OLD)
    # It writes both, and reads the old one; and back.
    job.step(SECOND)
    job.step(FIRST, in_soak_only=True)
    job.step(OLD)
    job.step(SECOND)
    assert set(job.snapshot_formats()) == {"1"}, "an old release reads every snapshot"
    # It reads the new one; and back, all the way.
    job.step(THIRD)
    job.step(SECOND)
    job.step(THIRD, in_soak_only=True)
    job.step(OLD, in_soak_only=True)
    job.step(THIRD)
    # It writes the new one only; and back.
    job.step(LAST)
    assert "reads up to 1. Use a newer release" in job.refused(OLD)
    assert "Read 'v2', and write 'v1' or 'both' for a batch" in job.refused(SECOND)
    job.step(LAST, in_soak_only=True)
    job.step(THIRD)
    job.step(FIRST, in_soak_only=True)
    job.step(OLD)
    job.step(LAST)
    assert job.snapshot_formats().keys() >= {"1"}
    job.check_rows()
