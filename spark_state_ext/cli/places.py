"""Whether the places of a job can be used from here: its root, and its local folder."""

from __future__ import annotations

import resource
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spark_state_ext.cli.check import findings
from spark_state_ext.cli.settings import Diagnosis
from spark_state_ext.engine.folders import stores_path
from spark_state_ext.errors import StateError, UnsafeFolderError
from spark_state_ext.files.folder import Folder, refuse_relative
from spark_state_ext.worker import descriptors
from spark_state_ext.worker.private_folder import check_private

__all__ = ["diagnoses_of_machine", "diagnoses_of_root"]

# A bucket's local store, and what else a worker has open.
_FILES_EACH, _FILES_MORE = 4, 256
_ROOM_BYTES_MIN = 2 << 30
# No operator can have such a name.
_PROBE = "_doctor-"


def diagnoses_of_root(root: str, storage_options: Mapping[str, Any], settings: Mapping[str, str]) -> list[Diagnosis]:
    """Whether a root can be written, and what its store can do. What is written is removed."""
    try:
        refuse_relative(root, "root")
        folder = Folder(root, storage_options)
    except StateError as error:
        return [
            Diagnosis("root", root, f"{type(error).__name__}: {error}", "Do what the problem says, then look again.")
        ]
    found = [_shared(folder, settings)]
    name = f"{_PROBE}{uuid.uuid4().hex}"
    try:
        above = _existing(folder)
        probe = above.child(name)
        probe.put("probe", b"written")
        if probe.get("probe") != b"written":
            found.append(Diagnosis("root", root, "it reads otherwise than it was written", "Use another store."))
        elif above is folder:
            found.append(Diagnosis("root", f"{root}: written and read"))
        else:
            found.append(Diagnosis("root", f"{root} does not exist yet, and {above.root} can be written and read"))
        found.append(_creates(probe))
        above.remove_tree(name)
    except StateError as error:
        found.append(
            Diagnosis("root", root, f"{type(error).__name__}: {error}", "Mend what it says, or use another root.")
        )
    return found


def _existing(root: Folder) -> Folder:
    """Return the root, or the nearest folder above it that exists: a look at a configuration makes no folder."""
    if not root.is_local:
        return root
    path = Path(root.root.partition("://")[2] or root.root)
    there = next(above for above in (path, *path.parents) if above.exists())
    return root if there == path else Folder(str(there))


def _creates(probe: Folder) -> Diagnosis:
    what = "conditional create"
    first, second = probe.create("once", b"first"), probe.create("once", b"second")
    if not first or second or probe.get("once") != b"first":
        return Diagnosis(
            what,
            "two have made one file",
            "two runs of a query could both hold its lease",
            "Use a store that honours If-None-Match (S3), or another kind of store.",
        )
    if not probe.creates_exclusively:
        return Diagnosis(
            what,
            "nobody vouches for it on this file system",
            "leases are weaker, and savepoints here cannot be claimed",
            "Keep the root on a local disk, S3, Azure, Google Cloud Storage, HDFS or SMB.",
        )
    return Diagnosis(what, "exactly one makes a file")


def _shared(folder: Folder, settings: Mapping[str, str]) -> Diagnosis:
    master = settings.get("spark.master", "local")
    if folder.is_local and not master.startswith("local") and master != "":
        return Diagnosis(
            "root",
            f"{folder.root} is a path of each machine, and the master is {master}",
            "executors on other machines have another folder of that name, unless it is a mount that all share",
            "Use a store that all executors reach, such as s3://….",
        )
    return Diagnosis("root", f"{folder.root} is reached by all executors of {master}")


def diagnoses_of_machine(local_dir: Path, buckets: int) -> list[Diagnosis]:
    """Whether this Python and this machine can run tasks."""
    found = [
        Diagnosis(it.what, it.seen, it.problem, f"{it.problem[:1].upper()}{it.problem[1:]}." if it.problem else "")
        for it in findings(local_dir)
    ]
    stores = stores_path(str(local_dir))
    try:
        check_private(stores)
    except FileNotFoundError:
        pass  # the first task makes it
    except (UnsafeFolderError, OSError) as error:
        found.append(Diagnosis("local_dir", str(stores), str(error), "Do what the problem says, then look again."))
    return [*found, _open_files(buckets), _address_space(), *_room(local_dir)]


def _open_files(buckets: int) -> Diagnosis:
    limit, needed = descriptors.limit(), _FILES_EACH * buckets + _FILES_MORE
    seen = f"{limit} for each process, and {buckets} buckets need {needed} where one worker has them all"
    if limit >= needed:
        return Diagnosis("open files of buckets", seen)
    return Diagnosis(
        "open files of buckets",
        seen,
        "local stores are closed and opened again in each batch, or tasks fail",
        f"Raise the limit (ulimit -n) to {needed} or more where executors are started, or have fewer buckets.",
    )


def _address_space() -> Diagnosis:
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return Diagnosis("address space", "no limit")
    return Diagnosis(
        "address space",
        f"{limit} bytes for each process",
        "local stores are mapped into memory, and their maps are larger than their files",
        "Leave it without a limit (ulimit -v unlimited).",
    )


def _room(local_dir: Path) -> list[Diagnosis]:
    try:
        free = shutil.disk_usage(local_dir).free
    except OSError:
        # That it is not there is said already.
        return []
    if free >= _ROOM_BYTES_MIN:
        return [Diagnosis("room in local_dir", f"{free >> 20} MiB")]
    problem = "local stores hold all of the state that a machine has, and rows of compactions beside it"
    return [
        Diagnosis("room in local_dir", f"{free >> 20} MiB", problem, "Make room, or set local_dir to a larger disk.")
    ]
