"""Who may delete what of a snapshot (`docs/ownership.md`), a test a rule, by a ledger of every create and delete."""

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
from savepoint_verdict import Source, found_wrong, unlike

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
    """Jobs and savepoints on a disk that is watched."""

    def __init__(self, spark: Any, folder: Path) -> None:
        self.spark, self.folder, self.stores = spark, folder, folder / "stores"
        self.ledger = Ledger(folder / "ledger.jsonl", str(self.stores))
        self.options = disk_options(self.ledger)
        # This process is watched from now on.
        self.top = Folder(str(self.stores), self.options)
        self.fed: dict[str, int] = {}

    def query(self, name: str, start: Any = None, root: str = "", buckets: int = 2, **options: Any) -> Query:
        """A job."""
        return Query(
            self.folder / name,
            root or str(self.stores / name),
            self.options,
            buckets,
            start_from=start,
            options=options,
        )

    def run(self, query: Query, batches: int, phase: str) -> Query:
        """Run it over so many more batches."""
        self.ledger.enter(phase)
        begin = self.fed.get(query.folder.name, 0)
        self.fed[query.folder.name] = begin + batches
        query.feed(range(begin, begin + batches))
        return query.run(self.spark)

    def saved(self, query: Query, form: str = "native", mode: str = "no_claim") -> tuple[Savepoint, Source]:
        """A savepoint of a query, and its files."""
        self.ledger.enter("snapshot")
        path = str(self.stores / "savepoint")
        take_savepoint(self.spark, path, query.checkpoint, query.state, form=form, storage_options=self.options)
        manifest = read_manifest(Folder(path, self.options))
        return Savepoint(path, mode=mode, storage_options=self.options), Source(path, manifest)

    def left(self, query: Query, mode: str = "no_claim") -> tuple[RetainedCheckpoint, Source]:
        """What a query has left, and its files."""
        start = RetainedCheckpoint(query.root, str(query.checkpoint), mode=mode, storage_options=self.options)
        return start, Source(f"{query.root}/{OPERATOR}")


@pytest.fixture
def world(spark: Any, tmp_path: Path) -> Iterator[World]:
    """A world, with as few batches retained as there may be."""
    with configured(spark, {"spark.sql.streaming.minBatchesToRetain": str(RETAINED)}):
        yield World(spark, tmp_path)


def test_a_start_without_a_claim_deletes_nothing_of_a_savepoint(world: World) -> None:
    old = world.run(world.query("old"), 3, "old")
    start, source = world.saved(old)
    new = world.run(world.query("new", start), 2, "new")
    eventually(lambda: is_detached(new.query_folder))
    world.run(new, 1, "new again")
    assert world.ledger.deletes(source.path) == []
    assert world.ledger.creates(source.path, phases="new") == []
    # It has what it needs of it, though.
    assert {it.role for it in world.ledger.creates(new.query_folder.root, phases="new")} >= {"start", "upload", "lease"}


def test_a_start_without_a_claim_deletes_nothing_but_its_hold_of_what_another_query_left(world: World) -> None:
    old = world.run(world.query("old"), 3, "old")
    eventually(lambda: {it.role for it in world.ledger.deletes(old.root)} <= {"lease"})
    start, source = world.left(old)
    # Its first run ends with its first batch, and its next one has a plan of its own.
    new = world.run(world.query("new", start), 1, "new")
    assert any("/holds/" in name for name in source.files_in(world.top))
    world.run(new, 1, "new")
    eventually(lambda: not any("/holds/" in name for name in source.files_in(world.top)))
    eventually(lambda: not any(name.startswith("held-") for name in new.query_folder.names()))
    copied = [it for it in world.ledger.creates(new.query_folder.root) if it.role == "start" and ".arrow" in it.made]
    holds = [it for it in world.ledger.creates(source.path) if it.role == "hold"]
    released = [it for it in world.ledger.deletes(source.path) if it.role == "hold"]
    assert copied
    assert holds[0].at_s < copied[0].at_s <= copied[-1].at_s < released[-1].at_s
    assert {it.role for it in world.ledger.deletes(source.path, phases="new")} <= {"hold", "lease"}


