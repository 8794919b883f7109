"""Every byte of one small file of each kind: each is altered in turn, and each file is cut at every length. The suite goes
through every fifth byte and length, and the long form through all of them.

What comes of it is a typed error, or exactly what the whole file says. The reading is done by a child process for each
kind, so that a crash is a failed test; run as a script, this file is that child.
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
# Formats align to 8 bytes, with which 5 has nothing in common.
_POSITIONS = every(5)
_SHOWN_MAX = 20


@dataclass(frozen=True)
class Kind:
    """A file of one kind.

    Parameters
    ----------
    data
        The whole file.
    read
        Reads one; equal results mean equal contents.
    checked
        Damage must be noticed, with a typed error. Payloads live inside Spark's shuffle for one batch and have
        no checksum of their own: any exception will do.
    """

    data: bytes
    read: Callable[[bytes], object]
    checked: bool = True


def _bits(batches: Iterable[pa.RecordBatch]) -> list[object]:
    """Schema and all rows, by their bits, so that a NaN equals itself and nothing else does."""
    return [(batch.schema.serialize().to_pybytes(), batch.serialize().to_pybytes()) for batch in batches]


# -- checkpoint files -------------------------------------------------------------------------------


def _checkpoint(kind: str, reader: Callable[[Folder, Any, str], object], on_disk: bool = False, form: int = 0) -> Kind:
    refs = Refs()
    parent, ref = refs.next(1), refs.next(2)
    header = LineageHeader(kind, "counts", 3, ref, parent, (parent,), 0, WRITER, "0.1.0", form)
    rows = {KEYS[0]: Row(1, "one", 5), KEYS[7]: Row(2), KEYS[8]: Row(None, None, 7, False)}
    file = io.BytesIO()
    write_checkpoint(file, header, SCHEMA, [make_run({**rows, KEYS[9]: None} if kind == DELTA else rows)])
    name = file_name(ref, kind)
    if on_disk:
        folder = Path(tempfile.gettempdir())
        checkpoint._IN_MEMORY_BYTES_MAX = -1  # read where it lies, as large ones are
    files = Folder(str(folder) if on_disk else "memory://every-byte")

    def read(data: bytes) -> object:
        if on_disk:
            (folder / name).write_bytes(data)
        else:
            files.put(name, data)
        return reader(files, ref, kind)

    return Kind(file.getvalue(), read)


def _rows(files: Folder, ref: Any, kind: str) -> object:
    found = read_checkpoint(files, ref, kind, SCHEMA, Path(tempfile.gettempdir()))
    return found.header, _bits(found.batches)


def _verified(files: Folder, ref: Any, kind: str) -> object:
    return verify_checkpoint(files, ref, kind, Path(tempfile.gettempdir()))


def _in_parts(files: Folder, ref: Any, kind: str) -> object:
    """As who fetches a part only: the index from the end, and from the front what it has checksums for."""
    name = file_name(ref, kind)
    where = files.where(name)
    record, index = read_announced_index(lambda start, end: files.get_range(name, start, end), files.size(name), where)
    if index is None:  # a file of an older format, for who looks at its end only
        raise CorruptFileError(f"{where} has no index")
    body = files.get_range(name, 0, record.length)
    index.check(0, body, where)
    chunks = [body[chunk.offset : chunk.offset + chunk.size_bytes] for chunk in index.chunks]
    return _bits(pa.ipc.read_record_batch(pa.py_buffer(chunk), SCHEMA.arrow) for chunk in chunks)


# -- small files ------------------------------------------------------------------------------------


def _operator() -> Kind:
    def schema(name: str, spark_type: str) -> str:
        field = {"name": name, "type": spark_type, "nullable": True, "metadata": {}}
        return json.dumps({"type": "struct", "fields": [field]})

    function = json.dumps({"name": "top_k", "parameters": {"k": 3, "order_by": "count descending"}}, sort_keys=True)
    file = OperatorFile(
        "counts", "6f1d7f0e", 8, schema("name", "string"), schema("count", "long"), 1, function=function
    )
    return Kind(file.encode(), lambda data: OperatorFile.decode(data, "operator_1.json"))


def _pointer() -> Kind:
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


def _lease() -> Kind:
    owner = RunIdentity("app-1", "plan-2", "query", "host", "boot", 4_711, "98765")
    record = LeaseRecord(owner, 1_700_000_000_000, 10_000, ("plan-1",))
    return Kind(record.encode(), lambda data: LeaseRecord.decode(data, "lease.json"))


# -- payloads ---------------------------------------------------------------------------------------


def _inline_payload() -> bytes:
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


def _payload_rows(data: bytes, load: Callable[[str, int, int], bytes]) -> object:
    batches = list(payload.decode(data, load))
    # Rows are picked from them and handed to the user's function.
    picked = [batch.take(pa.array(range(batch.num_rows - 1, -1, -1), pa.int64())) for batch in batches]
    return [batch.to_pylist() for batch in (*batches, *picked)]


def _no_file(name: str, offset: int, length: int) -> bytes:
    raise AssertionError(f"nothing should be read from {name}")


def _payload() -> Kind:
    return Kind(_inline_payload(), lambda data: _payload_rows(data, _no_file))


def _reference() -> Kind:
    stored = _inline_payload()
    files = Folder("memory://every-byte-spilled")
    files.put("spill/7/x.payloads", b"before" + stored + b"after")

    def load(name: str, offset: int, length: int) -> bytes:
        return files.get_range(name, offset, offset + length)

    reference = payload.encode_spill_reference("spill/7/x.payloads", 6, len(stored))
    return Kind(reference, lambda data: _payload_rows(data, load))


# -- how it is checked ------------------------------------------------------------------------------


def _crashing() -> Kind:
    def read(data: bytes) -> object:
        if data == b"a":
            os.kill(os.getpid(), signal.SIGSEGV)
        return data

    return Kind(b"ab", read, checked=False)


_MAKERS: dict[str, Callable[[], Kind]] = {
    "delta": lambda: _checkpoint(DELTA, _rows),
    "delta-on-disk": lambda: _checkpoint(DELTA, _rows, on_disk=True),
    "delta-header": lambda: _checkpoint(DELTA, read_header),
    "snapshot": lambda: _checkpoint(SNAPSHOT, _rows),
    "snapshot-verified": lambda: _checkpoint(SNAPSHOT, _verified),
    "snapshot-in-parts": lambda: _checkpoint(SNAPSHOT, _in_parts),
    "snapshot-format-2": lambda: _checkpoint(SNAPSHOT, _rows, form=2),
    "operator-file": _operator,
    "pointer": _pointer,
    "lease": _lease,
    "payload": _payload,
    "spilled-payload": _reference,
}
_PROBES: dict[str, Callable[[], Kind]] = {"crashing": _crashing}


def _damages(data: bytes, positions: slice) -> Iterator[tuple[str, bytes]]:
    for at in range(len(data))[positions]:
        for flip in _FLIPS:
            damaged = bytearray(data)
            damaged[at] ^= flip
            yield f"byte {at} xor {flip:#04x}", bytes(damaged)
    for length in range(len(data))[positions]:
        yield f"cut to {length} bytes", data[:length]


def _check(kind: Kind, progress: io.RawIOBase | None = None, positions: slice = _ALL) -> dict[str, Any]:
    """Read every damaged form of a file, or those of some positions."""
    expected = kind.read(kind.data)
    counts = {"damages": 0, "errors": 0, "harmless": 0}
    problems = []
    for what, damaged in _damages(kind.data, positions):
        if progress is not None:
            progress.seek(0)
            progress.write(what.ljust(40).encode())
        counts["damages"] += 1
        try:
            found = kind.read(damaged)
        except StateError:
            counts["errors"] += 1
        except Exception as error:
            counts["errors"] += 1
            if kind.checked:
                problems.append(f"{what}: not a typed error: {error!r}")
        else:
            counts["harmless"] += 1
            if kind.checked and found != expected:
                problems.append(f"{what}: not noticed")
    return {"size": len(kind.data), **counts, "problems": problems}


def _run_child(name: str, tmp_path: Path) -> tuple[subprocess.CompletedProcess[str], str]:
    """Check a kind in a process of its own; also returns which damage it tried last."""
    progress = tmp_path / "progress"
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", __file__, name, str(progress)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    return done, progress.read_text().strip() if progress.exists() else "nothing"


@pytest.mark.parametrize("name", _MAKERS)
def test_damage_is_noticed_or_harmless(name: str, tmp_path: Path) -> None:
    done, last = _run_child(name, tmp_path)
    assert done.returncode == 0, f"the process ended with {done.returncode}, having tried {last}:\n{done.stderr}"
    found = json.loads(done.stdout)
    problems = found["problems"]
    assert not problems, "\n".join([f"{len(problems)} problems of {name}:", *problems[:_SHOWN_MAX]])
    assert found["size"] > 30
    positions = len(range(found["size"])[_POSITIONS])
    assert found["damages"] == (len(_FLIPS) + 1) * positions
    # Of a header only the front of the file is read, so most of the rest is harmless.
    assert found["errors"] > positions // 2


def test_a_crash_is_a_failure_that_names_the_damage(tmp_path: Path) -> None:
    done, last = _run_child("crashing", tmp_path)
    assert (done.returncode, last) == (-signal.SIGSEGV, "cut to 1 bytes")


def test_unnoticed_damage_and_untyped_errors_are_found() -> None:
    def careless(data: bytes) -> object:
        return data[:1], len(data.decode())

    found = _check(Kind(b"ab", careless))
    assert found["damages"] == found["errors"] + found["harmless"] == 6
    assert [problem.split(":")[:2] for problem in found["problems"]] == [
        ["byte 0 xor 0x01", " not noticed"],
        ["byte 0 xor 0xff", " not a typed error"],
        ["byte 1 xor 0xff", " not a typed error"],
        ["cut to 0 bytes", " not noticed"],
        ["cut to 1 bytes", " not noticed"],
    ]


def _main(name: str, progress: str) -> None:
    # Whatever ends this process is told by its exit code.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with open(progress, "wb", buffering=0) as file:
        positions = _POSITIONS if name in _MAKERS else _ALL
        print(json.dumps(_check({**_MAKERS, **_PROBES}[name](), file, positions)))


if __name__ == "__main__":
    _main(*sys.argv[1:])
