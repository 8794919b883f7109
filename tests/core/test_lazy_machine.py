"""Compare a lazily restored bucket with a plain dictionary over random lookups, losses, failures and deaths."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from lazy_bucket import SCHEMA, SNAPSHOT_NAME, Later, Remote, are_rows_of, bucket_on, lazy_files, looked_up, values_of

from spark_state_ext.engine.bucket import Bucket
from spark_state_ext.errors import StorageError
from spark_state_ext.store import LocalStore, View, lazy_file
from spark_state_ext.store.lazy_file import PieceSource
from tests.helpers.soak import examples

T = TypeVar("T")
_KEYS = st.lists(st.integers(0, 12_400), min_size=1, max_size=40, unique=True)


class _Died(BaseException):
    """Stands for the death of the process."""


class LazyMachine(RuleBasedStateMachine):
    """Runs random steps on one bucket, with one open store at a time."""

    # Source of pieces that is used before the backend.
    peers: PieceSource | None = None

    @initialize(bad_hashes=st.booleans())
    def begin(self, bad_hashes: bool) -> None:
        self.scratch = Path(tempfile.mkdtemp())
        self.remote = Remote.made(self.scratch, timeouts=True, bad_hashes=bad_hashes)
        self.later = Later()
        self.is_there = True
        self._open()

    def _open(self) -> None:
        self.store = LocalStore.at(self.scratch / "store", SCHEMA)
        self._call()

    def _call(self) -> None:
        self.bucket: Bucket = bucket_on(self.store, self.remote, self.scratch, later=self.later, peers=self.peers)

    def _read(self, work: Callable[[View], T]) -> T:
        return self.bucket.read(work)

    def _check(self, keys: list[int]) -> None:
        result = self._read(lambda view: looked_up(view, keys, self.remote))
        assert result == {key: values_of(key) for key in keys if key < 12_000}

    @rule(keys=_KEYS)
    def look_up(self, keys: list[int]) -> None:
        self._check(keys)

    @rule(first=st.integers(0, 11_900), count=st.integers(1, 100))
    def look_up_neighbours(self, first: int, count: int) -> None:
        self._check(list(range(first, first + count)))

    @rule()
    def fill(self) -> None:
        self.later.run()

    @rule(pieces=st.lists(st.integers(0, 10_000), max_size=20))
    def lose_marks(self, pieces: list[int]) -> None:
        """Clear marks, as if another process had died before it set them: this process has not seen them yet."""
        for lazy in lazy_files(self.store):
            for piece in {piece % lazy.pieces for piece in pieces}:
                if not lazy._checked[piece]:
                    os.pwrite(lazy._marks.fileno(), b"\0", lazy._marks_at + piece)

    @rule(keys=_KEYS, write=st.integers(0, 6))
    def die(self, keys: list[int], write: int) -> None:
        """Kill the process halfway through one of its writes; another process continues."""
        real, left = lazy_file._write, [write]

        def dying(file: Any, data: bytes, at: int) -> None:
            if left[0] == 0:
                real(file, data[: len(data) // 2], at)
                raise _Died
            left[0] -= 1
            real(file, data, at)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(lazy_file, "_write", dying)
            with contextlib.suppress(_Died):
                self._check(keys)
        self.reopen()

    @rule()
    def reopen(self) -> None:
        self.later.work.clear()
        self.store.close()
        self._open()

    @rule(keys=_KEYS, requests=st.integers(0, 8))
    def fail(self, keys: list[int], requests: int) -> None:
        """Let the backend fail after some requests: the lookup raises an error, or returns the right rows."""
        self.remote.folder.failure = StorageError("it does not answer")
        self.remote.folder.fails_after = requests
        try:
            self._check(keys)
        except StorageError:
            # A load that failed closes its sources: it takes another call.
            self._call()
        finally:
            self.remote.folder.fails_after = None

    @precondition(lambda self: self.is_there)
    @rule()
    def clean_up(self) -> None:
        """Remove the snapshot; the deltas hold the same state."""
        self.remote.folder.remove(SNAPSHOT_NAME)
        self.is_there = False

    @precondition(lambda self: not self.is_there)
    @rule()
    def bring_back(self) -> None:
        self.remote.folder.put(SNAPSHOT_NAME, self.remote.snapshot)
        self.is_there = True

    @rule()
    def lose_the_store(self) -> None:
        self.later.work.clear()
        self.store.close()
        shutil.rmtree(self.scratch / "store")
        self._open()

    @rule()
    def scan(self) -> None:
        assert self._read(lambda view: sum(batch.num_rows for batch in view.scan())) == 12_000
        assert not lazy_files(self.store)

    @rule(now_ms=st.sampled_from([-1, 0, 95, 2_000, 10**6]), border=st.integers(-1, 2**64 - 1))
    def time_out(self, now_ms: int, border: int) -> None:
        due = [key for key in range(0, min(now_ms, 12_000), 10) if int(self.remote.hashed[key]) > border]
        assert are_rows_of(self._read(lambda view: view.expired(now_ms, after=border)), due)

    @rule(now_ms=st.integers(-1, 12_000))
    def next_timeout(self, now_ms: int) -> None:
        earliest = -(-max(now_ms, 0) // 10) * 10
        result = self._read(lambda view: view.earliest_timeout(now_ms))
        assert result == (earliest if earliest < 12_000 else None)

    @invariant()
    def marked_pieces_match_the_snapshot(self) -> None:
        """Each piece that is marked as present has the bytes of the snapshot."""
        if not hasattr(self, "store"):
            return
        for lazy in lazy_files(self.store):
            here = np.setdiff1d(np.arange(lazy.pieces), lazy.absent())
            for piece in here.tolist():
                lazy.index.check(piece, lazy._piece_bytes(piece), "the file")

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
            shutil.rmtree(self.scratch)


TestLazyMachine = LazyMachine.TestCase
TestLazyMachine.settings = settings(max_examples=examples(15, 300), stateful_step_count=15)
