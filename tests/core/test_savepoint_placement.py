"""A savepoint below the root of a query's state is refused before a file is written, however its path is spelled."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from small_root import SmallRoot, savepoint_of, small_root

from spark_state_ext import BucketMap, rescale_savepoint
from spark_state_ext.cli.savepoint import copy_savepoint
from spark_state_ext.cli.transform import Transformation, write_transformed
from spark_state_ext.errors import UsageError
from spark_state_ext.files.folder import Folder
from spark_state_ext.savepoints.manifest_file import read_manifest
from spark_state_ext.savepoints.placement import refuse_in_state
from spark_state_ext.spark.executor import savepoint_tasks

QUERY = "6f1d7f0e-0000-4000-8000-000000000001"
REFUSED = "cannot be at .*contains the state of a query"


def write_state(root: Folder, query_folder: str = QUERY) -> None:
    root.child("counts", query_folder).put("operator_0.json", b"{}")
    root.child("counts", query_folder, "3").put("any.arrow", b"")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_state(Folder(str(tmp_path / "root")))
    return tmp_path / "root"


BELOW = [
    "savepoint",
    "savepoints/of/monday",
    "counts/savepoint",
    f"counts/{QUERY}/savepoint",
    f"counts/{QUERY}/3/savepoint",
]
SPELLED = [
    "{root}/{below}",
    "{root}/{below}/",
    "file://{root}/{below}",
    "local://{root}/{below}/",
    "{root}/counts/../{below}",
    "{root}/../beside/../root/{below}",
    "{link}/{below}",
    "file://{link}/{below}",
    "memory://{bucket}/{below}",
    "memory://{bucket}/{below}/",
]


def test_a_savepoint_below_a_root_is_refused_however_its_path_is_spelled(root: Path) -> None:
    link, bucket = root.parent / "link", f"placement-{os.getpid()}"
    link.symlink_to(root)
    # Here the root is the object store's bucket itself.
    write_state(Folder(f"memory://{bucket}"))
    for spelled, below in itertools.product(SPELLED, BELOW):
        with pytest.raises(UsageError, match=REFUSED):
            refuse_in_state(Folder(spelled.format(root=root, link=link, bucket=bucket, below=below)))
    refuse_in_state(Folder(f"memory://{bucket}-2/savepoints/monday"))
    fsspec.filesystem("memory").rm(f"/{bucket}", recursive=True)


@pytest.mark.parametrize("query_folder", [f"t1700000000000-{'ab' * 16}", f"{QUERY}.r{'0' * 12}"])
def test_query_folders_with_names_of_every_kind_are_recognised(query_folder: str, tmp_path: Path) -> None:
    write_state(Folder(str(tmp_path / "root")), query_folder)
    with pytest.raises(UsageError, match=REFUSED):
        refuse_in_state(Folder(str(tmp_path / "root" / "savepoint")))


def test_a_savepoint_next_to_a_root_is_accepted(root: Path) -> None:
    savepoints = root.parent / "savepoints"
    # The folder may hold files, other savepoints and links.
    Folder(str(savepoints / "monday" / "counts" / "3")).put("any.arrow", b"")
    Folder(str(root.parent / "link to it")).put("file", b"")
    (root / "out").symlink_to(savepoints)
    for path in (savepoints / "tuesday", root.parent / "tuesday", root.parent / "root-2", root / "out" / "tuesday"):
        refuse_in_state(Folder(str(path)))
        refuse_in_state(Folder(f"file://{path}"))


def test_a_savepoint_is_accepted_if_a_parent_folder_cannot_be_listed(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: str, **_: Any) -> list[str]:
        raise PermissionError(path)

    monkeypatch.setattr(fsspec.implementations.local.LocalFileSystem, "ls", lambda self, path, **_: refuse(path))
    refuse_in_state(Folder(str(root / "savepoint")))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SmallRoot]:
    with small_root(tmp_path_factory.mktemp("small"), batches=2) as root:
        yield root


def copy(source: Folder, target: Folder) -> None:
    copy_savepoint(source, read_manifest(source), target)


def transform(source: Folder, target: Folder) -> None:
    write_transformed(source, read_manifest(source), target, Transformation("counts", {}, (), {}, "count > 60"))


def rescale(source: Folder, target: Folder) -> None:
    rescale_savepoint(source.root, target.root, BucketMap(8))


def look_in_a_task(source: Folder, target: Folder) -> None:
    """Check the target in a task, as `stop_with_savepoint`, `write_savepoint`, `import_native` and `take_savepoint` do."""
    list(savepoint_tasks.refuse({"savepoint": target.root, "savepoint_options": {}}, []))


@pytest.mark.parametrize("write", [copy, transform, rescale, look_in_a_task])
def test_every_writer_refuses_a_savepoint_below_a_root_and_writes_no_files(
    write: Callable[[Folder, Folder], None], small: SmallRoot, root: Path
) -> None:
    source = savepoint_of(small.job, root.parent / "savepoint")
    before = sorted(root.rglob("*"))
    with pytest.raises(UsageError, match=REFUSED):
        write(source, Folder(str(root / "savepoint")))
    assert sorted(root.rglob("*")) == before
