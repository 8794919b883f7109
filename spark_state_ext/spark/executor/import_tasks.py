"""Tasks of the import of a job of Spark's own operator: they check its checkpoint, and write the new one.

They run in `mapInArrow`, because a client of Spark Connect may not be able to reach the folders.
"""

from __future__ import annotations

import json
import posixpath
import re
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from arrow_schemas.damage import describe_damage
from spark_state_ext.engine.job import refuse_other_release
from spark_state_ext.errors import CorruptFileError, LiveRunError, MissingCheckpointError, UsageError
from spark_state_ext.files.folder import Folder
from spark_state_ext.savepoints.batch_logs import find_last_committed, needed_offsets, replace_state_ids
from spark_state_ext.savepoints.task_rows import make_answer

__all__ = ["look", "reserve", "write_checkpoint"]

# Folder in the new checkpoint location where a Spark query writes the buckets' marks; the client uses the same name.
_IMPORTING = "importing"
_METADATA, _OFFSETS, _COMMITS, _SOURCES, _STATE = "metadata", "offsets", "commits", "sources", "state"
# Metadata that Spark cannot read, so that no query starts from an unfinished location.
_NOT_FINISHED = b"spark_state_ext is importing a job to this location, or was stopped before the end: do not use it\n"
_ASIDE = "rolled-back-"
_VERSION_1 = re.compile(r"1(?P<id>_[0-9a-fA-F-]{36})?\.(?P<form>delta|zip)(?P<checksum>\.crc)?")
_LOG = re.compile(r"v[0-9]+")


def _open_folders(plain: dict[str, Any]) -> tuple[Folder, Folder]:
    refuse_other_release(plain)
    options = plain["checkpoint_options"]
    return Folder(plain["checkpoint"], options), Folder(plain["new_checkpoint"], options)


def _drain(batches: Iterable[pa.RecordBatch]) -> None:
    for _ in batches:
        pass


