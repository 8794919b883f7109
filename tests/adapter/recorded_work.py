"""A bucket whose calls are recorded over many batches, and a model in a dict that computes the expected calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pandas as pd
import pyarrow as pa
from core_support import WRITER, first_pointer
from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from spark_state_ext.backends.files import sole_replica
from spark_state_ext.commit.context import CommitContext
from spark_state_ext.engine import limits
from spark_state_ext.engine.bucket import Bucket
from spark_state_ext.engine.job import ARROW, PANDAS, ROWS, Job
from spark_state_ext.engine.options import StateOptions
from spark_state_ext.files.folder import Folder
from spark_state_ext.functions.state_batch import StateBatch
from spark_state_ext.functions.ttl import EXPIRES_COLUMN, Ttl
from spark_state_ext.spark.executor.key_work import KeyWork, Times
from spark_state_ext.spark.shuffle.output import unpack
from spark_state_ext.spark.shuffle.payload import HASH_COLUMN
from spark_state_ext.store import LocalStore
from spark_state_ext.worker.metrics import CallMetrics
from spark_state_ext.worker.spill import HashSorter, SpillBuffer
from tests.helpers.jobs import job_of

APIS = [ARROW, ROWS, PANDAS]
EVENT_TIME, PROCESSING_TIME = "EventTimeTimeout", "ProcessingTimeTimeout"
KEY_TYPE = StructType([StructField("k", LongType())])
STATE_TYPE = StructType([StructField("n", LongType()), StructField("tags", ArrayType(StringType()))])
INPUT_TYPE = StructType(
    [StructField("k", LongType()), StructField("at", TimestampType()), StructField("value", LongType())]
)
OUTPUT_TYPE = StructType(
    [
        StructField("k", LongType()),
        StructField("total", LongType()),
        StructField("n", LongType()),
        StructField("tags", ArrayType(StringType())),
        StructField("timed_out", BooleanType()),
        StructField("action", LongType()),
    ]
)
OUTPUT = ["k", "total", "n", "tags", "timed_out", "action"]
Key = int | None
State = tuple[int, list[str]] | None
# Key, sum of its values, state before, whether it timed out, what it did.
Call = tuple[Key, int, State, bool, int]


def choose_action(conf: str, key: Key, total: int, state: State, timed_out: bool) -> int:
    """Return what a key's call does, as a sum: 1 updates the state, 2 removes it and 4 sets a timeout."""
    allowed = 3 if conf == "NoTimeout" else 7
    seed = (17 if key is None else key) * 7 + total * 3 + (0 if state is None else 5 * state[0] + len(state[1]))
    return (0, 1, 5, 2, 6, 4, 1, 5)[(seed + 11 * timed_out) % 8] & allowed


def update_state(total: int, state: State) -> tuple[int, list[str]]:
    n, tags = state or (0, [])
    return n + total % 10 + 1, [*tags[-2:], str(total % 3)]


def choose_delay_ms(key: Key, total: int) -> int:
    """Return the duration of a timeout in milliseconds."""
    return 1 + ((key or 0) * 5 + total) % 40


