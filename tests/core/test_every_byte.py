"""Damage to each byte of one small file of each kind, and truncation of each file to every length.

The suite tries every fifth byte and length, and the soak tries all. A damaged file must cause a typed error or be read
like the undamaged one. For each kind, a child process reads the files, so that a crash is a failed test; run as a
script, this file is that child.
"""

from __future__ import annotations

import io
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from core_support import WRITER

from arrow_schemas import LineageEntry, LineageHeader, OperatorFile, Pointer
from arrow_schemas.lineage import DELTA, SNAPSHOT, file_name
from arrow_schemas.pointer import InlineDelta, ReplicationStatus
from spark_state_ext.errors import CorruptFileError, StateError
from spark_state_ext.files import checkpoint
from spark_state_ext.files.checkpoint import read_checkpoint, read_header, verify_checkpoint, write_checkpoint
from spark_state_ext.files.folder import Folder
from spark_state_ext.files.sealed_body import read_announced_index
from spark_state_ext.ownership.lease_record import LeaseRecord, RunIdentity
from spark_state_ext.spark.shuffle import payload
from spark_state_ext.testing.model import KEYS, SCHEMA, Refs, Row, make_run
from tests.helpers.soak import every
from tests.helpers.waiting import WAIT_S

_FLIPS = (0x01, 0xFF)
_ALL = slice(None)
# Formats align to 8 bytes, and 5 has no common divisor with 8.
_POSITIONS = every(11)
_SHOWN_MAX = 20


@dataclass(frozen=True)
class Kind:
    """A file of one kind.

    Parameters
    ----------
    data
        The whole file.
    read
        Reads a file; equal results mean equal contents.
    checked
        True if damage must cause a typed error. Payloads live inside Spark's shuffle for one batch and have
        no checksum of their own, so any exception and any result is accepted.
    """

    data: bytes
    read: Callable[[bytes], object]
    checked: bool = True


def _to_bytes(batches: Iterable[pa.RecordBatch]) -> list[object]:
    """Return schema and rows as bytes, so that a NaN equals itself, but 0.0 does not equal -0.0."""
    return [(batch.schema.serialize().to_pybytes(), batch.serialize().to_pybytes()) for batch in batches]


# -- checkpoint files -------------------------------------------------------------------------------


def _make_checkpoint(
    kind: str, reader: Callable[[Folder, Any, str], object], on_disk: bool = False, form: int = 0
) -> Kind:
    refs = Refs()
    parent, ref = refs.next(1), refs.next(2)
    header = LineageHeader(kind, "counts", 3, ref, parent, (parent,), 0, WRITER, "0.1.0", form)
    rows = {KEYS[0]: Row(1, "one", 5), KEYS[7]: Row(2), KEYS[8]: Row(None, None, 7, False)}
    file = io.BytesIO()
    write_checkpoint(file, header, SCHEMA, [make_run({**rows, KEYS[9]: None} if kind == DELTA else rows)])
    name = file_name(ref, kind)
    if on_disk:
        folder = Path(tempfile.gettempdir())
        checkpoint._IN_MEMORY_BYTES_MAX = -1  # read the file in place, like large files
    files = Folder(str(folder) if on_disk else "memory://every-byte")

    def read(data: bytes) -> object:
        if on_disk:
            (folder / name).write_bytes(data)
        else:
            files.put(name, data)
        return reader(files, ref, kind)

    return Kind(file.getvalue(), read)


def _read_rows(files: Folder, ref: Any, kind: str) -> object:
    contents = read_checkpoint(files, ref, kind, SCHEMA, Path(tempfile.gettempdir()))
    return contents.header, _to_bytes(contents.batches)


def _verify(files: Folder, ref: Any, kind: str) -> object:
    return verify_checkpoint(files, ref, kind, Path(tempfile.gettempdir()))


def _read_in_parts(files: Folder, ref: Any, kind: str) -> object:
    """Read like a lazy restore: the index from the end of the file, and then the body, for which it has checksums."""
    name = file_name(ref, kind)
    where = files.where(name)
    record, index = read_announced_index(lambda start, end: files.get_range(name, start, end), files.size(name), where)
    if index is None:  # at its end, the file looks like one of an older format
        raise CorruptFileError(f"{where} has no index")
    body = files.get_range(name, 0, record.length)
    index.check(0, body, where)
    chunks = [body[chunk.offset : chunk.offset + chunk.size_bytes] for chunk in index.chunks]
    return _to_bytes(pa.ipc.read_record_batch(pa.py_buffer(chunk), SCHEMA.arrow) for chunk in chunks)


