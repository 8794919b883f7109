"""The cases of the savepoint matrix: modes × forms × stores × perturbations, and which combinations have no meaning."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

__all__ = [
    "CASES",
    "COVERING",
    "DELETED",
    "EACH_ONCE",
    "KILLED",
    "MOVED",
    "NOTHING",
    "SHORT",
    "TWICE",
    "WHOLE",
    "Case",
    "Lengths",
]

MODES = ("no_claim", "claim")
FORMS = ("native", "canonical", "checkpoint")
STORES = ("disk", "s3")
NOTHING, MOVED, DELETED, KILLED, TWICE = "nothing", "moved", "deleted", "killed", "twice"
PERTURBATIONS = (NOTHING, MOVED, DELETED, KILLED, TWICE)


@dataclass(frozen=True)
class Lengths:
    """The number of batches in each part of a case.

    Parameters
    ----------
    first, after
        Batches of the first job: before the snapshot, and after it if the job continues.
    second, third
        Batches of the job that starts from the snapshot, and of the job that starts from a snapshot of the second job.
    buckets
        The number of buckets of the state.
    """

    first: int
    after: int
    second: int
    third: int
    buckets: int

    @property
    def side(self) -> int:
        """Number of the first file that only the first job reads, after its snapshot; other files have smaller numbers."""
        return self.first + self.second + self.third


# A bucket writes a snapshot every ten batches, and clean-up visits one bucket after the other. With fewer batches there would be
# nothing to clean up, in particular no file that came with the savepoint.
WHOLE = Lengths(first=20, after=12, second=12, third=9, buckets=10)
SHORT = Lengths(first=3, after=1, second=3, third=1, buckets=3)


@dataclass(frozen=True)
class Case:
    """One case of the matrix.

    Parameters
    ----------
    mode, form, store, perturbation
        The case's value of each dimension.
    """

    mode: str
    form: str
    store: str
    perturbation: str = NOTHING

    @property
    def name(self) -> str:
        """The name that ``--only`` selects by."""
        return f"{self.mode}-{self.form}-{self.store}-{self.perturbation}"

    @property
    def adopts(self) -> bool:
        """True if the new job continues in the old job's folder."""
        return self.mode == "claim" and self.form == "checkpoint"

    @property
    def meaningless(self) -> str:
        """Why there is nothing to run; empty if the case can be run."""
        if self.perturbation != DELETED or self.mode != "claim":
            return ""
        if self.adopts:
            return "the new query owns the old query's folder: there is no separate source to delete"
        return "the new job deletes what it claimed once it is detached: nothing is left for the user to delete"


CASES = tuple(Case(*parts) for parts in itertools.product(MODES, FORMS, STORES, PERTURBATIONS))
# Each pair of values of mode, form and store is in one of these cases. So is each mode with each perturbation (but
# "nothing") that has a meaning in this mode.
COVERING = tuple(
    Case(*parts)
    for parts in (
        ("no_claim", "native", "disk", DELETED),
        ("claim", "native", "s3", MOVED),
        ("no_claim", "canonical", "s3", KILLED),
        ("claim", "canonical", "disk", TWICE),
        ("no_claim", "checkpoint", "s3", TWICE),
        ("claim", "checkpoint", "disk", KILLED),
        ("no_claim", "checkpoint", "disk", MOVED),
    )
)
# The few cases that the suite runs. Each mode, form, store and perturbation (but "nothing") is in at least one of them.
EACH_ONCE = tuple(
    case
    for case in COVERING
    if case.name
    in (
        "no_claim-native-disk-deleted",
        "claim-native-s3-moved",
        "claim-canonical-disk-twice",
        "claim-checkpoint-disk-killed",
    )
)
