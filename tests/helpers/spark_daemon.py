"""Spark's daemon of Python workers, which has imported what all of them import before it forks them.

Tests make hundreds of workers, and each would spend a second on importing pandas and PyArrow. This package itself is not among
it: what it keeps in a process begins in each worker, as it does in production.
"""

from __future__ import annotations

import lmdb  # noqa: F401
import pandas  # noqa: F401
import pyarrow.compute
import pyarrow.parquet  # noqa: F401
import pyspark.sql.pandas.serializers
import pyspark.worker  # noqa: F401
from pyspark.daemon import manager

if __name__ == "__main__":
    manager()
