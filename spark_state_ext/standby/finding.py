"""Lists the buckets under a root for followers: operators, the query folders in use, and their buckets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from arrow_schemas.operator import OperatorFile, operator_file_name, parse_operator_file_name
from arrow_schemas.standby import BucketKey
from spark_state_ext.errors import StateError
from spark_state_ext.files.folder import Entry, Folder
from spark_state_ext.files.layout import SPILL_FOLDER, STARTING_FOLDER
from spark_state_ext.files.operator_catalog import is_query_folder
from spark_state_ext.ownership.lease_log import last_renewed_ms
from spark_state_ext.rescale.folders import first_folder, folders_in_force

__all__ = ["Finder", "FoundBuckets", "written"]

_NOT_QUERIES = frozenset({STARTING_FOLDER, SPILL_FOLDER})
# A query folder last written so long before its operator's newest one belongs to a query that was given up.
_GIVEN_UP_S = 86_400.0


@dataclass(frozen=True)
class FoundBuckets:
    """The buckets to follow under a root.

    Parameters
    ----------
    operators
        The operator file in force for each bucket.
    errors
        Why an operator could not be read. Its buckets are then those of the previous look.
    is_bare
        True if the root is empty or does not exist.
    """

    operators: Mapping[BucketKey, OperatorFile]
    errors: Mapping[str, StateError]
    is_bare: bool = False


class Finder:
    """Looks for buckets under a root, again and again."""

    def __init__(self, root: Folder) -> None:
        self._root = root
        self._found: dict[str, dict[BucketKey, OperatorFile]] = {}
        # Operator files never change.
        self._read: dict[str, OperatorFile] = {}

    def find(self) -> FoundBuckets:
        """Return the buckets that have files, in the folder that each query writes now; ignore queries given up."""
        errors: dict[str, StateError] = {}
        entries = self._root.entries()
        # Names that begin with `_` or `.` are not names of operators.
        names = [entry.name for entry in entries if entry.folder and entry.name[0] not in "_."]
        found: dict[str, dict[BucketKey, OperatorFile]] = {}
        for name in names:
            try:
                found[name] = self._of_operator(name)
            except StateError as error:
                errors[name] = error
                found[name] = self._found.get(name, {})
        self._found = found
        operators = {key: it for buckets in found.values() for key, it in buckets.items()}
        return FoundBuckets(operators, errors, not entries)

    def _of_operator(self, operator: str) -> dict[BucketKey, OperatorFile]:
        folder = self._root.child(operator)
        names = [it.name for it in folder.entries() if it.folder and it.name not in _NOT_QUERIES]
        listed = {name: folder.child(name).entries() for name in names if is_query_folder(name)}
        queries = {name: entries for name, entries in listed.items() if _operator_numbers(entries)}
        in_force = folders_in_force({name: [it.name for it in entries] for name, entries in queries.items()})
        queries = {name: entries for name, entries in queries.items() if name in in_force}
        found: dict[BucketKey, OperatorFile] = {}
        times_ms = {}
        if len(queries) > 1:
            times_ms = {name: last_renewed_ms(folder.child(name)) for name in queries}
        for name in written(times_ms) if times_ms else queries:
            it = self._operator_file(folder.child(name), max(_operator_numbers(queries[name])))
            buckets = (int(entry.name) for entry in queries[name] if entry.folder and _is_number(entry.name))
            found |= {BucketKey(operator, name, bucket): it for bucket in buckets if bucket < it.buckets}
        return found

    def _operator_file(self, query_folder: Folder, number: int) -> OperatorFile:
        name = operator_file_name(number)
        where = query_folder.where(name)
        if where not in self._read:
            self._read[where] = OperatorFile.decode(query_folder.get(name), where)
        return self._read[where]


def written(times_ms: Mapping[str, int | None]) -> list[str]:
    """Return which query folders of an operator to follow.

    Of the folders that a rescaled query had one after the other, this is the one written last. Of several queries,
    these are those written at most a day before the newest one, by the clocks of their drivers.
    """
    last = {name: -1 if at_ms is None else at_ms for name, at_ms in times_ms.items()}
    by_query: dict[str, str] = {}
    for name in sorted(last):
        before = by_query.setdefault(first_folder(name), name)
        if last[name] >= last[before]:
            by_query[first_folder(name)] = name
    newest_ms = max(last.values(), default=0)
    return sorted(name for name in by_query.values() if last[name] < 0 or last[name] >= newest_ms - _GIVEN_UP_S * 1000)


def _operator_numbers(entries: Iterable[Entry]) -> list[int]:
    numbers = (parse_operator_file_name(entry.name) for entry in entries if not entry.folder)
    return [number for number in numbers if number is not None]


def _is_number(name: str) -> bool:
    return name.isascii() and name.isdigit() and str(int(name)) == name
