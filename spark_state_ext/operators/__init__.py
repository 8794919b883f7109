"""Operators that are ready to use, as functions of a `StateBatch`: Arrow and NumPy all the way, no Spark.

They are picklable values; `spark.client.operators` fixes their columns and types when a query is planned.
"""

from __future__ import annotations
