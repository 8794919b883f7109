"""Keys that are gone from the past of a stopped query: from every file, whatever stops it, and the query goes on."""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
import tempfile
import threading
import time
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
from spark_state_ext.commit import cadence
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

PLACE = "root/counts/q"


@pytest.fixture(autouse=True)
def _few_deltas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cadence, "DELTAS_MIN", 2)
    monkeypatch.setattr(cadence, "DELTAS_MAX", 3)


def life_at(folder: Path, *places: str, inline: bool = False) -> Life:
    """A bucket of a query, in a root and other backends."""
    folder.mkdir(parents=True, exist_ok=True)
    made = Life(folder, options=CommitOptions(journal=inline), names=places or (PLACE,))
    for place in made.names:
        Folder(str(folder / place)).put("operator_0.json", OPERATOR.encode())
    return made


def lived(life: Life) -> None:
    """A key came, changed, lived through snapshots and was removed; the bucket went on."""
    life.batch({JANE: Row(1, "a")})
    for at in range(5):
        life.batch({JANE: Row(at, "b" * at), ("other", float(at)): Row(at)} if at % 2 else None)
        life.settle()
    life.batch({JANE: None})
    for _ in range(2):
        life.batch()
        life.settle()


@pytest.fixture
def life(tmp_path: Path) -> Iterator[Life]:
    made = life_at(tmp_path)
    yield made
    made.settle()
    for store in made.stores:
        store.close()


def erase(life: Life, keys: Any = None, **more: Any) -> ErasedHistory:
    given: dict[str, Any] = {"inline_batches": 0, **more}
    return erase_history(str(life.local / "root"), KEYS if keys is None else keys, operator="counts", **given)


def without(model: Model) -> Model:
    return {key: row for key, row in model.items() if key != JANE}


def test_every_batch_that_spark_may_go_back_to_is_there_without_the_key(life: Life) -> None:
    lived(life)
    assert any(JANE in model for model in life.models)
    before = files_with(TEXT, life.local / "root")
    assert len(before) > 5
    names = sorted(it.name for it in (life.local / PLACE / "3").iterdir())
    done = erase(life)
    assert (done.files, done.receipt.absent) == (len(before), True)
    assert done.rows >= done.files
    assert files_with(TEXT, life.local / "root") == []
    assert sorted(it.name for it in (life.local / PLACE / "3").iterdir()) == names
    for pointer, model in zip(life.pointers, life.models, strict=True):
        assert life.restored(pointer) == without(model)
    # The query goes on, on an empty disk, as the new operator file has it.
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


def test_nothing_to_do_changes_nothing(life: Life) -> None:
    life.history(3)
    before = {path: path.read_bytes() for path in (life.local / PLACE / "3").iterdir()}
    done = erase(life)
    assert (done.files, done.rows, done.requests, done.receipt.absent) == (0, 0, 0, True)
    assert {path: path.read_bytes() for path in (life.local / PLACE / "3").iterdir()} == before
    assert not (life.local / PLACE / "operator_1.json").exists()


def test_again_after_it_is_done(life: Life) -> None:
    lived(life)
    assert erase(life).files
    assert erase(life).files == 0


def test_all_backends_and_local_stores(tmp_path: Path) -> None:
    life = life_at(tmp_path, PLACE, "second/counts/q")
    lived(life)
    stores = tmp_path / "disk" / "spark_state_ext-0" / f"{root_id(str(tmp_path / 'root'))}-counts"
    shutil.copytree(tmp_path / "store", stores / "q" / "s0" / "3")
    (stores / "another" / "s0" / "3").mkdir(parents=True)
    (stores / "another" / "s0" / "3" / "data.mdb").write_text(TEXT)
    # Another operator whose name ends alike; another root, on which a query runs.
    others = [stores.parent / f"{stores.name[:17]}more-counts", stores.parent / f"{'0' * 16}-counts"]
    for other in others:
        shutil.copytree(tmp_path / "store", other / "q" / "s0" / "3")
        (other / "q" / "s0" / "3" / "boot").mkdir()
        (other / "q" / "s0" / "3" / "boot" / "committed").write_text(TEXT)
    (others[0] / "erased-1").mkdir()
    # One that nobody uses any more, as a container has left it.
    shutil.copytree(tmp_path / "store", stores.parent / f"{'1' * 16}-counts" / "q" / "s0" / "3")
    # What a run that was stopped has left.
    shutil.copytree(tmp_path / "store", stores / "erased-0" / "s0" / "3")
    done = erase(life, backends=[Backend(str(tmp_path / "second"))], local_dirs=[str(tmp_path / "disk")])
    assert files_with(TEXT, tmp_path / "root", tmp_path / "second") == []
    assert done.stores == 2
    assert sorted(path.name for path in stores.iterdir()) == ["another"]
    assert [sorted(path.name for path in other.iterdir()) for other in others] == [["erased-1", "q"], ["q"]]
    # The scan tells of the other root, and not of the other operator.
    assert not any("more-counts" in it.where for it in done.receipt.found)
    assert any(f"{'0' * 16}-counts" in it.where for it in done.receipt.found)
    # Another query's store is not touched, and the receipt says that it has the key.
    assert {it.kind for it in done.receipt.found} == {"local store"}
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
    # Also where only a snapshot tells, or what follows may be an attempt that failed.
    life.batch()
    life.settle()
    with pytest.raises(UsageError, match="newest state"):
        erase(life)


