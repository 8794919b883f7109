"""``spark_state_ext.recommend``: a number of buckets for a job, from what buckets were measured to cost.

The constants are medians of committed result files, rounded; `tests/core/test_choosing.py` compares them, so that a new
measurement cannot leave them behind.
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

# From benchmarks/results/buckets.json, the small state: a batch with one bucket, Spark's own part included; and what
# one more bucket adds on one core to a batch, to the first batch of a new worker, and to one without local stores.
BATCH_S = 0.31
BUCKET_BATCH_S = 0.0089
BUCKET_OPEN_S = 0.0105
BUCKET_RESTORE_S = 0.0195
# From benchmarks/results/restore.json: a core that restores from a root on a local disk. Another store gives what it
# and the network give.
RESTORE_BYTES_PER_S = 1.7e9
# The largest buckets that were measured: keys in benchmarks/results/restore.json, bytes in big_bucket.json.
BUCKET_KEYS_MAX = 10_000_000
BUCKET_BYTES_MAX = 3 << 30
# So many that cores are done at about the same time, though no two buckets are equal.
BUCKETS_PER_CORE = 4
# What buckets may cost: a part of each batch's interval, and so many intervals once after a restart.
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
        Seconds that a batch takes before a row is worked on: Spark's own part, and the calls of all buckets.
    bucket_bytes
        Bytes of state in a bucket, where keys are spread evenly.
    why
        The reasons, a sentence each.

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
    """Recommend a number of buckets, by what buckets were measured to cost.

    Parameters
    ----------
    keys
        How many keys the state will have, at most.
    bytes_per_key
        Bytes of a key and its state, on average.
    batch_interval_s
        Seconds from one batch to the next, as the trigger has it, or as long as a result may take.
    cores
        The most cores that the job will ever have, all executors together.

    Returns
    -------
    Recommendation
        The number, what it costs, and why.

    Raises
    ------
    UsageError
        When a number is none, or not above 0.

    Examples
    --------
    >>> recommend(1_000_000, 100, 10, 4).buckets
    16
    """
    _refuse(keys, bytes_per_key, batch_interval_s, cores)
    state_bytes = keys * bytes_per_key
    for_state = max(math.ceil(keys / BUCKET_KEYS_MAX), math.ceil(state_bytes / BUCKET_BYTES_MAX))
    in_batch = math.floor(_BATCH_SHARE_MAX * batch_interval_s / BUCKET_BATCH_S) * cores
    in_opening = math.floor(_OPEN_INTERVALS_MAX * batch_interval_s / BUCKET_OPEN_S) * cores
    allowed = min(in_batch, in_opening)
    chosen = max(cores, for_state, min(BUCKETS_PER_CORE * cores, allowed))
    # As many buckets on each partition as on any other.
    buckets = -(-chosen // cores) * cores
    if buckets > BUCKETS_MAX:
        raise UsageError(
            f"{cores:,} cores and {keys:,} keys with {format_with_unit(state_bytes, 'bytes')} of state need "
            f"{buckets:,} buckets, but an operator has at most {BUCKETS_MAX:,}"
        )
    why = (
        _of_number(chosen, for_state, cores, allowed),
        _of_batch(buckets, batch_interval_s, cores),
        _of_start(buckets, state_bytes, cores),
        _of_state(keys, state_bytes, buckets),
        f"spark.sql.shuffle.partitions is {cores}, a task for each core, with {buckets // cores} of the buckets.",
    )
    cost_s = round(BATCH_S + estimate_calls_s(buckets, cores), 3)
    return Recommendation(buckets, cores, cost_s, math.ceil(state_bytes / buckets), why)


def estimate_calls_s(buckets: int, cores: int) -> float:
    """Seconds that a batch takes for the calls of buckets, whatever rows they have."""
    return BUCKET_BATCH_S * math.ceil(buckets / cores)


def _refuse(keys: int, bytes_per_key: float, batch_interval_s: float, cores: int) -> None:
    for name, count in (("keys", keys), ("cores", cores)):
        if type(count) is not int or count < 1:
            raise UsageError(f"{name} must be a whole number from 1, not {count!r}")
    for name, value in (("bytes_per_key", bytes_per_key), ("batch_interval_s", batch_interval_s)):
        if type(value) not in (int, float) or not math.isfinite(value) or value <= 0:
            raise UsageError(f"{name} must be a number above 0, not {value!r}")


def _of_number(chosen: int, for_state: int, cores: int, allowed: int) -> str:
    """Which of the reasons decided."""
    if chosen == for_state > min(BUCKETS_PER_CORE * cores, max(cores, allowed)):
        text = f"The state needs {for_state:,} buckets, or they would be larger than any that was measured."
        if for_state > allowed:
            text += (
                f" The interval has room for {allowed:,}: batches further apart or more cores make their cost small."
            )
        return text
    if chosen == BUCKETS_PER_CORE * cores:
        return (
            f"{BUCKETS_PER_CORE} buckets for each of {cores:,} cores: cores are done at about the same time, though no "
            "two buckets are equal."
        )
    limits = f"{_BATCH_SHARE_MAX:.0%} of the interval, or their stores more than one interval to open"
    if allowed < cores:
        return (
            f"One bucket for each of {cores:,} cores, or some would be idle. Even so the calls take more than "
            f"{limits}: batches further apart help."
        )
    fewer = f"Fewer than {BUCKETS_PER_CORE} buckets for each of {cores:,} cores"
    return f"{fewer}: the calls of more would take more than {limits}."


def _of_batch(buckets: int, batch_interval_s: float, cores: int) -> str:
    took_s = estimate_calls_s(buckets, cores)
    text = (
        f"A bucket takes {1000 * BUCKET_BATCH_S:.3g} ms of a core in each batch, whatever its rows: {took_s:.3g} s a "
        f"batch, beside {BATCH_S:.3g} s of Spark's own."
    )
    if BATCH_S + took_s > batch_interval_s:
        text += f" That is more than the interval of {batch_interval_s:.3g} s: batches will begin later than asked for."
    return text


def _of_state(keys: int, state_bytes: float, buckets: int) -> str:
    size, largest = format_with_unit(state_bytes / buckets, "bytes"), format_with_unit(BUCKET_BYTES_MAX, "bytes")
    return (
        f"A bucket has {size} of state in {math.ceil(keys / buckets):,} keys. Up to {largest}, and up to "
        f"{BUCKET_KEYS_MAX:,} keys, were measured."
    )


def _of_start(buckets: int, state_bytes: float, cores: int) -> str:
    each = math.ceil(buckets / cores)
    lost_s = BUCKET_RESTORE_S * each + state_bytes / (RESTORE_BYTES_PER_S * cores)
    return (
        f"The first batch after a restart takes {BUCKET_OPEN_S * each:.3g} s more, to open the local stores; where "
        f"these are lost, {lost_s:.3g} s from a root on a local disk, and longer over a network."
    )
