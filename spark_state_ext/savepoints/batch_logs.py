"""Parses the logs of a Spark checkpoint: which batch a stopped query goes on with. Pure functions.

A batch *b* is planned by ``offsets/<b>`` and committed by ``commits/<b>``. Both have a line with a version, then a line
of JSON; offsets have one more line for each source. The query's state after batch *b* has the version *b* + 1.
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
    "find_last_committed",
    "needed_offsets",
    "parse_batch",
    "replace_state_ids",
]

_VERSIONS = ("v1", "v2")


@dataclass(frozen=True)
class LoggedBatch:
    """The last committed batch of a query.

    Parameters
    ----------
    batch
        The batch's number.
    planned
        True if the next batch is already planned, so that it must run as planned.
    watermark_ms
        The batch's watermark; None: it had none yet.
    conf
        The part of the query's configuration that Spark keeps.
    state_ids
        Ids of the state of each operator, partition and store, in checkpoint format 2; else empty.
    """

    batch: int
    planned: bool
    watermark_ms: int | None
    conf: Mapping[str, str]
    state_ids: Mapping[str, Any]

    @property
    def checkpoint_format(self) -> int:
        """Spark's checkpoint format of the batch's state: 1 or 2."""
        return 2 if self.state_ids else 1


def find_last_committed(offsets: frozenset[int], commits: frozenset[int], where: str) -> tuple[int, bool]:
    """Return the last committed batch, and True if the batch after it is planned."""
    if not commits:
        raise MissingCheckpointError(
            f"{where} has no committed batch, so there is no state to import: start the query with this package from "
            "a new checkpoint location"
        )
    last, planned = max(commits), max(offsets, default=-1)
    if planned not in (last, last + 1):
        raise CorruptFileError(
            f"{where} is damaged: the last batch is {last} in commits/ and {planned} in offsets/. Restore the missing "
            "files"
        )
    missing = sorted(set(needed_offsets(last, planned > last)) - offsets)
    if missing:
        raise CorruptFileError(f"{where} is damaged: offsets/{missing[0]} is missing. Restore the file")
    return last, planned > last


def needed_offsets(batch: int, planned: bool) -> tuple[int, ...]:
    """Return the batches whose offsets Spark reads to go on after a batch."""
    if planned:
        return batch, batch + 1
    return (batch - 1, batch) if batch else (batch,)


def parse_batch(batch: int, planned: bool, offsets: Mapping[int, str], commit: str, where: str) -> LoggedBatch:
    """Parse the logs of the last committed batch."""
    source_counts = set()
    for number, text in offsets.items():
        _, lines = _parse_log(text, f"{where}/offsets/{number}")
        source_counts.add(len(lines))
        if not lines:
            raise CorruptFileError(f"{where}/offsets/{number} has no source, so it is truncated. Restore the file")
    if len(source_counts) > 1:
        raise CorruptFileError(
            f"{where}/offsets has files with different numbers of sources: {sorted(source_counts)}. Restore the right "
            "files"
        )
    metadata, _ = _parse_log(offsets[batch], f"{where}/offsets/{batch}")
    committed, _ = _parse_log(commit, f"{where}/commits/{batch}")
    watermark_ms, conf = metadata.get("batchWatermarkMs"), metadata.get("conf")
    if type(watermark_ms) is not int or not isinstance(conf, dict):
        raise CorruptFileError(f"{where}/offsets/{batch} has no watermark or no configuration of the query")
    return LoggedBatch(
        batch,
        planned,
        watermark_ms or None,
        {str(name): str(value) for name, value in conf.items()},
        committed.get("stateUniqueIds") or {},
    )


def checkpoint_format_of(commit: str, where: str) -> int:
    """Return Spark's checkpoint format of the state of a committed batch: 1 or 2."""
    return 2 if _parse_log(commit, where)[0].get("stateUniqueIds") else 1


def replace_state_ids(commit: str, written: str, where: str) -> str:
    """Return a commit log with the state ids of another commit log."""
    metadata, _ = _parse_log(commit, where)
    ids = _parse_log(written, "the commit log of the batch that wrote the marks")[0].get("stateUniqueIds")
    if bool(ids) != bool(metadata.get("stateUniqueIds")):
        raise CorruptFileError(f"{where} and the written state have different checkpoint formats")
    if not ids:
        return commit
    return f"{commit.splitlines()[0]}\n{json.dumps({**metadata, 'stateUniqueIds': ids}, separators=(',', ':'))}"


def _parse_log(text: str, where: str) -> tuple[dict[str, Any], list[str]]:
    """Return the JSON of a log's second line, and the lines after it."""
    lines = text.splitlines()
    version = lines[0] if lines else ""
    if version not in _VERSIONS and version.startswith("v") and version[1:].isdigit():
        raise VersionSkewError(f"{where} has format {version}; this release reads v1 and v2. Use a newer release.")
    try:
        fields = json.loads(lines[1]) if version in _VERSIONS else None
    except (IndexError, ValueError):
        fields = None
    if not isinstance(fields, dict):
        raise CorruptFileError(f"{where} is not a readable Spark log: {text[:100]!r}. Restore the file")
    return fields, lines[2:]
