"""What a process knows of checkpoint files, as these are immutable: their headers, and which snapshots are whole."""

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
from spark_state_ext.worker.threads import side_by_side

__all__ = ["FileHeaders", "KnownFiles", "Origin"]

_LOGGER = logging.getLogger("spark_state_ext")
_FOLDERS_MAX = 256
_HEADERS_MAX = 1_024
_WHOLE_MAX = 4_096
_PARALLEL_MAX = 8


class Origin(NamedTuple):
    """At which heartbeat a checkpoint was made, and on what; None for the first."""

    heartbeat: int
    parent: CheckpointRef | None


class KnownFiles:
    """Bounded caches that clean-ups share; a `Worker` owns them."""

    def __init__(self) -> None:
        self._origins: OrderedDict[str, dict[CheckpointRef, Origin]] = OrderedDict()
        self._headers: OrderedDict[str, LineageHeader] = OrderedDict()
        self._whole: OrderedDict[str, None] = OrderedDict()

    def origins(self, files: Listed, listed: Collection[CheckpointRef]) -> dict[CheckpointRef, Origin]:
        """Where a folder's checkpoints come from, as far as that is known; to be added to."""
        known = self._origins.pop(files.identity, {})
        # A copy, as threads of a clean-up that failed may still be adding to it.
        kept = {ref: origin for ref, origin in known.copy().items() if ref in listed}
        self._origins[files.identity] = kept
        if len(self._origins) > _FOLDERS_MAX:
            self._origins.popitem(last=False)
        return kept

    def header(self, files: Listed, ref: CheckpointRef, kind: str) -> LineageHeader:
        """The header of a file, read where it is not known."""
        where = _where(files, ref, kind)
        # Taken out and put in again: in the order of their last use.
        header = self._headers.pop(where, None) or read_header(files, ref, kind)
        self._headers[where] = header
        if len(self._headers) > _HEADERS_MAX:
            self._headers.popitem(last=False)
        return header

    def is_known_whole(self, files: Listed, ref: CheckpointRef) -> bool:
        """Whether a snapshot has been read and was whole."""
        return _where(files, ref, SNAPSHOT) in self._whole

    def is_whole(self, files: Listed, ref: CheckpointRef, scratch: Path) -> bool:
        """Whether a snapshot has the checksum that it announces; it is read where that is not known."""
        if self.is_known_whole(files, ref):
            return True
        try:
            verify_checkpoint(files, ref, SNAPSHOT, scratch)
        except (CorruptError, MissingCheckpointError) as error:
            _LOGGER.warning("%s; older files are kept in its place", error)
            return False
        self._whole[_where(files, ref, SNAPSHOT)] = None
        if len(self._whole) > _WHOLE_MAX:
            self._whole.popitem(last=False)
        return True


def _where(files: Listed, ref: CheckpointRef, kind: str) -> str:
    return f"{files.identity} {file_name(ref, kind)}"


class FileHeaders:
    """Headers of a folder's files: the origins of all that are there, whole headers of some."""

    def __init__(self, files: Listed, names: Collection[str], known: KnownFiles) -> None:
        self._files = files
        self._names = names
        self._cache = known
        self._known = known.origins(files, {parsed[0] for name in names if (parsed := parse_file_name(name))})

    def of(self, ref: CheckpointRef) -> LineageHeader:
        """The header of a checkpoint's file."""
        kind = DELTA if file_name(ref, DELTA) in self._names else SNAPSHOT
        header = self._cache.header(self._files, ref, kind)
        self._known[ref] = Origin(header.writer.heartbeat, header.parent)
        return header

    def origins(self, refs: Sequence[CheckpointRef]) -> list[Origin]:
        """Where checkpoints come from; what is not known is read side by side."""
        unknown = [ref for ref in refs if ref not in self._known]
        if len(unknown) > 1:
            side_by_side("headers", min(_PARALLEL_MAX, len(unknown)), self.of, unknown)
        elif unknown:
            self.of(unknown[0])
        return [self._known[ref] for ref in refs]
