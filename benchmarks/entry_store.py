"""The alternative to sorted runs: one LMDB entry a key, made as well as it can be.

Keys are eight bytes, values 24, packed and unpacked in bulk by NumPy; reads and writes go in key order, many in one
call. Its environment has the same durability as ours: none, as it is a cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import cast

import lmdb
import numpy as np
import numpy.typing as npt

__all__ = ["VALUE", "EntryStore"]

# What a key's state is here: 24 bytes.
VALUE = np.dtype([("n", "<i8"), ("total", "<f8"), ("timeout_ms", "<i8")])
_KEY = np.dtype(">u8")


class EntryStore:
    """State of many keys in one LMDB database.

    Parameters
    ----------
    folder
        Folder of the environment.
    map_bytes
        Size of the map.
    """

    def __init__(self, folder: Path, map_bytes: int) -> None:
        folder.mkdir(parents=True)
        self._env = lmdb.open(str(folder), map_size=map_bytes, sync=False, metasync=False, readahead=False)

    def load(self, keys: npt.NDArray[np.uint64], values: npt.NDArray[np.void]) -> None:
        """Write the first rows, ascending by key."""
        with self._env.begin(write=True) as txn:
            txn.cursor().putmulti(_items(keys, values), append=True)

    def put(self, keys: npt.NDArray[np.uint64], values: npt.NDArray[np.void]) -> None:
        """Write rows, ascending by key."""
        with self._env.begin(write=True) as txn:
            txn.cursor().putmulti(_items(keys, values), dupdata=False)

    def get(self, keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.void]:
        """Values of keys that are all there, as a `VALUE` array; fastest when they ascend."""
        # One cursor, without buffers: getmulti is no faster, and a memoryview costs more than 24 copied bytes.
        with self._env.begin() as txn:
            get = txn.cursor().get
            # A key that is not there would be a TypeError here: None is no bytes.
            found = b"".join(cast("Iterable[bytes]", map(get, _split(keys.astype(_KEY)))))
        return np.frombuffer(found, dtype=VALUE)

    def close(self) -> None:
        """Close the environment."""
        self._env.close()


def _items(keys: npt.NDArray[np.uint64], values: npt.NDArray[np.void]) -> Iterator[tuple[bytes, bytes]]:
    return zip(_split(keys.astype(_KEY)), _split(values), strict=True)


def _split(array: npt.NDArray[np.generic]) -> list[bytes]:
    """Each element's bytes."""
    # A void view is the fastest way to many small bytes objects, and keeps trailing zeros.
    parts: list[bytes] = array.view(np.dtype((np.void, array.dtype.itemsize))).tolist()
    return parts
