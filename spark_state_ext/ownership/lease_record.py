"""The records of a lease, and decisions about what a run may do: values without I/O (`lease` has that).

A run is identified by values that user code cannot change: the application, by the address of its driver, and the plan,
a random id that is planned into the query. Spark's own run id is not used: tasks see it as their job group, which
`foreachBatch` may set.
"""

from __future__ import annotations

import enum
import json
import os
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from arrow_schemas.checksum import open_document, refuse_newer, report_damage, seal_document
from spark_state_ext.errors import LiveRunError
from spark_state_ext.worker.boot import boot_id
from spark_state_ext.worker.host import machine_name
from spark_state_ext.worker.process import get_pid_namespace, get_start_ticks, is_running

__all__ = [
    "ERASER",
    "LEASE_FORMAT",
    "Claim",
    "Decision",
    "NumberedRecord",
    "LeaseRecord",
    "RunIdentity",
    "Watch",
    "decide",
    "knows_claim",
    "may_replace",
    "refusal",
    "refuse_written_since",
]

LEASE_FORMAT = 3
# The application in a lease that `erase_history` holds.
ERASER = "erase history"
_FORMAT_1, _FORMAT_2 = 1, 2
# Key in a file of format 1: the number of the record that the file repeats.
_REPEATS = "record"
_REPLACED_MAX = 100
_ANCESTORS_MAX = 8
_ADVICE = "Remove it while no run is active."


@dataclass(frozen=True)
class RunIdentity:
    """A run of a query, and the process that lives exactly as long as its driver, if that is known.

    Parameters
    ----------
    application
        Spark's application: its id, and the address of its driver. Spark never has one query active twice in it.
    plan
        Random id of the plan that the run was started from.
    query
        Spark's id of the query; empty if tasks do not know it.
    host
        Name of the machine, for messages.
    boot, pid, pid_start, pid_namespace
        The driver's process, if it is on this machine: boot of the machine, number and start of the process, and the
        container in which the number is valid. Otherwise empty or 0.
    """

    application: str
    plan: str
    query: str = ""
    host: str = ""
    boot: str = ""
    pid: int = 0
    pid_start: str = ""
    pid_namespace: str = ""

    @staticmethod
    def here(application: str, plan: str, query: str = "", *, local: bool = False) -> RunIdentity:
        """Return the identity of the run that this worker process works for."""
        me = RunIdentity(application, plan, query, machine_name())
        jvm = _find_java_above(os.getpid()) if local else 0
        if not jvm:
            return me
        return replace(me, boot=boot_id(), pid=jvm, pid_start=get_start_ticks(jvm), pid_namespace=get_pid_namespace())

    def is_same_run(self, other: RunIdentity) -> bool:
        """True if both are one run, or runs of which Spark itself has only one active at a time."""
        if self.application != other.application:
            return False
        return not self.query or not other.query or self.query == other.query

    def is_over(self) -> bool:
        """True if the driver's process is known to be gone; False if this process cannot see that.

        Machines may share a name, and containers may share a machine's name and boot. So a process is looked for only
        if its number means the same here. The host's name (`worker.host`) is not enough: several hosts may be on one
        machine, and two machines may have been given one host's name.
        """
        here = (machine_name(), boot_id(), get_pid_namespace())
        if not self.pid_start or not self.pid_namespace or (self.host, self.boot, self.pid_namespace) != here:
            return False
        return not is_running(self.pid, self.pid_start)

    def __str__(self) -> str:
        query = f"query {self.query} of " if self.query else ""
        return f"{query}application {self.application} on {self.host or 'an unknown machine'}"


def _find_java_above(pid: int) -> int:
    """Return the pid of the nearest JVM among a process's ancestors; 0 if there is none or it cannot be found."""
    for _ in range(_ANCESTORS_MAX):
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
            if pid <= 1:
                return 0
            if Path(f"/proc/{pid}/comm").read_text().strip() == "java":
                return pid
        except (OSError, IndexError, ValueError):
            return 0
    return 0


@dataclass(frozen=True)
class Claim:
    """A claim: from now on a query folder belongs to another query than the one that began it.

    Parameters
    ----------
    id
        Id of the claim, which the new query's pointers name.
    by
        The new query's root and query folder, for messages.
    claimed_ms
        When it was claimed: wall-clock time, milliseconds since 1970, for messages.
    built
        A pointer that names the claim is committed: the new query builds upon the folder, and deletes files that it no
        longer needs. From then on the claim cannot be released.
    instead_of
        Id of the claim that this one may replace: the old query's claim, if that had claimed the folder. Not stored.
    after
        Number of the root's last lease record when the pointers were read: the claim may follow only that. Not stored.
    """

    id: str
    by: str
    claimed_ms: int
    built: bool = False
    instead_of: str | None = field(default=None, compare=False)
    after: int | None = field(default=None, compare=False)

    def __str__(self) -> str:
        return f"{self.by} (claim {self.id})"

    def to_plain(self) -> dict[str, Any]:
        """Return the claim as the fields in a lease file."""
        return {"id": self.id, "by": self.by, "claimed_ms": self.claimed_ms, "built": self.built}

    @staticmethod
    def of_plain(plain: Mapping[str, Any]) -> Claim:
        """Read a claim from the fields in a lease file."""
        return Claim(str(plain["id"]), str(plain["by"]), int(plain["claimed_ms"]), bool(plain["built"]))


