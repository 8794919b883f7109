"""Snippets of the documents, run as a reader pastes them.

Python blocks of a page run in turn in one namespace, with nothing set up for them but what every session here has. Two things differ
from pasting: folders below ``/tmp`` are in a folder of the test, and where a snippet waits some seconds for a query, the test waits until
a batch with rows has come. A ``text`` block behind a Python block is what that prints. What cannot run says why: ``python no-run: …``.
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
    why_not: str
    text: str

    @property
    def place(self) -> str:
        return f"{self.page.name}:{self.line}"


def told_as(page: Path) -> str:
    """The name of a page that tells it from those in other folders: `README`, `docs-operating-README`."""
    return "-".join(page.relative_to(ROOT).with_suffix("").parts)


def blocks(page: Path, language: str = "python") -> list[Block]:
    """Blocks of a language that run, in order."""
    return [it for it in every_block(page) if it.language == language and not it.why_not]


def every_block(page: Path) -> list[Block]:
    text = page.read_text()
    found = []
    for match in _BLOCK.finditer(text):
        language, _, rest = match[1].partition(" ")
        assert not rest or rest.startswith(_NO_RUN), (page.name, match[1])
        line = text.count("\n", 0, match.start()) + 1
        found.append(Block(page, line, language, rest.removeprefix(_NO_RUN), match[2]))
    return found


def placed(code: str, folder: Path) -> str:
    """Code whose files lie in a folder."""
    return code.replace('"/tmp/', f'"{folder}/')


def pasted(block: Block, names: dict[str, Any], folder: Path) -> None:
    """Run a block; a traceback names its line of the page."""
    exec(compile("\n" * block.line + placed(block.text, folder), str(block.page), "exec"), names)


def until(query: Any, fits: Callable[[Any], bool]) -> None:
    """Wait for a batch whose progress is as asked for."""

    def came() -> bool:
        assert query.exception() is None
        return any(fits(progress) for progress in query.recentProgress)

    eventually(came, 0.1)


@pytest.fixture
def waited(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Queries that snippets have waited for, some seconds each."""
    from pyspark.sql.streaming.query import StreamingQuery

    original, queries = StreamingQuery.awaitTermination, list[Any]()

    def await_termination(self: Any, timeout: int | None = None) -> Any:
        if timeout is None:
            return original(self)
        queries.append(self)
        return until(self, lambda progress: progress["numInputRows"] > 0)

    monkeypatch.setattr(StreamingQuery, "awaitTermination", await_termination)
    return queries


# -- Python ---------------------------------------------------------------------------------------


def pages() -> Iterator[Any]:
    """Pages with Python that runs here; a client of Connect runs in a process of its own, below."""
    for page in PAGES:
        code = "".join(block.text for block in blocks(page))
        if code and ".remote(" not in code:
            marks = [pytest.mark.spark] if "SparkSession" in code else []
            marks += [pytest.mark.slow] if page.stem == "operators" else []
            yield pytest.param(page, id=told_as(page), marks=marks)


