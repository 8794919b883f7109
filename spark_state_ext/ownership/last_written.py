"""When a query last wrote in its folder, by the times of its files and of its lease.

Whoever erases keys from a stopped query's past takes its lease and writes its files, which would make the folder the
youngest of all. So he notes before when the query did; that counts until the lease is the query's again.
"""

from __future__ import annotations

from collections.abc import Iterable

from arrow_schemas.checksum import opened_document, readable, sealed_document
from arrow_schemas.erase import ERASE_FOLDER
from spark_state_ext.files.folder import Entry, Folder
from spark_state_ext.files.layout import LAST_WRITTEN_NAME, LEASE_FOLDER
from spark_state_ext.files.readable import document_in
from spark_state_ext.ownership.lease_log import LeaseLog

__all__ = [
    "ERASER",
    "decode_last_written_ms",
    "is_eraser_last",
    "last_written_ms",
    "note_last_written",
]

# What the lease calls whoever erases keys.
ERASER = "erase history"
_FORMAT = 1
_MEND = "Remove it, and name the query folder that you want to read."


def last_written_ms(query_folder: Folder, entries: Iterable[Entry]) -> int | None:
    """When a query last wrote; None: its store does not tell."""
    known = list(entries)
    if any(it.name == ERASE_FOLDER for it in known):
        noted_ms = document_in(query_folder.child(ERASE_FOLDER), LAST_WRITTEN_NAME, decode_last_written_ms)
        if noted_ms is not None and is_eraser_last(query_folder):
            return noted_ms
    known.extend(query_folder.child(LEASE_FOLDER).entries())
    told = [it.modified_s for it in known if it.modified_s is not None]
    return int(max(told) * 1000) if told else None


def note_last_written(query_folder: Folder) -> None:
    """Write down when a query last wrote, before somebody else does who erases keys from its past."""
    if is_eraser_last(query_folder):
        # He was stopped, or does it again: what he noted the first time holds.
        return
    at_ms = last_written_ms(query_folder, query_folder.entries())
    if at_ms is not None:
        data = sealed_document({"format": _FORMAT, "modified_ms": at_ms})
        query_folder.child(ERASE_FOLDER).put(LAST_WRITTEN_NAME, data)


def decode_last_written_ms(data: bytes, where: str) -> int:
    """Read the note."""
    with readable(where, "record of when a query last wrote", _MEND):
        return int(opened_document(data, where, _FORMAT, _MEND)["modified_ms"])
    raise AssertionError("unreachable: readable raises what it catches")


def is_eraser_last(query_folder: Folder) -> bool:
    """Whether the last one who held the lease erased keys."""
    found = LeaseLog(query_folder).newest(first=True)
    return found is not None and found.record.owner.application == ERASER
