"""The checkpoint files of one bucket: which there are, and what their headers tell, each read when it is asked for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from arrow_schemas.lineage import DELTA, SNAPSHOT, CheckpointRef, LineageHeader, parse_file_name
from spark_state_ext.errors import CorruptError, MissingCheckpointError
from spark_state_ext.files.checkpoint import read_header
from spark_state_ext.files.folder import Entry, Folder, Readable
from spark_state_ext.worker.threads import side_by_side

__all__ = ["BucketFiles", "read_side_by_side"]

_PARALLEL_MAX = 8
_PARALLEL_MIN = 4


class BucketFiles:
    """What lies in a bucket's folder, as of one listing."""

    def __init__(self, folder: Folder, bucket: int, entries: Iterable[Entry], files: Readable | None = None) -> None:
        self.folder = folder
        self._files = folder if files is None else files
        self.bucket = bucket
        self.kinds: dict[CheckpointRef, set[str]] = {}
        self._modified_s: dict[CheckpointRef, float] = {}
        self._headers: dict[CheckpointRef, LineageHeader] = {}
        for entry in entries:
            parsed = parse_file_name(entry.name)
            if parsed is None or entry.folder:
                continue
            ref, kind = parsed
            self.kinds.setdefault(ref, set()).add(kind)
            if entry.modified_s is not None and (kind == DELTA or ref not in self._modified_s):
                # Snapshots come later, in the background.
                self._modified_s[ref] = entry.modified_s

    @staticmethod
    def listed(query_folder: Folder, bucket: int) -> BucketFiles:
        """The files of a bucket of a query folder, or of an operator in a savepoint."""
        folder = query_folder.child(str(bucket))
        return BucketFiles(folder, bucket, folder.entries())

    @staticmethod
    def read_before(folder: Folder, bucket: int, files: Iterable[tuple[Entry, LineageHeader]]) -> BucketFiles:
        """Files whose headers are known already. Where several are one checkpoint's, its last delta tells when."""
        known = list(files)
        made = BucketFiles(folder, bucket, [entry for entry, _ in known])
        made._headers = {header.ref: header for _, header in known}
        return made

    def __contains__(self, ref: CheckpointRef) -> bool:
        return ref in self.kinds

    def modified_s(self, ref: CheckpointRef) -> float:
        """When a checkpoint's file was written, by the store's clock; 0 where it does not tell."""
        return self._modified_s.get(ref, 0.0)

    def of_newest_version(self) -> list[CheckpointRef]:
        """The checkpoints of the highest version: several where attempts or lineages were side by side."""
        version = max((ref.version for ref in self.kinds), default=0)
        return [ref for ref in self.kinds if ref.version == version]

    def written_last(self) -> CheckpointRef | None:
        """The checkpoint whose file was written last; where the store does not tell, one of the highest version."""
        return max(self.kinds, key=lambda ref: (self.modified_s(ref), ref.version), default=None)

    def header(self, ref: CheckpointRef) -> LineageHeader:
        """What a checkpoint's file says of it: its delta, or its snapshot where there is no delta, or it is damaged."""
        if ref in self._headers:
            return self._headers[ref]
        failure: CorruptError | MissingCheckpointError | None = None
        for kind in (DELTA, SNAPSHOT):
            if kind not in self.kinds.get(ref, ()):
                continue
            try:
                self._headers[ref] = read_header(self._files, ref, kind)
                return self._headers[ref]
            except (CorruptError, MissingCheckpointError) as error:
                failure = failure or error
        if failure is not None:
            raise failure
        raise MissingCheckpointError(f"there is no file of checkpoint {ref} in {self.folder.root}")


def read_side_by_side(wanted: Sequence[tuple[BucketFiles, CheckpointRef]]) -> None:
    """Read several headers, so that asking for them is at once."""

    def read(one: tuple[BucketFiles, CheckpointRef]) -> None:
        one[0].header(one[1])

    # Local files are read in less time than threads take to start.
    if len(wanted) >= _PARALLEL_MIN and not wanted[0][0].folder.is_local:
        side_by_side("headers", _PARALLEL_MAX, read, wanted)
        return
    for one in wanted:
        read(one)
