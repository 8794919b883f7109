"""The backends of a job, as an executor has them: managers kept from call to call, their leases and operator files."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from arrow_schemas.operator import OperatorFile, operator_file_name, parse_operator_file_name
from arrow_schemas.partitions import PartitionAssignment, parse_partitions_name, partitions_name
from arrow_schemas.pointer import Pointer
from spark_state_ext.backends import BackendContext, BackupManager
from spark_state_ext.backends.registry import FSSPEC, Backend, load_factory
from spark_state_ext.backends.replication import Replica, is_complete
from spark_state_ext.commit.uploads import WorkerUploads
from spark_state_ext.engine.job import Job
from spark_state_ext.engine.task import TaskInfo
from spark_state_ext.errors import StateElsewhereError
from spark_state_ext.files.existence import has_checkpoint
from spark_state_ext.files.folder import Folder
from spark_state_ext.files.partition_files import newest_assignment
from spark_state_ext.ownership.lease import Lease, LeaseRegistry
from spark_state_ext.ownership.lease_record import Claim, RunIdentity
from spark_state_ext.worker.background import Background

__all__ = ["Leases", "Replicas", "names_backend_with_state"]

_BUCKETS_MAX = 1_024


class Replicas:
    """A process's cache of backup and restore managers, by plan and bucket."""

    def __init__(self, background: Background, uploads: WorkerUploads) -> None:
        self._background = background
        self._uploads = uploads
        self._replicas: OrderedDict[tuple[str, str, int], list[Replica]] = OrderedDict()
        # Backup managers to close, once their uploads have ended.
        self._closing: list[BackupManager] = []
        self._closing_lock = threading.Lock()
        self._prepared: set[tuple[str, str, str]] = set()
        self._prepared_lock = threading.Lock()

    def of(self, job: Job, query_folder: str, bucket: int, scratch: Path) -> list[Replica]:
        """Return the managers of a bucket's backends; create them if necessary."""
        key = (job.plan_id, query_folder, bucket)
        # Removed and inserted again, to keep the order of last use.
        replicas = self._replicas.pop(key, None)
        if replicas is None:
            replicas = []
            for backend in job.options.backends:
                factory, context = (
                    load_factory(backend.kind),
                    self._context(job, backend, query_folder, bucket, scratch),
                )
                backup, restore = factory.backup_manager(context), factory.restore_manager(context)
                replicas.append(Replica(backend.name, backup, restore, _is_root(job, backend)))
        self._replicas[key] = replicas
        if len(self._replicas) > _BUCKETS_MAX:
            # Most likely of a query that stopped.
            self._close(self._replicas.pop(next(iter(self._replicas))))
        return replicas

    def reading(self, backends: Sequence[Backend], pointer: Pointer, scratch: Path, timeout_s: float) -> list[Replica]:
        """Return new managers for reading another query's bucket; they are not cached."""
        replicas = []
        for position, backend in enumerate(backends):
            context = BackendContext(
                name=backend.name,
                options=backend.factory_options,
                operator=pointer.operator,
                query_folder=pointer.query_folder,
                bucket=pointer.bucket,
                executor=self._uploads.pool(backend.name),
                cleaner=self._uploads.cleaner,
                scratch=scratch,
                timeout_s=timeout_s,
            )
            factory = load_factory(backend.kind)
            backup, restore = factory.backup_manager(context), factory.restore_manager(context)
            # Pointers of format 1 mean the first backend, which is their root.
            replicas.append(Replica(backend.name, backup, restore, position == 0))
        return replicas

    def forget(self, job: Job, query_folder: str, bucket: int) -> None:
        """Close the managers of a bucket after a failed call; the next call creates new ones.

        Running restores are stopped. Running uploads continue: a backup manager is closed after its last upload.
        """
        self._close(self._replicas.pop((job.plan_id, query_folder, bucket), []))

    def _close(self, replicas: Iterable[Replica]) -> None:
        """Stop restores now; close backup managers in the background, after work that may still send snapshots."""
        for replica in replicas:
            replica.restore.close()
            work = partial(self._close_backups, replica.backup)
            self._background.submit(f"closing of the backup manager {id(replica.backup)} of {replica.name}", work)

    def _close_backups(self, closed_backup: BackupManager) -> None:
        """Close this and earlier backup managers, except those that still have uploads."""
        uploads = self._uploads
        with self._closing_lock:
            self._closing.append(closed_backup)
            idle = [backup for backup in self._closing if not uploads.has_uploads_of(backup)]
            self._closing[:] = [backup for backup in self._closing if backup not in idle]
        for backup in idle:
            backup.close()

    def _context(
        self, job: Job, backend: Backend, query_folder: str, bucket: int | None, scratch: Path
    ) -> BackendContext:
        return BackendContext(
            name=backend.name,
            options=backend.factory_options,
            operator=job.operator,
            query_folder=query_folder,
            bucket=bucket,
            executor=self._uploads.pool(backend.name),
            cleaner=self._uploads.cleaner,
            scratch=scratch,
            timeout_s=job.options.commit.commit_timeout_ms / 1000,
        )

    def prepare(self, job: Job, root: Folder, query_folder: str, scratch: Path, schema_id: int) -> None:
        """Copy the files that all buckets share to each backend, once per process, query folder and schema."""
        others = [backend for backend in job.options.backends if not _is_root(job, backend)]
        with self._prepared_lock:
            # A new plan may declare more source partitions.
            plan = "" if job.options.source_partition is None else f" {job.plan_id}"
            schema = f"{job.operator} {schema_id}{plan}"
            missing = [backend for backend in others if (backend.name, query_folder, schema) not in self._prepared]
            if not missing:
                return
            files = root.child(query_folder)
            names = [name for name in files.names() if _is_shared_file(name)]
            names.sort(key=lambda name: name == operator_file_name(schema_id))
            resources = {name: files.get(name) for name in names}
            for backend in missing:
                context = self._context(job, backend, query_folder, None, scratch)
                admin = load_factory(backend.kind).admin(BackendContext(**{**context.__dict__, "resources": resources}))
                admin.create_resources()
                admin.validate_resources()
                self._prepared.add((backend.name, query_folder, schema))

    def refuse_elsewhere(self, job: Job, root: Folder, pointer: Pointer, scratch: Path) -> None:
        """Refuse a job that does not name any backend with its state; write nothing, and do not access those backends.

        If all files were copied to the job's backends, the newest file that the pointer needs is there: allow that.
        """
        if names_backend_with_state(job, pointer):
            return
        confirmed = {status.through for status in pointer.replication.values() if is_complete(status)}
        files = root.child(pointer.query_folder)
        if confirmed <= {None}:
            # The state is inline in Spark's own state. The operator file was written before the first pointer.
            moved = files.exists(operator_file_name(pointer.schema_id))
        else:
            replica_files = [replica.files() for replica in self.of(job, pointer.query_folder, pointer.bucket, scratch)]
            moved = any(has_checkpoint(folder, ref) for folder in replica_files for ref in confirmed if ref is not None)
        if not moved:
            old_backends = ", ".join(pointer.replication)
            names = ", ".join(backend.name for backend in job.options.backends)
            if Backend(job.options.root).name in pointer.replication:
                # The state is in the root, which backends does not name.
                where, advice = names, f"add 'fsspec' to backends, which means the root {job.options.root}"
            else:
                where, advice = str(files.root), f"set the root back to {old_backends}"
            raise StateElsewhereError(
                f"operator {job.operator!r} has its state in {old_backends}, but the job names {names}, which does not "
                f"have it (looked for in {where}): {advice}. To move the state, keep both for a while with "
                "backends=[…], or copy all files of the old backend first. Nothing was written and no state is lost."
            )

    def bring_back(
        self, root: Folder, query_folder: str, operator: OperatorFile, assignment: PartitionAssignment | None = None
    ) -> None:
        """Write the current operator file and partition assignment again if they were deleted.

        The next call of `prepare` copies them to the other backends.
        """
        files, name = root.child(query_folder), operator_file_name(operator.schema_id)
        if not files.exists(name):
            files.create(name, operator.encode())
        if assignment is not None and newest_assignment(files) is None:
            files.create(partitions_name(0), assignment.encode())
        with self._prepared_lock:
            self._prepared.difference_update([key for key in self._prepared if key[1] == query_folder])


