"""A claim to a query folder stops the old query, and refuses all other queries."""

from __future__ import annotations

import contextlib
import itertools
import json
import uuid
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from lease_support import LEASE_MS, LEASE_S, ME, OTHER, Virtual, newest_in, record_of

from spark_state_ext.__main__ import main
from spark_state_ext.errors import (
    ClaimedError,
    LiveRunError,
    MissingCheckpointError,
    NotClaimableError,
    StateError,
    VersionSkewError,
)
from spark_state_ext.files.folder import Folder
from spark_state_ext.ownership.claim_notes import note_handed_over
from spark_state_ext.ownership.lease import Lease, LeaseRegistry
from spark_state_ext.ownership.lease_log import LeaseLog
from spark_state_ext.ownership.lease_record import LEASE_FORMAT, Claim, LeaseRecord, NumberedRecord, RunIdentity
from spark_state_ext.ownership.query_end import wait_until_free
from spark_state_ext.ownership.release import release_query_folder
from tests.helpers.killing import killed_at
from tests.helpers.waiting import eventually

CLAIM = Claim("new-query", "/state/counts/new-query", 1_000)
NEW = replace(OTHER, query="new query")


@pytest.fixture
def clock() -> Virtual:
    return Virtual()


def claim_folder(root: Path, clock: Virtual) -> Lease:
    owner = Lease(Folder(str(root)), NEW, LEASE_MS, clock.clock, claim=CLAIM, claims=True)
    owner.hold()
    return owner


def wait_for_free(log: LeaseLog, claim: str | None, clock: Virtual) -> int:
    """Return the number of the last record after which the lease is free."""
    latest = wait_until_free(log, claim, lambda _: LiveRunError("it lives"), clock.clock)
    return 0 if latest is None else latest.number


def end_old_query(root: Path) -> None:
    """Write that the old query has run and ended."""
    log = LeaseLog(Folder(str(root)))
    assert log.append(log.newest(), record_of(ME, released=True))


def test_the_old_query_cannot_restart_after_a_claim(tmp_path: Path, clock: Virtual) -> None:
    end_old_query(tmp_path)
    claim_folder(tmp_path, clock)
    with pytest.raises(ClaimedError, match="belongs to /state/counts/new-query"):
        Lease(Folder(str(tmp_path)), ME, LEASE_MS, clock.clock).hold()
    # A claim does not expire, however long its owner is silent.
    clock.now_s += 100 * LEASE_S
    with pytest.raises(ClaimedError):
        Lease(Folder(str(tmp_path)), ME, LEASE_MS, clock.clock).hold()
    assert newest_in(tmp_path).claim == CLAIM


def test_the_old_query_cannot_clean_up_after_a_claim(tmp_path: Path, clock: Virtual) -> None:
    old = Lease(Folder(str(tmp_path)), ME, LEASE_MS, clock.clock)
    old.hold()
    # The old query's machine sleeps; the new query watches for a whole lease, then claims the folder.
    claim_folder(tmp_path, clock)
    with pytest.raises(ClaimedError):
        old.check()
    with pytest.raises(ClaimedError):
        old.hold()


def test_a_live_query_cannot_be_claimed_from(tmp_path: Path, clock: Virtual) -> None:
    old = Lease(Folder(str(tmp_path)), ME, LEASE_MS, clock.clock)
    old.hold()
    log = LeaseLog(Folder(str(tmp_path)))
    clock.meanwhile = lambda: log.append(log.newest(), record_of(ME, nonce=str(clock.now_s)))
    with pytest.raises(LiveRunError, match="is being written by"):
        claim_folder(tmp_path, clock)
    assert newest_in(tmp_path).claim is None


