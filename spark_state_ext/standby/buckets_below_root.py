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

__all__ = ["Finder", "FoundBuckets", "select_query_folders"]

_NOT_QUERIES = frozenset({STARTING_FOLDER, SPILL_FOLDER})
# A query folder last written this long before its operator's newest one belongs to a query that was given up.
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
        self._last: dict[str, dict[BucketKey, OperatorFile]] = {}
        # Operator files never change.
        self._operator_files: dict[str, OperatorFile] = {}

    def find(self) -> FoundBuckets:
        """Return the buckets that have files, in the folder that each query writes now; ignore queries given up."""
        errors: dict[str, StateError] = {}
        entries = self._root.entries()
        # Names that begin with `_` or `.` are not names of operators.
        names = [entry.name for entry in entries if entry.folder and entry.name[0] not in "_."]
        by_operator: dict[str, dict[BucketKey, OperatorFile]] = {}
        for name in names:
            try:
                by_operator[name] = self._list_buckets(name)
            except StateError as error:
                errors[name] = error
                by_operator[name] = self._last.get(name, {})
        self._last = by_operator
        operators = {key: operator for buckets in by_operator.values() for key, operator in buckets.items()}
        return FoundBuckets(operators, errors, not entries)

    def _list_buckets(self, operator: str) -> dict[BucketKey, OperatorFile]:
        folder = self._root.child(operator)
        names = [entry.name for entry in folder.entries() if entry.folder and entry.name not in _NOT_QUERIES]
        listed = {name: folder.child(name).entries() for name in names if is_query_folder(name)}
        queries = {name: entries for name, entries in listed.items() if _operator_numbers(entries)}
        in_force = folders_in_force({name: [entry.name for entry in entries] for name, entries in queries.items()})
        queries = {name: entries for name, entries in queries.items() if name in in_force}
        operator_files: dict[BucketKey, OperatorFile] = {}
        times_ms = {}
        if len(queries) > 1:
            times_ms = {name: last_renewed_ms(folder.child(name)) for name in queries}
        for name in select_query_folders(times_ms) if times_ms else queries:
            operator_file = self._read_operator(folder.child(name), max(_operator_numbers(queries[name])))
            buckets = (int(entry.name) for entry in queries[name] if entry.folder and _is_number(entry.name))
            operator_files |= {
                BucketKey(operator, name, bucket): operator_file for bucket in buckets if bucket < operator_file.buckets
            }
        return operator_files

    def _read_operator(self, query_folder: Folder, number: int) -> OperatorFile:
        name = operator_file_name(number)
        where = query_folder.where(name)
        if where not in self._operator_files:
            self._operator_files[where] = OperatorFile.decode(query_folder.get(name), where)
        return self._operator_files[where]


def select_query_folders(times_ms: Mapping[str, int | None]) -> list[str]:
    """Return which query folders of an operator to follow.

    Of the folders that a rescaled query had one after the other, it is the one written last. Of several queries, it is
    each one written at most a day before the newest, by the clocks of their drivers.
    """
    last_ms = {name: -1 if at_ms is None else at_ms for name, at_ms in times_ms.items()}
    by_query: dict[str, str] = {}
    for name in sorted(last_ms):
        other = by_query.setdefault(first_folder(name), name)
        if last_ms[name] >= last_ms[other]:
            by_query[first_folder(name)] = name
    newest_ms = max(last_ms.values(), default=0)
    return sorted(
        name for name in by_query.values() if last_ms[name] < 0 or last_ms[name] >= newest_ms - _GIVEN_UP_S * 1000
    )


def _operator_numbers(entries: Iterable[Entry]) -> list[int]:
    numbers = (parse_operator_file_name(entry.name) for entry in entries if not entry.folder)
    return [number for number in numbers if number is not None]


def _is_number(name: str) -> bool:
    return name.isascii() and name.isdigit() and str(int(name)) == name
