"""What a run that erases keys leaves where it is killed: unfinished files, and a local folder with copies of files.

Both may hold the keys. So the next run removes them, and its receipt says `absent` then.
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
from spark_state_ext.worker.process import is_running, namespace, start_of
from spark_state_ext.worker.removal import remove_tree

__all__ = ["scratch_with_keys", "unfinished_files"]

_LOGGER = logging.getLogger("spark_state_ext")
_PREFIX = "spark_state_ext-keys-"
_SCRATCH = re.compile(re.escape(_PREFIX) + r"(\d+)-(\d*)-(\d*)-.*")


def unfinished_files(places: Iterable[Folder]) -> list[tuple[Folder, str]]:
    """Files of a query folder that were not finished, each with its folder.

    Called before the query's lease is taken. Whoever still writes one of them then has finished it, or is dead, once
    the lease is held. Spilled rows and holds are others' to remove.
    """
    found = []
    for place in places:
        for entry in place.tree():
            *folders, name = entry.name.split("/")
            if is_temporary(name) and folders[:1] not in ([SPILL_FOLDER], [HOLDS_FOLDER]):
                found.append((place.child(*folders), name))
    return found


@contextmanager
def scratch_with_keys() -> Iterator[Path]:
    """A local folder for copies of files, for a while. It removes those of processes that were killed."""
    _remove_dead()
    own = f"{_PREFIX}{os.getpid()}-{start_of(os.getpid())}-{_namespace()}-"
    with tempfile.TemporaryDirectory(prefix=own) as folder:
        yield Path(folder)


def _namespace() -> str:
    """Digits of the container in which the numbers of processes count."""
    return "".join(re.findall(r"\d+", namespace()))


def _remove_dead() -> None:
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        match = _SCRATCH.fullmatch(path.name)
        if match is None or match[3] != _namespace() or is_running(int(match[1]), match[2]):
            continue
        try:
            # Temporary folders are shared: neither another user's nor what a link leads to.
            found = path.lstat()
            if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid():
                remove_tree(path)
        except FileNotFoundError:
            continue  # another run removes it too
        except OSError as error:
            _LOGGER.warning("%s, which may hold erased keys, is not removed: %s. Remove it by hand", path, error)
