"""What jobs with killed workers share: a session that outlives the kills, and the worker's killing of itself."""

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
    """A session on two local cores, where a task may fail as often as there are kills."""
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
    """A function that ends the process that calls it, by chance, until there have been so many `kills` in all."""
    markers = folder / "kills"
    markers.mkdir()

    # Nested, so that it travels to the workers by value: these need not find this module.
    def die_now_and_then() -> None:
        done = len(list(markers.iterdir()))
        if done < kills and random.random() < chance:
            # Exclusive: two workers never share a kill, so there are exactly as many as asked for.
            with contextlib.suppress(FileExistsError):
                os.close(os.open(markers / str(done), os.O_CREAT | os.O_EXCL))
                os._exit(1)

    return die_now_and_then


def killed(folder: Path) -> int:
    """How often the `killer` of a folder struck."""
    return len(list((folder / "kills").iterdir()))
