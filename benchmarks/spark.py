"""Spark sessions and streaming input for the benchmarks."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import SparkSession

from spark_state_ext.spark.compat import SPARK_VERSION

__all__ = ["CHANGELOG", "FILE_MANAGER", "ROCKSDB", "Feed", "session"]

CHANGELOG = "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled"
_PACKAGE = "org.apache.spark.sql.execution.streaming" + (".checkpointing" if SPARK_VERSION >= (4, 1) else "")
FILE_MANAGER = f"{_PACKAGE}.FileSystemBasedCheckpointFileManager"
ROCKSDB = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"


@contextlib.contextmanager
def session(
    name: str, cores: int, memory: str, work: Path, settings: dict[str, str], log_level: str | None = "ERROR"
) -> Iterator[SparkSession]:
    """Open a local session and stop it at the end; a process may open only one.

    It also sets environment variables of this process, and does not restore them.

    Parameters
    ----------
    name
        Name of the application.
    cores
        Number of task slots and of shuffle partitions.
    memory
        Heap of the driver's JVM, which is also the executor.
    work
        Folder for all of Spark's files.
    settings
        Further settings; they override the defaults here.
    log_level
        Level of Spark's log; None keeps the level of Spark's configuration.
    """
    # Workers must be able to import the benchmark's function whatever the working directory is.
    root = str(Path(__file__).resolve().parent.parent)
    os.environ["PYTHONPATH"] = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    builder = SparkSession.builder.master(f"local[{cores}]").appName(name)
    defaults = {
        "spark.driver.memory": memory,
        "spark.driver.host": "127.0.0.1",
        "spark.local.dir": str(work / "local"),
        "spark.sql.warehouse.dir": str(work / "warehouse"),
        "spark.sql.shuffle.partitions": str(cores),
        "spark.sql.streaming.stateStore.providerClass": ROCKSDB,
        # Spark's guide recommends both for speed: a commit writes only what changed, and no write looks up its key just
        # to keep a count of rows.
        CHANGELOG: "true",
        "spark.sql.streaming.stateStore.rocksdb.trackTotalNumberOfRows": "false",
        # By default Spark starts fifty processes (readlink, chmod) for the checkpoint files of each batch on a local
        # disk, for any query, which takes a quarter of a small batch's time. With this class it starts ten.
        "spark.sql.streaming.checkpointFileManagerClass": FILE_MANAGER,
        # This value means no limit. With a limit Spark computes the size of an Arrow batch again after each row that it
        # sends to Python, for its own operators and for ours. The number of rows still limits batches.
        "spark.sql.execution.arrow.maxBytesPerBatch": str(2**31 - 1),
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
    }
    for key, value in {**defaults, **settings}.items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    try:
        if log_level is not None:
            spark.sparkContext.setLogLevel(log_level)
        yield spark
    finally:
        spark.stop()


class Feed:
    """A folder that a file stream reads, in which each batch becomes visible as a whole.

    Parameters
    ----------
    folder
        The folder; created if it does not exist.
    """

    def __init__(self, folder: Path) -> None:
        self._hidden = folder / "hidden"
        self._shown = folder / "shown"
        self._hidden.mkdir(parents=True)
        self._shown.mkdir()
        self._count = 0

    @property
    def pattern(self) -> str:
        """Return the path for the stream's reader."""
        return f"{self._shown}/*"

    def add(self, events: pd.DataFrame, files: int) -> None:
        """Make one batch visible, split into equally large parquet files."""
        table = pa.Table.from_pandas(events, preserve_index=False)
        step = -(-table.num_rows // files)
        self.add_tables(table.slice(start, step) for start in range(0, table.num_rows, step))

    def add_tables(self, tables: Iterator[pa.Table]) -> None:
        """Make one batch visible, with a parquet file for each table."""
        name = f"batch-{self._count:05d}"
        self._count += 1
        hidden = self._hidden / name
        hidden.mkdir()
        for i, table in enumerate(tables):
            pq.write_table(table, hidden / f"part-{i:05d}.parquet", compression="none")
        # Renaming the folder is atomic: the stream sees all files of the batch or none.
        hidden.rename(self._shown / name)

    def clear(self) -> None:
        """Delete all batches; the stream must have read them.

        Otherwise the stream would list them again for every batch, and run a separate job for that if there are more
        than 32 folders (``spark.sql.sources.parallelPartitionDiscovery.threshold``). This would take longer and longer
        in the course of a benchmark.
        """
        for folder in self._shown.iterdir():
            shutil.rmtree(folder)
