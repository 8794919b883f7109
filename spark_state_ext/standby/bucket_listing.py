"""What one listing of a bucket's folder shows a follower: which files to look at, and where to load from."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from arrow_schemas.lineage import DELTA, SNAPSHOT, CheckpointRef, LineageHeader, file_name
from spark_state_ext.files.folder import Entry, Folder
from spark_state_ext.restore.load_plan import Chain
from spark_state_ext.standby.metered_reads import Bandwidth, MeteredFiles
from spark_state_ext.standby.values import Lag
from spark_state_ext.timeline.bucket_files import BucketFiles

__all__ = ["Listing"]

# A follower that is not far behind sees fewer new files than this at once.
_CANDIDATES_MAX = 16


class Listing:
    """A bucket's folder as of one listing."""

    def __init__(
        self,
        folder: Folder,
        bucket: int,
        entries: Sequence[Entry],
        bandwidth: Bandwidth,
    ) -> None:
        self.sizes = {entry.name: entry.size_bytes for entry in entries}
        self.meter = MeteredFiles(folder, self.sizes, bandwidth)
        self.files = BucketFiles(folder, bucket, entries, self.meter)

    @property
    def refs(self) -> frozenset[CheckpointRef]:
        """All checkpoints that have a file."""
        return frozenset(self.files.kinds)

    def candidates(self, fresh: Collection[CheckpointRef]) -> list[CheckpointRef]:
        """Return the new files whose headers are worth reading, in the order in which they were written.

        All of them if they are few. Of many, the files of the highest version and the files written last: a query that
        went back writes lower versions, and its zombie still lower ones after that. Their lineages lead to the others.
        """
        by_time = sorted(fresh, key=self._write_order)
        highest = max((ref.version for ref in by_time), default=0)
        last = set(by_time[-_CANDIDATES_MAX:])
        return [ref for ref in by_time if ref in last or ref.version == highest]

    def _write_order(self, ref: CheckpointRef) -> tuple[float, int]:
        return self.files.modified_s(ref), ref.version

    def lag(self, loaded: CheckpointRef | None, missing: Collection[CheckpointRef]) -> Lag:
        """Return how far a copy is behind."""
        if not missing:
            return Lag()
        newest = max(missing, key=lambda ref: (ref.version, self.files.modified_s(ref)))
        version = 0 if loaded is None else loaded.version
        between = {ref for ref in self.files.kinds if version < ref.version <= newest.version} | set(missing)
        size_bytes = self._sum_deltas(between)
        snapshots = [ref for ref in between if SNAPSHOT in self.files.kinds[ref]]
        if loaded is None and snapshots:
            # A load begins with this snapshot.
            base = max(snapshots, key=lambda ref: ref.version)
            above = self._sum_deltas(ref for ref in between if ref.version > base.version)
            size_bytes = self.sizes[file_name(base, SNAPSHOT)] + above
        since_s = 0.0 if loaded is None else self.files.modified_s(loaded)
        seconds = max(0.0, self.files.modified_s(newest) - since_s) if since_s else 0.0
        return Lag(max(1, newest.version - version), size_bytes, seconds)

    def _sum_deltas(self, refs: Iterable[CheckpointRef]) -> int:
        return sum(self.sizes.get(file_name(ref, DELTA), 0) for ref in refs)

    def newest_snapshot(self, lineage: Sequence[CheckpointRef]) -> CheckpointRef | None:
        """Return the newest checkpoint of a lineage that has a snapshot; None if it has no snapshot."""
        return next((ref for ref in reversed(lineage) if SNAPSHOT in self.files.kinds.get(ref, ())), None)

    def chain(self, header: LineageHeader, local: Collection[CheckpointRef]) -> Chain:
        """Return the chain of files with which to load a checkpoint."""
        refs = (*header.lineage, header.ref)
        snapshot = self.newest_snapshot(refs)
        start = 0 if snapshot is None else refs.index(snapshot)
        base = max((index for index, ref in enumerate(refs) if ref in local), default=-1)
        if snapshot is not None and base < start:
            deltas = [self.sizes.get(file_name(ref, DELTA)) for ref in refs[base + 1 : start + 1]]
            sizes = [size for size in deltas if size is not None]
            # The checkpoint's own delta was usually read together with its header.
            more_bytes = sum(sizes[: len(sizes) - (snapshot == header.ref)])
            if base < 0 or len(sizes) < len(deltas) or more_bytes > self.sizes[file_name(snapshot, SNAPSHOT)]:
                refs, start = refs[start:], 0
        # A bucket's first checkpoint has version 1, and its delta is the whole state.
        return Chain(refs, rooted=start == 0 and refs[0].version == 1, start=start)
