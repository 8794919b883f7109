"""Spark's daemon of Python workers, with the imports that all workers need made before the fork.

Tests start hundreds of workers, and each would need a second to import pandas and PyArrow, and half a second to import this
package. A worker still creates its own state, as in production, because no module keeps any (`tests/test_rooms.py`).
Tests of clusters and migrations, and most tests of the soak, use Spark's own daemon.
"""

from __future__ import annotations

import lmdb  # noqa: F401
import pandas  # noqa: F401
import pyarrow.compute
import pyarrow.parquet  # noqa: F401
import pyspark.sql.pandas.serializers
import pyspark.worker  # noqa: F401
from pyspark.daemon import manager

import spark_state_ext.spark.executor.call
import spark_state_ext.spark.executor.key_work
import spark_state_ext.spark.executor.table_tasks  # noqa: F401

if __name__ == "__main__":
    manager()
