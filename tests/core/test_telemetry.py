"""Metrics that an OpenTelemetry collector receives over HTTP from worker processes that end without notice."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from spark_state_ext.worker import telemetry
from spark_state_ext.worker.metrics import CallMetrics, read
from spark_state_ext.worker.telemetry import FLUSH_WAIT_S_MAX, Telemetry
from tests.helpers.otlp import Collector, entry_point_in
from tests.helpers.waiting import WAIT_S, eventually

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the OTLP exporter is not installed")
ROOT = Path(__file__).parent.parent.parent
# Like a Python worker of Spark, this process ends without Python's exit handlers.
_WORKER = """
import os, sys, time
from pathlib import Path
from spark_state_ext.worker.metrics import CallMetrics, MetricsLogs
logs = MetricsLogs()
log = logs.at(Path(sys.argv[1]))
for bucket in range(3):
    log.add(CallMetrics("query", "run", 1, "counts", bucket, rows=2, state_bytes=100, job_buckets=3))
{end}
os._exit(0)
"""


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


@pytest.fixture
def entry_point(tmp_path: Path) -> Path:
    return entry_point_in(tmp_path)


# Let a task wait for its export as long as a slow machine needs. The process still ends right after its task.
_PATIENT = f"from spark_state_ext.worker.telemetry import Telemetry; Telemetry.flush.__defaults__ = ({WAIT_S},)\n"


def run_worker(end: str, folder: Path, site: Path, url: str, **extra: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("OTEL_")},
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(site)]),
        "OTEL_PYTHON_METER_PROVIDER": "spark_state_ext",
        "OTEL_EXPORTER_OTLP_ENDPOINT": url,
        **extra,
    }
    return subprocess.run(
        [sys.executable, "-c", _WORKER.format(end=end), str(folder)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=True,
    )


def test_a_worker_that_ends_with_its_task_exports_all_metrics(
    collector: Collector, entry_point: Path, tmp_path: Path
) -> None:
    """Without a flush, no metrics would arrive, because the SDK exports once a minute."""
    run_worker("", tmp_path / "lost", entry_point, collector.url)
    assert collector.requests == []
    for _ in range(2):
        run_worker(_PATIENT + "log.end_task()", tmp_path / "kept", entry_point, collector.url)
    assert (collector.last("rows"), collector.last("state_bytes")) == (12, 6)
    names = {resource["service.name"] for resource in collector.resources()}
    instances = {resource["service.instance.id"] for resource in collector.resources()}
    assert (names, len(instances)) == ({"spark_state_ext"}, 2)


def test_metrics_of_a_failed_call_are_exported_too(collector: Collector, entry_point: Path, tmp_path: Path) -> None:
    end = 'logs.fail(CallMetrics("query", "run", 1, "counts", 0, rows=50, upload_failures=4))'
    run_worker(_PATIENT + end, tmp_path, entry_point, collector.url)
    assert (collector.last("failed_calls"), collector.last("upload_failures"), collector.last("rows")) == (1, 4, 6)


def test_a_forked_child_of_a_function_exports_no_metrics(
    collector: Collector, entry_point: Path, tmp_path: Path
) -> None:
    end = """
child = os.fork()
if child == 0:
    logs.fail(CallMetrics("query", "run", 1, "counts", 0))
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
log.end_task()
"""
    run_worker(_PATIENT + end, tmp_path / "metrics", entry_point, collector.url)
    assert read(tmp_path / "metrics").column("bucket").to_pylist() == [0, 1, 2]
    assert (collector.last("failed_calls"), collector.last("rows")) == (0, 6)


def test_a_process_waits_only_once_for_a_collector_that_hangs(
    collector: Collector, entry_point: Path, tmp_path: Path
) -> None:
    collector.open.clear()
    end = """
times = []
for batch in range(20):
    log.add(CallMetrics("query", "run", batch, "counts", 0, rows=1))
    began_s = time.monotonic()
    log.end_task()
    times.append(time.monotonic() - began_s)
    time.sleep(0.07)
