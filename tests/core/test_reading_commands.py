"""Commands that read state: show, get, scan and diff. Values and filters of their arguments."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import date, datetime, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from reading_support import as_model
from small_root import QUERY, SmallRoot, savepoint_of, small_root

from spark_state_ext.__main__ import main
from spark_state_ext.cli.values import parse_filter, parse_key, parse_value
from spark_state_ext.errors import UsageError
from spark_state_ext.testing.model import Row
from tests.helpers.waiting import WAIT_S

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def small(tmp_path: Path) -> Iterator[SmallRoot]:
    with small_root(tmp_path) as root:
        yield root


def run(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> list[dict[str, Any]]:
    assert main([*map(str, arguments), "-o", "jsonl"]) == code
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_show_prints_batches_and_columns(small: SmallRoot, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (row,) = run(capsys, "show", small.root)
    assert (row["operator"], row["query"], row["buckets"], row["batch"]) == ("counts", QUERY, 2, 6)
    assert (row["oldest_batch"], row["newest_batch"], row["begun_batch"]) == (-1, 6, 7)
    assert [(column["column"], column["type"], column["role"]) for column in row["columns"]] == [
        ("name", "string", "key"),
        ("x", "double", "key"),
        ("count", "int64", "state"),
        ("note", "string", "state"),
    ]
    (row,) = run(capsys, "show", small.root, "--unproven")
    assert (row["batch"], row["proven"]) == (6, False)
    assert main(["get", str(small.root), "ann", "0.0", "--unproven"]) == 0
    assert "unproven: files do not prove that batch 6 is committed" in capsys.readouterr().err
    (row,) = run(capsys, "show", savepoint_of(small.job, tmp_path / "savepoint").root)
    assert (row["batch"], row["oldest_batch"], row["proven"]) == (7, 7, True)


def test_get_returns_a_key_as_of_a_batch(small: SmallRoot, capsys: pytest.CaptureFixture[str]) -> None:
    for batch in range(7):
        model = small.job.models[batch]
        for key, row in model.items():
            (values,) = run(capsys, "get", small.root, "--at", batch, *key)
            assert (values["count"], values["note"], values["timeout_ms"]) == (row.count, row.record, row.timeout_ms)
    assert run(capsys, "get", small.query_folder, "cid", "1.0", "--at", "4", code=1) == []
    assert main(["get", str(small.root), "cid", "1.0", "--at", "4"]) == 1
    out, err = capsys.readouterr()
    assert (out, err) == ("", f"no such key after batch 4 of {small.query_folder}\n")
    by_json = json.dumps({"name": "ann", "x": 0.0})
    assert run(capsys, "get", small.root, "--json", by_json) == run(capsys, "get", small.root, "ann", "-o", "json", "0")
    assert not list((small.query_folder / "holds").glob("*")), "the hold was removed"


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["ann"], 2, "UsageError: a key has the columns name (string), x (double), one word each, but 1 words"),
        ([], 2, "UsageError: give the key either as words or with --json"),
        (["ann", "many"], 2, "UsageError: 'many' is not a value of the column 'x' (double)"),
        (["--json", '{"name": "ann"}'], 2, "UsageError: the key must be a JSON object with the columns"),
        (["--json", "{"], 2, "UsageError: the key is not JSON"),
        (["ann", "1", "--at", "7"], 3, "MissingCheckpointError: batch 7 of"),
        (["ann", "1", "--operator", "sums"], 2, "UsageError: "),
    ],
)
def test_get_reports_a_wrong_key_in_one_line(
    small: SmallRoot, arguments: list[str], code: int, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["get", str(small.root), *arguments]) == code
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith(f"spark-state-ext get: {text}")


def test_scan_selects_columns_rows_and_a_limit(small: SmallRoot, capsys: pytest.CaptureFixture[str]) -> None:
    model = small.job.models[6]
    rows = run(capsys, "scan", small.root)
    assert as_model(pa.Table.from_pylist(rows)) == model
    rows = run(capsys, "scan", small.root, "--columns", "name, count", "--filter", "count > 50 and not name == 'eve'")
    assert {row["name"]: row["count"] for row in rows} == {
        key[0]: row.count for key, row in model.items() if (row.count or 0) > 50 and key[0] != "eve"
    }
    assert rows
    assert list(rows[0]) == ["name", "count"]
    assert len(run(capsys, "scan", small.root, "--limit", 2)) == 2
    assert run(capsys, "scan", small.root, "--limit", 0) == []
    in_bucket = run(capsys, "scan", small.root, "--bucket", 1, "--columns", "bucket")
    assert {row["bucket"] for row in in_bucket} <= {1}
    assert main(["scan", str(small.root), "--filter", "nothing > 1"]) == 2
    assert "there is no column 'nothing' for the filter; there are name, x, count" in capsys.readouterr().err
    assert main(["scan", str(small.root), "--columns", "nothing"]) == 2
    assert main(["scan", str(small.root), "--bucket", "5"]) == 2


@pytest.mark.parametrize(("at", "other_at", "kinds"), [(3, 4, {"removed", "changed"}), (4, 6, {"added", "changed"})])
def test_diff_prints_differences_by_key(
    small: SmallRoot, at: int, other_at: int, kinds: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    before, after = small.job.models[at], small.job.models[other_at]
    changes: dict[str, set[tuple[Any, ...]]] = {"added": set(), "removed": set(), "changed": set()}
    for row in run(capsys, "diff", small.root, "--at", at, "--other-at", other_at, code=1):
        changes[row["change"]].add((row["name"], row["x"]))
        for model, side in ((before, "before"), (after, "after")):
            state = model.get((row["name"], row["x"]))
            assert (state is None) == (row[side] is None)
            if state is not None:
                assert row[side] == {"count": state.count, "note": state.record, "timeout_ms": state.timeout_ms}
    assert changes == {
        "added": after.keys() - before.keys(),
        "removed": before.keys() - after.keys(),
        "changed": {key for key in before.keys() & after.keys() if before[key] != after[key]},
    }
    assert {kind for kind, keys in changes.items() if keys} == kinds


def test_diff_compares_the_last_two_batches_by_default(
    small: SmallRoot, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = run(capsys, "diff", small.root, code=1)
    assert rows == run(capsys, "diff", small.root, "--at", 5, "--other-at", 6, code=1)
    assert rows
    # Only the later batch is named.
    at_4 = run(capsys, "diff", small.root, "--other-at", 4, code=1)
    assert at_4 == run(capsys, "diff", small.root, "--at", 3, "--other-at", 4, code=1) != rows
    assert run(capsys, "diff", small.root, "--limit", 2, code=1) == rows[:2]
    assert main(["diff", str(small.root), "--limit", "2"]) == 1
    assert "differences=2 (there are more: --limit) between batch 5" in capsys.readouterr().err
    assert main(["diff", str(small.root), "--limit", str(len(rows))]) == 1
    assert f"differences={len(rows)} between batch 5" in capsys.readouterr().err
    assert run(capsys, "diff", small.root, "--limit", 0, code=1) == [], "the exit code remains 1"
    savepoint = savepoint_of(small.job, tmp_path / "savepoint").root
    assert main(["diff", savepoint]) == 2
    assert "can be read, batch 7, and no earlier one to compare it with" in capsys.readouterr().err


def test_diff_compares_only_named_columns(small: SmallRoot, capsys: pytest.CaptureFixture[str]) -> None:
    rows = run(capsys, "diff", small.root, code=1)
    named = run(capsys, "diff", small.root, "--columns", "timeout_ms, count", code=1)
    for row, whole in zip(named, rows, strict=True):
        for side in ("before", "after"):
            assert row[side] == {name: whole[side][name] for name in ("timeout_ms", "count")}
    # Only one of the changed keys has a timeout.
    timeouts = run(capsys, "diff", small.root, "--columns", "timeout_ms", code=1)
    assert [row["name"] for row in timeouts] == ["bob"]
    assert main(["diff", str(small.root), "--columns", "nothing"]) == 2
    assert "column 'nothing' is not in both states; these are: count, note, timeout_ms" in capsys.readouterr().err


def test_diff_finds_no_difference_between_equal_states_in_other_files(
    small: SmallRoot, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(capsys, "diff", small.root, "--at", 6) == []
    # The same rows in a different number of buckets, and a savepoint of them.
    with small_root(tmp_path / "more", buckets=5) as other:
        assert run(capsys, "diff", small.root, other.root) == []
        savepoint = savepoint_of(other.job, tmp_path / "savepoint", "canonical", batch=6)
        assert run(capsys, "diff", small.query_folder, savepoint.root) == []
        other.job.batch({("ann", 0.0): Row(-1)})
        later = savepoint_of(other.job, tmp_path / "later")
        (row,) = [row for row in run(capsys, "diff", small.root, later.root, code=1) if row["name"] == "ann"]
        assert (row["change"], row["after"]["count"]) == ("changed", -1)


def test_duckdb_reads_the_arrow_output(small: SmallRoot) -> None:
    duckdb = pytest.importorskip("duckdb")
    done = subprocess.run(
        [sys.executable, "-m", "spark_state_ext", "scan", str(small.root), "-o", "arrow"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        timeout=WAIT_S,
        check=True,
    )
    rows = pa.ipc.open_stream(io.BytesIO(done.stdout)).read_all()
    ((total,),) = duckdb.from_arrow(rows).sum("count").fetchall()
    assert total == sum(row.count or 0 for row in small.job.models[6].values())
    assert done.stderr.decode().splitlines() == [
        "rows=6 batch=6",
        (
            "batch 6 is the newest that files prove to be committed; 7 has begun. --checkpoint LOCATION reads the last "
            "committed one"
        ),
    ]


def test_scan_without_a_hold_writes_no_file(small: SmallRoot, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.stat().st_mtime_ns for path in small.root.rglob("*") if path.is_file()}
    assert len(run(capsys, "scan", small.root, "--no-hold")) == 6
    assert {path: path.stat().st_mtime_ns for path in small.root.rglob("*") if path.is_file()} == before


def test_get_does_not_import_slow_libraries(small: SmallRoot) -> None:
    """It imports neither PySpark nor pandas, nor the libraries of other commands and output formats."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "spark_state_ext", "get", str(small.root), "ann", "0", "-o", "json"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=True,
    )
    assert json.loads(done.stdout)[0]["name"] == "ann"
    names = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "pyarrow.lib" in names
    # PyArrow's attempt to import pandas does not load `pandas.core`.
    slow = (
        "pyspark",
        "py4j",
        "pandas.core",
        "matplotlib",
        "rich",
        "duckdb",
        "s3fs",
        "pyarrow.parquet",
        "pyarrow.dataset",
    )
    assert [name for name in slow if name in names] == []


