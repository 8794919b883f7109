"""The pointer: what Spark's own state holds of a bucket.

Spark commits it atomically with the batch and hands every retry and restart the pointer of the batch before, so
it is the commit log (`docs/design`). It holds deltas that are not durable elsewhere yet, tells which backend has
confirmed what, and counts the bucket's calls and heartbeats, which clean-up goes by.

Format 1 is what the project wrote before its first release: one backend, committed synchronously; every delta that the
pointer names, and the snapshot that its lineage begins with, are durable before Spark sees the pointer. It is still
written where that is asked for, with or without the newer fields beside it, so that a job can go back. Format 2 has
neither a claim nor origins, as no query of its time began with the state of another. Format 3 has no erase mark, and is
written where there is none, so that a query which was never asked to erase keys can go back to a release that knows no
more. Format 4 has no parents, and is written where there are none and an erase mark is.

Bytes: ``b"SSEP"``, format (u16), length of the JSON part (u32), the JSON part, the inline deltas' bytes one
after the other, and the CRC-32 of everything before (u32); all little-endian.
"""

from __future__ import annotations

import json
import struct
import zlib
from dataclasses import asdict, dataclass, field
from typing import Any

from arrow_schemas.ages import Ages
from arrow_schemas.checksum import whole_number
from arrow_schemas.damage import damage_in
from arrow_schemas.erase import EraseMark
from arrow_schemas.errors import CorruptPointerError, LineageError, VersionSkewError
from arrow_schemas.lineage import DELTA, CheckpointRef, check_ascending, file_name

__all__ = ["BOTH", "POINTER_FORMAT", "V1", "V2", "InlineDelta", "LineageEntry", "Pointer", "ReplicationStatus"]

POINTER_FORMAT = 5
# What is written and read: format 1, the present format, or format 1 with what format 2 has more beside it.
V1, V2, BOTH = "v1", "v2", "both"
_FORMAT_1, _FORMAT_2, _FORMAT_3, _FORMAT_4 = 1, 2, 3, 4
_BESIDE = "v2"
# Fields of format 1: those that have the same name in format 2, and the others. Its `markers` and `inline` are empty.
_IN_BOTH = ("operator", "bucket", "buckets", "schema_id", "batch", "watermark_ms", "rows", "earliest_timeout_ms")
_FORMAT_1_NAMES = {"home": "query_folder", "timeout_floor": "timer_low_watermark"}
_MAGIC = b"SSEP"
_HEAD = struct.Struct("<4sHI")
_CRC = struct.Struct("<I")


@dataclass(frozen=True)
class LineageEntry:
    """One checkpoint of a lineage.

    Parameters
    ----------
    ref
        The checkpoint.
    size_bytes
        Size of its delta file.
    heartbeat
        `Pointer.heartbeats` of the pointer that its call made; 0 when not known (format 1).
    """

    ref: CheckpointRef
    size_bytes: int
    heartbeat: int = 0


@dataclass(frozen=True)
class InlineDelta:
    """A delta file in the pointer itself, as it is not durable elsewhere.

    Parameters
    ----------
    ref
        Its checkpoint.
    data
        The file's bytes.
    made_ms
        When it was made: wall-clock time, milliseconds since 1970.
    heartbeat
        `Pointer.heartbeats` of the pointer that its call made.
    """

    ref: CheckpointRef
    data: bytes
    made_ms: int
    heartbeat: int

    @property
    def name(self) -> str:
        """Name of the file."""
        return file_name(self.ref, DELTA)


@dataclass(frozen=True)
class ReplicationStatus:
    """What a backend has confirmed.

    Parameters
    ----------
    through
        It has every delta up to this checkpoint's, from `since` on. None: it has none, and there was nothing before.
    since
        It is catching up: it has everything once the full snapshot of this checkpoint has arrived. None: it has.
    """

    through: CheckpointRef | None
    since: CheckpointRef | None = None


