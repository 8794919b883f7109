"""Compares a bucket with a dict while machines die, attempts race, zombie tasks wake and files are lost."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
import uuid
from pathlib import Path

import pytest
from core_support import change_sets, committed, first_pointer, state_at
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from arrow_schemas import Pointer
from arrow_schemas.lineage import DELTA, SNAPSHOT, file_name, parse_file_name
from spark_state_ext.commit.cadence import SnapshotCadence
from spark_state_ext.errors import CorruptFileError, MissingCheckpointError
from spark_state_ext.files.folder import Folder
from spark_state_ext.store import LocalStore
from spark_state_ext.testing.model import SCHEMA, Changes, Key, Model, Row, apply_changes

_CADENCE = SnapshotCadence(2, 4)
_MACHINES = st.sampled_from(["a", "b"])


class BucketMachine(RuleBasedStateMachine):
    """Plays Spark's part: `history` has the committed pointers, one for each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.local = Path(tempfile.mkdtemp(prefix="bucket-machine-"))
        self.stores: dict[str, LocalStore] = {}
        self.history: list[tuple[Pointer, Model]] = [(first_pointer(), {})]
        # Pointers of uncommitted attempts: Spark may still hand one out after a late overwrite of its file.
        self.uncommitted: list[tuple[Pointer, Model]] = []
        self.contents: dict[str, bytes] = {}
        # Files that a rule removed or damaged.
        self.harmed: set[str] = set()

    @initialize(disk=st.booleans())
    def start(self, disk: bool) -> None:
        root = str(self.local / "root") if disk else f"memory://{uuid.uuid4().hex}"
        self.files = Folder(root).child("3")

    def teardown(self) -> None:
        for store in self.stores.values():
            store.close()
        shutil.rmtree(self.local, ignore_errors=True)

    def store(self, name: str) -> LocalStore:
        if name not in self.stores:
            self.stores[name] = LocalStore.at(self.local / name, SCHEMA, chunk_rows=3)
        return self.stores[name]

    def attempt(self, machine: str, pointer: Pointer, model: Model, changes: Changes) -> tuple[Pointer, Model]:
        assert state_at(self.store(machine), self.files, pointer, self.local) == model
        new = committed(self.store(machine), self.files, pointer, changes, self.local, _CADENCE)
        return new, apply_changes(model, changes)

    @rule(changes=change_sets(max_size=6), machines=st.lists(_MACHINES, min_size=1, max_size=3), data=st.data())
    def batch(self, changes: dict[Key, Row | None], machines: list[str], data: st.DataObject) -> None:
        """Run retries and speculative attempts of one batch; Spark may keep any of them."""
        pointer, model = self.history[-1]
        attempts = [self.attempt(machine, pointer, model, changes) for machine in machines]
        kept = data.draw(st.integers(0, len(attempts) - 1))
        self.history.append(attempts.pop(kept))
        self.uncommitted += attempts

    @precondition(lambda self: len(self.history) > 1)
    @rule(changes=change_sets(max_size=4), machine=_MACHINES, data=st.data())
    def zombie(self, changes: dict[Key, Row | None], machine: str, data: st.DataObject) -> None:
        """Let a task of an earlier batch wake up and do all its work."""
        at = data.draw(st.integers(0, len(self.history) - 2))
        if not self.loadable(at):
            return
        self.uncommitted.append(self.attempt(machine, *self.history[at], changes))

    @precondition(lambda self: len(self.history) > 1)
    @rule(data=st.data())
    def restart_from_an_earlier_batch(self, data: st.DataObject) -> None:
        at = data.draw(st.integers(0, len(self.history) - 1))
        if self.loadable(at):
            del self.history[at + 1 :]

    @precondition(lambda self: self.uncommitted)
    @rule(data=st.data(), machine=_MACHINES)
    def read_an_uncommitted_attempt(self, data: st.DataObject, machine: str) -> None:
        pointer, model = data.draw(st.sampled_from(self.uncommitted))
        if not self.harmed:
            assert state_at(self.store(machine), self.files, pointer, self.local) == model

    @rule(machine=_MACHINES)
    def lose_machine(self, machine: str) -> None:
        if machine in self.stores:
            self.stores.pop(machine).close()
            shutil.rmtree(self.local / machine)

    @precondition(lambda self: self.snapshots())
    @rule(data=st.data(), removes=st.booleans())
    def lose_snapshot(self, data: st.DataObject, removes: bool) -> None:
        """Lose or damage a snapshot; a load then goes further back in the lineage."""
        self.harm(data.draw(st.sampled_from(self.snapshots())), removes)

    @rule(data=st.data(), removes=st.booleans())
    def lose_a_version_in_between(self, data: st.DataObject, removes: bool) -> None:
        """A new machine raises an error that names the checkpoint; once the file is back, it has the state."""
        pointer, model = self.history[-1]
        inside = [entry.ref for entry in pointer.lineage[1:]]
        if not inside:
            return
        ref = data.draw(st.sampled_from(inside))
        snapshot = file_name(ref, SNAPSHOT)
        name, content = file_name(ref, DELTA), self.contents[file_name(ref, DELTA)]
        if snapshot in self.contents and snapshot not in self.harmed:
            return
        self.harm(name, removes)
        self.lose_machine("fresh")
        with pytest.raises((MissingCheckpointError, CorruptFileError), match=str(ref)):
            state_at(self.store("fresh"), self.files, pointer, self.local)
        self.files.put(name, content)
        self.harmed.discard(name)
        assert state_at(self.store("fresh"), self.files, pointer, self.local) == model

    @rule(machine=_MACHINES)
    def read(self, machine: str) -> None:
        pointer, model = self.history[-1]
        assert state_at(self.store(machine), self.files, pointer, self.local) == model

    @invariant()
    def no_file_is_overwritten_or_lost(self) -> None:
        if not hasattr(self, "files"):
            return
        names = self.files.names()
        for name in names:
            if name not in self.harmed:
                data = self.files.get(name)
                assert self.contents.setdefault(name, data) == data, f"{name} was overwritten"
        assert set(self.contents) - set(names) <= self.harmed
        parsed = [parse_file_name(name) for name in names]
        assert None not in parsed, "no temporary file remains"

    # -- helpers ------------------------------------------------------------------------------------

    def snapshots(self) -> list[str]:
        return sorted(n for n in self.contents if n not in self.harmed and n.endswith("snapshot.arrow"))

    def loadable(self, at: int) -> bool:
        """Return whether a batch can be loaded: all can, because rules put lost deltas back."""
        return not any(name.endswith("delta.arrow") for name in self.harmed) and at >= 0

    def harm(self, name: str, removes: bool) -> None:
        self.harmed.add(name)
        if removes:
            self.files._fs.rm_file(f"{self.files._path}/{name}")
        else:
            data = bytearray(self.contents[name])
            at = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "big") % (len(data) // 2)
            data[at] ^= 0xFF
            self.files.put(name, bytes(data))


def test_a_bucket_equals_a_dict() -> None:
    run_state_machine_as_test(
        BucketMachine,
        settings=settings(
            max_examples=15,
            stateful_step_count=25,
            phases=(Phase.explicit, Phase.reuse, Phase.generate),
            suppress_health_check=list(HealthCheck),
        ),
    )