# -- values and filters ---------------------------------------------------------------------------

_COLUMNS = pa.schema(
    [
        ("name", pa.string()),
        ("n", pa.int64()),
        ("ratio", pa.float64()),
        ("price", pa.decimal128(9, 2)),
        ("day", pa.date32()),
        ("at", pa.timestamp("us", "UTC")),
        ("local", pa.timestamp("us")),
        ("raw", pa.binary()),
        ("right", pa.bool_()),
        ("tags", pa.list_(pa.string())),
        ("odd name", pa.int32()),
    ]
)
_AT = datetime(2024, 2, 1, 12, 30, tzinfo=timezone.utc)
_ROWS = pa.Table.from_pylist(
    [
        {
            "name": "ann",
            "n": 1,
            "ratio": 0.5,
            "price": Decimal("1.10"),
            "day": date(2024, 2, 1),
            "at": _AT,
            "local": _AT.replace(tzinfo=None),
            "raw": b"\x00\xff",
            "right": True,
            "tags": ["a"],
            "odd name": 3,
        },
        {"name": "bob", "n": 20, "ratio": float("nan"), "right": False},
        {"name": None, "n": None},
    ],
    schema=_COLUMNS,
)


@pytest.mark.parametrize(
    ("word", "column", "value"),
    [
        ("ann", "name", "ann"),
        ("-7", "n", -7),
        ("nan", "ratio", float("nan")),
        ("1.10", "price", Decimal("1.10")),
        ("2024-02-01", "day", date(2024, 2, 1)),
        ("2024-02-01T12:30:00Z", "at", _AT),
        ("2024-02-01T13:30:00+01:00", "at", _AT),
        ("2024-02-01 12:30:00", "local", _AT.replace(tzinfo=None)),
        ("AP8=", "raw", b"\x00\xff"),
        ("true", "right", True),
        ('["a", null]', "tags", ["a", None]),
    ],
)
def test_a_word_is_parsed_as_a_value_of_its_column(word: str, column: str, value: object) -> None:
    field = _COLUMNS.field(column)
    parsed = parse_value(word, field)
    assert parsed == value or (parsed != parsed and value != value)
    # Arrow accepts the value.
    assert len(pa.array([parsed], field.type)) == 1


