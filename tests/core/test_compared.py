"""What was compared in this boot is told to processes that come later, and nothing else is."""

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
# Reads all rows, and tells how many blocks of files it compared; or what was wrong.
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
if sys.argv[2:] == ["reads only"]:
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
    """What another process says that reads all of the store."""
    command = [sys.executable, "-c", _READER, str(folder), *arguments]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}, capture_output=True, text=True, check=True
    )
    return done.stdout


@pytest.fixture
def restored(tmp_path: Path) -> tuple[Path, Path, int]:
    """A local store's folder whose run was fetched by this process; the run's file, and its blocks."""
    folder, files = tmp_path / "store", with_snapshot(Folder(str(tmp_path / "root")).child("3"), tmp_path)
    store = LocalStore.at(folder, SCHEMA)
    bucket = bucket_on(store, files, POINTER, tmp_path)
    assert bucket.read(lambda view: values_at(view, KEYS))[1] == 10
    (run,) = store.runs()
    file = file_path(store._environment.folder, run.key)
    store.close()
    time.sleep(_TICK_S)
    return folder, file, len(run.blocks)


def test_a_process_that_comes_later_compares_nothing_again(restored: tuple[Path, Path, int]) -> None:
    folder, file, blocks = restored
    (marks,) = file.parent.glob("*.compared")
    assert read_elsewhere(folder) == f"0 {ROWS}"
    # Without the marks the next one compares all, and the one after that nothing.
    marks.unlink()
    assert read_elsewhere(folder) == f"{blocks} {ROWS}"
    assert read_elsewhere(folder) == f"0 {ROWS}"
    # What is torn or damaged is compared once more.
    data = bytearray(marks.read_bytes())
    data[9] ^= 1
    marks.write_bytes(data[:-3])
    assert read_elsewhere(folder) == f"2 {ROWS}"
    assert read_elsewhere(folder) == f"0 {ROWS}"


def test_a_file_that_somebody_touched_is_compared_anew(restored: tuple[Path, Path, int]) -> None:
    folder, file, blocks = restored
    file.touch()
    assert read_elsewhere(folder) == f"{blocks} {ROWS}"
    assert read_elsewhere(folder) == f"0 {ROWS}"
    # The same bytes in another file.
    copy = file.with_suffix(".copy")
    copy.write_bytes(file.read_bytes())
    copy.replace(file)
    assert read_elsewhere(folder) == f"{blocks} {ROWS}"


def test_damage_that_was_written_is_found_though_its_times_were_put_back(restored: tuple[Path, Path, int]) -> None:
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
    # Who found it has told of no block that it had not compared: the next one finds it too.
    assert read_elsewhere(folder) == "damaged"


def test_who_only_reads_writes_nothing(restored: tuple[Path, Path, int]) -> None:
    folder, file, blocks = restored
    (marks,) = file.parent.glob("*.compared")
    assert read_elsewhere(folder, "reads only") == f"0 {ROWS}"
    marks.unlink()
    assert read_elsewhere(folder, "reads only") == f"{blocks} {ROWS}"
    assert not marks.exists()


def test_marks_go_with_their_run_and_what_is_left_over_is_removed(restored: tuple[Path, Path, int]) -> None:
    folder, file, _ = restored
    left = check_marks_path(file.parent, "ab" * 16)
    left.write_bytes(b"12345678")
    store = LocalStore.at(folder, SCHEMA)
    assert [path.name for path in file.parent.glob("*.compared")] == [f"{file.stem}.compared"]
    store.lazy.lose(store.runs()[0])
    assert not list(file.parent.glob("base-*"))
    store.close()


# -- the marks alone ------------------------------------------------------------------------------


def a_run(folder: Path, key: str = "ab" * 16) -> tuple[Run, Path]:
    run = Run(key, REF, REF, None, True, 1, 0, (), 100, tuple(range(1_000, 1_000 + _BLOCKS)))
    file = file_path(folder, key)
    file.write_bytes(bytes(100))
    return run, file


def opened(folder: Path, run: Run) -> CheckMarks:
    file = file_path(folder, run.key)
    found = CheckMarks.of(folder, run, file, FileState.of(file))
    assert found is not None
    return found


_STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("note"), st.sets(st.integers(0, _BLOCKS - 1), min_size=1)),
        st.tuples(st.just("flip"), st.integers(0, 8 * _BLOCKS - 1)),
        st.tuples(st.just("cut"), st.integers(0, 8 * _BLOCKS)),
        st.tuples(st.just("pad"), st.integers(1, 20)),
        st.tuples(st.sampled_from(["write", "replace", "process", "boot", "gone"]), st.none()),
    ),
    max_size=15,
)


