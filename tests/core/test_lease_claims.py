"""A claim to a query folder: the query that began it is stopped, and nobody else gets it."""

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


def _claimed(root: Path, clock: Virtual) -> Lease:
    lease = Lease(Folder(str(root)), NEW, LEASE_MS, clock.clock, claim=CLAIM, claims=True)
    lease.hold()
    return lease


def _free(log: LeaseLog, claim: str | None, clock: Virtual) -> int:
    """Number of the record from which on nobody holds the lease."""
    found = wait_until_free(log, claim, lambda found: LiveRunError("it lives"), clock.clock)
    return 0 if found is None else found.number


def _ended(root: Path) -> None:
    """The old query has run, and ended."""
    log = LeaseLog(Folder(str(root)))
    assert log.append(log.newest(), record_of(ME, released=True))


def test_the_old_query_is_stopped_where_it_begins_again(tmp_path: Path, clock: Virtual) -> None:
    _ended(tmp_path)
    _claimed(tmp_path, clock)
    with pytest.raises(ClaimedError, match="belongs to /state/counts/new-query"):
        Lease(Folder(str(tmp_path)), ME, LEASE_MS, clock.clock).hold()
    # However long the new one is silent: it is no lease that runs out.
    clock.now_s += 100 * LEASE_S
    with pytest.raises(ClaimedError):
        Lease(Folder(str(tmp_path)), ME, LEASE_MS, clock.clock).hold()
    assert newest_in(tmp_path).claim == CLAIM


def test_the_old_query_is_stopped_where_it_cleans_up_late(tmp_path: Path, clock: Virtual) -> None:
    old = Lease(Folder(str(tmp_path)), ME, LEASE_MS, clock.clock)
    old.hold()
    # Its machine sleeps; the new query watches for a whole lease, and takes it.
    _claimed(tmp_path, clock)
    with pytest.raises(ClaimedError):
        old.check()
    with pytest.raises(ClaimedError):
        old.hold()


def test_an_old_query_that_lives_is_not_claimed_from(tmp_path: Path, clock: Virtual) -> None:
    old = Lease(Folder(str(tmp_path)), ME, LEASE_MS, clock.clock)
    old.hold()
    log = LeaseLog(Folder(str(tmp_path)))
    clock.meanwhile = lambda: log.append(log.newest(), record_of(ME, nonce=str(clock.now_s)))
    with pytest.raises(LiveRunError, match="is being written by"):
        _claimed(tmp_path, clock)
    assert newest_in(tmp_path).claim is None


def test_pointers_are_read_for_a_claim_once_the_lease_is_free(tmp_path: Path, clock: Virtual) -> None:
    folder, log = Folder(str(tmp_path)), LeaseLog(Folder(str(tmp_path)))
    assert _free(log, None, clock) == 0
    Lease(folder, ME, LEASE_MS, clock.clock).hold()
    begun_s = clock.now_s
    # Between two renewals it commits batch after batch, and its record stays the same: only time tells.
    assert _free(log, None, clock) == 1
    assert clock.now_s > begun_s + LEASE_S
    assert log.append(log.newest(), record_of(ME, released=True))
    # Somebody wrote meanwhile, so the pointers may be those of the batch before.
    with pytest.raises(LiveRunError, match="stop the old query first"):
        Lease(folder, NEW, LEASE_MS, clock.clock, claim=replace(CLAIM, after=1), claims=True).hold()
    begun_s = clock.now_s
    assert _free(log, None, clock) == 2
    assert clock.now_s == begun_s


def test_a_query_that_runs_is_not_captured_for_a_claim(tmp_path: Path, clock: Virtual) -> None:
    folder, log = Folder(str(tmp_path)), LeaseLog(Folder(str(tmp_path)))
    Lease(folder, ME, LEASE_MS, clock.clock).hold()
    clock.meanwhile = lambda: log.append(log.newest(), record_of(ME, nonce=str(clock.now_s)))
    with pytest.raises(LiveRunError, match="it lives"):
        _free(log, None, clock)


def test_a_release_that_comes_late_is_waited_for(tmp_path: Path, clock: Virtual) -> None:
    folder, log = Folder(str(tmp_path)), LeaseLog(Folder(str(tmp_path)))
    Lease(folder, ME, LEASE_MS, clock.clock).hold()

    def released() -> None:
        clock.meanwhile = lambda: None
        assert log.append(log.newest(), record_of(ME, released=True))

    clock.meanwhile = released
    assert _free(log, None, clock) == 2
    assert clock.now_s < LEASE_S


