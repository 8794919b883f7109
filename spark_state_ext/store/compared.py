"""Which blocks of a run's file were compared with their checksums in this boot, told to processes that come later.

A file beside the run's has 8 bytes for each block: a digest of the boot, of which file it is (device, inode, length,
and when it was changed, as the system tells), of the block's number and of its checksum. So a mark that is torn,
damaged, of another file, or of this one before somebody changed it, is none; and processes may write at once, as each
writes the same bytes to the same place. Nothing needs the file: who finds no mark compares the block.

What is not noticed: a byte that the disk or the memory of the machine changes after the block was compared, without
anybody writing to the file. Within a process that is so anyway.
"""

from __future__ import annotations

import hashlib
import logging
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from spark_state_ext.store.runs import Run
from spark_state_ext.worker.boot import UNKNOWN_BOOT, boot_id

__all__ = ["ComparedBlocks", "FileState", "compared_of"]

_LOGGER = logging.getLogger("spark_state_ext")
_MARK_BYTES = 8
_STATE = struct.Struct("<5Q")
_BLOCK = struct.Struct("<QI")


def compared_of(folder: Path, run_key: str) -> Path:
    """Where the marks of a run's file lie."""
    return folder / f"base-{run_key}.compared"


@dataclass(frozen=True)
class FileState:
    """Which file it is, and when it was changed last.

    Parameters
    ----------
    device, inode
        Where it lies.
    size_bytes
        Its length.
    modified_ns, changed_ns
        When its bytes were written, and when anything of it was changed. Nobody can set the latter.
    """

    device: int
    inode: int
    size_bytes: int
    modified_ns: int
    changed_ns: int

    @staticmethod
    def of(path: Path) -> FileState | None:
        """That of a file; None where there is none, or the system does not say."""
        try:
            it = path.stat()
        except OSError:
            return None
        return FileState(it.st_dev, it.st_ino, it.st_size, it.st_mtime_ns, it.st_ctime_ns)

    def encode(self) -> bytes:
        """As bytes of a fixed length."""
        fields = (self.device, self.inode, self.size_bytes, self.modified_ns, self.changed_ns)
        return _STATE.pack(*(it & 0xFFFF_FFFF_FFFF_FFFF for it in fields))


class ComparedBlocks:
    """The marks of a run's file, as a process has it mapped. Get one with `ComparedBlocks.of`."""

    def __init__(self, folder: Path, run: Run, state: FileState) -> None:
        self._folder = folder
        self._run = run
        self._state = state
        told = f"{boot_id()} {run.key} ".encode() + state.encode()
        self._digest = hashlib.blake2b(told, digest_size=_MARK_BYTES)
        self._ended = False

    @staticmethod
    def of(folder: Path, run: Run, file: Path, before: FileState | None) -> ComparedBlocks | None:
        """The marks of a file; None where nothing can be told of it, and every process has to compare for itself."""
        # Of boots that cannot be told apart, what was compared in one says nothing for the other.
        if before is None or boot_id() == UNKNOWN_BOOT or FileState.of(file) != before:
            return None
        return ComparedBlocks(folder, run, before)

    def known(self) -> list[int]:
        """The blocks that were compared, by whatever process, while the file was as it is."""
        try:
            marks = compared_of(self._folder, self._run.key).read_bytes()
        except OSError:  # mostly nobody has compared any
            return []
        return [
            block
            for block in range(min(len(self._run.blocks), len(marks) // _MARK_BYTES))
            if marks[_MARK_BYTES * block : _MARK_BYTES * (block + 1)] == self._mark(block)
        ]

    def note(self, file: Path, blocks: Sequence[int]) -> None:
        """Tell that this process has compared some blocks."""
        if self._ended or not blocks:
            return
        if FileState.of(file) != self._state:
            self._ended = True
            return
        try:
            marks = os.open(compared_of(self._folder, self._run.key), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                # Neighbours are written at once.
                for _, found in groupby(enumerate(blocks), key=lambda it: it[1] - it[0]):
                    together = [block for _, block in found]
                    data = b"".join(map(self._mark, together))
                    os.pwrite(marks, data, _MARK_BYTES * together[0])
            finally:
                os.close(marks)
        except OSError as error:
            # The next process compares them once more, that is all.
            self._ended = True
            _LOGGER.warning("what was compared of the local store %s is not noted: %s", self._folder, error)

    def _mark(self, block: int) -> bytes:
        digest = self._digest.copy()
        digest.update(_BLOCK.pack(block, self._run.blocks[block]))
        return digest.digest()
