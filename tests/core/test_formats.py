"""Pointer, lineage header and labels: round trips, and detection of each damaged byte."""

from __future__ import annotations

import json
import struct
import zlib
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arrow_schemas import (
    BodyRecord,
    CheckpointRef,
    LineageEntry,
    LineageHeader,
    Pointer,
    Writer,
    bucket_label,
    label_bucket,
    new_checkpoint_id,
)
from arrow_schemas.erase import EraseMark
from arrow_schemas.errors import CorruptFileError, CorruptPointerError, LineageError, StateError, VersionSkewError
from arrow_schemas.lineage import (
    BODY_PLACEHOLDER,
    DELTA,
    HEADER_KEY,
    SNAPSHOT,
    file_name,
    parse_file_name,
)
from arrow_schemas.pointer import BOTH, POINTER_FORMAT, V1, InlineDelta, ReplicationStatus

_IDS = st.text("0123456789abcdef", min_size=32, max_size=32)
_REFS = st.builds(CheckpointRef, st.integers(1, 2**63 - 1), _IDS)
_BYTES = st.binary(max_size=40)
_TIMES = st.integers(0, 2**50)


def _generate_lineages(below: int = 2**63) -> st.SearchStrategy[tuple[CheckpointRef, ...]]:
    """Generate lineages with ascending versions."""
    versions = st.lists(st.integers(1, below), max_size=5, unique=True).map(sorted)
    return versions.flatmap(
        lambda ascending: st.tuples(*(st.builds(CheckpointRef, st.just(version), _IDS) for version in ascending))
    )


def _make_entries(refs: tuple[CheckpointRef, ...]) -> tuple[LineageEntry, ...]:
    return tuple(LineageEntry(ref, ref.version % 2**50, ref.version % 1000) for ref in refs)


def _with_lineage(pointer: Pointer, lineage: tuple[CheckpointRef, ...], with_parent: bool) -> Pointer:
    parent = lineage[-2] if with_parent and len(lineage) > 1 else None
    return replace(pointer, lineage=_make_entries(lineage), parent=parent)


_BARE_POINTERS = st.builds(
    Pointer,
    operator=st.text(min_size=1),
    bucket=st.integers(0, 1000),
    buckets=st.integers(1, 1000),
    schema_id=st.integers(0, 9),
    batch=st.integers(-1, 2**62),
    watermark_ms=st.none() | st.integers(-(2**62), 2**62),
    query_folder=st.text(),
    calls=st.integers(0, 2**62),
    heartbeats=st.integers(0, 2**62),
    snapshots_missed=st.integers(0, 9),
    rows=st.integers(0, 2**40),
    timer_low_watermark_ms=st.integers(0, 2**50),
    timer_low_watermark_version=st.integers(0, 2**50),
    earliest_timeout_ms=st.none() | st.integers(0, 2**50),
    replication=st.dictionaries(st.text(), st.builds(ReplicationStatus, _REFS, st.none() | _REFS), max_size=2),
    markers=st.dictionaries(st.text(), st.dictionaries(st.text(), st.text(), max_size=2), max_size=2),
    inline=_generate_lineages().flatmap(
        lambda refs: st.tuples(*(st.builds(InlineDelta, st.just(ref), _BYTES, _TIMES) for ref in refs))
    ),
    partitioning=st.none() | st.tuples(st.text(), st.integers(1, 2**31)),
    made_by=st.none() | st.text(),
)
_POINTERS = st.builds(_with_lineage, _BARE_POINTERS, _generate_lineages(), st.booleans())
_REF = CheckpointRef(7, "0" * 31 + "7")
_INLINE = InlineDelta(_REF, b"\x00\xff" * 5, 1_700_000_000_000, 7)
_POINTER = Pointer(
    "counts", 3, 8, 0, 41, 5_000, lineage=(LineageEntry(_REF, 99, 6),), rows=12, heartbeats=6, inline=(_INLINE,)
)


@given(pointer=_POINTERS)
@settings(max_examples=100)
def test_a_decoded_pointer_equals_the_encoded_one(pointer: Pointer) -> None:
    assert Pointer.decode(pointer.encode()) == pointer
    assert Pointer.decode(pointer.encode()).encode() == pointer.encode()


def test_the_pointer_of_a_bucket_without_state_has_no_checkpoint() -> None:
    pointer = Pointer("counts", 0, 1, 0, -1, None)
    assert (pointer.ref, pointer.version) == (None, 0)
    assert (_POINTER.ref, _POINTER.version) == (_REF, 7)


@pytest.mark.parametrize("flip", [0x01, 0x80, 0xFF])
def test_every_damaged_byte_of_a_pointer_is_detected(flip: int) -> None:
    data = _POINTER.encode()
    for position in range(len(data)):
        damaged = bytearray(data)
        damaged[position] ^= flip
        # The format number is read before the checksum: only a release that knows the format can check it.
        expected = (CorruptPointerError, VersionSkewError) if position in (4, 5) else CorruptPointerError
        with pytest.raises(expected):
            Pointer.decode(bytes(damaged))
    for length in range(len(data)):
        with pytest.raises(CorruptPointerError):
            Pointer.decode(data[:length])
    with pytest.raises(CorruptPointerError):
        Pointer.decode(data + b"\0")


