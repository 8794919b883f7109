"""What doctor looks at: the machine, the root, Spark's settings, and what executors have."""

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
    "read_properties",
    "extract_reason",
]

# -- the machine and the root ---------------------------------------------------------------------

# A bucket's local store, and what else a worker has open.
_FILES_EACH, _FILES_MORE = 4, 256
_ROOM_BYTES_MIN = 2 << 30
# No operator can have such a name.
_PROBE = "_doctor-"


def diagnose_root(root: str, storage_options: Mapping[str, Any], settings: Mapping[str, str]) -> list[Finding]:
    """Whether a root can be written, and what its store can do. What is written is removed."""
    try:
        refuse_relative(root, "root")
        folder = Folder(root, storage_options)
    except StateError as error:
        return [Finding("root", root, f"{type(error).__name__}: {error}", "Do what the problem says, then look again.")]
    found = [_shared(folder, settings)]
    name = f"{_PROBE}{uuid.uuid4().hex}"
    try:
        above = _existing(folder)
        probe = above.child(name)
        probe.put("probe", b"written")
        if probe.get("probe") != b"written":
            found.append(Finding("root", root, "it reads otherwise than it was written", "Use another store."))
        elif above is folder:
            found.append(Finding("root", f"{root}: written and read"))
        else:
            found.append(Finding("root", f"{root} does not exist yet, and {above.root} can be written and read"))
        found.append(_creates(probe))
        above.remove_tree(name)
    except StateError as error:
        found.append(
            Finding("root", root, f"{type(error).__name__}: {error}", "Mend what it says, or use another root.")
        )
    return found


def _existing(root: Folder) -> Folder:
    """Return the root, or the nearest folder above it that exists: a look at a configuration makes no folder."""
    if not root.is_local:
        return root
    path = Path(root.root.partition("://")[2] or root.root)
    there = next(above for above in (path, *path.parents) if above.exists())
    return root if there == path else Folder(str(there))


def _creates(probe: Folder) -> Finding:
    what = "conditional create"
    first, second = probe.create("once", b"first"), probe.create("once", b"second")
    if not first or second or probe.get("once") != b"first":
        return Finding(
            what,
            "two have made one file",
            "two runs of a query could both hold its lease",
            "Use a store that honours If-None-Match (S3), or another kind of store.",
        )
    if not probe.creates_exclusively:
        return Finding(
            what,
            "nobody vouches for it on this file system",
            "leases are weaker, and savepoints here cannot be claimed",
            "Keep the root on a local disk, S3, Azure, Google Cloud Storage, HDFS or SMB.",
        )
    return Finding(what, "exactly one makes a file")


def _shared(folder: Folder, settings: Mapping[str, str]) -> Finding:
    master = settings.get("spark.master", "local")
    if folder.is_local and not master.startswith("local") and master != "":
        return Finding(
            "root",
            f"{folder.root} is a path of each machine, and the master is {master}",
            "executors on other machines have another folder of that name, unless it is a mount that all share",
            "Use a store that all executors reach, such as s3://….",
        )
    return Finding("root", f"{folder.root} is reached by all executors of {master}")


def diagnose_machine(local_dir: Path, buckets: int) -> list[Finding]:
    """Whether this Python and this machine can run tasks."""
    found = [
        Finding(it.what, it.seen, it.problem, f"{it.problem[:1].upper()}{it.problem[1:]}." if it.problem else "")
        for it in check_machine(local_dir)
    ]
    stores = stores_path(str(local_dir))
    try:
        check_private(stores)
    except FileNotFoundError:
        pass  # the first task makes it
    except (UnsafeFolderError, OSError) as error:
        found.append(Finding("local_dir", str(stores), str(error), "Do what the problem says, then look again."))
    return [*found, _open_files(buckets), _address_space(), *_room(local_dir)]


def _open_files(buckets: int) -> Finding:
    limit, needed = descriptors.limit(), _FILES_EACH * buckets + _FILES_MORE
    seen = f"{limit} for each process, and {buckets} buckets need {needed} where one worker has them all"
    if limit >= needed:
        return Finding("open files of buckets", seen)
    return Finding(
        "open files of buckets",
        seen,
        "local stores are closed and opened again in each batch, or tasks fail",
        f"Raise the limit (ulimit -n) to {needed} or more where executors are started, or have fewer buckets.",
    )


def _address_space() -> Finding:
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return Finding("address space", "no limit")
    return Finding(
        "address space",
        f"{limit} bytes for each process",
        "local stores are mapped into memory, and their maps are larger than their files",
        "Leave it without a limit (ulimit -v unlimited).",
    )


