"""Delta and snapshot files: round trips, reading with any Arrow reader, and damage to every byte."""

from __future__ import annotations

import contextlib
import io
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from core_support import WRITER
from hypothesis import given
from hypothesis import strategies as st

from arrow_schemas import CheckpointRef, LineageHeader, RowSchema
from arrow_schemas.ipc_message import decode_message_head
from arrow_schemas.lineage import BODY_PLACEHOLDER, DELTA, SNAPSHOT, file_name
from spark_state_ext.errors import CorruptFileError, LineageError, MissingCheckpointError
from spark_state_ext.files import checkpoint
from spark_state_ext.files.checkpoint import read_checkpoint, read_header, write_checkpoint
from spark_state_ext.files.folder import Folder
from spark_state_ext.testing.model import KEYS, SCHEMA, Changes, Refs, Row, make_run
from tests.helpers.waiting import WAIT_S

_CHANGES: Changes = {KEYS[0]: Row(1, "one", 5), KEYS[7]: Row(2), KEYS[9]: None}


def _encode_checkpoint(header: LineageHeader, batches: list[pa.RecordBatch], schema: RowSchema = SCHEMA) -> bytes:
    file = io.BytesIO()
    write_checkpoint(file, header, schema, batches)
    return file.getvalue()


def _make_header(ref: CheckpointRef, kind: str = DELTA, lineage: tuple[CheckpointRef, ...] = ()) -> LineageHeader:
    parent = lineage[-1] if lineage else None
    return LineageHeader(kind, "counts", 3, ref, parent, lineage, 0, WRITER, "0.1.0")


@pytest.fixture
def files(tmp_path: Path) -> Folder:
    return Folder(str(tmp_path / "root"))


def test_our_reader_and_any_arrow_reader_read_a_checkpoint_file(files: Folder, tmp_path: Path) -> None:
    refs = Refs()
    parent, ref = refs.next(1), refs.next(2)
    batches = [make_run({KEYS[0]: Row(1)}), make_run(_CHANGES)]
    header = _make_header(ref, lineage=(parent,))
    data = _encode_checkpoint(header, batches)
    files.put(file_name(ref, DELTA), data)
    checkpoint_file = read_checkpoint(files, ref, DELTA, SCHEMA, tmp_path)
    assert (checkpoint_file.header, checkpoint_file.size_bytes) == (header, len(data))
    assert list(checkpoint_file.batches) == batches
    assert read_header(files, ref, DELTA) == header
    # Arrow reads it as a file, with the footer that our reader ignores, and as a stream.
    with pa.ipc.open_file(pa.py_buffer(data)) as reader:
        assert reader.read_all() == pa.Table.from_batches(batches)
        assert LineageHeader.decode(reader.schema.metadata, "file") == header
        assert BODY_PLACEHOLDER not in reader.schema.metadata.values(), "the footer has the real record"
    assert pa.ipc.open_stream(data[8:]).read_all() == pa.Table.from_batches(batches)


def test_a_checkpoint_file_may_have_no_rows(files: Folder, tmp_path: Path) -> None:
    ref = Refs().next(1)
    files.put(file_name(ref, SNAPSHOT), _encode_checkpoint(_make_header(ref, SNAPSHOT), []))
    checkpoint_file = read_checkpoint(files, ref, SNAPSHOT, SCHEMA, tmp_path)
    assert [batch.num_rows for batch in checkpoint_file.batches] == [0]
    assert read_header(files, ref, SNAPSHOT) == checkpoint_file.header


def test_large_files_pass_through_the_scratch_folder(
    files: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "_IN_MEMORY_BYTES_MAX", 100)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    ref = Refs().next(1)
    files.put(file_name(ref, DELTA), _encode_checkpoint(_make_header(ref), [make_run(_CHANGES)]))
    checkpoint_file = read_checkpoint(files, ref, DELTA, SCHEMA, scratch)
    assert list(scratch.iterdir()) == [], "the copy no longer has a name"
    assert list(checkpoint_file.batches) == [make_run(_CHANGES)]


def test_a_long_header_is_read_completely(files: Folder) -> None:
    refs = Refs()
    lineage = tuple(refs.next(version) for version in range(1, 600))
    ref = refs.next(600)
    data = _encode_checkpoint(_make_header(ref, lineage=lineage), [make_run(_CHANGES)])
    assert len(data) > 2 * checkpoint._HEAD_BYTES
    files.put(file_name(ref, DELTA), data)
    assert read_header(files, ref, DELTA).lineage == lineage


@pytest.mark.parametrize("flip", [0x01, 0xFF])
def test_a_damaged_byte_never_changes_the_rows(tmp_path: Path, flip: int) -> None:
    """Damage to each byte is an error or, in the unused parts of the footer, leaves the rows unchanged."""
    files = Folder("memory://damage")
    ref = Refs().next(1)
    data = _encode_checkpoint(_make_header(ref), [make_run(_CHANGES)])
    body_end = data.rindex(b"\xff\xff\xff\xff\x00\x00\x00\x00", 0, len(data))
    name = file_name(ref, DELTA)
    harmless = 0
    for at in range(len(data)):
        damaged = bytearray(data)
        damaged[at] ^= flip
        files.put(name, bytes(damaged))
        try:
            rows = list(read_checkpoint(files, ref, DELTA, SCHEMA, tmp_path).batches)
        except CorruptFileError:
            continue
        assert rows == [make_run(_CHANGES)]
        assert at >= body_end, f"byte {at} of the body is damaged, but no error was raised"
        harmless += 1
    assert harmless, "the footer repeats the schema, which is not read"


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    files = Folder("memory://cuts")
    ref = Refs().next(1)
    data = _encode_checkpoint(_make_header(ref), [make_run(_CHANGES)])
    for length in range(len(data)):
        files.put(file_name(ref, DELTA), data[:length])
        with pytest.raises(CorruptFileError):
            list(read_checkpoint(files, ref, DELTA, SCHEMA, tmp_path).batches)


