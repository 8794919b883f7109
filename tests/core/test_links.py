"""No file is written or removed behind symbolic links or in folders that other users could write to."""

from __future__ import annotations

import ast
import os
import time
from pathlib import Path

import pytest
from savepoint_folders import savepoint_at

from spark_state_ext.erasing.history import _remove_stores
from spark_state_ext.errors import UnsafeFolderError
from spark_state_ext.files.folder import Folder
from spark_state_ext.reading.live import open_live
from spark_state_ext.savepoints.deletion import delete_files
from spark_state_ext.savepoints.manifest_file import read_manifest
from spark_state_ext.store import LocalStore
from spark_state_ext.store.reclaim import remove_unused
from spark_state_ext.testing.model import SCHEMA
from spark_state_ext.worker import removal
from spark_state_ext.worker.local_folders import scratch_folder, stores_folder

_LONG_AGO_S = time.time() - 9 * 86_400
_OURS = f"spark_state_ext-{os.getuid()}"
_ELSEWHERE = 54_321
LIBRARY = Path(removal.__file__).parent.parent


def get_mode(folder: Path) -> int:
    return folder.stat().st_mode & 0o777


@pytest.fixture
def precious(tmp_path: Path) -> Path:
    """An old file, in folders as deep as those of a bucket."""
    file = tmp_path / "elsewhere" / "a" / "b" / "sources" / "work" / "thesis.txt"
    file.parent.mkdir(parents=True)
    file.write_text("years")
    for path in (file, file.parent):
        os.utime(path, (_LONG_AGO_S, _LONG_AGO_S))
    return file


# -- the local folder ------------------------------------------------------------------------------


def test_a_link_instead_of_the_local_folder_is_refused(tmp_path: Path, precious: Path) -> None:
    (tmp_path / _OURS).symlink_to(tmp_path / "elsewhere")
    for use in (stores_folder, scratch_folder, lambda folder: open_live(folder, "counts")):
        with pytest.raises(UnsafeFolderError, match="is a symbolic link, which another user may have made"):
            use(str(tmp_path))
    assert remove_unused(tmp_path / _OURS, tmp_path / _OURS / "scratch", 3_600.0) == []
    assert precious.exists()
    assert not (tmp_path / "elsewhere" / "scratch").exists()


def test_local_dir_itself_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "larger disk").mkdir()
    (tmp_path / "local").symlink_to(tmp_path / "larger disk")
    folder = scratch_folder(str(tmp_path / "local"))
    assert folder.resolve() == tmp_path / "larger disk" / _OURS / "scratch"


def test_a_link_to_scratch_is_refused(tmp_path: Path, precious: Path) -> None:
    (stores_folder(str(tmp_path)) / "scratch").symlink_to(precious.parent)
    with pytest.raises(UnsafeFolderError, match="scratch is a symbolic link"):
        scratch_folder(str(tmp_path))
    assert remove_unused(tmp_path / _OURS, tmp_path / _OURS / "scratch", 3_600.0) == []
    assert precious.exists()


def test_other_users_lose_their_rights_in_an_existing_local_folder(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ours = tmp_path / _OURS
    for mode in (0o777, 0o750):
        ours.mkdir(exist_ok=True)
        ours.chmod(mode)
        (ours / "scratch").mkdir(exist_ok=True)
        assert stores_folder(str(tmp_path)) == ours
        assert get_mode(ours) == 0o700
        assert f"(mode {mode:o}); this was revoked" in caplog.text
    caplog.clear()
    assert stores_folder(str(tmp_path)) == ours
    assert caplog.records == []


@pytest.mark.parametrize("planted", ["a link", "another user's file"])
def test_a_local_folder_with_planted_entries_is_refused_each_time(tmp_path: Path, planted: str) -> None:
    ours = tmp_path / _OURS
    ours.mkdir()
    ours.chmod(0o777)
    if planted == "a link":
        (ours / "root-counts").symlink_to(tmp_path)
    else:
        (ours / "root-counts").touch()
        give_to_other_user(ours / "root-counts")
    for _ in range(2):
        with pytest.raises(UnsafeFolderError, match="'root-counts' in it is a link or belongs to another user"):
            stores_folder(str(tmp_path))
        assert get_mode(ours) == 0o777, "the next task can see the mode too"
    (ours / "root-counts").unlink()
    assert stores_folder(str(tmp_path)) == ours


def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / _OURS).mkdir()
    give_to_other_user(tmp_path / _OURS)
    with pytest.raises(UnsafeFolderError, match=rf"belongs to another user \(uid {_ELSEWHERE}\); set local_dir to"):
        stores_folder(str(tmp_path))


def give_to_other_user(path: Path) -> None:
    try:
        os.chown(path, _ELSEWHERE, _ELSEWHERE)
    except PermissionError:
        pytest.skip("only root may give a file to another user")


def test_the_local_folder_is_private_for_any_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        ours = stores_folder(str(tmp_path / "made" / "local"))
    finally:
        os.umask(before)
    assert (get_mode(ours), get_mode(ours.parent), get_mode(ours.parent.parent)) == (0o700, 0o755, 0o755)


# -- removing --------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", range(1, 5))
def test_removing_unused_stores_does_not_follow_links(tmp_path: Path, depth: int, precious: Path) -> None:
    """The link takes the place of the operator's, the query's, the schema's or the bucket's folder."""
    stores = tmp_path / "stores"
    names = ("root-counts", "query", "sources", "work")
    link = stores.joinpath(*names[:depth])
    link.parent.mkdir(parents=True)
    target = [*precious.parents][4 - depth]
    link.symlink_to(target)
    os.utime(link, (_LONG_AGO_S, _LONG_AGO_S), follow_symlinks=False)
    remove_unused(stores, stores / "scratch", 3_600.0)
    assert precious.exists()


