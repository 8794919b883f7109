"""The functions with which the benchmarks of savepoints measure."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks import rescale
from benchmarks.rescale import Tree, tree_of
from benchmarks.savepoint import told_apart

# Benchmarks and the demo are not part of the package, so the suite leaves their tests to `make soak`.
pytestmark = pytest.mark.soak


def test_linked_and_copied_files_of_a_savepoint_are_distinguished(tmp_path: Path) -> None:
    job, savepoint = tmp_path / "job" / "0", tmp_path / "savepoint" / "operator" / "0"
    for folder in (job, savepoint):
        folder.mkdir(parents=True)
    for name, text in (("1_a.snapshot.arrow", "123"), ("2_b.delta.arrow", "4567")):
        (job / name).write_text(text)
    os.link(job / "1_a.snapshot.arrow", savepoint / "1_a.snapshot.arrow")
    shutil.copy(job / "2_b.delta.arrow", savepoint / "2_b.delta.arrow")
    # The manifest is not a checkpoint file.
    (tmp_path / "savepoint" / "savepoint.arrow").write_text("8")
    linked, copied = told_apart(tmp_path / "savepoint", tmp_path / "job")
    assert linked == {str(savepoint / "1_a.snapshot.arrow"): 3}
    assert copied == {str(savepoint / "2_b.delta.arrow"): 4}


def test_tree_of_counts_only_files_that_existed_at_the_commit(tmp_path: Path) -> None:
    savepoint, query = tmp_path / "savepoint" / "0", tmp_path / "root" / "operator" / "query"
    for folder in (savepoint, query / "parents" / "0", query / "0"):
        folder.mkdir(parents=True)
    (savepoint / "1_a.snapshot.arrow").write_text("1")
    (query / "0" / "2_b.delta.arrow").write_text("22")
    (query / "0" / "2_b.snapshot.arrow").write_text("333")
    (query / "operator_0.json").write_text("4444")
    committed_ns = max(path.stat().st_ctime_ns for path in query.rglob("*.*"))
    wait_past(committed_ns, tmp_path)
    # A link changes the ctime of the file.
    os.link(savepoint / "1_a.snapshot.arrow", query / "parents" / "0" / "1_a.snapshot.arrow")
    (query / "0" / "3_c.delta.arrow").write_text("5" * 5)
    assert tree_of(tmp_path / "root", savepoint, committed_ns) == Tree(linked=1, snapshots=3, deltas=2, others=4)
    assert tree_of(tmp_path / "root", savepoint) == Tree(linked=1, snapshots=3, deltas=7, others=4)
    # A file that is still being written counts, whenever it will get its name.
    (query / "0" / ".tmp-0123-4_d.snapshot.arrow").write_text("6" * 6)
    assert tree_of(tmp_path / "root", savepoint, committed_ns).snapshots == 9


def wait_past(time_ns: int, folder: Path) -> None:
    """Wait until the file system's clock, which ticks a few hundred times a second, is later than a time."""
    probe = folder / "probe"
    probe.touch()
    while probe.stat().st_ctime_ns <= time_ns:
        time.sleep(0.001)
        probe.touch()


@pytest.mark.parametrize("column", ["key", "n", "total", "pad"])
def test_a_value_in_the_wrong_row_is_noticed(tmp_path: Path, column: str) -> None:
    expected = rescale._write_table(tmp_path / "table", 1_000, seed=7)
    rows = pa.concat_tables(pq.read_table(path) for path in (tmp_path / "table").iterdir())
    order = np.arange(len(rows))
    other_order = rows.take(pa.array(order[::-1]))
    assert rescale._content(rows.to_batches(64)) == rescale._content(other_order.to_batches()) == expected
    at = rows.column_names.index(column)
    # All values of n are equal, so increase some of them and decrease others.
    wrong = pa.chunked_array([pa.array(order % 2 * 2)]) if column == "n" else other_order[column]
    assert rescale._content(rows.set_column(at, column, wrong).to_batches()) != expected
