"""Snippets of the documents, run as a reader pastes them.

The Python blocks of a page run in turn in one namespace, with only the setup of every session here. Two things differ from
pasting: folders below ``/tmp`` are in a folder of the test, and if a snippet waits some seconds for a query, the test waits
until there was a batch with rows. A ``text`` block after a Python block is the output of that block. A block that cannot run
has the reason: ``python no-run: …``.
"""

from __future__ import annotations

import ast
import configparser
import importlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pyspark
import pytest

from spark_state_ext import ArrowState, disable
from spark_state_ext.files.folder import Folder
from tests.helpers.waiting import WAIT_S, eventually

ROOT = Path(__file__).parent.parent
SPARK = tuple(int(part) for part in pyspark.__version__.split(".")[:2])
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SAID = "Python snippets of this page run as pasted, one after the other"
_BLOCK = re.compile(r"^```([^\n`]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_NO_RUN = "no-run: "


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: Path
    line: int
    language: str
    no_run_reason: str
    text: str

    @property
    def place(self) -> str:
        return f"{self.page.name}:{self.line}"


def make_page_id(page: Path) -> str:
    """Return a name of a page that is unique over all folders: `README`, `docs-operating-README`."""
    return "-".join(page.relative_to(ROOT).with_suffix("").parts)


def find_blocks(page: Path, language: str = "python") -> list[Block]:
    """Return the blocks of a language that run, in order."""
    return [block for block in find_all_blocks(page) if block.language == language and not block.no_run_reason]


def find_all_blocks(page: Path) -> list[Block]:
    text = page.read_text()
    blocks = []
    for match in _BLOCK.finditer(text):
        language, _, rest = match[1].partition(" ")
        assert not rest or rest.startswith(_NO_RUN), (page.name, match[1])
        line = text.count("\n", 0, match.start()) + 1
        blocks.append(Block(page, line, language, rest.removeprefix(_NO_RUN), match[2]))
    return blocks


def place_in(code: str, folder: Path) -> str:
    """Return code that uses a folder instead of ``/tmp``."""
    return code.replace('"/tmp/', f'"{folder}/')


def paste(block: Block, names: dict[str, Any], folder: Path) -> None:
    """Run a block so that a traceback has its line of the page."""
    exec(compile("\n" * block.line + place_in(block.text, folder), str(block.page), "exec"), names)


def wait_for_progress(query: Any, is_wanted: Callable[[Any], bool]) -> None:
    """Wait for a batch whose progress meets a condition."""

    def has_batch() -> bool:
        assert query.exception() is None
        return any(is_wanted(progress) for progress in query.recentProgress)

    eventually(has_batch, 0.1)


@pytest.fixture
def waited(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Let snippets wait for a batch with rows, and return the queries for which they waited."""
    from pyspark.sql.streaming.query import StreamingQuery

    original, queries = StreamingQuery.awaitTermination, list[Any]()

    def await_termination(self: Any, timeout: int | None = None) -> Any:
        if timeout is None:
            return original(self)
        queries.append(self)
        return wait_for_progress(self, lambda progress: progress["numInputRows"] > 0)

    monkeypatch.setattr(StreamingQuery, "awaitTermination", await_termination)
    return queries


# -- Python ---------------------------------------------------------------------------------------


def list_pages() -> Iterator[Any]:
    """Yield pages with Python that runs here; a test below runs a client of Connect in a separate process."""
    for page in PAGES:
        code = "".join(block.text for block in find_blocks(page))
        if code and ".remote(" not in code:
            marks = [pytest.mark.spark] if "SparkSession" in code else []
            # Each operator of this page has tests of its own.
            marks += [pytest.mark.soak] if page.stem == "operators" else []
            yield pytest.param(page, id=make_page_id(page), marks=marks)


@pytest.mark.parametrize("page", list(list_pages()))
def test_the_snippets_of_a_page_run_as_pasted(
    page: Path,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert SAID in page.read_text(), "the page must say how its snippets run"
    page_blocks = find_all_blocks(page)
    code = "".join(block.text for block in page_blocks)
    for package, used in (
        ("polars", "import polars"),
        ("duckdb", "import duckdb"),
        ("datasketches", "approx_count"),
        ("matplotlib", "import ArrowState, report"),
    ):
        if used in code:
            pytest.importorskip(package)
    if SPARK < (4, 0):
        for used, missing in (
            ("take_savepoint", "reader of state"),
            ("import_native", "reader of state"),
            ("stop_with_savepoint", "reader of state"),
            ("register(", "Python data sources"),
        ):
            if used in code:
                pytest.skip(f"PySpark 3.5 has no {missing}")
    spark = request.getfixturevalue("spark") if "SparkSession" in code else None
    partitions = None if spark is None else spark.conf.get("spark.sql.shuffle.partitions")
    queries = request.getfixturevalue("waited")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    printed = ""
    try:
        for block in page_blocks:
            if block.language == "python" and not block.no_run_reason:
                paste(block, names, tmp_path)
                printed = capsys.readouterr().out
            elif block.language == "text" and printed:
                assert block.text.strip() == printed.strip(), block.place
    finally:
        if spark is not None:
            disable(spark)
            # Other tests use this session too.
            spark.conf.set("spark.sql.shuffle.partitions", partitions)
    assert [query.exception() for query in queries if query.exception()] == []
    if page == ROOT / "README.md":
        assert len(queries) == 1


@pytest.mark.spark
@pytest.mark.connect
def test_the_snippet_for_connect_runs_as_pasted(connect_server: Any, tmp_path: Path) -> None:
    """The client runs in a separate process, as on the page."""
    page = ROOT / "docs" / "connect.md"
    assert SAID in page.read_text()
    (block,) = find_blocks(page)
    code = place_in(block.text, tmp_path)
    assert code.count("sc://localhost:15002") == 1
    code = code.replace("sc://localhost:15002", connect_server.url)
    (tmp_path / "count.py").write_text(code)
    # Keep no variables of Spark except for the options of its JVM.
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("SPARK_") or name == "SPARK_SUBMIT_OPTS"
    }
    done = subprocess.run(
        [sys.executable, "count.py"],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    counted = dict(re.findall(r"^\| *(\d) *\| *(\d+) *\|$", done.stdout, re.MULTILINE))
    assert sorted(counted) == [str(sensor) for sensor in range(10)]
    assert all(int(n) > 0 for n in counted.values())


def test_few_snippets_do_not_run_and_each_has_a_reason() -> None:
    skipped = [block for page in PAGES for block in find_all_blocks(page) if block.no_run_reason]
    assert [block.page.name for block in skipped] == [
        "backends.md",
        "backends.md",
        "asking-a-live-job.md",
        "erasing.md",
        "erasing.md",
        "erasing.md",
        "erasing.md",
        "poisoned-watermarks.md",
        "poisoned-watermarks.md",
        "savepoints.md",
        "source-partitions.md",
        "reading.md",
        "reading.md",
    ]
    for block in skipped:
        assert len(block.no_run_reason) > 20, block.place
        # Without a run, check that the block is Python and that its imports from this package exist.
        for node in ast.walk(ast.parse(block.text)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("spark_state_ext"):
                module = importlib.import_module(node.module or "")
                assert [name.name for name in node.names if not hasattr(module, name.name)] == [], block.place


def test_the_example_of_s3_writes_and_reads(s3: Any) -> None:
    """The options of the example work with a server other than Amazon's."""
    pytest.importorskip("s3fs")
    (block,) = [block for block in find_blocks(ROOT / "docs" / "operating" / "s3.md") if "endpoint_url" in block.text]
    names: dict[str, Any] = {}
    # The test server accepts any credentials.
    exec(block.text.replace("http://localhost:9000", s3.endpoint).replace('"…"', '"any"'), names)
    state: ArrowState = names["state"]
    folder = Folder(state.options.root, state.options.storage_options)
    folder.put("file", b"bytes")
    assert folder.get("file") == b"bytes"


@pytest.mark.spark
def test_the_example_of_several_steps_emits_alerts(spark: Any, tmp_path: Path) -> None:
    """Read its alerts from a memory sink instead of the console, whose rows the JVM prints."""
    (block,) = find_blocks(ROOT / "docs" / "parity.md")
    code = place_in(block.text, tmp_path)
    assert code.count('.format("console")') == 1
    names: dict[str, Any] = {"__name__": "__main__"}
    head, _ = code.replace('.format("console")', '.format("memory").queryName("alerted")').split("query.await")
    try:
        exec(head, names)
        wait_for_progress(names["query"], lambda progress: progress["sink"]["numOutputRows"] > 0)
        names["query"].stop()
        alerts = {(row.user, row.above) for row in spark.table("alerted").collect()}
        assert alerts
        assert all(above % 1000 == 0 for _, above in alerts)
    finally:
        disable(spark)


# -- commands -------------------------------------------------------------------------------------

_INLINE = re.compile(r"`((?:python3? (?:-m |[\w/]+\.py\b)|pip install |make |spark-state-ext )[^`\n]*)`")


def list_commands(page: Path) -> list[tuple[str, str]]:
    """Return the commands of shell blocks and of the text, each with its place."""
    places_and_commands = []
    for block in find_blocks(page, "bash"):
        for line in block.text.replace("\\\n", " ").splitlines():
            command = re.sub(r"\s#.*", "", line).strip()
            if command:
                places_and_commands.append((block.place, command))
    return places_and_commands + [(page.name, command) for command in _INLINE.findall(_BLOCK.sub("", page.read_text()))]


@cache
def read_help(*arguments: str) -> str:
    """Return the help text of a module of this package."""
    done = subprocess.run(
        [sys.executable, "-m", *arguments, "--help"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=WAIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def check_module(words: list[str]) -> None:
    """Check that a module of this package exists and has the commands and options of a line."""
    module, *arguments = words
    if module == "venv":
        return
    if module == "pytest":
        assert all((ROOT / word).exists() for word in arguments if not word.startswith("-"))
        return
    spec = importlib.util.find_spec(module) or importlib.util.find_spec(f"{module}.__main__")
    assert spec is not None, module
    main = importlib.util.find_spec(f"{module}.__main__") if spec.submodule_search_locations else spec
    assert main is not None, module
    assert main.origin is not None, module
    if "argparse" not in Path(main.origin).read_text() and module != "spark_state_ext":
        assert not arguments, "the module takes no arguments"
        return
    help_text = read_help(module)
    if module in ("benchmarks", "spark_state_ext") and arguments and not arguments[0].startswith("-"):
        named = [arguments.pop(0)]
        assert re.search(rf"^ +{named[0]}\b|`{named[0]}`", help_text, re.MULTILINE), named[0]
        if module == "spark_state_ext" and named[0] in ("savepoint", "erase", "standby") and arguments:
            named.append(arguments.pop(0))
            assert re.search(rf"^ +{named[1]}\b", read_help(module, named[0]), re.MULTILINE), named[1]
        help_text = read_help(module, *named) if any(word.startswith("--") for word in arguments) else help_text
    for word in arguments:
        if word.startswith("--"):
            assert re.search(rf"(?<![\w-]){word}(?![\w-])", help_text), word


def check_requirement(word: str) -> None:
    """Check that pip installs this package with existing extras, or a package that one of the extras requires."""
    extras = read_setup()["options.extras_require"]
    name, _, chosen = word.partition("[")
    if name in ("spark_state_ext", ".", "./spark_state_ext"):
        for extra in filter(None, chosen.rstrip("]").split(",")):
            assert extra in extras, word
    else:
        bare = re.split("[<>=]", name)[0]
        assert any(re.search(rf"^{bare}\b", line, re.MULTILINE) for line in extras.values()), word


def read_setup() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return parser


@pytest.mark.parametrize("page", [pytest.param(page, id=make_page_id(page)) for page in PAGES])
def test_commands_of_a_page_exist(page: Path) -> None:
    """Check modules and their options, targets of make, extras, and programs of PySpark."""
    for place, command in list_commands(page):
        try:
            words = shlex.split(command)
            program, *given = words
            if program == "make":
                targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
                assert given[0] in targets
            elif program in ("python", "python3"):
                if given[0] == "-m":
                    check_module(given[1:])
                else:
                    # A script of the repository, or one that the page asks the reader to write.
                    assert (ROOT / given[0]).exists() or f"`{given[0]}`" in page.read_text()
            elif program == "spark-state-ext":
                check_module(["spark_state_ext", *given])
            elif program == "pip":
                assert given[0] == "install"
                for word in given[1:]:
                    check_requirement(word)
            elif program == "export":
                # A variable that the package reads.
                name = given[0].partition("=")[0]
                assert any(f'"{name}"' in path.read_text() for path in (ROOT / "spark_state_ext").rglob("*.py")), name
            elif program == "spark-submit":
                assert shutil.which(program)
            else:
                assert program == ".", "the test does not know this command"
        except AssertionError as error:
            raise AssertionError(f"{place}: {command}: {error}") from error
