"""Built-in operators against Spark's own: the same input in the same batches, the same rows in every batch."""

from __future__ import annotations

import datetime as dt
import decimal
import functools
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from jobs import CLASSIC, SPARK, configured, ddl
from pyspark.sql import functions as F
from streams import finish, read, write_batches

from spark_state_ext import Agg, ArrowState, Ttl, aggregate, deduplicate, sessionize, top_k
from spark_state_ext.errors import StateError, UnsupportedPlanError, UnsupportedTypeError, UsageError
from spark_state_ext.worker.metrics import read as read_metrics
from tests.helpers.soak import SOAK, whole
from tests.helpers.waiting import eventually

pytestmark = [pytest.mark.spark]

Found = dict[int, list[Any]]
Plan = Callable[[Any], Any]
EVENTS = pa.schema([("key", pa.string()), ("at", pa.timestamp("us", "UTC")), ("value", pa.int64())])
GAP_MS = 10_000


def state(folder: Path, **options: Any) -> ArrowState:
    return ArrowState(
        str(folder / "root"), "tested", buckets=3, lease_ms=1_000, local_dir=str(folder / "local"), **options
    )


def events(*rows: tuple[str | None, float | None, int | None]) -> Any:
    """A batch: key, event time in seconds, value."""
    return pa.table(
        [
            pa.array([key for key, _, _ in rows], pa.string()),
            pa.array([None if at is None else round(at * 1_000_000) for _, at, _ in rows], pa.int64()).cast(
                EVENTS.field("at").type
            ),
            pa.array([value for *_, value in rows], pa.int64()),
        ],
        schema=EVENTS,
    )


def random_events(seed: int, batches: int) -> list[Any]:
    """Times that move on by 10 s a batch; some are late, some are no times."""
    random = np.random.default_rng(seed)
    found = []
    for batch in range(batches):
        rows: list[tuple[str | None, float | None, int | None]] = []
        for _ in range(int(random.integers(8, 25))):
            key = None if random.random() < 0.05 else "abcdef"[random.integers(6)]
            at = None if random.random() < 0.05 else max(0.0, 10.0 * batch + int(random.integers(-30, 12)))
            value = None if random.random() < 0.1 else int(random.integers(100))
            rows.append((key, at, value))
        found.append(events(*rows))
    return found


def comparable(value: Any) -> Any:
    if isinstance(value, float):
        return "NaN" if math.isnan(value) else float(f"{value:.10g}") + 0.0
    if isinstance(value, (list, tuple)):
        return tuple(comparable(part) for part in value)
    return value


