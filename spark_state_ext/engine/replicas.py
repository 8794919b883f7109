"""The backends of a job, as an executor has them: managers kept from call to call, their leases and operator files."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from arrow_schemas.operator import OperatorFile, operator_file_name, parse_operator_file_name
from arrow_schemas.partitions import PartitionAssignment, parse_partitions_name, partitions_name
from arrow_schemas.pointer import Pointer
from spark_state_ext.backends import BackendContext, BackupManager
from spark_state_ext.backends.registry import FSSPEC, Backend, factory_of
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

__all__ = ["Leases", "Replicas", "names_a_holder"]

_BUCKETS_MAX = 1_024


class Replicas:
    """The managers of a process's buckets, kept from call to call."""

    def __init__(self, background: Background, uploads: WorkerUploads) -> None:
        self._background = background
        self._uploads = uploads
        self._kept: OrderedDict[tuple[str, str, int], list[Replica]] = OrderedDict()
        # Backups whose bucket was forgotten while they had uploads under way.
        self._leaving: list[BackupManager] = []
        self._leaving_lock = threading.Lock()
        self._prepared: set[tuple[str, str, str]] = set()
        self._prepared_lock = threading.Lock()

    def of(self, job: Job, query_folder: str, bucket: int, scratch: Path) -> list[Replica]:
        """The managers of a bucket's backends."""
        key = (job.plan_id, query_folder, bucket)
        # Taken out and put in again: in the order of their last use.
        replicas = self._kept.pop(key, None)
        if replicas is None:
            replicas = []
            for backend in job.options.backends:
                factory, context = factory_of(backend.kind), self._context(job, backend, query_folder, bucket, scratch)
                backup, restore = factory.backup_manager(context), factory.restore_manager(context)
                replicas.append(Replica(backend.name, backup, restore, _is_root(job, backend)))
        self._kept[key] = replicas
        if len(self._kept) > _BUCKETS_MAX:
            # Of queries that stopped, most likely.
            self._close(self._kept.pop(next(iter(self._kept))))
        return replicas

    def reading(self, backends: Sequence[Backend], pointer: Pointer, scratch: Path, timeout_s: float) -> list[Replica]:
        """Managers of another query's bucket, to read from; nobody keeps them."""
        found = []
        for at, backend in enumerate(backends):
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
            factory = factory_of(backend.kind)
            backup, restore = factory.backup_manager(context), factory.restore_manager(context)
            # Pointers of format 1 mean the first one, their root.
            found.append(Replica(backend.name, backup, restore, at == 0))
        return found

    def forget(self, job: Job, query_folder: str, bucket: int) -> None:
        """Close the managers of a bucket, as after a call that failed: the next call has others made.

        Restores end. Uploads that are under way do not: a backup is closed when it has none.
        """
        self._close(self._kept.pop((job.plan_id, query_folder, bucket), []))

    def _close(self, replicas: Iterable[Replica]) -> None:
        """Restores end at once; backups are closed after what waits in the background, which may hand them
        snapshots."""
        for replica in replicas:
            replica.restore.close()
            work = partial(self._close_backups, replica.backup)
            self._background.submit(f"closing of the backup manager {id(replica.backup)} of {replica.name}", work)

    def _close_backups(self, another: BackupManager) -> None:
        """Close a backup, and those that had uploads under way when it was their turn."""
        uploads = self._uploads
        with self._leaving_lock:
            self._leaving.append(another)
            idle = [backup for backup in self._leaving if not uploads.is_at(backup)]
            self._leaving[:] = [backup for backup in self._leaving if backup not in idle]
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
        """Have every backend keep what the operator as a whole has; once a process, query folder and schema."""
        others = [backend for backend in job.options.backends if not _is_root(job, backend)]
        with self._prepared_lock:
            # A plan may say that the source has grown.
            plan = "" if job.options.source_partition is None else f" {job.plan_id}"
            schema = f"{job.operator} {schema_id}{plan}"
            missing = [it for it in others if (it.name, query_folder, schema) not in self._prepared]
            if not missing:
                return
            files = root.child(query_folder)
            names = [name for name in files.names() if _is_of_operator(name)]
            names.sort(key=lambda name: name == operator_file_name(schema_id))
            resources = {name: files.get(name) for name in names}
            for backend in missing:
                context = self._context(job, backend, query_folder, None, scratch)
                admin = factory_of(backend.kind).admin(BackendContext(**{**context.__dict__, "resources": resources}))
                admin.create_resources()
                admin.validate_resources()
                self._prepared.add((backend.name, query_folder, schema))

    def refuse_elsewhere(self, job: Job, root: Folder, pointer: Pointer, scratch: Path) -> None:
        """Refuse a job that names none of the replicas which hold its state; nothing is written, nor asked of the right
        ones.

        Copying all files to another place is a move: then the newest file that the pointer counts on is there.
        """
        if names_a_holder(job, pointer):
            return
        confirmed = {it.through for it in pointer.replication.values() if is_complete(it)}
        files = root.child(pointer.query_folder)
        if confirmed <= {None}:
            # All of it is in Spark's own state. The operator file was there before the first pointer.
            moved = files.exists(operator_file_name(pointer.schema_id))
        else:
            there = [replica.files() for replica in self.of(job, pointer.query_folder, pointer.bucket, scratch)]
            moved = any(has_checkpoint(replica, ref) for replica in there for ref in confirmed if ref is not None)
        if not moved:
            old = ", ".join(pointer.replication)
            names = ", ".join(backend.name for backend in job.options.backends)
            if Backend(job.options.root).name in pointer.replication:
                # The root is right, and was left out.
                where, mend = names, f"add 'fsspec' to backends, which stands for the root {job.options.root}"
            else:
                where, mend = str(files.root), f"set the root back to {old}"
            raise StateElsewhereError(
                f"operator {job.operator!r} has its state in {old}, and the job names {names}, where it is not "
                f"(looked for in {where}): {mend}. To move the state, keep both for a while with backends=[…], or copy "
                "all files of the old place first. Nothing was written and no state is lost."
            )

    def bring_back(
        self, root: Folder, query_folder: str, operator: OperatorFile, assignment: PartitionAssignment | None = None
    ) -> None:
        """Write the operator file that is in force where somebody has deleted it, and the assignment of partitions;
        other backends get them as for `prepare`.
        """
        files, name = root.child(query_folder), operator_file_name(operator.schema_id)
        if not files.exists(name):
            files.create(name, operator.encode())
        if assignment is not None and newest_assignment(files) is None:
            files.create(partitions_name(0), assignment.encode())
        with self._prepared_lock:
            self._prepared.difference_update([it for it in self._prepared if it[1] == query_folder])


