"""A slow object store: a local disk on which every PUT takes its time, or does not end for a while.

For `storage_options={"implementation": "benchmarks.slow.SlowStore", …}`, so that executors make it by name.
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
    """A disk under an object store's rules: a PUT is atomic, and there are no folders to make."""

    # The second one is known for atomic PUTs.
    protocol: str | tuple[str, ...] = ("objects", "memory")

    def pipe_file(self, path: str, value: bytes, **kwargs: Any) -> None:
        """One PUT."""
        self._put(Path(path), value)

    def put_file(self, lpath: str, rpath: str, **kwargs: Any) -> None:
        """One PUT of a file."""
        self._put(Path(rpath), Path(lpath).read_bytes())

    def _put(self, path: Path, value: bytes) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        hidden = path.parent / f".tmp-{os.getpid()}-{time.monotonic_ns()}-{path.name}"
        hidden.write_bytes(value)
        hidden.rename(path)


class SlowStore(ObjectDisk):
    """A store that takes its time.

    Parameters
    ----------
    put_ms
        What is added to every PUT, milliseconds.
    hangs_while
        While this file is there, PUTs do not end. A file beside it, with ``.since`` after its name, tells since when:
        seconds since 1970.
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