def look(plain: dict[str, Any], batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Check the old checkpoint; yield the query's id, its last batches, their logs, and the age of its last write."""
    _drain(batches)
    old, new = _open_folders(plain)
    top = old.names()
    if _METADATA not in top or not {_OFFSETS, _COMMITS} & set(top):
        raise UsageError(
            f"{old.root} is not the checkpoint location of a query that has run: it has "
            f"{', '.join(top) or 'no files'}. Give the query's checkpointLocation"
        )
    entries = old.tree()
    _refuse_unknown(old, {entry.name for entry in entries})
    # Check the new location before the state is read, which takes long; `reserve` reserves it later.
    _refuse_nonempty(new, new.names())
    offsets, commits = _list_batches(old, _OFFSETS), _list_batches(old, _COMMITS)
    batch, planned = find_last_committed(offsets, commits, old.root)
    written = [entry.modified_s for entry in entries if entry.modified_s is not None]
    yield make_answer(
        {
            "query_id": _read_query_id(old),
            "batch": batch,
            "planned": planned,
            "offsets": {str(number): _read(old, f"{_OFFSETS}/{number}") for number in needed_offsets(batch, planned)},
            "commit": _read(old, f"{_COMMITS}/{batch}"),
            "written_ago_s": time.time() - max(written) if written else None,
        }
    )


def _refuse_unknown(old: Folder, files: set[str]) -> None:
    """Refuse files of unknown purpose: the query may need them, and this import does not copy them."""
    for path in sorted(files):
        top, _, below = path.partition("/")
        name = posixpath.basename(path)
        if name.startswith(".") or name.endswith("_$folder$") or top.startswith(_ASIDE):
            continue
        is_known = path == _METADATA or top == _STATE or (top == _SOURCES and "/" in below)
        is_known = is_known or (top in (_OFFSETS, _COMMITS) and below.isdigit())
        if not is_known:
            raise UsageError(
                f"{old.where(path)} is not a file that Spark is known to write into a checkpoint location, so the "
                "imported query may need it. Move it away if the query does not need it"
            )


def _list_batches(folder: Folder, log: str) -> frozenset[int]:
    return frozenset(int(name) for name in folder.child(log).names() if name.isdigit())


def _read(folder: Folder, name: str) -> str:
    try:
        return folder.get(name).decode()
    except UnicodeDecodeError as error:
        raise CorruptFileError(f"{folder.where(name)} is not text: {error}. Bring the file back") from error


def _read_query_id(folder: Folder) -> str:
    try:
        return str(json.loads(_read(folder, _METADATA))["id"])
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptFileError(
            f"{folder.where(_METADATA)} does not hold a query's id: {describe_damage(error)}"
        ) from error


def reserve(plain: dict[str, Any], batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Check that the new checkpoint location is empty, and reserve it."""
    _drain(batches)
    _, new = _open_folders(plain)
    _refuse_nonempty(new, new.names())
    if not new.create(_METADATA, _NOT_FINISHED):
        _refuse_nonempty(new, [_METADATA])
    yield make_answer(None)


def _refuse_nonempty(new: Folder, names: Sequence[str]) -> None:
    if names:
        raise UsageError(
            f"the new checkpoint location {new.root} is not empty, it has {', '.join(names[:3])}: give another one, or "
            "remove what a failed import has left there"
        )


def write_checkpoint(plain: dict[str, Any], batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Write the new checkpoint; yield the new query's id, and the source files of an unknown format."""
    _drain(batches)
    old, new = _open_folders(plain)
    batch, planned = plain["batch"], plain["planned"]
    _refuse_live_query(old, plain)
    _move_marks(new, batch + 1)
    unknown = _copy_sources(old, new)
    written = _read(new.child(_IMPORTING), f"{_COMMITS}/0")
    for number, text in plain["offsets"].items():
        new.put(f"{_OFFSETS}/{number}", text.encode())
    commit = replace_state_ids(plain["commit"], written, old.where(f"{_COMMITS}/{batch}"))
    new.put(f"{_COMMITS}/{batch}", commit.encode())
    new.remove_tree(_IMPORTING)
    # Check again: later batches of the query would be lost.
    _refuse_live_query(old, plain)
    query_id = str(uuid.uuid4())
    new.put(_METADATA, json.dumps({"id": query_id}, separators=(",", ":")).encode())
    yield make_answer({"query_id": query_id, "unknown": unknown, "planned": planned})


def _refuse_live_query(old: Folder, plain: Mapping[str, Any]) -> None:
    now = find_last_committed(_list_batches(old, _OFFSETS), _list_batches(old, _COMMITS), old.root)
    if now != (plain["batch"], plain["planned"]):
        raise LiveRunError(
            f"the query of {old.root} is still running: its last committed batch was {plain['batch']}, and is now "
            f"{now[0]}. Stop it, wait for its end, and import it again, to other locations"
        )


def _move_marks(new: Folder, version: int) -> None:
    """Move the marks, which Spark wrote as version 1 of a new query's state, to the version after the last batch."""
    marks = new.child(_IMPORTING)
    for entry in marks.child(_STATE).tree():
        folder, name = posixpath.split(f"{_STATE}/{entry.name}")
        if name.startswith("."):
            continue
        version_1 = _VERSION_1.fullmatch(name)
        if version_1 is not None:
            # A first delta has the whole state, in the same bytes as a snapshot.
            form = "snapshot" if version_1["form"] == "delta" else version_1["form"]
            name = f"{version}{version_1['id'] or ''}.{form}{version_1['checksum'] or ''}"
        elif not ("/_metadata/" in f"{folder}/" or folder.endswith("/SSTs")):
            raise CorruptFileError(f"Spark wrote {marks.where(f'{folder}/{name}')}, which this release does not know")
        new.put(posixpath.join(folder, name), marks.get(f"{_STATE}/{entry.name}"))


def _copy_sources(old: Folder, new: Folder) -> list[str]:
    """Copy the files of sources in the checkpoint; return the names of files that are not logs of Spark."""
    unknown = []
    for entry in old.child(_SOURCES).tree():
        if posixpath.basename(entry.name).startswith("."):
            continue
        data = old.child(_SOURCES).get(entry.name)
        if not _LOG.fullmatch(data[:16].partition(b"\n")[0].decode(errors="replace").strip("\0")):
            unknown.append(entry.name)
        new.child(_SOURCES).put(entry.name, data)
    if old.child(_SOURCES).names() and not new.child(_SOURCES).names():
        raise MissingCheckpointError(f"{old.child(_SOURCES).root} has no files: bring them back")
    return unknown
