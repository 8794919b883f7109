"""The local stores that a service has open."""

from __future__ import annotations

import threading
from pathlib import Path

from arrow_schemas.row import RowSchema
from spark_state_ext.engine.stores import Stores
from spark_state_ext.store import LocalStore

__all__ = ["FollowedStores"]


class FollowedStores:
    """Local stores of followers, a bounded number of them open; several threads may ask."""

    def __init__(self) -> None:
        self._stores = Stores()
        self._lock = threading.Lock()

    def at(self, folder: Path, schema: RowSchema) -> LocalStore:
        """The store of a folder, as `Stores.at`."""
        with self._lock:
            return self._stores.at(str(folder), schema)

    def close(self) -> None:
        """Close them all."""
        with self._lock:
            self._stores.close()
