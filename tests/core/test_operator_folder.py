"""The operator's folder: the schema in force, and state of other queries."""

from __future__ import annotations

import json
import logging
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from arrow_schemas import OperatorFile
from arrow_schemas.checksum import compute_checksum
from spark_state_ext.errors import (
    BucketCountChangedError,
    CorruptFileError,
    ExistingStateError,
    FunctionChangedError,
    SchemaChangedError,
    VersionSkewError,
)
from spark_state_ext.files import operator_catalog
from spark_state_ext.files.folder import Folder
from spark_state_ext.files.operator_catalog import OperatorCatalog


def make_operator_file(count: str = "integer", buckets: int = 4, query: str = "query") -> OperatorFile:
    def schema(name: str, spark: str) -> str:
        return json.dumps(
            {"type": "struct", "fields": [{"name": name, "type": spark, "nullable": True, "metadata": {}}]}
        )

    return OperatorFile("counts", query, buckets, schema("k", "string"), schema("count", count))


def admit(files: Folder, operator_file: OperatorFile, strict: bool = False) -> OperatorFile:
    return OperatorCatalog().admit(files, operator_file, strict)


def test_an_evolved_schema_gets_a_new_operator_file_and_a_restart_does_not(tmp_path: Path) -> None:
    files = Folder(str(tmp_path))
    for _ in range(2):
        assert admit(files, make_operator_file()).schema_id == 0
    assert files.child("query").names() == ["operator_0.json"]
    first = files.child("query").get("operator_0.json")
    for _ in range(2):
        assert admit(files, make_operator_file("long")).schema_id == 1
    assert files.child("query").names() == ["operator_0.json", "operator_1.json"]
    assert files.child("query").get("operator_0.json") == first
    # Going back to the old schema would truncate stored numbers.
    with pytest.raises(SchemaChangedError, match="'count' was int64 and is now int32"):
        admit(files, make_operator_file())
    with pytest.raises(BucketCountChangedError, match="buckets=4"):
        admit(files, make_operator_file("long", buckets=5))
    assert files.child("query").names() == ["operator_0.json", "operator_1.json"], "a refusal writes nothing"


def make_top_k_file(**parameters: object) -> OperatorFile:
    return replace(
        make_operator_file(), function=json.dumps({"name": "top_k", "parameters": parameters}, sort_keys=True)
    )


def test_a_built_in_operator_keeps_its_parameters(tmp_path: Path) -> None:
    files = Folder(str(tmp_path))
    for _ in range(2):
        assert admit(files, make_top_k_file(k=3, order_by="at descending")).schema_id == 0
    with pytest.raises(FunctionChangedError, match=r"'counts' changed: of top_k, 'k' was 3 and is now 5.* go back"):
        admit(files, make_top_k_file(k=5, order_by="at descending"))
    with pytest.raises(
        FunctionChangedError, match="'k' was 3 and is now 2, 'order_by' was at descending and is now at"
    ):
        admit(files, make_top_k_file(k=2, order_by="at ascending"))
    with pytest.raises(FunctionChangedError, match="it was top_k and is now aggregate"):
        admit(files, replace(make_operator_file(), function='{"name": "aggregate", "parameters": {}}'))
    assert files.child("query").names() == ["operator_0.json"], "a refusal writes nothing"
    # A new parameter, and a user's function, whose parameters are unknown, are admitted.
    assert admit(files, make_top_k_file(k=3, order_by="at descending", more="sum")).schema_id == 0
    assert admit(files, make_operator_file()).schema_id == 0


def test_an_operator_file_without_a_function_serves_any(tmp_path: Path) -> None:
    files = Folder(str(tmp_path))
    admit(files, make_operator_file())
    assert b"function" not in files.child("query").get("operator_0.json")
    assert admit(files, make_top_k_file(k=3)).function is None
    # The function is known from the next operator file on.
    assert admit(files, replace(make_operator_file("long"), function=make_top_k_file(k=3).function)).schema_id == 1
    with pytest.raises(FunctionChangedError):
        admit(files, replace(make_operator_file("long"), function=make_top_k_file(k=4).function))


@pytest.mark.parametrize(
    "function", ["top_k", {"name": 1, "parameters": {}}, {"name": "top_k"}, {"name": "top_k", "parameters": [1]}]
)
def test_an_operator_file_with_a_malformed_function_is_refused(function: object) -> None:
    with pytest.raises(CorruptFileError, match=r"operator_0\.json"):
        OperatorFile.decode(replace(make_operator_file(), function=json.dumps(function)).encode(), "operator_0.json")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (name, value)
        for name in ("buckets", "schema_id", "format")
        for value in (-1, 2 * 10**7 if name == "buckets" else 10**30, 1.5, "1", True)
    ],
)
def test_an_operator_file_with_numbers_out_of_range_is_refused(name: str, value: object) -> None:
    fields = {**json.loads(make_operator_file().encode()), name: value}
    del fields["checksum"]
    data = json.dumps({**fields, "checksum": compute_checksum(fields)}).encode()
    newer = name == "format" and value == 10**30
    with pytest.raises(VersionSkewError if newer else CorruptFileError, match=f"{value}"):
        OperatorFile.decode(data, "operator_0.json")


