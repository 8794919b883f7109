"""The backends of a job: the user's list of them, and their factories, which entry points name."""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import entry_points
from typing import Any

from spark_state_ext.backends import BackendFactory
from spark_state_ext.backends.files import FilesBackend
from spark_state_ext.backends.storage_options import refuse_misspelt
from spark_state_ext.errors import ExecutorPackageError, UsageError
from spark_state_ext.files.folder import Folder, refuse_relative

__all__ = ["CHANGELOG", "ENTRY_POINTS", "FSSPEC", "Backend", "resolve_backends", "load_factory", "refuse_unusable"]

ENTRY_POINTS = "spark_state_ext.backends"
FSSPEC = "fsspec"
CHANGELOG = "changelog"
_PASSWORD = re.compile(r"://[^/@]*:[^/@]*@")


@dataclass(frozen=True)
class Backend:
    """A place that keeps checkpoint files.

    Parameters
    ----------
    root
        For ``fsspec``: the folder, any fsspec URL or an absolute path.
    name
        The backend's name in pointers; by default its root. Two backends must not have the same name. A backend whose
        files were moved unchanged keeps its old name.
    kind
        ``fsspec``, or the name of an entry point in the group ``spark_state_ext.backends``.
    storage_options
        For ``fsspec``: options of the file system.
    options
        For other kinds: the options that they take, as plain values.

    Raises
    ------
    UsageError
        If `kind` is ``changelog``, which has no settings; if ``fsspec`` has no `root` or a relative one; if another
        kind has no `name`; or if `root` holds a password.
    """

    root: str = ""
    name: str = ""
    kind: str = FSSPEC
    # Not in the repr, which messages show: options may hold secrets.
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if self.kind == CHANGELOG:
            raise UsageError("the changelog has no settings: write backends=['changelog', …]")
        if self.kind == FSSPEC and not self.root:
            raise UsageError("a backend of kind 'fsspec' needs a root")
        if _PASSWORD.search(self.root):
            raise UsageError(
                "a backend's root must not hold a password, because it is stored with the state: use storage_options"
            )
        if self.kind == FSSPEC:
            refuse_relative(self.root, "a backend's root")
        root = self.root.rstrip("/") or self.root
        object.__setattr__(self, "root", root)
        if not (self.name or root):
            raise UsageError(f"a backend of kind {self.kind!r} needs a name")
        object.__setattr__(self, "name", self.name or root)
        object.__setattr__(self, "storage_options", dict(self.storage_options))
        object.__setattr__(self, "options", dict(self.options))

    def to_plain(self) -> dict[str, Any]:
        """Return the backend as builtin values.

        Returns
        -------
        dict
            All parameters by name.
        """
        return asdict(self)

    @property
    def factory_options(self) -> dict[str, Any]:
        """The options for the factory."""
        if self.kind == FSSPEC:
            return {"root": self.root, "storage_options": dict(self.storage_options)}
        return dict(self.options)


def resolve_backends(
    backends: Sequence[str | Backend], root: str, storage_options: Mapping[str, Any], restore_from: str | None
) -> tuple[bool, list[Backend]]:
    """Check a user's list of backends, and split off the changelog.

    Parameters
    ----------
    backends
        ``"changelog"``, ``"fsspec"`` (the operator's root) and any `Backend`.
    root, storage_options
        The operator's root and its storage options.
    restore_from
        Name of the backend that state is restored from first.

    Returns
    -------
    tuple
        True if the list has the changelog, and the other backends in their order.

    Raises
    ------
    UsageError
        If the list cannot work.
    """
    if isinstance(backends, (str, Backend)) or not isinstance(backends, Sequence):
        raise UsageError(f"backends must be a list, not {backends!r}")
    journal, others = False, []
    for backend in backends:
        if backend == CHANGELOG:
            journal = True
        elif backend == FSSPEC:
            others.append(Backend(root, storage_options=storage_options))
        elif isinstance(backend, Backend):
            others.append(backend)
        else:
            raise UsageError(f"backends may be 'changelog', 'fsspec' and Backend(…), not {backend!r}")
    names = [backend.name for backend in others]
    if not others:
        raise UsageError(
            "backends must have a place for files, such as 'fsspec' for the root: the changelog is only a journal and "
            "cannot hold the whole state"
        )
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"two backends have the name {name!r}")
    if restore_from == FSSPEC:
        restore_from = Backend(root).name
    if restore_from is not None and restore_from not in names:
        raise UsageError(
            f"restore_from must be the name of one of the backends ({', '.join(names)}), not {restore_from!r}"
        )
    return journal, others


def refuse_unusable(root: str, storage_options: Mapping[str, Any], backends: Sequence[Backend]) -> None:
    """Raise `UsageError`, already when the job is planned, for backends that executors could not use.

    Parameters
    ----------
    root, storage_options
        The operator's root and its storage options.
    backends
        The user's backends.

    Raises
    ------
    UsageError
        For an unknown kind or protocol, and for storage options that a file system does not take.
    """
    folders = [(root, storage_options)]
    folders += [(backend.root, backend.storage_options) for backend in backends if backend.kind == FSSPEC]
    for folder, options in folders:
        refuse_misspelt(folder, options)
        Folder(folder, options)
    for backend in backends:
        if backend.kind != FSSPEC:
            _refuse_unknown_kind(backend)


def _refuse_unknown_kind(backend: Backend) -> None:
    # Executors have the same packages as this Python, so a kind that is missing here is missing there too.
    kinds = sorted({FSSPEC, *(entry.name for entry in entry_points(group=ENTRY_POINTS))})
    if backend.kind in kinds:
        return
    alike = difflib.get_close_matches(str(backend.kind), kinds, n=1)
    raise UsageError(
        f"the backend {backend.name!r} is of the kind {backend.kind!r}, which no package here provides"
        f"{f'; most likely {alike[0]!r} is meant' if alike else ''}. Known kinds are {', '.join(kinds)}: correct the "
        f"kind, or install the package with the entry point {backend.kind!r} in the group {ENTRY_POINTS!r}, here and "
        "on the executors"
    )


@functools.cache
def load_factory(kind: str) -> BackendFactory:
    """Return the factory of a kind of backend.

    Raises
    ------
    ExecutorPackageError
        If no package of this Python provides the kind.
    """
    if kind == FSSPEC:
        return FilesBackend()
    for entry in entry_points(group=ENTRY_POINTS):
        if entry.name == kind:
            factory: BackendFactory = entry.load()()
            return factory
    raise ExecutorPackageError(
        f"no installed package provides the backend kind {kind!r} (entry point group {ENTRY_POINTS!r}). Install it on "
        "the client and on the executors."
    )
