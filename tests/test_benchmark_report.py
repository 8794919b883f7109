from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd
import pytest

from benchmarks import counting, paired, report
from benchmarks.__main__ import main
from benchmarks.entry_store import VALUE, EntryStore
from benchmarks.floor import Floor
from benchmarks.report import Bar, BenchmarkError, Report

# Benchmarks and the demo are not part of the package, so the suite leaves their tests to `make soak`.
pytestmark = pytest.mark.soak


def make_report() -> Report:
    report_made = Report("sample", {"rows": 10, "seed": 7})
    report_made.timing("ours: get", [0.030, 0.010, 0.020])
    report_made.timing("theirs: get", [0.2])
    report_made.ratio("theirs / ours", 10.0)
    return report_made


@pytest.mark.parametrize(
    ("value", "sense", "limit", "met"),
    [
        (1.0, "at most", 1.0, True),
        (1.1, "at most", 1.0, False),
        (3.5, "at least", 3.5, True),
        (3.4, "at least", 3.5, False),
        (math.nan, "at most", 1.0, False),
        (math.nan, "at least", 1.0, False),
    ],
)
def test_a_bar_is_met_within_its_limit(
    value: float, sense: Literal["at most", "at least"], limit: float, met: bool
) -> None:
    assert Bar("bar", value, sense, limit).met is met


def test_a_report_is_met_only_if_it_has_bars_and_all_are_met() -> None:
    new_report = make_report()
    met = [new_report.met]
    new_report.bar("get", 20.0, "at most", 25.0, "ms")
    met.append(new_report.met)
    new_report.bar("speed", 3.0, "at least", 3.5, "times")
    met.append(new_report.met)
    assert met == [False, True, False]


def test_the_result_file_has_all_that_was_reported(tmp_path: Path) -> None:
    new_report = make_report()
    new_report.bar("get", 20.0, "at most", 25.0, "ms")
    new_report.check("both gave the same", True)
    path = new_report.write(tmp_path / "results")
    assert path == tmp_path / "results" / "sample.json"
    result = json.loads(path.read_text())
    assert result["format"] == report.RESULT_FORMAT
    assert result["parameters"] == {"rows": 10, "seed": 7}
    assert result["timings_s"] == {"ours: get": [0.030, 0.010, 0.020], "theirs: get": [0.2]}
    assert result["medians_s"]["ours: get"] == 0.020
    assert result["ratios"] == {"theirs / ours": 10.0}
    assert result["bars"] == [
        {"name": "get", "value": 20.0, "sense": "at most", "limit": 25.0, "unit": "ms", "met": True}
    ]
    assert result["met"] is True
    assert result["checks"] == ["both gave the same"]
    assert result["started"] <= result["finished"]
    assert result["machine"]["cores"] >= 1
    assert result["machine"]["memory_bytes"] > 1 << 20
    assert len(result["load_average"]["before"]) == 3
    assert set(result["versions"]) == {
        "spark_state_ext",
        "python",
        "pyspark",
        "pandas",
        "numpy",
        "pyarrow",
        "lmdb",
        "java",
    }
    assert result["versions"]["pandas"] == pd.__version__


