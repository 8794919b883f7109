"""One checkpoint file from one place to another: duplicated where the stores can, else through this process."""

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
from spark_state_ext.files.sealed import SealedFile, publish
from spark_state_ext.files.sealed_body import announced_body, verified
from spark_state_ext.worker.spill import local_errors
from spark_state_ext.worker.threads import side_by_side

__all__ = ["How", "copied", "digest_text", "put_whole", "refuse_incomplete", "refuse_other_files", "refuse_torn"]

_PARALLEL_MAX = 16


class How(enum.Enum):
    """How a file came to its new place."""

    THERE = "it was there"
    DUPLICATED = "a hard link, or a copy by the store"
    STREAMED = "through this process"


def digest_text(body: BodyRecord) -> str:
    """Kind and digest of a body, as a manifest has it."""
    return f"{body.algorithm}={body.digest}"


def copied(files: Readable, file: SavedFile, target: Folder, scratch: Path) -> How:
    """Have a file in another folder too. May be repeated, and stopped, at any time."""
    if _is_there(target, file):
        return How.THERE
    if isinstance(files, Duplicable) and files.duplicate_to(target, file.name):
        if not _is_there(target, file):
            # What was there under the name before stays.
            wrong = target if _is_there(files, file) else files
            raise CorruptFileError(
                f"{wrong.where(file.name)} is not the file that was announced ({file.size_bytes} bytes, {file.digest})"
            )
        return How.DUPLICATED
    with local_errors(scratch), tempfile.TemporaryDirectory(dir=scratch) as folder:
        path = Path(folder) / file.name
        files.get_file(file.name, path)
        _check(pa.OSFile(str(path), "r"), file, files.where(file.name))
        _put(target, SealedFile(file.name, file.size_bytes, path=path), file)
    return How.STREAMED


def put_whole(target: Folder, sealed: SealedFile) -> SavedFile:
    """Publish a checkpoint file that was made here, unless another attempt at the same task has."""
    there = _announced_in(target, sealed.name)
    if there is not None:
        return there
    body = announced_body(sealed.get_range, sealed.size_bytes, sealed.name)
    file = SavedFile(sealed.name, sealed.size_bytes, digest_text(body))
    _put(target, sealed, file)
    return file


def refuse_incomplete(savepoint: Folder, manifest: SavepointManifest) -> None:
    """Refuse a manifest whose files are not there, or are others: nobody could start from them."""
    for folder, file in _others(_files_of(savepoint, manifest)):
        raise CorruptFileError(
            f"{folder.where(file.name)} is not the file that a task has written there ({file.size_bytes} bytes, "
            f"{file.digest}), so there is no savepoint at {savepoint.root}: see that the path is one that all "
            "executors share and that nobody else writes to, then take it again at another path"
        )


def refuse_torn(savepoint: Folder, manifest: SavepointManifest) -> None:
    """Refuse to read a savepoint if its files are not those that its manifest names."""
    _refuse_others(_files_of(savepoint, manifest))


def refuse_other_files(folder: Folder, named: Sequence[SavedFile]) -> None:
    """Refuse to read a bucket of a savepoint if its files are not those that the manifest names."""
    _refuse_others([(folder, file) for file in named])


def _refuse_others(named: Sequence[tuple[Folder, SavedFile]]) -> None:
    for folder, file in _others(named):
        raise CorruptFileError(
            f"{folder.where(file.name)} is missing, or not the file that the savepoint's manifest names "
            f"({file.size_bytes} bytes, {file.digest}): look with spark-state-ext savepoint verify, and take another "
            "savepoint"
        )


def _files_of(savepoint: Folder, manifest: SavepointManifest) -> list[tuple[Folder, SavedFile]]:
    """The files that a manifest names, each with its folder."""
    return [(savepoint.child(it.operator, str(it.bucket)), file) for it in manifest.buckets for file in it.files]


def _others(named: Sequence[tuple[Folder, SavedFile]]) -> list[tuple[Folder, SavedFile]]:
    """Those that are not there, or are other files by their size and their end."""
    if not named:
        return []
    found = side_by_side("look", min(_PARALLEL_MAX, len(named)), lambda it: _is_there(*it), named)
    return [it for it, there in zip(named, found, strict=True) if not there]


def _put(target: Folder, sealed: SealedFile, file: SavedFile) -> None:
    publish(target, sealed)
    if not _is_there(target, file):
        raise StorageError(f"{target.where(file.name)} was written and reads otherwise: it was torn on its way")


def _is_there(files: Readable, file: SavedFile) -> bool:
    """Whether a folder has a file, by its size and by what its end tells of its body."""
    return _announced_in(files, file.name) == file


def _announced_in(files: Readable, name: str) -> SavedFile | None:
    """What a file says of itself; None where there is none that is whole."""
    try:
        size = files.size(name)
        body = announced_body(lambda start, end: files.get_range(name, start, end), size, files.where(name))
    except (MissingCheckpointError, CorruptFileError):
        return None
    return SavedFile(name, size, digest_text(body))


def _check(opened: pa.NativeFile, file: SavedFile, where: str) -> None:
    body = verified(opened, where).record
    if opened.size() != file.size_bytes or digest_text(body) != file.digest:
        raise CorruptFileError(
            f"{where} is not the file that was announced ({file.size_bytes} bytes, {file.digest}): it has "
            f"{opened.size()} bytes, {digest_text(body)}"
        )
