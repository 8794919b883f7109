"""The recommended number of buckets: its reasons, its refusals, and the measured constants behind it."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import spark_state_ext
from benchmarks.__main__ import main as benchmark
from benchmarks.buckets import BATCH, LOST, WARM, point_name, slope_ms, slope_name
from benchmarks.report import RESULTS
from spark_state_ext import recommend
from spark_state_ext.__main__ import main
from spark_state_ext.errors import UsageError
from spark_state_ext.reports import recommendation
from tests.helpers.waiting import WAIT_S

# A constant is a rounded median of a run on one machine.
TOLERANCE = 1.25


def _read_result(name: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return result


# -- the decision ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "bytes_per_key", "interval_s", "cores", "buckets", "reason"),
    [
        # The default: several buckets for each core.
        (1_000_000, 100, 60.0, 4, 16, "4 buckets for each of 4 cores"),
        (40_000_000, 10, 60.0, 1, 4, "4 buckets for each of 1 cores"),
        # Many keys or many bytes; rounded up to the same number for each partition.
        (400_000_001, 10, 60.0, 4, 44, "The state needs 41 buckets"),
        (50 << 10, 1 << 20, 60.0, 2, 18, "The state needs 17 buckets"),
        # More buckets than the interval has time for, but the state needs them.
        (1_000_000_000, 10, 0.5, 1, 100, "The interval has time for"),
        # Between one and four buckets for each core.
        (1_000, 10, 2.1 * recommendation.BUCKET_OPEN_S, 8, 16, "Fewer than 4 buckets for each of 8 cores"),
        (1_000, 10, 0.001, 8, 8, "One bucket for each of 8 cores"),
    ],
)
def test_the_first_reason_decides_the_number_of_buckets(
    keys: int, bytes_per_key: float, interval_s: float, cores: int, buckets: int, reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    # The cost of opening a bucket must decide here, whatever was measured.
    monkeypatch.setattr(recommendation, "BUCKET_BATCH_S", recommendation.BUCKET_OPEN_S / 10)
    recommended = recommend(keys, bytes_per_key, interval_s, cores)
    assert (recommended.buckets, recommended.shuffle_partitions) == (buckets, cores)
    assert reason in recommended.why[0]
    assert recommended.bucket_bytes == math.ceil(keys * bytes_per_key / buckets)
    assert recommended.buckets % recommended.shuffle_partitions == 0
    assert all(sentence.endswith((".", "help.")) and len(sentence) < 250 for sentence in recommended.why)


def test_the_cost_of_a_batch_is_that_of_the_partition_with_most_buckets() -> None:
    few, many = recommend(1_000, 100, 60, 4), recommend(1_000_000_000, 100, 60, 4)
    added_s = recommendation.BUCKET_BATCH_S * (many.buckets - few.buckets) / 4
    assert many.batch_cost_s - few.batch_cost_s == pytest.approx(added_s, abs=0.002)
    assert recommendation.estimate_calls_s(5, 4) == 2 * recommendation.BUCKET_BATCH_S


def test_a_batch_interval_that_is_too_short_is_reported() -> None:
    assert any("later than planned" in reason for reason in recommend(1_000, 10, 0.01, 2).why)
    assert not any("later than planned" in reason for reason in recommend(1_000, 10, 60, 2).why)


@pytest.mark.parametrize("keys", [1, 10**4, 10**7, 10**9])
@pytest.mark.parametrize("interval_s", [0.001, 0.1, 1, 10, 3_600])
@pytest.mark.parametrize("cores", [1, 3, 16, 200])
def test_more_keys_time_or_cores_never_give_fewer_buckets(keys: int, interval_s: float, cores: int) -> None:
    recommended = recommend(keys, 100, interval_s, cores)
    assert recommended.buckets >= cores
    assert recommend(2 * keys, 100, interval_s, cores).buckets >= recommended.buckets
    assert recommend(keys, 100, 2 * interval_s, cores).buckets >= recommended.buckets
    assert recommend(keys, 100, interval_s, 2 * cores).buckets >= recommended.buckets


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ((0, 1, 1, 1), "keys must be a whole number from 1, not 0"),
        ((1.5, 1, 1, 1), "keys must be a whole number from 1, not 1.5"),
        ((True, 1, 1, 1), "keys must be a whole number from 1, not True"),
        ((1, 0, 1, 1), "bytes_per_key must be a number above 0, not 0"),
        ((1, 1, -1.0, 1), "batch_interval_s must be a number above 0, not -1.0"),
        ((1, 1, math.nan, 1), "batch_interval_s must be a number above 0, not nan"),
        ((1, math.inf, 1, 1), "bytes_per_key must be a number above 0, not inf"),
        ((1, 1, 1, 0), "cores must be a whole number from 1, not 0"),
        ((1, 1, 1, "4"), "cores must be a whole number from 1, not '4'"),
        ((1, 1, 1, 40_000), "an operator has at most 32,768"),
        ((10**12, 1, 1, 4), "an operator has at most 32,768"),
    ],
)
def test_an_impossible_argument_is_refused(given: tuple[Any, ...], text: str) -> None:
    with pytest.raises(UsageError, match=text.replace("(", r"\(")):
        recommend(*given)


# -- the measured constants ------------------------------------------------------------------------


def test_constants_agree_with_the_committed_benchmark_results() -> None:
    buckets, restore, big = _read_result("buckets"), _read_result("restore"), _read_result("big_bucket")
    small = min(int(count.replace(",", "")) for count in buckets["parameters"]["counts by keys"])
    measured = {
        "BATCH_S": buckets["medians_s"][f"{point_name(small, 1)}: {BATCH}"],
        "BUCKET_BATCH_S": buckets["ratios"][slope_name(small, BATCH)] / 1000,
        "BUCKET_OPEN_S": buckets["ratios"][slope_name(small, WARM)] / 1000,
        "BUCKET_RESTORE_S": buckets["ratios"][slope_name(small, LOST)] / 1000,
        "RESTORE_BYTES_PER_S": restore["details"]["10,000,000 keys: bytes"]
        / restore["medians_s"]["10,000,000 keys: restore"],
    }
    drifted = {
        name: (getattr(recommendation, name), value)
        for name, value in measured.items()
        if not value / TOLERANCE <= getattr(recommendation, name) <= value * TOLERANCE
    }
    assert not drifted, "set the constants of spark_state_ext/reports/recommendation.py to the measured values"
    assert max(restore["parameters"]["rows"]) == recommendation.BUCKET_KEYS_MAX
    assert int(big["parameters"]["gib"] * 2**30) == recommendation.BUCKET_BYTES_MAX


def test_the_slope_of_a_line_is_computed() -> None:
    line = {count: 0.5 + 0.01 * count for count in (1, 4, 16, 64, 4096)}
    assert slope_ms(line, 2) == pytest.approx(20.0)


@pytest.mark.parametrize("counts", ["", "1", "4,1", "0,1", "1,x", "1,2,", "1,1"])
def test_benchmark_counts_that_are_not_ascending_numbers_are_refused(
    counts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for option in ("--counts", "--large-counts"):
        arguments = [option, counts, "--results", str(tmp_path), "--work-dir", str(tmp_path)]
        assert benchmark(["buckets", *arguments]) == 2
        assert "name two numbers or more, ascending" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


# -- the command -----------------------------------------------------------------------------------

_COMMAND = ["recommend", "--keys", "1000000", "--bytes-per-key", "100", "--batch-interval-s", "10", "--cores", "4"]


def test_the_command_prints_the_same_recommendation(capsys: pytest.CaptureFixture[str]) -> None:
    recommended = recommend(1_000_000, 100, 10, 4)
    assert main([*_COMMAND, "-o", "json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == {**vars(recommended), "why": list(recommended.why)}
    assert err == ""
    assert main(_COMMAND) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[0].split() == ["buckets", str(recommended.buckets)]
    assert err.splitlines() == list(recommended.why)
    assert main([*_COMMAND[:-1], "0"]) == 2
    assert "UsageError: cores must be a whole number from 1, not 0" in capsys.readouterr().err


def test_a_recommendation_needs_neither_spark_nor_pandas() -> None:
    assert "recommend" in spark_state_ext.__all__
    script = (
        "import sys; from spark_state_ext import Recommendation, recommend\n"
        "assert isinstance(recommend(1000, 100, 10, 4), Recommendation)\n"
        "assert not {'pyspark', 'pandas', 'matplotlib'} & {name.split('.')[0] for name in sys.modules}"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode == 0, done.stderr
