"""The receipt of a scan: scanned files, files with keys, and what could not be searched. It names no key."""

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
    """The scanned files of one kind below one folder.

    Parameters
    ----------
    kind
        Kind of the files: ``"checkpoint file"``, ``"erase request"``, ``"local store"`` and so on.
    where
        The folder.
    files, size_bytes
        Number of files, and their bytes.
    rows
        Number of rows that were compared with the keys; 0 if only bytes were searched.
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
        Kind and path of the file.
    rows
        Number of rows of the keys, tombstones included.
    tombstones
        Number of these rows that are tombstones.
    keys_by_bytes
        Number of keys whose string and binary values of at least four bytes all occur in the file's bytes, possibly
        as a part of a longer value or in another key's state.
    """

    kind: str
    where: str
    rows: int
    tombstones: int
    keys_by_bytes: int


@dataclass(frozen=True)
class OutOfReach:
    """Something that could not be searched.

    Parameters
    ----------
    kind, where
        Its kind, and its place if that is known.
    files, size_bytes
        Number of files and their bytes, if known.
    why
        Why it could not be searched, and what happens to it.
    unread
        True if the scan was asked to search it and it may have keys: then the keys do not count as absent.
    """

    kind: str
    where: str
    files: int
    size_bytes: int
    why: str
    unread: bool = False


@dataclass(frozen=True)
class EraseReceipt:
    """The result of a scan for keys.

    Parameters
    ----------
    operator
        The operator.
    keys
        Number of keys that were searched for.
    keys_by_rows_only
        Number of keys without a string or binary value of at least four bytes: local stores and other files without
        rows cannot be searched for these.
    scanned_ms
        When the scan began, milliseconds since 1970.
    scanned, found, out_of_reach
        What was searched, which files have keys, and what could not be searched.
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
        """True if the scan read everything that it was asked to search, and found no key there.

        Other places and Spark's own state do not count; `out_of_reach` lists them.
        """
        return not self.found and not any(part.unread for part in self.out_of_reach)

    def to_table(self) -> pa.Table:
        """Return the receipt as a table with one row for each part.

        Returns
        -------
        pyarrow.Table
            Its column `verdict` is ``"found"``, ``"scanned"`` or ``"out of reach"``.

        Examples
        --------
        >>> EraseReceipt("count", 1, 0, 0, (), (), ()).to_table().num_rows
        0
        """
        found = [
            ("found", file.kind, file.where, 1, None, file.rows, file.tombstones, file.keys_by_bytes, None)
            for file in self.found
        ]
        scanned = [
            ("scanned", part.kind, part.where, part.files, part.size_bytes, part.rows, None, None, None)
            for part in self.scanned
        ]
        out_of_reach = [
            ("out of reach", part.kind, part.where, part.files, part.size_bytes, None, None, None, part.why)
            for part in self.out_of_reach
        ]
        names = _TABLE.names
        return pa.Table.from_pylist(
            [dict(zip(names, row, strict=True)) for row in (*found, *scanned, *out_of_reach)], schema=_TABLE
        )
