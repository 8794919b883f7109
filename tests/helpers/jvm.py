"""How the JVMs of tests run: they start fast, and do not compile well what runs a few times."""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.spark import FILE_MANAGER

__all__ = ["JVM_OPTIONS", "LOCAL_FILES"]

_ARCHIVE = Path(sys.prefix) / "classes.jsa"
# Queries of tests are short, and so most of a JVM's time would go into compiling well what runs a few times; on two
# cores that and a concurrent collector take the time from the tests. The archive is made by scripts/bootstrap.py.
JVM_OPTIONS: tuple[str, ...] = (
    "-XX:TieredStopAtLevel=1",
    "-XX:+UseSerialGC",
    *(("-Xshare:auto", "-Xlog:cds*=off", f"-XX:SharedArchiveFile={_ARCHIVE}") if _ARCHIVE.exists() else ()),
)

# By default Spark starts ten processes (chmod, readlink) for each checkpoint file on a local disk. The soak,
# the tests of a cluster and those of documents have what Spark has by default.
LOCAL_FILES = {"spark.sql.streaming.checkpointFileManagerClass": FILE_MANAGER}
