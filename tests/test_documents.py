"""Documents compared with the code: tables are complete and have the right numbers, links have a target."""

from __future__ import annotations

import ast
import inspect
import os
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from pyspark.errors import AnalysisException

import spark_state_ext
from arrow_schemas.import_mark import IMPORT_MARK_FORMAT
from arrow_schemas.lineage import DELTA, FILE_FORMATS, SNAPSHOT
from arrow_schemas.operator import OPERATOR_FORMAT
from arrow_schemas.pointer import POINTER_FORMAT
from spark_state_ext import Agg, ArrowState, disable, enable, errors
from spark_state_ext.backends import BackendAdmin, BackendContext, BackendFactory, BackupManager, RestoreManager
from spark_state_ext.cli.verify import DECODERS
from spark_state_ext.files.layout import CHECKPOINT, KINDS, PARENT, SPILL
from spark_state_ext.ownership.lease_record import LEASE_FORMAT
from spark_state_ext.spark.client import operators
from spark_state_ext.store.identity import _STORE_FORMAT
from spark_state_ext.worker import metrics
from spark_state_ext.worker.telemetry import INSTRUMENTS
from tests.helpers.waiting import WAIT_S

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
OPERATING = DOCS / "operating"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
_FENCED = re.compile(r"^```(\w*)[^`\n]*\n(.*?)^```\n", re.MULTILINE | re.DOTALL)


def section(page: Path, title: str) -> str:
    """Return the text of a section, up to the next heading of the same or a higher level."""
    match = re.search(rf"^(##+) {re.escape(title)}\n(.*?)(?=^##|\Z)", page.read_text(), re.MULTILINE | re.DOTALL)
    assert match, title
    return match[2]


