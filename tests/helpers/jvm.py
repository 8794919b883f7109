"""Options of the tests' JVMs: they start fast, and spend little time on the compilation of code that rarely runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from benchmarks.spark import FILE_MANAGER

__all__ = ["JVM_OPTIONS", "LOCAL_FILES", "write_no_checksums"]

_ARCHIVE = Path(sys.prefix) / "classes.jsa"
# Queries of tests are short, so that a JVM would spend most of its time on compiling code that runs only a few times; on
# two cores, this and a concurrent collector slow the tests down. Without flushing, nothing sweeps the code cache, and a large
# young generation is collected seldom. scripts/bootstrap.py makes the archive.
JVM_OPTIONS: tuple[str, ...] = (
    "-XX:TieredStopAtLevel=1",
    "-XX:+UseSerialGC",
    "-Xmn400m",
    "-XX:-UseCodeCacheFlushing",
    "-XX:ReservedCodeCacheSize=240m",
    *(("-Xshare:auto", "-Xlog:cds*=off", f"-XX:SharedArchiveFile={_ARCHIVE}") if _ARCHIVE.exists() else ()),
)

# By default Spark starts ten processes (chmod, readlink) for each checkpoint file on a local disk. The soak, the tests of
# a cluster and those of documents use Spark's default.
LOCAL_FILES = {"spark.sql.streaming.checkpointFileManagerClass": FILE_MANAGER}


def write_no_checksums(session: Any) -> None:
    """Turn off the checksum file that Hadoop writes beside each local file; it costs an eighth of a batch."""
    jvm = session.sparkContext._jvm
    jvm.org.apache.hadoop.fs.FileSystem.getLocal(session._jsc.hadoopConfiguration()).setWriteChecksum(False)
