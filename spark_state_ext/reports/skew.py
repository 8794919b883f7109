"""How evenly a job's load lies on its buckets, from what calls noted: sums by bucket, skew, and what to do about it.

Everything here is a function over tables and numbers; a share of rows is no promise of time, so each has a skew of its
own: the heaviest bucket against the mean.
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
from spark_state_ext.reports.choosing import BUCKET_BYTES_MAX, BUCKET_KEYS_MAX, BUCKETS_PER_CORE, estimate_calls_s

__all__ = ["BATCHES", "HEAVY_RANGE", "HOT_KEY", "Finding", "OperatorLoad", "Skew", "measure_loads", "format_findings"]

# So many of the last batches are summed up.
BATCHES = 20
HOT_KEY, HEAVY_RANGE, MUCH_STATE, SLOW_CALLS = "hot key", "heavy range", "much state", "slow calls"
TOO_MANY, TOO_FEW, INCOMPLETE = "too many buckets", "too few buckets", "incomplete"
# Times the mean from which a bucket counts as heavy. Ranges of hashes have equally many keys but for chance.
_SKEW_MAX = 1.5
# Chance: so many standard deviations of a count, as if each row fell on its own.
_DEVIATIONS = 6
# Of a bucket's rows those of one key: from here on most are, and a split leaves them together.
_HOT_SHARE = 0.5
# Below these sizes a bucket is not told of, however much larger than others it is: a store has some bytes of its own,
# and times of few milliseconds are chance.
_STATE_BYTES_MIN = 16 << 20
_CALL_MS_MIN = 100.0
# Times differ more than rows, also where the load is even.
_SLOW_MAX = 3.0
# Of the time between batches what calls of buckets may take.
_CALLS_SHARE_MAX = 0.25
_CALLS_MIN = 3
_PARTS_MAX = 16
_TOLD_MAX = 5
_HOT = (
    "bucket {bucket} has {times:.1f} times the mean of rows, and {share} of them are of one key in a batch: no split "
    "parts a key's rows. Make them fewer before the operator, as the built-in aggregate does, or take another key: one "
    "column more, and add up the parts behind"
)
_HEAVY = "bucket {bucket} has {times:.1f} times the mean of rows, and no key has more than {share} of them in a batch: "
_LARGE = "bucket {bucket} has {times:.1f} times the mean of state: unless that is the value of one key, "
_SLOW = (
    "bucket {bucket} takes {times:.1f} times the mean time of a call, with no more rows or state than others: look at "
    "what your function does with its keys, and at the executor that has it"
)


@dataclass(frozen=True)
class Skew:
    """The heaviest bucket against the mean, of each of three things; 1 where all are equal, or there is nothing.

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
    """Something about an operator's load that somebody should know.

    Parameters
    ----------
    kind
        What it is, such as `HOT_KEY`.
    bucket
        Of which bucket; None: of all.
    text
        What was found, and what mends it.
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
        Whose.
    batches
        How many batches were summed up.
    job_buckets
        How many buckets the operator has; metrics may tell of fewer.
    workers
        The most worker processes that were seen in a batch.
    interval_s
        Median time from the end of a batch to that of the next, seconds; None where there is but one.
    buckets
        A row for each bucket, ascending: ``bucket``, ``calls``, ``rows``, ``changed_rows``, ``top_key_rows`` (of each
        call the rows of the key that had most), ``state_rows`` and ``state_bytes`` (after its last call), ``call_ms``
        (the median) and ``finding`` (what is found of it, or NULL).
    skew
        The heaviest against the mean.
    findings
        What somebody should know.
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
        """Whether nothing is to be changed."""
        return all(finding.kind == INCOMPLETE for finding in self.findings)


def measure_loads(calls: pa.Table, batches: int = BATCHES, cores: int | None = None) -> list[OperatorLoad]:
    """The load of each operator that metrics tell of."""
    calls = keep_last_calls(calls)
    found = (
        calls.group_by(["query_id", "operator"])
        .aggregate([])
        .sort_by([("query_id", "ascending"), ("operator", "ascending")])
    )
    loads = []
    for query_id, operator in zip(found["query_id"].to_pylist(), found["operator"].to_pylist(), strict=True):
        mine = calls.filter(pc.and_(pc.equal(calls["query_id"], query_id), pc.equal(calls["operator"], operator)))
        numbers = np.unique(mine["batch"].to_numpy())[-batches:]
        mine = mine.filter(pc.greater_equal(mine["batch"], pa.scalar(int(numbers[0]))))
        loads.append(_load(query_id, operator, mine, cores))
    return loads


def _load(query_id: str, operator: str, calls: pa.Table, cores: int | None) -> OperatorLoad:
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
    skew = Skew(*(_skew(by_bucket[name].to_numpy()) for name in ("rows", "state_bytes", "call_ms")))
    job_buckets = int(max(pc.max(calls["job_buckets"]).as_py(), pc.max(calls["bucket"]).as_py() + 1))
    workers = _workers(calls)
    ended_s = calls.group_by(["batch"]).aggregate([("ended_ms", "max")]).sort_by("batch")["ended_ms_max"].to_numpy()
    interval_s = float(np.median(np.diff(ended_s))) / 1000 if len(ended_s) > 1 else None
    of_buckets = _of_buckets(by_bucket, job_buckets)
    findings = (*of_buckets, *_of_number(by_bucket, job_buckets, workers, cores, interval_s))
    kinds = {finding.bucket: finding.kind for finding in reversed(of_buckets)}
    told = pa.array([kinds.get(bucket) for bucket in by_bucket["bucket"].to_pylist()], pa.string())
    by_bucket = by_bucket.append_column("finding", told)
    return OperatorLoad(
        query_id, operator, len(ended_s), job_buckets, workers, interval_s, by_bucket, skew, tuple(findings)
    )


def _workers(calls: pa.Table) -> int:
    processes = calls.group_by(["batch", "host", "pid"]).aggregate([])
    return int(pc.max(processes.group_by(["batch"]).aggregate([("pid", "count")])["pid_count"]).as_py())


def _skew(values: npt.NDArray[np.float64]) -> float:
    mean = float(values.mean())
    return float(values.max()) / mean if mean > 0 else 1.0


# -- findings --------------------------------------------------------------------------------------


def _of_buckets(by_bucket: pa.Table, job_buckets: int) -> list[Finding]:
    """What is found of single buckets, the heaviest first; of each bucket one thing."""
    names = ("bucket", "calls", "rows", "top_key_rows", "state_bytes", "call_ms")
    numbers, calls, rows, top, state, took = (by_bucket[name].to_numpy() for name in names)
    # Of what there is nothing no bucket has more than others.
    mean_rows, mean_state, mean_ms = (float(it.mean()) or 1.0 for it in (rows, state, took))
    heavy = (rows > _SKEW_MAX * mean_rows) & (rows > mean_rows + _DEVIATIONS * math.sqrt(mean_rows))
    most_of_its_own = top > _HOT_SHARE * np.maximum(rows, 1)
    # Where there are but few buckets none can be heavy, and yet one key may have half of all rows.
    hot = most_of_its_own & (heavy | ((top > _HOT_SHARE * rows.sum()) & (rows > top) & (rows > _DEVIATIONS**2)))
    large = (state > _SKEW_MAX * mean_state) & (state > _STATE_BYTES_MIN) & ~heavy & ~hot
    slow = (took > _SLOW_MAX * mean_ms) & (took > _CALL_MS_MIN) & (calls >= _CALLS_MIN) & ~heavy & ~hot & ~large
    found = []
    at_fault = np.flatnonzero(hot | heavy | large | slow)
    for at in at_fault[np.argsort(-rows[at_fault], kind="stable")]:
        bucket, of_rows, of_state = int(numbers[at]), rows[at] / mean_rows, state[at] / mean_state
        share = f"{top[at] / max(1, rows[at]):.0%}"
        if hot[at]:
            found.append(Finding(HOT_KEY, bucket, _HOT.format(bucket=bucket, times=of_rows, share=share)))
        elif heavy[at]:
            text = _HEAVY.format(bucket=bucket, times=of_rows, share=share)
            found.append(Finding(HEAVY_RANGE, bucket, text + _split(job_buckets, bucket, of_rows)))
        elif large[at]:
            text = _LARGE.format(bucket=bucket, times=of_state)
            found.append(Finding(MUCH_STATE, bucket, text + _split(job_buckets, bucket, of_state)))
        else:
            found.append(Finding(SLOW_CALLS, bucket, _SLOW.format(bucket=bucket, times=took[at] / mean_ms)))
    return found


def _split(job_buckets: int, bucket: int, times: float) -> str:
    parts = min(_PARTS_MAX, max(2, math.ceil(times)))
    return (
        f"split it alone at a restart, with bucket_by=BucketMap.split({job_buckets}, {{{bucket}: {parts}}}) and "
        "rescale=<its checkpointLocation>, where buckets are equal ranges now"
    )


def _of_number(
    by_bucket: pa.Table, job_buckets: int, workers: int, cores: int | None, interval_s: float | None
) -> list[Finding]:
    """What is found of the number of buckets."""
    found, seen, side_by_side = [], by_bucket.num_rows, workers if cores is None else cores
    took_s = estimate_calls_s(job_buckets, side_by_side)
    if job_buckets > BUCKETS_PER_CORE * side_by_side and interval_s and took_s > _CALLS_SHARE_MAX * interval_s:
        text = (
            f"{job_buckets:,} buckets are many for {_working(workers, cores)}: their calls alone take about "
            f"{took_s:.3g} s a batch, and from batch to batch it is {interval_s:.3g} s. recommend() says how many suit"
        )
        found.append(Finding(TOO_MANY, None, text))
    if cores is not None and job_buckets < cores:
        text = (
            f"{job_buckets:,} buckets keep no more than {job_buckets:,} of {cores:,} cores at work. recommend() says "
            "how many suit"
        )
        found.append(Finding(TOO_FEW, None, text))
    keys, size = float(pc.mean(by_bucket["state_rows"]).as_py()), float(pc.mean(by_bucket["state_bytes"]).as_py())
    if keys > BUCKET_KEYS_MAX or size > BUCKET_BYTES_MAX:
        text = (
            f"a bucket has {keys:,.0f} keys and {format_with_unit(size, 'bytes')} on average, more than was ever "
            "measured: more buckets restore faster. recommend() says how many fit"
        )
        found.append(Finding(TOO_FEW, None, text))
    if seen < job_buckets:
        text = f"the metrics tell of {seen:,} of {job_buckets:,} buckets: put those of all executors below one folder"
        found.append(Finding(INCOMPLETE, None, text))
    return found


def _working(workers: int, cores: int | None) -> str:
    return f"{cores:,} cores" if cores is not None else f"{workers:,} worker process{'es' if workers > 1 else ''}"


def format_findings(findings: Sequence[Finding], told_max: int = _TOLD_MAX) -> list[str]:
    """What to tell people: so many findings of each kind, and how many more there are."""
    lines = []
    for kind in dict.fromkeys(finding.kind for finding in findings):
        mine = [finding.text for finding in findings if finding.kind == kind]
        lines += [f"{kind}: {text}." for text in mine[:told_max]]
        if len(mine) > told_max:
            lines.append(f"{kind}: {len(mine) - told_max:,} buckets more.")
    return lines
