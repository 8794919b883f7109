"""Erasing keys from the history of a stopped query: from every file, despite interruptions, and the query continues."""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from core_support import WRITER
from fsspec.implementations.local import LocalFileSystem
from life import Life
from reading_support import Job
from test_erase_scan import JANE, KEYS, OPERATOR, TEXT

from arrow_schemas import Writer
from arrow_schemas.erase import EraseDone
from arrow_schemas.lineage import SNAPSHOT, parse_file_name
from spark_state_ext import Backend, erase_history, erase_keys, erase_status, open_state
from spark_state_ext.__main__ import main
from spark_state_ext.commit.cadence import SnapshotCadence
from spark_state_ext.commit.decisions import CommitOptions
from spark_state_ext.erasing.history import ErasedHistory
from spark_state_ext.erasing.leftovers import scratch_with_keys
from spark_state_ext.errors import CorruptFileError, LiveRunError, StorageError, UsageError
from spark_state_ext.files.checkpoint import read_announced
from spark_state_ext.files.erase_requests import EraseFolder
from spark_state_ext.files.folder import Folder
from spark_state_ext.files.horizon import recent_heartbeats
from spark_state_ext.ownership.holds import Hold
from spark_state_ext.ownership.lease import LEASE_MS_MIN, Lease
from spark_state_ext.ownership.lease_log import LeaseLog
from spark_state_ext.ownership.lease_record import RunIdentity
from spark_state_ext.store import LocalStore
from spark_state_ext.testing.model import SCHEMA, Model, Row
from spark_state_ext.worker.local_folders import root_id
from tests.helpers.erased_bytes import files_with
from tests.helpers.soak import SOAK
from tests.helpers.waiting import WAIT_S

PLACE = "root/counts/q"
FEW_DELTAS = SnapshotCadence(2, 3)


def life_at(folder: Path, *places: str, inline: bool = False, cadence: SnapshotCadence = FEW_DELTAS) -> Life:
    """Make a bucket of a query, in a root and other backends."""
    folder.mkdir(parents=True, exist_ok=True)
    life = Life(folder, options=CommitOptions(journal=inline), names=places or (PLACE,), cadence=cadence)
    for place in life.names:
        Folder(str(folder / place)).put("operator_0.json", OPERATOR.encode())
    return life


def lived(life: Life) -> None:
    """Add a key, change it over several snapshots and remove it; then run more batches."""
    life.batch({JANE: Row(1, "a")})
    for number in range(5):
        life.batch({JANE: Row(number, "b" * number), ("other", float(number)): Row(number)} if number % 2 else None)
        life.settle()
    life.batch({JANE: None})
    for _ in range(2):
        life.batch()
        life.settle()


@pytest.fixture
def life(tmp_path: Path) -> Iterator[Life]:
    life = life_at(tmp_path)
    yield life
    life.settle()
    for store in life.stores:
        store.close()


def erase(life: Life, keys: Any = None, **more: Any) -> ErasedHistory:
    given: dict[str, Any] = {"inline_batches": 0, **more}
    return erase_history(str(life.local / "root"), KEYS if keys is None else keys, operator="counts", **given)


def drop_key(model: Model) -> Model:
    return {key: row for key, row in model.items() if key != JANE}


def test_every_batch_that_spark_may_go_back_to_can_be_restored_without_the_key(life: Life) -> None:
    lived(life)
    assert any(JANE in model for model in life.models)
    before = files_with(TEXT, life.local / "root")
    assert len(before) > 5
    names = sorted(path.name for path in (life.local / PLACE / "3").iterdir())
    erased = erase(life)
    assert (erased.files, erased.receipt.absent) == (len(before), True)
    assert erased.rows >= erased.files
    assert files_with(TEXT, life.local / "root") == []
    assert sorted(path.name for path in (life.local / PLACE / "3").iterdir()) == names
    for pointer, model in zip(life.pointers, life.models, strict=True):
        assert life.restored(pointer) == drop_key(model)
    # The query continues on an empty disk, because the new operator file makes it use new local stores.
    assert (life.local / PLACE / "operator_1.json").exists()
    life.store = LocalStore.at(life.local / "after", SCHEMA)
    life.stores.append(life.store)
    for _ in range(5):
        life.batch()
        life.settle()
    life.batch({JANE: Row(7)})
    life.settle()
    assert life.restored(life.pointers[-1]) == life.models[-1]
    assert life.models[-1][JANE] == Row(7)


