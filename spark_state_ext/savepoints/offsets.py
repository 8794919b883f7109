"""Converts a savepoint's offsets to Spark's Kafka option ``startingOffsets``, for a query that goes on from there.

A manifest contains Spark's own log of offsets, unchanged: a line with its version (``v1``; newer Spark releases may
write ``v2``, which names each source), a line of metadata, and one line for each source, JSON in the source's own
format; ``-`` if the source has read nothing yet. Each offset is the first one that the batch did not read, as
``startingOffsets`` needs it.
"""

from __future__ import annotations

import json
import os
from typing import Any

from spark_state_ext.engine.start_from import RetainedCheckpoint, Savepoint
from spark_state_ext.errors import CorruptFileError, UsageError, VersionSkewError
from spark_state_ext.files.folder import Folder
from spark_state_ext.savepoints.manifest_file import read_manifest

__all__ = ["kafka_offsets", "kafka_partitions", "starting_offsets"]

_NO_OFFSETS = "-"


def starting_offsets(savepoint: Savepoint | str | os.PathLike[str], source: int | str | None = None) -> str:
    """Return ``startingOffsets`` for Spark's Kafka source, so that a new query reads on where the old one stopped.

    Parameters
    ----------
    savepoint
        The savepoint, or its path.
    source
        Which source, if the query had several: its number in the order of the plan, from 0, or the name that the query
        gave it.

    Returns
    -------
    str
        JSON: each topic with its partitions, and for each partition the first offset that is not in the savepoint's
        state.

    Raises
    ------
    UsageError
        If the savepoint has no offsets because it was made from a table, or it is a retained checkpoint; if there are
        several sources and you named none; if there is no source with the number or name; or if it is not Kafka.
    MissingCheckpointError, CorruptFileError, VersionSkewError
        If there is no readable savepoint, or a newer Spark wrote its offsets.
    StorageError
        If the storage fails.

    Examples
    --------
    >>> spark.readStream.format("kafka").option(  # doctest: +SKIP
    ...     "startingOffsets", starting_offsets("/savepoints/monday")
    ... )
    """
    if isinstance(savepoint, RetainedCheckpoint):
        raise UsageError(
            f"{savepoint} is a retained checkpoint: its offsets can only be read by Spark, and its batch is chosen "
            "when the query is planned. Take a savepoint, and start from that"
        )
    chosen = savepoint if isinstance(savepoint, Savepoint) else Savepoint(os.fspath(savepoint))
    header = read_manifest(Folder(chosen.path, chosen.storage_options)).header
    if header.offsets is None:
        raise UsageError(
            f"the savepoint at {chosen.path} has no offsets, because it was made from a table: set startingOffsets "
            "yourself"
        )
    return kafka_offsets(header.offsets, source, f"the savepoint at {chosen.path}")


def kafka_offsets(log: str, source: int | str | None, where: str) -> str:
    """Return ``startingOffsets`` for a source of a log of offsets."""
    sources = _parse_sources(log, where)
    if source is None and len(sources) > 1:
        raise UsageError(
            f"{where} has the offsets of {len(sources)} sources: name one with source=0 to source={len(sources) - 1}"
        )
    names = list(sources)
    if isinstance(source, str):
        chosen = source
    else:
        number = source or 0
        chosen = names[number] if 0 <= number < len(names) else str(source)
    if chosen not in sources:
        raise UsageError(f"{where} has no source {source!r}; it has {', '.join(names)}")
    text = sources[chosen]
    if text == _NO_OFFSETS:
        raise UsageError(f"source {chosen} of {where} had read nothing: set startingOffsets yourself")
    try:
        offsets = json.loads(text)
    except ValueError:
        offsets = text
    if not _is_kafka(offsets):
        raise UsageError(
            f"source {chosen} of {where} is not Kafka, so it has no startingOffsets. Its offsets are {text[:200]}. "
            "docs/operating/savepoints.md explains what a new query reads from other sources."
        )
    return json.dumps(offsets, sort_keys=True, separators=(",", ":"))


def kafka_partitions(log: str, where: str) -> tuple[dict[str, int], bool]:
    """Count the partitions of each Kafka topic of a query; also return True if a source has no offsets yet.

    Spark's Kafka source lists all partitions of its topics in every batch, including partitions without new rows.
    """
    counts: dict[str, int] = {}
    unread = False
    for text in _parse_sources(log, where).values():
        if text == _NO_OFFSETS:
            unread = True
            continue
        try:
            offsets = json.loads(text)
        except ValueError:
            continue
        for topic, partitions in offsets.items() if _is_kafka(offsets) else ():
            if {int(number) for number in partitions} != set(range(len(partitions))):
                raise UsageError(
                    f"{where} has the partitions {', '.join(sorted(partitions, key=int))} of topic {topic!r}, but "
                    "not all lower ones, so the number of the topic's partitions is unknown: omit checkpoint_location "
                    "if the query reads only chosen partitions (Spark's option assign)"
                )
            counts[topic] = max(counts.get(topic, 0), len(partitions))
    return counts, unread


def _parse_sources(log: str, where: str) -> dict[str, str]:
    """Return each source's line by its name; sources without a name are numbered."""
    lines = log.splitlines()
    version, lines = (lines[0] if lines else ""), lines[2:]
    if version == "v1" and lines:
        return {str(number): line for number, line in enumerate(lines)}
    if version == "v2" and lines:
        fields = [line.partition(":") for line in lines]
        return {name: text for name, _, text in fields}
    if version.removeprefix("v").isdigit() and version not in ("v1", "v2"):
        raise VersionSkewError(
            f"{where} has Spark's offsets in format {version}; this release reads v1 and v2. Use a newer "
            "spark_state_ext."
        )
    raise CorruptFileError(f"{where} has no readable log of Spark offsets: {log[:100]!r}")


def _is_kafka(offsets: Any) -> bool:
    return (
        isinstance(offsets, dict)
        and bool(offsets)
        and all(
            isinstance(partitions, dict)
            and partitions
            and all(number.isdigit() and type(offset) is int for number, offset in partitions.items())
            for partitions in offsets.values()
        )
    )
