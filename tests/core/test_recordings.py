"""Each recording in `docs/recordings` matches the output of its commands on a small root that is always the same.

``SPARK_STATE_EXT_RECORD=1`` writes the recordings again; review the changes before you commit them. Numbers with four
or more digits are file sizes, which depend on PyArrow's version. They are not compared, nor is their width in a table.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from small_root import BEGUN_S, QUERY, dated, savepoint_of, small_root

from spark_state_ext.__main__ import main
from spark_state_ext.cli.app import COMMANDS, SAVEPOINT_COMMANDS
from spark_state_ext.worker.metrics import CallMetrics, MetricsLog

ROOT = Path(__file__).parent.parent.parent
RECORDINGS = ROOT / "docs" / "recordings"
_RECORD = os.environ.get("SPARK_STATE_EXT_RECORD", "") not in ("", "0")
_FOLDER = f"state/counts/{QUERY}"
_FIRST = f"{_FOLDER}/0"
# ``FIRST`` is the oldest delta file of bucket 0, whose name has a random id.
_LINES: dict[str, list[str]] = {
    "show": ["show state", "show savepoint -o json"],
    "get": [
        "get state ann 0",
        "get state ann 0 --at 3 -o json",
        """get state --json '{"name": "eve", "x": 2.0}' -o jsonl""",
        "get state nobody 1.5",
        "get state ann",
    ],
    "scan": [
        "scan state",
        "scan state --columns name,count --filter \"count > 60 and name != 'eve'\" -o jsonl",
        "scan state --limit 2 --at 3",
        "scan state --filter 'total > 1'",
    ],
    "diff": [
        "diff state",
        "diff state --columns count --limit 2",
        "diff state --at 3 --other-at 4",
        "diff state savepoint --at 6 -o jsonl",
        "diff state --at 6",
    ],
    "verify": ["verify state", "verify damaged", "verify metrics"],
    "gc": ["gc old --dry-run --retained 2 --bucket 0", f"gc {_FOLDER}"],
    "why": [
        "why FIRST --retained 2",
        f"why {_FOLDER}/operator_0.json",
        "why savepoint/savepoint.arrow",
    ],
    "lineage": ["lineage state --bucket 0", f"lineage {_FOLDER} --bucket 1 --to tree.svg"],
    "log": ["log state", f"log {_FOLDER} --bucket 0 --files"],
    "export": ["export state rows.parquet", "export state rows.parquet"],
    "abandoned": ["abandoned STATE --checkpoint CHECKPOINT", "abandoned STATE -c NOWHERE"],
    "rollback": [
        "rollback checkpoint --to-batch 1",
        "rollback checkpoint --to-batch 1 --apply",
        "rollback state --to-batch 1",
    ],
    "metrics": ["metrics metrics", "metrics uneven --calls", "metrics metrics -o jsonl"],
    "skew": ["skew metrics", "skew uneven --cores 2", "skew uneven --batches 1 -o jsonl", "skew state"],
    "recommend": [
        "recommend --keys 50000000 --bytes-per-key 200 --batch-interval-s 10 --cores 8",
        "recommend --keys 1000 --bytes-per-key 20 --batch-interval-s 0.1 --cores 16 -o json",
        "recommend --keys 1000 --bytes-per-key 20 --batch-interval-s 0 --cores 16",
    ],
    "report": ["report metrics --out report.html", "report STATE", "report STATE --metrics checkpoint"],
    "standby": [
        "standby settings state --replicas 2",
        "standby status state",
        "standby status state --replicas -o jsonl",
        "standby status state --safe-to-remove host",
        "standby status checkpoint",
    ],
    "erase": [
        "erase scan STATE ann 0 bob",
        "erase keys STATE nobody 1",
        "erase keys STATE ann 0 bob 0.5",
        "erase withdraw STATE 1",
        "erase history STATE ann 0",
        "erase history STATE ann 0 --yes",
    ],
    "rescale": [
        "rescale savepoint more --buckets 5",
        "scan more",
        "rescale more split --split 1=2 -o jsonl",
        "rescale split more --buckets 3",
        "rescale savepoint other --buckets 2",
    ],
    "savepoint": [
        "savepoint status savepoint",
        "savepoint verify savepoint",
        "savepoint copy savepoint copy",
        "savepoint transform savepoint other --rename count=total --drop note --retype count=double --keep 'count > 60'",
        "scan other",
        "savepoint claim copy --by 'Ann of payments'",
        "savepoint copy copy again",
        "savepoint release copy",
        "savepoint delete copy",
        "savepoint delete copy --root STATE",
    ],
}
# Their output depends on the machine, or they need Spark.
_NOT_RECORDED = {"check", "doctor", "import-native", "export-native"}
_NOT_RECORDED_OF_SAVEPOINTS = {"create"}


def test_each_command_is_recorded() -> None:
    assert _LINES.keys() | _NOT_RECORDED == COMMANDS.keys()
    assert sorted(path.stem for path in RECORDINGS.glob("*.txt")) == sorted(_LINES)
    lines = "\n".join(_LINES["savepoint"])
    assert {n for n in SAVEPOINT_COMMANDS if f"savepoint {n} " not in lines} == _NOT_RECORDED_OF_SAVEPOINTS
    page = (ROOT / "docs" / "operating" / "commands.md").read_text()
    assert [name for name in _LINES if f"../recordings/{name}.txt" not in page] == []


@pytest.fixture
def work_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with everything that the command lines name."""
    with small_root(tmp_path / "made") as root, small_root(tmp_path / "made-old", batches=31) as old:
        work = tmp_path / "work"
        work.mkdir()
        root.root.rename(work / "state")
        root.job.folder = root.job.folder.__class__(str(work / "state")).child("counts", QUERY)
        old.root.rename(work / "old")
        savepoint_of(root.job, work / "savepoint")
        (work / "damaged").mkdir()
        savepoint_of(root.job, work / "damaged")
        (damaged, *_) = sorted((work / "damaged" / "counts" / "0").iterdir(), key=get_version)
        data = damaged.read_bytes()
        # Write a new file: the query has a hard link to the old one.
        damaged.unlink()
        damaged.write_bytes(data[:-1])
        write_spark_checkpoint(work / "checkpoint")
        log = MetricsLog(work / "metrics")
        for bucket in range(2):
            log.add(CallMetrics(QUERY, "run", 7, "counts", bucket, ended_ms=BEGUN_S * 1000, rows=3, keys=2))
        log.flush()
        write_uneven_metrics(MetricsLog(work / "uneven"))
        monkeypatch.chdir(work)
        yield work


