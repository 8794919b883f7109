"""Query folders of a query that was rescaled in place: each time it goes on in another one."""

from __future__ import annotations

import re

__all__ = ["first_folder", "is_rescaled_by", "rescaled_folder"]

_RESCALED = re.compile(r"(.+)\.r[0-9a-f]{12}")


def rescaled_folder(query_folder: str, plan_id: str) -> str:
    """Name of the query folder that a query goes on in which a plan rescales."""
    return f"{first_folder(query_folder)}.r{plan_id[:12]}"


def is_rescaled_by(query_folder: str, plan_id: str) -> bool:
    """Whether a query folder is one that a query goes on in which that plan has rescaled."""
    return query_folder == rescaled_folder(query_folder, plan_id)


def first_folder(query_folder: str) -> str:
    """Name of the query folder that a query began in: Spark's id of the query, mostly."""
    match = _RESCALED.fullmatch(query_folder)
    return match[1] if match else query_folder
