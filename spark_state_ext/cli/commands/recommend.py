"""``recommend``: a number of buckets for a job, and why."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import pyarrow as pa
import typer

from spark_state_ext.cli.output import Output, say, write_record
from spark_state_ext.cli.parameters import OutputOption
from spark_state_ext.reports.choosing import recommend

__all__ = ["command"]

_SCHEMA = pa.schema(
    [
        ("buckets", pa.int64()),
        ("shuffle_partitions", pa.int64()),
        ("batch_cost_s", pa.float64()),
        ("bucket_bytes", pa.int64()),
        ("why", pa.list_(pa.string())),
    ]
)


def command(
    keys: Annotated[int, typer.Option(metavar="N", help="keys that the state will have, at most")],
    bytes_per_key: Annotated[float, typer.Option(metavar="BYTES", help="of a key and its state, on average")],
    batch_interval_s: Annotated[float, typer.Option(metavar="SECONDS", help="from one batch to the next")],
    cores: Annotated[int, typer.Option(metavar="N", help="the most cores that the job will ever have")],
    output: OutputOption = Output.TABLE,
) -> None:
    """Recommend a number of buckets and of shuffle partitions, by what buckets were measured to cost."""
    found = asdict(recommend(keys, bytes_per_key, batch_interval_s, cores))
    if output is not Output.TABLE:
        write_record(found, _SCHEMA, output)
        return
    for reason in found.pop("why"):
        say(reason)
    write_record(found, pa.schema([field for field in _SCHEMA if field.name != "why"]), output)
