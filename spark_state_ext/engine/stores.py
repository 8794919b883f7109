"""The local stores of a worker process."""

from __future__ import annotations

from collections.abc import Iterator

from arrow_schemas.row import RowSchema
from spark_state_ext.store import LocalStore
from spark_state_ext.store.reclaim import note_use
from spark_state_ext.worker import descriptors

__all__ = ["Stores"]


class Stores:
    """Store objects by folder, in the order of their last use: opening one costs more than a small batch."""

    def __init__(self) -> None:
        self._kept: dict[str, LocalStore] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(self._kept)

    def at(self, folder: str, schema: RowSchema) -> LocalStore:
        """The store object of a folder."""
        # Taken out and put in again: in the order of their last use.
        store = self._kept.pop(folder, None)
        if store is not None and (not note_use(store.folder) or store.is_replaced()):
            # Taken for unused and removed, or for damaged by another worker.
            store.close()
            store = None
        if store is None:
            store = LocalStore.at(folder, schema)
            note_use(store.folder)
        self._kept[folder] = store
        while len(self._kept) > descriptors.stores_max():
            # Of queries that stopped, most likely; a worker outlives them.
            self._kept.pop(next(iter(self._kept))).close()
        return store

    def close(self) -> None:
        """Close them all."""
        while self._kept:
            self._kept.popitem()[1].close()
