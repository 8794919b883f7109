"""Copies one checkpoint file: duplicates it if the stores can, else streams it through this process."""

from __future__ import annotations

import enum
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa

from arrow_schemas.lineage import BodyRecord
from arrow_schemas.savepoint import SavedFile, SavepointManifest
from spark_state_ext.errors import CorruptFileError, MissingCheckpointError, StorageError
from spark_state_ext.files.folder import Duplicable, Folder, Readable
from spark_state_ext.files.sealed_body import read_announced_body, verify_body
from spark_state_ext.files.sealed_file import SealedFile, publish
from spark_state_ext.worker.spill import translate_local_errors
from spark_state_ext.worker.threads import map_in_parallel

__all__ = [
    "CopyMethod",
    "copy_file",
    "digest_text",
    "put_whole",
    "refuse_incomplete",
    "refuse_other_files",
    "refuse_torn",
]

_PARALLEL_MAX = 16


class CopyMethod(enum.Enum):
    """The way in which a file was copied."""

    THERE = "it was there"
    DUPLICATED = "a hard link, or a copy by the store"
    STREAMED = "through this process"


def digest_text(body: BodyRecord) -> str:
    """Return the kind and digest of a body, as written in a manifest."""
    return f"{body.algorithm}={body.digest}"


def copy_file(files: Readable, file: SavedFile, target: Folder, scratch: Path) -> CopyMethod:
    """Copy a file to another folder; safe to stop and repeat at any time."""
    if _has_file(target, file):
        return CopyMethod.THERE
    if isinstance(files, Duplicable) and files.duplicate_to(target, file.name):
        if not _has_file(target, file):
            # An existing file with this name is not replaced.
            wrong = target if _has_file(files, file) else files
            raise CorruptFileError(
                f"{wrong.where(file.name)} is not the expected file ({file.size_bytes} bytes, {file.digest})"
            )
        return CopyMethod.DUPLICATED
    with translate_local_errors(scratch), tempfile.TemporaryDirectory(dir=scratch) as folder:
        path = Path(folder) / file.name
        files.get_file(file.name, path)
        _check_copy(pa.OSFile(str(path), "r"), file, files.where(file.name))
        _publish_checked(target, SealedFile(file.name, file.size_bytes, path=path), file)
    return CopyMethod.STREAMED


def put_whole(target: Folder, sealed: SealedFile) -> SavedFile:
    """Publish a checkpoint file that was made here, unless another attempt of the task already did."""
    existing = _read_announced(target, sealed.name)
    if existing is not None:
        return existing
    body = read_announced_body(sealed.get_range, sealed.size_bytes, sealed.name)
    file = SavedFile(sealed.name, sealed.size_bytes, digest_text(body))
    _publish_checked(target, sealed, file)
    return file


def refuse_incomplete(savepoint: Folder, manifest: SavepointManifest) -> None:
    """Refuse a manifest whose files are missing or different: no query could start from them."""
    for folder, file in _find_wrong_files(_list_files(savepoint, manifest)):
        raise CorruptFileError(
            f"{folder.where(file.name)} is not the file that a task wrote there ({file.size_bytes} bytes, "
            f"{file.digest}), so there is no savepoint at {savepoint.root}: make sure that all executors share the "
            "path and that only this package writes to it, then take the savepoint again at another path"
        )


def refuse_torn(savepoint: Folder, manifest: SavepointManifest) -> None:
    """Refuse to read a savepoint if its files do not match its manifest."""
    _refuse_wrong_files(_list_files(savepoint, manifest))


def refuse_other_files(folder: Folder, files: Sequence[SavedFile]) -> None:
    """Refuse to read a bucket of a savepoint if its files do not match the manifest."""
    _refuse_wrong_files([(folder, file) for file in files])


def _refuse_wrong_files(files: Sequence[tuple[Folder, SavedFile]]) -> None:
    for folder, file in _find_wrong_files(files):
        raise CorruptFileError(
            f"{folder.where(file.name)} is missing or differs from the savepoint's manifest "
            f"({file.size_bytes} bytes, {file.digest}): check the savepoint with spark-state-ext savepoint verify, and "
            "take another one"
        )


def _list_files(savepoint: Folder, manifest: SavepointManifest) -> list[tuple[Folder, SavedFile]]:
    """List the files in a manifest, each with its folder."""
    return [
        (savepoint.child(bucket.operator, str(bucket.bucket)), file)
        for bucket in manifest.buckets
        for file in bucket.files
    ]


def _find_wrong_files(files: Sequence[tuple[Folder, SavedFile]]) -> list[tuple[Folder, SavedFile]]:
    """Return the files that are missing, or differ by their size and footer."""
    if not files:
        return []
    matches = map_in_parallel("look", min(_PARALLEL_MAX, len(files)), lambda pair: _has_file(*pair), files)
    return [pair for pair, is_there in zip(files, matches, strict=True) if not is_there]


def _publish_checked(target: Folder, sealed: SealedFile, file: SavedFile) -> None:
    publish(target, sealed)
    if not _has_file(target, file):
        raise StorageError(
            f"{target.where(file.name)} was written, but reads back differently: the upload was incomplete"
        )


def _has_file(files: Readable, file: SavedFile) -> bool:
    """True if a folder has a file with the same size and the same body digest in its footer."""
    return _read_announced(files, file.name) == file


def _read_announced(files: Readable, name: str) -> SavedFile | None:
    """Read a file's size and the body digest in its footer; None if the file is missing or incomplete."""
    try:
        size = files.size(name)
        body = read_announced_body(lambda start, end: files.get_range(name, start, end), size, files.where(name))
    except (MissingCheckpointError, CorruptFileError):
        return None
    return SavedFile(name, size, digest_text(body))


def _check_copy(opened_file: pa.NativeFile, file: SavedFile, where: str) -> None:
    body = verify_body(opened_file, where).record
    if opened_file.size() != file.size_bytes or digest_text(body) != file.digest:
        raise CorruptFileError(
            f"{where} is not the expected file ({file.size_bytes} bytes, {file.digest}): it has {opened_file.size()} "
            f"bytes, {digest_text(body)}"
        )