print(times[0], sum(seconds >= 0.5 for seconds in times))
"""
    done = run_worker(end, tmp_path, entry_point, collector.url)
    first_s, waited = map(float, done.stdout.split())
    assert first_s >= FLUSH_WAIT_S_MAX
    # Only the first flush waits, and a few more on a busy machine. If each waited, there would be a dozen.
    assert 1 <= waited <= 5
    assert done.stderr.count("tasks no longer wait for metrics to be exported") == 1


def test_an_invalid_setup_is_logged_once_and_does_not_fail_a_batch(tmp_path: Path, entry_point: Path) -> None:
    invalid = {"OTEL_PYTHON_METER_PROVIDER": "nobody"}
    done = run_worker("log.end_task(); print('went on')", tmp_path, entry_point, "http://127.0.0.1:9", **invalid)
    assert done.stdout == "went on\n"
    assert done.stderr.count("metrics are not sent to OpenTelemetry") == 1


# -- when a process exports ------------------------------------------------------------------------


class Sdk:
    """A replacement for the SDK, whose export a test can make hang or fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.began = 0
        self.gate = threading.Event()
        self.gate.set()
        self.error: Exception | None = None
        monkeypatch.setattr(telemetry, "_find_force_flush", lambda: self._flush)
        monkeypatch.setattr(telemetry, "FLUSH_EVERY_S", 0.0)
        telemetry._warn_once.cache_clear()

    def _flush(self, timeout_millis: float) -> bool:
        self.began += 1
        assert self.gate.wait(WAIT_S)
        if self.error is not None:
            raise self.error
        return True


@pytest.fixture
def sdk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Sdk]:
    sdk = Sdk(monkeypatch)
    yield sdk
    sdk.gate.set()


def record_call(exporter: Telemetry) -> None:
    exporter.record(CallMetrics("query", "run", 1, "counts", 0, rows=1))


def test_metrics_are_flushed_only_once(sdk: Sdk) -> None:
    exporter = Telemetry()
    assert exporter.flush(WAIT_S)
    assert sdk.began == 0
    record_call(exporter)
    assert exporter.flush(WAIT_S)
    assert exporter.flush(WAIT_S)
    assert sdk.began == 1


def test_tasks_wait_again_after_a_successful_export(sdk: Sdk, caplog: pytest.LogCaptureFixture) -> None:
    exporter = Telemetry()
    sdk.gate.clear()
    with caplog.at_level(logging.WARNING, "spark_state_ext"):
        record_call(exporter)
        assert not exporter.flush(0.05)
        # The export has begun, so it does not include the next calls.
        eventually(lambda: sdk.began == 1)
        # A flush that waited here would wait until the end of the test.
        began_s = time.monotonic()
        for _ in range(3):
            record_call(exporter)
            assert not exporter.flush(WAIT_S)
        assert time.monotonic() - began_s < WAIT_S / 2
    assert len([message for message in caplog.messages if "no longer wait" in message]) == 1
    sdk.gate.set()
    # Calls recorded meanwhile are exported without another flush.
    eventually(lambda: sdk.began == 2 and not exporter._busy)
    record_call(exporter)
    assert exporter.flush(WAIT_S)
    assert sdk.began == 3


def test_a_failed_export_is_logged_once_and_not_raised(sdk: Sdk, caplog: pytest.LogCaptureFixture) -> None:
    exporter = Telemetry()
    sdk.error = RuntimeError("the collector is gone")
    with caplog.at_level(logging.WARNING, "spark_state_ext"):
        for _ in range(3):
            record_call(exporter)
            exporter.flush(WAIT_S)
            eventually(lambda: not exporter._busy)
    assert caplog.messages == ["metrics could not be exported: RuntimeError: the collector is gone"]
    assert sdk.began == 3


def test_exports_have_a_minimum_interval(sdk: Sdk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks of a busy worker do not wait for each other's exports; one export has all recorded calls."""
    monkeypatch.setattr(telemetry, "FLUSH_EVERY_S", 1.0)
    exporter = Telemetry()
    # Before the first export: until the loop begins, a slow machine may take longer than the interval.
    began_s = time.monotonic()
    record_call(exporter)
    assert exporter.flush(WAIT_S)
    for _ in range(100):
        record_call(exporter)
        exporter.flush(WAIT_S)
    spent_s = time.monotonic() - began_s
    eventually(lambda: not exporter._busy)
    assert sdk.began <= 2 + spent_s
