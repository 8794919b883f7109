"""The section of a report about an operator's buckets: rows, state and time of each, and what is found of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from spark_state_ext.reports.charts import BARS, Chart, Series, format_with_unit
from spark_state_ext.reports.page import PageTable, Section
from spark_state_ext.reports.skew import OperatorLoad, format_findings

__all__ = ["build_load_section"]

_BUCKETS_TOLD_MAX = 20
_BARS_MAX = 256
_HEAD = ("bucket", "rows", "of the top key", "changed rows", "keys at most", "state", "median call", "finding")


def build_load_section(it: OperatorLoad) -> Section:
    """How evenly an operator's load lies on its buckets."""
    heaviest = it.buckets.take(np.argsort(-it.buckets["rows"].to_numpy(), kind="stable")[:_BUCKETS_TOLD_MAX])
    few = it.buckets.num_rows > _BUCKETS_TOLD_MAX
    caption = f"Buckets, the {_BUCKETS_TOLD_MAX} with most rows of {it.buckets.num_rows:,}" if few else "Buckets"
    skew = it.skew
    return Section(
        f"Operator {it.operator}: buckets",
        f"Query {it.query_id}. Over its last {it.batches:,} batches. The heaviest bucket against the mean: "
        f"{skew.rows:.2f} times the rows, {skew.state_bytes:.2f} times the state, {skew.call_ms:.2f} times the time.",
        tables=(PageTable(caption, _HEAD, [_row(row) for row in heaviest.to_pylist()]),),
        charts=_charts(it.buckets),
        notes=tuple(format_findings(it.findings)),
    )


def _row(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        *(f"{row[name]:,}" for name in ("bucket", "rows", "top_key_rows", "changed_rows", "state_rows")),
        format_with_unit(float(row["state_bytes"]), "bytes"),
        format_with_unit(float(row["call_ms"]), "ms"),
        row["finding"] or "",
    )


def _charts(buckets: pa.Table) -> tuple[Chart, ...]:
    each = -(-buckets.num_rows // _BARS_MAX)
    say = f" Each bar is the highest of {each} buckets." if each > 1 else ""
    starts = np.arange(0, buckets.num_rows, each)
    numbers: list[int] = buckets["bucket"].to_numpy()[starts].tolist()

    def highest(name: str) -> list[float]:
        found: list[float] = np.maximum.reduceat(buckets[name].to_numpy(), starts).astype(np.float64).tolist()
        return found

    def chart(title: str, says: str, unit: str, name: str) -> Chart:
        return Chart(title, f"{says}{say}", "Bucket", unit, numbers, (Series(unit, highest(name)),), BARS)

    return (
        chart("Rows of buckets", "Input rows of the bucket in these batches, without late ones.", "rows", "rows"),
        chart(
            "State of buckets", "What the bucket held in its local store after its last call.", "bytes", "state_bytes"
        ),
        chart("Time of buckets", "The median time of a call of the bucket.", "ms", "call_ms"),
    )
