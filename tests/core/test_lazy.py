"""Lazy restore: a lookup has of a snapshot elsewhere what it needs, and what comes of it is never other than the state."""

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


def test_a_lookup_fetches_a_part(remote: Remote, store: LocalStore, tmp_path: Path) -> None:
    bucket, keys = bucket_on(store, remote, tmp_path), [5, 12_000]
    assert bucket.read(lambda view: looked_up(view, keys, remote)) == expected(keys, remote)
    assert 0 < remote.folder.fetched_bytes < len(remote.snapshot) / 2
    assert base_suffixes(store) == [".arrow", ".lazy"]
    (lazy,) = lazy_files(store)
    assert 0 < len(lazy.absent()) < lazy.pieces
    # The same again costs nothing.
    before = remote.folder.requests
    assert bucket.read(lambda view: looked_up(view, keys, remote)) == expected(keys, remote)
    assert remote.folder.requests == before
    assert bucket.fetched_files == 1
    assert bucket.read(Sizes.of).rows_max == len(remote.keys)


@pytest.mark.parametrize("bad_hashes", [False, True], ids=["even", "clustered"])
def test_any_keys_are_found_whatever_their_hashes(store: LocalStore, tmp_path: Path, bad_hashes: bool) -> None:
    remote = Remote.made(tmp_path, bad_hashes=bad_hashes)
    bucket, rng = bucket_on(store, remote, tmp_path), np.random.default_rng(7)
    for count in (1, 3, 40, 2_000):
        keys = rng.choice(13_000, count, replace=False).tolist()
        assert bucket.read(partial(looked_up, keys=keys, remote=remote)) == expected(keys, remote)
    assert lazy_files(store)
    assert bucket.read(lambda view: looked_up(view, [], remote)) == {}
    # All keys of one hash, on both sides of where a chunk ends too.
    chunks = store.runs()[0].chunks
    border = {int(chunk.hash_max) for chunk in chunks[:-1]} | {int(chunk.hash_min) for chunk in chunks[1:]}
    keys = [int(key) for key, hashed in zip(remote.keys, remote.hashed, strict=True) if int(hashed) in border]
    assert bucket.read(lambda view: looked_up(view, keys, remote)) == expected(keys, remote)


def test_the_keys_of_one_hash_are_in_two_chunks(remote: Remote, store: LocalStore, tmp_path: Path) -> None:
    """So that the test above means something."""
    bucket_on(store, remote, tmp_path).read(Sizes.of)
    chunks = store.runs()[0].chunks
    assert len(chunks) == 4
    assert any(before.hash_max == after.hash_min for before, after in pairwise(chunks))