def read_rows(text: str) -> list[list[str]]:
    """Return the cells of the rows of a section's tables, without the header rows."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    heads = {at - 1 for at, line in enumerate(lines) if re.fullmatch(r"[|\- ]+", line)}
    heads |= {at + 1 for at in heads}
    return [
        [cell.strip() for cell in line.strip()[1:-1].split("|")] for at, line in enumerate(lines) if at not in heads
    ]


def find_python_blocks(text: str) -> list[str]:
    return [code for language, code in _FENCED.findall(text) if language == "python"]


# -- tables ---------------------------------------------------------------------------------------


def test_every_error_is_in_the_table() -> None:
    table = read_rows((OPERATING / "errors.md").read_text())
    named = [name for row in table for name in re.findall(r"`(\w+Error)`", row[0])]
    assert sorted([*named, "StateError"]) == sorted(errors.__all__)


def test_formats_in_the_table_equal_those_of_the_code() -> None:
    page = DOCS / "format.md"
    table = {row[0]: row[1] for row in read_rows(page.read_text().split("\n## ")[0])}
    assert table.pop("payload").startswith("none")
    assert table.pop("operator file") == f"1; 2 with `function`; {OPERATOR_FORMAT} with `bucket_map`"
    expected = {
        "delta file": FILE_FORMATS[DELTA],
        "snapshot file": FILE_FORMATS[SNAPSHOT],
        "pointer": POINTER_FORMAT,
        "import mark": IMPORT_MARK_FORMAT,
        "lease": LEASE_FORMAT,
        "local store": _STORE_FORMAT,
    }
    assert table == {name: str(number) for name, number in expected.items()}
    assert f"| `format` | number | 1; 2 with `function`; {OPERATOR_FORMAT} with `bucket_map` |" in section(
        page, "`operator_<n>.json`"
    )
    assert f"format, u16: {POINTER_FORMAT} |" in section(page, "Pointer")
    assert f'"format": {LEASE_FORMAT},' in section(page, "Lease")
    assert f"format is {_STORE_FORMAT}." in section(page, "Local store")


def test_every_option_is_in_the_table() -> None:
    parameters = dict(inspect.signature(ArrowState).parameters)
    table = {row[0].strip("`"): row[1].strip("`") for row in read_rows((OPERATING / "options.md").read_text())}
    assert list(table) == list(parameters)
    assert table.pop("root") == ""
    assert {name: ast.literal_eval(default) for name, default in table.items()} == {
        name: parameters[name].default for name in table
    }


def test_every_column_of_the_metrics_is_in_the_table() -> None:
    documented: list[tuple[str, str]] = []
    exported_as: dict[str, str] = {}
    for names, kinds, _, list_exported in read_rows(section(OPERATING / "metrics.md", "Columns")):
        columns = re.findall(r"`(\w+)`", names)
        types = [kind.split(",")[0] for kind in kinds.split("; ")]
        documented += zip(columns, types if len(types) == len(columns) else types * len(columns), strict=True)
        units = {"ms": "ms", "bytes": "bytes"}
        for column in columns:
            assert kinds.partition(", ")[2] == units.get(column.rpartition("_")[2], ""), column
            exported_as[column] = list_exported.split(" ")[0]
    assert sorted(documented) == sorted((field.name, str(field.type)) for field in metrics.SCHEMA)
    assert {name: kind for name, kind in exported_as.items() if kind} == {
        instrument.column: instrument.kind for instrument in INSTRUMENTS if instrument.column
    } | {"query_id": "`query_id`", "run_id": "`query_id`", "operator": "`query_id`"}


def test_every_instrument_of_failed_calls_is_in_its_table() -> None:
    documented = {
        row[0].strip("`"): row[1] for row in read_rows(section(OPERATING / "metrics.md", "Through OpenTelemetry"))
    }
    assert documented == {instrument.name: instrument.kind for instrument in INSTRUMENTS if not instrument.column}


def test_every_aggregate_is_in_the_table() -> None:
    documented = [
        name
        for row in read_rows(section(DOCS / "operators.md", "Functions"))
        for name in re.findall(r"Agg\.(\w+)", row[0])
    ]
    assert set(documented) == {name for name in vars(Agg) if not name.startswith("_")}


def test_every_operator_has_a_section() -> None:
    for name in operators.__all__:
        assert find_python_blocks(section(DOCS / "operators.md", name)), name


@pytest.mark.parametrize("protocol", [BackendAdmin, BackendFactory, BackupManager, RestoreManager])
def test_every_method_of_a_backend_and_its_parameters_are_documented(protocol: type) -> None:
    methods = {name: method for name, method in vars(protocol).items() if inspect.isfunction(method)}
    for name, method in methods.items():
        docstring = method.__doc__ or ""
        if not name.startswith("_"):
            assert docstring, name
            assert f"`{name}(" in (DOCS / "backends.md").read_text(), name
            for parameter in list(inspect.signature(method).parameters)[1:]:
                assert re.search(rf"^ *{parameter}$", docstring, re.MULTILINE), (name, parameter)


def test_every_field_of_a_backend_context_is_documented() -> None:
    text = (DOCS / "backends.md").read_text()
    assert [field.name for field in fields(BackendContext) if f"`{field.name}`" not in text] == []


def read_section(doc: str, title: str) -> str:
    """Return the text of a section of a numpydoc docstring, or an empty text if it has none."""
    match = re.search(rf"^{title}\n-{{{len(title)}}}\n(.*?)(?=^\w+\n---|\Z)", doc, re.MULTILINE | re.DOTALL)
    return match[1].strip() if match else ""


def list_exported() -> Iterator[tuple[str, Any]]:
    """Yield the names and objects of exported functions, methods and classes."""
    for name in spark_state_ext.__all__:
        exported = getattr(spark_state_ext, name)
        if not callable(exported):
            continue
        yield name, exported
        for method, raw in vars(exported).items() if inspect.isclass(exported) else ():
            function = getattr(raw, "__func__", raw)
            if inspect.isfunction(function) and not method.startswith("_"):
                yield f"{name}.{method}", function


@pytest.mark.parametrize(("name", "exported"), [pytest.param(*pair, id=pair[0]) for pair in list_exported()])
def test_parameters_and_results_of_exported_objects_are_documented(name: str, exported: Any) -> None:
    doc, signature = inspect.cleandoc(exported.__doc__ or ""), inspect.signature(exported)
    assert doc, name
    heads = re.findall(r"^\S.*$", read_section(doc, "Parameters"), re.MULTILINE)
    named = [parameter.lstrip("*") for head in heads for parameter in head.split(" : ")[0].split(", ")]
    assert sorted(named) == sorted(parameter for parameter in signature.parameters if parameter != "self"), name
    if not inspect.isclass(exported) and signature.return_annotation not in ("None", None):
        assert read_section(doc, "Returns"), name


def test_every_kind_of_file_has_an_owner_and_is_verified() -> None:
    """`docs/ownership.md` has all kinds of files that commands know; spilled rows and parents are verified differently."""
    documented = [row[0] for row in read_rows((DOCS / "ownership.md").read_text())]
    assert [kind.name for kind in KINDS if not any(kind.name in name for name in documented)] == []
    assert set(KINDS) - set(DECODERS) == {CHECKPOINT, PARENT, SPILL}


def test_every_link_has_a_target() -> None:
    for page in PAGES:
        for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", _FENCED.sub("", page.read_text())):
            linked_page = (page.parent / target) if target else page
            assert linked_page.exists(), (page.name, target)
            if anchor:
                heads = re.findall(r"^#+ (.*)$", _FENCED.sub("", linked_page.read_text()), re.MULTILINE)
                anchors = {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}
                assert anchor in anchors, (page.name, target, anchor)


def test_lines_are_not_too_long() -> None:
    older = [DOCS / f"{name}.md" for name in ("connect", "operators", "parity", "format")]
    for page in (ROOT / "README.md", *sorted(OPERATING.glob("*.md")), *older):
        most = 140 if page in older else 132
        # Tables, and the machines that `benchmarks.figures` names, are not prose.
        lines = [
            line for line in page.read_text().splitlines() if not line.startswith("|") and " cores of " not in line
        ]
        assert [line for line in lines if len(line) > most] == [], page.name


# -- statements about Spark -----------------------------------------------------------------------


def read_stream_of_ids(spark: Any, folder: Path) -> Any:
    """Return a stream of whole numbers; each call adds a file."""
    spark.range(8).coalesce(1).write.mode("append").parquet(str(folder))
    return spark.readStream.schema("id long").parquet(str(folder)).selectExpr("id % 2 AS k")


@pytest.mark.spark
@pytest.mark.parametrize("kind", ["spark", "arrow"])
def test_misnamed_columns_are_null_without_strict_output(spark: Any, tmp_path: Path, kind: str) -> None:
    # A nested function, because executors cannot import this module.
    def count_misnamed(key: Any, pdfs: Any, state: Any) -> Any:
        n = sum(len(pdf) for pdf in pdfs)
        state.update((n,))
        yield pd.DataFrame({"k": [key[0]], "N": [n]})

    if kind == "arrow":
        state = ArrowState(tmp_path / "state", buckets=2, local_dir=tmp_path / "local", strict_output=False)
        enable(spark, state)
    try:
        counts = read_stream_of_ids(spark, tmp_path / "in").groupBy("k")
        counts = counts.applyInPandasWithState(count_misnamed, "k long, n long", "n long", "update", "NoTimeout")
        writer = counts.writeStream.outputMode("update").format("memory").queryName(f"misnamed_by_{kind}")
        assert writer.trigger(availableNow=True).start().awaitTermination(WAIT_S)
        assert {(row.k, row.n) for row in spark.table(f"misnamed_by_{kind}").collect()} == {(0, None), (1, None)}
    finally:
        disable(spark)


@pytest.mark.spark
def test_shuffle_partitions_are_fixed_at_the_first_start(spark: Any, tmp_path: Path) -> None:
    seen = []
    before = spark.conf.get("spark.sql.shuffle.partitions")
    try:
        for partitions in ("2", "3"):
            spark.conf.set("spark.sql.shuffle.partitions", partitions)
            state = ArrowState(tmp_path / "state", buckets=4, local_dir=tmp_path / "local")
            counts = operators.aggregate(state, read_stream_of_ids(spark, tmp_path / "in"), "k", {"n": Agg.count()})
            writer = counts.writeStream.outputMode("update").format("noop")
            writer = writer.option("checkpointLocation", str(tmp_path / "checkpoint"))
            query = writer.trigger(availableNow=True).start()
            assert query.awaitTermination(WAIT_S)
            seen += [progress["stateOperators"][0]["numShufflePartitions"] for progress in query.recentProgress]
    finally:
        spark.conf.set("spark.sql.shuffle.partitions", before)
    assert len(seen) >= 2
    assert set(seen) == {2}


@pytest.mark.spark
def test_spark_refuses_to_sort_a_stream(spark: Any, tmp_path: Path) -> None:
    sorted_stream = read_stream_of_ids(spark, tmp_path / "in").orderBy("k")
    with pytest.raises(AnalysisException, match="orting is not supported"):
        sorted_stream.writeStream.format("noop").outputMode("update").start()


@pytest.mark.spark
def test_the_default_local_folders_are_those_of_the_application(spark: Any) -> None:
    def read_folders(batches: Any) -> Any:
        for batch in batches:
            folder = os.environ["SPARK_LOCAL_DIRS"].split(",")[0]
            yield pa.RecordBatch.from_pydict({"folder": [folder] * batch.num_rows})

    (row,) = spark.range(1).mapInArrow(read_folders, "folder string").collect()
    assert Path(row.folder).name.startswith("blockmgr-")


def test_paths_and_names_in_the_page_for_contributors_exist() -> None:
    text = (DOCS / "contributing.md").read_text()
    named = {path for path in re.findall(r"`([\w/]+(?:\.py|\.md|/)|tests/\w+)`", text) if "/" in path}
    assert len(named) > 30
    packages = (ROOT, ROOT / "spark_state_ext", ROOT / "arrow_schemas")
    assert sorted(path for path in named if not any((package / path).exists() for package in packages)) == []
    for path, name in re.findall(r"`([\w/]+\.py)` \(`(?:\w+\.)*(\w+)`", text):
        package = next(package for package in packages if (package / path).exists())
        assert re.search(rf"\b{name}\b", (package / path).read_text()), f"{path} has no {name}"