@pytest.mark.parametrize("page", list(pages()))
def test_a_page_runs_as_pasted(
    page: Path,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert SAID in page.read_text(), "a page says how its snippets run"
    here = every_block(page)
    code = "".join(block.text for block in here)
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
        for block in here:
            if block.language == "python" and not block.why_not:
                pasted(block, names, tmp_path)
                printed = capsys.readouterr().out
            elif block.language == "text" and printed:
                assert block.text.strip() == printed.strip(), block.place
    finally:
        if spark is not None:
            disable(spark)
            # The session is that of other tests, too.
            spark.conf.set("spark.sql.shuffle.partitions", partitions)
    assert [query.exception() for query in queries if query.exception()] == []
    if page == ROOT / "README.md":
        assert len(queries) == 1


@pytest.mark.spark
@pytest.mark.connect
def test_the_page_on_connect_runs_as_pasted(connect_server: Any, tmp_path: Path) -> None:
    """Its client, in a process of its own as there."""
    page = ROOT / "docs" / "connect.md"
    assert SAID in page.read_text()
    (block,) = blocks(page)
    code = placed(block.text, tmp_path)
    assert code.count("sc://localhost:15002") == 1
    code = code.replace("sc://localhost:15002", connect_server.url)
    (tmp_path / "count.py").write_text(code)
    # Nothing of Spark's but how its JVM starts.
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


def test_few_snippets_are_not_run_and_say_why() -> None:
    left = [block for page in PAGES for block in every_block(page) if block.why_not]
    assert [block.page.name for block in left] == [
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
    for block in left:
        assert len(block.why_not) > 20, block.place
        # What can be told without running: it is Python, and what it imports of ours is there.
        for node in ast.walk(ast.parse(block.text)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("spark_state_ext"):
                module = importlib.import_module(node.module or "")
                assert [name.name for name in node.names if not hasattr(module, name.name)] == [], block.place


def test_an_example_of_s3(s3: Any) -> None:
    """The options reach a server that is not Amazon's."""
    pytest.importorskip("s3fs")
    (block,) = [it for it in blocks(ROOT / "docs" / "operating" / "s3.md") if "endpoint_url" in it.text]
    names: dict[str, Any] = {}
    # Its server takes any credentials.
    exec(block.text.replace("http://localhost:9000", s3.endpoint).replace('"…"', '"any"'), names)
    state: ArrowState = names["state"]
    folder = Folder(state.options.root, state.options.storage_options)
    folder.put("file", b"bytes")
    assert folder.get("file") == b"bytes"


@pytest.mark.spark
def test_several_steps(spark: Any, tmp_path: Path) -> None:
    """Its alerts, read from memory in place of the console, whose rows are the JVM's to print."""
    (block,) = blocks(ROOT / "docs" / "parity.md")
    code = placed(block.text, tmp_path)
    assert code.count('.format("console")') == 1
    names: dict[str, Any] = {"__name__": "__main__"}
    head, _ = code.replace('.format("console")', '.format("memory").queryName("alerted")').split("query.await")
    try:
        exec(head, names)
        until(names["query"], lambda progress: progress["sink"]["numOutputRows"] > 0)
        names["query"].stop()
        alerts = {(row.user, row.above) for row in spark.table("alerted").collect()}
        assert alerts
        assert all(above % 1000 == 0 for _, above in alerts)
    finally:
        disable(spark)


# -- commands -------------------------------------------------------------------------------------

_INLINE = re.compile(r"`((?:python3? (?:-m |[\w/]+\.py\b)|pip install |make |spark-state-ext )[^`\n]*)`")


def commands(page: Path) -> list[tuple[str, str]]:
    """Commands of shell blocks, and of the text, with where they stand."""
    found = []
    for block in blocks(page, "bash"):
        for line in block.text.replace("\\\n", " ").splitlines():
            command = re.sub(r"\s#.*", "", line).strip()
            if command:
                found.append((block.place, command))
    return found + [(page.name, command) for command in _INLINE.findall(_BLOCK.sub("", page.read_text()))]


@cache
def help_of(*arguments: str) -> str:
    """What a module of ours says of its options."""
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


def checked_module(words: list[str]) -> None:
    """``-m MODULE`` of ours is there, and has the commands and options of a line."""
    module, *given = words
    if module == "venv":
        return
    if module == "pytest":
        assert all((ROOT / word).exists() for word in given if not word.startswith("-"))
        return
    spec = importlib.util.find_spec(module) or importlib.util.find_spec(f"{module}.__main__")
    assert spec is not None, module
    main = importlib.util.find_spec(f"{module}.__main__") if spec.submodule_search_locations else spec
    assert main is not None, module
    assert main.origin is not None, module
    if "argparse" not in Path(main.origin).read_text() and module != "spark_state_ext":
        assert not given, "it takes no arguments"
        return
    told = help_of(module)
    if module in ("benchmarks", "spark_state_ext") and given and not given[0].startswith("-"):
        named = [given.pop(0)]
        assert re.search(rf"^ +{named[0]}\b|`{named[0]}`", told, re.MULTILINE), named[0]
        if module == "spark_state_ext" and named[0] in ("savepoint", "erase", "standby") and given:
            named.append(given.pop(0))
            assert re.search(rf"^ +{named[1]}\b", help_of(module, named[0]), re.MULTILINE), named[1]
        told = help_of(module, *named) if any(word.startswith("--") for word in given) else told
    for word in given:
        if word.startswith("--"):
            assert re.search(rf"(?<![\w-]){word}(?![\w-])", told), word


def checked_requirement(word: str) -> None:
    """What pip is to install is this package with extras that it has, or something that one of its extras brings."""
    extras = setup()["options.extras_require"]
    name, _, chosen = word.partition("[")
    if name in ("spark_state_ext", ".", "./spark_state_ext"):
        for extra in filter(None, chosen.rstrip("]").split(",")):
            assert extra in extras, word
    else:
        bare = re.split("[<>=]", name)[0]
        assert any(re.search(rf"^{bare}\b", line, re.MULTILINE) for line in extras.values()), word


def setup() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return parser


@pytest.mark.parametrize("page", [pytest.param(page, id=told_as(page)) for page in PAGES])
def test_commands_are_there(page: Path) -> None:
    """Modules and their options, targets of make, extras, and programs that PySpark brings."""
    for place, command in commands(page):
        try:
            words = shlex.split(command)
            program, *given = words
            if program == "make":
                targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
                assert given[0] in targets
            elif program in ("python", "python3"):
                if given[0] == "-m":
                    checked_module(given[1:])
                else:
                    # A script of the repository, or one that the page has the reader write.
                    assert (ROOT / given[0]).exists() or f"`{given[0]}`" in page.read_text()
            elif program == "spark-state-ext":
                checked_module(["spark_state_ext", *given])
            elif program == "pip":
                assert given[0] == "install"
                for word in given[1:]:
                    checked_requirement(word)
            elif program == "export":
                # A variable that the package asks for.
                name = given[0].partition("=")[0]
                assert any(f'"{name}"' in path.read_text() for path in (ROOT / "spark_state_ext").rglob("*.py")), name
            elif program == "spark-submit":
                assert shutil.which(program)
            else:
                assert program == ".", "no test knows this command"
        except AssertionError as error:
            raise AssertionError(f"{place}: {command}: {error}") from error
