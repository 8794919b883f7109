"""Changes that a vectorised function made to the state of its batch's keys."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from arrow_schemas.equality import BoolArray, IndexArray
from spark_state_ext.errors import UsageError

__all__ = ["NO_TIMEOUT", "REMOVED", "UNCHANGED", "Outcome"]

# Timeout of a key without one; Spark's own value.
NO_TIMEOUT = -1
# Values of `Outcome.source` that are not row numbers.
REMOVED = -1
UNCHANGED = -2


class Outcome:
    """Changes that a function made to the keys of its batch; it refuses changes once `closed` is set."""

    def __init__(self, keys: int) -> None:
        self.touched: BoolArray = np.zeros(keys, dtype=np.bool_)
        self.source: IndexArray = np.full(keys, UNCHANGED, dtype=np.int64)
        self.timeouts_ms: IndexArray = np.full(keys, NO_TIMEOUT, dtype=np.int64)
        self.updates: list[pa.Table] = []
        self.closed = False
        self._update_rows = 0

    def put(self, positions: IndexArray | None, states: pa.Table) -> None:
        """Set the state of some keys (None: of all, in their order)."""
        self._check_open()
        at = slice(None) if positions is None else positions
        self.touched[at] = True
        self.source[at] = np.arange(self._update_rows, self._update_rows + states.num_rows)
        self.updates.append(states)
        self._update_rows += states.num_rows

    def drop(self, positions: IndexArray) -> None:
        """Remove the state of some keys."""
        self._check_open()
        self.touched[positions] = True
        self.source[positions] = REMOVED

    def time_out(self, positions: IndexArray, times_ms: IndexArray) -> None:
        """Set the timeouts of some keys."""
        self._check_open()
        self.touched[positions] = True
        self.timeouts_ms[positions] = times_ms

    def _check_open(self) -> None:
        if self.closed:
            raise UsageError("a batch was changed after its function had returned: such a change has no effect")
