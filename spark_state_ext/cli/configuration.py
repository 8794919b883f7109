"""The checks of doctor: the machine, the root, Spark's settings, and the executors' packages."""

from __future__ import annotations

import difflib
import platform
import resource
import shutil
import uuid
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spark_state_ext.cli.check import Finding, check_machine
from spark_state_ext.errors import StateError, StorageError, UnsafeFolderError, UsageError
from spark_state_ext.files.folder import Folder, refuse_relative
from spark_state_ext.version import version_and_build
from spark_state_ext.worker import descriptors
from spark_state_ext.worker.local_folders import stores_path
from spark_state_ext.worker.private_folder import check_private

if TYPE_CHECKING:
    import pandas as pd
    from pyspark.sql import SparkSession

__all__ = [
    "WORKER_PACKAGES",
    "diagnose_executors",
    "diagnose_machine",
    "diagnose_root",
    "diagnose_settings",
    "diagnose_spark",
    "extract_reason",
    "read_properties",
]

# -- the machine and the root ---------------------------------------------------------------------

# Open files of one bucket's local store, and of everything else in a worker.
_FILES_PER_STORE, _FILES_OTHER = 4, 256
_ROOM_BYTES_MIN = 2 << 30
# A prefix that no operator's name can have.
_PROBE_PREFIX = "_doctor-"


def diagnose_root(root: str, storage_options: Mapping[str, Any], settings: Mapping[str, str]) -> list[Finding]:
    """Check whether a root can be written, and what its store can do; remove what was written."""
    try:
        refuse_relative(root, "root")
        folder = Folder(root, storage_options)
    except StateError as error:
        return [
            Finding("root", root, f"{type(error).__name__}: {error}", "Do what the problem says, then run it again.")
        ]
    findings = [_check_shared(folder, settings)]
    name = f"{_PROBE_PREFIX}{uuid.uuid4().hex}"
    try:
        parent = _find_existing(folder)
        probe = parent.child(name)
        probe.put("probe", b"written")
        if probe.get("probe") != b"written":
            findings.append(Finding("root", root, "it returned other data than was written", "Use another store."))
        elif parent is folder:
            findings.append(Finding("root", f"{root}: written and read"))
        else:
            findings.append(Finding("root", f"{root} does not exist yet, and {parent.root} can be written and read"))
        findings.append(_check_creates(probe))
        parent.remove_tree(name)
    except StateError as error:
        findings.append(
            Finding("root", root, f"{type(error).__name__}: {error}", "Fix the problem, or use another root.")
        )
    return findings


def _find_existing(root: Folder) -> Folder:
    """Return the root, or the nearest folder above it that exists: doctor does not create folders."""
    if not root.is_local:
        return root
    path = Path(root.root.partition("://")[2] or root.root)
    nearest = next(folder for folder in (path, *path.parents) if folder.exists())
    return root if nearest == path else Folder(str(nearest))


def _check_creates(probe: Folder) -> Finding:
    what = "conditional create"
    first, second = probe.create("once", b"first"), probe.create("once", b"second")
    if not first or second or probe.get("once") != b"first":
        return Finding(
            what,
            "two writers created the same file",
            "two runs of a query could both hold its lease",
            "Use a store that honours If-None-Match (S3), or another kind of store.",
        )
    if not probe.creates_exclusively:
        return Finding(
            what,
            "not guaranteed on this file system",
            "leases are weaker, and savepoints here cannot be claimed",
            "Keep the root on a local disk, S3, Azure, Google Cloud Storage, HDFS or SMB.",
        )
    return Finding(what, "exactly one writer creates a file")


def _check_shared(folder: Folder, settings: Mapping[str, str]) -> Finding:
    master = settings.get("spark.master", "local")
    if folder.is_local and not master.startswith("local") and master != "":
        return Finding(
            "root",
            f"{folder.root} is a local path, and the master is {master}",
            "on each executor's machine this is another folder, unless it is a mount that all machines share",
            "Use a store that all executors can reach, such as s3://….",
        )
    return Finding("root", f"all executors of {master} can reach {folder.root}")


def diagnose_machine(local_dir: Path, buckets: int) -> list[Finding]:
    """Check whether this Python and this machine can run tasks."""
    results = [
        Finding(
            result.what,
            result.seen,
            result.problem,
            f"{result.problem[:1].upper()}{result.problem[1:]}." if result.problem else "",
        )
        for result in check_machine(local_dir)
    ]
    stores = stores_path(str(local_dir))
    try:
        check_private(stores)
    except FileNotFoundError:
        pass  # the first task creates it
    except (UnsafeFolderError, OSError) as error:
        results.append(Finding("local_dir", str(stores), str(error), "Do what the problem says, then run it again."))
    return [*results, _check_open_files(buckets), _check_address_space(), *_check_room(local_dir)]


