"""Which query folders are abandoned, and that no other folder is ever removed."""

from __future__ import annotations

import json
import os
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from arrow_schemas.operator import OperatorFile, operator_file_name
from spark_state_ext.__main__ import main as command_line
from spark_state_ext.cli.abandoned import (
    ABANDONED,
    NAMED,
    RECENT,
    UNKNOWN,
    FolderInfo,
    QueryFolders,
    judge_folder,
    list_folders,
    refuse_operators_without_metadata,
    remove_folder,
)
from spark_state_ext.errors import LiveRunError, UsageError
from spark_state_ext.files.folder import Folder
from spark_state_ext.files.operator_catalog import new_query_folder
from spark_state_ext.ownership.lease_record import Claim, LeaseRecord, RunIdentity

_DAY_S = 86_400.0
_LEASE = LeaseRecord(RunIdentity("application", "plan"), 1, 1, released=True, nonce="n")
_SCHEMA = json.dumps({"type": "struct", "fields": [{"name": "k", "type": "long", "nullable": True, "metadata": {}}]})


def main(arguments: list[str], later_s: float = 0.0) -> int:
    """Run the command at a later time."""
    now = time.time
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(time, "time", lambda: now() + later_s)
        return command_line(["abandoned", *arguments, "-o", "jsonl"])


def _encode_lease(claim: str = "") -> bytes:
    return replace(_LEASE, claim=Claim(claim, claim, 1) if claim else None).encode()


def _write_query(root: Path, query_folder: str, days: float = 100.0, operator: str = "count", claim: str = "") -> Path:
    """Write a query folder whose files are some days old."""
    folder = root / operator / query_folder
    (folder / "0").mkdir(parents=True)
    file = OperatorFile(operator, query_folder, 1, _SCHEMA, _SCHEMA)
    (folder / operator_file_name(0)).write_bytes(file.encode())
    (folder / "lease").mkdir()
    (folder / "lease" / f"{1:016d}.json").write_bytes(_encode_lease(claim))
    (folder / "0" / f"1_{'0' * 32}.delta.arrow").write_bytes(b"rows")
    _set_age(folder, days)
    return folder


def _set_age(folder: Path, days: float) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            os.utime(path, (time.time() - days * _DAY_S,) * 2)


def _write_checkpoint(folder: Path, query: str) -> str:
    folder.mkdir()
    (folder / "metadata").write_text(json.dumps({"id": query}))
    return str(folder)


def _make_info(newest_s: float | None, ours: bool = True) -> FolderInfo:
    return FolderInfo("count", "a", ours, 3, 10, newest_s, newest_s)


@pytest.mark.parametrize(
    ("info", "names", "complete", "verdict"),
    [
        (_make_info(0.0), {"a"}, False, NAMED),
        (_make_info(0.0), {"b"}, False, ABANDONED),
        (_make_info(0.0, ours=False), {"b"}, False, UNKNOWN),
        (_make_info(71 * _DAY_S), {"b"}, False, RECENT),
        (_make_info(71 * _DAY_S), {"b"}, True, ABANDONED),
        (_make_info(99.5 * _DAY_S), {"b"}, True, RECENT),
        # Clocks differ, so a file may come from the future. The age may also be unknown.
        (_make_info(101 * _DAY_S), {"b"}, True, RECENT),
        (_make_info(None), {"b"}, True, RECENT),
    ],
)
def test_a_query_folder_is_judged_by_its_name_and_age(
    info: FolderInfo, names: set[str], complete: bool, verdict: str
) -> None:
    assert judge_folder(info, QueryFolders(frozenset(names), complete), 100 * _DAY_S, 30 * _DAY_S) == verdict


