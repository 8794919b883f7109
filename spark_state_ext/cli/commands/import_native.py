"""``import-native``: bring a stopped job on Spark's own operator to this package."""

from __future__ import annotations

from typing import Annotated

import pyarrow as pa
import typer

from spark_state_ext.cli.output import Output, say, write_record
from spark_state_ext.cli.parameters import OutputOption, StorageOptions, options_of

__all__ = ["command"]

_IDLE_S = 60.0
_RECORD = pa.schema(
    [
        ("savepoint", pa.string()),
        ("checkpoint", pa.string()),
        ("query_id", pa.string()),
        ("batch", pa.int64()),
        ("replays", pa.bool_()),
        ("watermark", pa.timestamp("ms", "UTC")),
        ("rows", pa.int64()),
        ("states", pa.int64()),
        ("timeouts", pa.int64()),
    ]
)


def command(
    checkpoint: Annotated[str, typer.Argument(metavar="LOCATION", help="the stopped job's checkpointLocation")],
    savepoint: Annotated[str, typer.Argument(help="folder of the savepoint that its state becomes; not there yet")],
    new_checkpoint: Annotated[
        str, typer.Argument(metavar="NEW_LOCATION", help="the new query's checkpointLocation; not there yet, or empty")
    ],
    operator: Annotated[str, typer.Option("--operator", metavar="NAME", help="as the ArrowState to come has it")],
    buckets: Annotated[int, typer.Option(min=1, metavar="N", help="as the ArrowState to come has it")] = 16,
    idle_s: Annotated[float, typer.Option(help="refuse where anything was written this recently")] = _IDLE_S,
    storage_options: StorageOptions = "{}",
    savepoint_options: Annotated[
        str | None,
        typer.Option(metavar="JSON", help="as --storage-options, of the savepoint; by default the same"),
    ] = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Bring a stopped job on Spark's own applyInPandasWithState to this package. Needs PySpark 4.0 or newer.

    The old checkpoint location is only read. Settings and packages that Spark needs come from PYSPARK_SUBMIT_ARGS or
    spark-defaults.conf.
    """
    # PySpark is imported by nothing else here.
    from spark_state_ext.cli.query_folders import session
    from spark_state_ext.cli.sessions import errors_of_tasks, refuse_taken
    from spark_state_ext.engine.options import StateOptions
    from spark_state_ext.engine.start_from import Savepoint
    from spark_state_ext.spark.native.importing import import_native

    options = options_of(storage_options)
    of_savepoint = options if savepoint_options is None else options_of(savepoint_options)
    target = Savepoint(savepoint, storage_options=of_savepoint)
    # Before Spark starts.
    StateOptions(root="/", operator=operator)
    refuse_taken(savepoint, of_savepoint, "the savepoint")
    refuse_taken(new_checkpoint, options, "the new checkpoint location")
    with errors_of_tasks():
        done = import_native(
            session(checkpoint),
            checkpoint,
            target,
            new_checkpoint,
            buckets=buckets,
            operator=operator,
            idle_s=idle_s,
            storage_options=options,
        )
    record = {
        "savepoint": done.savepoint.path,
        "checkpoint": done.checkpoint_location,
        "query_id": done.query_id,
        "batch": done.batch,
        "replays": done.replays,
        "watermark": done.watermark_ms,
        "rows": done.rows,
        "states": done.states,
        "timeouts": done.timeouts,
    }
    write_record(record, _RECORD, output)
    say(f"run the query with start_from=Savepoint({done.savepoint.path!r}) and the new checkpointLocation")
