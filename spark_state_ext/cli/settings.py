"""Spark settings that make queries on this package slow, or break them: pure rules over settings by name."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from spark_state_ext.errors import StorageError, UsageError

__all__ = ["Diagnosis", "diagnoses_of_settings", "read_properties"]

_PROVIDER = "spark.sql.streaming.stateStore.providerClass"
_ROCKSDB = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
_FORMAT = "spark.sql.streaming.stateStore.checkpointFormatVersion"
_CHANGELOG = "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled"
_ARROW_BYTES = "spark.sql.execution.arrow.maxBytesPerBatch"
_ARROW_ROWS = "spark.sql.execution.arrow.maxRecordsPerBatch"
_PARTITIONS = "spark.sql.shuffle.partitions"
_RETAINED = "spark.sql.streaming.minBatchesToRetain"
_REUSE = "spark.python.worker.reuse"
_MEMORY = "spark.executor.pyspark.memory"
_SPECULATION = "spark.speculation"
_NO_DATA = "spark.sql.streaming.noDataMicroBatches.enabled"
_NO_LIMIT = "2147483647"
_RETAINED_MANY = 1_000
_ROWS_FEW = 1_000
_ALIKE = 0.9


@dataclass(frozen=True)
class Diagnosis:
    """What is to be changed.

    Parameters
    ----------
    what, seen
        What was looked at, and what it is.
    problem
        What comes of it; empty where it is fine.
    change
        What to change it to: a sentence.
    """

    what: str
    seen: str
    problem: str = ""
    change: str = ""


@dataclass(frozen=True)
class _Rule:
    """A setting, the value that it has where nobody set one, and what is wrong with a value."""

    name: str
    default: str
    wrong: Callable[[str, Mapping[str, str]], tuple[str, str] | None]

    def on(self, settings: Mapping[str, str]) -> Diagnosis:
        value = settings.get(self.name, self.default)
        seen = value if self.name in settings else f"{value} (the default)"
        found = self.wrong(value, settings)
        return Diagnosis(self.name, seen) if found is None else Diagnosis(self.name, seen, *found)


def _is(name: str, settings: Mapping[str, str], default: str) -> bool:
    return settings.get(name, default).strip().lower() == "true"


def _provider(value: str, settings: Mapping[str, str]) -> tuple[str, str] | None:
    if value == _ROCKSDB:
        return None
    return "Spark's own part of the state is kept on the heap, and written whole", f"Set it to {_ROCKSDB}."


def _format(value: str, settings: Mapping[str, str]) -> tuple[str, str] | None:
    if settings.get(_PROVIDER) != _ROCKSDB or value == "2":
        return None
    return (
        "batches without data call every bucket, and the history of Spark's own part is not linear",
        "Set it to 2 (Spark 4), before the query's first start.",
    )


def _changelog(value: str, settings: Mapping[str, str]) -> tuple[str, str] | None:
    if settings.get(_PROVIDER) != _ROCKSDB or value.lower() == "true":
        return None
    return "each batch uploads RocksDB's files in place of what changed", "Set it to true."


def _arrow_bytes(value: str, settings: Mapping[str, str]) -> tuple[str, str] | None:
    if value in (_NO_LIMIT, "-1"):
        return None
    return (
        "Spark computes the size of an Arrow batch anew after each row",
        f"Set it to {_NO_LIMIT}, or enable(…, tune=True).",
    )


def _arrow_rows(value: str, settings: Mapping[str, str]) -> tuple[str, str] | None:
    rows = _number(_ARROW_ROWS, value)
    if rows <= 0:
        return "nothing bounds an Arrow batch, which a Python worker holds several times over", "Set it to 10000."
    return ("rows go to Python in very small batches", "Set it to 10000.") if rows < _ROWS_FEW else None


def _retained(value: str, settings: Mapping[str, str]) -> tuple[str, str] | None:
    batches = _number(_RETAINED, value)
    if batches < 2:
        return "no batch before the last one can be gone back to, and savepoints may miss their batch", "Set it to 100."
    if batches > _RETAINED_MANY:
        return "so many batches keep their checkpoint files", "Set it to what you would go back to, such as 100."
    return None


def _reuse(value: str, settings: Mapping[str, str]) -> tuple[str, str] | None:
    if value.lower() == "true":
        return None
    return "each task starts a Python process, which opens all local stores anew", "Set it to true, or leave it out."


def _memory(value: str, settings: Mapping[str, str]) -> tuple[str, str] | None:
    if not value:
        return None
    return (
        "it bounds the address space of Python workers, which local stores are mapped into",
        "Leave it out, and give Python room with spark.executor.memoryOverhead.",
    )


def _speculation(value: str, settings: Mapping[str, str]) -> tuple[str, str] | None:
    if value.lower() != "true":
        return None
    return "a second attempt at a task has no local store of its own, and restores its buckets", "Leave it out."


def _no_data(value: str, settings: Mapping[str, str]) -> tuple[str, str] | None:
    if value.lower() == "true":
        return None
    return "timeouts come to pass only with the next rows", "Set it to true, or leave it out."


def _partitions(buckets: int) -> Callable[[str, Mapping[str, str]], tuple[str, str] | None]:
    def wrong(value: str, settings: Mapping[str, str]) -> tuple[str, str] | None:
        partitions = _number(_PARTITIONS, value)
        if partitions <= buckets:
            return None
        return (
            f"{partitions - buckets} of {partitions} tasks have no bucket, as there are {buckets}",
            f"Set it to {buckets}, or to the cores of the job if these are fewer, before the query's first start.",
        )

    return wrong


def _number(name: str, value: str) -> int:
    try:
        return int(value)
    except ValueError as error:
        raise UsageError(f"{name} must be a number, not {value!r}") from error


def _rules(buckets: int) -> list[_Rule]:
    return [
        _Rule(_PROVIDER, "org.apache.spark.sql.execution.streaming.state.HDFSBackedStateStoreProvider", _provider),
        _Rule(_FORMAT, "1", _format),
        _Rule(_CHANGELOG, "false", _changelog),
        _Rule(_ARROW_BYTES, "64MB", _arrow_bytes),
        _Rule(_ARROW_ROWS, "10000", _arrow_rows),
        _Rule(_PARTITIONS, "200", _partitions(buckets)),
        _Rule(_RETAINED, "100", _retained),
        _Rule(_REUSE, "true", _reuse),
        _Rule(_MEMORY, "", _memory),
        _Rule(_SPECULATION, "false", _speculation),
        _Rule(_NO_DATA, "true", _no_data),
    ]


def diagnoses_of_settings(settings: Mapping[str, str], buckets: int) -> list[Diagnosis]:
    """What each setting that matters is, and what is wrong with it."""
    rules = _rules(buckets)
    return [rule.on(settings) for rule in rules] + list(_misspelt(settings, [rule.name for rule in rules]))


def _misspelt(settings: Mapping[str, str], known: Iterable[str]) -> Iterable[Diagnosis]:
    known = list(known)
    by_lower = {name.lower(): name for name in known}
    for name, value in settings.items():
        if name in known:
            continue
        likely = difflib.get_close_matches(name.lower(), list(by_lower), 1, _ALIKE)
        if likely:
            yield Diagnosis(name, value, "Spark does not know it", f"Did you mean {by_lower[likely[0]]}?")


def read_properties(path: Path) -> dict[str, str]:
    """The settings in a file such as ``spark-defaults.conf``: a name and a value a line, ``#`` begins a comment."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise StorageError(f"{path} cannot be read: {error}. Give a file of Spark settings.") from error
    found = {}
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        if not stripped or stripped.startswith("#"):
            continue
        name, value = _split(stripped)
        if not value:
            raise UsageError(f"line {number} of {path} has a name and no value: {stripped!r}")
        found[name] = value
    return found


def _split(line: str) -> tuple[str, str]:
    """As Java's properties: up to the first white space, equals sign or colon."""
    at = next((at for at, character in enumerate(line) if character.isspace() or character in "=:"), len(line))
    return line[:at], line[at:].strip().removeprefix("=").removeprefix(":").strip()
