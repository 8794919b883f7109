"""``python -m spark_state_ext savepoint``: what it reports about a savepoint, and what it deletes."""

from __future__ import annotations

import contextlib
import itertools
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from core_support import first_pointer
from savepoint_folders import ID, SCHEMA, savepoint_at

from arrow_schemas import CheckpointRef, LineageEntry, OperatorFile
from arrow_schemas.checksum import seal_document
from arrow_schemas.operator import operator_file_name
from arrow_schemas.savepoint import MANIFEST_NAME, NATIVE, SavedBucket, SavedFile, SavepointHeader, SavepointManifest
from spark_state_ext.__main__ import main
from spark_state_ext.beginning.detachment import detach
from spark_state_ext.engine.job import Job
from spark_state_ext.engine.options import StateOptions
from spark_state_ext.engine.start_from import Savepoint
from spark_state_ext.errors import ClaimedError, LineageError, MissingCheckpointError, NotClaimableError
from spark_state_ext.files.folder import Folder
from spark_state_ext.savepoints import claims
from spark_state_ext.savepoints.claims import (
    SavepointClaim,
    claim_savepoint,
    delete_claimed_savepoint,
    is_consumed,
    read_claim,
    refuse_claimed,
    release_claim,
)
from spark_state_ext.savepoints.start_records import StartRecord, note_detached, note_start
from spark_state_ext.savepoints.writer import write_manifest
from tests.helpers.jobs import job_of


@pytest.fixture
def savepoint(tmp_path: Path) -> Folder:
    return savepoint_at(tmp_path / "savepoint")


def start_query(root: Path, name: str, savepoint: Folder, mode: str = "no_claim") -> Folder:
    query_folder = Folder(str(root)).child("counts", name)
    note_start(query_folder, StartRecord("savepoint", savepoint.root, ID, 7, mode, "counts"))
    return query_folder


def make_job(root: str, savepoint: Folder) -> Job:
    """Return a job that claims the savepoint."""
    start = Savepoint(savepoint.root, mode="claim")
    options = StateOptions(root=root, operator="counts", buckets=2, start_from=start, clean_up=True)
    return job_of(options, key_schema=SCHEMA, state_schema=SCHEMA, columns=("n",))


