"""Marks of verified blocks: later processes of the same boot skip these blocks, and no others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_base_file import KEYS, POINTER, REF, ROWS, SCHEMA, bucket_on, values_at, with_snapshot

from spark_state_ext.files.folder import Folder
from spark_state_ext.store import LocalStore, check_marks
from spark_state_ext.store.base_file import file_path
from spark_state_ext.store.check_marks import CheckMarks, FileState, check_marks_path
from spark_state_ext.store.runs import Run
from spark_state_ext.worker.boot import UNKNOWN_BOOT, boot_id
from tests.helpers.soak import examples
from tests.helpers.waiting import WAIT_S

_BLOCKS = 6
# Files have the time of the system's last tick.
_TICK_S = 0.02
# Reads all rows, and prints how many blocks of files it compared and the number of rows, or that the store is damaged.
_READER = """
import sys, zlib
from spark_state_ext.errors import CorruptStoreError
from spark_state_ext.store import LocalStore, base_file
from spark_state_ext.store.read_only import ReadOnlyEnvironment
import pyarrow as pa
from arrow_schemas import CheckpointRef, RowSchema

REF = CheckpointRef(7, "7" * 32)
SCHEMA = RowSchema((pa.field("k", pa.int64()),), (pa.field("n", pa.int64()),))

class Counted:
    compared = 0
    @staticmethod
    def crc32(data):
        Counted.compared += 1
        return zlib.crc32(data)

base_file.zlib = Counted
folder = sys.argv[1]
if sys.argv[2:] == ["read only"]:
    from pathlib import Path
    store = LocalStore(Path(folder), SCHEMA, ReadOnlyEnvironment.of(Path(folder)))
else:
    store = LocalStore.at(folder, SCHEMA)
try:
    rows = sum(batch.num_rows for batch in store.view(REF).scan())
except CorruptStoreError as error:
    print("damaged", end="")
else:
    print(Counted.compared, rows, end="")
"""


def read_elsewhere(folder: Path, *arguments: str) -> str:
    """Return the output of another process that reads the whole store."""
    command = [sys.executable, "-c", _READER, str(folder), *arguments]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}, capture_output=True, text=True, check=True
    )
    return done.stdout


@pytest.fixture
def restored(tmp_path: Path) -> tuple[Path, Path, int]:
    """Return the folder of a local store whose run this process fetched, the run's file, and its number of blocks."""
    folder, files = tmp_path / "store", with_snapshot(Folder(str(tmp_path / "root")).child("3"), tmp_path)
    store = LocalStore.at(folder, SCHEMA)
    bucket = bucket_on(store, files, POINTER, tmp_path)
    assert bucket.read(lambda view: values_at(view, KEYS))[1] == 10
    (run,) = store.runs()
    file = file_path(store._environment.folder, run.key)
    store.close()
    time.sleep(_TICK_S)
    return folder, file, len(run.blocks)


def test_a_later_process_does_not_compare_marked_blocks_again(restored: tuple[Path, Path, int]) -> None:
    folder, file, blocks = restored
    (marks,) = file.parent.glob("*.compared")
    assert read_elsewhere(folder) == f"0 {ROWS}"
    # Without the marks, the next process compares all blocks, and the process after that compares none.
    marks.unlink()
    assert read_elsewhere(folder) == f"{blocks} {ROWS}"
    assert read_elsewhere(folder) == f"0 {ROWS}"
    # A block with a torn or damaged mark is compared again.
    data = bytearray(marks.read_bytes())
    data[9] ^= 1
    marks.write_bytes(data[:-3])
    assert read_elsewhere(folder) == f"2 {ROWS}"
    assert read_elsewhere(folder) == f"0 {ROWS}"


def test_a_touched_or_replaced_file_is_compared_again(restored: tuple[Path, Path, int]) -> None:
    folder, file, blocks = restored
    file.touch()
    assert read_elsewhere(folder) == f"{blocks} {ROWS}"
    assert read_elsewhere(folder) == f"0 {ROWS}"
    # Replace the file by a copy with the same bytes.
    copy = file.with_suffix(".copy")
    copy.write_bytes(file.read_bytes())
    copy.replace(file)
    assert read_elsewhere(folder) == f"{blocks} {ROWS}"