def _is_shared_file(name: str) -> bool:
    """True if all buckets share a file of a query folder."""
    return parse_operator_file_name(name) is not None or parse_partitions_name(name) is not None


def _is_root(job: Job, backend: Backend) -> bool:
    root = (job.options.root.rstrip("/") or job.options.root, dict(job.options.storage_options))
    return backend.kind == FSSPEC and (backend.root, dict(backend.storage_options)) == root


@dataclass(frozen=True)
class Leases:
    """The leases of a run of the query, one in each folder that it writes to.

    Parameters
    ----------
    leases
        The lease of each folder.
    folders
        The query folder in each backend that is a file system, the root's first.
    """

    leases: tuple[Lease, ...]
    folders: tuple[Folder, ...] = ()

    @staticmethod
    def of(
        job: Job,
        task: TaskInfo,
        root: Folder,
        query_folder: str,
        registry: LeaseRegistry,
        claim: Claim | None = None,
        claims: bool = False,
    ) -> Leases:
        """Return the leases of a task's run of the query."""
        folders = [root.child(query_folder)]
        for backend in job.options.backends:
            if backend.kind == FSSPEC and not _is_root(job, backend):
                folders.append(Folder(backend.root, backend.storage_options).child(job.operator, query_folder))
        identity = RunIdentity.here(job.application_id, job.plan_id, task.query_id, local=job.local_mode)
        lease_ms, format_1_too = job.options.lease_ms, job.options.commit.format_1_too
        # A claim that is made now may only follow one record of the root's lease. Other folders have other numbers.
        elsewhere = None if claim is None else replace(claim, after=None)
        return Leases(
            tuple(
                registry.of(
                    folder,
                    identity,
                    lease_ms,
                    format_1_too=format_1_too,
                    claim=claim if folder is folders[0] else elsewhere,
                    claims=claims,
                )
                for folder in folders
            ),
            tuple(folders),
        )

    @property
    def age_s(self) -> float:
        """The age of the oldest lease (`Lease.age_s`), in seconds."""
        return max((lease.age_s for lease in self.leases), default=0.0)

    @property
    def times_removed(self) -> int:
        """How often any of the leases was removed (`Lease.times_removed`)."""
        return sum(lease.times_removed for lease in self.leases)

    def hold(self) -> None:
        """Hold all leases (`Lease.hold`)."""
        for lease in self.leases:
            lease.hold()

    def check(self) -> None:
        """Check all leases (`Lease.check`)."""
        for lease in self.leases:
            lease.check()

    def look(self) -> None:
        """Look at the root's lease (`Lease.look`)."""
        self.leases[0].look()


def names_backend_with_state(job: Job, pointer: Pointer) -> bool:
    """True if the job names a backend with a pointer's state, or the pointer is too old to name its backends."""
    return not pointer.replication or any(backend.name in pointer.replication for backend in job.options.backends)
