"""Find the files that a pointer's state is made of, with their headers and footers, and where they are."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from arrow_schemas.lineage import DELTA, CheckpointRef, LineageHeader
from arrow_schemas.pointer import LineageEntry, Pointer
from spark_state_ext.files.checkpoint import Announced, read_announced, verify_checkpoint
from spark_state_ext.files.folder import Readable
from spark_state_ext.restore.load_plan import Fetch
from spark_state_ext.restore.resolution import resolve
from spark_state_ext.restore.sources import Sources

__all__ = ["Needed", "NeededFile", "find_needed_files"]


@dataclass(frozen=True)
class NeededFile:
    """An existing checkpoint file, with its header and its footer.

    Parameters
    ----------
    fetch
        The checkpoint and kind of the file.
    announced
        Its header and footer.
    files
        The backend's files that contain it.
    """

    fetch: Fetch
    announced: Announced
    files: Readable

    @property
    def header(self) -> LineageHeader:
        """The file's lineage header."""
        return self.announced.header


@dataclass(frozen=True)
class Needed:
    """The files that a pointer's state is made of.

    Parameters
    ----------
    lineage
        The lineage from a checkpoint whose state certainly exists to the committed one.
    files
        The files that loading the state needs, oldest first.
    """

    lineage: tuple[LineageEntry, ...]
    files: tuple[NeededFile, ...]


def find_needed_files(pointer: Pointer, sources: Sources, verified_in: Path | None = None) -> Needed:
    """Find the files of a pointer's state; an unconfirmed snapshot is looked for, and may be absent."""

    def look(files: Readable, fetch: Fetch) -> NeededFile:
        return NeededFile(fetch, read_announced(files, fetch.ref, fetch.kind), files)

    def verify(files: Readable, fetch: Fetch) -> None:
        if verified_in is not None:
            verify_checkpoint(files, fetch.ref, fetch.kind, verified_in)

    files = tuple(resolve(pointer, sources, look, confirm=verify))
    return Needed(_lineage_of(pointer, files), files)


def _lineage_of(pointer: Pointer, files: tuple[NeededFile, ...]) -> tuple[LineageEntry, ...]:
    """Return the lineage of the files; a load into an empty store has one file for each checkpoint."""
    by_ref: dict[CheckpointRef, LineageEntry] = {entry.ref: entry for entry in pointer.lineage}
    entries = []
    for file in files:
        size = file.announced.size_bytes if file.fetch.kind == DELTA else 0
        entries.append(
            by_ref.get(file.fetch.ref, LineageEntry(file.fetch.ref, size, file.announced.header.writer.heartbeat))
        )
    return tuple(entries)
