"""A key as somebody writes it: as key columns, with its hash and its bucket."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from arrow_schemas.labels import buckets_of
from arrow_schemas.row import RowSchema
from arrow_schemas.spark_hash import key_hash
from spark_state_ext.errors import UsageError

__all__ = ["WantedKey"]


@dataclass(frozen=True)
class WantedKey:
    """One key.

    Parameters
    ----------
    columns
        Its columns, normalised, of one row each.
    hash
        Its hash, as files have it.
    """

    columns: tuple[pa.Array, ...]
    hash: int

    @staticmethod
    def of(key: Any, names: Sequence[str], schema: RowSchema) -> WantedKey:
        """A key as the user gave it.

        Parameters
        ----------
        key
            A value, where there is one key column; a tuple of values in the order of the columns; or a mapping.
        names
            Names of the key columns.
        schema
            The row schema.

        Raises
        ------
        UsageError
            When it is no key of this operator.
        """
        values = _values(key, names, schema)
        columns = []
        for name, value, field in zip(names, values, schema.keys, strict=True):
            try:
                columns.append(pa.array([value], field.type))
            except (pa.ArrowException, OverflowError, TypeError, ValueError) as error:
                raise UsageError(f"{value!r} is no value of the key column {name!r}, {field.type}: {error}") from error
        normal = tuple(schema.normalise_keys(columns))
        return WantedKey(normal, key_hash(normal))

    def bucket(self, buckets: int) -> int:
        """The bucket that it is in."""
        return int(buckets_of(np.array([self.hash], dtype=np.uint64), buckets)[0])


def _values(key: Any, names: Sequence[str], schema: RowSchema) -> Sequence[Any]:
    sole_struct = len(names) == 1 and pa.types.is_struct(schema.keys[0].type)
    if isinstance(key, Mapping) and not (sole_struct and set(key) != set(names)):
        if set(key) != set(names):
            raise UsageError(f"a key has the columns {', '.join(names)}, not {', '.join(map(str, key))}")
        return [key[name] for name in names]
    # A key of one column may itself be a list or a struct.
    if isinstance(key, tuple) and not (len(names) == 1 and len(key) != 1):
        if len(key) != len(names):
            raise UsageError(f"a key has the columns {', '.join(names)}, not {len(key)} values: {key!r}")
        return key
    if len(names) != 1:
        raise UsageError(f"a key has the columns {', '.join(names)}: give a tuple or a mapping, not {key!r}")
    return [key]
