"""Which files a rollback of a Spark checkpoint removes, given listings, and what it refuses."""

from __future__ import annotations

import errno
import json
import os
import re
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from uuid import UUID

import pytest
from fsspec.implementations.local import LocalFileSystem

from spark_state_ext.__main__ import main
from spark_state_ext.cli.rollback import apply_rollback, check_idle, plan_from_files, plan_rollback
from spark_state_ext.cli.spark_checkpoint import (
    COMMITS,
    OFFSETS,
    STATE,
    parse_path,
    read_shuffle_partitions,
    read_state_ids,
)
from spark_state_ext.errors import CorruptFileError, LiveRunError, MissingCheckpointError, UsageError
from spark_state_ext.files.folder import Entry, Folder

_ID = str(UUID(int=7))
_LOGS = [f"{log}/{batch}" for log in (OFFSETS, COMMITS) for batch in range(4)]
_HDFS = [f"state/0/{partition}/{version}.delta" for partition in (0, 1) for version in range(1, 5)]


def make_entries(names: Iterable[str], modified_s: float | None = 100.0) -> list[Entry]:
    return [Entry(name, 1, modified_s, False) for name in names]


def list_removed(
    names: Iterable[str], to_batch: int, ids: Mapping[int, Mapping[str, frozenset[str]]] | None = None
) -> list[str]:
    plan = plan_rollback(make_entries(names), to_batch, ids or {}, "the checkpoint")
    return [file.path for file in plan.files]


def test_state_files_are_removed_first_and_in_each_kind_the_newest_first() -> None:
    assert list_removed([*_LOGS, *_HDFS, "metadata"], 1) == [
        *("state/0/0/4.delta", "state/0/1/4.delta", "state/0/0/3.delta", "state/0/1/3.delta"),
        *("commits/3", "commits/2", "offsets/3", "offsets/2"),
    ]


def test_checksum_files_are_removed_with_their_files() -> None:
    names = [f"offsets/.{batch}.crc" for batch in range(4)]
    assert set(list_removed([*_LOGS, *_HDFS, *names, "state/0/0/.4.delta.crc"], 2)) == {
        *("state/0/0/4.delta", "state/0/0/.4.delta.crc", "state/0/1/4.delta"),
        *("commits/3", "offsets/3", "offsets/.3.crc"),
    }


@pytest.mark.parametrize(
    ("path", "kind", "number", "checksum"),
    [
        ("offsets/12", OFFSETS, 12, False),
        ("commits/.12.crc", COMMITS, 12, True),
        ("state/0/3/7.delta", STATE, 7, False),
        ("state/0/3/7.snapshot", STATE, 7, False),
        ("state/0/3/.7.changelog.crc", STATE, 7, True),
        (f"state/0/3/7_{_ID}.zip", STATE, 7, False),
        (f"state/0/3/7_{_ID}.zip.crc", STATE, 7, True),
        (f"state/0/3/.7_{_ID}.zip.crc.crc", STATE, 7, True),
        ("state/0/3/left-keyToNumValues/7.delta", STATE, 7, False),
        ("state/0/3/SSTs/000007-x.sst", "other", 0, False),
        ("state/0/3/SSTs/.000007-x.sst.crc", "other", 0, False),
        ("state/0/0/_metadata/schema", "other", 0, False),
        ("state/0/0/left-keyToNumValues/_metadata/schema", "other", 0, False),
        ("state/0/_metadata/.metadata.crc", "other", 0, False),
        ("sources/0/7.compact", "other", 0, False),
        (f"offsets/.7.{_ID}.tmp", "other", 0, False),
        (f"offsets/..7.{_ID}.tmp.crc", "other", 0, False),
        (f"state/0/3/.7.delta.{_ID}.tmp", "other", 0, False),
        ("metadata", "other", 0, False),
        (".metadata.crc", "other", 0, False),
        ("rolled-back-to-1-x/offsets/7", "other", 0, False),
    ],
)
def test_paths_that_spark_writes_are_parsed(path: str, kind: str, number: int, checksum: bool) -> None:
    file = parse_path(path)
    assert file is not None
    assert (file.kind, file.number, file.checksum) == (kind, number, checksum)


