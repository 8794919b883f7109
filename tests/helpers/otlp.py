"""An OpenTelemetry collector for tests, and an entry point that makes worker processes use it."""

from __future__ import annotations

import configparser
import gzip
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.helpers.waiting import WAIT_S

__all__ = ["Collector", "entry_point_in"]

ROOT = Path(__file__).parent.parent.parent


class Collector:
    """An OTLP endpoint over HTTP that keeps its requests; it hangs or refuses them if a test sets it to do so."""

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.open = threading.Event()
        self.open.set()
        self.status = 200
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                assert collector.open.wait(WAIT_S)
                if collector.status == 200:
                    collector.requests.append(ExportMetricsServiceRequest.FromString(body))
                self.send_response(collector.status)
                self.end_headers()

            def log_message(self, *args: Any) -> None:
                """Print nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        self.open.set()
        self._server.shutdown()
        self._server.server_close()

    def resources(self) -> list[dict[str, str]]:
        """Return the attributes of the resources that sent metrics."""
        return [
            {attribute.key: attribute.value.string_value for attribute in resource.resource.attributes}
            for request in self.requests
            for resource in request.resource_metrics
        ]

    def names(self) -> set[str]:
        """Return the names of the instruments that sent metrics."""
        return {
            metric.name
            for request in self.requests
            for resource in request.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
        }

    def last(self, name: str) -> float:
        """Return the sum over processes of an instrument's newest value: of a counter or gauge, or the count of a histogram."""
        newest: dict[str, float] = {}
        for request in self.requests:
            for resource in request.resource_metrics:
                (instance,) = [
                    attribute.value.string_value
                    for attribute in resource.resource.attributes
                    if attribute.key == "service.instance.id"
                ]
                for scope in resource.scope_metrics:
                    for metric in scope.metrics:
                        if metric.name == f"spark_state_ext.{name}":
                            points = metric.sum.data_points or metric.gauge.data_points
                            newest[instance] = sum(point.as_int for point in points) + sum(
                                point.count for point in metric.histogram.data_points
                            )
        return sum(newest.values())


def entry_point_in(folder: Path) -> Path:
    """Make a folder for Python's path with the entry points that this package would have if it were installed.

    Parameters
    ----------
    folder
        Parent of the new folder.
    """
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    info = folder / "site" / "spark_state_ext-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: spark-state-ext\nVersion: 0\n")
    entry_points = setup["options.entry_points"]["opentelemetry_meter_provider"]
    (info / "entry_points.txt").write_text(f"[opentelemetry_meter_provider]\n{entry_points.strip()}\n")
    return info.parent
