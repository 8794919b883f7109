"""A process that restores a bucket: ``python restoring_job.py FOLDER``; FOLDER has a pointer and its files."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from core_support import WRITER
from stalling_disk import STORE

from arrow_schemas import Pointer
from spark_state_ext.backends.files import sole_replica
from spark_state_ext.commit.context import CommitContext
from spark_state_ext.engine.bucket import Bucket
from spark_state_ext.files.folder import Folder
from spark_state_ext.store import LocalStore
from spark_state_ext.testing.model import SCHEMA, scan


def main(folder: Path) -> None:
    """Restore from a store whose every request takes ten minutes."""
    # Exit by an exception, as services do.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
    options = {"implementation": STORE, "log": str(folder / "asked"), "takes_s": 600.0}
    files = Folder(str(folder / "a"), options).child("3")
    store = LocalStore.at(folder / "empty", SCHEMA)
    pointer = Pointer.decode((folder / "pointer").read_bytes())
    Bucket(store, sole_replica(files, folder, "a"), pointer, WRITER, CommitContext(folder)).read(scan)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
