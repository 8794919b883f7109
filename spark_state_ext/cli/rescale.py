"""The commands rescale and recommend, about the number of buckets."""

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
from spark_state_ext.reports import recommendation
from spark_state_ext.rescale.rescaled_savepoint import plan_rescaling, write_rescaled
from spark_state_ext.savepoints.manifest_file import read_manifest
from spark_state_ext.savepoints.saved_rows import choose_operator

__all__ = ["recommend", "rescale"]

_BUCKET_COLUMNS = parse_columns("operator, bucket int, rows int, bytes int")
_RECOMMENDATION_COLUMNS = "buckets int, shuffle_partitions int, batch_cost_s float, bucket_bytes int"


def rescale(
    path: Annotated[str, typer.Argument(metavar="SAVEPOINT", help="the savepoint's folder: a path or a URL")],
    to: Annotated[str, typer.Argument(metavar="NEW_SAVEPOINT", help="the new savepoint's folder; must not exist yet")],
    buckets: Annotated[
        int | None,
        typer.Option(metavar="N", help="number of equal buckets; with --split, by default as many as there are"),
    ] = None,
    split: Annotated[
        list[str] | None, typer.Option(metavar="B=K", help="split bucket B of these into K; may be given several times")
    ] = None,
    operator: Annotated[
        str | None, typer.Option(metavar="NAME", help="rescale only this operator, copy others")
    ] = None,
    *,
    storage_options: StorageOptions,
    to_options: Annotated[dict[str, Any], make_json_option("the new savepoint")],
    output: OutputOption = Output.TABLE,
) -> None:
    """Write a new savepoint with more or fewer buckets, or with only some buckets split, without Spark.

    Rows, timeouts, batch, watermark, offsets and times to live stay the same. All rows are read back and compared
    before it reports success. If it is interrupted, run it again: it continues. Prints the new buckets.
    """
    source, target = open_folder(path, storage_options), open_folder(to, to_options)
    parts_of = _parse_splits(split or [])
    if buckets is None:
        buckets = _count_buckets(source, operator, parts_of)
    bucket_map = BucketMap.split(buckets, parts_of)
    rescaling = plan_rescaling(source, bucket_map, operator)
    written: list[SavedBucket] = []
    with show_progress("rescaling", rescaling.buckets) as advance:

        def on_bucket(bucket: SavedBucket) -> None:
            written.append(bucket)
            advance(1)

        result = write_rescaled(source, target, rescaling, on_bucket)
    write_records(
        [_build_row(bucket) for bucket in written if bucket.operator in result.operators], _BUCKET_COLUMNS, output
    )
    for rescaled in result.operators.values():
        say(
            f"operator={rescaled.operator} buckets={rescaled.before.buckets}->{rescaled.after.buckets} "
            f"rows={rescaled.rows} checksum={rescaled.checksum}"
        )
    say(f"to={target.root}")
    is_hash_map = bucket_map.kind == HASH
    argument = f"buckets={bucket_map.buckets}" if is_hash_map else f"bucket_by=BucketMap.split({buckets}, {parts_of})"
    say(f"start a job from it with {argument}")


def _parse_splits(texts: list[str]) -> dict[int, int]:
    """Parse the ``--split`` options: return how many buckets each split bucket becomes."""
    parts_of: dict[int, int] = {}
    for text in texts:
        bucket, _, parts = text.partition("=")
        if not (bucket.isdecimal() and parts.isdecimal()):
            raise UsageError(
                f"--split must be a bucket and the number of buckets it becomes, such as 3=4, not {text!r}"
            )
        if int(bucket) in parts_of:
            raise UsageError(f"--split names bucket {int(bucket)} twice")
        parts_of[int(bucket)] = int(parts)
    return parts_of


def _count_buckets(source: Folder, operator: str | None, parts_of: dict[int, int]) -> int:
    """Return the number of equal buckets that a savepoint has, for ``--split`` without ``--buckets``."""
    if not parts_of:
        raise UsageError("give --buckets, --split or both, to say how many buckets the new savepoint has")
    manifest = read_manifest(source)
    operators = manifest.header.operators
    names = list(operators) if operator is None else [choose_operator(manifest, operator, source.root)]
    maps = {operators[name].bucket_map for name in names}
    (first, *others) = maps
    if others or first.kind != HASH:
        maps_text = " and ".join(sorted(str(bucket_map) for bucket_map in maps))
        raise UsageError(
            f"the savepoint at {source.root} has {maps_text}: give --buckets, the number of equal buckets before the "
            "split"
        )
    return first.buckets


def _build_row(bucket: SavedBucket) -> dict[str, object]:
    size = sum(file.size_bytes for file in bucket.files)
    return {"operator": bucket.operator, "bucket": bucket.bucket, "rows": bucket.pointer.rows, "bytes": size}


def recommend(
    keys: Annotated[int, typer.Option(metavar="N", help="the most keys that the state will ever have")],
    bytes_per_key: Annotated[float, typer.Option(metavar="BYTES", help="average size of a key with its state")],
    batch_interval_s: Annotated[float, typer.Option(metavar="SECONDS", help="time from one batch to the next")],
    cores: Annotated[int, typer.Option(metavar="N", help="the most cores that the job will ever have")],
    output: OutputOption = Output.TABLE,
) -> None:
    """Recommend a number of buckets and of shuffle partitions, from the measured cost of buckets."""
    record = asdict(recommendation.recommend(keys, bytes_per_key, batch_interval_s, cores))
    if output is Output.TABLE:
        for reason in record["why"]:
            say(reason)
        write_record(record, parse_columns(_RECOMMENDATION_COLUMNS), output)
    else:
        write_record(record, parse_columns(f"{_RECOMMENDATION_COLUMNS}, why texts"), output)
