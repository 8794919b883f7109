"""What a lease says, and what a run may do about it: values and decisions, no I/O (`lease` has that).

A run is told apart by what its user's code cannot change: the application, by the address of its driver, and the plan,
a random id that is planned into the query. Spark's own run id is not used: tasks learn it as their job group, which
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

from arrow_schemas.checksum import opened_document, readable, refuse_newer, sealed_document
from spark_state_ext.errors import LiveRunError
from spark_state_ext.worker.boot import boot_id
from spark_state_ext.worker.host import machine_name
from spark_state_ext.worker.process import is_running, namespace, start_of

__all__ = [
    "ERASER",
    "LEASE_FORMAT",
    "Claim",
    "Decision",
    "Found",
    "LeaseRecord",
    "RunIdentity",
    "Watch",
    "decide",
    "knows_claim",
    "takes_place",
    "refusal",
    "refuse_written_since",
]

LEASE_FORMAT = 3
# The application in a lease that `erase_history` holds.
ERASER = "erase history"
_FORMAT_1, _FORMAT_2 = 1, 2
# In a file of format 1: the number of the record that it repeats.
_REPEATS = "record"
_REPLACED_MAX = 100
_ANCESTORS_MAX = 8
_MEND = "Remove it when no run is live."


@dataclass(frozen=True)
class RunIdentity:
    """A streaming run, and the process that lives exactly as long as its driver, where that is known.

    Parameters
    ----------
    application
        Spark's application: its id, and the address of its driver. Spark never has one query active twice in it.
    plan
        Random id of the plan that the run was started from.
    query
        Spark's id of the query; empty where tasks are not told it.
    host
        Name of the machine, for people.
    boot, pid, pid_start, pid_namespace
        The driver's process, where it is on this machine: boot of the machine, number and start of the process, and
        the container in which the number counts. Empty or 0 elsewhere.
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
        """The identity of the run that this worker process works for."""
        me = RunIdentity(application, plan, query, machine_name())
        jvm = _java_above(os.getpid()) if local else 0
        if not jvm:
            return me
        return replace(me, boot=boot_id(), pid=jvm, pid_start=start_of(jvm), pid_namespace=namespace())

    def is_same_run(self, other: RunIdentity) -> bool:
        """Whether both work for one run, or for runs of which Spark itself has only one active at a time."""
        if self.application != other.application:
            return False
        return not self.query or not other.query or self.query == other.query

    def is_over(self) -> bool:
        """Whether the driver's process is known to be gone; False when that cannot be told from here.

        Machines may share a name, and containers a machine's name and boot: a process is looked for only where its
        number means the same. What its host is called (`worker.host`) says nothing of that: several hosts may be on one
        machine, and two machines may have been given one host's name.
        """
        here = (machine_name(), boot_id(), namespace())
        if not self.pid_start or not self.pid_namespace or (self.host, self.boot, self.pid_namespace) != here:
            return False
        return not is_running(self.pid, self.pid_start)

    def __str__(self) -> str:
        query = f"query {self.query} of " if self.query else ""
        return f"{query}application {self.application} on {self.host or 'an unknown machine'}"


