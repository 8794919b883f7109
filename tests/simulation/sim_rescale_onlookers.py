"""Who reads a simulated query by its root, and asks for keys to be erased, while it is rescaled.

What finds the folder, writes the request and takes it along is the product's code. A batch with data carries out the
requests that its folder had before; that is played.

What must hold: a reader or a request never gets to a folder that Spark has not committed a batch in; a request reaches
the query that goes on; and what waits is carried out once the query runs in peace.
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
    """The readers and askers of a world.

    Parameters
    ----------
    world
        Where the query lives.
    """

    def __init__(self, world: RescaleWorld) -> None:
        self._world = world
        # Folders in which Spark has committed a batch.
        self.committed = {"q0"}
        # This world has no leases. A reader takes the query folder whose lease was renewed last: the one that committed last.
        self._renewals: dict[str, int] = {}
        # Ids of requests; and the batch that has carried each out, as far as the query did not go back since.
        self._asked: set[str] = set()
        self._done: dict[str, int] = {}
        # The folder of the last batch, and what it was asked for by then.
        self._seen: tuple[str, frozenset[str]] = ("q0", frozenset())

    @property
    def _folder(self) -> str:
        world = self._world
        return next(iter(world.spark.at(world.batch).values())).pointer.query_folder

    def ask(self, numbers: Numbers) -> None:
        """Somebody asks for a key to be erased."""
        world = self._world
        key = sorted(ALL_KEYS)[numbers.below(len(ALL_KEYS))]
        made = erase_keys(world.shared.root("a").root, [key], operator=OPERATOR, storage_options=world.shared.options)
        for it in (it for it in made if it.query_folder.startswith("q0")):
            if it.query_folder not in self.committed:
                raise WrongStateError(f"a request goes to {it.query_folder}, which is of a rescaling that failed")
            self._asked.add(EraseFolder(world.operator.child(it.query_folder)).request(it.number).id)
            world.counted["requests"] += 1

    def read(self) -> None:
        """Somebody reads the state by the root."""
        world = self._world
        try:
            with replace_attributes(
                [(state_folder, "last_renewed_ms", lambda folder: self._renewals.get(folder.name))]
            ):
                found = find_state(world.shared.root("a"), OPERATOR, None)
        except UsageError as error:
            raise WrongStateError(f"a reader does not find the state: {error}") from error
        if found.folder.name not in self.committed:
            raise WrongStateError(f"a reader finds {found.folder.name}, which is of a rescaling that failed")
        world.counted["reads"] += 1
        if world.batch < 0 or found.folder.name != self._folder or found.operator is None:
            world.counted["reads of the folder before"] += found.folder.name != self._folder
            return
        pointers = {bucket: held.pointer for bucket, held in world.spark.at(world.batch).items()}
        if any(not world.root_has(pointer) for pointer in pointers.values()):
            return
        scratch = Scratch(str(world.folder))
        with open_pointers(found.folder, found.operator, pointers, world.batch, scratch=scratch) as state:
            try:
                rows = {row["k"]: row["n"] for row in state.scan().read_all().to_pylist()}
            except MissingCheckpointError as error:
                raise WrongStateError(f"a reader cannot read batch {world.batch}: {error}") from error
        if rows != world.total():
            raise WrongStateError(f"a reader reads {rows} of batch {world.batch}, which is {world.total()}")
        world.counted["reads through parents"] += any(it.parents is not None for it in pointers.values())

    def commit(self, batch: int, *, data: bool) -> None:
        """A batch is committed: what its folder was asked for before is done in it."""
        name = self._folder
        self.committed.add(name)
        self._renewals[name] = max(self._renewals.values(), default=0) + 1
        folder = EraseFolder(self._world.operator.child(name))
        numbers = folder.numbers()
        there = {folder.request(number).id: number for number in numbers.requests}
        before, seen = self._seen
        if data and before == name:
            for request_id in seen & there.keys():
                self._done.setdefault(request_id, batch)
                folder.note_done(there[request_id], EraseDone(request_id, 1, 0, 0, 0, batch))
        self._seen = (name, frozenset(there))

    def go_back(self, batch: int) -> None:
        """The query goes back: what was done since is not done."""
        self._done = {request_id: at for request_id, at in self._done.items() if at <= batch}
        for name in self.committed:
            folder = EraseFolder(self._world.operator.child(name))
            for number in folder.numbers().done:
                record = folder.done(number)
                if record is not None and record.batch > batch:
                    folder.take_back(number)
        self._seen = ("", frozenset())

    def check_calm(self) -> None:
        """Nothing goes wrong any more: every request is done, and no other folder is asked."""
        world, name = self._world, self._folder
        late = self._asked - self._done.keys()
        if late:
            raise WrongStateError(f"{len(late)} requests do not reach the query, which goes on in {name}")
        told = erase_status(world.shared.root("a").root, operator=OPERATOR, storage_options=world.shared.options)
        waiting = [
            it for it in told if it.query_folder.startswith("q0") and (it.query_folder, it.state) != (name, "done")
        ]
        if waiting:
            raise WrongStateError(f"these wait, and the query goes on in {name}: {waiting}")
