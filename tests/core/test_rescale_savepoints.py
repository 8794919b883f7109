"""Rewriting a savepoint with another bucket map: compared with a dict, interrupted, started from, and refused."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from core_support import change_sets
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st
from reading_support import Job, operator_file
from rescaled_query import RescaledQuery, job_from
from small_root import savepoint_of
from wide_savepoint import KEYS as WIDE_KEYS
from wide_savepoint import WIDE, rows_of, wide_rows, wide_savepoint

from arrow_schemas import BucketMap
from arrow_schemas.lineage import SNAPSHOT, file_name, parse_file_name
from arrow_schemas.row import DELETED
from arrow_schemas.savepoint import CANONICAL, NATIVE, SavedBucket, SavepointHeader, SavepointManifest
from spark_state_ext import Savepoint, erase_history, open_state, rescale_savepoint, savepoint_tables
from spark_state_ext.__main__ import main
from spark_state_ext.backends.files import sole_replica
from spark_state_ext.cli.savepoint import copy_savepoint
from spark_state_ext.cli.transform import Transformation, write_transformed
from spark_state_ext.errors import (
    BucketMapChangedError,
    ClaimedError,
    CorruptFileError,
    MissingCheckpointError,
    StateError,
    StorageError,
    UsageError,
)
from spark_state_ext.files import checkpoint
from spark_state_ext.files.checkpoint import read_checkpoint
from spark_state_ext.files.folder import Folder
from spark_state_ext.rescale.digests import RowsDigest
from spark_state_ext.savepoints.bucket_copy import save_bucket
from spark_state_ext.savepoints.claims import SavepointClaim, claim_savepoint
from spark_state_ext.savepoints.manifest_file import encode_manifest, read_manifest
from spark_state_ext.savepoints.saved_rows import read_saved_rows
from spark_state_ext.savepoints.writer import write_manifest, write_snapshot
from spark_state_ext.testing.model import KEYS, SCHEMA, Model, Row, make_model
from tests.helpers.soak import examples, whole

COUNTS = st.integers(1, 64)
GOLDEN = Path(__file__).parent.parent / "golden" / "savepoint-1"


def run_job(folder: Path, buckets: int, batches: list[Any]) -> Job:
    job = Job(folder / "old", folder / "old-local", buckets=buckets)
    for changes in batches:
        job.batch(changes)
    return job


def read_model(savepoint: Path, scratch: Path) -> Model:
    """Return all rows of a savepoint, whose buckets have no more rows than their pointers say."""
    folder, model = Folder(str(savepoint)), Model()
    for saved in read_manifest(folder).buckets:
        rows = make_model(
            read_saved_rows(
                folder.child(saved.operator, str(saved.bucket)), saved.pointer, saved.files, SCHEMA, scratch
            )
        )
        assert len(rows) <= saved.pointer.rows
        model |= rows
    return model


def read_model_of_files(savepoint: Path, scratch: Path) -> Model:
    """Return the rows of checkpoint files that no manifest names yet."""
    model = Model()
    for path in savepoint.rglob("*.arrow"):
        named = parse_file_name(path.name)
        assert named is not None
        read = read_checkpoint(Folder(str(path.parent)), *named, SCHEMA, scratch)
        model |= make_model(rows.filter(pc.invert(rows.column(DELETED))) for rows in read.batches)
    return model


def read_contents(folder: Path) -> dict[str, bytes]:
    """Return the contents of all files except the manifest."""
    files = (path for path in folder.rglob("*.arrow") if path.name != "savepoint.arrow")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    """A job of three buckets with all keys: some changed twice, some removed, some with a timeout."""
    new_job = run_job(
        tmp_path,
        3,
        [
            {key: Row(at, "first", at) for at, key in enumerate(KEYS)},
            {key: None if at % 5 == 0 else Row(at, "again", 20) for at, key in enumerate(KEYS[:12])},
        ],
    )
    yield new_job
    new_job.close()


@pytest.fixture
def savepoint(job: Job, tmp_path: Path) -> Folder:
    return savepoint_of(job, tmp_path / "savepoint")


# -- rows ------------------------------------------------------------------------------------------


@given(COUNTS, COUNTS, st.lists(change_sets(), max_size=4), st.lists(change_sets(), max_size=2), st.data())
@settings(max_examples=examples(10, 400), phases=(Phase.explicit, Phase.reuse, Phase.generate))
def test_a_job_continues_from_a_savepoint_with_any_number_of_buckets(
    n: int, m: int, before: list[Any], after: list[Any], data: st.DataObject
) -> None:
    assume(n != m)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        old = run_job(folder, n, before)
        savepoint_of(old, folder / "savepoint", data.draw(st.sampled_from([NATIVE, CANONICAL])))
        result = rescale_savepoint(str(folder / "savepoint"), str(folder / "to"), BucketMap(m))
        old.close()
        model = old.models[-1] if old.models else {}
        assert read_model(folder / "to", folder) == model
        assert result.operators["counts"].rows == len(model)
        job = job_from(folder / "new", old, BucketMap(m), Savepoint(str(folder / "to")))
        query = RescaledQuery(job, folder, model)
        for _ in range(data.draw(st.integers(1, 2))):
            query.start()
        for gone in ("savepoint", "to", "old"):
            shutil.rmtree(folder / gone)
        assert all(pointer.parents is None for pointer in query.pointers), "no bucket needs a parent"
        assert query.state() == query.restored() == query.model
        for changes in after:
            query.batch(changes)
            if data.draw(st.booleans()):
                query.lose_disks()
            assert query.state() == query.model


@pytest.mark.parametrize(("before", "after"), whole([(2, 5), (3, 1)], [(1, 64), (7, 6), (64, 3)]))
def test_values_of_all_types_and_expiry_times_are_kept(before: int, after: int, tmp_path: Path) -> None:
    wide = wide_savepoint(tmp_path, BucketMap(before))
    assert rows_of(wide.folder, "wide", WIDE, tmp_path) == wide.rows
    assert len(wide.rows) == len(WIDE_KEYS) - 3
    result = rescale_savepoint(wide.folder.root, str(tmp_path / "to"), BucketMap(after))
    assert rows_of(Folder(result.path), "wide", WIDE, tmp_path) == wide.rows
    assert any("'state.__expires_ms': 1000" in row for row in wide.rows)
    assert result.operators["wide"].rows == len(wide.rows)


def test_a_single_bucket_can_be_split_and_merged_again(job: Job, savepoint: Folder, tmp_path: Path) -> None:
    split = rescale_savepoint(savepoint.root, str(tmp_path / "split"), BucketMap.split(3, {1: 4}))
    assert read_model(tmp_path / "split", tmp_path) == job.models[-1]
    joined = rescale_savepoint(split.path, str(tmp_path / "joined"), BucketMap(3))
    assert read_model(tmp_path / "joined", tmp_path) == job.models[-1]
    assert joined.operators["counts"].checksum == split.operators["counts"].checksum
    assert joined.operators["counts"].before.buckets == 6
    assert read_model(Path(savepoint.root), tmp_path) == job.models[-1], "the old savepoint is unchanged"
    with open_state(split.path) as state:
        for name, x in KEYS:
            table = state.get({"name": name, "x": x})
            exists = ("NaN" if x is not None and x != x else x) in {k[1] for k in job.models[-1] if k[0] == name}
            assert table.num_rows == exists, "keys are in the buckets of their hashes"


def test_a_job_starts_from_a_savepoint_with_a_split_bucket(job: Job, savepoint: Folder, tmp_path: Path) -> None:
    bucket_map = BucketMap.split(3, {1: 4})
    result = rescale_savepoint(savepoint.root, str(tmp_path / "split"), bucket_map)
    query = RescaledQuery(
        job_from(tmp_path / "new", job, bucket_map, Savepoint(result.path)), tmp_path, dict(job.models[-1])
    )
    query.start()
    query.batch({KEYS[0]: Row(7), KEYS[1]: None})
    assert query.state() == query.restored() == query.model
    with pytest.raises(BucketMapChangedError):
        job_from(tmp_path / "other", job, BucketMap(6), None).operator_file("q").succeeded_by(
            read_manifest(Folder(result.path)).header.operators["counts"]
        )


def test_batches_of_large_files_are_split(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "CHUNK_ROWS", 2)
    savepoint = savepoint_of(job, tmp_path / "savepoint", CANONICAL)
    checksums = set()
    for buckets in (1, 2, 5, 8):
        result = rescale_savepoint(savepoint.root, str(tmp_path / f"{buckets}"), BucketMap(buckets))
        assert read_model(Path(result.path), tmp_path) == job.models[-1]
        checksums.add(result.operators["counts"].checksum)
    assert len(checksums) == 1
    (saved,) = read_manifest(Folder(str(tmp_path / "1"))).buckets
    assert saved.pointer.ref is not None
    read = read_checkpoint(open_files(tmp_path / "1", saved), saved.pointer.ref, SNAPSHOT, SCHEMA, tmp_path)
    assert len(list(read.batches)) == -(-len(job.models[-1]) // 2)


def test_pointers_keep_the_values_of_their_parents(savepoint: Folder, tmp_path: Path) -> None:
    manifest = read_manifest(savepoint)
    parents = tuple(
        replace(saved, pointer=replace(saved.pointer, watermark_ms=at or None, heartbeats=10 + at, calls=20 - at))
        for at, saved in enumerate(manifest.buckets)
    )
    os.unlink(savepoint.where("savepoint.arrow"))
    write_manifest(savepoint, replace(manifest, buckets=parents))
    rescale_savepoint(savepoint.root, str(tmp_path / "to"), BucketMap(2))
    after = read_manifest(Folder(str(tmp_path / "to")))
    assert after.header.form == CANONICAL
    assert after.header.id != manifest.header.id
    same = ("query_id", "batch", "watermark_ms", "offsets")
    assert [getattr(after.header, name) for name in same] == [getattr(manifest.header, name) for name in same]
    assert [(saved.pointer.watermark_ms, saved.pointer.heartbeats, saved.pointer.calls) for saved in after.buckets] == [
        (1, 11, 20),
        (2, 12, 19),
    ]
    for saved in after.buckets:
        pointer = saved.pointer
        assert (pointer.buckets, pointer.parents, pointer.replication, pointer.query_folder) == (2, None, {}, "")
        assert pointer.ref is not None
        assert [file.name for file in saved.files] == [file_name(pointer.ref, SNAPSHOT)]
        assert pointer.version > max(old.pointer.version for old in parents)
        assert pointer.batch == manifest.header.batch
        timeouts = [
            row.timeout_ms
            for row in make_model(
                read_saved_rows(open_files(tmp_path / "to", saved), pointer, saved.files, SCHEMA, tmp_path)
            ).values()
            if row.timeout_ms is not None
        ]
        assert pointer.earliest_timeout_ms is None or pointer.earliest_timeout_ms <= min(timeouts)


def open_files(savepoint: Path, bucket: SavedBucket) -> Folder:
    return Folder(str(savepoint)).child(bucket.operator, str(bucket.bucket))


@pytest.mark.parametrize("form", ["native", "canonical"])
def test_a_savepoint_of_the_first_version_can_be_rescaled(form: str, tmp_path: Path) -> None:
    rescale_savepoint(str(GOLDEN / form), str(tmp_path / "to"), BucketMap(5))
    before, after = (
        pa.concat_tables(savepoint_tables(str(path))).sort_by([("day", "ascending"), ("name", "ascending")])
        for path in (GOLDEN / form, tmp_path / "to")
    )
    assert after.equals(before)
    assert after.num_rows == len(json.loads((GOLDEN / "expected.json").read_text()))


def test_other_operators_are_copied_unchanged(tmp_path: Path) -> None:
    jobs = [Job(tmp_path / name, tmp_path / name, operator=name, query_id="q", buckets=2) for name in ("b", "a", "c")]
    target, saved = Folder(str(tmp_path / "savepoint")), []
    for job in jobs:
        job.batch({key: Row(at, job.operator) for at, key in enumerate(KEYS)})
        job.batch({KEYS[0]: None})
        for pointer in job.pointers[-1]:
            files = sole_replica(job.folder.child(str(pointer.bucket)), job.scratch, "fsspec")
            into = target.child(job.operator, str(pointer.bucket))
            saved.append(save_bucket(pointer, files, into, NATIVE, SCHEMA, job.scratch).saved)
        job.close()
    operators = {job.operator: operator_file(job.operator, "q", 2) for job in jobs}
    header = SavepointHeader("5b" * 16, NATIVE, 1_700_000_000_000, operators, "0.1.0", "q", 1, None)
    saved.sort(key=lambda bucket: (bucket.operator, bucket.bucket))
    write_manifest(target, SavepointManifest(header, tuple(saved)))
    seen: list[str] = []
    result = rescale_savepoint(
        target.root,
        str(tmp_path / "one"),
        BucketMap(3),
        operator="b",
        on_bucket=lambda bucket: seen.append(bucket.operator),
    )
    assert list(result.operators) == ["b"]
    assert seen == ["a", "a", "b", "b", "b", "c", "c"]
    before, after = read_contents(tmp_path / "savepoint"), read_contents(tmp_path / "one")
    for name in ("a/", "c/"):
        assert {k: v for k, v in after.items() if k.startswith(name)} == {
            k: v for k, v in before.items() if k.startswith(name)
        }
    assert main(["savepoint", "verify", str(tmp_path / "one")]) == 0
    result = rescale_savepoint(Savepoint(str(tmp_path / "one"), operator="c"), str(tmp_path / "two"), BucketMap(3))
    assert list(result.operators) == ["c"]
    # Operators b and c already have three buckets, and are copied.
    result = rescale_savepoint(str(tmp_path / "two"), str(tmp_path / "all"), BucketMap(3))
    assert list(result.operators) == ["a"]
    assert [operator.buckets for operator in read_manifest(Folder(result.path)).header.operators.values()] == [3, 3, 3]
    for name in ("a", "b", "c"):
        tables = savepoint_tables(Savepoint(result.path, operator=name))
        assert sum(table.num_rows for table in tables) == len(KEYS) - 1


def test_savepoints_are_rescaled_in_object_stores(s3: Any, job: Job, savepoint: Folder, tmp_path: Path) -> None:
    target = s3.root(f"rescaled-{tmp_path.name}")
    with pytest.raises(StoppedError):
        rescale_savepoint(savepoint.root, target, BucketMap(4), storage_options=s3.options, on_bucket=stop_after(2))
    rescale_savepoint(savepoint.root, target, BucketMap(4), storage_options=s3.options)
    back = rescale_savepoint(Savepoint(target, storage_options=s3.options), str(tmp_path / "back"), BucketMap(3))
    assert read_model(Path(back.path), tmp_path) == job.models[-1]


# -- digests ---------------------------------------------------------------------------------------


def compute_digest(*batches: pa.RecordBatch) -> tuple[int, str]:
    rows_digest = RowsDigest()
    for batch in batches:
        rows_digest.add(batch)
    return rows_digest.rows, rows_digest.value


@given(st.lists(st.integers(0, len(WIDE_KEYS)), max_size=4))
@settings(max_examples=examples(40))
def test_a_digest_does_not_depend_on_the_division_into_batches(cuts: list[int]) -> None:
    rows = wide_rows(list(WIDE_KEYS), 1)
    borders = [0, *sorted(cuts), rows.num_rows]
    parts = [rows.slice(low, high - low) for low, high in itertools.pairwise(borders)]
    assert compute_digest(*parts) == compute_digest(rows)


@pytest.mark.parametrize("column", range(len(WIDE.arrow)))
def test_a_changed_value_changes_the_digest(column: int) -> None:
    first, second = wide_rows(list(WIDE_KEYS), 1), wide_rows(list(WIDE_KEYS), 2)
    name = WIDE.arrow.field(column).name
    values = first.column(column)
    if name.startswith(("key", "deleted", "defined")):
        changed = values.take(pa.array([*range(1, len(values)), 0]))
        other = pc.invert(values) if pa.types.is_boolean(values.type) else changed
    else:
        other = second.column(column)
    assert other.to_pylist() != values.to_pylist()
    rows_with_change = first.set_column(column, WIDE.arrow.field(column), other)
    assert compute_digest(rows_with_change) != compute_digest(first)


@pytest.mark.parametrize(
    ("column", "other"),
    [
        (pa.array([None, ""]), pa.array(["", None])),
        (pa.array(["ab", "c"]), pa.array(["a", "bc"])),
        (pa.array([[], None], pa.list_(pa.int64())), pa.array([None, []], pa.list_(pa.int64()))),
        (pa.array([[1], [2, 3]]), pa.array([[1, 2], [3]])),
        (
            pa.array([{"a": None}, None], pa.struct([("a", pa.int64())])),
            pa.array([None, {"a": None}], pa.struct([("a", pa.int64())])),
        ),
        (pa.array([0.0]), pa.array([-0.0])),
        (
            pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int64())),
            pa.array([[("a", None)]], pa.map_(pa.string(), pa.int64())),
        ),
        (pa.array([1, 2]), pa.array([2, 1])),
    ],
)
def test_similar_columns_have_different_digests(column: pa.Array, other: pa.Array) -> None:
    assert compute_digest(pa.record_batch([column], ["c"])) != compute_digest(pa.record_batch([other], ["c"]))


# -- interruptions ---------------------------------------------------------------------------------


class StoppedError(Exception):
    pass


def stop_after(buckets: int) -> Callable[[SavedBucket], None]:
    seen: list[SavedBucket] = []

    def on_bucket(bucket: SavedBucket) -> None:
        seen.append(bucket)
        if len(seen) == buckets:
            raise StoppedError

    return on_bucket


@pytest.mark.parametrize("buckets", [1, 3, 5])
def test_an_interrupted_rescale_can_be_continued(buckets: int, job: Job, savepoint: Folder, tmp_path: Path) -> None:
    to = tmp_path / "to"
    rescale_savepoint(savepoint.root, str(tmp_path / "at once"), BucketMap(5))
    with pytest.raises(StoppedError):
        rescale_savepoint(savepoint.root, str(to), BucketMap(5), on_bucket=stop_after(buckets))
    with pytest.raises(MissingCheckpointError, match="there is no savepoint"):
        read_manifest(Folder(str(to)))
    # A temporary file, as a killed process may leave it.
    Path(Folder._temporary(str(to / "counts" / "1" / "half.arrow"))).parent.mkdir(parents=True, exist_ok=True)
    Path(Folder._temporary(str(to / "counts" / "1" / "half.arrow"))).write_bytes(b"half")
    written = {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in to.rglob("*.snapshot.arrow")}
    assert len(written) == buckets
    rescale_savepoint(savepoint.root, str(to), BucketMap(5))
    assert all((path.stat().st_ino, path.stat().st_mtime_ns) == stat for path, stat in written.items()), "unchanged"
    files = {name: data for name, data in read_contents(to).items() if "half" not in name}
    assert files == read_contents(tmp_path / "at once")
    assert read_model(to, tmp_path) == job.models[-1]


def test_a_folder_with_files_of_another_rescale_is_refused(savepoint: Folder, tmp_path: Path) -> None:
    to = str(tmp_path / "to")
    with pytest.raises(StoppedError):
        rescale_savepoint(savepoint.root, to, BucketMap(5), on_bucket=stop_after(2))
    with pytest.raises(UsageError, match="is not empty"):
        rescale_savepoint(savepoint.root, to, BucketMap(4))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match=r"is not empty \(notes.txt\)"):
        rescale_savepoint(savepoint.root, str(tmp_path / "mine"), BucketMap(5))


def test_an_existing_file_with_other_rows_is_detected(savepoint: Folder, tmp_path: Path) -> None:
    """An earlier run has lost some rows: the file is valid, and has the right name."""
    seen: list[SavedBucket] = []
    rescale_savepoint(savepoint.root, str(tmp_path / "whole"), BucketMap(2), on_bucket=seen.append)
    bucket, files = seen[1], open_files(tmp_path / "whole", seen[1])
    assert bucket.pointer.ref is not None
    rows = [batch.slice(1) for batch in read_saved_rows(files, bucket.pointer, bucket.files, SCHEMA, tmp_path)]
    into = open_files(tmp_path / "to", bucket)
    incomplete = write_snapshot(bucket.pointer, SCHEMA, rows, into, tmp_path)
    assert incomplete.files[0].name == bucket.files[0].name
    with pytest.raises(StorageError, match=r"but \d+ rows with \w+ in .*/to: remove the latter folder"):
        rescale_savepoint(savepoint.root, str(tmp_path / "to"), BucketMap(2))
    assert not (tmp_path / "to" / "savepoint.arrow").exists()


# -- refusals --------------------------------------------------------------------------------------


def refuse(
    savepoint: Folder, to: Path, error: type[StateError], text: str, bucket_map: BucketMap | None = None
) -> None:
    with pytest.raises(error, match=text):
        rescale_savepoint(savepoint.root, str(to), bucket_map or BucketMap(2))
    assert not (to / "savepoint.arrow").exists()


def set_operator(savepoint: Folder, **fields: Any) -> None:
    manifest = read_manifest(savepoint)
    operators = {name: replace(operator, **fields) for name, operator in manifest.header.operators.items()}
    os.unlink(savepoint.where("savepoint.arrow"))
    header = replace(manifest.header, operators=operators)
    savepoint.put("savepoint.arrow", encode_manifest(SavepointManifest(header, manifest.buckets)))


def test_invalid_arguments_are_refused(savepoint: Folder, tmp_path: Path) -> None:
    to = tmp_path / "to"
    refuse(savepoint, to, UsageError, "already has 3 buckets", bucket_map=BucketMap(3))
    refuse(savepoint, to, UsageError, "to a BucketMap of hashes, not", bucket_map=BucketMap.of_partitions({"": 2}))
    refuse(savepoint, to, UsageError, "from 1 to 32768, not 40000", bucket_map=BucketMap(40_000))
    with pytest.raises(UsageError, match="has no operator 'sums'; it has counts"):
        rescale_savepoint(savepoint.root, str(to), BucketMap(2), operator="sums")
    with pytest.raises(UsageError, match="must be a URL or an absolute path"):
        rescale_savepoint(savepoint.root, "to", BucketMap(2))
    refuse(Folder(str(tmp_path / "nothing")), to, MissingCheckpointError, "there is no savepoint at")
    set_operator(savepoint, mapped=BucketMap.of_partitions({"": 3}))
    refuse(savepoint, to, UsageError, "has 3 buckets by source partition: its buckets do not depend on key hashes")
    assert not to.exists()


def test_an_existing_savepoint_is_not_overwritten(savepoint: Folder, tmp_path: Path) -> None:
    rescale_savepoint(savepoint.root, str(tmp_path / "to"), BucketMap(2))
    before = (tmp_path / "to" / "savepoint.arrow").read_bytes()
    with pytest.raises(UsageError, match="there is already a savepoint at"):
        rescale_savepoint(savepoint.root, str(tmp_path / "to"), BucketMap(2))
    # Two concurrent calls write the same files; only one of them writes the manifest.
    racing = tmp_path / "racing"

    def rescale_concurrently(bucket: SavedBucket) -> None:
        if bucket.bucket == 1:
            rescale_savepoint(savepoint.root, str(racing), BucketMap(2))

    with pytest.raises(UsageError, match="there is already a savepoint at"):
        rescale_savepoint(savepoint.root, str(racing), BucketMap(2), on_bucket=rescale_concurrently)
    assert (tmp_path / "to" / "savepoint.arrow").read_bytes() == before
    assert main(["savepoint", "verify", str(racing)]) == 0


def test_a_claimed_savepoint_is_refused(savepoint: Folder, tmp_path: Path) -> None:
    claim_savepoint(savepoint, SavepointClaim(read_manifest(savepoint).header.id, "/root/counts/mine", "mine"), ())
    refuse(savepoint, tmp_path / "to", ClaimedError, "is claimed by the query at /root/counts/mine")


def copy(source: Folder, target: Folder, over: Callable[[], None]) -> None:
    manifest = read_manifest(source)
    files, done = sum(len(saved.files) for saved in manifest.buckets), itertools.count(1)
    copy_savepoint(source, manifest, target, lambda size: over() if next(done) == files else None)


def transform(source: Folder, target: Folder, over: Callable[[], None]) -> None:
    manifest = read_manifest(source)
    transformation, done = Transformation("counts", {}, (), {}, None), itertools.count(1)
    last = len(manifest.buckets)
    write_transformed(source, manifest, target, transformation, lambda buckets: over() if next(done) == last else None)


def rescale(source: Folder, target: Folder, over: Callable[[], None]) -> None:
    rescale_savepoint(
        source.root, target.root, BucketMap(2), on_bucket=lambda saved: over() if saved.bucket == 1 else None
    )


@pytest.mark.parametrize("write", [copy, transform, rescale])
def test_keys_that_are_erased_during_a_write_are_not_in_the_new_savepoint(
    write: Callable[[Folder, Folder, Callable[[], None]], None], job: Job, savepoint: Folder, tmp_path: Path
) -> None:
    erased, to = KEYS[1], Folder(str(tmp_path / "to"))
    # The key is erased from history only: the newest state no longer has it.
    for at in range(3):
        job.batch({key: None if key == erased else Row(at) for key in KEYS[1 if at == 0 else 2 :]})
    keys = pa.table({"name": [erased[0]], "x": [erased[1]]})

    def erase() -> None:
        options: dict[str, Any] = {"inline_batches": 0, "write_savepoints": True}
        erase_history(str(job.root), keys, operator="counts", savepoints=[savepoint.root], **options)

    with pytest.raises(ClaimedError, match="was rewritten meanwhile, because keys were erased from it: remove"):
        write(savepoint, to, erase)
    assert not (tmp_path / "to" / "savepoint.arrow").exists()
    assert erased in read_model_of_files(tmp_path / "to", tmp_path), "the files still have the erased key"
    with pytest.raises(UsageError, match="is not empty"):
        write(savepoint, to, lambda: None)
    shutil.rmtree(tmp_path / "to")
    write(savepoint, to, lambda: None)
    after = read_model(tmp_path / "to", tmp_path)
    assert after == {key: row for key, row in job.models[1].items() if key != erased}


def test_a_savepoint_may_be_deleted_after_its_last_bucket_was_read(job: Job, savepoint: Folder, tmp_path: Path) -> None:
    def delete(bucket: SavedBucket) -> None:
        if bucket.bucket == 1:
            shutil.rmtree(savepoint.root)

    result = rescale_savepoint(savepoint.root, str(tmp_path / "to"), BucketMap(2), on_bucket=delete)
    assert read_model(Path(result.path), tmp_path) == job.models[-1]


def flip_bit(path: Path) -> None:
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 1]) + data[len(data) // 2 + 1 :])


@pytest.mark.parametrize("form", [NATIVE, CANONICAL])
@pytest.mark.parametrize("damage", [flip_bit, Path.unlink, lambda path: path.write_bytes(b"short")])
def test_damaged_files_are_detected(form: str, damage: Callable[[Path], Any], job: Job, tmp_path: Path) -> None:
    savepoint = savepoint_of(job, tmp_path / "savepoint", form)
    for path in sorted(Path(savepoint.root).rglob("*_*.arrow")):
        data = path.read_bytes()
        # Write a new file: the query has a hard link to the old one.
        path.unlink()
        path.write_bytes(data)
        damage(path)
        refuse(savepoint, tmp_path / "to", CorruptFileError, path.name.split("_")[0])
        path.write_bytes(data)
        shutil.rmtree(tmp_path / "to", ignore_errors=True)


def test_rows_of_another_bucket_are_detected(savepoint: Folder, tmp_path: Path) -> None:
    set_operator(savepoint, mapped=BucketMap.between([0, 1 << 30, 1 << 31]))
    refuse(savepoint, tmp_path / "to", CorruptFileError, "has rows of another bucket")


# -- the command -----------------------------------------------------------------------------------


def test_the_command_prints_the_new_buckets(
    job: Job, savepoint: Folder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["rescale", savepoint.root, str(tmp_path / "to"), "--split", "1=2", "-o", "jsonl"]) == 0
    printed = capsys.readouterr()
    rows = [json.loads(line) for line in printed.out.splitlines()]
    after = read_manifest(Folder(str(tmp_path / "to")))
    assert rows == [
        {"operator": "counts", "bucket": saved.bucket, "rows": saved.pointer.rows, "bytes": saved.files[0].size_bytes}
        for saved in after.buckets
    ]
    assert after.header.operators["counts"].bucket_map == BucketMap.split(3, {1: 2})
    assert f"buckets=3->4 rows={len(job.models[-1])} checksum=" in printed.err
    assert "start a job from it with bucket_by=BucketMap.split(3, {1: 2})" in printed.err
    assert (
        main(
            [
                "rescale",
                str(tmp_path / "to"),
                str(tmp_path / "equal"),
                "--buckets",
                "2",
                "--split",
                "0=2",
                "--split",
                "1=2",
            ]
        )
        == 0
    )
    assert "start a job from it with buckets=4" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "give --buckets, --split or both"),
        (["--buckets", "3"], "already has 3 buckets"),
        (["--buckets", "0"], "a bucket map cannot be of kind 'hash' with 0 buckets"),
        (["--buckets", "x"], "Usage: spark-state-ext rescale"),
        (["--split", "1"], "such as 3=4, not '1'"),
        (["--split", "1=-2"], "such as 3=4, not '1=-2'"),
        (["--split", "1=2", "--split", "01=3"], "names bucket 1 twice"),
        (["--split", "3=2"], "bucket 3 of 3 cannot be split into 2"),
        (["--split", "1=0"], "bucket 1 of 3 cannot be split into 0"),
        (["--buckets", "2", "--operator", "sums"], "has no operator 'sums'"),
    ],
)
def test_the_command_refuses_invalid_arguments(
    arguments: list[str], text: str, savepoint: Folder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["rescale", savepoint.root, str(tmp_path / "to"), *arguments]) == 2
    assert text in capsys.readouterr().err
    assert not (tmp_path / "to").exists()


def test_the_command_needs_a_number_of_buckets_for_unequal_ranges(
    savepoint: Folder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["rescale", savepoint.root, str(tmp_path / "to"), "--split", "1=2"]) == 0
    assert main(["rescale", str(tmp_path / "to"), str(tmp_path / "more"), "--split", "1=2"]) == 2
    assert "has 4 buckets of unequal ranges: give --buckets, the number" in capsys.readouterr().err
    claim = ["savepoint", "claim", str(tmp_path / "to"), "--by", "Ann"]
    assert main(claim) == 0
    assert main(["rescale", str(tmp_path / "to"), str(tmp_path / "more"), "--buckets", "2"]) == 3
    assert "spark-state-ext rescale: ClaimedError: " in capsys.readouterr().err
