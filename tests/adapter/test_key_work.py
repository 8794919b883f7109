"""One call's work on a bucket's keys, over a real bucket with little memory: all three APIs, compared with a dict.

The same random history runs through each of them. What each key does in a call depends on what it is given, so that a
key that is passed by, called twice or given another's state shows at once.
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
    Lived,
    Model,
    clashing,
    compare,
    ordered,
    spread,
)

from spark_state_ext.engine.job import ARROW
from spark_state_ext.errors import UsageError
from spark_state_ext.functions.state_batch import StateBatch
from spark_state_ext.functions.ttl import Ttl


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


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize(("conf", "which"), HISTORIES)
def test_a_history_in_which_keys_are_erased(tmp_path: Path, api: str, conf: str, which: str) -> None:
    """A dict from which they are taken before the batch: neither state nor timeouts are left, and rows begin anew."""
    erased = 0
    for seed, hashed, memory_bytes in ((1, spread, 256), (2, clashing, 256), (3, spread, 1 << 20)):
        chosen = random.Random(seed)
        lived = Lived(tmp_path / str(seed), api, conf, TTLS[which], hashed, memory_bytes)
        model, expected_erased = Model(api, conf, TTLS[which]), 0
        for at, (rows, now_ms, watermark_ms) in enumerate(history(seed, 8)):
            keys: list[Key] = chosen.sample([None, *range(30)], chosen.choice([0, 1, 6, 25]))
            there = model.erase(keys)
            found = lived.batch(rows, now_ms, watermark_ms, keys)
            expected = model.batch(rows, now_ms, watermark_ms)
            assert ordered(found) == ordered(expected), f"batch {at} of {seed}"
            compare(lived, model, watermark_ms if "event" in which else now_ms)
            expected_erased += there
        # With a time to live the model does not know which expired rows are there still.
        assert TTLS[which] is not None or lived.erased == expected_erased
        erased += lived.erased
        lived.store.close()
    assert erased > 20


# -- one thing at a time ---------------------------------------------------------------------------


def rows_for(*keys: Key, at_ms: int = 0) -> list[tuple[Key, int, int]]:
    return [(key, at_ms, 1) for key in keys]


def seen(log: list[Any]) -> Callable[[StateBatch], None]:
    """A function that records keys, which of them timed out and what they have, and keeps the state as it is."""

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


@pytest.mark.parametrize("api", APIS)
def test_what_the_call_for_a_timeout_writes_lives_as_long_as_the_rows_of_its_key_say(tmp_path: Path, api: str) -> None:
    """By event time a key's write is at its latest row, also where the second of its two calls makes it."""
    timed_out: list[bool] = []

    def arrow(batch: StateBatch) -> None:
        out = batch.timed_out.to_pylist()
        timed_out.extend(out)
        batch.update({"n": [1] * len(batch), "tags": [[]] * len(batch)}, where=out)

    def per_key(key: Any, rows: Any, state: Any) -> Any:
        timed_out.append(state.hasTimedOut)
        if state.hasTimedOut:
            state.update((1, []))
        return []

    def first(key: Any, rows: Any, state: Any) -> Any:
        state.update((0, []))
        state.setTimeoutTimestamp(5_000)
        return []

    def first_arrow(batch: StateBatch) -> None:
        keeping(batch)
        batch.set_timeout(timestamp_ms=5_000)

    lived = Lived(tmp_path, api, EVENT_TIME, Ttl(15_000, clock="event"))
    lived.function = first_arrow if api == ARROW else first
    lived.batch(rows_for(1, 2, at_ms=4_000), 0, 0)
    lived.function = arrow if api == ARROW else per_key
    # Key 1 has a row at 30 s while the watermark is at 10 s; key 2 has none.
    lived.batch(rows_for(1, at_ms=30_000), 0, 10_000)
    assert sorted(timed_out) == [False, True, True]
    assert lived.stored() == {1: ((1, []), None, 45_000), 2: ((1, []), None, 25_000)}


@pytest.mark.parametrize("memory_bytes", [256, 1 << 20])
@pytest.mark.parametrize("hashed", [spread, clashing])
def test_the_rows_of_the_key_with_most_are_counted(tmp_path: Path, hashed: Any, memory_bytes: int) -> None:
    """Whatever ranges the rows are worked on in, and also where keys have one hash."""
    lived = Lived(tmp_path, ARROW, hashed=hashed, memory_bytes=memory_bytes)
    for sizes in ({1: 3, 2: 17, 3: 5, None: 4}, {1: 1}, {}, {1: 2, None: 40, 9: 39}):
        rows = [(key, 0, 1) for key, size in sizes.items() for _ in range(size)]
        random.Random(len(rows)).shuffle(rows)
        lived.batch(rows, 1_000, 0)
        assert lived.key_rows_max == max(sizes.values(), default=0)
    assert lived.ranges > 4 or memory_bytes > 256
