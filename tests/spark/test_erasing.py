"""The bytes of removed keys leave the checkpoint files within a time on real Spark, even if Spark retains many batches."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from api_jobs import ApiJob
from jobs import CLASSIC, COUNTS, KEYED, keyed, table

from spark_state_ext.engine import limits
from tests.helpers.waiting import WAIT_S

pytestmark = pytest.mark.spark

JANE = "Jane Doe of Springfield"
WITHIN_S = 6


def count_or_remove(key: Any, pdfs: Iterable[pd.DataFrame], state: Any) -> Iterator[pd.DataFrame]:
    """Count rows, and remove a key with a negative value."""
    values = [int(value) for pdf in pdfs for value in pdf["value"]]
    if min(values) < 0:
        state.remove()
        return
    n = (state.getOption or (0,))[0] + len(values)
    state.update((n,))
    yield pd.DataFrame({"key": [key[0]], "n": [n]})


def files_with_jane(root: Path) -> list[Path]:
    return [path for path in root.rglob("*.arrow") if JANE.encode() in path.read_bytes()]


@CLASSIC
def test_a_removed_key_leaves_the_files_within_erase_within_s(
    session: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The smallest value allowed is an hour, which is too long for a test.
    monkeypatch.setattr(limits, "ERASE_WITHIN_S_MIN", WITHIN_S)
    job = ApiJob(session, "arrow", tmp_path, count_or_remove, api="pandas", output=COUNTS)
    job.options = {"buckets": 1, "erase_within_s": WITHIN_S}
    rows = job.run(keyed(JANE, "a"), keyed("a"))
    assert rows == {0: [(JANE, 1), ("a", 1)], 1: [("a", 2)]}
    assert files_with_jane(tmp_path), "the search finds the key before it is removed"
    job.run(table(KEYED, [(JANE, -1)]))
    began_s, n = time.monotonic(), 2
    while files_with_jane(tmp_path):
        assert time.monotonic() - began_s < WAIT_S
        for batch in job.run(*[keyed("a")] * 5).values():
            n += 1
            assert batch == [("a", n)]
    # The state is the same without the old local stores.
    job.options |= {"local_dir": str(tmp_path / "another")}
    assert job.run(keyed("a", JANE)) == {n + 1: [(JANE, 1), ("a", n + 1)]}
