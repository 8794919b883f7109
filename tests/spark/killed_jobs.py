"""Helpers of jobs whose workers die: a session that survives the kills, and a function with which a worker kills itself."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Callable, Mapping
from pathlib import Path

from pyspark.sql import SparkSession

PROVIDERS = {
    "rocksdb": "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider",
    "hdfs": "org.apache.spark.sql.execution.streaming.state.HDFSBackedStateStoreProvider",
}


def session(kills: int, provider: str = "rocksdb", conf: Mapping[str, str] | None = None) -> SparkSession:
    """Return a session on two local cores in which a task may fail once for each kill."""
    builder = SparkSession.builder.master(f"local[2,{kills + 2}]")
    settings = {
        "spark.sql.shuffle.partitions": "2",
        "spark.ui.enabled": "false",
        "spark.driver.memory": "1g",
        "spark.log.level": "OFF",
        "spark.sql.streaming.stateStore.providerClass": PROVIDERS[provider],
        **(conf or {}),
    }
    for name, value in settings.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


def killer(folder: Path, kills: int, chance: float) -> Callable[[], None]:
    """Return a function that ends its own process at random until there have been `kills` in all."""
    markers = folder / "kills"
    markers.mkdir()

    # A nested function is pickled by value, so the workers need not find this module.
    def maybe_die() -> None:
        kills_so_far = len(list(markers.iterdir()))
        if kills_so_far < kills and random.random() < chance:
            # The open is exclusive: two workers never count as one kill.
            with contextlib.suppress(FileExistsError):
                os.close(os.open(markers / str(kills_so_far), os.O_CREAT | os.O_EXCL))
                os._exit(1)

    return maybe_die


def killed(folder: Path) -> int:
    """Return how often the `killer` of a folder has ended a process."""
    return len(list((folder / "kills").iterdir()))
