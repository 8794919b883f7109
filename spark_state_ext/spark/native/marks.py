"""Writing the state that an imported query finds in Spark's store: a mark for each bucket.

A separate query writes the marks in one batch, with the store, the partitions and the checkpoint format of the old
query. So this code does not depend on how Spark lays out its state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F
from pyspark.sql.streaming.state import GroupStateTimeout

from arrow_schemas.import_mark import ImportMark
from arrow_schemas.labels import bucket_label
from spark_state_ext.errors import StorageError
from spark_state_ext.savepoints.batch_logs import LoggedBatch
from spark_state_ext.spark.client.plain import use_spark_state
from spark_state_ext.spark.client.settings import make_format_setting, open_session_with
from spark_state_ext.spark.compat import extract_spark_message, is_spark_error

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["write_marks"]

# The timeout of marks: due in the first batch with a watermark, or a clock, above zero.
_DUE_MS = 1


def write_marks(
    spark: SparkSession, mark: ImportMark, buckets: int, logged: LoggedBatch, has_timeout: bool, places: tuple[str, str]
) -> None:
    """Make Spark write the marks of all buckets."""
    source, location = places
    conf = {
        **logged.conf,
        **make_format_setting(logged.checkpoint_format),
        # Write one whole file for each partition, not changes to a state that does not exist.
        "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "false",
    }
    with open_session_with(spark, conf) as session:
        labels = F.explode(F.array(*[F.lit(bucket_label(bucket)) for bucket in range(buckets)]))
        # As in an operator's own plan: Spark must consider the label nullable, and no row may be late.
        rows = session.readStream.format("text").load(source).select("value", labels.alias("label"))
        bucket = F.when(F.col("value").isNotNull(), F.col("label"))
        rows = rows.select(bucket.alias("bucket"), F.timestamp_seconds(F.lit(1)).alias("at"))
        with use_spark_state():
            marked = (
                rows.withWatermark("at", "10 days")
                .groupBy("bucket")
                .applyInPandasWithState(
                    _make_marker(mark.encode(), _DUE_MS if has_timeout else 0),
                    "bucket int",
                    "pointer binary",
                    "update",
                    GroupStateTimeout.EventTimeTimeout if has_timeout else GroupStateTimeout.NoTimeout,
                )
            )
        writer = marked.writeStream.format("noop").outputMode("update").option("checkpointLocation", location)
        try:
            query = writer.trigger(availableNow=True).start()
            try:
                query.awaitTermination()
            finally:
                query.stop()
        except Exception as error:
            # A classic session passes on some errors of the JVM unchanged.
            if not is_spark_error(error):
                raise
            reason = extract_spark_message(str(error))
            raise StorageError(f"Spark could not write the state of the new query to {location}: {reason}") from error


def _make_marker(value: bytes, due_ms: int) -> Any:
    """Return a function that writes a mark. Nested, so that Spark pickles it by value: executors need no package."""

    def mark_bucket(key: Any, frames: Any, state: Any) -> Any:
        for _ in frames:
            pass
        state.update((value,))
        if due_ms:
            state.setTimeoutTimestamp(due_ms)
        return iter(())

    return mark_bucket
