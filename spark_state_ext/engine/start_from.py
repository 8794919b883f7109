"""What a query may start from, as the user says it: a savepoint, or the checkpoint that another query has left."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from spark_state_ext.backends.registry import FSSPEC, Backend, configured, refuse_unusable
from spark_state_ext.engine.limits import check_flags
from spark_state_ext.errors import UsageError
from spark_state_ext.files.folder import refuse_relative

__all__ = ["CLAIM", "NO_CLAIM", "RetainedCheckpoint", "Savepoint", "StartFrom", "start_from_plain", "start_to_plain"]

# Flink's restore modes (FLIP-193).
NO_CLAIM, CLAIM = "no_claim", "claim"
_KIND = "kind"


@dataclass(frozen=True)
class Savepoint:
    """A savepoint, to start a query from, or to read.

    Parameters
    ----------
    path
        Its folder: any fsspec URL, or an absolute path, that all executors reach.
    mode
        ``"no_claim"``: the query takes nothing away, and depends on nothing there once its first batch with data is
        committed. ``"claim"``: the savepoint is the query's, which deletes it then.
    operator
        Name of the operator in it whose state is taken, where the job's has another name.
    allow_non_restored
        State columns that the job no longer has are left behind, and an operator that is not in the savepoint begins
        without state. By default both are an error.
    storage_options
        Options for the path's fsspec file system.

    Raises
    ------
    UsageError
        When an argument cannot work.

    Examples
    --------
    >>> Savepoint("/savepoints/monday").mode
    'no_claim'
    """

    path: str
    mode: str = NO_CLAIM
    operator: str | None = None
    allow_non_restored: bool = False
    # They may hold secrets.
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", _path("the path of a savepoint", self.path))
        _check(self.mode, self.storage_options)
        check_flags(allow_non_restored=self.allow_non_restored)
        object.__setattr__(self, "storage_options", dict(self.storage_options))

    def __str__(self) -> str:
        return f"the savepoint at {self.path}"


@dataclass(frozen=True)
class RetainedCheckpoint:
    """The checkpoint that another query has left, or still writes.

    Parameters
    ----------
    root
        Root of the other query's state.
    checkpoint_location
        Its Spark checkpoint location, as Spark reads it.
    batch
        The batch whose state is taken; by default the last one that was committed.
    mode
        As for `Savepoint`. With ``"claim"`` the other query's folder is taken over as it is, and the job's root must be
        the same.
    operator, allow_non_restored
        As for `Savepoint`.
    force
        Claim a batch though later ones of the other query build upon its files: these are lost then.
    storage_options
        Options for the root's fsspec file system.
    backends
        The other query's backends, where there are more than its root: `Backend` and ``"fsspec"``, which is the root.

    Raises
    ------
    UsageError
        When an argument cannot work.
    """

    root: str
    checkpoint_location: str
    batch: int | None = None
    mode: str = NO_CLAIM
    operator: str | None = None
    allow_non_restored: bool = False
    force: bool = False
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    backends: Sequence[str | Backend] = (FSSPEC,)

    def __post_init__(self) -> None:
        object.__setattr__(self, "root", _path("root", self.root))
        object.__setattr__(self, "checkpoint_location", os.fspath(self.checkpoint_location))
        _check(self.mode, self.storage_options)
        check_flags(allow_non_restored=self.allow_non_restored, force=self.force)
        if self.batch is not None and (
            isinstance(self.batch, bool) or not isinstance(self.batch, int) or self.batch < 0
        ):
            raise UsageError(f"batch must be the number of a batch, not {self.batch!r}")
        object.__setattr__(self, "storage_options", dict(self.storage_options))
        _, found = configured(self.backends, self.root, self.storage_options, None)
        refuse_unusable(self.root, self.storage_options, found)
        object.__setattr__(self, "backends", tuple(found))

    @property
    def places(self) -> tuple[Backend, ...]:
        """The other query's backends."""
        return tuple(it for it in self.backends if isinstance(it, Backend))

    def __str__(self) -> str:
        batch = "the last batch" if self.batch is None else f"batch {self.batch}"
        return f"{batch} of the query with the checkpoint location {self.checkpoint_location}"


StartFrom = Savepoint | RetainedCheckpoint
_KINDS: dict[str, type[Savepoint] | type[RetainedCheckpoint]] = {
    "savepoint": Savepoint,
    "retained_checkpoint": RetainedCheckpoint,
}


def start_to_plain(start: StartFrom | None) -> dict[str, Any] | None:
    """As builtin values."""
    if start is None:
        return None
    kind = next(kind for kind, made in _KINDS.items() if isinstance(start, made))
    return {_KIND: kind, **asdict(start)}


def start_from_plain(plain: Mapping[str, Any] | None) -> StartFrom | None:
    """Inverse of `start_to_plain`, on an executor."""
    if plain is None:
        return None
    fields = dict(plain)
    made = _KINDS[fields.pop(_KIND)]
    if "backends" in fields:
        fields["backends"] = tuple(Backend(**backend) for backend in fields["backends"])
    return made(**fields)


def _check(mode: str, storage_options: Mapping[str, Any]) -> None:
    if mode not in (NO_CLAIM, CLAIM):
        raise UsageError(f"mode must be {NO_CLAIM!r} or {CLAIM!r}, not {mode!r}")
    if not isinstance(storage_options, Mapping):
        raise UsageError(f"storage_options must be a mapping, such as a dict, not {storage_options!r}")


def _path(what: str, given: Any) -> str:
    try:
        path = os.fspath(given)
    except TypeError:
        path = None
    if not isinstance(path, str) or not path:
        raise UsageError(f"{what} must be a path or a URL as str or os.PathLike, not {given!r}")
    refuse_relative(path, what)
    return path.rstrip("/") or path
