"""The examples of SPARK-49374, with its file names, and each way in which files can contradict a lineage."""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from core_support import WRITER, first_pointer

from arrow_schemas import CheckpointRef, LineageEntry, LineageHeader, Pointer
from arrow_schemas.lineage import DELTA, SNAPSHOT, file_name
from spark_state_ext.backends.files import sole_replica
from spark_state_ext.commit.cadence import with_unconfirmed_snapshot
from spark_state_ext.commit.context import CommitContext
from spark_state_ext.engine.bucket import Bucket
from spark_state_ext.errors import CorruptFileError, CorruptPointerError, LineageError, MissingCheckpointError
from spark_state_ext.files.checkpoint import write_checkpoint
from spark_state_ext.files.folder import Folder
from spark_state_ext.files.horizon import count_call
from spark_state_ext.restore.load_plan import Chain, Fetch, plan_load
from spark_state_ext.store import LocalStore
from spark_state_ext.testing.model import KEYS, SCHEMA, Changes, Model, Row, apply_changes, make_run, scan


def ref(name: str) -> CheckpointRef:
    """The checkpoint with the name that SPARK-49374 gives it, such as ``20_d8e2ca47``."""
    version, short = name.split("_")
    return CheckpointRef(int(version), short.ljust(32, "0"))


# The rows that each checkpoint changed.
CHANGES: dict[str, Changes] = {
    "20_d8e2ca47": {KEYS[0]: Row(20), KEYS[1]: Row(20), KEYS[2]: Row(20)},
    "21_ef6618c2": {KEYS[0]: Row(-21), KEYS[5]: Row(-21)},
    "21_f4d05ac9": {KEYS[0]: Row(21), KEYS[3]: Row(21)},
    "22_4489578d": {KEYS[1]: Row(22), KEYS[3]: None},
    "23_689aa6bd": {KEYS[2]: None, KEYS[4]: Row(23)},
    "23_8205c96f": {KEYS[4]: Row(-23)},
    "24_32e3cc2a": {KEYS[0]: Row(24)},
}


class Recorder(LocalStore):
    """Records which files are applied, in order."""

    applied: list[str]

    def restore(
        self, batches: Iterable[pa.RecordBatch], ref: CheckpointRef, parent: CheckpointRef | None, *, snapshot: bool
    ) -> Any:
        run = super().restore(batches, ref, parent, snapshot=snapshot)
        self.applied.append(f"{ref.version}_{ref.id[:8]}.{'zip' if snapshot else 'delta'}")
        return run


