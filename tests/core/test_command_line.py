"""The whole command line: its outputs, their formats, and its exit codes."""

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
_COMMAND_NAMES = [[name] for name in COMMANDS if name not in GROUPS]
_COMMAND_NAMES += [[group, name] for group, known in GROUPS.items() for name in known]


def _run_process(*arguments: str, code: str = "", **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code] if code else [sys.executable, "-m", "spark_state_ext"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [*command, *arguments], env=environment, capture_output=True, text=True, timeout=WAIT_S, check=False, **options
    )


@pytest.mark.parametrize("words", _COMMAND_NAMES, ids="-".join)
def test_the_help_of_each_command_lists_its_options(words: Sequence[str]) -> None:
    # Typer's runner runs the same application that users run.
    done = CliRunner().invoke(build_application(), [*words, "--help"])
    assert done.exit_code == 0, done.output
    assert "Usage: " in done.output
    names = {line.split()[0].rstrip(",") for line in done.output.splitlines() if line.strip().startswith("-")}
    assert names & {"-h", "--help"}
    if words not in (["check"], ["metrics"], ["skew"], ["recommend"], ["doctor"]):
        assert "--storage-options" in names, "each command that reads a root may need them"
    # Users can give each option that may contain secrets without putting its text on the command line.
    for option in {name for name in names if name.endswith("-options")}:
        assert f"{option}-file" in names
        assert f"SPARK_STATE_EXT_{option[2:].upper().replace('-', '_')}" in done.output


