"""The `top` command: totals of metrics at one look, and rates between two looks."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pyarrow as pa
from rich.console import Console

from spark_state_ext.cli.metrics import LOOK, RATES, build_table, compute_rates, take_look, watch
from spark_state_ext.worker.metrics import CallMetrics, MetricsLog


def write_calls(folder: Path, *calls: CallMetrics) -> None:
    log = MetricsLog(folder)
    for call in calls:
        log.add(call)
    log.flush()


def make_call(batch: int, bucket: int, operator: str = "counts", **values: Any) -> CallMetrics:
    return CallMetrics(
        "query", "run", batch, operator, bucket, ended_ms=1_000 * batch + bucket, **{"job_buckets": 2, **values}
    )


def test_a_look_sums_calls_and_uses_the_newest_state_of_each_bucket(tmp_path: Path) -> None:
    write_calls(
        tmp_path,
        make_call(1, 0, rows=5, state_bytes=100, commit_ms=2.0, lease_age_ms=50),
        make_call(1, 1, rows=7, state_bytes=10, commit_ms=4.0, lease_age_ms=9),
    )
    write_calls(
        tmp_path / "below",
        make_call(2, 0, rows=1, state_bytes=300, oldest_inline_ms=3),
        make_call(9, 4, "other", rows=2),
    )
    look = take_look(tmp_path, now_ms=77)
    assert look.schema == LOOK
    counts, other = look.to_pylist()
    assert (counts["operator"], counts["batch"], counts["ended_ms"], counts["looked_ms"]) == ("counts", 2, 2_000, 77)
    assert (counts["calls"], counts["rows"], counts["commit_ms"]) == (3, 13, 6.0)
    # Bucket 1 was not called in batch 2, so its state is that of batch 1.
    assert (counts["buckets"], counts["job_buckets"], counts["state_bytes"]) == (2, 2, 310)
    assert (counts["lease_age_ms"], counts["oldest_inline_ms"]) == (9, 3)
    assert (other["operator"], other["calls"], other["rows"]) == ("other", 1, 2)


def test_rates_are_computed_from_the_calls_between_two_looks(tmp_path: Path) -> None:
    write_calls(tmp_path, make_call(1, 0, rows=5, commit_ms=90.0, deleted_files=8))
    before = take_look(tmp_path, now_ms=10_000)
    more = [make_call(2, bucket, rows=20, commit_ms=3.0, uploaded_bytes=50, state_bytes=4) for bucket in (0, 1)]
    write_calls(tmp_path / "below", *more, make_call(1, 0, "new", rows=3))
    rates = compute_rates(before, take_look(tmp_path, now_ms=14_000))
    assert rates.schema == RATES
    counts, new = rates.to_pylist()
    assert (counts["seconds"], counts["calls"], counts["rows"], counts["deleted_files"]) == (4.0, 2, 40, 0)
    assert (counts["calls_per_s"], counts["rows_per_s"], counts["uploaded_bytes_per_s"]) == (0.5, 10.0, 25.0)
    assert (counts["commit_ms_per_call"], counts["batch"], counts["state_bytes"]) == (3.0, 2, 8)
    # The operator has no earlier look.
    assert (new["seconds"], new["rows"], new["rows_per_s"], new["commit_ms_per_call"]) == (None, None, None, None)


def test_rates_that_cannot_be_computed_are_null(tmp_path: Path) -> None:
    write_calls(tmp_path, make_call(1, 0, rows=5))
    write_calls(tmp_path, make_call(2, 0, rows=6))
    first = take_look(tmp_path, now_ms=1_000)
    (same,) = compute_rates(first, first).to_pylist()
    assert (same["rows"], same["seconds"], same["rows_per_s"], same["commit_ms_per_call"]) == (0, None, None, None)
    # An executor has removed its oldest file.
    min(tmp_path.glob("*.arrows"), key=lambda path: path.stat().st_mtime_ns).unlink()
    (fewer,) = compute_rates(first, take_look(tmp_path, now_ms=2_000)).to_pylist()
    assert (fewer["seconds"], fewer["calls"], fewer["rows"], fewer["rows_per_s"]) == (1.0, None, None, None)
    (idle,) = compute_rates(take_look(tmp_path, 2_000), take_look(tmp_path, 3_000)).to_pylist()
    assert (idle["rows_per_s"], idle["commit_ms_per_call"]) == (0.0, None)


def test_a_look_at_a_folder_without_metrics_is_empty(tmp_path: Path) -> None:
    empty = take_look(tmp_path, 1)
    assert (empty.schema, empty.num_rows) == (LOOK, 0)
    assert compute_rates(empty, empty) == pa.table({name: [] for name in RATES.names}, schema=RATES)
    write_calls(tmp_path, make_call(1, 0))
    assert compute_rates(empty, take_look(tmp_path, 2)).num_rows == 1


def print_table(table: Any) -> str:
    console = Console(file=io.StringIO(), width=250)
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_table_has_a_line_for_each_operator(tmp_path: Path) -> None:
    write_calls(tmp_path, make_call(1, 0), make_call(1, 0, "[red]bold[/red] [/]"))
    before = take_look(tmp_path, 0)
    write_calls(tmp_path, make_call(2, 0, rows=250_000, commit_ms=1_500.0, state_bytes=3 << 20, upload_failures=2))
    text = print_table(build_table(compute_rates(before, take_look(tmp_path, 10_000))))
    marked, line = sorted(text.splitlines()[2:])
    for value in ("counts", "25.0k", "1.5 s", "3.0 MiB"):
        assert value in line
    assert line.rstrip().endswith("2")
    # The name of an operator is not interpreted as markup.
    assert marked.startswith("[red]bold[/red] [/]")
    assert "–" in marked


def test_watch_looks_again_after_each_pause(tmp_path: Path) -> None:
    write_calls(tmp_path, make_call(1, 0, rows=1))
    waits: list[float] = []

    def pause(seconds: float) -> None:
        waits.append(seconds)
        write_calls(tmp_path, make_call(1 + len(waits), 0, state_rows=1_000 * len(waits)))

    console = Console(file=io.StringIO(), width=250, force_terminal=True)
    watch(tmp_path, every_s=1.5, looks=3, console=console, pause=pause)
    assert waits == [1.5, 1.5]
    assert isinstance(console.file, io.StringIO)
    assert "1,000" in console.file.getvalue()
    assert "2,000" in console.file.getvalue()