def test_damage_is_found_even_if_the_times_of_the_file_are_reset(restored: tuple[Path, Path, int]) -> None:
    folder, file, _ = restored
    assert read_elsewhere(folder) == f"0 {ROWS}"
    before = file.stat()
    with file.open("r+b") as damaged:
        damaged.seek(before.st_size // 2)
        byte = damaged.read(1)
        damaged.seek(before.st_size // 2)
        damaged.write(bytes([byte[0] ^ 1]))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert file.stat().st_mtime_ns == before.st_mtime_ns
    assert read_elsewhere(folder) == "damaged"
    # The process that found the damage marked only blocks that it had verified, so the next one finds it too.
    assert read_elsewhere(folder) == "damaged"


def test_a_read_only_process_uses_marks_and_writes_none(restored: tuple[Path, Path, int]) -> None:
    folder, file, blocks = restored
    (marks,) = file.parent.glob("*.compared")
    assert read_elsewhere(folder, "read only") == f"0 {ROWS}"
    marks.unlink()
    assert read_elsewhere(folder, "read only") == f"{blocks} {ROWS}"
    assert not marks.exists()


def test_marks_are_removed_with_their_run_and_unused_marks_at_opening(restored: tuple[Path, Path, int]) -> None:
    folder, file, _ = restored
    unused = check_marks_path(file.parent, "ab" * 16)
    unused.write_bytes(b"12345678")
    store = LocalStore.at(folder, SCHEMA)
    assert [path.name for path in file.parent.glob("*.compared")] == [f"{file.stem}.compared"]
    store.lazy.lose(store.runs()[0])
    assert not list(file.parent.glob("base-*"))
    store.close()


# -- the marks alone ------------------------------------------------------------------------------


def write_run(folder: Path, key: str = "ab" * 16) -> tuple[Run, Path]:
    run = Run(key, REF, REF, None, True, 1, 0, (), 100, tuple(range(1_000, 1_000 + _BLOCKS)))
    file = file_path(folder, key)
    file.write_bytes(bytes(100))
    return run, file


def open_marks(folder: Path, run: Run) -> CheckMarks:
    file = file_path(folder, run.key)
    marks = CheckMarks.of(folder, run, file, FileState.of(file))
    assert marks is not None
    return marks


_STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("note"), st.sets(st.integers(0, _BLOCKS - 1), min_size=1)),
        st.tuples(st.just("flip"), st.integers(0, 8 * _BLOCKS - 1)),
        st.tuples(st.just("cut"), st.integers(0, 8 * _BLOCKS)),
        st.tuples(st.just("pad"), st.integers(1, 20)),
        st.tuples(st.sampled_from(["write", "replace", "process", "boot", "clear"]), st.none()),
    ),
    max_size=15,
)


