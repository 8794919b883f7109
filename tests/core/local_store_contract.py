"""The contract of a local store as tests: a subclass of `LocalStoreContract` defines how a store is opened.

The subclass must be importable because other processes open stores too.
"""

from __future__ import annotations

import multiprocessing
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from arrow_schemas import CheckpointRef
from spark_state_ext.errors import MissingRunError
from spark_state_ext.store import LocalStore
from spark_state_ext.testing.model import (
    ALL_KEYS,
    HASHES,
    KEYS,
    SCHEMA,
    Changes,
    HashFunction,
    Model,
    Refs,
    Row,
    apply_changes,
    canonicalise,
    find_expired,
    good_hash,
    key_columns,
    key_hashes,
    look_up,
    make_model,
    make_run,
    scan,
)
from tests.helpers.waiting import WAIT_S

__all__ = ["LocalStoreContract"]

_SPAWN = multiprocessing.get_context("spawn")


class LocalStoreContract:
    """The contract. Subclasses define how a store is opened."""

    @staticmethod
    def open(folder: Path, **options: Any) -> LocalStore:
        """Open a store in `folder`, in any process."""
        raise NotImplementedError

    @pytest.fixture(autouse=True)
    def _folders(self, tmp_path: Path) -> Iterator[None]:
        self.folder = tmp_path / "private" / "bucket"
        self.refs = Refs()
        self._opened: list[LocalStore] = []
        yield
        for store in self._opened:
            store.close()

    def store(self, folder: Path | None = None, **options: Any) -> LocalStore:
        opened = self.open(folder or self.folder, **options)
        self._opened.append(opened)
        return opened

    def add(
        self,
        store: LocalStore,
        parent: CheckpointRef | None,
        changes: Changes,
        hashed: HashFunction = good_hash,
    ) -> CheckpointRef:
        ref = self.refs.next(parent.version + 1 if parent else 1)
        run = store.apply([make_run(changes, hashed)], ref, parent)
        assert run.newest == ref
        return ref

    def chain(self, store: LocalStore, count: int, keys: int = 8) -> tuple[list[CheckpointRef], list[Model]]:
        """Add checkpoints, each on the previous one, and return them with the state at each."""
        refs: list[CheckpointRef] = []
        models: list[Model] = []
        for i in range(count):
            parent = refs[-1] if refs else None
            deleted = {KEYS[(i + 3) % keys]: None} if i % 3 == 2 else {}
            changes: Changes = {KEYS[i % keys]: Row(i), KEYS[(i + 1) % keys]: Row(i, "x", timeout_ms=i + 1), **deleted}
            refs.append(self.add(store, parent, changes))
            models.append(apply_changes(models[-1] if models else {}, changes))
        return refs, models

    # -- reading ------------------------------------------------------------------------------------

    def test_an_empty_store_has_no_rows_and_no_timeouts(self) -> None:
        view = self.store().view(None)
        assert scan(view) == {}
        assert look_up(view, ALL_KEYS) == {}
        assert view.expired(2**62).num_rows == 0
        assert view.earliest_timeout(0) is None
        assert view.rows_max == 0

    @pytest.mark.parametrize("hashed", HASHES)
    @pytest.mark.parametrize("chunk_rows", [1, 3, 1000])
    def test_equal_hashes_do_not_mix_keys(self, hashed: HashFunction, chunk_rows: int) -> None:
        store = self.store(chunk_rows=chunk_rows)
        first = {key: Row(i, str(key)) for i, key in enumerate(KEYS)}
        one = self.add(store, None, first, hashed)
        second: Changes = {key: Row(-i) if i % 3 else None for i, key in enumerate(KEYS) if i % 2}
        two = self.add(store, one, second, hashed)
        model = apply_changes({}, first)
        assert look_up(store.view(one), KEYS, hashed) == model
        assert look_up(store.view(two), KEYS, hashed) == apply_changes(model, second)
        assert scan(store.view(two)) == apply_changes(model, second)
        # Another spelling of a key is the same key; an absent key with the same hash is not found.
        assert look_up(store.view(two), [("a", -0.0), ("absent", 1.0)], hashed) == look_up(
            store.view(two), [("a", 0.0)], hashed
        )

    def test_a_lookup_accepts_keys_in_any_order(self) -> None:
        store = self.store(chunk_rows=4)
        ref = self.add(store, None, {key: Row(i) for i, key in enumerate(KEYS)})
        backwards = sorted(KEYS, key=good_hash, reverse=True)
        assert look_up(store.view(ref), backwards) == look_up(store.view(ref), KEYS)
        assert look_up(store.view(ref), []) == {}

    def test_batches_that_were_read_stay_valid_after_later_changes(self) -> None:
        """The store's memory is valid only within its transaction, so results must not refer to it."""
        store = self.store(chunk_rows=50)
        keys = [(f"key {i}", float(i)) for i in range(500)]
        ref = self.add(store, None, {key: Row(i, "v" * 50, timeout_ms=i + 1) for i, key in enumerate(keys)})
        view = store.view(ref)
        lookup = view.lookup(key_hashes(keys, good_hash), key_columns(keys))
        expired, batches = view.expired(100), list(view.scan())
        results = [lookup.rows, expired, *batches]
        before = [batch.to_pylist() for batch in results]
        for round_number in range(20):
            sibling = self.refs.next(2)
            store.apply([make_run({key: Row(-1, "w" * 50) for key in keys})], sibling, ref)
            store.restore([make_run({key: Row(-2) for key in keys})], self.refs.next(1), None, snapshot=True)
            if round_number % 5 == 4:
                store.prune(self.add(store, sibling, {keys[0]: Row(0)}))
        assert [batch.to_pylist() for batch in results] == before

    def test_expired_returns_due_keys_and_earliest_timeout_is_a_lower_bound(self) -> None:
        store = self.store(chunk_rows=2)
        one = self.add(store, None, {key: Row(i, timeout_ms=i or None) for i, key in enumerate(KEYS)})
        model = apply_changes({}, {key: Row(i, timeout_ms=i or None) for i, key in enumerate(KEYS)})
        # Only the newest row of a key counts: here with a later timeout, an earlier one, a deletion and no timeout.
        changes: Changes = {
            KEYS[1]: Row(1, timeout_ms=50),
            KEYS[20]: Row(2, timeout_ms=3),
            KEYS[2]: None,
            KEYS[4]: Row(4),
        }
        two = self.add(store, one, changes)
        model = apply_changes(model, changes)
        for now_ms in (0, 1, 3, 5, 24, 25, 51, 2**62):
            view = store.view(two)
            assert make_model([view.expired(now_ms)]) == find_expired(model, now_ms)
            pieces = [view.expired(now_ms, after=after, upto=upto) for after, upto in view.ranges()]
            assert len(pieces) > 1
            assert make_model(pieces) == find_expired(model, now_ms)
            assert bool(view.expired_bytes_max(now_ms)) >= bool(find_expired(model, now_ms))
            later = [
                row.timeout_ms for row in model.values() if row.timeout_ms is not None and row.timeout_ms >= now_ms
            ]
            earliest = view.earliest_timeout(now_ms)
            if later:
                assert earliest is not None
                assert now_ms <= earliest <= min(later)
        # Below the low-watermark, timeouts of runs older than the version were processed; newer runs still count.
        assert make_model([store.view(two).expired(10, 10, 2)]) == find_expired(
            {canonicalise(KEYS[20]): Row(2, timeout_ms=3)}, 10
        )

    # -- checkpoints --------------------------------------------------------------------------------

    def test_every_checkpoint_stays_readable_until_pruned(self) -> None:
        store = self.store(chunk_rows=2)
        refs, models = self.chain(store, 12)
        for ref, model in zip(refs, models, strict=True):
            assert scan(store.rollback(ref)) == model
        assert scan(store.rollback(None)) == {}
        dropped = store.prune(refs[6])
        assert dropped == 0, "no runs were merged, so every run is part of the view"
        sibling = self.refs.next(3)
        store.apply([make_run({KEYS[0]: None})], sibling, refs[1])
        assert store.prune(refs[6]) == 1
        assert not store.has(sibling)
        assert [scan(store.view(ref)) for ref in refs] == models

    def test_siblings_do_not_see_each_other(self) -> None:
        store = self.store()
        (one,), (model,) = self.chain(store, 1)
        siblings = [self.add(store, one, {KEYS[0]: Row(100 + i)}) for i in range(3)]
        for i, sibling in enumerate(siblings):
            assert scan(store.view(sibling)) == apply_changes(model, {KEYS[0]: Row(100 + i)})

    def test_a_second_apply_of_a_checkpoint_adds_no_run(self) -> None:
        store = self.store()
        (one,), (model,) = self.chain(store, 1)
        ref = self.add(store, one, {KEYS[5]: Row(5)})
        before = store.runs()
        store.apply([make_run({KEYS[5]: Row(6)})], ref, one)
        assert store.runs() == before
        assert scan(store.view(ref)) == apply_changes(model, {KEYS[5]: Row(5)})

    def test_apply_needs_the_runs_of_its_parent(self) -> None:
        store = self.store()
        ref, parent = self.refs.next(5), self.refs.next(4)
        with pytest.raises(MissingRunError) as caught:
            store.apply([make_run({KEYS[0]: Row(1)})], ref, parent)
        assert caught.value.ref == parent
        assert store.runs() == []
        # A run from a file does not need its parent yet; a read raises an error that names the missing parent.
        store.restore([make_run({KEYS[0]: Row(1)})], ref, parent, snapshot=False)
        with pytest.raises(MissingRunError) as caught:
            store.view(ref)
        assert caught.value.ref == parent
        store.restore([make_run({KEYS[1]: Row(2)})], parent, self.refs.next(3), snapshot=True)
        assert scan(store.view(ref)) == apply_changes({}, {KEYS[0]: Row(1), KEYS[1]: Row(2)})

    def test_compaction_keeps_every_later_state(self) -> None:
        store = self.store(chunk_rows=2)
        refs, models = self.chain(store, 16)
        compacted = store.compact(refs[9])
        assert compacted is not None
        assert compacted.newest.version <= 9 + 1
        assert [scan(store.view(ref)) for ref in refs] == models
        assert len(store.view(refs[9]).runs) < 10
        assert store.prune(refs[9]) > 0
        assert [scan(store.view(ref)) for ref in refs[9:]] == models[9:]

    def test_a_compacted_run_is_not_used_for_a_checkpoint_inside_it(self) -> None:
        store = self.store()
        refs, models = self.chain(store, 8)
        compacted = store.compact(refs[7])
        assert compacted is not None
        assert (compacted.oldest, compacted.newest) == (refs[0], refs[7])
        for ref, model in zip(refs[:-1], models[:-1], strict=True):
            assert compacted.key not in {run.key for run in store.view(ref).runs}
            assert scan(store.view(ref)) == model
        store.prune(refs[7])
        for ref in refs[:-1]:
            with pytest.raises(MissingRunError) as caught:
                store.view(ref)
            assert caught.value.ref == ref
        assert scan(store.view(refs[7])) == models[7]

    def test_compaction_drops_tombstones_without_older_rows(self) -> None:
        store = self.store()
        ref = self.add(store, None, {key: Row(1) for key in KEYS})
        for key in KEYS[:-1]:
            ref = self.add(store, ref, {key: None})
            store.compact(ref)
            store.prune(ref)
        while store.compact(ref) is not None:
            store.prune(ref)
        assert scan(store.view(ref)) == apply_changes({}, {KEYS[-1]: Row(1)})
        assert sum(run.rows for run in store.view(ref).runs) < 2 * len(KEYS)

    def test_a_late_attempt_does_not_prune_runs_that_a_newer_call_needs(self) -> None:
        store = self.store()
        refs, models = self.chain(store, 7)
        late_input = refs[5]
        # Batch 8 was committed on batch 7's checkpoint, merged and pruned.
        eight = self.add(store, refs[6], {KEYS[0]: Row(8)})
        model = apply_changes(models[6], {KEYS[0]: Row(8)})
        # A late attempt of batch 7 continues: its input is the checkpoint of batch 6.
        late_ref = self.add(store, late_input, {KEYS[1]: Row(-7)})
        store.compact(late_input)
        store.prune(late_input)
        assert scan(store.view(eight)) == model
        store.compact(refs[6])
        store.prune(refs[6])
        assert scan(store.view(eight)) == model
        # Its own checkpoint belongs to no state, and a newer call prunes it.
        assert scan(store.view(late_ref)) == apply_changes(models[5], {KEYS[1]: Row(-7)})
        store.prune(eight)
        assert not store.has(late_ref)

    def test_overlapping_compactions_leave_both_views_complete(self) -> None:
        """A late attempt and a newer call have compacted overlapping runs: neither prunes runs that the other reads."""
        store = self.store()
        refs, models = self.chain(store, 9)
        # A call at 9 has compacted 3..9 and a late attempt at 5 has compacted 1..5, as if they had run at the same time.
        for low, high in ((2, 8), (0, 4)):
            below = refs[low - 1] if low else None
            rows = find_changes(models[high], models[low - 1] if low else {})
            run = make_run(rows)
            store._add([run], refs[high], refs[low], below, base=below is None, check=lambda txn: None)
        assert scan(store.view(refs[8])) == models[8]
        assert scan(store.view(refs[4])) == models[4]
        store.prune(refs[4])
        assert scan(store.view(refs[8])) == models[8]
        store.prune(refs[8])
        assert scan(store.view(refs[8])) == models[8]

    def test_a_view_uses_other_runs_if_the_parent_of_a_compacted_run_is_missing(self) -> None:
        store = self.store()
        refs, models = self.chain(store, 6)
        absent = self.refs.next(2)
        # This run ends at the head and includes older checkpoints than the head's own run, but its parent is missing.
        store._add(
            [make_run({KEYS[0]: Row(-1)})], refs[5], self.refs.next(3), absent, base=False, check=lambda txn: None
        )
        assert scan(store.view(refs[5])) == models[5]

    def test_pinned_runs_survive_pruning(self) -> None:
        store = self.store()
        refs, models = self.chain(store, 8)
        old = store.view(refs[3])
        pin = store.pin(old, 60)
        expired_pin = store.pin(store.view(refs[4]), -1)
        store.compact(refs[7])
        store.prune(refs[7])
        assert scan(old) == models[3]
        store.unpin(pin)
        store.unpin(expired_pin)
        assert store.prune(refs[7]) > 0
        with pytest.raises(MissingRunError):
            list(old.scan())
        with pytest.raises(MissingRunError):
            store.pin(old, 60)
        assert scan(store.view(refs[7])) == models[7]

    def test_a_store_keeps_few_runs_after_many_batches(self) -> None:
        store = self.store()
        ref: CheckpointRef | None = None
        model: Model = {}
        for i in range(150):
            changes: Changes = {KEYS[(i * 7 + j) % len(KEYS)]: Row(i) for j in range(3)}
            parent, ref = ref, self.add(store, ref, changes)
            model = apply_changes(model, changes)
            store.compact(parent)
            store.prune(parent)
        assert scan(store.view(ref)) == model
        assert len(store.runs()) < 25
        assert store._chunks.checked_count < 60

    def test_chunks_of_wide_rows_are_limited_in_bytes(self) -> None:
        """Without this limit, wide rows would need unlimited memory."""
        store = self.store()
        keys = [(f"key {i}", None) for i in range(400)]
        batch = make_run({key: Row(i, "x" * 200_000) for i, key in enumerate(keys)})
        ref = self.refs.next(1)
        run = store.apply([batch], ref, None)
        assert max(chunk.size_bytes for chunk in run.chunks) < 40 << 20
        assert sum(chunk.rows for chunk in run.chunks) == 400
        assert sum(b.num_rows for b in store.view(ref).scan()) == 400

    # -- growth, files, processes -------------------------------------------------------------------

    def test_the_lmdb_map_grows_far_beyond_its_first_size(self) -> None:
        store = self.store(chunk_rows=1000)
        first_bytes = store.map_bytes
        ref: CheckpointRef | None = None
        rng = np.random.default_rng(0)
        for _ in range(6):
            batch = make_random_rows(rng, 60_000)
            parent, ref = ref, self.refs.next(ref.version + 1 if ref else 1)
            store.apply([batch.slice(i, 10_000) for i in range(0, 60_000, 10_000)], ref, parent)
        assert store.map_bytes > 16 * first_bytes
        assert sum(batch.num_rows for batch in store.view(ref).scan()) == 360_000

    def test_folders_and_files_are_private(self) -> None:
        old_umask = os.umask(0)
        try:
            store = self.store()
            self.chain(store, 3)
        finally:
            os.umask(old_umask)
        parents = [self.folder.parent, self.folder, *self.folder.rglob("*")]
        assert any(path.is_file() for path in parents)
        for path in parents:
            assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path

    def test_a_reopened_store_has_its_runs(self) -> None:
        store = self.store(chunk_rows=2)
        refs, models = self.chain(store, 5)
        runs = store.runs()
        store.close()
        reopened = self.store(chunk_rows=3)
        assert reopened.runs() == runs
        assert scan(reopened.view(refs[4])) == models[4]

    def test_another_schema_does_not_read_old_rows(self) -> None:
        store = self.store()
        self.chain(store, 2)
        store.close()
        other = type(SCHEMA)(SCHEMA.keys, (pa.field("count", pa.int32()),))
        reopened = self.open(self.folder, schema=other)
        self._opened.append(reopened)
        assert reopened.runs() == []

    def test_two_objects_of_one_process_share_the_store(self) -> None:
        first, second = self.store(), self.store()
        refs, models = self.chain(first, 3)
        assert scan(second.view(refs[2])) == models[2]

    def test_many_processes_write_read_and_grow(self) -> None:
        """Writers of separate lineages, one of which grows the map, and readers work at the same time."""
        store = self.store()
        refs, models = self.chain(store, 3)
        jobs = [(type(self), self.folder, number, refs[2], 30_000 if number == 0 else 20) for number in range(3)]
        before = store.map_bytes
        with _SPAWN.Pool(3) as pool:
            results = pool.map_async(write_lineage, jobs, chunksize=1)
            # `Pool` waits forever for a worker that has died; the time limit of the test ends that wait.
            while not results.ready():
                assert scan(store.view(refs[2])) == models[2]
            heads = results.get()
        for number, (ref, rows) in enumerate(heads):
            seen = sum(batch.num_rows for batch in store.view(ref).scan())
            assert seen == rows + len(models[2]), f"writer {number}"
        assert scan(store.view(refs[2])) == models[2]
        assert store.map_bytes > before

    def test_a_killed_writer_leaves_no_run(self) -> None:
        store = self.store()
        refs, models = self.chain(store, 2)
        process = _SPAWN.Process(target=die_while_writing, args=(type(self), self.folder, refs[1]))
        process.start()
        process.join(WAIT_S)
        assert process.exitcode == 9
        assert {run.newest for run in store.runs()} == set(refs)
        assert scan(store.view(refs[1])) == models[1]
        self.add(store, refs[1], {KEYS[0]: Row(1)})