@dataclass
class Recorder:
    """The function under test for each API. Its output contains its arguments and its action."""

    conf: str

    def rows(self, key: Any, rows: list[Any], state: Any) -> Iterator[tuple[Any, ...]]:
        yield self._call_key(key.k, sum(row.value for row in rows), state, len(rows) == 0)

    def pandas(self, key: Any, frames: Iterable[pd.DataFrame], state: Any) -> Iterator[tuple[Any, ...]]:
        total = sum(int(frame["value"].sum()) for frame in frames)
        yield self._call_key(None if pd.isna(key[0]) else int(key[0]), total, state, state.hasTimedOut)

    def _call_key(self, key: Key, total: int, state: Any, timed_out: bool) -> tuple[Any, ...]:
        assert state.hasTimedOut == timed_out
        before: State = state.getOption
        action = choose_action(self.conf, key, total, before, timed_out)
        if action & 1:
            state.update(update_state(total, before))
        if action & 2:
            state.remove()
        if action & 4:
            if self.conf == EVENT_TIME:
                state.setTimeoutTimestamp(max(state.getCurrentWatermarkMs(), 1) + choose_delay_ms(key, total))
            else:
                state.setTimeoutDuration(choose_delay_ms(key, total))
        return (key, total, *(before or (None, None)), timed_out, action)

    def arrow(self, batch: StateBatch) -> Iterator[Any]:
        keys = batch.keys["k"].to_pylist()
        totals = [sum(values) for values in batch.lists("value").to_pylist()]
        timed_out = batch.timed_out.to_pylist()
        assert timed_out == [count == 0 for count in batch.counts.to_pylist()]
        states: list[State] = [
            (n, tags) if exists else None
            for n, tags, exists in zip(
                batch.state["n"].to_pylist(), batch.state["tags"].to_pylist(), batch.exists.to_pylist(), strict=True
            )
        ]
        actions = np.array(
            [choose_action(self.conf, *arguments) for arguments in zip(keys, totals, states, timed_out, strict=True)],
            dtype=np.int64,
        )
        new = list(map(update_state, totals, states))
        table = {"n": [n for n, _ in new], "tags": [tags for _, tags in new]}
        # Use each of the forms that a table of states may have.
        if len(keys) % 3 == 0:
            batch.update(table, where=actions & 1 > 0)
        elif len(keys) % 3 == 1:
            batch.update(pa.table({**table, "k": keys}).filter(pa.array(actions & 1 > 0)).slice(0))
        else:
            batch.update(pa.table(table).filter(pa.array(actions & 1 > 0)), where=pa.array(actions & 1 > 0))
        batch.remove(actions & 2 > 0)
        delays = np.array([choose_delay_ms(key, total) for key, total in zip(keys, totals, strict=True)])
        if self.conf == EVENT_TIME:
            batch.set_timeout(timestamp_ms=max(batch.watermark_ms or 0, 1) + delays, where=actions & 4 > 0)
        elif self.conf == PROCESSING_TIME:
            batch.set_timeout(duration_ms=delays, where=actions & 4 > 0)
        out = {
            "k": keys,
            "total": totals,
            "n": batch.state["n"],
            "tags": batch.state["tags"],
            "timed_out": timed_out,
            "action": actions,
        }
        yield pa.table(out).slice(0, 1)
        yield pa.table(out).slice(1)


def make_job(api: str, conf: str, ttl: Ttl | None, memory_bytes: int) -> Job:
    # Allow less memory than users may set, so that a few rows exceed it.
    with patch.object(limits, "MEMORY_BYTES_MIN", 1):
        options = StateOptions(
            root="/",
            operator="worked",
            buckets=8,
            local_dir="/",
            lease_ms=1_000,
            memory_bytes_max=memory_bytes,
            ttl=ttl,
        )
    return job_of(
        options,
        key_schema=KEY_TYPE.json(),
        state_schema=STATE_TYPE.json(),
        columns=("k", "at", "value"),
        timeout_conf=conf,
        event_time_position=1,
        api=api,
        input_schema=INPUT_TYPE.json(),
        output_schema=OUTPUT_TYPE.json(),
    )


Hash = Callable[[Key], int]


def spread_hash(key: Key) -> int:
    return ((23 if key is None else key) * 0x9E3779B97F4A7C15) % 2**64


def clashing_hash(key: Key) -> int:
    """Return one of four hashes: the lowest, the highest and two in the middle."""
    return (0, 2**63, 2**63 + 1, 2**64 - 1)[spread_hash(key) % 4]


