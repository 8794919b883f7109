"""Which hosts wrote a bucket's committed checkpoints, one after the other, and so where its tasks went on elsewhere.

Only committed checkpoints count. There is one line of them, whatever attempts a follower has seen or missed, so all
followers find the same takeovers, each known by the version of the new host's first checkpoint. A follower that was
away finds those of the meantime in the headers of files that are still there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from arrow_schemas.lineage import CheckpointRef, LineageHeader
from spark_state_ext.errors import CorruptError, MissingCheckpointError

__all__ = ["Succession", "Takeover"]

# Far more than are retained, mostly; and more than can be uncounted.
_HEADERS_MAX, _TAKEOVERS_MAX = 500, 100


@dataclass(frozen=True)
class Takeover:
    """A bucket's committed checkpoint is of another host than the one before.

    Parameters
    ----------
    before, now
        The hosts.
    version, batch
        Of the new host's checkpoint.
    lag_versions
        How many checkpoints this follower's copy lacked when it saw that one first; None where it did not follow then.
    """

    before: str
    now: str
    version: int
    batch: int
    lag_versions: int | None


class Succession:
    """What one follower knows of it."""

    def __init__(self, since: int | None) -> None:
        self._since = since
        self._last: CheckpointRef | None = None
        # Of the last committed checkpoint that tells.
        self.host = ""
        self.takeovers: tuple[Takeover, ...] = ()
        # What is not committed yet, and how new the copy was when it was seen.
        self._seen: dict[CheckpointRef, tuple[LineageHeader, int | None]] = {}

    @property
    def version(self) -> int:
        """Up to which version all takeovers are known."""
        return 0 if self._last is None else self._last.version

    def saw(self, header: LineageHeader, loaded: int | None) -> None:
        """Note a checkpoint that may be committed later."""
        self._seen.setdefault(header.ref, (header, loaded))

    def extend(self, committed: CheckpointRef | None, read: Callable[[CheckpointRef], LineageHeader]) -> None:
        """Go on to a committed checkpoint."""
        if committed is None or committed == self._last:
            return
        floor = self._since if self._last is None else self._last.version
        steps, joined = self._back(committed, floor, read)
        host, found = (self.host if joined else ""), []
        for header in reversed(steps):
            now = header.writer.host
            if host and now and now != host and (floor is None or header.ref.version > floor):
                found.append(Takeover(host, now, header.ref.version, header.writer.batch, self._lag(header)))
            host = now or host
        self.takeovers = (*self.takeovers, *found)[-_TAKEOVERS_MAX:]
        self.host, self._last = host, committed
        self._seen = {ref: it for ref, it in self._seen.items() if ref.version >= committed.version}

    def _back(
        self, committed: CheckpointRef, floor: int | None, read: Callable[[CheckpointRef], LineageHeader]
    ) -> tuple[list[LineageHeader], bool]:
        """The headers from a checkpoint back to what is known, and whether they end beside that."""
        steps: list[LineageHeader] = []
        ref: CheckpointRef | None = committed
        while ref is not None and len(steps) < _HEADERS_MAX:
            if ref == self._last:
                return steps, True
            try:
                header = self._seen[ref][0] if ref in self._seen else read(ref)
            except (MissingCheckpointError, CorruptError):
                break  # no retained batch needs it any more; what came before it nobody can tell
            steps.append(header)
            if floor is None or ref.version <= floor:
                break
            ref = header.parent
        return steps, False

    def _lag(self, header: LineageHeader) -> int | None:
        loaded = self._seen[header.ref][1] if header.ref in self._seen else None
        if loaded is None:
            return None
        return max(0, (0 if header.parent is None else header.parent.version) - loaded)
