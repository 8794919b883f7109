"""What a plan captures of the retained checkpoint that its query may start from: pointers, which only Spark reads."""

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
from spark_state_ext.savepoints.captured import captured_name
from spark_state_ext.savepoints.rows import ANSWER
from spark_state_ext.spark.client.shim import task_entry
from spark_state_ext.spark.client.state_reader import StateReader
from spark_state_ext.spark.client.tasks import in_a_task, let_go, place_of
from spark_state_ext.spark.compat import said_by_spark

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["captured", "with_rescaling"]

_LOGGER = logging.getLogger("spark_state_ext")
_OURS = re.compile(r"spark_state_ext\.errors\.\w+: ([^\n]+)")
_REFUSALS = (
    BucketCountChangedError,
    BucketMapChangedError,
    FunctionChangedError,
    SchemaChangedError,
    ChangedJobError,
)

# From when a query is planned until its first batch; then calls renew it.
_CAPTURED_HOLD_MS = 3_600_000


def captured(spark: SparkSession, job: Job) -> tuple[Job, str | None]:
    """The job with what it may start from, where that is a retained checkpoint, and the query folder that it claims.

    What cannot be read now is raised by the call that needs it, as a query that has state needs nothing.
    """
    start = job.options.start_from
    if not isinstance(start, RetainedCheckpoint):
        return job, None
    why = ""
    try:
        file, query_folder = _captured(spark, job, start)
    except OperatorChangedError:
        # Wrong for every query.
        raise
    except StateError as error:
        why = str(error)
    except Exception as error:
        # Spark's errors have no class that all releases share.
        why = _said(str(error))
    if why:
        _LOGGER.warning(
            "operator %r cannot start from %s: %s. A query that has state of its own goes on; one that has none fails "
            "in its first batch with data",
            job.operator,
            start,
            why,
        )
        return replace(job, not_captured=why), None
    return replace(job, captured=file), query_folder if start.mode == CLAIM else None


def _said(text: str) -> str:
    """The sentence of an error that came through Spark: what a task of ours raised, or what Spark says itself."""
    found = _OURS.search(text)
    return found[1] if found is not None else f"Spark cannot read it: {said_by_spark(text)}"


def with_rescaling(spark: SparkSession, job: Job) -> Job:
    """The job with the pointers of its query's last batch, where the query may have to be rescaled.

    What cannot be read now is told by the call that would need it: at a query's first start there is nothing to read.
    """
    location = job.options.rescale
    if location is None:
        return job
    try:
        rescaled = _rescaled(spark, job, StateReader(spark, location))
    except StateError as error:
        why = str(error)
    except Exception as error:
        # Spark's errors have no class that all releases share.
        why = _said(str(error))
    else:
        if isinstance(rescaled, ChangedJobError):
            raise rescaled
        return rescaled
    _LOGGER.info("operator %r is not rescaled, as the last batch of %s was not read: %s", job.operator, location, why)
    return replace(job, not_rescaled=f"the last batch of {location} was not read when the query was planned: {why}")


def _rescaled(spark: SparkSession, job: Job, reader: StateReader) -> Job | ChangedJobError:
    """The job with the pointers of its query's last batch; or why the query cannot be rescaled."""
    options = job.options
    store = next((it for it in reader.stores() if it.operator == job.operator), None)
    if store is None:
        return job
    told = {
        **place_of(options),
        "operator": job.operator,
        "query_folder": store.query_folder,
        "holder": f"the rescaling of operator {job.operator!r} below {options.root}",
        "lasts_ms": _CAPTURED_HOLD_MS,
        "rescales": True,
        "wanted": job.operator_file(store.query_folder).encode().decode(),
        "case": job.case_sensitive,
        "file": captured_name(int(time.time() * 1000), job.plan_id),
        "target": {
            "root": options.root,
            "storage_options": dict(options.storage_options),
            "operator": job.operator,
        },
    }
    begun = in_a_task(spark, "begin", told)
    if "nothing_in" in begun:
        raise MissingCheckpointError(
            f"its state would be in {begun['nothing_in']}, which has none: give rescale the checkpointLocation of this "
            "query, and root and operator as they were"
        )
    if "stays" in begun:
        return job
    if "refused" in begun:
        name, text = begun["refused"]
        return next(it for it in _REFUSALS if it.__name__ == name)(text)
    told |= begun
    try:
        committed = reader.batch()
        told |= {"batch": committed.batch, "later": []}
        with reader.pointers(store, committed.batch) as pointers:
            pointers.coalesce(1).mapInArrow(task_entry("capture", told), ANSWER).collect()
    except BaseException:
        # The query's own clean-up would wait for an hour.
        let_go(spark, told)
        raise
    _LOGGER.info(
        "operator %r has its state of batch %d in %d buckets, and goes on with %s",
        job.operator,
        committed.batch,
        store.buckets,
        options.bucket_map,
    )
    return replace(job, rescaled_from=str(told["file"]), rescaled_buckets=store.buckets)


def _captured(spark: SparkSession, job: Job, start: RetainedCheckpoint) -> tuple[str | None, str | None]:
    reader = StateReader(spark, start.checkpoint_location)
    name = start.operator or job.operator
    stores = reader.stores()
    store = next((it for it in stores if it.operator == name), None)
    if store is None:
        if start.allow_non_restored:
            return None, None
        if not stores:
            raise MissingCheckpointError(f"{start.checkpoint_location} has no state of this package")
        raise OperatorChangedError(
            f"the query with the checkpoint location {start.checkpoint_location} has no operator {name!r}; it has "
            f"{', '.join(it.operator for it in stores)}. Name the one whose state is meant with operator=…, or begin "
            "without state with allow_non_restored=True"
        )
    options = StateOptions(root=start.root, operator=name, storage_options=start.storage_options, backends=start.places)
    told = {
        **place_of(options),
        "operator": name,
        "query_folder": store.query_folder,
        "holder": f"the start of operator {job.operator!r} below {job.options.root}",
        "lasts_ms": _CAPTURED_HOLD_MS,
        "claims": start.mode == CLAIM,
        "claim": store.claim,
        "file": captured_name(int(time.time() * 1000), job.plan_id),
        "target": {
            "root": job.options.root,
            "storage_options": dict(job.options.storage_options),
            "operator": job.operator,
        },
    }
    told |= in_a_task(spark, "begin", told)
    try:
        committed = reader.batch(start.batch)
        _LOGGER.info(
            "if the query has no state of its own, operator %r begins with batch %d of %s",
            job.operator,
            committed.batch,
            start,
        )
        told |= {"batch": committed.batch, "later": list(committed.later)}
        with reader.pointers(store, committed.batch) as pointers:
            pointers.coalesce(1).mapInArrow(task_entry("capture", told), ANSWER).collect()
    except BaseException:
        # Nobody will start from it, and the other query's clean-up would wait for an hour.
        let_go(spark, told)
        raise
    return str(told["file"]), store.query_folder
