"""A planned operator for tests that do not plan it with Spark."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from spark_state_ext.engine.job import PANDAS, Job
from spark_state_ext.engine.options import StateOptions

__all__ = ["job_of"]


def job_of(options: StateOptions, **fields: Any) -> Job:
    """Return a job with a pandas function, one key column and no timeout.

    Parameters
    ----------
    options
        Options of `ArrowState`.
    fields
        Fields of the job that differ from these.
    """
    job = Job(
        options=options,
        key_schema="",
        state_schema="",
        columns=("k",),
        key_positions=(0,),
        timeout_conf="NoTimeout",
        event_time_position=-1,
        timezone="UTC",
        frame_rows_max=10_000,
        late_by_previous_watermark=True,
        application_id="",
        local_mode=False,
        plan_id="plan",
        batches_retained=100,
        api=PANDAS,
        input_schema="",
        output_schema="",
    )
    return replace(job, **fields)
