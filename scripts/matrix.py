"""Check the corners of the supported versions, each in an environment of its own.

The corners are in ``matrix.json`` beside this file, which the tables in ``docs/matrix.md`` are made from too.
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
    """One combination of versions; an entry of ``matrix.json``."""

    name: str
    about: str
    python: list[str]
    requirements: list[str]
    leave_out: str
    because: str


_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)(?:\[[^\]]*\])?(.*)")
_COMPARED = {
    "==": operator.eq,
    ">=": operator.ge,
    "<=": operator.le,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
}


@dataclass(frozen=True)
class Result:
    """What became of a corner."""

    corner: Corner
    python: str
    versions: dict[str, str]
    java: str
    outcome: str
    passed: bool

    def contradictions(self) -> list[str]:
        """Return what was asked for and is not what the tests ran with; of packages that are in the table."""
        found = []
        for requirement in self.corner.requirements:
            name, wanted = parsed(requirement)
            version = self.versions.get(name)
            if version is not None and not all(holds(version, one) for one in wanted):
                found.append(f"{self.corner.name} asks for {requirement} and ran with {name} {version}")
        return found


def parsed(requirement: str) -> tuple[str, list[str]]:
    """Return a requirement's name and its conditions: ``lmdb>=2,<3`` has two. (A plain Python may lack packaging.)"""
    match = _REQUIREMENT.fullmatch(requirement.replace(" ", ""))
    if match is None:
        raise SystemExit(f"{CORNERS.name} has a requirement that cannot be read: {requirement!r}")
    return match[1], [one for one in match[2].split(",") if one]


def holds(version: str, condition: str) -> bool:
    """Return whether a version is as a condition asks, by the numbers that both begin with."""
    match = re.fullmatch(r"(==|>=|<=|!=|>|<)(\d+(?:\.\d+)*)", condition)
    if match is None:
        raise SystemExit(f"{CORNERS.name} has a condition that cannot be read: {condition!r}")
    have, asked = numbers(version), numbers(match[2])
    # 3 is 3.0.0.
    length = max(len(have), len(asked))
    have, asked = ([*of, *[0] * (length - len(of))] for of in (have, asked))
    return bool(_COMPARED[match[1]](have, asked))


def numbers(version: str) -> list[int]:
    """Return the numbers that a version begins with."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return [int(number) for number in match[0].split(".")] if match else []


def corners() -> list[Corner]:
    """Return all corners."""
    entries: list[dict[str, Any]] = json.loads(CORNERS.read_text())
    return [Corner(**entry) for entry in entries]


def find_python(corner: Corner) -> str | None:
    """Return an interpreter for a corner, the first choice first."""
    found = bootstrap.interpreters()
    for wanted in corner.python:
        major, minor = wanted.split(".")
        path = found.get((int(major), int(minor)))
        if path:
            return path
    return None


def check(corner: Corner, folder: Path, tests: list[str]) -> Result:
    """Install a corner and run the tests in it."""
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
    inside = str(venv / "bin" / "python")
    installed = (bootstrap.ask([inside, "-c", VERSIONS_PROBE]) or "").split()
    if len(installed) != len(PACKAGES):
        return Result(corner, python, {}, "-", "a package is missing after set-up", passed=False)
    versions = dict(zip(PACKAGES, installed, strict=True))
    version = bootstrap.ask([inside, "-c", "import platform; print(platform.python_version())"]) or "?"

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
    began = time.monotonic()
    with log.open("wb") as output:
        shell = ["sh", "-c", '. "$0" && exec "$@"', str(venv / "env.sh"), *command]
        done = subprocess.run(shell, cwd=bootstrap.ROOT, stdout=output, stderr=subprocess.STDOUT, check=False)
    lines = log.read_text(errors="replace").strip().splitlines() or ["no output"]
    # pytest says how many tests passed, and the runner then what they cost.
    summaries = [line for line in lines if re.search(r"\d+ (passed|failed|error|skipped|deselected)", line)]
    summary = re.sub(r"^=+ | in [\d.]+s.*$", "", (summaries or lines)[-1])
    if done.returncode != 0:
        print("\n".join(lines[-40:]), file=sys.stderr)
        summary = f"exit code {done.returncode}: {summary}"
    java = bootstrap.ask(["sh", "-c", f'. "{venv}/env.sh" && "$JAVA_HOME/bin/java" -version']) or ""
    found = re.search(r'version "([^"]+)"', java)
    return Result(
        corner,
        version.strip(),
        versions,
        found[1] if found else "?",
        f"{summary} ({time.monotonic() - began:.0f} s)",
        done.returncode == 0,
    )


def table(rows: list[list[str]]) -> str:
    """Return rows, the first of them the heading, as a Markdown table that is also plain to read."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    rows = [rows[0], ["-" * width for width in widths], *rows[1:]]
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    )


def corner_table() -> str:
    """Return what the corners are."""
    rows = [["corner", "Python", "requirements", "left out"]]
    for corner in corners():
        wanted = "; ".join(f"`{text}`" for text in corner.requirements)
        left_out = f"`{corner.leave_out}`: {corner.because}" if corner.leave_out else "nothing"
        rows.append([f"{corner.name}, {corner.about}", " or ".join(corner.python), wanted, left_out])
    return table(rows)


def result_table(results: list[Result]) -> str:
    """Return what became of the corners."""
    rows = [["corner", "Python", "Java", *PACKAGES, "result"]]
    for result in results:
        versions = [result.versions.get(name, "-") for name in PACKAGES]
        rows.append([result.corner.name, result.python, result.java, *versions, result.outcome])
    return table(rows)


def replace_section(text: str, name: str, content: str) -> str:
    """Return a document with new content between the two comments that mark a section."""
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->"
    before, found, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise SystemExit(f"{DOCUMENT} has no section {name}")
    return f"{before}{begin}{content}\n{end}{after}"


def main() -> int:
    """Run from the command line."""
    names = [corner.name for corner in corners()]
    parser = argparse.ArgumentParser(description="Check the corners of the supported versions.")
    parser.add_argument("--corner", choices=names, action="append", help="only this one; may be repeated")
    parser.add_argument("--folder", type=Path, default=bootstrap.ROOT / ".matrix", help="for the environments")
    parser.add_argument("--write", action="store_true", help="write the tables into docs/matrix.md")
    parser.add_argument(
        "--tests",
        nargs=argparse.REMAINDER,
        default=[],
        help="everything after this goes to pytest, instead of -m 'not slow'",
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
            raise SystemExit("--write needs all corners and the usual tests")
        wrong = [line for result in results for line in result.contradictions()]
        if wrong:
            raise SystemExit("\n".join(["nothing is written, as results are not of what was asked for:", *wrong]))
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
