"""Options of the data source ``arrow_state``, which Spark passes as strings."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from spark_state_ext.errors import UsageError

__all__ = ["CHANGES", "METADATA", "STATE", "TIMEOUTS", "SourceOptions"]

STATE, TIMEOUTS, METADATA, CHANGES = "state", "timeouts", "metadata", "changes"
_TABLES = (STATE, TIMEOUTS, METADATA)
_FLAGS = {"true": True, "false": False}


@dataclass(frozen=True)
class SourceOptions:
    """Options that say what a read of state returns.

    Parameters
    ----------
    path
        A root, a query folder or a savepoint.
    table
        `STATE`, `TIMEOUTS` or `METADATA`; or `CHANGES` if `from_batch` is given.
    operator, batch, query_folder, unproven, hold
        As for `open_state`.
    columns
        Names of columns; None for all.
    buckets
        Numbers of buckets; None for all.
    from_batch, to_batch
        The batches between which changes are read; `to_batch` is by default the newest.
    storage_options
        Options for the path's fsspec file system.
    """

    path: str
    table: str = STATE
    operator: str | None = None
    batch: int | None = None
    query_folder: str | None = None
    unproven: bool = False
    hold: bool = True
    columns: tuple[str, ...] | None = None
    buckets: tuple[int, ...] | None = None
    from_batch: int | None = None
    to_batch: int | None = None
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @staticmethod
    def of(options: Mapping[str, str]) -> SourceOptions:
        """Parse options. Names may be in any case, and without underscores: ``fromBatch`` is ``from_batch``."""
        names = {name.replace("_", ""): name for name in SourceOptions.__dataclass_fields__}
        texts: dict[str, str] = {}
        for key, text in options.items():
            name = names.get(key.lower().replace("_", ""))
            if name is None and key.lower().replace("_", "") == "checkpointlocation":
                raise UsageError(
                    "arrow_state cannot read exactly as of a committed batch, as a data source has no Spark session: "
                    "use read_state(spark, path, checkpoint_location=…)"
                )
            if name is None:
                similar = difflib.get_close_matches(key.lower(), SourceOptions.__dataclass_fields__, n=1)
                raise UsageError(
                    f"arrow_state has no option {key!r}{f'; most likely {similar[0]!r} is meant' if similar else ''}. "
                    f"It has {', '.join(SourceOptions.__dataclass_fields__)}"
                )
            texts[name] = text
        if "path" not in texts:
            raise UsageError("arrow_state needs a path: load(path), or option('path', …)")
        values: dict[str, Any] = {name: _READ.get(name, _parse_text)(name, text) for name, text in texts.items()}
        return SourceOptions(**values)._check()

    def _check(self) -> SourceOptions:
        if self.table not in _TABLES:
            raise UsageError(f"the option table must be one of {', '.join(_TABLES)}, not {self.table!r}")
        if self.to_batch is not None and self.from_batch is None:
            raise UsageError("the option to_batch needs from_batch: changes are read between two batches")
        if self.from_batch is None:
            return self
        if self.table != STATE or self.batch is not None or self.columns is not None:
            raise UsageError(
                "from_batch, which reads changes, cannot be used with the options table, batch and columns"
            )
        if self.to_batch is not None and self.to_batch < self.from_batch:
            raise UsageError(f"to_batch must not come before from_batch: {self.to_batch} is before {self.from_batch}")
        return SourceOptions(**{**self.__dict__, "table": CHANGES})


def _parse_text(name: str, text: str) -> str:
    return text


def _parse_number(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"the option {name} must be a whole number, not {text!r}") from None


def _parse_flag(name: str, text: str) -> bool:
    if text.lower() not in _FLAGS:
        raise UsageError(f"the option {name} must be true or false, not {text!r}")
    return _FLAGS[text.lower()]


def _parse_names(name: str, text: str) -> tuple[str, ...]:
    try:
        # Names that contain commas are given as a JSON list.
        names = json.loads(text) if text.startswith("[") else [part.strip() for part in text.split(",")]
    except ValueError:
        names = None
    if not isinstance(names, list) or not names or not all(isinstance(part, str) and part for part in names):
        raise UsageError(f"the option {name} must be names separated by commas, or a JSON list, not {text!r}")
    return tuple(names)


def _parse_numbers(name: str, text: str) -> tuple[int, ...]:
    return tuple(_parse_number(name, part.strip()) for part in text.split(","))


def _parse_mapping(name: str, text: str) -> dict[str, Any]:
    try:
        mapping = json.loads(text)
    except ValueError:
        mapping = None
    if not isinstance(mapping, dict):
        # Do not show the value, which may hold secrets.
        raise UsageError(f"the option {name} must be a JSON object, such as json.dumps of a dict")
    return mapping


_READ: dict[str, Any] = {
    "batch": _parse_number,
    "from_batch": _parse_number,
    "to_batch": _parse_number,
    "unproven": _parse_flag,
    "hold": _parse_flag,
    "columns": _parse_names,
    "buckets": _parse_numbers,
    "storage_options": _parse_mapping,
}
