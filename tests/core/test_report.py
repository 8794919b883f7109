"""The report of a job: its content, a page without external resources, and no writes to the job's files."""

from __future__ import annotations

import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from life import Life

import spark_state_ext
from arrow_schemas.lineage import DELTA, SNAPSHOT, CheckpointRef, LineageHeader, Writer
from arrow_schemas.operator import OperatorFile
from spark_state_ext import report
from spark_state_ext.errors import StorageError, UsageError
from spark_state_ext.files.folder import Folder
from spark_state_ext.files.printable import printable
from spark_state_ext.reports.batches import summarize_batches, thin_batches
from spark_state_ext.reports.charts import BARS, Chart, Series, draw_svg, format_with_unit
from spark_state_ext.reports.checkpoints import count_deltas_upon_snapshot, list_query_files
from spark_state_ext.worker.metrics import CallMetrics, MetricsLog, read
from tests.helpers.waiting import WAIT_S

pytest.importorskip("matplotlib")
HOSTILE = "<script>alert(1)</script> \"&amp;' $\\frac{1}{ {{x}} %s \u202e\x1b[31m]]>"
QUERY = "d544c5b9-9aa5-456d-9a52-63223beb0a86"


def write_log(folder: Path, *calls: CallMetrics) -> None:
    log = MetricsLog(folder)
    for call in calls:
        log.add(call)
    log.flush()


def make_call(batch: int, bucket: int, operator: str = "counts", **values: Any) -> CallMetrics:
    return CallMetrics(QUERY, "run", batch, operator, bucket, ended_ms=1_000 * batch + bucket, **values)


class _Page(HTMLParser):
    """Collects the tags, attributes and text that a browser would see."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    def ids(self) -> list[str]:
        return [value for name, value in self.attributes if name == "id"]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root with one query; one of its buckets has files."""
    life = Life(tmp_path)
    life.history(31)
    assert life.background.wait(WAIT_S)
    query = tmp_path / "root" / "counts" / QUERY
    query.mkdir(parents=True)
    (tmp_path / "a" / "3").rename(query / "3")
    operator = OperatorFile("counts", QUERY, 8, '{"type":"struct","fields":[]}', '{"type":"struct","fields":[]}')
    (query / "operator_0.json").write_bytes(operator.encode())
    life.store.close()
    return tmp_path / "root"


def read_all_files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# -- the page --------------------------------------------------------------------------------------


def test_a_report_shows_files_and_metrics_and_changes_no_file(root: Path, tmp_path: Path) -> None:
    metrics = tmp_path / "local" / "metrics"
    write_log(
        metrics, *(make_call(batch, bucket, rows=10, state_bytes=2048) for batch in range(6) for bucket in range(3))
    )
    before = read_all_files(root)
    path = report(root, tmp_path / "out.html", metrics=tmp_path / "local")
    assert path == tmp_path / "out.html"
    assert read_all_files(root) == before
    page = _Page(path.read_text())
    text = " ".join(page.text)
    for heading in ("Operator counts: batches", "Operator counts: checkpoint files", "State size", "6 KiB", QUERY):
        assert heading in text
    for heading in ("Wait for uploads", "Commit time", "Restore time", "Deltas on top of the snapshot", "Rows"):
        assert heading in text
    assert page.tags.count("svg") == 8 + 3 + 2
    # A second report replaces the first one; `spark_state_ext.report` is the function, not the module.
    assert spark_state_ext.report(root, tmp_path / "out.html", metrics=tmp_path / "local") == path
    assert [file.name for file in tmp_path.iterdir() if file.name.startswith(".tmp-")] == []


def test_a_page_loads_no_external_resources(root: Path, tmp_path: Path) -> None:
    write_log(tmp_path / "local", *(make_call(batch, 0) for batch in range(3)))
    text = report(root, tmp_path / "out.html", metrics=tmp_path / "local").read_text()
    page = _Page(text)
    assert {"script", "link", "img", "iframe", "object", "image", "use"} & set(page.tags) <= {"use"}
    fetched = [value for name, value in page.attributes if name in ("src", "href", "xlink:href", "data", "action")]
    assert all(value.startswith("#") for value in fetched)
    assert all(url.startswith("#") for url in re.findall(r"url\(([^)]*)\)", text))
    assert ("content", "default-src 'none'; style-src 'unsafe-inline'") in page.attributes
    assert "@import" not in text
    # Each reference leads to an element of its own chart.
    ids = page.ids()
    assert len(ids) == len(set(ids))
    assert {value[1:] for value in fetched} <= set(ids)
    assert set(re.findall(r"url\(#([^)]*)\)", text)) <= set(ids)


def test_names_with_markup_are_shown_as_text(tmp_path: Path) -> None:
    calls = [replace(make_call(batch, 0, HOSTILE, rows=3, upload_failures=1), query_id=HOSTILE) for batch in range(3)]
    write_log(tmp_path / "metrics", *calls)
    path = report(tmp_path / "metrics", tmp_path / "out.html", title=HOSTILE)
    text = path.read_text()
    page = _Page(text)
    assert "script" not in page.tags
    assert "<script" not in text
    shown = "".join(page.text)
    assert shown.count(printable(HOSTILE)) >= 4
    # The same page with a harmless name has the same elements.
    write_log(tmp_path / "tame", *(replace(call, query_id="q", operator="tame") for call in calls))
    tame = _Page(report(tmp_path / "tame", tmp_path / "tame.html", title="t").read_text())
    assert page.tags == tame.tags