@pytest.mark.soak
@pytest.mark.slow
def test_clean_up_deletes_what_is_held_by_nobody_and_of_its_own_query_only(world: World) -> None:
    """A job's clean-up deletes its own names of files, of which its native savepoint has others; and none under a hold."""
    query = world.run(world.query("old"), 12, "old")
    _, source = world.saved(query)
    assert source.manifest is not None
    saved = {(it.bucket, file.name) for it in source.manifest.buckets for file in it.files}
    world.run(query, 18, "old")
    files = query.query_folder
    hold = Hold.place(files, "a test")
    # Each bucket has its turn in ten batches.
    world.run(query, 10, "held")
    assert [it for it in world.ledger.deletes(files.root) if it.role == "clean-up"] == []
    world.ledger.enter("released")
    hold.release()
    world.run(query, 10, "released")
    eventually(lambda: len({it.path.split("/")[-2] for it in _cleaned(world, query)}) == 2)
    gone = {(int(it.path.split("/")[-2]), it.name) for it in _cleaned(world, query)}
    # Some of what went is in the savepoint, which still has it.
    assert gone & saved
    assert world.ledger.deletes(source.path) == []
    assert {(int(name.split("/")[-2]), name.split("/")[-1]) for name in source.files_in(world.top)[:-1]} == saved


def _cleaned(world: World, query: Query) -> list[Any]:
    return [it for it in world.ledger.deletes(query.query_folder.root) if it.role == "clean-up"]


def test_a_claimed_savepoint_goes_once_a_batch_is_committed_and_nothing_beside_it(world: World) -> None:
    old = world.run(world.query("old"), 3, "job 1")
    start, source = world.saved(old, mode="claim")
    (world.stores / "savepoint" / "tested").mkdir()
    (world.stores / "savepoint" / "tested" / "mine.txt").touch()
    new = world.query("new", start)
    # No call was handed a pointer yet, so nobody knows that a batch is committed.
    world.run(new, 1, "job 2")
    assert world.ledger.deletes(source.path) == []
    world.run(new, 1, "job 2")
    eventually(lambda: source.files_in(world.top) == ["savepoint/tested/mine.txt"])
    # What, when, by whom, and in which order.
    assert found_wrong(CLAIMED, world.ledger, source, new)[0] == []


def test_what_a_claim_is_judged_by_finds_a_deletion_too_early(world: World) -> None:
    """The judgement of the test before this one, where it must not be in favour."""
    old = world.run(world.query("old"), 2, "job 1")
    start, source = world.saved(old, mode="claim")
    assert source.manifest is not None
    savepoint = Folder(start.path, world.options)
    world.ledger.enter("job 2")
    claim = SavepointClaim(source.manifest.header.id, "a test", "job")
    claim_savepoint(savepoint, claim, ())
    delete_claimed_savepoint(savepoint, "job", lambda: None)
    new = replace(old, committed_s=max(it.at_s for it in world.ledger.entries()) + 1)
    wrong, _ = found_wrong(CLAIMED, world.ledger, source, new)
    assert any("claim consumption has deleted" in text for text in wrong)


def test_without_clean_up_nothing_that_was_claimed_is_deleted(world: World) -> None:
    old = world.run(world.query("old"), 3, "old")
    start, source = world.saved(old, "canonical", "claim")
    before = set(source.files_in(world.top))
    new = world.run(world.query("new", start, clean_up=False), 2, "new")
    eventually(lambda: is_detached(new.query_folder))
    # Where it would be deleted if it were not by then.
    world.run(new, 2, "new again")
    assert world.ledger.deletes(source.path) == []
    assert set(source.files_in(world.top)) - before == {"savepoint/claim/claim.json"}


