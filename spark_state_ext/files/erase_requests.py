"""The folder ``<query folder>/erase``: requests to erase keys, and records of the requests that are done.

A new request gets the first free number. The query's calls read it; the query's first bucket records that it is done,
and finally removes it. The record stays, so a number is never used twice.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

from arrow_schemas.erase import (
    ERASE_FOLDER,
    EraseDone,
    EraseRequest,
    format_done_name,
    format_request_name,
    parse_erase_name,
)
from spark_state_ext.errors import CorruptFileError, MissingCheckpointError, StorageError
from spark_state_ext.files.folder import Folder
from spark_state_ext.files.sealed_table import read_sealed_table, seal_table

__all__ = ["EraseFolder", "EraseNumbers", "decode_request", "encode_request"]

# In each round, some process writes a request.
_ROUNDS_MAX = 100


@dataclass(frozen=True)
class EraseNumbers:
    """Numbers in a listing of the folder.

    Parameters
    ----------
    requests
        Numbers of the requests that exist.
    done
        Numbers of the requests that are done, including requests that were removed.
    """

    requests: frozenset[int] = frozenset()
    done: frozenset[int] = frozenset()

    @staticmethod
    def of(names: Iterable[str]) -> EraseNumbers:
        """Return the numbers in a listing; other files are skipped."""
        parsed = [parsed_name for parsed_name in map(parse_erase_name, names) if parsed_name is not None]
        return EraseNumbers(
            frozenset(number for number, done in parsed if not done),
            frozenset(number for number, done in parsed if done),
        )

    def through(self, number: int) -> int:
        """Return the largest number that is reached from `number` without a gap.

        A listing may have a request and miss an earlier one, if both are made while it is read.
        """
        existing = self.requests | self.done
        while number + 1 in existing:
            number += 1
        return number

    def missing(self, before: int) -> list[int]:
        """Return the numbers before `before` that have neither a request nor a record."""
        existing = self.requests | self.done
        return [number for number in range(1, before) if number not in existing]


def encode_request(request: EraseRequest) -> bytes:
    """Return the bytes of a request's file."""
    return seal_table(request.schema(), request.keys)


def decode_request(data: bytes, where: str) -> EraseRequest:
    """Read a request from its file's bytes."""
    return read_sealed_table(data, where, EraseRequest.of, lambda request: int(request.keys.num_rows))


class EraseFolder:
    """The requests of one query folder."""

    def __init__(self, query_folder: Folder) -> None:
        self.files = query_folder.child(ERASE_FOLDER)

    def numbers(self) -> EraseNumbers:
        """Return the numbers of requests and records, from one listing."""
        return EraseNumbers.of(self.files.names())

    def add(self, request: EraseRequest) -> int:
        """Write a request under the next free number; return that number."""
        data = encode_request(request)
        for _ in range(_ROUNDS_MAX):
            numbers = self.numbers()
            number = max(numbers.requests | numbers.done, default=0) + 1
            name = format_request_name(number)
            # A pointer may have dealt with a request that was removed since. So fill its number with a request without
            # keys, and never give it to other keys.
            for gap in numbers.missing(number):
                self.files.create(format_request_name(gap), encode_request(request.emptied(uuid.uuid4().hex)))
            if self.files.create(name, data) and self._is_there(name, request.id):
                return number
        raise StorageError(
            f"no erase request could be written to {self.files.root}: the store says that each number is taken, but "
            "does not list it. Try again."
        )

    def _is_there(self, name: str, request_id: str) -> bool:
        """True if the file is this request: stores without exclusive creation may let two requests have one number."""
        return decode_request(self.files.get(name), self.files.where(name)).id == request_id

    def request(self, number: int) -> EraseRequest:
        """Read the request with this number."""
        name = format_request_name(number)
        return decode_request(self.files.get(name), self.files.where(name))

    def done(self, number: int) -> EraseDone | None:
        """Read the record that a request is done; None if it is not done."""
        name = format_done_name(number)
        try:
            data = self.files.get(name)
        except MissingCheckpointError:
            return None
        return EraseDone.decode(data, self.files.where(name))

    def note_done(self, number: int, record: EraseDone) -> None:
        """Record that a request is done; another process may have recorded it already."""
        self.files.create(format_done_name(number), record.encode())

    def take_back(self, number: int) -> None:
        """Remove the record that a request is done, as the query went back."""
        self.files.as_named().remove(format_done_name(number))

    def replace(self, number: int, request: EraseRequest) -> None:
        """Replace a request by one without keys, or with other keys if no query carries it out."""
        self.files.put(format_request_name(number), encode_request(request))

    def id_of(self, number: int) -> str | None:
        """Return the id of a request, from its record if it is done; None if there is neither request nor record."""
        record = self.done(number)
        if record is not None:
            return record.id
        try:
            return self.request(number).id
        except MissingCheckpointError:
            return None

    def withdraw(self, number: int, empty_request: EraseRequest) -> None:
        """Remove all keys from a request. Its file stays: callers wait for its number, and erase marks name its id."""
        with suppress(CorruptFileError, MissingCheckpointError):
            empty_request = self.request(number).emptied()
        try:
            self.done(number)
        except CorruptFileError:
            self.take_back(number)
        self.replace(number, empty_request)

    def drop(self, number: int) -> None:
        """Remove a request; its record that it is done stays."""
        self.files.as_named().remove(format_request_name(number))
