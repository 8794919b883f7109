"""Processes that read a simulated query by its root and make erase requests, while the query is rescaled.

The product's code finds the folder, writes the request and copies it. The simulation plays that a batch with data carries
out the requests that its folder had before.

Invariants: Readers and requests use only folders in which Spark has committed a batch. A request reaches the query that
continues. Waiting requests are carried out once the query runs without failures, and only once in the batches that count.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim_parts import Numbers, WrongStateError
from sim_rescale_parts import ALL_KEYS
from sim_search import replace_attributes
from sim_yard import OPERATOR

from arrow_schemas.erase import EraseDone
from spark_state_ext.erasing.requests import erase_keys, erase_status
from spark_state_ext.errors import MissingCheckpointError, UsageError
from spark_state_ext.files.erase_requests import EraseFolder
from spark_state_ext.reading import state_folder
from spark_state_ext.reading.bodies import Scratch
from spark_state_ext.reading.state_folder import find_state
from spark_state_ext.reading.state_opener import open_pointers

if TYPE_CHECKING:
    from sim_rescales import RescaleWorld

__all__ = ["Onlookers"]


class Onlookers:
    """The readers and the users with erase requests of a world.

    Parameters
    ----------
    world
        Where the query lives.
    """

    def __init__(self, world: RescaleWorld) -> None:
        self._world = world
        # Folders in which Spark has committed a batch.
        self.committed = {"q0"}
        # There are no leases here. Readers choose the query folder whose lease was renewed last: the last one that committed.
        self._renewals: dict[str, int] = {}
        # Ids of requests; and the batch that has carried each of them out, unless the query went back since.
        self._request_ids: set[str] = set()
        self._done_batches: dict[str, int] = {}
        # The folder of the last batch, and the ids of the requests in it at that time.
        self._last_batch: tuple[str, frozenset[str]] = ("q0", frozenset())

    @property
    def _folder(self) -> str:
        world = self._world
        return next(iter(world.spark.at(world.batch).values())).pointer.query_folder

    def ask(self, numbers: Numbers) -> None:
        """Make a request to erase a key."""
        world = self._world
        key = sorted(ALL_KEYS)[numbers.below(len(ALL_KEYS))]
        requests = erase_keys(
            world.shared.root("a").root, [key], operator=OPERATOR, storage_options=world.shared.options
        )
        for request in (request for request in requests if request.query_folder.startswith("q0")):
            if request.query_folder not in self.committed:
                raise WrongStateError(f"a request goes to {request.query_folder}, which is of a rescaling that failed")
            self._request_ids.add(EraseFolder(world.operator.child(request.query_folder)).request(request.number).id)
            world.counted["requests"] += 1

    def read(self) -> None:
        """Read the state by the root, and compare it with the model."""
        world = self._world
        try:
            with replace_attributes(
                [(state_folder, "last_renewed_ms", lambda folder: self._renewals.get(folder.name))]
            ):
                found_state = find_state(world.shared.root("a"), OPERATOR, None)
        except UsageError as error:
            raise WrongStateError(f"a reader does not find the state: {error}") from error
        if found_state.folder.name not in self.committed:
            raise WrongStateError(f"a reader finds {found_state.folder.name}, which is of a rescaling that failed")
        world.counted["reads"] += 1
        if world.batch < 0 or found_state.folder.name != self._folder or found_state.operator is None:
            world.counted["reads of the folder before"] += found_state.folder.name != self._folder
            return
        pointers = {bucket: state.pointer for bucket, state in world.spark.at(world.batch).items()}
        if any(not world.root_has(pointer) for pointer in pointers.values()):
            return
        scratch = Scratch(str(world.folder))
        with open_pointers(found_state.folder, found_state.operator, pointers, world.batch, scratch=scratch) as state:
            try:
                rows = {row["k"]: row["n"] for row in state.scan().read_all().to_pylist()}
            except MissingCheckpointError as error:
                raise WrongStateError(f"a reader cannot read batch {world.batch}: {error}") from error
        if rows != world.total():
            raise WrongStateError(f"a reader reads {rows} of batch {world.batch}, which is {world.total()}")
        world.counted["reads through parents"] += any(pointer.parents is not None for pointer in pointers.values())

    def commit(self, batch: int, *, data: bool) -> None:
        """Note a committed batch: it carries out the requests that its folder had before."""
        name = self._folder
        self.committed.add(name)
        self._renewals[name] = max(self._renewals.values(), default=0) + 1
        folder = EraseFolder(self._world.operator.child(name))
        for number in folder.numbers().done:
            record = folder.done(number)
            if record is not None and record.batch >= batch:
                folder.take_back(number)
        numbers = folder.numbers()
        numbers_by_id = {folder.request(number).id: number for number in numbers.requests}
        before, requests_seen = self._last_batch
        first_pointer = min(self._world.spark.at(batch).items(), key=lambda item: item[0])[1].pointer
        if data and before == name:
            for request_id in sorted(requests_seen & numbers_by_id.keys()):
                if numbers_by_id[request_id] in numbers.done:
                    continue
                if request_id in self._done_batches:
                    raise WrongStateError(f"{name} carries out a request again, after batch {batch}: {request_id}")
                self._done_batches[request_id] = batch
                folder.note_done(
                    numbers_by_id[request_id], EraseDone(request_id, 1, 0, 0, first_pointer.heartbeats, batch)
                )
        self._last_batch = (name, frozenset(numbers_by_id))

    def go_back(self, batch: int) -> None:
        """Note that the query goes back to a batch, so that requests which were done later are no longer done.

        As in the product, the records that they are done stay until the next batch in their folder.
        """
        self._done_batches = {request_id: at for request_id, at in self._done_batches.items() if at <= batch}
        self._last_batch = ("", frozenset())

    def check_done(self) -> None:
        """Check that every request is done."""
        undone = self._request_ids - self._done_batches.keys()
        if undone:
            raise WrongStateError(f"{len(undone)} requests do not reach the query, which continues in {self._folder}")

    def check_calm(self) -> None:
        """Check after a time without failures that every request is done, in the query's present folder."""
        world, name = self._world, self._folder
        self.check_done()
        statuses = erase_status(world.shared.root("a").root, operator=OPERATOR, storage_options=world.shared.options)
        waiting = [
            request
            for request in statuses
            if request.query_folder.startswith("q0") and (request.query_folder, request.state) != (name, "done")
        ]
        if waiting:
            raise WrongStateError(f"these requests wait, although the query continues in {name}: {waiting}")
