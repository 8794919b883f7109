"""Finding keys that lie in several buckets, where buckets go by the partitions of the source.

A key's hash does not tell its bucket there. A source that has grown to a number which its state cannot follow leaves
keys with a state in two buckets, and nothing else shows that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from arrow_schemas.bucket_map import BY_PARTITION, BucketMap
from arrow_schemas.equality import IndexArray, group_by_key
from arrow_schemas.operator import OperatorFile
from arrow_schemas.row import KEY_HASH
from spark_state_ext.cli.targets import Target, bucket_folders
from spark_state_ext.cli.verifying import Check
from spark_state_ext.errors import CannotHoldError, ChangedJobError, CorruptError, PartitionsChangedError
from spark_state_ext.files.folder import Folder
from spark_state_ext.files.operator_catalog import newest_operator
from spark_state_ext.reading.bodies import hashes_in
from spark_state_ext.reading.opening import open_state
from spark_state_ext.reading.shown import BUCKET
from spark_state_ext.reading.state import OpenState
from spark_state_ext.savepoints.manifest_file import read_manifest

__all__ = ["key_checks"]


def key_checks(target: Target, local_dir: str | None, storage_options: dict[str, Any]) -> list[Check]:
    """A check of each state in buckets by partition; none of others, and of what the check of its files reports."""
    found = []
    for folder, operator in _operators(target):
        if operator.bucket_map.by_hash:
            continue
        path, name = (target.folder.root, operator.operator) if target.savepoint else (folder.root, None)
        read = partial(_refuse_keys_in_two_buckets, path, name, local_dir, storage_options)
        found.append(Check(folder.root, "keys", 0, read))
    return found


def _operators(target: Target) -> Iterator[tuple[Folder, OperatorFile]]:
    """Folders of buckets with files, and the operator file in force."""
    # The check of a file that cannot be read reports it.
    if target.savepoint:
        with suppress(CorruptError, ChangedJobError):
            named = read_manifest(target.folder).header.operators
            yield from ((target.folder.child(name), file) for name, file in named.items())
        return
    for query_folder in target.query_folders:
        folder = query_folder.folder
        with suppress(CorruptError, ChangedJobError):
            operator = newest_operator(folder)
            if operator is not None and any(files.names() for _, files in bucket_folders(folder)):
                yield folder, operator


def _refuse_keys_in_two_buckets(
    path: str, operator: str | None, local_dir: str | None, storage_options: dict[str, Any]
) -> None:
    def opened(hold: bool) -> OpenState:
        # The newest state that files have, so that a wrong batch is found soon.
        return open_state(
            path, operator=operator, unproven=True, hold=hold, local_dir=local_dir, storage_options=storage_options
        )

    try:
        state = opened(True)
    except CannotHoldError:
        state = opened(False)
    with state:
        count, example = _keys_in_two_buckets(state)
    if count:
        raise PartitionsChangedError(
            f"{count} keys lie in several buckets, and so have several states, such as {example}: the number of "
            'partitions changed in a way that the state could not follow. See "A number that cannot be followed" in '
            "docs/operating/source-partitions.md"
        )


def _keys_in_two_buckets(state: OpenState) -> tuple[int, str]:
    """How many keys lie in several buckets of one stream, and one of them."""
    count, example = 0, ""
    for buckets in _compared(state.bucket_map):
        for rows in _by_hash(state, buckets):
            keys = [rows.column(at) for at in range(len(state.key_schema))]
            order, starts = group_by_key(hashes_in(rows), keys)
            if not len(starts):
                continue
            places = rows.column(BUCKET).to_numpy()[order]
            least, largest = np.minimum.reduceat(places, starts), np.maximum.reduceat(places, starts)
            several = np.flatnonzero(least != largest)
            if len(several) and not count:
                at = int(starts[several[0]])
                key = {
                    name: column[int(order[at])].as_py() for name, column in zip(rows.schema.names, keys, strict=False)
                }
                example = f"{key} in buckets {least[several[0]]} and {largest[several[0]]}"
            count += len(several)
    return count, example


def _compared(bucket_map: BucketMap) -> list[Sequence[int]]:
    """Buckets of which a key may be in one only."""
    if bucket_map.group_by == BY_PARTITION:
        return [range(bucket_map.buckets)]
    firsts = [(bucket_map.first_of(stream), count) for stream, count in bucket_map.streams]
    return [range(first, first + count) for first, count in firsts]


def _by_hash(state: OpenState, buckets: Sequence[int]) -> Iterator[pa.RecordBatch]:
    """Rows of all buckets together, ascending by hash from batch to batch; all rows of a hash are in one batch.

    Rows with a hash that only one of the buckets has are left out.
    """
    fields = state.columns.fields([*state.key_schema.names, KEY_HASH, BUCKET])

    def of(bucket: int) -> Iterator[pa.RecordBatch]:
        return (state.columns.of(rows, fields, bucket) for rows in state.rows(bucket))

    sources = {bucket: of(bucket) for bucket in buckets}
    held: dict[int, pa.RecordBatch] = {}
    while True:
        for bucket in [it for it in sources if it not in held]:
            following = next(sources[bucket], None)
            if following is None:
                del sources[bucket]
            else:
                held[bucket] = following
        if not held:
            return
        # Up to here all buckets' rows are known: a batch has all rows of its hashes.
        last = min(hashes_in(rows)[-1] for rows in held.values())
        parts = []
        for bucket, rows in list(held.items()):
            end = int(np.searchsorted(hashes_in(rows), last, side="right"))
            parts.append(rows.slice(0, end))
            if end == rows.num_rows:
                del held[bucket]
            else:
                held[bucket] = rows.slice(end)
        hashes = np.concatenate([hashes_in(rows) for rows in parts])
        _, at, times = np.unique(hashes, return_inverse=True, return_counts=True)
        shared: IndexArray = np.flatnonzero(times[at.ravel()] > 1)
        if len(shared):
            together = pa.Table.from_batches([rows for rows in parts if rows.num_rows])
            yield together.take(pa.array(shared)).combine_chunks().to_batches()[0]
