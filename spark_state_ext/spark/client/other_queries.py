"""Logging which other queries have state under an operator's name, when a query is planned."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from typing import Any

from spark_state_ext.errors import StateError
from spark_state_ext.files.folder import Folder
from spark_state_ext.files.operator_catalog import format_ids, list_other_queries

__all__ = ["log_other_queries"]

_LOGGER = logging.getLogger("spark_state_ext")


def log_other_queries(root: str, storage_options: Mapping[str, Any], operator: str) -> threading.Thread | None:
    """Start a thread that logs which queries have state under an operator's name; return None if INFO is not logged.

    A query that is being planned has no id yet, so the list includes its own state if it is a restart. A thread does
    the work, as the root may be slow, or out of the client's reach.
    """
    if not _LOGGER.isEnabledFor(logging.INFO):
        return None
    work = threading.Thread(
        target=_log, args=(root, storage_options, operator), name="spark_state_ext neighbours", daemon=True
    )
    work.start()
    return work


def _log(root: str, storage_options: Mapping[str, Any], operator: str) -> None:
    try:
        others = list_other_queries(Folder(root, dict(storage_options)).child(operator))
    except StateError as error:
        _LOGGER.info("cannot list the queries that have state of operator %r from here: %s", operator, error)
        return
    if others:
        _LOGGER.info(
            "queries with state of operator %r under %s: %s. A query finds its own state through its "
            "checkpointLocation; with a new checkpointLocation it starts without state (strict=True refuses that)",
            operator,
            root,
            format_ids(others),
        )
