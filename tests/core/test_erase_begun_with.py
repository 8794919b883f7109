"""The savepoint that a query began with, when keys are erased: under another operator's name, moved, deleted or damaged."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from reading_support import Job, as_model, bucket_of
from small_root import SAVEPOINT_ID, savepoint_of

from spark_state_ext import erase_history, erase_scan, savepoint_tables
from spark_state_ext.erasing.history import ErasedHistory
from spark_state_ext.errors import UsageError
from spark_state_ext.files.folder import Folder
from spark_state_ext.files.layout import START_NAME
from spark_state_ext.savepoints.start_records import StartRecord, note_detached, note_start
from spark_state_ext.testing.model import KEYS as OTHERS
from spark_state_ext.testing.model import Key, Row

BUCKETS = 2
EVERYWHERE = [next(key for key in OTHERS if bucket_of(key, BUCKETS) == bucket) for bucket in range(BUCKETS)]
# No text of four bytes: a search of bytes cannot tell it.
SHORT: Key = ("ab", 1.0)
KEYS = {"name": [SHORT[0]], "x": [SHORT[1]]}


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    """A job whose files have never had the key."""
    made = Job(tmp_path / "root", tmp_path, buckets=BUCKETS)
    for at in range(4):
        made.batch({key: Row(at) for key in EVERYWHERE})
    yield made
    made.close()


@pytest.fixture
def sums(tmp_path: Path) -> Folder:
    """A savepoint of another operator, which has the key."""
    other = Job(tmp_path / "elsewhere", tmp_path, operator="sums", query_id="sums", buckets=BUCKETS)
    other.batch({SHORT: Row(1), **{key: Row(1) for key in EVERYWHERE}})
    made = savepoint_of(other, tmp_path / "of sums")
    other.close()
    return made


def begin(job: Job, savepoint: Folder, mode: str = "no_claim") -> None:
    """Have it that the job began with a savepoint's operator `sums`."""
    job.folder.remove(START_NAME)
    note_start(job.folder, StartRecord("savepoint", savepoint.root, SAVEPOINT_ID, 0, mode, "sums"))
    note_detached(job.folder)


def erase(job: Job, *savepoints: Folder, **more: Any) -> ErasedHistory:
    named = [it.root for it in savepoints]
    return erase_history(str(job.root), KEYS, operator="counts", inline_batches=0, savepoints=named, **more)


def test_rows_of_the_operator_that_the_query_began_with_are_compared(job: Job, sums: Folder) -> None:
    begin(job, sums)
    for done in (erase(job), erase(job, sums)):
        assert not done.receipt.absent
        assert done.savepoints_with_keys == (sums.root,)
        assert {it.rows for it in done.receipt.found} == {1}
    assert not erase_scan(str(job.root), KEYS, operator="counts", savepoints=[sums.root]).absent
    done = erase(job, sums, write_savepoints=True)
    assert (done.savepoints, done.receipt.absent, done.savepoints_with_keys) == (1, True, ())
    assert set().union(*map(as_model, savepoint_tables(sums.root))) == set(EVERYWHERE)


def test_a_savepoint_of_which_no_operator_is_known_is_not_read(job: Job, sums: Folder) -> None:
    receipt = erase(job, sums).receipt
    assert not receipt.absent
    (unread,) = (it for it in receipt.out_of_reach if it.unread)
    assert (unread.where, receipt.found) == (sums.root, ())
    assert "it has no operator 'counts' but sums, and no query below the root began with it" in unread.why
    with pytest.raises(UsageError, match="no operator 'counts'; it has sums"):
        erase(job, sums, write_savepoints=True)
    # Nothing tells with what the query began, or whether.
    job.folder.put(START_NAME, b"{}")
    receipt = erase_scan(str(job.root), KEYS, operator="counts")
    (unread,) = (it for it in receipt.out_of_reach if it.unread)
    assert unread.where == job.folder.where(START_NAME)


def told(done: ErasedHistory, savepoint: Folder) -> list[str]:
    return [it.why for it in done.receipt.out_of_reach if it.where == savepoint.root]


def test_one_that_is_not_where_it_was_is_told_with_what_to_do(job: Job, sums: Folder, tmp_path: Path) -> None:
    begin(job, sums)
    moved = Folder(shutil.copytree(sums.root, tmp_path / "moved").as_posix())
    manifest = sums.get("savepoint.arrow")
    sums.put("savepoint.arrow", manifest[:-20])
    done = erase(job)
    assert not done.receipt.absent
    assert "began with it, but it cannot be read" in told(done, sums)[0]
    shutil.rmtree(sums.root)
    done = erase(job)
    assert done.receipt.absent
    (why,) = told(done, sums)
    assert why == (
        "the query began with it, but it is missing: if you moved it, name its new path in savepoints; if you deleted "
        "it, there is nothing left to do"
    )
    done = erase(job, moved)
    assert told(done, sums) == []
    assert done.savepoints_with_keys == (moved.root,)
    # The query had claimed it, and has deleted it itself.
    begin(job, sums, "claim")
    assert told(erase(job), sums) == []
    job.folder.remove("detached.json")
    assert "it is missing" in told(erase(job), sums)[0]
