"""The receipt of a scan: it finds a key in every kind of file, names nothing that is not there, and says what it did not see."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import lmdb
import pyarrow as pa
import pytest
from core_support import first_pointer
from life import Life

from arrow_schemas import OperatorFile
from arrow_schemas.lineage import DELTA, SNAPSHOT, CheckpointRef
from arrow_schemas.pointer import InlineDelta
from arrow_schemas.savepoint import NATIVE, SavedBucket, SavepointHeader, SavepointManifest
from spark_state_ext import Backend, erase_keys, erase_scan
from spark_state_ext.commit import cadence
from spark_state_ext.erasing.receipt import EraseReceipt
from spark_state_ext.erasing.search import Search, SearchedKeys
from spark_state_ext.errors import StateValueError, UsageError
from spark_state_ext.files.folder import Folder
from spark_state_ext.savepoints.captured_pointers import Captured
from spark_state_ext.savepoints.writer import write_manifest
from spark_state_ext.testing.model import Key, Row
from tests.helpers.erased_bytes import files_with

TEXT = "Jane Doe of Springfield"
JANE: Key = (TEXT, 1.0)
KEYS = {"name": [TEXT], "x": [1.0]}


def struct(**types: str) -> str:
    fields = [{"name": name, "type": kind, "nullable": True, "metadata": {}} for name, kind in types.items()]
    return json.dumps({"type": "struct", "fields": fields})


OPERATOR = OperatorFile("counts", "q", 8, struct(name="string", x="double"), struct(count="long", note="string"))


@pytest.fixture
def life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Life]:
    """A bucket of a query, whose root has what a root has."""
    monkeypatch.setattr(cadence, "DELTAS_MIN", 2)
    monkeypatch.setattr(cadence, "DELTAS_MAX", 3)
    made = Life(tmp_path, names=("root/counts/q",))
    Folder(str(tmp_path / "root" / "counts" / "q")).put("operator_0.json", OPERATOR.encode())
    yield made
    made.settle()
    for store in made.stores:
        store.close()


def scan(life: Life, keys: Any = None, **more: Any) -> EraseReceipt:
    return erase_scan(str(life.local / "root"), KEYS if keys is None else keys, operator="counts", **more)


def found(receipt: EraseReceipt) -> dict[str, tuple[int, int, int]]:
    """By name: rows, tombstones, keys by bytes."""
    return {Path(it.where).name: (it.rows, it.tombstones, it.keys_by_bytes) for it in receipt.found}


def test_every_checkpoint_file_with_the_key_is_found_and_no_other(life: Life) -> None:
    life.history(4)
    assert scan(life).absent
    life.batch({JANE: Row(1)})
    for _ in range(4):
        life.batch()
        life.settle()
    life.batch({JANE: None})
    life.settle()
    receipt = scan(life)
    root = life.local / "root"
    assert sorted(found(receipt)) == sorted(files_with(TEXT, root))
    kinds = {name.split(".")[1] for name in found(receipt)}
    assert kinds == {DELTA, SNAPSHOT}
    tombstones = {name: it for name, it in found(receipt).items() if it[1]}
    assert list(tombstones.values()) == [(1, 1, 1)]
    assert all(it == (1, 0, 1) for name, it in found(receipt).items() if name not in tombstones)
    (scanned,) = [it for it in receipt.scanned if it.kind == "checkpoint file"]
    files = list((root / "counts" / "q" / "3").iterdir())
    assert (scanned.files, scanned.size_bytes) == (len(files), sum(path.stat().st_size for path in files))
    assert scanned.rows > 10
    # Another key with the same text is another key: its rows are not, its bytes are.
    other = scan(life, {"name": [TEXT], "x": [2.0]})
    assert all(it[0] == 0 and it[2] == 1 for it in found(other).values())
    assert len(other.found) == len(receipt.found)


def test_keys_without_text_are_found_by_rows_and_the_receipt_says_so(life: Life) -> None:
    key: Key = ("ab", 77.0)
    life.history(2)
    life.batch({key: Row(1)})
    life.settle()
    receipt = scan(life, {"name": ["ab"], "x": [77.0]}, local_dirs=[str(life.local)])
    assert set(found(receipt).values()) == {(1, 0, 0)}
    assert receipt.keys_by_rows_only == 1
    assert any("no string of at least four bytes" in it.why for it in receipt.out_of_reach)


def test_requests_that_hold_a_key_are_found(life: Life) -> None:
    life.history(2)
    erase_keys(str(life.local / "root"), KEYS, operator="counts")
    receipt = scan(life)
    assert [(it.kind, Path(it.where).name) for it in receipt.found] == [("erase request", "00000001.keys.arrow")]


def test_other_files_and_those_that_are_not_finished(life: Life) -> None:
    life.history(2)
    folder = life.local / "root" / "counts" / "q"
    (folder / "note.txt").write_text(f"about {TEXT}, and so on")
    (folder / "3" / ".tmp-abc-1.delta.arrow").write_bytes(b"half of " + TEXT.encode())
    (folder / "spill" / "4-1").mkdir(parents=True)
    (folder / "spill" / "4-1" / "a.payloads").write_bytes(b"compressed")
    receipt = scan(life)
    assert {it.kind: it.keys_by_bytes for it in receipt.found} == {"other file": 1, "unfinished file": 1}
    beyond = {it.kind: (it.files, it.size_bytes) for it in receipt.out_of_reach}
    assert beyond["spill file"] == (1, 10)
    assert beyond["unfinished file"] == (1, 8 + len(TEXT))
    assert {"local store", "Spark's checkpoint"} <= set(beyond)


def test_a_damaged_file_is_searched_as_it_is_and_told(life: Life) -> None:
    life.batch({JANE: Row(1)})
    life.settle()
    (path,) = (life.local / "root").rglob("*.arrow")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    receipt = scan(life)
    (beyond,) = [it for it in receipt.out_of_reach if it.kind == "checkpoint file"]
    assert beyond.where == str(path)
    assert "fails its checksum" in beyond.why
    assert not receipt.absent
    # Whatever key it may have.
    other = scan(life, {"name": ["nobody at all"], "x": [2.0]})
    assert (other.found, other.absent) == ((), False)


def test_pages_of_local_stores_that_are_free_still_hold_the_key(life: Life, tmp_path: Path) -> None:
    """What LMDB does not use any more is searched as what it uses."""
    store = tmp_path / "disk" / "spark_state_ext-0" / f"{0:016x}-counts" / "q" / "s0" / "3"
    life.batch({JANE: Row(1, "x" * 5000)})
    life.batch({JANE: None})
    for _ in range(6):
        life.batch()
        life.settle()
    shutil.copytree(tmp_path / "store", store)
    receipt = scan(life, local_dirs=[str(tmp_path / "disk")])
    mine = [it for it in receipt.found if it.kind == "local store"]
    assert [Path(it.where).name for it in mine] == files_with(TEXT, store) == ["data.mdb"]
    (scanned,) = [it for it in receipt.scanned if it.kind == "local store"]
    locks = [path.stat().st_size for path in store.rglob("lock.mdb")]
    assert scanned.files == sum(path.is_file() for path in store.rglob("*")) - len(locks)
    (lock,) = [it for it in receipt.out_of_reach if "lock.mdb" in it.why]
    assert (lock.files, lock.size_bytes, lock.unread) == (len(locks), sum(locks), False)
    assert locks


def test_a_state_that_is_open_in_this_process_keeps_its_locks(life: Life, tmp_path: Path) -> None:
    """Closing any descriptor of a file drops the locks that the process has on it; then others take its readers away."""
    life.history(1)
    store = tmp_path / "disk" / "spark_state_ext-0" / f"{0:016x}-counts" / "q" / "s0" / "3" / "boot"
    store.mkdir(parents=True)
    # A file of that name that is none of LMDB's is read as any other.
    (store.parent / "lock.mdb").write_text(TEXT)
    look = f"import lmdb; it = lmdb.open({str(store)!r}, create=False); it.reader_check(); print(it.readers())"

    def is_reader() -> bool:
        """Whether another process finds that this one reads: where nobody has a lock, it makes the table anew."""
        found = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True).stdout
        return str(os.getpid()) in found

    with lmdb.open(str(store)) as environment:
        with environment.begin(write=True) as writing:
            writing.put(b"key", TEXT.encode())
        with environment.begin() as reading:
            assert is_reader()
            receipt = scan(life, local_dirs=[str(tmp_path / "disk")])
            assert is_reader()
            assert reading.get(b"key") == TEXT.encode()
    assert {Path(it.where).name for it in receipt.found} == {"data.mdb", "lock.mdb"}


def test_other_backends_and_sparks_checkpoint(life: Life, tmp_path: Path) -> None:
    life.batch({JANE: Row(1)})
    life.settle()
    shutil.copytree(tmp_path / "root", tmp_path / "second")
    shutil.rmtree(tmp_path / "root" / "counts" / "q" / "3")
    checkpoint = tmp_path / "checkpoint"
    for name, text in {"offsets/0": f"last {TEXT}", "state/0/0/1.delta": "lz4", "state/0/0/2.delta": "lz4"}.items():
        (checkpoint / name).parent.mkdir(parents=True, exist_ok=True)
        (checkpoint / name).write_text(text)
    receipt = scan(
        life,
        backends=[Backend(str(tmp_path / "second")), Backend(name="theirs", kind="sqlite")],
        checkpoint_location=str(checkpoint),
    )
    assert {(it.kind, Path(it.where).name) for it in receipt.found} == {
        ("checkpoint file", next((tmp_path / "second").rglob("*.arrow")).name),
        ("Spark's checkpoint", "0"),
    }
    beyond = {it.kind: (it.where, it.files, it.size_bytes) for it in receipt.out_of_reach}
    assert beyond["backend"] == ("theirs", 0, 0)
    assert beyond["Spark's checkpoint"] == (f"{checkpoint}/state/", 2, 6)


def test_deltas_in_pointers_of_a_savepoint_and_of_a_start(life: Life, tmp_path: Path) -> None:
    life.batch({JANE: Row(1)})
    life.settle()
    (path,) = (tmp_path / "root").rglob("*.arrow")
    ref = CheckpointRef(1, path.name.split("_")[1].split(".")[0])
    inline = InlineDelta(ref, path.read_bytes(), 1, 1)
    pointer = replace(first_pointer(), bucket=0, buckets=1, inline=(inline,))
    captured = Captured("counts", 1, (), "hold", 0, {0: pointer})
    Folder(str(tmp_path / "root" / "counts" / "starting")).put("1-plan.start.arrow", captured.encode())
    operator = replace(OPERATOR, buckets=1)
    header = SavepointHeader("ab" * 16, NATIVE, 1, {"counts": operator}, "0.1.0")
    saved = Folder(str(tmp_path / "savepoint"))
    write_manifest(saved, SavepointManifest(header, (SavedBucket("counts", 0, pointer, ()),)))
    saved.child("counts", "0").put(path.name, path.read_bytes())
    receipt = scan(life, savepoints=[str(tmp_path / "savepoint")])
    assert {it.kind: it.rows for it in receipt.found} == {
        "checkpoint file": 1,
        "start": 1,
        "savepoint manifest": 1,
        "savepoint file": 1,
    }
    shutil.rmtree(tmp_path / "savepoint" / "counts")
    (tmp_path / "savepoint" / "savepoint.arrow").unlink()
    with pytest.raises(UsageError, match="no savepoint"):
        scan(life, savepoints=[str(tmp_path / "savepoint")])


def test_values_across_pieces_and_keys_of_several_values() -> None:
    wanted = SearchedKeys.of(
        pa.record_batch({"a": ["Springfield", "Springfield", "x"], "b": [b"first", b"second", b"y"]})
    )
    assert (len(wanted.values), wanted.by_rows_only) == (3, 1)
    data = b"-" * ((8 << 20) - 3) + b"Springfield" + b"-" * 100 + b"second"
    search, stream = Search(wanted), io.BytesIO(data)

    def read(start: int, end: int) -> bytes:
        stream.seek(start)
        return stream.read(end - start)

    search.search_file(read, len(data))
    assert search.keys_by_bytes == 1


def test_values_in_nested_keys_are_searched_for() -> None:
    column = pa.array([{"names": ["Jane Doe", None]}, None, {"names": []}])
    wanted = SearchedKeys.of(pa.RecordBatch.from_arrays([column], names=["k"]))
    assert (wanted.values, wanted.needed, wanted.by_rows_only) == ((b"Jane Doe",), (frozenset({0}),), 2)


def test_the_receipt_is_a_table_and_names_no_key(life: Life) -> None:
    life.batch({JANE: Row(1)})
    life.settle()
    receipt = scan(life)
    table = receipt.to_table()
    assert set(table.column("verdict").to_pylist()) == {"found", "scanned", "out of reach"}
    assert table.num_rows == len(receipt.found) + len(receipt.scanned) + len(receipt.out_of_reach)
    assert TEXT not in str(table.to_pylist()) + repr(receipt)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"local_dirs": ["/nowhere/at/all"]}, "no folder /nowhere"),
        ({"savepoints": ["/nowhere/at/all"]}, "no savepoint at /nowhere"),
        ({"checkpoint_location": "/nowhere/at/all"}, "/nowhere.* does not exist or is empty"),
        ({"savepoints": ["here"]}, "absolute path"),
    ],
)
def test_folders_that_are_not_there_are_no_empty_receipt(life: Life, more: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        scan(life, **more)
    with pytest.raises(UsageError, match="more than 1,000 keys"):
        scan(life, {"name": ["x"] * 1001, "x": [1.0] * 1001})
    with pytest.raises(StateValueError):
        scan(life, ["x"])
