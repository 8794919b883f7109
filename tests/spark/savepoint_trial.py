"""One case of the savepoint matrix on real Spark: job, snapshot, new job, restart, snapshot, another new job.

The output of the jobs is compared with the batch computation, and the files that they create and delete with the rules of
`docs/ownership.md`.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from processes import kill_tree
from pyspark.errors import StreamingQueryException
from savepoint_cases import DELETED, KILLED, MOVED, TWICE, Case, Lengths
from savepoint_job import AFTER_ITS_TASKS, IN_A_TASK, OPERATOR, Query, batch_computation, file_of, next_file
from savepoint_ledger import Ledger, disk_options, s3_options
from savepoint_verdict import Source, find_differences, find_violations

from spark_state_ext import Backend, RetainedCheckpoint, Savepoint, read_savepoint, take_savepoint
from spark_state_ext.__main__ import main as command_line
from spark_state_ext.engine.start_from import StartFrom
from spark_state_ext.files.folder import Folder
from spark_state_ext.files.layout import LEASE_FOLDER
from spark_state_ext.ownership.lease_log import LeaseLog
from spark_state_ext.savepoints.manifest_file import read_manifest
from spark_state_ext.savepoints.start_records import is_detached
from tests.helpers.waiting import eventually

__all__ = ["Trial"]


@dataclass
class Snapshot:
    """A snapshot that a job can be started from.

    Parameters
    ----------
    start
        The `start_from` of the job.
    source
        The files of the snapshot, for the ledger.
    next_file
        The number of the first file that the snapshot does not include.
    taken
        The reported numbers of files of a savepoint.
    """

    start: StartFrom
    source: Source
    next_file: int
    taken: dict[str, int] = field(default_factory=dict)


class Trial:
    """A run of one case.

    Parameters
    ----------
    spark
        The session.
    provider
        Spark's state store provider, for a job in another process.
    case, lengths
        The case and its numbers of batches.
    folder
        The folder for everything on this machine.
    server
        The S3 server.
    """

    def __init__(self, spark: Any, provider: str, case: Case, lengths: Lengths, folder: Path, server: Any) -> None:
        self.spark, self.provider, self.case, self.lengths, self.folder = spark, provider, case, lengths, folder
        folder.mkdir(parents=True)
        if case.store == "s3":
            self.stores = server.root(f"{folder.parent.name}/{folder.name}")
            self.ledger = Ledger(folder / "ledger.jsonl", self.stores.partition("://")[2])
            self.options = s3_options(self.ledger, server.options)
        else:
            self.stores = str(folder / "stores")
            self.ledger = Ledger(folder / "ledger.jsonl", self.stores)
            self.options = disk_options(self.ledger)
        # From here on, the ledger notes what this process does.
        self.top = Folder(self.stores, self.options)
        ends = [lengths.first, lengths.second, lengths.third]
        self.whole = frozenset([sum(ends[: at + 1]) - 1 for at in range(3)] + [lengths.side + lengths.after - 1])
        self.wrong: list[str] = []
        self.jobs: dict[str, Query] = {}
        self.taken: dict[str, dict[str, int]] = {}

    def run(self) -> dict[str, Any]:
        """Run the case and return its line."""
        lengths = self.lengths
        with self._phase("job 1"):
            first = self._run_query("job 1", range(lengths.first))
        with self._phase("snapshot 1"):
            snapshot = self._take_snapshot("1", first)
            if self.case.perturbation == MOVED:
                snapshot = self._move_snapshot(first, snapshot)
        next_file_number = snapshot.next_file
        self._check(
            next_file_number == lengths.first, f"after the offsets of the snapshot comes file {next_file_number}"
        )
        second = self._run_second_job(first, snapshot, range(next_file_number, next_file_number + lengths.second))
        with self._phase("snapshot 2"):
            second_snapshot = self._take_snapshot("2", second)
        with self._phase("job 3"):
            next_file_number += second_snapshot.next_file
            self._check(
                next_file_number == lengths.first + lengths.second,
                f"after the offsets of the second snapshot comes file {next_file_number}",
            )
            options = second.options if self.case.adopts else {}
            root = second.root if self.case.adopts else ""
            third = self._run_query(
                "job 3",
                range(next_file_number, next_file_number + lengths.third),
                second_snapshot.start,
                root,
                **options,
            )
        self._check_equal(third, range(next_file_number + lengths.third))
        with self._phase("end"):
            # Background work may still be running. Compare until ledger and store agree once.
            differences: list[str] = []

            def agrees() -> bool:
                differences[:] = find_differences(self.case, self.ledger, self._list_files())
                return not differences

            with contextlib.suppress(AssertionError):
                eventually(agrees, 0.2)
            self.wrong += differences
            violations, summary = find_violations(self.case, self.ledger, snapshot.source, second)
        self.wrong += violations
        return {
            "case": self.case.name,
            "batches": {name: job.batches for name, job in self.jobs.items()},
            "taken": self.taken,
            "equal": not any("batch computation" in text for text in self.wrong),
            "source": summary,
            "cleaned_up": self._count_cleaned_up(),
            "verdict": "as it must be" if not self.wrong else "WRONG",
            **({"wrong": self.wrong} if self.wrong else {}),
        }

    # -- jobs ----------------------------------------------------------------------------------------------------------

    def _run_query(
        self,
        name: str,
        files: Sequence[int],
        start: StartFrom | None = None,
        root: str = "",
        parts: int = 2,
        **options: Any,
    ) -> Query:
        """Run a new job over some files, and restart it halfway."""
        query = self._new_query(name, start, root, **options)
        self._continue_query(query, files, parts)
        return query

    def _new_query(self, name: str, start: StartFrom | None, root: str, **options: Any) -> Query:
        folder = name.replace(" ", "-")
        query = Query(
            self.folder / folder,
            root or f"{self.stores}/{folder}",
            self.options,
            self.lengths.buckets,
            start,
            options,
            self.whole,
        )
        self.jobs[name] = query
        return query

    def _continue_query(self, query: Query, files: Sequence[int], parts: int = 2) -> None:
        """Run a query over more files in `parts` starts; each but the first has no local store."""
        size = -(-len(files) // parts)
        for begin in range(0, len(files), size) if size else [0]:
            if begin:
                shutil.rmtree(query.folder / "local", ignore_errors=True)
            query.feed(files[begin : begin + size])
            query.run(self.spark)
            eventually(lambda: self._has_ended(query.root))

    def _has_ended(self, root: str) -> bool:
        """Return whether all runs below a root have ended.

        The driver releases the lease of a run a moment after its end, or not at all if the run was short.
        """
        operator = Folder(root, self.options).child(OPERATOR)
        for folder in (operator.child(entry.name) for entry in operator.entries() if entry.name.count("-") == 4):
            newest = LeaseLog(folder).newest(first=True)
            if newest is None:
                continue
            if newest.record.released:
                # The process that releases the lease also removes the last record but one.
                if len(folder.child(LEASE_FOLDER).names()) > 2:
                    return False
                continue
            if time.time() * 1000 < newest.record.renewed_ms + 2 * newest.record.lease_ms:
                return False
        return True

    def _run_second_job(self, first: Query, snapshot: Snapshot, files: Sequence[int]) -> Query:
        """Run the job that starts from the snapshot, with the perturbation of the case."""
        case, lengths = self.case, self.lengths
        # A query that claims a folder continues in it; its backend keeps the name that pointers refer to.
        start, root, options = snapshot.start, "", {}
        if isinstance(start, RetainedCheckpoint) and case.adopts:
            root = start.root
            options = {"backends": ["changelog", *start.places]} if case.perturbation == MOVED else {}
        second = self._new_query("job 2", snapshot.start, root, **options)
        if case.perturbation == KILLED:
            with self._phase("job 2 until it is killed"):
                second.feed(files[:1])
                self._kill_in_first_batch(second)
                files = files[1:]
        with self._phase("job 2"):
            half = len(files) // 2
            # After one batch the source is still needed: Spark has not handed out a pointer yet.
            if case.perturbation == KILLED:
                self._continue_query(second, (), 1)
            else:
                self._continue_query(second, files[:1], 1)
                files = files[1:]
        if case.perturbation == TWICE:
            self._start_second_query(snapshot)
        with self._phase("job 2"):
            self._continue_query(second, files[:half], 1)
            if not case.adopts:
                eventually(lambda: is_detached(second.query_folder))
            if case.mode == "claim" and not case.adopts:
                eventually(lambda: not snapshot.source.files_in(self.top))
            if case.form == "checkpoint":
                # A hold lasts only while a query is started, whatever happens to the first run of the query.
                eventually(lambda: not any("/holds/" in name for name in snapshot.source.files_in(self.top)))
        if case.perturbation == DELETED:
            with self._phase("the user deletes the source"):
                self._delete_source(first, second, snapshot)
        elif case.adopts:
            self._check_refused("job 1 after it was claimed", first, "ClaimedError: the state at .* belongs to")
        elif case.perturbation != MOVED or case.form != "checkpoint":
            with self._phase("job 1 goes on"):
                self._continue_query(first, range(lengths.side, lengths.side + lengths.after), 1)
                self._check_equal(first, [*range(lengths.first), *range(lengths.side, lengths.side + lengths.after)])
        with self._phase("job 2"):
            shutil.rmtree(second.folder / "local", ignore_errors=True)
            self._continue_query(second, files[half:], 1)
        self._check_equal(second, range(lengths.first + lengths.second))
        return second

    def _kill_in_first_batch(self, query: Query) -> None:
        """Start a query in another process, and kill the process within the first batch."""
        hanging = replace(query, hang=IN_A_TASK if self.case.form == "native" else AFTER_ITS_TASKS)
        spec = self.folder / "killed.json"
        spec.write_text(json.dumps({"query": hanging.to_plain(), "provider": self.provider}))
        log = self.folder / "killed.log"
        with log.open("w") as output:
            program = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("savepoint_job.py")), str(spec)]
            job = subprocess.Popen(program, stdout=output, stderr=output, start_new_session=True)
        try:
            eventually(lambda: query.reached.exists() or job.poll() is not None, 0.05)
        finally:
            kill_tree(job.pid)
            job.wait()
        self._check(query.reached.exists(), f"job 2 ended before its first batch: {log.read_text()[-2_000:]}")
        committed = query.checkpoint / "commits" / "0"
        self._check(not committed.exists(), "job 2 had committed a batch before it was killed")

    def _start_second_query(self, snapshot: Snapshot) -> None:
        """Start another query from the same source before the first one is detached."""
        lengths = self.lengths
        files = range(lengths.first, lengths.first + lengths.second)
        if self.case.mode == "no_claim":
            with self._phase("job 2 for the second time"):
                other = self._run_query("job 2 for the second time", [*files[:1], files[-1]], snapshot.start, parts=2)
                self._check_equal(other, [*range(lengths.first), files[0], files[-1]])
            return
        root = snapshot.start.root if isinstance(snapshot.start, RetainedCheckpoint) else ""
        other = self._new_query("job 2 for the second time", snapshot.start, root)
        other.feed(files[:1])
        self._check_refused("job 2 for the second time", other, "ClaimedError")

    def _check_refused(self, phase: str, query: Query, pattern: str) -> None:
        """Start a query that must be refused, and check that it fails with this error and commits no batch."""
        with self._phase(phase):
            before = query.batches
            query.feed([0])
            try:
                query.run(self.spark)
                self._check(False, f"{phase}: the query was not refused")
            except StreamingQueryException as error:
                self._check(bool(re.search(pattern, str(error))), f"{phase}: refused with {str(error)[:500]}")
            self._check(query.batches == before, f"{phase}: the query has committed a batch")

    # -- snapshots -----------------------------------------------------------------------------------------------------

    def _take_snapshot(self, number: str, query: Query) -> Snapshot:
        """Take a savepoint of a query, or return its checkpoint unchanged."""
        case = self.case
        if case.form == "checkpoint":
            start = RetainedCheckpoint(
                query.root,
                str(query.checkpoint),
                mode=case.mode,
                storage_options=self.options,
                backends=[backend for backend in query.state.options.backends if isinstance(backend, Backend)],
            )
            folder = self._strip_protocol(f"{query.root}/{OPERATOR}")
            return Snapshot(start, Source(folder), query.next_file())
        path = f"{self.stores}/savepoint-{number}"
        taken = take_savepoint(
            self.spark, path, query.checkpoint, query.state, form=case.form, storage_options=self.options
        )
        self.taken[number] = {"files": taken.files, "duplicated": taken.duplicated, "streamed": taken.streamed}
        if case.form == "native":
            # Only inline deltas are streamed.
            self._check(taken.duplicated > 0, f"savepoint {number}: no file was duplicated: {taken}")
        rows = read_savepoint(self.spark, Savepoint(path, storage_options=self.options)).collect()
        saved = {row.key: (row.n, row.total) for row in rows}
        self._check(saved == query.table, f"savepoint {number} differs from the batch computation")
        manifest = read_manifest(Folder(path, self.options))
        assert manifest.header.offsets is not None, "a query's savepoint has offsets"
        return Snapshot(
            Savepoint(path, mode=case.mode, storage_options=self.options),
            Source(self._strip_protocol(path), manifest),
            next_file(manifest.header.offsets),
        )

    def _move_snapshot(self, first: Query, snapshot: Snapshot) -> Snapshot:
        """Move the savepoint's folder, or the root together with Spark's checkpoint, as a user may do."""
        start = snapshot.start
        if isinstance(start, Savepoint):
            self._move(start.path, f"{self.stores}/moved")
            moved_start: StartFrom = replace(start, path=f"{self.stores}/moved")
            return replace(
                snapshot,
                start=moved_start,
                source=replace(snapshot.source, path=self._strip_protocol(f"{self.stores}/moved")),
            )
        self._move(first.root, f"{self.stores}/moved")
        backend = Backend(f"{self.stores}/moved", name=first.root, storage_options=self.options)
        checkpoint, first.moved_to = first.checkpoint, self.folder / "moved"
        first.moved_to.mkdir()
        checkpoint.rename(first.checkpoint)
        first.root, first.options = f"{self.stores}/moved", {"backends": ["changelog", backend]}
        moved_start = replace(start, root=first.root, checkpoint_location=str(first.checkpoint), backends=[backend])
        return replace(
            snapshot, start=moved_start, source=Source(self._strip_protocol(f"{self.stores}/moved/{OPERATOR}"))
        )

    def _move(self, path: str, to: str) -> None:
        if self.case.store == "disk":
            os.rename(path, to)
            return
        filesystem, source, target = self.top._fs, self._strip_protocol(path), self._strip_protocol(to)
        for file in filesystem.find(source):
            filesystem.cp_file(file, target + file[len(source) :])
            filesystem.rm_file(file)

    def _delete_source(self, first: Query, second: Query, snapshot: Snapshot) -> None:
        """Delete the source as a user may do once the new query is detached: by the savepoint command or by hand."""
        start = snapshot.start
        if isinstance(start, RetainedCheckpoint):
            self.top._fs.rm(self._strip_protocol(first.root), recursive=True)
            shutil.rmtree(first.checkpoint)
            return
        options = ["--root", second.root, "--storage-options", json.dumps(self.options)]
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            for verb in ("status", "delete"):
                status = command_line(["savepoint", verb, start.path, *options])
                self._check(status == 0, f"savepoint {verb}: exit status {status}")
        self._check(
            re.search(r"^deletable +true$", output.getvalue(), re.MULTILINE) is not None,
            f"savepoint status: {output.getvalue()}",
        )

    # -- checks --------------------------------------------------------------------------------------------------------

    def _check_equal(self, query: Query, files: Sequence[int]) -> None:
        expected = batch_computation(file_of(number, number in self.whole) for number in files)
        name = next(name for name, job in self.jobs.items() if job is query)
        self._check(query.table == expected, f"{name} differs from the batch computation")

    def _check(self, holds: bool, text: str) -> None:
        if not holds:
            self.wrong.append(text)

    def _list_files(self) -> set[str]:
        """Return all files that exist, without using the ledger."""
        return {f"{self._strip_protocol(self.stores)}/{entry.name}" for entry in self.top.tree()}

    def _count_cleaned_up(self) -> dict[str, int]:
        """Count the files that clean-up has deleted in each job's root."""
        deletes = [entry for entry in self.ledger.deletes(self.ledger.below) if entry.role == "clean-up"]
        return dict(Counter(entry.path[len(self.ledger.below) + 1 :].partition("/")[0] for entry in deletes))

    def _strip_protocol(self, path: str) -> str:
        return path.partition("://")[2] or path

    @contextlib.contextmanager
    def _phase(self, name: str) -> Any:
        self.ledger.enter(name)
        try:
            yield
        except Exception as error:
            # Spark's text has whole stack traces; the package's own error is inside.
            text = str(error)
            begin = max(text.find("spark_state_ext.errors."), 0)
            raise RuntimeError(f"phase {name!r}: {text[begin : begin + 1_000]}") from error
