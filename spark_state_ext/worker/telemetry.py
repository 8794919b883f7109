"""Metrics through OpenTelemetry, if a worker process has an SDK, exported before the process ends.

An SDK exports only now and then, and Spark ends Python workers without notice. So the metrics of calls are flushed in
the background when their task ends; the task waits for that, but never longer than `FLUSH_WAIT_S_MAX`. Errors are
logged once and do not affect batches.
"""

from __future__ import annotations

import functools
import logging
import math
import os
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spark_state_ext.errors import StorageError
from spark_state_ext.worker.host import host_name
from spark_state_ext.worker.threads import DaemonPool

if TYPE_CHECKING:
    from spark_state_ext.worker.metrics import CallMetrics

__all__ = ["FLUSH_EVERY_S", "FLUSH_WAIT_S_MAX", "INSTRUMENTS", "Instrument", "Telemetry", "meter_provider"]

_LOGGER = logging.getLogger("spark_state_ext")
METER = "spark_state_ext"
# How long the end of a task waits for an export.
FLUSH_WAIT_S_MAX = 0.5
# Minimum time between the starts of two exports of a process, however many tasks end.
FLUSH_EVERY_S = 1.0
# The timeout passed to the SDK; tasks do not wait this long.
_EXPORT_MS_MAX = 10_000

COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"
# The first bound is 0, so that zeros are distinguished from small values.
_MS_BOUNDS = [0, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 30_000, 60_000, 300_000]
_BYTES_BOUNDS = [0, *(4**n for n in range(5, 18))]
_ROWS_BOUNDS = [0, *(10**n for n in range(10))]
_BOUNDS = {"ms": _MS_BOUNDS, "By": _BYTES_BOUNDS, "{row}": _ROWS_BOUNDS}


@dataclass(frozen=True)
class Instrument:
    """One instrument of the meter.

    Parameters
    ----------
    name
        Name without the prefix ``spark_state_ext.``.
    kind
        ``"counter"``, ``"gauge"`` or ``"histogram"``.
    column
        The column of `CallMetrics` with its values; empty for the counter of failed calls.
    unit
        Unit in OpenTelemetry's notation.
    """

    name: str
    kind: str
    column: str
    unit: str = "1"

    @property
    def full_name(self) -> str:
        """Name that exporters get."""
        return f"{METER}.{self.name}"


_UNITS = {"ms": "ms", "bytes": "By"}


def _make_instruments(kind: str, *columns: str) -> tuple[Instrument, ...]:
    return tuple(Instrument(name, kind, name, _UNITS.get(name.rpartition("_")[2], "1")) for name in columns)


FAILED_CALLS = Instrument("failed_calls", COUNTER, "")
# Columns that are recorded for failed calls too; the others are recorded only for calls that succeeded.
_FAILED_CALL_COLUMNS = ("upload_failures", "snapshot_failures", "deleted_files")
INSTRUMENTS: tuple[Instrument, ...] = (
    *_make_instruments(
        COUNTER, "rows", "keys", "timeouts", "changed_rows", "uploaded_bytes", "uploads", "upload_failures"
    ),
    *_make_instruments(COUNTER, "restored_files", "restore_gaps", "snapshot_bytes", "snapshots", "snapshot_failures"),
    *_make_instruments(COUNTER, "deleted_files"),
    Instrument("cache_hits", COUNTER, "cache_hit"),
    FAILED_CALLS,
    *_make_instruments(HISTOGRAM, "read_ms", "lookup_ms", "user_ms", "commit_ms", "wait_ms", "total_ms", "upload_ms"),
    *_make_instruments(HISTOGRAM, "snapshot_ms", "delta_bytes", "inline_bytes", "oldest_inline_ms", "lease_age_ms"),
    *_make_instruments(HISTOGRAM, "state_bytes"),
    Instrument("state_rows", HISTOGRAM, "state_rows", "{row}"),
    Instrument("key_rows_max", HISTOGRAM, "key_rows_max", "{row}"),
    Instrument("buckets", GAUGE, "job_buckets", "{bucket}"),
)


