"""A world in which savepoints are taken of a query that goes on, and other queries start from them.

Who takes one, clean-ups, and what lets go of a savepoint are all stopped between any two of their steps, so that anything
else happens meanwhile (`sim_aside`). Whoever takes a savepoint dies, or sleeps for longer than its hold lasts.

What must hold, by the model: a savepoint has exactly the state of the committed batch that it names, in every bucket,
whatever becomes of the query; taking it fails only where its maker was silent for longer than its hold lasts; no
file of a savepoint goes but by the word of its owner, and none that its manifest does not name; and whoever started
from it has all that was in it. Clean-up goes on once a hold is over.
"""

from __future__ import annotations

import itertools
import math
import uuid
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import fsspec
from sim_aside import PausableWork, Trap, list_trap_patches, set_trap
from sim_parts import Config, History, Model, Numbers, Step, Variant, WrongStateError
from sim_search import replace_attributes
from sim_starts import RefusedError, StartedQuery
from sim_stores import open_folder
from sim_taking import HOLD_S, Session, Taking, spark_parts
from sim_world import DEFAULT, FIRST_BUCKET, STEPS, run_world
from sim_yard import KEY_SCHEMA, OPERATOR, STATE_SCHEMA, Query, SimSavepoint, Yard, rows_in

from arrow_schemas.operator import OperatorFile, operator_file_name
from arrow_schemas.pointer import Pointer
from arrow_schemas.savepoint import CANONICAL, MANIFEST_NAME, NATIVE
from spark_state_ext.engine.start_from import CLAIM, NO_CLAIM
from spark_state_ext.errors import CorruptError, MissingCheckpointError, NotClaimableError, StateError, StorageError
from spark_state_ext.files.folder import Folder
from spark_state_ext.files.layout import HOLDS_FOLDER
from spark_state_ext.restore import resolution
from spark_state_ext.savepoints import claims
from spark_state_ext.savepoints.claims import is_consumed, read_claim
from spark_state_ext.savepoints.deletion import delete_files
from spark_state_ext.savepoints.manifest_file import read_manifest
from spark_state_ext.savepoints.start_records import is_detached
from spark_state_ext.savepoints.status import find_started_queries, judge, read_claim_status
from spark_state_ext.spark.client import savepoints
from spark_state_ext.spark.client.state import ArrowState

__all__ = ["SAVEPOINT_STEPS", "SavepointWorld", "simulate_savepoints"]

DAY_S = 86_400.0
TAKINGS_MAX, STARTED_MAX = 2, 2
# The states of so many batches of the query are enough to start from.
SAVEPOINTS_MAX = 3
SAVEPOINT_STEPS = (
    *STEPS,
    "take",  # somebody begins to take a savepoint
    "aside",  # what is stopped goes on: who takes a savepoint, clean-ups
    "wait",  # time passes
    "start",  # a query starts from a savepoint
    "start",
    "started",  # a query that has started from one goes on
    "started",
    "started",
    "started",
    "started",
    "started",
    "delete",  # the user deletes a savepoint, where that is said to be deletable
    "release",  # the user frees a claim, of a query that is gone for good or is taken to be
    "day",  # so much that a hold is over for whoever sees it for the first time
)


