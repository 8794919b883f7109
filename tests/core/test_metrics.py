"""Metrics of calls: on disk, summed up by batch, and through OpenTelemetry."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from spark_state_ext.__main__ import main
from spark_state_ext.worker import metrics, telemetry
from spark_state_ext.worker.metrics import SCHEMA, CallMetrics, MetricsLog, MetricsLogs, by_batch, read, to_whole_ms


def make_call(batch: int, bucket: int, **values: Any) -> CallMetrics:
    return CallMetrics("query", "run", batch, "counts", bucket, ended_ms=1_000 * batch + bucket, **values)


def write_log(folder: Path, *calls: CallMetrics) -> None:
    log = MetricsLog(folder)
    for call in calls:
        log.add(call)
    log.flush()


def test_metrics_of_calls_are_read_and_summed_by_batch(tmp_path: Path) -> None:
    write_log(
        tmp_path,
        make_call(1, 0, rows=5, wait_ms=1.5, oldest_inline_ms=7, cache_hit=False, restored_files=3),
        make_call(1, 1, rows=2, wait_ms=2.0, oldest_inline_ms=9),
        make_call(2, 0, rows=1),
    )
    # Another worker, which had bucket 1 in the next batch.
    write_log(tmp_path / "below", make_call(2, 1, rows=10))
    calls = read(tmp_path)
    assert calls.column("rows").to_pylist() == [5, 2, 1, 10]
    assert calls.schema == metrics.SCHEMA
    first, second = by_batch(calls).to_pylist()
    assert (first["batch"], first["rows"], first["wait_ms"], first["buckets"]) == (1, 7, 3.5, 2)
    assert (first["cache_hits"], first["restored_files"], first["oldest_inline_ms"]) == (1, 3, 9)
    assert first["ended_ms"] == 1_001
    assert (second["batch"], second["rows"], second["cache_hits"]) == (2, 11, 2)


def test_only_the_last_of_repeated_calls_counts(tmp_path: Path) -> None:
    again = replace(make_call(1, 0, rows=6), ended_ms=5_000)
    write_log(tmp_path, make_call(1, 0, rows=5), again, make_call(1, 1, rows=1))
    (row,) = by_batch(read(tmp_path)).to_pylist()
    assert (row["rows"], row["buckets"]) == (7, 2)


def test_a_truncated_file_is_read_up_to_its_end(tmp_path: Path) -> None:
    """A worker was killed while it wrote. A file of another library version is ignored."""
    log = MetricsLog(tmp_path)
    for bucket in range(3):
        log.add(make_call(1, bucket, rows=1))
        log.flush()
    (path,) = tmp_path.glob("*.arrows")
    whole = path.read_bytes()
    with pa.OSFile(str(tmp_path / "other.arrows"), "w") as file, pa.ipc.new_stream(file, pa.schema([("x", pa.int8())])):
        pass
    counts = set()
    for length in [*range(0, len(whole), 7), len(whole)]:
        path.write_bytes(whole[:length])
        counts.add(read(tmp_path).num_rows)
    assert counts == {0, 1, 2, 3}


def test_files_of_processes_that_ended_stay_few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "_FILES_MAX", 3)
    for batch in range(6):
        write_log(tmp_path, make_call(batch, 0))
    assert read(tmp_path).column("batch").to_pylist() == [3, 4, 5]


def test_a_folder_that_cannot_be_written_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "metrics").write_text("a file is in the way")
    with caplog.at_level(logging.WARNING, "spark_state_ext"):
        for batch in range(3):
            write_log(tmp_path / "metrics", make_call(batch, 0))
    assert len([message for message in caplog.messages if "metrics could not be written" in message]) == 1


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    assert main(["metrics", *arguments, "-o", "jsonl"]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_the_command_prints_batches_and_calls(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_log(tmp_path, make_call(1, 0, rows=5, wait_ms=1.25), make_call(1, 1, rows=2))
    (row,) = run(capsys, str(tmp_path))
    assert (row["batch"], row["rows"], row["wait_ms"]) == (1, 7, 1.25)
    calls = run(capsys, str(tmp_path), "--calls")
    assert [(call["bucket"], call["rows"]) for call in calls] == [(0, 5), (1, 2)]


def test_the_command_reports_missing_and_empty_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file.arrows").write_text("")
    for name, text in (
        ("missing", f"there is no folder {tmp_path / 'missing'}\n"),
        ("file.arrows", f"there is no folder {tmp_path / 'file.arrows'}, it is a file\n"),
        (
            "empty",
            f"no *.arrows files below {tmp_path / 'empty'}: give the job's local_dir, where executors write them\n",
        ),
    ):
        for arguments in ([], ["--calls"]):
            assert main(["metrics", str(tmp_path / name), *arguments]) == 2
            out, err = capsys.readouterr()
            assert (out, err) == ("", f"spark-state-ext metrics: UsageError: {text}")
    # The empty file belongs to a process that was killed before it had written a batch.
    assert main(["metrics", str(tmp_path)]) == 0


@pytest.fixture
def exported() -> Iterator[Any]:
    """A reader of the metrics that OpenTelemetry's SDK receives, set up as in a worker's process."""
    api = pytest.importorskip("opentelemetry.metrics", reason="the SDK of OpenTelemetry is not installed")
    sdk = pytest.importorskip("opentelemetry.sdk.metrics", reason="the SDK of OpenTelemetry is not installed")
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    reader = InMemoryMetricReader()
    # A process has one provider, permanently; no other test sets one.
    api.set_meter_provider(sdk.MeterProvider(metric_readers=[reader]))
    telemetry._create_instruments.cache_clear()
    yield reader
    telemetry._create_instruments.cache_clear()


def test_metrics_of_calls_are_sent_to_open_telemetry(exported: Any, tmp_path: Path) -> None:
    write_log(
        tmp_path,
        make_call(1, 0, rows=5, wait_ms=4.0, uploaded_bytes=100),
        make_call(1, 1, rows=2, wait_ms=2.0, cache_hit=False),
    )
    (resource,) = exported.get_metrics_data().resource_metrics
    (scope,) = resource.scope_metrics
    assert scope.scope.name == "spark_state_ext"
    by_name = {metric.name.removeprefix("spark_state_ext."): metric for metric in scope.metrics}
    (rows,), (hits,), (sent,) = (by_name[name].data.data_points for name in ("rows", "cache_hits", "uploaded_bytes"))
    assert (rows.value, hits.value, sent.value) == (7, 1, 100)
    assert dict(rows.attributes) == {"operator": "counts", "query_id": "query"}
    (waited,) = by_name["wait_ms"].data.data_points
    assert (waited.sum, waited.count, by_name["wait_ms"].unit, by_name["uploaded_bytes"].unit) == (6.0, 2, "ms", "By")


@pytest.mark.parametrize(("spent_s", "expected"), [(0.0, 0), (1.5, 1_500), (math.inf, 2**63 - 1), (1e300, 2**63 - 1)])
def test_an_infinite_age_fits_its_column(spent_s: float, expected: int) -> None:
    assert pa.array([to_whole_ms(spent_s)], SCHEMA.field("lease_age_ms").type).to_pylist() == [expected]


def test_a_forked_child_knows_that_the_logs_are_not_its_own() -> None:
    logs = MetricsLogs()
    child = os.fork()
    if child == 0:
        os._exit(0 if not logs.is_ours else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert logs.is_ours
    logs.close()
