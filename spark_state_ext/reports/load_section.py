"""Build the section of a report about an operator's buckets: rows, state and time of each, and findings."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from spark_state_ext.reports.charts import BARS, Chart, Series, format_with_unit
from spark_state_ext.reports.page import PageTable, Section
from spark_state_ext.reports.skew import OperatorLoad, format_findings

__all__ = ["build_load_section"]

_BUCKETS_LISTED_MAX = 20
_BARS_MAX = 256
_HEAD = ("bucket", "rows", "of the top key", "changed rows", "keys at most", "state", "median call", "finding")


def build_load_section(load: OperatorLoad) -> Section:
    """Build the section that shows how evenly an operator's load is spread over its buckets."""
    heaviest = load.buckets.take(np.argsort(-load.buckets["rows"].to_numpy(), kind="stable")[:_BUCKETS_LISTED_MAX])
    is_cut = load.buckets.num_rows > _BUCKETS_LISTED_MAX
    caption = f"The {_BUCKETS_LISTED_MAX} of {load.buckets.num_rows:,} buckets with most rows" if is_cut else "Buckets"
    skew = load.skew
    return Section(
        f"Operator {load.operator}: buckets",
        f"Query {load.query_id}, over its last {load.batches:,} batches. The heaviest bucket compared to the mean: "
        f"{skew.rows:.2f} times the rows, {skew.state_bytes:.2f} times the state, {skew.call_ms:.2f} times the time.",
        tables=(PageTable(caption, _HEAD, [_row(row) for row in heaviest.to_pylist()]),),
        charts=_build_charts(load.buckets),
        notes=tuple(format_findings(load.findings)),
    )


def _row(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        *(f"{row[name]:,}" for name in ("bucket", "rows", "top_key_rows", "changed_rows", "state_rows")),
        format_with_unit(float(row["state_bytes"]), "bytes"),
        format_with_unit(float(row["call_ms"]), "ms"),
        row["finding"] or "",
    )


def _build_charts(buckets: pa.Table) -> tuple[Chart, ...]:
    group_size = -(-buckets.num_rows // _BARS_MAX)
    per_bar = f" Each bar is the highest of {group_size} buckets." if group_size > 1 else ""
    starts = np.arange(0, buckets.num_rows, group_size)
    numbers: list[int] = buckets["bucket"].to_numpy()[starts].tolist()

    def highest(name: str) -> list[float]:
        maxima: list[float] = np.maximum.reduceat(buckets[name].to_numpy(), starts).astype(np.float64).tolist()
        return maxima

    def chart(title: str, caption: str, unit: str, name: str) -> Chart:
        return Chart(title, f"{caption}{per_bar}", "Bucket", unit, numbers, (Series(unit, highest(name)),), BARS)

    return (
        chart("Rows of buckets", "Input rows of the bucket in these batches, without late ones.", "rows", "rows"),
        chart("State of buckets", "Size of the bucket's local store after its last call.", "bytes", "state_bytes"),
        chart("Time of buckets", "The median time of a call of the bucket.", "ms", "call_ms"),
    )