def _is_of_operator(name: str) -> bool:
    """Whether a file of a query folder is what all buckets share."""
    return parse_operator_file_name(name) is not None or parse_partitions_name(name) is not None


def _is_root(job: Job, backend: Backend) -> bool:
    here = (job.options.root.rstrip("/") or job.options.root, dict(job.options.storage_options))
    return backend.kind == FSSPEC and (backend.root, dict(backend.storage_options)) == here


@dataclass(frozen=True)
class Leases:
    """A run's claim to its state, wherever it writes it.

    Parameters
    ----------
    leases
        One for each folder.
    folders
        The query folder in every file system, the root's first.
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
        """Those of a task's run."""
        folders = [root.child(query_folder)]
        for backend in job.options.backends:
            if backend.kind == FSSPEC and not _is_root(job, backend):
                folders.append(Folder(backend.root, backend.storage_options).child(job.operator, query_folder))
        me = RunIdentity.here(job.application_id, job.plan_id, task.query_id, local=job.local_mode)
        lease_ms, format_1_too = job.options.lease_ms, job.options.commit.format_1_too
        return Leases(
            tuple(
                registry.of(folder, me, lease_ms, format_1_too=format_1_too, claim=claim, claims=claims)
                for folder in folders
            ),
            tuple(folders),
        )

    @property
    def age_s(self) -> float:
        """As `Lease.age_s`, of the one that was known least lately."""
        return max((lease.age_s for lease in self.leases), default=0.0)

    @property
    def times_removed(self) -> int:
        """As `Lease.times_removed`, of all of them."""
        return sum(lease.times_removed for lease in self.leases)

    def hold(self) -> None:
        """As `Lease.hold`."""
        for lease in self.leases:
            lease.hold()

    def check(self) -> None:
        """As `Lease.check`."""
        for lease in self.leases:
            lease.check()

    def look(self) -> None:
        """As `Lease.look`, of the root's."""
        self.leases[0].look()


def names_a_holder(job: Job, pointer: Pointer) -> bool:
    """Whether the job names a replica that holds the state of a pointer, or the pointer is too old to say which do."""
    return not pointer.replication or any(backend.name in pointer.replication for backend in job.options.backends)
