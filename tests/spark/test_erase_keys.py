"""Keys that a user names are gone from the state of a query on Spark, however it is called and started."""

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
def test_erased_keys_begin_anew_and_every_bucket_says_so(session: Any, tmp_path: Path) -> None:
    job = ApiJob(session, "arrow", tmp_path, count_arrow, api="arrow")
    # Nothing goes inline.
    job.options |= {"backends": ["fsspec"], "erase_requests": True}
    names = [f"key number {i}" for i in range(12)]
    job.run(keyed(*names), keyed(*names))
    # A machine that is not asked for a while.
    shutil.copytree(tmp_path / "local", tmp_path / "old")
    root = str(tmp_path / "root")
    asked = erase_keys(root, pa.table({"key": ["key number 3", "key number 5", "nobody"]}), operator="tested")
    assert [(it.number, it.keys) for it in asked] == [(1, 3)]
    (status,) = erase_status(root, operator="tested")
    assert status.state == "waiting"
    # The first of these batches carries it out: "key number 3" comes in it, and "key number 5" later.
    found = job.run(keyed("key number 3", "key number 4"), keyed("key number 3", "key number 5"), keyed("key number 6"))
    assert [sorted(rows) for _, rows in sorted(found.items())] == [
        [("key number 3", 1), ("key number 4", 3)],
        [("key number 3", 2), ("key number 5", 1)],
        [("key number 6", 3)],
    ]
    (status,) = erase_status(root, operator="tested")
    assert (status.state, status.keys, status.kept) == ("done", 3, True)
    # And from the past: no file has it, and no store that is older brings it back, nor a worker that knows the old one.
    nobody = "key number 7"
    erase_keys(root, ["key number 7"], operator="tested")
    job.run(keyed("key number 3"), keyed("key number 3"), keyed("key number 3"))
    assert files_with(nobody, tmp_path / "root")
    done = erase_history(root, ["key number 7"], operator="tested", inline_batches=0)
    assert (done.receipt.absent, done.requests) == (True, 1)
    assert files_with(nobody, tmp_path / "root") == []
    job.options |= {"local_dir": str(tmp_path / "old")}
    found = job.run(keyed(*names))
    assert [dict(rows) for rows in found.values()] == [
        {
            **dict.fromkeys(names, 3),
            "key number 3": 6,
            "key number 4": 4,
            "key number 5": 2,
            "key number 6": 4,
            nobody: 1,
        }
    ]
