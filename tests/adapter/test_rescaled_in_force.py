"""Readers, erase requests and clean-up use the folder of a rescaled query that Spark's pointers name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from reading_support import Job as OldJob
from reading_support import as_model, state_of
from rescaled_in_place import InPlace, make_plan_id, plan_in_place
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


def read_requests(root: Path) -> dict[str, list[str]]:
    """Return the states of all erase requests by query folder."""
    requests: dict[str, list[str]] = {}
    for status in erase_status(str(root), operator="counts"):
        requests.setdefault(status.query_folder, []).append(status.state)
    return requests


def request_erasure(root: Path, **where: Any) -> list[str]:
    """Request the erasure of a key, and return the query folders of the request."""
    keys = {"name": [KEYS[1][0]], "x": [KEYS[1][1]]}
    return [request.query_folder for request in erase_keys(str(root), keys, operator="counts", **where)]


@pytest.mark.parametrize("bucket_map", MAPS.values(), ids=MAPS)
def test_state_is_readable_from_the_first_batch_after_a_rescaling(
    tmp_path: Path, old: OldJob, bucket_map: BucketMap
) -> None:
    root, models = str(tmp_path / "root"), [*old.models]
    query = plan_in_place(tmp_path, old, bucket_map)
    # Buckets without changes are not renewed meanwhile, so only some have a file of their own.
    query.retained = 100
    query.begin()
    query.batch({key: Row(7, "new") for key in KEYS[:2]})
    models.append(query.model)
    with open_state(root) as state:
        # No file shows yet that Spark has committed the batch.
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

    # A batch that does not change a bucket writes no file for it: the bucket still has its initial state.
    for at in range(2):
        query.batch({key: Row(8 + at, "new") for key in KEYS[:2]})
        models.append(query.model)
    with open_state(root) as state:
        assert (state.oldest_batch, state.batch) == (1, 3)
    for batch in (1, 2, 3):
        with open_state(root, batch=batch) as state:
            assert state_of(state) == models[batch]
    # Read exactly, by the pointers that Spark hands out; most of them need their parents.
    pointers = {pointer.bucket: pointer for pointer in query.pointers}
    query_of_operator = QueryOfOperator("counts", query.name, "/checkpoint")
    with open_exact(root, query_of_operator, lambda: ExactBatch(4, 2, 4, pointers)) as state:
        assert state_of(state) == query.model
    query.folder.child(PARENTS_FOLDER).remove("0.parent.json")
    with pytest.raises(MissingCheckpointError), open_state(root) as state:
        state_of(state)


def test_commands_read_a_query_directly_after_its_rescaling(tmp_path: Path, old: OldJob) -> None:
    query, root = plan_in_place(tmp_path, old, BucketMap(9)), str(tmp_path / "root")
    query.begin()
    for at in range(2):
        query.batch({key: Row(7 + at, "new") for key in KEYS[:2]})
    query.put_in_force()

    def run(*arguments: str, code: int = 0) -> str:
        result = CliRunner().invoke(build_application(), list(arguments))
        assert result.exit_code == code, result.output
        return str(result.stdout)

    # Read a key that has not changed since the query was rescaled, and one that has.
    assert json.loads(run("get", root, "--json", '{"name": "b", "x": 1.5}', "-o", "jsonl"))["note"] == "old"
    assert json.loads(run("get", root, "--json", '{"name": "a", "x": 1.5}', "-o", "jsonl"))["count"] == 7
    assert "buckets       9" in run("show", root)
    assert len(run("scan", root, "-o", "jsonl").splitlines()) == len(KEYS)
    differences = [json.loads(line) for line in run("diff", root, "--at", "1", "-o", "jsonl", code=1).splitlines()]
    assert [difference["before"]["count"] for difference in differences] == [1, 1]
    exported = tmp_path / "exported.arrow"
    run("export", root, str(exported))
    with open_state(root) as state:
        assert as_model(pa.ipc.open_file(exported).read_all()) == state_of(state)


def test_an_abandoned_rescaling_has_no_effect_and_its_folder_is_removed(tmp_path: Path, old: OldJob) -> None:
    """Some calls have written when another one is refused or the process dies; the query continues unchanged."""
    root, abandoned = tmp_path / "root", plan_in_place(tmp_path, old, BucketMap(9))
    abandoned.begin()
    abandoned.batch({key: Row(7, "in vain") for key in KEYS})
    with open_state(str(root)) as state:
        assert (state.buckets, state.batch, state_of(state)) == (4, 0, old.models[0])
    assert request_erasure(root) == ["query"]
    assert read_requests(root) == {"query": ["waiting"]}
    with pytest.raises(UsageError, match=r"no longer uses that folder, .* or name query"):
        request_erasure(root, query_folder=abandoned.name)
    old.batch({key: Row(8, "old") for key in KEYS})
    put_in_force([abandoned.operator], "query", make_plan_id(2), lambda: None)
    with open_state(str(root)) as state:
        assert (state.buckets, state.batch, state_of(state)) == (4, 1, old.models[1])
    # The scan still finds the keys that the abandoned folder holds.
    receipt = erase_scan(str(root), {"name": [KEYS[1][0]], "x": [KEYS[1][1]]}, operator="counts")
    assert {Path(copy.where).relative_to(root).parts[1] for copy in receipt.found} == {"query", abandoned.name}

    finishing, background = Finishing(), Later()

    def take_turn(batch: int, held: bool = False) -> list[str]:
        """Let the first bucket remove folders in its turn, and return the folders that remain."""
        pointer = replace(old.pointers[-1][0], batch=batch, query_folder="query")
        finishing.in_turn(
            [abandoned.operator], "query", make_plan_id(2), pointer, 2, lambda: None, lambda name: held, background
        )
        background.do()
        return abandoned.operator.names()

    assert abandoned.name in take_turn(4)
    assert abandoned.name in take_turn(4), "Spark retains batches from before it"
    assert abandoned.name in take_turn(5), "a late task may still write there"
    assert abandoned.name in take_turn(5, held=True)
    assert take_turn(5) == ["query", "starting"]
    with open_state(str(root)) as state:
        assert state_of(state) == old.models[1]


def test_the_folder_of_a_current_rescaling_is_not_removed(tmp_path: Path, old: OldJob) -> None:
    query, finishing, background = plan_in_place(tmp_path, old, BucketMap(9)), Finishing(), Later()
    query.begin()
    late = replace(old.pointers[-1][0], batch=90, query_folder="query")
    for _ in range(3):
        finishing.in_turn(
            [query.operator], "query", make_plan_id(1), late, 2, lambda: None, lambda _: False, background
        )
        background.do()
    assert query.name in query.operator.names()
    # A late call of the previous batch does not put the old folder in force again.
    query.batch({KEYS[0]: Row(7)})
    query.put_in_force()
    put_in_force([query.operator], "query", make_plan_id(1), lambda: None)
    with open_state(str(tmp_path / "root")) as state:
        assert state.buckets == 9


def test_erase_requests_move_to_the_folder_in_force(tmp_path: Path, old: OldJob) -> None:
    root = tmp_path / "root"
    query = plan_in_place(tmp_path, old, BucketMap(9))
    query.begin()
    query.batch({KEYS[0]: Row(7)})
    # The batch is committed, but no call has put the new folder in force yet.
    assert request_erasure(root) == ["query"]
    for _ in range(2):
        query.put_in_force()
    assert read_requests(root) == {query.name: ["waiting"]}
    assert request_erasure(root) == [query.name]
    assert read_requests(root) == {query.name: ["waiting", "waiting"]}
    # Rescale the query once more.
    again = make_folder_rescaled_again(query, 2)
    put_in_force([query.operator], again, make_plan_id(2), lambda: None)
    assert read_requests(root) == {again: ["waiting", "waiting"]}
    with pytest.raises(UsageError, match="no longer uses that folder"):
        request_erasure(root, query_folder=query.name)
    # Roll back to before the first rescaling: requests carried out in later folders must be carried out here too.
    put_in_force([query.operator], "query", make_plan_id(3), lambda: None)
    assert read_requests(root) == {"query": ["waiting", "waiting"]}
    with open_state(str(root)) as state:
        assert state.buckets == 4


def test_an_erase_request_during_a_rescaling_is_placed_in_both_folders(
    tmp_path: Path, old: OldJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    query, add = plan_in_place(tmp_path, old, BucketMap(9)), EraseFolder.add
    query.begin()
    query.batch({KEYS[0]: Row(7)})

    def put_in_force_and_add(self: EraseFolder, request: EraseRequest) -> int:
        monkeypatch.setattr(EraseFolder, "add", add)
        # No request waits yet, so none is moved.
        query.put_in_force()
        return add(self, request)

    monkeypatch.setattr(EraseFolder, "add", put_in_force_and_add)
    assert request_erasure(tmp_path / "root") == ["query", query.name]
    assert read_requests(tmp_path / "root") == {query.name: ["waiting"]}


def make_folder_rescaled_again(query: InPlace, plan: int) -> str:
    """Write the folder that a further rescaling's first batch would leave, and return its name."""
    name = f"query.r{make_plan_id(plan)[:12]}"
    record = StartRecord("rescale", query.folder.root, "", 2, "no_claim", "counts")
    note_start(query.operator.child(name), record)
    operator_file = query.job.operator_file(name)
    query.operator.child(name).put(operator_file_name(0), operator_file.encode())
    return name