def test_erasing_keys_that_were_never_stored_changes_no_file(life: Life) -> None:
    life.history(3)
    before = {path: path.read_bytes() for path in (life.local / PLACE / "3").iterdir()}
    erased = erase(life)
    assert (erased.files, erased.rows, erased.requests, erased.receipt.absent) == (0, 0, 0, True)
    assert {path: path.read_bytes() for path in (life.local / PLACE / "3").iterdir()} == before
    assert not (life.local / PLACE / "operator_1.json").exists()


def test_erasing_the_same_keys_again_rewrites_no_file(life: Life) -> None:
    lived(life)
    assert erase(life).files
    assert erase(life).files == 0


def test_keys_are_erased_from_all_backends_and_from_local_stores_of_the_query(tmp_path: Path) -> None:
    life = life_at(tmp_path, PLACE, "second/counts/q")
    lived(life)
    stores = tmp_path / "disk" / "spark_state_ext-0" / f"{root_id(str(tmp_path / 'root'))}-counts"
    shutil.copytree(tmp_path / "store", stores / "q" / "s0" / "3")
    (stores / "another" / "s0" / "3").mkdir(parents=True)
    (stores / "another" / "s0" / "3" / "data.mdb").write_text(TEXT)
    # One is of another operator, whose name has the same end; the other is of another root, on which a query runs.
    others = [stores.parent / f"{stores.name[:17]}more-counts", stores.parent / f"{'0' * 16}-counts"]
    for other in others:
        shutil.copytree(tmp_path / "store", other / "q" / "s0" / "3")
        (other / "q" / "s0" / "3" / "boot").mkdir()
        (other / "q" / "s0" / "3" / "boot" / "committed").write_text(TEXT)
    (others[0] / "erased-1").mkdir()
    # A container has left this one, and it is no longer used.
    shutil.copytree(tmp_path / "store", stores.parent / f"{'1' * 16}-counts" / "q" / "s0" / "3")
    # An earlier erasing process that was stopped has left this one.
    shutil.copytree(tmp_path / "store", stores / "erased-0" / "s0" / "3")
    erased = erase(life, backends=[Backend(str(tmp_path / "second"))], local_dirs=[str(tmp_path / "disk")])
    assert files_with(TEXT, tmp_path / "root", tmp_path / "second") == []
    assert erased.stores == 2
    assert sorted(path.name for path in stores.iterdir()) == ["another"]
    assert [sorted(path.name for path in other.iterdir()) for other in others] == [["erased-1", "q"], ["q"]]
    # The scan reports the other root, but not the other operator.
    assert not any("more-counts" in match.where for match in erased.receipt.found)
    assert any(f"{'0' * 16}-counts" in match.where for match in erased.receipt.found)
    # The store of another query stays unchanged, and the receipt reports that it has the key.
    assert {match.kind for match in erased.receipt.found} == {"local store"}
    for name in life.names:
        assert life.restored(life.pointers[-1], name) == life.models[-1]
    life.settle()
    for store in life.stores:
        store.close()


def test_a_key_in_the_newest_state_is_refused(life: Life) -> None:
    lived(life)
    life.batch({JANE: Row(9)})
    life.settle()
    before = files_with(TEXT, life.local / "root")
    with pytest.raises(UsageError, match=r"1 of the keys are or may be in the newest state.*erase_keys"):
        erase(life)
    assert files_with(TEXT, life.local / "root") == before
    # The key is also refused if only a snapshot has it, or if the files that follow may be of a failed attempt.
    life.batch()
    life.settle()
    with pytest.raises(UsageError, match="newest state"):
        erase(life)


