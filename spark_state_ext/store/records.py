"""Records: small values that processes of a machine leave for each other in a bucket's local store, table ``records``.

They are a cache like the rest of the store: correctness must not depend on a record.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping

from spark_state_ext.errors import CorruptStoreError
from spark_state_ext.store.entry_checksums import add_checksum, remove_checksum
from spark_state_ext.store.transaction import Reader, Writer

__all__ = ["read_all", "put", "remove"]

_TABLE = b"records"


def put(txn: Writer, records: Mapping[str, bytes]) -> None:
    """Write records, replacing existing ones of the same names."""
    for name, value in records.items():
        key = name.encode()
        txn.put(_TABLE, key, add_checksum(key, value))


def read_all(txn: Reader) -> dict[str, bytes]:
    """Return all records by name, except damaged ones."""
    records: dict[str, bytes] = {}
    for key, value in txn.items(_TABLE):
        with contextlib.suppress(CorruptStoreError):
            records[key.decode(errors="replace")] = remove_checksum(key, value)
    return records


def remove(txn: Writer, names: Iterable[str]) -> None:
    """Remove records, if they exist."""
    for name in names:
        txn.delete(_TABLE, name.encode())
