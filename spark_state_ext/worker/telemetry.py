"""Metrics through OpenTelemetry, where a worker process has an SDK, and their way out before the process is gone.

An SDK's readers export now and then, and Spark ends Python workers without notice. So what calls recorded is flushed
when their task ends, beside it: the task waits for that, but never longer than `FLUSH_WAIT_S_MAX`. Whatever fails here
is told once and harms no batch.
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
# Exports of a process begin so far apart, however many tasks end.
FLUSH_EVERY_S = 1.0
# What the SDK is told. Nobody waits so long.
_EXPORT_MS_MAX = 10_000

COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"
# What is nothing is to look like nothing, not like something below the first bound.
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
        Behind ``spark_state_ext.``.
    kind
        ``"counter"``, ``"gauge"`` or ``"histogram"``.
    column
        The column of `CallMetrics` that it has its values from; empty where they are of calls that failed.
    unit
        As OpenTelemetry writes it.
    """

    name: str
    kind: str
    column: str
    unit: str = "1"

    @property
    def full_name(self) -> str:
        """As exporters get it."""
        return f"{METER}.{self.name}"


_UNITS = {"ms": "ms", "bytes": "By"}


def _made_of(kind: str, *columns: str) -> tuple[Instrument, ...]:
    return tuple(Instrument(it, kind, it, _UNITS.get(it.rpartition("_")[2], "1")) for it in columns)


FAILED_CALLS = Instrument("failed_calls", COUNTER, "")
# What a failed call tells too; all else is told of calls that came to their end.
_OF_FAILED = ("upload_failures", "snapshot_failures", "deleted_files")
INSTRUMENTS: tuple[Instrument, ...] = (
    *_made_of(COUNTER, "rows", "keys", "timeouts", "changed_rows", "uploaded_bytes", "uploads", "upload_failures"),
    *_made_of(COUNTER, "restored_files", "restore_gaps", "snapshot_bytes", "snapshots", "snapshot_failures"),
    *_made_of(COUNTER, "deleted_files"),
    Instrument("cache_hits", COUNTER, "cache_hit"),
    FAILED_CALLS,
    *_made_of(HISTOGRAM, "read_ms", "lookup_ms", "user_ms", "commit_ms", "wait_ms", "total_ms", "upload_ms"),
    *_made_of(HISTOGRAM, "snapshot_ms", "delta_bytes", "inline_bytes", "oldest_inline_ms", "lease_age_ms"),
    *_made_of(HISTOGRAM, "state_bytes"),
    Instrument("state_rows", HISTOGRAM, "state_rows", "{row}"),
    Instrument("key_rows_max", HISTOGRAM, "key_rows_max", "{row}"),
    Instrument("buckets", GAUGE, "job_buckets", "{bucket}"),
)


