"""Skew of buckets: heavy ranges and hot keys are distinguished, and even load gives no finding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from arrow_schemas.bucket_map import BucketMap
from spark_state_ext.__main__ import main
from spark_state_ext.reports.recommendation import BUCKET_BATCH_S
from spark_state_ext.reports.skew import (
    HEAVY_RANGE,
    HOT_KEY,
    INCOMPLETE,
    MUCH_STATE,
    SLOW_CALLS,
    TOO_FEW,
    TOO_MANY,
    OperatorLoad,
    format_findings,
    measure_loads,
)
from spark_state_ext.worker.metrics import CallMetrics, MetricsLog, read
from tests.helpers.soak import whole

BUCKETS = 8


def write_metrics(folder: Path, batches: int, special: dict[int, dict[str, Any]], **values: Any) -> None:
    """Write metrics of batches with data, with other values for some buckets."""
    log = MetricsLog(folder)
    buckets = values.pop("job_buckets", BUCKETS)
    every_ms = values.pop("every_ms", 10_000)
    for batch in range(batches):
        for bucket in range(buckets):
            numbers = {"rows": 1_000, "keys": 400, "key_rows_max": 9, "total_ms": 20.0, "state_rows": 4_000, **values}
            numbers |= {"state_bytes": 20 << 20, "changed_rows": 400, **special.get(bucket, {})}
            ended_ms = every_ms * batch + bucket
            call = CallMetrics(
                "query", "run", batch, "counts", bucket, ended_ms=ended_ms, job_buckets=buckets, **numbers
            )
            log.add(call)
    log.flush()


def measure_load(
    folder: Path, batches: int = 5, special: dict[int, dict[str, Any]] | None = None, **values: Any
) -> OperatorLoad:
    cores = values.pop("cores", None)
    write_metrics(folder, batches, special or {}, **values)
    (load,) = measure_loads(read(folder), cores=cores)
    return load


def test_even_load_gives_no_finding(tmp_path: Path) -> None:
    load = measure_load(tmp_path, cores=4)
    assert load.findings == ()
    assert load.is_even
    assert (load.skew.rows, load.skew.state_bytes, load.skew.call_ms) == (1.0, 1.0, 1.0)
    assert (load.batches, load.job_buckets, load.workers, load.interval_s) == (5, BUCKETS, 1, 10.0)


@pytest.mark.parametrize("rows", whole([1, 20, 1_000], [100_000]))
@pytest.mark.parametrize("buckets", [1, 2, 16, 256])
def test_random_differences_between_buckets_give_no_finding(rows: int, buckets: int) -> None:
    """Keys are spread over buckets by their hash; each seed gives other keys."""
    from spark_state_ext.worker.metrics import SCHEMA

    for seed in range(5):
        chance = np.random.default_rng(seed)
        calls = []
        for batch in range(3):
            numbers = BucketMap(buckets).of(chance.integers(0, 2**64, rows * buckets, dtype=np.uint64))
            for bucket, count in enumerate(np.bincount(numbers, minlength=buckets).tolist()):
                call = CallMetrics("query", "run", batch, "counts", bucket, ended_ms=10_000_000 * batch)
                call.rows, call.keys, call.key_rows_max = count, count, min(1, count)
                call.total_ms, call.job_buckets = 10 + 5 * chance.random(), buckets
                calls.append({**vars(call), "host": "", "pid": 1})
        table = SCHEMA.empty_table().from_pylist(calls, schema=SCHEMA)
        (load,) = measure_loads(table)
        assert load.findings == (), seed


def test_a_split_is_recommended_for_a_heavy_range_but_not_for_a_hot_key(tmp_path: Path) -> None:
    load = measure_load(
        tmp_path,
        special={3: {"rows": 6_000, "key_rows_max": 9}, 5: {"rows": 5_000, "key_rows_max": 4_009}},
    )
    heavy, hot = load.findings
    assert (heavy.kind, heavy.bucket, hot.kind, hot.bucket) == (HEAVY_RANGE, 3, HOT_KEY, 5)
    # The split that the text recommends is valid.
    assert "BucketMap.split(8, {3: 3})" in heavy.text
    assert BucketMap.split(8, {3: 3}).buckets == 10
    assert "split(" not in hot.text
    assert "80% of them in a batch have the same key" in hot.text
    assert "before the operator" in hot.text
    assert "add a column to the key" in hot.text
    assert load.skew.rows == pytest.approx(6_000 / (17_000 / 8))
    assert not load.is_even
    row = load.buckets.to_pylist()[3]
    assert (row["rows"], row["top_key_rows"], row["changed_rows"], row["calls"]) == (30_000, 45, 2_000, 5)
    assert load.buckets["finding"].to_pylist() == [None, None, None, HEAVY_RANGE, None, HOT_KEY, None, None]


@pytest.mark.parametrize("buckets", [1, 2])
def test_a_hot_key_is_found_with_one_or_two_buckets(tmp_path: Path, buckets: int) -> None:
    hot = {"rows": 9_000, "key_rows_max": 8_000}
    load = measure_load(tmp_path, special={0: hot}, job_buckets=buckets)
    assert [(finding.kind, finding.bucket) for finding in load.findings] == [(HOT_KEY, 0)]


def test_much_state_and_slow_calls_are_findings(tmp_path: Path) -> None:
    load = measure_load(tmp_path, special={1: {"state_bytes": 200 << 20}, 2: {"total_ms": 900.0}})
    much, slow = load.findings
    assert (much.kind, much.bucket, slow.kind, slow.bucket) == (MUCH_STATE, 1, SLOW_CALLS, 2)
    assert "BucketMap.split(8, {1: 5})" in much.text
    assert load.skew.call_ms > 5


def test_one_slow_call_gives_no_finding(tmp_path: Path) -> None:
    """The first call of a worker is slow, because it imports what the function needs."""
    assert measure_load(tmp_path, batches=1, special={0: {"total_ms": 2_000.0}}).findings == ()


def test_too_few_and_too_many_buckets_for_the_cores_are_findings(tmp_path: Path) -> None:
    (few,) = measure_load(tmp_path / "few", cores=16).findings
    assert (few.kind, few.bucket) == (TOO_FEW, None)
    every_ms = int(1000 * 64 * BUCKET_BATCH_S)
    (many,) = measure_load(tmp_path / "many", batches=2, job_buckets=64, every_ms=every_ms).findings
    assert many.kind == TOO_MANY
    assert "1 worker process:" in many.text
    # As many buckets are not too many with more cores, or with more time between batches.
    assert measure_loads(read(tmp_path / "many"), cores=16)[0].findings == ()
    assert measure_load(tmp_path / "slowly", batches=2, job_buckets=64, every_ms=100 * every_ms).findings == ()
    (large,) = measure_load(tmp_path / "large", state_rows=20_000_000).findings
    assert large.kind == TOO_FEW


def test_incomplete_metrics_are_a_finding_but_no_skew(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path)
    log.add(CallMetrics("query", "run", 1, "counts", 0, rows=10, job_buckets=4))
    log.flush()
    (load,) = measure_loads(read(tmp_path))
    assert [finding.kind for finding in load.findings] == [INCOMPLETE]
    assert load.is_even


def test_only_the_last_batches_count_and_a_repeated_call_counts_once(tmp_path: Path) -> None:
    write_metrics(tmp_path, 3, {2: {"rows": 50_000}})
    log = MetricsLog(tmp_path)
    for batch in (3, 4, 4):
        for bucket in range(BUCKETS):
            log.add(
                CallMetrics("query", "again", batch, "counts", bucket, ended_ms=100_000 * batch, rows=7, job_buckets=8)
            )
    log.flush()
    (load,) = measure_loads(read(tmp_path), batches=2)
    assert load.buckets["rows"].to_pylist() == [14] * 8
    assert load.findings == ()
    (load,) = measure_loads(read(tmp_path), batches=3)
    assert [finding.kind for finding in load.findings] == [HEAVY_RANGE]


def test_only_the_first_of_many_findings_are_listed(tmp_path: Path) -> None:
    load = measure_load(tmp_path, special={bucket: {"rows": 90_000} for bucket in range(0, 64, 8)}, job_buckets=64)
    assert len(load.findings) == 8
    lines = format_findings(load.findings)
    assert len(lines) == 6
    assert lines[-1] == "heavy range: 3 more buckets."


def test_the_skew_command_prints_loads_and_fails_if_there_are_findings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_metrics(tmp_path / "even", 3, {})
    write_metrics(tmp_path / "hot", 3, {5: {"rows": 9_000, "key_rows_max": 8_500}})
    assert main(["skew", str(tmp_path / "even"), "-o", "json"]) == 0
    out, err = capsys.readouterr()
    assert [row["rows"] for row in json.loads(out)] == [3_000] * 8
    assert err == "operator=counts query=query batches=3 buckets=8 skew_rows=1.00 skew_state=1.00 skew_time=1.00\n"
    assert main(["skew", str(tmp_path / "hot"), "-o", "jsonl"]) == 1
    out, err = capsys.readouterr()
    assert [json.loads(line)["finding"] for line in out.splitlines()].count(HOT_KEY) == 1
    assert (
        "hot key: bucket 5 has 4.5 times the mean number of rows, and 94% of them in a batch have the same key" in err
    )
    assert main(["skew", str(tmp_path / "even"), "--cores", "64", "--batches", "1"]) == 1
    assert "too few buckets: 8 buckets can use at most 8 of 64 cores" in capsys.readouterr().err
    assert main(["skew", str(tmp_path / "none")]) == 2
    (tmp_path / "cut" / "metrics").mkdir(parents=True)
    (tmp_path / "cut" / "metrics" / "1.arrows").write_bytes(b"")
    assert main(["skew", str(tmp_path / "cut"), "-o", "json"]) == 0


def test_the_report_shows_the_load_of_the_buckets(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from spark_state_ext import report

    write_metrics(tmp_path / "metrics", 3, {3: {"rows": 9_000}}, job_buckets=40)
    text = report(tmp_path / "metrics", tmp_path / "out.html").read_text()
    for passage in (
        "Operator counts: buckets",
        "The 20 of 40 buckets with most rows",
        "Rows of buckets",
        "heavy range: bucket 3",
    ):
        assert passage in text
