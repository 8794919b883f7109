"""A job of five batches in which one input or output operation fails or kills the process; run by test_every_step.

Usage: ``python step_job.py FOLDER KIND FATE WHEN SHARE SHARES``. For every n of this share, the n-th operation of the whole
job on files or write of the local store fails; a second process then continues from the committed pointer. The jobs run in
forked children of this process, which itself uses only its pointer files. It prints the failed operations as JSON.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import fsspec
import fsspec.implementations.chained
import lmdb
import pandas
from core_support import buffer_of, clean_up_at, first_pointer
from fsspec.implementations.local import LocalFileSystem

from arrow_schemas import Pointer, Writer
from spark_state_ext.backends.files import sole_replica
from spark_state_ext.commit.cadence import SnapshotCadence
from spark_state_ext.commit.context import CommitContext
from spark_state_ext.engine.bucket import Bucket
from spark_state_ext.errors import StorageError
from spark_state_ext.files import retention
from spark_state_ext.files.folder import Folder
from spark_state_ext.store import LocalStore
from spark_state_ext.store.environment import Environment
from spark_state_ext.testing.model import KEYS, SCHEMA, Changes, Model, Row, apply_changes, scan

# Import these before the forks; otherwise each of a thousand children would spend most of its time on them.
IMPORTED = (pandas, lmdb, fsspec.implementations.chained)
# This driver retains only the last pointer, so that clean-up has work within five batches after two earlier ones.
BEFORE, BATCHES, RETAINED = 2, 7, 0
# Each of the five batches makes a snapshot, so that clean-up has work.
CADENCE = SnapshotCadence(1, 1)
FAILED, WRONG, UNHIT = 1, 3, 0
OPERATIONS = ("open", "pipe_file", "put_file", "cat_file", "get_file", "info", "exists", "ls", "rm_file", "makedirs")
CHANGES: list[Changes] = [
    {KEYS[batch]: Row(batch), KEYS[batch + 1]: Row(-batch, "x" * batch), KEYS[9]: None if batch % 2 else Row(batch)}
    for batch in range(BATCHES)
]


class Steps:
    """Counts operations; the n-th one fails or kills the process."""

    left: ClassVar[int] = -1
    kills: ClassVar[bool] = False
    after: ClassVar[bool] = False
    hit: ClassVar[str] = ""
    record: ClassVar[Path]

    @classmethod
    def around(cls, name: str, work: Callable[[], Any]) -> Any:
        """Do `work` as one step."""
        cls.left -= 1
        failing = cls.left == -1
        if failing:
            cls.record.write_text(name)
            if not cls.after:
                cls._fail(name)
        try:
            return work()
        finally:
            # Fail even if the work raised an error, for example for a missing file.
            if failing:
                cls._fail(name)

    @classmethod
    def _fail(cls, name: str) -> NoReturn:
        if cls.kills:
            os._exit(FAILED)
        if name.startswith("Environment"):  # which translates the errors of LMDB
            raise StorageError(f"{name} fails on purpose")
        raise OSError(errno.EIO, f"{name} fails on purpose")


class CountingFileSystem(LocalFileSystem):  # type: ignore[misc] # fsspec has no types
    """A disk whose operations are counted."""

    protocol: str | tuple[str, ...] = "counting"


class CountingObjects(CountingFileSystem):
    """Such a disk that behaves like an object store: a PUT is atomic and creates its folders."""

    protocol = ("counted", "memory")

    def pipe_file(self, path: str, value: bytes, **kwargs: Any) -> None:
        """Write bytes by one PUT."""
        Steps.around("pipe_file", lambda: put(Path(path), value))

    def put_file(self, lpath: str, rpath: str, **kwargs: Any) -> None:
        """Write a file by one PUT."""
        Steps.around("put_file", lambda: put(Path(rpath), Path(lpath).read_bytes()))


def put(path: Path, value: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    hidden = path.parent.parent / "unfinished put"
    hidden.write_bytes(value)
    hidden.rename(path)


def count_method(name: str) -> Callable[..., Any]:
    real = getattr(LocalFileSystem, name)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return Steps.around(name, lambda: real(self, *args, **kwargs))

    return call


for _name in OPERATIONS:
    setattr(CountingFileSystem, _name, count_method(_name))
fsspec.register_implementation("counting", CountingFileSystem)
fsspec.register_implementation("counted", CountingObjects)


def count_calls(owner: Any, name: str) -> None:
    real = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        return Steps.around(f"{owner.__name__}.{name}", lambda: real(*args, **kwargs))

    setattr(owner, name, call)


def models() -> list[Model]:
    """Return the state after each number of batches."""
    states: list[Model] = [{}]
    for changes in CHANGES:
        states.append(apply_changes(states[-1], changes))
    return states


def committed(folder: Path) -> Pointer:
    """Return the pointer that Spark would provide; these operations do not fail."""
    path = folder / "pointer"
    return Pointer.decode(path.read_bytes()) if path.exists() else first_pointer()


def continue_job(folder: Path, files: Folder, store: LocalStore, until: int) -> None:
    """Run the batches from the committed pointer on; exit with WRONG if any state is wrong."""
    expected = models()
    while (pointer := committed(folder)).batch + 1 < until:
        batch = pointer.batch + 1
        bucket = Bucket(
            store,
            sole_replica(files, folder),
            pointer,
            Writer("q", "r", batch, "h"),
            CommitContext(folder, batches_retained=RETAINED, cadence=CADENCE),
        )
        if bucket.read(scan) != expected[batch]:
            os._exit(WRONG)
        new_pointer = replace(bucket.commit(buffer_of(CHANGES[batch], folder)).pointer, batch=batch)
        (folder / "pointer.new").write_bytes(new_pointer.encode())
        (folder / "pointer.new").rename(folder / "pointer")
        clean_up(files, pointer, folder)


def begin(folder: Path, protocol: str) -> None:
    """Run the batches before the five batches of the test."""
    folder.mkdir()
    continue_job(
        folder, Folder(f"{protocol}://{folder}/root").child("3"), LocalStore.at(folder / "local", SCHEMA), BEFORE
    )


def run(folder: Path, protocol: str) -> None:
    """Run the rest of the job."""
    files = Folder(f"{protocol}://{folder}/root").child("3")
    store = LocalStore.at(folder / "local", SCHEMA)
    continue_job(folder, files, store, BATCHES)
    # Clean up as the next batch would.
    clean_up(files, committed(folder), folder)
    for replica in ("local", "empty"):
        final = LocalStore.at(folder / replica, SCHEMA) if replica == "empty" else store
        bucket = Bucket(
            final,
            sole_replica(files, folder),
            committed(folder),
            Writer("q", "r", BATCHES, "h"),
            CommitContext(folder, batches_retained=RETAINED, cadence=CADENCE),
        )
        if bucket.read(scan) != models()[BATCHES]:
            os._exit(WRONG)


def clean_up(files: Folder, pointer: Pointer, folder: Path) -> None:
    """Clean up as in the background: if it fails, a later call tries again."""
    if pointer.ref is None:
        return
    try:
        retention.clean_up(files, clean_up_at(pointer, RETAINED), folder)
    except StorageError as error:
        logging.getLogger("spark_state_ext").info("clean-up waits: %s", error)


def run_in_child(work: Callable[[], None]) -> int:
    """Do work in a forked process, and return its exit code."""
    pid = os.fork()
    if pid == 0:
        code = UNHIT
        try:
            work()
        except StorageError:
            code = FAILED
        except BaseException:
            traceback.print_exc()
            code = WRONG
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def main(base: Path, protocol: str, fate: str, when: str, share: int, shares: int) -> None:
    """Run the job for every n of this share, until n exceeds the job's number of steps."""
    logging.getLogger("spark_state_ext").setLevel(logging.CRITICAL)
    count_calls(os, "fsync")
    count_calls(os, "replace")
    count_calls(Environment, "write")
    Steps.kills, Steps.after = fate == "kill", when == "after"
    failed: list[str] = []
    assert run_in_child(partial(begin, base / f"begun-{share}", protocol)) == UNHIT
    for n in range(share, 10_000, shares):
        folder = base / str(n)
        shutil.copytree(base / f"begun-{share}", folder)
        Steps.record = folder / "failed"
        Steps.left = n
        job = partial(run, folder, protocol)
        code = run_in_child(job)
        Steps.left = -1
        assert code != WRONG, f"step {n}"
        if not Steps.record.exists():
            assert code == UNHIT
            print(json.dumps(failed))
            return
        name = Steps.record.read_text()
        # A failure in the background is logged and the job continues; any other failure ends it.
        assert code == FAILED or fate == "raise", f"step {n}, {name}: exit code {code}"
        assert run_in_child(job) == UNHIT, f"after step {n}, {name}"
        failed.append(name)
        shutil.rmtree(folder)
    raise AssertionError("the job has no end")


if __name__ == "__main__":
    folder, kind, fate, when, share, shares = sys.argv[1:]
    main(Path(folder), kind, fate, when, int(share), int(shares))
