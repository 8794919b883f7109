"""The simulator finds nothing in what is built, and everything in what is deliberately broken."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from sim_broken import BROKEN
from sim_broken_uploads import BROKEN_UPLOADS
from sim_histories import histories
from sim_parts import Config, History, Variant, WrongStateError
from sim_scenes import SCENES, Scene, play_scene
from sim_search import search_histories
from sim_world import simulate

from tests.helpers.soak import SOAK, examples

# `python tests/simulation/run.py --histories 20000` is the long run, in `make soak` too.
HISTORIES = examples(45, 1_000)
RUN = Path(__file__).parent / "run.py"
# Every one of the broken variants that no scene finds is found within ten, with this seed.
BROKEN_MAX = 1_000
SEED = 3
# What finds each of them first. Where it no longer does, all the rest is tried: that is slower, and says the same.
NO_SCENE = ("no parent check", "leaked pins")
FOUND_BY = {
    "identity from the batch": "back_to_the_oldest_batch",
    "delta applied on a sibling": "back_to_the_oldest_batch",
    "clean-up by version only": "quiet_for_a_while",
    "clean-up without retention": "quiet_for_a_while",
    "clean-up after the batches retained": "quiet_for_a_while",
    "clean-up blind to parallel lineages": "no_version_twice",
    "clean-up looking aside where versions repeat": "no_version_twice",
    "clean-up leaning on what it did not verify": "damaged_before_anything_leans_on_them",
    "clean-up by calls": "called_by_timeouts_only",
    "every call counted as a heartbeat": "called_by_timeouts_only",
    "no renewal": "renewed_just_now",
    "inline copies dropped at once": "uploads_that_lag",
    "uploads noted before they are done": "uploads_that_lag",
    "never late": "uploads_that_lag",
    "deferred uploads left alone": "dead_when_the_task_is_over",
    "uploads before forgotten": "one_upload_hangs",
    "a gap passed by": "one_upload_hangs",
    "caught up at once": "joined_by_a_torn_snapshot",
    "caught up by its size": "joined_by_a_torn_snapshot",
    "neighbours on different attempts": "neighbours_without_data",
    "a removed root unnoticed": "root_removed_between_batches",
    "a look at what the pointer says only": "root_removed_between_batches",
    "a look at the newest file only": "root_removed_between_batches",
    "erased at once": "erased_when_a_quiet_lineage_ends",
    "erased with the window": "erased_when_a_quiet_lineage_ends",
    "erased and not renewed": "erased_when_a_quiet_lineage_ends",
    "a confirmed delta removed to be sent again": "sent_again",
    "confirmed by its size": "torn_on_its_way",
    "failures of dead runs told": "failed_and_started_again",
    "a failure told once": "failed_and_started_again",
    "losses forgotten at once": "lost_and_not_answered",
    "losses forgotten when answered": "lost_and_not_answered",
}
# Each of them is in many histories; how many that are, chance decides.
DRAWN = (
    "histories_with_neighbours",
    "histories_with_timeouts",
    "histories_with_one_identity",
    "histories_without_replacing_rename",
    "histories_that_erase_in_time",
    "lease_histories_with_two_live_drivers",
    "lease_histories_with_one_identity",
    "folder_claims",
    "savepoints_finished",
    "erasure_requests_done",
)
WRONG = (
    "was written as|is lost|cannot read|are left|is in the buckets|fails again and again|fails the next one|hides what"
)


@pytest.mark.slow
@pytest.mark.timeout(86_400 if SOAK else 900)
def test_no_history_gives_a_wrong_state() -> None:
    """Others every time; the seed in the output finds a failure again."""
    seed_of_today = int.from_bytes(os.urandom(3), "big")
    done = subprocess.run(
        [
            *(sys.executable, str(RUN), "--histories", str(HISTORIES), "--savepoints", str(HISTORIES // 4)),
            *("--seed", str(seed_of_today), "--processes", "2"),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    # The histories are of the kind that matters.
    assert seen["histories"] >= HISTORIES
    assert seen["commits"] > 20 * HISTORIES
    assert seen["histories_with_clean_up"] > HISTORIES / 3
    for name in DRAWN:
        assert seen[name] > 0, name


@pytest.mark.parametrize("script", SCENES, ids=lambda script: script.__name__)
def test_no_scene_gives_a_wrong_state(script: Callable[[Scene], None]) -> None:
    play_scene(script, Variant())


def test_a_background_has_room_for_every_bucket() -> None:
    """A backend that joins three buckets late is cleaned up with the other one, all in one batch."""
    config = Config(False, False, 1, False, ends_calmly=True, inline_bytes_max=0, buckets=3, timeouts=True)
    simulate(History(config, (*[bytes(17)] * 7, b"\x0f\0\0\0\0\x01" + bytes(11))))


ALL_BROKEN = BROKEN | BROKEN_UPLOADS


@pytest.mark.parametrize("name", ALL_BROKEN)
def test_broken_variants_are_found(name: str) -> None:
    variant = ALL_BROKEN[name]

    def check() -> None:
        search_histories(histories(), lambda history: simulate(history, variant), BROKEN_MAX, SEED)

    def scenes() -> None:
        for script in sorted(SCENES, key=lambda script: script.__name__ != FOUND_BY.get(name)):
            play_scene(script, variant)

    with pytest.raises(WrongStateError, match=WRONG):
        for search in (check, scenes) if name in NO_SCENE else (scenes, check):
            search()


def test_a_history_is_a_value_that_gives_the_same_again() -> None:
    history = History(
        Config(False, True, 2, True), tuple(bytes([at % 12, at, 3 * at % 256, 7, at]) for at in range(60))
    )
    worlds = [simulate(history) for _ in range(2)]
    assert worlds[0].commits == worlds[1].commits > 10
    assert worlds[0].batch == worlds[1].batch