@given(data=st.binary(max_size=60), magic=st.booleans())
@settings(max_examples=100)
def test_bytes_that_are_not_a_pointer_are_refused(data: bytes, magic: bool) -> None:
    body = (b"SSEP\x01\x00" if magic else b"") + data
    # A correct checksum must not make invalid bytes acceptable.
    with pytest.raises(StateError):
        Pointer.decode(body + struct.pack("<I", zlib.crc32(body)))


def test_a_pointer_of_a_newer_release_is_not_reported_as_damaged() -> None:
    data = bytearray(_POINTER.encode())
    data[4:6] = struct.pack("<H", POINTER_FORMAT + 1)
    with pytest.raises(VersionSkewError, match=f"format {POINTER_FORMAT + 1}"):
        Pointer.decode(bytes(data))


@given(pointer=_POINTERS)
@settings(max_examples=100)
def test_a_pointer_can_be_written_in_format_1_and_in_both_formats(pointer: Pointer) -> None:
    pointer = replace(pointer, inline=())
    old, both = pointer.encode(V1), pointer.encode(BOTH)
    assert [int.from_bytes(data[4:6], "little") for data in (old, both, pointer.encode())] == [1, 1, 3]
    assert Pointer.decode(both) == pointer
    # A release that knows only format 1 reads the same pointer from either encoding.
    assert Pointer.decode(both, V1) == Pointer.decode(old, V1) == Pointer.decode(old)
    refs = [entry.ref for entry in pointer.lineage]
    assert Pointer.decode(old) == Pointer(
        operator=pointer.operator,
        bucket=pointer.bucket,
        buckets=pointer.buckets,
        schema_id=pointer.schema_id,
        batch=pointer.batch,
        watermark_ms=pointer.watermark_ms,
        query_folder=pointer.query_folder,
        lineage=tuple(replace(entry, heartbeat=0) for entry in pointer.lineage),
        rows=pointer.rows,
        timer_low_watermark_ms=pointer.timer_low_watermark_ms,
        timer_low_watermark_version=pointer.timer_low_watermark_version,
        earliest_timeout_ms=pointer.earliest_timeout_ms,
        parent=refs[-2] if len(refs) > 1 else None,
    )


def test_a_pointer_with_inline_deltas_cannot_be_written_or_read_in_format_1() -> None:
    for write in (V1, BOTH):
        with pytest.raises(ValueError, match="inline"):
            _POINTER.encode(write)
    with pytest.raises(VersionSkewError, match=r"pointer_read='v1'.*Read 'v2', and write 'v1' or 'both'"):
        Pointer.decode(_POINTER.encode(), V1)


def test_an_erase_mark_makes_the_pointer_format_4() -> None:
    """Without a mark, the pointer stays in format 3, which older releases read."""
    marked = replace(_POINTER, erased=EraseMark(7, 12, 5, "ab" * 16))
    assert [int.from_bytes(pointer.encode()[4:6], "little") for pointer in (_POINTER, marked)] == [3, 4]
    assert Pointer.decode(marked.encode()) == marked
    assert Pointer.decode(_POINTER.encode()).erased is None
    for write in (V1, BOTH):
        with pytest.raises(ValueError, match="erase mark"):
            replace(marked, inline=(), claim=None, origins=()).encode(write)
    with pytest.raises(CorruptPointerError, match="erase mark"):
        Pointer.decode(_replace_and_seal(marked.encode(), b'"erased":[7,12,5,', b'"erased":[7,12,8,'))
    with pytest.raises(CorruptPointerError, match="erase mark has an invalid request id"):
        Pointer.decode(_replace_and_seal(marked.encode(), b"abab" * 8, b"abAB" * 8))
    with pytest.raises(CorruptPointerError, match="cannot be read"):
        Pointer.decode(_replace_and_seal(marked.encode(), b'"erased":[7,12,5,', b'"erased":[7,12,'))


def _replace_and_seal(data: bytes, old: bytes, new: bytes) -> bytes:
    """Replace bytes by others of the same length, and correct the checksum."""
    assert data.count(old) == 1
    body = data[:-4].replace(old, new.ljust(len(old)))
    return body + struct.pack("<I", zlib.crc32(body))


# -- lineage header ---------------------------------------------------------------------------------


def _make_header(lineage: tuple[CheckpointRef, ...] = (CheckpointRef(6, "a" * 32),)) -> LineageHeader:
    return LineageHeader(
        kind=DELTA,
        operator="counts ü",
        bucket=3,
        ref=_REF,
        parent=lineage[-1] if lineage else None,
        lineage=lineage,
        schema_id=1,
        writer=Writer("query", "run", 5, "host"),
        package_version="0.1.0",
    )


