"""``savepoint create``: take a savepoint of a query, with a Spark session that is made for it."""

from __future__ import annotations

from typing import Annotated

import pyarrow as pa
import typer

from arrow_schemas.savepoint import CANONICAL, NATIVE
from spark_state_ext.cli.output import Output, write_record
from spark_state_ext.cli.parameters import OutputOption, StorageOptions, options_for, options_of
from spark_state_ext.cli.roots import operators_below
from spark_state_ext.cli.targets import absolute, given_folder
from spark_state_ext.errors import MissingCheckpointError, UsageError

__all__ = ["command"]

_RECORD = pa.schema(
    [
        ("path", pa.string()),
        ("id", pa.string()),
        ("form", pa.string()),
        ("batch", pa.int64()),
        ("watermark", pa.timestamp("ms", "UTC")),
        ("operators", pa.list_(pa.string())),
        ("files", pa.int64()),
        ("bytes", pa.int64()),
        ("duplicated", pa.int64()),
        ("streamed", pa.int64()),
    ]
)


def command(
    path: Annotated[str, typer.Argument(help="the savepoint's folder, which does not exist yet: a path or a URL")],
    checkpoint: Annotated[str, typer.Option(metavar="LOCATION", help="the query's checkpointLocation")],
    root: Annotated[str, typer.Option(metavar="ROOT", help="root of the query's ArrowState")],
    form: Annotated[str, typer.Option(metavar="FORM", help="native (files as they are) or canonical")] = "native",
    batch: Annotated[int | None, typer.Option(metavar="N", help="the batch; by default the last committed")] = None,
    verify: Annotated[bool, typer.Option("--verify", help="read every file to the last byte")] = False,
    storage_options: StorageOptions = "{}",
    root_options: Annotated[str, options_for("the root")] = "{}",
    output: OutputOption = Output.TABLE,
) -> None:
    """Take a savepoint of a query, which may run meanwhile. Needs PySpark 4.0 or newer.

    Settings and packages that Spark needs come from PYSPARK_SUBMIT_ARGS or spark-defaults.conf.
    """
    # PySpark is imported by nothing else here.
    from spark_state_ext.cli.query_folders import session
    from spark_state_ext.cli.sessions import errors_of_tasks, refuse_taken
    from spark_state_ext.spark.client.savepoints import take_savepoint
    from spark_state_ext.spark.client.state import ArrowState
    from spark_state_ext.spark.client.state_reader import StateReader

    # Tasks have other working folders. (What a relative location means to Spark is left to Spark.)
    path, root = absolute(path), absolute(root)
    options, of_root = options_of(storage_options), options_of(root_options)
    # Before Spark starts.
    if form not in (NATIVE, CANONICAL):
        raise UsageError(f"--form must be {NATIVE} or {CANONICAL}, not {form!r}")
    operators_below(given_folder(root, of_root))
    refuse_taken(path, options, "the savepoint")
    spark = session(checkpoint)
    operators = sorted({it.operator for it in StateReader(spark, checkpoint).stores()})
    if not operators:
        raise MissingCheckpointError(
            f"{checkpoint} has no state of spark_state_ext: give Spark's checkpointLocation of a query that has "
            "committed a batch with data"
        )
    states = [ArrowState(root, name, storage_options=of_root) for name in operators]
    with errors_of_tasks():
        taken = take_savepoint(
            spark, path, checkpoint, states, form=form, batch=batch, verify=verify, storage_options=options
        )
    record = {
        "path": taken.path,
        "id": taken.id,
        "form": taken.form,
        "batch": taken.batch,
        "watermark": taken.watermark_ms,
        "operators": operators,
        "files": taken.files,
        "bytes": taken.size_bytes,
        "duplicated": taken.duplicated,
        "streamed": taken.streamed,
    }
    write_record(record, _RECORD, output)
