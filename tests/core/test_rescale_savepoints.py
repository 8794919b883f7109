"""A savepoint that is written anew with another bucket map: against a dict, stopped anywhere, started from, refused."""

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


def job_of_batches(folder: Path, buckets: int, batches: list[Any]) -> Job:
    job = Job(folder / "old", folder / "old-local", buckets=buckets)
    for changes in batches:
        job.batch(changes)
    return job


def model_in(savepoint: Path, scratch: Path) -> Model:
    """All rows, bucket by bucket, with those that have a timeout only."""
    folder, found = Folder(str(savepoint)), Model()
    for it in read_manifest(folder).buckets:
        rows = make_model(
            read_saved_rows(folder.child(it.operator, str(it.bucket)), it.pointer, it.files, SCHEMA, scratch)
        )
        assert len(rows) <= it.pointer.rows
        found |= rows
    return found


def model_in_files(savepoint: Path, scratch: Path) -> Model:
    """The rows of checkpoint files that no manifest names yet."""
    found = Model()
    for path in savepoint.rglob("*.arrow"):
        named = parse_file_name(path.name)
        assert named is not None
        read = read_checkpoint(Folder(str(path.parent)), *named, SCHEMA, scratch)
        found |= make_model(rows.filter(pc.invert(rows.column(DELETED))) for rows in read.batches)
    return found


def contents(folder: Path) -> dict[str, bytes]:
    """All files but the manifest."""
    files = (it for it in folder.rglob("*.arrow") if it.name != "savepoint.arrow")
    return {str(it.relative_to(folder)): it.read_bytes() for it in files}


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    """Three buckets with all keys, some of them changed twice, some gone, some with a timeout."""
    made = job_of_batches(
        tmp_path,
        3,
        [
            {key: Row(at, "first", at) for at, key in enumerate(KEYS)},
            {key: None if at % 5 == 0 else Row(at, "again", 20) for at, key in enumerate(KEYS[:12])},
        ],
    )
    yield made
    made.close()


@pytest.fixture
def savepoint(job: Job, tmp_path: Path) -> Folder:
    return savepoint_of(job, tmp_path / "savepoint")


# -- rows ------------------------------------------------------------------------------------------


@given(COUNTS, COUNTS, st.lists(change_sets(), max_size=4), st.lists(change_sets(), max_size=2), st.data())
@settings(max_examples=examples(10, 400), deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate))
def test_any_number_of_buckets_to_any_other_and_a_job_goes_on(
    n: int, m: int, before: list[Any], after: list[Any], data: st.DataObject
) -> None:
    assume(n != m)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        old = job_of_batches(folder, n, before)
        savepoint_of(old, folder / "savepoint", data.draw(st.sampled_from([NATIVE, CANONICAL])))
        made = rescale_savepoint(str(folder / "savepoint"), str(folder / "to"), BucketMap(m))
        old.close()
        model = old.models[-1] if old.models else {}
        assert model_in(folder / "to", folder) == model
        assert made.operators["counts"].rows == len(model)
        job = job_from(folder / "new", old, BucketMap(m), Savepoint(str(folder / "to")))
        query = RescaledQuery(job, folder, model)
        for _ in range(data.draw(st.integers(1, 2))):
            query.start()
        for gone in ("savepoint", "to", "old"):
            shutil.rmtree(folder / gone)
        assert all(it.parents is None for it in query.pointers), "it needs no other bucket"
        assert query.state() == query.restored() == query.model
        for changes in after:
            query.batch(changes)
            if data.draw(st.booleans()):
                query.lose_disks()
            assert query.state() == query.model


@pytest.mark.parametrize(("before", "after"), whole([(2, 5), (3, 1)], [(1, 64), (7, 6), (64, 3)]))
def test_values_of_all_types_and_times_to_live_stay(before: int, after: int, tmp_path: Path) -> None:
    wide = wide_savepoint(tmp_path, BucketMap(before))
    assert rows_of(wide.folder, "wide", WIDE, tmp_path) == wide.rows
    assert len(wide.rows) == len(WIDE_KEYS) - 3
    made = rescale_savepoint(wide.folder.root, str(tmp_path / "to"), BucketMap(after))
    assert rows_of(Folder(made.path), "wide", WIDE, tmp_path) == wide.rows
    assert any("'state.__expires_ms': 1000" in row for row in wide.rows)
    assert made.operators["wide"].rows == len(wide.rows)


