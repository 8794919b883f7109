"""``spark_state_ext.recommend``: recommend a number of buckets for a job, from the measured cost of buckets.

The constants are rounded medians of committed result files. `tests/core/test_choosing.py` compares them, so that they
cannot become outdated by a new measurement.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from arrow_schemas.bucket_map import BUCKETS_MAX
from spark_state_ext.errors import UsageError
from spark_state_ext.reports.charts import format_with_unit

__all__ = [
    "BATCH_S",
    "BUCKETS_PER_CORE",
    "BUCKET_BATCH_S",
    "BUCKET_BYTES_MAX",
    "BUCKET_KEYS_MAX",
    "BUCKET_OPEN_S",
    "BUCKET_RESTORE_S",
    "RESTORE_BYTES_PER_S",
    "Recommendation",
    "estimate_calls_s",
    "recommend",
]

# From benchmarks/results/buckets.json, with the small state: the time of a batch with one bucket, Spark's own part
# included; and what one more bucket on a core adds to a batch, to a new worker's first batch, and to a first batch
# without local stores.
BATCH_S = 0.31
BUCKET_BATCH_S = 0.0089
BUCKET_OPEN_S = 0.0105
BUCKET_RESTORE_S = 0.0195
# From benchmarks/results/restore.json: one core restores from a root on a local disk. Other stores are limited by
# themselves and the network.
RESTORE_BYTES_PER_S = 1.7e9
# The largest buckets that were measured: keys in benchmarks/results/restore.json, bytes in big_bucket.json.
BUCKET_KEYS_MAX = 10_000_000
BUCKET_BYTES_MAX = 3 << 30
# Enough that all cores finish at about the same time, although buckets differ in size.
BUCKETS_PER_CORE = 4
# The most that buckets may cost: a share of each batch's interval, and so many intervals once after a restart.
_BATCH_SHARE_MAX = 0.1
_OPEN_INTERVALS_MAX = 1.0


@dataclass(frozen=True)
class Recommendation:
    """How many buckets a job should have, and what they will cost.

    Parameters
    ----------
    buckets
        For ``ArrowState(buckets=…)``.
    shuffle_partitions
        For ``spark.sql.shuffle.partitions``, before the query's first start.
    batch_cost_s
        Seconds that a batch takes without any rows: Spark's own part, and the calls of all buckets.
    bucket_bytes
        Bytes of state in a bucket if keys are spread evenly.
    why
        The reasons, one sentence each.

    Examples
    --------
    >>> recommend(1_000_000, 100, 10, 4).shuffle_partitions
    4
    """

    buckets: int
    shuffle_partitions: int
    batch_cost_s: float
    bucket_bytes: int
    why: tuple[str, ...]


def recommend(keys: int, bytes_per_key: float, batch_interval_s: float, cores: int) -> Recommendation:
    """Recommend a number of buckets, from the measured cost of buckets.

    Parameters
    ----------
    keys
        The most keys that the state will ever have.
    bytes_per_key
        Average bytes of a key with its state.
    batch_interval_s
        Seconds from one batch to the next: the trigger's interval, or how long a result may take.
    cores
        The most cores that the job will ever have, over all executors.

    Returns
    -------
    Recommendation
        The number, what it costs, and why.

    Raises
    ------
    UsageError
        When an argument is not a number above 0.

    Examples
    --------
    >>> recommend(1_000_000, 100, 10, 4).buckets
    16
    """
    _check_arguments(keys, bytes_per_key, batch_interval_s, cores)
    state_bytes = keys * bytes_per_key
    state_min = max(math.ceil(keys / BUCKET_KEYS_MAX), math.ceil(state_bytes / BUCKET_BYTES_MAX))
    batch_max = math.floor(_BATCH_SHARE_MAX * batch_interval_s / BUCKET_BATCH_S) * cores
    opening_max = math.floor(_OPEN_INTERVALS_MAX * batch_interval_s / BUCKET_OPEN_S) * cores
    allowed = min(batch_max, opening_max)
    chosen = max(cores, state_min, min(BUCKETS_PER_CORE * cores, allowed))
    # Every partition gets the same number of buckets.
    buckets = -(-chosen // cores) * cores
    if buckets > BUCKETS_MAX:
        raise UsageError(
            f"{cores:,} cores and {keys:,} keys with {format_with_unit(state_bytes, 'bytes')} of state need "
            f"{buckets:,} buckets, but an operator has at most {BUCKETS_MAX:,}"
        )
    why = (
        _explain_number(chosen, state_min, cores, allowed),
        _explain_batch(buckets, batch_interval_s, cores),
        _explain_start(buckets, state_bytes, cores),
        _explain_state(keys, state_bytes, buckets),
        f"spark.sql.shuffle.partitions is {cores}, a task for each core, with {buckets // cores} of the buckets.",
    )
    cost_s = round(BATCH_S + estimate_calls_s(buckets, cores), 3)
    return Recommendation(buckets, cores, cost_s, math.ceil(state_bytes / buckets), why)


def estimate_calls_s(buckets: int, cores: int) -> float:
    """Estimate the seconds that a batch needs to call all buckets, without the time for their rows."""
    return BUCKET_BATCH_S * math.ceil(buckets / cores)


def _check_arguments(keys: int, bytes_per_key: float, batch_interval_s: float, cores: int) -> None:
    for name, count in (("keys", keys), ("cores", cores)):
        if type(count) is not int or count < 1:
            raise UsageError(f"{name} must be a whole number from 1, not {count!r}")
    for name, value in (("bytes_per_key", bytes_per_key), ("batch_interval_s", batch_interval_s)):
        if type(value) not in (int, float) or not math.isfinite(value) or value <= 0:
            raise UsageError(f"{name} must be a number above 0, not {value!r}")


def _explain_number(chosen: int, state_min: int, cores: int, allowed: int) -> str:
    """Return the reason that determined the number of buckets."""
    if chosen == state_min > min(BUCKETS_PER_CORE * cores, max(cores, allowed)):
        text = f"The state needs {state_min:,} buckets; with fewer, they would be larger than any that was measured."
        if state_min > allowed:
            text += f" The interval has time for {allowed:,}: a longer interval or more cores make their cost small."
        return text
    if chosen == BUCKETS_PER_CORE * cores:
        return (
            f"{BUCKETS_PER_CORE} buckets for each of {cores:,} cores: all cores finish at about the same time, "
            "although buckets differ in size."
        )
    limits = f"{_BATCH_SHARE_MAX:.0%} of the interval, or their stores more than one interval to open"
    if allowed < cores:
        return (
            f"One bucket for each of {cores:,} cores, because with fewer some would be idle. Even so the calls take "
            f"more than {limits}: a longer interval helps."
        )
    fewer = f"Fewer than {BUCKETS_PER_CORE} buckets for each of {cores:,} cores"
    return f"{fewer}: the calls of more would take more than {limits}."


def _explain_batch(buckets: int, batch_interval_s: float, cores: int) -> str:
    seconds = estimate_calls_s(buckets, cores)
    text = (
        f"A bucket takes {1000 * BUCKET_BATCH_S:.3g} ms of a core in each batch, even without rows: {seconds:.3g} s a "
        f"batch, in addition to Spark's own {BATCH_S:.3g} s."
    )
    if BATCH_S + seconds > batch_interval_s:
        text += f" That is more than the interval of {batch_interval_s:.3g} s: batches will start later than planned."
    return text


def _explain_state(keys: int, state_bytes: float, buckets: int) -> str:
    size, largest = format_with_unit(state_bytes / buckets, "bytes"), format_with_unit(BUCKET_BYTES_MAX, "bytes")
    return (
        f"A bucket has {size} of state in {math.ceil(keys / buckets):,} keys. Buckets with up to {largest} and up to "
        f"{BUCKET_KEYS_MAX:,} keys were measured."
    )


def _explain_start(buckets: int, state_bytes: float, cores: int) -> str:
    buckets_per_core = math.ceil(buckets / cores)
    restore_s = BUCKET_RESTORE_S * buckets_per_core + state_bytes / (RESTORE_BYTES_PER_S * cores)
    return (
        f"The first batch after a restart takes {BUCKET_OPEN_S * buckets_per_core:.3g} s more to open the local "
        f"stores; if these are lost, {restore_s:.3g} s to restore them from a root on a local disk, and longer over a "
        "network."
    )
