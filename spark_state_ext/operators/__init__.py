"""Built-in operators, as functions of a `StateBatch`, with Arrow and NumPy only and without Spark.

The functions are picklable values; `spark.client.operators` sets their columns and types when a query is planned.
"""

from __future__ import annotations
