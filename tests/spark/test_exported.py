"""What Spark's Python workers tell an OpenTelemetry collector, when each ends with its task."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from spark_state_ext.worker.telemetry import INSTRUMENTS
from tests.helpers.otlp import Collector, entry_point_in
from tests.helpers.waiting import WAIT_S

ROOT = Path(__file__).parent.parent.parent
BATCHES, BUCKETS = 3, 4


@pytest.mark.spark
@pytest.mark.slow
def test_workers_that_end_with_each_task_lose_no_measurement(tmp_path: Path) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the OTLP exporter is not installed")
    collector = Collector()
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("OTEL_")},
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(entry_point_in(tmp_path)), os.environ.get("PYTHONPATH", "")]),
        "OTEL_PYTHON_METER_PROVIDER": "spark_state_ext",
        "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url,
    }
    try:
        done = subprocess.run(
            [sys.executable, str(ROOT / "tests/spark/exported_job.py"), str(tmp_path), "--batches", str(BATCHES)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=WAIT_S,
            check=False,
        )
    finally:
        collector.close()
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert (said["calls"], said["rows"], said["batches"]) == (BATCHES * BUCKETS, BATCHES * 500, BATCHES)
    assert collector.last("rows") == said["rows"]
    assert collector.names() == {it.full_name for it in INSTRUMENTS if it.column}
    assert collector.last("state_bytes") == said["calls"]
    # A process for each task.
    assert len({it["service.instance.id"] for it in collector.resources()}) == BATCHES * 2