# -- small files ------------------------------------------------------------------------------------


def _make_operator_file() -> Kind:
    def schema(name: str, spark_type: str) -> str:
        field = {"name": name, "type": spark_type, "nullable": True, "metadata": {}}
        return json.dumps({"type": "struct", "fields": [field]})

    function = json.dumps({"name": "top_k", "parameters": {"k": 3, "order_by": "count descending"}}, sort_keys=True)
    file = OperatorFile(
        "counts", "6f1d7f0e", 8, schema("name", "string"), schema("count", "long"), 1, function=function
    )
    return Kind(file.encode(), lambda data: OperatorFile.decode(data, "operator_1.json"))


def _make_pointer() -> Kind:
    refs = Refs()
    lineage = [LineageEntry(refs.next(version), 100 * version, version) for version in (4, 5)]
    pointer = Pointer(
        operator="counts",
        bucket=3,
        buckets=8,
        schema_id=1,
        batch=41,
        watermark_ms=5_000,
        query_folder="6f1d7f0e",
        lineage=tuple(lineage),
        rows=12,
        timer_low_watermark_ms=1_000,
        timer_low_watermark_version=2,
        earliest_timeout_ms=6_000,
        parent=lineage[0].ref,
        calls=40,
        heartbeats=30,
        snapshots_missed=1,
        replication={
            "files": ReplicationStatus(lineage[0].ref),
            "west": ReplicationStatus(lineage[0].ref, lineage[0].ref),
        },
        markers={"files": {"state": "marker"}},
        inline=(InlineDelta(lineage[1].ref, b"\x00\xff" * 5, 1_700_000_000_000, 4),),
        partitioning=("run-2", 8),
    )
    return Kind(pointer.encode(), Pointer.decode)


def _make_lease() -> Kind:
    owner = RunIdentity("app-1", "plan-2", "query", "host", "boot", 4_711, "98765")
    record = LeaseRecord(owner, 1_700_000_000_000, 10_000, ("plan-1",))
    return Kind(record.encode(), lambda data: LeaseRecord.decode(data, "lease.json"))


# -- payloads ---------------------------------------------------------------------------------------


def _encode_payload() -> bytes:
    return payload.encode(
        pa.record_batch(
            {
                "c0": pa.array(["a", "bcd", None, "ü"]),
                "c1": pa.array([1, None, 3, 4], pa.int32()),
                "c2": pa.array([[{"x": 1}], None, [], [{"x": None}]]),
                "__hash": pa.array([1, -2, 3, 4], pa.int64()),
            }
        )
    )


def _read_payload(data: bytes, load: Callable[[str, int, int], bytes]) -> object:
    batches = list(payload.decode(data, load))
    # Rows are taken from the batches and passed to the user's function.
    picked = [batch.take(pa.array(range(batch.num_rows - 1, -1, -1), pa.int64())) for batch in batches]
    return [batch.to_pylist() for batch in (*batches, *picked)]


def _fail_to_load(name: str, offset: int, length: int) -> bytes:
    raise AssertionError(f"{name} should not be read")


def _make_payload() -> Kind:
    return Kind(_encode_payload(), lambda data: _read_payload(data, _fail_to_load))


def _make_reference() -> Kind:
    stored = _encode_payload()
    files = Folder("memory://every-byte-spilled")
    files.put("spill/7/x.payloads", b"before" + stored + b"after")

    def load(name: str, offset: int, length: int) -> bytes:
        return files.get_range(name, offset, offset + length)

    reference = payload.encode_spill_reference("spill/7/x.payloads", 6, len(stored))
    return Kind(reference, lambda data: _read_payload(data, load))


# -- checks -----------------------------------------------------------------------------------------


def _make_crashing() -> Kind:
    def read(data: bytes) -> object:
        if data == b"a":
            os.kill(os.getpid(), signal.SIGSEGV)
        return data

    return Kind(b"ab", read, checked=False)


