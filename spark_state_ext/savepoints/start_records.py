"""Records of how a query started, in its query folder.

`start.json` is written before the first bucket begins, `detached.json` once a batch is committed, and records of holds
until then. All are immutable, and every writer writes the same bytes.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

from arrow_schemas.checksum import open_document, report_damage, seal_document
from spark_state_ext.errors import LineageError
from spark_state_ext.files.folder import Folder
from spark_state_ext.files.layout import DETACHED_NAME, START_NAME
from spark_state_ext.files.readable import read_document

__all__ = [
    "RESCALE",
    "RETAINED",
    "SAVEPOINT",
    "START_FORMAT",
    "StartRecord",
    "list_held",
    "is_detached",
    "note_detached",
    "note_held",
    "remove_held",
    "note_start",
    "read_start",
]

START_FORMAT = 1
# Kinds of starts. `RESCALE`: the query was rescaled in place.
SAVEPOINT, RETAINED, RESCALE = "savepoint", "retained_checkpoint", "rescale"
_HELD = "held-"


@dataclass(frozen=True)
class StartRecord:
    """The snapshot that a query folder's state began with.

    Parameters
    ----------
    kind
        `SAVEPOINT`, `RETAINED` or `RESCALE`.
    source
        Path of the savepoint, or of the other or old query folder.
    source_id
        Id of the savepoint; empty for a retained checkpoint.
    batch
        Batch of the other query that the state was taken after; -1 if the savepoint was made from a table.
    mode
        ``"no_claim"`` or ``"claim"``.
    operator
        Name of the operator in the snapshot.
    claim
        Id of the claim to the savepoint; empty if there is none. It is the name of this query folder, or of another
        one if another attempt of the first batch made the claim.
    heartbeats
        `Pointer.heartbeats` of the old query folder's first bucket, for `RESCALE`. Unlike batches, heartbeats
        continue when another query claims a folder. -1 for other kinds.
    """

    kind: str
    source: str
    source_id: str
    batch: int
    mode: str
    operator: str
    claim: str = ""
    heartbeats: int = -1

    def is_of(self, source: str, source_id: str) -> bool:
        """True if the query began with this snapshot; savepoints are compared by id, because they may be moved."""
        return self.source_id == source_id if source_id else self.source == source

    def __str__(self) -> str:
        source = f"savepoint {self.source_id} at {self.source}" if self.source_id else self.source
        return f"batch {self.batch} of operator {self.operator!r} of {source} (mode {self.mode})"

    def encode(self) -> bytes:
        """Return the file's bytes."""
        fields = asdict(self)
        if self.kind != RESCALE:
            del fields["heartbeats"]
        return seal_document({"format": START_FORMAT, **fields})

    @staticmethod
    def decode(data: bytes, where: str) -> StartRecord:
        """Decode a start record."""
        with report_damage(where, "record of what a query was started from"):
            fields = open_document(data, where, START_FORMAT)
            return StartRecord(
                kind=str(fields["kind"]),
                source=str(fields["source"]),
                source_id=str(fields["source_id"]),
                batch=int(fields["batch"]),
                mode=str(fields["mode"]),
                operator=str(fields["operator"]),
                claim=str(fields["claim"]),
                heartbeats=int(fields["heartbeats"]) if fields["kind"] == RESCALE else -1,
            )
        raise AssertionError("unreachable: readable raises what it catches")


def note_start(query_folder: Folder, record: StartRecord) -> None:
    """Write the start record; an existing one must be equal, except for the path of a savepoint that was moved."""
    if not query_folder.create(START_NAME, record.encode()):
        existing = read_start(query_folder)
        if existing is not None and record.source_id and existing == replace(record, source=existing.source):
            return
        raise LineageError(
            f"an earlier attempt of the first batch of the query at {query_folder.root} started from "
            f"{existing or 'nothing'}, and this one starts from {record}: start the query again from the earlier "
            "source, or with a new checkpointLocation and the matching input"
        )


def read_start(query_folder: Folder) -> StartRecord | None:
    """Read the start record of a query folder; None: the query began without state."""
    return read_document(query_folder, START_NAME, StartRecord.decode)


def is_detached(query_folder: Folder) -> bool:
    """True if a query no longer needs the snapshot that it started from."""
    return query_folder.exists(DETACHED_NAME)


def note_detached(query_folder: Folder) -> None:
    """Record that a batch of the query is committed, so that no bucket needs the snapshot any longer.

    The caller must have a pointer that Spark handed out: in a batch with data Spark calls every bucket, and commits
    all of their pointers or none.
    """
    query_folder.create(DETACHED_NAME, seal_document({"format": START_FORMAT}))


def note_held(query_folder: Folder, captured: str) -> None:
    """Record a plan's hold for this query, because later plans of the query know only their own holds."""
    query_folder.create(f"{_HELD}{captured}", seal_document({"format": START_FORMAT}))


def list_held(query_folder: Folder) -> list[str]:
    """List the names that `note_held` recorded."""
    return [name.removeprefix(_HELD) for name in query_folder.names() if name.startswith(_HELD)]


def remove_held(query_folder: Folder, captured: str) -> None:
    """Remove the record of a released hold."""
    query_folder.as_named().remove(f"{_HELD}{captured}")