def test_one_that_claimed_its_folder_must_have_ended_to_be_claimed_from(tmp_path: Path, clock: Virtual) -> None:
    folder, log = Folder(str(tmp_path)), LeaseLog(Folder(str(tmp_path)))
    _claimed(tmp_path, clock)
    found = log.newest()
    assert found is not None
    # A restart of it plans with the old query's pointers, and waits for nobody.
    assert _free(log, None, clock) == found.number
    assert clock.now_s == 0
    # Who comes with its own pointers waits as for any query: it may commit without a new record.
    assert _free(log, CLAIM.id, clock) == found.number
    assert clock.now_s > LEASE_S
    assert log.append(found, replace(found.record, released=True))
    third = Claim("third", "/state/counts/third", 2_000, instead_of=CLAIM.id)
    me = replace(OTHER, query="third query", plan="third plan")
    with pytest.raises(LiveRunError):
        Lease(folder, me, LEASE_MS, clock.clock, claim=replace(third, after=found.number), claims=True).hold()
    after = _free(log, CLAIM.id, clock)
    assert after == found.number + 1
    Lease(folder, me, LEASE_MS, clock.clock, claim=replace(third, after=after), claims=True).hold()
    assert newest_in(tmp_path).claim == third


@pytest.mark.parametrize("released", [False, True])
def test_a_claim_follows_the_record_from_before_its_pointers_were_read(
    tmp_path: Path, clock: Virtual, released: bool
) -> None:
    """The old query's machine sleeps, wakes up while the claim is made, commits a batch, and perhaps ends."""
    folder, log = Folder(str(tmp_path)), LeaseLog(Folder(str(tmp_path)))
    Lease(folder, ME, LEASE_MS, clock.clock).hold()
    after = _free(log, None, clock)

    def written() -> None:
        clock.meanwhile = lambda: None
        assert log.append(log.newest(), record_of(ME, released=released))

    clock.meanwhile = written
    claim = replace(CLAIM, after=after)
    with pytest.raises(LiveRunError):
        Lease(folder, NEW, LEASE_MS, clock.clock, claim=claim, claims=True).hold()
    assert newest_in(tmp_path).claim is None
    # Planned anew it goes by the batch that was committed meanwhile.
    claim = replace(CLAIM, after=_free(log, None, clock))
    Lease(folder, NEW, LEASE_MS, clock.clock, claim=claim, claims=True).hold()
    # Another task of the first batch read the lease before that: the claim is its own.
    Lease(folder, NEW, LEASE_MS, clock.clock, claim=claim, claims=True).hold()
    assert newest_in(tmp_path).claim == CLAIM


def test_a_second_claim_is_refused_with_the_first_ones_owner(tmp_path: Path, clock: Virtual) -> None:
    _claimed(tmp_path, clock)
    other = Claim("third", "/state/counts/third", 2_000)
    with pytest.raises(ClaimedError, match="belongs to /state/counts/new-query"):
        Lease(Folder(str(tmp_path)), ME, LEASE_MS, clock.clock, claim=other, claims=True).hold()


def test_who_claimed_it_may_be_claimed_from(tmp_path: Path, clock: Virtual) -> None:
    _claimed(tmp_path, clock)
    log = LeaseLog(Folder(str(tmp_path)))
    found = log.newest()
    assert found is not None
    assert log.append(found, replace(found.record, released=True))
    third = Claim("third", "/state/counts/third", 2_000)
    me = replace(OTHER, query="third query", plan="third plan")

    def claimed(instead_of: str | None) -> None:
        claim = replace(third, instead_of=instead_of)
        made = Lease(Folder(str(tmp_path)), me, LEASE_MS, clock.clock, claim=claim, claims=True)
        made.hold()

    # By pointers of the first query, which are the new one's no longer, nobody gets it.
    with pytest.raises(ClaimedError, match="belongs to /state/counts/new-query"):
        claimed(None)
    claimed(CLAIM.id)
    assert newest_in(tmp_path).claim == third
    claimed(CLAIM.id)
    # From now on the one before is another query.
    with pytest.raises(ClaimedError, match="belongs to /state/counts/third"):
        Lease(Folder(str(tmp_path)), NEW, LEASE_MS, clock.clock, claim=CLAIM).hold()
    with pytest.raises(ClaimedError, match="belongs to /state/counts/third"):
        other = Claim("fourth", "/state/counts/fourth", 3_000, instead_of=CLAIM.id)
        Lease(Folder(str(tmp_path)), ME, LEASE_MS, clock.clock, claim=other, claims=True).hold()


