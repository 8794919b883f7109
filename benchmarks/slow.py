"""A slow object store: a local disk on which every PUT is delayed or hangs for a while.

Executors create it by its name: `storage_options={"implementation": "benchmarks.slow.SlowStore", …}`.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Any

from fsspec.implementations.local import LocalFileSystem

__all__ = ["ObjectDisk", "SlowStore"]

_POLL_S = 0.01


class ObjectDisk(LocalFileSystem):  # type: ignore[misc] # fsspec has no types
    """A disk that behaves like an object store: a PUT is atomic, and folders need not be created."""

    # `spark_state_ext.files.folder` knows that PUTs to "memory" are atomic.
    protocol: str | tuple[str, ...] = ("objects", "memory")

    def pipe_file(self, path: str, value: bytes, **kwargs: Any) -> None:
        """Write a file with one PUT."""
        self._put(Path(path), value)

    def put_file(self, lpath: str, rpath: str, **kwargs: Any) -> None:
        """Copy a local file with one PUT."""
        self._put(Path(rpath), Path(lpath).read_bytes())

    def _put(self, path: Path, value: bytes) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        hidden = path.parent / f".tmp-{os.getpid()}-{time.monotonic_ns()}-{path.name}"
        hidden.write_bytes(value)
        hidden.rename(path)


class SlowStore(ObjectDisk):
    """A store whose PUTs are slow or hang.

    Parameters
    ----------
    put_ms
        Delay of every PUT in milliseconds.
    hangs_while
        Path of a file; while it exists, PUTs hang. The first PUT that hangs writes the time at which it began to hang,
        in seconds since 1970, to a file with the same path and ``.since`` appended.
    """

    protocol = ("slow", "memory")

    def __init__(self, put_ms: float = 0.0, hangs_while: str = "", **options: Any) -> None:
        super().__init__(**options)
        self._put_s = put_ms / 1000
        self._hangs_while = hangs_while

    def _put(self, path: Path, value: bytes) -> None:
        time.sleep(self._put_s)
        while self._hangs_while and os.path.exists(self._hangs_while):
            with contextlib.suppress(FileExistsError), open(f"{self._hangs_while}.since", "x") as file:
                file.write(str(time.time()))
            time.sleep(_POLL_S)
        super()._put(path, value)
