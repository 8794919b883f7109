"""What tasks do when a job of Spark's own operator is imported: look at its checkpoint, and write the new one.

Bodies of `mapInArrow`, as a client of Spark Connect may not reach the folders.
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

from arrow_schemas.damage import damage_in
from spark_state_ext.engine.job import refuse_other_release
from spark_state_ext.errors import CorruptFileError, LiveRunError, MissingCheckpointError, UsageError
from spark_state_ext.files.folder import Folder
from spark_state_ext.savepoints.batch_logs import last_committed, needed_offsets, with_state_ids
from spark_state_ext.savepoints.rows import answer

__all__ = ["look", "reserve", "write_checkpoint"]

# Folder in the new checkpoint location, in which a query of Spark's writes the buckets' marks; the client names it.
_IMPORTING = "importing"
_METADATA, _OFFSETS, _COMMITS, _SOURCES, _STATE = "metadata", "offsets", "commits", "sources", "state"
# Spark cannot read it, so that no query is started from a location that is not finished.
_NOT_FINISHED = b"spark_state_ext is importing a job to this location, or was stopped before the end: do not use it\n"
_ASIDE = "rolled-back-"
_VERSION_1 = re.compile(r"1(?P<id>_[0-9a-fA-F-]{36})?\.(?P<form>delta|zip)(?P<checksum>\.crc)?")
_LOG = re.compile(r"v[0-9]+")


def _places(plain: dict[str, Any]) -> tuple[Folder, Folder]:
    refuse_other_release(plain)
    options = plain["checkpoint_options"]
    return Folder(plain["checkpoint"], options), Folder(plain["new_checkpoint"], options)


def _drained(batches: Iterable[pa.RecordBatch]) -> None:
    for _ in batches:
        pass


def look(plain: dict[str, Any], batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Answers with the query's id, its last batches and their logs, and when anything was last written."""
    _drained(batches)
    old, new = _places(plain)
    top = old.names()
    if _METADATA not in top or not {_OFFSETS, _COMMITS} & set(top):
        raise UsageError(
            f"{old.root} is no checkpoint location of a query that has run: it has {', '.join(top) or 'nothing'}. "
            "Give its checkpointLocation"
        )
    entries = old.tree()
    _refuse_unknown(old, {entry.name for entry in entries})
    # Before the state is read, which takes long; `reserve` takes it afterwards.
    _refuse_taken(new, new.names())
    offsets, commits = _logged(old, _OFFSETS), _logged(old, _COMMITS)
    batch, planned = last_committed(offsets, commits, old.root)
    written = [entry.modified_s for entry in entries if entry.modified_s is not None]
    yield answer(
        {
            "query_id": _query_id(old),
            "batch": batch,
            "planned": planned,
            "offsets": {str(number): _text(old, f"{_OFFSETS}/{number}") for number in needed_offsets(batch, planned)},
            "commit": _text(old, f"{_COMMITS}/{batch}"),
            "written_ago_s": time.time() - max(written) if written else None,
        }
    )


def _refuse_unknown(old: Folder, files: set[str]) -> None:
    """Refuse what Spark is not known to write: it may matter to the query, and cannot be carried over unseen."""
    for path in sorted(files):
        top, _, below = path.partition("/")
        name = posixpath.basename(path)
        if name.startswith(".") or name.endswith("_$folder$") or top.startswith(_ASIDE):
            continue
        known = path == _METADATA or top == _STATE or (top == _SOURCES and "/" in below)
        known = known or (top in (_OFFSETS, _COMMITS) and below.isdigit())
        if not known:
            raise UsageError(
                f"{old.where(path)} is nothing that Spark is known to write into a checkpoint location, so it is not "
                "known whether the imported query needs it. Move it away if it does not"
            )


def _logged(folder: Folder, log: str) -> frozenset[int]:
    return frozenset(int(name) for name in folder.child(log).names() if name.isdigit())


def _text(folder: Folder, name: str) -> str:
    try:
        return folder.get(name).decode()
    except UnicodeDecodeError as error:
        raise CorruptFileError(f"{folder.where(name)} is no text: {error}. Bring the file back") from error


def _query_id(folder: Folder) -> str:
    try:
        return str(json.loads(_text(folder, _METADATA))["id"])
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptFileError(f"{folder.where(_METADATA)} does not hold a query's id: {damage_in(error)}") from error


def reserve(plain: dict[str, Any], batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """See that the new checkpoint location is free, and take it."""
    _drained(batches)
    _, new = _places(plain)
    _refuse_taken(new, new.names())
    if not new.create(_METADATA, _NOT_FINISHED):
        _refuse_taken(new, [_METADATA])
    yield answer(None)


def _refuse_taken(new: Folder, there: Sequence[str]) -> None:
    if there:
        raise UsageError(
            f"the new checkpoint location {new.root} is not empty, it has {', '.join(there[:3])}: give another one, or "
            "remove what an import that failed has left there"
        )


def write_checkpoint(plain: dict[str, Any], batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Write the new checkpoint; answers with the new query's id, and with sources that are of no known shape."""
    _drained(batches)
    old, new = _places(plain)
    batch, planned = plain["batch"], plain["planned"]
    _refuse_going_on(old, plain)
    _move_marks(new, batch + 1)
    unknown = _copy_sources(old, new)
    written = _text(new.child(_IMPORTING), f"{_COMMITS}/0")
    for number, text in plain["offsets"].items():
        new.put(f"{_OFFSETS}/{number}", text.encode())
    commit = with_state_ids(plain["commit"], written, old.where(f"{_COMMITS}/{batch}"))
    new.put(f"{_COMMITS}/{batch}", commit.encode())
    new.remove_tree(_IMPORTING)
    # Again: what the query did in the meantime would be lost.
    _refuse_going_on(old, plain)
    query_id = str(uuid.uuid4())
    new.put(_METADATA, json.dumps({"id": query_id}, separators=(",", ":")).encode())
    yield answer({"query_id": query_id, "unknown": unknown, "planned": planned})


def _refuse_going_on(old: Folder, plain: Mapping[str, Any]) -> None:
    now = last_committed(_logged(old, _OFFSETS), _logged(old, _COMMITS), old.root)
    if now != (plain["batch"], plain["planned"]):
        raise LiveRunError(
            f"the query of {old.root} goes on: its last committed batch was {plain['batch']}, and is {now[0]} now. "
            "Stop it, wait for its end, and import it again, to other places"
        )


def _move_marks(new: Folder, version: int) -> None:
    """Spark wrote the marks as version 1 of a new query's state; here they are what the last batch has left."""
    made = new.child(_IMPORTING)
    for entry in made.child(_STATE).tree():
        folder, name = posixpath.split(f"{_STATE}/{entry.name}")
        if name.startswith("."):
            continue
        found = _VERSION_1.fullmatch(name)
        if found is not None:
            # A first delta has all there is, and in the same bytes as a snapshot.
            form = "snapshot" if found["form"] == "delta" else found["form"]
            name = f"{version}{found['id'] or ''}.{form}{found['checksum'] or ''}"
        elif not ("/_metadata/" in f"{folder}/" or folder.endswith("/SSTs")):
            raise CorruptFileError(f"Spark wrote {made.where(f'{folder}/{name}')}, which this release does not know")
        new.put(posixpath.join(folder, name), made.get(f"{_STATE}/{entry.name}"))


def _copy_sources(old: Folder, new: Folder) -> list[str]:
    """What sources keep in the checkpoint, as it is; gives the files that are no log of Spark's."""
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
