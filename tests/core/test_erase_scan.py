"""The receipt of a scan: it reports each kind of file that has a key, no other file, and what was not searched."""

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
from spark_state_ext.commit.cadence import SnapshotCadence
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


def make_schema_json(**types: str) -> str:
    fields = [{"name": name, "type": kind, "nullable": True, "metadata": {}} for name, kind in types.items()]
    return json.dumps({"type": "struct", "fields": fields})


OPERATOR = OperatorFile(
    "counts", "q", 8, make_schema_json(name="string", x="double"), make_schema_json(count="long", note="string")
)


@pytest.fixture
def life(tmp_path: Path) -> Iterator[Life]:
    """Make a bucket of a query whose root has an operator file."""
    life = Life(tmp_path, names=("root/counts/q",), cadence=SnapshotCadence(2, 3))
    Folder(str(tmp_path / "root" / "counts" / "q")).put("operator_0.json", OPERATOR.encode())
    yield life
    life.settle()
    for store in life.stores:
        store.close()


def scan(life: Life, keys: Any = None, **more: Any) -> EraseReceipt:
    return erase_scan(str(life.local / "root"), KEYS if keys is None else keys, operator="counts", **more)


def count_by_name(receipt: EraseReceipt) -> dict[str, tuple[int, int, int]]:
    """Return rows, tombstones and keys by bytes of each file that has a key, by file name."""
    return {Path(match.where).name: (match.rows, match.tombstones, match.keys_by_bytes) for match in receipt.found}


def test_exactly_the_checkpoint_files_with_the_key_are_reported(life: Life) -> None:
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
    assert sorted(count_by_name(receipt)) == sorted(files_with(TEXT, root))
    kinds = {name.split(".")[1] for name in count_by_name(receipt)}
    assert kinds == {DELTA, SNAPSHOT}
    tombstones = {name: counts for name, counts in count_by_name(receipt).items() if counts[1]}
    assert list(tombstones.values()) == [(1, 1, 1)]
    assert all(counts == (1, 0, 1) for name, counts in count_by_name(receipt).items() if name not in tombstones)
    (scanned,) = [files for files in receipt.scanned if files.kind == "checkpoint file"]
    files = list((root / "counts" / "q" / "3").iterdir())
    assert (scanned.files, scanned.size_bytes) == (len(files), sum(path.stat().st_size for path in files))
    assert scanned.rows > 10
    # Another key with the same text has no rows in the files, but its bytes are found.
    other = scan(life, {"name": [TEXT], "x": [2.0]})
    assert all(rows == 0 and keys == 1 for rows, _, keys in count_by_name(other).values())
    assert len(other.found) == len(receipt.found)


def test_keys_without_a_long_text_are_found_by_rows_only_and_the_receipt_says_so(life: Life) -> None:
    key: Key = ("ab", 77.0)
    life.history(2)
    life.batch({key: Row(1)})
    life.settle()
    receipt = scan(life, {"name": ["ab"], "x": [77.0]}, local_dirs=[str(life.local)])
    assert set(count_by_name(receipt).values()) == {(1, 0, 0)}
    assert receipt.keys_by_rows_only == 1
    assert any("no string of at least four bytes" in place.why for place in receipt.out_of_reach)


def test_erase_requests_that_hold_a_key_are_reported(life: Life) -> None:
    life.history(2)
    erase_keys(str(life.local / "root"), KEYS, operator="counts")
    receipt = scan(life)
    assert [(match.kind, Path(match.where).name) for match in receipt.found] == [
        ("erase request", "00000001.keys.arrow")
    ]


def test_other_and_unfinished_files_are_searched_and_spill_files_are_out_of_reach(life: Life) -> None:
    life.history(2)
    folder = life.local / "root" / "counts" / "q"
    (folder / "note.txt").write_text(f"about {TEXT}, and so on")
    (folder / "3" / ".tmp-abc-1.delta.arrow").write_bytes(b"half of " + TEXT.encode())
    (folder / "spill" / "4-1").mkdir(parents=True)
    (folder / "spill" / "4-1" / "a.payloads").write_bytes(b"compressed")
    receipt = scan(life)
    assert {match.kind: match.keys_by_bytes for match in receipt.found} == {"other file": 1, "unfinished file": 1}
    out_of_reach = {place.kind: (place.files, place.size_bytes) for place in receipt.out_of_reach}
    assert out_of_reach["spill file"] == (1, 10)
    assert out_of_reach["unfinished file"] == (1, 8 + len(TEXT))
    assert {"local store", "Spark's checkpoint"} <= set(out_of_reach)


