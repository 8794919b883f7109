"""Queries of one simulated world: what they share, and how their clean-ups look for holds and pause."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import fsspec
from sim_aside import PausableWork, pause
from sim_parts import SCHEMA, UPLOAD, Config, Executor, Model, Numbers, Variant, WrongStateError
from sim_stores import open_folder
from sim_taking import HOLD_S, Taker
from sim_world import DEFAULT, FIRST_BUCKET, World

from arrow_schemas.pointer import Pointer
from arrow_schemas.savepoint import MANIFEST_NAME, SavedBucket, SavepointManifest
from spark_state_ext.backends import CleanUp
from spark_state_ext.backends.registry import Backend
from spark_state_ext.errors import StateError
from spark_state_ext.files.folder import Folder
from spark_state_ext.ownership.holds import HoldWatch
from spark_state_ext.savepoints.saved_rows import read_saved_rows

__all__ = ["KEY_SCHEMA", "OPERATOR", "STATE_SCHEMA", "Query", "SimSavepoint", "SharedWorld", "read_saved_model"]

OPERATOR = "simulated"


def _schema(name: str) -> str:
    return json.dumps(
        {"type": "struct", "fields": [{"name": name, "type": "long", "nullable": True, "metadata": {}}]},
    )


KEY_SCHEMA, STATE_SCHEMA = _schema("k"), _schema("n")


@dataclass
class SimSavepoint:
    """A savepoint.

    Parameters
    ----------
    folder
        Its folder.
    manifest
        Its manifest.
    models
        The model state of each bucket.
    foreign_file
        A file in its folder that the manifest does not name.
    is_damaged
        Whether one of its source files is damaged: then starting from it fails with an error.
    """

    folder: Folder
    manifest: SavepointManifest
    models: dict[int, Model]
    foreign_file: tuple[Folder, str]
    is_damaged: bool
    # Name of the query that has claimed it; and whether its owner or the user deleted it.
    owner: str | None = None
    deleted: bool = False

    def is_claimed_by(self, name: str) -> bool:
        """Note that a query has claimed it; returns whether that is new."""
        if self.owner not in (None, name) and not self.deleted and not self.list_missing_files():
            raise WrongStateError(f"{self.folder.root} is claimed by {name}, and {self.owner} owns it")
        new, self.owner = self.owner != name, name
        return new

    @property
    def files(self) -> list[tuple[Folder, str]]:
        """Its files, including the manifest."""
        files = [(self.folder, MANIFEST_NAME)]
        for bucket in self.manifest.buckets:
            folder = self.folder.child(bucket.operator, str(bucket.bucket))
            files += [(folder, file.name) for file in bucket.files]
        return files

    def list_missing_files(self) -> list[str]:
        """Return its files that no longer exist."""
        return [folder.where(name) for folder, name in self.files if not folder.exists(name)]


@dataclass
class SharedWorld:
    """What the queries of a simulated world share.

    Parameters
    ----------
    config
        Configuration of the history.
    name
        Name of the folder in memory.
    """

    config: Config
    name: str
    now_s: float = 0.0
    # Numbers of the present step.
    numbers: Numbers = field(default_factory=lambda: Numbers(b"yard"))
    activities: list[PausableWork] = field(default_factory=list)
    takers: list[Taker] = field(default_factory=list)
    counted: Counter[str] = field(default_factory=Counter)
    calm: bool = False
    _watches: dict[str, HoldWatch] = field(default_factory=dict)

    def root(self, backend: str) -> Folder:
        """Open the root of a backend."""
        return open_folder(f"{self.name}/{backend}", replaces=self.config.replaces)

    @property
    def options(self) -> dict[str, Any]:
        """`storage_options` of all folders."""
        return dict(self.root("a")._options)

    def backends(self, names: Sequence[str]) -> list[Backend]:
        """Return backends in the form that a job has."""
        return [Backend(self.root(name).root, name=name, storage_options=self.options) for name in names]

    def watch(self, executor: Executor) -> HoldWatch:
        """Return the hold watch of an executor's process; its clock has a random start."""
        owner = executor.uploads.owner
        if owner not in self._watches:
            offset_s = 1e4 * len(self._watches)
            self._watches[owner] = HoldWatch(lambda: self.now_s + offset_s)
        return self._watches[owner]

    def begin(self, work: Callable[[], object], is_alive: Callable[[], bool] = lambda: True) -> PausableWork:
        """Begin work that may pause."""
        activity = PausableWork(work, is_alive)
        self.activities.append(activity)
        self.advance(activity)
        return activity

    def advance(self, activity: PausableWork) -> None:
        """Continue an activity; in a calm time, to its end."""
        if self.calm:
            activity.end()
        else:
            activity.advance()
        self.activities = [activity for activity in self.activities if not activity.is_over]

    def pass_time(self, seconds: float) -> None:
        """Let time pass while processes that copy renew their holds."""
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s = min(end_s, self.now_s + HOLD_S / 3)
            for taker in self.takers:
                taker.pass_time(self.now_s)

    def close(self) -> None:
        """Kill all activities, and remove all files."""
        for activity in self.activities:
            activity.kill()
        memory = fsspec.filesystem("memory")
        if memory.exists(f"/{self.name}"):
            memory.rm(f"/{self.name}", recursive=True)


