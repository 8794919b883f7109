"""The command line as a whole: what goes where, in which form, and with which exit code."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from savepoint_folders import savepoint_at
from typer.testing import CliRunner

from spark_state_ext.__main__ import main
from spark_state_ext.cli import app
from spark_state_ext.cli.app import COMMANDS, GROUPS, application
from spark_state_ext.cli.output import Output, plain, shown, write_table
from spark_state_ext.worker.metrics import CallMetrics, MetricsLog
from tests.helpers.waiting import WAIT_S

ROOT = Path(__file__).parent.parent.parent
_WORDS = [[name] for name in COMMANDS if name not in GROUPS]
_WORDS += [[group, name] for group, known in GROUPS.items() for name in known]


def _process(*arguments: str, code: str = "", **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code] if code else [sys.executable, "-m", "spark_state_ext"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [*command, *arguments], env=environment, capture_output=True, text=True, timeout=WAIT_S, check=False, **options
    )


@pytest.mark.parametrize("words", _WORDS, ids="-".join)
def test_each_command_tells_its_arguments(words: Sequence[str]) -> None:
    # Typer's own runner, on the application as users have it.
    done = CliRunner().invoke(application(), [*words, "--help"])
    assert done.exit_code == 0, done.output
    assert "Usage: " in done.output
    names = {line.split()[0].rstrip(",") for line in done.output.splitlines() if line.strip().startswith("-")}
    assert names & {"-h", "--help"}
    if words not in (["check"], ["metrics"], ["skew"], ["recommend"], ["doctor"]):
        assert "--storage-options" in names, "whatever reads a root may need them"


def test_the_list_of_commands_is_whole(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    said = capsys.readouterr().out
    assert [name for name in COMMANDS if f"\n  {name} " not in said] == []
    page = (ROOT / "docs" / "operating" / "commands.md").read_text()
    assert [name for name in COMMANDS if f"`{name}" not in page] == []
    for group, known in GROUPS.items():
        assert main([group, "--help"]) == 0
        said = capsys.readouterr().out
        assert [name for name in known if f"\n  {name} " not in said] == []
        assert [name for name in known if f"`{group} {name} " not in page] == []


@pytest.mark.parametrize(
    ("arguments", "code", "first"),
    [
        (["--version"], 0, ""),
        (["nothing"], 2, "Usage: spark-state-ext"),
        (["check", "-o", "yaml"], 2, "Usage: spark-state-ext check"),
        (["savepoint", "status"], 2, "Usage: spark-state-ext savepoint status"),
        (["savepoint", "status", "/nowhere", "--storage-options", "{"], 2, "Usage: spark-state-ext savepoint status"),
        (["savepoint", "status", "/nowhere", "--storage-options", "7"], 2, "Usage: spark-state-ext savepoint status"),
        (["savepoint", "status", "/nowhere"], 3, "spark-state-ext savepoint status: MissingCheckpointError: there is"),
        (["savepoint", "delete", "/nowhere"], 2, "spark-state-ext savepoint delete: UsageError: /nowhere has no"),
        (["rollback", "/nowhere", "--to-batch", "1"], 2, "spark-state-ext rollback: UsageError: /nowhere is no Spark"),
    ],
)
def test_exit_codes(arguments: list[str], code: int, first: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == code
    said = capsys.readouterr()
    assert said.err.startswith(first)
    assert "Traceback" not in said.err
    assert not (said.out and code)


def test_what_nobody_foresaw_is_a_bug(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fails(path: str, options: Any) -> Any:
        raise ZeroDivisionError("nobody foresaw it")

    monkeypatch.setattr("spark_state_ext.cli.commands.savepoint_status.given_folder", fails)
    assert main(["savepoint", "status", "/nowhere"]) == 70
    said = capsys.readouterr()
    assert "ZeroDivisionError: nobody foresaw it" in said.err
    assert "this is a bug of spark_state_ext" in said.err
    assert not said.out


def test_data_is_alone_on_stdout_in_each_form(tmp_path: Path) -> None:
    savepoint = savepoint_at(tmp_path / "savepoint").root
    command = ["savepoint", "status", savepoint]
    (found,) = [json.loads(_process(*command, "-o", "json").stdout)]
    (line,) = _process(*command, "-o", "jsonl").stdout.splitlines()
    assert json.loads(line) == found
    done = subprocess.run(
        [sys.executable, "-m", "spark_state_ext", *command, "-o", "arrow"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        timeout=WAIT_S,
        check=True,
    )
    table = pa.ipc.open_stream(io.BytesIO(done.stdout)).read_all()
    assert [plain(row) for row in table.to_pylist()] == [found]
    assert done.stderr == b""
    told = _process(*command).stdout
    assert f"id         {found['id']}\n" in told
    assert "operators:\noperator  buckets  rows_max  files  bytes\ncounts          2        10      2      8\n" in told


_VALUES = pa.table(
    {
        "name": pa.array(["plain ü", "a\x1b[31m\nb", None]),
        "number": pa.array([2**62, -1, None], pa.int64()),
        "ratio": pa.array([0.5, float("nan"), float("-inf")]),
        "price": pa.array([Decimal("1.10"), None, Decimal("-2.00")], pa.decimal128(9, 2)),
        "at": pa.array([datetime(2024, 2, 1, 12, 30, tzinfo=timezone.utc), None, None], pa.timestamp("us", "UTC")),
        "raw": pa.array([b"\x00\xff", b"text", None]),
        "span": pa.array([timedelta(seconds=90), None, None], pa.duration("us")),
        "tags": pa.array([["a", None], [], None], pa.list_(pa.string())),
        "pairs": pa.array([[("a", 1)], None, []], pa.map_(pa.string(), pa.int32())),
        "inner": pa.array([{"x": 1, "y": "z"}, None, None]),
        "right": pa.array([True, False, None]),
    }
)


def test_values_keep_their_types(capsys: pytest.CaptureFixture[str]) -> None:
    write_table(_VALUES, Output.JSONL)
    first, second, third = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert first == {
        "name": "plain ü",
        "number": 2**62,
        "ratio": 0.5,
        "price": "1.10",
        "at": "2024-02-01T12:30:00+00:00",
        "raw": "AP8=",
        "span": "0:01:30",
        "tags": ["a", None],
        "pairs": [["a", 1]],
        "inner": {"x": 1, "y": "z"},
        "right": True,
    }
    assert (second["name"], second["ratio"], third["ratio"]) == ("a\x1b[31m\nb", "NaN", "-Infinity")
    assert (second["tags"], third["tags"]) == ([], None)


def test_nothing_in_a_table_is_obeyed_by_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    write_table(_VALUES, Output.TABLE)
    header, *lines = capsys.readouterr().out.splitlines()
    assert header.split() == _VALUES.column_names
    assert len(lines) == 3, "a row is one line, however wide"
    assert r"a\x1b[31m\nb" in lines[1]
    assert "\x1b" not in "".join(lines)
    assert r"b'\x00\xff'" in lines[0]
    assert lines[2].split() == ["NULL", "NULL", "-inf", "-2.00", *["NULL"] * 4, "[]", "NULL", "NULL"]
    assert shown("[bold]no markup[/bold]") == "[bold]no markup[/bold]"


def test_rows_of_no_batch_have_each_form(capsys: pytest.CaptureFixture[str]) -> None:
    empty = _VALUES.schema.empty_table()
    for output, text in ((Output.JSON, "[]\n"), (Output.JSONL, ""), (Output.TABLE, " ".join(_VALUES.column_names))):
        write_table(empty, output)
        assert " ".join(capsys.readouterr().out.split()) == text.strip()


def test_who_stops_reading_ends_the_command_quietly(tmp_path: Path) -> None:
    """As ``… | head``. The pipe is closed before anything is written, so there is no race."""
    code = """