def test_a_key_is_refused_if_its_tombstone_may_be_of_a_failed_attempt(life: Life) -> None:
    """The tombstone may be of an attempt that was not committed; the committed checkpoint before it has the key."""
    life.batch({JANE: Row(1)})
    life.settle()
    life.batch({JANE: None})
    life.settle()
    with pytest.raises(UsageError, match="newest state"):
        erase(life)
    life.batch()
    life.settle()
    assert erase(life).receipt.absent


def test_a_tombstone_in_the_newest_file_counts_if_a_later_erase_request_is_done(life: Life) -> None:
    """A request that is done in a later batch proves that the batch of the tombstone was committed."""
    life.batch({JANE: Row(1)})
    life.settle()
    life.batch({JANE: None})
    life.settle()
    folder = EraseFolder(Folder(str(life.local / PLACE)))
    erase_keys(str(life.local / "root"), KEYS, operator="counts")
    request = folder.request(1)
    # The batch of the tombstone may not be committed.
    folder.note_done(1, replace(make_done_record(request.id), heartbeat=life.pointers[-1].heartbeats - 1))
    with pytest.raises(UsageError, match="newest state"):
        erase(life)
    folder.take_back(1)
    folder.note_done(1, replace(make_done_record(request.id), heartbeat=life.pointers[-1].heartbeats))
    assert erase(life).receipt.absent
    assert life.restored(life.pointers[-1]) == {}


def test_recent_tombstones_are_refused_because_deltas_may_be_inline(tmp_path: Path) -> None:
    life = life_at(tmp_path, inline=True)
    lived(life)
    with pytest.raises(UsageError, match=r"erased 2 batches with data ago.*run 301 more batches"):
        erase(life, inline_batches=100)
    with pytest.raises(UsageError, match="run 7 more"):
        erase(life, inline_batches=2)
    for _ in range(recent_heartbeats(2) - 2):
        life.batch()
        life.settle()
    with pytest.raises(UsageError, match="run 1 more"):
        erase(life, inline_batches=2)
    life.batch()
    life.settle()
    assert erase(life, inline_batches=2).receipt.absent
    # No batch that Spark retains has the key, neither inline nor in a file.
    for pointer, model in list(zip(life.pointers, life.models, strict=True))[-3:]:
        assert life.restored(pointer) == model == drop_key(model)
    life.settle()
    for store in life.stores:
        store.close()


def test_keys_are_removed_from_erase_requests_which_must_be_done(life: Life) -> None:
    lived(life)
    root = str(life.local / "root")
    keys = {"name": [TEXT, "Somebody else"], "x": [1.0, 2.0]}
    erase_keys(root, keys, operator="counts")
    with pytest.raises(UsageError, match=r"erase request 1 .* is not done"):
        erase(life)
    folder = EraseFolder(Folder(str(life.local / PLACE)))
    (status,) = erase_status(root, operator="counts")
    request = folder.request(1)
    record = make_done_record(request.id)
    folder.note_done(1, record)
    erased = erase(life)
    assert (erased.requests, erased.receipt.absent) == (1, True)
    stripped = folder.request(1)
    assert stripped.keys.to_pydict() == {"name": ["Somebody else"], "x": [2.0]}
    assert (stripped.id, status.state) == (request.id, "waiting")


def make_done_record(request_id: str) -> EraseDone:
    return EraseDone(request_id, 2, 1, 2, 3, 4)


