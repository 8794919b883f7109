"""What is installed, and whether this machine can run it: ``python -m spark_state_ext check``.

Run it with the Python that the executors use, on a machine of theirs: most first errors are a package that is missing
there, or a local folder that LMDB cannot use.
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
# The first release that is too old, and the first that was not tried.
_PYSPARK_MIN, _PYSPARK_END = (3, 5), (4, 4)
_NEEDED = ("pyarrow", "lmdb", "fsspec", "numpy", "pandas", "tenacity")
_OPTIONAL = ("typer", "rich", "matplotlib", "s3fs", "adlfs", "gcsfs", "opentelemetry-api", "datasketches")
# LMDB must not lie on these: it shares memory between processes by maps.
_NETWORK_DISKS = frozenset({"nfs", "nfs4", "cifs", "smb3", "9p", "fuse.sshfs", "ceph", "lustre", "glusterfs"})
_FILES_FEW = 1_024


@dataclass(frozen=True)
class Finding:
    """What was looked at, and what it is."""

    what: str
    seen: str
    # What is wrong with it, or comes of it; empty where it is fine.
    problem: str = ""
    # What to change it to: a sentence. Empty where the problem says it.
    change: str = ""


def check_machine(local_dir: Path) -> list[Finding]:
    """Look at this Python and this machine."""
    found = [Finding("spark_state_ext", f"{version_and_build()} in {Path(__file__).parents[1]}"), _python(), _pyspark()]
    found += [_package(name) for name in _NEEDED]
    found += [Finding(name, version) for name in _OPTIONAL if (version := _version(name))]
    return [*found, _files(), _boot(), _disk(local_dir), _store(local_dir)]


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _python() -> Finding:
    seen = f"{platform.python_version()}, {sys.executable}"
    if _PYTHON_MIN <= sys.version_info[:2] < _PYTHON_END:
        return Finding("python", seen)
    return Finding("python", seen, "use Python 3.10 to 3.13")


def _pyspark() -> Finding:
    version = _version("pyspark") or _version("pyspark-client")
    if version is None:
        return Finding("pyspark", "not installed", "install it: pip install 'spark_state_ext[spark]'")
    try:
        release = tuple(int(part) for part in version.split(".")[:2])
    except ValueError:
        return Finding("pyspark", version, "this release was not tried")
    if release < _PYSPARK_MIN:
        return Finding("pyspark", version, "use PySpark 3.5 or a newer one")
    if release >= _PYSPARK_END:
        return Finding("pyspark", f"{version}, which is newer than what was tried")
    return Finding("pyspark", version)


def _package(name: str) -> Finding:
    version = _version(name)
    if version is None:
        return Finding(name, "not installed", f"install it: pip install {name}")
    return Finding(name, version)


def _files() -> Finding:
    limit = descriptors.limit()
    seen = f"{limit} for each process, room for {descriptors.stores_max()} buckets"
    if limit < _FILES_FEW:
        return Finding("open files", seen, f"raise the limit (ulimit -n) to {_FILES_FEW} or more")
    return Finding("open files", seen)


def _boot() -> Finding:
    boot = boot_id()
    if boot != UNKNOWN_BOOT:
        return Finding("boot id", boot)
    return Finding("boot id", "not told by this system; after a crash of the machine, remove local stores by hand")


def _disk(local_dir: Path) -> Finding:
    kind = _kind_of_disk(local_dir)
    if kind in _NETWORK_DISKS:
        return Finding("local_dir", f"{local_dir} ({kind})", "LMDB needs a local disk: set local_dir to one")
    return Finding("local_dir", f"{local_dir} ({kind or 'kind of disk not told'})")


def _kind_of_disk(folder: Path) -> str:
    """The file system that a folder lies on, by the system's own list; empty where it has none."""
    try:
        mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    except (OSError, IndexError):
        return ""
    path = str(folder.resolve())
    over = [(point, kind) for point, kind in mounts if path == point or path.startswith(point.rstrip("/") + "/")]
    return max(over, key=lambda it: len(it[0]), default=("", ""))[1]


def _store(local_dir: Path) -> Finding:
    """Write rows to a local store and read them: what a worker does in each call."""
    schema = RowSchema((pa.field("k", pa.int64()),), (pa.field("n", pa.int64()),))
    try:
        with tempfile.TemporaryDirectory(prefix="spark_state_ext-check-", dir=local_dir) as folder:
            store = LocalStore.at(Path(folder) / "0", schema)
            try:
                store.record({new_checkpoint_id(): b"checked"})
                if list(store.records().values()) != [b"checked"]:
                    return Finding("local store", "reads otherwise than it was written", "look at the disk")
            finally:
                store.close()
    except (OSError, StateError) as error:
        return Finding("local store", str(error), "set local_dir to a local disk that can be written")
    return Finding("local store", "written and read")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report where the extra ``cli`` is missing; 0 where this machine can run it, 1 where not.

    With it, ``doctor.check`` is what runs.
    """
    parser = argparse.ArgumentParser(
        prog="spark_state_ext check", description="What is installed, and whether this machine can run it."
    )
    parser.add_argument(
        "--local-dir",
        type=Path,
        default=Path(tempfile.gettempdir()),
        help="as given to ArrowState (default: %(default)s)",
    )
    options = parser.parse_args(arguments)
    found = check_machine(options.local_dir)
    for finding in found:
        print(f"{finding.what:16} {finding.seen}")
        if finding.problem:
            print(f"{'':16} PROBLEM: {finding.problem}")
    problems = sum(bool(finding.problem) for finding in found)
    print("this machine can run it" if not problems else f"{problems} problem(s), see above")
    return int(problems > 0)
