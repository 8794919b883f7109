"""`open_state` reads only committed state in random histories of failures, restarts and idle buckets."""

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
    """Make changes in all buckets, in a few, or in none."""
    changes = some_changes(random_, at)
    count = random_.choice([len(KEYS), len(KEYS), 2, 0])
    return dict(random_.sample(list(changes.items()), min(count, len(changes))))


@pytest.mark.parametrize("seed", range(examples(3, 200)))
def test_open_state_reads_only_committed_batches(tmp_path: Path, seed: int) -> None:
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
            # The new run changes every bucket, so that files show that it went back.
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
    assert read, "some state was read"
    job.close()


def changes_of_few(random_: random.Random, at: int) -> Changes:
    """Make changes in one bucket or two, so that the others are idle."""
    return {key: Row(at, "few") for key in random_.sample(EVERYWHERE, random_.choice([1, 1, 2]))}


@pytest.mark.parametrize("times", ["kept", "equal"])
@pytest.mark.parametrize("seed", range(examples(4, 400)))
def test_restarts_never_bring_back_discarded_batches(tmp_path: Path, seed: int, times: str) -> None:
    """Each run may start at the end, at an earlier batch, or at a discarded one, while most buckets are idle."""
    random_ = random.Random(seed)
    job = Job(tmp_path / "root", tmp_path, retained=100)
    job.run_id = "run"
    for at in range(5):
        job.batch({key: Row(at) for key in EVERYWHERE})
    read, discarded = 0, None
    for step in range(24):
        event = random_.choices(["batch", "failed", "restart", "back", "return"], [8, 2, 3, 2, 1])[0]
        if event == "failed":
            job.attempt(changes_of_few(random_, 1_000 + step))
            continue
        if event == "return" and discarded is None:
            continue
        at = len(job.models)
        if event != "batch":
            job.run_id = f"run {step}"
        if event == "back":
            at = random_.randrange(max(1, at - 6), at)
            # A copy of the checkpoint, from which the user may start later.
            discarded = ([*job.pointers], [*job.models])
        elif event == "return" and discarded is not None:
            (job.pointers, job.models), discarded = discarded, None
            at = len(job.models)
        job.batch(changes_of_few(random_, step), at=at)
        if times == "equal":
            equalize_file_times(job)
        for unproven in (False, True):
            try:
                state = open_state(job.root, hold=False, unproven=unproven)
            except MissingCheckpointError:
                continue
            with state:
                assert state.batch < len(job.models), (seed, step, event, unproven)
                # Unproven state may come from a failed attempt.
                if state.proven:
                    assert state_of(state) == job.models[state.batch], (seed, step, event)
                    read += 1
    assert read, "some state was read"
    job.close()


def equalize_file_times(job: Job) -> None:
    """Set equal file times, as a copy does; only the newest delta file keeps its time, which shows the last run."""
    deltas = sorted(Path(job.folder.root).rglob("*.delta.arrow"), key=lambda path: path.stat().st_mtime_ns)
    for path in (*deltas[:-1], *Path(job.folder.root).rglob("*.snapshot.arrow")):
        os.utime(path, (1, 1))


def test_files_with_another_query_id_are_not_taken_for_other_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older library version wrote Spark's query id into its files from the second batch on only."""
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
