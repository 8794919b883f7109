"""State columns that a query left behind when it began with another query's state: its older files still have them.

A column of that name must not be added later, as rows that were not written since would show the old values.
"""

from __future__ import annotations

from collections.abc import Collection

from arrow_schemas.checksum import open_document, report_damage, seal_document
from spark_state_ext.errors import MissingCheckpointError, SchemaChangedError
from spark_state_ext.files.folder import Folder
from spark_state_ext.files.layout import LEFT_BEHIND_NAME

__all__ = ["note_left_behind", "refuse_left_behind"]

_FORMAT = 1


def note_left_behind(query_folder: Folder, columns: Collection[str]) -> None:
    """Record which columns a query leaves behind; every bucket's first call records the same."""
    if columns:
        query_folder.create(LEFT_BEHIND_NAME, seal_document({"format": _FORMAT, "columns": sorted(columns)}))


def refuse_left_behind(query_folder: Folder, operator: str, columns: Collection[str]) -> None:
    """Raise a SchemaChangedError if a state column has a name that was left behind."""
    where = query_folder.where(LEFT_BEHIND_NAME)
    try:
        data = query_folder.get(LEFT_BEHIND_NAME)
    except MissingCheckpointError:
        return
    with report_damage(where, "list of columns that were left behind"):
        left_behind = {str(name) for name in open_document(data, where, _FORMAT)["columns"]}
    reused = [name for name in columns if name in left_behind]
    if reused:
        raise SchemaChangedError(
            f"the state of operator {operator!r} cannot get a column {reused[0]!r}: the query left one of that name "
            "behind when it began (allow_non_restored=True), and old rows would show its values. Give the column "
            "another name."
        )
