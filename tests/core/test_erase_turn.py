"""How calls carry out erase requests: after lost folders, with unreadable files, and on stores that fail."""

from __future__ import annotations

import logging
import shutil
import uuid
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from core_support import first_pointer

from arrow_schemas import CheckpointRef, LineageEntry, OperatorFile, Pointer, RowSchema
from arrow_schemas.erase import EraseMark, EraseRequest, format_request_name
from spark_state_ext import erase_keys, erase_status, withdraw_erasure
from spark_state_ext.engine.erase_requests import EraseTurn, EraseWatch
from spark_state_ext.engine.erased_rows import ErasedRows
from spark_state_ext.errors import MissingCheckpointError, StorageError, UsageError
from spark_state_ext.files.erase_requests import EraseFolder
from spark_state_ext.files.folder import Folder

SCHEMA = RowSchema((pa.field("name", pa.string()),), (pa.field("n", pa.int64()),))
_JSON = '{"type":"struct","fields":[{"name":"%s","type":"%s","nullable":true,"metadata":{}}]}'


class Query:
    """A query with one bucket, whose state is a set of keys; its calls carry out erase requests."""

    def __init__(self, root: Path) -> None:
        self.root, self.watch, self.batch = root, EraseWatch(), 0
        file = OperatorFile("count", "q", 1, _JSON % ("name", "string"), _JSON % ("n", "long"))
        self.files.put("operator_0.json", file.encode())
        lineage = (LineageEntry(CheckpointRef(1, "a" * 32), 10),)
        self.pointer: Pointer = replace(first_pointer(), bucket=0, lineage=lineage, heartbeats=1)
        self.keys = {"a", "b", "c"}
        self.format_1_too, self.lists = False, True

    @property
    def files(self) -> Folder:
        return Folder(str(self.root)).child("count", "q")

    def add_request(self, *keys: str) -> int:
        return erase_keys(str(self.root), list(keys), operator="count")[0].number

    def states(self) -> list[str]:
        return [status.state for status in erase_status(str(self.root), operator="count")]

    def run_batches(self, batches: int = 1, timeout_s: float = 0) -> set[str]:
        for _ in range(batches):
            self.batch += 1
            turn = EraseTurn(
                self.watch, self.files, SCHEMA, self.pointer, self.batch, self.format_1_too, timeout_s, self.lists
            )
            handled = turn.carry_out(self._erase)
            turn.look_after(lambda: True, lambda: None)
            pointer = replace(self.pointer, heartbeats=self.pointer.heartbeats + 1)
            self.pointer = turn.marked(pointer, handled)
        return self.keys

    def _erase(self, columns: Sequence[pa.Array]) -> int:
        erased = set(columns[0].to_pylist()) & self.keys
        self.keys -= erased
        return len(erased)


def test_new_requests_are_carried_out_after_the_erase_folder_was_lost(tmp_path: Path) -> None:
    query = Query(tmp_path / "a")
    query.add_request("a")
    assert query.run_batches(3) == {"b", "c"}
    assert query.states() == ["done"]
    # The folder is lost, as after a move to another root while the query runs.
    shutil.rmtree(tmp_path / "a" / "count" / "q" / "erase")
    assert query.run_batches() == {"b", "c"}
    assert query.add_request("b") == 1
    assert query.states() == ["waiting"]
    assert query.run_batches() == {"c"}
    assert query.states() == ["waiting"]
    assert query.run_batches(2) == {"c"}
    assert query.states() == ["done"]


def test_a_query_that_does_not_list_requests_reads_no_folder_and_keeps_its_mark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    query = Query(tmp_path)
    query.add_request("a")
    query.run_batches(2)
    mark = query.pointer.erased
    assert mark is not None
    query.add_request("b")
    query.lists = False
    with monkeypatch.context() as patched:
        patched.setattr(Folder, "names", lambda *_: pytest.fail("it has listed a folder"))
        patched.setattr(Folder, "entries", lambda *_: pytest.fail("it has listed a folder"))
        assert query.run_batches(3) == {"b", "c"}
    assert query.pointer.erased == mark
    query.lists = True
    assert query.run_batches(3) == {"c"}
    assert query.states() == ["done", "done"]


def test_a_request_is_done_later_if_the_run_did_not_list_requests(tmp_path: Path) -> None:
    query = Query(tmp_path)
    query.add_request("a")
    assert query.run_batches() == {"b", "c"}
    query.lists = False
    query.run_batches(2)
    query.lists = True
    query.run_batches()
    assert query.states() == ["waiting"], "other buckets may carry it out in this batch"
    query.run_batches()
    assert query.states() == ["done"]


def test_a_request_removed_by_a_user_does_not_stop_later_ones(tmp_path: Path) -> None:
    query = Query(tmp_path)
    assert [query.add_request("a"), query.add_request("nobody")] == [1, 2]
    query.run_batches()
    EraseFolder(query.files).drop(2)
    assert query.add_request("b") == 2
    assert query.run_batches(4) == {"c"}
    assert query.states() == ["done", "done"]
    # The removed request is followed by others.
    query.add_request("x")
    query.add_request("y")
    query.run_batches()
    EraseFolder(query.files).drop(3)
    assert query.add_request("c") == 5
    assert query.run_batches(3) == set()
    assert query.states() == ["done"] * 5


