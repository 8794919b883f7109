"""`aggregate`, `deduplicate`, `sessionize` and `top_k`: operators that equal Spark's, planned on an `ArrowState`.

What they do is in `spark_state_ext.operators`; here Spark's schemas become those of output and state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from pyspark.sql import functions as F
from pyspark.sql.streaming.state import GroupStateTimeout
from pyspark.sql.types import (
    ArrayType,
    IntegerType,
    LongType,
    StructField,
    StructType,
    TimestampType,
)

from spark_state_ext.engine.job import ARROW
from spark_state_ext.errors import UnsupportedPlanError, UsageError
from spark_state_ext.operators.agg import Aggregate
from spark_state_ext.operators.aggregate import Aggregates, Aggregation, PartialAggregation
from spark_state_ext.operators.deduplicate import EXPIRES_US, Deduplication
from spark_state_ext.operators.sessionize import END, SESSION_WINDOW, SESSIONS, START, Sessions
from spark_state_ext.operators.top_k import TOP, TopK
from spark_state_ext.spark.client.columns import WATERMARK_KEY, KeyLike, event_time_of, resolve_keys
from spark_state_ext.spark.client.operator_columns import (
    PLAIN,
    Keys,
    checked_aggregates,
    column_of,
    functions_of,
    identity,
    listed,
    name_of,
    order_text,
    plain,
    quoted,
    refuse_doubles,
    refuse_nested,
    refuse_no_columns,
    refuse_sort_orders,
    result_fields,
    selected,
    state_type_of,
)
from spark_state_ext.spark.client.planner import Request, planned
from spark_state_ext.spark.client.state import ArrowState
from spark_state_ext.spark.shuffle.combine import Combining

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["aggregate", "deduplicate", "sessionize", "top_k"]

# A thousand years: with it no time of today comes near to 64 bits of microseconds.
_GAP_MS_MAX = 2**45
_EVENT_TIME, _NO_TIMEOUT = GroupStateTimeout.EventTimeTimeout, GroupStateTimeout.NoTimeout


def aggregate(
    state: ArrowState,
    df: DataFrame,
    keys: Keys,
    aggregates: Mapping[str, Aggregate],
    output_mode: Literal["update", "append"] = "update",
) -> DataFrame:
    """What ``df.groupBy(*keys).agg(…)`` does.

    Where a key has the input's watermark (the event-time column itself, or a window of it), late rows are dropped and
    groups are removed when the watermark has passed them, as in Spark; else groups stay for ever, or for as long as the
    state's `Ttl` says.

    Parameters
    ----------
    state
        Where state is kept. A `Ttl` by event time goes by the end of a window among the keys, where there is one; the
        watermark then removes groups first.
    df
        A streaming DataFrame.
    keys
        Grouping columns, as for `DataFrame.groupBy`; one may be ``F.window(…)``.
    aggregates
        Output columns and what is in them: ``{"n": Agg.count(), "total": Agg.sum("value")}``. More can be added to a
        query that has state; they begin with the rows that come then. Another function under an old name is refused
        when the query is started again (`FunctionChangedError`).
    output_mode
        ``"update"``: the keys that have rows, in each batch. ``"append"``: each group once, when the watermark has
        passed it.

    Returns
    -------
    DataFrame
        Keys and aggregates.

    Raises
    ------
    UnsupportedPlanError
        For ``"append"`` without a watermark among the keys, and for a `df` that is not streaming.
    UnsupportedTypeError
        When a column does not have the aggregate.
    UsageError
        When an argument cannot work.
    """
    _check(state, df, "aggregate")
    if output_mode not in ("update", "append"):
        raise UsageError(f"output_mode of aggregate must be 'update' or 'append', not {output_mode!r}")
    specs = checked_aggregates(aggregates, "aggregate")
    key_columns = listed(keys)
    narrow, bound = selected(df, key_columns, specs)
    key_fields = narrow.schema.fields[: len(key_columns)]
    names = [field.name for field in key_fields]
    state_type = state_type_of(bound, narrow.schema)
    refuse_doubles([*names, *aggregates], "output columns of aggregate")
    found = event_time_of(narrow.schema)
    lives_by = event_time_of(df.schema) if found is None and state.options.ttl is not None else None
    if lives_by is not None:
        # Comes along for the time to live, whose clock it may be.
        narrow, _ = selected(df, key_columns, specs, F.col(quoted(df.columns)[lives_by[0]]).alias("__at"))
    if found is None and output_mode == "append":
        raise UnsupportedPlanError(
            "aggregate in append mode gives a group when the watermark has passed it, and no key has a watermark: call "
            "withWatermark, and group by that column or a window of it, or use output_mode='update'"
        )
    partial = PartialAggregation(Aggregates(bound), tuple(names))
    refuse_doubles([*names, *partial.aggregates.buffer_names], "columns of aggregate, its own among them,")
    # For the time to live each row's time counts.
    combining = None if lives_by is not None else _partially(partial, key_fields, state_type)
    function = Aggregation(
        partial.aggregates, names[found[0]] if found else None, output_mode == "append", combining is not None
    )
    output = StructType([*(plain(field) for field in key_fields), *result_fields(bound, narrow.schema)])
    timeout = _EVENT_TIME if found else _NO_TIMEOUT
    asked = Request(
        ARROW,
        narrow,
        quoted(names),
        function,
        output,
        state_type,
        output_mode,
        timeout,
        "aggregate",
        combining=combining,
        function=identity("aggregate", functions_of(specs, bound, narrow.schema)),
    )
    return planned(state.options, asked)


def deduplicate(
    state: ArrowState, df: DataFrame, keys: Keys | None = None, *, within_watermark: bool = False
) -> DataFrame:
    """What ``df.dropDuplicates(keys)`` does, or ``df.dropDuplicatesWithinWatermark(keys)``: the first row of each key.

    With a watermark late rows are dropped, as in Spark. How long a key is remembered: where the event-time column is
    among the keys, until the watermark has reached it; with `within_watermark`, until it has reached the first row's
    time and the watermark's delay; else for ever, or for as long as the state's `Ttl` says. That counts from the first
    row on, and with ``refresh="read"`` from the last.

    Parameters
    ----------
    state
        Where state is kept.
    df
        A streaming DataFrame.
    keys
        Columns, as for `DataFrame.dropDuplicates`, or expressions; None for all columns.
    within_watermark
        Whether keys are forgotten by the watermark.

    Returns
    -------
    DataFrame
        The rows, all columns, for ``outputMode("append")``. The event-time column has no watermark any more.

    Raises
    ------
    UnsupportedPlanError
        For `within_watermark` without a watermark, and for a `df` that is not streaming.
    UnsupportedTypeError
        When a column has a type without a stable Arrow form.
    UsageError
        When an argument cannot work, or two columns have one name.
    """
    _check(state, df, "deduplicate")
    schema = df.schema
    refuse_doubles(schema.names, "columns of the input of deduplicate")
    key_columns = quoted(schema.names) if keys is None else listed(keys)
    event_time = event_time_of(schema)
    function = Deduplication()
    if within_watermark:
        if event_time is None or not isinstance(schema[event_time[0]].dataType, TimestampType):
            raise UnsupportedPlanError(
                "deduplicate with within_watermark=True needs a watermark on a timestamp column: call withWatermark"
            )
        function = Deduplication(row_time=schema.names[event_time[0]], delay_us=1000 * event_time[1])
    elif event_time is not None:
        timed = [f.name for f in df.select(*key_columns).schema.fields if WATERMARK_KEY in (f.metadata or {})]
        function = Deduplication(key_time=timed[0] if timed else None)
    output = StructType([plain(field) for field in schema.fields])
    state_type = StructType([StructField(EXPIRES_US, LongType())])
    # Spark's operators drop late rows under an event-time timeout, whether or not there is one.
    timeout = _NO_TIMEOUT if event_time is None else _EVENT_TIME
    return state.apply_in_arrow_with_state(df, key_columns, function, output, state_type, "append", timeout)


def sessionize(
    state: ArrowState,
    df: DataFrame,
    keys: Keys,
    time: KeyLike,
    gap_ms: int,
    aggregates: Mapping[str, Aggregate],
) -> DataFrame:
    """What ``df.groupBy(*keys, F.session_window(time, gap)).agg(…)`` does in append mode.

    A session is given once, when the watermark has reached its end. Late rows are dropped: those for which the
    watermark of the batch before has reached what would be the end of a session of their own. As in Spark, sessions
    that only touch are one, and rows without a time are in none.

    Parameters
    ----------
    state
        Where state is kept.
    df
        A streaming DataFrame with a watermark.
    keys
        Grouping columns, as for `DataFrame.groupBy`.
    time
        The column with the watermark.
    gap_ms
        After how long without rows a session ends, milliseconds; from 1 to 2 ** 45.
    aggregates
        Output columns and what is in them, as for `aggregate`. ``first`` and ``last`` go by event time within a batch,
        and a session that is in the state counts by its start, as in Spark. They cannot change while there is state.

    Returns
    -------
    DataFrame
        Keys, ``session_window`` with ``start`` and ``end``, and aggregates; for ``outputMode("append")``.

    Raises
    ------
    UnsupportedPlanError
        When `time` has no watermark, and for a `df` that is not streaming.
    UnsupportedTypeError
        When a column does not have the aggregate.
    UsageError
        When an argument cannot work.
    """
    _check(state, df, "sessionize")
    if isinstance(gap_ms, bool) or not isinstance(gap_ms, int) or not 1 <= gap_ms <= _GAP_MS_MAX:
        raise UsageError(f"gap_ms of sessionize must be a whole number from 1 to {_GAP_MS_MAX}, not {gap_ms!r}")
    specs = checked_aggregates(aggregates, "sessionize")
    key_columns = listed(keys)
    timed = df.select(time).schema.fields[0]
    if WATERMARK_KEY not in (timed.metadata or {}) or not isinstance(timed.dataType, TimestampType):
        raise UnsupportedPlanError(
            f"sessionize gives a session when the watermark has reached its end, and {timed.name!r} is no timestamp "
            "with a watermark: call withWatermark"
        )
    own_end = F.timestamp_micros(F.unix_micros(column_of(time)) + F.lit(1000 * gap_ms))
    ended = own_end.alias("__end", metadata={WATERMARK_KEY: timed.metadata[WATERMARK_KEY]})
    narrow, bound = selected(df, key_columns, specs, ended)
    narrow = narrow.where(F.col("__end").isNotNull())
    key_fields = narrow.schema.fields[: len(key_columns)]
    names = [field.name for field in key_fields]
    kept = state_type_of(bound, narrow.schema)
    refuse_doubles([*names, SESSION_WINDOW, *aggregates], "output columns of sessionize")
    refuse_doubles([START, END, *kept.names], "state columns of sessionize")
    session = StructType([StructField(START, TimestampType()), StructField(END, TimestampType()), *kept.fields])
    window = StructType([StructField("start", TimestampType()), StructField("end", TimestampType())])
    output = StructType(
        [
            *(plain(field) for field in key_fields),
            StructField(SESSION_WINDOW, window),
            *result_fields(bound, narrow.schema),
        ]
    )
    state_type = StructType([StructField(SESSIONS, ArrayType(session))])
    function = Sessions(Aggregates(bound), "__end", 1000 * gap_ms)
    asked = Request(
        ARROW,
        narrow,
        quoted(names),
        function,
        output,
        state_type,
        "append",
        _EVENT_TIME,
        "sessionize",
        function=identity("sessionize", functions_of(specs, bound, narrow.schema)),
    )
    return planned(state.options, asked)


def top_k(
    state: ArrowState,
    df: DataFrame,
    keys: Keys,
    order_by: Keys,
    k: int,
    *,
    descending: bool | Sequence[bool] = True,
    emit: Literal["all", "changed"] = "all",
    rank: str = "rank",
) -> DataFrame:
    """The best `k` rows of each key so far, with their ranks, whenever they change.

    What ``ROW_NUMBER() OVER (PARTITION BY keys ORDER BY order_by) <= k`` gives of all input up to then. Of equal rows
    those that came first are first. NULLs are the smallest, as in Spark. Late rows are not dropped.

    Parameters
    ----------
    state
        Where state is kept. With a `Ttl` a key that has not changed for so long starts anew.
    df
        A streaming DataFrame.
    keys
        Columns, as for `DataFrame.groupBy`.
    order_by
        What rows are ordered by: columns or expressions of types that are not nested, and without an order of their
        own such as that of ``F.desc``.
    k
        How many rows a key has at most, from 1 on. While there is state, `k`, `order_by` and `descending` cannot change
        (`FunctionChangedError`); of an expression in `order_by` that is not noticed. A column of the input is the same
        as ``"v"`` and as ``F.col("v")``.
    descending
        Whether the largest come first: for all of `order_by`, or for each.
    emit
        For a key whose best rows changed: ``"all"`` of them, or only those that ``"changed"``, as they are new among
        them or have another rank than before. Whoever writes rows by key and rank may take the latter; a rank that was
        once given stays taken, as there are never fewer rows than before.
    rank
        Name of the column with the rank, from 1 on.

    Returns
    -------
    DataFrame
        The input's columns, keys that are none of them, and the rank (int), for ``outputMode("update")``.

    Raises
    ------
    UnsupportedPlanError
        For a `df` that is not streaming.
    UnsupportedTypeError
        When a column cannot be stored, or ordered by.
    UsageError
        When an argument cannot work.
    """
    _check(state, df, "top_k")
    if isinstance(k, bool) or not isinstance(k, int) or k < 1:
        raise UsageError(f"k of top_k must be a whole number from 1 on, not {k!r}")
    if emit not in ("all", "changed"):
        raise UsageError(f"emit of top_k must be 'all' or 'changed', not {emit!r}")
    if not isinstance(rank, str) or not rank:
        raise UsageError(f"rank of top_k is the name of a column, not {rank!r}")
    orders, downwards = _orders(order_by, descending, df.schema.names)
    order_names = [name_of(order, df.schema.names) for order in orders]
    key_names, extra_names, derived = _top_k_keys(df, keys, rank)
    inputs = df.schema.names
    # An order column that the key has too is kept beside it.
    ordered = [
        name if name is not None and name not in key_names else f"__order{i}" for i, name in enumerate(order_names)
    ]
    hidden = [
        column_of(order).alias(name, metadata=PLAIN)
        for order, name, own in zip(orders, ordered, order_names, strict=True)
        if name != own
    ]
    wide = df.select("*", *derived, *hidden)
    refuse_doubles(wide.schema.names, "columns of top_k, its own among them,")
    for name in ordered:
        refuse_nested(wide.schema[name], "order column")
    kept = [field for field in wide.schema.fields if field.name not in key_names]
    output = [plain(field) for field in wide.schema.fields if field.name in {*inputs, *extra_names}]
    function = TopK(
        k,
        tuple(zip(ordered, downwards, strict=True)),
        tuple(field.name for field in kept),
        tuple(field.name for field in output),
        rank,
        emit == "changed",
    )
    rows = StructType([StructField(field.name, field.dataType) for field in kept])
    output_type = StructType([*output, StructField(rank, IntegerType())])
    state_type = StructType([StructField(TOP, ArrayType(rows))])
    asked = Request(
        ARROW,
        wide,
        quoted(key_names),
        function,
        output_type,
        state_type,
        "update",
        _NO_TIMEOUT,
        "top_k",
        # Under a time to live by event time each row's time counts.
        combining=None if state.options.ttl is not None else Combining(function.thin, wide.schema),
        function=identity("top_k", {"k": k, "order_by": order_text(orders, order_names, downwards)}),
    )
    return planned(state.options, asked)


def _partially(partial: PartialAggregation, keys: Sequence[StructField], buffers: StructType) -> Combining:
    """Aggregate a task's rows before the shuffle: their columns are then keys and buffers."""
    columns = [
        StructField(name, field.dataType)
        for name, field in zip(partial.aggregates.buffer_names, buffers.fields, strict=True)
    ]
    return Combining(partial, StructType([*keys, *columns]))


