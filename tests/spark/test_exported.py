"""Spark's Python workers send their metrics to an OpenTelemetry collector even if each ends with its task."""

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
def test_workers_that_end_with_each_task_export_all_measurements(tmp_path: Path) -> None:
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
    totals = json.loads(done.stdout.splitlines()[-1])
    assert (totals["calls"], totals["rows"], totals["batches"]) == (BATCHES * BUCKETS, BATCHES * 500, BATCHES)
    assert collector.last("rows") == totals["rows"]
    assert collector.names() == {instrument.full_name for instrument in INSTRUMENTS if instrument.column}
    assert collector.last("state_bytes") == totals["calls"]
    # Each task has its own process.
    assert len({resource["service.instance.id"] for resource in collector.resources()}) == BATCHES * 2
