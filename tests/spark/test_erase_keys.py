"""`erase_keys` removes keys from the state of a query on Spark, and `erase_history` removes them from its files."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from api_jobs import ApiJob, count_arrow
from jobs import CLASSIC, keyed

from spark_state_ext import erase_history, erase_keys, erase_status
from tests.helpers.erased_bytes import files_with

pytestmark = pytest.mark.spark


@CLASSIC
def test_erased_keys_start_without_state_and_their_bytes_leave_all_files(session: Any, tmp_path: Path) -> None:
    job = ApiJob(session, "arrow", tmp_path, count_arrow, api="arrow")
    # Without the changelog backend there are no inline deltas.
    job.options |= {"backends": ["fsspec"], "erase_requests": True}
    names = [f"key number {i}" for i in range(12)]
    job.run(keyed(*names), keyed(*names))
    # A copy of the local stores stands for a machine that gets no tasks for a while.
    shutil.copytree(tmp_path / "local", tmp_path / "old")
    root = str(tmp_path / "root")
    requests = erase_keys(root, pa.table({"key": ["key number 3", "key number 5", "unknown"]}), operator="tested")
    assert [(request.number, request.keys) for request in requests] == [(1, 3)]
    (status,) = erase_status(root, operator="tested")
    assert status.state == "waiting"
    # The first of these batches erases the keys. It also has rows of "key number 3"; rows of "key number 5" come later.
    output = job.run(
        keyed("key number 3", "key number 4"), keyed("key number 3", "key number 5"), keyed("key number 6")
    )
    assert [sorted(rows) for _, rows in sorted(output.items())] == [
        [("key number 3", 1), ("key number 4", 3)],
        [("key number 3", 2), ("key number 5", 1)],
        [("key number 6", 3)],
    ]
    (status,) = erase_status(root, operator="tested")
    assert (status.state, status.keys, status.kept) == ("done", 3, True)
    # `erase_history` removes the key from all files; neither an older local store nor a worker that knows it restores the key.
    erased = "key number 7"
    erase_keys(root, ["key number 7"], operator="tested")
    job.run(keyed("key number 3"), keyed("key number 3"), keyed("key number 3"))
    assert files_with(erased, tmp_path / "root")
    done = erase_history(root, ["key number 7"], operator="tested", inline_batches=0)
    assert (done.receipt.absent, done.requests) == (True, 1)
    assert files_with(erased, tmp_path / "root") == []
    job.options |= {"local_dir": str(tmp_path / "old")}
    output = job.run(keyed(*names))
    assert [dict(rows) for rows in output.values()] == [
        {
            **dict.fromkeys(names, 3),
            "key number 3": 6,
            "key number 4": 4,
            "key number 5": 2,
            "key number 6": 4,
            erased: 1,
        }
    ]
