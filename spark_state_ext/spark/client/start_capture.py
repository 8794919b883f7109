"""Capturing, when a query is planned, the pointers of the checkpoint from which it may start: only Spark reads them."""

from __future__ import annotations

import logging
import re
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from spark_state_ext.engine.job import Job
from spark_state_ext.engine.options import StateOptions
from spark_state_ext.engine.start_from import CLAIM, RetainedCheckpoint
from spark_state_ext.errors import (
    BucketCountChangedError,
    BucketMapChangedError,
    ChangedJobError,
    FunctionChangedError,
    MissingCheckpointError,
    OperatorChangedError,
    SchemaChangedError,
    StateError,
)
from spark_state_ext.savepoints.captured_pointers import make_captured_name
from spark_state_ext.savepoints.task_rows import ANSWER
from spark_state_ext.spark.client.state_reader import StateReader
from spark_state_ext.spark.client.task_functions import task_entry
from spark_state_ext.spark.client.tasks import release_hold, request_for, run_task
from spark_state_ext.spark.compat import extract_spark_message

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["capture_start", "capture_rescaling"]

_LOGGER = logging.getLogger("spark_state_ext")
_OURS = re.compile(r"spark_state_ext\.errors\.\w+: ([^\n]+)")
_REFUSALS = (
    BucketCountChangedError,
    BucketMapChangedError,
    FunctionChangedError,
    SchemaChangedError,
    ChangedJobError,
)

# How long a hold lasts from planning until the first batch. From then on the query's calls renew it, or own the folder.
_CAPTURED_HOLD_MS = 3_600_000


def capture_start(spark: SparkSession, job: Job) -> tuple[Job, str | None]:
    """Return the job with the retained checkpoint from which it may start, and the query folder that it claims, if any.

    If the checkpoint cannot be read now, the call that needs it raises: a query with state of its own needs nothing.
    """
    start = job.options.start_from
    if not isinstance(start, RetainedCheckpoint):
        return job, None
    reason = ""
    try:
        file, query_folder = _capture(spark, job, start)
    except OperatorChangedError:
        # This is wrong for every query, with or without state.
        raise
    except StateError as error:
        reason = str(error)
    except Exception as error:
        # Releases of Spark have no common base class of errors.
        reason = _find_reason(str(error))
    if reason:
        _LOGGER.warning(
            "operator %r cannot start from %s: %s. A query with state of its own continues; a query without state "
            "fails in its first batch with data",
            job.operator,
            start,
            reason,
        )
        return replace(job, not_captured=reason), None
    return replace(job, captured=file), query_folder if start.mode == CLAIM else None


def _find_reason(text: str) -> str:
    """Return the reason in the text of an error that came through Spark: our task's message, or Spark's own."""
    match = _OURS.search(text)
    return match[1] if match is not None else f"Spark cannot read it: {extract_spark_message(text)}"


def capture_rescaling(spark: SparkSession, job: Job) -> Job:
    """Return the job with the pointers of its query's last batch if the query may have to be rescaled.

    If they cannot be read now, the call that needs them reports it: at a query's first start there are none.
    """
    location = job.options.rescale
    if location is None:
        return job
    try:
        rescaled = _capture_for_rescaling(spark, job, StateReader(spark, location))
    except StateError as error:
        reason = str(error)
    except Exception as error:
        # Releases of Spark have no common base class of errors.
        reason = _find_reason(str(error))
    else:
        if isinstance(rescaled, ChangedJobError):
            raise rescaled
        return rescaled
    _LOGGER.info("operator %r is not rescaled: could not read the last batch of %s: %s", job.operator, location, reason)
    return replace(job, not_rescaled=f"the last batch of {location} was not read when the query was planned: {reason}")


