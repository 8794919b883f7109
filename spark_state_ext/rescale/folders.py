"""Names of the query folders of a query that is rescaled in place: each rescaling continues in a new folder."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from spark_state_ext.files.layout import DETACHED_NAME

__all__ = ["first_folder", "folders_in_force", "is_rescaled", "is_rescaled_by", "make_rescaled_name"]

_RESCALED = re.compile(r"(.+)\.r[0-9a-f]{12}")


def make_rescaled_name(query_folder: str, plan_id: str) -> str:
    """Return the name of the query folder in which a query continues when this plan rescales it."""
    return f"{first_folder(query_folder)}.r{plan_id[:12]}"


def is_rescaled_by(query_folder: str, plan_id: str) -> bool:
    """True if this plan's rescaling made the query folder."""
    return query_folder == make_rescaled_name(query_folder, plan_id)


def first_folder(query_folder: str) -> str:
    """Return the name of the query's first query folder, usually Spark's id of the query."""
    match = _RESCALED.fullmatch(query_folder)
    return match[1] if match else query_folder


def is_rescaled(query_folder: str) -> bool:
    """True if the name of a query folder shows that an in-place rescaling made it."""
    return query_folder != first_folder(query_folder)


def folders_in_force(listed: Mapping[str, Collection[str]]) -> frozenset[str]:
    """Return the query folders in force; `listed` has the file names in each query folder."""
    queries: dict[str, set[str]] = {}
    for name in listed:
        queries.setdefault(first_folder(name), set()).add(name)
    in_force: set[str] = set()
    for first, names in queries.items():
        committed = {name for name in names if is_rescaled(name) and DETACHED_NAME in listed[name]}
        in_force |= committed or names & {first} or names
    return frozenset(in_force)