class Telemetry:
    """Records a worker process's metrics with the SDK of OpenTelemetry, if there is one."""

    def __init__(self, pool: DaemonPool | None = None) -> None:
        self._pool = pool or DaemonPool("telemetry")
        self._changed = threading.Condition()
        # Numbers of calls that were recorded, that were requested to be flushed, and that were flushed.
        self._recorded = self._requested = self._flushed = 0
        self._busy = False
        # True from when a task waited in vain until an export succeeds.
        self._slow = False
        self._started_s = -math.inf

    def record(self, call: CallMetrics) -> None:
        """Record a call that succeeded."""
        self._record(call, lambda instrument: bool(instrument.column))

    def record_failure(self, call: CallMetrics) -> None:
        """Record a call that failed."""
        self._record(call, lambda instrument: instrument is FAILED_CALLS or instrument.column in _FAILED_CALL_COLUMNS)

    def _record(self, call: CallMetrics, which: Callable[[Instrument], bool]) -> None:
        sdk_instruments = _create_instruments()
        if sdk_instruments is None:
            return
        # No attribute for the bucket: there are too many for a metrics store.
        attributes = {"operator": call.operator, "query_id": call.query_id}
        try:
            for instrument in filter(which, INSTRUMENTS):
                value = int(getattr(call, instrument.column)) if instrument.kind == COUNTER and instrument.column else 1
                if instrument.kind == COUNTER:
                    sdk_instruments[instrument.name].add(value, attributes)
                elif instrument.kind == GAUGE:
                    sdk_instruments[instrument.name].set(getattr(call, instrument.column), attributes)
                else:
                    sdk_instruments[instrument.name].record(getattr(call, instrument.column), attributes)
        except Exception as error:
            _warn_once(f"the SDK of OpenTelemetry does not accept metrics: {type(error).__name__}: {error}")
        with self._changed:
            self._recorded += 1

    def flush(self, wait_s: float = FLUSH_WAIT_S_MAX) -> bool:
        """Export all recorded calls in the background, wait at most `wait_s`, and return whether they are exported."""
        if _find_force_flush() is None:
            return False
        with self._changed:
            requested = self._requested = self._recorded
            if self._flushed >= requested:
                return True
            if not self._busy:
                try:
                    self._pool.submit(self._flush_all)
                except StorageError as error:  # no thread could be started
                    _warn_once(f"metrics are not exported: {error}")
                    return False
                self._busy = True
            if self._slow or not wait_s or time.monotonic() < self._started_s + FLUSH_EVERY_S:
                return False
            if self._changed.wait_for(lambda: self._flushed >= requested, wait_s):
                return True
            self._slow = True
        _warn_once(
            f"tasks no longer wait for metrics to be exported: it took over {wait_s:g} s. Is the collector slow?"
        )
        return False

    def _flush_all(self) -> None:
        while True:
            with self._changed:
                if self._flushed >= self._requested:
                    self._busy = False
                    return
                pause_s = self._started_s + FLUSH_EVERY_S - time.monotonic()
            if pause_s > 0:
                time.sleep(pause_s)
            with self._changed:
                recorded, self._started_s = self._recorded, time.monotonic()
            succeeded = _export()
            with self._changed:
                # Even if the export failed, because then the SDK either still has the data or has dropped it.
                self._flushed = recorded
                if succeeded:
                    self._slow = False
                self._changed.notify_all()


def _export() -> bool:
    flush = _find_force_flush()
    if flush is None:
        return False
    try:
        flush(timeout_millis=_EXPORT_MS_MAX)
    except Exception as error:
        _warn_once(f"metrics could not be exported: {type(error).__name__}: {error}")
        return False
    return True


def _find_force_flush() -> Callable[..., Any] | None:
    """Return the SDK's function to export at once; None if there is no SDK or it has no such function."""
    if _create_instruments() is None:
        return None
    from opentelemetry.metrics import get_meter_provider

    flush: Callable[..., Any] | None = getattr(get_meter_provider(), "force_flush", None)
    return flush


@functools.cache
def _warn_once(text: str) -> None:
    _LOGGER.warning(text)


@functools.cache
def _create_instruments() -> Mapping[str, Any] | None:
    """Create the SDK's instruments, by name; None if OpenTelemetry's API is missing or its SDK cannot be set up."""
    try:
        from opentelemetry.metrics import get_meter
    except ImportError:
        return None
    try:
        meter = get_meter(METER)
        return {instrument.name: _create_instrument(meter, instrument) for instrument in INSTRUMENTS}
    except Exception as error:
        _warn_once(f"metrics are not sent to OpenTelemetry: {type(error).__name__}: {error}")
        return None


def _create_instrument(meter: Any, instrument: Instrument) -> Any:
    if instrument.kind == COUNTER:
        return meter.create_counter(instrument.full_name, instrument.unit)
    if instrument.kind == GAUGE:
        return meter.create_gauge(instrument.full_name, instrument.unit)
    return meter.create_histogram(
        instrument.full_name, instrument.unit, explicit_bucket_boundaries_advisory=_BOUNDS[instrument.unit]
    )


def meter_provider() -> Any:
    """Create an SDK that exports by OTLP over HTTP, for ``OTEL_PYTHON_METER_PROVIDER=spark_state_ext``.

    A worker process creates it with its first call, so after Spark's daemon has forked the process, and gives it a
    unique `service.instance.id`. Everything else is configured by OpenTelemetry's variables, such as
    ``OTEL_EXPORTER_OTLP_ENDPOINT``.
    """
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
    from opentelemetry.sdk.resources import Resource

    instance = f"{host_name()}:{os.getpid()}:{uuid.uuid4().hex[:8]}"
    resource = Resource.create({"service.instance.id": instance})
    if str(resource.attributes["service.name"]).startswith("unknown_service"):
        resource = resource.merge(Resource({"service.name": METER}))
    reader = PeriodicExportingMetricReader(OTLPMetricExporter())
    # Metrics are flushed at the end of each task, and a process that ends must not wait for a collector.
    return MeterProvider(metric_readers=[reader], resource=resource, shutdown_on_exit=False)
