"""State columns that a query left behind when it began with another one's state: its older files have them still.

A column of that name must not be added later, as rows that nobody has written since would show what was left behind.
"""

from __future__ import annotations

from collections.abc import Collection

from arrow_schemas.checksum import opened_document, readable, sealed_document
from spark_state_ext.errors import MissingCheckpointError, SchemaChangedError
from spark_state_ext.files.folder import Folder
from spark_state_ext.files.layout import LEFT_BEHIND_NAME

__all__ = ["note_left_behind", "refuse_left_behind"]

_FORMAT = 1


def note_left_behind(query_folder: Folder, columns: Collection[str]) -> None:
    """Write down which columns a query leaves behind; every bucket's first call writes the same."""
    if columns:
        query_folder.create(LEFT_BEHIND_NAME, sealed_document({"format": _FORMAT, "columns": sorted(columns)}))


def refuse_left_behind(query_folder: Folder, operator: str, columns: Collection[str]) -> None:
    """Refuse state columns of names that were left behind."""
    where = query_folder.where(LEFT_BEHIND_NAME)
    try:
        data = query_folder.get(LEFT_BEHIND_NAME)
    except MissingCheckpointError:
        return
    with readable(where, "list of columns that were left behind"):
        left = {str(name) for name in opened_document(data, where, _FORMAT)["columns"]}
    again = [name for name in columns if name in left]
    if again:
        raise SchemaChangedError(
            f"the state of operator {operator!r} cannot get a column {again[0]!r}: the query left one of that name "
            "behind when it began (allow_non_restored=True), and old rows would show its values. Give the column "
            "another name."
        )
