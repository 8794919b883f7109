"""The pointer: all that Spark's own state holds of a bucket.

Spark commits it with the batch and hands it to every retry, speculative attempt or restart of the next one, so
it is the commit log (`docs/design`). One backend, committed synchronously: every delta the pointer names is durable
before Spark sees the pointer. Format 1 said the same of its snapshot; since format 2 that is presumed only, and the
pointer tells what it was built on. Since format 3 it counts the bucket's calls and beats, which clean-up goes
by. The fields that asynchronous commit needs (markers, inline deltas) have their place already.

Bytes: ``b"SSEP"``, format (u16), length of the JSON part (u32), the JSON part, the inline deltas' bytes one
after the other, and the CRC-32 of everything before (u32); all little-endian.
"""

from __future__ import annotations

import json
import struct
import zlib
from dataclasses import dataclass, field
from typing import Any

from arrow_schemas.errors import CorruptPointerError, LineageError, VersionSkewError
from arrow_schemas.lineage import CheckpointRef, check_ascending

__all__ = ["POINTER_FORMAT", "LineageEntry", "Pointer"]

POINTER_FORMAT = 3
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
    beat
        `Pointer.beats` of the pointer that its call made; 0 when not known (before format 3).
    """

    ref: CheckpointRef
    size_bytes: int
    beat: int = 0


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
    home
        Folder of the state below ``<root>/<operator>``: the query's id.
    lineage
        Checkpoints since the presumed last snapshot, that one first, the committed one last. Empty: no state yet.
    parent
        The checkpoint that the committed one was built on; None for the first, and where format 1 did not tell.
    calls
        Calls of the bucket so far, this pointer's included.
    beats
        How many of them came with a heartbeat, which reaches either every bucket in a batch or none. So parallel
        lineages, which may differ in what timeouts call them, have the same number in the same batch.
    retained, retained_beat
        The most batches that Spark was told to retain, so far as that matters still, and the last beat at which it was.
    snapshots_missed
        Presumed snapshots in a row that never arrived.
    rows
        Upper bound of the bucket's live rows.
    timeout_floor_ms, timeout_floor_version
        Rows of checkpoints older than the version that time out before the floor have been dealt with.
    earliest_timeout_ms
        Lower bound of the bucket's next processing-time timeout, or None.
    markers
        ``{backend: {store: marker}}``, empty in format 1.
    inline
        ``{file name: bytes}`` of deltas not yet durable elsewhere, empty in format 1.
    """

    operator: str
    bucket: int
    buckets: int
    schema_id: int
    batch: int
    watermark_ms: int | None
    home: str = ""
    lineage: tuple[LineageEntry, ...] = ()
    rows: int = 0
    timeout_floor_ms: int = 0
    timeout_floor_version: int = 0
    earliest_timeout_ms: int | None = None
    parent: CheckpointRef | None = None
    calls: int = 0
    beats: int = 0
    retained: int = 0
    retained_beat: int = 0
    snapshots_missed: int = 0
    markers: dict[str, dict[str, str]] = field(default_factory=dict)
    inline: dict[str, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        refs = [entry.ref for entry in self.lineage]
        where = f"the pointer of bucket {self.bucket} of operator {self.operator!r}"
        check_ascending(refs, where)
        if len(refs) > 1 and self.parent not in (None, refs[-2]):
            raise LineageError(f"{where}: {refs[-1]} was built on {self.parent} and its lineage says {refs[-2]}")

    @property
    def ref(self) -> CheckpointRef | None:
        """The committed checkpoint; None while the bucket has no state."""
        return self.lineage[-1].ref if self.lineage else None

    @property
    def version(self) -> int:
        """Version of the committed checkpoint; 0 while the bucket has no state."""
        return self.lineage[-1].ref.version if self.lineage else 0

    def encode(self) -> bytes:
        """The pointer's bytes."""
        text = json.dumps(
            {
                "operator": self.operator,
                "bucket": self.bucket,
                "buckets": self.buckets,
                "schema_id": self.schema_id,
                "batch": self.batch,
                "watermark_ms": self.watermark_ms,
                "home": self.home,
                "lineage": [_plain(entry) for entry in self.lineage],
                "parent": None if self.parent is None else [self.parent.version, self.parent.id],
                "calls": self.calls,
                "beats": self.beats,
                "retained": [self.retained, self.retained_beat],
                "snapshots_missed": self.snapshots_missed,
                "rows": self.rows,
                "timeout_floor": [self.timeout_floor_ms, self.timeout_floor_version],
                "earliest_timeout_ms": self.earliest_timeout_ms,
                "markers": self.markers,
                "inline": [[name, len(data)] for name, data in self.inline.items()],
            },
            separators=(",", ":"),
        ).encode()
        body = b"".join([_HEAD.pack(_MAGIC, POINTER_FORMAT, len(text)), text, *self.inline.values()])
        return body + _CRC.pack(zlib.crc32(body))

    @staticmethod
    def decode(data: bytes) -> Pointer:
        """Read a pointer.

        Raises
        ------
        CorruptPointerError
            When the bytes are damaged or not a pointer.
        VersionSkewError
            When a newer release wrote it.
        """
        if len(data) < _HEAD.size + _CRC.size or not data.startswith(_MAGIC):
            raise CorruptPointerError(
                f"{len(data)} bytes in Spark's state are no pointer of spark_state_ext: the Spark checkpoint "
                "belongs to "
                "another operator. Use a new checkpoint location."
            )
        _, version, length = _HEAD.unpack_from(data)
        if version > POINTER_FORMAT:
            raise VersionSkewError(
                f"a pointer of format {version} was found; this release reads up to {POINTER_FORMAT}. Use a "
                "newer release."
            )
        (crc,) = _CRC.unpack_from(data, len(data) - _CRC.size)
        if crc != zlib.crc32(data[: -_CRC.size]):
            raise CorruptPointerError("a pointer in Spark's state fails its checksum")
        try:
            fields = json.loads(data[_HEAD.size : _HEAD.size + length])
            return _parse(version, fields, data[_HEAD.size + length : -_CRC.size])
        except (CorruptPointerError, LineageError):
            raise
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
            raise CorruptPointerError(f"a pointer in Spark's state cannot be read: {error!r}") from error


def _plain(entry: LineageEntry) -> list[Any]:
    return [entry.ref.version, entry.ref.id, entry.size_bytes, entry.beat]


def _entry(pointer_format: int, values: list[Any]) -> LineageEntry:
    """Format 1 has three values; in format 2 the fourth was a batch."""
    version, checkpoint_id, size_bytes, *beat = values
    return LineageEntry(CheckpointRef(version, checkpoint_id), size_bytes, *(beat if pointer_format > 2 else ()))


def _parse(pointer_format: int, fields: dict[str, Any], blobs: bytes) -> Pointer:
    inline: dict[str, bytes] = {}
    offset = 0
    for name, size in fields["inline"]:
        inline[name] = blobs[offset : offset + size]
        offset += size
    if offset != len(blobs):
        raise CorruptPointerError(f"a pointer announces {offset} bytes of inline deltas and holds {len(blobs)}")
    floor_ms, floor_version = fields["timeout_floor"]
    retained, retained_beat = fields.get("retained", (0, 0))
    lineage = tuple(_entry(pointer_format, values) for values in fields["lineage"])
    if "parent" in fields:
        parent = None if fields["parent"] is None else CheckpointRef(*fields["parent"])
    else:  # format 1, which tells it only by the lineage
        parent = lineage[-2].ref if len(lineage) > 1 else None
    return Pointer(
        operator=fields["operator"],
        bucket=fields["bucket"],
        buckets=fields["buckets"],
        schema_id=fields["schema_id"],
        batch=fields["batch"],
        watermark_ms=fields["watermark_ms"],
        home=fields["home"],
        lineage=lineage,
        rows=fields["rows"],
        timeout_floor_ms=floor_ms,
        timeout_floor_version=floor_version,
        earliest_timeout_ms=fields["earliest_timeout_ms"],
        parent=parent,
        calls=fields.get("calls", 0),
        beats=fields.get("beats", 0),
        retained=retained,
        retained_beat=retained_beat,
        snapshots_missed=fields.get("snapshots_missed", 0),
        markers=fields["markers"],
        inline=inline,
    )