@settings(max_examples=examples(40), deadline=None)
@given(_STEPS)
@example([("note", {0, 1, 4}), ("write", None)])
@example([("note", {0, 1, 4}), ("replace", None), ("process", None), ("note", {2})])
@example([("write", None), ("note", {3}), ("process", None), ("note", {3, 5}), ("boot", None)])
@example([("note", {0, 1, 2}), ("flip", 9), ("cut", 20), ("pad", 20), ("gone", None), ("note", {5})])
def test_nothing_is_known_that_nobody_compared(steps: list[tuple[str, object]]) -> None:
    """Against a set: of blocks that were compared while the file was as it is, with whatever happens to the marks."""
    with tempfile.TemporaryDirectory() as base, pytest.MonkeyPatch.context() as patched:
        folder = Path(base)
        run, file = a_run(folder)
        marks = check_marks_path(folder, run.key)
        process, did, whole = opened(folder, run), set[int](), set[int]()
        for boot, (step, given_) in enumerate(steps):
            if step == "note":
                assert isinstance(given_, set)
                process.mark_blocks(file, sorted(given_))
                if FileState.of(file) == process._state:
                    did |= given_
                    whole |= given_
            elif step in ("write", "replace"):
                time.sleep(_TICK_S)
                file.rename(folder / "old") if step == "replace" else None
                file.write_bytes(bytes(100))
                did, whole = set(), set()
            elif step == "boot":
                patched.setattr(check_marks, "boot_id", lambda boot=boot: f"boot {boot}")
                did, whole, process = set(), set(), opened(folder, run)
            elif step == "process":
                process = opened(folder, run)
            elif marks.exists():
                data = bytearray(marks.read_bytes())
                if step == "flip" and isinstance(given_, int) and given_ < len(data):
                    data[given_] ^= 0x10
                    whole.discard(given_ // 8)
                elif step == "cut" and isinstance(given_, int):
                    del data[given_:]
                    whole = {it for it in whole if 8 * it + 8 <= given_}
                elif step == "pad" and isinstance(given_, int):
                    data += b"\1" * given_
                else:
                    whole = set() if step == "gone" else whole
                    data = bytearray() if step == "gone" else data
                marks.write_bytes(data)
            known = set(opened(folder, run).marked_blocks())
            assert known <= did
            assert whole <= known


def test_marks_of_another_run_or_boot_count_for_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, file = a_run(tmp_path)
    other, _ = a_run(tmp_path, "cd" * 16)
    opened(tmp_path, run).mark_blocks(file, [0, 1, 4])
    assert opened(tmp_path, run).marked_blocks() == [0, 1, 4]
    check_marks_path(tmp_path, run.key).rename(check_marks_path(tmp_path, other.key))
    assert opened(tmp_path, other).marked_blocks() == []
    opened(tmp_path, run).mark_blocks(file, [2])
    monkeypatch.setattr(check_marks, "boot_id", lambda: "another")
    assert opened(tmp_path, run).marked_blocks() == []
    # Where boots cannot be told apart nothing is remembered.
    monkeypatch.setattr(check_marks, "boot_id", lambda: UNKNOWN_BOOT)
    assert CheckMarks.of(tmp_path, run, file, FileState.of(file)) is None


def test_marks_that_cannot_be_written_are_told_and_end_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run, file = a_run(tmp_path)
    check_marks_path(tmp_path, run.key).mkdir()
    blocks = opened(tmp_path, run)
    blocks.mark_blocks(file, [0])
    blocks.mark_blocks(file, [1])
    (told,) = [it.message for it in caplog.records if "are not recorded" in it.message]
    assert str(tmp_path) in told
    assert blocks.marked_blocks() == []


_WRITER = """
import sys, random
from pathlib import Path
from arrow_schemas import CheckpointRef
from spark_state_ext.store.base_file import file_path
from spark_state_ext.store.check_marks import CheckMarks, FileState
from spark_state_ext.store.runs import Run

REF = CheckpointRef(7, "7" * 32)
folder, seed, mine = Path(sys.argv[1]), int(sys.argv[2]), [int(it) for it in sys.argv[3:]]
run = Run("ab" * 16, REF, REF, None, True, 1, 0, (), 100, tuple(range(1_000, 1_006)))
file, drawn = file_path(folder, run.key), random.Random(seed)
blocks = CheckMarks.of(folder, run, file, FileState.of(file))
print("begun", flush=True)
while True:
    blocks.mark_blocks(file, sorted(drawn.sample(mine, drawn.randint(1, len(mine)))))
"""


def test_processes_that_write_at_once_and_are_killed(tmp_path: Path) -> None:
    run, _ = a_run(tmp_path)
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
        while opened(tmp_path, run).marked_blocks() != [0, 1, 3, 4]:
            assert set(opened(tmp_path, run).marked_blocks()) <= {0, 1, 3, 4}
            assert time.monotonic() < deadline_s
    finally:
        for writer in writers:
            writer.send_signal(signal.SIGKILL)
            writer.communicate()
    assert opened(tmp_path, run).marked_blocks() == [0, 1, 3, 4]
    assert boot_id() != UNKNOWN_BOOT
