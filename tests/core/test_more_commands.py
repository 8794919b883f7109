"""Commands for functions of the Python API: erase, report, metrics and doctor."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from small_root import NAMES, QUERY, SmallRoot, small_root

from arrow_schemas.erase import EraseDone
from spark_state_ext.__main__ import main
from spark_state_ext.cli.configuration import WORKER_PACKAGES, diagnose_executors, extract_reason
from spark_state_ext.files.erase_requests import EraseFolder
from spark_state_ext.files.folder import Folder
from spark_state_ext.testing.model import Row
from spark_state_ext.worker.metrics import CallMetrics, MetricsLog
from tests.helpers.waiting import WAIT_S

ROOT = Path(__file__).parent.parent.parent


def run(capsys: pytest.CaptureFixture[str], *words: object, code: int = 0) -> list[dict[str, Any]]:
    """Run a command and return the rows that it prints."""
    assert main([*map(str, words), "-o", "jsonl"]) == code
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


# -- erase ------------------------------------------------------------------------------------------


@pytest.fixture
def small(tmp_path: Path) -> Iterator[SmallRoot]:
    with small_root(tmp_path) as root:
        yield root


def test_erase_keys_adds_a_request_and_erase_status_shows_its_state(
    small: SmallRoot, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(small.root)
    assert run(capsys, "erase", "status", ".") == []
    assert run(capsys, "erase", "status", small.root) == []
    words = ["erase", "keys", small.root, "ann", "0", "bob", "0.5", "--json", '{"name": null, "x": 2}']
    assert main([*map(str, words), "-o", "jsonl"]) == 0
    out, err = capsys.readouterr()
    asked = json.loads(out)
    assert "a query with erase_requests=True erases the keys" in err
    assert asked == {"operator": "counts", "query_folder": QUERY, "number": 1, "keys": 3}
    requests = EraseFolder(Folder(str(small.query_folder)))
    request = requests.request(1)
    assert request.keys.to_pydict() == {"name": ["ann", "bob", None], "x": [0.0, 0.5, 2.0]}
    (status,) = run(capsys, "erase", "status", small.root, "--operator", "counts", code=1)
    assert (status["state"], status["keys"], status["done"], status["kept"]) == ("waiting", 3, None, True)
    requests.note_done(1, EraseDone(request.id, 3, 1, 1_706_788_800_000, heartbeat=9, batch=7))
    (status,) = run(capsys, "erase", "status", small.root)
    assert (status["state"], status["done"], status["batch"]) == ("done", "2024-02-01T12:00:00+00:00", 7)


def test_erase_withdraw_empties_a_request(small: SmallRoot, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["erase", "keys", str(small.root), "ann", "0"]) == 0
    assert main(["erase", "withdraw", str(small.root), "2"]) == 2
    assert "has no erase request 2 to withdraw" in capsys.readouterr().err
    (request,) = (small.query_folder / "erase").iterdir()
    request.write_bytes(b"damaged")
    (status,) = run(capsys, "erase", "status", small.root)
    assert status["state"] == "unreadable"
    assert main(["erase", "withdraw", str(small.root), "1", "--operator", "counts"]) == 0
    assert capsys.readouterr().err == (
        "request 1 of operator counts is withdrawn: it is empty now, and is done after the next batches\n"
    )
    (status,) = run(capsys, "erase", "status", small.root, code=1)
    assert (status["state"], status["keys"]) == ("waiting", 0)
    assert main(["erase", "withdraw", str(small.root / "nothing"), "1"]) == 2


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "give a key, as words or with --json; its columns are name (string), x (double)"),
        (["ann"], "1 words are not a whole number of keys"),
        (["ann", "much"], "'much' is not a value of the column 'x'"),
        (["--json", "{}"], "the key must be a JSON object"),
        (["ann", "0", "--operator", "others"], "has no operator 'others'"),
        (["ann", "0", "--query-folder", "others"], "has no query folder 'others'"),
    ],
)
def test_erase_keys_refuses_invalid_keys_and_names(
    small: SmallRoot, words: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["erase", "keys", str(small.root), *words]) == 2
    assert text in capsys.readouterr().err
    assert not (small.query_folder / "erase").exists()


def test_erase_history_erases_a_key_only_with_yes(small: SmallRoot, capsys: pytest.CaptureFixture[str]) -> None:
    rows = run(capsys, "erase", "scan", small.root, "cid", "1", code=1)
    assert {row["verdict"] for row in rows} == {"found", "scanned", "out of reach"}
    history = ["erase", "history", str(small.root), "cid", "1", "--inline-batches", "0"]
    files = sorted(small.root.rglob("*.arrow"))
    before = [path.read_bytes() for path in files]
    assert main(history) == 2
    assert "look first with erase scan, then give --yes" in capsys.readouterr().err
    # Batch 5 has written the key again, so it is in the newest state.
    assert main([*history, "--yes"]) == 2
    assert "newest state" in capsys.readouterr().err
    assert [path.read_bytes() for path in files] == before
    # Later batches of the key's bucket prove that the batch which removed it is committed.
    others = {(name, 0.5 * at): Row(at) for at, name in enumerate(NAMES) if name != "cid"}
    for changes in ({**others, ("cid", 1.0): None}, others, others):
        small.job.batch(changes)
    rows = run(capsys, *history, "--yes")
    assert {row["verdict"] for row in rows} == {"scanned", "out of reach"}
    assert run(capsys, "erase", "scan", small.root, "cid", "1") == rows


def test_commands_work_in_a_separate_process(small: SmallRoot, tmp_path: Path) -> None:
    """They do not need pandas."""
    write_log(tmp_path / "metrics", 7)
    root = str(small.root)
    commands: list[tuple[list[str], int, str]] = [
        (["erase", "keys", root, "ann", "0"], 0, "erase status shows when it is done"),
        (["erase", "status", root], 1, "requests=1 waiting=1"),
        (["erase", "scan", root, "ann", "0"], 1, "operator=counts keys=1 by_rows_only=1"),
        (["erase", "history", root, "ann", "0", "--yes"], 2, "is not done: run the query"),
        (["report", root, "--metrics", str(tmp_path), "--out", str(tmp_path / "page.html")], 0, "page.html bytes="),
    ]
    code = """
