"""Output of functions that return Arrow: it passes Spark's stateful operator as bytes, and is unpacked after it.

Spark takes a stateful function's output as pandas frames, pads them with rows of its own and makes a Python object of
every value: for a million rows that takes longer than aggregating them. Bytes are only copied. So tables leave the
operator as Arrow IPC streams of a few MiB, in a binary column, and a `mapInArrow` in the same stage turns them into
rows. Both run on one machine within one task, so the bytes are not compressed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pandas as pd
import pyarrow as pa

from spark_state_ext.errors import CorruptFileError
from spark_state_ext.functions.tables import conform_table
from spark_state_ext.spark.shuffle.payload import NUMBERS, OUTPUT_COLUMN, decode_output, encode_output

__all__ = ["OUTPUT_SCHEMA", "Outbox", "unpack"]

OUTPUT_SCHEMA = f"{OUTPUT_COLUMN} binary"
_PAYLOAD_BYTES = 4 << 20
# Bytes of the payloads that Spark gets at once.
_FRAME_BYTES = 16 << 20
# The most rows in a batch of output, which is Spark's own default.
_ROWS_MAX = 10_000


class Outbox:
    """Collects output, and returns it in frames that Spark's operator passes on."""

    def __init__(self, fields: Sequence[pa.Field]) -> None:
        self._fields = tuple(fields)
        self._payloads: list[bytes] = []
        self._bytes = 0

    def add(self, table: Any) -> Iterator[pd.DataFrame]:
        """Add a table with the output's columns; yield the frames that are full."""
        conforming = conform_table(table, self._fields, "the function gave")
        if not conforming.num_rows:
            return
        rows = max(1, conforming.num_rows * _PAYLOAD_BYTES // max(1, conforming.nbytes))
        for start in range(0, conforming.num_rows, rows):
            payload = encode_output(conforming.slice(start, rows))
            self._payloads.append(payload)
            self._bytes += len(payload)
            if self._bytes >= _FRAME_BYTES:
                yield from self.rest()

    def rest(self) -> Iterator[pd.DataFrame]:
        """Yield the rest of the output as a frame."""
        if self._payloads:
            payloads, self._payloads, self._bytes = self._payloads, [], 0
            yield pd.DataFrame({OUTPUT_COLUMN: pd.Series(payloads, dtype=object)})


def unpack(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the output rows of payloads: the `mapInArrow` stage after the operator."""
    for batch in batches:
        for payload in batch.column(0):
            if not payload.is_valid:
                raise CorruptFileError("a row of the stateful operator's output arrived without its payload")
            data = payload.as_buffer()
            if data.slice(0, 1) == NUMBERS:
                continue
            for batch_part in decode_output(data):
                for start in range(0, batch_part.num_rows, _ROWS_MAX):
                    yield batch_part.slice(start, _ROWS_MAX)
