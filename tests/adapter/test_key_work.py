"""One call's work on the keys of a real bucket with little memory: all three APIs are compared with a dict.

The same random history runs through each API. What a key does in a call depends on its rows and state, so that the
comparison finds a key that is skipped, called twice or given another key's state.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from recorded_work import (
    APIS,
    EVENT_TIME,
    OUTPUT,
    PROCESSING_TIME,
    Key,
    Model,
    RecordedBucket,
    clashing_hash,
    compare,
    sort_calls,
    spread_hash,
)

from spark_state_ext.engine.job import ARROW
from spark_state_ext.errors import UsageError
from spark_state_ext.functions.state_batch import StateBatch
from spark_state_ext.functions.ttl import Ttl
from tests.helpers.soak import whole


def generate_history(seed: int, batches: int, keys: int = 24) -> Iterator[tuple[list[tuple[Key, int, int]], int, int]]:
    """Generate batches of rows, each with its processing time and watermark."""
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
    *[(conf, ttl_name) for conf in (EVENT_TIME, PROCESSING_TIME) for ttl_name in ("no ttl", "read")],
    *[(EVENT_TIME, "event"), (EVENT_TIME, "event, read"), (PROCESSING_TIME, "processing")],
    *[("NoTimeout", "no ttl"), ("NoTimeout", "processing")],
]
# In the suite, each history runs through one API; the soak runs each through all of them.
CASES = whole(
    [(APIS[at % len(APIS)], *history) for at, history in enumerate(HISTORIES)],
    [(api, *history) for at, history in enumerate(HISTORIES) for api in APIS if api != APIS[at % len(APIS)]],
)


@pytest.mark.parametrize(("api", "conf", "ttl_name"), CASES)
def test_calls_and_state_equal_those_of_the_model(tmp_path: Path, api: str, conf: str, ttl_name: str) -> None:
    calls_made, timed_out = 0, 0
    for seed, hash_key, memory_bytes in ((1, spread_hash, 256), (2, clashing_hash, 256), (3, spread_hash, 1 << 20)):
        recorded = RecordedBucket(tmp_path / str(seed), api, conf, TTLS[ttl_name], hash_key, memory_bytes)
        model = Model(api, conf, TTLS[ttl_name])
        batches = 10 if memory_bytes == 256 else 5
        for at, (rows, now_ms, watermark_ms) in enumerate(generate_history(seed, batches)):
            calls = recorded.batch(rows, now_ms, watermark_ms)
            expected = model.batch(rows, now_ms, watermark_ms)
            assert sort_calls(calls) == sort_calls(expected), f"batch {at} of {seed}"
            compare(recorded, model, watermark_ms if "event" in ttl_name else now_ms)
            calls_made += len(calls)
            timed_out += sum(call[3] for call in calls)
            assert recorded.timeouts == sum(call[3] for call in calls)
        assert recorded.ranges > batches or memory_bytes > 256, "the memory must be too small for one range"
        recorded.store.close()
    assert calls_made > 150
    assert (timed_out > 15) == (conf != "NoTimeout")


@pytest.mark.parametrize(("api", "conf", "ttl_name"), CASES)
def test_erased_keys_have_no_state_and_no_timeout(tmp_path: Path, api: str, conf: str, ttl_name: str) -> None:
    """Erased keys leave neither state nor timeouts, and later rows begin with an empty state."""
    erased = 0
    for seed, hash_key, memory_bytes in ((1, spread_hash, 256), (2, clashing_hash, 256), (3, spread_hash, 1 << 20)):
        chosen = random.Random(seed)
        recorded = RecordedBucket(tmp_path / str(seed), api, conf, TTLS[ttl_name], hash_key, memory_bytes)
        model, expected_erased = Model(api, conf, TTLS[ttl_name]), 0
        for at, (rows, now_ms, watermark_ms) in enumerate(generate_history(seed, 8)):
            keys: list[Key] = chosen.sample([None, *range(30)], chosen.choice([0, 1, 6, 25]))
            present = model.erase(keys)
            calls = recorded.batch(rows, now_ms, watermark_ms, keys)
            expected = model.batch(rows, now_ms, watermark_ms)
            assert sort_calls(calls) == sort_calls(expected), f"batch {at} of {seed}"
            compare(recorded, model, watermark_ms if "event" in ttl_name else now_ms)
            expected_erased += present
        # With a time to live the model does not know which expired rows the store still has.
        assert TTLS[ttl_name] is not None or recorded.erased == expected_erased
        erased += recorded.erased
        recorded.store.close()
    assert erased > 20


# -- single behaviours -----------------------------------------------------------------------------


def rows_for(*keys: Key, at_ms: int = 0) -> list[tuple[Key, int, int]]:
    return [(key, at_ms, 1) for key in keys]


def record_keys(log: list[Any]) -> Callable[[StateBatch], None]:
    """Return a function that records each key, whether it timed out and whether it has a state, without changes."""

    def function(batch: StateBatch) -> None:
        names = batch.keys["k"].to_pylist()
        log.extend(zip(names, batch.timed_out.to_pylist(), batch.exists.to_pylist(), strict=True))

    return function


def update_all(batch: StateBatch) -> None:
    batch.update({"n": [1] * len(batch), "tags": [[]] * len(batch)})


@pytest.mark.parametrize("clock", ["processing", "event"])
def test_expired_keys_that_get_no_rows_are_removed_step_by_step(tmp_path: Path, clock: Any) -> None:
    """Each call removes those of one range of hashes, however few keys it writes."""
    recorded = RecordedBucket(tmp_path, ARROW, ttl=Ttl(50, clock=clock), function=update_all)
    recorded.batch(rows_for(*range(40), at_ms=1_000), 1_000, 1_000)
    assert len(recorded.stored_keys()) == 40
    sizes = []
    for at in range(30):
        now_ms = 1_050 + at
        recorded.batch(rows_for(99, at_ms=now_ms), now_ms, now_ms)
        sizes.append(len(recorded.stored_keys()))
    assert sizes[0] > 1, "not all at once"
    assert sizes[-1] == 1
    assert sizes == sorted(sizes, reverse=True)


def test_a_timeout_remains_after_its_state_has_expired(tmp_path: Path) -> None:
    def function(batch: StateBatch) -> None:
        fresh = [not timed_out for timed_out in batch.timed_out.to_pylist()]
        update_all(batch)
        batch.set_timeout(duration_ms=100, where=fresh)
        batch.remove(batch.timed_out)

    recorded, log = RecordedBucket(tmp_path, ARROW, PROCESSING_TIME, Ttl(10), function=function), list[Any]()
    recorded.batch(rows_for(1, 2), 1_000, 0)
    for at in range(5):
        recorded.batch([], 1_020 + at, 0)
    assert recorded.stored_keys() == dict.fromkeys((1, 2), (None, 1100, None))
    recorded.function = record_keys(log)
    recorded.batch([], 1_101, 0)
    assert sorted(log) == [(1, True, False), (2, True, False)]


def test_a_time_to_live_may_be_added_changed_and_dropped(tmp_path: Path) -> None:
    """State from before has no expiry; each row has the expiry of the time to live with which it was written."""
    log: list[Any] = []
    recorded = RecordedBucket(tmp_path, ARROW, function=update_all)
    recorded.batch(rows_for(1, 2), 1_000, 0)
    recorded.restart(Ttl(50))
    recorded.batch(rows_for(2, 3), 1_010, 0)
    recorded.restart(Ttl(500))
    recorded.batch(rows_for(4), 1_020, 0)
    expiries = {key: expires_ms for key, (_, _, expires_ms) in recorded.stored_keys().items()}
    assert expiries == {1: None, 2: 1_060, 3: 1_060, 4: 1_520}
    recorded.function = record_keys(log)
    recorded.batch(rows_for(1, 2, 3, 4), 1_060, 0)
    assert sorted(log) == [(1, False, True), (2, False, False), (3, False, False), (4, False, True)]
    recorded.restart(None)
    log.clear()
    recorded.batch(rows_for(4), 9_999, 0)
    assert log == [(4, False, True)], "without a time to live no state expires"
    recorded.function = update_all
    recorded.batch(rows_for(4, 5), 9_999, 0)
    expiries = {key: expires_ms for key, (_, _, expires_ms) in recorded.stored_keys().items() if key in (4, 5)}
    assert expiries == {4: None, 5: None}


def test_a_scan_returns_the_previous_state_without_expired_keys(tmp_path: Path) -> None:
    scans: list[list[dict[str, Any]]] = []

    def function(batch: StateBatch) -> None:
        if 99 in batch.keys["k"].to_pylist():
            tables = list(batch.scan())
            assert all(table.column_names == ["k", "n", "tags"] for table in tables)
            scans.append(sorted((row for table in tables for row in table.to_pylist()), key=lambda row: row["k"]))
        n = len(batch)
        batch.update({"n": batch.keys["k"], "tags": [["x"]] * n})
        batch.remove([key == 7 for key in batch.keys["k"].to_pylist()])

    recorded = RecordedBucket(tmp_path, ARROW, ttl=Ttl(50), function=function)
    recorded.batch(rows_for(99), 1_000, 0)
    recorded.batch(rows_for(99, *range(30)), 1_040, 0)
    recorded.batch(rows_for(99), 1_060, 0)
    assert scans[0] == []
    assert [row["k"] for row in scans[1]] == [99]
    expected = [{"k": key, "n": key, "tags": ["x"]} for key in range(30) if key != 7]
    assert scans[2] == [*expected, {"k": 99, "n": 99, "tags": ["x"]}]


def test_a_batch_keeps_its_rows_and_state_after_the_call(tmp_path: Path) -> None:
    """Its tables own their memory, and its scan still reads the state of the batch before it."""
    kept: list[tuple[StateBatch, dict[str, Any]]] = []

    def read_batch(batch: StateBatch) -> dict[str, Any]:
        return {
            "rows": batch.rows.to_pylist(),
            "state": batch.with_state().to_pylist(),
            "ids": batch.group_ids.to_pylist(),
        }

    def function(batch: StateBatch) -> None:
        update_all(batch)
        kept.append((batch, read_batch(batch)))

    recorded = RecordedBucket(tmp_path, ARROW, function=function)
    for at in range(4):
        recorded.batch(rows_for(*range(at * 5, at * 5 + 20)), 1_000 + at, 0)
    scanned = [sorted(row["k"] for table in batch.scan() for row in table.to_pylist()) for batch, _ in kept]
    assert all(read_batch(batch) == before for batch, before in kept)
    first_of = {len(rows): rows for rows in scanned}
    assert first_of == {0: [], 20: list(range(20)), 25: list(range(25)), 30: list(range(30))}
    for batch, _ in kept:
        with pytest.raises(UsageError, match="after its function had returned"):
            batch.remove()
    assert len(recorded.stored_keys()) == 35, "a change after the call is too late"


@pytest.mark.parametrize("api", APIS)
def test_a_state_change_after_the_last_output_is_kept(tmp_path: Path, api: str) -> None:
    def arrow(batch: StateBatch) -> Iterator[Any]:
        yield {name: pa.nulls(len(batch)) for name in OUTPUT}
        update_all(batch)

    def per_key(key: Any, rows: Any, state: Any) -> Iterator[tuple[Any, ...]]:
        yield (None,) * len(OUTPUT)
        state.update((1, []))

    recorded = RecordedBucket(tmp_path, api, function=arrow if api == ARROW else per_key)
    recorded.batch(rows_for(*range(9)), 1_000, 0)
    assert recorded.stored_keys() == {key: ((1, []), None, None) for key in range(9)}


@pytest.mark.parametrize("api", APIS)
def test_a_function_may_return_no_output(tmp_path: Path, api: str) -> None:
    def arrow(batch: StateBatch) -> Any:
        return None if len(batch) % 2 else []

    def per_key(key: Any, rows: Any, state: Any) -> Any:
        return []

    recorded = RecordedBucket(tmp_path, api, PROCESSING_TIME, Ttl(5), function=arrow if api == ARROW else per_key)
    assert recorded.batch(rows_for(*range(9)), 1_000, 0) == []
    assert recorded.batch([], 1_000, 0) == []
    assert recorded.stored_keys() == {}


def test_a_due_key_with_rows_is_called_twice_unless_the_first_call_changes_it(tmp_path: Path) -> None:
    """Spark does so too: a key that always has rows and whose state is unchanged still times out."""
    log: list[Any] = []

    def update_and_set_timeout(batch: StateBatch) -> None:
        update_all(batch)
        batch.set_timeout(duration_ms=10)

    recorded = RecordedBucket(tmp_path, ARROW, PROCESSING_TIME, function=update_and_set_timeout)
    recorded.batch(rows_for(*range(20)), 1_000, 0)
    recorded.function = record_keys(log)
    recorded.batch(rows_for(3, 4), 1_020, 0)
    assert sorted(log) == sorted([(3, False, True), (4, False, True), *((key, True, True) for key in range(20))])
    # The calls changed no state, so all keys stay due.
    log.clear()
    recorded.function = update_and_set_timeout
    recorded.batch(rows_for(4), 1_020, 0)
    assert {key: entry for key, entry in recorded.stored_keys().items() if key == 3} == {3: ((1, []), 1_030, None)}
    recorded.function = record_keys(log)
    recorded.batch([], 1_031, 0)
    assert sorted(log) == [(key, True, True) for key in range(20)]


@pytest.mark.parametrize("api", APIS)
def test_a_write_of_a_timeout_call_expires_by_the_event_time_of_the_keys_rows(tmp_path: Path, api: str) -> None:
    """With event time, a write counts from the key's latest row, even if the second of its two calls makes it."""
    timed_out: list[bool] = []

    def arrow(batch: StateBatch) -> None:
        mask = batch.timed_out.to_pylist()
        timed_out.extend(mask)
        batch.update({"n": [1] * len(batch), "tags": [[]] * len(batch)}, where=mask)

    def per_key(key: Any, rows: Any, state: Any) -> Any:
        timed_out.append(state.hasTimedOut)
        if state.hasTimedOut:
            state.update((1, []))
        return []

    def set_timeout(key: Any, rows: Any, state: Any) -> Any:
        state.update((0, []))
        state.setTimeoutTimestamp(5_000)
        return []

    def set_timeout_arrow(batch: StateBatch) -> None:
        update_all(batch)
        batch.set_timeout(timestamp_ms=5_000)

    recorded = RecordedBucket(tmp_path, api, EVENT_TIME, Ttl(15_000, clock="event"))
    recorded.function = set_timeout_arrow if api == ARROW else set_timeout
    recorded.batch(rows_for(1, 2, at_ms=4_000), 0, 0)
    recorded.function = arrow if api == ARROW else per_key
    # Key 1 has a row at 30 s while the watermark is at 10 s; key 2 has none.
    recorded.batch(rows_for(1, at_ms=30_000), 0, 10_000)
    assert sorted(timed_out) == [False, True, True]
    assert recorded.stored_keys() == {1: ((1, []), None, 45_000), 2: ((1, []), None, 25_000)}


@pytest.mark.parametrize("memory_bytes", [256, 1 << 20])
@pytest.mark.parametrize("hash_key", [spread_hash, clashing_hash])
def test_key_rows_max_is_the_row_count_of_the_largest_key(tmp_path: Path, hash_key: Any, memory_bytes: int) -> None:
    """This holds for any number of ranges, and also if keys share a hash."""
    recorded = RecordedBucket(tmp_path, ARROW, hash_key=hash_key, memory_bytes=memory_bytes)
    for sizes in ({1: 3, 2: 17, 3: 5, None: 4}, {1: 1}, {}, {1: 2, None: 40, 9: 39}):
        rows = [(key, 0, 1) for key, size in sizes.items() for _ in range(size)]
        random.Random(len(rows)).shuffle(rows)
        recorded.batch(rows, 1_000, 0)
        assert recorded.key_rows_max == max(sizes.values(), default=0)
    assert recorded.ranges > 4 or memory_bytes > 256
