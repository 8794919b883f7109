"""Random histories of a query: attempts that fail, buckets that rest, restarts, going back, restarts after that. What
`open_state` takes for committed was committed, and is the state after one batch."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
import reading_support
from reading_support import Job, state_of
from test_reading import EVERYWHERE, some_changes

from arrow_schemas import Writer
from spark_state_ext import open_state
from spark_state_ext.errors import MissingCheckpointError
from spark_state_ext.testing.model import KEYS, Changes, Row
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


def changes_of_few(random_: random.Random, at: int) -> Changes:
    """In one bucket or two, so that the others rest."""
    return {key: Row(at, "few") for key in random_.sample(EVERYWHERE, random_.choice([1, 1, 2]))}


@pytest.mark.parametrize("times", ["kept", "of no use"])
@pytest.mark.parametrize("seed", range(examples(8, 400)))
def test_restarts_after_going_back_bring_back_nothing(tmp_path: Path, seed: int, times: str) -> None:
    """Several runs, each of which may go back, go on, or go on from before another went back; most buckets rest."""
    random_ = random.Random(seed)
    job = Job(tmp_path / "root", tmp_path, retained=100)
    job.run_id = "run"
    for at in range(5):
        job.batch({key: Row(at) for key in EVERYWHERE})
    read, left = 0, None
    for step in range(24):
        event = random_.choices(["batch", "failed", "restart", "back", "return"], [8, 2, 3, 2, 1])[0]
        if event == "failed":
            job.attempt(changes_of_few(random_, 1_000 + step))
            continue
        if event == "return" and left is None:
            continue
        at = len(job.models)
        if event != "batch":
            job.run_id = f"run {step}"
        if event == "back":
            at = random_.randrange(max(1, at - 6), at)
            # A copy of the checkpoint, which the user may start from later.
            left = ([*job.pointers], [*job.models])
        elif event == "return" and left is not None:
            (job.pointers, job.models), left = left, None
            at = len(job.models)
        job.batch(changes_of_few(random_, step), at=at)
        if times == "of no use":
            _all_but_the_last_at_once(job)
        for unproven in (False, True):
            try:
                state = open_state(job.root, hold=False, unproven=unproven)
            except MissingCheckpointError:
                continue
            with state:
                assert state.batch < len(job.models), (seed, step, event, unproven)
                # What is not proven may be of an attempt that failed.
                if state.proven:
                    assert state_of(state) == job.models[state.batch], (seed, step, event)
                    read += 1
    assert read, "something was read"
    job.close()


def _all_but_the_last_at_once(job: Job) -> None:
    """As a copy leaves them: which run wrote last is told, and no more."""
    deltas = sorted(Path(job.folder.root).rglob("*.delta.arrow"), key=lambda path: path.stat().st_mtime_ns)
    for path in (*deltas[:-1], *Path(job.folder.root).rglob("*.snapshot.arrow")):
        os.utime(path, (1, 1))


def test_what_an_earlier_release_called_the_query_otherwise_is_not_taken_for_another_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first batch was not told its query, and later ones were: they wrote Spark's id into their files."""
    job = Job(tmp_path / "root", tmp_path, retained=100, run_id="before", query_id="t1-" + "0" * 32)
    with monkeypatch.context() as earlier:
        earlier.setattr(reading_support, "Writer", lambda _, *more, **named: Writer("its id", *more, **named))
        earlier.setattr(Job, "_epoch", lambda *_: 0)
        for at in range(6):
            job.batch({key: Row(at, "before") for key in KEYS})
    job.run_id = "after"
    for at in range(6, 9):
        job.batch({key: Row(at, "after") for key in KEYS})
    for batch in (None, 6, 7):
        with open_state(job.root, batch=batch) as state:
            assert state_of(state) == job.models[7 if batch is None else batch]
    for batch in (1, 3, 5):
        with pytest.raises(MissingCheckpointError), open_state(job.root, batch=batch) as state:
            state_of(state)
    job.close()