@dataclass(frozen=True)
class Pointer:
    """Which checkpoint of a bucket is committed, and what the next call must know.

    Parameters
    ----------
    operator, bucket, buckets
        Whose state; `buckets` is the operator's number of buckets.
    schema_id
        Number of the ``operator_<n>.json`` in force.
    batch
        Micro-batch that wrote this pointer (where tasks are not told theirs: the number of calls before).
    watermark_ms
        That batch's watermark; the next batch's late rows are judged by it. None: no watermark.
    query_folder
        Folder of the state below ``<root>/<operator>``: the query's id.
    lineage
        Checkpoints since the last snapshot, which may be unconfirmed: that one first, the committed one last. Empty: no
        state yet.
    parent
        The checkpoint that the committed one was built on; None for the first, and where format 1 did not tell.
    calls
        Calls of the bucket so far, this pointer's included.
    heartbeats
        How many of them came with a heartbeat, which reaches either every bucket in a batch or none. So parallel
        lineages, which may differ in what timeouts call them, have the same number in the same batch.
    retained, retained_heartbeat
        The most batches that Spark was told to retain, so far as that matters still, and the last heartbeat at which it
        was.
    snapshots_missed
        Unconfirmed snapshots in a row that never arrived.
    rows
        Upper bound of the bucket's live rows.
    timer_low_watermark_ms, timer_low_watermark_version
        Rows of checkpoints older than the version that time out before that time have been dealt with.
    earliest_timeout_ms
        Lower bound of the bucket's next processing-time timeout, or None.
    replication
        What each replica has, by the backend's name; a backend that is not named has nothing that can be relied on.
    markers
        ``{backend: {store: marker}}``: where that lies, in the backend's own words.
    inline
        Deltas that not every backend has confirmed, oldest first.
    partitioning
        A run, and the number of partitions over which its calls found the buckets spread (`commit`). None: not known.
    made_by
        The Spark application that wrote this pointer. None: not known.
    ages
        When its checkpoints were made, where removed keys' bytes have to be gone within a time.
    claim
        Id of the query's claim to a query folder that another query began; None where it is the query's own.
    origins
        Operators that wrote files of the lineage under another name, which stands in these files' headers.
    erased
        Which erase requests the state is without the keys of; None: there was none.
    parents
        The checkpoint that a rescaled bucket began with, whose state is that of parts of other buckets (`rescale`).
        None: it is noted that a backend holds the bucket's state without these, or there were none.
    epoch
        Number of the run that wrote the pointer, by the records of its query folder; 0 where it is not known, as in
        format 1. Optional in every other format, as older releases do not look at it.
    """

    operator: str
    bucket: int
    buckets: int
    schema_id: int
    batch: int
    watermark_ms: int | None
    query_folder: str = ""
    lineage: tuple[LineageEntry, ...] = ()
    rows: int = 0
    timer_low_watermark_ms: int = 0
    timer_low_watermark_version: int = 0
    earliest_timeout_ms: int | None = None
    parent: CheckpointRef | None = None
    calls: int = 0
    heartbeats: int = 0
    retained: int = 0
    retained_heartbeat: int = 0
    snapshots_missed: int = 0
    replication: dict[str, ReplicationStatus] = field(default_factory=dict)
    markers: dict[str, dict[str, str]] = field(default_factory=dict)
    inline: tuple[InlineDelta, ...] = ()
    partitioning: tuple[str, int] | None = None
    made_by: str | None = None
    ages: Ages | None = None
    claim: str | None = None
    origins: tuple[str, ...] = ()
    erased: EraseMark | None = None
    parents: CheckpointRef | None = None
    epoch: int = 0

    def __post_init__(self) -> None:
        refs = [entry.ref for entry in self.lineage]
        where = f"the pointer of bucket {self.bucket} of operator {self.operator!r}"
        check_ascending(refs, where)
        if len(refs) > 1 and self.parent not in (None, refs[-2]):
            raise LineageError(f"{where}: {refs[-1]} was built on {self.parent} and its lineage says {refs[-2]}")
        check_ascending([delta.ref for delta in self.inline], f"the inline deltas of {where}")

    @property
    def ref(self) -> CheckpointRef | None:
        """The committed checkpoint; None while the bucket has no state."""
        return self.lineage[-1].ref if self.lineage else None

    @property
    def version(self) -> int:
        """Version of the committed checkpoint; 0 while the bucket has no state."""
        return self.lineage[-1].ref.version if self.lineage else 0

    def encode(self, write: str = V2) -> bytes:
        """The pointer's bytes.

        Parameters
        ----------
        write
            `V2`: the present format, or an older one that has place for all there is. `V1`: format 1, which has no
            place for inline deltas and means that a snapshot of the lineage's first checkpoint is there. `BOTH`: format
            1 with the other fields beside it, which releases that know format 1 only do not look at.
        """
        if write == V2:
            written = _FORMAT_3 if self.erased is None else _FORMAT_4
            written = written if self.parents is None else POINTER_FORMAT
            return _sealed(written, self._plain(), [delta.data for delta in self.inline])
        if self.inline:
            raise ValueError("format 1 of the pointer has no place for inline deltas")
        if self.claim is not None or self.origins:
            raise ValueError("format 1 of the pointer has no place for a claim or for origins")
        if self.erased is not None:
            raise ValueError("format 1 of the pointer has no place for an erase mark")
        if self.parents is not None:
            raise ValueError("format 1 of the pointer has no place for parents")
        fields = self._plain()
        del fields["claim"], fields["origins"]
        text = {name: fields.pop(name) for name in _IN_BOTH}
        text |= {old: fields.pop(name) for old, name in _FORMAT_1_NAMES.items()}
        entries = fields.pop("lineage")
        text |= {"lineage": [entry[:3] for entry in entries], "markers": {}, "inline": []}
        if write == BOTH:
            text[_BESIDE] = {"lineage_heartbeats": [entry[3] for entry in entries], **fields}
        return _sealed(_FORMAT_1, text, [])

    def _plain(self) -> dict[str, Any]:
        """The fields of the present format as builtin values."""
        return {
            "operator": self.operator,
            "bucket": self.bucket,
            "buckets": self.buckets,
            "schema_id": self.schema_id,
            "batch": self.batch,
            "watermark_ms": self.watermark_ms,
            "query_folder": self.query_folder,
            "rows": self.rows,
            "timer_low_watermark": [self.timer_low_watermark_ms, self.timer_low_watermark_version],
            "earliest_timeout_ms": self.earliest_timeout_ms,
            "lineage": [[it.ref.version, it.ref.id, it.size_bytes, it.heartbeat] for it in self.lineage],
            "parent": _pair(self.parent),
            "calls": self.calls,
            "heartbeats": self.heartbeats,
            "retained": [self.retained, self.retained_heartbeat],
            "snapshots_missed": self.snapshots_missed,
            "replication": {name: [_pair(it.through), _pair(it.since)] for name, it in self.replication.items()},
            "markers": self.markers,
            "inline": [[d.ref.version, d.ref.id, len(d.data), d.made_ms, d.heartbeat] for d in self.inline],
            "partitioning": None if self.partitioning is None else list(self.partitioning),
            "made_by": self.made_by,
            "ages": None if self.ages is None else self.ages.to_plain(),
            "claim": self.claim,
            "origins": list(self.origins),
            **self._only_newer(),
        }

    def _only_newer(self) -> dict[str, Any]:
        """Fields that formats up to 3 do not have, and the epoch, which is optional."""
        epoch = {"epoch": self.epoch} if self.epoch else {}
        erased = None if self.erased is None else list(asdict(self.erased).values())
        if self.parents is not None:
            return {"erased": erased, "parents": _pair(self.parents), **epoch}
        return epoch if erased is None else {"erased": erased, **epoch}

    @staticmethod
    def decode(data: bytes, read: str = V2) -> Pointer:
        """Read a pointer.

        Parameters
        ----------
        data
            What `encode` returned.
        read
            `V1`: only what format 1 has counts, whatever stands beside it. `V2`: everything.

        Raises
        ------
        CorruptPointerError
            When the bytes are damaged or not a pointer.
        VersionSkewError
            When a newer release wrote it, or one that was told to write what this one is told not to read.
        """
        if len(data) < _HEAD.size + _CRC.size or not data.startswith(_MAGIC):
            raise CorruptPointerError(
                f"{len(data)} bytes in Spark's state are no pointer of spark_state_ext: the Spark checkpoint belongs "
                "to another operator. Use a new checkpoint location."
            )
        _, version, length = _HEAD.unpack_from(data)
        if version > POINTER_FORMAT:
            raise VersionSkewError(
                f"a pointer of format {version} was found; this release reads up to {POINTER_FORMAT}. Use a "
                "newer release."
            )
        if read == V1 and version != _FORMAT_1:
            raise VersionSkewError(
                f"a pointer of format {version} was found and pointer_read='v1' reads format 1 only. Read 'v2', and "
                "write 'v1' or 'both' for a batch before you go back to reading 'v1'."
            )
        (crc,) = _CRC.unpack_from(data, len(data) - _CRC.size)
        if crc != zlib.crc32(data[: -_CRC.size]):
            raise CorruptPointerError("a pointer in Spark's state fails its checksum")
        try:
            fields = json.loads(data[_HEAD.size : _HEAD.size + length])
            if version == _FORMAT_1:
                fields = _as_format_2(fields, read)
            if version <= _FORMAT_2:
                fields = {**fields, "claim": None, "origins": []}
            if version <= _FORMAT_3:
                fields = {**fields, "erased": None}
            if version <= _FORMAT_4:
                fields = {**fields, "parents": None}
            return _parse(fields, data[_HEAD.size + length : -_CRC.size])
        except (CorruptPointerError, LineageError):
            raise
        except (AttributeError, KeyError, OverflowError, RecursionError, TypeError, ValueError) as error:
            raise CorruptPointerError(f"a pointer in Spark's state cannot be read: {damage_in(error)}") from error