def test_a_folder_that_only_pointers_can_name_is_kept_without_spark(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A query whose first tasks did not know its id has such a folder, and its checkpoint may be among those given."""
    query_folder = new_query_folder(1_700_000_000_000, "a" * 32)
    folder = _write_query(tmp_path / "root", query_folder)
    command = [str(tmp_path / "root"), "--checkpoint", _write_checkpoint(tmp_path / "checkpoint", "used"), "--remove"]
    assert main(command) == 0
    assert folder.exists()
    row = json.loads(capsys.readouterr().out)
    assert (row["verdict"], row["operator"], row["query"]) == ("unknown", "count", query_folder)
    assert row["reason"] == "needs --spark"
    (info,) = list_folders(Folder(str(tmp_path / "root")))
    assert judge_folder(info, QueryFolders(frozenset(), complete=True), time.time(), 0.0) == ABANDONED


def test_only_abandoned_folders_are_removed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tmp_path / "root"
    abandoned, other = _write_query(root, "gone"), _write_query(root, "gone", operator="sum")
    kept = [_write_query(root, "used"), _write_query(root, "recent", days=20)]
    (root / "count" / "notes").mkdir()
    (root / "count" / "notes" / "mine.txt").write_text("mine")
    (root / "elsewhere").mkdir()
    # These are next to the query folders, but are not query folders.
    for not_a_query in ("starting", "spill/t1700000000"):
        (root / "count" / not_a_query).mkdir(parents=True)
        (root / "count" / not_a_query / "file").write_text("used")
    # This folder's operator file is a copy, so it names another folder.
    kept.append(root / "count" / "copied")
    kept[-1].mkdir()
    (kept[-1] / operator_file_name(0)).write_bytes((abandoned / operator_file_name(0)).read_bytes())
    _set_age(root / "count" / "copied", 100)
    kept.append(root / "count" / "notes")
    command = [str(root), "--checkpoint", _write_checkpoint(tmp_path / "checkpoint", "used")]

    assert main(command) == 0
    output = capsys.readouterr()
    assert [tuple(json.loads(line).values())[:3] for line in output.out.splitlines()] == [
        ("unknown", "count", "copied"),
        ("abandoned", "count", "gone"),
        ("unknown", "count", "notes"),
        ("recent", "count", "recent"),
        ("named", "count", "used"),
        ("abandoned", "sum", "gone"),
    ]
    assert output.err.startswith("folders=6 abandoned=2 bytes=")
    assert abandoned.exists(), "a dry run removes nothing"

    assert main([*command, "--operator", "count", "--remove"]) == 0
    assert not abandoned.exists()
    assert other.exists(), "it belongs to another operator"
    assert all(folder.exists() for folder in kept)
    assert main([*command, "--remove", "--older-than", "19"]) == 0
    assert not other.exists()
    assert not (root / "count" / "recent").exists()
    assert (root / "count" / "used").exists()


@pytest.mark.parametrize("file", ["lease/0000000000000001.json", "lease.json", "spill/3-1700000000/part.arrow"])
def test_a_query_folder_without_an_operator_file_is_judged_like_others(tmp_path: Path, file: str) -> None:
    """A run that failed early leaves its lease or spilled rows, but no operator file."""
    abandoned, used, recent = (str(UUID(int=number)) for number in range(3))
    for query_folder in (abandoned, used, recent, "notes"):
        path = tmp_path / "root" / "count" / query_folder / file
        path.parent.mkdir(parents=True)
        path.write_bytes(_LEASE.encode_format_1(1) if path.name == "lease.json" else _LEASE.encode())
    other = tmp_path / "root" / "count" / str(UUID(int=9)) / "mine.txt"
    other.parent.mkdir()
    other.write_text("mine")
    _set_age(tmp_path / "root", 100)
    _set_age(tmp_path / "root" / "count" / recent, 2)
    root = Folder(str(tmp_path / "root"))
    query_folders = QueryFolders(frozenset([used]), complete=False)
    verdicts = {
        info.query_folder: judge_folder(info, query_folders, time.time(), 30 * _DAY_S) for info in list_folders(root)
    }
    assert verdicts == {abandoned: ABANDONED, used: NAMED, recent: RECENT, "notes": UNKNOWN, other.parent.name: UNKNOWN}
    command = [root.root, "--checkpoint", _write_checkpoint(tmp_path / "checkpoint", used), "--remove"]
    assert main(command) == 0
    assert {info.query_folder for info in list_folders(root)} == verdicts.keys() - {abandoned}


def test_a_folder_whose_lease_is_renewed_after_the_listing_is_kept(tmp_path: Path) -> None:
    folder = _write_query(tmp_path, "gone")
    root = Folder(str(tmp_path))
    (info,) = list_folders(root)
    assert info.lease_s is not None
    (folder / "lease" / f"{2:016d}.json").write_bytes(_encode_lease() + b"\n")
    with pytest.raises(LiveRunError, match="a query uses it"):
        remove_folder(root, info)
    assert len(list(folder.rglob("*.*"))) == 4


def test_an_interrupted_removal_can_be_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = _write_query(tmp_path, "gone")
    root = Folder(str(tmp_path))
    (info,) = list_folders(root)
    removed: list[str] = []

    def interrupt(self: Folder, name: str) -> None:
        removed.append(name)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Folder, "remove", interrupt)
        remove_folder(root, info)
    assert removed == [operator_file_name(0)]
    (rest,) = list_folders(root)
    assert rest.is_ours, "the file that identifies the folder is deleted last"
    remove_folder(root, rest)
    assert not folder.exists()


def test_a_location_that_is_not_a_checkpoint_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A misspelt location would otherwise make the state of its query look abandoned."""
    folder = _write_query(tmp_path / "root", "used")
    assert main([str(tmp_path / "root"), "--checkpoint", str(tmp_path / "none"), "--remove"]) == 2
    assert "UsageError" in capsys.readouterr().err
    assert folder.exists()
    for wrong in (["--older-than", "0.5", "--checkpoint", "/x"], []):
        assert main([str(tmp_path / "root"), *wrong]) == 2


@pytest.mark.parametrize(
    ("root", "more", "message"),
    [
        ("none", [], r"there is no folder \S+/none, or it is empty"),
        ("empty", [], r"there is no folder \S+/empty, or it is empty"),
        ("root", ["--operator", "cuont"], r"\S+/root has no operator 'cuont'; it has: count, sum\b"),
        ("root", ["--operator", "count", "--operator", "../x"], r"has no operator '../x'; it has: count, sum\b"),
        ("files", [], r"\S+/files has no folders, so it has no operators"),
        # The folders of an operator and of a query.
        ("root/count", [], r"give the root, not a folder below it: \S+/root/count/a has an operator file"),
        ("root/count", ["--operator", "count"], r"give the root, not a folder below it: "),
        ("root/count/a", [], r"give the root, not a folder below it: \S+/root/count/a has an operator file"),
    ],
)
def test_a_folder_that_is_not_a_root_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], root: str, more: list[str], message: str
) -> None:
    """The command would otherwise wrongly report no abandoned folders, or list buckets as queries."""
    _write_query(tmp_path / "root", "a")
    _write_query(tmp_path / "root", "b", operator="sum")
    for folder in ("empty", "files"):
        (tmp_path / folder).mkdir()
    (tmp_path / "files" / "notes.txt").write_text("mine")
    command = [str(tmp_path / root), "--checkpoint", _write_checkpoint(tmp_path / "checkpoint", "used"), *more]
    assert main(command) == 2
    output = capsys.readouterr()
    assert re.match("spark-state-ext abandoned: UsageError: .*" + message, output.err)
    assert not output.out


