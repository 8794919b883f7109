"""The local stores of a worker process."""

from __future__ import annotations

from collections.abc import Iterator

from arrow_schemas.row import RowSchema
from spark_state_ext.store import LocalStore
from spark_state_ext.store.reclaim import record_use
from spark_state_ext.worker import descriptors

__all__ = ["Stores"]


class Stores:
    """Open local stores by folder, least recently used first, because opening one takes longer than a small batch."""

    def __init__(self) -> None:
        self._stores: dict[str, LocalStore] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(self._stores)

    def at(self, folder: str, schema: RowSchema) -> LocalStore:
        """Return the open store of a folder; open it if necessary."""
        # Removed and inserted again, to keep the order of last use.
        store = self._stores.pop(folder, None)
        if store is not None and (not record_use(store.folder) or store.is_replaced()):
            # Another worker removed it as unused, or replaced it as damaged.
            store.close()
            store = None
        if store is None:
            store = LocalStore.at(folder, schema)
            record_use(store.folder)
        self._stores[folder] = store
        while len(self._stores) > descriptors.stores_max():
            # Most likely of a query that stopped; a worker outlives its queries.
            self._stores.pop(next(iter(self._stores))).close()
        return store

    def close(self) -> None:
        """Close all stores."""
        while self._stores:
            self._stores.popitem()[1].close()
