"""A digest of ordered rows: two sequences of rows have the same digest only if all their values are equal.

Each column, and each part of a nested column, is hashed separately: which values are NULL, the lengths of strings and
lists, and the bytes of the values. So the digest does not depend on batch boundaries or on the bytes under a NULL.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

__all__ = ["RowsDigest"]

_DIGEST_BYTES = 16


class RowsDigest:
    """Counts and hashes rows."""

    def __init__(self) -> None:
        self.rows = 0
        self._parts: dict[str, Any] = {}

    def add(self, batch: pa.RecordBatch) -> None:
        """Add the rows of a batch; all batches must have the same schema."""
        self.rows += batch.num_rows
        for index, column in enumerate(batch.columns):
            self._add_column(str(index), column)

    @property
    def value(self) -> str:
        """Digest of all rows so far: 32 hexadecimal digits."""
        digest = hashlib.blake2b(str(self.rows).encode(), digest_size=_DIGEST_BYTES)
        for name, part in sorted(self._parts.items()):
            digest.update(f" {name}={part.hexdigest()}".encode())
        return digest.hexdigest()

    def _add_column(self, name: str, column: pa.Array) -> None:
        types, kind = pa.types, column.type
        self._update(f"{name} valid", column.is_valid().to_numpy(zero_copy_only=False))
        if types.is_struct(kind):
            # `flatten` also applies the NULLs of the struct itself.
            for index, child in enumerate(column.flatten()):
                self._add_column(f"{name}.{index}", child)
        elif types.is_map(kind):
            self._add_column(f"{name} entries", column.cast(pa.list_(pa.struct([kind.key_field, kind.item_field]))))
        elif types.is_list(kind):
            lengths = pc.list_value_length(column).drop_null()
            self._update(f"{name} lengths", lengths.to_numpy(zero_copy_only=False))
            self._add_column(f"{name} elements", column.flatten())
        else:
            self._add_flat(name, column.drop_null())

    def _add_flat(self, name: str, values: pa.Array) -> None:
        types, kind = pa.types, values.type
        if not len(values):
            return
        if types.is_boolean(kind):
            self._update(name, values.to_numpy(zero_copy_only=False))
        elif types.is_string(kind) or types.is_binary(kind):
            _, offsets, data = values.buffers()
            bounds = np.frombuffer(offsets, dtype=np.int32)[values.offset :][: len(values) + 1]
            self._update(f"{name} lengths", np.diff(bounds))
            if data is not None:
                self._update(name, np.frombuffer(data, dtype=np.uint8)[bounds[0] : bounds[-1]])
        else:
            width = kind.bit_width // 8
            data_bytes = np.frombuffer(values.buffers()[1], dtype=np.uint8)
            self._update(name, data_bytes[values.offset * width :][: len(values) * width])

    def _update(self, name: str, values: np.ndarray[Any, Any]) -> None:
        part = self._parts.get(name)
        if part is None:
            part = self._parts[name] = hashlib.blake2b(digest_size=_DIGEST_BYTES)
        part.update(np.ascontiguousarray(values).data)
