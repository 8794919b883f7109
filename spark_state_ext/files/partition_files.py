"""The assignment of source partitions to buckets in a query folder: numbered files, of which the last is in force."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from arrow_schemas.partitions import PartitionAssignment, parse_partitions_name, partitions_name
from spark_state_ext.errors import PartitionsChangedError, StorageError
from spark_state_ext.files.folder import Folder

__all__ = ["newest_assignment", "record_assignment", "record_growth", "refuse_assignment"]

# In each round, some plan writes its file, and a plan writes only one.
_ROUNDS_MAX = 5


def newest_assignment(query_folder: Folder) -> tuple[int, PartitionAssignment] | None:
    """Return the number of the assignment in force, and the assignment; None if there is none."""
    numbers = [number for number in map(parse_partitions_name, query_folder.names()) if number is not None]
    if not numbers:
        return None
    name = partitions_name(max(numbers))
    return max(numbers), PartitionAssignment.decode(query_folder.get(name), query_folder.where(name))


def refuse_assignment(query_folder: Folder, plan: PartitionAssignment) -> None:
    """Raise an error if the recorded assignment cannot grow to a plan; write nothing.

    A plan of other streams, or of other initial counts, is accepted here: comparing the operator files finds it.
    """
    newest = newest_assignment(query_folder)
    if newest is not None and newest[1].initial == plan.initial:
        newest[1].grown_to(plan)


def record_assignment(query_folder: Folder, plan: PartitionAssignment, *, has_state: bool) -> PartitionAssignment:
    """Compare a plan with the recorded assignment, and record what the plan adds."""

    def grow(recorded: PartitionAssignment | None) -> PartitionAssignment:
        if recorded is not None:
            return recorded.grown_to(plan)
        if has_state:
            raise _missing_assignment_error(query_folder)
        return plan

    return _record(query_folder, grow)


def record_growth(query_folder: Folder, largest: Mapping[str, int]) -> PartitionAssignment:
    """Record the numbers of partitions that a batch's rows prove, before a user function sees these rows."""

    def grow(recorded: PartitionAssignment | None) -> PartitionAssignment:
        if recorded is None:
            raise _missing_assignment_error(query_folder)
        return recorded.reached_by(largest)

    return _record(query_folder, grow)


def _record(
    query_folder: Folder, grow: Callable[[PartitionAssignment | None], PartitionAssignment]
) -> PartitionAssignment:
    for _ in range(_ROUNDS_MAX):
        newest = newest_assignment(query_folder)
        number, recorded = (-1, None) if newest is None else newest
        assignment = grow(recorded)
        if assignment is recorded or query_folder.create(partitions_name(number + 1), assignment.encode()):
            return assignment
    raise StorageError(
        f"the assignment of partitions cannot be written to {query_folder.root}: the store says that the file exists, "
        "but does not list it. Start again."
    )


def _missing_assignment_error(query_folder: Folder) -> PartitionsChangedError:
    return PartitionsChangedError(
        f"{query_folder.root} has state by source partition, but {partitions_name(0)}, which says the bucket of each "
        "partition, is missing: bring the file back, or start from a new checkpoint location"
    )
