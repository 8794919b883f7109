"""Finds and removes the leftovers of an erasure that was killed: unfinished files, and a local folder with copies.

Both may have the keys. The next run removes them, so that its receipt can say `absent`.
"""

from __future__ import annotations

import logging
import os
import re
import stat
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from spark_state_ext.files.folder import Folder, is_temporary
from spark_state_ext.files.layout import HOLDS_FOLDER, SPILL_FOLDER
from spark_state_ext.worker.process import get_pid_namespace, get_start_ticks, is_running
from spark_state_ext.worker.removal import remove_tree

__all__ = ["scratch_with_keys", "list_unfinished"]

_LOGGER = logging.getLogger("spark_state_ext")
_PREFIX = "spark_state_ext-keys-"
_SCRATCH = re.compile(re.escape(_PREFIX) + r"(\d+)-(\d*)-(\d*)-.*")


def list_unfinished(places: Iterable[Folder]) -> list[tuple[Folder, str]]:
    """List the unfinished files of a query folder, each with its folder.

    Call this before taking the query's lease: a writer of such a file has finished it or is dead once the lease is
    taken. Spilled rows and holds are not listed, because other code removes them.
    """
    unfinished = []
    for place in places:
        for entry in place.tree():
            *folders, name = entry.name.split("/")
            if is_temporary(name) and folders[:1] not in ([SPILL_FOLDER], [HOLDS_FOLDER]):
                unfinished.append((place.child(*folders), name))
    return unfinished


@contextmanager
def scratch_with_keys() -> Iterator[Path]:
    """Make a temporary local folder for copies of files; first remove the folders of killed processes."""
    _remove_dead_folders()
    own = f"{_PREFIX}{os.getpid()}-{get_start_ticks(os.getpid())}-{_namespace()}-"
    with tempfile.TemporaryDirectory(prefix=own) as folder:
        yield Path(folder)


def _namespace() -> str:
    """Return the digits of this process's PID namespace."""
    return "".join(re.findall(r"\d+", get_pid_namespace()))


def _remove_dead_folders() -> None:
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        match = _SCRATCH.fullmatch(path.name)
        if match is None or match[3] != _namespace() or is_running(int(match[1]), match[2]):
            continue
        try:
            # The temporary folder is shared: skip links and other users' folders.
            stats = path.lstat()
            if stat.S_ISDIR(stats.st_mode) and stats.st_uid == os.getuid():
                remove_tree(path)
        except FileNotFoundError:
            continue  # another run removes it too
        except OSError as error:
            _LOGGER.warning("%s, which may have erased keys, is not removed: %s. Remove it by hand", path, error)
