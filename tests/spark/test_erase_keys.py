"""Keys that a user names are gone from the state of a query on Spark, however it is called and started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from api_jobs import ApiJob, count_arrow
from jobs import CLASSIC, keyed

from spark_state_ext import erase_keys, erase_status

pytestmark = pytest.mark.spark


@CLASSIC
def test_erased_keys_begin_anew_and_every_bucket_says_so(session: Any, tmp_path: Path) -> None:
    job = ApiJob(session, "arrow", tmp_path, count_arrow, api="arrow")
    names = [f"key {i}" for i in range(12)]
    job.run(keyed(*names), keyed(*names))
    root = str(tmp_path / "root")
    asked = erase_keys(root, pa.table({"key": ["key 3", "key 5", "nobody"]}), operator="tested")
    assert [(it.number, it.keys) for it in asked] == [(1, 3)]
    (status,) = erase_status(root, operator="tested")
    assert status.state == "waiting"
    # The first of these batches carries it out: "key 3" comes in it, and "key 5" later.
    found = job.run(keyed("key 3", "key 4"), keyed("key 3", "key 5"), keyed("key 6"))
    assert [sorted(rows) for _, rows in sorted(found.items())] == [
        [("key 3", 1), ("key 4", 3)],
        [("key 3", 2), ("key 5", 1)],
        [("key 6", 3)],
    ]
    (status,) = erase_status(root, operator="tested")
    assert (status.state, status.keys, status.kept) == ("done", 3, True)
    # Without local stores: what the files tell is the same.
    job.options |= {"local_dir": str(tmp_path / "another")}
    found = job.run(keyed(*names))
    assert [dict(rows) for rows in found.values()] == [
        {**dict.fromkeys(names, 3), "key 3": 3, "key 4": 4, "key 5": 2, "key 6": 4}
    ]
