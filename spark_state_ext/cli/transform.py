"""Savepoint transform: a new one of another one's rows, with other columns or fewer keys."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import typer

from arrow_schemas.equality import BoolArray, rows_equal
from arrow_schemas.operator import OperatorFile
from arrow_schemas.row import EXPIRES_MS, RowSchema
from arrow_schemas.savepoint import CANONICAL, SavepointManifest
from spark_state_ext.cli.options import (
    NewSavepointPath,
    OperatorOption,
    SavepointPath,
    StorageOptions,
    make_json_option,
)
from spark_state_ext.cli.output import say, show_progress
from spark_state_ext.cli.paths import open_folder
from spark_state_ext.cli.values import parse_filter
from spark_state_ext.errors import StateValueError, UsageError
from spark_state_ext.files.folder import Folder
from spark_state_ext.reading.shown import BUCKET, ShownColumns
from spark_state_ext.savepoints.manifest_file import read_manifest
from spark_state_ext.savepoints.reading import operator_named
from spark_state_ext.savepoints.writer import SavepointWriter, point_at_new

__all__ = ["Transformation", "cast_column", "change_operator", "transform", "write_transformed"]


def transform(
    path: SavepointPath,
    to: NewSavepointPath,
    operator: OperatorOption = None,
    rename: Annotated[list[str] | None, typer.Option(metavar="OLD=NEW", help="a key or state column")] = None,
    drop: Annotated[list[str] | None, typer.Option(metavar="COLUMN", help="a state column")] = None,
    retype: Annotated[
        list[str] | None, typer.Option(metavar="COLUMN=TYPE", help="a state column, to a type of Spark such as bigint")
    ] = None,
    keep: Annotated[
        str | None, typer.Option(metavar="FILTER", help="keep the keys that it is true of, such as: count > 10")
    ] = None,
    *,
    storage_options: StorageOptions,
    to_options: Annotated[dict[str, Any], make_json_option("the new one")],
) -> None:
    """Write a new canonical savepoint of a savepoint's rows, with other columns or fewer keys, without Spark.

    Columns are named as they are before the change. Batch, watermark, offsets and times to live stay; buckets, too.
    """
    source, target = open_folder(path, storage_options), open_folder(to, to_options)
    manifest = read_manifest(source)
    wanted = Transformation(
        operator_named(manifest, operator, source.root),
        _pairs(rename, "--rename"),
        tuple(drop or ()),
        _pairs(retype, "--retype"),
        keep,
    )
    with show_progress("transforming", len(manifest.buckets)) as advance:
        rows, saved = write_transformed(source, manifest, target, wanted, advance)
    say(f"rows={rows} kept={saved} to={target.root}")


def _pairs(given: list[str] | None, option: str) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for text in given or ():
        name, sign, value = text.partition("=")
        if not (sign and name and value):
            raise UsageError(f"{option} must be two names with = between them, not {text!r}")
        if name in pairs:
            raise UsageError(f"{option} names the column {name!r} twice")
        pairs[name] = value
    return pairs


# Spark's names of types in SQL, where these are others than in its JSON.
_SQL = {
    "tinyint": "byte",
    "smallint": "short",
    "int": "integer",
    "bigint": "long",
    "real": "float",
    "timestamp_ltz": "timestamp",
}
_TYPES = {"byte", "short", "integer", "long", "float", "double", "string", "binary", "boolean", "date", "timestamp"}
_TYPES |= {"timestamp_ntz"}
_DECIMAL = re.compile(r"decimal\(\d+,\d+\)")
_OTHERWISE = "Choose another type, or leave such keys out with --keep."


@dataclass(frozen=True)
class Transformation:
    """What becomes of the state of an operator."""

    # Which one. Others of the savepoint are compacted, and stay as they are otherwise.
    operator: str
    # New names by the old ones.
    rename: Mapping[str, str]
    drop: tuple[str, ...]
    # New types of state columns, as Spark's SQL calls them.
    retype: Mapping[str, str]
    # A filter over the columns as they were: other keys go. None: all stay.
    keep: str | None


# -- schemas --------------------------------------------------------------------------------------


def change_operator(operator: OperatorFile, wanted: Transformation) -> OperatorFile:
    """The operator file after a transformation."""
    keys, state = (json.loads(text) for text in (operator.key_schema, operator.state_schema))
    _refuse(operator, keys["fields"], state["fields"], wanted)
    kept = [field for field in state["fields"] if field["name"] not in wanted.drop]
    for field in kept:
        if field["name"] in wanted.retype:
            field["type"] = _type(wanted.retype[field["name"]])
    for field in (*keys["fields"], *kept):
        field["name"] = wanted.rename.get(field["name"], field["name"])
    for fields, what in ((keys["fields"], "key"), (kept, "state")):
        names = [field["name"] for field in fields]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise UsageError(f"there would be two {what} columns {twice!r}: rename to another name")
    made = replace(
        operator, key_schema=json.dumps(keys), state_schema=json.dumps({**state, "fields": kept}), schema_id=0
    )
    made.row_schema()
    return made


def _refuse(operator: OperatorFile, keys: list[Any], state: list[Any], wanted: Transformation) -> None:
    key_names, names = [it["name"] for it in keys], [it["name"] for it in state if it["name"] != EXPIRES_MS]
    changes = [*wanted.rename, *wanted.drop, *wanted.retype]
    if operator.function is not None and changes:
        raise UsageError(
            f"operator {operator.operator!r} is the built-in {json.loads(operator.function)['name']}, whose columns "
            "are its own: only --keep goes with it"
        )
    unknown = next((name for name in changes if name not in (*key_names, *names)), None)
    if unknown is not None:
        raise UsageError(f"there is no column {unknown!r}; there are {', '.join((*key_names, *names))}")
    for option, given in (("--drop", wanted.drop), ("--retype", tuple(wanted.retype))):
        key = next((name for name in given if name in key_names and name not in names), None)
        if key is not None:
            raise UsageError(f"{option} cannot name the key column {key!r}: keys are found by their hash")
    both = next((name for name in changes if name in key_names and name in names), None)
    if both is not None:
        raise UsageError(f"{both!r} is a key column and a state column, so it is not known which is meant")
    if set(wanted.drop) >= set(names):
        raise UsageError("a state needs a column: not all of them can be dropped")
    if any(new == EXPIRES_MS for new in wanted.rename.values()):
        raise UsageError(f"{EXPIRES_MS!r} is the package's own name for when a row expires: rename to another name")
    gone = next((name for name in wanted.drop if name in (*wanted.rename, *wanted.retype)), None)
    if gone is not None:
        raise UsageError(f"column {gone!r} is dropped, and cannot be renamed or get another type")


def _type(text: str) -> str:
    name = text.strip().lower().replace(" ", "")
    name = _SQL.get(name, name)
    if name not in _TYPES and not _DECIMAL.fullmatch(name):
        known = ", ".join(sorted({*_TYPES, *_SQL}))
        raise UsageError(f"{text!r} is no type that a column can be given here: {known}, or decimal(p,s)")
    return name


# -- rows -----------------------------------------------------------------------------------------


def write_transformed(
    source: Folder,
    manifest: SavepointManifest,
    target: Folder,
    wanted: Transformation,
    advance: Callable[[int], None] = lambda buckets: None,
) -> tuple[int, int]:
    """Write the new savepoint; how many rows the operator had, and has now."""
    operators = dict(manifest.header.operators)
    before = operators[wanted.operator]
    operators[wanted.operator] = after = change_operator(before, wanted)
    rows = _Rows(before.row_schema(), after.row_schema(), wanted)
    writer = SavepointWriter(source, manifest, target)
    for bucket in manifest.buckets:
        pointer, found = bucket.pointer, writer.read(bucket)
        if bucket.operator == wanted.operator:
            text = f"{writer.id} {pointer.operator} {pointer.bucket}"
            checkpoint_id = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
            pointer, found = point_at_new(replace(pointer, schema_id=0), checkpoint_id), rows.of(found)
        writer.write(pointer, operators[bucket.operator].row_schema(), found)
        advance(1)
    writer.finish(writer.changed_header(CANONICAL, operators))
    return rows.read, rows.kept


def cast_column(column: pa.Array, wanted: pa.DataType, name: str) -> pa.Array:
    """A column in another type, with the same values: Arrow refuses some changes of a value, and makes others."""
    if column.type == wanted:
        return column
    try:
        made = column.cast(wanted)
        changed = _is_too_large(column, made) if pa.types.is_string(column.type) else _differs(column, made)
    except pa.ArrowException as error:
        raise StateValueError(f"column {name!r} cannot become {wanted}: {error}. {_OTHERWISE}") from error
    if changed.any():
        at = int(changed.argmax())
        raise StateValueError(
            f"column {name!r} cannot become {wanted}: its value {column[at]} would become {made[at]}. {_OTHERWISE}"
        )
    return made


def _differs(column: pa.Array, made: pa.Array) -> BoolArray:
    """Of which rows the new value does not lead back to the old one."""
    return ~rows_equal([column], [made.cast(column.type)])


def _is_too_large(text: pa.Array, made: pa.Array) -> BoolArray:
    """Of which rows a number in digits became infinite. A value has several texts, so no way leads back."""
    if not pa.types.is_floating(made.type):
        return np.zeros(len(text), dtype=np.bool_)
    found = pc.and_(pc.is_inf(made), pc.match_substring_regex(text, "[0-9]")).fill_null(False)
    result: BoolArray = found.to_numpy(zero_copy_only=False)
    return result


class _Rows:
    """Rows as they become, counted on their way."""

    def __init__(self, before: RowSchema, after: RowSchema, wanted: Transformation) -> None:
        self.before, self.after = before, after
        self.read = self.kept = 0
        self._shown = ShownColumns(before)
        self._fields = pa.schema([field for field in self._shown.all if field.name != BUCKET])
        self._keep = None if wanted.keep is None else parse_filter(wanted.keep, self._fields)
        # Where each of the new state columns comes from.
        back = {new: old for old, new in wanted.rename.items()}
        self._sources = [f"state.{back.get(field.name, field.name)}" for field in after.state]

    def of(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The rows of a bucket, in their order."""
        for batch in batches:
            self.read += batch.num_rows
            left = batch if self._keep is None else batch.filter(self._mask(batch, self._keep))
            if left.num_rows:
                self.kept += left.num_rows
                yield self._changed(left)

    def _mask(self, batch: pa.RecordBatch, keep: pc.Expression) -> pa.Array:
        shown = self._shown.of(batch, self._fields, -1)
        numbers = pa.array(np.arange(batch.num_rows))
        # No column has an empty name.
        table = pa.Table.from_batches([shown]).append_column("", numbers)
        return pc.is_in(numbers, table.filter(keep).column("").combine_chunks())

    def _changed(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        arrow = self.after.arrow
        keys = len(self.before.keys)
        columns = list(batch.columns[: 1 + keys])
        for name, field in zip(self._sources, self.after.state, strict=True):
            column = batch.column(name)
            columns.append(cast_column(column, field.type, name.removeprefix("state.")))
        columns += [batch.column(name) for name in arrow.names[len(columns) :]]
        return pa.RecordBatch.from_arrays(columns, schema=arrow)
