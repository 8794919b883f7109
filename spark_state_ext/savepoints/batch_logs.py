"""The logs of a Spark checkpoint, as its files have them: which batch a stopped query goes on with. Pure functions.

A batch *b* is planned by ``offsets/<b>`` and committed by ``commits/<b>``. Both have a line with a version, then a line
of JSON; offsets have a line more for each source. The query's state after batch *b* is its version *b* + 1.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from spark_state_ext.errors import CorruptFileError, MissingCheckpointError, VersionSkewError

__all__ = [
    "LoggedBatch",
    "checkpoint_format_of",
    "last_committed",
    "needed_offsets",
    "parsed_batch",
    "with_state_ids",
]

_VERSIONS = ("v1", "v2")


@dataclass(frozen=True)
class LoggedBatch:
    """The last committed batch of a query.

    Parameters
    ----------
    batch
        Its number.
    planned
        Whether the next batch is planned, and so must be run as it was planned.
    watermark_ms
        The batch's watermark; None: it had none yet.
    conf
        What Spark keeps of the query's configuration.
    state_ids
        Ids of the state of each operator, partition and store, under checkpoint format 2; else empty.
    """

    batch: int
    planned: bool
    watermark_ms: int | None
    conf: Mapping[str, str]
    state_ids: Mapping[str, Any]

    @property
    def checkpoint_format(self) -> int:
        """Spark's number of the format of the batch's state."""
        return 2 if self.state_ids else 1


def last_committed(offsets: frozenset[int], commits: frozenset[int], where: str) -> tuple[int, bool]:
    """The last committed batch, and whether the one after it is planned."""
    if not commits:
        raise MissingCheckpointError(
            f"{where} has no committed batch, so there is no state to import: start the query on this package as it "
            "is, from a new checkpoint location"
        )
    last, planned = max(commits), max(offsets, default=-1)
    if planned not in (last, last + 1):
        raise CorruptFileError(
            f"{where} is damaged: batch {last} is the last in commits/, and {planned} the last in offsets/. Bring the "
            "missing files back"
        )
    lacking = sorted(set(needed_offsets(last, planned > last)) - offsets)
    if lacking:
        raise CorruptFileError(f"{where} is damaged: it lacks offsets/{lacking[0]}. Bring the file back")
    return last, planned > last


def needed_offsets(batch: int, planned: bool) -> tuple[int, ...]:
    """Batches whose offsets Spark reads to go on after one."""
    if planned:
        return batch, batch + 1
    return (batch - 1, batch) if batch else (batch,)


def parsed_batch(batch: int, planned: bool, offsets: Mapping[int, str], commit: str, where: str) -> LoggedBatch:
    """What the logs tell of the last committed batch."""
    sources = set()
    for number, text in offsets.items():
        _, lines = _parsed(text, f"{where}/offsets/{number}")
        sources.add(len(lines))
        if not lines:
            raise CorruptFileError(f"{where}/offsets/{number} has no source, so it is cut short. Bring the file back")
    if len(sources) > 1:
        raise CorruptFileError(f"{where}/offsets has files of {sorted(sources)} sources. Bring the right files back")
    metadata, _ = _parsed(offsets[batch], f"{where}/offsets/{batch}")
    committed, _ = _parsed(commit, f"{where}/commits/{batch}")
    watermark_ms, conf = metadata.get("batchWatermarkMs"), metadata.get("conf")
    if type(watermark_ms) is not int or not isinstance(conf, dict):
        raise CorruptFileError(f"{where}/offsets/{batch} tells no watermark or no configuration of the query")
    return LoggedBatch(
        batch,
        planned,
        watermark_ms or None,
        {str(name): str(value) for name, value in conf.items()},
        committed.get("stateUniqueIds") or {},
    )


def checkpoint_format_of(commit: str, where: str) -> int:
    """Spark's number of the format in which a committed batch has left its state."""
    return 2 if _parsed(commit, where)[0].get("stateUniqueIds") else 1


def with_state_ids(commit: str, written: str, where: str) -> str:
    """A commit log that names the state of another one."""
    metadata, _ = _parsed(commit, where)
    ids = _parsed(written, "the commit log of the batch that wrote the marks")[0].get("stateUniqueIds")
    if bool(ids) != bool(metadata.get("stateUniqueIds")):
        raise CorruptFileError(f"{where} and the state that was written are of different checkpoint formats")
    if not ids:
        return commit
    return f"{commit.splitlines()[0]}\n{json.dumps({**metadata, 'stateUniqueIds': ids}, separators=(',', ':'))}"


def _parsed(text: str, where: str) -> tuple[dict[str, Any], list[str]]:
    """The JSON of a log's second line, and the lines after it."""
    lines = text.splitlines()
    version = lines[0] if lines else ""
    if version not in _VERSIONS and version.startswith("v") and version[1:].isdigit():
        raise VersionSkewError(f"{where} is of format {version}; this release reads v1 and v2. Use a newer release.")
    try:
        found = json.loads(lines[1]) if version in _VERSIONS else None
    except (IndexError, ValueError):
        found = None
    if not isinstance(found, dict):
        raise CorruptFileError(f"{where} is no log of Spark's that can be read: {text[:100]!r}. Bring the file back")
    return found, lines[2:]
