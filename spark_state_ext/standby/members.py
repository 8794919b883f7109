"""Members: the hosts that keep standby replicas, and what each of them has.

A host writes its record with every heartbeat, each time under the next name. The names alone show other hosts that it
is alive; they read the record only when its generation has changed. So a heartbeat costs a host one listing, one write
and one delete, however many hosts there are. An observer judges by its own clock whether a host's name changes: clocks
of two machines are never compared.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise

from arrow_schemas.standby import MemberRecord, StandbySettings
from spark_state_ext.errors import CorruptError, MissingCheckpointError, UsageError, VersionSkewError
from spark_state_ext.files.folder import Folder
from spark_state_ext.files.members import MEMBERS_FOLDER, STANDBY_FOLDER, RecordName
from spark_state_ext.files.readable import read_document

__all__ = [
    "MEMBERS_FOLDER",
    "STANDBY_FOLDER",
    "MemberWatch",
    "Members",
    "Membership",
    "RecordName",
    "Seen",
    "describe_duplicate",
    "read_settings",
    "record_numbers",
    "write_settings",
]

_LOGGER = logging.getLogger("spark_state_ext")
_SETTINGS_NAME = "settings.json"
# A host counts as alive for this many heartbeats without a new record; after so many its record is removed.
_ALIVE_HEARTBEATS = 3
_REMOVED_HEARTBEATS = 100
# Two services have the same name if this many of the last looks show two new records of it.
_LOOKS, _DOUBLED_LOOKS = 4, 2


@dataclass(frozen=True)
class Seen:
    """What the names of records show.

    Parameters
    ----------
    alive
        The newest name of each live host.
    doubled
        Host names under which two services write.
    old
        Names of records that were not renewed for a long time and should be removed.
    strange
        Names that are not names of records.
    """

    alive: dict[str, RecordName]
    doubled: tuple[str, ...] = ()
    old: tuple[str, ...] = ()
    strange: tuple[str, ...] = ()


class MemberWatch:
    """Decides which hosts are alive, by the names that one observer has seen. No I/O.

    Only time in which this observer looks is counted: a pause between two looks counts as one heartbeat at most, for
    example if its process stood still or the store did not answer. Otherwise all hosts would seem dead after a pause.
    """

    def __init__(self, heartbeat_s: float) -> None:
        self.heartbeat_s = heartbeat_s
        # A longer heartbeat that was in force recently, and until when (by `_watched_s`) hosts may still use it.
        self._longer_s, self._longer_until_s = 0.0, 0.0
        self._watched_s = 0.0
        self._looked_s: float | None = None
        # When (by `_watched_s`) each present name was first seen, and the last new name of each host.
        self._first_seen_s: dict[str, float] = {}
        self._changed: dict[str, tuple[float, RecordName]] = {}
        self._doubled: dict[str, deque[bool]] = {}

    def use(self, heartbeat_s: float) -> None:
        """Use another heartbeat. If it is shorter, judge hosts by the longer one until all have had time to read it."""
        if heartbeat_s < self.heartbeat_s:
            self._longer_s = self._alive_s / _ALIVE_HEARTBEATS
            self._longer_until_s = self._watched_s + _ALIVE_HEARTBEATS * self._longer_s
        self.heartbeat_s = heartbeat_s

    @property
    def _alive_s(self) -> float:
        """How long a host counts as alive without a new record, seconds."""
        longer_s = self._longer_s if self._watched_s < self._longer_until_s else 0.0
        return _ALIVE_HEARTBEATS * max(self.heartbeat_s, longer_s)

    def observe(self, names: Iterable[str], now_s: float) -> Seen:
        """Take in a listing and return what it shows."""
        if self._looked_s is not None:
            self._watched_s += min(max(0.0, now_s - self._looked_s), self.heartbeat_s)
        self._looked_s = now_s
        parsed = {name: RecordName.parse(name) for name in sorted(set(names))}
        fresh: dict[str, list[RecordName]] = {}
        for text, name in parsed.items():
            if name is not None and text not in self._first_seen_s:
                fresh.setdefault(name.host, []).append(name)
        self._first_seen_s = {
            text: self._first_seen_s.get(text, self._watched_s) for text, name in parsed.items() if name
        }
        self._note_duplicates(fresh)
        newest: dict[str, RecordName] = {}
        for name in parsed.values():
            if name is not None:
                newest[name.host] = max(newest.get(name.host, name), name, key=lambda record: record.heartbeat)
        for host in fresh:
            self._changed[host] = (self._watched_s, newest[host])
        alive = {}
        for host, (since_s, last) in sorted(self._changed.items()):
            if self._watched_s - since_s < self._alive_s:
                alive[host] = newest.get(host, last)
        self._changed = {host: change for host, change in self._changed.items() if host in newest or host in alive}
        old_s = self._watched_s - _REMOVED_HEARTBEATS * self.heartbeat_s
        return Seen(
            alive,
            tuple(sorted(host for host, looks in self._doubled.items() if sum(looks) >= _DOUBLED_LOOKS)),
            tuple(text for text, since_s in self._first_seen_s.items() if since_s <= old_s),
            tuple(text for text, name in parsed.items() if name is None),
        )

    def is_recent(self, name: str) -> bool:
        """True if a name of the last listing was first seen less than three heartbeats ago."""
        return self._watched_s - self._first_seen_s[name] < self._alive_s

    def _note_duplicates(self, fresh: dict[str, list[RecordName]]) -> None:
        """Note which hosts wrote two records as of two services; a restarted service does so in one look only."""
        for host in self._changed:
            looks = self._doubled.setdefault(host, deque(maxlen=_LOOKS))
            looks.append(_are_of_two_services(fresh.get(host, ())))
        self._doubled = {host: looks for host, looks in self._doubled.items() if host in self._changed}


def _are_of_two_services(names: Iterable[RecordName]) -> bool:
    """True if records of one host are from two services.

    Several records alone prove nothing: a service writes the next record before it deletes the last one. But from one
    record to the next a service's generation grows by at most 1, and another service's is a random number away.
    """
    ordered = sorted(names, key=lambda name: (name.heartbeat, name.generation))
    return any(
        not 0 <= later.generation - name.generation <= later.heartbeat - name.heartbeat
        for name, later in pairwise(ordered)
    )


@dataclass(frozen=True)
class Members:
    """The live hosts, and what they have.

    Parameters
    ----------
    records
        The record of each live host, ascending by host. An unreadable record is replaced by one without replicas.
    problems
        Problems, one sentence each.
    unread
        Live hosts whose record could not be read yet, because they were just writing a new one.
    heartbeats
        The number of the newest record of each live host.
    doubled
        Host names under which two services write records.
    """

    records: tuple[MemberRecord, ...]
    problems: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    heartbeats: Mapping[str, int] = field(default_factory=dict)
    doubled: tuple[str, ...] = ()


class Membership:
    """A host's membership: it writes its own record and reads the others'."""

    def __init__(
        self, root: Folder, host: str, heartbeat_s: float, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        assert RecordName(host, 0, 0).text  # raises for an invalid host name
        self._files = root.child(STANDBY_FOLDER, MEMBERS_FOLDER)
        self._host = host
        self._clock_s = clock_s
        self.watch = MemberWatch(heartbeat_s)
        self._last_record: MemberRecord | None = None
        self._number: int | None = None
        self._name = ""
        # A restarted service must not be taken for the previous one, whose record other hosts may have read.
        self._generation = secrets.randbelow(10**12)
        # Names of this host's records that may exist, including those of earlier services.
        self._own_names: set[str] = set()
        self._read: dict[str, MemberRecord] = {}

    def heartbeat(self, record: MemberRecord) -> MemberRecord:
        """Write the record under the next name, and delete the previous one."""
        if record.host != self._host:
            raise UsageError(f"{self._host} cannot write the record of {record.host}")
        if self._number is None:
            before = [name for name in map(RecordName.parse, self._files.names()) if name and name.host == self._host]
            self._number = max((name.heartbeat for name in before), default=0)
            self._own_names.update(name.text for name in before)
        if self._last_record is None or self._last_record.decided_by != record.decided_by:
            self._generation += 1
        written = replace(record, generation=self._generation)
        # A number is never used twice, because a failed write may still arrive later.
        self._number += 1
        self._name = RecordName(self._host, self._number, self._generation).text
        self._own_names.add(self._name)
        self._files.put(self._name, written.encode())
        self._last_record = written
        for other in sorted(self._own_names - {self._name}):
            self._files.as_named().remove(other)
            self._own_names.discard(other)
        return written

    def look(self) -> Members:
        """Return the live hosts: one listing, and one read for each host whose generation has changed."""
        names = self._files.names()
        seen = self.watch.observe(names, self._clock_s())
        doubled = {host for host in seen.doubled if host != self._host}
        own_names = {
            text
            for text, name in ((text, RecordName.parse(text)) for text in names)
            if name and name.host == self._host
        }
        if self._last_record is not None and any(self.watch.is_recent(text) for text in own_names - self._own_names):
            doubled.add(self._host)
        problems = [describe_duplicate(host) for host in sorted(doubled)]
        problems += [f"{self._files.where(name)} is not a member record: remove it" for name in seen.strange]
        records = {} if self._last_record is None else {self._host: self._last_record}
        unread = []
        for host, name in seen.alive.items():
            if host != self._host:
                record = self._read_record(name, problems)
                if record is None:
                    unread.append(host)
                records[host] = record or MemberRecord(host, generation=name.generation)
        self._read = {host: record for host, record in self._read.items() if host in seen.alive}
        for text in seen.old:
            if text not in self._own_names:
                _LOGGER.warning("removing %s, which was not renewed for a long time", self._files.where(text))
                self._files.as_named().remove(text)
        heartbeats = {host: name.heartbeat for host, name in seen.alive.items()}
        return Members(
            tuple(records[host] for host in sorted(records)),
            tuple(problems),
            tuple(unread),
            heartbeats,
            tuple(sorted(doubled)),
        )

    def read_previous(self) -> MemberRecord | None:
        """Return the record that an earlier service of this host wrote; None if there is no readable one."""
        names = [name for name in map(RecordName.parse, self._files.names()) if name and name.host == self._host]
        for name in sorted(names, key=lambda name: -name.heartbeat):
            where = self._files.where(name.text)
            try:
                return MemberRecord.decode(self._files.get(name.text), where)
            except (MissingCheckpointError, CorruptError, VersionSkewError) as error:
                _LOGGER.warning("cannot read which replicas this host had: %s", error)
        return None

    def leave(self) -> None:
        """Delete this host's record. Other hosts count the host as alive for up to three more heartbeats."""
        for name in sorted(self._own_names):
            self._files.as_named().remove(name)
            self._own_names.discard(name)
        self._last_record = None

    def _read_record(self, name: RecordName, problems: list[str]) -> MemberRecord | None:
        """Return a host's record; None if it was replaced during each attempt to read it."""
        cached = self._read.get(name.host)
        if cached is not None and cached.generation == name.generation:
            return cached
        for candidate in (name, name._replace(heartbeat=name.heartbeat + 1)):
            where = self._files.where(candidate.text)
            try:
                record = MemberRecord.decode(self._files.get(candidate.text), where)
            except MissingCheckpointError:
                continue
            except (CorruptError, VersionSkewError) as error:
                problems.append(f"{error}. Until then {name.host} counts as alive and without replicas")
                return MemberRecord(name.host, generation=name.generation)
            if (record.host, record.generation) != (name.host, name.generation):
                problems.append(f"{where} is the record of {record.host}, generation {record.generation}: remove it")
                return MemberRecord(name.host, generation=name.generation)
            self._read[name.host] = record
            return record
        return cached


def describe_duplicate(host: str) -> str:
    """Return the problem text for two services under one host name."""
    return (
        f"two standby services run under the host name {host!r}, and each takes the other's replicas for its own: stop "
        "one of them, or set a different SPARK_STATE_EXT_HOST on each host"
    )


def record_numbers(root: Folder) -> dict[str, int]:
    """Return the number of each host's newest record."""
    numbers: dict[str, int] = {}
    for name in map(RecordName.parse, root.child(STANDBY_FOLDER, MEMBERS_FOLDER).names()):
        if name is not None:
            numbers[name.host] = max(numbers.get(name.host, 0), name.heartbeat)
    return numbers


def read_settings(root: Folder) -> StandbySettings:
    """Return the standby settings of a root; the defaults if it has none."""
    return read_document(root.child(STANDBY_FOLDER), _SETTINGS_NAME, StandbySettings.decode) or StandbySettings()


def write_settings(root: Folder, settings: StandbySettings) -> None:
    """Write the standby settings of a root, for all hosts."""
    root.child(STANDBY_FOLDER).put(_SETTINGS_NAME, settings.encode())
