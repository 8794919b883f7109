"""Output of functions that give Arrow: through Spark's stateful operator as bytes, and unpacked behind it.

Spark takes what a stateful function gives as pandas frames, pads them with rows of its own and makes Python objects of
every value: for a million rows that takes longer than an aggregation of them. Bytes it only copies. So tables leave
the operator as Arrow IPC streams, a few MiB each, in a binary column, and a `mapInArrow` in the same stage turns them
into rows. Both are on one machine, within one task; nothing is compressed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pandas as pd
import pyarrow as pa

from spark_state_ext.errors import CorruptFileError
from spark_state_ext.functions.tables import conformed
from spark_state_ext.spark.shuffle.payload import NUMBERS, OUTPUT_COLUMN, decode_output, encode_output

__all__ = ["OUTPUT_SCHEMA", "Outbox", "unpack"]

OUTPUT_SCHEMA = f"{OUTPUT_COLUMN} binary"
_PAYLOAD_BYTES = 4 << 20
# Payloads that Spark gets at once.
_FRAME_BYTES = 16 << 20
# Rows that Spark turns into its own at once, as it asks for by default.
_ROWS_MAX = 10_000


class Outbox:
    """Collects output, and hands it over in frames that Spark's operator passes on."""

    def __init__(self, fields: Sequence[pa.Field]) -> None:
        self._fields = tuple(fields)
        self._payloads: list[bytes] = []
        self._bytes = 0

    def add(self, table: Any) -> Iterator[pd.DataFrame]:
        """Take a table with the output's columns; yields frames that are due."""
        conform = conformed(table, self._fields, "the function gave")
        if not conform.num_rows:
            return
        rows = max(1, conform.num_rows * _PAYLOAD_BYTES // max(1, conform.nbytes))
        for at in range(0, conform.num_rows, rows):
            payload = encode_output(conform.slice(at, rows))
            self._payloads.append(payload)
            self._bytes += len(payload)
            if self._bytes >= _FRAME_BYTES:
                yield from self.rest()

    def rest(self) -> Iterator[pd.DataFrame]:
        """What is left."""
        if self._payloads:
            payloads, self._payloads, self._bytes = self._payloads, [], 0
            yield pd.DataFrame({OUTPUT_COLUMN: pd.Series(payloads, dtype=object)})


def unpack(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Body of the `mapInArrow` stage behind the operator."""
    for batch in batches:
        for payload in batch.column(0):
            if not payload.is_valid:
                raise CorruptFileError("output of the stateful operator arrived without its payload")
            data = payload.as_buffer()
            if data.slice(0, 1) == NUMBERS:
                continue
            for piece in decode_output(data):
                for at in range(0, piece.num_rows, _ROWS_MAX):
                    yield piece.slice(at, _ROWS_MAX)
