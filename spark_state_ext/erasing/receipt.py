"""The receipt of a scan: what was looked at, where keys were found, and what is out of reach. It names no key."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

__all__ = ["EraseReceipt", "FoundIn", "OutOfReach", "Scanned"]

_TABLE = pa.schema(
    [
        ("verdict", pa.string()),
        ("kind", pa.string()),
        ("where", pa.string()),
        ("files", pa.int64()),
        ("size_bytes", pa.int64()),
        ("rows", pa.int64()),
        ("tombstones", pa.int64()),
        ("keys_by_bytes", pa.int64()),
        ("why", pa.string()),
    ]
)


@dataclass(frozen=True)
class Scanned:
    """What was looked at, of one kind below one folder.

    Parameters
    ----------
    kind
        What it is: ``"checkpoint file"``, ``"erase request"``, ``"local store"`` and so on.
    where
        The folder.
    files, size_bytes
        How many files, and their bytes.
    rows
        Rows that were compared with the keys; 0 where only bytes were searched.
    """

    kind: str
    where: str
    files: int
    size_bytes: int
    rows: int


@dataclass(frozen=True)
class FoundIn:
    """A file that has some of the keys.

    Parameters
    ----------
    kind, where
        What it is, and its path.
    rows
        Rows of the keys, tombstones included.
    tombstones
        How many of them only say that a key was removed.
    keys_by_bytes
        Keys of which all text and binary values of four bytes and more are in it, anywhere: also as a part of a longer
        value, or in another key's state.
    """

    kind: str
    where: str
    rows: int
    tombstones: int
    keys_by_bytes: int


@dataclass(frozen=True)
class OutOfReach:
    """What could not be looked at.

    Parameters
    ----------
    kind, where
        What it is, and where it lies as far as that is known.
    files, size_bytes
        How much of it there is, as far as that is known.
    why
        Why it could not be looked at, and what becomes of it.
    unread
        Whether it is something named to the scan that may hold keys: while there is such a thing, no key is absent.
    """

    kind: str
    where: str
    files: int
    size_bytes: int
    why: str
    unread: bool = False


@dataclass(frozen=True)
class EraseReceipt:
    """What holds some keys, as far as a scan can tell.

    Parameters
    ----------
    operator
        The operator.
    keys
        How many keys were looked for.
    keys_by_rows_only
        How many of them have no text or binary value of four bytes and more: local stores and other files that have no
        rows cannot be searched for these.
    scanned_ms
        When the scan began, milliseconds since 1970.
    scanned, found, out_of_reach
        What was looked at, what has keys, what could not be looked at.
    """

    operator: str
    keys: int
    keys_by_rows_only: int
    scanned_ms: int
    scanned: tuple[Scanned, ...]
    found: tuple[FoundIn, ...]
    out_of_reach: tuple[OutOfReach, ...]

    @property
    def absent(self) -> bool:
        """Whether nothing has any of the keys that lies where the scan was told to look, and all there was read.

        Places that it was not told of, and Spark's own state, do not count: `out_of_reach` names them.
        """
        return not self.found and not any(it.unread for it in self.out_of_reach)

    def to_table(self) -> pa.Table:
        """All of it, one row a part.

        Returns
        -------
        pyarrow.Table
            With `verdict` one of ``"found"``, ``"scanned"`` and ``"out of reach"``.

        Examples
        --------
        >>> EraseReceipt("count", 1, 0, 0, (), (), ()).to_table().num_rows
        0
        """
        found = [
            ("found", it.kind, it.where, 1, None, it.rows, it.tombstones, it.keys_by_bytes, None) for it in self.found
        ]
        scanned = [
            ("scanned", it.kind, it.where, it.files, it.size_bytes, it.rows, None, None, None) for it in self.scanned
        ]
        beyond = [
            ("out of reach", it.kind, it.where, it.files, it.size_bytes, None, None, None, it.why)
            for it in self.out_of_reach
        ]
        names = _TABLE.names
        return pa.Table.from_pylist(
            [dict(zip(names, row, strict=True)) for row in (*found, *scanned, *beyond)], schema=_TABLE
        )
