"""The local store compared with a dict, in any order of calls and with the worst possible hashes."""

from __future__ import annotations

import itertools
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from core_support import change_sets
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from arrow_schemas import CheckpointRef
from spark_state_ext.errors import MissingRunError
from spark_state_ext.store import LocalStore, View
from spark_state_ext.store import view as view_module
from spark_state_ext.testing.model import (
    ALL_KEYS,
    HASHES,
    KEYS,
    SCHEMA,
    HashFunction,
    Key,
    Model,
    Refs,
    Row,
    apply_changes,
    canonicalise,
    find_expired,
    key_columns,
    key_hashes,
    look_up,
    make_model,
    make_run,
    scan,
)

_FOLDERS = itertools.count()


class StoreMachine(RuleBasedStateMachine):
    """A committed history of checkpoints, and attempts, zombies, rollbacks and pins."""

    hashed: HashFunction

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="store-machine-"))
        self.folder = self.root / str(next(_FOLDERS))
        self.refs = Refs()
        # The committed checkpoints; the last one is the head. None is the empty state.
        self.chain: list[tuple[CheckpointRef | None, Model]] = [(None, {})]
        # Checkpoints older than this version were pruned.
        self.floor = 0
        self.pins: list[tuple[str, View, Model]] = []
        self.held: list[tuple[Any, str]] = []

    @initialize(
        chunk_rows=st.sampled_from([1, 2, 3, 7]),
        hashed=st.sampled_from(HASHES),
        scan_bytes=st.sampled_from([200, view_module._SCAN_BYTES]),
    )
    def start(self, chunk_rows: int, hashed: HashFunction, scan_bytes: int) -> None:
        self.patched = pytest.MonkeyPatch()
        self.patched.setattr(view_module, "_SCAN_BYTES", scan_bytes)
        self.chunk_rows = chunk_rows
        self.hashed = hashed
        self.open()

    def open(self) -> None:
        self.store = LocalStore.at(self.folder, SCHEMA, chunk_rows=self.chunk_rows, compaction_bytes_max=1 << 14)

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
        if hasattr(self, "patched"):
            self.patched.undo()
        shutil.rmtree(self.root, ignore_errors=True)

    @property
    def head(self) -> CheckpointRef | None:
        return self.chain[-1][0]

    @property
    def model(self) -> Model:
        return self.chain[-1][1]

    def add(self, changes: dict[Key, Row | None]) -> CheckpointRef:
        ref = self.refs.next(self.head.version + 1 if self.head else 1)
        self.store.apply([make_run(changes, self.hashed)], ref, self.head)
        return ref

    @rule(changes=change_sets())
    def put_and_delete(self, changes: dict[Key, Row | None]) -> None:
        self.chain.append((self.add(changes), apply_changes(self.model, changes)))

    @rule(changes=change_sets(), prunes=st.booleans())
    def sibling(self, changes: dict[Key, Row | None], prunes: bool) -> None:
        """An attempt that Spark does not commit; it compacts and prunes as any other attempt does."""
        ref = self.add(changes)
        assert scan(self.store.view(ref)) == apply_changes(self.model, changes)
        if prunes:
            self.store.compact(self.head)
            self.prune()

    @precondition(lambda self: len(self.chain) > 2)
    @rule(data=st.data())
    def zombie(self, data: st.DataObject) -> None:
        """A call with an old input pointer adds, compacts and prunes; the committed head must not change."""
        at = data.draw(st.integers(0, len(self.chain) - 2))
        ref, model = self.chain[at]
        changes = data.draw(change_sets(max_size=3))
        new = self.refs.next(ref.version + 1 if ref else 1)
        try:
            self.store.apply([make_run(changes, self.hashed)], new, ref)
        except MissingRunError:
            assert ref is not None
            assert ref.version < self.floor
            return
        assert scan(self.store.view(new)) == apply_changes(model, changes)
        self.store.compact(ref)
        self.store.prune(ref)
        self.floor = max(self.floor, ref.version if ref else 0)

    @rule()
    def compact(self) -> None:
        self.store.compact(self.head)

    @rule()
    def prune(self) -> None:
        self.store.prune(self.head)
        self.floor = max(self.floor, self.head.version if self.head else 0)

    @rule(now_ms=st.integers(0, 32))
    def expire(self, now_ms: int) -> None:
        """Look up the rows that timed out and delete them, as a call does."""
        view = self.store.view(self.head)
        due = view.expired(now_ms)
        assert make_model([due]) == find_expired(self.model, now_ms)
        later = [r.timeout_ms for r in self.model.values() if r.timeout_ms is not None and r.timeout_ms >= now_ms]
        earliest = view.earliest_timeout(now_ms)
        assert (earliest is not None and now_ms <= earliest <= min(later)) if later else True
        removals: dict[Key, Row | None] = {(row["key.name"], row["key.x"]): None for row in due.to_pylist()}
        if removals:
            self.put_and_delete(removals)

    @rule(keys=st.lists(st.sampled_from([*ALL_KEYS, ("absent", 0.0)]), unique_by=canonicalise))
    def get(self, keys: list[Key]) -> None:
        view = self.store.view(self.head)
        assert look_up(view, keys, self.hashed) == {
            canonicalise(key): self.model[canonicalise(key)] for key in keys if canonicalise(key) in self.model
        }
        lookup = view.lookup(key_hashes(keys, self.hashed), key_columns(keys))
        self.held.append((lookup.rows, repr(lookup.rows.to_pylist())))

    @rule(data=st.data())
    def rollback(self, data: st.DataObject) -> None:
        """A restart from an earlier Spark checkpoint; the later checkpoints become a side branch."""
        at = data.draw(st.integers(0, len(self.chain) - 1))
        ref, model = self.chain[at]
        try:
            assert scan(self.store.rollback(ref)) == model
        except MissingRunError:
            assert ref is not None
            assert ref.version < self.floor, "only pruned checkpoints may be missing"
            return
        del self.chain[at + 1 :]

    @rule()
    def pin(self) -> None:
        view = self.store.view(self.head)
        self.pins.append((self.store.pin(view, 600), view, self.model))

    @precondition(lambda self: self.pins)
    @rule()
    def unpin(self) -> None:
        name, view, model = self.pins.pop(0)
        assert scan(view) == model
        self.store.unpin(name)

    @rule()
    def reopen(self) -> None:
        pins = [(name, view.runs, model) for name, view, model in self.pins]
        self.store.close()
        self.open()
        self.pins = [(name, View(self.store, runs), model) for name, runs, model in pins]

    @invariant()
    def head_is_the_model(self) -> None:
        if not hasattr(self, "store"):
            return
        view = self.store.view(self.head)
        assert scan(view) == self.model
        assert look_up(view, KEYS, self.hashed) == self.model
        assert view.rows_min <= len(self.model) <= view.rows_max

    @invariant()
    def pinned_views_hold(self) -> None:
        for _, view, model in self.pins:
            assert scan(view) == model

    @invariant()
    def what_was_read_does_not_change(self) -> None:
        for rows, before in self.held[-3:]:
            assert repr(rows.to_pylist()) == before


@pytest.mark.filterwarnings("ignore::hypothesis.errors.HypothesisWarning")
def test_the_local_store_has_the_state_of_a_dict_after_any_calls() -> None:
    run_state_machine_as_test(
        StoreMachine,
        settings=settings(
            max_examples=25,
            stateful_step_count=30,
            phases=(Phase.explicit, Phase.reuse, Phase.generate),
            suppress_health_check=list(HealthCheck),
        ),
    )
