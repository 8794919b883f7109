"""Spark's own repartitioning of a stopped query's checkpoint. It is a private API, which only tests call.

As a program (``python tests/spark/repartitioning.py CHECKPOINT PARTITIONS``) this module repartitions a checkpoint in a process
of its own, which a test can kill.
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
    SPARK < (4, 2), reason="Spark cannot repartition a stopped query's checkpoint before PySpark 4.2"
)

ROCKSDB = {"spark.sql.streaming.stateStore.providerClass": PROVIDERS["rocksdb"]}
FORMAT_2 = {**ROCKSDB, "spark.sql.streaming.stateStore.checkpointFormatVersion": "2"}


def repartition(spark: Any, checkpoint: Path, partitions: int, conf: dict[str, str], *, skip: bool = False) -> None:
    """Have Spark rewrite the state with another number of partitions; this adds a batch without input to the checkpoint.

    With `skip`, Spark gives up a batch that failed, and reads its input again in a later batch.
    """
    with configured(spark, conf):
        manager = spark._streamingCheckpointManager
        manager.repartition(str(checkpoint), partitions, enforce_exactly_once_sink=not skip)


if __name__ == "__main__":
    repartition(session(0, conf=FORMAT_2), Path(sys.argv[1]), int(sys.argv[2]), FORMAT_2)