def test_a_claim_needs_a_lease_that_was_free_before_pointers_were_read(tmp_path: Path, clock: Virtual) -> None:
    folder, log = Folder(str(tmp_path)), LeaseLog(Folder(str(tmp_path)))
    assert wait_for_free(log, None, clock) == 0
    Lease(folder, ME, LEASE_MS, clock.clock).hold()
    begun_s = clock.now_s
    # The query commits batches between two renewals without a new record, so only time shows that it has stopped.
    assert wait_for_free(log, None, clock) == 1
    assert clock.now_s > begun_s + LEASE_S
    assert log.append(log.newest(), record_of(ME, released=True))
    # A record was written since, so the pointers may be outdated.
    with pytest.raises(LiveRunError, match="stop the old query first"):
        Lease(folder, NEW, LEASE_MS, clock.clock, claim=replace(CLAIM, after=1), claims=True).hold()
    begun_s = clock.now_s
    assert wait_for_free(log, None, clock) == 2
    assert clock.now_s == begun_s


def test_waiting_for_a_free_lease_fails_if_the_query_is_alive(tmp_path: Path, clock: Virtual) -> None:
    folder, log = Folder(str(tmp_path)), LeaseLog(Folder(str(tmp_path)))
    Lease(folder, ME, LEASE_MS, clock.clock).hold()
    clock.meanwhile = lambda: log.append(log.newest(), record_of(ME, nonce=str(clock.now_s)))
    with pytest.raises(LiveRunError, match="it lives"):
        wait_for_free(log, None, clock)


def test_waiting_for_a_free_lease_ends_with_a_late_release(tmp_path: Path, clock: Virtual) -> None:
    folder, log = Folder(str(tmp_path)), LeaseLog(Folder(str(tmp_path)))
    Lease(folder, ME, LEASE_MS, clock.clock).hold()

    def release_late() -> None:
        clock.meanwhile = lambda: None
        assert log.append(log.newest(), record_of(ME, released=True))

    clock.meanwhile = release_late
    assert wait_for_free(log, None, clock) == 2
    assert clock.now_s < LEASE_S


def test_the_owner_of_a_claim_must_have_ended_before_the_next_claim(tmp_path: Path, clock: Virtual) -> None:
    folder, log = Folder(str(tmp_path)), LeaseLog(Folder(str(tmp_path)))
    claim_folder(tmp_path, clock)
    latest = log.newest()
    assert latest is not None
    # A restart of the claiming query plans with the old query's pointers, and does not wait.
    assert wait_for_free(log, None, clock) == latest.number
    assert clock.now_s == 0
    # A claim by the owner's own pointers waits as for any query, which may commit without a new record.
    assert wait_for_free(log, CLAIM.id, clock) == latest.number
    assert clock.now_s > LEASE_S
    assert log.append(latest, replace(latest.record, released=True))
    third = Claim("third", "/state/counts/third", 2_000, instead_of=CLAIM.id)
    me = replace(OTHER, query="third query", plan="third plan")
    with pytest.raises(LiveRunError):
        Lease(folder, me, LEASE_MS, clock.clock, claim=replace(third, after=latest.number), claims=True).hold()
    after = wait_for_free(log, CLAIM.id, clock)
    assert after == latest.number + 1
    Lease(folder, me, LEASE_MS, clock.clock, claim=replace(third, after=after), claims=True).hold()
    assert newest_in(tmp_path).claim == third


@pytest.mark.parametrize("released", [False, True])
def test_a_claim_is_refused_if_the_lease_changed_after_pointers_were_read(
    tmp_path: Path, clock: Virtual, released: bool
) -> None:
    """The old query's machine sleeps, wakes up during the claim, commits a batch, and in one case ends."""
    folder, log = Folder(str(tmp_path)), LeaseLog(Folder(str(tmp_path)))
    Lease(folder, ME, LEASE_MS, clock.clock).hold()
    after = wait_for_free(log, None, clock)

    def write_record() -> None:
        clock.meanwhile = lambda: None
        assert log.append(log.newest(), record_of(ME, released=released))

    clock.meanwhile = write_record
    claim = replace(CLAIM, after=after)
    with pytest.raises(LiveRunError):
        Lease(folder, NEW, LEASE_MS, clock.clock, claim=claim, claims=True).hold()
    assert newest_in(tmp_path).claim is None
    # A new plan includes the batch that was committed in the meantime.
    claim = replace(CLAIM, after=wait_for_free(log, None, clock))
    Lease(folder, NEW, LEASE_MS, clock.clock, claim=claim, claims=True).hold()
    # Another task of the first batch has read the lease before: it accepts the claim of its own query.
    Lease(folder, NEW, LEASE_MS, clock.clock, claim=claim, claims=True).hold()
    assert newest_in(tmp_path).claim == CLAIM


