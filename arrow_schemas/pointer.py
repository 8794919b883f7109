"""The pointer: what Spark's own state holds for a bucket.

Spark commits the pointer atomically with the batch and hands every retry and restart the pointer of the batch before,
so it is the commit log (`docs/design`). It holds deltas that are not durable elsewhere yet, records which backend has
confirmed what, and counts the bucket's calls and heartbeats, which clean-up needs.

Format 1 is what the project wrote before its first release: one backend, committed synchronously; every delta that the
pointer names, and the snapshot that its lineage begins with, are durable before Spark sees the pointer. It is still
written on request, with or without the newer fields in a field of their own, so that a job can go back. Format 2 has no
claim and no origins, because queries could not begin with another query's state then. Format 3 has no erase mark; it is
written if there is no mark, so that a query that never erased keys can go back to a release that only knows format 3.
Format 4 has no parents; it is written if there is an erase mark but no parents.

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
from arrow_schemas.checksum import read_whole_number
from arrow_schemas.damage import describe_damage
from arrow_schemas.erase import EraseMark
from arrow_schemas.errors import CorruptPointerError, LineageError, VersionSkewError
from arrow_schemas.lineage import DELTA, CheckpointRef, check_ascending, file_name

__all__ = ["BOTH", "POINTER_FORMAT", "V1", "V2", "InlineDelta", "LineageEntry", "Pointer", "ReplicationStatus"]

POINTER_FORMAT = 5
# What is written and read: format 1, the present format, or format 1 with the newer fields in a field of their own.
V1, V2, BOTH = "v1", "v2", "both"
_FORMAT_1, _FORMAT_2, _FORMAT_3, _FORMAT_4 = 1, 2, 3, 4
_NEWER_KEY = "v2"
# Fields of format 1 that have the same name in format 2, and the others. Its `markers` and `inline` are empty.
_SAME_NAMES = ("operator", "bucket", "buckets", "schema_id", "batch", "watermark_ms", "rows", "earliest_timeout_ms")
_FORMAT_1_NAMES = {"home": "query_folder", "timeout_floor": "timer_low_watermark"}
_MAGIC = b"SSEP"
_HEAD = struct.Struct("<4sHI")
_CRC = struct.Struct("<I")


@dataclass(frozen=True)
class LineageEntry:
    """A checkpoint in a lineage.

    Parameters
    ----------
    ref
        The checkpoint.
    size_bytes
        Size of its delta file.
    heartbeat
        `Pointer.heartbeats` of the pointer that its call made; 0 if unknown (format 1).
    """

    ref: CheckpointRef
    size_bytes: int
    heartbeat: int = 0


@dataclass(frozen=True)
class InlineDelta:
    """A delta file within the pointer, because it is not durable elsewhere yet.

    Parameters
    ----------
    ref
        The delta's checkpoint.
    data
        The file's bytes.
    made_ms
        When the file was made: wall-clock time, milliseconds since 1970.
    heartbeat
        `Pointer.heartbeats` of the pointer that its call made.
    """

    ref: CheckpointRef
    data: bytes
    made_ms: int
    heartbeat: int

    @property
    def name(self) -> str:
        """The name of the file."""
        return file_name(self.ref, DELTA)


@dataclass(frozen=True)
class ReplicationStatus:
    """The part of a bucket's state that a backend has confirmed.

    Parameters
    ----------
    through
        The backend has every delta from `since` up to this checkpoint's. None: there was no delta before.
    since
        The backend bootstraps: it is complete only when the full snapshot of this checkpoint has arrived. None: it is
        complete.
    """

    through: CheckpointRef | None
    since: CheckpointRef | None = None


@dataclass(frozen=True)
class Pointer:
    """A bucket's committed checkpoint, and all that the bucket's next call must know.

    Parameters
    ----------
    operator, bucket, buckets
        The operator and the bucket that the state belongs to, and the operator's number of buckets.
    schema_id
        Number of the ``operator_<n>.json`` in force.
    batch
        Micro-batch that wrote this pointer; the number of earlier calls if tasks do not know their batch.
    watermark_ms
        That batch's watermark, which decides which rows of the next batch are late. None: no watermark.
    query_folder
        Folder of the state below ``<root>/<operator>``: the query's id.
    lineage
        Checkpoints since the last snapshot, which may be unconfirmed: the snapshot's first, the committed one last.
        Empty: no state yet.
    parent
        The checkpoint that the committed one was built on; None for the first, and if format 1 did not record it.
    calls
        Number of the bucket's calls so far, including this pointer's.
    heartbeats
        How many of these calls had a heartbeat. In each batch either all buckets get a heartbeat or no bucket does, so
        parallel lineages have the same number in the same batch, even if timeouts cause calls in only one of them.
    retained, retained_heartbeat
        The largest number of batches that Spark was configured to retain, as far as that still matters, and the last
        heartbeat at which it was configured so.
    snapshots_missed
        Number of unconfirmed snapshots in a row that never arrived.
    rows
        Upper bound of the bucket's live rows.
    timer_low_watermark_ms, timer_low_watermark_version
        A time and a version: rows of older checkpoints that time out before that time have been dealt with.
    earliest_timeout_ms
        Lower bound of the bucket's next processing-time timeout, or None.
    replication
        What each replica has, by the backend's name; files of a backend that is not in it cannot be relied on.
    markers
        ``{backend: {store: marker}}``: where those files lie, in the backend's own words.
    inline
        Deltas that some backend has not confirmed yet, oldest first.
    partitioning
        A run of the query, and the number of partitions over which Spark spread the buckets in its calls (`commit`).
        None: unknown.
    made_by
        The Spark application that wrote this pointer. None: unknown.
    ages
        When the checkpoints were made, if removed keys must be erased within a given time.
    claim
        Id of the query's claim to a query folder that another query began; None if the folder is the query's own.
    origins
        Other names of the operator under which files of the lineage were written; these files' headers have them.
    erased
        The erase mark: which erase requests' keys the state no longer has. None: no request so far.
    parents
        The checkpoint that a rescaled bucket began with; its state is parts of other buckets (`rescale`). None: a
        backend is known to hold the bucket's state without these parts, or there were no parts.
    epoch
        Epoch of the run that wrote the pointer, by the records of its query folder; 0 if unknown, as in format 1.
        Optional in every other format, because older releases ignore it.
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
            raise LineageError(f"{where}: {refs[-1]} was built on {self.parent}, but its lineage says {refs[-2]}")
        check_ascending([delta.ref for delta in self.inline], f"the inline deltas of {where}")

    @property
    def ref(self) -> CheckpointRef | None:
        """The committed checkpoint; None while the bucket has no state."""
        return self.lineage[-1].ref if self.lineage else None

    @property
    def version(self) -> int:
        """The version of the committed checkpoint; 0 while the bucket has no state."""
        return self.lineage[-1].ref.version if self.lineage else 0

    def encode(self, write: str = V2) -> bytes:
        """Return the pointer's bytes.

        Parameters
        ----------
        write
            `V2`: the present format, or an older one that can hold all fields. `V1`: format 1, which cannot hold inline
            deltas and implies that a snapshot of the lineage's first checkpoint exists. `BOTH`: format 1 with the other
            fields in a field of their own, which releases that only know format 1 ignore.
        """
        if write == V2:
            pointer_format = _FORMAT_3 if self.erased is None else _FORMAT_4
            pointer_format = pointer_format if self.parents is None else POINTER_FORMAT
            return _seal(pointer_format, self._to_plain(), [delta.data for delta in self.inline])
        if self.inline:
            raise ValueError("format 1 of the pointer cannot hold inline deltas")
        if self.claim is not None or self.origins:
            raise ValueError("format 1 of the pointer cannot hold a claim or origins")
        if self.erased is not None:
            raise ValueError("format 1 of the pointer cannot hold an erase mark")
        if self.parents is not None:
            raise ValueError("format 1 of the pointer cannot hold parents")
        fields = self._to_plain()
        del fields["claim"], fields["origins"]
        old_fields = {name: fields.pop(name) for name in _SAME_NAMES}
        old_fields |= {old: fields.pop(name) for old, name in _FORMAT_1_NAMES.items()}
        entries = fields.pop("lineage")
        old_fields |= {"lineage": [entry[:3] for entry in entries], "markers": {}, "inline": []}
        if write == BOTH:
            old_fields[_NEWER_KEY] = {"lineage_heartbeats": [entry[3] for entry in entries], **fields}
        return _seal(_FORMAT_1, old_fields, [])

    def _to_plain(self) -> dict[str, Any]:
        """Return the fields of the present format as builtin values."""
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
            "lineage": [[entry.ref.version, entry.ref.id, entry.size_bytes, entry.heartbeat] for entry in self.lineage],
            "parent": _to_pair(self.parent),
            "calls": self.calls,
            "heartbeats": self.heartbeats,
            "retained": [self.retained, self.retained_heartbeat],
            "snapshots_missed": self.snapshots_missed,
            "replication": {
                name: [_to_pair(status.through), _to_pair(status.since)] for name, status in self.replication.items()
            },
            "markers": self.markers,
            "inline": [[d.ref.version, d.ref.id, len(d.data), d.made_ms, d.heartbeat] for d in self.inline],
            "partitioning": None if self.partitioning is None else list(self.partitioning),
            "made_by": self.made_by,
            "ages": None if self.ages is None else self.ages.to_plain(),
            "claim": self.claim,
            "origins": list(self.origins),
            **self._newer_to_plain(),
        }

    def _newer_to_plain(self) -> dict[str, Any]:
        """Return the fields that formats up to 3 do not have, and the epoch, which is optional."""
        epoch = {"epoch": self.epoch} if self.epoch else {}
        mark = None if self.erased is None else list(asdict(self.erased).values())
        if self.parents is not None:
            return {"erased": mark, "parents": _to_pair(self.parents), **epoch}
        return epoch if mark is None else {"erased": mark, **epoch}

    @staticmethod
    def decode(data: bytes, read: str = V2) -> Pointer:
        """Decode a pointer.

        Parameters
        ----------
        data
            What `encode` returned.
        read
            `V1`: use only the fields of format 1, and ignore newer ones. `V2`: use all fields.

        Raises
        ------
        CorruptPointerError
            If the bytes are damaged or not a pointer.
        VersionSkewError
            If a newer release wrote the pointer, or it is not of format 1 and `read` is `V1`.
        """
        if len(data) < _HEAD.size + _CRC.size or not data.startswith(_MAGIC):
            raise CorruptPointerError(
                f"{len(data)} bytes in Spark's state are not a pointer of spark_state_ext: the Spark checkpoint "
                "belongs to another operator. Use a new checkpoint location."
            )
        _, version, length = _HEAD.unpack_from(data)
        if version > POINTER_FORMAT:
            raise VersionSkewError(
                f"a pointer in Spark's state has format {version}; this release reads up to {POINTER_FORMAT}. Use a "
                "newer release."
            )
        if read == V1 and version != _FORMAT_1:
            raise VersionSkewError(
                f"a pointer in Spark's state has format {version}, but pointer_read='v1' only reads format 1. Read "
                "'v2', and write 'v1' or 'both' for a batch before you go back to reading 'v1'."
            )
        (crc,) = _CRC.unpack_from(data, len(data) - _CRC.size)
        if crc != zlib.crc32(data[: -_CRC.size]):
            raise CorruptPointerError("a pointer in Spark's state fails its checksum")
        try:
            fields = json.loads(data[_HEAD.size : _HEAD.size + length])
            if version == _FORMAT_1:
                fields = _convert_format_1(fields, read)
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
            raise CorruptPointerError(f"a pointer in Spark's state cannot be read: {describe_damage(error)}") from error


