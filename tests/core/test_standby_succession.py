"""Where a bucket's tasks went on elsewhere, by the headers of its committed checkpoints."""

from __future__ import annotations

import pytest

from arrow_schemas import Writer
from arrow_schemas.lineage import DELTA, CheckpointRef, LineageHeader
from spark_state_ext.errors import MissingCheckpointError, StorageError
from spark_state_ext.standby.succession import Succession, Takeover


def _ref(version: int, attempt: int = 0) -> CheckpointRef:
    return CheckpointRef(version, f"{attempt:012d}{version:020d}")


def _headers(hosts: str) -> dict[CheckpointRef, LineageHeader]:
    """A line of checkpoints, of batches from 10 on: one for each letter, which is its host; a dot is an unknown one."""
    made: dict[CheckpointRef, LineageHeader] = {}
    for version, host in enumerate(hosts, 1):
        parent = _ref(version - 1) if version > 1 else None
        lineage = (parent,) if parent else ()
        writer = Writer("query", "run", version + 9, host.strip("."))
        made[_ref(version)] = LineageHeader(DELTA, "counts", 3, _ref(version), parent, lineage, 0, writer, "0")
    return made


class _Files:
    """Headers that can be read, and which were."""

    def __init__(self, hosts: str) -> None:
        self.headers = _headers(hosts)
        self.read: list[int] = []

    def __call__(self, ref: CheckpointRef) -> LineageHeader:
        self.read.append(ref.version)
        if ref not in self.headers:
            raise MissingCheckpointError(f"{ref} is gone")
        return self.headers[ref]


def _told(succession: Succession) -> list[tuple[str, str, int]]:
    return [(it.before, it.now, it.version) for it in succession.takeovers]


def test_one_that_follows_reads_no_file_twice() -> None:
    files = _Files("aabbc")
    succession = Succession(None)
    for version in range(1, 6):
        succession.saw(files.headers[_ref(version)], loaded=version - 1)
        succession.extend(_ref(version - 1) if version > 1 else None, files)
    assert succession.takeovers == (Takeover("a", "b", 3, 12, 0),)
    assert (succession.version, succession.host) == (4, "b")
    succession.extend(_ref(5), files)
    assert succession.takeovers[-1] == Takeover("b", "c", 5, 14, 0)
    assert files.read == []


@pytest.mark.parametrize(
    ("hosts", "since", "told"),
    [
        ("aabbca", None, []),
        ("aabbca", 2, [("a", "b", 3), ("b", "c", 5), ("c", "a", 6)]),
        ("aabbca", 3, [("b", "c", 5), ("c", "a", 6)]),
        ("aabbca", 5, [("c", "a", 6)]),
        ("aabbca", 6, []),
        ("aa.bb", 1, [("a", "b", 4)]),
    ],
)
def test_one_that_was_away_finds_what_it_missed(
    hosts: str, since: int | None, told: list[tuple[str, str, int]]
) -> None:
    succession = Succession(since)
    succession.extend(_ref(len(hosts)), _Files(hosts))
    assert _told(succession) == told
    assert all(it.lag_versions is None for it in succession.takeovers)


def test_what_was_cleaned_up_is_not_guessed() -> None:
    files = _Files("aabbca")
    del files.headers[_ref(2)], files.headers[_ref(3)]
    succession = Succession(1)
    succession.extend(_ref(6), files)
    assert _told(succession) == [("b", "c", 5), ("c", "a", 6)]


def test_an_attempt_that_was_not_committed_took_nothing_over() -> None:
    files = _Files("aacc")
    attempt = _headers("aab")[_ref(3)]
    succession = Succession(None)
    succession.extend(_ref(2), files)
    succession.saw(LineageHeader(DELTA, "counts", 3, _ref(3, 1), _ref(2), (_ref(2),), 0, attempt.writer, "0"), 2)
    succession.extend(_ref(2), files)
    succession.saw(files.headers[_ref(3)], 1)
    succession.extend(_ref(3), files)
    assert succession.takeovers == (Takeover("a", "c", 3, 12, 1),)


def test_a_store_that_fails_changes_nothing() -> None:
    files = _Files("aab")
    succession = Succession(None)
    succession.extend(_ref(1), files)

    def failing(ref: CheckpointRef) -> LineageHeader:
        raise StorageError("the store is away")

    with pytest.raises(StorageError):
        succession.extend(_ref(3), failing)
    assert succession.version == 1
    succession.extend(_ref(3), files)
    assert _told(succession) == [("a", "b", 3)]