@pytest.mark.parametrize(
    "path",
    [
        *("notes.txt", "offsets/7.bak", "commits/seven", "state/0/3/7.delta.old", "state/0/3/7_short.zip"),
        *("state/0/_metadata/v2/0", "state/0/_stateSchema/default/0_x", "sources", "checkpoint/offsets/7"),
    ],
)
def test_an_unknown_file_stops_the_rollback(path: str) -> None:
    with pytest.raises(CorruptFileError, match=path):
        list_removed([*_LOGS, *_HDFS, path], 1)


@pytest.mark.parametrize("to_batch", [-1, 4])
def test_a_batch_that_is_not_committed_is_refused(to_batch: int) -> None:
    with pytest.raises(UsageError, match="0 to 3"):
        list_removed([*_LOGS, *_HDFS, "offsets/4"], to_batch)


def test_files_of_an_uncommitted_attempt_are_removed() -> None:
    assert list_removed([*_LOGS, *_HDFS, "offsets/4", "state/0/1/5.delta"], 3) == ["state/0/1/5.delta", "offsets/4"]


def test_a_rollback_needs_the_offsets_of_the_previous_batch() -> None:
    with pytest.raises(MissingCheckpointError, match="offsets/1"):
        list_removed([name for name in [*_LOGS, *_HDFS] if name != "offsets/1"], 2)


@pytest.mark.parametrize(
    ("state", "complete"),
    [
        ([1, 2], True),
        ([2], False),
        ([1], False),
        (["1.snapshot", 2], True),
        (["2.snapshot"], True),
        (["2.zip"], True),
        (["1.zip", "2.changelog"], True),
        (["2.changelog"], False),
        (["3.zip", "3.snapshot"], False),
        ([".2.zip.crc"], False),
    ],
)
def test_a_rollback_needs_the_whole_state_of_its_batch(state: list[int | str], complete: bool) -> None:
    names = [f"state/0/0/{file}" if isinstance(file, str) else f"state/0/0/{file}.delta" for file in state]
    if complete:
        list_removed([*_LOGS, *names], 1)
    else:
        with pytest.raises(MissingCheckpointError, match="minBatchesToRetain"):
            list_removed([*_LOGS, *names], 1)


def test_a_missing_partition_is_detected() -> None:
    names = [name for name in [*_LOGS, *_HDFS] if not name.startswith("state/0/0/")]
    with pytest.raises(MissingCheckpointError, match="version 2 in state/0/0"):
        list_removed(names, 1)


def test_a_missing_store_of_a_join_is_detected() -> None:
    names = [f"state/0/{partition}/{side}/2.zip" for partition in (0, 1) for side in ("left", "right")]
    assert list_removed([*_LOGS, *names], 3 - 2) == ["commits/3", "commits/2", "offsets/3", "offsets/2"]
    with pytest.raises(MissingCheckpointError, match="state/0/1/right"):
        list_removed([*_LOGS, *names[:-1]], 1)


def test_only_state_with_an_id_in_the_commit_log_counts() -> None:
    other = str(UUID(int=8))
    names = [*_LOGS, f"state/0/0/1_{_ID}.zip", f"state/0/0/2_{_ID}.changelog"]
    ids = {0: {"state/0/0": frozenset([_ID])}, 1: {"state/0/0": frozenset([_ID])}}
    list_removed(names, 1, ids)
    with pytest.raises(MissingCheckpointError, match="version 1"):
        list_removed(names, 1, {**ids, 0: {"state/0/0": frozenset([other])}})
    # A partition without any file.
    with pytest.raises(MissingCheckpointError, match="state/0/1"):
        list_removed(names, 1, {**ids, 1: {**ids[1], "state/0/1": frozenset([_ID])}})


