"""The query folder in which a query's state begins."""

from __future__ import annotations

import threading
import time
import uuid
from pathlib import Path

import pytest

from spark_state_ext.engine.first_query_folder import FirstQueryFolders, starting_is_stale
from spark_state_ext.engine.spill_folders import spill_folder
from spark_state_ext.errors import CorruptFileError
from spark_state_ext.files.folder import Folder
from spark_state_ext.files.operator_catalog import query_folders_of_batch
from tests.helpers.waiting import WAIT_S

_BATCH_MS = 1_700_000_000_000
_NONCE = b"n" * 16


@pytest.fixture(autouse=True)
def _new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let calls share no memory, as in separate processes."""
    monkeypatch.setattr(FirstQueryFolders, "_MAX", 0)


@pytest.mark.parametrize(
    ("query_ids", "expected"),
    [
        (["query", "query", "query"], "query"),
        (["query", "", "query"], "query"),
        (["", "query", ""], f"t{_BATCH_MS}-{_NONCE.hex()}"),
    ],
)
def test_all_calls_of_a_batch_begin_in_one_folder(query_ids: list[str], expected: str, tmp_path: Path) -> None:
    files = Folder(str(tmp_path))
    assert {FirstQueryFolders().of(files, query, _BATCH_MS, _NONCE) for query in query_ids} == {expected}
    assert query_folders_of_batch(files, _BATCH_MS) == {expected}


def test_two_queries_begin_in_two_folders_even_at_the_same_time(tmp_path: Path) -> None:
    files = Folder(str(tmp_path))
    query_folders = [FirstQueryFolders().of(files, "", _BATCH_MS, nonce) for nonce in (_NONCE, b"m" * 16, b"", b"")]
    assert len(set(query_folders)) == 4
    assert query_folders_of_batch(files, _BATCH_MS) == set(query_folders)
    assert query_folders_of_batch(files, _BATCH_MS + 1) == set()


def test_a_query_does_not_begin_in_the_folder_of_another(tmp_path: Path) -> None:
    # A user's thread that has worked for another query of the application still passes that query's id.
    files = Folder(str(tmp_path))
    assert FirstQueryFolders().of(files, "query", _BATCH_MS, _NONCE) == "query"
    files.child("query").put("operator_0.json", b"{}")
    # Another attempt at the batch has another nonce and the same time.
    assert FirstQueryFolders().of(files, "query", _BATCH_MS, b"m" * 16) == "query"
    another_ms = _BATCH_MS + 60_000
    assert FirstQueryFolders().of(files, "query", another_ms, b"o" * 16) == f"t{another_ms}-{(b'o' * 16).hex()}"


def test_a_query_whose_first_batch_spills_begins_in_its_own_folder(tmp_path: Path) -> None:
    # The packing tasks write there before the first call.
    files, query = Folder(str(tmp_path)), str(uuid.uuid4())
    files.child(spill_folder(query, 0, time.time())).put("a.payloads", b"rows")
    assert FirstQueryFolders().of(files, query, _BATCH_MS, _NONCE) == query


def test_concurrent_calls_agree_on_one_folder(tmp_path: Path) -> None:
    files, query_folders = Folder(str(tmp_path)), []
    begin = threading.Barrier(8)

    def call(query: str) -> None:
        begin.wait(WAIT_S)
        query_folders.append(FirstQueryFolders().of(files, query, _BATCH_MS, _NONCE))

    threads = [threading.Thread(target=call, args=(query,)) for query in ("", "query") * 4]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert len(query_folders) == 8
    assert len(set(query_folders)) == 1


def test_a_damaged_note_fails_with_its_location(tmp_path: Path) -> None:
    Folder(str(tmp_path)).child("starting").put(f"{_BATCH_MS}-{_NONCE.hex()}", b"../elsewhere")
    with pytest.raises(CorruptFileError, match=r"does not name a query folder\. Remove that file"):
        FirstQueryFolders().of(Folder(str(tmp_path)), "query", _BATCH_MS, _NONCE)


def test_a_note_is_stale_after_a_month() -> None:
    name = f"{_BATCH_MS}-{_NONCE.hex()}"
    assert not starting_is_stale(name, _BATCH_MS + 29 * 86_400_000)
    assert starting_is_stale(name, _BATCH_MS + 31 * 86_400_000)
    assert not starting_is_stale("somebody's notes", 10 * _BATCH_MS)
