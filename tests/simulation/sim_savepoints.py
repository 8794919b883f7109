"""A world in which savepoints of a running query are taken, and other queries start from them.

Processes that take savepoints, clean-ups, and the code that detaches from a savepoint pause between any two of their
steps, so that anything else can happen meanwhile (`sim_aside`). A process that takes a savepoint may die, or sleep for
longer than its hold lasts.

Invariants, by the model: A savepoint has exactly the state of the committed batch that it names, in every bucket,
whatever happens to the query. Taking it fails only if its maker did not renew its hold in time. A savepoint's files are
deleted only on behalf of its owner, and only those that its manifest names. A query that started from a savepoint has all
of the savepoint's state. Clean-up continues after a hold ends.
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
from sim_taking import HOLD_S, Session, Taker, list_spark_patches
from sim_world import DEFAULT, FIRST_BUCKET, STEPS, run_world
from sim_yard import KEY_SCHEMA, OPERATOR, STATE_SCHEMA, Query, SharedWorld, SimSavepoint, read_saved_model

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
# This number of savepoints is enough to start from.
SAVEPOINTS_MAX = 3
SAVEPOINT_STEPS = (
    *STEPS,
    "take",  # a process begins to take a savepoint
    "aside",  # paused activities continue: processes that take savepoints, and clean-ups
    "wait",  # time passes
    "start",  # a query starts from a savepoint
    "start",
    "started",  # a query that has started from a savepoint continues
    "started",
    "started",
    "started",
    "started",
    "started",
    "delete",  # the user deletes a savepoint, if its status says that it is deletable
    "release",  # the user releases a claim, of a query that has ended for good or seems to have
    "day",  # so much time passes that a hold has ended for a process that sees it for the first time
)


class SavepointWorld(Query):
    """The query of which savepoints are taken, the savepoints, and the queries that start from them.

    Parameters
    ----------
    config, variant
        As for `World`.
    """

    kinds: ClassVar[tuple[str, ...]] = SAVEPOINT_STEPS

    def __init__(self, config: Config, variant: Variant = DEFAULT) -> None:
        super().__init__(SharedWorld(config, uuid.uuid4().hex), "q0", variant)
        operator = OperatorFile(OPERATOR, "q0", self.number_of_buckets, KEY_SCHEMA, STATE_SCHEMA)
        self.query_folder.put(operator_file_name(0), operator.encode())
        self.saved: list[SimSavepoint] = []
        self.started_queries: list[StartedQuery] = []
        # Includes the queries that have ended.
        self._all_started: list[StartedQuery] = []
        self._begun, self._queries = itertools.count(), itertools.count(1)

    def close(self) -> None:
        """Remove everything."""
        self.shared.close()
        for query in self.started_queries:
            query.close()
        super().close()

    def step(self, step: Step) -> None:
        """Take one step."""
        self.shared.numbers = Numbers(step[1:])
        super().step(step)
        for taker in self.shared.takers:
            taker.misses_backends |= not set(self.configured) <= set(taker.backends_known)
        self.check_now()

    # -- taking savepoints -------------------------------------------------------------------------

    def _take(self, numbers: Numbers) -> None:
        if self.batch < 0 or len(self.shared.takers) >= TAKINGS_MAX or len(self.saved) >= SAVEPOINTS_MAX:
            return
        activity = self.take(Numbers(bytes(numbers.below(256) for _ in range(12))))
        if numbers.below(3) == 0:
            # Nothing else happens meanwhile.
            activity.end()

    def take(self, numbers: Numbers) -> PausableWork:
        """Begin to take a savepoint; the numbers decide where the process pauses."""
        taker = Taker(self, numbers, backends_known=tuple(self.configured))
        self.shared.takers.append(taker)
        self.shared.counted["savepoints begun"] += 1
        return self.shared.begin(lambda: self._run_taker(taker))

    def _run_taker(self, taker: Taker) -> None:
        number = next(self._begun)
        folder = open_folder(f"{self._name}/savepoints/{number}", replaces=self.config.replaces)
        form = CANONICAL if taker.numbers.below(4) == 0 else NATIVE
        damaged, verify = set(self.damaged), form == NATIVE and taker.numbers.yes()
        state = ArrowState(
            self.shared.root("a").root,
            OPERATOR,
            buckets=self.number_of_buckets,
            local_dir=self.folder,
            storage_options=self.shared.options,
            backends=self.shared.backends(taker.backends_known),
        )
        try:
            savepoints.take_savepoint(
                Session(taker),  # type: ignore[arg-type] # it has the parts of a SparkSession that are used
                folder.root,
                "/a/checkpoint",
                state,
                form=form,
                verify=verify,
                storage_options=self.shared.options,
            )
        except (StateError, RuntimeError) as error:
            self._check_failure(taker, folder, error, self.damaged != damaged or not verify)
        else:
            self._add_savepoint(taker, folder, self.damaged != damaged or not verify)
        finally:
            self.shared.takers.remove(taker)

    def _check_failure(self, taker: Taker, folder: Folder, error: Exception, unseen: bool) -> None:
        """Check a failed savepoint; files that were damaged meanwhile or were not verified may be the reason."""
        self.shared.counted["savepoints that failed"] += 1
        if folder.exists(MANIFEST_NAME):
            raise WrongStateError(f"a savepoint failed, and has a manifest: {error}") from error
        # Permitted reasons: Spark dropped batch after batch; files were damaged or deleted; the state is in a backend that
        # the query did not have when the savepoint was begun.
        dropped = isinstance(error, RuntimeError)
        spoilt = any(self.outdated.values()) or (bool(self.damaged) and unseen)
        if taker.renewed_in_time and not dropped and not spoilt and not taker.misses_backends:
            raise WrongStateError(
                f"batch {taker.batch} cannot be saved, though its hold was never silent: {error}"
            ) from error

    def _add_savepoint(self, taker: Taker, folder: Folder, unseen: bool) -> None:
        self.shared.counted["savepoints finished"] += 1
        manifest = read_manifest(folder)
        names = {Path(where).name for where in self.damaged}
        is_damaged = unseen and any(file.name in names for bucket in manifest.buckets for file in bucket.files)
        foreign_file = folder.child(OPERATOR, str(FIRST_BUCKET)), "a note.txt"
        foreign_file[0].put(foreign_file[1], b"a user's")
        savepoint = SimSavepoint(folder, manifest, taker.expected, foreign_file, is_damaged)
        if manifest.header.batch != taker.batch:
            raise WrongStateError(f"a savepoint of batch {taker.batch} says that it is of {manifest.header.batch}")
        self.check_saved(savepoint)
        self.saved.append(savepoint)

    def check_saved(self, savepoint: SimSavepoint) -> None:
        """Check that a savepoint alone gives the state of its batch."""
        for number, model in savepoint.models.items():
            saved = savepoint.manifest.bucket(OPERATOR, number)
            if saved.pointer.ref is None:
                saved_model: Model = {}
            else:
                folder = savepoint.folder.child(OPERATOR, str(number))
                try:
                    saved_model = read_saved_model(folder, saved, self.folder)
                except (CorruptError, MissingCheckpointError, StorageError) as error:
                    if savepoint.is_damaged:
                        continue
                    raise WrongStateError(
                        f"bucket {number} of {savepoint.folder.root} cannot be read: {error}"
                    ) from error
            if saved_model != model:
                raise WrongStateError(
                    f"bucket {number} of {savepoint.folder.root} has {saved_model}; "
                    f"batch {savepoint.manifest.header.batch} was written as {model}"
                )

    def _aside(self, numbers: Numbers) -> None:
        for _ in range(1 + numbers.below(6)):
            if self.shared.activities:
                self.shared.advance(self.shared.activities[numbers.below(len(self.shared.activities))])
                self.check_now()

    def _wait(self, numbers: Numbers) -> None:
        self.shared.pass_time((HOLD_S / 4, HOLD_S / 2, HOLD_S, 2 * HOLD_S)[numbers.below(4)])

    def _day(self, numbers: Numbers) -> None:
        """Let two days pass, also by the store's timestamps of existing files."""
        store = fsspec.filesystem("memory").store
        prefix = f"/{self._name}/a/{OPERATOR}/{self._folder_name}/{HOLDS_FOLDER}/"
        for path in [path for path in store if path.startswith(prefix)]:
            store[path].created -= timedelta(days=2)
        self.shared.now_s += 2 * DAY_S
        for taker in self.shared.takers:
            # Processes that copy have renewed their holds meanwhile.
            taker.pass_time(self.shared.now_s, renewed=True)

    # -- starting from them ------------------------------------------------------------------------

    def _start(self, numbers: Numbers) -> None:
        candidates = [
            savepoint for savepoint in self.saved if not savepoint.is_damaged and not savepoint.list_missing_files()
        ]
        if not candidates or len(self.started_queries) >= STARTED_MAX:
            return
        savepoint, mode = candidates[numbers.below(len(candidates))], CLAIM if numbers.yes() else NO_CLAIM
        self.start_from(savepoint, mode, numbers.below(4) > 0)

    def start_from(self, savepoint: SimSavepoint, mode: str, clean_up: bool) -> StartedQuery:
        """Plan a query that starts from a savepoint."""
        newest_ms = self.planned[max(self.planned)][1] if self.planned else 0
        name = f"q{next(self._queries)}"
        query = StartedQuery(self.shared, name, savepoint, mode, clean_up, newest_ms, self._variant)
        self.started_queries.append(query)
        self._all_started.append(query)
        self.shared.counted[f"starts with {mode}"] += 1
        return query

    def _started(self, numbers: Numbers) -> None:
        if not self.started_queries:
            return
        query = self.started_queries[numbers.below(len(self.started_queries))]
        step = bytes(numbers.below(256) for _ in range(12))
        self._continue_query(query, lambda: query.step(step))

    def _continue_query(self, query: StartedQuery, work: Callable[[], object]) -> None:
        try:
            work()
        except RefusedError:
            self._end_query(query)

    def _end_query(self, query: StartedQuery) -> None:
        self.started_queries.remove(query)
        query.close()

    def _delete(self, numbers: Numbers) -> None:
        candidates = [savepoint for savepoint in self.saved if not savepoint.list_missing_files()]
        if not candidates:
            return
        savepoint, root = candidates[numbers.below(len(candidates))], self.shared.root("a")
        manifest = read_manifest(savepoint.folder)
        started_queries = list(find_started_queries(root, savepoint.folder.root, manifest.header.id))
        if not judge(started_queries, *read_claim_status(savepoint.folder), [root.root]).deletable:
            return
        for query in [query for query in self.started_queries if query.savepoint is savepoint and not query.has_begun]:
            if query.is_known:
                raise WrongStateError(
                    f"{savepoint.folder.root} is deletable by its status, but {query.query_folder.root} needs it"
                )
            # The query has left no record yet, so users cannot know of it.
            self._end_query(query)
        savepoint.deleted = True
        delete_files(savepoint.folder, manifest)
        self.shared.counted["savepoints deleted by their user"] += 1

    def _release(self, numbers: Numbers) -> None:
        candidates = [savepoint for savepoint in self.saved if savepoint.owner is not None and not savepoint.deleted]
        if not candidates:
            return
        savepoint = candidates[numbers.below(len(candidates))]
        if numbers.below(3):
            for query in [query for query in self.started_queries if query.query_folder.name == savepoint.owner]:
                self._end_query(query)
        self.release(savepoint, Trap(numbers.below(3), "waits"))

    def release(self, savepoint: SimSavepoint, trap: Trap | None = None) -> PausableWork:
        """Let a user release the claim; it may pause before one of its changes to files."""
        return self.shared.begin(lambda: self._run_release(savepoint, trap or Trap(-1, "")))

    def _run_release(self, savepoint: SimSavepoint, trap: Trap) -> None:
        try:
            with set_trap(trap):
                claims.release_claim(savepoint.folder)
        except NotClaimableError as error:
            if not is_consumed(savepoint.folder) and not savepoint.list_missing_files():
                raise WrongStateError(f"{savepoint.folder.root} cannot be released: {error}") from error
        except MissingCheckpointError:
            pass  # the claim was deleted with the savepoint, or another user has released it
        else:
            self.shared.counted["claims released"] += 1
            if savepoint.list_missing_files():
                raise WrongStateError(
                    f"{savepoint.folder.root} is released, but {savepoint.list_missing_files()} are missing"
                )
            savepoint.owner = None

    # -- checks ------------------------------------------------------------------------------------

    def check_now(self) -> None:
        """Check what must hold at any time."""
        for savepoint in self.saved:
            folder, name = savepoint.foreign_file
            if not folder.exists(name):
                raise WrongStateError(f"{folder.where(name)} was deleted, but no manifest names it")
            self._check_files(savepoint)
        for query in self.started_queries:
            query.check_now()

    def _check_files(self, savepoint: SimSavepoint) -> None:
        """Check who owns a savepoint, and that its missing files were the owner's to delete."""
        claim = read_claim(savepoint.folder)
        if claim is not None:
            self.shared.counted["claims"] += savepoint.is_claimed_by(claim.id)
        if savepoint.deleted or not (missing_files := savepoint.list_missing_files()):
            return
        owner = next((query for query in self._all_started if query.query_folder.name == savepoint.owner), None)
        if owner is None or not owner.has_begun or not owner.clean_up:
            raise WrongStateError(
                f"{missing_files} are missing in {savepoint.folder.root}, which {savepoint.owner} owns"
            )

    def calm(self) -> None:
        """Kill the processes that take savepoints; their holds must end."""
        for activity in list(self.shared.activities):
            activity.kill()
        self.shared.activities.clear()
        self.shared.takers.clear()
        self.shared.calm = True
        super().calm()
        for query in list(self.started_queries):
            self._continue_query(query, query.calm)
        self.check_now()
        for query in self.started_queries:
            self._check_detached(query)
        for savepoint in self.saved:
            if not savepoint.list_missing_files():
                self.check_saved(savepoint)

    def _check_detached(self, query: StartedQuery) -> None:
        """Check that a query that ran for long is recorded as detached, and has deleted the savepoint if it owns it."""
        if not is_detached(query.query_folder):
            raise WrongStateError(f"{query.query_folder.root} does not say that it is detached")
        savepoint = query.savepoint
        if savepoint.owner != query.query_folder.name or not query.clean_up or savepoint.deleted:
            return
        if len(savepoint.list_missing_files()) < len(savepoint.files) or read_claim(savepoint.folder) is not None:
            raise WrongStateError(f"{query.query_folder.root} owns {savepoint.folder.root}, but leaves files there")

    def _plan(self, batch: int, heartbeat: bool, numbers: Numbers) -> tuple[bool, int]:
        if self.shared.calm:
            self.shared.pass_time(HOLD_S / 4)
        return super()._plan(batch, heartbeat, numbers)

    def _check_little_is_left(self, pointer: Pointer, files: Folder) -> None:
        super()._check_little_is_left(pointer, files)
        holds = self.query_folder.child(HOLDS_FOLDER).names()
        if holds:
            raise WrongStateError(f"{len(holds)} holds of dead processes are left in {self.query_folder.root}")


def map_one_by_one(_: str, __: int, work: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
    """Replaces a function that uses threads."""
    return [work(item) for item in items]


def patch_for_savepoints(patches: Sequence[tuple[Any, str, Any]]) -> AbstractContextManager[None]:
    """Replace Spark's parts and what a variant breaks."""
    values = [*list_spark_patches(), *list_trap_patches(), (resolution, "map_in_parallel", map_one_by_one)]
    # A late process checks only if it must.
    return replace_attributes([*values, (claims, "_CHECK_S", math.inf), *patches])


def simulate_savepoints(history: History, variant: Variant = DEFAULT) -> SavepointWorld:
    """Run a history to its end; raises `WrongStateError` if an invariant is violated."""
    world = SavepointWorld(history.config, variant)
    with patch_for_savepoints(variant.patches):
        run_world(world, history, replace(variant, patches=()))
    return world