def test_both_formats_of_the_commit_log_are_read() -> None:
    assert read_state_ids(b'v1\n{"nextBatchWatermarkMs":0}', "commits/0") == {}
    ids = json.dumps({"nextBatchWatermarkMs": 0, "stateUniqueIds": {"0": [[_ID], ["x", "y"]]}})
    state_ids = read_state_ids(f"v2\n{ids}".encode(), "commits/0")
    assert state_ids == {"state/0/0": frozenset([_ID]), "state/0/1": frozenset(["x", "y"])}
    with pytest.raises(CorruptFileError, match="commits/0"):
        read_state_ids(b"v1", "commits/0")


def test_the_offset_log_has_the_number_of_partitions() -> None:
    conf = json.dumps({"batchWatermarkMs": 0, "conf": {"spark.sql.shuffle.partitions": "5"}})
    assert read_shuffle_partitions(f'v1\n{conf}\n{{"logOffset":1}}'.encode(), "offsets/1") == 5
    assert read_shuffle_partitions(b'v1\n{"batchWatermarkMs":0}\n-', "offsets/1") is None
    for damaged in (b"v1", b"v1\n[]\n-", conf.replace("5", "five").join(["v1\n", "\n-"]).encode(), b"v1\n\xff"):
        with pytest.raises(CorruptFileError, match="offsets/1"):
            read_shuffle_partitions(damaged, "offsets/1")


def test_partitions_that_only_other_batches_have_are_not_needed() -> None:
    """Spark repartitioned the state from 2 to 3 partitions after batch 1, or from 3 to 2 before it."""
    later = [f"state/0/2/{version}.zip" for version in (3, 4)]
    before = ["state/0/2/1.zip"]
    for other, removed in ((later, ["state/0/2/4.zip", "state/0/2/3.zip"]), (before, [])):
        entries = make_entries([*_LOGS, *_HDFS, *other])
        with pytest.raises(MissingCheckpointError, match="state/0/2"):
            plan_rollback(entries, 1, {}, "the checkpoint", 3)
        plan = plan_rollback(entries, 1, {}, "the checkpoint", 2)
        assert [file.path for file in plan.files if file.store == "state/0/2"] == removed
        # An operator, such as one without keys, may have fewer partitions than the shuffle.
        only = make_entries([*_LOGS, *(name for name in _HDFS if name.startswith("state/0/0/"))])
        assert plan_rollback(only, 1, {}, "the checkpoint", 2).files


def test_a_recently_written_checkpoint_is_refused() -> None:
    plan = plan_rollback(make_entries([*_LOGS, *_HDFS], 100.0), 1, {}, "the checkpoint")
    check_idle(plan, 160.0, 60.0, "the checkpoint")
    with pytest.raises(LiveRunError, match="--idle-s"):
        check_idle(plan, 159.0, 60.0, "the checkpoint")


def write_checkpoint(folder: Path) -> Folder:
    for name in [*_LOGS, *_HDFS, "metadata"]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        log = {COMMITS: 'v1\n{"nextBatchWatermarkMs":0}', OFFSETS: 'v1\n{"batchWatermarkMs":0}\n-'}
        (folder / name).write_text(log.get(name.split("/")[0], name))
    return Folder(str(folder))


@pytest.mark.parametrize("steps", range(6))
def test_an_interrupted_rollback_is_completed_by_the_next_one(tmp_path: Path, steps: int) -> None:
    checkpoint = write_checkpoint(tmp_path)
    plan = plan_from_files(checkpoint, 1)
    assert len(plan.steps) == 6
    apply_rollback(checkpoint, type(plan)(1, plan.steps[:steps], None), "rolled-back-first")
    assert main(["rollback", str(tmp_path), "--to-batch", "1", "--apply", "--idle-s", "0"]) == 0
    remaining = [entry.name for entry in checkpoint.tree() if not entry.name.startswith("rolled-back-")]
    assert sorted(remaining) == sorted(
        name for name in [*_LOGS, *_HDFS, "metadata"] if name not in {file.path for file in plan.files}
    )
    aside = [entry.name.split("/", 1)[1] for entry in checkpoint.tree() if entry.name.startswith("rolled-back-")]
    assert sorted(aside) == sorted(file.path for file in plan.files), "each file was moved aside once"


