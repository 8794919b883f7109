"""One call's work on a bucket's keys, over a real bucket with little memory: all three APIs, compared with a dict.

The same random history runs through each of them. What each key does in a call depends on what it is given, so that a
key that is passed by, called twice or given another's state shows at once.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
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

from spark_state_ext.backends.files import sole_place
from spark_state_ext.bucket import Bucket
from spark_state_ext.commit import CommitOptions
from spark_state_ext.errors import UsageError
from spark_state_ext.folder import Folder
from spark_state_ext.metrics import CallMetrics
from spark_state_ext.spark.job import ARROW, PANDAS, ROWS, Job
from spark_state_ext.spark.key_work import KeyWork, Times
from spark_state_ext.spark.output import unpack
from spark_state_ext.spark.payload import HASH_COLUMN
from spark_state_ext.spill import HashSorter, SpillBuffer
from spark_state_ext.state_batch import StateBatch
from spark_state_ext.store import LocalStore
from spark_state_ext.ttl import EXPIRES_COLUMN, Ttl

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


def action_of(conf: str, key: Key, total: int, state: State, timed_out: bool) -> int:
    """What a key does: nothing, or some of updating (1), removing (2) and setting a timeout (4)."""
    allowed = 3 if conf == "NoTimeout" else 7
    seed = (17 if key is None else key) * 7 + total * 3 + (0 if state is None else 5 * state[0] + len(state[1]))
    return (0, 1, 5, 2, 6, 4, 1, 5)[(seed + 11 * timed_out) % 8] & allowed


def updated(total: int, state: State) -> tuple[int, list[str]]:
    n, tags = state or (0, [])
    return n + total % 10 + 1, [*tags[-2:], str(total % 3)]


def delay_of(key: Key, total: int) -> int:
    """How long until a timeout, milliseconds."""
    return 1 + ((key or 0) * 5 + total) % 40


@dataclass
class Recorder:
    """The function under test, in each form; it notes nothing but what it gives as output."""

    conf: str

    def rows(self, key: Any, rows: list[Any], state: Any) -> Iterator[tuple[Any, ...]]:
        yield self._one(key.k, sum(row.value for row in rows), state, len(rows) == 0)

    def pandas(self, key: Any, frames: Iterable[pd.DataFrame], state: Any) -> Iterator[tuple[Any, ...]]:
        total = sum(int(frame["value"].sum()) for frame in frames)
        yield self._one(None if pd.isna(key[0]) else int(key[0]), total, state, state.hasTimedOut)

    def _one(self, key: Key, total: int, state: Any, timed_out: bool) -> tuple[Any, ...]:
        assert state.hasTimedOut == timed_out
        before: State = state.getOption
        action = action_of(self.conf, key, total, before, timed_out)
        if action & 1:
            state.update(updated(total, before))
        if action & 2:
            state.remove()
        if action & 4:
            if self.conf == EVENT_TIME:
                state.setTimeoutTimestamp(max(state.getCurrentWatermarkMs(), 1) + delay_of(key, total))
            else:
                state.setTimeoutDuration(delay_of(key, total))
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
            [action_of(self.conf, *given) for given in zip(keys, totals, states, timed_out, strict=True)],
            dtype=np.int64,
        )
        new = list(map(updated, totals, states))
        table = {"n": [n for n, _ in new], "tags": [tags for _, tags in new]}
        # In each of the forms that a table of states may have.
        if len(keys) % 3 == 0:
            batch.update(table, where=actions & 1 > 0)
        elif len(keys) % 3 == 1:
            batch.update(pa.table({**table, "k": keys}).filter(pa.array(actions & 1 > 0)).slice(0))
        else:
            batch.update(pa.table(table).filter(pa.array(actions & 1 > 0)), where=pa.array(actions & 1 > 0))
        batch.remove(actions & 2 > 0)
        delays = np.array([delay_of(key, total) for key, total in zip(keys, totals, strict=True)])
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


def job(api: str, conf: str, ttl: Ttl | None, memory_bytes: int) -> Job:
    return Job(
        operator="worked",
        root="/",
        buckets=8,
        key_schema=KEY_TYPE.json(),
        state_schema=STATE_TYPE.json(),
        columns=("k", "at", "value"),
        key_positions=(0,),
        timeout_conf=conf,
        event_time_position=1,
        timezone="UTC",
        frame_rows_max=10_000,
        late_by_previous_watermark=True,
        application_id="",
        plan_id="plan",
        local_dir="/",
        strict=False,
        lease_ms=1_000,
        memory_bytes_max=memory_bytes,
        batches_retained=100,
        local_keep_s=86_400.0,
        backends=(),
        commit=CommitOptions(),
        restore_from=None,
        pointer_read="v2",
        clean_up=True,
        api=api,
        input_schema=INPUT_TYPE.json(),
        output_schema=OUTPUT_TYPE.json(),
        ttl=ttl,
    )


Hash = Callable[[Key], int]


def spread(key: Key) -> int:
    return ((23 if key is None else key) * 0x9E3779B97F4A7C15) % 2**64


def clashing(key: Key) -> int:
    """Few hashes, at both ends and in between."""
    return (0, 2**63, 2**63 + 1, 2**64 - 1)[spread(key) % 4]


@dataclass
class Lived:
    """A bucket from batch to batch, each of which runs through `KeyWork`."""

    folder: Path
    api: str
    conf: str = "NoTimeout"
    ttl: Ttl | None = None
    hashed: Hash = spread
    memory_bytes: int = 256
    function: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.pointer = first_pointer()
        self.files = Folder(str(self.folder / "root")).child("3")
        self.expiring = self.ttl is not None
        self.batches = 0
        self.ranges = 0
        self.store = self.opened()

    def opened(self) -> LocalStore:
        asked = self.job().operator_file("")
        if self.expiring and self.ttl is None:
            asked = asked.with_expiry()
        self.schema = asked.row_schema()
        return LocalStore(self.folder / f"store-{len(self.schema.state)}", self.schema, chunk_rows=4)

    def job(self) -> Job:
        return job(self.api, self.conf, self.ttl, self.memory_bytes)

    def restarted(self, ttl: Ttl | None) -> None:
        """Another start of the job, with another time to live or none."""
        self.ttl = ttl
        self.expiring = self.expiring or ttl is not None
        self.store.close()
        self.store = self.opened()

    def bucket(self) -> Bucket:
        return Bucket(self.store, sole_place(self.files, self.folder), self.pointer, WRITER, self.folder)

    def batch(self, rows: list[tuple[Key, int, int]], now_ms: int, watermark_ms: int) -> list[Call]:
        """Run a batch of rows (key, event time in milliseconds, value); returns the calls that were made."""
        sorter = HashSorter(self.folder, HASH_COLUMN, self.memory_bytes)
        for at in range(0, len(rows), 7):
            piece = rows[at : at + 7]
            hashes = np.array([self.hashed(key) for key, _, _ in piece], dtype=np.uint64).view(np.int64)
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
        frames = list(work.run(self._counted(sorter), changed))
        self.timeouts = metrics.timeouts
        self._check_order(changed)
        pointer = bucket.commit(changed)
        # As `runtime` stamps it.
        if work.threshold_ms() is not None:
            floor_version = pointer.version if pointer.ref != self.pointer.ref else pointer.version + 1
            floor_ms = work.threshold_ms()
            assert floor_ms is not None
            pointer = replace(pointer, timeout_floor_ms=floor_ms, timeout_floor_version=floor_version)
        self.pointer = pointer
        self.batches += 1
        return self._calls(frames)

    def _counted(self, sorter: HashSorter) -> Iterator[tuple[int, pa.Table | None]]:
        for one in sorter.ranges():
            self.ranges += 1
            yield one

    def _check_order(self, changed: SpillBuffer) -> None:
        """Ascending by hash, and no key twice, or the store takes one row for the other."""
        hashes, keys = [], []
        for batch in changed:
            assert batch.schema.equals(self.schema.arrow)
            batch.validate(full=True)
            hashes += batch.column("key_hash").to_pylist()
            keys += batch.column("key.k").to_pylist()
        assert hashes == sorted(hashes)
        assert len(keys) == len(set(keys)), "a key twice in one delta"

    def _calls(self, frames: list[pd.DataFrame]) -> list[Call]:
        if self.api == PANDAS:
            rows = [tuple(row) for frame in frames for row in frame[OUTPUT].itertuples(index=False)]
        else:
            payloads = [pa.record_batch([pa.array(frame["payload"].tolist(), pa.binary())], ["p"]) for frame in frames]
            rows = [tuple(row.values()) for batch in unpack(payloads) for row in batch.to_pylist()]
        return [(k, total, None if n is None else (n, tags), out, action) for k, total, n, tags, out, action in rows]

    def stored(self) -> dict[Key, tuple[State, int | None, int | None]]:
        """What lies in the store: state, timeout and end of each key."""
        found: dict[Key, tuple[State, int | None, int | None]] = {}
        for batch in self.bucket().scan():
            for row in batch.to_pylist():
                assert row["key.k"] not in found, "a key twice"
                state = (row["state.n"], row["state.tags"]) if row["defined"] else None
                found[row["key.k"]] = state, row["timeout_ms"], row.get(EXPIRES_COLUMN)
        return found


@dataclass
class Kept:
    """What the model keeps of a key."""

    state: State = None
    timeout_ms: int | None = None
    expires_ms: int | None = None


@dataclass
class Model:
    """The same in a dict."""

    api: str
    conf: str
    ttl: Ttl | None
    keys: dict[Key, Kept] = field(default_factory=dict)

    def visible(self, key: Key, clock_ms: int) -> State:
        kept = self.keys.get(key, Kept())
        gone = self.ttl is not None and kept.expires_ms is not None and kept.expires_ms <= clock_ms
        return None if gone else kept.state

    def batch(self, rows: list[tuple[Key, int, int]], now_ms: int, watermark_ms: int) -> list[Call]:
        by_event_time = self.ttl is not None and self.ttl.clock == "event"
        clock_ms = watermark_ms if by_event_time else now_ms
        threshold_ms = {EVENT_TIME: watermark_ms, PROCESSING_TIME: now_ms}.get(self.conf, -1)
        due = {key for key, it in self.keys.items() if it.timeout_ms is not None and it.timeout_ms < threshold_ms}
        groups: dict[Key, list[tuple[int, int]]] = {}
        for key, ms, value in rows:
            groups.setdefault(key, []).append((ms, value))
        calls: list[Call] = []

        def call(key: Key, total: int, timed_out: bool, written_ms: int) -> bool:
            state = self.visible(key, clock_ms)
            action = action_of(self.conf, key, total, state, timed_out)
            calls.append((key, total, state, timed_out, action))
            if not action:
                return False
            new = updated(total, state) if action & 1 else None if action & 2 else state
            base = max(watermark_ms, 1) if self.conf == EVENT_TIME else now_ms
            timeout_ms = base + delay_of(key, total) if action & 4 else None
            ends = None if new is None or self.ttl is None else written_ms + self.ttl.duration_ms
            self.keys[key] = Kept(new, timeout_ms, ends)
            return True

        for key, mine in groups.items():
            written_ms = max(clock_ms, *(ms for ms, _ in mine)) if by_event_time else clock_ms
            if call(key, sum(value for _, value in mine), False, written_ms):
                due.discard(key)
                continue
            if self.ttl is not None and self.ttl.refresh == "read" and self.visible(key, clock_ms) is not None:
                self.keys[key].expires_ms = written_ms + self.ttl.duration_ms
        for key in due:
            call(key, 0, True, clock_ms)
        return calls

    def shown(self, clock_ms: int) -> dict[Key, tuple[State, int | None]]:
        """State and timeout of all keys that have either."""
        found = {key: (self.visible(key, clock_ms), it.timeout_ms) for key, it in self.keys.items()}
        return {key: both for key, both in found.items() if both != (None, None)}


def ordered(calls: list[Call]) -> list[Call]:
    return sorted(calls, key=repr)


def compare(lived: Lived, model: Model, clock_ms: int) -> None:
    """The store holds what the model does, and besides only what has expired and waits to be removed."""
    shown: dict[Key, tuple[State, int | None]] = {}
    for key, (state, timeout_ms, expires_ms) in lived.stored().items():
        if lived.ttl is not None and expires_ms is not None and expires_ms <= clock_ms:
            state = None
        elif state is not None and model.ttl is not None:
            assert expires_ms == model.keys[key].expires_ms
        if (state, timeout_ms) != (None, None):
            shown[key] = state, timeout_ms
    assert shown == model.shown(clock_ms)


def history(seed: int, batches: int, keys: int = 24) -> Iterator[tuple[list[tuple[Key, int, int]], int, int]]:
    """Batches of rows, with their processing time and watermark."""
    chosen = random.Random(seed)
    now_ms, watermark_ms = 1_000_000, 0
    for _ in range(batches):
        count = chosen.choice([0, 1, 5, 40, 90])
        names: list[Key] = [None, *range(chosen.choice([3, keys]))]
        rows = [(chosen.choice(names), now_ms + chosen.randint(-30, 10), chosen.randint(0, 9)) for _ in range(count)]
        yield rows, now_ms, watermark_ms
        now_ms += chosen.randint(0, 25)
        watermark_ms = max(watermark_ms, now_ms - 20)


TTLS = {
    "no ttl": None,
    "processing": Ttl(30),
    "event": Ttl(30, clock="event"),
    "read": Ttl(30, refresh="read"),
    "event, read": Ttl(30, clock="event", refresh="read"),
}


HISTORIES = [
    *[(conf, which) for conf in (EVENT_TIME, PROCESSING_TIME) for which in ("no ttl", "read")],
    *[(EVENT_TIME, "event"), (EVENT_TIME, "event, read"), (PROCESSING_TIME, "processing")],
    *[("NoTimeout", "no ttl"), ("NoTimeout", "processing")],
]


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize(("conf", "which"), HISTORIES)
def test_a_history_as_a_dict_has_it(tmp_path: Path, api: str, conf: str, which: str) -> None:
    called, timed_out = 0, 0
    for seed, hashed, memory_bytes in ((1, spread, 256), (2, clashing, 256), (3, spread, 1 << 20)):
        lived = Lived(tmp_path / str(seed), api, conf, TTLS[which], hashed, memory_bytes)
        model = Model(api, conf, TTLS[which])
        batches = 10 if memory_bytes == 256 else 5
        for at, (rows, now_ms, watermark_ms) in enumerate(history(seed, batches)):
            found = lived.batch(rows, now_ms, watermark_ms)
            expected = model.batch(rows, now_ms, watermark_ms)
            assert ordered(found) == ordered(expected), f"batch {at} of {seed}"
            compare(lived, model, watermark_ms if "event" in which else now_ms)
            called += len(found)
            timed_out += sum(call[3] for call in found)
            assert lived.timeouts == sum(call[3] for call in found)
        assert lived.ranges > batches or memory_bytes > 256, "too few ranges to tell anything"
        lived.store.close()
    assert called > 150
    assert (timed_out > 15) == (conf != "NoTimeout")


# -- one thing at a time ---------------------------------------------------------------------------


def rows_for(*keys: Key, at_ms: int = 0) -> list[tuple[Key, int, int]]:
    return [(key, at_ms, 1) for key in keys]


def seen(log: list[Any]) -> Callable[[StateBatch], None]:
    """A function that notes keys, which of them timed out and what they have, and keeps the state as it is."""

    def function(batch: StateBatch) -> None:
        names = batch.keys["k"].to_pylist()
        log.extend(zip(names, batch.timed_out.to_pylist(), batch.exists.to_pylist(), strict=True))

    return function


def keeping(batch: StateBatch) -> None:
    batch.update({"n": [1] * len(batch), "tags": [[]] * len(batch)})


@pytest.mark.parametrize("clock", ["processing", "event"])
def test_what_has_expired_is_gone_in_the_end(tmp_path: Path, clock: Any) -> None:
    """Not looked at any more, it goes a range of hashes at a time, however many keys are written beside it."""
    lived = Lived(tmp_path, ARROW, ttl=Ttl(50, clock=clock), function=keeping)
    lived.batch(rows_for(*range(40), at_ms=1_000), 1_000, 1_000)
    assert len(lived.stored()) == 40
    sizes = []
    for at in range(30):
        now_ms = 1_050 + at
        lived.batch(rows_for(99, at_ms=now_ms), now_ms, now_ms)
        sizes.append(len(lived.stored()))
    assert sizes[0] > 1, "not all at once"
    assert sizes[-1] == 1
    assert sizes == sorted(sizes, reverse=True)


def test_a_timeout_outlives_the_state_it_was_set_with(tmp_path: Path) -> None:
    def function(batch: StateBatch) -> None:
        fresh = [not it for it in batch.timed_out.to_pylist()]
        keeping(batch)
        batch.set_timeout(duration_ms=100, where=fresh)
        batch.remove(batch.timed_out)

    lived, log = Lived(tmp_path, ARROW, PROCESSING_TIME, Ttl(10), function=function), list[Any]()
    lived.batch(rows_for(1, 2), 1_000, 0)
    for at in range(5):
        lived.batch([], 1_020 + at, 0)
    assert lived.stored() == dict.fromkeys((1, 2), (None, 1100, None))
    lived.function = seen(log)
    lived.batch([], 1_101, 0)
    assert sorted(log) == [(1, True, False), (2, True, False)]


def test_a_time_to_live_may_be_added_changed_and_dropped(tmp_path: Path) -> None:
    """State of before has no end; each row goes by the time to live it was written under."""
    log: list[Any] = []
    lived = Lived(tmp_path, ARROW, function=keeping)
    lived.batch(rows_for(1, 2), 1_000, 0)
    lived.restarted(Ttl(50))
    lived.batch(rows_for(2, 3), 1_010, 0)
    lived.restarted(Ttl(500))
    lived.batch(rows_for(4), 1_020, 0)
    ends = {key: ends for key, (_, _, ends) in lived.stored().items()}
    assert ends == {1: None, 2: 1_060, 3: 1_060, 4: 1_520}
    lived.function = seen(log)
    lived.batch(rows_for(1, 2, 3, 4), 1_060, 0)
    assert sorted(log) == [(1, False, True), (2, False, False), (3, False, False), (4, False, True)]
    lived.restarted(None)
    log.clear()
    lived.batch(rows_for(4), 9_999, 0)
    assert log == [(4, False, True)], "without a time to live nothing expires"
    lived.function = keeping
    lived.batch(rows_for(4, 5), 9_999, 0)
    ends = {key: ends for key, (_, _, ends) in lived.stored().items() if key in (4, 5)}
    assert ends == {4: None, 5: None}


def test_a_scan_shows_the_batch_before_without_what_has_expired(tmp_path: Path) -> None:
    found: list[list[dict[str, Any]]] = []

    def function(batch: StateBatch) -> None:
        if 99 in batch.keys["k"].to_pylist():
            tables = list(batch.scan())
            assert all(table.column_names == ["k", "n", "tags"] for table in tables)
            found.append(sorted((row for table in tables for row in table.to_pylist()), key=lambda row: row["k"]))
        n = len(batch)
        batch.update({"n": batch.keys["k"], "tags": [["x"]] * n})
        batch.remove([key == 7 for key in batch.keys["k"].to_pylist()])

    lived = Lived(tmp_path, ARROW, ttl=Ttl(50), function=function)
    lived.batch(rows_for(99), 1_000, 0)
    lived.batch(rows_for(99, *range(30)), 1_040, 0)
    lived.batch(rows_for(99), 1_060, 0)
    assert found[0] == []
    assert [row["k"] for row in found[1]] == [99]
    expected = [{"k": key, "n": key, "tags": ["x"]} for key in range(30) if key != 7]
    assert found[2] == [*expected, {"k": 99, "n": 99, "tags": ["x"]}]


def test_a_batch_that_is_kept_shows_what_it_showed(tmp_path: Path) -> None:
    """Its tables are memory of their own, and its scan is of the batch before it, for as long as somebody has it."""
    kept: list[tuple[StateBatch, dict[str, Any]]] = []

    def shown(batch: StateBatch) -> dict[str, Any]:
        return {
            "rows": batch.rows.to_pylist(),
            "state": batch.with_state().to_pylist(),
            "ids": batch.group_ids.to_pylist(),
        }

    def function(batch: StateBatch) -> None:
        keeping(batch)
        kept.append((batch, shown(batch)))

    lived = Lived(tmp_path, ARROW, function=function)
    for at in range(4):
        lived.batch(rows_for(*range(at * 5, at * 5 + 20)), 1_000 + at, 0)
    scanned = [sorted(row["k"] for table in batch.scan() for row in table.to_pylist()) for batch, _ in kept]
    assert all(shown(batch) == before for batch, before in kept)
    first_of = {len(rows): rows for rows in scanned}
    assert first_of == {0: [], 20: list(range(20)), 25: list(range(25)), 30: list(range(30))}
    for batch, _ in kept:
        with pytest.raises(UsageError, match="after its function had returned"):
            batch.remove()
    assert len(lived.stored()) == 35, "a change after the call is too late"


@pytest.mark.parametrize("api", APIS)
def test_a_function_that_changes_state_after_its_last_output(tmp_path: Path, api: str) -> None:
    def arrow(batch: StateBatch) -> Iterator[Any]:
        yield {name: pa.nulls(len(batch)) for name in OUTPUT}
        keeping(batch)

    def per_key(key: Any, rows: Any, state: Any) -> Iterator[tuple[Any, ...]]:
        yield (None,) * len(OUTPUT)
        state.update((1, []))

    lived = Lived(tmp_path, api, function=arrow if api == ARROW else per_key)
    lived.batch(rows_for(*range(9)), 1_000, 0)
    assert lived.stored() == {key: ((1, []), None, None) for key in range(9)}


@pytest.mark.parametrize("api", APIS)
def test_a_function_that_gives_nothing(tmp_path: Path, api: str) -> None:
    def arrow(batch: StateBatch) -> Any:
        return None if len(batch) % 2 else []

    def per_key(key: Any, rows: Any, state: Any) -> Any:
        return []

    lived = Lived(tmp_path, api, PROCESSING_TIME, Ttl(5), function=arrow if api == ARROW else per_key)
    assert lived.batch(rows_for(*range(9)), 1_000, 0) == []
    assert lived.batch([], 1_000, 0) == []
    assert lived.stored() == {}


def test_a_key_that_is_due_and_has_rows_is_called_for_both_unless_the_first_call_touches_it(tmp_path: Path) -> None:
    """As in Spark: a key that always has rows, and is left as it is, times out all the same."""
    log: list[Any] = []

    def setting(batch: StateBatch) -> None:
        keeping(batch)
        batch.set_timeout(duration_ms=10)

    lived = Lived(tmp_path, ARROW, PROCESSING_TIME, function=setting)
    lived.batch(rows_for(*range(20)), 1_000, 0)
    lived.function = seen(log)
    lived.batch(rows_for(3, 4), 1_020, 0)
    assert sorted(log) == sorted([(3, False, True), (4, False, True), *((key, True, True) for key in range(20))])
    # None of the calls changed anything, so all stay due.
    log.clear()
    lived.function = setting
    lived.batch(rows_for(4), 1_020, 0)
    assert {it: kept for it, kept in lived.stored().items() if it == 3} == {3: ((1, []), 1_030, None)}
    lived.function = seen(log)
    lived.batch([], 1_031, 0)
    assert sorted(log) == [(key, True, True) for key in range(20)]
