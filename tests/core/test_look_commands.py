"""Commands that inspect files: verify, gc, why, log, lineage and export."""

from __future__ import annotations

import io
import json
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import reading_support
from reading_support import Job, as_model, operator_file
from rescaled_query import RescaledQuery, job_from
from small_root import NAMES, QUERY, SmallRoot, fixed_ids, savepoint_of, small_root

from arrow_schemas import BucketMap
from arrow_schemas.erase import EraseDone, EraseRequest
from arrow_schemas.operator import operator_file_name
from arrow_schemas.savepoint import MANIFEST_NAME, SavepointManifest
from spark_state_ext import Savepoint
from spark_state_ext.__main__ import main
from spark_state_ext.cli import verify
from spark_state_ext.cli.paths import Target
from spark_state_ext.cli.verify import Check, list_checks
from spark_state_ext.files.erase_requests import EraseFolder
from spark_state_ext.files.folder import Folder
from spark_state_ext.files.layout import PARENTS_FOLDER
from spark_state_ext.files.retention import CleanUp, clean_up
from spark_state_ext.ownership.claim_notes import note_handed_over
from spark_state_ext.ownership.holds import Hold
from spark_state_ext.rescale.parents_notes import note_free
from spark_state_ext.savepoints.claims import SavepointClaim, claim_savepoint
from spark_state_ext.savepoints.manifest_file import encode_manifest, read_manifest
from spark_state_ext.testing.model import Row


@pytest.fixture
def small(tmp_path: Path) -> Iterator[SmallRoot]:
    with small_root(tmp_path) as root:
        yield root


@pytest.fixture
def aged(tmp_path: Path) -> Iterator[SmallRoot]:
    """A root with files that a clean-up may delete."""
    with small_root(tmp_path, batches=60) as root:
        yield root