def _room(local_dir: Path) -> list[Finding]:
    try:
        free = shutil.disk_usage(local_dir).free
    except OSError:
        # That it is not there is said already.
        return []
    if free >= _ROOM_BYTES_MIN:
        return [Finding("room in local_dir", f"{free >> 20} MiB")]
    problem = "local stores hold all of the state that a machine has, and rows of compactions beside it"
    return [Finding("room in local_dir", f"{free >> 20} MiB", problem, "Make room, or set local_dir to a larger disk.")]


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
_RETAINED_MANY = 1_000
_ROWS_FEW = 1_000
_ALIKE = 0.9


# Settings that matter, and the value of each where nobody set one.
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


def _state_faults(value: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """Settings of Spark's own state that do harm: which one, what comes of it, and what to change."""
    if value[_PROVIDER] != _ROCKSDB:
        why = "Spark's own part of the state is kept on the heap, and written whole"
        yield _PROVIDER, why, f"Set it to {_ROCKSDB}."
    elif value[_FORMAT] != "2":
        why = "batches without data call every bucket, and the history of Spark's own part is not linear"
        yield _FORMAT, why, "Set it to 2 (Spark 4), before the query's first start."
    if value[_PROVIDER] == _ROCKSDB and value[_CHANGELOG].lower() != "true":
        yield _CHANGELOG, "each batch uploads RocksDB's files in place of what changed", "Set it to true."
    retained = _number(_RETAINED, value[_RETAINED])
    if retained < 2:
        why = "no batch before the last one can be gone back to, and savepoints may miss their batch"
        yield _RETAINED, why, "Set it to 100."
    elif retained > _RETAINED_MANY:
        why = "so many batches keep their checkpoint files"
        yield _RETAINED, why, "Set it to what you would go back to, such as 100."


def _task_faults(value: Mapping[str, str], buckets: int) -> Iterator[tuple[str, str, str]]:
    """Settings of tasks and batches that do harm, as `_state_faults`."""
    if value[_ARROW_BYTES] not in (_NO_LIMIT, "-1"):
        why = "Spark computes the size of an Arrow batch anew after each row"
        yield _ARROW_BYTES, why, f"Set it to {_NO_LIMIT}, or enable(…, tune=True)."
    rows = _number(_ARROW_ROWS, value[_ARROW_ROWS])
    if rows <= 0:
        why = "nothing bounds an Arrow batch, which a Python worker holds several times over"
        yield _ARROW_ROWS, why, "Set it to 10000."
    elif rows < _ROWS_FEW:
        yield _ARROW_ROWS, "rows go to Python in very small batches", "Set it to 10000."
    partitions = _number(_PARTITIONS, value[_PARTITIONS])
    if partitions > buckets:
        why = f"{partitions - buckets} of {partitions} tasks have no bucket, as there are {buckets}"
        change = f"Set it to {buckets}, or to the cores of the job if these are fewer, before the query's first start."
        yield _PARTITIONS, why, change
    if value[_REUSE].lower() != "true":
        why = "each task starts a Python process, which opens all local stores anew"
        yield _REUSE, why, "Set it to true, or leave it out."
    if value[_MEMORY]:
        why = "it bounds the address space of Python workers, which local stores are mapped into"
        yield _MEMORY, why, "Leave it out, and give Python room with spark.executor.memoryOverhead."
    if value[_SPECULATION].lower() == "true":
        why = "a second attempt at a task has no local store of its own, and restores its buckets"
        yield _SPECULATION, why, "Leave it out."
    if value[_NO_DATA].lower() != "true":
        yield _NO_DATA, "timeouts come to pass only with the next rows", "Set it to true, or leave it out."


def _number(name: str, value: str) -> int:
    try:
        return int(value)
    except ValueError as error:
        raise UsageError(f"{name} must be a number, not {value!r}") from error


def diagnose_settings(settings: Mapping[str, str], buckets: int) -> list[Finding]:
    """What each setting that matters is, and what is wrong with it."""
    value = {**_DEFAULTS, **settings}
    faults = {name: (why, change) for name, why, change in (*_state_faults(value), *_task_faults(value, buckets))}
    seen = {name: value[name] if name in settings else f"{value[name]} (the default)" for name in _DEFAULTS}
    found = [Finding(name, seen[name], *faults.get(name, ("", ""))) for name in _DEFAULTS]
    return found + list(_misspelt(settings, _DEFAULTS))


def _misspelt(settings: Mapping[str, str], known: Collection[str]) -> Iterable[Finding]:
    by_lower = {name.lower(): name for name in known}
    for name, value in settings.items():
        if name in known:
            continue
        likely = difflib.get_close_matches(name.lower(), list(by_lower), 1, _ALIKE)
        if likely:
            yield Finding(name, value, "Spark does not know it", f"Did you mean {by_lower[likely[0]]}?")


def read_properties(path: Path) -> dict[str, str]:
    """The settings in a file such as ``spark-defaults.conf``: a name and a value a line, ``#`` begins a comment."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise StorageError(f"{path} cannot be read: {error}. Give a file of Spark settings.") from error
    found = {}
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        if not stripped or stripped.startswith("#"):
            continue
        name, value = _name_and_value(stripped)
        if not value:
            raise UsageError(f"line {number} of {path} has a name and no value: {stripped!r}")
        found[name] = value
    return found


def _name_and_value(line: str) -> tuple[str, str]:
    """As Java's properties: up to the first white space, equals sign or colon."""
    at = next((at for at, character in enumerate(line) if character.isspace() or character in "=:"), len(line))
    return line[:at], line[at:].strip().removeprefix("=").removeprefix(":").strip()


# -- executors ------------------------------------------------------------------------------------

_PACKAGE, _PYTHON, _PYARROW = "spark_state_ext", "python", "pyarrow"
# What a worker imports; none of them has to be what the client has, but for PyArrow, which reads what the other writes.
WORKER_PACKAGES = ("pandas", "numpy", "lmdb", "fsspec", "tenacity")
_SEEN = (_PACKAGE, _PYTHON, _PYARROW, *WORKER_PACKAGES)
# Long enough for tasks to be spread over executors that are idle.
_TASK_S = 0.3
_CAUSE = "Caused by: "
_INSTALL = (
    "Install it on each executor's machine, in the Python that PYSPARK_PYTHON or spark.pyspark.python names there, or "
    "point these at a Python that has it."
)


def diagnose_spark(settings: Mapping[str, str]) -> list[Finding]:
    """What is wrong with the executors that a session gets."""
    # PySpark is imported by nothing else of the doctor's.
    from spark_state_ext.cli.sessions import get_session_with

    try:
        rows = ask_executors(get_session_with(settings))
    except Exception as error:
        # Whatever it is, such as a worker that cannot start: the finding tells it. Spark has no one class for these.
        return [_failed(f"{type(error).__name__}: {extract_reason(str(error))}")]
    return diagnose_executors(rows, read_client_versions())


def extract_reason(text: str) -> str:
    """What is at the bottom of an error of Spark's: its last cause, or else its first line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    causes = [line for line in lines if line.startswith(_CAUSE)]
    return causes[-1].removeprefix(_CAUSE) if causes else next(iter(lines), "it does not say why")


def _failed(why: str) -> Finding:
    change = (
        "Mend what it says, on the client or on the executors. Both need Spark's pandas and PyArrow, and one minor "
        "release of Python, before anything else can be asked."
    )
    return Finding("executors", "a small job failed", why, change)


def read_client_versions() -> dict[str, str | None]:
    """What this process has."""
    return {_PACKAGE: version_and_build(), _PYTHON: platform.python_version(), _PYARROW: metadata.version(_PYARROW)}


def ask_executors(spark: SparkSession) -> list[dict[str, str | None]]:
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


def diagnose_executors(rows: Iterable[Mapping[str, str | None]], here: Mapping[str, str | None]) -> list[Finding]:
    """What is missing on executors, or another one than the client's, or than that of other executors."""
    rows = list(rows)
    pythons = sorted({f"{row['host']} ({row['executable']})" for row in rows})
    found = [Finding("executors", f"{len(pythons)} asked: {', '.join(pythons)}")]
    for name in _SEEN:
        by_version: dict[str | None, set[str]] = defaultdict(set)
        for row in rows:
            by_version[row[name]].add(str(row["host"]))
        found.append(_versions_compared(name, by_version, here.get(name)))
    return found


def _versions_compared(name: str, by_version: Mapping[str | None, set[str]], here: str | None) -> Finding:
    what = f"executors: {name}"
    told = [
        f"{version or 'none'} on {', '.join(sorted(hosts))}"
        for version, hosts in sorted(by_version.items(), key=lambda it: it[0] or "")
    ]
    seen = "; ".join(told) + (f"; {here} here" if here else "")
    if None in by_version:
        on = ", ".join(sorted(by_version[None]))
        return Finding(what, seen, f"it is missing on {on}: queries fail there", _INSTALL)
    if here is not None:
        other = sorted({version for version in by_version if version and not _alike(name, version, here)})
        if other:
            return Finding(what, seen, f"executors have {', '.join(other)} and the client {here}", _same(name, here))
    elif len(by_version) > 1:
        return Finding(what, seen, "executors differ", f"Install one release of {name} on all of them.")
    return Finding(what, seen)


def _alike(name: str, version: str, here: str) -> bool:
    """Python's last number does not matter."""
    if name == _PYTHON:
        return version.split(".")[:2] == here.split(".")[:2]
    return version == here


def _same(name: str, here: str) -> str:
    if name == _PYTHON:
        return f"Point PYSPARK_PYTHON or spark.pyspark.python at a Python {'.'.join(here.split('.')[:2])} there."
    return f"Install {name} {here} on the executors, or theirs here."
