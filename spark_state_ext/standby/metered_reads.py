"""Reads files for a follower: counts bytes, limits the bandwidth, and reads each small file once."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import pyarrow as pa

from spark_state_ext.files.folder import Folder

__all__ = ["Bandwidth", "MeteredFiles", "Taken"]

# A file's header is read first. A file up to this size is then read whole, and kept until its rows are read.
_WHOLE_BYTES_MAX = 256 << 10
_PIECE_BYTES = 8 << 20


class Bandwidth:
    """A limit of bytes read per second: a token bucket that holds one second's bytes at most.

    A caller that takes more than there are waits until they have been refilled. So over time the limit holds, and one
    file, whatever its size, is never refused.
    """

    def __init__(
        self,
        max_bytes_s: float | None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._rate = max_bytes_s
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._tokens = max_bytes_s or 0.0
        self._at_s = clock()

    def take(self, size_bytes: int) -> None:
        """Wait until `size_bytes` bytes may be read."""
        if self._rate is None:
            return
        with self._lock:
            now_s = self._clock()
            self._tokens = min(self._rate, self._tokens + (now_s - self._at_s) * self._rate)
            self._at_s = now_s
            self._tokens -= size_bytes
            wait_s = -self._tokens / self._rate
        if wait_s > 0:
            self._sleep(wait_s)


@dataclass(frozen=True)
class Taken:
    """What was read.

    Parameters
    ----------
    files
        Files of which at least a part was read.
    size_bytes
        Bytes read.
    """

    files: int
    size_bytes: int


class MeteredFiles:
    """The files of a bucket's folder as of a listing, read through a meter."""

    def __init__(
        self,
        folder: Folder,
        sizes: Mapping[str, int],
        bandwidth: Bandwidth,
    ) -> None:
        self._folder = folder
        self._sizes = sizes
        self._bandwidth = bandwidth
        self._whole: dict[str, bytes] = {}
        self._read: set[str] = set()
        self._bytes = 0
        self._lock = threading.Lock()

    @property
    def taken(self) -> Taken:
        """What was read so far."""
        with self._lock:
            return Taken(len(self._read), self._bytes)

    def where(self, name: str) -> str:
        """Return a file's name for messages."""
        return self._folder.where(name)

    def size(self, name: str) -> int:
        """Return the size of a file, as listed."""
        return self._sizes[name] if name in self._sizes else self._folder.size(name)

    def get(self, name: str) -> bytes:
        """Return a whole file, and drop it if it was kept: a follower reads no file twice."""
        data = self._whole.pop(name, None)
        if data is not None:
            return data
        self._bandwidth.take(self.size(name))
        return self._count(name, self._folder.get(name))

    def get_range(self, name: str, start: int, end: int) -> bytes:
        """Return a part of a file."""
        data = self._whole.get(name)
        if data is None and self.size(name) <= _WHOLE_BYTES_MAX:
            data = self._whole[name] = self.get(name)
        if data is not None:
            return data[start:end]
        self._bandwidth.take(end - start)
        return self._count(name, self._folder.get_range(name, start, end))

    def get_file(self, name: str, local_path: str | os.PathLike[str]) -> None:
        """Copy a file to a local path, piece by piece; a failure to write there is an `OSError`."""
        size = self.size(name)
        with open(local_path, "wb") as copy:
            for offset in range(0, size, _PIECE_BYTES):
                copy.write(self.get_range(name, offset, min(offset + _PIECE_BYTES, size)))

    def open_local(self, name: str) -> pa.NativeFile | None:
        """Open a file in place and count it as read; None if it is not on a local disk."""
        file = self._folder.open_local(name)
        if file is not None:
            self._bandwidth.take(self.size(name))
            with self._lock:
                self._read.add(name)
                self._bytes += self.size(name)
        return file

    def _count(self, name: str, data: bytes) -> bytes:
        with self._lock:
            self._read.add(name)
            self._bytes += len(data)
        return data
