"""One case of the matrix of savepoints on real Spark: job, snapshot, new job, restart, snapshot, another new job.

What the jobs emit is compared with the batch computation, and what was created and deleted with who may do that
(`docs/ownership.md`).
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
from savepoint_verdict import Source, found_wrong, unlike

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
    """What a job is started from.

    Parameters
    ----------
    start
        As the job is told.
    source
        Its files, for the ledger.
    next_file
        Which file of its job comes after it.
    taken
        What was told of a savepoint that was taken.
    """

    start: StartFrom
    source: Source
    next_file: int
    taken: dict[str, int] = field(default_factory=dict)


class Trial:
    """One case.

    Parameters
    ----------
    spark
        The session.
    provider
        Spark's provider of state, for a process of its own.
    case, lengths
        What to do.
    folder
        For everything on this machine.
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
        # This process is watched from now on.
        self.top = Folder(self.stores, self.options)
        ends = [lengths.first, lengths.second, lengths.third]
        self.whole = frozenset([sum(ends[: at + 1]) - 1 for at in range(3)] + [lengths.side + lengths.after - 1])
        self.wrong: list[str] = []
        self.jobs: dict[str, Query] = {}
        self.taken: dict[str, dict[str, int]] = {}

    def run(self) -> dict[str, Any]:
        """The case; gives its line."""
        lengths = self.lengths
        with self._phase("job 1"):
            first = self._query("job 1", range(lengths.first))
        with self._phase("snapshot 1"):
            snapshot = self._snapshot("1", first)
            if self.case.perturbation == MOVED:
                snapshot = self._moved(first, snapshot)
        at = snapshot.next_file
        self._check(at == lengths.first, f"the offsets of the snapshot lead to file {at}")
        second = self._second(first, snapshot, range(at, at + lengths.second))
        with self._phase("snapshot 2"):
            again = self._snapshot("2", second)
        with self._phase("job 3"):
            at += again.next_file
            self._check(at == lengths.first + lengths.second, f"the offsets of the second snapshot lead to file {at}")
            kept = second.options if self.case.adopts else {}
            root = second.root if self.case.adopts else ""
            third = self._query("job 3", range(at, at + lengths.third), again.start, root, **kept)
        self._equal(third, range(at + lengths.third))
        with self._phase("end"):
            # What was in the background may still be under way. Once the two agree they are not looked at again.
            differ: list[str] = []

            def agree() -> bool:
                differ[:] = unlike(self.case, self.ledger, self._there())
                return not differ

            with contextlib.suppress(AssertionError):
                eventually(agree, 0.2)
            self.wrong += differ
            wrong, told = found_wrong(self.case, self.ledger, snapshot.source, second)
        self.wrong += wrong
        return {
            "case": self.case.name,
            "batches": {name: job.batches for name, job in self.jobs.items()},
            "taken": self.taken,
            "equal": not any("batch computation" in text for text in self.wrong),
            "source": told,
            "cleaned_up": self._cleaned_up(),
            "verdict": "as it must be" if not self.wrong else "WRONG",
            **({"wrong": self.wrong} if self.wrong else {}),
        }

    # -- jobs ----------------------------------------------------------------------------------------------------------

    def _query(
        self,
        name: str,
        files: Sequence[int],
        start: StartFrom | None = None,
        root: str = "",
        parts: int = 2,
        **options: Any,
    ) -> Query:
        """A job over some files, restarted in the midst."""
        query = self._new(name, start, root, **options)
        self._go_on(query, files, parts)
        return query

    def _new(self, name: str, start: StartFrom | None, root: str, **options: Any) -> Query:
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

    def _go_on(self, query: Query, files: Sequence[int], parts: int = 2) -> None:
        """Run a query over more files, in so many starts; each but the first without its local store."""
        size = -(-len(files) // parts)
        for at in range(0, len(files), size) if size else [0]:
            if at:
                shutil.rmtree(query.folder / "local", ignore_errors=True)
            query.feed(files[at : at + size])
            query.run(self.spark)
            eventually(lambda: self._is_over(query.root))

    def _is_over(self, root: str) -> bool:
        """Whether all runs below a root have ended, as the driver says a moment later; of one that was short it may not."""
        operator = Folder(root, self.options).child(OPERATOR)
        for folder in (operator.child(it.name) for it in operator.entries() if it.name.count("-") == 4):
            found = LeaseLog(folder).newest(first=True)
            if found is None:
                continue
            if found.record.released:
                # Whoever said so removes the last record but one.
                if len(folder.child(LEASE_FOLDER).names()) > 2:
                    return False
                continue
            if time.time() * 1000 < found.record.renewed_ms + 2 * found.record.lease_ms:
                return False
        return True

    def _second(self, first: Query, snapshot: Snapshot, files: Sequence[int]) -> Query:
        """The job that starts from the snapshot, with all that happens to it and to its source."""
        case, lengths = self.case, self.lengths
        # Whoever claims a folder goes on in it; its backend keeps the name under which pointers know it.
        start, root, options = snapshot.start, "", {}
        if isinstance(start, RetainedCheckpoint) and case.adopts:
            root = start.root
            options = {"backends": ["changelog", *start.places]} if case.perturbation == MOVED else {}
        second = self._new("job 2", snapshot.start, root, **options)
        if case.perturbation == KILLED:
            with self._phase("job 2 until it is killed"):
                second.feed(files[:1])
                self._killed(second)
                files = files[1:]
        with self._phase("job 2"):
            half = len(files) // 2
            # One batch, after which the source is needed still: no pointer was handed out yet.
            if case.perturbation == KILLED:
                self._go_on(second, (), 1)
            else:
                self._go_on(second, files[:1], 1)
                files = files[1:]
        if case.perturbation == TWICE:
            self._started_twice(snapshot)
        with self._phase("job 2"):
            self._go_on(second, files[:half], 1)
            if not case.adopts:
                eventually(lambda: is_detached(second.query_folder))
            if case.mode == "claim" and not case.adopts:
                eventually(lambda: not snapshot.source.files_in(self.top))
            if case.form == "checkpoint":
                # What is held while a query is started is so no longer than that, whatever became of its first run.
                eventually(lambda: not any("/holds/" in name for name in snapshot.source.files_in(self.top)))
        if case.perturbation == DELETED:
            with self._phase("the user deletes the source"):
                self._delete(first, second, snapshot)
        elif case.adopts:
            self._refused("job 1 after it was claimed", first, "ClaimedError: the state at .* belongs to")
        elif case.perturbation != MOVED or case.form != "checkpoint":
            with self._phase("job 1 goes on"):
                self._go_on(first, range(lengths.side, lengths.side + lengths.after), 1)
                self._equal(first, [*range(lengths.first), *range(lengths.side, lengths.side + lengths.after)])
        with self._phase("job 2"):
            shutil.rmtree(second.folder / "local", ignore_errors=True)
            self._go_on(second, files[half:], 1)
        self._equal(second, range(lengths.first + lengths.second))
        return second

    def _killed(self, query: Query) -> None:
        """Start a query in a process of its own, and kill that within its first batch."""
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

    def _started_twice(self, snapshot: Snapshot) -> None:
        """Another query from the same source, before the first one is detached."""
        lengths = self.lengths
        files = range(lengths.first, lengths.first + lengths.second)
        if self.case.mode == "no_claim":
            with self._phase("job 2 for the second time"):
                other = self._query("job 2 for the second time", [*files[:1], files[-1]], snapshot.start, parts=2)
                self._equal(other, [*range(lengths.first), files[0], files[-1]])
            return
        root = snapshot.start.root if isinstance(snapshot.start, RetainedCheckpoint) else ""
        other = self._new("job 2 for the second time", snapshot.start, root)
        other.feed(files[:1])
        self._refused("job 2 for the second time", other, "ClaimedError")

    def _refused(self, phase: str, query: Query, says: str) -> None:
        """Start a query that must not run, and see that it has created and deleted no checkpoint file."""
        import re

        with self._phase(phase):
            before = query.batches
            query.feed([0])
            try:
                query.run(self.spark)
                self._check(False, f"{phase}: it was not refused")
            except StreamingQueryException as error:
                self._check(bool(re.search(says, str(error))), f"{phase}: refused with {str(error)[:500]}")
            self._check(query.batches == before, f"{phase}: it has committed a batch")

    # -- snapshots -----------------------------------------------------------------------------------------------------

    def _snapshot(self, number: str, query: Query) -> Snapshot:
        """A savepoint of a query, or its checkpoint as it is."""
        case = self.case
        if case.form == "checkpoint":
            start = RetainedCheckpoint(
                query.root,
                str(query.checkpoint),
                mode=case.mode,
                storage_options=self.options,
                backends=[it for it in query.state.options.backends if isinstance(it, Backend)],
            )
            folder = self._bare(f"{query.root}/{OPERATOR}")
            return Snapshot(start, Source(folder), query.next_file())
        path = f"{self.stores}/savepoint-{number}"
        taken = take_savepoint(
            self.spark, path, query.checkpoint, query.state, form=case.form, storage_options=self.options
        )
        self.taken[number] = {"files": taken.files, "duplicated": taken.duplicated, "streamed": taken.streamed}
        if case.form == "native":
            # What was inline only is streamed, and nothing else is.
            self._check(taken.duplicated > 0, f"savepoint {number}: no file was duplicated: {taken}")
        rows = read_savepoint(self.spark, Savepoint(path, storage_options=self.options)).collect()
        saved = {row.key: (row.n, row.total) for row in rows}
        self._check(saved == query.table, f"savepoint {number} is not what the batch computation gives")
        manifest = read_manifest(Folder(path, self.options))
        assert manifest.header.offsets is not None, "a query's savepoint has its offsets"
        return Snapshot(
            Savepoint(path, mode=case.mode, storage_options=self.options),
            Source(self._bare(path), manifest),
            next_file(manifest.header.offsets),
        )

    def _moved(self, first: Query, snapshot: Snapshot) -> Snapshot:
        """What a user moves: the savepoint's folder, or the root together with Spark's checkpoint."""
        start = snapshot.start
        if isinstance(start, Savepoint):
            self._move(start.path, f"{self.stores}/moved")
            moved: StartFrom = replace(start, path=f"{self.stores}/moved")
            return replace(
                snapshot, start=moved, source=replace(snapshot.source, path=self._bare(f"{self.stores}/moved"))
            )
        self._move(first.root, f"{self.stores}/moved")
        backend = Backend(f"{self.stores}/moved", name=first.root, storage_options=self.options)
        checkpoint, first.moved_to = first.checkpoint, self.folder / "moved"
        first.moved_to.mkdir()
        checkpoint.rename(first.checkpoint)
        first.root, first.options = f"{self.stores}/moved", {"backends": ["changelog", backend]}
        moved = replace(start, root=first.root, checkpoint_location=str(first.checkpoint), backends=[backend])
        return replace(snapshot, start=moved, source=Source(self._bare(f"{self.stores}/moved/{OPERATOR}")))

    def _move(self, path: str, to: str) -> None:
        if self.case.store == "disk":
            os.rename(path, to)
            return
        filesystem, source, target = self.top._fs, self._bare(path), self._bare(to)
        for file in filesystem.find(source):
            filesystem.cp_file(file, target + file[len(source) :])
            filesystem.rm_file(file)

    def _delete(self, first: Query, second: Query, snapshot: Snapshot) -> None:
        """What a user deletes once the new query is detached, by the savepoint's command or by hand."""
        start = snapshot.start
        if isinstance(start, RetainedCheckpoint):
            self.top._fs.rm(self._bare(first.root), recursive=True)
            shutil.rmtree(first.checkpoint)
            return
        options = ["--root", second.root, "--storage-options", json.dumps(self.options)]
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            for verb in ("status", "delete"):
                status = command_line(["savepoint", verb, start.path, *options])
                self._check(status == 0, f"savepoint {verb}: exit status {status}")
        self._check(
            re.search(r"^deletable +true$", said.getvalue(), re.MULTILINE) is not None,
            f"savepoint status: {said.getvalue()}",
        )

    # -- checks --------------------------------------------------------------------------------------------------------

    def _equal(self, query: Query, files: Sequence[int]) -> None:
        expected = batch_computation(file_of(number, number in self.whole) for number in files)
        name = next(name for name, job in self.jobs.items() if job is query)
        self._check(query.table == expected, f"{name} is not what the batch computation gives")

    def _check(self, holds: bool, text: str) -> None:
        if not holds:
            self.wrong.append(text)

    def _there(self) -> set[str]:
        """All files that are there, without going by the ledger."""
        return {f"{self._bare(self.stores)}/{entry.name}" for entry in self.top.tree()}

    def _cleaned_up(self) -> dict[str, int]:
        """How many files clean-ups have deleted in each job's root."""
        cleaned = [it for it in self.ledger.deletes(self.ledger.below) if it.role == "clean-up"]
        return dict(Counter(it.path[len(self.ledger.below) + 1 :].partition("/")[0] for it in cleaned))

    def _bare(self, path: str) -> str:
        return path.partition("://")[2] or path

    @contextlib.contextmanager
    def _phase(self, name: str) -> Any:
        self.ledger.enter(name)
        try:
            yield
        except Exception as error:
            # Spark's text has whole stack traces; the package's own error is in the midst of it.
            text = str(error)
            at = max(text.find("spark_state_ext.errors."), 0)
            raise RuntimeError(f"phase {name!r}: {text[at : at + 1_000]}") from error
