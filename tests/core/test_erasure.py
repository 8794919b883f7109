"""Removed keys: after how many batches no checkpoint file holds them, and how a new root never gets to hold them.

The numbers are those of `docs/operating.md`, under "Erasing".
"""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa
import pytest
from core_support import KEYS, SCHEMA, Changes, Key, Row, canonical
from life import RETAINED, Life

from arrow_schemas.lineage import parse_file_name
from spark_state_ext import lineage as lineage_module
from spark_state_ext.backends import CleanUp
from spark_state_ext.checkpoint import read_checkpoint
from spark_state_ext.commit import is_complete
from spark_state_ext.folder import Readable
from spark_state_ext.sealed import SealedFile, SealedFiles

ERASED: Key = ("Jane Doe", 1.0)
DELTAS_MAX = 5


@pytest.fixture(autouse=True)
def _few_deltas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lineage_module, "DELTAS_MIN", 2)
    monkeypatch.setattr(lineage_module, "DELTAS_MAX", DELTAS_MAX)


def _holds(life: Life, files: Readable, names: Iterable[str]) -> list[str]:
    """Which of these files have a row of the key, one that removes it included."""
    found = []
    for name in names:
        parsed = parse_file_name(name)
        assert parsed is not None
        read = read_checkpoint(files, *parsed, SCHEMA, life.local)
        rows = [row for batch in read.batches for row in pa.Table.from_batches([batch]).to_pylist()]
        if any(canonical((row["key.name"], row["key.x"])) == canonical(ERASED) for row in rows):
            found.append(name)
    return found


def _in_files(life: Life, name: str) -> list[str]:
    return _holds(life, life.folder(name), life.folder(name).names())


def _in_pointer(life: Life) -> list[str]:
    sealed = [SealedFile.of(delta.name, delta.data) for delta in life.pointers[-1].inline]
    return _holds(life, SealedFiles(sealed, "inline"), [file.name for file in sealed])


def _removed(life: Life) -> None:
    """A key came, lived through some snapshots, and was removed."""
    life.batch({ERASED: Row(1, "here")})
    for _ in range(3 * DELTAS_MAX):
        life.batch()
        life.settle()
    life.batch({ERASED: None})
    life.settle()
    assert _in_files(life, "a")


def _clean(life: Life) -> None:
    """At each batch; in a job the bucket's turn comes with every (*R* / 4)th, and at least every tenth."""
    pointer = life.pointers[-1]
    through = pointer.standings["a"].through
    assert through is not None
    life.manager("a").clean_up(CleanUp(pointer, through, RETAINED, lambda: None)).result(30)


@pytest.mark.parametrize(
    ("changes", "beats"),
    [
        pytest.param({KEYS[0]: Row(7)}, 2 * (DELTAS_MAX + 1) + 3 * RETAINED + 3, id="changed in every batch"),
        pytest.param({}, 2 * (DELTAS_MAX + 1) * (RETAINED + 1) + 3 * RETAINED + 3, id="never changed again"),
    ],
)
def test_no_file_holds_a_removed_key_after_so_many_batches(life: Life, changes: Changes, beats: int) -> None:
    _removed(life)
    for _ in range(beats):
        life.batch(changes)
        life.settle()
        _clean(life)
    assert _in_files(life, "a") == []
    assert _in_pointer(life) == []
    assert life.restored(life.pointers[-1]) == life.models[-1]


def test_files_of_a_quiet_stream_stay(life: Life) -> None:
    """Why there is no bound in time: only batches count, as Spark may hand out the pointers of the last ones."""
    _removed(life)
    for _ in range(3):
        _clean(life)
    assert _in_files(life, "a")


def test_a_root_that_is_added_after_a_removal_never_holds_the_key(life: Life) -> None:
    _removed(life)
    life.names = ("a", "b")
    for batches in range(4):
        if is_complete(life.pointers[-1].standings.get("b")):
            break
        life.batch({KEYS[0]: Row(batches)})
        life.settle()
    assert is_complete(life.pointers[-1].standings["b"])
    life.names = ("b",)
    for _ in range(2):
        life.batch()
        life.settle()
    assert life.folder("b").names()
    assert _in_files(life, "b") == []
    assert _in_pointer(life) == []
    # Without the old root, and without the local store.
    for name in life.folder("a").names():
        life.folder("a").remove(name)
    assert life.restored(life.pointers[-1]) == life.models[-1]
