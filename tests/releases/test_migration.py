"""The five steps from the format before the first release to the current one, forward and back, with both releases.

`part-1/` holds a wheel of the project from before the second format of the pointer. A driver of that wheel and one of this
release take turns on one job: each reads what the other wrote.
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
# The formats that are written and read in the steps after the old release.
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
        Folder with the release.
    folder
        Folder of the job.
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
        self.package = self._read_line()["package"]

    def run(self, options: dict[str, Any], *, arrow: bool = True) -> dict[str, Any]:
        """Return the rows of the available batches, or the error."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"options": options, "arrow": arrow}) + "\n")
        self._process.stdin.flush()
        return self._read_line()

    def end(self) -> None:
        """End the driver."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _read_line(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the driver has ended: {self._process.wait()}"
        answer: dict[str, Any] = json.loads(line)
        return answer


class Job:
    """The job and its two drivers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with zipfile.ZipFile(WHEEL) as wheel:
            wheel.extractall(folder / "part-1")
        (folder / "in").mkdir()
        self.old, self.new = Driver(folder / "part-1", folder), Driver(ROOT, folder)
        self._batches = self._steps = 0
        self._rows: list[list[Any]] = []

    def step(self, options: dict[str, Any], *, in_soak_only: bool = False) -> None:
        """Add batches and run them with a release and its options; batches that were refused before are included."""
        if in_soak_only and not SOAK:
            return
        for _ in range(BATCHES_A_STEP):
            self._add_batch()
        driver = self.new if options else self.old
        answer = driver.run({**options, "local_dir": self._next_local_dir()})
        assert answer.keys() == {"rows"}, f"step {self._steps}, {options or 'the old release'}: {answer}"
        assert {row[-1] for row in answer["rows"]} == {True, False} or self._steps < 2, "some keys must have timed out"
        self._rows += answer["rows"]
        if options:
            # A user who goes back must wait until the driver has released the lease of the ended query: the old release
            # refuses a folder whose lease is renewed. A lease of the old release is not renewed after its query ended.
            eventually(self._is_released)

    def _is_released(self) -> bool:
        (query_folder,) = Folder(str(self.folder / "state" / "state")).names()
        record = LeaseLog(Folder(str(self.folder / "state" / "state" / query_folder))).newest()
        return record is not None and record.record.released

    def run_refused(self, options: dict[str, Any]) -> str:
        """Return the error of a release that cannot continue from this state."""
        self._add_batch()
        driver = self.new if options else self.old
        answer = driver.run({**options, "local_dir": self._next_local_dir()})
        assert "error" in answer, f"{options or 'the old release'} was not refused: {answer}"
        return str(answer["error"])

    def check_rows(self) -> None:
        """Check that the output of all steps equals that of Spark's own operator in one run over all batches."""
        expected = self.new.run({}, arrow=False)["rows"]
        assert len({row[0] for row in expected}) == self._batches
        assert self._rows == expected

    def count_snapshot_formats(self) -> dict[str, int]:
        """Return the number of snapshots by format."""
        (query_folder,) = Folder(str(self.folder / "state" / "state")).names()
        counts: dict[str, int] = {}
        for bucket in range(4):
            files = Folder(str(self.folder / "state" / "state" / query_folder / str(bucket)))
            for name in files.names():
                parsed = parse_file_name(name)
                if parsed is not None and parsed[1] == SNAPSHOT:
                    file_format = str(read_header(files, *parsed).format)
                    counts[file_format] = counts.get(file_format, 0) + 1
        return counts

    def end(self) -> None:
        """End both drivers."""
        self.old.end()
        self.new.end()

    def _next_local_dir(self) -> str:
        # Every second step has the local stores of the previous step; the others have none.
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
        path = self.folder / "in" / f".{at:04}.json"
        path.write_text("\n".join(lines))
        path.rename(self.folder / "in" / f"{at:04}.json")
        self._batches += 1


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    job_made = Job(tmp_path)
    try:
        yield job_made
    finally:
        job_made.end()


def test_each_migration_step_can_be_made_and_taken_back(job: Job) -> None:
    assert Path(job.old.package).is_relative_to(job.folder)
    assert Path(job.new.package) == ROOT / "spark_state_ext"
    job.step(OLD)
    # The new release writes and reads the old format; then go back.
    job.step(FIRST)
    job.step(OLD)
    # It writes both formats and reads the old one; then go back.
    job.step(SECOND)
    job.step(FIRST, in_soak_only=True)
    job.step(OLD)
    job.step(SECOND)
    assert set(job.count_snapshot_formats()) == {"1"}, "the old release must be able to read every snapshot"
    # It reads the new format; then go back all the way.
    job.step(THIRD)
    job.step(SECOND)
    job.step(THIRD, in_soak_only=True)
    job.step(OLD, in_soak_only=True)
    job.step(THIRD)
    # It writes only the new format; then go back.
    job.step(LAST)
    assert "reads up to 1. Use a newer release" in job.run_refused(OLD)
    assert "Read 'v2', and write 'v1' or 'both' for a batch" in job.run_refused(SECOND)
    job.step(LAST, in_soak_only=True)
    job.step(THIRD)
    job.step(FIRST, in_soak_only=True)
    job.step(OLD)
    job.step(LAST)
    assert job.count_snapshot_formats().keys() >= {"1"}
    job.check_rows()