def test_a_running_query_is_refused(life: Life) -> None:
    lived(life)
    lease = Lease(Folder(str(life.local / PLACE)), RunIdentity("app", "plan", "query"), LEASE_MS_MIN)
    lease.hold()
    stop = keep_renewing(life)
    try:
        with pytest.raises(LiveRunError, match="stop the query first"):
            erase(life)
    finally:
        stop()
    assert files_with(TEXT, life.local / "root")
    # The query was killed, so its lease is no longer renewed.
    assert erase(life).receipt.absent
    with pytest.raises(LiveRunError):
        lease.check()


def keep_renewing(life: Life) -> Callable[[], None]:
    """Renew the lease from a thread, as another process of the run does; return a function that stops the thread.

    Meanwhile the lease lasts so long that it does not lapse if the thread has to wait for the processor.
    """
    stopped, log = threading.Event(), LeaseLog(Folder(str(life.local / PLACE)))

    def renew_for(lease_ms: int) -> None:
        head = log.newest()
        assert head is not None
        assert log.append(head, replace(head.record, lease_ms=lease_ms, nonce=uuid.uuid4().hex))

    def renew_until_stopped() -> None:
        while not stopped.wait(0.1):
            renew_for(1_000 * WAIT_S)

    renew_for(1_000 * WAIT_S)
    thread = threading.Thread(target=renew_until_stopped)
    thread.start()

    def stop() -> None:
        stopped.set()
        thread.join()
        renew_for(LEASE_MS_MIN)

    return stop


def test_the_lease_is_released_afterwards_and_a_hold_is_respected(life: Life) -> None:
    lived(life)
    folder = Folder(str(life.local / PLACE))
    hold = Hold.place(folder, "a savepoint")
    with pytest.raises(LiveRunError, match="copied by a savepoint"):
        erase(life)
    hold.release()
    erase(life)
    # The lease is free at once, and does not have to lapse.
    Lease(folder, RunIdentity("app", "plan", "query"), LEASE_MS_MIN).hold()


def test_open_state_chooses_the_folder_that_a_query_wrote_last_even_after_erasing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = []
    for name in ("q1", "q2"):
        job = Job(tmp_path / "root", tmp_path, query_id=name, buckets=1, retained=100, context={"cadence": FEW_DELTAS})
        for row in (Row(1), Row(2), None, None, None):
            job.batch({JANE: row, ("x", 1.0): Row(3)})
        jobs.append(job)

    def open_folder_name() -> str:
        with open_state(tmp_path / "root", hold=False) as state:
            return state.path.rsplit("/", 1)[1]

    def erase_from(name: str, text: str) -> int:
        keys = {"name": [text], "x": [1.0]}
        root = str(tmp_path / "root")
        return erase_history(root, keys, operator="counts", query_folder=name, inline_batches=0).files

    assert open_folder_name() == "q2"
    for name in ("q1", "q2", "q1"):
        erase_from(name, TEXT)
        assert open_folder_name() == "q2", name
    # Erasing that was refused has held the lease as well.
    with pytest.raises(UsageError, match="newest state"):
        erase_from("q1", "x")
    assert open_folder_name() == "q2"
    assert main(["verify", str(tmp_path / "root")]) == 0
    assert "unknown" not in capsys.readouterr().out
    # The query continues.
    Lease(jobs[0].folder, RunIdentity("app", "plan", "query"), LEASE_MS_MIN).hold()
    assert open_folder_name() == "q1"
    for job in jobs:
        job.close()


def test_a_damaged_file_stops_erasing_before_anything_is_changed(life: Life) -> None:
    lived(life)
    path = max((life.local / PLACE / "3").iterdir())
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    before = {file: file.read_bytes() for file in (life.local / PLACE / "3").iterdir()}
    with pytest.raises(CorruptFileError, match=path.name):
        erase(life)
    assert {file: file.read_bytes() for file in (life.local / PLACE / "3").iterdir()} == before


