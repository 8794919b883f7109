"""Queries of one simulated world: what they share, and how their clean-ups look for holds and stop in the middle."""

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
from sim_taking import HOLD_S, Taking
from sim_world import DEFAULT, FIRST_BUCKET, World

from arrow_schemas.pointer import Pointer
from arrow_schemas.savepoint import MANIFEST_NAME, SavedBucket, SavepointManifest
from spark_state_ext.backends import CleanUp
from spark_state_ext.backends.registry import Backend
from spark_state_ext.errors import StateError
from spark_state_ext.files.folder import Folder
from spark_state_ext.ownership.holds import HoldWatch
from spark_state_ext.savepoints.saved_rows import read_saved_rows

__all__ = ["KEY_SCHEMA", "OPERATOR", "STATE_SCHEMA", "Query", "SimSavepoint", "Yard", "rows_in"]

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
        Where it is.
    manifest
        What is in it.
    models
        The state of each bucket, by the model.
    stranger
        A file beside those that the manifest names.
    tainted
        A file that it was made of is damaged: then nothing can start from it, which is told.
    """

    folder: Folder
    manifest: SavepointManifest
    models: dict[int, Model]
    stranger: tuple[Folder, str]
    tainted: bool
    # Name of the query that has claimed it; and whether somebody deleted it who may.
    owner: str | None = None
    deleted: bool = False

    def is_claimed_by(self, name: str) -> bool:
        """A query has claimed it, for all that can be seen; whether that is new."""
        if self.owner not in (None, name) and not self.deleted and not self.gone():
            raise WrongStateError(f"{self.folder.root} is claimed by {name}, and {self.owner} owns it")
        new, self.owner = self.owner != name, name
        return new

    @property
    def files(self) -> list[tuple[Folder, str]]:
        """What belongs to it."""
        files = [(self.folder, MANIFEST_NAME)]
        for bucket in self.manifest.buckets:
            folder = self.folder.child(bucket.operator, str(bucket.bucket))
            files += [(folder, file.name) for file in bucket.files]
        return files

    def gone(self) -> list[str]:
        """Files that are not there any more."""
        return [folder.where(name) for folder, name in self.files if not folder.exists(name)]


@dataclass
class Yard:
    """What the queries of a world share.

    Parameters
    ----------
    config
        What stays the same.
    name
        Of the folder in memory.
    """

    config: Config
    name: str
    now_s: float = 0.0
    # Of the step that is taken.
    numbers: Numbers = field(default_factory=lambda: Numbers(b"yard"))
    activities: list[PausableWork] = field(default_factory=list)
    takings: list[Taking] = field(default_factory=list)
    counted: Counter[str] = field(default_factory=Counter)
    calm: bool = False
    _watches: dict[str, HoldWatch] = field(default_factory=dict)

    def root(self, backend: str) -> Folder:
        """Of a backend."""
        return open_folder(f"{self.name}/{backend}", replaces=self.config.replaces)

    @property
    def options(self) -> dict[str, Any]:
        """`storage_options` of all folders."""
        return dict(self.root("a")._options)

    def backends(self, names: Sequence[str]) -> list[Backend]:
        """As a job names them."""
        return [Backend(self.root(name).root, name=name, storage_options=self.options) for name in names]

    def watch(self, executor: Executor) -> HoldWatch:
        """What the process of an executor has seen of holds; its clock begins anywhere."""
        owner = executor.uploads.owner
        if owner not in self._watches:
            offset_s = 1e4 * len(self._watches)
            self._watches[owner] = HoldWatch(lambda: self.now_s + offset_s)
        return self._watches[owner]

    def begin(self, work: Callable[[], object], lives: Callable[[], bool] = lambda: True) -> PausableWork:
        """Work that may stop; it is begun."""
        activity = PausableWork(work, lives)
        self.activities.append(activity)
        self.advance(activity)
        return activity

    def advance(self, activity: PausableWork) -> None:
        """One of them goes on."""
        if self.calm:
            activity.end()
        else:
            activity.advance()
        self.activities = [it for it in self.activities if not it.is_over]

    def pass_time(self, seconds: float) -> None:
        """Time passes, while those that copy renew their holds."""
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s = min(end_s, self.now_s + HOLD_S / 3)
            for taking in self.takings:
                taking.passed(self.now_s)

    def close(self) -> None:
        """End all that is under way."""
        for activity in self.activities:
            activity.kill()
        memory = fsspec.filesystem("memory")
        if memory.exists(f"/{self.name}"):
            memory.rm(f"/{self.name}", recursive=True)


class Query(World):
    """One of the queries.

    Parameters
    ----------
    yard
        What it shares with the others.
    folder_name
        Name of its query folder.
    variant
        As for `World`.
    """

    def __init__(self, yard: Yard, folder_name: str, variant: Variant = DEFAULT) -> None:
        self.yard = yard
        self._folder_name = folder_name
        super().__init__(yard.config, variant, yard.name)
        self.query_folder = self._home(yard.root("a"))

    def close(self) -> None:
        """Its processes end, and what is on their local disks goes."""
        for executor in self.executors:
            executor.die()
        self._close_machines()

    @property
    def number_of_buckets(self) -> int:
        """Of the operator; the partition has the last of them."""
        return FIRST_BUCKET + self.config.buckets

    @property
    def other_buckets(self) -> range:
        """Those that nothing ever comes to."""
        return range(FIRST_BUCKET)

    def without_state(self, bucket: int) -> Pointer:
        """The pointer of a bucket without state."""
        return Pointer(OPERATOR, bucket, self.number_of_buckets, 0, -1, None, query_folder=self._folder_name)

    def _home(self, root: Folder) -> Folder:
        return root.child(OPERATOR, self._folder_name)

    def _first(self, bucket: int) -> Pointer:
        return self.without_state(bucket)

    def _work_off(self, executor: Executor, at: int) -> None:
        if executor.waiting[at][0] == UPLOAD:
            super()._work_off(executor, at)
            return
        owner, work = executor.uploads.owner, executor.waiting.pop(at)[1]

        def logged() -> None:
            try:
                work()
            except StateError:
                return  # logged, in the real one

        self.yard.begin(logged, lambda: executor.uploads.owner == owner)

    def _request(self, executor: Executor, request: CleanUp, numbers: Numbers) -> CleanUp:
        """It may stop when it has looked for holds, and before it deletes one of its files."""
        watch, stops_at = self.yard.watch(executor), numbers.below(6)

        def held() -> bool:
            living = watch.living(self.query_folder)
            self.yard.counted["clean-ups held up"] += bool(living)
            pause()
            return bool(living)

        def still_ours() -> None:
            nonlocal stops_at
            if stops_at == 0:
                pause()
            stops_at -= 1
            request.still_ours()

        return replace(request, held=held, still_ours=still_ours)


def rows_in(folder: Folder, saved: SavedBucket, scratch: Path) -> Model:
    """What a bucket of a savepoint holds."""
    return {
        k: n
        for batch in read_saved_rows(folder, saved.pointer, saved.files, SCHEMA, scratch)
        for k, n in zip(batch.column(1).to_pylist(), batch.column(2).to_pylist(), strict=True)
    }