class Telemetry:
    """What a worker process tells an SDK of OpenTelemetry, if it has one."""

    def __init__(self, beside: DaemonPool | None = None) -> None:
        self._beside = beside or DaemonPool("telemetry")
        self._changed = threading.Condition()
        # How many recordings there were, how many of them are to be flushed, and how many are.
        self._recorded = self._asked = self._flushed = 0
        self._busy = False
        # Somebody waited in vain, and no export has come through since.
        self._slow = False
        self._begun_s = -math.inf

    def record(self, call: CallMetrics) -> None:
        """Record a call that came to its end."""
        self._record(call, lambda it: bool(it.column))

    def record_failure(self, call: CallMetrics) -> None:
        """Record a call that failed."""
        self._record(call, lambda it: it is FAILED_CALLS or it.column in _OF_FAILED)

    def _record(self, call: CallMetrics, which: Callable[[Instrument], bool]) -> None:
        made = _instruments()
        if made is None:
            return
        # Buckets are too many to be told apart in a metrics store.
        attributes = {"operator": call.operator, "query_id": call.query_id}
        try:
            for it in filter(which, INSTRUMENTS):
                value = int(getattr(call, it.column)) if it.kind == COUNTER and it.column else 1
                if it.kind == COUNTER:
                    made[it.name].add(value, attributes)
                elif it.kind == GAUGE:
                    made[it.name].set(getattr(call, it.column), attributes)
                else:
                    made[it.name].record(getattr(call, it.column), attributes)
        except Exception as error:
            _tell(f"the SDK of OpenTelemetry takes no metrics: {type(error).__name__}: {error}")
        with self._changed:
            self._recorded += 1

    def flush(self, wait_s: float = FLUSH_WAIT_S_MAX) -> bool:
        """Have what was recorded exported, beside the caller; whether it is."""
        if _force_flush() is None:
            return False
        with self._changed:
            mine = self._asked = self._recorded
            if self._flushed >= mine:
                return True
            if not self._busy:
                try:
                    self._beside.submit(self._flush_all)
                except StorageError as error:  # no thread
                    _tell(f"metrics are not exported: {error}")
                    return False
                self._busy = True
            if self._slow or not wait_s or time.monotonic() < self._begun_s + FLUSH_EVERY_S:
                return False
            if self._changed.wait_for(lambda: self._flushed >= mine, wait_s):
                return True
            self._slow = True
        _tell(f"no task waits for metrics to be exported: that took longer than {wait_s:g} s. Is the collector slow?")
        return False

    def _flush_all(self) -> None:
        while True:
            with self._changed:
                if self._flushed >= self._asked:
                    self._busy = False
                    return
                pause_s = self._begun_s + FLUSH_EVERY_S - time.monotonic()
            if pause_s > 0:
                time.sleep(pause_s)
            with self._changed:
                through, self._begun_s = self._recorded, time.monotonic()
            came_through = _exported()
            with self._changed:
                # Also what could not be exported: the SDK has it still, or has dropped it.
                self._flushed = through
                if came_through:
                    self._slow = False
                self._changed.notify_all()


def _exported() -> bool:
    flush = _force_flush()
    if flush is None:
        return False
    try:
        flush(timeout_millis=_EXPORT_MS_MAX)
    except Exception as error:
        _tell(f"metrics could not be exported: {type(error).__name__}: {error}")
        return False
    return True


def _force_flush() -> Callable[..., Any] | None:
    """That of the SDK; None where there is no SDK, or one that cannot."""
    if _instruments() is None:
        return None
    from opentelemetry.metrics import get_meter_provider

    found: Callable[..., Any] | None = getattr(get_meter_provider(), "force_flush", None)
    return found


@functools.cache
def _tell(text: str) -> None:
    _LOGGER.warning(text)


@functools.cache
def _instruments() -> Mapping[str, Any] | None:
    """Instruments by name, or None where OpenTelemetry's API is not installed, or its SDK cannot be set up."""
    try:
        from opentelemetry.metrics import get_meter
    except ImportError:
        return None
    try:
        meter = get_meter(METER)
        return {it.name: _made(meter, it) for it in INSTRUMENTS}
    except Exception as error:
        _tell(f"metrics do not go to OpenTelemetry: {type(error).__name__}: {error}")
        return None


def _made(meter: Any, it: Instrument) -> Any:
    if it.kind == COUNTER:
        return meter.create_counter(it.full_name, it.unit)
    if it.kind == GAUGE:
        return meter.create_gauge(it.full_name, it.unit)
    return meter.create_histogram(it.full_name, it.unit, explicit_bucket_boundaries_advisory=_BOUNDS[it.unit])


def meter_provider() -> Any:
    """An SDK that exports by OTLP over HTTP, for ``OTEL_PYTHON_METER_PROVIDER=spark_state_ext``.

    A worker process makes it with its first call, so after Spark's daemon has forked it: each has an identity of its
    own (`service.instance.id`). All else is told by the variables of OpenTelemetry, such as
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
    # The end of a task has flushed; a process that ends must not wait for a collector.
    return MeterProvider(metric_readers=[reader], resource=resource, shutdown_on_exit=False)
