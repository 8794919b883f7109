"""What a query folder tells of its start: `start.json` from before the first bucket begins, `detached.json` once a
batch is committed, and until then which holds there may be for it. All are immutable, and the same from whoever makes
them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

from arrow_schemas.checksum import opened_document, readable, sealed_document
from spark_state_ext.errors import LineageError
from spark_state_ext.files.folder import Folder
from spark_state_ext.files.layout import DETACHED_NAME, START_NAME
from spark_state_ext.files.readable import document_in

__all__ = [
    "RESCALE",
    "RETAINED",
    "SAVEPOINT",
    "START_FORMAT",
    "StartRecord",
    "held_for",
    "is_detached",
    "note_detached",
    "note_held",
    "note_let_go",
    "note_start",
    "start_of",
]

START_FORMAT = 1
# Kinds of starts; `RESCALE` is that of a query that was rescaled in place.
SAVEPOINT, RETAINED, RESCALE = "savepoint", "retained_checkpoint", "rescale"
_HELD = "held-"


@dataclass(frozen=True)
class StartRecord:
    """From what a query folder's state was begun.

    Parameters
    ----------
    kind
        `SAVEPOINT`, `RETAINED` or `RESCALE`.
    source
        Its path: of the savepoint, or of the other or old query folder.
    source_id
        Id of the savepoint; empty for a retained checkpoint.
    batch
        Batch of the other query whose state it is; -1 where it was made of a table.
    mode
        ``"no_claim"`` or ``"claim"``.
    operator
        Name of the operator there.
    claim
        Id of the claim to the savepoint; empty where there is none. It is the folder's name, unless another attempt at
        the first batch, with another folder, was the one that made it.
    """

    kind: str
    source: str
    source_id: str
    batch: int
    mode: str
    operator: str
    claim: str = ""

    def is_of(self, source: str, source_id: str) -> bool:
        """Whether it tells of a snapshot: of a savepoint, which may have been moved, by its id; else by its path."""
        return self.source_id == source_id if source_id else self.source == source

    def __str__(self) -> str:
        what = f"savepoint {self.source_id} at {self.source}" if self.source_id else self.source
        return f"batch {self.batch} of operator {self.operator!r} of {what} (mode {self.mode})"

    def encode(self) -> bytes:
        """The file's bytes."""
        return sealed_document({"format": START_FORMAT, **asdict(self)})

    @staticmethod
    def decode(data: bytes, where: str) -> StartRecord:
        """Read a record."""
        with readable(where, "record of what a query was started from"):
            fields = opened_document(data, where, START_FORMAT)
            return StartRecord(
                kind=str(fields["kind"]),
                source=str(fields["source"]),
                source_id=str(fields["source_id"]),
                batch=int(fields["batch"]),
                mode=str(fields["mode"]),
                operator=str(fields["operator"]),
                claim=str(fields["claim"]),
            )
        raise AssertionError("unreachable: readable raises what it catches")


def note_start(query_folder: Folder, record: StartRecord) -> None:
    """Write down what a query folder's state is begun with. A savepoint may have been moved between two attempts."""
    if not query_folder.create(START_NAME, record.encode()):
        there = start_of(query_folder)
        if there is not None and record.source_id and there == replace(record, source=there.source):
            return
        raise LineageError(
            f"the first batch of the query at {query_folder.root} was begun from {there or 'nothing'} before, and now "
            f"from {record}: start the query again from where it was, or with a new checkpointLocation and from the "
            "input that belongs to it"
        )


def start_of(query_folder: Folder) -> StartRecord | None:
    """What a query folder's state was begun with; None: with nothing."""
    return document_in(query_folder, START_NAME, StartRecord.decode)


def is_detached(query_folder: Folder) -> bool:
    """Whether a query that was started from a snapshot needs nothing of it any more."""
    return query_folder.exists(DETACHED_NAME)


def note_detached(query_folder: Folder) -> None:
    """Write down that a batch of the query is committed, so that all its buckets have what they need.

    Who calls it was handed a pointer of the query: in a batch with data Spark calls every bucket, and commits the
    pointers of all or of none.
    """
    query_folder.create(DETACHED_NAME, sealed_document({"format": START_FORMAT}))


def note_held(query_folder: Folder, captured: str) -> None:
    """Write down that a plan's hold is of use to this query: later plans of the query know only their own."""
    query_folder.create(f"{_HELD}{captured}", sealed_document({"format": START_FORMAT}))


def held_for(query_folder: Folder) -> list[str]:
    """What plans of the query captured, as in `note_held`."""
    return [name.removeprefix(_HELD) for name in query_folder.names() if name.startswith(_HELD)]


def note_let_go(query_folder: Folder, captured: str) -> None:
    """The hold is no more."""
    query_folder.as_named().remove(f"{_HELD}{captured}")
