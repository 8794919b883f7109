"""`aggregate`, `deduplicate`, `sessionize` and `top_k`: operators equal to Spark's, planned on an `ArrowState`.

Their functions are in `spark_state_ext.operators`; this module derives the output and state schemas from Spark's.
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
    find_event_time,
    resolve_keys,
    select_partition_columns,
)
from spark_state_ext.spark.client.operator_columns import (
    VALUE_METADATA,
    Keys,
    check_aggregates,
    describe_order,
    find_input_name,
    parse_orders,
    quote_names,
    refuse_duplicate_names,
    select_columns,
    to_column,
    to_list,
)
from spark_state_ext.spark.client.operator_plans import (
    SESSION_END,
    OperatorPlan,
    Order,
    check_gap,
    check_output_mode,
    check_time_field,
    check_top,
    name_order_columns,
    plan_aggregate,
    plan_deduplicate,
    plan_sessionize,
    plan_top_k,
)
from spark_state_ext.spark.client.planner import Request, plan_operator
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
    """Aggregate each group of rows, like ``df.groupBy(*keys).agg(…)``.

    If a key has the input's watermark (the event-time column itself, or a window of it), late rows are dropped and
    groups are removed when the watermark has passed them, as in Spark. Otherwise groups stay forever, or as long as the
    state's `Ttl` says.

    Parameters
    ----------
    state
        Where state is kept. A `Ttl` by event time counts from the end of a window among the keys, if there is one; the
        watermark then removes groups earlier.
    df
        A streaming DataFrame.
    keys
        Grouping columns, as for `DataFrame.groupBy`; one may be ``F.window(…)``.
    aggregates
        Output columns and their aggregates: ``{"n": Agg.count(), "total": Agg.sum("value")}``. You can add aggregates
        to a query that has state: they start with the rows that come then. A restart with another function under an old
        name is refused (`FunctionChangedError`).
    output_mode
        ``"update"``: in each batch the keys that have rows. ``"append"``: each group once, when the watermark has
        passed it.

    Returns
    -------
    DataFrame
        Keys and aggregates.

    Raises
    ------
    UnsupportedPlanError
        For ``"append"`` without a watermark among the keys, or if `df` is not streaming.
    UnsupportedTypeError
        When a column's type does not support the aggregate.
    UsageError
        When an argument cannot work.
    """
    _check(state, df, "aggregate")
    check_output_mode(output_mode)
    specs = check_aggregates(aggregates, "aggregate")
    key_columns, trailing = to_list(keys), _select_partition_columns(state, df)
    selected, bound = select_columns(df, key_columns, specs, trailing=trailing)
    has_time = state.options.ttl is None or find_event_time(selected.schema) is not None
    ttl_time = None if has_time else find_event_time(df.schema)
    if ttl_time is not None:
        # Select the event time too, as the time to live may depend on each row's time.
        event_time = F.col(quote_names(df.columns)[ttl_time[0]]).alias("__at")
        selected, _ = select_columns(df, key_columns, specs, event_time, trailing=trailing)
    input_type = _drop_last(selected, trailing)
    plan = plan_aggregate(input_type, len(key_columns), specs, bound, output_mode, combine=ttl_time is None)
    key_names = quote_names(input_type.names[: len(key_columns)])
    return plan_operator(state.options, _make_request(selected, key_names, plan, partitioned=bool(trailing)))


def deduplicate(
    state: ArrowState, df: DataFrame, keys: Keys | None = None, *, within_watermark: bool = False
) -> DataFrame:
    """Keep the first row of each key, like ``df.dropDuplicates(keys)`` or ``df.dropDuplicatesWithinWatermark(keys)``.

    With a watermark late rows are dropped, as in Spark. How long a key is remembered: if the event-time column is among
    the keys, until the watermark reaches the key's time; with `within_watermark`, until the watermark reaches the first
    row's time plus the watermark's delay; otherwise forever, or as long as the state's `Ttl` says, counted from the
    first row, or with ``refresh="read"`` from the last one.

    Parameters
    ----------
    state
        Where state is kept.
    df
        A streaming DataFrame.
    keys
        Columns, as for `DataFrame.dropDuplicates`, or expressions; None for all columns.
    within_watermark
        Whether the watermark makes keys be forgotten.

    Returns
    -------
    DataFrame
        The first rows with all columns, for ``outputMode("append")``. The event-time column has no watermark.

    Raises
    ------
    UnsupportedPlanError
        For `within_watermark` without a watermark, or if `df` is not streaming.
    UnsupportedTypeError
        When a column has a type without a stable Arrow form.
    UsageError
        When an argument cannot work, or two columns have the same name.
    """
    _check(state, df, "deduplicate")
    schema = df.schema
    refuse_duplicate_names(schema.names, "columns of the input of deduplicate")
    key_columns = quote_names(schema.names) if keys is None else to_list(keys)
    # A key can only be an event time if the input has an event-time column.
    key_fields = [] if find_event_time(schema) is None else df.select(*key_columns).schema.fields
    time_keys = [field.name for field in key_fields if WATERMARK_KEY in (field.metadata or {})]
    plan = plan_deduplicate(schema, time_keys[0] if time_keys else None, within_watermark)
    return plan_operator(state.options, _make_request(df, key_columns, plan))


def sessionize(
    state: ArrowState,
    df: DataFrame,
    keys: Keys,
    time: KeyLike,
    gap_ms: int,
    aggregates: Mapping[str, Aggregate],
) -> DataFrame:
    """Aggregate sessions, like ``df.groupBy(*keys, F.session_window(time, gap)).agg(…)`` in append mode.

    A session is returned once, when the watermark has reached its end. A row is late, and dropped, if the watermark of
    the batch before has reached the end of a session that holds only this row. As in Spark, sessions that only touch
    are merged, and rows without a time are dropped.

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
        A session ends after this time without rows, milliseconds; from 1 to 2 ** 45.
    aggregates
        Output columns and their aggregates, as for `aggregate`. ``first`` and ``last`` go by event time within a batch,
        and a session in the state counts by its start, as in Spark. They cannot change while there is state.

    Returns
    -------
    DataFrame
        Keys, ``session_window`` with ``start`` and ``end``, and aggregates; for ``outputMode("append")``.

    Raises
    ------
    UnsupportedPlanError
        When `time` has no watermark, or if `df` is not streaming.
    UnsupportedTypeError
        When a column's type does not support the aggregate.
    UsageError
        When an argument cannot work.
    """
    _check(state, df, "sessionize")
    check_gap(gap_ms)
    specs = check_aggregates(aggregates, "sessionize")
    key_columns, trailing = to_list(keys), _select_partition_columns(state, df)
    time_field = check_time_field(df.select(time).schema.fields[0])
    own_end = F.timestamp_micros(F.unix_micros(to_column(time)) + F.lit(1000 * gap_ms))
    ended = own_end.alias(SESSION_END, metadata={WATERMARK_KEY: time_field.metadata[WATERMARK_KEY]})
    selected, bound = select_columns(df, key_columns, specs, ended, trailing=trailing)
    selected = selected.where(F.col(SESSION_END).isNotNull())
    input_type = _drop_last(selected, trailing)
    plan = plan_sessionize(input_type, len(key_columns), specs, bound, gap_ms)
    key_names = quote_names(input_type.names[: len(key_columns)])
    return plan_operator(state.options, _make_request(selected, key_names, plan, partitioned=bool(trailing)))


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
    """Return the best `k` rows of each key so far, with their ranks, whenever they change.

    This equals ``ROW_NUMBER() OVER (PARTITION BY keys ORDER BY order_by) <= k`` over all input so far. Of equal rows
    the earlier ones come first. NULLs are the smallest, as in Spark. Late rows are not dropped.

    Parameters
    ----------
    state
        Where state is kept. With a `Ttl`, the rows of a key that has not changed for that long are dropped.
    df
        A streaming DataFrame.
    keys
        Columns, as for `DataFrame.groupBy`.
    order_by
        What rows are sorted by: columns or expressions. Their types must not be nested, and they must not have a sort
        order of their own, such as ``F.desc`` gives.
    k
        The most rows that a key has, at least 1. While there is state, `k`, `order_by` and `descending` cannot change
        (`FunctionChangedError`); a change of an expression in `order_by` is not detected. A column of the input is the
        same as ``"v"`` and as ``F.col("v")``.
    descending
        Whether the largest come first: one value for all of `order_by`, or a list with one for each.
    emit
        What is returned for a key whose best rows changed: ``"all"`` of them, or only those that ``"changed"``, because
        they are new or have another rank. ``"changed"`` suits sinks that write rows by key and rank: a rank never
        becomes free again, as a key never has fewer rows than before.
    rank
        Name of the column with the rank, which starts at 1.

    Returns
    -------
    DataFrame
        The input's columns, keys that are not among them, and the rank (int), for ``outputMode("update")``.

    Raises
    ------
    UnsupportedPlanError
        If `df` is not streaming.
    UnsupportedTypeError
        When a column cannot be stored, or rows cannot be sorted by it.
    UsageError
        When an argument cannot work.
    """
    _check(state, df, "top_k")
    check_top(k, emit, rank)
    orders, descending_flags = parse_orders(order_by, descending, df.schema.names)
    order_names = [find_input_name(order, df.schema.names) for order in orders]
    key_names, extra_names, extra_columns = _resolve_top_k_keys(df, keys, rank)
    inputs = df.schema.names
    order_columns = name_order_columns(order_names, key_names)
    hidden = [
        to_column(order).alias(name, metadata=VALUE_METADATA)
        for order, name, input_name in zip(orders, order_columns, order_names, strict=True)
        if name != input_name
    ]
    selected = df.select("*", *extra_columns, *hidden)
    order = Order(order_columns, tuple(descending_flags), describe_order(orders, order_names, descending_flags))
    # A time to live by event time depends on each row's time, so rows are not combined then.
    combine = state.options.ttl is None
    plan = plan_top_k(selected.schema, key_names, [*inputs, *extra_names], order, k, emit, rank, combine)
    return plan_operator(state.options, _make_request(selected, quote_names(key_names), plan))


# -- inside --------------------------------------------------------------------------------------------------


def _select_partition_columns(state: ArrowState, df: DataFrame) -> list[Any]:
    """Return the columns that are selected last, by which packing knows a row's source partition."""
    source = state.options.source_partition
    return [] if source is None else select_partition_columns(df, source)


