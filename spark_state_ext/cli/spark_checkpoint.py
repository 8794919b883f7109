"""Interpret the file names in a Spark checkpoint location: logs of batches, and versions of state. Pure functions.

A batch *b* is planned by ``offsets/<b>`` and committed by ``commits/<b>``. It reads version *b* of each partition's
state and writes version *b* + 1, either as a whole (``.snapshot``, ``.zip``) or as changes (``.delta``,
``.changelog``). With checkpoint format 2, file names also contain an id, and the commit log names the valid ids.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from arrow_schemas.damage import describe_damage
from spark_state_ext.errors import CorruptFileError

__all__ = [
    "COMMITS",
    "METADATA",
    "OFFSETS",
    "ROLLED_BACK",
    "STATE",
    "SparkFile",
    "find_missing_version",
    "parse_path",
    "read_query_id",
    "read_shuffle_partitions",
    "read_state_ids",
]

# Kinds of files; the first two are also the names of their folders.
OFFSETS, COMMITS, STATE, OTHER = "offsets", "commits", "state", "other"
# The file with the query's id.
METADATA = "metadata"
# Prefix of folders to which `spark_state_ext.cli.rollback` moves files.
ROLLED_BACK = "rolled-back-"
_PARTITIONS = "spark.sql.shuffle.partitions"

_WHOLE, _CHANGES = frozenset({"snapshot", "zip"}), frozenset({"delta", "changelog"})
_BATCH = re.compile(r"[0-9]+")
_VERSION = re.compile(r"(?P<version>[0-9]+)(?:_(?P<id>[0-9a-fA-F-]{36}))?\.(?P<form>snapshot|zip|delta|changelog)")
# Hadoop's file managers write under such a name first; Spark never reads these files.
_TEMPORARY = re.compile(r"\..+\.tmp")
# The state of an operator and partition, or one of several stores in it, as for a join.
_STORE = re.compile(r"state/[0-9]+/(?P<partition>[0-9]+)(?:/(?!SSTs$|logs$|_metadata$)[A-Za-z][^/]*)?")
_STATE_UNVERSIONED = re.compile(
    r"state/[0-9]+/_metadata/metadata"
    r"|state/[0-9]+/[0-9]+(?:/[A-Za-z][^/]*)?/(?:_metadata/schema|SSTs/[^/]+\.sst|logs/[^/]+\.log)"
)


@dataclass(frozen=True)
class SparkFile:
    """A file of a checkpoint."""

    # Relative to the checkpoint location.
    path: str
    # `OFFSETS`, `COMMITS`, `STATE`, or `OTHER` if it does not belong to a batch.
    kind: str
    # The batch; for state, its version.
    number: int = 0
    # For state: its folder.
    store: str = ""
    # For state: the id and the ending in its name.
    id: str = ""
    form: str = ""
    # True for the checksum of the file that the other fields describe.
    checksum: bool = False


def parse_path(path: str) -> SparkFile | None:
    """Return what a file is; None if it is not a file that Spark is known to write."""
    folder, name = posixpath.split(path)
    checked_name = _strip_checksum(name)
    top_folder = path.partition("/")[0]
    if top_folder.startswith(ROLLED_BACK) or name.endswith("_$folder$") or _TEMPORARY.fullmatch(checked_name):
        return SparkFile(path, OTHER)
    if (top_folder == "sources" and folder) or (not folder and checked_name == METADATA):
        return SparkFile(path, OTHER)
    if folder in (OFFSETS, COMMITS) and _BATCH.fullmatch(checked_name):
        return SparkFile(path, folder, int(checked_name), checksum=checked_name != name)
    match = _VERSION.fullmatch(checked_name)
    if match and _STORE.fullmatch(folder):
        version, form = int(match["version"]), match["form"]
        return SparkFile(path, STATE, version, folder, match["id"] or "", form, checked_name != name)
    return SparkFile(path, OTHER) if _STATE_UNVERSIONED.fullmatch(posixpath.join(folder, checked_name)) else None


def _strip_checksum(name: str) -> str:
    """Return the file that a checksum belongs to: Hadoop hides its checksums by a dot, Spark does not."""
    while name.endswith(".crc"):
        name = name[: -len(".crc")].removeprefix(".")
        if _TEMPORARY.fullmatch(f".{name}"):
            return f".{name}"
    return name


def read_query_id(metadata: bytes, where: str) -> str:
    """Read the query's id from the checkpoint's file ``metadata``."""
    try:
        return str(json.loads(metadata)["id"])
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptFileError(
            f"{where} does not contain a query's id: {describe_damage(error)}. Give a Spark checkpoint location."
        ) from error


def read_state_ids(commit: bytes, where: str) -> dict[str, frozenset[str]]:
    """Read the ids of the state that a batch committed, by store; empty with checkpoint format 1, which has no ids."""
    try:
        _, _, text = commit.decode().partition("\n")
        operators = json.loads(text.splitlines()[0]).get("stateUniqueIds") or {}
        return {
            f"state/{operator}/{partition}": frozenset(map(str, ids))
            for operator, partitions in operators.items()
            for partition, ids in enumerate(partitions)
        }
    except (AttributeError, IndexError, TypeError, ValueError) as error:
        raise CorruptFileError(
            f"{where} is not a commit log that this release can read: {describe_damage(error)}"
        ) from error


def read_shuffle_partitions(offsets: bytes, where: str) -> int | None:
    """Read the number of shuffle partitions of a batch, the most that its state has; None if it is not recorded."""
    try:
        _, _, text = offsets.decode().partition("\n")
        partitions = json.loads(text.splitlines()[0]).get("conf", {}).get(_PARTITIONS)
        return None if partitions is None else int(partitions)
    except (AttributeError, IndexError, TypeError, ValueError) as error:
        raise CorruptFileError(
            f"{where} has no offsets that this release can read: {describe_damage(error)}"
        ) from error


def find_missing_version(
    files: Iterable[SparkFile], version: int, ids: Mapping[int, Sequence[str] | frozenset[str]]
) -> int | None:
    """Return the newest missing version that is needed to load one; None if no file is missing."""
    kinds_by_version: dict[int, set[bool]] = {}
    for file in files:
        is_committed = not file.id or not ids.get(file.number) or file.id in ids[file.number]
        if not file.checksum and is_committed:
            kinds_by_version.setdefault(file.number, set()).add(file.form in _WHOLE)
    for number in range(version, 0, -1):
        if number not in kinds_by_version:
            return number
        if True in kinds_by_version[number]:
            return None
    return None