@dataclass(frozen=True)
class LeaseRecord:
    """Contents of a lease file.

    Parameters
    ----------
    owner
        The run that holds the lease.
    renewed_ms
        When the owner last renewed it: wall-clock time, milliseconds since 1970; only for messages, not for decisions.
    lease_ms
        How long the owner's lease lasts without renewal, milliseconds.
    replaced
        The last plans whose runs were replaced without having ended; they do not get the lease back.
    released
        The owner has ended.
    nonce
        Random, so that no two files have the same bytes.
    format_1_too
        The owner also writes it in format 1, for releases that know only that one, and respects what these write there.
    claim
        The claim to the folder, if another query began it; then only runs that know the claim may hold the lease.
    query_renewed_ms
        When a run of the query last renewed it, while `erase_history` holds the lease. None: at `renewed_ms`.
    format
        Format of the record that was read; releases that wrote an older one do not know claims or holds.
    """

    owner: RunIdentity
    renewed_ms: int
    lease_ms: int
    replaced: tuple[str, ...] = ()
    released: bool = False
    nonce: str = ""
    format_1_too: bool = False
    claim: Claim | None = None
    query_renewed_ms: int | None = None
    format: int = field(default=LEASE_FORMAT, compare=False)

    def renew_by(self, me: RunIdentity, now_ms: int, lease_ms: int) -> LeaseRecord:
        """Return the next record of the same run, or of a run that begins after its end."""
        owner = me if me.query or not me.is_same_run(self.owner) else replace(me, query=self.owner.query)
        return self._make_next(owner, now_ms, lease_ms, self.replaced)

    def take_over(self, me: RunIdentity, now_ms: int, lease_ms: int) -> LeaseRecord:
        """Return the next record, of a run that replaces a run that may not have ended."""
        plans = (plan for plan in (*self.replaced, self.owner.plan) if plan != me.plan)
        replaced = tuple(dict.fromkeys(plans))[-_REPLACED_MAX:]
        return self._make_next(me, now_ms, lease_ms, replaced)

    def renew(self, now_ms: int, *, released: bool) -> LeaseRecord:
        """Return the next record of the same run, for its driver; with `released`, its last one."""
        return replace(self._make_next(self.owner, now_ms, self.lease_ms, self.replaced), released=released)

    @property
    def last_write_ms(self) -> int:
        """When a run of the query last renewed it. If there are several queries, readers use the last one."""
        return self.renewed_ms if self.query_renewed_ms is None else self.query_renewed_ms

    def _make_next(self, owner: RunIdentity, now_ms: int, lease_ms: int, replaced: tuple[str, ...]) -> LeaseRecord:
        return replace(
            self,
            owner=owner,
            renewed_ms=now_ms,
            lease_ms=lease_ms,
            replaced=replaced,
            released=False,
            nonce=uuid.uuid4().hex,
            query_renewed_ms=self.last_write_ms if owner.application == ERASER else None,
            format=LEASE_FORMAT,
        )

    def encode(self) -> bytes:
        """Return the file's bytes."""
        fields: dict[str, Any] = {
            "format": LEASE_FORMAT,
            "owner": asdict(self.owner),
            "renewed_ms": self.renewed_ms,
            "lease_ms": self.lease_ms,
            "replaced": list(self.replaced),
            "released": self.released,
            "nonce": self.nonce,
            "format_1_too": self.format_1_too,
            "claim": None if self.claim is None else self.claim.to_plain(),
        }
        if self.query_renewed_ms is not None:
            fields["query_renewed_ms"] = self.query_renewed_ms
        return seal_document(fields)

    @staticmethod
    def decode(data: bytes, where: str) -> LeaseRecord:
        """Read a lease file."""
        with report_damage(where, "lease", _ADVICE):
            fields = open_document(data, where, LEASE_FORMAT, _ADVICE)
            claim = fields["claim"] if fields["format"] > _FORMAT_2 else None
            written_ms = fields.get("query_renewed_ms")
            return LeaseRecord(
                owner=RunIdentity(**fields["owner"]),
                renewed_ms=int(fields["renewed_ms"]),
                lease_ms=int(fields["lease_ms"]),
                replaced=tuple(str(plan) for plan in fields["replaced"]),
                released=bool(fields["released"]),
                nonce=str(fields["nonce"]),
                format_1_too=bool(fields["format_1_too"]),
                claim=None if claim is None else Claim.of_plain(claim),
                query_renewed_ms=None if written_ms is None else int(written_ms),
                format=fields["format"],
            )
        raise AssertionError("unreachable: readable raises what it catches")

    def encode_format_1(self, number: int) -> bytes:
        """Return the record in format 1, with its number, by which this release recognizes it.

        Readers of format 1 use `renewed_ms`: a released record gets 0, so it is long over for them. The driver's
        process is left out, so that they do not look for it: machines may share names, and containers a machine's boot.
        """
        owner = {"run_id": self.owner.plan, "application_id": self.owner.application, "host": self.owner.host}
        fields = {
            "format": _FORMAT_1,
            "owner": {**owner, "boot": "", "pid": 0, "pid_start": ""},
            "renewed_ms": 0 if self.released else self.renewed_ms,
            "replaced": list(self.replaced),
            _REPEATS: number,
        }
        return json.dumps(fields).encode()

    @staticmethod
    def decode_format_1(data: bytes, where: str) -> LeaseRecord | None:
        """Read the lease of a release that knows only format 1; None if the file repeats a record of this release."""
        with report_damage(where, "lease", _ADVICE):
            fields = json.loads(data)
            refuse_newer(fields["format"], _FORMAT_1, where)
            if _REPEATS in fields:
                return None
            # The process in it may be an executor, whose end is not the end of the run.
            application, run, host = (str(fields["owner"][name]) for name in ("application_id", "run_id", "host"))
            replaced = tuple(str(plan) for plan in fields.get("replaced", ()))
            return LeaseRecord(
                RunIdentity(application, run, host=host),
                int(fields["renewed_ms"]),
                0,
                replaced,
                format=_FORMAT_1,
            )
        raise AssertionError("unreachable: readable raises what it catches")


