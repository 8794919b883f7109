"""The command line as a whole: what goes where, in which form, and with which exit code."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from savepoint_folders import savepoint_at
from small_root import QUERY, savepoint_of, small_root
from typer.testing import CliRunner

from spark_state_ext.__main__ import main
from spark_state_ext.cli import app
from spark_state_ext.cli.app import COMMANDS, GROUPS, build_application
from spark_state_ext.cli.output import Output, format_value, to_json_value, write_table
from spark_state_ext.spark.compat import SPARK_VERSION
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
    done = CliRunner().invoke(build_application(), [*words, "--help"])
    assert done.exit_code == 0, done.output
    assert "Usage: " in done.output
    names = {line.split()[0].rstrip(",") for line in done.output.splitlines() if line.strip().startswith("-")}
    assert names & {"-h", "--help"}
    if words not in (["check"], ["metrics"], ["skew"], ["recommend"], ["doctor"]):
        assert "--storage-options" in names, "whatever reads a root may need them"
    # Each option that may have secrets can be given without its text on the command line.
    for option in {name for name in names if name.endswith("-options")}:
        assert f"{option}-file" in names
        assert f"SPARK_STATE_EXT_{option[2:].upper().replace('-', '_')}" in done.output


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
        (
            ["rollback", "/nowhere", "--to-batch", "1"],
            2,
            "spark-state-ext rollback: UsageError: /nowhere is not a Spark",
        ),
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

    monkeypatch.setattr("spark_state_ext.cli.savepoint.open_folder", fails)
    assert main(["savepoint", "status", "/nowhere"]) == 70
    said = capsys.readouterr()
    assert "ZeroDivisionError: nobody foresaw it" in said.err
    assert "this is a bug of spark_state_ext" in said.err
    assert not said.out


def test_data_is_alone_on_stdout_in_each_form(tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    savepoint = savepoint_at(tmp_path / "savepoint").root
    command = ["savepoint", "status", savepoint]

    def out(*words: str) -> bytes:
        assert main([*command, *words]) == 0
        said = capfdbinary.readouterr()
        assert said.err == b""
        return said.out

    found = json.loads(out("-o", "json"))
    (line,) = out("-o", "jsonl").splitlines()
    assert json.loads(line) == found
    # In a process of its own, as users have it.
    done = _process(*command, "-o", "json")
    assert (json.loads(done.stdout), done.stderr) == (found, "")
    table = pa.ipc.open_stream(io.BytesIO(out("-o", "arrow"))).read_all()
    assert [to_json_value(row) for row in table.to_pylist()] == [found]
    told = out().decode()
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
    assert format_value("[bold]no markup[/bold]") == "[bold]no markup[/bold]"


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
    # One is written as text, the other as bytes.
    for form in ("table", "arrow"):
        done = _process("savepoint", "status", savepoint_at(tmp_path / form).root, "-o", form, code=code)
        assert (done.returncode, done.stderr) == (141, ""), form


_BLOCKED = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in _NAMES:
            raise ModuleNotFoundError(f"{name} is blocked", name=name)

import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name.split(".")[0] in _NAMES else found(name, *more)
sys.meta_path.insert(0, Blocked())
from spark_state_ext.__main__ import main
"""
_WITHOUT = f"_NAMES = 'typer', 'rich'{_BLOCKED}sys.exit(main(sys.argv[1:]))"
# Runs one command after the other, as a process takes long to start; prints codes, and what they wrote to stderr.
_EACH = """
import contextlib, io, json, os
for words, variables in json.loads(sys.argv[1]):
    err = io.StringIO()
    os.environ.update(variables)
    with contextlib.redirect_stderr(err):
        code = main(words)
    print(json.dumps([words, code, err.getvalue()]))
"""