@settings(max_examples=examples(40))
@given(_STEPS)
@example([("note", {0, 1, 4}), ("write", None)])
@example([("note", {0, 1, 4}), ("replace", None), ("process", None), ("note", {2})])
@example([("write", None), ("note", {3}), ("process", None), ("note", {3, 5}), ("boot", None)])
@example([("note", {0, 1, 2}), ("flip", 9), ("cut", 20), ("pad", 20), ("clear", None), ("note", {5})])
def test_only_verified_blocks_are_ever_marked(steps: list[tuple[str, object]]) -> None:
    """Compares the marks with the set of blocks verified since the file last changed, after any damage to the marks."""
    with tempfile.TemporaryDirectory() as base, pytest.MonkeyPatch.context() as patched:
        folder = Path(base)
        run, file = write_run(folder)
        marks = check_marks_path(folder, run.key)
        process, verified, intact = open_marks(folder, run), set[int](), set[int]()
        for boot, (step, argument) in enumerate(steps):
            if step == "note":
                assert isinstance(argument, set)
                process.mark_blocks(file, sorted(argument))
                if FileState.of(file) == process._state:
                    verified |= argument
                    intact |= argument
            elif step in ("write", "replace"):
                time.sleep(_TICK_S)
                file.rename(folder / "old") if step == "replace" else None
                file.write_bytes(bytes(100))
                verified, intact = set(), set()
            elif step == "boot":
                patched.setattr(check_marks, "boot_id", lambda boot=boot: f"boot {boot}")
                verified, intact, process = set(), set(), open_marks(folder, run)
            elif step == "process":
                process = open_marks(folder, run)
            elif marks.exists():
                data = bytearray(marks.read_bytes())
                if step == "flip" and isinstance(argument, int) and argument < len(data):
                    data[argument] ^= 0x10
                    intact.discard(argument // 8)
                elif step == "cut" and isinstance(argument, int):
                    del data[argument:]
                    intact = {block for block in intact if 8 * block + 8 <= argument}
                elif step == "pad" and isinstance(argument, int):
                    data += b"\1" * argument
                else:
                    intact = set() if step == "clear" else intact
                    data = bytearray() if step == "clear" else data
                marks.write_bytes(data)
            marked = set(open_marks(folder, run).marked_blocks())
            assert marked <= verified
            assert intact <= marked


def test_marks_of_another_run_or_boot_are_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, file = write_run(tmp_path)
    other, _ = write_run(tmp_path, "cd" * 16)
    open_marks(tmp_path, run).mark_blocks(file, [0, 1, 4])
    assert open_marks(tmp_path, run).marked_blocks() == [0, 1, 4]
    check_marks_path(tmp_path, run.key).rename(check_marks_path(tmp_path, other.key))
    assert open_marks(tmp_path, other).marked_blocks() == []
    open_marks(tmp_path, run).mark_blocks(file, [2])
    monkeypatch.setattr(check_marks, "boot_id", lambda: "another")
    assert open_marks(tmp_path, run).marked_blocks() == []
    # If the boot is unknown, there are no marks.
    monkeypatch.setattr(check_marks, "boot_id", lambda: UNKNOWN_BOOT)
    assert CheckMarks.of(tmp_path, run, file, FileState.of(file)) is None


def test_marks_that_cannot_be_written_are_logged_once_and_raise_no_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run, file = write_run(tmp_path)
    check_marks_path(tmp_path, run.key).mkdir()
    marks = open_marks(tmp_path, run)
    marks.mark_blocks(file, [0])
    marks.mark_blocks(file, [1])
    (message,) = [record.message for record in caplog.records if "are not recorded" in record.message]
    assert str(tmp_path) in message
    assert marks.marked_blocks() == []


_WRITER = """
import sys, random
from pathlib import Path
from arrow_schemas import CheckpointRef
from spark_state_ext.store.base_file import file_path
from spark_state_ext.store.check_marks import CheckMarks, FileState
from spark_state_ext.store.runs import Run

REF = CheckpointRef(7, "7" * 32)
folder, seed, mine = Path(sys.argv[1]), int(sys.argv[2]), [int(block) for block in sys.argv[3:]]
run = Run("ab" * 16, REF, REF, None, True, 1, 0, (), 100, tuple(range(1_000, 1_006)))
file, drawn = file_path(folder, run.key), random.Random(seed)
blocks = CheckMarks.of(folder, run, file, FileState.of(file))
print("begun", flush=True)
while True:
    blocks.mark_blocks(file, sorted(drawn.sample(mine, drawn.randint(1, len(mine)))))
"""


def test_killed_processes_that_write_marks_at_the_same_time_lose_none(tmp_path: Path) -> None:
    run, _ = write_run(tmp_path)
    time.sleep(_TICK_S)
    shares = (["0", "1"], ["1", "3"], ["0", "3", "4"])
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", _WRITER, str(tmp_path), str(at), *mine],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            stdout=subprocess.PIPE,
        )
        for at, mine in enumerate(shares)
    ]
    try:
        for writer in writers:
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"begun\n"
        deadline_s = time.monotonic() + WAIT_S
        while open_marks(tmp_path, run).marked_blocks() != [0, 1, 3, 4]:
            assert set(open_marks(tmp_path, run).marked_blocks()) <= {0, 1, 3, 4}
            assert time.monotonic() < deadline_s
    finally:
        for writer in writers:
            writer.send_signal(signal.SIGKILL)
            writer.communicate()
    assert open_marks(tmp_path, run).marked_blocks() == [0, 1, 3, 4]
    assert boot_id() != UNKNOWN_BOOT
