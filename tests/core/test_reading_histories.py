"""Random histories of a query: attempts that fail, buckets that rest, restarts, going back. What `open_state` takes for
committed was committed, and is the state after one batch."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from reading_support import Job, state_of
from test_reading import some_changes

from spark_state_ext import open_state
from spark_state_ext.errors import MissingCheckpointError
from spark_state_ext.testing.model import KEYS, Changes
from tests.helpers.soak import examples

_STEPS = 14


def changes_of(random_: random.Random, at: int) -> Changes:
    """In all buckets, in few, or in none."""
    made = some_changes(random_, at)
    kept = random_.choice([len(KEYS), len(KEYS), 2, 0])
    return dict(random_.sample(list(made.items()), min(kept, len(made))))


@pytest.mark.parametrize("seed", range(examples(6, 200)))
def test_what_is_read_was_committed(tmp_path: Path, seed: int) -> None:
    random_ = random.Random(seed)
    job = Job(tmp_path / "root", tmp_path, retained=random_.choice([2, 100]))
    read = 0
    for step in range(_STEPS):
        at = len(job.models)
        event = random_.choices(["batch", "failed", "restart", "back"], [8, 3, 1, 1])[0]
        if event == "failed":
            job.attempt(changes_of(random_, 1_000 + step))
        elif event == "back" and at > 2:
            job.run_id = f"run {step}"
            # Other code: what comes now changes every bucket, so that files tell of it.
            job.batch(some_changes(random_, 2_000 + step), at=random_.randrange(1, at))
        else:
            job.run_id = f"run {step}" if event == "restart" else job.run_id
            job.batch(changes_of(random_, step))
        try:
            state = open_state(job.root)
        except MissingCheckpointError:
            continue
        with state:
            assert state.batch < len(job.models), (seed, step)
            assert state_of(state) == job.models[state.batch], (seed, step)
            older = random_.randint(-1, state.batch)
            if older >= 0:
                with open_state(job.root, batch=older, hold=False) as earlier:
                    assert state_of(earlier) == job.models[older], (seed, step, older)
            read += 1
    assert read, "something was read"
    job.close()
