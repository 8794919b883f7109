"""The erase folder of a simulated query: its users, faults of its store, and a model of all requests that were made.

All of them run the product's code on a folder in memory. At any operation in the folder the store may fail, before or
after it carried out the operation, or another user may come in between. A listing during which other users write two
files may contain the later file without the earlier one.
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

__all__ = ["OPERATOR", "ModelRequest", "EraseUsers"]

OPERATOR, QUERY = "count", "q"
_FIELD = '{"type":"struct","fields":[{"name":"%s","type":"long","nullable":true,"metadata":{}}]}'
_OPERATIONS = ("names", "get", "create", "put", "remove")
_FAILS, _FAILS_AFTER, _ASKS, _OVERTAKES = range(4)


@dataclass
class ModelRequest:
    """A request that was made, as the model knows it.

    Parameters
    ----------
    number, id
        As in the folder.
    keys
        The keys that it named when it was made.
    made_at
        When it was made.
    withdrawn
        Whether it no longer names any key.
    damaged
        Whether its file cannot be read.
    removed
        Whether the query has removed its file.
    """

    number: int
    id: str
    keys: frozenset[int]
    made_at: int
    withdrawn: bool = False
    damaged: bool = False
    removed: bool = False


class EraseUsers:
    """Users who make erase requests, and the folder that they write to.

    Parameters
    ----------
    name
        Name of the root in memory.
    buckets
        Number of the operator's buckets.
    clock
        Returns the next moment; each is later than those before.
    """

    def __init__(self, name: str, buckets: int, clock: Callable[[], int]) -> None:
        self.root = f"memory://{name}"
        self.files = Folder(self.root).child(OPERATOR, QUERY)
        self.files.put("operator_0.json", OperatorFile(OPERATOR, QUERY, buckets, _FIELD % "k", _FIELD % "n").encode())
        self._name = name
        self._clock = clock
        # What the folder has, or had until the query removed it. If the folder is lost, this is cleared.
        self.requests: dict[int, ModelRequest] = {}
        self.records: dict[int, EraseDone] = {}
        # Faults to come: the number of operations until then, the kind, and a number that gives keys.
        self._faults: list[list[int]] = []
        self.failures = self.made_requests = self.overtaken_listings = self.removed_requests = (
            self.withdrawn_records
        ) = 0
        # Called with the number of a request when a record says that the request is done.
        self.on_done_record: Callable[[int], None] = lambda _: None

    def close(self) -> None:
        """Remove everything."""
        fsspec.filesystem("memory").rm(f"/{self._name}", recursive=True)

    # -- users -------------------------------------------------------------------------------------

    def ask(self, *keys: int) -> None:
        """Make a request; if the store fails, the request may exist or not."""
        try:
            erase_keys(self.root, {"k": list(keys)}, operator=OPERATOR)
        except StorageError:
            return

    def withdraw(self, number: int) -> None:
        """Withdraw a request."""
        try:
            withdraw_erasure(self.root, number, operator=OPERATOR)
        except StorageError:
            return

    def spoil(self, number: int) -> None:
        """Damage a request's file."""
        request = self.requests.get(number)
        if request is not None and not request.removed:
            path = f"/{self._name}/{OPERATOR}/{QUERY}/erase/{format_request_name(number)}"
            memory = fsspec.filesystem("memory")
            memory.pipe_file(path, memory.cat_file(path)[:-40])
            request.damaged = True

    def lose(self) -> None:
        """Lose the folder, as after a move to another root."""
        path = f"/{self._name}/{OPERATOR}/{QUERY}/erase"
        memory = fsspec.filesystem("memory")
        if memory.exists(path):
            memory.rm(path, recursive=True)
        self.requests.clear()
        self.records.clear()

    def states(self) -> dict[int, str]:
        """Return the states that `erase_status` reports; raises if they do not match the files."""
        statuses = {status.number: status for status in erase_status(self.root, operator=OPERATOR)}
        for number, request in self.requests.items():
            record = self.records.get(number)
            done = record is not None and (record.id == request.id or request.removed)
            expected = "unreadable" if request.damaged and not request.removed else "done" if done else "waiting"
            status = statuses.get(number)
            if status is None or status.state != expected or status.kept == request.removed:
                raise WrongStateError(f"the status of request {number} is {status}, but should be {expected}")
        return {number: status.state for number, status in statuses.items()}

    # -- the store ---------------------------------------------------------------------------------

    def set_fault(self, at: int, kind: int, number: int) -> None:
        """Let one of the next operations in the folder fail or be disturbed."""
        self._faults.append([at, kind % 4, number])

    def clear_faults(self) -> None:
        """Remove all faults that did not happen yet."""
        self._faults.clear()

    def patches(self) -> list[tuple[Any, str, Any]]:
        """Replacements of folders' operations while a history runs."""
        return [(Folder, name, self._add_hook(name, getattr(Folder, name))) for name in _OPERATIONS]

    def _add_hook(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def run_operation(folder: Folder, *args: Any) -> Any:
            if not folder.root.startswith(self.root) or folder.name != "erase":
                return real(folder, *args)
            for waiting in self._faults:
                waiting[0] -= 1
            fault = next((waiting for waiting in self._faults if waiting[0] < 0), None)
            if fault is not None:
                self._faults.remove(fault)
            return self._run_operation(name, lambda: real(folder, *args), args, fault)

        return run_operation

    def _run_operation(self, name: str, real: Callable[[], Any], args: tuple[Any, ...], fault: list[int] | None) -> Any:
        kind, number = (-1, 0) if fault is None else fault[1:]
        if kind == _FAILS:
            self.failures += 1
            raise StorageError("fails on purpose")
        if kind == _ASKS:
            self.ask(*_list_keys(number))
        result = real()
        if kind == _OVERTAKES and name == "names":
            # The first of two files is written after the listing passed its name, the second one before.
            there = set(result)
            self.ask(*_list_keys(number))
            after_first = set(real())
            self.ask(*_list_keys(number // 8))
            self.overtaken_listings += 1
            result = sorted(there | (set(real()) - after_first))
        if name in ("create", "put") and result is not False:
            self._note_written(args[0], args[1])
        elif name == "remove":
            self._note_removed(args[0])
        if kind == _FAILS_AFTER:
            self.failures += 1
            raise StorageError("fails on purpose, afterwards")
        return result

    def _note_written(self, name: str, data: bytes) -> None:
        number, done = parse_erase_name(name) or (0, False)
        if done:
            self.records[number] = EraseDone.decode(data, name)
            self.on_done_record(number)
            return
        request = decode_request(data, name)
        keys = frozenset(request.keys.column(0).to_pylist())
        before = self.requests.get(number)
        if before is not None and before.id == request.id:
            before.withdrawn, before.removed = before.withdrawn or not keys, False
            return
        self.made_requests += 1
        withdrawn = not keys
        if before is not None and withdrawn:
            # If a request cannot be read, withdrawing it writes a request with another id. A call may still erase the keys
            # that its process read before; this is allowed for any request that was withdrawn after it was read.
            keys = before.keys
        self.requests[number] = ModelRequest(number, request.id, keys, self._clock(), withdrawn=withdrawn)

    def _note_removed(self, name: str) -> None:
        number, done = parse_erase_name(name) or (0, False)
        if done:
            self.withdrawn_records += self.records.pop(number, None) is not None
        elif number in self.requests:
            self.requests[number].removed = True
            self.removed_requests += 1


def _list_keys(number: int) -> list[int]:
    """Three keys, every other one."""
    return [(number + step) % 8 for step in (0, 2, 4)]