def test_a_damaged_erase_request_is_not_moved_and_is_logged(
    tmp_path: Path, old: OldJob, caplog: pytest.LogCaptureFixture
) -> None:
    query = plan_in_place(tmp_path, old, BucketMap(9))
    query.begin()
    for _ in range(2):
        request_erasure(tmp_path / "root")
    old.folder.child("erase").put("00000001.keys.arrow", b"damaged")
    query.put_in_force()
    assert read_requests(tmp_path / "root") == {query.name: ["waiting"]}
    assert "erase request 1 of" in caplog.text
    assert take_requests(query.operator, query.name, ["query"]) == {"query"}


def test_a_rescaling_is_refused_if_an_erase_request_came_after_its_plan(tmp_path: Path, old: OldJob) -> None:
    query = plan_in_place(tmp_path, old, BucketMap(9))
    request_erasure(tmp_path / "root")
    with pytest.raises(ChangedJobError, match=r"erase request 1 in .* is not done yet: go on with 4 buckets"):
        query.begin()
    with open_state(str(tmp_path / "root")) as state:
        assert state.buckets == 4


def run_plan_task(old: OldJob, query: InPlace, **changes: Any) -> dict[str, Any]:
    """Return the answer of a task of the plan."""
    job = replace(query.job, **changes)
    arguments = {
        "options": job.options.to_plain(),
        "package_version": job.package_version,
        "operator": job.operator,
        "query_folder": old.query_id,
        "holder": "the plan",
        "rescales": True,
        "wanted": job.operator_file(old.query_id).encode().decode(),
        "case": False,
    }
    answer: dict[str, Any] = json.loads(
        pa.Table.from_batches(savepoint_tasks.begin(arguments, ()))["answer"][0].as_py()
    )
    return answer


