"""The committed record of a bucket: which checkpoint is committed, for other processes of the machine.

Runs do not show which checkpoint is committed, because failed attempts leave runs too. So each call records the
committed checkpoint that Spark handed it, in a file of one block next to the environment, which is written and read in
one step.
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

from arrow_schemas.damage import describe_damage
from arrow_schemas.lineage import CheckpointRef
from arrow_schemas.operator import OperatorFile
from spark_state_ext.errors import CorruptFileError, CorruptStoreError
from spark_state_ext.worker.boot import boot_id
from spark_state_ext.worker.removal import remove_file

__all__ = ["CommittedRecord", "read_committed_bytes", "read_operator_file", "read_committed", "write_committed"]

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
        The batch that committed it; -1: the state that the query began with.
    called_ms
        When the call that received it began, by the machine's clock, milliseconds since 1970.
    plan_id
        Id of the run of the query.
    namespace
        PID namespace of the job's processes (`worker.process`).
    clock_ms
        The current time by the clock of the operator's time to live; None: nothing expires.
    """

    ref: CheckpointRef | None
    batch: int
    called_ms: int
    plan_id: str
    namespace: str
    clock_ms: int | None = None

    def encode(self) -> bytes:
        """Encode the record as it is written to the file."""
        fields = {**asdict(self), "ref": None if self.ref is None else [self.ref.version, self.ref.id]}
        body = json.dumps(fields).encode().ljust(_BYTES - _CRC_BYTES)
        return zlib.crc32(body).to_bytes(_CRC_BYTES, "little") + body

    @staticmethod
    def decode(data: bytes, where: str) -> CommittedRecord:
        """Decode what `encode` returned."""
        body = data[_CRC_BYTES:]
        if len(data) < _CRC_BYTES or zlib.crc32(body).to_bytes(_CRC_BYTES, "little") != data[:_CRC_BYTES]:
            raise CorruptStoreError(f"{where} differs from its checksum")
        try:
            fields = json.loads(body)
            ref = fields.pop("ref")
            return CommittedRecord(None if ref is None else CheckpointRef(*ref), **fields)
        except (AttributeError, CorruptFileError, KeyError, TypeError, ValueError) as error:
            raise CorruptStoreError(f"{where} was not written by this release: {describe_damage(error)}") from error


def write_committed(bucket_folder: Path, record: CommittedRecord, operator: OperatorFile) -> None:
    """Write a bucket's committed record; if the disk refuses it, log a warning and write none."""
    folder = bucket_folder / boot_id()
    try:
        if not (folder / _OPERATOR).exists():
            _write_operator(folder, operator)
        file = os.open(folder / _COMMITTED, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            with contextlib.suppress(CorruptStoreError):
                previous = CommittedRecord.decode(os.pread(file, _BYTES, 0), _COMMITTED)
                if previous.plan_id == record.plan_id and previous.batch > record.batch:
                    return
            os.pwrite(file, record.encode(), 0)
        finally:
            os.close(file)
    except FileNotFoundError:  # another process has just set the store aside
        return
    except OSError as error:
        _warn_once(f"other processes cannot read the state in {bucket_folder}: {error.strerror}")


def _write_operator(folder: Path, operator: OperatorFile) -> None:
    """Write the operator file atomically, and leave no partial file if the disk is full."""
    temporary = folder / f"{_OPERATOR}-{uuid.uuid4().hex}"
    try:
        temporary.write_bytes(operator.encode())
        temporary.chmod(0o600)
        temporary.replace(folder / _OPERATOR)
    finally:
        remove_file(temporary, missing_ok=True)


@functools.cache
def _warn_once(text: str) -> None:
    """Log a warning once per process, because each call of a bucket would log the same."""
    _LOGGER.warning(text)


def read_committed(bucket_folder: Path) -> CommittedRecord | None:
    """Read a bucket's committed record; None if no call has written one."""
    data = read_committed_bytes(bucket_folder)
    return None if data is None else CommittedRecord.decode(data, str(bucket_folder))


def read_committed_bytes(bucket_folder: Path) -> bytes | None:
    """Read the bytes of a bucket's committed record; None if no call has written one."""
    try:
        file = os.open(f"{bucket_folder}/{boot_id()}/{_COMMITTED}", os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        return os.read(file, _BYTES)
    finally:
        os.close(file)


def read_operator_file(bucket_folder: Path) -> OperatorFile | None:
    """Read the operator file that describes a store's rows; None if no call has written one."""
    path = bucket_folder / boot_id() / _OPERATOR
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return OperatorFile.decode(data, str(path))
