"""Check the corners of the supported versions, each in a separate environment.

A corner is a combination of versions that is tested. ``matrix.json`` in this folder lists the corners; the tables in
``docs/matrix.md`` are made from it and from the results.
"""

from __future__ import annotations

import argparse
import datetime
import json
import operator
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bootstrap

CORNERS = Path(__file__).with_name("matrix.json")
DOCUMENT = bootstrap.ROOT / "docs" / "matrix.md"
PACKAGES = ("pyspark", "pandas", "pyarrow", "numpy", "lmdb", "fsspec")
VERSIONS_PROBE = f"import importlib.metadata as m; print(*[m.version(n) for n in {PACKAGES!r}])"


@dataclass(frozen=True)
class Corner:
    """A combination of versions to test: an entry of ``matrix.json``."""

    name: str
    about: str
    python: list[str]
    requirements: list[str]
    leave_out: str
    because: str


_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)(?:\[[^\]]*\])?(.*)")
_OPERATORS = {
    "==": operator.eq,
    ">=": operator.ge,
    "<=": operator.le,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
}


@dataclass(frozen=True)
class Result:
    """The result of checking a corner."""

    corner: Corner
    python: str
    versions: dict[str, str]
    java: str
    outcome: str
    passed: bool

    def contradictions(self) -> list[str]:
        """Return a line for each requirement that the tested versions do not meet; only for packages in the table."""
        found = []
        for requirement in self.corner.requirements:
            name, wanted = parsed(requirement)
            version = self.versions.get(name)
            if version is not None and not all(holds(version, one) for one in wanted):
                found.append(f"{self.corner.name} asks for {requirement} and ran with {name} {version}")
        return found


def parsed(requirement: str) -> tuple[str, list[str]]:
    """Return the name and the conditions of a requirement: ``lmdb>=2,<3`` has two conditions.

    This does not use the package ``packaging``, because the Python that runs this script may not have it.
    """
    match = _REQUIREMENT.fullmatch(requirement.replace(" ", ""))
    if match is None:
        raise SystemExit(f"{CORNERS.name} has a requirement that this script cannot read: {requirement!r}")
    return match[1], [one for one in match[2].split(",") if one]


def holds(version: str, condition: str) -> bool:
    """Return whether a version meets a condition; only the numbers at the beginning of the version count."""
    match = re.fullmatch(r"(==|>=|<=|!=|>|<)(\d+(?:\.\d+)*)", condition)
    if match is None:
        raise SystemExit(
            f"{CORNERS.name} has a condition that this script cannot read: {condition!r}; write it like >=2.1"
        )
    actual, required = parse_numbers(version), parse_numbers(match[2])
    # The shorter one is filled with zeros, because 3 is the same version as 3.0.0.
    length = max(len(actual), len(required))
    actual, required = ([*parts, *[0] * (length - len(parts))] for parts in (actual, required))
    return bool(_OPERATORS[match[1]](actual, required))


def parse_numbers(version: str) -> list[int]:
    """Return the numbers at the beginning of a version."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return [int(number) for number in match[0].split(".")] if match else []


def corners() -> list[Corner]:
    """Read all corners from ``matrix.json``."""
    entries: list[dict[str, Any]] = json.loads(CORNERS.read_text())
    return [Corner(**entry) for entry in entries]


def find_python(corner: Corner) -> str | None:
    """Return an interpreter of the first of a corner's Python versions that this machine has; None if it has none."""
    found = bootstrap.interpreters()
    for wanted in corner.python:
        major, minor = wanted.split(".")
        path = found.get((int(major), int(minor)))
        if path:
            return path
    return None


