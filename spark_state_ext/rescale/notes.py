"""Notes beside the parents of a rescaled query: which buckets need them no more, and which do after all.

They are empty files whose names say all. None is taken back before all go: what a note says becomes void with its age,
once Spark hands out no pointer of that time any more.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from spark_state_ext.files.folder import Folder
from spark_state_ext.files.layout import PARENTS_FOLDER

__all__ = ["FREE", "NEEDED", "ParentsNote", "note_free", "note_needed", "notes_among"]

FREE, NEEDED = "free", "needed"
_NAME = re.compile(rf"(0|[1-9][0-9]{{0,8}})\.({FREE}|{NEEDED})-([0-9]{{1,18}})")


@dataclass(frozen=True)
class ParentsNote:
    """A note.

    Parameters
    ----------
    bucket
        Whose.
    kind
        `FREE`: a committed pointer of the bucket needs no parents. `NEEDED`: one does.
    heartbeats
        Of that pointer.
    """

    bucket: int
    kind: str
    heartbeats: int

    @property
    def name(self) -> str:
        """Name of its file."""
        return f"{self.bucket}.{self.kind}-{self.heartbeats}"


def notes_among(names: Iterable[str]) -> list[ParentsNote]:
    """The notes among names of files."""
    found = (match for match in map(_NAME.fullmatch, names) if match is not None)
    return [ParentsNote(int(match[1]), match[2], int(match[3])) for match in found]


def note_free(query_folder: Folder, bucket: int, heartbeats: int) -> None:
    """Write down that a committed pointer of a bucket needs no parents."""
    query_folder.child(PARENTS_FOLDER).create(ParentsNote(bucket, FREE, heartbeats).name, b"")


def note_needed(query_folder: Folder, bucket: int, heartbeats: int) -> None:
    """Write down that a committed pointer of a bucket needs parents, where it is noted that another one does not."""
    folder = query_folder.child(PARENTS_FOLDER)
    mine = [note for note in notes_among(folder.names()) if note.bucket == bucket]
    if any(note.kind == FREE for note in mine):
        folder.create(ParentsNote(bucket, NEEDED, heartbeats).name, b"")
