"""Saved buckets as rows of a Spark job: from tasks to the client, and on to the task that writes the manifest."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import pyarrow as pa

from arrow_schemas.pointer import Pointer
from arrow_schemas.savepoint import SavedBucket, SavedFile
from spark_state_ext.savepoints.taking import Copy

__all__ = ["ANSWER", "SAVED", "answer", "copies_of", "saved_row"]

# What a task of one row answers: JSON.
ANSWER = "answer string"
SAVED = "saved string, pointer binary"
_ANSWER = pa.schema([("answer", pa.string())])
_SAVED = pa.schema([("saved", pa.string()), ("pointer", pa.binary())])


def answer(value: Any) -> pa.RecordBatch:
    """What a task answers, of builtin values, as `ANSWER`."""
    return pa.RecordBatch.from_pylist([{"answer": json.dumps(value)}], schema=_ANSWER)


def saved_row(copy: Copy) -> pa.RecordBatch:
    """A bucket that was saved, as `SAVED`."""
    fields = {
        "operator": copy.saved.operator,
        "bucket": copy.saved.bucket,
        "files": [asdict(file) for file in copy.saved.files],
        "duplicated": copy.duplicated,
        "streamed": copy.streamed,
        "streamed_bytes": copy.streamed_bytes,
    }
    row = {"saved": json.dumps(fields), "pointer": copy.saved.pointer.encode()}
    return pa.RecordBatch.from_pylist([row], schema=_SAVED)


def copies_of(rows: Iterable[tuple[str, bytes]]) -> list[Copy]:
    """Inverse of `saved_row`, of the columns of `SAVED`."""
    found = []
    for text, pointer in rows:
        fields = json.loads(text)
        files = tuple(SavedFile(**file) for file in fields.pop("files"))
        saved = SavedBucket(fields.pop("operator"), fields.pop("bucket"), Pointer.decode(bytes(pointer)), files)
        found.append(Copy(saved, **fields))
    return found
