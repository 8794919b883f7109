"""Which folder of a rescaled query readers, erase requests and clean-up go by: the one that Spark's pointers name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from reading_support import Job as OldJob
from reading_support import as_model, state_of
from rescaled_in_place import InPlace, plan_of, rescaled_in_place
from rescaled_query import Later
from typer.testing import CliRunner

from arrow_schemas import BucketMap
from arrow_schemas.erase import EraseRequest
from arrow_schemas.operator import operator_file_name
from spark_state_ext import SourcePartition, erase_keys, erase_scan, erase_status, open_state, withdraw_erasure
from spark_state_ext.cli.app import build_application
from spark_state_ext.errors import ChangedJobError, MissingCheckpointError, UsageError
from spark_state_ext.files.erase_requests import EraseFolder
from spark_state_ext.files.layout import PARENTS_FOLDER
from spark_state_ext.reading.exact_batch import ExactBatch, QueryOfOperator, open_exact
from spark_state_ext.rescale.folder_in_force import put_in_force, take_requests
from spark_state_ext.rescale.folders import folders_in_force
from spark_state_ext.rescale.removal import Finishing
from spark_state_ext.savepoints.start_records import StartRecord, note_start
from spark_state_ext.spark.executor import savepoint_tasks
from spark_state_ext.testing.model import KEYS, Row

MAPS = {
    "up": BucketMap(9),
    "down": BucketMap(2),
    "split": BucketMap.split(4, {1: 3}),
}


@pytest.fixture
def old(tmp_path: Path) -> OldJob:
    """A query of four buckets that has committed two batches, each with all keys."""
    job = OldJob(tmp_path / "root", tmp_path / "old-local", buckets=4)
    for at in range(2):
        job.batch({key: Row(at, "old") for key in KEYS})
    return job


def keys_asked(root: Path) -> dict[str, list[str]]:
    """Which requests there are, done or not, by query folder."""
    found: dict[str, list[str]] = {}
    for it in erase_status(str(root), operator="counts"):
        found.setdefault(it.query_folder, []).append(it.state)
    return found


def asked(root: Path, **where: Any) -> list[str]:
    """Ask for a key, and say in which folders."""
    keys = {"name": [KEYS[1][0]], "x": [KEYS[1][1]]}
    return [it.query_folder for it in erase_keys(str(root), keys, operator="counts", **where)]


@pytest.mark.parametrize("bucket_map", MAPS.values(), ids=MAPS)
def test_state_is_read_from_the_first_batch_of_a_rescaling_on(
    tmp_path: Path, old: OldJob, bucket_map: BucketMap
) -> None:
    root, models = str(tmp_path / "root"), [*old.models]
    query = rescaled_in_place(tmp_path, old, bucket_map)
    # Buckets that rest are not renewed meanwhile, so only some have a file of their own.
    query.retained = 100
    query.begin()
    query.batch({key: Row(7, "new") for key in KEYS[:2]})
    models.append(query.model)
    with open_state(root) as state:
        # No file says yet that Spark has committed the batch.
        assert (state.bucket_map, state.batch, state_of(state)) == (BucketMap(4), 0, models[0])
    with open_state(root, query_folder=query.name) as state:
        assert (state.bucket_map, state.batch, state_of(state)) == (bucket_map, 1, models[1])

    query.put_in_force()
    with open_state(root) as state:
        assert (state.bucket_map, state.batch, state.oldest_batch) == (bucket_map, 1, 1)
        assert state_of(state) == models[1]
        for key in (KEYS[0], KEYS[3], KEYS[-1]):
            assert as_model(state.get(key)).items() <= models[1].items()
    with open_state(root, batch=1, unproven=True) as state:
        assert state_of(state) == models[1]
    with pytest.raises(MissingCheckpointError, match=r"batch 0 of .* cannot be read: the files have batch 1 to 1"):
        open_state(root, batch=0)

    # What changes nothing leaves no file: the bucket is as it began.
    for at in range(2):
        query.batch({key: Row(8 + at, "new") for key in KEYS[:2]})
        models.append(query.model)
    with open_state(root) as state:
        assert (state.oldest_batch, state.batch) == (1, 3)
    for batch in (1, 2, 3):
        with open_state(root, batch=batch) as state:
            assert state_of(state) == models[batch]
    # Exactly, by the pointers that Spark hands out, of which most need their parents.
    pointers = {it.bucket: it for it in query.pointers}
    told = QueryOfOperator("counts", query.name, "/checkpoint")
    with open_exact(root, told, lambda: ExactBatch(4, 2, 4, pointers)) as state:
        assert state_of(state) == query.model
    query.folder.child(PARENTS_FOLDER).remove("0.parent.json")
    with pytest.raises(MissingCheckpointError), open_state(root) as state:
        state_of(state)


def test_commands_read_a_rescaled_query_straight_after(tmp_path: Path, old: OldJob) -> None:
    query, root = rescaled_in_place(tmp_path, old, BucketMap(9)), str(tmp_path / "root")
    query.begin()
    for at in range(2):
        query.batch({key: Row(7 + at, "new") for key in KEYS[:2]})
    query.put_in_force()

    def ran(*arguments: str, code: int = 0) -> str:
        made = CliRunner().invoke(build_application(), list(arguments))
        assert made.exit_code == code, made.output
        return str(made.stdout)

    # Keys that nothing has changed since the query was rescaled, and the two that were.
    assert json.loads(ran("get", root, "--json", '{"name": "b", "x": 1.5}', "-o", "jsonl"))["note"] == "old"
    assert json.loads(ran("get", root, "--json", '{"name": "a", "x": 1.5}', "-o", "jsonl"))["count"] == 7
    assert "buckets       9" in ran("show", root)
    assert len(ran("scan", root, "-o", "jsonl").splitlines()) == len(KEYS)
    differences = [json.loads(it) for it in ran("diff", root, "--at", "1", "-o", "jsonl", code=1).splitlines()]
    assert [it["before"]["count"] for it in differences] == [1, 1]
    exported = tmp_path / "exported.arrow"
    ran("export", root, str(exported))
    with open_state(root) as state:
        assert as_model(pa.ipc.open_file(exported).read_all()) == state_of(state)


def test_what_was_refused_or_killed_leaves_nothing_that_counts(tmp_path: Path, old: OldJob) -> None:
    """Calls have begun to write when another one is refused, or the process dies; the query goes on as it was."""
    root, dead = tmp_path / "root", rescaled_in_place(tmp_path, old, BucketMap(9))
    dead.begin()
    dead.batch({key: Row(7, "in vain") for key in KEYS})
    with open_state(str(root)) as state:
        assert (state.buckets, state.batch, state_of(state)) == (4, 0, old.models[0])
    assert asked(root) == ["query"]
    assert keys_asked(root) == {"query": ["waiting"]}
    with pytest.raises(UsageError, match=r"no longer uses that folder, .* or name query"):
        asked(root, query_folder=dead.name)
    old.batch({key: Row(8, "old") for key in KEYS})
    put_in_force([dead.operator], "query", plan_of(2), lambda: None)
    with open_state(str(root)) as state:
        assert (state.buckets, state.batch, state_of(state)) == (4, 1, old.models[1])
    # What it holds is found all the same.
    receipt = erase_scan(str(root), {"name": [KEYS[1][0]], "x": [KEYS[1][1]]}, operator="counts")
    assert {Path(it.where).relative_to(root).parts[1] for it in receipt.found} == {"query", dead.name}

    finishing, background = Finishing(), Later()

    def turn(batch: int, held: bool = False) -> list[str]:
        """What the first bucket has removed in its turn; what is there then."""
        pointer = replace(old.pointers[-1][0], batch=batch, query_folder="query")
        finishing.in_turn([dead.operator], "query", plan_of(2), pointer, 2, lambda: None, lambda name: held, background)
        background.do()
        return dead.operator.names()

    assert dead.name in turn(4)
    assert dead.name in turn(4), "Spark retains batches from before it"
    assert dead.name in turn(5), "somebody may write there still"
    assert dead.name in turn(5, held=True)
    assert turn(5) == ["query", "starting"]
    with open_state(str(root)) as state:
        assert state_of(state) == old.models[1]


def test_a_rescaling_that_is_under_way_is_not_removed(tmp_path: Path, old: OldJob) -> None:
    query, finishing, background = rescaled_in_place(tmp_path, old, BucketMap(9)), Finishing(), Later()
    query.begin()
    late = replace(old.pointers[-1][0], batch=90, query_folder="query")
    for _ in range(3):
        finishing.in_turn([query.operator], "query", plan_of(1), late, 2, lambda: None, lambda _: False, background)
        background.do()
    assert query.name in query.operator.names()
    # A late call of the batch before takes nothing back either.
    query.batch({KEYS[0]: Row(7)})
    query.put_in_force()
    put_in_force([query.operator], "query", plan_of(1), lambda: None)
    with open_state(str(tmp_path / "root")) as state:
        assert state.buckets == 9


def test_requests_go_to_the_folder_in_force_and_come_along(tmp_path: Path, old: OldJob) -> None:
    root = tmp_path / "root"
    query = rescaled_in_place(tmp_path, old, BucketMap(9))
    query.begin()
    query.batch({KEYS[0]: Row(7)})
    # The batch is committed, and no call has said so yet.
    assert asked(root) == ["query"]
    for _ in range(2):
        query.put_in_force()
    assert keys_asked(root) == {query.name: ["waiting"]}
    assert asked(root) == [query.name]
    assert keys_asked(root) == {query.name: ["waiting", "waiting"]}
    # It is rescaled once more.
    again = folder_beside(query, 2)
    put_in_force([query.operator], again, plan_of(2), lambda: None)
    assert keys_asked(root) == {again: ["waiting", "waiting"]}
    with pytest.raises(UsageError, match="no longer uses that folder"):
        asked(root, query_folder=query.name)
    # It goes back to before it was rescaled at all: also what was done elsewhere is to be done there.
    put_in_force([query.operator], "query", plan_of(3), lambda: None)
    assert keys_asked(root) == {"query": ["waiting", "waiting"]}
    with open_state(str(root)) as state:
        assert state.buckets == 4


def test_a_request_that_comes_as_the_query_goes_on_is_asked_for_there_too(
    tmp_path: Path, old: OldJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    query, add = rescaled_in_place(tmp_path, old, BucketMap(9)), EraseFolder.add
    query.begin()
    query.batch({KEYS[0]: Row(7)})

    def add_as_the_query_goes_on(self: EraseFolder, request: EraseRequest) -> int:
        monkeypatch.setattr(EraseFolder, "add", add)
        # Nothing waits yet, so nothing is taken along.
        query.put_in_force()
        return add(self, request)

    monkeypatch.setattr(EraseFolder, "add", add_as_the_query_goes_on)
    assert asked(tmp_path / "root") == ["query", query.name]
    assert keys_asked(tmp_path / "root") == {query.name: ["waiting"]}


def folder_beside(query: InPlace, plan: int) -> str:
    """A folder that the query was rescaled to from its present one, as its first batch leaves it."""
    name = f"query.r{plan_of(plan)[:12]}"
    record = StartRecord("rescale", query.folder.root, "", 2, "no_claim", "counts")
    note_start(query.operator.child(name), record)
    made = query.job.operator_file(name)
    query.operator.child(name).put(operator_file_name(0), made.encode())
    return name


def test_a_damaged_request_stays_and_is_told(tmp_path: Path, old: OldJob, caplog: pytest.LogCaptureFixture) -> None:
    query = rescaled_in_place(tmp_path, old, BucketMap(9))
    query.begin()
    for _ in range(2):
        asked(tmp_path / "root")
    old.folder.child("erase").put("00000001.keys.arrow", b"damaged")
    query.put_in_force()
    assert keys_asked(tmp_path / "root") == {query.name: ["waiting"]}
    assert "erase request 1 of" in caplog.text
    assert not take_requests(old.folder, query.folder, waiting_only=True)


def test_a_request_that_comes_between_plan_and_batch_is_refused(tmp_path: Path, old: OldJob) -> None:
    query = rescaled_in_place(tmp_path, old, BucketMap(9))
    asked(tmp_path / "root")
    with pytest.raises(ChangedJobError, match=r"erase request 1 in .* is not done yet: go on with 4 buckets"):
        query.begin()
    with open_state(str(tmp_path / "root")) as state:
        assert state.buckets == 4


def planned(old: OldJob, query: InPlace, **changes: Any) -> dict[str, Any]:
    """What a task of the plan answers."""
    job = replace(query.job, **changes)
    told = {
        "options": job.options.to_plain(),
        "package_version": job.package_version,
        "operator": job.operator,
        "query_folder": old.query_id,
        "holder": "the plan",
        "rescales": True,
        "wanted": job.operator_file(old.query_id).encode().decode(),
        "case": False,
    }
    answered: dict[str, Any] = json.loads(pa.Table.from_batches(savepoint_tasks.begin(told, ()))["answer"][0].as_py())
    return answered


def test_the_plan_refuses_what_it_can_know(tmp_path: Path, old: OldJob) -> None:
    query = rescaled_in_place(tmp_path, old, BucketMap(9))
    before = sorted(tmp_path.rglob("*"))
    schema = json.loads(query.job.state_schema)
    schema["fields"][0]["type"] = "string"
    other = planned(old, query, state_schema=json.dumps(schema))
    assert other["refused"][0] == "SchemaChangedError"
    by_partition = replace(query.job.options, bucket_by=SourcePartition("partition", counts=4))
    assert planned(old, query, options=by_partition)["refused"][0] == "BucketMapChangedError"
    assert sorted(tmp_path.rglob("*")) == before, "nothing is held, nor written"
    asked(tmp_path / "root")
    name, text = planned(old, query)["refused"]
    assert (name, text.split(": ")[0].rpartition("request ")[2].partition(" ")[0]) == ("ChangedJobError", "1")
    withdraw_erasure(str(tmp_path / "root"), 1, operator="counts")
    assert "refused" in planned(old, query), "its number waits still"


@pytest.mark.parametrize(
    ("listed", "in_force"),
    [
        ({"q": []}, {"q"}),
        ({"q": ["detached.json"], "q.r0123456789ab": ["start.json"]}, {"q"}),
        ({"q": [], "q.r0123456789ab": ["detached.json"]}, {"q.r0123456789ab"}),
        ({"q": [], "q.r0123456789ab": [], "q.r1123456789ab": ["detached.json"], "p": []}, {"q.r1123456789ab", "p"}),
        ({"q.r0123456789ab": [], "q.r1123456789ab": []}, {"q.r0123456789ab", "q.r1123456789ab"}),
        ({}, set()),
    ],
)
def test_which_folders_are_in_force(listed: dict[str, list[str]], in_force: set[str]) -> None:
    assert folders_in_force(listed) == in_force
