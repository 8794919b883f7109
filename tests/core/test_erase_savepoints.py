"""Keys that are gone from savepoints which the user names for it, whatever stops it; others are named, and stay as they are."""

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
from test_erase_history import Faults, without
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
from spark_state_ext.commit import cadence
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
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    """A job in whose savepoint the key lives, and in whose newest state it does not."""
    monkeypatch.setattr(cadence, "DELTAS_MIN", 2)
    monkeypatch.setattr(cadence, "DELTAS_MAX", 3)
    made = Job(tmp_path / "root", tmp_path, buckets=BUCKETS, retained=100)
    for at in range(4):
        changes: dict[Any, Row | None] = {key: Row(at, "n", 60_000 + at) for key in EVERYWHERE}
        made.batch({**changes, JANE: Row(at)} if at > 1 else changes)
    yield made
    made.close()


def go_on(job: Job) -> None:
    """The key goes, and is not in the newest state."""
    job.batch({JANE: None, **{key: Row(90) for key in EVERYWHERE}})
    for at in range(2):
        job.batch({key: Row(91 + at) for key in EVERYWHERE})


def erase(job: Job, *savepoints: Folder, **more: Any) -> ErasedHistory:
    given: dict[str, Any] = {"inline_batches": 0, "write_savepoints": bool(savepoints), **more}
    return erase_history(str(job.root), KEYS, operator="counts", savepoints=[it.root for it in savepoints], **given)


def rows_of(savepoint: Folder) -> Model:
    found: Model = {}
    for table in savepoint_tables(savepoint.root):
        found |= as_model(table)
    return found


def contents(folder: Path) -> dict[str, bytes]:
    return {str(it.relative_to(folder)): it.read_bytes() for it in folder.rglob("*") if it.is_file()}


def started(savepoint: Folder, root: Path, scratch: Path) -> tuple[Model, Model]:
    """What a job that starts from a savepoint finds, and has after a batch of its own, on an empty disk."""
    operator = read_manifest(savepoint).header.operators["counts"]
    options = StateOptions(
        root=str(root),
        operator="counts",
        buckets=BUCKETS,
        start_from=Savepoint(savepoint.root),
        backends=(Backend(str(root)),),
    )
    made = job_of(
        options,
        key_schema=operator.key_schema,
        state_schema=operator.state_schema,
        columns=("name", "x"),
        key_positions=(0, 1),
        batches_retained=2,
    )
    starts = Starts()
    begun: Model = {}
    after: Model = {}
    for number in range(BUCKETS):
        state = starts.of(made, number)
        assert state is not None
        pointer, _ = bring_files(state, made, "new", lambda parent: (), scratch)
        files = Folder(str(root)).child("counts", "new", str(number))
        for into in (begun, after):
            place = scratch / f"started-{number}"
            with contextlib.closing(LocalStore.at(place, SCHEMA)) as store:
                replicas = sole_replica(files, scratch, str(root))
                context = CommitContext(scratch, batches_retained=2)
                with contextlib.closing(Bucket(store, replicas, pointer, WRITER, context)) as bucket:
                    into |= bucket.read(scan)
                    buffer = SpillBuffer(scratch, 1 << 20)
                    buffer.append(make_run({EVERYWHERE[number]: Row(7)}, hashed))
                    pointer = bucket.commit(buffer).pointer
            shutil.rmtree(place)
    return begun, after