@dataclass
class RecordedBucket:
    """A bucket over many batches, each of which runs through `KeyWork`."""

    folder: Path
    api: str
    conf: str = "NoTimeout"
    ttl: Ttl | None = None
    hash_key: Hash = spread_hash
    memory_bytes: int = 256
    function: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.pointer = first_pointer()
        self.files = Folder(str(self.folder / "root")).child("3")
        self.expiring = self.ttl is not None
        self.batches = 0
        self.ranges = 0
        self.erased = 0
        self.store = self.open_store()

    def open_store(self) -> LocalStore:
        operator_file = self.job().operator_file("")
        if self.expiring and self.ttl is None:
            operator_file = operator_file.with_expiry()
        self.schema = operator_file.row_schema()
        return LocalStore.at(self.folder / f"store-{len(self.schema.state)}", self.schema, chunk_rows=4)

    def job(self) -> Job:
        return make_job(self.api, self.conf, self.ttl, self.memory_bytes)

    def restart(self, ttl: Ttl | None) -> None:
        """Restart the job with another time to live or none."""
        self.ttl = ttl
        self.expiring = self.expiring or ttl is not None
        self.store.close()
        self.store = self.open_store()

    def bucket(self) -> Bucket:
        return Bucket(
            self.store, sole_replica(self.files, self.folder), self.pointer, WRITER, CommitContext(self.folder)
        )

    def batch(
        self, rows: list[tuple[Key, int, int]], now_ms: int, watermark_ms: int, erased: Sequence[Key] = ()
    ) -> list[Call]:
        """Run a batch of rows (key, event time in milliseconds, value), and return the calls that it made.

        `erased` are the keys of a new erase request."""
        sorter = HashSorter(self.folder, HASH_COLUMN, self.memory_bytes)
        for at in range(0, len(rows), 7):
            piece = rows[at : at + 7]
            hashes = np.array([self.hash_key(key) for key, _, _ in piece], dtype=np.uint64).view(np.int64)
            times = pa.array([ms * 1000 for _, ms, _ in piece], pa.int64()).cast(pa.timestamp("us", "Asia/Tokyo"))
            columns = [pa.array([key for key, _, _ in piece], pa.int64()), times, pa.array([v for *_, v in piece])]
            sorter.add(pa.RecordBatch.from_arrays([*columns, pa.array(hashes)], names=["c0", "c1", "c2", HASH_COLUMN]))
        bucket, changed = self.bucket(), SpillBuffer(self.folder, 1 << 10)
        clock = Times(now_ms, watermark_ms, True)
        recorder = Recorder(self.conf)
        functions: dict[str, Callable[..., Any]] = {
            ARROW: recorder.arrow,
            ROWS: recorder.rows,
            PANDAS: recorder.pandas,
        }
        function = self.function or functions[self.api]
        metrics = CallMetrics("", "", self.batches, "worked", 3)
        work = KeyWork(self.job(), function, bucket, self.schema, clock, self.batches, metrics, lambda: None)
        if erased:
            self.erased += work.erase([pa.array(erased, pa.int64())])
        frames = list(work.run(self._count_ranges(sorter), changed))
        self.timeouts, self.key_rows_max = metrics.timeouts, metrics.key_rows_max
        self._check_order(changed)
        pointer = bucket.commit(changed).pointer
        # Set the same fields as `executor.call`.
        if work.get_threshold_ms() is not None:
            low_watermark_version = pointer.version if pointer.ref != self.pointer.ref else pointer.version + 1
            low_watermark_ms = work.get_threshold_ms()
            assert low_watermark_ms is not None
            pointer = replace(
                pointer, timer_low_watermark_ms=low_watermark_ms, timer_low_watermark_version=low_watermark_version
            )
        self.pointer = pointer
        self.batches += 1
        return self._calls(frames)

    def _count_ranges(self, sorter: HashSorter) -> Iterator[tuple[int, pa.Table | None]]:
        for one in sorter.ranges():
            self.ranges += 1
            yield one

    def _check_order(self, changed: SpillBuffer) -> None:
        """Check that rows ascend by hash and that no key occurs twice: the store would replace one row by the other."""
        hashes, keys = [], []
        for batch in changed:
            assert batch.schema.equals(self.schema.arrow)
            batch.validate(full=True)
            hashes += batch.column("key_hash").to_pylist()
            keys += batch.column("key.k").to_pylist()
        assert hashes == sorted(hashes)
        assert len(keys) == len(set(keys)), "a key occurs twice in one delta"

    def _calls(self, frames: list[pd.DataFrame]) -> list[Call]:
        if self.api == PANDAS:
            rows = [tuple(row) for frame in frames for row in frame[OUTPUT].itertuples(index=False)]
        else:
            payloads = [
                pa.RecordBatch.from_pandas(frame, pa.schema([("payload", pa.binary())]), preserve_index=False)
                for frame in frames
            ]
            rows = [tuple(row.values()) for batch in unpack(payloads) for row in batch.to_pylist()]
        return [(k, total, None if n is None else (n, tags), out, action) for k, total, n, tags, out, action in rows]

    def stored_keys(self) -> dict[Key, tuple[State, int | None, int | None]]:
        """Return state, timeout and expiry of each key in the store."""
        keys: dict[Key, tuple[State, int | None, int | None]] = {}
        for batch in self.bucket().scan():
            for row in batch.to_pylist():
                assert row["key.k"] not in keys, "a key occurs twice"
                state = (row["state.n"], row["state.tags"]) if row["defined"] else None
                keys[row["key.k"]] = state, row["timeout_ms"], row.get(EXPIRES_COLUMN)
        return keys


