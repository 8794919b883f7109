"""Spark sessions and stream input for the benchmarks."""

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
    """A local session that leaves nothing behind; only one may be made in a process.

    Parameters
    ----------
    name
        Application name.
    cores
        Task slots and shuffle partitions.
    memory
        Heap of the driver, which is also the executor.
    work
        Folder for all of Spark's files.
    settings
        More settings.
    log_level
        Level of Spark's log; None leaves it as the settings have it.
    """
    # Workers import the benchmark's function, whatever the working folder.
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
        # As Spark's guide has it for speed: a commit that writes what changed, and no lookup for the sake of a count.
        CHANGELOG: "true",
        "spark.sql.streaming.stateStore.rocksdb.trackTotalNumberOfRows": "false",
        # By default Spark starts fifty processes (readlink, chmod) for the checkpoint files of a batch on a local disk,
        # whatever the query: a quarter of a small batch's time. With this, ten.
        "spark.sql.streaming.checkpointFileManagerClass": FILE_MANAGER,
        # With any limit Spark computes the size of an Arrow batch anew after each row on its way to Python, for its own
        # operators and for ours. Batches are bounded by their number of rows.
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
    """A folder that a file stream reads: each batch becomes visible as a whole.

    Parameters
    ----------
    folder
        The folder; made when absent.
    """

    def __init__(self, folder: Path) -> None:
        self._hidden = folder / "hidden"
        self._shown = folder / "shown"
        self._hidden.mkdir(parents=True)
        self._shown.mkdir()
        self._count = 0

    @property
    def pattern(self) -> str:
        """Path for the stream's reader."""
        return f"{self._shown}/*"

    def add(self, events: pd.DataFrame, files: int) -> None:
        """Show one batch, in equally large parquet files."""
        table = pa.Table.from_pandas(events, preserve_index=False)
        step = -(-table.num_rows // files)
        self.add_tables(table.slice(at, step) for at in range(0, table.num_rows, step))

    def add_tables(self, tables: Iterator[pa.Table]) -> None:
        """Show one batch, a parquet file a table."""
        name = f"batch-{self._count:05d}"
        self._count += 1
        hidden = self._hidden / name
        hidden.mkdir()
        for i, table in enumerate(tables):
            pq.write_table(table, hidden / f"part-{i:05d}.parquet", compression="none")
        # Renaming the folder is atomic: the stream sees all files of the batch or none.
        hidden.rename(self._shown / name)

    def clear(self) -> None:
        """Take away all batches, which the stream has read.

        It would list them again for every batch, with a job of its own as soon as there are more than 32 folders
        (``spark.sql.sources.parallelPartitionDiscovery.threshold``): time that grows with the length of a benchmark.
        """
        for folder in self._shown.iterdir():
            shutil.rmtree(folder)
