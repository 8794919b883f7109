"""Two states of the library on the same benchmarks, in turns: ``python -m benchmarks paired BASE``.

Each state is taken out of git into a folder of its own; the benchmarks are those of the working tree, for both. With
``--own-benchmarks`` each side runs its commit's own: `store` and `restore` import what may have another name in the
other commit. Whoever uses it has to see to it that both measure the same. A pair is one run with each, one right after
the other, and who goes first alternates. So what a machine does over an hour weighs on both alike, and a pair's ratio
is of two runs that are minutes apart.
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
    """What of a benchmark is compared: what it measures of other systems is the same on both sides, or is left out."""

    arguments: tuple[str, ...]
    """Of its command line."""

    timings: re.Pattern[str]
    """Labels of the timings that count."""


# Seconds a batch; other timings are of parts of one, or of the processor.
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
    """Define the command line."""
    parser.add_argument("base", metavar="BASE", help="the commit to compare with")
    parser.add_argument("--head", default="HEAD", metavar="COMMIT", help="the commit that is measured")
    parser.add_argument("--of", nargs="+", choices=sorted(OURS), default=list(OURS), help="which benchmarks")
    parser.add_argument("--own-benchmarks", action="store_true", help="each side runs its commit's own benchmarks")
    parser.add_argument("--pairs", type=int, default=5, metavar="N", help="pairs of each")


def run(options: argparse.Namespace, work: Path) -> Report:
    """Run it.

    Raises
    ------
    BenchmarkError
        When a run fails, or git does not know a commit.
    """
    if options.pairs < 1:
        raise BenchmarkError("--pairs must be at least 1")
    sides = {"base": _commit(options.base), "head": _commit(options.head)}
    report = Report("paired", {**sides, "pairs": options.pairs, "own_benchmarks": options.own_benchmarks})
    trees = {side: _tree(commit, work / side, options.own_benchmarks) for side, commit in sides.items()}
    for name in options.of:
        seen: dict[str, list[Mapping[str, Sequence[float]]]] = {side: [] for side in sides}
        for pair in range(options.pairs):
            # Who goes first alternates.
            for side in list(sides) if pair % 2 == 0 else list(reversed(sides)):
                seen[side].append(_measured(name, trees[side], work / f"{name}-{side}-{pair}"))
            now = ratios([seen["base"][-1]], [seen["head"][-1]])
            shown = ", ".join(f"{label} {values[0]:.3f}" for label, values in now.items())
            print(f"{name}, pair {pair}: {shown}", file=sys.stderr, flush=True)
        for side, runs in seen.items():
            for label in runs[0]:
                medians = [statistics.median(one[label]) for one in runs]
                report.timing(f"{name}, {side}: {label}", medians)
        found = ratios(seen["base"], seen["head"])
        report.details[name] = found
        for label, values in found.items():
            report.bar(f"{name}: {label}, head to base", statistics.median(values), "at most", SLOWER_AT_MOST)
    return report


def ratios(
    base: Sequence[Mapping[str, Sequence[float]]], head: Sequence[Mapping[str, Sequence[float]]]
) -> dict[str, list[float]]:
    """Of each pair, the median of one side's batches to that of the other's.

    Parameters
    ----------
    base, head
        Of each run, seconds of its batches by what was measured; as many runs on both sides.

    Returns
    -------
    dict
        By what was measured: a ratio for each pair, above one where `head` is slower.
    """
    return {
        label: [statistics.median(b[label]) / statistics.median(a[label]) for a, b in zip(base, head, strict=True)]
        for label in base[0]
    }


def _commit(name: str) -> str:
    found = subprocess.run(["git", "-C", str(_HERE), "rev-parse", "--short=12", name], capture_output=True, text=True)
    if found.returncode:
        raise BenchmarkError(f"git knows no commit {name!r}: {found.stderr.strip()}")
    return found.stdout.strip()


def _tree(commit: str, folder: Path, own_benchmarks: bool) -> Path:
    """The packages of a commit, with the benchmarks of the working tree or its own."""
    packages = (*_PACKAGES, "benchmarks") if own_benchmarks else _PACKAGES
    packed = subprocess.run(
        ["git", "-C", str(_HERE.parent), "archive", commit, *packages], capture_output=True, check=True
    ).stdout
    folder.mkdir()
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(folder, filter="data")
    if not own_benchmarks:
        shutil.copytree(_HERE, folder / "benchmarks", ignore=shutil.ignore_patterns("__pycache__", "results"))
    return folder


def _measured(name: str, tree: Path, results: Path) -> dict[str, list[float]]:
    """Run a benchmark with a tree's library; seconds of its batches, by what was measured."""
    command = [sys.executable, "-m", "benchmarks", name, *OURS[name].arguments, "--results", str(results)]
    # The tree's packages go before an installed one.
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):
        raise BenchmarkError(f"{name} failed in {tree}: {done.stderr[-2000:]}")
    (path,) = results.glob("*.json")
    found: dict[str, Any] = json.loads(path.read_text())
    if not found["checks"]:
        raise BenchmarkError(f"{name} compared no answers in {tree}")
    return {label: values for label, values in found["timings_s"].items() if OURS[name].timings.fullmatch(label)}
