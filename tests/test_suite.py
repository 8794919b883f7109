"""The command that runs all benchmarks: its selection, the place of its results and its exit status."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import suite

# Benchmarks and the demo are not part of the package, so the suite leaves their tests to `make soak`.
pytestmark = pytest.mark.soak

_TINY = ("--rows", "2000", "--batch", "100", "--repeats", "2", "--loads", "1", "--growth-batches", "2")


def test_quick_results_are_written_to_their_own_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(suite, "QUICK", {"store": _TINY})
    monkeypatch.setenv("PYTHONPATH", str(Path(suite.__file__).parents[1]))
    monkeypatch.chdir(tmp_path)
    assert suite.run_all(["--quick"]) == 0
    result = json.loads((tmp_path / "benchmark-results" / "store.json").read_text())
    assert result["parameters"]["rows"] == 2000
    assert "promised for the sizes of --full" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("statuses", "quick", "full"),
    [([0, 0], 0, 0), ([0, 1, 0], 0, 1), ([1, 2, 0], 2, 2), ([-9, 1], 2, 2), ([137], 2, 2), ([], 0, 0)],
)
def test_the_exit_status_depends_on_bars_only_at_full_size(statuses: list[int], quick: int, full: int) -> None:
    assert (suite.exit_status(statuses, full=False), suite.exit_status(statuses, full=True)) == (quick, full)


@pytest.mark.parametrize("mode", ["--quick", "--full"])
def test_a_failed_benchmark_does_not_stop_the_others(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suite, mode[2:].upper(), {"growth": ("--sizes", "nonsense"), "store": _TINY})
    assert suite.run_all([mode, "--results", str(tmp_path)]) == 2
    assert (tmp_path / "store.json").exists()
