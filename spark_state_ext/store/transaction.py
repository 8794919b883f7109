"""Access to an environment's databases within a transaction."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lmdb

__all__ = ["DATABASES", "Reader", "Writer"]

DATABASES = (b"meta", b"runs", b"chunks", b"pins", b"records")


class Reader:
    """A read transaction's view of the databases."""

    def __init__(self, txn: lmdb.Transaction, dbs: dict[bytes, Any]) -> None:
        self._txn = txn
        self._dbs = dbs

    def release(self) -> None:
        """Release the transaction object."""
        del self._txn

    def get(self, db: bytes, key: bytes) -> memoryview | None:
        """Return the value of a key, valid until the transaction ends; None if absent."""
        value = self._txn.get(key, db=self._dbs[db])
        return None if value is None else memoryview(value)

    def items(self, db: bytes, prefix: bytes = b"") -> Iterator[tuple[bytes, memoryview]]:
        """Yield all entries whose key begins with `prefix`, ascending."""
        with self._txn.cursor(db=self._dbs[db]) as cursor:
            if cursor.set_range(prefix) if prefix else cursor.first():
                for key, value in cursor:
                    if bytes(key[: len(prefix)]) != prefix:
                        return
                    yield bytes(key), memoryview(value)


class Writer(Reader):
    """A write transaction's view of the databases."""

    def put(self, db: bytes, key: bytes, value: bytes | memoryview) -> None:
        """Set a key."""
        self._txn.put(key, value, db=self._dbs[db])

    def delete(self, db: bytes, key: bytes) -> None:
        """Remove a key, if present."""
        self._txn.delete(key, db=self._dbs[db])

    def delete_prefix(self, db: bytes, prefix: bytes) -> None:
        """Remove all keys that begin with `prefix`."""
        for key in [key for key, _ in self.items(db, prefix)]:
            self._txn.delete(key, db=self._dbs[db])
