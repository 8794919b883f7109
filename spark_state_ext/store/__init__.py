"""Local store: sorted runs of Arrow record batches in LMDB, one environment a bucket."""

from __future__ import annotations

from spark_state_ext.store.local import LocalStore
from spark_state_ext.store.runs import Run
from spark_state_ext.store.view import Lookup, View

__all__ = ["LocalStore", "Lookup", "Run", "View"]
