"""Builds without Spark what a plan would send to executors."""

from __future__ import annotations

import uuid
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from pyspark.sql.types import StructField, StructType

from arrow_schemas.spark_types import key_fields
from spark_state_ext.engine.job import PANDAS, Job
from spark_state_ext.engine.options import StateOptions
from spark_state_ext.errors import UsageError
from spark_state_ext.functions.ttl import Ttl
from spark_state_ext.spark.client.planner import check_types
from spark_state_ext.spark.client.state import ArrowState
from spark_state_ext.spark.shuffle.payload import NO_ROW_LIMIT

__all__ = ["check_delay", "check_restart", "make_job", "make_options"]

# Rows of a pandas frame, as on Spark by default. Without frames, payloads may be as large as ever: each payload costs
# some calls, whatever its size.
_ROWS_MAX = 10_000


def check_restart(restart: Any) -> None:
    """Raise a UsageError if `restart` does not say when to restart."""
    if not isinstance(restart, (bool, Collection)) or isinstance(restart, str):
        raise UsageError(f"restart must be True, False, or numbers of batches, not {restart!r}")


def check_delay(delay_ms: Any) -> None:
    """Raise a UsageError if `delay_ms` is not a delay."""
    if isinstance(delay_ms, bool) or not isinstance(delay_ms, int) or delay_ms < 0:
        raise UsageError(f"delay_ms must be a whole number from 0 on, not {delay_ms!r}")


def make_options(
    folder: str, buckets: int, ttl: Ttl | None, *, restart: Any, strict_output: bool = True
) -> StateOptions:
    """Return the state options of a run below a folder."""
    return ArrowState(
        Path(folder) / "root",
        "run",
        buckets=buckets,
        local_dir=Path(folder) / "local",
        # A restart must load from checkpoint files alone, so pointers must not have inline deltas.
        backends=("changelog", "fsspec") if restart is False else ("fsspec",),
        ttl=ttl,
        strict_output=strict_output,
    ).options


def make_job(
    options: StateOptions,
    api: str,
    input_type: StructType,
    key_positions: Sequence[int],
    state: StructType,
    output: StructType,
    **others: Any,
) -> Job:
    """Return the job that a plan would send to executors; raise the errors that planning would raise."""
    fields = [input_type.fields[at] for at in key_positions]
    key_type = StructType([StructField(field.name, field.dataType, field.nullable) for field in fields])
    key_fields(key_type.json())
    check_types(api, state, output, input_type, case_sensitive=False)
    return Job(
        options=options,
        key_schema=key_type.json(),
        state_schema=state.json(),
        columns=tuple(input_type.names),
        key_positions=tuple(key_positions),
        frame_rows_max=_ROWS_MAX if api == PANDAS else NO_ROW_LIMIT,
        late_by_previous_watermark=True,
        application_id="run",
        local_mode=True,
        plan_id=uuid.uuid4().hex,
        batches_retained=100,
        api=api,
        input_schema=input_type.json(),
        output_schema=output.json(),
        **others,
    )
