"""All benchmarks in one command: what it runs, where results go, and its exit status."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import suite

_TINY = ("--rows", "2000", "--batch", "100", "--repeats", "2", "--loads", "1", "--growth-batches", "2")
# Every key in every batch: far above what the bars on 43,000 of a million keys allow.
_TOO_MUCH = ("--rows", "300000", "--batch", "300000", "--repeats", "1", "--loads", "1", "--growth-batches", "1")


def test_quick_results_and_charts_stay_in_their_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(suite, "QUICK", {"store": _TINY})
    monkeypatch.setenv("PYTHONPATH", str(Path(suite.__file__).parents[1]))
    monkeypatch.chdir(tmp_path)
    assert suite.run_all(["--quick"]) == 0
    result = json.loads((tmp_path / "benchmark-results" / "store.json").read_text())
    assert result["parameters"]["rows"] == 2000
    assert "promised for the sizes of --full" in capfd.readouterr().err


@pytest.mark.parametrize(("how", "status"), [("--quick", 0), ("--full", 1)])
def test_bars_count_at_full_size(how: str, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, how[2:].upper(), {"store": _TOO_MUCH})
    assert suite.run_all([how, "--results", str(tmp_path)]) == status
    assert not json.loads((tmp_path / "store.json").read_text())["met"]


@pytest.mark.parametrize("how", ["--quick", "--full"])
def test_one_that_fails_does_not_stop_the_others(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, how[2:].upper(), {"growth": ("--batches", "none"), "store": _TINY})
    assert suite.run_all([how, "--results", str(tmp_path)]) == 2
    assert (tmp_path / "store.json").exists()