def find_changes(newer: Model, older: Model) -> dict[Any, Row | None]:
    keys = {canonicalise(key): key for key in KEYS}
    removed = {keys[key]: None for key in older if key not in newer}
    return {keys[key]: row for key, row in newer.items()} | removed


def make_random_rows(rng: np.random.Generator, rows: int) -> pa.RecordBatch:
    """Return rows of random keys in the order of a run, about 100 bytes each."""
    hashes = np.sort(rng.integers(0, 2**63, rows).astype(np.uint64))
    names = pa.array([f"{h:020d}" for h in hashes.tolist()])
    columns = [
        pa.array(hashes),
        names,
        pa.nulls(rows, pa.float64()),
        pa.array(np.arange(rows)),
        names,
        pa.nulls(rows, pa.int64()),
        pa.array(np.ones(rows, dtype=bool)),
        pa.array(np.zeros(rows, dtype=bool)),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA.arrow)


def write_lineage(job: tuple[type[LocalStoreContract], Path, int, CheckpointRef, int]) -> tuple[CheckpointRef, int]:
    """Write a lineage on top of the common one, in a separate process."""
    kind, folder, number, ref, rows = job
    store = kind.open(folder)
    rng = np.random.default_rng(number)
    total = 0
    for step in range(8):
        parent, ref = ref, CheckpointRef(ref.version + 1, f"{number:016x}{step:016x}")
        store.apply([make_random_rows(rng, rows)], ref, parent)
        total += rows
        assert sum(batch.num_rows for batch in store.view(parent).scan()) >= total - rows
        store.compact(parent)
    return ref, total


def die_while_writing(kind: type[LocalStoreContract], folder: Path, parent: CheckpointRef) -> None:
    """End the process as a Python worker dies, with half of a run in a write transaction."""
    store = kind.open(folder)
    batch = make_random_rows(np.random.default_rng(9), 50_000)

    def batches() -> Iterator[pa.RecordBatch]:
        yield batch

    def die(txn: Any) -> None:
        os._exit(9)

    store._add(batches(), CheckpointRef(9, "9" * 32), CheckpointRef(9, "9" * 32), parent, base=False, check=die)
