"""What is committed of a bucket, as the calls that work on it tell other processes of the machine.

A call is handed a checkpoint that is committed. Runs do not say which one that is: they are there of attempts that
failed too. So each call writes it down beside the environment, in a file of one block, which is written and read at
once.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import uuid
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path

from arrow_schemas.damage import damage_in
from arrow_schemas.lineage import CheckpointRef
from arrow_schemas.operator import OperatorFile
from spark_state_ext.errors import CorruptFileError, CorruptStoreError
from spark_state_ext.worker.boot import boot_id
from spark_state_ext.worker.removal import remove_file

__all__ = ["CommittedRecord", "committed_bytes", "operator_of", "read_committed", "write_committed"]

_LOGGER = logging.getLogger("spark_state_ext")
_COMMITTED, _OPERATOR = "committed", "operator.json"
_BYTES = 512
_CRC_BYTES = 4


@dataclass(frozen=True)
class CommittedRecord:
    """Which checkpoint of a bucket is committed.

    Parameters
    ----------
    ref
        The checkpoint; None: there is no state yet.
    batch
        The batch after which the state is so; -1: what the query began with.
    called_ms
        When the call was made that was handed it, by the machine's clock, milliseconds since 1970.
    plan_id
        Of the run.
    namespace
        Where the numbers of the job's processes count (`worker.process`).
    clock_ms
        The time by the clock of the operator's time to live; None: nothing expires.
    """

    ref: CheckpointRef | None
    batch: int
    called_ms: int
    plan_id: str
    namespace: str
    clock_ms: int | None = None

    def encode(self) -> bytes:
        """As it stands in the file."""
        fields = {**asdict(self), "ref": None if self.ref is None else [self.ref.version, self.ref.id]}
        body = json.dumps(fields).encode().ljust(_BYTES - _CRC_BYTES)
        return zlib.crc32(body).to_bytes(_CRC_BYTES, "little") + body

    @staticmethod
    def decode(data: bytes, where: str) -> CommittedRecord:
        """Inverse of `encode`."""
        body = data[_CRC_BYTES:]
        if len(data) < _CRC_BYTES or zlib.crc32(body).to_bytes(_CRC_BYTES, "little") != data[:_CRC_BYTES]:
            raise CorruptStoreError(f"{where} differs from its checksum")
        try:
            fields = json.loads(body)
            ref = fields.pop("ref")
            return CommittedRecord(None if ref is None else CheckpointRef(*ref), **fields)
        except (AttributeError, CorruptFileError, KeyError, TypeError, ValueError) as error:
            raise CorruptStoreError(f"{where} is not what this release writes: {damage_in(error)}") from error


def write_committed(bucket_folder: Path, record: CommittedRecord, operator: OperatorFile) -> None:
    """Tell what is committed; where that cannot be written, nobody is told."""
    folder = bucket_folder / boot_id()
    try:
        if not (folder / _OPERATOR).exists():
            _put_operator(folder, operator)
        file = os.open(folder / _COMMITTED, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            with contextlib.suppress(CorruptStoreError):
                before = CommittedRecord.decode(os.pread(file, _BYTES, 0), _COMMITTED)
                if before.plan_id == record.plan_id and before.batch > record.batch:
                    return
            os.pwrite(file, record.encode(), 0)
        finally:
            os.close(file)
    except FileNotFoundError:  # another process has just set the store aside
        return
    except OSError as error:
        _tell(f"others cannot read the state of {bucket_folder}: {error.strerror}")


def _put_operator(folder: Path, operator: OperatorFile) -> None:
    """Whole, or not there; and nothing is left of it where the disk is full."""
    written = folder / f"{_OPERATOR}-{uuid.uuid4().hex}"
    try:
        written.write_bytes(operator.encode())
        written.chmod(0o600)
        written.replace(folder / _OPERATOR)
    finally:
        remove_file(written, missing_ok=True)


@functools.cache
def _tell(text: str) -> None:
    """Once in a process: each call of a bucket would say the same."""
    _LOGGER.warning(text)


def read_committed(bucket_folder: Path) -> CommittedRecord | None:
    """What is committed; None where no call has told."""
    data = committed_bytes(bucket_folder)
    return None if data is None else CommittedRecord.decode(data, str(bucket_folder))


def committed_bytes(bucket_folder: Path) -> bytes | None:
    """What is committed, as it stands there; None where no call has told."""
    try:
        file = os.open(f"{bucket_folder}/{boot_id()}/{_COMMITTED}", os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        return os.read(file, _BYTES)
    finally:
        os.close(file)


def operator_of(bucket_folder: Path) -> OperatorFile | None:
    """The operator file that the rows of a store are written under; None where no call has told."""
    path = bucket_folder / boot_id() / _OPERATOR
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return OperatorFile.decode(data, str(path))