def _check_open_files(buckets: int) -> Finding:
    limit, needed = descriptors.open_files_max(), _FILES_PER_STORE * buckets + _FILES_OTHER
    seen = f"{limit} for each process; {buckets} buckets need {needed} if one worker has them all"
    if limit >= needed:
        return Finding("open files of buckets", seen)
    return Finding(
        "open files of buckets",
        seen,
        "each batch closes and reopens local stores, or tasks fail",
        f"Raise the limit (ulimit -n) to {needed} or more where executors are started, or use fewer buckets.",
    )


def _check_address_space() -> Finding:
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return Finding("address space", "no limit")
    return Finding(
        "address space",
        f"{limit} bytes for each process",
        "local stores are mapped into memory, and the maps are larger than the files",
        "Remove the limit (ulimit -v unlimited).",
    )


def _check_room(local_dir: Path) -> list[Finding]:
    try:
        free = shutil.disk_usage(local_dir).free
    except OSError:
        # Another finding reports that the folder does not exist.
        return []
    if free >= _ROOM_BYTES_MIN:
        return [Finding("room in local_dir", f"{free >> 20} MiB")]
    problem = "local stores hold all state of this machine's buckets, and need more room during compactions"
    return [
        Finding(
            "room in local_dir", f"{free >> 20} MiB", problem, "Free some space, or set local_dir to a larger disk."
        )
    ]


# -- settings of Spark ----------------------------------------------------------------------------

_PROVIDER = "spark.sql.streaming.stateStore.providerClass"
_ROCKSDB = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
_FORMAT = "spark.sql.streaming.stateStore.checkpointFormatVersion"
_CHANGELOG = "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled"
_ARROW_BYTES = "spark.sql.execution.arrow.maxBytesPerBatch"
_ARROW_ROWS = "spark.sql.execution.arrow.maxRecordsPerBatch"
_PARTITIONS = "spark.sql.shuffle.partitions"
_RETAINED = "spark.sql.streaming.minBatchesToRetain"
_REUSE = "spark.python.worker.reuse"
_MEMORY = "spark.executor.pyspark.memory"
_SPECULATION = "spark.speculation"
_NO_DATA = "spark.sql.streaming.noDataMicroBatches.enabled"
_NO_LIMIT = "2147483647"
_RETAINED_HIGH = 1_000
_ROWS_LOW = 1_000
_SIMILARITY_MIN = 0.9


# The settings that are checked, with Spark's defaults.
_DEFAULTS = {
    _PROVIDER: "org.apache.spark.sql.execution.streaming.state.HDFSBackedStateStoreProvider",
    _FORMAT: "1",
    _CHANGELOG: "false",
    _ARROW_BYTES: "64MB",
    _ARROW_ROWS: "10000",
    _PARTITIONS: "200",
    _RETAINED: "100",
    _REUSE: "true",
    _MEMORY: "",
    _SPECULATION: "false",
    _NO_DATA: "true",
}