def test_values_of_a_column_of_nulls_are_not_fetched(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Timeouts have eight bytes a row also where no row has one."""
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


def test_what_needs_all_rows_completes_the_run(store: LocalStore, tmp_path: Path) -> None:
    remote = Remote.made(tmp_path, timeouts=True)
    bucket = bucket_on(store, remote, tmp_path)
    assert bucket.read(lambda view: looked_up(view, [5], remote)) == expected([5], remote)
    # Timeouts before the first one, and behind the last one: the index tells.
    assert bucket.read(lambda view: view.expired(0).num_rows) == 0
    assert bucket.read(lambda view: view.earliest_timeout(0)) == 0
    assert bucket.read(lambda view: view.earliest_timeout(10**9)) is None
    assert base_suffixes(store) == [".arrow", ".lazy"]
    assert bucket.read(lambda view: sum(it.num_rows for it in view.scan())) == len(remote.keys)
    assert base_suffixes(store) == [".arrow"]
    assert lazy_files(store) == []
    (path,) = store._environment.folder.glob("base-*.arrow")
    assert path.read_bytes() == remote.snapshot[: path.stat().st_size]
    remote.folder.remove(SNAPSHOT_NAME)
    assert bucket.read(lambda view: looked_up(view, KEYS, remote)) == expected(KEYS, remote)
    assert sum(batch.num_rows for batch in bucket.scan()) == len(remote.keys)


@pytest.mark.parametrize("what", ["scan", "piece"])
def test_each_look_at_all_rows_is_right(store: LocalStore, tmp_path: Path, what: str) -> None:
    remote = Remote.made(tmp_path, timeouts=True)
    bucket = bucket_on(store, remote, tmp_path)
    if what == "scan":
        assert bucket.read(lambda view: sum(it.num_rows for it in view.scan())) == len(remote.keys)
    else:
        assert sum(batch.num_rows for batch in bucket.scan()) == len(remote.keys)
    assert base_suffixes(store) == [".arrow"]


def _below(hashed: HashArray, keys: list[int], after: int, upto: int) -> list[int]:
    return [key for key in keys if after < int(hashed[key]) <= upto]


@pytest.mark.parametrize("bad_hashes", [False, True])
def test_timeouts_are_found_by_their_column(store: LocalStore, tmp_path: Path, bad_hashes: bool) -> None:
    """Of a run that is restored lazily: two columns of it, and the rows that time out."""
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
        assert are_rows_of(rows, _below(remote.hashed, list(range(0, 9_000, 10)), after, upto))
    stale = bucket.read(lambda view: view.stale("state.n", 30, -1, 2**64 - 1))
    assert are_rows_of(stale, list(range(11)))
    assert base_suffixes(store) == [".arrow", ".lazy"]
    # Each batch that times them out again finds them here.
    before = remote.folder.requests
    assert are_rows_of(bucket.read(lambda view: view.expired(200)), due)
    assert remote.folder.requests == before


def test_the_rest_is_fetched_beside_batches(remote: Remote, store: LocalStore, tmp_path: Path) -> None:
    later = Later()
    bucket = bucket_on(store, remote, tmp_path, later=later)
    bucket.read(lambda view: looked_up(view, [5], remote))
    assert len(later.work) == 1, "asked for once"
    later.run()
    assert base_suffixes(store) == [".arrow"]
    remote.folder.remove(SNAPSHOT_NAME)
    assert bucket.read(lambda view: looked_up(view, KEYS, remote)) == expected(KEYS, remote)
    bucket.read(Sizes.of)
    assert not later.work, "it is whole"


def test_filling_keeps_to_its_limit_and_ends_with_the_store(
    remote: Remote, store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    # Not that of the process, in which other threads sleep.
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
    assert not slept, "nobody fills the store of a call that is over"
    store._closed = False
    bucket._lazy.fill(run)
    # Ten pieces a second.
    seconds = -(-run.file_bytes // PIECE_BYTES) / 10
    assert seconds * 0.5 < sum(slept) <= seconds
    assert base_suffixes(store) == [".arrow"]


def test_filling_stands_back_for_what_batches_wait_for(
    remote: Remote, store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    foreground, later = Foreground(), Later()
    said: list[int | str] = []
    bucket = bucket_on(store, remote, tmp_path, later=later)
    assert bucket._lazy._options is not None
    bucket._lazy._options = replace(bucket._lazy._options, foreground=foreground)
    get_range, stand_back = remote.folder.get_range, foreground.stand_back

    def got(name: str, start: int, end: int) -> bytes:
        said.append(foreground.waiting)
        return get_range(name, start, end)

    def stood_back(quiet_s: float, s_max: float) -> None:
        said.append("stand back")
        stand_back(0.0, 0.0)

    monkeypatch.setattr(type(remote.folder), "get_range", lambda _, *given: got(*given))
    monkeypatch.setattr(foreground, "stand_back", stood_back)
    bucket.read(lambda view: looked_up(view, [5], remote))
    assert set(said) == {1}, "both ends, and pieces for the lookup"
    said.clear()
    later.run()
    assert said[0] == "stand back"
    assert set(said) == {"stand back", 0}


def test_a_lookup_that_waits_renews_the_lease_and_ends_without_it(
    remote: Remote, store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("spark_state_ext.worker.threads._LOOK_S", 0.001)
    answer, get_range = threading.Event(), remote.folder.get_range
    kept: list[str] = []

    def hold() -> None:
        kept.append("renewed")
        if len(kept) > 3 and not answer.is_set():
            raise LiveRunError("another run has taken over")

    bucket = bucket_on(store, remote, tmp_path, while_waiting=hold)
    bucket.read(Sizes.of)
    kept.clear()

    def got(_: object, name: str, start: int, end: int) -> bytes:
        assert answer.wait(WAIT_S)
        return get_range(name, start, end)

    monkeypatch.setattr(type(remote.folder), "get_range", got)
    with pytest.raises(LiveRunError, match="another run has taken over"):
        bucket.read(lambda view: looked_up(view, [5], remote))
    assert len(kept) == 4
    assert not caplog.records, "it is no failure of the store"
    answer.set()
    assert bucket.read(lambda view: looked_up(view, [5], remote)) == expected([5], remote)


def test_another_call_goes_on_with_what_one_began(remote: Remote, tmp_path: Path) -> None:
    """Also where it restores nothing lazily itself, in a process of its own or not."""
    for lazily in (True, False):
        store = LocalStore.at(tmp_path / "store", SCHEMA)
        bucket = bucket_on(store, remote, tmp_path, lazily=lazily)
        keys = [5, 6] if lazily else [5, 6_001]
        assert bucket.read(partial(looked_up, keys=keys, remote=remote)) == expected(keys, remote)
        assert base_suffixes(store) == [".arrow", ".lazy"]
        assert bucket.fetched_files == int(lazily)
        store.close()


@pytest.mark.parametrize("why", ["small", "format 2", "another schema", "local disk", "no options"])
def test_what_is_restored_whole(tmp_path: Path, why: str) -> None:
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


# -- with what else there is ------------------------------------------------------------------------


def _rows(keys: list[int], tmp_path: Path, remote: Remote) -> SpillBuffer:
    buffer = SpillBuffer(tmp_path, 1 << 30)
    if keys:
        buffer.append(rows_of(keys, remote.hashed[keys]))
    return buffer


def test_commits_lie_over_it_and_merging_leaves_it_alone(remote: Remote, store: LocalStore, tmp_path: Path) -> None:
    pointer = remote.pointer
    for at in range(12):
        bucket = bucket_on(store, remote, tmp_path, pointer=pointer)
        pointer = replace(bucket.commit(_rows([at], tmp_path, remote)).pointer, batch=pointer.batch + 1)
    bucket = bucket_on(store, remote, tmp_path, pointer=pointer)
    assert bucket.read(lambda view: looked_up(view, KEYS, remote)) == expected(KEYS, remote)
    runs = store.view(pointer.ref).runs
    assert 1 < len(runs) < 12, "deltas were merged"
    assert store.lazy.file(runs[-1]) is not None
    assert [store.lazy.file(run) for run in runs[:-1]] == [None] * (len(runs) - 1)


def test_dropping_it_removes_both_files(remote: Remote, store: LocalStore, tmp_path: Path) -> None:
    bucket_on(store, remote, tmp_path).read(lambda view: looked_up(view, [5], remote))
    newer = CheckpointRef(3, "3" * 32)
    store.restore([rows_of([1], remote.hashed[[1]])], newer, None, snapshot=True)
    assert store.prune(newer) == 1
    assert base_suffixes(store) == []


def test_what_a_dead_process_began_is_removed(remote: Remote, store: LocalStore, tmp_path: Path) -> None:
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


def test_a_store_that_is_not_told_where_the_rest_is(remote: Remote, store: LocalStore, tmp_path: Path) -> None:
    bucket_on(store, remote, tmp_path).read(lambda view: looked_up(view, [5], remote))
    view = store.view(LAST)
    assert looked_up(view, [5], remote) == expected([5], remote)
    for look in (
        lambda: looked_up(view, KEYS, remote),
        lambda: list(view.scan()),
        # As another process asks a running job.
        lambda: view.row(int(remote.hashed[5]), lambda row: True),
    ):
        with pytest.raises(MissingRunError, match="lazily") as error:
            look()
        assert error.value.ref == LAST


def test_pieces_near_each_other_are_one_request() -> None:
    assert group_pieces(np.array([], dtype=np.int64)) == []
    assert group_pieces(np.array([0, 1, 6, 12, 300])) == [(0, 7), (12, 13), (300, 301)]
    assert group_pieces(np.arange(600)) == [(0, 256), (256, 512), (512, 600)]


def test_what_the_environment_says() -> None:
    runner = Inline()
    found = lazy_options(runner, {})
    assert (found.bytes_min, found.fill_bytes_per_s_max) == (BYTES_MIN, FILL_BYTES_PER_S_MAX) == (32 << 20, 64_000_000)
    names = ("SPARK_STATE_EXT_LAZY_RESTORE_BYTES_MIN", "SPARK_STATE_EXT_LAZY_FILL_BYTES_PER_S_MAX")
    found = lazy_options(runner, dict(zip(names, ("7", "8"), strict=True)))
    assert (found.bytes_min, found.fill_bytes_per_s_max) == (7, 8)
    for name in names:
        for text in ("", "0", "-1", "many", "1.5", "²"):
            with pytest.raises(UsageError, match=name):
                lazy_options(runner, {name: text})


def test_a_file_whose_index_leads_nowhere(remote: Remote, store: LocalStore, tmp_path: Path) -> None:
    """Bytes with right checksums that are no record batch: an error of the store, and no crash."""
    bucket = bucket_on(store, remote, tmp_path)
    bucket.read(Sizes.of)
    (run,) = store.runs()
    wrong = replace(run, chunks=tuple(replace(chunk, offset=chunk.offset + 8) for chunk in run.chunks))
    lazy = LazyFile.open(store._environment.folder, wrong)
    assert lazy is not None
    from spark_state_ext.store.lazy_lookup import locate_hashes

    with pytest.raises(CorruptError):
        locate_hashes(lazy, SCHEMA, remote.hashed[:10], bucket._lazy.fetch)