@dataclass
class ModelKey:
    """The state, timeout and expiry of a key in the model."""

    state: State = None
    timeout_ms: int | None = None
    expires_ms: int | None = None


@dataclass
class Model:
    """The expected state of all keys in a dict."""

    api: str
    conf: str
    ttl: Ttl | None
    keys: dict[Key, ModelKey] = field(default_factory=dict)

    def erase(self, keys: Sequence[Key]) -> int:
        """Remove keys before a batch, and return how many of them had a state or a timeout."""
        present = [
            key
            for key in set(keys)
            if (entry := self.keys.get(key)) and (entry.state, entry.timeout_ms) != (None, None)
        ]
        for key in keys:
            self.keys.pop(key, None)
        return len(present)

    def visible_state(self, key: Key, clock_ms: int) -> State:
        entry = self.keys.get(key, ModelKey())
        expired = self.ttl is not None and entry.expires_ms is not None and entry.expires_ms <= clock_ms
        return None if expired else entry.state

    def batch(self, rows: list[tuple[Key, int, int]], now_ms: int, watermark_ms: int) -> list[Call]:
        by_event_time = self.ttl is not None and self.ttl.clock == "event"
        clock_ms = watermark_ms if by_event_time else now_ms
        threshold_ms = {EVENT_TIME: watermark_ms, PROCESSING_TIME: now_ms}.get(self.conf, -1)
        due = {
            key for key, entry in self.keys.items() if entry.timeout_ms is not None and entry.timeout_ms < threshold_ms
        }
        groups: dict[Key, list[tuple[int, int]]] = {}
        for key, ms, value in rows:
            groups.setdefault(key, []).append((ms, value))
        calls: list[Call] = []

        def call(key: Key, total: int, timed_out: bool, written_ms: int) -> bool:
            state = self.visible_state(key, clock_ms)
            action = choose_action(self.conf, key, total, state, timed_out)
            calls.append((key, total, state, timed_out, action))
            if not action:
                return False
            new = update_state(total, state) if action & 1 else None if action & 2 else state
            base = max(watermark_ms, 1) if self.conf == EVENT_TIME else now_ms
            timeout_ms = base + choose_delay_ms(key, total) if action & 4 else None
            expires_ms = None if new is None or self.ttl is None else written_ms + self.ttl.duration_ms
            self.keys[key] = ModelKey(new, timeout_ms, expires_ms)
            return True

        written = {
            key: max(clock_ms, *(ms for ms, _ in key_rows)) if by_event_time else clock_ms
            for key, key_rows in groups.items()
        }
        for key, key_rows in groups.items():
            written_ms = written[key]
            if call(key, sum(value for _, value in key_rows), False, written_ms):
                due.discard(key)
                continue
            if self.ttl is not None and self.ttl.refresh == "read" and self.visible_state(key, clock_ms) is not None:
                self.keys[key].expires_ms = written_ms + self.ttl.duration_ms
        for key in due:
            call(key, 0, True, written.get(key, clock_ms))
        return calls

    def visible_keys(self, clock_ms: int) -> dict[Key, tuple[State, int | None]]:
        """Return state and timeout of all keys that have either."""
        keys = {key: (self.visible_state(key, clock_ms), entry.timeout_ms) for key, entry in self.keys.items()}
        return {key: both for key, both in keys.items() if both != (None, None)}


def sort_calls(calls: list[Call]) -> list[Call]:
    return sorted(calls, key=repr)


def compare(recorded: RecordedBucket, model: Model, clock_ms: int) -> None:
    """Check that the store holds what the model holds, except for expired keys that will be removed later."""
    visible_keys: dict[Key, tuple[State, int | None]] = {}
    for key, (state, timeout_ms, expires_ms) in recorded.stored_keys().items():
        if recorded.ttl is not None and expires_ms is not None and expires_ms <= clock_ms:
            state = None
        elif state is not None and model.ttl is not None:
            assert expires_ms == model.keys[key].expires_ms
        if (state, timeout_ms) != (None, None):
            visible_keys[key] = state, timeout_ms
    assert visible_keys == model.visible_keys(clock_ms)