def _seal(pointer_format: int, fields: dict[str, Any], blobs: list[bytes]) -> bytes:
    text = json.dumps(fields, separators=(",", ":")).encode()
    body = b"".join([_HEAD.pack(_MAGIC, pointer_format, len(text)), text, *blobs])
    return body + _CRC.pack(zlib.crc32(body))


def _to_pair(ref: CheckpointRef | None) -> list[Any] | None:
    return None if ref is None else [ref.version, ref.id]


def _to_ref(pair: list[Any] | None) -> CheckpointRef | None:
    return None if pair is None else CheckpointRef(*pair)


def _convert_format_1(fields: dict[str, Any], read: str) -> dict[str, Any]:
    """Convert the fields of format 1 to format 2; fields that it does not have come from `_NEWER_KEY`, if at all."""
    newer_fields = fields.pop(_NEWER_KEY, None)
    if fields["markers"] or fields["inline"]:
        raise CorruptPointerError("a pointer of format 1 has no markers and no inline deltas")
    converted = {name: fields[name] for name in _SAME_NAMES}
    converted |= {name: fields[old] for old, name in _FORMAT_1_NAMES.items()}
    entries = [[version, checkpoint_id, size_bytes] for version, checkpoint_id, size_bytes in fields["lineage"]]
    if newer_fields is not None and read == V2:
        heartbeats = newer_fields.pop("lineage_heartbeats")
        lineage = [[*entry, heartbeat] for entry, heartbeat in zip(entries, heartbeats, strict=True)]
        return {**newer_fields, **converted, "lineage": lineage}
    parent = entries[-2][:2] if len(entries) > 1 else None
    unknown = {"calls": 0, "heartbeats": 0, "retained": [0, 0], "snapshots_missed": 0, "replication": {}, "markers": {}}
    unknown |= {"inline": [], "partitioning": None, "made_by": None, "ages": None}
    return {**converted, **unknown, "lineage": [[*entry, 0] for entry in entries], "parent": parent}