@pytest.mark.soak
def test_a_query_whose_folder_was_claimed_neither_writes_nor_deletes(world: World) -> None:
    old = world.run(world.query("old"), 3, "old")
    start, source = world.left(old, "claim")
    new = world.run(world.query("new", start, old.root), 2, "new")
    shutil.rmtree(old.folder / "local")
    with pytest.raises(StreamingQueryException, match="ClaimedError"):
        world.run(old, 1, "old again")
    done = [
        *world.ledger.creates(source.path, phases="old again"),
        *world.ledger.deletes(source.path, phases="old again"),
    ]
    leases = [
        LeaseLog(Folder(str(it))).newest() for it in Path(old.root, OPERATOR).iterdir() if it.name.count("-") == 4
    ]
    (claimed,) = [found.record for found in leases if found is not None]
    assert claimed.claim is not None
    assert claimed.owner.query == claimed.claim.id
    # The driver, which is that of both here, may still renew the new query's lease, or release it; and a worker, which
    # is that of both, may still upload the new query's last delta.
    by_the_old = [
        it
        for it in done
        if not any("lease_keeper." in name for name in it.by)
        and not (it.to.endswith(".arrow") and claimed.claim.id.encode() in Path(it.to).read_bytes())
    ]
    assert by_the_old == []
    assert new.batches == 2


def test_a_query_that_may_not_claim_holds_nothing(world: World) -> None:
    """Else the owner's clean-up would wait for it, for as long as somebody starts it again and again."""
    old = world.run(world.query("old"), 3, "old")
    start, source = world.left(old, "claim")
    world.run(world.query("new", start, old.root), 2, "new")
    eventually(lambda: not any("/holds/" in name for name in source.files_in(world.top)))
    with pytest.raises(StreamingQueryException, match="ClaimedError"):
        world.run(world.query("third", start, old.root), 1, "third")
    assert not any("/holds/" in name for name in source.files_in(world.top))
    assert [it.role for it in world.ledger.creates(source.path, phases="third") if "/holds/" in it.made]


def test_the_ledger_tells_of_every_way_to_make_and_to_delete_a_file(tmp_path: Path) -> None:
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
    assert [it.path.rpartition("/")[2] for it in ledger.deletes(folder.root)] == ["1", "2"]
    assert ledger.files_left() == {f"{folder.root}/{name}" for name in ("3", "linked/3", "below/1")}
    (tmp_path / "disk" / "a").rename(tmp_path / "disk" / "b")
    assert {it.name for it in Folder(str(tmp_path / "disk")).tree()} == {"b/3", "b/linked/3", "b/below/1"}
    assert ledger.files_left() == {f"{tmp_path}/disk/b/{name}" for name in ("3", "linked/3", "below/1")}
    shutil.rmtree(tmp_path / "disk" / "b")
    assert ledger.files_left() == set()
    assert {it.role for it in ledger.deletes(str(tmp_path / "disk" / "b"))} == {USER}


def test_the_ledger_tells_of_every_way_to_make_and_to_delete_an_object(s3: Any, tmp_path: Path) -> None:
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
    there = {f"{ledger.below}/a/{name}" for name in ("1", "3", "copied/3")}
    assert {f"{ledger.below}/a/{it.name}" for it in folder.tree()} == ledger.files_left() == there
    folder._fs.rm(ledger.below, recursive=True)
    assert folder.tree() == []
    assert ledger.files_left() == set()


def test_a_request_that_was_cut_off_may_have_come_to_the_server(s3: Any, tmp_path: Path) -> None:
    root = s3.root(tmp_path.name)
    ledger = Ledger(tmp_path / "ledger.jsonl", root.partition("://")[2])
    ledger.enter("job 2 until it is killed")
    folder = Folder(root, s3_options(ledger, s3.options))
    folder.put("1", b"1")
    folder.put("2", b"2")
    lines = ledger.path.read_text().splitlines(keepends=True)
    ledger.path.write_text("".join(lines[:-1]))
    there = {f"{ledger.below}/{it.name}" for it in folder.tree()}
    assert there - ledger.files_left() == ledger.unanswered(os.getpid()) == {f"{ledger.below}/2"}
    assert unlike(Case("claim", "native", "s3", KILLED), ledger, there) == []
    # Of a job that nobody has killed it is a mistake.
    assert unlike(CLAIMED, ledger, there) == [f"the ledger and the store differ about {ledger.below}/2"]