def _java_above(pid: int) -> int:
    """The nearest JVM among a process's ancestors; 0 where there is none or the system does not tell."""
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
    """That a query folder belongs to another query from now on than the one that began it.

    Parameters
    ----------
    id
        What the new query's pointers name it by.
    by
        The new query, for people: where it keeps its state, and what it is called there.
    claimed_ms
        When it was claimed: wall-clock time, milliseconds since 1970. For people.
    built
        A pointer that names the claim is committed: the new query builds upon the folder, and deletes what it needs no
        more. From then on the claim cannot be released.
    instead_of
        Id of the claim whose place it may take: the other query's, where that had claimed the folder itself. Not kept.
    after
        Number of the only record that it may follow: the one from before its pointers were read. Not kept.
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
        """As a lease file has it."""
        return {"id": self.id, "by": self.by, "claimed_ms": self.claimed_ms, "built": self.built}

    @staticmethod
    def of_plain(plain: Mapping[str, Any]) -> Claim:
        """Inverse of `to_plain`."""
        return Claim(str(plain["id"]), str(plain["by"]), int(plain["claimed_ms"]), bool(plain["built"]))


@dataclass(frozen=True)
class LeaseRecord:
    """Contents of a lease file.

    Parameters
    ----------
    owner
        The run that holds the lease.
    renewed_ms
        When it last said so: wall-clock time, milliseconds since 1970. For people: nobody decides by it.
    lease_ms
        How long the owner's lease lasts without renewal, milliseconds.
    replaced
        Plans of runs that were replaced without having ended, the last ones; they do not get the lease back.
    released
        The owner has ended.
    nonce
        Random, so that no two files have the same bytes.
    format_1_too
        The owner repeats it in format 1, for releases that know no other; what these write there counts for it.
    claim
        Whose the folder is, where another query began it; then only runs that know the claim may hold the lease.
    query_renewed_ms
        When a run of the query last renewed it, where somebody else does, to erase keys from its past. None: at
        `renewed_ms`.
    format
        Format of the record as it was read; releases that wrote an older one know neither claims nor holds.
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

    def renewed(self, me: RunIdentity, now_ms: int, lease_ms: int) -> LeaseRecord:
        """The next record of the same run, or of one that comes after its end."""
        owner = me if me.query or not me.is_same_run(self.owner) else replace(me, query=self.owner.query)
        return self._next(owner, now_ms, lease_ms, self.replaced)

    def taken_over(self, me: RunIdentity, now_ms: int, lease_ms: int) -> LeaseRecord:
        """The next record, of a run that replaces one that may not have ended."""
        others = (plan for plan in (*self.replaced, self.owner.plan) if plan != me.plan)
        replaced = tuple(dict.fromkeys(others))[-_REPLACED_MAX:]
        return self._next(me, now_ms, lease_ms, replaced)

    def renew(self, now_ms: int, *, released: bool) -> LeaseRecord:
        """The next record of the same run, which its driver makes; or its last one."""
        return replace(self._next(self.owner, now_ms, self.lease_ms, self.replaced), released=released)

    @property
    def last_write_ms(self) -> int:
        """When a run of the query last renewed it. Of several queries, readers take the one that did last."""
        return self.renewed_ms if self.query_renewed_ms is None else self.query_renewed_ms

    def _next(self, owner: RunIdentity, now_ms: int, lease_ms: int, replaced: tuple[str, ...]) -> LeaseRecord:
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
        """The file's bytes."""
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
        return sealed_document(fields)

    @staticmethod
    def decode(data: bytes, where: str) -> LeaseRecord:
        """Read a lease file."""
        with readable(where, "lease", _MEND):
            fields = opened_document(data, where, LEASE_FORMAT, _MEND)
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
        """The record as format 1 has it, with its number, by which this release knows it again.

        Readers of format 1 go by `renewed_ms`: a record that was released is long over for them. They may not look for
        the driver's process, as machines share names and containers a machine's boot.
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
        """Read what a release wrote that knows format 1 only; None where the file repeats a record of this release."""
        with readable(where, "lease", _MEND):
            fields = json.loads(data)
            refuse_newer(fields["format"], _FORMAT_1, where)
            if _REPEATS in fields:
                return None
            # What it calls a process may be an executor, whose end is not the end of the run.
            application, run, host = (str(fields["owner"][name]) for name in ("application_id", "run_id", "host"))
            replaced = tuple(str(it) for it in fields.get("replaced", ()))
            return LeaseRecord(
                RunIdentity(application, run, host=host),
                int(fields["renewed_ms"]),
                0,
                replaced,
                format=_FORMAT_1,
            )
        raise AssertionError("unreachable: readable raises what it catches")


def refusal() -> bytes:
    """What stands in place of a lease of format 1 where the folder is claimed: its readers refuse the number."""
    return json.dumps({"format": LEASE_FORMAT}).encode()


@dataclass(frozen=True)
class Found:
    """The newest lease file.

    Parameters
    ----------
    number
        Its number; each record has the next one.
    record
        What it says.
    """

    number: int
    record: LeaseRecord


@dataclass(frozen=True)
class Watch:
    """A look at a record that may be renewed.

    Parameters
    ----------
    found
        What was found first.
    since_s
        When, by the watcher's own monotonic clock.
    """

    found: Found
    since_s: float


class Decision(enum.Enum):
    """What a run may do about the newest record."""

    RENEW = "it is this run's, or nobody's: write the next one"
    TAKE_OVER = "its owner has not renewed it for a whole lease: write the next one, and the owner is replaced"
    WATCH = "its owner may live: look again"
    LIVE = "its owner lives: refuse"
    REPLACED = "this run was replaced: stop"
    CLAIMED = "the folder is another query's by now: stop"


def knows_claim(record: LeaseRecord, claim: str | None) -> bool:
    """Whether a run with these pointers may have the folder at all, whoever holds the lease."""
    return (None if record.claim is None else record.claim.id) == claim


def takes_place(claim: Claim | None, record: LeaseRecord) -> bool:
    """Whether a claim that may be made now may take the place of a record's, or of none."""
    return knows_claim(record, None if claim is None else claim.instead_of)


def refuse_written_since(claim: Claim | None, found: Found | None, where: str) -> None:
    """Refuse a claim that is made now, where somebody has written a record since its pointers were read."""
    if claim is None or claim.after is None or (found is not None and not takes_place(claim, found.record)):
        return
    if claim.after != (0 if found is None else found.number):
        raise LiveRunError(
            f"the state at {where} was written since its checkpoint was read, and the last batch may be another: stop "
            "the old query first, then plan the new one, and start it"
        )


def decide(
    found: Found | None,
    me: RunIdentity,
    watch: Watch | None,
    now_s: float,
    lease_ms: int,
    over: bool,
    claim: str | None = None,
) -> Decision:
    """What a run may do.

    No two clocks are compared: whether an owner renews is watched for a whole lease, by the watcher's own clock.
    """
    if found is None:
        return Decision.RENEW
    record = found.record
    if not knows_claim(record, claim):
        return Decision.CLAIMED
    if me.plan in record.replaced:
        return Decision.REPLACED
    if record.owner.is_same_run(me) or record.released or over:
        return Decision.RENEW
    if watch is None:
        return Decision.WATCH
    # Numbers are not compared: beside a record of format 1, the number is that of the newest record of this release.
    if watch.found.record != found.record:
        return Decision.LIVE
    lasts_s = max(lease_ms, record.lease_ms) / 1000
    return Decision.TAKE_OVER if now_s - watch.since_s > lasts_s else Decision.WATCH
