"""A partitioned log, like a Kafka topic: a producer that partitions by key, and a streaming source that reads the log."""

from __future__ import annotations

import bisect
import json
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyspark

__all__ = ["Log", "counted", "partition_of", "range_before_expansion", "range_of"]

# For each number of partitions: the first key of every range but the first. A larger number splits the last range.
_RANGES = {2: ["h"], 3: ["h", "p"], 5: ["h", "p", "s", "v"]}


def partition_of(key: str, count: int) -> int:
    """Return the partition to which a producer writes a key's rows: the key's hash modulo the count."""
    return zlib.crc32(key.encode()) % count


def range_of(key: str, count: int) -> int:
    """Return the partition to which a producer that partitions by ranges of keys writes a key's rows."""
    return bisect.bisect_right(_RANGES[count], key)


def range_before_expansion(current_index: int, current_count: int, initial_count: int) -> int:
    """Return the partition that held the keys of a range partition when there were `initial_count` partitions."""
    return min(current_index, initial_count - 1)


def counted(*batches: Sequence[str]) -> list[dict[str, int]]:
    """Compute what a count by key emits for each batch, from all rows up to that batch."""
    return [
        {key: Counter(row for earlier in batches[: index + 1] for row in earlier)[key] for key in set(batch)}
        for index, batch in enumerate(batches)
    ]


@dataclass(frozen=True)
class Log:
    """A log on disk: a file for each partition, and the number of rows of each that may be read.

    Parameters
    ----------
    folder
        The folder of the log.
    """

    folder: Path

    def ends(self) -> dict[str, dict[str, int]]:
        """Return the number of rows in each partition of each stream, in the form of Kafka's offsets."""
        path = self.folder / "ends.json"
        ends: dict[str, dict[str, int]] = json.loads(path.read_text()) if path.exists() else {}
        return ends

    def produce(self, keys: Sequence[str], count: int, stream: str = "") -> None:
        """Write rows to a stream of the log, which has `count` partitions from now on."""
        self.folder.mkdir(exist_ok=True)
        ends = self.ends()
        for partition in range(count):
            rows = [key for key in keys if partition_of(key, count) == partition]
            name = f"{stream}-{partition}"
            with (self.folder / name).open("a") as file:
                file.writelines(f"{key}\n" for key in rows)
            stream_ends = ends.setdefault(stream, {})
            stream_ends[str(partition)] = stream_ends.get(str(partition), 0) + len(rows)
        hidden = self.folder / ".ends"
        hidden.write_text(json.dumps(ends))
        # All rows are one batch: readers see all of them or none.
        hidden.rename(self.folder / "ends.json")

    def rows(self, name: str, start: int, end: int) -> list[tuple[str, str, int]]:
        """Return some rows of a partition: key, stream, and index of the partition."""
        stream, _, partition = name.rpartition("-")
        lines = (self.folder / name).read_text().splitlines()
        return [(key, stream, int(partition)) for key in lines[start:end]]


if int(pyspark.__version__.split(".")[0]) >= 4:
    from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition

    class _Range(InputPartition):
        def __init__(self, name: str, start: int, end: int) -> None:
            self.name, self.start, self.end = name, start, end

    class _Reader(DataSourceStreamReader):
        """A reader whose offsets are by partition, as Kafka's are, so that it reads new partitions without a restart."""

        def __init__(self, log: Log) -> None:
            self._log = log

        def initialOffset(self) -> dict[str, Any]:
            return {}

        def latestOffset(self) -> dict[str, Any]:  # type: ignore[override]  # newer releases may pass a limit
            return self._log.ends()

        def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
            return [
                _Range(f"{stream}-{partition}", first, last)
                for stream, ends in end.items()
                for partition, last in ends.items()
                if last > (first := start.get(stream, {}).get(partition, 0))
            ]

        def read(self, partition: Any) -> Iterator[tuple[str, str, int]]:
            return iter(self._log.rows(partition.name, partition.start, partition.end))

    class LogSource(DataSource):
        """A Spark data source that reads a `Log`."""

        @classmethod
        def name(cls) -> str:
            return "partitioned_log"

        def schema(self) -> str:
            return "key string, stream string, partition int"

        def streamReader(self, schema: Any) -> _Reader:
            return _Reader(Log(Path(self.options["folder"])))
