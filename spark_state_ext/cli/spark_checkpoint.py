"""What lies in a Spark checkpoint location, by its names: the logs of batches, and versions of state. Pure functions.

A batch *b* is planned by ``offsets/<b>`` and committed by ``commits/<b>``. It reads version *b* of the state of each
partition and writes version *b* + 1: a whole one (``.snapshot``, ``.zip``) or what changed (``.delta``,
``.changelog``). Names of checkpoint format 2 hold an id beside the version, and the commit log names those that count.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from arrow_schemas.damage import damage_in
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
# Folders with what `spark_state_ext.cli.rollback` put aside.
ROLLED_BACK = "rolled-back-"
_PARTITIONS = "spark.sql.shuffle.partitions"

_WHOLE, _CHANGES = frozenset({"snapshot", "zip"}), frozenset({"delta", "changelog"})
_BATCH = re.compile(r"[0-9]+")
_VERSION = re.compile(r"(?P<version>[0-9]+)(?:_(?P<id>[0-9a-fA-F-]{36}))?\.(?P<form>snapshot|zip|delta|changelog)")
# Hadoop's file managers write under such a name first; Spark reads none of them.
_TEMPORARY = re.compile(r"\..+\.tmp")
# The state of an operator and partition, or one of several stores in it, as a join has.
_STORE = re.compile(r"state/[0-9]+/(?P<partition>[0-9]+)(?:/(?!SSTs$|logs$|_metadata$)[A-Za-z][^/]*)?")
_STATE_KEPT = re.compile(
    r"state/[0-9]+/_metadata/metadata"
    r"|state/[0-9]+/[0-9]+(?:/[A-Za-z][^/]*)?/(?:_metadata/schema|SSTs/[^/]+\.sst|logs/[^/]+\.log)"
)


@dataclass(frozen=True)
class SparkFile:
    """A file of a checkpoint."""

    # Below the checkpoint location.
    path: str
    # `OFFSETS`, `COMMITS`, `STATE`, or `OTHER` for what belongs to no batch.
    kind: str
    # The batch; of state, its version.
    number: int = 0
    # Folder of the state.
    store: str = ""
    # Of state: what its name holds beside the version.
    id: str = ""
    form: str = ""
    # It is the checksum of the file that the other fields tell of.
    checksum: bool = False


def parse_path(path: str) -> SparkFile | None:
    """What a file is; None where it is nothing that Spark is known to write."""
    folder, name = posixpath.split(path)
    plain = _without_checksum(name)
    top = path.partition("/")[0]
    if top.startswith(ROLLED_BACK) or name.endswith("_$folder$") or _TEMPORARY.fullmatch(plain):
        return SparkFile(path, OTHER)
    if (top == "sources" and folder) or (not folder and plain == METADATA):
        return SparkFile(path, OTHER)
    if folder in (OFFSETS, COMMITS) and _BATCH.fullmatch(plain):
        return SparkFile(path, folder, int(plain), checksum=plain != name)
    found = _VERSION.fullmatch(plain)
    if found and _STORE.fullmatch(folder):
        version, form = int(found["version"]), found["form"]
        return SparkFile(path, STATE, version, folder, found["id"] or "", form, plain != name)
    return SparkFile(path, OTHER) if _STATE_KEPT.fullmatch(posixpath.join(folder, plain)) else None


def _without_checksum(name: str) -> str:
    """The name of the file that a checksum is of: of Hadoop's local file system (hidden), or of Spark's own (not)."""
    while name.endswith(".crc"):
        name = name[: -len(".crc")].removeprefix(".")
        if _TEMPORARY.fullmatch(f".{name}"):
            return f".{name}"
    return name


def read_query_id(metadata: bytes, where: str) -> str:
    """The query's id, from the checkpoint's file ``metadata``."""
    try:
        return str(json.loads(metadata)["id"])
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptFileError(
            f"{where} does not hold a query's id: {damage_in(error)}. Give a Spark checkpoint location."
        ) from error


def read_state_ids(commit: bytes, where: str) -> dict[str, frozenset[str]]:
    """Which state a batch committed, by operator and partition; empty under checkpoint format 1, where names tell."""
    try:
        _, _, text = commit.decode().partition("\n")
        operators = json.loads(text.splitlines()[0]).get("stateUniqueIds") or {}
        return {
            f"state/{operator}/{partition}": frozenset(map(str, ids))
            for operator, partitions in operators.items()
            for partition, ids in enumerate(partitions)
        }
    except (AttributeError, IndexError, TypeError, ValueError) as error:
        raise CorruptFileError(f"{where} is no commit log that this release can read: {damage_in(error)}") from error


def read_shuffle_partitions(offsets: bytes, where: str) -> int | None:
    """Number of partitions that Spark's shuffle had in a batch, the most that a state has; None: it is not told."""
    try:
        _, _, text = offsets.decode().partition("\n")
        told = json.loads(text.splitlines()[0]).get("conf", {}).get(_PARTITIONS)
        return None if told is None else int(told)
    except (AttributeError, IndexError, TypeError, ValueError) as error:
        raise CorruptFileError(f"{where} holds no offsets that this release can read: {damage_in(error)}") from error


def find_missing_version(
    files: Iterable[SparkFile], version: int, ids: Mapping[int, Sequence[str] | frozenset[str]]
) -> int | None:
    """The newest version that is missing for loading one; None when everything is there."""
    there: dict[int, set[bool]] = {}
    for file in files:
        counts = not file.id or not ids.get(file.number) or file.id in ids[file.number]
        if not file.checksum and counts:
            there.setdefault(file.number, set()).add(file.form in _WHOLE)
    for at in range(version, 0, -1):
        if at not in there:
            return at
        if True in there[at]:
            return None
    return None
