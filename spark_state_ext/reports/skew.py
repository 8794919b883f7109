"""Measure how evenly a job's load is spread over its buckets, from its metrics: sums by bucket, skew, and advice.

All functions here are pure. Skew is the heaviest bucket compared to the mean. Rows, state and time each have their own
skew, because many rows do not always take much time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from spark_state_ext.reports.batches import keep_last_calls
from spark_state_ext.reports.charts import format_with_unit
from spark_state_ext.reports.recommendation import BUCKET_BYTES_MAX, BUCKET_KEYS_MAX, BUCKETS_PER_CORE, estimate_calls_s

__all__ = ["BATCHES", "HEAVY_RANGE", "HOT_KEY", "Finding", "OperatorLoad", "Skew", "format_findings", "measure_loads"]

# By default, sums are over so many of the last batches.
BATCHES = 20
HOT_KEY, HEAVY_RANGE, MUCH_STATE, SLOW_CALLS = "hot key", "heavy range", "much state", "slow calls"
TOO_MANY, TOO_FEW, INCOMPLETE = "too many buckets", "too few buckets", "incomplete"
# A bucket is heavy above so many times the mean. Ranges of hashes differ in their number of keys only by chance.
_SKEW_MAX = 1.5
# Differences below so many standard deviations of a count are chance, as if rows were independent.
_DEVIATIONS = 6
# If one key has more than this share of a bucket's rows, a split does not help, because it leaves them together.
_HOT_SHARE = 0.5
# Below these values a bucket is never reported, even if it is much larger than others: an empty store has some bytes,
# and differences of few milliseconds are chance.
_STATE_BYTES_MIN = 16 << 20
_CALL_MS_MIN = 100.0
# Times vary more than rows, even if the load is even.
_SLOW_MAX = 3.0
# The share of the time between batches that calls of buckets may take.
_CALLS_SHARE_MAX = 0.25
_CALLS_MIN = 3
_PARTS_MAX = 16
_FINDINGS_MAX = 5
_HOT_TEXT = (
    "bucket {bucket} has {times:.1f} times the mean number of rows, and {share} of them in a batch have the same key: "
    "a split cannot separate rows of one key. Reduce these rows before the operator, as the built-in aggregate does, "
    "or add a column to the key and combine the partial results after the operator"
)
_HEAVY_TEXT = (
    "bucket {bucket} has {times:.1f} times the mean number of rows, and no key has more than {share} of them in a "
    "batch: "
)
_LARGE_TEXT = "bucket {bucket} has {times:.1f} times the mean size of state: unless one key has most of it, "
_SLOW_TEXT = (
    "bucket {bucket} takes {times:.1f} times the mean time of a call, but has no more rows or state than others: check "
    "what your function does with its keys, and the executor that runs it"
)


@dataclass(frozen=True)
class Skew:
    """The heaviest bucket divided by the mean, for each of three measures; 1 if all buckets are equal or empty.

    Parameters
    ----------
    rows, state_bytes, call_ms
        Input rows, bytes of state, and the median time of a call.
    """

    rows: float
    state_bytes: float
    call_ms: float


@dataclass(frozen=True)
class Finding:
    """Something about an operator's load that should be known or changed.

    Parameters
    ----------
    kind
        What it is, such as `HOT_KEY`.
    bucket
        The bucket that it is about; None if it is about all.
    text
        What was found, and what to do.
    """

    kind: str
    bucket: int | None
    text: str


@dataclass(frozen=True)
class OperatorLoad:
    """The load of one operator of one query, over its last batches.

    Parameters
    ----------
    query_id, operator
        The query and the operator.
    batches
        The number of batches that the sums are over.
    job_buckets
        How many buckets the operator has; the metrics may contain fewer.
    workers
        The most worker processes that were seen in a batch.
    interval_s
        Median seconds from the end of one batch to the end of the next; None if there is only one batch.
    buckets
        A row for each bucket, ascending: ``bucket``, ``calls``, ``rows``, ``changed_rows``, ``top_key_rows`` (sum of
        the rows of each call's most frequent key), ``state_rows`` and ``state_bytes`` (after its last call),
        ``call_ms`` (the median) and ``finding`` (its kind of finding, or NULL).
    skew
        The heaviest bucket divided by the mean.
    findings
        What should be known or changed.
    """

    query_id: str
    operator: str
    batches: int
    job_buckets: int
    workers: int
    interval_s: float | None
    buckets: pa.Table
    skew: Skew
    findings: tuple[Finding, ...]

    @property
    def is_even(self) -> bool:
        """True if nothing must be changed."""
        return all(finding.kind == INCOMPLETE for finding in self.findings)


def measure_loads(calls: pa.Table, batches: int = BATCHES, cores: int | None = None) -> list[OperatorLoad]:
    """Return the load of each operator in the metrics."""
    calls = keep_last_calls(calls)
    operators = (
        calls.group_by(["query_id", "operator"])
        .aggregate([])
        .sort_by([("query_id", "ascending"), ("operator", "ascending")])
    )
    loads = []
    for query_id, operator in zip(operators["query_id"].to_pylist(), operators["operator"].to_pylist(), strict=True):
        operator_calls = calls.filter(
            pc.and_(pc.equal(calls["query_id"], query_id), pc.equal(calls["operator"], operator))
        )
        numbers = np.unique(operator_calls["batch"].to_numpy())[-batches:]
        operator_calls = operator_calls.filter(pc.greater_equal(operator_calls["batch"], pa.scalar(int(numbers[0]))))
        loads.append(_measure_load(query_id, operator, operator_calls, cores))
    return loads


def _measure_load(query_id: str, operator: str, calls: pa.Table, cores: int | None) -> OperatorLoad:
    sums = calls.group_by(["bucket"]).aggregate(
        [
            *(("bucket", "count"), ("rows", "sum"), ("changed_rows", "sum"), ("key_rows_max", "sum")),
            *(("total_ms", "approximate_median"), ("at", "max")),
        ]
    )
    sums = sums.sort_by([("bucket", "ascending")])
    last = calls.take(pc.index_in(sums["at_max"], value_set=calls["at"].combine_chunks()))
    columns = {
        "bucket": sums["bucket"],
        "calls": sums["bucket_count"],
        "rows": sums["rows_sum"],
        "changed_rows": sums["changed_rows_sum"],
        "top_key_rows": sums["key_rows_max_sum"],
        "state_rows": last["state_rows"],
        "state_bytes": last["state_bytes"],
        "call_ms": sums["total_ms_approximate_median"],
    }
    by_bucket = pa.table(columns)
    skew = Skew(*(_compute_skew(by_bucket[name].to_numpy()) for name in ("rows", "state_bytes", "call_ms")))
    job_buckets = int(max(pc.max(calls["job_buckets"]).as_py(), pc.max(calls["bucket"]).as_py() + 1))
    workers = _count_workers(calls)
    ended_s = calls.group_by(["batch"]).aggregate([("ended_ms", "max")]).sort_by("batch")["ended_ms_max"].to_numpy()
    interval_s = float(np.median(np.diff(ended_s))) / 1000 if len(ended_s) > 1 else None
    bucket_findings = _find_in_buckets(by_bucket, job_buckets)
    findings = (*bucket_findings, *_find_in_number(by_bucket, job_buckets, workers, cores, interval_s))
    kinds = {finding.bucket: finding.kind for finding in reversed(bucket_findings)}
    finding_kinds = pa.array([kinds.get(bucket) for bucket in by_bucket["bucket"].to_pylist()], pa.string())
    by_bucket = by_bucket.append_column("finding", finding_kinds)
    return OperatorLoad(
        query_id, operator, len(ended_s), job_buckets, workers, interval_s, by_bucket, skew, tuple(findings)
    )


def _count_workers(calls: pa.Table) -> int:
    processes = calls.group_by(["batch", "host", "pid"]).aggregate([])
    return int(pc.max(processes.group_by(["batch"]).aggregate([("pid", "count")])["pid_count"]).as_py())


def _compute_skew(values: npt.NDArray[np.float64]) -> float:
    mean = float(values.mean())
    return float(values.max()) / mean if mean > 0 else 1.0


# -- findings --------------------------------------------------------------------------------------


def _find_in_buckets(by_bucket: pa.Table, job_buckets: int) -> list[Finding]:
    """Return at most one finding for each bucket, the heaviest bucket first."""
    names = ("bucket", "calls", "rows", "top_key_rows", "state_bytes", "call_ms")
    numbers, calls, rows, top_rows, state, call_ms = (by_bucket[name].to_numpy() for name in names)
    # A mean of 0 becomes 1, so that no bucket is above the mean.
    mean_rows, mean_state, mean_ms = (float(column.mean()) or 1.0 for column in (rows, state, call_ms))
    heavy = (rows > _SKEW_MAX * mean_rows) & (rows > mean_rows + _DEVIATIONS * math.sqrt(mean_rows))
    has_hot_key = top_rows > _HOT_SHARE * np.maximum(rows, 1)
    # With very few buckets no bucket can be heavy, but one key may still have half of all rows.
    hot = has_hot_key & (heavy | ((top_rows > _HOT_SHARE * rows.sum()) & (rows > top_rows) & (rows > _DEVIATIONS**2)))
    large = (state > _SKEW_MAX * mean_state) & (state > _STATE_BYTES_MIN) & ~heavy & ~hot
    slow = (call_ms > _SLOW_MAX * mean_ms) & (call_ms > _CALL_MS_MIN) & (calls >= _CALLS_MIN) & ~heavy & ~hot & ~large
    findings = []
    flagged = np.flatnonzero(hot | heavy | large | slow)
    for index in flagged[np.argsort(-rows[flagged], kind="stable")]:
        bucket, times_rows, times_state = int(numbers[index]), rows[index] / mean_rows, state[index] / mean_state
        share = f"{top_rows[index] / max(1, rows[index]):.0%}"
        if hot[index]:
            findings.append(Finding(HOT_KEY, bucket, _HOT_TEXT.format(bucket=bucket, times=times_rows, share=share)))
        elif heavy[index]:
            text = _HEAVY_TEXT.format(bucket=bucket, times=times_rows, share=share)
            findings.append(Finding(HEAVY_RANGE, bucket, text + _describe_split(job_buckets, bucket, times_rows)))
        elif large[index]:
            text = _LARGE_TEXT.format(bucket=bucket, times=times_state)
            findings.append(Finding(MUCH_STATE, bucket, text + _describe_split(job_buckets, bucket, times_state)))
        else:
            findings.append(
                Finding(SLOW_CALLS, bucket, _SLOW_TEXT.format(bucket=bucket, times=call_ms[index] / mean_ms))
            )
    return findings


def _describe_split(job_buckets: int, bucket: int, times: float) -> str:
    parts = min(_PARTS_MAX, max(2, math.ceil(times)))
    return (
        f"split only this bucket at a restart, with bucket_by=BucketMap.split({job_buckets}, {{{bucket}: {parts}}}) "
        "and rescale=<its checkpointLocation>, if buckets are equal ranges now"
    )


def _find_in_number(
    by_bucket: pa.Table, job_buckets: int, workers: int, cores: int | None, interval_s: float | None
) -> list[Finding]:
    """Return findings about the number of buckets."""
    findings, bucket_count, parallel = [], by_bucket.num_rows, workers if cores is None else cores
    batch_calls_s = estimate_calls_s(job_buckets, parallel)
    if job_buckets > BUCKETS_PER_CORE * parallel and interval_s and batch_calls_s > _CALLS_SHARE_MAX * interval_s:
        text = (
            f"{job_buckets:,} buckets are too many for {_describe_cores(workers, cores)}: their calls alone take about "
            f"{batch_calls_s:.3g} s of the {interval_s:.3g} s from batch to batch. recommend() says how many fit"
        )
        findings.append(Finding(TOO_MANY, None, text))
    if cores is not None and job_buckets < cores:
        text = (
            f"{job_buckets:,} buckets can use at most {job_buckets:,} of {cores:,} cores. recommend() says how many fit"
        )
        findings.append(Finding(TOO_FEW, None, text))
    keys, size = float(pc.mean(by_bucket["state_rows"]).as_py()), float(pc.mean(by_bucket["state_bytes"]).as_py())
    if keys > BUCKET_KEYS_MAX or size > BUCKET_BYTES_MAX:
        text = (
            f"a bucket has {keys:,.0f} keys and {format_with_unit(size, 'bytes')} on average, more than was ever "
            "measured: more buckets restore faster. recommend() says how many fit"
        )
        findings.append(Finding(TOO_FEW, None, text))
    if bucket_count < job_buckets:
        text = (
            f"the metrics contain only {bucket_count:,} of {job_buckets:,} buckets: put the metrics of all executors "
            "below one folder"
        )
        findings.append(Finding(INCOMPLETE, None, text))
    return findings


def _describe_cores(workers: int, cores: int | None) -> str:
    return f"{cores:,} cores" if cores is not None else f"{workers:,} worker process{'es' if workers > 1 else ''}"


def format_findings(findings: Sequence[Finding], count_max: int = _FINDINGS_MAX) -> list[str]:
    """Return lines for people: at most `count_max` findings of each kind, and how many more there are."""
    lines = []
    for kind in dict.fromkeys(finding.kind for finding in findings):
        texts = [finding.text for finding in findings if finding.kind == kind]
        lines += [f"{kind}: {text}." for text in texts[:count_max]]
        if len(texts) > count_max:
            lines.append(f"{kind}: {len(texts) - count_max:,} more buckets.")
    return lines
