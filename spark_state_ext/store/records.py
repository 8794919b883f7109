"""Records: small values that the processes of a machine leave each other in a bucket's local store, table ``records``.

They are of use as long as they are there, like all of the store; nothing may depend on one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping

from spark_state_ext.errors import CorruptStoreError
from spark_state_ext.store.checked import checked, opened
from spark_state_ext.store.transaction import Reader, Writing

__all__ = ["every", "put", "remove"]

_TABLE = b"records"


def put(txn: Writing, records: Mapping[str, bytes]) -> None:
    """Leave records, in the place of those of the same names."""
    for name, value in records.items():
        key = name.encode()
        txn.put(_TABLE, key, checked(key, value))


def every(txn: Reader) -> dict[str, bytes]:
    """All records; a damaged one is as good as none."""
    found: dict[str, bytes] = {}
    for key, value in txn.items(_TABLE):
        with contextlib.suppress(CorruptStoreError):
            found[key.decode(errors="replace")] = opened(key, value)
    return found


def remove(txn: Writing, names: Iterable[str]) -> None:
    """Remove records, where they are there."""
    for name in names:
        txn.delete(_TABLE, name.encode())
