"""What executors have: asked by a small job of Spark, and compared with what is here."""

from __future__ import annotations

import platform
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import metadata
from typing import TYPE_CHECKING, Any

from spark_state_ext.cli.settings import Diagnosis
from spark_state_ext.version import version_and_build

if TYPE_CHECKING:
    import pandas as pd
    from pyspark.sql import SparkSession

__all__ = ["NEEDED", "asked", "diagnoses_of_executors", "diagnoses_of_spark", "reason_in", "versions_here"]

_PACKAGE, _PYTHON, _PYARROW = "spark_state_ext", "python", "pyarrow"
# What a worker imports; none of them has to be what the client has, but for PyArrow, which reads what the other writes.
NEEDED = ("pandas", "numpy", "lmdb", "fsspec", "tenacity")
_SEEN = (_PACKAGE, _PYTHON, _PYARROW, *NEEDED)
# Long enough for tasks to be spread over executors that are idle.
_TASK_S = 0.3
_CAUSE = "Caused by: "
_INSTALL = (
    "Install it on each executor's machine, in the Python that PYSPARK_PYTHON or spark.pyspark.python names there, or "
    "point these at a Python that has it."
)


def diagnoses_of_spark(settings: Mapping[str, str]) -> list[Diagnosis]:
    """What is wrong with the executors that a session gets."""
    # PySpark is imported by nothing else of the doctor's.
    from spark_state_ext.cli.sessions import session_with

    try:
        rows = asked(session_with(settings))
    except Exception as error:
        # Whatever it is, such as a worker that cannot start: the finding tells it. Spark has no one class for these.
        return [_failed(f"{type(error).__name__}: {reason_in(str(error))}")]
    return diagnoses_of_executors(rows, versions_here())


def reason_in(text: str) -> str:
    """What is at the bottom of an error of Spark's: its last cause, or else its first line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    causes = [line for line in lines if line.startswith(_CAUSE)]
    return causes[-1].removeprefix(_CAUSE) if causes else next(iter(lines), "it does not say why")


def _failed(why: str) -> Diagnosis:
    change = (
        "Mend what it says, on the client or on the executors. Both need Spark's pandas and PyArrow, and one minor "
        "release of Python, before anything else can be asked."
    )
    return Diagnosis("executors", "a small job failed", why, change)


def versions_here() -> dict[str, str | None]:
    """What this process has."""
    return {_PACKAGE: version_and_build(), _PYTHON: platform.python_version(), _PYARROW: metadata.version(_PYARROW)}


def asked(spark: SparkSession) -> list[dict[str, str | None]]:
    """Ask the executors, with as many tasks as Spark has for so small a table, which is one for each core."""
    names = ("host", "executable", *_SEEN)
    columns = ", ".join(f"`{name}` string" for name in names)
    rows = spark.range(1_000).mapInPandas(_looker(), columns).distinct().collect()
    return sorted((row.asDict() for row in rows), key=lambda it: [str(it[name]) for name in names])


def _looker() -> Callable[[Iterable[pd.DataFrame]], Iterator[pd.DataFrame]]:
    """A nested function, which Spark pickles by value: it runs where this package is not installed."""
    names, seconds = _SEEN, _TASK_S

    def look(frames: Any) -> Any:
        import importlib
        import importlib.metadata
        import os
        import platform
        import socket
        import sys
        import time

        import pandas as pd

        for _ in frames:
            pass
        time.sleep(seconds)
        # As `worker.host` has it, which may be missing there.
        host = os.environ.get("SPARK_STATE_EXT_HOST") or socket.gethostname()
        found: dict[str, Any] = {"host": host, "executable": sys.executable}
        for name in names:
            try:
                if name == "python":
                    found[name] = platform.python_version()
                elif name == "spark_state_ext":
                    # It may lie in an archive or on the path, where nothing is installed.
                    version = importlib.import_module("spark_state_ext.version")
                    # Releases before 0.2 have no build id.
                    build = getattr(version, "version_and_build", None)
                    found[name] = version.__version__ if build is None else build()
                else:
                    found[name] = importlib.metadata.version(name)
            except (ImportError, importlib.metadata.PackageNotFoundError):
                found[name] = None
        yield pd.DataFrame([found], dtype=object)

    return look


def diagnoses_of_executors(rows: Iterable[Mapping[str, str | None]], here: Mapping[str, str | None]) -> list[Diagnosis]:
    """What is missing on executors, or another one than the client's, or than that of other executors."""
    rows = list(rows)
    pythons = sorted({f"{row['host']} ({row['executable']})" for row in rows})
    found = [Diagnosis("executors", f"{len(pythons)} asked: {', '.join(pythons)}")]
    for name in _SEEN:
        by_version: dict[str | None, set[str]] = defaultdict(set)
        for row in rows:
            by_version[row[name]].add(str(row["host"]))
        found.append(_compared(name, by_version, here.get(name)))
    return found


def _compared(name: str, by_version: Mapping[str | None, set[str]], here: str | None) -> Diagnosis:
    what = f"executors: {name}"
    told = [
        f"{version or 'none'} on {', '.join(sorted(hosts))}"
        for version, hosts in sorted(by_version.items(), key=lambda it: it[0] or "")
    ]
    seen = "; ".join(told) + (f"; {here} here" if here else "")
    if None in by_version:
        on = ", ".join(sorted(by_version[None]))
        return Diagnosis(what, seen, f"it is missing on {on}: queries fail there", _INSTALL)
    if here is not None:
        other = sorted({version for version in by_version if version and not _alike(name, version, here)})
        if other:
            return Diagnosis(what, seen, f"executors have {', '.join(other)} and the client {here}", _same(name, here))
    elif len(by_version) > 1:
        return Diagnosis(what, seen, "executors differ", f"Install one release of {name} on all of them.")
    return Diagnosis(what, seen)


def _alike(name: str, version: str, here: str) -> bool:
    """Python's last number does not matter."""
    if name == _PYTHON:
        return version.split(".")[:2] == here.split(".")[:2]
    return version == here


def _same(name: str, here: str) -> str:
    if name == _PYTHON:
        return f"Point PYSPARK_PYTHON or spark.pyspark.python at a Python {'.'.join(here.split('.')[:2])} there."
    return f"Install {name} {here} on the executors, or theirs here."
