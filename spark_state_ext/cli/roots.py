"""What commands see of a root before they believe that it is one: a mistyped one looks as if nobody had state there."""

from __future__ import annotations

from collections.abc import Collection

from arrow_schemas.operator import parse_operator_file_name
from spark_state_ext.errors import UsageError
from spark_state_ext.files.folder import Entry, Folder

__all__ = ["operators_below"]

# Operators in a message.
_NAMED_MAX = 10


def operators_below(
    root: Folder, wanted: Collection[str] = (), *, may_lack_all: bool = False
) -> dict[str, list[Entry]]:
    """What lies in the folders of the operators of a root."""
    here = root.entries()
    if not here and not may_lack_all:
        raise UsageError(f"there is no folder {root.root}, or it is empty: give the root, as ArrowState has it")
    # No operator's name begins with "_": such a folder is what hosts with a standby service tell each other.
    there = [entry.name for entry in here if entry.folder and not entry.name.startswith("_")]
    missing = sorted(set(wanted).difference(there))
    # Where one is missing, all are looked at, as the folder of an operator has none.
    listed = {name: root.child(name).entries() for name in there if missing or not wanted or name in wanted}
    for where, entries in [(root.root, here), *((root.child(name).root, found) for name, found in listed.items())]:
        if any(not entry.folder and parse_operator_file_name(entry.name) is not None for entry in entries):
            raise UsageError(
                f"give the root, not a folder in it: {where} has an operator file, so {root.root} is the folder of "
                "an operator or of a query"
            )
    if not there and not may_lack_all:
        raise UsageError(f"{root.root} has no operators, as it has no folders: give the root, as ArrowState has it")
    if missing:
        shown = ", ".join(there[:_NAMED_MAX]) + (", …" if len(there) > _NAMED_MAX else "")
        raise UsageError(f"{root.root} has no operator {missing[0]!r}; it has: {shown}")
    return listed
