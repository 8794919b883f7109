"""Small tables in the outer form of our Arrow files, kept in memory: manifests of savepoints, erase requests."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from typing import TypeVar

import pyarrow as pa

from arrow_schemas.lineage import BLAKE2B
from spark_state_ext.errors import CorruptFileError, StateError
from spark_state_ext.files.sealed_body import NOT_ARROW, open_sealed, write_sealed

__all__ = ["seal_table", "read_sealed_table"]

T = TypeVar("T")


def seal_table(schema: pa.Schema, rows: pa.RecordBatch) -> bytes:
    """Return the bytes of a file with these rows."""
    buffer = io.BytesIO()
    write_sealed(buffer, schema, [rows], BLAKE2B)
    return buffer.getvalue()


def read_sealed_table(
    data: bytes,
    where: str,
    read: Callable[[pa.Schema, Iterable[pa.RecordBatch], str], T],
    count: Callable[[T], int],
) -> T:
    """Check the checksum of a table's bytes, and read the table."""
    body = open_sealed(pa.BufferReader(pa.py_buffer(data)), where)
    try:
        table = read(body.reader.schema, body.reader, where)
    except StateError:
        raise
    except NOT_ARROW as error:
        raise CorruptFileError(f"{where} is not the Arrow file that its header announces: {error}") from error
    if count(table) != body.record.rows:
        raise CorruptFileError(f"{where} holds {count(table)} rows, but announces {body.record.rows}")
    return table