def check(corner: Corner, folder: Path, tests: list[str]) -> Result:
    """Create the environment of a corner and run the tests in it."""
    python = find_python(corner)
    if python is None:
        outcome = f"no Python {' or '.join(corner.python)} on this machine"
        return Result(corner, "-", {}, "-", outcome, passed=False)
    venv, log = folder / corner.name, folder / f"{corner.name}.log"
    venv.mkdir(parents=True, exist_ok=True)
    try:
        bootstrap.bootstrap(venv, {"test"}, corner.requirements, python)
    except bootstrap.BootstrapError as error:
        return Result(corner, python, {}, "-", f"set-up failed: {error}", passed=False)
    venv_python = str(venv / "bin" / "python")
    installed = (bootstrap.ask([venv_python, "-c", VERSIONS_PROBE]) or "").split()
    if len(installed) != len(PACKAGES):
        return Result(corner, python, {}, "-", "a package is missing after set-up", passed=False)
    versions = dict(zip(PACKAGES, installed, strict=True))
    version = bootstrap.ask([venv_python, "-c", "import platform; print(platform.python_version())"]) or "?"

    marks = "not slow" + (f" and not {corner.leave_out}" if corner.leave_out else "")
    command = [
        "python",
        "scripts/run_tests.py",
        "-n",
        "2",
        "--dist",
        "loadgroup",
        "--max-worker-restart=0",
        *(tests or ["-m", marks]),
    ]
    print(f"Running {' '.join(command)}, output in {log}", flush=True)
    started_s = time.monotonic()
    with log.open("wb") as output:
        shell = ["sh", "-c", '. "$0" && exec "$@"', str(venv / "env.sh"), *command]
        completed = subprocess.run(shell, cwd=bootstrap.ROOT, stdout=output, stderr=subprocess.STDOUT, check=False)
    lines = log.read_text(errors="replace").strip().splitlines() or ["no output"]
    # The last line is not the summary, because `run_tests.py` prints the costs after pytest's summary.
    summaries = [line for line in lines if re.search(r"\d+ (passed|failed|error|skipped|deselected)", line)]
    summary = re.sub(r"^=+ | in [\d.]+s.*$", "", (summaries or lines)[-1])
    if completed.returncode != 0:
        print("\n".join(lines[-40:]), file=sys.stderr)
        summary = f"exit code {completed.returncode}: {summary}"
    java = bootstrap.ask(["sh", "-c", f'. "{venv}/env.sh" && "$JAVA_HOME/bin/java" -version']) or ""
    found = re.search(r'version "([^"]+)"', java)
    return Result(
        corner,
        version.strip(),
        versions,
        found[1] if found else "?",
        f"{summary} ({time.monotonic() - started_s:.0f} s)",
        completed.returncode == 0,
    )


def table(rows: list[list[str]]) -> str:
    """Return rows, of which the first is the heading, as a Markdown table with aligned columns."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    rows = [rows[0], ["-" * width for width in widths], *rows[1:]]
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    )


def corner_table() -> str:
    """Return the table of the corners in Markdown."""
    rows = [["corner", "Python", "requirements", "left out"]]
    for corner in corners():
        wanted = "; ".join(f"`{text}`" for text in corner.requirements)
        left_out = f"`{corner.leave_out}`: {corner.because}" if corner.leave_out else "nothing"
        rows.append([f"{corner.name}, {corner.about}", " or ".join(corner.python), wanted, left_out])
    return table(rows)


def result_table(results: list[Result]) -> str:
    """Return the table of the results in Markdown."""
    rows = [["corner", "Python", "Java", *PACKAGES, "result"]]
    for result in results:
        versions = [result.versions.get(name, "-") for name in PACKAGES]
        rows.append([result.corner.name, result.python, result.java, *versions, result.outcome])
    return table(rows)


def replace_section(text: str, name: str, content: str) -> str:
    """Return a document in which the content between the two comments of a section is replaced."""
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->"
    before, found, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise SystemExit(f"{DOCUMENT} has no section {name}: add the two comments that mark it")
    return f"{before}{begin}{content}\n{end}{after}"


def main() -> int:
    """Check all corners, or those that the command line names; return 1 if one of them failed."""
    names = [corner.name for corner in corners()]
    parser = argparse.ArgumentParser(description="Check the corners of the supported versions.")
    parser.add_argument("--corner", choices=names, action="append", help="check only this corner; may be repeated")
    parser.add_argument(
        "--folder", type=Path, default=bootstrap.ROOT / ".matrix", help="folder for the environments and the logs"
    )
    parser.add_argument("--write", action="store_true", help="write the tables into docs/matrix.md")
    parser.add_argument(
        "--tests",
        nargs=argparse.REMAINDER,
        default=[],
        help="arguments for pytest, instead of -m 'not slow'; must be the last option",
    )
    options = parser.parse_args()
    results = [
        check(corner, options.folder.absolute(), options.tests)
        for corner in corners()
        if not options.corner or corner.name in options.corner
    ]
    print("\n" + result_table(results))
    if options.write:
        if options.corner or options.tests:
            raise SystemExit("--write needs all corners and the usual tests: leave out --corner and --tests")
        mismatches = [line for result in results for line in result.contradictions()]
        if mismatches:
            raise SystemExit(
                "\n".join(
                    ["nothing is written, because these tests did not run with the required versions:", *mismatches]
                )
            )
        text = replace_section(DOCUMENT.read_text(), "corners", corner_table())
        today = datetime.datetime.now(tz=datetime.timezone.utc).date().isoformat()
        text = replace_section(text, "results", f"Of {today}:\n\n{result_table(results)}")
        DOCUMENT.write_text(text)
    failed = [result.corner.name for result in results if not result.passed]
    if failed:
        print(f"\nfailed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
