"""What calls noted, summed up for charts: a row for each batch of each operator."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

__all__ = ["OperatorBatches", "summarize_batches", "keep_last_calls", "thin_batches"]

_KEYS = ("query_id", "operator")
# Of the calls of a batch the longest counts, as buckets are worked on side by side.
_LONGEST = ("commit_ms", "wait_ms", "read_ms", "user_ms", "total_ms", "lease_age_ms", "oldest_inline_ms")
_MIDDLE = ("commit_ms", "wait_ms")
_SUMMED = (
    *("rows", "changed_rows", "timeouts", "uploads", "upload_failures", "snapshots", "snapshot_failures"),
    *("restored_files", "restore_gaps", "deleted_files"),
)
_HELD = ("state_rows", "state_rows_min", "state_bytes")


@dataclass(frozen=True)
class OperatorBatches:
    """The batches of one operator of one query.

    Parameters
    ----------
    query_id, operator
        Whose.
    calls
        How many calls the metrics have, repeated ones counted once.
    batches
        A row for each batch, in order: ``batch``, ``ended_ms``, ``buckets`` (called), sums of what can be summed,
        ``<column>_max`` and ``<column>_median`` of times of a call, and what all buckets held after the batch.
    """

    query_id: str
    operator: str
    calls: int
    batches: pa.Table


def summarize_batches(calls: pa.Table) -> list[OperatorBatches]:
    """The operators that metrics tell of."""
    calls = keep_last_calls(calls)
    found = calls.group_by(list(_KEYS)).aggregate([]).sort_by([(name, "ascending") for name in _KEYS])
    return [_operator(calls, row["query_id"], row["operator"]) for row in found.to_pylist()]


def keep_last_calls(calls: pa.Table) -> pa.Table:
    """The calls that count: of those that were made again, also by a later run of the query, the last one."""
    calls = calls.append_column("at", pa.array(np.arange(calls.num_rows)))
    last = calls.group_by([*_KEYS, "batch", "bucket"]).aggregate([("at", "max")])
    return calls.take(pc.take(last["at_max"], pc.sort_indices(last["at_max"])))


def _operator(calls: pa.Table, query_id: str, operator: str) -> OperatorBatches:
    mine = calls.filter(pc.and_(pc.equal(calls["query_id"], query_id), pc.equal(calls["operator"], operator)))
    aggregates = [("ended_ms", "max"), ("bucket", "count"), *((name, "sum") for name in _SUMMED)]
    aggregates += [(name, "max") for name in _LONGEST] + [(name, "approximate_median") for name in _MIDDLE]
    found = mine.group_by(["batch"]).aggregate(aggregates).sort_by([("batch", "ascending")])
    names = {"bucket_count": "buckets", "ended_ms_max": "ended_ms"} | {f"{name}_sum": name for name in _SUMMED}
    names |= {f"{name}_approximate_median": f"{name}_median" for name in _MIDDLE}
    found = found.rename_columns([names.get(name, name) for name in found.column_names])
    for name in _HELD:
        found = found.append_column(name, _held(mine, name, found["batch"]))
    return OperatorBatches(query_id, operator, mine.num_rows, found)


def _held(calls: pa.Table, column: str, batches: pa.ChunkedArray) -> pa.Array:
    """What all buckets held after each batch: their changes, added up, as not each batch calls each bucket."""
    buckets, values, at = (calls[name].to_numpy() for name in ("bucket", column, "batch"))
    order = np.lexsort((at, buckets))
    sorted_buckets, sorted_values = buckets[order], values[order]
    changes = np.diff(sorted_values, prepend=0)
    begins = np.diff(sorted_buckets, prepend=-1) != 0
    changes[begins] = sorted_values[begins]
    numbers = batches.to_numpy()
    sums = np.zeros(len(numbers), np.int64)
    np.add.at(sums, np.searchsorted(numbers, at[order]), changes)
    return pa.array(np.cumsum(sums), pa.int64())


def thin_batches(batches: pa.Table, points_max: int) -> tuple[pa.Table, int]:
    """Few enough rows for a chart, and how many batches each of them stands for."""
    each = -(-batches.num_rows // points_max) if batches.num_rows else 1
    if each == 1:
        return batches, 1
    groups = batches.append_column("group", pa.array(np.arange(batches.num_rows) // each))
    how = {name: "sum" if name in _SUMMED else "max" for name in batches.column_names}
    found = groups.group_by(["group"]).aggregate(list(how.items())).sort_by([("group", "ascending")])
    found = found.select([f"{name}_{function}" for name, function in how.items()])
    return found.rename_columns(list(how)), each
