"""``rescale``: a savepoint with more or fewer buckets, without Spark."""

from __future__ import annotations

from typing import Annotated

import pyarrow as pa
import typer

from arrow_schemas.bucket_map import HASH, BucketMap
from arrow_schemas.savepoint import SavedBucket
from spark_state_ext.cli.output import Output, progress, say, table_of, write_table
from spark_state_ext.cli.parameters import OutputOption, StorageOptions, options_for, options_of
from spark_state_ext.cli.targets import given_folder
from spark_state_ext.errors import UsageError
from spark_state_ext.files.folder import Folder
from spark_state_ext.rescale.savepoints import rescaling_of, write_rescaled
from spark_state_ext.savepoints.manifest_file import read_manifest
from spark_state_ext.savepoints.reading import operator_named

__all__ = ["command"]

_ROWS = pa.schema([("operator", pa.string()), ("bucket", pa.int64()), ("rows", pa.int64()), ("bytes", pa.int64())])


def command(
    path: Annotated[str, typer.Argument(metavar="SAVEPOINT", help="the savepoint's folder: a path or a URL")],
    to: Annotated[str, typer.Argument(metavar="NEW_SAVEPOINT", help="folder of the new one, which does not exist yet")],
    buckets: Annotated[
        int | None, typer.Option(metavar="N", help="how many; with --split alone as many as there are")
    ] = None,
    split: Annotated[
        list[str] | None, typer.Option(metavar="B=K", help="split bucket B of these into K; may be given again")
    ] = None,
    operator: Annotated[str | None, typer.Option(metavar="NAME", help="this one only; others stay as they are")] = None,
    storage_options: StorageOptions = "{}",
    to_options: Annotated[str, options_for("the new one")] = "{}",
    output: OutputOption = Output.TABLE,
) -> None:
    """Write a savepoint anew with more or fewer buckets, or one bucket split alone, without Spark.

    Rows, timeouts, batch, watermark, offsets and times to live stay. All rows are read back and compared before it says
    done. Run it again where it was stopped: it goes on. Prints the new buckets.
    """
    source = given_folder(path, options_of(storage_options))
    target = given_folder(to, options_of(to_options))
    into = _into(split or [])
    if buckets is None:
        buckets = _buckets_of(source, operator, into)
    wanted = rescaling_of(source, BucketMap.split(buckets, into), operator)
    made: list[SavedBucket] = []
    with progress("rescaling", wanted.buckets) as advance:

        def on_bucket(bucket: SavedBucket) -> None:
            made.append(bucket)
            advance(1)

        done = write_rescaled(source, target, wanted, on_bucket)
    rows = [_row(it) for it in made if it.operator in done.operators]
    write_table(table_of(rows, _ROWS), output)
    for it in done.operators.values():
        say(
            f"operator={it.operator} buckets={it.before.buckets}->{it.after.buckets} rows={it.rows} "
            f"checksum={it.checksum}"
        )
    say(f"to={target.root}")
    say(f"a job starts from it with {_argument(buckets, into)}")


def _into(given: list[str]) -> dict[int, int]:
    found: dict[int, int] = {}
    for text in given:
        bucket, _, parts = text.partition("=")
        if not (bucket.isdecimal() and parts.isdecimal()):
            raise UsageError(
                f"--split must be the number of a bucket and how many it becomes, such as 3=4, not {text!r}"
            )
        if int(bucket) in found:
            raise UsageError(f"--split names bucket {int(bucket)} twice")
        found[int(bucket)] = int(parts)
    return found


def _buckets_of(source: Folder, operator: str | None, into: dict[int, int]) -> int:
    """How many buckets there are, of which some are to be split."""
    if not into:
        raise UsageError("give --buckets, --split or both: how many buckets there are to be")
    manifest = read_manifest(source)
    operators = manifest.header.operators
    names = list(operators) if operator is None else [operator_named(manifest, operator, source.root)]
    maps = {operators[name].bucket_map for name in names}
    (found, *others) = maps
    if others or found.kind != HASH:
        told = " and ".join(sorted(str(it) for it in maps))
        raise UsageError(
            f"the savepoint at {source.root} has {told}: say with --buckets of how many one is to be split"
        )
    return found.buckets


def _row(bucket: SavedBucket) -> dict[str, object]:
    size = sum(file.size_bytes for file in bucket.files)
    return {"operator": bucket.operator, "bucket": bucket.bucket, "rows": bucket.pointer.rows, "bytes": size}


def _argument(buckets: int, into: dict[int, int]) -> str:
    made = BucketMap.split(buckets, into)
    if made.kind == HASH:
        return f"buckets={made.buckets}"
    return f"bucket_by=BucketMap.split({buckets}, {into})"