def test_a_damaged_byte_never_changes_the_header(tmp_path: Path) -> None:
    files = Folder("memory://headers")
    ref = Refs().next(1)
    header = _make_header(ref)
    data = _encode_checkpoint(header, [make_run(_CHANGES)])
    message_bytes = int.from_bytes(data[12:16], "little")
    for at in range(16 + message_bytes):
        damaged = bytearray(data)
        damaged[at] ^= 0x01
        files.put(file_name(ref, DELTA), bytes(damaged))
        try:
            assert read_header(files, ref, DELTA) == header
        except CorruptFileError:
            continue
    for length in range(16 + message_bytes):
        files.put(file_name(ref, DELTA), data[:length])
        with pytest.raises(CorruptFileError):
            read_header(files, ref, DELTA)


def test_a_file_with_another_name_or_schema_is_refused(files: Folder, tmp_path: Path) -> None:
    refs = Refs()
    ref, other = refs.next(1), refs.next(1)
    data = _encode_checkpoint(_make_header(ref), [make_run(_CHANGES)])
    for wrong_ref, kind in ((other, DELTA), (ref, SNAPSHOT)):
        files.put(file_name(wrong_ref, kind), data)
        with pytest.raises(LineageError, match=f"holds the delta of checkpoint {ref}"):
            read_checkpoint(files, wrong_ref, kind, SCHEMA, tmp_path)
    files.put(file_name(ref, DELTA), data)
    wrong = RowSchema(SCHEMA.keys, (pa.field("count", pa.date32()), pa.field("note", pa.int8())))
    with pytest.raises(CorruptFileError):
        list(read_checkpoint(files, ref, DELTA, wrong, tmp_path).batches)


def test_rows_of_an_older_operator_file_are_widened(files: Folder, tmp_path: Path) -> None:
    ref = Refs().next(1)
    files.put(file_name(ref, DELTA), _encode_checkpoint(_make_header(ref), [make_run(_CHANGES)]))
    wider = RowSchema(SCHEMA.keys, (*SCHEMA.state, pa.field("new", pa.float64())))
    (batch,) = read_checkpoint(files, ref, DELTA, wider, tmp_path).batches
    assert batch.schema.equals(wider.arrow)
    assert batch.column("state.count") == make_run(_CHANGES).column("state.count")
    assert batch.column("state.new").null_count == 3


@pytest.mark.parametrize("kind", [DELTA, SNAPSHOT])
def test_a_compressed_file_is_refused_before_it_is_decompressed(
    kind: str, files: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its checksum is right, and Arrow would decompress it before other checks."""

    class Compressed(pa.ipc.IpcWriteOptions):  # type: ignore[misc]
        def __init__(self, **options: Any) -> None:
            super().__init__(**{**options, "compression": "zstd"})

    ref = Refs().next(1)
    rows = make_run({key: Row(1, "0" * (1 << 20)) for key in KEYS})
    monkeypatch.setattr(pa.ipc, "IpcWriteOptions", Compressed)
    files.put(file_name(ref, kind), _encode_checkpoint(_make_header(ref, kind), [rows]))
    assert files.size(file_name(ref, kind)) < 100_000 < 10_000_000 < rows.nbytes
    with pytest.raises(
        CorruptFileError, match="is compressed with Arrow's codec 1, which spark_state_ext does not use"
    ):
        read_checkpoint(files, ref, kind, SCHEMA, tmp_path)


@given(data=st.binary(max_size=200))
def test_random_bytes_are_refused_or_decode_to_a_valid_message_head(data: bytes) -> None:
    for metadata in (data, struct.pack("<II", 4, 8) + data):
        with contextlib.suppress(CorruptFileError):
            assert decode_message_head(metadata, "message").body_bytes >= 0


def test_a_missing_file_is_an_error_that_names_the_checkpoint(files: Folder, tmp_path: Path) -> None:
    ref = Refs().next(1)
    for read in (
        lambda: read_checkpoint(files, ref, DELTA, SCHEMA, tmp_path),
        lambda: read_header(files, ref, DELTA),
    ):
        with pytest.raises(MissingCheckpointError, match=str(ref)):
            read()


_FORK_SCRIPT = """
import os, sys
from pathlib import Path
from core_support import WRITER
from spark_state_ext.testing.model import KEYS, SCHEMA, Refs, Row, make_run
from arrow_schemas import LineageHeader
from spark_state_ext.files import sealed_file
sealed_file.MEMORY_BYTES_MAX = 0
ref = Refs().next(1)
header = LineageHeader("delta", "counts", 3, ref, None, (), 0, WRITER, "0.1.0")
file = sealed_file.seal(header, SCHEMA, [make_run({KEYS[0]: Row(1)})], Path(sys.argv[1]))
assert file.path.exists()
child = os.fork()
if not child:
    sys.exit()
assert os.waitpid(child, 0)[1] == 0
assert file.path.exists(), "the child has removed it"
file.let_go()
assert not file.path.exists()
print("as expected")
"""


def test_a_forked_process_does_not_remove_its_parents_sealed_file(tmp_path: Path) -> None:
    """This includes processes that end by a normal exit of Python instead of `os._exit`."""
    done = subprocess.run(
        [sys.executable, "-c", _FORK_SCRIPT, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert done.stdout.strip() == "as expected", done.stderr[-3000:]