def test_a_checkpoint_whose_operators_spark_cannot_list_is_refused(tmp_path: Path) -> None:
    """Spark 3.5 writes no operator metadata; Spark 4's reader then returns no rows and raises no error."""
    checkpoint = Folder(_write_checkpoint(tmp_path / "checkpoint", "used"))
    refuse_operators_without_metadata(checkpoint)
    checkpoint.child("state", "0", "_metadata").put("metadata", b"v1")
    (tmp_path / "checkpoint" / "state" / "_notes").mkdir()
    refuse_operators_without_metadata(checkpoint)
    checkpoint.child("state", "1", "0").put("1.delta", b"state")
    with pytest.raises(UsageError, match=r"state/1 .*start the query once with Spark 4"):
        refuse_operators_without_metadata(checkpoint)


def test_abandoned_folders_of_an_object_store_are_removed(s3: Any, tmp_path: Path) -> None:
    root = Folder(s3.root("abandoned"), s3.options)
    for query_folder in ("gone", "used"):
        file = OperatorFile("count", query_folder, 1, _SCHEMA, _SCHEMA)
        root.child("count", query_folder).put(operator_file_name(0), file.encode())
        root.child("count", query_folder, "0").put(f"1_{'0' * 32}.delta.arrow", b"rows")
    command = [root.root, "--checkpoint", _write_checkpoint(tmp_path / "checkpoint", "used"), "--remove"]
    command += ["--storage-options", json.dumps(s3.options)]
    assert main(command) == 0
    assert [info.query_folder for info in list_folders(root)] == ["gone", "used"], "both were written today"
    assert main(command, later_s=40 * _DAY_S) == 0
    assert [info.query_folder for info in list_folders(root)] == ["used"]


def test_a_claimed_folder_belongs_to_the_claiming_query(tmp_path: Path) -> None:
    root = tmp_path / "root"
    _write_query(root, "old", claim="new")
    (info,) = list_folders(Folder(str(root)))
    assert info.claim == "new"
    assert judge_folder(info, QueryFolders(frozenset({"new"}), complete=True), time.time(), 0.0) == NAMED
    assert judge_folder(info, QueryFolders(frozenset({"third"}), complete=True), time.time(), 0.0) == ABANDONED


def test_a_folder_claimed_by_a_query_that_only_pointers_can_name_is_not_abandoned(tmp_path: Path) -> None:
    root = tmp_path / "root"
    _write_query(root, "old", claim=new_query_folder(5, "0" * 32))
    (info,) = list_folders(Folder(str(root)))
    assert judge_folder(info, QueryFolders(frozenset(), complete=False), time.time(), 0.0) == UNKNOWN


def test_a_folder_with_an_unreadable_lease_is_not_abandoned(tmp_path: Path) -> None:
    root = tmp_path / "root"
    folder = _write_query(root, "old")
    (folder / "lease" / f"{1:016d}.json").write_text("{}")
    _set_age(folder, 100.0)
    (info,) = list_folders(Folder(str(root)))
    assert judge_folder(info, QueryFolders(frozenset(), complete=True), time.time(), 0.0) == UNKNOWN
