"""What operators are at, from one look at their metrics to the next."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pyarrow as pa
from rich.console import Console

from spark_state_ext.cli.metrics import LOOK, RATES, build_table, compute_rates, take_look, watch
from spark_state_ext.worker.metrics import CallMetrics, MetricsLog


def _log(folder: Path, *calls: CallMetrics) -> None:
    log = MetricsLog(folder)
    for call in calls:
        log.add(call)
    log.flush()


def _call(batch: int, bucket: int, operator: str = "counts", **values: Any) -> CallMetrics:
    return CallMetrics(
        "query", "run", batch, operator, bucket, ended_ms=1_000 * batch + bucket, **{"job_buckets": 2, **values}
    )


def test_a_look_sums_calls_and_takes_the_state_of_the_newest(tmp_path: Path) -> None:
    _log(
        tmp_path,
        _call(1, 0, rows=5, state_bytes=100, commit_ms=2.0, lease_age_ms=50),
        _call(1, 1, rows=7, state_bytes=10, commit_ms=4.0, lease_age_ms=9),
    )
    _log(tmp_path / "below", _call(2, 0, rows=1, state_bytes=300, oldest_inline_ms=3), _call(9, 4, "other", rows=2))
    found = take_look(tmp_path, now_ms=77)
    assert found.schema == LOOK
    counts, other = found.to_pylist()
    assert (counts["operator"], counts["batch"], counts["ended_ms"], counts["looked_ms"]) == ("counts", 2, 2_000, 77)
    assert (counts["calls"], counts["rows"], counts["commit_ms"]) == (3, 13, 6.0)
    # Bucket 1 was not called in batch 2; it still holds what it held.
    assert (counts["buckets"], counts["job_buckets"], counts["state_bytes"]) == (2, 2, 310)
    assert (counts["lease_age_ms"], counts["oldest_inline_ms"]) == (9, 3)
    assert (other["operator"], other["calls"], other["rows"]) == ("other", 1, 2)


def test_rates_are_of_what_came_between(tmp_path: Path) -> None:
    _log(tmp_path, _call(1, 0, rows=5, commit_ms=90.0, deleted_files=8))
    before = take_look(tmp_path, now_ms=10_000)
    more = [_call(2, bucket, rows=20, commit_ms=3.0, uploaded_bytes=50, state_bytes=4) for bucket in (0, 1)]
    _log(tmp_path / "below", *more, _call(1, 0, "new", rows=3))
    found = compute_rates(before, take_look(tmp_path, now_ms=14_000))
    assert found.schema == RATES
    counts, new = found.to_pylist()
    assert (counts["seconds"], counts["calls"], counts["rows"], counts["deleted_files"]) == (4.0, 2, 40, 0)
    assert (counts["calls_per_s"], counts["rows_per_s"], counts["uploaded_bytes_per_s"]) == (0.5, 10.0, 25.0)
    assert (counts["commit_ms_per_call"], counts["batch"], counts["state_bytes"]) == (3.0, 2, 8)
    # Nothing is known of the time before.
    assert (new["seconds"], new["rows"], new["rows_per_s"], new["commit_ms_per_call"]) == (None, None, None, None)


def test_nothing_is_made_up_where_nothing_can_be_told(tmp_path: Path) -> None:
    _log(tmp_path, _call(1, 0, rows=5))
    _log(tmp_path, _call(2, 0, rows=6))
    first = take_look(tmp_path, now_ms=1_000)
    (same,) = compute_rates(first, first).to_pylist()
    assert (same["rows"], same["seconds"], same["rows_per_s"], same["commit_ms_per_call"]) == (0, None, None, None)
    # An executor has removed its oldest file.
    min(tmp_path.glob("*.arrows"), key=lambda path: path.stat().st_mtime_ns).unlink()
    (fewer,) = compute_rates(first, take_look(tmp_path, now_ms=2_000)).to_pylist()
    assert (fewer["seconds"], fewer["calls"], fewer["rows"], fewer["rows_per_s"]) == (1.0, None, None, None)
    (idle,) = compute_rates(take_look(tmp_path, 2_000), take_look(tmp_path, 3_000)).to_pylist()
    assert (idle["rows_per_s"], idle["commit_ms_per_call"]) == (0.0, None)


def test_a_folder_without_metrics_is_an_empty_look(tmp_path: Path) -> None:
    empty = take_look(tmp_path, 1)
    assert (empty.schema, empty.num_rows) == (LOOK, 0)
    assert compute_rates(empty, empty) == pa.table({name: [] for name in RATES.names}, schema=RATES)
    _log(tmp_path, _call(1, 0))
    assert compute_rates(empty, take_look(tmp_path, 2)).num_rows == 1


def _printed(table: Any) -> str:
    console = Console(file=io.StringIO(), width=250)
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_terminal_shows_a_line_for_each_operator(tmp_path: Path) -> None:
    _log(tmp_path, _call(1, 0), _call(1, 0, "[red]bold[/red] [/]"))
    before = take_look(tmp_path, 0)
    _log(tmp_path, _call(2, 0, rows=250_000, commit_ms=1_500.0, state_bytes=3 << 20, upload_failures=2))
    text = _printed(build_table(compute_rates(before, take_look(tmp_path, 10_000))))
    marked, line = sorted(text.splitlines()[2:])
    for told in ("counts", "25.0k", "1.5 s", "3.0 MiB"):
        assert told in line
    assert line.rstrip().endswith("2")
    # An operator's name is not markup of the terminal's.
    assert marked.startswith("[red]bold[/red] [/]")
    assert "–" in marked


def test_watching_looks_again(tmp_path: Path) -> None:
    _log(tmp_path, _call(1, 0, rows=1))
    waits: list[float] = []

    def pause(seconds: float) -> None:
        waits.append(seconds)
        _log(tmp_path, _call(1 + len(waits), 0, state_rows=1_000 * len(waits)))

    console = Console(file=io.StringIO(), width=250, force_terminal=True)
    watch(tmp_path, every_s=1.5, looks=3, console=console, pause=pause)
    assert waits == [1.5, 1.5]
    assert isinstance(console.file, io.StringIO)
    assert "1,000" in console.file.getvalue()
    assert "2,000" in console.file.getvalue()