def _capture_for_rescaling(spark: SparkSession, job: Job, reader: StateReader) -> Job | ChangedJobError:
    """Return the job with the pointers of its query's last batch, or the reason why the query cannot be rescaled."""
    options = job.options
    store = next((candidate for candidate in reader.stores() if candidate.operator == job.operator), None)
    if store is None:
        return job
    request = {
        **request_for(options),
        "operator": job.operator,
        "query_folder": store.query_folder,
        "holder": f"the rescaling of operator {job.operator!r} below {options.root}",
        "lasts_ms": _CAPTURED_HOLD_MS,
        "rescales": True,
        "wanted": job.operator_file(store.query_folder).encode().decode(),
        "case": job.case_sensitive,
        "file": make_captured_name(int(time.time() * 1000), job.plan_id),
        "target": {
            "root": options.root,
            "storage_options": dict(options.storage_options),
            "operator": job.operator,
        },
    }
    answer = run_task(spark, "savepoint_tasks.begin", request)
    if "nothing_in" in answer:
        raise MissingCheckpointError(
            f"there is no state in {answer['nothing_in']}, where it should be: set rescale to the checkpointLocation "
            "of this query, and root and operator to the values that the query had before"
        )
    if "stays" in answer:
        return job
    if "refused" in answer:
        name, text = answer["refused"]
        return next(candidate for candidate in _REFUSALS if candidate.__name__ == name)(text)
    request |= answer
    try:
        committed = reader.batch()
        request |= {"batch": committed.batch, "later": []}
        with reader.pointers(store, committed.batch) as pointers:
            pointers.coalesce(1).mapInArrow(task_entry("savepoint_tasks.capture", request), ANSWER).collect()
    except BaseException:
        # Otherwise the query's own clean-up would wait for an hour.
        release_hold(spark, request)
        raise
    _LOGGER.info(
        "operator %r has its state of batch %d in %d buckets, and continues with %s",
        job.operator,
        committed.batch,
        store.buckets,
        options.bucket_map,
    )
    return replace(job, rescaled_from=str(request["file"]), rescaled_buckets=store.buckets)


def _capture(spark: SparkSession, job: Job, start: RetainedCheckpoint) -> tuple[str | None, str | None]:
    reader = StateReader(spark, start.checkpoint_location)
    name = start.operator or job.operator
    stores = reader.stores()
    store = next((candidate for candidate in stores if candidate.operator == name), None)
    if store is None:
        if start.allow_non_restored:
            return None, None
        if not stores:
            raise MissingCheckpointError(f"{start.checkpoint_location} has no state of spark_state_ext")
        raise OperatorChangedError(
            f"the query with the checkpoint location {start.checkpoint_location} has no operator {name!r}; it "
            f"has {', '.join(candidate.operator for candidate in stores)}. Choose one of these with operator=…, or "
            "start without state with allow_non_restored=True"
        )
    options = StateOptions(root=start.root, operator=name, storage_options=start.storage_options, backends=start.places)
    request = {
        **request_for(options),
        "operator": name,
        "query_folder": store.query_folder,
        "holder": f"the start of operator {job.operator!r} below {job.options.root}",
        "lasts_ms": _CAPTURED_HOLD_MS,
        "claims": start.mode == CLAIM,
        "claim": store.claim,
        "file": make_captured_name(int(time.time() * 1000), job.plan_id),
        "target": {
            "root": job.options.root,
            "storage_options": dict(job.options.storage_options),
            "operator": job.operator,
        },
    }
    request |= run_task(spark, "savepoint_tasks.begin", request)
    try:
        committed = reader.batch(start.batch)
        _LOGGER.info(
            "if the query has no state of its own, operator %r starts with batch %d of %s",
            job.operator,
            committed.batch,
            start,
        )
        request |= {"batch": committed.batch, "later": list(committed.later)}
        with reader.pointers(store, committed.batch) as pointers:
            pointers.coalesce(1).mapInArrow(task_entry("savepoint_tasks.capture", request), ANSWER).collect()
    except BaseException:
        # The query will not start from it, and the other query's clean-up would wait for an hour.
        release_hold(spark, request)
        raise
    return str(request["file"]), store.query_folder