@pytest.mark.parametrize("form", FORMS)
def test_a_savepoint_without_the_key_is_the_savepoint_else(form: str, job: Job, tmp_path: Path) -> None:
    savepoint = savepoint_of(job, tmp_path / "savepoint", form)
    model, manifest = job.models[-1], read_manifest(savepoint)
    go_on(job)
    assert JANE in model
    assert files_with(TEXT, tmp_path / "savepoint")
    # Beside files that the manifest names: what an attempt has left, and what is the user's.
    files = savepoint.child("counts", str(bucket_of(JANE, BUCKETS)))
    newest = next(it for it in files.names() if it.startswith(("3_", "4_")))
    shutil.copy(files.where(newest), files.where(f"9_{'a' * 32}.{newest.split('.', 1)[1]}"))
    Path(files.where(".tmp-x-1.delta.arrow")).write_text(TEXT)
    Path(files.where("mine.txt")).write_text("mine")
    done = erase(job, savepoint)
    assert (done.savepoints, done.receipt.absent, done.savepoints_with_keys) == (1, True, ())
    assert files_with(TEXT, tmp_path / "savepoint", tmp_path / "root") == []
    assert rows_of(savepoint) == without(model)
    after = read_manifest(savepoint)
    assert after.header == manifest.header
    mine = bucket_of(JANE, BUCKETS)
    assert after.buckets[1 - mine] == manifest.buckets[1 - mine]
    before, now = manifest.buckets[mine], after.buckets[mine]
    assert (now.pointer.version, now.pointer.rows) == (before.pointer.version, 1)
    assert now.pointer.earliest_timeout_ms == before.pointer.earliest_timeout_ms
    assert sorted(files.names()) == sorted([it.name for it in now.files] + ["mine.txt"])
    assert read_claim(savepoint) is None
    assert main(["savepoint", "verify", savepoint.root]) == 0
    begun, then = started(savepoint, tmp_path / "other", tmp_path)
    assert begun == without(model)
    assert then == {**begun, **{key: Row(7) for key in EVERYWHERE}}
    assert files_with(TEXT, tmp_path / "other") == []
    kept = contents(tmp_path / "savepoint")
    # Not even claimed.
    modified_ns = (tmp_path / "savepoint").stat().st_mtime_ns
    assert erase(job, savepoint).savepoints == 0
    assert contents(tmp_path / "savepoint") == kept
    assert (tmp_path / "savepoint").stat().st_mtime_ns == modified_ns


