"""Encodes saved buckets as rows of a Spark job, which go from tasks to the client and to the manifest's writer."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import pyarrow as pa

from arrow_schemas.pointer import Pointer
from arrow_schemas.savepoint import SavedBucket, SavedFile
from spark_state_ext.savepoints.bucket_copy import BucketCopy

__all__ = ["ANSWER", "SAVED", "make_answer", "parse_copies", "make_saved_row"]

# The answer of a task that returns one row: JSON.
ANSWER = "answer string"
SAVED = "saved string, pointer binary"
_ANSWER = pa.schema([("answer", pa.string())])
_SAVED = pa.schema([("saved", pa.string()), ("pointer", pa.binary())])


def make_answer(value: Any) -> pa.RecordBatch:
    """Encode a task's answer, which is made of builtin values, as a row of `ANSWER`."""
    return pa.RecordBatch.from_pylist([{"answer": json.dumps(value)}], schema=_ANSWER)


def make_saved_row(copy: BucketCopy) -> pa.RecordBatch:
    """Encode a saved bucket as a row of `SAVED`."""
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


def parse_copies(rows: Iterable[tuple[str, bytes]]) -> list[BucketCopy]:
    """Decode rows of `make_saved_row`, from the columns of `SAVED`."""
    copies = []
    for text, pointer in rows:
        fields = json.loads(text)
        files = tuple(SavedFile(**file) for file in fields.pop("files"))
        saved_bucket = SavedBucket(fields.pop("operator"), fields.pop("bucket"), Pointer.decode(bytes(pointer)), files)
        copies.append(BucketCopy(saved_bucket, **fields))
    return copies
