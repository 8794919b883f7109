"""The erase folder of a simulated query: who asks, what a store does meanwhile, and a record of all that was ever asked.

Everybody goes by the real code, and by a real folder in memory. At any operation in it the store may fail, before or after it was done,
or another asker may come in between; a listing that others write behind may have the later one of their files and lack the earlier one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import fsspec
from sim_parts import WrongStateError

from arrow_schemas import OperatorFile
from arrow_schemas.erase import EraseDone, format_request_name, parse_erase_name
from spark_state_ext import erase_keys, erase_status, withdraw_erasure
from spark_state_ext.errors import StorageError
from spark_state_ext.files.erase_requests import decode_request
from spark_state_ext.files.folder import Folder

__all__ = ["OPERATOR", "Asked", "Asking"]

OPERATOR, QUERY = "count", "q"
_FIELD = '{"type":"struct","fields":[{"name":"%s","type":"long","nullable":true,"metadata":{}}]}'
_OPERATIONS = ("names", "get", "create", "put", "remove")
_FAILS, _FAILS_AFTER, _ASKS, _OVERTAKES = range(4)


@dataclass
class Asked:
    """A request that was made.

    Parameters
    ----------
    number, id
        As in the folder.
    keys
        What it named when it was made.
    at
        When that was.
    withdrawn
        It names no key any more.
    spoilt
        Its file cannot be read.
    dropped
        The query has removed it.
    """

    number: int
    id: str
    keys: frozenset[int]
    at: int
    withdrawn: bool = False
    spoilt: bool = False
    dropped: bool = False


class Asking:
    """Askers, and the folder that they write to.

    Parameters
    ----------
    name
        Of the root in memory.
    buckets
        How many the operator has.
    clock
        Gives the next moment; each is larger than those before.
    """

    def __init__(self, name: str, buckets: int, clock: Callable[[], int]) -> None:
        self.root = f"memory://{name}"
        self.files = Folder(self.root).child(OPERATOR, QUERY)
        self.files.put("operator_0.json", OperatorFile(OPERATOR, QUERY, buckets, _FIELD % "k", _FIELD % "n").encode())
        self._name = name
        self._clock = clock
        # What the folder has, or had until the query removed it; a folder that was lost is forgotten.
        self.requests: dict[int, Asked] = {}
        self.records: dict[int, EraseDone] = {}
        # What is to happen: at which operation from now, what, and with which number.
        self._armed: list[list[int]] = []
        self.failures = self.asked = self.overtaken = self.dropped = self.taken_back = 0
        # Called with the number of a request of which somebody says that it is done.
        self.told: Callable[[int], None] = lambda _: None

    def close(self) -> None:
        """Remove everything."""
        fsspec.filesystem("memory").rm(f"/{self._name}", recursive=True)

    # -- askers ------------------------------------------------------------------------------------

    def ask(self, *keys: int) -> None:
        """Somebody asks; where the store fails, he may or may not have done so."""
        try:
            erase_keys(self.root, {"k": list(keys)}, operator=OPERATOR)
        except StorageError:
            return

    def withdraw(self, number: int) -> None:
        """Somebody withdraws a request."""
        try:
            withdraw_erasure(self.root, number, operator=OPERATOR)
        except StorageError:
            return

    def spoil(self, number: int) -> None:
        """A request's file is damaged."""
        asked = self.requests.get(number)
        if asked is not None and not asked.dropped:
            path = f"/{self._name}/{OPERATOR}/{QUERY}/erase/{format_request_name(number)}"
            memory = fsspec.filesystem("memory")
            memory.pipe_file(path, memory.cat_file(path)[:-40])
            asked.spoilt = True

    def lose(self) -> None:
        """The folder is gone, as after a move to another root."""
        path = f"/{self._name}/{OPERATOR}/{QUERY}/erase"
        memory = fsspec.filesystem("memory")
        if memory.exists(path):
            memory.rm(path, recursive=True)
        self.requests.clear()
        self.records.clear()

    def states(self) -> dict[int, str]:
        """What `erase_status` says, which has to be what the files say."""
        found = {it.number: it for it in erase_status(self.root, operator=OPERATOR)}
        for number, asked in self.requests.items():
            record = self.records.get(number)
            done = record is not None and (record.id == asked.id or asked.dropped)
            wanted = "unreadable" if asked.spoilt and not asked.dropped else "done" if done else "waiting"
            status = found.get(number)
            if status is None or status.state != wanted or status.kept == asked.dropped:
                raise WrongStateError(f"the status of request {number} is {status}, and it is {wanted}")
        return {number: it.state for number, it in found.items()}

    # -- the store ---------------------------------------------------------------------------------

    def arm(self, at: int, kind: int, number: int) -> None:
        """One of the next operations in the folder is special."""
        self._armed.append([at, kind % 4, number])

    def disarm(self) -> None:
        """None is."""
        self._armed.clear()

    def patches(self) -> list[tuple[Any, str, Any]]:
        """What stands in the place of folders' operations."""
        return [(Folder, name, self._hooked(name, getattr(Folder, name))) for name in _OPERATIONS]

    def _hooked(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(folder: Folder, *args: Any) -> Any:
            if not folder.root.startswith(self.root) or folder.name != "erase":
                return real(folder, *args)
            for it in self._armed:
                it[0] -= 1
            hit = next((it for it in self._armed if it[0] < 0), None)
            if hit is not None:
                self._armed.remove(hit)
            return self._done(name, lambda: real(folder, *args), args, hit)

        return call

    def _done(self, name: str, real: Callable[[], Any], args: tuple[Any, ...], hit: list[int] | None) -> Any:
        kind, number = (-1, 0) if hit is None else hit[1:]
        if kind == _FAILS:
            self.failures += 1
            raise StorageError("fails on purpose")
        if kind == _ASKS:
            self.ask(*_three(number))
        found = real()
        if kind == _OVERTAKES and name == "names":
            # The first of two is written behind the listing, the second before it.
            there = set(found)
            self.ask(*_three(number))
            after_first = set(real())
            self.ask(*_three(number // 8))
            self.overtaken += 1
            found = sorted(there | (set(real()) - after_first))
        if name in ("create", "put") and found is not False:
            self._written(args[0], args[1])
        elif name == "remove":
            self._removed(args[0])
        if kind == _FAILS_AFTER:
            self.failures += 1
            raise StorageError("fails on purpose, afterwards")
        return found

    def _written(self, name: str, data: bytes) -> None:
        number, done = parse_erase_name(name) or (0, False)
        if done:
            self.records[number] = EraseDone.decode(data, name)
            self.told(number)
            return
        request = decode_request(data, name)
        keys = frozenset(request.keys.column(0).to_pylist())
        before = self.requests.get(number)
        if before is not None and before.id == request.id:
            before.withdrawn, before.dropped = before.withdrawn or not keys, False
            return
        self.asked += 1
        withdrawn = not keys
        if before is not None and withdrawn:
            # Withdrawing a request that cannot be read writes one with another id. A call may still carry out what its
            # process has read before, as it may with a request that was withdrawn while it could be read.
            keys = before.keys
        self.requests[number] = Asked(number, request.id, keys, self._clock(), withdrawn=withdrawn)

    def _removed(self, name: str) -> None:
        number, done = parse_erase_name(name) or (0, False)
        if done:
            self.taken_back += self.records.pop(number, None) is not None
        elif number in self.requests:
            self.requests[number].dropped = True
            self.dropped += 1


def _three(number: int) -> list[int]:
    """Keys, every other one."""
    return [(number + further) % 8 for further in (0, 2, 4)]
