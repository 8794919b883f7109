"""What the client says, when it plans, of state under the operator's name."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from typing import Any

from spark_state_ext.errors import StateError
from spark_state_ext.files.folder import Folder
from spark_state_ext.files.operator_catalog import others_beside, shown_ids

__all__ = ["tell_of_others"]

_LOGGER = logging.getLogger("spark_state_ext")


def tell_of_others(root: str, storage_options: Mapping[str, Any], operator: str) -> threading.Thread | None:
    """Log, at INFO, which queries have state under an operator's name.

    No more than INFO: a query that is planned has no id yet, and an ordinary restart finds its own state there. It is
    done beside the planning, as the root may be slow, or out of the client's reach.
    """
    if not _LOGGER.isEnabledFor(logging.INFO):
        return None
    work = threading.Thread(
        target=_tell, args=(root, storage_options, operator), name="spark_state_ext neighbours", daemon=True
    )
    work.start()
    return work


def _tell(root: str, storage_options: Mapping[str, Any], operator: str) -> None:
    try:
        others = others_beside(Folder(root, dict(storage_options)).child(operator))
    except StateError as error:
        _LOGGER.info("which queries have state of operator %r cannot be seen from here: %s", operator, error)
        return
    if others:
        _LOGGER.info(
            "queries with state of operator %r under %s: %s. A query finds its own through its checkpointLocation; "
            "started with a new one, it begins without state (strict=True refuses that)",
            operator,
            root,
            shown_ids(others),
        )