_MAKERS: dict[str, Callable[[], Kind]] = {
    "delta": lambda: _make_checkpoint(DELTA, _read_rows),
    "delta-on-disk": lambda: _make_checkpoint(DELTA, _read_rows, on_disk=True),
    "delta-header": lambda: _make_checkpoint(DELTA, read_header),
    "snapshot": lambda: _make_checkpoint(SNAPSHOT, _read_rows),
    "snapshot-verified": lambda: _make_checkpoint(SNAPSHOT, _verify),
    "snapshot-in-parts": lambda: _make_checkpoint(SNAPSHOT, _read_in_parts),
    "snapshot-format-2": lambda: _make_checkpoint(SNAPSHOT, _read_rows, form=2),
    "operator-file": _make_operator_file,
    "pointer": _make_pointer,
    "lease": _make_lease,
    "payload": _make_payload,
    "spilled-payload": _make_reference,
}
_PROBES: dict[str, Callable[[], Kind]] = {"crashing": _make_crashing}


def _iterate_damages(data: bytes, positions: slice) -> Iterator[tuple[str, bytes]]:
    for position in range(len(data))[positions]:
        for flip in _FLIPS:
            damaged = bytearray(data)
            damaged[position] ^= flip
            yield f"byte {position} xor {flip:#04x}", bytes(damaged)
    for length in range(len(data))[positions]:
        yield f"cut to {length} bytes", data[:length]


def _check(kind: Kind, progress: io.RawIOBase | None = None, positions: slice = _ALL) -> dict[str, Any]:
    """Read a file with each kind of damage at each of some positions; return counts and problems."""
    expected = kind.read(kind.data)
    counts = {"damages": 0, "errors": 0, "harmless": 0}
    problems = []
    for damage, damaged in _iterate_damages(kind.data, positions):
        if progress is not None:
            progress.seek(0)
            progress.write(damage.ljust(40).encode())
        counts["damages"] += 1
        try:
            result = kind.read(damaged)
        except StateError:
            counts["errors"] += 1
        except Exception as error:
            counts["errors"] += 1
            if kind.checked:
                problems.append(f"{damage}: not a typed error: {error!r}")
        else:
            counts["harmless"] += 1
            if kind.checked and result != expected:
                problems.append(f"{damage}: not noticed")
    return {"size": len(kind.data), **counts, "problems": problems}


def _run_child(name: str, tmp_path: Path) -> tuple[subprocess.CompletedProcess[str], str]:
    """Check a kind in a separate process; return the process, and the damage that it tried last."""
    progress = tmp_path / "progress"
    child = subprocess.run(
        [sys.executable, "-X", "faulthandler", __file__, name, str(progress)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    return child, progress.read_text().strip() if progress.exists() else "nothing"


@pytest.mark.parametrize("name", _MAKERS)
def test_damage_causes_a_typed_error_or_has_no_effect(name: str, tmp_path: Path) -> None:
    child, damage = _run_child(name, tmp_path)
    assert child.returncode == 0, f"the process ended with {child.returncode}, after it tried {damage}:\n{child.stderr}"
    result = json.loads(child.stdout)
    problems = result["problems"]
    assert not problems, "\n".join([f"{len(problems)} problems of {name}:", *problems[:_SHOWN_MAX]])
    assert result["size"] > 30
    positions = len(range(result["size"])[_POSITIONS])
    assert result["damages"] == (len(_FLIPS) + 1) * positions
    # To read a header, only the first part of the file is read, so most damage to the rest is harmless.
    assert result["errors"] > positions // 2


def test_a_crash_is_reported_with_the_damage_that_caused_it(tmp_path: Path) -> None:
    child, damage = _run_child("crashing", tmp_path)
    assert (child.returncode, damage) == (-signal.SIGSEGV, "cut to 1 bytes")


def test_unnoticed_damage_and_untyped_errors_are_reported() -> None:
    def read_carelessly(data: bytes) -> object:
        return data[:1], len(data.decode())

    result = _check(Kind(b"ab", read_carelessly))
    assert result["damages"] == result["errors"] + result["harmless"] == 6
    assert [problem.split(":")[:2] for problem in result["problems"]] == [
        ["byte 0 xor 0x01", " not noticed"],
        ["byte 0 xor 0xff", " not a typed error"],
        ["byte 1 xor 0xff", " not a typed error"],
        ["cut to 0 bytes", " not noticed"],
        ["cut to 1 bytes", " not noticed"],
    ]


def _main(name: str, progress: str) -> None:
    # The exit code shows how this process ended, so no core dump is needed.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with open(progress, "wb", buffering=0) as file:
        positions = _POSITIONS if name in _MAKERS else _ALL
        print(json.dumps(_check({**_MAKERS, **_PROBES}[name](), file, positions)))


if __name__ == "__main__":
    _main(*sys.argv[1:])
