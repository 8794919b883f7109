"""Where the input of a savepoint's batch ended, as Spark's Kafka source takes it: for a query that goes on from there.

A manifest has Spark's own log of offsets as it is: a line with its version (``v1``; newer Sparks can write ``v2``,
which names each source), a line of metadata, and a line a source, JSON of the source's own; ``-`` where that has read
nothing yet. Each offset is the first that the batch did not read, which is what ``startingOffsets`` asks for.
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

_NOTHING = "-"


def starting_offsets(savepoint: Savepoint | str | os.PathLike[str], source: int | str | None = None) -> str:
    """What a new query gives Spark's Kafka source as ``startingOffsets``, to read on where the old one stopped.

    Parameters
    ----------
    savepoint
        The savepoint, or its path.
    source
        Which of the query's sources, where it had several: its number in the order of the plan, from 0, or the name
        that the query gave it.

    Returns
    -------
    str
        JSON: each topic with its partitions, and for each the first offset that the savepoint's state lacks.

    Raises
    ------
    UsageError
        When the savepoint has no offsets, as it was made of a table, or it is a retained checkpoint; when it is not
        said which source, or there is none of that number or name; or when the source is not Kafka.
    MissingCheckpointError, CorruptFileError, VersionSkewError
        When there is no savepoint that can be read, or a newer Spark wrote its offsets.
    StorageError
        When the store fails.

    Examples
    --------
    >>> spark.readStream.format("kafka").option(  # doctest: +SKIP
    ...     "startingOffsets", starting_offsets("/savepoints/monday")
    ... )
    """
    if isinstance(savepoint, RetainedCheckpoint):
        raise UsageError(
            f"{savepoint} has no offsets that can be told without Spark, and which batch it is, is known when the "
            "query is planned: take a savepoint, and start from that"
        )
    given = savepoint if isinstance(savepoint, Savepoint) else Savepoint(os.fspath(savepoint))
    header = read_manifest(Folder(given.path, given.storage_options)).header
    if header.offsets is None:
        raise UsageError(
            f"the savepoint at {given.path} has no offsets, as it was made of a table: say in startingOffsets yourself "
            "where the new query begins"
        )
    return kafka_offsets(header.offsets, source, f"the savepoint at {given.path}")


def kafka_offsets(log: str, source: int | str | None, where: str) -> str:
    """The same of a log of offsets."""
    sources = _sources(log, where)
    if source is None and len(sources) > 1:
        raise UsageError(
            f"{where} has the offsets of {len(sources)} sources: say which, with source=0 to source={len(sources) - 1}"
        )
    names = list(sources)
    if isinstance(source, str):
        chosen = source
    else:
        at = source or 0
        chosen = names[at] if 0 <= at < len(names) else str(source)
    if chosen not in sources:
        raise UsageError(f"{where} has no source {source!r}; it has {', '.join(names)}")
    text = sources[chosen]
    if text == _NOTHING:
        raise UsageError(
            f"source {chosen} of {where} had read nothing: say in startingOffsets yourself where the new query begins"
        )
    try:
        found = json.loads(text)
    except ValueError:
        found = text
    if not _is_kafkas(found):
        raise UsageError(
            f"source {chosen} of {where} is not Kafka, so it has no startingOffsets: it says {text[:200]}. "
            "docs/operating/savepoints.md says what a new query reads of other sources."
        )
    return json.dumps(found, sort_keys=True, separators=(",", ":"))


def kafka_partitions(log: str, where: str) -> tuple[dict[str, int], bool]:
    """How many partitions each Kafka topic of a query has, and whether there are sources without offsets yet.

    Spark's Kafka source names all partitions of its topics in every batch, also those without new rows.
    """
    counts: dict[str, int] = {}
    unread = False
    for text in _sources(log, where).values():
        if text == _NOTHING:
            unread = True
            continue
        try:
            offsets = json.loads(text)
        except ValueError:
            continue
        for topic, partitions in offsets.items() if _is_kafkas(offsets) else ():
            if {int(number) for number in partitions} != set(range(len(partitions))):
                raise UsageError(
                    f"{where} names the partitions {', '.join(sorted(partitions, key=int))} of topic {topic!r}, and "
                    "not all below them, so it does not show how many the topic has: leave checkpoint_location out if "
                    "the query reads chosen partitions only (Spark's option assign)"
                )
            counts[topic] = max(counts.get(topic, 0), len(partitions))
    return counts, unread


def _sources(log: str, where: str) -> dict[str, str]:
    """Each source's line, by its name; sources without one are numbered."""
    lines = log.splitlines()
    version, lines = (lines[0] if lines else ""), lines[2:]
    if version == "v1" and lines:
        return {str(at): line for at, line in enumerate(lines)}
    if version == "v2" and lines:
        named = [line.partition(":") for line in lines]
        return {name: text for name, _, text in named}
    if version.removeprefix("v").isdigit() and version not in ("v1", "v2"):
        raise VersionSkewError(
            f"{where} has Spark's offsets in format {version}; this release reads v1 and v2. Use a newer "
            "spark_state_ext."
        )
    raise CorruptFileError(f"{where} has no log of offsets of Spark's: {log[:100]!r}")


def _is_kafkas(found: Any) -> bool:
    return (
        isinstance(found, dict)
        and bool(found)
        and all(
            isinstance(partitions, dict)
            and partitions
            and all(number.isdigit() and type(offset) is int for number, offset in partitions.items())
            for partitions in found.values()
        )
    )
