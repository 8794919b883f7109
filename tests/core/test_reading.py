"""Compare `open_state` with a dict: it reads the state after one committed batch, whatever files the folder has."""

from __future__ import annotations

import gc
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from core_support import clean_up_at
from reading_support import Job, as_model, bucket_of, state_of

from arrow_schemas.lineage import DELTA, SNAPSHOT, LineageHeader, file_name, parse_file_name
from spark_state_ext import open_state
from spark_state_ext.backends.replication import adapt_to_backends
from spark_state_ext.errors import CannotHoldError, CorruptFileError, LineageError, MissingCheckpointError, UsageError
from spark_state_ext.files.checkpoint import read_header
from spark_state_ext.files.folder import Folder
from spark_state_ext.files.retention import CleanUp, clean_up
from spark_state_ext.ownership.holds import HoldWatch
from spark_state_ext.reading import bodies
from spark_state_ext.reading.reader_hold import ReaderHold
from spark_state_ext.testing.model import KEYS, SCHEMA, Changes, Row, canonicalise
from spark_state_ext.timeline import bucket_files


def some_changes(random_: random.Random, at: int) -> Changes:
    """Make changes in all buckets, and some more, including removals and timeouts."""
    keys = [*EVERYWHERE, *random_.sample(KEYS, 5)]
    changes: dict[tuple[object, ...], Row | None] = {}
    for number, key in enumerate(keys):
        kind = random_.randrange(5)
        timeout_ms = random_.choice([None, 10, 20])
        changes[key] = None if kind == 0 else Row(at * 100 + number, f"n{at}", timeout_ms, defined=kind != 1)
    return changes


# One key of each of four buckets.
EVERYWHERE = [next(key for key in KEYS if bucket_of(key, 4) == bucket) for bucket in range(4)]


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    new_job = Job(tmp_path / "root", tmp_path)
    yield new_job
    new_job.close()


def lived(job: Job, batches: int, seed: int = 1) -> Job:
    random_ = random.Random(seed)
    for at in range(batches):
        job.batch(some_changes(random_, at))
    return job


@pytest.mark.parametrize("batches", [2, 3, 12, 40])
def test_the_newest_proven_batch_is_read(job: Job, batches: int) -> None:
    lived(job, batches)
    with open_state(job.root) as state:
        # The files of the last batch may come from a failed attempt.
        assert (state.batch, state.unit, state.begun_batch) == (batches - 2, "batch", batches - 1)
        assert state_of(state) == job.models[batches - 2]
        assert (state.operator, state.buckets, state.query_id) == ("counts", 4, "query")
        assert state.schema.names == ["name", "x", "count", "note", "timeout_ms"]


def test_each_older_batch_that_files_reach_is_read(job: Job) -> None:
    lived(job, 40)
    for batch in range(39):
        with open_state(job.root, batch=batch) as state:
            assert state.batch == batch
            assert state_of(state) == job.models[batch], batch
    with pytest.raises(MissingCheckpointError, match="the files have batch -1 to 38"):
        open_state(job.root, batch=39)


def test_get_returns_the_row_of_each_key(job: Job) -> None:
    lived(job, 25)
    with open_state(job.root) as state:
        model = job.models[state.batch]
        for key in [*KEYS, ("a", -0.0), ("b", -float("nan")), ("nobody", 1.0)]:
            table = state.get(key)
            row = model.get(canonicalise(key))
            assert table.num_rows == (row is not None), key
            if row is not None and row.defined:
                assert as_model(table) == {canonicalise(key): row}
        assert state.get({"name": "a", "x": 1.5}).equals(state.get(("a", 1.5)))
        assert state.bucket_of(("a", 1.5)) == bucket_of(("a", 1.5), 4)


@pytest.mark.parametrize("key", ["a", ("a",), ("a", 1.0, 2), {"name": "a"}, ("a", "no number")])
def test_get_refuses_invalid_keys(job: Job, key: object) -> None:
    lived(job, 2)
    with open_state(job.root) as state, pytest.raises(UsageError, match=r"name|key column"):
        state.get(key)


