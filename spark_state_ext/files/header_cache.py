"""Caches of what a process knows about checkpoint files, which never change: headers, and which snapshots are whole."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

from arrow_schemas.lineage import DELTA, SNAPSHOT, CheckpointRef, LineageHeader, file_name, parse_file_name
from spark_state_ext.errors import CorruptError, MissingCheckpointError
from spark_state_ext.files.checkpoint import read_header, verify_checkpoint
from spark_state_ext.files.folder import Listed
from spark_state_ext.worker.threads import map_in_parallel

__all__ = ["FileHeaders", "KnownFiles", "Origin"]

_LOGGER = logging.getLogger("spark_state_ext")
_FOLDERS_MAX = 256
_HEADERS_MAX = 1_024
_WHOLE_MAX = 4_096
_PARALLEL_MAX = 8


class Origin(NamedTuple):
    """The heartbeat at which a checkpoint was made, and its parent; None for the first checkpoint."""

    heartbeat: int
    parent: CheckpointRef | None


class KnownFiles:
    """Bounded caches that clean-ups share; a `Worker` owns them."""

    def __init__(self) -> None:
        self._origins: OrderedDict[str, dict[CheckpointRef, Origin]] = OrderedDict()
        self._headers: OrderedDict[str, LineageHeader] = OrderedDict()
        self._whole: OrderedDict[str, None] = OrderedDict()

    def origins(self, files: Listed, listed: Collection[CheckpointRef]) -> dict[CheckpointRef, Origin]:
        """Return the known origins of a folder's checkpoints, in a dict that the caller extends."""
        cached_origins = self._origins.pop(files.identity, {})
        # A copy, as threads of a failed clean-up may still add to it.
        origins = {ref: origin for ref, origin in cached_origins.copy().items() if ref in listed}
        self._origins[files.identity] = origins
        if len(self._origins) > _FOLDERS_MAX:
            self._origins.popitem(last=False)
        return origins

    def header(self, files: Listed, ref: CheckpointRef, kind: str) -> LineageHeader:
        """Return the header of a file, which is read if it is not known."""
        where = _where(files, ref, kind)
        # Removing and adding it again keeps the cache in the order of last use.
        header = self._headers.pop(where, None) or read_header(files, ref, kind)
        self._headers[where] = header
        if len(self._headers) > _HEADERS_MAX:
            self._headers.popitem(last=False)
        return header

    def is_known_whole(self, files: Listed, ref: CheckpointRef) -> bool:
        """True if a snapshot has been read and was whole."""
        return _where(files, ref, SNAPSHOT) in self._whole

    def is_whole(self, files: Listed, ref: CheckpointRef, scratch: Path) -> bool:
        """True if a snapshot has the checksum that it announces; it is read if that is not known yet."""
        if self.is_known_whole(files, ref):
            return True
        try:
            verify_checkpoint(files, ref, SNAPSHOT, scratch)
        except (CorruptError, MissingCheckpointError) as error:
            _LOGGER.warning("%s; older files are kept instead", error)
            return False
        self._whole[_where(files, ref, SNAPSHOT)] = None
        if len(self._whole) > _WHOLE_MAX:
            self._whole.popitem(last=False)
        return True


def _where(files: Listed, ref: CheckpointRef, kind: str) -> str:
    return f"{files.identity} {file_name(ref, kind)}"


class FileHeaders:
    """Headers of a folder's files: cached origins of all checkpoints, and full headers on request."""

    def __init__(self, files: Listed, names: Collection[str], cache: KnownFiles) -> None:
        self._files = files
        self._names = names
        self._cache = cache
        self._origins_by_ref = cache.origins(files, {parsed[0] for name in names if (parsed := parse_file_name(name))})

    def of(self, ref: CheckpointRef) -> LineageHeader:
        """Return the header of a checkpoint's file."""
        kind = DELTA if file_name(ref, DELTA) in self._names else SNAPSHOT
        header = self._cache.header(self._files, ref, kind)
        self._origins_by_ref[ref] = Origin(header.writer.heartbeat, header.parent)
        return header

    def origins(self, refs: Sequence[CheckpointRef]) -> list[Origin]:
        """Return the origins of checkpoints; unknown headers are read in parallel."""
        unknown = [ref for ref in refs if ref not in self._origins_by_ref]
        if len(unknown) > 1:
            map_in_parallel("headers", min(_PARALLEL_MAX, len(unknown)), self.of, unknown)
        elif unknown:
            self.of(unknown[0])
        return [self._origins_by_ref[ref] for ref in refs]
