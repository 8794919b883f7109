"""Holds: who copies from a query folder keeps clean-up away from it, for as long as it lives."""

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


def _names(folder: Folder) -> list[str]:
    return folder.child(HOLDS_FOLDER).names()


def test_a_hold_lives_until_it_is_released(folder: Folder, watch: HoldWatch) -> None:
    assert watch.living(folder) == []
    hold = Hold.place(folder, "a savepoint", LASTS_MS)
    assert [it.holder for it in watch.living(folder)] == ["a savepoint"]
    hold.release()
    hold.release()
    assert watch.living(folder) == []
    assert _names(folder) == []


def test_a_hold_that_nobody_renews_ends_by_the_watchers_clock(folder: Folder, watch: HoldWatch, clock: Clock) -> None:
    Hold.place(folder, "somebody who died", LASTS_MS)
    assert watch.living(folder)
    clock.now_s += LASTS_MS / 1000
    assert watch.living(folder)
    clock.now_s += 1
    assert watch.living(folder) == []
    assert _names(folder) == []


def test_a_process_that_has_not_watched_for_so_long_respects_it(folder: Folder, watch: HoldWatch, clock: Clock) -> None:
    Hold.place(folder, "somebody", LASTS_MS)
    clock.now_s += 10 * LASTS_MS
    # The first look, however old the hold may be by its own times.
    assert watch.living(folder)


def test_renewing_makes_it_last_as_long_again(folder: Folder, watch: HoldWatch, clock: Clock) -> None:
    hold = Hold.place(folder, "somebody", LASTS_MS)
    for _ in range(5):
        assert watch.living(folder)
        clock.now_s += LASTS_MS / 1000 - 1
        hold.renew()
        # At every moment there is one, and in the end there is only one.
        assert len(_names(folder)) == 1
    assert watch.living(folder)


def test_several_processes_renew_one_hold(folder: Folder, watch: HoldWatch) -> None:
    first = Hold.place(folder, "somebody", LASTS_MS)
    second = Hold(folder, first.id)
    for _ in range(3):
        first.renew()
        second.renew()
    assert len(watch.living(folder)) == len(_names(folder)) == 1


def test_one_that_another_process_renews_meanwhile_is_no_lost_one(
    folder: Folder, watch: HoldWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Hold.place(folder, "somebody", LASTS_MS)
    get = Folder.get

    def late(files: Folder, name: str) -> bytes:
        monkeypatch.setattr(Folder, "get", get)
        Hold(folder, first.id).renew()
        return get(files, name)

    monkeypatch.setattr(Folder, "get", late)
    assert first.renew().number == 2
    assert len(watch.living(folder)) == 1


def test_two_that_renew_at_once_leave_no_moment_without_a_hold(
    folder: Folder, watch: HoldWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Hold.place(folder, "somebody", LASTS_MS)
    # A share, whose rename does not take the place of a file.
    share = Folder(folder.root)
    monkeypatch.setattr(Folder, "replaces", False)
    remove, create, seen = Folder.remove, Folder.create, list[int]()

    def removing(files: Folder, name: str) -> None:
        remove(files, name)
        seen.append(len(_names(folder)))

    def late(files: Folder, name: str, data: bytes) -> bool:
        monkeypatch.setattr(Folder, "create", create)
        # The other one makes the same number, and removes the one before.
        Hold(share, first.id).renew()
        return create(files, name, data)

    monkeypatch.setattr(Folder, "create", late)
    monkeypatch.setattr(Folder, "remove", removing)
    assert first.renew().number == 1
    assert seen
    assert all(seen)
    assert len(watch.living(folder)) == 1


def test_who_renews_too_late_is_told(folder: Folder, watch: HoldWatch, clock: Clock) -> None:
    hold = Hold.place(folder, "somebody", LASTS_MS)
    watch.living(folder)
    clock.now_s += LASTS_MS / 1000 + 1
    watch.living(folder)
    with pytest.raises(MissingCheckpointError, match="not renewed in time"):
        hold.renew()


def test_who_knows_only_its_id_makes_it_last_as_long_as_it_did(folder: Folder, watch: HoldWatch, clock: Clock) -> None:
    """As the first calls of a query, which learn of the hold that was made when it was planned."""
    before = Hold.place(folder, "somebody", LASTS_MS)
    renewed = Hold(folder, before.id).renew()
    assert (renewed.holder, renewed.lasts_ms) == ("somebody", LASTS_MS)
    assert watch.living(folder) == [renewed]
    clock.now_s += LASTS_MS / 1000
    assert watch.living(folder) == [renewed]


def test_two_holds_end_each_by_itself(folder: Folder, watch: HoldWatch, clock: Clock) -> None:
    lasting, dying = (Hold.place(folder, name, LASTS_MS) for name in ("lasting", "dying"))
    assert len(watch.living(folder)) == 2
    clock.now_s += LASTS_MS / 1000 - 1
    lasting.renew()
    watch.living(folder)
    clock.now_s += 2
    assert [it.holder for it in watch.living(folder)] == ["lasting"]
    assert dying.id not in "".join(_names(folder))


def test_one_that_is_a_day_old_ends_for_processes_that_live_short(tmp_path: Path, folder: Folder) -> None:
    Hold.place(folder, "somebody who died long ago", LASTS_MS)
    (file,) = (tmp_path / "query" / HOLDS_FOLDER).iterdir()
    old_s = time.time() - 90_000
    os.utime(file, (old_s, old_s))
    assert HoldWatch().living(folder) == []


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b'{"format": 1, "checksum": "0"}'])
def test_one_that_cannot_be_read_lets_nothing_be_deleted(tmp_path: Path, folder: Folder, content: bytes) -> None:
    Hold.place(folder, "somebody", LASTS_MS)
    (tmp_path / "query" / HOLDS_FOLDER / _names(folder)[0]).write_bytes(content)
    with pytest.raises(CorruptFileError):
        HoldWatch().living(folder)


def test_one_of_a_newer_release_is_refused(tmp_path: Path, folder: Folder) -> None:
    Hold.place(folder, "somebody", LASTS_MS)
    (tmp_path / "query" / HOLDS_FOLDER / _names(folder)[0]).write_bytes(b'{"format": 2}')
    with pytest.raises(VersionSkewError, match="newer release"):
        HoldWatch().living(folder)


def test_other_names_in_the_folder_are_left_alone(folder: Folder, watch: HoldWatch) -> None:
    folder.child(HOLDS_FOLDER).put("README", b"mine")
    assert watch.living(folder) == []
    assert _names(folder) == ["README"]
