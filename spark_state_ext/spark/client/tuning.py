"""Settings of a session that make every query in it faster, and affect neither results nor checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["SETTINGS", "Change", "tune", "untune"]

_LOGGER = logging.getLogger("spark_state_ext")

# With any limit, Spark recomputes the size of an Arrow batch after each row on its way to Python. This value means
# "no limit": batches are bounded by their number of rows, as they were before Spark had the setting.
SETTINGS: Mapping[str, str] = {"spark.sql.execution.arrow.maxBytesPerBatch": str(2**31 - 1)}


class Change(NamedTuple):
    """The value of a setting before and after a change."""

    before: str | None
    after: str


def tune(spark: SparkSession) -> dict[str, Change]:
    """Set the settings in `SETTINGS`, except those that this Spark does not know or that were set explicitly."""
    changed: dict[str, Change] = {}
    for name, value in SETTINGS.items():
        if not spark.conf.isModifiable(name):
            _LOGGER.info("%s is not set: this Spark does not know it", name)
            continue
        before = spark.conf.get(name)
        # All settings that were ever set, without defaults. Clients of PySpark 3.5 cannot list them.
        explicit = getattr(spark.conf, "getAll", None)
        if explicit is None:
            _LOGGER.info("%s stays %s: this PySpark cannot say whether it was set explicitly", name, before)
        elif name in dict(explicit):
            _LOGGER.info("%s stays %s, which was set explicitly", name, before)
        else:
            spark.conf.set(name, value)
            changed[name] = Change(before, value)
            _LOGGER.info("%s is now %s for all queries of this session; it was %s", name, value, before)
    return changed


def untune(spark: SparkSession, changed: Mapping[str, Change]) -> None:
    """Undo `tune`, except for settings whose value was changed since."""
    for name, change in changed.items():
        if spark.conf.get(name) == change.after:
            spark.conf.unset(name)
            _LOGGER.info("%s is %s again", name, change.before)
