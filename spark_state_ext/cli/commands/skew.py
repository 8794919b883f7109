"""``skew``: how evenly a job's load lies on its buckets."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import pyarrow as pa
import typer

from spark_state_ext.cli.exits import DONE, NO
from spark_state_ext.cli.metrics_folder import read_metrics
from spark_state_ext.cli.output import Output, say, write_table
from spark_state_ext.cli.parameters import OutputOption
from spark_state_ext.reports.skew import BATCHES, OperatorLoad, loads_of, told

__all__ = ["command"]


def command(
    folder: Annotated[Path, typer.Argument(help="folder of the job's metrics; those in folders below count too")],
    batches: Annotated[int, typer.Option(min=1, metavar="N", help="sum up the last N batches")] = BATCHES,
    cores: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="cores of the job; by default as workers were seen")
    ] = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Print rows, state and time of each bucket over the last batches, and say which is too heavy, and what mends it.

    Exits with 1 where something is to be changed.
    """
    loads = loads_of(read_metrics(folder), batches, cores)
    write_table(pa.concat_tables([_rows(it) for it in loads]) if loads else _SCHEMA.empty_table(), output)
    for it in loads:
        say(
            f"operator={it.operator} query={it.query_id} batches={it.batches} buckets={it.job_buckets} "
            f"skew_rows={it.skew.rows:.2f} skew_state={it.skew.state_bytes:.2f} skew_time={it.skew.call_ms:.2f}"
        )
        for line in told(it.findings):
            say(line)
    raise typer.Exit(DONE if all(it.is_even for it in loads) else NO)


_SCHEMA = pa.schema(
    [
        *(("operator", pa.string()), ("query_id", pa.string())),
        *((name, pa.int64()) for name in ("bucket", "calls", "rows", "changed_rows", "top_key_rows", "state_rows")),
        *(("state_bytes", pa.int64()), ("call_ms", pa.float64()), ("finding", pa.string())),
    ]
)


def _rows(it: OperatorLoad) -> pa.Table:
    whose = {"operator": it.operator, "query_id": it.query_id}
    columns = [
        pa.repeat(whose[name], it.buckets.num_rows) if name in whose else it.buckets[name] for name in _SCHEMA.names
    ]
    return pa.table(columns, names=_SCHEMA.names).cast(_SCHEMA)
