"""The operator's folder: which schema is in force, and who else is there."""

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


def _wanted(count: str = "integer", buckets: int = 4, query: str = "query") -> OperatorFile:
    def schema(name: str, spark: str) -> str:
        return json.dumps(
            {"type": "struct", "fields": [{"name": name, "type": spark, "nullable": True, "metadata": {}}]}
        )

    return OperatorFile("counts", query, buckets, schema("k", "string"), schema("count", count))


def _again(files: Folder, wanted: OperatorFile, strict: bool = False) -> OperatorFile:
    return OperatorCatalog().admit(files, wanted, strict)


def test_first_start_restart_and_evolution(tmp_path: Path) -> None:
    files = Folder(str(tmp_path))
    for _ in range(2):
        assert _again(files, _wanted()).schema_id == 0
    assert files.child("query").names() == ["operator_0.json"]
    first = files.child("query").get("operator_0.json")
    for _ in range(2):
        assert _again(files, _wanted("long")).schema_id == 1
    assert files.child("query").names() == ["operator_0.json", "operator_1.json"]
    assert files.child("query").get("operator_0.json") == first
    # Going back would cut stored numbers.
    with pytest.raises(SchemaChangedError, match="'count' was int64 and is now int32"):
        _again(files, _wanted())
    with pytest.raises(BucketCountChangedError, match="buckets=4"):
        _again(files, _wanted("long", buckets=5))
    assert files.child("query").names() == ["operator_0.json", "operator_1.json"], "a refusal writes nothing"


def _top(**parameters: object) -> OperatorFile:
    return replace(_wanted(), function=json.dumps({"name": "top_k", "parameters": parameters}, sort_keys=True))


def test_a_built_in_operator_keeps_its_parameters(tmp_path: Path) -> None:
    files = Folder(str(tmp_path))
    for _ in range(2):
        assert _again(files, _top(k=3, order_by="at descending")).schema_id == 0
    with pytest.raises(FunctionChangedError, match=r"'counts' changed: of top_k, 'k' was 3 and is now 5.* go back"):
        _again(files, _top(k=5, order_by="at descending"))
    with pytest.raises(
        FunctionChangedError, match="'k' was 3 and is now 2, 'order_by' was at descending and is now at"
    ):
        _again(files, _top(k=2, order_by="at ascending"))
    with pytest.raises(FunctionChangedError, match="it was top_k and is now aggregate"):
        _again(files, replace(_wanted(), function='{"name": "aggregate", "parameters": {}}'))
    assert files.child("query").names() == ["operator_0.json"], "a refusal writes nothing"
    # A new aggregate, and a function of the user's, which nothing is known of.
    assert _again(files, _top(k=3, order_by="at descending", more="sum")).schema_id == 0
    assert _again(files, _wanted()).schema_id == 0


def test_an_operator_file_without_a_function_serves_any(tmp_path: Path) -> None:
    files = Folder(str(tmp_path))
    _again(files, _wanted())
    assert b"function" not in files.child("query").get("operator_0.json")
    assert _again(files, _top(k=3)).function is None
    # It is known from the next file on.
    assert _again(files, replace(_wanted("long"), function=_top(k=3).function)).schema_id == 1
    with pytest.raises(FunctionChangedError):
        _again(files, replace(_wanted("long"), function=_top(k=4).function))


@pytest.mark.parametrize(
    "function", ["top_k", {"name": 1, "parameters": {}}, {"name": "top_k"}, {"name": "top_k", "parameters": [1]}]
)
def test_a_function_of_another_form_is_no_operator_file(function: object) -> None:
    with pytest.raises(CorruptFileError, match=r"operator_0\.json"):
        OperatorFile.decode(replace(_wanted(), function=json.dumps(function)).encode(), "operator_0.json")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (name, value)
        for name in ("buckets", "schema_id", "format")
        for value in (-1, 2 * 10**7 if name == "buckets" else 10**30, 1.5, "1", True)
    ],
)
def test_numbers_out_of_range_are_a_damaged_file(name: str, value: object) -> None:
    fields = {**json.loads(_wanted().encode()), name: value}
    del fields["checksum"]
    data = json.dumps({**fields, "checksum": compute_checksum(fields)}).encode()
    newer = name == "format" and value == 10**30
    with pytest.raises(VersionSkewError if newer else CorruptFileError, match=f"{value}"):
        OperatorFile.decode(data, "operator_0.json")