def test_a_damaged_file_is_searched_by_bytes_and_reported_as_out_of_reach(life: Life) -> None:
    life.batch({JANE: Row(1)})
    life.settle()
    (path,) = (life.local / "root").rglob("*.arrow")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    receipt = scan(life)
    (out_of_reach,) = [place for place in receipt.out_of_reach if place.kind == "checkpoint file"]
    assert out_of_reach.where == str(path)
    assert "fails its checksum" in out_of_reach.why
    assert not receipt.absent
    # No key can be reported as absent, because any key may be in the damaged file.
    other = scan(life, {"name": ["nobody at all"], "x": [2.0]})
    assert (other.found, other.absent) == ((), False)


def test_a_key_in_free_pages_of_a_local_store_is_reported(life: Life, tmp_path: Path) -> None:
    """Pages that LMDB no longer uses are searched like the pages that it uses."""
    store = tmp_path / "disk" / "spark_state_ext-0" / f"{0:016x}-counts" / "q" / "s0" / "3"
    life.batch({JANE: Row(1, "x" * 5000)})
    life.batch({JANE: None})
    for _ in range(6):
        life.batch()
        life.settle()
    shutil.copytree(tmp_path / "store", store)
    receipt = scan(life, local_dirs=[str(tmp_path / "disk")])
    matches = [match for match in receipt.found if match.kind == "local store"]
    assert [Path(match.where).name for match in matches] == files_with(TEXT, store) == ["data.mdb"]
    (scanned,) = [files for files in receipt.scanned if files.kind == "local store"]
    locks = [path.stat().st_size for path in store.rglob("lock.mdb")]
    assert scanned.files == sum(path.is_file() for path in store.rglob("*")) - len(locks)
    (lock,) = [place for place in receipt.out_of_reach if "lock.mdb" in place.why]
    assert (lock.files, lock.size_bytes, lock.unread) == (len(locks), sum(locks), False)
    assert locks


def test_a_scan_keeps_the_locks_of_a_store_that_is_open_in_its_process(life: Life, tmp_path: Path) -> None:
    """Closing any descriptor of a file drops the process's locks on it; then other processes remove its readers."""
    life.history(1)
    store = tmp_path / "disk" / "spark_state_ext-0" / f"{0:016x}-counts" / "q" / "s0" / "3" / "boot"
    store.mkdir(parents=True)
    # A file with the name of LMDB's lock file that is not LMDB's is read like any other file.
    (store.parent / "lock.mdb").write_text(TEXT)
    script = f"import lmdb; env = lmdb.open({str(store)!r}, create=False); env.reader_check(); print(env.readers())"

    def is_reader() -> bool:
        """Return whether another process lists this one as a reader; without locks, it would empty the table."""
        readers = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
        return str(os.getpid()) in readers

    with lmdb.open(str(store)) as environment:
        with environment.begin(write=True) as writing:
            writing.put(b"key", TEXT.encode())
        with environment.begin() as reading:
            assert is_reader()
            receipt = scan(life, local_dirs=[str(tmp_path / "disk")])
            assert is_reader()
            assert reading.get(b"key") == TEXT.encode()
    assert {Path(match.where).name for match in receipt.found} == {"data.mdb", "lock.mdb"}


def test_other_backends_and_sparks_checkpoint_are_searched(life: Life, tmp_path: Path) -> None:
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
    assert {(match.kind, Path(match.where).name) for match in receipt.found} == {
        ("checkpoint file", next((tmp_path / "second").rglob("*.arrow")).name),
        ("Spark's checkpoint", "0"),
    }
    out_of_reach = {place.kind: (place.where, place.files, place.size_bytes) for place in receipt.out_of_reach}
    assert out_of_reach["backend"] == ("theirs", 0, 0)
    assert out_of_reach["Spark's checkpoint"] == (f"{checkpoint}/state/", 2, 6)


def test_deltas_inline_in_pointers_of_savepoints_and_starts_are_searched(life: Life, tmp_path: Path) -> None:
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
    assert {match.kind: match.rows for match in receipt.found} == {
        "checkpoint file": 1,
        "start": 1,
        "savepoint manifest": 1,
        "savepoint file": 1,
    }
    shutil.rmtree(tmp_path / "savepoint" / "counts")
    (tmp_path / "savepoint" / "savepoint.arrow").unlink()
    with pytest.raises(UsageError, match="no savepoint"):
        scan(life, savepoints=[str(tmp_path / "savepoint")])


def test_values_are_found_across_read_boundaries_and_keys_need_all_their_values() -> None:
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


def test_the_receipt_can_be_a_table_and_names_no_key(life: Life) -> None:
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
def test_missing_folders_and_invalid_keys_are_refused(life: Life, more: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        scan(life, **more)
    with pytest.raises(UsageError, match="more than 1,000 keys"):
        scan(life, {"name": ["x"] * 1001, "x": [1.0] * 1001})
    with pytest.raises(StateValueError):
        scan(life, ["x"])
