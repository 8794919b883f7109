"""Lazy restore: a lookup fetches only the pieces of a remote snapshot that it needs, and always returns the right
state."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from functools import partial
from itertools import pairwise
from operator import methodcaller
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
from lazy_bucket import (
    KEYS,
    LAST,
    SCHEMA,
    SNAPSHOT_NAME,
    Later,
    Remote,
    are_rows_of,
    base_suffixes,
    bucket_on,
    expected,
    lazy_files,
    looked_up,
    rows_of,
)

from arrow_schemas import CheckpointRef
from arrow_schemas.blocks import PIECE_BYTES
from arrow_schemas.equality import HashArray
from arrow_schemas.row import TIMEOUT_MS, RowSchema
from spark_state_ext.backends.files import sole_replica
from spark_state_ext.engine.bucket import Sizes
from spark_state_ext.errors import (
    CorruptError,
    LiveRunError,
    MissingRunError,
    UsageError,
)
from spark_state_ext.restore import lazy as lazy_restore
from spark_state_ext.restore.lazy import BYTES_MIN, FILL_BYTES_PER_S_MAX, group_pieces, lazy_options
from spark_state_ext.store import LocalStore
from spark_state_ext.store.lazy_file import LazyFile
from spark_state_ext.worker.background import Foreground, Inline
from spark_state_ext.worker.spill import SpillBuffer
from tests.helpers.waiting import WAIT_S


@pytest.fixture
def remote(tmp_path: Path) -> Remote:
    return Remote.made(tmp_path)


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore.at(tmp_path / "store", SCHEMA)


def test_a_lookup_fetches_only_a_part_of_the_snapshot(remote: Remote, store: LocalStore, tmp_path: Path) -> None:
    bucket, keys = bucket_on(store, remote, tmp_path), [5, 12_000]
    assert bucket.read(lambda view: looked_up(view, keys, remote)) == expected(keys, remote)
    assert 0 < remote.folder.fetched_bytes < len(remote.snapshot) / 2
    assert base_suffixes(store) == [".arrow", ".lazy"]
    (lazy,) = lazy_files(store)
    assert 0 < len(lazy.absent()) < lazy.pieces
    # The same lookup again fetches nothing.
    before = remote.folder.requests
    assert bucket.read(lambda view: looked_up(view, keys, remote)) == expected(keys, remote)
    assert remote.folder.requests == before
    assert bucket.fetched_files == 1
    assert bucket.read(Sizes.of).rows_max == len(remote.keys)


@pytest.mark.parametrize("bad_hashes", [False, True], ids=["even", "clustered"])
def test_a_lookup_finds_keys_with_any_hashes(store: LocalStore, tmp_path: Path, bad_hashes: bool) -> None:
    remote = Remote.made(tmp_path, bad_hashes=bad_hashes)
    bucket, rng = bucket_on(store, remote, tmp_path), np.random.default_rng(7)
    for count in (1, 3, 40, 2_000):
        keys = rng.choice(13_000, count, replace=False).tolist()
        assert bucket.read(partial(looked_up, keys=keys, remote=remote)) == expected(keys, remote)
    assert lazy_files(store)
    assert bucket.read(lambda view: looked_up(view, [], remote)) == {}
    # Keys that share the hash at the end of one chunk and the beginning of the next.
    chunks = store.runs()[0].chunks
    border = {int(chunk.hash_max) for chunk in chunks[:-1]} | {int(chunk.hash_min) for chunk in chunks[1:]}
    keys = [int(key) for key, hashed in zip(remote.keys, remote.hashed, strict=True) if int(hashed) in border]
    assert bucket.read(lambda view: looked_up(view, keys, remote)) == expected(keys, remote)


def test_the_fixture_has_one_hash_in_two_chunks(remote: Remote, store: LocalStore, tmp_path: Path) -> None:
    """The test above needs such a hash."""
    bucket_on(store, remote, tmp_path).read(Sizes.of)
    chunks = store.runs()[0].chunks
    assert len(chunks) == 4
    assert any(before.hash_max == after.hash_min for before, after in pairwise(chunks))


def test_values_of_a_column_of_nulls_are_not_fetched(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A column of timeouts takes eight bytes for each row, even without any timeout."""
    monkeypatch.setattr(lazy_restore, "_GAP_PIECES", 0)
    remote = Remote.made(tmp_path, chunk_rows=12_000)
    keys = np.random.default_rng(3).choice(12_000, 1_000, replace=False).tolist()
    assert bucket_on(store, remote, tmp_path).read(partial(looked_up, keys=keys, remote=remote)) == expected(
        keys, remote
    )
    (lazy,) = lazy_files(store)
    _, values = lazy.chunk(0, SCHEMA.arrow).column(TIMEOUT_MS).buffers()
    start = values.address - lazy.buffer.address
    inside = np.arange(-(-start // PIECE_BYTES), (start + values.size) // PIECE_BYTES)
    assert len(inside) > 3
    fetched = set(inside.tolist()) - set(lazy.absent().tolist())
    assert not fetched


def test_a_scan_fetches_the_rest_of_the_snapshot(store: LocalStore, tmp_path: Path) -> None:
    remote = Remote.made(tmp_path, timeouts=True)
    bucket = bucket_on(store, remote, tmp_path)
    assert bucket.read(lambda view: looked_up(view, [5], remote)) == expected([5], remote)
    # Times before the first timeout and after the last one: the index suffices.
    assert bucket.read(lambda view: view.expired(0).num_rows) == 0
    assert bucket.read(lambda view: view.earliest_timeout(0)) == 0
    assert bucket.read(lambda view: view.earliest_timeout(10**9)) is None
    assert base_suffixes(store) == [".arrow", ".lazy"]
    assert bucket.read(lambda view: sum(batch.num_rows for batch in view.scan())) == len(remote.keys)
    assert base_suffixes(store) == [".arrow"]
    assert lazy_files(store) == []
    (path,) = store._environment.folder.glob("base-*.arrow")
    assert path.read_bytes() == remote.snapshot[: path.stat().st_size]
    remote.folder.remove(SNAPSHOT_NAME)
    assert bucket.read(lambda view: looked_up(view, KEYS, remote)) == expected(KEYS, remote)
    assert sum(batch.num_rows for batch in bucket.scan()) == len(remote.keys)


@pytest.mark.parametrize("what", ["scan", "piece"])
def test_a_scan_as_first_access_returns_all_rows(store: LocalStore, tmp_path: Path, what: str) -> None:
    remote = Remote.made(tmp_path, timeouts=True)
    bucket = bucket_on(store, remote, tmp_path)
    if what == "scan":
        assert bucket.read(lambda view: sum(batch.num_rows for batch in view.scan())) == len(remote.keys)
    else:
        assert sum(batch.num_rows for batch in bucket.scan()) == len(remote.keys)
    assert base_suffixes(store) == [".arrow"]


def select_keys(hashed: HashArray, keys: list[int], after: int, upto: int) -> list[int]:
    return [key for key in keys if after < int(hashed[key]) <= upto]


@pytest.mark.parametrize("bad_hashes", [False, True])
def test_a_search_for_timeouts_fetches_few_pieces(store: LocalStore, tmp_path: Path, bad_hashes: bool) -> None:
    remote = Remote.made(tmp_path, timeouts=True, bad_hashes=bad_hashes)
    bucket = bucket_on(store, remote, tmp_path)
    before = remote.folder.fetched_bytes
    assert bucket.read(lambda view: view.earliest_timeout(5)) == 10
    assert bucket.read(lambda view: view.earliest_timeout(11_985)) == 11_990
    assert remote.folder.fetched_bytes - before < len(remote.snapshot) / 4
    due = list(range(0, 200, 10))
    assert are_rows_of(bucket.read(lambda view: view.expired(200)), due)
    assert remote.folder.fetched_bytes - before < len(remote.snapshot) / 2
    assert base_suffixes(store) == [".arrow", ".lazy"]
    middle = int(np.median(remote.hashed))
    for after, upto in ((-1, middle), (middle, 2**64 - 1)):
        rows = bucket.read(methodcaller("expired", 9_000, 0, 0, after, upto))
        assert are_rows_of(rows, select_keys(remote.hashed, list(range(0, 9_000, 10)), after, upto))
    stale = bucket.read(lambda view: view.stale("state.n", 30, -1, 2**64 - 1))
    assert are_rows_of(stale, list(range(11)))
    assert base_suffixes(store) == [".arrow", ".lazy"]
    # Later batches find these rows in the local store.
    before = remote.folder.requests
    assert are_rows_of(bucket.read(lambda view: view.expired(200)), due)
    assert remote.folder.requests == before


def test_the_rest_is_fetched_in_the_background(remote: Remote, store: LocalStore, tmp_path: Path) -> None:
    later = Later()
    bucket = bucket_on(store, remote, tmp_path, later=later)
    bucket.read(lambda view: looked_up(view, [5], remote))
    assert len(later.work) == 1, "the work is scheduled once"
    later.run()
    assert base_suffixes(store) == [".arrow"]
    remote.folder.remove(SNAPSHOT_NAME)
    assert bucket.read(lambda view: looked_up(view, KEYS, remote)) == expected(KEYS, remote)
    bucket.read(Sizes.of)
    assert not later.work, "the run is complete"


def test_filling_respects_its_rate_limit_and_stops_when_the_store_closes(
    remote: Remote, store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    # Patch only this module's `time`: other threads of the process sleep too.
    monkeypatch.setattr(
        "spark_state_ext.restore.lazy.time", SimpleNamespace(sleep=slept.append, monotonic=time.monotonic)
    )
    monkeypatch.setattr("spark_state_ext.restore.lazy._REQUEST_PIECES", 10)
    bucket = bucket_on(store, remote, tmp_path)
    bucket.read(Sizes.of)
    (run,) = store.runs()
    bucket._lazy._options = replace(bucket._lazy._options, fill_bytes_per_s_max=10 * PIECE_BYTES)  # type: ignore[type-var]
    store._closed = True
    bucket._lazy.fill(run)
    assert not slept, "a closed store is not filled"
    store._closed = False
    bucket._lazy.fill(run)
    # The limit is ten pieces a second.
    seconds = -(-run.file_bytes // PIECE_BYTES) / 10
    assert seconds * 0.5 < sum(slept) <= seconds
    assert base_suffixes(store) == [".arrow"]


def test_filling_ends_without_an_error_when_its_bucket_is_closed(
    remote: Remote, store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A query may end while its background waits for a turn."""
    bucket = bucket_on(store, remote, tmp_path)
    bucket.read(Sizes.of)
    (run,) = store.runs()
    assert bucket._lazy._options is not None
    monkeypatch.setattr(bucket._lazy._options.foreground, "stand_back", lambda quiet_s, s_max: bucket.close())
    bucket._lazy.fill(run)
    assert base_suffixes(store) == [".arrow", ".lazy"]


def test_filling_yields_to_fetches_that_a_batch_waits_for(
    remote: Remote, store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    foreground, later = Foreground(), Later()
    events: list[int | str] = []
    bucket = bucket_on(store, remote, tmp_path, later=later)
    assert bucket._lazy._options is not None
    bucket._lazy._options = replace(bucket._lazy._options, foreground=foreground)
    get_range, stand_back = remote.folder.get_range, foreground.stand_back

    def record_get_range(name: str, start: int, end: int) -> bytes:
        events.append(foreground.waiting)
        return get_range(name, start, end)

    def record_stand_back(quiet_s: float, s_max: float) -> None:
        events.append("stand back")
        stand_back(0.0, 0.0)

    monkeypatch.setattr(type(remote.folder), "get_range", lambda _, *arguments: record_get_range(*arguments))
    monkeypatch.setattr(foreground, "stand_back", record_stand_back)
    bucket.read(lambda view: looked_up(view, [5], remote))
    assert set(events) == {1}, "the file's two ends, and pieces for the lookup"
    events.clear()
    later.run()
    assert events[0] == "stand back"
    assert set(events) == {"stand back", 0}


def test_a_waiting_lookup_renews_the_lease_and_fails_if_it_is_lost(
    remote: Remote, store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("spark_state_ext.worker.threads._LOOK_S", 0.001)
    answer, get_range = threading.Event(), remote.folder.get_range
    renewals: list[str] = []

    def hold() -> None:
        renewals.append("renewed")
        if len(renewals) > 3 and not answer.is_set():
            raise LiveRunError("another run has taken over")

    bucket = bucket_on(store, remote, tmp_path, while_waiting=hold)
    bucket.read(Sizes.of)
    renewals.clear()

    def delayed_get_range(_: object, name: str, start: int, end: int) -> bytes:
        assert answer.wait(WAIT_S)
        return get_range(name, start, end)

    monkeypatch.setattr(type(remote.folder), "get_range", delayed_get_range)
    with pytest.raises(LiveRunError, match="another run has taken over"):
        bucket.read(lambda view: looked_up(view, [5], remote))
    assert len(renewals) == 4
    assert not caplog.records, "a lost lease is not logged as a failure of the store"
    answer.set()
    assert bucket.read(lambda view: looked_up(view, [5], remote)) == expected([5], remote)


def test_a_later_call_continues_an_unfinished_lazy_restore(remote: Remote, tmp_path: Path) -> None:
    """The second call of the test does not restore lazily itself."""
    for lazily in (True, False):
        store = LocalStore.at(tmp_path / "store", SCHEMA)
        bucket = bucket_on(store, remote, tmp_path, lazily=lazily)
        keys = [5, 6] if lazily else [5, 6_001]
        assert bucket.read(partial(looked_up, keys=keys, remote=remote)) == expected(keys, remote)
        assert base_suffixes(store) == [".arrow", ".lazy"]
        assert bucket.fetched_files == int(lazily)
        store.close()


@pytest.mark.parametrize("why", ["small", "format 2", "another schema", "local disk", "no options"])
def test_a_snapshot_is_restored_whole_if_it_cannot_be_restored_lazily(tmp_path: Path, why: str) -> None:
    remote = Remote.made(tmp_path, form=2 if why == "format 2" else 0)
    schema = RowSchema(SCHEMA.keys, (*SCHEMA.state, pa.field("new", pa.int8()))) if why == "another schema" else SCHEMA
    store = LocalStore.at(tmp_path / "store", schema)
    replicas = None
    if why == "local disk":
        from spark_state_ext.files.folder import Folder

        local = Folder(str(tmp_path / "root"))
        for name in remote.folder.names():
            local.put(name, remote.folder.get(name))
        replicas = sole_replica(local, tmp_path)
    bucket = bucket_on(store, remote, tmp_path, lazily=why != "no options", replicas=replicas)
    if why == "small":
        bucket._lazy._options = replace(bucket._lazy._options, bytes_min=len(remote.snapshot) + 1)  # type: ignore[type-var]
    assert bucket.read(lambda view: looked_up(view, KEYS, remote)) == expected(KEYS, remote)
    assert lazy_files(store) == []


# -- together with other runs ------------------------------------------------------------------------


def make_buffer(keys: list[int], tmp_path: Path, remote: Remote) -> SpillBuffer:
    buffer = SpillBuffer(tmp_path, 1 << 30)
    if keys:
        buffer.append(rows_of(keys, remote.hashed[keys]))
    return buffer


def test_compaction_merges_the_deltas_and_keeps_the_lazy_run(remote: Remote, store: LocalStore, tmp_path: Path) -> None:
    pointer = remote.pointer
    for at in range(12):
        bucket = bucket_on(store, remote, tmp_path, pointer=pointer)
        pointer = replace(bucket.commit(make_buffer([at], tmp_path, remote)).pointer, batch=pointer.batch + 1)
    bucket = bucket_on(store, remote, tmp_path, pointer=pointer)
    assert bucket.read(lambda view: looked_up(view, KEYS, remote)) == expected(KEYS, remote)
    runs = store.view(pointer.ref).runs
    assert 1 < len(runs) < 12, "deltas were merged"
    assert store.lazy.file(runs[-1]) is not None
    assert [store.lazy.file(run) for run in runs[:-1]] == [None] * (len(runs) - 1)


def test_dropping_a_lazy_run_removes_both_of_its_files(remote: Remote, store: LocalStore, tmp_path: Path) -> None:
    bucket_on(store, remote, tmp_path).read(lambda view: looked_up(view, [5], remote))
    newer = CheckpointRef(3, "3" * 32)
    store.restore([rows_of([1], remote.hashed[[1]])], newer, None, snapshot=True)
    assert store.prune(newer) == 1
    assert base_suffixes(store) == []


def test_files_of_a_dead_process_are_removed(remote: Remote, store: LocalStore, tmp_path: Path) -> None:
    bucket_on(store, remote, tmp_path).read(lambda view: looked_up(view, [5], remote))
    folder = store._environment.folder
    (marks,) = folder.glob("base-*.lazy")
    left = folder / f"base-{'0' * 32}.lazy"
    left.write_bytes(marks.read_bytes())
    store.close()
    again = LocalStore.at(tmp_path / "store", SCHEMA)
    assert not left.exists()
    assert base_suffixes(again) == [".arrow", ".lazy"]
    again.close()


def test_a_view_without_a_backend_reports_missing_pieces(remote: Remote, store: LocalStore, tmp_path: Path) -> None:
    bucket_on(store, remote, tmp_path).read(lambda view: looked_up(view, [5], remote))
    view = store.view(LAST)
    assert looked_up(view, [5], remote) == expected([5], remote)
    for look in (
        lambda: looked_up(view, KEYS, remote),
        lambda: list(view.scan()),
        # The lookup of queryable state, which comes from another process.
        lambda: view.row(int(remote.hashed[5]), lambda row: True),
    ):
        with pytest.raises(MissingRunError, match="lazily") as error:
            look()
        assert error.value.ref == LAST


def test_neighbouring_pieces_are_fetched_in_one_request() -> None:
    assert group_pieces(np.array([], dtype=np.int64)) == []
    assert group_pieces(np.array([0, 1, 6, 12, 300])) == [(0, 7), (12, 13), (300, 301)]
    assert group_pieces(np.arange(600)) == [(0, 256), (256, 512), (512, 600)]


def test_environment_variables_set_the_options() -> None:
    runner = Inline()
    options = lazy_options(runner, {})
    assert (
        (options.bytes_min, options.fill_bytes_per_s_max) == (BYTES_MIN, FILL_BYTES_PER_S_MAX) == (32 << 20, 64_000_000)
    )
    names = ("SPARK_STATE_EXT_LAZY_RESTORE_BYTES_MIN", "SPARK_STATE_EXT_LAZY_FILL_BYTES_PER_S_MAX")
    options = lazy_options(runner, dict(zip(names, ("7", "8"), strict=True)))
    assert (options.bytes_min, options.fill_bytes_per_s_max) == (7, 8)
    for name in names:
        for text in ("", "0", "-1", "many", "1.5", "²"):
            with pytest.raises(UsageError, match=name):
                lazy_options(runner, {name: text})


def test_an_index_with_wrong_offsets_raises_an_error(remote: Remote, store: LocalStore, tmp_path: Path) -> None:
    """Bytes that are not a record batch raise CorruptError, even if their checksum is valid."""
    bucket = bucket_on(store, remote, tmp_path)
    bucket.read(Sizes.of)
    (run,) = store.runs()
    wrong = replace(run, chunks=tuple(replace(chunk, offset=chunk.offset + 8) for chunk in run.chunks))
    lazy = LazyFile.open(store._environment.folder, wrong)
    assert lazy is not None
    from spark_state_ext.store.lazy_lookup import locate_hashes

    with pytest.raises(CorruptError):
        locate_hashes(lazy, SCHEMA, remote.hashed[:10], bucket._lazy.fetch)