def run(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> list[dict[str, Any]]:
    """Run a command and return the rows that it prints."""
    assert main([*map(str, arguments), "-o", "jsonl"]) == code
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize("words", [["log"], ["log", "--files"], ["gc", "--dry-run"], ["lineage", "--bucket", "1"]])
def test_commands_accept_a_root_and_find_its_query_folder(
    small: SmallRoot, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Commands take the query folder that was written last, or the one that is named."""
    rows = run(capsys, *words, small.query_folder)
    other = small.query_folder.with_name("1f" * 16)
    shutil.copytree(small.query_folder, other, ignore=shutil.ignore_patterns("1_*"))
    assert main([*words, str(small.root), "-o", "jsonl"]) == 0
    printed = capsys.readouterr()
    assert [json.loads(line) for line in printed.out.splitlines()] == rows
    assert printed.err.startswith(f"query folder: {small.query_folder}\n")
    others = run(capsys, *words, small.root, "--operator", "counts", "--query-folder", other.name)
    assert others == run(capsys, *words, other) != rows
    assert main([*words, str(small.root), "--query-folder", "none"]) == 2
    assert main([*words, savepoint_of(small.job, tmp_path / "savepoint").root]) == 2
    assert "is a savepoint: give the root" in capsys.readouterr().err


# -- verify ---------------------------------------------------------------------------------------


def test_verify_accepts_undamaged_files(small: SmallRoot, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    savepoint = savepoint_of(small.job, tmp_path / "savepoint")
    for path in (small.root, small.query_folder, Path(savepoint.root)):
        assert run(capsys, "verify", path) == []
        rows = run(capsys, "verify", path, "--all")
        assert {row["status"] for row in rows} == {"whole"}
        assert sorted(row["path"] for row in rows) == sorted(str(file) for file in path.rglob("*") if file.is_file())
        assert all(row["bytes"] == os.path.getsize(row["path"]) for row in rows)


def test_verify_refuses_a_folder_without_state(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The path is most likely mistyped, and a command without errors would suggest that all is well."""
    letters = tmp_path / "documents" / "counts" / "letters"
    letters.mkdir(parents=True)
    for files in range(2):
        assert main(["verify", str(tmp_path / "documents")]) == 2
        assert f"documents has no state: none of the {files} files below it" in capsys.readouterr().err
        (letters / "one.txt").write_text("Dear Ann")


@pytest.mark.parametrize(
    ("streams", "group_by", "several"),
    [
        ({"": 4}, "partition", 3),
        # A key may have state in each stream: two of these three keys have state in both.
        ({"a": 2, "b": 2}, "stream_and_partition", 1),
    ],
)
def test_verify_finds_keys_that_are_in_two_buckets(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    streams: dict[str, int],
    group_by: str,
    several: int,
) -> None:
    """The source has grown to a number of partitions that the bucket map cannot follow."""
    bucket_map = BucketMap.of_partitions(streams, group_by)
    job = Job(tmp_path / "root", tmp_path)
    job.folder.put(operator_file_name(0), operator_file("counts", "query", 4).with_map(bucket_map).encode())
    keys: list[Any] = [(f"user {at}", 0.0) for at in range(2_000)]
    grown = {keys[7]: 2, keys[1_234]: 1, keys[1_500]: 3}
    places = {key: at % 4 for at, key in enumerate(keys)}
    assert [places[key] for key in grown] == [3, 2, 0]
    monkeypatch.setattr(reading_support, "bucket_of", lambda key, _: places[key])
    job.batch({key: Row(1) for key in keys})
    job.batch({key: Row(2) for key in keys[::3]})
    folder, savepoint = Path(job.folder.root), tmp_path / "savepoint"
    assert run(capsys, "verify", folder) == []
    places |= grown
    job.batch({key: Row(1) for key in grown})
    # Files prove a batch only once a later one has begun.
    job.batch({key: Row(3) for key in keys[:40]})
    savepoint_of(job, savepoint)
    manifest = read_manifest(Folder(str(savepoint)))
    operators = {"counts": manifest.header.operators["counts"].with_map(bucket_map)}
    named = SavepointManifest(replace(manifest.header, operators=operators), manifest.buckets)
    (savepoint / MANIFEST_NAME).write_bytes(encode_manifest(named))
    for path in (folder, tmp_path / "root", savepoint):
        (row,) = run(capsys, "verify", path, code=1)
        assert (row["status"], row["kind"]) == ("damaged", "keys")
        assert row["path"] == str(savepoint / "counts" if path == savepoint else folder)
        assert f"{several} keys are in several buckets" in row["problem"]
        assert "such as {'name': 'user " in row["problem"]
    # The command has removed its hold, and keys that were removed from one of the two buckets are no problem.
    assert list((folder / "holds").glob("*")) == []
    job.batch(dict.fromkeys(grown))
    job.batch({key: Row(4) for key in keys[:40]})
    assert run(capsys, "verify", folder) == []
    job.close()


def test_files_of_parent_buckets_belong_to_the_rescaled_query(
    small: SmallRoot, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Files of parents are part of the state as long as buckets begin with them."""
    savepoint = savepoint_of(small.job, tmp_path / "savepoint")
    job = job_from(tmp_path / "new", small.job, BucketMap(3), Savepoint(savepoint.root))
    query = RescaledQuery(job, tmp_path, {})
    query.start()
    query.folder.put(operator_file_name(0), operator_file("counts", query.name, 3).encode())
    note_free(query.folder, 0, 7)
    files = sorted(str(file) for file in Path(query.folder.root, PARENTS_FOLDER).rglob("*") if file.is_file())
    assert {row["path"] for row in run(capsys, "verify", query.folder.root, "--all")}.issuperset(files)
    assert run(capsys, "verify", query.folder.root) == []
    for path in map(Path, files):
        (row,) = run(capsys, "why", path)
        assert (row["owner"], row["does"]) == (f"the query at {query.folder.root}", "stays")
        if ".free-" in path.name:
            continue
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) // 2] + bytes([whole[len(whole) // 2] ^ 1]) + whole[len(whole) // 2 + 1 :])
        assert [(row["path"], row["status"]) for row in run(capsys, "verify", query.folder.root, code=1)] == [
            (str(path), "damaged")
        ]
        path.unlink()
        missing = run(capsys, "verify", query.folder.root, code=1 if path.suffix == ".arrow" else 0)
        assert [row["path"] for row in missing] == ([str(path)] if path.suffix == ".arrow" else [])
        path.write_bytes(whole)


def test_verify_names_each_damaged_file_of_a_root(small: SmallRoot, capsys: pytest.CaptureFixture[str]) -> None:
    files = sorted(path for path in small.root.rglob("*") if path.is_file())
    assert len({path.suffix for path in files}) == 2
    for path in files:
        whole = path.read_bytes()
        # The middle of a checkpoint file is in its body, that of a document in a field.
        at = len(whole) // 2
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        (row,) = run(capsys, "verify", small.root, code=1)
        assert (row["path"], row["status"]) == (str(path), "damaged")
        assert str(path) in row["problem"]
        path.write_bytes(whole)
    assert run(capsys, "verify", small.root) == []


def test_verify_does_not_report_files_that_a_running_query_deletes_meanwhile(
    aged: SmallRoot, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    oldest = min(aged.root.rglob("1_*.arrow"))

    def list_then_delete(target: Target, scratch: Path) -> list[Check]:
        checks = list_checks(target, scratch)
        oldest.unlink()
        return checks

    monkeypatch.setattr(verify, "list_checks", list_then_delete)
    rows = {row["path"]: row["status"] for row in run(capsys, "verify", aged.root, "--all")}
    assert rows.pop(str(oldest)) == "gone"
    assert set(rows.values()) == {"whole"}


def test_verify_compares_a_savepoints_files_with_its_manifest(
    small: SmallRoot, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    savepoint = Path(savepoint_of(small.job, tmp_path / "savepoint").root)
    first, second, *_ = sorted((savepoint / "counts" / "0").iterdir())
    first.unlink()
    (savepoint / "counts" / "0" / "notes.txt").write_text("mine")
    rows = run(capsys, "verify", savepoint, code=1)
    assert [(row["status"], row["path"]) for row in rows] == [
        ("missing", str(first)),
        ("unknown", str(first.parent / "notes.txt")),
    ]
    # An undamaged file under the name of another one.
    second.write_bytes(sorted((savepoint / "counts" / "1").iterdir())[1].read_bytes())
    rows_by_path = {row["path"]: row for row in run(capsys, "verify", savepoint, code=1)}
    assert rows_by_path[str(second)]["status"] == "damaged"
    assert "holds the delta of checkpoint" in rows_by_path[str(second)]["problem"]


def test_verify_checks_the_files_of_a_savepoint_with_a_damaged_manifest(
    small: SmallRoot, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    savepoint = Path(savepoint_of(small.job, tmp_path / "savepoint").root)
    (savepoint / "savepoint.arrow").write_bytes(b"garbage")
    rows = run(capsys, "verify", savepoint, "--all", code=1)
    assert [row["status"] for row in rows if row["kind"] == "manifest"] == ["damaged"]
    assert len(rows) == len([path for path in savepoint.rglob("*") if path.is_file()])


def test_verify_and_why_know_erase_requests_and_notes_of_claims(
    small: SmallRoot, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = EraseFolder(small.job.folder)
    request = EraseRequest("ab" * 16, "counts", 1, pa.record_batch({"name": ["Jane Doe"], "x": [0.5]}), "0.1.0")
    assert folder.add(request) == 1
    folder.note_done(1, EraseDone(request.id, 1, 1, 2, 3, 4))
    note_handed_over(small.job.folder, "cd" * 16)
    below = small.query_folder
    kinds = {
        below / "erase" / "00000001.keys.arrow": ("erase request", "erase request"),
        below / "erase" / "00000001.done.json": ("erase record", "record of an erase request"),
        below / "claims" / f"{'cd' * 16}.json": ("record", "note of a claim"),
    }
    assert run(capsys, "verify", small.root) == []
    rows = {Path(row["path"]): row for row in run(capsys, "verify", small.root, "--all")}
    for path, (kind, owned) in kinds.items():
        assert (rows[path]["kind"], rows[path]["status"]) == (kind, "whole")
        (row,) = run(capsys, "why", path)
        assert (row["kind"], row["owner"], row["does"]) == (owned, f"the query at {below}", "stays")
        data = path.read_bytes()
        path.write_bytes(data[: len(data) // 2])
        (row,) = run(capsys, "verify", small.root, code=1)
        assert (row["path"], row["kind"], row["status"]) == (str(path), kind, "damaged")
        path.write_bytes(data)


def test_verify_names_foreign_files_and_folders(small: SmallRoot, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("backup", "erase", "lease"):
        (small.query_folder / name).mkdir(exist_ok=True)
    (small.query_folder / "backup" / "any.txt").write_text("mine")
    (small.query_folder / "erase" / "operator_0.json").write_text("mine")
    rows = run(capsys, "verify", small.root)
    assert [(row["path"], row["status"]) for row in rows] == [
        (str(small.query_folder / "backup"), "unknown"),
        (str(small.query_folder / "erase" / "operator_0.json"), "unknown"),
    ]


# -- clean-up -------------------------------------------------------------------------------------


def test_the_next_clean_up_deletes_what_gc_has_planned(aged: SmallRoot, capsys: pytest.CaptureFixture[str]) -> None:
    plan = run(capsys, "gc", aged.query_folder, "--dry-run", "--retained", aged.job.retained)
    planned = {(row["bucket"], row["file"]) for row in plan if row["does"] == "goes"}
    assert len(planned) > 20
    assert len(plan) == len(list(aged.query_folder.glob("[0-9]*/*")))
    assert all(row["why"] for row in plan)
    deleted = set()
    for bucket, pointer in enumerate(aged.job.pointers[-1]):
        assert pointer.ref is not None
        folder = aged.job.folder.child(str(bucket))
        before = set(folder.names())
        request = CleanUp(pointer, pointer.ref, aged.job.retained, lambda: None)
        clean_up(folder, request, aged.job.scratch)
        deleted |= {(bucket, name) for name in before - set(folder.names())}
    assert planned == deleted
    assert not any(row["does"] == "goes" for row in run(capsys, "gc", aged.query_folder, "--dry-run", "--retained", 2))


def test_gc_keeps_more_files_for_more_retained_batches(aged: SmallRoot, capsys: pytest.CaptureFixture[str]) -> None:
    few, many = (
        {
            row["file"]
            for row in run(capsys, "gc", aged.query_folder, "--dry-run", "--retained", n)
            if row["does"] == "goes"
        }
        for n in (2, 10)
    )
    assert many < few
    # The default is Spark's own.
    assert not any(row["does"] == "goes" for row in run(capsys, "gc", aged.query_folder, "--dry-run"))


def test_gc_deletes_nothing_in_a_bucket_with_a_foreign_file(
    aged: SmallRoot, capsys: pytest.CaptureFixture[str]
) -> None:
    (aged.query_folder / "0" / "notes.txt").write_text("mine")
    rows = run(capsys, "gc", aged.query_folder, "--dry-run", "--retained", 2, "--bucket", 0)
    assert {row["does"] for row in rows} == {"stays"}
    assert {row["why"] for row in rows} == {"nothing is deleted here, as notes.txt is not a file of spark_state_ext"}


def test_commands_refuse_to_delete_and_refuse_wrong_paths(small: SmallRoot, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gc", str(small.query_folder)]) == 2
    assert "give --dry-run" in capsys.readouterr().err
    assert main(["gc", str(small.query_folder), "--dry-run", "--bucket", "9"]) == 2
    assert "has no bucket 9" in capsys.readouterr().err
    assert main(["log", str(small.query_folder / "0")]) == 2
    assert "has no state of an operator: give the root that ArrowState was given" in capsys.readouterr().err
    assert main(["why", str(small.query_folder)]) == 2
    assert "is a folder: name a file in it" in capsys.readouterr().err


def test_why_explains_each_kind_of_file(aged: SmallRoot, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def why(path: Path) -> tuple[str, str, str]:
        (row,) = run(capsys, "why", path, "--retained", 2)
        assert row["file"] == str(path)
        return row["kind"], row["does"], row["why"]

    bucket = aged.query_folder / "0"
    by_version = {int(path.name.partition("_")[0]): path for path in sorted(bucket.iterdir(), reverse=True)}
    kind, does, because = why(by_version[max(by_version)])
    assert (kind, does) == ("delta file", "stays")
    assert because.startswith("it was made at heartbeat 60: a batch that Spark retains may name a checkpoint")
    kind, does, because = why(by_version[1])
    assert (kind, does) == ("delta file", "goes")
    assert because.startswith("every batch that Spark retains loads from snapshot ")
    snapshots = sorted(bucket.glob("*.snapshot.arrow"), key=lambda path: int(path.name.partition("_")[0]))
    assert {why(path)[1] for path in snapshots} == {"goes", "stays"}
    assert any("snapshot from before heartbeat" in why(path)[2] for path in snapshots)
    assert why(aged.query_folder / "operator_0.json")[0] == "operator file"
    assert why(next((aged.query_folder / "lease").iterdir()))[0] == "lease"
    Hold.place(aged.job.folder, "a savepoint at /backup")
    (hold,) = (aged.query_folder / "holds").iterdir()
    assert why(hold)[0] == "hold"
    assert why(by_version[1])[1:] == ("stays", f"a hold protects the query folder: {hold.name}")
    savepoint = savepoint_of(aged.job, tmp_path / "savepoint")
    (named, *_) = sorted(Path(savepoint.root, "counts", "1").iterdir())
    assert why(named)[2].startswith("the savepoint 5a5a")
    claim_savepoint(savepoint, SavepointClaim("5a" * 16, "/root/counts/mine", "mine"), ())
    (row,) = run(capsys, "why", named)
    assert row["owner"] == "the query at /root/counts/mine"
    assert why(Path(savepoint.root, "claim", "claim.json"))[0] == "claim"
    assert main(["why", str(bucket / "nothing")]) == 3
    assert "MissingCheckpointError: there is no file" in capsys.readouterr().err


# -- log and lineage ------------------------------------------------------------------------------


def test_log_lists_each_batch(small: SmallRoot, capsys: pytest.CaptureFixture[str]) -> None:
    rows = run(capsys, "log", small.query_folder)
    assert [row["batch"] for row in rows] == list(range(8))
    assert [row["version_max"] for row in rows] == list(range(1, 9))
    assert rows[0]["written"] == "2024-02-01T12:01:00+00:00"
    assert {row["buckets"] for row in rows} == {2}
    assert {row["deltas"] for row in rows} == {2}
    files = run(capsys, "log", small.query_folder, "--files")
    assert sum(row["bytes"] for row in files) == sum(row["bytes"] for row in rows)
    assert len(files) == len(list(small.query_folder.glob("[0-9]*/*")))
    one = run(capsys, "log", small.query_folder, "--files", "--bucket", 1)
    assert one == [row for row in files if row["bucket"] == 1]
    assert main(["log", str(small.query_folder), "--bucket", "7"]) == 2
    next((small.query_folder / "1").iterdir()).write_bytes(b"garbage")
    rows = run(capsys, "log", small.query_folder, "--files", code=1)
    assert [row["batch"] for row in rows if row["problem"]] == [None]


def test_lineage_shows_attempts_as_branches(
    small: SmallRoot, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with fixed_ids():
        # Two attempts at the next batch.
        for count in (1, 2):
            small.job.attempt({(name, 0.5 * at): Row(count) for at, name in enumerate(NAMES)})
    assert main(["lineage", str(small.query_folder), "--bucket", "0"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition("_")[0] for line in lines] == [*map(str, range(1, 9)), "├─ 9", "└─ 9"]
    rows = run(capsys, "lineage", small.query_folder, "--bucket", 0)
    newest = [row for row in rows if row["version"] == 9]
    assert len(newest) == 2
    assert {row["parent_id"] for row in newest} == {row["id"] for row in rows if row["version"] == 8}
    assert [row["parent_version"] for row in rows if row["version"] < 9] == [None, *range(1, 8)]
    for ending, magic in (("svg", b"<?xml"), ("png", b"\x89PNG")):
        pictures = [tmp_path / f"{n}.{ending}" for n in range(2)]
        for picture in pictures:
            assert main(["lineage", str(small.query_folder), "--bucket", "0", "--to", str(picture)]) == 0
        assert pictures[0].read_bytes().startswith(magic)
        assert pictures[0].read_bytes() == pictures[1].read_bytes()
    assert main(["lineage", str(small.query_folder), "--bucket", "0", "--to", "x.gif"]) == 2
    assert main(["lineage", str(small.query_folder), "--bucket", "0", "--to", str(tmp_path / "no" / "x.svg")]) == 3
    assert "StorageError: the picture" in capsys.readouterr().err


# -- export ---------------------------------------------------------------------------------------


def test_export_writes_a_savepoint_as_parquet_and_arrow(
    small: SmallRoot, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    savepoint = savepoint_of(small.job, tmp_path / "savepoint").root
    parquet, arrow = tmp_path / "rows.parquet", tmp_path / "rows.arrow"
    for to in (parquet, arrow):
        assert main(["export", savepoint, str(to)]) == 0
        assert capsys.readouterr().err == f"rows={len(small.job.models[-1])} batch=7 file={to}\n"
    tables = [pq.read_table(parquet), pa.ipc.open_file(io.BytesIO(arrow.read_bytes())).read_all()]
    for table in tables:
        assert as_model(table) == small.job.models[-1]
    assert main(["export", savepoint, str(parquet)]) == 2
    assert "exists already: --overwrite replaces it" in capsys.readouterr().err
    assert main(["export", savepoint, str(parquet), "--overwrite"]) == 0
    assert main(["export", savepoint, str(tmp_path / "rows.csv")]) == 2
    assert main(["export", str(tmp_path / "nothing"), str(tmp_path / "other.parquet")]) == 2
    assert not (tmp_path / "other.parquet").exists()


def test_export_writes_to_an_object_store(s3: Any, small: SmallRoot, tmp_path: Path) -> None:
    savepoint = savepoint_of(small.job, tmp_path / "savepoint").root
    to = s3.root("exported")
    options = json.dumps(s3.options)
    assert main(["export", savepoint, f"{to}/rows.parquet", "--to-options", options]) == 0
    table = pq.read_table(pa.BufferReader(Folder(to, s3.options).get("rows.parquet")))
    assert as_model(table) == small.job.models[-1]


def test_commands_read_object_stores(s3: Any, small: SmallRoot, capsys: pytest.CaptureFixture[str]) -> None:
    root = s3.root("looked-at")
    for path in small.root.rglob("*"):
        if path.is_file():
            above = Folder(root, s3.options).child(*path.relative_to(small.root).parent.parts)
            above.put(path.name, path.read_bytes())
    options = ["--storage-options", json.dumps(s3.options)]
    assert run(capsys, "verify", root, *options) == []
    assert len(run(capsys, "log", f"{root}/counts/{QUERY}", *options)) == 8
    (row,) = run(capsys, "why", f"{root}/counts/{QUERY}/operator_0.json", *options)
    assert row["kind"] == "operator file"
    began = time.time()
    plan = run(capsys, "gc", f"{root}/counts/{QUERY}", "--dry-run", *options)
    assert {row["does"] for row in plan} == {"stays"}, f"all files are younger than {began}"
