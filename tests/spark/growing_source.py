"""A streaming source that gets more partitions while a query reads it, for PySpark 4.0 and newer.

Its producer chooses a key's partition by the key's hash, so most keys move to another partition if the number of partitions
grows. The file `released` in the source's folder holds the number of batches that the query may read.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition

__all__ = ["COLUMNS", "COUNTS_OF_PARTITIONS", "GrowingSource", "keys_of", "partition_of", "release"]

COLUMNS = "key string, read_from int"
# The number of partitions of each batch.
COUNTS_OF_PARTITIONS = (2, 2, 4, 4, 8, 8)
_KEYS, _ROWS = 50, 120


def keys_of(batch: int) -> list[str]:
    """Return the keys of a batch's rows, which are the same in every process."""
    generator = random.Random(batch)
    return [f"key {generator.randrange(_KEYS)}" for _ in range(_ROWS)]


def partition_of(key: str, count: int) -> int:
    """Return the partition to which the producer writes a key."""
    return zlib.crc32(key.encode()) % count


def release(folder: Path, batches: int) -> None:
    """Let the query read this number of batches."""
    hidden = folder / ".released"
    hidden.write_text(str(batches))
    hidden.rename(folder / "released")


class _Partition(InputPartition):
    def __init__(self, batch: int, partition: int) -> None:
        self.batch, self.partition = batch, partition


class _Reader(DataSourceStreamReader):
    def __init__(self, folder: str) -> None:
        self._folder = folder

    def initialOffset(self) -> dict[str, int]:
        return {"batches": 0}

    # Newer releases of Spark pass a start and a limit if the source accepts them.
    def latestOffset(self) -> dict[str, int]:  # type: ignore[override]
        released = Path(self._folder, "released")
        return {"batches": int(released.read_text()) if released.exists() else 0}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> Sequence[InputPartition]:
        batches = range(start["batches"], end["batches"])
        return [_Partition(batch, partition) for batch in batches for partition in range(COUNTS_OF_PARTITIONS[batch])]

    def read(self, partition: InputPartition) -> Iterator[tuple[Any, ...]]:
        assert isinstance(partition, _Partition)
        count = COUNTS_OF_PARTITIONS[partition.batch]
        for key in keys_of(partition.batch):
            if partition_of(key, count) == partition.partition:
                yield key, partition.partition


class GrowingSource(DataSource):
    """``spark.readStream.format("growing").load(folder)``."""

    @classmethod
    def name(cls) -> str:
        return "growing"

    def schema(self) -> str:
        return COLUMNS

    def streamReader(self, schema: Any) -> DataSourceStreamReader:
        return _Reader(self.options["path"])
