"""The data source ``arrow_state`` (PySpark 4.0 and newer). Spark creates it in separate Python processes, without a
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
from spark_state_ext.spark.source.read_plan import plan_read, read_part

__all__ = ["ArrowStateSource", "NAME", "make_read_only_error"]

NAME = "arrow_state"


class ArrowStateSource(DataSource):
    """The state of an operator as a table; `register` adds it to a session."""

    @classmethod
    def name(cls) -> str:
        """Return the name of the source for ``format``."""
        return NAME

    def schema(self) -> StructType:
        """Return the columns of the table that the options ask for."""
        return StructType.fromJson(json.loads(plan_read(SourceOptions.of(self.options), schema_only=True).schema))

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return the reader of the table."""
        return _Reader(SourceOptions.of(self.options))

    def writer(self, schema: StructType, overwrite: bool) -> Any:
        """Raise, because the source is read-only."""
        raise make_read_only_error()

    def streamWriter(self, schema: StructType, overwrite: bool) -> Any:
        """Raise, because the source is read-only."""
        raise make_read_only_error()


class _Bucket(InputPartition):
    """The bucket that one task reads."""

    def __init__(self, part: str) -> None:
        super().__init__(None)
        self.part = part


class _Reader(DataSourceReader):
    def __init__(self, options: SourceOptions) -> None:
        self._options = options

    def partitions(self) -> list[InputPartition]:
        return [_Bucket(part) for part in plan_read(self._options).parts]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, _Bucket), "an operator has buckets"
        return read_part(partition.part, self._options.storage_options)


def make_read_only_error() -> UsageError:
    """Return the error that says why state cannot be written through the data source."""
    return UsageError(
        "arrow_state is read-only: use write_savepoint(df, path, keys=…, state_schema=…), and start a query from that "
        "savepoint. State is stored in buckets by Spark's hash of the keys and sorted within each, but a data source "
        "gets rows in any order and cannot make Spark hash, shuffle and sort them"
    )