def test_each_refusal_has_an_exit_code_and_a_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_checkpoint(tmp_path)
    assert main(["rollback", str(tmp_path), "--to-batch", "9"]) == 2
    assert capsys.readouterr().err.startswith(
        "spark-state-ext rollback: UsageError: batch 9 is not a committed batch of"
    )
    assert main(["rollback", str(tmp_path / "nothing"), "--to-batch", "1"]) == 2
    assert "not a Spark checkpoint location" in capsys.readouterr().err
    assert main(["rollback", str(tmp_path), "--to-batch", "1", "--delete"]) == 2
    assert "--delete needs --apply" in capsys.readouterr().err


@pytest.mark.parametrize("folder", ["", "count", f"count/{_ID}"])
def test_the_root_of_an_arrow_state_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], folder: str) -> None:
    """The message must not suggest to move unknown files elsewhere, because that would lose state."""
    state = Folder(str(tmp_path)).child("count", _ID)
    state.put("operator_0.json", b"{}")
    state.child("0").put(f"1_{'0' * 32}.delta.arrow", b"rows")
    root = str(tmp_path / folder)
    assert main(["rollback", root, "--to-batch", "1"]) == 2
    output = capsys.readouterr().err
    assert output.startswith(f"spark-state-ext rollback: UsageError: {root} is not a Spark checkpoint location: ")
    assert "it looks like the root of an ArrowState, or a folder in it" in output
    assert "as in the option checkpointLocation" in output
    assert "Move them" not in output


def test_a_folder_that_is_not_a_checkpoint_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_checkpoint(tmp_path / "query")
    assert main(["rollback", str(tmp_path), "--to-batch", "1"]) == 2
    output = capsys.readouterr().err
    assert "UsageError" in output
    assert "it has neither 'metadata' nor commits/. Give the location as in the option checkpointLocation" in output
    assert "ArrowState" not in output


def test_a_recently_written_checkpoint_is_refused_before_files_are_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = write_checkpoint(tmp_path)
    for entry in checkpoint.tree():
        os.utime(tmp_path / entry.name, (time.time() - 33,) * 2)
    command = ["rollback", str(tmp_path), "--to-batch", "1", "-o", "jsonl"]
    assert main([*command, "--apply"]) == 3
    output = capsys.readouterr()
    assert "LiveRunError" in output.err
    assert not output.out
    assert main(command) == 0
    output = capsys.readouterr()
    assert len(output.out.splitlines()) == 8
    last = output.err.splitlines()[-1]
    assert re.match(
        r"no file was changed\. --apply would refuse now, because the checkpoint was written 3\d s ago: stop the query",
        last,
    )
    assert main([*command, "--idle-s", "0"]) == 0
    assert capsys.readouterr().err.splitlines()[-1] == "no file was changed: give --apply to roll back"


def test_a_folder_that_cannot_be_listed_stops_the_rollback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise, later versions in that folder would stay and be taken for right, and counts would be lost."""
    checkpoint = write_checkpoint(tmp_path)
    before, list_folder = checkpoint.tree(), LocalFileSystem.ls

    def ls(self: LocalFileSystem, path: str, **kwargs: object) -> object:
        if path.endswith("state/0/1"):
            raise OSError(errno.EIO, "Input/output error", path)
        return list_folder(self, path, **kwargs)

    with monkeypatch.context() as failing:
        failing.setattr(LocalFileSystem, "ls", ls)
        assert main(["rollback", str(tmp_path), "--to-batch", "1", "--apply", "--idle-s", "0"]) == 3
    assert capsys.readouterr().err.startswith("spark-state-ext rollback: StorageError: listing")
    assert checkpoint.tree() == before