import os, sys
reader, writer = os.pipe()
os.close(reader)
os.dup2(writer, 1)
from spark_state_ext.__main__ import main
sys.exit(main(sys.argv[1:]))
"""
    for form in ("table", "json", "jsonl", "arrow"):
        done = _process("savepoint", "status", savepoint_at(tmp_path / form).root, "-o", form, code=code)
        assert (done.returncode, done.stderr) == (141, ""), form


_WITHOUT = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("typer", "rich"):
            raise ModuleNotFoundError(f"{name} is blocked", name=name)

import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name in ("typer", "rich") else found(name, *more)
sys.meta_path.insert(0, Blocked())
from spark_state_ext.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


def test_check_works_without_the_extra_and_others_say_what_to_install() -> None:
    done = _process("check", code=_WITHOUT)
    assert "this machine can run it" in done.stdout, done.stderr
    assert done.returncode == 0
    done = _process("savepoint", "status", "/nowhere", code=_WITHOUT)
    assert done.returncode == 3
    assert done.stderr.startswith(
        "spark-state-ext: EnvironmentSetupError: this needs typer and rich, which this Python"
    )
    assert "pip install 'spark_state_ext[cli]'" in done.stderr
    assert not done.stdout


def test_commands_that_look_need_neither_spark_nor_pandas(tmp_path: Path) -> None:
    code = """
import sys
from spark_state_ext.__main__ import main
status = main()
there = {name.split(".")[0] for name, module in sys.modules.items() if module is not None}
print(sorted({"pyspark", "py4j", "pandas"} & there), file=sys.stderr)
sys.exit(status)
"""
    log = MetricsLog(tmp_path)
    log.add(CallMetrics("query", "run", 1, "counts", 0, ended_ms=1))
    log.flush()
    done = _process("metrics", str(tmp_path), code=code)
    assert (done.returncode, done.stderr) == (0, "[]\n")


def test_a_shell_completes_names_and_options() -> None:
    """Typer's protocol, as the script for bash has it."""
    for words, expected in (
        ("spark-state-ext savep", "savepoint"),
        ("spark-state-ext savepoint st", "status"),
        ("spark-state-ext resc", "rescale"),
        ("spark-state-ext rescale --b", "--buckets"),
    ):
        environment = {"_SPARK_STATE_EXT_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": "1"}
        environment["COMP_CWORD"] = str(len(words.split()) - 1)
        code = "import sys; from spark_state_ext.__main__ import main; sys.exit(main([]))"
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, **environment, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=WAIT_S,
            check=False,
        )
        assert expected in done.stdout.split(), done.stderr


def test_the_program_is_installed_under_its_name() -> None:
    import configparser

    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    scripts = parser["options.entry_points"]["console_scripts"]
    assert scripts.split() == [app.PROGRAM, "=", "spark_state_ext.__main__:main"]
    extras = parser["options.extras_require"]
    for line in [*extras["cli"].split(), *extras["report"].split()]:
        assert line in extras["test"].split(), "tests need it"
