"""The checkpoint files of one bucket, with their headers, each of which is read when it is needed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from arrow_schemas.lineage import DELTA, SNAPSHOT, CheckpointRef, LineageHeader, parse_file_name
from spark_state_ext.errors import CorruptError, MissingCheckpointError
from spark_state_ext.files.checkpoint import read_header
from spark_state_ext.files.folder import Entry, Folder, Readable
from spark_state_ext.worker.threads import map_in_parallel

__all__ = ["BucketFiles", "read_in_parallel"]

_PARALLEL_MAX = 8
_PARALLEL_MIN = 4


class BucketFiles:
    """The files in a bucket's folder, from one listing."""

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
                # The delta's time counts, as snapshots are written later, in the background.
                self._modified_s[ref] = entry.modified_s

    @staticmethod
    def listed(query_folder: Folder, bucket: int) -> BucketFiles:
        """List the files of a bucket of a query folder, or of an operator in a savepoint."""
        folder = query_folder.child(str(bucket))
        return BucketFiles(folder, bucket, folder.entries())

    @staticmethod
    def read_before(folder: Folder, bucket: int, files: Iterable[tuple[Entry, LineageHeader]]) -> BucketFiles:
        """Return files whose headers are known. If a checkpoint has several files, its last delta has its time."""
        pairs = list(files)
        bucket_files = BucketFiles(folder, bucket, [entry for entry, _ in pairs])
        bucket_files._headers = {header.ref: header for _, header in pairs}
        return bucket_files

    def __contains__(self, ref: CheckpointRef) -> bool:
        return ref in self.kinds

    def modified_s(self, ref: CheckpointRef) -> float:
        """Return when a checkpoint's file was written, by the store's clock; 0 if the store does not report it."""
        return self._modified_s.get(ref, 0.0)

    def find_newest_version(self) -> list[CheckpointRef]:
        """Return the checkpoints of the highest version; there are several after parallel attempts or lineages."""
        version = max((ref.version for ref in self.kinds), default=0)
        return [ref for ref in self.kinds if ref.version == version]

    def written_last(self) -> CheckpointRef | None:
        """Return the checkpoint whose file was written last; without times of the store, one of the highest version."""
        return max(self.kinds, key=lambda ref: (self.modified_s(ref), ref.version), default=None)

    def header(self, ref: CheckpointRef) -> LineageHeader:
        """Return a checkpoint's header, from its delta, or from its snapshot if the delta is missing or damaged."""
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


def read_in_parallel(requests: Sequence[tuple[BucketFiles, CheckpointRef]]) -> None:
    """Read several headers in parallel, so that later calls of `header` return at once."""

    def read(request: tuple[BucketFiles, CheckpointRef]) -> None:
        request[0].header(request[1])

    # Reading local files takes less time than starting threads.
    if len(requests) >= _PARALLEL_MIN and not requests[0][0].folder.is_local:
        map_in_parallel("headers", _PARALLEL_MAX, read, requests)
        return
    for request in requests:
        read(request)
