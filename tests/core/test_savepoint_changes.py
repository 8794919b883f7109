"""``savepoint verify | copy | claim | transform``: they write readable savepoints, and refuse what they cannot write."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from reading_support import as_model
from small_root import SAVEPOINT_ID, SmallRoot, savepoint_of, small_root

from arrow_schemas.savepoint import SavepointManifest
from spark_state_ext import open_state, savepoint_tables
from spark_state_ext.__main__ import main
from spark_state_ext.cli.transform import cast_column
from spark_state_ext.errors import CorruptFileError, StateValueError, UsageError
from spark_state_ext.files.folder import Folder
from spark_state_ext.savepoints.manifest_file import encode_manifest, read_manifest
from spark_state_ext.savepoints.writer import finish_savepoint, write_manifest
from tests.helpers.soak import whole

GOLDEN = Path(__file__).parent.parent / "golden" / "savepoint-1"


@pytest.fixture
def small(tmp_path: Path) -> Iterator[SmallRoot]:
    with small_root(tmp_path) as root:
        yield root


@pytest.fixture(params=["native", "canonical"])
def savepoint(small: SmallRoot, tmp_path: Path, request: pytest.FixtureRequest) -> Folder:
    return savepoint_of(small.job, tmp_path / "savepoint", request.param)


def read_files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# -- verify, copy, claim ---------------------------------------------------------------------------


def test_copy_copies_exactly_the_files_of_the_manifest_and_checks_them(
    savepoint: Folder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (Path(savepoint.root) / "counts" / "0" / "mine.txt").write_text("mine")
    assert main(["savepoint", "copy", savepoint.root, str(tmp_path / "copy")]) == 0
    files = read_files(Path(savepoint.root))
    del files["counts/0/mine.txt"]
    assert read_files(tmp_path / "copy") == files, "the copy must have the files of the manifest, byte by byte"
    assert main(["savepoint", "verify", str(tmp_path / "copy")]) == 0
    capsys.readouterr()
    assert main(["savepoint", "copy", savepoint.root, str(tmp_path / "copy")]) == 2
    assert "there is already a savepoint at" in capsys.readouterr().err
    (file, *_) = sorted(path for path in Path(savepoint.root).rglob("*.arrow") if path.parent.name == "0")
    data = file.read_bytes()
    # Write a new file: the copy has a hard link to the old one.
    file.unlink()
    file.write_bytes(data[:-1] + b"x")
    assert main(["savepoint", "verify", savepoint.root]) == 1
    assert main(["savepoint", "copy", savepoint.root, str(tmp_path / "other")]) == 3
    assert "CorruptFileError" in capsys.readouterr().err
    assert not (tmp_path / "other" / "savepoint.arrow").exists(), "a failed copy must not have a manifest"
    assert main(["savepoint", "verify", str(tmp_path / "other")]) == 3
    assert main(["savepoint", "verify", str(tmp_path / "copy")]) == 0, "the first copy must not be affected"


def test_every_reader_refuses_a_file_whose_digest_differs_from_the_manifest(
    savepoint: Folder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each file is complete, but one has other contents than the manifest says."""
    manifest = read_manifest(savepoint)
    bucket = next(bucket for bucket in manifest.buckets if bucket.files)
    kind, digest = bucket.files[-1].digest.split("=")
    other = replace(bucket.files[-1], digest=f"{kind}={digest[::-1]}")
    buckets = [
        replace(saved, files=(*saved.files[:-1], other)) if saved is bucket else saved for saved in manifest.buckets
    ]
    savepoint.put("savepoint.arrow", encode_manifest(replace(manifest, buckets=tuple(buckets))))
    refused = f"{other.name} is missing or differs from the savepoint's manifest"
    with pytest.raises(CorruptFileError, match=refused):
        list(savepoint_tables(savepoint.root))
    with open_state(savepoint.root) as state, pytest.raises(CorruptFileError, match=refused):
        state.scan().read_all()
    for command in (
        ["scan", savepoint.root],
        ["savepoint", "transform", savepoint.root, str(tmp_path / "made"), "--drop", "note"],
        ["rescale", savepoint.root, str(tmp_path / "rescaled"), "--buckets", "5"],
    ):
        capsys.readouterr()
        assert main(command) == 3, command
        assert refused in " ".join(capsys.readouterr().err.split()), command


