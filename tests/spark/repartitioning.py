"""Spark's own repartitioning of a stopped query's checkpoint: private in the releases that have it, and only tests call it.

As a program (``python tests/spark/repartitioning.py CHECKPOINT PARTITIONS``) it does so in a process of its own, to be killed.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from jobs import SPARK, configured
from killed_jobs import PROVIDERS, session

__all__ = ["FORMAT_2", "ROCKSDB", "repartition", "repartitions"]

repartitions = pytest.mark.skipif(
    SPARK < (4, 2), reason="before PySpark 4.2 Spark does not repartition a stopped query's checkpoint"
)

ROCKSDB = {"spark.sql.streaming.stateStore.providerClass": PROVIDERS["rocksdb"]}
FORMAT_2 = {**ROCKSDB, "spark.sql.streaming.stateStore.checkpointFormatVersion": "2"}


def repartition(spark: Any, checkpoint: Path, partitions: int, conf: dict[str, str], *, skip: bool = False) -> None:
    """Have Spark write the state anew over so many partitions; it adds a batch without input to the checkpoint.

    With `skip`, a batch that failed is given up, and its input is read again in another one.
    """
    with configured(spark, conf):
        manager = spark._streamingCheckpointManager
        manager.repartition(str(checkpoint), partitions, enforce_exactly_once_sink=not skip)


if __name__ == "__main__":
    repartition(session(0, conf=FORMAT_2), Path(sys.argv[1]), int(sys.argv[2]), FORMAT_2)
