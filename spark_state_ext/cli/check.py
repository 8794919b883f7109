"""Check what is installed and whether this machine can run it: ``python -m spark_state_ext check``.

Run it on an executor's machine, with the executors' Python: most first errors are a package that is missing there, or
a local folder that LMDB cannot use.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from arrow_schemas.lineage import new_checkpoint_id
from arrow_schemas.row import RowSchema
from spark_state_ext.errors import StateError
from spark_state_ext.store import LocalStore
from spark_state_ext.version import version_and_build
from spark_state_ext.worker import descriptors
from spark_state_ext.worker.boot import UNKNOWN_BOOT, boot_id

__all__ = ["Finding", "check_machine", "main"]

_PYTHON_MIN, _PYTHON_END = (3, 10), (3, 14)
# The oldest release that works, and the first one that was not tested.
_PYSPARK_MIN, _PYSPARK_END = (3, 5), (4, 4)
_REQUIRED = ("pyarrow", "lmdb", "fsspec", "numpy", "pandas", "tenacity")
_OPTIONAL = ("typer", "rich", "matplotlib", "s3fs", "adlfs", "gcsfs", "opentelemetry-api", "datasketches")
# LMDB cannot use these: it maps its file into the memory of several processes.
_NETWORK_DISKS = frozenset({"nfs", "nfs4", "cifs", "smb3", "9p", "fuse.sshfs", "ceph", "lustre", "glusterfs"})
_FILES_FEW = 1_024


@dataclass(frozen=True)
class Finding:
    """The result of one check: what was checked, and what was seen."""

    what: str
    seen: str
    # What is wrong, or its effect; empty if it is fine.
    problem: str = ""
    # What to change, as a sentence; empty if the problem says it.
    change: str = ""


def check_machine(local_dir: Path) -> list[Finding]:
    """Check this Python and this machine."""
    results = [
        Finding("spark_state_ext", f"{version_and_build()} in {Path(__file__).parents[1]}"),
        _check_python(),
        _check_pyspark(),
    ]
    results += [_check_package(name) for name in _REQUIRED]
    results += [Finding(name, version) for name in _OPTIONAL if (version := _find_version(name))]
    return [*results, _check_open_files(), _check_boot_id(), _check_disk(local_dir), _check_local_store(local_dir)]


def _find_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _check_python() -> Finding:
    seen = f"{platform.python_version()}, {sys.executable}"
    if _PYTHON_MIN <= sys.version_info[:2] < _PYTHON_END:
        return Finding("python", seen)
    return Finding("python", seen, "use Python 3.10 to 3.13")


def _check_pyspark() -> Finding:
    version = _find_version("pyspark") or _find_version("pyspark-client")
    if version is None:
        return Finding("pyspark", "not installed", "install it: pip install 'spark_state_ext[spark]'")
    try:
        release = tuple(int(part) for part in version.split(".")[:2])
    except ValueError:
        return Finding("pyspark", version, "this release was not tested")
    if release < _PYSPARK_MIN:
        return Finding("pyspark", version, "use PySpark 3.5 or a newer one")
    if release >= _PYSPARK_END:
        return Finding("pyspark", f"{version}, which is newer than the tested releases")
    return Finding("pyspark", version)


def _check_package(name: str) -> Finding:
    version = _find_version(name)
    if version is None:
        return Finding(name, "not installed", f"install it: pip install {name}")
    return Finding(name, version)


def _check_open_files() -> Finding:
    limit = descriptors.open_files_max()
    seen = f"{limit} for each process, room for {descriptors.stores_max()} buckets"
    if limit < _FILES_FEW:
        return Finding("open files", seen, f"raise the limit (ulimit -n) to {_FILES_FEW} or more")
    return Finding("open files", seen)


def _check_boot_id() -> Finding:
    boot = boot_id()
    if boot != UNKNOWN_BOOT:
        return Finding("boot id", boot)
    return Finding("boot id", "not available on this system; after a crash of the machine, remove local stores by hand")


def _check_disk(local_dir: Path) -> Finding:
    kind = _find_disk_kind(local_dir)
    if kind in _NETWORK_DISKS:
        return Finding("local_dir", f"{local_dir} ({kind})", "LMDB needs a local disk: set local_dir to one")
    return Finding("local_dir", f"{local_dir} ({kind or 'kind of disk unknown'})")


def _find_disk_kind(folder: Path) -> str:
    """Return the type of a folder's file system, from /proc/mounts; empty if it is unknown."""
    try:
        mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    except (OSError, IndexError):
        return ""
    path = str(folder.resolve())
    mounts_above = [
        (point, kind) for point, kind in mounts if path == point or path.startswith(point.rstrip("/") + "/")
    ]
    return max(mounts_above, key=lambda mount: len(mount[0]), default=("", ""))[1]


def _check_local_store(local_dir: Path) -> Finding:
    """Write rows to a local store and read them back, as a worker does in each call."""
    schema = RowSchema((pa.field("k", pa.int64()),), (pa.field("n", pa.int64()),))
    try:
        with tempfile.TemporaryDirectory(prefix="spark_state_ext-check-", dir=local_dir) as folder:
            store = LocalStore.at(Path(folder) / "0", schema)
            try:
                store.record({new_checkpoint_id(): b"checked"})
                if list(store.records().values()) != [b"checked"]:
                    return Finding("local store", "it returned other data than was written", "check the disk")
            finally:
                store.close()
    except (OSError, StateError) as error:
        return Finding("local store", str(error), "set local_dir to a local disk that can be written")
    return Finding("local store", "written and read")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the results without the extra ``cli``; return 0 if this machine can run it, else 1.

    If the extra is installed, ``doctor.check`` runs instead.
    """
    parser = argparse.ArgumentParser(
        prog="spark_state_ext check", description="Print what is installed, and whether this machine can run it."
    )
    parser.add_argument(
        "--local-dir",
        type=Path,
        default=Path(tempfile.gettempdir()),
        help="as given to ArrowState (default: %(default)s)",
    )
    options = parser.parse_args(arguments)
    results = check_machine(options.local_dir)
    for result in results:
        print(f"{result.what:16} {result.seen}")
        if result.problem:
            print(f"{'':16} PROBLEM: {result.problem}")
    problems = sum(bool(result.problem) for result in results)
    print("this machine can run it" if not problems else f"{problems} problem(s), see above")
    return int(problems > 0)
