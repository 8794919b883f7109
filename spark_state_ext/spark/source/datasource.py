"""The data source ``arrow_state`` (PySpark 4.0 and newer). Spark makes it in Python processes of its own, which need no
client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from spark_state_ext.errors import UsageError
from spark_state_ext.spark.source.options import SourceOptions
from spark_state_ext.spark.source.parts import planned, read_part

__all__ = ["ArrowStateSource", "NAME", "refused_writing"]

NAME = "arrow_state"


class ArrowStateSource(DataSource):
    """State of an operator as a table; `register` tells a session of it."""

    @classmethod
    def name(cls) -> str:
        """What ``format`` calls it."""
        return NAME

    def schema(self) -> StructType:
        """The columns of the table that the options ask for."""
        return StructType.fromJson(json.loads(planned(SourceOptions.of(self.options), described=True).schema))

    def reader(self, schema: StructType) -> DataSourceReader:
        """What reads it."""
        return _Reader(SourceOptions.of(self.options))

    def writer(self, schema: StructType, overwrite: bool) -> Any:
        """Nothing writes it."""
        raise refused_writing()

    def streamWriter(self, schema: StructType, overwrite: bool) -> Any:
        """As `writer`."""
        raise refused_writing()


class _Bucket(InputPartition):
    """What one task reads."""

    def __init__(self, part: str) -> None:
        super().__init__(None)
        self.part = part


class _Reader(DataSourceReader):
    def __init__(self, options: SourceOptions) -> None:
        self._options = options

    def partitions(self) -> list[InputPartition]:
        return [_Bucket(part) for part in planned(self._options).parts]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, _Bucket), "an operator has buckets"
        return read_part(partition.part, self._options.storage_options)


def refused_writing() -> UsageError:
    """Why nobody writes state through the data source."""
    return UsageError(
        "arrow_state is read only: use write_savepoint(df, path, keys=…, state_schema=…), and start a query from that. "
        "State lies in buckets by Spark's hash of the keys, sorted within each. A data source is handed rows as they "
        "come: it cannot make Spark hash, shuffle and sort them"
    )
