"""The commands import-native and export-native: to and from Spark's own operators, with Spark."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from spark_state_ext.cli.options import IdleOption, OperatorOption, OutputOption, StorageOptions, make_json_option
from spark_state_ext.cli.output import Output, parse_columns, say, write_record
from spark_state_ext.cli.paths import make_absolute, open_folder
from spark_state_ext.errors import UsageError

__all__ = ["export_native", "import_native"]

_IDLE_S = 60.0
_IMPORT_COLUMNS = parse_columns(
    "savepoint, checkpoint, query_id, batch int, replays bool, watermark time_ms, rows int, states int, timeouts int"
)
_EXPORT_COLUMNS = parse_columns("path, operator, key texts, columns texts, rows int")


def import_native(
    checkpoint: Annotated[str, typer.Argument(metavar="LOCATION", help="the stopped job's checkpointLocation")],
    savepoint: Annotated[str, typer.Argument(help="folder of the new savepoint with its state; must not exist yet")],
    new_checkpoint: Annotated[
        str,
        typer.Argument(
            metavar="NEW_LOCATION", help="the new query's checkpointLocation; must not exist yet, or be empty"
        ),
    ],
    operator: Annotated[str, typer.Option("--operator", metavar="NAME", help="operator of the new ArrowState")],
    buckets: Annotated[int, typer.Option(min=1, metavar="N", help="buckets of the new ArrowState")] = 16,
    idle_s: IdleOption = _IDLE_S,
    *,
    storage_options: StorageOptions,
    savepoint_options: Annotated[
        dict[str, Any] | None, make_json_option("the savepoint; by default the same options")
    ] = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Bring a stopped job on Spark's own applyInPandasWithState to this package. Needs PySpark 4.0 or newer.

    The old checkpoint location is only read. Settings and packages that Spark needs come from PYSPARK_SUBMIT_ARGS or
    spark-defaults.conf.
    """
    # Imported here, so that other commands start without PySpark.
    from spark_state_ext.cli.sessions import get_session, refuse_occupied, unwrap_task_errors
    from spark_state_ext.engine.options import StateOptions
    from spark_state_ext.engine.start_from import Savepoint
    from spark_state_ext.spark.native.job_import import import_native as import_from_spark

    target_options = storage_options if savepoint_options is None else savepoint_options
    target = Savepoint(savepoint, storage_options=target_options)
    # Check the arguments before Spark starts.
    StateOptions(root="/", operator=operator)
    refuse_occupied(savepoint, target_options, "the savepoint")
    refuse_occupied(new_checkpoint, storage_options, "the new checkpoint location")
    with unwrap_task_errors():
        imported = import_from_spark(
            get_session(checkpoint),
            checkpoint,
            target,
            new_checkpoint,
            buckets=buckets,
            operator=operator,
            idle_s=idle_s,
            storage_options=storage_options,
        )
    record = {name: getattr(imported, name) for name in ("query_id", "batch", "replays", "rows", "states", "timeouts")}
    record |= {
        "savepoint": imported.savepoint.path,
        "checkpoint": imported.checkpoint_location,
        "watermark": imported.watermark_ms,
    }
    write_record(record, _IMPORT_COLUMNS, output)
    say(f"run the query with start_from=Savepoint({imported.savepoint.path!r}) and the new checkpointLocation")


def export_native(
    savepoint: Annotated[str, typer.Argument(help="the savepoint's folder: an absolute path or a URL")],
    to: Annotated[str, typer.Argument(metavar="TARGET", help="folder for Parquet files; must not exist yet")],
    operator: OperatorOption = None,
    target_operator: Annotated[
        str, typer.Option("--for", metavar="OPERATOR", help="Spark's operator that will take it")
    ] = "transformWithState",
    *,
    storage_options: StorageOptions,
    output: OutputOption = Output.TABLE,
) -> None:
    """Write a savepoint's state in the form that Spark's own transformWithState takes. Needs PySpark 4.0 or newer.

    A job gives the rows to its operator, grouped by their key: initialState=spark.read.parquet(TARGET).groupBy(key).
    """
    # Imported here, so that other commands start without PySpark.
    from spark_state_ext.cli.sessions import find_local_path, get_session, unwrap_task_errors
    from spark_state_ext.engine.start_from import Savepoint
    from spark_state_ext.savepoints.manifest_file import read_manifest
    from spark_state_ext.savepoints.saved_rows import choose_operator
    from spark_state_ext.spark.client.tables import read_savepoint
    from spark_state_ext.spark.native.savepoint_export import export_native as check_export
    from spark_state_ext.spark.native.savepoint_export import refuse_operator

    folder = open_folder(make_absolute(savepoint), storage_options)
    manifest = read_manifest(folder)
    name = choose_operator(manifest, operator, folder.root)
    source = Savepoint(folder.root, operator=name, storage_options=storage_options)
    # Check the arguments before Spark starts.
    refuse_operator(target_operator)
    if (path := find_local_path(to)) is not None and path.exists():
        raise UsageError(f"{to} exists already: give a folder that does not exist yet")
    with unwrap_task_errors():
        spark = get_session()
        # This only refuses what cannot be exported; the rows are read below, as a table.
        check_export(spark, source, to=target_operator)
        rows = read_savepoint(spark, source)
        rows.write.parquet(to)
        count = spark.read.parquet(to).count()
    keys = [field.name for field in manifest.header.operators[name].row_schema().keys]
    record = {"path": to, "operator": name, "key": keys, "columns": rows.columns, "rows": count}
    write_record(record, _EXPORT_COLUMNS, output)
    key_list = ", ".join(map(repr, keys))
    say(f"give them to the operator: initialState=spark.read.parquet({to!r}).groupBy({key_list})")
