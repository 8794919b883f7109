"""Cases of the matrix of savepoints: modes × forms × stores × what happens to them, and which of these mean nothing."""

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
    """How many batches each part of a case has.

    Parameters
    ----------
    first, after
        Of the first job: before the snapshot, and after it where it goes on.
    second, third
        Of the job that starts from it, and of the one that starts from a snapshot of that one.
    buckets
        Into how many buckets the state is divided.
    """

    first: int
    after: int
    second: int
    third: int
    buckets: int

    @property
    def side(self) -> int:
        """Number of the first file of the first job's own after the snapshot, past all files of the jobs in line."""
        return self.first + self.second + self.third


# A bucket writes a snapshot in ten batches, and clean-up has buckets take turns: so there is something to clean up, of what
# came with the savepoint too, with so many batches and no fewer.
WHOLE = Lengths(first=20, after=12, second=12, third=9, buckets=10)
SHORT = Lengths(first=3, after=1, second=3, third=1, buckets=3)


@dataclass(frozen=True)
class Case:
    """One case.

    Parameters
    ----------
    mode, form, store, perturbation
        What it is of each.
    """

    mode: str
    form: str
    store: str
    perturbation: str = NOTHING

    @property
    def name(self) -> str:
        """As ``--only`` knows it."""
        return f"{self.mode}-{self.form}-{self.store}-{self.perturbation}"

    @property
    def adopts(self) -> bool:
        """The new job goes on in the old one's folder."""
        return self.mode == "claim" and self.form == "checkpoint"

    @property
    def meaningless(self) -> str:
        """Why there is nothing to run; empty where there is."""
        if self.perturbation != DELETED or self.mode != "claim":
            return ""
        if self.adopts:
            return "the old query's folder is the new one's own: there is no source that could be deleted"
        return (
            "the new job deletes what it claimed by itself, once detached: there is nothing left for the user to delete"
        )


CASES = tuple(Case(*parts) for parts in itertools.product(MODES, FORMS, STORES, PERTURBATIONS))
# Any two of mode, form and store come together in one of these; and all that happens does in both modes.
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
# Of these the suite has few: each mode, form, store, and whatever happens comes at least once.
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
