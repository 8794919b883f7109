"""Summarize the metrics of calls for charts: a row for each batch of each operator."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

__all__ = ["OperatorBatches", "keep_last_calls", "summarize_batches", "thin_batches"]

_KEYS = ("query_id", "operator")
# Buckets are processed in parallel, so the longest call of a batch determines its time.
_MAX_COLUMNS = ("commit_ms", "wait_ms", "read_ms", "user_ms", "total_ms", "lease_age_ms", "oldest_inline_ms")
_MEDIAN_COLUMNS = ("commit_ms", "wait_ms")
_SUM_COLUMNS = (
    *("rows", "changed_rows", "timeouts", "uploads", "upload_failures", "snapshots", "snapshot_failures"),
    *("restored_files", "restore_gaps", "deleted_files"),
)
_STATE_COLUMNS = ("state_rows", "state_rows_min", "state_bytes")


@dataclass(frozen=True)
class OperatorBatches:
    """The batches of one operator of one query.

    Parameters
    ----------
    query_id, operator
        The query and the operator.
    calls
        The number of calls in the metrics; repeated calls are counted once.
    batches
        A row for each batch, in order: ``batch``, ``ended_ms``, ``buckets`` (called), sums of counters,
        ``<column>_max`` and ``<column>_median`` of call times, and the state of all buckets after the batch.
    """

    query_id: str
    operator: str
    calls: int
    batches: pa.Table


def summarize_batches(calls: pa.Table) -> list[OperatorBatches]:
    """Return the batches of each operator in the metrics."""
    calls = keep_last_calls(calls)
    operators = calls.group_by(list(_KEYS)).aggregate([]).sort_by([(name, "ascending") for name in _KEYS])
    return [_summarize_operator(calls, row["query_id"], row["operator"]) for row in operators.to_pylist()]


def keep_last_calls(calls: pa.Table) -> pa.Table:
    """Keep only the last of repeated calls, also if a later run of the query repeated them."""
    calls = calls.append_column("at", pa.array(np.arange(calls.num_rows)))
    last_rows = calls.group_by([*_KEYS, "batch", "bucket"]).aggregate([("at", "max")])
    return calls.take(pc.take(last_rows["at_max"], pc.sort_indices(last_rows["at_max"])))


def _summarize_operator(calls: pa.Table, query_id: str, operator: str) -> OperatorBatches:
    operator_calls = calls.filter(pc.and_(pc.equal(calls["query_id"], query_id), pc.equal(calls["operator"], operator)))
    aggregates = [("ended_ms", "max"), ("bucket", "count"), *((name, "sum") for name in _SUM_COLUMNS)]
    aggregates += [(name, "max") for name in _MAX_COLUMNS] + [(name, "approximate_median") for name in _MEDIAN_COLUMNS]
    batches = operator_calls.group_by(["batch"]).aggregate(aggregates).sort_by([("batch", "ascending")])
    names = {"bucket_count": "buckets", "ended_ms_max": "ended_ms"} | {f"{name}_sum": name for name in _SUM_COLUMNS}
    names |= {f"{name}_approximate_median": f"{name}_median" for name in _MEDIAN_COLUMNS}
    batches = batches.rename_columns([names.get(name, name) for name in batches.column_names])
    for name in _STATE_COLUMNS:
        batches = batches.append_column(name, _sum_over_buckets(operator_calls, name, batches["batch"]))
    return OperatorBatches(query_id, operator, operator_calls.num_rows, batches)


def _sum_over_buckets(calls: pa.Table, column: str, batches: pa.ChunkedArray) -> pa.Array:
    """Sum a column over all buckets after each batch; sum up changes, because a batch does not call every bucket."""
    buckets, values, call_batches = (calls[name].to_numpy() for name in ("bucket", column, "batch"))
    order = np.lexsort((call_batches, buckets))
    sorted_buckets, sorted_values = buckets[order], values[order]
    changes = np.diff(sorted_values, prepend=0)
    is_first = np.diff(sorted_buckets, prepend=-1) != 0
    changes[is_first] = sorted_values[is_first]
    numbers = batches.to_numpy()
    sums = np.zeros(len(numbers), np.int64)
    np.add.at(sums, np.searchsorted(numbers, call_batches[order]), changes)
    return pa.array(np.cumsum(sums), pa.int64())


def thin_batches(batches: pa.Table, points_max: int) -> tuple[pa.Table, int]:
    """Reduce batches to at most `points_max` rows; return these, and how many batches each row stands for."""
    group_size = -(-batches.num_rows // points_max) if batches.num_rows else 1
    if group_size == 1:
        return batches, 1
    groups = batches.append_column("group", pa.array(np.arange(batches.num_rows) // group_size))
    functions = {name: "sum" if name in _SUM_COLUMNS else "max" for name in batches.column_names}
    grouped = groups.group_by(["group"]).aggregate(list(functions.items())).sort_by([("group", "ascending")])
    grouped = grouped.select([f"{name}_{function}" for name, function in functions.items()])
    return grouped.rename_columns(list(functions)), group_size
