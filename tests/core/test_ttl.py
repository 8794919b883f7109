"""Time to live: which stored rows are shown, written and removed; and reading a bucket in pieces."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from core_support import WRITER, first_pointer
from hypothesis import given, settings
from hypothesis import strategies as st

from arrow_schemas import RowSchema
from arrow_schemas.row import EXPIRES_MS, KEY_HASH
from spark_state_ext.backends.files import sole_replica
from spark_state_ext.commit.context import CommitContext
from spark_state_ext.engine.bucket import Bucket
from spark_state_ext.errors import UsageError
from spark_state_ext.files.folder import Folder
from spark_state_ext.functions.ttl import EXPIRES_COLUMN, Expiry, Ttl
from spark_state_ext.store import LocalStore, Lookup, View
from spark_state_ext.store.runs import sort_by_hash
from spark_state_ext.testing.model import Refs
from spark_state_ext.worker.spill import SpillBuffer

SHOWN = RowSchema((pa.field("k", pa.int64()),), (pa.field("n", pa.int64()), pa.field("tags", pa.list_(pa.string()))))
STORED = RowSchema(SHOWN.keys, (*SHOWN.state, pa.field(EXPIRES_MS, pa.int64())))
TTL = Ttl(100)
NOW = 1_000


@dataclass(frozen=True)
class Row:
    """One stored row of the model."""

    n: int | None = None
    tags: list[str] | None = None
    expires_ms: int | None = None
    timeout_ms: int | None = None
    defined: bool = True
    deleted: bool = False


def spread(key: int) -> int:
    """Return a hash that changes the order of the keys; some hashes are at the ends of the range."""
    return {0: 0, 1: 2**64 - 1}.get(key, (key * 0x9E3779B97F4A7C15) % 2**64)


def batch_of(rows: dict[int, Row], schema: RowSchema = STORED) -> pa.RecordBatch:
    values: list[list[Any]] = [
        [spread(key) for key in rows],
        list(rows),
        [row.n for row in rows.values()],
        [row.tags for row in rows.values()],
        *([[row.expires_ms for row in rows.values()]] if schema is STORED else []),
        [row.timeout_ms for row in rows.values()],
        [row.defined for row in rows.values()],
        [row.deleted for row in rows.values()],
    ]
    columns = [pa.array(column, field.type) for column, field in zip(values, schema.arrow, strict=True)]
    return pa.RecordBatch.from_arrays(columns, schema=schema.arrow)


def rows_of(batch: pa.RecordBatch) -> dict[int, Row]:
    rows = {}
    for row in batch.to_pylist():
        assert row[KEY_HASH] == spread(row["key.k"])
        assert row["key.k"] not in rows, "a key must not occur twice"
        rows[row["key.k"]] = Row(
            row["state.n"],
            row["state.tags"],
            row.get(EXPIRES_COLUMN),
            row["timeout_ms"],
            row["defined"],
            row["deleted"],
        )
    return rows


LIVE = Row(1, ["a"], NOW + 1)
EXPIRED = Row(2, ["b", "c"], NOW)
PERMANENT = Row(3, None, None)
EXPIRED_WITH_TIMEOUT = Row(4, [], NOW - 5, timeout_ms=2_000)
ONLY_A_TIMEOUT = Row(timeout_ms=2_000, defined=False)
ROWS = {1: LIVE, 2: EXPIRED, 3: PERMANENT, 4: EXPIRED_WITH_TIMEOUT, 5: ONLY_A_TIMEOUT}


# -- the options ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"duration_ms": 0}, "duration_ms of a Ttl must be a whole number from 1 to .*, not 0"),
        ({"duration_ms": -5}, "not -5"),
        ({"duration_ms": 1.5}, "not 1.5"),
        ({"duration_ms": True}, "not True"),
        ({"duration_ms": "1 hour"}, "not '1 hour'"),
        ({"duration_ms": 2**63}, "duration_ms of a Ttl"),
        ({"duration_ms": 1, "clock": "wall"}, "clock of a Ttl must be 'processing' or 'event', not 'wall'"),
        ({"duration_ms": 1, "refresh": "never"}, "refresh of a Ttl must be 'write' or 'read', not 'never'"),
    ],
)
def test_invalid_options_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        Ttl(**options)


def test_a_very_long_time_to_live_does_not_overflow() -> None:
    longest = Ttl(100_000 * 366 * 86_400_000)
    batch = Expiry(STORED, longest, NOW).add_expiry(batch_of({1: replace(LIVE, expires_ms=None)}, SHOWN), 2**52)
    assert rows_of(batch)[1].expires_ms == 2**52 + longest.duration_ms


# -- rows as they are shown -----------------------------------------------------------------------


def test_rows_without_the_hidden_column_are_not_changed() -> None:
    rows = batch_of({1: LIVE, 2: EXPIRED, 5: ONLY_A_TIMEOUT}, SHOWN)
    for ttl in (None, TTL):
        expiry = Expiry(SHOWN, ttl, NOW)
        assert not expiry.hidden
        assert expiry.shown is SHOWN
        assert expiry.add_expiry(rows, 5) is rows
        assert expiry.due(rows) is rows
        assert not expiry.find_expired(rows).any()
        lookup = Lookup(np.array([1, -1]), rows)
        shown = expiry.show_lookup(lookup)
        assert shown.rows is rows
        assert shown.index is lookup.index
        assert list(rows_of(expiry.show_live(rows))) == [1, 2]


def test_a_lookup_hides_expired_state() -> None:
    shown = Expiry(STORED, TTL, NOW).show_lookup(Lookup(np.array([4, 3, 2, 1, 0, -1]), batch_of(ROWS)))
    assert shown.rows.schema.equals(SHOWN.arrow)
    assert shown.index.tolist() == [4, -1, 2, -1, 0, -1]
    empty = Lookup(np.array([-1, -1]), STORED.empty())
    assert Expiry(STORED, TTL, NOW).show_lookup(empty).index.tolist() == [-1, -1]


@pytest.mark.parametrize(("now_ms", "expired"), [(NOW - 6, []), (NOW - 5, [4]), (NOW, [2, 4]), (NOW + 1, [1, 2, 4])])
def test_state_is_hidden_as_soon_as_its_expiry_time_is_reached(now_ms: int, expired: list[int]) -> None:
    expiry = Expiry(STORED, TTL, now_ms)
    mask = expiry.find_expired(batch_of(ROWS))
    assert [key for key, is_expired in zip(ROWS, mask.tolist(), strict=True) if is_expired] == expired
    assert list(rows_of(expiry.show_live(batch_of(ROWS)))) == [key for key in (1, 2, 3, 4) if key not in expired]


def test_keys_that_time_out_do_not_have_expired_state() -> None:
    due = rows_of(Expiry(STORED, TTL, NOW).due(batch_of(ROWS)))
    assert due == {
        1: replace(LIVE, expires_ms=None),
        2: Row(defined=False, deleted=True),
        3: PERMANENT,
        4: Row(timeout_ms=2_000, defined=False),
        5: ONLY_A_TIMEOUT,
    }
    assert Expiry(STORED, TTL, NOW).due(STORED.empty()).schema.equals(SHOWN.arrow)


def test_state_does_not_expire_after_the_time_to_live_is_removed() -> None:
    expiry = Expiry(STORED, None, 2**62)
    assert expiry.show_lookup(Lookup(np.arange(5), batch_of(ROWS))).index.tolist() == [0, 1, 2, 3, 4]
    assert rows_of(expiry.due(batch_of(ROWS))) == {key: replace(row, expires_ms=None) for key, row in ROWS.items()}
    assert rows_of(expiry.add_expiry(expiry.due(batch_of(ROWS)), 5))[1] == replace(LIVE, expires_ms=None)


# -- rows as they are stored ----------------------------------------------------------------------


def test_written_rows_get_an_expiry_time_if_they_have_state() -> None:
    expiry = Expiry(STORED, TTL, NOW)
    rows = {1: Row(1), 2: ONLY_A_TIMEOUT, 3: Row(defined=False, deleted=True)}
    assert rows_of(expiry.add_expiry(batch_of(rows, SHOWN), NOW)) == {**rows, 1: Row(1, expires_ms=NOW + 100)}
    times = np.array([5, 6, 7])
    assert rows_of(expiry.add_expiry(batch_of({1: Row(1), 2: Row(2), 3: Row(3)}, SHOWN), times)) == {
        1: Row(1, expires_ms=105),
        2: Row(2, expires_ms=106),
        3: Row(3, expires_ms=107),
    }
    assert expiry.add_expiry(SHOWN.empty(), NOW).schema.equals(STORED.arrow)


def test_refresh_on_read_extends_the_life_of_the_state() -> None:
    lookup = Expiry(STORED, TTL, NOW).show_lookup(Lookup(np.array([0, 1, 2, -1, 4]), batch_of(ROWS)))
    times = np.array([10, 20, 30, 40, 50])
    assert Expiry(STORED, TTL, NOW).extend_life(lookup, np.arange(5), times) is None
    expiry = Expiry(STORED, Ttl(100, refresh="read"), NOW)
    extended = expiry.extend_life(lookup, np.array([0, 1, 2, 3]), times)
    assert extended is not None
    # Expired state is not read, nor is the state of absent keys.
    assert rows_of(extended) == {1: replace(LIVE, expires_ms=110), 3: replace(PERMANENT, expires_ms=130)}
    assert expiry.extend_life(lookup, np.array([1, 3]), times) is None
    assert expiry.extend_life(lookup, np.array([], dtype=np.int64), times) is None
    # A row that only has a timeout has no state that could expire.
    kept = expiry.extend_life(lookup, np.array([4]), times)
    assert kept is not None
    assert rows_of(kept) == {5: ONLY_A_TIMEOUT}


def test_removed_rows_are_tombstones_or_keep_their_timeout() -> None:
    removed = rows_of(Expiry(STORED, TTL, NOW).make_removals(batch_of({2: EXPIRED, 4: EXPIRED_WITH_TIMEOUT})))
    assert removed == {2: Row(defined=False, deleted=True), 4: Row(timeout_ms=2_000, defined=False)}


@settings(max_examples=100)
@given(
    rows=st.lists(
        st.builds(
            Row,
            n=st.one_of(st.none(), st.integers(0, 9)),
            tags=st.one_of(st.none(), st.lists(st.sampled_from("ab"), max_size=2)),
            expires_ms=st.one_of(st.none(), st.integers(NOW - 2, NOW + 2)),
            timeout_ms=st.one_of(st.none(), st.integers(1, 9)),
        ),
        max_size=8,
    ),
    cut=st.integers(0, 3),
)
def test_batches_and_slices_are_handled_like_their_single_rows(rows: list[Row], cut: int) -> None:
    """The results for a batch or a slice are those for each of its rows."""
    model = dict(enumerate(rows))
    batch = batch_of(model).slice(min(cut, len(rows)))
    model = {key: row for key, row in model.items() if key >= cut}
    expired = {key for key, row in model.items() if row.expires_ms is not None and row.expires_ms <= NOW}
    expiry = Expiry(STORED, TTL, NOW)
    shown = {key: replace(row, expires_ms=None) for key, row in model.items()}
    removed = {
        key: Row(timeout_ms=row.timeout_ms, defined=False, deleted=row.timeout_ms is None) for key, row in model.items()
    }
    assert rows_of(expiry.show_live(batch)) == {key: row for key, row in shown.items() if key not in expired}
    assert rows_of(expiry.due(batch)) == {key: removed[key] if key in expired else row for key, row in shown.items()}
    assert rows_of(expiry.make_removals(batch)) == removed


# -- views ----------------------------------------------------------------------------------------


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LocalStore]:
    store = LocalStore.at(tmp_path / "store", STORED, chunk_rows=4)
    yield store
    store.close()


def fill_store(store: LocalStore, keys: int, commits: int, seed: int) -> tuple[list[View], list[dict[int, Row]]]:
    """Commit random changes, and return the view and the expected rows after each commit."""
    chosen, refs, model, parent = random.Random(seed), Refs(), dict[int, Row](), None
    views, models = [], []
    for version in range(1, commits + 1):
        changes = {}
        for key in chosen.sample(range(keys), chosen.randint(1, keys)):
            expires = chosen.choice([None, chosen.randint(1, 40)])
            changes[key] = Row(key, [str(version)], expires, chosen.choice([None, chosen.randint(1, 40)]))
            if chosen.random() < 0.3:
                changes[key] = Row(defined=False, deleted=True)
        ref = refs.next(version)
        store.apply([sort_by_hash(batch_of(changes))], ref, parent)
        parent, model = ref, {key: row for key, row in {**model, **changes}.items() if not row.deleted}
        views.append(store.view(ref))
        models.append(model)
        if chosen.random() < 0.3:
            store.compact(ref)
    return views, models


RANGES = [
    (-1, 2**64 - 1),
    (0, 2**64 - 1),
    (-1, 2**64 - 2),
    (2**62, 2**63),
    (2**63, 2**63),
    (-1, 0),
    (2**64 - 2, 2**64 - 1),
]


@pytest.mark.parametrize("seed", range(4))
def test_stale_returns_the_expired_rows_of_the_range(store: LocalStore, seed: int) -> None:
    views, models = fill_store(store, 30, 6, seed)
    for view, model in zip(views[-2:], models[-2:], strict=True):
        for after, upto in RANGES:
            for until in (0, 20, 40, 2**62):
                expected = {
                    key: row
                    for key, row in model.items()
                    if row.expires_ms is not None and row.expires_ms <= until and after < spread(key) <= upto
                }
                assert rows_of(view.stale(EXPIRES_COLUMN, until, after, upto)) == expected


def test_a_store_without_rows_has_no_stale_rows(store: LocalStore) -> None:
    assert store.view(None).stale(EXPIRES_COLUMN, 2**62, -1, 2**64 - 1).num_rows == 0
    assert store.view(None).piece(-1) == (2**64 - 1, STORED.empty())


@pytest.mark.parametrize("seed", range(4))
def test_the_pieces_of_a_view_have_all_of_its_rows(store: LocalStore, seed: int) -> None:
    views, models = fill_store(store, 30, 6, seed)
    for view, model in zip(views[-2:], models[-2:], strict=True):
        after, all_rows, hashes = -1, {}, []
        while after < 2**64 - 1:
            before, (after, rows) = after, view.piece(after)
            assert after > before
            hashes += rows.column(KEY_HASH).to_pylist()
            assert all(before < key_hash <= after for key_hash in rows.column(KEY_HASH).to_pylist())
            all_rows.update(rows_of(rows))
        assert all_rows == model
        assert hashes == sorted(hashes)


# -- buckets --------------------------------------------------------------------------------------


class Replica:
    """A bucket with one local store and its files."""

    def __init__(self, folder: Path) -> None:
        self.local, self.files = folder, Folder(str(folder / "root")).child("3")
        self.store = LocalStore.at(folder / "store", STORED, chunk_rows=4)
        self.pointer = first_pointer()

    def bucket(self) -> Bucket:
        return Bucket(self.store, sole_replica(self.files, self.local), self.pointer, WRITER, CommitContext(self.local))

    def commit(self, rows: dict[int, Row]) -> None:
        buffer = SpillBuffer(self.local, 1 << 20)
        buffer.append(sort_by_hash(batch_of(rows)))
        self.pointer = self.bucket().commit(buffer).pointer


@pytest.fixture
def replica(tmp_path: Path) -> Iterator[Replica]:
    replica = Replica(tmp_path)
    yield replica
    replica.store.close()


def read_all(batches: Iterator[pa.RecordBatch]) -> dict[int, Row]:
    all_rows: dict[int, Row] = {}
    for batch in batches:
        rows = rows_of(batch)
        assert not all_rows.keys() & rows.keys(), "a key must not occur twice"
        all_rows.update(rows)
    return all_rows


def test_a_scan_reads_one_piece_at_a_time(replica: Replica) -> None:
    assert list(replica.bucket().scan()) == []
    model = {key: Row(key) for key in range(20)}
    replica.commit(model)
    replica.commit({3: Row(33), 4: Row(defined=False, deleted=True)})
    model = {**model, 3: Row(33)}
    del model[4]
    pieces = list(replica.bucket().scan())
    assert len(pieces) == 5
    assert read_all(iter(pieces)) == model


@pytest.mark.parametrize("what", ["commits", "rebuild", "another machine"])
def test_a_scan_continues_after_commits_and_if_the_store_is_lost(replica: Replica, what: str, tmp_path: Path) -> None:
    """A scan shows the batch in which it began, even if the next batches commit, compact and prune meanwhile."""
    model = {key: Row(key) for key in range(40)}
    replica.commit(model)
    replica.commit({3: Row(33)})
    model[3] = Row(33)
    bucket = replica.bucket()
    scan = bucket.scan()
    first = rows_of(next(scan))
    if what == "commits":
        for at in range(12):
            replica.commit({key: Row(1_000 + at) for key in range(at, 40)})
        ref = replica.pointer.ref
        assert ref is not None
        replica.store.compact(ref)
        replica.store.prune(ref)
        assert not any(run.newest == bucket.pointer.ref for run in replica.store.runs()), (
            "the run must be gone, or the test is not meaningful"
        )
    elif what == "rebuild":
        replica.store.rebuild()
    else:
        bucket._store = LocalStore.at(tmp_path / "other", STORED, chunk_rows=3)
        bucket._loader._store = bucket._store
    rest = read_all(scan)
    assert not first.keys() & rest.keys()
    assert {**first, **rest} == model
