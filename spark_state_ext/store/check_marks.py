"""Marks of the blocks of a run's file that were checked during this boot, for later processes.

A file next to the run's file has a mark of 8 bytes for each block: a digest of the boot, the file's identity (device,
inode, length, times of change), the block's number and its checksum. A mark does not match if it is torn, damaged, of
another file or of an earlier version of the file. Processes may write marks at the same time, because each writes the
same bytes to the same place. The file is optional: a block without a mark is checked again.

Not detected: a byte that the machine's disk or memory changes after the block was checked, without a write to the file.
A single process does not detect that either.
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

__all__ = ["CheckMarks", "FileState", "check_marks_path"]

_LOGGER = logging.getLogger("spark_state_ext")
_MARK_BYTES = 8
_STATE = struct.Struct("<5Q")
_BLOCK = struct.Struct("<QI")


def check_marks_path(folder: Path, run_key: str) -> Path:
    """Return the path of the marks of a run's file."""
    return folder / f"base-{run_key}.compared"


@dataclass(frozen=True)
class FileState:
    """Identity of a file, and when it was last changed.

    Parameters
    ----------
    device, inode
        Identity of the file in the file system.
    size_bytes
        Length of the file.
    modified_ns, changed_ns
        When the content was last written, and when content or metadata last changed. The latter cannot be set by
        programs.
    """

    device: int
    inode: int
    size_bytes: int
    modified_ns: int
    changed_ns: int

    @staticmethod
    def of(path: Path) -> FileState | None:
        """Return the state of a file; None if the file does not exist or cannot be examined."""
        try:
            stat = path.stat()
        except OSError:
            return None
        return FileState(stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)

    def encode(self) -> bytes:
        """Encode the state as bytes of a fixed length."""
        fields = (self.device, self.inode, self.size_bytes, self.modified_ns, self.changed_ns)
        return _STATE.pack(*(field & 0xFFFF_FFFF_FFFF_FFFF for field in fields))


class CheckMarks:
    """The marks of a run's file that this process has mapped. Create one with `CheckMarks.of`."""

    def __init__(self, folder: Path, run: Run, state: FileState) -> None:
        self._folder = folder
        self._run = run
        self._state = state
        prefix = f"{boot_id()} {run.key} ".encode() + state.encode()
        self._digest = hashlib.blake2b(prefix, digest_size=_MARK_BYTES)
        self._disabled = False

    @staticmethod
    def of(folder: Path, run: Run, file: Path, before: FileState | None) -> CheckMarks | None:
        """Return the marks of a file; None if marks are not usable and every process has to check the blocks itself."""
        # If boots cannot be distinguished, a mark of an earlier boot would look valid.
        if before is None or boot_id() == UNKNOWN_BOOT or FileState.of(file) != before:
            return None
        return CheckMarks(folder, run, before)

    def marked_blocks(self) -> list[int]:
        """Return the blocks that any process has checked since the file was last changed."""
        try:
            marks = check_marks_path(self._folder, self._run.key).read_bytes()
        except OSError:  # usually because no block was checked yet
            return []
        return [
            block
            for block in range(min(len(self._run.blocks), len(marks) // _MARK_BYTES))
            if marks[_MARK_BYTES * block : _MARK_BYTES * (block + 1)] == self._mark_of(block)
        ]

    def mark_blocks(self, file: Path, blocks: Sequence[int]) -> None:
        """Mark blocks as checked by this process."""
        if self._disabled or not blocks:
            return
        if FileState.of(file) != self._state:
            self._disabled = True
            return
        try:
            marks = os.open(
                check_marks_path(self._folder, self._run.key), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600
            )
            try:
                # Marks of neighbouring blocks are written together.
                for _, group in groupby(enumerate(blocks), key=lambda pair: pair[1] - pair[0]):
                    neighbours = [block for _, block in group]
                    data = b"".join(map(self._mark_of, neighbours))
                    os.pwrite(marks, data, _MARK_BYTES * neighbours[0])
            finally:
                os.close(marks)
        except OSError as error:
            # Harmless: the next process checks these blocks again.
            self._disabled = True
            _LOGGER.warning("blocks that were checked in the local store %s are not recorded: %s", self._folder, error)

    def _mark_of(self, block: int) -> bytes:
        digest = self._digest.copy()
        digest.update(_BLOCK.pack(block, self._run.blocks[block]))
        return digest.digest()
