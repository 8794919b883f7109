"""Erasing keys from the savepoint that a query began with: of another operator, moved, deleted or damaged."""

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
# A search of bytes cannot find this key, because its text is shorter than four bytes.
SHORT: Key = ("ab", 1.0)
KEYS = {"name": [SHORT[0]], "x": [SHORT[1]]}


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    """Make a job whose files have never had the key."""
    job = Job(tmp_path / "root", tmp_path, buckets=BUCKETS)
    for count in range(4):
        job.batch({key: Row(count) for key in EVERYWHERE})
    yield job
    job.close()


@pytest.fixture
def sums(tmp_path: Path) -> Folder:
    """Make a savepoint of another operator, which has the key."""
    other = Job(tmp_path / "elsewhere", tmp_path, operator="sums", query_id="sums", buckets=BUCKETS)
    other.batch({SHORT: Row(1), **{key: Row(1) for key in EVERYWHERE}})
    savepoint = savepoint_of(other, tmp_path / "of sums")
    other.close()
    return savepoint


def note_beginning(job: Job, savepoint: Folder, mode: str = "no_claim") -> None:
    """Record that the job began with the operator `sums` of a savepoint."""
    job.folder.remove(START_NAME)
    note_start(job.folder, StartRecord("savepoint", savepoint.root, SAVEPOINT_ID, 0, mode, "sums"))
    note_detached(job.folder)


def erase(job: Job, *savepoints: Folder, **more: Any) -> ErasedHistory:
    roots = [savepoint.root for savepoint in savepoints]
    return erase_history(str(job.root), KEYS, operator="counts", inline_batches=0, savepoints=roots, **more)


def test_keys_are_erased_from_the_savepoint_operator_that_the_query_began_with(job: Job, sums: Folder) -> None:
    note_beginning(job, sums)
    for erased in (erase(job), erase(job, sums)):
        assert not erased.receipt.absent
        assert erased.savepoints_with_keys == (sums.root,)
        assert {match.rows for match in erased.receipt.found} == {1}
    assert not erase_scan(str(job.root), KEYS, operator="counts", savepoints=[sums.root]).absent
    erased = erase(job, sums, write_savepoints=True)
    assert (erased.savepoints, erased.receipt.absent, erased.savepoints_with_keys) == (1, True, ())
    assert set().union(*map(as_model, savepoint_tables(sums.root))) == set(EVERYWHERE)


def test_a_savepoint_without_a_known_operator_is_reported_as_unread(job: Job, sums: Folder) -> None:
    receipt = erase(job, sums).receipt
    assert not receipt.absent
    (unread,) = (place for place in receipt.out_of_reach if place.unread)
    assert (unread.where, receipt.found) == (sums.root, ())
    assert "it has no operator 'counts' but sums, and no query below the root began with it" in unread.why
    with pytest.raises(UsageError, match="no operator 'counts'; it has sums"):
        erase(job, sums, write_savepoints=True)
    # A damaged start record hides whether the query began with a savepoint, and with which.
    job.folder.put(START_NAME, b"{}")
    receipt = erase_scan(str(job.root), KEYS, operator="counts")
    (unread,) = (place for place in receipt.out_of_reach if place.unread)
    assert unread.where == job.folder.where(START_NAME)


def find_reasons(erased: ErasedHistory, savepoint: Folder) -> list[str]:
    return [place.why for place in erased.receipt.out_of_reach if place.where == savepoint.root]


def test_a_missing_or_damaged_savepoint_is_reported_with_what_to_do(job: Job, sums: Folder, tmp_path: Path) -> None:
    note_beginning(job, sums)
    moved = Folder(shutil.copytree(sums.root, tmp_path / "moved").as_posix())
    manifest = sums.get("savepoint.arrow")
    sums.put("savepoint.arrow", manifest[:-20])
    erased = erase(job)
    assert not erased.receipt.absent
    assert "began with it, but it cannot be read" in find_reasons(erased, sums)[0]
    shutil.rmtree(sums.root)
    erased = erase(job)
    assert erased.receipt.absent
    (why,) = find_reasons(erased, sums)
    assert why == (
        "the query began with it, but it is missing: if you moved it, name its new path in savepoints; if you deleted "
        "it, there is nothing left to do"
    )
    erased = erase(job, moved)
    assert find_reasons(erased, sums) == []
    assert erased.savepoints_with_keys == (moved.root,)
    # The query claimed the savepoint and has deleted it itself.
    note_beginning(job, sums, "claim")
    assert find_reasons(erase(job), sums) == []
    job.folder.remove("detached.json")
    assert "it is missing" in find_reasons(erase(job), sums)[0]