def _find_state_faults(value: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """Yield the harmful settings of Spark's own state: name, effect, and what to change."""
    if value[_PROVIDER] != _ROCKSDB:
        effect = "Spark keeps its own part of the state on the heap, and writes it as a whole"
        yield _PROVIDER, effect, f"Set it to {_ROCKSDB}."
    elif value[_FORMAT] != "2":
        effect = "batches without data call every bucket, and the history of Spark's own part is not linear"
        yield _FORMAT, effect, "Set it to 2 (Spark 4), before the query's first start."
    if value[_PROVIDER] == _ROCKSDB and value[_CHANGELOG].lower() != "true":
        yield _CHANGELOG, "each batch uploads RocksDB's files instead of only the changes", "Set it to true."
    retained = _parse_number(_RETAINED, value[_RETAINED])
    if retained < 2:
        effect = "a query cannot be rolled back to an earlier batch, and savepoints may miss their batch"
        yield _RETAINED, effect, "Set it to 100."
    elif retained > _RETAINED_HIGH:
        effect = "checkpoint files of so many batches are kept"
        yield _RETAINED, effect, "Set it to the number of batches that you may roll back, such as 100."


def _find_task_faults(value: Mapping[str, str], buckets: int) -> Iterator[tuple[str, str, str]]:
    """Yield the harmful settings of tasks and batches, as `_find_state_faults` does."""
    if value[_ARROW_BYTES] not in (_NO_LIMIT, "-1"):
        effect = "Spark recomputes the size of an Arrow batch after each row"
        yield _ARROW_BYTES, effect, f"Set it to {_NO_LIMIT}, or enable(…, tune=True)."
    rows = _parse_number(_ARROW_ROWS, value[_ARROW_ROWS])
    if rows <= 0:
        effect = "the size of an Arrow batch is not limited, and a Python worker holds several copies of it"
        yield _ARROW_ROWS, effect, "Set it to 10000."
    elif rows < _ROWS_LOW:
        yield _ARROW_ROWS, "rows go to Python in very small batches", "Set it to 10000."
    partitions = _parse_number(_PARTITIONS, value[_PARTITIONS])
    if partitions > buckets:
        effect = (
            f"{partitions - buckets} of {partitions} tasks have no bucket, because there are only {buckets} buckets"
        )
        change = f"Set it to {buckets}, or to the cores of the job if there are fewer, before the query's first start."
        yield _PARTITIONS, effect, change
    if value[_REUSE].lower() != "true":
        effect = "each task starts a Python process, which opens all local stores again"
        yield _REUSE, effect, "Set it to true, or leave it out."
    if value[_MEMORY]:
        effect = "it limits the address space of Python workers, but local stores are mapped into it"
        yield _MEMORY, effect, "Leave it out, and give Python more memory with spark.executor.memoryOverhead."
    if value[_SPECULATION].lower() == "true":
        effect = "a second attempt at a task has no local store of its own, and restores its buckets"
        yield _SPECULATION, effect, "Leave it out."
    if value[_NO_DATA].lower() != "true":
        yield _NO_DATA, "timeouts fire only when the next rows arrive", "Set it to true, or leave it out."


def _parse_number(name: str, value: str) -> int:
    try:
        return int(value)
    except ValueError as error:
        raise UsageError(f"{name} must be a number, not {value!r}") from error


def diagnose_settings(settings: Mapping[str, str], buckets: int) -> list[Finding]:
    """Check the settings that matter: return each one's value and what is wrong with it."""
    values = {**_DEFAULTS, **settings}
    faults = {
        name: (effect, change)
        for name, effect, change in (*_find_state_faults(values), *_find_task_faults(values, buckets))
    }
    seen = {name: values[name] if name in settings else f"{values[name]} (the default)" for name in _DEFAULTS}
    results = [Finding(name, seen[name], *faults.get(name, ("", ""))) for name in _DEFAULTS]
    return results + list(_find_misspelt(settings, _DEFAULTS))


def _find_misspelt(settings: Mapping[str, str], names: Collection[str]) -> Iterable[Finding]:
    by_lower = {name.lower(): name for name in names}
    for name, value in settings.items():
        if name in names:
            continue
        matches = difflib.get_close_matches(name.lower(), list(by_lower), 1, _SIMILARITY_MIN)
        if matches:
            yield Finding(name, value, "Spark does not know it", f"Did you mean {by_lower[matches[0]]}?")


def read_properties(path: Path) -> dict[str, str]:
    """Read settings from a file such as ``spark-defaults.conf``: one name and value a line; ``#`` starts a comment."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise StorageError(f"{path} cannot be read: {error}. Give a file of Spark settings.") from error
    settings = {}
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        if not stripped or stripped.startswith("#"):
            continue
        name, value = _split_property(stripped)
        if not value:
            raise UsageError(f"line {number} of {path} has a name but no value: {stripped!r}")
        settings[name] = value
    return settings


def _split_property(line: str) -> tuple[str, str]:
    """Split a line as Java's properties do: at the first white space, equals sign or colon."""
    at = next((at for at, character in enumerate(line) if character.isspace() or character in "=:"), len(line))
    return line[:at], line[at:].strip().removeprefix("=").removeprefix(":").strip()


# -- executors ------------------------------------------------------------------------------------

_PACKAGE, _PYTHON, _PYARROW = "spark_state_ext", "python", "pyarrow"
# Packages that a worker imports. Their releases may differ from the client's. (Only PyArrow's must not: each side reads
# what the other writes.)
WORKER_PACKAGES = ("pandas", "numpy", "lmdb", "fsspec", "tenacity")
_ASKED_PACKAGES = (_PACKAGE, _PYTHON, _PYARROW, *WORKER_PACKAGES)
# Long enough that Spark spreads the tasks over all idle executors.
_TASK_S = 0.3
_CAUSE = "Caused by: "
_INSTALL = (
    "Install it on each executor's machine, in the Python that PYSPARK_PYTHON or spark.pyspark.python names there, or "
    "set these to a Python that has it."
)


def diagnose_spark(settings: Mapping[str, str]) -> list[Finding]:
    """Start a session, ask its executors for their packages, and compare these with the client's."""
    # Imported here, because the rest of doctor does not need PySpark.
    from spark_state_ext.cli.sessions import get_session_with

    try:
        rows = ask_executors(get_session_with(settings))
    except Exception as error:
        # Any error, such as a worker that cannot start, becomes a finding: Spark has no common class for them.
        return [_job_failure(f"{type(error).__name__}: {extract_reason(str(error))}")]
    return diagnose_executors(rows, read_client_versions())


def extract_reason(text: str) -> str:
    """Return the reason of a Spark error: its last cause, or else its first line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    causes = [line for line in lines if line.startswith(_CAUSE)]
    return causes[-1].removeprefix(_CAUSE) if causes else next(iter(lines), "it does not say why")


def _job_failure(why: str) -> Finding:
    change = (
        "Fix the problem on the client or on the executors. Both need Spark's pandas and PyArrow, and the same minor "
        "release of Python, before anything else can be checked."
    )
    return Finding("executors", "a small job failed", why, change)


def read_client_versions() -> dict[str, str | None]:
    """Return the versions of this package, Python and PyArrow in this process."""
    return {_PACKAGE: version_and_build(), _PYTHON: platform.python_version(), _PYARROW: metadata.version(_PYARROW)}


def ask_executors(spark: SparkSession) -> list[dict[str, str | None]]:
    """Ask the executors for their packages, with the tasks that Spark plans for a small table: one for each core."""
    names = ("host", "executable", *_ASKED_PACKAGES)
    columns = ", ".join(f"`{name}` string" for name in names)
    rows = spark.range(1_000).mapInPandas(_make_probe(), columns).distinct().collect()
    return sorted((row.asDict() for row in rows), key=lambda row: [str(row[name]) for name in names])


def _make_probe() -> Callable[[Iterable[pd.DataFrame]], Iterator[pd.DataFrame]]:
    """Return a nested function: Spark pickles it by value, so it runs where this package is not installed."""
    names, seconds = _ASKED_PACKAGES, _TASK_S

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
        # The same as in `worker.host`, which may be missing on the executor.
        host = os.environ.get("SPARK_STATE_EXT_HOST") or socket.gethostname()
        row: dict[str, Any] = {"host": host, "executable": sys.executable}
        for name in names:
            try:
                if name == "python":
                    row[name] = platform.python_version()
                elif name == "spark_state_ext":
                    # The package may be in an archive or on the path, without being installed.
                    version = importlib.import_module("spark_state_ext.version")
                    # Releases before 0.2 have no build id.
                    build = getattr(version, "version_and_build", None)
                    row[name] = version.__version__ if build is None else build()
                else:
                    row[name] = importlib.metadata.version(name)
            except (ImportError, importlib.metadata.PackageNotFoundError):
                row[name] = None
        yield pd.DataFrame([row], dtype=object)

    return look


def diagnose_executors(rows: Iterable[Mapping[str, str | None]], here: Mapping[str, str | None]) -> list[Finding]:
    """Report packages that are missing on executors, or whose release differs from the client's or other executors'."""
    rows = list(rows)
    pythons = sorted({f"{row['host']} ({row['executable']})" for row in rows})
    results = [Finding("executors", f"{len(pythons)} asked: {', '.join(pythons)}")]
    for name in _ASKED_PACKAGES:
        by_version: dict[str | None, set[str]] = defaultdict(set)
        for row in rows:
            by_version[row[name]].add(str(row["host"]))
        results.append(_compare_versions(name, by_version, here.get(name)))
    return results


def _compare_versions(name: str, by_version: Mapping[str | None, set[str]], here: str | None) -> Finding:
    what = f"executors: {name}"
    versions = [
        f"{version or 'none'} on {', '.join(sorted(hosts))}"
        for version, hosts in sorted(by_version.items(), key=lambda item: item[0] or "")
    ]
    seen = "; ".join(versions) + (f"; {here} here" if here else "")
    if None in by_version:
        on = ", ".join(sorted(by_version[None]))
        return Finding(what, seen, f"it is missing on {on}, so queries fail there", _INSTALL)
    if here is not None:
        other = sorted({version for version in by_version if version and not _is_compatible(name, version, here)})
        if other:
            return Finding(
                what, seen, f"executors have {', '.join(other)} and the client {here}", _describe_change(name, here)
            )
    elif len(by_version) > 1:
        return Finding(what, seen, "executors differ", f"Install one release of {name} on all of them.")
    return Finding(what, seen)


def _is_compatible(name: str, version: str, here: str) -> bool:
    """Return True if two releases work together; for Python only the minor release matters."""
    if name == _PYTHON:
        return version.split(".")[:2] == here.split(".")[:2]
    return version == here


def _describe_change(name: str, here: str) -> str:
    if name == _PYTHON:
        return f"Set PYSPARK_PYTHON or spark.pyspark.python to a Python {'.'.join(here.split('.')[:2])} there."
    return f"Install {name} {here} on the executors, or their release here."
