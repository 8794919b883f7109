"""Local store: sorted runs of Arrow record batches in LMDB, one environment per bucket.

The names below are imported on first use, because code that only reads checkpoint files does not need LMDB.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spark_state_ext.store.local import LocalStore
    from spark_state_ext.store.runs import Run
    from spark_state_ext.store.view import Lookup, View

__all__ = ["LocalStore", "Lookup", "Run", "View"]

_LAZY = {"LocalStore": "local", "Lookup": "view", "Run": "runs", "View": "view"}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