class Query(World):
    """One query of a simulated world.

    Parameters
    ----------
    shared
        What it shares with the other queries.
    folder_name
        Name of its query folder.
    variant
        As for `World`.
    """

    def __init__(self, shared: SharedWorld, folder_name: str, variant: Variant = DEFAULT) -> None:
        self.shared = shared
        self._folder_name = folder_name
        super().__init__(shared.config, variant, shared.name)
        self.query_folder = self._locate_query(shared.root("a"))

    def close(self) -> None:
        """End its processes, and remove their local disks."""
        for executor in self.executors:
            executor.die()
        self._close_machines()

    @property
    def number_of_buckets(self) -> int:
        """Number of the operator's buckets; the partition has the last ones."""
        return FIRST_BUCKET + self.config.buckets

    @property
    def other_buckets(self) -> range:
        """Buckets outside the partition, which never get rows."""
        return range(FIRST_BUCKET)

    def make_empty_pointer(self, bucket: int) -> Pointer:
        """Make the pointer of a bucket without state."""
        return Pointer(OPERATOR, bucket, self.number_of_buckets, 0, -1, None, query_folder=self._folder_name)

    def _locate_query(self, root: Folder) -> Folder:
        return root.child(OPERATOR, self._folder_name)

    def _make_first_pointer(self, bucket: int) -> Pointer:
        return self.make_empty_pointer(bucket)

    def _work_off(self, executor: Executor, at: int) -> None:
        if executor.waiting[at][0] == UPLOAD:
            super()._work_off(executor, at)
            return
        owner, work = executor.uploads.owner, executor.waiting.pop(at)[1]

        def work_and_ignore_errors() -> None:
            try:
                work()
            except StateError:
                return  # the product logs it

        self.shared.begin(work_and_ignore_errors, lambda: executor.uploads.owner == owner)

    def _adjust_clean_up(self, executor: Executor, request: CleanUp, numbers: Numbers) -> CleanUp:
        """Let a clean-up pause after it has looked for holds, and before it deletes one of its files."""
        watch, stops_at = self.shared.watch(executor), numbers.below(6)

        def held() -> bool:
            living = watch.living(self.query_folder)
            self.shared.counted["clean-ups held up"] += bool(living)
            pause()
            return bool(living)

        def check_lease() -> None:
            nonlocal stops_at
            if stops_at == 0:
                pause()
            stops_at -= 1
            request.still_ours()

        return replace(request, held=held, still_ours=check_lease)


def read_saved_model(folder: Folder, saved: SavedBucket, scratch: Path) -> Model:
    """Read the state of a bucket of a savepoint."""
    return {
        k: n
        for batch in read_saved_rows(folder, saved.pointer, saved.files, SCHEMA, scratch)
        for k, n in zip(batch.column(1).to_pylist(), batch.column(2).to_pylist(), strict=True)
    }