@given(lineage=_generate_lineages(6))
@settings(max_examples=50)
def test_a_decoded_header_equals_the_encoded_one(lineage: tuple[CheckpointRef, ...]) -> None:
    header = _make_header(lineage)
    assert LineageHeader.decode(header.encode(), "file") == header


def test_every_damaged_byte_of_a_header_is_detected() -> None:
    metadata = _make_header().encode()
    for key in [name for name in metadata if metadata[name] != BODY_PLACEHOLDER]:
        for position in range(len(metadata[key])):
            for flip in (0x01, 0x80):
                value = bytearray(metadata[key])
                value[position] ^= flip
                with pytest.raises(CorruptFileError, match=r"some\.arrow"):
                    LineageHeader.decode({**metadata, key: bytes(value)}, "some.arrow")
        with pytest.raises(CorruptFileError, match=r"some\.arrow"):
            LineageHeader.decode({name: metadata[name] for name in metadata if name != key}, "some.arrow")
    with pytest.raises(CorruptFileError, match="not a checkpoint file"):
        LineageHeader.decode(None, "some.arrow")


def _sign(fields: object) -> dict[bytes, bytes]:
    """Return a header whose fields may be wrong, with a correct checksum."""
    import hashlib

    text = json.dumps(fields).encode()
    digest = hashlib.blake2b(text, digest_size=16).hexdigest().encode()
    return {HEADER_KEY: text, b"spark_state_ext.header_checksum": digest}


def test_headers_of_newer_releases_and_invalid_ones_are_refused() -> None:
    fields = json.loads(_make_header().encode()[HEADER_KEY])
    with pytest.raises(VersionSkewError, match=r"format 4.*spark_state_ext 9\.0"):
        LineageHeader.decode(_sign({**fields, "format": 4, "package_version": "9.0"}), "file")
    for change in (
        {"id": "short"},
        {"format": 0},
        {"version": 0},
        {"kind": "other"},
        {"parent": [9, "b" * 32]},
        {"writer": None},
    ):
        with pytest.raises((CorruptFileError, LineageError), match=r"^(file|the lineage header of file)"):
            LineageHeader.decode(_sign({**fields, **change}), "file")
    # Files from before the first release have no heartbeat.
    assert (
        LineageHeader.decode(_sign({name: fields[name] for name in fields if name != "heartbeat"}), "file")
        == _make_header()
    )
    for name in fields.keys() - {"heartbeat"}:
        with pytest.raises(CorruptFileError):
            LineageHeader.decode(_sign({other: fields[other] for other in fields if other != name}), "file")
    invalid: list[object] = [[], 5, None, "x"]
    for value in invalid:
        with pytest.raises(CorruptFileError):
            LineageHeader.decode(_sign(value), "file")


def test_a_header_whose_lineage_does_not_end_with_the_parent_cannot_be_made() -> None:
    with pytest.raises(LineageError, match="does not end with its parent"):
        replace(_make_header(), parent=None)


def test_a_body_record_is_found_between_other_bytes() -> None:
    record = BodyRecord(2**40, 10, 3, "0123456789abcdef" * 2)
    assert len(record.encode()) == len(BODY_PLACEHOLDER)
    assert BodyRecord.find(b"\0junk" + record.encode() + b"\xff" * 9, "file") == record
    with pytest.raises(CorruptFileError, match="file has no body record"):
        BodyRecord.find(record.encode()[1:], "file")


@given(ref=_REFS, kind=st.sampled_from([DELTA, SNAPSHOT]))
@settings(max_examples=30)
def test_checkpoint_file_names_are_parsed(ref: CheckpointRef, kind: str) -> None:
    assert parse_file_name(file_name(ref, kind)) == (ref, kind)


def test_other_names_are_not_parsed_as_checkpoint_files() -> None:
    name = file_name(_REF, DELTA)
    for other in (name + ".tmp", ".tmp-" + name, name.upper(), name.replace("delta", "other"), "lease.json"):
        assert parse_file_name(other) is None


def test_new_checkpoint_ids_differ() -> None:
    assert len({CheckpointRef(1, new_checkpoint_id()) for _ in range(100)}) == 100


# -- labels -----------------------------------------------------------------------------------------


def test_labels_hash_to_their_bucket() -> None:
    for bucket in range(5_000):
        label = bucket_label(bucket)
        assert -(2**31) <= label < 2**31
        assert label_bucket(label) == bucket


@given(label=st.integers(-(2**31), 2**31 - 1))
def test_each_label_is_the_label_of_its_bucket(label: int) -> None:
    assert bucket_label(label_bucket(label)) == label


@pytest.mark.parametrize(("value", "spark_hash"), [(0, 933211791), (1, -559580957), (2, 1765031574), (-1, -1604776387)])
def test_the_bucket_of_a_label_is_sparks_hash(value: int, spark_hash: int) -> None:
    """The values are those of `SELECT hash(value)` in Spark 3.5."""
    assert label_bucket(value) == spark_hash % 2**32