import json, sys
from spark_state_ext.__main__ import main
for words in json.loads(sys.argv[1]):
    sys.argv = ["spark-state-ext", *words]
    print("exit code", main(), file=sys.stderr)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps([words for words, _, _ in commands])],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    outputs = done.stderr.split("exit code ")
    for at, (_, status, text) in enumerate(commands):
        assert text in outputs[at]
        assert outputs[at + 1].startswith(f"{status}\n")


# -- report -----------------------------------------------------------------------------------------


def test_report_writes_a_page(
    small: SmallRoot, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    page = tmp_path / "page.html"
    write_log(tmp_path / "metrics", 7)
    monkeypatch.chdir(small.root.parent)
    words = ["report", small.root.name, "--metrics", str(tmp_path / "metrics"), "--title", "Ours", "--out", str(page)]
    assert main(words) == 0
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", f"file={page} bytes={page.stat().st_size}\n")
    text = page.read_text()
    assert "<title>Ours</title>" in text
    assert QUERY in text
    assert main(["report", str(tmp_path / "scratch"), "--out", str(page)]) == 2
    assert "there is nothing to report in" in capsys.readouterr().err
    assert page.read_text() == text
    assert main(["report", str(small.root), "--out", str(tmp_path / "nowhere" / "page.html")]) == 3


def write_log(folder: Path, batch: int) -> None:
    log = MetricsLog(folder)
    log.add(CallMetrics(QUERY, "run", batch, "counts", 0, ended_ms=1_000 * batch, rows=3, job_buckets=1))
    log.flush()


# -- metrics ----------------------------------------------------------------------------------------


def test_metrics_watch_shows_new_calls(tmp_path: Path) -> None:
    """The command runs in a separate process while this one writes metrics."""
    write_log(tmp_path, 1)
    words = ["metrics", str(tmp_path), "--watch", "--every", "0.2", "--looks", "400"]
    watching = subprocess.Popen(
        [sys.executable, "-m", "spark_state_ext", *words],
        env={**os.environ, "PYTHONPATH": str(ROOT), "FORCE_COLOR": "1", "COLUMNS": "200"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    seen = b""
    try:
        assert watching.stdout is not None
        batch = 1
        while b" 77 " not in seen:
            line = watching.stdout.readline()
            assert line, "the command ended"
            seen += line
            if b"counts" in seen and batch == 1:
                batch = 77
                write_log(tmp_path / "below", batch)
        assert b"rows/s" in seen
        watching.send_signal(signal.SIGINT)
        _, err = watching.communicate(timeout=WAIT_S)
    finally:
        watching.kill()
        watching.wait()
    assert (watching.returncode, b"Traceback" in err) == (130, False), err


@pytest.mark.parametrize(
    "words", [["--every", "1"], ["--looks", "2"], ["--watch", "--calls"], ["--watch", "-o", "json"], ["--watch"]]
)
def test_metrics_watch_refuses_invalid_options(
    tmp_path: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    if words != ["--watch"]:
        write_log(tmp_path, 1)
    assert main(["metrics", str(tmp_path), *words]) == 2
    assert "UsageError: " in capsys.readouterr().err


# -- doctor -----------------------------------------------------------------------------------------

_HERE = {"spark_state_ext": "0.1.0", "python": "3.11.4", "pyarrow": "20.0.0"}
_GOOD = {"host": "one", "executable": "/python", **_HERE, **dict.fromkeys(WORKER_PACKAGES, "1.0")}


@pytest.mark.parametrize(
    ("other", "what", "problem", "change"),
    [
        ({"python": "3.11.9"}, "", "", ""),
        ({"spark_state_ext": None}, "executors: spark_state_ext", "missing on two", "Install it on each"),
        ({"lmdb": None}, "executors: lmdb", "missing on two", "Install it on each"),
        ({"spark_state_ext": "0.2.0"}, "executors: spark_state_ext", "executors have 0.2.0", "spark_state_ext 0.1.0"),
        ({"python": "3.12.4"}, "executors: python", "executors have 3.12.4", "to a Python 3.11 there"),
        ({"pyarrow": "16.1.0"}, "executors: pyarrow", "executors have 16.1.0 and", "Install pyarrow 20.0.0"),
        ({"fsspec": "2.0"}, "executors: fsspec", "executors differ", "one release of fsspec"),
    ],
)
def test_doctor_reports_executors_that_differ(other: dict[str, Any], what: str, problem: str, change: str) -> None:
    findings = diagnose_executors([_GOOD, {**_GOOD, "host": "two", **other}], _HERE)
    assert findings[0].seen == "2 asked: one (/python), two (/python)"
    assert [finding.what for finding in findings if finding.problem] == ([what] if what else [])
    for finding in findings:
        if finding.problem:
            assert problem in finding.problem
            assert change in finding.change
            assert "on one" in finding.seen


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("\n [X] it failed\n\tat org.apache\n", "[X] it failed"),
        ("An error occurred\nCaused by: one\n\tat x\nCaused by: java.io.IOException: error=2\n\t... 3", None),
        ("", "it does not say why"),
    ],
)
def test_the_reason_of_a_failure_is_its_last_cause(text: str, reason: str | None) -> None:
    assert extract_reason(text) == (reason or "java.io.IOException: error=2")
