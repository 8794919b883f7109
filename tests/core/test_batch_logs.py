"""The logs in a checkpoint determine the batch with which a stopped query continues."""

from __future__ import annotations

import json

import pytest

from spark_state_ext.errors import CorruptFileError, MissingCheckpointError, VersionSkewError
from spark_state_ext.savepoints.batch_logs import find_last_committed, needed_offsets, parse_batch, replace_state_ids

OFFSETS = 'v1\n{"batchWatermarkMs":7000,"conf":{"spark.sql.shuffle.partitions":"2"}}\n{"logOffset":3}'
COMMIT = 'v1\n{"nextBatchWatermarkMs":9000}'
COMMIT_2 = 'v2\n{"nextBatchWatermarkMs":9000,"stateUniqueIds":{"0":[["old"],["older"]]}}'


def _numbers(*numbers: int) -> frozenset[int]:
    return frozenset(numbers)


def test_the_last_commit_determines_the_state_and_later_offsets_are_a_planned_batch() -> None:
    assert find_last_committed(_numbers(3, 4, 5), _numbers(3, 4, 5), "/c") == (5, False)
    assert find_last_committed(_numbers(3, 4, 5), _numbers(3, 4), "/c") == (4, True)
    assert find_last_committed(_numbers(0), _numbers(0), "/c") == (0, False)
    assert (needed_offsets(5, planned=False), needed_offsets(4, planned=True), needed_offsets(0, planned=False)) == (
        (4, 5),
        (4, 5),
        (0,),
    )


@pytest.mark.parametrize(
    ("offsets", "commits", "message"),
    [
        (_numbers(0, 1), _numbers(0, 1, 2), "the last batch is 2 in commits/ and 1 in"),
        (_numbers(0, 1, 2, 3), _numbers(0, 1), "the last batch is 1 in commits/ and 3 in"),
        (_numbers(5), _numbers(5), "offsets/4 is missing"),
        (_numbers(), _numbers(5), "the last batch is 5 in commits/ and -1 in"),
    ],
)
def test_inconsistent_logs_are_refused_as_damaged(
    offsets: frozenset[int], commits: frozenset[int], message: str
) -> None:
    with pytest.raises(CorruptFileError, match=f"/c is damaged: .*{message}"):
        find_last_committed(offsets, commits, "/c")


def test_a_checkpoint_without_a_committed_batch_is_refused() -> None:
    with pytest.raises(MissingCheckpointError, match="/c has no committed batch"):
        find_last_committed(_numbers(0), _numbers(), "/c")


def test_a_batch_is_parsed_from_its_offset_and_commit_logs() -> None:
    batch = parse_batch(5, False, {4: OFFSETS, 5: OFFSETS}, COMMIT_2, "/c")

    assert (batch.watermark_ms, batch.conf["spark.sql.shuffle.partitions"]) == (7000, "2")
    assert batch.state_ids == {"0": [["old"], ["older"]]}
    assert parse_batch(5, False, {5: OFFSETS.replace("7000", "0")}, COMMIT, "/c").watermark_ms is None


@pytest.mark.parametrize(
    ("offsets", "commit"),
    [
        (OFFSETS[:30], COMMIT),
        (OFFSETS.rpartition("\n")[0], COMMIT),
        ("", COMMIT),
        (OFFSETS.replace("batchWatermarkMs", "other"), COMMIT),
        (OFFSETS, COMMIT[:-3]),
        (OFFSETS, "v1"),
        (OFFSETS, "v1\n[]"),
    ],
)
def test_a_damaged_log_is_refused(offsets: str, commit: str) -> None:
    with pytest.raises(CorruptFileError, match=r"/c/(offsets|commits)/5"):
        parse_batch(5, False, {5: offsets}, commit, "/c")


def test_offset_logs_with_different_numbers_of_sources_are_refused() -> None:
    with pytest.raises(CorruptFileError, match=r"files with different numbers of sources: \[1, 2\]"):
        parse_batch(5, False, {4: OFFSETS + "\n-", 5: OFFSETS}, COMMIT, "/c")


def test_a_log_of_a_newer_format_is_refused() -> None:
    with pytest.raises(VersionSkewError, match="/c/offsets/5 has format v9"):
        parse_batch(5, False, {5: OFFSETS.replace("v1", "v9")}, COMMIT, "/c")


def test_the_state_ids_of_a_commit_log_are_replaced() -> None:
    new_commit = COMMIT_2.replace("old", "new")

    version, body = replace_state_ids(COMMIT_2, new_commit, "/c/commits/5").split("\n")

    assert version == "v2"
    assert json.loads(body) == {"nextBatchWatermarkMs": 9000, "stateUniqueIds": {"0": [["new"], ["newer"]]}}
    assert replace_state_ids(COMMIT, COMMIT, "/c/commits/5") == COMMIT
    with pytest.raises(CorruptFileError, match="different checkpoint formats"):
        replace_state_ids(COMMIT_2, COMMIT, "/c/commits/5")
