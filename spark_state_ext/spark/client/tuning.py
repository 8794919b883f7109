"""Settings of a session that are faster for every query in it, and change neither results nor checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["SETTINGS", "Change", "tune", "untune"]

_LOGGER = logging.getLogger("spark_state_ext")

# With any limit Spark computes the size of an Arrow batch anew after each row on its way to Python. This value means
# "no limit": batches are bounded by their number of rows, as they were before Spark had the setting.
SETTINGS: Mapping[str, str] = {"spark.sql.execution.arrow.maxBytesPerBatch": str(2**31 - 1)}


class Change(NamedTuple):
    """What became of a setting."""

    before: str | None
    after: str


def tune(spark: SparkSession) -> dict[str, Change]:
    """Set what is in `SETTINGS`, but for what this Spark does not know and what somebody has chosen."""
    changed: dict[str, Change] = {}
    for name, value in SETTINGS.items():
        if not spark.conf.isModifiable(name):
            _LOGGER.info("%s is not set: this Spark does not know it", name)
            continue
        before = spark.conf.get(name)
        # All that was ever set; defaults are not among them. Clients of PySpark 3.5 cannot list it.
        chosen = getattr(spark.conf, "getAll", None)
        if chosen is None:
            _LOGGER.info("%s stays %s: this PySpark cannot tell whether somebody has chosen it", name, before)
        elif name in dict(chosen):
            _LOGGER.info("%s stays %s, which somebody has chosen", name, before)
        else:
            spark.conf.set(name, value)
            changed[name] = Change(before, value)
            _LOGGER.info("%s is %s now for all queries of this session; it was %s", name, value, before)
    return changed


def untune(spark: SparkSession, changed: Mapping[str, Change]) -> None:
    """Undo `tune`, but for what has another value by now."""
    for name, change in changed.items():
        if spark.conf.get(name) == change.after:
            spark.conf.unset(name)
            _LOGGER.info("%s is %s again", name, change.before)