def test_a_savepoint_can_be_copied_to_an_object_store_and_back(s3: Any, savepoint: Folder, tmp_path: Path) -> None:
    there, options = s3.root(f"copied-{tmp_path.name}"), json.dumps(s3.options)
    assert main(["savepoint", "copy", savepoint.root, there, "--to-options", options]) == 0
    assert main(["savepoint", "verify", there, "--storage-options", options]) == 0
    assert main(["savepoint", "copy", there, str(tmp_path / "back"), "--storage-options", options]) == 0
    assert read_files(tmp_path / "back") == read_files(Path(savepoint.root))


def test_a_savepoint_claimed_by_hand_cannot_be_claimed_copied_or_deleted(
    savepoint: Folder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    claim = ["savepoint", "claim", savepoint.root, "--by", "Ann of payments"]
    assert main(claim) == 0
    assert main(claim) == 3
    assert "ClaimedError" in capsys.readouterr().err
    for command in (
        ["copy", savepoint.root, str(tmp_path / "copy")],
        ["delete", savepoint.root, "--root", str(tmp_path)],
    ):
        assert main(["savepoint", *command]) in (2, 3)
        assert read_manifest(savepoint).header.id == SAVEPOINT_ID
    capsys.readouterr()
    assert main(["savepoint", "status", savepoint.root]) == 0
    assert "Ann of payments (claimed by hand)" in capsys.readouterr().out
    assert main(["savepoint", "release", savepoint.root]) == 0
    assert main(["savepoint", "copy", savepoint.root, str(tmp_path / "copy")]) == 0
    assert main(["savepoint", "claim", savepoint.root, "--by", " "]) == 2
    assert main(["savepoint", "claim", str(tmp_path / "nothing"), "--by", "Ann"]) == 3


@pytest.mark.parametrize("form", ["native", "canonical"])
def test_one_of_several_concurrent_savepoints_at_the_same_path_succeeds(
    form: str, small: SmallRoot, tmp_path: Path
) -> None:
    """Three are of different batches, and two of the same batch, with the same files. The others leave no files."""
    batches, barrier = (2, 4, 6, 6), threading.Barrier(4)
    alone = [savepoint_of(small.job, tmp_path / f"alone {batch}", form, batch) for batch in batches[:3]]

    def take(batch: int) -> int | None:
        barrier.wait()
        with contextlib.suppress(UsageError):
            # The times differ, so that each has another manifest.
            savepoint_of(small.job, tmp_path / "together", form, batch, made_ms=threading.get_ident)
            return batch
        return None

    with ThreadPoolExecutor(4) as threads:
        (winner,) = (batch for batch in threads.map(take, batches) if batch is not None)
    names = set(read_files(tmp_path / "together"))
    assert names == set(read_files(Path(alone[batches.index(winner)].root)))
    assert main(["savepoint", "verify", str(tmp_path / "together")]) == 0
    assert sorted(path.name for path in (tmp_path / "together").iterdir()) == ["counts", "savepoint.arrow"]


def test_files_of_a_savepoint_that_finds_another_one_at_its_path_are_removed(small: SmallRoot, tmp_path: Path) -> None:
    """Folders of operators that the other savepoint does not have are removed too. If it is unreadable, all files stay."""
    for name in ("first", "late"):
        savepoint_of(small.job, tmp_path / name, batch=3 if name == "first" else 5)
    late = read_manifest(Folder(str(tmp_path / "late")))
    buckets = tuple(
        replace(bucket, operator="sums", pointer=replace(bucket.pointer, operator="sums")) for bucket in late.buckets
    )
    file = replace(late.header.operators["counts"], operator="sums")
    other = replace(late.header, id="5a" * 16, operators={"sums": file})
    shutil.copytree(tmp_path / "late" / "counts", tmp_path / "first" / "sums")
    manifest, before = tmp_path / "first" / "savepoint.arrow", read_files(tmp_path / "first")
    data = manifest.read_bytes()
    manifest.write_bytes(b"damaged")
    with pytest.raises(UsageError, match="there is already a savepoint at"):
        write_manifest(Folder(str(tmp_path / "first")), SavepointManifest(other, buckets))
    manifest.write_bytes(data)
    assert read_files(tmp_path / "first") == before
    # A third savepoint that also came late has removed a file that this one had found.
    next((tmp_path / "first" / "sums").rglob("*.arrow")).unlink()
    with pytest.raises(UsageError, match="there is already a savepoint at"):
        finish_savepoint(Folder(str(tmp_path / "first")), SavepointManifest(other, buckets))
    assert main(["savepoint", "verify", str(tmp_path / "first")]) == 0
    assert sorted(path.name for path in (tmp_path / "first").iterdir()) == ["counts", "savepoint.arrow"]


# -- transform -------------------------------------------------------------------------------------


def transform(savepoint: Folder, to: Path, *arguments: str) -> pa.Table:
    assert main(["savepoint", "transform", savepoint.root, str(to), *arguments]) == 0
    assert main(["savepoint", "verify", str(to)]) == 0
    return pa.concat_tables(savepoint_tables(str(to)))


def test_transform_without_options_keeps_all_rows(small: SmallRoot, savepoint: Folder, tmp_path: Path) -> None:
    assert as_model(transform(savepoint, tmp_path / "to")) == small.job.models[-1]
    before, after = read_manifest(savepoint), read_manifest(Folder(str(tmp_path / "to")))
    assert after.header.form == "canonical"
    assert after.header.id != before.header.id
    same = ("query_id", "batch", "watermark_ms", "offsets")
    assert [getattr(after.header, name) for name in same] == [getattr(before.header, name) for name in same]
    for old, new in zip(before.buckets, after.buckets, strict=True):
        assert new.pointer.version == old.pointer.version
        assert new.pointer.ref != old.pointer.ref, "a file with other content needs another name"
        assert new.pointer.earliest_timeout_ms == old.pointer.earliest_timeout_ms
        assert new.pointer.heartbeats == old.pointer.heartbeats


def test_transform_renames_drops_and_retypes_columns_and_filters_keys(
    small: SmallRoot, savepoint: Folder, tmp_path: Path
) -> None:
    table = transform(
        savepoint,
        *(tmp_path / "to", "--rename", "count=total", "--rename", "name=user", "--drop", "note"),
        *("--retype", "count=decimal(22, 2)", "--keep", "count > 60 or name == 'eve'"),
    )
    assert table.schema.names == ["user", "x", "total", "timeout_ms"]
    assert table.schema.field("total").type == pa.decimal128(22, 2)
    assert {(row["user"], row["x"]): (int(row["total"]), row["timeout_ms"]) for row in table.to_pylist()} == {
        key: (row.count, row.timeout_ms)
        for key, row in small.job.models[-1].items()
        if (row.count or 0) > 60 or key[0] == "eve"
    }
    with open_state(str(tmp_path / "to")) as state:
        for row in table.to_pylist():
            assert state.get({"user": row["user"], "x": row["x"]}).to_pylist() == [row], (
                "each key must be in the bucket of its hash"
            )


def test_transform_may_drop_all_keys(savepoint: Folder, tmp_path: Path) -> None:
    assert transform(savepoint, tmp_path / "to", "--keep", "count < 0").num_rows == 0


@pytest.mark.parametrize("form", whole(["native"], ["canonical"]))
def test_a_savepoint_of_the_first_release_can_be_transformed(form: str, tmp_path: Path) -> None:
    table = transform(Folder(str(GOLDEN / form)), tmp_path / "to", "--rename", "tags=labels", "--retype", "n=double")
    expected = json.loads((GOLDEN / "expected.json").read_text())
    rows = sorted(table.to_pylist(), key=lambda row: (str(row["day"]), row["name"] or ""))
    assert [(row["labels"], row["n"], str(row["last"]), row["timeout_ms"]) for row in rows] == [
        (row["tags"], float(row["n"]), row["last"], row["timeout_ms"]) for row in expected
    ]


@pytest.mark.parametrize(
    ("retype", "text"),
    [
        ("n=boolean", r"column 'n' cannot become bool: its value \d+ would become True"),
        (
            "total=decimal(10,1)",
            r"column 'total' cannot become decimal128\(10, 1\): its value \d\.[27]5 would become \d\.[38]\.",
        ),
        ("last=date", r"column 'last' cannot become date32\[day\]: its value 1970-01-01 00:"),
    ],
)
def test_transform_refuses_a_type_that_would_change_a_value(
    retype: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(GOLDEN / "native"), str(tmp_path / "to"), "--retype", retype]
    assert main(["savepoint", "transform", *arguments]) == 2
    assert re.search(text, capsys.readouterr().err)
    assert not (tmp_path / "to" / "savepoint.arrow").exists()


_WIDE = pa.decimal128(22, 2)


@pytest.mark.parametrize(
    ("column", "wanted"),
    [
        (pa.array([1.0, 1e300]), pa.float32()),
        (pa.array([0.5, 0.1]), pa.float32()),
        (pa.array([1, 7]), pa.bool_()),
        (pa.array([0, 86_400_000_001], pa.timestamp("us", "UTC")), pa.date32()),
        (pa.array([None, 0.19]), pa.decimal128(10, 1)),
        (pa.array([Decimal(1), Decimal("12345678901234567890.12")], _WIDE), pa.float64()),
        (pa.array([Decimal(1), Decimal("9" * 38)], pa.decimal128(38, 0)), pa.float64()),
        (pa.array(["inf", "1e400"]), pa.float64()),
    ],
)
def test_the_error_names_the_first_value_that_a_cast_would_change(column: pa.Array, wanted: pa.DataType) -> None:
    message = re.escape(f"column 'c' cannot become {wanted}: its value {column[1]} would become ")
    with pytest.raises(StateValueError, match=message):
        cast_column(column, wanted, "c")


@pytest.mark.parametrize(
    ("column", "wanted"),
    [
        (pa.array([0.5, None, float("nan"), float("inf"), -0.0]), pa.float32()),
        (pa.array([0, None, 1]), pa.bool_()),
        (pa.array([0, 86_400_000_000, None], pa.timestamp("us", "UTC")), pa.date32()),
        (pa.array([0, 1, None], pa.timestamp("us", "UTC")), pa.timestamp("us")),
        (pa.array([None, 0.1, -2.5]), pa.decimal128(10, 1)),
        (pa.array([Decimal("0.10"), None], _WIDE), pa.float64()),
        (pa.array([1.5, 1e22, None]), pa.string()),
        (pa.array(["1.50", "inf", "nan", None, "0.1"]), pa.float32()),
        (pa.array(["07", None]), pa.int32()),
        (pa.array([], pa.float64()), pa.float32()),
    ],
)
def test_values_that_stay_the_same_can_have_another_type(column: pa.Array, wanted: pa.DataType) -> None:
    result = cast_column(column, wanted, "c")
    assert result.type == wanted
    assert result.is_null().to_pylist() == column.is_null().to_pylist()
    assert result.equals(column.cast(wanted)) or pc.any(pc.is_nan(result)).as_py()


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["--rename", "nothing=x"], 2, "there is no column 'nothing'; there are name, x, count, note"),
        (["--rename", "count"], 2, "--rename must be two names"),
        (["--rename", "count=a", "--rename", "count=b"], 2, "names the column 'count' twice"),
        (["--rename", "count=note"], 2, "there would be two state columns 'note'"),
        (["--drop", "name"], 2, "--drop cannot name the key column 'name'"),
        (["--drop", "count", "--drop", "note"], 2, "a state needs at least one column"),
        (["--drop", "count", "--rename", "count=x"], 2, "column 'count' is dropped, so it cannot be renamed"),
        (["--retype", "x=int"], 2, "--retype cannot name the key column 'x'"),
        (["--retype", "count=number"], 2, "'number' is not a type"),
        (["--retype", "note=int"], 2, "column 'note' cannot become int32"),
        (
            ["--retype", "count=tinyint", "--keep", "count < 0 or count > 0", "--rename", "count=__expires_ms"],
            2,
            "is reserved",
        ),
        (["--keep", "count >"], 2, "the filter 'count >' cannot be read"),
        (["--keep", "bucket == 1"], 2, "there is no column 'bucket' for the filter"),
        (["--operator", "sums"], 2, "has no operator 'sums'"),
    ],
)
def test_transform_refuses_invalid_arguments(
    small: SmallRoot, tmp_path: Path, arguments: list[str], code: int, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    savepoint = savepoint_of(small.job, tmp_path / "savepoint")
    assert main(["savepoint", "transform", savepoint.root, str(tmp_path / "to"), *arguments]) == code
    assert text in capsys.readouterr().err
    assert not (tmp_path / "to" / "savepoint.arrow").exists()


def test_transform_does_not_change_the_columns_of_a_built_in_operator(
    small: SmallRoot, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    savepoint = savepoint_of(small.job, tmp_path / "savepoint")
    manifest = read_manifest(savepoint)
    function = json.dumps({"name": "top_k", "parameters": {}})
    operators = {"counts": replace(manifest.header.operators["counts"], function=function)}
    changed = SavepointManifest(replace(manifest.header, operators=operators), manifest.buckets)
    os.unlink(savepoint.where("savepoint.arrow"))
    savepoint.put("savepoint.arrow", encode_manifest(changed))
    assert main(["savepoint", "transform", savepoint.root, str(tmp_path / "to"), "--drop", "note"]) == 2
    assert "is the built-in top_k, whose columns cannot be changed" in capsys.readouterr().err
    assert main(["savepoint", "transform", savepoint.root, str(tmp_path / "to"), "--keep", "count > 60"]) == 0
