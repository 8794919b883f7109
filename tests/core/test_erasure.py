"""Removed keys: after how many batches, or within which time, no file has them, and that a new root never has them.

The numbers are those of `docs/operating/erasing.md`.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterable
from dataclasses import replace

import pyarrow as pa
import pytest
from core_support import first_pointer
from life import RETAINED, Life

from arrow_schemas.ages import Ages
from arrow_schemas.lineage import SNAPSHOT, parse_file_name
from arrow_schemas.pointer import Pointer
from spark_state_ext.backends import CleanUp
from spark_state_ext.backends.replication import is_complete
from spark_state_ext.commit.cadence import SnapshotCadence
from spark_state_ext.errors import CorruptPointerError, MissingCheckpointError
from spark_state_ext.files.checkpoint import read_checkpoint
from spark_state_ext.files.erasure import WINDOWS, erased_before, is_marked, note_time
from spark_state_ext.files.folder import Readable
from spark_state_ext.files.sealed_file import SealedFile, SealedFiles
from spark_state_ext.testing.model import KEYS, SCHEMA, Changes, Key, Row, canonicalise
from tests.helpers.waiting import WAIT_S

ERASED: Key = ("Jane Doe", 1.0)
DELTAS_MAX = 5


@pytest.fixture
def life(life: Life) -> Life:
    """Return a bucket that writes a snapshot after few deltas."""
    life.cadence = SnapshotCadence(2, DELTAS_MAX)
    return life


def _find_files_with_key(life: Life, files: Readable, names: Iterable[str]) -> list[str]:
    """Return the files that have a row of the key; a tombstone is such a row."""
    names_with_key = []
    for name in names:
        parsed = parse_file_name(name)
        assert parsed is not None
        checkpoint = read_checkpoint(files, *parsed, SCHEMA, life.local)
        rows = [row for batch in checkpoint.batches for row in pa.Table.from_batches([batch]).to_pylist()]
        if any(canonicalise((row["key.name"], row["key.x"])) == canonicalise(ERASED) for row in rows):
            names_with_key.append(name)
    return names_with_key


def _find_in_files(life: Life, name: str) -> list[str]:
    return _find_files_with_key(life, life.folder(name), life.folder(name).names())


def _find_in_pointer(life: Life) -> list[str]:
    sealed = [SealedFile.of(delta.name, delta.data) for delta in life.pointers[-1].inline]
    return _find_files_with_key(life, SealedFiles(sealed, "inline"), [file.name for file in sealed])


def _add_and_remove_key(life: Life) -> None:
    """Add a key, write some snapshots that have it, and remove it."""
    life.batch({ERASED: Row(1, "here")})
    for _ in range(3 * DELTAS_MAX):
        life.batch()
        life.settle()
    life.batch({ERASED: None})
    life.settle()
    assert _find_in_files(life, "a")


def _clean_up(life: Life) -> None:
    """Run clean-up, here after each batch; in a job, it runs for a bucket every *R* / 4 batches, at least every tenth."""
    pointer = life.pointers[-1]
    through = pointer.replication["a"].through
    assert through is not None
    life.manager("a").clean_up(CleanUp(pointer, through, RETAINED, lambda: None)).result(WAIT_S)


@pytest.mark.parametrize(
    ("changes", "heartbeats"),
    [
        pytest.param({KEYS[0]: Row(7)}, 2 * (DELTAS_MAX + 1) + 3 * RETAINED + 3, id="changed in every batch"),
        pytest.param({}, 2 * (DELTAS_MAX + 1) * (RETAINED + 1) + 3 * RETAINED + 3, id="never changed again"),
    ],
)
def test_no_file_has_a_removed_key_after_the_documented_number_of_batches(
    life: Life, changes: Changes, heartbeats: int
) -> None:
    _add_and_remove_key(life)
    for _ in range(heartbeats):
        life.batch(changes)
        life.settle()
        _clean_up(life)
    assert _find_in_files(life, "a") == []
    assert _find_in_pointer(life) == []
    assert life.restored(life.pointers[-1]) == life.models[-1]


WINDOW_MS = 24_000
BOUND_MS = WINDOWS * WINDOW_MS


def _measure_erasure_ms(life: Life, gap_ms: int, changes: Changes) -> int:
    """Return after how many ms no file has a removed key; assert that each batch of the window can be restored."""
    # Neither the number of batches nor sizes cause a snapshot or clean-up.
    life.cadence = replace(life.cadence, deltas_min=1 << 30)
    life.batches_retained = 1 << 20
    life.options = replace(life.options, erase_window_ms=WINDOW_MS)

    def run_batch(changes: Changes) -> None:
        before = life.pointers[-1]
        life.batch_ms += gap_ms
        life.batch(changes)
        life.settle()
        if is_marked(before, life.pointers[-1]) and before.ref is not None:
            life.manager("a").clean_up(CleanUp(before, before.ref, life.batches_retained, lambda: None)).result(WAIT_S)

    life.batch_ms = 1_000_000_000_000
    run_batch({ERASED: Row(1, "here"), KEYS[1]: Row(2)})
    for number in range(3 * WINDOW_MS // gap_ms):
        run_batch({KEYS[2]: Row(number)})
    removed_ms, first = life.batch_ms + gap_ms, len(life.pointers)
    run_batch({ERASED: None})
    while _find_in_files(life, "a"):
        assert life.batch_ms - removed_ms < 4 * BOUND_MS
        run_batch(changes)
    assert _find_in_pointer(life) == []
    # The query can go back to each batch of the window.
    first_in_window = max(first, len(life.pointers) - WINDOW_MS // gap_ms - 1)
    for pointer, model in list(zip(life.pointers, life.models, strict=True))[first_in_window:]:
        assert life.restored(pointer) == model
    return life.batch_ms - removed_ms


@pytest.mark.parametrize("changes", [{KEYS[0]: Row(7)}, {}], ids=["changed in every batch", "never changed again"])
@pytest.mark.parametrize("part", [40, 24])
def test_no_file_has_a_removed_key_after_the_requested_time(life: Life, changes: Changes, part: int) -> None:
    assert _measure_erasure_ms(life, BOUND_MS // part, changes) <= BOUND_MS


@pytest.mark.parametrize("changes", [{KEYS[0]: Row(7)}, {}], ids=["changed in every batch", "never changed again"])
def test_a_removed_key_is_erased_by_the_sixth_batch_if_batches_are_rare(life: Life, changes: Changes) -> None:
    gap_ms = 2 * WINDOW_MS
    assert _measure_erasure_ms(life, gap_ms, changes) <= 6 * gap_ms


def test_a_bucket_without_removed_rows_gets_no_further_snapshots_because_of_time(life: Life) -> None:
    _measure_erasure_ms(life, WINDOW_MS // 4, {})
    for _ in range(40):
        life.batch_ms += WINDOW_MS // 4
        life.batch({})
        life.settle()
    ages, snapshots = life.pointers[-1].ages, life.files("a", SNAPSHOT)
    assert ages is not None
    assert ages.snapshots_wanted == 0
    for _ in range(8):
        life.batch_ms += WINDOW_MS // 4
        life.batch({})
        life.settle()
    assert life.files("a", SNAPSHOT) == snapshots


def test_a_snapshot_that_was_lost_is_made_again(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    life.options = replace(life.options, erase_window_ms=WINDOW_MS)
    life.cadence = replace(life.cadence, deltas_min=1 << 30)
    life.batch({ERASED: Row(1, "here")})
    life.batch({ERASED: None})
    with monkeypatch.context() as patched:
        patched.setattr(life.background, "submit", lambda name, work: True)
        for _ in range(5):
            life.batch_ms += WINDOW_MS // 2
            life.batch({})
    ages = life.pointers[-1].ages
    assert ages is not None
    assert ages.snapshots_wanted == 2, "the first snapshot was requested again"
    for _ in range(12):
        life.batch_ms += WINDOW_MS // 2
        life.batch({})
        life.settle()
    ages = life.pointers[-1].ages
    assert ages is not None
    assert ages.snapshots_wanted == 0
    assert len(life.files("a", SNAPSHOT)) >= 2


def test_a_restore_from_before_the_window_fails_with_the_reason(life: Life) -> None:
    _measure_erasure_ms(life, WINDOW_MS // 4, {KEYS[0]: Row(7)})
    first_pointer_with_ages = next(
        pointer for pointer in life.pointers if pointer.ages is not None and pointer.ref is not None
    )
    with pytest.raises(
        MissingCheckpointError, match=r"erases within 144 s \(erase_within_s\).*batches of the last 24 s"
    ):
        life.restored(first_pointer_with_ages)


def test_a_change_of_the_window_discards_its_marks(life: Life) -> None:
    life.options = replace(life.options, erase_window_ms=WINDOW_MS)
    for _ in range(20):
        life.batch_ms += WINDOW_MS // 4
        life.batch({KEYS[0]: Row(7)})
    ages = life.pointers[-1].ages
    assert ages is not None
    assert erased_before(ages) is not None
    assert len(ages.marks) < 20
    life.options = replace(life.options, erase_window_ms=2 * WINDOW_MS)
    pointer = life.batch({})
    assert pointer.ages is not None
    assert pointer.ages.marks == ((life.batch_ms, pointer.heartbeats),)
    assert erased_before(pointer.ages) is None
    life.options = replace(life.options, erase_window_ms=None)
    assert life.batch({}).ages is None


def test_no_delta_is_inline_if_erasure_is_bounded_in_time(life: Life) -> None:
    life.options = replace(life.options, journal=True, erase_window_ms=WINDOW_MS)
    assert life.batch().inline == ()


def test_the_pointer_has_ages_only_if_erasure_is_bounded_in_time() -> None:
    ages = Ages(WINDOW_MS, 5, 4, 2, ((3, 1), (5, 2)))
    pointer = replace(first_pointer(), ages=ages)
    assert Pointer.decode(pointer.encode()) == pointer
    assert b'"ages":null' in first_pointer().encode()
    damaged = json.dumps([1, 2, 3]).encode()
    plain = pointer.encode().replace(json.dumps(ages.to_plain(), separators=(",", ":")).encode(), damaged)
    head, body = plain[:6], plain[10:-4]
    text = body[: body.index(b"}", body.index(b'"ages"')) + 1]
    sealed = head + struct.pack("<I", len(text)) + text
    with pytest.raises(CorruptPointerError):
        Pointer.decode(sealed + struct.pack("<I", zlib.crc32(sealed)))


def test_a_clock_that_is_set_back_keeps_more_files() -> None:
    pointer = first_pointer()
    for heartbeats in range(100):
        pointer = note_time(replace(pointer, heartbeats=heartbeats), heartbeats * WINDOW_MS // 8, WINDOW_MS)
    assert pointer.ages is not None
    before = erased_before(pointer.ages)
    assert before is not None
    assert 99 - 8 - 5 - 1 <= before <= 99 - 8 - 4
    later = note_time(replace(pointer, heartbeats=100), 90 * WINDOW_MS // 8, WINDOW_MS)
    assert later.ages is not None
    assert (erased_before(later.ages) or 0) < before


def test_files_with_a_removed_key_stay_while_there_are_no_batches(life: Life) -> None:
    """There is no bound in time, because Spark may hand out the pointers of the last batches, however old they are."""
    _add_and_remove_key(life)
    for _ in range(3):
        _clean_up(life)
    assert _find_in_files(life, "a")


def test_a_root_that_is_added_after_a_removal_never_has_the_key(life: Life) -> None:
    _add_and_remove_key(life)
    life.names = ("a", "b")
    for batches in range(4):
        if is_complete(life.pointers[-1].replication.get("b")):
            break
        life.batch({KEYS[0]: Row(batches)})
        life.settle()
    assert is_complete(life.pointers[-1].replication["b"])
    life.names = ("b",)
    for _ in range(2):
        life.batch()
        life.settle()
    assert life.folder("b").names()
    assert _find_in_files(life, "b") == []
    assert _find_in_pointer(life) == []
    # The state can be restored without the old root and without the local store.
    for name in life.folder("a").names():
        life.folder("a").remove(name)
    assert life.restored(life.pointers[-1]) == life.models[-1]
