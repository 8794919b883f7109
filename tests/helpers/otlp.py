"""An OpenTelemetry collector of a test, and what leads worker processes to it."""

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
    """An OTLP endpoint over HTTP that keeps what it gets, and that hangs or refuses when told to."""

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
                """Nothing is printed."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        self.open.set()
        self._server.shutdown()
        self._server.server_close()

    def resources(self) -> list[dict[str, str]]:
        """Attributes of the resources that told something."""
        return [
            {it.key: it.value.string_value for it in resource.resource.attributes}
            for request in self.requests
            for resource in request.resource_metrics
        ]

    def names(self) -> set[str]:
        """Names of the instruments that told something."""
        return {
            metric.name
            for request in self.requests
            for resource in request.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
        }

    def last(self, name: str) -> float:
        """The newest value of an instrument, summed up over processes: that of a counter, or how often it was told."""
        newest: dict[str, float] = {}
        for request in self.requests:
            for resource in request.resource_metrics:
                (instance,) = [
                    it.value.string_value for it in resource.resource.attributes if it.key == "service.instance.id"
                ]
                for scope in resource.scope_metrics:
                    for metric in scope.metrics:
                        if metric.name == f"spark_state_ext.{name}":
                            points = metric.sum.data_points or metric.gauge.data_points
                            newest[instance] = sum(it.as_int for it in points) + sum(
                                it.count for it in metric.histogram.data_points
                            )
        return sum(newest.values())


def entry_point_in(folder: Path) -> Path:
    """A folder for Python's path that says of the tree what an installed package says of itself.

    Parameters
    ----------
    folder
        Where it is made.
    """
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    info = folder / "site" / "spark_state_ext-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: spark-state-ext\nVersion: 0\n")
    said = setup["options.entry_points"]["opentelemetry_meter_provider"]
    (info / "entry_points.txt").write_text(f"[opentelemetry_meter_provider]\n{said.strip()}\n")
    return info.parent
