"""The rules on who may delete which files of a snapshot (`docs/ownership.md`), checked by a ledger of all changes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from jobs import configured, reads_state
from pyspark.errors import StreamingQueryException
from savepoint_cases import KILLED, Case
from savepoint_job import OPERATOR, RETAINED, Query
from savepoint_ledger import USER, Ledger, disk_options, s3_options
from savepoint_verdict import Source, find_differences, find_violations

from spark_state_ext import RetainedCheckpoint, Savepoint, take_savepoint
from spark_state_ext.files.folder import Folder
from spark_state_ext.ownership.holds import Hold
from spark_state_ext.ownership.lease_log import LeaseLog
from spark_state_ext.savepoints.claims import SavepointClaim, claim_savepoint, delete_claimed_savepoint
from spark_state_ext.savepoints.manifest_file import read_manifest
from spark_state_ext.savepoints.start_records import is_detached
from tests.helpers.waiting import eventually

pytestmark = [pytest.mark.spark, reads_state]

CLAIMED = Case("claim", "native", "disk")


class World:
    """Jobs and savepoints on a watched disk."""

    def __init__(self, spark: Any, folder: Path) -> None:
        self.spark, self.folder, self.stores = spark, folder, folder / "stores"
        self.ledger = Ledger(folder / "ledger.jsonl", str(self.stores))
        self.options = disk_options(self.ledger)
        # From here on, the ledger notes what this process does.
        self.top = Folder(str(self.stores), self.options)
        self.fed: dict[str, int] = {}

    def query(self, name: str, start: Any = None, root: str = "", buckets: int = 2, **options: Any) -> Query:
        """Return a job."""
        return Query(
            self.folder / name,
            root or str(self.stores / name),
            self.options,
            buckets,
            start_from=start,
            options=options,
        )

    def run(self, query: Query, batches: int, phase: str) -> Query:
        """Run a job over further batches."""
        self.ledger.enter(phase)
        begin = self.fed.get(query.folder.name, 0)
        self.fed[query.folder.name] = begin + batches
        query.feed(range(begin, begin + batches))
        return query.run(self.spark)

    def take_savepoint(self, query: Query, form: str = "native", mode: str = "no_claim") -> tuple[Savepoint, Source]:
        """Take a savepoint of a query; return it and its files."""
        self.ledger.enter("snapshot")
        path = str(self.stores / "savepoint")
        take_savepoint(self.spark, path, query.checkpoint, query.state, form=form, storage_options=self.options)
        manifest = read_manifest(Folder(path, self.options))
        return Savepoint(path, mode=mode, storage_options=self.options), Source(path, manifest)

    def retained_checkpoint(self, query: Query, mode: str = "no_claim") -> tuple[RetainedCheckpoint, Source]:
        """Return the retained checkpoint of a query, and its files."""
        start = RetainedCheckpoint(query.root, str(query.checkpoint), mode=mode, storage_options=self.options)
        return start, Source(f"{query.root}/{OPERATOR}")


@pytest.fixture
def world(spark: Any, tmp_path: Path) -> Iterator[World]:
    """Jobs that retain as few batches as possible."""
    with configured(spark, {"spark.sql.streaming.minBatchesToRetain": str(RETAINED)}):
        yield World(spark, tmp_path)


def test_a_no_claim_start_deletes_nothing_of_a_savepoint(world: World) -> None:
    old = world.run(world.query("old"), 3, "old")
    start, source = world.take_savepoint(old)
    new = world.run(world.query("new", start), 2, "new")
    eventually(lambda: is_detached(new.query_folder))
    world.run(new, 1, "new again")
    assert world.ledger.deletes(source.path) == []
    assert world.ledger.creates(source.path, phases="new") == []
    # The new query does copy what it needs.
    assert {entry.role for entry in world.ledger.creates(new.query_folder.root, phases="new")} >= {
        "start",
        "upload",
        "lease",
    }


@pytest.mark.soak
def test_a_no_claim_start_deletes_only_its_own_hold_in_a_retained_checkpoint(world: World) -> None:
    old = world.run(world.query("old"), 3, "old")
    eventually(lambda: {entry.role for entry in world.ledger.deletes(old.root)} <= {"lease"})
    start, source = world.retained_checkpoint(old)
    # The first run ends with its first batch, before the query is detached; the second run has a plan of its own.
    new = world.run(world.query("new", start), 1, "new")
    assert any("/holds/" in name for name in source.files_in(world.top))
    world.run(new, 1, "new")
    eventually(lambda: not any("/holds/" in name for name in source.files_in(world.top)))
    eventually(lambda: not any(name.startswith("held-") for name in new.query_folder.names()))
    copies = [
        entry
        for entry in world.ledger.creates(new.query_folder.root)
        if entry.role == "start" and ".arrow" in entry.new_path
    ]
    holds = [entry for entry in world.ledger.creates(source.path) if entry.role == "hold"]
    releases = [entry for entry in world.ledger.deletes(source.path) if entry.role == "hold"]
    assert copies
    assert holds[0].at_s < copies[0].at_s <= copies[-1].at_s < releases[-1].at_s
    assert {entry.role for entry in world.ledger.deletes(source.path, phases="new")} <= {"hold", "lease"}


@pytest.mark.soak
@pytest.mark.slow
def test_clean_up_deletes_nothing_under_a_hold_and_only_files_of_its_own_query(world: World) -> None:
    """A native savepoint has files of the same names, and keeps them when the job's clean-up deletes the job's files."""
    query = world.run(world.query("old"), 12, "old")
    _, source = world.take_savepoint(query)
    assert source.manifest is not None
    saved = {(bucket.bucket, file.name) for bucket in source.manifest.buckets for file in bucket.files}
    world.run(query, 18, "old")
    folder = query.query_folder
    hold = Hold.place(folder, "a test")
    # Clean-up visits each bucket once in ten batches.
    world.run(query, 10, "held")
    assert [entry for entry in world.ledger.deletes(folder.root) if entry.role == "clean-up"] == []
    world.ledger.enter("released")
    hold.release()
    world.run(query, 10, "released")
    eventually(lambda: len({entry.path.split("/")[-2] for entry in _find_cleaned_up(world, query)}) == 2)
    deleted = {(int(entry.path.split("/")[-2]), entry.name) for entry in _find_cleaned_up(world, query)}
    # The savepoint has some of the deleted names, and still has these files.
    assert deleted & saved
    assert world.ledger.deletes(source.path) == []
    assert {(int(name.split("/")[-2]), name.split("/")[-1]) for name in source.files_in(world.top)[:-1]} == saved


def _find_cleaned_up(world: World, query: Query) -> list[Any]:
    return [entry for entry in world.ledger.deletes(query.query_folder.root) if entry.role == "clean-up"]


def test_a_claimed_savepoint_but_no_other_file_is_deleted_once_a_batch_is_committed(world: World) -> None:
    old = world.run(world.query("old"), 3, "job 1")
    start, source = world.take_savepoint(old, mode="claim")
    (world.stores / "savepoint" / "tested").mkdir()
    (world.stores / "savepoint" / "tested" / "mine.txt").touch()
    new = world.query("new", start)
    # No call has been given a pointer yet, so no process knows that a batch is committed.
    world.run(new, 1, "job 2")
    assert world.ledger.deletes(source.path) == []
    world.run(new, 1, "job 2")
    eventually(lambda: source.files_in(world.top) == ["savepoint/tested/mine.txt"])
    # This checks which files were deleted, when, by which role, and in which order.
    assert find_violations(CLAIMED, world.ledger, source, new)[0] == []


def test_the_check_of_a_claim_finds_a_deletion_that_is_too_early(world: World) -> None:
    """This is the check of the previous test, in a case that it must reject."""
    old = world.run(world.query("old"), 2, "job 1")
    start, source = world.take_savepoint(old, mode="claim")
    assert source.manifest is not None
    savepoint = Folder(start.path, world.options)
    world.ledger.enter("job 2")
    claim = SavepointClaim(source.manifest.header.id, "a test", "job")
    claim_savepoint(savepoint, claim, ())
    delete_claimed_savepoint(savepoint, "job", lambda: None)
    new = replace(old, committed_s=max(entry.at_s for entry in world.ledger.entries()) + 1)
    violations, _ = find_violations(CLAIMED, world.ledger, source, new)
    assert any("claim consumption has deleted" in text for text in violations)


@pytest.mark.soak
def test_a_job_without_clean_up_deletes_nothing_of_a_claimed_savepoint(world: World) -> None:
    old = world.run(world.query("old"), 3, "old")
    start, source = world.take_savepoint(old, "canonical", "claim")
    before = set(source.files_in(world.top))
    new = world.run(world.query("new", start, clean_up=False), 2, "new")
    eventually(lambda: is_detached(new.query_folder))
    # A job with clean-up deletes the savepoint by the end of this run.
    world.run(new, 2, "new again")
    assert world.ledger.deletes(source.path) == []
    assert set(source.files_in(world.top)) - before == {"savepoint/claim/claim.json"}


@pytest.mark.soak
def test_a_query_whose_folder_was_claimed_neither_writes_nor_deletes_files(world: World) -> None:
    old = world.run(world.query("old"), 3, "old")
    start, source = world.retained_checkpoint(old, "claim")
    new = world.run(world.query("new", start, old.root), 2, "new")
    shutil.rmtree(old.folder / "local")
    with pytest.raises(StreamingQueryException, match="ClaimedError"):
        world.run(old, 1, "old again")
    changes = [
        *world.ledger.creates(source.path, phases="old again"),
        *world.ledger.deletes(source.path, phases="old again"),
    ]
    leases = [
        LeaseLog(Folder(str(path))).newest() for path in Path(old.root, OPERATOR).iterdir() if path.name.count("-") == 4
    ]
    (claimed,) = [lease.record for lease in leases if lease is not None]
    assert claimed.claim is not None
    assert claimed.owner.query == claimed.claim.id
    # Both queries share the driver and the workers here: the driver may still renew or release the new query's lease, and
    # a worker may still upload the new query's last delta.
    changes_by_old = [
        entry
        for entry in changes
        if not any("lease_keeper." in name for name in entry.by)
        and not (entry.to.endswith(".arrow") and claimed.claim.id.encode() in Path(entry.to).read_bytes())
    ]
    assert changes_by_old == []
    assert new.batches == 2


def test_a_query_whose_claim_is_refused_leaves_no_hold(world: World) -> None:
    """Otherwise the owner's clean-up would wait for the hold each time that the query is started again."""
    old = world.run(world.query("old"), 3, "old")
    start, source = world.retained_checkpoint(old, "claim")
    world.run(world.query("new", start, old.root), 2, "new")
    eventually(lambda: not any("/holds/" in name for name in source.files_in(world.top)))
    with pytest.raises(StreamingQueryException, match="ClaimedError"):
        world.run(world.query("third", start, old.root), 1, "third")
    assert not any("/holds/" in name for name in source.files_in(world.top))
    assert [entry.role for entry in world.ledger.creates(source.path, phases="third") if "/holds/" in entry.new_path]


