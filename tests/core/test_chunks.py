"""What a process keeps of the chunks of a store that another process writes."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa

from arrow_schemas import CheckpointRef, RowSchema
from spark_state_ext.store import LocalStore
from spark_state_ext.store.base_file import file_path, map_file
from spark_state_ext.store.chunks import Chunks
from spark_state_ext.store.runs import Run
from spark_state_ext.testing.model import KEYS, SCHEMA, Row, make_run

REF = CheckpointRef(1, "1" * 32)


def make_base_run(key: str) -> Run:
    return Run(key, REF, REF, None, True, 1, 0, (), 8, (0,))


def test_files_of_runs_that_another_process_dropped_are_unmapped(tmp_path: Path) -> None:
    """A deleted file takes space on the disk as long as it is mapped."""
    store = LocalStore.at(tmp_path, SCHEMA)
    store.apply([make_run({KEYS[0]: Row(1)})], REF, None)
    dropped = make_base_run("ab" * 16)
    store._chunks.add_checked_file(tmp_path, dropped, _write_and_map_file(tmp_path, dropped))
    assert list(store._chunks._maps) == [dropped.key]
    store.view(REF)
    assert store._chunks._maps == {}
    store.close()


def test_only_files_of_the_given_runs_stay_mapped(tmp_path: Path) -> None:
    chunks = Chunks(RowSchema((), ()), write_marks=True)
    one, other = make_base_run("ab" * 16), make_base_run("cd" * 16)
    for run in (one, other):
        chunks.add_checked_file(tmp_path, run, _write_and_map_file(tmp_path, run))
    chunks.keep_files_of({one.key, other.key})
    assert set(chunks._maps) == {one.key, other.key}
    chunks.keep_files_of({other.key})
    assert set(chunks._maps) == {other.key}


def _write_and_map_file(folder: Path, run: Run) -> pa.Buffer:
    file_path(folder, run.key).write_bytes(b"8 bytes!")
    return map_file(folder, run)
