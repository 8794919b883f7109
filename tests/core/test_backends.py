"""The backend ``fsspec`` keeps the contract on every kind of store; requests to object stores are real HTTP."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from spark_state_ext import Backend
from spark_state_ext.backends import STATE, BackendContext, BackendFactory
from spark_state_ext.backends.files import FilesBackend, FilesBackup
from spark_state_ext.backends.registry import load_factory
from spark_state_ext.errors import ExecutorPackageError, StorageError, UsageError
from spark_state_ext.files.folder import Folder, refuse_relative
from spark_state_ext.files.sealed_file import SealedFile
from spark_state_ext.testing.backends import BackendContract
from spark_state_ext.testing.model import Refs
from spark_state_ext.worker.threads import CallerExecutor


class FilesContract(BackendContract):
    """Runs the contract with our factory."""

    @pytest.fixture
    def factory(self) -> BackendFactory:
        return FilesBackend()

    @pytest.fixture
    def elsewhere(self, options: Mapping[str, Any]) -> Folder:
        """Return another folder of the same store."""
        return Folder(f"{options['root']}-elsewhere", options.get("storage_options", {}))


class TestDisk(FilesContract):
    @pytest.fixture
    def options(self, tmp_path: Path) -> Mapping[str, Any]:
        return {"root": str(tmp_path / "root")}


class TestMemory(FilesContract):
    @pytest.fixture
    def options(self) -> Mapping[str, Any]:
        return {"root": f"memory://{uuid.uuid4().hex}", "storage_options": {}}


class TestS3(FilesContract):
    """Runs the contract with s3fs and the moto server."""

    @pytest.fixture
    def options(self, s3: Any) -> Mapping[str, Any]:
        return {"root": s3.root("contract"), "storage_options": s3.options}


@pytest.mark.soak
class TestObstore(FilesContract):
    """Runs the contract with another implementation of fsspec and the same server."""

    @pytest.fixture
    def options(self, s3: Any) -> Mapping[str, Any]:
        pytest.importorskip("obstore", reason="obstore has no release for this version of Python")
        return {"root": s3.root("contract"), "storage_options": s3.obstore_options}


class TestAzure(FilesContract):
    """Runs the contract with adlfs and Azurite."""

    @pytest.fixture
    def options(self, azure: Any) -> Mapping[str, Any]:
        return {"root": azure.root("contract"), "storage_options": azure.options}


class TestShare(FilesContract):
    """Runs the contract on file systems where a rename never replaces an existing file."""

    @pytest.fixture(params=["Share", "ByNameNode"])
    def options(self, request: pytest.FixtureRequest, tmp_path: Path) -> Mapping[str, Any]:
        return {"root": str(tmp_path / "root"), "storage_options": {"implementation": f"shares.{request.param}"}}


class TestAnotherPackage(BackendContract):
    """Runs the contract with a backend that another package has registered as an entry point."""

    @pytest.fixture
    def factory(self) -> BackendFactory:
        return load_factory("sqlite")

    @pytest.fixture
    def options(self, tmp_path: Path) -> Mapping[str, Any]:
        return {"path": str(tmp_path / "states.sqlite")}


def test_an_unknown_backend_kind_is_refused_when_its_factory_is_loaded() -> None:
    with pytest.raises(ExecutorPackageError, match="no installed package provides the backend kind 'tape'"):
        load_factory("tape")
    assert load_factory("fsspec") is load_factory("fsspec")
    assert Backend(kind="tape", name="t").factory_options == {}


@pytest.mark.parametrize("root", ["state", "./state", "file:state", "file://state", "local://state", "file://~/state"])
def test_a_relative_root_is_refused(root: str) -> None:
    """Each worker would resolve it against its own working folder."""
    with pytest.raises(
        UsageError, match=r"a backend's root must be .*absolute path.* executors have other working"
    ) as error:
        Backend(root)
    assert repr(root) in str(error.value)
    with pytest.raises(UsageError, match=r"^root must be .*absolute path"):
        refuse_relative(f"simplecache::file://{root}", "root")


@pytest.mark.parametrize(
    "root", ["/state", "/", "file:///state", "local:///state", "memory://state", "s3://bucket/state"]
)
def test_an_absolute_root_is_accepted(root: str) -> None:
    assert Backend(root).root == root
    assert Backend(root, name="old name").root == root


def test_an_upload_after_closing_is_not_confirmed(tmp_path: Path) -> None:
    backup = FilesBackup(
        Folder(str(tmp_path / "root")), BackendContext("a", {}, "counts", "", 3, CallerExecutor(), tmp_path, 0.0)
    )
    ref = Refs().next(1)
    markers = backup.snapshot(ref, {STATE: SealedFile.of("file", b"state")})
    backup.close()
    with pytest.raises(StorageError, match=r"file was not sent to .*root because the backend was closed"):
        backup.upload(ref, markers).result()
