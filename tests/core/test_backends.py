"""The backend ``fsspec`` keeps the contract on every kind of store, over real HTTP where it is one."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from spark_state_ext.backends import BackendFactory
from spark_state_ext.backends.files import FilesBackend
from spark_state_ext.testing.backends import BackendContract


class FilesContract(BackendContract):
    """The contract, with our factory."""

    @pytest.fixture
    def factory(self) -> BackendFactory:
        return FilesBackend()


class TestDisk(FilesContract):
    @pytest.fixture
    def options(self, tmp_path: Path) -> Mapping[str, Any]:
        return {"root": str(tmp_path / "root")}


class TestMemory(FilesContract):
    @pytest.fixture
    def options(self) -> Mapping[str, Any]:
        return {"root": f"memory://{uuid.uuid4().hex}", "storage_options": {}}


class TestS3(FilesContract):
    """s3fs, and the moto server."""

    @pytest.fixture
    def options(self, s3: Any) -> Mapping[str, Any]:
        return {"root": s3.root("contract"), "storage_options": s3.options}


class TestObstore(FilesContract):
    """Somebody else's implementation of fsspec, and the same server."""

    @pytest.fixture
    def options(self, s3: Any) -> Mapping[str, Any]:
        pytest.importorskip("obstore", reason="obstore has no release for this version of Python")
        return {"root": s3.root("contract"), "storage_options": s3.obstore_options}


class TestAzure(FilesContract):
    """adlfs, and Azurite."""

    @pytest.fixture
    def options(self, azure: Any) -> Mapping[str, Any]:
        return {"root": azure.root("contract"), "storage_options": azure.options}