def _sealed(pointer_format: int, fields: dict[str, Any], blobs: list[bytes]) -> bytes:
    text = json.dumps(fields, separators=(",", ":")).encode()
    body = b"".join([_HEAD.pack(_MAGIC, pointer_format, len(text)), text, *blobs])
    return body + _CRC.pack(zlib.crc32(body))


def _pair(ref: CheckpointRef | None) -> list[Any] | None:
    return None if ref is None else [ref.version, ref.id]


def _ref(pair: list[Any] | None) -> CheckpointRef | None:
    return None if pair is None else CheckpointRef(*pair)


def _as_format_2(fields: dict[str, Any], read: str) -> dict[str, Any]:
    """The fields of a pointer of format 1; what it lacks stands beside it, or is not known."""
    beside = fields.pop(_BESIDE, None)
    if fields["markers"] or fields["inline"]:
        raise CorruptPointerError("a pointer of format 1 has no markers and no inline deltas")
    found = {name: fields[name] for name in _IN_BOTH}
    found |= {name: fields[old] for old, name in _FORMAT_1_NAMES.items()}
    entries = [[version, checkpoint_id, size_bytes] for version, checkpoint_id, size_bytes in fields["lineage"]]
    if beside is not None and read == V2:
        heartbeats = beside.pop("lineage_heartbeats")
        lineage = [[*entry, heartbeat] for entry, heartbeat in zip(entries, heartbeats, strict=True)]
        return {**beside, **found, "lineage": lineage}
    parent = entries[-2][:2] if len(entries) > 1 else None
    unknown = {"calls": 0, "heartbeats": 0, "retained": [0, 0], "snapshots_missed": 0, "replication": {}, "markers": {}}
    unknown |= {"inline": [], "partitioning": None, "made_by": None, "ages": None}
    return {**found, **unknown, "lineage": [[*entry, 0] for entry in entries], "parent": parent}


