"""What a call does about erase requests: folders that are not the mark's, files that cannot be read, stores that fail."""

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
    """One bucket of a query, as its calls see its erase folder; its state is a set of keys."""

    def __init__(self, root: Path) -> None:
        self.root, self.watch, self.batch = root, EraseWatch(), 0
        file = OperatorFile("count", "q", 1, _JSON % ("name", "string"), _JSON % ("n", "long"))
        self.files.put("operator_0.json", file.encode())
        lineage = (LineageEntry(CheckpointRef(1, "a" * 32), 10),)
        self.pointer: Pointer = replace(first_pointer(), bucket=0, lineage=lineage, heartbeats=1)
        self.keys = {"a", "b", "c"}
        self.format_1_too, self.looks = False, True

    @property
    def files(self) -> Folder:
        return Folder(str(self.root)).child("count", "q")

    def ask(self, *keys: str) -> int:
        return erase_keys(str(self.root), list(keys), operator="count")[0].number

    def states(self) -> list[str]:
        return [it.state for it in erase_status(str(self.root), operator="count")]

    def go_on(self, batches: int = 1, timeout_s: float = 0) -> set[str]:
        for _ in range(batches):
            self.batch += 1
            turn = EraseTurn(
                self.watch, self.files, SCHEMA, self.pointer, self.batch, self.format_1_too, timeout_s, self.looks
            )
            dealt = turn.carry_out(self._erase)
            turn.look_after(lambda: True, lambda: None)
            made = replace(self.pointer, heartbeats=self.pointer.heartbeats + 1)
            self.pointer = turn.marked(made, dealt)
        return self.keys

    def _erase(self, columns: Sequence[pa.Array]) -> int:
        gone = set(columns[0].to_pylist()) & self.keys
        self.keys -= gone
        return len(gone)


def test_a_folder_that_lost_its_requests_has_new_ones_carried_out(tmp_path: Path) -> None:
    query = Query(tmp_path / "a")
    query.ask("a")
    assert query.go_on(3) == {"b", "c"}
    assert query.states() == ["done"]
    # As after a move to another root while the query runs.
    shutil.rmtree(tmp_path / "a" / "count" / "q" / "erase")
    assert query.go_on() == {"b", "c"}
    assert query.ask("b") == 1
    assert query.states() == ["waiting"]
    assert query.go_on() == {"c"}
    assert query.states() == ["waiting"]
    assert query.go_on(2) == {"c"}
    assert query.states() == ["done"]


def test_a_query_that_does_not_look_asks_the_store_for_nothing_and_keeps_its_mark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    query = Query(tmp_path)
    query.ask("a")
    query.go_on(2)
    mark = query.pointer.erased
    assert mark is not None
    query.ask("b")
    query.looks = False
    with monkeypatch.context() as patched:
        patched.setattr(Folder, "names", lambda *_: pytest.fail("it has listed a folder"))
        patched.setattr(Folder, "entries", lambda *_: pytest.fail("it has listed a folder"))
        assert query.go_on(3) == {"b", "c"}
    assert query.pointer.erased == mark
    query.looks = True
    assert query.go_on(3) == {"c"}
    assert query.states() == ["done", "done"]


def test_a_run_that_does_not_look_puts_off_what_is_known_to_be_done(tmp_path: Path) -> None:
    query = Query(tmp_path)
    query.ask("a")
    assert query.go_on() == {"b", "c"}
    query.looks = False
    query.go_on(2)
    query.looks = True
    query.go_on()
    assert query.states() == ["waiting"], "other buckets may carry it out in this batch"
    query.go_on()
    assert query.states() == ["done"]


def test_a_request_that_somebody_removed_hides_no_other(tmp_path: Path) -> None:
    query = Query(tmp_path)
    assert [query.ask("a"), query.ask("nobody")] == [1, 2]
    query.go_on()
    EraseFolder(query.files).drop(2)
    assert query.ask("b") == 2
    assert query.go_on(4) == {"c"}
    assert query.states() == ["done", "done"]
    # One from before others.
    query.ask("x")
    query.ask("y")
    query.go_on()
    EraseFolder(query.files).drop(3)
    assert query.ask("c") == 5
    assert query.go_on(3) == set()
    assert query.states() == ["done"] * 5


def test_a_request_that_another_took_the_place_of_is_carried_out_again(tmp_path: Path) -> None:
    """Stores that do not create exclusively let two have one number."""
    query = Query(tmp_path)
    query.ask("a")
    query.go_on()
    folder = EraseFolder(query.files)
    folder.replace(1, EraseRequest(uuid.uuid4().hex, "count", 1, pa.record_batch({"name": ["b"]}), "0"))
    assert query.go_on(3) == {"c"}
    assert query.states() == ["done"]


