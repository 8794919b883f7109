"""Strategies for histories: any bytes are a history."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st
from sim_claims import CLAIM_STEPS
from sim_erasure_parts import ErasureConfig
from sim_erasures import ERASURE_STEPS
from sim_lease import LEASE_STEPS
from sim_parts import Config, History, Step
from sim_rescale_parts import COUNTS, RescaleConfig
from sim_rescales import RESCALE_STEPS
from sim_savepoints import SAVEPOINT_STEPS
from sim_standby import STANDBY_STEPS
from sim_timeline import TIMELINE_STEPS
from sim_world import STEPS

# Long histories let clean-up depend on snapshots; shorter ones find what fails early.
STEPS_MAX = 48
STEP_BYTES = 16
# Weights of steps with savepoints: enough batches for files to be cleaned up, and enough time for processes that copy.
_SAVEPOINT_KINDS = {
    **dict.fromkeys(STEPS, 1),
    "batch": 4,
    "twice": 3,
    "work": 5,
    "raid": 0,
    "switch": 1,
    "take": 5,
    "aside": 7,
    "wait": 2,
    "day": 1,
    "start": 3,
    "started": 9,
    "delete": 1,
    "release": 1,
}

# Weights of steps with erase requests: enough batches for requests to be done and removed.
_ERASURE_KINDS = {**dict.fromkeys(ERASURE_STEPS, 1), "batch": 8, "go": 3, "ask": 2, "zombie": 3, "restart": 5}

# Weights of steps with rescaling: enough batches for snapshots to arrive, and starts between them.
_RESCALE_KINDS = {
    **dict.fromkeys(RESCALE_STEPS, 1),
    "batch": 7,
    "twice": 2,
    "work": 4,
    "zombie": 2,
    "gap": 2,
    "restart": 2,
    "rescale": 6,
    "killed": 3,
    "ask": 2,
    "read": 3,
}


def histories(
    kinds: Sequence[str] = STEPS,
    all_kinds: Sequence[str] = STEPS,
    steps_numbers: Sequence[int] = (8, 16, 32, STEPS_MAX),
    **fixed: Any,
) -> st.SearchStrategy[History]:
    """Histories of one query: configurations and up to `STEPS_MAX` steps.

    Parameters
    ----------
    kinds
        Kinds that steps are drawn from.
    all_kinds
        All kinds in the order of their numbers.
    steps_numbers
        Possible numbers of steps.
    fixed
        Fields of the configuration that are the same in all histories.
    """
    fields: dict[str, st.SearchStrategy[Any]] = dict.fromkeys(
        ("checkpoint_v2", "last_wins", "ingests", "one_disk", "ends_calmly", "journal", "patient", "changelog"),
        st.booleans(),
    )
    fields |= dict.fromkeys(("timeouts", "replaces", "same_run"), st.booleans())
    fields |= {"retained": st.integers(1, 3), "inline_bytes_max": st.sampled_from([0, 8_000, 1 << 20])}
    # Each bucket takes as long as the first, so most partitions have one bucket.
    fields |= {"buckets": st.sampled_from([1, 1, 1, 1, 1, 1, 1, 1, 2, 3])}
    fields |= {"erase_window_ms": st.sampled_from([0, 0, 0, 40, 160])}
    fields |= {name: st.just(value) for name, value in fixed.items()}
    step = st.tuples(
        st.sampled_from([all_kinds.index(kind) for kind in kinds]), st.binary(min_size=STEP_BYTES, max_size=STEP_BYTES)
    )
    lengths = st.sampled_from(list(steps_numbers))
    steps = lengths.flatmap(lambda n: st.lists(step.map(lambda s: bytes([s[0], *s[1]])), min_size=n, max_size=n))
    return st.builds(History, st.builds(Config, **fields), steps.map(tuple))


def savepoint_histories(**fixed: Any) -> st.SearchStrategy[History]:
    """Histories of a query with savepoints, and of queries that start from them."""
    kinds = [kind for kind, weight in _SAVEPOINT_KINDS.items() for _ in range(weight)]
    return histories(kinds, SAVEPOINT_STEPS, (16, 32, STEPS_MAX), **fixed)


def erasure_histories(**fixed: Any) -> st.SearchStrategy[History]:
    """Histories of a query with erase requests."""
    fields: dict[str, st.SearchStrategy[Any]] = dict.fromkeys(
        ("checkpoint_v2", "last_wins", "changelog", "timeouts", "switches"), st.booleans()
    )
    fields |= {"retained": st.integers(1, 3), "partitions": st.integers(1, 3), "buckets": st.integers(1, 4)}
    fields |= {"ingests": st.just(False)} | {name: st.just(value) for name, value in fixed.items()}
    kinds = [kind for kind, weight in _ERASURE_KINDS.items() for _ in range(weight)]
    step = st.tuples(
        st.sampled_from([ERASURE_STEPS.index(kind) for kind in kinds]),
        st.binary(min_size=STEP_BYTES, max_size=STEP_BYTES),
    )
    steps = st.sampled_from([8, 16, 32]).flatmap(
        lambda n: st.lists(step.map(lambda s: bytes([s[0], *s[1]])), min_size=n, max_size=n)
    )
    return st.builds(History, st.builds(ErasureConfig, **fields), steps.map(tuple))


def rescale_histories(**fixed: Any) -> st.SearchStrategy[History]:
    """Histories of a query that is sometimes started with another number of buckets."""
    fields: dict[str, st.SearchStrategy[Any]] = dict.fromkeys(
        ("checkpoint_v2", "last_wins", "ingests", "one_disk", "journal", "patient", "changelog", "timeouts"),
        st.booleans(),
    )
    fields |= dict.fromkeys(("replaces", "same_run", "two"), st.booleans())
    fields |= {"retained": st.integers(1, 3), "inline_bytes_max": st.sampled_from([0, 8_000, 1 << 20])}
    fields |= {"ends_calmly": st.sampled_from([False, False, True])}
    fields |= {"buckets": st.sampled_from(COUNTS), "partitions": st.integers(1, 2)}
    fields |= {name: st.just(value) for name, value in fixed.items()}
    kinds = [kind for kind, weight in _RESCALE_KINDS.items() for _ in range(weight)]
    step = st.tuples(
        st.sampled_from([RESCALE_STEPS.index(kind) for kind in kinds]),
        st.binary(min_size=STEP_BYTES, max_size=STEP_BYTES),
    )
    steps = st.sampled_from([8, 16, 32]).flatmap(
        lambda n: st.lists(step.map(lambda s: bytes([s[0], *s[1]])), min_size=n, max_size=n)
    )
    return st.builds(History, st.builds(RescaleConfig, **fields), steps.map(tuple))


def claim_histories() -> st.SearchStrategy[tuple[Step, ...]]:
    """Histories of queries that claim one query folder."""
    return _lease_histories(len(CLAIM_STEPS))


def lease_histories() -> st.SearchStrategy[tuple[Step, ...]]:
    """Histories of drivers, processes and a store around one lease."""
    return _lease_histories(len(LEASE_STEPS))


def timeline_histories(kinds: Sequence[str] = TIMELINE_STEPS) -> st.SearchStrategy[tuple[Step, ...]]:
    """Histories of the runs of one query, with steps of the given kinds."""
    numbers = [TIMELINE_STEPS.index(kind) for kind in kinds]
    step = st.tuples(st.sampled_from(numbers), st.binary(min_size=8, max_size=8))
    return st.lists(step.map(lambda s: bytes([s[0], *s[1]])), min_size=8, max_size=40).map(tuple)


def standby_histories() -> st.SearchStrategy[tuple[Step, ...]]:
    """Histories of hosts, buckets and records; the first element is what the world begins with."""
    step = st.tuples(st.integers(0, len(STANDBY_STEPS) - 1), st.binary(min_size=3, max_size=3))
    steps = st.lists(step.map(lambda s: bytes([s[0], *s[1]])), min_size=12, max_size=40)
    return st.tuples(st.binary(min_size=3, max_size=3), steps).map(lambda parts: (parts[0], *parts[1]))


def _lease_histories(kinds: int) -> st.SearchStrategy[tuple[Step, ...]]:
    step = st.tuples(st.integers(0, kinds - 1), st.binary(min_size=3, max_size=3))
    steps = st.lists(step.map(lambda s: bytes([s[0], *s[1]])), min_size=16, max_size=60)
    return steps.map(tuple)
