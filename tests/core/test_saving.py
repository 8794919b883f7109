"""A bucket's state in a savepoint is complete without the query's own files."""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from core_support import WRITER, first_pointer
from hypothesis import given, settings
from hypothesis import strategies as st
from life import Life

from arrow_schemas import OperatorFile, Pointer
from arrow_schemas.lineage import SNAPSHOT
from arrow_schemas.pointer import ReplicationStatus
from arrow_schemas.savepoint import CANONICAL, NATIVE, SavedBucket, SavepointHeader, SavepointManifest
from spark_state_ext.backends.files import sole_replica
from spark_state_ext.commit.context import CommitContext
from spark_state_ext.engine.bucket import Bucket
from spark_state_ext.errors import CorruptFileError, MissingCheckpointError
from spark_state_ext.files.folder import Folder
from spark_state_ext.savepoints.bucket_copy import BucketCopy, ReadOptions, save_bucket
from spark_state_ext.savepoints.file_copy import CopyMethod, copy_file, refuse_incomplete
from spark_state_ext.store import LocalStore
from spark_state_ext.testing.model import KEYS, SCHEMA, Model, Row, scan
from tests.helpers.soak import examples

FORMS = [NATIVE, CANONICAL]


def save(life: Life, pointer: Pointer, form: str, name: str = "savepoint", verify: bool = False) -> BucketCopy:
    target = Folder(str(life.local / name)).child("3")
    return save_bucket(
        pointer, life.replicas(), target, form, SCHEMA, life.local, reading=ReadOptions(verify=verify), writer=WRITER
    )


def restore(life: Life, bucket: SavedBucket, name: str = "savepoint") -> Model:
    """Return the state that a savepoint alone gives on an empty disk."""
    folder = Folder(str(life.local / name)).child("3")
    pointer = replace(bucket.pointer, replication={"savepoint": ReplicationStatus(bucket.pointer.ref)})
    store = LocalStore.at(life.local / f"started-{len(life.stores)}", SCHEMA)
    life.stores.append(store)
    replicas = sole_replica(folder, life.local, "savepoint")
    return Bucket(store, replicas, pointer, WRITER, CommitContext(life.local)).read(scan)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("batches", [0, 1, 2, 7, 40])
def test_a_saved_bucket_can_be_restored_after_the_querys_files_are_deleted(life: Life, form: str, batches: int) -> None:
    for _ in range(batches):
        life.batch()
    copy = save(life, life.pointers[-1], form)
    life.settle()
    shutil.rmtree(life.local / "a", ignore_errors=True)
    assert restore(life, copy.saved) == life.models[-1]
    assert not copy.saved.pointer.inline
    assert not copy.saved.pointer.replication


@pytest.mark.parametrize("form", FORMS)
def test_inline_deltas_become_files_of_the_savepoint(life: Life, form: str) -> None:
    life.batch()
    life.settle()
    life.batch({})
    life.manager("a").gate.clear()
    life.batch()
    life.batch()
    assert len(life.pointers[-1].inline) == 2
    copy = save(life, life.pointers[-1], form)
    life.manager("a").gate.set()
    assert restore(life, copy.saved) == life.models[-1]


def test_a_missing_unconfirmed_snapshot_is_replaced_by_older_files(life: Life) -> None:
    life.history(30)
    pointer = life.pointers[-1]
    assert pointer.lineage[0].ref.version > 1
    snapshot = life.local / "a" / "3" / f"{pointer.lineage[0].ref}.{SNAPSHOT}.arrow"
    snapshot.unlink(missing_ok=True)
    copy = save(life, pointer, NATIVE)
    # The saved lineage goes further back than that of the pointer.
    assert copy.saved.pointer.lineage[0].ref.version < pointer.lineage[0].ref.version
    assert restore(life, copy.saved) == life.models[-1]