def write_uneven_metrics(log: MetricsLog) -> None:
    """Write metrics of four buckets: one has many rows of many keys, one many rows of one key."""
    rows, of_one_key = (100, 900, 110, 800), (4, 5, 4, 720)
    for batch in range(3):
        for bucket in range(4):
            ended_ms = (BEGUN_S + 10 * batch) * 1000
            call = CallMetrics(QUERY, "run", batch, "counts", bucket, ended_ms=ended_ms, job_buckets=4)
            call.rows, call.key_rows_max, call.total_ms = rows[bucket], of_one_key[bucket], 5.0 + bucket
            call.changed_rows, call.state_rows, call.state_bytes = 60, 300, 9_000
            log.add(call)
    log.flush()


def get_version(path: Path) -> int:
    return int(path.name.partition("_")[0])


def write_spark_checkpoint(folder: Path) -> None:
    """Write a checkpoint folder like Spark's after three batches."""
    files = {"metadata": json.dumps({"id": QUERY})}
    for batch in range(3):
        files |= {f"offsets/{batch}": "v1\n{}", f"commits/{batch}": 'v1\n{"nextBatchWatermarkMs":0}'}
        files |= {f"state/0/{partition}/{batch + 1}.delta": "rows" for partition in range(2)}
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    dated(folder)


def record_command(line: str, work: Path) -> str:
    """Run a command line, and return it with its output, and with its exit code if that is not 0."""
    (first, *_) = sorted((work / _FIRST).glob("*.delta.arrow"), key=get_version)
    paths = {
        "FIRST": str(first.relative_to(work)),
        "CHECKPOINT": str(work / "checkpoint"),
        "STATE": str(work / "state"),
    }
    paths["NOWHERE"] = str(work / "nowhere")
    words = [paths.get(word, word) for word in shlex.split(line)]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(words)
    assert code not in (70,), err.getvalue()
    output = "".join(f"{text}\n" for text in (out.getvalue() + err.getvalue()).splitlines())
    shown = re.sub("|".join(paths), lambda match: paths[match[0]], line)
    text = f"$ spark-state-ext {shown}\n{output}" + (f"(exit code {code})\n" if code else "")
    # The time at which files were moved aside.
    return re.sub(r"\d{8}T\d{6}Z", "20240201T120000Z", text.replace(f"{work}/", "/"))


def remove_sizes(text: str) -> str:
    return re.sub(r" {2,}", "  ", re.sub(r"\d{4,}", "N", text))


@pytest.mark.parametrize("name", _LINES)
def test_a_recording_matches_the_output_of_its_commands(name: str, work_folder: Path) -> None:
    text = "\n".join(record_command(line, work_folder) for line in _LINES[name])
    path = RECORDINGS / f"{name}.txt"
    if _RECORD:
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert remove_sizes(path.read_text()) == remove_sizes(text)
