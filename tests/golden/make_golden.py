"""Writes a folder such as `format-2/` or `snapshot-format-3/`: files that every later release has to read.

They are made once, by the first release that has the format, and never again; run this only to add a format.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import replace
from datetime import date, datetime, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa

from arrow_schemas import CheckpointRef, LineageEntry, OperatorFile, Pointer, Writer
from arrow_schemas.erase import EraseDone, EraseMark, EraseRequest
from arrow_schemas.lineage import DELTA, SNAPSHOT, LineageHeader, file_name
from arrow_schemas.pointer import InlineDelta, ReplicationStatus
from spark_state_ext.files.checkpoint import write_checkpoint
from spark_state_ext.files.erase_requests import encode_request
from spark_state_ext.files.folder import Folder
from spark_state_ext.store import LocalStore
from spark_state_ext.store.runs import sort_by_hash

HERE = Path(__file__).parent
_WRITER = Writer("6f1d7f0e-0000-4000-8000-000000000001", "6f1d7f0e-0000-4000-8000-000000000002", 7, "golden")


def _field(name: str, spark: Any) -> dict[str, Any]:
    return {"name": name, "type": spark, "nullable": True, "metadata": {}}


_KEYS = [
    _field("name", "string"),
    _field("x", "double"),
    _field("parts", {"type": "array", "elementType": "long", "containsNull": True}),
]
_STATE = [
    _field("count", "long"),
    _field("price", "decimal(10,2)"),
    _field("seen", "timestamp"),
    _field("local", "timestamp_ntz"),
    _field("day", "date"),
    _field("raw", "binary"),
    _field("flag", "boolean"),
    _field("tags", {"type": "map", "keyType": "string", "valueType": "integer", "valueContainsNull": True}),
    _field("pair", {"type": "struct", "fields": [_field("a", "float"), _field("b", "short")]}),
]
OPERATOR = OperatorFile(
    "golden",
    _WRITER.query_id,
    8,
    json.dumps({"type": "struct", "fields": _KEYS}),
    json.dumps({"type": "struct", "fields": _STATE}),
)


def _rows(first: int, last: int, version: int) -> pa.RecordBatch:
    """Rows of keys `first` to `last` as of a version; every fifth is deleted, every seventh only has a timeout."""
    schema = OPERATOR.row_schema()
    rows = []
    for i in range(first, last):
        deleted = version > 1 and i % 5 == 0
        defined = not deleted and i % 7 != 3
        state = {
            "state.count": i * version,
            "state.price": Decimal(i) / 4 + version,
            "state.seen": datetime(2024, 2, 29, 12, i % 60, version, 123456, tzinfo=timezone.utc),
            "state.local": datetime(1969, 12, 31, 23, 59, i % 60, tzinfo=timezone.utc).replace(tzinfo=None),
            "state.day": date(2024, 1, 1 + i % 28),
            "state.raw": bytes([i, version]),
            "state.flag": i % 2 == 0,
            "state.tags": [("v", version), ("none", None)],
            "state.pair": {"a": 0.5 * i, "b": None if i % 4 == 0 else i},
        }
        rows.append(
            {
                "key_hash": (i * 0x9E3779B97F4A7C15) % 2**64,
                "key.name": None if i == 2 else f"key {i} ü",
                "key.x": float("nan") if i == 3 else i / 2,
                "key.parts": None if i == 4 else [i, None],
                **(state if defined else dict.fromkeys(state)),
                "timeout_ms": 1_700_000_000_000 + i if i % 3 == 0 and not deleted else None,
                "defined": defined,
                "deleted": deleted,
            }
        )
    return sort_by_hash(pa.RecordBatch.from_pylist(rows, schema=schema.arrow))


def main(folder: Path) -> None:
    """Write the files into a folder that does not exist yet."""
    folder.mkdir()
    files = Folder(str(folder))
    schema = OPERATOR.row_schema()
    refs = [CheckpointRef(version, f"{version:032x}") for version in range(1, 5)]
    changes = [_rows(0, 30, 1), _rows(5, 20, 2), _rows(18, 25, 3), _rows(2, 4, 4)]
    files.put("operator_0.json", OPERATOR.encode())
    bucket = files.child("3")
    entries: list[LineageEntry] = []
    with tempfile.TemporaryDirectory() as scratch:
        store = LocalStore.at(Path(scratch), schema)
        for i, (ref, rows) in enumerate(zip(refs, changes, strict=True)):
            parent = refs[i - 1] if i else None
            store.apply([rows], ref, parent)
            writer = replace(_WRITER, heartbeat=i + 1)
            header = LineageHeader(DELTA, "golden", 3, ref, parent, tuple(refs[:i]), 0, writer, "0.1.0")
            kinds = [(DELTA, [rows])]
            if i == 1:
                kinds.append((SNAPSHOT, list(store.view(ref).scan())))
            for kind, batches in kinds:
                path = Path(scratch) / "file"
                with path.open("wb") as file:
                    write_checkpoint(file, replace(header, kind=kind, format=0), schema, batches)
                if i == 3:  # not sent yet when its pointer was made
                    inline = (InlineDelta(ref, path.read_bytes(), 1_700_000_000_000, writer.heartbeat),)
                else:
                    bucket.put_file(file_name(ref, kind), path)
                if kind == SNAPSHOT:
                    entries = entries[-1:]
                else:
                    entries.append(LineageEntry(ref, path.stat().st_size, writer.heartbeat))
        pointer = Pointer(
            operator="golden",
            bucket=3,
            buckets=8,
            schema_id=0,
            batch=7,
            watermark_ms=1_700_000_000_000,
            query_folder=_WRITER.query_id,
            lineage=tuple(entries),
            parent=refs[-2],
            calls=6,
            heartbeats=5,
            retained=100,
            retained_heartbeat=5,
            snapshots_missed=1,
            rows=25,
            timer_low_watermark_ms=1_690_000_000_000,
            timer_low_watermark_version=2,
            replication={"files": ReplicationStatus(refs[2]), "west": ReplicationStatus(refs[2], refs[1])},
            markers={"files": {"state": file_name(refs[2], DELTA)}, "west": {"state": file_name(refs[2], DELTA)}},
            inline=inline,
            partitioning=("golden run", 4),
            claim="new-query",
            origins=("gold",),
            erased=EraseMark(3, 5, 2, "ab" * 16),
            parents=CheckpointRef(1, "cd" * 16),
        )
        files.put("pointer.bin", pointer.encode())
        expected = [row for batch in store.view(refs[-1]).scan() for row in batch.to_pylist()]
        store.close()
    text = json.dumps(expected, indent=1, default=str, ensure_ascii=False)
    files.put("expected.json", text.encode() + b"\n")


def erase_files() -> dict[str, bytes]:
    """An erase request with a key of each type, and the record that it is done."""
    schema = OPERATOR.row_schema()
    columns = schema.key_columns(_rows(0, 6, 1))
    keys = pa.RecordBatch.from_arrays(columns, schema=pa.schema(list(schema.keys)))
    request = EraseRequest("ab" * 16, "golden", 1_700_000_000_000, keys, "0.1.0")
    done = EraseDone(request.id, keys.num_rows, request.asked_ms, 1_700_000_009_000, 12, 11)
    return {"erase-request-format-1.keys.arrow": encode_request(request), "erase-done-format-1.json": done.encode()}


if __name__ == "__main__":
    main(HERE / (sys.argv[1] if len(sys.argv) > 1 else "snapshot-format-3"))
