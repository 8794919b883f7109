"""A log in partitions, as a Kafka topic is: a producer that partitions by key, and a streaming source that reads it."""

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

# Where each range of a producer by range begins, but the first, for each number of partitions: the last one is split.
_RANGES = {2: ["h"], 3: ["h", "p"], 5: ["h", "p", "s", "v"]}


def partition_of(key: str, count: int) -> int:
    """The partition that a producer writes a key's rows to: its hash modulo the count."""
    return zlib.crc32(key.encode()) % count


def range_of(key: str, count: int) -> int:
    """The partition of a producer that goes by ranges of keys."""
    return bisect.bisect_right(_RANGES[count], key)


def range_before_expansion(current_index: int, current_count: int, initial_count: int) -> int:
    """What held the keys of such a partition when there were as many as `initial_count`."""
    return min(current_index, initial_count - 1)


def counted(*batches: Sequence[str]) -> list[dict[str, int]]:
    """What a count by key gives for each batch, computed over all rows up to it."""
    return [
        {key: Counter(it for before in batches[: at + 1] for it in before)[key] for key in set(batch)}
        for at, batch in enumerate(batches)
    ]


@dataclass(frozen=True)
class Log:
    """A log on disk: a file a partition, and how many rows of each may be read.

    Parameters
    ----------
    folder
        Where it lies.
    """

    folder: Path

    def ends(self) -> dict[str, dict[str, int]]:
        """How many rows each partition of each stream has, in the form of Kafka's offsets."""
        path = self.folder / "ends.json"
        found: dict[str, dict[str, int]] = json.loads(path.read_text()) if path.exists() else {}
        return found

    def produce(self, keys: Sequence[str], count: int, stream: str = "") -> None:
        """Write rows; the log, or a stream of it, has so many partitions now."""
        self.folder.mkdir(exist_ok=True)
        ends = self.ends()
        for partition in range(count):
            rows = [key for key in keys if partition_of(key, count) == partition]
            name = f"{stream}-{partition}"
            with (self.folder / name).open("a") as file:
                file.writelines(f"{key}\n" for key in rows)
            of_stream = ends.setdefault(stream, {})
            of_stream[str(partition)] = of_stream.get(str(partition), 0) + len(rows)
        hidden = self.folder / ".ends"
        hidden.write_text(json.dumps(ends))
        # All of it is one batch: readers see all rows or none.
        hidden.rename(self.folder / "ends.json")

    def rows(self, name: str, start: int, end: int) -> list[tuple[str, str, int]]:
        """Some rows of a partition: key, stream, and index of the partition."""
        stream, _, partition = name.rpartition("-")
        lines = (self.folder / name).read_text().splitlines()
        return [(key, stream, int(partition)) for key in lines[start:end]]


if int(pyspark.__version__.split(".")[0]) >= 4:
    from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition

    class _Range(InputPartition):
        def __init__(self, name: str, start: int, end: int) -> None:
            self.name, self.start, self.end = name, start, end

    class _Reader(DataSourceStreamReader):
        """Offsets are by partition, as Kafka's, and so new partitions come by themselves."""

        def __init__(self, log: Log) -> None:
            self._log = log

        def initialOffset(self) -> dict[str, Any]:
            return {}

        def latestOffset(self) -> dict[str, Any]:  # type: ignore[override]  # newer releases may tell a limit
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
        """Spark's source of a `Log`."""

        @classmethod
        def name(cls) -> str:
            return "partitioned_log"

        def schema(self) -> str:
            return "key string, stream string, partition int"

        def streamReader(self, schema: Any) -> _Reader:
            return _Reader(Log(Path(self.options["folder"])))