class SavepointWorld(Query):
    """The query of which savepoints are taken, and all that follows from them.

    Parameters
    ----------
    config, variant
        As for `World`.
    """

    kinds: ClassVar[tuple[str, ...]] = SAVEPOINT_STEPS

    def __init__(self, config: Config, variant: Variant = DEFAULT) -> None:
        super().__init__(Yard(config, uuid.uuid4().hex), "q0", variant)
        operator = OperatorFile(OPERATOR, "q0", self.number_of_buckets, KEY_SCHEMA, STATE_SCHEMA)
        self.query_folder.put(operator_file_name(0), operator.encode())
        self.saved: list[SimSavepoint] = []
        self.started: list[StartedQuery] = []
        # Those that are over too.
        self._owners: list[StartedQuery] = []
        self._begun, self._queries = itertools.count(), itertools.count(1)

    def close(self) -> None:
        """Remove everything."""
        self.yard.close()
        for query in self.started:
            query.close()
        super().close()

    def step(self, step: Step) -> None:
        """Take one step."""
        self.yard.numbers = Numbers(step[1:])
        super().step(step)
        for taking in self.yard.takings:
            taking.misses_some |= not set(self.configured) <= set(taking.named)
        self.look()

    # -- taking savepoints -------------------------------------------------------------------------

    def _take(self, numbers: Numbers) -> None:
        if self.batch < 0 or len(self.yard.takings) >= TAKINGS_MAX or len(self.saved) >= SAVEPOINTS_MAX:
            return
        activity = self.take(Numbers(bytes(numbers.below(256) for _ in range(12))))
        if numbers.below(3) == 0:
            # Nothing happens meanwhile.
            activity.end()

    def take(self, numbers: Numbers) -> PausableWork:
        """Somebody begins to take a savepoint; the numbers say where he stops."""
        taking = Taking(self, numbers, named=tuple(self.configured))
        self.yard.takings.append(taking)
        self.yard.counted["savepoints begun"] += 1
        return self.yard.begin(lambda: self._taken(taking))

    def _taken(self, taking: Taking) -> None:
        number = next(self._begun)
        folder = open_folder(f"{self._name}/savepoints/{number}", replaces=self.config.replaces)
        form = CANONICAL if taking.numbers.below(4) == 0 else NATIVE
        damaged, verify = set(self.damaged), form == NATIVE and taking.numbers.yes()
        state = ArrowState(
            self.yard.root("a").root,
            OPERATOR,
            buckets=self.number_of_buckets,
            local_dir=self.folder,
            storage_options=self.yard.options,
            backends=self.yard.backends(taking.named),
        )
        try:
            savepoints.take_savepoint(
                Session(taking),  # type: ignore[arg-type] # what is used of a SparkSession
                folder.root,
                "/a/checkpoint",
                state,
                form=form,
                verify=verify,
                storage_options=self.yard.options,
            )
        except (StateError, RuntimeError) as error:
            self._failed(taking, folder, error, self.damaged != damaged or not verify)
        else:
            self._finished(taking, folder, self.damaged != damaged or not verify)
        finally:
            self.yard.takings.remove(taking)

    def _failed(self, taking: Taking, folder: Folder, error: Exception, unseen: bool) -> None:
        """Taking one failed; damaged files may be the reason where they were damaged meanwhile, or are not looked at."""
        self.yard.counted["savepoints that failed"] += 1
        if folder.exists(MANIFEST_NAME):
            raise WrongStateError(f"a savepoint failed, and has a manifest: {error}") from error
        # What nobody can help: Spark dropped batch after batch, files that somebody damaged or deleted, and state in a
        # backend that the query did not have when it was begun.
        dropped = isinstance(error, RuntimeError)
        spoilt = any(self.false.values()) or (bool(self.damaged) and unseen)
        if taking.in_time and not dropped and not spoilt and not taking.misses_some:
            raise WrongStateError(
                f"batch {taking.batch} cannot be saved, though its hold was never silent: {error}"
            ) from error

    def _finished(self, taking: Taking, folder: Folder, unseen: bool) -> None:
        self.yard.counted["savepoints finished"] += 1
        manifest = read_manifest(folder)
        names = {Path(where).name for where in self.damaged}
        tainted = unseen and any(file.name in names for bucket in manifest.buckets for file in bucket.files)
        stranger = folder.child(OPERATOR, str(FIRST_BUCKET)), "a note.txt"
        stranger[0].put(stranger[1], b"somebody's")
        taken = SimSavepoint(folder, manifest, taking.expected, stranger, tainted)
        if manifest.header.batch != taking.batch:
            raise WrongStateError(f"a savepoint of batch {taking.batch} says that it is of {manifest.header.batch}")
        self.check_saved(taken)
        self.saved.append(taken)

    def check_saved(self, taken: SimSavepoint) -> None:
        """Its state is that of the batch, by itself."""
        for number, model in taken.models.items():
            saved = taken.manifest.bucket(OPERATOR, number)
            if saved.pointer.ref is None:
                found: Model = {}
            else:
                folder = taken.folder.child(OPERATOR, str(number))
                try:
                    found = rows_in(folder, saved, self.folder)
                except (CorruptError, MissingCheckpointError, StorageError) as error:
                    if taken.tainted:
                        continue
                    raise WrongStateError(f"bucket {number} of {taken.folder.root} cannot be read: {error}") from error
            if found != model:
                raise WrongStateError(
                    f"bucket {number} of {taken.folder.root} has {found}; batch {taken.manifest.header.batch} was "
                    f"written as {model}"
                )

    def _aside(self, numbers: Numbers) -> None:
        for _ in range(1 + numbers.below(6)):
            if self.yard.activities:
                self.yard.advance(self.yard.activities[numbers.below(len(self.yard.activities))])
                self.look()

    def _wait(self, numbers: Numbers) -> None:
        self.yard.pass_time((HOLD_S / 4, HOLD_S / 2, HOLD_S, 2 * HOLD_S)[numbers.below(4)])

    def _day(self, numbers: Numbers) -> None:
        """Two days, by what the store says of files that are there already."""
        store = fsspec.filesystem("memory").store
        prefix = f"/{self._name}/a/{OPERATOR}/{self._folder_name}/{HOLDS_FOLDER}/"
        for path in [path for path in store if path.startswith(prefix)]:
            store[path].created -= timedelta(days=2)
        self.yard.now_s += 2 * DAY_S
        for taking in self.yard.takings:
            # Who copies has renewed its hold all the time.
            taking.passed(self.yard.now_s, renewed=True)

    # -- starting from them ------------------------------------------------------------------------

    def _start(self, numbers: Numbers) -> None:
        fit = [taken for taken in self.saved if not taken.tainted and not taken.gone()]
        if not fit or len(self.started) >= STARTED_MAX:
            return
        taken, mode = fit[numbers.below(len(fit))], CLAIM if numbers.yes() else NO_CLAIM
        self.start_from(taken, mode, numbers.below(4) > 0)

    def start_from(self, taken: SimSavepoint, mode: str, clean_up: bool) -> StartedQuery:
        """A query is planned that starts from a savepoint."""
        newest_ms = self.planned[max(self.planned)][1] if self.planned else 0
        name = f"q{next(self._queries)}"
        made = StartedQuery(self.yard, name, taken, mode, clean_up, newest_ms, self._variant)
        self.started.append(made)
        self._owners.append(made)
        self.yard.counted[f"starts with {mode}"] += 1
        return made

    def _started(self, numbers: Numbers) -> None:
        if not self.started:
            return
        query = self.started[numbers.below(len(self.started))]
        step = bytes(numbers.below(256) for _ in range(12))
        self._goes_on(query, lambda: query.step(step))

    def _goes_on(self, query: StartedQuery, work: Callable[[], object]) -> None:
        try:
            work()
        except RefusedError:
            self._ends(query)

    def _ends(self, query: StartedQuery) -> None:
        self.started.remove(query)
        query.close()

    def _delete(self, numbers: Numbers) -> None:
        fit = [taken for taken in self.saved if not taken.gone()]
        if not fit:
            return
        taken, root = fit[numbers.below(len(fit))], self.yard.root("a")
        manifest = read_manifest(taken.folder)
        started = list(find_started_queries(root, taken.folder.root, manifest.header.id))
        if not judge(started, *read_claim_status(taken.folder), [root.root]).deletable:
            return
        for query in [it for it in self.started if it.taken is taken and not it.is_begun]:
            if query.is_known:
                raise WrongStateError(
                    f"{taken.folder.root} is said to be deletable, and {query.query_folder.root} needs it"
                )
            # Nobody can know of it yet.
            self._ends(query)
        taken.deleted = True
        delete_files(taken.folder, manifest)
        self.yard.counted["savepoints deleted by their user"] += 1

    def _release(self, numbers: Numbers) -> None:
        fit = [taken for taken in self.saved if taken.owner is not None and not taken.deleted]
        if not fit:
            return
        taken = fit[numbers.below(len(fit))]
        if numbers.below(3):
            for query in [it for it in self.started if it.query_folder.name == taken.owner]:
                self._ends(query)
        self.release(taken, Trap(numbers.below(3), "waits"))

    def release(self, taken: SimSavepoint, trap: Trap | None = None) -> PausableWork:
        """Its user frees the claim, and may stop before one of the changes to files."""
        return self.yard.begin(lambda: self._released(taken, trap or Trap(-1, "")))

    def _released(self, taken: SimSavepoint, trap: Trap) -> None:
        try:
            with set_trap(trap):
                claims.release_claim(taken.folder)
        except NotClaimableError as error:
            if not is_consumed(taken.folder) and not taken.gone():
                raise WrongStateError(f"{taken.folder.root} cannot be released: {error}") from error
        except MissingCheckpointError:
            pass  # the claim is gone with the savepoint, or somebody else has freed it
        else:
            self.yard.counted["claims released"] += 1
            if taken.gone():
                raise WrongStateError(f"{taken.folder.root} is released, and lacks {taken.gone()}")
            taken.owner = None

    # -- checks ------------------------------------------------------------------------------------

    def look(self) -> None:
        """What must be there at any time."""
        for taken in self.saved:
            folder, name = taken.stranger
            if not folder.exists(name):
                raise WrongStateError(f"{folder.where(name)} is gone, which no manifest names")
            self._look_at(taken)
        for query in self.started:
            query.look()

    def _look_at(self, taken: SimSavepoint) -> None:
        """Who owns it, and whether what is gone was his to delete."""
        claim = read_claim(taken.folder)
        if claim is not None:
            self.yard.counted["claims"] += taken.is_claimed_by(claim.id)
        if taken.deleted or not (gone := taken.gone()):
            return
        owner = next((it for it in self._owners if it.query_folder.name == taken.owner), None)
        if owner is None or not owner.is_begun or not owner.clean_up:
            raise WrongStateError(f"{gone} are gone from {taken.folder.root}, which {taken.owner} owns")

    def calm(self) -> None:
        """Whoever takes a savepoint dies, and its hold ends."""
        for activity in list(self.yard.activities):
            activity.kill()
        self.yard.activities.clear()
        self.yard.takings.clear()
        self.yard.calm = True
        super().calm()
        for query in list(self.started):
            self._goes_on(query, query.calm)
        self.look()
        for query in self.started:
            self._check_let_go(query)
        for taken in self.saved:
            if not taken.gone():
                self.check_saved(taken)

    def _check_let_go(self, query: StartedQuery) -> None:
        """A query that went on for long says that it needs nothing, and has deleted what it owns."""
        if not is_detached(query.query_folder):
            raise WrongStateError(f"{query.query_folder.root} does not say that it is detached")
        taken = query.taken
        if taken.owner != query.query_folder.name or not query.clean_up or taken.deleted:
            return
        if len(taken.gone()) < len(taken.files) or read_claim(taken.folder) is not None:
            raise WrongStateError(f"{query.query_folder.root} owns {taken.folder.root}, and leaves something there")

    def _plan(self, batch: int, heartbeat: bool, numbers: Numbers) -> tuple[bool, int]:
        if self.yard.calm:
            self.yard.pass_time(HOLD_S / 4)
        return super()._plan(batch, heartbeat, numbers)

    def _check_little_is_left(self, pointer: Pointer, files: Folder) -> None:
        super()._check_little_is_left(pointer, files)
        holds = self.query_folder.child(HOLDS_FOLDER).names()
        if holds:
            raise WrongStateError(f"{len(holds)} holds of the dead are left in {self.query_folder.root}")


def map_one_by_one(_: str, __: int, work: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
    """In place of threads."""
    return [work(item) for item in items]


def patch_for_savepoints(patches: Sequence[tuple[Any, str, Any]]) -> AbstractContextManager[None]:
    """What is put in the place of Spark, and of what is broken."""
    values = [*spark_parts(), *list_trap_patches(), (resolution, "map_in_parallel", map_one_by_one)]
    # Who is late looks only where that cannot be avoided.
    return replace_attributes([*values, (claims, "_CHECK_S", math.inf), *patches])


def simulate_savepoints(history: History, variant: Variant = DEFAULT) -> SavepointWorld:
    """Run a history to its end; raises `WrongStateError` when anything is."""
    world = SavepointWorld(history.config, variant)
    with patch_for_savepoints(variant.patches):
        run_world(world, history, replace(variant, patches=()))
    return world