def test_all_tasks_of_the_first_batch_have_one_claim(tmp_path: Path, clock: Virtual) -> None:
    _claimed(tmp_path, clock)
    Lease(Folder(str(tmp_path)), NEW, LEASE_MS, clock.clock, claim=replace(CLAIM, claimed_ms=9_000), claims=True).hold()
    assert newest_in(tmp_path).claim == CLAIM


def test_the_new_query_goes_on_by_its_pointers(tmp_path: Path, clock: Virtual) -> None:
    _claimed(tmp_path, clock)
    clock.now_s += LEASE_S / 2
    later = Lease(Folder(str(tmp_path)), replace(NEW, plan="after a restart"), LEASE_MS, clock.clock, claim=CLAIM)
    later.hold()
    clock.now_s += LEASE_S / 2
    before = newest_in(tmp_path)
    later.hold()
    eventually(lambda: newest_in(tmp_path) != before)
    assert newest_in(tmp_path).claim == replace(CLAIM, built=True)


def test_a_query_whose_claim_was_released_is_stopped(tmp_path: Path, clock: Virtual) -> None:
    _claimed(tmp_path, clock)
    log = LeaseLog(Folder(str(tmp_path)))
    found = log.newest()
    assert found is not None
    assert log.append(found, replace(found.record, claim=None, released=True, nonce="released"))
    with pytest.raises(ClaimedError, match="was released"):
        Lease(Folder(str(tmp_path)), NEW, LEASE_MS, clock.clock, claim=CLAIM).hold()


def test_where_somebody_removed_the_lease_the_claim_is_made_anew(tmp_path: Path, clock: Virtual) -> None:
    Lease(Folder(str(tmp_path)), NEW, LEASE_MS, clock.clock, claim=CLAIM).hold()
    assert newest_in(tmp_path).claim == replace(CLAIM, built=True)


def test_releases_that_know_no_claims_refuse_the_folder(tmp_path: Path, clock: Virtual) -> None:
    (tmp_path / "lease.json").write_text(json.dumps({"format": 1, "record": 1}))
    _claimed(tmp_path, clock)
    refused = json.loads((tmp_path / "lease.json").read_text())
    assert refused["format"] == LEASE_FORMAT
    with pytest.raises(VersionSkewError):
        LeaseRecord.decode_format_1((tmp_path / "lease.json").read_bytes(), "it")
    # And the claim counts for this one, whatever stands there.
    assert newest_in(tmp_path).claim == CLAIM