def _decode_status(values: list[Any]) -> ReplicationStatus:
    through, since = values
    return ReplicationStatus(_to_ref(through), _to_ref(since))


def _decode_partitioning(values: list[Any] | None) -> tuple[str, int] | None:
    if values is None:
        return None
    run, partitions = values
    return str(run), int(partitions)


def _decode_erase_mark(values: list[Any] | None) -> EraseMark | None:
    if values is None:
        return None
    through, heartbeat, settled, request_id = values
    return EraseMark(int(through), int(heartbeat), int(settled), str(request_id))


def _decode_inline(entries: list[list[Any]], blobs: bytes) -> tuple[InlineDelta, ...]:
    deltas: list[InlineDelta] = []
    offset = 0
    for version, checkpoint_id, size, made_ms, heartbeat in entries:
        if size < 0:
            raise CorruptPointerError(f"a pointer announces an inline delta of {size} bytes")
        ref = CheckpointRef(version, checkpoint_id)
        deltas.append(InlineDelta(ref, blobs[offset : offset + size], int(made_ms), int(heartbeat)))
        offset += size
    if offset != len(blobs):
        raise CorruptPointerError(f"a pointer announces {offset} bytes of inline deltas but holds {len(blobs)}")
    return tuple(deltas)


def _parse(fields: dict[str, Any], blobs: bytes) -> Pointer:
    """Return the pointer that has the given fields of the present format."""
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
        parent=_to_ref(fields["parent"]),
        calls=fields["calls"],
        heartbeats=fields["heartbeats"],
        retained=retained,
        retained_heartbeat=retained_heartbeat,
        snapshots_missed=fields["snapshots_missed"],
        replication={str(name): _decode_status(values) for name, values in fields["replication"].items()},
        markers=fields["markers"],
        inline=_decode_inline(fields["inline"], blobs),
        partitioning=_decode_partitioning(fields["partitioning"]),
        made_by=fields["made_by"],
        ages=None if fields["ages"] is None else Ages.from_plain(fields["ages"]),
        claim=None if fields["claim"] is None else str(fields["claim"]),
        origins=tuple(str(name) for name in fields["origins"]),
        erased=_decode_erase_mark(fields["erased"]),
        parents=_to_ref(fields["parents"]),
        epoch=read_whole_number({"epoch": 0, **fields}, "epoch", 0),
    )