def test_many_tasks_at_once(tmp_path: Path) -> None:
    found: list[OperatorFile] = []
    files = Folder(str(tmp_path))

    def admit() -> None:
        found.append(OperatorCatalog().admit(files, _wanted(), False))

    threads = [threading.Thread(target=admit) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {file.encode() for file in found} == {_wanted().encode()}
    assert files.child("query").names() == ["operator_0.json"]


def test_state_of_another_query(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = Folder(str(tmp_path))
    _again(files, _wanted(query="old"), strict=True)
    with pytest.raises(ExistingStateError, match=r"old.*checkpointLocation"):
        _again(files, _wanted(query="new"), strict=True)
    assert files.names() == ["old"]
    with caplog.at_level(logging.WARNING, "spark_state_ext"):
        _again(files, _wanted(query="new"))
    assert "old" in caplog.text
    # Its own state is no reason to warn, strict or not.
    caplog.clear()
    _again(files, _wanted(query="new"), strict=True)
    assert caplog.text == ""


def test_a_damaged_operator_file_stops_the_job(tmp_path: Path) -> None:
    files = Folder(str(tmp_path))
    _again(files, _wanted())
    data = files.child("query").get("operator_0.json")
    files.child("query").put("operator_0.json", data.replace(b'"count"', b'"amount"'))
    with pytest.raises(CorruptFileError, match=r"operator_0\.json"):
        _again(files, _wanted())


def test_a_refusal_is_not_remembered(tmp_path: Path) -> None:
    files = Folder(str(tmp_path))
    _again(files, _wanted())
    wrong = _wanted(buckets=5)
    catalog = OperatorCatalog()
    with pytest.raises(BucketCountChangedError):
        catalog.admit(files, wrong, False)
    with pytest.raises(BucketCountChangedError):
        catalog.admit(files, wrong, False)


def test_another_attempt_at_a_first_batch_is_no_other_query(tmp_path: Path) -> None:
    """Where tasks are not told their query each attempt begins in a folder of its own; `strict` must let it begin."""
    files, batch_ms = Folder(str(tmp_path)), 1_700_000_000_000
    first = operator_catalog.new_query_folder(batch_ms, "a" * 32)
    for query_folder in (first, "query"):
        files.child("starting").put(f"{batch_ms}-{query_folder[:1] * 32}", query_folder.encode())
        OperatorCatalog().admit(files, _wanted(query=query_folder), True, batch_ms=batch_ms)
    files.child("spill", "t1700").put("rows.payloads", b"")
    second = operator_catalog.new_query_folder(batch_ms, "b" * 32)
    OperatorCatalog().admit(files, _wanted(query=second), True, batch_ms=batch_ms)
    third = operator_catalog.new_query_folder(batch_ms + 1, "c" * 32)
    with pytest.raises(ExistingStateError, match=f"where other queries have state: query, {first}"):
        OperatorCatalog().admit(files, _wanted(query=third), True, batch_ms=batch_ms + 1)


def test_a_folder_without_state_is_no_other_query(tmp_path: Path) -> None:
    """A lease is taken before a strict start is refused; and rows may be in transit where no state began."""
    files = Folder(str(tmp_path))
    files.child("refused", "lease").put(f"{1:016d}.json", b"{}")
    files.child("refused-long-ago").put("lease.json", b"{}")
    files.child("spilled", "spill", "0-1700").put("rows.payloads", b"")
    files.child("both", "lease").put(f"{1:016d}.json", b"{}")
    files.child("both", "spill", "0-1700").put("rows.payloads", b"")
    assert operator_catalog.list_other_queries(files) == []
    _again(files, _wanted(), strict=True)
    # State that has lost its operator file is still state, also below the id of the query that begins.
    files.child("spilled", "0").put(f"1_{'0' * 32}.delta.arrow", b"rows")
    with pytest.raises(ExistingStateError, match="have state: query, spilled"):
        _again(files, _wanted(query="new"), strict=True)