def read_status(savepoint: Folder, root: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    (root / "counts").mkdir(parents=True, exist_ok=True)
    assert main(["savepoint", "status", savepoint.root, "--root", str(root), "-o", "json"]) == 0
    status: dict[str, Any] = json.loads(capsys.readouterr().out)
    status["verdict"] = f"deletable: {'yes' if status['deletable'] else 'no'}, because {status['because']}"
    return status


def test_status_reports_the_contents_of_a_savepoint(
    savepoint: Folder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = read_status(savepoint, tmp_path / "root", capsys)
    assert (status["id"], status["form"], status["release"], status["batch"]) == (ID, "native", "0.2.0", 7)
    assert status["made"] == "2023-11-14T22:13:20+00:00"
    assert status["operators"] == [{"operator": "counts", "buckets": 2, "rows_max": 10, "files": 2, "bytes": 8}]
    assert "deletable: yes, because no query below" in status["verdict"]


def test_a_savepoint_is_deletable_once_every_query_is_detached(
    savepoint: Folder, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "root"
    first, second = (start_query(root, name, savepoint) for name in ("first", "second"))
    note_detached(first)
    status = read_status(savepoint, root, capsys)
    assert "deletable: no, because 1 of 2 queries" in status["verdict"]
    assert second.root in status["because"]
    assert {query["query_folder"]: query["detached"] for query in status["started"]} == {
        first.root: True,
        second.root: False,
    }
    assert main(["savepoint", "delete", savepoint.root, "--root", str(root)]) == 3
    assert "NotClaimableError" in capsys.readouterr().err
    note_detached(second)
    monkeypatch.chdir(tmp_path)
    assert main(["savepoint", "status", "savepoint", "--root", "root"]) == 0
    capsys.readouterr()
    assert "deletable: yes, because all 2 queries" in read_status(savepoint, root, capsys)["verdict"]
    assert main(["savepoint", "delete", savepoint.root, "--root", str(root)]) == 0
    assert not (tmp_path / "savepoint").exists()


@pytest.mark.parametrize("root", ["nowhere", "root/counts", "root/counts/mine", "relative"])
def test_a_path_that_is_not_an_absolute_root_is_refused(
    savepoint: Folder, tmp_path: Path, capsys: pytest.CaptureFixture[str], root: str
) -> None:
    query_folder = start_query(tmp_path / "root", "mine", savepoint)
    query_folder.put(operator_file_name(0), OperatorFile("counts", "mine", 2, SCHEMA, SCHEMA).encode())
    path = root if root == "relative" else str(tmp_path / root)
    for verb in ("status", "delete"):
        assert main(["savepoint", verb, savepoint.root, "--root", path]) == 2
        assert "UsageError" in capsys.readouterr().err
    assert savepoint.names()


def test_delete_keeps_files_that_the_manifest_does_not_name(savepoint: Folder, tmp_path: Path) -> None:
    savepoint.child("counts", "1").put("mine.txt", b"mine")
    assert main(["savepoint", "delete", savepoint.root]) == 3, "without a root, it is unknown which queries need it"
    assert main(["savepoint", "delete", savepoint.root, "--root", str(tmp_path)]) == 0
    assert [path.name for path in (tmp_path / "savepoint").rglob("*") if path.is_file()] == ["mine.txt"]


def test_no_query_starts_from_a_savepoint_that_is_being_deleted(
    savepoint: Folder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    claim_savepoint(savepoint, SavepointClaim(ID, claims.DELETES, "command"), ())
    checks = itertools.count()

    def stop_in_the_middle() -> None:
        if next(checks) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        delete_claimed_savepoint(savepoint, "command", stop_in_the_middle)

    error = "is being deleted by savepoint delete: start from another"
    with pytest.raises(ClaimedError, match=error):
        claim_savepoint(savepoint, SavepointClaim(ID, "/mine", "mine"), ())
    with pytest.raises(ClaimedError, match=error):
        refuse_claimed(savepoint)
    assert "savepoint delete has begun to delete it" in read_status(savepoint, tmp_path / "root", capsys)["because"]
    assert main(["savepoint", "delete", savepoint.root]) == 0
    assert not (tmp_path / "savepoint").exists()


@pytest.mark.parametrize("last", ["files", "manifest"])
def test_a_stopped_deletion_is_finished_or_its_claim_is_dropped(savepoint: Folder, tmp_path: Path, last: str) -> None:
    claim_savepoint(savepoint, SavepointClaim(ID, claims.DELETES, "command"), ())
    start_query(tmp_path / "root", "mine", savepoint)
    root = str(tmp_path / "root")
    if last == "manifest":
        savepoint.remove(MANIFEST_NAME)
        assert main(["savepoint", "delete", savepoint.root, "--root", root]) == 0
    else:
        assert main(["savepoint", "delete", savepoint.root, "--root", root]) == 3, "a query started from it"
    assert read_claim(savepoint) is None


def test_a_savepoint_that_is_not_deleted_is_not_claimed_either(savepoint: Folder, tmp_path: Path) -> None:
    start_query(tmp_path / "root", "mine", savepoint)
    assert main(["savepoint", "delete", savepoint.root, "--root", str(tmp_path / "root")]) == 3
    assert read_claim(savepoint) is None


def test_a_claim_is_reported_blocks_other_claims_and_can_be_released(
    savepoint: Folder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = SavepointClaim(ID, "/root/counts/mine", "mine")
    assert claim_savepoint(savepoint, mine, ()) == claim_savepoint(savepoint, mine, ()) == mine
    # Another attempt at the same first batch has another id.
    assert claim_savepoint(savepoint, replace(mine, id="again"), {"mine"}) == mine
    with pytest.raises(ClaimedError, match="is claimed by the query at /root/counts/mine"):
        claim_savepoint(savepoint, SavepointClaim(ID, "/root/counts/other", "other"), ())
    assert (
        "deletable: no, because /root/counts/mine has claimed it"
        in read_status(savepoint, tmp_path / "root", capsys)["verdict"]
    )
    assert main(["savepoint", "release", savepoint.root]) == 0
    assert read_claim(savepoint) is None
    assert main(["savepoint", "release", savepoint.root]) == 3


def test_files_of_an_operator_that_no_query_started_from_stay(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, root = Folder(str(tmp_path / "savepoint")), tmp_path / "root"
    buckets, names = [], ("counts", "sessions")
    for name in names:
        ref = CheckpointRef(3, "0" * 32)
        file = SavedFile(f"{ref}.snapshot.arrow", 4, "blkcrcs=" + "0" * 32)
        folder.child(name, "0").put(file.name, b"rows")
        pointer = replace(first_pointer(0), operator=name, buckets=1, lineage=(LineageEntry(ref, 4, 1),), rows=5)
        buckets.append(SavedBucket(name, 0, pointer, (file,)))
    operators = {name: OperatorFile(name, "query", 1, SCHEMA, SCHEMA) for name in names}
    write_manifest(
        folder, SavepointManifest(SavepointHeader(ID, NATIVE, 0, operators, "0.2.0", "query", 7), tuple(buckets))
    )
    note_detached(start_query(root, "mine", folder))
    assert (
        "deletable: no, because no query has started from its operators sessions"
        in read_status(folder, root, capsys)["verdict"]
    )
    # With a claim, each operator deletes its own files.
    claim_savepoint(folder, SavepointClaim(ID, "/root/counts/mine", "mine"), ())
    assert delete_claimed_savepoint(folder, "mine", lambda: None, "counts") == 1
    assert folder.child("sessions", "0").names() == [buckets[1].files[0].name]
    assert not folder.child("counts", "0").names()
    assert read_claim(folder) is not None
    assert delete_claimed_savepoint(folder, "mine", lambda: None, "sessions") == 1
    assert not (tmp_path / "savepoint").exists()


def test_delete_refuses_a_manifest_that_names_files_of_another_query(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    savepoint, root, name = Folder(str(tmp_path / "from" / "savepoint")), tmp_path / "root", "../../root/counts/q"
    ref = CheckpointRef(3, "0" * 32)
    file = SavedFile(f"{ref}.snapshot.arrow", 4, "blkcrcs=" + "0" * 32)
    folder = Folder(str(root / "counts" / "q" / "0"))
    folder.put(file.name, b"rows")
    pointer = replace(first_pointer(0), operator=name, buckets=1, lineage=(LineageEntry(ref, 4, 1),), rows=5)
    operators = {name: OperatorFile(name, "query", 1, SCHEMA, SCHEMA)}
    with monkeypatch.context() as unchecked:
        for module in ("arrow_schemas.savepoint", "arrow_schemas.operator"):
            unchecked.setattr(f"{module}.is_operator_name", lambda name: True)
        header = SavepointHeader(ID, NATIVE, 0, operators, "0.2.0", "query", 7)
        write_manifest(savepoint, SavepointManifest(header, (SavedBucket(name, 0, pointer, (file,)),)))
    assert main(["savepoint", "delete", savepoint.root, "--root", str(root)]) == 3
    assert "CorruptFileError" in capsys.readouterr().err
    assert folder.names() == [file.name]


class _StoppedError(Exception):
    pass


@pytest.mark.parametrize("stops_after", range(8))
def test_an_interrupted_deletion_of_a_claimed_savepoint_can_be_finished(
    savepoint: Folder, tmp_path: Path, stops_after: int
) -> None:
    claim_savepoint(savepoint, SavepointClaim(ID, "/root/counts/mine", "mine"), ())
    assert delete_claimed_savepoint(savepoint, "another", lambda: None) == 0
    removed = 0
    remove = Folder.remove

    def remove_or_stop(folder: Folder, name: str) -> None:
        nonlocal removed
        if removed == stops_after:
            raise _StoppedError
        removed += 1
        remove(folder, name)

    with pytest.MonkeyPatch.context() as patched, contextlib.suppress(_StoppedError):
        patched.setattr(Folder, "remove", remove_or_stop)
        delete_claimed_savepoint(savepoint, "mine", lambda: None)
    if 0 < stops_after < 4:
        assert main(["savepoint", "release", savepoint.root]) == 3
    delete_claimed_savepoint(savepoint, "mine", lambda: None)
    assert [path for path in (tmp_path / "savepoint").rglob("*") if path.is_file()] == []


def test_a_process_late_to_delete_a_claimed_savepoint_leaves_its_successor(
    savepoint: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each process of a query may delete it. One process sleep; when it continues, another savepoint is there."""
    # It sleep for longer than the interval of its checks.
    monkeypatch.setattr(claims, "_CHECK_S", 0.0)
    claim_savepoint(savepoint, SavepointClaim(ID, "/root/counts/mine", "mine"), ())
    backup, slept = tmp_path / "backup", []
    shutil.copytree(savepoint.root, backup, ignore=shutil.ignore_patterns("claim"))

    def sleep() -> None:
        # This is called before and after the process writes its mark.
        slept.append(True)
        if len(slept) == wakes:
            assert delete_claimed_savepoint(savepoint, "mine", lambda: None) == 2
            assert not Path(savepoint.root).exists()
            shutil.copytree(backup, savepoint.root)

    for wakes in (1, 2, 3, 4):
        slept.clear()
        claim_savepoint(savepoint, SavepointClaim(ID, "/root/counts/mine", "mine"), ())
        delete_claimed_savepoint(savepoint, "mine", sleep)
        assert len(slept) >= wakes
        assert [entry.name for entry in savepoint.tree()] == [entry.name for entry in Folder(str(backup)).tree()]
        shutil.rmtree(savepoint.root)
        shutil.copytree(backup, savepoint.root)


@pytest.mark.parametrize("stops_at", ["mark", "deleting"])
def test_a_claim_released_while_its_owner_starts_deleting_has_one_owner(savepoint: Folder, stops_at: str) -> None:
    """Either the release sees the owner's mark, or the owner sees the release and deletes no files of the next owner."""
    mine, other = (SavepointClaim(ID, f"/root/counts/{name}", name) for name in ("mine", "other"))
    claim_savepoint(savepoint, mine, ())
    create, waits = Folder.create, [True]

    def release_first(folder: Folder, name: str, data: bytes) -> bool:
        # The claim is released just before the owner writes its mark.
        if name == "consumed.json" and stops_at == "mark" and waits.pop():
            release_claim(savepoint)
            claim_savepoint(savepoint, other, ())
        return create(folder, name, data)

    def try_to_release() -> None:
        if stops_at == "deleting" and is_consumed(savepoint) and waits:
            waits.clear()
            with pytest.raises(NotClaimableError, match="has begun to delete it"):
                release_claim(savepoint)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Folder, "create", release_first)
        deleted = delete_claimed_savepoint(savepoint, "mine", try_to_release)
    assert not waits
    if stops_at == "deleting":
        assert deleted == 2
        return
    assert deleted == 0
    # The next owner can start from the whole savepoint, and delete it later.
    assert claim_savepoint(savepoint, other, ()) == other
    assert delete_claimed_savepoint(savepoint, "other", lambda: None) == 2


def test_a_claim_to_a_replaced_savepoint_deletes_no_files_and_can_be_released(savepoint: Folder) -> None:
    claim_savepoint(savepoint, SavepointClaim("34" * 16, "/root/counts/mine", "mine"), ())
    before = [entry.name for entry in savepoint.tree()]
    assert delete_claimed_savepoint(savepoint, "mine", lambda: None) == 0
    assert not is_consumed(savepoint)
    assert [entry.name for entry in savepoint.tree()] == before
    assert main(["savepoint", "release", savepoint.root]) == 0
    assert read_claim(savepoint) is None


def test_the_claim_of_the_last_attempt_at_the_first_batch_is_consumed(savepoint: Folder, tmp_path: Path) -> None:
    root = str(tmp_path / "root")
    claim_savepoint(savepoint, SavepointClaim(ID, f"{root}/counts/first", "first"), ())
    # The first attempt failed, and the next one has another query folder.
    claim = claim_savepoint(savepoint, SavepointClaim(ID, f"{root}/counts/second", "second"), {"first"})
    query_folder = Folder(root).child("counts", "second")
    note_start(query_folder, StartRecord("savepoint", savepoint.root, ID, 7, "claim", "counts", claim.id))
    detach(make_job(root, savepoint), query_folder, lambda: None)
    assert not Path(savepoint.root).exists()


def test_a_savepoint_moved_before_the_first_commit_is_still_the_same_source(savepoint: Folder, tmp_path: Path) -> None:
    query_folder = Folder(str(tmp_path / "root")).child("counts", "mine")
    claim_savepoint(savepoint, SavepointClaim(ID, query_folder.root, "mine"), ())
    note_start(query_folder, StartRecord("savepoint", savepoint.root, ID, 7, "claim", "counts", "mine"))
    moved = tmp_path / "moved"
    Path(savepoint.root).rename(moved)
    again = StartRecord("savepoint", str(moved), ID, 7, "claim", "counts", "mine")
    note_start(query_folder, again)
    for other in (replace(again, source_id="34" * 16), replace(again, mode="no_claim")):
        with pytest.raises(LineageError, match="start the query again from the earlier source"):
            note_start(query_folder, other)
    detach(make_job(str(tmp_path / "root"), Folder(str(moved))), query_folder, lambda: None)
    assert not moved.exists()


def test_an_owner_that_writes_its_mark_during_a_release_keeps_its_claim(savepoint: Folder) -> None:
    mine = SavepointClaim(ID, "/root/counts/mine", "mine")
    claim_savepoint(savepoint, mine, ())
    remove = Folder.remove

    def mark_first(folder: Folder, name: str) -> None:
        if name == "claim.json":
            # The release has already looked for the owner's mark, and has not found it.
            assert folder.create("consumed.json", seal_document({"format": 1}))
        remove(folder, name)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Folder, "remove", mark_first)
        with pytest.raises(NotClaimableError, match="has begun to delete it"):
            release_claim(savepoint)
    assert read_claim(savepoint) == mine


def test_release_fails_if_the_owner_deletes_the_savepoint_meanwhile(savepoint: Folder) -> None:
    """When the release looks again, both the mark and the savepoint are gone. The simulator found this case."""
    claim_savepoint(savepoint, SavepointClaim(ID, "/root/counts/mine", "mine"), ())
    remove, waits = Folder.remove, [True]

    def delete_first(folder: Folder, name: str) -> None:
        if name == "claim.json" and waits:
            waits.clear()
            assert delete_claimed_savepoint(savepoint, "mine", lambda: None) == 2
        remove(folder, name)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Folder, "remove", delete_first)
        with pytest.raises(MissingCheckpointError, match=r"no longer a savepoint at .* deleted by /root/counts/mine"):
            release_claim(savepoint)
    assert not Path(savepoint.root).exists()


def test_a_savepoint_that_is_being_deleted_cannot_be_claimed(savepoint: Folder) -> None:
    savepoint.child("claim").put("consumed.json", seal_document({"format": 1}))
    with pytest.raises(ClaimedError, match="is being deleted"):
        claim_savepoint(savepoint, SavepointClaim(ID, "/root/counts/mine", "mine"), ())
