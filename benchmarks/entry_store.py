"""The alternative to sorted runs: one LMDB entry for each key, implemented as efficiently as we can.

Keys have 8 bytes and values 24; NumPy packs and unpacks them in bulk. A write passes all entries to LMDB in one call,
in key order; a read uses one cursor for all keys. As in the local store, nothing is synced to disk, because both are
caches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import cast

import lmdb
import numpy as np
import numpy.typing as npt

__all__ = ["VALUE", "EntryStore"]

# The state of one key: 24 bytes.
VALUE = np.dtype([("n", "<i8"), ("total", "<f8"), ("timeout_ms", "<i8")])
_KEY = np.dtype(">u8")


class EntryStore:
    """The state of many keys in one LMDB database.

    Parameters
    ----------
    folder
        Folder of the environment.
    map_bytes
        Size of LMDB's memory map, which is the maximum size of the database.
    """

    def __init__(self, folder: Path, map_bytes: int) -> None:
        folder.mkdir(parents=True)
        self._env = lmdb.open(str(folder), map_size=map_bytes, sync=False, metasync=False, readahead=False)

    def load(self, keys: npt.NDArray[np.uint64], values: npt.NDArray[np.void]) -> None:
        """Write rows, ascending by key, into the empty store."""
        with self._env.begin(write=True) as txn:
            txn.cursor().putmulti(_make_entries(keys, values), append=True)

    def put(self, keys: npt.NDArray[np.uint64], values: npt.NDArray[np.void]) -> None:
        """Insert or replace rows, ascending by key."""
        with self._env.begin(write=True) as txn:
            txn.cursor().putmulti(_make_entries(keys, values), dupdata=False)

    def get(self, keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.void]:
        """Return the values of keys as a `VALUE` array. All keys must exist; ascending keys are read fastest."""
        # Read key by key, because getmulti is no faster. Copy values: a memoryview costs more than to copy 24 bytes.
        with self._env.begin() as txn:
            get = txn.cursor().get
            # If a key does not exist, get returns None, and join raises a TypeError.
            data = b"".join(cast("Iterable[bytes]", map(get, _split(keys.astype(_KEY)))))
        return np.frombuffer(data, dtype=VALUE)

    def close(self) -> None:
        """Close the environment."""
        self._env.close()


def _make_entries(keys: npt.NDArray[np.uint64], values: npt.NDArray[np.void]) -> Iterator[tuple[bytes, bytes]]:
    return zip(_split(keys.astype(_KEY)), _split(values), strict=True)


def _split(array: npt.NDArray[np.generic]) -> list[bytes]:
    """Return the bytes of each element."""
    # A void view is the fastest way to make many small bytes objects, and it keeps trailing zeros.
    parts: list[bytes] = array.view(np.dtype((np.void, array.dtype.itemsize))).tolist()
    return parts