def test_a_native_savepoint_of_a_local_disk_copies_no_bytes(life: Life) -> None:
    life.history(30)
    copy = save(life, life.pointers[-1], NATIVE)
    assert copy.duplicated == len(copy.saved.files)
    assert not copy.streamed_bytes
    for file in copy.saved.files:
        mine, theirs = (life.local / name / "3" / file.name for name in ("savepoint", "a"))
        assert os.path.samefile(mine, theirs)


def test_saving_twice_returns_the_same_files(life: Life) -> None:
    life.history(12)
    first, second = (save(life, life.pointers[-1], NATIVE) for _ in range(2))
    assert first.saved == second.saved
    assert second.duplicated == 0


def test_files_are_streamed_if_the_store_cannot_duplicate_them(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "link", refuse_link)
    life.history(12)
    copy = save(life, life.pointers[-1], NATIVE)
    assert copy.streamed == len(copy.saved.files)
    assert not copy.duplicated
    assert restore(life, copy.saved) == life.models[-1]


def refuse_link(*args: object, **kwargs: object) -> None:
    raise OSError(18, "Invalid cross-device link")


def test_a_damaged_file_is_not_copied(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    life.history(5)
    copy = save(life, life.pointers[-1], NATIVE)
    file = copy.saved.files[-1]
    path = life.local / "a" / "3" / file.name
    data = bytearray(path.read_bytes())
    data[200] ^= 1
    path.unlink()
    path.write_bytes(data)
    monkeypatch.setattr(os, "link", refuse_link)
    with pytest.raises(CorruptFileError):
        copy_file(Folder(str(path.parent)), file, Folder(str(life.local / "other")), life.local)
    assert not (life.local / "other").exists() or not list((life.local / "other").iterdir())


def flip_byte(path: Path) -> None:
    """Replace a file by one with a changed row, but the same header and footer."""
    data = bytearray(path.read_bytes())
    # This is after the magic and the schema.
    data[16 + int.from_bytes(data[12:16], "little") + 100] ^= 1
    path.unlink()
    path.write_bytes(data)


def test_a_damaged_file_is_detected_with_verify_or_at_the_restore(life: Life) -> None:
    life.history(5)
    pointer = life.pointers[-1]
    file = save(life, pointer, NATIVE, "first").saved.files[-1]
    flip_byte(life.local / "a" / "3" / file.name)
    # The file is linked without being read, so only a restore detects the damage.
    unread = save(life, pointer, NATIVE, "second")
    with pytest.raises(CorruptFileError):
        restore(life, unread.saved, "second")
    with pytest.raises(CorruptFileError, match=file.name):
        save(life, pointer, NATIVE, "third", verify=True)


def test_verify_replaces_a_damaged_file_by_the_one_of_another_backend(tmp_path: Path) -> None:
    life = Life(tmp_path, names=("a", "b"))
    try:
        life.history(5)
        pointer = life.pointers[-1]
        file = save(life, pointer, NATIVE, "first").saved.files[-1]
        flip_byte(life.local / "a" / "3" / file.name)
        copy = save(life, pointer, NATIVE, "second", verify=True)
        assert os.path.samefile(life.local / "second" / "3" / file.name, life.local / "b" / "3" / file.name)
        assert restore(life, copy.saved, "second") == life.models[-1]
    finally:
        for store in life.stores:
            store.close()


def test_the_error_names_the_missing_checkpoint(life: Life) -> None:
    life.history(5)
    pointer = life.pointers[-1]
    shutil.rmtree(life.local / "a" / "3")
    with pytest.raises(MissingCheckpointError, match=str(pointer.lineage[-1].ref.version)):
        save(life, pointer, NATIVE)


def test_a_file_that_is_already_there_is_not_copied_again(life: Life) -> None:
    life.history(5)
    copy = save(life, life.pointers[-1], NATIVE)
    source, target = (Folder(str(life.local / name)).child("3") for name in ("a", "savepoint"))
    assert {copy_file(source, file, target, life.local) for file in copy.saved.files} == {CopyMethod.THERE}


@pytest.mark.parametrize("wrong", ["source", "target"])
def test_the_error_names_the_path_of_a_file_with_unexpected_contents(life: Life, wrong: str) -> None:
    life.history(5)
    copy = save(life, life.pointers[-1], NATIVE)
    source, target = (Folder(str(life.local / name)).child("3") for name in ("a", "other"))
    file = copy.saved.files[-1]
    path = Path({"source": source, "target": target}[wrong].where(file.name))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.write_bytes(b"something else")
    with pytest.raises(CorruptFileError, match=f"^{re.escape(str(path))} is not the expected file"):
        copy_file(source, file, target, life.local)


def test_a_saved_pointer_refers_to_no_query_folder_application_or_marker(life: Life) -> None:
    life.history(8)
    pointer = replace(life.pointers[-1], query_folder="mine", made_by="app", partitioning=("run", 2))
    saved = save(life, pointer, NATIVE).saved.pointer
    assert (saved.query_folder, saved.made_by, saved.partitioning, saved.markers) == ("", None, None, {})
    # Clean-up and timeouts need these values.
    assert (saved.heartbeats, saved.calls, saved.rows) == (pointer.heartbeats, pointer.calls, pointer.rows)


@settings(max_examples=examples(15))
@given(data=st.data())
def test_any_batch_of_any_history_can_be_saved(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    life = Life(tmp_path_factory.mktemp("life"))
    try:
        for at in range(data.draw(st.integers(1, 15))):
            keys = data.draw(st.sets(st.sampled_from(KEYS[:6]), max_size=3))
            life.batch({key: None if data.draw(st.booleans()) else Row(at) for key in keys})
        for form in FORMS:
            copy = save(life, life.pointers[-1], form, form)
            assert restore(life, copy.saved, form) == life.models[-1]
        life.settle()
    finally:
        for store in life.stores:
            store.close()


def test_two_attempts_at_a_canonical_savepoint_return_the_same_file(life: Life) -> None:
    """The second attempt, on another host, leaves the file of the first one unchanged."""
    life.history(12)
    target = Folder(str(life.local / "savepoint")).child("3")
    copies = [
        save_bucket(
            life.pointers[-1],
            life.replicas(),
            target,
            CANONICAL,
            SCHEMA,
            life.local,
            writer=replace(WRITER, host=host),
        )
        for host in ("one", "another with a longer name")
    ]
    assert copies[0].saved == copies[1].saved
    assert restore(life, copies[0].saved) == life.models[-1]


@pytest.mark.parametrize("becomes", ["missing", "another"])
def test_a_savepoint_with_a_missing_or_changed_file_is_refused(life: Life, becomes: str) -> None:
    life.history(12)
    bucket = save(life, life.pointers[-1], CANONICAL).saved
    (life.local / "savepoint" / "3").rename(life.local / "moved")
    (life.local / "savepoint" / bucket.operator).mkdir()
    place = life.local / "savepoint" / bucket.operator / "3"
    (life.local / "moved").rename(place)
    operators = {bucket.operator: OperatorFile(bucket.operator, "query", 8, make_schema("k"), make_schema("n"))}
    header = SavepointHeader("1" * 32, CANONICAL, 0, operators, "0", "query", 1)
    savepoint = Folder(str(life.local / "savepoint"))
    empty_buckets = (
        SavedBucket(bucket.operator, n, replace(first_pointer(n), operator=bucket.operator), ()) for n in range(8)
    )
    manifest = SavepointManifest(header, tuple(bucket if empty.bucket == 3 else empty for empty in empty_buckets))
    refuse_incomplete(savepoint, manifest)
    (file,) = bucket.files
    if becomes == "missing":
        (place / file.name).unlink()
    else:
        (place / file.name).write_bytes((place / file.name).read_bytes() + b"more")
    with pytest.raises(CorruptFileError, match="so there is no savepoint at"):
        refuse_incomplete(savepoint, manifest)


def make_schema(name: str) -> str:
    field = {"name": name, "type": "long", "nullable": True, "metadata": {}}
    return json.dumps({"type": "struct", "fields": [field]})