def test_a_second_claim_is_refused_and_the_error_names_the_owner(tmp_path: Path, clock: Virtual) -> None:
    claim_folder(tmp_path, clock)
    other = Claim("third", "/state/counts/third", 2_000)
    with pytest.raises(ClaimedError, match="belongs to /state/counts/new-query"):
        Lease(Folder(str(tmp_path)), ME, LEASE_MS, clock.clock, claim=other, claims=True).hold()


def test_a_claim_can_replace_an_earlier_claim(tmp_path: Path, clock: Virtual) -> None:
    claim_folder(tmp_path, clock)
    log = LeaseLog(Folder(str(tmp_path)))
    latest = log.newest()
    assert latest is not None
    assert log.append(latest, replace(latest.record, released=True))
    third = Claim("third", "/state/counts/third", 2_000)
    me = replace(OTHER, query="third query", plan="third plan")

    def claim_instead_of(instead_of: str | None) -> None:
        claim = replace(third, instead_of=instead_of)
        lease = Lease(Folder(str(tmp_path)), me, LEASE_MS, clock.clock, claim=claim, claims=True)
        lease.hold()

    # Pointers of the first query, without the earlier claim, give no right to the folder.
    with pytest.raises(ClaimedError, match="belongs to /state/counts/new-query"):
        claim_instead_of(None)
    claim_instead_of(CLAIM.id)
    assert newest_in(tmp_path).claim == third
    claim_instead_of(CLAIM.id)
    # The owner of the earlier claim is now refused.
    with pytest.raises(ClaimedError, match="belongs to /state/counts/third"):
        Lease(Folder(str(tmp_path)), NEW, LEASE_MS, clock.clock, claim=CLAIM).hold()
    with pytest.raises(ClaimedError, match="belongs to /state/counts/third"):
        other = Claim("fourth", "/state/counts/fourth", 3_000, instead_of=CLAIM.id)
        Lease(Folder(str(tmp_path)), ME, LEASE_MS, clock.clock, claim=other, claims=True).hold()


def test_all_tasks_of_the_first_batch_have_one_claim(tmp_path: Path, clock: Virtual) -> None:
    claim_folder(tmp_path, clock)
    Lease(Folder(str(tmp_path)), NEW, LEASE_MS, clock.clock, claim=replace(CLAIM, claimed_ms=9_000), claims=True).hold()
    assert newest_in(tmp_path).claim == CLAIM


def test_the_new_query_restarts_with_the_claim_in_its_pointers(tmp_path: Path, clock: Virtual) -> None:
    claim_folder(tmp_path, clock)
    clock.now_s += LEASE_S / 2
    later = Lease(Folder(str(tmp_path)), replace(NEW, plan="after a restart"), LEASE_MS, clock.clock, claim=CLAIM)
    later.hold()
    clock.now_s += LEASE_S / 2
    before = newest_in(tmp_path)
    later.hold()
    eventually(lambda: newest_in(tmp_path) != before)
    assert newest_in(tmp_path).claim == replace(CLAIM, built=True)


def test_a_query_whose_claim_was_released_is_stopped(tmp_path: Path, clock: Virtual) -> None:
    claim_folder(tmp_path, clock)
    log = LeaseLog(Folder(str(tmp_path)))
    latest = log.newest()
    assert latest is not None
    assert log.append(latest, replace(latest.record, claim=None, released=True, nonce="released"))
    with pytest.raises(ClaimedError, match="was released"):
        Lease(Folder(str(tmp_path)), NEW, LEASE_MS, clock.clock, claim=CLAIM).hold()


def test_a_claim_is_written_again_if_the_lease_was_removed(tmp_path: Path, clock: Virtual) -> None:
    Lease(Folder(str(tmp_path)), NEW, LEASE_MS, clock.clock, claim=CLAIM).hold()
    assert newest_in(tmp_path).claim == replace(CLAIM, built=True)