def _drop_last(selected: DataFrame, trailing: Sequence[Any]) -> StructType:
    """Return the type of the columns without the last ones, `trailing`."""
    fields = selected.schema.fields
    return StructType(fields[: len(fields) - len(trailing)])


def _make_request(df: DataFrame, keys: Sequence[KeyLike], plan: OperatorPlan, *, partitioned: bool = False) -> Request:
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


def _resolve_top_k_keys(df: DataFrame, keys: Keys, rank: str) -> tuple[list[str], list[str], list[Any]]:
    """Return the names of the keys of `top_k`, and the names and columns of the keys that are not input columns."""
    inputs = df.schema.names
    key_type, positions, extra = resolve_keys(df, df.schema, to_list(keys))
    extra_fields = [
        field for field, position in zip(key_type.fields, positions, strict=True) if position >= len(inputs)
    ]
    # The output has the input's column, whatever case its name was given in.
    key_names = [
        field.name if position >= len(inputs) else inputs[position]
        for field, position in zip(key_type.fields, positions, strict=True)
    ]
    refuse_duplicate_names(key_names, "keys of top_k")
    if any(field.name in inputs for field in extra_fields):
        raise UsageError("a key of top_k is an expression with the name of an input column: give it another, by alias")
    extra_names = [field.name for field in extra_fields]
    refuse_duplicate_names([*inputs, *extra_names, rank], "output columns of top_k")
    # A window has its column's watermark, so two columns would have one.
    extra_columns = [
        to_column(key).alias(field.name, metadata=field.metadata or VALUE_METADATA)
        for key, field in zip(extra, extra_fields, strict=True)
    ]
    return key_names, extra_names, extra_columns


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
