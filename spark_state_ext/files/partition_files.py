"""The assignment of a source's partitions to buckets in a query folder: numbered files, of which the last counts."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from arrow_schemas.partitions import PartitionAssignment, parse_partitions_name, partitions_name
from spark_state_ext.errors import PartitionsChangedError, StorageError
from spark_state_ext.files.folder import Folder

__all__ = ["newest_assignment", "record_assignment", "record_growth", "refuse_assignment"]

# Each round ends with the file of one plan written, and a plan writes one.
_ROUNDS_MAX = 5


def newest_assignment(query_folder: Folder) -> tuple[int, PartitionAssignment] | None:
    """The assignment in force, and its number; None where there is none."""
    numbers = [number for number in map(parse_partitions_name, query_folder.names()) if number is not None]
    if not numbers:
        return None
    name = partitions_name(max(numbers))
    return max(numbers), PartitionAssignment.decode(query_folder.get(name), query_folder.where(name))


def refuse_assignment(query_folder: Folder, wanted: PartitionAssignment) -> None:
    """Refuse a plan that what is recorded cannot grow to; nothing is written.

    A plan of other streams, or of other first counts, is none of its business: the operator file tells of these.
    """
    newest = newest_assignment(query_folder)
    if newest is not None and newest[1].initial == wanted.initial:
        newest[1].grown_to(wanted)


def record_assignment(query_folder: Folder, wanted: PartitionAssignment, *, has_state: bool) -> PartitionAssignment:
    """Compare a plan with what is recorded, and record what it adds."""

    def grown(recorded: PartitionAssignment | None) -> PartitionAssignment:
        if recorded is not None:
            return recorded.grown_to(wanted)
        if has_state:
            raise _without_assignment(query_folder)
        return wanted

    return _recorded(query_folder, grown)


def record_growth(query_folder: Folder, largest: Mapping[str, int]) -> PartitionAssignment:
    """Record the counts that a batch's rows prove, before any of them reaches a function."""

    def grown(recorded: PartitionAssignment | None) -> PartitionAssignment:
        if recorded is None:
            raise _without_assignment(query_folder)
        return recorded.reached_by(largest)

    return _recorded(query_folder, grown)


def _recorded(
    query_folder: Folder, grown: Callable[[PartitionAssignment | None], PartitionAssignment]
) -> PartitionAssignment:
    for _ in range(_ROUNDS_MAX):
        newest = newest_assignment(query_folder)
        number, recorded = (-1, None) if newest is None else newest
        wanted = grown(recorded)
        if wanted is recorded or query_folder.create(partitions_name(number + 1), wanted.encode()):
            return wanted
    raise StorageError(
        f"the assignment of partitions cannot be written to {query_folder.root}: the store says that there is one, and "
        "does not list it. Start again."
    )


def _without_assignment(query_folder: Folder) -> PartitionsChangedError:
    return PartitionsChangedError(
        f"{query_folder.root} has state by source partition, and no {partitions_name(0)}, which tells the bucket of "
        "each partition: bring the file back, or start from a new checkpoint location"
    )
