"""After damage to any page of a local store's file, the next call has the right state, from the checkpoint files.

The calls run in a child process, so that a crash of LMDB only fails the test. Run as a script, this file is the child.
"""

from __future__ import annotations

import logging
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import lmdb
import pytest
from core_support import committed, first_pointer, state_at

from arrow_schemas import Pointer
from spark_state_ext.errors import CorruptStoreError, StorageError, StoreFullError
from spark_state_ext.files.folder import Folder
from spark_state_ext.store import LocalStore
from spark_state_ext.store.local_disk import storage_error
from spark_state_ext.testing.model import KEYS, SCHEMA, Changes, Model, Row, apply_changes
from tests.helpers.soak import examples
from tests.helpers.waiting import WAIT_S

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_HEADER_BYTES = 16
_BATCHES = 12
_CHANGES: Changes = {KEYS[1]: Row(100), KEYS[2]: None}


def _zero_header_bytes(page: bytes, choice: random.Random) -> bytes:
    return bytes(_HEADER_BYTES) + page[_HEADER_BYTES:]


def _fill_with_ones(page: bytes, choice: random.Random) -> bytes:
    return b"\xff" * len(page)


def _randomise_header(page: bytes, choice: random.Random) -> bytes:
    return choice.randbytes(_HEADER_BYTES) + page[_HEADER_BYTES:]


def _randomise_page(page: bytes, choice: random.Random) -> bytes:
    return choice.randbytes(len(page))


_DAMAGES: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "zero header": _zero_header_bytes,
    "all ones": _fill_with_ones,
    "random header": _randomise_header,
    "random page": _randomise_page,
}


def _damage_page(path: Path, page: int, damage: str, seed: int = 0) -> None:
    with path.open("r+b") as file:
        file.seek(page * _PAGE_BYTES)
        data = file.read(_PAGE_BYTES)
        file.seek(page * _PAGE_BYTES)
        file.write(_DAMAGES[damage](data, random.Random(f"{page} {seed}")))


class _Job:
    """A bucket after some batches; damages copies of its local store."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.files = folder, Folder(str(folder / "root"))
        (folder / "scratch").mkdir()
        self.pointer = first_pointer()
        self.model: Model = {}
        store = self.open("seed")
        for number in range(_BATCHES):
            changes: Changes = {KEYS[number % 9]: Row(number, "x" * 500), KEYS[(number + 4) % 9]: Row(-number)}
            self.pointer = self.commit(store, self.pointer, changes)
            self.model = apply_changes(self.model, changes)
        store.close()
        self.pages = self.data_file("seed").stat().st_size // _PAGE_BYTES

    def open(self, name: str) -> LocalStore:
        return LocalStore.at(self.folder / name, SCHEMA, chunk_rows=4)

    def commit(self, store: LocalStore, pointer: Pointer, changes: Changes) -> Pointer:
        return committed(store, self.files, pointer, changes, self.folder / "scratch")

    def data_file(self, name: str) -> Path:
        (path,) = (self.folder / name).glob("*/data.mdb")
        return path

    def find_failure(self, page: int, damage: str, seed: int, is_open: bool) -> str:
        """Return what the next call gave instead of the right state; empty if its state is right."""
        # Each case has its own name, because a store that cannot be opened may stay open in this process.
        name = f"{page} {damage} {seed} {is_open}"
        shutil.copytree(self.folder / "seed", self.folder / name)
        store = self.open(name) if is_open else None
        _damage_page(self.data_file(name), page, damage, seed)
        try:
            store = store or self.open(name)
            pointer = self.commit(store, self.pointer, _CHANGES)
            state: Model = state_at(store, self.files, pointer, self.folder / "scratch")
        except Exception as error:
            return repr(error)
        finally:
            if store is not None:
                store.close()
            shutil.rmtree(self.folder / name)
        return "" if state == apply_changes(self.model, _CHANGES) else "another state"


def _list_cases(pages: int, seeds: int) -> Iterator[tuple[int, str, int, bool]]:
    """Yield the page, the damage, a seed, and whether the store is open when the damage happens.

    LMDB reads the first two pages only while it opens the file.
    """
    for page in range(pages):
        yield page, "all ones", 0, False
        if page > 1:
            yield page, "zero header", 0, True
        for damage in _DAMAGES if seeds else ():
            for seed in range(seeds if damage.startswith("random") else 1):
                yield page, damage, seed, False
                if page > 1:
                    yield page, damage, seed, True


def _find_failures(seeds: int) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        job = _Job(Path(folder))
        yield f"{job.pages} pages"
        for case in _list_cases(job.pages, seeds):
            print(case, file=sys.stderr, flush=True)
            failure = job.find_failure(*case)
            if failure:
                yield f"{case}: {failure}"


def test_a_call_repairs_a_local_store_with_any_damaged_page() -> None:
    done = subprocess.run(
        [sys.executable, __file__, str(examples(0, 20))],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    pages, *failures = done.stdout.splitlines() or [""]
    assert done.returncode == 0, f"the process ended at {done.stderr[-1000:]}"
    assert failures == []
    assert int(pages.split()[0]) > 20, "the tables have more than one page"


@pytest.mark.parametrize(
    ("error", "kind", "advice"),
    [
        (lmdb.BadTxnError("mdb_get: MDB_BAD_TXN: Transaction must abort"), CorruptStoreError, "is damaged"),
        (lmdb.CursorFullError("MDB_CURSOR_FULL: Internal error"), CorruptStoreError, "is damaged"),
        (
            lmdb.DiskError("mdb_put: No space left on device"),
            StoreFullError,
            "Make room, or set local_dir to another disk",
        ),
        (OSError(122, "Disk quota exceeded"), StoreFullError, "Make room, or set local_dir to another disk"),
        (lmdb.ReadersFullError("MDB_READERS_FULL: Environment maxreaders"), StorageError, "remove this folder"),
        (lmdb.ReadonlyError("mdb_put: Permission denied"), StorageError, "to a writable local disk"),
    ],
)
def test_an_error_of_the_local_disk_gives_matching_advice(
    error: Exception, kind: type[Exception], advice: str, tmp_path: Path
) -> None:
    translated = storage_error(tmp_path, error)
    assert type(translated) is kind
    assert advice in str(translated)


if __name__ == "__main__":
    # If LMDB crashes, the last line of stderr names the case.
    logging.disable()
    for line in _find_failures(int(sys.argv[1])):
        print(line, flush=True)
