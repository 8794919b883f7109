"""Record calls with an SDK that Prometheus scrapes, and print what Prometheus would read; run by test_dashboard."""

from __future__ import annotations

from pathlib import Path
from sys import argv

from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.metrics import set_meter_provider
from opentelemetry.sdk.metrics import MeterProvider
from prometheus_client import generate_latest

from spark_state_ext.worker.metrics import CallMetrics, MetricsLogs

set_meter_provider(MeterProvider([PrometheusMetricReader()]))
logs = MetricsLogs()
logs.at(Path(argv[1])).add(CallMetrics("query", "run", 1, "counts", 0))
logs.fail(CallMetrics("query", "run", 1, "counts", 1))
print(generate_latest().decode())