def test_one_bucket_alone_is_split_and_joined_again(job: Job, savepoint: Folder, tmp_path: Path) -> None:
    split = rescale_savepoint(savepoint.root, str(tmp_path / "split"), BucketMap.split(3, {1: 4}))
    assert model_in(tmp_path / "split", tmp_path) == job.models[-1]
    joined = rescale_savepoint(split.path, str(tmp_path / "joined"), BucketMap(3))
    assert model_in(tmp_path / "joined", tmp_path) == job.models[-1]
    assert joined.operators["counts"].checksum == split.operators["counts"].checksum
    assert joined.operators["counts"].before.buckets == 6
    assert model_in(Path(savepoint.root), tmp_path) == job.models[-1], "the old one stays"
    with open_state(split.path) as state:
        for name, x in KEYS:
            found = state.get({"name": name, "x": x})
            there = ("NaN" if x is not None and x != x else x) in {k[1] for k in job.models[-1] if k[0] == name}
            assert found.num_rows == there, "keys are where their hash says"


def test_a_job_starts_with_one_bucket_that_was_split(job: Job, savepoint: Folder, tmp_path: Path) -> None:
    bucket_map = BucketMap.split(3, {1: 4})
    made = rescale_savepoint(savepoint.root, str(tmp_path / "split"), bucket_map)
    query = RescaledQuery(
        job_from(tmp_path / "new", job, bucket_map, Savepoint(made.path)), tmp_path, dict(job.models[-1])
    )
    query.start()
    query.batch({KEYS[0]: Row(7), KEYS[1]: None})
    assert query.state() == query.restored() == query.model
    with pytest.raises(BucketMapChangedError):
        job_from(tmp_path / "other", job, BucketMap(6), None).operator_file("q").succeeded_by(
            read_manifest(Folder(made.path)).header.operators["counts"]
        )