@pytest.mark.parametrize(
    ("word", "column"),
    [
        ("1.5", "n"),
        ("x", "ratio"),
        ("x", "price"),
        ("2024-13-01", "day"),
        ("2024-02-01T12:30:00", "at"),
        ("2024-02-01T12:30:00Z", "local"),
        ("0x00ff", "raw"),
        ("yes", "right"),
        ("a", "tags"),
        ('{"a": 1}', "tags"),
        ("[1]", "tags"),
    ],
)
def test_a_word_that_is_not_a_value_is_refused(word: str, column: str) -> None:
    with pytest.raises(UsageError, match=f"is not a value of the column ('{column}'|'item')"):
        parse_value(word, _COLUMNS.field(column))


def test_a_key_in_json_may_have_nulls() -> None:
    schema = pa.schema([("name", pa.string()), ("x", pa.float64())])
    assert parse_key((), '{"name": null, "x": "NaN"}', schema)["name"] is None
    assert parse_key((), '{"x": 1, "name": "a"}', schema) == {"name": "a", "x": 1.0}
    for wrong in ('{"name": 1, "x": 1}', '{"name": "a", "x": true}', '{"name": "a", "x": "1"}', "[]"):
        with pytest.raises(UsageError):
            parse_key((), wrong, schema)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n > 1", ["bob"]),
        ("1 < n", ["bob"]),
        ("n >= 1 and n <= 20 or name is None", ["ann", "bob", None]),
        ("not (n == 1)", ["bob"]),
        ("name in ('ann', 'cid')", ["ann"]),
        ("name not in ['ann'] and name is not None", ["bob"]),
        ("right", ["ann"]),
        ("not right", ["bob"]),
        ("right == True", ["ann"]),
        ("price < '2.00'", ["ann"]),
        ("price < 2", ["ann"]),
        ("day == '2024-02-01'", ["ann"]),
        ("at < '2024-02-01T13:00:00Z'", ["ann"]),
        ("ratio == -0.5 or ratio == 0.5", ["ann"]),
        ("raw == 'AP8='", ["ann"]),
        ("col('odd name') == 3", ["ann"]),
        ("tags is not None", ["ann"]),
        ("n > ratio", ["ann"]),
    ],
)
def test_a_filter_selects_matching_rows(text: str, names: list[str | None]) -> None:
    assert _ROWS.filter(parse_filter(text, _COLUMNS))["name"].to_pylist() == names


@pytest.mark.parametrize(
    "text",
    [
        "",
        "n >",
        "n = 1",
        "nothing == 1",
        "n == None",
        "n == 'x'",
        "n == 1.5",
        "name == 1",
        "name",
        "n + 1 > 2",
        "1 == 1",
        "1 < n < 3",
        "tags == ['a']",
        "n is 1",
        "n in name",
        "__import__('os').system('true')",
        "col(1) == 1",
        "col('n', 'm') == 1",
        "[n for n in (1,)]",
        "n == (lambda: 1)()",
        "(" * 500 + "n" + ")" * 500,
    ],
)
def test_an_invalid_filter_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_filter(text, _COLUMNS)