def test_each_chart_has_a_title_a_description_and_a_table(tmp_path: Path) -> None:
    write_log(tmp_path / "metrics", *(make_call(batch, 0, rows=batch) for batch in range(4)))
    text = report(tmp_path / "metrics", tmp_path / "out.html").read_text()
    drawings = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert len(drawings) == 8 + 3
    for drawing in drawings:
        svg = ET.fromstring(drawing)
        space = "{http://www.w3.org/2000/svg}"
        title, description = svg.find(f"{space}title"), svg.find(f"{space}desc")
        assert title is not None
        assert description is not None
        assert svg.attrib["role"] == "img"
        assert svg.attrib["aria-labelledby"] == f"{title.attrib['id']} {description.attrib['id']}"
        assert ("Batch 0 to 3." in (description.text or "")) != ("Bucket 0 to 0." in (description.text or ""))
    # Each chart has a table too.
    assert text.count("<details>") == 8 + 3
    # There is one table for each chart, for the summary, and for the buckets.
    assert _Page(text).tags.count("caption") == 8 + 3 + 1 + 1


def test_a_report_without_state_or_metrics_is_refused(tmp_path: Path, root: Path) -> None:
    (tmp_path / "empty").mkdir()
    for source in (str(tmp_path / "empty"), str(tmp_path / "missing"), "memory://nothing"):
        with pytest.raises(UsageError, match=r"nothing to report in .*Give the root"):
            report(source, tmp_path / "out.html")
    with pytest.raises(UsageError, match="there are no metrics in"):
        report(root, tmp_path / "out.html", metrics=tmp_path / "empty")
    with pytest.raises(UsageError, match="absolute path"):
        report("root", tmp_path / "out.html")
    with pytest.raises(StorageError, match=r"cannot be written to .*nowhere"):
        report(root, tmp_path / "nowhere" / "out.html")
    assert not (tmp_path / "out.html").exists()


def test_a_report_without_matplotlib_names_the_package_to_install(tmp_path: Path, root: Path) -> None:
    code = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "from spark_state_ext import report\n"
        f"report({str(root)!r}, {str(tmp_path / 'out.html')!r})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode == 1
    last_line = done.stderr.splitlines()[-1]
    assert last_line.startswith("spark_state_ext.errors.EnvironmentSetupError: a report needs matplotlib")
    assert 'pip install "spark_state_ext[report]"' in last_line


# -- batches ---------------------------------------------------------------------------------------


def test_state_includes_buckets_that_a_batch_does_not_call(tmp_path: Path) -> None:
    calls = [
        make_call(0, 0, state_bytes=100),
        make_call(0, 1, state_bytes=10),
        make_call(1, 1, state_bytes=30),
        make_call(2, 0, state_bytes=50),
        make_call(3, 0, state_bytes=0),
    ]
    write_log(tmp_path, *calls)
    (summary,) = summarize_batches(read(tmp_path))
    assert summary.batches["batch"].to_pylist() == [0, 1, 2, 3]
    assert summary.batches["state_bytes"].to_pylist() == [110, 130, 80, 30]
    assert summary.batches["buckets"].to_pylist() == [2, 1, 1, 1]


def test_a_batch_that_a_later_run_repeats_counts_once(tmp_path: Path) -> None:
    again = replace(make_call(1, 0, rows=7, commit_ms=9.0), run_id="later", ended_ms=99_000)
    write_log(tmp_path, make_call(1, 0, rows=5, commit_ms=50.0), again, make_call(1, 1, rows=1, commit_ms=3.0))
    (summary,) = summarize_batches(read(tmp_path))
    (row,) = summary.batches.to_pylist()
    assert (summary.calls, row["rows"], row["commit_ms_max"]) == (2, 8, 9.0)


def test_operators_and_queries_are_summed_separately(tmp_path: Path) -> None:
    write_log(tmp_path, make_call(0, 0, "b"), make_call(0, 0, "a"), replace(make_call(0, 0, "a"), query_id="another"))
    names = [(summary.query_id, summary.operator) for summary in summarize_batches(read(tmp_path))]
    assert names == [("another", "a"), (QUERY, "a"), (QUERY, "b")]


@pytest.mark.parametrize("batches", [1, 400, 401, 1_003])
def test_thinned_batches_keep_their_peaks_and_sums(tmp_path: Path, batches: int) -> None:
    write_log(
        tmp_path, *(make_call(batch, 0, rows=2, commit_ms=500.0 if batch == 201 else 1.0) for batch in range(batches))
    )
    (summary,) = summarize_batches(read(tmp_path))
    thinned, batches_a_row = thin_batches(summary.batches, 400)
    assert thinned.num_rows <= 400
    assert (thinned.num_rows - 1) * batches_a_row < batches <= thinned.num_rows * batches_a_row
    assert sum(thinned["rows"].to_pylist()) == 2 * batches
    assert max(thinned["commit_ms_max"].to_pylist()) == (500.0 if batches > 201 else 1.0)
    assert thinned["batch"].to_pylist() == sorted(thinned["batch"].to_pylist())
    assert thinned.column_names == summary.batches.column_names


