"""The lease's files: numbered records, of which the one with the highest number counts.

A record is never rewritten. Whoever wants to hold the lease makes the file with the next number, and of several that
try only one succeeds, where the file system can create a file exclusively. So a write that arrives late, when others
have gone on, changes nothing; and at no moment is there no record, on stores whose rename does not replace too.
"""

from __future__ import annotations

import re

from spark_state_ext.errors import MissingCheckpointError, StorageError, VersionSkewError
from spark_state_ext.files.folder import Folder
from spark_state_ext.files.layout import LEASE_FOLDER, LEASE_FORMAT_1_NAME
from spark_state_ext.ownership.claim_notes import note_replaced_claim
from spark_state_ext.ownership.lease_record import Claim, Found, LeaseRecord, refusal

__all__ = ["LeaseLog", "last_renewed_ms"]

_NAME = re.compile(r"(\d{16})(?:-[0-9a-f]{32})?\.json")
# Records that a slow reader may still be about to read.
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

    def newest(self, *, first: bool = False) -> Found | None:
        """The record that counts; None where there is none."""
        found = self._newest_record()
        if found is not None and found.record.claim is not None:
            # Releases that write format 1 know no claims, and so none of them may hold it.
            return found
        if first or found is None or found.record.format_1_too:
            try:
                old = self._of_format_1()
            except VersionSkewError:
                # So it is where somebody has claimed the folder since the look before.
                found = self._newest_record()
                if found is None or (found.record.claim is None and not self._is_refusal_left()):
                    raise
                return found
            if old is not None:
                return Found(0 if found is None else found.number, old)
        return found

    def _newest_record(self) -> Found | None:
        for _ in range(_ROUNDS_MAX):
            names = self._names()
            if not names:
                return None
            number = _number(names[-1])
            try:
                records = [self._read(name) for name in names if _number(name) == number]
            except MissingCheckpointError:
                continue  # others have gone on meanwhile
            return Found(number, _first(records))
        raise StorageError(f"the lease of {self.root} changes faster than it can be read: look who writes there")

    def append(self, after: Found | None, record: LeaseRecord) -> bool:
        """Make the next record; whether it is the one that counts."""
        number = 1 if after is None else after.number + 1
        if record.claim is not None and _is_new(record.claim, after):
            note_replaced_claim(self._query_folder, record.claim, after)
        if self._files.creates_exclusively:
            made = self._files.create(f"{number:016d}.json", record.encode())
        else:
            # Nobody's record is overwritten here either; should two be made at once, all agree on which counts.
            self._files.put(f"{number:016d}-{record.nonce}.json", record.encode())
            found = self._newest_record()
            made = found is not None and found.record.nonce == record.nonce
        if made:
            if record.claim is not None:
                if after is None or after.record.claim is None:
                    self._query_folder.put(LEASE_FORMAT_1_NAME, refusal())
            elif record.format_1_too:
                self._query_folder.put(LEASE_FORMAT_1_NAME, record.encode_format_1(number))
            elif self._has_format_1 or (after is not None and after.record.claim is not None):
                self._query_folder.as_named().remove(LEASE_FORMAT_1_NAME)
                self._has_format_1 = False
            self._drop_before(number - _KEPT + 1)
        return made

    def _drop_before(self, number: int) -> None:
        for name in self._names():
            if _number(name) < number:
                self._files.as_named().remove(name)

    def _names(self) -> list[str]:
        return [name for name in self._files.names() if _NAME.fullmatch(name)]

    def _read(self, name: str) -> LeaseRecord:
        return LeaseRecord.decode(self._files.get(name), self._files.where(name))

    def _is_refusal_left(self) -> bool:
        """Whether a release was stopped before it removed this release's refusal beside the lease."""
        try:
            return self._query_folder.get(LEASE_FORMAT_1_NAME) == refusal()
        except MissingCheckpointError:
            return True  # removed a moment ago

    def _of_format_1(self) -> LeaseRecord | None:
        """What a release wrote that knows format 1 only."""
        try:
            data = self._query_folder.get(LEASE_FORMAT_1_NAME)
        except MissingCheckpointError:
            return None
        self._has_format_1 = True
        return LeaseRecord.decode_format_1(data, self._query_folder.where(LEASE_FORMAT_1_NAME))


def last_renewed_ms(query_folder: Folder) -> int | None:
    """When a run of the query last renewed its lease, by that run's clock; None: there is no lease."""
    found = LeaseLog(query_folder).newest(first=True)
    return None if found is None else found.record.last_write_ms


def _is_new(claim: Claim, after: Found | None) -> bool:
    """Whether a claim is made now. One that is put back, or taken from pointers, is built upon already."""
    before = None if after is None else after.record.claim
    return not claim.built and (before is None or before.id != claim.id)


def _number(name: str) -> int:
    return int(name[:16])


def _first(records: list[LeaseRecord]) -> LeaseRecord:
    """Of records with one number, the one that counts: who replaced the others' writers knows it, they do not."""
    return min(records, key=lambda it: (any(it.owner.plan in other.replaced for other in records), it.nonce))