def _each(
    commands: Sequence[tuple[Sequence[str], Mapping[str, str]]], code: str
) -> Iterator[tuple[list[str], int, str]]:
    """Run commands in one process, with variables from then on; gives each with its exit code and its stderr."""
    left_out = (
        "HADOOP_CONF_DIR",
        "YARN_CONF_DIR",
        "SPARK_CONF_DIR",
        "SPARK_HOME",
        "SPARK_REMOTE",
        "PYSPARK_SUBMIT_ARGS",
    )
    environment = {name: value for name, value in os.environ.items() if name not in left_out}
    done = subprocess.run(
        [sys.executable, "-c", code + _EACH, json.dumps(commands)],
        env={**environment, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    told = [json.loads(line) for line in done.stdout.splitlines()]
    assert [words for words, _, _ in told] == [list(words) for words, _ in commands]
    yield from told


def test_what_needs_pyspark_says_which_extra_brings_it(tmp_path: Path) -> None:
    with small_root(tmp_path) as small:
        root, there = str(small.root), savepoint_of(small.job, tmp_path / "savepoint").root
        checkpoint = tmp_path / "checkpoint"
        checkpoint.mkdir()
        (checkpoint / "metadata").write_text(json.dumps({"id": QUERY}))
        location, new = str(checkpoint), str(tmp_path / "new")
        commands = [
            ["savepoint", "create", new, "--checkpoint", location, "--root", root],
            ["import-native", location, new, f"{new}-2", "--operator", "counts"],
            ["export-native", there, new],
            ["abandoned", root, "-c", location, "--spark"],
            ["gc", root, "--dry-run", "--checkpoint", location],
            ["doctor", root, "--spark"],
            *([name, root, *words, "--checkpoint", location] for name, words in _READING.items()),
        ]
        for words, code, err in _each([(it, {}) for it in commands], f"_NAMES = 'pyspark', 'py4j'{_BLOCKED}"):
            assert code == 3, words
            assert "EnvironmentSetupError: this command needs pyspark, which this Python" in err
            assert err.endswith("does not have: pip install 'spark_state_ext[spark]'\n")
            assert "Traceback" not in err
        assert not Path(new).exists()


_READING = {"show": [], "get": ["ann", "0"], "scan": [], "diff": [], "export": ["rows.parquet"]}


def test_what_can_be_checked_is_checked_before_spark_starts(tmp_path: Path) -> None:
    """With a Java that only prints and fails, Spark cannot have started; and what it prints is not shown."""
    java = tmp_path / "jdk" / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text("#!/bin/sh\necho 'Error: this is no Java'; echo a trace of a JVM >&2; exit 2\n")
    java.chmod(0o755)
    with small_root(tmp_path) as small:
        root, there = str(small.root), savepoint_of(small.job, tmp_path / "savepoint").root
        nowhere, new, taken = str(tmp_path / "nowhere"), str(tmp_path / "new"), str(tmp_path / "taken")
        Path(taken).mkdir()
        (Path(taken) / "metadata").write_text(json.dumps({"id": QUERY}))
        create = ["savepoint", "create"]
        wrong = "is not a Spark checkpoint location: it has no file 'metadata'"
        refused = {
            wrong: [
                [*create, new, "--checkpoint", nowhere, "--root", root],
                ["import-native", nowhere, new, f"{new}-2", "--operator", "counts"],
                ["abandoned", root, "-c", nowhere, "--spark"],
                ["gc", root, "--dry-run", "--checkpoint", nowhere],
                *([name, root, *words, "--checkpoint", f"file:{nowhere}"] for name, words in _READING.items()),
            ],
            "there is no folder": [
                [*create, new, "--checkpoint", taken, "--root", nowhere],
                ["abandoned", nowhere, "-c", taken, "--spark"],
                *([name, nowhere, *words, "--checkpoint", taken] for name, words in _READING.items()),
            ],
            "is not empty: give a folder": [
                [*create, there, "--checkpoint", taken, "--root", root],
                ["import-native", taken, there, new, "--operator", "counts"],
                ["import-native", taken, new, there, "--operator", "counts"],
            ],
            "already: give a folder that does not exist yet": [["export-native", there, taken]],
            "to must be 'transformWithState', not 'x'": [["export-native", there, new, "--for", "x"]],
            "--form must be native or canonical, not 'x'": [
                [*create, new, "--checkpoint", taken, "--root", root, "--form", "x"]
            ],
            "operator must be a name of at most 100 letters": [
                ["import-native", taken, new, f"{new}-2", "--operator", "a b/c"]
            ],
            "has no bucket 9": [["gc", root, "--dry-run", "--bucket", "9", "--checkpoint", taken]],
        }
        commands: list[tuple[list[str], dict[str, str]]] = [
            (words, {}) for group in refused.values() for words in group
        ]
        texts = [text for text, group in refused.items() for _ in group]
        # The last ones go as far as Spark, and end with a line of their own.
        show, log = ["show", root, "--checkpoint", taken], tmp_path / "spark.log"
        last = [(show, {}), (show, {"SPARK_STATE_EXT_SPARK_LOG": str(log)}), (show, {"JAVA_HOME": str(tmp_path)})]
        first = f"import os, sys\nos.environ['JAVA_HOME'] = {str(java.parent.parent)!r}\n"
        told = list(_each([*commands, *last], f"{first}from spark_state_ext.__main__ import main"))
        for (words, code, said), text in zip(told, texts, strict=False):
            is_right = text in said or (SPARK_VERSION < (4, 0) and re.search("use (Py)?Spark 4", said) is not None)
            assert (code, is_right) == (2, True), (words, said)
            assert "Traceback" not in said
        if SPARK_VERSION < (4, 0):
            return  # it has no reader of state, so the last commands end before Spark starts
        lines = [line for _, code, line in told[len(texts) :] if (code, line.count("\n")) == (3, 1)]
        assert len(lines) == len(last)
        failed = r"spark-state-ext show: StorageError: Spark does not start: .*\(this is no Java\)\. Set"
        assert re.match(failed, lines[0])
        assert "a trace of a JVM" in log.read_text()
        assert "EnvironmentSetupError: Spark needs Java: JAVA_HOME is" in lines[2]


# What a terminal would obey, what rich takes for markup, a line's end, and a byte that is no UTF-8.
_HOSTILE = "a\x1b[31m\x9b2J[red]\nb\u202e\udcff"
_SHOWN = r"a\x1b[31m\x9b2J[red]\nb\u202e\udcff"


def test_names_of_files_are_escaped_wherever_they_are_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with small_root(tmp_path) as small:
        folder = small.root.rename(tmp_path / _HOSTILE[:-1])
        bucket = folder / "counts" / QUERY / "0"
        (bucket / _HOSTILE).write_text("none of ours")
        (folder / "counts" / _HOSTILE).mkdir()
        picture, page, file = (str(tmp_path / name) for name in ("tree.svg", "page.html", "rows.arrow"))
        odd, root = str(bucket / _HOSTILE), str(folder)
        commands = [
            (["verify", root], _SHOWN),
            (["verify", odd], _SHOWN),
            (["verify", str(folder / "counts" / _HOSTILE)], _SHOWN),
            (["gc", root, "--dry-run"], _SHOWN),
            (["why", odd], _SHOWN),
            (["show", root], _SHOWN[:-6]),
            (["show", f"{root}\udcff"], rf"{_SHOWN}' cannot be opened: its name is not UTF-8"),
            (["show", root, "--operator", _HOSTILE], _SHOWN),
            (["show", root, "--at", _HOSTILE[:-1]], ""),
            (["show", root, _HOSTILE[:-1]], r"\x1b[31m"),
            (["log", root], _SHOWN[:-6]),
            (["lineage", root, "--bucket", "0", "--to", picture], ""),
            (["report", root, "--out", page], ""),
            (["export", root, file], ""),
            (["erase", "scan", root, "ann", "0"], _SHOWN[:-6]),
            (["savepoint", "status", root], _SHOWN[:-6]),
            (["abandoned", root, "-c", root], _SHOWN[:-6]),
            (["doctor", root, "--all"], _SHOWN[:-6]),
            (["get", f"{root}/nothing", "x"], _SHOWN[:-6]),
        ]
        for words, text in commands:
            for form in [[], ["-o", "json"], ["-o", "jsonl"]] if words[0] in ("verify", "gc", "show", "why") else [[]]:
                code = main([*words, *form])
                said = capsys.readouterr()
                assert code != 70, said.err
                printed = said.out + said.err
                bad = [it for it in printed if not it.isprintable() and it != "\n"]
                assert bad == [], (words, bad)
                assert text in printed or form, (words, printed)
        told = Path(page).read_text()
        assert _SHOWN[:-6] in told
        assert all(it.isprintable() or it == "\n" for it in told)
        assert main(["verify", root, "-o", "json"]) == 0
        assert [row["path"] for row in json.loads(capsys.readouterr().out)] == [
            odd.encode("utf-8", "backslashreplace").decode(),
        ]


def test_headings_are_escaped_too(capsys: pytest.CaptureFixture[str]) -> None:
    """They are names of the user's columns."""
    write_table(pa.table({"a\x1b[31m": [1], ":smile: [bold]b[/bold]": ["\x9b2J"]}), Output.TABLE)
    assert capsys.readouterr().out.splitlines() == [r"a\x1b[31m  :smile: [bold]b[/bold]", r"        1  \x9b2J"]
    write_table(pa.table({"a": ["\x9b2J \u202e \U000e0001"]}), Output.JSONL)
    assert capsys.readouterr().out == r'{"a": "\u009b2J \u202e \udb40\udc01"}' + "\n"


def test_secrets_need_not_be_on_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From a file or a variable; which one was taken shows in the error about a class that is not there."""

    def taken(*words: str, code: int = 2) -> str:
        assert main(["show", "/somewhere", *words]) == code
        return capsys.readouterr().err

    def of(name: str) -> str:
        return json.dumps({"implementation": f"{name}.Secret"})

    file = tmp_path / "options.json"
    file.write_text(of("file"))
    from_file = ["--storage-options-file", str(file)]
    assert "No module named 'file'" in taken(*from_file)
    monkeypatch.setenv("SPARK_STATE_EXT_STORAGE_OPTIONS", of("variable"))
    assert "No module named 'variable'" in taken()
    assert "No module named 'line'" in taken("--storage-options", of("line"))
    assert "No module named 'file'" in taken(*from_file)
    both = taken(*from_file, "--storage-options", of("line"))
    assert "give --storage-options-file or --storage-options, not both" in both
    for text in ("[7, 'Secret']", '{"key": "Secret"', '["Secret"]'):
        file.write_text(text)
        monkeypatch.setenv("SPARK_STATE_EXT_STORAGE_OPTIONS", text)
        for refused in (taken(*from_file), taken()):
            assert "it is not JSON" in refused or "it is not a JSON object" in refused
            assert "Secret" not in refused
    monkeypatch.delenv("SPARK_STATE_EXT_STORAGE_OPTIONS")
    assert "cannot be read: " in taken("--storage-options-file", str(tmp_path / "nothing"))
    # Others of the kind: what the command writes has its own.
    monkeypatch.setenv("SPARK_STATE_EXT_TO_OPTIONS", of("target"))
    there = savepoint_at(tmp_path / "savepoint").root
    assert main(["savepoint", "copy", there, str(tmp_path / "copy")]) == 2
    assert "No module named 'target'" in capsys.readouterr().err


def test_check_works_without_the_extra_and_others_say_what_to_install() -> None:
    done = _process("check", code=_WITHOUT)
    assert "this machine can run it" in done.stdout, done.stderr
    assert done.returncode == 0
    done = _process("savepoint", "status", "/nowhere", code=_WITHOUT)
    assert done.returncode == 3
    assert done.stderr.startswith(
        "spark-state-ext: EnvironmentSetupError: this command needs typer and rich, which this Python"
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


def test_a_command_imports_the_module_of_its_noun_only() -> None:
    code = """
import sys
from spark_state_ext.__main__ import main
status = main()
here = "spark_state_ext.cli."
print(" ".join(sorted(name.removeprefix(here) for name in sys.modules if name.startswith(here))), file=sys.stderr)
sys.exit(status)
"""
    always = ["app", "exit_codes", "options", "output"]
    for words, more in (
        ([], []),
        (["get"], ["paths", "state", "values"]),
        (["check"], ["check", "doctor"]),
        (["metrics"], ["metrics"]),
        (["savepoint"], []),
        (["rollback"], ["rollback", "spark_checkpoint"]),
    ):
        assert _process(*words, "--help", code=code).stderr.split() == sorted([*always, *more]), words


def test_a_shell_completes_names_and_options(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Typer's protocol, as the script for bash has it."""
    monkeypatch.setenv("_SPARK_STATE_EXT_COMPLETE", "complete_bash")
    for words, expected in (
        ("spark-state-ext savep", "savepoint"),
        ("spark-state-ext savepoint st", "status"),
        ("spark-state-ext resc", "rescale"),
        ("spark-state-ext rescale --b", "--buckets"),
    ):
        monkeypatch.setenv("COMP_WORDS", words)
        monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
        assert main([]) == 0
        assert expected in capsys.readouterr().out.split()


def test_the_program_is_installed_under_its_name() -> None:
    import configparser

    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    scripts = parser["options.entry_points"]["console_scripts"]
    assert scripts.split() == [app.PROGRAM, "=", "spark_state_ext.__main__:main"]
    extras = parser["options.extras_require"]
    for line in [*extras["cli"].split(), *extras["report"].split()]:
        assert line in extras["test"].split(), "tests need it"
