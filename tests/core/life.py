"""A bucket over many batches, with backends that record their calls, and that hang or fail if a test sets them to."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path

from core_support import WRITER, buffer_of, first_pointer

from arrow_schemas import CheckpointRef, Pointer
from arrow_schemas.lineage import DELTA, SNAPSHOT, parse_file_name
from spark_state_ext.backends import BackendContext, Checkpoint, CleanUp, Markers
from spark_state_ext.backends.files import FilesBackup, FilesRestore
from spark_state_ext.backends.replication import Replica
from spark_state_ext.commit.cadence import SnapshotCadence
from spark_state_ext.commit.context import CommitContext
from spark_state_ext.commit.decisions import CommitOptions
from spark_state_ext.commit.failures import Run
from spark_state_ext.commit.uploads import WorkerUploads
from spark_state_ext.engine.bucket import Bucket
from spark_state_ext.files.folder import Folder
from spark_state_ext.files.sealed_file import SealedFile
from spark_state_ext.store import LocalStore
from spark_state_ext.testing.model import KEYS, SCHEMA, Changes, Model, Row, apply_changes, scan
from spark_state_ext.worker.background import Background
from tests.helpers.waiting import WAIT_S

RETAINED = 2


class Watched(FilesBackup):
    """A backup manager that records its calls, and hangs or fails if a test sets it to."""

    def __init__(self, name: str, folder: Folder, context: BackendContext, told: list[str]) -> None:
        super().__init__(folder, context)
        self.name = name
        self.told = told
        self.gate = threading.Event()
        self.gate.set()
        self.fails_with: Exception | None = None
        # The kinds of files that hang or fail.
        self.kinds: tuple[str, ...] = (DELTA, SNAPSHOT)

    def init(self, checkpoint: Checkpoint | None) -> None:
        self.told.append(f"{self.name} init")
        super().init(checkpoint)

    def snapshot(self, ref: CheckpointRef, files: Mapping[str, SealedFile]) -> Markers:
        self.told.append(f"{self.name} snapshot {ref.version}")
        return super().snapshot(ref, files)

    def _put(self, file: SealedFile) -> None:
        if any(f".{kind}." in file.name for kind in self.kinds):
            assert self.gate.wait(WAIT_S)
            if self.fails_with is not None:
                raise self.fails_with
        super()._put(file)
        self.told.append(f"{self.name} has {file.name.split('_')[0]}.{file.name.split('.')[1]}")

    def clean_up(self, request: CleanUp) -> Future[int]:
        self.told.append(f"{self.name} clean-up at {request.head.version}")
        return super().clean_up(request)


@dataclass
class Life:
    """A bucket over many batches."""

    local: Path
    options: CommitOptions = field(default_factory=CommitOptions)
    names: tuple[str, ...] = ("a",)
    restore_from: str | None = None
    batches_retained: int = RETAINED
    cadence: SnapshotCadence = field(default_factory=SnapshotCadence)
    uploads: WorkerUploads = field(default_factory=WorkerUploads)
    background: Background = field(default_factory=Background)
    run: Run = field(default_factory=lambda: Run("a run", 1))
    clock_s: Callable[[], float] = time.monotonic
    batch_ms: int = 0
    told: list[str] = field(default_factory=list)
    pointers: list[Pointer] = field(default_factory=lambda: [first_pointer()])
    models: list[Model] = field(default_factory=lambda: [{}])

    def __post_init__(self) -> None:
        self.store = LocalStore.at(self.local / "store", SCHEMA)
        self.managers: dict[str, Watched] = {}
        self.stores: list[LocalStore] = [self.store]

    def folder(self, name: str) -> Folder:
        return Folder(str(self.local / name)).child("3")

    def manager(self, name: str) -> Watched:
        if name not in self.managers:
            uploads = self.uploads
            context = BackendContext(
                name, {}, "counts", "", 3, uploads.pool(name), self.local, 0.0, cleaner=uploads.cleaner
            )
            self.managers[name] = Watched(name, self.folder(name), context, self.told)
        return self.managers[name]

    def replicas(self, *names: str) -> list[Replica]:
        return [
            Replica(name, self.manager(name), FilesRestore(self.folder(name), 0.0), root=name == "a")
            for name in names or self.names
        ]

    def bucket(self, pointer: Pointer | None = None, store: LocalStore | None = None, *names: str) -> Bucket:
        return Bucket(
            store or self.store,
            self.replicas(*names),
            pointer or self.pointers[-1],
            WRITER,
            CommitContext(
                self.local,
                options=self.options,
                batches_retained=self.batches_retained,
                cadence=self.cadence,
                uploads=self.uploads,
                runner=self.background,
                run=self.run,
                batch_ms=self.batch_ms,
                clock_s=self.clock_s,
            ),
            restore_from=self.restore_from,
        )

    def next_stage(self) -> None:
        """Begin the next stage: the next call is not another attempt at the same task."""
        self.run = replace(self.run, stage=self.run.stage + 1)

    def batch(self, changes: Changes | None = None, *, may_defer: bool = False) -> Pointer:
        """Run a batch. If it fails, the next one is another attempt at it, unless `next_stage` was called."""
        at = len(self.pointers)
        changes = {KEYS[at % 9]: Row(at), KEYS[(at + 4) % 9]: Row(-at, "n")} if changes is None else changes
        bucket = self.bucket()
        commit = bucket.commit(buffer_of(changes, self.local), may_defer=may_defer)
        pointer, self.left = commit.pointer, commit.deferred
        self.pointers.append(pointer)
        self.models.append(apply_changes(self.models[-1], changes))
        self.next_stage()
        return pointer

    def history(self, batches: int) -> None:
        """Run that many batches, wait for their uploads, and commit a pointer that has them confirmed."""
        self.options = replace(self.options, commit_delay_ms_max=0)
        for _ in range(batches):
            self.batch()
        self.settle()
        self.batch({})

    def settle(self) -> None:
        """Wait until all uploads have ended."""
        deadline_s = time.monotonic() + WAIT_S
        while self.uploads._waiting:
            assert time.monotonic() < deadline_s
            time.sleep(0.005)
        assert self.background.wait(WAIT_S)

    def restored(self, pointer: Pointer, *names: str) -> Model:
        """Return the state that an empty disk restores."""
        store = LocalStore.at(self.local / f"fresh-{len(self.stores)}", SCHEMA)
        self.stores.append(store)
        return self.bucket(pointer, store, *names).read(scan)

    def files(self, name: str, kind: str) -> list[int]:
        names = [parsed for file in self.folder(name).names() if (parsed := parse_file_name(file))]
        return sorted(parsed[0].version for parsed in names if parsed[1] == kind)
