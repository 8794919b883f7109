"""Histories for Hypothesis: any bytes are one."""

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

# Long enough for snapshots to be leaned on, and shorter ones for what goes wrong early.
STEPS_MAX = 48
STEP_BYTES = 16
# How often each is drawn: enough batches for files to be cleaned up, and time for whoever copies.
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

# Of steps at erase requests: enough batches for requests to be done, and to be removed.
_ERASURE_KINDS = {**dict.fromkeys(ERASURE_STEPS, 1), "batch": 8, "go": 3, "ask": 2, "zombie": 3, "restart": 5}

# Of steps at rescaling: enough batches for snapshots to arrive, and starts between them.
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
    numbered: Sequence[str] = STEPS,
    steps_numbers: Sequence[int] = (8, 16, 32, STEPS_MAX),
    **fixed: Any,
) -> st.SearchStrategy[History]:
    """Configurations and up to `STEPS_MAX` steps.

    Parameters
    ----------
    kinds
        What the steps are drawn from.
    numbered
        All that there are, in the order of their numbers.
    steps_numbers
        How many there may be.
    fixed
        Fields of the configuration that are the same in all.
    """
    drawn: dict[str, st.SearchStrategy[Any]] = dict.fromkeys(
        ("checkpoint_v2", "last_wins", "ingests", "one_disk", "ends_calmly", "journal", "patient", "changelog"),
        st.booleans(),
    )
    drawn |= dict.fromkeys(("timeouts", "replaces", "same_run"), st.booleans())
    drawn |= {"retained": st.integers(1, 3), "inline_bytes_max": st.sampled_from([0, 8_000, 1 << 20])}
    # Each bucket takes as long as the first, so that most partitions have one.
    drawn |= {"buckets": st.sampled_from([1, 1, 1, 1, 1, 1, 1, 1, 2, 3])}
    drawn |= {"erase_window_ms": st.sampled_from([0, 0, 0, 40, 160])}
    drawn |= {name: st.just(value) for name, value in fixed.items()}
    step = st.tuples(
        st.sampled_from([numbered.index(kind) for kind in kinds]), st.binary(min_size=STEP_BYTES, max_size=STEP_BYTES)
    )
    lengths = st.sampled_from(list(steps_numbers))
    steps = lengths.flatmap(lambda n: st.lists(step.map(lambda s: bytes([s[0], *s[1]])), min_size=n, max_size=n))
    return st.builds(History, st.builds(Config, **drawn), steps.map(tuple))


def savepoint_histories(**fixed: Any) -> st.SearchStrategy[History]:
    """As `histories`, of a query of which savepoints are taken, and of those that start from them."""
    kinds = [kind for kind, times in _SAVEPOINT_KINDS.items() for _ in range(times)]
    return histories(kinds, SAVEPOINT_STEPS, (16, 32, STEPS_MAX), **fixed)


def erasure_histories(**fixed: Any) -> st.SearchStrategy[History]:
    """Of a query that is asked to erase keys."""
    drawn: dict[str, st.SearchStrategy[Any]] = dict.fromkeys(
        ("checkpoint_v2", "last_wins", "changelog", "timeouts", "switches"), st.booleans()
    )
    drawn |= {"retained": st.integers(1, 3), "partitions": st.integers(1, 3), "buckets": st.integers(1, 4)}
    drawn |= {"ingests": st.just(False)} | {name: st.just(value) for name, value in fixed.items()}
    kinds = [kind for kind, times in _ERASURE_KINDS.items() for _ in range(times)]
    step = st.tuples(
        st.sampled_from([ERASURE_STEPS.index(kind) for kind in kinds]),
        st.binary(min_size=STEP_BYTES, max_size=STEP_BYTES),
    )
    steps = st.sampled_from([8, 16, 32]).flatmap(
        lambda n: st.lists(step.map(lambda s: bytes([s[0], *s[1]])), min_size=n, max_size=n)
    )
    return st.builds(History, st.builds(ErasureConfig, **drawn), steps.map(tuple))


def rescale_histories(**fixed: Any) -> st.SearchStrategy[History]:
    """Of a query that is started now and then with another number of buckets."""
    drawn: dict[str, st.SearchStrategy[Any]] = dict.fromkeys(
        ("checkpoint_v2", "last_wins", "ingests", "one_disk", "journal", "patient", "changelog", "timeouts"),
        st.booleans(),
    )
    drawn |= dict.fromkeys(("replaces", "same_run", "two"), st.booleans())
    drawn |= {"retained": st.integers(1, 3), "inline_bytes_max": st.sampled_from([0, 8_000, 1 << 20])}
    drawn |= {"ends_calmly": st.sampled_from([False, False, True])}
    drawn |= {"buckets": st.sampled_from(COUNTS), "partitions": st.integers(1, 2)}
    drawn |= {name: st.just(value) for name, value in fixed.items()}
    kinds = [kind for kind, times in _RESCALE_KINDS.items() for _ in range(times)]
    step = st.tuples(
        st.sampled_from([RESCALE_STEPS.index(kind) for kind in kinds]),
        st.binary(min_size=STEP_BYTES, max_size=STEP_BYTES),
    )
    steps = st.sampled_from([8, 16, 32]).flatmap(
        lambda n: st.lists(step.map(lambda s: bytes([s[0], *s[1]])), min_size=n, max_size=n)
    )
    return st.builds(History, st.builds(RescaleConfig, **drawn), steps.map(tuple))


def claim_histories() -> st.SearchStrategy[tuple[Step, ...]]:
    """As `lease_histories`, with queries that claim the folder."""
    return _lease_histories(len(CLAIM_STEPS))


def lease_histories() -> st.SearchStrategy[tuple[Step, ...]]:
    """Steps of drivers, processes and a store around one lease."""
    return _lease_histories(len(LEASE_STEPS))


def timeline_histories(kinds: Sequence[str] = TIMELINE_STEPS) -> st.SearchStrategy[tuple[Step, ...]]:
    """Steps of the runs of one query, of some kinds."""
    numbers = [TIMELINE_STEPS.index(kind) for kind in kinds]
    step = st.tuples(st.sampled_from(numbers), st.binary(min_size=8, max_size=8))
    return st.lists(step.map(lambda s: bytes([s[0], *s[1]])), min_size=8, max_size=40).map(tuple)


def standby_histories() -> st.SearchStrategy[tuple[Step, ...]]:
    """What a world begins with, and steps of its hosts, buckets and records."""
    step = st.tuples(st.integers(0, len(STANDBY_STEPS) - 1), st.binary(min_size=3, max_size=3))
    steps = st.lists(step.map(lambda s: bytes([s[0], *s[1]])), min_size=12, max_size=40)
    return st.tuples(st.binary(min_size=3, max_size=3), steps).map(lambda it: (it[0], *it[1]))


def _lease_histories(kinds: int) -> st.SearchStrategy[tuple[Step, ...]]:
    step = st.tuples(st.integers(0, kinds - 1), st.binary(min_size=3, max_size=3))
    steps = st.lists(step.map(lambda s: bytes([s[0], *s[1]])), min_size=16, max_size=60)
    return steps.map(tuple)