def refusal() -> bytes:
    """Return the bytes that replace a lease of format 1 in a claimed folder: its readers refuse the format number."""
    return json.dumps({"format": LEASE_FORMAT}).encode()


@dataclass(frozen=True)
class NumberedRecord:
    """The newest lease file.

    Parameters
    ----------
    number
        Its number; each record has the next one.
    record
        Its content.
    """

    number: int
    record: LeaseRecord


@dataclass(frozen=True)
class Watch:
    """The first look at a record that may be renewed.

    Parameters
    ----------
    found
        The newest lease file then.
    since_s
        When that was, by the watcher's own monotonic clock.
    """

    found: NumberedRecord
    since_s: float


class Decision(enum.Enum):
    """The action that a run may take, given the newest record."""

    RENEW = "it is this run's, or has no live owner: write the next one"
    TAKE_OVER = "its owner has not renewed it for a whole lease: write the next one, and replace the owner"
    WATCH = "its owner may be alive: look again"
    LIVE = "its owner is alive: refuse"
    REPLACED = "this run was replaced: stop"
    CLAIMED = "the folder belongs to another query now: stop"


def knows_claim(record: LeaseRecord, claim: str | None) -> bool:
    """True if a record has the same claim as a run's pointers, or neither has one, so the run may have the folder."""
    return (None if record.claim is None else record.claim.id) == claim


def may_replace(claim: Claim | None, record: LeaseRecord) -> bool:
    """True if a claim that is made now may replace the claim in a record, or its absence."""
    return knows_claim(record, None if claim is None else claim.instead_of)


def refuse_written_since(claim: Claim | None, newest: NumberedRecord | None, where: str) -> None:
    """Raise an error if a claim is made now, and a record was written since the claim's pointers were read."""
    if claim is None or claim.after is None or (newest is not None and not may_replace(claim, newest.record)):
        return
    if claim.after != (0 if newest is None else newest.number):
        raise LiveRunError(
            f"the state at {where} was written since its checkpoint was read, so the last batch may be another one: "
            "stop the old query first, then plan the new one, and start it"
        )


def decide(
    newest: NumberedRecord | None,
    me: RunIdentity,
    watch: Watch | None,
    now_s: float,
    lease_ms: int,
    over: bool,
    claim: str | None = None,
) -> Decision:
    """Decide what a run may do.

    Clocks of two machines are never compared: the owner is watched for a whole lease by the watcher's own clock.
    """
    if newest is None:
        return Decision.RENEW
    record = newest.record
    if not knows_claim(record, claim):
        return Decision.CLAIMED
    if me.plan in record.replaced:
        return Decision.REPLACED
    if record.owner.is_same_run(me) or record.released or over:
        return Decision.RENEW
    if watch is None:
        return Decision.WATCH
    # Compare records, not numbers: a record of format 1 has the number of this release's newest record.
    if watch.found.record != newest.record:
        return Decision.LIVE
    lasts_s = max(lease_ms, record.lease_ms) / 1000
    return Decision.TAKE_OVER if now_s - watch.since_s > lasts_s else Decision.WATCH