def test_scan_selects_columns_rows_and_buckets(job: Job) -> None:
    lived(job, 15)
    with open_state(job.root) as state:
        model = job.models[state.batch]
        few = state.scan(["count"], filter=(pc.field("count") > 700) & (pc.field("bucket") < 3)).read_all()
        assert few.schema.names == ["count"]
        counts = [row.count or 0 for key, row in model.items() if bucket_of(make_key(key), 4) < 3]
        assert sorted(few["count"].to_pylist()) == sorted(count for count in counts if count > 700)
        in_bucket = state.scan(["name", "x", "bucket", "key_hash"], buckets=[2]).read_all().to_pylist()
        assert {row["bucket"] for row in in_bucket} == {2}
        hashes = [row["key_hash"] for row in in_bucket]
        assert hashes == sorted(hashes)
        timeouts = state.timeouts().read_all()
        assert timeouts.schema.names == ["name", "x", "timeout_ms"]
        assert {(canonicalise(r["name"]), canonicalise(r["x"])): r["timeout_ms"] for r in timeouts.to_pylist()} == {
            key: row.timeout_ms for key, row in model.items() if row.timeout_ms is not None
        }
        for wrong in (["nothing"], "count"):
            with pytest.raises(UsageError, match="column"):
                state.scan(wrong)
        with pytest.raises(UsageError, match="no bucket 4"):
            state.scan(buckets=[4])
        with pytest.raises(UsageError, match="filter"):
            state.scan(filter=pc.field("nothing") > 1).read_all()


def make_key(canonical_key: tuple[object, ...]) -> tuple[object, ...]:
    name, x = canonical_key
    return name, float("nan") if x == "NaN" else x


def test_failed_attempts_are_not_read(job: Job) -> None:
    lived(job, 6)
    job.attempt({key: Row(-1, "never") for key in EVERYWHERE})
    job.batch({key: Row(7, "kept") for key in EVERYWHERE})
    job.attempt({key: Row(-2, "never") for key in EVERYWHERE})
    with open_state(job.root) as state:
        # Even a failed attempt received the committed checkpoint before it.
        assert (state.batch, state.begun_batch) == (6, 7)
        assert state_of(state) == job.models[6]
    job.batch({key: Row(8, "kept") for key in EVERYWHERE})
    with open_state(job.root) as state:
        assert state.batch == 6
        assert state_of(state) == job.models[6]
    job.batch({key: Row(9, "kept") for key in EVERYWHERE})
    with open_state(job.root) as state:
        assert state.batch == 7
        assert state_of(state) == job.models[7]


def test_a_bucket_without_new_files_limits_the_proven_batch(job: Job) -> None:
    job.retained = 100
    lived(job, 5)
    for at in range(3):
        job.batch({EVERYWHERE[0]: Row(at)})
    with open_state(job.root) as state:
        assert (state.batch, state.begun_batch, state.proven) == (3, 7, True)
        assert state_of(state) == job.models[3]
    with open_state(job.root, unproven=True) as state:
        assert (state.batch, state.proven) == (6, False)
        assert state_of(state) == job.models[6]


def test_batches_that_a_restart_from_an_earlier_batch_discarded_are_not_read(job: Job) -> None:
    job.retained = 100
    lived(job, 10)
    job.run_id = "another run"
    # Restart from batch 4 with other code; one bucket gets no rows.
    for at in range(4, 7):
        job.batch({key: Row(at, "anew") for key in EVERYWHERE[:3]}, at=at)
    with open_state(job.root, unproven=True) as state:
        assert state.batch == 5
        assert state_of(state) == job.models[5]
    with open_state(job.root) as state:
        # Batch 3 of the bucket without rows may be a failed attempt's.
        assert state.batch == 2
        assert state_of(state) == job.models[2]


@pytest.mark.parametrize("touched", [True, False])
def test_discarded_batches_stay_discarded_after_another_restart(job: Job, touched: bool) -> None:
    """The previous run restarted from an earlier batch; it has changed the bucket that is idle now, or not."""
    job.retained = 100
    lived(job, 10)
    idle, others = EVERYWHERE[3], EVERYWHERE[:3]
    job.run_id = "went back"
    job.batch({key: Row(4, "anew") for key in (*others, *([idle] if touched else []))}, at=4)
    for at in (5, 6):
        job.batch({key: Row(at, "anew") for key in others})
    job.run_id = "restarted"
    for at in (7, 8):
        job.batch({key: Row(at, "anew") for key in others})
    with open_state(job.root, unproven=True) as state:
        assert (state.batch, state_of(state)) == (7, job.models[7])
    with open_state(job.root) as state:
        assert (state.batch, state_of(state)) == ((3, job.models[3]) if touched else (2, job.models[2]))


