"""A small table in the outer form of our Arrow files, whole in memory: manifests of savepoints, erase requests."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from typing import TypeVar

import pyarrow as pa

from arrow_schemas.lineage import BLAKE2B
from spark_state_ext.errors import CorruptFileError, StateError
from spark_state_ext.files.sealed_body import NOT_ARROW, open_sealed, write_sealed

__all__ = ["sealed_table", "unsealed_table"]

T = TypeVar("T")


def sealed_table(schema: pa.Schema, rows: pa.RecordBatch) -> bytes:
    """The file's bytes."""
    buffer = io.BytesIO()
    write_sealed(buffer, schema, [rows], BLAKE2B)
    return buffer.getvalue()


def unsealed_table(
    data: bytes,
    where: str,
    read: Callable[[pa.Schema, Iterable[pa.RecordBatch], str], T],
    count: Callable[[T], int],
) -> T:
    """Read such a table, once its checksum was right."""
    body = open_sealed(pa.BufferReader(pa.py_buffer(data)), where)
    try:
        found = read(body.reader.schema, body.reader, where)
    except StateError:
        raise
    except NOT_ARROW as error:
        raise CorruptFileError(f"{where} is not the Arrow file that its header announces: {error}") from error
    if count(found) != body.record.rows:
        raise CorruptFileError(f"{where} holds {count(found)} rows and announces {body.record.rows}")
    return found
