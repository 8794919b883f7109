"""`open_state` on savepoints, folders that began with other state, S3 and given pointers, and zero-copy reads."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import polars as pl
import pyarrow as pa
import pytest
from core_support import WRITER
from life import Life
from reading_support import Job, as_model, operator_file, state_of
from test_reading import EVERYWHERE, lived, some_changes

from arrow_schemas.savepoint import CANONICAL, NATIVE, SavepointHeader, SavepointManifest
from spark_state_ext import open_state
from spark_state_ext.backends.files import sole_replica
from spark_state_ext.errors import MissingCheckpointError
from spark_state_ext.files.folder import Folder
from spark_state_ext.reading.state_opener import open_pointers
from spark_state_ext.savepoints.bucket_copy import save_bucket
from spark_state_ext.savepoints.writer import write_manifest
from spark_state_ext.testing.model import SCHEMA


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    new_job = lived(Job(tmp_path / "root", tmp_path), 14)
    yield new_job
    new_job.close()


def write_savepoint(job: Job, path: Path, form: str) -> Folder:
    """Write a savepoint of the last committed batch."""
    target = Folder(str(path))
    buckets = [
        save_bucket(
            pointer,
            sole_replica(job.folder.child(str(pointer.bucket)), job.scratch, "fsspec"),
            target.child("counts", str(pointer.bucket)),
            form,
            SCHEMA,
            job.scratch,
            writer=WRITER,
        ).saved
        for pointer in job.pointers[-1]
    ]
    operators = {"counts": operator_file("counts", job.query_id, job.buckets)}
    header = SavepointHeader("12" * 16, form, 1_700_000_000_000, operators, "0.2.0", job.query_id, 13)
    write_manifest(target, SavepointManifest(header, tuple(buckets)))
    return target


@pytest.mark.parametrize("form", [NATIVE, CANONICAL])
def test_a_savepoint_has_exactly_its_batch(job: Job, tmp_path: Path, form: str) -> None:
    folder = write_savepoint(job, tmp_path / "savepoint", form)
    with open_state(folder.root) as state:
        assert (state.batch, state.held, state.proven) == (13, False, True)
        assert state_of(state) == job.models[13]
        assert as_model(state.get(("a", 1.5)).append_column("defined", [[True]])) == as_model(
            state.scan([*state.schema.names, "defined"], buckets=[state.bucket_of(("a", 1.5))])
            .read_all()
            .filter((pa.compute.field("name") == "a") & (pa.compute.field("x") == 1.5))
        )
    with pytest.raises(MissingCheckpointError, match="only the state after batch 13"):
        open_state(folder.root, batch=12)


def test_a_folder_that_began_with_a_savepoint_is_read(job: Job, tmp_path: Path) -> None:
    """The folder's first files name another query, whose batches are unrelated to its own."""
    begun = write_savepoint(job, tmp_path / "savepoint", NATIVE)
    new = Job(tmp_path / "root", tmp_path, query_id="new", run_id="new run")
    for bucket in range(4):
        for name in begun.child("counts", str(bucket)).names():
            new.folder.child(str(bucket)).put(name, begun.child("counts", str(bucket)).get(name))
    whole = write_savepoint(job, tmp_path / "again", NATIVE)
    from spark_state_ext.savepoints.manifest_file import read_manifest

    new.pointers = [[replace(saved.pointer, query_folder="new") for saved in read_manifest(whole).buckets]]
    random_ = random.Random(5)
    models = [job.models[13]]
    changes = some_changes(random_, 20)
    new.models = [models[0]]
    new.pointers.append(new.attempt(changes))
    with open_state(new.folder.root) as state:
        assert state.batch == -1
        assert state_of(state) == job.models[13]
    new.close()


def test_a_mapped_snapshot_reaches_other_libraries_without_a_copy(job: Job) -> None:
    folder = Path(job.folder.root)
    path = next(path for path in sorted(folder.glob("*/*.snapshot.arrow")))
    bucket, version = int(path.parent.name), int(path.name.split("_")[0])
    with open_state(job.root, batch=version - 1) as state:
        rows = state.scan(buckets=[bucket]).read_all()
        with duckdb.connect() as connection:
            connection.register("state", state.scan(buckets=[bucket]))
            counts = connection.execute('SELECT count(*), sum("count") FROM state').fetchall()
        assert counts == [(rows.num_rows, sum(rows["count"].to_pylist()))]
        batches = list(state.scan(["count"], buckets=[bucket]))
        frame = pl.from_arrow(pa.Table.from_batches(batches))
        assert isinstance(frame, pl.DataFrame)
        chunk = batches[0].column("count")
        shared = frame["count"].get_chunks()[0].to_arrow()
        assert shared.buffers()[1].address == chunk.buffers()[1].address
        assert frame["count"].to_list() == rows["count"].to_pylist()


def test_given_pointers_are_read_with_their_inline_deltas(life: Life) -> None:
    life.batch()
    life.settle()
    life.batch({})
    life.manager("a").gate.clear()
    life.batch()
    life.batch()
    assert len(life.pointers[-1].inline) == 2
    folder = Folder(str(life.local / "a"))
    with open_pointers(folder, operator_file("counts", "query", 8), {3: life.pointers[-1]}, 3) as state:
        assert state_of(state) == life.models[-1]
        assert state.checkpoints[3] == life.pointers[-1].ref
        assert state.checkpoints[0] is None
    life.manager("a").gate.set()


def test_a_root_on_s3_is_read(s3: Any, tmp_path: Path) -> None:
    job = lived(Job(s3.root("reading"), tmp_path, storage_options=s3.options), 3)
    with open_state(job.root, storage_options=s3.options) as state:
        assert state.held
        assert state_of(state) == job.models[1]
        key = EVERYWHERE[1]
        expected = {model_key: row for model_key, row in job.models[1].items() if model_key == key}
        table = state.get(key)
        assert table.num_rows == len(expected)
    assert job.folder.child("holds").names() == []
    job.close()
