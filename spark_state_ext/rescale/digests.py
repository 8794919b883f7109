"""A digest of rows in their order: two sets of rows have the same only where every value of every row is the same.

Each column, and each part of a nested one, is hashed by itself: which values are NULL, how long texts and lists are,
and the bytes of what is there. So it does not matter how the rows were cut into batches, or what lies below a NULL.
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
    """Counts rows, and hashes them."""

    def __init__(self) -> None:
        self.rows = 0
        self._parts: dict[str, Any] = {}

    def add(self, batch: pa.RecordBatch) -> None:
        """Some more rows; all batches have one schema."""
        self.rows += batch.num_rows
        for at, column in enumerate(batch.columns):
            self._add(str(at), column)

    @property
    def value(self) -> str:
        """The digest of all rows so far: 32 hexadecimal digits."""
        found = hashlib.blake2b(str(self.rows).encode(), digest_size=_DIGEST_BYTES)
        for name, part in sorted(self._parts.items()):
            found.update(f" {name}={part.hexdigest()}".encode())
        return found.hexdigest()

    def _add(self, name: str, column: pa.Array) -> None:
        types, kind = pa.types, column.type
        self._update(f"{name} valid", column.is_valid().to_numpy(zero_copy_only=False))
        if types.is_struct(kind):
            # With the NULLs of the struct itself.
            for at, child in enumerate(column.flatten()):
                self._add(f"{name}.{at}", child)
        elif types.is_map(kind):
            self._add(f"{name} entries", column.cast(pa.list_(pa.struct([kind.key_field, kind.item_field]))))
        elif types.is_list(kind):
            lengths = pc.list_value_length(column).drop_null()
            self._update(f"{name} lengths", lengths.to_numpy(zero_copy_only=False))
            self._add(f"{name} elements", column.flatten())
        else:
            self._add_flat(name, column.drop_null())

    def _add_flat(self, name: str, there: pa.Array) -> None:
        types, kind = pa.types, there.type
        if not len(there):
            return
        if types.is_boolean(kind):
            self._update(name, there.to_numpy(zero_copy_only=False))
        elif types.is_string(kind) or types.is_binary(kind):
            _, offsets, data = there.buffers()
            bounds = np.frombuffer(offsets, dtype=np.int32)[there.offset :][: len(there) + 1]
            self._update(f"{name} lengths", np.diff(bounds))
            if data is not None:
                self._update(name, np.frombuffer(data, dtype=np.uint8)[bounds[0] : bounds[-1]])
        else:
            width = kind.bit_width // 8
            bytes_of = np.frombuffer(there.buffers()[1], dtype=np.uint8)
            self._update(name, bytes_of[there.offset * width :][: len(there) * width])

    def _update(self, name: str, values: np.ndarray[Any, Any]) -> None:
        part = self._parts.get(name)
        if part is None:
            part = self._parts[name] = hashlib.blake2b(digest_size=_DIGEST_BYTES)
        part.update(np.ascontiguousarray(values).data)