def test_without_the_option_a_savepoint_is_named_and_not_touched(
    job: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    savepoint = savepoint_of(job, tmp_path / "savepoint")
    # The query began with another one, of which nobody thinks any more.
    first = savepoint_of(job, tmp_path / "first")
    note_start(job.folder, StartRecord("savepoint", first.root, "5a" * 16, 1, "no_claim", "counts"))
    note_detached(job.folder)
    go_on(job)
    before = contents(tmp_path / "savepoint"), contents(tmp_path / "first")
    words = ["erase", "history", str(job.root), TEXT, "1.0", "--inline-batches", "0"]
    assert main([*words, "--savepoint", savepoint.root, "--yes"]) == 1
    told = capsys.readouterr().err
    for it in (savepoint, first):
        assert f"the savepoint at {it.root} has a key: rewrite it with --savepoint {it.root} --savepoints" in told
    assert (contents(tmp_path / "savepoint"), contents(tmp_path / "first")) == before
    with pytest.raises(UsageError, match="only savepoints that you name are rewritten"):
        erase(job, write_savepoints=True)
    assert main([*words, "--savepoints", "--yes"]) == 2
    assert main([*words, "--savepoint", savepoint.root, "--savepoints"]) == 2
    assert "and 1 savepoints without 1 keys" in capsys.readouterr().err
    both = ["--savepoint", savepoint.root, "--savepoint", first.root, "--savepoints", "--yes"]
    assert main([*words, *both]) == 0
    assert "savepoints=2" in capsys.readouterr().err
    shutil.rmtree(tmp_path / "first")
    receipt = erase(job, write_savepoints=False).receipt
    assert any(it.where == first.root and "the query began with it" in it.why for it in receipt.out_of_reach)


def test_a_delta_in_a_pointer_of_the_manifest_goes_too(job: Job, tmp_path: Path) -> None:
    savepoint = savepoint_of(job, tmp_path / "savepoint", NATIVE)
    model, manifest, mine = job.models[-1], read_manifest(savepoint), bucket_of(JANE, BUCKETS)
    files, saved = savepoint.child("counts", str(mine)), manifest.buckets[mine]
    last = next(it for it in saved.files if it.name.startswith(f"{saved.pointer.ref}.delta"))
    ref: CheckpointRef | None = saved.pointer.ref
    assert ref is not None
    inline = InlineDelta(ref, files.get(last.name), 1, 0)
    buckets = list(manifest.buckets)
    buckets[mine] = replace(
        saved,
        pointer=replace(saved.pointer, inline=(inline,)),
        files=tuple(it for it in saved.files if it != last),
    )
    files.remove(last.name)
    savepoint.put("savepoint.arrow", encode_manifest(SavepointManifest(manifest.header, tuple(buckets))))
    go_on(job)
    assert not erase(job, savepoint, write_savepoints=False).receipt.absent
    assert erase(job, savepoint).receipt.absent
    assert read_manifest(savepoint).buckets[mine].pointer.inline == ()
    assert rows_of(savepoint) == without(model)


def test_a_savepoint_that_somebody_uses_is_refused(job: Job, tmp_path: Path) -> None:
    savepoint = savepoint_of(job, tmp_path / "savepoint")
    go_on(job)
    before, past = contents(tmp_path / "savepoint"), contents(tmp_path / "root")
    theirs = SavepointClaim("5a" * 16, "/state/other/q", "q")
    claim_savepoint(savepoint, theirs, ())
    with pytest.raises(ClaimedError, match=r"claimed by /state/other/q"):
        erase(job, savepoint)
    assert main(["savepoint", "release", savepoint.root]) == 0
    query = Folder(str(tmp_path / "root")).child("counts", "new")
    note_start(query, StartRecord("savepoint", savepoint.root, "5a" * 16, 3, "no_claim", "counts"))
    with pytest.raises(LiveRunError, match=r"is starting from the savepoint.*two batches"):
        erase(job, savepoint, query_folder="query")
    assert contents(tmp_path / "savepoint") == before
    assert past.items() <= contents(tmp_path / "root").items()
    note_detached(query)
    with pytest.raises(UsageError, match="no operator 'counts'; it has sums"):
        erase_history(
            str(job.root), KEYS, operator="counts", savepoints=[sums_at(tmp_path).root], write_savepoints=True
        )
    assert erase(job, savepoint, query_folder="query").savepoints == 1


def sums_at(folder: Path) -> Folder:
    """A savepoint of another operator."""
    other = Job(folder / "elsewhere", folder, operator="sums", query_id="sums", buckets=1)
    other.batch({EVERYWHERE[0]: Row(1)})
    made = savepoint_of(other, folder / "of sums")
    other.close()
    return made


def test_nobody_starts_from_it_meanwhile(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    savepoint = savepoint_of(job, tmp_path / "savepoint")
    go_on(job)
    refused = []
    put = Folder.put

    def noted(folder: Folder, name: str, data: bytes) -> None:
        if name == "savepoint.arrow":
            with pytest.raises(ClaimedError, match="is being rewritten by erase_history of"):
                refuse_claimed(savepoint)
            refused.append(str(judge([], read_claim(savepoint), False, [])))
        put(folder, name, data)

    monkeypatch.setattr(Folder, "put", noted)
    assert erase(job, savepoint).savepoints == 1
    assert len(refused) == 1
    assert "is rewriting it" in refused[0]
    refuse_claimed(savepoint)


def test_a_damaged_savepoint_is_told_and_stays(job: Job, tmp_path: Path) -> None:
    savepoint = savepoint_of(job, tmp_path / "savepoint")
    go_on(job)
    path = next((tmp_path / "savepoint").rglob("*_*.arrow"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    # It is a link to the query's.
    path.unlink()
    path.write_bytes(data)
    before = contents(tmp_path / "savepoint")
    with pytest.raises(CorruptFileError, match=path.name):
        erase(job, savepoint)
    assert contents(tmp_path / "savepoint") == before
    refuse_claimed(savepoint)


def test_a_savepoint_in_an_object_store(s3: Any, job: Job, tmp_path: Path) -> None:
    local, there = savepoint_of(job, tmp_path / "savepoint"), s3.root(f"savepoint-{tmp_path.name}")
    options, model = json.dumps(s3.options), job.models[-1]
    assert main(["savepoint", "copy", local.root, there, "--to-options", options]) == 0
    go_on(job)
    erase(job)
    root = s3.root(f"root-{tmp_path.name}")
    for path, data in contents(tmp_path / "root").items():
        Folder(root, s3.options).put(path, data)
    given: dict[str, Any] = {"operator": "counts", "storage_options": s3.options, "savepoints": [there]}
    assert not erase_scan(root, KEYS, **given).absent
    done = erase_history(root, KEYS, **given, inline_batches=0, write_savepoints=True)
    assert (done.savepoints, done.receipt.absent) == (1, True)
    assert main(["savepoint", "verify", there, "--storage-options", options]) == 0
    assert main(["savepoint", "copy", there, str(tmp_path / "back"), "--storage-options", options]) == 0
    assert files_with(TEXT, tmp_path / "back") == []
    assert rows_of(Folder(str(tmp_path / "back"))) == without(model)


class _StoppedError(Exception):
    """Whoever erases is stopped here."""


def stopped_before(name: str, monkeypatch: pytest.MonkeyPatch, job: Job, savepoint: Folder) -> None:
    """An erasure that is stopped when a part of the work begins."""

    def stops() -> None:
        raise _StoppedError

    with monkeypatch.context() as patched:
        watched(patched, erasing, name, stops)
        with pytest.raises(_StoppedError):
            erase(job, savepoint)


@pytest.mark.parametrize("form", FORMS)
def test_what_a_stopped_erasure_has_left_is_not_forgotten(
    form: str, job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    savepoint, there = savepoint_of(job, tmp_path / "savepoint", form), tmp_path / "savepoint"
    go_on(job)
    # The manifest names files without the keys, and those with the keys are there still.
    stopped_before("drop_replaced", monkeypatch, job, savepoint)
    assert files_with(TEXT, there)
    shutil.copytree(there, tmp_path / "stopped")
    assert main(["savepoint", "release", savepoint.root]) == 3
    assert "Run erase history again" in capsys.readouterr().err
    assert main(["savepoint", "delete", savepoint.root, "--root", str(job.root)]) == 3
    assert contents(there) == contents(tmp_path / "stopped")
    # Once it is run to its end.
    assert erase(job, savepoint).savepoints == 1
    assert files_with(TEXT, there) == []
    assert read_claim(savepoint) is None
    # Instead of that.
    shutil.rmtree(there)
    shutil.copytree(tmp_path / "stopped", there)
    assert main(["savepoint", "delete", savepoint.root, "--force"]) == 0
    assert not there.exists()
    # A query has claimed it, as releases before this one let go of such a claim.
    shutil.copytree(tmp_path / "stopped", there)
    (there / "claim" / "claim.json").unlink()
    claim_savepoint(savepoint, SavepointClaim("5a" * 16, "/state/other/q", "q"), ())
    assert delete_claimed_savepoint(savepoint, "q", lambda: None) > 0
    assert not there.exists()
    # Another savepoint lies there now: that one is not freed by an erasure of the one before.
    shutil.copytree(tmp_path / "stopped", there)
    manifest = read_manifest(savepoint)
    savepoint.put("savepoint.arrow", encode_manifest(replace(manifest, header=replace(manifest.header, id="6b" * 16))))
    with pytest.raises(ClaimedError, match="savepoint release"):
        erase(job, savepoint)
    assert main(["savepoint", "release", savepoint.root]) == 0
    assert erase(job, savepoint).receipt.absent
    assert not (there / "claim").exists()


def test_a_savepoint_that_changes_before_it_is_claimed_is_refused_and_free(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    savepoint = savepoint_of(job, tmp_path / "savepoint")
    manifest = read_manifest(savepoint)
    go_on(job)
    query = Folder(str(tmp_path / "root")).child("counts", "new")

    def begun() -> None:
        note_start(query, StartRecord("savepoint", savepoint.root, "5a" * 16, 3, "no_claim", "counts"))

    def replaced() -> None:
        header = replace(manifest.header, id="6b" * 16)
        savepoint.put("savepoint.arrow", encode_manifest(replace(manifest, header=header)))

    for event, refused, says in (
        (begun, LiveRunError, "is starting from the savepoint"),
        (replaced, ClaimedError, "is not the one that"),
    ):

        def claimed(*given: Any, event: Callable[[], None] = event) -> SavepointClaim:
            event()
            return claim_savepoint(*given)

        with monkeypatch.context() as patched:
            patched.setattr(erasing, "claim_savepoint", claimed)
            with pytest.raises(refused, match=says):
                erase(job, savepoint, query_folder="query")
        assert read_claim(savepoint) is None
        assert files_with(TEXT, tmp_path / "savepoint")
        shutil.rmtree(query.root, ignore_errors=True)
    assert erase(job, savepoint).savepoints == 1


def watched(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, note: Callable[[], None]) -> None:
    """Have it noted when a part of the work begins."""
    real = getattr(owner, name)

    def call(*given: Any) -> Any:
        note()
        return real(*given)

    monkeypatch.setattr(owner, name, call)


@pytest.mark.parametrize("form", whole([NATIVE], [CANONICAL]))
def test_stopped_at_every_step_and_run_again(
    form: str, job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    savepoint = savepoint_of(job, tmp_path / "savepoint", form)
    model = job.models[-1]
    go_on(job)
    # What it has of the past goes before, and is not what this is about.
    erase(job, savepoint, write_savepoints=False)
    places = [tmp_path / "savepoint", tmp_path / "root"]
    for place in places:
        shutil.copytree(place, tmp_path / "as it was" / place.name)
    faults, marks = Faults(monkeypatch), []
    for name in ("rewrite_buckets", "remove"):
        watched(monkeypatch, _Rewrite, name, lambda: marks.append((1 << 40) - faults.left))
    faults.left = 1 << 40
    assert erase(job, savepoint).savepoints == 1
    assert len(marks) == 2
    found = {"before": 0, "after": 0, "claimed": 0}
    # Reads come before and after that, and change nothing.
    span = range(marks[0] - 20, marks[1] + 5)
    for step in span if SOAK else span[::2]:
        for place in places:
            shutil.rmtree(place)
            shutil.copytree(tmp_path / "as it was" / place.name, place)
        faults.hit, faults.left = False, step
        with contextlib.suppress(StateError, OSError):
            erase(job, savepoint)
        assert faults.hit
        faults.left = -1
        has_key = rows_of(savepoint)
        assert has_key in (model, without(model)), f"step {step}"
        assert main(["savepoint", "verify", savepoint.root]) == 0, f"step {step}"
        found["before" if has_key == model else "after"] += 1
        found["claimed"] += read_claim(savepoint) is not None
        if read_claim(savepoint) is None:
            assert has_key == model or not files_with(TEXT, places[0]), f"step {step}"
        shutil.rmtree(Path(job.folder.root) / "lease", ignore_errors=True)
        assert erase(job, savepoint).receipt.absent, f"step {step}"
        assert files_with(TEXT, places[0]) == [], f"step {step}"
        assert rows_of(savepoint) == without(model)
        assert read_claim(savepoint) is None
        named = {it.name for saved in read_manifest(savepoint).buckets for it in saved.files}
        there = {path.name for path in places[0].rglob("*") if path.is_file()}
        assert there == named | {"savepoint.arrow"}, f"step {step}"
    assert found["before"] > 3
    assert found["after"] > 3
    assert found["claimed"] > 3
    assert erase_scan(str(job.root), KEYS, operator="counts", savepoints=[savepoint.root]).absent
