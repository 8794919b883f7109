"""Erasing keys from savepoints that the user names, despite interruptions; others are reported and stay unchanged."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from core_support import WRITER
from reading_support import Job, as_model, bucket_of, hashed
from small_root import savepoint_of
from test_erase_history import FEW_DELTAS, Faults, drop_key
from test_erase_scan import JANE, KEYS, TEXT

from arrow_schemas.lineage import CheckpointRef
from arrow_schemas.pointer import InlineDelta
from arrow_schemas.savepoint import CANONICAL, NATIVE, SavepointManifest
from spark_state_ext import erase_history, erase_scan, savepoint_tables
from spark_state_ext.__main__ import main
from spark_state_ext.backends.files import sole_replica
from spark_state_ext.backends.registry import Backend
from spark_state_ext.beginning.first_call import bring_files
from spark_state_ext.beginning.starts import Starts
from spark_state_ext.commit.context import CommitContext
from spark_state_ext.engine.bucket import Bucket
from spark_state_ext.engine.options import StateOptions
from spark_state_ext.engine.start_from import Savepoint
from spark_state_ext.erasing import savepoint_erasure as erasing
from spark_state_ext.erasing.history import ErasedHistory
from spark_state_ext.erasing.savepoint_erasure import _Rewrite
from spark_state_ext.errors import ClaimedError, CorruptFileError, LiveRunError, StateError, UsageError
from spark_state_ext.files.folder import Folder
from spark_state_ext.savepoints.claims import (
    SavepointClaim,
    claim_savepoint,
    delete_claimed_savepoint,
    read_claim,
    refuse_claimed,
)
from spark_state_ext.savepoints.manifest_file import encode_manifest, read_manifest
from spark_state_ext.savepoints.start_records import StartRecord, note_detached, note_start
from spark_state_ext.savepoints.status import judge
from spark_state_ext.store import LocalStore
from spark_state_ext.testing.model import KEYS as OTHERS
from spark_state_ext.testing.model import SCHEMA, Model, Row, make_run, scan
from spark_state_ext.worker.spill import SpillBuffer
from tests.helpers.erased_bytes import files_with
from tests.helpers.jobs import job_of
from tests.helpers.soak import SOAK, whole

BUCKETS = 2
EVERYWHERE = [next(key for key in OTHERS if bucket_of(key, BUCKETS) == bucket) for bucket in range(BUCKETS)]
FORMS = [NATIVE, CANONICAL]


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    """Make a job whose savepoint will have the key."""
    job = Job(tmp_path / "root", tmp_path, buckets=BUCKETS, retained=100, context={"cadence": FEW_DELTAS})
    for number in range(4):
        changes: dict[Any, Row | None] = {key: Row(number, "n", 60_000 + number) for key in EVERYWHERE}
        job.batch({**changes, JANE: Row(number)} if number > 1 else changes)
    yield job
    job.close()


def remove_key(job: Job) -> None:
    """Remove the key and run two more batches, so that the newest state does not have it."""
    job.batch({JANE: None, **{key: Row(90) for key in EVERYWHERE}})
    for number in range(2):
        job.batch({key: Row(91 + number) for key in EVERYWHERE})


def erase(job: Job, *savepoints: Folder, **more: Any) -> ErasedHistory:
    given: dict[str, Any] = {"inline_batches": 0, "write_savepoints": bool(savepoints), **more}
    return erase_history(
        str(job.root), KEYS, operator="counts", savepoints=[savepoint.root for savepoint in savepoints], **given
    )


def rows_of(savepoint: Folder) -> Model:
    model: Model = {}
    for table in savepoint_tables(savepoint.root):
        model |= as_model(table)
    return model


def read_files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def start_from(savepoint: Folder, root: Path, scratch: Path) -> tuple[Model, Model]:
    """Start a job from a savepoint on an empty disk; return its state before and after a batch of its own."""
    operator = read_manifest(savepoint).header.operators["counts"]
    options = StateOptions(
        root=str(root),
        operator="counts",
        buckets=BUCKETS,
        start_from=Savepoint(savepoint.root),
        backends=(Backend(str(root)),),
    )
    job = job_of(
        options,
        key_schema=operator.key_schema,
        state_schema=operator.state_schema,
        columns=("name", "x"),
        key_positions=(0, 1),
        batches_retained=2,
    )
    starts = Starts()
    before: Model = {}
    after: Model = {}
    for number in range(BUCKETS):
        state = starts.of(job, number)
        assert state is not None
        pointer, _ = bring_files(state, job, "new", lambda parent: (), scratch)
        files = Folder(str(root)).child("counts", "new", str(number))
        for model in (before, after):
            folder = scratch / f"started-{number}"
            with contextlib.closing(LocalStore.at(folder, SCHEMA)) as store:
                replicas = sole_replica(files, scratch, str(root))
                context = CommitContext(scratch, batches_retained=2, cadence=FEW_DELTAS)
                with contextlib.closing(Bucket(store, replicas, pointer, WRITER, context)) as bucket:
                    model |= bucket.read(scan)
                    buffer = SpillBuffer(scratch, 1 << 20)
                    buffer.append(make_run({EVERYWHERE[number]: Row(7)}, hashed))
                    pointer = bucket.commit(buffer).pointer
            shutil.rmtree(folder)
    return before, after


@pytest.mark.parametrize("form", FORMS)
def test_an_erased_savepoint_has_all_other_keys_and_can_be_started_from(form: str, job: Job, tmp_path: Path) -> None:
    savepoint = savepoint_of(job, tmp_path / "savepoint", form)
    model, manifest = job.models[-1], read_manifest(savepoint)
    remove_key(job)
    assert JANE in model
    assert files_with(TEXT, tmp_path / "savepoint")
    # Add files that the manifest does not list: two that an attempt has left, and one of the user.
    files = savepoint.child("counts", str(bucket_of(JANE, BUCKETS)))
    newest = next(name for name in files.names() if name.startswith(("3_", "4_")))
    shutil.copy(files.where(newest), files.where(f"9_{'a' * 32}.{newest.split('.', 1)[1]}"))
    Path(files.where(".tmp-x-1.delta.arrow")).write_text(TEXT)
    Path(files.where("mine.txt")).write_text("mine")
    erased = erase(job, savepoint)
    assert (erased.savepoints, erased.receipt.absent, erased.savepoints_with_keys) == (1, True, ())
    assert files_with(TEXT, tmp_path / "savepoint", tmp_path / "root") == []
    assert rows_of(savepoint) == drop_key(model)
    after = read_manifest(savepoint)
    assert after.header == manifest.header
    key_bucket = bucket_of(JANE, BUCKETS)
    assert after.buckets[1 - key_bucket] == manifest.buckets[1 - key_bucket]
    before, now = manifest.buckets[key_bucket], after.buckets[key_bucket]
    assert (now.pointer.version, now.pointer.rows) == (before.pointer.version, 1)
    assert now.pointer.earliest_timeout_ms == before.pointer.earliest_timeout_ms
    assert sorted(files.names()) == sorted([file.name for file in now.files] + ["mine.txt"])
    assert read_claim(savepoint) is None
    assert main(["savepoint", "verify", savepoint.root]) == 0
    initial, continued = start_from(savepoint, tmp_path / "other", tmp_path)
    assert initial == drop_key(model)
    assert continued == {**initial, **{key: Row(7) for key in EVERYWHERE}}
    assert files_with(TEXT, tmp_path / "other") == []
    before_repeat = read_files(tmp_path / "savepoint")
    # A savepoint without the key is not even claimed.
    modified_ns = (tmp_path / "savepoint").stat().st_mtime_ns
    assert erase(job, savepoint).savepoints == 0
    assert read_files(tmp_path / "savepoint") == before_repeat
    assert (tmp_path / "savepoint").stat().st_mtime_ns == modified_ns


def test_without_the_option_a_savepoint_with_a_key_is_reported_and_not_changed(
    job: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    savepoint = savepoint_of(job, tmp_path / "savepoint")
    # The query began with another savepoint, which the user does not name.
    first = savepoint_of(job, tmp_path / "first")
    note_start(job.folder, StartRecord("savepoint", first.root, "5a" * 16, 1, "no_claim", "counts"))
    note_detached(job.folder)
    remove_key(job)
    before = read_files(tmp_path / "savepoint"), read_files(tmp_path / "first")
    command = ["erase", "history", str(job.root), TEXT, "1.0", "--inline-batches", "0"]
    assert main([*command, "--savepoint", savepoint.root, "--yes"]) == 1
    errors = capsys.readouterr().err
    for folder in (savepoint, first):
        hint = f"rewrite it with --savepoint {folder.root} --savepoints"
        assert f"the savepoint at {folder.root} has a key: {hint}" in errors
    assert (read_files(tmp_path / "savepoint"), read_files(tmp_path / "first")) == before
    with pytest.raises(UsageError, match="only savepoints that you name are rewritten"):
        erase(job, write_savepoints=True)
    assert main([*command, "--savepoints", "--yes"]) == 2
    assert main([*command, "--savepoint", savepoint.root, "--savepoints"]) == 2
    assert "and 1 savepoints without 1 keys" in capsys.readouterr().err
    options = ["--savepoint", savepoint.root, "--savepoint", first.root, "--savepoints", "--yes"]
    assert main([*command, *options]) == 0
    assert "savepoints=2" in capsys.readouterr().err
    shutil.rmtree(tmp_path / "first")
    receipt = erase(job, write_savepoints=False).receipt
    assert any(place.where == first.root and "the query began with it" in place.why for place in receipt.out_of_reach)


def test_keys_are_erased_from_a_delta_inline_in_the_manifest(job: Job, tmp_path: Path) -> None:
    savepoint = savepoint_of(job, tmp_path / "savepoint", NATIVE)
    model, manifest, key_bucket = job.models[-1], read_manifest(savepoint), bucket_of(JANE, BUCKETS)
    files, saved = savepoint.child("counts", str(key_bucket)), manifest.buckets[key_bucket]
    last = next(file for file in saved.files if file.name.startswith(f"{saved.pointer.ref}.delta"))
    ref: CheckpointRef | None = saved.pointer.ref
    assert ref is not None
    inline = InlineDelta(ref, files.get(last.name), 1, 0)
    buckets = list(manifest.buckets)
    buckets[key_bucket] = replace(
        saved,
        pointer=replace(saved.pointer, inline=(inline,)),
        files=tuple(file for file in saved.files if file != last),
    )
    files.remove(last.name)
    savepoint.put("savepoint.arrow", encode_manifest(SavepointManifest(manifest.header, tuple(buckets))))
    remove_key(job)
    assert not erase(job, savepoint, write_savepoints=False).receipt.absent
    assert erase(job, savepoint).receipt.absent
    assert read_manifest(savepoint).buckets[key_bucket].pointer.inline == ()
    assert rows_of(savepoint) == drop_key(model)


def test_a_savepoint_that_a_query_has_claimed_or_is_starting_from_is_refused(job: Job, tmp_path: Path) -> None:
    savepoint = savepoint_of(job, tmp_path / "savepoint")
    remove_key(job)
    before, root_before = read_files(tmp_path / "savepoint"), read_files(tmp_path / "root")
    claim = SavepointClaim("5a" * 16, "/state/other/q", "q")
    claim_savepoint(savepoint, claim, ())
    with pytest.raises(ClaimedError, match=r"claimed by /state/other/q"):
        erase(job, savepoint)
    assert main(["savepoint", "release", savepoint.root]) == 0
    query = Folder(str(tmp_path / "root")).child("counts", "new")
    note_start(query, StartRecord("savepoint", savepoint.root, "5a" * 16, 3, "no_claim", "counts"))
    with pytest.raises(LiveRunError, match=r"is starting from the savepoint.*two batches"):
        erase(job, savepoint, query_folder="query")
    assert read_files(tmp_path / "savepoint") == before
    assert root_before.items() <= read_files(tmp_path / "root").items()
    note_detached(query)
    with pytest.raises(UsageError, match="no operator 'counts'; it has sums"):
        erase_history(
            str(job.root),
            KEYS,
            operator="counts",
            savepoints=[make_sums_savepoint(tmp_path).root],
            write_savepoints=True,
        )
    assert erase(job, savepoint, query_folder="query").savepoints == 1


def make_sums_savepoint(folder: Path) -> Folder:
    """Make a savepoint of another operator."""
    other = Job(folder / "elsewhere", folder, operator="sums", query_id="sums", buckets=1)
    other.batch({EVERYWHERE[0]: Row(1)})
    savepoint = savepoint_of(other, folder / "of sums")
    other.close()
    return savepoint


def test_no_query_can_start_from_a_savepoint_while_it_is_rewritten(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    savepoint = savepoint_of(job, tmp_path / "savepoint")
    remove_key(job)
    statuses = []
    put = Folder.put

    def check_and_put(folder: Folder, name: str, data: bytes) -> None:
        if name == "savepoint.arrow":
            with pytest.raises(ClaimedError, match="is being rewritten by erase_history of"):
                refuse_claimed(savepoint)
            statuses.append(str(judge([], read_claim(savepoint), False, [])))
        put(folder, name, data)

    monkeypatch.setattr(Folder, "put", check_and_put)
    assert erase(job, savepoint).savepoints == 1
    assert len(statuses) == 1
    assert "is rewriting it" in statuses[0]
    refuse_claimed(savepoint)


def test_a_damaged_savepoint_is_refused_and_stays_unchanged(job: Job, tmp_path: Path) -> None:
    savepoint = savepoint_of(job, tmp_path / "savepoint")
    remove_key(job)
    path = next((tmp_path / "savepoint").rglob("*_*.arrow"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    # Replace the file, because it is a hard link to the query's file.
    path.unlink()
    path.write_bytes(data)
    before = read_files(tmp_path / "savepoint")
    with pytest.raises(CorruptFileError, match=path.name):
        erase(job, savepoint)
    assert read_files(tmp_path / "savepoint") == before
    refuse_claimed(savepoint)


def test_keys_are_erased_from_a_savepoint_in_an_object_store(s3: Any, job: Job, tmp_path: Path) -> None:
    local, copy = savepoint_of(job, tmp_path / "savepoint"), s3.root(f"savepoint-{tmp_path.name}")
    options, model = json.dumps(s3.options), job.models[-1]
    assert main(["savepoint", "copy", local.root, copy, "--to-options", options]) == 0
    remove_key(job)
    erase(job)
    root = s3.root(f"root-{tmp_path.name}")
    for path, data in read_files(tmp_path / "root").items():
        Folder(root, s3.options).put(path, data)
    given: dict[str, Any] = {"operator": "counts", "storage_options": s3.options, "savepoints": [copy]}
    assert not erase_scan(root, KEYS, **given).absent
    erased = erase_history(root, KEYS, **given, inline_batches=0, write_savepoints=True)
    assert (erased.savepoints, erased.receipt.absent) == (1, True)
    assert main(["savepoint", "verify", copy, "--storage-options", options]) == 0
    assert main(["savepoint", "copy", copy, str(tmp_path / "back"), "--storage-options", options]) == 0
    assert files_with(TEXT, tmp_path / "back") == []
    assert rows_of(Folder(str(tmp_path / "back"))) == drop_key(model)


class _StoppedError(Exception):
    """Stops the erasure."""


def stop_at_call(name: str, monkeypatch: pytest.MonkeyPatch, job: Job, savepoint: Folder) -> None:
    """Run an erasure that is stopped when it calls a function of its module."""

    def stop() -> None:
        raise _StoppedError

    with monkeypatch.context() as patched:
        watch_calls(patched, erasing, name, stop)
        with pytest.raises(_StoppedError):
            erase(job, savepoint)


@pytest.mark.parametrize("form", FORMS)
def test_files_that_a_stopped_erasure_has_left_are_removed_later(
    form: str, job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    savepoint, folder = savepoint_of(job, tmp_path / "savepoint", form), tmp_path / "savepoint"
    remove_key(job)
    # The manifest lists the files without the keys, and the files with the keys still exist.
    stop_at_call("drop_replaced", monkeypatch, job, savepoint)
    assert files_with(TEXT, folder)
    shutil.copytree(folder, tmp_path / "stopped")
    assert main(["savepoint", "release", savepoint.root]) == 3
    assert "Run erase history again" in capsys.readouterr().err
    assert main(["savepoint", "delete", savepoint.root, "--root", str(job.root)]) == 3
    assert read_files(folder) == read_files(tmp_path / "stopped")
    # A complete erasure removes these files and the claim.
    assert erase(job, savepoint).savepoints == 1
    assert files_with(TEXT, folder) == []
    assert read_claim(savepoint) is None
    # Alternatively, the user deletes the stopped savepoint.
    shutil.rmtree(folder)
    shutil.copytree(tmp_path / "stopped", folder)
    assert main(["savepoint", "delete", savepoint.root, "--force"]) == 0
    assert not folder.exists()
    # A query can have claimed it, because earlier releases let users release the claim of a stopped erasure.
    shutil.copytree(tmp_path / "stopped", folder)
    (folder / "claim" / "claim.json").unlink()
    claim_savepoint(savepoint, SavepointClaim("5a" * 16, "/state/other/q", "q"), ())
    assert delete_claimed_savepoint(savepoint, "q", lambda: None) > 0
    assert not folder.exists()
    # If another savepoint is in the folder now, an erasure does not release the claim of the previous savepoint.
    shutil.copytree(tmp_path / "stopped", folder)
    manifest = read_manifest(savepoint)
    savepoint.put("savepoint.arrow", encode_manifest(replace(manifest, header=replace(manifest.header, id="6b" * 16))))
    with pytest.raises(ClaimedError, match="savepoint release"):
        erase(job, savepoint)
    assert main(["savepoint", "release", savepoint.root]) == 0
    assert erase(job, savepoint).receipt.absent
    assert not (folder / "claim").exists()


def test_a_savepoint_that_changes_before_it_is_claimed_is_refused_and_not_left_claimed(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    savepoint = savepoint_of(job, tmp_path / "savepoint")
    manifest = read_manifest(savepoint)
    remove_key(job)
    query = Folder(str(tmp_path / "root")).child("counts", "new")

    def start_query() -> None:
        note_start(query, StartRecord("savepoint", savepoint.root, "5a" * 16, 3, "no_claim", "counts"))

    def replace_manifest() -> None:
        header = replace(manifest.header, id="6b" * 16)
        savepoint.put("savepoint.arrow", encode_manifest(replace(manifest, header=header)))

    for change, error, says in (
        (start_query, LiveRunError, "is starting from the savepoint"),
        (replace_manifest, ClaimedError, "is not the one that"),
    ):

        def change_and_claim(*given: Any, change: Callable[[], None] = change) -> SavepointClaim:
            change()
            return claim_savepoint(*given)

        with monkeypatch.context() as patched:
            patched.setattr(erasing, "claim_savepoint", change_and_claim)
            with pytest.raises(error, match=says):
                erase(job, savepoint, query_folder="query")
        assert read_claim(savepoint) is None
        assert files_with(TEXT, tmp_path / "savepoint")
        shutil.rmtree(query.root, ignore_errors=True)
    assert erase(job, savepoint).savepoints == 1


def watch_calls(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, note: Callable[[], None]) -> None:
    """Call *note* before each call of a function."""
    call_real = getattr(owner, name)

    def note_and_call(*args: Any) -> Any:
        note()
        return call_real(*args)

    monkeypatch.setattr(owner, name, note_and_call)


@pytest.mark.parametrize("form", whole([NATIVE], [CANONICAL]))
def test_erasing_a_savepoint_that_was_stopped_at_any_step_can_be_run_again(
    form: str, job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    savepoint = savepoint_of(job, tmp_path / "savepoint", form)
    model = job.models[-1]
    remove_key(job)
    # Erase the keys from the root first, because this test is about the savepoint.
    erase(job, savepoint, write_savepoints=False)
    folders = [tmp_path / "savepoint", tmp_path / "root"]
    for folder in folders:
        shutil.copytree(folder, tmp_path / "as it was" / folder.name)
    faults, marks = Faults(monkeypatch), []
    for name in ("rewrite_buckets", "remove"):
        watch_calls(monkeypatch, _Rewrite, name, lambda: marks.append((1 << 40) - faults.left))
    faults.left = 1 << 40
    assert erase(job, savepoint).savepoints == 1
    assert len(marks) == 2
    counts = {"before": 0, "after": 0, "claimed": 0}
    # Steps before and after these are reads, which change nothing.
    span = range(marks[0] - 20, marks[1] + 5)
    for step in span if SOAK else span[::2]:
        for folder in folders:
            shutil.rmtree(folder)
            shutil.copytree(tmp_path / "as it was" / folder.name, folder)
        faults.hit, faults.left = False, step
        with contextlib.suppress(StateError, OSError):
            erase(job, savepoint)
        assert faults.hit
        faults.left = -1
        rows = rows_of(savepoint)
        assert rows in (model, drop_key(model)), f"step {step}"
        assert main(["savepoint", "verify", savepoint.root]) == 0, f"step {step}"
        counts["before" if rows == model else "after"] += 1
        counts["claimed"] += read_claim(savepoint) is not None
        if read_claim(savepoint) is None:
            assert rows == model or not files_with(TEXT, folders[0]), f"step {step}"
        shutil.rmtree(Path(job.folder.root) / "lease", ignore_errors=True)
        assert erase(job, savepoint).receipt.absent, f"step {step}"
        assert files_with(TEXT, folders[0]) == [], f"step {step}"
        assert rows_of(savepoint) == drop_key(model)
        assert read_claim(savepoint) is None
        listed = {file.name for saved in read_manifest(savepoint).buckets for file in saved.files}
        names = {path.name for path in folders[0].rglob("*") if path.is_file()}
        assert names == listed | {"savepoint.arrow"}, f"step {step}"
    assert counts["before"] > 3
    assert counts["after"] > 3
    assert counts["claimed"] > 3
    assert erase_scan(str(job.root), KEYS, operator="counts", savepoints=[savepoint.root]).absent
