"""``export-native``: write what Spark's own ``transformWithState`` takes as its initial state."""

from __future__ import annotations

from typing import Annotated

import pyarrow as pa
import typer

from spark_state_ext.cli.output import Output, say, write_record
from spark_state_ext.cli.parameters import OutputOption, StorageOptions, options_of
from spark_state_ext.cli.targets import absolute, given_folder
from spark_state_ext.errors import UsageError

__all__ = ["command"]

_RECORD = pa.schema(
    [
        ("path", pa.string()),
        ("operator", pa.string()),
        ("key", pa.list_(pa.string())),
        ("columns", pa.list_(pa.string())),
        ("rows", pa.int64()),
    ]
)


def command(
    savepoint: Annotated[str, typer.Argument(help="the savepoint's folder: an absolute path or a URL")],
    to: Annotated[str, typer.Argument(metavar="TARGET", help="a folder of Parquet files, not there yet")],
    operator: Annotated[str | None, typer.Option(metavar="NAME", help="which one, where there are several")] = None,
    target_operator: Annotated[
        str, typer.Option("--for", metavar="OPERATOR", help="Spark's operator that takes it")
    ] = "transformWithState",
    storage_options: StorageOptions = "{}",
    output: OutputOption = Output.TABLE,
) -> None:
    """Write a savepoint's state as Spark's own transformWithState takes it. Needs PySpark 4.0 or newer.

    A job gives the rows to its operator, grouped by their key: initialState=spark.read.parquet(TARGET).groupBy(key).
    """
    # PySpark is imported by nothing else here.
    from spark_state_ext.cli.query_folders import session
    from spark_state_ext.cli.sessions import errors_of_tasks, local_path
    from spark_state_ext.engine.start_from import Savepoint
    from spark_state_ext.savepoints.manifest_file import read_manifest
    from spark_state_ext.savepoints.reading import operator_named
    from spark_state_ext.spark.client.tables import read_savepoint
    from spark_state_ext.spark.native.exporting import export_native, refuse_operator

    options = options_of(storage_options)
    folder = given_folder(absolute(savepoint), options)
    manifest = read_manifest(folder)
    name = operator_named(manifest, operator, folder.root)
    given = Savepoint(folder.root, operator=name, storage_options=options)
    # Before Spark starts.
    refuse_operator(target_operator)
    if (path := local_path(to)) is not None and path.exists():
        raise UsageError(f"there is {to} already: give a folder that does not exist yet")
    with errors_of_tasks():
        spark = session()
        # It refuses what cannot be exported, and its rows are those of the table.
        export_native(spark, given, to=target_operator)
        rows = read_savepoint(spark, given)
        rows.write.parquet(to)
        count = spark.read.parquet(to).count()
    keys = [field.name for field in manifest.header.operators[name].row_schema().keys]
    record = {"path": to, "operator": name, "key": keys, "columns": rows.columns, "rows": count}
    write_record(record, _RECORD, output)
    by = ", ".join(map(repr, keys))
    say(f"give them to the operator: initialState=spark.read.parquet({to!r}).groupBy({by})")