# -- files -----------------------------------------------------------------------------------------


def test_list_query_files_counts_the_files_of_each_bucket(root: Path) -> None:
    (query_files,) = list_query_files(Folder(str(root)))
    (bucket,) = query_files.buckets
    names = [path.name for path in (root / "counts" / QUERY / "3").iterdir()]
    assert (query_files.operator, query_files.query_folder, query_files.other_files) == ("counts", QUERY, 1)
    assert bucket.deltas == len([name for name in names if ".delta." in name])
    assert bucket.snapshots == len([name for name in names if ".snapshot." in name]) > 0
    assert bucket.problem == ""
    newest_snapshot = max(int(name.split("_")[0]) for name in names if ".snapshot." in name)
    assert bucket.chain == bucket.version - newest_snapshot
    assert query_files.size_bytes == sum((root / "counts" / QUERY / "3" / name).stat().st_size for name in names)


def test_a_damaged_file_is_reported_in_the_page(root: Path, tmp_path: Path) -> None:
    folder = root / "counts" / QUERY / "3"
    newest = max(folder.iterdir(), key=lambda path: (int(path.name.split("_")[0]), ".snapshot." in path.name))
    newest.write_bytes(b"garbage")
    ((bucket,),) = [query_files.buckets for query_files in list_query_files(Folder(str(root)))]
    assert bucket.chain is None
    assert "is not an Arrow file" in bucket.problem
    text = report(root, tmp_path / "out.html").read_text()
    assert f"Bucket 3: {newest}" in "".join(_Page(text).text)


def test_folders_without_state_are_ignored(root: Path) -> None:
    other = root / "counts" / "backup" / "3"
    other.mkdir(parents=True)
    for path in (root / "counts" / QUERY / "3").iterdir():
        (other / path.name).write_bytes(path.read_bytes())
    (root / "README").write_text("ours")
    assert [query_files.query_folder for query_files in list_query_files(Folder(str(root)))] == [QUERY]


def test_deltas_on_top_of_the_last_snapshot_are_counted() -> None:
    refs = [CheckpointRef(version, f"{version:032x}") for version in range(1, 6)]
    header = LineageHeader(DELTA, "counts", 0, refs[4], refs[3], tuple(refs[:4]), 0, Writer("q", "r", 1, "h"), "0")
    kinds = {ref: {DELTA} for ref in refs}
    assert count_deltas_upon_snapshot(header, kinds) == 5
    assert count_deltas_upon_snapshot(header, {**kinds, refs[0]: {DELTA, SNAPSHOT}}) == 4
    assert count_deltas_upon_snapshot(header, {**kinds, refs[0]: {SNAPSHOT}, refs[2]: {SNAPSHOT}}) == 2
    assert count_deltas_upon_snapshot(header, {**kinds, refs[4]: {DELTA, SNAPSHOT}}) == 0


# -- charts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["lines", BARS])
@pytest.mark.parametrize("values", [[], [0.0], [float("nan")] * 3, [1.0, float("nan"), 1e12], [0.0, 0.001, 0.0]])
def test_values_of_all_kinds_can_be_drawn(kind: str, values: list[float]) -> None:
    for unit in ("bytes", "ms", "rows"):
        chart = Chart("T <b>", "S", "Batch", unit, list(range(len(values))), (Series("a", values),), kind)
        svg = ET.fromstring(draw_svg(chart, "c"))
        assert "nan" not in "".join(svg.itertext()).lower()


def test_a_chart_is_deterministic_and_does_not_rely_on_colours() -> None:
    two = (Series("longest", [1.0, 4.0, 2.0]), Series("median", [1.0, 2.0, 2.0]))
    chart = Chart("Commit", "S", "Batch", "ms", [0, 1, 2], two)
    svg = draw_svg(chart, "c0")
    assert svg == draw_svg(chart, "c0")
    # Only one line is dashed, and text and axes have the page's colour.
    assert "stroke-dasharray" in svg
    assert "currentColor" in svg
    assert "#000000" not in re.sub(r"<defs>.*?</defs>", "", svg, flags=re.DOTALL)
    assert "fill: #ffffff" not in svg
    for word in ("longest", "median", "milliseconds"):
        assert f">{word}</text>" in svg


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0, "bytes", "0 B"),
        (1536, "bytes", "1.5 KiB"),
        (2.5, "ms", "2.5 ms"),
        (2500, "ms", "2.5 s"),
        (1e6, "rows", "1,000,000 rows"),
    ],
)
def test_values_are_formatted_with_their_unit(value: float, unit: str, text: str) -> None:
    assert format_with_unit(value, unit) == text