def test_the_plan_refuses_changed_schemas_and_maps_and_waiting_erase_requests(tmp_path: Path, old: OldJob) -> None:
    query = plan_in_place(tmp_path, old, BucketMap(9))
    before = sorted(tmp_path.rglob("*"))
    schema = json.loads(query.job.state_schema)
    schema["fields"][0]["type"] = "string"
    answer = run_plan_task(old, query, state_schema=json.dumps(schema))
    assert answer["refused"][0] == "SchemaChangedError"
    by_partition = replace(query.job.options, bucket_by=SourcePartition("partition", counts=4))
    assert run_plan_task(old, query, options=by_partition)["refused"][0] == "BucketMapChangedError"
    assert sorted(tmp_path.rglob("*")) == before, "no hold and no file is written"
    request_erasure(tmp_path / "root")
    name, text = run_plan_task(old, query)["refused"]
    assert (name, text.split(": ")[0].rpartition("request ")[2].partition(" ")[0]) == ("ChangedJobError", "1")
    withdraw_erasure(str(tmp_path / "root"), 1, operator="counts")
    assert "refused" in run_plan_task(old, query), "its number still waits"


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
def test_folders_in_force_returns_one_folder_per_query(listed: dict[str, list[str]], in_force: set[str]) -> None:
    assert folders_in_force(listed) == in_force