class SeedFiles:
    """The files of a bucket, written as SPARK-49374 lists them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files = Folder(str(path / "3"))
        self._stores = 0

    def put(self, name: str, lineage: Sequence[str], **header: Any) -> None:
        """Write a file such as ``23_689aa6bd.delta (lineage in file: …)``, with its lineage oldest first."""
        checkpoint, kind = name.split(".")
        kinds = {"delta": DELTA, "zip": SNAPSHOT}
        path = [*lineage, checkpoint]
        changes: Changes = CHANGES[checkpoint]
        if kind == "zip":
            model: Model = {}
            for step in ["20_d8e2ca47", *[s for s in path if s != "20_d8e2ca47"]]:
                model = apply_changes(model, CHANGES[step])
            changes = {key: row for key, row in model.items() if row is not None}
        refs = tuple(ref(step) for step in lineage)
        metadata = LineageHeader(
            kinds[kind], "counts", 3, ref(checkpoint), refs[-1] if refs else None, refs, 0, WRITER, "0.1.0"
        )
        metadata = replace(metadata, **header)
        self.path.joinpath("3").mkdir(exist_ok=True)
        with (self.path / "3" / file_name(ref(checkpoint), kinds[kind])).open("wb") as file:
            write_checkpoint(file, metadata, SCHEMA, [make_run(changes)] if changes else [])

    def load(self, *lineage: str, parent: str | None = None) -> tuple[Model, list[str]]:
        """Return the state at a pointer with this lineage, loaded on an empty disk, and the files that the load
        used."""
        store = Recorder.at(self.path / f"local-{self._stores}", SCHEMA)
        store.applied = []
        self._stores += 1
        entries = tuple(LineageEntry(ref(name), 1) for name in lineage)
        parents = {None: entries[-2].ref if len(entries) > 1 else None}
        pointer = replace(
            first_pointer(), lineage=entries, parent=parents.get(parent) if parent is None else ref(parent), rows=99
        )
        try:
            return Bucket(store, sole_replica(self.files, self.path), pointer, WRITER, CommitContext(self.path)).read(
                scan
            ), store.applied
        finally:
            store.close()


def state(*names: str) -> Model:
    model: Model = {}
    for name in names:
        model = apply_changes(model, CHANGES[name])
    return model


MAIN = ("20_d8e2ca47", "21_f4d05ac9", "22_4489578d", "23_689aa6bd")


@pytest.fixture
def folder(tmp_path: Path) -> SeedFiles:
    """The second listing in SPARK-49374, before any later snapshot."""
    files = SeedFiles(tmp_path)
    files.put("20_d8e2ca47.delta", [])
    files.put("20_d8e2ca47.zip", [])
    files.put("21_ef6618c2.delta", ["20_d8e2ca47"])
    files.put("21_f4d05ac9.delta", ["20_d8e2ca47"])
    files.put("22_4489578d.delta", ["20_d8e2ca47", "21_f4d05ac9"])
    files.put("23_689aa6bd.delta", ["20_d8e2ca47", "21_f4d05ac9", "22_4489578d"])
    return files


DELTAS = ["20_d8e2ca47.zip", "21_f4d05ac9.delta", "22_4489578d.delta", "23_689aa6bd.delta"]


def test_example_1_a_load_uses_the_snapshot_of_its_checkpoint(folder: SeedFiles) -> None:
    folder.put("23_689aa6bd.zip", MAIN[:3])
    assert folder.load("23_689aa6bd", parent="22_4489578d") == (state(*MAIN), ["23_689aa6bd.zip"])


@pytest.mark.parametrize("sibling", [False, True])
def test_example_2_a_load_uses_deltas_if_its_checkpoint_has_no_snapshot(folder: SeedFiles, sibling: bool) -> None:
    if sibling:
        folder.put("23_8205c96f.delta", MAIN[:3])
        folder.put("23_8205c96f.zip", MAIN[:3])
    # With the whole lineage in the pointer, and with a pointer that presumes a snapshot that does not exist.
    assert folder.load(*MAIN) == (state(*MAIN), DELTAS)
    assert folder.load("23_689aa6bd", parent="22_4489578d") == (state(*MAIN), DELTAS)


@pytest.mark.parametrize("sibling", [False, True])
def test_example_3_a_load_goes_back_from_a_missing_snapshot(folder: SeedFiles, sibling: bool) -> None:
    folder.put("24_32e3cc2a.delta", ["23_689aa6bd"])
    if sibling:
        # Two executors made a snapshot; Spark picked the one whose upload failed.
        folder.put("23_8205c96f.delta", MAIN[:3])
        folder.put("23_8205c96f.zip", MAIN[:3])
    expected = state(*MAIN, "24_32e3cc2a")
    assert folder.load("23_689aa6bd", "24_32e3cc2a") == (expected, [*DELTAS, "24_32e3cc2a.delta"])
    # The missing snapshot arrives later.
    folder.put("23_689aa6bd.zip", MAIN[:3])
    assert folder.load("23_689aa6bd", "24_32e3cc2a") == (expected, ["23_689aa6bd.zip", "24_32e3cc2a.delta"])


def test_a_load_falls_back_from_a_damaged_snapshot_and_logs_it(
    folder: SeedFiles, caplog: pytest.LogCaptureFixture
) -> None:
    folder.put("23_689aa6bd.zip", MAIN[:3])
    path = folder.path / "3" / file_name(ref("23_689aa6bd"), SNAPSHOT)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with caplog.at_level(logging.WARNING, "spark_state_ext"):
        assert folder.load("23_689aa6bd") == (state(*MAIN), DELTAS)
    assert path.name in caplog.text
    assert "fails its checksum" in caplog.text


def test_a_newer_snapshot_replaces_a_lost_delta(folder: SeedFiles) -> None:
    folder.put("22_4489578d.zip", MAIN[:2])
    (folder.path / "3" / file_name(ref("21_f4d05ac9"), DELTA)).unlink()
    # The file that was applied before the loss was noticed is right, but not needed.
    assert folder.load(*MAIN) == (state(*MAIN), ["20_d8e2ca47.zip", "22_4489578d.zip", "23_689aa6bd.delta"])


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def alter(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 0x40
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("harm", "error"),
    [(Path.unlink, MissingCheckpointError), (truncate, CorruptFileError), (alter, CorruptFileError)],
)
@pytest.mark.parametrize("name", ["21_f4d05ac9", "22_4489578d", "23_689aa6bd"])
def test_a_load_fails_if_a_delta_on_the_only_path_is_lost(
    folder: SeedFiles, harm: Callable[[Path], None], error: type[Exception], name: str
) -> None:
    path = folder.path / "3" / file_name(ref(name), DELTA)
    harm(path)
    with pytest.raises(error, match=re.escape(path.name)) as raised:
        folder.load(*MAIN)
    assert f"checkpoint {ref(MAIN[-1])} of bucket 3" in str(raised.value)


def test_a_delta_that_was_built_on_a_sibling_is_refused(folder: SeedFiles) -> None:
    """The delta was built on the other version 21, which is the case that SPARK-49374 is about."""
    folder.put("22_4489578d.delta", ["20_d8e2ca47", "21_ef6618c2"])
    with pytest.raises(LineageError) as raised:
        folder.load(*MAIN)
    text = str(raised.value)
    assert file_name(ref("22_4489578d"), DELTA) in text
    assert f"was built on {ref('21_ef6618c2')}" in text
    assert f"but in the lineage on {ref('21_f4d05ac9')}" in text


def test_a_file_with_a_wrong_ancestor_is_refused(folder: SeedFiles) -> None:
    folder.put("23_689aa6bd.delta", ["20_d8e2ca47", "21_ef6618c2", "22_4489578d"])
    with pytest.raises(LineageError, match=f"names {ref('21_ef6618c2')} among its ancestors.*{ref('21_f4d05ac9')}"):
        folder.load(*MAIN)


@pytest.mark.parametrize(
    ("header", "owner"),
    [({"bucket": 5}, "bucket 5 of operator 'counts'"), ({"operator": "o"}, "bucket 3 of operator 'o'")],
)
def test_files_of_other_buckets_and_operators_are_refused(
    folder: SeedFiles, header: dict[str, Any], owner: str
) -> None:
    folder.put("22_4489578d.delta", MAIN[:2], **header)
    with pytest.raises(LineageError, match=f"{ref('22_4489578d')}.*{owner}.*bucket 3 of 'counts' was expected"):
        folder.load(*MAIN)


def test_a_file_under_the_name_of_another_is_refused(folder: SeedFiles) -> None:
    path = folder.path / "3" / file_name(ref("21_ef6618c2"), DELTA)
    path.replace(folder.path / "3" / file_name(ref("21_f4d05ac9"), DELTA))
    with pytest.raises(LineageError, match=f"holds the delta of checkpoint {ref('21_ef6618c2')}"):
        folder.load(*MAIN)


def test_lineages_with_cycles_can_be_neither_written_nor_read(folder: SeedFiles) -> None:
    with pytest.raises(LineageError, match="versions must ascend"):
        folder.put("21_f4d05ac9.delta", ["22_4489578d"])
    with pytest.raises(LineageError, match="versions must ascend"):
        Pointer("o", 0, 1, 0, 0, None, lineage=tuple(LineageEntry(ref(name), 1) for name in MAIN[::-1]))
    metadata = LineageHeader(DELTA, "counts", 3, ref(MAIN[1]), ref(MAIN[0]), (ref(MAIN[0]),), 0, WRITER, "0").encode()
    text = metadata[b"spark_state_ext.header"].replace(b'[[20,"', b'[[21,"').replace(b'"parent":[20', b'"parent":[21')
    digest = hashlib.blake2b(text, digest_size=16).hexdigest().encode()
    with pytest.raises(LineageError, match="versions must ascend"):
        LineageHeader.decode({b"spark_state_ext.header": text, b"spark_state_ext.header_checksum": digest}, "x")


def test_a_pointer_that_contradicts_itself_is_refused() -> None:
    lineage = tuple(LineageEntry(ref(name), 1) for name in MAIN)
    good = replace(first_pointer(), lineage=lineage, parent=ref(MAIN[2]))
    assert Pointer.decode(good.encode()) == good
    with pytest.raises(LineageError, match=f"was built on {ref('21_ef6618c2')}, but its lineage says"):
        replace(good, parent=ref("21_ef6618c2"))
    with pytest.raises(CorruptPointerError):
        Pointer.decode(good.encode()[:-1])


def test_the_local_store_must_agree_with_the_pointer(folder: SeedFiles) -> None:
    """The pointer names the id that the checkpoint was built on, and the next load compares it."""
    store = LocalStore.at(folder.path / "local", SCHEMA)
    store.apply([make_run(CHANGES["20_d8e2ca47"])], ref("20_d8e2ca47"), None)
    store.apply([make_run(CHANGES["21_f4d05ac9"])], ref("21_f4d05ac9"), ref("20_d8e2ca47"))
    pointer = replace(
        first_pointer(), lineage=(LineageEntry(ref("21_f4d05ac9"), 1),), parent=CheckpointRef(20, "b" * 32), rows=9
    )
    with pytest.raises(LineageError, match=f"was built on {ref('20_d8e2ca47')}, but its pointer names 20_b"):
        Bucket(store, sole_replica(folder.files, folder.path), pointer, WRITER, CommitContext(folder.path)).read(scan)
    store.close()


# -- decisions -------------------------------------------------------------------------------------


def test_plan_load_chooses_the_files_that_a_load_fetches() -> None:
    a, b, c, d = (ref(name) for name in MAIN)
    chain = Chain((a, b, c, d))
    deltas = [Fetch(r, DELTA) for r in (b, c, d)]
    assert plan_load(chain, [], ()) == [Fetch(a, SNAPSHOT), *deltas]
    # The unconfirmed snapshot is missing: only a longer chain can be loaded.
    assert plan_load(chain, [], {Fetch(a, SNAPSHOT)}) is None
    assert plan_load(Chain((a, b, c, d), rooted=True), [], {Fetch(a, SNAPSHOT)}) == [Fetch(a, DELTA), *deltas]
    # A delta is missing: snapshots from there on are tried, the oldest first.
    gone = {Fetch(c, DELTA)}
    assert plan_load(chain, [], gone) == [Fetch(c, SNAPSHOT), Fetch(d, DELTA)]
    assert plan_load(chain, [], {*gone, Fetch(c, SNAPSHOT)}) == [Fetch(d, SNAPSHOT)]
    assert plan_load(chain, [], {*gone, Fetch(c, SNAPSHOT), Fetch(d, SNAPSHOT)}) is None


def test_a_pruned_pointer_begins_with_its_own_checkpoint() -> None:
    refs = [CheckpointRef(version, f"{version:032x}") for version in (90, 99, 100)]
    pointer = replace(first_pointer(), lineage=tuple(LineageEntry(r, 1, r.version) for r in refs), parent=refs[1])
    pruned = with_unconfirmed_snapshot(pointer)
    assert [e.ref for e in pruned.lineage] == refs[2:]
    # The pointer still names its parent: a local store that has the parent needs only the delta.
    chain = Chain.of(pruned)
    assert (chain.refs, chain.start, chain.rooted) == (tuple(refs[1:]), 1, False)
    assert plan_load(chain, [], ()) == [Fetch(refs[2], SNAPSHOT)]
    assert plan_load(chain, [], {Fetch(refs[2], SNAPSHOT)}) is None


def test_a_pointer_counts_calls_and_heartbeats() -> None:
    pointer = count_call(first_pointer(), True, 5)
    assert (pointer.calls, pointer.heartbeats) == (1, 1)
    pointer = count_call(pointer, False, 5)
    assert (pointer.calls, pointer.heartbeats) == (2, 1)


def test_more_retained_batches_apply_at_once_and_fewer_ones_later() -> None:
    pointer = replace(first_pointer(), heartbeats=50, retained=10, retained_heartbeat=50)
    raised = count_call(pointer, True, 12)
    assert (raised.retained, raised.retained_heartbeat) == (12, 51)
    lowered = [pointer]
    for _ in range(40):
        lowered.append(count_call(lowered[-1], True, 3))
    # Retained pointers may refer to checkpoints up to heartbeat 50, made with 10 retained batches.
    assert [p.retained for p in lowered] == [10] * 33 + [3] * 8
    # Raised again in between, the number counts from that heartbeat.
    again = count_call(count_call(lowered[5], True, 10), True, 3)
    assert (again.retained, again.retained_heartbeat) == (10, 56)