def test_a_request_that_replaced_another_of_its_number_is_carried_out(tmp_path: Path) -> None:
    """In a store without exclusive creation, two requests can get the same number, and the second replaces the first."""
    query = Query(tmp_path)
    query.add_request("a")
    query.run_batches()
    folder = EraseFolder(query.files)
    folder.replace(1, EraseRequest(uuid.uuid4().hex, "count", 1, pa.record_batch({"name": ["b"]}), "0"))
    assert query.run_batches(3) == {"c"}
    assert query.states() == ["done"]


def test_a_request_removed_during_the_batch_does_not_stop_later_ones(tmp_path: Path) -> None:
    """The mark is of another request, so the bucket carries out all requests of the batch's listing."""
    query = Query(tmp_path)
    query.add_request("a")
    query.run_batches(3)
    assert query.states() == ["done"]
    query.pointer = replace(query.pointer, erased=EraseMark(1, 1, 1, "1" * 32))
    query.add_request("b")
    query.watch.list_requests(query.files, query.batch + 1)
    EraseFolder(query.files).drop(1)
    assert query.run_batches() == {"c"}


def test_state_older_than_a_removed_request_is_refused_despite_a_foreign_mark(tmp_path: Path) -> None:
    query = Query(tmp_path)
    query.pointer = replace(query.pointer, erased=EraseMark(4, 0, 0, "4" * 32))
    before = query.pointer
    query.add_request("a")
    query.run_batches(3)
    EraseFolder(query.files).drop(1)
    query.run_batches()
    query.pointer = before
    with pytest.raises(MissingCheckpointError, match="before erase request 1"):
        query.run_batches()


def test_format_1_is_refused_after_a_request_was_carried_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    query = Query(tmp_path)
    query.format_1_too = True
    query.add_request("a")
    with caplog.at_level(logging.WARNING):
        assert query.run_batches() == {"a", "b", "c"}
    assert "wait (1)" in caplog.text
    assert query.pointer.erased is None
    query.format_1_too = False
    query.run_batches()
    query.format_1_too = True
    with pytest.raises(UsageError, match=r"erase requests up to 1 .* keep pointer_write='v2'"):
        query.run_batches()
    query.format_1_too = False
    assert query.run_batches(2) == {"b", "c"}
    assert query.states() == ["done"]


def test_a_request_that_cannot_be_read_waits_until_it_is_withdrawn(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    query = Query(tmp_path)
    for key in "abc":
        query.add_request(key)
    path = tmp_path / "count" / "q" / "erase" / format_request_name(2)
    path.write_bytes(path.read_bytes()[:-40])
    with caplog.at_level(logging.ERROR):
        assert query.run_batches(3) == {"b", "c"}
    assert "erase request 2 of" in caplog.text
    assert query.states() == ["done", "unreadable", "waiting"]
    withdraw_erasure(str(tmp_path), 2, operator="count")
    assert query.run_batches(3) == {"b"}
    assert query.states() == ["done", "done", "done"]
    # A user may pass the number as text, because notebooks do not check types.
    for number in (0, 4, "2"):
        with pytest.raises(UsageError, match="no erase request"):
            withdraw_erasure(str(tmp_path), number, operator="count")  # type: ignore[arg-type]


def test_a_withdrawn_request_erases_no_key(tmp_path: Path) -> None:
    query = Query(tmp_path)
    query.add_request("a")
    withdraw_erasure(str(tmp_path), query.add_request("b"), operator="count")
    assert query.run_batches(3) == {"b", "c"}
    assert query.states() == ["done", "done"]


def test_a_listing_that_fails_once_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    query, list_names = Query(tmp_path), Folder.names
    failed: list[str] = []
    query.add_request("a")

    def fail_once(folder: Folder) -> list[str]:
        if not failed:
            failed.append(folder.root)
            raise StorageError("503 Slow Down")
        return list_names(folder)

    monkeypatch.setattr(Folder, "names", fail_once)
    assert query.run_batches(timeout_s=30) == {"b", "c"}
    assert failed


def test_small_requests_share_one_pass_and_each_large_one_takes_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    query = Query(tmp_path)
    passes: list[int] = []
    erase = query._erase

    def count_and_erase(columns: Sequence[pa.Array]) -> int:
        passes.append(len(columns[0]))
        return erase(columns)

    monkeypatch.setattr(query, "_erase", count_and_erase)
    for key in "abab":
        query.add_request(key)
    query.run_batches()
    monkeypatch.setattr("spark_state_ext.engine.erase_requests._REQUEST_BYTES_MAX", 20)
    for key in "cab":
        query.add_request(key * 15)
    query.run_batches()
    assert passes == [4, 1, 1, 1]
    assert len(query.watch._requests) == 1


def test_a_row_that_two_requests_name_is_erased_once() -> None:
    def make_rows(*keys: int) -> ErasedRows:
        rows = [{"key_hash": key, "key.name": str(key), "defined": False, "deleted": True} for key in keys]
        return ErasedRows(SCHEMA, pa.RecordBatch.from_pylist(rows, schema=SCHEMA.arrow))

    merged = make_rows(1, 4).with_those(make_rows(0, 4, 7)).with_those(ErasedRows(SCHEMA)).with_those(make_rows(1))
    assert merged.rows.column(0).to_pylist() == [0, 1, 4, 7]
    assert len(ErasedRows(SCHEMA).with_those(make_rows(3))) == 1
