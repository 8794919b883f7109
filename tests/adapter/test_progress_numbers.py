"""The client's note about other queries, the operator's name in plans, and numbers among its output."""

from __future__ import annotations

import functools
import logging
import struct
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from spark_state_ext.spark.client.other_queries import log_other_queries
from spark_state_ext.spark.client.task_functions import bucket_entry
from spark_state_ext.spark.shuffle.output import unpack
from spark_state_ext.spark.shuffle.payload import OUTPUT_COLUMN
from spark_state_ext.spark.shuffle.progress_numbers import encode_numbers
from spark_state_ext.worker.metrics import CallMetrics


def test_the_client_logs_queries_that_have_state_if_the_log_level_is_info(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("one", "two", "starting"):
        (tmp_path / "count" / name).mkdir(parents=True)
        (tmp_path / "count" / name / "operator_0.json").write_text("{}")
    # A folder that holds only a lease has no state.
    (tmp_path / "count" / "three" / "lease").mkdir(parents=True)
    with caplog.at_level(logging.WARNING, "spark_state_ext"):
        assert log_other_queries(str(tmp_path), {}, "count") is None
    with caplog.at_level(logging.INFO, "spark_state_ext"):
        for root, operator in ((tmp_path, "count"), (tmp_path, "other"), ("s3://no-such-bucket", "count")):
            no_retries = {"retries": {"max_attempts": 0}}
            unreachable = {"endpoint_url": "http://127.0.0.1:1", "key": "k", "secret": "s", "config_kwargs": no_retries}
            options = unreachable if "s3" in str(root) else {}
            thread = log_other_queries(str(root), options, operator)
            assert thread is not None
            thread.join()
    first, second = [record.getMessage() for record in caplog.records if record.name == "spark_state_ext"]
    assert f"operator 'count' under {tmp_path}: one, two. A query finds its own" in first
    assert "cannot list the queries that have state of operator 'count'" in second


def test_the_name_in_the_plan_has_the_operator_and_the_function() -> None:
    def my_count(batch: Any) -> None: ...

    class Model:
        def __call__(self, batch: Any) -> None: ...

    plain: dict[str, Any] = {"options": {"operator": "clicks.per-user"}, "function": None}
    names = [bucket_entry(plain, function).__name__ for function in (my_count, functools.partial(my_count), Model())]
    assert names == [f"arrow_state_clicks_per_user_{name}" for name in ("my_count", "my_count", "Model")]
    assert bucket_entry({**plain, "function": '{"name": "top_k", "parameters": {}}'}, my_count).__name__.endswith(
        "_top_k"
    )
    assert all(name.isidentifier() for name in names)
    assert bucket_entry(plain, lambda batch: None).__name__.isidentifier()


def test_numbers_among_the_output_are_dropped_by_unpack() -> None:
    call = CallMetrics("", "", 0, "o", 0, state_rows=7, state_rows_min=6, state_bytes=1 << 50, delta_bytes=0)
    frame = encode_numbers(call)
    (payload,) = frame[OUTPUT_COLUMN].tolist()
    assert payload[:1] == b"N"
    assert struct.unpack(">4q", payload[1:]) == (7, 6, 1 << 50, 0)
    schema = pa.schema([(OUTPUT_COLUMN, pa.binary())])
    assert list(unpack([pa.RecordBatch.from_pandas(frame, schema, preserve_index=False)])) == []