def test_library_versions_without_claims_refuse_the_folder(tmp_path: Path, clock: Virtual) -> None:
    (tmp_path / "lease.json").write_text(json.dumps({"format": 1, "record": 1}))
    claim_folder(tmp_path, clock)
    refused = json.loads((tmp_path / "lease.json").read_text())
    assert refused["format"] == LEASE_FORMAT
    with pytest.raises(VersionSkewError):
        LeaseRecord.decode_format_1((tmp_path / "lease.json").read_bytes(), "it")
    # This version reads the claim, whatever the format-1 file holds.
    assert newest_in(tmp_path).claim == CLAIM


def test_a_reader_sees_a_claim_that_is_made_while_it_reads(
    tmp_path: Path, clock: Virtual, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader reads the records first and then the format-1 file, which a claim replaces."""
    end_old_query(tmp_path)
    real = LeaseLog._newest_record

    def read_then_claim(log: LeaseLog) -> NumberedRecord | None:
        record = real(log)
        monkeypatch.setattr(LeaseLog, "_newest_record", real)
        claim_folder(tmp_path, clock)
        return record

    monkeypatch.setattr(LeaseLog, "_newest_record", read_then_claim)
    latest = LeaseLog(Folder(str(tmp_path))).newest(first=True)
    assert latest is not None
    assert latest.record.claim == CLAIM


def test_a_process_has_separate_leases_with_and_without_a_claim(tmp_path: Path) -> None:
    registry, folder = LeaseRegistry(), Folder(str(tmp_path))
    lease = registry.of(folder, ME, LEASE_MS, claim=CLAIM, claims=True)
    assert registry.of(folder, ME, LEASE_MS, claim=replace(CLAIM, claimed_ms=5)) is lease
    assert registry.of(folder, ME, LEASE_MS) is not lease


# -- releasing a claim ----------------------------------------------------------------------------


def release_claim(root: Path, clock: Virtual, **also: bool) -> Claim:
    return release_query_folder(Folder(str(root)), clock=clock.clock, **also)


def test_a_claim_whose_owner_died_is_released(tmp_path: Path, clock: Virtual) -> None:
    end_old_query(tmp_path)
    owner = claim_folder(tmp_path, clock)
    assert release_claim(tmp_path, clock) == CLAIM
    assert clock.now_s > LEASE_S, "the lease was watched for its whole time"
    # If the owner is alive after all, it stops before it writes or cleans up.
    clock.now_s += LEASE_S
    with pytest.raises(ClaimedError, match="was released"):
        owner.check()
    with pytest.raises(ClaimedError, match="was released"):
        owner.hold()
    # The old query may continue at once, and so may another claim.
    Lease(Folder(str(tmp_path)), ME, LEASE_MS, clock.clock).hold()
    assert newest_in(tmp_path).claim is None
    with pytest.raises(MissingCheckpointError, match="is not claimed"):
        release_claim(tmp_path, clock)


def test_a_claim_is_released_at_once_if_its_owner_has_ended(tmp_path: Path, clock: Virtual) -> None:
    claim_folder(tmp_path, clock)
    log = LeaseLog(Folder(str(tmp_path)))
    latest = log.newest()
    assert latest is not None
    assert log.append(latest, replace(latest.record, released=True, nonce="ended"))
    release_claim(tmp_path, clock)
    assert clock.now_s == 0
    other = Claim("third", "/state/counts/third", 2_000)
    Lease(Folder(str(tmp_path)), ME, LEASE_MS, clock.clock, claim=other, claims=True).hold()
    assert newest_in(tmp_path).claim == other


def test_a_claim_is_not_released_while_its_owner_is_alive(tmp_path: Path, clock: Virtual) -> None:
    owner = claim_folder(tmp_path, clock)

    def renew_record() -> None:
        log = LeaseLog(Folder(str(tmp_path)))
        latest = log.newest()
        assert latest is not None
        assert log.append(latest, replace(latest.record, nonce=str(clock.now_s)))

    clock.meanwhile = renew_record
    with pytest.raises(LiveRunError, match="its owner is alive"):
        release_claim(tmp_path, clock)
    clock.meanwhile = lambda: None
    owner.check()
    assert newest_in(tmp_path).claim == CLAIM


def run_later_batch(lease: Lease) -> None:
    """Run a later batch of the query, whose pointer is committed."""
    lease.note_task(NEW, claims=False)
    lease.hold()


def test_a_claim_is_not_released_after_a_committed_batch(tmp_path: Path, clock: Virtual) -> None:
    owner = claim_folder(tmp_path, clock)
    assert newest_in(tmp_path).claim == CLAIM
    # The record is written at once, though no renewal is due.
    run_later_batch(owner)
    assert newest_in(tmp_path).claim == replace(CLAIM, built=True)
    clock.now_s += 100 * LEASE_S
    for force in (False, True):
        with pytest.raises(NotClaimableError, match="a batch of it is committed"):
            release_claim(tmp_path, clock, force=force)
    # The mark remains when another run of the query renews the lease.
    later = Lease(Folder(str(tmp_path)), replace(NEW, plan="after a restart"), LEASE_MS, clock.clock, claim=CLAIM)
    later.hold()
    assert newest_in(tmp_path).claim == replace(CLAIM, built=True)


def test_only_one_process_marks_the_claim_as_built_upon(tmp_path: Path, clock: Virtual) -> None:
    first = claim_folder(tmp_path, clock)
    other = Lease(Folder(str(tmp_path)), NEW, LEASE_MS, clock.clock, claim=CLAIM, claims=True)
    other.hold()
    run_later_batch(first)
    log = LeaseLog(Folder(str(tmp_path)))
    before = log.newest()
    run_later_batch(other)
    assert log.newest() == before


def test_a_released_claim_stops_the_owners_next_batch(tmp_path: Path, clock: Virtual) -> None:
    owner = claim_folder(tmp_path, clock)
    release_query_folder(Folder(str(tmp_path)), clock=Virtual().clock)
    with pytest.raises(ClaimedError, match="was released"):
        run_later_batch(owner)
    assert newest_in(tmp_path).claim is None


def test_a_claim_needs_force_to_be_released_after_a_first_batch(
    tmp_path: Path, clock: Virtual, capsys: pytest.CaptureFixture[str]
) -> None:
    end_old_query(tmp_path)
    claim_folder(tmp_path, clock)
    log = LeaseLog(Folder(str(tmp_path)))
    latest = log.newest()
    assert latest is not None
    assert log.append(latest, replace(latest.record, released=True, nonce="ended"))
    # Each bucket's call writes the note.
    for _ in range(2):
        note_handed_over(Folder(str(tmp_path)), CLAIM.id)
    assert main(["savepoint", "release", str(tmp_path)]) == 3
    assert f"NotClaimableError: the claim of {CLAIM} to the state at {tmp_path} is not" in capsys.readouterr().err
    assert main(["savepoint", "release", str(tmp_path), "--force"]) == 0
    assert capsys.readouterr().err == "released: the claim of /state/counts/new-query\n"
    assert main(["savepoint", "release", str(tmp_path)]) == 3
    assert "MissingCheckpointError: the state at" in capsys.readouterr().err


THIRD = Claim("third", "/state/counts/third", 2_000, instead_of=CLAIM.id)
FOURTH = Claim("fourth", "/state/counts/fourth", 3_000, instead_of=THIRD.id)
BUILT = replace(CLAIM, built=True)


def make_identity(claim: Claim) -> RunIdentity:
    return replace(OTHER, query=claim.id, plan=f"plan of {claim.id}")


def make_claim(root: Path, clock: Virtual, claim: Claim, **also: Any) -> Lease:
    """Run a query's first batch, which makes a claim."""
    me = replace(make_identity(claim), plan=uuid.uuid4().hex)
    lease = Lease(Folder(str(root)), me, LEASE_MS, clock.clock, claim=replace(claim, **also), claims=True)
    lease.hold()
    return lease


def stop_run(root: Path) -> int:
    """End the run that holds the lease, and return the number of its last record."""
    log = LeaseLog(Folder(str(root)))
    latest = log.newest()
    assert latest is not None
    assert log.append(latest, replace(latest.record, released=True, nonce=uuid.uuid4().hex))
    return latest.number + 1


def restart_query(root: Path, clock: Virtual, claim: Claim | None) -> None:
    """Restart a query that has committed batches, with the claim that its pointers name, and end it."""
    me = ME if claim is None else replace(make_identity(claim), plan=uuid.uuid4().hex)
    named = None if claim is None else replace(claim, instead_of=None)
    Lease(Folder(str(root)), me, LEASE_MS, clock.clock, claim=named).hold()
    stop_run(root)


@pytest.fixture
def chain(tmp_path: Path, clock: Virtual) -> Path:
    """A second query claimed the first one's folder and built upon it; a third one claimed it, and its first batch
    failed."""
    end_old_query(tmp_path)
    make_claim(tmp_path, clock, CLAIM)
    stop_run(tmp_path)
    restart_query(tmp_path, clock, CLAIM)
    make_claim(tmp_path, clock, THIRD)
    stop_run(tmp_path)
    return tmp_path


def test_a_release_gives_the_folder_back_to_the_query_it_was_claimed_from(
    chain: Path, clock: Virtual, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["savepoint", "release", str(chain)]) == 0
    output = "released: the claim of /state/counts/third; the claim new-query is valid again\n"
    assert capsys.readouterr().err == output
    assert newest_in(chain).claim == BUILT
    with pytest.raises(ClaimedError, match="belongs to /state/counts/new-query"):
        restart_query(chain, clock, None)
    with pytest.raises(ClaimedError, match="belongs to /state/counts/new-query"):
        restart_query(chain, clock, THIRD)
    # The format-1 file still refuses old releases.
    assert json.loads((chain / "lease.json").read_text()) == {"format": LEASE_FORMAT}
    restart_query(chain, clock, CLAIM)
    # The owner has built upon the folder, so a second release changes nothing.
    for force in (False, True):
        with pytest.raises(NotClaimableError, match="a batch of it is committed"):
            release_claim(chain, clock, force=force)
    assert newest_in(chain).claim == BUILT


def test_a_query_that_committed_one_batch_gets_its_folder_back(tmp_path: Path, clock: Virtual) -> None:
    """The second batch would mark the claim as built upon, but the next claim shows that a batch is committed."""
    end_old_query(tmp_path)
    make_claim(tmp_path, clock, CLAIM)
    stop_run(tmp_path)
    assert newest_in(tmp_path).claim == CLAIM
    make_claim(tmp_path, clock, THIRD)
    stop_run(tmp_path)
    release_claim(tmp_path, clock)
    assert newest_in(tmp_path).claim == BUILT
    with pytest.raises(NotClaimableError):
        release_claim(tmp_path, clock, force=True)


def test_a_release_undoes_only_the_last_claim_of_a_chain(chain: Path, clock: Virtual) -> None:
    restart_query(chain, clock, THIRD)
    make_claim(chain, clock, FOURTH)
    stop_run(chain)
    assert release_claim(chain, clock) == FOURTH
    assert newest_in(chain).claim == replace(THIRD, built=True)
    with pytest.raises(ClaimedError):
        restart_query(chain, clock, CLAIM)
    restart_query(chain, clock, THIRD)


def test_a_query_can_claim_again_after_a_release(chain: Path, clock: Virtual) -> None:
    """The second claim of the query then replaces a different claim than its first one did."""
    release_claim(chain, clock)
    make_claim(chain, clock, FOURTH, instead_of=CLAIM.id)
    stop_run(chain)
    restart_query(chain, clock, FOURTH)
    make_claim(chain, clock, THIRD, instead_of=FOURTH.id)
    stop_run(chain)
    release_claim(chain, clock)
    claim = newest_in(chain).claim
    assert claim is not None
    assert (claim.id, claim.built) == (FOURTH.id, True)


def test_a_release_stops_the_first_batch(tmp_path: Path, clock: Virtual) -> None:
    """The claim or its release, whichever comes first, writes the next record, and the other one sees it."""
    end_old_query(tmp_path)
    make_claim(tmp_path, clock, CLAIM)
    after = stop_run(tmp_path)
    owner = make_claim(tmp_path, clock, THIRD, after=after)
    release_query_folder(Folder(str(tmp_path)), clock=Virtual().clock)
    clock.now_s += LEASE_S
    for method in (owner.check, owner.hold):
        with pytest.raises(ClaimedError, match=r"the claim third .* was released"):
            method()
    # Another attempt at the batch has a task that has not claimed yet.
    with pytest.raises(LiveRunError, match="was written since its checkpoint was read"):
        make_claim(tmp_path, clock, THIRD, after=after)
    assert newest_in(tmp_path).claim == BUILT


def test_a_release_checks_a_claim_that_was_made_while_it_waited(chain: Path, clock: Virtual) -> None:
    def renew_record() -> None:
        log = LeaseLog(Folder(str(chain)))
        latest = log.newest()
        assert latest is not None
        assert log.append(latest, replace(latest.record, nonce=str(clock.now_s)))

    def claim_during_release() -> None:
        make_claim(chain, Virtual(), FOURTH)
        clock.meanwhile = renew_record

    make_claim(chain, clock, THIRD)
    clock.meanwhile = claim_during_release
    with pytest.raises(LiveRunError, match="its owner is alive"):
        release_claim(chain, clock)
    claim = newest_in(chain).claim
    assert claim is not None
    assert claim.id == FOURTH.id


def repeat_release(root: Path, clock: Virtual, done: type[StateError]) -> None:
    """Run a release again: it reports that the first one succeeded, or does the work."""
    with contextlib.suppress(done):
        release_claim(root, clock)


def check_chain(root: Path, clock: Virtual) -> None:
    repeat_release(root, clock, NotClaimableError)
    assert newest_in(root).claim == BUILT
    restart_query(root, clock, CLAIM)


def check_first(root: Path, clock: Virtual) -> None:
    repeat_release(root, clock, MissingCheckpointError)
    assert newest_in(root).claim is None
    restart_query(root, clock, None)
    assert not (root / "lease.json").exists()


def check_claim(root: Path, clock: Virtual) -> None:
    if newest_in(root).claim != CLAIM:
        assert release_claim(root, clock) == THIRD
        assert newest_in(root).claim == BUILT
    restart_query(root, clock, CLAIM)


@pytest.mark.parametrize(
    ("claims", "kills_release", "check_and_continue"),
    [([CLAIM, THIRD], True, check_chain), ([CLAIM], True, check_first), ([CLAIM], False, check_claim)],
)
def test_a_release_or_claim_killed_at_any_file_change_can_be_repeated(
    claims: list[Claim],
    kills_release: bool,
    check_and_continue: Callable[[Path, Virtual], None],
    tmp_path: Path,
    clock: Virtual,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for step in itertools.count():
        root = tmp_path / str(step)
        end_old_query(root)
        for claim in claims:
            make_claim(root, clock, claim)
            stop_run(root)
        work = (lambda at: release_claim(at, clock)) if kills_release else (lambda at: make_claim(at, clock, THIRD))
        if not killed_at(step, monkeypatch, partial(work, root)):
            break
        check_and_continue(root, clock)
    assert step > 2


def test_a_claim_without_a_record_of_the_claim_it_replaced_is_not_released(chain: Path, clock: Virtual) -> None:
    """Older versions did not write this record; then only a folder that was claimed once can be released."""
    for note in (chain / "claims").iterdir():
        note.unlink()
    note_handed_over(Folder(str(chain)), CLAIM.id)
    with pytest.raises(NotClaimableError, match="did not record which claim it replaced"):
        release_claim(chain, clock)
    assert newest_in(chain).claim == THIRD
    (chain / "claims" / f"{CLAIM.id}.json").unlink()
    release_claim(chain, clock)
    assert newest_in(chain).claim is None


def test_the_lease_record_stores_whether_a_claim_is_built_upon() -> None:
    for claim in (CLAIM, replace(CLAIM, built=True)):
        record = record_of(ME, claim=claim)
        assert LeaseRecord.decode(record.encode(), "it").claim == claim
