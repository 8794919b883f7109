"""Spark's daemon of Python workers, with the imports that all workers need made before the fork.

Tests start hundreds of workers, and each would need a second to import pandas and PyArrow. The daemon does not import this
package, so that its state in a process begins in each worker, as in production.
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
