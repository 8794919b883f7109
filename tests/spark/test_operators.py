"""Built-in operators give the same rows in every batch as Spark's own operators, for the same input in the same batches."""

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

RowsByBatch = dict[int, list[Any]]
Plan = Callable[[Any], Any]
EVENTS = pa.schema([("key", pa.string()), ("at", pa.timestamp("us", "UTC")), ("value", pa.int64())])
GAP_MS = 10_000


def make_state(folder: Path, **options: Any) -> ArrowState:
    return ArrowState(
        str(folder / "root"), "tested", buckets=3, lease_ms=1_000, local_dir=str(folder / "local"), **options
    )


def events(*rows: tuple[str | None, float | None, int | None]) -> Any:
    """Return a batch of rows with key, event time in seconds, value."""
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
    """Return batches whose times advance by 10 s per batch; some rows are late, some times are NULL."""
    generator = np.random.default_rng(seed)
    tables = []
    for batch in range(batches):
        rows: list[tuple[str | None, float | None, int | None]] = []
        for _ in range(int(generator.integers(8, 25))):
            key = None if generator.random() < 0.05 else "abcdef"[generator.integers(6)]
            at = None if generator.random() < 0.05 else max(0.0, 10.0 * batch + int(generator.integers(-30, 12)))
            value = None if generator.random() < 0.1 else int(generator.integers(100))
            rows.append((key, at, value))
        tables.append(events(*rows))
    return tables


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
) -> RowsByBatch:
    """Run a query and return the rows of each batch that has rows."""
    rows_by_batch: RowsByBatch = {}

    def save(frame: Any, batch: int) -> None:
        rows = sorted((comparable(row) for row in frame.collect()), key=repr)
        assert batch not in rows_by_batch
        if rows:
            rows_by_batch[batch] = rows

    for part in (batches[:restart_after], batches[restart_after:] if restart_after is not None else []):
        if not part:
            continue
        source = write_batches(folder / "in", part)
        finish(
            plan(read(session, source, ddl(batches[0].schema)))
            .writeStream.foreachBatch(save)
            .outputMode(mode)
            .option("checkpointLocation", str(folder / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
    return rows_by_batch


def assert_equal_to_spark(
    session: Any,
    folder: Path,
    batches: Sequence[Any],
    ours: Callable[[Any, Path], Any],
    sparks: Callable[[Any], Any],
    mode: str,
    restart_after: int | None = None,
) -> RowsByBatch:
    """Assert that both plans give the same rows in the same batches, and return the rows."""
    outputs = []
    plans: dict[str, Plan] = {"ours": lambda df: ours(df, folder / "ours"), "sparks": sparks}
    for name, plan in plans.items():
        plan_folder = folder / name
        plan_folder.mkdir()
        outputs.append(run(session, plan_folder, batches, plan, mode, restart_after=restart_after))
    assert outputs[0].keys() == outputs[1].keys()
    for batch, rows in outputs[0].items():
        for our_row, spark_row in zip(rows, outputs[1][batch], strict=True):
            assert our_row == spark_row, f"batch {batch}"
    return outputs[0]


# -- before the shuffle --------------------------------------------------------------------------------------


def shuffled_rows(folder: Path) -> int:
    """Return the number of rows that buckets have received so far."""
    return sum(read_metrics(folder).column("rows").to_pylist())


def has_shuffled(folder: Path, rows: int) -> bool:
    return shuffled_rows(folder) >= rows


@CLASSIC
def test_repeated_keys_are_combined_before_the_shuffle(session: Any, tmp_path: Path) -> None:
    repeated = [events(*(("abcde"[i % 5], i / 100, (7 * i + batch) % 100) for i in range(1_000))) for batch in range(2)]
    single = [events(*((f"{batch} {i}", i / 100, i) for i in range(300))) for batch in range(2)]
    aggregates = {"n": Agg.count(), "total": Agg.sum("value"), "mean": Agg.mean("value"), "last": Agg.max("at")}
    spark_aggregates = [F.count("*"), F.sum("value"), F.avg("value"), F.max("at")]
    for name, batches, least, most in (("repeated", repeated, 10, 40), ("single", single, 600, 600)):
        folder = tmp_path / name
        folder.mkdir()
        assert_equal_to_spark(
            session,
            folder,
            batches,
            lambda df, own: aggregate(make_state(own), df, "key", aggregates),
            lambda df: df.groupBy("key").agg(*spark_aggregates),
            "update",
        )
        eventually(functools.partial(has_shuffled, folder / "ours" / "local", least))
        assert shuffled_rows(folder / "ours" / "local") <= most
    rows_by_batch = run(
        session,
        tmp_path,
        repeated,
        lambda df: top_k(make_state(tmp_path), df, "key", ["value", "at"], 2).select("key", "value", "rank"),
        "update",
    )
    for batch, rows in rows_by_batch.items():
        rows_so_far = pa.concat_tables(repeated[: batch + 1]).to_pylist()
        expected = [
            (key, value, rank)
            for key in "abcde"
            for rank, value in enumerate(
                sorted((r["value"] for r in rows_so_far if r["key"] == key), reverse=True)[:2], 1
            )
        ]
        assert set(rows) <= set(expected)
        assert batch > 0 or rows == expected
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
    generator = np.random.default_rng(seed)
    reals = [0.25, -0.0, 0.0, math.nan, math.inf, 1e9 + 0.5, 1e9 + 0.75, -3.5]

    def value(name: str) -> Any:
        if generator.random() < 0.2:
            return None
        number = int(generator.integers(-100, 100))
        return {
            "key": "abcdefgh"[generator.integers(8)],
            "small": number,
            "whole": number * 10**9,
            "real": reals[generator.integers(len(reals))] if number > 50 else number / 4,
            "single": number / 8 if number < 90 else math.nan,
            "price": decimal.Decimal(number) / 100,
            "wide": decimal.Decimal(number * 10**20) / 3**3,
            "text": ["", "a", "aa", "b", "ä", "𐍈", "￿"][generator.integers(7)],
            "bytes": bytes([abs(number), 0]),
            "day": dt.date(2020, 1, 1) + dt.timedelta(days=number),
            "at": dt.datetime(2020, 1, 1, tzinfo=dt.timezone.utc) + dt.timedelta(microseconds=number),
            "flag": number > 0,
        }[name]

    table_rows = [{name: value(name) for name in VALUES.names} for _ in range(rows)]
    for row in table_rows:
        row["wide"] = None if row["wide"] is None else row["wide"].quantize(decimal.Decimal("0.000001"))
    return pa.Table.from_pylist(table_rows, schema=VALUES)


@CLASSIC
def test_every_aggregate_of_every_type_equals_sparks(session: Any, tmp_path: Path) -> None:
    names = VALUES.names[1:]
    ours = {"rows": Agg.count()}
    sparks = [F.count("*").alias("rows")]
    for name in names:
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

    def plan_ours(df: Any, folder: Path) -> Any:
        schemas.append(aggregate(make_state(folder), df, ["key"], ours))
        return schemas[-1]

    def plan_sparks(df: Any) -> Any:
        schemas.append(df.groupBy("key").agg(*sparks))
        return schemas[-1]

    rows_by_batch = assert_equal_to_spark(
        session, tmp_path, [values(i, 40) for i in range(3)], plan_ours, plan_sparks, "update", restart_after=2
    )
    assert [(f.name, f.dataType) for f in schemas[0].schema] == [(f.name, f.dataType) for f in schemas[-1].schema]
    assert len(rows_by_batch) == 3


@CLASSIC
def test_a_sum_outside_a_long_fails(session: Any, tmp_path: Path) -> None:
    batches = [events(("a", 1, 2**62), ("b", 1, 1)), events(("a", 1, 2**62))]
    with pytest.raises(Exception, match=r"'total' of the key \{'key': 'a'\} exceeds the range of int64"):
        run(
            session,
            tmp_path,
            batches,
            lambda df: aggregate(make_state(tmp_path), df, "key", {"total": Agg.sum("value")}),
            "update",
        )


# -- rows that are emitted once --------------------------------------------------------------------------------

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


def sliding_window() -> Any:
    return F.window("at", "20 seconds", "10 seconds")


def spark_windows(df: Any) -> Any:
    return df.groupBy(sliding_window(), "key").agg(
        F.count("*").alias("n"), F.sum("value").alias("total"), F.max("at").alias("latest")
    )


OURS: dict[str, Callable[[ArrowState, Any], Any]] = {
    "windows": lambda state, df: aggregate(state, df, [sliding_window(), "key"], WINDOW, "append"),
    "first of key": lambda state, df: deduplicate(state, df, "key"),
    "first of key and time": lambda state, df: deduplicate(state, df, [F.col("key"), "at"]),
    "first within watermark": lambda state, df: deduplicate(state, df, ["key"], within_watermark=True),
    "sessions": lambda state, df: sessionize(state, df, ["key"], "at", GAP_MS, FIRST_AND_LAST),
}
SPARKS: dict[str, Plan] = {
    "windows": spark_windows,
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


def as_text(frame: Any, what: str) -> Any:
    """Return the rows as JSON text, with a column that names the operator."""
    names = [F.round(name, 6).alias(name) if name == "spread" else F.col(name) for name in frame.columns]
    text = F.to_json(F.struct(*names), {"timestampFormat": "yyyy-MM-dd HH:mm:ss.SSSSSS"})
    return frame.select(F.lit(what).alias("what"), text.alias("row"))


def make_plan(what: str, df: Any, folder: Path, ours: bool) -> Any:
    timed = df.withWatermark("at", "15 seconds")
    return as_text(OURS[what](make_state(folder), timed) if ours else SPARKS[what](timed), what)


@CLASSIC
def test_windows_deduplication_and_sessions_emit_the_rows_of_spark(session: Any, tmp_path: Path) -> None:
    """Input has late rows, several open sessions of a key, a restart, and times of the years 1 and 9999."""
    batches = random_events(1, 6)
    far = events(("far", FAR_S, 1), ("far", FAR_S + 1, 2), ("a", OLD_S, 3), ("old", OLD_S, 4))

    def run_query(what: str, ours: bool) -> RowsByBatch:
        folder = tmp_path / f"{what} {ours}"
        folder.mkdir()
        plan = functools.partial(make_plan, what, folder=folder, ours=ours)
        # Sessions close late, so they need all batches.
        fed_batches = batches if SOAK or what == "sessions" else batches[:4]
        # After the times of the year 9999, every row is late.
        fed_batches = [*fed_batches[:-2], pa.concat_tables([fed_batches[-2], far]), fed_batches[-1]]
        return run(session, folder, fed_batches, plan, "append", restart_after=3)

    # Batches mostly wait, so queries run in parallel. Batches without data would double their number.
    with (
        configured(session, {"spark.sql.streaming.noDataMicroBatches.enabled": "false"}),
        ThreadPoolExecutor(4) as pool,
    ):
        results = {(what, ours): pool.submit(run_query, what, ours) for what in OURS for ours in (True, False)}
    for what in OURS:
        assert results[what, True].result() == results[what, False].result(), what
        assert sum(len(rows) for rows in results[what, True].result().values()) > 5, what


@pytest.mark.soak
@CLASSIC
def test_windows_in_update_mode_equal_sparks(session: Any, tmp_path: Path) -> None:
    def plan_ours(df: Any, folder: Path) -> Any:
        return aggregate(make_state(folder), df.withWatermark("at", "7 seconds"), [sliding_window(), "key"], WINDOW)

    def plan_sparks(df: Any) -> Any:
        return spark_windows(df.withWatermark("at", "7 seconds"))

    rows_by_batch = assert_equal_to_spark(
        session, tmp_path, random_events(2, 5), plan_ours, plan_sparks, "update", restart_after=3
    )
    assert sum(len(rows) for rows in rows_by_batch.values()) > 30


@pytest.mark.connect
def test_operators_can_be_planned_and_run_on_connect(connect: Any, tmp_path: Path) -> None:
    """Plans use only public calls, so Connect can make them; one of them runs."""
    df = read(connect, write_batches(tmp_path / "in", random_events(3, 2)), ddl(EVENTS))
    for what in OURS:
        assert make_plan(what, df, tmp_path, True).columns == ["what", "row"]
    writer = (
        make_plan("first of key", df, tmp_path, True)
        .writeStream.format("parquet")
        .option("path", str(tmp_path / "out"))
    )
    finish(writer.option("checkpointLocation", str(tmp_path / "c")).trigger(availableNow=True).start())
    assert connect.read.parquet(str(tmp_path / "out")).count() >= 6


@CLASSIC
def test_deduplicate_without_keys_compares_all_columns(session: Any, tmp_path: Path) -> None:
    rows_by_batch = run(
        session,
        tmp_path,
        [events(("a", 1, 1), ("a", 1, 1), ("a", 1, 2)), events(("a", 1, 2), ("a", 2, 2), (None, None, None))],
        lambda df: deduplicate(make_state(tmp_path, ttl=Ttl(86_400_000)), df).selectExpr("key", "value"),
        "append",
    )
    assert rows_by_batch == {0: [("a", 1), ("a", 2)], 1: [("a", 2), (None, None)]}


# -- top k ---------------------------------------------------------------------------------------------------


@pytest.mark.soak
@CLASSIC
@pytest.mark.parametrize("emit", whole(["changed"], ["all"]))
def test_top_k_upserted_by_key_and_rank_equals_row_number(session: Any, emit: str, tmp_path: Path) -> None:
    """The expected rows are those of ROW_NUMBER over all input."""
    batches = random_events(6, 4)
    rows_by_batch = run(
        session,
        tmp_path,
        batches,
        lambda df: top_k(
            make_state(tmp_path),
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
    table = {(row[0], row[3]): row for batch in sorted(rows_by_batch) for row in rows_by_batch[batch]}
    everything = session.read.parquet(str(tmp_path / "in")).createOrReplaceTempView("events") or session.table("events")
    ranked = everything.selectExpr(
        "*",
        "row_number() OVER (PARTITION BY key ORDER BY value DESC, CAST(at AS LONG), monotonically_increasing_id()) AS rank",
    ).where("rank <= 3")
    expected = {(row[0], row[2], row[3]) for row in (comparable(row) for row in ranked.collect())}
    assert {(row[0], row[2], row[3]) for row in table.values()} == expected
    if emit == "changed":
        assert sum(len(rows) for rows in rows_by_batch.values()) < 6 * len(table) / 2


def test_top_k_accepts_a_key_in_another_case(session: Any, tmp_path: Path) -> None:
    """Spark does the same. The output has the column once, with its own name."""
    df = session.readStream.schema(ddl(EVENTS)).parquet(str(tmp_path))
    for key in ("KEY", "`Key`", F.col("Key")):
        assert top_k(make_state(tmp_path), df, key, "VALUE", 1).columns == ["key", "at", "value", "rank"]


@pytest.mark.soak
@CLASSIC
def test_top_k_gives_the_same_rows_for_names_in_another_case(session: Any, tmp_path: Path) -> None:
    batches = [events(("a", 1, 1), ("a", 2, 3), ("b", 5, 1)), events(("a", 3, 9))]
    rows_by_batch = run(
        session,
        tmp_path,
        batches,
        lambda df: top_k(make_state(tmp_path), df, "KEY", "VALUE", 1).select("key", "value"),
        "update",
    )
    assert rows_by_batch == {0: [("a", 3), ("b", 1)], 1: [("a", 9)]}


@CLASSIC
def test_top_k_of_windows_uses_the_watermark_of_the_input(session: Any, tmp_path: Path) -> None:
    """The window column has the same watermark as the input's time column."""

    def plan(df: Any) -> Any:
        keys: list[Any] = [F.window("at", "10 seconds"), "key", F.col("at").cast("date").alias("day")]
        return top_k(
            make_state(tmp_path, ttl=Ttl(10_000, clock="event")), df.withWatermark("at", "0 seconds"), keys, "value", 1
        )

    planned = plan(session.readStream.schema(ddl(EVENTS)).parquet(str(tmp_path)))
    assert planned.columns == ["key", "at", "value", "window", "day", "rank"]
    assert planned.schema["window"].metadata in ({}, {"spark.timeWindow": True})
    assert not planned.schema["day"].metadata
    batches = [
        events(("a", 1, 1), ("a", 2, 3), ("a", 11, 2), ("b", 5, 1)),
        events(("a", 3, 2), ("a", 4, 9), ("b", 5, 1), ("c", 50, 1)),
        events(("a", 3, 1), ("b", 51, 1)),
    ]
    rows_by_batch = run(
        session,
        tmp_path,
        batches,
        lambda df: plan(df).selectExpr("key", "unix_seconds(window.start)", "value"),
        "update",
    )
    # In the third batch the watermark is 50 s, so the earlier state has expired.
    assert rows_by_batch == {
        0: [("a", 0, 3), ("a", 10, 2), ("b", 0, 1)],
        1: [("a", 0, 9), ("c", 50, 1)],
        2: [("a", 0, 1), ("b", 50, 1)],
    }


# -- restarts with other parameters --------------------------------------------------------------------


@CLASSIC
def test_a_restart_with_another_aggregate_or_order_is_refused(session: Any, tmp_path: Path) -> None:
    batches = [events(("a", 1, 1), ("b", 1, 1)), events(("a", 2, 2))]
    plans: dict[str, Plan] = {
        "sum": lambda df: aggregate(make_state(tmp_path / "sum"), df, "key", {"total": Agg.sum("value")}),
        "sketch": lambda df: aggregate(
            make_state(tmp_path / "sketch"), df, "key", {"about": Agg.approx_count_distinct("value", lg_k=14)}
        ),
        "kind": lambda df: aggregate(
            make_state(tmp_path / "kind"), df, "key", {"about": Agg.approx_count_distinct(F.col("value").cast("int"))}
        ),
        "top": lambda df: top_k(make_state(tmp_path / "top"), df, "key", "value", 1),
    }
    changed_plans: dict[str, tuple[Plan, str]] = {
        "sum": (
            lambda df: aggregate(
                make_state(tmp_path / "sum"), df, "key", {"n": Agg.count(), "total": Agg.max("value")}
            ),
            "of aggregate, 'total' was sum and is now max",
        ),
        "sketch": (
            lambda df: aggregate(
                make_state(tmp_path / "sketch"), df, "key", {"about": Agg.approx_count_distinct("value", lg_k=12)}
            ),
            "'about' was approx_count_distinct of integers with lg_k 14 and is now approx_count_distinct of integers with lg_k 12",
        ),
        "kind": (
            lambda df: aggregate(
                make_state(tmp_path / "kind"),
                df,
                "key",
                {"about": Agg.approx_count_distinct(F.col("value").cast("double"))},
            ),
            "'about' was approx_count_distinct of integers .* and is now approx_count_distinct of floats",
        ),
        "top": (
            lambda df: top_k(make_state(tmp_path / "top"), df, "key", "value", 2, descending=False),
            "'k' was 1 and is now 2, 'order_by' was value descending and is now value ascending",
        ),
    }
    for name, plan in plans.items():
        (tmp_path / name).mkdir()
        run(session, tmp_path / name, batches[:1], plan, "update")
        changed, text = changed_plans[name]
        with pytest.raises(Exception, match=text):
            run(session, tmp_path / name, batches[1:], changed, "update")


@CLASSIC
def test_a_restart_may_write_the_name_of_the_order_column_in_another_way(session: Any, tmp_path: Path) -> None:
    """`F.col`, backticks and another case name the same column; an expression is another order, and is refused."""
    orders: list[Any] = ["value", F.col("value"), "VALUE", F.col("VALUE"), "`value`", ["value"]]

    def top(df: Any, order: Any) -> Any:
        return top_k(make_state(tmp_path), df, "key", order, 1).select("value")

    for at, order in enumerate(orders):
        assert run(session, tmp_path, [events(("a", at, at))], functools.partial(top, order=order), "update")[at] == [
            (at,)
        ]
    with pytest.raises(Exception, match=r"'order_by' was value descending and is now an expression descending.*F\.col"):
        run(session, tmp_path, [events(("a", 9, 9))], functools.partial(top, order=F.col("value") + 0), "update")


@CLASSIC
def test_after_a_restart_nested_values_may_be_null(session: Any, tmp_path: Path) -> None:
    def plan(df: Any, value: Any) -> Any:
        return aggregate(make_state(tmp_path), df, "key", {"values": Agg.last(F.array(value)), "n": Agg.count()})

    batches_of_first, batches_of_second = [events(("a", 1, 1), ("b", 1, None))], [events(("a", 2, None))]
    rows_by_batch = run(
        session, tmp_path, batches_of_first, lambda df: plan(df, F.coalesce("value", F.lit(0))), "update"
    )
    assert rows_by_batch[0] == [("a", (1,), 1), ("b", (0,), 1)]
    rows_by_batch = run(session, tmp_path, batches_of_second, lambda df: plan(df, F.col("value")), "update")
    assert rows_by_batch[1] == [("a", (None,), 2)]


# -- time to live ---------------------------------------------------------------------------------------------


@CLASSIC
def test_groups_expire_by_an_event_time_column_that_is_not_a_key(session: Any, tmp_path: Path) -> None:
    """The watermark is 20 s in the third batch, and the group of 'a' is from 1 s; no row is late."""
    rows_by_batch = run(
        session,
        tmp_path,
        [events(("a", 1, 1), ("b", 9, 1)), events(("b", 20, 1)), events(("a", 1, 1), ("b", 5, 1))],
        lambda df: aggregate(
            make_state(tmp_path, ttl=Ttl(10_000, clock="event")),
            df.withWatermark("at", "0 seconds"),
            "key",
            {"n": Agg.count()},
        ),
        "update",
    )
    assert rows_by_batch == {0: [("a", 1), ("b", 1)], 1: [("b", 2)], 2: [("a", 1), ("b", 3)]}


# -- plans ---------------------------------------------------------------------------------------------------


@CLASSIC
def test_unsupported_plans_and_wrong_arguments_of_operators_are_refused(session: Any, tmp_path: Path) -> None:
    state = make_state(tmp_path)
    df = session.readStream.schema(ddl(VALUES)).parquet(str(tmp_path))
    batch_df = session.createDataFrame([], ddl(VALUES))
    timed = df.withWatermark("at", "5 seconds")
    counts = {"n": Agg.count()}
    list_of_aggregates: Any = [Agg.count()]
    numbered_aggregates: Any = {1: Agg.count()}
    refused: list[tuple[type[StateError], str, Callable[[], Any]]] = [
        (UnsupportedPlanError, "batch DataFrame", lambda: aggregate(state, batch_df, "key", counts)),
        (UnsupportedPlanError, "no key has a watermark", lambda: aggregate(state, timed, "key", counts, "append")),
        (UsageError, "'update' or 'append'", lambda: aggregate(state, df, "key", counts, "complete")),  # type: ignore[arg-type]
        (UsageError, "takes an ArrowState", lambda: aggregate(df, state, "key", counts)),  # type: ignore[arg-type]
        (UsageError, "mapping of output columns", lambda: aggregate(state, df, "key", {"n": F.count("*")})),  # type: ignore[dict-item]
        (
            UsageError,
            "aggregates of aggregate must be a mapping",
            lambda: aggregate(state, df, "key", list_of_aggregates),
        ),
        (
            UsageError,
            "aggregates of aggregate must be a mapping",
            lambda: aggregate(state, df, "key", list_of_aggregates[0]),
        ),
        (
            UsageError,
            "aggregates of aggregate must be a mapping",
            lambda: aggregate(state, df, "key", numbered_aggregates),
        ),
        (
            UsageError,
            "aggregates of sessionize must be a mapping",
            lambda: sessionize(state, timed, "key", "at", 1, list_of_aggregates),
        ),
        (UsageError, "'key' is there more than once", lambda: aggregate(state, df, "key", {"key": Agg.count()})),
        (UnsupportedTypeError, "sum of string", lambda: aggregate(state, df, "key", {"x": Agg.sum("text")})),
        (
            UnsupportedTypeError,
            "cannot be compared",
            lambda: aggregate(state, df, "key", {"x": Agg.min(F.array("text"))}),
        ),
        (UsageError, "7 to 21", lambda: Agg.approx_count_distinct("text", 3)),
        (UnsupportedPlanError, "needs a watermark", lambda: deduplicate(state, df, "key", within_watermark=True)),
        (
            UnsupportedPlanError,
            "is not a timestamp with a watermark",
            lambda: sessionize(state, df, "key", "at", 1, counts),
        ),
        (UsageError, "gap_ms", lambda: sessionize(state, timed, "key", "at", 0, counts)),
        (UsageError, "gap_ms", lambda: sessionize(state, timed, "key", "at", 2**45 + 1, counts)),
        (UsageError, "then a DataFrame, not 'x'", lambda: aggregate(state, "x", "key", counts)),  # type: ignore[arg-type]
        (UsageError, "list each column separately", lambda: deduplicate(state, df, "*")),
        (
            UsageError,
            "order_by of top_k must be column names or expressions, not None",
            lambda: top_k(state, df, "key", None, 1),  # type: ignore[arg-type]
        ),
        (UsageError, "rank of top_k", lambda: top_k(state, df, "key", "whole", 1, rank=1)),  # type: ignore[arg-type]
        (UsageError, "descending of top_k", lambda: top_k(state, df, "key", "whole", 1, descending=None)),  # type: ignore[arg-type]
        (UsageError, "k of top_k", lambda: top_k(state, df, "key", "whole", 0)),
        (UsageError, "emit of top_k", lambda: top_k(state, df, "key", "whole", 1, emit="some")),  # type: ignore[arg-type]
        (UsageError, "'day' is there more than once", lambda: top_k(state, df, "key", "whole", 1, rank="day")),
        (UsageError, "descending has 2 values", lambda: top_k(state, df, "key", "whole", 1, descending=[True, False])),
        (
            UsageError,
            "the aggregate 'x' must have a column name or an expression, not 1",
            lambda: aggregate(state, df, "key", {"x": Agg.count(1)}),  # type: ignore[arg-type]
        ),
        (UsageError, "keys of top_k must have different names", lambda: top_k(state, df, ["key", "key"], "whole", 1)),
        (
            UsageError,
            "its own among them, must have different names, and '__order0'",
            lambda: top_k(state, df.withColumn("__order0", F.lit(1)), "key", F.col("whole") + 1, 1),
        ),
        (
            UsageError,
            "its own among them, must have different names, and '__buffer0'",
            lambda: aggregate(state, df.withColumn("__buffer0", F.lit(1)), "__buffer0", counts),
        ),
        (UsageError, "by alias", lambda: top_k(state, df, F.lower("key").alias("key"), "whole", 1)),
        (UnsupportedTypeError, "cannot be compared", lambda: top_k(state, df, "key", F.array("whole"), 1)),
    ]
    if SPARK >= (4, 0):
        collated = df.selectExpr("key", "collate(text, 'UTF8_LCASE') AS text")
        refused += [
            (
                UnsupportedTypeError,
                "cannot be compared",
                lambda: aggregate(state, collated, "key", {"x": Agg.max("text")}),
            )
        ]
    for error, text, plan in refused:
        with pytest.raises(error, match=text):
            plan()


def test_top_k_refuses_order_columns_with_their_own_sort_order(session: Any, tmp_path: Path) -> None:
    """Spark would fail with an internal error, and only when it runs."""
    state = make_state(tmp_path)
    odd_name = "x DESC NULLS LAST"
    df = session.readStream.schema(ddl(EVENTS)).parquet(str(tmp_path)).withColumn(odd_name, F.col("value"))
    for order in (
        F.col("value").desc(),
        F.asc("value"),
        F.col("value").desc_nulls_first().alias("v"),
        F.asc_nulls_last("value") + 1,
    ):
        with pytest.raises(UsageError, match=r"its own sort order: .*descending=True or False"):
            top_k(state, df, "key", ["at", order], 1)
    assert top_k(state, df, "key", [odd_name, F.col(odd_name), F.col("value") + 1], 1).isStreaming


def test_a_session_window_as_a_key_is_refused(session: Any, tmp_path: Path) -> None:
    """Sessions in keys would never be merged."""
    state = make_state(tmp_path)
    timed = session.readStream.schema(ddl(EVENTS)).parquet(str(tmp_path)).withWatermark("at", "5 seconds")
    session_window = F.session_window("at", "10 seconds")
    counts = {"n": Agg.count()}
    function: Any = print
    plans: list[Callable[[], Any]] = [
        lambda: aggregate(state, timed, ["key", session_window], counts),
        lambda: aggregate(state, timed, [session_window, "at"], counts, "append"),
        lambda: deduplicate(state, timed, ["key", session_window]),
        lambda: sessionize(state, timed, ["key", session_window.alias("s")], "at", GAP_MS, counts),
        lambda: top_k(state, timed, ["key", F.expr("session_window(at, '10 seconds')")], "value", 1),
        lambda: state.apply_in_arrow_with_state(timed, session_window, function, "n long", "n long"),
        lambda: state.apply_rows_with_state(timed, ["key", session_window.alias("s")], function, "n long", "n long"),
        lambda: state.apply_in_pandas_with_state(
            timed, ["key", session_window], function, "n long", "n long", "update", "NoTimeout"
        ),
    ]
    for plan in plans:
        with pytest.raises(UnsupportedPlanError, match=r"the key '(session_window|s)' is .* Call sessionize"):
            plan()
