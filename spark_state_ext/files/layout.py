"""The folders and files of a query's state: where each kind lies, and why it is there.

This is the only such table: the commands that verify, explain and remove files use it, and `docs/ownership.md` has its
rows. A format knows the names of its own files; this module has the folders, and the names that no format defines.
"""

from __future__ import annotations

from dataclasses import dataclass

from arrow_schemas.erase import ERASE_FOLDER, parse_erase_name
from arrow_schemas.lineage import parse_file_name
from arrow_schemas.operator import parse_operator_file_name
from arrow_schemas.partitions import parse_partitions_name
from spark_state_ext.files.folder import is_temporary

__all__ = [
    "ASSIGNMENT",
    "CHECKPOINT",
    "CLAIMS_FOLDER",
    "CLAIM_FOLDER",
    "CLAIM_NOTE",
    "DETACHED_NAME",
    "DOCUMENT_FOLDERS",
    "EPOCH",
    "EPOCHS_FOLDER",
    "ERASE_DONE",
    "ERASE_REQUEST",
    "HOLD",
    "HOLDS_FOLDER",
    "KINDS",
    "LEASE",
    "LEASE_FOLDER",
    "LEASE_FORMAT_1_NAME",
    "LEFT_BEHIND_NAME",
    "OPERATOR",
    "PARENT",
    "PARENTS_FOLDER",
    "SPILL",
    "SPILL_FOLDER",
    "START",
    "STARTING_FOLDER",
    "START_NAME",
    "FileKind",
    "kind_of",
]

# Below `<root>/<operator>`, next to the query folders: notes about first batches, and spilled rows of tasks that do not
# know their query. If tasks know their query, these rows lie in the query folder.
STARTING_FOLDER, SPILL_FOLDER = "starting", "spill"
# Below a query folder, next to the buckets' folders, which are named by the buckets' numbers.
LEASE_FOLDER, HOLDS_FOLDER, CLAIMS_FOLDER, PARENTS_FOLDER = "lease", "holds", "claims", "parents"
EPOCHS_FOLDER = "epochs"
DOCUMENT_FOLDERS = (LEASE_FOLDER, EPOCHS_FOLDER, HOLDS_FOLDER, ERASE_FOLDER, CLAIMS_FOLDER)
LEASE_FORMAT_1_NAME = "lease.json"
START_NAME, DETACHED_NAME, LEFT_BEHIND_NAME = "start.json", "detached.json", "left_behind.json"
# Below a savepoint.
CLAIM_FOLDER = "claim"


@dataclass(frozen=True)
class FileKind:
    """A kind of file of a query folder.

    Parameters
    ----------
    name
        Its name in messages.
    why
        Why such a file is still there.
    goes
        A later batch removes it in any case.
    """

    name: str
    why: str
    goes: bool = False


CHECKPOINT = FileKind("checkpoint file", "a batch that Spark retains, or the state, may need it")
OPERATOR = FileKind("operator file", "every start of the query reads it")
ASSIGNMENT = FileKind("assignment of partitions", "every start of the query reads the last one")
LEASE = FileKind("lease", "it says which run of the query may write here; each renewal removes old lease files")
EPOCH = FileKind(
    "record of epochs",
    "it says where each run of the query began, and so which files are valid; the next run's record replaces it",
)
HOLD = FileKind(
    "hold",
    "a process copies from the query folder; it is removed when that ends, or ten minutes after its last renewal",
)
ERASE_REQUEST = FileKind(
    "erase request",
    "the keys to erase: the query removes it once the request is done and its batches are no longer retained",
)
ERASE_DONE = FileKind("record of an erase request", "without it, the request's number would be used again")
CLAIM_NOTE = FileKind(
    "note of a claim",
    "it says what happened to a claim to the folder, and which claim it replaced; savepoint release reads it",
)
START = FileKind("record of the query's start", "it says what the query was started from")
PARENT = FileKind(
    "file of a parent",
    "the query was rescaled, and its buckets begin with this file; the query removes it when it is no longer needed",
)
SPILL = FileKind("spill file", "rows on their way through a batch; a later batch removes it, or after a day", goes=True)
KINDS = (
    CHECKPOINT,
    OPERATOR,
    ASSIGNMENT,
    LEASE,
    EPOCH,
    HOLD,
    ERASE_REQUEST,
    ERASE_DONE,
    CLAIM_NOTE,
    START,
    PARENT,
    SPILL,
)


def kind_of(path: str) -> FileKind | None:
    """Return the kind of a file, by its path below the query folder; None if it is foreign or unfinished."""
    folder, _, name = path.rpartition("/")
    if is_temporary(name):
        return None
    if folder == ERASE_FOLDER:
        parsed = parse_erase_name(name)
        if parsed is not None:
            return ERASE_DONE if parsed[1] else ERASE_REQUEST
        return None
    matches = {
        LEASE: folder == LEASE_FOLDER or path == LEASE_FORMAT_1_NAME,
        EPOCH: folder == EPOCHS_FOLDER and name.endswith(".json"),
        HOLD: folder == HOLDS_FOLDER,
        CLAIM_NOTE: folder == CLAIMS_FOLDER and name.endswith(".json"),
        PARENT: folder.split("/")[0] == PARENTS_FOLDER,
        SPILL: folder.split("/")[0] == SPILL_FOLDER,
        CHECKPOINT: folder.isdecimal() and parse_file_name(name) is not None,
        OPERATOR: not folder and parse_operator_file_name(name) is not None,
        ASSIGNMENT: not folder and parse_partitions_name(name) is not None,
        START: not folder and (name in (START_NAME, DETACHED_NAME, LEFT_BEHIND_NAME) or name.endswith(".start.arrow")),
    }
    return next((kind for kind, is_one in matches.items() if is_one), None)