def run(
    session: Any,
    folder: Path,
    batches: Sequence[Any],
    plan: Callable[[Any], Any],
    mode: str,
    *,
    restart_after: int | None = None,
) -> Found:
    """What each batch of a query gives; batches that give nothing are left out."""
    found: Found = {}

    def take(frame: Any, batch: int) -> None:
        rows = sorted((comparable(row) for row in frame.collect()), key=repr)
        assert batch not in found
        if rows:
            found[batch] = rows

    for part in (batches[:restart_after], batches[restart_after:] if restart_after is not None else []):
        if not part:
            continue
        source = write_batches(folder / "in", part)
        finish(
            plan(read(session, source, ddl(batches[0].schema)))
            .writeStream.foreachBatch(take)
            .outputMode(mode)
            .option("checkpointLocation", str(folder / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
    return found


def assert_as_spark(
    session: Any,
    folder: Path,
    batches: Sequence[Any],
    ours: Callable[[Any, Path], Any],
    sparks: Callable[[Any], Any],
    mode: str,
    restart_after: int | None = None,
) -> Found:
    """The same rows in the same batches; returns them."""
    found = []
    plans: dict[str, Plan] = {"ours": lambda df: ours(df, folder / "ours"), "sparks": sparks}
    for name, plan in plans.items():
        own = folder / name
        own.mkdir()
        found.append(run(session, own, batches, plan, mode, restart_after=restart_after))
    assert found[0].keys() == found[1].keys()
    for batch, rows in found[0].items():
        for mine, own in zip(rows, found[1][batch], strict=True):
            assert mine == own, f"batch {batch}"
    return found[0]


# -- before the shuffle --------------------------------------------------------------------------------------


def shuffled_rows(folder: Path) -> int:
    """Rows that came to buckets so far."""
    return sum(read_metrics(folder).column("rows").to_pylist())


def shuffled_at_least(folder: Path, rows: int) -> bool:
    return shuffled_rows(folder) >= rows


@CLASSIC
def test_rows_become_fewer_before_the_shuffle_where_keys_repeat(session: Any, tmp_path: Path) -> None:
    repeated = [events(*(("abcde"[i % 5], i / 100, (7 * i + batch) % 100) for i in range(1_000))) for batch in range(2)]
    single = [events(*((f"{batch} {i}", i / 100, i) for i in range(300))) for batch in range(2)]
    counted = {"n": Agg.count(), "total": Agg.sum("value"), "mean": Agg.mean("value"), "last": Agg.max("at")}
    native = [F.count("*"), F.sum("value"), F.avg("value"), F.max("at")]
    for name, batches, least, most in (("repeated", repeated, 10, 40), ("single", single, 600, 600)):
        folder = tmp_path / name
        folder.mkdir()
        assert_as_spark(
            session,
            folder,
            batches,
            lambda df, own: aggregate(state(own), df, "key", counted),
            lambda df: df.groupBy("key").agg(*native),
            "update",
        )
        eventually(functools.partial(shuffled_at_least, folder / "ours" / "local", least))
        assert shuffled_rows(folder / "ours" / "local") <= most
    found = run(
        session,
        tmp_path,
        repeated,
        lambda df: top_k(state(tmp_path), df, "key", ["value", "at"], 2).select("key", "value", "rank"),
        "update",
    )
    for batch, rows in found.items():
        seen = pa.concat_tables(repeated[: batch + 1]).to_pylist()
        wanted = [
            (key, value, rank)
            for key in "abcde"
            for rank, value in enumerate(sorted((r["value"] for r in seen if r["key"] == key), reverse=True)[:2], 1)
        ]
        assert set(rows) <= set(wanted)
        assert batch > 0 or rows == wanted
    assert shuffled_rows(tmp_path / "local") <= 2 * 2 * 10


# -- aggregate -----------------------------------------------------------------------------------------------

VALUES = pa.schema(
    [
        ("key", pa.string()),
        ("small", pa.int8()),
        ("whole", pa.int64()),
        ("real", pa.float64()),
        ("single", pa.float32()),
        ("price", pa.decimal128(10, 2)),
        ("wide", pa.decimal128(38, 6)),
        ("text", pa.string()),
        ("bytes", pa.binary()),
        ("day", pa.date32()),
        ("at", pa.timestamp("us", "UTC")),
        ("flag", pa.bool_()),
    ]
)
_NUMBERS = ("small", "whole", "real", "single", "price", "wide")


def values(seed: int, rows: int) -> Any:
    random = np.random.default_rng(seed)
    reals = [0.25, -0.0, 0.0, math.nan, math.inf, 1e9 + 0.5, 1e9 + 0.75, -3.5]

    def value(name: str) -> Any:
        if random.random() < 0.2:
            return None
        number = int(random.integers(-100, 100))
        return {
            "key": "abcdefgh"[random.integers(8)],
            "small": number,
            "whole": number * 10**9,
            "real": reals[random.integers(len(reals))] if number > 50 else number / 4,
            "single": number / 8 if number < 90 else math.nan,
            "price": decimal.Decimal(number) / 100,
            "wide": decimal.Decimal(number * 10**20) / 3**3,
            "text": ["", "a", "aa", "b", "ä", "𐍈", "￿"][random.integers(7)],
            "bytes": bytes([abs(number), 0]),
            "day": dt.date(2020, 1, 1) + dt.timedelta(days=number),
            "at": dt.datetime(2020, 1, 1, tzinfo=dt.timezone.utc) + dt.timedelta(microseconds=number),
            "flag": number > 0,
        }[name]

    rounded = [{name: value(name) for name in VALUES.names} for _ in range(rows)]
    for row in rounded:
        row["wide"] = None if row["wide"] is None else row["wide"].quantize(decimal.Decimal("0.000001"))
    return pa.Table.from_pylist(rounded, schema=VALUES)


@CLASSIC
def test_every_aggregate_of_every_type(session: Any, tmp_path: Path) -> None:
    ordered = VALUES.names[1:]
    ours = {"rows": Agg.count()}
    sparks = [F.count("*").alias("rows")]
    for name in ordered:
        ours |= {f"n_{name}": Agg.count(name), f"min_{name}": Agg.min(name), f"max_{name}": Agg.max(name)}
        sparks += [F.count(name).alias(f"n_{name}"), F.min(name).alias(f"min_{name}"), F.max(name).alias(f"max_{name}")]
    for name in _NUMBERS:
        ours |= {f"sum_{name}": Agg.sum(name), f"avg_{name}": Agg.mean(name), f"var_{name}": Agg.variance(name)}
        sparks += [F.sum(name).alias(f"sum_{name}"), F.avg(name).alias(f"avg_{name}")]
        sparks += [F.var_samp(name).alias(f"var_{name}")]
    sketched = {"whole": F.col("whole"), "text": F.expr("nullif(text, '')")} if find_spec("datasketches") else {}
    for name, column in sketched.items():
        ours[f"about_{name}"] = Agg.approx_count_distinct(column)
        sparks.append(F.hll_sketch_estimate(F.hll_sketch_agg(column, F.lit(12))).alias(f"about_{name}"))
    ours["twice"] = Agg.sum(F.col("small") * 2 + 1)
    sparks.append(F.sum(F.col("small") * 2 + 1).alias("twice"))
    schemas: list[Any] = []

    def mine(df: Any, folder: Path) -> Any:
        schemas.append(aggregate(state(folder), df, ["key"], ours))
        return schemas[-1]

    def own(df: Any) -> Any:
        schemas.append(df.groupBy("key").agg(*sparks))
        return schemas[-1]

    found = assert_as_spark(session, tmp_path, [values(i, 40) for i in range(3)], mine, own, "update", restart_after=2)
    assert [(f.name, f.dataType) for f in schemas[0].schema] == [(f.name, f.dataType) for f in schemas[-1].schema]
    assert len(found) == 3


@CLASSIC
def test_a_sum_beyond_a_long_fails(session: Any, tmp_path: Path) -> None:
    batches = [events(("a", 1, 2**62), ("b", 1, 1)), events(("a", 1, 2**62))]
    with pytest.raises(Exception, match=r"'total' of the key \{'key': 'a'\} exceeds the range of int64"):
        run(
            session,
            tmp_path,
            batches,
            lambda df: aggregate(state(tmp_path), df, "key", {"total": Agg.sum("value")}),
            "update",
        )


# -- rows that are given once --------------------------------------------------------------------------------

FIRST_AND_LAST = {
    "n": Agg.count(),
    "total": Agg.sum("value"),
    "spread": Agg.variance("value"),
    "first": Agg.first("value"),
    "last": Agg.last("value"),
    "known": Agg.last("value", ignore_nulls=True),
}
WINDOW = {"n": Agg.count(), "total": Agg.sum("value"), "latest": Agg.max("at")}


FAR_S, OLD_S = 253_399_622_400.0, -62_135_596_800.0


def slide() -> Any:
    return F.window("at", "20 seconds", "10 seconds")


def windows_of_spark(df: Any) -> Any:
    return df.groupBy(slide(), "key").agg(
        F.count("*").alias("n"), F.sum("value").alias("total"), F.max("at").alias("latest")
    )


OURS: dict[str, Callable[[ArrowState, Any], Any]] = {
    "windows": lambda mine, df: aggregate(mine, df, [slide(), "key"], WINDOW, "append"),
    "first of key": lambda mine, df: deduplicate(mine, df, "key"),
    "first of key and time": lambda mine, df: deduplicate(mine, df, [F.col("key"), "at"]),
    "first within watermark": lambda mine, df: deduplicate(mine, df, ["key"], within_watermark=True),
    "sessions": lambda mine, df: sessionize(mine, df, ["key"], "at", GAP_MS, FIRST_AND_LAST),
}
SPARKS: dict[str, Plan] = {
    "windows": windows_of_spark,
    "first of key": lambda df: df.dropDuplicates(["key"]),
    "first of key and time": lambda df: df.dropDuplicates(["key", "at"]),
    "first within watermark": lambda df: df.dropDuplicatesWithinWatermark(["key"]),
    "sessions": lambda df: df.groupBy("key", F.session_window("at", f"{GAP_MS} milliseconds")).agg(
        F.count("*").alias("n"),
        F.sum("value").alias("total"),
        F.var_samp("value").alias("spread"),
        F.first("value").alias("first"),
        F.last("value").alias("last"),
        F.last("value", ignorenulls=True).alias("known"),
    ),
}


def told(frame: Any, what: str) -> Any:
    """The rows as text, with what they are."""
    names = [F.round(name, 6).alias(name) if name == "spread" else F.col(name) for name in frame.columns]
    text = F.to_json(F.struct(*names), {"timestampFormat": "yyyy-MM-dd HH:mm:ss.SSSSSS"})
    return frame.select(F.lit(what).alias("what"), text.alias("row"))


def one(what: str, df: Any, folder: Path, ours: bool) -> Any:
    timed = df.withWatermark("at", "15 seconds")
    return told(OURS[what](state(folder), timed) if ours else SPARKS[what](timed), what)


@CLASSIC
def test_operators_that_give_rows_once(session: Any, tmp_path: Path) -> None:
    """Late rows, several open sessions of a key, a restart, and times of the years 1 and 9999; in every batch the rows
    of Spark's operators."""
    batches = random_events(1, 6)
    far = events(("far", FAR_S, 1), ("far", FAR_S + 1, 2), ("a", OLD_S, 3), ("old", OLD_S, 4))

    def work(what: str, ours: bool) -> Found:
        folder = tmp_path / f"{what} {ours}"
        folder.mkdir()
        plan = functools.partial(one, what, folder=folder, ours=ours)
        # Sessions close late.
        fed = batches if SOAK or what == "sessions" else batches[:4]
        # After it every row is late.
        fed = [*fed[:-2], pa.concat_tables([fed[-2], far]), fed[-1]]
        return run(session, folder, fed, plan, "append", restart_after=3)

    # A batch waits more than it works. Half of them would be without rows.
    with (
        configured(session, {"spark.sql.streaming.noDataMicroBatches.enabled": "false"}),
        ThreadPoolExecutor(4) as pool,
    ):
        found = {(what, ours): pool.submit(work, what, ours) for what in OURS for ours in (True, False)}
    for what in OURS:
        assert found[what, True].result() == found[what, False].result(), what
        assert sum(len(rows) for rows in found[what, True].result().values()) > 5, what


@pytest.mark.soak
@CLASSIC
def test_windows_in_update_mode(session: Any, tmp_path: Path) -> None:
    def mine(df: Any, folder: Path) -> Any:
        return aggregate(state(folder), df.withWatermark("at", "7 seconds"), [slide(), "key"], WINDOW)

    def own(df: Any) -> Any:
        return windows_of_spark(df.withWatermark("at", "7 seconds"))

    found = assert_as_spark(session, tmp_path, random_events(2, 5), mine, own, "update", restart_after=3)
    assert sum(len(rows) for rows in found.values()) > 30


@pytest.mark.connect
def test_through_connect(connect: Any, tmp_path: Path) -> None:
    """Plans are made with public calls only."""
    df = read(connect, write_batches(tmp_path / "in", random_events(3, 2)), ddl(EVENTS))
    for what in OURS:
        assert one(what, df, tmp_path, True).columns == ["what", "row"]
    writer = one("first of key", df, tmp_path, True).writeStream.format("parquet").option("path", str(tmp_path / "out"))
    finish(writer.option("checkpointLocation", str(tmp_path / "c")).trigger(availableNow=True).start())
    assert connect.read.parquet(str(tmp_path / "out")).count() >= 6


@CLASSIC
def test_duplicates_in_all_columns(session: Any, tmp_path: Path) -> None:
    found = run(
        session,
        tmp_path,
        [events(("a", 1, 1), ("a", 1, 1), ("a", 1, 2)), events(("a", 1, 2), ("a", 2, 2), (None, None, None))],
        lambda df: deduplicate(state(tmp_path, ttl=Ttl(86_400_000)), df).selectExpr("key", "value"),
        "append",
    )
    assert found == {0: [("a", 1), ("a", 2)], 1: [("a", 2), (None, None)]}


# -- top k ---------------------------------------------------------------------------------------------------


@CLASSIC
@pytest.mark.parametrize("emit", whole(["changed"], ["all"]))
def test_top_rows(session: Any, emit: str, tmp_path: Path) -> None:
    """Written by key and rank, they are ROW_NUMBER over all input."""
    batches = random_events(6, 4)
    found = run(
        session,
        tmp_path,
        batches,
        lambda df: top_k(
            state(tmp_path),
            df,
            ["key"],
            ["value", F.col("at").cast("long")],
            3,
            descending=[True, False],
            emit=emit,  # type: ignore[arg-type]
        ),
        "update",
        restart_after=2,
    )
    table = {(row[0], row[3]): row for batch in sorted(found) for row in found[batch]}
    everything = session.read.parquet(str(tmp_path / "in")).createOrReplaceTempView("events") or session.table("events")
    ranked = everything.selectExpr(
        "*",
        "row_number() OVER (PARTITION BY key ORDER BY value DESC, CAST(at AS LONG), monotonically_increasing_id()) AS rank",
    ).where("rank <= 3")
    wanted = {(row[0], row[2], row[3]) for row in (comparable(row) for row in ranked.collect())}
    assert {(row[0], row[2], row[3]) for row in table.values()} == wanted
    if emit == "changed":
        assert sum(len(rows) for rows in found.values()) < 6 * len(table) / 2


def test_a_key_may_be_asked_for_in_another_case(session: Any, tmp_path: Path) -> None:
    """As Spark takes names; the column is there once, under its own."""
    df = session.readStream.schema(ddl(EVENTS)).parquet(str(tmp_path))
    for key in ("KEY", "`Key`", F.col("Key")):
        assert top_k(state(tmp_path), df, key, "VALUE", 1).columns == ["key", "at", "value", "rank"]


@pytest.mark.soak
@CLASSIC
def test_top_rows_by_names_in_another_case(session: Any, tmp_path: Path) -> None:
    batches = [events(("a", 1, 1), ("a", 2, 3), ("b", 5, 1)), events(("a", 3, 9))]
    found = run(
        session,
        tmp_path,
        batches,
        lambda df: top_k(state(tmp_path), df, "KEY", "VALUE", 1).select("key", "value"),
        "update",
    )
    assert found == {0: [("a", 3), ("b", 1)], 1: [("a", 9)]}


@CLASSIC
def test_top_rows_of_windows(session: Any, tmp_path: Path) -> None:
    """The window has the watermark that the input's column has too."""

    def plan(df: Any) -> Any:
        keys: list[Any] = [F.window("at", "10 seconds"), "key", F.col("at").cast("date").alias("day")]
        return top_k(
            state(tmp_path, ttl=Ttl(10_000, clock="event")), df.withWatermark("at", "0 seconds"), keys, "value", 1
        )

    made = plan(session.readStream.schema(ddl(EVENTS)).parquet(str(tmp_path)))
    assert made.columns == ["key", "at", "value", "window", "day", "rank"]
    assert made.schema["window"].metadata in ({}, {"spark.timeWindow": True})
    assert not made.schema["day"].metadata
    batches = [
        events(("a", 1, 1), ("a", 2, 3), ("a", 11, 2), ("b", 5, 1)),
        events(("a", 3, 2), ("a", 4, 9), ("b", 5, 1), ("c", 50, 1)),
        events(("a", 3, 1), ("b", 51, 1)),
    ]
    found = run(
        session,
        tmp_path,
        batches,
        lambda df: plan(df).selectExpr("key", "unix_seconds(window.start)", "value"),
        "update",
    )
    # In the third batch the watermark is 50 s, and what was there before is no more.
    assert found == {
        0: [("a", 0, 3), ("a", 10, 2), ("b", 0, 1)],
        1: [("a", 0, 9), ("c", 50, 1)],
        2: [("a", 0, 1), ("b", 50, 1)],
    }


# -- started again with other parameters --------------------------------------------------------------------


@CLASSIC
def test_operators_keep_the_functions_of_their_state(session: Any, tmp_path: Path) -> None:
    batches = [events(("a", 1, 1), ("b", 1, 1)), events(("a", 2, 2))]
    first: dict[str, Plan] = {
        "sum": lambda df: aggregate(state(tmp_path / "sum"), df, "key", {"total": Agg.sum("value")}),
        "sketch": lambda df: aggregate(
            state(tmp_path / "sketch"), df, "key", {"about": Agg.approx_count_distinct("value", lg_k=14)}
        ),
        "kind": lambda df: aggregate(
            state(tmp_path / "kind"), df, "key", {"about": Agg.approx_count_distinct(F.col("value").cast("int"))}
        ),
        "top": lambda df: top_k(state(tmp_path / "top"), df, "key", "value", 1),
    }
    then: dict[str, tuple[Plan, str]] = {
        "sum": (
            lambda df: aggregate(state(tmp_path / "sum"), df, "key", {"n": Agg.count(), "total": Agg.max("value")}),
            "of aggregate, 'total' was sum and is now max",
        ),
        "sketch": (
            lambda df: aggregate(
                state(tmp_path / "sketch"), df, "key", {"about": Agg.approx_count_distinct("value", lg_k=12)}
            ),
            "'about' was approx_count_distinct of integers with lg_k 14 and is now approx_count_distinct of integers with lg_k 12",
        ),
        "kind": (
            lambda df: aggregate(
                state(tmp_path / "kind"), df, "key", {"about": Agg.approx_count_distinct(F.col("value").cast("double"))}
            ),
            "'about' was approx_count_distinct of integers .* and is now approx_count_distinct of floats",
        ),
        "top": (
            lambda df: top_k(state(tmp_path / "top"), df, "key", "value", 2, descending=False),
            "'k' was 1 and is now 2, 'order_by' was value descending and is now value ascending",
        ),
    }
    for name, plan in first.items():
        (tmp_path / name).mkdir()
        run(session, tmp_path / name, batches[:1], plan, "update")
        changed, text = then[name]
        with pytest.raises(Exception, match=text):
            run(session, tmp_path / name, batches[1:], changed, "update")


@CLASSIC
def test_an_order_column_is_the_same_however_it_is_written(session: Any, tmp_path: Path) -> None:
    """`F.col`, backticks and another case name the same column; an expression is none, and its error says so."""
    ways: list[Any] = ["value", F.col("value"), "VALUE", F.col("VALUE"), "`value`", ["value"]]

    def top(df: Any, order: Any) -> Any:
        return top_k(state(tmp_path), df, "key", order, 1).select("value")

    for at, order in enumerate(ways):
        assert run(session, tmp_path, [events(("a", at, at))], functools.partial(top, order=order), "update")[at] == [
            (at,)
        ]
    with pytest.raises(Exception, match=r"'order_by' was value descending and is now an expression descending.*F\.col"):
        run(session, tmp_path, [events(("a", 9, 9))], functools.partial(top, order=F.col("value") + 0), "update")


@CLASSIC
def test_what_is_nested_may_have_nulls_after_a_restart(session: Any, tmp_path: Path) -> None:
    def plan(df: Any, value: Any) -> Any:
        return aggregate(state(tmp_path), df, "key", {"values": Agg.last(F.array(value)), "n": Agg.count()})

    first, then = [events(("a", 1, 1), ("b", 1, None))], [events(("a", 2, None))]
    found = run(session, tmp_path, first, lambda df: plan(df, F.coalesce("value", F.lit(0))), "update")
    assert found[0] == [("a", (1,), 1), ("b", (0,), 1)]
    found = run(session, tmp_path, then, lambda df: plan(df, F.col("value")), "update")
    assert found[1] == [("a", (None,), 2)]


# -- time to live ---------------------------------------------------------------------------------------------


@CLASSIC
def test_groups_live_by_an_event_time_that_is_no_key(session: Any, tmp_path: Path) -> None:
    """The watermark is 20 s in the third batch, and the group of 'a' is from 1 s; nothing is late."""
    found = run(
        session,
        tmp_path,
        [events(("a", 1, 1), ("b", 9, 1)), events(("b", 20, 1)), events(("a", 1, 1), ("b", 5, 1))],
        lambda df: aggregate(
            state(tmp_path, ttl=Ttl(10_000, clock="event")),
            df.withWatermark("at", "0 seconds"),
            "key",
            {"n": Agg.count()},
        ),
        "update",
    )
    assert found == {0: [("a", 1), ("b", 1)], 1: [("b", 2)], 2: [("a", 1), ("b", 3)]}


# -- plans ---------------------------------------------------------------------------------------------------


@CLASSIC
def test_what_cannot_work_is_refused(session: Any, tmp_path: Path) -> None:
    mine = state(tmp_path)
    df = session.readStream.schema(ddl(VALUES)).parquet(str(tmp_path))
    still = session.createDataFrame([], ddl(VALUES))
    timed = df.withWatermark("at", "5 seconds")
    n = {"n": Agg.count()}
    listed: Any = [Agg.count()]
    numbered: Any = {1: Agg.count()}
    refused: list[tuple[type[StateError], str, Callable[[], Any]]] = [
        (UnsupportedPlanError, "batch DataFrame", lambda: aggregate(mine, still, "key", n)),
        (UnsupportedPlanError, "no key has a watermark", lambda: aggregate(mine, timed, "key", n, "append")),
        (UsageError, "'update' or 'append'", lambda: aggregate(mine, df, "key", n, "complete")),  # type: ignore[arg-type]
        (UsageError, "takes an ArrowState", lambda: aggregate(df, mine, "key", n)),  # type: ignore[arg-type]
        (UsageError, "mapping of output columns", lambda: aggregate(mine, df, "key", {"n": F.count("*")})),  # type: ignore[dict-item]
        (UsageError, "aggregates of aggregate must be a mapping", lambda: aggregate(mine, df, "key", listed)),
        (UsageError, "aggregates of aggregate must be a mapping", lambda: aggregate(mine, df, "key", listed[0])),
        (UsageError, "aggregates of aggregate must be a mapping", lambda: aggregate(mine, df, "key", numbered)),
        (
            UsageError,
            "aggregates of sessionize must be a mapping",
            lambda: sessionize(mine, timed, "key", "at", 1, listed),
        ),
        (UsageError, "'key' is there more than once", lambda: aggregate(mine, df, "key", {"key": Agg.count()})),
        (UnsupportedTypeError, "sum of string", lambda: aggregate(mine, df, "key", {"x": Agg.sum("text")})),
        (
            UnsupportedTypeError,
            "cannot be compared",
            lambda: aggregate(mine, df, "key", {"x": Agg.min(F.array("text"))}),
        ),
        (UsageError, "7 to 21", lambda: Agg.approx_count_distinct("text", 3)),
        (UnsupportedPlanError, "needs a watermark", lambda: deduplicate(mine, df, "key", within_watermark=True)),
        (UnsupportedPlanError, "is not a timestamp with a watermark", lambda: sessionize(mine, df, "key", "at", 1, n)),
        (UsageError, "gap_ms", lambda: sessionize(mine, timed, "key", "at", 0, n)),
        (UsageError, "gap_ms", lambda: sessionize(mine, timed, "key", "at", 2**45 + 1, n)),
        (UsageError, "then a DataFrame, not 'x'", lambda: aggregate(mine, "x", "key", n)),  # type: ignore[arg-type]
        (UsageError, "list each column separately", lambda: deduplicate(mine, df, "*")),
        (
            UsageError,
            "order_by of top_k must be column names or expressions, not None",
            lambda: top_k(mine, df, "key", None, 1),  # type: ignore[arg-type]
        ),
        (UsageError, "rank of top_k", lambda: top_k(mine, df, "key", "whole", 1, rank=1)),  # type: ignore[arg-type]
        (UsageError, "descending of top_k", lambda: top_k(mine, df, "key", "whole", 1, descending=None)),  # type: ignore[arg-type]
        (UsageError, "k of top_k", lambda: top_k(mine, df, "key", "whole", 0)),
        (UsageError, "emit of top_k", lambda: top_k(mine, df, "key", "whole", 1, emit="some")),  # type: ignore[arg-type]
        (UsageError, "'day' is there more than once", lambda: top_k(mine, df, "key", "whole", 1, rank="day")),
        (UsageError, "descending has 2 values", lambda: top_k(mine, df, "key", "whole", 1, descending=[True, False])),
        (
            UsageError,
            "the aggregate 'x' must have a column name or an expression, not 1",
            lambda: aggregate(mine, df, "key", {"x": Agg.count(1)}),  # type: ignore[arg-type]
        ),
        (UsageError, "keys of top_k must have different names", lambda: top_k(mine, df, ["key", "key"], "whole", 1)),
        (
            UsageError,
            "its own among them, must have different names, and '__order0'",
            lambda: top_k(mine, df.withColumn("__order0", F.lit(1)), "key", F.col("whole") + 1, 1),
        ),
        (
            UsageError,
            "its own among them, must have different names, and '__buffer0'",
            lambda: aggregate(mine, df.withColumn("__buffer0", F.lit(1)), "__buffer0", n),
        ),
        (UsageError, "by alias", lambda: top_k(mine, df, F.lower("key").alias("key"), "whole", 1)),
        (UnsupportedTypeError, "cannot be compared", lambda: top_k(mine, df, "key", F.array("whole"), 1)),
    ]
    if SPARK >= (4, 0):
        collated = df.selectExpr("key", "collate(text, 'UTF8_LCASE') AS text")
        refused += [
            (
                UnsupportedTypeError,
                "cannot be compared",
                lambda: aggregate(mine, collated, "key", {"x": Agg.max("text")}),
            )
        ]
    for error, text, plan in refused:
        with pytest.raises(error, match=text):
            plan()


def test_columns_with_an_order_of_their_own_are_refused(session: Any, tmp_path: Path) -> None:
    """Spark says that it has an internal error, and only when it runs."""
    mine = state(tmp_path)
    odd = "x DESC NULLS LAST"
    df = session.readStream.schema(ddl(EVENTS)).parquet(str(tmp_path)).withColumn(odd, F.col("value"))
    for order in (
        F.col("value").desc(),
        F.asc("value"),
        F.col("value").desc_nulls_first().alias("v"),
        F.asc_nulls_last("value") + 1,
    ):
        with pytest.raises(UsageError, match=r"its own sort order: .*descending=True or False"):
            top_k(mine, df, "key", ["at", order], 1)
    assert top_k(mine, df, "key", [odd, F.col(odd), F.col("value") + 1], 1).isStreaming


def test_session_windows_are_no_keys(session: Any, tmp_path: Path) -> None:
    """As keys their sessions would never be merged."""
    mine = state(tmp_path)
    timed = session.readStream.schema(ddl(EVENTS)).parquet(str(tmp_path)).withWatermark("at", "5 seconds")
    own = F.session_window("at", "10 seconds")
    n = {"n": Agg.count()}
    nothing: Any = print
    plans: list[Callable[[], Any]] = [
        lambda: aggregate(mine, timed, ["key", own], n),
        lambda: aggregate(mine, timed, [own, "at"], n, "append"),
        lambda: deduplicate(mine, timed, ["key", own]),
        lambda: sessionize(mine, timed, ["key", own.alias("s")], "at", GAP_MS, n),
        lambda: top_k(mine, timed, ["key", F.expr("session_window(at, '10 seconds')")], "value", 1),
        lambda: mine.apply_in_arrow_with_state(timed, own, nothing, "n long", "n long"),
        lambda: mine.apply_rows_with_state(timed, ["key", own.alias("s")], nothing, "n long", "n long"),
        lambda: mine.apply_in_pandas_with_state(
            timed, ["key", own], nothing, "n long", "n long", "update", "NoTimeout"
        ),
    ]
    for plan in plans:
        with pytest.raises(UnsupportedPlanError, match=r"the key '(session_window|s)' is .* Call sessionize"):
            plan()
