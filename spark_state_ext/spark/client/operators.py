"""`aggregate`, `deduplicate`, `sessionize` and `top_k`: operators that equal Spark's, planned on an `ArrowState`.

What they do is in `spark_state_ext.operators`; here Spark's schemas become those of output and state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from spark_state_ext.engine.job import ARROW
from spark_state_ext.errors import UnsupportedPlanError, UsageError
from spark_state_ext.operators.agg import Aggregate
from spark_state_ext.spark.client.columns import (
    WATERMARK_KEY,
    KeyLike,
    event_time_of,
    partition_columns,
    resolve_keys,
)
from spark_state_ext.spark.client.operator_columns import (
    PLAIN,
    Keys,
    checked_aggregates,
    column_of,
    listed,
    name_of,
    order_text,
    orders_of,
    quoted,
    refuse_doubles,
    selected,
)
from spark_state_ext.spark.client.operator_plans import (
    SESSION_END,
    OperatorPlan,
    Order,
    aggregation,
    check_gap,
    check_output_mode,
    check_top,
    deduplication,
    ordering,
    sessions,
    timed_field,
    top,
)
from spark_state_ext.spark.client.planner import Request, planned
from spark_state_ext.spark.client.state import ArrowState

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["aggregate", "deduplicate", "sessionize", "top_k"]


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
    check_output_mode(output_mode)
    specs = checked_aggregates(aggregates, "aggregate")
    key_columns, behind = listed(keys), _partition(state, df)
    narrow, bound = selected(df, key_columns, specs, behind=behind)
    timed = state.options.ttl is None or event_time_of(narrow.schema) is not None
    lives_by = None if timed else event_time_of(df.schema)
    if lives_by is not None:
        # Comes along for the time to live, whose clock it may be: each row's time counts.
        at = F.col(quoted(df.columns)[lives_by[0]]).alias("__at")
        narrow, _ = selected(df, key_columns, specs, at, behind=behind)
    given = _without(narrow, behind)
    plan = aggregation(given, len(key_columns), specs, bound, output_mode, combine=lives_by is None)
    key_names = quoted(given.names[: len(key_columns)])
    return planned(state.options, _asked(narrow, key_names, plan, partitioned=bool(behind)))


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
    # Only an event time among the input's columns can be one among the keys.
    of_keys = [] if event_time_of(schema) is None else df.select(*key_columns).schema.fields
    timed = [field.name for field in of_keys if WATERMARK_KEY in (field.metadata or {})]
    plan = deduplication(schema, timed[0] if timed else None, within_watermark)
    return planned(state.options, _asked(df, key_columns, plan))


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
    check_gap(gap_ms)
    specs = checked_aggregates(aggregates, "sessionize")
    key_columns, behind = listed(keys), _partition(state, df)
    timed = timed_field(df.select(time).schema.fields[0])
    own_end = F.timestamp_micros(F.unix_micros(column_of(time)) + F.lit(1000 * gap_ms))
    ended = own_end.alias(SESSION_END, metadata={WATERMARK_KEY: timed.metadata[WATERMARK_KEY]})
    narrow, bound = selected(df, key_columns, specs, ended, behind=behind)
    narrow = narrow.where(F.col(SESSION_END).isNotNull())
    given = _without(narrow, behind)
    plan = sessions(given, len(key_columns), specs, bound, gap_ms)
    key_names = quoted(given.names[: len(key_columns)])
    return planned(state.options, _asked(narrow, key_names, plan, partitioned=bool(behind)))


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
    check_top(k, emit, rank)
    orders, downwards = orders_of(order_by, descending, df.schema.names)
    order_names = [name_of(order, df.schema.names) for order in orders]
    key_names, extra_names, derived = _top_k_keys(df, keys, rank)
    inputs = df.schema.names
    ordered = ordering(order_names, key_names)
    hidden = [
        column_of(order).alias(name, metadata=PLAIN)
        for order, name, own in zip(orders, ordered, order_names, strict=True)
        if name != own
    ]
    wide = df.select("*", *derived, *hidden)
    order = Order(ordered, tuple(downwards), order_text(orders, order_names, downwards))
    # Under a time to live by event time each row's time counts.
    combine = state.options.ttl is None
    plan = top(wide.schema, key_names, [*inputs, *extra_names], order, k, emit, rank, combine)
    return planned(state.options, _asked(wide, quoted(key_names), plan))


# -- inside --------------------------------------------------------------------------------------------------


def _partition(state: ArrowState, df: DataFrame) -> list[Any]:
    """What goes behind the columns that an operator selects, so that packing knows a row's partition."""
    source = state.options.source_partition
    return [] if source is None else partition_columns(df, source)


def _without(narrow: DataFrame, behind: Sequence[Any]) -> StructType:
    """The columns without those behind them."""
    fields = narrow.schema.fields
    return StructType(fields[: len(fields) - len(behind)])


def _asked(df: DataFrame, keys: Sequence[KeyLike], plan: OperatorPlan, *, partitioned: bool = False) -> Request:
    return Request(
        ARROW,
        df,
        keys,
        plan.func,
        plan.output,
        plan.state,
        plan.output_mode,
        plan.timeout_conf,
        plan.name,
        combining=plan.combining,
        function=plan.identity,
        partitioned=partitioned,
    )


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
