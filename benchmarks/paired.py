"""Two commits of the library on the same benchmarks, alternating: ``python -m benchmarks paired BASE``.

Each side, base and head, is one commit, which git exports into a separate folder. Both sides run the benchmarks of the
working tree. With ``--own-benchmarks`` each side runs the benchmarks of its own commit instead, because `store` and
`restore` import internal names that the other commit may not have; then the user must make sure that both measure the
same.

A pair is one run of each side, one right after the other; the sides take turns in going first. The two runs of a
pair's ratio are therefore only minutes apart, and slow changes of the machine's speed affect both sides alike.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.report import BenchmarkError, Report

__all__ = ["OURS", "Ours", "SLOWER_AT_MOST", "add_arguments", "ratios", "run"]


class Ours(NamedTuple):
    """The part of a benchmark that is compared.

    What it measures of other systems does not depend on the commit, so it is left out.
    """

    arguments: tuple[str, ...]
    """Arguments of the benchmark's command line."""

    timings: re.Pattern[str]
    """Pattern of the names of the timings that are compared."""


# Seconds of whole batches. Other timings are of parts of a batch, or are processor time.
_BATCHES = re.compile(r"(?!function alone).*: batch")
OURS: dict[str, Ours] = {
    "keyed_count": Ours(("--only", "ours"), _BATCHES),
    "vectorised": Ours(("--ours", "--small-batches", "10", "--batches", "5"), _BATCHES),
    "store": Ours(("--growth-batches", "15"), re.compile(r"sorted runs: (load|get,|put|batch at [\d,]+ rows$).*")),
    "restore": Ours(("--restarts", "1"), re.compile(r".*: restore")),
    "async_commit": Ours(("--ours", "--batches", "9"), _BATCHES),
    "reading": Ours(("--repeats", "9"), re.compile(r"(the command )?get, a process.*|.*: scan.*")),
    "savepoint": Ours(("--repeats", "5"), re.compile(r".*: (our own work|all of it.*)")),
    "rescale": Ours(("--gb", "0.05", "0.1"), re.compile(r".*, (rescaled|as it is): to the first committed batch")),
}
SLOWER_AT_MOST = 1.05
_PACKAGES = ("spark_state_ext", "arrow_schemas")
_HERE = Path(__file__).resolve().parent


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the command-line options."""
    parser.add_argument("base", metavar="BASE", help="the commit to compare with")
    parser.add_argument("--head", default="HEAD", metavar="COMMIT", help="the commit to measure")
    parser.add_argument("--of", nargs="+", choices=sorted(OURS), default=list(OURS), help="the benchmarks to run")
    parser.add_argument("--own-benchmarks", action="store_true", help="run the benchmarks of each side's own commit")
    parser.add_argument("--pairs", type=int, default=5, metavar="N", help="number of pairs for each benchmark")


def run(options: argparse.Namespace, work: Path) -> Report:
    """Run the pairs and report their times and ratios.

    Raises
    ------
    BenchmarkError
        If a run fails, or git does not know a commit.
    """
    if options.pairs < 1:
        raise BenchmarkError("--pairs must be at least 1")
    sides = {"base": _resolve_commit(options.base), "head": _resolve_commit(options.head)}
    report = Report("paired", {**sides, "pairs": options.pairs, "own_benchmarks": options.own_benchmarks})
    trees = {side: _export_tree(commit, work / side, options.own_benchmarks) for side, commit in sides.items()}
    for name in options.of:
        measured: dict[str, list[Mapping[str, Sequence[float]]]] = {side: [] for side in sides}
        for pair in range(options.pairs):
            # The sides alternate in going first.
            for side in list(sides) if pair % 2 == 0 else list(reversed(sides)):
                measured[side].append(_measure(name, trees[side], work / f"{name}-{side}-{pair}"))
            latest = ratios([measured["base"][-1]], [measured["head"][-1]])
            shown = ", ".join(f"{label} {values[0]:.3f}" for label, values in latest.items())
            print(f"{name}, pair {pair}: {shown}", file=sys.stderr, flush=True)
        for side, runs in measured.items():
            for label in runs[0]:
                medians = [statistics.median(times[label]) for times in runs]
                report.timing(f"{name}, {side}: {label}", medians)
        result = ratios(measured["base"], measured["head"])
        report.details[name] = result
        for label, values in result.items():
            report.bar(f"{name}: {label}, head to base", statistics.median(values), "at most", SLOWER_AT_MOST)
    return report


def ratios(
    base: Sequence[Mapping[str, Sequence[float]]], head: Sequence[Mapping[str, Sequence[float]]]
) -> dict[str, list[float]]:
    """Return each pair's ratio: the median of head's batches divided by the median of base's.

    Parameters
    ----------
    base, head
        For each run, the seconds of its batches by timing name; both sides have equally many runs.

    Returns
    -------
    dict
        By timing name: a ratio for each pair, above 1 if `head` is slower.
    """
    return {
        label: [statistics.median(b[label]) / statistics.median(a[label]) for a, b in zip(base, head, strict=True)]
        for label in base[0]
    }


def _resolve_commit(name: str) -> str:
    result = subprocess.run(["git", "-C", str(_HERE), "rev-parse", "--short=12", name], capture_output=True, text=True)
    if result.returncode:
        raise BenchmarkError(f"git knows no commit {name!r}: {result.stderr.strip()}")
    return result.stdout.strip()


def _export_tree(commit: str, folder: Path, own_benchmarks: bool) -> Path:
    """Export a commit's packages, with its own benchmarks or those of the working tree; return the folder."""
    packages = (*_PACKAGES, "benchmarks") if own_benchmarks else _PACKAGES
    archive_bytes = subprocess.run(
        ["git", "-C", str(_HERE.parent), "archive", commit, *packages], capture_output=True, check=True
    ).stdout
    folder.mkdir()
    with tarfile.open(fileobj=io.BytesIO(archive_bytes)) as archive:
        archive.extractall(folder, filter="data")
    if not own_benchmarks:
        shutil.copytree(_HERE, folder / "benchmarks", ignore=shutil.ignore_patterns("__pycache__", "results"))
    return folder


def _measure(name: str, tree: Path, results: Path) -> dict[str, list[float]]:
    """Run a benchmark with a tree's library; return the seconds of its batches by timing name."""
    command = [sys.executable, "-m", "benchmarks", name, *OURS[name].arguments, "--results", str(results)]
    # The tree's packages must hide an installed one.
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):
        raise BenchmarkError(f"{name} failed in {tree}: {done.stderr[-2000:]}")
    (path,) = results.glob("*.json")
    result: dict[str, Any] = json.loads(path.read_text())
    if not result["checks"]:
        raise BenchmarkError(f"{name} checked no answers in {tree}")
    return {label: values for label, values in result["timings_s"].items() if OURS[name].timings.fullmatch(label)}