def test_concurrent_tasks_agree_on_one_operator_file(tmp_path: Path) -> None:
    files_of_tasks: list[OperatorFile] = []
    files = Folder(str(tmp_path))

    def admit_in_thread() -> None:
        files_of_tasks.append(OperatorCatalog().admit(files, make_operator_file(), False))

    threads = [threading.Thread(target=admit_in_thread) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {file.encode() for file in files_of_tasks} == {make_operator_file().encode()}
    assert files.child("query").names() == ["operator_0.json"]


def test_state_of_another_query_is_refused_if_strict_and_logged_otherwise(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = Folder(str(tmp_path))
    admit(files, make_operator_file(query="old"), strict=True)
    with pytest.raises(ExistingStateError, match=r"old.*checkpointLocation"):
        admit(files, make_operator_file(query="new"), strict=True)
    assert files.names() == ["old"]
    with caplog.at_level(logging.WARNING, "spark_state_ext"):
        admit(files, make_operator_file(query="new"))
    assert "old" in caplog.text
    # The query's own state causes no warning, strict or not.
    caplog.clear()
    admit(files, make_operator_file(query="new"), strict=True)
    assert caplog.text == ""


def test_a_damaged_operator_file_stops_the_job(tmp_path: Path) -> None:
    files = Folder(str(tmp_path))
    admit(files, make_operator_file())
    data = files.child("query").get("operator_0.json")
    files.child("query").put("operator_0.json", data.replace(b'"count"', b'"amount"'))
    with pytest.raises(CorruptFileError, match=r"operator_0\.json"):
        admit(files, make_operator_file())


def test_a_refusal_is_not_remembered(tmp_path: Path) -> None:
    files = Folder(str(tmp_path))
    admit(files, make_operator_file())
    wrong = make_operator_file(buckets=5)
    catalog = OperatorCatalog()
    with pytest.raises(BucketCountChangedError):
        catalog.admit(files, wrong, False)
    with pytest.raises(BucketCountChangedError):
        catalog.admit(files, wrong, False)


def test_an_earlier_attempt_at_the_first_batch_is_not_another_query(tmp_path: Path) -> None:
    """If tasks do not know their query, each attempt begins in its own folder, which `strict` must allow."""
    files, batch_ms = Folder(str(tmp_path)), 1_700_000_000_000
    first = operator_catalog.new_query_folder(batch_ms, "a" * 32)
    for query_folder in (first, "query"):
        files.child("starting").put(f"{batch_ms}-{query_folder[:1] * 32}", query_folder.encode())
        OperatorCatalog().admit(files, make_operator_file(query=query_folder), True, batch_ms=batch_ms)
    files.child("spill", "t1700").put("rows.payloads", b"")
    second = operator_catalog.new_query_folder(batch_ms, "b" * 32)
    OperatorCatalog().admit(files, make_operator_file(query=second), True, batch_ms=batch_ms)
    third = operator_catalog.new_query_folder(batch_ms + 1, "c" * 32)
    with pytest.raises(ExistingStateError, match=f"where other queries have state: query, {first}"):
        OperatorCatalog().admit(files, make_operator_file(query=third), True, batch_ms=batch_ms + 1)


def test_a_folder_without_state_is_not_another_query(tmp_path: Path) -> None:
    """A lease is taken before a strict start is refused, and rows can be in transit before state exists."""
    files = Folder(str(tmp_path))
    files.child("refused", "lease").put(f"{1:016d}.json", b"{}")
    files.child("refused-long-ago").put("lease.json", b"{}")
    files.child("spilled", "spill", "0-1700").put("rows.payloads", b"")
    files.child("both", "lease").put(f"{1:016d}.json", b"{}")
    files.child("both", "spill", "0-1700").put("rows.payloads", b"")
    assert operator_catalog.list_other_queries(files) == []
    admit(files, make_operator_file(), strict=True)
    # State without an operator file is still state, also next to the new query's folder.
    files.child("spilled", "0").put(f"1_{'0' * 32}.delta.arrow", b"rows")
    with pytest.raises(ExistingStateError, match="have state: query, spilled"):
        admit(files, make_operator_file(query="new"), strict=True)