def test_an_attempt_that_failed_may_not_be_the_newest_state(life: Life) -> None:
    """The tombstone is an attempt's; the committed checkpoint before it has the key."""
    life.batch({JANE: Row(1)})
    life.settle()
    life.batch({JANE: None})
    life.settle()
    with pytest.raises(UsageError, match="newest state"):
        erase(life)
    life.batch()
    life.settle()
    assert erase(life).receipt.absent


def test_a_bucket_that_did_not_change_since_goes_by_the_request_that_is_done(life: Life) -> None:
    """The checkpoint before the tombstone is not the committed one, as other buckets went on."""
    life.batch({JANE: Row(1)})
    life.settle()
    life.batch({JANE: None})
    life.settle()
    folder = EraseFolder(Folder(str(life.local / PLACE)))
    erase_keys(str(life.local / "root"), KEYS, operator="counts")
    request = folder.request(1)
    # The batch of the tombstone may not be committed.
    folder.note_done(1, replace(done_record(request.id), heartbeat=life.pointers[-1].heartbeats - 1))
    with pytest.raises(UsageError, match="newest state"):
        erase(life)
    folder.take_back(1)
    folder.note_done(1, replace(done_record(request.id), heartbeat=life.pointers[-1].heartbeats))
    assert erase(life).receipt.absent
    assert life.restored(life.pointers[-1]) == {}


def test_young_tombstones_are_refused_as_deltas_may_be_inline(tmp_path: Path) -> None:
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
    # Batches that Spark retains: none of them has the key inline, or from elsewhere.
    for pointer, model in list(zip(life.pointers, life.models, strict=True))[-3:]:
        assert life.restored(pointer) == model == without(model)
    life.settle()
    for store in life.stores:
        store.close()


def test_requests_name_the_keys_no_more_and_must_be_done(life: Life) -> None:
    lived(life)
    root = str(life.local / "root")
    both = {"name": [TEXT, "Somebody else"], "x": [1.0, 2.0]}
    erase_keys(root, both, operator="counts")
    with pytest.raises(UsageError, match=r"erase request 1 .* is not done"):
        erase(life)
    folder = EraseFolder(Folder(str(life.local / PLACE)))
    (status,) = erase_status(root, operator="counts")
    request = folder.request(1)
    record = done_record(request.id)
    folder.note_done(1, record)
    done = erase(life)
    assert (done.requests, done.receipt.absent) == (1, True)
    left = folder.request(1)
    assert left.keys.to_pydict() == {"name": ["Somebody else"], "x": [2.0]}
    assert (left.id, status.state) == (request.id, "waiting")


def done_record(request_id: str) -> EraseDone:
    return EraseDone(request_id, 2, 1, 2, 3, 4)


def test_a_query_that_runs_is_refused(life: Life) -> None:
    lived(life)
    run = Lease(Folder(str(life.local / PLACE)), RunIdentity("app", "plan", "query"), LEASE_MS_MIN)
    run.hold()
    stop = keep_renewing(life)
    try:
        with pytest.raises(LiveRunError, match="stop the query first"):
            erase(life)
    finally:
        stop()
    assert files_with(TEXT, life.local / "root")
    # It was killed: nobody renews its lease.
    assert erase(life).receipt.absent
    with pytest.raises(LiveRunError):
        run.check()


