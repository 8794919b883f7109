"""Create the caller for a job's API."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from pyspark.sql.types import StructType

from arrow_schemas.row import RowSchema
from arrow_schemas.spark_types import state_fields
from spark_state_ext.engine.job import ARROW, ROWS, Job
from spark_state_ext.spark.callers.batches import BatchCaller
from spark_state_ext.spark.callers.groups import Caller
from spark_state_ext.spark.callers.keys import KeyCaller
from spark_state_ext.spark.callers.results import OutputColumns
from spark_state_ext.spark.callers.rows import RowCaller

__all__ = ["make_caller"]


def make_caller(job: Job, function: Callable[..., Any], schema: RowSchema) -> Caller:
    """Return the caller of a job's function; `schema` is the schema of rows as functions see them."""
    if job.api == ARROW:
        inputs, outputs = state_fields(job.input_schema, "input"), state_fields(job.output_schema, "output")
        return BatchCaller(function, schema, inputs, outputs)
    state, output = _parse_struct(job.state_schema), _parse_struct(job.output_schema)
    if job.api == ROWS:
        outputs = state_fields(job.output_schema, "output")
        return RowCaller(
            function, schema, state, _parse_struct(job.input_schema), _parse_struct(job.key_schema), output, outputs
        )
    columns = OutputColumns(tuple(output.names), output, job.options.strict_output)
    return KeyCaller(function, schema, state, job.columns, columns, job.timezone, job.frame_rows_max)


def _parse_struct(schema_json: str) -> StructType:
    return StructType.fromJson(json.loads(schema_json))
