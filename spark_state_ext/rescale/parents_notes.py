"""Notes next to the parents of a rescaled query: which buckets no longer need them, and which need them after all.

Notes are empty files; their names have all information. They are only deleted all together. A note loses its meaning
with age, when Spark no longer hands out pointers of its time.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from spark_state_ext.files.folder import Folder
from spark_state_ext.files.layout import PARENTS_FOLDER

__all__ = ["FREE", "NEEDED", "ParentsNote", "note_free", "note_needed", "parse_notes"]

FREE, NEEDED = "free", "needed"
_NAME = re.compile(rf"(0|[1-9][0-9]{{0,8}})\.({FREE}|{NEEDED})-([0-9]{{1,18}})")


@dataclass(frozen=True)
class ParentsNote:
    """A note about one committed pointer.

    Parameters
    ----------
    bucket
        The pointer's bucket.
    kind
        `FREE`: the pointer needs no parents. `NEEDED`: it needs them.
    heartbeats
        The pointer's heartbeats.
    """

    bucket: int
    kind: str
    heartbeats: int

    @property
    def name(self) -> str:
        """Name of the note's file."""
        return f"{self.bucket}.{self.kind}-{self.heartbeats}"


def parse_notes(names: Iterable[str]) -> list[ParentsNote]:
    """Parse the notes among names of files."""
    matches = (match for match in map(_NAME.fullmatch, names) if match is not None)
    return [ParentsNote(int(match[1]), match[2], int(match[3])) for match in matches]


def note_free(query_folder: Folder, bucket: int, heartbeats: int) -> None:
    """Note that a committed pointer of a bucket needs no parents."""
    query_folder.child(PARENTS_FOLDER).create(ParentsNote(bucket, FREE, heartbeats).name, b"")


def note_needed(query_folder: Folder, bucket: int, heartbeats: int) -> None:
    """Note that a committed pointer of a bucket needs parents, if a note says that another one does not."""
    folder = query_folder.child(PARENTS_FOLDER)
    bucket_notes = [note for note in parse_notes(folder.names()) if note.bucket == bucket]
    if any(note.kind == FREE for note in bucket_notes):
        folder.create(ParentsNote(bucket, NEEDED, heartbeats).name, b"")