def test_a_report_with_nan_is_not_written(tmp_path: Path) -> None:
    new_report = make_report()
    new_report.ratio("nothing", math.nan)
    with pytest.raises(ValueError, match="Out of range"):
        new_report.write(tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_table_has_timings_ratios_and_verdicts() -> None:
    new_report = make_report()
    new_report.bar("get", 20.0, "at most", 25.0, "ms")
    new_report.bar("speed", 3.0, "at least", 3.5, "times")
    lines = new_report.table().splitlines()
    assert next(line for line in lines if line.startswith("ours: get")).split()[2:4] == ["20.0", "ms"]
    assert any(line.startswith("theirs / ours") and line.endswith("10.00") for line in lines)
    verdicts = [line for line in lines if line.endswith(("met", "NOT MET"))]
    assert [line.split("  ")[-1].strip() for line in verdicts] == ["met", "NOT MET"]


def test_a_failed_check_stops_a_benchmark() -> None:
    with pytest.raises(BenchmarkError, match="both gave the same"):
        make_report().check("both gave the same", False)


def test_the_floor_gives_the_right_answer() -> None:
    batches = counting.event_batches(2, 300, 100, seed=3)
    keys = pd.concat(batches)["key"].to_numpy(dtype=np.int64)
    with Floor(2, keys) as floor:
        for events in batches:
            floor.next_batch(events)
            # Repeating a measurement must not count a batch twice.
            times = [floor.measure(), floor.measure()]
        answer = floor.answer()
    pd.testing.assert_frame_equal(answer, counting.expected(batches), check_exact=True)
    assert all(time.wall_s > 0 and time.cpu_s > 0 for time in times)


def test_the_entry_store_returns_loaded_and_updated_entries(tmp_path: Path) -> None:
    values = np.zeros(4, dtype=VALUE)
    values["n"] = [1, 2, 3, 256]
    values["timeout_ms"] = [0, 2**40, 7, 0]
    store = EntryStore(tmp_path / "entries", 1 << 20)
    keys = np.array([1, 2, 256, 2**63], dtype=np.uint64)
    store.load(keys, values)
    values[1:3]["total"] = [0.5, -1.5]
    store.put(keys[1:3], values[1:3])
    assert store.get(keys).tolist() == values.tolist()
    store.close()


def test_the_store_benchmark_runs_with_small_sizes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--rows", "2000", "--batch", "100", "--repeats", "2", "--loads", "2", "--growth-batches", "6"]
    # The bars are meaningless for so little data; an exit code of 2 would mean that the benchmark failed.
    assert main(["store", *sizes, "--results", str(tmp_path), "--work-dir", str(tmp_path / "work")]) in (0, 1)
    assert "get, 10 runs" in capsys.readouterr().out
    result = json.loads((tmp_path / "store.json").read_text())
    assert result["parameters"]["rows"] == 2000
    assert len(result["checks"]) == 4
    assert {bar["name"] for bar in result["bars"]} == {
        "load", "get, 1 run", "put", "get, 10 runs", "mean batch, 10 times the state"
    }  # fmt: skip
    assert not list((tmp_path / "work").iterdir())


def test_the_ratio_of_each_pair_is_computed_separately() -> None:
    base = [{"a: batch": [1.0, 2.0, 3.0]}, {"a: batch": [20.0]}]
    head = [{"a: batch": [3.0, 3.0, 1.0]}, {"a: batch": [10.0]}]
    assert paired.ratios(base, head) == {"a: batch": [1.5, 0.5]}


def test_paired_benchmarks_accept_their_arguments() -> None:
    for name, ours in paired.OURS.items():
        # An exit code of 2 would mean wrong arguments. `--help` ends the command before the benchmark runs.
        with pytest.raises(SystemExit) as exit_:
            main([name, *ours.arguments, "--help"])
        assert exit_.value.code == 0


@pytest.mark.parametrize("name", sorted(paired.OURS))
def test_the_timings_that_are_paired_exist_and_none_is_of_a_part(name: str) -> None:
    labels = [
        label
        for label in json.loads((report.RESULTS / f"{name}.json").read_text())["timings_s"]
        if paired.OURS[name].timings.fullmatch(label)
    ]
    assert labels
    assert not [label for label in labels if label.startswith(("function alone", "one entry")) or ", get" in label[-6:]]


def test_an_unknown_commit_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["paired", "no-such-commit", "--results", str(tmp_path)]) == 2
    assert "git knows no commit 'no-such-commit'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["--help"], ["keyed_count", "--help"], ["store", "--help"], ["big_bucket", "--help"]]
)
def test_the_help_shows_the_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 0
    assert "usage: python -m benchmarks" in capsys.readouterr().out


def test_impossible_arguments_are_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["store", "--rows", "10", "--batch", "11", "--results", str(tmp_path)]) == 2
    assert "--batch must not exceed --rows" in capsys.readouterr().err
