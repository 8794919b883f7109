"""Query folders of a query that was rescaled in place: each time it goes on in another one."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from spark_state_ext.files.layout import DETACHED_NAME

__all__ = ["first_folder", "folders_in_force", "is_rescaled", "is_rescaled_by", "rescaled_folder"]

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


def is_rescaled(query_folder: str) -> bool:
    """Whether a query folder, by its name, is one that a query was to go on in when it was rescaled in place."""
    return query_folder != first_folder(query_folder)


def folders_in_force(listed: Mapping[str, Collection[str]]) -> frozenset[str]:
    """The query folders that are in force, of those listed with the names in them."""
    queries: dict[str, set[str]] = {}
    for name in listed:
        queries.setdefault(first_folder(name), set()).add(name)
    found: set[str] = set()
    for first, names in queries.items():
        committed = {name for name in names if is_rescaled(name) and DETACHED_NAME in listed[name]}
        found |= committed or names & {first} or names
    return frozenset(found)
