"""Which files a pointer's state is made of, by their headers and footers, and who has them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from arrow_schemas.lineage import DELTA, CheckpointRef, LineageHeader
from arrow_schemas.pointer import LineageEntry, Pointer
from spark_state_ext.files.checkpoint import Announced, announced, verify_checkpoint
from spark_state_ext.files.folder import Readable
from spark_state_ext.restore.load_plan import Fetch
from spark_state_ext.restore.resolving import resolve
from spark_state_ext.restore.sources import Sources

__all__ = ["Needed", "NeededFile", "needed_files"]


@dataclass(frozen=True)
class NeededFile:
    """A checkpoint file that is there, by its header and its footer.

    Parameters
    ----------
    fetch
        Which one.
    announced
        What it says of itself.
    files
        Who has it.
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
    """What a pointer's state is made of.

    Parameters
    ----------
    lineage
        From a checkpoint whose state is there for certain to the committed one.
    files
        The files that loading it takes, oldest first.
    """

    lineage: tuple[LineageEntry, ...]
    files: tuple[NeededFile, ...]


def needed_files(pointer: Pointer, sources: Sources, verified_in: Path | None = None) -> Needed:
    """Find the files of a pointer's state. What is only presumed to be there is looked for, and may be absent."""

    def look(files: Readable, fetch: Fetch) -> NeededFile:
        return NeededFile(fetch, announced(files, fetch.ref, fetch.kind), files)

    def verify(files: Readable, fetch: Fetch) -> None:
        if verified_in is not None:
            verify_checkpoint(files, fetch.ref, fetch.kind, verified_in)

    files = tuple(resolve(pointer, sources, look, confirm=verify))
    return Needed(_lineage_of(pointer, files), files)


def _lineage_of(pointer: Pointer, files: tuple[NeededFile, ...]) -> tuple[LineageEntry, ...]:
    """Of a plan on an empty store, which has one file for each checkpoint."""
    told: dict[CheckpointRef, LineageEntry] = {entry.ref: entry for entry in pointer.lineage}
    entries = []
    for it in files:
        size = it.announced.size_bytes if it.fetch.kind == DELTA else 0
        entries.append(told.get(it.fetch.ref, LineageEntry(it.fetch.ref, size, it.announced.header.writer.heartbeat)))
    return tuple(entries)