def keep_renewing(life: Life) -> Callable[[], None]:
    """Another process of the run goes on to renew its lease."""
    over, log = threading.Event(), LeaseLog(Folder(str(life.local / PLACE)))

    def renew() -> None:
        while not over.is_set():
            time.sleep(0.1)
            found = log.newest()
            assert found is not None
            log.append(found, replace(found.record, nonce=uuid.uuid4().hex))

    thread = threading.Thread(target=renew)
    thread.start()

    def stop() -> None:
        over.set()
        thread.join()

    return stop


def test_the_lease_is_free_afterwards_and_a_hold_is_respected(life: Life) -> None:
    lived(life)
    folder = Folder(str(life.local / PLACE))
    hold = Hold.place(folder, "a savepoint")
    with pytest.raises(LiveRunError, match="copied by a savepoint"):
        erase(life)
    hold.release()
    erase(life)
    # At once: nobody waits for it to lapse.
    Lease(folder, RunIdentity("app", "plan", "query"), LEASE_MS_MIN).hold()


def test_a_root_is_read_where_a_query_wrote_last_and_not_where_keys_were_erased(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = []
    for name in ("q1", "q2"):
        made = Job(tmp_path / "root", tmp_path, query_id=name, buckets=1, retained=100)
        for row in (Row(1), Row(2), None, None, None):
            made.batch({JANE: row, ("x", 1.0): Row(3)})
        jobs.append(made)

    def read() -> str:
        with open_state(tmp_path / "root", hold=False) as state:
            return state.path.rsplit("/", 1)[1]

    def erased(name: str, text: str) -> int:
        keys = {"name": [text], "x": [1.0]}
        root = str(tmp_path / "root")
        return erase_history(root, keys, operator="counts", query_folder=name, inline_batches=0).files

    assert read() == "q2"
    for name in ("q1", "q2", "q1"):
        erased(name, TEXT)
        assert read() == "q2", name
    # It was refused: it held the lease all the same.
    with pytest.raises(UsageError, match="newest state"):
        erased("q1", "x")
    assert read() == "q2"
    assert main(["verify", str(tmp_path / "root")]) == 0
    assert "unknown" not in capsys.readouterr().out
    # The query goes on.
    Lease(jobs[0].folder, RunIdentity("app", "plan", "query"), LEASE_MS_MIN).hold()
    assert read() == "q1"
    for made in jobs:
        made.close()


def test_a_damaged_file_stops_it_before_anything_is_changed(life: Life) -> None:
    lived(life)
    path = max((life.local / PLACE / "3").iterdir())
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    before = {it: it.read_bytes() for it in (life.local / PLACE / "3").iterdir()}
    with pytest.raises(CorruptFileError, match=path.name):
        erase(life)
    assert {it: it.read_bytes() for it in (life.local / PLACE / "3").iterdir()} == before


def test_what_cannot_be_done(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
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


# -- stopped anywhere --------------------------------------------------------------------------------


class Faults:
    """Lets some operations of the disk pass, and fails all that come after, as when the process is killed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left = -1
        self.hit = False
        # How many operations were left before each file got its name: one that fails there is not finished.
        self.named_at: list[int] = []
        for owner, names in (
            (LocalFileSystem, ("ls", "info", "cat_file", "rm_file")),
            (os, ("replace", "fsync", "link")),
        ):
            for name in names:
                self._wrap(monkeypatch, owner, name)

    def _wrap(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if self.left == 0:
                self.hit = True
                raise OSError(errno.EIO, f"{name} fails on purpose")
            if name == "replace":
                self.named_at.append(self.left)
            self.left -= self.left > 0
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)


def sampled(steps: int) -> list[int]:
    """All of them in the soak; else some, from end to end."""
    return list(range(steps)) if SOAK else [steps * at // 24 for at in range(24)]


def test_stopped_at_every_step_and_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until it is done, each batch has the key as it had it or not at all, and the newest never has it."""
    life = life_at(tmp_path / "made")
    lived(life)
    erase_keys(str(life.local / "root"), KEYS, operator="counts")
    folder = EraseFolder(Folder(str(life.local / PLACE)))
    folder.note_done(1, done_record(folder.request(1).id))
    shutil.copytree(life.local / "root", tmp_path / "as it was")
    faults, partly, unfinished = Faults(monkeypatch), 0, 0
    faults.left = 1 << 40
    erase(life)
    steps = (1 << 40) - faults.left
    assert steps > 100
    named = [(1 << 40) - left for left in faults.named_at]
    # Listings and reads come first, and change nothing.
    for step in sampled(steps) if SOAK else sorted({*sampled(steps)[::2], *named}):
        shutil.rmtree(life.local / "root")
        shutil.copytree(tmp_path / "as it was", life.local / "root")
        faults.hit, faults.left = False, step
        with pytest.raises((StorageError, OSError)):
            erase(life)
        assert faults.hit
        faults.left = -1
        left = files_with(TEXT, life.local / "root")
        partly += 0 < len(left) < 8
        for pointer, model in zip(life.pointers, life.models, strict=True):
            assert life.restored(pointer) in (model, without(model)), f"step {step}"
        # Its lease lapses.
        shutil.rmtree(life.local / PLACE / "lease", ignore_errors=True)
        unfinished += len(list((life.local / "root").rglob(".tmp-*")))
        assert erase(life).receipt.absent, f"step {step}"
        assert list((life.local / "root").rglob(".tmp-*")) == []
        assert files_with(TEXT, life.local / "root") == []
        for pointer, model in zip(life.pointers, life.models, strict=True):
            assert life.restored(pointer) == without(model)
        while len(life.stores) > 1:
            life.stores.pop().close()
    assert partly > 3
    assert unfinished > 3
    life.settle()
    life.store.close()


def test_what_a_killed_run_has_left_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of each kind of file that it writes, in each backend, and copies of files on this machine."""
    life = life_at(tmp_path, PLACE, "other/counts/q")
    lived(life)
    life.settle()
    for place, folder in ((PLACE, "3"), (PLACE, "."), (PLACE, "erase"), (PLACE, "lease"), ("other/counts/q", "3")):
        (tmp_path / place / folder).mkdir(exist_ok=True)
        (tmp_path / place / folder / f".tmp-{uuid.uuid4().hex}-any").write_text(TEXT)
    # Not its own: a batch and somebody who copies write these.
    for folder in ("spill", "holds"):
        (tmp_path / PLACE / folder).mkdir(exist_ok=True)
        (tmp_path / PLACE / folder / ".tmp-any").write_text("")
    local = tmp_path / "local"
    local.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(local))
    with subprocess.Popen(["true"]) as dead:
        pass
    mine = re.sub(r"-\d+-\d*-", f"-{dead.pid}-1-", made_by_a_run().name, count=1)
    for name in (mine, f"{mine}-2", "spark_state_ext-keys-of-mine"):
        (local / name).mkdir()
        (local / name / "copy").write_text(TEXT)
    (local / f"{mine}-link").symlink_to(local / "spark_state_ext-keys-of-mine")
    with scratch_with_keys() as alive:
        done = erase(life, backends=[Backend(str(tmp_path / "other"))])
        assert alive.exists()
    assert done.receipt.found == ()
    assert sorted(it.name for it in tmp_path.rglob(".tmp-*")) == [".tmp-any", ".tmp-any"]
    assert sorted(it.name for it in local.iterdir()) == [f"{mine}-link", "spark_state_ext-keys-of-mine"]
    shutil.rmtree(tmp_path / PLACE / "spill")
    shutil.rmtree(tmp_path / PLACE / "holds")
    assert erase(life, backends=[Backend(str(tmp_path / "other"))]).receipt.absent
    life.store.close()


def made_by_a_run() -> Path:
    with scratch_with_keys() as folder:
        return folder


def test_files_are_written_anew_in_the_order_of_their_versions(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a tombstone might go before what it removes."""
    lived(life)
    order: list[tuple[int, bool]] = []
    put_file = Folder.put_file

    def noted(self: Folder, name: str, path: Any) -> None:
        parsed = parse_file_name(name)
        if parsed is not None:
            order.append((parsed[0].version, parsed[1] == SNAPSHOT))
        put_file(self, name, path)

    monkeypatch.setattr(Folder, "put_file", noted)
    erase(life)
    assert len(order) > 5
    assert order == sorted(order)


def test_what_a_header_tells_stays_as_it_was(life: Life) -> None:
    lived(life)
    files = Folder(str(life.local / PLACE)).child("3")

    def told() -> dict[str, Any]:
        found = {}
        for name in files.names():
            parsed = parse_file_name(name)
            assert parsed is not None
            found[name] = read_announced(files, *parsed).header
        return found

    before = told()
    erase(life)
    assert told() == before
    assert all(isinstance(it.writer, Writer) and it.writer.host == WRITER.host for it in before.values())
