"""The lease's files: numbered records, of which the one with the highest number is in force.

A record is never rewritten. To take the lease, a process makes the file with the next number. If several processes try,
only one succeeds, provided that the file system can create a file exclusively. So a late write, after others have gone
on, has no effect; and there is a record at every moment, even on stores whose rename does not replace.
"""

from __future__ import annotations

import re

from spark_state_ext.errors import MissingCheckpointError, StorageError, VersionSkewError
from spark_state_ext.files.folder import Folder
from spark_state_ext.files.layout import LEASE_FOLDER, LEASE_FORMAT_1_NAME
from spark_state_ext.ownership.claim_notes import note_replaced_claim
from spark_state_ext.ownership.lease_record import Claim, LeaseRecord, NumberedRecord, refusal

__all__ = ["LeaseLog", "last_renewed_ms"]

_NAME = re.compile(r"(\d{16})(?:-[0-9a-f]{32})?\.json")
# How many records are kept, for slow readers.
_KEPT = 2
_ROUNDS_MAX = 20


class LeaseLog:
    """The lease's files of one query folder."""

    def __init__(self, query_folder: Folder) -> None:
        self._query_folder = query_folder
        self._files = query_folder.child(LEASE_FOLDER)
        self._has_format_1 = False

    @property
    def root(self) -> str:
        """The query folder, for messages."""
        return self._query_folder.root

    def newest(self, *, first: bool = False) -> NumberedRecord | None:
        """Return the record in force; None if there is no record. With `first`, also look for a lease of format 1."""
        newest = self._newest_record()
        if newest is not None and newest.record.claim is not None:
            # Releases that write format 1 do not know claims, so they must not hold this lease.
            return newest
        if first or newest is None or newest.record.format_1_too:
            try:
                format_1_record = self._read_format_1()
            except VersionSkewError:
                # This happens if the folder was claimed since the record was read.
                newest = self._newest_record()
                if newest is None or (newest.record.claim is None and not self._is_refusal_left()):
                    raise
                return newest
            if format_1_record is not None:
                return NumberedRecord(0 if newest is None else newest.number, format_1_record)
        return newest

    def _newest_record(self) -> NumberedRecord | None:
        for _ in range(_ROUNDS_MAX):
            names = self._names()
            if not names:
                return None
            number = _number_of(names[-1])
            try:
                records = [self._read(name) for name in names if _number_of(name) == number]
            except MissingCheckpointError:
                continue  # a newer record has replaced it meanwhile
            return NumberedRecord(number, _choose_in_force(records))
        raise StorageError(f"the lease of {self.root} changes faster than it can be read: find out what writes there")

    def append(self, after: NumberedRecord | None, record: LeaseRecord) -> bool:
        """Make the next record; return False if another record with its number is in force."""
        number = 1 if after is None else after.number + 1
        if record.claim is not None and _is_new(record.claim, after):
            note_replaced_claim(self._query_folder, record.claim, after)
        if self._files.creates_exclusively:
            is_in_force = self._files.create(f"{number:016d}.json", record.encode())
        else:
            # No record is overwritten here either; if two are made at once, all readers agree on which is in force.
            self._files.put(f"{number:016d}-{record.nonce}.json", record.encode())
            newest = self._newest_record()
            is_in_force = newest is not None and newest.record.nonce == record.nonce
        if is_in_force:
            if record.claim is not None:
                if after is None or after.record.claim is None:
                    self._query_folder.put(LEASE_FORMAT_1_NAME, refusal())
            elif record.format_1_too:
                self._query_folder.put(LEASE_FORMAT_1_NAME, record.encode_format_1(number))
            elif self._has_format_1 or (after is not None and after.record.claim is not None):
                self._query_folder.as_named().remove(LEASE_FORMAT_1_NAME)
                self._has_format_1 = False
            self._drop_before(number - _KEPT + 1)
        return is_in_force

    def _drop_before(self, number: int) -> None:
        for name in self._names():
            if _number_of(name) < number:
                self._files.as_named().remove(name)

    def _names(self) -> list[str]:
        return [name for name in self._files.names() if _NAME.fullmatch(name)]

    def _read(self, name: str) -> LeaseRecord:
        return LeaseRecord.decode(self._files.get(name), self._files.where(name))

    def _is_refusal_left(self) -> bool:
        """True if a release of a claim was stopped before it removed the file that refuses readers of format 1."""
        try:
            return self._query_folder.get(LEASE_FORMAT_1_NAME) == refusal()
        except MissingCheckpointError:
            return True  # removed a moment ago

    def _read_format_1(self) -> LeaseRecord | None:
        """Read the lease of a release that knows only format 1, if there is one."""
        try:
            data = self._query_folder.get(LEASE_FORMAT_1_NAME)
        except MissingCheckpointError:
            return None
        self._has_format_1 = True
        return LeaseRecord.decode_format_1(data, self._query_folder.where(LEASE_FORMAT_1_NAME))


def last_renewed_ms(query_folder: Folder) -> int | None:
    """Return when a run of the query last renewed its lease, by that run's clock; None if there is no lease."""
    newest = LeaseLog(query_folder).newest(first=True)
    return None if newest is None else newest.record.last_write_ms


def _is_new(claim: Claim, after: NumberedRecord | None) -> bool:
    """True if a claim is made now. A claim that is restored, or known from pointers, has been built upon already."""
    old_claim = None if after is None else after.record.claim
    return not claim.built and (old_claim is None or old_claim.id != claim.id)


def _number_of(name: str) -> int:
    return int(name[:16])


def _choose_in_force(records: list[LeaseRecord]) -> LeaseRecord:
    """Return which of several records with one number is in force: a record that no other one says it replaced."""
    return min(
        records, key=lambda record: (any(record.owner.plan in other.replaced for other in records), record.nonce)
    )