def test_old_links_in_scratch_are_removed_and_their_targets_are_not(tmp_path: Path, precious: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    for name, target in (("folder", precious.parent), ("file", precious), ("nothing", tmp_path / "nothing")):
        (scratch / name).symlink_to(target)
        os.utime(scratch / name, (_LONG_AGO_S, _LONG_AGO_S), follow_symlinks=False)
    assert len(remove_unused(tmp_path / "stores", scratch, 3_600.0)) == 3
    assert list(scratch.iterdir()) == []
    assert precious.exists()


def test_opening_a_store_removes_a_link_and_not_its_target(tmp_path: Path, precious: Path) -> None:
    """Opening a store removes the folders of earlier boots."""
    (tmp_path / "bucket").mkdir()
    (tmp_path / "bucket" / "an earlier boot").symlink_to(precious.parent)
    LocalStore.at(tmp_path / "bucket", SCHEMA).close()
    assert not (tmp_path / "bucket" / "an earlier boot").is_symlink()
    assert precious.exists()


def test_erasing_removes_no_stores_behind_a_link(tmp_path: Path, precious: Path) -> None:
    operators = tmp_path / "local" / _OURS / f"{'0' * 16}-counts"
    operators.mkdir(parents=True)
    (operators / "query").symlink_to(precious.parent.parent)
    with pytest.raises(UnsafeFolderError, match="query is a symbolic link, and files behind a link are not removed"):
        _remove_stores(tmp_path / "local", "root", "counts", "query")
    assert precious.exists()
    assert (operators / "query").is_symlink(), "the link is not renamed"


@pytest.mark.parametrize("linked", ["counts", "counts/1"])
def test_a_savepoint_with_a_linked_folder_is_not_deleted(tmp_path: Path, linked: str) -> None:
    savepoint = savepoint_at(tmp_path / "savepoint")
    (tmp_path / "savepoint" / linked).rename(tmp_path / "elsewhere")
    (tmp_path / "savepoint" / linked).symlink_to(tmp_path / "elsewhere")
    before = sorted(path for path in tmp_path.rglob("*"))
    with pytest.raises(UnsafeFolderError, match=f"savepoint/{linked} is a symbolic link, and files behind"):
        delete_files(savepoint, read_manifest(savepoint))
    assert sorted(path for path in tmp_path.rglob("*")) == before, "no bucket loses files"


def test_a_savepoint_is_deleted_through_a_link_that_the_user_names(tmp_path: Path) -> None:
    savepoint_at(tmp_path / "savepoint")
    (tmp_path / "link").symlink_to(tmp_path / "savepoint")
    savepoint = Folder(str(tmp_path / "link"))
    assert delete_files(savepoint, read_manifest(savepoint)) == 2
    assert list((tmp_path / "savepoint").iterdir()) == []


def test_a_folder_removes_nothing_behind_a_link(tmp_path: Path, precious: Path) -> None:
    (tmp_path / "root" / "operator").mkdir(parents=True)
    (tmp_path / "root" / "operator" / "query").symlink_to(precious.parent)
    query_folder = Folder(str(tmp_path / "root")).child("operator", "query")
    for remove in (query_folder.remove, query_folder.remove_tree):
        with pytest.raises(UnsafeFolderError, match="operator/query is a symbolic link"):
            remove("thesis.txt")
    with pytest.raises(UnsafeFolderError, match="operator/query is a symbolic link"):
        Folder(str(tmp_path / "root")).remove("operator/query/thesis.txt")
    query_folder.remove_if_empty("thesis.txt")
    assert precious.exists()
    # Files that the query itself wrote through this path, such as its lease, can be removed.
    query_folder.put("lease", b"record")
    query_folder.as_named().remove("lease")
    assert [*precious.parent.iterdir()] == [precious]
    # The link itself can be removed.
    Folder(str(tmp_path / "root")).child("operator").remove_tree("query")
    assert precious.exists()
    assert list((tmp_path / "root" / "operator").iterdir()) == []


# -- duplicating -----------------------------------------------------------------------------------


def test_the_duplicate_of_a_linked_file_has_its_bytes(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk" / "real").write_bytes(b"rows")
    (tmp_path / "source" / "file").symlink_to(tmp_path / "disk" / "real")
    target, source = Folder(str(tmp_path / "target")), Folder(str(tmp_path / "source"))
    # Older versions of the library made links.
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "file").symlink_to(tmp_path / "disk" / "real")
    assert target.duplicate("file", source)
    assert not (tmp_path / "target" / "file").is_symlink()
    (tmp_path / "disk" / "real").unlink()
    assert target.get("file") == b"rows"


# -- the rule --------------------------------------------------------------------------------------

# Only these modules remove files: the rule itself, and those that pass paths of any file system to fsspec.
_REMOVE_THEMSELVES = {"worker/removal.py", "files/folder.py", "files/publication.py"}
_REMOVING = {"rm_file", "rmdir", "rmtree", "unlink", "removedirs"}


def test_only_three_modules_remove_files() -> None:
    modules = set()
    for path in LIBRARY.rglob("*.py"):
        text = path.read_text()
        # Parsing every file would take long.
        for node in (
            ast.walk(ast.parse(text)) if any(name in text for name in (*_REMOVING, "os.remove", ".rm(")) else ()
        ):
            if isinstance(node, ast.Attribute):
                of_os = isinstance(node.value, ast.Name) and node.value.id == "os" and node.attr == "remove"
                if node.attr in _REMOVING or of_os or node.attr == "rm":
                    modules.add(path.relative_to(LIBRARY).as_posix())
    assert modules == _REMOVE_THEMSELVES
