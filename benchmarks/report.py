"""The report of a benchmark: a result file with all raw numbers, and a table for people.

On a busy machine absolute times mean little. So a report also has ratios between measurements of the same run, and the
machine's load before and after the run.
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
    """A benchmark could not run, or its answers are wrong."""


@dataclass(frozen=True)
class Bar:
    """A measured number, with the limit that we promise for it.

    Parameters
    ----------
    name
        What is measured.
    value
        The measured number.
    sense
        Whether `limit` is the highest or the lowest allowed value.
    limit
        The promised limit.
    unit
        Unit of `value` and `limit`; may be empty.
    """

    name: str
    value: float
    sense: Literal["at most", "at least"]
    limit: float
    unit: str = ""

    @property
    def met(self) -> bool:
        """True if the value is within the limit; NaN never is."""
        if math.isnan(self.value):
            return False
        return self.value <= self.limit if self.sense == "at most" else self.value >= self.limit


@dataclass
class Report:
    """The numbers that a benchmark measured.

    Parameters
    ----------
    name
        Name of the benchmark and of its result file.
    parameters
        The options and sizes that it ran with.
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
        """Record raw times in seconds and return their median.

        Raises
        ------
        BenchmarkError
            If there are no times.
        """
        values = [float(value) for value in seconds]
        if not values:
            raise BenchmarkError(f"no measurement of {name!r}")
        self.timings[name] = values
        return statistics.median(values)

    def ratio(self, name: str, value: float) -> float:
        """Record a ratio and return it."""
        self.ratios[name] = value
        return value

    def bar(self, name: str, value: float, sense: Literal["at most", "at least"], limit: float, unit: str = "") -> Bar:
        """Record a measured number with the limit that we promise for it, and return the bar."""
        bar = Bar(name, value, sense, limit, unit)
        self.bars.append(bar)
        return bar

    def check(self, statement: str, passed: bool) -> None:
        """Record that a statement about the answers was checked.

        Raises
        ------
        BenchmarkError
            If the statement is false: the times of wrong answers mean nothing.
        """
        if not passed:
            raise BenchmarkError(f"{self.name}: not so: {statement}")
        self.checks.append(statement)

    @property
    def met(self) -> bool:
        """True if there are bars and all of them are met."""
        return bool(self.bars) and all(bar.met for bar in self.bars)

    def to_plain(self) -> dict[str, Any]:
        """Return the whole report as JSON values, with the machine and the versions."""
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
        """Write ``<folder>/<name>.json`` and return its path."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.name}.json"
        # Any JSON reader must be able to read a result file, and standard JSON has no NaN.
        path.write_text(json.dumps(self.to_plain(), indent=2, allow_nan=False) + "\n")
        return path

    def table(self) -> str:
        """Return the report as text."""
        lines = [f"{self.name}: {', '.join(f'{key} {value}' for key, value in self.parameters.items())}", ""]
        rows = [
            [name, _format_seconds(statistics.median(v)), _format_seconds(min(v)), _format_seconds(max(v)), str(len(v))]
            for name, v in self.timings.items()
        ]
        lines += [*_format_columns(["time", "median", "least", "most", "n"], rows), ""]
        if self.ratios:
            lines += [*_format_columns(["ratio", "value"], [[n, f"{v:.2f}"] for n, v in self.ratios.items()]), ""]
        lines += [f"checked: {statement}" for statement in self.checks]
        load = os.getloadavg()[0]
        lines += [f"load average {self.load_before[0]:.1f} before, {load:.1f} after, {os.cpu_count()} cores", ""]
        bars = [
            [
                bar.name,
                _format_number(bar.value, bar.unit),
                f"{bar.sense} {_format_number(bar.limit, bar.unit)}",
                _format_verdict(bar),
            ]
            for bar in self.bars
        ]
        lines += _format_columns(["bar", "measured", "promised", ""], bars)
        return "\n".join(lines)


def place() -> dict[str, Any]:
    """Return the current time, the commit, the machine and the versions, as in a result file."""
    return {"finished": _now(), "commit": commit(), "machine": machine(), "versions": versions()}


def machine() -> dict[str, Any]:
    """Return the processor, the number of cores, the memory and the operating system."""
    return {
        "cpu": _find_first("/proc/cpuinfo", r"model name\s*:\s*(.+)") or platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
    }


def versions() -> dict[str, str | None]:
    """Return the versions of this package, Python, Java and other packages; None for each that is not installed."""
    # Not from metadata, as for the other packages: a checkout that was never installed has none.
    from spark_state_ext.version import __version__

    result: dict[str, str | None] = {"spark_state_ext": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            result[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            result[package] = None
    result["java"] = java_version()
    return result


def commit() -> str | None:
    """Return the commit of the measured code, with a ``+`` if that code was changed since; None outside a clone."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        result = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True)
        # Results and documents are not code; benchmarks that ran before this one have changed the results.
        code = [":/", ":(exclude,top)benchmarks/results", ":(exclude,top)docs"]
        changed = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", *code], check=False).returncode
    except (OSError, subprocess.CalledProcessError):
        return None
    return result.stdout.strip() + ("+" if changed else "")


def java_version() -> str | None:
    """Return the version line of the Java that Spark would start; None if there is no Java."""
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home) / "bin" / "java") if home else shutil.which("java")
    if java is None or not Path(java).exists():
        return None
    output = subprocess.run([java, "-version"], capture_output=True, text=True, check=True)
    lines = [line for line in (output.stderr + output.stdout).splitlines() if " version " in line]
    return lines[0] if lines else None


def _find_first(path: str, pattern: str) -> str | None:
    try:
        result = re.search(pattern, Path(path).read_text())
    except OSError:
        return None
    return result[1].strip() if result else None


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def _format_seconds(value: float) -> str:
    return f"{value * 1000:.1f} ms" if value < 1 else f"{value:.2f} s"


def _format_number(value: float, unit: str) -> str:
    return f"{value:.3g} {unit}".rstrip() if value < 1000 else f"{value:,.0f} {unit}".rstrip()


def _format_verdict(bar: Bar) -> str:
    return "met" if bar.met else "NOT MET"


def _format_columns(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Format a table as lines: the first column is left-aligned, the others are right-aligned."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    lines = []
    for row in (header, ["-" * width for width in widths], *rows):
        first, *others = (
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        lines.append("  ".join([first, *others]).rstrip())
    return lines
