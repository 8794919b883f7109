"""`StateOptions`: the checked options of an operator's state, which the client sends to executors."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from arrow_schemas.bucket_map import BucketMap
from arrow_schemas.operator import is_operator_name
from arrow_schemas.pointer import BOTH, V1, V2
from spark_state_ext.backends.registry import FSSPEC, Backend, refuse_unusable, resolve_backends
from spark_state_ext.commit.decisions import CommitOptions
from spark_state_ext.engine.limits import check_flags, check_sizes, check_times, erase_window_ms
from spark_state_ext.engine.source_partition import SourcePartition, bucket_by_from_plain, bucket_by_to_plain
from spark_state_ext.engine.start_from import (
    CLAIM,
    RetainedCheckpoint,
    Savepoint,
    StartFrom,
    start_from_plain,
    start_to_plain,
)
from spark_state_ext.errors import UsageError
from spark_state_ext.files.folder import refuse_relative
from spark_state_ext.functions.ttl import Ttl

__all__ = ["StateOptions"]


@dataclass(frozen=True, kw_only=True)
class StateOptions:
    """The options of `ArrowState`, after they were checked.

    Parameters
    ----------
    root, operator, buckets, local_dir, storage_options, strict, strict_output, lease_ms, memory_bytes_max, local_keep_s
        As given to `ArrowState`.
    pointer_read, clean_up, ttl, start_from, bucket_by, rescale
        As given to `ArrowState`.
    backends
        The backends except the changelog.
    commit
        Options of commits.
    restore_from
        Name of the preferred backend for restores.
    """

    root: str
    operator: str = "state"
    buckets: int = 16
    local_dir: str | None = None
    storage_options: Mapping[str, Any] = field(default_factory=dict)
    strict: bool = False
    strict_output: bool = True
    lease_ms: int = 10_000
    memory_bytes_max: int = 256 << 20
    local_keep_s: float = 86_400.0
    backends: tuple[Backend, ...] = ()
    commit: CommitOptions = field(default_factory=CommitOptions)
    restore_from: str | None = None
    pointer_read: str = V2
    clean_up: bool = True
    erase_requests: bool = False
    ttl: Ttl | None = None
    start_from: StartFrom | None = None
    bucket_by: BucketMap | SourcePartition | None = None
    rescale: str | None = None

    def __post_init__(self) -> None:
        if not is_operator_name(self.operator):
            raise UsageError(
                "operator must be a name of at most 100 letters, digits, '.', '_' and '-', the first a letter or "
                f"digit, not {self.operator!r}"
            )
        if not isinstance(self.storage_options, Mapping):
            raise UsageError(f"storage_options must be a mapping, such as a dict, not {self.storage_options!r}")
        object.__setattr__(self, "storage_options", dict(self.storage_options))
        check_flags(
            strict=self.strict,
            strict_output=self.strict_output,
            clean_up=self.clean_up,
            erase_requests=self.erase_requests,
        )
        commit = self.commit
        if self.bucket_by is not None:
            by_hash = isinstance(self.bucket_by, BucketMap) and self.bucket_by.by_hash
            if not by_hash and not isinstance(self.bucket_by, SourcePartition):
                raise UsageError(
                    f"bucket_by must be a BucketMap of hashes, or a SourcePartition, not {self.bucket_by!r}"
                )
            object.__setattr__(self, "buckets", self.bucket_map.buckets)
        check_sizes(self.buckets, self.memory_bytes_max, commit.inline_bytes_max, commit.task_inline_bytes_max)
        check_times(self.lease_ms, self.local_keep_s, commit.commit_delay_ms_max, commit.commit_timeout_ms)
        refuse_relative(self.root, "root")
        if self.local_dir is not None and not self.local_dir.startswith("/"):
            raise UsageError(f"local_dir must be an absolute path, not {self.local_dir!r}")
        if self.ttl is not None and not isinstance(self.ttl, Ttl):
            raise UsageError(f"ttl must be a Ttl, such as Ttl(duration_ms=86_400_000), not {self.ttl!r}")
        self._check_pointers()
        self._check_start()
        self._check_rescale()

    def _check_start(self) -> None:
        start = self.start_from
        if start is None:
            return
        if not isinstance(start, (Savepoint, RetainedCheckpoint)):
            raise UsageError(
                f"start_from must be a Savepoint or a RetainedCheckpoint, not {start!r}; to choose the backend that "
                "state is restored from, set restore_from"
            )
        if self.commit.pointer_write != V2:
            raise UsageError(
                f"start_from needs pointer_write={V2!r}: older pointer formats cannot store what a query started from"
            )
        if isinstance(start, RetainedCheckpoint) and start.mode == CLAIM:
            self._check_claimed(start)

    def _check_rescale(self) -> None:
        if self.rescale is None:
            return
        if not isinstance(self.rescale, str) or not self.rescale:
            raise UsageError(f"rescale must be the query's checkpointLocation, not {self.rescale!r}")
        if self.commit.pointer_write != V2:
            raise UsageError(
                f"rescale needs pointer_write={V2!r}: older pointer formats cannot store a bucket's parents"
            )
        if self.commit.erase_window_ms is not None:
            raise UsageError(
                "rescale cannot be combined with erase_within_s: the old buckets' files keep bytes of removed keys "
                "until no batch that Spark retains needs them. Omit erase_within_s until the query has removed its old "
                "folder"
            )
        if self.backends and all(backend.kind != FSSPEC for backend in self.backends):
            raise UsageError(
                "rescale needs a backend that is a file system, such as 'fsspec', for the old buckets' files"
            )

    def _check_claimed(self, start: RetainedCheckpoint) -> None:
        if (start.root, dict(start.storage_options)) != (self.root.rstrip("/") or self.root, self.storage_options):
            raise UsageError(
                f"a claimed retained checkpoint is not moved: set root={start.root!r} and its storage_options, or "
                "start with mode='no_claim'"
            )
        if start.operator not in (None, self.operator):
            raise UsageError(
                f"a claimed retained checkpoint keeps the operator's name: set operator={start.operator!r}, or start "
                "with mode='no_claim'"
            )

    def _check_pointers(self) -> None:
        write, read = self.commit.pointer_write, self.pointer_read
        if write not in (V1, V2, BOTH) or read not in (V1, V2):
            raise UsageError(
                f"pointer_write must be 'v1', 'v2' or 'both' and pointer_read 'v1' or 'v2', not {write!r} and {read!r}"
            )
        if read == V1 and write == V2:
            raise UsageError("pointer_read='v1' cannot read what pointer_write='v2' writes: write 'v1' or 'both'")

    @staticmethod
    def given(
        root: str | os.PathLike[str],
        *,
        local_dir: str | os.PathLike[str] | None,
        storage_options: Mapping[str, Any] | None,
        backends: Sequence[str | Backend],
        restore_from: str | None,
        commit: Mapping[str, Any],
        erase_within_s: int | None,
        **others: Any,
    ) -> StateOptions:
        """Return checked options from the arguments of `ArrowState`."""
        root = _path("root", root)
        local_dir = None if local_dir is None else _path("local_dir", local_dir)
        options = {**others, "local_dir": local_dir}
        if others.get("rescale") is not None:
            options["rescale"] = _path("rescale", others["rescale"]).rstrip("/")
        if storage_options is not None:
            options["storage_options"] = storage_options
        # Check each argument on its own first; the checks below are about combinations.
        StateOptions(root=root, commit=CommitOptions(**commit), **options)
        write, storage = commit["pointer_write"], dict(storage_options or {})
        window_ms = erase_window_ms(erase_within_s, write, V2, others["clean_up"])
        journal, state_backends = resolve_backends(backends, root, storage, restore_from)
        if write != V2 and [backend.name for backend in state_backends] != [Backend(root).name]:
            raise UsageError(
                "pointer format v1 supports one backend only, the root: with pointer_write='v1' or 'both', backends "
                "may only contain 'changelog' and 'fsspec'"
            )
        refuse_unusable(root, storage, state_backends)
        return StateOptions(
            root=root,
            backends=tuple(state_backends),
            commit=CommitOptions(journal=journal, erase_window_ms=window_ms, **commit),
            restore_from=Backend(root).name if restore_from == FSSPEC else restore_from,
            **options,
        )

    @property
    def bucket_map(self) -> BucketMap:
        """The bucket map, which assigns rows to buckets."""
        if isinstance(self.bucket_by, SourcePartition):
            return self.bucket_by.bucket_map
        return self.bucket_by or BucketMap(self.buckets)

    @property
    def source_partition(self) -> SourcePartition | None:
        """The `SourcePartition` that assigns rows to buckets; None if the key's hash does."""
        return self.bucket_by if isinstance(self.bucket_by, SourcePartition) else None

    def to_plain(self) -> dict[str, Any]:
        """Return the options as builtin values."""
        bucket_by = bucket_by_to_plain(self.bucket_by)
        return {**asdict(self), "start_from": start_to_plain(self.start_from), "bucket_by": bucket_by}

    @staticmethod
    def from_plain(plain: Mapping[str, Any]) -> StateOptions:
        """Return the options from their plain values, on an executor."""
        return StateOptions(
            **{
                **plain,
                "backends": tuple(Backend(**backend) for backend in plain["backends"]),
                "commit": CommitOptions(**plain["commit"]),
                "ttl": None if plain["ttl"] is None else Ttl(**plain["ttl"]),
                "start_from": start_from_plain(plain["start_from"]),
                "bucket_by": bucket_by_from_plain(plain["bucket_by"]),
            }
        )


def _path(name: str, value: str | os.PathLike[str]) -> str:
    try:
        path = os.fspath(value)
    except TypeError:
        path = None
    if not isinstance(path, str):
        raise UsageError(f"{name} must be a path or a URL as str or os.PathLike, not {value!r}")
    return path
