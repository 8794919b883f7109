"""The manifest of a savepoint: it is read exactly as it was written, or refused."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from core_support import first_pointer

from arrow_schemas import CheckpointRef, LineageEntry, OperatorFile, Pointer
from arrow_schemas.savepoint import (
    MANIFEST_NAME,
    NATIVE,
    SavedBucket,
    SavedFile,
    SavepointHeader,
    SavepointManifest,
    make_relocatable,
)
from spark_state_ext.errors import (
    CorruptError,
    CorruptFileError,
    LineageError,
    MissingCheckpointError,
    UsageError,
    VersionSkewError,
)
from spark_state_ext.files.folder import Folder
from spark_state_ext.savepoints.manifest_file import decode_manifest, encode_manifest, read_manifest
from spark_state_ext.savepoints.writer import refuse_existing, write_manifest

REF = CheckpointRef(7, "ab" * 16)
# In the form in which an operator file holds it.
STATE = '{"fields": [{"metadata": {}, "name": "n", "nullable": true, "type": "long"}], "type": "struct"}'
KEY = STATE.replace('"n"', '"k"')
FILE = SavedFile(f"{REF}.snapshot.arrow", 4_000, "blkcrcs=" + "0f" * 16)


def make_bucket(operator: str, bucket: int) -> SavedBucket:
    pointer = replace(
        first_pointer(bucket), operator=operator, buckets=2, lineage=(LineageEntry(REF, 10, 3),), heartbeats=9, batch=4
    )
    return SavedBucket(operator, bucket, pointer, (FILE,))


@pytest.fixture
def manifest() -> SavepointManifest:
    operators = {name: OperatorFile(name, "query", 2, KEY, STATE) for name in ("a", "b")}
    header = SavepointHeader(
        "12" * 16, NATIVE, 1_700_000_000_000, operators, "0.1.0", "query", 4, 1_000, 'v1\n{"batchWatermarkMs":0}\n{}'
    )
    return SavepointManifest(header, tuple(make_bucket(name, bucket) for name in ("a", "b") for bucket in range(2)))


def test_a_manifest_is_read_as_it_was_written(manifest: SavepointManifest, tmp_path: Path) -> None:
    folder = Folder(str(tmp_path / "savepoint"))
    write_manifest(folder, manifest)
    assert read_manifest(folder) == manifest
    assert manifest.bucket("b", 1) == make_bucket("b", 1)


def test_any_arrow_reader_can_open_a_manifest(manifest: SavepointManifest) -> None:
    table = pa.ipc.open_file(pa.BufferReader(encode_manifest(manifest))).read_all()
    assert table.column_names == ["operator", "bucket", "pointer", "files"]
    assert table.num_rows == 4


def test_a_change_of_any_byte_is_detected_or_has_no_effect(manifest: SavepointManifest) -> None:
    data = encode_manifest(manifest)
    for at in range(len(data)):
        changed = data[:at] + bytes([data[at] ^ 0x20]) + data[at + 1 :]
        with contextlib.suppress(CorruptError, VersionSkewError):
            # A byte of the footer that no checksum covers has no effect.
            assert decode_manifest(changed, "it") == manifest


@pytest.mark.parametrize("length", [0, 1, 7, 8, 100, -1, -8, -9])
def test_a_truncated_manifest_is_refused(manifest: SavepointManifest, length: int) -> None:
    with pytest.raises(CorruptFileError):
        decode_manifest(encode_manifest(manifest)[:length], "it")


def test_a_manifest_of_a_newer_release_is_refused(manifest: SavepointManifest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("arrow_schemas.savepoint.SAVEPOINT_FORMAT", 2)
    data = encode_manifest(manifest)
    monkeypatch.undo()
    with pytest.raises(VersionSkewError, match=r"up to format 1\. Use spark_state_ext 0\.1\.0"):
        decode_manifest(data, "it")


@pytest.mark.parametrize("name", ["made_ms", "batch", "watermark_ms"])
@pytest.mark.parametrize("value", [10**30, -(10**30), 1.5, "7"])
def test_a_manifest_with_a_number_out_of_range_is_refused(name: str, value: Any, manifest: SavepointManifest) -> None:
    data = encode_manifest(replace(manifest, header=replace(manifest.header, **{name: value})))
    with pytest.raises(CorruptFileError, match=f"{name} must be a whole number"):
        decode_manifest(data, "it")


def test_a_manifest_without_one_of_its_buckets_is_refused(manifest: SavepointManifest) -> None:
    with pytest.raises(CorruptFileError, match=r"3 buckets instead of 4; the first missing bucket is \('a', 1\)"):
        SavepointManifest(manifest.header, (manifest.buckets[0], *manifest.buckets[2:]))


def test_a_second_manifest_in_the_same_folder_is_refused(manifest: SavepointManifest, tmp_path: Path) -> None:
    folder = Folder(str(tmp_path / "savepoint"))
    write_manifest(folder, manifest)
    with pytest.raises(UsageError, match="there is already a savepoint at"):
        write_manifest(folder, replace(manifest, header=replace(manifest.header, id="34" * 16)))
    with pytest.raises(UsageError, match="there is already a savepoint at"):
        refuse_existing(folder)
    assert read_manifest(folder) == manifest


def test_a_folder_with_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").touch()
    with pytest.raises(UsageError, match=r"is not empty \(mine\.txt\)"):
        refuse_existing(Folder(str(tmp_path)))


def test_reading_a_folder_without_a_manifest_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(MissingCheckpointError, match=f"has no {MANIFEST_NAME}"):
        read_manifest(Folder(str(tmp_path)))


@pytest.mark.parametrize(
    ("name", "size", "digest"),
    [("x", 1, FILE.digest), (FILE.name, 0, FILE.digest), (FILE.name, 1, "md5=0"), ("../" + FILE.name, 1, FILE.digest)],
)
def test_a_saved_file_with_an_invalid_name_size_or_digest_is_refused(name: str, size: int, digest: str) -> None:
    with pytest.raises(CorruptFileError):
        SavedFile(name, size, digest)


def test_files_that_do_not_end_at_the_checkpoint_of_the_pointer_are_refused() -> None:
    pointer: Pointer = make_bucket("a", 0).pointer
    with pytest.raises(LineageError):
        make_relocatable(pointer, ())


@pytest.mark.parametrize("name", ["../../prod/counts/q", "..", "/prod", "a/b", "", "a" * 101])
def test_an_operator_name_that_leads_out_of_the_savepoint_is_refused(
    name: str, manifest: SavepointManifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    operators = {name: replace(manifest.header.operators["a"], operator=name)}
    with pytest.raises(CorruptFileError, match="is not a valid operator name"):
        replace(manifest.header, operators=operators)
    # Write the manifest as a program would that does not check names.
    with monkeypatch.context() as unchecked:
        unchecked.setattr("arrow_schemas.savepoint.is_operator_name", lambda name: True)
        buckets = tuple(make_bucket(name, bucket) for bucket in range(2))
        data = encode_manifest(SavepointManifest(replace(manifest.header, operators=operators), buckets))
    with pytest.raises(CorruptFileError, match="is not a valid operator name"):
        decode_manifest(data, "it")


def test_an_operator_file_with_an_invalid_operator_name_is_refused() -> None:
    data = OperatorFile("../counts", "query", 2, KEY, STATE).encode()
    with pytest.raises(
        CorruptFileError, match=r"it names the operator '\.\./counts', which is not a valid operator name"
    ):
        OperatorFile.decode(data, "it")
