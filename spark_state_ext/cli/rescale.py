"""Rescale and recommend: how many buckets a job has, and should have."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer

from arrow_schemas.bucket_map import HASH, BucketMap
from arrow_schemas.savepoint import SavedBucket
from spark_state_ext.cli.options import OutputOption, StorageOptions, make_json_option
from spark_state_ext.cli.output import Output, parse_columns, say, show_progress, write_record, write_records
from spark_state_ext.cli.paths import open_folder
from spark_state_ext.errors import UsageError
from spark_state_ext.files.folder import Folder
from spark_state_ext.reports import choosing
from spark_state_ext.rescale.savepoints import rescaling_of, write_rescaled
from spark_state_ext.savepoints.manifest_file import read_manifest
from spark_state_ext.savepoints.reading import operator_named

__all__ = ["recommend", "rescale"]

_RESCALED = parse_columns("operator, bucket int, rows int, bytes int")
_RECOMMENDED = "buckets int, shuffle_partitions int, batch_cost_s float, bucket_bytes int"


def rescale(
    path: Annotated[str, typer.Argument(metavar="SAVEPOINT", help="the savepoint's folder: a path or a URL")],
    to: Annotated[str, typer.Argument(metavar="NEW_SAVEPOINT", help="folder of the new one, which does not exist yet")],
    buckets: Annotated[
        int | None, typer.Option(metavar="N", help="how many; with --split alone as many as there are")
    ] = None,
    split: Annotated[
        list[str] | None, typer.Option(metavar="B=K", help="split bucket B of these into K; may be given again")
    ] = None,
    operator: Annotated[str | None, typer.Option(metavar="NAME", help="this one only; others stay as they are")] = None,
    *,
    storage_options: StorageOptions,
    to_options: Annotated[dict[str, Any], make_json_option("the new one")],
    output: OutputOption = Output.TABLE,
) -> None:
    """Write a savepoint anew with more or fewer buckets, or one bucket split alone, without Spark.

    Rows, timeouts, batch, watermark, offsets and times to live stay. All rows are read back and compared before it says
    done. Run it again where it was stopped: it goes on. Prints the new buckets.
    """
    source, target = open_folder(path, storage_options), open_folder(to, to_options)
    into = _into(split or [])
    if buckets is None:
        buckets = _buckets_of(source, operator, into)
    bucket_map = BucketMap.split(buckets, into)
    wanted = rescaling_of(source, bucket_map, operator)
    made: list[SavedBucket] = []
    with show_progress("rescaling", wanted.buckets) as advance:

        def on_bucket(bucket: SavedBucket) -> None:
            made.append(bucket)
            advance(1)

        done = write_rescaled(source, target, wanted, on_bucket)
    write_records([_row(it) for it in made if it.operator in done.operators], _RESCALED, output)
    for it in done.operators.values():
        say(
            f"operator={it.operator} buckets={it.before.buckets}->{it.after.buckets} rows={it.rows} "
            f"checksum={it.checksum}"
        )
    say(f"to={target.root}")
    plain = bucket_map.kind == HASH
    argument = f"buckets={bucket_map.buckets}" if plain else f"bucket_by=BucketMap.split({buckets}, {into})"
    say(f"a job starts from it with {argument}")


def _into(given: list[str]) -> dict[int, int]:
    """What ``--split`` says: how many buckets a bucket becomes."""
    parts_of: dict[int, int] = {}
    for text in given:
        bucket, _, parts = text.partition("=")
        if not (bucket.isdecimal() and parts.isdecimal()):
            raise UsageError(
                f"--split must be the number of a bucket and how many it becomes, such as 3=4, not {text!r}"
            )
        if int(bucket) in parts_of:
            raise UsageError(f"--split names bucket {int(bucket)} twice")
        parts_of[int(bucket)] = int(parts)
    return parts_of


def _buckets_of(source: Folder, operator: str | None, into: dict[int, int]) -> int:
    """How many buckets there are, of which some are to be split."""
    if not into:
        raise UsageError("give --buckets, --split or both: how many buckets there are to be")
    manifest = read_manifest(source)
    operators = manifest.header.operators
    names = list(operators) if operator is None else [operator_named(manifest, operator, source.root)]
    maps = {operators[name].bucket_map for name in names}
    (first, *others) = maps
    if others or first.kind != HASH:
        told = " and ".join(sorted(str(it) for it in maps))
        raise UsageError(
            f"the savepoint at {source.root} has {told}: say with --buckets of how many one is to be split"
        )
    return first.buckets


def _row(bucket: SavedBucket) -> dict[str, object]:
    size = sum(file.size_bytes for file in bucket.files)
    return {"operator": bucket.operator, "bucket": bucket.bucket, "rows": bucket.pointer.rows, "bytes": size}


def recommend(
    keys: Annotated[int, typer.Option(metavar="N", help="keys that the state will have, at most")],
    bytes_per_key: Annotated[float, typer.Option(metavar="BYTES", help="of a key and its state, on average")],
    batch_interval_s: Annotated[float, typer.Option(metavar="SECONDS", help="from one batch to the next")],
    cores: Annotated[int, typer.Option(metavar="N", help="the most cores that the job will ever have")],
    output: OutputOption = Output.TABLE,
) -> None:
    """Recommend a number of buckets and of shuffle partitions, by what buckets were measured to cost."""
    record = asdict(choosing.recommend(keys, bytes_per_key, batch_interval_s, cores))
    if output is Output.TABLE:
        for reason in record["why"]:
            say(reason)
        write_record(record, parse_columns(_RECOMMENDED), output)
    else:
        write_record(record, parse_columns(f"{_RECOMMENDED}, why texts"), output)