def _replication_status(values: list[Any]) -> ReplicationStatus:
    through, since = values
    return ReplicationStatus(_ref(through), _ref(since))


def _partitioning(values: list[Any] | None) -> tuple[str, int] | None:
    if values is None:
        return None
    run, partitions = values
    return str(run), int(partitions)


def _erase_mark(values: list[Any] | None) -> EraseMark | None:
    if values is None:
        return None
    through, heartbeat, settled, request_id = values
    return EraseMark(int(through), int(heartbeat), int(settled), str(request_id))


def _inline(announced: list[list[Any]], blobs: bytes) -> tuple[InlineDelta, ...]:
    found: list[InlineDelta] = []
    offset = 0
    for version, checkpoint_id, size, made_ms, heartbeat in announced:
        if size < 0:
            raise CorruptPointerError(f"a pointer announces an inline delta of {size} bytes")
        ref = CheckpointRef(version, checkpoint_id)
        found.append(InlineDelta(ref, blobs[offset : offset + size], int(made_ms), int(heartbeat)))
        offset += size
    if offset != len(blobs):
        raise CorruptPointerError(f"a pointer announces {offset} bytes of inline deltas and holds {len(blobs)}")
    return tuple(found)


def _parse(fields: dict[str, Any], blobs: bytes) -> Pointer:
    """A pointer of the fields of the present format."""
    low_watermark_ms, low_watermark_version = fields["timer_low_watermark"]
    retained, retained_heartbeat = fields["retained"]
    return Pointer(
        operator=fields["operator"],
        bucket=fields["bucket"],
        buckets=fields["buckets"],
        schema_id=fields["schema_id"],
        batch=fields["batch"],
        watermark_ms=fields["watermark_ms"],
        query_folder=fields["query_folder"],
        lineage=tuple(
            LineageEntry(CheckpointRef(version, checkpoint_id), size_bytes, heartbeat)
            for version, checkpoint_id, size_bytes, heartbeat in fields["lineage"]
        ),
        rows=fields["rows"],
        timer_low_watermark_ms=low_watermark_ms,
        timer_low_watermark_version=low_watermark_version,
        earliest_timeout_ms=fields["earliest_timeout_ms"],
        parent=_ref(fields["parent"]),
        calls=fields["calls"],
        heartbeats=fields["heartbeats"],
        retained=retained,
        retained_heartbeat=retained_heartbeat,
        snapshots_missed=fields["snapshots_missed"],
        replication={str(name): _replication_status(values) for name, values in fields["replication"].items()},
        markers=fields["markers"],
        inline=_inline(fields["inline"], blobs),
        partitioning=_partitioning(fields["partitioning"]),
        made_by=fields["made_by"],
        ages=None if fields["ages"] is None else Ages.from_plain(fields["ages"]),
        claim=None if fields["claim"] is None else str(fields["claim"]),
        origins=tuple(str(name) for name in fields["origins"]),
        erased=_erase_mark(fields["erased"]),
        parents=_ref(fields["parents"]),
        epoch=whole_number({"epoch": 0, **fields}, "epoch", 0),
    )
