"""Notes: small values that the processes of a machine leave each other in a bucket's local store, table ``notes``.

They are of use as long as they are there, like all of the store; nothing may depend on one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from spark_state_ext.store.environment import Reader, Writing

__all__ = ["every", "put", "remove"]

_TABLE = b"notes"


def put(txn: Writing, notes: Mapping[str, bytes]) -> None:
    """Leave notes, in the place of those of the same names."""
    for name, value in notes.items():
        txn.put(_TABLE, name.encode(), value)


def every(txn: Reader) -> dict[str, bytes]:
    """All notes."""
    return {name.decode(): bytes(value) for name, value in txn.items(_TABLE)}


def remove(txn: Writing, names: Iterable[str]) -> None:
    """Remove notes, where they are there."""
    for name in names:
        txn.delete(_TABLE, name.encode())