def test_a_request_that_the_first_bucket_removes_within_the_batch_holds_up_no_other(tmp_path: Path) -> None:
    """The mark is of another request, as that file was damaged; so the bucket reads all, by the batch's listing."""
    query = Query(tmp_path)
    query.ask("a")
    query.go_on(3)
    assert query.states() == ["done"]
    query.pointer = replace(query.pointer, erased=EraseMark(1, 1, 1, "1" * 32))
    query.ask("b")
    query.watch.list_requests(query.files, query.batch + 1)
    EraseFolder(query.files).drop(1)
    assert query.go_on() == {"c"}


def test_a_state_from_before_a_request_that_is_gone_is_refused_whatever_its_mark(tmp_path: Path) -> None:
    query = Query(tmp_path)
    query.pointer = replace(query.pointer, erased=EraseMark(4, 0, 0, "4" * 32))
    before = query.pointer
    query.ask("a")
    query.go_on(3)
    EraseFolder(query.files).drop(1)
    query.go_on()
    query.pointer = before
    with pytest.raises(MissingCheckpointError, match="before erase request 1"):
        query.go_on()


def test_format_1_is_refused_after_a_request_was_carried_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    query = Query(tmp_path)
    query.format_1_too = True
    query.ask("a")
    with caplog.at_level(logging.WARNING):
        assert query.go_on() == {"a", "b", "c"}
    assert "wait (1)" in caplog.text
    assert query.pointer.erased is None
    query.format_1_too = False
    query.go_on()
    query.format_1_too = True
    with pytest.raises(UsageError, match=r"erase requests up to 1 .* keep pointer_write='v2'"):
        query.go_on()
    query.format_1_too = False
    assert query.go_on(2) == {"b", "c"}
    assert query.states() == ["done"]


def test_a_request_that_cannot_be_read_waits_until_it_is_withdrawn(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    query = Query(tmp_path)
    for key in "abc":
        query.ask(key)
    path = tmp_path / "count" / "q" / "erase" / format_request_name(2)
    path.write_bytes(path.read_bytes()[:-40])
    with caplog.at_level(logging.ERROR):
        assert query.go_on(3) == {"b", "c"}
    assert "erase request 2 of" in caplog.text
    assert query.states() == ["done", "unreadable", "waiting"]
    withdraw_erasure(str(tmp_path), 2, operator="count")
    assert query.go_on(3) == {"b"}
    assert query.states() == ["done", "done", "done"]
    # The text is a mistake that no type checker sees in a notebook.
    for number in (0, 4, "2"):
        with pytest.raises(UsageError, match="no erase request"):
            withdraw_erasure(str(tmp_path), number, operator="count")  # type: ignore[arg-type]


def test_a_request_that_is_withdrawn_names_no_key(tmp_path: Path) -> None:
    query = Query(tmp_path)
    query.ask("a")
    withdraw_erasure(str(tmp_path), query.ask("b"), operator="count")
    assert query.go_on(3) == {"b", "c"}
    assert query.states() == ["done", "done"]


def test_a_listing_that_fails_once_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    query, names = Query(tmp_path), Folder.names
    failed: list[str] = []
    query.ask("a")

    def listed(folder: Folder) -> list[str]:
        if not failed:
            failed.append(folder.root)
            raise StorageError("503 Slow Down")
        return names(folder)

    monkeypatch.setattr(Folder, "names", listed)
    assert query.go_on(timeout_s=30) == {"b", "c"}
    assert failed


def test_many_requests_cost_one_pass_and_large_ones_one_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    query = Query(tmp_path)
    passes: list[int] = []
    erase = query._erase

    def counted(columns: Sequence[pa.Array]) -> int:
        passes.append(len(columns[0]))
        return erase(columns)

    monkeypatch.setattr(query, "_erase", counted)
    for key in "abab":
        query.ask(key)
    query.go_on()
    monkeypatch.setattr("spark_state_ext.engine.erase_requests._REQUEST_BYTES_MAX", 20)
    for key in "cab":
        query.ask(key * 15)
    query.go_on()
    assert passes == [4, 1, 1, 1]
    assert len(query.watch._requests) == 1


def test_rows_that_two_requests_name_are_taken_away_once() -> None:
    def rows(*keys: int) -> ErasedRows:
        full = [{"key_hash": key, "key.name": str(key), "defined": False, "deleted": True} for key in keys]
        return ErasedRows(SCHEMA, pa.RecordBatch.from_pylist(full, schema=SCHEMA.arrow))

    found = rows(1, 4).with_those(rows(0, 4, 7)).with_those(ErasedRows(SCHEMA)).with_those(rows(1))
    assert found.rows.column(0).to_pylist() == [0, 1, 4, 7]
    assert len(ErasedRows(SCHEMA).with_those(rows(3))) == 1