def test_files_of_many_batches_are_cut_within_them(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "CHUNK_ROWS", 2)
    savepoint = savepoint_of(job, tmp_path / "savepoint", CANONICAL)
    checksums = set()
    for buckets in (1, 2, 5, 8):
        made = rescale_savepoint(savepoint.root, str(tmp_path / f"{buckets}"), BucketMap(buckets))
        assert model_in(Path(made.path), tmp_path) == job.models[-1]
        checksums.add(made.operators["counts"].checksum)
    assert len(checksums) == 1
    (one,) = read_manifest(Folder(str(tmp_path / "1"))).buckets
    assert one.pointer.ref is not None
    read = read_checkpoint(_files(tmp_path / "1", one), one.pointer.ref, SNAPSHOT, SCHEMA, tmp_path)
    assert len(list(read.batches)) == -(-len(job.models[-1]) // 2)


def test_pointers_say_what_those_of_the_parents_said(savepoint: Folder, tmp_path: Path) -> None:
    manifest = read_manifest(savepoint)
    spread = tuple(
        replace(it, pointer=replace(it.pointer, watermark_ms=at or None, heartbeats=10 + at, calls=20 - at))
        for at, it in enumerate(manifest.buckets)
    )
    os.unlink(savepoint.where("savepoint.arrow"))
    write_manifest(savepoint, replace(manifest, buckets=spread))
    rescale_savepoint(savepoint.root, str(tmp_path / "to"), BucketMap(2))
    after = read_manifest(Folder(str(tmp_path / "to")))
    assert after.header.form == CANONICAL
    assert after.header.id != manifest.header.id
    same = ("query_id", "batch", "watermark_ms", "offsets")
    assert [getattr(after.header, name) for name in same] == [getattr(manifest.header, name) for name in same]
    assert [(it.pointer.watermark_ms, it.pointer.heartbeats, it.pointer.calls) for it in after.buckets] == [
        (1, 11, 20),
        (2, 12, 19),
    ]
    for it in after.buckets:
        pointer = it.pointer
        assert (pointer.buckets, pointer.parents, pointer.replication, pointer.query_folder) == (2, None, {}, "")
        assert pointer.ref is not None
        assert [file.name for file in it.files] == [file_name(pointer.ref, SNAPSHOT)]
        assert pointer.version > max(old.pointer.version for old in spread)
        assert pointer.batch == manifest.header.batch
        timeouts = [
            row.timeout_ms
            for row in make_model(
                read_saved_rows(_files(tmp_path / "to", it), pointer, it.files, SCHEMA, tmp_path)
            ).values()
            if row.timeout_ms is not None
        ]
        assert pointer.earliest_timeout_ms is None or pointer.earliest_timeout_ms <= min(timeouts)


def _files(savepoint: Path, bucket: SavedBucket) -> Folder:
    return Folder(str(savepoint)).child(bucket.operator, str(bucket.bucket))


@pytest.mark.parametrize("form", ["native", "canonical"])
def test_a_savepoint_of_the_first_release_is_rescaled(form: str, tmp_path: Path) -> None:
    rescale_savepoint(str(GOLDEN / form), str(tmp_path / "to"), BucketMap(5))
    before, after = (
        pa.concat_tables(savepoint_tables(str(it))).sort_by([("day", "ascending"), ("name", "ascending")])
        for it in (GOLDEN / form, tmp_path / "to")
    )
    assert after.equals(before)
    assert after.num_rows == len(json.loads((GOLDEN / "expected.json").read_text()))


def test_other_operators_are_copied_as_they_are(tmp_path: Path) -> None:
    jobs = [Job(tmp_path / name, tmp_path / name, operator=name, query_id="q", buckets=2) for name in ("b", "a", "c")]
    target, saved = Folder(str(tmp_path / "savepoint")), []
    for it in jobs:
        it.batch({key: Row(at, it.operator) for at, key in enumerate(KEYS)})
        it.batch({KEYS[0]: None})
        for pointer in it.pointers[-1]:
            files = sole_replica(it.folder.child(str(pointer.bucket)), it.scratch, "fsspec")
            into = target.child(it.operator, str(pointer.bucket))
            saved.append(save_bucket(pointer, files, into, NATIVE, SCHEMA, it.scratch).saved)
        it.close()
    operators = {it.operator: operator_file(it.operator, "q", 2) for it in jobs}
    header = SavepointHeader("5b" * 16, NATIVE, 1_700_000_000_000, operators, "0.1.0", "q", 1, None)
    saved.sort(key=lambda it: (it.operator, it.bucket))
    write_manifest(target, SavepointManifest(header, tuple(saved)))
    seen: list[str] = []
    made = rescale_savepoint(
        target.root, str(tmp_path / "one"), BucketMap(3), operator="b", on_bucket=lambda it: seen.append(it.operator)
    )
    assert list(made.operators) == ["b"]
    assert seen == ["a", "a", "b", "b", "b", "c", "c"]
    before, after = contents(tmp_path / "savepoint"), contents(tmp_path / "one")
    for name in ("a/", "c/"):
        assert {k: v for k, v in after.items() if k.startswith(name)} == {
            k: v for k, v in before.items() if k.startswith(name)
        }
    assert main(["savepoint", "verify", str(tmp_path / "one")]) == 0
    made = rescale_savepoint(Savepoint(str(tmp_path / "one"), operator="c"), str(tmp_path / "two"), BucketMap(3))
    assert list(made.operators) == ["c"]
    # Two have three buckets already, and stay as they are.
    made = rescale_savepoint(str(tmp_path / "two"), str(tmp_path / "all"), BucketMap(3))
    assert list(made.operators) == ["a"]
    assert [it.buckets for it in read_manifest(Folder(made.path)).header.operators.values()] == [3, 3, 3]
    for name in ("a", "b", "c"):
        tables = savepoint_tables(Savepoint(made.path, operator=name))
        assert sum(it.num_rows for it in tables) == len(KEYS) - 1


def test_it_goes_to_an_object_store_and_back(s3: Any, job: Job, savepoint: Folder, tmp_path: Path) -> None:
    there = s3.root(f"rescaled-{tmp_path.name}")
    with pytest.raises(StoppedError):
        rescale_savepoint(savepoint.root, there, BucketMap(4), storage_options=s3.options, on_bucket=stop_after(2))
    rescale_savepoint(savepoint.root, there, BucketMap(4), storage_options=s3.options)
    back = rescale_savepoint(Savepoint(there, storage_options=s3.options), str(tmp_path / "back"), BucketMap(3))
    assert model_in(Path(back.path), tmp_path) == job.models[-1]


# -- digests ---------------------------------------------------------------------------------------


def digest(*batches: pa.RecordBatch) -> tuple[int, str]:
    found = RowsDigest()
    for batch in batches:
        found.add(batch)
    return found.rows, found.value


@given(st.lists(st.integers(0, len(WIDE_KEYS)), max_size=4))
@settings(max_examples=examples(40), deadline=None)
def test_a_digest_is_that_of_the_rows_however_they_are_cut(cuts: list[int]) -> None:
    rows = wide_rows(list(WIDE_KEYS), 1)
    borders = [0, *sorted(cuts), rows.num_rows]
    parts = [rows.slice(low, high - low) for low, high in itertools.pairwise(borders)]
    assert digest(*parts) == digest(rows)


@pytest.mark.parametrize("column", range(len(WIDE.arrow)))
def test_one_other_value_is_another_digest(column: int) -> None:
    first, second = wide_rows(list(WIDE_KEYS), 1), wide_rows(list(WIDE_KEYS), 2)
    name = WIDE.arrow.field(column).name
    values = first.column(column)
    if name.startswith(("key", "deleted", "defined")):
        changed = values.take(pa.array([*range(1, len(values)), 0]))
        other = pc.invert(values) if pa.types.is_boolean(values.type) else changed
    else:
        other = second.column(column)
    assert other.to_pylist() != values.to_pylist()
    made = first.set_column(column, WIDE.arrow.field(column), other)
    assert digest(made) != digest(first)


@pytest.mark.parametrize(
    ("one", "other"),
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
def test_what_is_like_it_is_another_digest(one: pa.Array, other: pa.Array) -> None:
    assert digest(pa.record_batch([one], ["c"])) != digest(pa.record_batch([other], ["c"]))


# -- stopped ---------------------------------------------------------------------------------------


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
def test_stopped_and_run_again(buckets: int, job: Job, savepoint: Folder, tmp_path: Path) -> None:
    to = tmp_path / "to"
    rescale_savepoint(savepoint.root, str(tmp_path / "at once"), BucketMap(5))
    with pytest.raises(StoppedError):
        rescale_savepoint(savepoint.root, str(to), BucketMap(5), on_bucket=stop_after(buckets))
    with pytest.raises(MissingCheckpointError, match="there is no savepoint"):
        read_manifest(Folder(str(to)))
    # What a process that was killed may leave beside.
    Path(Folder._temporary(str(to / "counts" / "1" / "half.arrow"))).parent.mkdir(parents=True, exist_ok=True)
    Path(Folder._temporary(str(to / "counts" / "1" / "half.arrow"))).write_bytes(b"half")
    written = {it: (it.stat().st_ino, it.stat().st_mtime_ns) for it in to.rglob("*.snapshot.arrow")}
    assert len(written) == buckets
    rescale_savepoint(savepoint.root, str(to), BucketMap(5))
    assert all((it.stat().st_ino, it.stat().st_mtime_ns) == was for it, was in written.items()), "not written again"
    left = {name: data for name, data in contents(to).items() if "half" not in name}
    assert left == contents(tmp_path / "at once")
    assert model_in(to, tmp_path) == job.models[-1]


def test_what_another_run_has_left_is_refused(savepoint: Folder, tmp_path: Path) -> None:
    to = str(tmp_path / "to")
    with pytest.raises(StoppedError):
        rescale_savepoint(savepoint.root, to, BucketMap(5), on_bucket=stop_after(2))
    with pytest.raises(UsageError, match="is not empty"):
        rescale_savepoint(savepoint.root, to, BucketMap(4))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match=r"is not empty \(notes.txt\)"):
        rescale_savepoint(savepoint.root, str(tmp_path / "mine"), BucketMap(5))


def test_other_rows_under_the_name_of_a_new_file_are_found(savepoint: Folder, tmp_path: Path) -> None:
    """As if a run before had lost some: the file is whole, and its name is right."""
    seen: list[SavedBucket] = []
    rescale_savepoint(savepoint.root, str(tmp_path / "whole"), BucketMap(2), on_bucket=seen.append)
    bucket, files = seen[1], _files(tmp_path / "whole", seen[1])
    assert bucket.pointer.ref is not None
    rows = [batch.slice(1) for batch in read_saved_rows(files, bucket.pointer, bucket.files, SCHEMA, tmp_path)]
    into = _files(tmp_path / "to", bucket)
    lost = write_snapshot(bucket.pointer, SCHEMA, rows, into, tmp_path)
    assert lost.files[0].name == bucket.files[0].name
    with pytest.raises(StorageError, match=r"but \d+ rows with \w+ in .*/to: remove the latter folder"):
        rescale_savepoint(savepoint.root, str(tmp_path / "to"), BucketMap(2))
    assert not (tmp_path / "to" / "savepoint.arrow").exists()


# -- refused ---------------------------------------------------------------------------------------


def refused(
    savepoint: Folder, to: Path, error: type[StateError], text: str, bucket_map: BucketMap | None = None
) -> None:
    with pytest.raises(error, match=text):
        rescale_savepoint(savepoint.root, str(to), bucket_map or BucketMap(2))
    assert not (to / "savepoint.arrow").exists()


def with_operator(savepoint: Folder, **fields: Any) -> None:
    manifest = read_manifest(savepoint)
    operators = {name: replace(it, **fields) for name, it in manifest.header.operators.items()}
    os.unlink(savepoint.where("savepoint.arrow"))
    header = replace(manifest.header, operators=operators)
    savepoint.put("savepoint.arrow", encode_manifest(SavepointManifest(header, manifest.buckets)))


def test_what_cannot_be_asked_for(savepoint: Folder, tmp_path: Path) -> None:
    to = tmp_path / "to"
    refused(savepoint, to, UsageError, "already has 3 buckets", bucket_map=BucketMap(3))
    refused(savepoint, to, UsageError, "to a BucketMap of hashes, not", bucket_map=BucketMap.of_partitions({"": 2}))
    refused(savepoint, to, UsageError, "from 1 to 32768, not 40000", bucket_map=BucketMap(40_000))
    with pytest.raises(UsageError, match="has no operator 'sums'; it has counts"):
        rescale_savepoint(savepoint.root, str(to), BucketMap(2), operator="sums")
    with pytest.raises(UsageError, match="must be a URL or an absolute path"):
        rescale_savepoint(savepoint.root, "to", BucketMap(2))
    refused(Folder(str(tmp_path / "nothing")), to, MissingCheckpointError, "there is no savepoint at")
    with_operator(savepoint, mapped=BucketMap.of_partitions({"": 3}))
    refused(savepoint, to, UsageError, "has 3 buckets by source partition: its buckets do not depend on key hashes")
    assert not to.exists()


def test_a_savepoint_that_is_there_stays(savepoint: Folder, tmp_path: Path) -> None:
    rescale_savepoint(savepoint.root, str(tmp_path / "to"), BucketMap(2))
    before = (tmp_path / "to" / "savepoint.arrow").read_bytes()
    with pytest.raises(UsageError, match="there is already a savepoint at"):
        rescale_savepoint(savepoint.root, str(tmp_path / "to"), BucketMap(2))
    # Two at a time make the same files; one of them makes the savepoint.
    racing = tmp_path / "racing"

    def other(bucket: SavedBucket) -> None:
        if bucket.bucket == 1:
            rescale_savepoint(savepoint.root, str(racing), BucketMap(2))

    with pytest.raises(UsageError, match="there is already a savepoint at"):
        rescale_savepoint(savepoint.root, str(racing), BucketMap(2), on_bucket=other)
    assert (tmp_path / "to" / "savepoint.arrow").read_bytes() == before
    assert main(["savepoint", "verify", str(racing)]) == 0


def test_a_claimed_savepoint_is_refused(savepoint: Folder, tmp_path: Path) -> None:
    claim_savepoint(savepoint, SavepointClaim(read_manifest(savepoint).header.id, "/root/counts/mine", "mine"), ())
    refused(savepoint, tmp_path / "to", ClaimedError, "is claimed by the query at /root/counts/mine")


def copy(source: Folder, target: Folder, over: Callable[[], None]) -> None:
    manifest = read_manifest(source)
    files, done = sum(len(it.files) for it in manifest.buckets), itertools.count(1)
    copy_savepoint(source, manifest, target, lambda size: over() if next(done) == files else None)


def transform(source: Folder, target: Folder, over: Callable[[], None]) -> None:
    manifest = read_manifest(source)
    wanted, done = Transformation("counts", {}, (), {}, None), itertools.count(1)
    last = len(manifest.buckets)
    write_transformed(source, manifest, target, wanted, lambda buckets: over() if next(done) == last else None)


def rescale(source: Folder, target: Folder, over: Callable[[], None]) -> None:
    rescale_savepoint(source.root, target.root, BucketMap(2), on_bucket=lambda it: over() if it.bucket == 1 else None)


@pytest.mark.parametrize("write", [copy, transform, rescale])
def test_keys_that_are_erased_meanwhile_are_not_in_the_new_one(
    write: Callable[[Folder, Folder, Callable[[], None]], None], job: Job, savepoint: Folder, tmp_path: Path
) -> None:
    gone, to = KEYS[1], Folder(str(tmp_path / "to"))
    # They are erased from the past only: in the newest state the key is no more.
    for at in range(3):
        job.batch({key: None if key == gone else Row(at) for key in KEYS[1 if at == 0 else 2 :]})
    keys = pa.table({"name": [gone[0]], "x": [gone[1]]})

    def erase() -> None:
        given: dict[str, Any] = {"inline_batches": 0, "write_savepoints": True}
        erase_history(str(job.root), keys, operator="counts", savepoints=[savepoint.root], **given)

    with pytest.raises(ClaimedError, match="was rewritten meanwhile, because keys were erased from it: remove"):
        write(savepoint, to, erase)
    assert not (tmp_path / "to" / "savepoint.arrow").exists()
    assert gone in model_in_files(tmp_path / "to", tmp_path), "that is why"
    with pytest.raises(UsageError, match="is not empty"):
        write(savepoint, to, lambda: None)
    shutil.rmtree(tmp_path / "to")
    write(savepoint, to, lambda: None)
    after = model_in(tmp_path / "to", tmp_path)
    assert after == {key: row for key, row in job.models[1].items() if key != gone}


def test_one_that_its_owner_deletes_meanwhile_was_read(job: Job, savepoint: Folder, tmp_path: Path) -> None:
    def delete(bucket: SavedBucket) -> None:
        if bucket.bucket == 1:
            shutil.rmtree(savepoint.root)

    made = rescale_savepoint(savepoint.root, str(tmp_path / "to"), BucketMap(2), on_bucket=delete)
    assert model_in(Path(made.path), tmp_path) == job.models[-1]


def _flip(path: Path) -> None:
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 1]) + data[len(data) // 2 + 1 :])


@pytest.mark.parametrize("form", [NATIVE, CANONICAL])
@pytest.mark.parametrize("damage", [_flip, Path.unlink, lambda path: path.write_bytes(b"short")])
def test_damaged_files_are_found(form: str, damage: Callable[[Path], Any], job: Job, tmp_path: Path) -> None:
    savepoint = savepoint_of(job, tmp_path / "savepoint", form)
    for path in sorted(Path(savepoint.root).rglob("*_*.arrow")):
        data = path.read_bytes()
        # Not in place: the query has a hard link to it.
        path.unlink()
        path.write_bytes(data)
        damage(path)
        refused(savepoint, tmp_path / "to", CorruptFileError, path.name.split("_")[0])
        path.write_bytes(data)
        shutil.rmtree(tmp_path / "to", ignore_errors=True)


def test_rows_of_another_bucket_are_found(savepoint: Folder, tmp_path: Path) -> None:
    with_operator(savepoint, mapped=BucketMap.between([0, 1 << 30, 1 << 31]))
    refused(savepoint, tmp_path / "to", CorruptFileError, "has rows of another bucket")


# -- the command -----------------------------------------------------------------------------------


def test_the_command_tells_the_new_buckets(
    job: Job, savepoint: Folder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["rescale", savepoint.root, str(tmp_path / "to"), "--split", "1=2", "-o", "jsonl"]) == 0
    told = capsys.readouterr()
    rows = [json.loads(line) for line in told.out.splitlines()]
    after = read_manifest(Folder(str(tmp_path / "to")))
    assert rows == [
        {"operator": "counts", "bucket": it.bucket, "rows": it.pointer.rows, "bytes": it.files[0].size_bytes}
        for it in after.buckets
    ]
    assert after.header.operators["counts"].bucket_map == BucketMap.split(3, {1: 2})
    assert f"buckets=3->4 rows={len(job.models[-1])} checksum=" in told.err
    assert "start a job from it with bucket_by=BucketMap.split(3, {1: 2})" in told.err
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
def test_a_wrong_call_is_refused(
    arguments: list[str], text: str, savepoint: Folder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["rescale", savepoint.root, str(tmp_path / "to"), *arguments]) == 2
    assert text in capsys.readouterr().err
    assert not (tmp_path / "to").exists()


def test_of_unequal_ranges_the_command_asks_for_a_number(
    savepoint: Folder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["rescale", savepoint.root, str(tmp_path / "to"), "--split", "1=2"]) == 0
    assert main(["rescale", str(tmp_path / "to"), str(tmp_path / "more"), "--split", "1=2"]) == 2
    assert "has 4 buckets of unequal ranges: give --buckets, the number" in capsys.readouterr().err
    claim = ["savepoint", "claim", str(tmp_path / "to"), "--by", "Ann"]
    assert main(claim) == 0
    assert main(["rescale", str(tmp_path / "to"), str(tmp_path / "more"), "--buckets", "2"]) == 3
    assert "spark-state-ext rescale: ClaimedError: " in capsys.readouterr().err