def test_the_help_and_the_documentation_list_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    usage = capsys.readouterr().out
    assert [name for name in COMMANDS if f"\n  {name} " not in usage] == []
    page = (ROOT / "docs" / "operating" / "commands.md").read_text()
    assert [name for name in COMMANDS if f"`{name}" not in page] == []
    for group, names in GROUPS.items():
        assert main([group, "--help"]) == 0
        usage = capsys.readouterr().out
        assert [name for name in names if f"\n  {name} " not in usage] == []
        assert [name for name in names if f"`{group} {name} " not in page] == []


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
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
def test_each_kind_of_error_has_its_exit_code(
    arguments: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == code
    output = capsys.readouterr()
    assert output.err.startswith(message)
    assert "Traceback" not in output.err
    assert not (output.out and code)


def test_an_unexpected_exception_is_reported_as_a_bug(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(path: str, options: Any) -> Any:
        raise ZeroDivisionError("an unforeseen error")

    monkeypatch.setattr("spark_state_ext.cli.savepoint.open_folder", fail)
    assert main(["savepoint", "status", "/nowhere"]) == 70
    output = capsys.readouterr()
    assert "ZeroDivisionError: an unforeseen error" in output.err
    assert "this is a bug of spark_state_ext" in output.err
    assert not output.out


def test_stdout_has_only_data_in_each_output_format(tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    savepoint = savepoint_at(tmp_path / "savepoint").root
    command = ["savepoint", "status", savepoint]

    def run_command(*words: str) -> bytes:
        assert main([*command, *words]) == 0
        output = capfdbinary.readouterr()
        assert output.err == b""
        return output.out

    status = json.loads(run_command("-o", "json"))
    (line,) = run_command("-o", "jsonl").splitlines()
    assert json.loads(line) == status
    # Users run the command in a separate process.
    done = _run_process(*command, "-o", "json")
    assert (json.loads(done.stdout), done.stderr) == (status, "")
    table = pa.ipc.open_stream(io.BytesIO(run_command("-o", "arrow"))).read_all()
    assert [to_json_value(row) for row in table.to_pylist()] == [status]
    text = run_command().decode()
    assert f"id         {status['id']}\n" in text
    assert "operators:\noperator  buckets  rows_max  files  bytes\ncounts          2        10      2      8\n" in text


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


def test_values_keep_their_types_in_json(capsys: pytest.CaptureFixture[str]) -> None:
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


def test_control_sequences_in_a_table_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    write_table(_VALUES, Output.TABLE)
    header, *lines = capsys.readouterr().out.splitlines()
    assert header.split() == _VALUES.column_names
    assert len(lines) == 3, "each row is one line, however wide it is"
    assert r"a\x1b[31m\nb" in lines[1]
    assert "\x1b" not in "".join(lines)
    assert r"b'\x00\xff'" in lines[0]
    assert lines[2].split() == ["NULL", "NULL", "-inf", "-2.00", *["NULL"] * 4, "[]", "NULL", "NULL"]
    assert format_value("[bold]no markup[/bold]") == "[bold]no markup[/bold]"


def test_an_empty_table_is_written_in_each_output_format(capsys: pytest.CaptureFixture[str]) -> None:
    empty = _VALUES.schema.empty_table()
    for output, text in ((Output.JSON, "[]\n"), (Output.JSONL, ""), (Output.TABLE, " ".join(_VALUES.column_names))):
        write_table(empty, output)
        assert " ".join(capsys.readouterr().out.split()) == text.strip()


def test_a_command_ends_without_an_error_if_its_reader_stops(tmp_path: Path) -> None:
    """This happens with ``… | head``. The pipe is closed before the command writes, so the test has no race."""
    code = """
import os, sys
reader, writer = os.pipe()
os.close(reader)
os.dup2(writer, 1)
from spark_state_ext.__main__ import main
sys.exit(main(sys.argv[1:]))
"""
    # A table is written as text, an Arrow stream as bytes.
    for form in ("table", "arrow"):
        done = _run_process("savepoint", "status", savepoint_at(tmp_path / form).root, "-o", form, code=code)
        assert (done.returncode, done.stderr) == (141, ""), form


_BLOCKED = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in _NAMES:
            raise ModuleNotFoundError(f"{name} is blocked", name=name)

import importlib.util
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name.split(".")[0] in _NAMES else find_spec(name, *more)
sys.meta_path.insert(0, Blocked())
from spark_state_ext.__main__ import main
"""
_WITHOUT_TYPER = f"_NAMES = 'typer', 'rich'{_BLOCKED}sys.exit(main(sys.argv[1:]))"
# Runs several commands in one process, because starting a process takes long; prints their exit codes and stderr.
_RUN_EACH = """
import contextlib, io, json, os
for words, variables in json.loads(sys.argv[1]):
    err = io.StringIO()
    os.environ.update(variables)
    with contextlib.redirect_stderr(err):
        code = main(words)
    print(json.dumps([words, code, err.getvalue()]))
"""


def _run_each(
    commands: Sequence[tuple[Sequence[str], Mapping[str, str]]], code: str
) -> Iterator[tuple[list[str], int, str]]:
    """Run commands in one process, each with further environment variables; yield each with its exit code and stderr."""
    excluded = (
        "HADOOP_CONF_DIR",
        "YARN_CONF_DIR",
        "SPARK_CONF_DIR",
        "SPARK_HOME",
        "SPARK_REMOTE",
        "PYSPARK_SUBMIT_ARGS",
    )
    environment = {name: value for name, value in os.environ.items() if name not in excluded}
    done = subprocess.run(
        [sys.executable, "-c", code + _RUN_EACH, json.dumps(commands)],
        env={**environment, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert [words for words, _, _ in results] == [list(words) for words, _ in commands]
    yield from results


def test_a_command_that_needs_pyspark_names_the_extra_to_install(tmp_path: Path) -> None:
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
            *([name, root, *words, "--checkpoint", location] for name, words in _READ_COMMANDS.items()),
        ]
        for words, code, err in _run_each(
            [(command, {}) for command in commands], f"_NAMES = 'pyspark', 'py4j'{_BLOCKED}"
        ):
            assert code == 3, words
            assert "EnvironmentSetupError: this command needs pyspark, which this Python" in err
            assert err.endswith("does not have: pip install 'spark_state_ext[spark]'\n")
            assert "Traceback" not in err
        assert not Path(new).exists()


_READ_COMMANDS = {"show": [], "get": ["ann", "0"], "scan": [], "diff": [], "export": ["rows.parquet"]}


def test_arguments_are_checked_before_spark_starts(tmp_path: Path) -> None:
    """The Java of this test only prints and fails, so Spark cannot start; the command does not show what Java prints."""
    java = tmp_path / "jdk" / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text("#!/bin/sh\necho 'Error: this is no Java'; echo a trace of a JVM >&2; exit 2\n")
    java.chmod(0o755)
    with small_root(tmp_path) as small:
        root, there = str(small.root), savepoint_of(small.job, tmp_path / "savepoint").root
        nowhere, new, existing = str(tmp_path / "nowhere"), str(tmp_path / "new"), str(tmp_path / "taken")
        Path(existing).mkdir()
        (Path(existing) / "metadata").write_text(json.dumps({"id": QUERY}))
        create = ["savepoint", "create"]
        wrong = "is not a Spark checkpoint location: it has no file 'metadata'"
        refused = {
            wrong: [
                [*create, new, "--checkpoint", nowhere, "--root", root],
                ["import-native", nowhere, new, f"{new}-2", "--operator", "counts"],
                ["abandoned", root, "-c", nowhere, "--spark"],
                ["gc", root, "--dry-run", "--checkpoint", nowhere],
                *([name, root, *words, "--checkpoint", f"file:{nowhere}"] for name, words in _READ_COMMANDS.items()),
            ],
            "there is no folder": [
                [*create, new, "--checkpoint", existing, "--root", nowhere],
                ["abandoned", nowhere, "-c", existing, "--spark"],
                *([name, nowhere, *words, "--checkpoint", existing] for name, words in _READ_COMMANDS.items()),
            ],
            "is not empty: give a folder": [
                [*create, there, "--checkpoint", existing, "--root", root],
                ["import-native", existing, there, new, "--operator", "counts"],
                ["import-native", existing, new, there, "--operator", "counts"],
            ],
            "already: give a folder that does not exist yet": [["export-native", there, existing]],
            "to must be 'transformWithState', not 'x'": [["export-native", there, new, "--for", "x"]],
            "--form must be native or canonical, not 'x'": [
                [*create, new, "--checkpoint", existing, "--root", root, "--form", "x"]
            ],
            "operator must be a name of at most 100 letters": [
                ["import-native", existing, new, f"{new}-2", "--operator", "a b/c"]
            ],
            "has no bucket 9": [["gc", root, "--dry-run", "--bucket", "9", "--checkpoint", existing]],
        }
        commands: list[tuple[list[str], dict[str, str]]] = [
            (words, {}) for group in refused.values() for words in group
        ]
        texts = [text for text, group in refused.items() for _ in group]
        # The last commands get as far as starting Spark, and end with one line of our own.
        show, log = ["show", root, "--checkpoint", existing], tmp_path / "spark.log"
        last = [(show, {}), (show, {"SPARK_STATE_EXT_SPARK_LOG": str(log)}), (show, {"JAVA_HOME": str(tmp_path)})]
        first = f"import os, sys\nos.environ['JAVA_HOME'] = {str(java.parent.parent)!r}\n"
        results = list(_run_each([*commands, *last], f"{first}from spark_state_ext.__main__ import main"))
        for (words, code, err), text in zip(results, texts, strict=False):
            is_right = text in err or (SPARK_VERSION < (4, 0) and re.search("use (Py)?Spark 4", err) is not None)
            assert (code, is_right) == (2, True), (words, err)
            assert "Traceback" not in err
        if SPARK_VERSION < (4, 0):
            return  # Spark 3 has no state reader, so the last commands end before Spark starts
        lines = [line for _, code, line in results[len(texts) :] if (code, line.count("\n")) == (3, 1)]
        assert len(lines) == len(last)
        failed = r"spark-state-ext show: StorageError: Spark does not start: .*\(this is no Java\)\. Set"
        assert re.match(failed, lines[0])
        assert "a trace of a JVM" in log.read_text()
        assert "EnvironmentSetupError: Spark needs Java: JAVA_HOME is" in lines[2]


# Terminal control sequences, rich markup, a line break, and a byte that is not UTF-8.
_HOSTILE = "a\x1b[31m\x9b2J[red]\nb\u202e\udcff"
_ESCAPED = r"a\x1b[31m\x9b2J[red]\nb\u202e\udcff"


def test_file_names_are_escaped_in_every_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with small_root(tmp_path) as small:
        folder = small.root.rename(tmp_path / _HOSTILE[:-1])
        bucket = folder / "counts" / QUERY / "0"
        (bucket / _HOSTILE).write_text("not our file")
        (folder / "counts" / _HOSTILE).mkdir()
        picture, page, file = (str(tmp_path / name) for name in ("tree.svg", "page.html", "rows.arrow"))
        odd, root = str(bucket / _HOSTILE), str(folder)
        commands = [
            (["verify", root], _ESCAPED),
            (["verify", odd], _ESCAPED),
            (["verify", str(folder / "counts" / _HOSTILE)], _ESCAPED),
            (["gc", root, "--dry-run"], _ESCAPED),
            (["why", odd], _ESCAPED),
            (["show", root], _ESCAPED[:-6]),
            (["show", f"{root}\udcff"], rf"{_ESCAPED}' cannot be opened: its name is not UTF-8"),
            (["show", root, "--operator", _HOSTILE], _ESCAPED),
            (["show", root, "--at", _HOSTILE[:-1]], ""),
            (["show", root, _HOSTILE[:-1]], r"\x1b[31m"),
            (["log", root], _ESCAPED[:-6]),
            (["lineage", root, "--bucket", "0", "--to", picture], ""),
            (["report", root, "--out", page], ""),
            (["export", root, file], ""),
            (["erase", "scan", root, "ann", "0"], _ESCAPED[:-6]),
            (["savepoint", "status", root], _ESCAPED[:-6]),
            (["abandoned", root, "-c", root], _ESCAPED[:-6]),
            (["doctor", root, "--all"], _ESCAPED[:-6]),
            (["get", f"{root}/nothing", "x"], _ESCAPED[:-6]),
        ]
        for words, text in commands:
            for form in [[], ["-o", "json"], ["-o", "jsonl"]] if words[0] in ("verify", "gc", "show", "why") else [[]]:
                code = main([*words, *form])
                output = capsys.readouterr()
                assert code != 70, output.err
                printed = output.out + output.err
                bad = [character for character in printed if not character.isprintable() and character != "\n"]
                assert bad == [], (words, bad)
                assert text in printed or form, (words, printed)
        html = Path(page).read_text()
        assert _ESCAPED[:-6] in html
        assert all(character.isprintable() or character == "\n" for character in html)
        assert main(["verify", root, "-o", "json"]) == 0
        assert [row["path"] for row in json.loads(capsys.readouterr().out)] == [
            odd.encode("utf-8", "backslashreplace").decode(),
        ]


def test_table_headings_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    """Headings are names of the user's columns."""
    write_table(pa.table({"a\x1b[31m": [1], ":smile: [bold]b[/bold]": ["\x9b2J"]}), Output.TABLE)
    assert capsys.readouterr().out.splitlines() == [r"a\x1b[31m  :smile: [bold]b[/bold]", r"        1  \x9b2J"]
    write_table(pa.table({"a": ["\x9b2J \u202e \U000e0001"]}), Output.JSONL)
    assert capsys.readouterr().out == r'{"a": "\u009b2J \u202e \udb40\udc01"}' + "\n"


def test_options_with_secrets_can_be_given_in_a_file_or_a_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They may be in a file or an environment variable; the error about a missing class shows which one was used."""

    def run_show(*words: str, code: int = 2) -> str:
        assert main(["show", "/somewhere", *words]) == code
        return capsys.readouterr().err

    def encode_options(name: str) -> str:
        return json.dumps({"implementation": f"{name}.Secret"})

    file = tmp_path / "options.json"
    file.write_text(encode_options("file"))
    from_file = ["--storage-options-file", str(file)]
    assert "No module named 'file'" in run_show(*from_file)
    monkeypatch.setenv("SPARK_STATE_EXT_STORAGE_OPTIONS", encode_options("variable"))
    assert "No module named 'variable'" in run_show()
    assert "No module named 'line'" in run_show("--storage-options", encode_options("line"))
    assert "No module named 'file'" in run_show(*from_file)
    both = run_show(*from_file, "--storage-options", encode_options("line"))
    assert "give --storage-options-file or --storage-options, not both" in both
    for text in ("[7, 'Secret']", '{"key": "Secret"', '["Secret"]'):
        file.write_text(text)
        monkeypatch.setenv("SPARK_STATE_EXT_STORAGE_OPTIONS", text)
        for error in (run_show(*from_file), run_show()):
            assert "it is not JSON" in error or "it is not a JSON object" in error
            assert "Secret" not in error
    monkeypatch.delenv("SPARK_STATE_EXT_STORAGE_OPTIONS")
    assert "cannot be read: " in run_show("--storage-options-file", str(tmp_path / "nothing"))
    # The options of the command's target have their own variable.
    monkeypatch.setenv("SPARK_STATE_EXT_TO_OPTIONS", encode_options("target"))
    there = savepoint_at(tmp_path / "savepoint").root
    assert main(["savepoint", "copy", there, str(tmp_path / "copy")]) == 2
    assert "No module named 'target'" in capsys.readouterr().err


def test_check_works_without_the_extra_and_other_commands_name_it() -> None:
    done = _run_process("check", code=_WITHOUT_TYPER)
    assert "this machine can run it" in done.stdout, done.stderr
    assert done.returncode == 0
    done = _run_process("savepoint", "status", "/nowhere", code=_WITHOUT_TYPER)
    assert done.returncode == 3
    assert done.stderr.startswith(
        "spark-state-ext: EnvironmentSetupError: this command needs typer and rich, which this Python"
    )
    assert "pip install 'spark_state_ext[cli]'" in done.stderr
    assert not done.stdout


def test_the_metrics_command_needs_neither_spark_nor_pandas(tmp_path: Path) -> None:
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
    done = _run_process("metrics", str(tmp_path), code=code)
    assert (done.returncode, done.stderr) == (0, "[]\n")


def test_a_command_imports_only_its_own_modules() -> None:
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
        assert _run_process(*words, "--help", code=code).stderr.split() == sorted([*always, *more]), words


def test_shell_completion_knows_commands_and_options(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The test uses Typer's protocol, like the completion script for bash."""
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


def test_the_program_is_installed_with_its_name_and_extras() -> None:
    import configparser

    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    scripts = parser["options.entry_points"]["console_scripts"]
    assert scripts.split() == [app.PROGRAM, "=", "spark_state_ext.__main__:main"]
    extras = parser["options.extras_require"]
    for line in [*extras["cli"].split(), *extras["report"].split()]:
        assert line in extras["test"].split(), "tests need this package"