def test_the_ledger_notes_every_way_to_create_and_delete_a_file(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl", str(tmp_path / "disk"))
    folder = Folder(str(tmp_path / "disk"), disk_options(ledger)).child("a")
    local = tmp_path / "local"
    local.write_bytes(b"3")
    folder.put("1", b"1")
    assert folder.create("2", b"2")
    assert not folder.create("2", b"other")
    folder.put_file("3", local)
    other = folder.child("linked")
    assert other.duplicate("3", folder)
    assert other.duplicate("3", folder)
    folder.move("1", "below/1")
    folder.remove("2")
    folder.remove("2")
    assert [entry.path.rpartition("/")[2] for entry in ledger.deletes(folder.root)] == ["1", "2"]
    assert ledger.files_left() == {f"{folder.root}/{name}" for name in ("3", "linked/3", "below/1")}
    (tmp_path / "disk" / "a").rename(tmp_path / "disk" / "b")
    assert {entry.name for entry in Folder(str(tmp_path / "disk")).tree()} == {"b/3", "b/linked/3", "b/below/1"}
    assert ledger.files_left() == {f"{tmp_path}/disk/b/{name}" for name in ("3", "linked/3", "below/1")}
    shutil.rmtree(tmp_path / "disk" / "b")
    assert ledger.files_left() == set()
    assert {entry.role for entry in ledger.deletes(str(tmp_path / "disk" / "b"))} == {USER}


def test_the_ledger_notes_every_way_to_create_and_delete_an_object(s3: Any, tmp_path: Path) -> None:
    root = s3.root(tmp_path.name)
    ledger = Ledger(tmp_path / "ledger.jsonl", root.partition("://")[2])
    folder = Folder(root, s3_options(ledger, s3.options)).child("a")
    local = tmp_path / "local"
    local.write_bytes(b"3")
    folder.put("1", b"1")
    assert folder.create("2", b"2")
    assert not folder.create("2", b"other")
    folder.put_file("3", local)
    assert folder.child("copied").duplicate("3", folder)
    folder.remove("2")
    assert ledger.unanswered(os.getpid()) == set()
    existing = {f"{ledger.below}/a/{name}" for name in ("1", "3", "copied/3")}
    assert {f"{ledger.below}/a/{entry.name}" for entry in folder.tree()} == ledger.files_left() == existing
    folder._fs.rm(ledger.below, recursive=True)
    assert folder.tree() == []
    assert ledger.files_left() == set()


def test_an_unanswered_request_of_a_killed_process_may_have_changed_the_object(s3: Any, tmp_path: Path) -> None:
    root = s3.root(tmp_path.name)
    ledger = Ledger(tmp_path / "ledger.jsonl", root.partition("://")[2])
    ledger.enter("job 2 until it is killed")
    folder = Folder(root, s3_options(ledger, s3.options))
    folder.put("1", b"1")
    folder.put("2", b"2")
    lines = ledger.path.read_text().splitlines(keepends=True)
    ledger.path.write_text("".join(lines[:-1]))
    existing = {f"{ledger.below}/{entry.name}" for entry in folder.tree()}
    assert existing - ledger.files_left() == ledger.unanswered(os.getpid()) == {f"{ledger.below}/2"}
    assert find_differences(Case("claim", "native", "s3", KILLED), ledger, existing) == []
    # If no process was killed, the difference is an error.
    assert find_differences(CLAIMED, ledger, existing) == [f"the ledger and the store differ about {ledger.below}/2"]