def test_unsupported_backends_folders_and_values_are_refused(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    lived(life)
    with pytest.raises(UsageError, match="kind sqlite"):
        erase(life, backends=[Backend(name="theirs", kind="sqlite")])
    with pytest.raises(UsageError, match="no folder /nowhere"):
        erase(life, local_dirs=["/nowhere/at/all"])
    with pytest.raises(UsageError, match="inline_batches must be"):
        erase(life, inline_batches=-1)
    for place in ("root", "second"):
        query_folder = Folder(str(life.local / place / "counts" / "q"))
        query_folder.child("parents").put("0.parent.json", b"")
        with pytest.raises(UsageError, match=rf"was rescaled, and .*/{place}/counts/q/parents are still needed"):
            erase(life, backends=[Backend(str(life.local / "second"))])
        query_folder.remove_tree("parents")
    Folder(str(life.local / "root" / "counts" / "r")).put("operator_0.json", replace(OPERATOR, query_id="r").encode())
    with pytest.raises(UsageError, match=r"2 query folders.*name one with query_folder \(q, r\)"):
        erase(life)
    monkeypatch.setattr(Folder, "replaces", False)
    with pytest.raises(UsageError, match="cannot replace a file in one step"):
        erase(life, query_folder="q")


# -- interruptions -----------------------------------------------------------------------------------


class Faults:
    """Let some operations of the disk pass and make all later ones fail, as if the process were killed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left = -1
        self.hit = False
        # The value of `left` at each rename of a file: if the rename fails, the file is not finished.
        self.renamed_at: list[int] = []
        for owner, names in (
            (LocalFileSystem, ("ls", "info", "cat_file", "rm_file")),
            (os, ("replace", "fsync", "link")),
        ):
            for name in names:
                self._wrap(monkeypatch, owner, name)

    def _wrap(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
        call_real = getattr(owner, name)

        def count_and_call(*args: Any, **kwargs: Any) -> Any:
            if self.left == 0:
                self.hit = True
                raise OSError(errno.EIO, f"{name} fails on purpose")
            if name == "replace":
                self.renamed_at.append(self.left)
            self.left -= self.left > 0
            return call_real(*args, **kwargs)

        monkeypatch.setattr(owner, name, count_and_call)


def sample_steps(steps: int) -> list[int]:
    """Return all steps in the soak, and otherwise 24 evenly spaced ones."""
    return list(range(steps)) if SOAK else [steps * part // 24 for part in range(24)]


def test_erasing_that_was_stopped_at_any_step_can_be_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After each interruption, every batch has its old state, with the key or without it."""
    life = life_at(tmp_path / "made")
    lived(life)
    erase_keys(str(life.local / "root"), KEYS, operator="counts")
    folder = EraseFolder(Folder(str(life.local / PLACE)))
    folder.note_done(1, make_done_record(folder.request(1).id))
    shutil.copytree(life.local / "root", tmp_path / "as it was")
    faults, partly, unfinished = Faults(monkeypatch), 0, 0
    faults.left = 1 << 40
    erase(life)
    steps = (1 << 40) - faults.left
    assert steps > 100
    rename_steps = [(1 << 40) - left for left in faults.renamed_at]
    # The first steps are listings and reads, which change nothing, so the suite samples few of them.
    for step in sample_steps(steps) if SOAK else sorted({*sample_steps(steps)[::2], *rename_steps}):
        shutil.rmtree(life.local / "root")
        shutil.copytree(tmp_path / "as it was", life.local / "root")
        faults.hit, faults.left = False, step
        with pytest.raises((StorageError, OSError)):
            erase(life)
        assert faults.hit
        faults.left = -1
        paths = files_with(TEXT, life.local / "root")
        partly += 0 < len(paths) < 8
        for pointer, model in zip(life.pointers, life.models, strict=True):
            assert life.restored(pointer) in (model, drop_key(model)), f"step {step}"
        # Remove the lease, as if it had lapsed.
        shutil.rmtree(life.local / PLACE / "lease", ignore_errors=True)
        unfinished += len(list((life.local / "root").rglob(".tmp-*")))
        assert erase(life).receipt.absent, f"step {step}"
        assert list((life.local / "root").rglob(".tmp-*")) == []
        assert files_with(TEXT, life.local / "root") == []
        for pointer, model in zip(life.pointers, life.models, strict=True):
            assert life.restored(pointer) == drop_key(model)
        while len(life.stores) > 1:
            life.stores.pop().close()
    assert partly > 3
    assert unfinished > 3
    life.settle()
    life.store.close()


def test_leftovers_of_a_killed_erasing_process_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may leave parts of each kind of file that it writes, in each backend, and copies of files on this machine."""
    life = life_at(tmp_path, PLACE, "other/counts/q")
    lived(life)
    life.settle()
    for place, folder in ((PLACE, "3"), (PLACE, "."), (PLACE, "erase"), (PLACE, "lease"), ("other/counts/q", "3")):
        (tmp_path / place / folder).mkdir(exist_ok=True)
        (tmp_path / place / folder / f".tmp-{uuid.uuid4().hex}-any").write_text(TEXT)
    # These are not leftovers of erasing: a batch and a process that copies files write them.
    for folder in ("spill", "holds"):
        (tmp_path / PLACE / folder).mkdir(exist_ok=True)
        (tmp_path / PLACE / folder / ".tmp-any").write_text("")
    local_dir = tmp_path / "local"
    local_dir.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(local_dir))
    with subprocess.Popen(["true"]) as ended_process:
        pass
    scratch_name = re.sub(r"-\d+-\d*-", f"-{ended_process.pid}-1-", make_scratch_name(), count=1)
    for name in (scratch_name, f"{scratch_name}-2", "spark_state_ext-keys-of-mine"):
        (local_dir / name).mkdir()
        (local_dir / name / "copy").write_text(TEXT)
    (local_dir / f"{scratch_name}-link").symlink_to(local_dir / "spark_state_ext-keys-of-mine")
    with scratch_with_keys() as live_scratch:
        erased = erase(life, backends=[Backend(str(tmp_path / "other"))])
        assert live_scratch.exists()
    assert erased.receipt.found == ()
    assert sorted(path.name for path in tmp_path.rglob(".tmp-*")) == [".tmp-any", ".tmp-any"]
    assert sorted(path.name for path in local_dir.iterdir()) == [f"{scratch_name}-link", "spark_state_ext-keys-of-mine"]
    shutil.rmtree(tmp_path / PLACE / "spill")
    shutil.rmtree(tmp_path / PLACE / "holds")
    assert erase(life, backends=[Backend(str(tmp_path / "other"))]).receipt.absent
    life.store.close()


def make_scratch_name() -> str:
    with scratch_with_keys() as folder:
        return folder.name


def test_files_are_rewritten_in_the_order_of_their_versions(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    """In another order, a tombstone might be erased while an older file still has the row that it hides."""
    lived(life)
    order: list[tuple[int, bool]] = []
    put_file = Folder.put_file

    def note_and_put(self: Folder, name: str, path: Any) -> None:
        parsed = parse_file_name(name)
        if parsed is not None:
            order.append((parsed[0].version, parsed[1] == SNAPSHOT))
        put_file(self, name, path)

    monkeypatch.setattr(Folder, "put_file", note_and_put)
    erase(life)
    assert len(order) > 5
    assert order == sorted(order)


def test_headers_of_rewritten_files_are_unchanged(life: Life) -> None:
    lived(life)
    files = Folder(str(life.local / PLACE)).child("3")

    def read_headers() -> dict[str, Any]:
        headers = {}
        for name in files.names():
            parsed = parse_file_name(name)
            assert parsed is not None
            headers[name] = read_announced(files, *parsed).header
        return headers

    before = read_headers()
    erase(life)
    assert read_headers() == before
    assert all(isinstance(header.writer, Writer) and header.writer.host == WRITER.host for header in before.values())
