"""The simulator finds no errors in the product, and finds every broken variant."""

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

# For many more histories use `python tests/simulation/run.py --histories 20000`; `make soak` does that too.
HISTORIES = examples(12, 1_000)
RUN = Path(__file__).parent / "run.py"
# With this seed, every variant that no scene finds is found within ten histories.
BROKEN_MAX = 1_000
SEED = 3
# The scene that finds each variant first. If it no longer does, all others are tried: slower, with the same result.
NO_SCENE = ("parents are not checked", "pins are never released")
FOUND_BY = {
    "a checkpoint's id follows from its batch": "back_to_the_oldest_batch",
    "a delta is applied on a sibling": "back_to_the_oldest_batch",
    "clean-up goes by version only": "quiet_for_a_while",
    "clean-up ignores retained batches": "quiet_for_a_while",
    "clean-up keeps only what retained batches wrote": "quiet_for_a_while",
    "clean-up ignores parallel lineages": "versions_are_unique",
    "clean-up sees parallel lineages only if versions repeat": "versions_are_unique",
    "clean-up depends on unverified snapshots": "damaged_before_clean_up_depends_on_them",
    "clean-up counts calls instead of heartbeats": "called_by_timeouts_only",
    "every call counts as a heartbeat": "called_by_timeouts_only",
    "quiet buckets are not renewed": "renewed_just_now",
    "inline deltas are dropped at once": "uploads_that_lag",
    "uploads are recorded as done when they begin": "uploads_that_lag",
    "uploads may lag without limit": "uploads_that_lag",
    "deferred uploads are not awaited": "process_dies_when_the_task_has_ended",
    "earlier uploads are not awaited": "one_upload_hangs",
    "a gap before a confirmed delta is ignored": "one_upload_hangs",
    "a joining backend is complete at once": "bootstrapped_by_a_torn_snapshot",
    "a bootstrap snapshot is confirmed by its size": "bootstrapped_by_a_torn_snapshot",
    "neighbours come from different attempts": "neighbours_without_data",
    "a removed root is not noticed": "root_removed_between_batches",
    "the probe goes by the pointer alone": "root_removed_between_batches",
    "the probe looks for the newest file only": "root_removed_between_batches",
    "files before the newest pointer are erased": "erased_when_a_quiet_lineage_ends",
    "files before the window are erased": "erased_when_a_quiet_lineage_ends",
    "checkpoints are not renewed by time": "erased_when_a_quiet_lineage_ends",
    "a confirmed delta is removed to be sent again": "sent_again",
    "an upload is confirmed by its size": "torn_on_its_way",
    "failures of ended runs are reported": "failed_and_started_again",
    "a failure is reported only once": "failed_and_started_again",
    "a loss is forgotten when its repair begins": "loss_noted_but_not_repaired",
    "a loss is forgotten when an attempt repairs it": "loss_noted_but_not_repaired",
}
# Events that random histories must contain; how often is up to chance.
EVENTS = (
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
MESSAGES = "|".join(
    (
        "was written as",
        "is lost",
        "noted as lost",
        "cannot read",
        "are left",
        "is in the buckets",
        "fails again and again",
        "fails the next one",
        "succeeds although",
    )
)


@pytest.mark.slow
@pytest.mark.timeout(86_400 if SOAK else 900)
def test_no_random_history_gives_a_wrong_state() -> None:
    """Each test run has another seed; the seed in the output finds a failure again."""
    random_seed = int.from_bytes(os.urandom(3), "big")
    process = subprocess.run(
        [
            *(sys.executable, str(RUN), "--histories", str(HISTORIES), "--savepoints", str(HISTORIES // 3)),
            *("--seed", str(random_seed), "--processes", "2" if SOAK else "1"),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    counts = json.loads(process.stdout.splitlines()[-1])
    assert counts["histories"] >= HISTORIES
    assert counts["commits"] > 20 * HISTORIES
    if SOAK:
        # The histories contain the events that matter.
        assert counts["histories_with_clean_up"] > HISTORIES / 3
        for name in EVENTS:
            assert counts[name] > 0, name


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_no_scene_gives_a_wrong_state(scene: Callable[[Scene], None]) -> None:
    play_scene(scene, Variant())


def test_the_background_has_room_for_clean_ups_of_all_buckets() -> None:
    """A backend that joins three buckets late is cleaned up together with the other one, all in one batch."""
    config = Config(False, False, 1, False, ends_calmly=True, inline_bytes_max=0, buckets=3, timeouts=True)
    simulate(History(config, (*[bytes(17)] * 7, b"\x0f\0\0\0\0\x01" + bytes(11))))


def test_a_late_attempt_need_not_know_a_loss_whose_note_a_later_call_removed() -> None:
    """Found by a random history: the note was too old for the later call, and recent for the late attempt's pointer."""
    drawn = """
        00 00 00 00 0000000000000100 0000000000000100 04 0f0000000001 04000102 00 0000000000000100 0000000000000100
        0000000000000100 0000000000000100 10 000101000014000000010001 04 000100000000000000000001 0001000044 0000000001 00 00
        0001 0001 0400010101000000000000000000000001 00 00 0a05
    """
    config = Config(False, False, 1, False, inline_bytes_max=0, patient=False, timeouts=True)
    simulate(History(config, tuple(bytes.fromhex(step).ljust(17, b"\0") for step in drawn.split())))


ALL_BROKEN = BROKEN | BROKEN_UPLOADS


@pytest.mark.parametrize("name", ALL_BROKEN)
def test_the_simulator_finds_every_broken_variant(name: str) -> None:
    variant = ALL_BROKEN[name]

    def check_histories() -> None:
        search_histories(histories(), lambda history: simulate(history, variant), BROKEN_MAX, SEED)

    def check_scenes() -> None:
        for scene in sorted(SCENES, key=lambda scene: scene.__name__ != FOUND_BY.get(name)):
            play_scene(scene, variant)

    with pytest.raises(WrongStateError, match=MESSAGES):
        for search in (check_histories, check_scenes) if name in NO_SCENE else (check_scenes, check_histories):
            search()


def test_running_a_history_twice_gives_the_same_result() -> None:
    history = History(
        Config(False, True, 2, True), tuple(bytes([at % 12, at, 3 * at % 256, 7, at]) for at in range(60))
    )
    worlds = [simulate(history) for _ in range(2)]
    assert worlds[0].commits == worlds[1].commits > 10
    assert worlds[0].batch == worlds[1].batch
