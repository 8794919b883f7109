"""Holds: a process that copies from a query folder stops clean-up there as long as it lives."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from spark_state_ext.errors import CorruptFileError, MissingCheckpointError, VersionSkewError
from spark_state_ext.files.folder import Folder
from spark_state_ext.files.layout import HOLDS_FOLDER
from spark_state_ext.ownership.holds import Hold, HoldWatch

LASTS_MS = 30_000


class Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now_s = 1_000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(str(tmp_path / "query"))


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def watch(clock: Clock) -> HoldWatch:
    return HoldWatch(clock)


def _list_names(folder: Folder) -> list[str]:
    return folder.child(HOLDS_FOLDER).names()


def test_a_hold_lives_until_it_is_released(folder: Folder, watch: HoldWatch) -> None:
    assert watch.living(folder) == []
    hold = Hold.place(folder, "a savepoint", LASTS_MS)
    assert [record.holder for record in watch.living(folder)] == ["a savepoint"]
    hold.release()
    hold.release()
    assert watch.living(folder) == []
    assert _list_names(folder) == []


def test_a_hold_that_is_not_renewed_ends_by_the_watchers_clock(folder: Folder, watch: HoldWatch, clock: Clock) -> None:
    Hold.place(folder, "a process that ended", LASTS_MS)
    assert watch.living(folder)
    clock.now_s += LASTS_MS / 1000
    assert watch.living(folder)
    clock.now_s += 1
    assert watch.living(folder) == []
    assert _list_names(folder) == []


def test_a_process_that_has_just_begun_to_watch_respects_an_old_hold(
    folder: Folder, watch: HoldWatch, clock: Clock
) -> None:
    Hold.place(folder, "a copy", LASTS_MS)
    clock.now_s += 10 * LASTS_MS
    # This is the watch's first look, so the age of the hold by its own times does not matter.
    assert watch.living(folder)


def test_renewing_a_hold_makes_it_last_as_long_again(folder: Folder, watch: HoldWatch, clock: Clock) -> None:
    hold = Hold.place(folder, "a copy", LASTS_MS)
    for _ in range(5):
        assert watch.living(folder)
        clock.now_s += LASTS_MS / 1000 - 1
        hold.renew()
        # Renewing leaves exactly one file.
        assert len(_list_names(folder)) == 1
    assert watch.living(folder)


def test_several_processes_can_renew_one_hold(folder: Folder, watch: HoldWatch) -> None:
    first = Hold.place(folder, "a copy", LASTS_MS)
    second = Hold(folder, first.id)
    for _ in range(3):
        first.renew()
        second.renew()
    assert len(watch.living(folder)) == len(_list_names(folder)) == 1


def test_a_hold_that_another_process_renews_meanwhile_is_not_lost(
    folder: Folder, watch: HoldWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Hold.place(folder, "a copy", LASTS_MS)
    get = Folder.get

    def renew_and_get(files: Folder, name: str) -> bytes:
        monkeypatch.setattr(Folder, "get", get)
        Hold(folder, first.id).renew()
        return get(files, name)

    monkeypatch.setattr(Folder, "get", renew_and_get)
    assert first.renew().number == 2
    assert len(watch.living(folder)) == 1


def test_there_is_always_a_hold_while_two_processes_renew_it(
    folder: Folder, watch: HoldWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Hold.place(folder, "a copy", LASTS_MS)
    # On a share, a rename cannot replace a file.
    share = Folder(folder.root)
    monkeypatch.setattr(Folder, "replaces", False)
    remove, create, counts = Folder.remove, Folder.create, list[int]()

    def remove_and_count(files: Folder, name: str) -> None:
        remove(files, name)
        counts.append(len(_list_names(folder)))

    def renew_and_create(files: Folder, name: str, data: bytes) -> bool:
        monkeypatch.setattr(Folder, "create", create)
        # The other process creates a file of the same number and removes the previous file.
        Hold(share, first.id).renew()
        return create(files, name, data)

    monkeypatch.setattr(Folder, "create", renew_and_create)
    monkeypatch.setattr(Folder, "remove", remove_and_count)
    assert first.renew().number == 1
    assert counts
    assert all(counts)
    assert len(watch.living(folder)) == 1


def test_renewing_too_late_raises_an_error(folder: Folder, watch: HoldWatch, clock: Clock) -> None:
    hold = Hold.place(folder, "a copy", LASTS_MS)
    watch.living(folder)
    clock.now_s += LASTS_MS / 1000 + 1
    watch.living(folder)
    with pytest.raises(MissingCheckpointError, match="not renewed in time"):
        hold.renew()


def test_a_hold_that_is_renewed_by_its_id_keeps_its_holder_and_duration(
    folder: Folder, watch: HoldWatch, clock: Clock
) -> None:
    """The first calls of a query do this with the hold that was placed when the query was planned."""
    hold = Hold.place(folder, "a copy", LASTS_MS)
    renewed = Hold(folder, hold.id).renew()
    assert (renewed.holder, renewed.lasts_ms) == ("a copy", LASTS_MS)
    assert watch.living(folder) == [renewed]
    clock.now_s += LASTS_MS / 1000
    assert watch.living(folder) == [renewed]


def test_two_holds_end_independently(folder: Folder, watch: HoldWatch, clock: Clock) -> None:
    lasting, dying = (Hold.place(folder, name, LASTS_MS) for name in ("lasting", "dying"))
    assert len(watch.living(folder)) == 2
    clock.now_s += LASTS_MS / 1000 - 1
    lasting.renew()
    watch.living(folder)
    clock.now_s += 2
    assert [record.holder for record in watch.living(folder)] == ["lasting"]
    assert dying.id not in "".join(_list_names(folder))


def test_a_hold_that_is_a_day_old_has_ended_even_for_a_new_process(tmp_path: Path, folder: Folder) -> None:
    Hold.place(folder, "a process that ended long ago", LASTS_MS)
    (file,) = (tmp_path / "query" / HOLDS_FOLDER).iterdir()
    old_s = time.time() - 90_000
    os.utime(file, (old_s, old_s))
    assert HoldWatch().living(folder) == []


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b'{"format": 1, "checksum": "0"}'])
def test_an_unreadable_hold_raises_an_error(tmp_path: Path, folder: Folder, content: bytes) -> None:
    Hold.place(folder, "a copy", LASTS_MS)
    (tmp_path / "query" / HOLDS_FOLDER / _list_names(folder)[0]).write_bytes(content)
    with pytest.raises(CorruptFileError):
        HoldWatch().living(folder)


def test_a_hold_of_a_newer_release_is_refused(tmp_path: Path, folder: Folder) -> None:
    Hold.place(folder, "a copy", LASTS_MS)
    (tmp_path / "query" / HOLDS_FOLDER / _list_names(folder)[0]).write_bytes(b'{"format": 2}')
    with pytest.raises(VersionSkewError, match="newer release"):
        HoldWatch().living(folder)


def test_other_files_in_the_folder_of_holds_are_ignored(folder: Folder, watch: HoldWatch) -> None:
    folder.child(HOLDS_FOLDER).put("README", b"mine")
    assert watch.living(folder) == []
    assert _list_names(folder) == ["README"]
