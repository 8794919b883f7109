"""The folder ``<query folder>/erase``: which keys users want gone, and which of their requests are done.

Whoever asks makes the request with the first number that is free. The query's calls read it, and its first bucket
writes down that it is done and removes it in the end. The record that it is done stays, so no number is used twice.
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
    done_name,
    parse_erase_name,
    request_name,
)
from spark_state_ext.errors import CorruptFileError, MissingCheckpointError, StorageError
from spark_state_ext.files.folder import Folder
from spark_state_ext.files.sealed_table import sealed_table, unsealed_table

__all__ = ["EraseFolder", "EraseNumbers", "decode_request", "encode_request"]

# Each round ends with somebody's request written.
_ROUNDS_MAX = 100


@dataclass(frozen=True)
class EraseNumbers:
    """What a listing of the folder tells.

    Parameters
    ----------
    requests
        Numbers of the requests that are there.
    done
        Numbers of those that are done; of some the request is gone.
    """

    requests: frozenset[int] = frozenset()
    done: frozenset[int] = frozenset()

    @staticmethod
    def of(names: Iterable[str]) -> EraseNumbers:
        """Those of a listing; other files are passed over."""
        parsed = [found for found in map(parse_erase_name, names) if found is not None]
        return EraseNumbers(
            frozenset(number for number, done in parsed if not done),
            frozenset(number for number, done in parsed if done),
        )

    def through(self, number: int) -> int:
        """The largest number up to which, from the one after `number` on, none is missing.

        A listing may have a request and lack one from before it, where both are made while it is read.
        """
        known = self.requests | self.done
        while number + 1 in known:
            number += 1
        return number

    def missing(self, before: int) -> list[int]:
        """Numbers before one of which there is nothing."""
        known = self.requests | self.done
        return [number for number in range(1, before) if number not in known]


def encode_request(request: EraseRequest) -> bytes:
    """The file's bytes."""
    return sealed_table(request.schema(), request.keys)


def decode_request(data: bytes, where: str) -> EraseRequest:
    """Read a request."""
    return unsealed_table(data, where, EraseRequest.of, lambda found: int(found.keys.num_rows))


class EraseFolder:
    """The requests of one query folder."""

    def __init__(self, query_folder: Folder) -> None:
        self.files = query_folder.child(ERASE_FOLDER)

    def numbers(self) -> EraseNumbers:
        """Which requests there are; one listing."""
        return EraseNumbers.of(self.files.names())

    def add(self, request: EraseRequest) -> int:
        """Write a request down under the next number, which it gives."""
        data = encode_request(request)
        for _ in range(_ROUNDS_MAX):
            numbers = self.numbers()
            number = max(numbers.requests | numbers.done, default=0) + 1
            name = request_name(number)
            # Pointers may say that they dealt with one that somebody has removed, so nobody's keys get its number.
            for missing in numbers.missing(number):
                self.files.create(request_name(missing), encode_request(request.emptied(uuid.uuid4().hex)))
            if self.files.create(name, data) and self._is_there(name, request.id):
                return number
        raise StorageError(
            f"no erase request could be written to {self.files.root}: the store says that each number is taken, and "
            "does not list it. Try again."
        )

    def _is_there(self, name: str, request_id: str) -> bool:
        """Whether it is ours: stores that create not exclusively may let two have one number."""
        return decode_request(self.files.get(name), self.files.where(name)).id == request_id

    def request(self, number: int) -> EraseRequest:
        """A request."""
        name = request_name(number)
        return decode_request(self.files.get(name), self.files.where(name))

    def done(self, number: int) -> EraseDone | None:
        """The record that a request is done; None: it is not."""
        name = done_name(number)
        try:
            data = self.files.get(name)
        except MissingCheckpointError:
            return None
        return EraseDone.decode(data, self.files.where(name))

    def note_done(self, number: int, record: EraseDone) -> None:
        """Write down that a request is done; another process may have done so."""
        self.files.create(done_name(number), record.encode())

    def take_back(self, number: int) -> None:
        """A request is not done any more, as the query went back."""
        self.files.as_named().remove(done_name(number))

    def replace(self, number: int, request: EraseRequest) -> None:
        """Have a request name other keys, where nobody carries it out, or none."""
        self.files.put(request_name(number), encode_request(request))

    def id_of(self, number: int) -> str | None:
        """Id of a request, told by the record that it is done where there is one; None: nothing is there."""
        record = self.done(number)
        if record is not None:
            return record.id
        try:
            return self.request(number).id
        except MissingCheckpointError:
            return None

    def withdraw(self, number: int, nothing: EraseRequest) -> None:
        """Have a request name no key any more. The file stays: others wait for its number, and marks name its id."""
        with suppress(CorruptFileError, MissingCheckpointError):
            nothing = self.request(number).emptied()
        try:
            self.done(number)
        except CorruptFileError:
            self.take_back(number)
        self.replace(number, nothing)

    def drop(self, number: int) -> None:
        """Remove a request; the record that it is done stays."""
        self.files.as_named().remove(request_name(number))
