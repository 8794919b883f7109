"""``python -m spark_state_ext savepoint``: what it says of a savepoint, and what it deletes."""

from __future__ import annotations

import contextlib
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
from arrow_schemas.savepoint import NATIVE, SavedBucket, SavedFile, SavepointHeader, SavepointManifest
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
    release_claim,
)
from spark_state_ext.savepoints.start_records import StartRecord, note_detached, note_start
from spark_state_ext.savepoints.writer import write_manifest
from tests.helpers.jobs import job_of


@pytest.fixture
def savepoint(tmp_path: Path) -> Folder:
    return savepoint_at(tmp_path / "savepoint")


def _started(root: Path, name: str, savepoint: Folder, mode: str = "no_claim") -> Folder:
    query_folder = Folder(str(root)).child("counts", name)
    note_start(query_folder, StartRecord("savepoint", savepoint.root, ID, 7, mode, "counts"))
    return query_folder


def _job(root: str, savepoint: Folder) -> Job:
    """One that claims the savepoint."""
    start = Savepoint(savepoint.root, mode="claim")
    options = StateOptions(root=root, operator="counts", buckets=2, start_from=start, clean_up=True)
    return job_of(options, key_schema=SCHEMA, state_schema=SCHEMA, columns=("n",))


def _status(savepoint: Folder, root: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    (root / "counts").mkdir(parents=True, exist_ok=True)
    assert main(["savepoint", "status", savepoint.root, "--root", str(root), "-o", "json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    found["judged"] = f"deletable: {'yes' if found['deletable'] else 'no'}, because {found['because']}"
    return found


def test_it_says_what_is_in_it(savepoint: Folder, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = _status(savepoint, tmp_path / "root", capsys)
    assert (said["id"], said["form"], said["release"], said["batch"]) == (ID, "native", "0.2.0", 7)
    assert said["made"] == "2023-11-14T22:13:20+00:00"
    assert said["operators"] == [{"operator": "counts", "buckets": 2, "rows_max": 10, "files": 2, "bytes": 8}]
    assert "deletable: yes, because no query below" in said["judged"]


def test_it_may_go_once_every_query_is_detached(
    savepoint: Folder, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "root"
    first, second = (_started(root, name, savepoint) for name in ("first", "second"))
    note_detached(first)
    said = _status(savepoint, root, capsys)
    assert "deletable: no, because 1 of 2 queries" in said["judged"]
    assert second.root in said["because"]
    assert {it["query_folder"]: it["detached"] for it in said["started"]} == {first.root: True, second.root: False}
    assert main(["savepoint", "delete", savepoint.root, "--root", str(root)]) == 3
    assert "NotClaimableError" in capsys.readouterr().err
    note_detached(second)
    monkeypatch.chdir(tmp_path)
    assert main(["savepoint", "status", "savepoint", "--root", "root"]) == 0
    capsys.readouterr()
    assert "deletable: yes, because all 2 queries" in _status(savepoint, root, capsys)["judged"]
    assert main(["savepoint", "delete", savepoint.root, "--root", str(root)]) == 0
    assert not (tmp_path / "savepoint").exists()


@pytest.mark.parametrize("root", ["nowhere", "root/counts", "root/counts/mine", "relative"])
def test_below_a_root_that_is_none_nobody_would_be_found(
    savepoint: Folder, tmp_path: Path, capsys: pytest.CaptureFixture[str], root: str
) -> None:
    query_folder = _started(tmp_path / "root", "mine", savepoint)
    query_folder.put(operator_file_name(0), OperatorFile("counts", "mine", 2, SCHEMA, SCHEMA).encode())
    path = root if root == "relative" else str(tmp_path / root)
    for verb in ("status", "delete"):
        assert main(["savepoint", verb, savepoint.root, "--root", path]) == 2
        assert "UsageError" in capsys.readouterr().err
    assert savepoint.names()


def test_what_the_manifest_does_not_name_stays(savepoint: Folder, tmp_path: Path) -> None:
    savepoint.child("counts", "1").put("mine.txt", b"mine")
    assert main(["savepoint", "delete", savepoint.root]) == 3, "it is not known who needs it"
    assert main(["savepoint", "delete", savepoint.root, "--root", str(tmp_path)]) == 0
    assert [path.name for path in (tmp_path / "savepoint").rglob("*") if path.is_file()] == ["mine.txt"]


def test_a_claim_is_told_kept_and_released(
    savepoint: Folder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = SavepointClaim(ID, "/root/counts/mine", "mine")
    assert claim_savepoint(savepoint, mine, ()) == claim_savepoint(savepoint, mine, ()) == mine
    # An attempt at the same first batch under another name.
    assert claim_savepoint(savepoint, replace(mine, id="again"), {"mine"}) == mine
    with pytest.raises(ClaimedError, match="is claimed by the query at /root/counts/mine"):
        claim_savepoint(savepoint, SavepointClaim(ID, "/root/counts/other", "other"), ())
    assert (
        "deletable: no, because /root/counts/mine has claimed it"
        in _status(savepoint, tmp_path / "root", capsys)["judged"]
    )
    assert main(["savepoint", "release", savepoint.root]) == 0
    assert read_claim(savepoint) is None
    assert main(["savepoint", "release", savepoint.root]) == 3


def test_files_of_an_operator_that_was_not_started_stay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    note_detached(_started(root, "mine", folder))
    assert (
        "deletable: no, because no query has started from its operators sessions"
        in _status(folder, root, capsys)["judged"]
    )
    # The claim: each operator lets go of its own.
    claim_savepoint(folder, SavepointClaim(ID, "/root/counts/mine", "mine"), ())
    assert delete_claimed_savepoint(folder, "mine", lambda: None, "counts") == 1
    assert folder.child("sessions", "0").names() == [buckets[1].files[0].name]
    assert not folder.child("counts", "0").names()
    assert read_claim(folder) is not None
    assert delete_claimed_savepoint(folder, "mine", lambda: None, "sessions") == 1
    assert not (tmp_path / "savepoint").exists()


def test_a_manifest_cannot_have_files_of_another_query_deleted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    savepoint, root, name = Folder(str(tmp_path / "from" / "savepoint")), tmp_path / "root", "../../root/counts/q"
    ref = CheckpointRef(3, "0" * 32)
    file = SavedFile(f"{ref}.snapshot.arrow", 4, "blkcrcs=" + "0" * 32)
    theirs = Folder(str(root / "counts" / "q" / "0"))
    theirs.put(file.name, b"rows")
    pointer = replace(first_pointer(0), operator=name, buckets=1, lineage=(LineageEntry(ref, 4, 1),), rows=5)
    operators = {name: OperatorFile(name, "query", 1, SCHEMA, SCHEMA)}
    with monkeypatch.context() as unchecked:
        for module in ("arrow_schemas.savepoint", "arrow_schemas.operator"):
            unchecked.setattr(f"{module}.is_operator_name", lambda name: True)
        header = SavepointHeader(ID, NATIVE, 0, operators, "0.2.0", "query", 7)
        write_manifest(savepoint, SavepointManifest(header, (SavedBucket(name, 0, pointer, (file,)),)))
    assert main(["savepoint", "delete", savepoint.root, "--root", str(root)]) == 3
    assert "CorruptFileError" in capsys.readouterr().err
    assert theirs.names() == [file.name]


class _StoppedError(Exception):
    pass


@pytest.mark.parametrize("stops_after", range(8))
def test_deleting_what_was_claimed_goes_on_where_it_stopped(
    savepoint: Folder, tmp_path: Path, stops_after: int
) -> None:
    claim_savepoint(savepoint, SavepointClaim(ID, "/root/counts/mine", "mine"), ())
    assert delete_claimed_savepoint(savepoint, "another", lambda: None) == 0
    removed = 0
    remove = Folder.remove

    def stopping(folder: Folder, name: str) -> None:
        nonlocal removed
        if removed == stops_after:
            raise _StoppedError
        removed += 1
        remove(folder, name)

    with pytest.MonkeyPatch.context() as patched, contextlib.suppress(_StoppedError):
        patched.setattr(Folder, "remove", stopping)
        delete_claimed_savepoint(savepoint, "mine", lambda: None)
    if 0 < stops_after < 4:
        assert main(["savepoint", "release", savepoint.root]) == 3
    delete_claimed_savepoint(savepoint, "mine", lambda: None)
    assert [path for path in (tmp_path / "savepoint").rglob("*") if path.is_file()] == []


def test_who_is_late_to_delete_a_claimed_savepoint_leaves_what_came_after_it(
    savepoint: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of a query's processes may delete it. One sleeps; when it goes on, another savepoint is there."""
    # It sleeps for longer than it goes without looking.
    monkeypatch.setattr(claims, "_CHECK_S", 0.0)
    claim_savepoint(savepoint, SavepointClaim(ID, "/root/counts/mine", "mine"), ())
    backup, slept = tmp_path / "backup", []
    shutil.copytree(savepoint.root, backup, ignore=shutil.ignore_patterns("claim"))

    def sleeps() -> None:
        # Once before its mark, and once after that.
        slept.append(True)
        if len(slept) == wakes:
            assert delete_claimed_savepoint(savepoint, "mine", lambda: None) == 2
            assert not Path(savepoint.root).exists()
            shutil.copytree(backup, savepoint.root)

    for wakes in (1, 2, 3, 4):
        slept.clear()
        claim_savepoint(savepoint, SavepointClaim(ID, "/root/counts/mine", "mine"), ())
        delete_claimed_savepoint(savepoint, "mine", sleeps)
        assert len(slept) >= wakes
        assert [it.name for it in savepoint.tree()] == [it.name for it in Folder(str(backup)).tree()]
        shutil.rmtree(savepoint.root)
        shutil.copytree(backup, savepoint.root)


@pytest.mark.parametrize("stops_at", ["mark", "deleting"])
def test_a_claim_that_is_released_while_its_owner_begins_to_delete_is_his_or_the_next_ones(
    savepoint: Folder, stops_at: str
) -> None:
    """Who releases sees the owner's mark, or the owner sees that it was released: never are files deleted of another."""
    mine, other = (SavepointClaim(ID, f"/root/counts/{name}", name) for name in ("mine", "other"))
    claim_savepoint(savepoint, mine, ())
    made, waits = Folder.create, [True]

    def meanwhile(folder: Folder, name: str, data: bytes) -> bool:
        # Just before the owner's mark is there.
        if name == "consumed.json" and stops_at == "mark" and waits.pop():
            release_claim(savepoint)
            claim_savepoint(savepoint, other, ())
        return made(folder, name, data)

    def still_ours() -> None:
        if stops_at == "deleting" and is_consumed(savepoint) and waits:
            waits.clear()
            with pytest.raises(NotClaimableError, match="has begun to delete it"):
                release_claim(savepoint)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Folder, "create", meanwhile)
        deleted = delete_claimed_savepoint(savepoint, "mine", still_ours)
    assert not waits
    if stops_at == "deleting":
        assert deleted == 2
        return
    assert deleted == 0
    # It is the other's, who may start from all of it, and delete it in his turn.
    assert claim_savepoint(savepoint, other, ()) == other
    assert delete_claimed_savepoint(savepoint, "other", lambda: None) == 2


def test_a_claim_to_a_savepoint_that_was_replaced_deletes_nothing_and_is_released(savepoint: Folder) -> None:
    claim_savepoint(savepoint, SavepointClaim("34" * 16, "/root/counts/mine", "mine"), ())
    before = [it.name for it in savepoint.tree()]
    assert delete_claimed_savepoint(savepoint, "mine", lambda: None) == 0
    assert not is_consumed(savepoint)
    assert [it.name for it in savepoint.tree()] == before
    assert main(["savepoint", "release", savepoint.root]) == 0
    assert read_claim(savepoint) is None


def test_the_claim_of_another_attempt_at_the_first_batch_is_the_one_that_is_consumed(
    savepoint: Folder, tmp_path: Path
) -> None:
    root = str(tmp_path / "root")
    claim_savepoint(savepoint, SavepointClaim(ID, f"{root}/counts/first", "first"), ())
    # It failed, and the next one has another folder.
    made = claim_savepoint(savepoint, SavepointClaim(ID, f"{root}/counts/second", "second"), {"first"})
    query_folder = Folder(root).child("counts", "second")
    note_start(query_folder, StartRecord("savepoint", savepoint.root, ID, 7, "claim", "counts", made.id))
    detach(_job(root, savepoint), query_folder, lambda: None)
    assert not Path(savepoint.root).exists()


def test_a_savepoint_that_was_moved_before_the_first_batch_was_committed_is_the_same(
    savepoint: Folder, tmp_path: Path
) -> None:
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
    detach(_job(str(tmp_path / "root"), Folder(str(moved))), query_folder, lambda: None)
    assert not moved.exists()


def test_an_owner_who_marks_while_his_claim_is_released_keeps_it(savepoint: Folder) -> None:
    mine = SavepointClaim(ID, "/root/counts/mine", "mine")
    claim_savepoint(savepoint, mine, ())
    remove = Folder.remove

    def meanwhile(folder: Folder, name: str) -> None:
        if name == "claim.json":
            # The release has looked for his mark, and has not found it.
            assert folder.create("consumed.json", seal_document({"format": 1}))
        remove(folder, name)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Folder, "remove", meanwhile)
        with pytest.raises(NotClaimableError, match="has begun to delete it"):
            release_claim(savepoint)
    assert read_claim(savepoint) == mine


def test_a_claim_whose_owner_deletes_all_while_it_is_released_was_not_released(savepoint: Folder) -> None:
    """Found by the simulator: neither the mark nor the savepoint is there when the release looks again."""
    claim_savepoint(savepoint, SavepointClaim(ID, "/root/counts/mine", "mine"), ())
    remove, waits = Folder.remove, [True]

    def meanwhile(folder: Folder, name: str) -> None:
        if name == "claim.json" and waits:
            waits.clear()
            assert delete_claimed_savepoint(savepoint, "mine", lambda: None) == 2
        remove(folder, name)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Folder, "remove", meanwhile)
        with pytest.raises(MissingCheckpointError, match=r"no longer a savepoint at .* deleted by /root/counts/mine"):
            release_claim(savepoint)
    assert not Path(savepoint.root).exists()


def test_nobody_starts_from_a_savepoint_that_is_being_deleted(savepoint: Folder) -> None:
    savepoint.child("claim").put("consumed.json", seal_document({"format": 1}))
    with pytest.raises(ClaimedError, match="is being deleted"):
        claim_savepoint(savepoint, SavepointClaim(ID, "/root/counts/mine", "mine"), ())