# -- inside --------------------------------------------------------------------------------------------------


def _orders(order_by: Keys, descending: bool | Sequence[bool], inputs: Sequence[str]) -> tuple[list[Any], list[bool]]:
    """What rows of `top_k` are ordered by, and whether the largest come first, for each."""
    orders = listed(order_by)
    refuse_no_columns(orders, "order_by of top_k")
    given = descending if isinstance(descending, (list, tuple)) else [descending] * len(orders)
    if not all(isinstance(value, (bool, np.bool_)) for value in given):
        raise UsageError(f"descending of top_k must be True or False, or a list of these, not {descending!r}")
    downwards = [bool(value) for value in given]
    if not orders or len(orders) != len(downwards):
        raise UsageError(f"order_by of top_k has {len(orders)} columns, and descending {len(downwards)} values")
    refuse_sort_orders(orders, inputs)
    return orders, downwards


def _top_k_keys(df: DataFrame, keys: Keys, rank: str) -> tuple[list[str], list[str], list[Any]]:
    """Names of the keys of `top_k`; of these, names of those that are no input columns, and their columns."""
    inputs = df.schema.names
    key_type, places, extra = resolve_keys(df, df.schema, listed(keys))
    extra_fields = [field for field, at in zip(key_type.fields, places, strict=True) if at >= len(inputs)]
    # Of a key that is an input column the output has that one, in whatever case it was asked for.
    key_names = [
        field.name if at >= len(inputs) else inputs[at] for field, at in zip(key_type.fields, places, strict=True)
    ]
    refuse_doubles(key_names, "keys of top_k")
    if any(field.name in inputs for field in extra_fields):
        raise UsageError("a key of top_k is an expression under the name of an input column: give it another, by alias")
    extra_names = [field.name for field in extra_fields]
    refuse_doubles([*inputs, *extra_names, rank], "output columns of top_k")
    # A window has its column's watermark, which would then be there twice.
    derived = [
        column_of(key).alias(field.name, metadata=field.metadata or PLAIN)
        for key, field in zip(extra, extra_fields, strict=True)
    ]
    return key_names, extra_names, derived


def _check(state: ArrowState, df: DataFrame, name: str) -> None:
    if not isinstance(state, ArrowState):
        raise UsageError(f"{name} takes an ArrowState and then a DataFrame, not {state!r}")
    if not hasattr(df, "isStreaming"):
        raise UsageError(f"{name} takes an ArrowState and then a DataFrame, not {df!r}")
    if not df.isStreaming:
        raise UnsupportedPlanError(
            f"{name} is not supported with a batch DataFrame: state lives from micro-batch to micro-batch. Use "
            "readStream for the input."
        )