def test_a_query_that_returns_to_discarded_batches_is_read(job: Job) -> None:
    """It went back, and then continued from a copy of the checkpoint with the discarded batches."""
    job.retained = 100
    idle, changes = EVERYWHERE[3], EVERYWHERE[0]
    for at in range(4):
        job.batch({changes: Row(at)})
    copy = ([*job.pointers], [*job.models])
    job.run_id = "went back"
    job.batch({idle: Row(1, "given up")}, at=2)
    job.pointers, job.models = copy
    job.run_id = "the copy"
    for at in (4, 5):
        job.batch({changes: Row(at)})
    with open_state(job.root, unproven=True) as state:
        assert state_of(state) == job.models[state.batch]
    job.run_id = "another bucket"
    for at in (6, 7):
        job.batch({EVERYWHERE[1]: Row(at)})
    for unproven in (False, True):
        with open_state(job.root, unproven=unproven) as state:
            assert state_of(state) == job.models[state.batch]


def test_after_a_restart_few_headers_are_read(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads the newest header of each bucket, and as many as it needs to find the checkpoint of a batch."""
    job.retained = 100
    batches = 40
    job.batch({key: Row(0) for key in EVERYWHERE})
    for at in range(1, batches):
        job.batch({key: Row(at) for key in EVERYWHERE[:3]})
    job.run_id = "restarted"
    for at in range(batches):
        job.batch({key: Row(at) for key in EVERYWHERE[:3]})
    read: list[object] = []

    def record_call(*arguments: Any) -> LineageHeader:
        read.append(arguments)
        return read_header(*arguments)

    monkeypatch.setattr(bucket_files, "read_header", record_call)
    with open_state(job.root, hold=False, unproven=True) as state:
        assert state_of(state) == job.models[state.batch]
    files = len(list(Path(job.folder.root).rglob("*.delta.arrow")))
    assert 3 < len(read) < files // 10, files


def test_heartbeats_count_if_tasks_do_not_know_their_batch(tmp_path: Path) -> None:
    job = lived(Job(tmp_path / "root", tmp_path, query_id="", told=False), 9)
    with open_state(job.root) as state:
        assert (state.unit, state.batch) == ("heartbeat", 8)
        assert state_of(state) == job.models[7]
    job.close()


def test_a_single_batch_cannot_be_proven(job: Job) -> None:
    with pytest.raises(MissingCheckpointError, match="no checkpoint file"):
        open_state(job.root)
    lived(job, 1)
    with pytest.raises(MissingCheckpointError, match=r"do not prove.*unproven=True$"):
        open_state(job.root)
    with pytest.raises(MissingCheckpointError, match=r"do not prove.*open_committed \(--checkpoint\)$"):
        open_state(job.root, unproven=True)


def test_a_snapshot_is_read_in_place(job: Job, tmp_path: Path) -> None:
    """No memory is allocated for its columns: they are in the mapped file."""
    lived(job, 14)
    snapshots = [
        (bucket, parsed[0].version)
        for bucket in range(4)
        for name in job.folder.child(str(bucket)).names()
        if (parsed := parse_file_name(name)) and parsed[1] == SNAPSHOT
    ]
    bucket, version = snapshots[0]
    with open_state(job.root, batch=version - 1) as state:
        gc.collect()
        allocated = pa.total_allocated_bytes()
        batches = list(state.scan(["count", "key_hash"], buckets=[bucket]))
        assert sum(batch.num_rows for batch in batches) > 0
        # Other threads may free memory meanwhile.
        assert pa.total_allocated_bytes() <= allocated


def test_the_checksums_of_a_mapped_file_are_verified_once(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    lived(job, 14)
    verified: list[str] = []
    real = bodies._check_body

    def record_call(data: pa.Buffer, where: str) -> Any:
        verified.append(where)
        return real(data, where)

    monkeypatch.setattr(bodies, "_check_body", record_call)
    with open_state(job.root) as state:
        first = state_of(state)
        files = sorted(verified)
        assert len(files) == len(set(files)) > 0
        assert state_of(state) == first == job.models[state.batch]
        assert sorted(verified) == files
    verified.clear()
    with open_state(job.root, memory_map=False) as state:
        assert [state_of(state), state_of(state)] == [first, first]
    # Files that were read into memory are not kept.
    assert sorted(verified) == sorted([*files, *files])


def test_lineage_lists_each_file(job: Job) -> None:
    lived(job, 14)
    job.attempt({key: Row(-1) for key in EVERYWHERE})
    with open_state(job.root) as state:
        table = state.lineage()
        files = {(bucket, name) for bucket in range(4) for name in job.folder.child(str(bucket)).names()}
        assert {(row["bucket"], row["name"]) for row in table.to_pylist()} == files
        read = table.filter(pc.field("state") == "read")
        assert {(row["bucket"], row["version"], row["id"]) for row in read.to_pylist()} == {
            (bucket, ref.version, ref.id) for bucket, ref in state.checkpoints.items() if ref
        }
        assert set(read["batch"].to_pylist()) == {state.batch}
        newest = table.filter(pc.field("version") == 15)
        assert newest.num_rows == 4
        assert newest["state"].null_count == newest.num_rows
        assert pc.min(table["size_bytes"]).as_py() > 0


def test_damage_raises_an_error_unless_other_files_have_the_state(job: Job) -> None:
    lived(job, 14)
    with open_state(job.root) as state:
        bucket, ref = next((b, r) for b, r in state.checkpoints.items() if r)
        model = job.models[state.batch]
    folder = Path(job.folder.root) / str(bucket)
    for snapshot in folder.glob("*.snapshot.arrow"):
        damage(snapshot)
    with open_state(job.root) as state:
        assert state_of(state) == model
    damage(folder / f"{ref}.delta.arrow")
    with open_state(job.root) as state, pytest.raises(CorruptFileError, match="fails its checksum"):
        state_of(state)
    with open_state(job.root, memory_map=False) as state, pytest.raises(CorruptFileError, match="fails its checksum"):
        state.scan(buckets=[bucket]).read_all()


def test_a_file_in_the_place_of_another_is_refused(job: Job) -> None:
    """If the newest file replaces its oldest ancestor, following the lineage would never end."""
    lived(job, 14)
    with open_state(job.root) as state:
        bucket, ref = next((b, r) for b, r in state.checkpoints.items() if r)
    folder = Path(job.folder.root) / str(bucket)
    newest = read_header(Folder(str(folder)), ref, DELTA)
    for oldest in newest.lineage:
        for kind in (DELTA, SNAPSHOT):
            path = folder / file_name(oldest, kind)
            if path.exists():
                shutil.copyfile(folder / file_name(ref, DELTA), path)
    with pytest.raises(LineageError, match="holds the delta of checkpoint"), open_state(job.root) as state:
        assert state.oldest_batch


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    # The damage is in the last record batch, not in the header.
    data[len(data) // 2] ^= 0x20
    path.write_bytes(bytes(data))


def test_a_clean_up_waits_for_readers(job: Job, tmp_path: Path) -> None:
    lived(job, 60)
    watch = HoldWatch()

    def clean_up_all() -> int:
        deleted = 0
        for bucket in range(4):
            pointer = adapt_to_backends(job.pointers[-2][bucket], ())
            request = clean_up_at(pointer, 2)
            request = CleanUp(pointer, request.head, 2, lambda: None, held=lambda: bool(watch.living(job.folder)))
            deleted += clean_up(job.folder.child(str(bucket)), request, tmp_path, now_s=4e9)
        return deleted

    with open_state(job.root, batch=20) as state:
        assert state.held
        assert clean_up_all() == 0
        assert state_of(state) == job.models[20]
    assert job.folder.child("holds").names() == []
    assert clean_up_all() > 0
    with pytest.raises(MissingCheckpointError, match=r"batch 20 .* the files have batch \d+ to 58"):
        open_state(job.root, batch=20)
    with open_state(job.root) as state:
        assert state_of(state) == job.models[58]
        oldest = state.oldest_batch
    with open_state(job.root, batch=oldest) as state:
        assert state_of(state) == job.models[oldest]


def test_a_reader_that_lost_its_hold_gets_an_error(job: Job) -> None:
    lived(job, 3)
    now_s = [0.0]
    hold = ReaderHold(job.folder, 60_000, lambda: now_s[0])
    hold.check()
    now_s[0] = 30.0
    hold.check()
    assert job.folder.child("holds").names() == [f"{hold.id}-00000001.json"]
    job.folder.child("holds").remove(f"{hold.id}-00000001.json")
    now_s[0] = 100.0
    for _ in range(2):
        with pytest.raises(MissingCheckpointError, match="is gone"):
            hold.check()


def test_a_hold_is_removed_with_its_reader(job: Job) -> None:
    lived(job, 3)
    state = open_state(job.root)
    assert len(job.folder.child("holds").names()) == 1
    del state
    assert job.folder.child("holds").names() == []
    with pytest.raises(MissingCheckpointError):
        open_state(job.root, batch=77)
    assert job.folder.child("holds").names() == []


def test_a_root_that_cannot_be_written_to_is_read_without_a_hold(job: Job) -> None:
    lived(job, 3)
    # Even the root user cannot create a folder in place of a file.
    job.folder.put("holds", b"")
    with pytest.raises(CannotHoldError, match="hold=False"):
        open_state(job.root)
    with open_state(job.root, hold=False) as state:
        assert not state.held
        assert state_of(state) == job.models[1]


def test_a_closed_state_refuses_all_reads(job: Job) -> None:
    lived(job, 3)
    with open_state(job.root) as state:
        reader = state.scan()
    with pytest.raises(UsageError, match="was closed"):
        state.scan()
    with pytest.raises(UsageError, match="was closed"):
        state.get(("a", 1.5))
    with pytest.raises(UsageError, match="was closed"):
        state.lineage()
    with pytest.raises(UsageError, match="was closed"):
        reader.read_all()


def test_a_path_names_a_root_an_operator_or_a_query_folder(tmp_path: Path) -> None:
    first = lived(Job(tmp_path / "root", tmp_path), 4)
    other = lived(Job(tmp_path / "root", tmp_path, query_id="second"), 3, seed=2)
    more = lived(Job(tmp_path / "root", tmp_path, operator="sums", query_id="third"), 5, seed=3)
    root = tmp_path / "root"
    with pytest.raises(UsageError, match="has the operators counts, sums: name one"):
        open_state(root)
    cases: list[tuple[Path, dict[str, Any], Job]] = [
        (root, {"operator": "counts"}, other),
        (root, {"operator": "sums"}, more),
        (root, {"operator": "counts", "query_folder": "query"}, first),
        (root / "counts", {"query_folder": "query"}, first),
        (root / "counts" / "query", {}, first),
        (root / "counts" / "query", {"operator": "counts"}, first),
    ]
    for path, named, job in cases:
        with open_state(path, **named) as state:
            assert state.path == job.folder.root
            assert state_of(state) == job.models[-2]
    wrong: list[tuple[Path, dict[str, Any], str]] = [
        (root, {"operator": "no"}, "no operator 'no'"),
        (root, {"operator": "counts", "query_folder": "no"}, "no query folder 'no'; it has query, second"),
        (root / "counts" / "query", {"operator": "sums"}, "not 'sums'"),
        (tmp_path / "nowhere", {}, "there is no folder"),
        (root / "counts" / "query" / "0", {}, "no state of an operator"),
    ]
    for path, named, text in wrong:
        with pytest.raises(UsageError, match=text):
            open_state(path, **named)
    for job in (first, other, more):
        job.close()


def test_a_root_in_memory_is_read(tmp_path: Path) -> None:
    job = lived(Job("memory://reading-test", tmp_path), 14)
    with open_state("memory://reading-test") as state:
        assert state_of(state) == job.models[12]
        assert as_model(state.get(EVERYWHERE[0])) == {
            key: row for key, row in job.models[12].items() if key == canonicalise(EVERYWHERE[0]) and row.defined
        }
    Folder("memory://").remove_tree("reading-test")
    job.close()


def test_a_state_has_its_key_and_state_schemas(job: Job) -> None:
    lived(job, 2)
    with open_state(job.root) as state:
        assert list(state.key_schema) == [field.with_nullable(True) for field in SCHEMA.keys]
        assert list(state.state_schema) == [field.with_nullable(True) for field in SCHEMA.state]