def test_a_claim_that_is_made_between_two_looks(
    tmp_path: Path, clock: Virtual, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever looks reads the records first and what is of format 1 then, which a claim replaces."""
    _ended(tmp_path)
    real = LeaseLog._newest_record

    def looks(log: LeaseLog) -> NumberedRecord | None:
        found = real(log)
        monkeypatch.setattr(LeaseLog, "_newest_record", real)
        _claimed(tmp_path, clock)
        return found

    monkeypatch.setattr(LeaseLog, "_newest_record", looks)
    found = LeaseLog(Folder(str(tmp_path))).newest(first=True)
    assert found is not None
    assert found.record.claim == CLAIM


def test_a_process_tells_the_two_queries_apart(tmp_path: Path) -> None:
    registry, folder = LeaseRegistry(), Folder(str(tmp_path))
    one = registry.of(folder, ME, LEASE_MS, claim=CLAIM, claims=True)
    assert registry.of(folder, ME, LEASE_MS, claim=replace(CLAIM, claimed_ms=5)) is one
    assert registry.of(folder, ME, LEASE_MS) is not one


# -- releasing it ---------------------------------------------------------------------------------


def _release(root: Path, clock: Virtual, **also: bool) -> Claim:
    return release_query_folder(Folder(str(root)), clock=clock.clock, **also)


def test_a_claim_whose_owner_died_is_released(tmp_path: Path, clock: Virtual) -> None:
    _ended(tmp_path)
    owner = _claimed(tmp_path, clock)
    assert _release(tmp_path, clock) == CLAIM
    assert clock.now_s > LEASE_S, "it was watched for a whole lease"
    # Should it live after all, it stops before it writes or cleans up.
    clock.now_s += LEASE_S
    with pytest.raises(ClaimedError, match="was released"):
        owner.check()
    with pytest.raises(ClaimedError, match="was released"):
        owner.hold()
    # The old query goes on at once, and so may another claim.
    Lease(Folder(str(tmp_path)), ME, LEASE_MS, clock.clock).hold()
    assert newest_in(tmp_path).claim is None
    with pytest.raises(MissingCheckpointError, match="is not claimed"):
        _release(tmp_path, clock)


def test_a_claim_whose_owner_ended_in_order_is_released_at_once(tmp_path: Path, clock: Virtual) -> None:
    _claimed(tmp_path, clock)
    log = LeaseLog(Folder(str(tmp_path)))
    found = log.newest()
    assert found is not None
    assert log.append(found, replace(found.record, released=True, nonce="ended"))
    _release(tmp_path, clock)
    assert clock.now_s == 0
    other = Claim("third", "/state/counts/third", 2_000)
    Lease(Folder(str(tmp_path)), ME, LEASE_MS, clock.clock, claim=other, claims=True).hold()
    assert newest_in(tmp_path).claim == other


def test_a_claim_whose_owner_lives_is_not_released(tmp_path: Path, clock: Virtual) -> None:
    owner = _claimed(tmp_path, clock)

    def renewed() -> None:
        log = LeaseLog(Folder(str(tmp_path)))
        found = log.newest()
        assert found is not None
        assert log.append(found, replace(found.record, nonce=str(clock.now_s)))

    clock.meanwhile = renewed
    with pytest.raises(LiveRunError, match="its owner is alive"):
        _release(tmp_path, clock)
    clock.meanwhile = lambda: None
    owner.check()
    assert newest_in(tmp_path).claim == CLAIM


def _builds(lease: Lease) -> None:
    """A later batch, which comes with a pointer that is committed."""
    lease.note_task(NEW, claims=False)
    lease.hold()


def test_what_was_built_upon_is_not_released(tmp_path: Path, clock: Virtual) -> None:
    owner = _claimed(tmp_path, clock)
    assert newest_in(tmp_path).claim == CLAIM
    # At once, though no renewal is due.
    _builds(owner)
    assert newest_in(tmp_path).claim == replace(CLAIM, built=True)
    clock.now_s += 100 * LEASE_S
    for force in (False, True):
        with pytest.raises(NotClaimableError, match="a batch of it is committed"):
            _release(tmp_path, clock, force=force)
    # It stays so, whoever of the query renews it.
    later = Lease(Folder(str(tmp_path)), replace(NEW, plan="after a restart"), LEASE_MS, clock.clock, claim=CLAIM)
    later.hold()
    assert newest_in(tmp_path).claim == replace(CLAIM, built=True)


def test_one_process_says_for_all_that_the_claim_is_built_upon(tmp_path: Path, clock: Virtual) -> None:
    one = _claimed(tmp_path, clock)
    other = Lease(Folder(str(tmp_path)), NEW, LEASE_MS, clock.clock, claim=CLAIM, claims=True)
    other.hold()
    _builds(one)
    log = LeaseLog(Folder(str(tmp_path)))
    before = log.newest()
    _builds(other)
    assert log.newest() == before


def test_a_release_that_comes_first_stops_the_owner_before_it_builds(tmp_path: Path, clock: Virtual) -> None:
    owner = _claimed(tmp_path, clock)
    release_query_folder(Folder(str(tmp_path)), clock=Virtual().clock)
    with pytest.raises(ClaimedError, match="was released"):
        _builds(owner)
    assert newest_in(tmp_path).claim is None


def test_a_claim_whose_first_batch_may_be_committed_is_released_by_force_only(
    tmp_path: Path, clock: Virtual, capsys: pytest.CaptureFixture[str]
) -> None:
    _ended(tmp_path)
    _claimed(tmp_path, clock)
    log = LeaseLog(Folder(str(tmp_path)))
    found = log.newest()
    assert found is not None
    assert log.append(found, replace(found.record, released=True, nonce="ended"))
    # Each bucket's call says so.
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


def _of(claim: Claim) -> RunIdentity:
    return replace(OTHER, query=claim.id, plan=f"plan of {claim.id}")


def _claims(root: Path, clock: Virtual, claim: Claim, **also: Any) -> Lease:
    """A query's first batch: it makes a claim."""
    me = replace(_of(claim), plan=uuid.uuid4().hex)
    lease = Lease(Folder(str(root)), me, LEASE_MS, clock.clock, claim=replace(claim, **also), claims=True)
    lease.hold()
    return lease


def _stop(root: Path) -> int:
    """End the run that holds the lease, in order; the number of its last record."""
    log = LeaseLog(Folder(str(root)))
    found = log.newest()
    assert found is not None
    assert log.append(found, replace(found.record, released=True, nonce=uuid.uuid4().hex))
    return found.number + 1


def _runs(root: Path, clock: Virtual, claim: Claim | None) -> None:
    """A query that has committed batches starts again, by the claim that its pointers name, and ends."""
    me = ME if claim is None else replace(_of(claim), plan=uuid.uuid4().hex)
    named = None if claim is None else replace(claim, instead_of=None)
    Lease(Folder(str(root)), me, LEASE_MS, clock.clock, claim=named).hold()
    _stop(root)


@pytest.fixture
def chain(tmp_path: Path, clock: Virtual) -> Path:
    """The second query claimed the first one's folder and built upon it; the third's first batch failed."""
    _ended(tmp_path)
    _claims(tmp_path, clock, CLAIM)
    _stop(tmp_path)
    _runs(tmp_path, clock, CLAIM)
    _claims(tmp_path, clock, THIRD)
    _stop(tmp_path)
    return tmp_path


def test_a_release_gives_the_folder_back_to_the_query_it_was_claimed_from(
    chain: Path, clock: Virtual, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["savepoint", "release", str(chain)]) == 0
    said = "released: the claim of /state/counts/third; the claim new-query is valid again\n"
    assert capsys.readouterr().err == said
    assert newest_in(chain).claim == BUILT
    with pytest.raises(ClaimedError, match="belongs to /state/counts/new-query"):
        _runs(chain, clock, None)
    with pytest.raises(ClaimedError, match="belongs to /state/counts/new-query"):
        _runs(chain, clock, THIRD)
    # The format-1 file still refuses old releases.
    assert json.loads((chain / "lease.json").read_text()) == {"format": LEASE_FORMAT}
    _runs(chain, clock, CLAIM)
    # It has built upon the folder, so a second release changes nothing.
    for force in (False, True):
        with pytest.raises(NotClaimableError, match="a batch of it is committed"):
            _release(chain, clock, force=force)
    assert newest_in(chain).claim == BUILT


def test_a_query_that_committed_one_batch_gets_its_folder_back(tmp_path: Path, clock: Virtual) -> None:
    """Only its second batch would have said that it builds; who claims by its pointers knows that one is committed."""
    _ended(tmp_path)
    _claims(tmp_path, clock, CLAIM)
    _stop(tmp_path)
    assert newest_in(tmp_path).claim == CLAIM
    _claims(tmp_path, clock, THIRD)
    _stop(tmp_path)
    _release(tmp_path, clock)
    assert newest_in(tmp_path).claim == BUILT
    with pytest.raises(NotClaimableError):
        _release(tmp_path, clock, force=True)


def test_a_longer_chain_goes_back_by_one(chain: Path, clock: Virtual) -> None:
    _runs(chain, clock, THIRD)
    _claims(chain, clock, FOURTH)
    _stop(chain)
    assert _release(chain, clock) == FOURTH
    assert newest_in(chain).claim == replace(THIRD, built=True)
    with pytest.raises(ClaimedError):
        _runs(chain, clock, CLAIM)
    _runs(chain, clock, THIRD)


def test_a_query_claims_again_after_a_release(chain: Path, clock: Virtual) -> None:
    """By then its claim replaces another one than the first time."""
    _release(chain, clock)
    _claims(chain, clock, FOURTH, instead_of=CLAIM.id)
    _stop(chain)
    _runs(chain, clock, FOURTH)
    _claims(chain, clock, THIRD, instead_of=FOURTH.id)
    _stop(chain)
    _release(chain, clock)
    claim = newest_in(chain).claim
    assert claim is not None
    assert (claim.id, claim.built) == (FOURTH.id, True)


def test_a_first_batch_does_not_go_on_after_a_release(tmp_path: Path, clock: Virtual) -> None:
    """Whichever comes first, the claim or its release, makes the next record; the other one finds that."""
    _ended(tmp_path)
    _claims(tmp_path, clock, CLAIM)
    after = _stop(tmp_path)
    owner = _claims(tmp_path, clock, THIRD, after=after)
    release_query_folder(Folder(str(tmp_path)), clock=Virtual().clock)
    clock.now_s += LEASE_S
    for ask in (owner.check, owner.hold):
        with pytest.raises(ClaimedError, match=r"the claim third .* was released"):
            ask()
    # A task that had not asked yet, of another attempt at the batch.
    with pytest.raises(LiveRunError, match="was written since its checkpoint was read"):
        _claims(tmp_path, clock, THIRD, after=after)
    assert newest_in(tmp_path).claim == BUILT


def test_a_release_judges_again_what_was_claimed_meanwhile(chain: Path, clock: Virtual) -> None:
    def renewed() -> None:
        log = LeaseLog(Folder(str(chain)))
        found = log.newest()
        assert found is not None
        assert log.append(found, replace(found.record, nonce=str(clock.now_s)))

    def claimed() -> None:
        _claims(chain, Virtual(), FOURTH)
        clock.meanwhile = renewed

    _claims(chain, clock, THIRD)
    clock.meanwhile = claimed
    with pytest.raises(LiveRunError, match="its owner is alive"):
        _release(chain, clock)
    claim = newest_in(chain).claim
    assert claim is not None
    assert claim.id == FOURTH.id


def _released_again(root: Path, clock: Virtual, done: type[StateError]) -> None:
    """A release is run again; it finds that the first one had done it, or does it."""
    with contextlib.suppress(done):
        _release(root, clock)


def _release_in_chain(root: Path, clock: Virtual) -> None:
    _released_again(root, clock, NotClaimableError)
    assert newest_in(root).claim == BUILT
    _runs(root, clock, CLAIM)


def _release_first(root: Path, clock: Virtual) -> None:
    _released_again(root, clock, MissingCheckpointError)
    assert newest_in(root).claim is None
    _runs(root, clock, None)
    assert not (root / "lease.json").exists()


def _claim_in_chain(root: Path, clock: Virtual) -> None:
    if newest_in(root).claim != CLAIM:
        assert _release(root, clock) == THIRD
        assert newest_in(root).claim == BUILT
    _runs(root, clock, CLAIM)


@pytest.mark.parametrize(
    ("claims", "kills_release", "go_on"),
    [([CLAIM, THIRD], True, _release_in_chain), ([CLAIM], True, _release_first), ([CLAIM], False, _claim_in_chain)],
)
def test_killed_before_any_change_to_a_file(
    claims: list[Claim],
    kills_release: bool,
    go_on: Callable[[Path, Virtual], None],
    tmp_path: Path,
    clock: Virtual,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for step in itertools.count():
        root = tmp_path / str(step)
        _ended(root)
        for claim in claims:
            _claims(root, clock, claim)
            _stop(root)
        work = (lambda at: _release(at, clock)) if kills_release else (lambda at: _claims(at, clock, THIRD))
        if not killed_at(step, monkeypatch, partial(work, root)):
            break
        go_on(root, clock)
    assert step > 2


def test_whose_place_a_claim_took_must_be_known(chain: Path, clock: Virtual) -> None:
    """Builds before this one did not write it down; then only a folder that one query has claimed is released."""
    for note in (chain / "claims").iterdir():
        note.unlink()
    note_handed_over(Folder(str(chain)), CLAIM.id)
    with pytest.raises(NotClaimableError, match="did not record which claim it replaced"):
        _release(chain, clock)
    assert newest_in(chain).claim == THIRD
    (chain / "claims" / f"{CLAIM.id}.json").unlink()
    _release(chain, clock)
    assert newest_in(chain).claim is None


def test_whether_a_claim_is_built_upon_is_in_the_record() -> None:
    for claim in (CLAIM, replace(CLAIM, built=True)):
        record = record_of(ME, claim=claim)
        assert LeaseRecord.decode(record.encode(), "it").claim == claim
