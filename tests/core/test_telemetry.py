"""Metrics of worker processes that end without notice, as an OpenTelemetry collector gets them over HTTP."""

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
# As a Python worker of Spark, which leaves without anything that Python does at its end.
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
    made = Collector()
    yield made
    made.close()


@pytest.fixture
def entry_point(tmp_path: Path) -> Path:
    return entry_point_in(tmp_path)


def _worker(end: str, folder: Path, site: Path, url: str, **also: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("OTEL_")},
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(site)]),
        "OTEL_PYTHON_METER_PROVIDER": "spark_state_ext",
        "OTEL_EXPORTER_OTLP_ENDPOINT": url,
        **also,
    }
    return subprocess.run(
        [sys.executable, "-c", _WORKER.format(end=end), str(folder)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=True,
    )


def test_a_worker_that_ends_with_its_task_loses_nothing(
    collector: Collector, entry_point: Path, tmp_path: Path
) -> None:
    """Without a flush nothing would come: the SDK exports once a minute."""
    _worker("", tmp_path / "lost", entry_point, collector.url)
    assert collector.requests == []
    for _ in range(2):
        _worker("log.end_task()", tmp_path / "kept", entry_point, collector.url)
    assert (collector.last("rows"), collector.last("state_bytes")) == (12, 6)
    names = {it["service.name"] for it in collector.resources()}
    instances = {it["service.instance.id"] for it in collector.resources()}
    assert (names, len(instances)) == ({"spark_state_ext"}, 2)


def test_a_failed_call_is_told_of_too(collector: Collector, entry_point: Path, tmp_path: Path) -> None:
    failed = 'logs.fail(CallMetrics("query", "run", 1, "counts", 0, rows=50, upload_failures=4))'
    _worker(failed, tmp_path, entry_point, collector.url)
    assert (collector.last("failed_calls"), collector.last("upload_failures"), collector.last("rows")) == (1, 4, 6)


def test_a_child_that_a_function_forked_tells_nothing(collector: Collector, entry_point: Path, tmp_path: Path) -> None:
    forks = """
child = os.fork()
if child == 0:
    logs.fail(CallMetrics("query", "run", 1, "counts", 0))
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
log.end_task()
"""
    _worker(forks, tmp_path / "metrics", entry_point, collector.url)
    assert read(tmp_path / "metrics").column("bucket").to_pylist() == [0, 1, 2]
    assert (collector.last("failed_calls"), collector.last("rows")) == (0, 6)


def test_a_collector_that_hangs_costs_a_process_half_a_second_once(
    collector: Collector, entry_point: Path, tmp_path: Path
) -> None:
    collector.open.clear()
    measured = """
times = []
for batch in range(20):
    log.add(CallMetrics("query", "run", batch, "counts", 0, rows=1))
    began_s = time.monotonic()
    log.end_task()
    times.append(time.monotonic() - began_s)
    time.sleep(0.07)
print(times[0], sum(it >= 0.5 for it in times))
"""
    done = _worker(measured, tmp_path, entry_point, collector.url)
    first_s, waited = map(float, done.stdout.split())
    assert first_s >= FLUSH_WAIT_S_MAX
    # The first one alone; a busy machine may hold up some. Were each to wait, there would be a dozen.
    assert 1 <= waited <= 5
    assert done.stderr.count("tasks no longer wait for metrics to be exported") == 1


def test_a_setup_that_cannot_work_is_told_once_and_harms_no_batch(tmp_path: Path, entry_point: Path) -> None:
    nobody = {"OTEL_PYTHON_METER_PROVIDER": "nobody"}
    done = _worker("log.end_task(); print('went on')", tmp_path, entry_point, "http://127.0.0.1:9", **nobody)
    assert done.stdout == "went on\n"
    assert done.stderr.count("metrics are not sent to OpenTelemetry") == 1


# -- how a process decides -------------------------------------------------------------------------


class Sdk:
    """An export that hangs or fails when told to."""

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
    made = Sdk(monkeypatch)
    yield made
    made.gate.set()


def _recorded(mine: Telemetry) -> None:
    mine.record(CallMetrics("query", "run", 1, "counts", 0, rows=1))


def test_what_is_flushed_already_is_not_flushed_again(sdk: Sdk) -> None:
    mine = Telemetry()
    assert mine.flush(WAIT_S)
    assert sdk.began == 0
    _recorded(mine)
    assert mine.flush(WAIT_S)
    assert mine.flush(WAIT_S)
    assert sdk.began == 1


def test_once_an_export_has_come_through_tasks_wait_again(sdk: Sdk, caplog: pytest.LogCaptureFixture) -> None:
    mine = Telemetry()
    sdk.gate.clear()
    with caplog.at_level(logging.WARNING, "spark_state_ext"):
        _recorded(mine)
        assert not mine.flush(0.05)
        # Whoever waited here would wait until the test is over.
        began_s = time.monotonic()
        for _ in range(3):
            _recorded(mine)
            assert not mine.flush(WAIT_S)
        assert time.monotonic() - began_s < WAIT_S / 2
    assert len([it for it in caplog.messages if "no longer wait" in it]) == 1
    sdk.gate.set()
    # What came meanwhile is exported without another task that asks.
    eventually(lambda: sdk.began == 2 and not mine._busy)
    _recorded(mine)
    assert mine.flush(WAIT_S)
    assert sdk.began == 3


def test_an_export_that_fails_is_told_once_and_not_raised(sdk: Sdk, caplog: pytest.LogCaptureFixture) -> None:
    mine = Telemetry()
    sdk.error = RuntimeError("the collector is gone")
    with caplog.at_level(logging.WARNING, "spark_state_ext"):
        for _ in range(3):
            _recorded(mine)
            mine.flush(WAIT_S)
            eventually(lambda: not mine._busy)
    assert caplog.messages == ["metrics could not be exported: RuntimeError: the collector is gone"]
    assert sdk.began == 3


def test_exports_are_apart(sdk: Sdk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks of a busy worker do not wait for each other's exports, and all that they recorded goes at once."""
    monkeypatch.setattr(telemetry, "FLUSH_EVERY_S", 1.0)
    mine = Telemetry()
    _recorded(mine)
    assert mine.flush(WAIT_S)
    began_s = time.monotonic()
    for _ in range(100):
        _recorded(mine)
        mine.flush(WAIT_S)
    spent_s = time.monotonic() - began_s
    eventually(lambda: not mine._busy)
    assert sdk.began <= 2 + spent_s
