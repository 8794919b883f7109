"""What a query may start from: a `Savepoint`, or the `RetainedCheckpoint` of another query."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from spark_state_ext.backends.registry import FSSPEC, Backend, refuse_unusable, resolve_backends
from spark_state_ext.engine.limits import check_flags
from spark_state_ext.errors import UsageError
from spark_state_ext.files.folder import refuse_relative

__all__ = ["CLAIM", "NO_CLAIM", "RetainedCheckpoint", "Savepoint", "StartFrom", "start_from_plain", "start_to_plain"]

# Flink's restore modes (FLIP-193).
NO_CLAIM, CLAIM = "no_claim", "claim"
_KIND = "kind"


@dataclass(frozen=True)
class Savepoint:
    """A savepoint to read or to start a query from.

    Parameters
    ----------
    path
        Folder of the savepoint: an fsspec URL or an absolute path that all executors can access.
    mode
        ``"no_claim"``: the savepoint is kept, and the query no longer needs it after its first batch with data was
        committed. ``"claim"``: the query owns the savepoint and deletes it then.
    operator
        Name of the operator in the savepoint, if the job's operator has another name.
    allow_non_restored
        True: state columns that the job no longer has are dropped, and an operator that is not in the savepoint begins
        without state. By default both are errors.
    storage_options
        Options of the path's fsspec file system.

    Raises
    ------
    UsageError
        If an argument is invalid.

    Examples
    --------
    >>> Savepoint("/savepoints/monday").mode
    'no_claim'
    """

    path: str
    mode: str = NO_CLAIM
    operator: str | None = None
    allow_non_restored: bool = False
    # Not in the repr: they may contain secrets.
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
    """The state of another query, stopped or still running, to start a query from.

    Parameters
    ----------
    root
        Root of the other query's state.
    checkpoint_location
        The other query's Spark checkpoint location.
    batch
        The batch whose state is used; by default the last committed batch.
    mode
        As for `Savepoint`. With ``"claim"`` the query takes over the other query's folder, and its root must be the
        same.
    operator, allow_non_restored
        As for `Savepoint`.
    force
        Claim a batch even if later batches of the other query use its files: these batches are lost then.
    storage_options
        Options of the root's fsspec file system.
    backends
        The other query's backends if it has more than its root: `Backend` objects and ``"fsspec"``, which is the root.

    Raises
    ------
    UsageError
        If an argument is invalid.
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
            raise UsageError(f"batch must be a batch number, not {self.batch!r}")
        object.__setattr__(self, "storage_options", dict(self.storage_options))
        _, backends = resolve_backends(self.backends, self.root, self.storage_options, None)
        refuse_unusable(self.root, self.storage_options, backends)
        object.__setattr__(self, "backends", tuple(backends))

    @property
    def places(self) -> tuple[Backend, ...]:
        """The other query's backends."""
        return tuple(backend for backend in self.backends if isinstance(backend, Backend))

    def __str__(self) -> str:
        batch = "the last batch" if self.batch is None else f"batch {self.batch}"
        return f"{batch} of the query with the checkpoint location {self.checkpoint_location}"


StartFrom = Savepoint | RetainedCheckpoint
_KINDS: dict[str, type[Savepoint] | type[RetainedCheckpoint]] = {
    "savepoint": Savepoint,
    "retained_checkpoint": RetainedCheckpoint,
}


def start_to_plain(start: StartFrom | None) -> dict[str, Any] | None:
    """Return a start as builtin values."""
    if start is None:
        return None
    kind = next(kind for kind, start_type in _KINDS.items() if isinstance(start, start_type))
    return {_KIND: kind, **asdict(start)}


def start_from_plain(plain: Mapping[str, Any] | None) -> StartFrom | None:
    """Return a start from its plain values, on an executor."""
    if plain is None:
        return None
    fields = dict(plain)
    start_type = _KINDS[fields.pop(_KIND)]
    if "backends" in fields:
        fields["backends"] = tuple(Backend(**backend) for backend in fields["backends"])
    return start_type(**fields)


def _check(mode: str, storage_options: Mapping[str, Any]) -> None:
    if mode not in (NO_CLAIM, CLAIM):
        raise UsageError(f"mode must be {NO_CLAIM!r} or {CLAIM!r}, not {mode!r}")
    if not isinstance(storage_options, Mapping):
        raise UsageError(f"storage_options must be a mapping, such as a dict, not {storage_options!r}")


def _path(name: str, value: Any) -> str:
    try:
        path = os.fspath(value)
    except TypeError:
        path = None
    if not isinstance(path, str) or not path:
        raise UsageError(f"{name} must be a path or a URL as str or os.PathLike, not {value!r}")
    refuse_relative(path, name)
    return path.rstrip("/") or path
