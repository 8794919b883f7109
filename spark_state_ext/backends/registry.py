"""Which backends a job has: as the user says it, and as factories found by entry point."""

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

__all__ = ["CHANGELOG", "ENTRY_POINTS", "FSSPEC", "Backend", "configured", "factory_of", "refuse_unusable"]

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
        What pointers call it; by default its root. Two places must not have one name, and a place whose files were
        moved as they are keeps its old name.
    kind
        ``fsspec``, or the name of an entry point in the group ``spark_state_ext.backends``.
    storage_options
        For ``fsspec``: options of the file system.
    options
        For other kinds: whatever they take, as plain values.

    Raises
    ------
    UsageError
        When `kind` is ``changelog``, which has no settings; when ``fsspec`` has no `root`, or a relative one; when
        another kind has no `name`; or when `root` holds a password.
    """

    root: str = ""
    name: str = ""
    kind: str = FSSPEC
    # They may hold secrets, and messages show backends.
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if self.kind == CHANGELOG:
            raise UsageError("the changelog has no settings: write backends=['changelog', …]")
        if self.kind == FSSPEC and not self.root:
            raise UsageError("a backend of kind 'fsspec' needs a root")
        if _PASSWORD.search(self.root):
            raise UsageError(
                "a backend's root must not hold a password, as it is written down with the state: use storage_options"
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
        """As builtin values.

        Returns
        -------
        dict
            All parameters by name.
        """
        return asdict(self)

    @property
    def factory_options(self) -> dict[str, Any]:
        """What the factory is told."""
        if self.kind == FSSPEC:
            return {"root": self.root, "storage_options": dict(self.storage_options)}
        return dict(self.options)


def configured(
    backends: Sequence[str | Backend], root: str, storage_options: Mapping[str, Any], restore_from: str | None
) -> tuple[bool, list[Backend]]:
    """What a user's list of backends says.

    Parameters
    ----------
    backends
        ``"changelog"``, ``"fsspec"`` (the operator's root) and any `Backend`.
    root, storage_options
        The operator's root.
    restore_from
        Name of the backend that state is restored from first.

    Returns
    -------
    tuple
        Whether the changelog is among them, and the others in their order.

    Raises
    ------
    UsageError
        When the list cannot work.
    """
    if isinstance(backends, (str, Backend)) or not isinstance(backends, Sequence):
        raise UsageError(f"backends must be a list, not {backends!r}")
    journal, found = False, []
    for backend in backends:
        if backend == CHANGELOG:
            journal = True
        elif backend == FSSPEC:
            found.append(Backend(root, storage_options=storage_options))
        elif isinstance(backend, Backend):
            found.append(backend)
        else:
            raise UsageError(f"backends may be 'changelog', 'fsspec' and Backend(…), not {backend!r}")
    names = [backend.name for backend in found]
    if not found:
        raise UsageError(
            "backends must name a place for files, 'fsspec' for the root: the changelog is a journal only, which has "
            "no room for a state"
        )
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"two backends are called {name!r}")
    if restore_from == FSSPEC:
        restore_from = Backend(root).name
    if restore_from is not None and restore_from not in names:
        raise UsageError(
            f"restore_from must be a name of one of the backends ({', '.join(names)}), not {restore_from!r}"
        )
    return journal, found


def refuse_unusable(root: str, storage_options: Mapping[str, Any], backends: Sequence[Backend]) -> None:
    """Raise a UsageError, where the job is planned, for places that no executor could use.

    Parameters
    ----------
    root, storage_options
        The operator's root.
    backends
        As the user gave them.

    Raises
    ------
    UsageError
        For an unknown kind or protocol, and for storage options that a file system does not take.
    """
    folders = [(root, storage_options)]
    folders += [(it.root, it.storage_options) for it in backends if it.kind == FSSPEC]
    for folder, options in folders:
        refuse_misspelt(folder, options)
        Folder(folder, options)
    for backend in backends:
        if backend.kind != FSSPEC:
            _refuse_unknown_kind(backend)


def _refuse_unknown_kind(backend: Backend) -> None:
    # What this Python lacks the executors', with the same packages, lack too.
    kinds = sorted({FSSPEC, *(entry.name for entry in entry_points(group=ENTRY_POINTS))})
    if backend.kind in kinds:
        return
    alike = difflib.get_close_matches(str(backend.kind), kinds, n=1)
    raise UsageError(
        f"the backend {backend.name!r} is of the kind {backend.kind!r}, which no package here has"
        f"{f'; most likely {alike[0]!r} is meant' if alike else ''}. Known kinds are {', '.join(kinds)}: correct the "
        f"name, or install the package with the entry point {backend.kind!r} in the group {ENTRY_POINTS!r}, here and "
        "on the executors"
    )


@functools.cache
def factory_of(kind: str) -> BackendFactory:
    """The factory of a kind of backend.

    Raises
    ------
    ExecutorPackageError
        When no package of this Python has it.
    """
    if kind == FSSPEC:
        return FilesBackend()
    for entry in entry_points(group=ENTRY_POINTS):
        if entry.name == kind:
            made: BackendFactory = entry.load()()
            return made
    raise ExecutorPackageError(
        f"no installed package has a backend of kind {kind!r} (entry point group {ENTRY_POINTS!r}). Install it on the "
        "client and on the executors."
    )
