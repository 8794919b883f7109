"""What a benchmark leaves behind: a result file with every raw number, and a table to read.

Times on a busy machine mean little by themselves, so a result holds ratios between things measured in the same run,
and the machine's load before and after.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import os
import platform
import re
import shutil
import statistics
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

__all__ = [
    "RESULT_FORMAT",
    "RESULTS",
    "Bar",
    "BenchmarkError",
    "Report",
    "commit",
    "java_version",
    "machine",
    "place",
    "versions",
]

RESULT_FORMAT = 1
RESULTS = Path(__file__).parent / "results"
_PACKAGES = ("pyspark", "pandas", "numpy", "pyarrow", "lmdb")


class BenchmarkError(Exception):
    """A benchmark could not be carried out, or its answers are wrong."""


@dataclass(frozen=True)
class Bar:
    """A number that is promised.

    Parameters
    ----------
    name
        What is measured.
    value
        What was measured.
    sense
        Whether `limit` is the most or the least that is allowed.
    limit
        The promise.
    unit
        Unit of both numbers; may be empty.
    """

    name: str
    value: float
    sense: Literal["at most", "at least"]
    limit: float
    unit: str = ""

    @property
    def met(self) -> bool:
        """Whether the promise is kept; never when the value is not a number."""
        if math.isnan(self.value):
            return False
        return self.value <= self.limit if self.sense == "at most" else self.value >= self.limit


@dataclass
class Report:
    """Collects a benchmark's numbers.

    Parameters
    ----------
    name
        Name of the benchmark and of its result file.
    parameters
        What it was run with.
    """

    name: str
    parameters: dict[str, Any]
    started: str = field(default_factory=lambda: _now())
    load_before: tuple[float, ...] = field(default_factory=os.getloadavg)
    timings: dict[str, list[float]] = field(default_factory=dict)
    ratios: dict[str, float] = field(default_factory=dict)
    bars: list[Bar] = field(default_factory=list)
    checks: list[str] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)

    def timing(self, name: str, seconds: Iterable[float]) -> float:
        """Note raw times in seconds; returns their median."""
        values = [float(value) for value in seconds]
        if not values:
            raise BenchmarkError(f"no measurement of {name!r}")
        self.timings[name] = values
        return statistics.median(values)

    def ratio(self, name: str, value: float) -> float:
        """Note a ratio; returns it."""
        self.ratios[name] = value
        return value

    def bar(self, name: str, value: float, sense: Literal["at most", "at least"], limit: float, unit: str = "") -> Bar:
        """Note a promise and what was measured."""
        bar = Bar(name, value, sense, limit, unit)
        self.bars.append(bar)
        return bar

    def check(self, what: str, passed: bool) -> None:
        """Note that answers were compared.

        Raises
        ------
        BenchmarkError
            When they differ: then the times mean nothing.
        """
        if not passed:
            raise BenchmarkError(f"{self.name}: not so: {what}")
        self.checks.append(what)

    @property
    def met(self) -> bool:
        """Whether there are promises and all are kept."""
        return bool(self.bars) and all(bar.met for bar in self.bars)

    def to_plain(self) -> dict[str, Any]:
        """All of it as JSON values, with the machine and the versions."""
        return {
            "format": RESULT_FORMAT,
            "name": self.name,
            "started": self.started,
            **place(),
            "load_average": {"before": list(self.load_before), "after": list(os.getloadavg())},
            "parameters": self.parameters,
            "timings_s": self.timings,
            "medians_s": {name: statistics.median(values) for name, values in self.timings.items()},
            "ratios": self.ratios,
            "bars": [{**dataclasses.asdict(bar), "met": bar.met} for bar in self.bars],
            "met": self.met,
            "checks": self.checks,
            "details": self.details,
        }

    def write(self, folder: Path = RESULTS) -> Path:
        """Write ``<folder>/<name>.json``; returns its path."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.name}.json"
        # allow_nan=False: a result file is JSON for any reader, and NaN is not.
        path.write_text(json.dumps(self.to_plain(), indent=2, allow_nan=False) + "\n")
        return path

    def table(self) -> str:
        """The result as text."""
        lines = [f"{self.name}: {', '.join(f'{key} {value}' for key, value in self.parameters.items())}", ""]
        rows = [
            [name, _seconds(statistics.median(v)), _seconds(min(v)), _seconds(max(v)), str(len(v))]
            for name, v in self.timings.items()
        ]
        lines += [*_columns(["time", "median", "least", "most", "n"], rows), ""]
        if self.ratios:
            lines += [*_columns(["ratio", "value"], [[n, f"{v:.2f}"] for n, v in self.ratios.items()]), ""]
        lines += [f"checked: {what}" for what in self.checks]
        load = os.getloadavg()[0]
        lines += [f"load average {self.load_before[0]:.1f} before, {load:.1f} after, {os.cpu_count()} cores", ""]
        bars = [
            [bar.name, _number(bar.value, bar.unit), f"{bar.sense} {_number(bar.limit, bar.unit)}", _verdict(bar)]
            for bar in self.bars
        ]
        lines += _columns(["bar", "measured", "promised", ""], bars)
        return "\n".join(lines)


def place() -> dict[str, Any]:
    """When, of what and where something was measured."""
    return {"finished": _now(), "commit": commit(), "machine": machine(), "versions": versions()}


def machine() -> dict[str, Any]:
    """Processor, cores and memory."""
    return {
        "cpu": _first_match("/proc/cpuinfo", r"model name\s*:\s*(.+)") or platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
    }


def versions() -> dict[str, str | None]:
    """Versions of what takes part; None for what is not there."""
    # Read from the source: a checkout that was never installed has no metadata.
    from spark_state_ext.version import __version__

    found: dict[str, str | None] = {"spark_state_ext": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    found["java"] = java_version()
    return found


def commit() -> str | None:
    """Commit of the code that is measured, with a ``+`` where files differ from it; None outside of a clone."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        found = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True)
        # Results of the benchmarks before it are no code.
        code = [":/", ":(exclude,top)benchmarks/results", ":(exclude,top)docs"]
        changed = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", *code], check=False).returncode
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.strip() + ("+" if changed else "")


def java_version() -> str | None:
    """First line of what the Java that Spark would start says of itself; None without Java."""
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home) / "bin" / "java") if home else shutil.which("java")
    if java is None or not Path(java).exists():
        return None
    told = subprocess.run([java, "-version"], capture_output=True, text=True, check=True)
    lines = [line for line in (told.stderr + told.stdout).splitlines() if " version " in line]
    return lines[0] if lines else None


def _first_match(path: str, pattern: str) -> str | None:
    try:
        found = re.search(pattern, Path(path).read_text())
    except OSError:
        return None
    return found[1].strip() if found else None


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def _seconds(value: float) -> str:
    return f"{value * 1000:.1f} ms" if value < 1 else f"{value:.2f} s"


def _number(value: float, unit: str) -> str:
    return f"{value:.3g} {unit}".rstrip() if value < 1000 else f"{value:,.0f} {unit}".rstrip()


def _verdict(bar: Bar) -> str:
    return "met" if bar.met else "NOT MET"


def _columns(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Left-aligned first column, right-aligned others."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    lines = []
    for row in (header, ["-" * width for width in widths], *rows):
        first, *others = (
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        lines.append("  ".join([first, *others]).rstrip())
    return lines
